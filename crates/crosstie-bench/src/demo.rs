//! `crosstie demo`: what each part of Crosstie does, and how fast it is on this machine, on one screen and as an HTML page.
//!
//! Each line of the table is a benchmark of its own, which runs as a process: `crosstie bench … --json`. The page shows the command
//! of each line, so that a reader can repeat it with other options. A part that fails is named, and the others are shown.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::Error;
use crate::figures::{self, Figures};
use crate::kv;
use crate::progress::Progress;
use crate::units::{scaled, time, whole};
use crate::{output, report, table};

/// The files of the demo have this name plus `.json` and `.html`, in the current directory.
const NAME: &str = "crosstie-report";
/// Seconds of measuring, unless `--duration` says otherwise; starting processes comes on top.
const USUAL_DURATION: f64 = 12.0;
/// How much longer than measuring a part takes.
const OVERHEAD: f64 = 1.8;
/// How long one benchmark may take: far more than any takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often the progress bar moves.
const TICK: Duration = Duration::from_millis(100);

/// One benchmark of the demo.
struct Part {
    name: &'static str,
    what: &'static str,
    /// Its command line, after `crosstie bench`; see [`Part::command`].
    command: &'static str,
    /// Its part of the whole time.
    weight: f64,
    /// The lines that its JSON gives.
    read: fn(&Value) -> Option<Vec<Line>>,
}

impl Part {
    /// The command line, for a demo that measures for `duration` seconds in all.
    fn command(&self, duration: f64) -> String {
        let share = |seconds: f64| format!("{:.2}", seconds * duration / USUAL_DURATION);
        let count = (2000.0 * duration / USUAL_DURATION).max(100.0) as u64;
        let words = self.command.replace("{seconds}", &share(0.8)).replace("{long}", &share(3.0));
        words.replace("{count}", &count.to_string())
    }
}

/// What the table says of one measurement.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line {
    /// What differs from the part's other lines.
    pub(crate) detail: String,
    /// The median of one operation, in nanoseconds.
    pub(crate) median_ns: u64,
    pub(crate) rate: String,
    /// What the rate or the time is compared with, or what was checked.
    pub(crate) compared: String,
    /// Its share of the rate of plain code, if that was measured.
    pub(crate) share: Option<f64>,
}

/// The lines of one part, for the report.
pub(crate) struct Measured {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) command: String,
    pub(crate) lines: Vec<Line>,
}

const PARTS: &[Part] = &[
    Part {
        name: "ipc",
        what: "call between two processes, one at a time",
        command: "ipc --processes --queue-depth 1 --duration {seconds}",
        weight: 2.0,
        read: beside_plain_code,
    },
    Part {
        name: "ipc",
        what: "32 calls in flight",
        command: "ipc --processes --queue-depth 32 --duration {seconds}",
        weight: 2.0,
        read: beside_plain_code,
    },
    Part {
        name: "copyrpc",
        what: "call by RDMA writes, one at a time",
        command: "copyrpc --processes --queue-depth 1 --duration {seconds}",
        weight: 2.0,
        read: beside_plain_code,
    },
    Part {
        name: "copyrpc",
        what: "256 calls in flight",
        command: "copyrpc --processes --queue-depth 256 --duration {seconds}",
        weight: 2.0,
        read: beside_plain_code,
    },
    Part {
        name: "endpoint",
        what: "write of a block of 64 KiB into a peer's memory",
        command: "endpoint --op write --payload 65536 --processes --duration {seconds}",
        weight: 1.5,
        read: beside_memcpy,
    },
    Part {
        name: "rails",
        what: "messages of 1 MiB over two devices; one fails half-way",
        command: "rails --payload 1048576 --count {count} --kill-rail 1 --at 0.5",
        weight: 1.5,
        read: with_a_failed_rail,
    },
    Part {
        name: "group",
        what: "lock that two processes take in turn",
        command: "lock --members 2 --duration {seconds}",
        weight: 2.0,
        read: in_cache_lines,
    },
    Part {
        name: "group",
        what: "barrier of two processes",
        command: "barrier --members 2 --duration {seconds}",
        weight: 2.0,
        read: in_cache_lines,
    },
    Part {
        name: "store",
        what: "get and put of 8 bytes, two store nodes",
        command: "kv --backend meta,delegation --nodes 2 --clients 2 --queue-depth 16 --runs 3 --duration {long}",
        weight: 6.0,
        read: of_both_backends,
    },
];

/// Show what each part does and how fast it is on this machine, in under 30 seconds; writes an HTML report.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Seconds of measuring, all parts together.
    #[arg(long, value_name = "S", default_value_t = USUAL_DURATION)]
    duration: f64,
    /// Write the figures to NAME.json and the report to NAME.html.
    #[arg(short, long, value_name = "NAME", default_value = NAME)]
    output: PathBuf,
}

