//! The server: it polls the lanes of all clients, hands out requests, and replies.
//!
//! `poll` finds the clients that have a request; `recv` takes their requests, client by client, up to `queue_depth` requests of one
//! client in a row. `serve` is one `poll`, and `recv` until it returns None.

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;
use crosstie_protocol::lane::CallNumber;

use super::admission::ClientRegistry;
use super::lane::{LaneLayout, MAGIC, ServedLane, ServerPage, Slot, VERSION, parts_len};
use super::{Config, CreateError, KIND, MAX_CLIENTS, MAX_QUEUE_DEPTH, NotReplied, ReplyError};
use crate::local::listener::{ClientId, Listener};
use crate::local_rpc::hello::{self, Hello};
use crate::memory::prefetch;
use crate::message::Message;
use crate::ring::fence;
use crate::ring::lane::{self, Next};
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
    /// The position in `ready` of the client that is served next.
    turn: usize,
    /// The index of the client that is being served, or [`NOBODY`].
    serving: usize,
    /// Requests that may still be taken from that client before the next client is served.
    left_in_turn: u32,
    round: u32,
    /// The position in `connected` of the client that the last `poll_with_prefetch` took from last.
    last_taken_from: usize,
    /// Whether requests were found since the last pause.
    found_requests: bool,
    counters: Counters,
}

/// Is the index of no client.
const NOBODY: usize = usize::MAX;

// Aligned so that an index is shifted, not multiplied.
#[repr(align(128))]
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
    lane: ServedLane,
    /// Requests that may be kept before one of them is replied to: [deferred](Request::defer), or taken by
    /// [`Server::poll_with_prefetch`]. Less than zero if the client sent more. One that is answered where it is received does not count.
    room: i32,
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
    slot: Slot<'s>,
    /// That of the client.
    room: &'s mut i32,
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
        let bytes = response.bytes();
        // Messages of fixed size replace the limit.
        if Resp::SIZE.is_none() && bytes.len() > self.response_limit {
            return Err(self.too_long(bytes.len()));
        }
        self.slot.write(bytes);
        publish_response(self.slot, self.ticket.call, bytes.len());
        Ok(())
    }

    #[cold]
    fn too_long(self, len: usize) -> ReplyError<Ticket> {
        let limit = self.response_limit;
        ReplyError::too_long(self.defer(), len, limit)
    }

    /// Turns the request into a ticket, so that other requests can be received before the reply.
    #[inline]
    pub fn defer(self) -> Ticket {
        *self.room -= 1;
        self.ticket
    }
}

