//! How a group is made, and its limits.

use std::time::Duration;

use crosstie_protocol::group::{MemberSet, TreeOptions};

use crate::WaitStrategy;
use crate::bootstrap::Secret;

/// Limits of this module, in one place. Those of the protocol: [`crosstie_protocol::group::Limits`].
pub(super) mod limits {
    use core::time::Duration;

    /// Most channels of a group.
    pub(in crate::group) const MAX_CHANNELS: usize = 256;
    /// Receives of all links together; each link has at least [`MIN_RECEIVES`] and at most [`MAX_RECEIVES`].
    pub(in crate::group) const TOTAL_RECEIVES: usize = 16 << 10;
    pub(in crate::group) const MIN_RECEIVES: usize = 16;
    pub(in crate::group) const MAX_RECEIVES: usize = 256;
    /// Receives of the datagram queue pair.
    pub(in crate::group) const DATAGRAM_RECEIVES: usize = 1024;
    /// Send requests of a link or of the datagram queue pair that are not known to be complete.
    pub(in crate::group) const SEND_QUEUE: u32 = 512;
    /// Of these, requests that only lock and barrier packets use.
    pub(in crate::group) const CONTROL_RESERVE: u32 = 64;
    /// Buffers for long lock and barrier packets, and for packets that are sent again.
    pub(in crate::group) const STAGING_SLOTS: usize = 256;
    /// How long the error of a time-out waits for the answers of the other members.
    pub(in crate::group) const STATUS_WAIT: Duration = Duration::from_millis(200);
    /// How long `try_acquire` waits for an answer.
    pub(in crate::group) const TRY_WAIT: Duration = Duration::from_secs(5);
    /// How long a member that leaves waits until the others have room for the word of it.
    pub(in crate::group) const LEAVE_WAIT: Duration = Duration::from_millis(100);
    /// How often links are checked, at most.
    pub(in crate::group) const CHECK_INTERVAL: u64 = 5_000_000;
    /// Longest PUT, in bytes.
    pub(in crate::group) const MAX_PUT: usize = 256;
    /// Most PUTs in flight.
    pub(in crate::group) const PUT_SLOTS: usize = 256;
    /// How often PULLs in flight are looked after while a thread has nothing else to do.
    pub(in crate::group) const PULL_INTERVAL: u64 = 50_000;
    /// Places for packets of each other member in the buffers of a channel, at least, unless its options say otherwise.
    pub(in crate::group) const PACKETS_PER_PEER: usize = 8;
    /// How often silent peers are probed.
    pub(in crate::group) const PROBE_INTERVAL: u64 = 250_000_000;
}

/// Which queue pairs carry messages. Locks and barriers always use connected ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connected queue pairs, one for each pair of members.
    #[default]
    Rc,
    /// One unreliable datagram queue pair for all members. Lost packets are sent again.
    Ud,
}

/// Who makes progress: serves packets of other members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ProgressMode {
    /// Threads of the application while they wait in a call of the group, and a thread of the group otherwise.
    #[default]
    Thread,
    /// Only calls of the application. It has to call [`Group::progress`](super::Group::progress) often enough.
    Manual,
}

/// How a group is made. All members use the same values, except `wait`, `progress` and `receive_loss`.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub(super) id: u64,
    pub(super) secret: Option<Secret>,
    pub(super) ranks: Option<Vec<u32>>,
    pub(super) locks: usize,
    pub(super) barriers: usize,
    pub(super) tree: TreeOptions,
    pub(super) barrier_members: Option<MemberSet>,
    pub(super) transport: Transport,
    pub(super) one_sided: bool,
    pub(super) wait: WaitStrategy,
    pub(super) progress: ProgressMode,
    pub(super) receive_loss: Option<(f64, u64)>,
    pub(super) first_view: Option<u64>,
}

impl GroupConfig {
    /// The usual configuration of the group with this id: all ranks of the job are members, in the order of their ranks; 64 locks,
    /// one barrier, messages over RC.
    pub fn new(id: u64) -> Self {
        GroupConfig {
            id,
            secret: None,
            ranks: None,
            locks: 64,
            barriers: 1,
            tree: TreeOptions::default(),
            barrier_members: None,
            transport: Transport::default(),
            one_sided: false,
            wait: WaitStrategy::default(),
            progress: ProgressMode::default(),
            receive_loss: None,
            first_view: None,
        }
    }

    /// A secret that every member has to know, beside that of the job.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// The member list: ranks of the job. Member `i` is the `i`-th of them. Other ranks call [`Group::skip`](super::Group::skip).
    #[must_use]
    pub fn ranks(mut self, ranks: impl IntoIterator<Item = u32>) -> Self {
        self.ranks = Some(ranks.into_iter().collect());
        self
    }

    /// Number of locks. Their managers are spread over the members.
    #[must_use]
    pub fn locks(mut self, locks: usize) -> Self {
        self.locks = locks;
        self
    }

    /// Number of barriers.
    #[must_use]
    pub fn barriers(mut self, barriers: usize) -> Self {
        self.barriers = barriers;
        self
    }

    /// The shape of the barriers' tree: fan-out and the host of each member.
    #[must_use]
    pub fn tree(mut self, tree: TreeOptions) -> Self {
        self.tree = tree;
        self
    }

    /// The members that take part in the barriers from the start. Others can join later.
    #[must_use]
    pub fn barrier_members(mut self, members: MemberSet) -> Self {
        self.barrier_members = Some(members);
        self
    }

    /// Which queue pairs carry messages.
    #[must_use]
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Whether members reach each other's memory: PUSH, PULL, PUT, and long tagged messages without copies. Costs an
    /// [endpoint](crate::endpoint::Endpoint) for each other member; with [`ProgressMode::Thread`] each has a thread, which sleeps
    /// while nothing happens.
    #[must_use]
    pub fn one_sided(mut self, one_sided: bool) -> Self {
        self.one_sided = one_sided;
        self
    }

    /// How calls of this member wait.
    #[must_use]
    pub fn wait(mut self, wait: WaitStrategy) -> Self {
        self.wait = wait;
        self
    }

    /// Who makes progress.
    #[must_use]
    pub fn progress(mut self, progress: ProgressMode) -> Self {
        self.progress = progress;
        self
    }

    /// The number of the group's first view, at most 2^63, for programs that do not rely on clocks. [Fencing tokens](super::Token)
    /// begin with it, so it must be above the views of all groups whose tokens a resource has seen: at least 2^20 above the first view
    /// of the group before. A counter in a store, raised before each join, gives it: `counter << 20`.
    ///
    /// Without it, the first view is the latest of the members' clocks, in nanoseconds since 1970. That rises as long as no clock is set
    /// back to before an earlier group was made, and two groups that use one resource are made a millisecond apart.
    #[must_use]
    pub fn first_view(mut self, number: u64) -> Self {
        self.first_view = Some(number);
        self
    }

    /// For measurements and tests: drops this share of all received message packets (0 to 1), chosen from a seed.
    /// Over RC, all members need it: only then do their channels send again what is not acknowledged
    /// ([`Group::channel_options`](super::Group::channel_options)).
    #[must_use]
    pub fn receive_loss(mut self, share: f64, seed: u64) -> Self {
        self.receive_loss = Some((share, seed));
        self
    }
}

/// The deadline of a wait in nanoseconds of the engine's clock.
pub(super) fn deadline_after(now: u64, timeout: Option<Duration>) -> Option<u64> {
    timeout.map(|timeout| now.saturating_add(timeout.as_nanos().min(u64::MAX.into()) as u64))
}
