//! The service thread of a device: accepts peers, notices when they are gone, and cleans up after them.
//!
//! The thread never blocks on a peer, only on epoll: its sockets do not block, no thread waits for a peer while it has a lock that the
//! service thread needs, and a peer that does not read its replies is disconnected. Cleanup that has to wait for a peer
//! (`quiescence.rs`) stays on a list and is tried again: after a millisecond, then less and less often.
//!
//! **Limits.** A connection of another user is closed when it is accepted. A peer has [a second](AwaitingHello) to send its
//! HELLO, and at most [`MAX_AWAITING_HELLO`] may be waiting for theirs. [`MAX_PEERS`] peers may be connected, and
//! [`MAX_PEERS_PER_PROCESS`] of one other process; fewer, if this process may open few files ([`most_peers`]). The process that says
//! HELLO for a device must be the one that listens under the device's name: another one would get the peer lines of that device. So it
//! must be visible here. A peer that sends files is cut off.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::process::{Pid, Resource, getrlimit};
use rustix::time::Timespec;
use zerocopy::{FromZeros, IntoBytes};

use super::abandoned::void_reservation;
use super::control::{self, MAX_PAYLOAD, Reply, Request};
use super::cq_shared::{CqShared, Notice, ReturnedRecvs};
use super::layout::{ConnectionWord, IN_PLACE, MAGIC, RegionKey, taker_of_datagram_sender};
use super::lock::locked;
use super::peer_lines::{AssignedLine, LineUse};
use super::qp::{QpShared, RecvSource};
use super::quiescence::{MAX_RECHECK, PeerDeparture, Quiescence};
use super::region_keys;
use super::shared_recv::{SharedRecvQueue, TakenSlot};
use super::state::{DeviceShared, FlushRequest};
use super::watch::{LISTENER, PEER_PROCESS, PEER_SOCKET, WAKEUP, Watch};
use crate::device::{Access, Event, QpState, Status};
use crate::local::awaiting_hello::{self, AwaitingHello, MAX_AWAITING_HELLO};
use crate::local::socket::{self, ListeningSocket, Peer, Socket};
use crate::memory::copy::copy;
use crate::ring::reservation;

/// Limit on connections from peers that have sent their HELLO; a peer device has one.
const MAX_PEERS: usize = 4096;
/// The same, for the devices of one other process.
const MAX_PEERS_PER_PROCESS: usize = 128;
/// Files that a connected peer keeps open here: its socket, its pidfd, and the segment with its peer lines.
const FILES_PER_PEER: u64 = 3;
/// How soon pending cleanup is tried again; the time doubles with every attempt, up to [`MAX_RECHECK`].
const FIRST_RECHECK: Duration = Duration::from_millis(1);
/// How long accepting pauses when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// How many peers, and how many of one other process, may be connected: all peers take at most three quarters of the files that this
/// process may open (`files`), and those of one process an eighth.
pub(super) fn most_peers(files: u64) -> (usize, usize) {
    let most = |share: u64, limit: usize| limit.min(usize::try_from(share / FILES_PER_PEER).unwrap_or(limit));
    (most(files / 4 * 3, MAX_PEERS), most(files / 8, MAX_PEERS_PER_PROCESS))
}

/// What a new device waits for, and the socket on which its service thread accepts peers.
pub(super) fn open(gid: &[u8; 16]) -> io::Result<(Watch, ListeningSocket)> {
    let watch = Watch::open()?;
    let listener = control::listen(gid)?;
    watch.add(&listener, LISTENER)?;
    Ok((watch, listener))
}

/// A peer that connected to this device.
struct InboundPeer {
    socket: Socket,
    /// Its process; `None` if that is this process.
    pid: Option<Pid>,
    /// Neither is known for a process in a PID namespace that we do not see. It gets nothing.
    is_visible: bool,
    /// The pidfd of its process; `None` if that is this process.
    process: Option<OwnedFd>,
    /// Known after its HELLO.
    gid: Option<[u8; 16]>,
    /// We ended the connection, but the peer has not closed its end yet.
    is_cut_off: bool,
}

