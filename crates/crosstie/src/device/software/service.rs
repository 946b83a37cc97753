//! The device's thread: lets peers in, notices when they are gone, and cleans up behind them.
//!
//! It never waits for a peer, only for events: whatever cannot be done yet stays on a list and is looked at again.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll};
use rustix::time::Timespec;
use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, MAX_PAYLOAD, Reply, Request};
use super::cqring::{CqRing, Entry};
use super::layout::{CqeKind, IN_PLACE, LINES_AT, MAX_LINES, PeerLine, RegionKey, short_epoch};
use super::link::Link;
use super::qp::{QpLocal, Recv};
use super::setup::{Inner, locked};
use crate::device::{Access, Event, Opcode, QpState, Status};
use crate::local::socket::{self, Peer};
use crate::memory::copy::copy;
use crate::memory::segment::SharedRef;
use crate::ring::{fence, reservation};

/// Connections from peers at most; a device has one per peer device.
const MAX_PEERS: usize = 4096;
/// How often unfinished business is looked at.
const RECHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// How others reach the thread.
#[derive(Debug)]
pub(super) struct Mailbox {
    poll: OwnedFd,
    bell: OwnedFd,
    flushes: Mutex<Vec<Arc<QpLocal>>>,
    links: Mutex<HashMap<u64, Arc<Link>>>,
    next_id: AtomicU64,
    /// The claim of whoever holds `healing`.
    claim: AtomicU64,
    pub(super) healing: Mutex<()>,
}

const LISTENER: u64 = 0;
const BELL: u64 = 1;
/// Tokens above these two are `id << 2 | kind`.
const PEER_SOCKET: u64 = 0;
const PEER_PROCESS: u64 = 1;
const LINK_SOCKET: u64 = 2;
const LINK_PROCESS: u64 = 3;

impl Mailbox {
    /// The mailbox, and the socket that the thread will answer on.
    pub(super) fn open(gid: &[u8; 16]) -> io::Result<(Mailbox, OwnedFd)> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let listener = control::listen(gid)?;
        add(&poll, &bell, BELL)?;
        add(&poll, &listener, LISTENER)?;
        let mailbox = Mailbox {
            poll,
            bell,
            flushes: Mutex::default(),
            links: Mutex::default(),
            next_id: AtomicU64::new(1),
            claim: AtomicU64::new(reservation::IDLE),
            healing: Mutex::new(()),
        };
        Ok((mailbox, listener))
    }

    pub(super) fn wake(&self) {
        // The only failure is a counter at its limit, and then the bell is ringing already.
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).ok();
    }

    /// Has a queue pair's receives flushed.
    pub(super) fn flush(&self, qp: &Arc<QpLocal>) {
        locked(&self.flushes).push(qp.clone());
        self.wake();
    }

    /// Has the peer behind a link watched.
    pub(super) fn watch(&self, link: &Arc<Link>) -> io::Result<()> {
        let id = self.next_id.fetch_add(1, Relaxed);
        locked(&self.links).insert(id, link.clone());
        add(&self.poll, link.watch(), id << 2 | LINK_SOCKET)?;
        match &link.process {
            Some(process) => add(&self.poll, process, id << 2 | LINK_PROCESS),
            None => Ok(()),
        }
    }

    /// Fills what a dead peer left reserved for this queue pair. False if that could not be told in time.
    pub(super) fn settle_dead_claim(&self, inner: &Inner, qp: &QpLocal, patience: Duration) -> bool {
        let begun = Instant::now();
        loop {
            match qp.requester() {
                Some((line, gid)) if !inner.peer_connected(&gid) => {
                    if heal(inner, &line, &qp.recv_cq.ring) {
                        return true;
                    }
                }
                _ => return true,
            }
            if begun.elapsed() > patience {
                return false;
            }
            std::thread::yield_now();
        }
    }
}

