//! From an operation to work requests: what is posted next, and on which queue pair.

use core::ops::Range;

use crosstie_protocol::endpoint::batch::{Cursor, MAX_PIECES, Piece};
use crosstie_protocol::endpoint::imm_window::ImmSender;
use crosstie_protocol::endpoint::message::{AnnouncedBuffer, DataImm};
use crosstie_protocol::endpoint::send_queue::WorkRequest;
use crosstie_protocol::endpoint::slots::SlotKey;
use crosstie_protocol::endpoint::split::Split;
use crosstie_protocol::endpoint::wr_id::WorkKind;

use super::super::batch::BatchInner;
use super::super::buffer::AnyBuffer;
use super::super::cause::Cause;
use super::super::lend::Stored;
use super::super::operation::{Kind, Operation};
use super::channel::{CONTROL, Channel, SIGNAL_INTERVAL, post};
use crate::device::{Data, PostError, Posted, RemoteAddr, SendOp, SendWr, Sge, Signal};

/// Operations of at least this many bytes are written past the caches: a part of a processor's last cache that one program can
/// expect to have is smaller, so that the bytes would not stay there.
const STREAMING_LEN: u64 = 32 << 20;

/// How far an operation is posted.
pub(super) enum Plan {
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
    Batch(BatchPlan),
}

/// How far a batch is posted.
#[derive(Clone, Copy)]
pub(super) struct BatchPlan {
    pub(super) cursor: Cursor,
    pub(super) channel: usize,
    pub(super) max_len: u64,
    /// Requests since the last one that was signaled.
    pub(super) in_chunk: u32,
    /// The blocks of one announcement stay on one queue pair, so that the announcement arrives behind them.
    pub(super) stays: bool,
}

/// Why not all of an operation was posted.
pub(super) enum Stopped {
    /// A send queue is full, or there is no credit.
    Blocked,
    /// The device refused a request for good.
    Refused(Cause),
}

const INVALID: Stopped = Stopped::Refused(Cause::NotAccepted(0));

impl From<PostError> for Stopped {
    fn from(error: PostError) -> Stopped {
        match error {
            PostError::Full => Stopped::Blocked,
            PostError::Device(errno) => {
                Stopped::Refused(Cause::NotAccepted(u8::try_from(errno).unwrap_or(0)))
            }
            _ => INVALID,
        }
    }
}

/// The channel this many behind a channel. Both numbers are at most `count`.
#[inline]
pub(super) fn channel_behind(channel: usize, distance: usize, count: usize) -> usize {
    let next = channel + distance;
    if next < count { next } else { next - count }
}

/// The queue pairs of a connection, and how much may be posted to them.
pub(super) struct Queues {
    pub(super) channels: Vec<Channel>,
    /// Queue pairs for each purpose that were made, and that are used.
    pub(super) made: usize,
    pub(super) qps: usize,
    pub(super) max_pieces: usize,
    pub(super) imm_sender: ImmSender,
}

/// Posts an operation to the queues of its connection.
pub(super) struct Poster<'l> {
    pub(super) queues: &'l mut Queues,
    /// The slot of the operation, or the one that it leases if it must.
    pub(super) key: SlotKey,
    /// Requests that were posted.
    pub(super) posted: u32,
    /// Those that the device has not executed yet: a completion will tell.
    pub(super) queued: u32,
}

