//! The connection to one other member: an RC queue pair, its receives, and what waits for room in its send queue.
//!
//! ```text
//!   receives: slots of SLOT bytes      | header 32 | body up to 2048 |     SEND
//!   immediates without bytes           barrier arrive and release          WRITE with immediate, zero bytes
//!   packets in the completion          lock packets, where the device      WRITE with immediate, header and body
//!                                      has completions with data
//! ```

use std::collections::VecDeque;

use crosstie_protocol::group::{Control, HEADER_SIZE, MAX_MTU, MemberId, PACKET_IMMEDIATE};
use crosstie_protocol::signaling::Signaling;

use super::config::limits::{CONTROL_RESERVE, SEND_QUEUE};
use crate::device::{
    Data, Mr, OutOfRegion, PostError, Posted, QpState, RcQp, RecvWr, RemoteMemory, SendOp, SendWr,
};

/// Bytes of a receive: a packet, rounded up to whole cache lines.
pub(super) const SLOT: usize = (HEADER_SIZE + MAX_MTU).next_multiple_of(64);
/// One request in this many is signaled, so that the send queue becomes free.
const SIGNAL_INTERVAL: u32 = 32;

const _: () = assert!(SEND_QUEUE >= Signaling::<SIGNAL_INTERVAL>::MIN_DEPTH);

/// Which requests a completion of the send queue stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SendKey {
    /// The member, or [`SendKey::DATAGRAM`].
    pub(super) member: u16,
    /// The staging slot that becomes free, plus one; or 0.
    pub(super) slot: u16,
    /// How many requests were posted up to this one.
    pub(super) posted: u32,
}

impl SendKey {
    pub(super) const DATAGRAM: u16 = u16::MAX;

    pub(super) fn encode(self) -> u64 {
        u64::from(self.member) << 48 | u64::from(self.slot) << 32 | u64::from(self.posted)
    }

    pub(super) fn decode(wr_id: u64) -> SendKey {
        SendKey { member: (wr_id >> 48) as u16, slot: (wr_id >> 32) as u16, posted: wr_id as u32 }
    }
}

/// Counts the requests that are in a send queue: not those that the device executes while they are posted.
#[derive(Debug, Default)]
pub(super) struct SendQueue {
    posted: u32,
    done: u32,
    signaling: Signaling<SIGNAL_INTERVAL>,
    /// The next request is signaled, so that its end is known.
    signal_next: bool,
}

impl SendQueue {
    /// Requests that can be posted.
    #[inline]
    pub(super) fn room(&self) -> u32 {
        SEND_QUEUE - self.posted.wrapping_sub(self.done)
    }

    /// Whether all requests are known to be done.
    pub(super) fn is_empty(&self) -> bool {
        self.posted == self.done
    }

    /// Lets the next request be signaled: when it is done, all before it are.
    pub(super) fn signal_next(&mut self) {
        self.signal_next = true;
    }

    /// Whether the completion queue should be polled to find out what is done.
    #[inline]
    pub(super) fn is_half_full(&self) -> bool {
        self.room() < SEND_QUEUE / 2
    }

