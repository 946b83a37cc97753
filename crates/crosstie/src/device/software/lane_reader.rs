//! The lane of a queue pair (`lane.rs`), as the poller of its completion queue reads it.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence as atomic_fence};
use std::sync::Arc;

use super::lane::{Lane, LaneEntry, LaneHeader, LaneTag};
use super::qp::{QpShared, RecvSource};
use crate::device::{Completion, InlineData, Opcode, Status};
use crate::memory::prefetch;
use crate::memory::segment::{SharedRef, SharedSlice};
use crate::ring::ready_set;

/// The lane of a queue pair, as the poller of its completion queue reads it.
#[derive(Debug)]
pub(super) struct LaneReader {
    /// Copies of those of the queue pair's [`Lane`].
    header: SharedRef<LaneHeader>,
    entries: SharedSlice<LaneEntry>,
    cursor: u64,
    /// The epoch of the connection whose entries are read.
    epoch: u64,
    /// Whether the poller has it on its list of lanes to look at.
    pub(super) is_listed: bool,
}

impl LaneReader {
    pub(super) fn new(lane: &Lane) -> LaneReader {
        LaneReader {
            header: lane.header.clone(),
            entries: lane.entries.clone(),
            cursor: 0,
            epoch: 0,
            is_listed: false,
        }
    }

    /// Whether [`read`](LaneReader::read) would find an entry. What a peer left in the lane of a connection that has ended does not
    /// count: otherwise a thread that waits for completions would not sleep until a stopped peer has left.
    #[inline]
    pub(super) fn is_ready(&self, qp: &QpShared) -> bool {
        let position = if self.epoch == qp.epoch() {
            Some(self.cursor)
        } else {
            // Acquire, partner: the Release store in `Lane::skip_to`.
            let lane = qp.lane.as_ref().filter(|lane| lane.epoch.load(Acquire) == qp.epoch());
            lane.map(|lane| lane.first())
        };
        let is_published = |position| self.entries.ring(position).published(position).is_some();
        position.is_some_and(is_published)
    }

    pub(super) fn start_polling(&self) {
        ready_set::start_polling(&self.header.polled.word);
    }

    /// The caller must look at the lane once more.
    pub(super) fn stop_polling(&self) {
        ready_set::stop_polling(&self.header.polled.word);
    }

    /// Reads the next completion. Entries of earlier connections are dropped. `is_stream`: the last look found one, too.
    #[inline(always)]
    pub(super) fn read(&mut self, qp: &Arc<QpShared>, is_stream: bool, to: &mut Completion) -> bool {
        if self.epoch != qp.epoch() && !self.follow_connection(qp) {
            return false;
        }
        match self.read_entry(qp, is_stream, to) {
            Some(true) => {
                self.publish_cursor(qp);
                true
            }
            Some(false) => self.read_behind_invalid(qp, to),
            None => false,
        }
    }

    /// Reads the next completion, behind an entry that was none.
    #[cold]
    #[inline(never)]
    fn read_behind_invalid(&mut self, qp: &Arc<QpShared>, to: &mut Completion) -> bool {
        let mut read = Some(false);
        // A peer that writes invalid entries does not keep the poller here.
        for _ in 0..self.entries.len() {
            if read != Some(false) {
                break;
            }
            read = self.read_entry(qp, false, to);
        }
        self.publish_cursor(qp);
        read == Some(true)
    }

