//! What results have in common, what varies among them, and how the backends compare where all else is equal.

use crate::figures::{Figures, LoopKind};
use crosstie_kv::Backend;

use crate::summary::median;
use crate::units;

/// Runs of one result that differ by more than this factor are worth a warning.
const SPREAD: f64 = 1.5;

/// Something that was asked of a result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fact {
    /// What it is called.
    pub(crate) name: &'static str,
    /// Its value in words, for example `2 nodes`.
    pub(crate) words: String,
    /// Its value alone.
    pub(crate) value: String,
    /// Its value where it can be an axis.
    pub(crate) number: Option<f64>,
}

/// How many [`facts`] there are.
pub(crate) const FACTS: usize = 14;

/// All that must be equal for two results to be comparable, what people ask for first at the front.
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
            None => word("local share", "as keys fall".into()),
        },
        word("device", figures.device.clone()),
        word("launcher", figures.launcher.clone()),
        word("machine", figures.machine.clone()),
    ]
}

/// Results that differ by backend at most; at least one.
pub(crate) struct Group<'a> {
    /// What tells it from the other groups, or what it is where it is the only one.
    pub(crate) label: String,
    /// Whether it is the only one, so that its label says nothing.
    pub(crate) alone: bool,
    pub(crate) facts: [Fact; FACTS],
    /// Meta first.
    pub(crate) results: Vec<&'a Figures>,
}

