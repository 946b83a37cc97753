//! The server: it takes requests out of the shared ring, replies into the response slots of the clients, and skips
//! positions of the ring that a dead client left unfilled.

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::admission::{ClientRegistry, ClientSlot};
use super::layout::{
    ClientKey, MAGIC, RESPONSE_PAYLOAD_AT, ResponseKey, RingLayout, SharedRing, Slots, VERSION, client_of,
    committed_by,
};
use super::{
    Config, CreateError, KIND, MAX_CLIENTS, MAX_QUEUE_DEPTH, MAX_RING_DEPTH, NotReplied, ReplyError, lease,
};
use crate::local::listener::Listener;
use crate::local_rpc::hello::{self, Hello};
use crate::memory::prefetch;
use crate::memory::segment::SharedRef;
use crate::message::Message;
use crate::ring::stalled::StalledPositions;
use crate::ring::{fence, reservation};
use crate::wait::{self, Parker};

/// Pauses of the processor after the last request of a burst. A client cannot have written the next request yet, and
/// checking for it at once would only take the cache line away from that client.
const PAUSES_AFTER_BURST: u32 = 4;
/// Most requests that the server takes before it publishes the new `tail` to the clients.
const MAX_BATCH: u64 = 32;
/// Most invalid requests that one call drops.
const MAX_INVALID: u32 = 256;
/// Most requests that one [`serve`](Server::serve) hands out.
const MAX_SERVED: usize = 256;
/// How many requests the server looks at together: the processor fetches their cache lines at the same time, instead of one after the other.
const LOOKAHEAD: u64 = 8;
/// Checks without a request before the server looks for positions that are reserved and not filled. The server looks at once when a
/// client is removed; these further looks are for clients that are stopped or break the protocol.
const CHECKS_BEFORE_HOLE_SEARCH: u32 = 256;
/// The longest wait without such a look. A park ends after 50 ms at the latest, too.
const HOLE_SEARCH_INTERVAL: Duration = Duration::from_millis(50);
/// The same, while positions are reserved and not filled.
const HOLE_SEARCH_INTERVAL_IF_ANY: Duration = Duration::from_millis(5);

/// Serves the calls of many clients. See the [module](super).
pub struct Server<Req: Message + ?Sized, Resp: Message + ?Sized> {
    core: Core,
    /// The last request, copied out of shared memory.
    inbox: Req::Inbox,
    messages: PhantomData<fn(&Req) -> Resp::Inbox>,
}

/// The part of a server that does not depend on the message types.
struct Core {
    // Dropped first: afterwards the watcher thread admits no more clients.
    listener: Listener,
    registry: Arc<ClientRegistry>,
    ring: SharedRing,
    /// Distinguishes the tickets of this server from those of others.
    nonce: u32,
    wait_strategy: crate::WaitStrategy,
    /// The next position to read. It is not in the segment, so no client can change it.
    cursor: u64,
    /// Positions from the cursor on that are known to have a request.
    ready: u64,
    /// The last value of `tail` that was published to the clients.
    published_tail: u64,
    batch: u64,
    accounts: Box<[ClientAccount]>,
    /// The cursor at the last pause.
    cursor_at_pause: u64,
    /// Checks without a request.
    checks: u32,
    /// Removed clients, as of the last search for holes.
    seen_disconnects: u64,
    /// Holes that removed clients left are below this position.
    holes_below: u64,
    stalled: StalledPositions,
    counters: Counters,
}

/// What the server knows about the client with an index.
#[repr(align(128))]
struct ClientAccount {
    key: ClientKey,
    /// Requests that were [deferred](Request::defer) and not replied to, or [`DISCONNECTED`].
    unanswered: u32,
    /// Of the index, whichever client has it.
    reply_target: ReplyTarget,
}

/// Where the replies to the clients with an index go.
struct ReplyTarget {
    slot: Arc<ClientSlot>,
    responses: Slots<RESPONSE_PAYLOAD_AT>,
    parker: SharedRef<Parker>,
}

/// The value of `unanswered` for a client that was disconnected because it broke the protocol.
const DISCONNECTED: u32 = u32::MAX;

