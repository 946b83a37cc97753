//! The part of a queue pair that its owner, its completion queues and the device's threads share. `qp_setup.rs` creates and destroys it. What is
//! special to one kind is in `rc.rs` and `datagram.rs`.

use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::cq_ring::NewCqe;
use super::cq_shared::CqShared;
use super::deferred::DeferredSends;
use super::lane::Lane;
use super::layout::{ConnectionWord, CqeKind, KIND_UD, QpBlock, QpNum, RequestWord, short_epoch};
use super::link::Link;
use super::lock::locked;
use super::peer_lines::AssignedLine;
use super::quiescence::{Pause, PeerDeparture};
use super::recv::RecvQueue;
use super::shared_recv::SharedRecvQueue;
use super::state::{DeviceShared, FlushRequest};
use crate::device::{Completion, DeviceError, Event, Opcode, QpState, Status};
use crate::memory::segment::SharedRef;
use crate::ring::reservation;

/// In the epoch of a queue pair that is gone: the poller reads no entry of it. No epoch has this bit.
const NO_EPOCH: u64 = 1 << 63;

/// The shared part of a queue pair.
#[derive(Debug)]
#[repr(C)]
pub(super) struct QpShared {
    // What each request and each poll need comes first.
    state: AtomicU8,
    pub(super) destroyed: AtomicBool,
    pub(super) num: u32,
    pub(super) pd: u32,
    kind: u32,
    /// Epoch of the current connection, see `DeviceShared::next_epoch`. Changes at reset only.
    epoch: AtomicU64,
    /// Send requests retired so far. Writer: the poller of `send_cq`.
    pub(super) sq_done: AtomicU64,
    /// RC: entries of the lane read so far, as in its header, which peers can write. Writer: the poller of `recv_cq`.
    pub(super) received: AtomicU64,
    /// Claim in the ring of `send_cq`. Writer: the owner of the sending half (the poster or the progress thread).
    pub(super) send_claim: AtomicU64,
    pub(super) block: SharedRef<QpBlock>,
    pub(super) device: Arc<DeviceShared>,
    pub(super) send_cq: Arc<CqShared>,
    pub(super) recv_cq: Arc<CqShared>,
    pub(super) recv: RecvSource,
    /// RC: where its receives complete.
    pub(super) lane: Option<Lane>,
    pub(super) deferred: Mutex<DeferredSends>,
    /// RC: the connected device, with the line that it writes during this connection.
    peer: Mutex<Option<ConnectedPeer>>,
    /// Locked while the connection opens, and while the queue pair moves to ERR: it is never in ERR and open.
    opening: Mutex<()>,
}

/// What a queue pair consists of when it is created.
pub(super) struct QpParts {
    pub(super) device: Arc<DeviceShared>,
    pub(super) num: u32,
    pub(super) pd: u32,
    pub(super) block: SharedRef<QpBlock>,
    pub(super) send_cq: Arc<CqShared>,
    pub(super) recv_cq: Arc<CqShared>,
    pub(super) recv: RecvSource,
    pub(super) lane: Option<Lane>,
}

#[derive(Debug)]
struct ConnectedPeer {
    line: AssignedLine,
    link: Arc<Link>,
}

/// Where a queue pair's receives come from.
#[derive(Debug)]
pub(super) enum RecvSource {
    /// RC: its own receive queue, from which one peer takes.
    Own(RecvQueue),
    /// A shared receive queue.
    Shared(Arc<SharedRecvQueue>),
    /// UD: its own receive queue, from which many senders take.
    Datagram(Arc<SharedRecvQueue>),
}