impl<Req: Message + ?Sized> Request<'_, Req, [u8]> {
    /// As [`reply`](Request::reply), with a response that is given in several parts, which are concatenated.
    #[inline]
    pub fn reply_parts(self, parts: &[&[u8]]) -> Result<(), ReplyError<Ticket>> {
        let len = parts_len(parts);
        if len > self.response_limit {
            return Err(self.too_long(len));
        }
        self.slot.write_parts(parts);
        publish_response(self.slot, self.ticket.call, len);
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
            serving: NOBODY,
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

    /// Checks the lanes of all clients once, and hands the requests that are there to `handle`. Returns their number. Never waits.
    ///
    /// It takes up to [`queue_depth`](Config::queue_depth) requests of each client that has any, in the order of its calls, and then
    /// returns, however fast the clients send more.
    ///
    /// The handler replies at once, or [defers](Request::defer) the request and replies with [`reply`](Server::reply) after this call. A
    /// request that is dropped, as by a panic of the handler, gets no response; the others wait for the next call.
    ///
    /// A program that needs the server between two requests, or wants to stop earlier, calls [`poll`](Server::poll) and
    /// [`recv`](Server::recv), which do the same in two steps.
    #[inline]
    pub fn serve(&mut self, mut handle: impl FnMut(Request<'_, Req, Resp>)) -> usize {
        self.poll();
        let mut count = 0;
        while let Some(request) = self.recv() {
            handle(request);
            count += 1;
        }
        count
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
    #[inline]
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
                match client.take::<Req>(&mut taken.inbox) {
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
    // Inlined into the loop of the program: a request that is answered in place is then not stored in between.
    #[inline(always)]
    pub fn recv(&mut self) -> Option<Request<'_, Req, Resp>> {
        loop {
            let core = &mut self.core;
            let Some(ClientEntry { key, client: Some(client) }) = core.clients.get_mut(core.serving) else {
                if core.serve_next() {
                    continue;
                }
                return self.recv_taken();
            };
            let (key, client) = (*key, NonNull::from(client));
            // SAFETY: nothing has changed `core.clients` since the client was found there, and nobody else refers to it.
            let ConnectedClient { lane, room, .. } = unsafe { &mut *client.as_ptr() };
            let (slot, next) = lane.take(Req::SIZE);
            let valid = match next {
                Next::Request { slot: number, call, len } if *room > 0 => {
                    let len = Req::SIZE.unwrap_or(len);
                    core.counters.requests += 1;
                    core.left_in_turn -= 1;
                    if core.left_in_turn == 0 {
                        core.serving = NOBODY;
                    }
                    // Copied last: nothing comes between the copy and the handler, so the message need not be loaded again.
                    if Req::receive(&mut self.inbox, len, |buffer| slot.read(buffer)) {
                        return Some(Request {
                            message: Req::received(&self.inbox, len)?,
                            slot,
                            room,
                            ticket: Ticket { nonce: core.nonce, client: key, slot: number as u32, call },
                            response_limit: core.response_limit,
                            response: PhantomData,
                        });
                    }
                    core.forget_request();
                    false
                }
                Next::Request { .. } | Next::Invalid => false,
                Next::Nothing => true,
            };
            if !valid {
                core.disconnect_violator(key.index());
            }
            core.serving = NOBODY;
        }
    }

    /// The next request that [`poll_with_prefetch`](Server::poll_with_prefetch) took. That poll leaves no client to be served.
    #[inline]
    fn recv_taken(&mut self) -> Option<Request<'_, Req, Resp>> {
        let next = self.next_taken()?;
        let TakenRequest { index, client, slot, call, .. } = self.taken[next];
        let taken = &self.taken[next];
        let ConnectedClient { lane, room, .. } = self.core.clients[index as usize].client.as_mut()?;
        *room += 1;
        Some(Request {
            message: Req::received(&taken.inbox, taken.len)?,
            slot: lane.slot(slot as usize),
            room,
            ticket: Ticket { nonce: self.core.nonce, client, slot, call },
            response_limit: self.core.response_limit,
            response: PhantomData,
        })
    }

    /// The next request that `poll_with_prefetch` took, of a client that has not been disconnected meanwhile.
    #[inline]
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
        self.core.reply::<Resp>(ticket, response.bytes())
    }

    /// Waits until there is a request, or a client connects or disconnects, for at most `timeout`. Returns whether one of
    /// these happened; then [serve](Server::serve), or [poll](Server::poll).
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

/// Whether a response of `len` bytes is allowed.
#[inline]
fn check_len<Resp: Message + ?Sized>(
    len: usize,
    limit: usize,
    ticket: Ticket,
) -> Result<Ticket, ReplyError<Ticket>> {
    // Messages of fixed size replace the limit.
    if Resp::SIZE.is_none() && len > limit {
        return Err(ReplyError::too_long(ticket, len, limit));
    }
    Ok(ticket)
}

/// Makes the response visible that was written into the slot.
#[inline]
fn publish_response(slot: Slot<'_>, call: CallNumber, len: usize) {
    lane::publish_response(slot.word(), call, len);
    slot.demote();
    slot.lane().parker().notify();
}

/// Takes room for one more request. False if there was none: then the client broke the protocol, and its room does not matter any more.
#[inline]
fn take_room(room: &mut i32) -> bool {
    *room -= 1;
    *room >= 0
}

impl ConnectedClient {
    #[inline]
    fn has_request(&self) -> bool {
        self.lane.has_request()
    }

    /// Takes the next request out of the lane. Returns its slot, call number and length. Trusts nothing that the client
    /// wrote.
    #[inline]
    fn take<Req: Message + ?Sized>(
        &mut self,
        inbox: &mut Req::Inbox,
    ) -> Result<Option<(u32, CallNumber, usize)>, Violation> {
        let (slot, next) = self.lane.take(Req::SIZE);
        match next {
            Next::Request { slot: number, call, len }
                if take_room(&mut self.room) && Req::receive(inbox, len, |buffer| slot.read(buffer)) =>
            {
                Ok(Some((number as u32, call, len)))
            }
            Next::Request { .. } | Next::Invalid => Err(Violation),
            Next::Nothing => Ok(None),
        }
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
        self.serving = NOBODY;
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

    /// Serves the next client that had a request in the last poll. False if there is none.
    #[inline]
    fn serve_next(&mut self) -> bool {
        let Some(index) = self.ready.get(self.turn) else { return false };
        self.serving = *index as usize;
        self.left_in_turn = self.queue_depth;
        self.turn += 1;
        true
    }

    #[inline]
    fn reply<Resp: Message + ?Sized>(
        &mut self,
        ticket: Ticket,
        response: &[u8],
    ) -> Result<(), ReplyError<Ticket>> {
        if ticket.nonce != self.nonce {
            return Err(ReplyError { cause: NotReplied::WrongServer, ticket: Some(ticket) });
        }
        let ClientEntry { key, client } = &mut self.clients[ticket.client.index() as usize];
        let ConnectedClient { lane, room, .. } = match client {
            Some(client) if *key == ticket.client => client,
            _ => return Err(ReplyError::CLIENT_GONE),
        };
        let ticket = check_len::<Resp>(response.len(), self.response_limit, ticket)?;
        let slot = lane.slot(ticket.slot as usize);
        slot.write(response);
        publish_response(slot, ticket.call, response.len());
        *room += 1;
        Ok(())
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
            let (lane, room) = (ServedLane::new(lane), self.queue_depth as i32);
            let client = ConnectedClient { id, lane, room, skip: 1 };
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

    /// A request that was counted is invalid.
    #[cold]
    #[inline(never)]
    fn forget_request(&mut self) {
        self.counters.requests -= 1;
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