/// What a server has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Requests handed out.
    pub requests: u64,
    /// Positions of the ring that were skipped, because clients died before they filled them.
    pub skipped: u64,
    /// Positions that were passed because a live client did not fill them. Their requests are handed out when they arrive.
    pub passed: u64,
    /// Requests dropped because their clients were gone.
    pub stale: u64,
    /// Requests dropped because they were invalid.
    pub invalid: u64,
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
    response: ResponseKey,
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
    /// That of the client.
    account: &'s mut ClientAccount,
    registry: &'s ClientRegistry,
    layout: &'s RingLayout,
    ticket: Ticket,
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
        let Request { account, registry, layout, ticket, .. } = self;
        let bytes = response.bytes();
        let ticket = match check_len::<Resp>(bytes.len(), layout, ticket) {
            Ok(ticket) => ticket,
            // The ticket can still be replied to.
            Err(too_long) => {
                account.unanswered += 1;
                return Err(too_long);
            }
        };
        account.reply_target.reply(registry, layout, ticket, bytes)
    }

    /// Turns the request into a ticket, so that other requests can be received before the reply.
    #[inline]
    pub fn defer(self) -> Ticket {
        self.account.unanswered += 1;
        self.ticket
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized> Server<Req, Resp> {
    /// Creates a server with this name. Fails if a live server of the same user has the name.
    pub fn create(name: &str, config: &Config) -> Result<Server<Req, Resp>, CreateError> {
        CreateError::check("max_clients", config.max_clients, MAX_CLIENTS)?;
        CreateError::check("queue_depth", config.queue_depth, MAX_QUEUE_DEPTH)?;
        CreateError::check("ring_depth", config.ring_depth, MAX_RING_DEPTH)?;
        hello::check_message_limits::<Req, Resp>(config.request_limit, config.response_limit)?;
        fence::register()?;
        let layout = RingLayout::new(config, Req::SIZE, Resp::SIZE);
        let ring = SharedRing::create(layout)?;
        let registry = Arc::new(ClientRegistry::new(ring.clone(), Hello::new::<Req, Resp>(MAGIC, VERSION)));
        static NONCE: AtomicU32 = AtomicU32::new(1);
        let account = |index: u32| {
            let reply_target = ReplyTarget {
                slot: registry.slot(index as usize)?.clone(),
                responses: ring.responses_of(index as usize)?,
                parker: ring.client_area(ClientKey::first(index))?.1,
            };
            Some(ClientAccount { key: ClientKey::from_bits(0), unanswered: 0, reply_target })
        };
        let accounts = (0..layout.max_clients).map(account).collect::<Option<Box<[_]>>>();
        let accounts = accounts.ok_or(io::Error::from(io::ErrorKind::InvalidInput))?;
        let core = Core {
            listener: hello::listen(KIND, name, registry.clone())?,
            registry,
            ring,
            nonce: NONCE.fetch_add(1, Relaxed),
            wait_strategy: config.wait_strategy,
            cursor: 0,
            ready: 0,
            published_tail: 0,
            batch: (u64::from(layout.ring_depth) / 4).clamp(1, MAX_BATCH),
            accounts,
            cursor_at_pause: 0,
            checks: 0,
            seen_disconnects: 0,
            holes_below: 0,
            stalled: StalledPositions::new(layout.ring_depth.into()),
            counters: Counters::default(),
        };
        Ok(Server { core, inbox: Req::inbox(layout.request_limit as usize), messages: PhantomData })
    }

    /// Hands the requests that are there to `handle`. Returns their number. Never waits.
    ///
    /// It takes the requests of all clients in the order in which they are in the ring, and returns when there is no request, or after 256
    /// requests; the next call continues.
    ///
    /// The handler replies at once, or [defers](Request::defer) the request and replies with [`reply`](Server::reply) after this call. A
    /// request that is dropped, as by a panic of the handler, gets no response; the others wait for the next call.
    ///
    /// A program that needs the server between two requests, or wants to stop earlier, calls [`recv`](Server::recv), which takes one
    /// request.
    #[inline]
    pub fn serve(&mut self, mut handle: impl FnMut(Request<'_, Req, Resp>)) -> usize {
        let mut count = 0;
        while count < MAX_SERVED
            && let Some(request) = self.recv()
        {
            handle(request);
            count += 1;
        }
        // At the latest now the clients may use the positions again.
        self.core.publish_tail();
        count
    }

    /// Returns how many requests are ready, up to one batch; [`recv`](Server::recv) hands them out. Also tells the clients
    /// that the positions of the requests handed out before are free.
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.core.poll()
    }

    /// Returns the next request, or None if no request is waiting.
    // Inlined into the loop of the program: a request that is answered in place is then not stored in between.
    #[inline(always)]
    pub fn recv(&mut self) -> Option<Request<'_, Req, Resp>> {
        // A client may write invalid requests as fast as we read them. The limit keeps that from blocking this call.
        let mut invalid = 0;
        while invalid < MAX_INVALID {
            let core = &mut self.core;
            let late = if core.ready == 0 { core.look_ahead() } else { None };
            let taken = match late {
                None if core.ready == 0 => break,
                None if core.ready == 1 && core.is_tail_due_after_next() => {
                    core.take_and_publish_tail::<Req>(&mut self.inbox)
                }
                None => core.take_next::<Req>(&mut self.inbox),
                Some(position) => core.take_late::<Req>(position, &mut self.inbox),
            };
            if let Some((account, response, len)) = taken {
                // SAFETY: the account was just found in `core.accounts`, which nothing has changed since and nobody else refers to.
                let account = unsafe { &mut *account.as_ptr() };
                return Some(Request {
                    message: Req::received(&self.inbox, len)?,
                    ticket: Ticket { nonce: self.core.nonce, client: account.key, response },
                    account,
                    registry: &self.core.registry,
                    layout: &self.core.ring.layout,
                    response: PhantomData,
                });
            }
            invalid += 1;
        }
        self.core.handle_idle();
        None
    }

    /// Replies to a request that was deferred.
    #[inline]
    pub fn reply(&mut self, ticket: Ticket, response: &Resp) -> Result<(), ReplyError<Ticket>> {
        self.core.reply::<Resp>(ticket, response.bytes())
    }

    /// Waits until there is a request, for at most `timeout`. Returns whether there is one; then [serve](Server::serve).
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let core = &mut self.core;
        core.publish_tail();
        let header = core.ring.header.clone();
        let mut left = timeout.unwrap_or(Duration::MAX);
        let mut slice = left.min(HOLE_SEARCH_INTERVAL);
        loop {
            let is_ready = wait::wait_for(&header.parker, core.wait_strategy, Some(slice), || {
                core.has_request() || core.skip_holes_if_due()
            });
            if is_ready || core.has_unfilled() && core.skip_holes() {
                return true;
            }
            left = left.saturating_sub(slice);
            if left.is_zero() {
                return false;
            }
            let interval =
                if core.has_unfilled() { HOLE_SEARCH_INTERVAL_IF_ANY } else { HOLE_SEARCH_INTERVAL };
            slice = left.min(interval);
        }
    }

    /// The number of connected clients.
    pub fn clients(&self) -> usize {
        let counters = self.counters();
        counters.connects.saturating_sub(counters.disconnects) as usize
    }

    /// What the server has counted so far.
    pub fn counters(&self) -> Counters {
        let registry = &self.core.registry;
        // In this order: every client that was removed has been counted as connected.
        let disconnects = registry.disconnects.load(Acquire);
        Counters { connects: registry.connects.load(Relaxed), disconnects, ..self.core.counters }
    }
}

