//! The engine's part of a channel: send buffer, receive buffer, and messages that wait for the application.
//!
//! ```text
//!   send buffer (registered)     | header, body | header, body | ...     places of each destination, freed by acknowledgements
//!   receive buffer (private)     | body | body | ...                     places of each sender, freed when the application has taken the message
//!   ready                        messages in the order in which they became complete; one entry for all messages of a packet
//! ```
//!
//! Packets are copied out of their receive before anybody looks at them, so that a peer cannot change them afterwards. Messages
//! of several packets are joined in memory that grows with the packets, not with the length that the sender announces.

use core::task::Waker;
use std::collections::VecDeque;

use crosstie_protocol::group::message::{
    COMBINED_PREFIX, Channel, Entry, Next, Options, OptionsError, Outgoing, Received, SendRefusal, Verdict,
    Violation, check_combined, first_combined, part_at,
};
use crosstie_protocol::group::{GroupId, HEADER_SIZE, Header, MemberId, PacketKind, flags};

use super::engine::Engine;
use super::link::SLOT;
use super::tagged::TaggedState;
use super::wires::Wires;
use crate::device::{Data, Mr, OutOfRegion, PostError, Posted};

/// The longest packet that may be copied into the send queue.
const INLINE: usize = 256;

/// The bytes of a message, or of the messages of a combined packet that nobody has taken.
#[derive(Debug)]
enum Body {
    /// In the receive buffer.
    Ring { entry: u64, offset: u32, len: u32 },
    /// Joined from several packets.
    Joined(Vec<u8>),
}

/// A complete message, or a combined packet.
#[derive(Debug)]
pub(super) struct Ready {
    from: MemberId,
    flags: u8,
    body: Body,
}

/// The next message for the application.
#[derive(Clone, Copy, Debug)]
pub(super) struct Front<'a> {
    pub(super) from: MemberId,
    pub(super) flags: u8,
    pub(super) bytes: &'a [u8],
}

/// One open channel.
#[derive(Debug)]
pub(super) struct ChannelState {
    pub(super) protocol: Channel,
    pub(super) options: Options,
    /// Packets may get lost: acknowledgements that are late by the measured round trip count.
    pub(super) is_lossy: bool,
    pub(super) send_memory: Mr,
    pub(super) receive_memory: Box<[u8]>,
    pub(super) ready: VecDeque<Ready>,
    /// Tagged messages of each sender for which there is no room among those that wait for a receive, and how many packets these are.
    pub(super) blocked: Box<[VecDeque<Ready>]>,
    pub(super) blocked_packets: usize,
    joining: Box<[Vec<u8>]>,
    /// Bytes of joined messages of each member that nobody has taken. With more than `joined_max` bytes a member is refused.
    joined: Box<[usize]>,
    joined_max: usize,
    /// The thread or future that is sending a message of several packets to this member.
    pub(super) long_send: Box<[Option<u64>]>,
    /// Futures that wait for a message: one waker for each.
    pub(super) wakers: Vec<(u64, Waker)>,
    pub(super) delivered: u64,
    pub(super) changed: bool,
    /// Set if the channel carries tagged messages.
    pub(super) tagged: Option<Box<TaggedState>>,
}

impl ChannelState {
    pub(super) fn new(
        id: GroupId,
        channel: u16,
        me: MemberId,
        members: usize,
        options: &Options,
        send_memory: Mr,
    ) -> Result<ChannelState, OptionsError> {
        Ok(ChannelState {
            protocol: Channel::new(id, channel, me, members, options)?,
            options: *options,
            is_lossy: options.min_resend_after < options.resend_after,
            send_memory,
            receive_memory: vec![0; options.receive_bytes(members)].into_boxed_slice(),
            ready: VecDeque::with_capacity(options.receive_bytes(members) / options.mtu as usize),
            blocked: (0..members).map(|_| VecDeque::new()).collect(),
            blocked_packets: 0,
            joining: (0..members).map(|_| Vec::new()).collect(),
            joined: vec![0; members].into_boxed_slice(),
            joined_max: options.max_message as usize / (members - 1).max(1),
            long_send: vec![None; members].into_boxed_slice(),
            wakers: Vec::new(),
            delivered: 0,
            changed: false,
            tagged: None,
        })
    }

