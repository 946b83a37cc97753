//! The side that asks, the same for every kind of service: calls, polls, waits and exchanges, over a [`Line`].

use core::fmt;
use core::marker::PhantomData;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crosstie_protocol::lane::CallNumber;

use super::bell::{self, Bell, Waiting};
use super::error::{CallError, ConnectError, Disconnected};
use super::greeting::{self, Greeting};
use super::member::{Member, PATIENCE};
use super::together;
use crate::message::Message;
use crate::ring::fence;
use crate::ring::outstanding::{Begun, Outstanding};

/// A connection to a server, as a kind of service makes it.
pub trait Line: Sized {
    /// Looks at the answer that is due before waiting looks at all of them. Fewer than waiting makes before it sleeps.
    const LOOKS_AT_FIRST: u32;
    /// What kind of service it is, and what its greetings begin with.
    const KIND: &str;
    const MAGIC: u64;
    const VERSION: u32;
    /// Where a request goes that [`publish`](Line::publish) writes.
    type Place;

    /// The connection to a server that greeted us like this. None if that makes no sense.
    fn open(member: Member, reply: &[u8], files: Vec<OwnedFd>) -> io::Result<Option<Self>>;
    fn limits(&self) -> Limits;
    fn member(&self) -> &Member;
    /// Rung with each answer, and when the server is gone.
    fn bell(&self) -> &Bell;
    /// A place for a request, to be filled by [`publish`](Line::publish) at once. None if all clients together have taken
    /// every one.
    fn reserve(&mut self) -> Option<Self::Place>;
    /// Writes a request and lets the server see it.
    fn publish(&self, place: Self::Place, begun: Begun, bytes: &[u8]);
    /// The length of the answer to this call, if it is there. As the server wrote it, or whoever else can.
    fn answered(&self, slot: usize, call: CallNumber) -> Option<usize>;
    /// Copies an answer out.
    fn get(&self, slot: usize, place: &mut [u8]);
    /// The answer in this slot is there, and in those behind it up to `count` more may be: they are about to be read.
    #[inline(always)]
    fn fetch(&self, _slot: usize, _count: usize) {}
}

/// What a server said it takes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub queue_depth: usize,
    pub request_limit: usize,
    pub response_limit: usize,
}

/// Calls a server: what an [`ipc::Client`](crate::ipc::Client) and a [`delegation::Client`](crate::delegation::Client) have
/// in common, which is all but where requests and answers are. The modules [`ipc`](crate::ipc) and
/// [`delegation`](crate::delegation) say what each promises.
///
/// `Token` is whatever the caller wants to have back with each answer.
pub struct Caller<L, Req: Message + ?Sized, Resp: Message + ?Sized, Token> {
    name: String,
    waiting: Waiting,
    pub(crate) line: L,
    request_limit: usize,
    calls: Outstanding<Token>,
    inbox: Resp::Inbox,
    /// The connection is over; nothing that is shared is believed any more.
    broken: Option<Disconnected>,
    messages: PhantomData<fn(&Req)>,
}

impl<L: Line, Req: Message + ?Sized, Resp: Message + ?Sized, Token> Caller<L, Req, Resp, Token> {
    /// Connects to the server of that name.
    pub fn connect(name: &str) -> Result<Self, ConnectError> {
        Self::connect_within(name, PATIENCE)
    }

    /// Connects to the server of that name, if it answers within `timeout`.
    pub fn connect_within(name: &str, timeout: Duration) -> Result<Self, ConnectError> {
        fence::register()?;
        let greeting = Greeting::new::<Req, Resp>(L::MAGIC, L::VERSION);
        let (member, reply, files) = greeting::join(L::KIND, name, &greeting, timeout)?;
        let nonsense = || ConnectError::Nonsense { name: name.to_owned() };
        let line = L::open(member, &reply, files)?.ok_or_else(nonsense)?;
        let Limits { queue_depth, request_limit, response_limit } = line.limits();
        let fits = |size: Option<usize>, limit| size.is_none_or(|size| size == limit);
        if !fits(Req::SIZE, request_limit) || !fits(Resp::SIZE, response_limit) {
            return Err(nonsense());
        }
        Ok(Caller {
            name: name.to_owned(),
            waiting: Waiting::default(),
            calls: Outstanding::new(queue_depth),
            inbox: Resp::inbox(response_limit),
            line,
            request_limit,
            broken: None,
            messages: PhantomData,
        })
    }

