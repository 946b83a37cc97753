//! From an operation to its slot: READ, WRITE, batches, and the bytes of messages.
//!
//! An operation is posted first. If the device has executed all of it, it is over. Otherwise it leases a slot, and waits for its work requests. The
//! last completion gives the operation back and releases the slot. A slot whose requests do not all fit into the send queues waits in
//! `unposted`, and continues where it stopped.

use crosstie_protocol::endpoint::batch::Cursor;
use crosstie_protocol::endpoint::message::AnnouncedBuffer;
use crosstie_protocol::endpoint::send_queue::WorkRequest;
use crosstie_protocol::endpoint::slots::SlotKey;
use crosstie_protocol::endpoint::split::Split;

use super::super::cause::{Cause, SUCCESS};
use super::super::counters::EndpointCounters;
use super::super::lend::Stored;
use super::super::operation::{BlocksLeft, Kind, Op, Operation};
use super::link::{Link, peer_of};
use super::posting::{BatchPlan, Plan, Poster, Stopped, channel_behind};
use super::shared::Shared;
use super::slot::SlotWork;

/// What has become of an operation that was begun.
pub(super) enum Begun {
    /// It has succeeded, and nothing of it is at the device.
    Done,
    /// It needs a slot: for requests whose completion is to come, or for the rest that is not posted.
    Posted { plan: Plan, queued: u32, result: Result<(), Stopped> },
    /// Nothing was posted: it waits for a slot, or for the peer, or there is no connection.
    Waits,
}

impl Link {
    /// Posts what can be posted of an operation. If that is not all of it, [`track`](Link::track) is to be called, before anything else is begun.
    #[inline]
    pub(super) fn begin(&mut self, counters: &mut EndpointCounters, operation: &mut Operation) -> Begun {
        if !self.is_connected() || self.slots.free() == 0 {
            return Begun::Waits;
        }
        let plan = match operation.kind {
            Kind::Recv(_) | Kind::ImmRecv => return Begun::Waits,
            Kind::Send => match self.pairing.take_buffer(operation.range.len() as u64) {
                Some(to) => self.plan_message(operation, to),
                None => return Begun::Waits,
            },
            _ if !self.waiting.is_empty() => return Begun::Waits,
            _ => self.plan(operation),
        };
        self.post_first(counters, operation, plan)
    }

    /// Posts an operation for which a slot is free.
    #[inline]
    pub(super) fn post_first(
        &mut self,
        counters: &mut EndpointCounters,
        operation: &mut Operation,
        mut plan: Plan,
    ) -> Begun {
        let (true, Some(key)) = (self.unposted.is_empty(), self.slots.next()) else {
            // Behind the others.
            return Begun::Posted { plan, queued: 0, result: Err(Stopped::Blocked) };
        };
        let mut poster = self.poster(key);
        let result = poster.post(&mut plan, operation, false);
        let Poster { posted, queued, .. } = poster;
        counters.work_requests += u64::from(posted);
        if queued == 0 && result.is_ok() {
            // The generation is used up: no later request has one of these `wr_id`s.
            self.slots.skip();
            operation.finish(None);
            return Begun::Done;
        }
        Begun::Posted { plan, queued, result }
    }

    /// Keeps an operation that was begun.
    pub(super) fn track(&mut self, shared: &mut Shared<'_>, mut op: Op, begun: Begun) {
        match begun {
            Begun::Done => _ = shared.give_back(op, SUCCESS),
            Begun::Posted { plan, queued, result } => {
                let Some(key) = self.slots.lease() else { unreachable!("it was begun with a free slot") };
                self.slots.add_work(key, queued);
                self.work[usize::from(key.index)] = Some(SlotWork::new(op, plan));
                self.note_result(shared, key, result, self.unposted.len());
            }
            Begun::Waits => match op.with_value(shared.table, |operation| operation.kind) {
                Kind::Send => {
                    self.pairing.send(Some(op));
                    self.pair_sends(shared);
                }
                Kind::Recv(_) => self.start_recv(shared, op),
                Kind::ImmRecv => self.start_imm_recv(shared, op),
                _ => self.waiting.push_back(op),
            },
        }
    }

    #[inline]
    fn plan(&mut self, operation: &Operation) -> Plan {
        let channel = self.next_channel;
        let (plan, used) = match (&operation.kind, &operation.stored) {
            (Kind::ReadBatch | Kind::WriteBatch, Stored::Batch(batch)) => {
                let blocks = &batch.0.blocks;
                let share = blocks.bytes() / self.queues.qps as u64;
                let max_len = share.max(self.min_part).min(self.max_message);
                let stays = blocks.announcements() > 0;
                (
                    Plan::Batch(BatchPlan {
                        cursor: Cursor::default(),
                        channel,
                        max_len,
                        in_chunk: 0,
                        stays,
                    }),
                    1,
                )
            }
            (kind, _) => {
                // An immediate says that the bytes before it have arrived, which holds on one queue pair.
                let qps = if matches!(kind, Kind::WriteImm(_)) { 1 } else { self.queues.qps as u8 };
                let split = Split::new(operation.range.len() as u64, qps, self.min_part);
                (Plan::Parts { split, next: 0, channel }, usize::from(split.count()))
            }
        };
        self.next_channel = channel_behind(channel, used, self.queues.qps);
        plan
    }

    #[inline]
    pub(super) fn plan_message(&self, operation: &Operation, to: AnnouncedBuffer) -> Plan {
        let split = Split::new(operation.range.len() as u64, self.queues.qps as u8, self.min_part);
        Plan::Message { split, next: 0, to }
    }

