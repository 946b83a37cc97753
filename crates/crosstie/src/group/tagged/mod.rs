//! `isend` and `irecv` with tags (RHiNET §6): matched wholly at the receiver. Short messages travel with their bytes, long ones are
//! PULLed by the receiver out of the sender's buffer, without a copy.
//!
//! ```text
//!   isend ─ short ─> [outbox] ─ tag, bytes ──────────> match ─> copied into the receive's buffer
//!         ─ long ──> [outbox] ─ tag, key, region ────> match ─> PULL into the receive's buffer
//!                    send ends <──── key, result ───────────────┘
//! ```
//!
//! The thread that runs the engine matches messages and starts PULLs, so both go on while the application computes. Short messages
//! that have no receive yet are copied out of the receive buffer, up to a limit for each sender; beyond it they stay there, and only their sender
//! waits.

mod pull;
mod receive;
mod request;
#[cfg(all(test, not(loom)))]
mod room_tests;
mod send;
mod state;

use core::fmt;
use core::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::group::message::Options;
use crosstie_protocol::group::{Limits, MemberId, flags};

use self::request::SendState;
use super::Group;
use super::channel::{Parts, Source};
use super::driver::Shared;
use super::error::GroupError;
use super::message::LongSend;
use crate::endpoint::Buffer;

pub use request::{Received, RecvRequest, SendRequest};
pub(super) use state::TaggedState;

/// Longest message that travels with its bytes, unless [`TaggedOptions::eager_max`] says otherwise: what fits into one packet. Twice as
/// much is faster pulled (docs/notes/groups.md).
pub const DEFAULT_EAGER_MAX: u32 = 2 << 10;

/// Options of a channel for tagged messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedOptions {
    /// The channel that carries the messages.
    pub channel: Options,
    /// Longest message that travels with its bytes. Longer ones are PULLed by the receiver, if the group is
    /// [one-sided](super::GroupConfig::one_sided).
    pub eager_max: u32,
    /// Most sends that have not ended.
    pub sends: u32,
    /// Most receives that have not ended.
    pub receives: u32,
    /// Most messages that wait for a receive, divided equally between all senders. A sender with more gets no more room until receives
    /// are posted; messages of others are not concerned.
    pub unexpected: u32,
    /// Most bytes of short messages that wait for a receive, likewise.
    pub unexpected_bytes: u32,
}

/// A tagged message, without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessageInfo {
    /// Its sender.
    pub from: MemberId,
    /// Its tag.
    pub tag: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// A channel of tagged messages. All members open it with the same number.
#[derive(Clone, Debug)]
pub struct Tagged {
    shared: Arc<Shared>,
    id: u16,
    max_message: usize,
}

/// A send or receive that was not started, or has failed.
#[derive(Debug)]
pub struct TaggedFailed {
    /// Why.
    pub error: GroupError,
    /// The buffer. `None`: the device may still write into it, so nobody gets it back.
    pub buffer: Option<Buffer>,
}

impl fmt::Display for TaggedFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for TaggedFailed {}

impl Group {
    /// Opens a channel for tagged messages. As with [`Group::open_channel`], all members open it before anybody sends.
    pub fn open_tagged(&self, id: u16, options: &TaggedOptions) -> Result<Tagged, GroupError> {
        options.check()?;
        let mut engine = self.shared.engine();
        let opened = engine.open_channel(id, &options.channel).map(|()| {
            let tagged = TaggedState::new(options, self.members);
            if let Some(channel) = &mut engine.channels[usize::from(id)] {
                channel.tagged = Some(Box::new(tagged));
            }
        });
        self.shared.release(engine);
        opened?;
        Ok(Tagged { shared: self.shared.clone(), id, max_message: options.channel.max_message as usize })
    }

    /// The usual options for tagged messages in this group.
    pub fn tagged_options(&self) -> TaggedOptions {
        TaggedOptions {
            channel: self.channel_options(),
            eager_max: DEFAULT_EAGER_MAX,
            sends: 1024,
            receives: 1024,
            unexpected: 4096,
            unexpected_bytes: 64 << 20,
        }
    }
}

impl TaggedOptions {
    fn check(&self) -> Result<(), GroupError> {
        let table = 1..=Limits::MAX_TABLE as u32;
        let checks = [
            ("sends", table.contains(&self.sends)),
            ("receives", table.contains(&self.receives)),
            ("unexpected", table.contains(&self.unexpected)),
            ("unexpected_bytes", self.unexpected_bytes >= 1),
        ];
        match checks.into_iter().find(|(_, valid)| !valid) {
            Some((option, _)) => Err(crosstie_protocol::group::message::OptionsError { option }.into()),
            None => Ok(()),
        }
    }
}