    /// Sets how [`wait`](Self::wait) and [`exchange`](Self::exchange) wait.
    #[must_use]
    pub fn with_waiting(mut self, waiting: Waiting) -> Self {
        self.waiting = waiting;
        self
    }

    /// Connects to the server of the same name again, which may be another one by now. Calls that are under way are over:
    /// their tokens are dropped, unless they were [taken](Self::abandon) before, or this fails.
    pub fn reconnect(&mut self) -> Result<(), ConnectError> {
        if !self.line.member().gone() {
            self.give_up();
        }
        *self = Self::connect(&self.name)?.with_waiting(self.waiting);
        Ok(())
    }

    /// Begins a call. Never waits: without room for it the token comes back, with
    /// [`Full`](CallError::Full) if it is our own calls that take it up and, in [`delegation`](crate::delegation),
    /// [`RingFull`](CallError::RingFull) if it is everybody's.
    #[inline]
    pub fn call(&mut self, request: &Req, token: Token) -> Result<(), CallError<Token>> {
        let bytes = request.bytes();
        let (place, begun) = self.admit(bytes.len(), token)?;
        self.line.publish(place, begun, bytes);
        Ok(())
    }

    /// Begins a call of `len` bytes, if that is possible now.
    #[inline(always)]
    pub(crate) fn admit(&mut self, len: usize, token: Token) -> Result<(L::Place, Begun), CallError<Token>> {
        if let Err(cause) = self.alive() {
            return Err(CallError::Disconnected { token, cause });
        }
        let limit = self.request_limit;
        if len > limit {
            return Err(CallError::TooLong { token, len, limit });
        }
        if self.calls.is_full() {
            if self.calls.has_quiet() {
                self.reap();
            }
            if self.calls.is_full() {
                return Err(CallError::Full(token));
            }
        }
        let Some(place) = self.line.reserve() else { return Err(CallError::RingFull(token)) };
        let Ok(begun) = self.calls.begin(token) else { unreachable!("there was room for it") };
        Ok((place, begun))
    }

