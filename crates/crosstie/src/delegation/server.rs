//! The side that answers.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::admission::ClientRegistry;
use super::layout::{ClientKey, MAGIC, Map, ResponseKey, Shape, VERSION, committed};
use super::{Config, CreateError, KIND, MAX_CLIENTS, MAX_QUEUE_DEPTH, MAX_RING_DEPTH, ReplyError, lease};
use crate::local::listener::Listener;
use crate::local_rpc::hello::{self, Hello};
use crate::memory::prefetch;
use crate::message::Message;
use crate::ring::{fence, reservation};
use crate::wait;

/// Pauses of the processor after the last request of a burst: until then the next one cannot have been written, and
/// looking for it would only take its line away from the client.
const CATCH_UP_PAUSES: u32 = 4;
/// Requests taken before clients are told that their places are free, at most.
const MAX_BATCH: u64 = 32;
/// Fruitless looks for a request before the ring is searched for a place that nobody will ever fill. A death is told
/// and searched for at once; this is for what a client that breaks the rules may do.
const LOOKS_BEFORE_SEARCH: u32 = 1024;

/// Answers the calls of many clients. See the [module](super).
pub struct Server<Req: Message + ?Sized, Resp: Message + ?Sized> {
    core: Core,
    inbox: Req::Inbox,
    messages: PhantomData<fn(&Req) -> Resp::Inbox>,
}

/// What does not depend on the messages' types.
struct Core {
    // Dropped before anything else: no more guests.
    listener: Listener,
    registry: Arc<ClientRegistry>,
    map: Map,
    /// Tells this server's tickets from those of others.
    nonce: u32,
    wait_strategy: crate::WaitStrategy,
    /// The next position to be read. Nobody else knows it, so nobody can spoil it.
    cursor: u64,
    /// Up to where clients know.
    told_tail: u64,
    batch: u64,
    accounts: Box<[Account]>,
    had_some: bool,
    looks: u32,
    /// Departures that have been heard of.
    seen_left: u64,
    /// Holes that they left are below.
    search_until: u64,
    counters: Counters,
}

/// What the server knows of the client with an index.
#[derive(Clone, Copy)]
#[repr(align(128))]
struct Account {
    key: ClientKey,
    unanswered: u32,
}

/// As `unanswered`: of a client that was cut off.
const CUT_OFF: u32 = u32::MAX;

/// What a server has seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Requests handed out.
    pub requests: u64,
    /// Places in the ring that their owners left unfilled when they died.
    pub skipped: u64,
    /// Requests dropped because their clients were gone.
    pub stale: u64,
    /// Requests dropped because they were none.
    pub invalid: u64,
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
    response: ResponseKey,
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
    core: &'s mut Core,
    message: &'s Req,
    ticket: Ticket,
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
        self.core.reply(self.ticket, answer.bytes())
    }

    /// Keeps the right to answer, so that other requests can be received before.
    #[inline]
    pub fn defer(self) -> Ticket {
        self.ticket
    }
}

impl<Req: Message + ?Sized, Resp: Message + ?Sized> Server<Req, Resp> {
    /// Creates the server of that name. A live one of the same user must not exist.
    pub fn create(name: &str, config: &Config) -> Result<Server<Req, Resp>, CreateError> {
        CreateError::check("max_clients", config.max_clients, MAX_CLIENTS)?;
        CreateError::check("queue_depth", config.queue_depth, MAX_QUEUE_DEPTH)?;
        CreateError::check("ring_depth", config.ring_depth, MAX_RING_DEPTH)?;
        hello::check_message_limits::<Req, Resp>(config.request_limit, config.response_limit)?;
        fence::register()?;
        let shape = Shape::new(config, Req::SIZE, Resp::SIZE);
        let map = Map::create(shape)?;
        let registry = Arc::new(ClientRegistry::new(map.clone(), Hello::new::<Req, Resp>(MAGIC, VERSION)));
        static NONCE: AtomicU32 = AtomicU32::new(1);
        let nobody = Account { key: ClientKey::from_bits(0), unanswered: 0 };
        let core = Core {
            listener: hello::listen(KIND, name, registry.clone())?,
            registry,
            map,
            nonce: NONCE.fetch_add(1, Relaxed),
            wait_strategy: config.wait_strategy,
            cursor: 0,
            told_tail: 0,
            batch: (u64::from(shape.ring_depth) / 4).clamp(1, MAX_BATCH),
            accounts: vec![nobody; config.max_clients].into(),
            had_some: false,
            looks: 0,
            seen_left: 0,
            search_until: 0,
            counters: Counters::default(),
        };
        Ok(Server { core, inbox: Req::inbox(shape.request_limit as usize), messages: PhantomData })
    }