    #[inline]
    fn poster(&mut self, key: SlotKey) -> Poster<'_> {
        Poster { queues: &mut self.queues, key, posted: 0, queued: 0 }
    }

    /// Posts what can be posted of a slot. If not all can, it gets this place among those that wait.
    fn post_slot(&mut self, shared: &mut Shared<'_>, key: SlotKey, place: usize) {
        let index = usize::from(key.index);
        let Some(mut work) = self.work[index].take() else { return };
        let has_ended = work.op.is_ended(shared.table);
        let mut poster = self.poster(key);
        let SlotWork { op, plan, .. } = &mut work;
        let result = op.with_value(shared.table, |operation| poster.post(plan, operation, has_ended));
        let Poster { posted, queued, .. } = poster;
        shared.counters.work_requests += u64::from(posted);
        self.slots.add_work(key, queued);
        self.work[index] = Some(work);
        self.note_result(shared, key, result, place);
    }

    fn note_result(
        &mut self,
        shared: &mut Shared<'_>,
        key: SlotKey,
        result: Result<(), Stopped>,
        place: usize,
    ) {
        let Some(work) = &mut self.work[usize::from(key.index)] else { return };
        let outstanding = self.slots.outstanding(key);
        let mut end = None;
        match result {
            Ok(()) => work.is_posted = true,
            Err(Stopped::Blocked) => {
                self.unposted.insert(place, key);
                return;
            }
            Err(Stopped::Refused(cause)) => {
                shared.counters.refused_posts += 1;
                work.stop(cause);
                // Requests before it may be unsignaled. And a message that has taken its buffer must come: the peer waits for it.
                end = (outstanding > 0 || matches!(work.plan, Plan::Message { .. })).then_some(cause);
            }
        }
        if outstanding == 0 {
            self.finished.push(key);
            self.finish_slots(shared);
        }
        if let Some(cause) = end {
            self.end(shared, cause);
        }
    }

    /// Posts what waits for room, for credit, or for a slot. Returns how many slots were posted to the end.
    #[inline]
    pub(super) fn post_waiting(&mut self, shared: &mut Shared<'_>) -> usize {
        if !self.is_connected() {
            return 0;
        }
        let count = if self.unposted.is_empty() { 0 } else { self.post_unposted(shared) };
        if self.unclaimed.is_due {
            self.advance_withdrawals(shared);
        }
        if !self.waiting_recvs.is_empty() {
            self.announce_recvs(shared);
        }
        if self.imm_receiver.credit_due().is_some() {
            self.send_imm_credit(shared);
        }
        count
    }

    /// Posts slots that wait. Each keeps its place until all of it is posted: with one queue pair, no transfer overtakes another one.
    fn post_unposted(&mut self, shared: &mut Shared<'_>) -> usize {
        let (mut count, mut place, mut is_held_up) = (0, 0, false);
        while let Some(&key) = self.unposted.get(place) {
            let Some(work) = &self.work[usize::from(key.index)] else { break };
            let is_transfer = !matches!(work.plan, Plan::Message { .. });
            // Of one that has ended nothing more is posted.
            if is_held_up && is_transfer && !work.op.is_ended(shared.table) {
                place += 1;
                continue;
            }
            self.unposted.remove(place);
            self.post_slot(shared, key, place);
            if self.unposted.get(place) == Some(&key) {
                is_held_up |= is_transfer && self.queues.qps == 1;
                place += 1;
            } else {
                count += 1;
            }
        }
        count
    }

    /// Gives back the operations of slots whose last work request has completed, and releases the slots.
    pub(super) fn finish_slots(&mut self, shared: &mut Shared<'_>) {
        while let Some(key) = self.finished.pop() {
            let Some(work) = self.work[usize::from(key.index)].take() else { continue };
            let SlotWork { mut op, cause, rest, plan, .. } = work;
            let left = if let Plan::Batch(BatchPlan { cursor, max_len, .. }) = &plan {
                // Nothing was wrong, but the operation was cancelled, or its deadline has passed.
                let rest = rest.or_else(|| Cause::decode(op.cause(shared.table)));
                rest.map(|cause| BlocksLeft { cursor: *cursor, max_len: *max_len, peer: self.peer(), cause })
            } else {
                None
            };
            op.with_value(shared.table, |operation| operation.finish(left));
            shared.give_back(op, cause.map_or(SUCCESS, Cause::encode));
            self.slots.release(key);
            self.start_waiting(shared);
        }
    }

    /// Gives free slots to operations that wait for one: sends that have a buffer first, because a peer waits for them.
    fn start_waiting(&mut self, shared: &mut Shared<'_>) {
        if !self.is_connected() {
            return;
        }
        self.pair_sends(shared);
        while let Some(op) = self.waiting.pop_front() {
            if op.is_ended(shared.table) {
                shared.give_back_unposted(op, self.peer(), Cause::Cancelled);
                continue;
            }
            if self.slots.free() == 0 {
                self.waiting.push_front(op);
                return;
            }
            let mut op = op;
            let plan = op.with_value(shared.table, |operation| self.plan(operation));
            // Not posted here: it may finish, and come back here.
            self.track(shared, op, Begun::Posted { plan, queued: 0, result: Err(Stopped::Blocked) });
        }
    }

    /// Notes how a work request of a slot ended. The last one finishes the slot.
    #[inline]
    pub(super) fn complete_slot_work(
        &mut self,
        shared: &mut Shared<'_>,
        posted: &WorkRequest,
        cause: Option<Cause>,
    ) {
        let key = posted.slot;
        let Some(left) = self.slots.complete_work(key) else {
            shared.counters.stale_completions += 1;
            return;
        };
        let Some(work) = &mut self.work[usize::from(key.index)] else { return };
        if let Some(cause) = cause {
            work.fail(shared, posted, self.peer.as_ref().map(peer_of), cause);
        }
        if left == 0 && work.is_posted {
            self.finished.push(key);
        }
    }
}
