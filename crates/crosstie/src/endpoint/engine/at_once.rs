//! Operations that complete while they are started: the short way for one that needs one work request.
//!
//! On the software device the thread that posts a request executes it. If that succeeds, and no completion of an earlier request is to come
//! from the queue pair, the operation is over: it needs no completion and no entry in the table, and the caller keeps its buffer.
//!
//! In every other case the operation is [adopted](Engine::adopt): it gets what every operation has, and goes on as any other.

use core::ops::Range;
use std::time::Duration;

use crosstie_protocol::endpoint::message::{AnnouncedBuffer, DataImm};
use crosstie_protocol::endpoint::send_queue::Posted;
use crosstie_protocol::endpoint::wr_id::{WorkKind, WrId};

use super::super::buffer::Buffer;
use super::super::operation::{Kind, Operation, Table};
use super::link::Link;
use super::transfer::SlotWork;
use super::{Engine, Shared, Started};
use crate::device::{self, Data, PostError, RemoteAddr, SendOp, SendWr};

/// What became of an operation.
pub(in crate::endpoint) enum AtOnce {
    /// It has completed with success.
    Completed,
    /// Nothing has happened: it is to be started as any operation.
    NotPosted,
    /// It was posted, or refused: it is to be adopted, before anything else is done.
    Posted,
}

/// A request that was posted and has not completed, or was refused.
pub(super) struct PostedAtOnce {
    posted: Posted,
    channel: usize,
    result: Result<(), PostError>,
    /// The buffer that a `send` has taken.
    to: Option<AnnouncedBuffer>,
}

impl Engine {
    /// Posts an operation, if nothing waits and no other completion is to come from its queue pair.
    #[inline]
    pub(in crate::endpoint) fn start_at_once(
        &mut self,
        table: &Table,
        kind: Kind,
        buffer: &Buffer,
        range: &Range<usize>,
        remote: RemoteAddr,
    ) -> AtOnce {
        // If it does not complete, it needs an entry.
        if table.has_submitted() || !table.reserve_spare(&mut self.spare) {
            return AtOnce::NotPosted;
        }
        if kind == Kind::Send && self.link.pairing.waiting_buffers() == 0 {
            // The peer may have announced one.
            self.poll(table);
        } else if self.clock.is_due() {
            self.check_time(table);
        }
        let posted = self.link.post_at_once(kind, remote, buffer, range);
        if let AtOnce::Completed = posted {
            self.counters.work_requests += 1;
            self.counters.operations += 1;
        }
        posted
    }

    /// Makes an entry for an operation that has not completed at once.
    pub(in crate::endpoint) fn adopt(
        &mut self,
        table: &Table,
        operation: Operation,
        timeout: Option<Duration>,
    ) -> Result<Started, Operation> {
        let Some(posted) = self.link.posted_at_once.take() else {
            return self.start(table, operation, timeout);
        };
        let len = operation.range.len() as u64;
        let (side, op) = table.lease_private(operation, &mut self.spare)?;
        let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
        shared.counters.held_operations += 1;
        let PostedAtOnce { posted, channel, result, to } = posted;
        let work = SlotWork::for_one_request(op, len, channel, result.is_ok(), to);
        self.link.adopt(&mut shared, posted, channel, result, work);
        self.poll(table);
        Ok(self.resolve(table, side, timeout))
    }
}

impl Link {
    fn post_at_once(
        &mut self,
        kind: Kind,
        remote: RemoteAddr,
        buffer: &Buffer,
        range: &Range<usize>,
    ) -> AtOnce {
        let len = range.len() as u64;
        if len >= self.at_once_limit
            || !self.is_connected()
            || !self.waiting.is_empty()
            || !self.unposted.is_empty()
        {
            return AtOnce::NotPosted;
        }
        let is_send = kind == Kind::Send;
        let number = match is_send {
            true => self.made,
            false if self.next_channel < self.qps => self.next_channel,
            false => 0,
        };
        let channel = &mut self.channels[number];
        let (Some(slot), Ok(sge)) = (self.slots.next(), buffer.region().sge(range.clone())) else {
            return AtOnce::NotPosted;
        };
        if channel.awaits_completion() || channel.sends.room() == 0 {
            return AtOnce::NotPosted;
        }
        let mut to = None;
        let op = match kind {
            Kind::Read => SendOp::Read(remote),
            Kind::Write => SendOp::Write(remote),
            Kind::WriteImm(imm) if self.imm_sender.send() => SendOp::WriteImm(remote, imm),
            Kind::Send => {
                to = self.pairing.take_buffer(len);
                let Some(AnnouncedBuffer { slot, addr, rkey, .. }) = to else { return AtOnce::NotPosted };
                SendOp::WriteImm(RemoteAddr { addr, rkey }, DataImm { slot, parts: 1 }.encode())
            }
            _ => return AtOnce::NotPosted,
        };
        let work_kind = if is_send { WorkKind::MessageData } else { WorkKind::Transfer };
        let position = channel.sends.next_position();
        let wr_id = WrId { kind: work_kind, qp: number as u8, slot, position }.encode();
        let sges = [sge];
        let result = channel.qp.post(&SendWr::new(wr_id, op, Data::Regions(&sges)).signaled_if_queued());
        if !is_send {
            self.next_channel = number + 1;
        }
        match (&result, kind) {
            (Ok(device::Posted::Done), _) => {
                self.slots.skip();
                return AtOnce::Completed;
            }
            (Ok(device::Posted::Queued), _) => channel.signaling.count_post(true),
            (Err(_), Kind::WriteImm(_)) => self.imm_sender.take_back(),
            (Err(_), _) => {}
        }
        self.slots.lease();
        let posted = Posted { kind: work_kind, slot, first_block: 0, blocks: 0, signaled: true };
        self.posted_at_once = Some(PostedAtOnce { posted, channel: number, result: result.map(drop), to });
        AtOnce::Posted
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::super::test_pair::{config, connected};

    /// I2: a transfer that completes at once uses up the generation of the slot that its `wr_id` names, so that no later request has the same
    /// `wr_id`, and a forged completion of it finds nobody.
    #[test]
    fn transfer_that_completes_at_once_uses_up_its_wr_id() {
        let (here, there) = connected(&config());
        let target = there.allocate(64).unwrap();
        let next = || here.shared.with_engine(|engine, _| engine.link().slots.next().unwrap());
        let write = || here.write(here.allocate(8).unwrap(), .., &target.remote(), 0).unwrap();
        // The first request of a queue pair finds its peer, and has a completion in the queue.
        write().wait().unwrap();
        for _ in 0..3 {
            let slot = next();
            let write = write();
            assert!(write.is_ended(), "at once");
            let next_slot = next();
            assert_eq!(next_slot.index, slot.index, "it is the next slot again");
            assert_ne!(next_slot.generation, slot.generation);
        }
    }
}
