//! The benchmark of the store: what a cluster reaches, and how long its clients wait.
//!
//! Every rank of a job [runs](run) the same [`Plan`]: a node for each backend, the node's share of the keys in it, and clients on
//! threads or as processes. Where there are not enough cores for a thread each, one thread has several clients, which take turns, as
//! in a program with one thread and several connections ([`Figures::client_threads`]). After a warm-up come the runs; between them all ranks meet. With two backends the runs alternate, so
//! that both have the same machine, whatever else it does.
//!
//! # What is measured
//!
//! - **Closed loop**: each client keeps so many operations under way. **Open loop**: operations start at random at a given rate,
//!   whatever the answers do, and latency counts from when they should have started. A client that has as many under way as it
//!   may starts late; what has not started at the end is in the counter `not_started`.
//! - Operations are those of all ranks. The time of a run is that from the first client's start to the last one's last answer;
//!   on several machines, whose clocks differ, the longest of the ranks'. The result is the median of the runs.
//! - Which operations are timed: see [`SAMPLE_EVERY`].
//! - Every answer is looked at: what is got must be what was put there. With [`Plan::check`] all operations are recorded, and
//!   rank 0 looks for an order that explains them, see [`history`]. On several machines it takes times to be known as well as
//!   comparing clocks through the job tells: the counter `clocks_within_ns`.
//! - On one node, with a core for each daemon and client, the same run measures in between the plainest code that makes the same
//!   exchange: client threads in a closed loop, 8-byte values. See [`Figures::limit_ops_per_s`].
//! - Memory of a rank is what its process grew by when the node started, was filled and warmed up, its clients' threads included, and
//!   of memory that it shares with other processes its part; beside it is what the node may use at most.
//!
//! # What ends it
//!
//! When `interrupt` is set at one rank, it tells the others through the store, and the figures are those until then. When a
//! rank dies, each survivor has what its own clients saw ([`Outcome::error`] says why). Nobody waits for ever.

#![forbid(unsafe_code)]

mod client_loop;
mod client_pool;
mod clocks;
pub mod command;
mod gather;
mod plain_limit;
mod rank_run;
mod topology;
mod totals;
mod worker;

use std::ffi::OsString;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crosstie::bootstrap::{self, Bootstrap};
use crosstie::device::DeviceSpec;

pub use client_pool::run_client_process;
pub use worker::SAMPLE_EVERY;

use crate::figures::Figures;
use crate::history;
use crate::workload::{self, PlanError};
use clocks::Clocks;
use crosstie_kv::Backend;
use crosstie_kv::client::{self, AttachError};
use crosstie_kv::node::{MAX_BYTES_DEPTH, MAX_CLIENTS, MAX_QUEUE_DEPTH, PeersMissing, StartError};
use crosstie_kv::sharding::{MAX_DAEMONS, MAX_NODES};
use plain_limit::PlainLimit;
use rank_run::{ClusterToken, RankRun};

/// Limit of [`Plan::runs`].
pub const MAX_RUNS: u32 = 1000;
/// Limit of [`Plan::duration`].
pub const MAX_DURATION: Duration = Duration::from_secs(3600);
/// Operations that are recorded at most, those of all clients together.
pub const MAX_RECORDED: usize = 1 << 20;

/// What to measure. The same on all ranks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// One or two, whose runs alternate.
    pub backends: Vec<Backend>,
    /// Of each node.
    pub daemons: u32,
    /// Of each node.
    pub clients: u32,
    /// Operations that a client has under way at most.
    pub queue_depth: u32,
    /// What clients ask for.
    pub workload: workload::Plan,
    /// Operations per second of all clients together, for an open loop.
    pub rate: Option<f64>,
    /// How often to measure.
    pub runs: u32,
    /// How long to measure, all runs of a backend together.
    pub duration: Duration,
    /// For clients that are processes: the arguments of this program that call [`run_client_process`].
    pub processes: Option<Vec<OsString>>,
    /// Whether to record and check all operations.
    pub check: bool,
    /// What nodes reach each other through.
    pub device: DeviceSpec,
    /// Who runs where.
    pub cores: Cores,
    /// What started the ranks, in a word.
    pub launcher: String,
}

/// Who runs where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cores {
    /// Each daemon and each thread of clients has a core of those that the rank may use, if there are enough for all.
    Auto,
    /// Nobody is bound.
    None,
    /// As `Auto`, on these cores of each machine.
    List(Vec<usize>),
}