/// Cleanup that may have to wait for a peer.
enum PendingCleanup {
    /// Flush the receives of a queue pair in ERR.
    Flush(PendingFlush),
    /// Reclaim the peer lines of datagram senders that are gone, and what they had taken.
    DatagramSenders(Vec<(AssignedLine, u32)>),
}

/// A queue pair in ERR whose receives are to be flushed.
#[derive(Debug)]
struct PendingFlush {
    qp: Arc<QpShared>,
    /// As [`FlushRequest::epoch`].
    epoch: u64,
    /// RC: its peer, which may be inside an operation.
    peer: PeerDeparture,
    /// UD: senders that may be inside an operation.
    senders: Option<Quiescence>,
}

/// Runs the service thread until the device is closed.
pub(super) fn run(device: &Arc<DeviceShared>, listener: ListeningSocket) {
    let mut service = Service {
        device: device.clone(),
        listener,
        peers: HashMap::new(),
        awaiting_hello: AwaitingHello::default(),
        accept_again: None,
        pending: Vec::new(),
        payload: vec![0; MAX_PAYLOAD],
    };
    let mut events = Vec::with_capacity(64);
    let mut recheck: Option<Duration> = None;
    while !device.is_closing() {
        let timeout = service.timeout(Instant::now(), recheck).map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        events.clear();
        match epoll::wait(&device.watch.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref())
        {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Cannot happen as long as the descriptor is valid, and only this device can close it.
            Err(_) => break,
        }
        for event in &events {
            service.handle_event(event.data.u64());
        }
        if device.watch.wakeup.take_broken_link() {
            service.forget_broken_links();
        }
        let is_pending = service.run_pending_cleanup() | device.finish_removals();
        recheck = match recheck {
            _ if !is_pending => None,
            Some(last) if events.is_empty() => Some((last * 2).min(MAX_RECHECK)),
            _ => Some(FIRST_RECHECK),
        };
        service.close_late_peers(Instant::now());
    }
}

struct Service {
    device: Arc<DeviceShared>,
    listener: ListeningSocket,
    /// By the id in their epoll tokens.
    peers: HashMap<u64, InboundPeer>,
    /// Those of `peers` that have not sent their HELLO yet.
    awaiting_hello: AwaitingHello,
    /// Set while there are no descriptors left: when to accept again. Until then the events of `listener` are disabled.
    accept_again: Option<Instant>,
    pending: Vec<PendingCleanup>,
    payload: Vec<u8>,
}

impl Service {
    fn handle_event(&mut self, token: u64) {
        match token {
            LISTENER => self.accept_peers(),
            WAKEUP => self.device.watch.wakeup.reset(),
            _ => match token & 3 {
                PEER_SOCKET => self.serve_peer(token >> 2),
                PEER_PROCESS => self.remove_peer(token >> 2),
                _ => self.forget_link(token >> 2),
            },
        }
    }

    /// How long the thread may sleep, if pending cleanup is tried again after `recheck`.
    fn timeout(&self, now: Instant, recheck: Option<Duration>) -> Option<Duration> {
        let clock = [self.accept_again, self.awaiting_hello.next_deadline()].into_iter().flatten().min();
        // One millisecond is added, because the kernel may wake us a little early.
        let clock = clock.map(|at| at.saturating_duration_since(now) + Duration::from_millis(1));
        [recheck, clock].into_iter().flatten().min()
    }

    /// Disconnects peers that did not send their HELLO in time, and accepts again after a pause.
    fn close_late_peers(&mut self, now: Instant) {
        while let Some(id) = self.awaiting_hello.take_late(now) {
            self.remove_peer(id);
        }
        if self.accept_again.is_some_and(|at| at <= now) {
            self.enable_accepting(true);
            self.accept_again = None;
        }
    }

