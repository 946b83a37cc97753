//! `crosstie sim`: simulates groups, copyrpc's flow control and rails that fail, with many members, and checks every run.

use std::path::PathBuf;

use clap::ValueEnum;
use crosstie_bench::output;
use crosstie_sim::{Jitter, Outcome, Plan, ScalingPoint, Scenario};
use serde::Serialize;

use crate::error::Error;

/// What to simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Members compete for locks.
    Lock,
    /// Members wait for each other in barriers.
    Barrier,
    /// Members send messages to each other; receivers are slow.
    Message,
    /// A server and many clients call each other over copyrpc connections with small rings.
    Credits,
    /// Connections over three rails, which fail and return; with --restless some return only after hours of virtual time.
    Rails,
    /// All of them.
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum JitterKind {
    /// Every packet takes the same time.
    None,
    /// 0.5 to 1.5 times the latency.
    Uniform,
    /// A long tail.
    Exponential,
}

/// Simulate groups, copyrpc's flow control and rails with many members under virtual time, and check every run.
///
/// The same seed repeats a run exactly. The exit status is 1 if a check failed; the failures are listed with their seeds.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// What to simulate.
    #[arg(value_enum, default_value = "all")]
    scenario: Which,
    /// Members of the group, 2 to 1024.
    #[arg(long, default_value_t = 16)]
    members: usize,
    /// Operations of each member: acquisitions, rounds, messages, calls.
    #[arg(long, default_value_t = 50)]
    operations: u64,
    /// Locks that the members compete for.
    #[arg(long, default_value_t = 1)]
    locks: usize,
    /// Children of a member in the barrier's tree.
    #[arg(long, default_value_t = 2)]
    fanout: usize,
    /// Mean latency of a packet, in virtual nanoseconds.
    #[arg(long, default_value_t = 2000, value_name = "NS")]
    latency_ns: u64,
    /// How latencies vary.
    #[arg(long, value_enum, default_value = "exponential")]
    jitter: JitterKind,
    /// The share of packets that are lost, 0 to 0.5.
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// The share of packets that arrive twice, 0 to 0.5.
    #[arg(long, default_value_t = 0.0)]
    duplicates: f64,
    /// Members that die at random instants.
    #[arg(long, default_value_t = 0)]
    deaths: usize,
    /// Cut a minority of the members off.
    #[arg(long)]
    partition: bool,
    /// A death is told to one survivor only, and deaths follow each other at once. Locks and barriers.
    #[arg(long)]
    unkind: bool,
    /// Members that pause for longer than every time limit, and go on. Locks and barriers.
    #[arg(long, default_value_t = 0)]
    pauses: usize,
    /// Members that pause and that another member expels meanwhile. Locks and barriers.
    #[arg(long, default_value_t = 0)]
    expulsions: usize,
    /// Members also time out, try locks, join and leave barriers.
    #[arg(long)]
    restless: bool,
    /// Messages: a refused sender sends again after a back-off time, instead of waiting for the receiver's request.
    #[arg(long)]
    blind_retry: bool,
    /// Messages: after a loss, everything behind it is sent again, instead of what is missing.
    #[arg(long)]
    go_back: bool,
    /// Messages: a receiver acknowledges at the latest after this many packets.
    #[arg(long, default_value_t = 4, value_name = "N")]
    ack_every: u32,
    /// Messages: small ones travel together while at least this many packets to their member are not acknowledged. 16: never.
    #[arg(long, default_value_t = 8, value_name = "N")]
    combine_from: u32,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds: one run for each.
    #[arg(long, default_value_t = 10)]
    seeds: u64,
    /// Instead: draw the cost of barriers and locks with 2 to 1024 members.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Results {
    sim: Vec<Outcome>,
    failed_runs: usize,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let usage = |text: &str| Err(Error::Usage(text.to_owned()));
    if arguments.seeds == 0 {
        return usage("--seeds must be 1 or more");
    }
    let Some(last_seed) = arguments.seed.checked_add(arguments.seeds - 1) else {
        return usage("--seed plus --seeds must be below 2^64");
    };
    if let Some(path) = &arguments.plot {
        let svg = crosstie_sim::scaling_plot(&scaling(arguments)?);
        return Ok(output::write_file(path, &svg)?);
    }
    let scenarios: Vec<Scenario> = match arguments.scenario {
        Which::Lock => vec![Scenario::Lock],
        Which::Barrier => vec![Scenario::Barrier],
        Which::Message => vec![Scenario::Message],
        Which::Credits => vec![Scenario::Credits],
        Which::Rails => vec![Scenario::Rails],
        // Deaths and partitions do not apply to a connection of two, and pauses to messages.
        Which::All => Scenario::ALL
            .into_iter()
            .filter(|scenario| scenario.has_deaths() || (arguments.deaths == 0 && !arguments.partition))
            .filter(|scenario| scenario.has_membership() || !is_unkind(arguments))
            .collect(),
    };
    let mut results = Results { sim: Vec::new(), failed_runs: 0 };
    for scenario in scenarios {
        for seed in arguments.seed..=last_seed {
            let outcome = simulate(&Plan { seed, ..plan(arguments, scenario) })?;
            results.failed_runs += usize::from(!outcome.failures.is_empty());
            results.sim.push(outcome);
        }
    }
    crate::print(&if arguments.json { crate::json(&results)? } else { table(&results.sim) })?;
    match results.failed_runs {
        0 => Ok(()),
        failed => Err(Error::SimulationFailed(failed)),
    }
}