    /// Handles a packet whose body is `len` bytes at `at` of `memory`.
    #[inline]
    pub(super) fn on_packet(
        &mut self,
        header: &Header,
        memory: &Mr,
        at: usize,
        len: usize,
        now: u64,
    ) -> Result<(), Violation> {
        let Received::Data(verdict) = self.protocol.on_packet(header, len as u32, now)? else {
            self.changed = true;
            return Ok(());
        };
        let from = header.sender;
        match verdict {
            Verdict::Accepted { entry, .. } => {
                if header.flags & Channel::WHOLE == Channel::WHOLE {
                    self.store(entry, memory, at, len, header.flags)?;
                    self.complete_packet(from, header.flags, entry, len as u32)?;
                } else {
                    let message = &mut self.joining[from.index()];
                    if header.flags & flags::FIRST != 0 {
                        // What is there is of a message that its sender has given up.
                        message.clear();
                    }
                    let start = message.len();
                    message.resize(start + len, 0);
                    let read = memory.read(at, &mut message[start..]);
                    self.protocol.receiver.release(entry.number);
                    read.map_err(|_| Violation::InvalidData { len: len as u32, flags: header.flags })?;
                    self.complete_joined(from, header.flags);
                }
                while let Some(next) = self.protocol.receiver.next_held(from)? {
                    self.accept_held(from, &next)?;
                }
                Ok(())
            }
            Verdict::Held { entry } => self.store(entry, memory, at, len, header.flags),
            _ => Ok(()),
        }
    }

    /// Copies the body of a packet to its place in the receive buffer.
    #[inline]
    fn store(
        &mut self,
        entry: Entry,
        memory: &Mr,
        at: usize,
        len: usize,
        flags: u8,
    ) -> Result<(), Violation> {
        let start = entry.offset as usize;
        let place = self.receive_memory.get_mut(start..start + len);
        if place.is_none_or(|bytes| memory.read(at, bytes).is_err()) {
            return Err(Violation::InvalidData { len: len as u32, flags });
        }
        Ok(())
    }

    /// A packet that came before a missing one, and whose turn has come now.
    #[cold]
    fn accept_held(&mut self, from: MemberId, next: &Next) -> Result<(), Violation> {
        if next.flags & Channel::WHOLE == Channel::WHOLE {
            return self.complete_packet(from, next.flags, next.entry, next.len);
        }
        let bytes = ring_bytes(&self.receive_memory, next.entry.offset, next.len);
        if next.flags & flags::FIRST != 0 {
            self.joining[from.index()].clear();
        }
        self.joining[from.index()].extend_from_slice(bytes);
        self.protocol.receiver.release(next.entry.number);
        self.complete_joined(from, next.flags);
        Ok(())
    }

    /// Completes a packet of one message, or of several.
    #[inline]
    fn complete_packet(
        &mut self,
        from: MemberId,
        flags: u8,
        entry: Entry,
        len: u32,
    ) -> Result<(), Violation> {
        if flags & flags::COMBINED != 0 {
            let bytes = ring_bytes(&self.receive_memory, entry.offset, len);
            if let Err(invalid) = check_combined(bytes, self.options.max_message) {
                self.protocol.receiver.release(entry.number);
                return Err(invalid.into());
            }
        }
        self.complete(from, flags, Body::Ring { entry: entry.number, offset: entry.offset, len });
        Ok(())
    }

    /// Completes a message of several packets, if this was the last one.
    fn complete_joined(&mut self, from: MemberId, flags: u8) {
        if flags & flags::LAST != 0 {
            let message = core::mem::take(&mut self.joining[from.index()]);
            let joined = &mut self.joined[from.index()];
            *joined += message.len();
            if *joined > self.joined_max {
                self.protocol.receiver.set_full(from, true);
            }
            self.complete(from, flags, Body::Joined(message));
        }
    }

    #[inline]
    fn complete(&mut self, from: MemberId, flags: u8, body: Body) {
        self.ready.push_back(Ready { from, flags, body });
        self.changed = true;
    }

    /// The application has taken the next message: its place is free.
    #[inline]
    pub(super) fn release_front(&mut self) {
        self.release_front_of(None);
    }