    fn enable_accepting(&self, enabled: bool) {
        let flags = if enabled { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let token = epoll::EventData::new_u64(LISTENER);
        // Cannot fail: the listener was added before. If it did, the thread would only wake more often.
        epoll::modify(&self.device.watch.epoll, &self.listener, token, flags).ok();
    }

    fn accept_peers(&mut self) {
        // If more connections are pending, the next event accepts them.
        for _ in 0..MAX_AWAITING_HELLO {
            match awaiting_hello::accept(&self.listener) {
                Ok(Some((socket, peer))) => self.add_peer(socket, peer),
                Ok(None) => return,
                Err(_) => {
                    // The peer stays in the backlog and would wake us again at once: give descriptors time to be freed.
                    self.enable_accepting(false);
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// Adds a peer that has just connected. It is disconnected if it cannot be watched.
    fn add_peer(&mut self, socket: Socket, peer: Peer) {
        let Ok(process) = peer.process() else { return };
        let watch = &self.device.watch;
        let id = watch.take_id();
        let watched = watch.add(&socket, id << 2 | PEER_SOCKET).and_then(|()| match &process {
            Some(process) => watch.add(process, id << 2 | PEER_PROCESS),
            None => Ok(()),
        });
        if watched.is_ok() {
            let pid = peer.pid.filter(|_| !peer.is_this_process());
            let is_visible = peer.pid.is_some();
            let peer = InboundPeer { socket, pid, is_visible, process, gid: None, is_cut_off: false };
            self.peers.insert(id, peer);
            if let Some(oldest) = self.awaiting_hello.add(id, Instant::now()) {
                self.remove_peer(oldest);
            }
        }
    }

    /// Handles one message of a peer. A peer that sends a malformed message is disconnected.
    fn serve_peer(&mut self, id: u64) {
        let Some(peer) = self.peers.get(&id) else { return };
        let mut request = Request::new_zeroed();
        if peer.is_cut_off {
            // Only the end of the connection is reported for it.
            return self.remove_peer(id);
        }
        let len = match socket::receive(&peer.socket, request.as_mut_bytes(), &mut self.payload) {
            Ok(len) => len,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
            // The peer closed this connection. It may have another one: two of its threads that connect at the same time
            // open one each, and close one again.
            Err(e) if matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
                return self.remove_peer(id);
            }
            Err(_) => return self.cut_off_peer(id),
        };
        let (reply, keep) = match (peer.gid, request.kind) {
            (None, Request::HELLO) => self.handle_hello(id, &request),
            (None, _) | (Some(_), Request::HELLO) => (Some(Reply::new(Reply::MALFORMED, 0)), false),
            (Some(gid), kind) => self.handle_request(gid, kind, &request, len),
        };
        let Some(peer) = self.peers.get(&id) else { return };
        if let Some(mut reply) = reply {
            reply.version_or_number = match request.kind {
                Request::HELLO => control::VERSION,
                _ => request.version_or_number,
            };
            let accepted = request.kind == Request::HELLO && reply.status == Reply::OK;
            let lines = match (peer.gid, request.kind) {
                (Some(gid), Request::PEER_LINES) => locked(&self.device.peers.lines).segment(&gid).ok(),
                _ => None,
            };
            let file = match &lines {
                Some(lines) => Some(lines.fd()),
                None => accepted.then(|| self.device.memory.segment.fd()),
            };
            let has_payload = request.kind == Request::READ && reply.status == Reply::OK;
            let payload = if has_payload { &self.payload[..request.a as usize] } else { &[] };
            // The socket does not block. A peer has one request at a time, so there is room for the reply, unless the peer
            // breaks that rule and does not read its replies.
            if socket::send(&peer.socket, reply.as_bytes(), payload, file.as_slice()).is_err() {
                return self.cut_off_peer(id);
            }
        }
        if !keep {
            self.cut_off_peer(id);
        }
    }

    /// Ends the connection to a peer that sent a malformed message or does not read its replies. Its queue pairs go to ERR. It
    /// counts as gone only when it has closed its end or its process has ended: until then it may be inside an operation.
    fn cut_off_peer(&mut self, id: u64) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(gid) = peer.gid else { return self.remove_peer(id) };
        peer.is_cut_off = true;
        // The peer notices. This fails only if the peer has closed the connection already.
        rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write).ok();
        // What it still sends is not read.
        let data = epoll::EventData::new_u64(id << 2 | PEER_SOCKET);
        let watched = epoll::modify(&self.device.watch.epoll, &peer.socket, data, epoll::EventFlags::RDHUP);
        debug_assert!(watched.is_ok());
        self.fail_qps_of(&gid);
    }

    /// Returns the reply, and whether the peer stays connected.
    fn handle_hello(&mut self, id: u64, hello: &Request) -> (Option<Reply>, bool) {
        let (peers, awaiting) = (self.peers.len(), self.awaiting_hello.len());
        let Some(InboundPeer { pid, is_visible, .. }) = self.peers.get(&id) else { return (None, false) };
        let (pid, is_visible) = (*pid, *is_visible);
        let of_process = |peer: &&InboundPeer| peer.pid == pid && peer.gid.is_some();
        let of_process = pid.map_or(0, |_| self.peers.values().filter(of_process).count());
        if hello.version_or_number != control::VERSION || hello.a != MAGIC {
            return (Some(Reply::new(Reply::OTHER_VERSION, 0)), false);
        }
        if !is_visible {
            return (Some(Reply::new(Reply::NOT_VISIBLE, 0)), false);
        }
        // The limit may change while the device is open.
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let (most, most_of_process) = most_peers(files);
        if peers - awaiting >= most || of_process >= most_of_process {
            return (Some(Reply::new(Reply::EXHAUSTED, 0)), false);
        }
        match pid.map_or(Ok(true), |pid| control::is_device_of(&hello.gid, pid)) {
            Ok(true) => {}
            Ok(false) => return (Some(Reply::new(Reply::NOT_YOURS, 0)), false),
            // It is closed without a reply, and connects again.
            Err(_) => return (None, false),
        }
        let Some(peer) = self.peers.get_mut(&id) else { return (None, false) };
        self.awaiting_hello.remove(id);
        peer.gid = Some(hello.gid);
        self.device.peers.add_connection(hello.gid);
        (Some(Reply::new(Reply::OK, self.device.memory.segment.len())), true)
    }

    /// Returns the reply, if the request has one, and whether the peer stays connected.
    fn handle_request(
        &mut self,
        gid: [u8; 16],
        kind: u32,
        request: &Request,
        len: usize,
    ) -> (Option<Reply>, bool) {
        match kind {
            Request::PEER_LINE => {
                let tenure = ConnectionWord::ready(self.device.next_epoch(0)).tenure();
                let of_process = self.devices_of_process(&gid);
                let mut lines = locked(&self.device.peers.lines);
                let reply = match lines.assign_datagram_sender(gid, tenure, &of_process) {
                    Ok(AssignedLine { index, usage: LineUse::Datagrams { sender }, .. }) => {
                        Reply::new(Reply::OK, u64::from(sender) << 32 | u64::from(index))
                    }
                    _ => Reply::new(Reply::EXHAUSTED, 0),
                };
                (Some(reply), true)
            }
            // `serve_peer` adds the segment.
            Request::PEER_LINES => (Some(Reply::new(Reply::OK, 0)), true),
            Request::QP_ERROR | Request::CQ_OVERRUN => {
                // Only the peer that a queue pair is connected to may break it, and only in the epoch that it means. Any
                // peer may break a datagram queue pair.
                if let Some(qp) = self.device.qps.get(request.qp_num) {
                    let is_meant = |qp: &QpShared| {
                        qp.epoch() == request.a && (qp.is_connected_to(&gid) || qp.is_datagram())
                    };
                    if self.fail_qp_if(&qp, is_meant) {
                        let overrun = kind == Request::CQ_OVERRUN;
                        self.device.events.emit(if overrun {
                            Event::CqOverrun
                        } else {
                            Event::QpAccess(qp.num)
                        });
                    }
                }
                (None, true)
            }
            Request::WRITE | Request::READ | Request::COMPARE_SWAP | Request::FETCH_ADD => {
                match self.access_in_place(kind, request, len) {
                    Some(value) => (Some(Reply::new(Reply::OK, value)), true),
                    None => (Some(Reply::new(Reply::NO_SUCH_REGION, 0)), true),
                }
            }
            _ => (Some(Reply::new(Reply::MALFORMED, 0)), false),
        }
    }

    /// The devices of the process of a peer, as far as they are connected; the peer's device alone if the process is this one.
    fn devices_of_process(&self, gid: &[u8; 16]) -> Vec<[u8; 16]> {
        let pid = self.peers.values().find(|peer| peer.gid == Some(*gid)).and_then(|peer| peer.pid);
        let is_of_process = |peer: &&InboundPeer| pid.is_some() && peer.pid == pid;
        let mut devices: Vec<_> =
            self.peers.values().filter(is_of_process).filter_map(|peer| peer.gid).chain([*gid]).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// Performs an operation on memory registered in place, for a peer that cannot do it itself. Returns the former value
    /// of an atomic, or zero; `None` if key, bounds or access are wrong.
    fn access_in_place(&mut self, kind: u32, request: &Request, payload: usize) -> Option<u64> {
        let len = match kind {
            Request::WRITE | Request::READ => request.a,
            _ => 8,
        };
        if len > MAX_PAYLOAD as u64 || (kind == Request::WRITE && payload as u64 != len) {
            return None;
        }
        let _proxied_access = locked(&self.device.proxied_access);
        let entry = &self.device.regions.table[RegionKey::from_bits(request.key).index() as usize];
        // First of all: from here until the lock is released, the region of this key keeps the entry. What was loaded before could be that of a
        // region that had the entry earlier.
        // Acquire, partner: the Release store in `Regions::add`.
        if request.key == 0 || entry.key.load(Acquire) != request.key {
            return None;
        }
        let access = Access::from_bits_truncate(entry.access.load(Relaxed));
        let needs = match kind {
            // The memory of a receive is written this way too, and needs no other right.
            Request::WRITE => Access::LOCAL_WRITE,
            Request::READ => Access::REMOTE_READ,
            _ => Access::REMOTE_ATOMIC,
        };
        let offset = request.addr.wrapping_sub(entry.addr.load(Relaxed));
        let size = entry.len.load(Relaxed);
        if entry.offset.load(Relaxed) != IN_PLACE
            || !access.contains(needs)
            || offset > size
            || len > size - offset
        {
            return None;
        }
        let at = region_keys::pointer(request.addr);
        // SAFETY: the memory is registered here, so its owner keeps it valid; deregistration waits for `proxied_access`,
        // which we hold. The payload buffer has room for `len`, which is at most `MAX_PAYLOAD`.
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

    /// A peer closed its connection or died. With its last connection, it is no longer working on our segment: its queue
    /// pairs go to ERR and its peer lines are reclaimed.
    fn remove_peer(&mut self, id: u64) {
        let Some(peer) = self.peers.remove(&id) else { return };
        self.awaiting_hello.remove(id);
        for source in
            [Some(peer.socket.as_fd()), peer.process.as_ref().map(AsFd::as_fd)].into_iter().flatten()
        {
            // A failure is harmless: closing the descriptors, which follows, removes them from epoll too.
            epoll::delete(&self.device.watch.epoll, source).ok();
        }
        let Some(gid) = peer.gid else { return };
        if !self.device.peers.remove_connection(&gid) {
            return;
        }
        self.fail_qps_of(&gid);
        let mut lines = locked(&self.device.peers.lines);
        let senders = lines.all().filter(|line| line.gid == gid).filter_map(|line| match line.usage {
            LineUse::Datagrams { sender } => Some((line, sender)),
            // Its queue pair retires it.
            LineUse::Connection { .. } => None,
        });
        self.pending.push(PendingCleanup::DatagramSenders(senders.collect()));
        lines.forget_gone_peer(&gid);
    }

    /// Forgets the links that threads of this process have broken off.
    fn forget_broken_links(&self) {
        for id in self.device.watch.broken_links() {
            self.forget_link(id);
        }
    }

    /// Ends the use of a link: its peer closed the connection or died, or a call failed. Its queue pairs go to ERR; those that are connected
    /// to the same device over a later link do not.
    fn forget_link(&self, id: u64) {
        let Some(link) = self.device.watch.take_link(id) else { return };
        link.mark_dead();
        self.device.peers.remove_link(&link);
        self.fail_qps(|qp| qp.is_connected_over(&link));
    }

    /// Moves every queue pair that is connected to device `gid` to ERR.
    fn fail_qps_of(&self, gid: &[u8; 16]) {
        self.fail_qps(|qp| qp.is_connected_to(gid));
    }

    fn fail_qps(&self, is_meant: impl Fn(&QpShared) -> bool) {
        for qp in self.device.qps.all() {
            if self.fail_qp_if(&qp, |qp| is_meant(qp) && qp.state() != QpState::Reset) {
                self.device.events.emit(Event::QpFatal(qp.num));
            }
        }
    }

    /// Moves a queue pair to ERR if `is_meant` holds for its current connection. The lock keeps a reset from coming
    /// between the check and the change.
    fn fail_qp_if(&self, qp: &Arc<QpShared>, is_meant: impl FnOnce(&QpShared) -> bool) -> bool {
        let _one_at_a_time = locked(&self.device.cleanup);
        is_meant(qp) && qp.move_to_error()
    }

    /// Collects the flush requests and completes whatever cleanup can be completed now. Returns whether some is left.
    fn run_pending_cleanup(&mut self) -> bool {
        let requested = std::mem::take(&mut *locked(&self.device.flush_requests));
        for FlushRequest { qp_num, epoch } in requested {
            // A queue pair that is gone has no receives.
            let Some(qp) = self.device.qps.get(qp_num) else { continue };
            // One request covers all receives that are posted before it is finished.
            let is_same = |item: &PendingCleanup| match item {
                PendingCleanup::Flush(known) => known.epoch == epoch && Arc::ptr_eq(&known.qp, &qp),
                PendingCleanup::DatagramSenders(_) => false,
            };
            if !self.pending.iter().any(is_same) {
                let flush = PendingFlush { qp, epoch, peer: PeerDeparture::default(), senders: None };
                self.pending.push(PendingCleanup::Flush(flush));
            }
        }
        let device = self.device.clone();
        self.pending.retain_mut(|item| match item {
            PendingCleanup::Flush(request) => !request.try_finish(&device),
            PendingCleanup::DatagramSenders(gone) => !try_reclaim_datagram_senders(&device, gone),
        });
        !self.pending.is_empty()
    }
}

impl PendingFlush {
    /// Has the poller flush the receives, if no peer can complete or write them any more. Returns whether that is done.
    fn try_finish(&mut self, device: &DeviceShared) -> bool {
        let PendingFlush { qp, epoch, peer, senders } = self;
        if qp.destroyed.load(Acquire) {
            return true;
        }
        if let RecvSource::Datagram(queue) = &qp.recv {
            // A sender that begins now finds the queue pair closed.
            let senders = senders
                .get_or_insert_with(|| Quiescence::observe_datagram_senders(&device.peers, &device.attempts));
            let have_left = senders.is_reached(&device.peers);
            // What a sender has taken that is inside waits for this sender, and nothing else does.
            let inside: HashSet<u16> = senders.datagram_senders().map(taker_of_datagram_sender).collect();
            let _one_at_a_time = locked(&device.cleanup);
            let taken = queue.announce_return_of_all(|taker| inside.contains(&taker));
            announce_return(queue, taken, Status::Flushed, &[&*qp]);
            return have_left;
        }
        if !qp.peer_has_left(peer) {
            return false;
        }
        let _one_at_a_time = locked(&device.cleanup);
        // A reset takes the same lock: as long as we hold it, no new peer can complete receives of this queue pair.
        if qp.state() != QpState::Error || qp.epoch() != *epoch {
            return true;
        }
        qp.recv_cq.post_notice(Notice::Flush { qp: qp.clone(), epoch: *epoch });
        if matches!(qp.recv, RecvSource::Shared(_)) {
            device.events.emit(Event::LastWqeReached(qp.num));
        }
        true
    }
}

/// Reclaims the lines and the numbers of datagram senders that are gone, and has the pollers return the receives that they had taken.
/// Returns whether that is done for all of them; those that are left stay in the list.
fn try_reclaim_datagram_senders(device: &DeviceShared, gone: &mut Vec<(AssignedLine, u32)>) -> bool {
    let reclaimed: Vec<_> = gone.extract_if(.., |(line, _)| try_void_reservation(device, line)).collect();
    if reclaimed.is_empty() {
        return gone.is_empty();
    }
    let takers: HashSet<u16> =
        reclaimed.iter().map(|(_, sender)| taker_of_datagram_sender(*sender)).collect();
    {
        let _one_at_a_time = locked(&device.cleanup);
        let qps: Vec<_> = device.qps.all();
        let is_open = |qp: &&Arc<QpShared>| qp.is_datagram() && !qp.destroyed.load(Acquire);
        let mut queues: Vec<(&Arc<SharedRecvQueue>, Vec<&Arc<QpShared>>)> = Vec::new();
        for qp in qps.iter().filter(is_open) {
            let (RecvSource::Shared(queue) | RecvSource::Datagram(queue)) = &qp.recv else { continue };
            match queues.iter_mut().find(|(known, _)| Arc::ptr_eq(known, queue)) {
                Some((_, users)) => users.push(qp),
                None => queues.push((queue, vec![qp])),
            }
        }
        for (queue, users) in queues {
            let taken = queue.announce_return(|taker| takers.contains(&taker));
            announce_return(queue, taken, Status::RemoteAborted, &users);
        }
    }
    for (line, _) in reclaimed {
        device.peers.reclaim_line(&line);
    }
    gone.is_empty()
}

/// Voids what a datagram sender that is gone has reserved and not published. Then everything that it published comes before a notice that is
/// posted now. Returns false if that cannot be decided yet.
fn try_void_reservation(device: &DeviceShared, gone: &AssignedLine) -> bool {
    let ring_at = gone.line.cq_at.load(Relaxed);
    let is_cq_of_datagrams = |qp: &&Arc<QpShared>| qp.is_datagram() && qp.recv_cq.at() == ring_at;
    // The peer wrote the offset: only a completion queue that datagrams are pushed to can be meant.
    gone.line.claim.load(Relaxed) == reservation::IDLE
        || device
            .qps
            .all()
            .iter()
            .find(is_cq_of_datagrams)
            .is_none_or(|qp| void_reservation(device, gone, &qp.recv_cq.ring))
}

/// Has the pollers return receives of a queue to the program. `users`: the queue pairs that use the queue. The receives may have completed
/// in the completion queue of any of them.
fn announce_return(
    queue: &Arc<SharedRecvQueue>,
    taken: Vec<TakenSlot>,
    status: Status,
    users: &[&Arc<QpShared>],
) {
    if users.is_empty() || taken.is_empty() {
        return;
    }
    let mut cqs: Vec<(&Arc<CqShared>, u32)> = Vec::new();
    for user in users {
        if !cqs.iter().any(|(known, _)| Arc::ptr_eq(known, &user.recv_cq)) {
            cqs.push((&user.recv_cq, user.num));
        }
    }
    // The queue that drops the last `Arc` returns the receives. So there are exactly as many as notices: with one more, kept here, each queue
    // would leave it to another one.
    let returned = Arc::new(ReturnedRecvs { queue: queue.clone(), taken, status });
    let handles = vec![returned; cqs.len()];
    for ((cq, qp_num), returned) in cqs.into_iter().zip(handles) {
        cq.post_notice(Notice::Return { returned, qp_num });
    }
}
