//! What a connection posts: batches, direct payloads and READs of the peer's position; and what their completions mean.
//! [`flush_policy`] decides when and in which form.

use crosstie_protocol::copyrpc::wire::{COMPACT_HEAD_SIZE, MAX_COMPACT_PAYLOAD};
use crosstie_protocol::copyrpc::{Placement, Write, WriteKind};

use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use super::position_reads::ReadTime;
use super::send_queue::{Poster, SendAccount, SendQueue};
use super::{ConnectedState, ConnectionCore, ConnectionState};
use crate::copyrpc::address::ConnectionId;
use crate::copyrpc::error::Failure;
use crate::copyrpc::flush_policy::{self, BATCHES_AHEAD, MAX_INLINE_BATCH, SendTiming};
use crate::copyrpc::wr_id::SendKind;
use crate::device::{Data, Mr, PostError, RemoteAddr, SendOp};

/// What a flush has left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::copyrpc) enum FlushOutcome {
    /// Nothing.
    Done,
    /// A small batch was delayed.
    Delayed,
    /// A READ of the peer's position is due later.
    ReadsLater,
    /// The send queue is full or operations are under way: completions are needed to continue.
    AwaitsCompletions,
}

const OUTSIDE: PostError = PostError::Invalid("a batch outside of its ring");

impl<U> ConnectionCore<U> {
    /// Posts everything that is due. `may_delay`: a small batch may wait for the next poll.
    #[inline]
    pub(in crate::copyrpc) fn flush(&self, may_delay: bool) -> Result<FlushOutcome, Failure> {
        let has_bulk = self.state.borrow().bulk.is_some();
        let is_busy = has_bulk && self.post_pieces()?;
        let outcome = self.flush_ring(may_delay)?;
        Ok(if is_busy { FlushOutcome::AwaitsCompletions } else { outcome })
    }

