//! The table of comparisons, and its output as text and JSON.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{Figures, LARGE, MEASUREMENTS, Measurement, Options, Peer, Versions};

/// Which figure of a measurement is compared.
#[derive(Clone, Copy)]
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
#[derive(Clone, Copy)]
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
pub(super) struct Comparison {
    pub(super) peer: Peer,
    what: &'static str,
    ours: (&'static str, Metric),
    theirs: (&'static [&'static str], Metric),
    goal: Option<Goal>,
}

const UCX_DEPTHS: &[&str] = &["ucx 32 B depth 16", "ucx 32 B depth 64", "ucx 32 B depth 256"];
const UCX_ONE: &[&str] = &["ucx 32 B depth 1"];
const UCX_LARGE: &[&str] = &["ucx 64 KiB depth 1", "ucx 64 KiB depth 4"];

/// Compares operations per second with UCX.
const fn rate(
    what: &'static str,
    ours: &'static str,
    theirs: &'static [&'static str],
    goal: Option<Goal>,
) -> Comparison {
    Comparison { peer: Peer::Ucx, what, ours: (ours, Metric::Rate), theirs: (theirs, Metric::Rate), goal }
}

/// Compares Crosstie's store with another one: gets and puts 1:1, 8-byte values.
const fn store(
    peer: Peer,
    what: &'static str,
    ours: &'static str,
    theirs: &'static [&'static str],
    goal: Option<Goal>,
) -> Comparison {
    Comparison { peer, what, ours: (ours, Metric::Rate), theirs: (theirs, Metric::Rate), goal }
}

