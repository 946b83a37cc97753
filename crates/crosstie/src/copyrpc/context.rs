//! All connections of one thread: one shared receive queue, one completion queue for what comes and one for what was sent.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;

use super::connection::{Arrived, Connection, Due, Left, SEND_DEPTH, Sent, from_wr_id, inline_limit};
use super::endpoint::{Endpoint, RecvHandle};
use super::error::{CallFailed, Failure};
use super::operation::Finished;
use super::payload::Payload;
use super::table::QpTable;
use super::{Config, Counters, EndpointConfig};
use crate::device::Status;
use crate::device::{
    Completion, Cq, CqConfig, Device, DeviceError, DeviceSpec, Pd, PostError, QpConfig, RecvWr, Srq,
    SrqConfig,
};

/// Completions taken at a time.
const BURST: usize = 64;
/// Polls that found nothing before the clock and the state of connections are looked at.
const IDLE_POLLS: u32 = 1024;
/// Polls of any kind before: other connections may be busy while one is dead.
const BUSY_POLLS: u32 = 1 << 12;
/// Time between two such looks, however fast polls are.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Time after which a peer that owes answers and says nothing is asked whether it is there.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// How long a wait sleeps on what comes before it looks at what was sent: while a READ is on its way, and else.
const READING_SLICE: Duration = Duration::from_micros(200);
const WAIT_SLICE: Duration = Duration::from_millis(10);
/// Polls between looks at what was sent.
const SETTLE_POLLS: u32 = 16;
/// Polls between looks at the clock while calls have deadlines.
const DEADLINE_POLLS: u32 = 64;

type ConnectionKey = Key<12>;

/// See the [module](super). One thread's.
pub struct Context<U> {
    pub(super) inner: Rc<Inner<U>>,
}

pub(super) struct Inner<U> {
    // Connections first: queue pairs go before what they use.
    connections: RefCell<Vec<Slot<U>>>,
    by_qp: RefCell<QpTable>,
    arrived: RefCell<VecDeque<RecvHandle<U>>>,
    pub(super) finished: RefCell<VecDeque<Finished>>,
    /// Connections with something to post, each once.
    dirty: RefCell<Vec<Rc<Connection<U>>>>,
    has_dirty: Cell<bool>,
    /// A send queue is full: what was sent is to be looked at with every poll.
    is_pressed: Cell<bool>,
    broken: RefCell<Vec<(Rc<Connection<U>>, Failure)>>,
    has_broken: Cell<bool>,
    /// Lists for the completions of one poll.
    completions: RefCell<Vec<Completion>>,
    sent: RefCell<Vec<Completion>>,
    srq: RefCell<Srq>,
    receives: Cell<u32>,
    recv_cq: RefCell<Cq>,
    send_cq: RefCell<Cq>,
    pub(super) pd: Rc<Pd>,
    config: Config,
    pub(super) counters: RefCell<Counters>,
    polling: Cell<bool>,
    idle: Cell<u32>,
    polls: Cell<u32>,
    pub(super) has_deadlines: Cell<bool>,
    next_look: Cell<Instant>,
    next_probe: Cell<Instant>,
    this: Weak<Inner<U>>,
    device: Device,
}

/// A poll is under way, until this is dropped.
struct Polling<'c, U>(&'c Inner<U>);

impl<U> Drop for Polling<'_, U> {
    fn drop(&mut self) {
        self.0.polling.set(false);
        if std::thread::panicking() {
            // By a callback, in the middle of what came: the rest of it is lost, and nobody knows of which connections.
            self.0.fail_all(Failure::Closed);
        }
    }
}

struct Slot<U> {
    key: ConnectionKey,
    connection: Option<Rc<Connection<U>>>,
}

impl<U> Context<U> {
    /// A context on the device of that name.
    pub fn open(spec: &DeviceSpec, config: &Config) -> Result<Context<U>, DeviceError> {
        Context::new(Device::open(spec)?, config)
    }

