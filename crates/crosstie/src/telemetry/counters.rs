//! Exact counters of the work on a device.

use core::ops::AddAssign;

/// How much work was done. The counters are plain integers: each thread that posts and polls has its own, and they are
/// added up at the end.
///
/// ```
/// use crosstie::telemetry::Counters;
/// let mut mine = Counters::default();
/// mine.work_requests += 2;
/// let theirs = Counters::from_words([1, 0, 0, 0, 0, 0]);
/// mine += theirs;
/// assert_eq!(mine.to_words()[0], 3);
/// assert_eq!(Counters::NAMES[0], "work_requests");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests posted to send queues.
    pub work_requests: u64,
    /// Requests posted to receive queues.
    pub receives: u64,
    /// Completions polled, of send and receive queues.
    pub completions: u64,
    /// Payload bytes of all requests, sent and received.
    pub bytes: u64,
    /// Messages and one-sided operations that the caller asked for. Acknowledgements and credits are not counted.
    pub messages: u64,
    /// Doorbells: how often a device was told about new requests in a send queue, one or a batch of them.
    pub batches: u64,
}

impl Counters {
    /// The names of the counters, in the order of [`Counters::to_words`].
    pub const NAMES: [&'static str; 6] =
        ["work_requests", "receives", "completions", "bytes", "messages", "batches"];

    /// Returns all counters, to print or to send them.
    pub fn to_words(&self) -> [u64; 6] {
        let Counters { work_requests, receives, completions, bytes, messages, batches } = *self;
        [work_requests, receives, completions, bytes, messages, batches]
    }

    /// Restores counters from the result of [`Counters::to_words`].
    pub fn from_words([work_requests, receives, completions, bytes, messages, batches]: [u64; 6]) -> Self {
        Counters { work_requests, receives, completions, bytes, messages, batches }
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Counters) {
        let mut sum = self.to_words();
        for (mine, theirs) in sum.iter_mut().zip(other.to_words()) {
            *mine += theirs;
        }
        *self = Counters::from_words(sum);
    }
}
