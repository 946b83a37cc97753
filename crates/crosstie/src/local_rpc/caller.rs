//! The client of both services: it makes calls, polls, waits and exchanges messages over a [`Transport`].
//!
//! The [`CallTable`] remembers which calls are in flight and in which slot each response arrives; the transport knows
//! where the slots are.

use core::fmt;
use core::marker::PhantomData;
use std::time::{Duration, Instant};

use crosstie_protocol::lane::CallNumber;

use super::error::{CallError, ConnectError, Disconnected, ExchangeError, NotCalled};
use super::hello::{self, Hello};
use super::transport::{Limits, Transport};
use crate::local::connection::DEFAULT_TIMEOUT;
use crate::message::Message;
use crate::ring::call_table::{CallTable, StartedCall};
use crate::ring::fence;
use crate::wait::any::sealed::Waitable;
use crate::wait::{self, Parker, WaitStrategy};

/// Calls a server: what an [`ipc::Client`](crate::ipc::Client) and a [`delegation::Client`](crate::delegation::Client) have
/// in common. They differ in where requests and responses are. The modules [`ipc`](crate::ipc) and
/// [`delegation`](crate::delegation) say what each promises.
///
/// `Token` is any value that the program wants to get back with the response to a call.
pub struct Caller<T, Req: Message + ?Sized, Resp: Message + ?Sized, Token> {
    name: String,
    wait_strategy: WaitStrategy,
    pub(crate) transport: T,
    request_limit: usize,
    pub(crate) calls: CallTable<Token>,
    /// The last response, copied out of shared memory.
    inbox: Resp::Inbox,
    /// Set when the connection has ended for this client: from then on it does not trust anything in shared memory.
    failed: Option<Disconnected>,
    messages: PhantomData<fn(&Req)>,
}

impl<T: Transport, Req: Message + ?Sized, Resp: Message + ?Sized, Token> Caller<T, Req, Resp, Token> {
    /// Connects to the server with this name.
    pub fn connect(name: &str) -> Result<Self, ConnectError> {
        Self::connect_within(name, DEFAULT_TIMEOUT)
    }

    /// Connects to the server with this name. The server must reply within `timeout`.
    pub fn connect_within(name: &str, timeout: Duration) -> Result<Self, ConnectError> {
        fence::register()?;
        let hello = Hello::new::<Req, Resp>(T::MAGIC, T::VERSION);
        let (connection, reply, files) = hello::connect(T::KIND, name, &hello, timeout)?;
        let invalid = || ConnectError::InvalidSegment { name: name.to_owned() };
        let transport = T::open(connection, &reply, files)?.ok_or_else(invalid)?;
        let Limits { queue_depth, request_limit, response_limit } = transport.limits();
        let fits = |size: Option<usize>, limit| size.is_none_or(|size| size == limit);
        if !fits(Req::SIZE, request_limit) || !fits(Resp::SIZE, response_limit) {
            return Err(invalid());
        }
        Ok(Caller {
            name: name.to_owned(),
            wait_strategy: WaitStrategy::default(),
            calls: CallTable::new(queue_depth),
            inbox: Resp::inbox(response_limit),
            transport,
            request_limit,
            failed: None,
            messages: PhantomData,
        })
    }

    /// Sets how [`wait`](Self::wait) and [`exchange`](Self::exchange) wait.
    #[must_use]
    pub fn with_wait_strategy(mut self, strategy: WaitStrategy) -> Self {
        self.wait_strategy = strategy;
        self
    }

    /// Connects again to the server with the same name, which may be a new process by now. Calls in flight end: their
    /// tokens are dropped when this succeeds. Call [`disconnect`](Self::disconnect) first to get the tokens back.
    pub fn reconnect(&mut self) -> Result<(), ConnectError> {
        if !self.transport.connection().is_closed() {
            self.close();
        }
        *self = Self::connect(&self.name)?.with_wait_strategy(self.wait_strategy);
        Ok(())
    }

    /// Sends a request. Never waits. Without room the token is handed back: the cause is [`Full`](NotCalled::Full) if this client
    /// has too many calls in flight and, in [`delegation`](crate::delegation), [`RingFull`](NotCalled::RingFull) if the
    /// ring that all clients share is full.
    #[inline]
    pub fn call(&mut self, request: &Req, token: Token) -> Result<(), CallError<Token>> {
        let bytes = request.bytes();
        let (reservation, started) = self.start_call(bytes.len(), token)?;
        self.transport.publish(reservation, started, bytes);
        self.demote_request(started);
        Ok(())
    }

