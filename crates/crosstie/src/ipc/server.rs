//! The server: it polls the lanes of all clients, hands out requests, and replies.
//!
//! The caller sees `poll`, then `recv` until it returns None. `poll` finds the clients that have a request; `recv` takes
//! their requests, client by client, up to `queue_depth` requests of one client in a row.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;
use crosstie_protocol::lane::CallNumber;

use super::admission::ClientRegistry;
use super::lane::{Lane, LaneLayout, MAGIC, ServerPage, VERSION, parts_len};
use super::{Config, CreateError, KIND, MAX_CLIENTS, MAX_QUEUE_DEPTH, ReplyError};
use crate::local::listener::{ClientId, Listener};
use crate::local_rpc::hello::{self, Hello};
use crate::memory::prefetch;
use crate::message::Message;
use crate::ring::{fence, lane};
use crate::wait;

/// Pauses of the processor after the last request of a burst. The client cannot have written the next request yet, and
/// checking for it at once would only take the cache line away from the client.
const PAUSES_AFTER_BURST: u32 = 4;
/// Most requests that [`Server::poll_with_prefetch`] takes at a time, if a request fits into a cache line.
const MAX_TAKEN: usize = 8;
const CACHE_LINE: usize = 64;
/// [`Server::poll_with_skip`] checks an idle client at least every so many rounds.
const MAX_SKIP: u32 = 32;

type ClientKey = Key<12>;

/// Serves the calls of many clients. See the [module](super).
pub struct Server<Req: Message + ?Sized, Resp: Message + ?Sized> {
    core: Core,
    /// The last request, copied out of shared memory.
    inbox: Req::Inbox,
    /// Requests that [`Server::poll_with_prefetch`] took. Those from `next_taken` to `taken_count` are yet to be handed out.
    taken: Box<[TakenRequest<Req::Inbox>]>,
    next_taken: usize,
    taken_count: usize,
    messages: PhantomData<fn(&Req) -> Resp::Inbox>,
}

/// A request that was taken out of a lane, and is yet to be handed out.
struct TakenRequest<Inbox> {
    inbox: Inbox,
    index: u32,
    client: ClientKey,
    slot: u32,
    call: CallNumber,
    len: usize,
}

/// The part of a server that does not depend on the message types.
struct Core {
    // Dropped first: afterwards the watcher thread admits no more clients.
    listener: Listener,
    registry: Arc<ClientRegistry>,
    /// The version of the registry whose changes have been applied.
    seen_version: u32,
    /// Distinguishes the tickets of this server from those of others.
    nonce: u32,
    queue_depth: u32,
    response_limit: usize,
    wait_strategy: crate::WaitStrategy,
    clients: Vec<ClientEntry>,
    /// Indices of the connected clients.
    connected: Vec<u32>,
    /// Indices of the clients that had a request in the last poll.
    ready: Vec<u32>,
    /// The position in `ready` of the client that is being served.
    turn: usize,
    /// Requests that may still be taken from that client before the next client is served.
    left_in_turn: u32,
    round: u32,
    /// The position in `connected` of the client that the last `poll_with_prefetch` took from last.
    last_taken_from: usize,
    /// Whether requests were found since the last pause.
    found_requests: bool,
    counters: Counters,
}

struct ClientEntry {
    key: ClientKey,
    /// None if the index is free.
    client: Option<ConnectedClient>,
}

impl ClientEntry {
    #[inline]
    fn is(&self, client: ClientKey) -> bool {
        self.key == client && self.client.is_some()
    }
}

struct ConnectedClient {
    id: ClientId,
    lane: Lane,
    cursor: lane::Cursor,
    /// Requests that were taken and not replied to.
    unanswered: u32,
    /// `poll_with_skip` checks the client in every round that is a multiple of this power of two.
    skip: u32,
}

/// What a server has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Requests handed out.
    pub requests: u64,
    /// Clients that connected.
    pub connects: u64,
    /// Clients that disconnected, ended, or were disconnected.
    pub disconnects: u64,
    /// Clients that were disconnected because they broke the protocol.
    pub violations: u64,
}

