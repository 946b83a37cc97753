//! The send queue of a connection: posts batches, direct payloads and READs of the peer's position, and applies their
//! completions. [`flush_policy`] decides when and in which form.
//!
//! The send queue is accounted here: at most [`SEND_DEPTH`] work requests are outstanding. A batch asks for a completion only
//! once in [`SIGNAL_INTERVAL`] WRITEs, and that completion stands for itself and the unsignaled WRITEs before it. All
//! other work requests are signaled and stand for themselves.

use crosstie_protocol::copyrpc::wire::{COMPACT_HEAD_SIZE, CompactHead};
use crosstie_protocol::copyrpc::{
    CompactWrite, HeldSpace, Placement, Progress, ReplyToken, RingWrite, RingWriteKind,
};

use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use super::position_reads::ReadTime;
use super::{ConnectedState, Connection, ConnectionState};
use crate::copyrpc::address::EndpointId;
use crate::copyrpc::counters::{Counters, RunningCounters};
use crate::copyrpc::error::Failure;
use crate::copyrpc::flush_policy::{
    self, BATCHES_AHEAD, MAX_COMPACT_BATCH, MAX_INLINE_BATCH, SEND_DEPTH, SIGNAL_INTERVAL, SendTiming,
};
use crate::copyrpc::wr_id::{SendKind, encode_wr_id};
use crate::device::{Data, Mr, PostError, Posted, RcQp, RemoteAddr, SendOp, SendWr, Signal};

/// What a flush has left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::copyrpc) enum FlushOutcome {
    /// Nothing.
    Done,
    /// A small batch was held back.
    HeldBack,
    /// A READ of the peer's position is due later.
    ReadsLater,
    /// The send queue is full or operations are under way: completions are needed to continue.
    AwaitsCompletions,
}

impl<U> Connection<U> {
    /// Posts everything that is due. `may_hold`: a small batch may be held back.
    #[inline]
    pub(in crate::copyrpc) fn flush(
        &self,
        may_hold: bool,
        counters: &mut Counters,
    ) -> Result<FlushOutcome, Failure> {
        let has_bulk = self.state.borrow().bulk.is_some();
        let is_busy = has_bulk && self.post_pieces(counters)?;
        let outcome = self.flush_ring(may_hold, counters)?;
        Ok(if is_busy { FlushOutcome::AwaitsCompletions } else { outcome })
    }

    fn flush_ring(&self, may_hold: bool, counters: &mut Counters) -> Result<FlushOutcome, Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (Some(connected), None) = (&mut state.connected, &state.failure) else {
            return Ok(FlushOutcome::Done);
        };
        if may_hold && connected.is_held_back(state.held_polls) {
            // The clock is read only here: while a batch is held back.
            let now = Instant::now();
            let since = *state.held_since.get_or_insert(now);
            if now.saturating_duration_since(since) < flush_policy::MAX_HELD_TIME {
                state.held_polls += 1;
                return Ok(FlushOutcome::HeldBack);
            }
        }
        state.held_polls = 0;
        state.held_since = None;
        let mut outcome = match connected.protocol.open_compact() {
            Some(write) => state.post_open_compact(self.key, &write, counters)?,
            None => state.post_writes(self.key, counters)?,
        };
        let Some(connected) = &mut state.connected else { return Ok(outcome) };
        connected.publish_position(&state.own_position);
        if connected.protocol.needs_position_read() {
            let is_posted = match state.position_reads.time(connected.protocol.progress().released) {
                ReadTime::Now => state.read_peer_position(self.key, counters)?,
                ReadTime::Later if outcome == FlushOutcome::Done => return Ok(FlushOutcome::ReadsLater),
                ReadTime::Later | ReadTime::Never => true,
            };
            if !is_posted {
                outcome = FlushOutcome::AwaitsCompletions;
            }
        }
        Ok(outcome)
    }

    /// Probes a peer that has calls to answer and sent no batch since the last probe: READs its consumer position. If the READ
    /// fails, the connection ends.
    pub(in crate::copyrpc) fn probe_peer(&self, counters: &mut Counters) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let has_pending =
            state.connected.as_ref().is_some_and(|connected| connected.protocol.flow_state().pending > 0);
        if has_pending
            && !std::mem::take(&mut state.received_since_probe)
            && !state.position_reads.is_under_way
            && state.failure.is_none()
        {
            state.read_peer_position(self.key, counters)?;
        }
        Ok(())
    }

    /// Applies the completion of a work request. Returns whether the application should hear of it.
    pub(in crate::copyrpc) fn complete_send(&self, kind: SendKind) -> Result<bool, Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        match kind {
            // A signaled batch stands for itself and the unsignaled WRITEs before it.
            SendKind::Batch => state.outstanding = state.outstanding.saturating_sub(SIGNAL_INTERVAL),
            SendKind::PositionRead => {
                state.position_reads.is_under_way = false;
                state.outstanding = state.outstanding.saturating_sub(1);
                let word = u64::from_le_bytes(state.peer_position.load(0).unwrap_or_default());
                // Acquire: what this side writes to the peer's ring from now on comes after the load of the position. Pairs with
                // the Release fence of the peer in `flush_ring`.
                fence(Ordering::Acquire);
                let Some(connected) = &mut state.connected else { return Ok(false) };
                connected.protocol.position_read_done(word).map_err(Failure::Violation)?;
                let is_wanted = connected.protocol.needs_position_read();
                return Ok(state.position_reads.done(connected.protocol.progress().released, is_wanted));
            }
            SendKind::Operation(key) => state.complete_operation(EndpointId(self.key), key),
        }
        Ok(true)
    }
}

