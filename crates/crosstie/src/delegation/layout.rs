//! Where everything lies in the segment, and copying in and out of it. All that this module does unsafely is in here.
//!
//! The first 256 bytes and the slots are those of the delegation architecture §2.1; the module above draws them.

use core::marker::PhantomData;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crosstie_protocol::key::Key;
use crosstie_protocol::lane::CallNumber;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Config, MAX_CLIENTS, MAX_MESSAGE, MAX_QUEUE_DEPTH, MAX_RING_DEPTH};
use crate::memory::copy::{copy_in, copy_out};
use crate::memory::segment::{Segment, Shared, SharedRef, SharedSlice};
use crate::ring::call_table::CallTable;
use crate::ring::reservation;
use crate::wait::Parker;

/// "DLGRPCV1".
pub(super) const MAGIC: u64 = 0x444C_4752_5043_5631;
/// Version of everything that client and server must agree on. 1 is a layout without healing and waiting.
pub(super) const VERSION: u32 = 2;

const LINE: usize = 64;
const REQUESTS_AT: u64 = 256;
const REQUEST_PAYLOAD_AT: usize = 16;
pub(super) const RESPONSE_PAYLOAD_AT: usize = 8;

/// Which client: an index with a generation.
pub(super) type ClientKey = Key<12>;
const _: () = assert!(MAX_CLIENTS == ClientKey::INDICES as usize);

/// Header and ring control.
#[repr(C, align(64))]
pub(super) struct Top {
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU32,
    pub(super) max_clients: AtomicU32,
    pub(super) ring_depth: AtomicU32,
    pub(super) resp_depth: AtomicU32,
    pub(super) next_client_id: AtomicU32,
    /// One byte of the architecture's, and padding behind it.
    pub(super) server_alive: AtomicU32,
    reserved: [AtomicU32; 8],
    /// The server's.
    pub(super) parker: Parker,
    reserved_too: AtomicU32,
    /// See [`reservation`].
    pub(super) mode: AtomicU64,
    reserved_three: [AtomicU64; 6],
    pub(super) head: AtomicU64,
    around_head: [AtomicU64; 7],
    pub(super) tail: AtomicU64,
    around_tail: [AtomicU64; 7],
}

const _: () = {
    assert!(offset_of!(Top, magic) == 0);
    assert!(offset_of!(Top, version) == 8);
    assert!(offset_of!(Top, max_clients) == 12);
    assert!(offset_of!(Top, ring_depth) == 16);
    assert!(offset_of!(Top, resp_depth) == 20);
    assert!(offset_of!(Top, next_client_id) == 24);
    assert!(offset_of!(Top, server_alive) == 28);
    assert!(offset_of!(Top, parker) == 64);
    assert!(offset_of!(Top, mode) == 72);
    assert!(offset_of!(Top, head) == 128);
    assert!(offset_of!(Top, tail) == 192);
    assert!(size_of::<Top>() == REQUESTS_AT as usize);
};

// SAFETY: atomics only, without padding (the assertions above), aligned to 64.
unsafe impl Shared for Top {}

/// What a client writes besides requests. The two are on lines of their own: the server looks at the parker with every
/// answer, and that must not take the claim away from its client.
#[repr(C, align(64))]
pub(super) struct ClientLines {
    /// See [`reservation`].
    pub(super) claim: AtomicU64,
    around_claim: [AtomicU64; 7],
    pub(super) parker: Parker,
    around_bell: [AtomicU32; 15],
}

const _: () = {
    assert!(offset_of!(ClientLines, claim) == 0);
    assert!(offset_of!(ClientLines, parker) == LINE);
    assert!(size_of::<ClientLines>() == 2 * LINE);
};

// SAFETY: as for `Top`.
unsafe impl Shared for ClientLines {}

/// The shape of the segment, as the server tells its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Shape {
    pub(super) max_clients: u32,
    pub(super) queue_depth: u32,
    pub(super) ring_depth: u32,
    pub(super) request_limit: u32,
    pub(super) response_limit: u32,
}

/// What a client is told when it is let in.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Welcome {
    pub(super) shape: Shape,
    pub(super) key: u32,
}

