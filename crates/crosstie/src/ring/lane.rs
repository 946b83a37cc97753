//! Handing a slot over and back: one caller and one callee write it in turn.
//!
//! ```text
//!  caller                                       callee
//!  payload -> slot
//!  word = request(call, len, next)  --------->  word is request(call)?  copy the payload out; look at `next` from now on
//!  ...                                          payload -> the same slot, at any later time
//!  word is answer(call)?            <---------  word = answer(call, len)
//!  copy the payload out; the slot is free
//! ```
//!
//! Both messages travel in one cache line if they are small: a round trip moves that line there and back, where a ring
//! each way would move two.
//!
//! **Promise.** Between its publication and the other side's, a slot's payload is touched by nobody but the other side;
//! whoever finds its turn in the word sees the whole payload that belongs to it.

use core::sync::atomic::Ordering::{self, Acquire, Release};

use crosstie_protocol::lane::{self, CallNumber, RequestHeader};

use super::Word;
use super::call_table::StartedCall;

/// Gives a slot with a request of `len` bytes in it to the callee.
#[inline]
pub(crate) fn request<W: Word>(word: &W, begun: StartedCall, len: usize) {
    // Release, partner: the Acquire load in `requested`.
    request_ordered(word, begun, len, Release);
}

#[inline]
fn request_ordered<W: Word>(word: &W, begun: StartedCall, len: usize, order: Ordering) {
    word.store(lane::request_word(begun.call, RequestHeader { len, next: begun.next }), order);
}

/// The request of this call, if it is there.
#[inline]
pub(crate) fn requested<W: Word>(word: &W, call: CallNumber) -> Option<RequestHeader> {
    // Acquire, partner: the Release store in `request`.
    lane::parse_request(word.load(Acquire), call)
}

/// Gives a slot with an answer of `len` bytes in it back to the caller.
#[inline]
pub(crate) fn answer<W: Word>(word: &W, call: CallNumber, len: usize) {
    // Release, partner: the Acquire load in `answered`.
    answer_ordered(word, call, len, Release);
}

#[inline]
fn answer_ordered<W: Word>(word: &W, call: CallNumber, len: usize, order: Ordering) {
    word.store(lane::response_word(call, len), order);
}

/// The length of the answer to this call, if it is there.
#[inline]
pub(crate) fn answered<W: Word>(word: &W, call: CallNumber) -> Option<usize> {
    // Acquire, partner: the Release store in `answer`.
    lane::parse_response(word.load(Acquire), call)
}

/// Where the callee looks for the next request of a lane.
#[derive(Debug)]
pub(crate) struct Cursor {
    pub(crate) slot: usize,
    pub(crate) call: CallNumber,
}

impl Cursor {
    pub(crate) const START: Cursor = Cursor { slot: 0, call: CallNumber::FIRST };

    /// Goes on behind a request. False if the caller names a slot that does not exist.
    #[inline]
    pub(crate) fn advance(&mut self, next: usize, slots: usize) -> bool {
        // Nearly always the slot behind this one. A branch, and not a value that comes out of the slot: so the processor
        // can fetch the next slots before this one has arrived.
        self.slot = if self.slot + 1 == slots { 0 } else { self.slot + 1 };
        if next != self.slot {
            self.jump(next);
        }
        self.call = self.call.next();
        self.slot < slots
    }

    #[cold]
    #[inline(never)]
    fn jump(&mut self, next: usize) {
        self.slot = next;
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
            // SAFETY: the word says that it is this side's turn; loom checks that claim.
            self.value.with_mut(|v| unsafe { *v = value });
        }

        fn get(&self) -> u64 {
            // SAFETY: as above.
            self.value.with(|v| unsafe { *v })
        }
    }

    /// Makes `calls` calls with at most two under way; the callee answers every pair in reverse order if it has two.
    /// Every answer is its own call's.
    fn exchange(calls: u64, request_order: Ordering, answer_order: Ordering) {
        loom::model(move || {
            const LIMIT: usize = 2;
            let slot = || Slot { word: AtomicU64::new(0), value: UnsafeCell::new(0) };
            let lane: Arc<Vec<Slot>> =
                Arc::new((0..CallTable::<u64>::slots_for(LIMIT)).map(|_| slot()).collect());
            let callee = thread::spawn({
                let lane = lane.clone();
                move || {
                    let mut cursor = Cursor::START;
                    let mut owed = Vec::new();
                    for _ in 0..calls {
                        let request = loop {
                            match requested(&lane[cursor.slot].word, cursor.call) {
                                Some(request) => break request,
                                None if owed.is_empty() => thread::yield_now(),
                                None => reply(&lane, owed.pop().unwrap(), answer_order),
                            }
                        };
                        owed.push((cursor.slot, cursor.call, lane[cursor.slot].get()));
                        assert!(cursor.advance(request.next, lane.len()));
                        if owed.len() == LIMIT {
                            reply(&lane, owed.pop().unwrap(), answer_order);
                        }
                    }
                    while let Some(last) = owed.pop() {
                        reply(&lane, last, answer_order);
                    }
                }
            });
            let mut book = CallTable::new(LIMIT);
            let (mut made, mut ended) = (0, 0);
            while ended < calls {
                if made < calls
                    && let Ok(begun) = book.start(made)
                {
                    lane[begun.slot].put(made);
                    request_ordered(&lane[begun.slot].word, begun, 8, request_order);
                    made += 1;
                    continue;
                }
                let there = book.iter().find(|(slot, call)| answered(&lane[*slot].word, *call).is_some());
                match there {
                    Some((slot, _)) => {
                        let value = lane[slot].get();
                        assert_eq!(Some(value), book.finish(slot).map(|token| token + 100));
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
        answer_ordered(&lane[slot].word, call, 8, order);
    }

    #[test]
    fn loom_lane_answers_out_of_order() {
        exchange(3, Release, Release);
    }

    /// A twin that must fail: a request that does not release shows the callee a slot without its payload.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_request_is_caught() {
        exchange(2, Ordering::Relaxed, Release);
    }

    /// A twin that must fail: as above, for the answer.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_answer_is_caught() {
        exchange(2, Release, Ordering::Relaxed);
    }
}
