//! How a message is split over the rails, and how its parts are posted.

use core::slice;

use crosstie_protocol::rails::{
    Chunk, MAX_GROUP, MAX_RAILS, Mask, RECORD_LEN, RailLoad, Record, fixed_split, leader, rails_of, split,
};

use super::super::config::Split;
use super::super::counters::RailCells;
use super::super::endpoint::retry;
use super::super::error::Cause;
use super::transfer::Transfer;
use super::{Message, SendCore, wr_id};
use crate::device::{Data, PostError, Posted, SendOp, SendWr, Signal, clock};

/// On a connection with one rail, one of so many messages is measured that the device executes while they are posted.
const SAMPLE: u64 = 16;

impl SendCore {
    /// Sends the message whose sends are all matched.
    pub(super) fn send_message(&mut self, number: u64, slot: usize) {
        let matched = self.transfers[slot].take_lens();
        let (count, mut lens) = (matched.len(), [0; MAX_GROUP]);
        lens.iter_mut().zip(matched).for_each(|(to, len)| *to = len);
        let is_staged = count == 1 && lens[0] > 0 && lens[0] <= self.agreed.staging;
        let min_part = if is_staged { u32::MAX } else { self.context.config.min_part };
        let (split, empty_rail) = self.split_buffers(&lens[..count], min_part);
        let Ok((_, mask)) = self.protocol.begin(&split[..count], empty_rail) else {
            // The slot is free: all results of its last message were taken, which needs that it is done.
            return self.end(Cause::PeerError("its slot is in use".into()));
        };
        let untaken = ((1u16 << count) - 1) as u8;
        self.messages[slot] = Message { number, count: count as u8, untaken, is_done: false, mask, lens };
        // With several rails, all parts are measured: their rates decide about the split.
        let is_measured = self.agreed.rails > 1 || number.is_multiple_of(SAMPLE);
        self.transfers[slot].posted_at = is_measured.then(clock::now);
        if is_staged {
            self.counters.staged.add(1);
        }
        self.post_attempt(number, 0, mask, is_staged);
        self.transfers[slot].release(count);
    }

    /// How many bytes of each buffer go over each rail, and the rail for a message without bytes.
    pub(super) fn split_buffers(
        &self,
        sizes: &[u32],
        min_part: u32,
    ) -> ([[u32; MAX_RAILS]; MAX_GROUP], usize) {
        let (mut lens, mut total) = ([[0; MAX_RAILS]; MAX_GROUP], 0u64);
        if self.up.is_power_of_two() {
            // One rail: there is nothing to decide.
            let rail = self.up.trailing_zeros() as usize;
            lens.iter_mut().zip(sizes).for_each(|(lens, size)| lens[rail] = *size);
            return (lens, rail);
        }
        let loads = self.loads();
        for (lens, size) in lens.iter_mut().zip(sizes) {
            *lens = self.split_buffer(*size, &loads, min_part);
            total += u64::from(*size);
        }
        let empty_rail = if total == 0 { self.empty_rail(&loads) } else { 0 };
        (lens, empty_rail)
    }

    /// The rate and the load of each rail's port, as they are now.
    fn loads(&self) -> [RailLoad; MAX_RAILS] {
        let hint = self.context.hint();
        core::array::from_fn(|rail| {
            if self.up & (1 << rail) == 0 {
                return RailLoad::default();
            }
            let state = &self.rails[rail];
            let rate = state.load.rate().unwrap_or(self.context.link_rates[rail].into());
            RailLoad { rate: hint.apply(rail, rate), queued: state.load.queued() }
        })
    }

    /// How many bytes of a buffer go over each rail.
    fn split_buffer(&self, len: u32, loads: &[RailLoad; MAX_RAILS], min_part: u32) -> [u32; MAX_RAILS] {
        let lens = match self.split {
            Split::Adaptive => split(len, loads, min_part),
            Split::Fixed(weights) => {
                let usable: [u32; MAX_RAILS] =
                    core::array::from_fn(|rail| if self.up & (1 << rail) != 0 { weights[rail] } else { 0 });
                match (min_part, usable.iter().position(|weight| *weight > 0)) {
                    // All rails with a weight are down: any rail is better than none.
                    (_, None) => split(len, loads, min_part),
                    (u32::MAX, Some(rail)) => {
                        let mut lens = [0; MAX_RAILS];
                        lens[rail] = len;
                        lens
                    }
                    _ => fixed_split(len, &usable),
                }
            }
        };
        if lens == [0; MAX_RAILS] && len > 0 {
            // The hint excludes all rails that are up.
            let mut lens = lens;
            lens[leader(self.up).unwrap_or(0)] = len;
            return lens;
        }
        lens
    }

    /// The rail for a message without bytes.
    fn empty_rail(&self, loads: &[RailLoad; MAX_RAILS]) -> usize {
        let lens = self.split_buffer(1, loads, u32::MAX);
        lens.iter().position(|len| *len > 0).unwrap_or(0)
    }