impl<U> ConnectionState<U> {
    /// Posts all WRITEs that are due.
    fn post_writes(&mut self, key: u32, counters: &mut Counters) -> Result<FlushOutcome, Failure> {
        let ConnectionState { qp, connected, outstanding, signaling, max_inline, .. } = self;
        let Some(connected) = connected else { return Ok(FlushOutcome::Done) };
        while let Some(write) = connected.protocol.next_write() {
            if *outstanding == SEND_DEPTH {
                return Ok(FlushOutcome::AwaitsCompletions);
            }
            let is_signaled = signaling.is_due();
            let posted = match write.compact {
                Some(head) => connected.post_compact(qp, key, &write, head, is_signaled),
                None => connected.post_batch(qp, key, &write, *max_inline, is_signaled),
            };
            match posted {
                Ok(()) => {}
                Err(PostError::Full) => return Ok(FlushOutcome::AwaitsCompletions),
                Err(error) => return Err(Failure::Refused(error)),
            }
            connected.protocol.write_posted();
            *outstanding += 1;
            signaling.count_post(is_signaled);
            counters.work_requests += 1;
            counters.signaled += u64::from(is_signaled);
            counters.bytes += write.len as u64;
            match write.kind {
                RingWriteKind::Batch => {
                    counters.count_batch(write.metadata.message_count);
                    connected.note_batch_end();
                }
                RingWriteKind::Wrap => counters.wraps += 1,
                RingWriteKind::Credit => counters.credit_batches += 1,
            }
        }
        Ok(FlushOutcome::Done)
    }

    /// Posts the open batch, which is compact, from the staging ring. There is nothing else to post.
    #[inline(always)]
    fn post_open_compact(
        &mut self,
        key: u32,
        write: &CompactWrite,
        counters: &mut Counters,
    ) -> Result<FlushOutcome, Failure> {
        let Some(connected) = &self.connected else { return Ok(FlushOutcome::Done) };
        let (mut bytes, from) = ([0; MAX_COMPACT_BATCH], write.payload_offset());
        let read = payload_part(&mut bytes, write.payload_len).map(|to| connected.staging.read(from, to));
        let posted = match read {
            Some(Ok(())) => self.post_compact_bytes(key, write, &mut bytes, counters),
            _ => Err(OUTSIDE),
        };
        match posted {
            Ok(()) => {}
            Err(PostError::Full) => return Ok(FlushOutcome::AwaitsCompletions),
            Err(error) => return Err(Failure::Refused(error)),
        }
        if let Some(connected) = &mut self.connected {
            connected.protocol.compact_posted(write);
            connected.note_batch_end();
        }
        Ok(FlushOutcome::Done)
    }

