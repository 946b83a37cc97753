//! What a completion means.

use crosstie_protocol::endpoint::message::{CONTROL_SIZE, Control, Violation, control_piece};
use crosstie_protocol::endpoint::wr_id::{WorkKind, WrId};

use super::super::cause::Cause;
use super::link::Link;
use super::shared::Shared;
use super::taken::{POLL_BATCH, Taken};
use crate::device::{Opcode, Status};

impl Link {
    /// Takes completions until there are none, or a batch of them. Returns how many there were.
    #[inline]
    pub(super) fn poll(&mut self, shared: &mut Shared<'_>) -> usize {
        let Link { cq, completions, .. } = self;
        match cq.poll(POLL_BATCH, |completion| completions.push(completion)) {
            Ok(0) => 0,
            Ok(count) => {
                self.handle_taken(shared, count);
                count
            }
            Err(_) => {
                self.completions.clear();
                self.end(shared, Cause::Device(Status::Fatal));
                0
            }
        }
    }

    fn handle_taken(&mut self, shared: &mut Shared<'_>, count: usize) {
        // All of them were in the queue before a receive is posted again.
        self.counts_receives = count >= self.fewest_receives;
        for index in 0..count {
            let completion = self.completions.taken[index];
            self.handle(shared, completion);
        }
        self.completions.clear();
        if self.counts_receives {
            self.queues.channels.iter_mut().for_each(|channel| channel.used_receives = 0);
        }
    }

    #[inline]
    fn handle(&mut self, shared: &mut Shared<'_>, completion: Taken) {
        let id = WrId::decode(completion.wr_id);
        if usize::from(id.qp) >= self.queues.channels.len() {
            shared.counters.stale_completions += 1;
            return;
        }
        match id.kind {
            WorkKind::Receive => self.handle_receive(shared, id, completion),
            _ => self.handle_send(shared, id, completion.status),
        }
    }

    #[inline]
    fn handle_send(&mut self, shared: &mut Shared<'_>, id: WrId, status: Status) {
        let cause = (!status.is_success()).then(|| Cause::of_status(status));
        let channel = usize::from(id.qp);
        let Ok(count) = self.queues.channels[channel].sends.check(id.position, id.kind, id.slot) else {
            shared.counters.stale_completions += 1;
            return;
        };
        // Nearly always there is only one.
        for left in (0..count).rev() {
            let Some(posted) = self.queues.channels[channel].sends.pop() else { break };
            match posted.kind {
                WorkKind::Transfer | WorkKind::MessageData => {
                    self.complete_slot_work(shared, &posted, cause.filter(|_| left == 0));
                }
                _ => {}
            }
        }
        if !self.finished.is_empty() {
            self.finish_slots(shared);
        }
        if let Some(cause) = cause {
            self.end(shared, if cause == Cause::Flushed { Cause::RemoteGone(status) } else { cause });
        }
    }

    #[inline]
    fn handle_receive(&mut self, shared: &mut Shared<'_>, id: WrId, completion: Taken) {
        if !completion.status.is_success() {
            // A receive fails when its queue pair does. If we did not do that, the peer or the network did.
            self.end(shared, Cause::RemoteGone(completion.status));
            return;
        }
        self.has_received = true;
        let channel = usize::from(id.qp);
        if self.counts_receives {
            let channel = &mut self.queues.channels[channel];
            channel.used_receives += 1;
            shared.counters.empty_receive_queues += u64::from(channel.used_receives == channel.receives);
        }
        let control = match completion.imm.and_then(control_piece) {
            // There is a piece for each receive.
            Some(piece)
                if channel == self.queues.made
                    && u32::from(piece) < self.queues.channels[channel].receives =>
            {
                match completion.control {
                    Some(index) => Some(zerocopy::transmute!(self.completions.controls[usize::from(index)])),
                    None => self.load_control(piece),
                }
            }
            _ => None,
        };
        // Before anything is done with what it brought (I5).
        if self.is_connected() && self.post_receive(channel, id.slot.index).is_err() {
            shared.counters.refused_posts += 1;
            self.end(shared, Cause::NotAccepted(0));
            return;
        }
        let accepted = match (completion.opcode, completion.imm, control) {
            (Opcode::RecvWriteImm, _, Some(bytes)) => {
                self.accept_control(shared, &bytes, completion.byte_len)
            }
            (Opcode::RecvWriteImm, Some(imm), _) if channel < self.queues.made => {
                self.accept_imm(shared, imm, completion.byte_len)
            }
            (Opcode::RecvWriteImm, Some(imm), _) => {
                self.accept_part(shared, (channel - self.queues.made) as u8, imm, completion.byte_len)
            }
            _ => Err(Violation::Malformed),
        };
        if accepted.is_err() {
            self.end(shared, Cause::Violation);
        }
    }

