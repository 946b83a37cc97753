//! The open calls of a driver: one slot each, from the call until its future has taken the answer.
//!
//! ```text
//!            begin ──▶ Queued ──room──▶ Called ──answer──▶ Answered ──taken──▶ free
//!              │         │  │             │ └───────────▶ Ended   ──taken──▶ free
//!              └─────────│──│─────────────┘                 ▲
//!      future dropped:   │  └─ too late, or over ───────────┘
//!                        ▼                ▼
//!                    Forgotten ────▶  Dropped ──answer, counted──▶ free
//! ```
//!
//! Slots, and the buffers in them, are used again: once there are as many as there are calls at a time, nothing is allocated.
//! No waker runs, and none is dropped, while a slot is borrowed: either may drop futures, which come back here.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;

use super::error::Error;
use crate::copyrpc::{CallFailed, Endpoint, Failure, Payload};

/// What a driver attaches to its calls. It means something to its driver only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(Key<20>);

/// Calls that can be open at a time, if the driver is not told otherwise; and at most.
pub(super) const MAX_CALLS: usize = Key::<20>::INDICES as usize;
/// Rounds between looks at the clock, while calls with deadlines wait for room.
const DEADLINE_ROUNDS: u32 = 64;

/// What a driver has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverCounters {
    /// Calls begun.
    pub calls: u64,
    /// Those that had to wait for room.
    pub waited: u64,
    /// Answers that came for futures that were dropped.
    pub dropped: u64,
    /// Answers that made no sense.
    pub malformed: u64,
}

pub(super) struct Desk {
    slots: RefCell<Slots>,
    /// Calls that the context, or a queue, has yet to end.
    open: Cell<usize>,
    /// Connections with calls that wait for room.
    pressed: RefCell<Vec<Rc<Line>>>,
    has_pressed: Cell<bool>,
    rounds: Cell<u32>,
    /// Who is to be woken by the next call.
    sleeper: RefCell<Option<Waker>>,
    is_asleep: Cell<bool>,
    /// Nobody polls any more.
    is_shut: Cell<bool>,
    counters: Cell<DriverCounters>,
}

/// A connection, and the calls that wait for room on it, first come first served.
pub(super) struct Line {
    pub(super) endpoint: RefCell<Option<Endpoint<Ticket>>>,
    queue: RefCell<VecDeque<Ticket>>,
    /// How many of them nobody waits for any more.
    forgotten: Cell<usize>,
    /// It is in the list of those.
    is_pressed: Cell<bool>,
}

struct Slots {
    slots: Vec<Slot>,
    /// A list of those that are free, the least recently used first: where it begins, and where it ends.
    first_free: usize,
    last_free: usize,
    limit: usize,
}

struct Slot {
    ticket: Ticket,
    state: State,
    waker: Option<Waker>,
    /// The request while it waits for room, then the answer: `len` bytes of it.
    buffer: Vec<u8>,
    len: usize,
    /// The longest answer, and when the call ends without one.
    allowance: usize,
    deadline: Option<Instant>,
    line: Option<Rc<Line>>,
    next_free: usize,
}

/// The end of the list.
const NONE: usize = usize::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Queued,
    Forgotten,
    Called,
    Dropped,
    Answered,
    Ended(Error),
}

impl Slots {
    #[inline]
    fn get(&mut self, ticket: Ticket) -> Option<&mut Slot> {
        self.slots.get_mut(ticket.0.index() as usize).filter(|slot| slot.ticket == ticket)
    }

    #[inline]
    fn open(&mut self, state: State) -> Option<&mut Slot> {
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
            ticket: Ticket(Key::first(index as u32)),
            state: State::Free,
            waker: None,
            buffer: Vec::new(),
            len: 0,
            allowance: 0,
            deadline: None,
            line: None,
            next_free: NONE,
        });
        Some(index)
    }

    /// The waker is the caller's to drop.
    #[inline]
    fn release(&mut self, ticket: Ticket) -> Option<Waker> {
        let slot = self.get(ticket)?;
        slot.ticket = Ticket(ticket.0.next());
        slot.state = State::Free;
        slot.line = None;
        slot.next_free = NONE;
        let waker = slot.waker.take();
        let index = ticket.0.index() as usize;
        match self.first_free {
            NONE => self.first_free = index,
            _ => self.slots[self.last_free].next_free = index,
        }
        self.last_free = index;
        waker
    }
}

