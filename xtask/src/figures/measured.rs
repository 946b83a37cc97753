//! What was measured: the content of `docs/figures/measured.json`.
//!
//! ```json
//! { "machines": { "2 cores": { "processor": "...", "figures": { "ipc-1": { "commit": "1a2b3c", "rounds": 5, "seconds": 0.5,
//!     "value": [2.7, 3.4, 4.9], "share": [0.7, 0.9, 1.1], "cache_line_ns": 199 } } } } }
//! ```
//! `value` and `share` are the lowest, the median and the highest over the rounds.
//!
//! The comparison with other systems is in `peers`: `processor`, `versions`, `rounds`, `seconds`, and for each name of `measured` the
//! medians and the commit.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{Error, with_path};

/// Where the measurements are stored, relative to the root of the repository.
pub(super) const PATH: &str = "docs/figures/measured.json";

/// One result of one round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) value: f64,
    /// The value as a share of the limit that was measured in the same run.
    pub(super) share: Option<f64>,
    pub(super) cache_line_ns: Option<f64>,
}

/// The machine that measures.
pub(super) struct Machine {
    name: String,
    processor: String,
}

impl Machine {
    pub(super) fn this() -> Result<Machine, Error> {
        let path = "/proc/cpuinfo";
        let text = fs::read_to_string(path).map_err(with_path(path))?;
        let field = |name: &str| {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(key, _)| key.trim() == name)
                .map_or("unknown", |(_, value)| value.trim())
        };
        let has_cldemote = field("flags").split(' ').any(|flag| flag == "cldemote");
        let cores = text.lines().filter(|line| line.starts_with("processor")).count();
        let processor = format!(
            "{}, family {} model {}, {} `cldemote`",
            field("model name"),
            field("cpu family"),
            field("model"),
            if has_cldemote { "with" } else { "without" }
        );
        Ok(Machine { name: format!("{cores} cores"), processor })
    }
}

/// The middle value, or the mean of the two middle ones. `None` if there are no values.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    Some((values.get(low)? + values.get(high)?) / 2.0)
}

/// Lowest, median and highest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread(pub(super) [f64; 3]);

impl Spread {
    fn of(values: Vec<f64>) -> Option<Spread> {
        let lowest = values.iter().copied().reduce(f64::min)?;
        let highest = values.iter().copied().reduce(f64::max)?;
        Some(Spread([lowest, median(values)?, highest].map(round)))
    }

    fn parse(found: &Value) -> Option<Spread> {
        let numbers: Vec<f64> = found.as_array()?.iter().filter_map(Value::as_f64).collect();
        Some(Spread(numbers.try_into().ok()?))
    }
}

/// Three significant digits are more than these measurements can tell.
fn round(value: f64) -> f64 {
    let digits = if value.abs() >= 100.0 { 1.0 } else { 1000.0 };
    (value * digits).round() / digits
}

/// One figure of one machine.
#[derive(Clone, Debug)]
pub(super) struct FigureResult {
    pub(super) commit: String,
    pub(super) value: Spread,
    pub(super) share: Option<Spread>,
}

/// All measurements.
#[derive(Clone, Debug)]
pub(super) struct Measured(Value);

impl Measured {
    pub(super) fn new(
        machine: &Machine,
        commit: &str,
        seconds: f64,
        samples: &BTreeMap<&str, Vec<Sample>>,
    ) -> Measured {
        let spread = |values: Vec<f64>| Spread::of(values).map(|spread| spread.0);
        let figures: Map<String, Value> = samples
            .iter()
            .map(|(id, samples)| {
                let figure = json!({
                    "commit": commit,
                    "rounds": samples.len(),
                    "seconds": seconds,
                    "value": spread(samples.iter().map(|sample| sample.value).collect()),
                    "share": spread(samples.iter().filter_map(|sample| sample.share).collect()),
                    "cache_line_ns": spread(samples.iter().filter_map(|sample| sample.cache_line_ns).collect()),
                });
                ((*id).to_owned(), figure)
            })
            .collect();
        Measured(
            json!({ "machines": { &machine.name: { "processor": machine.processor, "figures": figures } } }),
        )
    }

    /// A comparison with other systems, as `bench-peers` found it.
    pub(super) fn of_peers(machine: &Machine, commit: &str, found: &Value) -> Measured {
        let mut measured = found["measured"].clone();
        for figures in measured.as_object_mut().into_iter().flat_map(Map::values_mut) {
            figures["commit"] = json!(commit);
        }
        let peers = json!({
            "versions": found["versions"],
            "rounds": found["rounds"],
            "seconds": found["seconds"],
            "measured": measured,
            "processor": format!("{}, {}", machine.name, machine.processor),
        });
        Measured(json!({ "machines": {}, "peers": peers }))
    }

