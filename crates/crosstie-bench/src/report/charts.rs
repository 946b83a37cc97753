//! The plots of a report: throughput, latency, batch sizes, scaling. A colour always means a backend; each configuration has its own panel.

use crate::figures::Figures;
use crosstie_kv::Backend;

use super::compare::{Axis, Group, runs};
use super::html::{chip, class, escape};
use super::plot::{PlotLabels, Scale, line, panel, point, x, y};
use crate::units::{percent, scaled, time, times, whole};

/// The axis of a latency plot ends at this many nines: 99.99 %. The table has the maximum.
const NINES: f64 = 4.0;
/// Most labels below the columns of a histogram.
const LABELS: usize = 10;

/// Operations per second: a bar for each result, a dot for each run.
pub(crate) fn bars(groups: &[&Group<'_>]) -> String {
    let all = groups.iter().flat_map(|group| &group.results).flat_map(|figures| {
        let mut all = runs(figures);
        all.push(figures.ops_per_s);
        all
    });
    let scale = Scale::from_zero(all.fold(0.0, f64::max));
    let share = |value: f64| format!("{:.2}%", 100.0 * scale.position(value));
    let ticks = scale.ticks();
    let grid: String = ticks
        .iter()
        .map(|tick| {
            format!("<line class=\"grid\" x1=\"{0}\" x2=\"{0}\" y1=\"0\" y2=\"100%\"/>", share(*tick))
        })
        .collect();
    let mut html = String::from("<div class=\"bars\">\n");
    for group in groups {
        if groups.len() > 1 {
            html += &format!("<h3>{}</h3>\n", escape(&group.label));
        }
        for figures in &group.results {
            let class = class(figures.backend);
            let each = runs(figures);
            let descriptions: Vec<String> = each.iter().map(|rate| scaled(*rate)).collect();
            let words = format!(
                "{}, {}: {} operations per second; runs: {}",
                figures.backend.name(),
                group.label,
                scaled(figures.ops_per_s),
                descriptions.join(", ")
            );
            let dots: String = each
                .iter()
                .zip(&descriptions)
                .enumerate()
                .map(|(at, (rate, text))| {
                    format!(
                        "<circle class=\"run\" cx=\"{}\" cy=\"50%\" r=\"4\"><title>run {}: {text}/s</title></circle>",
                        share(*rate),
                        at + 1
                    )
                })
                .collect();
            html += &format!(
                "<div class=\"bar\">{}<svg class=\"track\" role=\"img\" aria-label=\"{}\">{grid}\
                 <rect class=\"{class}\" x=\"0\" y=\"15%\" width=\"{}\" height=\"70%\" rx=\"2\"/>{dots}</svg>\
                 <b>{}<small>/s</small></b></div>\n",
                chip(figures.backend),
                escape(&words),
                share(figures.ops_per_s),
                scaled(figures.ops_per_s)
            );
        }
    }
    let labels: String = ticks
        .iter()
        .map(|tick| {
            let position = scale.position(*tick);
            let anchor = match position {
                p if p <= 0.0 => "start",
                p if p >= 0.99 => "end",
                _ => "middle",
            };
            format!(
                "<text class=\"tick {anchor}\" x=\"{}\" y=\"14\">{}</text>",
                share(*tick),
                tick_label(*tick)
            )
        })
        .collect();
    html + &format!(
        "<div class=\"bar\" aria-hidden=\"true\"><span></span><svg class=\"scale\">{labels}</svg><span></span></div>\n\
         </div>\n<p class=\"note\">Bar: the median of the runs. Dot: one run. Operations per second, summed over all nodes.</p>\n"
    )
}

/// Rates as shares of the rate of plain code: a bar for each, and a line at 1.
pub(crate) fn shares(shares: &[(String, f64)]) -> String {
    let scale = Scale::from_zero(shares.iter().map(|(_, share)| *share).fold(1.0, f64::max));
    let at = |share: f64| format!("{:.2}%", 100.0 * scale.position(share));
    let plain = at(1.0);
    let bars: String = shares
        .iter()
        .map(|(label, share)| {
            format!(
                "<div class=\"bar wide\"><span>{0}</span><svg class=\"track\" role=\"img\" aria-label=\"{0}: {1}\">\
                 <rect class=\"delegation\" x=\"0\" y=\"15%\" width=\"{2}\" height=\"70%\" rx=\"2\"/>\
                 <line class=\"limit\" x1=\"{plain}\" x2=\"{plain}\" y1=\"0\" y2=\"100%\"/></svg><b>{1}</b></div>\n",
                escape(label),
                times(*share),
                at(*share)
            )
        })
        .collect();
    format!("<div class=\"bars\">\n{bars}</div>\n")
}

/// The latency distributions of the results of a group. `None` if no result has one.
pub(crate) fn latency(id: &str, group: &Group<'_>) -> Option<String> {
    let kept: Vec<&Figures> =
        group.results.iter().copied().filter(|figures| total_count(&figures.latency) > 0).collect();
    let uppers = || {
        kept.iter()
            .flat_map(|figures| figures.latency.iter().filter(|[_, count]| *count > 0))
            .map(|[upper, _]| *upper)
    };
    let (lowest, highest) = (uppers().min()?, uppers().max()?);
    let line_ns = kept.iter().find_map(|figures| figures.limit_ns).filter(|ns| *ns >= 1.0 && ns.is_finite());
    let scale = Scale::around(line_ns.unwrap_or(f64::INFINITY).min(lowest as f64), highest as f64);
    let most = kept.iter().map(|figures| total_count(&figures.latency)).max()?;
    let nines = (most as f64).log10().ceil().clamp(1.0, NINES);
    // Each further unit on this axis stands for one more nine: 90 %, 99 %, 99.9 %.
    let up = |share: f64| (-(1.0 - share).log10() / nines).clamp(0.0, 1.0);
    let mut marks = String::new();
    if let Some(ns) = line_ns {
        let at = x(scale.position(ns));
        marks += &format!(
            "<line class=\"limit\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">one cache line</text>\n",
            y(0.0),
            y(1.0),
            at + 4.0,
            y(1.0) + 10.0
        );
    }
    for figures in &kept {
        let class = class(figures.backend);
        let total = total_count(&figures.latency) as f64;
        let mut points = Vec::new();
        let mut seen = 0u64;
        for [upper, count] in figures.latency.iter().filter(|[_, count]| *count > 0) {
            let across = scale.position(*upper as f64);
            if points.is_empty() {
                points.push((across, 0.0));
            }
            seen += count;
            points.push((across, up(seen as f64 / total)));
            // Ends the line where it leaves the axis.
            if points.last().is_some_and(|(_, up)| *up >= 1.0) {
                break;
            }
        }
        marks += &line(class, &points);
        for (name, share, ns) in
            [("p50", 0.5, figures.p50_ns), ("p99", 0.99, figures.p99_ns), ("p99.9", 0.999, figures.p999_ns)]
        {
            let words = format!("{} {name}: {}", figures.backend.name(), time(ns));
            marks += &point(class, (scale.position(ns as f64), up(share)), 3.5, &words);
        }
    }
    let x_ticks: Vec<_> = scale.ticks().into_iter().map(|ns| (scale.position(ns), time_label(ns))).collect();
    let shares: [f64; 6] = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999];
    let y_ticks: Vec<_> = shares
        .into_iter()
        .filter(|share| -(1.0 - share).log10() <= nines + 0.01)
        .map(|share| (up(share), percent(share)))
        .collect();
    let descriptions: Vec<String> = kept
        .iter()
        .map(|figures| {
            format!(
                "{}: half within {}, 99 % within {}, 99.9 % within {}",
                figures.backend.name(),
                time(figures.p50_ns),
                time(figures.p99_ns),
                time(figures.p999_ns)
            )
        })
        .collect();
    let words = PlotLabels {
        title: if group.is_only { "" } else { &group.label },
        description: &format!("Latency distribution. {}.", descriptions.join(". ")),
        x_axis: "latency, logarithmic",
        y_axis: "operations that took no longer",
    };
    Some(panel(id, &words, &x_ticks, &y_ticks, &marks))
}