    /// As [`ChannelState::release_front`], of the queue of all senders or of those messages of one that are blocked.
    #[inline]
    pub(super) fn release_front_of(&mut self, blocked: Option<MemberId>) {
        let queue = match blocked {
            None => &mut self.ready,
            Some(from) => &mut self.blocked[from.index()],
        };
        let Some(ready) = queue.front_mut() else { return };
        self.delivered += 1;
        match &mut ready.body {
            Body::Ring { entry, offset, len } => {
                if ready.flags & flags::COMBINED != 0 {
                    let taken = match first_combined(ring_bytes(&self.receive_memory, *offset, *len)) {
                        Some((_, bytes)) => (COMBINED_PREFIX + bytes.len()) as u32,
                        None => *len,
                    };
                    if taken < *len {
                        (*offset, *len) = (*offset + taken, *len - taken);
                        return;
                    }
                }
                self.protocol.receiver.release(*entry);
            }
            Body::Joined(bytes) => {
                let joined = &mut self.joined[ready.from.index()];
                let was_full = *joined > self.joined_max;
                *joined -= bytes.len();
                if was_full && *joined <= self.joined_max {
                    self.protocol.receiver.set_full(ready.from, false);
                }
            }
        }
        queue.pop_front();
        self.blocked_packets -= usize::from(blocked.is_some());
    }

    /// Moves the next packet to those of its sender that are blocked, so that other senders need not wait for it. Calls `each` with the flags and
    /// the bytes of each of its messages.
    #[cold]
    pub(super) fn block_front(&mut self, mut each: impl FnMut(&mut TaggedState, MemberId, u8, &[u8])) {
        let Some(ready) = self.ready.pop_front() else { return };
        if let Some(tagged) = &mut self.tagged {
            match &ready.body {
                Body::Ring { offset, len, .. } => {
                    let mut bytes = ring_bytes(&self.receive_memory, *offset, *len);
                    if ready.flags & flags::COMBINED == 0 {
                        each(tagged, ready.from, ready.flags, bytes);
                    } else {
                        while let Some((message_flags, message)) = first_combined(bytes) {
                            each(tagged, ready.from, message_flags, message);
                            bytes = &bytes[COMBINED_PREFIX + message.len()..];
                        }
                    }
                }
                Body::Joined(bytes) => each(tagged, ready.from, ready.flags, bytes),
            }
        }
        self.blocked_packets += 1;
        self.blocked[ready.from.index()].push_back(ready);
    }

    pub(super) fn drop_peer(&mut self, member: MemberId, nobody_left: bool) {
        self.protocol.drop_peer(member);
        if let Some(tagged) = &mut self.tagged {
            tagged.drop_peer(member, nobody_left);
        }
        self.joining[member.index()] = Vec::new();
        self.changed = true;
    }

    /// Remembers whom to wake when a message has come.
    pub(super) fn register(&mut self, future: u64, waker: &Waker) {
        match self.wakers.iter_mut().find(|(registered, _)| *registered == future) {
            Some((_, registered)) => registered.clone_from(waker),
            None => self.wakers.push((future, waker.clone())),
        }
    }

    /// Packets of a kind that this channel has sent.
    pub(super) fn packets_sent(&self, kind: PacketKind) -> u64 {
        let (sender, receiver) = (self.protocol.sender.counters(), self.protocol.receiver.counters());
        match kind {
            PacketKind::Data => sender.packets + sender.resent,
            PacketKind::Ack => receiver.acks,
            PacketKind::Nack => receiver.nacks,
            PacketKind::Resume => receiver.resumes,
            _ => 0,
        }
    }
}

/// The next message of `ready`, whose bytes are in `receive_memory` unless they were joined.
#[inline]
pub(super) fn front<'a>(ready: &'a VecDeque<Ready>, receive_memory: &'a [u8]) -> Option<Front<'a>> {
    let Ready { from, flags, body } = ready.front()?;
    let bytes = match body {
        Body::Ring { offset, len, .. } => ring_bytes(receive_memory, *offset, *len),
        Body::Joined(bytes) => bytes,
    };
    // Combined packets were checked when they came.
    let (flags, bytes) = if flags & flags::COMBINED == 0 {
        (*flags, bytes)
    } else {
        first_combined(bytes).unwrap_or((0, &[]))
    };
    Some(Front { from: *from, flags, bytes })
}

#[inline]
fn ring_bytes(receive_memory: &[u8], offset: u32, len: u32) -> &[u8] {
    let start = offset as usize;
    receive_memory.get(start..start + len as usize).unwrap_or(&[])
}