impl Shape {
    /// Of a server with this configuration, which is inside its limits; sizes of fixed messages take the place of limits.
    pub(super) fn new(config: &Config, request: Option<usize>, response: Option<usize>) -> Shape {
        Shape {
            max_clients: config.max_clients as u32,
            queue_depth: config.queue_depth as u32,
            ring_depth: config.ring_depth.next_power_of_two() as u32,
            request_limit: request.unwrap_or(config.request_limit) as u32,
            response_limit: response.unwrap_or(config.response_limit) as u32,
        }
    }

    fn is_sane(&self) -> bool {
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
        (REQUEST_PAYLOAD_AT + self.request_limit as usize).next_multiple_of(LINE)
    }

    fn response_stride(&self) -> usize {
        (RESPONSE_PAYLOAD_AT + self.response_limit as usize).next_multiple_of(LINE)
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
        self.clients_at() + u64::from(self.max_clients) * size_of::<ClientLines>() as u64
    }
}

/// The segment, mapped.
#[derive(Clone, Debug)]
pub(super) struct Map {
    pub(super) shape: Shape,
    /// As [`Shape::resp_depth`].
    pub(super) resp_depth: usize,
    pub(super) top: SharedRef<Top>,
    requests: Slots<REQUEST_PAYLOAD_AT>,
    responses: Slots<RESPONSE_PAYLOAD_AT>,
    pub(super) clients: SharedSlice<ClientLines>,
    pub(super) segment: Arc<Segment>,
}

impl Map {
    /// A new one.
    pub(super) fn create(shape: Shape) -> io::Result<Map> {
        let segment = Arc::new(Segment::create(shape.bytes())?);
        let map = Map::new(segment, shape).ok_or(io::ErrorKind::InvalidInput)?;
        let top = &map.top;
        top.version.store(VERSION, Relaxed);
        top.max_clients.store(shape.max_clients, Relaxed);
        top.ring_depth.store(shape.ring_depth, Relaxed);
        top.resp_depth.store(shape.resp_depth() as u32, Relaxed);
        top.mode.store(reservation::SHARED, Relaxed);
        for index in 0..map.clients.len() {
            map.clients[index].claim.store(reservation::IDLE, Relaxed);
        }
        top.magic.store(MAGIC, Relaxed);
        // Release, partner: the Acquire load in `Map::open`. Published last.
        top.server_alive.store(1, Release);
        Ok(map)
    }

    /// The one that a server handed over; none if it makes no sense.
    pub(super) fn open(file: OwnedFd, shape: Shape) -> io::Result<Option<Map>> {
        if !shape.is_sane() {
            return Ok(None);
        }
        let segment = Arc::new(Segment::open(file, shape.bytes())?);
        Ok(Map::new(segment, shape).filter(|map| {
            let top = &map.top;
            // Acquire, partner: the Release store in `Map::create`.
            top.server_alive.load(Acquire) == 1
                && top.magic.load(Relaxed) == MAGIC
                && top.version.load(Relaxed) == VERSION
                && top.max_clients.load(Relaxed) == shape.max_clients
                && top.ring_depth.load(Relaxed) == shape.ring_depth
                && top.resp_depth.load(Relaxed) == shape.resp_depth() as u32
        }))
    }

    fn new(segment: Arc<Segment>, shape: Shape) -> Option<Map> {
        let slots = shape.max_clients as usize * shape.resp_depth();
        Some(Map {
            shape,
            resp_depth: shape.resp_depth(),
            top: SharedRef::new(&segment, 0)?,
            requests: Slots::new(&segment, REQUESTS_AT, shape.ring_depth as usize, shape.request_stride())?,
            responses: Slots::new(&segment, shape.responses_at(), slots, shape.response_stride())?,
            clients: SharedSlice::new(&segment, shape.clients_at(), shape.max_clients as usize)?,
            segment,
        })
    }

