//! Exact counters of work.

use core::ops::AddAssign;

/// How much was done. Plain integers: whoever posts and polls owns its own and adds them up at the end.
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
    /// Completions polled, of both kinds of queue.
    pub completions: u64,
    /// Bytes of payload that requests carried, in either direction.
    pub bytes: u64,
    /// Messages and one-sided operations made for the caller; acknowledgements and credits are not among them.
    pub messages: u64,
    /// Times that a device was told of new requests in a send queue: single posts and batches.
    pub batches: u64,
}

impl Counters {
    /// What the counters are called, in the order of [`Counters::to_words`].
    pub const NAMES: [&'static str; 6] =
        ["work_requests", "receives", "completions", "bytes", "messages", "batches"];

    /// All counters, to print or to send.
    pub fn to_words(&self) -> [u64; 6] {
        let Counters { work_requests, receives, completions, bytes, messages, batches } = *self;
        [work_requests, receives, completions, bytes, messages, batches]
    }

    /// The counters that [`Counters::to_words`] gave.
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
