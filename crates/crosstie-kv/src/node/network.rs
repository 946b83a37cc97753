//! A daemon's connections with other nodes.

use std::collections::VecDeque;

use crosstie::copyrpc::{self, Context, Endpoint, EndpointAddress, RecvHandle};
use crosstie::device::{ConnectConfig, DeviceError, DeviceSpec};
use crosstie::{delegation, flux, ipc};
use zerocopy::IntoBytes;

use super::counters::DaemonActivity;
use super::inside::Inside;
use super::passing::Waiter;
use super::spares::Spares;
use super::strings;
use crate::wire::{self, Status, WordRequest, WordResponse};

/// Bytes of other nodes' byte strings that are at other daemons, for a daemon to take no more requests until they are back.
pub(super) const HANDED_BYTES: usize = 4 << 20;
/// How long a NIC waits for an acknowledgement, seven times: 268 ms, as 4.096 us times a power of two. A node that died is
/// noticed sooner, by its control connection; one that waits for its turn on a core is not to be given up.
const ACK_TIMEOUT: u8 = 16;

/// Where the answer of another node goes.
pub(super) enum Origin {
    /// To a client that wrote into the ring.
    Ring(delegation::Ticket),
    /// To a client of this daemon.
    Client(ipc::Ticket),
    /// To another daemon.
    Daemon(flux::Ticket),
    /// To a client of this daemon, as bytes.
    Long(ipc::Ticket),
}

/// What the control plane has a daemon do. The epoch tells one connection with a rank from the next.
#[derive(Clone, Copy, Debug)]
pub(super) enum Command {
    /// Create an endpoint for a rank; ends the one before.
    Open { rank: u32, epoch: u64 },
    /// Connect it.
    Connect { rank: u32, epoch: u64, address: EndpointAddress },
    /// The other side has connected, too: requests may be sent.
    Enable { rank: u32, epoch: u64 },
    /// End it.
    Close { rank: u32, epoch: u64 },
}

/// What a daemon tells the control plane.
#[derive(Debug)]
pub(super) enum Event {
    /// The endpoint is there.
    Opened { rank: u32, epoch: u64, address: EndpointAddress },
    /// It is connected.
    Connected { rank: u32, epoch: u64 },
    /// Requests are sent.
    Up { rank: u32, epoch: u64 },
    /// It is over.
    Failed { rank: u32, epoch: u64, why: String },
}

/// A daemon's way to other nodes, chosen once when it starts.
pub(super) trait Way {
    /// Takes in what came and sends what is due; says how much that was.
    fn turn(&mut self, inside: &mut Inside) -> usize;
    /// Sends a request to a node. The answer goes to its origin, whatever it is.
    fn call(&mut self, rank: u32, request: &WordRequest, origin: Origin, inside: &mut Inside);
    /// The same with bytes, of which `allowance` come back at most. Says how it ends, if it does at once.
    fn call_long(
        &mut self,
        rank: u32,
        bytes: &[u8],
        allowance: usize,
        ticket: ipc::Ticket,
        counts: &mut DaemonActivity,
    ) -> Result<(), (ipc::Ticket, Status)>;
    /// Answers another node.
    fn reply(&mut self, waiter: u32, answer: &[u8]);
    /// The same, with what another daemon handed back.
    fn reply_handed(&mut self, waiter: u32, answer: Vec<u8>);
    /// Whether answers are yet to come.
    fn in_flight(&self) -> bool;
    /// Does what the control plane says.
    fn command(&mut self, command: Command, inside: &mut Inside) -> Option<Event>;
    /// Looks after connections; hands out those that are over.
    fn tend(&mut self, inside: &mut Inside, each: impl FnMut(Event));
    /// What happened so far.
    fn counters(&self) -> (copyrpc::Counters, delegation::Counters);
}

/// No connections. Nobody asks for any.
pub(super) struct Nowhere;

impl Way for Nowhere {
    #[inline]
    fn turn(&mut self, _: &mut Inside) -> usize {
        0
    }

    fn call(&mut self, _: u32, _: &WordRequest, origin: Origin, inside: &mut Inside) {
        inside.answer(origin, &WordResponse::new(Status::NodeGone, 0), &mut NoRing);
    }

    fn call_long(
        &mut self,
        _: u32,
        _: &[u8],
        _: usize,
        ticket: ipc::Ticket,
        _: &mut DaemonActivity,
    ) -> Result<(), (ipc::Ticket, Status)> {
        Err((ticket, Status::NodeGone))
    }

