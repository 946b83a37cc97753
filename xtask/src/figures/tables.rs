//! The tables in the documents, made from what was measured.

use std::fs;
use std::path::PathBuf;

use super::list::{FIGURES, Figure};
use super::measured::{FigureResult, Measured, Spread};
use crate::error::{Error, with_path};
use crate::workspace;

/// The documents that have tables.
const DOCUMENTS: &[&str] = &["docs/PERFORMANCE.md"];
const BEGIN: &str = "<!-- figures: ";
const END: &str = "<!-- end of figures -->";

/// Writes the tables into all documents.
pub(super) fn write_all(measured: &Measured) -> Result<(), Error> {
    for (path, text) in render_all(measured)? {
        fs::write(&path, text).map_err(with_path(path))?;
    }
    Ok(())
}

/// All documents, with the tables that `measured` gives.
pub(super) fn render_all(measured: &Measured) -> Result<Vec<(PathBuf, String)>, Error> {
    let mut documents = Vec::new();
    for document in DOCUMENTS {
        let path = workspace::root().join(document);
        let text = fs::read_to_string(&path).map_err(with_path(&path))?;
        let rendered = replace_tables(&text, measured)
            .map_err(|what| Error::UnexpectedOutput { command: (*document).into(), what })?;
        documents.push((path, rendered));
    }
    Ok(documents)
}

/// Replaces what is between each pair of markers.
fn replace_tables(text: &str, measured: &Measured) -> Result<String, String> {
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
    if name == "machines" {
        let rows =
            measured.machines().into_iter().map(|(name, processor)| format!("| {name} | {processor} |\n"));
        return Ok("| machine | processor |\n| --- | --- |\n".to_owned() + &rows.collect::<String>());
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
            table += &match measured.result(machine, figure.id) {
                Some(result) => format!(" {} | {} |", cell(figure, &result), result.commit),
                None => " - | - |".into(),
            };
        }
        table.push('\n');
    }
    Ok(table)
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

fn number(value: f64) -> String {
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
        Measured::read(&PathBuf::from("/nonexistent/measured.json")).unwrap()
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

    #[test]
    fn every_table_is_in_a_document() {
        let texts: String =
            DOCUMENTS.iter().map(|path| fs::read_to_string(workspace::root().join(path)).unwrap()).collect();
        for figure in FIGURES {
            assert!(texts.contains(&format!("{BEGIN}{} -->", figure.table)), "{}", figure.table);
        }
    }
}
