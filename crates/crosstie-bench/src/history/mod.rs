//! Records the operations of clients and checks that the history is linearizable.
//!
//! Each client thread writes its operations into its own [`Recorder`]. [`check()`] takes the [`History`]s of all clients, which may come
//! as bytes from other processes. It checks that every key behaved like one atomic register: each operation can be given an instant
//! between its call and its return, so that in the order of these instants every response is right (linearizability).
//!
//! Times are those of the machine's monotonic clock. They can be compared between processes of one machine; times of other machines
//! must first be converted to one clock. An operation without a response ([`Outcome::Unknown`]) may have been executed at any time after
//! its call, or never.
//!
//! ```
//! use crosstie_bench::history::{Recorder, check};
//! use crosstie_kv::wire::{Op, WordRequest};
//! use crosstie_kv::store::Shard;
//! let (mut shard, mut recorder) = (Shard::new(1 << 20), Recorder::new(0, 100));
//! for op in [Op::Get, Op::Put, Op::Get, Op::Delete, Op::Get] {
//!     let request = WordRequest { value: 7, ..WordRequest::new(op, 0, 42) };
//!     let call = recorder.begin(&request).expect("there is room for 100");
//!     recorder.end(call, &shard.apply(&request));
//! }
//! assert_eq!(check(&[recorder.finish()]).unwrap().operations, 5);
//! ```

#![forbid(unsafe_code)]

mod check;
mod search;
mod unique_puts;

use rustix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crosstie_kv::wire::{Op, Status, WordRequest, WordResponse};

pub use check::{BUDGET, Failure, Summary, check, check_from};

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Event {
    /// When it was called: nanoseconds of the monotonic clock.
    pub called: u64,
    /// When its response came; [`Event::NEVER`] if the outcome is unknown.
    pub returned: u64,
    /// The key.
    pub key: u64,
    /// The new value, where the operation has one.
    pub value: u64,
    /// The value that a compare-and-swap expects.
    pub expected: u64,
    /// The value in the response.
    pub returned_value: u64,
    /// The client.
    pub client: u32,
    /// The operation.
    pub op: Op,
    /// How it ended.
    pub outcome: Outcome,
    /// Zero.
    pub reserved: [u8; 2],
}

/// How an operation ended, as far as its client knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Outcome {
    /// No response came, or [`Status::NodeGone`]: the operation may have been executed, or may still be.
    Unknown = 0,
    /// [`Status::Done`].
    Done = 1,
    /// [`Status::NotFound`].
    NotFound = 2,
    /// [`Status::Mismatch`].
    Mismatch = 3,
    /// Refused; nothing was changed.
    Refused = 4,
}

/// Records one client's operations. Its memory is allocated at the start.
pub struct Recorder {
    client: u32,
    events: Vec<Event>,
}

/// An operation that was called and has not returned.
#[derive(Debug, PartialEq, Eq)]
pub struct Pending(u32);

/// Operations that were recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// In the order of their calls, for each client.
    pub events: Vec<Event>,
}

/// The bytes are not a valid history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these {len} bytes are not a valid history: record it again with this version")]
pub struct DecodeError {
    len: usize,
}

/// Operations that a recorder can hold at most.
pub const MAX_EVENTS: usize = u32::MAX as usize;

/// The first bytes of an encoded history.
const MAGIC: [u8; 8] = *b"ctkvhis1";

const _: () = assert!(size_of::<Event>() == 56);

impl Event {
    /// `returned` of an operation without a response.
    pub const NEVER: u64 = u64::MAX;
}

impl Recorder {
    /// Room for `capacity` operations of `client`, at most [`MAX_EVENTS`].
    pub fn new(client: u32, capacity: usize) -> Recorder {
        Recorder { client, events: Vec::with_capacity(capacity.min(MAX_EVENTS)) }
    }

    /// Records that `request` is about to be sent; `None` if the recorder is full.
    #[inline]
    pub fn begin(&mut self, request: &WordRequest) -> Option<Pending> {
        if self.events.len() == self.events.capacity() {
            return None;
        }
        let number = self.events.len() as u32;
        self.events.push(Event {
            called: now(),
            returned: Event::NEVER,
            key: request.key,
            value: request.value,
            expected: request.expected,
            returned_value: 0,
            client: self.client,
            op: request.op,
            outcome: Outcome::Unknown,
            reserved: [0; 2],
        });
        Some(Pending(number))
    }

    /// Records the response that has just come. An operation that is never ended has an unknown outcome.
    #[inline]
    pub fn end(&mut self, pending: Pending, response: &WordResponse) {
        let returned = now();
        let outcome = match response.status {
            Status::NodeGone => return,
            Status::Done => Outcome::Done,
            Status::NotFound => Outcome::NotFound,
            Status::Mismatch => Outcome::Mismatch,
            Status::OutOfMemory
            | Status::NoRegisteredMemory
            | Status::Misrouted
            | Status::Malformed
            | Status::Fenced => Outcome::Refused,
        };
        // The number in a `Pending` of another recorder may be out of range.
        if let Some(event) = self.events.get_mut(pending.0 as usize) {
            *event = Event { returned, outcome, returned_value: response.value, ..*event };
        }
    }

    /// What is recorded so far, in the order of calls. A process that may be killed can save it elsewhere.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Operations that can still be recorded.
    pub fn room(&self) -> usize {
        self.events.capacity() - self.events.len()
    }

    /// All that was recorded.
    pub fn finish(self) -> History {
        History { events: self.events }
    }
}

impl History {
    /// Appends the history's bytes to `to`.
    pub fn write_to(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&MAGIC);
        to.extend_from_slice((self.events.len() as u64).as_bytes());
        to.extend_from_slice(self.events.as_bytes());
    }

    /// Decodes the history at the beginning of `bytes`. Also returns the bytes after it.
    pub fn read_from(bytes: &[u8]) -> Result<(History, &[u8]), DecodeError> {
        History::split(bytes).ok_or(DecodeError { len: bytes.len() })
    }

    fn split(bytes: &[u8]) -> Option<(History, &[u8])> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (count, rest) = u64::read_from_prefix(rest).ok()?;
        let len = usize::try_from(count).ok()?.checked_mul(size_of::<Event>())?;
        let (events, rest) = rest.split_at_checked(len)?;
        let events: Option<Vec<Event>> = events
            .chunks_exact(size_of::<Event>())
            .map(|event| Event::try_read_from_bytes(event).ok().filter(Event::is_valid))
            .collect();
        Some((History { events: events? }, rest))
    }
}

impl Event {
    fn is_valid(&self) -> bool {
        self.called <= self.returned && (self.outcome == Outcome::Unknown) == (self.returned == Event::NEVER)
    }
}

/// Nanoseconds of the monotonic clock, the same in all processes of a machine.
#[inline]
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // The monotonic clock is never negative.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests;
