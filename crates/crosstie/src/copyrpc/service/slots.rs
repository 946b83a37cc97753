//! Slots for open calls, and the queue of calls that wait for room on one endpoint.
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
use crate::copyrpc::{CallFailed, Endpoint, Failure};

/// Identifies an open call of a driver: an index with a generation. The driver attaches it to its calls; it has no meaning
/// outside of that driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallToken(Key<20>);

/// The most calls that can be open at a time, and the default limit of a driver.
pub(super) const MAX_CALLS: usize = Key::<20>::INDICES as usize;

/// All slots of a driver.
pub(super) struct Slots {
    pub(super) slots: Vec<Slot>,
    /// A linked list of free slots, the least recently used first.
    first_free: usize,
    last_free: usize,
    pub(super) limit: usize,
}

pub(super) struct Slot {
    pub(super) token: CallToken,
    pub(super) state: SlotState,
    pub(super) waker: Option<Waker>,
    /// The request while the call is queued, then the response: `len` bytes of it.
    pub(super) buffer: Vec<u8>,
    pub(super) len: usize,
    /// The longest response, and when the call times out.
    pub(super) allowance: usize,
    pub(super) deadline: Option<Instant>,
    /// The queue that the call is in.
    pub(super) queue: Option<Rc<EndpointQueue>>,
    next_free: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    Free,
    /// The call waits for room.
    Queued,
    /// The call waits for room, and its future was dropped.
    DroppedQueued,
    /// The call was made.
    Called,
    /// The call was made, and its future was dropped.
    DroppedCalled,
    Answered,
    Failed(Error),
}

/// The end of the list of free slots.
const NONE: usize = usize::MAX;

impl Slots {
    pub(super) fn new(limit: usize) -> Slots {
        Slots { slots: Vec::new(), first_free: NONE, last_free: NONE, limit: limit.min(MAX_CALLS) }
    }

    #[inline]
    pub(super) fn get(&mut self, token: CallToken) -> Option<&mut Slot> {
        self.slots.get_mut(token.0.index() as usize).filter(|slot| slot.token == token)
    }

    /// Takes a free slot. `None`: the limit is reached.
    #[inline]
    pub(super) fn allocate(&mut self, state: SlotState) -> Option<&mut Slot> {
        let index = match self.first_free {
            NONE => self.grow()?,
            index => index,
        };
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
            waker: None,
            buffer: Vec::new(),
            len: 0,
            allowance: 0,
            deadline: None,
            queue: None,
            next_free: NONE,
        });
        Some(index)
    }

    /// Frees a slot. Returns its waker, for the caller to drop while nothing is borrowed.
    #[inline(always)]
    pub(super) fn release(&mut self, token: CallToken) -> Option<Waker> {
        let index = token.0.index() as usize;
        let slot = self.slots.get_mut(index).filter(|slot| slot.token == token)?;
        slot.token = CallToken(token.0.next());
        slot.state = SlotState::Free;
        slot.queue = None;
        slot.next_free = NONE;
        let waker = slot.waker.take();
        match self.first_free {
            NONE => self.first_free = index,
            _ => self.slots[self.last_free].next_free = index,
        }
        self.last_free = index;
        waker
    }
}

impl Slot {
    /// The buffer, with a length of `len` bytes.
    #[inline]
    pub(super) fn buffer_of(&mut self, len: usize) -> &mut [u8] {
        if self.buffer.len() < len {
            self.buffer.resize(len, 0);
        }
        self.len = len;
        &mut self.buffer[..len]
    }
}

/// An endpoint, and the calls that wait for room on it, in order.
pub(super) struct EndpointQueue {
    /// `None` after it was closed.
    pub(super) endpoint: RefCell<Option<Endpoint<CallToken>>>,
    pub(super) calls: RefCell<VecDeque<CallToken>>,
    /// How many of these calls have no future any more.
    pub(super) dropped: Cell<usize>,
    /// Whether it is in the call table's list of queues with waiting calls.
    pub(super) is_listed: Cell<bool>,
}

impl EndpointQueue {
    pub(super) fn new(endpoint: Endpoint<CallToken>) -> EndpointQueue {
        EndpointQueue {
            endpoint: RefCell::new(Some(endpoint)),
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
        allowance: usize,
        token: CallToken,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        let endpoint = self.endpoint.borrow();
        let Some(endpoint) = &*endpoint else { return Err(closed()) };
        let called = match deadline {
            None => endpoint.call(bytes, allowance, token),
            Some(at) => match at.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return Err(CallFailed::TimedOut.into()),
                left => endpoint.call_within(bytes, allowance, token, left),
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