/// All comparisons, in the order of the table.
pub(super) const COMPARISONS: &[Comparison] = &[
    Comparison {
        peer: Peer::Ucx,
        what: "copyrpc, 32 B, depth 1: round trip; UCX request and reply",
        ours: ("copyrpc 32 B depth 1", Metric::RoundTrip),
        theirs: (UCX_ONE, Metric::RoundTrip),
        goal: Some(Goal::AtMost(0.75)),
    },
    Comparison {
        peer: Peer::Ucx,
        what: "copyrpc, 32 B, depth 1: round trip; UCX twice ucp_am_lat",
        ours: ("copyrpc 32 B depth 1", Metric::RoundTrip),
        theirs: (&["ucp_am_lat 32 B"], Metric::TwiceOneWay),
        goal: Some(Goal::AtMost(0.75)),
    },
    Comparison {
        peer: Peer::Ucx,
        what: "copyrpc, 32 B, depth 1: round trip; one cache line",
        ours: ("copyrpc 32 B depth 1", Metric::RoundTrip),
        theirs: (&["copyrpc 32 B depth 1"], Metric::CacheLine),
        goal: Some(Goal::AtMost(5.0)),
    },
    rate("copyrpc, 32 B, depth 1; UCX depth 1", "copyrpc 32 B depth 1", UCX_ONE, None),
    rate("copyrpc, 32 B, depth 64; UCX best depth", "copyrpc 32 B depth 64", UCX_DEPTHS, None),
    rate(
        "copyrpc, 32 B, depth 256; UCX best depth",
        "copyrpc 32 B depth 256",
        UCX_DEPTHS,
        Some(Goal::AtLeast(2.0)),
    ),
    Comparison {
        peer: Peer::Ucx,
        what: "copyrpc, 64 KiB there and back, depth 1; UCX depth 1",
        ours: ("copyrpc 64 KiB depth 1", Metric::Bytes),
        theirs: (&["ucx 64 KiB depth 1"], Metric::Bytes),
        goal: Some(Goal::AtLeast(0.8)),
    },
    Comparison {
        peer: Peer::Ucx,
        what: "copyrpc, 64 KiB there and back, depth 4; UCX best depth",
        ours: ("copyrpc 64 KiB depth 4", Metric::Bytes),
        theirs: (UCX_LARGE, Metric::Bytes),
        goal: Some(Goal::AtLeast(0.8)),
    },
    Comparison {
        peer: Peer::Ucx,
        what: "copyrpc, 64 KiB there, 8 B back, depth 4; UCX ucp_am_bw",
        ours: ("copyrpc 64 KiB one way depth 4", Metric::Bytes),
        theirs: (&["ucp_am_bw 64 KiB"], Metric::Bytes),
        goal: Some(Goal::AtLeast(0.8)),
    },
    rate("ipc, 32 B, depth 1; UCX depth 1", "ipc depth 1", UCX_ONE, None),
    rate("ipc, 32 B, depth 32; UCX best depth", "ipc depth 32", UCX_DEPTHS, None),
    rate("delegation, 32 B, depth 1; UCX depth 1", "delegation depth 1", UCX_ONE, None),
    rate("delegation, 32 B, depth 32; UCX best depth", "delegation depth 32", UCX_DEPTHS, None),
    rate("flux (threads), 32 B, depth 1; UCX depth 1", "flux depth 1", UCX_ONE, None),
    rate("flux (threads), 32 B, depth 32; UCX best depth", "flux depth 32", UCX_DEPTHS, None),
    Comparison {
        peer: Peer::Iceoryx2,
        what: "ipc, 32 B, depth 1: round trip; iceoryx2 request and response",
        ours: ("ipc depth 1", Metric::RoundTrip),
        theirs: (&["iceoryx2 depth 1"], Metric::RoundTrip),
        goal: None,
    },
    Comparison {
        peer: Peer::Iceoryx2,
        what: "ipc, 32 B, depth 32; iceoryx2 depth 32",
        ours: ("ipc depth 32", Metric::Rate),
        theirs: (&["iceoryx2 depth 32"], Metric::Rate),
        goal: None,
    },
    store(
        Peer::Redis,
        "store, integers, 1:1 mix, depth 1; Redis pipeline 1",
        "store depth 1",
        &["redis pipeline 1"],
        Some(Goal::AtLeast(15.0)),
    ),
    store(
        Peer::Redis,
        "store, byte strings, 1:1 mix, depth 1; Redis pipeline 1",
        "store, bytes, depth 1",
        &["redis pipeline 1"],
        None,
    ),
    store(
        Peer::Memcached,
        "store, integers, 1:1 mix, depth 1; memcached pipeline 1",
        "store depth 1",
        &["memcached pipeline 1"],
        Some(Goal::AtLeast(15.0)),
    ),
    store(
        Peer::Memcached,
        "store, byte strings, 1:1 mix, depth 1; memcached pipeline 1",
        "store, bytes, depth 1",
        &["memcached pipeline 1"],
        None,
    ),
    store(
        Peer::Redis,
        "store, integers, 1:1 mix, depth 16; Redis pipeline 16",
        "store depth 16",
        &["redis pipeline 16"],
        Some(Goal::AtLeast(6.0)),
    ),
    store(
        Peer::Redis,
        "store, byte strings, 1:1 mix, depth 16; Redis pipeline 16",
        "store, bytes, depth 16",
        &["redis pipeline 16"],
        None,
    ),
    store(
        Peer::Memcached,
        "store, integers, 1:1 mix, depth 16; memcached pipeline 16",
        "store depth 16",
        &["memcached pipeline 16"],
        Some(Goal::AtLeast(6.0)),
    ),
    store(
        Peer::Memcached,
        "store, byte strings, 1:1 mix, depth 16; memcached pipeline 16",
        "store, bytes, depth 16",
        &["memcached pipeline 16"],
        None,
    ),
    Comparison {
        peer: Peer::Openmpi,
        what: "group, barrier of two processes; OpenMPI",
        ours: ("barrier", Metric::RoundTrip),
        theirs: (&["openmpi"], Metric::RoundTrip),
        goal: Some(Goal::AtMost(1.5)),
    },
    Comparison {
        peer: Peer::Openmpi,
        what: "group, messages of 64 B; OpenMPI",
        ours: ("message 64 B", Metric::Rate),
        theirs: (&["openmpi"], Metric::Rate),
        goal: Some(Goal::AtLeast(1.0)),
    },
    Comparison {
        peer: Peer::Mpich,
        what: "group, barrier of two processes; MPICH",
        ours: ("barrier", Metric::RoundTrip),
        theirs: (&["mpich"], Metric::RoundTrip),
        goal: None,
    },
    Comparison {
        peer: Peer::Mpich,
        what: "group, messages of 64 B; MPICH",
        ours: ("message 64 B", Metric::Rate),
        theirs: (&["mpich"], Metric::Rate),
        goal: None,
    },
    Comparison {
        peer: Peer::Openmpi,
        what: "group, messages of 64 B with 1 % loss; without loss",
        ours: ("message 64 B, 1 % loss", Metric::Rate),
        theirs: (&["message 64 B"], Metric::Rate),
        goal: Some(Goal::AtLeast(0.7)),
    },
    Comparison {
        peer: Peer::Openmpi,
        what: "group, contended acquisition of a lock; one cache line there and back",
        ours: ("lock", Metric::RoundTrip),
        theirs: (&["lock"], Metric::CacheLine),
        goal: Some(Goal::AtMost(6.0)),
    },
];

/// Returns the names of all measurements that the comparisons need.
pub(super) fn measurement_names(compared: &[&Comparison]) -> BTreeSet<&'static str> {
    compared.iter().flat_map(|each| each.theirs.0.iter().copied().chain([each.ours.0])).collect()
}

/// One row of the table.
pub(super) struct Row {
    what: &'static str,
    unit: &'static str,
    ours: f64,
    theirs: f64,
    /// Processor time for each operation: ours and theirs. Only where operations per second are compared.
    cpu_ns: Option<[f64; 2]>,
    goal: Option<Goal>,
}

