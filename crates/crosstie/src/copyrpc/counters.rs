//! What a context counts.

use std::cell::{Cell, RefCell, RefMut};

/// Number of size classes of batches, see [`Counters::batch_sizes`].
pub const BATCH_CLASSES: usize = 16;

/// What a context has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Calls made.
    pub calls: u64,
    /// Replies sent.
    pub replies: u64,
    /// Requests that were dropped without a reply. Their callers got an empty response.
    pub unanswered: u64,
    /// Batches of messages sent.
    pub batches: u64,
    /// Messages in those batches.
    pub batched: u64,
    /// Batches by size: class `i` counts those with at most `2^i` messages and more than class `i - 1`; the last class counts all
    /// larger ones.
    pub batch_sizes: [u64; BATCH_CLASSES],
    /// Batches without messages, which only return credit.
    pub credit_batches: u64,
    /// Wrap markers, which skip the end of a ring.
    pub wraps: u64,
    /// Payloads that were posted directly to the peer's ring, ahead of their batch.
    pub direct: u64,
    /// READs of a peer's consumer position.
    pub reads: u64,
    /// Work requests posted to send queues.
    pub work_requests: u64,
    /// Work requests that asked for a completion.
    pub signaled: u64,
    /// Bytes written to peers' rings.
    pub bytes: u64,
    /// Completions polled.
    pub completions: u64,
    /// Calls whose request or response buffer is in bulk memory.
    pub bulk_calls: u64,
    /// Replies sent from bulk memory.
    pub bulk_replies: u64,
    /// Bulk requests of peers that were refused, because the device had no memory for them.
    pub bulk_refused: u64,
    /// READs of pieces of bulk requests.
    pub bulk_reads: u64,
    /// WRITEs of pieces of bulk responses.
    pub bulk_writes: u64,
    /// Bytes of those READs and WRITEs.
    pub bulk_bytes: u64,
    /// READs that the application posted.
    pub raw_reads: u64,
    /// WRITEs that the application posted.
    pub raw_writes: u64,
    /// READs and WRITEs of the application that have completed, with success or not.
    pub raw_completed: u64,
    /// Batches that violated the protocol.
    pub violations: u64,
    /// Connections that ended for another reason than being closed here.
    pub failures: u64,
}

impl Counters {
    /// Counts a batch with so many messages.
    #[inline(always)]
    pub(super) fn count_batch(&mut self, messages: u32) {
        self.batches += 1;
        self.batched += u64::from(messages);
        self.batch_sizes[size_class(messages)] += 1;
    }

    /// Counts a WRITE of so many bytes, with a batch of one message.
    #[inline(always)]
    pub(super) fn count_single(&mut self, bytes: usize) {
        self.work_requests += 1;
        self.bytes += bytes as u64;
        self.count_batch(1);
    }
}

/// The counters of a context while it runs.
#[derive(Debug, Default)]
pub(super) struct RunningCounters {
    pub(super) calls: Cell<u64>,
    pub(super) replies: Cell<u64>,
    /// Completions of the receive CQ.
    receives: Cell<u64>,
    /// WRITEs of one message that were executed at once, and their bytes.
    singles: Cell<u64>,
    single_bytes: Cell<u64>,
    /// All that not every message needs.
    others: RefCell<Counters>,
}

impl RunningCounters {
    /// All but those that every message needs.
    #[inline]
    pub(super) fn borrow_mut(&self) -> RefMut<'_, Counters> {
        self.others.borrow_mut()
    }

    /// Counts completions of the receive CQ.
    #[inline(always)]
    pub(super) fn count_receives(&self, count: usize) {
        self.receives.set(self.receives.get() + count as u64);
    }

    /// Counts a WRITE of so many bytes, with a batch of one message, that was executed at once.
    #[inline(always)]
    pub(super) fn count_single(&self, bytes: usize) {
        self.singles.set(self.singles.get() + 1);
        self.single_bytes.set(self.single_bytes.get() + bytes as u64);
    }

    /// All counters.
    pub(super) fn get(&self) -> Counters {
        let mut counters = *self.others.borrow();
        let singles = self.singles.get();
        counters.calls = self.calls.get();
        counters.replies = self.replies.get();
        counters.completions += self.receives.get();
        counters.work_requests += singles;
        counters.bytes += self.single_bytes.get();
        counters.batches += singles;
        counters.batched += singles;
        counters.batch_sizes[size_class(1)] += singles;
        counters
    }
}

/// The class in [`Counters::batch_sizes`] of a batch with so many messages.
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
