//! PULLs: reading a long message out of its sender's buffer, and telling the sender.

use crosstie_protocol::group::message::Rendezvous;
use crosstie_protocol::group::{MemberId, MemberSet, flags};

use super::MessageInfo;
use super::state::Pull;
use crate::endpoint::NotStarted;
use crate::group::channel::{Parts, Source};
use crate::group::engine::Engine;
use crate::group::error::GroupError;
use crate::group::message::LongSend;

impl Engine {
    /// Starts the PULL of a message that has matched a receive, or ends the receive. If there is no room, the PULL waits.
    pub(super) fn pull(&mut self, id: u16, recv: u64, from: MemberId, rendezvous: &Rendezvous) {
        if !self.start_pull(id, recv, from, rendezvous)
            && let Some(tagged) = self.tagged(id)
        {
            tagged.waiting_pulls.push_back((recv, from, Box::new(*rendezvous)));
        }
    }

    /// As [`Engine::pull`]. `false`: there is no room.
    fn start_pull(&mut self, id: u16, recv: u64, from: MemberId, rendezvous: &Rendezvous) -> bool {
        let one_sided = self.one_sided.clone();
        let is_dead = self.machine.dead().contains(from);
        let Some(tagged) = self.tagged(id) else { return true };
        let len = rendezvous.region.region.len();
        let info = MessageInfo { from, tag: rendezvous.tag, len };
        let Some(buffer) = tagged.recvs.get(recv).and_then(|slot| slot.buffer.take()) else { return true };
        let send_key = rendezvous.key;
        if len > buffer.len() as u64 {
            let room = buffer.len() as u64;
            tagged.end_recv(
                recv,
                Some(buffer),
                Err(GroupError::Truncated { from, tag: info.tag, len, room }),
            );
            tagged.answer(from, send_key, true);
            return true;
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
                tagged.answer(from, send_key, false);
                return true;
            }
        };
        match endpoint.read(buffer, ..len as usize, &memory.remote(), 0) {
            Ok(operation) => {
                tagged.counters.pulls += 1;
                tagged.pulls.push(Pull { operation, recv, info, send_key });
            }
            Err(refused) if refused.cause.is_back_pressure() => {
                if let Some(slot) = tagged.recvs.get(recv) {
                    slot.buffer = Some(refused.buffer);
                }
                return false;
            }
            Err(refused) => {
                let error = match refused.cause {
                    NotStarted::Ended(_) => GroupError::PeerDead(from),
                    cause => GroupError::NotStarted(cause),
                };
                tagged.end_recv(recv, Some(refused.buffer), Err(error));
                tagged.answer(from, send_key, false);
            }
        }
        true
    }

    /// Ends the receives of PULLs that have ended, starts PULLs that waited for room, and sends answers.
    pub(super) fn poll_pulls(&mut self, id: u16) {
        let mut changed = self.end_pulls(id);
        // Each is tried once, in order, and none after another one from the same member found no room.
        let mut full = MemberSet::EMPTY;
        let waiting = self.tagged(id).map_or(0, |tagged| tagged.waiting_pulls.len());
        for _ in 0..waiting {
            let next = self.tagged(id).and_then(|tagged| tagged.waiting_pulls.pop_front());
            let Some((recv, from, rendezvous)) = next else { break };
            if !full.contains(from) && self.start_pull(id, recv, from, &rendezvous) {
                changed = true;
                continue;
            }
            full.insert(from);
            if let Some(tagged) = self.tagged(id) {
                tagged.waiting_pulls.push_back((recv, from, rendezvous));
            }
        }
        if waiting > 0 {
            self.end_pulls(id);
        }
        if !changed {
            return;
        }
        if let Some(channel) = &mut self.channels[usize::from(id)] {
            channel.changed = true;
        }
        self.send_answers(id);
    }

    /// Ends the receives of PULLs that have ended. Returns whether there were any.
    fn end_pulls(&mut self, id: u16) -> bool {
        let Some(tagged) = self.tagged(id) else { return false };
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
            tagged.answer(info.from, send_key, succeeded);
            changed = true;
        }
        changed
    }

    /// Sends answers, to each member as many as there is room for.
    pub(super) fn send_answers(&mut self, id: u16) {
        if self.tagged(id).is_none_or(|tagged| tagged.unanswered == 0) {
            return;
        }
        for to in (0..self.members).map(MemberId::new) {
            while let Some(pulled) =
                self.tagged(id).and_then(|tagged| tagged.answers[to.index()].front().copied())
            {
                let parts =
                    Parts { flags: flags::PULLED, prefix: &[], body: Source::Bytes(&pulled.encode()) };
                let mut progress = LongSend { channel: id, to, offset: 0, owner: None };
                if self.step_send(&mut progress, &parts).is_none() {
                    break;
                }
                if let Some(tagged) = self.tagged(id) {
                    tagged.answers[to.index()].pop_front();
                    tagged.unanswered -= 1;
                }
            }
        }
    }
}