/// Whether the members of a group meet more than deaths that all are told.
fn is_unkind(arguments: &Arguments) -> bool {
    arguments.unkind || arguments.pauses > 0 || arguments.expulsions > 0
}

fn plan(arguments: &Arguments, scenario: Scenario) -> Plan {
    Plan {
        scenario,
        members: arguments.members,
        operations: arguments.operations,
        locks: arguments.locks,
        fanout: arguments.fanout,
        latency_ns: arguments.latency_ns,
        jitter: match arguments.jitter {
            JitterKind::None => Jitter::None,
            JitterKind::Uniform => Jitter::Uniform,
            JitterKind::Exponential => Jitter::Exponential,
        },
        loss: arguments.loss,
        duplicates: arguments.duplicates,
        deaths: arguments.deaths,
        partition: arguments.partition,
        unkind: arguments.unkind,
        pauses: arguments.pauses,
        expulsions: arguments.expulsions,
        restless: arguments.restless,
        blind_retry: arguments.blind_retry,
        go_back: arguments.go_back,
        ack_every: arguments.ack_every,
        combine_from: arguments.combine_from,
        seed: arguments.seed,
    }
}

fn simulate(plan: &Plan) -> Result<Outcome, Error> {
    crosstie_sim::run(plan).map_err(|error| Error::Usage(format!("--{error}")))
}

/// Barrier and lock cost for each size, with a fixed latency.
fn scaling(arguments: &Arguments) -> Result<Vec<ScalingPoint>, Error> {
    let sizes = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
    let point = |members| {
        let base = Plan { members, jitter: Jitter::None, ..plan(arguments, Scenario::Barrier) };
        let operations = 10;
        let binary = simulate(&Plan { fanout: 2, operations, ..base })?;
        let wide = simulate(&Plan { fanout: 8, operations, ..base })?;
        let lock = simulate(&Plan { scenario: Scenario::Lock, operations, ..base })?;
        let latencies = |outcome: &Outcome| outcome.p50_ns as f64 / arguments.latency_ns as f64;
        Ok(ScalingPoint {
            members,
            barrier_binary: latencies(&binary),
            barrier_wide: latencies(&wide),
            lock_messages: lock.packets_per_operation,
            barrier_messages: binary.packets_per_operation / members as f64,
        })
    };
    sizes.into_iter().map(point).collect()
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text = format!(
        "{:<10}{:>8}{:>7}{:>12}{:>9}{:>12}{:>12}{:>11}  {}\n",
        "scenario", "members", "seeds", "operations", "errors", "p50 us", "p99 us", "packets/op", "checks"
    );
    for scenario in Scenario::ALL {
        let runs: Vec<&Outcome> = outcomes.iter().filter(|run| run.scenario == scenario.name()).collect();
        let Some(first) = runs.first() else { continue };
        let operations: u64 = runs.iter().map(|run| run.operations).sum();
        let packets: u64 = runs.iter().flat_map(|run| run.packets.values()).sum();
        let sum = |count: fn(&Outcome) -> u64| runs.iter().map(|run| count(run)).sum::<u64>();
        let failed = runs.iter().filter(|run| !run.failures.is_empty()).count();
        let median = |time: fn(&Outcome) -> u64| {
            let mut times: Vec<u64> = runs.iter().map(|run| time(run)).collect();
            times.sort_unstable();
            times[times.len() / 2] as f64 / 1e3
        };
        text += &format!(
            "{:<10}{:>8}{:>7}{operations:>12}{:>9}{:>12.2}{:>12.2}{:>11.2}  {}\n",
            first.scenario,
            first.members,
            runs.len(),
            runs.iter().map(|run| run.ended_with_error).sum::<u64>(),
            median(|run| run.p50_ns),
            median(|run| run.p99_ns),
            packets as f64 / operations.max(1) as f64,
            if failed == 0 { "passed".to_string() } else { format!("{failed} runs FAILED") },
        );
        if scenario == Scenario::Message {
            let (lost, resent) = (sum(|run| run.lost), sum(|run| run.resent));
            text += &format!("{:<10}{packets} packets sent, {lost} lost; {resent} data packets resent\n", "");
        }
    }
    for run in outcomes.iter().filter(|run| !run.failures.is_empty()) {
        text += &format!("\n{} with --seed {}:\n", run.scenario, run.seed);
        for failure in &run.failures {
            text += &format!("  {failure}\n");
        }
    }
    text
}
