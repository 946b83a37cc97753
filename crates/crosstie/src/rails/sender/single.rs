//! The short way of a message with one buffer over the only rail.
//!
//! A device that executes a request at once needs no record of it: nothing of the message is under way when the post returns. What a
//! message costs inside a program that has other work is the number of cache lines that it needs, because the bytes that are copied
//! and the program's own work push them out of the cache. So this way goes from the clear-to-send to the request without writing
//! anything down, and reads no clock.

use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;

use crosstie_protocol::rails::{CTS_LEN, ClearToSend, MAX_RAILS};

use super::super::error::{Cause, RequestError};
use super::super::head::{Source, read_one};
use super::super::memory::Memory;
use super::posting::post;
use super::{Message, SendCore, SendRequest, Started, Target, wr_id};
use crate::device::{Data, PostError, Posted, RemoteAddr, SendOp, SendWr, clock};

/// One of so many messages is measured.
const SAMPLE: u64 = 16;

impl SendCore {
    /// The clear-to-send of the next message on the only rail, if it has arrived, is that of a message with one buffer, and has this tag.
    pub(super) fn read_single(&mut self, tag: u32) -> Option<ClearToSend> {
        let number = self.protocol.next_message();
        let slot = number as usize & (self.agreed.slots - 1);
        let at = slot * self.agreed.max_group * CTS_LEN;
        let endpoint = self.rails[0].endpoint.as_ref()?;
        // Another way finds what is wrong with it.
        let wanted = read_one(&endpoint.memory, at, number, 0).ok()??;
        (wanted.count == 1 && wanted.tag == tag).then_some(wanted)
    }

    /// Sends the next message over the only rail into the buffer `wanted`.
    pub(super) fn send_single(
        &mut self,
        memory: &Memory,
        range: Range<usize>,
        wanted: &ClearToSend,
    ) -> Result<Option<Started>, RequestError> {
        let number = self.protocol.next_message();
        let slot = number as usize & (self.agreed.slots - 1);
        if self.messages[slot].untaken > 0 {
            self.progress();
            return Ok(None);
        }
        if memory.context != self.context_id {
            return Err(RequestError::WrongMemory);
        }
        let sge = memory.first_sge(range)?.0;
        let len = sge.len;
        if u64::from(len) > wanted.size {
            return Err(RequestError::TooLong { len: len as usize, room: wanted.size as usize });
        }
        let state = &mut self.rails[0];
        // The clear-to-send was in its memory.
        let Some(endpoint) = state.endpoint.as_deref_mut() else { return Ok(None) };
        let is_staged = len > 0 && len <= self.agreed.staging;
        let imm = self.protocol.immediate(number, 1, 0, is_staged);
        let target = Target { addrs: wanted.addrs, rkeys: wanted.rkeys };
        let to = if is_staged {
            endpoint.peer_staging.at(slot as u64 * u64::from(self.agreed.staging))
        } else {
            RemoteAddr { addr: target.addrs[0], rkey: target.rkeys[0] }
        };
        let mut source = Source { len, ..Source::default() };
        (source.addrs[0], source.lkeys[0], source.domains[0]) = (sge.addr, sge.lkey, sge.pd);
        let sges = [sge];
        let data = if len == 0 { Data::Inline(&[]) } else { Data::Regions(&sges) };
        let id = wr_id(number, 0, 0);
        let wr = SendWr::new(id, SendOp::WriteImm(to, imm.bits()), data).signaled_if_queued();
        let qp = endpoint.take_qp();
        let cells = &self.counters.rails[0];
        let begin = number.is_multiple_of(SAMPLE).then(clock::now);
        let posted = post(cells, || endpoint.qps[qp].post(&wr));
        if is_staged {
            self.counters.staged.add(1);
        }
        if let Ok(Posted::Done) = posted
            && self.protocol.count_done().is_ok()
        {
            cells.bytes.add(len.into());
            cells.direct.add(1);
            if begin.is_some() || state.outstanding > 0 {
                self.measure_single(begin, len);
            }
            return Ok(Some(Started::Done(len as usize)));
        }
        self.record_single(number, source, target, posted);
        Ok(Some(Started::Request(SendRequest(number << 3))))
    }

    /// Records a message that is done, so that it can be tested. It is the last one.
    pub(super) fn record_done(&mut self, len: usize) -> SendRequest {
        let number = self.protocol.next_message().wrapping_sub(1);
        let message = &mut self.messages[number as usize & (self.agreed.slots - 1)];
        *message = Message { number, count: 1, untaken: 1, is_done: true, mask: 1, ..Message::default() };
        message.lens[0] = len as u32;
        SendRequest(number << 3)
    }

    /// Measures a message that was executed at once.
    #[cold]
    fn measure_single(&mut self, begin: Option<u64>, len: u32) {
        let (now, state, cells) = (self.now(), &mut self.rails[0], &self.counters.rails[0]);
        if let Some(begin) = begin {
            cells.latencies.record(now.saturating_sub(begin));
            state.load.record(len.into(), begin, now);
            cells.rate.store(state.load.rate().unwrap_or(0), Relaxed);
        }
        // The rail works.
        (state.probed_at, state.progress_at) = (None, now);
    }

    /// Records a message that is under way, or could not be posted.
    #[cold]
    fn record_single(
        &mut self,
        number: u64,
        source: Source,
        target: Target,
        posted: Result<Posted, PostError>,
    ) {
        let slot = number as usize & (self.agreed.slots - 1);
        let len = source.len;
        let now = self.now();
        let message = &mut self.messages[slot];
        *message = Message { number, count: 1, untaken: 1, mask: 1, ..Message::default() };
        message.lens[0] = len;
        let transfer = &mut self.transfers[slot];
        (transfer.sources[0], transfer.targets[0]) = (source, target);
        transfer.posted_at = [now; MAX_RAILS];
        if self.protocol.begin_on(0, len).is_err() {
            // The slot is free: all results of its last message were taken, which needs that it is done.
            return self.end(Cause::PeerError("its slot is in use".into()));
        }
        self.rails[0].begin_post(len.into(), now);
        if posted.is_err() {
            return self.fail_rail(0);
        }
        let cells = &self.counters.rails[0];
        cells.bytes.add(len.into());
        cells.work_requests.add(1);
        cells.payload_requests.add(1);
    }
}
