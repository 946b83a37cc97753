//! Runs a benchmark: starts its ranks, runs short slices of the benchmark and of what it is compared with in turns, and adds up what
//! the ranks have counted.
//!
//! All slices run under the same load of the machine, so the medians over the slices can be compared. A benchmark between ranks is a
//! [`Benchmark`]. What is measured, the benchmark itself and each of its limits, is an [`Exchange`] between the ranks.

mod collective;
mod ranks;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::device::DeviceSpec;
use crosstie::telemetry::Histogram;
use serde::{Deserialize, Serialize};

pub(crate) use collective::{Collective, Connect};
pub(crate) use ranks::{Part, Rank, run};

use crate::error::Error;
use crate::limits::Throughput;
use crate::median::median;
use crate::options::{Common, Sides};
use crate::progress::Progress;
use crate::shared_region::SharedRegion;
use crate::summary::{Fields, Report, Summary};

/// How many times shorter than a slice of the benchmark a slice of a limit is.
const LIMIT_SHARE: u32 = 4;

/// A benchmark, as the runner sees it: on every rank the same.
pub(crate) trait Benchmark: Sync {
    fn job(&self) -> Job<'_>;

    /// Connects the ranks, and returns what is measured: first the benchmark itself. The rank is not pinned to its core yet, so that
    /// the threads that a library starts are not pinned either.
    fn open<'a>(&'a self, rank: &mut Rank<'a>) -> Result<Vec<Contender<'a>>, Error>;

    /// What the machine allows. Called if all ranks share memory.
    fn limits<'a>(&'a self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>>;

    /// What the result contains beside what every result contains.
    fn report(&self, measured: &mut Measured) -> Report;
}

/// What the runner must know of a benchmark.
pub(crate) struct Job<'a> {
    /// Its name on the command line.
    pub(crate) bench: &'static str,
    /// What is measured, in words.
    pub(crate) what: String,
    /// The options that are part of the result.
    pub(crate) options: Fields,
    /// The devices, as the result names them.
    pub(crate) device: String,
    pub(crate) common: Common,
    /// The device of each rank; the ranks after the last one have that of the last.
    pub(crate) devices: &'a [DeviceSpec],
    pub(crate) ranks: usize,
    /// Whether each rank is a process, not a thread.
    pub(crate) processes: bool,
    /// Whether a launcher may start the ranks, also on several machines.
    pub(crate) across_machines: bool,
    /// Bytes of the memory that all ranks share if they are on one machine.
    pub(crate) region: usize,
}

impl<'a> Job<'a> {
    /// A benchmark between two sides. What is measured is to be filled in.
    pub(crate) fn of_two(bench: &'static str, common: Common, sides: &'a Sides) -> Job<'a> {
        Job {
            bench,
            what: String::new(),
            options: Fields::new(),
            device: sides.name(),
            common,
            devices: &sides.device,
            ranks: 2,
            processes: sides.processes,
            across_machines: true,
            region: 0,
        }
    }
}

/// What one rank does in each slice of a measurement, together with the other ranks.
pub(crate) trait Exchange {
    /// Runs one slice. A rank that leads returns what was done.
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error>;
    /// Called on every rank after a slice, with what all ranks together have done.
    fn slice_done(&mut self, _total: Throughput) {}
    /// Forgets what was counted: it was the warm-up.
    fn reset(&mut self) {}
    /// What this rank has counted.
    fn counts(&self) -> Counts {
        Counts::default()
    }
}

/// What a rank has counted, or the sum of all ranks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) counters: BTreeMap<String, u64>,
    /// Operations that failed or carried wrong data.
    pub(crate) errors: u64,
    #[serde(with = "histogram")]
    pub(crate) latency: Histogram,
    /// How long it took to start an operation, if that was measured.
    #[serde(with = "histogram")]
    pub(crate) issue: Histogram,
}