impl QpShared {
    /// A queue pair in RESET, without a peer.
    pub(super) fn new(parts: QpParts, kind: u32, epoch: u64) -> QpShared {
        let QpParts { device, num, pd, block, send_cq, recv_cq, recv, lane } = parts;
        QpShared {
            device,
            num,
            pd,
            kind,
            block,
            state: AtomicU8::new(QpState::Reset as u8),
            epoch: AtomicU64::new(epoch),
            send_cq,
            recv_cq,
            recv,
            lane,
            sq_done: AtomicU64::new(0),
            received: AtomicU64::new(0),
            send_claim: AtomicU64::new(reservation::IDLE),
            deferred: Mutex::default(),
            peer: Mutex::new(None),
            opening: Mutex::new(()),
            destroyed: AtomicBool::new(false),
        }
    }

    /// The program has dropped it.
    pub(super) fn mark_destroyed(&self) {
        // Release, partner: the Acquire load in `Cq::poll`.
        self.destroyed.store(true, Release);
        self.epoch.fetch_or(NO_EPOCH, Relaxed);
    }

    #[inline]
    pub(super) fn state(&self) -> QpState {
        // Acquire, partner: the Release store in `set_state`.
        match self.state.load(Acquire) {
            0 => QpState::Reset,
            1 => QpState::Init,
            2 => QpState::ReadyToReceive,
            3 => QpState::ReadyToSend,
            _ => QpState::Error,
        }
    }

    /// Moves to `state`, unless the queue pair is in ERR, which only a reset leaves. Returns whether it has moved.
    pub(super) fn set_state(&self, state: QpState) -> bool {
        // Release, partner: the Acquire load in `state`.
        let moved = self
            .state
            .fetch_update(Release, Acquire, |now| (now != QpState::Error as u8).then_some(state as u8));
        moved.is_ok()
    }

    /// Moves to `state` and opens the queue pair to its peers, unless it is in ERR.
    pub(super) fn open(&self, state: QpState) {
        let _one_at_a_time = locked(&self.opening);
        if self.set_state(state) {
            #[cfg(test)]
            super::pauses::at(super::pauses::Pause::StateChanged);
            // Release, partner: the Acquire loads in `peer_qp::attach` and `DatagramPeer::deliver`: a peer sees all stores above.
            self.block.connection.store(ConnectionWord::ready(self.epoch()).0, Release);
        }
    }

    /// Moves to RESET and begins a new epoch.
    pub(super) fn begin_epoch(&self) {
        // The service thread holds this lock while it breaks the connection that a peer means, and while it pushes the
        // flush marker. So neither can hit the next connection.
        let _one_at_a_time = locked(&self.device.cleanup);
        self.state.store(QpState::Reset as u8, Release);
        self.epoch.store(self.device.next_epoch(self.epoch()), Relaxed);
    }

    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    pub(super) fn index(&self) -> u32 {
        QpNum::from_bits(self.num).index()
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.kind == KIND_UD
    }

    pub(super) fn set_peer(&self, line: AssignedLine, link: &Arc<Link>) {
        *locked(&self.peer) = Some(ConnectedPeer { line, link: link.clone() });
    }

    /// The line that the connected peer writes during this connection.
    pub(super) fn peer_line(&self) -> Option<AssignedLine> {
        locked(&self.peer).as_ref().map(|peer| peer.line.clone())
    }

    /// Ends the connection: its peer line is assigned again once the peer has closed it.
    pub(super) fn retire_peer_line(&self) {
        // The lock is released first: this may be the last use of the link.
        let peer = locked(&self.peer).take();
        if let Some(peer) = peer {
            self.device.peers.retire_line(&peer.line);
        }
    }

    pub(super) fn is_connected_to(&self, gid: &[u8; 16]) -> bool {
        locked(&self.peer).as_ref().is_some_and(|peer| peer.line.gid == *gid)
    }

    pub(super) fn is_connected_over(&self, link: &Arc<Link>) -> bool {
        locked(&self.peer).as_ref().is_some_and(|peer| Arc::ptr_eq(&peer.link, link))
    }

    pub(super) fn has_deferred_sends(&self) -> bool {
        !locked(&self.deferred).is_empty()
    }

