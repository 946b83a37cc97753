//! The engine's part of tagged messages: sends that wait for room or for their receiver, matching, and PULLs.
//!
//! ```text
//!   isend ─ short ─> [outbox] ─ tag, bytes ──────────> match ─> copied into the receive's buffer
//!         ─ long ──> [outbox] ─ tag, key, region ────> match ─> PULL into the receive's buffer
//!                    send ends <──── key, result ───────────────┘
//! ```
//!
//! The thread that runs the engine matches messages and starts PULLs, so both go on while the application computes. Short messages
//! that have no receive yet are copied out of the receive buffer, up to a limit; beyond it they stay there, and their senders are refused.

use core::task::Waker;
use std::collections::VecDeque;

use crosstie_protocol::group::message::{
    Matched, Matcher, PostedId, Pulled, Rendezvous, TAG_SIZE, decode_tag,
};
use crosstie_protocol::group::{MemberId, flags};

use super::channel::{Parts, Ready, Source};
use super::engine::Engine;
use super::error::GroupError;
use super::message::LongSend;
use super::tagged::{MessageInfo, TaggedOptions};
use crate::endpoint::{Buffer, NotStarted, OperationFuture};

/// Vectors of unexpected messages that are kept for the next ones.
const SPARE_VECTORS: usize = 32;

/// How a send has ended, and its buffer.
pub(super) type SendEnd = (Result<(), GroupError>, Option<Buffer>);
/// How a receive has ended, and its buffer.
pub(super) type RecvEnd = (Result<MessageInfo, GroupError>, Option<Buffer>);

/// A message that no receive has matched yet.
#[derive(Debug)]
pub(super) enum Unexpected {
    Eager(Vec<u8>),
    Rendezvous(Box<Rendezvous>),
}

impl Unexpected {
    fn len(&self) -> u64 {
        match self {
            Unexpected::Eager(bytes) => bytes.len() as u64,
            Unexpected::Rendezvous(rendezvous) => rendezvous.region.region.len(),
        }
    }
}

/// A message that has been matched.
enum Arrived<'a> {
    Bytes(&'a [u8]),
    Rendezvous(&'a Rendezvous),
}

#[derive(Debug)]
struct SendSlot {
    to: MemberId,
    tag: u64,
    buffer: Option<Buffer>,
    start: usize,
    len: usize,
    /// The offset of the next part of an eager message; and whether other messages wait for it.
    progress: LongSend,
    ended: Option<Result<(), GroupError>>,
    /// The handle is gone: the slot is free when the send has ended.
    detached: bool,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct RecvSlot {
    buffer: Option<Buffer>,
    posted: Option<PostedId>,
    ended: Option<Result<MessageInfo, GroupError>>,
    detached: bool,
    waker: Option<Waker>,
}

/// A table whose entries are named by index and generation.
#[derive(Debug)]
struct Slots<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Slots<T> {
    fn new(size: u32) -> Slots<T> {
        let slots = (0..size).map(|_| (0, None)).collect();
        Slots { slots, free: (0..size).rev().collect() }
    }

    fn insert(&mut self, value: T) -> Result<u64, T> {
        let Some(index) = self.free.pop() else { return Err(value) };
        let (generation, slot) = &mut self.slots[index as usize];
        *slot = Some(value);
        Ok(u64::from(*generation) << 32 | u64::from(index))
    }

    fn get(&mut self, key: u64) -> Option<&mut T> {
        let (generation, slot) = self.slots.get_mut(key as u32 as usize)?;
        slot.as_mut().filter(|_| u64::from(*generation) == key >> 32)
    }

    fn remove(&mut self, key: u64) -> Option<T> {
        self.get(key)?;
        let (generation, slot) = &mut self.slots[key as u32 as usize];
        *generation = generation.wrapping_add(1);
        self.free.push(key as u32);
        slot.take()
    }

    fn keys(&self) -> impl Iterator<Item = u64> + '_ {
        let used = self.slots.iter().enumerate().filter(|(_, (_, slot))| slot.is_some());
        used.map(|(index, (generation, _))| u64::from(*generation) << 32 | index as u64)
    }
}

/// A PULL in flight.
#[derive(Debug)]
struct Pull {
    operation: OperationFuture<Buffer>,
    recv: u64,
    info: MessageInfo,
    send_key: u64,
}

/// Tagged messages of one channel.
#[derive(Debug)]
pub(super) struct TaggedState {
    options: TaggedOptions,
    matcher: Matcher<u64, Unexpected>,
    sends: Slots<SendSlot>,
    recvs: Slots<RecvSlot>,
    /// Sends of each destination that are not in the send buffer yet, and how many there are in all.
    outbox: Box<[VecDeque<u64>]>,
    queued: usize,
    pulls: Vec<Pull>,
    /// Matched messages whose PULL found no room.
    waiting_pulls: VecDeque<(u64, MemberId, Box<Rendezvous>)>,
    /// Answers that found no room.
    answers: VecDeque<(MemberId, Pulled)>,
    unexpected_bytes: usize,
    spare: Vec<Vec<u8>>,
    pub(super) counters: TaggedCounters,
}

/// What tagged messages of a channel have done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TaggedCounters {
    pub(super) pulls: u64,
    pub(super) unexpected: u64,
}

