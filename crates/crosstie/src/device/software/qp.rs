//! The part of a queue pair that its owner, its completion queues and the device's threads share; creating and destroying
//! it. What is special to one kind is in `rc.rs` and `datagram.rs`.

use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::cq::CqShared;
use super::cq_ring::NewCqe;
use super::deferred::DeferredSends;
use super::lane::Lane;
use super::layout::{
    ConnectionWord, CqeKind, KIND_UD, QpBlock, QpNum, RequestWord, qp_block_at, short_epoch,
};
use super::link::Link;
use super::peer_lines::AssignedLine;
use super::quiescence::{DROP_TIMEOUT, Pause};
use super::recv::RecvQueue;
use super::removal::QpRemoval;
use super::setup::Pd;
use super::shared_recv::SharedRecvQueue;
use super::state::{DeviceShared, check_limit, locked};
use super::{Cq, Srq};
use crate::device::{Completion, DeviceError, Event, Opcode, QpConfig, QpState, Status};
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
    /// Held while the connection opens, and while the queue pair goes to ERR: it is never in ERR and open.
    opening: Mutex<()>,
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
        let _one_at_a_time = locked(&self.device.service.cleanup);
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
            self.device.retire_line(&peer.line);
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
        self.device.progress.wake();
        true
    }

    /// Asks the service thread to flush the receives once the peer can complete no more of them.
    pub(super) fn request_flush(self: &Arc<Self>) {
        self.device.service.request_flush(self);
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
            self.device.emit(Event::CqOverrun);
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
}

/// Creates a queue pair of either kind and adds it to the device's table and to its completion queues.
pub(super) fn create(
    pd: &Pd,
    pd_id: u32,
    config: &QpConfig,
    send_cq: &Cq,
    recv_cq: &Cq,
    srq: Option<&Srq>,
    kind: u32,
) -> Result<Arc<QpShared>, DeviceError> {
    let device = &pd.handle.device;
    let attr = device.attr();
    check_limit("send requests", config.max_send_wr, attr.max_qp_wr)?;
    check_limit("receives", config.max_recv_wr, attr.max_qp_wr)?;
    check_limit("scatter/gather entries per send request", config.max_send_sge, attr.max_sge)?;
    check_limit("scatter/gather entries per receive", config.max_recv_sge, attr.max_sge)?;
    check_limit("inline bytes", config.max_inline, attr.max_inline)?;
    for cq in [send_cq, recv_cq] {
        if !Arc::ptr_eq(&cq.shared.device, device) {
            return Err(DeviceError::WrongDevice("the completion queue"));
        }
    }
    if srq.is_some_and(|srq| !Arc::ptr_eq(&srq.shared.device, device)) {
        return Err(DeviceError::WrongDevice("the shared receive queue"));
    }
    device.add_qp(|key| {
        let epoch = device.next_epoch(0);
        let lane = match kind {
            KIND_UD => None,
            _ => {
                let receives = srq.map_or(config.max_recv_wr, |srq| srq.shared.capacity());
                Some(Lane::new(device, receives, srq.is_some(), epoch)?)
            }
        };
        let recv = match srq {
            Some(srq) => RecvSource::Shared(srq.shared.clone()),
            None if kind == KIND_UD => {
                let queue = SharedRecvQueue::new(device, pd_id, config.max_recv_wr, config.max_recv_sge)?;
                RecvSource::Datagram(Arc::new(queue))
            }
            None => RecvSource::Own(RecvQueue::new(device, config.max_recv_wr, config.max_recv_sge)?),
        };
        let block: SharedRef<QpBlock> = SharedRef::new(&device.segment, qp_block_at(key.index()))
            .ok_or(DeviceError::Exhausted { what: "queue pairs" })?;
        block.connection.store(ConnectionWord::NOT_READY.0, Relaxed);
        block.qp_num.store(key.bits(), Relaxed);
        block.kind.store(kind, Relaxed);
        block.pd.store(pd_id, Relaxed);
        block.recv_cq.store(recv_cq.shared.at(), Relaxed);
        let line = &block.owner_line;
        line.posted.store(0, Relaxed);
        let (at, depth, sges, shared) = match &recv {
            RecvSource::Own(queue) => (queue.memory.at, queue.depth(), queue.max_sge(), 0),
            RecvSource::Shared(queue) | RecvSource::Datagram(queue) => {
                (queue.memory.at, queue.depth(), queue.max_sge(), 1)
            }
        };
        line.recv_at.store(at, Relaxed);
        line.recv_depth.store(depth, Relaxed);
        line.recv_sges.store(sges, Relaxed);
        line.shared.store(shared, Relaxed);
        if let Some(lane) = &lane {
            lane.describe(&block);
        }
        let qp = Arc::new(QpShared {
            device: device.clone(),
            num: key.bits(),
            pd: pd_id,
            kind,
            block,
            state: AtomicU8::new(QpState::Reset as u8),
            epoch: AtomicU64::new(epoch),
            send_cq: send_cq.shared.clone(),
            recv_cq: recv_cq.shared.clone(),
            recv,
            lane,
            sq_done: AtomicU64::new(0),
            received: AtomicU64::new(0),
            send_claim: AtomicU64::new(reservation::IDLE),
            deferred: Mutex::default(),
            peer: Mutex::new(None),
            opening: Mutex::new(()),
            destroyed: AtomicBool::new(false),
        });
        qp.send_cq.add_qp(&qp);
        if !Arc::ptr_eq(&qp.send_cq, &qp.recv_cq) {
            qp.recv_cq.add_qp(&qp);
        }
        Ok(qp)
    })
}

/// Closes a queue pair and removes it. Waits up to [`DROP_TIMEOUT`] for its own peer to leave an operation; a peer that is
/// still inside then does not hold up the caller: the device removes the queue pair when the peer has left.
pub(super) fn destroy(qp: &Arc<QpShared>) {
    if !qp.device.is_of_this_process() {
        return;
    }
    // Release, partner: the Acquire load in `Cq::poll`.
    qp.destroyed.store(true, Release);
    qp.epoch.fetch_or(NO_EPOCH, Relaxed);
    qp.close();
    let mut removal = QpRemoval::new(qp);
    let (deadline, mut pause) = (Instant::now() + DROP_TIMEOUT, Pause::default());
    while !removal.try_finish() {
        if Instant::now() >= deadline {
            return qp.device.defer_qp_removal(removal);
        }
        pause.wait();
    }
}

impl QpShared {
    /// Ends the removal of a queue pair. No peer may be inside an operation on it.
    pub(super) fn finish_removal(self: &Arc<Self>) {
        self.leave_cqs();
        self.retire_peer_line();
        self.device.remove_qp(self.num);
        self.free_recv_queue();
    }

    fn leave_cqs(self: &Arc<Self>) {
        self.send_cq.remove_qp(self);
        if !Arc::ptr_eq(&self.send_cq, &self.recv_cq) {
            self.recv_cq.remove_qp(self);
        }
    }

    fn free_recv_queue(&self) {
        if let RecvSource::Own(queue) = &self.recv {
            self.device.free(&queue.memory);
        }
    }
}
