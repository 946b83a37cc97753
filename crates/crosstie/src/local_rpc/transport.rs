//! What a kind of service provides to its [`Caller`](super::caller::Caller): where requests and responses are.

use std::io;

use crosstie_protocol::lane::CallNumber;

use crate::local::connection::Connection;
use crate::local::socket::ReceivedFile;
use crate::ring::call_table::StartedCall;
use crate::wait::Parker;

/// The shared memory between one client and its server, and how requests and responses pass through it.
pub trait Transport: Sized {
    /// Checks of the expected response before a wait checks all calls in flight. At most as many as the checks before a park.
    const EXPECTED_ONLY_CHECKS: u32;
    /// The kind of service: a part of its address.
    const KIND: &str;
    /// Magic number and version of the shared layout. Client and server compare them in the hello.
    const MAGIC: u64;
    const VERSION: u32;
    /// The right to write one request, see [`reserve`](Transport::reserve).
    type Reservation;

    /// Maps what the server handed over in the handshake. None if the reply or the segments are invalid.
    fn open(connection: Connection, reply: &[u8], files: Vec<ReceivedFile>) -> io::Result<Option<Self>>;
    fn limits(&self) -> Limits;
    fn connection(&self) -> &Connection;
    /// The client's parker. It is notified with each response, and when the connection is closed.
    fn parker(&self) -> &Parker;
    /// Reserves the space for a request, which [`publish`](Transport::publish) must fill at once. None if the requests of
    /// all clients together fill a shared ring.
    fn reserve(&mut self) -> Option<Self::Reservation>;
    /// Writes a request and makes it visible to the server.
    fn publish(&self, reservation: Self::Reservation, started: StartedCall, bytes: &[u8]);
    /// Moves the cache line of a request that was published towards the caches that all cores share, where that helps the server.
    #[inline]
    fn demote_request(&self, _slot: usize) {}
    /// The response to this call, if it is there: its length, and a function that copies it out. The length is not validated:
    /// any process that maps the memory may have written it. `size`: the length of all valid responses, if they have the same.
    fn response(
        &self,
        slot: usize,
        call: CallNumber,
        size: Option<usize>,
    ) -> Option<(usize, impl FnOnce(&mut [u8]))>;
    /// Whether the response to this call is there.
    #[inline]
    fn has_response(&self, slot: usize, call: CallNumber) -> bool {
        self.response(slot, call, None).is_some()
    }
    /// Prefetches the response in this slot, which is there, and those in up to `count` slots from it, which the caller is
    /// about to read.
    #[inline]
    fn prefetch_responses(&self, _slot: usize, _count: usize) {}
}

/// The limits that a server has announced.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub queue_depth: usize,
    pub request_limit: usize,
    pub response_limit: usize,
}
