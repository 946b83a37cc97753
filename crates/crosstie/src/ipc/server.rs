//! The side that answers.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;
use crosstie_protocol::lane::CallNumber;

use super::admission::ClientRegistry;
use super::lane::{Lane, MAGIC, ServerPage, Shape, VERSION, length};
use super::{Config, CreateError, KIND, MAX_CLIENTS, MAX_QUEUE_DEPTH, ReplyError};
use crate::local::listener::{ClientId, Listener};
use crate::local_rpc::hello::{self, Hello};
use crate::memory::prefetch;
use crate::message::Message;
use crate::ring::{fence, lane};
use crate::wait;

/// Pauses of the processor after the last request of a burst: until then the next one cannot have been written, and
/// looking for it would only take its line away from the client.
const CATCH_UP_PAUSES: u32 = 4;
/// Requests that [`Server::poll_ahead`] takes at a time, at most, if they are no longer than a line.
const AHEAD: usize = 8;
const LINE: usize = 64;
/// An idle client is looked at every so many rounds at least, see [`Server::poll_with_skip`].
const MAX_SKIP: u32 = 32;

type ClientKey = Key<12>;

/// Answers the calls of many clients. See the [module](super).
pub struct Server<Req: Message + ?Sized, Resp: Message + ?Sized> {
    core: Core,
    inbox: Req::Inbox,
    /// Requests that were taken ahead: those from `given` to `taken` are yet to be handed out.
    ahead: Box<[Ahead<Req::Inbox>]>,
    given: usize,
    taken: usize,
    messages: PhantomData<fn(&Req) -> Resp::Inbox>,
}

/// A request that was taken, and is yet to be handed out.
struct Ahead<Inbox> {
    inbox: Inbox,
    index: u32,
    client: ClientKey,
    slot: u32,
    call: CallNumber,
    len: usize,
}

/// What does not depend on the messages' types.
struct Core {
    // Dropped before anything else: no more guests.
    listener: Listener,
    registry: Arc<ClientRegistry>,
    seen_version: u32,
    /// Tells this server's tickets from those of others.
    nonce: u32,
    queue_depth: u32,
    response_limit: usize,
    wait_strategy: crate::WaitStrategy,
    clients: Vec<Entry>,
    /// Indices of the clients that are there.
    present: Vec<u32>,
    /// Indices of those that had a request when last looked at, and which of them is served.
    ready: Vec<u32>,
    turn: usize,
    /// Requests that may still be taken from that one before it is another's turn.
    left_in_turn: u32,
    round: u32,
    /// Of the present: whom the last look ahead ended with.
    first: usize,
    had_some: bool,
    counters: Counters,
}

struct Entry {
    key: ClientKey,
    client: Option<Connected>,
}

impl Entry {
    #[inline]
    fn is(&self, client: ClientKey) -> bool {
        self.key == client && self.client.is_some()
    }
}

struct Connected {
    id: ClientId,
    lane: Lane,
    cursor: lane::Cursor,
    unanswered: u32,
    /// Looked at in every round that is a multiple of this power of two.
    skip: u32,
}

/// What a server has seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Requests handed out.
    pub requests: u64,
    /// Clients that came.
    pub connects: u64,
    /// Clients that left, died or were cut off.
    pub disconnects: u64,
    /// Clients that were cut off because they broke the rules.
    pub violations: u64,
}

/// The right to answer one request, at any later time. Answer with [`Server::reply`].
///
/// A ticket that is dropped leaves its call unanswered until the client or the server ends.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the client waits for an answer"]
pub struct Ticket {
    nonce: u32,
    client: ClientKey,
    slot: u32,
    call: CallNumber,
}

impl Ticket {
    /// Which client asked. No two clients of a server at the same time have the same.
    pub fn client(&self) -> u32 {
        self.client.bits()
    }
}

/// A request, to be answered now or [later](Request::defer).
#[must_use = "the client waits for an answer"]
pub struct Request<'s, Req: Message + ?Sized, Resp: Message + ?Sized> {
    message: &'s Req,
    client: &'s mut Connected,
    ticket: Ticket,
    response_limit: usize,
    answer: PhantomData<fn(&Resp)>,
}

