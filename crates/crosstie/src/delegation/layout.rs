//! The layout of the segment, and copies in and out of it. All `unsafe` code of `delegation` that touches the segment is in this file.
//!
//! The [module above](super) draws it.

use core::marker::PhantomData;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::io;
use std::sync::Arc;

use crosstie_protocol::key::Key;
use crosstie_protocol::lane::CallNumber;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Config, MAX_CLIENTS, MAX_MESSAGE, MAX_QUEUE_DEPTH, MAX_RING_DEPTH};
use crate::local::socket::ReceivedFile;
use crate::memory::copy::{copy_in, copy_out};
use crate::memory::segment::{Segment, Shared, SharedRef, SharedSlice};
use crate::ring::call_table::CallTable;
use crate::ring::reservation;
use crate::ring::stalled::StalledSlots;
use crate::wait::Parker;

/// "DLGRPCV1".
pub(super) const MAGIC: u64 = 0x444C_4752_5043_5631;
/// Version of the layout and of the reply in the handshake. Version 1 had no recovery of abandoned positions and no
/// parkers; version 2 had no stalled slots.
pub(super) const VERSION: u32 = 3;

const CACHE_LINE: usize = 64;
const REQUESTS_AT: u64 = 256;
const REQUEST_PAYLOAD_AT: usize = 16;
pub(super) const RESPONSE_PAYLOAD_AT: usize = 8;

/// Identifies a client: an index with a generation.
pub(super) type ClientKey = Key<12>;
const _: () = assert!(MAX_CLIENTS == ClientKey::INDICES as usize);

/// Header and ring control.
#[repr(C, align(64))]
pub(super) struct RingHeader {
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU32,
    pub(super) max_clients: AtomicU32,
    pub(super) ring_depth: AtomicU32,
    pub(super) resp_depth: AtomicU32,
    pub(super) next_client_id: AtomicU32,
    /// In the architecture one byte, followed by padding.
    pub(super) server_alive: AtomicU32,
    reserved: [AtomicU32; 8],
    /// The parker of the server.
    pub(super) parker: Parker,
    reserved_too: AtomicU32,
    /// See [`reservation`].
    pub(super) mode: AtomicU64,
    /// Request slots that clients must leave out.
    pub(super) stalled: StalledSlots,
    pub(super) head: AtomicU64,
    around_head: [AtomicU64; 7],
    pub(super) tail: AtomicU64,
    around_tail: [AtomicU64; 7],
}

const _: () = {
    assert!(offset_of!(RingHeader, magic) == 0);
    assert!(offset_of!(RingHeader, version) == 8);
    assert!(offset_of!(RingHeader, max_clients) == 12);
    assert!(offset_of!(RingHeader, ring_depth) == 16);
    assert!(offset_of!(RingHeader, resp_depth) == 20);
    assert!(offset_of!(RingHeader, next_client_id) == 24);
    assert!(offset_of!(RingHeader, server_alive) == 28);
    assert!(offset_of!(RingHeader, parker) == 64);
    assert!(offset_of!(RingHeader, mode) == 72);
    assert!(offset_of!(RingHeader, stalled) == 80);
    assert!(offset_of!(RingHeader, head) == 128);
    assert!(offset_of!(RingHeader, tail) == 192);
    assert!(size_of::<RingHeader>() == REQUESTS_AT as usize);
};

// SAFETY: atomics only, without padding (see the assertions above), aligned to 64.
unsafe impl Shared for RingHeader {}

/// What a client writes besides requests. Claim and parker are on separate cache lines: the server reads the parker with
/// every reply, and that must not take the cache line of the claim away from the client.
#[repr(C, align(64))]
pub(super) struct ClientArea {
    /// See [`reservation`].
    pub(super) claim: AtomicU64,
    around_claim: [AtomicU64; 7],
    pub(super) parker: Parker,
    around_parker: [AtomicU32; 15],
}

const _: () = {
    assert!(offset_of!(ClientArea, claim) == 0);
    assert!(offset_of!(ClientArea, parker) == CACHE_LINE);
    assert!(size_of::<ClientArea>() == 2 * CACHE_LINE);
};

// SAFETY: as for `RingHeader`.
unsafe impl Shared for ClientArea {}

/// The dimensions of the segment. The server sends them to its clients in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RingLayout {
    pub(super) max_clients: u32,
    pub(super) queue_depth: u32,
    pub(super) ring_depth: u32,
    pub(super) request_limit: u32,
    pub(super) response_limit: u32,
}

