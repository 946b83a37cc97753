//! Completion lanes: where the receives of a connection complete.
//!
//! Every RC queue pair has a lane in its owner's segment: a ring of entries, one cache line each, that **one peer writes and one
//! poller reads**. An entry is there or it is not. So a peer that is stopped or killed at any instruction leaves nothing to repair
//! and holds up nobody else. A short message travels inside of the entry; the memory that it is addressed to gets it too, but a
//! poller that takes it from the entry need not read that memory.
//!
//! ```text
//!  peer (PeerLane)                                    poller (LaneReader)
//!  position = its count of taken receives
//!  write the message to its target, and here,
//!     if it is short
//!  head = position + 1, slot, tag  (Release) -------> head == cursor + 1 ?  copy the entry, complete the receive
//!  is the lane polled? else ready.add(lane)  -------> `ring/ready_set.rs`
//!                                            <------- consumed = cursor, if the receive queue is shared
//! ```
//!
//! **Room.** A lane of a queue pair with its own receive queue has an entry for each receive. A receive can be posted again only after
//! its completion was polled, so there is always room. Queue pairs that share a receive queue could take all of it, each of them; their
//! lanes have at most [`MAX_SHARED_DEPTH`] entries. A peer that finds no room defers its request until the poller has made some.
//!
//! **Connections.** Positions are never used twice: a connection begins behind everything that the old peer can have written
//! ([`Lane::end_connection`]). The old peer is outside by then (`quiescence.rs`). The poller may still be reading an old entry while the
//! new peer overwrites it; it checks the queue pair's epoch after it has copied the entry.
//!
//! **Trust.** A peer can write anything into its lane (and, as it has mapped the whole segment, into others). The poller copies an
//! entry once, and decides from the private record of receives what it completes.

use core::cell::Cell;
use core::sync::atomic::{
    AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence as atomic_fence,
};
use std::sync::Arc;

use super::device_memory::Allocation;
use super::layout::{CacheLine, CqHeader, QpBlock, QpNum};
use super::peer_memory::pieces;
use super::recv::{PeerRecvQueue, TakenRecv};
use crate::device::{Data, DeviceError, InlineData, Opcode, Status};
use crate::memory::copy::copy;
use crate::memory::prefetch;
use crate::memory::segment::{Segment, Shared, SharedRef, SharedSlice};
use crate::ring::ready_set;

/// Most entries of the lane of a queue pair with a shared receive queue.
const MAX_SHARED_DEPTH: u32 = 256;

/// The head of a completion lane; the entries follow at [`LANE_ENTRIES_AT`].
#[repr(C, align(64))]
pub(super) struct LaneHeader {
    /// Whether the owner looks at the lane in every poll, see [`crate::ring::ready_set`]. Writer: the owner.
    pub(super) polled: CacheLine,
    /// Entries read so far, if the receives are those of a shared queue. Writer: the owner.
    pub(super) consumed: CacheLine,
}

/// Offset of the entries behind a [`LaneHeader`].
pub(super) const LANE_ENTRIES_AT: u64 = size_of::<LaneHeader>() as u64;

/// If so many entries in a row were [`PeerLane::answers`], a sender takes the traffic for requests and responses.
const MIN_ANSWERS: u32 = 4;

/// Longest message that travels inside of a [`LaneEntry`].
pub(super) const LANE_DATA: usize = 48;

/// A completed receive of a connection: one cache line, written by the one connected peer.
///
/// ```text
///  word       bits 63..48            47..32           31..0
///  head       LaneTag                receive slot     position + 1 (low bits), once the entry is published
///  detail     immediate (63..32)                      byte_len
///  data       the message, if LaneTag::has_data
/// ```
#[repr(C, align(64))]
pub(super) struct LaneEntry {
    head: AtomicU64,
    detail: AtomicU64,
    data: [AtomicU64; LANE_DATA / 8],
}

