//! Sweep plans: a TOML file that lists what to measure. Each key is an option of the command line, with one value or a list; the
//! benchmark measures all combinations.
//!
//! ```toml
//! backend = ["meta", "delegation"]
//! nodes = [1, 2, 4]
//! queue-depth = [1, 4, 16]
//! duration = 1.0
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};

use super::arguments::Arguments;
use crate::error::Error;

/// Longest plan in bytes.
const MAX_PLAN: u64 = 1 << 20;
/// Most combinations of a plan.
const MAX_COMBINATIONS: usize = 1024;

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
    let sweep: BTreeMap<String, Value> = toml::from_str(text).map_err(|error| one_line(&error))?;
    let mut all = vec![Arguments { plan: None, ..base.clone() }];
    for (name, values) in &sweep {
        // Plans may use the former name.
        let name = if name == "value-size" { "payload" } else { name.as_str() };
        let values = match (name, values) {
            // The backends of one combination alternate.
            ("backend", Value::Array(_)) => vec![values.clone()],
            ("backend", one) => vec![json!([one])],
            (_, Value::Array(values)) => values.clone(),
            (_, one) => vec![one.clone()],
        };
        let count = all.len().saturating_mul(values.len());
        if !(1..=MAX_COMBINATIONS).contains(&count) {
            return Err(format!("it has {count} combinations: a plan may have 1 to {MAX_COMBINATIONS}"));
        }
        let varied = all.iter().flat_map(|arguments| values.iter().map(|value| arguments.with(name, value)));
        all = varied.collect::<Result<_, _>>()?;
    }
    Ok(all)
}

/// The parser's error without its quotation of the file, on one line.
fn one_line(error: &toml::de::Error) -> String {
    let text = error.to_string();
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('|')).collect();
    lines.join(" ")
}