    /// Hands the answers that are there to `each`; says how many. Never waits. An error comes when all answers have been
    /// handed out that ever came.
    ///
    /// At most half of the calls under way end at a time, so that a caller that makes new ones for them keeps the server
    /// busy with the other half: without this, both sides soon wait for each other's whole queue in turn.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Token, &Resp)) -> Result<usize, Disconnected> {
        let most = self.calls.in_flight().div_ceil(2);
        let mut count = 0;
        while let Some((slot, call)) = self.calls.due() {
            let Some(len) = self.line.answered(slot, call) else {
                if self.calls.fruitless() {
                    count += self.search(&mut each)?;
                }
                break;
            };
            if count == 0 && most > 1 {
                self.line.fetch(slot, most);
            }
            self.deliver(slot, len, &mut each)?;
            count += 1;
            if count == most {
                break;
            }
        }
        if count == 0 && self.alive().is_err() {
            return self.last_poll(each);
        }
        Ok(count)
    }

    /// Waits until an answer is there, at most for `timeout`; says whether one is. At once if no call is under way.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Disconnected> {
        if let Some(cause) = self.broken {
            return Err(cause);
        }
        let (calls, line) = (&self.calls, &self.line);
        let is_there = |(slot, call)| line.answered(slot, call).is_some();
        if calls.in_flight() > 0 && timeout != Some(Duration::ZERO) {
            let mut looks = 0;
            bell::wait_for(line.bell(), self.waiting, timeout, || {
                looks += 1;
                line.member().gone()
                    || calls.due().is_some_and(is_there)
                    || (looks > L::LOOKS_AT_FIRST && calls.all().any(is_there))
            });
        }
        let there = calls.all().any(is_there);
        match there {
            true => self.calls.expect_anywhere(),
            false => self.alive()?,
        }
        Ok(there)
    }

    /// Calls, waits and hands the answer to `read`. Answers to other calls stay where they are. Waits for a place in a
    /// ring that it shares, too, but not for other calls of this client.
    pub fn exchange<R>(&mut self, request: &Req, read: impl FnOnce(&Resp) -> R) -> Result<R, CallError<()>> {
        self.exchange_within(request, None, read)
    }

    /// As [`exchange`](Self::exchange), for at most `timeout`: then it is [`TimedOut`](CallError::TimedOut). The server may still do
    /// what it was asked. Its answer is nobody's; until it comes, the call counts as unanswered for the server's limit, and
    /// further exchanges wait for room as they wait for answers.
    pub fn exchange_within<R>(
        &mut self,
        request: &Req,
        timeout: Option<Duration>,
        read: impl FnOnce(&Resp) -> R,
    ) -> Result<R, CallError<()>> {
        let bytes = request.bytes();
        let disconnected = |cause| CallError::Disconnected { token: (), cause };
        self.alive().map_err(disconnected)?;
        let limit = self.request_limit;
        if bytes.len() > limit {
            return Err(CallError::TooLong { token: (), len: bytes.len(), limit });
        }
        let place = if self.calls.is_full() { None } else { self.line.reserve() };
        let (place, left) = match place {
            Some(place) => (place, timeout),
            None => self.reserve_late(timeout)?,
        };
        let Some(begun) = self.calls.begin_quiet() else { unreachable!("there was room for it") };
        self.line.publish(place, begun, bytes);
        let line = &self.line;
        let answer = || line.answered(begun.slot, begun.call);
        bell::wait_for(line.bell(), self.waiting, left, || line.member().gone() || answer().is_some());
        let Some(len) = answer() else {
            return Err(match timeout {
                Some(after) if !self.line.member().gone() => CallError::TimedOut { token: (), after },
                _ => disconnected(Disconnected::ServerGone),
            });
        };
        self.calls.release(begun.slot);
        let answer = self.accept(begun.slot, len).map_err(disconnected)?;
        Ok(read(answer))
    }

    /// A place for a call for which there is no room yet: because others were given up and are not answered, or because a
    /// shared ring is full. Says how much time is left.
    #[cold]
    fn reserve_late(
        &mut self,
        timeout: Option<Duration>,
    ) -> Result<(L::Place, Option<Duration>), CallError<()>> {
        let begun = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let after = timeout.unwrap_or(Duration::MAX);
        if self.calls.is_full() {
            if !self.calls.has_quiet() {
                return Err(CallError::Full(()));
            }
            let (calls, line) = (&self.calls, &self.line);
            bell::wait_for(line.bell(), self.waiting, timeout, || {
                line.member().gone()
                    || calls.all_quiet().any(|(slot, call)| line.answered(slot, call).is_some())
            });
            self.reap();
        }
        loop {
            // Every turn looks whether the server is alive.
            self.alive().map_err(|cause| CallError::Disconnected { token: (), cause })?;
            if self.calls.is_full() {
                return Err(CallError::TimedOut { token: (), after });
            }
            if let Some(place) = self.line.reserve() {
                return Ok((place, left()));
            }
            if left().is_some_and(|left| left.is_zero()) {
                return Err(CallError::TimedOut { token: (), after });
            }
            std::thread::yield_now();
        }
    }

    /// Frees what calls that were given up take, if they are answered by now.
    #[cold]
    fn reap(&mut self) {
        let line = &self.line;
        self.calls.reap(|slot, call| line.answered(slot, call).is_some());
    }

    /// Calls that are unanswered, without [exchanges](Self::exchange).
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.calls.in_flight()
    }

    /// Calls that may be unanswered at a time.
    pub fn queue_depth(&self) -> usize {
        self.calls.limit()
    }

    /// Gives up the connection, and hands out the tokens of all calls that are unanswered.
    pub fn abandon(&mut self, each: impl FnMut(Token)) {
        self.give_up();
        self.calls.abandon(each);
    }

    /// Leaves, so that there is room for us if we come back.
    fn give_up(&mut self) {
        // Answers may still come, into slots that would be used again.
        self.broken.get_or_insert(Disconnected::ServerGone);
        self.line.member().leave();
    }

    #[inline]
    fn alive(&self) -> Result<(), Disconnected> {
        match self.broken {
            Some(cause) => Err(cause),
            None if self.line.member().gone() => Err(Disconnected::ServerGone),
            None => Ok(()),
        }
    }

    /// Copies an answer out and checks it.
    #[inline(always)]
    fn accept(&mut self, slot: usize, len: usize) -> Result<&Resp, Disconnected> {
        let line = &self.line;
        if Resp::receive(&mut self.inbox, len, |place| line.get(slot, place))
            && let Some(answer) = Resp::received(&self.inbox, len)
        {
            return Ok(answer);
        }
        Err(*self.broken.insert(Disconnected::Nonsense))
    }

    #[inline(always)]
    fn deliver(
        &mut self,
        slot: usize,
        len: usize,
        each: &mut impl FnMut(Token, &Resp),
    ) -> Result<(), Disconnected> {
        self.accept(slot, len)?;
        if let (Some(token), Some(answer)) = (self.calls.end(slot), Resp::received(&self.inbox, len)) {
            each(token, answer);
        }
        Ok(())
    }

    /// Looks at all calls under way.
    #[cold]
    fn search(&mut self, each: &mut impl FnMut(Token, &Resp)) -> Result<usize, Disconnected> {
        let due = self.calls.due();
        let mut count = 0;
        for slot in 0..Outstanding::<Token>::slots(self.calls.limit()) {
            let Some(call) = self.calls.call(slot) else { continue };
            if let Some(len) = self.line.answered(slot, call) {
                self.deliver(slot, len, each)?;
                count += 1;
            }
        }
        // Others, but not the one that was due first.
        if count > 0 && due.is_some_and(|(slot, call)| self.calls.call(slot) == Some(call)) {
            self.calls.expect_disorder();
        }
        Ok(count)
    }

    /// The server is gone; what it answered before is visible now.
    #[cold]
    fn last_poll(&mut self, mut each: impl FnMut(Token, &Resp)) -> Result<usize, Disconnected> {
        if let Some(cause) = self.broken {
            return Err(cause);
        }
        match self.search(&mut each)? {
            0 => Err(Disconnected::ServerGone),
            count => Ok(count),
        }
    }
}

impl<L: Line, Req: Message + ?Sized, Resp: Message + ?Sized, Token> together::sealed::Awaited
    for Caller<L, Req, Resp, Token>
{
    fn bell(&self) -> &Bell {
        self.line.bell()
    }

    fn has_calls(&self) -> bool {
        self.calls.in_flight() > 0
    }

    fn has_news(&self, everywhere: bool) -> bool {
        let is_there = |(slot, call)| self.line.answered(slot, call).is_some();
        self.has_calls()
            && (self.calls.due().is_some_and(is_there)
                || (everywhere && self.calls.all().any(is_there))
                || self.alive().is_err())
    }
}

impl<L: Line, Req: Message + ?Sized, Resp: Message + ?Sized, Token> fmt::Debug
    for Caller<L, Req, Resp, Token>
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut client = f.debug_struct("Client");
        client.field("server", &self.name).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}
