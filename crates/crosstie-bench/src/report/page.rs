//! The page: one sentence with the result, then plots with their tables, then all details.

use std::collections::BTreeSet;

use crate::demo::{self, EXPLANATION, Measured};
use crate::figures::Figures;
use crosstie_kv::Backend;

use super::compare::{Comparison, Group, Ratio, highest, lowest, per_write, runs};
use super::html::{Cell, chip, escape, table};
use super::{charts, compare};
use crate::units::{NONE, bytes, scaled, seconds, time, times, whole};

/// Limit of plots of one kind: a page with more is not readable. The tables have all results.
const PANELS: usize = 24;
/// Limit of warnings that are shown one by one.
const WARNINGS: usize = 20;
const STYLE: &str = include_str!("style.css");

/// The whole page.
pub(crate) fn page(results: &[Figures]) -> String {
    let comparison = Comparison::new(results);
    let body = [
        headline(&comparison),
        warnings(&comparison),
        throughput(&comparison),
        scaling(&comparison),
        latency(&comparison),
        batches(&comparison),
        configuration(&comparison),
        details(&comparison),
    ]
    .concat();
    let source = count(results.len(), "result", "results");
    document("Crosstie key-value store: benchmark", &body, &format!("from {source}"))
}

/// The page of the demo: a table of all parts, then the store's results.
pub(crate) fn demo_page(measured: &[Measured], store: &[Figures]) -> String {
    let comparison = Comparison::new(store);
    let machine = store.first().map_or_else(String::new, |figures| format!("{} · ", figures.machine));
    let header = format!(
        "<header><h1>What Crosstie does, and how fast on this machine</h1>\n<p>{}software device: shared memory, no RDMA NIC</p></header>\n",
        escape(&machine)
    );
    let rows: Vec<Vec<Cell>> = demo::rows(measured)
        .into_iter()
        .map(|[part, what, median, rate, compared]| {
            let figures = [Cell::Figure(median), Cell::Figure(rate)];
            [Cell::Text(part), Cell::Text(what)]
                .into_iter()
                .chain(figures)
                .chain([Cell::Text(compared)])
                .collect()
        })
        .collect();
    let lines = measured.iter().flat_map(|part| part.lines.iter().map(move |line| (part, line)));
    let shares: Vec<(String, f64)> = lines
        .filter_map(|(part, line)| Some((format!("{}: {}", part.name, part.what), line.share?)))
        .collect();
    let commands: Vec<Vec<Cell>> = measured
        .iter()
        .map(|part| vec![Cell::Text(part.what.to_owned()), Cell::Text(part.command.clone())])
        .collect();
    let body = [
        header,
        section("Parts", EXPLANATION, &table("Medians of one short run each", &demo::HEADS, &rows)),
        section("Beside plain code", "The line is plain code, or memcpy: 1.", &charts::shares(&shares)),
        section(
            "Store",
            "Get and put of 8 bytes between two nodes, with both backends: the next sections.",
            "",
        ),
        throughput(&comparison),
        latency(&comparison),
        batches(&comparison),
        section(
            "Repeat a line",
            "",
            &table("The command of each line", &["what was measured", "command"], &commands),
        ),
    ]
    .concat();
    document("Crosstie: demo", &body, "by crosstie demo")
}

/// A whole document. `body` is HTML; the rest is text.
fn document(title: &str, body: &str, origin: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\
         <footer>Made by crosstie {} {}.</footer>\n</main>\n</body>\n</html>\n",
        escape(title),
        env!("CARGO_PKG_VERSION"),
        escape(origin),
    )
}

