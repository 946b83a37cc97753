//! Slots for open calls, and the queue of calls that wait for room on one connection.
//!
//! A slot belongs to one call, from the call until its future has taken the result. Its state:
//!
//! ```text
//!            start ──▶ Queued ──room──▶ Called ──response──▶ Answered ──taken──▶ free
//!              │         │  │             │ └─────────────▶ Failed   ──taken──▶ free
//!              └─────────│──│─────────────┘                   ▲
//!      future dropped:   │  └─ timed out, or closed ──────────┘
//!                        ▼                ▼
//!                  DroppedQueued ──▶  DroppedCalled ──response, counted──▶ free
//! ```
//!
//! Slots and the buffers in them are reused. Once there are as many as calls at a time, nothing is allocated.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;

use super::error::Error;
use crate::copyrpc::{CallFailed, Connection, Failure};

/// Identifies an open call of a driver: an index with a generation. The driver attaches it to its calls; it has no meaning
/// outside of that driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallToken(Key<20>);

/// The most calls that can be open at a time, and the default limit of a driver.
pub(super) const MAX_CALLS: usize = Key::<20>::INDICES as usize;

impl CallToken {
    /// Tokens of no call: no key is so small. The future has taken its result, or there was no slot for its call.
    pub(super) const TAKEN: CallToken = CallToken(Key::from_bits(0));
    pub(super) const NO_SLOT: CallToken = CallToken(Key::from_bits(1));
}

/// All slots of a driver.
pub(super) struct Slots {
    pub(super) slots: Vec<Slot>,
    /// By the index of their slot.
    extras: Vec<Extra>,
    /// A linked list of free slots, the one that was used last first.
    first_free: u32,
    pub(super) limit: usize,
}

/// One cache line.
#[repr(align(64))]
pub(super) struct Slot {
    pub(super) token: CallToken,
    pub(super) state: SlotState,
    next_free: u32,
    /// The request while the call is queued, then the response: `len` bytes of it.
    pub(super) len: usize,
    pub(super) buffer: Vec<u8>,
    pub(super) waker: Option<Waker>,
}

const _: () = assert!(size_of::<Slot>() <= 64);

/// What a call needs that waits for room, or has failed. Not in its [`Slot`], which is one cache line.
#[derive(Default)]
pub(super) struct Extra {
    /// The longest response, and when the call times out.
    pub(super) response_len: usize,
    pub(super) deadline: Option<Instant>,
    /// The queue that the call is in.
    pub(super) queue: Option<Rc<ConnectionQueue>>,
    /// Why the call failed.
    pub(super) error: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    /// The call waits for room.
    Queued,
    /// The call was made.
    Called,
    Answered,
    Failed,
    /// The call waits for room, and its future was dropped.
    DroppedQueued,
    /// The call was made, and its future was dropped.
    DroppedCalled,
    Free,
}

/// The end of the list of free slots: no slot has this index.
const NONE: u32 = u32::MAX;

impl Slots {
    pub(super) fn new(limit: usize) -> Slots {
        let (slots, extras) = (Vec::new(), Vec::new());
        Slots { slots, extras, first_free: NONE, limit: limit.min(MAX_CALLS) }
    }

    #[inline]
    pub(super) fn get(&mut self, token: CallToken) -> Option<&mut Slot> {
        self.slots.get_mut(token.0.index() as usize).filter(|slot| slot.token == token)
    }

    /// A slot, and what belongs to it.
    pub(super) fn get_with_extra(&mut self, token: CallToken) -> Option<(&mut Slot, &mut Extra)> {
        let index = token.0.index() as usize;
        let slot = self.slots.get_mut(index).filter(|slot| slot.token == token)?;
        Some((slot, self.extras.get_mut(index)?))
    }

    /// Ends a call with an error. Returns its waker, for the caller to wake while nothing is borrowed.
    #[cold]
    pub(super) fn fail(&mut self, token: CallToken, error: Error) -> Option<Waker> {
        let (slot, extra) = self.get_with_extra(token)?;
        slot.state = SlotState::Failed;
        (extra.error, extra.queue) = (Some(error), None);
        slot.waker.take()
    }

