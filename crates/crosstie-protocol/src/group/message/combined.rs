//! Small messages that travel together in one packet. They share its header, its number, its receive and its acknowledgement.
//!
//! ```text
//!   body of a packet with the flag COMBINED
//!   0     2       3   4                4 + len
//!   +-----+-------+---+----------------+-----+-------+---+------------
//!   | len | flags | 0 | bytes          | len | flags | 0 | bytes ...
//!   +-----+-------+---+----------------+-----+-------+---+------------
//! ```
//!
//! `flags` are those of the message: TAGGED, RENDEZVOUS, FENCED, PULLED. The body has at least one message and ends with the last one.
//!
//! [`Sender::combine`] collects messages only while `combine_from` packets to their destination are not acknowledged: the receiver
//! has work, and a packet more would only wait there. Such a packet is *open* until it is transmitted:
//! - when no other message of the same size fits into it;
//! - when a message is added and fewer than `combine_from` packets before it are left;
//! - before a message that travels alone;
//! - in every pass of the driver: [`Sender::next_outgoing`] returns it.

use thiserror::Error;

use super::super::member::MemberId;
use super::super::packet::flags;
use super::sender::{Flow, NONE, Outgoing, SendRefusal, Sender, outgoing};

/// Bytes in front of each message of a combined packet.
pub const COMBINED_PREFIX: usize = 4;
/// Longest message that travels in a combined packet.
pub const COMBINED_MAX: usize = 256;

/// The flags that a message of a combined packet can have.
const MESSAGE_FLAGS: u8 = flags::TAGGED | flags::RENDEZVOUS | flags::FENCED | flags::PULLED;
/// The flags of a combined packet.
const PACKET_FLAGS: u8 = flags::COMBINED | flags::FIRST | flags::LAST;

/// The bytes in front of a message of a combined packet. `len` is at most [`COMBINED_MAX`].
#[inline]
pub fn encode_prefix(len: usize, message_flags: u8) -> [u8; COMBINED_PREFIX] {
    debug_assert!(len <= COMBINED_MAX && message_flags & !MESSAGE_FLAGS == 0);
    let len = (len as u16).to_le_bytes();
    [len[0], len[1], message_flags, 0]
}

/// The first message of the body of a combined packet: its flags, and its bytes. What follows it starts behind these bytes. `None`
/// if the body does not start with a message.
///
/// ```
/// use crosstie_protocol::group::message::{encode_prefix, first_combined};
/// let mut body = encode_prefix(3, 0).to_vec();
/// body.extend(b"abc");
/// assert_eq!(first_combined(&body), Some((0, &b"abc"[..])));
/// assert_eq!(first_combined(&body[..6]), None);
/// ```
#[inline]
pub fn first_combined(body: &[u8]) -> Option<(u8, &[u8])> {
    let (prefix, rest) = body.split_first_chunk::<COMBINED_PREFIX>()?;
    let len = usize::from(u16::from_le_bytes([prefix[0], prefix[1]]));
    if len > COMBINED_MAX || prefix[2] & !MESSAGE_FLAGS != 0 || prefix[3] != 0 {
        return None;
    }
    Some((prefix[2], rest.get(..len)?))
}

/// Checks the body of a combined packet. Returns how many messages it has.
#[inline]
pub fn check_combined(body: &[u8], max_message: u32) -> Result<u32, InvalidCombined> {
    let (mut at, mut count) = (0, 0);
    while at < body.len() || count == 0 {
        match body.get(at..).and_then(first_combined) {
            Some((_, bytes)) if bytes.len() <= max_message as usize => {
                at += COMBINED_PREFIX + bytes.len();
                count += 1;
            }
            _ => return Err(InvalidCombined { at: at as u32 }),
        }
    }
    Ok(count)
}

/// The body of a combined packet is not a sequence of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a packet has no valid message at byte {at}")]
pub struct InvalidCombined {
    /// Where in the body.
    pub at: u32,
}

/// Whether a data packet can have these flags and this length.
#[inline]
pub(super) fn are_valid(packet_flags: u8, len: u32) -> bool {
    packet_flags & flags::COMBINED == 0
        || (packet_flags & !flags::ACK_NOW == PACKET_FLAGS && len >= COMBINED_PREFIX as u32)
}

/// The place of a message in an open packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The packet's entry of the send table.
    pub entry: u64,
    /// The packet's number.
    pub seq: u32,
    /// Where in the send buffer the message's prefix belongs; its bytes follow.
    pub offset: u32,
    /// Call [`Sender::close_packet`] when the message is there.
    pub close: bool,
}

impl Sender {
    /// Gives a message of `len` bytes a place in the open packet to its destination, or opens one, which starts with `header` bytes for
    /// the caller. `None`: the message travels alone; the caller transmits the open packet ([`Sender::close_packet`]) before it.
    #[inline]
    pub fn combine(&mut self, to: MemberId, header: u32, len: u32) -> Result<Option<Place>, SendRefusal> {
        let destination = &self.destinations[to.index()];
        if destination.open == NONE && destination.in_flight < self.options.combine_from {
            return Ok(None);
        }
        self.combine_now(to, header, len)
    }