fn add(poll: &OwnedFd, source: impl AsFd, token: u64) -> io::Result<()> {
    Ok(epoll::add(poll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?)
}

/// A peer that connected to us.
struct Visitor {
    socket: OwnedFd,
    process: Option<OwnedFd>,
    same_user: bool,
    /// Known after its first message.
    gid: Option<[u8; 16]>,
}

/// Something that has to wait until a peer moves on.
enum Unfinished {
    /// A queue pair in ERR: its peer may be inside an operation that began with this `busy`.
    Flush { qp: Arc<QpLocal>, busy: Option<u64> },
    /// A line of a datagram sender that is gone.
    Line { index: u32 },
}

/// Runs until the device is closed.
pub(super) fn run(inner: &Arc<Inner>, listener: OwnedFd) {
    let mut service = Service {
        inner: inner.clone(),
        listener,
        peers: HashMap::new(),
        unfinished: Vec::new(),
        payload: vec![0; MAX_PAYLOAD],
    };
    let mut events = Vec::with_capacity(64);
    while !inner.closing() {
        let timeout = (!service.unfinished.is_empty()).then_some(RECHECK);
        events.clear();
        match epoll::wait(&inner.service.poll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref())
        {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // The descriptor is ours and valid; there is nothing sensible left if that is no longer so.
            Err(_) => break,
        }
        for event in &events {
            service.handle(event.data.u64());
        }
        service.finish();
    }
}

struct Service {
    inner: Arc<Inner>,
    listener: OwnedFd,
    peers: HashMap<u64, Visitor>,
    unfinished: Vec<Unfinished>,
    payload: Vec<u8>,
}

impl Service {
    fn handle(&mut self, token: u64) {
        match token {
            LISTENER => self.accept(),
            BELL => {
                let mut count = [0; 8];
                // Nothing to read means that the bell was answered already.
                rustix::io::read(&self.inner.service.bell, &mut count).ok();
            }
            _ => match token & 3 {
                PEER_SOCKET => self.serve(token >> 2),
                PEER_PROCESS => self.peer_gone(token >> 2),
                _ => self.link_gone(token),
            },
        }
    }

    fn accept(&mut self) {
        let flags = rustix::net::SocketFlags::CLOEXEC;
        loop {
            let socket = match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                    // The peer stays in the queue and would wake us at once: wait for descriptors to come free.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
                Err(_) => return,
            };
            if self.peers.len() >= MAX_PEERS {
                continue;
            }
            let Ok(peer) = Peer::of(&socket) else { continue };
            let Ok(process) = peer.process() else { continue };
            let id = self.inner.service.next_id.fetch_add(1, Relaxed);
            let watched =
                add(&self.inner.service.poll, &socket, id << 2 | PEER_SOCKET).and_then(|()| match &process {
                    Some(process) => add(&self.inner.service.poll, process, id << 2 | PEER_PROCESS),
                    None => Ok(()),
                });
            if watched.is_ok() {
                let same_user = peer.is_our_user();
                self.peers.insert(id, Visitor { socket, process, same_user, gid: None });
            }
        }
    }

    /// One message of a peer. Whoever speaks nonsense is cut off.
    fn serve(&mut self, id: u64) {
        let Some(peer) = self.peers.get(&id) else { return };
        let mut request = Request::new_zeroed();
        let Ok((len, _)) = socket::receive(&peer.socket, request.as_mut_bytes(), &mut self.payload) else {
            return self.peer_gone(id);
        };
        let (reply, keep) = match (peer.gid, request.kind) {
            (None, Request::HELLO) => self.welcome(id, &request),
            (None, _) | (Some(_), Request::HELLO) => (Some(Reply::new(Reply::MALFORMED, 0)), false),
            (Some(gid), kind) => self.answer(gid, kind, &request, len),
        };
        let Some(peer) = self.peers.get(&id) else { return };
        if let Some(reply) = reply {
            let welcome = request.kind == Request::HELLO && reply.status == Reply::OK;
            let file = welcome.then(|| self.inner.segment.fd());
            let wants = request.kind == Request::READ && reply.status == Reply::OK;
            let bytes = if wants { &self.payload[..request.a as usize] } else { &[] };
            if socket::send(&peer.socket, reply.as_bytes(), bytes, file.as_slice()).is_err() {
                return self.peer_gone(id);
            }
        }
        if !keep {
            self.peer_gone(id);
        }
    }

    fn welcome(&mut self, id: u64, hello: &Request) -> (Option<Reply>, bool) {
        let Some(peer) = self.peers.get_mut(&id) else { return (None, false) };
        if !peer.same_user {
            return (Some(Reply::new(Reply::OTHER_USER, 0)), false);
        }
        if hello.version != control::VERSION || hello.a != super::layout::MAGIC {
            return (Some(Reply::new(Reply::OTHER_VERSION, 0)), false);
        }
        peer.gid = Some(hello.gid);
        *locked(&self.inner.peers).entry(hello.gid).or_default() += 1;
        (Some(Reply::new(Reply::OK, self.inner.segment.len())), true)
    }

    fn answer(&mut self, gid: [u8; 16], kind: u32, request: &Request, len: usize) -> (Option<Reply>, bool) {
        match kind {
            Request::LINE => (Some(self.give_line(gid)), true),
            Request::QP_ERROR | Request::CQ_OVERRUN => {
                // Only a queue pair's own peer may break it, and only the connection that it means; to datagram queue
                // pairs anybody is a peer.
                if let Some(qp) = self.inner.qp(request.qp_num) {
                    let meant = |qp: &QpLocal| {
                        qp.epoch() == request.a && (qp.is_connected_to(&gid) || qp.is_datagram())
                    };
                    if self.break_if(&qp, meant) {
                        let overrun = kind == Request::CQ_OVERRUN;
                        self.inner.emit(if overrun { Event::CqOverrun } else { Event::QpAccess(qp.num) });
                    }
                }
                (None, true)
            }
            Request::WRITE | Request::READ | Request::COMPARE_SWAP | Request::FETCH_ADD => {
                match self.reach(kind, request, len) {
                    Some(value) => (Some(Reply::new(Reply::OK, value)), true),
                    None => (Some(Reply::new(Reply::NO_SUCH_REGION, 0)), true),
                }
            }
            _ => (Some(Reply::new(Reply::MALFORMED, 0)), false),
        }
    }

    fn give_line(&mut self, gid: [u8; 16]) -> Reply {
        let mut table = locked(&self.inner.line_owners);
        let free = table.owners.iter().position(Option::is_none);
        let index = match free {
            Some(index) => index,
            None if table.owners.len() < MAX_LINES as usize => {
                table.owners.push(None);
                table.owners.len() - 1
            }
            None => return Reply::new(Reply::EXHAUSTED, 0),
        };
        table.owners[index] = Some(gid);
        self.inner.lines[index].claim.store(reservation::IDLE, Relaxed);
        Reply::new(Reply::OK, index as u64)
    }

    /// An operation on memory in place, for a peer that cannot do it itself.
    fn reach(&mut self, kind: u32, request: &Request, payload: usize) -> Option<u64> {
        let len = match kind {
            Request::WRITE | Request::READ => request.a,
            _ => 8,
        };
        if len > MAX_PAYLOAD as u64 || (kind == Request::WRITE && payload as u64 != len) {
            return None;
        }
        let entry = &self.inner.regions[RegionKey::from_bits(request.key).index() as usize];
        let access = Access::from_bits_truncate(entry.access.load(Relaxed));
        let needs = match kind {
            // A receive's memory is written this way too, and needs no more than this.
            Request::WRITE => Access::LOCAL_WRITE,
            Request::READ => Access::REMOTE_READ,
            _ => Access::REMOTE_ATOMIC,
        };
        let offset = request.addr.wrapping_sub(entry.addr.load(Relaxed));
        let size = entry.len.load(Relaxed);
        // Acquire, partner: the Release store in `Pd::enter`.
        if request.key == 0
            || entry.key.load(Acquire) != request.key
            || entry.offset.load(Relaxed) != IN_PLACE
            || !access.contains(needs)
            || offset > size
            || len > size - offset
        {
            return None;
        }
        let at = core::ptr::with_exposed_provenance_mut::<u8>(request.addr as usize);
        // SAFETY: the memory is registered here, so its owner keeps it valid; the region cannot go meanwhile, because the
        // peer that waits for us is marked busy. The payload is as long as `len`, which is at most `MAX_PAYLOAD`.
        unsafe {
            match kind {
                Request::WRITE => copy(self.payload.as_ptr(), at, len as usize),
                Request::READ => copy(at, self.payload.as_mut_ptr(), len as usize),
                _ if !at.cast::<u64>().is_aligned() => return None,
                Request::COMPARE_SWAP => {
                    use std::sync::atomic::Ordering::SeqCst;
                    let word = AtomicU64::from_ptr(at.cast());
                    let (Ok(former) | Err(former)) =
                        word.compare_exchange(request.a, request.b, SeqCst, SeqCst);
                    return Some(former);
                }
                _ => {
                    let word = AtomicU64::from_ptr(at.cast());
                    return Some(word.fetch_add(request.a, std::sync::atomic::Ordering::SeqCst));
                }
            }
        }
        Some(0)
    }

    /// A peer closed its connection or died: nobody uses its way into our segment any more.
    fn peer_gone(&mut self, id: u64) {
        let Some(peer) = self.peers.remove(&id) else { return };
        for source in [Some(&peer.socket), peer.process.as_ref()].into_iter().flatten() {
            // Closing the descriptors, which follows, would do it too.
            epoll::delete(&self.inner.service.poll, source).ok();
        }
        let Some(gid) = peer.gid else { return };
        {
            let mut peers = locked(&self.inner.peers);
            if let Some(count) = peers.get_mut(&gid) {
                *count -= 1;
                if *count > 0 {
                    return;
                }
            }
            peers.remove(&gid);
        }
        self.break_all(&gid);
        let mut lines = Vec::new();
        for (index, owner) in locked(&self.inner.line_owners).owners.iter().enumerate() {
            if *owner == Some(gid) {
                lines.push(Unfinished::Line { index: index as u32 });
            }
        }
        self.unfinished.extend(lines);
    }

    /// A peer that we connected to closed or died.
    fn link_gone(&mut self, token: u64) {
        let Some(link) = locked(&self.inner.service.links).get(&(token >> 2)).cloned() else { return };
        if token & 3 == LINK_SOCKET {
            // Answers to a request arrive here too, and are for whoever asked. Only an end is for us.
            let mut probe = [0u8; 1];
            let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
            match rustix::net::recv(link.watch(), &mut probe, flags) {
                Ok((_, 0)) => {}
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Err(_) => {}
            }
        }
        locked(&self.inner.service.links).remove(&(token >> 2));
        epoll::delete(&self.inner.service.poll, link.watch()).ok();
        if let Some(process) = &link.process {
            epoll::delete(&self.inner.service.poll, process).ok();
        }
        link.mark_dead();
        self.inner.forget_link(&link);
        self.break_all(&link.gid);
    }

    fn break_all(&self, gid: &[u8; 16]) {
        for qp in self.inner.all_qps() {
            if self.break_if(&qp, |qp| qp.is_connected_to(gid) && qp.state() != QpState::Reset) {
                self.inner.emit(Event::QpFatal(qp.num));
            }
        }
    }

    /// Breaks a queue pair if `meant` holds for the connection it has now. A reset cannot come between.
    fn break_if(&self, qp: &Arc<QpLocal>, meant: impl FnOnce(&QpLocal) -> bool) -> bool {
        let _one_at_a_time = locked(&self.inner.service.healing);
        meant(qp) && qp.break_off()
    }

    /// Takes on what was asked for, and does what can be done.
    fn finish(&mut self) {
        let asked = std::mem::take(&mut *locked(&self.inner.service.flushes));
        self.unfinished.extend(asked.into_iter().map(|qp| Unfinished::Flush { qp, busy: None }));
        let inner = self.inner.clone();
        self.unfinished.retain_mut(|item| match item {
            Unfinished::Flush { qp, busy } => !flushed(&inner, qp, busy),
            Unfinished::Line { index } => !line_cleared(&inner, *index),
        });
    }
}

