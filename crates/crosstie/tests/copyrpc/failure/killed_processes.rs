//! Processes that are killed in the middle of calls.

use std::time::{Duration, Instant};

use crosstie::copyrpc::ConnectionAddress;
use crosstie::device::ConnectConfig;
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::rng::{Random, seed};
use crosstie_testkit::wait::until;
use zerocopy::{FromBytes, IntoBytes};

use super::test_peer::{TIMEOUT, TestPeer, Workload, exercise, finish_open_calls, sides};

#[test]
fn killed_process_does_not_affect_other_connections() {
    killed(Workload::Small, 60, Duration::from_millis(20), 50);
}

#[test]
fn killed_process_with_bulk_calls_leaks_nothing() {
    killed(Workload::Bulk, 20, Duration::from_millis(30), 20);
}

/// Starts and kills a process `kills` times, each after up to `delay`. Three of four answer at least `answers` calls first.
fn killed(workload: Workload, kills: u32, delay: Duration, answers: u64) {
    let mut random = Random(seed());
    // The survivor: a context with one permanent connection, and one to the process that is killed next.
    let (mut left, mut right) = sides(workload);
    let mut slowest = Duration::ZERO;
    for kill in 0..kills {
        let mut child = start_victim(&mut left, &format!("{workload:?}"));
        let begin = Instant::now();
        let delay = Duration::from_micros(random.below(delay.as_micros() as u64));
        // Some are killed before their first response, some under load.
        let wanted = left.answered + if kill % 4 == 0 { 0 } else { answers };
        while begin.elapsed() < delay || left.answered < wanted {
            left.call(workload.depth());
            left.turn();
            right.turn();
            assert!(begin.elapsed() < TIMEOUT, "kill {kill}: the victim never answered");
        }
        child.kill();
        let begin = Instant::now();
        until(format_args!("kill {kill}: the dead peer is detected"), || {
            left.call(workload.depth());
            left.turn();
            right.turn();
            left.connections[1].failure().is_some()
        });
        slowest = slowest.max(begin.elapsed());
        finish_open_calls(&mut left, &mut right, "after a kill");
        assert!(left.failed.iter().all(|((index, _), _)| *index == 1), "{:?}", left.failed);
        left.failed.clear();
        drop(left.connections.pop());
        exercise(&mut left, &mut right, 6 * workload.depth() as u64, "the steady connection");
    }
    println!(
        "{kills} kills; slowest from SIGKILL to the end of all calls: {slowest:?}; {:?}",
        left.context.counters()
    );
    assert_eq!(left.context.counters().failures, u64::from(kills));
}

/// A process that calls and answers, or does nothing, until it is killed. It does nothing unless a test starts it.
#[test]
fn victim() {
    let Some(task) = child::task() else { return };
    let workload = if task.contains("Bulk") { Workload::Bulk } else { Workload::Small };
    let mut side = TestPeer::software(workload);
    let connection = side.context.create_connection(&workload.config()).unwrap();
    child::write(connection.address().as_bytes());
    let theirs = ConnectionAddress::read_from_bytes(&child::read()).unwrap();
    connection.connect(&theirs, &ConnectConfig::default()).unwrap();
    side.connections.push(connection);
    loop {
        if task == SILENT {
            std::thread::park();
        } else {
            side.call(workload.depth());
            side.turn();
        }
    }
}

/// Task of a [`victim`] that does nothing.
pub(super) const SILENT: &str = "silent";

/// Starts a [`victim`], and connects a new connection of `side` to it.
pub(super) fn start_victim(side: &mut TestPeer, task: &str) -> Child {
    let mut child = Child::start(victim, task);
    let connection = side.context.create_connection(&side.workload.config()).unwrap();
    child.write(connection.address().as_bytes());
    let theirs = ConnectionAddress::read_from_bytes(&child.read()).unwrap();
    connection.connect(&theirs, &ConnectConfig::default()).unwrap();
    side.connections.push(connection);
    child
}
