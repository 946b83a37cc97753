//! The layout of a device's shared memory segment.
//!
//! Every device owns one segment; its peers map it. Each 64-byte cache line has one writer, except where several are named:
//!
//! ```text
//!  offset      content                             writer
//!  0           Header                              owner, once
//!  4 KiB       regions       2^18 x RegionEntry    owner
//!  +16 MiB     queue pairs   2^14 x QpBlock        owner
//!  heap        completion queues: CqHeader, then Cqe[depth]
//!              completion lanes: LaneHeader, then LaneEntry[depth], see lane.rs
//!              receive queues: slots[depth], see RECV_HEAD_WORDS
//!              shared receive queues: SrqHeader, SrqWord[2 depth], slots[depth]
//!              memory of regions
//! ```
//!
//! What one peer writes while it works is not here, but in a second, small segment that only this peer maps: a table of
//! [`PeerLine`]s (`peer_lines.rs`).
//!
//! Any process that has mapped a segment can write anywhere in it. This module only names the words; code that reads a word
//! checks it before using it as an index or an offset.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use crosstie_protocol::key::Key;

use crate::memory::segment::Shared;
use crate::ring::ready_set::ReadySet;
use crate::ring::stalled::StalledSlots;
use crate::wait::Parker;

/// A region's lkey and rkey.
pub(super) type RegionKey = Key<18>;
/// A queue pair's number: 24 bits, as on a network.
pub(super) type QpNum = Key<14, 24>;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"XTIEDEV\x01");
/// Peer lines of one peer: its limit on connections and datagram senders, including closed ones that it has not left.
pub(super) const LINES_PER_PEER: u32 = 1 << 15;
/// Limit on the datagram senders of all peers.
pub(super) const MAX_DATAGRAM_SENDERS: u32 = 1 << 12;
/// The same, for all devices of one other process.
pub(super) const MAX_DATAGRAM_SENDERS_PER_PROCESS: u32 = 1 << 9;

pub(super) const REGIONS_AT: u64 = 4096;
pub(super) const QPS_AT: u64 = REGIONS_AT + RegionKey::INDICES as u64 * size_of::<RegionEntry>() as u64;
pub(super) const HEAP_AT: u64 = QPS_AT + QpNum::INDICES as u64 * size_of::<QpBlock>() as u64;

/// Size of a peer's segment of peer lines.
pub(super) const PEER_LINES_LEN: u64 = LINES_PER_PEER as u64 * size_of::<PeerLine>() as u64;

/// Offset of the block of the queue pair with this index.
pub(super) const fn qp_block_at(index: u32) -> u64 {
    QPS_AT + index as u64 * size_of::<QpBlock>() as u64
}

/// The first cache line of a segment.
#[repr(C, align(64))]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) len: AtomicU64,
}

/// A registered region. The owner stores `key` last when it registers the region, and zeroes it first when it deregisters.
///
/// The table in the segment is a copy, for peers in other processes. The owner's process decides from its private table.
#[repr(C, align(64))]
pub(super) struct RegionEntry {
    pub(super) key: AtomicU32,
    pub(super) access: AtomicU32,
    pub(super) pd: AtomicU32,
    pub(super) reserved: AtomicU32,
    /// First address in the owner's address space, with its tag, see `region_keys.rs`.
    pub(super) addr: AtomicU64,
    pub(super) len: AtomicU64,
    /// Offset of the memory in the segment, or [`IN_PLACE`].
    pub(super) offset: AtomicU64,
}

/// `RegionEntry::offset` of memory that the program allocated itself and that is not in the segment.
pub(super) const IN_PLACE: u64 = u64::MAX;