/// Whether a response of `len` bytes is allowed.
#[inline]
fn check_len<Resp: Message + ?Sized>(
    len: usize,
    layout: &RingLayout,
    ticket: Ticket,
) -> Result<Ticket, ReplyError<Ticket>> {
    let limit = layout.response_limit as usize;
    // Messages of fixed size replace the limit.
    if Resp::SIZE.is_none() && len > limit {
        return Err(ReplyError::too_long(ticket, len, limit));
    }
    Ok(ticket)
}

impl ReplyTarget {
    /// Writes a response, if the client's lease of its response slots has not ended.
    #[inline]
    fn reply(
        &self,
        registry: &ClientRegistry,
        layout: &RingLayout,
        ticket: Ticket,
        response: &[u8],
    ) -> Result<(), ReplyError<Ticket>> {
        let replying_to = &registry.replying_to.0;
        if !lease::begin_reply(replying_to, &self.slot.holder, ticket.client.bits().into()) {
            return Err(ReplyError::CLIENT_GONE);
        }
        // A slot of the ticket is one of the client's: `Core::take` has checked it.
        let slot = self.responses.masked(ticket.response.slot());
        slot.write(response);
        // Release, partner: the Acquire load in `RingTransport::response`. The response becomes visible with it.
        slot.word().store(ticket.response.word(response.len()), Release);
        // With several calls in flight, the client gets the line sooner from the caches that all cores share. A client with one call at a
        // time polls the line.
        if layout.queue_depth > 1 {
            prefetch::demote(core::ptr::from_ref(slot.word()));
        }
        lease::end_reply(replying_to);
        self.parker.notify();
        Ok(())
    }
}

