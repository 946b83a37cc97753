//! The tables in the documents, made from what was measured.

use std::fs;

use super::list::{FIGURES, Figure};
use super::measured::{FigureResult, Measured, Spread};
use crate::peers;
use crate::workspace;

const BEGIN: &str = "<!-- figures: ";
const END: &str = "<!-- end of figures -->";
/// What `crosstie demo` printed, relative to the root of the repository.
const DEMO: &str = "docs/figures/demo.txt";

/// Replaces what is between each pair of markers.
pub(super) fn replace_tables(text: &str, measured: &Measured) -> Result<String, String> {
    let mut done = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after.split_once(" -->").ok_or("a marker of figures has no end")?;
        let (_, after) = after.split_once(END).ok_or_else(|| format!("table {name} has no end marker"))?;
        let table = render(name, measured)?;
        done += &format!("{before}{BEGIN}{name} -->\n{table}{END}");
        rest = after;
    }
    Ok(done + rest)
}

fn render(name: &str, measured: &Measured) -> Result<String, String> {
    match name {
        "machines" => return Ok(machines(measured)),
        "summary" => return Ok(summary(measured)),
        "peers" => return Ok(peers::comparison_table(measured.peers())),
        "demo" => return Ok(demo()),
        _ => {}
    }
    let figures: Vec<&Figure> = FIGURES.iter().filter(|figure| figure.table == name).collect();
    if figures.is_empty() {
        return Err(format!("there is no table {name}"));
    }
    let machines = measured.machines();
    let mut table = "| what | `crosstie bench` | goal |".to_owned();
    for (machine, _) in &machines {
        table += &format!(" {machine} | commit |");
    }
    table += &format!("\n| --- | --- | --- |{}\n", " --- | --- |".repeat(machines.len()));
    for figure in figures {
        let goal = figure.goal.map_or("-".into(), |goal| goal.text(figure.metric));
        table += &format!("| {} | `{}` | {goal} |", figure.what, figure.arguments);
        for (machine, _) in &machines {
            table += &match measured.result(machine, &figure.id) {
                Some(result) => format!(" {} | {} |", cell(figure, &result), result.commit),
                None => " - | - |".into(),
            };
        }
        table.push('\n');
    }
    Ok(table)
}

fn machines(measured: &Measured) -> String {
    let rows = measured.machines().into_iter().map(|(name, processor)| format!("| {name} | {processor} |\n"));
    "| machine | processor |\n| --- | --- |\n".to_owned() + &rows.collect::<String>()
}

/// The median of every figure, without goals and spreads.
fn summary(measured: &Measured) -> String {
    let machines = measured.machines();
    let mut table = "| part | what |".to_owned();
    for (machine, _) in &machines {
        table += &format!(" {machine} |");
    }
    table += &format!("\n| --- | --- |{}\n", " --- |".repeat(machines.len()));
    for figure in &*FIGURES {
        table += &format!("| {} | {} |", figure.table, figure.what);
        for (machine, _) in &machines {
            table += &match measured.result(machine, &figure.id) {
                Some(result) => format!(" {} {} |", number(result.value.0[1]), figure.metric.unit()),
                None => " - |".into(),
            };
        }
        table.push('\n');
    }
    table
}

/// What `crosstie demo` printed, without the paths of its files.
fn demo() -> String {
    let printed = fs::read_to_string(workspace::root().join(DEMO)).unwrap_or_default();
    let is_path = |line: &&str| line.starts_with("report: ") || line.starts_with("figures: ");
    let lines: Vec<&str> = printed.trim().lines().filter(|line| !is_path(line)).map(str::trim_end).collect();
    let text = lines.join("\n");
    let text = if text.is_empty() { "(not recorded yet)" } else { text.trim_end() };
    format!("```text\n$ cargo run --release -- demo\n{text}\n```\n")
}

/// A result, bold if it misses its goal.
fn cell(figure: &Figure, result: &FigureResult) -> String {
    let unit = figure.metric.unit();
    let mut text = format!("{} {unit}", spread(result.value));
    if let Some(share) = result.share {
        text += &format!("; {} {}", spread(share), figure.metric.share_text());
    }
    let is_met =
        |goal: super::list::Goal| goal.is_met(result.value.0[1], result.share.map(|share| share.0[1]));
    if figure.goal.is_none_or(is_met) { text } else { format!("**{text}**") }
}

fn spread(Spread([low, median, high]): Spread) -> String {
    format!("{} ({} to {})", number(median), number(low), number(high))
}

pub(super) fn number(value: f64) -> String {
    match value {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Measured {
        Measured::read("/nonexistent/measured.json".as_ref()).unwrap()
    }

    #[test]
    fn text_outside_the_markers_stays() {
        let text = format!("before\n{BEGIN}device -->\nold\n{END}\nafter\n");
        let once = replace_tables(&text, &empty()).unwrap();
        assert!(
            once.starts_with("before\n") && once.ends_with("\nafter\n") && !once.contains("old"),
            "{once}"
        );
        assert!(once.contains("`device --processes`"));
        assert_eq!(replace_tables(&once, &empty()).unwrap(), once, "writing twice changes nothing");
    }

    #[test]
    fn wrong_markers_are_refused() {
        assert!(replace_tables(&format!("{BEGIN}device -->"), &empty()).is_err());
        assert!(replace_tables(&format!("{BEGIN}no such table -->{END}"), &empty()).is_err());
    }
}