/// A queue pair, as its peer sees it.
#[repr(C, align(64))]
pub(super) struct QpBlock {
    /// See [`ConnectionWord`]; zero while no peer may send here.
    pub(super) connection: AtomicU64,
    pub(super) qp_num: AtomicU32,
    pub(super) kind: AtomicU32,
    pub(super) pd: AtomicU32,
    /// RC: the operations that the peer may perform. UD: the qkey.
    pub(super) access: AtomicU32,
    /// RC: number of the peer's queue pair.
    pub(super) peer_qp: AtomicU32,
    pub(super) rnr_timer: AtomicU32,
    /// RC: GID of the peer's device, see [`gid_words`].
    pub(super) peer_gid: [AtomicU64; 2],
    /// Offset of the [`CqHeader`] for receive completions.
    pub(super) recv_cq: AtomicU64,
    /// RC: index of the line that the peer writes during this connection, in its own table of peer lines.
    pub(super) line: AtomicU32,
    pub(super) reserved: AtomicU32,
    pub(super) owner_line: OwnerLine,
}

/// The cache line of a queue pair that its owner writes while it runs; it also says where the receives are.
#[repr(C, align(64))]
pub(super) struct OwnerLine {
    /// Receives posted so far.
    pub(super) posted: AtomicU64,
    /// Offset of the receive slots, or of the [`SrqHeader`].
    pub(super) recv_at: AtomicU64,
    pub(super) recv_depth: AtomicU32,
    pub(super) recv_sges: AtomicU32,
    /// 1 if `recv_at` names a shared receive queue, 0 if it names the queue pair's own receive queue.
    pub(super) shared: AtomicU32,
    /// RC: number of entries of the completion lane.
    pub(super) lane_depth: AtomicU32,
    /// RC: offset of the completion lane, see `lane.rs`.
    pub(super) lane_at: AtomicU64,
}

/// The cache line that one sending half of a queue pair writes while it works on the owner's segment: one connection, or
/// one datagram sender. It is the only writer from [`presence::open`](crate::ring::presence::open) to `close`.
#[repr(C, align(64))]
pub(super) struct PeerLine {
    /// Odd while the peer is inside an operation on this segment, see `quiescence.rs`.
    pub(super) busy: AtomicU64,
    /// Datagrams: position that the peer is reserving in a completion queue, see [`crate::ring::reservation`].
    pub(super) claim: AtomicU64,
    /// RC: receives taken so far, which is also the next position in the completion lane.
    pub(super) taken: AtomicU64,
    /// Datagrams: offset of the completion queue that `claim` refers to.
    pub(super) cq_at: AtomicU64,
    /// Who may write this line, see [`crate::ring::presence`]. For a connection it is derived from the connection word.
    pub(super) tenure: AtomicU64,
}

/// `QpBlock::kind` of a reliable connected queue pair.
pub(super) const KIND_RC: u32 = 1;
/// `QpBlock::kind` of a datagram queue pair.
pub(super) const KIND_UD: u32 = 2;

/// The head of a completion queue; the entries follow at [`CQES_AT`]. Receives of connections complete in lanes of their own
/// (`lane.rs`); all other completions are entries here.
#[repr(C, align(64))]
pub(super) struct CqHeader {
    /// Next free position. Writers: all producers.
    pub(super) head: CacheLine,
    /// Positions read so far. Writer: the owner.
    pub(super) consumed: CacheLine,
    /// Number of entries, a power of two. Writer: the owner, once.
    pub(super) depth: AtomicU32,
    /// Nonzero once a completion was lost. Writer: the producer that lost it.
    pub(super) overrun: AtomicU32,
    /// [`SHARED`](crate::ring::reservation::SHARED), which is zero: there can always be more than one producer.
    pub(super) mode: AtomicU64,
    /// Entries that producers must leave out. Writer: the owner.
    pub(super) stalled: StalledSlots,
    /// The owner parks here while it waits for completions. Writers: the owner and the peer that wakes it.
    pub(super) parker: Parker,
    pub(super) reserved2: [AtomicU32; 15],
    /// The lanes with entries that the owner may not know, by the index of the queue pair. Writers: the owner, and peers whose lane
    /// is not polled.
    pub(super) ready: ReadySet<{ QpNum::INDICES as usize / 64 }>,
}

/// One word alone on a cache line.
#[repr(C, align(64))]
pub(super) struct CacheLine {
    pub(super) word: AtomicU64,
}