    /// Posts a request with `post`. `slot`: the staging slot that holds its bytes, which is free again if the device has executed it.
    #[inline]
    pub(super) fn post(
        &mut self,
        op: SendOp,
        data: Data<'_>,
        member: u16,
        slot: Option<u16>,
        post: impl FnOnce(&SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<Posted, PostError> {
        if self.room() == 0 {
            return Err(PostError::Full);
        }
        let next = self.posted.wrapping_add(1);
        let key = SendKey { member, slot: slot.map_or(0, |slot| slot + 1), posted: next };
        let is_signaled = slot.is_some() || self.signal_next || self.signaling.is_due();
        let wr = SendWr::new(key.encode(), op, data);
        let posted = post(&if is_signaled { wr.signaled_if_queued() } else { wr })?;
        self.signal_next = false;
        if posted == Posted::Queued {
            self.posted = next;
            self.signaling.count_post(is_signaled);
        }
        Ok(posted)
    }

    pub(super) fn complete(&mut self, posted: u32) {
        // Completions of one queue pair come in order.
        if posted.wrapping_sub(self.done) <= self.posted.wrapping_sub(self.done) {
            self.done = posted;
        }
    }
}

/// The connection to one other member.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) qp: RcQp,
    pub(super) peer: MemberId,
    /// Receives, [`SLOT`] bytes each.
    pub(super) receives: Mr,
    /// Memory of the peer that nobody reads: for writes without bytes, and for those whose bytes come with the completion.
    target: RemoteMemory,
    /// Packets of at most this many bytes come with the completion.
    pub(super) completion_data: usize,
    pub(super) queue: SendQueue,
    pub(super) max_inline: usize,
    /// Lock and barrier packets that wait for room, with the view in which they were sent.
    pub(super) waiting: VecDeque<(u16, Control)>,
    /// Whether something was posted since the last probe.
    active: bool,
}

impl Link {
    pub(super) fn new(
        qp: RcQp,
        peer: MemberId,
        receives: Mr,
        target: RemoteMemory,
        max_inline: usize,
        completion_data: usize,
    ) -> Result<Link, PostError> {
        let mut link = Link {
            qp,
            peer,
            receives,
            target,
            completion_data: completion_data.min(target.len as usize).min(max_inline),
            queue: SendQueue::default(),
            max_inline,
            waiting: VecDeque::new(),
            active: false,
        };
        for slot in 0..link.receives.len() / SLOT {
            link.post_receive(slot)?;
        }
        Ok(link)
    }

    /// Posts the receive of a slot, again or for the first time.
    #[inline]
    pub(super) fn post_receive(&mut self, slot: usize) -> Result<(), PostError> {
        let wr_id = u64::from(self.peer.bits()) << 32 | slot as u64;
        let sge = self.receives.sge(slot * SLOT..(slot + 1) * SLOT);
        let sge = sge.map_err(|OutOfRegion { .. }| PostError::Invalid("no such receive slot"))?;
        self.qp.post_recv(&RecvWr { wr_id, sges: &[sge] })
    }

    /// Whether there is room for a message packet. A part of the send queue is kept for locks and barriers.
    #[inline]
    pub(super) fn has_room_for_data(&self) -> bool {
        self.queue.room() > CONTROL_RESERVE
    }

    /// Posts a packet. `slot`: the staging slot that holds its bytes.
    #[inline]
    pub(super) fn post(&mut self, data: Data<'_>, slot: Option<u16>) -> Result<Posted, PostError> {
        self.post_request(SendOp::Send, data, slot)
    }

    /// Posts a packet that is an immediate.
    #[inline]
    pub(super) fn post_immediate(&mut self, immediate: u32) -> Result<Posted, PostError> {
        self.post_request(SendOp::WriteImm(self.target.at(0), immediate), Data::Inline(&[]), None)
    }

    /// Posts a packet that comes with the completion: the receiver reads no memory for it, and the sender need not look where its bytes go.
    #[inline]
    pub(super) fn post_in_completion(&mut self, packet: &[u8]) -> Result<Posted, PostError> {
        self.post_request(SendOp::WriteImm(self.target.at(0), PACKET_IMMEDIATE), Data::Inline(packet), None)
    }

    #[inline]
    fn post_request(&mut self, op: SendOp, data: Data<'_>, slot: Option<u16>) -> Result<Posted, PostError> {
        let posted = self.queue.post(op, data, self.peer.bits(), slot, |wr| self.qp.post(wr))?;
        self.active = true;
        Ok(posted)
    }

    /// Keeps a packet until there is room. Of several questions about one object, one is enough.
    #[cold]
    pub(super) fn wait_for_room(&mut self, view: u16, packet: &Control) {
        let is_asked = |(_, waiting): &(u16, Control)| waiting == packet;
        if !matches!(packet, Control::StatusRequest { .. }) || !self.waiting.iter().any(is_asked) {
            self.waiting.push_back((view, *packet));
        }
    }

    /// Whether the queue pair has failed.
    pub(super) fn is_broken(&self) -> bool {
        self.qp.state() == QpState::Error
    }

    /// Writes nothing to a peer to which nothing was sent since the last probe: on a network this finds out that it is dead.
    pub(super) fn probe(&mut self) -> Result<(), PostError> {
        if !core::mem::take(&mut self.active) && self.has_room_for_data() {
            self.post_request(SendOp::Write(self.target.at(0)), Data::Inline(&[]), None)?;
            self.active = false;
        }
        Ok(())
    }
}
