//! The side that asks.

use core::fmt;
use core::marker::PhantomData;
use std::time::{Duration, Instant};

use zerocopy::FromBytes;

use super::lane::{Board, Lane, MAGIC, Shape, Slot, VERSION, length};
use super::{CallError, ConnectError, Disconnected, KIND};
use crate::Waiting;
use crate::message::Message;
use crate::neighbor::bell;
use crate::neighbor::greeting::{self, Greeting};
use crate::neighbor::member::{Member, PATIENCE};
use crate::neighbor::together;
use crate::ring::outstanding::{Begun, Outstanding};
use crate::ring::{fence, lane};

/// Looks at the answer that is due before waiting looks at all of them.
const LOOKS_AT_FIRST: u32 = 64;

/// Answers whose slots are fetched together, if the first of them is there.
const FETCHED: usize = 16;

/// Calls a server. `Token` is whatever the caller wants to have back with each answer. See the [module](super).
pub struct Client<Req: Message + ?Sized, Resp: Message + ?Sized, Token = ()> {
    name: String,
    waiting: Waiting,
    line: Line,
    calls: Outstanding<Token>,
    inbox: Resp::Inbox,
    /// The connection is over; nothing of the lane is believed any more.
    broken: Option<Disconnected>,
    messages: PhantomData<fn(&Req)>,
}

/// The connection.
struct Line {
    lane: Lane,
    board: Board,
    member: Member,
    shape: Shape,
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
            calls: Outstanding::new(line.shape.queue_depth as usize),
            inbox: Resp::inbox(line.shape.response_limit as usize),
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

    /// Begins a call. Never waits.
    #[inline]
    pub fn call(&mut self, request: &Req, token: Token) -> Result<(), CallError<Token>> {
        let bytes = request.bytes();
        let begun = self.admit(bytes.len(), token)?;
        self.line.request(begun, bytes);
        Ok(())
    }

