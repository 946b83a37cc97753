//! From an operation to work requests: READ, WRITE, batches, and the bytes of messages.
//!
//! An operation leases a slot, posts its work requests, and waits for all of them. The last completion gives the operation back and
//! releases the slot. A slot whose requests do not all fit into the send queues waits in `unposted`, and continues where it stopped.

use core::ops::Range;

use crosstie_protocol::endpoint::batch::{Cursor, MAX_PIECES, Piece};
use crosstie_protocol::endpoint::imm_window::ImmSender;
use crosstie_protocol::endpoint::message::{AnnouncedBuffer, DataImm};
use crosstie_protocol::endpoint::send_queue::Posted;
use crosstie_protocol::endpoint::slots::SlotKey;
use crosstie_protocol::endpoint::split::Split;
use crosstie_protocol::endpoint::wr_id::WorkKind;

use super::super::buffer::Stored;
use super::super::cause::{Cause, Peer, SUCCESS};
use super::super::operation::{Kind, Op, Operation};
use super::Shared;
use super::link::{Channel, Link, SIGNAL_INTERVAL, peer_of};
use crate::device::{Data, PostError, RemoteAddr, SendOp, SendWr, Sge};

/// Operations of at least this many bytes are written past the caches: a part of a processor's last cache that one program can
/// expect to have is smaller, so that the bytes would not stay there.
pub(super) const STREAMING_LEN: u64 = 32 << 20;

/// What a leased slot is for.
pub(super) struct SlotWork {
    pub(super) op: Op,
    plan: Plan,
    /// Whether all work requests are posted, or the rest will not be.
    is_posted: bool,
    /// The first failure.
    cause: Option<Cause>,
    /// Why not all was posted.
    rest: Option<Cause>,
}

/// How far an operation is posted.
enum Plan {
    /// One range of memory on each side, in parts on consecutive channels.
    Parts {
        split: Split,
        next: u8,
        channel: usize,
    },
    /// The parts of a message, part i on message channel i.
    Message {
        split: Split,
        next: u8,
        to: AnnouncedBuffer,
    },
    Batch {
        cursor: Cursor,
        channel: usize,
        max_len: u64,
        in_chunk: u32,
        stays: bool,
    },
}

/// How a try to post ended.
enum Outcome {
    /// All is posted, or the rest will not be.
    Posted,
    /// A send queue is full, or there is no credit.
    Blocked,
    /// The device refused a request for good.
    Refused(Cause),
}

impl SlotWork {
    pub(super) fn for_message(op: Op, split: Split, to: AnnouncedBuffer) -> SlotWork {
        SlotWork { op, plan: Plan::Message { split, next: 0, to }, is_posted: false, cause: None, rest: None }
    }

    /// An operation that needs one request, which was posted or not. `to`: of a `send`.
    pub(super) fn for_one_request(
        op: Op,
        len: u64,
        channel: usize,
        is_posted: bool,
        to: Option<AnnouncedBuffer>,
    ) -> SlotWork {
        let (split, next) = (Split::new(len, 1, len), is_posted.into());
        let plan = match to {
            Some(to) => Plan::Message { split, next, to },
            None => Plan::Parts { split, next, channel },
        };
        SlotWork { op, plan, is_posted, cause: None, rest: None }
    }

    /// Posts no more, and fails with this cause if not all was posted.
    pub(super) fn stop(&mut self, cause: Cause) {
        if !self.is_posted {
            self.is_posted = true;
            self.cause.get_or_insert(cause);
            self.rest = Some(cause);
        }
    }

    /// Notes that one of its requests has failed.
    #[cold]
    pub(super) fn fail(
        &mut self,
        shared: &mut Shared<'_>,
        posted: &Posted,
        peer: Option<Peer>,
        cause: Cause,
    ) {
        // The first cause that says more than that something else failed first.
        if self.cause.is_none_or(|known| known == Cause::Flushed) {
            self.cause = Some(cause);
        }
        self.op
            .with_value(shared.table, |operation| operation.fail_blocks(posted.block_range(), peer, cause));
    }
}

fn not_accepted(error: PostError) -> Cause {
    match error {
        PostError::Device(errno) => Cause::NotAccepted(u8::try_from(errno).unwrap_or(0)),
        _ => Cause::NotAccepted(0),
    }
}

/// What the posting of a slot needs of its connection.
struct Poster<'l> {
    channels: &'l mut [Channel],
    made: usize,
    qps: usize,
    max_pieces: usize,
    imm_sender: &'l mut ImmSender,
    key: SlotKey,
    posted: u32,
}

