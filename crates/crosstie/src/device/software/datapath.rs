//! Requests of connected queue pairs, done by the thread that posts them.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use super::control::Request;
use super::cqring::{CqRing, Entry, Overrun};
use super::layout::{
    Connection, CqeKind, IN_PLACE, KIND_RC, PeerLine, QPS_AT, QpBlock, QpNum, RegionKey, short_epoch,
};
use super::link::Link;
use super::qp::{QpLocal, RcQp, Waiting, gid_words, taker};
use super::recv::{Piece, RECV_ACCESS, RecvTarget};
use super::setup::locked;
use crate::device::{
    Access, ConnectConfig, Data, Opcode, PostError, QpState, SendOp, SendWr, Sge, Status, rnr_delay,
};
use crate::memory::copy::copy;
use crate::memory::prefetch;
use crate::memory::segment::SharedRef;
use crate::ring::fence;

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
    connect: ConnectConfig,
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

/// A request that waits, with its own copy of everything.
#[derive(Debug)]
pub(super) struct WaitingWr {
    wr_id: u64,
    op: SendOp,
    data: WaitingData,
    len: u32,
    signaled: bool,
    position: u64,
    /// When to try again.
    due: Instant,
    /// When to give up on a peer that is not ready.
    deadline: Option<Instant>,
    rnr_left: u8,
}

