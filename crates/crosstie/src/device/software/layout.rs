//! What lies in a device's segment.
//!
//! Every device owns one segment and its peers map it. Each line of 64 bytes has one writer, named here:
//!
//! ```text
//!  offset      what                          writer
//!  0           Header                        owner, once
//!  4 KiB       regions   2^18 x RegionEntry  owner
//!  +16 MiB     queue pairs 2^14 x QpBlock    line 0, 1: owner; line 2: the connected peer
//!  +4 MiB      lines     2^12 x PeerLine     each: the peer it was given to (datagram senders)
//!  heap        completion queues: CqHeader, then Cqe[depth]
//!              receive queues: slots[depth], see RECV_HEAD_WORDS
//!              shared receive queues: SrqHeader, word[2 depth], slots[depth]
//!              memory of regions
//! ```

use core::sync::atomic::{AtomicU32, AtomicU64};

use crosstie_protocol::key::Key;

use crate::memory::segment::Shared;
use crate::wait::Parker;

/// A region's lkey and rkey.
pub(super) type RegionKey = Key<18>;
/// A queue pair's number, 24 bits as on a network.
pub(super) type QpNum = Key<14, 24>;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"XTIEDEV\x01");
pub(super) const MAX_LINES: u32 = 1 << 12;

pub(super) const REGIONS_AT: u64 = 4096;
pub(super) const QPS_AT: u64 = REGIONS_AT + RegionKey::INDICES as u64 * size_of::<RegionEntry>() as u64;
pub(super) const LINES_AT: u64 = QPS_AT + QpNum::INDICES as u64 * size_of::<QpBlock>() as u64;
pub(super) const HEAP_AT: u64 = LINES_AT + MAX_LINES as u64 * size_of::<PeerLine>() as u64;

/// The first line of a segment.
#[repr(C, align(64))]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) len: AtomicU64,
}

/// A region. `key` is stored last when it appears and zeroed first when it goes.
#[repr(C, align(64))]
pub(super) struct RegionEntry {
    pub(super) key: AtomicU32,
    pub(super) access: AtomicU32,
    pub(super) pd: AtomicU32,
    pub(super) reserved: AtomicU32,
    /// First address, in the owner's address space.
    pub(super) addr: AtomicU64,
    pub(super) len: AtomicU64,
    /// Where it is in the segment, or [`IN_PLACE`].
    pub(super) offset: AtomicU64,
}

/// `RegionEntry::offset` of memory that is not in the segment.
pub(super) const IN_PLACE: u64 = u64::MAX;

/// A queue pair, as its peer sees it.
#[repr(C, align(64))]
pub(super) struct QpBlock {
    /// Connection word, see [`Connection`]; zero while nobody may send here.
    pub(super) connection: AtomicU64,
    pub(super) qp_num: AtomicU32,
    pub(super) kind: AtomicU32,
    pub(super) pd: AtomicU32,
    /// RC: what the peer may do. UD: the qkey.
    pub(super) access: AtomicU32,
    /// RC: the peer's queue pair and the first half of its device's name.
    pub(super) peer_qp: AtomicU32,
    pub(super) rnr_timer: AtomicU32,
    pub(super) peer_gid: [AtomicU64; 2],
    /// Offset of the [`CqHeader`] for receives.
    pub(super) recv_cq: AtomicU64,
    pub(super) line1: OwnerLine,
    pub(super) requester: PeerLine,
    pub(super) reserved: [AtomicU64; 8],
}

/// What the owner of a queue pair writes while it runs, and where its receives are.
#[repr(C, align(64))]
pub(super) struct OwnerLine {
    /// Receives posted, ever.
    pub(super) posted: AtomicU64,
    /// Offset of the receive slots, or of the [`SrqHeader`].
    pub(super) recv_at: AtomicU64,
    pub(super) recv_depth: AtomicU32,
    pub(super) recv_sges: AtomicU32,
    /// Whether `recv_at` is a shared queue (1) or the queue pair's own (0).
    pub(super) shared: AtomicU32,
    pub(super) reserved: AtomicU32,
}