/// Offset of the entries behind a [`CqHeader`].
pub(super) const CQES_AT: u64 = size_of::<CqHeader>() as u64;

/// An entry of a completion queue that is not one of a lane, two to a cache line. The producer that reserved its position writes it.
///
/// ```text
///  word       bits 63..32                                      bits 31..0
///  sequence   position + 1 once the entry is published         (64 bits)
///  request    sends: wr_id                                     (64 bits)
///             receives: sender's queue pair                    receive slot
///  subject    byte_len                                         local queue pair number
///  result     receives: immediate; sends: queue position       CqeTag
/// ```
#[repr(C, align(32))]
pub(super) struct Cqe {
    sequence: AtomicU64,
    request: AtomicU64,
    subject: AtomicU64,
    result: AtomicU64,
}

impl Cqe {
    /// Whether the entry at `position` has been published.
    #[inline(always)]
    pub(super) fn is_published(&self, position: u64) -> bool {
        // Acquire, partner: the Release store in `publish`. The other words, and the payload, are visible with it.
        self.sequence.load(Acquire) == position.wrapping_add(1)
    }

    /// Makes the entry at `position` readable for the owner of the queue.
    #[inline(always)]
    pub(super) fn publish(&self, position: u64) {
        // Release, partner: the Acquire load in `is_published`.
        self.sequence.store(position.wrapping_add(1), Release);
    }

    #[inline(always)]
    pub(super) fn store(&self, request: RequestWord, subject: SubjectWord, result: ResultWord) {
        self.request.store(request.0, Relaxed);
        self.subject.store(subject.0, Relaxed);
        self.result.store(result.0, Relaxed);
    }

    /// Makes it an entry that stands for nothing: its producer died before it was published.
    pub(super) fn store_void(&self) {
        self.result.store(ResultWord::new(CqeTag::VOID, 0).0, Relaxed);
    }

    /// The three words of a published entry. A peer wrote them: nothing about them is certain.
    #[inline(always)]
    pub(super) fn load(&self) -> (RequestWord, SubjectWord, ResultWord) {
        (
            RequestWord(self.request.load(Relaxed)),
            SubjectWord(self.subject.load(Relaxed)),
            ResultWord(self.result.load(Relaxed)),
        )
    }
}

/// The request that a [`Cqe`] completes; its [`CqeKind`] says which accessor applies.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestWord(u64);

impl RequestWord {
    #[inline(always)]
    pub(super) fn of_send(wr_id: u64) -> RequestWord {
        RequestWord(wr_id)
    }

    #[inline(always)]
    pub(super) fn of_recv(slot: u32, src_qp: u32) -> RequestWord {
        RequestWord(u64::from(src_qp) << 32 | u64::from(slot))
    }

    /// Sends: the caller's `wr_id`.
    #[inline(always)]
    pub(super) fn wr_id(self) -> u64 {
        self.0
    }

    /// Receives: the slot that the sender took.
    #[inline(always)]
    pub(super) fn recv_slot(self) -> u32 {
        self.0 as u32
    }