    /// Takes a free slot. `None`: the limit is reached.
    #[inline]
    pub(super) fn allocate(&mut self, state: SlotState) -> Option<&mut Slot> {
        let mut index = self.first_free as usize;
        if index >= self.slots.len() {
            index = self.grow()?;
        }
        let slot = self.slots.get_mut(index)?;
        self.first_free = slot.next_free;
        slot.state = state;
        Some(slot)
    }

    #[cold]
    fn grow(&mut self) -> Option<usize> {
        let index = self.slots.len();
        if index >= self.limit {
            return None;
        }
        self.slots.push(Slot {
            token: CallToken(Key::first(index as u32)),
            state: SlotState::Free,
            next_free: NONE,
            len: 0,
            buffer: Vec::new(),
            waker: None,
        });
        self.extras.push(Extra::default());
        Some(index)
    }

    /// Frees the slot of a call that has ended, or whose future was dropped: it has no waker any more.
    #[inline]
    pub(super) fn release(&mut self, token: CallToken) {
        let index = token.0.index();
        let Some(slot) = self.slots.get_mut(index as usize).filter(|slot| slot.token == token) else {
            return;
        };
        debug_assert!(slot.waker.is_none());
        slot.token = CallToken(token.0.next());
        slot.state = SlotState::Free;
        slot.next_free = self.first_free;
        self.first_free = index;
    }

    /// Frees a slot as [`release`](Slots::release) does, and what belongs to it.
    #[cold]
    pub(super) fn release_with_extra(&mut self, token: CallToken) {
        if let Some((_, extra)) = self.get_with_extra(token) {
            extra.queue = None;
        }
        self.release(token);
    }
}

impl Slot {
    /// The buffer, with a length of `len` bytes.
    #[inline]
    pub(super) fn buffer_of(&mut self, len: usize) -> &mut [u8] {
        self.len = len;
        if self.buffer.len() < len {
            self.grow_buffer();
        }
        &mut self.buffer[..len]
    }

    #[cold]
    fn grow_buffer(&mut self) {
        self.buffer.resize(self.len, 0);
    }
}

/// A connection, and the calls that wait for room on it, in order.
pub(super) struct ConnectionQueue {
    /// `None` after it was closed.
    pub(super) connection: RefCell<Option<Connection<CallToken>>>,
    pub(super) calls: RefCell<VecDeque<CallToken>>,
    /// How many of these calls have no future any more.
    pub(super) dropped: Cell<usize>,
    /// Whether it is in the call table's list of queues with waiting calls.
    pub(super) is_listed: Cell<bool>,
}

impl ConnectionQueue {
    pub(super) fn new(connection: Connection<CallToken>) -> ConnectionQueue {
        ConnectionQueue {
            connection: RefCell::new(Some(connection)),
            calls: RefCell::new(VecDeque::new()),
            dropped: Cell::new(0),
            is_listed: Cell::new(false),
        }
    }

    /// Whether calls wait for room.
    #[inline]
    pub(super) fn has_calls(&self) -> bool {
        // A queue with calls is listed.
        self.is_listed.get() && !self.calls.borrow().is_empty()
    }

    /// Makes a call. `Ok(false)`: there is no room for now.
    #[inline]
    pub(super) fn call(
        &self,
        bytes: &[u8],
        response_len: usize,
        token: CallToken,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        let connection = self.connection.borrow();
        let Some(connection) = &*connection else { return Err(closed()) };
        let called = match deadline {
            None => connection.call(bytes, response_len, token),
            Some(at) => match at.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return Err(CallFailed::TimedOut.into()),
                left => connection.call_within(bytes, response_len, token, left),
            },
        };
        match called {
            Ok(()) => Ok(true),
            Err(error) if error.cause.is_back_pressure() => Ok(false),
            Err(error) => Err(error.cause.into()),
        }
    }
}

pub(super) fn closed() -> Error {
    Error::Failed(Failure::Closed.into())
}
