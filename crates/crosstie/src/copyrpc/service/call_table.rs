//! The call table: all open calls of a driver, from the call until its future has taken the result.
//!
//! A call is made at once if there is room; else it waits in the queue of its connection, and the driver makes it later. `slots.rs`
//! has the states of a call.
//!
//! Rule: no waker runs, and none is dropped, while a slot is borrowed. A waker may drop futures, and those call back into this
//! table.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use super::error::Error;
use super::method::{Method, decode_done, decode_error};
use super::slots::{CallToken, ConnectionQueue, Slot, SlotState, Slots, closed};
use crate::copyrpc::{CallFailed, Failure, Payload};
use crate::wait::PollClock;

/// What a driver has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverCounters {
    /// Calls started.
    pub calls: u64,
    /// Calls that had to wait for room.
    pub waited: u64,
    /// Responses that arrived for futures that were dropped.
    pub dropped: u64,
    /// Responses that were malformed.
    pub malformed: u64,
}

pub(super) struct CallTable {
    slots: RefCell<Slots>,
    /// Calls that have ended. The others wait for room or for their response.
    ended: Cell<u64>,
    /// Queues with waiting calls.
    waiting: RefCell<Vec<Rc<ConnectionQueue>>>,
    has_waiting: Cell<bool>,
    clock: PollClock,
    /// No call that waits for room has an earlier deadline.
    next_deadline: Cell<Option<Instant>>,
    /// The waker of a driver that sleeps until the next call.
    sleeping_driver: RefCell<Option<Waker>>,
    is_driver_asleep: Cell<bool>,
    /// The driver was dropped: nothing polls any more.
    is_closed: Cell<bool>,
    counters: Cell<DriverCounters>,
}

impl CallTable {
    pub(super) fn new(limit: usize) -> CallTable {
        CallTable {
            slots: RefCell::new(Slots::new(limit)),
            ended: Cell::new(0),
            waiting: RefCell::default(),
            has_waiting: Cell::new(false),
            clock: PollClock::new(),
            next_deadline: Cell::new(None),
            sleeping_driver: RefCell::default(),
            is_driver_asleep: Cell::new(false),
            is_closed: Cell::new(false),
            counters: Cell::default(),
        }
    }

    pub(super) fn counters(&self) -> DriverCounters {
        self.counters.get()
    }

    #[inline]
    fn count(&self, add: impl FnOnce(&mut DriverCounters)) {
        let mut counters = self.counters.get();
        add(&mut counters);
        self.counters.set(counters);
    }

    /// Calls that wait for room or for their response.
    pub(super) fn open_calls(&self) -> u64 {
        self.counters.get().calls - self.ended.get()
    }

    #[inline]
    fn note_ended(&self) {
        self.ended.set(self.ended.get() + 1);
    }

    /// Makes a call, or queues it behind the calls that already wait for room. A call that cannot be made has failed.
    #[inline]
    pub(super) fn start_call(
        &self,
        queue: &Rc<ConnectionQueue>,
        bytes: &[u8],
        response_len: usize,
        deadline: Option<Instant>,
    ) -> CallToken {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.allocate(SlotState::Called) else { return CallToken::NO_SLOT };
        let token = slot.token;
        if self.is_closed.get() {
            slots.fail(token, closed());
            return token;
        }
        let called =
            if queue.has_calls() { Ok(false) } else { queue.call(bytes, response_len, token, deadline) };
        match called {
            Ok(true) => {}
            Ok(false) => self.queue_call(&mut slots, token, queue, bytes, response_len, deadline),
            Err(error) => {
                // It never had a waker.
                slots.fail(token, error);
                return token;
            }
        }
        drop(slots);
        self.count(|counters| counters.calls += 1);
        if self.is_driver_asleep.get() {
            self.wake_driver();
        }
        token
    }

    /// Queues a call for which there is no room.
    #[inline(never)]
    fn queue_call(
        &self,
        slots: &mut Slots,
        token: CallToken,
        queue: &Rc<ConnectionQueue>,
        bytes: &[u8],
        response_len: usize,
        deadline: Option<Instant>,
    ) {
        let Some((slot, extra)) = slots.get_with_extra(token) else { return };
        slot.buffer_of(bytes.len()).copy_from_slice(bytes);
        slot.state = SlotState::Queued;
        (extra.response_len, extra.deadline) = (response_len, deadline);
        extra.queue = Some(queue.clone());
        let next = self.next_deadline.get().into_iter().chain(deadline).min();
        self.next_deadline.set(next);
        if !queue.is_listed.replace(true) {
            self.waiting.borrow_mut().push(queue.clone());
            self.has_waiting.set(true);
        }
        queue.calls.borrow_mut().push_back(token);
        self.count(|counters| counters.waited += 1);
    }

    #[inline(never)]
    fn wake_driver(&self) {
        self.is_driver_asleep.set(false);
        let driver = self.sleeping_driver.take();
        if let Some(driver) = driver {
            driver.wake();
        }
    }

