//! The sending half of a side: posts work requests, chooses which are signaled, and waits for their completions.

use crosstie::device::{Cq, Data, Mr, PostError, Posted, SendOp, SendWr};
use crosstie::telemetry::Counters;

use super::Op;
use super::connection::INLINE;
use crate::error::Error;
use crate::slots::stride;
use crate::spin_wait::SpinWait;

/// Requests per signaled request, at least.
const SIGNAL_EVERY: usize = 32;

/// The sending half of a side. The queue pair is separate, because a batch may borrow it meanwhile.
pub(super) struct Sender {
    pub(super) op: Op,
    pub(super) payload: usize,
    /// Bytes of outgoing requests, or the destination of READs and atomics.
    pub(super) source: Mr,
    /// The bytes of inline requests.
    pub(super) inline: Option<[u8; INLINE as usize]>,
    pub(super) cq: Cq,
    pub(super) counters: Counters,
    pub(super) signals: SignalPolicy,
}

/// Decides which requests are signaled when the caller does not wait for a particular one.
pub(super) struct SignalPolicy {
    every: usize,
    unsignaled: usize,
    outstanding: usize,
}

impl SignalPolicy {
    pub(super) fn new(depth: usize) -> SignalPolicy {
        SignalPolicy { every: (depth / 2).max(SIGNAL_EVERY), unsignaled: 0, outstanding: 0 }
    }

    /// A length of the send queue that is never exceeded: a batch has at most twice `every` requests, and before it at most one signaled
    /// request and those after it are outstanding.
    pub(super) fn queue_len(&self) -> u32 {
        4 * self.every as u32
    }

    #[inline]
    fn next(&mut self) -> bool {
        self.unsignaled += 1;
        let signaled = self.unsignaled == self.every;
        if signaled {
            self.unsignaled = 0;
            self.outstanding += 1;
        }
        signaled
    }
}

impl Sender {
    /// Posts one message; every so many are signaled.
    #[inline]
    pub(super) fn message(
        &mut self,
        seq: u64,
        slot: usize,
        op: SendOp,
        post: impl FnOnce(&SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<(), Error> {
        let signaled = self.signals.next();
        self.operation(seq, slot, op, signaled, post)
    }

    /// Posts a WRITE of one word to the other side's control memory; every so many are signaled.
    #[inline]
    pub(super) fn word(
        &mut self,
        word: u64,
        op: SendOp,
        post: impl FnOnce(&SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<(), Error> {
        let signaled = self.signals.next();
        self.counters.work_requests += 1;
        self.counters.batches += 1;
        let bytes = word.to_ne_bytes();
        post(&SendWr { signal: signaled.into(), ..SendWr::new(word, op, Data::Inline(&bytes)) })?;
        Ok(())
    }

    /// Posts one operation with the bytes of a slot. The first 8 bytes are the sequence number.
    #[inline]
    pub(super) fn operation(
        &mut self,
        seq: u64,
        slot: usize,
        op: SendOp,
        signaled: bool,
        post: impl FnOnce(&SendWr<'_>) -> Result<Posted, PostError>,
    ) -> Result<(), Error> {
        self.counters.work_requests += 1;
        self.counters.messages += 1;
        self.counters.bytes += self.payload as u64;
        let mut wr = SendWr { signal: signaled.into(), ..SendWr::new(seq, op, Data::Regions(&[])) };
        if let Some(bytes) = &mut self.inline {
            bytes[..8].copy_from_slice(&seq.to_ne_bytes());
            wr.data = Data::Inline(&bytes[..self.payload]);
            post(&wr)?;
            return Ok(());
        }
        let at = slot * stride(self.payload);
        if self.op != Op::Read && self.payload >= 8 {
            self.source.write(at, &seq.to_ne_bytes())?;
        }
        let sges = [self.source.sge(at..at + self.payload)?];
        wr.data = Data::Regions(&sges);
        post(&wr)?;
        Ok(())
    }

    /// Waits until the send queue has room for a batch.
    #[inline]
    pub(super) fn make_room(&mut self, spin: &mut SpinWait) -> Result<(), Error> {
        if self.signals.outstanding < 2 { Ok(()) } else { self.wait_for_completions(1, spin) }
    }

    /// Waits until at most `left` signaled requests are outstanding.
    pub(super) fn wait_for_completions(&mut self, left: usize, spin: &mut SpinWait) -> Result<(), Error> {
        while self.signals.outstanding > left {
            let mut failed = None;
            let count = self.cq.poll(1, |c| {
                failed = (!c.status.is_success()).then_some(c.status);
            })?;
            if let Some(status) = failed {
                return Err(Error::Request { what: self.op.name(), status });
            }
            self.counters.completions += count as u64;
            self.signals.outstanding -= count;
            if count == 0 {
                spin.idle()?;
            }
        }
        spin.reset();
        Ok(())
    }
}
