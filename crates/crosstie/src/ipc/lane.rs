//! A mapped lane: where its slots are, and copying in and out of them. All that this module does unsafely is in here.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crosstie_protocol::lane::MAX_SLOTS;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Config, MAX_MESSAGE};
use crate::memory::copy::{copy, copy_in, copy_out};
use crate::memory::prefetch;
use crate::memory::segment::{Segment, Shared, SharedRef};
use crate::ring::call_table::CallTable;
use crate::wait::Parker;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"XTIELANE");
/// Version of everything that client and server must agree on.
pub(super) const VERSION: u32 = 1;

const PARKER_AT: u64 = 64;
const SLOTS_AT: u64 = 128;
/// The payload's place in a slot.
const PAYLOAD_AT: usize = 8;
const LINE: usize = 64;

/// The first line of a lane. For people with a debugger; nobody acts on it.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    slots: AtomicU32,
    stride: AtomicU32,
}

// SAFETY: atomics only; the four bytes behind the last one are nobody's.
unsafe impl Shared for Header {}

/// The shape of a lane, as the server tells its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Shape {
    pub(super) queue_depth: u32,
    pub(super) request_limit: u32,
    pub(super) response_limit: u32,
}

impl Shape {
    /// Of a server with this configuration; sizes of fixed messages take the place of limits.
    pub(super) fn new(config: &Config, request: Option<usize>, response: Option<usize>) -> Shape {
        Shape {
            queue_depth: config.queue_depth as u32,
            request_limit: request.unwrap_or(config.request_limit) as u32,
            response_limit: response.unwrap_or(config.response_limit) as u32,
        }
    }

    fn slots(&self) -> usize {
        CallTable::<()>::slots_for(self.queue_depth as usize)
    }

    fn stride(&self) -> usize {
        (PAYLOAD_AT + self.request_limit.max(self.response_limit) as usize).next_multiple_of(LINE)
    }

    fn is_sane(&self) -> bool {
        self.queue_depth > 0
            && (self.queue_depth as usize) < MAX_SLOTS
            && self.request_limit as usize <= MAX_MESSAGE
            && self.response_limit as usize <= MAX_MESSAGE
    }

    pub(super) fn bytes(&self) -> u64 {
        SLOTS_AT + (self.slots() * self.stride()) as u64
    }
}

/// A lane, mapped.
#[derive(Debug)]
pub(super) struct Lane {
    first: NonNull<u8>,
    slots: usize,
    stride: usize,
    /// What fits into a slot.
    room: usize,
    parker: SharedRef<Parker>,
    /// Keeps `first` mapped.
    segment: Arc<Segment>,
}

// SAFETY: `first` points into the segment, which is `Send`; what is there is reached through atomics and copies that
// tolerate races.
unsafe impl Send for Lane {}

impl Lane {
    /// A new one, for a client that is about to get it.
    pub(super) fn create(shape: &Shape) -> io::Result<Lane> {
        let segment = Arc::new(Segment::create(shape.bytes())?);
        let lane = Lane::new(segment.clone(), shape).ok_or(io::ErrorKind::InvalidInput)?;
        let header: SharedRef<Header> = SharedRef::new(&segment, 0).ok_or(io::ErrorKind::InvalidInput)?;
        header.magic.store(MAGIC, Relaxed);
        header.version.store(VERSION, Relaxed);
        header.slots.store(lane.slots as u32, Relaxed);
        header.stride.store(lane.stride as u32, Relaxed);
        Ok(lane)
    }

    /// The one that a server handed over.
    pub(super) fn open(file: OwnedFd, shape: &Shape) -> io::Result<Option<Lane>> {
        if !shape.is_sane() {
            return Ok(None);
        }
        let segment = Arc::new(Segment::open(file, shape.bytes())?);
        let sane = SharedRef::<Header>::new(&segment, 0).is_some_and(|header| {
            header.magic.load(Relaxed) == MAGIC && header.version.load(Relaxed) == VERSION
        });
        Ok(Lane::new(segment, shape).filter(|_| sane))
    }

    fn new(segment: Arc<Segment>, shape: &Shape) -> Option<Lane> {
        let (slots, stride) = (shape.slots(), shape.stride());
        let first = segment.bytes(SLOTS_AT, (slots * stride) as u64)?;
        let parker = SharedRef::new(&segment, PARKER_AT)?;
        Some(Lane { first, slots, stride, room: stride - PAYLOAD_AT, parker, segment })
    }