/// What the server sends to a client that it accepts.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct AcceptReply {
    pub(super) layout: RingLayout,
    pub(super) key: u32,
}

impl RingLayout {
    /// The layout for a configuration, which must be within its limits. A message type of fixed size replaces its limit.
    pub(super) fn new(config: &Config, request: Option<usize>, response: Option<usize>) -> RingLayout {
        RingLayout {
            max_clients: config.max_clients as u32,
            queue_depth: config.queue_depth as u32,
            ring_depth: config.ring_depth.next_power_of_two() as u32,
            request_limit: request.unwrap_or(config.request_limit) as u32,
            response_limit: response.unwrap_or(config.response_limit) as u32,
        }
    }

    fn is_valid(&self) -> bool {
        let within = |value: u32, limit: usize| 0 < value && value as usize <= limit;
        within(self.max_clients, MAX_CLIENTS)
            && within(self.queue_depth, MAX_QUEUE_DEPTH)
            && within(self.ring_depth, MAX_RING_DEPTH)
            && self.ring_depth.is_power_of_two()
            && self.request_limit as usize <= MAX_MESSAGE
            && self.response_limit as usize <= MAX_MESSAGE
    }

    /// Response slots of one client.
    pub(super) fn resp_depth(&self) -> usize {
        CallTable::<()>::slots_for(self.queue_depth as usize).next_power_of_two()
    }

    fn request_stride(&self) -> usize {
        (REQUEST_PAYLOAD_AT + self.request_limit as usize).next_multiple_of(CACHE_LINE)
    }

    fn response_stride(&self) -> usize {
        (RESPONSE_PAYLOAD_AT + self.response_limit as usize).next_multiple_of(CACHE_LINE)
    }

    fn responses_at(&self) -> u64 {
        REQUESTS_AT + u64::from(self.ring_depth) * self.request_stride() as u64
    }

    fn clients_at(&self) -> u64 {
        let slots = u64::from(self.max_clients) * self.resp_depth() as u64;
        self.responses_at() + slots * self.response_stride() as u64
    }

    /// Bytes of the segment.
    pub(super) fn bytes(&self) -> u64 {
        self.clients_at() + u64::from(self.max_clients) * size_of::<ClientArea>() as u64
    }
}

/// The mapped segment.
#[derive(Clone, Debug)]
pub(super) struct SharedRing {
    pub(super) layout: RingLayout,
    /// As [`RingLayout::resp_depth`].
    pub(super) resp_depth: usize,
    pub(super) header: SharedRef<RingHeader>,
    requests: Slots<REQUEST_PAYLOAD_AT>,
    responses: Slots<RESPONSE_PAYLOAD_AT>,
    pub(super) clients: SharedSlice<ClientArea>,
    pub(super) segment: Arc<Segment>,
}

impl SharedRing {
    /// Creates the segment of a server.
    pub(super) fn create(layout: RingLayout) -> io::Result<SharedRing> {
        let segment = Arc::new(Segment::create(layout.bytes())?);
        let ring = SharedRing::new(segment, layout).ok_or(io::ErrorKind::InvalidInput)?;
        let header = &ring.header;
        header.version.store(VERSION, Relaxed);
        header.max_clients.store(layout.max_clients, Relaxed);
        header.ring_depth.store(layout.ring_depth, Relaxed);
        header.resp_depth.store(layout.resp_depth() as u32, Relaxed);
        header.mode.store(reservation::SHARED, Relaxed);
        for index in 0..ring.clients.len() {
            ring.clients[index].claim.store(reservation::IDLE, Relaxed);
        }
        header.magic.store(MAGIC, Relaxed);
        // Stored last. Release, partner: the Acquire load in `SharedRing::open`.
        header.server_alive.store(1, Release);
        Ok(ring)
    }

    /// Maps the segment that a server handed over. None if the layout or the header is invalid.
    pub(super) fn open(file: ReceivedFile, layout: RingLayout) -> io::Result<Option<SharedRing>> {
        if !layout.is_valid() {
            return Ok(None);
        }
        let segment = Arc::new(Segment::open(file, layout.bytes())?);
        Ok(SharedRing::new(segment, layout).filter(|ring| {
            let header = &ring.header;
            // Acquire, partner: the Release store in `SharedRing::create`.
            header.server_alive.load(Acquire) == 1
                && header.magic.load(Relaxed) == MAGIC
                && header.version.load(Relaxed) == VERSION
                && header.max_clients.load(Relaxed) == layout.max_clients
                && header.ring_depth.load(Relaxed) == layout.ring_depth
                && header.resp_depth.load(Relaxed) == layout.resp_depth() as u32
        }))
    }