    /// A context on a device.
    pub fn new(device: Device, config: &Config) -> Result<Context<U>, DeviceError> {
        let pd = device.alloc_pd()?;
        // A device may round the receives up, and refill posts as many as it takes.
        let recv_cq = device.create_cq(&CqConfig { depth: 2 * config.receives + BURST as u32 })?;
        // Room for all that can be under way. Were there less, connections that fail at once would take the others along.
        let most = (device.attr().max_cqe / SEND_DEPTH).min(ConnectionKey::INDICES) as usize;
        let max_endpoints = config.max_endpoints.clamp(1, most.max(1));
        let send_cq = device.create_cq(&CqConfig { depth: max_endpoints as u32 * SEND_DEPTH })?;
        let srq = pd.create_srq(&SrqConfig { max_wr: config.receives, max_sge: 1 })?;
        let inner = Rc::new_cyclic(|this| Inner {
            connections: RefCell::default(),
            by_qp: RefCell::default(),
            arrived: RefCell::new(VecDeque::with_capacity(1024)),
            finished: RefCell::default(),
            dirty: RefCell::new(Vec::with_capacity(64)),
            has_dirty: Cell::new(false),
            is_pressed: Cell::new(false),
            broken: RefCell::default(),
            has_broken: Cell::new(false),
            completions: RefCell::new(Vec::with_capacity(BURST)),
            sent: RefCell::new(Vec::with_capacity(BURST)),
            srq: RefCell::new(srq),
            receives: Cell::new(0),
            recv_cq: RefCell::new(recv_cq),
            send_cq: RefCell::new(send_cq),
            pd: Rc::new(pd),
            config: Config { max_endpoints, ..*config },
            counters: RefCell::default(),
            polling: Cell::new(false),
            idle: Cell::new(0),
            polls: Cell::new(0),
            has_deadlines: Cell::new(false),
            next_look: Cell::new(Instant::now()),
            next_probe: Cell::new(Instant::now()),
            this: this.clone(),
            device,
        });
        inner.refill();
        Ok(Context { inner })
    }

    /// A new endpoint, to be connected.
    pub fn create_endpoint(&self, config: &EndpointConfig) -> Result<Endpoint<U>, DeviceError> {
        let connection = self.inner.add(config)?;
        Ok(Endpoint { connection, context: self.inner.clone() })
    }