/// The batch sizes of the results of a group. `None` if nothing was sent to another node.
pub(crate) fn batches(id: &str, group: &Group<'_>) -> Option<String> {
    let kept: Vec<&Figures> =
        group.results.iter().copied().filter(|figures| total_count(&figures.batches) > 0).collect();
    let largest = kept
        .iter()
        .flat_map(|figures| figures.batches.iter().filter(|[_, count]| *count > 0))
        .map(|[upper, _]| *upper)
        .max()?;
    let columns = largest.max(1).ilog2() as usize + 1;
    let shares: Vec<Vec<f64>> = kept
        .iter()
        .map(|figures| {
            let mut shares = vec![0.0; columns];
            for [upper, count] in figures.batches.iter().filter(|[_, count]| *count > 0) {
                shares[(*upper).max(1).ilog2() as usize] +=
                    *count as f64 / total_count(&figures.batches) as f64;
            }
            shares
        })
        .collect();
    let scale = Scale::from_zero(shares.iter().flatten().copied().fold(0.0, f64::max).max(0.04));
    let slot = 1.0 / columns as f64;
    let width = slot * 0.76 / kept.len() as f64;
    let mut marks = String::new();
    for (nth, (figures, shares)) in kept.iter().zip(&shares).enumerate() {
        for (at, share) in shares.iter().enumerate().filter(|(_, share)| **share > 0.0) {
            let left = x(slot * (at as f64 + 0.12) + width * nth as f64);
            let gap = if kept.len() > 1 { 1.0 } else { 0.0 };
            let top = y(scale.position(*share)).min(y(0.0) - 1.0);
            let words = format!(
                "{}: {:.1} % of all WRITEs carried {}",
                figures.backend.name(),
                100.0 * share,
                sizes(at)
            );
            marks += &format!(
                "<rect class=\"{}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"1.5\"><title>{}</title></rect>\n",
                class(figures.backend),
                (x(width) - x(0.0) - gap).max(0.5),
                y(0.0) - top,
                escape(&words)
            );
        }
    }
    let every = columns.div_ceil(LABELS);
    let x_ticks: Vec<_> =
        (0..columns).step_by(every).map(|at| (slot * (at as f64 + 0.5), sizes(at))).collect();
    let y_ticks: Vec<_> =
        scale.ticks().into_iter().map(|share| (scale.position(share), percent(share))).collect();
    let descriptions: Vec<String> = kept
        .iter()
        .map(|figures| {
            let most = figures
                .batches
                .iter()
                .max_by_key(|[_, count]| *count)
                .map_or(0, |[upper, _]| (*upper).max(1).ilog2());
            format!(
                "{}: {} WRITEs, most often of {} messages",
                figures.backend.name(),
                whole(total_count(&figures.batches)),
                sizes(most as usize)
            )
        })
        .collect();
    let words = PlotLabels {
        title: if group.is_only { "" } else { &group.label },
        description: &format!("Messages per WRITE. {}.", descriptions.join(". ")),
        x_axis: "messages in one WRITE",
        y_axis: "share of all WRITEs",
    };
    Some(panel(id, &words, &x_ticks, &y_ticks, &marks))
}

