//! The table of comparisons, and its output as text and JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Figures, LARGE, Measurement, Options, Peer, Versions};

/// Which figure of a measurement is compared.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Metric {
    /// Operations per second, in millions.
    Rate,
    /// Payload bytes per second, in 10^9, for large messages; each message is counted once.
    Bytes,
    /// Median round trip in nanoseconds.
    RoundTrip,
    /// Twice the median latency of one direction, in nanoseconds.
    TwiceOneWay,
    /// The round trip of one cache line, in nanoseconds.
    CacheLine,
}

impl Metric {
    fn value(self, figures: &Figures) -> Option<f64> {
        Some(match self {
            Metric::Rate => figures.per_second / 1e6,
            Metric::Bytes => figures.per_second * LARGE as f64 / 1e9,
            Metric::RoundTrip => figures.p50_ns,
            Metric::TwiceOneWay => 2.0 * figures.p50_ns,
            Metric::CacheLine => figures.cache_line_ns?,
        })
    }

    fn unit(self) -> &'static str {
        match self {
            Metric::Rate => "M/s",
            Metric::Bytes => "GB/s",
            Metric::RoundTrip | Metric::TwiceOneWay | Metric::CacheLine => "ns",
        }
    }
}

/// The goal for a ratio.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Goal::AtLeast(goal) => ratio >= goal,
            Goal::AtMost(goal) => ratio <= goal,
        }
    }

    fn text(self) -> String {
        match self {
            Goal::AtLeast(goal) => format!("at least {goal}"),
            Goal::AtMost(goal) => format!("at most {goal}"),
        }
    }
}

/// One comparison: a measurement of Crosstie with the best of several measurements of another system.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Comparison {
    pub(super) peer: Peer,
    what: String,
    ours: String,
    theirs: Vec<String>,
    metric: Metric,
    /// The figure of the other system, if it is another one.
    their_metric: Option<Metric>,
    goal: Option<Goal>,
}

/// The content of `comparisons.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Lists {
    measurements: Vec<Named>,
    pub(super) comparisons: Vec<Comparison>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
    run: Measurement,
}

pub(super) static LISTS: LazyLock<Lists> =
    LazyLock::new(|| toml::from_str(include_str!("comparisons.toml")).expect("comparisons.toml is valid"));

impl Lists {
    /// All measurements, by name.
    pub(super) fn measurements(&self) -> impl Iterator<Item = (&str, &Measurement)> {
        self.measurements.iter().map(|named| (named.name.as_str(), &named.run))
    }
}

/// Returns the names of all measurements that the comparisons need.
pub(super) fn measurement_names<'a>(compared: &[&'a Comparison]) -> BTreeSet<&'a str> {
    compared.iter().flat_map(|each| each.theirs.iter().chain([&each.ours])).map(String::as_str).collect()
}

/// One row of the table.
pub(super) struct Row<'a> {
    what: &'a str,
    unit: &'static str,
    ours: f64,
    theirs: f64,
    /// Processor time for each operation: ours and theirs. Only where operations per second are compared.
    cpu_ns: Option<[f64; 2]>,
    goal: Option<Goal>,
}

