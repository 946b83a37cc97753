//! `crosstie report`: figures of the store's benchmark as one HTML page.
//!
//! The page is whole in itself: style and plots are in it, there is no script, and it asks no network for anything; its
//! own policy forbids it to. It follows the reader's choice of light or dark, has room on a phone and on paper, and every
//! plot has its figures in words and in a table. The same figures make the same bytes.
//!
//! Figures may come from anywhere: every text is escaped, and every number has a place in every plot.

mod charts;
mod compare;
mod html;
mod page;
mod plot;
mod text;

use std::fs;
use std::path::Path;

use crate::figures::Figures;

use crate::error::Error;

pub use text::table;

/// Results on a page at most.
const MAX_RESULTS: usize = 1024;

/// Writes the page.
pub fn write(results: &[Figures], path: &Path) -> Result<(), Error> {
    if results.len() > MAX_RESULTS {
        return Err(Error::TooManyResults { count: results.len(), limit: MAX_RESULTS });
    }
    fs::write(path, page::page(results)).map_err(|source| Error::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