impl<'s, Req: Message + ?Sized, Resp: Message + ?Sized> Request<'s, Req, Resp> {
    /// What the client wrote, copied and checked.
    #[inline]
    pub fn message(&self) -> &'s Req {
        self.message
    }

    /// Which client asked, see [`Ticket::client`].
    #[inline]
    pub fn client(&self) -> u32 {
        self.ticket.client()
    }

    /// Answers.
    #[inline]
    pub fn reply(self, answer: &Resp) -> Result<(), ReplyError<Ticket>> {
        self.client.reply(self.ticket, answer.bytes(), self.response_limit)
    }

    /// Keeps the right to answer, so that other requests can be received before.
    #[inline]
    pub fn defer(self) -> Ticket {
        self.ticket
    }
}

impl<Req: Message + ?Sized> Request<'_, Req, [u8]> {
    /// As [`reply`](Request::reply), with an answer whose bytes are in several places: one after the other they are the answer.
    #[inline]
    pub fn reply_parts(self, parts: &[&[u8]]) -> Result<(), ReplyError<Ticket>> {
        let (ticket, len, limit) = (self.ticket, length(parts), self.response_limit);
        if len > limit {
            return Err(ReplyError::TooLong { ticket, len, limit });
        }
        self.client.lane.slot(ticket.slot as usize).put_parts(parts);
        self.client.answered(ticket, len);
        Ok(())
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized> Server<Req, Resp> {
    /// Creates the server of that name. A live one of the same user must not exist.
    pub fn create(name: &str, config: &Config) -> Result<Server<Req, Resp>, CreateError> {
        CreateError::check("max_clients", config.max_clients, MAX_CLIENTS)?;
        CreateError::check("queue_depth", config.queue_depth, MAX_QUEUE_DEPTH)?;
        hello::check_message_limits::<Req, Resp>(config.request_limit, config.response_limit)?;
        fence::register()?;
        let shape = Shape::new(config, Req::SIZE, Resp::SIZE);
        let greeting = Hello::new::<Req, Resp>(MAGIC, VERSION);
        let registry =
            Arc::new(ClientRegistry::new(ServerPage::create()?, shape, greeting, config.max_clients));
        static NONCE: AtomicU32 = AtomicU32::new(1);
        let core = Core {
            listener: hello::listen(KIND, name, registry.clone())?,
            registry,
            seen_version: 0,
            nonce: NONCE.fetch_add(1, Relaxed),
            queue_depth: shape.queue_depth,
            response_limit: shape.response_limit as usize,
            wait_strategy: config.wait_strategy,
            clients: Vec::new(),
            present: Vec::new(),
            ready: Vec::new(),
            turn: 0,
            left_in_turn: 0,
            round: 0,
            first: 0,
            had_some: false,
            counters: Counters::default(),
        };
        let limit = shape.request_limit as usize;
        let ahead = || Ahead {
            inbox: Req::inbox(limit),
            index: 0,
            client: ClientKey::first(0),
            slot: 0,
            call: CallNumber::FIRST,
            len: 0,
        };
        let count = if limit <= LINE { AHEAD } else { 1 };
        Ok(Server {
            core,
            inbox: Req::inbox(limit),
            ahead: core::iter::repeat_with(ahead).take(count).collect(),
            given: 0,
            taken: 0,
            messages: PhantomData,
        })
    }

    /// Looks at every client; says how many have a request. [`recv`](Server::recv) hands those out.
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.core.poll(|_, _| true)
    }

    /// As [`poll`](Server::poll), but leaves clients that have been idle alone for a while: the longer they were, the more
    /// rounds, up to 32. For servers with many clients of which few are busy.
    #[inline]
    pub fn poll_with_skip(&mut self) -> usize {
        self.core.poll(|client, round| round & (client.skip - 1) == 0)
    }

    /// As [`poll`](Server::poll), for servers that answer at once but look something up first, in memory that is not in the
    /// cache. Takes requests of all clients, asks `needs` where each one's answer is, and has that memory fetched;
    /// [`recv`](Server::recv) then hands them out. So they wait for memory together, not one after the other. Says how many there are.
    #[inline]
    pub fn poll_ahead<'m, M: 'm>(&mut self, mut needs: impl FnMut(&Req) -> Option<&'m M>) -> usize {
        if self.given < self.taken {
            return self.taken - self.given;
        }
        let core = &mut self.core;
        core.begin_round();
        let mut taken = 0;
        for _ in 0..core.present.len() {
            // Clients left over by a full round come first in the next one.
            core.first = if core.first + 1 < core.present.len() { core.first + 1 } else { 0 };
            let index = core.present[core.first];
            let Entry { key, client: Some(client) } = &mut core.clients[index as usize] else { continue };
            let mut nonsense = false;
            while let Some(place) = self.ahead.get_mut(taken) {
                match client.take::<Req>(&mut place.inbox, core.queue_depth) {
                    Ok(Some((slot, call, len))) => {
                        (place.index, place.client) = (index, *key);
                        (place.slot, place.call, place.len) = (slot, call, len);
                        if let Some(needed) = Req::received(&place.inbox, len).and_then(&mut needs) {
                            prefetch::for_read(needed);
                        }
                        taken += 1;
                    }
                    Ok(None) => break,
                    Err(Nonsense) => {
                        nonsense = true;
                        break;
                    }
                }
            }
            if nonsense {
                core.cut_off(index);
                break;
            }
            if taken == self.ahead.len() {
                break;
            }
        }
        core.counters.requests += taken as u64;
        core.end_round(taken > 0);
        (self.given, self.taken) = (0, taken);
        taken
    }

    /// The next request of those that [`poll`](Server::poll) found and, as long as they keep coming, of the same clients.
    /// None when a new look is due.
    #[inline]
    pub fn recv(&mut self) -> Option<Request<'_, Req, Resp>> {
        while self.given < self.taken {
            let given = self.given;
            self.given += 1;
            let Ahead { index, client, slot, call, .. } = self.ahead[given];
            // One that was cut off in between is owed no answer.
            if self.core.clients[index as usize].is(client) {
                let ahead = &self.ahead[given];
                return Some(Request {
                    message: Req::received(&ahead.inbox, ahead.len)?,
                    client: self.core.clients[index as usize].client.as_mut()?,
                    ticket: Ticket { nonce: self.core.nonce, client, slot, call },
                    response_limit: self.core.response_limit,
                    answer: PhantomData,
                });
            }
        }
        let (index, slot, call, len) = loop {
            let core = &mut self.core;
            let &index = core.ready.get(core.turn)?;
            let taken = match &mut core.clients[index as usize].client {
                Some(client) => client.take::<Req>(&mut self.inbox, core.queue_depth),
                None => Ok(None),
            };
            match taken {
                Ok(Some((slot, call, len))) => break (index, slot, call, len),
                Ok(None) => core.next_turn(),
                Err(Nonsense) => {
                    core.cut_off(index);
                    core.next_turn();
                }
            }
        };
        let core = &mut self.core;
        core.counters.requests += 1;
        core.left_in_turn -= 1;
        if core.left_in_turn == 0 {
            core.next_turn();
        }
        let Entry { key, client } = &mut core.clients[index as usize];
        Some(Request {
            message: Req::received(&self.inbox, len)?,
            client: client.as_mut()?,
            ticket: Ticket { nonce: core.nonce, client: *key, slot, call },
            response_limit: core.response_limit,
            answer: PhantomData,
        })
    }

    /// Answers a request that was deferred.
    #[inline]
    pub fn reply(&mut self, ticket: Ticket, answer: &Resp) -> Result<(), ReplyError<Ticket>> {
        self.core.reply(ticket, answer.bytes())
    }

    /// Waits until there is a request or a client comes or goes, at most for `timeout`. Says whether something happened:
    /// then [poll](Server::poll).
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let core = &self.core;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        wait::wait_until(core.registry.server_page.parker(), core.wait_strategy, deadline, || {
            core.registry.version() != core.seen_version || core.connected().any(Connected::is_waiting)
        })
    }

    /// Clients that are connected, as of the last [`poll`](Server::poll).
    pub fn clients(&self) -> usize {
        self.core.present.len()
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.core.counters
    }
}

