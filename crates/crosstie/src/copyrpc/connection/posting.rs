//! What goes out: batches, payloads ahead of them, READs of the peer's position; and what is known of it when they are done.

use crosstie_protocol::copyrpc::{EmitKind, Placed, Progress};

use super::{Connection, Link, State};
use crate::copyrpc::endpoint::EndpointId;
use crate::copyrpc::error::Failure;
use crate::copyrpc::{BATCH_CLASSES, Counters};
use crate::device::{Data, PostError, RemoteAddr, SendOp, SendWr};

/// One write in so many asks for a completion, so that the send queue is known to have moved on.
const SIGNAL_INTERVAL: u32 = 64;
/// Requests that a send queue holds. Half of it goes on while the completion of the other half is awaited.
pub(in crate::copyrpc) const SEND_DEPTH: u32 = 2 * SIGNAL_INTERVAL;
/// Batches on their way that the peer has not released: from here on a small batch waits for company.
pub(super) const BATCHES_AHEAD: usize = 2;
/// From this share of what the peer has not released on, a batch is no small one: it does not wait. With less, a loop that is
/// faster than the way there and back would go on sending every message alone; with more, calls wait for others
/// that are answered no sooner.
const COMPANY: u64 = 8;
/// Polls that a small batch waits for company at most.
const HOLD_POLLS: u32 = 16;
/// Batches up to here are handed to the device with the request, rather than left for it to fetch.
const INLINE: usize = 220;
/// Payloads from here on go straight to the peer's ring, if the device takes as much with a request: a batch has little to
/// gain by them, and a copy is saved. A device that takes so much copies at once and fetches nothing: small batches
/// gain nothing by being handed over.
const DIRECT: usize = 8 << 10;
/// Messages of a batch that goes at once.
const LARGE_BATCH: u32 = 32;

/// Bytes that a queue pair of this device should take with a request.
pub(in crate::copyrpc) fn inline_limit(device: u32) -> u32 {
    if device as usize >= DIRECT { device } else { device.min(INLINE as u32) }
}

/// What a send completion is about; the low bits of `wr_id`, above it the connection's index and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::copyrpc) enum Sent {
    Batch,
    Position,
    /// Of the operation with this key.
    Operation(u32),
}

/// `wr_id` of a request of the connection with this key.
pub(in crate::copyrpc) fn wr_id(key: u32, sent: Sent) -> u64 {
    u64::from(key) << 2
        | match sent {
            Sent::Batch => 0,
            Sent::Position => 1,
            Sent::Operation(operation) => u64::from(operation) << 34 | 2,
        }
}

/// What [`wr_id`] was made of.
pub(in crate::copyrpc) fn from_wr_id(wr_id: u64) -> (u32, Sent) {
    let sent = match wr_id & 3 {
        0 => Sent::Batch,
        1 => Sent::Position,
        _ => Sent::Operation((wr_id >> 34) as u32),
    };
    ((wr_id >> 2) as u32, sent)
}

/// What a flush left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::copyrpc) enum Left {
    Nothing,
    /// A small batch waits for company.
    Held,
    /// The send queue is full.
    Pressed,
}

/// When what was written should go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::copyrpc) enum Due {
    Now,
    /// With the next poll.
    Later,
}

impl<U> Connection<U> {
    /// Posts what is due. `hold`: a small batch may wait for company.
    #[inline]
    pub(in crate::copyrpc) fn flush(&self, hold: bool, counters: &mut Counters) -> Result<Left, Failure> {
        let has_bulk = self.state.borrow().bulk.is_some();
        let busy = has_bulk && self.advance(counters)?;
        let left = self.flush_ring(hold, counters)?;
        Ok(if busy { Left::Pressed } else { left })
    }

