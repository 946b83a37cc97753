//! The side that asks.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::{Duration, Instant};

use crosstie_protocol::lane::CallNumber;
use zerocopy::FromBytes;

use super::layout::{
    ClientKey, MAGIC, Map, RESPONSE_PAYLOAD_AT, ResponseKey, Slot, VERSION, Welcome, commit_word,
};
use super::{CallError, ConnectError, Disconnected, KIND};
use crate::Waiting;
use crate::memory::prefetch;
use crate::memory::segment::SharedRef;
use crate::message::Message;
use crate::neighbor::bell::{self, Bell};
use crate::neighbor::greeting::{self, Greeting};
use crate::neighbor::member::{Member, PATIENCE};
use crate::neighbor::together;
use crate::ring::outstanding::{Begun, Outstanding};
use crate::ring::{fence, reservation};

/// Looks at the answer that is due before waiting looks at all of them. Fewer than waiting makes before it sleeps.
const LOOKS_AT_FIRST: u32 = 32;

/// How far ahead of the request that is written its successors' lines are fetched, if we are the only client: that many
/// are on their way while the caller goes on. Far enough from where the server looks.
const REQUESTS_AHEAD: u64 = 8;

/// Calls a server. `Token` is whatever the caller wants to have back with each answer. See the [module](super).
pub struct Client<Req: Message + ?Sized, Resp: Message + ?Sized, Token = ()> {
    name: String,
    waiting: Waiting,
    line: Line,
    calls: Outstanding<Token>,
    inbox: Resp::Inbox,
    /// The connection is over; nothing of the segment is believed any more.
    broken: Option<Disconnected>,
    messages: PhantomData<fn(&Req)>,
}

/// The connection.
pub(super) struct Line {
    pub(super) map: Map,
    member: Member,
    key: ClientKey,
    claim: SharedRef<AtomicU64>,
    bell: SharedRef<Bell>,
    request_limit: usize,
    /// What `tail` was when last looked at: it is read again only when this says full.
    seen_tail: u64,
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized, Token> Client<Req, Resp, Token> {
    /// Connects to the server of that name.
    pub fn connect(name: &str) -> Result<Self, ConnectError> {
        Self::connect_within(name, PATIENCE)
    }

    /// Connects to the server of that name, if it answers within `timeout`.
    pub fn connect_within(name: &str, timeout: Duration) -> Result<Self, ConnectError> {
        let line = Line::connect::<Req, Resp>(name, timeout)?;
        Ok(Client {
            name: name.to_owned(),
            waiting: Waiting::default(),
            calls: Outstanding::new(line.map.shape.queue_depth as usize),
            inbox: Resp::inbox(line.map.shape.response_limit as usize),
            line,
            broken: None,
            messages: PhantomData,
        })
    }

    /// Sets how [`wait`](Client::wait) and [`exchange`](Client::exchange) wait.
    #[must_use]
    pub fn with_waiting(mut self, waiting: Waiting) -> Self {
        self.waiting = waiting;
        self
    }

    /// Connects to the server of the same name again, which may be another one by now. Calls that are under way are over:
    /// their tokens are dropped, unless they were [taken](Client::abandon) before, or this fails.
    pub fn reconnect(&mut self) -> Result<(), ConnectError> {
        if !self.line.member.gone() {
            self.give_up();
        }
        *self = Client::connect(&self.name)?.with_waiting(self.waiting);
        Ok(())
    }

    /// Begins a call. Never waits: without room for it the token comes back, with
    /// [`Full`](CallError::Full) if it is our own calls that take it up and [`RingFull`](CallError::RingFull) if it is
    /// everybody's.
    #[inline]
    pub fn call(&mut self, request: &Req, token: Token) -> Result<(), CallError<Token>> {
        let bytes = request.bytes();
        if let Err(cause) = self.alive() {
            return Err(CallError::Disconnected { token, cause });
        }
        let limit = self.line.request_limit;
        if bytes.len() > limit {
            return Err(CallError::TooLong { token, len: bytes.len(), limit });
        }
        if self.calls.is_full() {
            if self.calls.has_quiet() {
                self.reap();
            }
            if self.calls.is_full() {
                return Err(CallError::Full(token));
            }
        }
        let Some(position) = self.line.reserve() else { return Err(CallError::RingFull(token)) };
        let Ok(begun) = self.calls.begin(token) else { unreachable!("there was room for it") };
        self.line.publish(position, begun, bytes);
        Ok(())
    }

    /// Hands the answers that are there to `each`; says how many. Never waits. An error comes when all answers have been
    /// handed out that ever came.
    ///
    /// At most half of the calls under way end at a time, so that a caller that makes new ones for them keeps the server
    /// busy with the other half.
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
        if self.calls.in_flight() > 0 && timeout != Some(Duration::ZERO) {
            let mut looks = 0;
            let (calls, line) = (&self.calls, &self.line);
            let is_there = |(slot, call)| line.answered(slot, call).is_some();
            bell::wait_for(&line.bell, self.waiting, timeout, || {
                looks += 1;
                line.member.gone()
                    || calls.due().is_some_and(is_there)
                    || (looks > LOOKS_AT_FIRST && calls.all().any(is_there))
            });
        }
        let there = self.calls.all().any(|(slot, call)| self.line.answered(slot, call).is_some());
        match there {
            true => self.calls.expect_anywhere(),
            false => self.alive()?,
        }
        Ok(there)
    }

