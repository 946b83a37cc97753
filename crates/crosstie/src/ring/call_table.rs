//! A caller's table of calls in flight: the slot that each call uses, and the token that the program gets back with its
//! response.
//!
//! Slots are assigned round-robin, skipping those still in use. So a response that takes long holds up its own slot and no
//! other. A caller with only one call in flight at a time uses few slots, so that their cache lines stay in its cache: one
//! slot if `limit` is 1, otherwise two in turn.
//!
//! The caller first checks the slot where the next response is *expected*: responses usually arrive in the order of the
//! calls. If that response does not arrive, the caller scans all slots now and then.
//!
//! ```text
//!   slot       0        1        2        3        4        here `limit` is 4: limit + 1 slots
//!          +--------+--------+--------+--------+--------+
//!          |  free  | call 7 | call 8 | call 9 |  free  |
//!          +--------+--------+--------+--------+--------+
//!                    ^ expected         ^ last   ^ next
//! ```
//!
//! A *blocking* call has no token: its caller waits for that one slot and takes the response itself, or has given up after
//! a timeout. Polling never finds it. Its slot stays in use until [`release_blocking`](CallTable::release_blocking), which
//! is safe once the response has arrived. So a response that arrives after its caller has given up is discarded.

use crosstie_protocol::lane::CallNumber;

/// The caller scans all slots after this many checks of the expected slot. It does not scan more often, because each check
/// of a slot takes the slot's cache line away from the callee, which is about to write to it.
const MISSES_BEFORE_SCAN: u32 = 64;

/// A call that was started: what the caller writes with its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartedCall {
    /// The slot that the call uses.
    pub(crate) slot: usize,
    /// The slot that the next call will use.
    pub(crate) next: usize,
    /// The call's number.
    pub(crate) call: CallNumber,
}

#[derive(Debug)]
struct Entry<T> {
    token: Option<T>,
    /// A blocking call uses the slot.
    blocking: bool,
    call: CallNumber,
    /// The slot of the call after this one.
    next: usize,
}

