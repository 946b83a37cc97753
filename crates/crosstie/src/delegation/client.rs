//! The side that asks.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::io;
use std::os::fd::OwnedFd;

use crosstie_protocol::lane::CallNumber;
use zerocopy::FromBytes;

use super::layout::{
    ClientKey, MAGIC, Map, RESPONSE_PAYLOAD_AT, ResponseKey, Slot, VERSION, Welcome, commit_word,
};
use crate::local::connection::Connection;
use crate::local_rpc::caller::Caller;
use crate::local_rpc::transport::{Limits, Transport};
use crate::memory::prefetch;
use crate::memory::segment::SharedRef;
use crate::ring::call_table::StartedCall;
use crate::ring::reservation;
use crate::wait::Parker;

/// How far ahead of the request that is written its successors' lines are fetched, if we are the only client: that many
/// are on their way while the caller goes on. Far enough from where the server looks.
const REQUESTS_AHEAD: u64 = 8;

/// Calls a server. `Token` is whatever the caller wants to have back with each answer. See the [module](super), and [`Caller`]
/// for what it does.
pub type Client<Req, Resp, Token = ()> = Caller<RingTransport, Req, Resp, Token>;

/// The connection.
pub struct RingTransport {
    pub(super) map: Map,
    connection: Connection,
    key: ClientKey,
    claim: SharedRef<AtomicU64>,
    parker: SharedRef<Parker>,
    /// What `tail` was when last looked at: it is read again only when this says full.
    seen_tail: u64,
}

impl Transport for RingTransport {
    const KIND: &str = super::KIND;
    const MAGIC: u64 = MAGIC;
    const VERSION: u32 = VERSION;
    const EXPECTED_ONLY_CHECKS: u32 = 32;
    /// A position in the ring. Everybody else's requests queue behind it.
    type Reservation = u64;

    fn open(connection: Connection, reply: &[u8], files: Vec<OwnedFd>) -> io::Result<Option<RingTransport>> {
        let (Ok(Welcome { shape, key }), Ok([file])) =
            (Welcome::read_from_bytes(reply), <[_; 1]>::try_from(files))
        else {
            return Ok(None);
        };
        let key = ClientKey::from_bits(key);
        let Some(map) = Map::open(file, shape)? else { return Ok(None) };
        let lines = if key.index() < shape.max_clients { map.lines_of(key) } else { None };
        let Some((claim, parker)) = lines else { return Ok(None) };
        connection.notify_when_closed(parker.clone());
        Ok(Some(RingTransport { claim, parker, seen_tail: map.top.tail.load(Acquire), map, connection, key }))
    }

    fn limits(&self) -> Limits {
        Limits {
            queue_depth: self.map.shape.queue_depth as usize,
            request_limit: self.map.shape.request_limit as usize,
            response_limit: self.map.shape.response_limit as usize,
        }
    }

    #[inline(always)]
    fn connection(&self) -> &Connection {
        &self.connection
    }

    #[inline(always)]
    fn parker(&self) -> &Parker {
        &self.parker
    }

    #[inline(always)]
    fn reserve(&mut self) -> Option<u64> {
        let top = &self.map.top;
        let depth = u64::from(self.map.shape.ring_depth);
        let seen_tail = &mut self.seen_tail;
        let has_room = |position: u64| {
            reservation::has_room(position, *seen_tail, depth) || {
                // Acquire, partner: the Release store in `Core::publish_tail`. The slot has been read.
                *seen_tail = top.tail.load(Acquire);
                reservation::has_room(position, *seen_tail, depth)
            }
        };
        reservation::reserve(&top.head, &top.mode, &*self.claim, has_room)
    }

    #[inline(always)]
    fn publish(&self, position: u64, begun: StartedCall, bytes: &[u8]) {
        let slot = self.map.request(position);
        let response = ResponseKey::new(begun.slot, begun.call);
        slot.second_word().store(response.word(bytes.len()), Relaxed);
        slot.put(bytes);
        // Release, partner: the Acquire load in `Core::look`. The request is visible with it.
        slot.word().store(commit_word(position, self.key), Release);
        reservation::clear_claim(&*self.claim);
        // With others, it is as likely theirs.
        if self.map.top.mode.load(Relaxed) == reservation::EXCLUSIVE {
            prefetch::for_write(self.map.request(position.wrapping_add(REQUESTS_AHEAD)).word());
        }
        self.map.top.parker.notify();
    }

    #[inline(always)]
    fn response_len(&self, slot: usize, call: CallNumber) -> Option<usize> {
        // Acquire, partner: the Release store in `Core::reply`. The answer is visible with it.
        let word = self.answer(slot).word().load(Acquire);
        let (key, len) = ResponseKey::parse(word);
        (key == ResponseKey::new(slot, call)).then_some(len)
    }

    #[inline(always)]
    fn read_response(&self, slot: usize, buffer: &mut [u8]) {
        self.answer(slot).get(buffer);
    }
}

impl RingTransport {
    #[cfg(all(test, not(loom)))]
    pub(super) fn claim(&self) -> &AtomicU64 {
        &self.claim
    }

    #[inline(always)]
    fn answer(&self, slot: usize) -> Slot<'_, RESPONSE_PAYLOAD_AT> {
        self.map.response(self.key.index() as usize, slot)
    }
}