/// A client broke the rules.
struct Nonsense;

impl Connected {
    #[inline]
    fn is_waiting(&self) -> bool {
        lane::requested(self.lane.slot(self.cursor.slot).word(), self.cursor.call).is_some()
    }

    /// Takes the next request out of the lane: its slot, call and length. Believes nothing that the client wrote.
    #[inline]
    fn take<Req: Message + ?Sized>(
        &mut self,
        inbox: &mut Req::Inbox,
        queue_depth: u32,
    ) -> Result<Option<(u32, CallNumber, usize)>, Nonsense> {
        let (number, call) = (self.cursor.slot, self.cursor.call);
        let slot = self.lane.slot(number);
        let Some(request) = lane::requested(slot.word(), call) else { return Ok(None) };
        if self.unanswered == queue_depth
            || !Req::receive(inbox, request.len, |place| slot.get(place))
            || !self.cursor.advance(request.next, self.lane.slots())
        {
            return Err(Nonsense);
        }
        self.unanswered += 1;
        Ok(Some((number as u32, call, request.len)))
    }

    #[inline]
    fn reply(&mut self, ticket: Ticket, answer: &[u8], limit: usize) -> Result<(), ReplyError<Ticket>> {
        if answer.len() > limit {
            return Err(ReplyError::TooLong { ticket, len: answer.len(), limit });
        }
        self.lane.slot(ticket.slot as usize).put(answer);
        self.answered(ticket, answer.len());
        Ok(())
    }

