//! Send requests of connected queue pairs, executed by the thread that posts them.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::Arc;
use std::time::Instant;

use super::control::Request;
use super::deferred::{DeferredWr, NOT_READY_RETRY};
use super::error::ExecuteError;
use super::lane::{LANE_DATA, NewEntry};
use super::layout::{ConnectionWord, PeerLine, QpBlock};
use super::link::Link;
use super::lock::locked;
use super::peer_memory::{PeerMemory, RemotePtr, store_atomic_result};
use super::peer_qp::{AttachedPeer, AttachedQp, PeerQp, attach};
use super::progress;
use super::qp::QpShared;
use super::quiescence::OperationGuard;
use super::rc::RcQp;
use super::recv::TakenRecv;
use super::request::{check_data, check_local, opcode};
use crate::device::{
    Access, Data, Opcode, PostError, Posted, QpState, SendOp, SendWr, Signal, Status, rnr_delay,
};
use crate::memory::prefetch::{self, CACHE_LINE};

/// The cache lines of messages up to this size are moved towards the receiver when the message is complete.
pub(super) const DEMOTE_MAX: u32 = 256;

/// How many messages ahead the cache line of a payload is prefetched if payloads follow each other at a constant distance,
/// as they do in a ring. A store that waits for its cache line blocks all stores behind it.
const PREFETCH_AHEAD: usize = 2;

/// The most cache lines of a payload that are prefetched before it is written. A processor does not fetch more at once.
const MAX_LINES_AHEAD: usize = 32;

/// How often a request looks for a receive before it is deferred.
const RNR_SPINS: u32 = 64;