impl Core {
    /// The client of the next request, if the request is there. Reads the stamp of that request, and nothing that other
    /// requests change.
    #[inline]
    fn next_committed(&self) -> Option<ClientKey> {
        self.committed_at(self.cursor)
    }

    /// Finds out how many positions from the cursor on have a request. Or returns a position that was passed, if its client has filled it.
    #[inline]
    fn look_ahead(&mut self) -> Option<u64> {
        // No further than to the position at which the tail is due.
        let until_publish = self.batch.saturating_sub(self.cursor.wrapping_sub(self.published_tail));
        let mut most = until_publish.clamp(1, LOOKAHEAD);
        if !self.stalled.is_empty() {
            if let Some((position, _)) = self.late_request() {
                return Some(position);
            }
            most = 1;
        }
        self.ready = self.count_committed(most);
        None
    }

    /// How many positions from the cursor on have a request, up to `most`.
    #[inline]
    fn count_committed(&self, most: u64) -> u64 {
        let (requests, cursor) = (self.ring.requests().view(), self.cursor);
        let mut count = 0;
        while count < most {
            let position = cursor.wrapping_add(count);
            // Acquire, partner: the Release store in `RingTransport::publish`. The request becomes visible with it.
            if committed_by(requests.masked(position as usize).word().load(Acquire), position).is_none() {
                break;
            }
            count += 1;
        }
        count
    }

    /// Position and client of the next request: of a client that was passed and has continued, or at the cursor.
    #[inline]
    fn next_request(&self) -> Option<(u64, ClientKey)> {
        if !self.stalled.is_empty()
            && let Some(request) = self.late_request()
        {
            return Some(request);
        }
        self.next_committed().map(|client| (self.cursor, client))
    }

    #[cold]
    fn late_request(&self) -> Option<(u64, ClientKey)> {
        self.stalled.iter().find_map(|position| Some((position, self.committed_at(position)?)))
    }

    #[inline]
    fn has_request(&self) -> bool {
        self.next_request().is_some()
    }

    /// Whether a position is reserved that is not filled yet, or was not when it was passed.
    fn has_unfilled(&self) -> bool {
        !self.stalled.is_empty() || self.ring.header.head.load(Relaxed) != self.cursor
    }

    #[inline]
    fn committed_at(&self, position: u64) -> Option<ClientKey> {
        // Acquire, partner: the Release store in `RingTransport::publish`. The request becomes visible with it.
        committed_by(self.ring.request(position).word().load(Acquire), position)
    }

    #[inline]
    fn poll(&mut self) -> usize {
        let ready = self.count_committed(self.batch) as usize;
        self.ready = if self.stalled.is_empty() { ready as u64 } else { 0 };
        match ready {
            0 => self.handle_idle(),
            _ => self.publish_tail(),
        }
        if ready == 0 && !self.stalled.is_empty() {
            return usize::from(self.late_request().is_some());
        }
        ready
    }