impl LaneEntry {
    /// The slot and the tag of the entry at `position`, if it has been published. A peer wrote them: nothing about them is certain.
    #[inline]
    pub(super) fn published(&self, position: u64) -> Option<(u16, LaneTag)> {
        // Acquire, partner: the Release store in `publish`. The other words, and the payload, are visible with it.
        let head = self.head.load(Acquire);
        (head as u32 == position.wrapping_add(1) as u32)
            .then_some(((head >> 32) as u16, LaneTag((head >> 48) as u16)))
    }

    /// The immediate and the length. As uncertain as the slot.
    #[inline]
    pub(super) fn detail(&self) -> (u32, u32) {
        let detail = self.detail.load(Relaxed);
        ((detail >> 32) as u32, detail as u32)
    }

    /// A copy of the message. As uncertain as the slot.
    #[inline]
    pub(super) fn data(&self) -> [u64; LANE_DATA / 8] {
        core::array::from_fn(|i| self.data[i].load(Relaxed))
    }

    /// Where the writer of this entry stores up to [`LANE_DATA`] bytes.
    #[inline]
    pub(super) fn data_ptr(&self) -> *mut u8 {
        core::ptr::from_ref(&self.data).cast_mut().cast()
    }

    #[inline]
    pub(super) fn publish(&self, position: u64, slot: u16, tag: LaneTag, imm: u32, byte_len: u32) {
        self.detail.store(u64::from(imm) << 32 | u64::from(byte_len), Relaxed);
        let sequence = position.wrapping_add(1) as u32;
        let head = u64::from(tag.0) << 48 | u64::from(slot) << 32 | u64::from(sequence);
        // Release, partner: the Acquire load in `published`.
        self.head.store(head, Release);
    }
}

/// Opcode, status and flags of a [`LaneEntry`].
///
/// ```text
///  bits 15..8     7..5      4           3          2..0
///       status    unused    has_data    has_imm    opcode
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaneTag(u16);

impl LaneTag {
    const HAS_IMM: u16 = 1 << 3;
    const HAS_DATA: u16 = 1 << 4;
    /// That of a WRITE+IMM whose message is in the entry.
    pub(super) const SHORT_WRITE_IMM: LaneTag =
        LaneTag(Opcode::RecvWriteImm as u16 | Self::HAS_IMM | Self::HAS_DATA);

    /// `has_data`: the entry carries the message.
    #[inline]
    fn new(new: &NewEntry, has_data: bool) -> LaneTag {
        let flags =
            if new.imm.is_some() { Self::HAS_IMM } else { 0 } | if has_data { Self::HAS_DATA } else { 0 };
        LaneTag((new.status as u16) << 8 | new.opcode as u16 | flags)
    }

    #[inline]
    pub(super) fn opcode(self) -> Opcode {
        Opcode::from_code(self.0 as u8 & 7)
    }

    #[inline]
    pub(super) fn status(self) -> Status {
        if self.is_success() { Status::Success } else { Status::from_code((self.0 >> 8) as u8) }
    }

    #[inline]
    pub(super) fn is_success(self) -> bool {
        self.0 >> 8 == 0
    }

    #[inline]
    pub(super) fn has_imm(self) -> bool {
        self.0 & Self::HAS_IMM != 0
    }

    /// A failed request has no data, whatever the peer says.
    #[inline]
    pub(super) fn has_data(self) -> bool {
        self.is_success() && self.0 & Self::HAS_DATA != 0
    }
}

// SAFETY: atomics only; alignment 64.
unsafe impl Shared for LaneHeader {}
// SAFETY: as above.
unsafe impl Shared for LaneEntry {}

const _: () = {
    assert!(size_of::<LaneHeader>() == 128);
    assert!(size_of::<LaneEntry>() == 64);
    assert!(core::mem::offset_of!(LaneEntry, head) == 0);
    assert!(core::mem::offset_of!(LaneEntry, detail) == 8);
    assert!(core::mem::offset_of!(LaneEntry, data) == 16);
    assert!(LANE_DATA == InlineData::MAX);
};