    fn new(segment: Arc<Segment>, layout: RingLayout) -> Option<SharedRing> {
        let slots = layout.max_clients as usize * layout.resp_depth();
        Some(SharedRing {
            layout,
            resp_depth: layout.resp_depth(),
            header: SharedRef::new(&segment, 0)?,
            requests: Slots::new(&segment, REQUESTS_AT, layout.ring_depth as usize, layout.request_stride())?,
            responses: Slots::new(&segment, layout.responses_at(), slots, layout.response_stride())?,
            clients: SharedSlice::new(&segment, layout.clients_at(), layout.max_clients as usize)?,
            segment,
        })
    }

    /// The claim and the parker of a client.
    pub(super) fn client_area(&self, client: ClientKey) -> Option<(SharedRef<AtomicU64>, SharedRef<Parker>)> {
        let area = self.layout.clients_at() + u64::from(client.index()) * size_of::<ClientArea>() as u64;
        let parker = area + offset_of!(ClientArea, parker) as u64;
        Some((SharedRef::new(&self.segment, area)?, SharedRef::new(&self.segment, parker)?))
    }

    /// A response slot of the client with this index.
    #[inline]
    pub(super) fn response(&self, client: usize, slot: usize) -> Slot<'_, RESPONSE_PAYLOAD_AT> {
        self.responses.slot(client * self.resp_depth + slot)
    }

    /// All response slots of the client with this index.
    pub(super) fn responses_of(&self, client: usize) -> Option<Slots<RESPONSE_PAYLOAD_AT>> {
        self.responses.part(client.checked_mul(self.resp_depth)?, self.resp_depth)
    }

    /// The request slots: as many as a power of two.
    #[inline]
    pub(super) fn requests(&self) -> &Slots<REQUEST_PAYLOAD_AT> {
        &self.requests
    }

    /// The request slot of a position.
    #[inline]
    pub(super) fn request(&self, position: u64) -> Slot<'_, REQUEST_PAYLOAD_AT> {
        self.requests.masked(position as usize)
    }
}

/// An array of slots of the same size, each aligned to a cache line: words, then a payload.
#[derive(Clone, Debug)]
pub(super) struct Slots<const PAYLOAD_AT: usize> {
    first: NonNull<u8>,
    count: usize,
    /// Less than `count`. If `count` is a power of two: one less, the mask of an index.
    mask: usize,
    /// At least a cache line.
    stride: usize,
    /// Bytes of payload that fit into a slot.
    payload_len: usize,
    /// Keeps `first` mapped.
    segment: Arc<Segment>,
}

// SAFETY: `first` points into the segment, which is `Send`. All access is through atomics and copies that tolerate races.
unsafe impl<const PAYLOAD_AT: usize> Send for Slots<PAYLOAD_AT> {}
// SAFETY: as above.
unsafe impl<const PAYLOAD_AT: usize> Sync for Slots<PAYLOAD_AT> {}

impl<const PAYLOAD_AT: usize> Slots<PAYLOAD_AT> {
    fn new(segment: &Arc<Segment>, at: u64, count: usize, stride: usize) -> Option<Self> {
        let first = segment.bytes(at, (count as u64).checked_mul(stride as u64)?)?;
        (count > 0 && stride >= CACHE_LINE && first.cast::<[u64; 8]>().is_aligned()).then(|| Slots {
            first,
            count,
            mask: (1 << count.ilog2()) - 1,
            stride,
            payload_len: stride - PAYLOAD_AT,
            segment: segment.clone(),
        })
    }

    /// `count` slots from `from` on.
    fn part(&self, from: usize, count: usize) -> Option<Self> {
        let end = from.checked_add(count)?;
        (count > 0 && end <= self.count).then(|| Slots {
            // SAFETY: inside the segment, as `from` is less than the number of these slots.
            first: unsafe { self.first.add(from * self.stride) },
            count,
            mask: (1 << count.ilog2()) - 1,
            segment: self.segment.clone(),
            ..*self
        })
    }