impl Counts {
    pub(crate) fn new(counters: impl IntoIterator<Item = (&'static str, u64)>, errors: u64) -> Counts {
        let mut counts = Counts { errors, ..Counts::default() };
        // Not `collect`, which sorts: each caller would get a sort function of its own.
        counts.counters.extend(counters.into_iter().map(|(name, count)| (name.to_owned(), count)));
        counts
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, other: Counts) {
        for (name, count) in other.counters {
            *self.counters.entry(name).or_default() += count;
        }
        self.errors += other.errors;
        self.latency.merge(&other.latency);
        self.issue.merge(&other.issue);
    }
}

/// A histogram travels as its buckets.
mod histogram {
    use crosstie::telemetry::Histogram;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(histogram: &Histogram, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(histogram.counts())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Histogram, D::Error> {
        let mut histogram = Histogram::new();
        for (value, times) in Vec::<(u64, u64)>::deserialize(from)? {
            histogram.record_n(value, times);
        }
        Ok(histogram)
    }
}

/// What a measurement is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The benchmark itself.
    Main,
    /// Another way to do the same, for comparison.
    Beside,
    /// The round trip of one cache line.
    CacheLine,
    /// Plain code for an operation of a device.
    PlainDevice,
    /// Plain code for an RPC, with one ring or with two.
    InPlace,
    TwoRings,
    Memcpy,
}

/// Something that is measured in turns with others. Every rank has the same contenders in the same order.
pub(crate) struct Contender<'a> {
    pub(crate) role: Role,
    pub(crate) exchange: Box<dyn Exchange + 'a>,
}

impl<'a> Contender<'a> {
    pub(crate) fn new(role: Role, exchange: impl Exchange + 'a) -> Contender<'a> {
        Contender { role, exchange: Box::new(exchange) }
    }
}

/// Runs all slices of one rank. The leading rank returns the result.
fn run_rank<'a>(benchmark: &'a dyn Benchmark, mut rank: Rank<'a>) -> Result<Option<Summary>, Error> {
    let job = benchmark.job();
    let mut contenders = benchmark.open(&mut rank)?;
    rank.pin()?;
    if let Some(region) = rank.region {
        contenders.extend(benchmark.limits(&rank, region));
    }
    let collective = &mut rank.collective;
    let mut slices: Vec<Vec<Throughput>> = contenders.iter().map(|_| Vec::new()).collect();
    let (count, slice) = job.common.duration.slices();
    let mut progress = Progress::new(&job.what, u64::from(count), collective.is_leader());
    for at in 0..=count {
        if at == 1 {
            // The first slice was the warm-up. All ranks forget it before any of them begins the next one.
            slices.iter_mut().for_each(Vec::clear);
            contenders.iter_mut().for_each(|contender| contender.exchange.reset());
            collective.agree(Ok(()))?;
        }
        for (Contender { role, exchange }, slices) in contenders.iter_mut().zip(&mut slices) {
            let is_limit = !matches!(role, Role::Main | Role::Beside);
            let outcome = exchange.run_slice(if is_limit { slice / LIMIT_SHARE } else { slice });
            let total = collective.total(outcome)?;
            exchange.slice_done(total);
            slices.push(total);
        }
        progress.show(u64::from(at));
    }
    drop(progress);

    let own: Vec<Counts> = contenders.iter().map(|contender| contender.exchange.counts()).collect();
    let mut counts: Vec<Counts> = contenders.iter().map(|_| Counts::default()).collect();
    for of_rank in collective.gather_values(Ok(own))? {
        counts.iter_mut().zip(of_rank).for_each(|(sum, counts)| sum.add(counts));
    }
    if !collective.is_leader() {
        return Ok(None);
    }
    let roles = contenders.iter().map(|contender| contender.role);
    let outcomes = roles.zip(slices).zip(counts);
    let mut measured = Measured {
        processes: rank.processes,
        cores: rank.cores,
        outcomes: outcomes.map(|((role, slices), counts)| Outcome { role, slices, counts }).collect(),
    };
    let report = benchmark.report(&mut measured);
    Ok(Some(Summary::new(job, report, &measured)))
}

/// What was measured, all ranks together.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) processes: bool,
    pub(crate) cores: Option<Vec<usize>>,
    /// The first one is that of the benchmark itself.
    pub(crate) outcomes: Vec<Outcome>,
}

/// What was measured of one contender.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) role: Role,
    pub(crate) slices: Vec<Throughput>,
    pub(crate) counts: Counts,
}

impl Measured {
    /// Operations per second: the median over the slices, and the best of several contenders with this role.
    pub(crate) fn rate(&self, role: Role) -> Option<f64> {
        let of_slices = |outcome: &Outcome| median(outcome.slices.iter().map(Throughput::per_second));
        self.with_role(role).filter_map(of_slices).reduce(f64::max)
    }

    /// Median of the latency of one operation in nanoseconds.
    pub(crate) fn median_latency(&self, role: Role) -> Option<u64> {
        self.with_role(role).find_map(|outcome| outcome.counts.latency.quantile(0.5))
    }

    /// The counts of the benchmark itself.
    pub(crate) fn counts(&mut self) -> &mut Counts {
        &mut self.outcomes[0].counts
    }

    fn with_role(&self, role: Role) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(move |outcome| outcome.role == role)
    }
}
