//! The plan: what fails, and when.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{PostError, Status};
use super::odds::Odds;

/// The faults that a wrapped device injects. A plan names posts and completions by number, counted from zero over the whole
/// device (see [`Control::posts`](super::Control::posts) and [`Control::completions`](super::Control::completions)). So a
/// test can run once with [`Plan::none`], read the counts, and then fail each post or completion in turn.
///
/// The same plan and the same sequence of calls give the same faults.
///
/// ```
/// use crosstie::device::{PostError, Status, fault::Plan};
/// let plan = Plan::none().fail_post(3, PostError::Full).fail_completion(10, Status::RetryExceeded);
/// # drop(plan);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Plan {
    random: Option<(u64, Odds)>,
    posts: BTreeMap<u64, PostError>,
    lost: BTreeMap<u64, Status>,
    dropped: BTreeSet<u64>,
    completions: BTreeMap<u64, Status>,
    holds: BTreeMap<u64, Hold>,
    port_down: BTreeMap<u64, u64>,
    stalls: BTreeMap<u64, u64>,
    kills: BTreeSet<u64>,
    retry_ticks: Option<u64>,
}

/// How long a completion is held back. The later ones of its queue pair wait behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// For this many polls of its queue.
    Polls(u32),
    /// Until a completion of another queue pair has overtaken it, at most [`Hold::MAX_POLLS`] polls.
    Overtaken,
}

impl Hold {
    /// Polls after which a completion that is not overtaken is handed out anyway.
    pub(super) const MAX_POLLS: u32 = 64;
}

impl Plan {
    /// Ticks (see [`Plan::port_down`]) after which a request fails that is stalled because the port is down.
    pub const RETRY_TICKS: u64 = 20_000;

    /// Nothing fails.
    pub fn none() -> Plan {
        Plan::default()
    }

    /// Faults drawn from a seed, rare enough that a workload that reconnects makes progress: refused posts, requests and
    /// completions that fail, completions that are late or overtaken, lost datagrams, ports that go down for a while. The
    /// death of a peer is never drawn, because no workload could continue after it.
    pub fn from_seed(seed: u64) -> Plan {
        Plan::from_odds(seed, Odds::default())
    }

    /// Faults drawn from a seed, each kind as often as `odds` says.
    pub fn from_odds(seed: u64, odds: Odds) -> Plan {
        Plan { random: Some((seed, odds)), ..Plan::default() }
    }

    /// Refuses post `k` with [`PostError::Full`] or [`PostError::Device`].
    ///
    /// Hardware: the entries of the work queue were not reclaimed yet (`ENOMEM`), or the kernel or the device refused the
    /// doorbell (any other errno).
    ///
    /// # Panics
    ///
    /// If `error` is one that depends on the request: hardware does not return those at random.
    pub fn fail_post(mut self, k: u64, error: PostError) -> Plan {
        assert!(
            matches!(error, PostError::Full | PostError::Device(_)),
            "{error:?} depends on the request, so it cannot be injected"
        );
        self.posts.insert(k, error);
        self
    }

    /// Accepts post `k`, if it is an RC send request, but fails it before it has any effect on the peer. When the requests
    /// before it have completed, it ends with `status`, the queue pair goes to ERR, and the requests after it are flushed.
    ///
    /// Hardware: the request, or every retry of it, never arrived ([`Status::RetryExceeded`]); the peer had no receive
    /// ([`Status::RnrRetryExceeded`]), refused ([`Status::RemoteAccess`], [`Status::RemoteInvalidRequest`]) or failed
    /// ([`Status::RemoteOperation`]); the device failed ([`Status::LocalQpOperation`], [`Status::Fatal`],
    /// [`Status::General`]).
    ///
    /// # Panics
    ///
    /// If `status` is any other.
    pub fn lose_post(mut self, k: u64, status: Status) -> Plan {
        use Status::*;
        let possible = [
            RetryExceeded,
            RnrRetryExceeded,
            RemoteAccess,
            RemoteInvalidRequest,
            RemoteOperation,
            LocalQpOperation,
            Fatal,
            General,
        ];
        assert!(possible.contains(&status), "a request that never arrived does not end with {status:?}");
        self.lost.insert(k, status);
        self
    }