/// Where the bytes of a message come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    Bytes(&'a [u8]),
    /// `len` bytes of a registered region.
    Region {
        region: &'a Mr,
        start: usize,
        len: usize,
    },
}

impl Source<'_> {
    fn len(&self) -> usize {
        match self {
            Source::Bytes(bytes) => bytes.len(),
            Source::Region { len, .. } => *len,
        }
    }

    /// Copies the bytes from `offset` on to `bytes`.
    #[inline]
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        match self {
            Source::Bytes(source) => bytes.copy_from_slice(&source[offset..offset + bytes.len()]),
            Source::Region { region, start, .. } => region.read(start + offset, bytes)?,
        }
        Ok(())
    }

    /// Copies `len` bytes from `offset` on to `at` of a region.
    #[inline]
    fn copy_to(&self, offset: usize, len: usize, to: &Mr, at: usize) -> Result<(), OutOfRegion> {
        match self {
            Source::Bytes(bytes) => to.write(at, &bytes[offset..offset + len]),
            Source::Region { region, start, .. } => to.copy_from(at, region, start + offset, len),
        }
    }
}

/// A message that is being sent: `prefix` and `body`, in parts of at most an MTU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    pub(super) flags: u8,
    pub(super) prefix: &'a [u8],
    pub(super) body: Source<'a>,
}

impl Parts<'_> {
    pub(super) fn len(&self) -> usize {
        self.prefix.len() + self.body.len()
    }

    /// Copies the message, from `offset` on, to `bytes`.
    #[inline]
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        let split = self.prefix.len();
        let (start, end) = (offset.min(split), (offset + bytes.len()).min(split));
        let (prefix, body) = bytes.split_at_mut(end - start);
        prefix.copy_from_slice(&self.prefix[start..end]);
        self.body.read(offset.max(split) - split, body)
    }

    /// Copies `len` bytes of the message, from `offset` on, to `at` of the send buffer.
    #[inline]
    pub(super) fn copy_to(&self, offset: usize, len: usize, to: &Mr, at: usize) -> Result<(), OutOfRegion> {
        let split = self.prefix.len();
        let (start, end) = (offset.min(split), (offset + len).min(split));
        let (body_start, body_end) = (offset.max(split) - split, (offset + len).max(split) - split);
        if start < end {
            to.write(at, &self.prefix[start..end])?;
        }
        self.body.copy_to(body_start, body_end - body_start, to, at + end - start)
    }
}

impl Engine {
    /// Sends the part of a message that starts at `offset`. Returns the offset of the next part.
    #[inline]
    pub(super) fn send_part(
        &mut self,
        id: u16,
        to: MemberId,
        parts: &Parts<'_>,
        offset: usize,
    ) -> Result<usize, SendRefusal> {
        if !self.has_room(to) {
            self.poll_sends();
            if !self.has_room(to) {
                return Err(SendRefusal::WindowFull);
            }
        }
        if self.send_combined(id, to, parts, offset)? {
            return Ok(parts.len());
        }
        let Some(channel) = &mut self.channels[usize::from(id)] else { return Err(SendRefusal::PeerGone) };
        if channel.is_lossy && channel.protocol.sender.in_flight(to) == 0 {
            // The timer starts: from an old reading of the clock it would end too early.
            self.read_clock();
        }
        let (now, max_inline) = (self.now(), self.max_inline(to));
        let Some(channel) = &mut self.channels[usize::from(id)] else { return Err(SendRefusal::PeerGone) };
        let part = part_at(parts.len() as u32, offset as u32, channel.options.mtu);
        let len = part.len as usize;
        let (packet, transmit) = channel.protocol.sender.send(
            to,
            (HEADER_SIZE + len) as u32,
            // In every part: the receiver looks at those of the last one.
            part.flags | parts.flags,
            part.aux,
            now,
        )?;
        let at = packet.offset as usize;
        // The places are inside the send buffer: its size is that of the protocol's ring.
        let posted = if HEADER_SIZE + len <= INLINE {
            let mut bytes = [0; INLINE];
            let packet_bytes = &mut bytes[..HEADER_SIZE + len];
            let copied = parts.read(offset, &mut packet_bytes[HEADER_SIZE..]);
            if transmit {
                packet_bytes[..HEADER_SIZE].copy_from_slice(&channel.protocol.data_header(&packet).encode());
            }
            // The header in the send buffer is not used: a packet that is sent again gets another one.
            let kept = copied.and_then(|()| channel.send_memory.write(at, packet_bytes));
            match kept {
                Err(_) => Err(PostError::Invalid("outside of the send buffer")),
                Ok(()) if transmit && HEADER_SIZE + len <= max_inline => {
                    self.post_bytes(to, Data::Inline(&bytes[..HEADER_SIZE + len])).map(drop)
                }
                Ok(()) if transmit => {
                    let header = channel.protocol.data_header(&packet).encode();
                    self.post_from_buffer(id, &packet, &header)
                }
                Ok(()) => Ok(()),
            }
        } else {
            match parts.copy_to(offset, len, &channel.send_memory, at + HEADER_SIZE) {
                Err(_) => Err(PostError::Invalid("outside of the send buffer")),
                Ok(()) if transmit => {
                    let header = channel.protocol.data_header(&packet).encode();
                    self.post_from_buffer(id, &packet, &header)
                }
                Ok(()) => Ok(()),
            }
        };
        if posted.is_err() && transmit {
            self.put_back(id, &packet);
        }
        Ok(offset + len)
    }

