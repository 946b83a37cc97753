//! The fast path of the software device: a short WRITE+IMM for which everything is at hand.
//!
//! It goes to the region of the message before, there is room as far as this side knows, and nobody else took the next receive. Otherwise
//! nothing happens here, and [`execute`](super::datapath::execute) looks for what is not at hand, or finds what is wrong.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};

use super::lane::{LANE_DATA, NewEntry};
use super::layout::{ConnectionWord, PeerLine, QpBlock};
use super::peer_qp::{AttachedPeer, AttachedQp, PeerQp};
use super::qp::QpShared;
use super::quiescence::OperationGuard;
use super::rc::RcQp;
use super::region_keys::pointer;
use crate::device::{Data, Opcode, QpState, RemoteAddr, Sge, Status};
use crate::memory::copy;
use crate::memory::prefetch;

const _: () = assert!(LANE_DATA <= copy::SHORT);

impl RcQp {
    /// Executes a WRITE+IMM if everything is at hand. Returns whether it has.
    #[inline(always)]
    pub(super) fn try_write_imm_at_hand(&mut self, to: RemoteAddr, imm: u32, data: &Data<'_>) -> bool {
        if self.shared.state() != QpState::ReadyToSend {
            return false;
        }
        let Some(peer) = self.peer.as_deref_mut() else { return false };
        let max_inline = self.max_short as usize;
        match data {
            Data::Inline(bytes) if bytes.len() <= max_inline => {
                peer.write_imm_at_hand(&self.shared, to, imm, &Bytes(bytes))
            }
            Data::InlineHead { head, bytes } if size_of_val(head) + bytes.len() <= max_inline => {
                peer.write_imm_at_hand(&self.shared, to, imm, &HeadAndBytes(*head, bytes))
            }
            &Data::Regions([from])
                if from.len as usize <= LANE_DATA
                    && from.pd == self.shared.pd
                    && self.config.max_send_sge > 0 =>
            {
                peer.write_imm_at_hand(&self.shared, to, imm, from)
            }
            _ => false,
        }
    }
}

/// A message of at most [`LANE_DATA`] bytes. A type instead of a closure: `store` has a requirement.
trait ShortMessage {
    fn len(&self) -> usize;

    /// Stores the message twice.
    ///
    /// # Safety
    ///
    /// It is not longer than [`LANE_DATA`]. Both places have room for it; there are no references to that memory.
    unsafe fn store(&self, places: [*mut u8; 2]);
}

struct Bytes<'a>(&'a [u8]);

impl ShortMessage for Bytes<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline]
    unsafe fn store(&self, places: [*mut u8; 2]) {
        // SAFETY: the slice is readable, and not longer than `LANE_DATA`; for the places it is the caller's promise.
        unsafe { copy::copy_short_twice(self.0.as_ptr(), places, self.0.len()) };
    }
}

impl ShortMessage for Sge<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    unsafe fn store(&self, places: [*mut u8; 2]) {
        // SAFETY: the entry is inside a live region, and not longer than `LANE_DATA`; for the places it is the caller's promise.
        unsafe { copy::copy_short_twice(pointer(self.addr), places, self.len as usize) };
    }
}

struct HeadAndBytes<'a>([u64; 2], &'a [u8]);

impl ShortMessage for HeadAndBytes<'_> {
    #[inline]
    fn len(&self) -> usize {
        size_of_val(&self.0) + self.1.len()
    }

    #[inline]
    unsafe fn store(&self, places: [*mut u8; 2]) {
        // SAFETY: the caller's promise.
        unsafe { copy::store_twice(self.0, self.1, places) };
    }
}

impl PeerQp {
    /// It calls no function, so that everything stays in registers.
    #[inline(always)]
    fn write_imm_at_hand(
        &mut self,
        own: &QpShared,
        to: RemoteAddr,
        imm: u32,
        message: &impl ShortMessage,
    ) -> bool {
        let len = message.len() as u32;
        let PeerQp { block, attached: Some(AttachedPeer { line, qp }), .. } = self else { return false };
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
        let Some(at) = (unsafe { last_target.find(to, len) }) else { return false };
        if !lane.is_known_to_have_room(recv) {
            return false;
        }
        let Some(taken) = recv.take_at_hand(line) else { return false };
        // SAFETY: `last_target` gave `at` for this many bytes. The caller takes only short messages, for which the entry has room.
        unsafe { message.store([at, entry.data_ptr()]) };
        let completion =
            NewEntry { opcode: Opcode::RecvWriteImm, status: Status::Success, byte_len: len, imm: Some(imm) };
        lane.publish(entry, taken, &completion, true, own.received.load(Relaxed));
        true
    }
}