/// Puts the marker behind everything that the peer completed, if the peer can complete no more.
fn flushed(inner: &Inner, qp: &Arc<QpLocal>, busy: &mut Option<u64>) -> bool {
    if qp.destroyed.load(Acquire) {
        return true;
    }
    if let Some((line, gid)) = qp.requester() {
        if inner.peer_connected(&gid) {
            let seen = *busy.get_or_insert_with(|| {
                // The peer has seen that the connection is closed, or we see that it is inside.
                fence::heavy();
                line.busy.load(Acquire)
            });
            // Acquire, partner: the Release store when an operation ends.
            if seen & 1 == 1 && line.busy.load(Acquire) == seen {
                return false;
            }
        } else if !heal(inner, &line, &qp.recv_cq.ring) {
            return false;
        }
    }
    let _one_at_a_time = locked(&inner.service.healing);
    // A reset takes the same lock: from here on the queue pair has no peer that could push beside us.
    if qp.state() != QpState::Error {
        return true;
    }
    let done = qp.recv_cq.ring.try_push(&inner.service.claim, &qp.flush_marker());
    if done && matches!(qp.recv, Recv::Shared(_)) {
        inner.emit(Event::LastReceiveTaken(qp.num));
    }
    done
}

/// Returns what a datagram sender that is gone had taken, and its line.
fn line_cleared(inner: &Inner, index: u32) -> bool {
    let line: Option<SharedRef<PeerLine>> = SharedRef::new(&inner.segment, LINES_AT + 64 * u64::from(index));
    let Some(line) = line else { return true };
    if line.claim.load(Relaxed) != reservation::IDLE
        && let Some(ring) = CqRing::new(&inner.segment, line.ring.load(Relaxed))
        && !heal(inner, &line, &ring)
    {
        return false;
    }
    for qp in inner.all_qps().into_iter().filter(|qp| qp.is_datagram()) {
        let entry = Entry {
            kind: CqeKind::Reclaim,
            opcode: Opcode::Unspecified,
            status: Status::RemoteAborted,
            wr: index.into(),
            qp_num: qp.num,
            byte_len: 0,
            extra: 0,
            has_imm: false,
            epoch: short_epoch(qp.epoch()),
        };
        let _one_at_a_time = locked(&inner.service.healing);
        // A marker more than once finds nothing the second time.
        if !qp.recv_cq.ring.try_push(&inner.service.claim, &entry) {
            return false;
        }
    }
    line.claim.store(reservation::IDLE, Relaxed);
    locked(&inner.line_owners).owners[index as usize] = None;
    true
}

