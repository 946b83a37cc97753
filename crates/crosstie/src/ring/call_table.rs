//! A caller's table of calls in flight: the slot that each call uses, and the token that the program gets back with its
//! response.
//!
//! Slots are assigned round-robin, skipping those still in use. So a response that takes long holds up its own slot and no
//! other. A caller with only one call in flight at a time uses few slots, so that their cache lines stay in its cache: one
//! slot if `limit` is 1, otherwise two in turn.
//!
//! The caller first checks the slot where the next response is *expected*: responses usually arrive in the order of the
//! calls. If that response does not arrive, the caller scans all slots now and then. When a call ends, the slot of the call after it is
//! expected; only a caller that finds no response there asks whether a call uses that slot at all.
//!
//! ```text
//!   slot       0        1        2        3        4        here `limit` is 4: limit + 1 slots
//!          +--------+--------+--------+--------+--------+
//!          |  free  | call 7 | call 8 | call 9 |  free  |
//!          +--------+--------+--------+--------+--------+
//!                    ^ expected                  ^ next
//! ```
//!
//! A *blocking* call has no token: its caller waits for that one slot and takes the response itself, or has given up after
//! a timeout. Polling never finds it. Its slot stays in use until [`release_blocking`](CallTable::release_blocking), which
//! is safe once the response has arrived. So a response that arrives after its caller has given up is discarded.

use crosstie_protocol::lane::CallNumber;

use crate::memory::prefetch;

/// The caller scans all slots after this many checks of the expected slot. It does not scan more often, because each check
/// of a slot takes the slot's cache line away from the callee, which is about to write to it.
const MISSES_BEFORE_SCAN: u32 = 64;

/// Stands for the last call of a slot that was never used. Its lower 30 bits are zero, as those of a word that was never written.
const UNUSED: CallNumber = CallNumber::FIRST.after((1 << 30) - 1);

/// With more calls in flight the caller demotes the cache line of a request only [`DEMOTE_AFTER`] requests later.
const FEW_CALLS: usize = 16;
const DEMOTE_AFTER: usize = 4;

/// A call that was started: what the caller writes with its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartedCall {
    /// The slot that the call uses.
    pub(crate) slot: usize,
    /// The slot that the next call will use.
    pub(crate) next: usize,
    /// The call's number.
    pub(crate) call: CallNumber,
    /// The number of the last call that used the slot; [`UNUSED`] if there was none.
    pub(crate) previous: CallNumber,
}

#[derive(Debug)]
struct Entry<T> {
    used_by: UsedBy<T>,
    call: CallNumber,
    /// The slot of the call after this one.
    next: u32,
}

/// What uses a slot.
#[derive(Debug)]
enum UsedBy<T> {
    Nothing,
    /// A call with this token.
    Call(T),
    Blocking,
}

impl<T> Entry<T> {
    #[inline]
    fn is_free(&self) -> bool {
        matches!(self.used_by, UsedBy::Nothing)
    }

    #[inline]
    fn has_token(&self) -> bool {
        matches!(self.used_by, UsedBy::Call(_))
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct CallTable<T> {
    /// As many as [`slots_for`](Self::slots_for) says. `next`, `expected` and the `next` of every entry are slots of entries: unchecked
    /// accesses rely on that, also those to the lanes that the table is for.
    entries: Box<[Entry<T>]>,
    /// The slot of the next call. It is free, unless the table has only one slot.
    next: usize,
    /// The number of the next call.
    call: CallNumber,
    /// The slot where the next response is expected, if a call with a token uses it.
    expected: usize,
    /// Calls with a token.
    in_flight: usize,
    limit: usize,
    // Not beside `in_flight`, which every call stores: a load of both at once would wait for that store.
    blocking: usize,
    /// Most calls with a token: those that blocking calls leave, or none when the table was [closed](Self::close).
    most_in_flight: usize,
    closed: bool,
    /// Whether the processor can [demote](Self::slot_to_demote) cache lines.
    demotes: bool,
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
        let entry = || Entry { used_by: UsedBy::Nothing, call: UNUSED, next: 0 };
        CallTable {
            entries: core::iter::repeat_with(entry).take(Self::slots_for(limit)).collect(),
            next: 0,
            call: CallNumber::FIRST,
            expected: 0,
            in_flight: 0,
            limit,
            blocking: 0,
            most_in_flight: limit,
            closed: false,
            demotes: prefetch::can_demote(),
            misses: 0,
        }
    }

    /// Calls in flight, without blocking ones.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Most calls that one poll ends: up to 4 or, with many calls in flight, a quarter of them, and never more than half. On a processor
    /// that cannot demote cache lines, half of them: with smaller batches both sides look more often at lines that the other side is writing.
    ///
    /// Responses that are left for the next poll keep the callee busy while the caller makes new calls. Otherwise both would soon alternate,
    /// each waiting for the other to work off a whole queue.
    #[inline]
    pub(crate) fn most_per_poll(&self) -> usize {
        let half = self.in_flight.div_ceil(2);
        if self.demotes { (self.in_flight / 4).max(4).min(half) } else { half }
    }

    /// Most calls that may be in flight, blocking ones included.
    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether no further call can start.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.in_flight >= self.most_in_flight
    }

