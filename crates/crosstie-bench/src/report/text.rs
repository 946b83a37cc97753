//! The table of results for a terminal.

use super::compare::{Comparison, highest, lowest, per_write};
use crate::figures::Figures;
use crate::table;
use crate::units::{NONE, scaled, time};

/// All results for a terminal: a row for each, how the backends compare, and what a reader must know before believing it.
pub fn table(results: &[Figures]) -> String {
    let names = [
        "backend",
        "nodes",
        "daemons",
        "clients",
        "depth",
        "ops/s",
        "lowest",
        "highest",
        "of limit",
        "p50",
        "p99",
        "p99.9",
        "max",
        "per WRITE",
        "errors",
    ];
    let mut rows = vec![names.map(str::to_owned)];
    let comparison = Comparison::new(results);
    for figures in comparison.groups.iter().flat_map(|group| &group.results) {
        rows.push([
            figures.backend.name().into(),
            figures.nodes.to_string(),
            figures.daemons.to_string(),
            figures.clients.to_string(),
            figures.queue_depth.to_string(),
            scaled(figures.ops_per_s),
            scaled(lowest(figures)),
            scaled(highest(figures)),
            figures.ratio_to_limit.map_or_else(|| NONE.into(), |ratio| format!("{ratio:.2}")),
            time(figures.p50_ns),
            time(figures.p99_ns),
            time(figures.p999_ns),
            time(figures.max_ns),
            per_write(figures).map_or_else(|| NONE.into(), |mean| format!("{mean:.1}")),
            figures.errors.to_string(),
        ]);
    }
    let mut text = table::figures(&rows);
    for group in &comparison.groups {
        let Some(ratio) = group.ratio() else { continue };
        let runs: Vec<String> = ratio.by_run.iter().map(|ratio| format!("{ratio:.2}")).collect();
        let runs = if runs.is_empty() { String::new() } else { format!(" (runs: {})", runs.join(" ")) };
        text += &format!("\nDelegation / Meta, {}: {:.2}{runs}", group.label, ratio.ratio);
    }
    for warning in comparison.warnings() {
        text += &format!("\nwarning: {}", warning.text);
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    // Texts of a file may hold anything, and this goes to a terminal.
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}
