//! Queue pairs: their life.

use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Mutex};

use super::cq::{CqShared, Side};
use super::cqring::Entry;
use super::datapath::PeerQp;
use super::layout::{
    Connection, CqeKind, KIND_RC, KIND_UD, PeerLine, QPS_AT, QpBlock, QpNum, short_epoch, taker_of_qp,
};
use super::link::Link;
use super::progress::Stalled;
use super::recv::{OwnQueue, PostCursor, SharedQueue};
use super::setup::{Handle, Inner, PATIENCE, Pd, limit, locked};
use super::waiting::WaitingWr;
use super::{Cq, Srq};
use crate::device::{
    Access, ConnectConfig, DeviceAddress, DeviceError, Event, Opcode, PostError, QpAddress, QpConfig,
    QpState, RecvWr, SrqConfig, Status,
};
use crate::memory::segment::SharedRef;
use crate::ring::reservation;

/// What of a queue pair its owner, its completion queues and the device's threads share.
#[derive(Debug)]
pub(super) struct QpLocal {
    pub(super) inner: Arc<Inner>,
    pub(super) num: u32,
    pub(super) pd: u32,
    kind: u32,
    pub(super) block: SharedRef<QpBlock>,
    state: AtomicU8,
    /// Connections so far. Changes at reset only.
    epoch: AtomicU64,
    pub(super) send_cq: Arc<CqShared>,
    pub(super) recv_cq: Arc<CqShared>,
    pub(super) recv: Recv,
    /// Send requests retired, ever. Writer: the poller of `send_cq`.
    pub(super) sq_done: AtomicU64,
    /// Claim in `send_cq`, of whoever holds the sending side.
    pub(super) send_claim: AtomicU64,
    /// The sending side while it waits, and what waits behind it.
    pub(super) waiting: Mutex<Waiting>,
    peer: Mutex<Option<[u8; 16]>>,
    pub(super) destroyed: AtomicBool,
}

/// Where a queue pair's receives are.
#[derive(Debug)]
pub(super) enum Recv {
    Own(OwnQueue),
    Shared(Arc<SharedQueue>),
    /// A datagram queue pair's own, which many senders take from.
    Datagram(Arc<SharedQueue>),
}

/// Send requests that could not be done yet.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    pub(super) peer: Option<Box<PeerQp>>,
    pub(super) queue: VecDeque<WaitingWr>,
}

impl QpLocal {
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

