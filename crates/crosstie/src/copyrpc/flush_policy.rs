//! The flush policy: when a batch goes out, and in which form. Constants and pure decisions; nothing here posts anything.
//!
//! | rule | decision | reason |
//! | --- | --- | --- |
//! | signal | one WRITE in [`SIGNAL_INTERVAL`] asks for a completion | a completion costs more than a small WRITE |
//! | large batch | a batch of [`LARGE_BATCH`] messages goes at once | the peer works on it while this side writes more |
//! | last reply | a short reply to the last request without one goes at once, if nothing waits to be posted and it is not delayed | there is nothing that could join it |
//! | only call | a short call goes at once, if no other call of its connection is pending and nothing waits to be posted; one between two polls of its context | more calls may follow, but it is not known whether. A burst over many connections would need twice the receives |
//! | delay | a poll delays a small batch while the peer has not released earlier batches | a fast loop would send every message alone |
//! | compact | a message of up to 32 bytes that is alone goes with a head of 16 bytes | head and message fit into a completion |
//! | inline | a batch of up to [`MAX_INLINE_BATCH`] bytes is posted inline | the device need not fetch it from memory |
//! | direct | a payload of at least [`MIN_DIRECT_PAYLOAD`] bytes is posted from the caller's memory | saves the copy to the staging ring |
//!
//! Delay, exactly: a poll delays a batch if it has fewer than [`LARGE_BATCH`] messages, the peer has not released the
//! last [`BATCHES_AHEAD`] batches, and the batch is smaller than one [`SMALL_BATCH_DIVISOR`]th of what the peer has not
//! released. It does so for at most [`MAX_DELAYED_POLLS`] polls in a row, and not after [`MAX_DELAY`]. Neither `flush` nor `wait` delay
//! anything.
//!
//! `connection/posting.rs` applies these rules; [`receive_policy`](super::receive_policy) has those for what arrives. `docs/decisions/copyrpc.md` says why they are as they are.

use std::time::Duration;

use crosstie_protocol::copyrpc::Progress;
use crosstie_protocol::copyrpc::wire::{COMPACT_HEAD_SIZE, MAX_COMPACT_PAYLOAD};
use crosstie_protocol::signaling::Signaling;

/// One WRITE in this many asks for a completion, which says that all WRITEs up to it have left the send queue.
pub(super) const SIGNAL_INTERVAL: u32 = 64;
/// The WRITEs of a queue pair. Its other requests are signaled and stand for themselves.
pub(super) type WriteSignaling = Signaling<SIGNAL_INTERVAL>;
/// Work requests that a send queue takes. One half can be posted while the completion of the other half is awaited.
pub(super) const SEND_DEPTH: u32 = WriteSignaling::MIN_DEPTH;
/// A small batch is delayed only while the peer has not released this many earlier batches.
pub(super) const BATCHES_AHEAD: usize = 2;
/// A batch is small if its bytes, times this divisor, are fewer than the bytes that the peer has not released. Only small batches are
/// delayed. With a smaller divisor, larger batches would be delayed too: calls would be delayed and none would be answered
/// sooner. With a larger one, a loop that is faster than the round trip would continue to send every message alone.
const SMALL_BATCH_DIVISOR: u64 = 8;
/// The most polls that delay a small batch.
const MAX_DELAYED_POLLS: u32 = 16;
/// The longest time that a small batch is delayed. The first poll after it sends the batch.
pub(super) const MAX_DELAY: Duration = Duration::from_micros(50);
/// The longest batch that is posted inline.
pub(super) const MAX_INLINE_BATCH: usize = 220;
/// The longest compact batch.
pub(super) const MAX_COMPACT_BATCH: usize = COMPACT_HEAD_SIZE + MAX_COMPACT_PAYLOAD as usize;
/// The shortest payload that is posted directly, on a device that accepts inline data of this length. Such a payload gains little
/// from sharing a batch. Such a device copies all data while posting, so posting small batches inline gains nothing there.
const MIN_DIRECT_PAYLOAD: usize = 8 << 10;
/// A batch with this many messages goes out at once. If they are short, they fill a packet of 4 KiB.
pub(super) const LARGE_BATCH: u32 = 64;

/// When a message that was written should go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendTiming {
    Now,
    WithNextPoll,
    /// It was posted already.
    Sent,
}

/// The inline size to ask for when a queue pair is created. `device` is the most that the device offers.
pub(super) fn inline_limit(device: u32) -> u32 {
    if device as usize >= MIN_DIRECT_PAYLOAD { device } else { device.min(MAX_INLINE_BATCH as u32) }
}

/// Large batch: when a batch of `messages` goes out. `is_sealed`: a direct payload or the end of the ring has sealed it.
#[inline]
pub(super) fn send_timing(messages: u32, is_sealed: bool) -> SendTiming {
    if messages >= LARGE_BATCH || is_sealed { SendTiming::Now } else { SendTiming::WithNextPoll }
}

/// Last reply, only call: whether a message of `len` bytes may go alone.
#[inline]
pub(super) fn may_go_alone(len: usize) -> bool {
    len <= MAX_COMPACT_PAYLOAD as usize
}

/// Delay: whether a poll should delay the open batch. `oldest_end` is where the oldest of the last [`BATCHES_AHEAD`]
/// batches ended; `polls` have delayed this batch already.
#[inline]
pub(super) fn is_delayed(messages: u32, progress: Progress, oldest_end: u64, polls: u32) -> bool {
    let Progress { placed, posted, released } = progress;
    messages > 0
        && messages < LARGE_BATCH
        && released < oldest_end
        && SMALL_BATCH_DIVISOR * (placed - posted) < posted - released
        && polls < MAX_DELAYED_POLLS
}

/// Compact: whether a queue pair that takes `max_inline` sends compact batches.
pub(super) fn sends_compact(max_inline: usize) -> bool {
    max_inline >= MAX_COMPACT_BATCH
}

/// Inline: whether a batch of `len` bytes is posted inline on a queue pair that takes `max_inline`.
#[inline]
pub(super) fn is_inline_batch(len: usize, max_inline: usize) -> bool {
    len <= max_inline && max_inline < MIN_DIRECT_PAYLOAD
}

/// Direct: whether a payload of `len` bytes is posted directly on a queue pair that takes `max_inline`.
#[inline]
pub(super) fn is_direct_payload(len: usize, max_inline: usize) -> bool {
    len >= MIN_DIRECT_PAYLOAD && len <= max_inline
}