    /// Moves to ERR. The device's threads flush what is outstanding. Returns whether this call made the change.
    pub(super) fn move_to_error(self: &Arc<Self>) -> bool {
        {
            let _not_while_it_opens = locked(&self.opening);
            // A thread that sees ERR must also see that the connection is closed, hence the order of these two stores. AcqRel would
            // not order more.
            self.block.connection.store(ConnectionWord::NOT_READY.0, Relaxed);
            let before = self.state.swap(QpState::Error as u8, Release);
            if before == QpState::Error as u8 {
                return false;
            }
        }
        self.request_flush();
        self.device.workers.wake();
        true
    }

    /// Asks the service thread to flush the receives once the peer can complete no more of them.
    pub(super) fn request_flush(&self) {
        self.device.request_flush(FlushRequest { qp_num: self.num, epoch: self.epoch() });
    }

    /// Pushes the completion of a send request.
    pub(super) fn complete_send(
        self: &Arc<Self>,
        wr_id: u64,
        opcode: Opcode,
        status: Status,
        byte_len: u32,
        position: u64,
    ) {
        let completion = NewCqe {
            kind: CqeKind::Send,
            opcode,
            status,
            request: RequestWord::of_send(wr_id),
            qp_num: self.num,
            byte_len,
            detail: position as u32,
            has_imm: false,
            epoch: short_epoch(self.epoch()),
        };
        if self.send_cq.ring.push(&self.send_claim, &completion).is_err() {
            self.device.events.emit(Event::CqOverrun);
            self.move_to_error();
        }
    }

    /// The completion of a request whose entry a peer forged: a program that believed the entry would read beyond its receive, or take a
    /// receive for a send. The queue pair goes to ERR.
    #[cold]
    #[inline(never)]
    pub(super) fn reject_completion(self: &Arc<Self>, wr_id: u64) -> Completion {
        self.move_to_error();
        Completion::failed(wr_id, Status::BadResponse, self.num)
    }

    pub(super) fn wrong_state(&self, step: &'static str, needs: &'static str) -> DeviceError {
        DeviceError::WrongState { qp_num: self.num, state: self.state(), step, needs }
    }

    /// Closes the queue pair to its peer and drops its deferred sends.
    pub(super) fn close(&self) {
        self.block.connection.store(ConnectionWord::NOT_READY.0, Relaxed);
        // A progress thread executes deferred sends under this lock, but for those that wait for a peer: they use nothing of the program's.
        let was_deferring = locked(&self.deferred).clear();
        if was_deferring {
            self.device.workers.forget(self.num);
        }
    }

    /// Waits until the peer of this queue pair, which is closed, has left and what a dead peer left behind is repaired. The error
    /// says that this took longer than `limit`.
    pub(super) fn wait_for_departure(
        &self,
        departure: &mut PeerDeparture,
        limit: Duration,
    ) -> Result<(), DeviceError> {
        let (deadline, mut pause) = (Instant::now() + limit, Pause::default());
        while !self.peer_has_left(departure) {
            if Instant::now() >= deadline {
                let peer = self.peer_line();
                return Err(self.device.peers.busy_error(peer.as_ref().map(|peer| &peer.gid)));
            }
            pause.wait();
        }
        Ok(())
    }

    /// Whether the peer of this queue pair, which is closed, is outside for good, see [`PeerDeparture::is_over`].
    pub(super) fn peer_has_left(&self, departure: &mut PeerDeparture) -> bool {
        self.peer_line().is_none_or(|peer| departure.is_over(&peer, &self.device.peers))
    }

    /// Ends the removal of a queue pair. No peer may be inside an operation on it.
    pub(super) fn finish_removal(self: &Arc<Self>) {
        self.send_cq.remove_qp(self);
        if !Arc::ptr_eq(&self.send_cq, &self.recv_cq) {
            self.recv_cq.remove_qp(self);
        }
        self.retire_peer_line();
        self.device.qps.remove(self.num);
    }
}