impl Tagged {
    /// Starts to send a range of a buffer. The buffer comes back with the end of the send: for a short message when it is in the send
    /// buffer, usually at once; for a long one when the receiver has read it.
    ///
    /// Messages to one member with equal tags are received in the order of their sends.
    pub fn isend(
        &self,
        to: MemberId,
        tag: u64,
        buffer: Buffer,
        range: impl RangeBounds<usize>,
    ) -> Result<SendRequest, TaggedFailed> {
        let (start, end) = (
            match range.start_bound() {
                Bound::Included(start) => *start,
                Bound::Excluded(start) => start.saturating_add(1),
                Bound::Unbounded => 0,
            },
            match range.end_bound() {
                Bound::Included(end) => end.saturating_add(1),
                Bound::Excluded(end) => *end,
                Bound::Unbounded => buffer.len(),
            },
        );
        if start > end || end > buffer.len() {
            let region = buffer.len();
            let outside = crate::device::OutOfRegion { offset: start, len: end.wrapping_sub(start), region };
            let error = GroupError::NotStarted(crate::endpoint::NotStarted::Local(outside));
            return Err(TaggedFailed { error, buffer: Some(buffer) });
        }
        if end - start > self.max_message {
            let error = GroupError::MessageTooLong { len: end - start, max: self.max_message };
            return Err(TaggedFailed { error, buffer: Some(buffer) });
        }
        let mut engine = self.shared.engine();
        let started = if engine.has_send_slot(self.id) {
            engine.start_send(self.id, to, tag, buffer, start, end - start)
        } else {
            engine.progress();
            Err((GroupError::TooManyRequests(engine.max_sends(self.id)), buffer))
        };
        self.shared.release(engine);
        let state = match started {
            Ok(Ok(key)) => SendState::Running(key),
            Ok(Err(buffer)) => SendState::Ended(Some(buffer)),
            Err((error, buffer)) => return Err(TaggedFailed { error, buffer: Some(buffer) }),
        };
        Ok(SendRequest { tagged: self.clone(), state })
    }

    /// Sends bytes that are in no registered buffer: they are copied. Waits while the send buffer is full.
    pub fn send(&self, to: MemberId, tag: u64, bytes: &[u8]) -> Result<(), GroupError> {
        if bytes.len() > self.max_message {
            return Err(GroupError::MessageTooLong { len: bytes.len(), max: self.max_message });
        }
        let prefix = tag.to_le_bytes();
        let parts = Parts { flags: flags::TAGGED, prefix: &prefix, body: Source::Bytes(bytes) };
        let engine = self.shared.engine();
        engine.check_destination(to)?;
        let mut send = LongSend { channel: self.id, to, offset: 0, owner: None };
        let id = self.id;
        let waited = self.shared.wait(engine, None, |engine| {
            // Not before messages that were sent earlier.
            if send.owner.is_none() && !engine.has_empty_outbox(id, to) {
                return None;
            }
            engine.step_send(&mut send, &parts)
        });
        if waited.is_err() {
            self.shared.engine().end_long_send(&send);
        }
        waited?
    }

    /// Starts to receive a message from `from`, or from any member, with `tag`, or with any tag. Of messages that match, the one that
    /// came first is taken; of receives that match, the one that was started first.
    ///
    /// A message that is longer than the buffer ends the receive with [`GroupError::Truncated`], and is gone.
    pub fn irecv(
        &self,
        from: Option<MemberId>,
        tag: Option<u64>,
        buffer: Buffer,
    ) -> Result<RecvRequest, TaggedFailed> {
        let mut engine = self.shared.engine();
        let started = engine.start_recv(self.id, from, tag, buffer);
        self.shared.release(engine);
        match started {
            Ok(key) => Ok(RecvRequest { tagged: self.clone(), key: Some(key) }),
            Err((error, buffer)) => Err(TaggedFailed { error, buffer: Some(buffer) }),
        }
    }

    /// The first message that has arrived and that a receive would match, without taking it.
    pub fn probe(&self, from: Option<MemberId>, tag: Option<u64>) -> Result<Option<MessageInfo>, GroupError> {
        let mut engine = self.shared.engine();
        engine.progress();
        engine.serve_tagged(self.id);
        let found =
            engine.channels[usize::from(self.id)].as_ref().and_then(|channel| channel.tagged.as_ref());
        let found = found.and_then(|tagged| tagged.probe(from, tag));
        let failed = engine.failed.clone();
        self.shared.release(engine);
        match (found, failed) {
            (None, Some(error)) => Err(error),
            (found, _) => Ok(found),
        }
    }

    /// Messages that have arrived and wait for a receive.
    pub fn unexpected(&self) -> usize {
        self.with_state(|tagged| tagged.unexpected()).unwrap_or(0)
    }

    fn with_state<T>(&self, action: impl FnOnce(&mut TaggedState) -> T) -> Option<T> {
        let mut engine = self.shared.engine();
        let channel = engine.channels[usize::from(self.id)].as_mut();
        let result = channel.and_then(|channel| channel.tagged.as_deref_mut()).map(action);
        self.shared.release(engine);
        result
    }

    /// Runs the engine until `check` finds the end of a request.
    fn wait_for<T>(
        &self,
        timeout: Option<Duration>,
        mut check: impl FnMut(&mut TaggedState) -> Option<T>,
    ) -> Result<T, GroupError> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (engine, id) = (self.shared.engine(), self.id);
        self.shared.wait(engine, deadline, |engine| {
            engine.serve_tagged(id);
            check(engine.channels[usize::from(id)].as_mut()?.tagged.as_deref_mut()?)
        })
    }
}