    /// Called when a request was published.
    #[inline]
    pub(crate) fn demote_request(&self, started: StartedCall) {
        if let Some(slot) = self.calls.slot_to_demote(started.slot) {
            self.transport.demote_request(slot);
        }
    }

    /// Starts a call with a request of `len` bytes, if that is possible now.
    #[inline]
    pub(crate) fn start_call(
        &mut self,
        len: usize,
        token: Token,
    ) -> Result<(T::Reservation, StartedCall), CallError<Token>> {
        // A message of fixed size was compared with the limit when the client connected. The table of a connection that failed is full.
        let token = if self.transport.connection().is_closed()
            || self.calls.is_full()
            || Req::SIZE.is_none() && len > self.request_limit
        {
            self.check_can_call(len, token)?
        } else {
            token
        };
        let Some(reservation) = self.transport.reserve() else {
            return Err(CallError { cause: NotCalled::RingFull, token });
        };
        Ok((reservation, self.calls.start_with_room(token)))
    }

    /// Hands the token back if a call with a request of `len` bytes can start now.
    #[cold]
    fn check_can_call(&mut self, len: usize, token: Token) -> Result<Token, CallError<Token>> {
        let limit = self.request_limit;
        let cause = match self.check_connected() {
            Err(ended) => ended.into(),
            Ok(()) if len > limit => NotCalled::TooLong { len, limit },
            Ok(()) => {
                if self.calls.is_full() && self.calls.has_blocking() {
                    self.release_answered_blocking();
                }
                if !self.calls.is_full() {
                    return Ok(token);
                }
                NotCalled::Full
            }
        };
        Err(CallError { cause, token })
    }

