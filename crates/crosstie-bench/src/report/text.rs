//! The table of results for a terminal.

use super::compare::{Comparison, highest, lowest, per_write, same_code_ratios};
use crate::figures::Figures;
use crate::table;
use crate::units::{NONE, scaled, time};

/// The text of a result in one column; `None` if the result does not have it.
type Cell = fn(&Figures) -> Option<String>;

/// All results for a terminal: a row for each, how the backends compare, and warnings. Columns that no result fills are left out.
pub fn table(results: &[Figures]) -> String {
    let comparison = Comparison::new(results);
    let sorted: Vec<&Figures> =
        comparison.groups.iter().flat_map(|group| group.results.iter().copied()).collect();
    let columns: [(&str, Cell); 15] = [
        ("backend", |figures| Some(figures.backend.name().into())),
        ("nodes", |figures| Some(figures.nodes.to_string())),
        ("daemons", |figures| Some(figures.daemons.to_string())),
        ("clients", |figures| Some(figures.clients.to_string())),
        ("depth", |figures| Some(figures.queue_depth.to_string())),
        ("ops/s", |figures| Some(scaled(figures.ops_per_s))),
        ("lowest", |figures| Some(scaled(lowest(figures)))),
        ("highest", |figures| Some(scaled(highest(figures)))),
        ("of limit", |figures| figures.ratio_to_limit.map(|ratio| format!("{ratio:.2}"))),
        ("p50", |figures| Some(time(figures.p50_ns))),
        ("p99", |figures| Some(time(figures.p99_ns))),
        ("p99.9", |figures| Some(time(figures.p999_ns))),
        ("max", |figures| Some(time(figures.max_ns))),
        ("per WRITE", |figures| per_write(figures).map(|mean| format!("{mean:.1}"))),
        ("errors", |figures| Some(figures.errors.to_string())),
    ];
    let is_filled = |cell: Cell| sorted.is_empty() || sorted.iter().any(|figures| cell(figures).is_some());
    let columns: Vec<_> = columns.into_iter().filter(|(_, cell)| is_filled(*cell)).collect();
    let mut rows: Vec<Vec<String>> = vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()];
    for figures in &sorted {
        rows.push(columns.iter().map(|(_, cell)| cell(figures).unwrap_or_else(|| NONE.into())).collect());
    }
    let mut text = table::figures(&rows);
    for group in &comparison.groups {
        let Some(ratio) = group.ratio() else { continue };
        let runs: Vec<String> = ratio.by_run.iter().map(|ratio| format!("{ratio:.2}")).collect();
        let runs = if runs.is_empty() { String::new() } else { format!("runs: {}", runs.join(" ")) };
        let result = match (ratio.is_difference, runs.is_empty()) {
            (true, true) => format!("{:.2}", ratio.ratio),
            (true, false) => format!("{:.2} ({runs})", ratio.ratio),
            (false, true) => format!("no difference seen (ratio {:.2})", ratio.ratio),
            (false, false) => format!("no difference seen (ratio {:.2}; {runs})", ratio.ratio),
        };
        text += &format!("\nDelegation / Meta, {}: {result}", group.label);
        let same = group.results.iter().filter_map(|figures| {
            let [low, high] = same_code_ratios(figures)?;
            Some(format!("{} / {0} {low:.2} to {high:.2}", figures.backend.name()))
        });
        let same: Vec<String> = same.collect();
        if !same.is_empty() {
            text += &format!("\n  the same code in successive runs: {}", same.join(", "));
        }
    }
    for warning in comparison.warnings() {
        text += &format!("\nwarning: {}", warning.text);
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    // Texts come from files, which may contain control characters.
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}