    fn reply(&mut self, _: u32, _: &[u8]) {}

    fn reply_handed(&mut self, _: u32, _: Vec<u8>) {}

    fn in_flight(&self) -> bool {
        false
    }

    fn command(&mut self, _: Command, _: &mut Inside) -> Option<Event> {
        None
    }

    fn tend(&mut self, _: &mut Inside, _: impl FnMut(Event)) {}

    fn counters(&self) -> (copyrpc::Counters, delegation::Counters) {
        Default::default()
    }
}

/// The ring that clients write into, or none.
pub(super) trait RingSide {
    /// The next request.
    fn next(&mut self) -> Option<(&WordRequest, delegation::Ticket)>;
    /// Answers; says whether anybody waits for it.
    fn reply(&mut self, ticket: delegation::Ticket, response: &WordResponse) -> bool;
    /// What happened so far.
    fn counters(&self) -> delegation::Counters;
}

pub(super) struct NoRing;

impl RingSide for NoRing {
    #[inline]
    fn next(&mut self) -> Option<(&WordRequest, delegation::Ticket)> {
        None
    }

    fn reply(&mut self, _: delegation::Ticket, _: &WordResponse) -> bool {
        false
    }

    fn counters(&self) -> delegation::Counters {
        delegation::Counters::default()
    }
}

pub(super) type Ring = delegation::Server<WordRequest, WordResponse>;

impl RingSide for Ring {
    #[inline]
    fn next(&mut self) -> Option<(&WordRequest, delegation::Ticket)> {
        let asked = self.recv()?;
        Some((asked.message(), asked.defer()))
    }

    #[inline]
    fn reply(&mut self, ticket: delegation::Ticket, response: &WordResponse) -> bool {
        delegation::Server::reply(self, ticket, response).is_ok()
    }

    fn counters(&self) -> delegation::Counters {
        delegation::Server::counters(self)
    }
}

/// Connections with some or all other nodes.
pub(super) struct Network<R> {
    context: Context<Origin>,
    ring: R,
    endpoint: copyrpc::EndpointConfig,
    /// By rank.
    peers: Box<[Peer]>,
    /// Requests of other nodes that daemons of this one work on.
    guests: Guests,
    /// Long answers that found no memory to be sent from. Another node waits for each.
    unanswered: VecDeque<(RecvHandle<Origin>, Vec<u8>)>,
    /// In all backlogs.
    waiting: usize,
    /// As long as the longest byte-string request that came; the last one is in front.
    request: Vec<u8>,
    spares: Spares,
}

#[derive(Default)]
struct Peer {
    endpoint: Option<Endpoint<Origin>>,
    is_up: bool,
    epoch: u64,
    /// What found no room. A client or a daemon waits for each, so there are never more than those may ask at a time.
    backlog: VecDeque<(WordRequest, Origin)>,
    long_backlog: VecDeque<(Vec<u8>, usize, ipc::Ticket)>,
}

impl Peer {
    /// Sends a request, now or when there is room. Its origin comes back if the node is not there.
    #[inline]
    fn send(
        &mut self,
        request: &WordRequest,
        origin: Origin,
        waiting: &mut usize,
        counts: &mut DaemonActivity,
    ) -> Result<(), Origin> {
        counts.sent += 1;
        let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.is_up) else { return Err(origin) };
        let origin = if self.backlog.is_empty() {
            match endpoint.call(request.as_bytes(), size_of::<WordResponse>(), origin) {
                Ok(()) => return Ok(()),
                Err(error) if error.cause.is_back_pressure() => error.user,
                Err(error) => return Err(error.user),
            }
        } else {
            origin
        };
        self.backlog.push_back((*request, origin));
        *waiting += 1;
        counts.backlogged += 1;
        Ok(())
    }
}

/// Requests that wait for another daemon, by number.
#[derive(Default)]
struct Guests {
    places: Vec<Option<(RecvHandle<Origin>, usize)>>,
    free: Vec<u32>,
    /// Of their byte strings, copied to other daemons.
    bytes: usize,
}

impl Guests {
    #[inline]
    fn keep(&mut self, mut guest: RecvHandle<Origin>, bytes: usize) -> u32 {
        // What it says is known; its place in the ring is another's.
        guest.detach();
        self.bytes += bytes;
        match self.free.pop() {
            Some(number) => {
                self.places[number as usize] = Some((guest, bytes));
                number
            }
            None => {
                self.places.push(Some((guest, bytes)));
                self.places.len() as u32 - 1
            }
        }
    }