    /// Posts the parts of an attempt.
    pub(super) fn post_attempt(&mut self, number: u64, attempt: u8, mask: Mask, is_staged: bool) {
        let mut failed: Mask = 0;
        for rail in rails_of(mask) {
            if self.post_part(number, attempt, mask, rail, is_staged).is_err() {
                failed |= 1 << rail;
            }
        }
        rails_of(failed).for_each(|rail| self.fail_rail(rail));
    }

    /// Posts a part with one doorbell: the bytes of a group, and the WRITE+IMM that completes the part. Where the device executes it
    /// meanwhile, it is finished.
    fn post_part(
        &mut self,
        number: u64,
        attempt: u8,
        mask: Mask,
        rail: usize,
        is_staged: bool,
    ) -> Result<(), PostError> {
        let Some(part) = self.protocol.part(number, attempt, rail) else { return Ok(()) };
        let imm = self.protocol.immediate(number, mask, attempt, is_staged);
        let slot = usize::from(imm.slot);
        let (message, transfer) = (&self.messages[slot], &self.transfers[slot]);
        let count = usize::from(message.count);
        let (chunks, bytes) = (&part.chunks[..count], part.bytes());
        let cells = &self.counters.rails[rail];
        let Some(endpoint) = self.rails[rail].endpoint.as_deref_mut() else { return Err(PostError::Full) };
        let qp = endpoint.take_qp();
        let (writes, from, to) = if count > 1 {
            let at = slot * RECORD_LEN;
            let to = endpoint.peer.at(at as u64);
            if leader(mask) == Some(rail) {
                let record = Record { sizes: message.lens.map(u64::from) };
                // The offset is inside: a slot is below the number of slots.
                endpoint.source.write(at, &record.encode(number)).map_err(|_| PostError::Full)?;
                let from = endpoint.source.sge(at..at + Record::len_of(count));
                (chunks, Some(from.map_err(|_| PostError::Full)?), to)
            } else {
                (chunks, None, to)
            }
        } else {
            let (from, to) = transfer.chunk(0, rail, chunks[0]);
            let staging_at = slot as u64 * u64::from(self.agreed.staging);
            let to = if is_staged { endpoint.peer_staging.at(staging_at) } else { to };
            (&chunks[..0], (!from.is_empty()).then_some(from), to)
        };
        let data = from.as_ref().map_or(Data::Inline(&[]), |from| Data::Regions(slice::from_ref(from)));
        // The parts of a message are executed one after the other; only if all are taken from the queues together do they show the
        // same rate.
        let signal = if self.agreed.rails > 1 { Signal::Always } else { Signal::IfQueued };
        let op = SendOp::WriteImm(to, imm.bits());
        let last = SendWr { signal, ..SendWr::new(wr_id(number, attempt, rail), op, data) };
        let part = PartRequests { writes, last, rail, transfer, cells };
        let qp = &mut endpoint.qps[qp];
        let mut posted = Posted::Queued;
        if attempt == 0 {
            qp.post_batch(|batch| {
                posted = part.post(|wr| batch.post(wr))?;
                Ok::<_, PostError>(())
            })?;
        } else {
            // The borrow of its memory is over.
            posted = part.post(|wr| qp.post_detached(wr))?;
        }
        cells.bytes.add(bytes);
        let (state, posted_at) = (&mut self.rails[rail], &mut self.transfers[slot].posted_at);
        match posted {
            Posted::Done => {
                // The clock takes as long as the rest of `finish_part`.
                let is_measured = posted_at.is_some() || state.outstanding > 0;
                self.finish_part(number, attempt, rail, bytes, is_measured.then(clock::now));
            }
            Posted::Queued if attempt == 0 => {
                state.add_part(bytes, *posted_at.get_or_insert_with(clock::now));
            }
            Posted::Queued => state.add_part(bytes, clock::now()),
        }
        Ok(())
    }
}

/// The requests of a part.
struct PartRequests<'a> {
    /// The bytes of a group.
    writes: &'a [Chunk],
    /// Completes the part.
    last: SendWr<'a>,
    rail: usize,
    transfer: &'a Transfer,
    cells: &'a RailCells,
}

impl PartRequests<'_> {
    /// Posts them in this order. Returns what has become of the last one.
    #[inline]
    fn post(
        &self,
        mut post: impl FnMut(&SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<Posted, PostError> {
        let mut count = 1;
        for (index, chunk) in self.writes.iter().enumerate().filter(|(_, chunk)| chunk.len > 0) {
            let (from, to) = self.transfer.chunk(index, self.rail, *chunk);
            let data = Data::Regions(slice::from_ref(&from));
            retry(self.cells, || post(&SendWr::new(self.last.wr_id, SendOp::Write(to), data)))?;
            count += 1;
        }
        let posted = retry(self.cells, || post(&self.last))?;
        self.cells.work_requests.add(count);
        self.cells.payload_requests.add(count);
        Ok(posted)
    }
}