    /// Loses the datagram of post `k`, if it is a datagram: its sender sees success.
    ///
    /// Hardware: unreliable datagrams get lost.
    pub fn drop_datagram(mut self, k: u64) -> Plan {
        self.dropped.insert(k);
        self
    }

    /// Turns completion `k`, if it is a success, into a failure with `status`. The queue pair goes to ERR; if it was a send
    /// request, no later send request succeeds, and if it was a receive, no later receive. The request has had its effect.
    ///
    /// Hardware: the request arrived but no acknowledgement came back ([`Status::RetryExceeded`],
    /// [`Status::ResponseTimeout`]), or the device failed after it ([`Status::LocalQpOperation`], [`Status::Fatal`],
    /// [`Status::General`]). Receives and datagrams wait for no acknowledgement; for them the first two become
    /// [`Status::LocalQpOperation`].
    ///
    /// # Panics
    ///
    /// If `status` is any other.
    pub fn fail_completion(mut self, k: u64, status: Status) -> Plan {
        use Status::*;
        let possible = [RetryExceeded, ResponseTimeout, LocalQpOperation, Fatal, General];
        assert!(possible.contains(&status), "a request that arrived does not end with {status:?}");
        self.completions.insert(k, status);
        self
    }

    /// Hands out completion `k` only after `polls` more polls of its queue, and later ones of the same queue pair after it.
    /// Completions of other queue pairs overtake it.
    ///
    /// Hardware: the device may write a completion late.
    pub fn delay_completion(mut self, k: u64, polls: u32) -> Plan {
        self.holds.insert(k, Hold::Polls(polls));
        self
    }

    /// Hands out completion `k` after a later completion of another queue pair in the same queue, if one arrives soon.
    ///
    /// Hardware: completions of different queue pairs have no order.
    pub fn overtake_completion(mut self, k: u64) -> Plan {
        self.holds.insert(k, Hold::Overtaken);
        self
    }

    /// Takes the port down just before post `k`, and up again `ticks` later. A tick is a post, or a poll of any queue of the
    /// device; a millisecond of waiting counts as a thousand ticks.
    ///
    /// Requests that are posted while the port is down are stalled. They are sent, in order, if the port comes up in time;
    /// otherwise they fail with [`Status::RetryExceeded`], see [`Plan::give_up_after`]. Datagrams are lost. Messages *from*
    /// the peer still arrive: take the peer's port down as well to separate the two.
    ///
    /// Hardware: a pulled cable, a switch that restarts.
    pub fn port_down(mut self, k: u64, ticks: u64) -> Plan {
        self.port_down.insert(k, ticks);
        self
    }

    /// Just before post `k`, the link stops to pass anything, for so many ticks: as [`Plan::port_down`], but the device reports
    /// no event, and requests do not fail however long it takes.
    ///
    /// Hardware: a switch that pauses the port, or drops packets for less time than the transport retries.
    pub fn stall(mut self, k: u64, ticks: u64) -> Plan {
        self.stalls.insert(k, ticks);
        self
    }

    /// How many ticks a request waits while the port is down; the default is [`Plan::RETRY_TICKS`]. It replaces
    /// [`ConnectConfig::timeout`](super::super::ConnectConfig::timeout) and its retries, which are measured in time and
    /// would not be reproducible.
    pub fn give_up_after(mut self, ticks: u64) -> Plan {
        self.retry_ticks = Some(ticks);
        self
    }

    /// Just before post `k`, makes the peer of its queue pair unreachable, see
    /// [`Control::kill_peer`](super::Control::kill_peer). Without effect if the queue pair is not connected.
    pub fn kill_peer(mut self, k: u64) -> Plan {
        self.kills.insert(k);
        self
    }

    pub(super) fn refusal(&self, k: u64) -> Option<PostError> {
        self.posts.get(&k).copied().or_else(|| {
            let drawn = self.draw(b'p', k, |odds| odds.refuse)?;
            Some(if drawn % 8 == 0 { PostError::Device(libc::ENOMEM) } else { PostError::Full })
        })
    }