    /// Begins a call of `len` bytes, if that is possible now.
    #[inline(always)]
    fn admit(&mut self, len: usize, token: Token) -> Result<Begun, CallError<Token>> {
        if let Err(cause) = self.alive() {
            return Err(CallError::Disconnected { token, cause });
        }
        let limit = self.line.shape.request_limit as usize;
        if len > limit {
            return Err(CallError::TooLong { token, len, limit });
        }
        if self.calls.is_full() && self.calls.has_quiet() {
            self.reap();
        }
        self.calls.begin(token).map_err(CallError::Full)
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
            let Some(len) = lane::answered(self.line.lane.slot(slot).word(), call) else {
                if self.calls.fruitless() {
                    count += self.search(&mut each)?;
                }
                break;
            };
            if count == 0 && most > 1 {
                self.line.lane.fetch(slot, most.min(FETCHED));
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
        if self.calls.in_flight() > 0 && timeout != Some(Duration::ZERO) {
            let mut looks = 0;
            let (calls, line) = (&self.calls, &self.line);
            let is_there = |(slot, call)| lane::answered(line.lane.slot(slot).word(), call).is_some();
            bell::wait_for(line.lane.bell(), self.waiting, timeout, || {
                looks += 1;
                line.member.gone()
                    || calls.due().is_some_and(is_there)
                    || (looks > LOOKS_AT_FIRST && calls.all().any(is_there))
            });
        }
        let there = self.is_answer_there();
        match there {
            true => self.calls.expect_anywhere(),
            false => self.alive()?,
        }
        Ok(there)
    }

    /// Calls, waits and hands the answer to `read`. Answers to other calls stay where they are.
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
        let limit = self.line.shape.request_limit as usize;
        if bytes.len() > limit {
            return Err(CallError::TooLong { token: (), len: bytes.len(), limit });
        }
        let (begun, left) = match self.calls.begin_quiet() {
            Some(begun) => (begun, timeout),
            None => self.begin_late(timeout)?,
        };
        self.line.request(begun, bytes);
        let line = &self.line;
        let answer = || lane::answered(line.lane.slot(begun.slot).word(), begun.call);
        bell::wait_for(line.lane.bell(), self.waiting, left, || line.member.gone() || answer().is_some());
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

    /// Begins a call for which there is no room because others were given up: when one of them is answered. Says how much time
    /// is left.
    #[cold]
    fn begin_late(&mut self, timeout: Option<Duration>) -> Result<(Begun, Option<Duration>), CallError<()>> {
        if !self.calls.has_quiet() {
            return Err(CallError::Full(()));
        }
        let begun = Instant::now();
        let (calls, line) = (&self.calls, &self.line);
        bell::wait_for(line.lane.bell(), self.waiting, timeout, || {
            let is_there = |(slot, call)| lane::answered(line.lane.slot(slot).word(), call).is_some();
            line.member.gone() || calls.all_quiet().any(is_there)
        });
        self.reap();
        self.alive().map_err(|cause| CallError::Disconnected { token: (), cause })?;
        let after = timeout.unwrap_or(Duration::MAX);
        let call = self.calls.begin_quiet().ok_or(CallError::TimedOut { token: (), after })?;
        Ok((call, timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()))))
    }

    /// Frees what calls that were given up take, if they are answered by now.
    #[cold]
    fn reap(&mut self) {
        let lane = &self.line.lane;
        self.calls.reap(|slot, call| lane::answered(lane.slot(slot).word(), call).is_some());
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

    fn is_answer_there(&self) -> bool {
        self.calls.all().any(|(slot, call)| lane::answered(self.line.lane.slot(slot).word(), call).is_some())
    }

    /// Copies an answer out and checks it.
    #[inline]
    fn accept(&mut self, slot: usize, len: usize) -> Result<&Resp, Disconnected> {
        let slot = self.line.lane.slot(slot);
        if Resp::receive(&mut self.inbox, len, |place| slot.get(place))
            && let Some(answer) = Resp::received(&self.inbox, len)
        {
            return Ok(answer);
        }
        Err(*self.broken.insert(Disconnected::Nonsense))
    }

    #[inline]
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
        let mut count = 0;
        for slot in 0..self.line.lane.slots() {
            let Some(call) = self.calls.call(slot) else { continue };
            if let Some(len) = lane::answered(self.line.lane.slot(slot).word(), call) {
                self.deliver(slot, len, each)?;
                count += 1;
            }
        }
        if count > 0 {
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

    /// All that is shared with the server.
    #[cfg(all(test, not(loom)))]
    pub(super) fn segments(&self) -> [&crate::memory::segment::Segment; 2] {
        [self.line.lane.segment(), self.line.board.segment()]
    }
}

impl<Resp: Message + ?Sized, Token> Client<[u8], Resp, Token> {
    /// As [`call`](Client::call), with a request whose bytes are in several places: one after the other they are the request.
    #[inline]
    pub fn call_parts(&mut self, parts: &[&[u8]], token: Token) -> Result<(), CallError<Token>> {
        let len = length(parts);
        let begun = self.admit(len, token)?;
        let slot = self.line.lane.slot(begun.slot);
        slot.put_parts(parts);
        self.line.announce(slot, begun, len);
        Ok(())
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
        let shape = Shape::read_from_bytes(&reply).map_err(|_| nonsense())?;
        let fits = |size: Option<usize>, limit: u32| size.is_none_or(|size| size == limit as usize);
        let Ok([lane, board]) = <[_; 2]>::try_from(files) else { return Err(nonsense()) };
        let lane = Lane::open(lane, &shape)?.ok_or_else(nonsense)?;
        if !fits(Req::SIZE, shape.request_limit) || !fits(Resp::SIZE, shape.response_limit) {
            return Err(nonsense());
        }
        member.ring_when_gone(lane.bell().clone());
        Ok(Line { lane, board: Board::open(board)?, member, shape })
    }

    #[inline(always)]
    fn request(&self, begun: Begun, bytes: &[u8]) {
        let slot = self.lane.slot(begun.slot);
        slot.put(bytes);
        self.announce(slot, begun, bytes.len());
    }

    #[inline(always)]
    fn announce(&self, slot: Slot<'_>, begun: Begun, len: usize) {
        lane::request(slot.word(), begun, len);
        self.board.bell().ring();
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized, Token> together::sealed::Awaited
    for Client<Req, Resp, Token>
{
    fn bell(&self) -> &bell::Bell {
        self.line.lane.bell()
    }

    fn has_calls(&self) -> bool {
        self.calls.in_flight() > 0
    }

    fn has_news(&self, everywhere: bool) -> bool {
        let is_there = |(slot, call)| lane::answered(self.line.lane.slot(slot).word(), call).is_some();
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
