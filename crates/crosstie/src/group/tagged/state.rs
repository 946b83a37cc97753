//! What a channel knows of its tagged messages: sends, receives, and messages that wait for a receive.

use core::task::Waker;
use std::collections::VecDeque;

use crosstie_protocol::group::MemberId;
use crosstie_protocol::group::message::{Matcher, PostedId, Pulled, Rendezvous};

use super::{MessageInfo, TaggedOptions};
use crate::endpoint::{Buffer, OperationFuture};
use crate::group::error::GroupError;
use crate::group::message::LongSend;

/// Vectors of unexpected messages that are kept for the next ones.
pub(super) const SPARE_VECTORS: usize = 32;

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
pub(super) enum Arrived<'a> {
    Bytes(&'a [u8]),
    Rendezvous(&'a Rendezvous),
}

#[derive(Debug)]
pub(super) struct SendSlot {
    pub(super) to: MemberId,
    pub(super) tag: u64,
    pub(super) buffer: Option<Buffer>,
    pub(super) start: usize,
    pub(super) len: usize,
    /// The offset of the next part of an eager message; and whether other messages wait for it.
    pub(super) progress: LongSend,
    pub(super) ended: Option<Result<(), GroupError>>,
    /// The handle is gone: the slot is free when the send has ended.
    pub(super) detached: bool,
    pub(super) waker: Option<Waker>,
}

#[derive(Debug)]
pub(super) struct RecvSlot {
    pub(super) buffer: Option<Buffer>,
    pub(super) posted: Option<PostedId>,
    pub(super) ended: Option<Result<MessageInfo, GroupError>>,
    pub(super) detached: bool,
    pub(super) waker: Option<Waker>,
}

/// A table whose entries are named by index and generation.
#[derive(Debug)]
pub(super) struct Slots<T> {
    pub(super) slots: Vec<(u32, Option<T>)>,
    pub(super) free: Vec<u32>,
}

impl<T> Slots<T> {
    pub(super) fn new(size: u32) -> Slots<T> {
        let slots = (0..size).map(|_| (0, None)).collect();
        Slots { slots, free: (0..size).rev().collect() }
    }

    pub(super) fn insert(&mut self, value: T) -> Result<u64, T> {
        let Some(index) = self.free.pop() else { return Err(value) };
        let (generation, slot) = &mut self.slots[index as usize];
        *slot = Some(value);
        Ok(u64::from(*generation) << 32 | u64::from(index))
    }

    pub(super) fn get(&mut self, key: u64) -> Option<&mut T> {
        let (generation, slot) = self.slots.get_mut(key as u32 as usize)?;
        slot.as_mut().filter(|_| u64::from(*generation) == key >> 32)
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<T> {
        self.get(key)?;
        let (generation, slot) = &mut self.slots[key as u32 as usize];
        *generation = generation.wrapping_add(1);
        self.free.push(key as u32);
        slot.take()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = u64> + '_ {
        let used = self.slots.iter().enumerate().filter(|(_, (_, slot))| slot.is_some());
        used.map(|(index, (generation, _))| u64::from(*generation) << 32 | index as u64)
    }
}

/// A PULL in flight.
#[derive(Debug)]
pub(super) struct Pull {
    pub(super) operation: OperationFuture<Buffer>,
    pub(super) recv: u64,
    pub(super) info: MessageInfo,
    pub(super) send_key: u64,
}

/// Tagged messages of one channel.
#[derive(Debug)]
pub(in crate::group) struct TaggedState {
    pub(super) options: TaggedOptions,
    pub(super) matcher: Matcher<u64, Unexpected>,
    pub(super) sends: Slots<SendSlot>,
    pub(super) recvs: Slots<RecvSlot>,
    /// Sends of each destination that are not in the send buffer yet, and how many there are in all.
    pub(super) outbox: Box<[VecDeque<u64>]>,
    pub(super) queued: usize,
    pub(super) pulls: Vec<Pull>,
    /// Matched messages whose PULL found no room.
    pub(super) waiting_pulls: VecDeque<(u64, MemberId, Box<Rendezvous>)>,
    /// Answers to each member that are not in the send buffer yet, and how many there are in all.
    pub(super) answers: Box<[VecDeque<Pulled>]>,
    pub(super) unanswered: usize,
    /// Messages of each member that wait for a receive, and bytes of the short ones. Each member has an equal part of both limits.
    pub(super) unexpected_of: Box<[(u32, usize)]>,
    unexpected_max: (u32, usize),
    pub(super) spare: Vec<Vec<u8>>,
    /// Futures to wake when the engine was given back.
    pub(in crate::group) to_wake: Vec<Waker>,
    pub(in crate::group) counters: TaggedCounters,
}

/// What tagged messages of a channel have done.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::group) struct TaggedCounters {
    pub(in crate::group) pulls: u64,
    pub(in crate::group) unexpected: u64,
}

impl TaggedState {
    pub(in crate::group) fn new(options: &TaggedOptions, members: usize) -> TaggedState {
        let peers = (members - 1).max(1);
        let unexpected_max =
            ((options.unexpected / peers as u32).max(1), options.unexpected_bytes as usize / peers);
        TaggedState {
            options: *options,
            matcher: Matcher::new(options.receives as usize, unexpected_max.0 as usize * peers),
            sends: Slots::new(options.sends),
            recvs: Slots::new(options.receives),
            outbox: (0..members).map(|_| VecDeque::new()).collect(),
            queued: 0,
            pulls: Vec::new(),
            waiting_pulls: VecDeque::new(),
            answers: (0..members).map(|_| VecDeque::new()).collect(),
            unanswered: 0,
            unexpected_of: vec![(0, 0); members].into_boxed_slice(),
            unexpected_max,
            spare: Vec::new(),
            to_wake: Vec::new(),
            counters: TaggedCounters::default(),
        }
    }

    /// Whether a pass has something to do although no packet has come.
    pub(in crate::group) fn is_busy(&self) -> bool {
        !self.pulls.is_empty() || self.unanswered > 0 || !self.waiting_pulls.is_empty() || self.queued > 0
    }

    pub(in crate::group) fn unexpected(&self) -> usize {
        self.matcher.unexpected()
    }

    pub(in crate::group) fn probe(&self, from: Option<MemberId>, tag: Option<u64>) -> Option<MessageInfo> {
        let (from, tag, message) = self.matcher.probe(from, tag)?;
        Some(MessageInfo { from, tag, len: message.len() })
    }

    pub(super) fn end_send(&mut self, key: u64, result: Result<(), GroupError>) {
        let Some(slot) = self.sends.get(key).filter(|slot| slot.ended.is_none()) else { return };
        slot.ended = Some(result);
        let waker = slot.waker.take();
        if slot.detached {
            self.sends.remove(key);
        }
        self.to_wake.extend(waker);
    }

    pub(super) fn end_recv(
        &mut self,
        key: u64,
        buffer: Option<Buffer>,
        result: Result<MessageInfo, GroupError>,
    ) {
        let Some(slot) = self.recvs.get(key) else { return };
        slot.ended = Some(result);
        slot.buffer = buffer;
        let waker = slot.waker.take();
        if slot.detached {
            self.recvs.remove(key);
        }
        self.to_wake.extend(waker);
    }

    /// How a send has ended, once it has.
    pub(in crate::group) fn take_send(&mut self, key: u64) -> Option<SendEnd> {
        self.sends.get(key)?.ended.as_ref()?;
        let slot = self.sends.remove(key)?;
        Some((slot.ended?, slot.buffer))
    }

    /// How a receive has ended, once it has.
    pub(in crate::group) fn take_recv(&mut self, key: u64) -> Option<RecvEnd> {
        self.recvs.get(key)?.ended.as_ref()?;
        let slot = self.recvs.remove(key)?;
        Some((slot.ended?, slot.buffer))
    }

    pub(in crate::group) fn set_send_waker(&mut self, key: u64, waker: &Waker) {
        if let Some(slot) = self.sends.get(key) {
            slot.waker = Some(waker.clone());
        }
    }

    pub(in crate::group) fn set_recv_waker(&mut self, key: u64, waker: &Waker) {
        if let Some(slot) = self.recvs.get(key) {
            slot.waker = Some(waker.clone());
        }
    }

    /// Nobody waits for the send any more. It goes on.
    pub(in crate::group) fn detach_send(&mut self, key: u64) {
        if let Some(slot) = self.sends.get(key) {
            slot.detached = true;
            if slot.ended.is_some() {
                self.sends.remove(key);
            }
        }
    }

    /// Stops a receive that no message has matched, and returns its buffer.
    pub(in crate::group) fn cancel_recv(&mut self, key: u64) -> Option<Buffer> {
        let posted = self.recvs.get(key)?.posted?;
        self.matcher.cancel(posted)?;
        self.recvs.remove(key)?.buffer
    }

    /// Nobody waits for the receive any more. It is stopped, unless a message has matched it: then that is received, and is gone.
    pub(in crate::group) fn detach_recv(&mut self, key: u64) -> Option<Buffer> {
        let buffer = self.cancel_recv(key);
        if let Some(slot) = self.recvs.get(key) {
            slot.detached = true;
            if slot.ended.is_some() {
                self.recvs.remove(key);
            }
        }
        buffer
    }

    /// Tells the sender of a long message what became of it.
    pub(super) fn answer(&mut self, to: MemberId, key: u64, succeeded: bool) {
        self.answers[to.index()].push_back(Pulled { key, succeeded });
        self.unanswered += 1;
    }

    /// A member is dead: what only it could end, ends.
    pub(in crate::group) fn drop_peer(&mut self, member: MemberId, nobody_left: bool) {
        self.queued -= self.outbox[member.index()].len();
        self.outbox[member.index()].clear();
        self.unanswered -= self.answers[member.index()].len();
        self.answers[member.index()].clear();
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

impl TaggedState {
    /// The receiver of a long message has read it, or cannot. Returns whether this member may say so.
    pub(super) fn on_pulled(&mut self, from: MemberId, bytes: &[u8]) -> bool {
        match Pulled::decode(bytes) {
            // Only the receiver of a rendezvous may end it.
            Ok(pulled) if self.sends.get(pulled.key).is_some_and(|slot| slot.to == from) => {
                let result = if pulled.succeeded { Ok(()) } else { Err(GroupError::NotPulled(from)) };
                self.end_send(pulled.key, result);
                true
            }
            _ => false,
        }
    }

    /// A receive takes a message that waited.
    pub(super) fn count_expected(&mut self, from: MemberId, bytes: usize) {
        let (count, waiting) = &mut self.unexpected_of[from.index()];
        (*count, *waiting) = (*count - 1, *waiting - bytes);
    }

    /// Matches a message, or stores it. `false`: there is no room to store it.
    pub(super) fn arrive(&mut self, from: MemberId, tag: u64, arrived: Arrived<'_>) -> bool {
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
        let (count, waiting) = &mut self.unexpected_of[from.index()];
        let full = *waiting + bytes.len() > self.unexpected_max.1 && *waiting > 0;
        if full || *count >= self.unexpected_max.0 {
            return false;
        }
        (*count, *waiting) = (*count + 1, *waiting + bytes.len());
        let message = match arrived {
            Arrived::Bytes(bytes) => {
                let mut copy = self.spare.pop().unwrap_or_default();
                copy.extend_from_slice(bytes);
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

    pub(super) fn receive_bytes(&mut self, recv: u64, from: MemberId, tag: u64, bytes: &[u8]) {
        let Some(buffer) = self.recvs.get(recv).and_then(|slot| slot.buffer.take()) else { return };
        let len = bytes.len() as u64;
        let result = match buffer.write(0, bytes) {
            Ok(()) => Ok(MessageInfo { from, tag, len }),
            Err(_) => Err(GroupError::Truncated { from, tag, len, room: buffer.len() as u64 }),
        };
        self.end_recv(recv, Some(buffer), result);
    }
}