    /// A client's own claim and parker.
    pub(super) fn lines_of(&self, client: ClientKey) -> Option<(SharedRef<AtomicU64>, SharedRef<Parker>)> {
        let lines = self.shape.clients_at() + u64::from(client.index()) * size_of::<ClientLines>() as u64;
        let parker = lines + offset_of!(ClientLines, parker) as u64;
        Some((SharedRef::new(&self.segment, lines)?, SharedRef::new(&self.segment, parker)?))
    }

    /// A client's response slot.
    #[inline(always)]
    pub(super) fn response(&self, client: usize, slot: usize) -> Slot<'_, RESPONSE_PAYLOAD_AT> {
        self.responses.slot(client * self.resp_depth + slot)
    }

    /// The slot that a position is in.
    #[inline(always)]
    pub(super) fn request(&self, position: u64) -> Slot<'_, REQUEST_PAYLOAD_AT> {
        self.requests.slot(position as usize & (self.requests.count - 1))
    }
}

/// Slots of one size, one behind the other, each on lines of its own: words, then a payload.
#[derive(Clone, Debug)]
pub(super) struct Slots<const PAYLOAD_AT: usize> {
    first: NonNull<u8>,
    count: usize,
    stride: usize,
    /// Keeps `first` mapped.
    _segment: Arc<Segment>,
}

// SAFETY: `first` points into the segment, which is `Send`; what is there is reached through atomics and copies that
// tolerate races.
unsafe impl<const PAYLOAD_AT: usize> Send for Slots<PAYLOAD_AT> {}
// SAFETY: as above.
unsafe impl<const PAYLOAD_AT: usize> Sync for Slots<PAYLOAD_AT> {}

impl<const PAYLOAD_AT: usize> Slots<PAYLOAD_AT> {
    fn new(segment: &Arc<Segment>, at: u64, count: usize, stride: usize) -> Option<Self> {
        let first = segment.bytes(at, (count as u64).checked_mul(stride as u64)?)?;
        (stride > PAYLOAD_AT && first.cast::<[u64; 8]>().is_aligned()).then(|| Slots {
            first,
            count,
            stride,
            _segment: segment.clone(),
        })
    }

    /// One of them.
    #[inline(always)]
    pub(super) fn slot(&self, slot: usize) -> Slot<'_, PAYLOAD_AT> {
        assert!(slot < self.count);
        // SAFETY: inside the segment, which `self` keeps mapped.
        let at = unsafe { self.first.add(slot * self.stride) };
        Slot { at, room: self.stride - PAYLOAD_AT, of: PhantomData }
    }
}

/// A slot.
#[derive(Clone, Copy)]
pub(super) struct Slot<'s, const PAYLOAD_AT: usize> {
    /// The start of `PAYLOAD_AT + room` mapped bytes; on a line of its own.
    at: NonNull<u8>,
    room: usize,
    of: PhantomData<&'s Slots<PAYLOAD_AT>>,
}

impl<'s, const PAYLOAD_AT: usize> Slot<'s, PAYLOAD_AT> {
    /// Its first word.
    #[inline]
    pub(super) fn word(&self) -> &'s AtomicU64 {
        // SAFETY: mapped as long as `'s`, aligned; any bits are a word, and everybody reaches it atomically.
        unsafe { AtomicU64::from_ptr(self.at.cast().as_ptr()) }
    }

    /// Copies a payload in. Others may be doing the same if they break the rules.
    #[inline(always)]
    pub(super) fn put(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.room);
        // SAFETY: the payload's room is aligned to 8 and, as the slot and what is before it, a multiple of 8 long. `bytes`
        // is no part of the segment, of which no Rust reference to bytes exists.
        unsafe { copy_in(bytes, self.at.add(PAYLOAD_AT).as_ptr()) };
    }

    /// Copies a payload out.
    #[inline(always)]
    pub(super) fn get(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.room);
        // SAFETY: as in `put`.
        unsafe { copy_out(self.at.add(PAYLOAD_AT).as_ptr(), bytes) };
    }
}

impl<'s> Slot<'s, REQUEST_PAYLOAD_AT> {
    /// Its second word.
    #[inline]
    pub(super) fn second_word(&self) -> &'s AtomicU64 {
        // SAFETY: as in `word`; the payload begins behind 16 bytes.
        unsafe { AtomicU64::from_ptr(self.at.add(8).cast().as_ptr()) }
    }
}