impl Slot {
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        if self.buffer.len() < len {
            self.buffer.resize(len, 0);
        }
        self.len = len;
        &mut self.buffer[..len]
    }
}

impl Line {
    pub(super) fn new(endpoint: Endpoint<Ticket>) -> Line {
        Line {
            endpoint: RefCell::new(Some(endpoint)),
            queue: RefCell::new(VecDeque::new()),
            forgotten: Cell::new(0),
            is_pressed: Cell::new(false),
        }
    }

    /// `Ok(false)`: there is no room for now.
    #[inline]
    fn call(
        &self,
        bytes: &[u8],
        allowance: usize,
        ticket: Ticket,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        let endpoint = self.endpoint.borrow();
        let Some(endpoint) = &*endpoint else { return Err(closed()) };
        let called = match deadline {
            None => endpoint.call(bytes, allowance, ticket),
            Some(at) => match at.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return Err(CallFailed::TimedOut.into()),
                left => endpoint.call_within(bytes, allowance, ticket, left),
            },
        };
        match called {
            Ok(()) => Ok(true),
            Err(error) if error.cause.is_back_pressure() => Ok(false),
            Err(error) => Err(error.cause.into()),
        }
    }
}

fn closed() -> Error {
    Error::Failed(Failure::Closed.into())
}

impl Desk {
    pub(super) fn new(limit: usize) -> Desk {
        let slots =
            Slots { slots: Vec::new(), first_free: NONE, last_free: NONE, limit: limit.min(MAX_CALLS) };
        Desk {
            slots: RefCell::new(slots),
            open: Cell::new(0),
            pressed: RefCell::default(),
            has_pressed: Cell::new(false),
            rounds: Cell::new(0),
            sleeper: RefCell::default(),
            is_asleep: Cell::new(false),
            is_shut: Cell::new(false),
            counters: Cell::default(),
        }
    }

    pub(super) fn counters(&self) -> DriverCounters {
        self.counters.get()
    }

    #[inline]
    fn count(&self, what: impl FnOnce(&mut DriverCounters)) {
        let mut counters = self.counters.get();
        what(&mut counters);
        self.counters.set(counters);
    }

    /// Calls that are under way.
    pub(super) fn open(&self) -> usize {
        self.open.get()
    }

    /// Makes a call, or has it wait for room behind those that do already.
    #[inline]
    pub(super) fn begin(
        &self,
        line: &Rc<Line>,
        bytes: &[u8],
        allowance: usize,
        deadline: Option<Instant>,
    ) -> Result<Ticket, Error> {
        if self.is_shut.get() {
            return Err(closed());
        }
        let ticket = {
            let mut slots = self.slots.borrow_mut();
            let limit = slots.limit;
            let slot = slots.open(State::Called).ok_or(Error::TooManyCalls(limit))?;
            let ticket = slot.ticket;
            let mut queue = line.queue.borrow_mut();
            let called =
                if queue.is_empty() { line.call(bytes, allowance, ticket, deadline) } else { Ok(false) };
            match called {
                Ok(true) => {}
                Ok(false) => {
                    slot.room(bytes.len()).copy_from_slice(bytes);
                    slot.state = State::Queued;
                    (slot.allowance, slot.deadline) = (allowance, deadline);
                    slot.line = Some(line.clone());
                    if !line.is_pressed.replace(true) {
                        self.pressed.borrow_mut().push(line.clone());
                        self.has_pressed.set(true);
                    }
                    queue.push_back(ticket);
                    self.count(|counters| counters.waited += 1);
                }
                Err(error) => {
                    // It never had a waker.
                    drop(slots.release(ticket));
                    return Err(error);
                }
            }
            ticket
        };
        self.open.set(self.open.get() + 1);
        self.count(|counters| counters.calls += 1);
        if self.is_asleep.get() {
            self.rouse();
        }
        Ok(ticket)
    }

