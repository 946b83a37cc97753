//! Requests of connected queue pairs, done by the thread that posts them.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Instant;

use super::control::Request;
use super::cqring::{CqRing, Entry, Overrun};
use super::layout::{Connection, CqeKind, KIND_RC, QPS_AT, QpBlock, QpNum, short_epoch};
use super::link::Link;
use super::qp::{QpLocal, RcQp, Waiting, gid_words, taker};
use super::reach::{Inside, Place, Target, bring};
use super::recv::RecvTarget;
use super::setup::locked;
use super::waiting::{NOT_READY_PAUSE, WaitingWr};
use crate::device::{
    Access, ConnectConfig, Data, Opcode, PostError, QpState, SendOp, SendWr, Status, rnr_delay,
};
use crate::memory::prefetch;
use crate::memory::segment::SharedRef;

/// Up to here the completion's place is reserved before the bytes are copied: both lines travel at once. Beyond, others
/// would wait too long behind the reservation.
const SMALL: u32 = 256;

/// How many messages ahead the line of a payload is asked for, where payloads follow each other at a constant distance,
/// as in a ring. A store that waits for its line holds up all stores behind it.
const AHEAD: usize = 2;

/// How long a request spins for a receive before it waits its turn.
const RNR_SPINS: u32 = 64;

/// The sending side of a queue pair: the peer's queue pair, as far as it is ready.
#[derive(Debug)]
pub(super) struct PeerQp {
    pub(super) link: Arc<Link>,
    num: u32,
    block: SharedRef<QpBlock>,
    attached: Option<Attached>,
    pub(super) connect: ConnectConfig,
}

/// What a ready peer's block said. Valid as long as its connection word does not change.
#[derive(Debug)]
struct Attached {
    connection: Connection,
    ring: CqRing,
    recv: RecvTarget,
    pd: u32,
    access: Access,
    rnr_timer: u8,
    /// Where the last WRITE+IMM went.
    last_at: usize,
}

/// Why a request was not done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The peer's queue pair is not ready for us.
    NotReady,
    /// The peer has no receive; try again after its timer.
    NoReceive(u8),
    /// It failed. If the peer's queue pair has to go to ERR too, it must be told.
    Failed { status: Status, tell_peer: bool },
}

/// A failure that is ours alone.
pub(super) fn local(status: Status) -> Trouble {
    Trouble::Failed { status, tell_peer: false }
}

/// A failure in which a NIC takes both sides to ERR.
pub(super) fn both(status: Status) -> Trouble {
    Trouble::Failed { status, tell_peer: true }
}

impl RcQp {
    #[inline]
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let len = self.check(wr)?;
        let position = self.sq_posted;
        let Some(peer) = self.peer.as_deref_mut() else {
            return self.post_without_peer(wr, len);
        };
        if self.local.state() != QpState::ReadyToSend {
            self.sq_posted += 1;
            self.local.complete_send(wr.wr_id, Opcode::Unspecified, Status::Flushed, 0, position);
            return Ok(());
        }
        match execute(peer, &self.local, &wr.op, &wr.data, len) {
            Ok(()) => {
                self.sq_posted = position + 1;
                if wr.signaled {
                    self.local.complete_send(wr.wr_id, opcode(&wr.op), Status::Success, len, position);
                }
            }
            Err(trouble) => self.settle_trouble(wr, len, trouble),
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn batch_begin(&mut self) {}

    #[inline]
    pub(crate) fn batch_post(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.post(wr)
    }

    #[inline]
    pub(crate) fn batch_submit(&mut self) -> Result<(), PostError> {
        Ok(())
    }

    /// What is refused at once; otherwise the message's length.
    #[inline]
    fn check(&self, wr: &SendWr<'_>) -> Result<u32, PostError> {
        let state = self.local.state();
        if state != QpState::ReadyToSend && state != QpState::Error {
            return Err(PostError::WrongState(state));
        }
        let len = check_data(&wr.data, &self.config, self.local.inner.attr().max_message)?;
        match (&wr.op, &wr.data) {
            (SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Data::Inline(_)) => {
                return Err(PostError::Invalid("READ and atomics bring data: inline has nowhere to put it"));
            }
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Data::Regions(sges))
                if sges.len() != 1 || len != 8 =>
            {
                return Err(PostError::Invalid("atomics bring 8 bytes into one piece"));
            }
            _ => {}
        }
        // Acquire, partner: the Release store in `Cq::poll`.
        let done = self.local.sq_done.load(Acquire).max(self.sq_base);
        if self.sq_posted.wrapping_sub(done) >= self.config.max_send_wr.into() {
            return Err(PostError::Full);
        }
        Ok(len)
    }