    fn accept_control(
        &mut self,
        shared: &mut Shared<'_>,
        bytes: &[u8; CONTROL_SIZE],
        len: u32,
    ) -> Result<(), Violation> {
        match Control::decode(bytes, len)? {
            Control::Buffer(buffer) => self.accept_buffer(shared, buffer),
            Control::ImmCredit(granted) => self.queues.imm_sender.credit(granted),
            Control::Close => {
                self.end(shared, Cause::PeerClosed);
                Ok(())
            }
            Control::Withdraw(slot) => self.accept_withdraw(shared, slot),
            Control::Withdrawn(slot) => self.accept_withdrawn(shared, slot),
            Control::Taken(_) => self.accept_taken(shared),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crosstie_protocol::endpoint::slots::SlotKey;

    use super::super::super::config::EndpointConfig;
    use super::super::super::endpoint::Endpoint;
    use super::super::super::future::OperationFuture;
    use super::super::super::test_pair::{config, connected_queueing};
    use super::*;
    use crate::device::Completion;
    use crate::rng::{Random, seed};

    fn replay(endpoint: &Endpoint, completion: Completion) {
        endpoint.shared.with_engine(|engine, table| {
            let super::super::Engine { link, counters, status, .. } = engine;
            link.completions.push(&completion);
            link.handle_taken(&mut Shared { table, counters, status }, 1);
        });
    }

    fn completion(wr_id: u64, status: Status) -> Completion {
        Completion { wr_id, status, opcode: Opcode::Write, ..Completion::default() }
    }

    /// I2 and I3: completions of former leases, repeated ones and made-up ones are counted, and reach nobody, whatever their status.
    #[test]
    fn stale_and_duplicate_completions_change_nothing() {
        let (here, there) = connected_queueing(&EndpointConfig { slots: 2, imm_window: 1, ..config() });
        let target = there.allocate(64).unwrap();
        // Both slots are used once, and then leased by immediates that have no credit: nothing of them is at the device.
        let first = |slot: u16, position| WrId {
            kind: WorkKind::Transfer,
            qp: 0,
            slot: SlotKey { index: slot, generation: 1 },
            position,
        };
        for imm in 0..2 {
            let write = here.write(here.allocate(8).unwrap(), .., &target.remote(), 0).unwrap();
            assert!(write.wait().is_ok(), "{imm}");
        }
        here.write_imm(here.allocate(8).unwrap(), .., &target.remote(), 0, 0).unwrap().wait().unwrap();
        let waiting: Vec<OperationFuture<_>> = (0..2)
            .map(|imm| here.write_imm(here.allocate(8).unwrap(), .., &target.remote(), 0, imm).unwrap())
            .collect();
        assert_eq!(here.counters().leased_slots, 2);
        let mut random = Random(seed());
        let mut expected = 0;
        for round in 0..20_000u64 {
            let mut id = first((round % 2) as u16, (round / 2 % 4) as u32);
            match round % 4 {
                // Of the current lease, but never posted.
                0 => id.slot.generation = 2 + (round / 4 % 2) as u32,
                1 => id = WrId { qp: random.below(16) as u8, ..id },
                2 => {
                    id = WrId::decode(random.next());
                    if id.kind == WorkKind::Receive {
                        continue;
                    }
                }
                _ => {}
            }
            let status = if round % 3 == 0 { Status::Success } else { Status::RemoteAccess };
            replay(&here, completion(id.encode(), status));
            expected += 1;
        }
        assert_eq!(here.counters().stale_completions, expected);
        assert!(
            here.ended().is_none() && waiting.iter().all(|write| !write.is_ended()),
            "nobody was reached"
        );
        assert_eq!(here.counters().leased_slots, 2);
        // They go on as if nothing had happened.
        for imm in [0, 0, 1] {
            assert_eq!(there.imm_recv().unwrap().wait().unwrap().imm, Some(imm));
            here.progress();
        }
        for write in waiting {
            there.progress();
            assert_eq!(write.wait().unwrap().bytes, 8);
        }
        assert_eq!(here.counters().leased_slots, 0);
    }
}
