//! A mapped lane: the positions of its slots, and copies in and out of them. All `unsafe` code of `ipc` that touches the lane is in this file.
//!
//! The [module above](super) draws the layout.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crosstie_protocol::lane::MAX_SLOTS;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Config, MAX_MESSAGE};
use crate::local::socket::ReceivedFile;
use crate::memory::copy::{copy, copy_in, copy_out};
use crate::memory::prefetch;
use crate::memory::segment::{Segment, Shared, SharedRef};
use crate::ring::call_table::CallTable;
use crate::ring::lane::{Cursor, Next};
use crate::wait::Parker;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"XTIELANE");
/// Version of the layout and of the reply in the handshake.
pub(super) const VERSION: u32 = 1;

const PARKER_AT: u64 = 64;
const SLOTS_AT: u64 = 128;
/// Offset of the payload in a slot.
const PAYLOAD_AT: usize = 8;
const CACHE_LINE: usize = 64;
/// Bytes of payload that fit into every slot, because it has a whole cache line. For such messages a slot needs no check.
const MIN_PAYLOAD: usize = CACHE_LINE - PAYLOAD_AT;

/// The first cache line of a lane. The client checks magic and version; the rest is for debugging.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    slots: AtomicU32,
    stride: AtomicU32,
}

// SAFETY: atomics only; the four bytes of padding at the end are never accessed.
unsafe impl Shared for Header {}

/// The dimensions of a lane. The server sends them to the client in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct LaneLayout {
    pub(super) queue_depth: u32,
    pub(super) request_limit: u32,
    pub(super) response_limit: u32,
}

impl LaneLayout {
    /// The layout for a configuration. A message type of fixed size replaces its limit.
    pub(super) fn new(config: &Config, request: Option<usize>, response: Option<usize>) -> LaneLayout {
        LaneLayout {
            queue_depth: config.queue_depth as u32,
            request_limit: request.unwrap_or(config.request_limit) as u32,
            response_limit: response.unwrap_or(config.response_limit) as u32,
        }
    }

    fn slots(&self) -> usize {
        CallTable::<()>::slots_for(self.queue_depth as usize)
    }

    fn stride(&self) -> usize {
        (PAYLOAD_AT + self.request_limit.max(self.response_limit) as usize).next_multiple_of(CACHE_LINE)
    }

    fn is_valid(&self) -> bool {
        self.queue_depth > 0
            && (self.queue_depth as usize) < MAX_SLOTS
            && self.request_limit as usize <= MAX_MESSAGE
            && self.response_limit as usize <= MAX_MESSAGE
    }

    pub(super) fn bytes(&self) -> u64 {
        SLOTS_AT + (self.slots() * self.stride()) as u64
    }
}

/// A mapped lane.
#[derive(Debug)]
pub(super) struct Lane {
    first: NonNull<u8>,
    slots: usize,
    stride: usize,
    /// Bytes of payload that fit into a slot, at least [`MIN_PAYLOAD`].
    payload_len: usize,
    parker: SharedRef<Parker>,
    /// Keeps `first` mapped.
    segment: Arc<Segment>,
}

// SAFETY: `first` points into the segment, which is `Send`. All access is through atomics and copies that tolerate races.
unsafe impl Send for Lane {}

impl Lane {
    /// Creates the lane of a client that is being admitted.
    pub(super) fn create(layout: &LaneLayout) -> io::Result<Lane> {
        let segment = Arc::new(Segment::create(layout.bytes())?);
        let lane = Lane::new(segment.clone(), layout).ok_or(io::ErrorKind::InvalidInput)?;
        let header: SharedRef<Header> = SharedRef::new(&segment, 0).ok_or(io::ErrorKind::InvalidInput)?;
        header.magic.store(MAGIC, Relaxed);
        header.version.store(VERSION, Relaxed);
        header.slots.store(lane.slots as u32, Relaxed);
        header.stride.store(lane.stride as u32, Relaxed);
        Ok(lane)
    }

