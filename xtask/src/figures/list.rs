//! All figures that the documents show: the rows of `figures.toml`.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use super::measured::Sample;

/// One row of a table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Figure {
    pub(super) table: String,
    /// Names the figure in `measured.json`.
    pub(super) id: String,
    pub(super) what: String,
    /// The arguments of `crosstie bench`.
    pub(super) arguments: String,
    pub(super) metric: Metric,
    /// The goal for the value or for the share.
    pub(super) goal: Option<Goal>,
}

/// What a figure shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Metric {
    /// Operations per second in millions; share: of what plain code makes.
    Rate,
    /// Median latency in nanoseconds; share: multiple of the round trip of one cache line.
    RoundTrip,
    /// 10^9 bytes per second; share: of `memcpy`.
    Bytes,
    /// Median latency in nanoseconds; share: multiple of that of the same operation on a bare queue pair. Needs `--beside-device`.
    BesideDevice,
}

impl Metric {
    /// Takes the figure out of what a benchmark printed.
    pub(super) fn sample(self, found: &Value) -> Option<Sample> {
        let number = |name: &str| found[name].as_f64();
        let (value, share) = match self {
            Metric::Rate => (number("ops_per_s")? / 1e6, number("ratio_to_limit")),
            Metric::RoundTrip => {
                let p50 = number("p50_ns")?;
                (p50, number("limit_ns").map(|line| p50 / line))
            }
            Metric::Bytes => (number("bytes_per_s")? / 1e9, number("bytes_to_limit")),
            Metric::BesideDevice => (number("p50_ns")?, number("latency_to_device")),
        };
        Some(Sample { value, share, cache_line_ns: number("limit_ns") })
    }

    pub(super) fn unit(self) -> &'static str {
        match self {
            Metric::Rate => "M/s",
            Metric::RoundTrip | Metric::BesideDevice => "ns",
            Metric::Bytes => "GB/s",
        }
    }

    pub(super) fn share_text(self) -> &'static str {
        match self {
            Metric::Rate => "of plain code",
            Metric::RoundTrip => "x a cache line",
            Metric::Bytes => "of memcpy",
            Metric::BesideDevice => "x a bare queue pair",
        }
    }
}

/// What a figure should reach.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Goal {
    AtLeast(f64),
    ShareAtLeast(f64),
    ShareAtMost(f64),
}

impl Goal {
    pub(super) fn is_met(self, value: f64, share: Option<f64>) -> bool {
        match self {
            Goal::AtLeast(goal) => value >= goal,
            Goal::ShareAtLeast(goal) => share.is_some_and(|share| share >= goal),
            Goal::ShareAtMost(goal) => share.is_some_and(|share| share <= goal),
        }
    }

    pub(super) fn text(self, metric: Metric) -> String {
        let share = metric.share_text();
        match self {
            Goal::AtLeast(goal) => format!("{goal} {}", metric.unit()),
            Goal::ShareAtLeast(goal) => format!("{goal} {share}"),
            Goal::ShareAtMost(goal) => format!("at most {goal} {share}"),
        }
    }
}

/// All figures, in the order of the tables.
pub(super) static FIGURES: LazyLock<Vec<Figure>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct List {
        figures: Vec<Figure>,
    }
    let list: List = toml::from_str(include_str!("figures.toml")).expect("figures.toml is valid");
    list.figures
});

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn samples_are_taken_from_what_benchmarks_print() {
        let found = json!({ "ops_per_s": 3e6, "p50_ns": 440.0, "limit_ns": 220.0, "ratio_to_limit": 0.5 });
        let rate = Metric::Rate.sample(&found).unwrap();
        assert_eq!((rate.value, rate.share, rate.cache_line_ns), (3.0, Some(0.5), Some(220.0)));
        let latency = Metric::RoundTrip.sample(&found).unwrap();
        assert_eq!((latency.value, latency.share), (440.0, Some(2.0)));
        assert!(Metric::Bytes.sample(&found).is_none());
        let beside = json!({ "p50_ns": 150.0, "device_p50_ns": 100.0, "latency_to_device": 1.5 });
        let beside = Metric::BesideDevice.sample(&beside).unwrap();
        assert_eq!((beside.value, beside.share), (150.0, Some(1.5)));
    }

    #[test]
    fn goals_compare_the_right_number() {
        assert!(Goal::AtLeast(2.0).is_met(2.0, None) && !Goal::AtLeast(2.0).is_met(1.9, Some(9.0)));
        assert!(Goal::ShareAtLeast(0.8).is_met(0.0, Some(0.8)) && !Goal::ShareAtLeast(0.8).is_met(9.0, None));
        assert!(
            Goal::ShareAtMost(2.2).is_met(0.0, Some(2.0)) && !Goal::ShareAtMost(2.2).is_met(0.0, Some(2.3))
        );
    }

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::BTreeSet<_> = FIGURES.iter().map(|figure| &figure.id).collect();
        assert_eq!(ids.len(), FIGURES.len());
    }
}