    #[cold]
    fn rouse(&self) {
        self.is_asleep.set(false);
        let sleeper = self.sleeper.take();
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    /// Has the next call wake whoever polls.
    pub(super) fn sleep(&self, waker: &Waker) {
        self.is_asleep.set(true);
        let former = self.sleeper.replace(Some(waker.clone()));
        drop(former);
    }

    /// How a call ended, from the context.
    #[inline]
    pub(super) fn finish(&self, ticket: Ticket, answer: Result<Payload<'_>, CallFailed>) {
        let waker = {
            let mut slots = self.slots.borrow_mut();
            let Some(slot) = slots.get(ticket) else { return };
            match slot.state {
                State::Called => {
                    slot.state = match answer {
                        Ok(payload) => {
                            payload.copy_to(slot.room(payload.len()));
                            State::Answered
                        }
                        Err(cause) => State::Ended(cause.into()),
                    };
                    slot.waker.take()
                }
                State::Dropped => {
                    self.count(|counters| counters.dropped += u64::from(answer.is_ok()));
                    slots.release(ticket)
                }
                _ => return,
            }
        };
        self.open.set(self.open.get() - 1);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The answer, if the call is over; and then the slot is free.
    #[inline]
    pub(super) fn poll<R>(
        &self,
        ticket: Ticket,
        waker: &Waker,
        decode: impl FnOnce(&[u8]) -> Result<R, Error>,
    ) -> Poll<Result<R, Error>> {
        let (polled, former) = {
            let mut slots = self.slots.borrow_mut();
            let Some(slot) = slots.get(ticket) else { return Poll::Ready(Err(closed())) };
            match slot.state {
                State::Answered => {
                    let answer = decode(&slot.buffer[..slot.len]);
                    (Poll::Ready(answer), slots.release(ticket))
                }
                State::Ended(error) => (Poll::Ready(Err(error)), slots.release(ticket)),
                _ if slot.waker.as_ref().is_some_and(|known| known.will_wake(waker)) => (Poll::Pending, None),
                _ => (Poll::Pending, slot.waker.replace(waker.clone())),
            }
        };
        drop(former);
        if matches!(polled, Poll::Ready(Err(Error::MalformedResponse))) {
            self.count(|counters| counters.malformed += 1);
        }
        polled
    }

    /// The future of a call is gone.
    pub(super) fn forget(&self, ticket: Ticket) {
        let waker = {
            let mut slots = self.slots.borrow_mut();
            let Some(slot) = slots.get(ticket) else { return };
            match slot.state {
                State::Called => {
                    slot.state = State::Dropped;
                    slot.waker.take()
                }
                State::Queued => {
                    slot.state = State::Forgotten;
                    let waker = slot.waker.take();
                    self.thin_out(&mut slots, ticket);
                    waker
                }
                State::Answered => {
                    self.count(|counters| counters.dropped += 1);
                    slots.release(ticket)
                }
                _ => slots.release(ticket),
            }
        };
        drop(waker);
    }

    /// Takes forgotten calls out of their queue when they are the most of it, so that they never pile up.
    fn thin_out(&self, slots: &mut Slots, ticket: Ticket) {
        let Some(line) = slots.get(ticket).and_then(|slot| slot.line.clone()) else { return };
        let mut queue = line.queue.borrow_mut();
        line.forgotten.set(line.forgotten.get() + 1);
        if 2 * line.forgotten.get() <= queue.len() {
            return;
        }
        queue.retain(|&ticket| {
            let state = slots.get(ticket).map_or(State::Free, |slot| slot.state);
            if state == State::Forgotten {
                // Its waker went when it was forgotten.
                drop(slots.release(ticket));
                self.open.set(self.open.get() - 1);
            }
            state == State::Queued
        });
        line.forgotten.set(0);
    }

    /// Time has passed that no round has counted: the next one looks at the clock.
    pub(super) fn look_soon(&self) {
        self.rounds.set(DEADLINE_ROUNDS - 1);
    }

    /// Makes calls that waited for room; says how many have got on.
    #[inline]
    pub(super) fn advance(&self) -> usize {
        if self.has_pressed.get() { self.advance_pressed() } else { 0 }
    }

    fn advance_pressed(&self) -> usize {
        self.rounds.set(self.rounds.get().wrapping_add(1));
        let look = self.rounds.get().is_multiple_of(DEADLINE_ROUNDS);
        let mut count = 0;
        let mut index = 0;
        loop {
            // Wakers run in between, and may make calls: the list may grow.
            let line = self.pressed.borrow().get(index).cloned();
            let Some(line) = line else { break };
            if look {
                count += self.expire(&line);
            }
            while self.advance_first(&line) {
                count += 1;
            }
            index += 1;
        }
        let mut pressed = self.pressed.borrow_mut();
        pressed.retain(|line| {
            line.is_pressed.set(!line.queue.borrow().is_empty());
            line.is_pressed.get()
        });
        self.has_pressed.set(!pressed.is_empty());
        count
    }

    /// The first in the queue: is called, or ends. False if it must wait, or there is none.
    fn advance_first(&self, line: &Line) -> bool {
        let waker = {
            let mut slots = self.slots.borrow_mut();
            let mut queue = line.queue.borrow_mut();
            let Some(&ticket) = queue.front() else { return false };
            let waker = match slots.get(ticket) {
                Some(slot) if slot.state == State::Queued => {
                    match line.call(&slot.buffer[..slot.len], slot.allowance, ticket, slot.deadline) {
                        Ok(true) => {
                            slot.state = State::Called;
                            slot.line = None;
                            None
                        }
                        Ok(false) => return false,
                        Err(error) => self.end(slot, error),
                    }
                }
                Some(slot) if slot.state == State::Forgotten => {
                    line.forgotten.set(line.forgotten.get().saturating_sub(1));
                    self.open.set(self.open.get() - 1);
                    slots.release(ticket)
                }
                // It has ended meanwhile.
                _ => None,
            };
            queue.pop_front();
            waker
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Ends a call that waits. The waker is the caller's to wake.
    fn end(&self, slot: &mut Slot, error: Error) -> Option<Waker> {
        self.open.set(self.open.get() - 1);
        slot.state = State::Ended(error);
        slot.line = None;
        slot.waker.take()
    }

    /// Ends calls that waited for room for too long, wherever in the queue they are.
    fn expire(&self, line: &Line) -> usize {
        let now = Instant::now();
        let mut late = Vec::new();
        {
            let mut slots = self.slots.borrow_mut();
            line.queue.borrow_mut().retain(|&ticket| {
                let Some(slot) = slots.get(ticket) else { return false };
                let is_late = slot.state == State::Queued && slot.deadline.is_some_and(|at| at <= now);
                if is_late {
                    late.push(self.end(slot, CallFailed::TimedOut.into()));
                }
                !is_late
            });
        }
        let count = late.len();
        late.into_iter().flatten().for_each(Waker::wake);
        count
    }

    /// Closes a connection, and ends its calls.
    pub(super) fn close(&self, line: &Line) {
        let endpoint = line.endpoint.take();
        if let Some(endpoint) = endpoint {
            for ticket in endpoint.close() {
                self.finish(ticket, Err(Failure::Closed.into()));
            }
        }
        // Without an endpoint every call that waits ends.
        while self.advance_first(line) {}
    }

    /// Ends everything: nobody polls any more.
    pub(super) fn shut(&self) {
        self.is_shut.set(true);
        let mut wakers = Vec::new();
        for slot in &mut self.slots.borrow_mut().slots {
            if matches!(slot.state, State::Called | State::Queued) {
                wakers.extend(self.end(slot, closed()));
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }
}
