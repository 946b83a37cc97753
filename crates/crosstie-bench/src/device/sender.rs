//! What a side posts: bytes, signals and their count.

use crosstie::device::{Cq, Data, Mr, PostError, SendOp, SendWr};
use crosstie::telemetry::Counters;

use super::connection::stride;
use super::plan::Op;
use crate::error::Error;
use crate::spin_wait::SpinWait;

/// Unsignaled requests in a row, at least.
const SIGNAL_EVERY: usize = 32;

/// The sending half of a side, apart from the queue pair, which may be busy with a batch.
pub(super) struct Sender {
    pub(super) op: Op,
    pub(super) payload: usize,
    /// Where requests take their bytes from, or READs and atomics put them.
    pub(super) source: Mr,
    /// Bytes of requests that carry them.
    pub(super) inline: Option<[u8; 220]>,
    pub(super) cq: Cq,
    pub(super) counters: Counters,
    pub(super) signals: SignalPolicy,
}

/// Decides which requests are signaled, where nobody waits for a particular one.
pub(super) struct SignalPolicy {
    every: usize,
    unsignaled: usize,
    outstanding: usize,
}

impl SignalPolicy {
    pub(super) fn new(depth: usize) -> SignalPolicy {
        SignalPolicy { every: (depth / 2).max(SIGNAL_EVERY), unsignaled: 0, outstanding: 0 }
    }

    /// A send queue so long that it is never full: a batch is at most twice `every`, and before it at most one
    /// signal, and what came after it, is outstanding.
    pub(super) fn queue(&self) -> u32 {
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
    /// A message, signaled now and then.
    #[inline]
    pub(super) fn message(
        &mut self,
        seq: u64,
        slot: usize,
        op: SendOp,
        post: impl FnOnce(&SendWr<'_>) -> Result<(), PostError>,
    ) -> Result<(), Error> {
        let signaled = self.signals.next();
        self.operation(seq, slot, op, signaled, post)
    }

    /// A word for the other side's control memory, signaled now and then.
    #[inline]
    pub(super) fn word(
        &mut self,
        word: u64,
        op: SendOp,
        post: impl FnOnce(&SendWr<'_>) -> Result<(), PostError>,
    ) -> Result<(), Error> {
        let signaled = self.signals.next();
        self.counters.work_requests += 1;
        self.counters.batches += 1;
        let bytes = word.to_ne_bytes();
        Ok(post(&SendWr { signaled, ..SendWr::new(word, op, Data::Inline(&bytes)) })?)
    }

    /// One operation with the bytes of a slot, numbered in its first bytes.
    #[inline]
    pub(super) fn operation(
        &mut self,
        seq: u64,
        slot: usize,
        op: SendOp,
        signaled: bool,
        post: impl FnOnce(&SendWr<'_>) -> Result<(), PostError>,
    ) -> Result<(), Error> {
        self.counters.work_requests += 1;
        self.counters.messages += 1;
        self.counters.bytes += self.payload as u64;
        let mut wr = SendWr { signaled, ..SendWr::new(seq, op, Data::Regions(&[])) };
        if let Some(bytes) = &mut self.inline {
            bytes[..8].copy_from_slice(&seq.to_ne_bytes());
            wr.data = Data::Inline(&bytes[..self.payload]);
            return Ok(post(&wr)?);
        }
        let at = slot * stride(self.payload);
        if self.op != Op::Read && self.payload >= 8 {
            self.source.write(at, &seq.to_ne_bytes())?;
        }
        let sges = [self.source.sge(at..at + self.payload)?];
        wr.data = Data::Regions(&sges);
        Ok(post(&wr)?)
    }

    /// Before a batch: makes sure that the queue has room for it.
    #[inline]
    pub(super) fn make_room(&mut self, spin: &mut SpinWait) -> Result<(), Error> {
        if self.signals.outstanding < 2 { Ok(()) } else { self.wait_for_completions(1, spin) }
    }

    /// Waits until no more than `left` signals are outstanding.
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
