//! The budget of a flux call: no allocation and no system call, at any depth, with replies in order or not.
//!
//! One thread drives both nodes, so that the counts are exact. A seccomp filter in a child process kills it at the first
//! system call.

#[path = "allocations/mod.rs"]
mod allocations;
#[path = "seccomp/mod.rs"]
mod seccomp;

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use allocations::ALLOCATIONS;
use crosstie::flux::{Config, Node, Ticket, network};

const WARM_UP: u64 = 2_000;
const MEASURED: u64 = 100_000;
/// Tells a child process of this test its task.
const CHILD: &str = "CROSSTIE_FLUX_BUDGET_CHILD";

type Message = [u64; 4];

/// Two nodes in one thread.
struct Pair {
    caller: Node<Message, Message, u64>,
    callee: Node<Message, Message, u64>,
    deferred: VecDeque<(Message, Ticket)>,
    made: u64,
}

impl Pair {
    fn new() -> Pair {
        let mut nodes = network(2, &Config::default()).unwrap();
        let (callee, caller) = (nodes.pop().unwrap(), nodes.pop().unwrap());
        Pair { caller, callee, deferred: VecDeque::with_capacity(64), made: 0 }
    }

    /// Makes calls with `depth` in flight at a time and replies in order or in reverse order, until all have their responses.
    fn exchange(&mut self, calls: u64, depth: usize, in_order: bool) {
        let end = self.made + calls;
        while self.made < end || self.caller.in_flight() > 0 {
            while self.made < end && self.caller.in_flight() < depth {
                self.caller.call(1, [self.made; 4], self.made).unwrap();
                self.made += 1;
            }
            while let Some((from, request, ticket)) = self.callee.try_recv() {
                assert_eq!(from, 0);
                self.deferred.push_back((request, ticket));
            }
            while let Some((request, ticket)) =
                if in_order { self.deferred.pop_front() } else { self.deferred.pop_back() }
            {
                self.callee.reply(ticket, request).unwrap();
            }
            self.caller.poll(|token, response| assert_eq!(response, [token; 4]));
            self.caller.take_lost(|_| unreachable!());
        }
    }
}

const PATTERNS: [(usize, bool); 4] = [(1, true), (32, true), (64, true), (32, false)];

#[test]
fn calls_do_not_allocate() {
    let mut pair = Pair::new();
    for (depth, in_order) in PATTERNS {
        pair.exchange(WARM_UP, depth, in_order);
        let before = ALLOCATIONS.get();
        pair.exchange(MEASURED, depth, in_order);
        let count = ALLOCATIONS.get() - before;
        assert_eq!(
            count, 0,
            "depth {depth}, in order {in_order}: calls to the allocator in {MEASURED} calls"
        );
    }
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get() - before, 2, "the allocator counts");
}

#[test]
fn calls_make_no_system_call() {
    const NAME: &str = "calls_make_no_system_call";
    if let Ok(task) = std::env::var(CHILD) {
        let mut pair = Pair::new();
        pair.exchange(WARM_UP, 1, true);
        seccomp::install_filter(&[libc::SYS_exit_group], seccomp::FilterMode::AllowOnly);
        for (depth, in_order) in PATTERNS {
            pair.exchange(MEASURED, depth, in_order);
        }
        if task == "violating" {
            std::hint::black_box(std::process::id());
        }
        // SAFETY: no memory is involved.
        unsafe { libc::_exit(0) }
    }
    let child = |task: &str| {
        Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact"])
            .env(CHILD, task)
            .output()
            .unwrap()
    };
    let compliant = child("compliant");
    assert!(compliant.status.success(), "a call made a system call, or failed: {compliant:?}");
    let violating = child("violating");
    assert_eq!(violating.status.signal(), Some(libc::SIGSYS), "the filter kills: {violating:?}");
}