    #[inline]
    pub(super) fn slot(&self, slot: usize) -> Slot<'_, PAYLOAD_AT> {
        assert!(slot < self.count);
        // SAFETY: inside the segment, which `self` keeps mapped, as `slot < count`.
        let start = unsafe { self.first.add(slot * self.stride) };
        Slot { start, payload_len: self.payload_len, slots: PhantomData }
    }

    /// The slot whose index has the lower bits of `index`, as many as `count` has, which is to be a power of two.
    #[inline]
    pub(super) fn masked(&self, index: usize) -> Slot<'_, PAYLOAD_AT> {
        self.view().masked(index)
    }

    /// The slots by value, for loops: their address and size are loaded once, not after every atomic access.
    #[inline]
    pub(super) fn view(&self) -> SlotsView<'_, PAYLOAD_AT> {
        let &Slots { first, mask, stride, payload_len, .. } = self;
        SlotsView { first, mask, stride, payload_len, slots: PhantomData }
    }
}

/// See [`Slots::view`].
#[derive(Clone, Copy)]
pub(super) struct SlotsView<'s, const PAYLOAD_AT: usize> {
    first: NonNull<u8>,
    mask: usize,
    stride: usize,
    payload_len: usize,
    slots: PhantomData<&'s Slots<PAYLOAD_AT>>,
}

impl<'s, const PAYLOAD_AT: usize> SlotsView<'s, PAYLOAD_AT> {
    /// As [`Slots::masked`].
    #[inline]
    pub(super) fn masked(self, index: usize) -> Slot<'s, PAYLOAD_AT> {
        // SAFETY: inside the segment, which the `Slots` keep mapped during `'s`: `index & mask` is at most `mask`, which is less than the
        // number of slots.
        let start = unsafe { self.first.add((index & self.mask) * self.stride) };
        Slot { start, payload_len: self.payload_len, slots: PhantomData }
    }
}

/// One slot of [`Slots`].
#[derive(Clone, Copy)]
pub(super) struct Slot<'s, const PAYLOAD_AT: usize> {
    /// The start of `PAYLOAD_AT + payload_len` mapped bytes, aligned to a cache line.
    start: NonNull<u8>,
    payload_len: usize,
    slots: PhantomData<&'s Slots<PAYLOAD_AT>>,
}

impl<'s, const PAYLOAD_AT: usize> Slot<'s, PAYLOAD_AT> {
    /// Bytes of payload that fit into every slot. For such messages a slot needs no check.
    const MIN_PAYLOAD: usize = CACHE_LINE - PAYLOAD_AT;

    /// The first word of the slot.
    #[inline]
    pub(super) fn word(&self) -> &'s AtomicU64 {
        // SAFETY: mapped as long as `'s`, and aligned. Any bits are valid, and all sides access the word atomically.
        unsafe { AtomicU64::from_ptr(self.start.cast().as_ptr()) }
    }

    /// Copies a payload in. Peers that break the protocol may write at the same time.
    #[inline]
    pub(super) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= Self::MIN_PAYLOAD || bytes.len() <= self.payload_len);
        // SAFETY: inside the slot, which has at least a cache line. The payload area is aligned to 8 bytes, and its length is a multiple
        // of 8. `bytes` is not part of the segment: no Rust reference to bytes of the segment exists.
        unsafe { copy_in(bytes, self.start.add(PAYLOAD_AT).as_ptr()) };
    }

    /// Copies a payload out.
    #[inline]
    pub(super) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= Self::MIN_PAYLOAD || bytes.len() <= self.payload_len);
        // SAFETY: as in `write`.
        unsafe { copy_out(self.start.add(PAYLOAD_AT).as_ptr(), bytes) };
    }
}

impl<'s> Slot<'s, REQUEST_PAYLOAD_AT> {
    /// The second word of the slot.
    #[inline]
    pub(super) fn second_word(&self) -> &'s AtomicU64 {
        // SAFETY: as in `word`; the payload begins after 16 bytes.
        unsafe { AtomicU64::from_ptr(self.start.add(8).cast().as_ptr()) }
    }
}

/// The first word of a request: the stamp, which marks the request as committed, and the key of the client.
///
/// The stamp is derived from the position. So it differs from the stamp that the slot had one round of the ring before, and
/// nobody has to reset the slot.
#[inline]
pub(super) fn commit_word(position: u64, client: ClientKey) -> u64 {
    u64::from(client.bits()) << 32 | u64::from(stamp(position))
}

/// The client whose request a word commits, if the word has the stamp of this position.
#[inline]
pub(super) fn committed_by(word: u64, position: u64) -> Option<ClientKey> {
    (word as u32 == stamp(position)).then(|| client_of(word))
}

/// The client whose request a word commits, at whatever position.
#[inline]
pub(super) fn client_of(word: u64) -> ClientKey {
    ClientKey::from_bits((word >> 32) as u32)
}

#[inline]
fn stamp(position: u64) -> u32 {
    (position as u32).wrapping_add(1)
}