/// First word of a request: the stamp that says it is there, and whose it is.
///
/// The stamp comes from the position, so it differs from the one that the slot had in the round before, and nobody has to
/// reset it.
#[inline]
pub(super) fn commit_word(position: u64, client: ClientKey) -> u64 {
    u64::from(client.bits()) << 32 | u64::from(stamp(position))
}

/// Whose the request is that a word commits, if it is the one of this position.
#[inline]
pub(super) fn committed(word: u64, position: u64) -> Option<ClientKey> {
    (word as u32 == stamp(position)).then(|| ClientKey::from_bits((word >> 32) as u32))
}

#[inline]
fn stamp(position: u64) -> u32 {
    (position as u32).wrapping_add(1)
}

/// Names a response slot, and the call that an answer in it belongs to. Never zero in a connection's first two million
/// calls, by which time every slot that starts as zeros and has index zero was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResponseKey(u32);

impl ResponseKey {
    const SLOT_BITS: u32 = 11;

    #[inline]
    pub(super) fn new(slot: usize, call: CallNumber) -> ResponseKey {
        debug_assert!(slot < 1 << Self::SLOT_BITS);
        ResponseKey(call.get() << Self::SLOT_BITS | slot as u32)
    }

    /// Unchecked: as a client wrote it.
    #[inline]
    pub(super) fn slot(self) -> usize {
        (self.0 & ((1 << Self::SLOT_BITS) - 1)) as usize
    }

    /// With a length: the second word of a request, and the word of an answer.
    #[inline]
    pub(super) fn word(self, len: usize) -> u64 {
        (len as u64) << 32 | u64::from(self.0)
    }

    /// Key and length of a word.
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

    const GOOD: Shape =
        Shape { max_clients: 2, queue_depth: 2, ring_depth: 4, request_limit: 8, response_limit: 8 };

    #[test]
    fn small_calls_take_one_line_each_way() {
        let shape = Shape { request_limit: 48, response_limit: 56, ..GOOD };
        assert_eq!((shape.request_stride(), shape.response_stride()), (64, 64));
        let shape = Shape { request_limit: 49, response_limit: 57, ..GOOD };
        assert_eq!((shape.request_stride(), shape.response_stride()), (128, 128));
        // Two clients with four response slots each.
        assert_eq!(GOOD.bytes(), 256 + 4 * 64 + 8 * 64 + 2 * 128);
    }

    #[test]
    fn shapes_that_make_no_sense_open_nothing() {
        let map = Map::create(GOOD).unwrap();
        let file = || map.segment.fd().try_clone_to_owned().unwrap();
        for bad in [
            Shape { max_clients: 0, ..GOOD },
            Shape { max_clients: u32::MAX, ..GOOD },
            Shape { queue_depth: 0, ..GOOD },
            Shape { queue_depth: MAX_QUEUE_DEPTH as u32 + 1, ..GOOD },
            Shape { ring_depth: 3, ..GOOD },
            Shape { ring_depth: u32::MAX, ..GOOD },
            Shape { request_limit: u32::MAX, ..GOOD },
            Shape { response_limit: MAX_MESSAGE as u32 + 1, ..GOOD },
        ] {
            assert!(Map::open(file(), bad).unwrap().is_none(), "{bad:?}");
        }
        // The segment has another size.
        assert!(Map::open(file(), Shape { ring_depth: 8, ..GOOD }).is_err());
        assert!(Map::open(file(), GOOD).unwrap().is_some());
        map.top.server_alive.store(0, Relaxed);
        assert!(Map::open(file(), GOOD).unwrap().is_none());
    }

    #[test]
    fn stamps_differ_from_round_to_round() {
        let key = ClientKey::first(3);
        for position in [0, 1, 7, u64::from(u32::MAX) - 1, u64::from(u32::MAX), u64::MAX] {
            let word = commit_word(position, key);
            assert_eq!(committed(word, position), Some(key));
            assert_eq!(committed(word, position.wrapping_add(GOOD.ring_depth.into())), None);
        }
        assert_eq!(committed(0, 0), None);
    }
}
