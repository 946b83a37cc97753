//! `crosstie bench kv`: launches the ranks, prints the results and writes the report.
//!
//! This process starts the other ranks, or a launcher (mpirun, or a rendezvous) has started all of them. Rank 0 prints. [`crate::kv`]
//! does the measuring.

mod arguments;
mod repeat;
mod sweep;

use std::io::{stdin, stdout};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::figures::Figures;
use crate::kv::{self as bench, Outcome};
use crosstie::bootstrap::{self, Bootstrap, local};

use crate::cores;
use crate::error::Error;
use crate::limits::CacheLinePingPong;
use crate::output::{self, output_path};
use crate::progress::Progress;
use crate::report;
use crate::runner::{Exchange, Part};
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;

pub use arguments::Arguments;

/// Environment variable of a rank that rank 0 has started.
pub(crate) const CHILD: &str = "CROSSTIE_LOCAL_RANK";
/// Environment variable with the address of the rendezvous.
const RENDEZVOUS: &str = "CROSSTIE_RENDEZVOUS";
/// Steps of the progress bar.
const STEPS: u64 = 1000;
/// How long to measure the round trip of a cache line.
const CACHE_LINE_TIME: Duration = Duration::from_millis(30);

/// `crosstie bench kv`. Setting `interrupt` ends it early.
pub fn run(arguments: &Arguments, interrupt: &AtomicBool) -> Result<(), Error> {
    let combinations = match &arguments.plan {
        Some(path) => sweep::read(path, arguments)?,
        None => vec![arguments.clone()],
    };
    // Results of a plan are written to files, unless they are printed as JSON.
    let stem = arguments.plan.as_deref().and_then(Path::file_stem).map(PathBuf::from);
    let name = arguments.output.clone().or(stem.filter(|_| !arguments.json));
    let found = measure(&combinations, name.as_deref(), interrupt)?;
    print_and_save(
        found,
        arguments.json,
        combinations.len() > 1 || arguments.backend.len() > 1,
        name.as_deref(),
    )
}

/// `crosstie bench kv-client`: one client of `bench kv --processes`.
pub fn client() -> Result<(), Error> {
    bench::run_client_process(stdin().lock(), stdout())
        .map_err(|source| Error::Os { what: "reading the commands of the client pool", source })
}

/// What was measured, and the error that ended it early.
struct Results {
    results: Vec<Figures>,
    error: Option<Error>,
    is_leader: bool,
}

/// Measures all combinations, one after the other, until one fails or `interrupt` is set. `name` is where the results will be saved.
fn measure(
    combinations: &[Arguments],
    name: Option<&Path>,
    interrupt: &AtomicBool,
) -> Result<Results, Error> {
    for arguments in combinations {
        arguments.plan("")?.validate(arguments.nodes.unwrap_or(1))?;
    }
    // Ranks that a launcher has started measure all combinations; otherwise each combination starts its own ranks.
    let mut job = bootstrap::from_env()?;
    // Finds out now, and not after an hour, that a file cannot be written.
    if let Some(name) = name.filter(|_| job.rank() == 0) {
        ["json", "html"].iter().try_for_each(|ending| output::check_writable(&output_path(name, ending)))?;
    }
    let mut found = Results { results: Vec::new(), error: None, is_leader: job.rank() == 0 };
    let count = combinations.len();
    for (at, arguments) in combinations.iter().enumerate() {
        let what = if count == 1 { "kv".to_owned() } else { format!("kv {}/{count}", at + 1) };
        let outcome = match job.size() {
            1 => launch_locally(arguments, interrupt, &what),
            _ => {
                let mut bar = Progress::new(&what, STEPS, job.rank() == 0);
                bar.show(0);
                let progress = |share: f64| bar.show((share * STEPS as f64) as u64);
                run_as_rank(job.as_mut(), launcher(), arguments, interrupt, progress)
            }
        };
        match outcome {
            Ok(outcome) => {
                found.results.extend(outcome.figures);
                found.error = outcome.error;
            }
            // A rank that was interrupted before it was ready is missing for the others: report the interruption, not that.
            Err(_) if interrupt.load(Relaxed) => {
                found.error = Some(Error::Interrupted);
            }
            // Keeps the results of earlier combinations.
            Err(error) => found.error = Some(error),
        }
        if found.error.is_some() {
            return Ok(found);
        }
        if found.results.iter().any(|figures| figures.interrupted) {
            break;
        }
    }
    job.finish()?;
    Ok(found)
}

/// Name of the launcher of this rank.
fn launcher() -> &'static str {
    match () {
        () if std::env::var_os(CHILD).is_some() => "local",
        () if std::env::var_os(RENDEZVOUS).is_some() => "tcp",
        () => "mpi",
    }
}

/// Starts the other ranks as processes and runs as rank 0.
fn launch_locally(arguments: &Arguments, interrupt: &AtomicBool, what: &str) -> Result<Outcome, Error> {
    let round_trip = cache_line_round_trip()?;
    let mut bar = Progress::new(what, STEPS, true);
    bar.show(0);
    let mut outcome = if arguments.check {
        // One history, of one cluster.
        launch_once(arguments, interrupt, |share| bar.show((share * STEPS as f64) as u64))?
    } else {
        repeat::run_independently(arguments, interrupt, |run, one| {
            let done = |share: f64| (f64::from(run) + share) / f64::from(arguments.runs);
            launch_once(one, interrupt, |share| bar.show((done(share) * STEPS as f64) as u64))
        })?
    };
    outcome.figures.iter_mut().for_each(|figures| figures.limit_ns = round_trip);
    Ok(outcome)
}

