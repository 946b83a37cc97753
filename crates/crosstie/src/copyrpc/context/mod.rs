//! A context: all connections of one thread, and what they share.
//!
//! - `mod.rs`: the public type, the table of connections, and the order of a poll.
//! - `flush.rs`: which connections have something to post.
//! - `completions.rs`: the completion queues, and what their completions announce.
//! - `receives.rs`: the shared receive queue.
//! - `liveness.rs`: deadlines, dead peers, and the end of broken connections.
//! - `connection.rs`, `request.rs`, `recv_handle.rs`, `raw.rs`: what the application has.
//! - `waitable.rs`: waiting for a context together with other sources.
//!
//! The order of a poll:
//!
//! ```text
//! 1. flush the connections that have something to post (a small batch may be delayed)
//! 2. poll the receive CQ, unless the last poll left something of it: parse batches, call back for responses and requests
//! 3. refill the shared receive queue: some if nothing arrived, all if a third is used
//! 4. poll the send CQ: every 16th time if a completion is expected, every time while a flush waits for completions
//! 5. when the clock is due or something failed: expire deadlines, check that peers are alive, end broken connections
//! ```

mod completions;
mod connection;
mod flush;
mod liveness;
mod raw;
mod receives;
mod recv_handle;
mod request;
mod waitable;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;
use crosstie_protocol::slab::Slab;

use super::config::{Config, ConnectionConfig};
use super::connection::ConnectionCore;
use super::counters::{Counters, RunningCounters};
use super::error::{CallFailed, Failure};
use super::flush_policy::{SEND_DEPTH, inline_limit};
use super::operation::RawCompletion;
use super::payload::Payload;
use super::qp_table::QpTable;
use super::receive_policy::MAX_REQUESTS;
use crate::device::{Completion, Device, DeviceError, DeviceSpec, Pd, QpConfig};

use completions::CompletionQueues;
use flush::FlushList;
use liveness::Liveness;

pub use connection::Connection;
pub use recv_handle::RecvHandle;
pub use request::Request;
use request::{PollHandler, QueueRequests, ServeRequests};

/// The longest time that a wait sleeps on the receive CQ before it looks at the send CQ, the deadlines and the peers: while an
/// operation is under way, and otherwise.
const OPERATION_WAIT_SLICE: Duration = Duration::from_micros(200);
const WAIT_SLICE: Duration = Duration::from_millis(10);

type ConnectionKey = Key<12>;

/// All connections of one thread, see the [module](super).
pub struct Context<U> {
    core: Rc<ContextCore<U>>,
}

/// The state of a context, shared with its connections and requests.
struct ContextCore<U> {
    // The connections come first: queue pairs are dropped before the queues that they use.
    connections: RefCell<Slab<Rc<ConnectionCore<U>>, ConnectionKey>>,
    qp_table: RefCell<QpTable>,
    /// Borrowed while a poll is under way.
    poll_state: RefCell<PollState<U>>,
    /// Requests that were deferred, for [`Context::recv`].
    requests: RefCell<VecDeque<RecvHandle<U>>>,
    raw_completions: RefCell<VecDeque<RawCompletion>>,
    flush_list: FlushList<U>,
    liveness: Liveness<U>,
    queues: CompletionQueues,
    pd: Rc<Pd>,
    counters: Rc<RunningCounters>,
    /// Whether a call was posted alone since the last poll.
    has_sent_alone: Cell<bool>,
    weak_self: Weak<ContextCore<U>>,
    device: Device,
}

/// What one poll needs, and leaves to the next one.
struct PollState<U> {
    /// The completion that is received.
    completion: Completion,
    /// The connection of the last completion: the next one may be of the same.
    recent: Option<Rc<ConnectionCore<U>>>,
    /// Completions that the last poll took which found any.
    taken_before: usize,
}