impl Default for Plan {
    /// Both backends, two daemons and four clients on each node, four operations at a time.
    fn default() -> Plan {
        Plan {
            backends: vec![Backend::Meta, Backend::Delegation],
            daemons: 2,
            clients: 4,
            queue_depth: 4,
            workload: workload::Plan::default(),
            rate: None,
            runs: 5,
            duration: Duration::from_secs(3),
            processes: None,
            check: false,
            device: DeviceSpec::Software,
            cores: Cores::Auto,
            launcher: "local".into(),
        }
    }
}

/// What was found.
#[derive(Debug)]
pub struct Outcome {
    /// For each backend, in the plan's order.
    pub figures: Vec<Figures>,
    /// Why there is not more.
    pub error: Option<Error>,
}

/// Why there are no figures, or not all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The plan asks for what cannot be.
    #[error("{0}")]
    Plan(String),
    /// The workload cannot be made.
    #[error(transparent)]
    Workload(#[from] PlanError),
    /// The ranks lost each other.
    #[error(transparent)]
    Bootstrap(#[from] bootstrap::Error),
    /// Another rank failed.
    #[error("rank {rank}: {what}")]
    Peer {
        /// Which one.
        rank: u32,
        /// Why.
        what: String,
    },
    /// A node did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Nodes did not find each other.
    #[error(transparent)]
    Peers(#[from] PeersMissing),
    /// A client did not find its node.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The store could not be filled.
    #[error("filling the store: {0}")]
    Fill(client::Error),
    /// Somebody wanted it to end before there was anything to tell.
    #[error("it was told to end before anything was measured")]
    Interrupted,
    /// A client could not connect for byte strings.
    #[error("connecting for byte strings: {0}")]
    Strings(client::Error),
    /// A client cannot go on.
    #[error("client {client}: {what}")]
    Client {
        /// Which one, among those of this rank.
        client: usize,
        /// Why.
        what: String,
    },
    /// Clients do not answer.
    #[error("nothing came from the clients for {0} s: they are stopped, or starved of their cores")]
    ClientsSilent(u64),
    /// Operations found no node.
    #[error(
        "{0} operations ended because a node was gone or did not answer: the figures are those until then"
    )]
    NodesGone(u64),
    /// Another rank speaks otherwise.
    #[error("another rank answered out of protocol: run the same build everywhere")]
    Protocol,
    /// Nobody knows how to reach this machine.
    #[error(
        "no address by which other machines reach this one: set CROSSTIE_RENDEZVOUS, or let its name resolve to its address"
    )]
    NoAddress,
    /// The store did what no store may.
    #[error("the store broke its promise (backend {backend:?}, seed {seed}): {failure}")]
    Violation {
        /// Which one.
        backend: Backend,
        /// Of the workload.
        seed: u64,
        /// What it did.
        failure: history::Failure,
    },
    /// The system refused something.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What it answered.
        source: std::io::Error,
    },
}

impl From<serde_json::Error> for Error {
    fn from(_: serde_json::Error) -> Error {
        Error::Protocol
    }
}

impl Plan {
    /// Says what is wrong with it.
    pub fn validate(&self, nodes: u32) -> Result<(), Error> {
        let wrong = |text: String| Err(Error::Plan(text));
        for (what, value, limit) in [
            ("nodes", nodes, MAX_NODES),
            ("daemons", self.daemons, MAX_DAEMONS),
            ("clients", self.clients, MAX_CLIENTS as u32 - rank_run::OTHER_CLIENTS as u32),
            ("queue depth", self.queue_depth, MAX_QUEUE_DEPTH as u32),
            ("runs", self.runs, MAX_RUNS),
        ] {
            if !(1..=limit).contains(&value) {
                return wrong(format!("{what} {value}: give 1 to {limit}"));
            }
        }
        if self.duration.is_zero() || self.duration > MAX_DURATION {
            let (given, limit) = (self.duration.as_secs_f64(), MAX_DURATION.as_secs());
            return wrong(format!("duration {given}: give seconds above 0, up to {limit}"));
        }
        if self.backends.is_empty() || self.backends.len() > 2 {
            return wrong(format!("{} backends: give one or two", self.backends.len()));
        }
        self.workload.validate()?;
        if self.check && self.recorded_each(nodes) == 0 {
            let (clients, runs) = (u64::from(nodes) * u64::from(self.clients), self.runs);
            return wrong(format!(
                "{MAX_RECORDED} operations are recorded at most, none each for {clients} clients in {runs} runs: give fewer"
            ));
        }
        if let Some(rate) = self.rate
            && !(rate > 0.0 && rate <= 1e9)
        {
            return wrong(format!("a rate of {rate} per second: give more than 0, up to 1e9"));
        }
        if !self.workload.has_words() {
            let (size, depth, limit) = (self.workload.value_size, self.queue_depth, MAX_BYTES_DEPTH);
            if self.check {
                return wrong(format!(
                    "histories of values of {size} bytes are not checked: give values of 8 bytes"
                ));
            }
            if depth as usize > limit {
                return wrong(format!(
                    "queue depth {depth}: with values of {size} bytes a client has {limit} operations under way at most"
                ));
            }
        }
        if let Cores::List(cores) = &self.cores {
            let (count, daemons) = (cores.len(), self.daemons);
            let threads = if self.clients_share_threads() { 1 } else { self.clients };
            if count < (daemons + threads) as usize {
                return wrong(format!(
                    "{count} cores for a node's {daemons} daemons and at least {threads} threads of clients: name one for each"
                ));
            }
        }
        Ok(())
    }

