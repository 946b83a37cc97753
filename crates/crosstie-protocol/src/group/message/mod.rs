//! SEND/RECEIVE: messages from many senders at one receive port, in order for each sender (RHiNET §5).
//!
//! ```text
//!   sender                                                    receiver: four places for this sender
//!   send buffer  [1][2][3]            ── data 1 ──>           receive buffer [0][1][2][3]     expects 4
//!   limit: 4                          ── data 2 ──>
//!   messages from 4 on wait           ── data 3 ──>
//!                                     <── ack 4, limit 4 ──
//!                                     <── resume, limit 6 ──  the application has released two places
//!                                     ── data 4 ──>           receive buffer [4][5][2][3]
//!                                     ── data 5 ──>
//! ```
//!
//! A sender that sends more than there is room for is refused (NACK), and sends everything from the refused packet on again.
//!
//! A [`Channel`] deals with numbers and places only: the driver owns the bytes of both buffers, copies, posts and polls. It
//! promises, over a transport that may lose, duplicate and reorder packets:
//! - every packet of a live sender is accepted exactly once, in order for each sender;
//! - a sender keeps a packet until it is acknowledged, never has more in flight than its window, and never sends more than the receiver has
//!   room for;
//! - each pair of members has a share of both buffers: a member that does not answer, or does not receive, holds up nobody else;
//! - over a transport that loses packets, everything ends: a packet is acknowledged, or its destination is reported as unreachable.
//!
//! Nothing allocates after [`Channel::new`]. Without loss a packet costs a table entry and a few words on each side.
//!
//! ```
//! use crosstie_protocol::group::message::{Channel, Options, Received};
//! use crosstie_protocol::group::{GroupId, MemberId};
//! let (a, b) = (MemberId::new(0), MemberId::new(1));
//! let group = GroupId { group: 7, epoch: 1 };
//! let mut sender = Channel::new(group, 5, a, 2, &Options::default())?;
//! let mut receiver = Channel::new(group, 5, b, 2, &Options::default())?;
//!
//! // The driver copies the message to `packet.offset` of the send buffer and posts header and body.
//! let (packet, transmit) = sender.sender.send(b, 64, Channel::WHOLE, 64, 0)?;
//! assert!(transmit);
//! let header = sender.data_header(&packet);
//! // The receiver stores it, and frees the place when the application has read it.
//! let Received::Data(verdict) = receiver.on_packet(&header, 64, 0)? else { unreachable!() };
//! # let crosstie_protocol::group::message::Verdict::Accepted { entry, .. } = verdict else { unreachable!() };
//! receiver.receiver.release(entry.number);
//! // When the driver has nothing else to do, it sends the acknowledgement.
//! let answer = receiver.receiver.next_answer(true).unwrap();
//! sender.on_packet(&receiver.answer_header(&answer), 0, 0)?;
//! assert!(sender.sender.is_idle());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod combined;
mod matching;
mod options;
mod parts;
mod receiver;
mod recovery;
mod round_trip;
mod sender;
mod tagged;

use thiserror::Error;

use super::GroupId;
use super::member::MemberId;
use super::packet::{Header, PacketKind, flags};

pub use combined::{
    COMBINED_MAX, COMBINED_PREFIX, InvalidCombined, Place, check_combined, encode_prefix, first_combined,
};
pub use matching::{ANY_TAG, Matched, Matcher, MatcherFull, PostedId};
pub use options::{OnGap, OnRefusal, Options, OptionsError};
pub use parts::{JoinError, Part, part_at, part_count, split};
pub use receiver::{Answer, Entry, NACK_GAP, NACK_MISSING, Next, ReceiveCounters, Receiver, Verdict};
pub use sender::{NotSent, Outgoing, SendCounters, SendRefusal, Sender};
pub use tagged::{Pulled, Rendezvous, TAG_SIZE, decode_tag};

/// What [`Channel::on_packet`] has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Received {
    /// A data packet, and what became of it.
    Data(Verdict),
    /// An answer: this many packets were newly acknowledged.
    Acked(u32),
}

