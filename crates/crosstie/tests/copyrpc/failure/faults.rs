//! Faults of the device: every post and every completion fails once, in turn; and a device without memory.

use std::time::Instant;

use crosstie::copyrpc::{CallFailed, Config, Context, NotCalled};
use crosstie::device::fault::Plan;
use crosstie::device::{Access, Device, DeviceSpec, PostError, Status, software};

use super::test_peer::{TIMEOUT, TestPeer, User, Workload, bulk, exercise, finish_open_calls, ring};
use crate::connect_pair;

/// Two sides with two connections; the left side's device has faults, the last of them after so many posts and completions. Then
/// connections that ended are replaced, and everything must work again. Returns the number of posts and completions.
fn with_faults(workload: Workload, plan: Plan, last: (u64, u64), what: &str) -> (u64, u64) {
    let device = Device::open(&DeviceSpec::Software).unwrap().with_faults(plan);
    let control = device.faults().unwrap();
    let mut left = TestPeer::new(device, &Config { receives: 16, ..Config::default() }, workload);
    let mut right = TestPeer::software(workload);
    // Rounds, calls in flight per connection, calls afterwards, regions for READs.
    let (config, rounds, depth, calls, regions) = match workload {
        Workload::Small => (ring(512), 30, 4, 100, 0),
        Workload::Bulk => (workload.config(), 8, 2, 16, 4),
    };
    for _ in 0..2 {
        left.connect(&mut right, &config);
    }
    let board = right.context.allocate(4096, Access::ALL).unwrap();
    board.write(0, &[0x77; 4096]).unwrap();
    left.regions = (0..regions).map(|_| left.context.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
    // Receives are posted and peers are probed by time, so the number of posts is not the same in every run.
    let begin = Instant::now();
    for round in 0.. {
        if round >= rounds && control.posts() >= last.0 && control.completions() >= last.1 {
            break;
        }
        assert!(begin.elapsed() < TIMEOUT, "{what}: the fault did not happen");
        left.call(depth);
        right.call(depth);
        left.read(round % 2, board.remote());
        left.turn();
        right.turn();
    }
    finish_open_calls(&mut left, &mut right, what);
    let counts = (control.posts(), control.completions());
    for index in 0..2 {
        if left.connections[index].failure().is_some() || right.connections[index].failure().is_some() {
            let (here, there) = connect_pair(&left.context, &right.context, &config);
            drop(std::mem::replace(&mut left.connections[index], here));
            drop(std::mem::replace(&mut right.connections[index], there));
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

/// Runs once for each possible fault. There must be more posts and completions than `enough`.
fn every_fault(workload: Workload, enough: (u64, u64), statuses: &[Status]) {
    let (posts, completions) = with_faults(workload, Plan::none(), (0, 0), "no fault");
    println!("{posts} posts, {completions} completions");
    assert!(posts > enough.0 && completions > enough.1, "faults need something to hit");
    let mut plans = Vec::new();
    for k in 0..posts {
        let last = (k + 1, 0);
        plans.push((Plan::none().fail_post(k, PostError::Full), last, format!("post {k} full")));
        // The first 16 posts are receives, posted before there is a connection that could fail.
        if k >= 16 {
            let refused = Plan::none().fail_post(k, PostError::Device(libc::EIO));
            plans.push((refused, last, format!("post {k} refused")));
        }
        plans.push((Plan::none().lose_post(k, Status::RetryExceeded), last, format!("post {k} lost")));
        plans.push((Plan::none().port_down(k, 500), last, format!("port down at post {k}")));
    }
    for k in 0..completions {
        let last = (0, k + 1);
        for &status in statuses {
            plans.push((Plan::none().fail_completion(k, status), last, format!("completion {k}: {status}")));
        }
        plans.push((Plan::none().delay_completion(k, 50), last, format!("completion {k} late")));
        plans.push((Plan::none().overtake_completion(k), last, format!("completion {k} overtaken")));
    }
    println!("{} runs", plans.len());
    // Most of the time is spent waiting for the probe of a silent peer, so run several at once.
    let plans = std::sync::Mutex::new(plans);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let Some((plan, last, what)) = plans.lock().unwrap().pop() else { break };
                    with_faults(workload, plan, last, &what);
                }
            });
        }
    });
}

#[test]
fn calls_end_when_any_post_or_completion_fails() {
    every_fault(Workload::Small, (50, 20), &[Status::RetryExceeded, Status::Fatal]);
}

#[test]
fn bulk_calls_end_when_any_post_or_completion_fails() {
    every_fault(Workload::Bulk, (60, 40), &[Status::RetryExceeded]);
}

/// The left device has little memory, the right one has enough. A long request that the left device has no memory for is refused,
/// in both directions; it delays no request behind it, the connection goes on, and the same request succeeds once there is memory.
#[test]
fn device_without_memory_refuses_bulk_calls_and_the_connection_goes_on() {
    let little = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
    let (left, right) = (
        Context::<User>::new(little, &Config::default()).unwrap(),
        TestPeer::software(Workload::Bulk).context,
    );
    let (here, there) = connect_pair(&left, &right, &bulk(256 << 20));
    let too_long = vec![1; 200 << 20];
    let refused = here.call(&too_long, 8, (0, 0)).unwrap_err();
    assert_eq!(refused.cause, NotCalled::NoMemory);
    assert!(!refused.cause.is_back_pressure());

    // The request that does not fit is followed by one that is long and fits, and by a short one.
    let in_the_way = left.allocate(28 << 20, Access::empty()).unwrap();
    let (long, fits) = (vec![2; 20 << 20], vec![3; 1 << 20]);
    let mut ended = Vec::new();
    let run = |ended: &mut Vec<(User, Result<Vec<u8>, CallFailed>)>, count: usize| {
        let begin = Instant::now();
        while ended.len() < count {
            left.poll(|_, _| ());
            while let Some(request) = left.recv() {
                let (len, first) = (request.data().len() as u32, request.data().to_vec()[0]);
                assert!(request.reply(&[len.to_le_bytes(), [first; 4]].concat()).is_ok());
            }
            right.poll(|user, answer| ended.push((user, answer.map(|bytes| bytes.to_vec()))));
            assert!(begin.elapsed() < TIMEOUT, "{ended:?}");
        }
    };
    let answer = |len: usize, byte: u8| Ok([(len as u32).to_le_bytes(), [byte; 4]].concat());
    for round in 0..3 {
        there.call(&too_long, 8, (round, 0)).unwrap();
        there.call(b"short", 8, (round, 3)).unwrap();
        run(&mut ended, 2);
        ended.sort_by_key(|(user, _)| *user);
        let expected = [((round, 0), Err(CallFailed::NoMemory)), ((round, 3), answer(5, b's'))];
        assert_eq!(std::mem::take(&mut ended), expected);
    }
    there.call(&long, 8, (5, 1)).unwrap();
    there.call(&fits, 8, (5, 2)).unwrap();
    there.call(b"short", 8, (5, 3)).unwrap();
    run(&mut ended, 3);
    ended.sort_by_key(|(user, _)| *user);
    let expected =
        [((5, 1), Err(CallFailed::NoMemory)), ((5, 2), answer(fits.len(), 3)), ((5, 3), answer(5, b's'))];
    assert_eq!(std::mem::take(&mut ended), expected);
    assert_eq!(left.counters().bulk_refused, 4);

    drop(in_the_way);
    there.call(&long, 8, (6, 0)).unwrap();
    run(&mut ended, 1);
    assert_eq!(ended, [((6, 0), answer(long.len(), 2))]);
    assert!(here.failure().is_none() && there.failure().is_none());
}