fn headline(comparison: &Comparison<'_>) -> String {
    let Some((group, best)) = comparison.best() else {
        return "<header><h1>Nothing was measured</h1><p>There are no results to show.</p></header>\n".into();
    };
    let ratios: Vec<Ratio> = comparison.groups.iter().filter_map(Group::ratio).collect();
    let title = match ratios.as_slice() {
        [] => format!("{} operations per second with {}", scaled(best.ops_per_s), best.backend.name()),
        [ratio] => compare_backends(ratio),
        ratios if ratios.iter().all(|ratio| !ratio.is_difference) => {
            format!("No difference seen between Delegation and Meta in {} configurations", ratios.len())
        }
        _ => {
            let each = || ratios.iter().map(|ratio| ratio.ratio);
            let (low, high) = (each().fold(f64::INFINITY, f64::min), each().fold(0.0, f64::max));
            let equal = ratios.iter().filter(|ratio| !ratio.is_difference).count();
            let equal = match equal {
                0 => String::new(),
                equal => format!("; no difference seen in {equal} of {} configurations", ratios.len()),
            };
            format!("Delegation makes {low:.2} to {high:.2} times the operations of Meta{equal}")
        }
    };
    let mut tiles = vec![tile(
        "Best throughput",
        &format!("{}<small>/s</small>", scaled(best.ops_per_s)),
        &format!("{}, {}", best.backend.name(), group.label),
        false,
    )];
    if let Some(ratio) = group.ratio() {
        let each: Vec<String> = ratio.by_run.iter().take(8).map(|ratio| format!("{ratio:.2}")).collect();
        let more = if ratio.by_run.len() > each.len() { " …" } else { "" };
        let runs = if each.is_empty() {
            "medians of all runs".into()
        } else {
            format!("run by run: {}{more}", each.join(", "))
        };
        if ratio.is_difference {
            tiles.push(tile("Delegation / Meta, same setting", &times(ratio.ratio), &runs, false));
        } else {
            let words = format!("{} of the medians; {runs}", times(ratio.ratio));
            tiles.push(tile("Delegation / Meta, same setting", "no difference seen", &words, false));
        }
    }
    tiles.push(tile(
        "Median latency",
        &time(best.p50_ns),
        &format!(
            "{}, 99 % within {}, all within {}",
            best.backend.name(),
            time(best.p99_ns),
            time(best.max_ns)
        ),
        false,
    ));
    let all = || comparison.groups.iter().flat_map(|group| &group.results);
    let sum =
        |count: fn(&Figures) -> u64| all().fold(0u64, |sum, figures| sum.saturating_add(count(figures)));
    let (ops, errors, gone) = (sum(|each| each.ops), sum(|each| each.errors), sum(|each| each.node_gone));
    let gone_words =
        if gone > 0 { format!(", {} ended because a node was gone", whole(gone)) } else { String::new() };
    tiles.push(tile(
        "Errors",
        &whole(errors),
        &format!("of {} operations in all{gone_words}", scaled(ops as f64)),
        errors > 0 || gone > 0,
    ));
    let common: Vec<String> = ["device", "machine"]
        .into_iter()
        .filter_map(|name| {
            let at = group.facts.iter().position(|fact| fact.name == name)?;
            let value = &group.facts[at].value;
            (!comparison.varies[at] && !value.is_empty())
                .then(|| if name == "device" { format!("{value} device") } else { value.clone() })
        })
        .collect();
    let sub = [vec!["Crosstie key-value store".to_owned()], common].concat().join(" · ");
    format!(
        "<header><h1>{}</h1>\n<p>{}</p></header>\n<ul class=\"tiles\">\n{}</ul>\n",
        escape(&title),
        escape(&sub),
        tiles.concat()
    )
}

fn compare_backends(ratio: &Ratio) -> String {
    match ratio.ratio {
        _ if !ratio.is_difference => "No difference seen between Delegation and Meta".into(),
        r if r > 1.0 => format!("Delegation makes {r:.2} times the operations of Meta"),
        r if r > 0.0 => format!("Meta makes {:.2} times the operations of Delegation", 1.0 / r),
        _ => "Delegation completed no operation".into(),
    }
}

/// `value` is HTML; the rest is text.
fn tile(name: &str, value: &str, words: &str, is_bad: bool) -> String {
    let class = if is_bad { " class=\"is-bad\"" } else { "" };
    format!(
        "<li{class}><span>{}</span><strong>{value}</strong><span>{}</span></li>\n",
        escape(name),
        escape(words)
    )
}

fn warnings(comparison: &Comparison<'_>) -> String {
    let all = comparison.warnings();
    if all.is_empty() {
        return String::new();
    }
    let mut items: String = all
        .iter()
        .take(WARNINGS)
        .map(|warning| {
            let (class, word) = if warning.severe { (" class=\"severe\"", "Warning") } else { ("", "Note") };
            format!("<li{class}><b>{word}.</b> {}</li>\n", escape(&warning.text))
        })
        .collect();
    if all.len() > WARNINGS {
        items += &format!("<li>And {} more.</li>\n", all.len() - WARNINGS);
    }
    format!("<ul class=\"warnings\" role=\"note\">\n{items}</ul>\n")
}

