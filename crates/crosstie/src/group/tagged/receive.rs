//! Receives: posting, and matching of what has arrived.

use crosstie_protocol::group::message::{Matched, Rendezvous, TAG_SIZE, decode_tag};
use crosstie_protocol::group::{Limits, MemberId, flags};

use super::state::{Arrived, RecvSlot, SPARE_VECTORS, Unexpected};
use crate::endpoint::Buffer;
use crate::group::channel::{self, Front};
use crate::group::engine::Engine;
use crate::group::error::GroupError;

impl Engine {
    /// Posts a receive.
    pub(in crate::group) fn start_recv(
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
                    tagged.count_expected(source, bytes.len());
                    tagged.receive_bytes(key, source, tag, &bytes);
                    if tagged.spare.len() < SPARE_VECTORS {
                        bytes.clear();
                        tagged.spare.push(bytes);
                    }
                    // There may be room for messages that waited in the receive buffer.
                    self.serve_tagged(id);
                }
                Unexpected::Rendezvous(rendezvous) => {
                    tagged.count_expected(source, 0);
                    self.pull(id, key, source, &rendezvous);
                    self.poll_pulls(id);
                }
            },
            // There are as many places as slots.
            Err(_) => unreachable!("the matcher is as large as the table of receives"),
        }
        Ok(key)
    }

    /// Matches what has arrived, looks after PULLs, and sends what waited for room.
    #[inline]
    pub(in crate::group) fn serve_tagged(&mut self, id: u16) {
        let Some(channel) = &self.channels[usize::from(id)] else { return };
        let Some(tagged) = &channel.tagged else { return };
        if channel.ready.is_empty() && channel.blocked_packets == 0 && !tagged.is_busy() {
            return;
        }
        self.match_arrived(id);
        self.poll_pulls(id);
        self.send_answers(id);
        self.send_queued(id);
        self.collect_wakers(id);
    }

    /// Futures of tagged messages that have ended are woken when the engine was given back.
    pub(in crate::group) fn collect_wakers(&mut self, id: u16) {
        if let Some(channel) = &mut self.channels[usize::from(id)]
            && let Some(tagged) = &mut channel.tagged
        {
            self.wires.results.to_wake.append(&mut tagged.to_wake);
        }
    }

    /// Matches all messages that have arrived. Those of a sender of which too many wait for a receive stay in the receive buffer, in order, until
    /// receives are posted: that sender gets no more credit, and nobody else waits for it.
    fn match_arrived(&mut self, id: u16) {
        let Some(channel) = self.channels[usize::from(id)].as_deref() else { return };
        if channel.blocked_packets > 0 {
            for from in (0..self.members).map(MemberId::new) {
                while self.match_front(id, Some(from)) {}
            }
        }
        while let Some(channel) = self.channels[usize::from(id)].as_deref()
            && let Some(front) = channel::front(&channel.ready, &channel.receive_memory)
        {
            if channel.blocked[front.from.index()].is_empty() && self.match_front(id, None) {
                continue;
            }
            let Some(channel) = self.channels[usize::from(id)].as_deref_mut() else { return };
            let mut invalid = 0;
            channel.block_front(|tagged, from, kind, bytes| {
                // The end of an own send is not behind messages that nobody receives.
                if kind & flags::PULLED != 0 && !tagged.on_pulled(from, bytes) {
                    invalid += 1;
                }
            });
            channel.changed = true;
            (0..invalid).for_each(|_| self.gate.count_invalid());
        }
    }

    /// Matches the next message of all, or of those of one member that were blocked. `false`: there is none, or no room for it.
    fn match_front(&mut self, id: u16, blocked: Option<MemberId>) -> bool {
        let dead = *self.machine.dead();
        let Some(channel) = self.channels[usize::from(id)].as_deref_mut() else { return false };
        let Some(tagged) = channel.tagged.as_deref_mut() else { return false };
        let queue = match blocked {
            None => &channel.ready,
            Some(from) => &channel.blocked[from.index()],
        };
        let Some(message) = channel::front(queue, &channel.receive_memory) else { return false };
        let Front { from, flags: kind, bytes } = message;
        let kind = kind & (flags::TAGGED | flags::RENDEZVOUS | flags::PULLED | flags::FENCED);
        let mut pull = None;
        let valid = if kind == flags::TAGGED {
            match decode_tag(bytes) {
                Some(tag) => {
                    if !tagged.arrive(from, tag, Arrived::Bytes(&bytes[TAG_SIZE..])) {
                        return false;
                    }
                    true
                }
                None => false,
            }
        } else if kind == flags::TAGGED | flags::RENDEZVOUS {
            match Rendezvous::decode(bytes) {
                // A member describes its own memory, and has no more sends than fit into a table.
                Ok(rendezvous)
                    if rendezvous.region.member == from
                        && tagged.answers[from.index()].len() < Limits::MAX_TABLE =>
                {
                    let region = &rendezvous.region;
                    if self.gate.check_region(&region.encode(), &dead).is_ok() {
                        match tagged.matcher.take_receive(from, rendezvous.tag) {
                            Some(recv) => pull = Some((recv, rendezvous)),
                            None => {
                                if !tagged.arrive(from, rendezvous.tag, Arrived::Rendezvous(&rendezvous)) {
                                    return false;
                                }
                            }
                        }
                    }
                    true
                }
                _ => false,
            }
        } else if kind == flags::PULLED {
            // Of those that were blocked, it has ended its send already.
            blocked.is_some() || tagged.on_pulled(from, bytes)
        } else {
            false
        };
        channel.release_front_of(blocked);
        channel.changed = true;
        if !valid {
            self.gate.count_invalid();
        }
        if let Some((recv, rendezvous)) = pull {
            self.pull(id, recv, from, &rendezvous);
        }
        true
    }
}
