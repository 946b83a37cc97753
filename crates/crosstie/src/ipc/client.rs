//! The side that asks.

use std::io;
use std::os::fd::OwnedFd;

use crosstie_protocol::lane::CallNumber;
use zerocopy::FromBytes;

use super::CallError;
use super::lane::{Board, Lane, MAGIC, Shape, Slot, VERSION, length};
use crate::message::Message;
use crate::neighbor::bell::Bell;
use crate::neighbor::caller::{self, Caller, Limits};
use crate::neighbor::member::Member;
use crate::ring::lane;
use crate::ring::outstanding::Begun;

/// Answers whose slots are fetched together, if the first of them is there.
const FETCHED: usize = 16;

/// Calls a server. `Token` is whatever the caller wants to have back with each answer. See the [module](super), and [`Caller`]
/// for what it does.
pub type Client<Req, Resp, Token = ()> = Caller<Line, Req, Resp, Token>;

/// The connection.
pub struct Line {
    lane: Lane,
    board: Board,
    member: Member,
    shape: Shape,
}

impl caller::Line for Line {
    const KIND: &str = super::KIND;
    const MAGIC: u64 = MAGIC;
    const VERSION: u32 = VERSION;
    const LOOKS_AT_FIRST: u32 = 64;
    /// A lane has a slot for each call.
    type Place = ();

    fn open(member: Member, reply: &[u8], files: Vec<OwnedFd>) -> io::Result<Option<Line>> {
        let (Ok(shape), Ok([lane, board])) = (Shape::read_from_bytes(reply), <[_; 2]>::try_from(files))
        else {
            return Ok(None);
        };
        let Some(lane) = Lane::open(lane, &shape)? else { return Ok(None) };
        member.ring_when_gone(lane.bell().clone());
        Ok(Some(Line { lane, board: Board::open(board)?, member, shape }))
    }

    fn limits(&self) -> Limits {
        Limits {
            queue_depth: self.shape.queue_depth as usize,
            request_limit: self.shape.request_limit as usize,
            response_limit: self.shape.response_limit as usize,
        }
    }

    #[inline(always)]
    fn member(&self) -> &Member {
        &self.member
    }

    #[inline(always)]
    fn bell(&self) -> &Bell {
        self.lane.bell()
    }

    #[inline(always)]
    fn reserve(&mut self) -> Option<()> {
        Some(())
    }

    #[inline(always)]
    fn publish(&self, (): (), begun: Begun, bytes: &[u8]) {
        let slot = self.lane.slot(begun.slot);
        slot.put(bytes);
        self.announce(slot, begun, bytes.len());
    }

    #[inline(always)]
    fn answered(&self, slot: usize, call: CallNumber) -> Option<usize> {
        lane::answered(self.lane.slot(slot).word(), call)
    }

    #[inline(always)]
    fn get(&self, slot: usize, place: &mut [u8]) {
        self.lane.slot(slot).get(place);
    }

    #[inline(always)]
    fn fetch(&self, slot: usize, count: usize) {
        self.lane.fetch(slot, count.min(FETCHED));
    }
}

impl<Resp: Message + ?Sized, Token> Client<[u8], Resp, Token> {
    /// As [`call`](Client::call), with a request whose bytes are in several places: one after the other they are the request.
    #[inline]
    pub fn call_parts(&mut self, parts: &[&[u8]], token: Token) -> Result<(), CallError<Token>> {
        let len = length(parts);
        let ((), begun) = self.admit(len, token)?;
        let slot = self.line.lane.slot(begun.slot);
        slot.put_parts(parts);
        self.line.announce(slot, begun, len);
        Ok(())
    }
}

impl Line {
    #[inline(always)]
    fn announce(&self, slot: Slot<'_>, begun: Begun, len: usize) {
        lane::request(slot.word(), begun, len);
        self.board.bell().ring();
    }
}

#[cfg(all(test, not(loom)))]
impl Line {
    /// All that is shared with the server.
    pub(super) fn segments(&self) -> [&crate::memory::segment::Segment; 2] {
        [self.lane.segment(), self.board.segment()]
    }
}
