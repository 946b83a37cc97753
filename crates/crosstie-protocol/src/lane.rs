//! The word in front of each slot of a lane: which side owns the slot, for which call, and how long the message is.
//!
//! A lane is an array of slots that a caller and a callee use alternately: the caller writes a request into a slot, and the
//! callee writes the response into the same slot. The word of a request also names the slot of the caller's next request:
//! responses free the slots in any order, so the callee could not know it otherwise.
//!
//! ```text
//!  63          33    32      31      21  20       0
//! +--------------+----------+-----------+----------+
//! | call number  | response | next slot |  length  |
//! +--------------+----------+-----------+----------+
//! ```

/// Longest message, in bytes.
pub const MAX_LEN: usize = (1 << LEN_BITS) - 1;
/// Most slots of a lane.
pub const MAX_SLOTS: usize = 1 << 11;

const LEN_BITS: u32 = 21;
const LEN_MASK: u32 = (1 << LEN_BITS) - 1;
const RESPONSE: u32 = 1;

/// The number of a call within its lane, in 31 bits. Never zero, so zeroed memory is not a call.
///
/// It is kept as the upper half of a request's word has it: twice the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallNumber(u32);

impl CallNumber {
    /// The number of the first call of a lane.
    pub const FIRST: CallNumber = CallNumber(2);

    /// The number of the call after this one.
    #[must_use]
    #[inline]
    pub const fn next(self) -> CallNumber {
        // Numbers are 1 to 2^31 - 1.
        match self.0.wrapping_add(2) {
            0 => CallNumber::start_over(),
            next => CallNumber(next),
        }
    }

    /// Not inlined, so that all other calls take a branch that is always the same, and no conditional move.
    #[cold]
    #[inline(never)]
    const fn start_over() -> CallNumber {
        CallNumber::FIRST
    }

    /// Twice the number.
    ///
    /// ```
    /// # use crosstie_protocol::lane::CallNumber;
    /// assert_eq!(CallNumber::FIRST.next().doubled(), 4);
    /// ```
    #[inline]
    pub const fn doubled(self) -> u32 {
        self.0
    }

    /// The number of the call that comes `calls` calls later, for less than 2^31 calls.
    #[must_use]
    pub const fn after(self, calls: u32) -> CallNumber {
        // Numbers are 1 to 2^31 - 1.
        let period = (u32::MAX >> 1) as u64;
        let number = (self.get() as u64 - 1 + calls as u64) % period + 1;
        CallNumber((number as u32) << 1)
    }

    /// The number as an integer of 31 bits.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0 >> 1
    }
}

/// What the word of a request says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The length in bytes.
    pub len: usize,
    /// The slot of the caller's next request. Not validated: a peer wrote it.
    pub next: usize,
}

/// The word of a request.
///
/// ```
/// use crosstie_protocol::lane::{self, CallNumber, RequestHeader};
/// let call = CallNumber::FIRST;
/// let word = lane::request_word(call, RequestHeader { len: 32, next: 7 });
/// assert_eq!(lane::parse_request(word, call), Some(RequestHeader { len: 32, next: 7 }));
/// assert_eq!(lane::parse_response(word, call), None);
/// assert_eq!(lane::parse_response(lane::response_word(call, 16), call), Some(16));
/// ```
#[inline]
pub const fn request_word(call: CallNumber, request: RequestHeader) -> u64 {
    debug_assert!(request.len <= MAX_LEN && request.next < MAX_SLOTS);
    (call.0 as u64) << 32 | (request.next as u64) << LEN_BITS | request.len as u64
}

/// The word of a response.
#[inline]
pub const fn response_word(call: CallNumber, len: usize) -> u64 {
    debug_assert!(len <= MAX_LEN);
    ((call.0 | RESPONSE) as u64) << 32 | len as u64
}

/// The number of the call whose request this word is.
///
/// ```
/// use crosstie_protocol::lane::{self, CallNumber, RequestHeader};
/// let word = lane::request_word(CallNumber::FIRST, RequestHeader { len: 32, next: 7 });
/// assert_eq!(lane::request_call(word), CallNumber::FIRST);
/// ```
#[inline]
pub const fn request_call(word: u64) -> CallNumber {
    CallNumber((word >> 32) as u32)
}

/// The header of the request, if the word is the request of this call. The length may be any value up to 2^21 - 1.
#[inline]
pub const fn parse_request(word: u64, call: CallNumber) -> Option<RequestHeader> {
    if (word >> 32) as u32 != call.0 {
        return None;
    }
    let low = word as u32;
    Some(RequestHeader { len: (low & LEN_MASK) as usize, next: (low >> LEN_BITS) as usize })
}

/// The length of the response, if the word is the response to this call. It may be any value up to 2^21 - 1.
#[inline]
pub const fn parse_response(word: u64, call: CallNumber) -> Option<usize> {
    if (word >> 32) as u32 != call.0 | RESPONSE {
        return None;
    }
    Some((word as u32 & LEN_MASK) as usize)
}

/// Which side owns a slot, and for which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotOwner {
    /// The callee: the slot holds the request of this call.
    Callee(CallNumber),
    /// The caller: the slot holds the response to this call, with this many bytes.
    Caller(CallNumber, usize),
}

/// The owner of a slot with this word. A word of zeros reads as a request.
///
/// ```
/// use crosstie_protocol::lane::{self, CallNumber, SlotOwner};
/// assert_eq!(lane::slot_owner(lane::response_word(CallNumber::FIRST, 3)), SlotOwner::Caller(CallNumber::FIRST, 3));
/// ```
#[inline]
pub const fn slot_owner(word: u64) -> SlotOwner {
    let call = CallNumber((word >> 32) as u32 & !RESPONSE);
    if (word >> 32) as u32 & RESPONSE == 0 {
        SlotOwner::Callee(call)
    } else {
        SlotOwner::Caller(call, (word as u32 & LEN_MASK) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_extreme_values() {
        let last = CallNumber::FIRST.after((u32::MAX >> 1) - 1);
        assert_eq!(last.get(), u32::MAX >> 1);
        for call in [CallNumber::FIRST, last, last.next()] {
            for len in [0, 1, 56, MAX_LEN] {
                for next in [0, 1, MAX_SLOTS - 1] {
                    let word = request_word(call, RequestHeader { len, next });
                    assert_eq!(parse_request(word, call), Some(RequestHeader { len, next }));
                    assert_eq!(parse_request(word, call.next()), None);
                    assert_eq!(parse_response(word, call), None);
                    assert_eq!(slot_owner(word), SlotOwner::Callee(call));
                }
                assert_eq!(slot_owner(response_word(call, len)), SlotOwner::Caller(call, len));
                assert_eq!(parse_response(response_word(call, len), call), Some(len));
                assert_eq!(parse_response(response_word(call, len), call.next()), None);
                assert_eq!(parse_request(response_word(call, len), call), None);
            }
        }
    }

    #[test]
    fn zero_word_is_no_call() {
        assert_eq!(parse_request(0, CallNumber::FIRST), None);
        assert_eq!(parse_response(0, CallNumber::FIRST), None);
    }
}