/// Fills the place that a dead peer reserved in one of our rings and did not publish. False if that cannot be told yet.
fn heal(inner: &Inner, dead: &PeerLine, ring: &CqRing) -> bool {
    let _one_at_a_time = locked(&inner.service.healing);
    let position = dead.claim.load(Acquire);
    let header = &*ring.header;
    let head = header.head.word.load(Acquire);
    let settled = position == reservation::IDLE
        || position >= head
        // Acquire, partner: the Release store in `Cq::poll`. It was read, so it was published.
        || header.consumed.word.load(Acquire) > position
        || ring.published(position);
    if !settled {
        let qps = inner.all_qps();
        let mut live: Vec<&AtomicU64> = vec![&inner.service.claim];
        let requesters: Vec<_> = qps.iter().filter_map(|qp| qp.requester()).collect();
        for (line, gid) in &requesters {
            if inner.peer_connected(gid) {
                live.push(&line.claim);
            }
        }
        live.extend(qps.iter().map(|qp| &qp.send_claim));
        let lines: Vec<SharedRef<PeerLine>> = locked(&inner.line_owners)
            .owners
            .iter()
            .enumerate()
            .filter(|(_, owner)| owner.is_some_and(|gid| inner.peer_connected(&gid)))
            .filter_map(|(index, _)| SharedRef::new(&inner.segment, LINES_AT + 64 * index as u64))
            .collect();
        live.extend(lines.iter().map(|line| &line.claim));
        // Claims in other rings of the same device count as well; an equal number there only makes us look again.
        if !reservation::is_abandoned(&header.head.word, position, live.into_iter(), || {
            ring.published(position)
        }) {
            return false;
        }
        ring.void(position);
    }
    dead.claim.store(reservation::IDLE, Relaxed);
    true
}