    /// The sending side is with the progress thread, or there never was one.
    #[cold]
    fn post_without_peer(&mut self, wr: &SendWr<'_>, len: u32) -> Result<(), PostError> {
        let position = self.sq_posted;
        let busy = {
            let mut waiting = locked(&self.local.waiting);
            let Waiting { peer, queue } = &mut *waiting;
            if queue.is_empty() {
                self.peer = peer.take();
            }
            !queue.is_empty()
        };
        if busy {
            self.sq_posted += 1;
            self.stall(WaitingWr::new(wr, len, position, Instant::now(), &self.connect));
            return Ok(());
        }
        if self.peer.is_none() {
            self.peer = self
                .link
                .as_ref()
                .and_then(|(link, to)| PeerQp::new(link, to.qp_num, &self.connect))
                .map(Box::new);
        }
        if self.peer.is_some() && self.local.state() == QpState::ReadyToSend {
            return self.post(wr);
        }
        // Broken before it was ever connected.
        self.sq_posted += 1;
        self.local.complete_send(wr.wr_id, Opcode::Unspecified, Status::Flushed, 0, position);
        Ok(())
    }

    #[cold]
    fn settle_trouble(&mut self, wr: &SendWr<'_>, len: u32, trouble: Trouble) {
        let position = self.sq_posted;
        self.sq_posted += 1;
        let now = Instant::now();
        match trouble {
            Trouble::Failed { status, tell_peer } => {
                if let Some(peer) = &self.peer {
                    give_up(&self.local, peer, wr.wr_id, position, status, tell_peer);
                }
            }
            Trouble::NotReady => {
                let due = now + NOT_READY_PAUSE;
                self.stall(WaitingWr::new(wr, len, position, due, &self.connect));
            }
            Trouble::NoReceive(timer) => {
                self.stall(WaitingWr::new(wr, len, position, now + rnr_delay(timer), &self.connect));
            }
        }
    }
}

/// Ends a request in failure: completion, ERR, word to the peer.
pub(super) fn give_up(
    qp: &Arc<QpLocal>,
    peer: &PeerQp,
    wr_id: u64,
    position: u64,
    status: Status,
    tell_peer: bool,
) {
    qp.complete_send(wr_id, Opcode::Unspecified, status, 0, position);
    qp.break_off();
    if tell_peer {
        peer.link.tell(&Request { qp_num: peer.num, a: peer.epoch(), ..Request::new(Request::QP_ERROR) });
    }
}

/// Lengths and counts of a request's data.
#[inline]
pub(super) fn check_data(
    data: &Data<'_>,
    config: &crate::device::QpConfig,
    max: u64,
) -> Result<u32, PostError> {
    match data {
        Data::Inline(bytes) => {
            if bytes.len() > config.max_inline as usize {
                return Err(PostError::InlineTooLong { len: bytes.len(), max: config.max_inline as usize });
            }
            Ok(bytes.len() as u32)
        }
        Data::Regions(sges) => {
            if sges.len() > config.max_send_sge as usize {
                return Err(PostError::TooManySges { count: sges.len(), max: config.max_send_sge as usize });
            }
            let total: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
            if total > max {
                return Err(PostError::TooLong(total));
            }
            Ok(total as u32)
        }
    }
}

#[inline]
pub(super) fn opcode(op: &SendOp) -> Opcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) => Opcode::Send,
        SendOp::Write(_) | SendOp::WriteImm(..) => Opcode::Write,
        SendOp::Read(_) => Opcode::Read,
        SendOp::CompareSwap { .. } => Opcode::CompareSwap,
        SendOp::FetchAdd { .. } => Opcode::FetchAdd,
    }
}

impl PeerQp {
    fn new(link: &Arc<Link>, num: u32, connect: &ConnectConfig) -> Option<PeerQp> {
        let at = QPS_AT + u64::from(QpNum::from_bits(num).index()) * size_of::<QpBlock>() as u64;
        let block = SharedRef::new(&link.segment, at)?;
        Some(PeerQp { link: link.clone(), num, block, attached: None, connect: *connect })
    }