/// All results, sorted out.
pub(crate) struct Comparison<'a> {
    pub(crate) groups: Vec<Group<'a>>,
    /// Whether the groups differ in a fact.
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
                    groups.push(Group { label: String::new(), alone: false, facts, results: vec![figures] })
                }
            }
        }
        let varies = std::array::from_fn(|at| {
            groups.windows(2).any(|pair| pair[0].facts[at].value != pair[1].facts[at].value)
        });
        let alone = groups.len() == 1;
        for group in &mut groups {
            group.alone = alone;
            group.results.sort_by_key(|figures| figures.backend);
            group.label = label(&group.facts, &varies);
        }
        groups.sort_by(|one, other| {
            let places =
                |group: &Group<'_>| group.facts.clone().map(|fact| fact.number.unwrap_or(f64::INFINITY));
            let pairs = places(one).into_iter().zip(places(other));
            pairs
                .map(|(one, other)| one.total_cmp(&other))
                .find(|order| order.is_ne())
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        Comparison { groups, varies }
    }

    /// The result with the most operations per second, and its group.
    pub(crate) fn best(&self) -> Option<(&Group<'a>, &'a Figures)> {
        let all =
            self.groups.iter().flat_map(|group| group.results.iter().map(move |figures| (group, *figures)));
        all.max_by(|(_, one), (_, other)| one.ops_per_s.total_cmp(&other.ops_per_s))
    }

    /// Facts in which groups differ and which can be an axis, by index, and the groups along it with all else equal.
    pub(crate) fn axes(&self) -> Vec<Axis<'_, 'a>> {
        let mut axes = Vec::new();
        for at in (0..FACTS).filter(|at| self.varies[*at]) {
            let mut lines: Vec<(String, Vec<(f64, &Group<'a>)>)> = Vec::new();
            for group in &self.groups {
                let Some(number) = group.facts[at].number else { continue };
                let mut others = self.varies;
                others[at] = false;
                let rest = words(&group.facts, &others);
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

    /// What a reader must know before believing a figure: severe things first.
    pub(crate) fn warnings(&self) -> Vec<Warning> {
        let (mut severe, mut mild) = (Vec::new(), Vec::new());
        for (group, figures) in
            self.groups.iter().flat_map(|group| group.results.iter().map(move |each| (group, each)))
        {
            let who = format!("{}, {}", figures.backend.name(), group.label);
            let mut say =
                |what: String| severe.push(Warning { severe: true, text: format!("{who}: {what}") });
            if figures.errors > 0 {
                say(format!("{} of {} operations had a wrong answer or none.", figures.errors, figures.ops));
            }
            if figures.node_gone > 0 {
                say(format!(
                    "{} of {} operations ended because a node was gone.",
                    figures.node_gone, figures.ops
                ));
            }
            if figures.interrupted {
                say("interrupted; the figures are those until then.".into());
            }
            let spread = highest(figures) / lowest(figures);
            if spread > SPREAD {
                let what = if spread.is_finite() {
                    format!(
                        "the fastest run was {spread:.2} times the slowest; repeat it on a quiet machine."
                    )
                } else {
                    "a run got nothing done.".into()
                };
                mild.push(Warning { severe: false, text: format!("{who}: {what}") });
            }
        }
        severe.append(&mut mild);
        severe
    }
}

/// See [`Comparison::warnings`].
pub(crate) struct Warning {
    pub(crate) severe: bool,
    pub(crate) text: String,
}

/// See [`Comparison::axes`].
pub(crate) struct Axis<'c, 'a> {
    /// Which fact.
    pub(crate) at: usize,
    pub(crate) name: &'static str,
    /// What all points of a panel share, and the points in order.
    pub(crate) panels: Vec<(String, Vec<(f64, &'c Group<'a>)>)>,
}

/// Delegation beside Meta.
pub(crate) struct Ratio {
    /// Of the medians.
    pub(crate) ratio: f64,
    /// Of the first runs, the second runs and so on; empty where they cannot be paired.
    pub(crate) by_run: Vec<f64>,
}

impl Group<'_> {
    pub(crate) fn of(&self, backend: Backend) -> impl Iterator<Item = &Figures> {
        self.results.iter().copied().filter(move |figures| figures.backend == backend)
    }

    /// `None` unless both backends were measured, and Meta did something.
    pub(crate) fn ratio(&self) -> Option<Ratio> {
        let middle = |backend| median(self.of(backend).map(|figures| figures.ops_per_s));
        let ratio = middle(Backend::Delegation)? / middle(Backend::Meta)?;
        let pool = |backend| -> Vec<f64> { self.of(backend).flat_map(runs).collect() };
        let (metas, delegations) = (pool(Backend::Meta), pool(Backend::Delegation));
        let paired = metas.len() == delegations.len() && metas.len() > 1;
        let by_run = delegations.iter().zip(&metas).map(|(delegation, meta)| delegation / meta);
        let by_run = by_run.filter(|ratio| paired && ratio.is_finite()).collect();
        Some(Ratio { ratio, by_run }).filter(|ratio| ratio.ratio.is_finite())
    }
}

/// Operations per second of every run; the total where runs were not kept.
pub(crate) fn runs(figures: &Figures) -> Vec<f64> {
    if figures.runs.is_empty() {
        vec![figures.ops_per_s]
    } else {
        figures.runs.iter().map(|run| run.ops_per_s).collect()
    }
}

/// The fastest run.
pub(crate) fn highest(figures: &Figures) -> f64 {
    runs(figures).into_iter().fold(0.0, f64::max)
}

/// The slowest run.
pub(crate) fn lowest(figures: &Figures) -> f64 {
    runs(figures).into_iter().fold(f64::INFINITY, f64::min)
}

/// Messages that a WRITE carried on average.
pub(crate) fn per_write(figures: &Figures) -> Option<f64> {
    let (batched, batches) = (*figures.counters.get("batched")?, *figures.counters.get("batches")?);
    (batches > 0).then(|| batched as f64 / batches as f64)
}

/// The chosen facts; the first four, which say how large it all was, where none is.
fn label(facts: &[Fact; FACTS], chosen: &[bool; FACTS]) -> String {
    let first: [bool; FACTS] = std::array::from_fn(|at| at < 4);
    words(facts, if chosen.contains(&true) { chosen } else { &first })
}

/// The chosen facts.
fn words(facts: &[Fact; FACTS], chosen: &[bool; FACTS]) -> String {
    let chosen = facts.iter().zip(chosen).filter(|(_, chosen)| **chosen);
    chosen.map(|(fact, _)| fact.words.as_str()).collect::<Vec<_>>().join(", ")
}