impl RcQp {
    /// Executes the request, if that is possible now.
    #[inline(always)]
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        if let SendOp::WriteImm(to, imm) = wr.op
            && wr.signal != Signal::Always
            && self.try_write_imm_at_hand(to, imm, &wr.data)
        {
            return Ok(Posted::Done);
        }
        // A copy: so that the request was in registers until here.
        let wr = *wr;
        self.post_any(&wr)
    }

    #[inline(never)]
    fn post_any(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        let state = self.shared.state();
        let len = self.check(wr, state)?;
        let Some(peer) = self.peer.as_deref_mut() else {
            return self.post_without_peer(wr, len);
        };
        if state != QpState::ReadyToSend {
            self.complete_in_order(wr.wr_id, Opcode::Unspecified, Status::Flushed, 0);
            return Ok(Posted::Queued);
        }
        match execute(peer, &self.shared, &wr.op, &wr.data, len, wr.streaming) {
            Ok(()) if wr.signal != Signal::Always => return Ok(Posted::Done),
            Ok(()) => self.complete_in_order(wr.wr_id, opcode(&wr.op), Status::Success, len),
            Err(error) => self.handle_execute_error(wr, len, error),
        }
        Ok(Posted::Queued)
    }

    /// Counts a request as posted, and completes it.
    fn complete_in_order(&mut self, wr_id: u64, opcode: Opcode, status: Status, len: u32) {
        let position = self.sq_posted;
        self.sq_posted += 1;
        self.shared.complete_send(wr_id, opcode, status, len, position);
    }

    /// Posts a request that is older than the borrows of the regions it names, so that a region may have been deregistered:
    /// then the request fails, as it does on a NIC.
    pub(crate) fn post_detached(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        let device = &self.shared.device;
        // No region is deregistered between the check and the use.
        let _attempt = self.attempts.get_or_insert_with(|| device.attempts.add()).begin();
        let registered = match wr.data {
            Data::Inline(_) | Data::InlineHead { .. } => true,
            Data::Regions(sges) => device.regions.are_registered(sges),
        };
        // A request behind deferred ones is deferred, too; then the regions are checked before they are used.
        if registered || self.shared.has_deferred_sends() || self.shared.state() != QpState::ReadyToSend {
            return self.post(wr);
        }
        self.check(wr, QpState::ReadyToSend)?;
        self.complete_in_order(wr.wr_id, Opcode::Unspecified, Status::LocalProtection, 0);
        self.shared.move_to_error();
        Ok(Posted::Queued)
    }

    #[inline]
    pub(crate) fn batch_begin(&mut self) {}

    #[inline]
    pub(crate) fn batch_post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        self.post(wr)
    }

    #[inline]
    pub(crate) fn batch_submit(&mut self) -> Result<(), PostError> {
        Ok(())
    }

    /// Refuses what cannot be posted in this state; returns the message's length.
    #[inline]
    fn check(&mut self, wr: &SendWr<'_>, state: QpState) -> Result<u32, PostError> {
        if state != QpState::ReadyToSend && state != QpState::Error {
            return Err(PostError::WrongState(state));
        }
        let len = check_data(&wr.data, &self.config, self.max_message)?;
        match (&wr.op, &wr.data) {
            (
                SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. },
                Data::Inline(_) | Data::InlineHead { .. },
            ) => {
                return Err(PostError::Invalid(
                    "READ and atomics return data: give a region, not inline data",
                ));
            }
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Data::Regions(sges))
                if sges.len() != 1 || len != 8 =>
            {
                return Err(PostError::Invalid("an atomic returns 8 bytes: give one entry of 8 bytes"));
            }
            _ => {}
        }
        if self.is_send_queue_full() {
            return Err(PostError::Full);
        }
        Ok(len)
    }

    /// Completions are looked at only when the queue looks full.
    #[inline]
    pub(super) fn is_send_queue_full(&mut self) -> bool {
        self.sq_posted >= self.sq_limit && !self.extend_send_queue()
    }

    /// Notes which requests have completed meanwhile. Returns whether there is room for another one. `sq_done` comes from completions, which
    /// a peer may have forged: it can be more than was posted, and then there is room.
    #[cold]
    #[inline(never)]
    fn extend_send_queue(&mut self) -> bool {
        // Acquire, partner: the Release store in `Cq::decode`.
        let done = self.shared.sq_done.load(Acquire).max(self.sq_base);
        self.sq_limit = done.wrapping_add(self.config.max_send_wr.into());
        self.sq_posted < self.sq_limit
    }

    /// Posts while the progress thread has the sending half, or before the first request.
    #[cold]
    fn post_without_peer(&mut self, wr: &SendWr<'_>, len: u32) -> Result<Posted, PostError> {
        let is_deferring = {
            let mut deferred = locked(&self.shared.deferred);
            if deferred.is_empty() {
                self.peer = deferred.peer.take();
            }
            !deferred.is_empty()
        };
        if is_deferring {
            let position = self.sq_posted;
            self.sq_posted += 1;
            self.defer(DeferredWr::new(wr, len, position, Instant::now(), &self.connect));
            return Ok(Posted::Queued);
        }
        if self.peer.is_none() {
            self.peer = self
                .link
                .as_ref()
                .and_then(|(link, to)| PeerQp::new(link, to.qp_num, &self.connect))
                .map(Box::new);
        }
        if self.peer.is_some() && self.shared.state() == QpState::ReadyToSend {
            return self.post_any(wr);
        }
        // The queue pair went to ERR before it was ever connected.
        self.complete_in_order(wr.wr_id, Opcode::Unspecified, Status::Flushed, 0);
        Ok(Posted::Queued)
    }

    #[cold]
    fn handle_execute_error(&mut self, wr: &SendWr<'_>, len: u32, error: ExecuteError) {
        let position = self.sq_posted;
        self.sq_posted += 1;
        let now = Instant::now();
        match error {
            ExecuteError::Failed { status, notify_peer } => {
                if let Some(peer) = &self.peer {
                    fail_request(&self.shared, peer, wr.wr_id, position, status, notify_peer);
                }
            }
            ExecuteError::PeerNotReady | ExecuteError::LaneFull => {
                let due = now + NOT_READY_RETRY;
                self.defer(DeferredWr::new(wr, len, position, due, &self.connect));
            }
            ExecuteError::ReceiverNotReady(timer) => {
                self.defer(DeferredWr::new(wr, len, position, now + rnr_delay(timer), &self.connect));
            }
        }
    }

    /// Appends a request to the deferred ones and hands the sending half to the progress thread.
    fn defer(&mut self, wr: DeferredWr) {
        {
            let mut deferred = locked(&self.shared.deferred);
            if let Some(peer) = self.peer.take() {
                deferred.peer = Some(peer);
            }
            deferred.queue.push_back(wr);
        }
        progress::add(&self.shared);
    }
}

/// Completes a request in failure: pushes the completion, moves the queue pair to ERR and, if asked, tells the peer.
pub(super) fn fail_request(
    qp: &Arc<QpShared>,
    peer: &PeerQp,
    wr_id: u64,
    position: u64,
    status: Status,
    notify_peer: bool,
) {
    qp.complete_send(wr_id, Opcode::Unspecified, status, 0, position);
    qp.move_to_error();
    if notify_peer {
        let error = Request::new(Request::QP_ERROR);
        peer.link.send_notice(&Request { qp_num: peer.num, a: peer.epoch(), ..error });
    }
}

