//! PULLs: reading a long message out of its sender's buffer, and telling the sender.

use crosstie_protocol::group::message::{Pulled, Rendezvous};
use crosstie_protocol::group::{MemberId, flags};

use super::MessageInfo;
use super::state::Pull;
use crate::endpoint::NotStarted;
use crate::group::channel::{Parts, Source};
use crate::group::engine::Engine;
use crate::group::error::GroupError;
use crate::group::message::LongSend;

impl Engine {
    pub(super) fn start_pull(&mut self, id: u16, recv: u64, from: MemberId, rendezvous: &Rendezvous) {
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

    pub(super) fn poll_pulls(&mut self, id: u16) {
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
        // A PULL has ended, so that others which waited can start. Without one in flight, it is operations of the application that
        // take the room, and nobody tells when they end.
        if (changed || tagged.pulls.is_empty())
            && let Some((recv, from, rendezvous)) = tagged.waiting_pulls.pop_front()
        {
            self.start_pull(id, recv, from, &rendezvous);
        }
        if !changed {
            return;
        }
        if let Some(channel) = &mut self.channels[usize::from(id)] {
            channel.changed = true;
        }
        self.send_answers(id);
    }

    pub(super) fn send_answers(&mut self, id: u16) {
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
