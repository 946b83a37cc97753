//! What an idle group costs.

use std::time::Duration;

use crosstie::bootstrap::{Bootstrap, Limits, local};
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig};
use crosstie_testkit::child;
use crosstie_testkit::footprint::processor_time;

/// Two members, whose group threads are parked while their application threads sleep.
#[test]
fn idle_members_use_less_than_two_hundredths_of_a_core() {
    if child::run_alone(idle_members_use_less_than_two_hundredths_of_a_core) {
        return;
    }
    std::thread::scope(|scope| {
        for mut job in local::in_process(2, Limits::default()).unwrap() {
            scope.spawn(move || {
                let device = Device::open(&"software".parse().unwrap()).unwrap();
                let group = Group::join(&mut job, &device, &GroupConfig::new(7)).unwrap();
                group.barrier(0).wait().unwrap();
                job.barrier().unwrap();
                let before = processor_time();
                std::thread::sleep(Duration::from_secs(3));
                let used = (processor_time() - before).as_secs_f64() / 3.0;
                // Each member sleeps for three seconds, at the same time: this counts both.
                assert!(used < 0.02, "two idle members use {used:.4} of a core");
                job.barrier().unwrap();
            });
        }
    });
}