/// Executes one request on the peer's memory and queues.
#[inline(always)]
pub(super) fn execute(
    peer: &mut PeerQp,
    qp: &QpShared,
    op: &SendOp,
    data: &Data<'_>,
    len: u32,
    streaming: bool,
) -> Result<(), ExecuteError> {
    check_local(qp.pd, op, data)?;
    let PeerQp { link, num, block, attached, .. } = peer;
    let (link, num, block): (&Link, u32, &QpBlock) = (link, *num, block);
    if attached.is_none() {
        *attached = Some(attach(link, block, num, &qp.device.gid, qp.num)?);
    }
    let Some(AttachedPeer { line, qp: to_qp }) = attached else { return Err(ExecuteError::PeerNotReady) };
    let operation = OperationGuard::begin(line);
    // Acquire, partner: the Release store in `RcQp::ready_to_receive`.
    let connection = ConnectionWord(block.connection.load(Acquire));
    if to_qp.connection != connection {
        // The peer has closed this connection. The next attempt attaches anew, if the peer is connected to us again.
        drop(operation);
        *attached = None;
        return Err(ExecuteError::PeerNotReady);
    }
    let (line, attached): (&PeerLine, &mut AttachedQp) = (line, to_qp);
    let memory = PeerMemory { link, pd: attached.pd, streaming };
    let received = qp.received.load(Relaxed);
    match *op {
        SendOp::Write(to) => {
            check_access(attached, Access::REMOTE_WRITE)?;
            let target = memory.check(to.rkey, to.addr, len, Access::REMOTE_WRITE)?;
            memory.write(target.find_mapping(&mut attached.mappings, link, len), data)?;
        }
        SendOp::WriteImm(to, imm) => {
            prefetch::for_write(attached.lane.entry(attached.recv.taken()));
            check_access(attached, Access::REMOTE_WRITE)?;
            let target = memory.check(to.rkey, to.addr, len, Access::REMOTE_WRITE)?;
            let target = target.find_mapping(&mut attached.mappings, link, len);
            if len as usize <= LANE_DATA {
                attached.last_target.remember(&memory, to);
            }
            // A short message travels in the completion as well: nobody may ever read it at its target.
            let mapped = match target {
                RemotePtr::Mapped(at) if len as usize > LANE_DATA => Some(at),
                _ => None,
            };
            if let Some(at) = mapped {
                prefetch_lines(at, len);
                let stride = at.addr().wrapping_sub(attached.last_at);
                attached.last_at = at.addr();
                // A wrong guess only costs a useless prefetch; prefetching an unmapped address is harmless.
                prefetch::for_write(at.wrapping_add(stride.wrapping_mul(PREFETCH_AHEAD)));
            }
            let taken = take_recv(attached, block, line)?;
            memory.write(target, data)?;
            let completion = NewEntry {
                opcode: Opcode::RecvWriteImm,
                status: Status::Success,
                byte_len: len,
                imm: Some(imm),
            };
            attached.lane.push(taken, &completion, data, received);
            if let Some(at) = mapped
                && len <= DEMOTE_MAX
            {
                for_each_line(at, len, prefetch::demote);
            }
        }
        SendOp::Send | SendOp::SendImm(_) => {
            prefetch::for_write(attached.lane.entry(attached.recv.taken()));
            let imm = if let SendOp::SendImm(imm) = *op { Some(imm) } else { None };
            let taken = take_recv(attached, block, line)?;
            let mut completion =
                NewEntry { opcode: Opcode::Recv, status: Status::Success, byte_len: len, imm };
            let scattered = memory.scatter(attached.recv.sges(taken), &[], data);
            if let Err(status) = scattered {
                if status == Status::RetryExceeded {
                    // The peer does not reply, or has ended. If it continues, its service thread may still write into the receive, so that
                    // stays taken until the connection ends.
                    return Err(ExecuteError::local(status));
                }
                completion.status = status;
                completion.opcode = Opcode::Unspecified;
            }
            attached.lane.push(taken, &completion, data, received);
            match scattered {
                Ok(()) => {}
                Err(Status::LocalLength) => {
                    return Err(ExecuteError::both_ends(Status::RemoteInvalidRequest));
                }
                Err(_) => return Err(ExecuteError::both_ends(Status::RemoteOperation)),
            }
        }
        SendOp::Read(from) => {
            check_access(attached, Access::REMOTE_READ)?;
            let source = memory.check(from.rkey, from.addr, len, Access::REMOTE_READ)?;
            memory.read(source, data)?;
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            check_access(attached, Access::REMOTE_ATOMIC)?;
            let former = match memory.check_atomic(remote.rkey, remote.addr)? {
                // SAFETY: `check_atomic` gave an aligned address of 8 bytes that stay valid while we are inside the
                // operation.
                RemotePtr::Mapped(at) => match unsafe { AtomicU64::from_ptr(at.cast()) }
                    .compare_exchange(compare, swap, SeqCst, SeqCst)
                {
                    Ok(former) | Err(former) => former,
                },
                RemotePtr::InPlace { addr, key, .. } => link
                    .atomic_in_place(Request::COMPARE_SWAP, key, addr, compare, swap)
                    .map_err(ExecuteError::both_ends)?,
            };
            store_atomic_result(data, former);
        }
        SendOp::FetchAdd { remote, add } => {
            check_access(attached, Access::REMOTE_ATOMIC)?;
            let former = match memory.check_atomic(remote.rkey, remote.addr)? {
                // SAFETY: as above.
                RemotePtr::Mapped(at) => unsafe { AtomicU64::from_ptr(at.cast()) }.fetch_add(add, SeqCst),
                RemotePtr::InPlace { addr, key, .. } => link
                    .atomic_in_place(Request::FETCH_ADD, key, addr, add, 0)
                    .map_err(ExecuteError::both_ends)?,
            };
            store_atomic_result(data, former);
        }
    }
    drop(operation);
    Ok(())
}