/// The right to reply to one request, at any later time, with [`Server::reply`].
///
/// If a ticket is dropped, its call stays in flight until the client or the server ends.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the client waits for a response"]
pub struct Ticket {
    nonce: u32,
    client: ClientKey,
    slot: u32,
    call: CallNumber,
}

impl Ticket {
    /// Identifies the client that sent the request. No two clients of a server have the same number at the same time.
    pub fn client(&self) -> u32 {
        self.client.bits()
    }
}

/// A request. Reply to it now, or [later](Request::defer).
#[must_use = "the client waits for a response"]
pub struct Request<'s, Req: Message + ?Sized, Resp: Message + ?Sized> {
    message: &'s Req,
    client: &'s mut ConnectedClient,
    ticket: Ticket,
    response_limit: usize,
    response: PhantomData<fn(&Resp)>,
}

impl<'s, Req: Message + ?Sized, Resp: Message + ?Sized> Request<'s, Req, Resp> {
    /// The message, copied out of shared memory and validated.
    #[inline]
    pub fn message(&self) -> &'s Req {
        self.message
    }

    /// The client that sent the request, see [`Ticket::client`].
    #[inline]
    pub fn client(&self) -> u32 {
        self.ticket.client()
    }

    /// Sends the response.
    #[inline]
    pub fn reply(self, response: &Resp) -> Result<(), ReplyError<Ticket>> {
        self.client.reply(self.ticket, response.bytes(), self.response_limit)
    }

    /// Turns the request into a ticket, so that other requests can be received before the reply.
    #[inline]
    pub fn defer(self) -> Ticket {
        self.ticket
    }
}