impl Link {
    pub(super) fn start_transfer(&mut self, shared: &mut Shared<'_>, mut op: Op) {
        if !self.waiting.is_empty() {
            self.waiting.push_back(op);
            return;
        }
        let Some(key) = self.slots.lease() else {
            self.waiting.push_back(op);
            return;
        };
        let plan = op.with_value(shared.table, |operation| self.plan(operation));
        self.start_slot(shared, key, SlotWork { op, plan, is_posted: false, cause: None, rest: None });
    }

    fn plan(&mut self, operation: &Operation) -> Plan {
        let channel = self.next_channel % self.qps;
        match (&operation.kind, &operation.stored) {
            (Kind::ReadBatch | Kind::WriteBatch, Stored::Batch(batch)) => {
                let blocks = &batch.0.blocks;
                let share = blocks.bytes() / self.qps as u64;
                let max_len = share.max(self.min_part).min(self.max_message);
                let stays = blocks.announcements() > 0;
                self.next_channel = channel + 1;
                Plan::Batch { cursor: Cursor::default(), channel, max_len, in_chunk: 0, stays }
            }
            (kind, _) => {
                // An immediate says that the bytes before it have arrived, which holds on one queue pair.
                let qps = if matches!(kind, Kind::WriteImm(_)) { 1 } else { self.qps as u8 };
                let split = Split::new(operation.range.len() as u64, qps, self.min_part);
                self.next_channel = channel + usize::from(split.count());
                Plan::Parts { split, next: 0, channel }
            }
        }
    }

    /// Begins to post a leased slot.
    pub(super) fn start_slot(&mut self, shared: &mut Shared<'_>, key: SlotKey, work: SlotWork) {
        self.work[usize::from(key.index)] = Some(work);
        if self.unposted.is_empty() {
            self.post_slot(shared, key, 0);
        } else {
            self.unposted.push_back(key);
        }
    }

    /// Posts what can be posted of a slot. If not all can, it gets this place among those that wait.
    fn post_slot(&mut self, shared: &mut Shared<'_>, key: SlotKey, place: usize) {
        let Some(work) = &mut self.work[usize::from(key.index)] else { return };
        let mut poster = Poster {
            channels: &mut self.channels,
            made: self.made,
            qps: self.qps,
            max_pieces: self.max_pieces,
            imm_sender: &mut self.imm_sender,
            key,
            posted: 0,
        };
        let has_ended = work.op.is_ended(shared.table);
        let SlotWork { op, plan, .. } = work;
        let outcome = op.with_value(shared.table, |operation| poster.post(plan, operation, has_ended));
        let posted = poster.posted;
        shared.counters.work_requests += u64::from(posted);
        self.slots.add_work(key, posted);
        self.note_outcome(shared, key, outcome, place);
    }

    /// Takes over a slot whose one request was posted, or refused.
    pub(super) fn adopt(
        &mut self,
        shared: &mut Shared<'_>,
        posted: Posted,
        channel: usize,
        result: Result<(), PostError>,
        work: SlotWork,
    ) {
        let key = posted.slot;
        self.work[usize::from(key.index)] = Some(work);
        let outcome = match result {
            Ok(()) => {
                self.channels[channel].sends.push(posted);
                self.slots.add_work(key, 1);
                shared.counters.work_requests += 1;
                Outcome::Posted
            }
            Err(PostError::Full) => Outcome::Blocked,
            Err(error) => Outcome::Refused(not_accepted(error)),
        };
        self.note_outcome(shared, key, outcome, 0);
    }