fn throughput(comparison: &Comparison<'_>) -> String {
    if comparison.groups.is_empty() {
        return String::new();
    }
    let shown: Vec<&Group<'_>> = comparison.groups.iter().take(PANELS).collect();
    let heads = ["configuration", "Meta", "runs", "Delegation", "runs", "ratio", "run by run"];
    let rows: Vec<Vec<Cell>> = comparison
        .groups
        .iter()
        .map(|group| {
            let rates = |backend| {
                let all = |of: fn(&Figures) -> Vec<f64>| {
                    let rates: Vec<String> = group.of(backend).flat_map(of).map(scaled).collect();
                    if rates.is_empty() { NONE.into() } else { shortened(&rates) }
                };
                [Cell::Figure(all(|figures| vec![figures.ops_per_s])), Cell::Figures(all(runs))]
            };
            let ratio = group.ratio();
            let by_run: Vec<String> =
                ratio.iter().flat_map(|ratio| &ratio.by_run).map(|ratio| format!("{ratio:.2}")).collect();
            let [meta, meta_runs] = rates(Backend::Meta);
            let [delegation, delegation_runs] = rates(Backend::Delegation);
            vec![
                Cell::Text(group.label.clone()),
                meta,
                meta_runs,
                delegation,
                delegation_runs,
                Cell::Figure(ratio.map_or_else(|| NONE.into(), |ratio| times(ratio.ratio))),
                Cell::Figures(if by_run.is_empty() { NONE.into() } else { shortened(&by_run) }),
            ]
        })
        .collect();
    section(
        "Throughput",
        "",
        &format!(
            "{}{}{}",
            charts::bars(&shown),
            left_out(comparison.groups.len()),
            table("Operations per second: medians, all runs, and Delegation / Meta", &heads, &rows)
        ),
    )
}

/// A list of figures; the middle of a long list is left out.
fn shortened(figures: &[String]) -> String {
    // Keeps a figure and its unit on one line.
    let figures: Vec<String> = figures.iter().map(|figure| figure.replace(' ', "\u{a0}")).collect();
    match figures.as_slice() {
        [first, .., last] if figures.len() > 12 => format!("{first} … {last} ({} in all)", figures.len()),
        _ => figures.join(", "),
    }
}

fn latency(comparison: &Comparison<'_>) -> String {
    if comparison.groups.is_empty() {
        return String::new();
    }
    let panels = panels(comparison, "l", charts::latency);
    let mut heads = names(comparison);
    heads.extend(["p50", "p99", "p99.9", "max"]);
    let rows = rows(comparison, |figures| {
        [figures.p50_ns, figures.p99_ns, figures.p999_ns, figures.max_ns]
            .map(|ns| Cell::Figure(time(ns)))
            .into()
    });
    let missing = comparison
        .groups
        .iter()
        .flat_map(|group| &group.results)
        .filter(|each| each.latency.is_empty())
        .count();
    let note = if missing > 0 {
        format!(
            "<p class=\"note\">Of {}, only the percentiles were kept.</p>\n",
            count(missing, "result", "results")
        )
    } else {
        String::new()
    };
    let plain = "From sending a request until the client sees the response; in an open loop, from the intended start.";
    section(
        "Latency",
        plain,
        &format!(
            "{}{note}",
            arranged(comparison, &panels, &table("Latency of single operations", &heads, &rows))
        ),
    )
}

fn batches(comparison: &Comparison<'_>) -> String {
    let panels = panels(comparison, "b", charts::batches);
    if panels.is_empty() {
        return String::new();
    }
    let mut heads = names(comparison);
    heads.extend(["WRITEs", "messages each", "most often"]);
    let rows = rows(comparison, |figures| {
        let writes = figures.batches.iter().fold(0u64, |sum, [_, count]| sum.saturating_add(*count));
        let most = figures.batches.iter().max_by_key(|[_, count]| *count).filter(|[_, count]| *count > 0);
        let most =
            most.map_or_else(|| NONE.into(), |[upper, _]| charts::sizes((*upper).max(1).ilog2() as usize));
        vec![
            Cell::Figure(if writes == 0 { NONE.into() } else { whole(writes) }),
            Cell::Figure(per_write(figures).map_or_else(|| NONE.into(), |mean| format!("{mean:.1}"))),
            Cell::Figure(most),
        ]
    });
    let plain = "How many messages between nodes one WRITE carries. Messages in one WRITE share its cost.";
    section("Batch size", plain, &arranged(comparison, &panels, &table("Batches", &heads, &rows)))
}

