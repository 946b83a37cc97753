//! Sends: into the send buffer at once, or in order from the outbox of their destination.

use crosstie_protocol::group::message::Rendezvous;
use crosstie_protocol::group::{MemberId, flags};

use super::state::{SendSlot, TaggedState};
use crate::endpoint::Buffer;
use crate::group::channel::{Parts, Source};
use crate::group::engine::Engine;
use crate::group::error::GroupError;
use crate::group::message::LongSend;

impl Engine {
    /// What a channel knows of its tagged messages, if it carries such.
    pub(super) fn tagged(&mut self, id: u16) -> Option<&mut TaggedState> {
        self.channels[usize::from(id)].as_mut()?.tagged.as_deref_mut()
    }

    /// Starts a send. `Ok(Ok(key))`: it is in flight, under this key. `Ok(Err(buffer))`: it has completed, and the buffer comes back.
    pub(in crate::group) fn start_send(
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
        self.poll_before_send(id, to);
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

    /// Most sends that have not ended.
    pub(in crate::group) fn max_sends(&mut self, id: u16) -> u32 {
        self.tagged(id).map_or(0, |tagged| tagged.options.sends)
    }

    /// Whether one more send would find a slot.
    pub(in crate::group) fn has_send_slot(&mut self, id: u16) -> bool {
        self.tagged(id).is_some_and(|tagged| !tagged.sends.free.is_empty())
    }

    /// Whether nothing waits for room in the send buffer before a message to this member.
    pub(in crate::group) fn has_empty_outbox(&mut self, id: u16, to: MemberId) -> bool {
        self.send_queued(id);
        self.tagged(id).is_none_or(|tagged| tagged.outbox[to.index()].is_empty())
    }

    /// Moves sends into the send buffer, in order for each destination.
    pub(super) fn send_queued(&mut self, id: u16) {
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
}