impl Poster<'_> {
    /// Posts as far as possible. Of an operation that has ended no more is posted than the peer waits for, or earlier requests need.
    #[inline]
    pub(super) fn post(
        &mut self,
        plan: &mut Plan,
        operation: &mut Operation,
        has_ended: bool,
    ) -> Result<(), Stopped> {
        match plan {
            Plan::Parts { .. } if has_ended => Ok(()),
            Plan::Parts { split, next, channel } => self.post_parts(split, next, *channel, operation),
            Plan::Message { split, next, to } => self.post_message(split, next, to, operation),
            Plan::Batch(plan) => self.post_batch(plan, operation, has_ended),
        }
    }

    #[inline]
    fn post_parts(
        &mut self,
        split: &Split,
        next: &mut u8,
        first: usize,
        operation: &Operation,
    ) -> Result<(), Stopped> {
        while *next < split.count() {
            let channel = channel_behind(first, usize::from(*next), self.queues.qps);
            let part = split.part(*next);
            let RemoteAddr { addr, rkey } = operation.remote;
            let remote = RemoteAddr { addr: addr.wrapping_add(part.start), rkey };
            let op = match operation.kind {
                Kind::Read => SendOp::Read(remote),
                Kind::WriteImm(imm) => SendOp::WriteImm(remote, imm),
                _ => SendOp::Write(remote),
            };
            self.post_part(channel, WorkKind::Transfer, op, operation, part)?;
            *next += 1;
        }
        Ok(())
    }

    /// The parts of a message. They are posted to the end even if the operation has ended: the peer's buffer is taken.
    fn post_message(
        &mut self,
        split: &Split,
        next: &mut u8,
        to: &AnnouncedBuffer,
        operation: &Operation,
    ) -> Result<(), Stopped> {
        let parts = ((1u16 << split.count()) - 1) as u8;
        let imm = DataImm { slot: to.slot, parts }.encode();
        while *next < split.count() {
            let part = split.part(*next);
            let remote = RemoteAddr { addr: to.addr.wrapping_add(part.start), rkey: to.rkey };
            let channel = self.queues.made + usize::from(*next);
            self.post_part(channel, WorkKind::MessageData, SendOp::WriteImm(remote, imm), operation, part)?;
            *next += 1;
        }
        Ok(())
    }

    /// Posts a part of the operation's buffer.
    #[inline(always)]
    fn post_part(
        &mut self,
        channel: usize,
        kind: WorkKind,
        op: SendOp,
        operation: &Operation,
        part: Range<u64>,
    ) -> Result<(), Stopped> {
        let start = operation.range.start;
        let range = start + part.start as usize..start + part.end as usize;
        let sge = operation.stored.buffer().and_then(|buffer| buffer.region().sge(range).ok());
        let sges = [sge.ok_or(INVALID)?];
        if self.queues.channels[channel].sends.room() == 0 {
            return Err(Stopped::Blocked);
        }
        let needs_credit = matches!((kind, op), (WorkKind::Transfer, SendOp::WriteImm(..)));
        if needs_credit && !self.queues.imm_sender.send() {
            return Err(Stopped::Blocked);
        }
        let mut wr = SendWr::new(0, op, Data::Regions(&sges)).signaled_if_queued();
        wr.streaming = operation.range.len() as u64 >= STREAMING_LEN;
        let request = WorkRequest { kind, slot: self.key, ..CONTROL };
        match self.queues.channels[channel].post(channel, wr, request) {
            Ok(posted) => {
                self.posted += 1;
                self.queued += u32::from(posted == Posted::Queued);
                Ok(())
            }
            Err(error) => {
                if needs_credit {
                    self.queues.imm_sender.take_back();
                }
                Err(error.into())
            }
        }
    }

    fn post_batch(
        &mut self,
        plan: &mut BatchPlan,
        operation: &mut Operation,
        has_ended: bool,
    ) -> Result<(), Stopped> {
        let is_read = operation.kind == Kind::ReadBatch;
        let Stored::Batch(batch) = &mut operation.stored else { return Ok(()) };
        // Of a batch that has ended one more request is posted, if others are unsignaled.
        while !has_ended || self.queues.channels[plan.channel].sends.unsignaled() > 0 {
            if self.post_chunk(plan, &mut batch.0, is_read, has_ended)? {
                break;
            }
        }
        Ok(())
    }

    /// Posts a chunk of a batch, or the rest of one, with one doorbell. The last request of a chunk is signaled. Returns whether the batch is
    /// posted to its end.
    fn post_chunk(
        &mut self,
        plan: &mut BatchPlan,
        batch: &mut BatchInner,
        is_read: bool,
        has_ended: bool,
    ) -> Result<bool, Stopped> {
        let (former, mut posted, mut queued, mut is_announced) = (*plan, 0, 0, false);
        let index = plan.channel;
        let Channel { qp, sends, .. } = &mut self.queues.channels[index];
        let former_len = sends.len();
        let is_streaming = batch.blocks.bytes() >= STREAMING_LEN;
        let mut end = Ok(false);
        let rung = qp.post_batch(|doorbell| {
            end = 'chunk: loop {
                let mut after = plan.cursor;
                let Some(work) = batch.blocks.next_work(&mut after, self.queues.max_pieces, plan.max_len)
                else {
                    break Ok(true);
                };
                if sends.room() == 0 {
                    break Err(Stopped::Blocked);
                }
                let Some(region) = batch.remotes.get(usize::from(work.remote)) else { break Err(INVALID) };
                let remote = region.at(work.remote_offset);
                let sge = |piece: &Piece| -> Option<Sge<'_>> {
                    let buffer = batch.locals.get(usize::from(piece.local)).map(AnyBuffer::buffer)?;
                    let start = buffer.start() + piece.offset as usize;
                    buffer.region().sge(start..start + piece.len as usize).ok()
                };
                let pieces = work.pieces();
                let Some(first) = pieces.first().and_then(sge) else { break Err(INVALID) };
                let mut all;
                let sges = if pieces.len() == 1 {
                    core::slice::from_ref(&first)
                } else {
                    all = [first; MAX_PIECES];
                    for (entry, piece) in all.iter_mut().zip(pieces) {
                        let Some(sge) = sge(piece) else { break 'chunk Err(INVALID) };
                        *entry = sge;
                    }
                    &all[..pieces.len()]
                };
                // A batch that has ended announces nothing more: it must not wait for credit. Only its last request is to be signaled.
                let announce = work.announce.filter(|_| !has_ended);
                let op = match (is_read, announce) {
                    (true, _) => SendOp::Read(remote),
                    (false, None) => SendOp::Write(remote),
                    (false, Some(_)) if !self.queues.imm_sender.send() => break Err(Stopped::Blocked),
                    (false, Some(imm)) => SendOp::WriteImm(remote, imm),
                };
                let ends_chunk =
                    work.is_last || has_ended || announce.is_some() || plan.in_chunk + 1 >= SIGNAL_INTERVAL;
                let mut wr = SendWr::new(0, op, Data::Regions(sges));
                wr.signal = if ends_chunk { Signal::IfQueued } else { Signal::OnFailure };
                wr.streaming = is_streaming;
                let request = WorkRequest {
                    kind: WorkKind::Transfer,
                    slot: self.key,
                    first_block: work.first_block,
                    blocks: work.blocks,
                    signaled: ends_chunk,
                };
                match post(sends, index, wr, request, |wr| doorbell.post(wr)) {
                    Ok(done) => queued += u32::from(done == Posted::Queued),
                    Err(error) => {
                        if announce.is_some() {
                            self.queues.imm_sender.take_back();
                        }
                        break Err(error.into());
                    }
                }
                posted += 1;
                is_announced = announce.is_some();
                plan.cursor = after;
                plan.in_chunk += 1;
                if ends_chunk {
                    plan.in_chunk = 0;
                    if !plan.stays || announce.is_some() {
                        plan.channel = channel_behind(index, 1, self.queues.qps);
                    }
                    break Ok(false);
                }
            };
            Ok::<(), PostError>(())
        });
        if let Err(error) = rung {
            // The device has none of them.
            *plan = former;
            sends.truncate(former_len);
            if is_announced {
                self.queues.imm_sender.take_back();
            }
            return Err(error.into());
        }
        batch.work_requests += u64::from(posted);
        self.posted += posted;
        self.queued += queued;
        end
    }
}
