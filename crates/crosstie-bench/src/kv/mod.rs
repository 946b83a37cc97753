//! The benchmark of the key-value store: throughput of a cluster, and latency that its clients see.
//!
//! Every rank of a job [runs](run) the same [`Plan`]: one node per backend, filled with the node's share of the keys, and clients on
//! threads or as processes. If there are not enough cores for a thread per client, one thread runs several clients, as a program with
//! one thread and several connections does ([`Figures::client_threads`]). After a warm-up come the runs; all ranks synchronize between
//! runs. With two backends the runs alternate, so that both see the same load of the machine.
//!
//! # What is measured
//!
//! - **Closed loop**: each client keeps `queue_depth` operations in flight. **Open loop**: operations start at random times at a given
//!   rate, without waiting for responses, and latency counts from the intended start. A client that has reached its queue depth starts
//!   late; the counter `not_started` has the operations that had not started at the end.
//! - Operations are summed over all ranks. A run lasts from the start of the first client to the last response of the last client. On
//!   several machines, whose clocks differ, it is the longest time of a rank. The result is the median of the runs.
//! - One operation in [`SAMPLE_EVERY`] is timed, or every one where a client has one operation in flight or in an open loop.
//! - Every response is checked: a get must return what was put. With [`Plan::check`] all operations are recorded, and rank 0 checks
//!   that the history is linearizable, see [`history`](crate::history). On several machines the checker takes the uncertainty of the clocks into account:
//!   the counter `clocks_within_ns`.
//! - On one node, with a core for each daemon and client, the same run also measures minimal code for the same requests: client threads
//!   in a closed loop, 8-byte values. See [`Figures::limit_ops_per_s`].
//! - The memory of a rank is what its process grew by from before the node started until after the warm-up, client threads included.
//!   Memory shared with other processes counts in proportion. The result also has the limit of the node's memory.
//!
//! # What ends it
//!
//! If `interrupt` is set at one rank, this rank tells the others through the store, and the figures cover the time until then. If a rank
//! dies, each surviving rank has what its own clients measured, and [`Outcome::error`] says why. No wait is without a timeout.

#![forbid(unsafe_code)]

mod client_loop;
mod client_pool;
mod clocks;
pub mod command;
mod plain_limit;
mod rank_run;
mod topology;
mod totals;
mod worker;

use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crosstie::bootstrap::Bootstrap;
use crosstie::device::DeviceSpec;

pub use client_pool::run_client_process;
pub(crate) use topology::machine_description;
pub use worker::SAMPLE_EVERY;

use crate::error::Error;
use crate::figures::Figures;
use crate::options::usage;
use crate::workload;
use clocks::Clocks;
use crosstie_kv::Backend;
use crosstie_kv::node::{MAX_BYTES_DEPTH, MAX_CLIENTS, MAX_QUEUE_DEPTH};
use crosstie_kv::sharding::{MAX_DAEMONS, MAX_NODES};
use plain_limit::PlainLimit;
use rank_run::{ClusterToken, RankRun};

/// Limit of [`Plan::runs`].
pub const MAX_RUNS: u32 = 1000;
/// Limit of [`Plan::duration`].
pub const MAX_DURATION: Duration = Duration::from_secs(3600);
/// Operations that are recorded at most, those of all clients together.
pub const MAX_RECORDED: usize = 1 << 20;

/// What to measure. It must be the same on all ranks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// One or two backends. The runs of two backends alternate.
    pub backends: Vec<Backend>,
    /// Of each node.
    pub daemons: u32,
    /// Of each node.
    pub clients: u32,
    /// Operations that a client has in flight at most.
    pub queue_depth: u32,
    /// The requests of the clients.
    pub workload: workload::Plan,
    /// Operations per second of all clients together, for an open loop.
    pub rate: Option<f64>,
    /// Number of runs.
    pub runs: u32,
    /// Measured time of a backend, all runs together.
    pub duration: Duration,
    /// For clients that are processes: the arguments of this program that call [`run_client_process`].
    pub processes: Option<Vec<OsString>>,
    /// Whether to record and check all operations.
    pub check: bool,
    /// The device that connects the nodes.
    pub device: DeviceSpec,
    /// Which threads are pinned to which cores.
    pub cores: Cores,
    /// Name of the launcher of the ranks.
    pub launcher: String,
}

