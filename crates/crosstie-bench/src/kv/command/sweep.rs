//! Sweep plans: a TOML file that lists what to measure. Each key is an option of the command line, with one value or a list; the
//! benchmark measures all combinations.
//!
//! ```toml
//! backend = ["meta", "delegation"]
//! nodes = [1, 2, 4]
//! queue-depth = [1, 4, 16]
//! duration = 1.0
//! ```

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crosstie_kv::Backend;
use serde::Deserialize;

use super::arguments::Arguments;
use crate::error::Error;

/// Longest plan in bytes.
const MAX_PLAN: u64 = 1 << 20;
/// Most combinations of a plan.
const MAX_COMBINATIONS: usize = 1024;

/// One value of an option, or a list of them.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "this is neither a value of this option nor a list of values: see `crosstie bench kv --help`"
)]
enum Choice<T> {
    One(T),
    Several(Vec<T>),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Sweep {
    backend: Option<Choice<Backend>>,
    nodes: Option<Choice<u32>>,
    daemons: Option<Choice<u32>>,
    clients: Option<Choice<u32>>,
    queue_depth: Option<Choice<u32>>,
    read_ratio: Option<Choice<f64>>,
    keys: Option<Choice<u64>>,
    zipf: Option<Choice<f64>>,
    runs: Option<Choice<u32>>,
    duration: Option<Choice<f64>>,
    // Plans may use the former name.
    #[serde(alias = "value-size")]
    payload: Option<Choice<usize>>,
    local_share: Option<Choice<f64>>,
    open: Option<Choice<f64>>,
    processes: Option<Choice<bool>>,
    seed: Option<Choice<u64>>,
}

/// Reads a plan and returns all its combinations. `base` has the options that the plan leaves out. The backends of one combination
/// alternate.
pub(super) fn read(path: &Path, base: &Arguments) -> Result<Vec<Arguments>, Error> {
    let file = |source| Error::File { path: path.to_owned(), source };
    let wrong = |what: String| Error::PlanFile { path: path.to_owned(), what };
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(MAX_PLAN + 1).read_to_end(&mut bytes)).map_err(file)?;
    if bytes.len() as u64 > MAX_PLAN {
        return Err(wrong(format!("it has more than {MAX_PLAN} bytes, so it is not a plan")));
    }
    let text = String::from_utf8(bytes).map_err(|error| wrong(format!("it is not a plan: {error}")))?;
    combinations(&text, base).map_err(wrong)
}

fn combinations(text: &str, base: &Arguments) -> Result<Vec<Arguments>, String> {
    let sweep: Sweep = toml::from_str(text).map_err(|error| one_line(&error))?;
    let mut base = Arguments { plan: None, ..base.clone() };
    if let Some(backends) = sweep.backend {
        base.backend = backends.values();
    }
    let mut all = vec![base];
    vary(&mut all, sweep.nodes, |arguments, nodes| arguments.nodes = Some(nodes))?;
    vary(&mut all, sweep.daemons, |arguments, daemons| arguments.daemons = daemons)?;
    vary(&mut all, sweep.clients, |arguments, clients| arguments.clients = clients)?;
    vary(&mut all, sweep.queue_depth, |arguments, depth| arguments.queue_depth = depth)?;
    vary(&mut all, sweep.read_ratio, |arguments, ratio| arguments.read_ratio = ratio)?;
    vary(&mut all, sweep.keys, |arguments, keys| arguments.keys = keys)?;
    vary(&mut all, sweep.zipf, |arguments, theta| arguments.zipf = theta)?;
    vary(&mut all, sweep.runs, |arguments, runs| arguments.runs = runs)?;
    vary(&mut all, sweep.duration, |arguments, seconds| arguments.duration = seconds)?;
    vary(&mut all, sweep.payload, |arguments, bytes| arguments.payload = bytes)?;
    vary(&mut all, sweep.local_share, |arguments, share| arguments.local_share = Some(share))?;
    vary(&mut all, sweep.open, |arguments, rate| arguments.open = Some(rate))?;
    vary(&mut all, sweep.processes, |arguments, processes| arguments.processes = processes)?;
    vary(&mut all, sweep.seed, |arguments, seed| arguments.seed = seed)?;
    Ok(all)
}

/// Replaces each of `all` by copies with each of the values.
fn vary<T: Copy>(
    all: &mut Vec<Arguments>,
    values: Option<Choice<T>>,
    set: impl Fn(&mut Arguments, T),
) -> Result<(), String> {
    let Some(values) = values.map(Choice::values) else { return Ok(()) };
    let count = all.len().saturating_mul(values.len());
    if !(1..=MAX_COMBINATIONS).contains(&count) {
        return Err(format!("it has {count} combinations: a plan may have 1 to {MAX_COMBINATIONS}"));
    }
    let with = |arguments: &Arguments, value: T| {
        let mut arguments = arguments.clone();
        set(&mut arguments, value);
        arguments
    };
    *all = all.iter().flat_map(|arguments| values.iter().map(|value| with(arguments, *value))).collect();
    Ok(())
}

impl<T> Choice<T> {
    fn values(self) -> Vec<T> {
        match self {
            Choice::One(value) => vec![value],
            Choice::Several(values) => values,
        }
    }
}

/// The parser's error without its quotation of the file, on one line.
fn one_line(error: &toml::de::Error) -> String {
    let text = error.to_string();
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('|')).collect();
    lines.join(" ")
}