    /// Takes the request at `position` out of the ring. Returns the account of its client, its response key and its length, or None if it is
    /// invalid or its client is gone. Trusts nothing that the client wrote.
    #[inline(always)]
    fn take<Req: Message + ?Sized>(
        &mut self,
        position: u64,
        inbox: &mut Req::Inbox,
    ) -> Option<(NonNull<ClientAccount>, ResponseKey, usize)> {
        let Core { ring, accounts, registry, counters, .. } = self;
        let slot = ring.request(position);
        // Relaxed: `count_committed` or `late_request` has seen the stamp of the request. A client that writes the word again changes only
        // whose request it is, and that is validated.
        let client = client_of(slot.word().load(Relaxed));
        let (response, len) = ResponseKey::parse(slot.second_word().load(Relaxed));
        let Some(account) = accounts.get_mut(client.index() as usize) else {
            counters.invalid += 1;
            return None;
        };
        if account.key != client {
            if registry.client_id(client).is_none() {
                counters.stale += 1;
                return None;
            }
            (account.key, account.unanswered) = (client, 0);
        }
        if account.unanswered < ring.layout.queue_depth
            && response.slot() < ring.resp_depth
            && Req::SIZE.is_none_or(|size| len == size)
        {
            let len = Req::SIZE.unwrap_or(len);
            // Prefetch the cache line of the response while the request is being served.
            prefetch::for_write(account.reply_target.responses.masked(response.slot()).word());
            let account = NonNull::from(account);
            // Copied last: nothing comes between the copy and the handler, so the message need not be loaded again.
            if Req::receive(inbox, len, |buffer| slot.read(buffer)) {
                counters.requests += 1;
                return Some((account, response, len));
            }
        }
        self.disconnect_violator(client);
        None
    }

    /// Takes the request at the cursor, which is one of those that are ready.
    #[inline]
    fn take_next<Req: Message + ?Sized>(
        &mut self,
        inbox: &mut Req::Inbox,
    ) -> Option<(NonNull<ClientAccount>, ResponseKey, usize)> {
        self.ready -= 1;
        let position = self.cursor;
        self.cursor = position.wrapping_add(1);
        self.take::<Req>(position, inbox)
    }

    /// Whether the clients are to be told which positions are free when the next request was taken. `ready` ends there at the
    /// latest, so this need not be asked for each request.
    #[inline]
    fn is_tail_due_after_next(&self) -> bool {
        self.cursor.wrapping_sub(self.published_tail) >= self.batch - 1
    }

    /// As [`take_next`](Self::take_next), when the tail is due.
    // Not inlined: nothing comes between the copy and what the program does with the message where this is not needed.
    #[cold]
    fn take_and_publish_tail<Req: Message + ?Sized>(
        &mut self,
        inbox: &mut Req::Inbox,
    ) -> Option<(NonNull<ClientAccount>, ResponseKey, usize)> {
        let taken = self.take_next::<Req>(inbox);
        self.publish_tail();
        taken
    }

    /// Takes the request at a position that was passed.
    #[cold]
    fn take_late<Req: Message + ?Sized>(
        &mut self,
        position: u64,
        inbox: &mut Req::Inbox,
    ) -> Option<(NonNull<ClientAccount>, ResponseKey, usize)> {
        let taken = self.take::<Req>(position, inbox);
        self.stalled.remove(position, &self.ring.header.stalled);
        taken
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
        let layout = &self.ring.layout;
        let ticket = check_len::<Resp>(response.len(), layout, ticket)?;
        let client = ticket.client;
        let Some(account) = self.accounts.get_mut(client.index() as usize) else {
            return Err(ReplyError::CLIENT_GONE);
        };
        if account.key == client && account.unanswered != DISCONNECTED {
            account.unanswered = account.unanswered.saturating_sub(1);
        }
        account.reply_target.reply(&self.registry, layout, ticket, response)
    }

    /// Called when there is no request.
    #[inline]
    fn handle_idle(&mut self) {
        self.publish_tail();
        if self.cursor_at_pause != self.cursor {
            self.cursor_at_pause = self.cursor;
            self.checks = 0;
            for _ in 0..PAUSES_AFTER_BURST {
                core::hint::spin_loop();
            }
        }
        self.skip_holes_if_due();
    }

    /// Tells the clients which positions are free.
    #[inline]
    fn publish_tail(&mut self) {
        if self.published_tail != self.cursor {
            self.published_tail = self.cursor;
            // Release, partner: the Acquire load in `RingTransport::reserve`. The requests below have been copied out.
            self.ring.header.tail.store(self.cursor, Release);
        }
    }

    /// Skips holes, if it is time to look for them. Returns whether there is a request after them.
    #[inline]
    fn skip_holes_if_due(&mut self) -> bool {
        self.checks = self.checks.wrapping_add(1);
        // Acquire, partner: the Release add in `ClientRegistry::remove`.
        let disconnects = self.registry.disconnects.load(Acquire);
        let due = disconnects != self.seen_disconnects
            || self.holes_below > self.cursor
            || !self.stalled.is_empty()
            || self.checks.is_multiple_of(CHECKS_BEFORE_HOLE_SEARCH);
        due && self.skip_holes()
    }