impl<'a> Row<'a> {
    pub(super) fn new(comparison: &'a Comparison, medians: &BTreeMap<&str, Figures>) -> Option<Row<'a>> {
        let Comparison { what, ours, theirs, metric, their_metric, goal, .. } = comparison;
        let their_metric = their_metric.unwrap_or(*metric);
        let is_rate = matches!(metric, Metric::Rate | Metric::Bytes);
        let ours = medians.get(ours.as_str())?;
        let theirs = theirs.iter().filter_map(|name| {
            let figures = medians.get(name.as_str())?;
            Some((their_metric.value(figures)?, *figures))
        });
        // The best: the highest rate, or the shortest time.
        let (value, theirs) =
            theirs.reduce(|one, other| if (one.0 > other.0) == is_rate { one } else { other })?;
        Some(Row {
            what,
            unit: metric.unit(),
            ours: metric.value(ours)?,
            theirs: value,
            cpu_ns: ours.cpu_ns.zip(theirs.cpu_ns).filter(|_| is_rate).map(|(ours, theirs)| [ours, theirs]),
            goal: *goal,
        })
    }

    fn ratio(&self) -> f64 {
        self.ours / self.theirs
    }
}

pub(super) fn table(options: &Options, versions: &Versions, rows: &[Row<'_>]) -> String {
    let versions: Vec<String> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let width = rows.iter().map(|row| row.what.len()).max().unwrap_or(0);
    let mut text =
        format!("{}; medians of {} rounds of {} s\n\n", versions.join(", "), options.rounds, options.seconds);
    if !rows.is_empty() {
        text += &format!("{:width$}  {:>8}  {:>8}  {:4}  ratio  goal\n", "", "crosstie", "theirs", "unit");
    }
    for row in rows {
        let goal = row.goal.map_or_else(String::new, |goal| {
            format!("{}: {}", goal.text(), if goal.is_met(row.ratio()) { "met" } else { "missed" })
        });
        let line = format!(
            "{:width$}  {:>8}  {:>8}  {:4}  {:5.2}  {goal}",
            row.what,
            figure(row.ours),
            figure(row.theirs),
            row.unit,
            row.ratio()
        );
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn figure(figure: f64) -> String {
    match figure {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 1.0 => format!("{x:.2}"),
        x => format!("{x:.3}"),
    }
}

/// Comparisons of Crosstie with another system, from what [`to_json`] gave: each with its row, if both were measured.
fn rows_of(found: &Value) -> Vec<(&'static Comparison, Option<Row<'static>>)> {
    let measured = found["measured"].as_object().into_iter().flatten();
    let medians: BTreeMap<&str, Figures> = measured
        .filter_map(|(name, figures)| Some((name.as_str(), Figures::deserialize(figures).ok()?)))
        .collect();
    // The others compare Crosstie with itself.
    let with_others = LISTS.comparisons.iter().filter(|each| {
        let is_ours = |name: &String| LISTS.comparisons.iter().any(|comparison| comparison.ours == *name);
        !each.theirs.iter().any(is_ours)
    });
    with_others.map(|each| (each, Row::new(each, &medians))).collect()
}

/// A table of the comparisons for the documents.
pub(crate) fn comparison_table(found: &Value) -> String {
    let versions = found["versions"].as_object().into_iter().flatten();
    let versions: Vec<String> =
        versions.map(|(name, version)| format!("{name} {}", version.as_str().unwrap_or("?"))).collect();
    let versions =
        if versions.is_empty() { "versions: not measured yet".to_owned() } else { versions.join(", ") };
    let mut text = format!(
        "| what ({versions}) | Crosstie | the other | Crosstie / other | CPU time per operation: Crosstie; the other |\n| --- | --- | --- | --- | --- |\n"
    );
    for (comparison, row) in rows_of(found) {
        let cells = match &row {
            Some(row) => format!(
                "{} {} | {} {} | {:.2}",
                figure(row.ours),
                row.unit,
                figure(row.theirs),
                row.unit,
                row.ratio()
            ),
            None => "not measured yet | not measured yet | -".into(),
        };
        let cpu = match row.and_then(|row| row.cpu_ns) {
            Some([ours, theirs]) => format!("{} ns; {} ns", figure(ours), figure(theirs)),
            None if matches!(comparison.metric, Metric::Rate | Metric::Bytes) => "not measured yet".into(),
            None => "-".into(),
        };
        text += &format!("| {} | {cells} | {cpu} |\n", comparison.what);
    }
    if let Some(processor) = found["processor"].as_str() {
        text += &format!("\n{processor}; medians of {} rounds of {} s\n", found["rounds"], found["seconds"]);
    }
    text
}

/// How many times as fast as the other system Crosstie is, for each comparison that was measured.
pub(crate) fn factors(found: &Value) -> Vec<(&'static str, f64)> {
    let factor = |comparison: &Comparison, row: &Row<'_>| {
        let is_rate = matches!(comparison.metric, Metric::Rate | Metric::Bytes);
        if is_rate { row.ratio() } else { 1.0 / row.ratio() }
    };
    let rows = rows_of(found).into_iter();
    rows.filter_map(|(each, row)| Some((each.what.as_str(), factor(each, &row?)))).collect()
}

pub(super) fn to_json(
    options: &Options,
    versions: &Versions,
    medians: &BTreeMap<&str, Figures>,
    rows: &[Row<'_>],
) -> Value {
    let compared: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "what": row.what,
                "unit": row.unit,
                "ours": row.ours,
                "theirs": row.theirs,
                "ratio": row.ratio(),
                "cpu_ns": row.cpu_ns,
                "goal": row.goal.map(Goal::text),
                "met": row.goal.map(|goal| goal.is_met(row.ratio())),
            })
        })
        .collect();
    let versions: BTreeMap<_, _> = versions.iter().cloned().collect();
    json!({
        "versions": versions,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "measured": medians,
        "compared": compared,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measurement_is_compared_and_the_best_of_theirs_is_taken() {
        let figures = |value: usize| {
            let value = value as f64;
            Figures { cache_line_ns: Some(1.0), cpu_ns: Some(value), ..Figures::new(value, value) }
        };
        let medians: BTreeMap<&str, Figures> =
            LISTS.measurements().enumerate().map(|(index, (name, _))| (name, figures(index + 1))).collect();
        assert_eq!(medians.len(), LISTS.measurements.len(), "two measurements have the same name");
        let rows: Vec<Row<'_>> =
            LISTS.comparisons.iter().filter_map(|each| Row::new(each, &medians)).collect();
        assert_eq!(rows.len(), LISTS.comparisons.len());
        let deep = rows.iter().find(|row| row.what.contains("depth 256")).expect("a row");
        assert_eq!((deep.ours, deep.theirs), (7e-6, 8e-6));
        let options = Options { json: true, rounds: 1, seconds: 1.0, only: vec![], record: false };
        let versions = vec![("UCX", "1".to_owned())];
        let found = to_json(&options, &versions, &medians, &rows);
        assert_eq!(found["compared"][2]["met"], true, "{found}");
        assert_eq!(found["versions"]["UCX"], "1");
        assert!(table(&options, &versions, &rows).contains("at most 5: met"));
        let documented = comparison_table(&found);
        assert!(
            documented.contains("(UCX 1)")
                && documented.contains("iceoryx2")
                && !documented.contains("cache line")
        );
        let factors = factors(&found);
        assert_eq!(documented.lines().count(), factors.len() + 2);
        assert_eq!(factors[0].1, 2.0, "a round trip half as long is twice as fast");
        assert!(comparison_table(&Value::Null).contains("not measured yet"));
        let all: Vec<&Comparison> = LISTS.comparisons.iter().collect();
        assert_eq!(measurement_names(&all).len(), LISTS.measurements.len(), "a measurement is not compared");
        let redis: Vec<&Comparison> =
            LISTS.comparisons.iter().filter(|each| each.peer == Peer::Redis).collect();
        assert!(
            measurement_names(&redis)
                .iter()
                .all(|name| name.starts_with("redis") || name.starts_with("store"))
        );
    }
}
