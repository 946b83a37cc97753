//! The slot protocol of a lane: caller and callee write a slot alternately, and pass its ownership through its word.
//!
//! ```text
//!  caller                                            callee
//!  payload -> slot
//!  word = request_word(call, len, next)  --------->  word is the request of `call` ?  copy the payload out, check slot
//!  ...                                               `next` from now on
//!                                                    payload -> the same slot, at any later time
//!  word is the response to `call` ?      <---------  word = response_word(call, len)
//!  copy the payload out; the slot is free
//! ```
//!
//! Small messages of both directions travel in the same cache line: a round trip moves that line there and back. With one
//! ring per direction it would move two lines.
//!
//! **Promise.** After one side has published a slot, only the other side touches its payload, until that side publishes
//! it in turn. A side that finds in the word that it owns the slot sees the whole payload.

use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use crosstie_protocol::lane::{self, CallNumber, RequestHeader};

use super::Word;
use super::call_table::StartedCall;

/// Passes a slot with a request of `len` bytes to the callee.
#[inline]
pub(crate) fn publish_request<W: Word>(word: &W, started: StartedCall, len: usize) {
    // Release, partner: the Acquire load in `Cursor::take`.
    publish_request_ordered(word, started, len, Release);
}

#[inline]
fn publish_request_ordered<W: Word>(word: &W, started: StartedCall, len: usize, order: Ordering) {
    word.store(lane::request_word(started.call, RequestHeader { len, next: started.next }), order);
}

/// Passes a slot with a response of `len` bytes back to the caller.
#[inline]
pub(crate) fn publish_response<W: Word>(word: &W, call: CallNumber, len: usize) {
    // Release, partner: the Acquire load in `response_len`.
    publish_response_ordered(word, call, len, Release);
}

#[inline]
fn publish_response_ordered<W: Word>(word: &W, call: CallNumber, len: usize, order: Ordering) {
    word.store(lane::response_word(call, len), order);
}

/// The length of the response to this call, if the response is there. `size`: the length of all responses, if they have the same.
#[inline]
pub(crate) fn response_len<W: Word>(word: &W, call: CallNumber, size: Option<usize>) -> Option<usize> {
    // Acquire, partner: the Release store in `publish_response`.
    let word = word.load(Acquire);
    match size {
        // One comparison for the call and the length.
        Some(size) if word == lane::response_word(call, size) => Some(size),
        _ => lane::parse_response(word, call),
    }
}

/// Whether the response to this call is there, and has this length.
#[inline]
pub(crate) fn is_response<W: Word>(word: &W, call: CallNumber, len: usize) -> bool {
    // Acquire, partner: the Release store in `publish_response`.
    word.load(Acquire) == lane::response_word(call, len)
}

/// Where the next request of a lane is, as the callee expects it.
#[derive(Debug)]
pub(crate) struct Cursor {
    /// Less than `slots`.
    slot: usize,
    slots: usize,
    /// The word of the request if it has no bytes, and the next slot is the one after this one: so it nearly always is. The length of such
    /// a request is what its word has in excess of this one.
    word: u64,
    /// How many requests may be taken by going on to the slot after each, before the slots or the numbers of the calls start over. May become
    /// -1.
    steps: i32,
}

/// What is in the slot of the next request.
#[derive(Debug)]
pub(crate) enum Next {
    /// The request is not there yet.
    Nothing,
    /// The request. The length is not validated: a peer wrote it.
    Request { slot: usize, call: CallNumber, len: usize },
    /// A request of a wrong length, or one that names a slot that does not exist as the next one.
    Invalid,
}

impl Cursor {
    /// The cursor of a lane with this many slots, at least one.
    pub(crate) const fn new(slots: usize) -> Cursor {
        assert!(slots > 0);
        Cursor::at(0, slots, CallNumber::FIRST)
    }

    const fn at(slot: usize, slots: usize, call: CallNumber) -> Cursor {
        let next = if slot + 1 == slots { 0 } else { slot + 1 };
        let word = lane::request_word(call, RequestHeader { len: 0, next });
        let calls_left = ((u32::MAX - call.doubled()) / 2) as usize;
        let slots_left = (slots - slot).saturating_sub(2);
        let steps = if slots_left < calls_left { slots_left } else { calls_left };
        Cursor { slot, slots, word, steps: steps as i32 }
    }