    /// Receives: the sender's queue pair.
    #[inline(always)]
    pub(super) fn src_qp(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The queue pair and the length of a [`Cqe`].
#[derive(Clone, Copy, Debug)]
pub(super) struct SubjectWord(u64);

impl SubjectWord {
    #[inline(always)]
    pub(super) fn new(qp_num: u32, byte_len: u32) -> SubjectWord {
        SubjectWord(u64::from(byte_len) << 32 | u64::from(qp_num))
    }

    #[inline(always)]
    pub(super) fn qp_num(self) -> u32 {
        self.0 as u32
    }

    #[inline(always)]
    pub(super) fn byte_len(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The tag of a [`Cqe`], and an immediate or a queue position.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResultWord(u64);

impl ResultWord {
    /// `detail` is the immediate (receives) or the position in the send queue (sends).
    #[inline(always)]
    pub(super) fn new(tag: CqeTag, detail: u32) -> ResultWord {
        ResultWord(u64::from(detail) << 32 | u64::from(tag.to_bits()))
    }

    #[inline(always)]
    pub(super) fn tag(self) -> CqeTag {
        CqeTag::from_bits(self.0 as u32)
    }

    /// Receives: the immediate, if the message carried one.
    #[inline(always)]
    pub(super) fn imm(self) -> Option<u32> {
        self.tag().has_imm.then_some((self.0 >> 32) as u32)
    }

    /// Sends: low bits of the request's position in the send queue.
    #[inline(always)]
    pub(super) fn send_position(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The kind of a [`Cqe`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum CqeKind {
    /// Stands for nothing: its producer died before it published the entry.
    Void = 0,
    /// A send request completed.
    Send = 1,
    /// A datagram was received.
    Recv = 2,
}

/// Kind, opcode, status, immediate flag and connection epoch of a [`Cqe`], packed into 32 bits.
#[derive(Clone, Copy)]
pub(super) struct CqeTag {
    pub(super) kind: u8,
    pub(super) opcode: u8,
    pub(super) status: u8,
    pub(super) has_imm: bool,
    /// Low bits of the connection's epoch: the poller drops completions of an earlier connection.
    pub(super) epoch: u8,
}

impl CqeTag {
    pub(super) const VOID: CqeTag =
        CqeTag { kind: CqeKind::Void as u8, opcode: 0, status: 0, has_imm: false, epoch: 0 };

    #[inline(always)]
    pub(super) fn is(self, kind: CqeKind) -> bool {
        self.kind == kind as u8
    }

    #[inline(always)]
    fn to_bits(self) -> u32 {
        u32::from_le_bytes([self.kind, self.opcode, self.status, self.epoch << 1 | self.has_imm as u8])
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> CqeTag {
        let [kind, opcode, status, last] = bits.to_le_bytes();
        CqeTag { kind, opcode, status, has_imm: last & 1 != 0, epoch: last >> 1 }
    }
}

/// The part of an epoch that fits into a [`CqeTag`].
pub(super) fn short_epoch(epoch: u64) -> u8 {
    epoch as u8 & 0x7F
}

/// Words at the start of a receive slot: the number of scatter/gather entries, then zero. After them each entry has two
/// words: its address, and `len | lkey << 32`.
pub(super) const RECV_HEAD_WORDS: usize = 2;

/// Words from one receive slot to the next if each has room for `sges` entries; slots fill whole cache lines.
pub(super) const fn recv_stride(sges: u32) -> usize {
    (RECV_HEAD_WORDS + 2 * sges as usize).next_multiple_of(8)
}

/// The head of a shared receive queue; the [`SrqWord`]s follow at 192 bytes, then the slots.
#[repr(C, align(64))]
pub(super) struct SrqHeader {
    /// Receives posted so far. Writer: the owner.
    pub(super) posted: CacheLine,
    /// Receives before this one are taken; lags behind. Writers: all takers.
    pub(super) taken: CacheLine,
    /// Number of slots, a power of two; there are twice as many words. Writer: the owner, once.
    pub(super) depth: AtomicU32,
    pub(super) sges: AtomicU32,
    pub(super) pd: AtomicU32,
    pub(super) reserved: AtomicU32,
    pub(super) reserved2: [AtomicU64; 6],
}

/// One position of a shared receive queue: which slot was posted there, and who took it.
///
/// ```text
///  bit 63     62..48    47..32   31..0
///  taken?     taker     slot     position (low bits)
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SrqWord(pub(super) u64);

impl SrqWord {
    #[inline(always)]
    pub(super) fn posted(position: u64, slot: u16) -> SrqWord {
        SrqWord(u64::from(slot) << 32 | position & 0xFFFF_FFFF)
    }

    #[inline(always)]
    pub(super) fn taken_by(self, taker: u16) -> SrqWord {
        SrqWord(self.0 | 1 << 63 | u64::from(taker & 0x7FFF) << 48)
    }

    #[inline(always)]
    pub(super) fn is_taken(self) -> bool {
        self.0 >> 63 == 1
    }

    #[inline(always)]
    pub(super) fn taker(self) -> u16 {
        (self.0 >> 48) as u16 & 0x7FFF
    }

    #[inline(always)]
    pub(super) fn slot(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline(always)]
    pub(super) fn is_at(self, position: u64) -> bool {
        self.0 as u32 == position as u32
    }

    /// Whether the receive that was posted at `position` was taken, by a taker that `of` accepts.
    pub(super) fn is_taken_by(self, position: u64, of: impl Fn(u16) -> bool) -> bool {
        self.is_at(position) && self.is_taken() && of(self.taker())
    }
}

/// `SrqWord::taker` of the peer that is connected to queue pair `num`.
pub(super) fn taker_of_qp(num: u32) -> u16 {
    QpNum::from_bits(num).index() as u16
}

/// `SrqWord::taker` of the datagram sender with this number.
pub(super) fn taker_of_datagram_sender(index: u32) -> u16 {
    (QpNum::INDICES + index) as u16
}

/// `SrqWord::taker` of the owner, which takes what is left when nobody else may any more.
pub(super) const OWNER_TAKES: u16 = 0x7FFF;

const _: () = assert!(QpNum::INDICES + MAX_DATAGRAM_SENDERS <= OWNER_TAKES as u32);

/// `QpBlock::connection`: whether the peer may send here, and the epoch of the connection. Zero: not ready.
///
/// No two connections of a device have the same word, not even of two queue pairs that had the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionWord(pub(super) u64);

impl ConnectionWord {
    pub(super) const NOT_READY: ConnectionWord = ConnectionWord(0);

    /// Ready in `epoch`.
    pub(super) fn ready(epoch: u64) -> ConnectionWord {
        ConnectionWord(epoch << 1 | 1)
    }

    pub(super) fn is_ready(self) -> bool {
        self.0 & 1 == 1
    }

    pub(super) fn epoch(self) -> u64 {
        self.0 >> 1
    }

    /// The tenure of the peer line of this connection.
    pub(super) fn tenure(self) -> u64 {
        self.0 & !1
    }
}

/// A GID as the two words of `QpBlock::peer_gid`.
pub(super) fn gid_words(gid: &[u8; 16]) -> [u64; 2] {
    let (low, high) = gid.split_at(8);
    [
        u64::from_ne_bytes(low.try_into().unwrap_or_default()),
        u64::from_ne_bytes(high.try_into().unwrap_or_default()),
    ]
}

// SAFETY: atomics and arrays of them only; alignment at most 64.
unsafe impl Shared for Header {}
// SAFETY: as above.
unsafe impl Shared for RegionEntry {}
// SAFETY: as above.
unsafe impl Shared for QpBlock {}
// SAFETY: as above.
unsafe impl Shared for PeerLine {}
// SAFETY: as above.
unsafe impl Shared for CqHeader {}
// SAFETY: as above.
unsafe impl Shared for Cqe {}
// SAFETY: as above.
unsafe impl Shared for SrqHeader {}

const _: () = {
    assert!(size_of::<RegionEntry>() == 64);
    assert!(size_of::<PeerLine>() == 64);
    assert!(size_of::<QpBlock>() == 128);
    assert!(core::mem::offset_of!(QpBlock, owner_line) == 64);
    assert!(core::mem::offset_of!(CqHeader, parker) == 192);
    assert!(core::mem::offset_of!(CqHeader, ready) == 256);
    assert!(size_of::<Cqe>() == 32);
    assert!(core::mem::offset_of!(Cqe, sequence) == 0);
    assert!(core::mem::offset_of!(Cqe, request) == 8);
    assert!(core::mem::offset_of!(Cqe, subject) == 16);
    assert!(core::mem::offset_of!(Cqe, result) == 24);
    assert!(size_of::<SrqHeader>() == 192);
    assert!(HEAP_AT.is_multiple_of(4096));
};
