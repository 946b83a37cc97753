//! What idle endpoints with progress threads cost.

use std::time::Duration;

use crosstie::endpoint::{Endpoint, EndpointConfig};
use crosstie_testkit::child;
use crosstie_testkit::footprint::processor_time;

/// Seconds that are measured.
const SECONDS: f64 = 3.0;

/// Two connected endpoints, each with a parked progress thread, a `recv` and an `imm_recv` that wait for the peer. They have worked
/// before: the threads must come to rest again.
#[test]
fn idle_endpoints_use_less_than_two_hundredths_of_a_core() {
    if child::run_alone(idle_endpoints_use_less_than_two_hundredths_of_a_core) {
        return;
    }
    let endpoint = || Endpoint::open(&"software".parse().unwrap(), &EndpointConfig::default()).unwrap();
    let (here, there) = (endpoint(), endpoint());
    here.connect(&there.address()).unwrap();
    there.connect(&here.address()).unwrap();
    for _ in 0..100 {
        let recv = there.recv(there.allocate(64).unwrap(), ..).unwrap();
        here.send(here.allocate(64).unwrap(), ..).unwrap().wait().unwrap();
        recv.wait().unwrap();
    }
    let waiting = [&here, &there].map(|endpoint| {
        (endpoint.recv(endpoint.allocate(64).unwrap(), ..).unwrap(), endpoint.imm_recv().unwrap())
    });
    std::thread::sleep(Duration::from_millis(200));
    let before = processor_time();
    std::thread::sleep(Duration::from_secs_f64(SECONDS));
    let each = (processor_time() - before).as_secs_f64() / SECONDS / 2.0;
    println!("an idle endpoint uses {:.3} % of a core", 100.0 * each);
    assert!(each < 0.02, "an idle endpoint uses {each:.4} of a core");
    // They still work.
    let target = there.allocate(64).unwrap();
    here.write_imm(here.allocate(64).unwrap(), .., &target.remote(), 0, 7).unwrap().wait().unwrap();
    let [_, (_, event)] = waiting;
    assert_eq!(event.wait().unwrap().imm, Some(7));
}