    /// Which of the peer's connections this is.
    fn epoch(&self) -> u64 {
        self.attached.as_ref().map_or(0, |attached| attached.connection.epoch())
    }
}

/// Reads a peer's block. We must be inside.
#[cold]
fn attach(link: &Link, block: &QpBlock, num: u32, qp: &QpLocal) -> Result<Attached, Trouble> {
    // Acquire, partner: the Release store in `RcQp::ready_to_receive`.
    let connection = Connection(block.connection.load(Acquire));
    let [low, high] = gid_words(&qp.inner.gid);
    if !connection.is_ready()
        || block.qp_num.load(Relaxed) != num
        || block.kind.load(Relaxed) != KIND_RC
        || block.peer_qp.load(Relaxed) != qp.num
        || block.peer_gid[0].load(Relaxed) != low
        || block.peer_gid[1].load(Relaxed) != high
    {
        return Err(Trouble::NotReady);
    }
    let ring = CqRing::new(&link.segment, block.recv_cq.load(Relaxed)).ok_or(both(Status::BadResponse))?;
    let recv = RecvTarget::new(&link.segment, block, taker(num)).ok_or(both(Status::BadResponse))?;
    Ok(Attached {
        connection,
        ring,
        recv,
        pd: block.pd.load(Relaxed),
        access: Access::from_bits_truncate(block.access.load(Relaxed)),
        rnr_timer: block.rnr_timer.load(Relaxed) as u8 & 31,
        last_at: 0,
    })
}

/// Does one request, now.
#[inline(always)]
pub(super) fn execute(
    peer: &mut PeerQp,
    qp: &QpLocal,
    op: &SendOp,
    data: &Data<'_>,
    len: u32,
) -> Result<(), Trouble> {
    check_local(qp.pd, op, data)?;
    let PeerQp { link, num, block, attached, .. } = peer;
    let (link, num, block): (&Link, u32, &QpBlock) = (link, *num, block);
    let inside = Inside::enter(&block.requester);
    // Acquire, partner: the Release store in `RcQp::ready_to_receive`.
    let connection = Connection(block.connection.load(Acquire));
    if attached.as_ref().is_none_or(|attached| attached.connection != connection) {
        *attached = None;
        *attached = Some(attach(link, block, num, qp)?);
    }
    let Some(attached) = attached else { return Err(Trouble::NotReady) };
    let target = Target { link, pd: attached.pd };
    match *op {
        SendOp::Write(to) => {
            permit(attached, Access::REMOTE_WRITE)?;
            let place = target.remote(to.rkey, to.addr, len, Access::REMOTE_WRITE)?;
            target.put(place, data)?;
        }
        SendOp::WriteImm(to, imm) => {
            attached.ring.expect_push();
            permit(attached, Access::REMOTE_WRITE)?;
            let place = target.remote(to.rkey, to.addr, len, Access::REMOTE_WRITE)?;
            if let Place::Direct(at) = place {
                each_line(at, len, prefetch::for_write);
                let stride = at.addr().wrapping_sub(attached.last_at);
                attached.last_at = at.addr();
                // A wrong guess asks for a line in vain; addresses that are none are no harm.
                prefetch::for_write(at.wrapping_add(stride.wrapping_mul(AHEAD)));
            }
            let slot = take(attached, block)?;
            let entry = received(attached, num, qp.num, slot, Opcode::RecvWriteImm, len, Some(imm));
            let claim = &block.requester.claim;
            let overrun = |Overrun| overrun(link, num, connection);
            if let (Place::Direct(_), ..=SMALL) = (place, len) {
                let position = attached.ring.reserve(claim).map_err(overrun)?;
                target.put(place, data)?;
                attached.ring.publish(claim, position, &entry);
                if let Place::Direct(at) = place {
                    each_line(at, len, prefetch::demote);
                }
            } else {
                target.put(place, data)?;
                attached.ring.push(claim, &entry).map_err(overrun)?;
            }
        }
        SendOp::Send | SendOp::SendImm(_) => {
            let imm = if let SendOp::SendImm(imm) = *op { Some(imm) } else { None };
            let slot = take(attached, block)?;
            let mut entry = received(attached, num, qp.num, slot, Opcode::Recv, len, imm);
            let scattered = target.scatter(attached.recv.pieces(slot), &[], data);
            if let Err(status) = scattered {
                entry.status = status;
                entry.opcode = Opcode::Unspecified;
            }
            let pushed = attached.ring.push(&block.requester.claim, &entry);
            match scattered {
                Err(Status::LocalLength) => return Err(both(Status::RemoteInvalidRequest)),
                Err(_) => return Err(both(Status::RemoteOperation)),
                Ok(()) => pushed.map_err(|Overrun| overrun(link, num, connection))?,
            }
        }
        SendOp::Read(from) => {
            permit(attached, Access::REMOTE_READ)?;
            let place = target.remote(from.rkey, from.addr, len, Access::REMOTE_READ)?;
            target.get(place, data)?;
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            permit(attached, Access::REMOTE_ATOMIC)?;
            let place = target.atomic(remote.rkey, remote.addr)?;
            let former = match place {
                // SAFETY: `atomic` gave an aligned address of 8 bytes that stay while we are inside.
                Place::Direct(at) => match unsafe { AtomicU64::from_ptr(at.cast()) }.compare_exchange(
                    compare,
                    swap,
                    core::sync::atomic::Ordering::SeqCst,
                    core::sync::atomic::Ordering::SeqCst,
                ) {
                    Ok(former) | Err(former) => former,
                },
                Place::InPlace { addr, key } => {
                    link.atomic_in_place(Request::COMPARE_SWAP, key, addr, compare, swap).map_err(both)?
                }
            };
            bring(data, former);
        }
        SendOp::FetchAdd { remote, add } => {
            permit(attached, Access::REMOTE_ATOMIC)?;
            let former = match target.atomic(remote.rkey, remote.addr)? {
                // SAFETY: as above.
                Place::Direct(at) => unsafe { AtomicU64::from_ptr(at.cast()) }
                    .fetch_add(add, core::sync::atomic::Ordering::SeqCst),
                Place::InPlace { addr, key } => {
                    link.atomic_in_place(Request::FETCH_ADD, key, addr, add, 0).map_err(both)?
                }
            };
            bring(data, former);
        }
    }
    drop(inside);
    Ok(())
}

