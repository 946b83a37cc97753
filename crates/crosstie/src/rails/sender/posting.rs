//! How a message is split over the rails, and how its parts are posted.

use crosstie_protocol::rails::{
    Chunk, Immediate, MAX_GROUP, MAX_RAILS, Mask, RECORD_LEN, RailLoad, Record, SendError, fixed_split,
    leader, rails_of, split,
};

use super::super::config::Split;
use super::super::counters::RailCells;
use super::super::endpoint::POST_RETRIES;
use super::super::error::Cause;
use super::{SendCore, Target, wr_id};
use crate::device::{Data, PostError, Posted, SendOp, SendWr, Sge, Signal};

impl SendCore {
    /// Sends the message whose sends are all matched.
    pub(super) fn send_head(&mut self, number: u64, slot: usize) {
        let (message, transfer) = (&mut self.messages[slot], &mut self.transfers[slot]);
        let mut count = 0;
        for (source, wanted) in self.head.take() {
            message.lens[count] = source.len;
            transfer.sources[count] = *source;
            transfer.targets[count] = Target { addrs: wanted.addrs, rkeys: wanted.rkeys };
            count += 1;
        }
        message.number = number;
        message.count = count as u8;
        message.untaken = ((1u16 << count) - 1) as u8;
        message.is_done = false;
        let now = self.now();
        let len = self.messages[slot].lens[0];
        let is_staged = count == 1 && len > 0 && len <= self.agreed.staging;
        let begun = if count == 1 && self.up.is_power_of_two() {
            // One rail: there is nothing to decide.
            self.protocol.begin_on(self.up.trailing_zeros() as usize, len)
        } else {
            self.begin_split(slot, count, is_staged)
        };
        let Ok((_, mask)) = begun else {
            // The slot is free: all results of its last message were taken, which needs that it is done.
            return self.end(Cause::PeerError("its slot is in use".into()));
        };
        self.messages[slot].mask = mask;
        self.transfers[slot].posted_at = [now; MAX_RAILS];
        if is_staged {
            self.counters.staged.add(1);
        }
        if count > 1 || !mask.is_power_of_two() {
            return self.post_attempt(number, 0, mask, is_staged, now);
        }
        let rail = mask.trailing_zeros() as usize;
        let imm = self.protocol.immediate(number, mask, 0, is_staged);
        match self.post_single(number, rail, imm, Chunk { offset: 0, len }, now) {
            Ok(true) => self.finish_part(number, 0, rail, len.into(), self.now()),
            Ok(false) => {}
            Err(_) => self.fail_rail(rail),
        }
    }

    /// Begins the message in `slot`, split over the rails.
    fn begin_split(&mut self, slot: usize, count: usize, is_staged: bool) -> Result<(u64, Mask), SendError> {
        let loads = self.loads();
        let min_part = if is_staged { u32::MAX } else { self.context.config.min_part };
        let (mut lens, mut total) = ([[0; MAX_RAILS]; MAX_GROUP], 0u64);
        for (lens, len) in lens.iter_mut().zip(self.messages[slot].lens).take(count) {
            *lens = self.split_message(len, &loads, min_part);
            total += u64::from(len);
        }
        let empty_rail = if total == 0 { self.idle_rail(&loads) } else { 0 };
        self.protocol.begin(&lens[..count], empty_rail)
    }