    /// Passes the responses that have arrived to `each`, and returns their number. Never waits. An error is returned only
    /// after all responses that ever arrived have been passed.
    ///
    /// One poll ends at most half of the calls in flight, and of many fewer, where that is faster. A client that makes a new call for each response
    /// so keeps the server busy with the others; otherwise client and server would soon alternate, each waiting for the other to
    /// work off a whole queue.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Token, &Resp)) -> Result<usize, Disconnected> {
        let most = self.calls.most_per_poll();
        if most > 1 {
            let expected = self.calls.expect();
            if self.transport.has_response(expected.slot(), expected.call()) {
                // Those behind the first response are likely to be there, too.
                self.transport.prefetch_responses(expected.slot(), most);
            }
        }
        let mut count = 0;
        while count < most {
            let expected = self.calls.expect();
            let slot = expected.slot();
            let response = self.transport.response(slot, expected.call(), Resp::SIZE);
            let is_invalid = matches!(response, Some((len, _)) if Resp::SIZE.is_some_and(|size| len != size));
            if is_invalid && expected.has_token() {
                self.calls.close();
                return Err(*self.failed.insert(Disconnected::InvalidResponse));
            }
            // The word of a slot that no call uses is the response to the last call that did.
            if let Some((len, copy)) = response.filter(|_| !is_invalid)
                && let Some(token) = expected.finish()
            {
                let len = Resp::SIZE.unwrap_or(len);
                // Copied last: nothing comes between the copy and `each`, so the message need not be loaded again.
                if !Resp::receive(&mut self.inbox, len, copy) {
                    self.calls.restore(slot, token);
                    self.calls.close();
                    return Err(*self.failed.insert(Disconnected::InvalidResponse));
                }
                count += 1;
                if let Some(response) = Resp::received(&self.inbox, len) {
                    each(token, response);
                }
            } else if !self.calls.expect_other() {
                break;
            }
        }
        if count > 0 {
            self.calls.forget_misses();
        }
        if count < most && self.calls.note_miss() {
            count += self.scan(&mut each)?;
        }
        if count == 0 && self.check_connected().is_err() {
            return self.poll_after_end(each);
        }
        Ok(count)
    }

    /// Waits until a response has arrived, for at most `timeout`. Returns whether one has. Returns at once if no call is in
    /// flight.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Disconnected> {
        if let Some(cause) = self.failed {
            return Err(cause);
        }
        let (calls, transport) = (&self.calls, &self.transport);
        let has_response = |(slot, call)| transport.has_response(slot, call);
        if calls.in_flight() > 0 && timeout != Some(Duration::ZERO) {
            let mut checks = 0u32;
            wait::wait_for(transport.parker(), self.wait_strategy, timeout, || {
                checks = checks.saturating_add(1);
                transport.connection().is_closed()
                    || calls.expected().is_some_and(has_response)
                    || (checks > T::EXPECTED_ONLY_CHECKS && calls.iter().any(has_response))
            });
        }
        let arrived = calls.iter().any(has_response);
        match arrived {
            true => self.calls.scan_next(),
            false => self.check_connected()?,
        }
        Ok(arrived)
    }

    /// Sends a request, waits for its response and passes it to `read`. Responses to other calls are left for
    /// [`poll`](Self::poll). If a shared ring is full, this waits for room, but it does not wait for other calls of this
    /// client.
    pub fn exchange<R>(&mut self, request: &Req, read: impl FnOnce(&Resp) -> R) -> Result<R, ExchangeError> {
        self.exchange_within(request, None, read)
    }

    /// As [`exchange`](Self::exchange), for at most `timeout`; then the result is [`TimedOut`](ExchangeError::TimedOut). The
    /// server may still execute the request, and its response is discarded. Until the response arrives, the call counts
    /// towards the server's limit of calls in flight, and further exchanges wait for room as they wait for responses.
    pub fn exchange_within<R>(
        &mut self,
        request: &Req,
        timeout: Option<Duration>,
        read: impl FnOnce(&Resp) -> R,
    ) -> Result<R, ExchangeError> {
        let bytes = request.bytes();
        self.check_connected()?;
        let limit = self.request_limit;
        if bytes.len() > limit {
            return Err(ExchangeError::TooLong { len: bytes.len(), limit });
        }
        let reservation = if self.calls.is_full() { None } else { self.transport.reserve() };
        let (reservation, left) = match reservation {
            Some(reservation) => (reservation, timeout),
            None => self.wait_for_room(timeout)?,
        };
        let Some(started) = self.calls.start_blocking() else { unreachable!("there was room for it") };
        self.transport.publish(reservation, started, bytes);
        let transport = &self.transport;
        wait::wait_for(transport.parker(), self.wait_strategy, left, || {
            transport.connection().is_closed() || transport.has_response(started.slot, started.call)
        });
        let Some((len, copy)) = transport.response(started.slot, started.call, Resp::SIZE) else {
            return Err(match timeout {
                Some(after) if !self.transport.connection().is_closed() => ExchangeError::TimedOut { after },
                _ => Disconnected::ServerGone.into(),
            });
        };
        let is_valid = Resp::receive(&mut self.inbox, len, copy);
        self.calls.release_blocking(started.slot);
        match Resp::received(&self.inbox, len) {
            Some(response) if is_valid => Ok(read(response)),
            _ => Err(self.fail(Disconnected::InvalidResponse).into()),
        }
    }

    /// Reserves space for a request when there was none at first: exchanges that timed out use the slots until the server
    /// responds, or a shared ring is full. Returns the remaining time, too.
    #[cold]
    fn wait_for_room(
        &mut self,
        timeout: Option<Duration>,
    ) -> Result<(T::Reservation, Option<Duration>), ExchangeError> {
        let start = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        let after = timeout.unwrap_or(Duration::MAX);
        if self.calls.is_full() {
            if !self.calls.has_blocking() {
                return Err(ExchangeError::Full);
            }
            let (calls, transport) = (&self.calls, &self.transport);
            wait::wait_for(transport.parker(), self.wait_strategy, timeout, || {
                transport.connection().is_closed()
                    || calls.iter_blocking().any(|(slot, call)| transport.has_response(slot, call))
            });
            self.release_answered_blocking();
        }
        loop {
            // Check in every iteration that the server is alive.
            self.check_connected()?;
            if self.calls.is_full() {
                return Err(ExchangeError::TimedOut { after });
            }
            if let Some(reservation) = self.transport.reserve() {
                return Ok((reservation, left()));
            }
            if left().is_some_and(|left| left.is_zero()) {
                return Err(ExchangeError::TimedOut { after });
            }
            std::thread::yield_now();
        }
    }

    /// Frees the slots of exchanges that timed out and whose responses have arrived since.
    #[cold]
    fn release_answered_blocking(&mut self) {
        let transport = &self.transport;
        self.calls.release_answered_blocking(|slot, call| transport.has_response(slot, call));
    }

    /// Calls in flight, without [exchanges](Self::exchange).
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.calls.in_flight()
    }

    /// Most calls that may be in flight.
    pub fn queue_depth(&self) -> usize {
        self.calls.limit()
    }

    /// Closes the connection, and passes the tokens of all calls in flight to `each`.
    pub fn disconnect(&mut self, each: impl FnMut(Token)) {
        self.close();
        self.calls.drain(each);
    }

    /// Closes the connection, so that this client does not count towards the server's limit when it reconnects.
    fn close(&mut self) {
        // Responses may still arrive in slots that would be used again, so no further call is made.
        if self.failed.is_none() {
            self.fail(Disconnected::ServerGone);
        }
        self.transport.connection().close();
    }

    /// Ends the connection for this client. Returns the cause.
    #[cold]
    fn fail(&mut self, cause: Disconnected) -> Disconnected {
        self.calls.close();
        *self.failed.insert(cause)
    }

    #[inline]
    fn check_connected(&self) -> Result<(), Disconnected> {
        match self.failed {
            Some(cause) => Err(cause),
            None if self.transport.connection().is_closed() => Err(Disconnected::ServerGone),
            None => Ok(()),
        }
    }

    /// Passes the response to a call to `each`, if it is there: copies it out of shared memory and validates it. Returns whether it is
    /// there.
    fn deliver(
        &mut self,
        slot: usize,
        call: CallNumber,
        each: &mut impl FnMut(Token, &Resp),
    ) -> Result<bool, Disconnected> {
        let Some((len, copy)) = self.transport.response(slot, call, Resp::SIZE) else { return Ok(false) };
        if !Resp::receive(&mut self.inbox, len, copy) {
            return Err(self.fail(Disconnected::InvalidResponse));
        }
        if let (Some(token), Some(response)) = (self.calls.finish(slot), Resp::received(&self.inbox, len)) {
            each(token, response);
        }
        Ok(true)
    }

    /// Checks all calls in flight for responses.
    #[cold]
    fn scan(&mut self, each: &mut impl FnMut(Token, &Resp)) -> Result<usize, Disconnected> {
        let expected = self.calls.expected();
        let mut count = 0;
        for slot in 0..CallTable::<Token>::slots_for(self.calls.limit()) {
            let Some(call) = self.calls.call_in(slot) else { continue };
            count += usize::from(self.deliver(slot, call, each)?);
        }
        // Responses arrived, but not the expected one.
        if count > 0 && expected.is_some_and(|(slot, call)| self.calls.call_in(slot) == Some(call)) {
            self.calls.scan_soon();
        }
        Ok(count)
    }

    /// Polls when the connection has ended: all responses that the server ever wrote are visible now.
    #[cold]
    fn poll_after_end(&mut self, mut each: impl FnMut(Token, &Resp)) -> Result<usize, Disconnected> {
        if let Some(cause) = self.failed {
            return Err(cause);
        }
        match self.scan(&mut each)? {
            0 => Err(Disconnected::ServerGone),
            count => Ok(count),
        }
    }
}

impl<T: Transport, Req: Message + ?Sized, Resp: Message + ?Sized, Token> Waitable
    for Caller<T, Req, Resp, Token>
{
    fn parker(&self) -> Option<&Parker> {
        Some(self.transport.parker())
    }

    fn is_expecting(&self) -> bool {
        self.calls.in_flight() > 0
    }

    fn is_ready(&self, check_all: bool) -> bool {
        let has_response = |(slot, call)| self.transport.has_response(slot, call);
        self.is_expecting()
            && (self.calls.expected().is_some_and(has_response)
                || (check_all && self.calls.iter().any(has_response))
                || self.check_connected().is_err())
    }
}

impl<T: Transport, Req: Message + ?Sized, Resp: Message + ?Sized, Token> fmt::Debug
    for Caller<T, Req, Resp, Token>
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut client = f.debug_struct("Client");
        client.field("server", &self.name).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}