impl<Req: Message + ?Sized> Request<'_, Req, [u8]> {
    /// As [`reply`](Request::reply), with a response that is given in several parts, which are concatenated.
    #[inline]
    pub fn reply_parts(self, parts: &[&[u8]]) -> Result<(), ReplyError<Ticket>> {
        let (ticket, len, limit) = (self.ticket, parts_len(parts), self.response_limit);
        if len > limit {
            return Err(ReplyError::TooLong { ticket, len, limit });
        }
        self.client.lane.slot(ticket.slot as usize).write_parts(parts);
        self.client.publish_response(ticket, len);
        Ok(())
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized> Server<Req, Resp> {
    /// Creates a server with this name. Fails if a live server of the same user has the name.
    pub fn create(name: &str, config: &Config) -> Result<Server<Req, Resp>, CreateError> {
        CreateError::check("max_clients", config.max_clients, MAX_CLIENTS)?;
        CreateError::check("queue_depth", config.queue_depth, MAX_QUEUE_DEPTH)?;
        hello::check_message_limits::<Req, Resp>(config.request_limit, config.response_limit)?;
        fence::register()?;
        let layout = LaneLayout::new(config, Req::SIZE, Resp::SIZE);
        let hello = Hello::new::<Req, Resp>(MAGIC, VERSION);
        let registry =
            Arc::new(ClientRegistry::new(ServerPage::create()?, layout, hello, config.max_clients));
        static NONCE: AtomicU32 = AtomicU32::new(1);
        let core = Core {
            listener: hello::listen(KIND, name, registry.clone())?,
            registry,
            seen_version: 0,
            nonce: NONCE.fetch_add(1, Relaxed),
            queue_depth: layout.queue_depth,
            response_limit: layout.response_limit as usize,
            wait_strategy: config.wait_strategy,
            clients: Vec::new(),
            connected: Vec::new(),
            ready: Vec::new(),
            turn: 0,
            left_in_turn: 0,
            round: 0,
            last_taken_from: 0,
            found_requests: false,
            counters: Counters::default(),
        };
        let limit = layout.request_limit as usize;
        let unused = || TakenRequest {
            inbox: Req::inbox(limit),
            index: 0,
            client: ClientKey::first(0),
            slot: 0,
            call: CallNumber::FIRST,
            len: 0,
        };
        let count = if limit <= CACHE_LINE { MAX_TAKEN } else { 1 };
        Ok(Server {
            core,
            inbox: Req::inbox(limit),
            taken: core::iter::repeat_with(unused).take(count).collect(),
            next_taken: 0,
            taken_count: 0,
            messages: PhantomData,
        })
    }

    /// Checks the lanes of all clients, and returns how many clients have a request. [`recv`](Server::recv) then hands out
    /// their requests.
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.poll_clients(|_, _| true)
    }

    /// As [`poll`](Server::poll), but checks clients that have been idle less often: the longer a client was idle, the
    /// more rounds it is skipped, up to 32. For servers with many clients of which few are busy.
    #[inline]
    pub fn poll_with_skip(&mut self) -> usize {
        self.poll_clients(|client, round| round & (client.skip - 1) == 0)
    }

    /// Finds no more requests while [`recv`](Server::recv) has some to hand out that an earlier
    /// [`poll_with_prefetch`](Server::poll_with_prefetch) took: the requests of a client keep their order.
    #[inline(always)]
    fn poll_clients(&mut self, should_check: impl FnMut(&ConnectedClient, u32) -> bool) -> usize {
        match self.taken_count - self.next_taken {
            0 => self.core.poll(should_check),
            taken => {
                self.core.begin_round();
                taken
            }
        }
    }

    /// As [`poll`](Server::poll), for servers whose replies need memory that is not in the cache. Takes up to 8 requests of
    /// all clients, calls `needs` for the memory that the reply to each of them needs, and prefetches it;
    /// [`recv`](Server::recv) then hands the requests out. So the cache misses of several requests overlap. Returns the
    /// number of requests.
    #[inline]
    pub fn poll_with_prefetch<'m, M: 'm>(&mut self, mut needs: impl FnMut(&Req) -> Option<&'m M>) -> usize {
        if self.next_taken < self.taken_count {
            return self.taken_count - self.next_taken;
        }
        let core = &mut self.core;
        core.begin_round();
        let mut count = 0;
        for _ in 0..core.connected.len() {
            // Clients that a full round did not reach come first in the next round.
            core.last_taken_from =
                if core.last_taken_from + 1 < core.connected.len() { core.last_taken_from + 1 } else { 0 };
            let index = core.connected[core.last_taken_from];
            let ClientEntry { key, client: Some(client) } = &mut core.clients[index as usize] else {
                continue;
            };
            let mut violation = false;
            while let Some(taken) = self.taken.get_mut(count) {
                match client.take::<Req>(&mut taken.inbox, core.queue_depth) {
                    Ok(Some((slot, call, len))) => {
                        (taken.index, taken.client) = (index, *key);
                        (taken.slot, taken.call, taken.len) = (slot, call, len);
                        if let Some(needed) = Req::received(&taken.inbox, len).and_then(&mut needs) {
                            prefetch::for_read(needed);
                        }
                        count += 1;
                    }
                    Ok(None) => break,
                    Err(Violation) => {
                        violation = true;
                        break;
                    }
                }
            }
            if violation {
                core.disconnect_violator(index);
                break;
            }
            if count == self.taken.len() {
                break;
            }
        }
        core.counters.requests += count as u64;
        core.end_round(count > 0);
        (self.next_taken, self.taken_count) = (0, count);
        count
    }

    /// Returns the next request of the clients that [`poll`](Server::poll) found; this includes requests that these clients
    /// have written since. None when it is time to poll again.
    // Inlined: of a request that is answered in place, most of what this returns is never stored.
    #[inline(always)]
    pub fn recv(&mut self) -> Option<Request<'_, Req, Resp>> {
        let (index, slot, call, len) = loop {
            let core = &mut self.core;
            let Some(&index) = core.ready.get(core.turn) else { return self.recv_taken() };
            let taken = match &mut core.clients[index as usize].client {
                Some(client) => client.take::<Req>(&mut self.inbox, core.queue_depth),
                None => Ok(None),
            };
            match taken {
                Ok(Some((slot, call, len))) => break (index, slot, call, len),
                Ok(None) => core.next_turn(),
                Err(Violation) => {
                    core.disconnect_violator(index);
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
        let ClientEntry { key, client } = &mut core.clients[index as usize];
        Some(Request {
            message: Req::received(&self.inbox, len)?,
            client: client.as_mut()?,
            ticket: Ticket { nonce: core.nonce, client: *key, slot, call },
            response_limit: core.response_limit,
            response: PhantomData,
        })
    }

    /// The next request that [`poll_with_prefetch`](Server::poll_with_prefetch) took. That poll leaves no client to be served.
    #[inline(always)]
    fn recv_taken(&mut self) -> Option<Request<'_, Req, Resp>> {
        let next = self.next_taken()?;
        let TakenRequest { index, client, slot, call, .. } = self.taken[next];
        let taken = &self.taken[next];
        Some(Request {
            message: Req::received(&taken.inbox, taken.len)?,
            client: self.core.clients[index as usize].client.as_mut()?,
            ticket: Ticket { nonce: self.core.nonce, client, slot, call },
            response_limit: self.core.response_limit,
            response: PhantomData,
        })
    }

    /// The next request that `poll_with_prefetch` took, of a client that has not been disconnected meanwhile.
    #[inline(always)]
    fn next_taken(&mut self) -> Option<usize> {
        while self.next_taken < self.taken_count {
            let next = self.next_taken;
            self.next_taken += 1;
            let TakenRequest { index, client, .. } = self.taken[next];
            if self.core.clients[index as usize].is(client) {
                return Some(next);
            }
        }
        None
    }

    /// Replies to a request that was deferred.
    #[inline]
    pub fn reply(&mut self, ticket: Ticket, response: &Resp) -> Result<(), ReplyError<Ticket>> {
        self.core.reply(ticket, response.bytes())
    }

    /// Waits until there is a request, or a client connects or disconnects, for at most `timeout`. Returns whether one of
    /// these happened; then [poll](Server::poll).
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let core = &self.core;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        wait::wait_until(core.registry.server_page.parker(), core.wait_strategy, deadline, || core.is_ready())
    }

    /// The number of connected clients, as of the last [`poll`](Server::poll).
    pub fn clients(&self) -> usize {
        self.core.connected.len()
    }

    /// What the server has counted so far.
    pub fn counters(&self) -> Counters {
        self.core.counters
    }
}