    fn flush_ring(&self, hold: bool, counters: &mut Counters) -> Result<Left, Failure> {
        let mut state = self.state.borrow_mut();
        let State { qp, position, published, link, failure, outstanding, unsignaled, inline, held, .. } =
            &mut *state;
        let (Some(link), None) = (link, &failure) else { return Ok(Left::Nothing) };
        if hold && link.prefers_company() && *held < HOLD_POLLS {
            *held += 1;
            return Ok(Left::Held);
        }
        *held = 0;
        let mut left = Left::Nothing;
        while let Some(emit) = link.protocol.emit() {
            if *outstanding == SEND_DEPTH {
                left = Left::Pressed;
                break;
            }
            let refused = |_| Failure::Refused(PostError::Invalid("a batch outside of its ring"));
            link.staging.store(emit.offset, &emit.metadata.encode()).map_err(refused)?;
            let piece = [link.staging.sge(emit.offset..emit.offset + emit.len).map_err(refused)?];
            let mut small = [0; INLINE];
            let data = match small.get_mut(..emit.len) {
                Some(small) if emit.len <= *inline && *inline < DIRECT => {
                    link.staging.read(emit.offset, small).map_err(refused)?;
                    Data::Inline(small)
                }
                _ => Data::Regions(&piece),
            };
            let to = RemoteAddr { addr: link.peer_ring.addr + emit.offset as u64, ..link.peer_ring };
            let op = SendOp::WriteImm(to, emit.imm);
            let mut wr = SendWr::new(wr_id(self.key, Sent::Batch), op, data);
            wr.signaled = *unsignaled + 1 >= SIGNAL_INTERVAL;
            match qp.post(&wr) {
                Ok(()) => {}
                Err(PostError::Full) => {
                    left = Left::Pressed;
                    break;
                }
                Err(error) => return Err(Failure::Refused(error)),
            }
            link.protocol.posted();
            *outstanding += 1;
            *unsignaled = if wr.signaled { 0 } else { *unsignaled + 1 };
            counters.work_requests += 1;
            counters.signaled += u64::from(wr.signaled);
            counters.bytes += emit.len as u64;
            match emit.kind {
                EmitKind::Batch => {
                    counters.batches += 1;
                    counters.batched += u64::from(emit.metadata.message_count);
                    counters.batch_sizes[size_class(emit.metadata.message_count)] += 1;
                    link.ends.rotate_left(1);
                    link.ends[BATCHES_AHEAD - 1] = link.protocol.progress().posted;
                }
                EmitKind::Wrap => counters.wraps += 1,
                EmitKind::Credit => counters.credit_batches += 1,
            }
        }
        let consumer = link.protocol.consumer();
        if consumer != *published {
            *published = consumer;
            let written = position.store(0, &consumer.to_le_bytes());
            debug_assert!(written.is_ok());
        }
        if link.protocol.wants_read() && !state.read_position(self.key, counters)? {
            left = Left::Pressed;
        }
        Ok(left)
    }

    /// Asks a peer that owes answers, and was not heard of since the last time, whether it is there: a READ that
    /// succeeds brings its position, one that fails ends the connection.
    pub(in crate::copyrpc) fn probe(&self, counters: &mut Counters) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let waits = state.link.as_ref().is_some_and(|link| link.protocol.ledger().pending > 0);
        if waits && !std::mem::take(&mut state.heard) && !state.reading && state.failure.is_none() {
            state.read_position(self.key, counters)?;
        }
        Ok(())
    }

    /// A request of the send queue is done, and with it all before it.
    pub(in crate::copyrpc) fn sent(&self, sent: Sent) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        match sent {
            // A completion stands for itself and all that asked for none before it.
            Sent::Batch => state.outstanding = state.outstanding.saturating_sub(SIGNAL_INTERVAL),
            Sent::Position => {
                state.reading = false;
                state.outstanding = state.outstanding.saturating_sub(1);
                let word = u64::from_le_bytes(state.peer_position.load(0).unwrap_or_default());
                if let Some(link) = &mut state.link {
                    link.protocol.read_done(word).map_err(Failure::Violation)?;
                }
            }
            Sent::Operation(key) => state.operated(EndpointId(self.key), key),
        }
        Ok(())
    }
}

impl<U> State<U> {
    #[inline]
    pub(super) fn write(&mut self, placed: &Placed, payload: &[u8]) {
        if let Some(link) = &mut self.link {
            link.write(placed, payload);
        }
    }

    /// Whether the batch under construction should go now: the peer can work on it while more are written.
    #[inline]
    pub(super) fn due(&self) -> Due {
        // Sealed: by a payload that went ahead, or by the ring's end.
        let now = self.link.as_ref().is_some_and(|link| {
            link.protocol.unsent_messages() >= LARGE_BATCH || !link.protocol.can_detach()
        });
        if now { Due::Now } else { Due::Later }
    }

