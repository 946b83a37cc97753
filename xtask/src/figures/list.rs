//! All figures that the documents show.

use serde_json::Value;

use super::measured::Sample;

/// One row of a table.
pub(super) struct Figure {
    pub(super) table: &'static str,
    /// Names the figure in `measured.json`.
    pub(super) id: &'static str,
    pub(super) what: &'static str,
    /// The arguments of `crosstie bench`.
    pub(super) arguments: &'static str,
    pub(super) metric: Metric,
    /// The goal for the value or for the share, as text for the table, and whether a pair of value and share meets it.
    pub(super) goal: Option<Goal>,
}

/// What a figure shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug)]
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

const fn figure(
    table: &'static str,
    id: &'static str,
    what: &'static str,
    arguments: &'static str,
    metric: Metric,
    goal: Option<Goal>,
) -> Figure {
    Figure { table, id, what, arguments, metric, goal }
}

use Goal::{AtLeast, ShareAtLeast, ShareAtMost};
use Metric::{BesideDevice, Bytes, Rate, RoundTrip};

/// All figures, in the order of the tables.
pub(super) const FIGURES: &[Figure] = &[
    figure(
        "device",
        "device-ping-pong",
        "WRITE+IMM, 32 B, there and back",
        "device --processes",
        RoundTrip,
        Some(ShareAtMost(2.2)),
    ),
    figure(
        "device",
        "device-stream",
        "WRITE+IMM, 32 B, stream",
        "device --processes --queue-depth 64",
        Rate,
        Some(ShareAtLeast(0.6)),
    ),
    figure(
        "device",
        "device-write-64k",
        "WRITE of 64 KiB into library memory",
        "device --processes --op write --payload 65536",
        Bytes,
        Some(ShareAtLeast(0.8)),
    ),
    figure(
        "device",
        "device-write-1m-in-place",
        "WRITE of 1 MiB into memory registered in place",
        "device --processes --op write --payload 1048576 --registered-in-place",
        Bytes,
        Some(ShareAtLeast(0.4)),
    ),
    figure("local", "ipc-1", "ipc, depth 1", "ipc --processes", Rate, Some(ShareAtLeast(0.6))),
    figure(
        "local",
        "ipc-32",
        "ipc, depth 32",
        "ipc --processes --queue-depth 32",
        Rate,
        Some(ShareAtLeast(0.8)),
    ),
    figure(
        "local",
        "delegation-1",
        "delegation, depth 1",
        "delegation --processes",
        Rate,
        Some(ShareAtLeast(0.8)),
    ),
    figure(
        "local",
        "delegation-32",
        "delegation, depth 32",
        "delegation --processes --queue-depth 32",
        Rate,
        Some(ShareAtLeast(0.75)),
    ),
    figure("local", "flux-1", "flux (threads), depth 1", "flux", Rate, Some(ShareAtLeast(0.7))),
    figure(
        "local",
        "flux-32",
        "flux (threads), depth 32",
        "flux --queue-depth 32",
        Rate,
        Some(ShareAtLeast(0.9)),
    ),
    figure(
        "copyrpc",
        "copyrpc-1",
        "call and response, 32 B, depth 1",
        "copyrpc --processes",
        RoundTrip,
        Some(ShareAtMost(2.2)),
    ),
    figure(
        "copyrpc",
        "copyrpc-32",
        "calls, 32 B, depth 32",
        "copyrpc --processes --queue-depth 32",
        Rate,
        Some(AtLeast(12.0)),
    ),
    figure(
        "copyrpc",
        "copyrpc-256",
        "calls, 32 B, depth 256",
        "copyrpc --processes --queue-depth 256",
        Rate,
        Some(AtLeast(20.0)),
    ),
    figure(
        "copyrpc",
        "copyrpc-64k",
        "64 KiB there and back, depth 4",
        "copyrpc --processes --payload 65536 --queue-depth 4",
        Rate,
        None,
    ),
    figure(
        "endpoint",
        "endpoint-write-64",
        "`write` of 64 B, from the call to the result",
        "endpoint --processes --op write --payload 64 --beside-device",
        BesideDevice,
        Some(ShareAtMost(1.5)),
    ),
    figure(
        "endpoint",
        "endpoint-read-64k",
        "`read` of 64 KiB",
        "endpoint --processes --op read --payload 65536",
        Bytes,
        Some(ShareAtLeast(0.8)),
    ),
    figure(
        "endpoint",
        "endpoint-send",
        "`send` and `recv`, 64 B, there and back",
        "endpoint --processes --op send --payload 64",
        RoundTrip,
        None,
    ),
    figure(
        "store",
        "kv-1-node-1",
        "one node, one daemon, one client, depth 1",
        "kv --backend delegation --nodes 1 --daemons 1 --clients 1 --queue-depth 1 --runs 1",
        Rate,
        None,
    ),
    figure(
        "store",
        "kv-1-node-16",
        "the same, depth 16",
        "kv --backend delegation --nodes 1 --daemons 1 --clients 1 --queue-depth 16 --runs 1",
        Rate,
        Some(ShareAtLeast(0.6)),
    ),
    figure(
        "store",
        "kv-2-nodes-meta",
        "two nodes, no key local, 2 daemons and 4 clients each, depth 4: Meta",
        "kv --backend meta --nodes 2 --daemons 2 --clients 4 --queue-depth 4 --local-share 0 --runs 1",
        Rate,
        None,
    ),
    figure(
        "store",
        "kv-2-nodes-delegation",
        "the same: Delegation",
        "kv --backend delegation --nodes 2 --daemons 2 --clients 4 --queue-depth 4 --local-share 0 --runs 1",
        Rate,
        Some(AtLeast(5.0)),
    ),
];

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
        assert!(AtLeast(2.0).is_met(2.0, None) && !AtLeast(2.0).is_met(1.9, Some(9.0)));
        assert!(ShareAtLeast(0.8).is_met(0.0, Some(0.8)) && !ShareAtLeast(0.8).is_met(9.0, None));
        assert!(ShareAtMost(2.2).is_met(0.0, Some(2.0)) && !ShareAtMost(2.2).is_met(0.0, Some(2.3)));
    }

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::BTreeSet<_> = FIGURES.iter().map(|figure| figure.id).collect();
        assert_eq!(ids.len(), FIGURES.len());
    }
}
