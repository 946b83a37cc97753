//! What an endpoint has done so far.

/// Counters of an endpoint, over all its connections. See [`Endpoint::counters`](super::Endpoint::counters).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointCounters {
    /// Operations that have ended, by success, failure or cancellation.
    pub operations: u64,
    /// Work requests that were posted.
    pub work_requests: u64,
    /// Completions that named no outstanding request: late, repeated, or made up. They changed nothing.
    pub stale_completions: u64,
    /// How often a receive queue was found with all its receives used, so that a peer may have been told to retry (RNR). Zero: it
    /// never happened (invariant I5).
    pub empty_receive_queues: u64,
    /// Posts that the device refused.
    pub refused_posts: u64,
    /// Connections that ended because the peer violated the protocol.
    pub violations: u64,
    /// Connections made.
    pub connections: u64,
    /// Slots that are leased now.
    pub leased_slots: u64,
    /// Operations that the engine has now: from their submission until their memory is back.
    pub held_operations: u64,
    /// Connections that have ended and are not drained.
    pub undrained_connections: u64,
}