    /// Lets no further call start: from now on the table is full.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.count_room();
    }

    fn count_room(&mut self) {
        self.most_in_flight = if self.closed { 0 } else { self.limit - self.blocking };
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
        Ok(self.start_with_room(token))
    }

    /// Starts a call in a table that is not full.
    #[inline]
    pub(crate) fn start_with_room(&mut self, token: T) -> StartedCall {
        debug_assert!(!self.is_full());
        if self.in_flight == 0 {
            self.expected = self.next;
        }
        let started = self.take_slot(UsedBy::Call(token));
        self.in_flight += 1;
        started
    }

    /// Starts a blocking call, unless the table is full.
    #[inline]
    pub(crate) fn start_blocking(&mut self) -> Option<StartedCall> {
        if self.is_full() {
            return None;
        }
        let started = self.take_slot(UsedBy::Blocking);
        self.blocking += 1;
        self.count_room();
        Some(started)
    }

    /// Takes the next slot for a call, and chooses the slot after it.
    #[inline]
    fn take_slot(&mut self, used_by: UsedBy<T>) -> StartedCall {
        let (slot, call, entries) = (self.next, self.call, &mut *self.entries);
        let next = if self.in_flight == 0 && self.blocking == 0 {
            // No other call is in flight. Alternate between two slots: with one call at a time their cache lines are in the cache. (With
            // `limit` 1, both are the only slot.)
            let pair = slot ^ 1;
            if pair < entries.len() { pair } else { 0 }
        } else {
            match entries.get(slot + 1) {
                Some(entry) if entry.is_free() => slot + 1,
                _ => search_after(entries, slot, Entry::is_free),
            }
        };
        // SAFETY: `next` is the slot of an entry.
        let entry = unsafe { entries.get_unchecked_mut(slot) };
        let previous = entry.call;
        // The slot is free, so there is nothing to drop.
        core::mem::forget(core::mem::replace(&mut entry.used_by, used_by));
        // There are fewer than `MAX_SLOTS`.
        (entry.call, entry.next) = (call, next as u32);
        self.call = call.next();
        self.next = next;
        StartedCall { slot, next, call, previous }
    }

    /// The slot whose cache line the caller should move towards the caches that all cores share, when it has written the request of a
    /// call that it has started into `slot`. The callee gets the line sooner from there than from the caller's core.
    ///
    /// With few calls in flight: the line of the request itself. The callee is about to read it. With many calls in flight, the line of an
    /// earlier request: the callee is not as far yet, and the instruction need not wait until the request has left the core. With
    /// one call in flight none, as the callee polls the line and has it before.
    #[inline]
    pub(crate) fn slot_to_demote(&self, slot: usize) -> Option<usize> {
        if !self.demotes {
            None
        } else if self.in_flight > FEW_CALLS {
            // A table with so many calls has more slots than that.
            Some(if slot >= DEMOTE_AFTER {
                slot - DEMOTE_AFTER
            } else {
                slot + self.entries.len() - DEMOTE_AFTER
            })
        } else {
            (self.in_flight > 1).then_some(slot)
        }
    }

    /// The number of the call with a token that uses a slot.
    #[inline]
    pub(crate) fn call_in(&self, slot: usize) -> Option<CallNumber> {
        let entry = &self.entries[slot];
        entry.has_token().then_some(entry.call)
    }

    /// The call whose response is expected next.
    #[inline]
    pub(crate) fn expected(&self) -> Option<(usize, CallNumber)> {
        if self.in_flight == 0 {
            return None;
        }
        let entry = &self.entries[self.expected];
        if entry.has_token() {
            return Some((self.expected, entry.call));
        }
        let slot = search_after(&self.entries, self.expected, Entry::has_token);
        Some((slot, self.entries[slot].call))
    }

    /// The slot in which the next response is expected. There need not be a call in it.
    #[inline]
    pub(crate) fn expect(&mut self) -> ExpectedCall<'_, T> {
        let CallTable { entries, expected, in_flight, .. } = self;
        // SAFETY: `expected` is the slot of an entry.
        let entry = unsafe { entries.get_unchecked_mut(*expected) };
        ExpectedCall { slot: *expected, entry, expected, in_flight }
    }

    /// To be called when the response that [`expect`](Self::expect) stands for is not there. Returns whether another one is expected now,
    /// because no call used that slot.
    #[inline]
    pub(crate) fn expect_other(&mut self) -> bool {
        self.in_flight > 0 && !self.entries[self.expected].has_token() && {
            self.expected = search_after(&self.entries, self.expected, Entry::has_token);
            true
        }
    }

    /// Finishes the call in a slot: frees the slot, and returns the token.
    #[inline]
    pub(crate) fn finish(&mut self, slot: usize) -> Option<T> {
        let CallTable { entries, expected, in_flight, .. } = self;
        ExpectedCall { slot, entry: &mut entries[slot], expected, in_flight }.finish()
    }

    /// Takes back that a call was finished: it is in flight again, and its response is expected next. To be called before the next call
    /// starts.
    #[cold]
    pub(crate) fn restore(&mut self, slot: usize, token: T) {
        self.entries[slot].used_by = UsedBy::Call(token);
        self.in_flight += 1;
        self.expected = slot;
    }

    /// Releases the slots of blocking calls whose responses have arrived.
    #[cold]
    pub(crate) fn release_answered_blocking(&mut self, has_response: impl Fn(usize, CallNumber) -> bool) {
        for slot in 0..self.entries.len() {
            if self.is_blocking(slot) && has_response(slot, self.entries[slot].call) {
                self.release_blocking(slot);
            }
        }
    }

    /// All blocking calls.
    pub(crate) fn iter_blocking(&self) -> impl Iterator<Item = (usize, CallNumber)> {
        (0..self.entries.len())
            .filter(|slot| self.is_blocking(*slot))
            .map(|slot| (slot, self.entries[slot].call))
    }

    #[inline]
    fn is_blocking(&self, slot: usize) -> bool {
        matches!(self.entries[slot].used_by, UsedBy::Blocking)
    }

    /// Releases the slot of a blocking call whose response has arrived, or never will.
    #[inline]
    pub(crate) fn release_blocking(&mut self, slot: usize) {
        if self.is_blocking(slot) {
            self.entries[slot].used_by = UsedBy::Nothing;
            self.blocking -= 1;
            self.count_room();
        }
    }

    /// Forgets the checks that did not find the expected response. To be called when responses have arrived.
    #[inline]
    pub(crate) fn forget_misses(&mut self) {
        self.misses = 0;
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
    #[cfg(all(test, not(loom)))]
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

/// The first slot after this one whose entry is `wanted`, or this one if there is none.
#[cold]
fn search_after<T>(entries: &[Entry<T>], slot: usize, wanted: impl Fn(&Entry<T>) -> bool) -> usize {
    (slot + 1..entries.len()).chain(0..slot).find(|slot| wanted(&entries[*slot])).unwrap_or(slot)
}

/// The slot in which the next response is expected, see [`CallTable::expect`].
pub(crate) struct ExpectedCall<'t, T> {
    slot: usize,
    entry: &'t mut Entry<T>,
    expected: &'t mut usize,
    in_flight: &'t mut usize,
}