/// What a peer writes while it works on somebody's segment. One writer: that peer.
#[repr(C, align(64))]
pub(super) struct PeerLine {
    /// Odd while inside an operation.
    pub(super) busy: AtomicU64,
    /// Position in the target's completion queue, see [`crate::ring::reservation`].
    pub(super) claim: AtomicU64,
    /// RC: receives taken, ever.
    pub(super) taken: AtomicU64,
    /// Datagrams: offset of the completion queue that `claim` is about.
    pub(super) ring: AtomicU64,
}

/// `QpBlock::kind`.
pub(super) const KIND_RC: u32 = 1;
/// `QpBlock::kind`.
pub(super) const KIND_UD: u32 = 2;

/// The head of a completion queue; entries follow at 256 bytes.
#[repr(C, align(64))]
pub(super) struct CqHeader {
    /// Next free position. Writers: all producers.
    pub(super) head: CacheLine,
    /// Positions read. Writer: the owner.
    pub(super) consumed: CacheLine,
    /// Entries, a power of two. Writer: the owner, once.
    pub(super) depth: AtomicU32,
    /// Not zero once a completion was lost. Writer: whoever lost it.
    pub(super) overrun: AtomicU32,
    /// Whether producers have to reckon with each other. Writer: the owner.
    pub(super) mode: AtomicU64,
    pub(super) reserved: [AtomicU64; 6],
    /// Where the owner sleeps. Writers: owner, and who wakes it.
    pub(super) bell: Parker,
    pub(super) reserved2: [AtomicU32; 15],
}

/// A word with a line of its own.
#[repr(C, align(64))]
pub(super) struct CacheLine {
    pub(super) word: AtomicU64,
}

/// Where entries start behind a [`CqHeader`].
pub(super) const CQES_AT: u64 = size_of::<CqHeader>() as u64;

/// A completion, two to a line. `seq` is the position plus one once it is published.
#[repr(C, align(32))]
pub(super) struct Cqe {
    pub(super) seq: AtomicU64,
    /// Sends: the `wr_id`. Receives: slot in the low half, the sender's queue pair in the high half.
    pub(super) wr: AtomicU64,
    /// Queue pair in the low half, `byte_len` in the high half.
    pub(super) what: AtomicU64,
    /// [`Outcome`] in the low half; immediate (receives) or queue position (sends) in the high half.
    pub(super) how: AtomicU64,
}

/// Words of a receive as a sender sees it: how many pieces, zero, then for each piece its address and
/// `len | lkey << 32`.
pub(super) const RECV_HEAD_WORDS: usize = 2;

/// Words between receive slots with room for `sges` pieces: whole lines.
pub(super) const fn recv_stride(sges: u32) -> usize {
    (RECV_HEAD_WORDS + 2 * sges as usize).next_multiple_of(8)
}

/// The head of a shared receive queue; words follow at 192 bytes, then slots.
#[repr(C, align(64))]
pub(super) struct SrqHeader {
    /// Receives posted, ever. Writer: the owner.
    pub(super) posted: CacheLine,
    /// Receives taken, ever; may lag. Writers: all takers.
    pub(super) taken: CacheLine,
    /// Slots, a power of two; twice as many words. Writer: the owner, once.
    pub(super) depth: AtomicU32,
    pub(super) sges: AtomicU32,
    pub(super) pd: AtomicU32,
    pub(super) reserved: AtomicU32,
    pub(super) reserved2: [AtomicU64; 6],
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
    assert!(size_of::<QpBlock>() == 256);
    assert!(core::mem::offset_of!(QpBlock, line1) == 64);
    assert!(core::mem::offset_of!(QpBlock, requester) == 128);
    assert!(size_of::<CqHeader>() == 256);
    assert!(core::mem::offset_of!(CqHeader, bell) == 192);
    assert!(size_of::<Cqe>() == 32);
    assert!(size_of::<SrqHeader>() == 192);
    assert!(HEAP_AT.is_multiple_of(4096));
};