/// The lane of a queue pair, as its owner keeps it.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) header: SharedRef<LaneHeader>,
    pub(super) entries: SharedSlice<LaneEntry>,
    memory: Allocation,
    /// The first position of the connection of epoch `epoch`. Entries before it belong to earlier ones.
    first: AtomicU64,
    pub(super) epoch: AtomicU64,
}

impl Lane {
    /// A lane for a queue pair in its first epoch, with this number of receives, of its own or of a shared receive queue.
    pub(super) fn new(
        allocate: impl FnOnce(u64) -> Result<Allocation, DeviceError>,
        receives: u32,
        is_shared: bool,
        epoch: u64,
    ) -> Result<Lane, DeviceError> {
        let depth = receives.max(2).next_power_of_two();
        let depth = if is_shared { depth.min(MAX_SHARED_DEPTH) } else { depth };
        let memory = allocate(LANE_ENTRIES_AT + u64::from(depth) * size_of::<LaneEntry>() as u64)?;
        let (segment, at) = (memory.segment(), memory.at());
        let no_memory = || DeviceError::Exhausted { what: "device memory" };
        Ok(Lane {
            header: SharedRef::new(segment, at).ok_or_else(no_memory)?,
            entries: SharedSlice::new(segment, at + LANE_ENTRIES_AT, depth as usize).ok_or_else(no_memory)?,
            memory,
            first: AtomicU64::new(0),
            epoch: AtomicU64::new(epoch),
        })
    }

    /// Tells peers where the lane is.
    pub(super) fn describe(&self, block: &QpBlock) {
        block.owner_line.lane_at.store(self.memory.at(), Relaxed);
        block.owner_line.lane_depth.store(self.entries.len() as u32, Relaxed);
    }

    /// The first position of the current or next connection, which is also the number of receives that count as taken already.
    pub(super) fn first(&self) -> u64 {
        self.first.load(Relaxed)
    }

    /// Ends a connection whose peer is outside; the next one is of epoch `epoch`. `read` entries were read so far. The peer says that it
    /// has taken `taken` receives.
    pub(super) fn end_connection(&self, epoch: u64, read: u64, taken: u64) {
        // A peer that finds room is at most one round ahead of the poller.
        let ahead = taken.wrapping_sub(read).min(self.entries.len() as u64);
        self.skip_to(epoch, read.wrapping_add(ahead));
    }

    /// As above, for a queue pair with its own receive queue, where each receive has its position: the next receive is at `first`.
    pub(super) fn skip_to(&self, epoch: u64, first: u64) {
        self.first.store(first, Relaxed);
        // Release, partner: the Acquire load in `LaneReader::follow_connection`.
        self.epoch.store(epoch, Release);
    }
}

/// The lane of a connected peer's queue pair, as this sender writes it.
#[derive(Debug)]
pub(super) struct PeerLane {
    header: SharedRef<LaneHeader>,
    entries: SharedSlice<LaneEntry>,
    cq: SharedRef<CqHeader>,
    /// The number of the lane in the peer's set of ready lanes.
    number: usize,
    /// The last known value of `consumed`: it is read again only when the lane looks full.
    seen_consumed: Cell<u64>,
    /// How many entries this side had read from the lane of the other direction when it wrote its last one.
    last_received: Cell<u64>,
    /// So many of the last entries were answers: this side had read an entry since the one before.
    answers: Cell<u32>,
}

/// A completed receive, without its message.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewEntry {
    pub(super) opcode: Opcode,
    pub(super) status: Status,
    pub(super) byte_len: u32,
    pub(super) imm: Option<u32>,
}