    #[inline]
    fn take(&mut self, number: u32) -> Option<RecvHandle<Origin>> {
        let (guest, bytes) = self.places.get_mut(number as usize)?.take()?;
        self.bytes -= bytes;
        self.free.push(number);
        Some(guest)
    }

    fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
}

/// Of a daemon's connections.
pub(super) fn config(nodes: u32) -> copyrpc::Config {
    // A rank that comes back may be connected before its predecessor is forgotten.
    copyrpc::Config { max_endpoints: 2 * nodes as usize, ..copyrpc::Config::default() }
}

impl<R: RingSide> Network<R> {
    pub(super) fn open(
        device: &DeviceSpec,
        nodes: u32,
        endpoint: copyrpc::EndpointConfig,
        ring: R,
    ) -> Result<Network<R>, DeviceError> {
        Ok(Network {
            context: Context::open(device, &config(nodes))?,
            ring,
            endpoint,
            peers: (0..nodes).map(|_| Peer::default()).collect(),
            guests: Guests::default(),
            unanswered: VecDeque::new(),
            waiting: 0,
            request: Vec::new(),
            spares: Spares::default(),
        })
    }

    /// Answers of other nodes.
    #[inline]
    fn take_answers(&mut self, inside: &mut Inside) -> usize {
        let ring = &mut self.ring;
        self.context.poll(|origin, result| match (origin, result) {
            (Origin::Long(ticket), Ok(payload)) => inside.long.answer_payload(ticket, payload),
            (origin, result) => {
                let response = match result {
                    // A request that its receiver dropped is answered with nothing.
                    Ok(payload) => payload.read().unwrap_or(WordResponse::new(Status::NodeGone, 0)),
                    Err(_) => WordResponse::new(Status::NodeGone, 0),
                };
                inside.answer(origin, &response, ring);
            }
        })
    }

    /// Requests of other nodes.
    #[inline]
    fn take_requests(&mut self, inside: &mut Inside) -> usize {
        let mut count = 0;
        while self.guests.bytes < HANDED_BYTES
            && let Some(asked) = self.context.recv()
        {
            count += 1;
            let Some(request) = asked.data().read::<WordRequest>() else {
                self.take_long(asked, inside);
                continue;
            };
            let place = inside.placement.shard_of_word(request.key);
            if place == inside.place {
                let response = inside.shard.apply(&request);
                inside.counts.served += 1;
                inside.counts.undelivered += u64::from(asked.reply(response.as_bytes()).is_err());
            } else if place.rank == inside.place.rank {
                let waiter = Waiter::Peer(self.guests.keep(asked, 0));
                inside.counts.forwarded_in += 1;
                if let Err(waiter) = inside.passing.pass(place.daemon, request, waiter) {
                    self.give_up(waiter);
                }
            } else {
                let response = WordResponse::new(Status::Misrouted, 0);
                inside.counts.undelivered += u64::from(asked.reply(response.as_bytes()).is_err());
            }
        }
        count
    }

    /// A request of another node that is not of 8-byte keys.
    #[cold]
    fn take_long(&mut self, asked: RecvHandle<Origin>, inside: &mut Inside) {
        let mut request = std::mem::take(&mut self.request);
        let len = asked.data().len();
        let routed = if len > wire::MAX_REQUEST {
            Err(Status::Malformed)
        } else {
            if request.len() < len {
                request.resize(len, 0);
            }
            asked.data().copy_to(&mut request);
            strings::route(inside.place, &inside.placement, &request[..len])
        };
        match routed {
            Ok((place, call)) if place == inside.place => {
                inside.counts.served += 1;
                let limit = asked.response_limit() as usize;
                self.answer(asked, inside.long.apply(&mut inside.shard, &call, limit));
            }
            Ok((place, _)) if place.rank == inside.place.rank => {
                let waiter = self.guests.keep(asked, len);
                inside.long.pass(place.daemon, waiter, self.spares.copy_of(&request[..len]));
            }
            other => {
                let answer = strings::status(other.err().unwrap_or(Status::Misrouted));
                inside.counts.undelivered += u64::from(asked.reply(&answer).is_err());
            }
        }
        self.request = request;
    }

    fn give_up(&mut self, waiter: Waiter) {
        if let Waiter::Peer(number) = waiter {
            self.reply(number, WordResponse::new(Status::NodeGone, 0).as_bytes());
        }
    }