    /// Moves to `state`, unless it is in ERR, which only a reset leaves.
    fn set_state(&self, state: QpState) {
        // Release, partner: the Acquire load in `state`.
        let moved = self.state.fetch_update(Release, Acquire, |now| {
            (now != QpState::Error as u8 || state == QpState::Reset).then_some(state as u8)
        });
        if moved.is_err() {
            self.block.connection.store(Connection::NOT_READY.0, Relaxed);
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    pub(super) fn index(&self) -> u32 {
        QpNum::from_bits(self.num).index()
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.kind == KIND_UD
    }

    /// The line of ours that the connected peer writes, and who that is.
    pub(super) fn requester(&self) -> Option<(SharedRef<PeerLine>, [u8; 16])> {
        let gid = (*locked(&self.peer))?;
        let at = QPS_AT + u64::from(self.index()) * size_of::<QpBlock>() as u64;
        let line =
            SharedRef::new(&self.inner.segment, at + core::mem::offset_of!(QpBlock, requester) as u64)?;
        Some((line, gid))
    }

    pub(super) fn is_connected_to(&self, gid: &[u8; 16]) -> bool {
        locked(&self.peer).as_ref() == Some(gid)
    }

    pub(super) fn is_stalled(&self) -> bool {
        !locked(&self.waiting).queue.is_empty()
    }

    /// To ERR. What is outstanding is flushed by the device's threads. True for the call that did it.
    pub(super) fn break_off(self: &Arc<Self>) -> bool {
        // AcqRel would order nothing more: who sees ERR must see the connection closed, hence the order of these two.
        self.block.connection.store(Connection::NOT_READY.0, Relaxed);
        let before = self.state.swap(QpState::Error as u8, Release);
        if before == QpState::Error as u8 {
            return false;
        }
        self.request_flush();
        self.inner.progress.kick();
        true
    }

    /// Has the service flush receives, once the peer can finish no more of them.
    pub(super) fn request_flush(self: &Arc<Self>) {
        self.inner.service.flush(self);
    }

    /// The entry that makes the poller flush this queue pair's receives.
    pub(super) fn flush_marker(&self) -> Entry {
        Entry {
            kind: CqeKind::Flush,
            opcode: Opcode::Unspecified,
            status: Status::Flushed,
            wr: 0,
            qp_num: self.num,
            byte_len: 0,
            extra: 0,
            has_imm: false,
            epoch: short_epoch(self.epoch()),
        }
    }

    /// Ends a send request.
    pub(super) fn complete_send(
        self: &Arc<Self>,
        wr_id: u64,
        opcode: Opcode,
        status: Status,
        byte_len: u32,
        position: u64,
    ) {
        let entry = Entry {
            kind: CqeKind::Send,
            opcode,
            status,
            wr: wr_id,
            qp_num: self.num,
            byte_len,
            extra: position as u32,
            has_imm: false,
            epoch: short_epoch(self.epoch()),
        };
        if self.send_cq.ring.push(&self.send_claim, &entry).is_err() {
            self.inner.emit(Event::CqOverrun);
            self.break_off();
        }
    }

    fn wrong_state(&self, step: &'static str, needs: &'static str) -> DeviceError {
        DeviceError::WrongState { qp_num: self.num, state: self.state(), step, needs }
    }

    /// Closes the queue pair to its peer and waits for it to leave, or clears up behind it if it is dead. False if that
    /// took too long.
    fn shut(&self) -> bool {
        self.block.connection.store(Connection::NOT_READY.0, Relaxed);
        {
            let mut waiting = locked(&self.waiting);
            waiting.queue.clear();
            waiting.peer = None;
        }
        self.inner.progress.pause();
        self.inner.quiesce(Some(PATIENCE))
            && self.inner.service.settle_dead_claim(&self.inner, self, PATIENCE)
    }
}

fn create(
    pd: &Pd,
    pd_id: u32,
    config: &QpConfig,
    send_cq: &Cq,
    recv_cq: &Cq,
    srq: Option<&Srq>,
    kind: u32,
) -> Result<Arc<QpLocal>, DeviceError> {
    let inner = &pd.handle.inner;
    let attr = inner.attr();
    limit("send requests", config.max_send_wr, attr.max_qp_wr)?;
    limit("receives", config.max_recv_wr, attr.max_qp_wr)?;
    limit("pieces per send request", config.max_send_sge, attr.max_sge)?;
    limit("pieces per receive", config.max_recv_sge, attr.max_sge)?;
    limit("inline bytes", config.max_inline, attr.max_inline)?;
    for cq in [send_cq, recv_cq] {
        if !Arc::ptr_eq(&cq.shared.inner, inner) {
            return Err(DeviceError::Foreign("the completion queue"));
        }
    }
    if srq.is_some_and(|srq| !Arc::ptr_eq(&srq.shared.inner, inner)) {
        return Err(DeviceError::Foreign("the shared receive queue"));
    }
    inner.add_qp(|key| {
        let recv = match srq {
            Some(srq) => Recv::Shared(srq.shared.clone()),
            None if kind == KIND_UD => {
                let queue = SharedQueue::new(inner, pd_id, config.max_recv_wr, config.max_recv_sge)?;
                Recv::Datagram(Arc::new(queue))
            }
            None => Recv::Own(OwnQueue::new(inner, config.max_recv_wr, config.max_recv_sge)?),
        };
        let at = QPS_AT + u64::from(key.index()) * size_of::<QpBlock>() as u64;
        let block: SharedRef<QpBlock> =
            SharedRef::new(&inner.segment, at).ok_or(DeviceError::Exhausted { what: "queue pairs" })?;
        block.connection.store(Connection::NOT_READY.0, Relaxed);
        block.qp_num.store(key.bits(), Relaxed);
        block.kind.store(kind, Relaxed);
        block.pd.store(pd_id, Relaxed);
        block.recv_cq.store(recv_cq.shared.at(), Relaxed);
        block.requester.claim.store(reservation::IDLE, Relaxed);
        block.requester.taken.store(0, Relaxed);
        let line = &block.line1;
        line.posted.store(0, Relaxed);
        let (at, depth, sges, shared) = match &recv {
            Recv::Own(queue) => (queue.memory.at, queue.depth(), queue.max_sge(), 0),
            Recv::Shared(queue) | Recv::Datagram(queue) => {
                (queue.memory.at, queue.header.depth.load(Relaxed), queue.header.sges.load(Relaxed), 1)
            }
        };
        line.recv_at.store(at, Relaxed);
        line.recv_depth.store(depth, Relaxed);
        line.recv_sges.store(sges, Relaxed);
        line.shared.store(shared, Relaxed);
        let qp = Arc::new(QpLocal {
            inner: inner.clone(),
            num: key.bits(),
            pd: pd_id,
            kind,
            block,
            state: AtomicU8::new(QpState::Reset as u8),
            epoch: AtomicU64::new(1),
            send_cq: send_cq.shared.clone(),
            recv_cq: recv_cq.shared.clone(),
            recv,
            sq_done: AtomicU64::new(0),
            send_claim: AtomicU64::new(reservation::IDLE),
            waiting: Mutex::default(),
            peer: Mutex::new(None),
            destroyed: AtomicBool::new(false),
        });
        qp.send_cq.enroll(&qp, Side::Send);
        qp.recv_cq.enroll(&qp, Side::Recv);
        Ok(qp)
    })
}

/// Takes a queue pair out of everything that knows it.
fn destroy(qp: &Arc<QpLocal>) {
    // Release, partner: the Acquire load in `Cq::poll`.
    qp.destroyed.store(true, Release);
    let quiet = qp.shut();
    qp.send_cq.dismiss(qp, quiet);
    if !Arc::ptr_eq(&qp.send_cq, &qp.recv_cq) {
        qp.recv_cq.dismiss(qp, quiet);
    }
    qp.inner.remove_qp(qp.num, quiet);
    if let (Recv::Own(queue), true) = (&qp.recv, quiet) {
        qp.inner.free(&queue.memory);
    }
}

impl Pd {
    pub(crate) fn create_rc(
        &self,
        pd: u32,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<RcQp, DeviceError> {
        let local = create(self, pd, config, send_cq, recv_cq, srq, KIND_RC)?;
        Ok(RcQp {
            local,
            handle: self.handle.clone(),
            config: *config,
            peer: None,
            link: None,
            connect: ConnectConfig::default(),
            sq_posted: 0,
            sq_base: 0,
        })
    }

    pub(crate) fn create_ud(
        &self,
        pd: u32,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<UdQp, DeviceError> {
        let local = create(self, pd, config, send_cq, recv_cq, srq, KIND_UD)?;
        Ok(UdQp {
            local,
            handle: self.handle.clone(),
            config: *config,
            cursor: PostCursor::default(),
            targets: Vec::new(),
            sq_posted: 0,
        })
    }

    pub(crate) fn create_srq(&self, pd: u32, config: &SrqConfig) -> Result<Srq, DeviceError> {
        let inner = &self.handle.inner;
        limit("receives", config.max_wr, inner.attr().max_srq_wr)?;
        limit("pieces per receive", config.max_sge, inner.attr().max_sge)?;
        let shared = Arc::new(SharedQueue::new(inner, pd, config.max_wr, config.max_sge)?);
        Ok(Srq { shared, cursor: PostCursor::default(), handle: self.handle.clone() })
    }

    pub(crate) fn create_ah(&self, to: &DeviceAddress) -> Result<Ah, DeviceError> {
        Ok(Ah { link: self.handle.inner.link(to)?, address: *to })
    }
}

/// A resolved device address.
#[derive(Debug)]
pub struct Ah {
    pub(super) link: Arc<Link>,
    address: DeviceAddress,
}

impl Ah {
    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }
}

/// A reliable connected queue pair.
#[derive(Debug)]
pub struct RcQp {
    pub(super) local: Arc<QpLocal>,
    pub(super) config: QpConfig,
    /// The sending side; none while it waits in `QpLocal::waiting`, or before the first request.
    pub(super) peer: Option<Box<PeerQp>>,
    pub(super) link: Option<(Arc<Link>, QpAddress)>,
    pub(super) connect: ConnectConfig,
    /// Send requests accepted, ever.
    pub(super) sq_posted: u64,
    /// Requests before this were dropped by a reset.
    pub(super) sq_base: u64,
    #[expect(dead_code, reason = "keeps the device open")]
    handle: Arc<Handle>,
}

impl RcQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.local.num
    }

    pub(crate) fn state(&self) -> QpState {
        self.local.state()
    }

    pub(crate) fn address(&self) -> QpAddress {
        QpAddress { device: self.local.inner.address(), qp_num: self.local.num, psn: 0 }
    }

    pub(crate) fn init(&mut self, access: Access) -> Result<(), DeviceError> {
        if self.state() != QpState::Reset {
            return Err(self.local.wrong_state("going to INIT", "RESET"));
        }
        self.local.block.access.store(access.bits(), Relaxed);
        self.local.set_state(QpState::Init);
        Ok(())
    }

    pub(crate) fn ready_to_receive(
        &mut self,
        peer: &QpAddress,
        config: &ConnectConfig,
    ) -> Result<(), DeviceError> {
        if self.state() != QpState::Init {
            return Err(self.local.wrong_state("going to RTR", "INIT"));
        }
        let link = self.local.inner.link(&peer.device)?;
        let local = &self.local;
        let [low, high] = gid_words(&peer.device.gid);
        local.block.access.store(config.access.bits(), Relaxed);
        local.block.rnr_timer.store(config.min_rnr_timer.into(), Relaxed);
        local.block.peer_qp.store(peer.qp_num, Relaxed);
        local.block.peer_gid[0].store(low, Relaxed);
        local.block.peer_gid[1].store(high, Relaxed);
        *locked(&local.peer) = Some(peer.device.gid);
        self.link = Some((link, *peer));
        local.set_state(QpState::ReadyToReceive);
        if local.state() == QpState::ReadyToReceive {
            // Release, partner: the peer's Acquire load in `PeerQp::attach`: it sees all of the above.
            local.block.connection.store(Connection::ready(local.epoch()).0, Release);
        }
        // The peer may have died since the link was made, too early to be connected with this queue pair.
        if self.link.as_ref().is_some_and(|(link, _)| link.is_dead()) {
            local.break_off();
        }
        Ok(())
    }

    pub(crate) fn ready_to_send(&mut self, config: &ConnectConfig) -> Result<(), DeviceError> {
        if self.state() != QpState::ReadyToReceive {
            return Err(self.local.wrong_state("going to RTS", "RTR"));
        }
        self.connect = *config;
        self.local.set_state(QpState::ReadyToSend);
        Ok(())
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.local.break_off();
        Ok(())
    }

    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        let local = &self.local;
        self.peer = None;
        self.link = None;
        {
            // Under this lock the service breaks the connection that a peer means, and pushes the flush marker: neither
            // can hit the next connection.
            let _one_at_a_time = locked(&local.inner.service.healing);
            local.state.store(QpState::Reset as u8, Release);
            local.epoch.fetch_add(1, Relaxed);
        }
        if !local.shut() {
            local.break_off();
            return Err(DeviceError::Unreachable(
                "the peer is stuck inside an operation on this queue pair".into(),
            ));
        }
        *locked(&local.peer) = None;
        local.block.requester.claim.store(reservation::IDLE, Relaxed);
        if let Recv::Own(queue) = &local.recv {
            local.block.requester.taken.store(queue.reset(), Relaxed);
        }
        self.sq_base = self.sq_posted;
        Ok(())
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let state = self.state();
        let Recv::Own(queue) = &self.local.recv else {
            return Err(PostError::Invalid("the queue pair is on a shared receive queue: post there"));
        };
        if state == QpState::Reset {
            return Err(PostError::WrongState(state));
        }
        queue.post(&self.local.block.line1, wr)?;
        if state == QpState::Error {
            self.local.request_flush();
        }
        Ok(())
    }

