//! A caller's book of calls under way: which slot each one uses, and what the user wants to hear with its answer.
//!
//! Slots are given out round and round, skipping those still in use, so an answer that takes long holds up its own slot
//! and no other. Answers are looked for where they are due first, in the order of the calls; if that one does not come,
//! now and then everywhere.
//!
//! A *quiet* call has no token: whoever made it waits for its slot, or has given up. It is never due and never found; its
//! slot stays in use until it is [released](Outstanding::release), which is safe once it is answered. So an answer that
//! comes after its caller has given up is nobody's.

use crosstie_protocol::lane::CallNumber;

/// Fruitless looks at the answer that is due before all others are looked at. Looking costs the callee a cache line that
/// it is about to write, so it is not done for nothing.
const LOOKS_BEFORE_SCAN: u32 = 64;

/// A call under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The slot that it uses.
    pub(crate) slot: usize,
    /// The slot that the next call will use.
    pub(crate) next: usize,
    /// Its number.
    pub(crate) call: CallNumber,
}

#[derive(Debug)]
struct Entry<T> {
    token: Option<T>,
    /// A call without token uses the slot.
    quiet: bool,
    call: CallNumber,
    /// The slot of the call after it.
    next: usize,
}

impl<T> Entry<T> {
    #[inline]
    fn is_free(&self) -> bool {
        self.token.is_none() && !self.quiet
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Outstanding<T> {
    entries: Box<[Entry<T>]>,
    /// The slot of the next call. Free, unless there is only this one.
    next: usize,
    /// The slot of the last call.
    last: usize,
    call: CallNumber,
    /// Where an answer is due first.
    front: usize,
    /// Calls with tokens.
    in_flight: usize,
    /// Calls without.
    quiet: usize,
    limit: usize,
    fruitless: u32,
}

impl<T> Outstanding<T> {
    /// How many slots it takes to have `limit` calls under way: one more, so that there is always a next one; but a
    /// caller of one at a time comes back to the same slot, and so to the same cache line.
    pub(crate) const fn slots(limit: usize) -> usize {
        if limit == 1 { 1 } else { limit + 1 }
    }

    /// Bytes of a book for `limit` calls.
    pub(crate) const fn bytes(limit: usize) -> usize {
        Self::slots(limit).saturating_mul(size_of::<Entry<T>>())
    }

    /// A book for at most `limit` calls at a time.
    pub(crate) fn new(limit: usize) -> Outstanding<T> {
        assert!(limit > 0);
        let entry = || Entry { token: None, quiet: false, call: CallNumber::FIRST, next: 0 };
        Outstanding {
            entries: core::iter::repeat_with(entry).take(Self::slots(limit)).collect(),
            next: 0,
            last: Self::slots(limit) - 1,
            call: CallNumber::FIRST,
            front: 0,
            in_flight: 0,
            quiet: 0,
            limit,
            fruitless: 0,
        }
    }

    /// Calls under way, without quiet ones.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Calls that may be under way.
    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    #[inline]
    fn after(&self, slot: usize) -> usize {
        if slot + 1 == self.entries.len() { 0 } else { slot + 1 }
    }

    /// Whether another call may begin.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.in_flight + self.quiet == self.limit
    }

    /// Whether quiet calls take up room.
    #[inline]
    pub(crate) fn has_quiet(&self) -> bool {
        self.quiet > 0
    }

    /// Begins a call, or hands the token back because there are too many.
    #[inline]
    pub(crate) fn begin(&mut self, token: T) -> Result<Begun, T> {
        if self.is_full() {
            return Err(token);
        }
        if self.in_flight == 0 {
            self.front = self.next;
            self.fruitless = 0;
        }
        let begun = self.occupy(Some(token));
        self.in_flight += 1;
        Ok(begun)
    }

    /// Begins a call without token, if there is room.
    #[inline]
    pub(crate) fn begin_quiet(&mut self) -> Option<Begun> {
        if self.is_full() {
            return None;
        }
        let begun = self.occupy(None);
        self.quiet += 1;
        Some(begun)
    }

    /// Gives the next call its slot.
    #[inline]
    fn occupy(&mut self, token: Option<T>) -> Begun {
        let (slot, call) = (self.next, self.call);
        let next = if self.in_flight + self.quiet == 0 {
            // One call at a time swings between two slots: lines that are at hand.
            self.last
        } else {
            self.first_after(slot, Entry::is_free)
        };
        let quiet = token.is_none();
        self.entries[slot] = Entry { token, quiet, call, next };
        self.call = call.next();
        self.last = slot;
        self.next = next;
        Begun { slot, next, call }
    }

    /// The first slot behind this one that is as wanted; there is one.
    #[inline]
    fn first_after(&self, slot: usize, wanted: impl Fn(&Entry<T>) -> bool) -> usize {
        let next = self.after(slot);
        if wanted(&self.entries[next]) { next } else { self.search_after(next, wanted) }
    }

    #[cold]
    fn search_after(&self, slot: usize, wanted: impl Fn(&Entry<T>) -> bool) -> usize {
        let mut next = self.after(slot);
        while !wanted(&self.entries[next]) && next != slot {
            next = self.after(next);
        }
        next
    }

    /// The number of the call with a token that uses a slot.
    #[inline]
    pub(crate) fn call(&self, slot: usize) -> Option<CallNumber> {
        let entry = &self.entries[slot];
        entry.token.is_some().then_some(entry.call)
    }

    /// Where to look for an answer now.
    #[inline]
    pub(crate) fn due(&self) -> Option<(usize, CallNumber)> {
        (self.in_flight > 0).then(|| (self.front, self.entries[self.front].call))
    }

    /// Ends a call: its slot is free.
    #[inline]
    pub(crate) fn end(&mut self, slot: usize) -> Option<T> {
        let token = self.entries[slot].token.take()?;
        self.in_flight -= 1;
        self.fruitless = 0;
        if self.in_flight > 0 {
            let next = self.entries[slot].next;
            let in_order = self.entries[next].token.is_some();
            self.front = if in_order { next } else { self.search_after(next, |entry| entry.token.is_some()) };
        }
        Some(token)
    }

    /// Ends quiet calls that are answered.
    #[cold]
    pub(crate) fn reap(&mut self, is_answered: impl Fn(usize, CallNumber) -> bool) {
        for slot in 0..self.entries.len() {
            if self.entries[slot].quiet && is_answered(slot, self.entries[slot].call) {
                self.release(slot);
            }
        }
    }

    /// All quiet calls.
    pub(crate) fn all_quiet(&self) -> impl Iterator<Item = (usize, CallNumber)> {
        let quiet = |(slot, entry): (usize, &Entry<T>)| entry.quiet.then_some((slot, entry.call));
        self.entries.iter().enumerate().filter_map(quiet)
    }

    /// Ends a quiet call, which is answered or never will be.
    #[inline]
    pub(crate) fn release(&mut self, slot: usize) {
        if std::mem::take(&mut self.entries[slot].quiet) {
            self.quiet -= 1;
        }
    }

    /// The answer that is due is not there. Says whether to look everywhere.
    #[inline]
    pub(crate) fn fruitless(&mut self) -> bool {
        self.fruitless += 1;
        self.in_flight > 1 && self.fruitless.is_multiple_of(LOOKS_BEFORE_SCAN)
    }

    /// All calls with tokens, from the one whose answer is due first.
    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, CallNumber)> {
        let slots = self.entries.len();
        (0..slots).filter_map(move |i| {
            let slot = (self.front + i) % slots;
            self.call(slot).map(|call| (slot, call))
        })
    }