    /// Clients' requests in the ring.
    #[inline]
    fn take_ring(&mut self, inside: &mut Inside) -> usize {
        let mut count = 0;
        // Looked at where it is, see `Inside::serve_clients`.
        while let Some((request, ticket)) = self.ring.next() {
            count += 1;
            let rank = inside.placement.shard_of_word(request.key).rank;
            let in_vain = if rank == request.rank && rank != inside.place.rank {
                let peer = &mut self.peers[rank as usize];
                let sent = peer.send(request, Origin::Ring(ticket), &mut self.waiting, &mut inside.counts);
                sent.err().map(|origin| (origin, Status::NodeGone))
            } else {
                Some((Origin::Ring(ticket), Status::Misrouted))
            };
            if let Some((origin, status)) = in_vain {
                inside.answer(origin, &WordResponse::new(status, 0), &mut self.ring);
            }
        }
        count
    }

    /// Answers another node, now or when there is memory for it. Nobody waits if the connection is over.
    #[inline]
    fn answer(&mut self, guest: RecvHandle<Origin>, answer: &[u8]) {
        if let Err((cause, Some(guest))) = guest.reply(answer) {
            self.answer_later(cause, guest, answer);
        }
    }

    #[cold]
    fn answer_later(&mut self, cause: copyrpc::NotReplied, guest: RecvHandle<Origin>, answer: &[u8]) {
        if cause.is_back_pressure() {
            self.unanswered.push_back((guest, self.spares.copy_of(answer)));
            self.waiting += 1;
            return;
        }
        // Longer than the peer allowed. It gets the status alone.
        drop(guest.reply(&strings::status(Status::Malformed)));
    }

    /// Tries again with what found no room.
    #[cold]
    fn retry(&mut self) {
        for _ in 0..self.unanswered.len() {
            if let Some((guest, answer)) = self.unanswered.pop_front() {
                self.waiting -= 1;
                match guest.reply(&answer) {
                    Err((cause, Some(guest))) if cause.is_back_pressure() => {
                        self.unanswered.push_back((guest, answer));
                        self.waiting += 1;
                        continue;
                    }
                    Err((cause, Some(guest))) => self.answer_later(cause, guest, &answer),
                    Ok(()) | Err((_, None)) => {}
                }
                self.spares.give(answer);
            }
        }
        for peer in &mut self.peers {
            let Some(endpoint) = &peer.endpoint else { continue };
            while let Some((request, origin)) = peer.backlog.pop_front() {
                self.waiting -= 1;
                if let Err(error) = endpoint.call(request.as_bytes(), size_of::<WordResponse>(), origin) {
                    // Also if the connection is over: the next look at it ends all that wait.
                    peer.backlog.push_front((request, error.user));
                    self.waiting += 1;
                    break;
                }
            }
            while let Some((bytes, allowance, ticket)) = peer.long_backlog.pop_front() {
                self.waiting -= 1;
                if let Err(error) = endpoint.call(&bytes, allowance, Origin::Long(ticket)) {
                    if let Origin::Long(ticket) = error.user {
                        peer.long_backlog.push_front((bytes, allowance, ticket));
                        self.waiting += 1;
                    }
                    break;
                }
                self.spares.give(bytes);
            }
        }
    }

    /// Ends the connection with a rank. All that waits for it ends as [`Status::NodeGone`].
    fn close(&mut self, rank: u32, inside: &mut Inside) {
        let peer = &mut self.peers[rank as usize];
        peer.is_up = false;
        let mut over = peer.endpoint.take().map_or(Vec::new(), Endpoint::close);
        self.waiting -= peer.backlog.len() + peer.long_backlog.len();
        over.extend(peer.backlog.drain(..).map(|(_, origin)| origin));
        over.extend(peer.long_backlog.drain(..).map(|(_, _, ticket)| Origin::Long(ticket)));
        for origin in over {
            inside.answer(origin, &WordResponse::new(Status::NodeGone, 0), &mut self.ring);
        }
    }
}

impl<R: RingSide> Way for Network<R> {
    #[inline]
    fn turn(&mut self, inside: &mut Inside) -> usize {
        let mut count = self.take_answers(inside);
        count += self.take_requests(inside);
        if self.waiting > 0 {
            self.retry();
        }
        count + self.take_ring(inside)
    }

    #[inline]
    fn call(&mut self, rank: u32, request: &WordRequest, origin: Origin, inside: &mut Inside) {
        let peer = &mut self.peers[rank as usize];
        if let Err(origin) = peer.send(request, origin, &mut self.waiting, &mut inside.counts) {
            inside.answer(origin, &WordResponse::new(Status::NodeGone, 0), &mut self.ring);
        }
    }