    /// The device did not take this packet: a later pass posts it.
    #[cold]
    pub(super) fn put_back(&mut self, id: u16, packet: &Outgoing) {
        self.counters.unsent += 1;
        if let Some(channel) = &mut self.channels[usize::from(id)] {
            channel.protocol.sender.put_back(packet);
        }
    }

    #[inline]
    fn max_inline(&self, to: MemberId) -> usize {
        match (&self.datagrams, &self.wires.links[to.index()]) {
            (Some(port), _) => port.max_inline,
            (None, Some(link)) => link.max_inline,
            (None, None) => 0,
        }
    }

    /// Whether a packet to this member can be posted. Polls for completions of earlier ones when few are left.
    #[inline]
    fn has_room(&mut self, to: MemberId) -> bool {
        match (&self.datagrams, &self.wires.links[to.index()]) {
            (Some(port), _) => !port.queue.is_half_full(),
            (None, Some(link)) => !link.queue.is_half_full() && link.has_room_for_data(),
            // The refusal that follows says why.
            (None, None) => true,
        }
    }

    #[inline]
    fn post_bytes(&mut self, to: MemberId, data: Data<'_>) -> Result<Posted, PostError> {
        match (&mut self.datagrams, &mut self.wires.links[to.index()]) {
            (Some(port), _) => port.post(to, data, None),
            (None, Some(link)) => link.post(data, None),
            (None, None) => Err(PostError::Invalid("the member is dead")),
        }
    }

    #[inline]
    fn post_inline_or_staged(&mut self, to: MemberId, bytes: &[u8]) -> Result<(), PostError> {
        if bytes.len() <= self.max_inline(to) {
            return self.post_bytes(to, Data::Inline(bytes)).map(drop);
        }
        let slot = self.wires.staging.take().ok_or(PostError::Full)?;
        let posted = self.post_staged(to, slot, bytes);
        if posted != Ok(Posted::Queued) {
            self.wires.staging.give_back(slot);
        }
        posted.map(drop)
    }

    fn post_staged(&mut self, to: MemberId, slot: u16, bytes: &[u8]) -> Result<Posted, PostError> {
        let Wires { staging, links, .. } = &mut self.wires;
        staging.write(slot, 0, bytes)?;
        let at = usize::from(slot) * SLOT;
        let sge = staging.memory.sge(at..at + bytes.len()).map_err(|_| PostError::Invalid("staging slot"))?;
        match (&mut self.datagrams, &mut links[to.index()]) {
            (Some(port), _) => port.post(to, Data::Regions(&[sge]), Some(slot)),
            (None, Some(link)) => link.post(Data::Regions(&[sge]), Some(slot)),
            (None, None) => Err(PostError::Invalid("the member is dead")),
        }
    }