    fn combine_now(&mut self, to: MemberId, header: u32, len: u32) -> Result<Option<Place>, SendRefusal> {
        let size = COMBINED_PREFIX as u32 + len;
        let mtu = self.options.mtu;
        if len > COMBINED_MAX as u32 || 2 * size > mtu {
            return Ok(None);
        }
        let is_new = self.destinations[to.index()].open == NONE;
        if is_new {
            self.open_packet(to, header)?;
        }
        let destination = &mut self.destinations[to.index()];
        let record = &mut self.records[destination.open as usize];
        if record.aux + size > mtu {
            return Ok(None);
        }
        let offset = record.offset + record.len;
        record.len += size;
        record.aux += size;
        self.counters.combined += u64::from(!is_new);
        let close = record.aux + size > mtu || destination.in_flight <= self.options.combine_from;
        Ok(Some(Place { entry: record.entry, seq: record.seq, offset, close }))
    }

    fn open_packet(&mut self, to: MemberId, header: u32) -> Result<(), SendRefusal> {
        let index = self.register(to, header + self.options.mtu, PACKET_FLAGS, 0)?;
        self.records[index as usize].len = header;
        let destination = &mut self.destinations[to.index()];
        destination.open = index;
        if destination.resend == NONE {
            destination.resend = index;
        }
        // Every pass of the driver transmits it.
        self.list(to);
        Ok(())
    }

    /// No message joins the open packet to this destination any more. The caller transmits it now, if there is one and no other packet is
    /// to be transmitted before it.
    #[inline]
    pub fn close_packet(&mut self, to: MemberId, now: u64) -> Option<Outgoing> {
        let index = self.destinations[to.index()].open;
        if index == NONE {
            return None;
        }
        let destination = &mut self.destinations[to.index()];
        destination.open = NONE;
        if destination.flow != Flow::Open || destination.resend != index {
            return None;
        }
        destination.resend = NONE;
        let record = &mut self.records[index as usize];
        record.attempt = destination.attempt;
        record.posted = true;
        destination.round_trip.on_send(record.seq, now);
        Some(Outgoing { is_first: true, ..outgoing(to, destination.attempt, record) })
    }

    /// Whether a packet to this destination is open.
    #[inline]
    pub fn has_open_packet(&self, to: MemberId) -> bool {
        self.destinations[to.index()].open != NONE
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_of_a_body_survive_encoding(
            messages in prop::collection::vec((0u8..16, prop::collection::vec(any::<u8>(), 0..=COMBINED_MAX)), 1..20),
        ) {
            let mut body = Vec::new();
            for (kind, bytes) in &messages {
                body.extend(encode_prefix(bytes.len(), (kind << 3) & MESSAGE_FLAGS));
                body.extend(bytes);
            }
            prop_assert_eq!(check_combined(&body, COMBINED_MAX as u32), Ok(messages.len() as u32));
            let mut rest = &body[..];
            for (kind, bytes) in &messages {
                let (found_flags, found) = first_combined(rest).unwrap();
                prop_assert_eq!((found_flags, found), ((kind << 3) & MESSAGE_FLAGS, &bytes[..]));
                rest = &rest[COMBINED_PREFIX + bytes.len()..];
            }
            prop_assert!(rest.is_empty());
            // A message that is longer than the receiver allows.
            let longest = messages.iter().map(|(_, bytes)| bytes.len() as u32).max().unwrap();
            if let Some(limit) = longest.checked_sub(1) {
                prop_assert!(check_combined(&body, limit).is_err());
            }
        }

        #[test]
        fn any_body_is_a_sequence_of_messages_or_refused(
            body in prop::collection::vec(prop_oneof![Just(0u8), Just(8), 0u8..8, any::<u8>()], 0..200),
        ) {
            if let Ok(count) = check_combined(&body, u32::MAX) {
                let (mut at, mut found) = (0, 0);
                while at < body.len() {
                    let (message_flags, bytes) = first_combined(&body[at..]).unwrap();
                    prop_assert_eq!(&body[at..at + COMBINED_PREFIX], &encode_prefix(bytes.len(), message_flags)[..]);
                    at += COMBINED_PREFIX + bytes.len();
                    found += 1;
                }
                prop_assert!(found == count && found > 0);
            }
        }
    }

    #[test]
    fn forged_lengths_are_refused() {
        let valid = [2, 0, 0, 0, 7, 7];
        assert_eq!(check_combined(&valid, 256), Ok(1));
        for (body, at) in [
            (&[][..], 0),
            (&[0, 0, 0], 0),
            (&[2, 0, 0, 0, 7], 0),
            (&[0xff, 0xff, 0, 0, 7, 7], 0),
            (&[2, 0, 0, 1, 7, 7], 0),
            (&[2, 0, flags::FIRST, 0, 7, 7], 0),
            (&[2, 0, flags::COMBINED, 0, 7, 7], 0),
            (&[1, 0, 0, 0, 7, 7], 5),
            (&[2, 0, 0, 0, 7, 7, 1, 0, 0], 6),
            (&[2, 0, 0, 0, 7, 7, 1, 0, 0, 0], 6),
        ] {
            assert_eq!(check_combined(body, 256), Err(InvalidCombined { at }), "{body:?}");
        }
    }
}