impl Row {
    pub(super) fn new(comparison: &Comparison, medians: &BTreeMap<&str, Figures>) -> Option<Row> {
        let Comparison {
            what, ours: (our_name, our_metric), theirs: (their_names, their_metric), goal, ..
        } = *comparison;
        let is_rate = matches!(our_metric, Metric::Rate | Metric::Bytes);
        let ours = medians.get(our_name)?;
        let theirs = their_names
            .iter()
            .filter_map(|name| Some((their_metric.value(medians.get(name)?)?, *medians.get(name)?)));
        // The best: the highest rate, or the shortest time.
        let (value, theirs) =
            theirs.reduce(|one, other| if (one.0 > other.0) == is_rate { one } else { other })?;
        Some(Row {
            what,
            unit: our_metric.unit(),
            ours: our_metric.value(ours)?,
            theirs: value,
            cpu_ns: ours.cpu_ns.zip(theirs.cpu_ns).filter(|_| is_rate).map(|(ours, theirs)| [ours, theirs]),
            goal,
        })
    }

    fn ratio(&self) -> f64 {
        self.ours / self.theirs
    }
}

pub(super) fn table(options: &Options, versions: &Versions, rows: &[Row]) -> String {
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

/// Lists the figures of the other stores, for a program without a store to compare them with.
pub(super) fn list_other_stores(medians: &BTreeMap<&str, Figures>) -> String {
    let stores = MEASUREMENTS
        .iter()
        .filter(|(_, measurement)| matches!(measurement, Measurement::Redis(_) | Measurement::Memcached(_)));
    let found = stores.filter_map(|(name, _)| Some((name, medians.get(name)?)));
    found.map(|(name, figures)| format!("{name}: {:.3} M/s\n", figures.per_second / 1e6)).collect()
}

/// Comparisons of Crosstie with another system, from what [`to_json`] gave: each with its row, if both were measured.
fn rows_of(found: &Value) -> Vec<(&'static Comparison, Option<Row>)> {
    let figures = |figures: &Value| {
        Some(Figures {
            per_second: figures["per_s"].as_f64()?,
            p50_ns: figures["p50_ns"].as_f64()?,
            cache_line_ns: figures["limit_ns"].as_f64(),
            cpu_ns: figures["cpu_ns"].as_f64(),
        })
    };
    let medians: BTreeMap<&str, Figures> = MEASUREMENTS
        .iter()
        .filter_map(|(name, _)| Some((*name, figures(&found["measured"][*name])?)))
        .collect();
    // The others compare Crosstie with itself.
    let with_others = COMPARISONS.iter().filter(|each| {
        let is_ours = |name: &&str| COMPARISONS.iter().any(|comparison| comparison.ours.0 == *name);
        !each.theirs.0.iter().any(is_ours)
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
            None if matches!(comparison.ours.1, Metric::Rate | Metric::Bytes) => "not measured yet".into(),
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
    let factor = |comparison: &Comparison, row: &Row| {
        let is_time =
            matches!(comparison.ours.1, Metric::RoundTrip | Metric::TwiceOneWay | Metric::CacheLine);
        if is_time { 1.0 / row.ratio() } else { row.ratio() }
    };
    rows_of(found).iter().filter_map(|(each, row)| Some((each.what, factor(each, row.as_ref()?)))).collect()
}

pub(super) fn to_json(
    options: &Options,
    versions: &Versions,
    medians: &BTreeMap<&str, Figures>,
    rows: &[Row],
) -> Value {
    let measured: serde_json::Map<String, Value> = medians
        .iter()
        .map(|(name, figures)| {
            let Figures { per_second, p50_ns, cache_line_ns, cpu_ns } = figures;
            let figures =
                json!({ "per_s": per_second, "p50_ns": p50_ns, "limit_ns": cache_line_ns, "cpu_ns": cpu_ns });
            ((*name).to_owned(), figures)
        })
        .collect();
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
    let versions: serde_json::Map<String, Value> =
        versions.iter().map(|(name, version)| ((*name).to_owned(), json!(version))).collect();
    json!({
        "versions": versions,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "measured": measured,
        "compared": compared,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measurement_is_compared_and_the_best_of_theirs_is_taken() {
        let figures = |value: usize| Figures {
            per_second: value as f64,
            p50_ns: value as f64,
            cache_line_ns: Some(1.0),
            cpu_ns: Some(value as f64),
        };
        let medians: BTreeMap<&str, Figures> =
            MEASUREMENTS.iter().enumerate().map(|(index, (name, _))| (*name, figures(index + 1))).collect();
        assert_eq!(medians.len(), MEASUREMENTS.len(), "two measurements have the same name");
        let rows: Vec<Row> = COMPARISONS.iter().filter_map(|each| Row::new(each, &medians)).collect();
        assert_eq!(rows.len(), COMPARISONS.len());
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
        let all: Vec<&Comparison> = COMPARISONS.iter().collect();
        assert_eq!(measurement_names(&all).len(), MEASUREMENTS.len(), "a measurement is not compared");
        let redis: Vec<&Comparison> = COMPARISONS.iter().filter(|each| each.peer == Peer::Redis).collect();
        assert!(
            measurement_names(&redis)
                .iter()
                .all(|name| name.starts_with("redis") || name.starts_with("store"))
        );
        assert!(list_other_stores(&medians).contains("memcached pipeline 16"));
    }
}