fn scaling(comparison: &Comparison<'_>) -> String {
    let axes = comparison.axes();
    let all: Vec<String> = axes
        .iter()
        .flat_map(|axis| axis.panels.iter().map(move |panel| (axis, panel)))
        .enumerate()
        .map(|(at, (axis, panel))| charts::scaling(&format!("s{at}"), axis, panel))
        .collect();
    if all.is_empty() {
        return String::new();
    }
    let shown: String = all.iter().take(PANELS).map(String::as_str).collect();
    let plain = "Each plot varies one parameter and keeps the others fixed. Small dots are single runs.";
    section(
        "Scaling",
        plain,
        &format!("{}<div class=\"panels\">\n{shown}</div>\n{}", legend(comparison), left_out(all.len())),
    )
}

fn configuration(comparison: &Comparison<'_>) -> String {
    let Some(first) = comparison.groups.first() else { return String::new() };
    let of_all = |of: fn(&Figures) -> String| {
        let all: BTreeSet<String> =
            comparison.groups.iter().flat_map(|group| &group.results).map(|figures| of(figures)).collect();
        let mut all: Vec<String> = all.into_iter().filter(|text| !text.is_empty()).collect();
        let more = all.len().saturating_sub(4);
        all.truncate(4);
        if more > 0 {
            all.push(format!("and {more} more"));
        }
        all.join("; ")
    };
    let mut facts: Vec<(&str, String)> = (0..compare::FACTS)
        .map(|at| {
            let value = if comparison.varies[at] {
                "varies, see below".into()
            } else {
                first.facts[at].value.clone()
            };
            (first.facts[at].name, value)
        })
        .collect();
    let threads =
        |figures: &Figures| figures.client_threads.map_or_else(String::new, |count| count.to_string());
    facts.push(("client threads per node", of_all(threads)));
    facts.push(("cores", of_all(|figures| figures.cores.clone())));
    facts.push(("seed", of_all(|figures| figures.seed.to_string())));
    facts.push((
        "round trip of one cache line",
        of_all(|figures| {
            figures.limit_ns.filter(|ns| ns.is_finite()).map_or_else(String::new, |ns| format!("{ns:.0} ns"))
        }),
    ));
    let facts: String = facts
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(&value)))
        .collect();
    section("Configuration", "", &format!("<dl>\n{facts}</dl>\n"))
}

fn details(comparison: &Comparison<'_>) -> String {
    if comparison.groups.is_empty() {
        return String::new();
    }
    let mut heads = names(comparison);
    heads.extend([
        "operations",
        "seconds",
        "ops/s",
        "slowest run",
        "fastest run",
        "errors",
        "node gone",
        "cores",
    ]);
    let has_limit = comparison
        .groups
        .iter()
        .flat_map(|group| &group.results)
        .any(|figures| figures.limit_ops_per_s.is_some());
    if has_limit {
        heads.extend(["limit", "of limit"]);
    }
    let all = rows(comparison, |figures| {
        let of_limit = [
            figures.limit_ops_per_s.map_or(NONE.into(), scaled),
            figures.ratio_to_limit.map_or(NONE.into(), |ratio| format!("{ratio:.2}")),
        ];
        vec![
            Cell::Figure(whole(figures.ops)),
            Cell::Figure(seconds(figures.seconds)),
            Cell::Figure(scaled(figures.ops_per_s)),
            Cell::Figure(scaled(lowest(figures))),
            Cell::Figure(scaled(highest(figures))),
            Cell::Figure(whole(figures.errors)),
            Cell::Figure(whole(figures.node_gone)),
            Cell::Text(if figures.cores.is_empty() { NONE.into() } else { figures.cores.clone() }),
        ]
        .into_iter()
        .chain(of_limit.into_iter().filter(|_| has_limit).map(Cell::Figure))
        .collect()
    });
    let mut html = table("All results", &heads, &all);
    let each = || {
        comparison.groups.iter().flat_map(|group| group.results.iter().map(move |figures| (group, *figures)))
    };
    let mut ranks = Vec::new();
    let mut counters = Vec::new();
    for (group, figures) in each() {
        for rank in &figures.per_rank {
            ranks.push(vec![
                Cell::Backend(figures.backend),
                Cell::Text(group.label.clone()),
                Cell::Figure(rank.rank.to_string()),
                Cell::Figure(scaled(rank.ops_per_s)),
                Cell::Figure(whole(rank.errors)),
                Cell::Figure(bytes(rank.memory_bytes)),
                Cell::Figure(rank.memory_bound_bytes.map_or(NONE.into(), bytes)),
            ]);
        }
        for (name, count) in &figures.counters {
            counters.push(vec![
                Cell::Backend(figures.backend),
                Cell::Text(group.label.clone()),
                Cell::Text(name.clone()),
                Cell::Figure(whole(*count)),
            ]);
        }
    }
    for (name, heads, rows) in [
        (
            "Each node",
            &["backend", "configuration", "rank", "ops/s", "errors", "memory", "at most"][..],
            ranks,
        ),
        ("Counters", &["backend", "configuration", "counter", "count"][..], counters),
    ] {
        if !rows.is_empty() {
            html += &format!("<details><summary>{name}</summary>\n{}</details>\n", table(name, heads, &rows));
        }
    }
    section("Every result", "", &html)
}

