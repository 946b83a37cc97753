//! SEND/RECEIVE (RHiNET §5): messages of any length from any member, in order for each sender.

use core::pin::Pin;
use core::task::{Context, Poll};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::group::message::{Options, SendRefusal};
use crosstie_protocol::group::{CONTROL_STREAM, HEADER_SIZE, MemberId, Token, flags};

use super::Group;
use super::channel::{self, ChannelState, Parts, Source};
use super::config::limits::{MAX_CHANNELS, PACKETS_PER_PEER};
use super::driver::Shared;
use super::engine::Engine;
use super::error::GroupError;
use super::lock::LockGuard;
use crate::device::Access;

/// Bytes in front of a message that carries a fencing token: lock and token.
const FENCE_PREFIX: usize = 24;

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its sender.
    pub from: MemberId,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A logical channel: members that have opened it send messages to each other. One receive port for the messages of all senders.
#[derive(Clone, Debug)]
pub struct Channel {
    shared: Arc<Shared>,
    id: u16,
    max_message: usize,
}

impl Group {
    /// Opens a channel. Packets for a channel that a member has not opened are dropped there, and sent again when it has: open channels at
    /// all members before a barrier, then send. All members use the same options.
    pub fn open_channel(&self, id: u16, options: &Options) -> Result<Channel, GroupError> {
        let mut engine = self.shared.engine();
        let opened = engine.open_channel(id, options);
        self.shared.release(engine);
        opened?;
        Ok(Channel { shared: self.shared.clone(), id, max_message: options.max_message as usize })
    }

    /// The options that fit this group. Over RC no packet is lost, so nothing is sent again but what was refused. Over UD packets are
    /// sent again when their acknowledgements are late. Between machines a member that stays silent for 10 s although packets were sent again
    /// counts as unreachable. On one machine silence never means death: a send to a member that does not run waits.
    pub fn channel_options(&self) -> Options {
        let engine = self.shared.engine();
        let (resend_after, min_resend_after) =
            if engine.is_lossy { (2_000_000, 50_000) } else { (u64::MAX, u64::MAX) };
        let defaults = Options { mtu: engine.mtu as u32, ..Options::default() };
        // Both buffers, for groups of many members.
        let packets = ((engine.members - 1) * PACKETS_PER_PEER) as u32;
        let bytes = packets * (defaults.mtu + HEADER_SIZE as u32);
        Options {
            send_buffer: defaults.send_buffer.max(bytes),
            send_table: defaults.send_table.max(packets),
            receive_buffer: defaults.receive_buffer.max(bytes),
            receive_table: defaults.receive_table.max(packets),
            resend_after,
            min_resend_after,
            give_up_after: match engine.same_machine || !engine.is_lossy {
                true => u64::MAX,
                false => defaults.give_up_after,
            },
            ..defaults
        }
    }
}

impl Channel {
    /// The channel's number.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Sends a message. Returns when the message is in the send buffer; waits while the member has no room. A member that does not run, or whose
    /// application does not receive, may keep it waiting for as long as it lives: [`Channel::send_timeout`].
    ///
    /// A small message to a member that is behind may wait in the send buffer for others, until the next call that sends, waits or
    /// receives: see [`ChannelOptions::combine_from`](super::ChannelOptions::combine_from). [`Channel::flush`] waits for none.
    #[inline]
    pub fn send(&self, to: MemberId, bytes: &[u8]) -> Result<(), GroupError> {
        self.send_parts(to, &Parts { flags: 0, prefix: &[], body: Source::Bytes(bytes) }, None)
    }

    /// As [`Channel::send`], for at most `timeout`. A message that was not sent by then is not received: if parts of it are on their way, the
    /// receiver drops them with the next message.
    pub fn send_timeout(&self, to: MemberId, bytes: &[u8], timeout: Duration) -> Result<(), GroupError> {
        let deadline = Instant::now().checked_add(timeout);
        self.send_parts(to, &Parts { flags: 0, prefix: &[], body: Source::Bytes(bytes) }, deadline)
    }

