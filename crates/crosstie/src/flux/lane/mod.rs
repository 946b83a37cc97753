//! The lanes of a network, and their two ends: [`OutgoingLane`] of the caller, [`IncomingLanes`] of the callee. All
//! `unsafe` code of flux is in this directory; [`slot`] says who may touch what.

mod incoming;
mod node_state;
mod outgoing;
mod slot;

pub(super) use incoming::IncomingLanes;
pub use incoming::{Request, Ticket};
pub(super) use outgoing::OutgoingLane;

use self::incoming::IncomingLane;
use self::node_state::NodeState;
use self::slot::{Slot, Slots};
use self::sync::Arc;
use crate::ring::call_table::CallTable;
use crate::ring::lane::Cursor;

/// Bytes of memory of the slots of one lane.
pub(super) const fn lane_bytes<Req, Resp>(queue_depth: usize) -> usize {
    CallTable::<()>::slots_for(queue_depth).saturating_mul(size_of::<Slot<Req, Resp>>())
}

/// Bytes of memory of the caller's call table of one lane.
pub(super) const fn call_table_bytes<Token>(queue_depth: usize) -> usize {
    CallTable::<Token>::bytes_for(queue_depth)
}

/// The lanes of one node: those on which it calls, by target, and those on which it is called.
pub(super) type NodeLanes<Req, Resp, Token> =
    (Box<[OutgoingLane<Req, Resp, Token>]>, IncomingLanes<Req, Resp>);

/// Creates the lanes between all nodes, and returns the lanes of each node. The keys of the lanes start at `first_key`.
pub(super) fn create_lanes<Req, Resp, Token>(
    nodes: usize,
    queue_depth: usize,
    first_key: u64,
) -> Vec<NodeLanes<Req, Resp, Token>> {
    let node_states: Vec<Arc<NodeState>> = (0..nodes).map(|_| Arc::new(NodeState::default())).collect();
    // As many as a call table and a cursor have: the ends of a lane rely on that.
    let slots = CallTable::<Token>::slots_for(queue_depth);
    let lanes: Vec<Slots<Req, Resp>> =
        (0..nodes * nodes).map(|_| sync::collect((0..slots).map(|_| Slot::new()))).collect();
    let outgoing = |from: usize, to: usize| OutgoingLane {
        slots: lanes[from * nodes + to].clone(),
        calls: CallTable::new(queue_depth),
        callee: node_states[to].clone(),
        target: to,
    };
    let incoming = |from: usize, to: usize| IncomingLane {
        slots: lanes[from * nodes + to].clone(),
        caller: node_states[from].clone(),
        cursor: Cursor::new(slots),
        unanswered: vec![false; slots].into(),
        key: first_key + (from * nodes + to) as u64,
    };
    let lanes_of = |node| {
        let callers = (0..nodes).map(|target| outgoing(node, target)).collect();
        let callees = IncomingLanes {
            lanes: (0..nodes).map(|from| incoming(from, node)).collect(),
            node_states: node_states.clone().into(),
            own_id: node,
            current: 0,
            left_in_burst: 0,
            found_requests: false,
            handled_departures: 0,
        };
        (callers, callees)
    };
    (0..nodes).map(lanes_of).collect()
}

/// Atomics and cells: the real ones or, in tests under `cfg(loom)`, loom's.
mod sync {
    #[cfg(not(all(test, loom)))]
    pub(super) use std::sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64},
    };

    #[cfg(all(test, loom))]
    pub(super) use loom::{
        cell::UnsafeCell,
        sync::{
            Arc,
            atomic::{AtomicU32, AtomicU64},
        },
    };

    #[cfg(not(all(test, loom)))]
    pub(super) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    #[cfg(not(all(test, loom)))]
    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            UnsafeCell(core::cell::UnsafeCell::new(value))
        }

        #[inline]
        pub(super) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
            access(self.0.get())
        }
    }

    pub(super) fn collect<T>(items: impl Iterator<Item = T>) -> Arc<[T]> {
        let items: std::sync::Arc<[T]> = items.collect();
        #[cfg(all(test, loom))]
        let items = Arc::from_std(items);
        items
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::sync::atomic::Ordering::{self, Relaxed, Release};

    use loom::thread;

    use super::*;

    /// One node calls twice. The other node receives what it sees, replies to the first request, and leaves. Every call must
    /// end once: with its response, lost after it was received, or handed back because it was not received.
    fn check_departure(order: Ordering) {
        loom::model(move || {
            let mut nodes = create_lanes::<u32, u32, u32>(2, 2, 0);
            let (leaving_outgoing, mut leaving) = nodes.pop().unwrap();
            let (mut outgoing, staying) = nodes.pop().unwrap();
            let leaver = thread::spawn(move || {
                let first = leaving.receive().map(Request::defer);
                let second = leaving.receive().map(Request::defer);
                let received: Vec<u32> =
                    [&first, &second].into_iter().flatten().map(|(request, _)| *request).collect();
                if let Some((request, ticket)) = first {
                    assert!(leaving.reply(ticket, request + 100).is_ok());
                }
                leaving.leave(order);
                drop(leaving_outgoing);
                received
            });
            let lane = &mut outgoing[1];
            let accepted: Vec<u32> = (1..3).filter(|number| lane.call(*number, *number).is_ok()).collect();
            while !staying.is_gone(1) {
                thread::yield_now();
            }
            let mut replied = Vec::new();
            while let Some((token, response)) = lane.take_expected() {
                assert_eq!(response, token + 100);
                replied.push(token);
            }
            let (mut lost, mut returned) = (Vec::new(), Vec::new());
            lane.take_lost(|call| match call.request {
                Some(request) => {
                    assert_eq!(request, call.token);
                    returned.push(request);
                }
                None => lost.push(call.token),
            });
            assert_eq!(lane.in_flight(), 0);
            let received = leaver.join().unwrap();
            assert_eq!([&replied[..], &lost].concat(), received);
            assert_eq!([received, returned].concat(), accepted);
        });
    }

    #[test]
    fn loom_departure_ends_every_call_once() {
        check_departure(Release);
    }

    /// A twin that must fail: the caller sees the departure, but not what the callee received before it, and takes it back.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_departure_is_caught() {
        check_departure(Relaxed);
    }
}