    /// The slot of the next request. Less than the number of slots.
    #[inline]
    pub(crate) fn slot(&self) -> usize {
        self.slot
    }

    /// Whether the next request is there. `word` is the word of its slot.
    #[inline]
    pub(crate) fn is_at<W: Word>(&self, word: &W) -> bool {
        // Relaxed: the request itself is read by whoever takes it.
        (word.load(Relaxed) ^ self.word) >> CALL_AT == 0
    }

    /// Takes the next request, if it is there, and moves on to the slot that it names as the next one. `word` is the word of its slot;
    /// `size` is the length of all requests, if they have the same.
    // Inlined: the result is never stored.
    #[inline(always)]
    pub(crate) fn take<W: Word>(&mut self, word: &W, size: Option<usize>) -> Next {
        let (slot, expected) = (self.slot, self.word);
        let call = lane::request_call(expected);
        // Acquire, partner: the Release store in `publish_request`.
        let word = word.load(Acquire);
        let len = word.wrapping_sub(expected) as usize;
        // This is a branch on a guess, not a use of the value that was read from the slot, so the processor can fetch the next slots before
        // this one has arrived.
        if size.map_or(len <= lane::MAX_LEN, |size| len == size) {
            self.steps -= 1;
            if self.steps >= 0 {
                self.slot = slot + 1;
                self.word = expected + TO_NEXT;
                return Next::Request { slot, call, len };
            }
        }
        let Some(RequestHeader { len, next }) = lane::parse_request(word, call) else { return Next::Nothing };
        if size.is_some_and(|size| len != size) || !self.jump(next, call.next()) {
            return Next::Invalid;
        }
        Next::Request { slot, call, len }
    }

    /// Moves on to a call in a slot. False if the slot does not exist.
    #[inline(never)]
    fn jump(&mut self, slot: usize, call: CallNumber) -> bool {
        if slot >= self.slots {
            return false;
        }
        *self = Cursor::at(slot, self.slots, call);
        true
    }
}

/// Where the number of the call begins in a word; below it is a bit that tells requests from responses.
const CALL_AT: u32 = 32;
/// The difference between the words of two requests in neighbouring slots, of which neither is the last one.
const TO_NEXT: u64 = lane::request_word(CallNumber::FIRST.next(), RequestHeader { len: 0, next: 1 })
    - lane::request_word(CallNumber::FIRST, RequestHeader { len: 0, next: 0 });