/// Hints at the lines of a small payload: its first, and that of its last byte or the next one.
#[inline(always)]
fn each_line(at: *mut u8, len: u32, hint: impl Fn(*const u8)) {
    hint(at);
    hint(at.wrapping_add((len as usize).clamp(1, 128) - 1));
}

/// Whether the request may touch the local memory that it names.
#[inline]
pub(super) fn check_local(pd: u32, op: &SendOp, data: &Data<'_>) -> Result<(), Trouble> {
    if let Data::Regions(sges) = data {
        let writes = matches!(op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        for sge in *sges {
            if sge.pd != pd || (writes && !sge.access.contains(Access::LOCAL_WRITE)) {
                return Err(local(Status::LocalProtection));
            }
        }
    }
    Ok(())
}

#[inline]
fn permit(attached: &Attached, access: Access) -> Result<(), Trouble> {
    if attached.access.contains(access) { Ok(()) } else { Err(both(Status::RemoteInvalidRequest)) }
}

#[inline(always)]
fn take(attached: &mut Attached, block: &QpBlock) -> Result<super::recv::Taken, Trouble> {
    if let Some(slot) = attached.recv.take(block) {
        return Ok(slot);
    }
    for _ in 0..RNR_SPINS {
        core::hint::spin_loop();
        if let Some(slot) = attached.recv.take(block) {
            return Ok(slot);
        }
    }
    Err(Trouble::NoReceive(attached.rnr_timer))
}

#[inline(always)]
fn received(
    attached: &Attached,
    num: u32,
    from: u32,
    slot: super::recv::Taken,
    opcode: Opcode,
    byte_len: u32,
    imm: Option<u32>,
) -> Entry {
    Entry {
        kind: if attached.recv.is_shared() { CqeKind::SharedRecv } else { CqeKind::Recv },
        opcode,
        status: Status::Success,
        wr: u64::from(from) << 32 | u64::from(slot.slot),
        qp_num: num,
        byte_len,
        extra: imm.unwrap_or(0),
        has_imm: imm.is_some(),
        epoch: short_epoch(attached.connection.epoch()),
    }
}

#[cold]
fn overrun(link: &Link, num: u32, connection: Connection) -> Trouble {
    link.tell(&Request { qp_num: num, a: connection.epoch(), ..Request::new(Request::CQ_OVERRUN) });
    both(Status::RemoteOperation)
}