/// A client broke the protocol.
struct Violation;

impl ConnectedClient {
    #[inline]
    fn has_request(&self) -> bool {
        lane::parse_request(self.lane.slot(self.cursor.slot).word(), self.cursor.call).is_some()
    }

    /// Takes the next request out of the lane. Returns its slot, call number and length. Trusts nothing that the client
    /// wrote.
    #[inline(always)]
    fn take<Req: Message + ?Sized>(
        &mut self,
        inbox: &mut Req::Inbox,
        queue_depth: u32,
    ) -> Result<Option<(u32, CallNumber, usize)>, Violation> {
        let (number, call) = (self.cursor.slot, self.cursor.call);
        let slot = self.lane.slot(number);
        let Some(request) = lane::parse_request(slot.word(), call) else { return Ok(None) };
        if self.unanswered == queue_depth
            || !Req::receive(inbox, request.len, |buffer| slot.read(buffer))
            || !self.cursor.advance(request.next, self.lane.slots())
        {
            return Err(Violation);
        }
        self.unanswered += 1;
        Ok(Some((number as u32, call, request.len)))
    }

    #[inline]
    fn reply(&mut self, ticket: Ticket, response: &[u8], limit: usize) -> Result<(), ReplyError<Ticket>> {
        if response.len() > limit {
            return Err(ReplyError::TooLong { ticket, len: response.len(), limit });
        }
        self.lane.slot(ticket.slot as usize).write(response);
        self.publish_response(ticket, response.len());
        Ok(())
    }

    /// Makes the response visible that was written into the slot.
    #[inline(always)]
    fn publish_response(&mut self, ticket: Ticket, len: usize) {
        lane::publish_response(self.lane.slot(ticket.slot as usize).word(), ticket.call, len);
        self.lane.demote(ticket.slot as usize);
        self.unanswered -= 1;
        self.lane.parker().notify();
    }
}

