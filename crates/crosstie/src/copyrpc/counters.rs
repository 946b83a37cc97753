//! What a context counts.

use std::cell::Cell;

/// Number of size classes of batches, see [`Counters::batch_sizes`].
pub const BATCH_CLASSES: usize = 16;

/// A counter of a context while it runs.
#[derive(Debug, Default)]
pub(super) struct Count(Cell<u64>);

impl Count {
    #[inline]
    pub(super) fn add(&self, count: usize) {
        self.0.set(self.0.get() + count as u64);
    }

    #[inline]
    pub(super) fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Declares the counters of a context twice: as the program gets them, and as they are while the context runs.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a context has done so far.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
            /// Batches by size: class `i` counts those with at most `2^i` messages and more than class `i - 1`; the last class counts all
            /// larger ones.
            pub batch_sizes: [u64; BATCH_CLASSES],
        }

        #[derive(Debug, Default)]
        pub(super) struct RunningCounters {
            $(pub(super) $name: Count,)*
            batch_sizes: [Count; BATCH_CLASSES],
        }

        impl RunningCounters {
            pub(super) fn get(&self) -> Counters {
                let batch_sizes = self.batch_sizes.each_ref().map(Count::get);
                Counters { $($name: self.$name.get(),)* batch_sizes }
            }
        }
    };
}

counters! {
    /// Calls made.
    calls,
    /// Replies sent.
    replies,
    /// Requests that were dropped without a reply. Their callers got an empty response.
    unanswered,
    /// Batches of messages sent.
    batches,
    /// Messages in those batches.
    batched,
    /// Batches without messages, which only return credit.
    credit_batches,
    /// Wrap markers, which skip the end of a ring.
    wraps,
    /// Payloads that were posted directly to the peer's ring, ahead of their batch.
    direct,
    /// READs of a peer's consumer position.
    reads,
    /// Work requests posted to send queues.
    work_requests,
    /// Work requests that asked for a completion.
    signaled,
    /// Bytes written to peers' rings.
    bytes,
    /// Completions polled.
    completions,
    /// Calls whose request or response buffer is in bulk memory.
    bulk_calls,
    /// Replies sent from bulk memory.
    bulk_replies,
    /// Bulk requests of peers that were refused, because the device had no memory for them.
    bulk_refused,
    /// READs of pieces of bulk requests.
    bulk_reads,
    /// WRITEs of pieces of bulk responses.
    bulk_writes,
    /// Bytes of those READs and WRITEs.
    bulk_bytes,
    /// READs that the application posted.
    raw_reads,
    /// WRITEs that the application posted.
    raw_writes,
    /// READs and WRITEs of the application that have completed, with success or not.
    raw_completed,
    /// Batches that violated the protocol.
    violations,
    /// Connections that ended for another reason than being closed here.
    failures,
}

impl RunningCounters {
    /// Counts a batch with so many messages.
    #[inline]
    pub(super) fn count_batch(&self, messages: u32) {
        self.batches.add(1);
        self.batched.add(messages as usize);
        self.batch_sizes[size_class(messages)].add(1);
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
