//! The client: a [`Caller`] whose transport is a lane.

use std::io;

use crosstie_protocol::lane::CallNumber;
use zerocopy::FromBytes;

use super::CallError;
use super::lane::{Lane, LaneLayout, MAGIC, ServerPage, Slot, VERSION, parts_len};
use crate::local::connection::Connection;
use crate::local::socket::ReceivedFile;
use crate::local_rpc::caller::Caller;
use crate::local_rpc::transport::{Limits, Transport};
use crate::message::Message;
use crate::ring::call_table::StartedCall;
use crate::ring::lane;
use crate::wait::Parker;

/// Most responses whose slots are prefetched together.
const MAX_PREFETCH: usize = 16;

/// Calls a server. `Token` is any value that the program wants to get back with the response to a call. See [`Caller`] for
/// the methods, and the [module](super) for the promises.
pub type Client<Req, Resp, Token = ()> = Caller<LaneTransport, Req, Resp, Token>;

/// The mapped memory of a connection: the client's own lane, and the page that it shares with the other clients.
pub struct LaneTransport {
    lane: Lane,
    server_page: ServerPage,
    connection: Connection,
    layout: LaneLayout,
}

impl Transport for LaneTransport {
    const KIND: &str = super::KIND;
    const MAGIC: u64 = MAGIC;
    const VERSION: u32 = VERSION;
    const EXPECTED_ONLY_CHECKS: u32 = 64;
    /// Nothing to reserve: the lane has a slot for each call.
    type Reservation = ();

    fn open(
        connection: Connection,
        reply: &[u8],
        files: Vec<ReceivedFile>,
    ) -> io::Result<Option<LaneTransport>> {
        let (Ok(layout), Ok([lane, server_page])) =
            (LaneLayout::read_from_bytes(reply), <[_; 2]>::try_from(files))
        else {
            return Ok(None);
        };
        let Some(lane) = Lane::open(lane, &layout)? else { return Ok(None) };
        connection.notify_when_closed(lane.parker().clone());
        Ok(Some(LaneTransport { lane, server_page: ServerPage::open(server_page)?, connection, layout }))
    }

    fn limits(&self) -> Limits {
        Limits {
            queue_depth: self.layout.queue_depth as usize,
            request_limit: self.layout.request_limit as usize,
            response_limit: self.layout.response_limit as usize,
        }
    }

    #[inline]
    fn connection(&self) -> &Connection {
        &self.connection
    }

    #[inline]
    fn parker(&self) -> &Parker {
        self.lane.parker()
    }

    #[inline]
    fn reserve(&mut self) -> Option<()> {
        Some(())
    }

    #[inline]
    fn publish(&self, (): (), started: StartedCall, bytes: &[u8]) {
        let slot = self.lane.slot(started.slot);
        slot.write(bytes);
        self.publish_request(slot, started, bytes.len());
    }

    #[inline]
    fn demote_request(&self, slot: usize) {
        self.lane.demote(slot);
    }

    #[inline]
    fn response(
        &self,
        slot: usize,
        call: CallNumber,
        size: Option<usize>,
    ) -> Option<(usize, impl FnOnce(&mut [u8]))> {
        let slot = self.lane.slot(slot);
        let len = lane::response_len(slot.word(), call, size)?;
        Some((len, move |buffer: &mut [u8]| slot.read(buffer)))
    }

    #[inline]
    fn prefetch_responses(&self, slot: usize, count: usize) {
        self.lane.prefetch(slot, count.min(MAX_PREFETCH));
    }
}

impl<Resp: Message + ?Sized, Token> Client<[u8], Resp, Token> {
    /// As [`call`](Client::call), with a request that is given in several parts, which are concatenated.
    #[inline]
    pub fn call_parts(&mut self, parts: &[&[u8]], token: Token) -> Result<(), CallError<Token>> {
        let len = parts_len(parts);
        let ((), started) = self.start_call(len, token)?;
        let slot = self.transport.lane.slot(started.slot);
        slot.write_parts(parts);
        self.transport.publish_request(slot, started, len);
        self.demote_request(started);
        Ok(())
    }
}

impl LaneTransport {
    #[inline]
    fn publish_request(&self, slot: Slot<'_>, started: StartedCall, len: usize) {
        lane::publish_request(slot.word(), started, len);
        self.server_page.parker().notify();
    }
}

#[cfg(all(test, not(loom)))]
impl LaneTransport {
    /// All segments that are shared with the server.
    pub(super) fn segments(&self) -> [&crate::memory::segment::Segment; 2] {
        [self.lane.segment(), self.server_page.segment()]
    }
}