    pub(super) fn file(&self) -> io::Result<OwnedFd> {
        self.segment.fd().try_clone_to_owned()
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// The client's.
    #[inline]
    pub(super) fn parker(&self) -> &SharedRef<Parker> {
        &self.parker
    }

    /// Has the lines of `count` slots fetched for writing. For slots that the other side is done with: they are about to be
    /// read, and written soon after, which would ask the other side's core twice.
    #[inline]
    pub(super) fn fetch(&self, mut slot: usize, count: usize) {
        for _ in 0..count {
            prefetch::for_write(self.first.as_ptr().wrapping_add(slot * self.stride));
            slot = if slot + 1 == self.slots { 0 } else { slot + 1 };
        }
    }

    /// A slot.
    #[inline]
    pub(super) fn slot(&self, slot: usize) -> Slot<'_> {
        assert!(slot < self.slots);
        // SAFETY: inside the segment.
        Slot { at: unsafe { self.first.add(slot * self.stride) }, lane: self }
    }
}

/// A slot of a lane.
#[derive(Clone, Copy)]
pub(super) struct Slot<'l> {
    /// The word, on a line of its own, and `room` bytes behind it.
    at: NonNull<u8>,
    lane: &'l Lane,
}

impl<'l> Slot<'l> {
    #[inline]
    pub(super) fn word(&self) -> &'l AtomicU64 {
        // SAFETY: inside the segment, which the lane keeps mapped, and aligned; any bits are a word, and everybody
        // reaches it atomically.
        unsafe { AtomicU64::from_ptr(self.at.cast().as_ptr()) }
    }

    /// Copies a payload in. The other side may be doing the same if it breaks the rules.
    #[inline]
    pub(super) fn put(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.lane.room);
        // SAFETY: the payload's room is aligned to 8 and, like `room`, a multiple of 8 long. `bytes` is no part of the
        // segment, of which no Rust reference to bytes exists.
        unsafe { copy_in(bytes, self.at.add(PAYLOAD_AT).as_ptr()) };
    }

    /// Copies a payload in that is in several places, one after the other.
    #[inline]
    pub(super) fn put_parts(&self, parts: &[&[u8]]) {
        assert!(length(parts) <= self.lane.room);
        let mut to = PAYLOAD_AT;
        for part in parts {
            // SAFETY: as in `put`; all parts together fit, so each does.
            unsafe { copy(part.as_ptr(), self.at.add(to).as_ptr(), part.len()) };
            to += part.len();
        }
    }

    /// Copies a payload out.
    #[inline]
    pub(super) fn get(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.lane.room);
        // SAFETY: as in `put`.
        unsafe { copy_out(self.at.add(PAYLOAD_AT).as_ptr(), bytes) };
    }
}

/// Bytes of all parts of a message.
#[inline]
pub(super) fn length(parts: &[&[u8]]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

/// The page that all clients of a server map.
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

    pub(super) fn open(file: OwnedFd) -> io::Result<ServerPage> {
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

    /// The server's.
    #[inline]
    pub(super) fn parker(&self) -> &Parker {
        &self.parker
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_calls_take_one_line() {
        let shape = Shape { queue_depth: 32, request_limit: 32, response_limit: 56 };
        assert_eq!(shape.stride(), 64);
        let shape = Shape { response_limit: 57, ..shape };
        assert_eq!(shape.stride(), 128);
    }

    #[test]
    fn shapes_that_make_no_sense_open_nothing() {
        let good = Shape { queue_depth: 2, request_limit: 8, response_limit: 8 };
        let lane = Lane::create(&good).unwrap();
        for bad in [
            Shape { queue_depth: 0, ..good },
            Shape { queue_depth: MAX_SLOTS as u32, ..good },
            Shape { queue_depth: u32::MAX, ..good },
            Shape { request_limit: u32::MAX, ..good },
            Shape { response_limit: MAX_MESSAGE as u32 + 1, ..good },
        ] {
            assert!(Lane::open(lane.file().unwrap(), &bad).unwrap().is_none(), "{bad:?}");
        }
        // The segment has another size.
        assert!(Lane::open(lane.file().unwrap(), &Shape { queue_depth: 3, ..good }).is_err());
        assert!(Lane::open(lane.file().unwrap(), &good).unwrap().is_some());
    }
}