    /// Lets the next call wake the driver.
    pub(super) fn wake_on_next_call(&self, waker: &Waker) {
        self.is_driver_asleep.set(true);
        let former = self.sleeping_driver.replace(Some(waker.clone()));
        drop(former);
    }

    /// Ends a call with the result that the context delivered.
    #[inline]
    pub(super) fn finish_call(&self, token: CallToken, result: Result<Payload<'_>, CallFailed>) {
        match result {
            Ok(response) => self.answer_call(token, response),
            Err(cause) => self.fail_made_call(token, cause),
        }
    }

    #[inline]
    fn answer_call(&self, token: CallToken, response: Payload<'_>) {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get(token) else { return };
        if slot.state != SlotState::Called {
            drop(slots);
            return self.finish_dropped(token, true);
        }
        slot.state = SlotState::Answered;
        response.copy_to(slot.buffer_of(response.len()));
        let waker = slot.waker.take();
        drop(slots);
        self.note_ended();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    #[cold]
    fn fail_made_call(&self, token: CallToken, cause: CallFailed) {
        let waker = {
            let mut slots = self.slots.borrow_mut();
            match slots.get(token).map(|slot| slot.state) {
                Some(SlotState::Called) => self.fail_call(&mut slots, token, cause.into()),
                _ => {
                    drop(slots);
                    return self.finish_dropped(token, false);
                }
            }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends a call whose future was dropped, if it is one.
    #[cold]
    fn finish_dropped(&self, token: CallToken, is_answered: bool) {
        let mut slots = self.slots.borrow_mut();
        if slots.get(token).is_some_and(|slot| slot.state == SlotState::DroppedCalled) {
            self.count(|counters| counters.dropped += u64::from(is_answered));
            self.note_ended();
            slots.release(token);
        }
    }

    /// Takes the response to `M`, if the call has ended, and frees its slot.
    #[inline(always)]
    pub(super) fn poll_call<M: Method>(
        &self,
        token: CallToken,
        waker: &Waker,
    ) -> Poll<Result<M::Response, Error>> {
        let mut slots = self.slots.borrow_mut();
        if let Some(slot) = slots.get(token) {
            if let SlotState::Queued | SlotState::Called = slot.state {
                if slot.waker.is_some() {
                    drop(slots);
                    self.change_waker(token, waker);
                } else {
                    slot.waker = Some(waker.clone());
                    drop(slots);
                }
                return Poll::Pending;
            }
            if slot.state == SlotState::Answered
                && let Some(response) = decode_done::<M>(&slot.buffer, slot.len)
            {
                slots.release(token);
                drop(slots);
                return Poll::Ready(Ok(response));
            }
        }
        drop(slots);
        Poll::Ready(Err(self.take_error(token, decode_error::<M>)))
    }

    /// Replaces the waker of a call, unless it wakes the same task.
    #[cold]
    #[inline(never)]
    fn change_waker(&self, token: CallToken, waker: &Waker) {
        let former = match self.slots.borrow_mut().get(token) {
            Some(slot) if !slot.waker.as_ref().is_some_and(|known| known.will_wake(waker)) => {
                slot.waker.replace(waker.clone())
            }
            _ => None,
        };
        drop(former);
    }

    /// Why a call has ended without a response. Frees its slot.
    #[cold]
    #[inline(never)]
    fn take_error(&self, token: CallToken, decode: fn(&[u8]) -> Error) -> Error {
        assert!(token != CallToken::TAKEN, "a call was polled after it had finished");
        let mut slots = self.slots.borrow_mut();
        if token == CallToken::NO_SLOT && !self.is_closed.get() {
            return Error::TooManyCalls(slots.limit);
        }
        let Some((slot, extra)) = slots.get_with_extra(token) else { return closed() };
        let error = match slot.state {
            SlotState::Answered => decode(&slot.buffer[..slot.len]),
            _ => extra.error.take().unwrap_or(closed()),
        };
        slots.release_with_extra(token);
        if error == Error::MalformedResponse {
            self.count(|counters| counters.malformed += 1);
        }
        error
    }

    /// Notes that the future of a call was dropped.
    pub(super) fn drop_call(&self, token: CallToken) {
        let waker = {
            let mut slots = self.slots.borrow_mut();
            let Some(slot) = slots.get(token) else { return };
            match slot.state {
                SlotState::Called => {
                    slot.state = SlotState::DroppedCalled;
                    slot.waker.take()
                }
                SlotState::Queued => {
                    slot.state = SlotState::DroppedQueued;
                    let waker = slot.waker.take();
                    self.remove_dropped_calls(&mut slots, token);
                    waker
                }
                SlotState::Answered => {
                    self.count(|counters| counters.dropped += 1);
                    slots.release(token);
                    None
                }
                _ => {
                    slots.release(token);
                    None
                }
            }
        };
        drop(waker);
    }

    /// Removes calls without a future from their queue when they are more than half of it, so that they do not pile up.
    fn remove_dropped_calls(&self, slots: &mut Slots, token: CallToken) {
        let Some(queue) = slots.get_with_extra(token).and_then(|(_, extra)| extra.queue.clone()) else {
            return;
        };
        let mut calls = queue.calls.borrow_mut();
        queue.dropped.set(queue.dropped.get() + 1);
        if 2 * queue.dropped.get() <= calls.len() {
            return;
        }
        calls.retain(|&token| {
            let state = slots.get(token).map_or(SlotState::Free, |slot| slot.state);
            if state == SlotState::DroppedQueued {
                slots.release_with_extra(token);
                self.note_ended();
            }
            state == SlotState::Queued
        });
        queue.dropped.set(0);
    }

    /// Lets the next round look at the clock, because time has passed without rounds.
    pub(super) fn check_deadlines_soon(&self) {
        self.clock.read_soon();
    }

    /// The time until the earliest deadline of a call that waits for room.
    pub(super) fn time_until_deadline(&self) -> Option<Duration> {
        self.next_deadline.get().map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Makes calls that wait for room, as far as there is room now. Returns how many were made or ended.
    #[inline]
    pub(super) fn make_waiting_calls(&self) -> usize {
        if self.has_waiting.get() { self.advance_queues() } else { 0 }
    }

    fn advance_queues(&self) -> usize {
        let mut count = 0;
        if self.clock.is_due() {
            let now = self.clock.read();
            if self.next_deadline.get().is_some_and(|deadline| deadline <= now) {
                count += self.expire_waiting_calls(now);
            }
        }
        let mut index = 0;
        loop {
            // Wakers run in between and may make calls, so the list may grow.
            let queue = self.waiting.borrow().get(index).cloned();
            let Some(queue) = queue else { break };
            while self.advance_first(&queue) {
                count += 1;
            }
            index += 1;
        }
        let mut waiting = self.waiting.borrow_mut();
        waiting.retain(|queue| {
            queue.is_listed.set(!queue.calls.borrow().is_empty());
            queue.is_listed.get()
        });
        self.has_waiting.set(!waiting.is_empty());
        count
    }

    /// Makes or ends the first call of a queue. `false`: it must wait, or the queue is empty.
    fn advance_first(&self, queue: &ConnectionQueue) -> bool {
        let waker = {
            let mut slots = self.slots.borrow_mut();
            let mut calls = queue.calls.borrow_mut();
            let Some(&token) = calls.front() else { return false };
            let waker = match slots.get_with_extra(token) {
                Some((slot, extra)) if slot.state == SlotState::Queued => {
                    match queue.call(&slot.buffer[..slot.len], extra.response_len, token, extra.deadline) {
                        Ok(true) => {
                            slot.state = SlotState::Called;
                            extra.queue = None;
                            None
                        }
                        Ok(false) => return false,
                        Err(error) => self.fail_call(&mut slots, token, error),
                    }
                }
                Some((slot, _)) if slot.state == SlotState::DroppedQueued => {
                    queue.dropped.set(queue.dropped.get().saturating_sub(1));
                    self.note_ended();
                    slots.release_with_extra(token);
                    None
                }
                // It has ended in the meantime.
                _ => None,
            };
            calls.pop_front();
            waker
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Ends an open call with an error. Returns its waker, for the caller to wake while nothing is borrowed.
    fn fail_call(&self, slots: &mut Slots, token: CallToken, error: Error) -> Option<Waker> {
        self.note_ended();
        slots.fail(token, error)
    }

    /// Ends calls whose deadline has passed while they waited for room, anywhere in their queues.
    fn expire_waiting_calls(&self, now: Instant) -> usize {
        let (mut expired, mut next) = (Vec::new(), None);
        {
            let (mut slots, waiting) = (self.slots.borrow_mut(), self.waiting.borrow());
            for queue in waiting.iter() {
                queue.calls.borrow_mut().retain(|&token| {
                    let Some((slot, extra)) = slots.get_with_extra(token) else { return false };
                    let deadline = extra.deadline.filter(|_| slot.state == SlotState::Queued);
                    if deadline.is_some_and(|at| at <= now) {
                        expired.push(self.fail_call(&mut slots, token, CallFailed::TimedOut.into()));
                        return false;
                    }
                    next = next.into_iter().chain(deadline).min();
                    true
                });
            }
        }
        self.next_deadline.set(next);
        let count = expired.len();
        expired.into_iter().flatten().for_each(Waker::wake);
        count
    }

    /// Closes a connection and ends its calls.
    pub(super) fn close_connection(&self, queue: &ConnectionQueue) {
        let connection = queue.connection.take();
        if let Some(connection) = connection {
            for token in connection.close() {
                self.finish_call(token, Err(Failure::Closed.into()));
            }
        }
        // Without a connection every waiting call ends.
        while self.advance_first(queue) {}
    }

    /// Ends all calls, because nothing polls any more.
    pub(super) fn close(&self) {
        self.is_closed.set(true);
        let mut wakers = Vec::new();
        let mut slots = self.slots.borrow_mut();
        for index in 0..slots.slots.len() {
            let Slot { token, state, .. } = slots.slots[index];
            if let SlotState::Called | SlotState::Queued = state {
                wakers.extend(self.fail_call(&mut slots, token, closed()));
            }
        }
        drop(slots);
        wakers.into_iter().for_each(Waker::wake);
    }
}