#[cfg(all(test, not(loom)))]
mod tests {
    use core::sync::atomic::AtomicU64;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any sequence of slots and lengths, also of slots that do not exist, from any number on.
        #[test]
        fn requests_are_taken_in_the_order_in_which_they_name_each_other(
            slots in 1usize..6,
            first in prop_oneof![Just(0u32), (u32::MAX >> 1) - 20..u32::MAX >> 1],
            size in prop::option::of(0usize..4),
            steps in prop::collection::vec((prop::option::weighted(0.3, 0usize..7), 0usize..4), 0..40),
        ) {
            let mut call = CallNumber::FIRST.after(first);
            let mut slot = 0;
            let mut cursor = Cursor::at(slot, slots, call);
            for (next, len) in steps {
                let next = next.unwrap_or((slot + 1) % slots);
                for other in [0, lane::response_word(call, len), lane::request_word(call.next(), RequestHeader { len, next })] {
                    let word = AtomicU64::new(other);
                    prop_assert!(!cursor.is_at(&word));
                    prop_assert!(matches!(cursor.take(&word, size), Next::Nothing));
                }
                let word = AtomicU64::new(lane::request_word(call, RequestHeader { len, next }));
                prop_assert!(cursor.is_at(&word));
                match cursor.take(&word, size) {
                    Next::Request { slot: at, call: number, len: length } => {
                        prop_assert_eq!((at, number, length), (slot, call, len));
                        prop_assert!(next < slots && size.is_none_or(|size| len == size));
                    }
                    Next::Invalid => {
                        prop_assert!(next >= slots || size.is_some_and(|size| len != size));
                        break;
                    }
                    Next::Nothing => prop_assert!(false, "the request is there"),
                }
                (slot, call) = (next, call.next());
                prop_assert_eq!(cursor.slot(), slot);
            }
        }
    }

    #[test]
    fn numbers_of_calls_wrap_around() {
        let last = CallNumber::FIRST.after((u32::MAX >> 1) - 1);
        assert_eq!(last.next(), CallNumber::FIRST);
        let mut cursor = Cursor::at(0, 9, last);
        for (slot, call) in [last, CallNumber::FIRST, CallNumber::FIRST.next()].into_iter().enumerate() {
            let word = AtomicU64::new(lane::request_word(call, RequestHeader { len: 5, next: slot + 1 }));
            let taken = cursor.take(&word, Some(5));
            assert!(
                matches!(taken, Next::Request { slot: at, call: number, len: 5 } if (at, number) == (slot, call)),
                "{taken:?}"
            );
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::super::call_table::CallTable;
    use super::*;

    struct Slot {
        word: AtomicU64,
        value: UnsafeCell<u64>,
    }

    impl Slot {
        fn put(&self, value: u64) {
            // SAFETY: the word says that this side owns the slot; loom checks that claim.
            self.value.with_mut(|v| unsafe { *v = value });
        }

        fn get(&self) -> u64 {
            // SAFETY: as above.
            self.value.with(|v| unsafe { *v })
        }
    }

    /// Makes `calls` calls with at most two in flight. The callee replies to a pair in reverse order, if it has two. Every
    /// response must belong to its own call.
    fn exchange(calls: u64, request_order: Ordering, response_order: Ordering) {
        loom::model(move || {
            const LIMIT: usize = 2;
            let slot = || Slot { word: AtomicU64::new(0), value: UnsafeCell::new(0) };
            let lane: Arc<Vec<Slot>> =
                Arc::new((0..CallTable::<u64>::slots_for(LIMIT)).map(|_| slot()).collect());
            let callee = thread::spawn({
                let lane = lane.clone();
                move || {
                    let mut cursor = Cursor::new(lane.len());
                    let mut unanswered = Vec::new();
                    for _ in 0..calls {
                        let (slot, call) = loop {
                            match cursor.take(&lane[cursor.slot()].word, Some(8)) {
                                Next::Request { slot, call, .. } => break (slot, call),
                                Next::Invalid => panic!("there is no such slot"),
                                Next::Nothing if unanswered.is_empty() => thread::yield_now(),
                                Next::Nothing => reply(&lane, unanswered.pop().unwrap(), response_order),
                            }
                        };
                        unanswered.push((slot, call, lane[slot].get()));
                        if unanswered.len() == LIMIT {
                            reply(&lane, unanswered.pop().unwrap(), response_order);
                        }
                    }
                    while let Some(last) = unanswered.pop() {
                        reply(&lane, last, response_order);
                    }
                }
            });
            let mut table = CallTable::new(LIMIT);
            let (mut made, mut ended) = (0, 0);
            while ended < calls {
                if made < calls
                    && let Ok(started) = table.start(made)
                {
                    lane[started.slot].put(made);
                    publish_request_ordered(&lane[started.slot].word, started, 8, request_order);
                    made += 1;
                    continue;
                }
                let arrived = table
                    .iter()
                    .find(|(slot, call)| response_len(&lane[*slot].word, *call, Some(8)).is_some());
                match arrived {
                    Some((slot, _)) => {
                        let value = lane[slot].get();
                        assert_eq!(Some(value), table.finish(slot).map(|token| token + 100));
                        ended += 1;
                    }
                    None => thread::yield_now(),
                }
            }
            callee.join().unwrap();
        });
    }

    fn reply(lane: &[Slot], (slot, call, value): (usize, CallNumber, u64), order: Ordering) {
        lane[slot].put(value + 100);
        publish_response_ordered(&lane[slot].word, call, 8, order);
    }

    #[test]
    fn loom_lane_responses_out_of_order() {
        exchange(3, Release, Release);
    }

    /// A twin that must fail: if the store of the request word does not release, the callee sees the word without the payload.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_request_is_caught() {
        exchange(2, Ordering::Relaxed, Release);
    }

    /// A twin that must fail: as above, for the response.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_response_is_caught() {
        exchange(2, Release, Ordering::Relaxed);
    }
}