    /// Sends what is due, and takes in what came: answers go to `on_response` with what was attached to their calls,
    /// requests to [`recv`](Context::recv). Says how many answers there were. Never waits.
    ///
    /// `on_response` may call, reply and receive; a poll from within it does nothing. If it panics, all connections of the
    /// context are over.
    #[inline]
    pub fn poll(&self, mut on_response: impl FnMut(U, Result<Payload<'_>, CallFailed>)) -> usize {
        self.inner.poll(&mut on_response)
    }

    /// The next request, in the order of arrival.
    #[inline]
    pub fn recv(&self) -> Option<RecvHandle<U>> {
        self.inner.arrived.borrow_mut().pop_front()
    }

    /// Sends everything now, without waiting for more to send along.
    pub fn flush(&self) {
        self.inner.flush(false);
    }

    /// Sends everything, then waits until something comes, or something sent is done, at most for `timeout`. Says whether
    /// something did: then [poll](Context::poll).
    pub fn wait(&self, timeout: Duration) -> bool {
        self.flush();
        let inner = &self.inner;
        if !inner.arrived.borrow().is_empty() || !inner.finished.borrow().is_empty() || inner.has_broken.get()
        {
            return true;
        }
        let deadline = Instant::now().checked_add(timeout);
        loop {
            // What was sent may be a READ that says there is room, or an error. Errors of a queue show in the next poll.
            if inner.send_cq.borrow_mut().wait(Duration::ZERO).unwrap_or(true) {
                inner.is_pressed.set(true);
                return true;
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            let slice = if inner.is_reading() { READING_SLICE } else { WAIT_SLICE };
            if inner.recv_cq.borrow_mut().wait(slice.min(left)).unwrap_or(true) {
                return true;
            }
            if left <= slice {
                // Time has passed that no poll has counted: the next one looks at the clock.
                inner.idle.set(IDLE_POLLS);
                return false;
            }
        }
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        *self.inner.counters.borrow()
    }
}

impl<U> Drop for Context<U> {
    fn drop(&mut self) {
        // They keep what keeps them, and nobody can ask for them any more.
        drop(self.inner.arrived.take());
    }
}

impl<U> Inner<U> {
    fn is_reading(&self) -> bool {
        self.connections.borrow().iter().any(|slot| slot.connection.as_ref().is_some_and(|c| c.is_reading()))
    }

    fn add(&self, config: &EndpointConfig) -> Result<Rc<Connection<U>>, DeviceError> {
        // What an endpoint that is closed has left in the queue of completions takes up the room of this one.
        while self.settle() {}
        let mut slots = self.connections.borrow_mut();
        let free = slots.iter().position(|slot| slot.connection.is_none());
        let index = free.unwrap_or(slots.len());
        if index >= self.config.max_endpoints {
            return Err(DeviceError::Exhausted {
                what: "endpoints (raise max_endpoints, unless the device has no longer completion queues)",
            });
        }
        let key = slots.get(index).map_or(ConnectionKey::first(index as u32), |slot| slot.key.next());
        let max_inline = inline_limit(self.device.attr().max_inline);
        let qp = QpConfig {
            max_send_wr: SEND_DEPTH,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline,
        };
        let qp = {
            let (send, recv) = (self.send_cq.borrow(), self.recv_cq.borrow());
            self.pd.create_rc(&qp, &send, &recv, Some(&self.srq.borrow()))?
        };
        let connection = Rc::new(Connection::new(key.bits(), &self.pd, qp, max_inline, *config)?);
        self.by_qp.borrow_mut().insert(connection.qp_num, index as u32);
        let slot = Slot { key, connection: Some(connection.clone()) };
        match slots.get_mut(index) {
            Some(place) => *place = slot,
            None => slots.push(slot),
        }
        Ok(connection)
    }

    /// Lets go of a connection.
    pub(super) fn remove(&self, connection: &Rc<Connection<U>>) -> Vec<U> {
        let ended = connection.fail(Failure::Closed);
        self.deliver(connection);
        self.by_qp.borrow_mut().remove(connection.qp_num);
        let index = ConnectionKey::from_bits(connection.key).index() as usize;
        if let Some(slot) = self.connections.borrow_mut().get_mut(index)
            && slot.connection.as_ref().is_some_and(|known| Rc::ptr_eq(known, connection))
        {
            slot.connection = None;
        }
        ended
    }

    #[inline]
    fn by_qp(&self, qp_num: u32) -> Option<Rc<Connection<U>>> {
        let index = self.by_qp.borrow().get(qp_num)?;
        self.connections.borrow().get(index as usize)?.connection.clone()
    }

    fn by_key(&self, key: u32) -> Option<Rc<Connection<U>>> {
        let key = ConnectionKey::from_bits(key);
        let slots = self.connections.borrow();
        let slot = slots.get(key.index() as usize).filter(|slot| slot.key == key)?;
        slot.connection.clone()
    }

    /// Has a connection flushed with the next poll.
    #[inline]
    pub(super) fn mark(&self, connection: &Rc<Connection<U>>) {
        if !connection.dirty.replace(true) {
            self.has_dirty.set(true);
            self.dirty.borrow_mut().push(connection.clone());
        }
    }

    /// A message was written: has its connection flushed when that is due.
    #[inline]
    pub(super) fn wrote(&self, connection: &Rc<Connection<U>>, due: Due) {
        if due == Due::Now
            && let Err(failure) = connection.flush(false, &mut self.counters.borrow_mut())
        {
            self.give_up(connection.clone(), failure);
        }
        self.mark(connection);
    }

    fn flush(&self, hold: bool) {
        let mut dirty = self.dirty.borrow_mut();
        let mut counters = self.counters.borrow_mut();
        let mut pressed = false;
        let mut next = 0;
        while let Some(connection) = dirty.get(next) {
            let left = match connection.flush(hold, &mut counters) {
                Ok(left) => left,
                Err(failure) => {
                    self.give_up(connection.clone(), failure);
                    Left::Nothing
                }
            };
            pressed |= left == Left::Pressed;
            if left == Left::Nothing {
                connection.dirty.set(false);
                dirty.swap_remove(next);
            } else {
                next += 1;
            }
        }
        self.has_dirty.set(!dirty.is_empty());
        self.is_pressed.set(pressed);
    }

    #[inline]
    fn poll(&self, on_response: &mut impl FnMut(U, Result<Payload<'_>, CallFailed>)) -> usize {
        if self.polling.replace(true) {
            return 0;
        }
        let _until_the_end = Polling(self);
        self.polls.set(self.polls.get().wrapping_add(1));
        if self.has_dirty.get() {
            self.flush(true);
        }
        let (came, mut answers) = self.take_in(on_response);
        if came {
            self.idle.set(0);
            self.refill();
        } else {
            self.idle.set(self.idle.get() + 1);
        }
        if self.polls.get().is_multiple_of(SETTLE_POLLS) || self.is_pressed.get() {
            self.settle();
        }
        let look = self.idle.get() >= IDLE_POLLS || self.polls.get().is_multiple_of(BUSY_POLLS);
        let late = self.has_deadlines.get() && (look || self.polls.get().is_multiple_of(DEADLINE_POLLS));
        if look || late || self.has_broken.get() {
            answers += self.tend(look, late, on_response);
        }
        answers
    }

    /// What came: whether anything, and how many answers.
    #[inline]
    fn take_in(&self, on_response: &mut impl FnMut(U, Result<Payload<'_>, CallFailed>)) -> (bool, usize) {
        // Callbacks may receive, but not poll: so it is safe to keep the list while they run.
        let mut completions = self.completions.borrow_mut();
        completions.clear();
        let polled = self.recv_cq.borrow_mut().poll(BURST, |completion| completions.push(*completion));
        match polled {
            Ok(0) => return (false, 0),
            Ok(_) => {}
            Err(error) => {
                self.fail_all(Failure::Queue(error));
                return (true, 0);
            }
        }
        self.receives.set(self.receives.get().saturating_sub(completions.len() as u32));
        self.counters.borrow_mut().completions += completions.len() as u64;
        let mut answers = 0;
        for completion in completions.iter() {
            let Some(connection) = self.by_qp(completion.qp_num) else { continue };
            if !completion.status.is_success() {
                self.give_up(connection, Failure::Broken(completion.status));
                continue;
            }
            let Some(imm) = completion.imm else { continue };
            match self.take_batch(&connection, imm, on_response) {
                Ok(count) => answers += count,
                Err(failure) => self.give_up(connection, failure),
            }
        }
        (true, answers)
    }

    /// Has a connection ended with the next look at what is broken.
    #[cold]
    fn give_up(&self, connection: Rc<Connection<U>>, failure: Failure) {
        self.broken.borrow_mut().push((connection, failure));
        self.has_broken.set(true);
    }

    fn take_batch(
        &self,
        connection: &Rc<Connection<U>>,
        imm: u32,
        on_response: &mut impl FnMut(U, Result<Payload<'_>, CallFailed>),
    ) -> Result<usize, Failure> {
        let mut answers = 0;
        connection.arrive(imm)?;
        self.mark(connection);
        let Some(context) = self.this.upgrade() else { return Ok(0) };
        let mut done = None;
        loop {
            let next = {
                let mut arrived = self.arrived.borrow_mut();
                connection.next(done.take(), |offset, len, held, owed| {
                    let (connection, context) = (connection.clone(), context.clone());
                    arrived.push_back(RecvHandle::new(connection, context, offset, len, held, owed));
                })?
            };
            match next {
                None => return Ok(answers),
                Some(Arrived::Response { user, offset, len, held }) => {
                    if let Some(user) = user {
                        answers += 1;
                        on_response(user, Ok(Payload::new(&connection.ring, offset, len)));
                    }
                    done = Some(held);
                }
                Some(Arrived::Landed { user, region, len, held }) => {
                    if let Some(user) = user {
                        answers += 1;
                        on_response(user, Ok(Payload::new(region.mr(), 0, len)));
                    }
                    connection.give_landing(region);
                    done = Some(held);
                }
                Some(Arrived::Queued) => self.deliver(connection),
            }
        }
    }

    /// Requests that had to wait and are there now, and operations that have ended.
    #[cold]
    fn deliver(&self, connection: &Rc<Connection<U>>) {
        while let Some(finished) = connection.take_finished() {
            self.finished.borrow_mut().push_back(finished);
        }
        let Some(context) = self.this.upgrade() else { return };
        while let Some(incoming) = connection.take_arrived() {
            let handle = RecvHandle::waited(connection.clone(), context.clone(), incoming);
            self.arrived.borrow_mut().push_back(handle);
        }
    }

    /// What was sent: whether there was anything.
    fn settle(&self) -> bool {
        let mut completions = self.sent.borrow_mut();
        completions.clear();
        let polled = self.send_cq.borrow_mut().poll(BURST, |completion| completions.push(*completion));
        if let Err(error) = polled {
            self.fail_all(Failure::Queue(error));
            return false;
        }
        self.counters.borrow_mut().completions += completions.len() as u64;
        for completion in completions.iter() {
            let (key, sent) = from_wr_id(completion.wr_id);
            let Some(connection) = self.by_key(key) else { continue };
            let settled = if completion.status.is_success() {
                connection.sent(sent)
            } else {
                Err(Failure::Broken(completion.status))
            };
            match settled {
                Ok(()) => {
                    if matches!(sent, Sent::Operation(_)) {
                        self.deliver(&connection);
                    }
                    self.mark(&connection);
                }
                Err(failure) => self.give_up(connection, failure),
            }
        }
        !completions.is_empty()
    }

    /// Ends what is broken or late.
    #[cold]
    fn tend(
        &self,
        look: bool,
        late: bool,
        on_response: &mut impl FnMut(U, Result<Payload<'_>, CallFailed>),
    ) -> usize {
        self.idle.set(if look { 0 } else { self.idle.get() });
        let mut ended = Vec::new();
        if look || late {
            let now = Instant::now();
            if late {
                let mut has_more = false;
                for connection in self.connections.borrow().iter().filter_map(|slot| slot.connection.as_ref())
                {
                    has_more |= connection.expire(now, &mut ended);
                }
                self.has_deadlines.set(has_more);
            }
            if look && now >= self.next_look.get() {
                self.next_look.set(now + LOOK_INTERVAL);
                self.look(now);
            }
        }
        self.has_broken.set(false);
        for (connection, failure) in self.broken.take() {
            if connection.failure().is_some() {
                continue;
            }
            let users = connection.fail(failure);
            self.deliver(&connection);
            let mut counters = self.counters.borrow_mut();
            counters.failures += 1;
            counters.violations += u64::from(matches!(failure, Failure::Violation(_)));
            ended.extend(users.into_iter().map(|user| (user, CallFailed::Connection(failure))));
        }
        let count = ended.len();
        for (user, cause) in ended {
            on_response(user, Err(cause));
        }
        count
    }

    /// Looks after connections that nothing was heard of.
    fn look(&self, now: Instant) {
        // Completions of a queue pair that is gone do not come; what they used can be posted again.
        self.receives.set(0);
        self.refill();
        let probe = now >= self.next_probe.get();
        if probe {
            self.next_probe.set(now + PROBE_INTERVAL);
        }
        for connection in self.connections.borrow().iter().filter_map(|slot| slot.connection.as_ref()) {
            let found = if connection.is_broken() {
                Err(Failure::Broken(Status::RetryExceeded))
            } else if probe {
                connection.probe(&mut self.counters.borrow_mut())
            } else {
                Ok(())
            };
            if let Err(failure) = found {
                self.give_up(connection.clone(), failure);
            }
        }
    }

    fn fail_all(&self, failure: Failure) {
        let connections = self.connections.borrow();
        for connection in connections.iter().filter_map(|slot| slot.connection.clone()) {
            self.give_up(connection, failure);
        }
    }

    /// Posts receives again when a third of them is used.
    #[inline]
    fn refill(&self) {
        if 3 * self.receives.get() > 2 * self.config.receives {
            return;
        }
        let refused = {
            let mut srq = self.srq.borrow_mut();
            let mut refused = None;
            while self.receives.get() < self.config.receives && refused.is_none() {
                match srq.post_recv(&RecvWr { wr_id: 0, sges: &[] }) {
                    Ok(()) => self.receives.set(self.receives.get() + 1),
                    Err(error) => refused = Some(error),
                }
            }
            refused
        };
        match refused {
            None => {}
            // As many are there as there can be.
            Some(PostError::Full) => self.receives.set(self.config.receives),
            // What is left does for now; the next look tries again.
            Some(_) if self.receives.get() > 0 => {}
            Some(error) => self.fail_all(Failure::Refused(error)),
        }
    }
}
