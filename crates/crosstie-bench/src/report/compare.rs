//! Groups results that differ in the backend only, finds what varies between the groups, and compares the backends.

use crate::figures::{Figures, LoopKind};
use crosstie_kv::Backend;

use crate::median::median;
use crate::units;

/// A result is worth a warning if its fastest run is more than this many times its slowest.
const SPREAD: f64 = 1.5;
/// An open loop that completes less than this share of its rate is overloaded.
const OVERLOADED: f64 = 0.95;

/// One parameter of a result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fact {
    /// Its name.
    pub(crate) name: &'static str,
    /// Its value with its unit, for example `2 nodes`.
    pub(crate) words: String,
    /// Its value without the unit.
    pub(crate) value: String,
    /// Its value as a number, if it can be the axis of a plot.
    pub(crate) number: Option<f64>,
}

/// How many [`facts`] there are.
pub(crate) const FACTS: usize = 14;

/// All parameters that must be equal for two results to be comparable, the most important ones first.
pub(crate) fn facts(figures: &Figures) -> [Fact; FACTS] {
    let Figures { nodes, daemons, clients, queue_depth, keys, value_bytes, zipf, read_ratio, .. } = *figures;
    let count = |name, count: u32, one: &str, many: &str| Fact {
        name,
        words: format!("{count} {}", if count == 1 { one } else { many }),
        value: count.to_string(),
        number: Some(f64::from(count)),
    };
    let figure =
        |name, words: String, value: String, number: f64| Fact { name, words, value, number: Some(number) };
    let word = |name, words: String| Fact { name, value: words.clone(), words, number: None };
    [
        count("nodes", nodes, "node", "nodes"),
        count("daemons per node", daemons, "daemon", "daemons"),
        count("clients per node", clients, "client", "clients"),
        figure(
            "queue depth",
            format!("depth {queue_depth}"),
            queue_depth.to_string(),
            f64::from(queue_depth),
        ),
        word("clients are", if figures.processes { "processes" } else { "threads" }.into()),
        match (figures.loop_kind, figures.rate) {
            (LoopKind::Open, Some(rate)) => figure(
                "loop",
                format!("open loop at {}/s", units::scaled(rate)),
                format!("open, {}/s", units::scaled(rate)),
                rate,
            ),
            (LoopKind::Open, None) => word("loop", "open".into()),
            (LoopKind::Closed, _) => word("loop", "closed".into()),
        },
        figure(
            "share of gets",
            format!("{} gets", units::percent(read_ratio)),
            units::percent(read_ratio),
            read_ratio,
        ),
        figure("keys", format!("{} keys", units::whole(keys)), units::whole(keys), keys as f64),
        if zipf == 0.0 {
            figure("choice of keys", "uniform".into(), "uniform".into(), 0.0)
        } else {
            figure("choice of keys", format!("Zipf {zipf}"), format!("Zipf {zipf}"), zipf)
        },
        figure(
            "value size",
            format!("{value_bytes} B values"),
            format!("{value_bytes} B"),
            value_bytes as f64,
        ),
        match figures.local_share {
            Some(share) => figure(
                "local share",
                format!("{} local", units::percent(share)),
                units::percent(share),
                share,
            ),
            None => word("local share", "as the keys are distributed".into()),
        },
        word("device", figures.device.clone()),
        word("launcher", figures.launcher.clone()),
        word("machine", figures.machine.clone()),
    ]
}

/// Results with equal parameters: they differ in the backend at most. There is at least one.
pub(crate) struct Group<'a> {
    /// The parameters that differ from the other groups; the size of the cluster if it is the only group.
    pub(crate) label: String,
    /// Whether it is the only group, so that plots need no label.
    pub(crate) is_only: bool,
    pub(crate) facts: [Fact; FACTS],
    /// Those of Meta first.
    pub(crate) results: Vec<&'a Figures>,
}

/// All results in groups.
pub(crate) struct Comparison<'a> {
    pub(crate) groups: Vec<Group<'a>>,
    /// For each fact, whether the groups differ in it.
    pub(crate) varies: [bool; FACTS],
}