    /// Maps the lane that a server handed over. None if the layout or the header is invalid.
    pub(super) fn open(file: ReceivedFile, layout: &LaneLayout) -> io::Result<Option<Lane>> {
        if !layout.is_valid() {
            return Ok(None);
        }
        let segment = Arc::new(Segment::open(file, layout.bytes())?);
        let valid = SharedRef::<Header>::new(&segment, 0).is_some_and(|header| {
            header.magic.load(Relaxed) == MAGIC && header.version.load(Relaxed) == VERSION
        });
        Ok(Lane::new(segment, layout).filter(|_| valid))
    }

    fn new(segment: Arc<Segment>, layout: &LaneLayout) -> Option<Lane> {
        let (slots, stride) = (layout.slots(), layout.stride());
        let first = segment.bytes(SLOTS_AT, (slots * stride) as u64)?;
        let parker = SharedRef::new(&segment, PARKER_AT)?;
        assert!(stride >= CACHE_LINE);
        Some(Lane { first, slots, stride, payload_len: stride - PAYLOAD_AT, parker, segment })
    }

    pub(super) fn file(&self) -> io::Result<OwnedFd> {
        self.segment.fd().try_clone_to_owned()
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// The parker of the client.
    #[inline]
    pub(super) fn parker(&self) -> &SharedRef<Parker> {
        &self.parker
    }

    /// Prefetches the cache lines of `count` slots for writing. For slots with responses, which the client is about to read
    /// and soon after to write: one request to the other core instead of two.
    #[inline]
    pub(super) fn prefetch(&self, slot: usize, count: usize) {
        let prefetch = |slot: usize, count: usize| {
            let mut at = self.first.as_ptr().wrapping_add(slot * self.stride);
            for _ in 0..count {
                prefetch::for_write(at);
                at = at.wrapping_add(self.stride);
            }
        };
        let to_end = count.min(self.slots.saturating_sub(slot));
        prefetch(slot, to_end);
        prefetch(0, count - to_end);
    }

    /// Moves the cache line of a slot towards the caches that all cores share. The other side gets it sooner from there than from this core.
    #[inline]
    pub(super) fn demote(&self, slot: usize) {
        prefetch::demote(self.first.as_ptr().wrapping_add(slot * self.stride));
    }

    #[inline]
    pub(super) fn slot(&self, slot: usize) -> Slot<'_> {
        assert!(slot < self.slots);
        // SAFETY: `slot < slots`.
        unsafe { self.slot_unchecked(slot) }
    }

    /// # Safety
    ///
    /// `slot` is less than `slots`.
    #[inline]
    unsafe fn slot_unchecked(&self, slot: usize) -> Slot<'_> {
        // SAFETY: inside the segment, as `slot < slots`.
        Slot { start: unsafe { self.first.add(slot * self.stride) }, lane: self }
    }
}

/// A lane, and where its next request is.
#[derive(Debug)]
pub(super) struct ServedLane {
    lane: Lane,
    /// A cursor for as many slots as the lane has.
    cursor: Cursor,
}

impl ServedLane {
    pub(super) fn new(lane: Lane) -> ServedLane {
        ServedLane { cursor: Cursor::new(lane.slots), lane }
    }

    /// Whether the next request is there.
    #[inline]
    pub(super) fn has_request(&self) -> bool {
        self.cursor.is_at(self.lane.slot(self.cursor.slot()).word())
    }

    /// Takes the next request, see [`Cursor::take`]. Returns its slot, too.
    #[inline]
    pub(super) fn take(&mut self, size: Option<usize>) -> (Slot<'_>, Next) {
        // SAFETY: the cursor is at a slot of this lane.
        let slot = unsafe { self.lane.slot_unchecked(self.cursor.slot()) };
        (slot, self.cursor.take(slot.word(), size))
    }

    #[inline]
    pub(super) fn slot(&self, slot: usize) -> Slot<'_> {
        self.lane.slot(slot)
    }
}

/// A slot of a lane.
#[derive(Clone, Copy)]
pub(super) struct Slot<'l> {
    /// The start of the slot, aligned to a cache line: the word, then `payload_len` bytes.
    start: NonNull<u8>,
    lane: &'l Lane,
}

// SAFETY: as for `Lane`. Of the lane it uses the parker, which threads may share, and a field that nobody changes.
unsafe impl Send for Slot<'_> {}

