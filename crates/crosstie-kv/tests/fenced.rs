//! A lock holder that is stopped for too long writes to the store after somebody else has taken its lock: the store refuses it.
//!
//! The test is rank 0 of a job of three processes; the other ranks are this same program. The last line is `N passed, N failed`.

use std::process::ExitCode;
use std::time::Duration;

use crosstie::bootstrap::{Bootstrap, Limits, SingleRank, local};
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig, MemberId};
use crosstie_kv::client::{Client, FencedOutcome};
use crosstie_kv::node::{Node, NodeConfig};
use crosstie_testkit::wait::{TIMEOUT, eventually};
use rustix::process::{Pid, Signal, getpid, kill_process};

const HOLDER: MemberId = MemberId::new(2);

fn main() -> ExitCode {
    if let Some(mut job) = local::join_spawned(Limits::default()).unwrap() {
        let name = std::env::args().nth(1).unwrap();
        run_member(&mut job, &name);
        return ExitCode::SUCCESS;
    }
    // Some test runners ask for a list.
    if std::env::args().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let name = format!("fenced-{}", std::process::id());
    let result = std::panic::catch_unwind(|| {
        let node = Node::start(&NodeConfig::single(&name)).unwrap();
        let mut job = local::JobBuilder::new(3).arguments([&name]).start().unwrap();
        run_member(&mut job, &name);
        write_in_groups_that_follow_each_other(&name);
        drop(job);
        drop(node);
    });
    let passed = result.is_ok();
    println!("late_write_of_a_stopped_holder_does_nothing: {}", if passed { "ok" } else { "FAILED" });
    println!("{} passed, {} failed", u8::from(passed), u8::from(!passed));
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_member(job: &mut dyn Bootstrap, name: &str) {
    let device = Device::open(&"software".parse().unwrap()).unwrap();
    let group = Group::join(job, &device, &GroupConfig::new(42)).unwrap();
    let mut store = Client::attach(name).unwrap();
    let lock = group.lock(0);
    match group.member().index() {
        2 => {
            let guard = lock.acquire().unwrap();
            let token = guard.fence();
            for key in [&b"plan"[..], b"other"] {
                assert_eq!(store.put_bytes_fenced(key, b"first", token).unwrap(), FencedOutcome::Done);
            }
            store.put_bytes(b"pid", &getpid().as_raw_nonzero().get().to_le_bytes()).unwrap();
            kill_process(getpid(), Signal::STOP).unwrap();
            // It does not know yet that it has lost the lock.
            let results = [
                store.put_bytes_fenced(b"plan", b"late", token).unwrap(),
                store.delete_bytes_fenced(b"plan", token).unwrap(),
                store.put_bytes_fenced(b"other", b"late", token).unwrap(),
            ];
            store.put_bytes(b"results", format!("{results:?}").as_bytes()).unwrap();
            std::thread::sleep(TIMEOUT);
        }
        0 => {
            eventually("the holder says who it is", || store.get_bytes(b"pid").unwrap().is_some());
            let pid = store.get_bytes(b"pid").unwrap().unwrap();
            let pid = i32::from_le_bytes(pid.try_into().unwrap());
            eventually("the holder stops", || is_stopped(pid));
            assert!(
                lock.acquire_timeout(Duration::from_millis(20)).is_err(),
                "the stopped process has the lock"
            );
            group.expel(HOLDER).unwrap();
            let guard = lock.acquire().unwrap();
            let token = guard.fence();
            assert_eq!(store.put_bytes_fenced(b"plan", b"new", token).unwrap(), FencedOutcome::Done);
            // A key that the new holder only relies on.
            assert_eq!(store.raise_fence(b"other", token).unwrap(), FencedOutcome::Done);
            kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
            eventually("the holder has tried to write", || store.get_bytes(b"results").unwrap().is_some());
            let results = String::from_utf8(store.get_bytes(b"results").unwrap().unwrap()).unwrap();
            let stale = FencedOutcome::Stale { newest: token };
            assert_eq!(results, format!("{:?}", [stale; 3]));
            assert_eq!(store.get_bytes(b"plan").unwrap().as_deref(), Some(&b"new"[..]));
            assert_eq!(store.get_bytes(b"other").unwrap().as_deref(), Some(&b"first"[..]));
            guard.release().unwrap();
        }
        // A third member, so that the others are a majority.
        _ => std::thread::sleep(TIMEOUT),
    }
}

/// As after restarts of a job: the holder in each later group writes, and the holder in the one before no longer.
fn write_in_groups_that_follow_each_other(name: &str) {
    let mut store = Client::attach(name).unwrap();
    let mut former = None;
    for _ in 0..3 {
        let device = Device::open(&"software".parse().unwrap()).unwrap();
        let mut job = SingleRank::new(Limits::default());
        let group = Group::join(&mut job, &device, &GroupConfig::new(1)).unwrap();
        let mut last = None;
        for _ in 0..10 {
            let guard = group.lock(3).acquire().unwrap();
            let token = guard.fence();
            assert_eq!(store.put_bytes_fenced(b"job", b"new", token).unwrap(), FencedOutcome::Done);
            if let Some(former) = former {
                let late = store.put_bytes_fenced(b"job", b"late", former).unwrap();
                assert_eq!(late, FencedOutcome::Stale { newest: token });
            }
            last = Some(token);
        }
        former = last;
    }
}

/// Whether a process is stopped: the third field of its `stat`.
fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
}
