//! WRITEs that are executed at once if nothing is in the way.
//!
//! They do nothing if something is in the way: the peer is not attached yet, the connection has ended, there is no receive. What it is, and
//! what follows from it, is for the general way in `datapath.rs`. So these are short, and need few cache lines.

use core::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::Arc;

use super::datapath::DEMOTE_MAX;
use super::lane::{LANE_DATA, NewEntry};
use super::layout::{ConnectionWord, PeerLine, QpBlock};
use super::link::copy_into_mapping;
use super::peer_memory::{PeerMemory, RemotePtr};
use super::peer_qp::{AttachedPeer, AttachedQp, PeerQp};
use super::qp::QpShared;
use super::quiescence::OperationGuard;
use super::rc::RcQp;
use super::region_keys::pointer;
use crate::device::{Access, Data, Opcode, QpState, RemoteAddr, SendOp, SendWr, Sge, Status};
use crate::memory::copy;
use crate::memory::prefetch;

const _: () =
    assert!(LANE_DATA <= DEMOTE_MAX as usize, "`try_write_imm_region` puts no data into a completion");
const _: () = assert!(LANE_DATA <= copy::SHORT);

impl RcQp {
    /// Posts a short WRITE+IMM, if it can be executed at once; otherwise it does nothing and returns false.
    pub(super) fn try_post_short(&mut self, wr: &SendWr<'_>) -> bool {
        let (SendOp::WriteImm(to, imm), Data::Inline(bytes)) = (&wr.op, &wr.data) else { return false };
        if bytes.len() > self.max_short as usize
            || self.shared.state() != QpState::ReadyToSend
            || self.is_send_queue_full()
        {
            return false;
        }
        let Some(peer) = self.peer.as_deref_mut() else { return false };
        if !peer.write_imm_at_hand(&self.shared, *to, imm, &Bytes(bytes)) {
            return self.post_short_after_search(wr);
        }
        self.note_short(wr);
        true
    }

    // It takes the request apart again, so that its caller need not keep the parts.
    #[cold]
    #[inline(never)]
    fn post_short_after_search(&mut self, wr: &SendWr<'_>) -> bool {
        let (SendOp::WriteImm(to, imm), Data::Inline(bytes)) = (&wr.op, &wr.data) else { return false };
        let Some(peer) = self.peer.as_deref_mut() else { return false };
        let is_done = peer.write_imm_after_search(&self.shared, *to, imm, &Bytes(bytes));
        if is_done {
            self.note_short(wr);
        }
        is_done
    }

    /// Notes that a request was executed.
    #[inline(always)]
    fn note_short(&mut self, wr: &SendWr<'_>) {
        self.sq_posted += 1;
        if wr.signaled {
            self.complete_short(wr);
        }
    }

    /// Completes the request that was executed last.
    #[inline(never)]
    fn complete_short(&self, wr: &SendWr<'_>) {
        let Data::Inline(bytes) = &wr.data else { return };
        let (len, position) = (bytes.len() as u32, self.sq_posted - 1);
        self.shared.complete_send(wr.wr_id, Opcode::Write, Status::Success, len, position);
    }

    /// Executes a short WRITE+IMM from one entry, if nothing is in the way; otherwise it does nothing and returns false. It has no completion
    /// on this side, and takes no place in the send queue.
    pub(super) fn try_write_imm_entry(&mut self, to: RemoteAddr, imm: u32, from: &Sge<'_>) -> bool {
        if from.len as usize > LANE_DATA
            || from.pd != self.shared.pd
            || self.config.max_send_sge == 0
            || self.shared.state() != QpState::ReadyToSend
        {
            return false;
        }
        let Some(peer) = self.peer.as_deref_mut() else { return false };
        peer.write_imm_at_hand(&self.shared, to, &imm, from)
            || peer.write_imm_after_search(&self.shared, to, &imm, from)
    }