    pub(super) fn loss(&self, k: u64) -> Option<Status> {
        self.lost.get(&k).copied().or_else(|| {
            let drawn = self.draw(b'l', k, |odds| odds.lose)?;
            Some(if drawn % 4 == 0 { Status::RemoteOperation } else { Status::RetryExceeded })
        })
    }

    pub(super) fn drops(&self, k: u64) -> bool {
        self.dropped.contains(&k) || self.draw(b'd', k, |odds| odds.drop).is_some()
    }

    /// Whether completion `k` fails; `sending`: it is that of a send request.
    pub(super) fn failure(&self, k: u64, sending: bool) -> Option<Status> {
        self.completions.get(&k).copied().or_else(|| {
            let drawn = self.draw(b'c', k, |odds| if sending { odds.fail } else { odds.fail_receive })?;
            Some([Status::RetryExceeded, Status::LocalQpOperation, Status::Fatal][(drawn % 3) as usize])
        })
    }

    pub(super) fn hold(&self, k: u64) -> Option<Hold> {
        self.holds.get(&k).copied().or_else(|| {
            let drawn = self.draw(b'h', k, |odds| odds.hold)?;
            Some(if drawn % 2 == 0 { Hold::Overtaken } else { Hold::Polls(1 + (drawn >> 8) as u32 % 16) })
        })
    }

    /// For how many ticks the port goes down before post `k`.
    pub(super) fn outage(&self, k: u64) -> Option<u64> {
        self.port_down.get(&k).copied().or_else(|| {
            let drawn = self.draw(b'o', k, |odds| odds.down)?;
            // One outage in five lasts longer than requests wait.
            Some(1 + drawn % (self.retry_ticks() * 5 / 4))
        })
    }

    /// For how many ticks the link stalls before post `k`.
    pub(super) fn stalls(&self, k: u64) -> Option<u64> {
        self.stalls.get(&k).copied().or_else(|| {
            let drawn = self.draw(b's', k, |odds| odds.stall)?;
            // Some are shorter, most are longer than requests wait when the port is down.
            Some(1 + drawn % (10 * self.retry_ticks()))
        })
    }

    pub(super) fn kills(&self, k: u64) -> bool {
        self.kills.contains(&k)
    }

    pub(super) fn retry_ticks(&self) -> u64 {
        self.retry_ticks.unwrap_or(Plan::RETRY_TICKS).max(1)
    }

    /// With the probability that the odds say, a random number. It depends on the arguments and the seed only.
    fn draw(&self, kind: u8, k: u64, odds: impl FnOnce(&Odds) -> u32) -> Option<u64> {
        let (seed, all) = self.random.as_ref()?;
        let odds = u64::from(odds(all));
        let drawn = splitmix64(splitmix64(seed ^ (u64::from(kind) << 56)).wrapping_add(k));
        (odds > 0 && drawn.is_multiple_of(odds)).then(|| splitmix64(drawn))
    }
}

/// The output function of Steele, Lea and Flood's SplitMix64 generator at state `x`.
fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_matches_its_published_sequence() {
        // First outputs of the reference generator seeded with 1234567.
        let mut state = 1_234_567_u64;
        let mut next = || {
            let out = splitmix64(state);
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            out
        };
        assert_eq!([next(), next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn equal_seeds_draw_equal_faults_at_the_expected_rate() {
        let (a, b) = (Plan::from_seed(7), Plan::from_seed(7));
        let refused = |plan: &Plan| (0..100_000).filter(|k| plan.refusal(*k).is_some()).collect::<Vec<_>>();
        assert_eq!(refused(&a), refused(&b));
        assert!((200..800).contains(&refused(&a).len()), "{}", refused(&a).len());
        assert_ne!(refused(&a), refused(&Plan::from_seed(8)));
        assert_eq!(refused(&Plan::none()), []);
    }

    #[test]
    #[should_panic(expected = "cannot be injected")]
    fn errors_that_hardware_does_not_return_cannot_be_planned() {
        drop(Plan::none().fail_post(0, PostError::TooLong(1)));
    }
}