impl Core {
    /// Whether there is a request, or a client has connected or disconnected.
    fn is_ready(&self) -> bool {
        self.registry.version() != self.seen_version
            || self.connected_clients().any(ConnectedClient::has_request)
    }

    fn connected_clients(&self) -> impl Iterator<Item = &ConnectedClient> {
        self.connected.iter().filter_map(|index| self.clients[*index as usize].client.as_ref())
    }

    #[inline]
    fn poll(&mut self, mut should_check: impl FnMut(&ConnectedClient, u32) -> bool) -> usize {
        self.begin_round();
        self.left_in_turn = self.queue_depth;
        self.round = self.round.wrapping_add(1);
        for index in &self.connected {
            let Some(client) = &mut self.clients[*index as usize].client else { continue };
            if !should_check(client, self.round) {
                continue;
            }
            if client.has_request() {
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
            self.apply_client_changes();
        }
        self.ready.clear();
        self.turn = 0;
    }

    #[inline]
    fn end_round(&mut self, found: bool) {
        if !found && core::mem::take(&mut self.found_requests) {
            for _ in 0..PAUSES_AFTER_BURST {
                core::hint::spin_loop();
            }
        }
        self.found_requests |= found;
    }

    #[inline]
    fn next_turn(&mut self) {
        self.turn += 1;
        self.left_in_turn = self.queue_depth;
    }

    #[inline]
    fn reply(&mut self, ticket: Ticket, response: &[u8]) -> Result<(), ReplyError<Ticket>> {
        if ticket.nonce != self.nonce {
            return Err(ReplyError::WrongServer(ticket));
        }
        let ClientEntry { key, client } = &mut self.clients[ticket.client.index() as usize];
        match client {
            Some(client) if *key == ticket.client => client.reply(ticket, response, self.response_limit),
            _ => Err(ReplyError::ClientGone),
        }
    }

    /// Adds and removes the clients that the watcher thread has admitted and removed.
    #[cold]
    fn apply_client_changes(&mut self) {
        self.seen_version = self.registry.version();
        let (connected, disconnected) = self.registry.take_changes();
        for id in disconnected {
            let index = self.connected.iter().copied().find(|index| {
                self.clients[*index as usize].client.as_ref().is_some_and(|client| client.id == id)
            });
            if let Some(index) = index {
                self.remove(index);
            }
        }
        for (id, lane) in connected {
            let client = ConnectedClient { id, lane, cursor: lane::Cursor::START, unanswered: 0, skip: 1 };
            let free = self.clients.iter().position(|entry| entry.client.is_none());
            let index = free.unwrap_or(self.clients.len());
            match self.clients.get_mut(index) {
                Some(entry) => *entry = ClientEntry { key: entry.key.next(), client: Some(client) },
                None => {
                    let key = ClientKey::first(index as u32);
                    self.clients.push(ClientEntry { key, client: Some(client) });
                }
            }
            self.connected.push(index as u32);
            self.counters.connects += 1;
        }
        // Reserve here, so that polling never allocates.
        self.ready.clear();
        self.ready.reserve(self.connected.len());
    }

    fn remove(&mut self, index: u32) {
        self.clients[index as usize].client = None;
        self.connected.retain(|connected| *connected != index);
        self.counters.disconnects += 1;
    }

    #[cold]
    fn disconnect_violator(&mut self, index: u32) {
        if let Some(client) = &self.clients[index as usize].client {
            self.listener.disconnect(client.id);
            self.counters.violations += 1;
        }
        self.remove(index);
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized> wait::any::sealed::Waitable for Server<Req, Resp> {
    fn parker(&self) -> Option<&wait::Parker> {
        Some(self.core.registry.server_page.parker())
    }

    fn is_expecting(&self) -> bool {
        true
    }

    fn is_ready(&self, _: bool) -> bool {
        self.next_taken < self.taken_count || self.core.is_ready()
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