    /// Says how many requests are there, as far as one look goes. [`recv`](Server::recv) hands them out. Clients hear that
    /// the places of those handed out before are free.
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.core.poll()
    }

    /// The next request. None if there is none yet.
    #[inline]
    pub fn recv(&mut self) -> Option<Request<'_, Req, Resp>> {
        let core = &mut self.core;
        // A client that writes nonsense may do so as fast as we read it; that must not keep us here.
        for _ in 0..core.map.shape.ring_depth {
            let Some(client) = core.look() else { break };
            if let Some((response, len)) = core.take::<Req>(client, &mut self.inbox) {
                let ticket = Ticket { nonce: core.nonce, client, response };
                let message = Req::received(&self.inbox, len)?;
                return Some(Request { core, message, ticket, answer: PhantomData });
            }
        }
        core.idle();
        None
    }

    /// Answers a request that was deferred.
    #[inline]
    pub fn reply(&mut self, ticket: Ticket, answer: &Resp) -> Result<(), ReplyError<Ticket>> {
        self.core.reply(ticket, answer.bytes())
    }

    /// Waits until there is a request, at most for `timeout`. Says whether there is one.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let core = &mut self.core;
        core.publish_tail();
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let top = core.map.top.clone();
        wait::wait_until(&top.parker, core.wait_strategy, deadline, || {
            core.look().is_some() || core.found_by_search()
        })
    }

    /// Clients that are connected.
    pub fn clients(&self) -> usize {
        let counters = self.counters();
        counters.connects.saturating_sub(counters.disconnects) as usize
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        let registry = &self.core.registry;
        // In this order: who left has arrived.
        let left = registry.left.load(Acquire);
        Counters { connects: registry.arrived.load(Relaxed), disconnects: left, ..self.core.counters }
    }
}

impl Core {
    /// Whose the next request is, if it is there. Looks at its own stamp and at nothing that other requests change.
    #[inline(always)]
    fn look(&self) -> Option<ClientKey> {
        self.look_at(self.cursor)
    }

    #[inline(always)]
    fn look_at(&self, position: u64) -> Option<ClientKey> {
        // Acquire, partner: the Release store in `RingTransport::publish`. The request is visible with it.
        committed(self.map.request(position).word().load(Acquire), position)
    }

    #[inline]
    fn poll(&mut self) -> usize {
        let there =
            (0..self.batch).take_while(|i| self.look_at(self.cursor.wrapping_add(*i)).is_some()).count();
        match there {
            0 => self.idle(),
            _ => self.publish_tail(),
        }
        there
    }

    /// Takes the request at the cursor out of the ring, if it is one: where its answer goes, and its length. Believes
    /// nothing that the client wrote.
    #[inline(always)]
    fn take<Req: Message + ?Sized>(
        &mut self,
        client: ClientKey,
        inbox: &mut Req::Inbox,
    ) -> Option<(ResponseKey, usize)> {
        let slot = self.map.request(self.cursor);
        let (response, len) = ResponseKey::parse(slot.second_word().load(Relaxed));
        let is_message = Req::receive(inbox, len, |place| slot.get(place));
        self.cursor = self.cursor.wrapping_add(1);
        self.had_some = true;
        if self.cursor.wrapping_sub(self.told_tail) >= self.batch {
            self.publish_tail();
        }
        let Some(account) = self.accounts.get_mut(client.index() as usize) else {
            self.counters.invalid += 1;
            return None;
        };
        if account.key != client {
            if self.registry.client(client).is_none() {
                self.counters.stale += 1;
                return None;
            }
            *account = Account { key: client, unanswered: 0 };
        }
        if !is_message
            || account.unanswered >= self.map.shape.queue_depth
            || response.slot() >= self.map.resp_depth
        {
            self.cut_off(client);
            return None;
        }
        account.unanswered += 1;
        self.counters.requests += 1;
        // The line of the answer is on its way while the request is served.
        prefetch::for_write(self.map.response(client.index() as usize, response.slot()).word());
        Some((response, len))
    }