    /// Posts a packet for the first time, from the send buffer. Its place is reused only after the receiver has acknowledged it, so
    /// after the device has read it.
    pub(super) fn post_from_buffer(
        &mut self,
        id: u16,
        packet: &Outgoing,
        header: &[u8; HEADER_SIZE],
    ) -> Result<(), PostError> {
        let Some(channel) = &self.channels[usize::from(id)] else {
            return Err(PostError::Invalid("the channel is closed"));
        };
        let (at, len) = (packet.offset as usize, packet.len as usize);
        let outside = |_| PostError::Invalid("outside of the send buffer");
        channel.send_memory.write(at, header).map_err(outside)?;
        let sge = channel.send_memory.sge(at..at + len).map_err(outside)?;
        match (&mut self.datagrams, &mut self.wires.links[packet.to.index()]) {
            (Some(port), _) => port.post(packet.to, Data::Regions(&[sge]), None).map(drop),
            (None, Some(link)) => link.post(Data::Regions(&[sge]), None).map(drop),
            (None, None) => Err(PostError::Invalid("the member is dead")),
        }
    }

    /// Sends a packet again. From a copy: an earlier request for it may still be in the send queue when its place is reused.
    #[cold]
    fn post_again(&mut self, id: u16, packet: &Outgoing) -> Result<(), PostError> {
        let Some(channel) = &mut self.channels[usize::from(id)] else {
            return Err(PostError::Invalid("the channel is closed"));
        };
        let (at, len) = (packet.offset as usize, packet.len as usize);
        let mut bytes = [0; SLOT];
        bytes[..HEADER_SIZE].copy_from_slice(&channel.protocol.data_header(packet).encode());
        let read = channel.send_memory.read(at + HEADER_SIZE, &mut bytes[HEADER_SIZE..len]);
        read.map_err(|_| PostError::Invalid("outside of the send buffer"))?;
        self.post_inline_or_staged(packet.to, &bytes[..len])
    }

    /// Sends again what is due, and answers senders. `idle`: also acknowledgements that could wait.
    #[inline]
    pub(super) fn serve_channels(&mut self, idle: bool) {
        let mut has_answers = false;
        for index in 0..self.open.len() {
            let id = self.open[index];
            let now = self.now();
            let Some(channel) = &mut self.channels[usize::from(id)] else { continue };
            if channel.protocol.sender.has_work(now) {
                self.resend(id);
            }
            let Some(channel) = &mut self.channels[usize::from(id)] else { continue };
            while let Some(answer) = channel.protocol.receiver.next_answer(idle) {
                let header = channel.protocol.answer_header(&answer).encode();
                let posted = match (&mut self.datagrams, &mut self.wires.links[answer.to.index()]) {
                    (Some(port), _) => port.post(answer.to, Data::Inline(&header), None).map(drop),
                    (None, Some(link)) => link.post(Data::Inline(&header), None).map(drop),
                    (None, None) => Ok(()),
                };
                if posted.is_err() {
                    // The send queue is full. A sender whose window is full waits for this answer.
                    channel.protocol.receiver.put_back(&answer);
                    has_answers = true;
                    break;
                }
            }
            if channel.tagged.is_some() {
                self.serve_tagged(id);
            }
            let Some(channel) = &mut self.channels[usize::from(id)] else { continue };
            if channel.changed {
                channel.changed = false;
                self.wires.results.to_wake.extend(channel.wakers.drain(..).map(|(_, waker)| waker));
                self.wires.results.changed = true;
            }
        }
        if has_answers {
            self.poll_sends();
        }
    }

    #[cold]
    fn resend(&mut self, id: u16) {
        self.poll_sends();
        let now = self.now();
        loop {
            let Some(channel) = &mut self.channels[usize::from(id)] else { return };
            channel.protocol.sender.expire(now);
            if !self.wires.staging.has_free() {
                return;
            }
            let (port, links) = (&self.datagrams, &self.wires.links);
            let has_room = |to: MemberId| match (port, &links[to.index()]) {
                (Some(port), _) => port.queue.room() > 1,
                (None, Some(link)) => link.has_room_for_data(),
                (None, None) => true,
            };
            let Some(packet) = channel.protocol.sender.next_outgoing_where(has_room) else { return };
            let posted = if packet.is_first {
                let header = channel.protocol.data_header(&packet).encode();
                self.post_from_buffer(id, &packet, &header)
            } else {
                self.post_again(id, &packet)
            };
            if posted.is_err() {
                self.put_back(id, &packet);
                return;
            }
        }
    }

    /// Tells senders about all room that there is. Before a thread parks, and while no packet comes.
    pub(super) fn return_credit(&mut self) {
        for id in &self.open {
            if let Some(channel) = &mut self.channels[usize::from(*id)] {
                channel.protocol.receiver.return_credit();
            }
        }
    }
}
