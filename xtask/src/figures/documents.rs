//! The documents: every figure in them comes from what was measured.
//!
//! Tables stand between `<!-- figures: NAME -->` and `<!-- end of figures -->` ([`super::tables`]). A figure in a sentence stands between
//! `<!-- figure: MACHINE/ID -->` and `<!-- /figure -->`; it is the median, or with `MACHINE/ID/share` the share of the limit. In pages for
//! users a rate outside of such markers is an error: somebody has typed it, and it would grow old unnoticed.

use std::fs;
use std::path::{Path, PathBuf};

use super::list::FIGURES;
use super::measured::Measured;
use super::{plot, tables};
use crate::error::{Error, with_path};
use crate::workspace;

const BEGIN: &str = "<!-- figure: ";
const END: &str = "<!-- /figure -->";
/// Writes the figures into all documents, and draws the plot.
pub(super) fn write_all(measured: &Measured) -> Result<(), Error> {
    for (path, present, rendered) in render_all(measured)? {
        if present != rendered {
            fs::write(&path, rendered).map_err(with_path(path))?;
        }
    }
    Ok(())
}

/// All documents and the plot: path, text as it is, and text with the figures that `measured` gives.
pub(super) fn render_all(measured: &Measured) -> Result<Vec<(PathBuf, String, String)>, Error> {
    let mut rendered = Vec::new();
    for path in documents()? {
        let present = fs::read_to_string(&path).map_err(with_path(&path))?;
        let text =
            tables::replace_tables(&present, measured).and_then(|text| replace_figures(&text, measured));
        let text =
            text.map_err(|what| Error::UnexpectedOutput { command: path.display().to_string(), what })?;
        rendered.push((path, present, text));
    }
    let path = workspace::root().join(plot::PATH);
    let present = fs::read_to_string(&path).unwrap_or_default();
    rendered.push((path, present, plot::draw(measured)));
    Ok(rendered)
}

/// All Markdown files of the repository.
fn documents() -> Result<Vec<PathBuf>, Error> {
    fn collect(directory: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), Error> {
        for entry in fs::read_dir(directory).map_err(with_path(directory))? {
            let path = entry.map_err(with_path(directory))?.path();
            if path.is_dir() && depth > 0 {
                collect(&path, depth - 1, found)?;
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    for (directory, depth) in [("", 0), ("docs", 2), ("crates", 1)] {
        collect(&workspace::root().join(directory), depth, &mut found)?;
    }
    found.sort();
    Ok(found)
}

/// Replaces the figures in sentences.
fn replace_figures(text: &str, measured: &Measured) -> Result<String, String> {
    let mut done = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after.split_once(" -->").ok_or("a marker of a figure has no end")?;
        let (_, after) = after.split_once(END).ok_or_else(|| format!("figure {name} has no end marker"))?;
        done += &format!("{before}{BEGIN}{name} -->{}{END}", figure(name, measured)?);
        rest = after;
    }
    Ok(done + rest)
}

fn figure(name: &str, measured: &Measured) -> Result<String, String> {
    let unknown = || format!("there is no figure {name}: give MACHINE/ID or MACHINE/ID/share");
    let mut parts = name.split('/');
    let (machine, id) = parts.next().zip(parts.next()).ok_or_else(unknown)?;
    if !FIGURES.iter().any(|figure| figure.id == id) {
        return Err(unknown());
    }
    let result = measured.result(machine, id);
    let value = match parts.next() {
        None => result.map(|result| result.value),
        Some("share") => result.and_then(|result| result.share),
        Some(_) => return Err(unknown()),
    };
    Ok(value.map_or("-".into(), |spread| tables::number(spread.0[1])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::measured;

    /// Units of what is measured.
    const UNITS: &[&str] = &[
        "M/s",
        "GB/s",
        "million/s",
        "million calls",
        "million operations",
        "million round trips",
        "ns",
        "x a cache line",
        "of plain code",
        "of memcpy",
    ];
    /// Where a figure is a record of an experiment at a commit that is named, not a statement about the program.
    const RECORDS: &[&str] = &["docs/notes/", "docs/decisions/", "docs/method.md", "CHANGELOG.md"];

    /// Lines with a figure that stands outside of markers.
    fn typed_figures(text: &str) -> Vec<String> {
        let mut found = Vec::new();
        let mut in_table = false;
        for line in text.lines() {
            in_table |= line.starts_with("<!-- figures: ");
            if !in_table {
                // What is measured ends with the end marker, which is no digit.
                let words = line.replace("**", "");
                let is_typed = |unit: &&str| {
                    let mut places = words.match_indices(*unit);
                    places.any(|(at, _)| words[..at].trim_end().ends_with(|last: char| last.is_ascii_digit()))
                };
                found.extend(UNITS.iter().any(is_typed).then(|| line.to_owned()));
            }
            in_table &= !line.starts_with("<!-- end of figures");
        }
        found
    }

    fn stored() -> Measured {
        Measured::read(&workspace::root().join(measured::PATH)).unwrap()
    }

    /// Every figure is what the stored measurements say. `cargo xtask figures --tables` writes them.
    #[test]
    fn documents_show_what_was_measured() {
        for (path, present, rendered) in render_all(&stored()).unwrap() {
            assert!(present == rendered, "{}: run `cargo xtask figures --tables`", path.display());
        }
    }

    #[test]
    fn pages_for_users_have_no_typed_figures() {
        for path in documents().unwrap() {
            let name = path.strip_prefix(workspace::root()).unwrap().display().to_string();
            if !RECORDS.iter().any(|record| name.starts_with(record)) {
                let typed = typed_figures(&fs::read_to_string(&path).unwrap());
                assert!(
                    typed.is_empty(),
                    "{name}: take the figure from measured.json, or leave it out: {typed:#?}"
                );
            }
        }
    }

    #[test]
    fn every_table_is_in_a_document() {
        let texts: String =
            documents().unwrap().iter().map(|path| fs::read_to_string(path).unwrap()).collect();
        for figure in &*FIGURES {
            assert!(texts.contains(&format!("<!-- figures: {} -->", figure.table)), "{}", figure.table);
        }
    }

    #[test]
    fn figures_in_sentences_are_replaced() {
        let text = format!("It made {BEGIN}2 cores/ipc-1 -->0.01{END} million calls/s.");
        let once = replace_figures(&text, &stored()).unwrap();
        assert!(
            once.starts_with("It made ") && once.ends_with(" million calls/s.") && !once.contains("0.01")
        );
        assert_eq!(replace_figures(&once, &stored()).unwrap(), once);
        assert!(typed_figures(&once).is_empty(), "{once}");
    }

    #[test]
    fn wrong_markers_are_refused() {
        for name in ["2 cores", "2 cores/no-such", "2 cores/ipc-1/other"] {
            assert!(replace_figures(&format!("{BEGIN}{name} -->1{END}"), &stored()).is_err(), "{name}");
        }
        assert!(replace_figures(&format!("{BEGIN}2 cores/ipc-1 -->1"), &stored()).is_err());
    }

    #[test]
    fn typed_figures_are_found() {
        assert_eq!(typed_figures("a\nipc made 4.3 M/s.\n").len(), 1);
        assert_eq!(typed_figures("with **12** million calls in flight").len(), 1);
        assert!(typed_figures("<!-- figures: x -->\n4.3 M/s\n<!-- end of figures -->\nmany M/s").is_empty());
    }
}
