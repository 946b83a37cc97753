//! What a channel of messages can be told to do differently, and the limits of its tables.

use thiserror::Error;

use super::super::Limits;
use super::super::packet::MAX_MTU;

/// What a sender does after its message was refused because the receiver has no room (RHiNET §5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnRefusal {
    /// Sends everything from the refused number on again, after a back-off time that doubles. Modified ACK/NACK as RHiNET
    /// describes it.
    Retry,
    /// Waits until the receiver asks for the refused message, because it has room again. The retry timer is the safety net for
    /// a lost request.
    WaitForRequest,
}

/// What happens when a packet was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnGap {
    /// The receiver keeps packets that come before a missing one, as long as half of its buffer is free, and names the missing
    /// numbers; the sender sends only those again.
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
    /// Bytes of the send buffer.
    pub send_buffer: u32,
    /// Entries of the send table: packets that are not acknowledged, to all destinations together.
    pub send_table: u32,
    /// Packets that are not acknowledged, for each destination.
    pub window: u32,
    /// Bytes of the receive buffer.
    pub receive_buffer: u32,
    /// Packets in the receive buffer.
    pub receive_table: u32,
    /// A receiver acknowledges at the latest after this many packets of one sender.
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
    /// Time without any acknowledgement after which packets are sent again. Doubles up to 16 times this time.
    pub resend_after: u64,
    /// Once round trips were measured, the oldest packet is sent again earlier: when an acknowledgement is late by their measure, but
    /// not before this time. `resend_after` or more: never earlier.
    pub min_resend_after: u64,
    /// Time without any acknowledgement, although packets were sent again, after which the peer counts as unreachable.
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