    /// Calls, waits and hands the answer to `read`. Answers to other calls stay where they are. Waits for a place in the
    /// ring, too, but not for other calls of this client.
    pub fn exchange<R>(&mut self, request: &Req, read: impl FnOnce(&Resp) -> R) -> Result<R, CallError<()>> {
        self.exchange_within(request, None, read)
    }

    /// As [`exchange`](Client::exchange), for at most `timeout`: then it is [`TimedOut`](CallError::TimedOut). The server may still do
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
        let limit = self.line.request_limit;
        if bytes.len() > limit {
            return Err(CallError::TooLong { token: (), len: bytes.len(), limit });
        }
        let (position, left) = match self.calls.is_full() {
            false => (self.line.reserve(), timeout),
            true => (None, timeout),
        };
        let (position, left) = match position {
            Some(position) => (position, left),
            None => self.reserve_late(timeout)?,
        };
        let Some(begun) = self.calls.begin_quiet() else { unreachable!("there was room for it") };
        self.line.publish(position, begun, bytes);
        let line = &self.line;
        let answer = || line.answered(begun.slot, begun.call);
        bell::wait_for(&line.bell, self.waiting, left, || line.member.gone() || answer().is_some());
        let Some(len) = answer() else {
            return Err(match timeout {
                Some(after) if !self.line.member.gone() => CallError::TimedOut { token: (), after },
                _ => disconnected(Disconnected::ServerGone),
            });
        };
        self.calls.release(begun.slot);
        let answer = self.accept(begun.slot, len).map_err(disconnected)?;
        Ok(read(answer))
    }

    /// A place in the ring, for a call for which there is no room yet: because others were given up and are not answered, or because
    /// the ring is full. Says how much time is left.
    #[cold]
    fn reserve_late(&mut self, timeout: Option<Duration>) -> Result<(u64, Option<Duration>), CallError<()>> {
        let begun = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let after = timeout.unwrap_or(Duration::MAX);
        if self.calls.is_full() {
            if !self.calls.has_quiet() {
                return Err(CallError::Full(()));
            }
            let (calls, line) = (&self.calls, &self.line);
            bell::wait_for(&line.bell, self.waiting, timeout, || {
                line.member.gone()
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
            if let Some(position) = self.line.reserve() {
                return Ok((position, left()));
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

    /// Calls that are unanswered, without [exchanges](Client::exchange).
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
        self.line.member.leave();
    }

    #[inline]
    fn alive(&self) -> Result<(), Disconnected> {
        match self.broken {
            Some(cause) => Err(cause),
            None if self.line.member.gone() => Err(Disconnected::ServerGone),
            None => Ok(()),
        }
    }

    /// Copies an answer out and checks it.
    #[inline(always)]
    fn accept(&mut self, slot: usize, len: usize) -> Result<&Resp, Disconnected> {
        let slot = self.line.answer(slot);
        if Resp::receive(&mut self.inbox, len, |place| slot.get(place))
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

    #[cfg(all(test, not(loom)))]
    pub(super) fn line(&self) -> &Line {
        &self.line
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn line_mut(&mut self) -> &mut Line {
        &mut self.line
    }
}

impl Line {
    fn connect<Req: Message + ?Sized, Resp: Message + ?Sized>(
        name: &str,
        patience: Duration,
    ) -> Result<Line, ConnectError> {
        fence::register()?;
        let greeting = Greeting::new::<Req, Resp>(MAGIC, VERSION);
        let (member, reply, files) = greeting::join(KIND, name, &greeting, patience)?;
        let nonsense = || ConnectError::Nonsense { name: name.to_owned() };
        let Welcome { shape, key } = Welcome::read_from_bytes(&reply).map_err(|_| nonsense())?;
        let fits = |size: Option<usize>, limit: u32| size.is_none_or(|size| size == limit as usize);
        let Ok([file]) = <[_; 1]>::try_from(files) else { return Err(nonsense()) };
        let map = Map::open(file, shape)?.ok_or_else(nonsense)?;
        let key = ClientKey::from_bits(key);
        if !fits(Req::SIZE, shape.request_limit)
            || !fits(Resp::SIZE, shape.response_limit)
            || key.index() >= shape.max_clients
        {
            return Err(nonsense());
        }
        let (claim, bell) = map.lines_of(key).ok_or_else(nonsense)?;
        member.ring_when_gone(bell.clone());
        Ok(Line {
            claim,
            bell,
            request_limit: shape.request_limit as usize,
            seen_tail: map.top.tail.load(Acquire),
            map,
            member,
            key,
        })
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn claim(&self) -> &AtomicU64 {
        &self.claim
    }

    #[inline(always)]
    fn answer(&self, slot: usize) -> Slot<'_, RESPONSE_PAYLOAD_AT> {
        self.map.response(self.key.index() as usize, slot)
    }

    /// A place in the ring, to be filled by [`Line::publish`] at once: everybody else's requests queue behind it.
    #[inline(always)]
    pub(super) fn reserve(&mut self) -> Option<u64> {
        let top = &self.map.top;
        let depth = u64::from(self.map.shape.ring_depth);
        let seen_tail = &mut self.seen_tail;
        let has_room = |position: u64| {
            reservation::has_room(position, *seen_tail, depth) || {
                // Acquire, partner: the Release store in `Core::publish_tail`. The slot has been read.
                *seen_tail = top.tail.load(Acquire);
                reservation::has_room(position, *seen_tail, depth)
            }
        };
        reservation::reserve(&top.head, &top.mode, &*self.claim, has_room)
    }

    /// Fills a reserved place and lets the server see it.
    #[inline(always)]
    pub(super) fn publish(&self, position: u64, begun: Begun, bytes: &[u8]) {
        let slot = self.map.request(position);
        let response = ResponseKey::new(begun.slot, begun.call);
        slot.second_word().store(response.word(bytes.len()), Relaxed);
        slot.put(bytes);
        // Release, partner: the Acquire load in `Core::look`. The request is visible with it.
        slot.word().store(commit_word(position, self.key), Release);
        reservation::settle(&*self.claim);
        // With others, it is as likely theirs.
        if self.map.top.mode.load(Relaxed) == reservation::SOLE {
            prefetch::for_write(self.map.request(position.wrapping_add(REQUESTS_AHEAD)).word());
        }
        self.map.top.bell.ring();
    }

    /// The length of the answer to this call, if it is there. As the server wrote it, or whoever else can.
    #[inline(always)]
    fn answered(&self, slot: usize, call: CallNumber) -> Option<usize> {
        // Acquire, partner: the Release store in `Core::reply`. The answer is visible with it.
        let word = self.answer(slot).word().load(Acquire);
        let (key, len) = ResponseKey::parse(word);
        (key == ResponseKey::new(slot, call)).then_some(len)
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized, Token> together::sealed::Awaited
    for Client<Req, Resp, Token>
{
    fn bell(&self) -> &Bell {
        &self.line.bell
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

impl<Req: Message + ?Sized, Resp: Message + ?Sized, Token> fmt::Debug for Client<Req, Resp, Token> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut client = f.debug_struct("Client");
        client.field("server", &self.name).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}