    /// Posts the reply to the last request that waits for one, at once, if no poll would hold it back. It is not written to the staging
    /// ring then. Only if [`is_last_reply`](crosstie_protocol::copyrpc::Endpoint::is_last_reply). `Err`: it was not posted. Then the ring space
    /// of the request may be released all the same, if the reply is not too long.
    #[inline(never)]
    pub(super) fn post_reply_alone(
        &mut self,
        key: u32,
        token: ReplyToken,
        space: &mut Option<HeldSpace>,
        payload: &[u8],
        counters: &RunningCounters,
    ) -> Result<(), ReplyToken> {
        let Some(connected) = &mut self.connected else { return Err(token) };
        let is_in_ring = space.is_some();
        let Some(write) = connected.protocol.reply_alone(&token, payload.len(), space) else {
            return Err(token);
        };
        if connected.is_alone_held_back(&write) {
            return Err(token);
        }
        if !self.post_alone(key, &write, payload, counters) {
            return Err(token);
        }
        let Some(connected) = &mut self.connected else { return Err(token) };
        connected.protocol.reply_posted(token, &write);
        connected.note_batch_end();
        if is_in_ring {
            connected.publish_position(&self.own_position);
        }
        Ok(())
    }

    /// Makes and posts a call, if no other one is pending, and it is short and can be alone in its batch. Then it is not written to the
    /// staging ring. Returns `user` if the call was not made.
    #[inline(never)]
    pub(super) fn post_call_alone(
        &mut self,
        key: u32,
        payload: &[u8],
        response: usize,
        user: U,
        deadline: Option<Instant>,
        counters: &RunningCounters,
    ) -> Option<U> {
        let Some(connected) = &mut self.connected else { return Some(user) };
        let Some(write) = connected.protocol.call_alone(payload.len(), response) else { return Some(user) };
        if !self.post_alone(key, &write, payload, counters) {
            return Some(user);
        }
        let Some(connected) = &mut self.connected else { return Some(user) };
        let call = connected.protocol.call_posted(&write, user);
        connected.note_batch_end();
        self.deadlines.record(call, deadline, self.config.pending_calls);
        None
    }

    /// Posts a compact batch with this payload from the caller's memory. Returns whether it was posted.
    #[inline(always)]
    fn post_alone(
        &mut self,
        key: u32,
        write: &CompactWrite,
        payload: &[u8],
        counters: &RunningCounters,
    ) -> bool {
        let Some(connected) = &self.connected else { return false };
        if self.outstanding == SEND_DEPTH {
            return false;
        }
        let op = SendOp::WriteImm(connected.peer_ring_at(write.offset), write.imm);
        let data = Data::InlineHead { head: write.head.to_words(), bytes: payload };
        let is_signaled = self.signaling.is_due();
        let mut wr = SendWr::new(encode_wr_id(key, SendKind::Batch), op, data);
        wr.signal = if is_signaled { Signal::IfQueued } else { Signal::OnFailure };
        match self.qp.post(&wr) {
            Ok(Posted::Done) => {}
            Ok(Posted::Queued) => {
                self.outstanding += 1;
                self.signaling.count_post(is_signaled);
                counters.borrow_mut().signaled += u64::from(is_signaled);
            }
            // The next flush tries again, and finds out what is wrong.
            Err(_) => return false,
        }
        counters.count_single(COMPACT_HEAD_SIZE + payload.len());
        true
    }

    /// Posts a compact batch; `bytes` has the payload, and room for the head. [`PostError::Full`]: the send queue is full.
    #[inline(always)]
    fn post_compact_bytes(
        &mut self,
        key: u32,
        write: &CompactWrite,
        bytes: &mut [u8; MAX_COMPACT_BATCH],
        counters: &mut Counters,
    ) -> Result<(), PostError> {
        let Some(connected) = &self.connected else { return Err(OUTSIDE) };
        if self.outstanding == SEND_DEPTH {
            return Err(PostError::Full);
        }
        bytes[..COMPACT_HEAD_SIZE].copy_from_slice(&write.head.encode());
        let bytes = bytes.get(..COMPACT_HEAD_SIZE + write.payload_len).ok_or(OUTSIDE)?;
        let is_signaled = self.signaling.is_due();
        connected.post_write(&mut self.qp, key, write.offset, write.imm, Data::Inline(bytes), is_signaled)?;
        self.outstanding += 1;
        self.signaling.count_post(is_signaled);
        counters.signaled += u64::from(is_signaled);
        counters.count_single(bytes.len());
        Ok(())
    }