impl<U> PollState<U> {
    /// Lets go of a connection that a callback may have closed.
    #[inline]
    fn forget_closed(&mut self) {
        if self.recent.as_ref().is_some_and(|connection| connection.has_stopped_receiving()) {
            self.recent = None;
        }
    }
}

/// Exists while a poll is under way. It is dropped only if a callback panics.
struct PollGuard<'c, U>(&'c ContextCore<U>);

impl<U> Drop for PollGuard<'_, U> {
    /// A callback panicked in the middle of the completions. The rest of them is lost, and it is not known which connections they belong to.
    #[cold]
    fn drop(&mut self) {
        self.0.mark_all_broken(Failure::Closed);
        // The next poll continues with calls that ended.
        self.0.liveness.clock.read_soon();
    }
}

impl<U> Context<U> {
    /// Opens the device with this name and creates a context on it.
    pub fn open(spec: &DeviceSpec, config: &Config) -> Result<Context<U>, DeviceError> {
        Context::new(Device::open(spec)?, config)
    }

    /// Creates a context on a device.
    pub fn new(device: Device, config: &Config) -> Result<Context<U>, DeviceError> {
        let pd = device.alloc_pd()?;
        // The send CQ has room for all work requests. If it had less, connections that fail at once would take the others
        // down with them.
        let most = (device.attr().max_cqe / SEND_DEPTH).min(ConnectionKey::INDICES) as usize;
        let max_connections = config.max_connections.clamp(1, most.max(1));
        let queues = CompletionQueues::new(&device, &pd, config.receives, max_connections)?;
        let core = Rc::new_cyclic(|weak_self| ContextCore {
            connections: RefCell::new(Slab::new(max_connections as u32)),
            qp_table: RefCell::default(),
            poll_state: RefCell::new(PollState {
                completion: Completion::default(),
                recent: None,
                taken_before: 0,
            }),
            requests: RefCell::new(VecDeque::with_capacity(MAX_REQUESTS)),
            raw_completions: RefCell::default(),
            flush_list: FlushList::new(),
            liveness: Liveness::new(),
            queues,
            pd: Rc::new(pd),
            counters: Rc::default(),
            has_sent_alone: Cell::new(false),
            weak_self: weak_self.clone(),
            device,
        });
        core.refill_receives(u32::MAX);
        Ok(Context { core })
    }

    /// Creates a connection, which is then to be [connected](Connection::connect).
    pub fn create_connection(&self, config: &ConnectionConfig) -> Result<Connection<U>, DeviceError> {
        let connection = self.core.add_connection(config)?;
        Ok(Connection::new(connection, self.core.clone()))
    }