    /// Executes a WRITE+IMM of more than [`DEMOTE_MAX`] bytes from one entry, if nothing is in the way. Otherwise it returns false, and the
    /// peer does not learn of it; bytes may have been written. What is in the way is for [`post`](RcQp::post) to tell: this is all code that
    /// such a message needs, on few cache lines.
    ///
    /// It needs no place in the send queue, because it is not there when this returns.
    #[inline(always)]
    pub(crate) fn try_write_imm_region(&mut self, to: RemoteAddr, imm: u32, from: &Sge<'_>) -> bool {
        let Some(PeerQp { link, block, attached: Some(attached), .. }) = self.peer.as_deref_mut() else {
            return false;
        };
        let AttachedPeer { line, qp } = attached;
        let _operation = OperationGuard::begin(line);
        prefetch::for_write(qp.lane.entry(qp.recv.taken()));
        // Acquire, partner: the Release store in `RcQp::ready_to_receive`.
        if ConnectionWord(block.connection.load(Acquire)) != qp.connection
            || self.shared.state() != QpState::ReadyToSend
            || !qp.access.contains(Access::REMOTE_WRITE)
            || self.config.max_send_sge == 0
            || from.pd != self.shared.pd
            || from.len <= DEMOTE_MAX
            || u64::from(from.len) > self.max_message
        {
            return false;
        }
        let memory = PeerMemory { link, pd: qp.pd, streaming: false };
        let (local, len) = (pointer(from.addr), from.len as usize);
        let target = memory
            .check(to.rkey, to.addr, from.len, Access::REMOTE_WRITE)
            .map(|target| qp.mappings.resolve(link, target, from.len));
        let is_written = match target {
            // SAFETY: the entry is inside a live region.
            Ok(RemotePtr::InPlace { addr, mapped: None, .. }) => unsafe {
                link.try_write_in_place(addr, local, len)
            },
            Ok(RemotePtr::InPlace { mapped: Some(at), .. }) => {
                // SAFETY: as above; `resolve` gave `at` for this many bytes, which stay valid while we are inside the operation.
                unsafe { copy_into_mapping(local, at.as_ptr(), len) };
                true
            }
            Ok(RemotePtr::Mapped(at)) => {
                // SAFETY: as above; `check` gave `at` for this many bytes, which stay valid while we are inside the operation.
                unsafe { copy_apart(local, at, len) };
                true
            }
            Err(_) => false,
        };
        if !is_written || !qp.lane.has_room(&qp.recv) {
            return false;
        }
        let Some(taken) = qp.recv.take(block, line) else { return false };
        let completion = NewEntry {
            opcode: Opcode::RecvWriteImm,
            status: Status::Success,
            byte_len: from.len,
            imm: Some(imm),
        };
        // How many entries this side has read decides on a prefetch only. It is on cache lines that nothing else here needs, and messages of
        // this length do not answer each other.
        qp.lane.push(taken, &completion, &Data::Inline(&[]), 0);
        true
    }

    /// Executes a WRITE of one cache line, if nothing is in the way; otherwise it does nothing and returns false.
    #[inline(always)]
    pub(crate) fn try_write_line(&mut self, to: RemoteAddr, line: &[u8; 64]) -> bool {
        let Some(PeerQp { link, block, attached: Some(attached), .. }) = self.peer.as_deref_mut() else {
            return false;
        };
        let AttachedPeer { line: peer_line, qp } = attached;
        let _operation = OperationGuard::begin(peer_line);
        // Acquire, partner: the Release store in `RcQp::ready_to_receive`.
        if self.shared.state() != QpState::ReadyToSend
            || ConnectionWord(block.connection.load(Acquire)) != qp.connection
            || !qp.access.contains(Access::REMOTE_WRITE)
        {
            return false;
        }
        let memory = PeerMemory { link, pd: qp.pd, streaming: false };
        match memory.check(to.rkey, to.addr, line.len() as u32, Access::REMOTE_WRITE) {
            Ok(RemotePtr::Mapped(at)) if at.cast::<u64>().is_aligned() => {
                // SAFETY: `check` gave `at` for this many bytes, which stay valid while we are inside the operation; it is aligned, and
                // there are no references to a peer's memory.
                unsafe { copy::store(line, at) };
                true
            }
            _ => false,
        }
    }

    /// Executes a WRITE+IMM of a short message: `head` and the bytes behind it, if nothing is in the way; otherwise it does nothing and
    /// returns false. It has no completion on this side, and takes no place in the send queue.
    #[inline(always)]
    pub(crate) fn try_write_imm_inline(
        &mut self,
        to: RemoteAddr,
        imm: u32,
        head: [u64; 2],
        bytes: &[u8],
    ) -> bool {
        if bytes.len() > LANE_DATA - size_of_val(&head) || self.shared.state() != QpState::ReadyToSend {
            return false;
        }
        let Some(peer) = self.peer.as_deref_mut() else { return false };
        peer.write_imm_at_hand(&self.shared, to, &imm, &HeadAndBytes(head, bytes))
            || peer.write_imm_inline_after_search(&self.shared, to, imm, head[0], head[1], bytes)
    }
}

/// A message of at most [`LANE_DATA`] bytes. A type instead of a closure, because only functions can be inlined always.
trait ShortMessage {
    fn len(&self) -> usize;

    /// Stores the message twice.
    ///
    /// # Safety
    ///
    /// It is not longer than [`LANE_DATA`]. Both places have room for it; there are no references to that memory.
    unsafe fn store(&self, places: [*mut u8; 2]);
}

/// The address of the bytes is loaded when it is needed.
struct Bytes<'a>(&'a &'a [u8]);