impl<'l> Slot<'l> {
    #[inline]
    pub(super) fn word(&self) -> &'l AtomicU64 {
        // SAFETY: inside the segment, which the lane keeps mapped, and aligned. Any bits are valid, and both sides access
        // the word atomically.
        unsafe { AtomicU64::from_ptr(self.start.cast().as_ptr()) }
    }

    #[inline]
    pub(super) fn lane(&self) -> &'l Lane {
        self.lane
    }

    /// As [`Lane::demote`].
    #[inline]
    pub(super) fn demote(&self) {
        prefetch::demote(self.start.as_ptr());
    }

    /// Copies a payload in. A peer that breaks the protocol may write at the same time.
    #[inline]
    pub(super) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= MIN_PAYLOAD || bytes.len() <= self.lane.payload_len);
        // SAFETY: inside the slot, as it has `payload_len` bytes of payload, and at least `MIN_PAYLOAD`. The payload area is aligned to
        // 8 bytes, and its length is a multiple of 8. `bytes` is not part of the segment: no Rust reference to bytes of the segment exists.
        unsafe { copy_in(bytes, self.start.add(PAYLOAD_AT).as_ptr()) };
    }

    /// Copies a payload in that is given in several parts.
    #[inline]
    pub(super) fn write_parts(&self, parts: &[&[u8]]) {
        assert!(parts_len(parts) <= self.lane.payload_len);
        let mut to = PAYLOAD_AT;
        for part in parts {
            // SAFETY: as in `write`; all parts together fit, so each part does.
            unsafe { copy(part.as_ptr(), self.start.add(to).as_ptr(), part.len()) };
            to += part.len();
        }
    }

    /// Copies a payload out.
    #[inline]
    pub(super) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= MIN_PAYLOAD || bytes.len() <= self.lane.payload_len);
        // SAFETY: as in `write`.
        unsafe { copy_out(self.start.add(PAYLOAD_AT).as_ptr(), bytes) };
    }
}

/// Bytes of all parts of a message together.
#[inline]
pub(super) fn parts_len(parts: &[&[u8]]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

/// The page that the server and all its clients map, with the server's parker.
#[derive(Debug)]
pub(super) struct ServerPage {
    segment: Arc<Segment>,
    parker: SharedRef<Parker>,
}

impl ServerPage {
    const LEN: u64 = 64;

    pub(super) fn create() -> io::Result<ServerPage> {
        ServerPage::new(Segment::create(ServerPage::LEN)?)
    }

    pub(super) fn open(file: ReceivedFile) -> io::Result<ServerPage> {
        ServerPage::new(Segment::open(file, ServerPage::LEN)?)
    }

    fn new(segment: Segment) -> io::Result<ServerPage> {
        let segment = Arc::new(segment);
        let parker = SharedRef::new(&segment, 0).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(ServerPage { segment, parker })
    }

    pub(super) fn file(&self) -> io::Result<OwnedFd> {
        self.segment.fd().try_clone_to_owned()
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The parker of the server.
    #[inline]
    pub(super) fn parker(&self) -> &Parker {
        &self.parker
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_messages_take_one_cache_line() {
        let layout = LaneLayout { queue_depth: 32, request_limit: 32, response_limit: 56 };
        assert_eq!(layout.stride(), 64);
        let layout = LaneLayout { response_limit: 57, ..layout };
        assert_eq!(layout.stride(), 128);
    }

    #[test]
    fn invalid_layouts_are_rejected() {
        let good = LaneLayout { queue_depth: 2, request_limit: 8, response_limit: 8 };
        let lane = Lane::create(&good).unwrap();
        for bad in [
            LaneLayout { queue_depth: 0, ..good },
            LaneLayout { queue_depth: MAX_SLOTS as u32, ..good },
            LaneLayout { queue_depth: u32::MAX, ..good },
            LaneLayout { request_limit: u32::MAX, ..good },
            LaneLayout { response_limit: MAX_MESSAGE as u32 + 1, ..good },
        ] {
            assert!(Lane::open(lane.file().unwrap().into(), &bad).unwrap().is_none(), "{bad:?}");
        }
        // The size of the segment does not match.
        assert!(Lane::open(lane.file().unwrap().into(), &LaneLayout { queue_depth: 3, ..good }).is_err());
        assert!(Lane::open(lane.file().unwrap().into(), &good).unwrap().is_some());
    }
}