    /// Sends what is due and receives what has arrived. Responses go to `on_response` with what was attached to their calls;
    /// requests go to [`recv`](Context::recv). Returns the number of calls that have ended. Never waits. If it finds one
    /// batch, which ends many calls, half of the pending ones are reported, and the next poll reports the others: new calls can be on their
    /// way meanwhile.
    ///
    /// `on_response` may call, reply and receive. A poll inside it does nothing. If it panics, all connections of the
    /// context end.
    #[inline]
    pub fn poll(&self, on_response: impl FnMut(U, Result<Payload<'_>, CallFailed>)) -> usize {
        self.core.poll(&mut QueueRequests { core: &self.core, on_response })
    }

    /// As [`poll`](Context::poll), and hands requests to `on_request`, where they can be answered at once: each where it has arrived, without
    /// the detour through the queue of [`recv`](Context::recv). Requests that wait there come first. Both callbacks get `state`. Returns the
    /// number of requests and of calls that have ended. After about 256 requests it stops; the next poll continues.
    ///
    /// ```
    /// # use crosstie::copyrpc::{Config, ConnectionConfig, Context};
    /// # use crosstie::device::ConnectConfig;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (here, there) = (Context::<()>::open(&"software".parse()?, &Config::default())?,
    /// #                      Context::<()>::open(&"software".parse()?, &Config::default())?);
    /// # let (client, server) = (here.create_connection(&ConnectionConfig::default())?,
    /// #                         there.create_connection(&ConnectionConfig::default())?);
    /// # client.connect(&server.address(), &ConnectConfig::default())?;
    /// # server.connect(&client.address(), &ConnectConfig::default())?;
    /// client.call(b"first", 16, ())?;
    /// client.call(b"second", 16, ())?;
    /// let (mut deferred, mut answers) = (Vec::new(), Vec::new());
    /// while answers.len() < 2 {
    ///     here.poll(|(), response| answers.extend(response.map(|bytes| bytes.to_vec())));
    ///     there.serve(
    ///         &mut deferred,
    ///         |deferred, request| match request.data().to_vec().as_slice() {
    ///             b"first" => deferred.push(request.defer()), // answered later
    ///             _ => request.reply(b"at once").expect("a response"),
    ///         },
    ///         |_, (), _| (),
    ///     );
    ///     if !answers.is_empty() && let Some(request) = deferred.pop() {
    ///         request.reply(b"later")?;
    ///     }
    /// }
    /// assert_eq!(answers, [&b"at once"[..], b"later"]);
    /// # Ok(()) }
    /// ```
    ///
    /// Both callbacks may call, reply and receive. A poll inside of them does nothing. If one panics, all connections of the context end.
    ///
    /// A request cannot leave the handler, unless it is [deferred](Request::defer):
    ///
    /// ```compile_fail
    /// # use crosstie::copyrpc::Context;
    /// fn keep(context: &Context<()>) {
    ///     context.serve(&mut Vec::new(), |kept, request| kept.push(request), |_, (), _| ());
    /// }
    /// ```
    #[inline]
    pub fn serve<S>(
        &self,
        state: &mut S,
        mut on_request: impl FnMut(&mut S, Request<'_, U>),
        on_response: impl FnMut(&mut S, U, Result<Payload<'_>, CallFailed>),
    ) -> usize {
        let on_request = |state: &mut S, request: Request<'_, U>| {
            on_request(state, request);
            true
        };
        self.serve_while(state, on_request, on_response)
    }

    /// As [`serve`](Context::serve), until `on_request` returns false. The next poll continues.
    #[inline]
    pub(in crate::copyrpc) fn serve_while<S>(
        &self,
        state: &mut S,
        on_request: impl FnMut(&mut S, Request<'_, U>) -> bool,
        on_response: impl FnMut(&mut S, U, Result<Payload<'_>, CallFailed>),
    ) -> usize {
        let mut handler = ServeRequests {
            core: &self.core,
            state,
            on_request,
            on_response,
            deferred: None,
            requests: 0,
            has_enough: false,
        };
        let ended = self.core.poll(&mut handler);
        handler.requests + ended
    }

    /// The next request that waits, in the order of arrival: each request that a [`poll`](Context::poll) finds is
    /// [deferred](Request::defer).
    pub fn recv(&self) -> Option<RecvHandle<U>> {
        self.core.requests.borrow_mut().pop_front()
    }

    /// Sends everything now. No batch is delayed.
    pub fn flush(&self) {
        if self.core.flush_list.has_connections() {
            self.core.flush_connections(false);
        }
    }

    /// Sends everything, then waits until there is something to [poll](Context::poll) for, at most for `timeout`. Returns whether
    /// there is.
    ///
    /// A wait ends
    /// - when a batch arrives, or when a READ or WRITE of the application completes;
    /// - at the earliest deadline of a pending call;
    /// - at most 10 ms after the device has found that a peer is dead. The software device finds that within 100 ms. On a network a
    ///   peer that owes responses is probed every 100 ms, and the device gives up after its
    ///   [retries](crate::device::ConnectConfig);
    /// - at most 4 ms after the peer has released room, if a call was refused for lack of room. If the peer releases nothing for about
    ///   50 ms, the wait ends too, so that the call can be tried again.
    ///
    /// So a loop of `poll` and `wait(Duration::MAX)` misses nothing.
    pub fn wait(&self, timeout: Duration) -> bool {
        let is_due = self.core.wait(timeout);
        // Time has passed without polls.
        self.core.liveness.clock.read_soon();
        is_due
    }

    /// What the context has done so far.
    pub fn counters(&self) -> Counters {
        self.core.counters.get()
    }
}

impl<U> Drop for Context<U> {
    fn drop(&mut self) {
        // Queued requests keep the core alive, which keeps them. Nobody can receive them any more.
        while let Some(request) = self.recv() {
            drop(request);
        }
    }
}

impl<U> ContextCore<U> {
    #[inline]
    fn poll(&self, handler: &mut impl PollHandler<U>) -> usize {
        let Ok(mut state) = self.poll_state.try_borrow_mut() else { return 0 };
        let guard = PollGuard(self);
        self.has_sent_alone.set(false);
        if self.flush_list.has_connections() {
            self.flush_connections(true);
        }
        handler.on_queued_requests();
        // Those behind a request that still waits must not come before it.
        let mut ended = if handler.has_enough() { 0 } else { self.poll_recv_cq(&mut state, handler) };
        if self.liveness.clock.is_step() || self.flush_list.awaits_completions() {
            ended += self.poll_periodic(handler);
            state.forget_closed();
        }
        std::mem::forget(guard);
        ended
    }

    /// What a poll does only every 16th time, and what is due by the clock.
    #[inline(never)]
    fn poll_periodic(&self, handler: &mut impl PollHandler<U>) -> usize {
        let is_due = self.liveness.clock.is_due_at_step();
        if self.flush_list.awaits_completions() || self.expects_send_completion(is_due) {
            self.poll_send_cq();
        }
        // Responses that have arrived are reported before the end of their connection.
        if (is_due || self.liveness.has_failures()) && !self.queues.is_paused() {
            return self.check_liveness(handler);
        }
        0
    }

    fn wait(&self, timeout: Duration) -> bool {
        let mut now = Instant::now();
        let end = now.checked_add(timeout);
        // Whether the receive CQ was seen empty.
        let mut is_drained = false;
        loop {
            self.flush_connections(false);
            let (_, has_news) = self.poll_send_cq();
            self.check_time(now, is_drained);
            if has_news || self.has_something_to_report() {
                return true;
            }
            let left = end.map_or(Duration::MAX, |end| end.saturating_duration_since(now));
            let slice = self.wait_slice(now);
            if self.queues.wait_recv(slice.min(left)) {
                return true;
            }
            is_drained = true;
            now = Instant::now();
            if left <= slice {
                self.check_time(now, is_drained);
                return self.has_something_to_report();
            }
        }
    }

    /// Whether there is something that the application can take without anything arriving.
    fn has_something_to_report(&self) -> bool {
        self.liveness.has_failures()
            || self.queues.is_paused()
            || !self.requests.borrow().is_empty()
            || !self.raw_completions.borrow().is_empty()
    }

    /// How long a wait can sleep on the receive CQ before it has to look at anything else.
    fn wait_slice(&self, now: Instant) -> Duration {
        let mut slice = WAIT_SLICE;
        for connection in self.connections.borrow().iter() {
            if connection.has_operations() {
                slice = slice.min(OPERATION_WAIT_SLICE);
            }
            if let Some(at) = connection.next_position_read() {
                slice = slice.min(at.saturating_duration_since(now));
            }
        }
        let deadline = self.liveness.next_deadline();
        deadline.map_or(slice, |at| slice.min(at.saturating_duration_since(now)))
    }

    fn add_connection(&self, config: &ConnectionConfig) -> Result<Rc<ConnectionCore<U>>, DeviceError> {
        // Completions that a closed connection has left in the send CQ would take the room of this one.
        while self.poll_send_cq().0 {}
        let mut connections = self.connections.borrow_mut();
        let key = connections.next_key().ok_or(DeviceError::Exhausted {
            what: "connections of the context (raise max_connections, unless the device has no longer completion queues)",
        })?;
        let max_inline = inline_limit(self.device.attr().max_inline);
        let qp = QpConfig {
            max_send_wr: SEND_DEPTH,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline,
        };
        let qp = self.queues.create_qp(&self.pd, &qp)?;
        let connection =
            Rc::new(ConnectionCore::new(key.bits(), &self.pd, qp, max_inline, *config, &self.counters)?);
        self.qp_table.borrow_mut().insert(connection.qp_num, connection.key);
        let inserted = connections.insert(connection.clone());
        debug_assert!(inserted.is_ok_and(|inserted| inserted == key));
        Ok(connection)
    }

    /// Closes a connection. Returns what was attached to its pending calls.
    fn remove_connection(&self, connection: &Rc<ConnectionCore<U>>) -> Vec<U> {
        let ended = connection.fail(Failure::Closed);
        self.collect_ready(connection);
        // If a poll is under way, it lets go of the connection itself.
        if let Ok(mut state) = self.poll_state.try_borrow_mut() {
            state.recent = None;
        }
        self.qp_table.borrow_mut().remove(connection.qp_num);
        let removed = self.connections.borrow_mut().remove(ConnectionKey::from_bits(connection.key));
        drop(removed);
        ended
    }

    fn connection_by_qp(&self, qp_num: u32) -> Option<Rc<ConnectionCore<U>>> {
        let key = self.qp_table.borrow().get(qp_num)?;
        self.connection_by_key(key)
    }

    #[inline]
    fn connection_by_key(&self, key: u32) -> Option<Rc<ConnectionCore<U>>> {
        self.connections.borrow().get(ConnectionKey::from_bits(key)).cloned()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::ConnectConfig;

    /// Two connected contexts. The client has answered one call, so that it remembers the connection.
    fn connected() -> (Context<u32>, Context<u32>, Connection<u32>, Connection<u32>) {
        let open = || Context::open(&"software".parse().unwrap(), &Config::default()).unwrap();
        let (client, server) = (open(), open());
        let config = ConnectionConfig::default();
        let (here, there) =
            (client.create_connection(&config).unwrap(), server.create_connection(&config).unwrap());
        here.connect(&there.address(), &ConnectConfig::default()).unwrap();
        there.connect(&here.address(), &ConnectConfig::default()).unwrap();
        assert!(here.call(b"first", 16, 0).is_ok());
        exchange(&client, &server, |_| ());
        (client, server, here, there)
    }

    /// Polls until a call has ended.
    fn exchange(client: &Context<u32>, server: &Context<u32>, mut on_end: impl FnMut(bool)) {
        while client.poll(|_, response| on_end(response.is_ok())) == 0 {
            server.poll(|_, _| ());
            while let Some(request) = server.recv() {
                assert!(request.reply(b"answer").is_ok());
            }
        }
    }

    #[test]
    fn connection_that_a_callback_closes_is_not_kept() {
        for is_answered in [true, false] {
            let (client, server, here, there) = connected();
            let connection = Rc::downgrade(&here.connection);
            assert!(here.call(b"second", 16, 1).is_ok());
            if !is_answered {
                drop(there);
            }
            let mut here = Some(here);
            exchange(&client, &server, |is_ok| {
                assert_eq!(is_ok, is_answered);
                here = None;
            });
            assert!(connection.upgrade().is_none(), "answered: {is_answered}");
        }
    }

    #[test]
    fn connection_that_is_closed_between_polls_is_not_kept() {
        let (client, _server, here, _there) = connected();
        // A flush is due after a response.
        client.poll(|_, _| ());
        let connection = Rc::downgrade(&here.connection);
        drop(here);
        assert!(connection.upgrade().is_none());
    }
}