/// Runs the demo. Setting `interrupt` ends it early.
pub fn run(arguments: &Arguments, interrupt: &AtomicBool) -> Result<(), Error> {
    let duration = arguments.duration;
    if !(0.1..=3600.0).contains(&duration) {
        return Err(Error::Usage(format!("--duration {duration}: give 0.1 to 3600 seconds")));
    }
    let name = &arguments.output;
    let (data, page) = (output::output_path(name, "json"), output::output_path(name, "html"));
    output::check_writable(&data)?;
    output::check_writable(&page)?;
    output::print(&introduction())?;

    let total: f64 = PARTS.iter().map(|part| part.weight).sum();
    let each_second = total / (duration * OVERHEAD);
    let mut bar = Progress::new("measuring", (total * 100.0) as u64, true);
    let mut before = 0.0;
    let (mut measured, mut results, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for part in PARTS {
        let words = part.command(duration);
        let progress = |seconds: f64| {
            bar.show(((before + (seconds * each_second).min(part.weight)) * 100.0) as u64);
        };
        let found = run_part(&words, interrupt, progress);
        before += part.weight;
        let command = format!("crosstie bench {words}");
        match found {
            Ok(json) => match (part.read)(&json) {
                Some(lines) => {
                    measured.push(Measured { name: part.name, what: part.what, command, lines });
                    results.push(json);
                }
                None => failures.push(format!("{command}: its figures are not complete")),
            },
            Err(_) if interrupt.load(Relaxed) => break,
            Err(problem) => failures.push(format!("{command}: {problem}")),
        }
    }
    drop(bar);
    output::print(&text(&measured))?;
    let store: Vec<Figures> = results
        .iter()
        .filter_map(|json| figures::parse(json.to_string().as_bytes()).ok())
        .flatten()
        .collect();
    output::write_file(&data, &output::json(&results)?)?;
    report::write_demo(&measured, &store, &page)?;
    output::print(&format!("\nreport: {}\nfigures: {}\n", page.display(), data.display()))?;
    match failures.as_slice() {
        [] if interrupt.load(Relaxed) => Err(Error::Interrupted),
        [] => Ok(()),
        failed => Err(Error::Parts(failed.join("; "))),
    }
}

/// Runs the benchmark as a process and returns its JSON, or why there is none.
fn run_part(words: &str, interrupt: &AtomicBool, mut progress: impl FnMut(f64)) -> Result<Value, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.arg("bench").args(words.split(' ')).arg("--json");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let errors = scope.spawn(move || read_all(&mut stderr));
        let text = scope.spawn(move || read_all(&mut stdout));
        let began = Instant::now();
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Ok(status),
                Err(error) => break Err(error.to_string()),
                Ok(None) => {}
            }
            if interrupt.load(Relaxed) || began.elapsed() > TIMEOUT {
                // It may have ended meanwhile; waiting tells.
                child.kill().ok();
            }
            progress(began.elapsed().as_secs_f64());
            thread::sleep(TICK);
        };
        let (text, errors) = (text.join().unwrap_or_default(), errors.join().unwrap_or_default());
        if !status?.success() {
            return Err(errors
                .lines()
                .last()
                .unwrap_or("it was killed")
                .trim_start_matches("crosstie: ")
                .to_owned());
        }
        serde_json::from_str(&text).map_err(|error| error.to_string())
    })
}

