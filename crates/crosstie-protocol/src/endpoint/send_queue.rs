//! The work requests of one queue pair that have not completed, oldest first.
//!
//! Not every request is signaled. A completion of one request also tells that those before it have succeeded, because a reliable
//! queue pair executes requests in order. A request that the device has executed while it was posted never comes here.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use super::slots::SlotKey;
use super::wr_id::{POSITION_BITS, WorkKind};
use crate::signaling::Signaling;

/// A posted work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequest {
    /// What it is for.
    pub kind: WorkKind,
    /// Its slot.
    pub slot: SlotKey,
    /// The blocks of its batch that it carries: the first one, and how many.
    pub first_block: u32,
    /// See `first_block`.
    pub blocks: u32,
    /// Whether success produces a completion.
    pub signaled: bool,
}

impl WorkRequest {
    /// The blocks of its batch that it carries.
    pub fn block_range(&self) -> Range<u32> {
        self.first_block..self.first_block.saturating_add(self.blocks)
    }
}

/// The completion names no request that is outstanding: it arrived late, twice, or was made up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleCompletion;

/// The requests of one queue pair, of which at least one in `INTERVAL` is signaled. See the [module](self).
#[derive(Debug)]
pub struct SendQueue<const INTERVAL: u32> {
    /// A power of two of them, so that a position is an index after a mask.
    entries: Box<[Option<WorkRequest>]>,
    depth: usize,
    head: u64,
    tail: u64,
    signaling: Signaling<INTERVAL>,
}

impl<const INTERVAL: u32> SendQueue<INTERVAL> {
    /// A queue of at most `depth` requests.
    pub fn new(depth: usize) -> Self {
        let depth = depth.clamp(1, 1 << (POSITION_BITS - 1));
        let entries: Vec<Option<WorkRequest>> =
            core::iter::repeat_n(None, depth.next_power_of_two()).collect();
        SendQueue { entries: entries.into(), depth, head: 0, tail: 0, signaling: Signaling::new() }
    }

    /// Requests that have not completed.
    #[inline]
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Whether all requests have completed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Requests that can be posted.
    #[inline]
    pub fn room(&self) -> usize {
        self.depth - self.len()
    }

    /// Whether the next request must be signaled.
    #[inline]
    pub fn is_signal_due(&self) -> bool {
        self.signaling.is_due()
    }

    /// The newest requests for which no completion will come, unless a later request is signaled.
    #[inline]
    pub fn unsignaled(&self) -> u32 {
        self.signaling.unsignaled()
    }

    /// Whether a completion is to come.
    #[inline]
    pub fn awaits_completion(&self) -> bool {
        self.len() > self.unsignaled() as usize
    }

    /// The position that the next request gets.
    #[inline]
    pub fn next_position(&self) -> u32 {
        self.tail as u32 & ((1 << POSITION_BITS) - 1)
    }

    #[inline]
    fn index(&self, position: u64) -> usize {
        position as usize & (self.entries.len() - 1)
    }

    /// Adds a request that was posted with the [next position](SendQueue::next_position). `false`: there is no room.
    #[inline]
    pub fn push(&mut self, posted: WorkRequest) -> bool {
        if self.room() == 0 {
            return false;
        }
        let index = self.index(self.tail);
        self.entries[index] = Some(posted);
        self.tail += 1;
        self.signaling.count_post(posted.signaled);
        true
    }

    /// Forgets the newest requests until `len` are left: the device has not accepted them after all.
    pub fn truncate(&mut self, len: usize) {
        self.tail = self.tail.min(self.head + len as u64);
        let is_signaled = |at: &u64| self.entries[self.index(*at)].is_none_or(|posted| posted.signaled);
        let unsignaled = (self.head..self.tail).rev().take_while(|at| !is_signaled(at)).count();
        self.signaling = Signaling::new();
        (0..unsignaled).for_each(|_| self.signaling.count_post(false));
    }

    /// Checks a completion: returns how many requests it completes, of which it names the last one. They are to be
    /// [taken](SendQueue::pop).
    ///
    /// Refuses a completion that names no outstanding request of this slot, and one that would skip a signaled request, whose own
    /// completion must come first.
    #[inline]
    pub fn check(&self, position: u32, kind: WorkKind, slot: SlotKey) -> Result<usize, StaleCompletion> {
        let ahead = position.wrapping_sub(self.head as u32) & ((1 << POSITION_BITS) - 1);
        if u64::from(ahead) >= self.tail - self.head {
            return Err(StaleCompletion);
        }
        let target = self.head + u64::from(ahead);
        let named = &self.entries[self.index(target)];
        if !named.as_ref().is_some_and(|posted| posted.kind == kind && posted.slot == slot) {
            return Err(StaleCompletion);
        }
        if (self.head..target).any(|at| self.entries[self.index(at)].is_some_and(|posted| posted.signaled)) {
            return Err(StaleCompletion);
        }
        Ok(ahead as usize + 1)
    }

