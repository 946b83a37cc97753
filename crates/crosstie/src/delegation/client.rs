//! The client: a [`Caller`] whose transport is the ring that all clients share.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::io;

use crosstie_protocol::lane::CallNumber;
use zerocopy::FromBytes;

use super::layout::{
    AcceptReply, ClientKey, MAGIC, RESPONSE_PAYLOAD_AT, ResponseKey, RingHeader, SharedRing, Slot, Slots,
    VERSION, commit_word,
};
use crate::local::connection::Connection;
use crate::local::socket::ReceivedFile;
use crate::local_rpc::caller::Caller;
use crate::local_rpc::transport::{Limits, Transport};
use crate::memory::prefetch;
use crate::memory::segment::SharedRef;
use crate::ring::call_table::StartedCall;
use crate::ring::reservation;
use crate::ring::stalled::MAX_ROUNDS;
use crate::wait::Parker;

/// How many positions after the request that it writes a client prefetches, if it is the only client. Far enough from the
/// position that the server checks.
const PREFETCH_DISTANCE: u64 = 8;

/// Calls a server. `Token` is any value that the program wants to get back with the response to a call. See [`Caller`] for
/// the methods, and the [module](super) for the promises.
pub type Client<Req, Resp, Token = ()> = Caller<RingTransport, Req, Resp, Token>;

/// The mapped ring, and the parts of it that belong to this client.
pub struct RingTransport {
    pub(super) ring: SharedRing,
    connection: Connection,
    pub(super) key: ClientKey,
    /// The response slots of this client.
    responses: Slots<RESPONSE_PAYLOAD_AT>,
    claim: SharedRef<AtomicU64>,
    parker: SharedRef<Parker>,
    /// The last value of `tail` that was read. `tail` is read again only when the ring seems full.
    seen_tail: u64,
}

impl Transport for RingTransport {
    const KIND: &str = super::KIND;
    const MAGIC: u64 = MAGIC;
    const VERSION: u32 = VERSION;
    const EXPECTED_ONLY_CHECKS: u32 = 32;
    /// A position in the ring. The requests of all other clients queue up behind it.
    type Reservation = u64;

    fn open(
        connection: Connection,
        reply: &[u8],
        files: Vec<ReceivedFile>,
    ) -> io::Result<Option<RingTransport>> {
        let (Ok(AcceptReply { layout, key }), Ok([file])) =
            (AcceptReply::read_from_bytes(reply), <[_; 1]>::try_from(files))
        else {
            return Ok(None);
        };
        let key = ClientKey::from_bits(key);
        let Some(ring) = SharedRing::open(file, layout)? else { return Ok(None) };
        let own = if key.index() < layout.max_clients { ring.client_area(key) } else { None };
        let responses = ring.responses_of(key.index() as usize);
        let (Some((claim, parker)), Some(responses)) = (own, responses) else { return Ok(None) };
        connection.notify_when_closed(parker.clone());
        let seen_tail = ring.header.tail.load(Acquire);
        Ok(Some(RingTransport { responses, claim, parker, seen_tail, ring, connection, key }))
    }

    fn limits(&self) -> Limits {
        Limits {
            queue_depth: self.ring.layout.queue_depth as usize,
            request_limit: self.ring.layout.request_limit as usize,
            response_limit: self.ring.layout.response_limit as usize,
        }
    }

    #[inline]
    fn connection(&self) -> &Connection {
        &self.connection
    }

    #[inline]
    fn parker(&self) -> &Parker {
        &self.parker
    }

    #[inline]
    fn reserve(&mut self) -> Option<u64> {
        let (header, claim): (&RingHeader, &AtomicU64) = (&self.ring.header, &self.claim);
        let depth = u64::from(self.ring.layout.ring_depth);
        let seen_tail = &mut self.seen_tail;
        let mut has_room = |position: u64| {
            reservation::has_room(position, *seen_tail, depth) || {
                // Acquire, partner: the Release store in `Core::publish_tail`. The server has read the slot.
                *seen_tail = header.tail.load(Acquire);
                reservation::has_room(position, *seen_tail, depth)
            }
        };
        for _ in 0..MAX_ROUNDS {
            let position = reservation::reserve(&header.head, &header.mode, claim, &mut has_room)?;
            if !header.stalled.contains(position, depth) {
                return Some(position);
            }
            // The server skips the position: nobody claims it, and it is not filled.
            reservation::clear_claim(claim);
        }
        // Another client has overwritten the list, or `tail`.
        None
    }

    #[inline]
    fn publish(&self, position: u64, started: StartedCall, bytes: &[u8]) {
        let header: &RingHeader = &self.ring.header;
        let slot = self.ring.request(position);
        let response = ResponseKey::new(started.slot, started.call);
        self.invalidate_equal_response(started, response);
        slot.second_word().store(response.word(bytes.len()), Relaxed);
        slot.write(bytes);
        // Release, partner: the Acquire load in `Core::committed_at`. The request becomes visible with it.
        slot.word().store(commit_word(position, self.key), Release);
        reservation::clear_claim(&*self.claim);
        // With several clients the position is likely to be another client's.
        if header.mode.load(Relaxed) == reservation::EXCLUSIVE {
            prefetch::for_write(self.ring.request(position.wrapping_add(PREFETCH_DISTANCE)).word());
        }
        header.parker.notify();
    }

    #[inline]
    fn response(
        &self,
        slot: usize,
        call: CallNumber,
        size: Option<usize>,
    ) -> Option<(usize, impl FnOnce(&mut [u8]))> {
        let expected = ResponseKey::new(slot, call);
        let slot = self.response_slot(slot);
        // Acquire, partner: the Release store in `Request::reply`. The response becomes visible with it.
        let word = slot.word().load(Acquire);
        let len = match size {
            // One comparison for the call and the length.
            Some(size) if word == expected.word(size) => size,
            _ => match ResponseKey::parse(word) {
                (key, len) if key == expected => len,
                _ => return None,
            },
        };
        Some((len, move |buffer: &mut [u8]| slot.read(buffer)))
    }
}

impl RingTransport {
    #[cfg(all(test, not(loom)))]
    pub(super) fn claim(&self) -> &AtomicU64 {
        &self.claim
    }

    /// Invalidates a response slot that still has the response to an earlier call with the same key. The key keeps 21 bits of
    /// the call number, so a slot that is used again after a multiple of 2^21 calls gets the same key, and the old response
    /// would be taken for the new one. The slot is ours here: its last call has its response, and the server does not know
    /// of the next one yet.
    ///
    /// The slot itself is not read: that would take its cache line from the server.
    #[inline]
    fn invalidate_equal_response(&self, started: StartedCall, key: ResponseKey) {
        if ResponseKey::are_equal(started.previous, started.call) {
            // The commit of the request, a Release store, orders this store before the server's next store to the word.
            self.response_slot(started.slot).word().store(key.other().word(0), Relaxed);
        }
    }

    #[inline]
    fn response_slot(&self, slot: usize) -> Slot<'_, RESPONSE_PAYLOAD_AT> {
        self.responses.masked(slot)
    }
}