/// Identifies a response slot, and the call that the response in it belongs to: the slot in the lower 11 bits, and the lower
/// 21 bits of the call number above it. Every 2^21th call has the same bits; before a client uses the key of the word that a
/// slot has, it changes that word (`RingTransport::invalidate_equal_response`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResponseKey(u32);

impl ResponseKey {
    const SLOT_BITS: u32 = 11;

    #[inline]
    pub(super) fn new(slot: usize, call: CallNumber) -> ResponseKey {
        debug_assert!(slot < 1 << Self::SLOT_BITS);
        ResponseKey(call.doubled() << (Self::SLOT_BITS - 1) | slot as u32)
    }

    /// Whether the keys of two calls in the same slot are equal.
    #[inline]
    pub(super) fn are_equal(one: CallNumber, other: CallNumber) -> bool {
        (one.doubled() ^ other.doubled()) << (Self::SLOT_BITS - 1) == 0
    }

    /// The key of another call in the same slot.
    #[inline]
    pub(super) fn other(self) -> ResponseKey {
        ResponseKey(self.0 ^ 1 << Self::SLOT_BITS)
    }

    /// The slot. Not validated: a client wrote it.
    #[inline]
    pub(super) fn slot(self) -> usize {
        (self.0 & ((1 << Self::SLOT_BITS) - 1)) as usize
    }

    /// The key with a length: the second word of a request, and the word of a response.
    #[inline]
    pub(super) fn word(self, len: usize) -> u64 {
        (len as u64) << 32 | u64::from(self.0)
    }

    /// The key and the length in a word.
    #[inline]
    pub(super) fn parse(word: u64) -> (ResponseKey, usize) {
        (ResponseKey(word as u32), (word >> 32) as usize)
    }
}

const _: () = {
    assert!((CallTable::<()>::slots_for(MAX_QUEUE_DEPTH)).next_power_of_two() <= 1 << ResponseKey::SLOT_BITS);
    assert!(MAX_MESSAGE <= u32::MAX as usize);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const GOOD: RingLayout =
        RingLayout { max_clients: 2, queue_depth: 2, ring_depth: 4, request_limit: 8, response_limit: 8 };

    #[test]
    fn small_messages_take_one_cache_line_each_way() {
        let layout = RingLayout { request_limit: 48, response_limit: 56, ..GOOD };
        assert_eq!((layout.request_stride(), layout.response_stride()), (64, 64));
        let layout = RingLayout { request_limit: 49, response_limit: 57, ..GOOD };
        assert_eq!((layout.request_stride(), layout.response_stride()), (128, 128));
        // Two clients with four response slots each.
        assert_eq!(GOOD.bytes(), 256 + 4 * 64 + 8 * 64 + 2 * 128);
    }

    #[test]
    fn invalid_layouts_are_rejected() {
        let ring = SharedRing::create(GOOD).unwrap();
        let file = || ReceivedFile::from(ring.segment.fd().try_clone_to_owned().unwrap());
        for bad in [
            RingLayout { max_clients: 0, ..GOOD },
            RingLayout { max_clients: u32::MAX, ..GOOD },
            RingLayout { queue_depth: 0, ..GOOD },
            RingLayout { queue_depth: MAX_QUEUE_DEPTH as u32 + 1, ..GOOD },
            RingLayout { ring_depth: 3, ..GOOD },
            RingLayout { ring_depth: u32::MAX, ..GOOD },
            RingLayout { request_limit: u32::MAX, ..GOOD },
            RingLayout { response_limit: MAX_MESSAGE as u32 + 1, ..GOOD },
        ] {
            assert!(SharedRing::open(file(), bad).unwrap().is_none(), "{bad:?}");
        }
        // The size of the segment does not match.
        assert!(SharedRing::open(file(), RingLayout { ring_depth: 8, ..GOOD }).is_err());
        assert!(SharedRing::open(file(), GOOD).unwrap().is_some());
        ring.header.server_alive.store(0, Relaxed);
        assert!(SharedRing::open(file(), GOOD).unwrap().is_none());
    }

    #[test]
    fn stamp_differs_in_each_round_of_the_ring() {
        let key = ClientKey::first(3);
        for position in [0, 1, 7, u64::from(u32::MAX) - 1, u64::from(u32::MAX), u64::MAX] {
            let word = commit_word(position, key);
            assert_eq!(committed_by(word, position), Some(key));
            assert_eq!(committed_by(word, position.wrapping_add(GOOD.ring_depth.into())), None);
        }
        assert_eq!(committed_by(0, 0), None);
    }
}