/// The range of batch sizes of a bucket.
pub(crate) fn sizes(bucket: usize) -> String {
    let upper = 1u128 << bucket;
    if bucket < 2 { upper.to_string() } else { format!("{}–{upper}", upper / 2 + 1) }
}

/// Operations per second depending on one parameter, with all others equal.
pub(crate) fn scaling(
    id: &str,
    axis: &Axis<'_, '_>,
    (rest, points): &(String, Vec<(f64, &Group<'_>)>),
) -> String {
    let numbers = || points.iter().map(|(number, _)| *number);
    let (lowest, highest) = (numbers().fold(f64::INFINITY, f64::min), numbers().fold(0.0, f64::max));
    let across = if lowest > 0.0 && highest >= 4.0 * lowest {
        Scale::Log(lowest, highest)
    } else {
        Scale::Linear(lowest, highest)
    };
    // Keeps the points away from the frame.
    let across = |number: f64| 0.06 + 0.88 * across.position(number);
    let all = points.iter().flat_map(|(_, group)| &group.results).flat_map(|figures| runs(figures));
    let scale = Scale::from_zero(all.fold(0.0, f64::max));
    let mut marks = String::new();
    let mut descriptions = Vec::new();
    for backend in [Backend::Meta, Backend::Delegation] {
        let class = class(backend);
        let of: Vec<(f64, &Figures)> = points
            .iter()
            .flat_map(|(number, group)| group.of(backend).map(move |figures| (*number, figures)))
            .collect();
        let medians: Vec<(f64, f64)> =
            of.iter().map(|(number, figures)| (across(*number), scale.position(figures.ops_per_s))).collect();
        marks += &line(class, &medians);
        for ((number, figures), position) in of.iter().zip(medians) {
            for rate in runs(figures) {
                let words = format!("{}, one run: {}/s", backend.name(), scaled(rate));
                marks +=
                    &point(&format!("faint {class}"), (across(*number), scale.position(rate)), 2.5, &words);
            }
            let words =
                format!("{}, {} {number}: {}/s", backend.name(), axis.name, scaled(figures.ops_per_s));
            marks += &point(class, position, 4.0, &words);
            descriptions.push(words);
        }
    }
    let mut x_ticks: Vec<(f64, String)> = Vec::new();
    for (number, group) in points {
        let position = across(*number);
        if x_ticks.last().is_none_or(|(last, _)| position - last > 0.09) {
            x_ticks.push((position, group.facts[axis.at].value.clone()));
        }
    }
    let y_ticks: Vec<_> =
        scale.ticks().into_iter().map(|rate| (scale.position(rate), tick_label(rate))).collect();
    let title =
        format!("By {}{}", axis.name, if rest.is_empty() { String::new() } else { format!(": {rest}") });
    let words = PlotLabels {
        title: &title,
        description: &format!("Operations per second. {}.", descriptions.join("; ")),
        x_axis: axis.name,
        y_axis: "operations per second",
    };
    panel(id, &words, &x_ticks, &y_ticks, &marks)
}

fn total_count(buckets: &[[u64; 2]]) -> u64 {
    buckets.iter().fold(0, |sum, [_, count]| sum.saturating_add(*count))
}

/// A rate without trailing zeros.
fn tick_label(rate: f64) -> String {
    trim_zeros(&scaled(rate))
}

/// A time without trailing zeros.
fn time_label(ns: f64) -> String {
    trim_zeros(&time(ns as u64))
}

fn trim_zeros(label: &str) -> String {
    let (figure, unit) = label.split_once(' ').unwrap_or((label, ""));
    let figure =
        if figure.contains('.') { figure.trim_end_matches('0').trim_end_matches('.') } else { figure };
    format!("{figure} {unit}").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_buckets_and_ticks_are_short() {
        assert_eq!([0, 1, 2, 3, 6].map(sizes), ["1", "2", "3–4", "5–8", "33–64"]);
        assert_eq!(sizes(63), format!("{}–{}", (1u64 << 62) + 1, 1u64 << 63));
        assert_eq!([0.0, 2.5e6, 1e7, 500.0].map(tick_label), ["0", "2.5 M", "10 M", "500"]);
        assert_eq!([200.0, 1000.0, 50_000.0].map(time_label), ["200 ns", "1 µs", "50 µs"]);
    }
}