impl<T> Entry<T> {
    #[inline]
    fn is_free(&self) -> bool {
        self.token.is_none() && !self.blocking
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct CallTable<T> {
    entries: Box<[Entry<T>]>,
    /// The slot of the next call. It is free, unless the table has only one slot.
    next: usize,
    /// The slot of the last call.
    last: usize,
    /// The number of the next call.
    call: CallNumber,
    /// The slot where the next response is expected.
    expected: usize,
    /// Calls with a token.
    in_flight: usize,
    /// Blocking calls.
    blocking: usize,
    limit: usize,
    /// Checks of the expected slot without success, since a call finished.
    misses: u32,
}

impl<T> CallTable<T> {
    /// The number of slots for `limit` calls in flight: `limit + 1`, so that there is a free next slot even when `limit` calls
    /// are in flight. If `limit` is 1, one slot is enough: no next call starts before the response has freed it.
    pub(crate) const fn slots_for(limit: usize) -> usize {
        if limit == 1 { 1 } else { limit + 1 }
    }

    /// Bytes of memory of a table for `limit` calls.
    pub(crate) const fn bytes_for(limit: usize) -> usize {
        Self::slots_for(limit).saturating_mul(size_of::<Entry<T>>())
    }

    /// Creates a table for at most `limit` calls in flight.
    pub(crate) fn new(limit: usize) -> CallTable<T> {
        assert!(limit > 0);
        let entry = || Entry { token: None, blocking: false, call: CallNumber::FIRST, next: 0 };
        CallTable {
            entries: core::iter::repeat_with(entry).take(Self::slots_for(limit)).collect(),
            next: 0,
            last: Self::slots_for(limit) - 1,
            call: CallNumber::FIRST,
            expected: 0,
            in_flight: 0,
            blocking: 0,
            limit,
            misses: 0,
        }
    }

    /// Calls in flight, without blocking ones.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Most calls that may be in flight, blocking ones included.
    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    #[inline]
    fn slot_after(&self, slot: usize) -> usize {
        if slot + 1 == self.entries.len() { 0 } else { slot + 1 }
    }

    /// Whether no further call can start.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.in_flight + self.blocking == self.limit
    }

    /// Whether blocking calls use slots.
    #[inline]
    pub(crate) fn has_blocking(&self) -> bool {
        self.blocking > 0
    }

    /// Starts a call. Hands the token back if the table is full.
    #[inline]
    pub(crate) fn start(&mut self, token: T) -> Result<StartedCall, T> {
        if self.is_full() {
            return Err(token);
        }
        if self.in_flight == 0 {
            self.expected = self.next;
            self.misses = 0;
        }
        let started = self.take_slot(Some(token));
        self.in_flight += 1;
        Ok(started)
    }

    /// Starts a blocking call, unless the table is full.
    #[inline]
    pub(crate) fn start_blocking(&mut self) -> Option<StartedCall> {
        if self.is_full() {
            return None;
        }
        let started = self.take_slot(None);
        self.blocking += 1;
        Some(started)
    }

    /// Takes the next slot for a call, and chooses the slot after it.
    #[inline]
    fn take_slot(&mut self, token: Option<T>) -> StartedCall {
        let (slot, call) = (self.next, self.call);
        let next = if self.in_flight + self.blocking == 0 {
            // No other call is in flight. Go back to the slot of the previous call: a caller with one call at a time then
            // alternates between two slots, whose cache lines are in its cache. (With `limit` 1, both are the only slot.)
            self.last
        } else {
            self.first_after(slot, Entry::is_free)
        };
        let blocking = token.is_none();
        self.entries[slot] = Entry { token, blocking, call, next };
        self.call = call.next();
        self.last = slot;
        self.next = next;
        StartedCall { slot, next, call }
    }

    /// The first slot after this one whose entry is `wanted`. There must be one.
    #[inline]
    fn first_after(&self, slot: usize, wanted: impl Fn(&Entry<T>) -> bool) -> usize {
        let next = self.slot_after(slot);
        if wanted(&self.entries[next]) { next } else { self.search_after(next, wanted) }
    }

    #[cold]
    fn search_after(&self, slot: usize, wanted: impl Fn(&Entry<T>) -> bool) -> usize {
        let mut next = self.slot_after(slot);
        while !wanted(&self.entries[next]) && next != slot {
            next = self.slot_after(next);
        }
        next
    }

    /// The number of the call with a token that uses a slot.
    #[inline]
    pub(crate) fn call_in(&self, slot: usize) -> Option<CallNumber> {
        let entry = &self.entries[slot];
        entry.token.is_some().then_some(entry.call)
    }

    /// The call whose response is expected next.
    #[inline]
    pub(crate) fn expected(&self) -> Option<(usize, CallNumber)> {
        (self.in_flight > 0).then(|| (self.expected, self.entries[self.expected].call))
    }

    /// Finishes the call in a slot: frees the slot, and returns the token.
    #[inline]
    pub(crate) fn finish(&mut self, slot: usize) -> Option<T> {
        let token = self.entries[slot].token.take()?;
        self.in_flight -= 1;
        self.misses = 0;
        if self.in_flight > 0 {
            let next = self.entries[slot].next;
            let in_order = self.entries[next].token.is_some();
            self.expected =
                if in_order { next } else { self.search_after(next, |entry| entry.token.is_some()) };
        }
        Some(token)
    }

    /// Releases the slots of blocking calls whose responses have arrived.
    #[cold]
    pub(crate) fn release_answered_blocking(&mut self, has_response: impl Fn(usize, CallNumber) -> bool) {
        for slot in 0..self.entries.len() {
            if self.entries[slot].blocking && has_response(slot, self.entries[slot].call) {
                self.release_blocking(slot);
            }
        }
    }

    /// All blocking calls.
    pub(crate) fn iter_blocking(&self) -> impl Iterator<Item = (usize, CallNumber)> {
        let blocking = |(slot, entry): (usize, &Entry<T>)| entry.blocking.then_some((slot, entry.call));
        self.entries.iter().enumerate().filter_map(blocking)
    }

    /// Releases the slot of a blocking call whose response has arrived, or never will.
    #[inline]
    pub(crate) fn release_blocking(&mut self, slot: usize) {
        if std::mem::take(&mut self.entries[slot].blocking) {
            self.blocking -= 1;
        }
    }

    /// Counts a check that did not find the expected response. Returns whether to scan all slots now.
    #[inline]
    pub(crate) fn note_miss(&mut self) -> bool {
        // It may wrap: programs poll without end while nothing arrives.
        self.misses = self.misses.wrapping_add(1);
        self.in_flight > 1 && self.misses.is_multiple_of(MISSES_BEFORE_SCAN)
    }

    /// All calls with a token, starting with the one whose response is expected next.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, CallNumber)> {
        let slots = self.entries.len();
        (0..slots).filter_map(move |i| {
            let slot = (self.expected + i) % slots;
            self.call_in(slot).map(|call| (slot, call))
        })
    }

    /// Makes [`note_miss`](Self::note_miss) ask for a scan at the second miss from now. For use after a response arrived out
    /// of order: more of them may follow.
    pub(crate) fn scan_soon(&mut self) {
        self.misses = MISSES_BEFORE_SCAN - 2;
    }

