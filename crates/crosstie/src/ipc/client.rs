//! The side that asks.

use std::io;
use std::os::fd::OwnedFd;

use crosstie_protocol::lane::CallNumber;
use zerocopy::FromBytes;

use super::CallError;
use super::lane::{Lane, MAGIC, ServerPage, Shape, Slot, VERSION, length};
use crate::local::connection::Connection;
use crate::local_rpc::caller::Caller;
use crate::local_rpc::transport::{Limits, Transport};
use crate::message::Message;
use crate::ring::call_table::StartedCall;
use crate::ring::lane;
use crate::wait::Parker;

/// Answers whose slots are fetched together, if the first of them is there.
const FETCHED: usize = 16;

/// Calls a server. `Token` is whatever the caller wants to have back with each answer. See the [module](super), and [`Caller`]
/// for what it does.
pub type Client<Req, Resp, Token = ()> = Caller<LaneTransport, Req, Resp, Token>;

/// The connection.
pub struct LaneTransport {
    lane: Lane,
    server_page: ServerPage,
    connection: Connection,
    shape: Shape,
}

impl Transport for LaneTransport {
    const KIND: &str = super::KIND;
    const MAGIC: u64 = MAGIC;
    const VERSION: u32 = VERSION;
    const EXPECTED_ONLY_CHECKS: u32 = 64;
    /// A lane has a slot for each call.
    type Reservation = ();

    fn open(connection: Connection, reply: &[u8], files: Vec<OwnedFd>) -> io::Result<Option<LaneTransport>> {
        let (Ok(shape), Ok([lane, server_page])) = (Shape::read_from_bytes(reply), <[_; 2]>::try_from(files))
        else {
            return Ok(None);
        };
        let Some(lane) = Lane::open(lane, &shape)? else { return Ok(None) };
        connection.notify_when_closed(lane.parker().clone());
        Ok(Some(LaneTransport { lane, server_page: ServerPage::open(server_page)?, connection, shape }))
    }

    fn limits(&self) -> Limits {
        Limits {
            queue_depth: self.shape.queue_depth as usize,
            request_limit: self.shape.request_limit as usize,
            response_limit: self.shape.response_limit as usize,
        }
    }

    #[inline(always)]
    fn connection(&self) -> &Connection {
        &self.connection
    }

    #[inline(always)]
    fn parker(&self) -> &Parker {
        self.lane.parker()
    }

    #[inline(always)]
    fn reserve(&mut self) -> Option<()> {
        Some(())
    }

    #[inline(always)]
    fn publish(&self, (): (), begun: StartedCall, bytes: &[u8]) {
        let slot = self.lane.slot(begun.slot);
        slot.put(bytes);
        self.announce(slot, begun, bytes.len());
    }

    #[inline(always)]
    fn response_len(&self, slot: usize, call: CallNumber) -> Option<usize> {
        lane::answered(self.lane.slot(slot).word(), call)
    }

    #[inline(always)]
    fn read_response(&self, slot: usize, buffer: &mut [u8]) {
        self.lane.slot(slot).get(buffer);
    }

    #[inline(always)]
    fn prefetch_responses(&self, slot: usize, count: usize) {
        self.lane.fetch(slot, count.min(FETCHED));
    }
}

impl<Resp: Message + ?Sized, Token> Client<[u8], Resp, Token> {
    /// As [`call`](Client::call), with a request whose bytes are in several places: one after the other they are the request.
    #[inline]
    pub fn call_parts(&mut self, parts: &[&[u8]], token: Token) -> Result<(), CallError<Token>> {
        let len = length(parts);
        let ((), begun) = self.start_call(len, token)?;
        let slot = self.transport.lane.slot(begun.slot);
        slot.put_parts(parts);
        self.transport.announce(slot, begun, len);
        Ok(())
    }
}

impl LaneTransport {
    #[inline(always)]
    fn announce(&self, slot: Slot<'_>, begun: StartedCall, len: usize) {
        lane::request(slot.word(), begun, len);
        self.server_page.parker().notify();
    }
}

#[cfg(all(test, not(loom)))]
impl LaneTransport {
    /// All that is shared with the server.
    pub(super) fn segments(&self) -> [&crate::memory::segment::Segment; 2] {
        [self.lane.segment(), self.server_page.segment()]
    }
}