    /// Takes the oldest request.
    #[inline]
    pub fn pop(&mut self) -> Option<WorkRequest> {
        if self.is_empty() {
            return None;
        }
        let index = self.index(self.head);
        self.head += 1;
        self.entries[index].take()
    }

    /// Takes all requests, because the queue pair was reset and no completion will come.
    pub fn drain(&mut self, mut each: impl FnMut(WorkRequest)) {
        while let Some(posted) = self.pop() {
            each(posted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    const INTERVAL: u32 = 4;

    /// Completes a request, and calls `each` for it and for those before it, with whether it is the named one.
    fn complete(
        queue: &mut SendQueue<INTERVAL>,
        position: u32,
        slot: SlotKey,
        mut each: impl FnMut(WorkRequest, bool),
    ) -> Result<(), StaleCompletion> {
        let count = queue.check(position, WorkKind::Transfer, slot)?;
        (0..count).rev().for_each(|left| each(queue.pop().unwrap(), left == 0));
        Ok(())
    }

    fn posted(index: u16, signaled: bool) -> WorkRequest {
        WorkRequest {
            kind: WorkKind::Transfer,
            slot: SlotKey { index, generation: 1 },
            first_block: u32::from(index),
            blocks: 1,
            signaled,
        }
    }

    #[test]
    fn completion_covers_the_unsignaled_requests_before_it() {
        let mut queue = SendQueue::<INTERVAL>::new(4);
        assert!(queue.push(posted(0, false)) && queue.push(posted(1, false)) && queue.push(posted(2, true)));
        assert!(queue.push(posted(3, true)));
        assert!(!queue.push(posted(4, true)), "full");
        let mut seen = vec![];
        let slot = SlotKey { index: 2, generation: 1 };
        assert_eq!(
            complete(&mut queue, 2, slot, |posted, named| seen.push((posted.slot.index, named))),
            Ok(())
        );
        assert_eq!(seen, [(0, false), (1, false), (2, true)]);
        assert_eq!(complete(&mut queue, 2, slot, |_, _| panic!()), Err(StaleCompletion), "twice");
        let wrong = SlotKey { index: 3, generation: 2 };
        assert_eq!(complete(&mut queue, 3, wrong, |_, _| panic!()), Err(StaleCompletion), "generation");
        assert_eq!((queue.len(), queue.room()), (1, 3));
    }

    /// A doorbell has failed: the requests of its batch are as if they had never been posted, for positions, room and signals.
    #[test]
    fn forgotten_requests_leave_nothing_behind() {
        let mut queue = SendQueue::<INTERVAL>::new(4);
        for (index, signaled) in [(0, true), (1, false), (2, false)] {
            assert!(queue.push(posted(index, signaled)));
        }
        let (position, room) = (queue.next_position(), queue.room());
        assert!(queue.push(posted(3, true)));
        assert_eq!((queue.unsignaled(), queue.room()), (0, 0));
        queue.truncate(3);
        assert_eq!((queue.next_position(), queue.room(), queue.unsignaled()), (position, room, 2));
        assert!(!queue.is_signal_due() && queue.awaits_completion());
        queue.truncate(7);
        assert_eq!(queue.len(), 3, "there are no more");
        let slot = SlotKey { index: 3, generation: 1 };
        assert_eq!(complete(&mut queue, position, slot, |_, _| panic!()), Err(StaleCompletion));
        queue.truncate(1);
        assert_eq!((queue.len(), queue.unsignaled()), (1, 0));
    }

    proptest! {
        /// Any completion, also a made-up one, takes each request at most once and in order; a completion that is due is never
        /// refused.
        #[test]
        fn each_request_completes_once_in_order(
            signaled in proptest::collection::vec(any::<bool>(), 1..40),
            noise in proptest::collection::vec((any::<u32>(), 0u16..40, 0u32..3), 0..40),
        ) {
            let mut queue = SendQueue::<INTERVAL>::new(64);
            for (index, signaled) in signaled.iter().enumerate() {
                prop_assert!(queue.push(posted(index as u16, *signaled)));
            }
            let mut seen = vec![];
            let mut noise = noise.into_iter();
            for (index, signaled) in signaled.iter().enumerate() {
                if let Some((position, index, generation)) = noise.next()
                    && !(position == u32::from(index) && generation == 1)
                {
                    let slot = SlotKey { index, generation };
                    let before = queue.len();
                    prop_assert_eq!(complete(&mut queue, position, slot, |_, _| ()), Err(StaleCompletion));
                    prop_assert_eq!(queue.len(), before);
                }
                if *signaled {
                    let slot = SlotKey { index: index as u16, generation: 1 };
                    prop_assert_eq!(complete(&mut queue, index as u32, slot, |posted, _| seen.push(posted.slot.index)), Ok(()));
                }
            }
            queue.drain(|posted| seen.push(posted.slot.index));
            prop_assert_eq!(seen, (0..signaled.len() as u16).collect::<Vec<_>>());
        }
    }
}