    /// Whether a payload of `len` bytes can be posted directly now.
    #[inline]
    pub(super) fn can_post_directly(&self, len: usize) -> bool {
        flush_policy::is_direct_payload(len, self.max_inline)
            && self.outstanding < SEND_DEPTH
            && self.connected.as_ref().is_some_and(|connected| connected.protocol.can_send_payload_directly())
    }

    /// Posts the payload of the message that was placed last, from the caller's memory to its place in the peer's ring. `false`:
    /// the send queue is full, or the device refuses the WRITE, as it will refuse the batch.
    #[cold]
    pub(super) fn post_payload_directly(
        &mut self,
        key: u32,
        placement: &Placement,
        payload: &[u8],
        counters: &RunningCounters,
    ) -> bool {
        let Some(connected) = &mut self.connected else { return false };
        let addr = connected.peer_ring.addr + placement.payload_offset() as u64;
        let to = RemoteAddr { addr, ..connected.peer_ring };
        let wr_id = encode_wr_id(key, SendKind::Batch);
        let mut wr = SendWr::new(wr_id, SendOp::Write(to), Data::Inline(payload));
        let is_signaled = self.signaling.is_due();
        wr.signal = is_signaled.into();
        if self.qp.post(&wr).is_err() {
            return false;
        }
        self.outstanding += 1;
        self.signaling.count_post(is_signaled);
        let mut counters = counters.borrow_mut();
        counters.work_requests += 1;
        counters.signaled += u64::from(is_signaled);
        counters.bytes += payload.len() as u64;
        counters.direct += 1;
        let stored = connected.staging.store(placement.offset, &placement.header.encode());
        debug_assert!(stored.is_ok(), "the protocol places messages inside the ring");
        connected.protocol.payload_sent_directly(placement);
        true
    }

    /// Posts a READ of the peer's consumer position. `false`: the send queue is full.
    fn read_peer_position(&mut self, key: u32, counters: &mut Counters) -> Result<bool, Failure> {
        let Some(connected) = &mut self.connected else { return Ok(true) };
        if self.outstanding == SEND_DEPTH {
            return Ok(false);
        }
        let outside = |_| Failure::Refused(PostError::Invalid("a position outside of its region"));
        let piece = [self.peer_position.sge(0..8).map_err(outside)?];
        let op = SendOp::Read(connected.peer_word);
        let wr = SendWr::new(encode_wr_id(key, SendKind::PositionRead), op, Data::Regions(&piece));
        match self.qp.post(&wr.signaled()) {
            Ok(_) => {}
            Err(PostError::Full) => return Ok(false),
            Err(error) => return Err(Failure::Refused(error)),
        }
        connected.protocol.position_read_posted();
        self.position_reads.posted(connected.protocol.progress().released);
        self.outstanding += 1;
        counters.work_requests += 1;
        counters.signaled += 1;
        counters.reads += 1;
        Ok(true)
    }
}

/// Where the payload of a compact batch is in its bytes, if it is short enough.
#[inline(always)]
fn payload_part(bytes: &mut [u8; MAX_COMPACT_BATCH], len: usize) -> Option<&mut [u8]> {
    bytes[COMPACT_HEAD_SIZE..].get_mut(..len)
}

const OUTSIDE: PostError = PostError::Invalid("a batch outside of its ring");

impl<U> ConnectedState<U> {
    /// Posts a batch from the staging ring.
    fn post_batch(
        &mut self,
        qp: &mut RcQp,
        key: u32,
        write: &RingWrite,
        max_inline: usize,
        is_signaled: bool,
    ) -> Result<(), PostError> {
        self.staging.store(write.offset, &write.metadata.encode()).map_err(|_| OUTSIDE)?;
        if flush_policy::is_inline_batch(write.len, max_inline) {
            let mut inline = [0; MAX_INLINE_BATCH];
            let inline = inline.get_mut(..write.len).ok_or(OUTSIDE)?;
            self.staging.read(write.offset, inline).map_err(|_| OUTSIDE)?;
            return self.post_write(qp, key, write.offset, write.imm, Data::Inline(inline), is_signaled);
        }
        let piece = [self.staging.sge(write.offset..write.offset + write.len).map_err(|_| OUTSIDE)?];
        self.post_write(qp, key, write.offset, write.imm, Data::Regions(&piece), is_signaled)
    }

