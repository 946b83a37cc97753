//! What a channel of messages can be told to do differently, and the limits of its tables.

use thiserror::Error;

use super::super::Limits;
use super::super::member::MAX_MEMBERS;
use super::super::packet::{HEADER_SIZE, MAX_MTU};

/// What a sender does after its message was refused because the receiver has no room (RHiNET §5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnRefusal {
    /// Sends everything from the refused number on again, after a back-off time that doubles. Modified ACK/NACK as RHiNET
    /// describes it: it does not look at the credit of the receiver.
    Retry,
    /// Sends only what the receiver has room for (credit), so it is refused only by a receiver with less room than it assumes. Then it
    /// waits until the receiver has room again. Where packets get lost, `max_backoff` is the safety net for a lost answer.
    WaitForRequest,
}

/// What happens when a packet was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnGap {
    /// The receiver keeps packets that come before a missing one in their places, and names the missing numbers; the sender sends only
    /// those again.
    Selective,
    /// The receiver discards everything behind the missing packet, and the sender sends all of it again (RHiNET §5.4).
    GoBack,
}

/// Options of a channel. Times are in nanoseconds, or in whatever unit the driver's clock has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Longest body of a packet; longer messages are split.
    pub mtu: u32,
    /// Longest message.
    pub max_message: u32,
    /// Bytes of the send buffer. It has a place for a longest packet for each entry of the send table, and is divided equally between all
    /// destinations: none can take the room of another one. Each has room for at least one packet, also if the buffer grows by that.
    pub send_buffer: u32,
    /// Entries of the send table: packets that are not acknowledged, to all destinations together.
    pub send_table: u32,
    /// Packets that are not acknowledged, for each destination.
    pub window: u32,
    /// Bytes of the receive buffer. It is divided equally between all senders, as the send buffer between all destinations.
    pub receive_buffer: u32,
    /// Packets in the receive buffer.
    pub receive_table: u32,
    /// A receiver acknowledges at the latest after this many packets of one sender, or after half of the packets that it has room for.
    pub ack_every: u32,
    /// Small messages travel together while at least this many packets to their destination are not acknowledged. `window` or more:
    /// every message has its own packet.
    pub combine_from: u32,
    /// What a refused sender does.
    pub on_refusal: OnRefusal,
    /// What happens after a loss.
    pub on_gap: OnGap,
    /// First back-off after a refusal. Doubles with each further refusal of the same message.
    pub backoff: u64,
    /// Longest back-off.
    pub max_backoff: u64,
    /// Time without any acknowledgement after which packets are sent again. Doubles up to 16 times this time. `u64::MAX`: never, for
    /// transports that lose nothing. Then nothing is sent again but what was refused.
    pub resend_after: u64,
    /// Once round trips were measured, the oldest packet is sent again earlier: when an acknowledgement is late by their measure, but
    /// not before this time. `resend_after` or more: never earlier.
    pub min_resend_after: u64,
    /// Time without any acknowledgement, although packets were sent again, after which the peer counts as unreachable. `u64::MAX`: never.
    pub give_up_after: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mtu: MAX_MTU as u32,
            max_message: 64 << 20,
            send_buffer: 1 << 20,
            send_table: 1024,
            window: 64,
            receive_buffer: 1 << 20,
            receive_table: 1024,
            ack_every: 16,
            combine_from: 8,
            on_refusal: OnRefusal::WaitForRequest,
            on_gap: OnGap::Selective,
            backoff: 10_000,
            max_backoff: 1_000_000,
            resend_after: 200_000,
            min_resend_after: u64::MAX,
            give_up_after: 10_000_000_000,
        }
    }
}

impl Options {
    /// Other members of a group: what the buffers are divided between.
    pub(super) fn peers(members: usize) -> u32 {
        members.clamp(2, MAX_MEMBERS) as u32 - 1
    }

    /// Bytes of a place in the send buffer: the longest packet.
    pub(super) fn send_place(&self) -> u32 {
        HEADER_SIZE as u32 + self.mtu
    }

    /// Places in the send buffer for each destination.
    pub(super) fn send_share(&self, members: usize) -> u32 {
        let places = self.send_table.min(self.send_buffer / self.send_place());
        (places / Self::peers(members)).clamp(1, self.window)
    }

    /// Places in the receive buffer for each sender.
    pub(super) fn receive_share(&self, members: usize) -> u32 {
        let places = self.receive_table.min(self.receive_buffer / self.mtu);
        (places / Self::peers(members)).max(1)
    }

    /// Bytes that a driver needs for the send buffer of a channel.
    pub fn send_bytes(&self, members: usize) -> usize {
        (Self::peers(members) * self.send_share(members)) as usize * self.send_place() as usize
    }

    /// Bytes that a driver needs for the receive buffer of a channel.
    pub fn receive_bytes(&self, members: usize) -> usize {
        (Self::peers(members) * self.receive_share(members)) as usize * self.mtu as usize
    }

    /// Whether packets may get lost, so that silence means something.
    pub(super) fn is_lossy(&self) -> bool {
        self.resend_after != u64::MAX
    }

    /// Checks all options against each other and against [`Limits`].
    pub fn check(&self) -> Result<(), OptionsError> {
        let table = 1..=Limits::MAX_TABLE as u32;
        let buffer = self.mtu..=Limits::MAX_BUFFER as u32;
        let checks = [
            ("mtu", (1..=MAX_MTU as u32).contains(&self.mtu)),
            ("max_message", (1..=Limits::MAX_MESSAGE as u32).contains(&self.max_message)),
            ("send_table", table.contains(&self.send_table)),
            ("receive_table", table.contains(&self.receive_table)),
            ("window", (1..=(Limits::MAX_TABLE as u32).min(self.send_table)).contains(&self.window)),
            ("send_buffer", buffer.contains(&self.send_buffer)),
            ("receive_buffer", buffer.contains(&self.receive_buffer)),
            ("ack_every", (1..=self.window).contains(&self.ack_every)),
            ("combine_from", self.combine_from > 0),
            ("backoff", self.backoff > 0),
            ("max_backoff", self.max_backoff >= self.backoff),
            ("resend_after", self.resend_after > 0),
            ("min_resend_after", self.min_resend_after > 0),
            ("give_up_after", self.give_up_after >= self.resend_after),
        ];
        match checks.into_iter().find(|(_, valid)| !valid) {
            Some((option, _)) => Err(OptionsError { option }),
            None => Ok(()),
        }
    }
}

/// An option of a channel is outside of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("option `{option}` of the message channel is outside of its limits")]
pub struct OptionsError {
    /// The field of [`Options`].
    pub option: &'static str,
}