/// The column heads of [`rows`].
fn names(comparison: &Comparison<'_>) -> Vec<&'static str> {
    let mut names = vec!["backend"];
    if let Some(group) = comparison.groups.first() {
        let varied = group.facts.iter().zip(comparison.varies).filter(|(_, varies)| *varies);
        names.extend(varied.map(|(fact, _)| fact.name));
    }
    names
}

/// One row per result: its backend, the parameters that vary, and the cells of `more`.
fn rows(comparison: &Comparison<'_>, more: impl Fn(&Figures) -> Vec<Cell>) -> Vec<Vec<Cell>> {
    let mut rows = Vec::new();
    for group in &comparison.groups {
        let varied = group.facts.iter().zip(comparison.varies).filter(|(_, varies)| *varies);
        let varied: Vec<&str> = varied.map(|(fact, _)| fact.value.as_str()).collect();
        for figures in &group.results {
            let mut row = vec![Cell::Backend(figures.backend)];
            row.extend(varied.iter().map(|value| Cell::Text((*value).to_owned())));
            row.extend(more(figures));
            rows.push(row);
        }
    }
    rows
}

/// A plot for each group that has the data for it.
fn panels(
    comparison: &Comparison<'_>,
    prefix: &str,
    draw: fn(&str, &Group<'_>) -> Option<String>,
) -> Vec<String> {
    let drawn =
        comparison.groups.iter().enumerate().filter_map(|(at, group)| draw(&format!("{prefix}{at}"), group));
    drawn.collect()
}

/// Puts the table beside a single plot, or below several.
fn arranged(comparison: &Comparison<'_>, panels: &[String], table: &str) -> String {
    let legend = legend(comparison);
    match panels {
        [] => table.to_owned(),
        [panel] => format!("{legend}<div class=\"beside\">\n{panel}{table}</div>\n"),
        _ => {
            let shown: String = panels.iter().take(PANELS).map(String::as_str).collect();
            format!("{legend}<div class=\"panels\">\n{shown}</div>\n{}{table}", left_out(panels.len()))
        }
    }
}

fn left_out(panels: usize) -> String {
    match panels.checked_sub(PANELS) {
        None | Some(0) => String::new(),
        Some(more) => format!("<p class=\"note\">{more} more configurations are in the table alone.</p>\n"),
    }
}

/// The legend: the backends that were measured.
fn legend(comparison: &Comparison<'_>) -> String {
    let measured =
        |backend: &Backend| comparison.groups.iter().any(|group| group.of(*backend).next().is_some());
    let chips: String = [Backend::Meta, Backend::Delegation].into_iter().filter(measured).map(chip).collect();
    format!("<div class=\"legend\">{chips}</div>\n")
}

/// `html` is HTML; the rest is text. Each line of `plain` is a paragraph.
fn section(title: &str, plain: &str, html: &str) -> String {
    let plain: String =
        plain.lines().map(|line| format!("<p class=\"note\">{}</p>\n", escape(line))).collect();
    format!("<section>\n<h2>{}</h2>\n{plain}{html}</section>\n", escape(title))
}

fn count(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}