    /// As [`Channel::send`], with the token of a lock. The receiver drops the message if it has seen a newer token of this lock.
    pub fn send_fenced(&self, to: MemberId, guard: &LockGuard, bytes: &[u8]) -> Result<(), GroupError> {
        self.send_with_token(to, guard.lock(), guard.fence(), bytes)
    }

    /// As [`Channel::send_fenced`], for code that was given the token without the guard.
    pub fn send_with_token(
        &self,
        to: MemberId,
        lock: u32,
        token: Token,
        bytes: &[u8],
    ) -> Result<(), GroupError> {
        let mut prefix = [0; FENCE_PREFIX];
        prefix[..4].copy_from_slice(&lock.to_le_bytes());
        prefix[8..].copy_from_slice(&token.to_bytes());
        self.send_parts(
            to,
            &Parts { flags: flags::FENCED, prefix: &prefix, body: Source::Bytes(bytes) },
            None,
        )
    }

    /// Sends a message of at most one packet, if there is room now. Returns whether it was sent.
    pub fn try_send(&self, to: MemberId, bytes: &[u8]) -> Result<bool, GroupError> {
        let parts = Parts { flags: 0, prefix: &[], body: Source::Bytes(bytes) };
        let mut engine = self.shared.engine();
        engine.check_destination(to)?;
        let channel = engine.channels[usize::from(self.id)].as_ref();
        let max = channel.map_or(0, |channel| channel.options.mtu as usize);
        if bytes.len() > max {
            return Err(GroupError::MessageTooLong { len: bytes.len(), max });
        }
        if channel.is_some_and(|channel| channel.long_send[to.index()].is_some()) {
            return Ok(false);
        }
        engine.poll_before_send(self.id, to);
        let sent = match engine.send_part(self.id, to, &parts, 0) {
            Ok(_) => Ok(true),
            Err(SendRefusal::PeerGone) => Err(GroupError::PeerDead(to)),
            Err(_) => {
                engine.progress();
                Ok(false)
            }
        };
        self.shared.release(engine);
        sent
    }

    #[inline]
    fn send_parts(
        &self,
        to: MemberId,
        parts: &Parts<'_>,
        deadline: Option<Instant>,
    ) -> Result<(), GroupError> {
        if parts.len() > self.max_message {
            return Err(GroupError::MessageTooLong { len: parts.len(), max: self.max_message });
        }
        let mut engine = self.shared.engine();
        engine.check_destination(to)?;
        engine.poll_before_send(self.id, to);
        let mut send = LongSend { channel: self.id, to, offset: 0, owner: None };
        // The usual case: one packet, and there is room.
        if let Some(result) = engine.step_send(&mut send, parts) {
            self.shared.release(engine);
            return result;
        }
        let waited = self.shared.wait(engine, deadline, |engine| engine.step_send(&mut send, parts));
        if waited.is_err() {
            self.shared.engine().end_long_send(&send);
        }
        waited?
    }

    /// Waits for a message.
    pub fn recv(&self) -> Result<Message, GroupError> {
        let mut bytes = Vec::new();
        let from = self.recv_into(&mut bytes)?;
        Ok(Message { from, bytes })
    }

    /// Waits for a message and puts it into `bytes`, whose memory is used again.
    #[inline]
    pub fn recv_into(&self, bytes: &mut Vec<u8>) -> Result<MemberId, GroupError> {
        self.recv_until(None, bytes)
    }

    /// As [`Channel::recv_into`], for at most `timeout`.
    pub fn recv_timeout(&self, timeout: Duration, bytes: &mut Vec<u8>) -> Result<MemberId, GroupError> {
        self.recv_until(Instant::now().checked_add(timeout), bytes)
    }