    /// Skips positions that no live client can still fill. Nothing is written there: the client that gets the slot in the
    /// next round of the ring overwrites it.
    #[cold]
    fn skip_holes(&mut self) -> bool {
        // Acquire, partner: the Release add in `ClientRegistry::remove`.
        self.seen_disconnects = self.registry.disconnects.load(Acquire);
        self.forget_gone_clients();
        // Acquire, partner: the Release reservation in `reservation::reserve`.
        let head = self.ring.header.head.load(Acquire);
        // Clients that follow the protocol never reserve more positions than the ring has. Otherwise a client has overwritten
        // `head`.
        let reserved = match head.wrapping_sub(self.cursor) {
            reserved if reserved <= self.ring.layout.ring_depth.into() => reserved,
            _ => 0,
        };
        self.holes_below = self.cursor.wrapping_add(reserved);
        while self.holes_below > self.cursor {
            let (registry, cursor) = (&self.registry, self.cursor);
            let published = || self.committed_at(cursor).is_some();
            let head = &self.ring.header.head;
            if reservation::is_abandoned(head, cursor, registry.live_claims(), published) {
                self.counters.skipped += 1;
            } else if self.committed_at(cursor).is_none()
                && self.stalled.try_pass(cursor, &self.ring.header.stalled)
            {
                self.counters.passed += 1;
            } else {
                break;
            }
            self.cursor = self.cursor.wrapping_add(1);
            self.ready = 0;
        }
        self.publish_tail();
        self.has_request()
    }

    /// Frees the slots of stalled positions whose clients are gone.
    fn forget_gone_clients(&mut self) {
        let is_abandoned = |position: &u64| {
            let published = || self.committed_at(*position).is_some();
            let claims = self.registry.live_claims();
            reservation::is_abandoned(&self.ring.header.head, *position, claims, published)
        };
        let gone = self.stalled.iter().find(is_abandoned);
        if let Some(position) = gone {
            self.stalled.remove(position, &self.ring.header.stalled);
            self.counters.skipped += 1;
        }
    }

    /// Disconnects a client that broke the protocol.
    #[cold]
    fn disconnect_violator(&mut self, client: ClientKey) {
        self.counters.invalid += 1;
        let account = &mut self.accounts[client.index() as usize];
        if core::mem::replace(&mut account.unanswered, DISCONNECTED) != DISCONNECTED
            && let Some(id) = self.registry.client_id(client)
        {
            self.counters.violations += 1;
            self.listener.disconnect(id);
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // For debugging only; clients learn of the end from the socket. A forked child has not mapped the ring.
        if !self.ring.header.is_of_this_process() {
            return;
        }
        self.ring.header.server_alive.store(0, Relaxed);
    }
}

/// To be awaited after [`serve`](Server::serve), or after [`recv`](Server::recv) has returned None: these tell the clients which positions
/// are free.
impl<Req: Message + ?Sized, Resp: Message + ?Sized> wait::any::sealed::Waitable for Server<Req, Resp> {
    fn parker(&self) -> Option<&wait::Parker> {
        Some(&self.core.ring.header.parker)
    }

    fn is_expecting(&self) -> bool {
        true
    }

    fn is_ready(&self, _: bool) -> bool {
        let core = &self.core;
        // A client that was removed may have left a hole before requests of others: the next poll looks for it.
        // Acquire, partner: the Release add in `ClientRegistry::remove`.
        core.has_request() || core.registry.disconnects.load(Acquire) != core.seen_disconnects
    }

    fn max_park(&self) -> Option<Duration> {
        self.core.has_unfilled().then_some(HOLE_SEARCH_INTERVAL_IF_ANY)
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized> fmt::Debug for Server<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut server = f.debug_struct("Server");
        server.field("clients", &self.clients()).field("counters", &self.counters()).finish_non_exhaustive()
    }
}

impl<Req: Message + ?Sized + fmt::Debug, Resp: Message + ?Sized> fmt::Debug for Request<'_, Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("message", &self.message).field("ticket", &self.ticket).finish()
    }
}
