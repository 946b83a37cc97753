//! A peer that is killed and started again, 100 times: every operation ends with a cause, and the new peer is reached without restarting
//! this side.

use std::time::{Duration, Instant};

use crosstie::device::DeviceSpec;
use crosstie::endpoint::{Cause, Endpoint, EndpointAddress, EndpointConfig, NotStarted};
use crosstie::region::{DESCRIPTOR_SIZE, RemoteRegion, Rights};
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::rng;

/// Nothing takes longer, unless it hangs.
const HANG: Duration = Duration::from_secs(60);
const READ_WRITE: Rights = Rights { read: true, write: true, atomic: false };
const RESTARTS: usize = 100;
const LEN: usize = 1 << 20;

#[test]
fn a_peer_that_is_killed_and_restarted_100_times_is_reached_again() {
    if child::is_child() {
        return run_peer();
    }
    let mut random = rng::Random(rng::seed());
    let endpoint = open();
    let mut descriptors: Vec<RemoteRegion> = Vec::new();
    let mut causes = std::collections::BTreeMap::new();
    let (mut slowest_end, mut slowest_restart) = (Duration::ZERO, Duration::ZERO);
    for restart in 0..RESTARTS {
        let begin = Instant::now();
        if restart > 0 {
            endpoint.reopen().unwrap();
        }
        let (mut peer, remote) = start_peer(&endpoint);
        // Descriptors of its former lives are recognised.
        for old in &descriptors {
            assert!(matches!(endpoint.import(old, READ_WRITE), Err(NotStarted::ForeignRegion)));
        }
        descriptors.push(remote);
        let remote = endpoint.import(&remote, READ_WRITE).unwrap();
        let read = endpoint.read(endpoint.allocate(LEN).unwrap(), .., &remote, 0).unwrap();
        let read = read.wait_for(HANG).expect("ended").expect("read");
        assert!(read.buffer.to_vec().iter().all(|byte| *byte == 7), "the memory of the new peer");
        slowest_restart = slowest_restart.max(begin.elapsed());

        // Operations of all kinds under way.
        let (mut buffers, mut others) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let allocate = || endpoint.allocate(LEN).unwrap();
            buffers.push(endpoint.send(allocate(), ..).unwrap());
            buffers.push(endpoint.recv(allocate(), ..).unwrap());
            buffers.push(endpoint.write_imm(allocate(), .., &remote, 0, 1).unwrap());
            others.push(endpoint.imm_recv().unwrap());
        }
        std::thread::sleep(Duration::from_micros(random.below(2000)));
        peer.signal(libc::SIGKILL);
        let killed = Instant::now();
        for future in buffers {
            match future.wait_for(HANG).expect("an operation with a dead peer ends") {
                Ok(_) => *causes.entry("success".to_owned()).or_insert(0) += 1,
                Err(failed) => {
                    assert!(
                        matches!(failed.cause, Cause::RemoteGone(_) | Cause::Flushed | Cause::PeerClosed),
                        "{failed}"
                    );
                    assert!(failed.peer.is_some());
                    *causes.entry(failed.cause.to_string()).or_insert(0) += 1;
                    let buffer = failed.buffer.wait_for(HANG).expect("the buffer comes back");
                    assert_eq!(buffer.len(), LEN);
                }
            }
        }
        for future in others {
            assert!(future.wait_for(HANG).expect("an operation with a dead peer ends").is_err());
        }
        slowest_end = slowest_end.max(killed.elapsed());
        assert!(endpoint.ended().is_some());
        let refused = endpoint.send(endpoint.allocate(8).unwrap(), ..).unwrap_err();
        assert!(matches!(refused.cause, NotStarted::Ended(_)), "{}", refused.cause);
        peer.wait();
    }
    println!("{RESTARTS} restarts, {causes:?}");
    println!("slowest from SIGKILL to the end of the last operation: {slowest_end:.2?}");
    println!("slowest from restart to the end of the first operation: {slowest_restart:.2?}");
    let counters = endpoint.counters();
    assert_eq!(counters.connections, RESTARTS as u64);
    assert_eq!(
        (counters.leased_slots, counters.held_operations, counters.stale_completions),
        (0, 0, 0),
        "{counters:?}"
    );
}

fn open() -> Endpoint {
    Endpoint::open(
        &DeviceSpec::Software,
        &EndpointConfig { deadline: Some(HANG), ..EndpointConfig::default() },
    )
    .unwrap()
}

/// Starts the peer and connects an endpoint with it. Returns its region.
fn start_peer(endpoint: &Endpoint) -> (Child, RemoteRegion) {
    let mut peer = Child::start(a_peer_that_is_killed_and_restarted_100_times_is_reached_again, "answers");
    let (address, region) = (peer.read(), peer.read());
    peer.write(&endpoint.address().to_bytes());
    endpoint.connect(&EndpointAddress::from_bytes(&address).unwrap()).unwrap();
    assert_eq!(peer.read_text(), "connected");
    let region: [u8; DESCRIPTOR_SIZE] = region.try_into().unwrap();
    (peer, RemoteRegion::decode(&region).unwrap())
}

/// The peer: lets the other side read its memory, takes and sends some messages, until it is killed.
fn run_peer() {
    let endpoint = open();
    let buffer = endpoint.allocate(LEN).unwrap();
    buffer.write(0, &[7; LEN]).unwrap();
    child::write(&endpoint.address().to_bytes());
    child::write(&endpoint.describe(&buffer).encode());
    endpoint.connect(&EndpointAddress::from_bytes(&child::read()).unwrap()).unwrap();
    child::write(b"connected");
    let received = endpoint.recv(endpoint.allocate(LEN).unwrap(), ..).unwrap();
    let sent = endpoint.send(endpoint.allocate(LEN).unwrap(), ..).unwrap();
    // The other side does not read our result; it kills us.
    drop((received.wait(), sent.wait()));
    std::thread::sleep(2 * HANG);
}