    /// After an answer was found out of turn: more may be there.
    pub(crate) fn expect_disorder(&mut self) {
        self.fruitless = LOOKS_BEFORE_SCAN - 2;
    }

    /// After an answer was seen somewhere: if it is not the one that is due, the next look is everywhere.
    pub(crate) fn expect_anywhere(&mut self) {
        self.fruitless = LOOKS_BEFORE_SCAN - 1;
    }

    /// Ends all calls with tokens.
    pub(crate) fn abandon(&mut self, mut each: impl FnMut(T)) {
        for slot in 0..self.entries.len() {
            if let Some(token) = self.end(slot) {
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
        /// Against an oracle: any mixture of calls, with tokens and quiet ones, and answers in any order.
        #[test]
        fn slots_are_never_shared_and_tokens_never_mixed_up(
            limit in 1usize..9,
            steps in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..300),
        ) {
            let mut book = Outstanding::new(limit);
            // Without a token, it is quiet.
            let mut oracle: Vec<(Begun, Option<u32>)> = Vec::new();
            let mut expected_slot = None;
            for (token, (step, which)) in (0u32..).zip(steps) {
                if step < 2 {
                    let token = (step == 0).then_some(token);
                    let begun = match token {
                        Some(token) => book.begin(token).map_err(|back| assert_eq!(back, token)).ok(),
                        None => book.begin_quiet(),
                    };
                    prop_assert_eq!(begun.is_some(), oracle.len() < limit);
                    if let Some(begun) = begun {
                        prop_assert!(oracle.iter().all(|(other, _)| other.slot != begun.slot));
                        prop_assert_eq!(expected_slot.unwrap_or(begun.slot), begun.slot);
                        expected_slot = Some(begun.next);
                        oracle.push((begun, token));
                    }
                } else if !oracle.is_empty() {
                    let (begun, token) = oracle.swap_remove(which.index(oracle.len()));
                    prop_assert_eq!(book.call(begun.slot), token.map(|_| begun.call));
                    match token {
                        Some(_) => prop_assert_eq!(book.end(begun.slot), token),
                        None => book.reap(|slot, call| (slot, call) == (begun.slot, begun.call)),
                    }
                    prop_assert_eq!(book.end(begun.slot), None);
                }
                let with_token = || oracle.iter().filter(|(_, token)| token.is_some());
                prop_assert_eq!(book.in_flight(), with_token().count());
                prop_assert_eq!(book.has_quiet(), with_token().count() < oracle.len());
                prop_assert_eq!(book.all_quiet().count(), oracle.len() - with_token().count());
                let mut known: Vec<_> = with_token().map(|(begun, _)| (begun.slot, begun.call)).collect();
                let mut all: Vec<_> = book.all().collect();
                known.sort_by_key(|(slot, _)| *slot);
                all.sort_by_key(|(slot, _)| *slot);
                match book.due() {
                    Some(due) => prop_assert!(known.contains(&due)),
                    None => prop_assert!(known.is_empty()),
                }
                prop_assert_eq!(all, known);
            }
        }
    }

    #[test]
    fn answers_in_order_are_due_in_order() {
        let mut book = Outstanding::new(4);
        let slots: Vec<usize> = (0..4).map(|i| book.begin(i).unwrap().slot).collect();
        for (i, slot) in slots.into_iter().enumerate() {
            assert_eq!(book.due().unwrap().0, slot);
            assert_eq!(book.end(slot), Some(i));
        }
        assert_eq!(book.due(), None);
    }

    #[test]
    fn one_at_a_time_swings_between_two_slots() {
        let mut book = Outstanding::new(32);
        let mut used = std::collections::BTreeSet::new();
        for i in 0..100 {
            let slot = book.begin(i).unwrap().slot;
            used.insert(slot);
            book.end(slot);
        }
        assert_eq!(used.len(), 2);
    }

    #[test]
    fn an_answer_that_takes_long_holds_up_nobody() {
        let mut book = Outstanding::new(2);
        let stuck = book.begin(0).unwrap().slot;
        for i in 1..50 {
            let slot = book.begin(i).unwrap().slot;
            assert_ne!(slot, stuck);
            assert_eq!(book.end(slot), Some(i));
        }
        assert_eq!(book.end(stuck), Some(0));
    }
}
