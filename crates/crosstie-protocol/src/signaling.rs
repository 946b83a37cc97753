//! Selective signaling: which requests of a send queue ask for a completion.
//!
//! A completion costs more than a small request, so most requests ask for none. But a request keeps its place in the send queue, on every
//! device, until its own completion or that of a later request of the same queue pair is polled. A queue that is full of requests without
//! completions stays full for ever. So among any `INTERVAL` requests in a row of one queue pair at least one is signaled, whatever they are
//! for and whatever decides on which queue pair they go: the count belongs to the queue pair, and to nothing else.
//!
//! With twice the interval as its depth, a queue takes half of its requests while the completion for the other half is awaited.

/// Counts the requests of one send queue since the last signaled one. See the [module](self).
#[derive(Debug, Default)]
pub struct Signaling<const INTERVAL: u32> {
    unsignaled: u32,
}

impl<const INTERVAL: u32> Signaling<INTERVAL> {
    /// The fewest places that the send queue needs.
    pub const MIN_DEPTH: u32 = {
        assert!(INTERVAL > 0, "one request of so many is signaled");
        2 * INTERVAL
    };

    /// Before the first request, or after the queue pair was reset.
    pub const fn new() -> Self {
        Signaling { unsignaled: 0 }
    }

    /// Whether the next request must be signaled.
    #[inline]
    pub const fn is_due(&self) -> bool {
        self.unsignaled + 1 >= INTERVAL
    }

    /// Counts a request that the device has accepted.
    #[inline]
    pub const fn count_post(&mut self, is_signaled: bool) {
        self.unsignaled = if is_signaled { 0 } else { self.unsignaled + 1 };
    }

    /// The requests since the last signaled one.
    #[inline]
    pub const fn unsignaled(&self) -> u32 {
        self.unsignaled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INTERVAL: u32 = 4;

    proptest! {
        /// A device with as few places as allowed: each request is signaled when it must be, or because its sender wants it, or it is
        /// refused. However late completions come, the queue never becomes full without one to come.
        #[test]
        fn queue_is_never_full_without_a_completion_to_come(
            steps in proptest::collection::vec((any::<bool>(), 0u8..4), 1..200),
        ) {
            let mut signaling = Signaling::<INTERVAL>::new();
            let mut queue = alloc::collections::VecDeque::new();
            for (wants_one, step) in steps {
                let is_full = queue.len() == Signaling::<INTERVAL>::MIN_DEPTH as usize;
                prop_assert!(!is_full || queue.contains(&true));
                if step == 0 || is_full {
                    // A completion is polled. Those before it leave with it.
                    while queue.contains(&true) && queue.pop_front() == Some(false) {}
                } else if step > 1 {
                    let is_signaled = wants_one || signaling.is_due();
                    queue.push_back(is_signaled);
                    signaling.count_post(is_signaled);
                }
                let last = queue.iter().rev().take_while(|is_signaled| !**is_signaled).count();
                prop_assert!(last < INTERVAL as usize && (last == signaling.unsignaled() as usize));
            }
        }
    }
}