impl PeerLane {
    /// The lane of queue pair `num` with this block. `None` if the block's values are invalid.
    pub(super) fn new(segment: &Arc<Segment>, block: &QpBlock, num: u32) -> Option<PeerLane> {
        let line = &block.owner_line;
        let (at, depth) = (line.lane_at.load(Relaxed), line.lane_depth.load(Relaxed));
        if !depth.is_power_of_two() {
            return None;
        }
        // Everything that this sender writes comes after what it has seen of the connection. Partner: the Acquire fence in
        // `LaneReader::read`.
        atomic_fence(Release);
        let header: SharedRef<LaneHeader> = SharedRef::new(segment, at)?;
        Some(PeerLane {
            // Acquire, partner: the Release store in `LaneReader::publish_cursor`.
            seen_consumed: Cell::new(header.consumed.word.load(Acquire)),
            header,
            entries: SharedSlice::new(segment, at.checked_add(LANE_ENTRIES_AT)?, depth as usize)?,
            cq: SharedRef::new(segment, block.recv_cq.load(Relaxed))?,
            number: QpNum::from_bits(num).index() as usize,
            last_received: Cell::new(0),
            answers: Cell::new(0),
        })
    }

    /// The entry at `position`.
    #[inline]
    pub(super) fn entry(&self, position: u64) -> &LaneEntry {
        self.entries.ring(position)
    }

    /// Whether the entry of the next receive that is taken from `recv` can be written.
    #[inline]
    pub(super) fn has_room(&self, recv: &PeerRecvQueue) -> bool {
        self.is_known_to_have_room(recv) || {
            // Acquire, partner: the Release store in `LaneReader::publish_cursor`. The entry has been read.
            self.seen_consumed.set(self.header.consumed.word.load(Acquire));
            self.is_known_to_have_room(recv)
        }
    }

    /// As [`has_room`](PeerLane::has_room), as far as this side knows. Receives that are not shared guarantee room.
    #[inline]
    pub(super) fn is_known_to_have_room(&self, recv: &PeerRecvQueue) -> bool {
        !recv.is_shared() || recv.taken().wrapping_sub(self.seen_consumed.get()) < self.entries.len() as u64
    }

    /// Completes a taken receive. `data`, if it is at most [`LANE_DATA`] bytes long, travels in the entry. `received`: how many entries this
    /// side has read from the lane of the other direction.
    #[inline(always)]
    pub(super) fn push(&self, taken: TakenRecv, new: &NewEntry, data: &Data<'_>, received: u64) {
        let has_data = new.byte_len as usize <= LANE_DATA && new.status == Status::Success;
        let entry = self.entry(taken.position);
        if has_data {
            store_data(entry, data);
        }
        self.publish(entry, taken, new, has_data, received);
    }

    /// The second half of [`push`](PeerLane::push), with the entry of the taken receive. `has_data`: the message is in the entry.
    #[inline(always)]
    pub(super) fn publish(
        &self,
        entry: &LaneEntry,
        taken: TakenRecv,
        new: &NewEntry,
        has_data: bool,
        received: u64,
    ) {
        let tag = LaneTag::new(new, has_data);
        entry.publish(taken.position, taken.slot, tag, new.imm.unwrap_or(0), new.byte_len);
        let answers = if received == self.last_received.get() {
            0
        } else {
            self.last_received.set(received);
            self.answers.get().saturating_add(1)
        };
        self.answers.set(answers);
        if answers < MIN_ANSWERS {
            // The next entry arrives while the next request is prepared. If the peer answers each entry before the next one, it would find
            // its next entry in our cache, and wait for it before it can answer. Behind the last entry this is a useless prefetch.
            prefetch::for_write(core::ptr::from_ref(entry).wrapping_add(1));
        }
        if !ready_set::is_polled(&self.header.polled.word) {
            self.cq.ready.add(self.number);
        }
        self.cq.parker.notify();
    }
}

/// Stores a message of at most [`LANE_DATA`] bytes, as its request was checked, into an entry.
#[inline]
fn store_data(entry: &LaneEntry, data: &Data<'_>) {
    let mut to = entry.data_ptr();
    for (from, len) in pieces(data) {
        // SAFETY: the piece is readable; the lengths of all pieces add up to that of the message, for which the entry has room.
        unsafe { copy(from, to, len) };
        to = to.wrapping_add(len);
    }
}