    /// The rate and the load of each rail's port, as they are now.
    #[inline]
    pub(super) fn loads(&self) -> [RailLoad; MAX_RAILS] {
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
    #[inline]
    pub(super) fn split_message(
        &self,
        len: u32,
        loads: &[RailLoad; MAX_RAILS],
        min_part: u32,
    ) -> [u32; MAX_RAILS] {
        if self.up.is_power_of_two() {
            // One rail: there is nothing to decide.
            let mut lens = [0; MAX_RAILS];
            lens[self.up.trailing_zeros() as usize] = len;
            return lens;
        }
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
    fn idle_rail(&self, loads: &[RailLoad; MAX_RAILS]) -> usize {
        let lens = self.split_message(1, loads, u32::MAX);
        lens.iter().position(|len| *len > 0).unwrap_or(0)
    }

    /// Posts the parts of an attempt.
    pub(super) fn post_attempt(&mut self, number: u64, attempt: u8, mask: Mask, is_staged: bool, now: u64) {
        let mut failed: Mask = 0;
        for rail in rails_of(mask) {
            if self.post_part(number, attempt, mask, rail, is_staged, now).is_err() {
                failed |= 1 << rail;
            }
        }
        rails_of(failed).for_each(|rail| self.fail_rail(rail));
    }

    fn post_part(
        &mut self,
        number: u64,
        attempt: u8,
        mask: Mask,
        rail: usize,
        is_staged: bool,
        now: u64,
    ) -> Result<(), PostError> {
        let Some(part) = self.protocol.part(number, attempt, rail) else { return Ok(()) };
        let (chunks, bytes) = (part.chunks, part.bytes());
        let imm = self.protocol.immediate(number, mask, attempt, is_staged);
        let slot = usize::from(imm.slot);
        if self.messages[slot].count == 1 {
            if self.post_single(number, rail, imm, chunks[0], now)? {
                self.finish_part(number, attempt, rail, bytes, self.now());
            }
            return Ok(());
        }
        let (message, transfer) = (&self.messages[slot], &self.transfers[slot]);
        let state = &mut self.rails[rail];
        let cells = &self.counters.rails[rail];
        let Some(endpoint) = state.begin_post(bytes, now) else { return Err(PostError::Full) };
        let qp = endpoint.take_qp();
        let id = wr_id(number, attempt, rail);
        let mut requests = 1;
        for (index, chunk) in chunks.iter().enumerate().filter(|(_, chunk)| chunk.len > 0) {
            let sges = [transfer.sources[index].sge(rail, *chunk)];
            let to = transfer.targets[index].at(rail, *chunk);
            let wr = SendWr::new(id, SendOp::Write(to), Data::Regions(&sges));
            post(cells, || endpoint.qps[qp].post_detached(&wr))?;
            requests += 1;
        }
        let at = slot * RECORD_LEN;
        let len = Record::len_of(message.count.into());
        let is_leader = leader(mask) == Some(rail);
        if is_leader {
            let sizes = core::array::from_fn(|index| u64::from(message.lens[index]));
            // The offset is inside: a slot is below the number of slots.
            endpoint.source.write(at, &Record { sizes }.encode(number)).map_err(|_| PostError::Full)?;
        }
        let source = endpoint.source.sge(at..at + len).map_err(|_| PostError::Full)?;
        let sges = [Sge::detached(source.addr, source.len, source.lkey, source.pd, source.access)];
        let data = if is_leader { Data::Regions(&sges) } else { Data::Inline(&[]) };
        let to = endpoint.peer.at(at as u64);
        let wr = SendWr::new(id, SendOp::WriteImm(to, imm.bits()), data).signaled();
        post(cells, || endpoint.qps[qp].post(&wr))?;
        cells.bytes.add(bytes);
        cells.work_requests.add(requests);
        cells.payload_requests.add(requests);
        Ok(())
    }

    /// Posts a part of a message with one buffer. True if the device has executed it meanwhile, so that it has no completion.
    #[inline]
    fn post_single(
        &mut self,
        number: u64,
        rail: usize,
        imm: Immediate,
        chunk: Chunk,
        now: u64,
    ) -> Result<bool, PostError> {
        let slot = usize::from(imm.slot);
        let transfer = &self.transfers[slot];
        let cells = &self.counters.rails[rail];
        let bytes = u64::from(chunk.len);
        let Some(endpoint) = self.rails[rail].begin_post(bytes, now) else { return Err(PostError::Full) };
        let qp = endpoint.take_qp();
        let to = if imm.staged {
            endpoint.peer_staging.at(slot as u64 * u64::from(self.agreed.staging))
        } else {
            transfer.targets[0].at(rail, chunk)
        };
        let sges = [transfer.sources[0].sge(rail, chunk)];
        let data = if bytes == 0 { Data::Inline(&[]) } else { Data::Regions(&sges) };
        let id = wr_id(number, imm.attempt, rail);
        let wr = SendWr::new(id, SendOp::WriteImm(to, imm.bits()), data).signaled();
        let is_done = if imm.attempt > 0 {
            // The borrow of its memory is over.
            post(cells, || endpoint.qps[qp].post_detached(&wr)).map(|_| false)?
        } else if self.agreed.rails > 1 {
            // The parts of a message are executed one after the other; only if all are taken from the queues together do they
            // show the same rate.
            post(cells, || endpoint.qps[qp].post(&wr)).map(|_| false)?
        } else {
            post(cells, || endpoint.qps[qp].post(&SendWr { signal: Signal::IfQueued, ..wr }))
                .map(|posted| posted == Posted::Done)?
        };
        cells.bytes.add(bytes);
        cells.work_requests.add(1);
        cells.payload_requests.add(1);
        Ok(is_done)
    }
}

/// Posts a request; a queue that is full is tried again.
#[inline]
pub(super) fn post<T>(
    cells: &RailCells,
    mut post: impl FnMut() -> Result<T, PostError>,
) -> Result<T, PostError> {
    let mut tries = 0;
    loop {
        match post() {
            Err(PostError::Full) if tries < POST_RETRIES => {
                cells.retries.add(1);
                tries += 1;
            }
            posted => return posted,
        }
    }
}
