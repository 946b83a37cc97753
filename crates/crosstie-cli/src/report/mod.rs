//! `crosstie report`: figures of the store's benchmark as one HTML page.
//!
//! The page is whole in itself: style and plots are in it, there is no script, and it asks no network for anything; its
//! own policy forbids it to. It follows the reader's choice of light or dark, has room on a phone and on paper, and every
//! plot has its figures in words and in a table. The same figures make the same bytes.
//!
//! Figures may come from anywhere: every text is escaped, and every number has a place in every plot.

mod compare;
mod figure;
mod html;
mod page;
mod plot;
pub(crate) mod text;

use std::fs;
use std::path::{Path, PathBuf};

use crosstie_kv::figures::{self, Figures};

use crate::error::Error;

pub(crate) use text::table;

/// Results on a page at most.
const MAX_RESULTS: usize = 1024;

/// Draw figures of `bench kv --json` as one HTML page.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Files with one result of `crosstie bench kv --json`, or an array of them.
    #[arg(required = true, value_name = "FILE.json")]
    files: Vec<PathBuf>,
    /// The page to write. It needs no other file and no network.
    #[arg(short, long, value_name = "FILE.html")]
    output: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut results = Vec::new();
    let output = arguments.output.canonicalize().ok();
    for path in &arguments.files {
        if output.is_some() && output == path.canonicalize().ok() {
            let path = path.display();
            return Err(Error::Usage(format!("{path} has the figures: give --output another name")));
        }
        results.extend(figures::read(path)?);
    }
    write(&results, &arguments.output)?;
    crate::print(&format!("{}\nreport: {}\n", table(&results), arguments.output.display()))
}

/// Writes the page.
pub(crate) fn write(results: &[Figures], path: &Path) -> Result<(), Error> {
    if results.len() > MAX_RESULTS {
        return Err(Error::TooManyResults { count: results.len(), limit: MAX_RESULTS });
    }
    fs::write(path, page::page(results)).map_err(|source| Error::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