/// Starts the other ranks, runs as rank 0, and ends them.
fn launch_once(
    arguments: &Arguments,
    interrupt: &AtomicBool,
    progress: impl FnMut(f64),
) -> Result<Outcome, Error> {
    match arguments.nodes.unwrap_or(1) {
        1 => run_as_rank(&mut bootstrap::SingleRank::default(), "local", arguments, interrupt, progress),
        nodes => {
            let mut job = local::JobBuilder::new(nodes).arguments(arguments.to_args()?).start()?;
            let outcome = run_as_rank(&mut job, "local", arguments, interrupt, progress)?;
            if outcome.error.is_none() {
                job.finish()?;
            }
            Ok(outcome)
        }
    }
}

fn run_as_rank(
    job: &mut dyn Bootstrap,
    launcher: &str,
    arguments: &Arguments,
    interrupt: &AtomicBool,
    progress: impl FnMut(f64),
) -> Result<Outcome, Error> {
    if let Some(nodes) = arguments.nodes
        && nodes != job.size()
    {
        let size = job.size();
        return Err(Error::Usage(format!("--nodes {nodes}, but this job has {size} ranks: leave it out")));
    }
    let plan = arguments.plan(launcher)?;
    bench::run(job, &plan, interrupt, progress)
}

/// Prints the results and saves them under `name`, on the leading rank. With `several` the JSON is an array, even of one result.
fn print_and_save(found: Results, as_json: bool, several: bool, name: Option<&Path>) -> Result<(), Error> {
    let Results { results, error, is_leader } = found;
    if is_leader && !results.is_empty() {
        let json = match results.as_slice() {
            [one] if !several => output::json(one)?,
            all => output::json(&all)?,
        };
        if as_json {
            output::print(&json)?;
        } else {
            output::print(&text(&results))?;
        }
        if let Some(name) = name {
            let (data, page) = (output_path(name, "json"), output_path(name, "html"));
            output::write_file(&data, &json)?;
            report::write(&results, &page)?;
            let written = format!("\nreport: {}\nfigures: {}\n", page.display(), data.display());
            if as_json { eprint!("{written}") } else { output::print(&written)? }
        }
    }
    if let Some(error) = error {
        return Err(error);
    }
    let errors = results.iter().map(|figures| figures.errors).sum();
    if errors > 0 { Err(Error::WrongData(errors)) } else { Ok(()) }
}

/// The results as text.
fn text(results: &[Figures]) -> String {
    let mut text = report::table(results);
    if let [first, ..] = results {
        let size = |figures: &Figures| {
            (figures.nodes, figures.daemons, figures.clients, figures.client_threads, figures.cores.clone())
        };
        let all_alike = results.iter().all(|figures| size(figures) == size(first));
        let [daemons, clients, threads] =
            [first.daemons, first.clients, first.client_threads.unwrap_or(first.clients)]
                .map(|each| first.nodes * each);
        let clients = match threads {
            threads if threads == clients => format!("{clients} clients"),
            1 => format!("{clients} clients on one thread"),
            threads => format!("{clients} clients on {threads} threads"),
        };
        let cores = match first.cores.as_str() {
            // The report has the cores of each result.
            _ if !all_alike => first.machine.clone(),
            "" => format!("threads are not pinned: {daemons} daemons and {clients}; {}", first.machine),
            cores => format!("cores: {cores}"),
        };
        let round_trip = first
            .limit_ns
            .map_or_else(String::new, |ns| format!("; round trip of one cache line: {ns:.0} ns"));
        text += &format!("\n{cores}{round_trip}\n");
        let all = results.iter().flat_map(|figures| &figures.per_rank);
        let most = all.max_by_key(|rank| rank.memory_bytes);
        if let Some((rank, bound)) = most.and_then(|rank| Some((rank, rank.memory_bound_bytes?))) {
            let [used, bound] = [rank.memory_bytes, bound].map(crate::units::bytes);
            text += &format!("memory of a node: {used} used, limit {bound}\n");
        }
        if let Some(limit) = first.limit_ops_per_s.filter(|_| results.len() == 1) {
            text += &format!(
                "limit: {:.1} M op/s, minimal code for the same requests on the same cores in the same run\n",
                limit / 1e6
            );
        }
    }
    let checked: Vec<u64> =
        results.iter().filter_map(|figures| figures.counters.get("checked_operations").copied()).collect();
    if !checked.is_empty() {
        text += &format!("linearizability check passed: {} operations\n", checked.iter().sum::<u64>());
    }
    if results.iter().any(|figures| figures.interrupted) {
        text += "interrupted: the figures cover the time until then\n";
    }
    text
}

/// Round trip of one cache line between two cores, in nanoseconds; `None` on a machine with one core.
fn cache_line_round_trip() -> Result<Option<f64>, Error> {
    let Some([first, second]) = cores::pair()? else { return Ok(None) };
    let region = SharedRegion::create(4096)?;
    let end = |part, core| {
        cores::pin_thread(core)?;
        let mut end = CacheLinePingPong::new(&region, part, SpinWait::new(true));
        end.run_slice(CACHE_LINE_TIME)?;
        Ok(end.counts().latency.quantile(0.5))
    };
    let median = std::thread::scope(|scope| {
        let follower = cores::spawn(scope, || end(Part::Follow, second))?;
        let led = cores::on_own_thread(|| end(Part::Lead, first));
        let followed = follower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        led.and_then(|median| followed.map(|_| median))
    })?;
    Ok(median.map(|ns| (CacheLinePingPong::one_round_trip(ns) * 10.0).round() / 10.0))
}
