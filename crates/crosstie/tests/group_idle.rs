//! What an idle group costs. Alone in its process, because it measures the processor time of the process.

use std::time::Duration;

use crosstie::bootstrap::{Bootstrap, Limits, local};
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig};

/// Two members, whose group threads are parked while their application threads sleep.
#[test]
fn idle_members_use_less_than_two_hundredths_of_a_core() {
    std::thread::scope(|scope| {
        for mut job in local::in_process(2, Limits::default()).unwrap() {
            scope.spawn(move || {
                let device = Device::open(&"software".parse().unwrap()).unwrap();
                let group = Group::join(&mut job, &device, &GroupConfig::new(7)).unwrap();
                group.barrier(0).wait().unwrap();
                job.barrier().unwrap();
                let before = process_time();
                std::thread::sleep(Duration::from_secs(3));
                let used = (process_time() - before) / 3.0;
                // Each member sleeps for three seconds, at the same time: this counts both.
                assert!(used < 0.02, "two idle members use {used:.4} of a core");
                job.barrier().unwrap();
            });
        }
    });
}

/// Seconds of processor time that this process has used.
fn process_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(result, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
