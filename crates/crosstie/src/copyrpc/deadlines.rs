//! The deadlines of a connection's calls, earliest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use crosstie_protocol::copyrpc::CallId;

/// A heap of deadlines, and for each call index the serial number of its current deadline.
///
/// A call that is answered leaves its deadline in the heap, and call ids repeat after a while. So a deadline in the heap is valid
/// only if its serial number is the current one of its call index. The heap is cleaned when it has twice as many entries
/// as calls can be pending.
#[derive(Default)]
pub(super) struct Deadlines {
    /// Deadline, serial number, call index.
    heap: BinaryHeap<Reverse<(Instant, u64, u32)>>,
    /// By call index: the current serial number and its call.
    calls: Vec<(u64, Option<CallId>)>,
    serial: u64,
}

impl Deadlines {
    /// Notes that a call begins.
    #[inline]
    pub(super) fn record(&mut self, call: CallId, deadline: Option<Instant>, pending_calls: usize) {
        match deadline {
            None => self.clear(call),
            Some(deadline) => self.push(call, deadline, pending_calls),
        }
    }

    fn push(&mut self, call: CallId, deadline: Instant, pending_calls: usize) {
        if self.calls.is_empty() {
            self.calls = vec![(0, None); pending_calls];
            self.heap.reserve(2 * pending_calls);
        }
        self.serial += 1;
        self.calls[call.index()] = (self.serial, Some(call));
        if self.heap.len() >= 2 * pending_calls {
            let Deadlines { heap, calls, .. } = self;
            heap.retain(|Reverse((_, serial, index))| calls[*index as usize].0 == *serial);
        }
        self.heap.push(Reverse((deadline, self.serial, call.index() as u32)));
    }

    /// Notes that a call without a deadline begins, so that an old deadline at its index is no longer valid.
    #[inline]
    fn clear(&mut self, call: CallId) {
        if !self.calls.is_empty() {
            self.calls[call.index()] = (0, None);
        }
    }

    /// The earliest deadline of a call that is pending. Removes those before it.
    pub(super) fn earliest(&mut self, is_pending: impl Fn(CallId) -> bool) -> Option<Instant> {
        loop {
            let Reverse((deadline, serial, index)) = *self.heap.peek()?;
            match self.calls[index as usize] {
                (last, Some(call)) if last == serial && is_pending(call) => return Some(deadline),
                _ => _ = self.heap.pop(),
            }
        }
    }

    /// Removes a call whose deadline has passed at `now`.
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<CallId> {
        loop {
            let Reverse((deadline, serial, index)) = *self.heap.peek()?;
            if deadline > now {
                return None;
            }
            self.heap.pop();
            match self.calls[index as usize] {
                (last, call) if last == serial => return call,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crosstie_protocol::copyrpc::{Content, Flow, FlowParams};

    use super::*;

    /// Calls that are answered long before their deadline leave at most twice as many entries as calls can be pending.
    #[test]
    fn deadlines_of_answered_calls_take_bounded_memory() {
        const CALLS: usize = 8;
        let (ring, credit) = (4096, 1024);
        let params = FlowParams {
            ring,
            peer_ring: ring,
            credit_limit: credit,
            peer_credit_limit: credit,
            pending_calls: CALLS,
            compact: true,
        };
        let mut flow = Flow::new(&params).unwrap();
        let calls: Vec<CallId> = (0..CALLS).map(|_| flow.call(Content::Bytes, 0, 0, ()).unwrap().0).collect();
        let (mut deadlines, begin) = (Deadlines::default(), Instant::now());
        for number in 0..10_000 {
            let later = begin + Duration::from_secs(600 + number);
            deadlines.push(calls[number as usize % CALLS], later, CALLS);
            assert!(deadlines.heap.len() <= 2 * CALLS, "{} after {number} calls", deadlines.heap.len());
        }
        // Only the last deadline of each call is valid, and only while its call is pending.
        let last = |before: u64| begin + Duration::from_secs(600 + 10_000 - before);
        assert_eq!(deadlines.earliest(|_| true), Some(last(CALLS as u64)));
        assert_eq!(deadlines.earliest(|call| call == calls[CALLS - 1]), Some(last(1)));
        for (number, call) in calls.iter().enumerate() {
            deadlines.push(*call, last((CALLS - number) as u64), CALLS);
        }
        let end = begin + Duration::from_secs(20_000);
        assert_eq!(std::iter::from_fn(|| deadlines.pop_expired(end)).count(), CALLS);
        assert_eq!(deadlines.earliest(|_| true), None);
    }
}