/// Which threads are pinned to which cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cores {
    /// Each daemon and each client thread is pinned to one of the cores that the rank may use, if there are enough for all.
    Auto,
    /// Threads are not pinned.
    None,
    /// As `Auto`, with these cores of each machine.
    List(Vec<usize>),
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Cores, String> {
        let wrong = |_| "give auto, none, or core numbers separated by commas".to_owned();
        match text {
            "auto" => Ok(Cores::Auto),
            "none" => Ok(Cores::None),
            list => list.split(',').map(str::parse).collect::<Result<_, _>>().map(Cores::List).map_err(wrong),
        }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cores::Auto => f.write_str("auto"),
            Cores::None => f.write_str("none"),
            Cores::List(cores) => {
                f.write_str(&cores.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
            }
        }
    }
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

/// The result of a benchmark.
#[derive(Debug)]
pub struct Outcome {
    /// The figures of each backend, in the order of the plan.
    pub figures: Vec<Figures>,
    /// The error that ended the benchmark early.
    pub error: Option<Error>,
}

impl Plan {
    /// Checks the plan for a cluster of `nodes`.
    pub fn validate(&self, nodes: u32) -> Result<(), Error> {
        for (what, value, limit) in [
            ("nodes", nodes, MAX_NODES),
            ("daemons", self.daemons, MAX_DAEMONS),
            ("clients", self.clients, MAX_CLIENTS as u32 - rank_run::OTHER_CLIENTS as u32),
            ("queue depth", self.queue_depth, MAX_QUEUE_DEPTH as u32),
            ("runs", self.runs, MAX_RUNS),
        ] {
            if !(1..=limit).contains(&value) {
                return usage(format!("{what} {value}: give 1 to {limit}"));
            }
        }
        if self.duration.is_zero() || self.duration > MAX_DURATION {
            let (given, limit) = (self.duration.as_secs_f64(), MAX_DURATION.as_secs());
            return usage(format!("duration {given}: give seconds above 0, up to {limit}"));
        }
        if self.backends.is_empty() || self.backends.len() > 2 {
            return usage(format!("{} backends: give one or two", self.backends.len()));
        }
        self.workload.validate()?;
        if self.check && self.recorded_each(nodes) == 0 {
            let (clients, runs) = (u64::from(nodes) * u64::from(self.clients), self.runs);
            return usage(format!(
                "at most {MAX_RECORDED} operations are recorded, too few for {clients} clients in {runs} runs: give fewer clients or runs"
            ));
        }
        if let Some(rate) = self.rate
            && !(rate > 0.0 && rate <= 1e9)
        {
            return usage(format!("a rate of {rate} per second: give more than 0, up to 1e9"));
        }
        if !self.workload.has_words() {
            let (size, depth, limit) = (self.workload.value_size, self.queue_depth, MAX_BYTES_DEPTH);
            if self.check {
                return usage(format!(
                    "histories with values of {size} bytes are not checked: use --payload 8 with --check"
                ));
            }
            if depth as usize > limit {
                return usage(format!(
                    "queue depth {depth}: with values of {size} bytes a client has at most {limit} operations in flight"
                ));
            }
        }
        if let Cores::List(cores) = &self.cores {
            let (count, daemons) = (cores.len(), self.daemons);
            let threads = if self.clients_share_threads() { 1 } else { self.clients };
            if count < (daemons + threads) as usize {
                return usage(format!(
                    "{count} cores for a node's {daemons} daemons and at least {threads} client threads: give one for each"
                ));
            }
        }
        Ok(())
    }

    /// Whether one thread may run several clients: not if the clients are processes.
    fn clients_share_threads(&self) -> bool {
        self.processes.is_none()
    }

    /// Most operations of one client that are recorded in one run, or in the warm-up.
    fn recorded_each(&self, nodes: u32) -> usize {
        MAX_RECORDED / (nodes as usize * self.clients as usize) / (self.runs as usize + 1)
    }

    /// All parameters that must be equal on all ranks, as text. Devices and cores may differ between machines.
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

/// Runs one rank of `job`; returns when all ranks have finished. `progress` is called with the share of the work that is done.
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
        for nth in 0..rank_runs.len() {
            if over {
                break 'runs;
            }
            // The order alternates, so that no backend is always first.
            let nth = if run % 2 == 0 { nth } else { rank_runs.len() - 1 - nth };
            match rank_runs[nth].measure(job, plan, interrupt) {
                Ok(()) => over = rank_runs[nth].is_over(),
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
    // Stopping a node fails operations of other ranks: keep all nodes until all ranks have exchanged their results.
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