    /// The answer is in its slot.
    #[inline(always)]
    fn answered(&mut self, ticket: Ticket, len: usize) {
        lane::answer(self.lane.slot(ticket.slot as usize).word(), ticket.call, len);
        self.unanswered -= 1;
        self.lane.parker().notify();
    }
}

impl Core {
    fn connected(&self) -> impl Iterator<Item = &Connected> {
        self.present.iter().filter_map(|index| self.clients[*index as usize].client.as_ref())
    }

    #[inline]
    fn poll(&mut self, mut looked_at: impl FnMut(&Connected, u32) -> bool) -> usize {
        self.begin_round();
        self.left_in_turn = self.queue_depth;
        self.round = self.round.wrapping_add(1);
        for index in &self.present {
            let Some(client) = &mut self.clients[*index as usize].client else { continue };
            if !looked_at(client, self.round) {
                continue;
            }
            if client.is_waiting() {
                client.skip = 1;
                self.ready.push(*index);
            } else {
                client.skip = (client.skip * 2).min(MAX_SKIP);
            }
        }
        self.end_round(!self.ready.is_empty());
        self.ready.len()
    }

    #[inline]
    fn begin_round(&mut self) {
        if self.registry.version() != self.seen_version {
            self.learn();
        }
        self.ready.clear();
        self.turn = 0;
    }

    #[inline]
    fn end_round(&mut self, found: bool) {
        if !found && core::mem::take(&mut self.had_some) {
            for _ in 0..CATCH_UP_PAUSES {
                core::hint::spin_loop();
            }
        }
        self.had_some |= found;
    }

    #[inline]
    fn next_turn(&mut self) {
        self.turn += 1;
        self.left_in_turn = self.queue_depth;
    }

    #[inline]
    fn reply(&mut self, ticket: Ticket, answer: &[u8]) -> Result<(), ReplyError<Ticket>> {
        if ticket.nonce != self.nonce {
            return Err(ReplyError::WrongServer(ticket));
        }
        let Entry { key, client } = &mut self.clients[ticket.client.index() as usize];
        match client {
            Some(client) if *key == ticket.client => client.reply(ticket, answer, self.response_limit),
            _ => Err(ReplyError::ClientGone),
        }
    }

    /// Hears who came and went.
    #[cold]
    fn learn(&mut self) {
        self.seen_version = self.registry.version();
        let (arrived, left) = self.registry.take_changes();
        for id in left {
            let index = self.present.iter().copied().find(|index| {
                self.clients[*index as usize].client.as_ref().is_some_and(|client| client.id == id)
            });
            if let Some(index) = index {
                self.remove(index);
            }
        }
        for (id, lane) in arrived {
            let client = Connected { id, lane, cursor: lane::Cursor::START, unanswered: 0, skip: 1 };
            let free = self.clients.iter().position(|entry| entry.client.is_none());
            let index = free.unwrap_or(self.clients.len());
            match self.clients.get_mut(index) {
                Some(entry) => *entry = Entry { key: entry.key.next(), client: Some(client) },
                None => {
                    let key = ClientKey::first(index as u32);
                    self.clients.push(Entry { key, client: Some(client) });
                }
            }
            self.present.push(index as u32);
            self.counters.connects += 1;
        }
        // So that polling never allocates.
        self.ready.clear();
        self.ready.reserve(self.present.len());
    }

    fn remove(&mut self, index: u32) {
        self.clients[index as usize].client = None;
        self.present.retain(|present| *present != index);
        self.counters.disconnects += 1;
    }

    #[cold]
    fn cut_off(&mut self, index: u32) {
        if let Some(client) = &self.clients[index as usize].client {
            self.listener.disconnect(client.id);
            self.counters.violations += 1;
        }
        self.remove(index);
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized> fmt::Debug for Server<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut server = f.debug_struct("Server");
        server
            .field("clients", &self.clients())
            .field("counters", &self.core.counters)
            .finish_non_exhaustive()
    }
}

impl<Req: Message + ?Sized + fmt::Debug, Resp: Message + ?Sized> fmt::Debug for Request<'_, Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("message", &self.message).field("ticket", &self.ticket).finish()
    }
}