    /// Reads a file. One that does not exist has no measurements.
    pub(super) fn read(path: &Path) -> Result<Measured, Error> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => r#"{ "machines": {} }"#.to_owned(),
            read => read.map_err(with_path(path))?,
        };
        let invalid = |what: String| Error::UnexpectedOutput { command: path.display().to_string(), what };
        let value: Value = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        match value["machines"].is_object() {
            true => Ok(Measured(value)),
            false => Err(invalid("it has no object `machines`".into())),
        }
    }

    pub(super) fn write(&self, path: &Path) -> Result<(), Error> {
        fs::write(path, format!("{:#}\n", self.0)).map_err(with_path(path))
    }

    /// Adds measurements. Figures that both have are taken from `newer`; a machine with another processor starts anew.
    pub(super) fn merge(&mut self, newer: Measured) {
        if newer.peers().is_object() {
            merge_peers(&mut self.0["peers"], newer.peers());
        }
        let Some(machines) = self.0["machines"].as_object_mut() else { return };
        let Value::Object(added) = newer.0["machines"].clone() else { return };
        for (name, machine) in added {
            match machines.get_mut(&name) {
                Some(known) if known["processor"] == machine["processor"] => {
                    if let (Some(known), Value::Object(figures)) =
                        (known["figures"].as_object_mut(), machine["figures"].clone())
                    {
                        known.extend(figures);
                    }
                }
                _ => {
                    machines.insert(name, machine);
                }
            }
        }
    }

    /// The machines: name and processor.
    pub(super) fn machines(&self) -> Vec<(&str, &str)> {
        let machines = self.0["machines"].as_object().into_iter().flatten();
        let mut machines: Vec<(&str, &str)> = machines
            .map(|(name, machine)| (name.as_str(), machine["processor"].as_str().unwrap_or("unknown")))
            .collect();
        // "2 cores" comes before "16 cores".
        machines.sort_by_key(|(name, _)| (name.len(), *name));
        machines
    }

    /// The comparison with other systems.
    pub(super) fn peers(&self) -> &Value {
        &self.0["peers"]
    }

    pub(super) fn result(&self, machine: &str, id: &str) -> Option<FigureResult> {
        let figure = &self.0["machines"][machine]["figures"][id];
        Some(FigureResult {
            commit: figure["commit"].as_str()?.to_owned(),
            value: Spread::parse(&figure["value"])?,
            share: Spread::parse(&figure["share"]),
        })
    }
}

/// Replaces what was measured again. A system that was not measured again keeps its version and its figures, on the same processor.
fn merge_peers(known: &mut Value, newer: &Value) {
    let Some(newer) = newer.as_object() else { return };
    if known["processor"] != newer["processor"] {
        *known = json!({});
    }
    for (name, value) in newer {
        match (known[name].as_object_mut(), value) {
            (Some(known), Value::Object(value)) => known.extend(value.clone()),
            _ => known[name] = value.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(processor: &str, commit: &str, id: &str, values: &[f64]) -> Measured {
        let machine = Machine { name: "2 cores".into(), processor: processor.into() };
        let sample = |value: &f64| Sample { value: *value, share: Some(value / 10.0), cache_line_ns: None };
        let samples = BTreeMap::from([(id, values.iter().map(sample).collect())]);
        Measured::new(&machine, commit, 0.5, &samples)
    }

    #[test]
    fn spread_is_lowest_median_highest() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Some(Spread([1.0, 2.0, 3.0])));
        assert_eq!(Spread::of(vec![1.0, 2.0]), Some(Spread([1.0, 1.5, 2.0])));
        assert_eq!(Spread::of(vec![]), None);
    }

    #[test]
    fn figures_that_were_not_measured_again_keep_their_commit() {
        let mut all = measured("a", "old", "ipc-1", &[1.0, 3.0, 2.0]);
        all.merge(measured("a", "old", "ipc-32", &[5.0]));
        all.merge(measured("a", "new", "ipc-1", &[4.0]));
        let result = |id: &str| all.result("2 cores", id).map(|result| (result.commit, result.value.0[1]));
        assert_eq!(result("ipc-1"), Some(("new".into(), 4.0)));
        assert_eq!(result("ipc-32"), Some(("old".into(), 5.0)));
        assert_eq!(result("flux-1"), None);
    }

    #[test]
    fn figures_of_another_processor_are_not_mixed() {
        let mut all = measured("a", "old", "ipc-1", &[1.0]);
        all.merge(measured("b", "new", "ipc-32", &[5.0]));
        assert!(all.result("2 cores", "ipc-1").is_none());
        assert_eq!(all.machines(), [("2 cores", "b")]);
    }

    #[test]
    fn systems_that_were_not_measured_again_keep_their_figures() {
        let machine = Machine { name: "2 cores".into(), processor: "a".into() };
        let found = |peer: &str, rate: f64| json!({ "versions": { peer: "1" }, "rounds": 5, "measured": { peer: { "per_s": rate } } });
        let mut all = measured("a", "old", "ipc-1", &[1.0]);
        for (commit, peer, rate) in [("old", "UCX", 1.0), ("old", "Redis", 2.0), ("new", "UCX", 3.0)] {
            all.merge(Measured::of_peers(&machine, commit, &found(peer, rate)));
        }
        let peers = all.peers();
        assert_eq!(peers["measured"]["UCX"], json!({ "per_s": 3.0, "commit": "new" }));
        assert_eq!(peers["measured"]["Redis"], json!({ "per_s": 2.0, "commit": "old" }));
        assert_eq!(peers["versions"], json!({ "UCX": "1", "Redis": "1" }));

        let other = Machine { name: "2 cores".into(), processor: "b".into() };
        all.merge(Measured::of_peers(&other, "new", &found("UCX", 4.0)));
        assert_eq!(
            all.peers()["versions"],
            json!({ "UCX": "1" }),
            "figures of another processor are not mixed"
        );
        assert!(all.result("2 cores", "ipc-1").is_some(), "other figures stay");
    }

    #[test]
    fn this_machine_has_a_name() {
        let machine = Machine::this().unwrap();
        assert!(machine.name.ends_with(" cores") && machine.processor.contains("cldemote"));
    }
}