    /// Takes a message if one is there.
    pub fn try_recv(&self, bytes: &mut Vec<u8>) -> Result<Option<MemberId>, GroupError> {
        let mut engine = self.shared.engine();
        let mut found = engine.take_message(self.id, bytes);
        if found.is_none() {
            engine.progress();
            found = engine.take_message(self.id, bytes);
        }
        let failed = engine.failed.clone();
        self.shared.release(engine);
        match (found, failed) {
            (None, Some(error)) => Err(error),
            (found, _) => Ok(found),
        }
    }

    /// A future that ends with a message.
    pub fn recv_async(&self) -> RecvFuture<'_> {
        RecvFuture { channel: self, id: None }
    }

    /// Waits until every message was acknowledged by its receiver. As a send, it may wait for a member that does not run:
    /// [`Channel::flush_timeout`].
    pub fn flush(&self) -> Result<(), GroupError> {
        self.flush_until(None)
    }

    /// As [`Channel::flush`], for at most `timeout`.
    pub fn flush_timeout(&self, timeout: Duration) -> Result<(), GroupError> {
        self.flush_until(Instant::now().checked_add(timeout))
    }

    fn flush_until(&self, deadline: Option<Instant>) -> Result<(), GroupError> {
        let (engine, id) = (self.shared.engine(), usize::from(self.id));
        self.shared.wait(engine, deadline, |engine| {
            let channel = engine.channels[id].as_ref();
            channel.is_none_or(|channel| channel.protocol.sender.is_idle()).then_some(())
        })
    }

    #[inline]
    fn recv_until(&self, deadline: Option<Instant>, bytes: &mut Vec<u8>) -> Result<MemberId, GroupError> {
        let (engine, id) = (self.shared.engine(), self.id);
        self.shared.wait(engine, deadline, |engine| match engine.take_message(id, bytes) {
            Some(from) => Some(Ok(from)),
            // One more pass may find packets that came before the last death was noticed.
            None if engine.is_alone() && engine.progress() == 0 => Some(Err(GroupError::NobodyLeft)),
            None => None,
        })?
    }
}

/// A message whose parts are being sent.
#[derive(Debug)]
pub(super) struct LongSend {
    pub(super) channel: u16,
    pub(super) to: MemberId,
    pub(super) offset: usize,
    /// Set while other messages to this member have to wait.
    pub(super) owner: Option<u64>,
}

impl Engine {
    pub(super) fn open_channel(&mut self, id: u16, options: &Options) -> Result<(), GroupError> {
        if usize::from(id) >= MAX_CHANNELS || id >= CONTROL_STREAM {
            return Err(GroupError::InvalidChannel(id));
        }
        if self.channels[usize::from(id)].is_some() {
            return Err(GroupError::ChannelOpen(id));
        }
        options.check()?;
        let options = Options {
            mtu: options.mtu.min(self.mtu as u32),
            give_up_after: if self.silence_is_death { options.give_up_after } else { u64::MAX },
            ..*options
        };
        let device = |error: crate::device::DeviceError| GroupError::Device(error.to_string());
        let bytes = options.send_bytes(self.members);
        let memory = self.pd.allocate(bytes, Access::LOCAL_WRITE).map_err(device)?;
        let mut channel = ChannelState::new(self.wires.id, id, self.me(), self.members, &options, memory)?;
        let is_early = |(channel, _): &(u16, MemberId)| *channel == id;
        for (_, from) in self.early.iter().filter(|early| is_early(early)) {
            channel.protocol.receiver.ask_again(*from);
        }
        self.early.retain(|early| !is_early(early));
        self.channels[usize::from(id)] = Some(Box::new(channel));
        self.open.push(id);
        for dead in self.machine.dead().iter() {
            if let Some(channel) = &mut self.channels[usize::from(id)] {
                channel.drop_peer(dead, false);
            }
        }
        Ok(())
    }