    #[inline]
    fn note_outcome(&mut self, shared: &mut Shared<'_>, key: SlotKey, outcome: Outcome, place: usize) {
        let Some(work) = &mut self.work[usize::from(key.index)] else { return };
        match outcome {
            Outcome::Posted => {
                work.is_posted = true;
                if self.slots.outstanding(key) == 0 {
                    self.finished.push(key);
                    self.finish_slots(shared);
                }
            }
            Outcome::Blocked => self.unposted.insert(place, key),
            Outcome::Refused(cause) => {
                shared.counters.refused_posts += 1;
                work.stop(cause);
                // Requests before it may be unsignaled. And a message that has taken its buffer must come: the peer waits for it.
                let must_end = self.slots.outstanding(key) > 0 || matches!(work.plan, Plan::Message { .. });
                if self.slots.outstanding(key) == 0 {
                    self.finished.push(key);
                    self.finish_slots(shared);
                }
                if must_end {
                    self.end(shared, cause);
                }
            }
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
                is_held_up |= is_transfer && self.qps == 1;
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
            let left = if let Plan::Batch { cursor, max_len, .. } = &plan {
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
            let Some(key) = self.slots.lease() else {
                self.waiting.push_front(op);
                return;
            };
            let mut op = op;
            let plan = op.with_value(shared.table, |operation| self.plan(operation));
            // Not `start_slot`: it may finish, and come back here.
            self.work[usize::from(key.index)] =
                Some(SlotWork { op, plan, is_posted: false, cause: None, rest: None });
            self.unposted.push_back(key);
        }
    }

    /// Notes how a work request of a slot ended. The last one finishes the slot.
    #[inline]
    pub(super) fn complete_slot_work(
        &mut self,
        shared: &mut Shared<'_>,
        posted: &Posted,
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

/// Blocks of a batch that were not posted, and why.
struct BlocksLeft {
    cursor: Cursor,
    max_len: u64,
    peer: Option<Peer>,
    cause: Cause,
}

impl Operation {
    /// Notes that blocks of a batch have failed.
    pub(super) fn fail_blocks(&mut self, blocks: Range<u32>, peer: Option<Peer>, cause: Cause) {
        if let Stored::Batch(batch) = &mut self.stored {
            batch.0.fail(blocks, peer, cause);
        }
    }

    /// Notes that nothing of a batch was posted.
    #[cold]
    pub(super) fn fail_all_blocks(&mut self, peer: Option<Peer>, cause: Cause) {
        if let Stored::Batch(batch) = &self.stored {
            self.fail_blocks(0..batch.0.blocks.blocks(), peer, cause);
        }
    }

    /// Fills in the result. `left`: where the posting of a batch has stopped before its end.
    fn finish(&mut self, left: Option<BlocksLeft>) {
        match &mut self.stored {
            Stored::Batch(batch) => {
                self.bytes = batch.0.blocks.bytes();
                if let Some(BlocksLeft { mut cursor, max_len, peer, cause }) = left
                    && let Some(work) = batch.0.blocks.next_work(&mut cursor, 1, max_len)
                {
                    let all = batch.0.blocks.blocks();
                    batch.0.fail(work.first_block..all, peer, cause);
                }
            }
            _ => self.bytes = self.range.len() as u64,
        }
    }
}

impl Poster<'_> {
    #[inline]
    fn post(&mut self, plan: &mut Plan, operation: &mut Operation, has_ended: bool) -> Outcome {
        match plan {
            Plan::Parts { split, next, channel } => {
                self.post_parts(split, next, *channel, operation, has_ended)
            }
            Plan::Message { split, next, to } => self.post_message(split, next, to, operation),
            Plan::Batch { .. } => self.post_batch(plan, operation, has_ended),
        }
    }

    fn posted(&self, kind: WorkKind) -> Posted {
        Posted { kind, slot: self.key, first_block: 0, blocks: 0, signaled: true }
    }

    /// Counts a post, or says how it was refused.
    #[inline]
    fn check(&mut self, result: Result<(), PostError>) -> Result<(), Outcome> {
        match result {
            Ok(()) => {
                self.posted += 1;
                Ok(())
            }
            Err(PostError::Full) => Err(Outcome::Blocked),
            Err(error) => Err(Outcome::Refused(not_accepted(error))),
        }
    }

    #[inline]
    fn post_parts(
        &mut self,
        split: &Split,
        next: &mut u8,
        first: usize,
        operation: &Operation,
        has_ended: bool,
    ) -> Outcome {
        if has_ended {
            return Outcome::Posted;
        }
        let Some(buffer) = operation.stored.buffer() else { return Outcome::Posted };
        while *next < split.count() {
            let channel = (first + usize::from(*next)) % self.qps;
            if self.channels[channel].sends.room() == 0 {
                return Outcome::Blocked;
            }
            let part = split.part(*next);
            let remote = RemoteAddr {
                addr: operation.remote.addr.wrapping_add(part.start),
                rkey: operation.remote.rkey,
            };
            let op = match operation.kind {
                Kind::Read => SendOp::Read(remote),
                Kind::WriteImm(imm) => {
                    if !self.imm_sender.send() {
                        return Outcome::Blocked;
                    }
                    SendOp::WriteImm(remote, imm)
                }
                _ => SendOp::Write(remote),
            };
            let start = operation.range.start;
            let range = start + part.start as usize..start + part.end as usize;
            let Ok(sge) = buffer.region().sge(range) else { return Outcome::Refused(Cause::NotAccepted(0)) };
            let posted = self.posted(WorkKind::Transfer);
            let sges = [sge];
            let mut wr = SendWr::new(0, op, Data::Regions(&sges)).signaled();
            wr.streaming = operation.range.len() as u64 >= STREAMING_LEN;
            let result = self.channels[channel].post(channel, wr, posted);
            if let Err(outcome) = self.check(result) {
                if matches!(op, SendOp::WriteImm(..)) {
                    self.imm_sender.take_back();
                }
                return outcome;
            }
            *next += 1;
        }
        Outcome::Posted
    }

    /// The parts of a message. They are posted to the end even if the operation has ended: the peer's buffer is taken.
    fn post_message(
        &mut self,
        split: &Split,
        next: &mut u8,
        to: &AnnouncedBuffer,
        operation: &Operation,
    ) -> Outcome {
        let Some(buffer) = operation.stored.buffer() else { return Outcome::Posted };
        let parts = ((1u16 << split.count()) - 1) as u8;
        let imm = DataImm { slot: to.slot, parts }.encode();
        while *next < split.count() {
            let channel = self.made + usize::from(*next);
            if self.channels[channel].sends.room() == 0 {
                return Outcome::Blocked;
            }
            let part = split.part(*next);
            let remote = RemoteAddr { addr: to.addr.wrapping_add(part.start), rkey: to.rkey };
            let start = operation.range.start;
            let range = start + part.start as usize..start + part.end as usize;
            let Ok(sge) = buffer.region().sge(range) else { return Outcome::Refused(Cause::NotAccepted(0)) };
            let posted = self.posted(WorkKind::MessageData);
            let sges = [sge];
            let mut wr = SendWr::new(0, SendOp::WriteImm(remote, imm), Data::Regions(&sges)).signaled();
            wr.streaming = operation.range.len() as u64 >= STREAMING_LEN;
            let result = self.channels[channel].post(channel, wr, posted);
            if let Err(outcome) = self.check(result) {
                return outcome;
            }
            *next += 1;
        }
        Outcome::Posted
    }

    fn post_batch(&mut self, plan: &mut Plan, operation: &mut Operation, has_ended: bool) -> Outcome {
        let Plan::Batch { cursor, channel, max_len, in_chunk, stays } = plan else { return Outcome::Posted };
        let is_read = operation.kind == Kind::ReadBatch;
        let Stored::Batch(batch) = &mut operation.stored else { return Outcome::Posted };
        let batch = &mut *batch.0;
        let is_streaming = batch.blocks.bytes() >= STREAMING_LEN;
        loop {
            // Between chunks everything before is signaled.
            if has_ended && *in_chunk == 0 {
                return Outcome::Posted;
            }
            let mut after = *cursor;
            let Some(work) = batch.blocks.next_work(&mut after, self.max_pieces, *max_len) else {
                return Outcome::Posted;
            };
            if self.channels[*channel].sends.room() == 0 {
                return Outcome::Blocked;
            }
            let Some(region) = batch.remotes.get(usize::from(work.remote)) else {
                return Outcome::Refused(Cause::NotAccepted(0));
            };
            let remote = region.at(work.remote_offset);
            // A batch that has ended announces nothing more: it must not wait for credit. Only its last request is to be signaled.
            let announce = work.announce.filter(|_| !has_ended);
            let op = match (is_read, announce) {
                (true, _) => SendOp::Read(remote),
                (false, None) => SendOp::Write(remote),
                (false, Some(imm)) => {
                    if !self.imm_sender.send() {
                        return Outcome::Blocked;
                    }
                    SendOp::WriteImm(remote, imm)
                }
            };
            let ends_chunk =
                work.is_last || has_ended || announce.is_some() || *in_chunk + 1 >= SIGNAL_INTERVAL;
            let posted = Posted {
                first_block: work.first_block,
                blocks: work.blocks,
                ..self.posted(WorkKind::Transfer)
            };
            let sge = |piece: &Piece| -> Option<Sge<'_>> {
                let buffer = batch.locals.get(usize::from(piece.local)).and_then(Stored::buffer)?;
                let start = buffer.start() + piece.offset as usize;
                buffer.region().sge(start..start + piece.len as usize).ok()
            };
            let refused = Outcome::Refused(Cause::NotAccepted(0));
            let pieces = work.pieces();
            let Some(first) = pieces.first().and_then(sge) else { return refused };
            let mut all;
            let sges = if pieces.len() == 1 {
                core::slice::from_ref(&first)
            } else {
                all = [first; MAX_PIECES];
                for (entry, piece) in all.iter_mut().zip(pieces) {
                    let Some(sge) = sge(piece) else { return refused };
                    *entry = sge;
                }
                &all[..pieces.len()]
            };
            let mut wr = SendWr::new(0, op, Data::Regions(sges));
            (wr.signal, wr.streaming) = (ends_chunk.into(), is_streaming);
            let result = self.channels[*channel].post(*channel, wr, posted);
            if let Err(outcome) = self.check(result) {
                if matches!(op, SendOp::WriteImm(..)) {
                    self.imm_sender.take_back();
                }
                return outcome;
            }
            batch.work_requests += 1;
            *cursor = after;
            *in_chunk += 1;
            if ends_chunk {
                *in_chunk = 0;
                // The blocks of one announcement stay on one queue pair, so that the announcement arrives behind them.
                if !*stays || announce.is_some() {
                    *channel = (*channel + 1) % self.qps;
                }
            }
        }
    }
}