fn read_all(pipe: &mut Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // What was read before an error is shown.
        pipe.read_to_end(&mut bytes).ok();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn introduction() -> String {
    format!(
        "Crosstie {} on {}, software device (shared memory; no RDMA NIC is used). It takes about 25 seconds.\n\n",
        env!("CARGO_PKG_VERSION"),
        kv::machine_description()
    )
}

/// The heads of [`rows`].
pub(crate) const HEADS: [&str; 5] = ["part", "what was measured", "median", "rate", "compared with"];

/// The table, a row for each line.
pub(crate) fn rows(measured: &[Measured]) -> Vec<[String; 5]> {
    let lines = measured.iter().flat_map(|part| part.lines.iter().map(move |line| (part, line)));
    let row = |(part, line): (&Measured, &Line)| {
        let what = match line.detail.as_str() {
            "" => part.what.to_owned(),
            detail => format!("{}, {detail}", part.what),
        };
        [part.name.to_owned(), what, time(line.median_ns), line.rate.clone(), line.compared.clone()]
    };
    lines.map(row).collect()
}

/// The table for a terminal.
fn text(measured: &[Measured]) -> String {
    let rows = [vec![HEADS.map(str::to_owned)], rows(measured)].concat();
    format!("{}\n{EXPLANATION}\n", table::left(&rows))
}

/// What the words of the table mean.
pub(crate) const EXPLANATION: &str = "\
plain code: minimal code for the same exchange at the same depth on the same cores, without checks or features, in the same run
cache line: the time of one round trip of a cache line between the two cores
endpoint, rails, group and store use the same device interface with an RDMA NIC: crosstie bench NAME --device verbs:NAME";

/// RPC: beside plain code.
fn beside_plain_code(json: &Value) -> Option<Vec<Line>> {
    let share = json["ratio_to_limit"].as_f64()?;
    let compared = format!("{share:.2} x plain code ({}/s)", scaled(json["limit_ops_per_s"].as_f64()?));
    Some(vec![Line { compared, share: Some(share), ..per_second(json)? }])
}

/// Bytes: beside memcpy.
fn beside_memcpy(json: &Value) -> Option<Vec<Line>> {
    let [rate, memcpy] = [json["bytes_per_s"].as_f64()?, json["limit_bytes_per_s"].as_f64()?];
    let share = json["bytes_to_limit"].as_f64()?;
    let compared = format!("{share:.2} x memcpy ({}B/s)", scaled(memcpy));
    Some(vec![Line {
        rate: format!("{}B/s", scaled(rate)),
        compared,
        share: Some(share),
        ..per_second(json)?
    }])
}

/// Messages while a rail fails: whether all arrived, and what it cost.
fn with_a_failed_rail(json: &Value) -> Option<Vec<Line>> {
    let counters = &json["counters"];
    let [messages, replays] = [counters["messages"].as_u64()?, counters["replays"].as_u64()?];
    let compared = format!(
        "all {} arrived once, {} parts sent again; longest pause {}",
        whole(messages),
        whole(replays),
        time(json["longest_pause_ns"].as_u64()?)
    );
    let rate = format!("{}B/s", scaled(json["bytes_per_s"].as_f64()?));
    Some(vec![Line { rate, compared, ..per_second(json)? }])
}

/// Locks and barriers: beside the round trip of a cache line.
fn in_cache_lines(json: &Value) -> Option<Vec<Line>> {
    let line = per_second(json)?;
    let cache_line = json["limit_ns"].as_f64().filter(|ns| *ns > 0.0)?;
    let compared = format!("{:.1} x a cache line ({cache_line:.0} ns)", line.median_ns as f64 / cache_line);
    Some(vec![Line { compared, ..line }])
}

/// The store: a line for each backend.
fn of_both_backends(json: &Value) -> Option<Vec<Line>> {
    let line = |figures: &Value| {
        let [batches, messages] =
            ["batches", "messages"].map(|name| figures["counters"][name].as_u64().unwrap_or(0));
        let compared = match batches {
            0 => String::new(),
            _ => format!("{:.1} messages in each RDMA write", messages as f64 / batches as f64),
        };
        let detail = format!("backend {}", figures["backend"].as_str()?);
        Some(Line { detail, compared, ..per_second(figures)? })
    };
    json.as_array()?.iter().map(line).collect()
}

fn per_second(json: &Value) -> Option<Line> {
    let rate = format!("{}/s", scaled(json["ops_per_s"].as_f64()?));
    Some(Line { median_ns: json["p50_ns"].as_u64()?, rate, ..Line::default() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn table_says_what_is_compared() {
        let plain =
            json!({"p50_ns": 371, "ops_per_s": 2.7e6, "limit_ops_per_s": 2.86e6, "ratio_to_limit": 0.944});
        let lines = beside_plain_code(&plain).unwrap();
        let measured = [Measured { name: "ipc", what: "call", command: String::new(), lines }];
        let text = text(&measured);
        assert!(
            text.contains("ipc   call               371 ns  2.70 M/s  0.94 x plain code (2.86 M/s)"),
            "{text}"
        );
    }

    #[test]
    fn incomplete_figures_are_no_lines() {
        for part in PARTS {
            assert!((part.read)(&json!({"p50_ns": 1})).is_none(), "{}", part.command);
        }
    }

    #[test]
    fn both_backends_have_lines() {
        let one = |backend| json!({"backend": backend, "p50_ns": 1, "ops_per_s": 2.0, "counters": {"batches": 2, "messages": 9}});
        let lines = of_both_backends(&json!([one("meta"), one("delegation")])).unwrap();
        assert_eq!(
            lines.iter().map(|line| line.detail.as_str()).collect::<Vec<_>>(),
            ["backend meta", "backend delegation"]
        );
        assert_eq!(lines[0].compared, "4.5 messages in each RDMA write");
    }
}