    pub(crate) fn breaker(&self) -> Breaker {
        Breaker { local: self.local.clone() }
    }

    /// Puts a request into the queue of those that wait, with the sending side.
    pub(super) fn stall(&mut self, wr: WaitingWr) {
        {
            let mut waiting = locked(&self.local.waiting);
            if let Some(peer) = self.peer.take() {
                waiting.peer = Some(peer);
            }
            waiting.queue.push_back(wr);
        }
        Stalled::add(&self.local.inner, &self.local);
    }
}

impl Drop for RcQp {
    fn drop(&mut self) {
        destroy(&self.local);
    }
}

/// Moves a queue pair to ERR from any thread.
#[derive(Clone, Debug)]
pub struct Breaker {
    local: Arc<QpLocal>,
}

impl Breaker {
    pub(crate) fn fail(&self) {
        if !self.local.destroyed.load(Acquire) {
            self.local.break_off();
        }
    }
}

/// An unreliable datagram queue pair.
#[derive(Debug)]
pub struct UdQp {
    pub(super) local: Arc<QpLocal>,
    pub(super) config: QpConfig,
    cursor: PostCursor,
    pub(super) targets: Vec<super::datagram::Target>,
    pub(super) sq_posted: u64,
    #[expect(dead_code, reason = "keeps the device open")]
    handle: Arc<Handle>,
}