    #[inline]
    pub(super) fn can_go_direct(&self, len: usize) -> bool {
        len >= DIRECT
            && len <= self.inline
            && self.outstanding < SEND_DEPTH
            && self.link.as_ref().is_some_and(|link| link.protocol.can_detach())
    }

    /// Posts the payload of the message that was placed last, straight from where it is. `false`: the send queue is full, or
    /// the device refuses it, as it will refuse the batch.
    #[cold]
    pub(super) fn write_direct(
        &mut self,
        key: u32,
        placed: &Placed,
        payload: &[u8],
        counters: &mut Counters,
    ) -> bool {
        let Some(link) = &mut self.link else { return false };
        let to = RemoteAddr { addr: link.peer_ring.addr + placed.payload_offset() as u64, ..link.peer_ring };
        let mut wr = SendWr::new(wr_id(key, Sent::Batch), SendOp::Write(to), Data::Inline(payload));
        wr.signaled = self.unsignaled + 1 >= SIGNAL_INTERVAL;
        if self.qp.post(&wr).is_err() {
            return false;
        }
        self.outstanding += 1;
        self.unsignaled = if wr.signaled { 0 } else { self.unsignaled + 1 };
        counters.work_requests += 1;
        counters.signaled += u64::from(wr.signaled);
        counters.bytes += payload.len() as u64;
        counters.direct += 1;
        let written = link.staging.store(placed.offset, &placed.header.encode());
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
        link.protocol.detach(placed);
        true
    }

    /// Posts a READ of the peer's position. `false`: the send queue is full.
    fn read_position(&mut self, key: u32, counters: &mut Counters) -> Result<bool, Failure> {
        let Some(link) = &mut self.link else { return Ok(true) };
        if self.outstanding == SEND_DEPTH {
            return Ok(false);
        }
        let refused = |_| Failure::Refused(PostError::Invalid("the word is too short"));
        let piece = [self.peer_position.sge(0..8).map_err(refused)?];
        let op = SendOp::Read(link.peer_word);
        let wr = SendWr::new(wr_id(key, Sent::Position), op, Data::Regions(&piece));
        match self.qp.post(&wr.signaled()) {
            Ok(()) => {}
            Err(PostError::Full) => return Ok(false),
            Err(error) => return Err(Failure::Refused(error)),
        }
        link.protocol.read_posted();
        self.reading = true;
        self.outstanding += 1;
        counters.work_requests += 1;
        counters.signaled += 1;
        counters.reads += 1;
        Ok(true)
    }
}

impl<U> Link<U> {
    #[inline(always)]
    fn write(&mut self, placed: &Placed, payload: &[u8]) {
        let written = self
            .staging
            .store(placed.offset, &placed.header.encode())
            .and_then(|()| self.staging.write(placed.payload_offset(), payload));
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// A message in two parts.
    #[cold]
    #[inline(never)]
    pub(in crate::copyrpc) fn write_parts(&mut self, placed: &Placed, first: &[u8], second: &[u8]) {
        self.write(placed, first);
        let written = self.staging.write(placed.payload_offset() + first.len(), second);
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// Whether a small batch would only add to several that are on their way.
    #[inline]
    fn prefers_company(&self) -> bool {
        let messages = self.protocol.unsent_messages();
        let Progress { placed, posted, released } = self.protocol.progress();
        messages > 0
            && messages < LARGE_BATCH
            && released < self.ends[0]
            && COMPANY * (placed - posted) < posted - released
    }
}

/// Where a batch of so many messages is counted, see [`Counters::batch_sizes`].
#[inline]
fn size_class(messages: u32) -> usize {
    let class = messages.saturating_sub(1).checked_ilog2().map_or(0, |log| log as usize + 1);
    class.min(BATCH_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn batches_are_counted_by_powers_of_two() {
        let classes = [1, 2, 3, 4, 5, 8, 9, 32_768, 32_769, u32::MAX].map(size_class);
        assert_eq!(classes, [0, 1, 2, 2, 3, 3, 4, 15, 15, 15]);
    }
}