impl TaggedState {
    pub(super) fn new(options: &TaggedOptions, members: usize) -> TaggedState {
        TaggedState {
            options: *options,
            matcher: Matcher::new(options.receives as usize, options.unexpected as usize),
            sends: Slots::new(options.sends),
            recvs: Slots::new(options.receives),
            outbox: (0..members).map(|_| VecDeque::new()).collect(),
            queued: 0,
            pulls: Vec::new(),
            waiting_pulls: VecDeque::new(),
            answers: VecDeque::new(),
            unexpected_bytes: 0,
            spare: Vec::new(),
            counters: TaggedCounters::default(),
        }
    }

    /// Whether a pass has something to do although no packet has come.
    pub(super) fn is_busy(&self) -> bool {
        !self.pulls.is_empty()
            || !self.answers.is_empty()
            || !self.waiting_pulls.is_empty()
            || self.queued > 0
    }

    pub(super) fn unexpected(&self) -> usize {
        self.matcher.unexpected()
    }

    pub(super) fn probe(&self, from: Option<MemberId>, tag: Option<u64>) -> Option<MessageInfo> {
        let (from, tag, message) = self.matcher.probe(from, tag)?;
        Some(MessageInfo { from, tag, len: message.len() })
    }

    fn end_send(&mut self, key: u64, result: Result<(), GroupError>) {
        let Some(slot) = self.sends.get(key).filter(|slot| slot.ended.is_none()) else { return };
        slot.ended = Some(result);
        let waker = slot.waker.take();
        if slot.detached {
            self.sends.remove(key);
        }
        waker.into_iter().for_each(Waker::wake);
    }

    fn end_recv(&mut self, key: u64, buffer: Option<Buffer>, result: Result<MessageInfo, GroupError>) {
        let Some(slot) = self.recvs.get(key) else { return };
        slot.ended = Some(result);
        slot.buffer = buffer;
        let waker = slot.waker.take();
        if slot.detached {
            self.recvs.remove(key);
        }
        waker.into_iter().for_each(Waker::wake);
    }

    /// How a send has ended, once it has.
    pub(super) fn take_send(&mut self, key: u64) -> Option<SendEnd> {
        self.sends.get(key)?.ended.as_ref()?;
        let slot = self.sends.remove(key)?;
        Some((slot.ended?, slot.buffer))
    }

    /// How a receive has ended, once it has.
    pub(super) fn take_recv(&mut self, key: u64) -> Option<RecvEnd> {
        self.recvs.get(key)?.ended.as_ref()?;
        let slot = self.recvs.remove(key)?;
        Some((slot.ended?, slot.buffer))
    }