impl<'a> Comparison<'a> {
    pub(crate) fn new(results: &'a [Figures]) -> Comparison<'a> {
        let mut groups: Vec<Group<'a>> = Vec::new();
        for figures in results {
            let facts = facts(figures);
            match groups.iter_mut().find(|group| group.facts == facts) {
                Some(group) => group.results.push(figures),
                None => {
                    groups.push(Group { label: String::new(), is_only: false, facts, results: vec![figures] })
                }
            }
        }
        let varies = std::array::from_fn(|at| {
            groups.windows(2).any(|pair| pair[0].facts[at].value != pair[1].facts[at].value)
        });
        let is_only = groups.len() == 1;
        for group in &mut groups {
            group.is_only = is_only;
            group.results.sort_by_key(|figures| figures.backend);
            group.label = label(&group.facts, &varies);
        }
        groups.sort_by(|one, other| {
            let sort_key =
                |group: &Group<'_>| group.facts.clone().map(|fact| fact.number.unwrap_or(f64::INFINITY));
            let pairs = sort_key(one).into_iter().zip(sort_key(other));
            pairs
                .map(|(one, other)| one.total_cmp(&other))
                .find(|order| order.is_ne())
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        Comparison { groups, varies }
    }

    /// The result with the highest throughput, and its group.
    pub(crate) fn best(&self) -> Option<(&Group<'a>, &'a Figures)> {
        let all =
            self.groups.iter().flat_map(|group| group.results.iter().map(move |figures| (group, *figures)));
        all.max_by(|(_, one), (_, other)| one.ops_per_s.total_cmp(&other.ops_per_s))
    }

    /// The facts that can be the axis of a plot because groups differ in them, with the groups along each axis.
    pub(crate) fn axes(&self) -> Vec<Axis<'_, 'a>> {
        let mut axes = Vec::new();
        for at in (0..FACTS).filter(|at| self.varies[*at]) {
            let mut lines: Vec<(String, Vec<(f64, &Group<'a>)>)> = Vec::new();
            for group in &self.groups {
                let Some(number) = group.facts[at].number else { continue };
                let mut others = self.varies;
                others[at] = false;
                let rest = describe(&group.facts, &others);
                match lines.iter_mut().find(|(label, _)| *label == rest) {
                    Some((_, points)) => points.push((number, group)),
                    None => lines.push((rest, vec![(number, group)])),
                }
            }
            lines.retain(|(_, points)| points.len() >= 2);
            for (_, points) in &mut lines {
                points.sort_by(|(one, _), (other, _)| one.total_cmp(other));
            }
            if let Some(name) =
                self.groups.first().map(|group| group.facts[at].name).filter(|_| !lines.is_empty())
            {
                axes.push(Axis { at, name, panels: lines });
            }
        }
        axes
    }

    /// What a reader must know about the quality of the results, the severe warnings first.
    pub(crate) fn warnings(&self) -> Vec<Warning> {
        let (mut severe, mut mild) = (Vec::new(), Vec::new());
        for (group, figures) in
            self.groups.iter().flat_map(|group| group.results.iter().map(move |each| (group, each)))
        {
            let subject = format!("{}, {}", figures.backend.name(), group.label);
            let mut add =
                |what: String| severe.push(Warning { severe: true, text: format!("{subject}: {what}") });
            if figures.errors > 0 {
                add(format!(
                    "{} of {} operations got a wrong response or none.",
                    figures.errors, figures.ops
                ));
            }
            if figures.node_gone > 0 {
                add(format!(
                    "{} of {} operations ended because a node was gone.",
                    figures.node_gone, figures.ops
                ));
            }
            if figures.interrupted {
                add("interrupted: the figures cover the time until then.".into());
            }
            if let Some(rate) = figures.rate.filter(|rate| figures.ops_per_s < OVERLOADED * rate) {
                add(format!(
                    "overloaded: {}/s of {}/s were done, and {} operations had not started at the end. Latencies are mostly waiting time: \
                     give a lower rate.",
                    units::scaled(figures.ops_per_s),
                    units::scaled(rate),
                    figures.counters.get("not_started").unwrap_or(&0)
                ));
            }
            let used = figures.counters.get("keys_used").filter(|_| figures.zipf == 0.0);
            if let Some(used) = used.filter(|used| **used < figures.keys / 10 * 9) {
                let text = format!(
                    "{subject}: the clients use about {used} of the {} keys: use more clients.",
                    figures.keys
                );
                mild.push(Warning { severe: false, text });
            }
            let spread = highest(figures) / lowest(figures);
            if spread > SPREAD {
                let what = if spread.is_finite() {
                    format!(
                        "the fastest run was {spread:.2} times the slowest: repeat it on an idle machine."
                    )
                } else {
                    "one run completed no operation.".into()
                };
                mild.push(Warning { severe: false, text: format!("{subject}: {what}") });
            }
        }
        for group in self.groups.iter().filter(|group| group.results.len() > 1) {
            let bytes = group.results[0].value_bytes;
            if bytes != 8 && group.results[0].nodes > 1 {
                let text = format!(
                    "{}: with values of {bytes} bytes requests take the same way with both backends; their ratio compares nothing.",
                    group.label
                );
                mild.push(Warning { severe: false, text });
            }
        }
        severe.append(&mut mild);
        severe
    }
}

/// The lowest and the highest ratio of two successive runs of one result: what the same code differs from itself. `None` with one run.
pub(crate) fn same_code_ratios(figures: &Figures) -> Option<[f64; 2]> {
    let rates = figures.runs.iter().map(|run| run.ops_per_s);
    let ratios = rates.clone().zip(rates.skip(1)).filter(|(a, _)| *a > 0.0).map(|(a, b)| b / a);
    let range = ratios.fold([f64::INFINITY, 0.0], |[low, high], ratio| [low.min(ratio), ratio.max(high)]);
    (range[0] <= range[1]).then_some(range)
}

/// See [`Comparison::warnings`].
pub(crate) struct Warning {
    pub(crate) severe: bool,
    pub(crate) text: String,
}

/// See [`Comparison::axes`].
pub(crate) struct Axis<'c, 'a> {
    /// Index of the fact.
    pub(crate) at: usize,
    pub(crate) name: &'static str,
    /// For each plot: what all its points share, and the points in ascending order.
    pub(crate) panels: Vec<(String, Vec<(f64, &'c Group<'a>)>)>,
}

/// The throughput of Delegation divided by that of Meta.
pub(crate) struct Ratio {
    /// The ratio of the medians.
    pub(crate) ratio: f64,
    /// The ratio of the first runs, of the second runs and so on; empty if the runs cannot be paired.
    pub(crate) by_run: Vec<f64>,
    /// Whether the results show a difference between the backends, see [`shows_difference`].
    pub(crate) is_difference: bool,
}

/// Ratios of the medians this close to 1 are never a difference.
const MIN_DIFFERENCE: f64 = 0.02;

/// Whether runs of two backends show a difference: the same backend was faster in every pair of runs. Runs that cannot be paired
/// must not overlap: the slowest run of one is faster than the fastest of the other. A ratio of the medians within 2 % of 1 is no
/// difference in any case.
fn shows_difference(ratio: f64, by_run: &[f64], metas: &[f64], delegations: &[f64]) -> bool {
    if (ratio - 1.0).abs() <= MIN_DIFFERENCE {
        return false;
    }
    if !by_run.is_empty() {
        return by_run.iter().all(|ratio| *ratio > 1.0) || by_run.iter().all(|ratio| *ratio < 1.0);
    }
    let min = |rates: &[f64]| rates.iter().copied().fold(f64::INFINITY, f64::min);
    let max = |rates: &[f64]| rates.iter().copied().fold(0.0, f64::max);
    min(delegations) > max(metas) || min(metas) > max(delegations)
}

impl Group<'_> {
    pub(crate) fn of(&self, backend: Backend) -> impl Iterator<Item = &Figures> {
        self.results.iter().copied().filter(move |figures| figures.backend == backend)
    }

    /// Compares the backends; `None` unless both were measured and Meta completed operations.
    pub(crate) fn ratio(&self) -> Option<Ratio> {
        let median_of = |backend| median(self.of(backend).map(|figures| figures.ops_per_s));
        let ratio = median_of(Backend::Delegation)? / median_of(Backend::Meta)?;
        let pool = |backend| -> Vec<f64> { self.of(backend).flat_map(runs).collect() };
        let (metas, delegations) = (pool(Backend::Meta), pool(Backend::Delegation));
        let paired = metas.len() == delegations.len() && metas.len() > 1;
        let by_run = delegations.iter().zip(&metas).map(|(delegation, meta)| delegation / meta);
        let by_run: Vec<f64> = by_run.filter(|ratio| paired && ratio.is_finite()).collect();
        let is_difference = shows_difference(ratio, &by_run, &metas, &delegations);
        ratio.is_finite().then_some(Ratio { ratio, by_run, is_difference })
    }
}

/// Operations per second of every run; the median if the runs were not kept.
pub(crate) fn runs(figures: &Figures) -> Vec<f64> {
    if figures.runs.is_empty() {
        vec![figures.ops_per_s]
    } else {
        figures.runs.iter().map(|run| run.ops_per_s).collect()
    }
}

/// Operations per second of the fastest run.
pub(crate) fn highest(figures: &Figures) -> f64 {
    runs(figures).into_iter().fold(0.0, f64::max)
}

/// Operations per second of the slowest run.
pub(crate) fn lowest(figures: &Figures) -> f64 {
    runs(figures).into_iter().fold(f64::INFINITY, f64::min)
}

/// Average number of messages in one WRITE.
pub(crate) fn per_write(figures: &Figures) -> Option<f64> {
    let (batched, batches) = (*figures.counters.get("batched")?, *figures.counters.get("batches")?);
    (batches > 0).then(|| batched as f64 / batches as f64)
}

/// The chosen facts as text; if none is chosen, the first four, which give the size of the cluster.
fn label(facts: &[Fact; FACTS], chosen: &[bool; FACTS]) -> String {
    let first: [bool; FACTS] = std::array::from_fn(|at| at < 4);
    describe(facts, if chosen.contains(&true) { chosen } else { &first })
}

/// The chosen facts as text.
fn describe(facts: &[Fact; FACTS], chosen: &[bool; FACTS]) -> String {
    let chosen = facts.iter().zip(chosen).filter(|(_, chosen)| **chosen);
    chosen.map(|(fact, _)| fact.words.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::shows_difference;

    #[test]
    fn difference_needs_the_same_winner_in_every_pair_of_runs() {
        let is_difference =
            |ratio, by_run: &[f64]| shows_difference(ratio, by_run, &[1.0, 1.0, 1.0], &[1.0, 1.0, 1.0]);
        assert!(is_difference(1.5, &[1.5, 1.4, 2.0]));
        assert!(is_difference(0.7, &[0.7, 0.9, 0.6]));
        // One run disagrees: 1 is inside the range of the ratios.
        assert!(!is_difference(1.5, &[1.5, 0.99, 2.0]));
        assert!(!is_difference(0.7, &[0.7, 1.01, 0.6]));
        assert!(!is_difference(1.5, &[1.5, 1.0]));
        // Consistent but small.
        assert!(!is_difference(1.01, &[1.01, 1.02, 1.005]));
    }

    #[test]
    fn runs_that_cannot_be_paired_must_not_overlap() {
        let is_difference =
            |metas: &[f64], delegations: &[f64]| shows_difference(1.5, &[], metas, delegations);
        assert!(is_difference(&[1.0, 1.1], &[1.5, 1.6, 1.2]));
        assert!(is_difference(&[1.5, 1.6, 1.2], &[1.0, 1.1]));
        assert!(!is_difference(&[1.0, 1.3], &[1.5, 1.6, 1.2]));
        // One run each.
        assert!(is_difference(&[1.0], &[1.5]));
    }
}
