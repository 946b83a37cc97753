//! Faults of the device: every post and every completion fails in turn; memory that is not there.

use std::time::Instant;

use crosstie::copyrpc::{CallFailed, Config, Context, Failure, NotCalled};
use crosstie::device::fault::Plan;
use crosstie::device::{Access, Device, DeviceSpec, PostError, Status, software};

use crate::side::{Side, TIMEOUT, Talk, User, bulk, exercise, pair, ring, settle};

/// Two sides with two connections, the left one on a device with faults; then whatever is over is replaced. Says how many posts
/// and completions there were.
fn with_faults(talk: Talk, plan: Plan, what: &str) -> (u64, u64) {
    let device = Device::open(&DeviceSpec::Software).unwrap().with_faults(plan);
    let control = device.faults().unwrap();
    let mut left = Side::new(device, &Config { receives: 16, ..Config::default() }, talk);
    let mut right = Side::software(talk);
    // Rounds, calls of an endpoint at a time, calls afterwards, regions that are READ into.
    let (config, rounds, depth, calls, regions) = match talk {
        Talk::Small => (ring(512), 30, 4, 100, 0),
        Talk::Bulk => (talk.config(), 8, 2, 16, 4),
    };
    for _ in 0..2 {
        left.connect(&mut right, &config);
    }
    let board = right.context.allocate(4096, Access::ALL).unwrap();
    board.write(0, &[0x77; 4096]).unwrap();
    left.regions = (0..regions).map(|_| left.context.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
    for round in 0..rounds {
        left.call(depth);
        right.call(depth);
        left.read(round % 2, board.remote());
        left.turn();
        right.turn();
    }
    settle(&mut left, &mut right, what);
    let counts = (control.posts(), control.completions());
    for index in 0..2 {
        if left.endpoints[index].failure().is_some() || right.endpoints[index].failure().is_some() {
            let (here, there) = pair(&left.context, &right.context, &config);
            drop(std::mem::replace(&mut left.endpoints[index], here));
            drop(std::mem::replace(&mut right.endpoints[index], there));
        }
    }
    assert_eq!(left.regions.len(), regions, "{what}: every region is back");
    left.failed.clear();
    right.failed.clear();
    let read = left.read;
    left.read(0, board.remote());
    exercise(&mut left, &mut right, calls, what);
    assert_eq!(left.read, read + regions as u64, "{what}");
    assert!(
        left.failed.is_empty() && right.failed.is_empty(),
        "{what}: {:?} {:?}",
        left.failed,
        right.failed
    );
    counts
}

/// More posts and completions than `enough` must be there to be hit.
fn every_fault(talk: Talk, enough: (u64, u64), statuses: &[Status]) {
    let (posts, completions) = with_faults(talk, Plan::none(), "no fault");
    println!("{posts} posts, {completions} completions");
    assert!(posts > enough.0 && completions > enough.1, "faults need something to hit");
    let mut plans = Vec::new();
    for k in 0..posts {
        plans.push((Plan::none().fail_post(k, PostError::Full), format!("post {k} full")));
        // What the set-up posts is posted before there is a connection that could fail.
        if k >= 16 {
            let refused = Plan::none().fail_post(k, PostError::Device(libc::EIO));
            plans.push((refused, format!("post {k} refused")));
        }
        plans.push((Plan::none().lose_post(k, Status::RetryExceeded), format!("post {k} lost")));
        plans.push((Plan::none().port_down(k, 500), format!("port down at post {k}")));
    }
    for k in 0..completions {
        for &status in statuses {
            plans.push((Plan::none().fail_completion(k, status), format!("completion {k}: {status}")));
        }
        plans.push((Plan::none().delay_completion(k, 50), format!("completion {k} late")));
        plans.push((Plan::none().overtake_completion(k), format!("completion {k} overtaken")));
    }
    println!("{} runs", plans.len());
    // Most of the time goes by until a silent peer is asked: side by side it is short.
    let plans = std::sync::Mutex::new(plans);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let Some((plan, what)) = plans.lock().unwrap().pop() else { break };
                    with_faults(talk, plan, &what);
                }
            });
        }
    });
}

#[test]
fn every_post_and_every_completion_fails_in_turn() {
    every_fault(Talk::Small, (50, 20), &[Status::RetryExceeded, Status::Fatal]);
}

#[test]
fn every_post_and_every_completion_of_bulk_calls_fails_in_turn() {
    every_fault(Talk::Bulk, (60, 40), &[Status::RetryExceeded]);
}

#[test]
fn a_device_without_memory() {
    // The left one has little memory, the right one has enough. Neither waits for what never comes.
    let little = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
    let (left, right) =
        (Context::<User>::new(little, &Config::default()).unwrap(), Side::software(Talk::Bulk).context);
    let config = bulk(256 << 20);
    let (here, there) = pair(&left, &right, &config);
    let long = vec![1; 200 << 20];
    let refused = here.call(&long, 8, (0, 0)).unwrap_err();
    assert_eq!(refused.cause, NotCalled::NoMemory);
    assert!(!refused.cause.is_back_pressure());
    there.call(&long, 8, (0, 1)).unwrap();
    let begin = Instant::now();
    let mut ended = None;
    while ended.is_none() {
        left.poll(|_, _| ());
        right.poll(|_, answer| ended = Some(answer.map(|_| ())));
        assert!(begin.elapsed() < TIMEOUT);
    }
    assert!(matches!(ended, Some(Err(CallFailed::Connection(Failure::Broken(_))))), "{ended:?}");
    assert_eq!(here.failure(), Some(Failure::NoMemory));
}
