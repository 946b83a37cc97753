//! Text tables with aligned columns.

use std::fmt::Display;

/// Shown in place of a figure that was not measured.
pub(crate) const DASH: &str = "-";

/// A table whose columns are all left-aligned. Every row has as many cells as the first.
pub fn left<T: Display>(rows: &[impl AsRef<[T]>]) -> String {
    aligned(rows, |_| true)
}

/// A table whose first column is left-aligned and whose other columns, the figures, are right-aligned.
pub fn figures<T: Display>(rows: &[impl AsRef<[T]>]) -> String {
    aligned(rows, |column| column == 0)
}

fn aligned<T: Display>(rows: &[impl AsRef<[T]>], is_left: impl Fn(usize) -> bool) -> String {
    let cells: Vec<Vec<String>> =
        rows.iter().map(|row| row.as_ref().iter().map(T::to_string).collect()).collect();
    let columns = cells.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| {
        cells.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &cells {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if at == 0 { "" } else { "  " };
            let cell = if is_left(at) { format!("{cell:width$}") } else { format!("{cell:>width$}") };
            line.push_str(gap);
            line.push_str(&cell);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_of_a_column_are_aligned() {
        assert_eq!(figures(&[["a", "1"], ["bcd", "22"]]), "a     1\nbcd  22\n");
        assert_eq!(left(&[["a", "1"], ["bcd", "22"]]), "a    1\nbcd  22\n");
    }
}