/// A peer broke the rules of a channel. The driver ends the connection to this peer; other peers are not concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// An acknowledgement or refusal of a packet that was not sent.
    #[error(transparent)]
    NotSent(#[from] NotSent),
    /// Parts that do not make up a message.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A combined packet without valid messages.
    #[error(transparent)]
    Combined(#[from] InvalidCombined),
    /// A data packet that is longer than an MTU, or whose flags do not go together.
    #[error("invalid data packet of {len} bytes with flags {flags:#x}")]
    InvalidData {
        /// Bytes of the body.
        len: u32,
        /// The flags.
        flags: u8,
    },
    /// A packet that does not belong to a channel.
    #[error("a {} packet does not belong to a channel", .0.name())]
    WrongKind(PacketKind),
}

/// The position of a member among all members but `me`.
#[inline]
fn rank(me: MemberId, member: MemberId) -> u32 {
    (member.index() - usize::from(member > me)) as u32
}

/// One channel of one member: sending and receiving half.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Channel {
    group: GroupId,
    id: u16,
    me: MemberId,
    mtu: u32,
    /// The sending half.
    pub sender: Sender,
    /// The receiving half.
    pub receiver: Receiver,
}

impl Channel {
    /// The flags of a message that fits into one packet.
    pub const WHOLE: u8 = flags::FIRST | flags::LAST;

    /// Channel `id` of member `me` in a group of `members`.
    pub fn new(
        group: GroupId,
        id: u16,
        me: MemberId,
        members: usize,
        options: &Options,
    ) -> Result<Self, OptionsError> {
        options.check()?;
        Ok(Channel {
            group,
            id,
            me,
            mtu: options.mtu,
            sender: Sender::new(options, me, members),
            receiver: Receiver::new(options, me, members),
        })
    }

    /// The number of the channel.
    pub const fn id(&self) -> u16 {
        self.id
    }

    /// The header of a data packet. It acknowledges what came from its destination.
    #[inline]
    pub fn data_header(&mut self, packet: &Outgoing) -> Header {
        let ack = self.receiver.piggyback(packet.to);
        Header {
            group: self.group.group,
            epoch: self.group.epoch,
            sender: self.me,
            channel: self.id,
            kind: PacketKind::Data,
            flags: packet.flags,
            attempt: packet.attempt,
            seq: packet.seq,
            ack,
            aux: packet.aux,
        }
    }

    /// The header of an answer, which has no body.
    #[inline]
    pub fn answer_header(&self, answer: &Answer) -> Header {
        Header {
            group: self.group.group,
            epoch: self.group.epoch,
            sender: self.me,
            channel: self.id,
            kind: answer.kind,
            flags: answer.flags,
            attempt: answer.attempt,
            seq: answer.seq,
            ack: answer.ack,
            aux: answer.aux,
        }
    }

    /// Handles a packet that the [`Gate`](super::Gate) let through. Its body has `len` bytes. After [`Verdict::Accepted`], packets of the same sender that came early follow: [`Receiver::next_held`].
    #[inline]
    pub fn on_packet(&mut self, header: &Header, len: u32, now: u64) -> Result<Received, Violation> {
        if header.kind == PacketKind::Data {
            if len > self.mtu || !combined::are_valid(header.flags, len) {
                return Err(Violation::InvalidData { len, flags: header.flags });
            }
            self.sender.on_ack(header.sender, header.ack, now)?;
            return Ok(Received::Data(self.receiver.accept(header, len)?));
        }
        self.on_answer(header, now)
    }

    fn on_answer(&mut self, header: &Header, now: u64) -> Result<Received, Violation> {
        let (from, before) = (header.sender, self.sender.acked(header.sender));
        match header.kind {
            PacketKind::Ack | PacketKind::Resume => {
                self.sender.on_ack(from, header.ack, now)?;
                self.sender.on_limit(from, header.aux, now);
            }
            PacketKind::Nack if header.flags & NACK_MISSING != 0 => {
                self.sender.on_missing(from, header.ack, (header.seq, header.aux), header.attempt, now)?;
            }
            PacketKind::Nack => {
                let gap = header.flags & NACK_GAP != 0;
                self.sender.on_nack(from, header.seq, header.attempt, gap, now)?;
            }
            kind => return Err(Violation::WrongKind(kind)),
        }
        Ok(Received::Acked(self.sender.acked(from).wrapping_sub(before)))
    }

    /// Member `peer` is dead: drops what waits for it. Packets of it that were accepted stay with the application.
    pub fn drop_peer(&mut self, peer: MemberId) {
        self.sender.drop_destination(peer);
        self.receiver.drop_source(peer);
    }
}

#[cfg(test)]
impl Channel {
    /// Turns one rule off.
    pub(super) fn break_rule(&mut self, rule: Option<super::tests::BrokenRule>) {
        self.sender.broken_rule = rule;
        self.receiver.broken_rule = rule;
    }

    /// For models: counts time from `now` on, and forgets the counters, so that states repeat.
    pub(super) fn rebase(&mut self, now: u64) {
        self.sender.rebase(now);
        self.receiver.forget_counters();
    }
}