    pub(super) fn set_send_waker(&mut self, key: u64, waker: &Waker) {
        if let Some(slot) = self.sends.get(key) {
            slot.waker = Some(waker.clone());
        }
    }

    pub(super) fn set_recv_waker(&mut self, key: u64, waker: &Waker) {
        if let Some(slot) = self.recvs.get(key) {
            slot.waker = Some(waker.clone());
        }
    }

    /// Nobody waits for the send any more. It goes on.
    pub(super) fn detach_send(&mut self, key: u64) {
        if let Some(slot) = self.sends.get(key) {
            slot.detached = true;
            if slot.ended.is_some() {
                self.sends.remove(key);
            }
        }
    }

    /// Stops a receive. Returns its buffer if no message has matched it.
    pub(super) fn cancel_recv(&mut self, key: u64) -> Option<Buffer> {
        let slot = self.recvs.get(key)?;
        if slot.ended.is_some() {
            return self.recvs.remove(key)?.buffer;
        }
        if let Some(posted) = slot.posted
            && self.matcher.cancel(posted).is_some()
        {
            return self.recvs.remove(key)?.buffer;
        }
        // A PULL writes into the buffer.
        slot.detached = true;
        None
    }

    /// A member is dead: what only it could end, ends.
    pub(super) fn drop_peer(&mut self, member: MemberId, nobody_left: bool) {
        self.queued -= self.outbox[member.index()].len();
        self.outbox[member.index()].clear();
        self.answers.retain(|(to, _)| *to != member);
        let sends: Vec<u64> = self.sends.keys().collect();
        for key in sends {
            if self.sends.get(key).is_some_and(|slot| slot.to == member) {
                self.end_send(key, Err(GroupError::PeerDead(member)));
            }
        }
        while let Some(key) = self.matcher.take_receive_from(member) {
            let buffer = self.recvs.get(key).and_then(|slot| slot.buffer.take());
            self.end_recv(key, buffer, Err(GroupError::PeerDead(member)));
        }
        while nobody_left && let Some(key) = self.matcher.take_any_receive() {
            let buffer = self.recvs.get(key).and_then(|slot| slot.buffer.take());
            self.end_recv(key, buffer, Err(GroupError::NobodyLeft));
        }
    }
}

impl Engine {
    fn tagged(&mut self, id: u16) -> Option<&mut TaggedState> {
        self.channels[usize::from(id)].as_mut()?.tagged.as_deref_mut()
    }

