//! `crosstie report`: results of the store's benchmark as one HTML page.
//!
//! The page is self-contained: it includes its style and its plots, has no script, and loads nothing from the network; its content
//! security policy forbids that. It has a light and a dark theme, and fits phones and paper. The data of every plot are also there as
//! text and in a table. The same results always make the same page, byte for byte.
//!
//! Results are not trusted: every text is escaped, and every number can be drawn in every plot.

mod charts;
mod compare;
mod html;
mod page;
mod plot;
mod text;

use std::path::Path;

use crate::demo::Measured;
use crate::error::Error;
use crate::figures::Figures;
use crate::output;

pub use text::table;

/// Most results on a page.
const MAX_RESULTS: usize = 1024;

/// Writes the page.
pub fn write(results: &[Figures], path: &Path) -> Result<(), Error> {
    if results.len() > MAX_RESULTS {
        return Err(Error::TooManyResults { count: results.len(), limit: MAX_RESULTS });
    }
    output::write_file(path, &page::page(results))
}

/// Writes the page of the demo: all parts, then the store in detail.
pub(crate) fn write_demo(measured: &[Measured], store: &[Figures], path: &Path) -> Result<(), Error> {
    output::write_file(path, &page::demo_page(measured, store))
}

#[cfg(test)]
mod tests;