    /// Posts a compact batch that was sealed. Always inline: its bytes are not in one piece in the staging ring, and what follows it
    /// may be placed over them.
    #[cold]
    fn post_compact(
        &self,
        qp: &mut RcQp,
        key: u32,
        write: &RingWrite,
        head: CompactHead,
        is_signaled: bool,
    ) -> Result<(), PostError> {
        let mut bytes = [0; MAX_COMPACT_BATCH];
        let bytes = bytes.get_mut(..write.len).ok_or(OUTSIDE)?;
        let (front, payload) = bytes.split_at_mut_checked(COMPACT_HEAD_SIZE).ok_or(OUTSIDE)?;
        front.copy_from_slice(&head.encode());
        self.staging.read(write.payload_offset(), payload).map_err(|_| OUTSIDE)?;
        self.post_write(qp, key, write.offset, write.imm, Data::Inline(bytes), is_signaled)
    }

    #[inline(always)]
    fn post_write(
        &self,
        qp: &mut RcQp,
        key: u32,
        offset: usize,
        imm: u32,
        data: Data<'_>,
        is_signaled: bool,
    ) -> Result<(), PostError> {
        let op = SendOp::WriteImm(self.peer_ring_at(offset), imm);
        let mut wr = SendWr::new(encode_wr_id(key, SendKind::Batch), op, data);
        wr.signal = is_signaled.into();
        qp.post(&wr).map(|_| ())
    }

    #[inline(always)]
    fn peer_ring_at(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { addr: self.peer_ring.addr + offset as u64, ..self.peer_ring }
    }

    /// Writes a message to the staging ring.
    #[inline(always)]
    pub(super) fn write(&mut self, placement: &Placement, payload: &[u8]) {
        let written = self.staging.store_both(placement.offset, &placement.header.encode(), payload);
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// Writes a message whose payload is in two parts.
    #[cold]
    #[inline(never)]
    pub(super) fn write_in_two_parts(&mut self, placement: &Placement, first: &[u8], second: &[u8]) {
        self.write(placement, first);
        let written = self.staging.write(placement.payload_offset() + first.len(), second);
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// Stores the consumer position for the peer to READ, if it has moved.
    #[inline(always)]
    pub(super) fn publish_position(&mut self, word: &Mr) {
        let consumer = self.protocol.consumer_position();
        if consumer == self.published_position {
            return;
        }
        self.published_position = consumer;
        // Release: the loads of the released messages come before this store. Pairs with the Acquire fence of the peer in
        // `complete_send`, after which it writes over them. (The metadata of a batch is ordered by the post.)
        fence(Ordering::Release);
        let stored = word.store(0, &consumer.to_le_bytes());
        debug_assert!(stored.is_ok());
    }

    /// When the open batch should go out.
    #[inline(always)]
    pub(super) fn send_timing(&self) -> SendTiming {
        // A batch is sealed by a payload that was posted directly, or by the end of the ring.
        let is_sealed = !self.protocol.can_send_payload_directly();
        flush_policy::send_timing(self.protocol.open_batch_messages(), is_sealed)
    }

    /// Notes where a batch that was posted ends.
    #[inline(always)]
    fn note_batch_end(&mut self) {
        self.batch_ends.rotate_left(1);
        self.batch_ends[BATCHES_AHEAD - 1] = self.protocol.progress().posted;
    }

    /// Whether a poll would hold back a batch that is not placed yet.
    #[inline(always)]
    fn is_alone_held_back(&self, write: &CompactWrite) -> bool {
        let progress = self.protocol.progress();
        let placed = progress.placed + write.placed_len();
        flush_policy::is_held_back(1, Progress { placed, ..progress }, self.batch_ends[0], 0)
    }

    /// Whether a poll should hold the open batch back.
    #[inline]
    fn is_held_back(&self, held_polls: u32) -> bool {
        let messages = self.protocol.open_batch_messages();
        flush_policy::is_held_back(messages, self.protocol.progress(), self.batch_ends[0], held_polls)
    }
}