    fn flush_ring(&self, may_delay: bool) -> Result<FlushOutcome, Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (Some(connected), None) = (&mut state.connected, &state.failure) else {
            return Ok(FlushOutcome::Done);
        };
        if may_delay && connected.is_delayed(state.delayed_polls) {
            // The clock is read only here: while a batch is delayed.
            let now = Instant::now();
            let since = *state.delayed_since.get_or_insert(now);
            if now.saturating_duration_since(since) < flush_policy::MAX_DELAY {
                state.delayed_polls += 1;
                return Ok(FlushOutcome::Delayed);
            }
        }
        state.delayed_polls = 0;
        state.delayed_since = None;
        let mut outcome = FlushOutcome::Done;
        let SendQueue { qp, account } = &mut state.queue;
        qp.post_batch(|batch| {
            while let Some(write) = connected.flow.next_write() {
                match connected.post(batch, account, &write, None) {
                    Ok(()) => {}
                    Err(PostError::Full) => {
                        outcome = FlushOutcome::AwaitsCompletions;
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
        .map_err(Failure::Refused)?;
        connected.publish_position(&state.own_position);
        if connected.flow.needs_position_read() {
            match state.position_reads.time(connected.flow.progress().released) {
                ReadTime::Now if !state.read_peer_position()? => outcome = FlushOutcome::AwaitsCompletions,
                ReadTime::Later if outcome == FlushOutcome::Done => outcome = FlushOutcome::ReadsLater,
                _ => {}
            }
        }
        Ok(outcome)
    }

    /// Probes a peer that has calls to answer and sent no batch since the last probe: READs its consumer position. If the READ
    /// fails, the connection ends.
    pub(in crate::copyrpc) fn probe_peer(&self) -> Result<(), Failure> {
        let has_pending = self.pending_calls() > 0;
        let mut state = self.state.borrow_mut();
        if has_pending
            && !std::mem::take(&mut state.received_since_probe)
            && !state.position_reads.is_under_way
        {
            state.read_peer_position()?;
        }
        Ok(())
    }

    /// Applies the completion of a work request. Returns whether the application should hear of it.
    pub(in crate::copyrpc) fn complete_send(&self, kind: SendKind) -> Result<bool, Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        match kind {
            SendKind::Batch => state.queue.account.note_completed(kind),
            SendKind::PositionRead => {
                state.queue.account.note_completed(kind);
                state.position_reads.is_under_way = false;
                let word = u64::from_le_bytes(state.peer_position.load(0).unwrap_or_default());
                // Acquire: what this side writes to the peer's ring from now on comes after the load of the position. Pairs with
                // the Release fence of the peer in `publish_position`.
                fence(Ordering::Acquire);
                let Some(connected) = &mut state.connected else { return Ok(false) };
                connected.flow.position_read_done(word).map_err(Failure::Violation)?;
                let is_wanted = connected.flow.needs_position_read();
                return Ok(state.position_reads.done(connected.flow.progress().released, is_wanted));
            }
            SendKind::Operation(key) => state.complete_operation(ConnectionId(self.key), key),
        }
        Ok(true)
    }
}

impl<U> ConnectionState<U> {
    /// Posts a READ of the peer's consumer position. `false`: the send queue is full.
    fn read_peer_position(&mut self) -> Result<bool, Failure> {
        let Some(connected) = &mut self.connected else { return Ok(true) };
        let outside = |_| Failure::Refused(PostError::Invalid("a position outside of its region"));
        let piece = self.peer_position.sge(0..8).map_err(outside)?;
        match self.queue.post_signaled(SendKind::PositionRead, SendOp::Read(connected.peer_word), piece) {
            Ok(()) => {}
            Err(PostError::Full) => return Ok(false),
            Err(error) => return Err(Failure::Refused(error)),
        }
        connected.flow.position_read_posted();
        self.position_reads.posted(connected.flow.progress().released);
        self.queue.account.counters.reads.add(1);
        Ok(true)
    }
}

impl<U> ConnectedState<U> {
    /// Sends a message that was placed: at once, if it `goes_alone`, or with a later flush, from the staging ring.
    #[inline(always)]
    pub(super) fn send(
        &mut self,
        queue: &mut SendQueue,
        placement: &Placement,
        payload: &[u8],
        goes_alone: bool,
    ) -> SendTiming {
        if goes_alone && self.post_alone(queue, payload) {
            return SendTiming::Sent;
        }
        if flush_policy::is_direct_payload(payload.len(), queue.account.max_inline)
            && self.post_payload_directly(queue, placement, payload)
        {
            return SendTiming::Now;
        }
        self.write(placement, payload);
        // A batch is sealed by a payload that was posted directly, or by the end of the ring.
        let is_sealed = !self.flow.can_send_payload_directly();
        flush_policy::send_timing(self.flow.open_batch_messages(), is_sealed)
    }

    /// Posts the message that was placed last, whose payload is not in the staging ring. False if it is not a compact batch, or cannot be
    /// posted now; a later flush finds out why.
    #[inline(never)]
    fn post_alone(&mut self, queue: &mut SendQueue, payload: &[u8]) -> bool {
        if self.is_delayed(0) {
            return false;
        }
        let Some(write) = self.flow.next_write() else { return false };
        let SendQueue { qp, account } = queue;
        write.compact.is_some() && self.post(qp, account, &write, Some(payload)).is_ok()
    }

    /// Posts a WRITE of the protocol. `payload`: that of a compact batch, if it is not in the staging ring.
    #[inline(always)]
    fn post(
        &mut self,
        poster: &mut impl Poster,
        account: &mut SendAccount,
        write: &Write,
        payload: Option<&[u8]>,
    ) -> Result<(), PostError> {
        let op = SendOp::WriteImm(self.peer_ring_at(write.offset), write.imm);
        match write.compact {
            Some(head) => {
                // Always inline: its bytes are not in one piece in the staging ring.
                let mut staged = [0; MAX_COMPACT_PAYLOAD as usize];
                let bytes = match payload {
                    Some(payload) => payload,
                    None => {
                        let staged = staged.get_mut(..write.len - COMPACT_HEAD_SIZE).ok_or(OUTSIDE)?;
                        self.staging.read(write.payload_offset(), staged).map_err(|_| OUTSIDE)?;
                        staged
                    }
                };
                let head = head.to_words().map(u64::to_le);
                account.post_write(poster, op, Data::InlineHead { head, bytes }, write.len)?;
            }
            None => self.post_staged(poster, account, op, write)?,
        }
        self.flow.write_posted(write);
        match write.kind() {
            WriteKind::Batch => {
                account.counters.count_batch(write.metadata.message_count);
                self.batch_ends.rotate_left(1);
                self.batch_ends[BATCHES_AHEAD - 1] = self.flow.progress().posted;
            }
            WriteKind::Wrap => account.counters.wraps.add(1),
            WriteKind::Credit => account.counters.credit_batches.add(1),
        }
        Ok(())
    }

    /// Posts a batch with metadata from the staging ring.
    #[inline(never)]
    fn post_staged(
        &mut self,
        poster: &mut impl Poster,
        account: &mut SendAccount,
        op: SendOp,
        write: &Write,
    ) -> Result<(), PostError> {
        self.staging.store(write.offset, &write.metadata.encode()).map_err(|_| OUTSIDE)?;
        if flush_policy::is_inline_batch(write.len, account.max_inline) {
            let mut inline = [0; MAX_INLINE_BATCH];
            let inline = inline.get_mut(..write.len).ok_or(OUTSIDE)?;
            self.staging.read(write.offset, inline).map_err(|_| OUTSIDE)?;
            return account.post_write(poster, op, Data::Inline(inline), write.len);
        }
        let piece = [self.staging.sge(write.offset..write.offset + write.len).map_err(|_| OUTSIDE)?];
        account.post_write(poster, op, Data::Regions(&piece), write.len)
    }

    /// Posts the payload of the message that was placed last, from the caller's memory to its place in the peer's ring. `false`:
    /// it has to go with its batch.
    #[inline(never)]
    fn post_payload_directly(
        &mut self,
        queue: &mut SendQueue,
        placement: &Placement,
        payload: &[u8],
    ) -> bool {
        let SendQueue { qp, account } = queue;
        let op = SendOp::Write(self.peer_ring_at(placement.payload_offset()));
        if !self.flow.can_send_payload_directly()
            || account.post_write(qp, op, Data::Inline(payload), payload.len()).is_err()
        {
            return false;
        }
        account.counters.direct.add(1);
        let stored = self.staging.store(placement.offset, &placement.header.encode());
        debug_assert!(stored.is_ok(), "the protocol places messages inside the ring");
        self.flow.payload_sent_directly(placement);
        true
    }

    #[inline]
    fn peer_ring_at(&self, offset: usize) -> RemoteAddr {
        RemoteAddr { addr: self.peer_ring.addr + offset as u64, ..self.peer_ring }
    }

    /// Writes a message to the staging ring.
    #[inline(always)]
    fn write(&mut self, placement: &Placement, payload: &[u8]) {
        let written = self.staging.store_both(placement.offset, &placement.header.encode(), payload);
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// Writes a message whose payload is in two parts.
    pub(super) fn write_in_two_parts(&mut self, placement: &Placement, first: &[u8], second: &[u8]) {
        self.write(placement, first);
        let written = self.staging.write(placement.payload_offset() + first.len(), second);
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// Stores the consumer position for the peer to READ, if it has moved.
    #[inline]
    pub(super) fn publish_position(&mut self, word: &Mr) {
        let consumer = self.flow.consumer_position();
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

    /// Whether a poll should delay the open batch, which it has delayed so many times.
    #[inline]
    fn is_delayed(&self, polls: u32) -> bool {
        let messages = self.flow.open_batch_messages();
        flush_policy::is_delayed(messages, self.flow.progress(), self.batch_ends[0], polls)
    }
}