    /// Starts a send. `Ok(None)`: it has ended, and the buffer is the caller's again.
    pub(super) fn start_send(
        &mut self,
        id: u16,
        to: MemberId,
        tag: u64,
        buffer: Buffer,
        start: usize,
        len: usize,
    ) -> Result<Result<u64, Buffer>, (GroupError, Buffer)> {
        if let Err(error) = self.check_destination(to) {
            return Err((error, buffer));
        }
        let can_pull = self.one_sided.is_some();
        let Some(tagged) = self.tagged(id) else { return Err((GroupError::InvalidChannel(id), buffer)) };
        let eager = !can_pull || len <= tagged.options.eager_max as usize;
        let progress = LongSend { channel: id, to, offset: 0, owner: None };
        if eager && tagged.outbox[to.index()].is_empty() {
            // The usual case: it fits into the send buffer now.
            let mut progress = progress;
            let prefix = tag.to_le_bytes();
            let body = Source::Region { region: buffer.region(), start: buffer.start() + start, len };
            let parts = Parts { flags: flags::TAGGED, prefix: &prefix, body };
            match self.step_send(&mut progress, &parts) {
                Some(Ok(())) => return Ok(Err(buffer)),
                Some(Err(error)) => return Err((error, buffer)),
                None => return self.queue_send(id, to, tag, buffer, start, len, progress),
            }
        }
        let queued = self.queue_send(id, to, tag, buffer, start, len, progress);
        self.send_queued(id);
        queued
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of a send")]
    fn queue_send(
        &mut self,
        id: u16,
        to: MemberId,
        tag: u64,
        buffer: Buffer,
        start: usize,
        len: usize,
        progress: LongSend,
    ) -> Result<Result<u64, Buffer>, (GroupError, Buffer)> {
        let owner = progress.owner;
        let Some(tagged) = self.tagged(id) else { return Err((GroupError::InvalidChannel(id), buffer)) };
        let limit = tagged.options.sends;
        let slot = SendSlot {
            to,
            tag,
            buffer: Some(buffer),
            start,
            len,
            progress,
            ended: None,
            detached: false,
            waker: None,
        };
        match tagged.sends.insert(slot) {
            Ok(key) => {
                tagged.outbox[to.index()].push_back(key);
                tagged.queued += 1;
                Ok(Ok(key))
            }
            Err(slot) => {
                // Parts of it may be on their way already: without a slot they could not be completed.
                debug_assert!(owner.is_none());
                match slot.buffer {
                    Some(buffer) => Err((GroupError::TooManyRequests(limit), buffer)),
                    None => unreachable!("the buffer was given above"),
                }
            }
        }
    }

    /// Whether one more send would find a slot.
    pub(super) fn has_send_slot(&mut self, id: u16) -> bool {
        self.tagged(id).is_some_and(|tagged| !tagged.sends.free.is_empty())
    }

    /// Whether nothing waits for room in the send buffer before a message to this member.
    pub(super) fn has_empty_outbox(&mut self, id: u16, to: MemberId) -> bool {
        self.send_queued(id);
        self.tagged(id).is_none_or(|tagged| tagged.outbox[to.index()].is_empty())
    }

    /// Moves sends into the send buffer, in order for each destination.
    fn send_queued(&mut self, id: u16) {
        if self.tagged(id).is_none_or(|tagged| tagged.queued == 0) {
            return;
        }
        for to in 0..self.members {
            while let Some(key) = self.tagged(id).and_then(|tagged| tagged.outbox[to].front().copied()) {
                let ended = self.step_queued(id, key);
                let Some(tagged) = self.tagged(id) else { return };
                match ended {
                    None => break,
                    Some(result) => {
                        tagged.outbox[to].pop_front();
                        tagged.queued -= 1;
                        if let Some(result) = result {
                            tagged.end_send(key, result);
                            if let Some(channel) = &mut self.channels[usize::from(id)] {
                                channel.changed = true;
                            }
                        }
                    }
                }
            }
        }
    }

    /// Sends what there is room for. `Some`: it has left the outbox, and perhaps ended.
    fn step_queued(&mut self, id: u16, key: u64) -> Option<Option<Result<(), GroupError>>> {
        let one_sided = self.one_sided.clone();
        let tagged = self.tagged(id)?;
        let eager_max = tagged.options.eager_max as usize;
        let slot = tagged.sends.get(key)?;
        let tag = slot.tag;
        let buffer = slot.buffer.take()?;
        let mut progress = core::mem::replace(
            &mut slot.progress,
            LongSend { channel: id, to: slot.to, offset: 0, owner: None },
        );
        let (start, len) = (slot.start, slot.len);
        let stepped = match one_sided.filter(|_| len > eager_max) {
            None => {
                let body = Source::Region { region: buffer.region(), start: buffer.start() + start, len };
                let parts = Parts { flags: flags::TAGGED, prefix: &tag.to_le_bytes(), body };
                self.step_send(&mut progress, &parts).map(Some)
            }
            Some(one_sided) => {
                let mut region = one_sided.describe(&buffer);
                match region.region.slice(start as u64, len as u64) {
                    Ok(slice) => region.region = slice,
                    Err(error) => unreachable!("the range was checked: {error}"),
                }
                let bytes = Rendezvous { tag, key, region }.encode();
                let parts = Parts {
                    flags: flags::TAGGED | flags::RENDEZVOUS,
                    prefix: &[],
                    body: Source::Bytes(&bytes),
                };
                // It ends when the receiver has pulled it.
                self.step_send(&mut progress, &parts).map(|sent| sent.err().map(Err))
            }
        };
        if let Some(slot) = self.tagged(id).and_then(|tagged| tagged.sends.get(key)) {
            slot.buffer = Some(buffer);
            slot.progress = progress;
        }
        stepped
    }

    /// Posts a receive.
    pub(super) fn start_recv(
        &mut self,
        id: u16,
        from: Option<MemberId>,
        tag: Option<u64>,
        buffer: Buffer,
    ) -> Result<u64, (GroupError, Buffer)> {
        if let Some(from) = from
            && let Err(error) = self.check_destination(from)
        {
            return Err((error, buffer));
        }
        // Messages that came before are matched before.
        self.serve_tagged(id);
        let is_dead = from.is_some_and(|from| self.machine.dead().contains(from));
        let is_alone = self.is_alone();
        let Some(tagged) = self.tagged(id) else { return Err((GroupError::InvalidChannel(id), buffer)) };
        let slot = RecvSlot { buffer: Some(buffer), posted: None, ended: None, detached: false, waker: None };
        let key = match tagged.recvs.insert(slot) {
            Ok(key) => key,
            Err(slot) => match slot.buffer {
                Some(buffer) => return Err((GroupError::TooManyRequests(tagged.options.receives), buffer)),
                None => unreachable!("the buffer was given above"),
            },
        };
        match tagged.matcher.post(from, tag, key) {
            Ok((posted, None)) => {
                if let Some(slot) = tagged.recvs.get(key) {
                    slot.posted = posted;
                }
                // No message can come any more.
                let error = match from {
                    Some(from) if is_dead => Some(GroupError::PeerDead(from)),
                    None if is_alone => Some(GroupError::NobodyLeft),
                    _ => None,
                };
                if let (Some(error), Some(posted)) = (error, posted) {
                    tagged.matcher.cancel(posted);
                    if let Some(buffer) = tagged.recvs.remove(key).and_then(|slot| slot.buffer) {
                        return Err((error, buffer));
                    }
                }
            }
            Ok((_, Some(Matched { message, source, tag, .. }))) => match message {
                Unexpected::Eager(mut bytes) => {
                    tagged.unexpected_bytes -= bytes.len();
                    tagged.receive_bytes(key, source, tag, &bytes);
                    if tagged.spare.len() < SPARE_VECTORS {
                        bytes.clear();
                        tagged.spare.push(bytes);
                    }
                    // There may be room for messages that waited in the receive buffer.
                    self.serve_tagged(id);
                }
                Unexpected::Rendezvous(rendezvous) => self.start_pull(id, key, source, &rendezvous),
            },
            // There are as many places as slots.
            Err(_) => unreachable!("the matcher is as large as the table of receives"),
        }
        Ok(key)
    }

    /// Matches what has arrived, looks after PULLs, and sends what waited for room.
    #[inline]
    pub(super) fn serve_tagged(&mut self, id: u16) {
        let Some(channel) = &self.channels[usize::from(id)] else { return };
        let Some(tagged) = &channel.tagged else { return };
        if channel.ready.is_empty() && !tagged.is_busy() {
            return;
        }
        self.match_arrived(id);
        self.poll_pulls(id);
        self.send_answers(id);
        self.send_queued(id);
    }

    fn match_arrived(&mut self, id: u16) {
        let dead = *self.machine.dead();
        loop {
            let Some(channel) = self.channels[usize::from(id)].as_deref_mut() else { return };
            let Some(tagged) = channel.tagged.as_deref_mut() else { return };
            let Some(ready) = channel.ready.pop_front() else { return };
            let Ready { from, flags: kind, .. } = ready;
            let bytes = super::channel::bytes_of(&channel.receive_memory, &ready.body);
            let kind = kind & (flags::TAGGED | flags::RENDEZVOUS | flags::PULLED | flags::FENCED);
            let mut pull = None;
            let valid = if kind == flags::TAGGED {
                match decode_tag(bytes) {
                    Some(tag) => {
                        if !tagged.arrive(from, tag, Arrived::Bytes(&bytes[TAG_SIZE..])) {
                            // No room for it: it stays in the receive buffer until receives are posted.
                            channel.ready.push_front(ready);
                            return;
                        }
                        true
                    }
                    None => false,
                }
            } else if kind == flags::TAGGED | flags::RENDEZVOUS {
                match Rendezvous::decode(bytes) {
                    // A member describes its own memory.
                    Ok(rendezvous) if rendezvous.region.member == from => {
                        let region = &rendezvous.region;
                        if self.gate.check_region(&region.encode(), &dead).is_ok() {
                            match tagged.matcher.take_receive(from, rendezvous.tag) {
                                Some(recv) => pull = Some((recv, rendezvous)),
                                None => {
                                    if !tagged.arrive(from, rendezvous.tag, Arrived::Rendezvous(&rendezvous))
                                    {
                                        channel.ready.push_front(ready);
                                        return;
                                    }
                                }
                            }
                        }
                        true
                    }
                    _ => false,
                }
            } else if kind == flags::PULLED {
                match Pulled::decode(bytes) {
                    // Only the receiver of a rendezvous may end it.
                    Ok(pulled) if tagged.sends.get(pulled.key).is_some_and(|slot| slot.to == from) => {
                        let result = if pulled.succeeded { Ok(()) } else { Err(GroupError::NotPulled(from)) };
                        tagged.end_send(pulled.key, result);
                        true
                    }
                    Ok(_) => false,
                    Err(_) => false,
                }
            } else {
                false
            };
            channel.release(&ready.body);
            channel.changed = true;
            if !valid {
                self.gate.count_invalid();
            }
            if let Some((recv, rendezvous)) = pull {
                self.start_pull(id, recv, from, &rendezvous);
            }
        }
    }

    fn start_pull(&mut self, id: u16, recv: u64, from: MemberId, rendezvous: &Rendezvous) {
        let one_sided = self.one_sided.clone();
        let is_dead = self.machine.dead().contains(from);
        let Some(tagged) = self.tagged(id) else { return };
        let len = rendezvous.region.region.len();
        let info = MessageInfo { from, tag: rendezvous.tag, len };
        let Some(buffer) = tagged.recvs.get(recv).and_then(|slot| slot.buffer.take()) else { return };
        let send_key = rendezvous.key;
        if len > buffer.len() as u64 {
            let room = buffer.len() as u64;
            tagged.end_recv(
                recv,
                Some(buffer),
                Err(GroupError::Truncated { from, tag: info.tag, len, room }),
            );
            tagged.answers.push_back((from, Pulled { key: send_key, succeeded: true }));
            return;
        }
        let memory = match &one_sided {
            Some(one_sided) => one_sided.import(&rendezvous.region),
            None => Err(GroupError::NotOneSided),
        };
        let endpoint = one_sided.as_ref().and_then(|one_sided| one_sided.endpoint(from));
        let (memory, endpoint) = match (memory, endpoint) {
            (Ok(memory), Some(endpoint)) => (memory, endpoint),
            (memory, _) => {
                let error = match memory {
                    Err(error) if !is_dead => error,
                    _ => GroupError::PeerDead(from),
                };
                tagged.end_recv(recv, Some(buffer), Err(error));
                tagged.answers.push_back((from, Pulled { key: send_key, succeeded: false }));
                return;
            }
        };
        tagged.counters.pulls += 1;
        match endpoint.read(buffer, ..len as usize, &memory.remote(), 0) {
            Ok(operation) => {
                tagged.pulls.push(Pull { operation, recv, info, send_key });
                self.poll_pulls(id);
            }
            Err(refused) if refused.cause.is_back_pressure() => {
                tagged.counters.pulls -= 1;
                if let Some(slot) = tagged.recvs.get(recv) {
                    slot.buffer = Some(refused.buffer);
                }
                tagged.waiting_pulls.push_back((recv, from, Box::new(*rendezvous)));
            }
            Err(refused) => {
                let error = match refused.cause {
                    NotStarted::Ended(_) => GroupError::PeerDead(from),
                    cause => GroupError::NotStarted(cause),
                };
                tagged.end_recv(recv, Some(refused.buffer), Err(error));
                tagged.answers.push_back((from, Pulled { key: send_key, succeeded: false }));
            }
        }
    }

    fn poll_pulls(&mut self, id: u16) {
        let Some(tagged) = self.tagged(id) else { return };
        let mut index = 0;
        let mut changed = false;
        while index < tagged.pulls.len() {
            let Some(result) = tagged.pulls[index].operation.try_take() else {
                index += 1;
                continue;
            };
            let Pull { recv, info, send_key, .. } = tagged.pulls.swap_remove(index);
            let succeeded = result.is_ok();
            match result {
                Ok(completed) => tagged.end_recv(recv, Some(completed.buffer), Ok(info)),
                Err(mut failed) => {
                    let error = GroupError::Operation { member: info.from, cause: failed.cause };
                    tagged.end_recv(recv, failed.buffer.try_take(), Err(error));
                }
            }
            tagged.answers.push_back((info.from, Pulled { key: send_key, succeeded }));
            changed = true;
        }
        if !changed {
            return;
        }
        // A PULL has ended: others that waited can start.
        if let Some((recv, from, rendezvous)) = tagged.waiting_pulls.pop_front() {
            self.start_pull(id, recv, from, &rendezvous);
        }
        if let Some(channel) = &mut self.channels[usize::from(id)] {
            channel.changed = true;
        }
        self.send_answers(id);
    }

    fn send_answers(&mut self, id: u16) {
        while let Some((to, pulled)) = self.tagged(id).and_then(|tagged| tagged.answers.front().copied()) {
            let parts = Parts { flags: flags::PULLED, prefix: &[], body: Source::Bytes(&pulled.encode()) };
            let mut progress = LongSend { channel: id, to, offset: 0, owner: None };
            if self.step_send(&mut progress, &parts).is_none() {
                return;
            }
            if let Some(tagged) = self.tagged(id) {
                tagged.answers.pop_front();
            }
        }
    }
}

impl TaggedState {
    /// Matches a message, or stores it. `false`: there is no room to store it.
    fn arrive(&mut self, from: MemberId, tag: u64, arrived: Arrived<'_>) -> bool {
        let bytes = match arrived {
            Arrived::Bytes(bytes) => {
                if let Some(recv) = self.matcher.take_receive(from, tag) {
                    self.receive_bytes(recv, from, tag, bytes);
                    return true;
                }
                bytes
            }
            Arrived::Rendezvous(_) => &[],
        };
        let full = self.unexpected_bytes + bytes.len() > self.options.unexpected_bytes as usize
            && self.unexpected_bytes > 0;
        if full || !self.matcher.has_room_for_unexpected() {
            return false;
        }
        let message = match arrived {
            Arrived::Bytes(bytes) => {
                let mut copy = self.spare.pop().unwrap_or_default();
                copy.extend_from_slice(bytes);
                self.unexpected_bytes += bytes.len();
                Unexpected::Eager(copy)
            }
            Arrived::Rendezvous(rendezvous) => Unexpected::Rendezvous(Box::new(*rendezvous)),
        };
        self.counters.unexpected += 1;
        match self.matcher.arrive(from, tag, message) {
            Ok(None) => true,
            _ => unreachable!("no receive matches, and there is room"),
        }
    }

    fn receive_bytes(&mut self, recv: u64, from: MemberId, tag: u64, bytes: &[u8]) {
        let Some(buffer) = self.recvs.get(recv).and_then(|slot| slot.buffer.take()) else { return };
        let len = bytes.len() as u64;
        let result = match buffer.write(0, bytes) {
            Ok(()) => Ok(MessageInfo { from, tag, len }),
            Err(_) => Err(GroupError::Truncated { from, tag, len, room: buffer.len() as u64 }),
        };
        self.end_recv(recv, Some(buffer), result);
    }
}
