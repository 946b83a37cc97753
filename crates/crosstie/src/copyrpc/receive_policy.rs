//! The receive policy: how much a poll receives, and when receives are posted again. Constants and pure decisions, as in
//! [`flush_policy`](super::flush_policy).
//!
//! | rule | decision | reason |
//! | --- | --- | --- |
//! | all | a poll takes completions until there is none, for at most [`MAX_COMPLETIONS`] | |
//! | half | a poll that finds a batch reports at most half of the pending calls of its connection, but [`MIN_ENDED`]; unless several batches come at a time | the program makes new ones while the others are still to be reported, so that both sides are busy. With many connections it would have to poll far more often |
//! | requests | a poll hands at most [`MAX_REQUESTS`] requests to a handler | a peer that sends very many does not keep the program from everything else |
//! | ahead | up to [`MAX_LINES_AHEAD`] cache lines of a batch are prefetched when it arrives | one after the other, each would be waited for |
//! | refill | a poll that finds nothing posts [`IDLE_REFILL`] receives again; when a third is used, all are posted | the answer of the peer takes longer than that |
//! | send CQ | a poll looks at the send CQ every 16th time, if a completion is expected; every time while a flush waits for one | few requests ask for a completion |
//!
//! What a poll leaves, the next one continues with. `context/completions.rs` applies these rules. `docs/decisions/copyrpc.md` says why they are
//! as they are.

/// The most completions that a poll takes from a queue.
pub(super) const MAX_COMPLETIONS: usize = 64;
/// A poll that pauses in a batch has ended at least so many calls.
const MIN_ENDED: usize = 4;
/// The most requests that a poll hands to a handler.
pub(super) const MAX_REQUESTS: usize = 256;
/// The most cache lines of a batch that are prefetched when it arrives. A processor does not fetch more at once.
pub(super) const MAX_LINES_AHEAD: usize = 32;
/// The most receives that a poll posts because it has found nothing.
pub(super) const IDLE_REFILL: u32 = 8;

/// Half: whether a poll may leave the rest of a batch to the next one. It is completion number `taken` of this poll; the poll before took
/// `taken_before`.
#[inline]
pub(super) fn may_pause(taken: usize, taken_before: usize) -> bool {
    taken == 1 && taken_before <= 1
}

/// Half: how many calls a poll reports, of so many that are pending.
pub(super) fn most_responses(pending_calls: usize) -> usize {
    (pending_calls / 2).max(MIN_ENDED)
}

/// Refill: the number of posted receives at which all are posted again, of so many that are kept posted.
pub(super) fn refill_at(receives: u32) -> u32 {
    (u64::from(receives) * 2 / 3) as u32
}
