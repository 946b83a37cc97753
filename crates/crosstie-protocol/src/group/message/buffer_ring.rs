//! A ring of buffer space and its table: the send buffer with SENDTBL, the receive buffer with its table (RHiNET §5.3.5).
//!
//! Space is taken in order and freed in any order. The tail advances over a contiguous run of freed entries only.
//!
//! ```text
//!             tail                       head
//!              v                          v
//!  +-----------+------+-------+-----------+------------+
//!  |   free    | used | freed |   used    |    free    |     buffer: one contiguous piece for each entry
//!  +-----------+------+-------+-----------+------------+
//! ```

use alloc::boxed::Box;

use super::super::Limits;

/// An entry of a [`BufferRing`]: a buffer piece that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Counts entries since the ring was created. The index in a table of `n` entries is `number % n`.
    pub number: u64,
    /// Where the piece starts in the buffer.
    pub offset: u32,
}

/// Positions of a ring buffer and which of its pieces are in use. The bytes belong to the caller.
///
/// ```
/// use crosstie_protocol::group::message::BufferRing;
/// let mut ring = BufferRing::new(1024, 4);
/// let (first, second) = (ring.take(600).unwrap(), ring.take(300).unwrap());
/// assert_eq!(second.offset, 600);
/// assert!(ring.take(200).is_none(), "no contiguous 200 bytes are free");
/// ring.free(second.number);
/// assert_eq!(ring.free_entries(), 2, "the tail waits for the first entry");
/// ring.free(first.number);
/// assert_eq!(ring.free_entries(), 4);
/// assert_eq!(ring.take(200).unwrap().offset, 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BufferRing {
    bytes: u64,
    /// Absolute positions: they only grow.
    head: u64,
    tail: u64,
    /// Where the head is in the buffer.
    head_offset: u64,
    /// Entry numbers of head and tail.
    head_entry: u64,
    tail_entry: u64,
    mask: u64,
    pieces: Box<[Piece]>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Piece {
    /// Absolute position behind the piece.
    end: u64,
    freed: bool,
}

impl BufferRing {
    /// A ring over `bytes` of buffer with a table of `entries`, which is rounded up to a power of two.
    pub fn new(bytes: usize, entries: usize) -> Self {
        let entries = entries.clamp(1, Limits::MAX_TABLE).next_power_of_two();
        BufferRing {
            bytes: bytes as u64,
            head: 0,
            tail: 0,
            head_offset: 0,
            head_entry: 0,
            tail_entry: 0,
            mask: entries as u64 - 1,
            pieces: (0..entries).map(|_| Piece::default()).collect(),
        }
    }

    /// Takes `len` contiguous bytes and a table entry. `None` if the buffer or the table is full.
    #[inline]
    pub fn take(&mut self, len: usize) -> Option<Entry> {
        if !self.has_room(len) {
            return None;
        }
        let len = len as u64;
        let skip = self.skip(len);
        if self.head_entry == self.tail_entry {
            self.tail = self.head + skip;
        }
        let number = self.head_entry;
        let offset = if skip == 0 { self.head_offset } else { 0 };
        self.head += skip + len;
        self.head_offset = if offset + len == self.bytes { 0 } else { offset + len };
        self.head_entry += 1;
        self.pieces[(number & self.mask) as usize] = Piece { end: self.head, freed: false };
        Some(Entry { number, offset: offset as u32 })
    }

    /// Bytes at the end of the buffer that a piece of `len` bytes skips, because it would cross the end.
    #[inline]
    fn skip(&self, len: u64) -> u64 {
        if self.head_offset + len > self.bytes { self.bytes - self.head_offset } else { 0 }
    }

    /// Frees an entry. Returns `false` if it is not in use.
    #[inline]
    pub fn free(&mut self, number: u64) -> bool {
        if number < self.tail_entry || number >= self.head_entry {
            return false;
        }
        let piece = &mut self.pieces[(number & self.mask) as usize];
        if piece.freed {
            return false;
        }
        piece.freed = true;
        while self.tail_entry != self.head_entry {
            let piece = self.pieces[(self.tail_entry & self.mask) as usize];
            if !piece.freed {
                break;
            }
            self.tail = piece.end;
            self.tail_entry += 1;
        }
        true
    }

    /// Gives back the last `by` bytes of an entry, if no other was taken after it. `by` is less than the entry has.
    #[inline]
    pub(super) fn shrink_last(&mut self, number: u64, by: usize) {
        if by == 0 || number + 1 != self.head_entry || number < self.tail_entry {
            return;
        }
        let by = by as u64;
        self.head -= by;
        let end = if self.head_offset == 0 { self.bytes } else { self.head_offset };
        self.head_offset = end - by;
        self.pieces[(number & self.mask) as usize].end = self.head;
    }

    /// Whether [`BufferRing::take`] would succeed now.
    #[inline]
    pub fn has_room(&self, len: usize) -> bool {
        let len = len as u64;
        let used = self.head + self.skip(len) + len - self.tail;
        // An empty ring has room for everything up to its size, wherever its head is.
        self.head_entry - self.tail_entry <= self.mask
            && (used <= self.bytes || (self.head_entry == self.tail_entry && len <= self.bytes))
    }

    /// Whether at least half of the buffer and half of the table are free.
    pub fn is_half_free(&self) -> bool {
        (self.head - self.tail) * 2 <= self.bytes && self.used_entries() * 2 <= self.entries()
    }

    /// Table entries that are free.
    pub fn free_entries(&self) -> usize {
        (self.mask + 1 - (self.head_entry - self.tail_entry)) as usize
    }

    /// Entries that are in use, including freed ones that the tail has not passed.
    pub fn used_entries(&self) -> usize {
        (self.head_entry - self.tail_entry) as usize
    }

    /// Entries of the table.
    pub fn entries(&self) -> usize {
        self.pieces.len()
    }

    /// The number of the oldest entry that is in use.
    pub fn tail_number(&self) -> u64 {
        self.tail_entry
    }

    /// The index of an entry in tables that are as long as this one.
    #[inline]
    pub(super) fn index(&self, number: u64) -> usize {
        (number & self.mask) as usize
    }
}

/// A copy of a position that another thread advances: refreshed only when what it shows is not enough (RHiNET §5.4).
///
/// A producer that asks for the consumer's tail before every message moves a cache line (or crosses a bus) every time. The
/// stash moves it once per trip around the ring.
///
/// ```
/// use crosstie_protocol::group::message::StashedTail;
/// let mut stash = StashedTail::new(true);
/// let mut reads = 0;
/// for head in 0..100u64 {
///     let consumed = head; // the consumer keeps up
///     assert!(stash.has_room(head, 1, 32, || { reads += 1; consumed }));
/// }
/// assert_eq!(reads, 3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StashedTail {
    tail: u64,
    stashing: bool,
}

impl StashedTail {
    /// A stash at position 0. Without `stashing`, the position is read every time: for comparison.
    pub const fn new(stashing: bool) -> Self {
        StashedTail { tail: 0, stashing }
    }

    /// Whether a ring of `size` has room for `len` more at `head`. Calls `read` only if the stash shows no room. A position that
    /// `read` returns is ignored if it is not between the last one and `head`.
    #[inline]
    pub fn has_room(&mut self, head: u64, len: u64, size: u64, read: impl FnOnce() -> u64) -> bool {
        if self.stashing && head + len - self.tail <= size {
            return true;
        }
        let tail = read();
        if (self.tail..=head).contains(&tail) {
            self.tail = tail;
        }
        head + len - self.tail <= size
    }

    /// The position as it was read last.
    pub const fn tail(&self) -> u64 {
        self.tail
    }
}