/// Prefetches the first lines of a target: one after the other, each would be waited for.
#[inline]
fn prefetch_lines(at: *mut u8, len: u32) {
    let mut line = 0;
    while line < (len as usize).min(MAX_LINES_AHEAD * CACHE_LINE) {
        prefetch::for_write(at.wrapping_add(line));
        line += CACHE_LINE;
    }
}

/// Applies `hint` once to each cache line of a payload of at most two lines, and to the first and the second or third line
/// of a longer one.
///
/// Never twice to the same line: a second `cldemote` of a line costs a stream of small messages two thirds of its rate.
#[inline]
fn for_each_line(at: *mut u8, len: u32, mut hint: impl FnMut(*const u8)) {
    let last = at.wrapping_add((len as usize).clamp(1, 2 * CACHE_LINE) - 1);
    hint(at);
    if at.addr() ^ last.addr() >= CACHE_LINE {
        hint(last);
    }
}

/// Checks that the peer's queue pair allows the operation.
#[inline]
fn check_access(attached: &AttachedQp, access: Access) -> Result<(), ExecuteError> {
    if attached.access.contains(access) {
        Ok(())
    } else {
        Err(ExecuteError::both_ends(Status::RemoteInvalidRequest))
    }
}

#[inline(always)]
fn take_recv(attached: &mut AttachedQp, block: &QpBlock, line: &PeerLine) -> Result<TakenRecv, ExecuteError> {
    if attached.lane.has_room(&attached.recv)
        && let Some(taken) = attached.recv.take(block, line)
    {
        return Ok(taken);
    }
    wait_for_recv(attached, block, line)
}

/// Looks for a receive, and for room in the lane for its completion, again.
#[cold]
fn wait_for_recv(
    attached: &mut AttachedQp,
    block: &QpBlock,
    line: &PeerLine,
) -> Result<TakenRecv, ExecuteError> {
    for _ in 0..RNR_SPINS {
        core::hint::spin_loop();
        if attached.lane.has_room(&attached.recv)
            && let Some(taken) = attached.recv.take(block, line)
        {
            return Ok(taken);
        }
    }
    if attached.lane.has_room(&attached.recv) {
        Err(ExecuteError::ReceiverNotReady(attached.rnr_timer))
    } else {
        Err(ExecuteError::LaneFull)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_line_is_hinted_once() {
        for start in 0..2 * CACHE_LINE {
            for len in 0..=DEMOTE_MAX {
                let mut lines = Vec::new();
                let at = core::ptr::without_provenance_mut(4096 + start);
                for_each_line(at, len, |hinted| lines.push(hinted.addr() / CACHE_LINE));
                let first = at.addr() / CACHE_LINE;
                let last = (at.addr() + (len as usize).max(1) - 1) / CACHE_LINE;
                assert_eq!(lines[0], first);
                assert!(lines.iter().all(|line| (first..=last).contains(line)), "{start} + {len}: {lines:?}");
                let count = lines.len();
                lines.dedup();
                assert_eq!(lines.len(), count, "{start} + {len} hints a line twice");
                if last - first < 2 {
                    assert_eq!(count, last - first + 1, "{start} + {len} leaves out a line");
                }
            }
        }
    }
}
