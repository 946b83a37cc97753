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

use core::sync::atomic::Ordering::{self, Acquire, Release};

use crosstie_protocol::lane::{self, CallNumber, RequestHeader};

use super::Word;
use super::call_table::StartedCall;

/// Passes a slot with a request of `len` bytes to the callee.
#[inline]
pub(crate) fn publish_request<W: Word>(word: &W, started: StartedCall, len: usize) {
    // Release, partner: the Acquire load in `parse_request`.
    publish_request_ordered(word, started, len, Release);
}

#[inline]
fn publish_request_ordered<W: Word>(word: &W, started: StartedCall, len: usize, order: Ordering) {
    word.store(lane::request_word(started.call, RequestHeader { len, next: started.next }), order);
}

/// The header of the request of this call, if the request is there.
#[inline]
pub(crate) fn parse_request<W: Word>(word: &W, call: CallNumber) -> Option<RequestHeader> {
    // Acquire, partner: the Release store in `publish_request`.
    lane::parse_request(word.load(Acquire), call)
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

/// The length of the response to this call, if the response is there.
#[inline]
pub(crate) fn response_len<W: Word>(word: &W, call: CallNumber) -> Option<usize> {
    // Acquire, partner: the Release store in `publish_response`.
    lane::parse_response(word.load(Acquire), call)
}

/// The slot and the number of the next request of a lane, as the callee expects them.
#[derive(Debug)]
pub(crate) struct Cursor {
    pub(crate) slot: usize,
    pub(crate) call: CallNumber,
}

impl Cursor {
    pub(crate) const START: Cursor = Cursor { slot: 0, call: CallNumber::FIRST };

    /// Moves on to the slot that a request names as the next one. False if the caller names a slot that does not exist.
    #[inline]
    pub(crate) fn advance(&mut self, next: usize, slots: usize) -> bool {
        // The next slot is nearly always the one after this one. This is a branch on that guess, not a use of the value that
        // was read from the slot, so the processor can fetch the next slots before this one has arrived.
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
                    let mut cursor = Cursor::START;
                    let mut unanswered = Vec::new();
                    for _ in 0..calls {
                        let request = loop {
                            match parse_request(&lane[cursor.slot].word, cursor.call) {
                                Some(request) => break request,
                                None if unanswered.is_empty() => thread::yield_now(),
                                None => reply(&lane, unanswered.pop().unwrap(), response_order),
                            }
                        };
                        unanswered.push((cursor.slot, cursor.call, lane[cursor.slot].get()));
                        assert!(cursor.advance(request.next, lane.len()));
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
                let arrived =
                    table.iter().find(|(slot, call)| response_len(&lane[*slot].word, *call).is_some());
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