#[derive(Debug)]
enum WaitingData {
    Inline(Box<[u8]>),
    Regions(Box<[Sge<'static>]>),
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
fn local(status: Status) -> Trouble {
    Trouble::Failed { status, tell_peer: false }
}

/// A failure in which a NIC takes both sides to ERR.
fn both(status: Status) -> Trouble {
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

/// Pause between looks at a peer that is not ready.
const NOT_READY_PAUSE: Duration = Duration::from_micros(200);

/// Ends a request in failure: completion, ERR, word to the peer.
fn give_up(qp: &Arc<QpLocal>, peer: &PeerQp, wr_id: u64, position: u64, status: Status, tell_peer: bool) {
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
fn opcode(op: &SendOp) -> Opcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) => Opcode::Send,
        SendOp::Write(_) | SendOp::WriteImm(..) => Opcode::Write,
        SendOp::Read(_) => Opcode::Read,
        SendOp::CompareSwap { .. } => Opcode::CompareSwap,
        SendOp::FetchAdd { .. } => Opcode::FetchAdd,
    }
}

/// Marks us as being inside an operation on a peer's segment, so that nothing there goes away under us.
pub(super) struct Inside<'a> {
    busy: &'a AtomicU64,
}

impl<'a> Inside<'a> {
    #[inline]
    pub(super) fn enter(line: &'a PeerLine) -> Inside<'a> {
        let busy = &line.busy;
        busy.store(busy.load(Relaxed).wrapping_add(1) | 1, Relaxed);
        // Store of `busy` before the loads that follow: whoever takes something away stores that, then passes a heavy
        // barrier, then looks at `busy` (`Inner::quiesce`).
        fence::light();
        Inside { busy }
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release, partner: the Acquire loads in `Inner::quiesce`. All our accesses are over.
        self.busy.store(self.busy.load(Relaxed).wrapping_add(1), Release);
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
fn execute(peer: &mut PeerQp, qp: &QpLocal, op: &SendOp, data: &Data<'_>, len: u32) -> Result<(), Trouble> {
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
                prefetch::for_write(at);
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
                    prefetch::demote(at);
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

/// Puts the former value where an atomic's data goes.
fn bring(data: &Data<'_>, former: u64) {
    if let Data::Regions([sge, ..]) = data {
        let to = core::ptr::with_exposed_provenance_mut(sge.addr as usize);
        // SAFETY: the piece is 8 bytes (checked when posted) of a live region with local write access.
        unsafe { copy(former.to_ne_bytes().as_ptr(), to, 8) };
    }
}

/// Memory of a peer, checked.
#[derive(Clone, Copy)]
pub(super) enum Place {
    /// Mapped here.
    Direct(*mut u8),
    /// Registered in place by another process.
    InPlace { addr: u64, key: u32 },
}

impl Place {
    /// The place `offset` bytes further on, inside what was checked.
    fn at(self, offset: usize) -> Place {
        match self {
            Place::Direct(at) => Place::Direct(at.wrapping_add(offset)),
            Place::InPlace { addr, key } => Place::InPlace { addr: addr.wrapping_add(offset as u64), key },
        }
    }
}

/// The memory side of a peer, for one operation.
pub(super) struct Target<'a> {
    pub(super) link: &'a Link,
    pub(super) pd: u32,
}

impl Target<'_> {
    /// The place that a key and an address name, if they do and it allows `access`. `None` otherwise.
    #[inline(always)]
    fn region(&self, key: u32, addr: u64, len: u32, access: Access) -> Option<Place> {
        let entry = &self.link.regions[RegionKey::from_bits(key).index() as usize];
        // Acquire, partner: the Release store in `Pd::enter`.
        if entry.key.load(Acquire) != key || key == 0 {
            return None;
        }
        let offset = addr.wrapping_sub(entry.addr.load(Relaxed));
        let size = entry.len.load(Relaxed);
        if offset > size
            || u64::from(len) > size - offset
            || entry.pd.load(Relaxed) != self.pd
            || !Access::from_bits_truncate(entry.access.load(Relaxed)).contains(access)
        {
            return None;
        }
        match entry.offset.load(Relaxed) {
            IN_PLACE if self.link.pid.is_none() => {
                Some(Place::Direct(core::ptr::with_exposed_provenance_mut(addr as usize)))
            }
            IN_PLACE => Some(Place::InPlace { addr, key }),
            start => {
                let at = self.link.segment.bytes(start.checked_add(offset)?, len.into())?;
                Some(Place::Direct(at.as_ptr()))
            }
        }
    }

    /// The place of a WRITE or READ.
    #[inline(always)]
    fn remote(&self, key: u32, addr: u64, len: u32, access: Access) -> Result<Place, Trouble> {
        if len == 0 {
            // As on a NIC, nothing is looked at.
            return Ok(Place::Direct(core::ptr::dangling_mut()));
        }
        self.region(key, addr, len, access).ok_or(both(Status::RemoteAccess))
    }

    /// The place of an atomic.
    fn atomic(&self, key: u32, addr: u64) -> Result<Place, Trouble> {
        if !addr.is_multiple_of(8) {
            return Err(both(Status::RemoteInvalidRequest));
        }
        match self.region(key, addr, 8, Access::REMOTE_ATOMIC) {
            Some(Place::Direct(at)) if !at.cast::<u64>().is_aligned() => {
                Err(both(Status::RemoteInvalidRequest))
            }
            Some(place) => Ok(place),
            None => Err(both(Status::RemoteAccess)),
        }
    }

    /// Copies `len` bytes from local memory.
    ///
    /// # Safety
    ///
    /// `from..from + len` is valid for reads and `to` was checked for `len` bytes.
    #[inline(always)]
    unsafe fn copy_to(&self, to: Place, from: *const u8, len: usize) -> Result<(), Status> {
        match to {
            // SAFETY: the caller's promise. Overlap (a loop to the same memory) yields some mixture, as on a NIC.
            Place::Direct(to) => unsafe { copy(from, to, len) },
            // SAFETY: the caller's promise; the memory is only read.
            Place::InPlace { addr, key } => unsafe {
                self.link.copy_in_place(true, key, addr, from.cast_mut(), len)?;
            },
        }
        Ok(())
    }

    /// Writes a request's data.
    #[inline(always)]
    fn put(&self, to: Place, data: &Data<'_>) -> Result<(), Trouble> {
        match data {
            // SAFETY: the slice is readable; the place was checked for the whole message.
            Data::Inline(bytes) => unsafe { self.copy_to(to, bytes.as_ptr(), bytes.len()) }.map_err(both),
            Data::Regions(sges) => {
                let mut offset = 0;
                for sge in *sges {
                    let from = core::ptr::with_exposed_provenance(sge.addr as usize);
                    // SAFETY: the piece is inside a live region; the place was checked for the whole message.
                    unsafe { self.copy_to(to.at(offset), from, sge.len as usize) }.map_err(both)?;
                    offset += sge.len as usize;
                }
                Ok(())
            }
        }
    }

    /// Reads into a request's data.
    fn get(&self, from: Place, data: &Data<'_>) -> Result<(), Trouble> {
        let Data::Regions(sges) = data else { return Ok(()) };
        let mut offset = 0;
        for sge in *sges {
            let to = core::ptr::with_exposed_provenance_mut::<u8>(sge.addr as usize);
            match from.at(offset) {
                // SAFETY: the piece is inside a live region with local write access; the place was checked.
                Place::Direct(from) => unsafe { copy(from, to, sge.len as usize) },
                // SAFETY: as above.
                Place::InPlace { addr, key } => unsafe {
                    self.link.copy_in_place(false, key, addr, to, sge.len as usize).map_err(both)?;
                },
            }
            offset += sge.len as usize;
        }
        Ok(())
    }

    /// Spreads `head` and then a request's data over the pieces of a receive. The status is the receiver's.
    pub(super) fn scatter(
        &self,
        mut pieces: impl Iterator<Item = Piece>,
        head: &[u8],
        data: &Data<'_>,
    ) -> Result<(), Status> {
        let mut room: Option<(Place, usize)> = None;
        let mut put = |mut from: *const u8, mut len: usize| -> Result<(), Status> {
            while len > 0 {
                let (place, left) = match room.take() {
                    Some((place, left)) if left > 0 => (place, left),
                    _ => {
                        let piece = pieces.next().ok_or(Status::LocalLength)?;
                        let place = self
                            .region(piece.lkey, piece.addr, piece.len, RECV_ACCESS)
                            .ok_or(Status::LocalProtection)?;
                        (place, piece.len as usize)
                    }
                };
                let now = len.min(left);
                // SAFETY: `from` is inside the source; the place was checked for `left` bytes.
                unsafe { self.copy_to(place, from, now)? };
                room = Some((place.at(now), left - now));
                from = from.wrapping_add(now);
                len -= now;
            }
            Ok(())
        };
        put(head.as_ptr(), head.len())?;
        match data {
            Data::Inline(bytes) => put(bytes.as_ptr(), bytes.len()),
            Data::Regions(sges) => sges.iter().try_for_each(|sge| {
                put(core::ptr::with_exposed_provenance(sge.addr as usize), sge.len as usize)
            }),
        }
    }
}

impl WaitingWr {
    fn new(wr: &SendWr<'_>, len: u32, position: u64, due: Instant, connect: &ConnectConfig) -> WaitingWr {
        let data = match wr.data {
            Data::Inline(bytes) => WaitingData::Inline(bytes.into()),
            // The borrow ends here; before these are used again their keys are looked up, as a NIC does.
            Data::Regions(sges) => WaitingData::Regions(
                sges.iter().map(|sge| Sge { region: core::marker::PhantomData, ..*sge }).collect(),
            ),
        };
        let tries = u32::from(connect.retry_count) + 1;
        let timeout = Duration::from_nanos(4096u64 << connect.timeout.min(31)) * tries;
        WaitingWr {
            wr_id: wr.wr_id,
            op: wr.op,
            data,
            len,
            signaled: wr.signaled,
            position,
            due,
            deadline: (connect.timeout != 0).then(|| Instant::now() + timeout),
            rnr_left: connect.rnr_retry,
        }
    }
}

/// Tries what waits on a queue pair. Says when to try again, or that nothing waits any more.
///
/// Called by the progress thread alone, which holds off the deregistration of regions meanwhile.
pub(super) fn resume(qp: &Arc<QpLocal>) -> Option<Instant> {
    let mut waiting = locked(&qp.waiting);
    let Waiting { peer, queue } = &mut *waiting;
    loop {
        let peer = peer.as_deref_mut()?;
        let request = queue.front_mut()?;
        if qp.state() != QpState::ReadyToSend {
            // The request that was being tried when the peer died got no answer; the rest was never tried.
            let mut status = if peer.link.is_dead() { Status::RetryExceeded } else { Status::Flushed };
            for request in queue.drain(..) {
                qp.complete_send(request.wr_id, Opcode::Unspecified, status, 0, request.position);
                status = Status::Flushed;
            }
            return None;
        }
        let now = Instant::now();
        if request.due > now {
            return Some(request.due);
        }
        let outcome = if still_registered(qp, &request.data) {
            let data = match &request.data {
                WaitingData::Inline(bytes) => Data::Inline(bytes),
                WaitingData::Regions(sges) => Data::Regions(sges),
            };
            execute(peer, qp, &request.op, &data, request.len)
        } else {
            Err(local(Status::LocalProtection))
        };
        let failed = match outcome {
            Ok(()) => {
                if request.signaled {
                    let opcode = opcode(&request.op);
                    qp.complete_send(request.wr_id, opcode, Status::Success, request.len, request.position);
                }
                queue.pop_front();
                // The next one waited for this one only: its time begins now.
                if let Some(next) = queue.front_mut() {
                    let connect = &peer.connect;
                    let tries = u32::from(connect.retry_count) + 1;
                    let timeout = Duration::from_nanos(4096u64 << connect.timeout.min(31)) * tries;
                    next.deadline = (connect.timeout != 0).then(|| now + timeout);
                }
                continue;
            }
            Err(Trouble::NoReceive(timer)) => {
                if peer.connect.rnr_retry == 7 || request.rnr_left > 0 {
                    request.rnr_left = request.rnr_left.saturating_sub(1);
                    request.due = now + rnr_delay(timer);
                    return Some(request.due);
                }
                (Status::RnrRetryExceeded, false)
            }
            Err(Trouble::NotReady) => {
                let late = request.deadline.is_some_and(|deadline| now >= deadline);
                if !late && !peer.link.is_dead() {
                    request.due = now + NOT_READY_PAUSE;
                    return Some(request.due);
                }
                (Status::RetryExceeded, false)
            }
            Err(Trouble::Failed { status, tell_peer }) => (status, tell_peer),
        };
        let (status, tell_peer) = failed;
        let (wr_id, position) = (request.wr_id, request.position);
        queue.pop_front();
        give_up(qp, peer, wr_id, position, status, tell_peer);
    }
}

fn still_registered(qp: &QpLocal, data: &WaitingData) -> bool {
    let WaitingData::Regions(sges) = data else { return true };
    sges.iter().all(|sge| {
        let entry = &qp.inner.regions[RegionKey::from_bits(sge.lkey).index() as usize];
        // Acquire, partner: the Release store in `Pd::enter`.
        entry.key.load(Acquire) == sge.lkey
    })
}
