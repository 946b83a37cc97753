//! How a message is split over the rails, and how its parts are posted.

use crosstie_protocol::rails::{
    Chunk, MAX_GROUP, MAX_RAILS, Mask, RECORD_LEN, RailLoad, Record, fixed_split, leader, rails_of, split,
};

use super::super::config::Split;
use super::super::counters::RailCells;
use super::super::endpoint::{Endpoint, POST_RETRIES};
use super::super::error::Cause;
use super::{SendCore, Target, wr_id};
use crate::device::{Data, PostError, RemoteAddr, SendOp, SendWr, Sge};

impl SendCore {
    /// Sends the message whose sends are all matched.
    pub(super) fn send_head(&mut self, number: u64, slot: usize) {
        let mut lens = [[0; MAX_RAILS]; MAX_GROUP];
        let message = &mut self.messages[slot];
        let (mut count, mut total) = (0, 0u64);
        for (source, wanted) in self.head.take() {
            message.sources[count] = *source;
            message.targets[count] = Target { addrs: wanted.addrs, rkeys: wanted.rkeys };
            total += u64::from(source.len);
            count += 1;
        }
        message.number = number;
        message.count = count as u8;
        message.untaken = ((1u16 << count) - 1) as u8;
        message.is_done = false;
        let now = self.now();
        let loads = self.loads();
        let len = self.messages[slot].sources[0].len;
        let is_staged = count == 1 && len > 0 && len <= self.agreed.staging;
        let min_part = if is_staged { u32::MAX } else { self.context.config.min_part };
        for (index, lens) in lens.iter_mut().enumerate().take(count) {
            *lens = self.split_message(self.messages[slot].sources[index].len, &loads, min_part);
        }
        let empty_rail = if total == 0 { self.idle_rail(&loads) } else { 0 };
        let lens = &lens[..count];
        let Ok((_, mask)) = self.protocol.begin(lens, empty_rail) else {
            // The slot is free: all results of its last message were taken, which needs that it is done.
            return self.end(Cause::PeerError("its slot is in use".into()));
        };
        self.messages[slot].mask = mask;
        self.messages[slot].posted_at = [now; MAX_RAILS];
        if is_staged {
            self.counters.staged.add(1);
        }
        self.post_attempt(number, 0, mask, is_staged, now);
    }

    /// The rate and the load of each rail, as they are now.
    #[inline]
    pub(super) fn loads(&self) -> [RailLoad; MAX_RAILS] {
        let hint = self.context.hint();
        core::array::from_fn(|rail| {
            if self.up & (1 << rail) == 0 {
                return RailLoad::default();
            }
            let state = &self.rails[rail];
            let rate = state.rates.rate().unwrap_or(self.context.link_rates[rail].into());
            RailLoad { rate: hint.apply(rail, rate), queued: state.queued }
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
        let message = &self.messages[slot];
        let state = &mut self.rails[rail];
        let cells = &self.counters.rails[rail];
        if state.outstanding == 0 {
            state.progress_at = now;
        }
        state.queued += bytes;
        state.outstanding += 1;
        let Some(endpoint) = state.endpoint.as_deref_mut() else { return Err(PostError::Full) };
        let qp = endpoint.take_qp();
        let id = wr_id(number, attempt, rail);
        let target = |index: usize, chunk: Chunk| RemoteAddr {
            addr: message.targets[index].addrs[rail].wrapping_add(chunk.offset.into()),
            rkey: message.targets[index].rkeys[rail],
        };
        let mut requests = 1;
        if message.count == 1 {
            let to = if is_staged {
                endpoint.peer_staging.at(slot as u64 * u64::from(self.agreed.staging))
            } else {
                target(0, chunks[0])
            };
            let sges = [message.sources[0].sge(rail, chunks[0])];
            let data = if bytes == 0 { Data::Inline(&[]) } else { Data::Regions(&sges) };
            let wr = SendWr::new(id, SendOp::WriteImm(to, imm.bits()), data).signaled();
            post(endpoint, qp, &wr, attempt > 0, cells)?;
        } else {
            for (index, chunk) in chunks.iter().enumerate().filter(|(_, chunk)| chunk.len > 0) {
                let sges = [message.sources[index].sge(rail, *chunk)];
                let wr = SendWr::new(id, SendOp::Write(target(index, *chunk)), Data::Regions(&sges));
                post(endpoint, qp, &wr, true, cells)?;
                requests += 1;
            }
            let at = slot * RECORD_LEN;
            let len = Record::len_of(message.count.into());
            let is_leader = leader(mask) == Some(rail);
            if is_leader {
                let sizes = core::array::from_fn(|index| u64::from(message.sources[index].len));
                // The offset is inside: a slot is below the number of slots.
                endpoint.source.write(at, &Record { sizes }.encode(number)).map_err(|_| PostError::Full)?;
            }
            let source = endpoint.source.sge(at..at + len).map_err(|_| PostError::Full)?;
            let sges = [Sge::detached(source.addr, source.len, source.lkey, source.pd, source.access)];
            let data = if is_leader { Data::Regions(&sges) } else { Data::Inline(&[]) };
            let to = endpoint.peer.at(at as u64);
            let wr = SendWr::new(id, SendOp::WriteImm(to, imm.bits()), data).signaled();
            post(endpoint, qp, &wr, false, cells)?;
        }
        cells.bytes.add(bytes);
        cells.work_requests.add(requests);
        cells.payload_requests.add(requests);
        Ok(())
    }
}

/// Posts a request; a queue that is full is tried again. `is_old`: the borrow of its memory is over.
#[inline]
fn post(
    endpoint: &mut Endpoint,
    qp: usize,
    wr: &SendWr<'_>,
    is_old: bool,
    cells: &RailCells,
) -> Result<(), PostError> {
    let mut tries = 0;
    loop {
        let posted = if is_old { endpoint.qps[qp].post_detached(wr) } else { endpoint.qps[qp].post(wr) };
        match posted {
            Err(PostError::Full) if tries < POST_RETRIES => {
                cells.retries.add(1);
                tries += 1;
            }
            posted => return posted,
        }
    }
}