    #[inline(always)]
    fn reply(&mut self, ticket: Ticket, answer: &[u8]) -> Result<(), ReplyError<Ticket>> {
        if ticket.nonce != self.nonce {
            return Err(ReplyError::WrongServer(ticket));
        }
        let limit = self.map.shape.response_limit as usize;
        if answer.len() > limit {
            return Err(ReplyError::TooLong { ticket, len: answer.len(), limit });
        }
        let (client, index) = (ticket.client, ticket.client.index() as usize);
        let Some(place) = self.registry.place(index) else { return Err(ReplyError::ClientGone) };
        let account = &mut self.accounts[index];
        if account.key == client && account.unanswered != CUT_OFF {
            account.unanswered = account.unanswered.saturating_sub(1);
        }
        let answering = &self.registry.answering.0;
        if !lease::answer(answering, &place.holder, client.bits().into()) {
            return Err(ReplyError::ClientGone);
        }
        let slot = self.map.response(index, ticket.response.slot());
        slot.put(answer);
        // Release, partner: the Acquire load in `RingTransport::answered`. The answer is visible with it.
        slot.word().store(ticket.response.word(answer.len()), Release);
        lease::answered(answering);
        self.map.clients[index].parker.notify();
        Ok(())
    }

    /// Nothing is there.
    #[inline]
    fn idle(&mut self) {
        self.publish_tail();
        if core::mem::take(&mut self.had_some) {
            self.looks = 0;
            for _ in 0..CATCH_UP_PAUSES {
                core::hint::spin_loop();
            }
        }
        self.found_by_search();
    }

    /// Tells clients which places are free.
    #[inline]
    fn publish_tail(&mut self) {
        if self.told_tail != self.cursor {
            self.told_tail = self.cursor;
            // Release, partner: the Acquire load in `RingTransport::reserve`. What was there has been copied out.
            self.map.top.tail.store(self.cursor, Release);
        }
    }

    /// Searches for holes, if it is time; says whether there is a request behind them.
    #[inline]
    fn found_by_search(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        // Acquire, partner: the Release add in `ClientRegistry::farewell`.
        let left = self.registry.left.load(Acquire);
        let due = left != self.seen_left
            || self.search_until > self.cursor
            || self.looks.is_multiple_of(LOOKS_BEFORE_SEARCH);
        due && self.skip_holes(left)
    }

    /// Skips places that nobody who lives can still fill. Nothing needs to be written there: whoever gets the slot in the
    /// next round overwrites it.
    #[cold]
    fn skip_holes(&mut self, left: u64) -> bool {
        self.seen_left = left;
        // Acquire, partner: the Release reservation in `reservation::reserve`.
        let head = self.map.top.head.load(Acquire);
        // More than the ring has is nothing that clients which keep to the rules reserve: it was scribbled there.
        let reserved = match head.wrapping_sub(self.cursor) {
            reserved if reserved <= self.map.shape.ring_depth.into() => reserved,
            _ => 0,
        };
        self.search_until = self.cursor.wrapping_add(reserved);
        while self.search_until > self.cursor {
            let (registry, cursor) = (&self.registry, self.cursor);
            let published = || self.look_at(cursor).is_some();
            if !reservation::is_abandoned(&self.map.top.head, cursor, registry.live_claims(), published) {
                break;
            }
            self.cursor = self.cursor.wrapping_add(1);
            self.counters.skipped += 1;
        }
        self.publish_tail();
        self.look().is_some()
    }

    /// Ends the connection of a client that broke the rules.
    #[cold]
    fn cut_off(&mut self, client: ClientKey) {
        self.counters.invalid += 1;
        let account = &mut self.accounts[client.index() as usize];
        if core::mem::replace(&mut account.unanswered, CUT_OFF) != CUT_OFF
            && let Some(client) = self.registry.client(client)
        {
            self.counters.violations += 1;
            self.listener.disconnect(client);
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // For people with a debugger; clients hear it from the socket.
        self.map.top.server_alive.store(0, Relaxed);
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