impl UdQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.local.num
    }

    pub(crate) fn state(&self) -> QpState {
        self.local.state()
    }

    pub(crate) fn activate(&mut self, qkey: u32) -> Result<(), DeviceError> {
        if self.state() != QpState::Reset {
            return Err(self.local.wrong_state("activating", "RESET"));
        }
        self.local.block.access.store(qkey, Relaxed);
        self.local.set_state(QpState::ReadyToSend);
        // Release, partner: the sender's Acquire load in `datagram::Target`.
        self.local.block.connection.store(Connection::ready(self.local.epoch()).0, Release);
        Ok(())
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.local.break_off();
        Ok(())
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let Recv::Datagram(queue) = &self.local.recv else {
            return Err(PostError::Invalid("the queue pair is on a shared receive queue: post there"));
        };
        let state = self.local.state();
        if state == QpState::Reset {
            return Err(PostError::WrongState(state));
        }
        queue.post(&mut self.cursor, wr)?;
        if state == QpState::Error {
            self.local.request_flush();
        }
        Ok(())
    }
}

impl Drop for UdQp {
    fn drop(&mut self) {
        destroy(&self.local);
    }
}

pub(super) fn gid_words(gid: &[u8; 16]) -> [u64; 2] {
    let (low, high) = gid.split_at(8);
    [
        u64::from_ne_bytes(low.try_into().unwrap_or_default()),
        u64::from_ne_bytes(high.try_into().unwrap_or_default()),
    ]
}

/// Who takes a shared receive for the queue pair with this number.
pub(super) fn taker(num: u32) -> u16 {
    taker_of_qp(QpNum::from_bits(num).index())
}