    fn call_long(
        &mut self,
        rank: u32,
        bytes: &[u8],
        allowance: usize,
        ticket: ipc::Ticket,
        counts: &mut DaemonActivity,
    ) -> Result<(), (ipc::Ticket, Status)> {
        counts.sent += 1;
        let peer = &mut self.peers[rank as usize];
        let up = peer.endpoint.as_ref().filter(|_| peer.is_up);
        let Some((endpoint, (_, longest))) = up.and_then(|up| Some((up, up.max_lengths()?))) else {
            return Err((ticket, Status::NodeGone));
        };
        let allowance = allowance.min(longest);
        let ticket = if peer.long_backlog.is_empty() {
            let Err(error) = endpoint.call(bytes, allowance, Origin::Long(ticket)) else { return Ok(()) };
            let Origin::Long(ticket) = error.user else { return Ok(()) };
            match error.cause {
                cause if cause.is_back_pressure() => ticket,
                copyrpc::NotCalled::Failed(_) | copyrpc::NotCalled::NotConnected => {
                    return Err((ticket, Status::NodeGone));
                }
                // Longer than this connection carries.
                _ => return Err((ticket, Status::Malformed)),
            }
        } else {
            // Behind those that came before it.
            ticket
        };
        peer.long_backlog.push_back((self.spares.copy_of(bytes), allowance, ticket));
        self.waiting += 1;
        Ok(())
    }

    #[inline]
    fn reply(&mut self, waiter: u32, answer: &[u8]) {
        if let Some(guest) = self.guests.take(waiter) {
            self.answer(guest, answer);
        }
    }

    fn reply_handed(&mut self, waiter: u32, answer: Vec<u8>) {
        self.reply(waiter, &answer);
        self.spares.give(answer);
    }

    #[inline]
    fn in_flight(&self) -> bool {
        self.waiting > 0
            || self.guests.len() > 0
            || self.peers.iter().any(|peer| peer.endpoint.as_ref().is_some_and(|end| end.pending_calls() > 0))
    }

    fn command(&mut self, command: Command, inside: &mut Inside) -> Option<Event> {
        match command {
            Command::Open { rank, epoch } => {
                self.close(rank, inside);
                let peer = &mut self.peers[rank as usize];
                peer.epoch = epoch;
                match self.context.create_endpoint(&self.endpoint) {
                    Ok(endpoint) => {
                        let address = endpoint.address();
                        peer.endpoint = Some(endpoint);
                        Some(Event::Opened { rank, epoch, address })
                    }
                    Err(error) => Some(Event::Failed { rank, epoch, why: error.to_string() }),
                }
            }
            Command::Connect { rank, epoch, address } => {
                let endpoint = self.current(rank, epoch)?.endpoint.as_ref()?;
                let connect = ConnectConfig { timeout: ACK_TIMEOUT, ..ConnectConfig::default() };
                match endpoint.connect(&address, &connect) {
                    Ok(()) => Some(Event::Connected { rank, epoch }),
                    Err(error) => {
                        self.close(rank, inside);
                        Some(Event::Failed { rank, epoch, why: error.to_string() })
                    }
                }
            }
            Command::Enable { rank, epoch } => {
                let peer = self.current(rank, epoch)?;
                peer.is_up = peer.endpoint.is_some();
                Some(Event::Up { rank, epoch })
            }
            Command::Close { rank, epoch } => {
                self.current(rank, epoch)?;
                self.close(rank, inside);
                None
            }
        }
    }

    fn tend(&mut self, inside: &mut Inside, mut each: impl FnMut(Event)) {
        for rank in 0..self.peers.len() {
            let peer = &self.peers[rank];
            let epoch = peer.epoch;
            if let Some(failure) = peer.endpoint.as_ref().and_then(Endpoint::failure) {
                let rank = rank as u32;
                self.close(rank, inside);
                each(Event::Failed { rank, epoch, why: failure.to_string() });
            }
        }
    }

    fn counters(&self) -> (copyrpc::Counters, delegation::Counters) {
        (self.context.counters(), self.ring.counters())
    }
}

impl<R> Network<R> {
    fn current(&mut self, rank: u32, epoch: u64) -> Option<&mut Peer> {
        self.peers.get_mut(rank as usize).filter(|peer| peer.epoch == epoch)
    }
}