    /// Whether one thread may have several clients: not if they are processes.
    fn clients_share_threads(&self) -> bool {
        self.processes.is_none()
    }

    /// Operations of each client that are recorded in each run, the warm-up included, at most.
    fn recorded_each(&self, nodes: u32) -> usize {
        MAX_RECORDED / (nodes as usize * self.clients as usize) / (self.runs as usize + 1)
    }

    /// All that must be the same on all ranks, in words. Devices and cores of machines have names of their own.
    fn shared_parameters(&self) -> String {
        let Plan {
            backends,
            daemons,
            clients,
            queue_depth,
            workload,
            rate,
            runs,
            duration,
            processes,
            check,
            ..
        } = self;
        let pool = (daemons, clients, queue_depth, processes.is_some());
        format!("{:?}", (backends, pool, workload, rate, runs, duration, check))
    }

    fn run_length(&self) -> Duration {
        self.duration / self.runs
    }
}

/// Takes part as one rank of `job`, and returns when all are through. `progress` hears which share of the work is done.
pub fn run(
    job: &mut dyn Bootstrap,
    plan: &Plan,
    interrupt: &AtomicBool,
    mut progress: impl FnMut(f64),
) -> Result<Outcome, Error> {
    plan.validate(job.size())?;
    let topology = topology::discover(job, plan)?;
    let clocks = if plan.check { Some(Clocks::new(job, &topology.on_other_machine)?) } else { None };
    let token = ClusterToken::agree(job)?;
    let mut limit = PlainLimit::new(plan, &topology, job.size())?;
    let steps = (plan.backends.len() * (plan.runs as usize + 1)) as f64;
    let mut step = 0.0;
    let mut advance = || {
        step += 1.0;
        progress(step / steps);
    };
    let mut rank_runs = Vec::new();
    for backend in &plan.backends {
        rank_runs.push(RankRun::start(job, plan, &topology, &token, *backend, interrupt)?);
        advance();
    }
    let mut error = None;
    let mut over = rank_runs.iter().any(RankRun::is_over);
    'runs: for run in 0..plan.runs {
        for turn in 0..rank_runs.len() {
            if over {
                break 'runs;
            }
            // Nobody is always first.
            let turn = if run % 2 == 0 { turn } else { rank_runs.len() - 1 - turn };
            match rank_runs[turn].measure(job, plan, interrupt) {
                Ok(()) => over = rank_runs[turn].is_over(),
                Err(cause) => {
                    error = Some(cause);
                    break 'runs;
                }
            }
            advance();
        }
        if let Some(limit) = &mut limit {
            limit.measure()?;
        }
    }
    let interrupted = over || error.is_some();
    let mut figures = Vec::new();
    // A node that stops takes others' operations with it: all end together, after the last word.
    let mut nodes = Vec::new();
    for rank_run in rank_runs {
        let (node, mut found, problem) = rank_run.finish(job, plan, &topology, clocks.as_ref(), interrupted);
        found.set_limit(limit.as_ref().and_then(PlainLimit::per_second));
        nodes.push(node);
        figures.push(found);
        error = error.or(problem);
    }
    let gone = figures.iter().map(|figures| figures.node_gone).sum();
    if gone > 0 {
        error = error.or(Some(Error::NodesGone(gone)));
    }
    Ok(Outcome { figures, error })
}