    /// Makes [`note_miss`](Self::note_miss) ask for a scan at the next miss. For use after a response was seen in some slot.
    pub(crate) fn scan_next(&mut self) {
        self.misses = MISSES_BEFORE_SCAN - 1;
    }

    /// Continues with this call number, as if that many calls had been made.
    #[cfg(test)]
    pub(crate) fn set_next_call(&mut self, call: CallNumber) {
        self.call = call;
    }

    /// Finishes all calls with a token.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(T)) {
        for slot in 0..self.entries.len() {
            if let Some(token) = self.finish(slot) {
                each(token);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against an oracle: any mixture of calls with tokens and blocking calls, with responses in any order.
        #[test]
        fn slots_are_used_once_and_tokens_belong_to_their_calls(
            limit in 1usize..9,
            steps in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..300),
        ) {
            let mut table = CallTable::new(limit);
            // A call without a token is a blocking one.
            let mut oracle: Vec<(StartedCall, Option<u32>)> = Vec::new();
            let mut expected_slot = None;
            for (token, (step, which)) in (0u32..).zip(steps) {
                if step < 2 {
                    let token = (step == 0).then_some(token);
                    let started = match token {
                        Some(token) => table.start(token).map_err(|back| assert_eq!(back, token)).ok(),
                        None => table.start_blocking(),
                    };
                    prop_assert_eq!(started.is_some(), oracle.len() < limit);
                    if let Some(started) = started {
                        prop_assert!(oracle.iter().all(|(other, _)| other.slot != started.slot));
                        prop_assert_eq!(expected_slot.unwrap_or(started.slot), started.slot);
                        expected_slot = Some(started.next);
                        oracle.push((started, token));
                    }
                } else if !oracle.is_empty() {
                    let (started, token) = oracle.swap_remove(which.index(oracle.len()));
                    prop_assert_eq!(table.call_in(started.slot), token.map(|_| started.call));
                    match token {
                        Some(_) => prop_assert_eq!(table.finish(started.slot), token),
                        None => table.release_answered_blocking(|slot, call| (slot, call) == (started.slot, started.call)),
                    }
                    prop_assert_eq!(table.finish(started.slot), None);
                }
                let with_token = || oracle.iter().filter(|(_, token)| token.is_some());
                prop_assert_eq!(table.in_flight(), with_token().count());
                prop_assert_eq!(table.has_blocking(), with_token().count() < oracle.len());
                prop_assert_eq!(table.iter_blocking().count(), oracle.len() - with_token().count());
                let mut known: Vec<_> = with_token().map(|(started, _)| (started.slot, started.call)).collect();
                let mut all: Vec<_> = table.iter().collect();
                known.sort_by_key(|(slot, _)| *slot);
                all.sort_by_key(|(slot, _)| *slot);
                match table.expected() {
                    Some(expected) => prop_assert!(known.contains(&expected)),
                    None => prop_assert!(known.is_empty()),
                }
                prop_assert_eq!(all, known);
            }
        }
    }

    #[test]
    fn misses_can_be_counted_without_end() {
        let mut table = CallTable::new(2);
        table.start(0).unwrap();
        table.start(1).unwrap();
        table.misses = u32::MAX - 1;
        assert!(!table.note_miss());
        assert!(table.note_miss(), "a scan every {MISSES_BEFORE_SCAN} misses");
        assert_eq!((1..=MISSES_BEFORE_SCAN).filter(|_| table.note_miss()).count(), 1);
    }

    #[test]
    fn responses_are_expected_in_the_order_of_calls() {
        let mut table = CallTable::new(4);
        let slots: Vec<usize> = (0..4).map(|i| table.start(i).unwrap().slot).collect();
        for (i, slot) in slots.into_iter().enumerate() {
            assert_eq!(table.expected().unwrap().0, slot);
            assert_eq!(table.finish(slot), Some(i));
        }
        assert_eq!(table.expected(), None);
    }

    #[test]
    fn one_call_at_a_time_alternates_between_two_slots() {
        let mut table = CallTable::new(32);
        let mut used = std::collections::BTreeSet::new();
        for i in 0..100 {
            let slot = table.start(i).unwrap().slot;
            used.insert(slot);
            table.finish(slot);
        }
        assert_eq!(used.len(), 2);
    }

    #[test]
    fn slow_response_does_not_block_other_slots() {
        let mut table = CallTable::new(2);
        let slow = table.start(0).unwrap().slot;
        for i in 1..50 {
            let slot = table.start(i).unwrap().slot;
            assert_ne!(slot, slow);
            assert_eq!(table.finish(slot), Some(i));
        }
        assert_eq!(table.finish(slow), Some(0));
    }
}
