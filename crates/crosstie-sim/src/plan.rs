//! What to simulate.

use thiserror::Error;

/// What the members do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// All members take locks, with time-outs and tries in between.
    Lock,
    /// All members meet in a barrier, again and again; some join and leave.
    Barrier,
    /// All members send messages to all others, over packets that get lost, duplicated and reordered; receivers are slow.
    Message,
    /// One server and many clients call each other over copyrpc connections with small rings.
    Credits,
    /// Connections over three rails, which fail and return.
    Rails,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Scenario; 5] =
        [Scenario::Lock, Scenario::Barrier, Scenario::Message, Scenario::Credits, Scenario::Rails];

    /// Whether members can die and be cut off. Connections of two only have rails that fail.
    pub const fn has_deaths(self) -> bool {
        !matches!(self, Scenario::Credits | Scenario::Rails)
    }

    /// Whether members agree on who is a member.
    pub const fn has_membership(self) -> bool {
        matches!(self, Scenario::Lock | Scenario::Barrier)
    }

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Scenario::Lock => "lock",
            Scenario::Barrier => "barrier",
            Scenario::Message => "message",
            Scenario::Credits => "credits",
            Scenario::Rails => "rails",
        }
    }
}

/// How latencies vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jitter {
    /// Every packet takes the same time.
    None,
    /// Between half and one and a half times the latency.
    Uniform,
    /// Half of the latency, plus an exponentially distributed time with the same mean: a long tail.
    Exponential,
}

/// One simulation. The same plan gives the same result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// What the members do.
    pub scenario: Scenario,
    /// Members of the group; for [`Scenario::Credits`] and [`Scenario::Rails`], connections.
    pub members: usize,
    /// Operations of each member: acquisitions, rounds, messages or calls.
    pub operations: u64,
    /// Locks that the members compete for.
    pub locks: usize,
    /// Children of a member in the barrier's tree.
    pub fanout: usize,
    /// Mean time of a packet from member to member, in nanoseconds.
    pub latency_ns: u64,
    /// How latencies vary.
    pub jitter: Jitter,
    /// The share of packets that are lost, 0 to 0.5. Locks and barriers then use messages as their link.
    pub loss: f64,
    /// The share of packets that arrive twice, 0 to 0.5.
    pub duplicates: f64,
    /// Members that die at random instants.
    pub deaths: usize,
    /// A minority of the members is cut off at a random instant, until it is declared dead.
    pub partition: bool,
    /// A death is told to one survivor only, and not to all. Half of the members that die are those that something has just happened to,
    /// and deaths follow each other at once. Locks and barriers only.
    pub unkind: bool,
    /// Members that pause, for longer than every time limit, and go on. Locks and barriers only.
    pub pauses: usize,
    /// Members that pause and that some other member expels meanwhile. Locks and barriers only.
    pub expulsions: usize,
    /// Members give up waiting, try, join and leave. Without, they only lock, unlock and enter. [`Scenario::Rails`]: rails stay away for
    /// hours, and applications pause. [`Scenario::Message`]: members stop for a while, and send queues are short.
    pub restless: bool,
    /// Messages: a refused sender sends again after a back-off time, instead of waiting for the receiver's request.
    pub blind_retry: bool,
    /// Messages: after a loss everything behind it is sent again, instead of what is missing.
    pub go_back: bool,
    /// Messages: a receiver acknowledges at the latest after this many packets.
    pub ack_every: u32,
    /// Messages: small ones travel together while at least this many packets to their member are not acknowledged. 16: never.
    pub combine_from: u32,
    /// The seed of everything random.
    pub seed: u64,
}

impl Plan {
    /// A small simulation without loss and deaths.
    pub fn new(scenario: Scenario) -> Self {
        Plan {
            scenario,
            members: 4,
            operations: 50,
            locks: 1,
            fanout: 2,
            latency_ns: 2_000,
            jitter: Jitter::Exponential,
            loss: 0.0,
            duplicates: 0.0,
            deaths: 0,
            partition: false,
            unkind: false,
            pauses: 0,
            expulsions: 0,
            restless: false,
            blind_retry: false,
            go_back: false,
            ack_every: 4,
            combine_from: 8,
            seed: 1,
        }
    }

    /// Checks all values against their limits.
    pub fn check(&self) -> Result<(), PlanError> {
        let checks = [
            ("members", (2..=1024).contains(&self.members), "must be from 2 to 1024"),
            ("operations", (1..=1_000_000).contains(&self.operations), "must be from 1 to 1000000"),
            ("locks", (1..=4096).contains(&self.locks), "must be from 1 to 4096"),
            ("fanout", (1..=64).contains(&self.fanout), "must be from 1 to 64"),
            ("latency-ns", (2..=1_000_000_000).contains(&self.latency_ns), "must be from 2 to 1000000000"),
            ("loss", (0.0..=0.5).contains(&self.loss), "must be from 0 to 0.5"),
            ("duplicates", (0.0..=0.5).contains(&self.duplicates), "must be from 0 to 0.5"),
            (
                "deaths",
                self.deaths.saturating_add(self.pauses).saturating_add(self.expulsions) < self.members,
                "with pauses and expulsions must be fewer than members",
            ),
            ("ack-every", (1..=16).contains(&self.ack_every), "must be from 1 to 16"),
            ("combine-from", (1..=16).contains(&self.combine_from), "must be from 1 to 16"),
            (
                "partition",
                !self.partition
                    || (self.members >= self.deaths + self.pauses + self.expulsions + 3
                        && (self.deaths == 0 || self.scenario.has_membership())),
                "needs three members that do not die or pause, and no deaths with messages",
            ),
            (
                "deaths",
                self.scenario.has_deaths() || (self.deaths == 0 && !self.partition),
                "and partitions do not apply to the scenarios credits and rails",
            ),
            (
                "unkind",
                self.scenario.has_membership() || !(self.unkind || self.pauses > 0 || self.expulsions > 0),
                "and pauses and expulsions apply to the scenarios lock and barrier only",
            ),
        ];
        match checks.into_iter().find(|(_, valid, _)| !valid) {
            Some((field, _, rule)) => Err(PlanError { field, rule }),
            None => Ok(()),
        }
    }

    /// Whether members die, pause or are cut off.
    pub(crate) fn has_faults(&self) -> bool {
        self.deaths + self.pauses + self.expulsions > 0 || self.partition
    }

    /// Whether packets can get lost, so that locks and barriers need messages as their link.
    pub(crate) fn is_lossy(&self) -> bool {
        self.loss > 0.0 || self.duplicates > 0.0 || self.partition
    }
}

/// A value of a plan is outside of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{field} {rule}")]
pub struct PlanError {
    /// The value.
    pub field: &'static str,
    /// Its limits.
    pub rule: &'static str,
}