    /// Reads the entry at the cursor, if it is there and of this connection. False if no such receive is outstanding.
    #[inline(always)]
    fn read_entry(&mut self, qp: &Arc<QpShared>, is_stream: bool, to: &mut Completion) -> Option<bool> {
        let position = self.cursor;
        let entry = self.entries.ring(position);
        let (slot, tag) = entry.published(position)?;
        let (imm, byte_len) = entry.detail();
        to.data = InlineData::Bytes { words: entry.data(), len: byte_len };
        // Orders the loads of the entry before that of the epoch. Partner: the Release fence in `PeerLane::new`; the owner
        // changes the epoch before it connects a peer that can overwrite the entry.
        atomic_fence(Acquire);
        // `QpShared::mark_destroyed` ends the epoch, too.
        if qp.epoch() != self.epoch {
            return None;
        }
        // A reset on another thread may come here. It does not change which receive this entry completes.
        #[cfg(test)]
        super::pauses::at(super::pauses::Pause::EntryBelongsToConnection);
        self.cursor = position.wrapping_add(1);
        if is_stream {
            // The entry after the next one is probably there.
            prefetch::for_read(self.entries.ring(position.wrapping_add(2)));
        }
        let recv = match &qp.recv {
            RecvSource::Own(queue) => queue.complete(position),
            RecvSource::Shared(queue) | RecvSource::Datagram(queue) => queue.complete(slot.into()),
        };
        let Some(recv) = recv else { return Some(false) };
        to.wr_id = recv.wr_id;
        to.byte_len = byte_len;
        to.qp_num = qp.num;
        if tag == LaneTag::SHORT_WRITE_IMM {
            (to.status, to.opcode, to.imm) = (Status::Success, Opcode::RecvWriteImm, Some(imm));
            return Some(true);
        }
        (to.status, to.opcode, to.imm) = (tag.status(), tag.opcode(), tag.has_imm().then_some(imm));
        if !tag.has_data() {
            to.data = InlineData::None;
        }
        if tag.is_success() && !recv.fits(to.opcode, byte_len) {
            *to = qp.reject_completion(recv.wr_id);
        }
        Some(true)
    }

    #[inline]
    fn publish_cursor(&self, qp: &QpShared) {
        qp.received.store(self.cursor, Relaxed);
        if let RecvSource::Shared(_) = qp.recv {
            // Release, partner: the Acquire load in `PeerLane::has_room`. The entries have been read.
            self.header.consumed.word.store(self.cursor, Release);
        }
    }

    /// The connection that the entries belonged to has ended. Drops what is left of it, and goes to the first entry of the current or
    /// next connection. Returns whether the poller is there.
    #[cold]
    fn follow_connection(&mut self, qp: &QpShared) -> bool {
        let Some(lane) = &qp.lane else { return false };
        // Acquire, partner: the Release store in `Lane::skip_to`. The old peer was outside before.
        let epoch = lane.epoch.load(Acquire);
        if epoch != qp.epoch() {
            return false;
        }
        let first = lane.first();
        self.drop_entries_before(first, qp, epoch);
        self.cursor = first;
        self.epoch = epoch;
        if let RecvSource::Own(queue) = &qp.recv {
            queue.follow_reset(first);
        }
        self.publish_cursor(qp);
        true
    }

    /// Drops all entries without completions. The peer is outside, and no other one is connected as long as the queue pair is in `epoch`.
    pub(super) fn drop_entries(&mut self, qp: &QpShared, epoch: u64) {
        self.drop_entries_before(self.cursor.wrapping_add(self.entries.len() as u64), qp, epoch);
        self.publish_cursor(qp);
    }

    /// Drops entries without completions, as long as the queue pair is in `epoch`. Their receives of a shared receive queue become free
    /// again; those of the queue pair's own queue were dropped by the reset.
    fn drop_entries_before(&mut self, end: u64, qp: &QpShared, epoch: u64) {
        for _ in 0..self.entries.len() {
            let published = self.entries.ring(self.cursor).published(self.cursor);
            let Some((slot, _)) = published.filter(|_| self.cursor != end) else { break };
            // Orders the load of the entry before that of the epoch, as in `read_entry`.
            atomic_fence(Acquire);
            if qp.epoch() != epoch {
                break;
            }
            self.cursor = self.cursor.wrapping_add(1);
            if let RecvSource::Shared(queue) = &qp.recv {
                queue.complete(slot.into());
            }
        }
    }
}