/// `QpBlock::connection`: whether the peer may send here, and since which reset. Zero: not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connection(pub(super) u64);

impl Connection {
    pub(super) const NOT_READY: Connection = Connection(0);

    /// Ready for the `epoch`-th time.
    pub(super) fn ready(epoch: u64) -> Connection {
        Connection(epoch << 1 | 1)
    }

    pub(super) fn is_ready(self) -> bool {
        self.0 & 1 == 1
    }

    pub(super) fn epoch(self) -> u64 {
        self.0 >> 1
    }
}

/// What a [`Cqe`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum CqeKind {
    /// Nothing: its writer died.
    Void = 0,
    /// A send request ended.
    Send = 1,
    /// A receive of the queue pair's own queue ended.
    Recv = 2,
    /// A receive of a shared queue ended.
    SharedRecv = 3,
    /// Everything that the queue pair's peer completed stands before this; flush the rest.
    Flush = 4,
    /// Everything that the sender with this line completed stands before this; return what it took.
    Reclaim = 5,
}

/// Kind, opcode, status, flag and connection of a [`Cqe`], in 32 bits.
#[derive(Clone, Copy)]
pub(super) struct Outcome {
    pub(super) kind: u8,
    pub(super) opcode: u8,
    pub(super) status: u8,
    pub(super) has_imm: bool,
    /// Low bits of the connection's epoch: completions of an earlier connection are dropped.
    pub(super) epoch: u8,
}

impl Outcome {
    pub(super) const VOID: Outcome =
        Outcome { kind: CqeKind::Void as u8, opcode: 0, status: 0, has_imm: false, epoch: 0 };

    pub(super) fn to_bits(self) -> u32 {
        u32::from_le_bytes([self.kind, self.opcode, self.status, self.epoch << 1 | self.has_imm as u8])
    }

    pub(super) fn from_bits(bits: u32) -> Outcome {
        let [kind, opcode, status, last] = bits.to_le_bytes();
        Outcome { kind, opcode, status, has_imm: last & 1 != 0, epoch: last >> 1 }
    }
}

/// What of an epoch fits into an [`Outcome`].
pub(super) fn short_epoch(epoch: u64) -> u8 {
    epoch as u8 & 0x7F
}

/// A word of a shared receive queue: which slot stands at a position and who took it.
///
/// ```text
///  bit 63     62..48    47..32   31..0
///  taken?     taker     slot     position (low bits)
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SrqWord(pub(super) u64);

impl SrqWord {
    pub(super) fn posted(position: u64, slot: u16) -> SrqWord {
        SrqWord(u64::from(slot) << 32 | position & 0xFFFF_FFFF)
    }

    pub(super) fn taken_by(self, taker: u16) -> SrqWord {
        SrqWord(self.0 | 1 << 63 | u64::from(taker & 0x7FFF) << 48)
    }

    pub(super) fn is_taken(self) -> bool {
        self.0 >> 63 == 1
    }

    pub(super) fn taker(self) -> u16 {
        (self.0 >> 48) as u16 & 0x7FFF
    }

    pub(super) fn slot(self) -> u16 {
        (self.0 >> 32) as u16
    }

    pub(super) fn is_at(self, position: u64) -> bool {
        self.0 as u32 == position as u32
    }
}

/// `SrqWord::taker` of the queue pair with this index.
pub(super) fn taker_of_qp(index: u32) -> u16 {
    index as u16
}

/// `SrqWord::taker` of the datagram sender with this line.
pub(super) fn taker_of_line(line: u32) -> u16 {
    (QpNum::INDICES + line) as u16
}

const _: () = assert!(QpNum::INDICES + MAX_LINES <= 0x8000);