impl ShortMessage for Bytes<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    unsafe fn store(&self, places: [*mut u8; 2]) {
        // SAFETY: the slice is readable, and not longer than `LANE_DATA`; for the places it is the caller's promise.
        unsafe { copy::copy_short_twice(self.0.as_ptr(), places, self.0.len()) };
    }
}

impl ShortMessage for Sge<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len as usize
    }

    #[inline(always)]
    unsafe fn store(&self, places: [*mut u8; 2]) {
        // SAFETY: the entry is inside a live region, and not longer than `LANE_DATA`; for the places it is the caller's promise.
        unsafe { copy::copy_short_twice(pointer(self.addr), places, self.len as usize) };
    }
}

struct HeadAndBytes<'a>([u64; 2], &'a [u8]);

impl ShortMessage for HeadAndBytes<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        size_of_val(&self.0) + self.1.len()
    }

    #[inline(always)]
    unsafe fn store(&self, places: [*mut u8; 2]) {
        // SAFETY: the caller's promise.
        unsafe { copy::store_twice(self.0, self.1, places) };
    }
}

impl PeerQp {
    /// Executes a WRITE+IMM of a short message, if nothing is in the way, and all that it needs is at hand: the target is in the region of the
    /// message before, there is room as far as this side knows, and nobody else took the next receive. Otherwise it does nothing and returns
    /// false. It calls no function, so that everything stays in registers; the immediate is loaded when it is needed.
    #[inline(always)]
    fn write_imm_at_hand(
        &mut self,
        own: &Arc<QpShared>,
        to: RemoteAddr,
        imm: &u32,
        message: &impl ShortMessage,
    ) -> bool {
        self.write_imm::<false>(own, to, imm, message)
    }

    /// As [`write_imm_at_hand`](PeerQp::write_imm_at_hand), and looks for what is not at hand.
    #[cold]
    #[inline(never)]
    fn write_imm_after_search(
        &mut self,
        own: &Arc<QpShared>,
        to: RemoteAddr,
        imm: &u32,
        message: &impl ShortMessage,
    ) -> bool {
        self.write_imm::<true>(own, to, imm, message)
    }

    /// The same for a message with a head.
    // With a reference to the message, it would be in memory also where it was at hand.
    #[cold]
    #[inline(never)]
    fn write_imm_inline_after_search(
        &mut self,
        own: &Arc<QpShared>,
        to: RemoteAddr,
        imm: u32,
        first: u64,
        second: u64,
        bytes: &[u8],
    ) -> bool {
        self.write_imm::<true>(own, to, &imm, &HeadAndBytes([first, second], bytes))
    }

    #[inline(always)]
    fn write_imm<const SEARCH: bool>(
        &mut self,
        own: &Arc<QpShared>,
        to: RemoteAddr,
        imm: &u32,
        message: &impl ShortMessage,
    ) -> bool {
        let len = message.len() as u32;
        let PeerQp { link, block, attached: Some(AttachedPeer { line, qp }), .. } = self else {
            return false;
        };
        let (line, block): (&PeerLine, &QpBlock) = (line, block);
        let AttachedQp { connection, lane, recv, last_target, .. } = qp;
        let _operation = OperationGuard::begin(line);
        let entry = lane.entry(recv.taken());
        // It arrives while the request is still being checked.
        prefetch::for_write(entry);
        // Acquire, partner: the Release store in `RcQp::ready_to_receive`.
        if ConnectionWord(block.connection.load(Acquire)) != *connection {
            return false;
        }
        // SAFETY: the link of this peer, which `self` keeps.
        let mut target = unsafe { last_target.find(to, len) };
        if SEARCH && target.is_none() {
            let memory = PeerMemory { link, pd: qp.pd, streaming: false };
            target = last_target.look_up(&memory, qp.access, to, len);
        }
        let Some(at) = target else { return false };
        let has_room = match SEARCH {
            true => lane.has_room(recv),
            false => lane.is_known_to_have_room(recv),
        };
        if !has_room {
            return false;
        }
        let taken = match SEARCH {
            true => recv.take(block, line),
            false => recv.take_at_hand(line),
        };
        let Some(taken) = taken else { return false };
        // SAFETY: `last_target` gave `at` for this many bytes. The callers take only short messages, for which the entry has room.
        unsafe { message.store([at, entry.data_ptr()]) };
        let completion = NewEntry {
            opcode: Opcode::RecvWriteImm,
            status: Status::Success,
            byte_len: len,
            imm: Some(*imm),
        };
        lane.publish(entry, taken, &completion, true, own.received.load(Relaxed));
        true
    }
}

/// [`copy::copy`], apart from the code of its caller.
///
/// # Safety
///
/// As for [`copy::copy`].
#[inline(never)]
unsafe fn copy_apart(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy::copy(from, to, len) };
}