    #[inline]
    pub(super) fn check_destination(&self, to: MemberId) -> Result<(), GroupError> {
        if to.index() >= self.members || to == self.wires.me {
            return Err(GroupError::NoSuchPeer(to));
        }
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Sends as many parts as there is room for. Returns how it has ended, once it has.
    #[inline]
    pub(super) fn step_send(
        &mut self,
        send: &mut LongSend,
        parts: &Parts<'_>,
    ) -> Option<Result<(), GroupError>> {
        let index = usize::from(send.channel);
        if let Some(channel) = &self.channels[index]
            && channel.long_send[send.to.index()] != send.owner
        {
            return None;
        }
        loop {
            match self.send_part(send.channel, send.to, parts, send.offset) {
                Ok(offset) => {
                    send.offset = offset;
                    if offset == parts.len() {
                        self.end_long_send(send);
                        return Some(Ok(()));
                    }
                    if send.owner.is_none() {
                        let owner = self.next_waiter();
                        send.owner = Some(owner);
                        if let Some(channel) = &mut self.channels[index] {
                            channel.long_send[send.to.index()] = Some(owner);
                        }
                    }
                }
                Err(SendRefusal::PeerGone) => {
                    self.end_long_send(send);
                    return Some(Err(GroupError::PeerDead(send.to)));
                }
                Err(_) => return None,
            }
        }
    }

    #[inline]
    pub(super) fn end_long_send(&mut self, send: &LongSend) {
        if send.owner.is_some()
            && let Some(channel) = &mut self.channels[usize::from(send.channel)]
        {
            channel.long_send[send.to.index()] = None;
            channel.changed = true;
        }
    }

    /// Takes the next message of a channel.
    #[inline]
    pub(super) fn take_message(&mut self, id: u16, bytes: &mut Vec<u8>) -> Option<MemberId> {
        let channel = self.channels[usize::from(id)].as_mut()?;
        loop {
            let message = channel::front(&channel.ready, &channel.receive_memory)?;
            if message.flags & (flags::TAGGED | flags::RENDEZVOUS | flags::PULLED) != 0 {
                // The sender has opened this channel for tagged messages.
                self.gate.count_invalid();
                channel.release_front();
                continue;
            }
            let mut start = 0;
            let mut stale = false;
            if message.flags & flags::FENCED != 0 {
                let prefix = message.bytes.first_chunk::<FENCE_PREFIX>();
                stale = prefix.is_none_or(|prefix| {
                    let lock = u32::from_le_bytes(core::array::from_fn(|i| prefix[i]));
                    let token = Token::from_bytes(&core::array::from_fn(|i| prefix[8 + i]));
                    self.fences.check(lock, token).is_err()
                });
                start = FENCE_PREFIX;
            }
            bytes.clear();
            bytes.extend_from_slice(message.bytes.get(start..).unwrap_or(&[]));
            let from = message.from;
            channel.release_front();
            if !stale {
                return Some(from);
            }
            self.counters.stale_tokens += 1;
        }
    }
}

/// Ends with the next message of a channel. Made by [`Channel::recv_async`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct RecvFuture<'c> {
    channel: &'c Channel,
    /// Names the waker that is registered.
    id: Option<u64>,
}

impl Drop for RecvFuture<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id
            && let Some(channel) = &mut self.channel.shared.lock().channels[usize::from(self.channel.id)]
        {
            channel.wakers.retain(|(registered, _)| *registered != id);
        }
    }
}

impl Future for RecvFuture<'_> {
    type Output = Result<Message, GroupError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut bytes = Vec::new();
        match self.channel.try_recv(&mut bytes) {
            Ok(Some(from)) => return Poll::Ready(Ok(Message { from, bytes })),
            Err(error) => return Poll::Ready(Err(error)),
            Ok(None) => {}
        }
        let mut engine = self.channel.shared.engine();
        let from = engine.take_message(self.channel.id, &mut bytes);
        if from.is_none() {
            let id = *self.id.get_or_insert_with(|| engine.next_waiter());
            if let Some(channel) = &mut engine.channels[usize::from(self.channel.id)] {
                channel.register(id, context.waker());
            }
        }
        self.channel.shared.release(engine);
        match from {
            Some(from) => Poll::Ready(Ok(Message { from, bytes })),
            None => {
                self.channel.shared.hand_over();
                Poll::Pending
            }
        }
    }
}