impl<T> ExpectedCall<'_, T> {
    #[inline]
    pub(crate) fn slot(&self) -> usize {
        self.slot
    }

    /// The call that uses the slot, or used it last.
    #[inline]
    pub(crate) fn call(&self) -> CallNumber {
        self.entry.call
    }

    /// Whether a call with a token uses the slot.
    #[inline]
    pub(crate) fn has_token(&self) -> bool {
        self.entry.has_token()
    }

    /// Finishes the call: frees the slot, and returns the token. None if there is no call with a token.
    #[inline]
    pub(crate) fn finish(self) -> Option<T> {
        if !self.entry.has_token() {
            return None;
        }
        let UsedBy::Call(token) = core::mem::replace(&mut self.entry.used_by, UsedBy::Nothing) else {
            return None;
        };
        *self.in_flight -= 1;
        *self.expected = self.entry.next as usize;
        Some(token)
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
    fn a_poll_ends_a_quarter_of_many_calls_and_half_of_few() {
        for (demotes, expected) in [(true, [1, 1, 2, 4, 4, 8, 16]), (false, [1, 1, 2, 4, 8, 16, 32])] {
            let mut table = CallTable::new(64);
            table.demotes = demotes;
            let mut most = Vec::new();
            for _ in 0..64 {
                table.start(()).unwrap();
                most.push(table.most_per_poll());
            }
            assert_eq!([most[0], most[1], most[2], most[7], most[15], most[31], most[63]], expected);
        }
    }

    #[test]
    fn few_requests_are_demoted_at_once_and_many_later() {
        let mut table = CallTable::new(64);
        table.demotes = true;
        for in_flight in 1..65 {
            let slot = table.start(()).unwrap().slot;
            let expected = match in_flight {
                1 => None,
                2..17 => Some(slot),
                _ => Some(slot - 4),
            };
            assert_eq!(table.slot_to_demote(slot), expected, "{in_flight} calls in flight");
        }
        assert_eq!(table.slot_to_demote(2), Some(63), "of the round before");
        table.demotes = false;
        assert_eq!(table.slot_to_demote(2), None, "the processor cannot");
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
