//! Tables for people.

use std::fmt::Display;

/// Columns of equal width, all to the left.
pub fn left<const N: usize, T: Display>(rows: &[[T; N]]) -> String {
    aligned(rows, |_| true)
}

/// Columns of equal width, the first to the left and figures to the right.
pub fn figures<const N: usize, T: Display>(rows: &[[T; N]]) -> String {
    aligned(rows, |column| column == 0)
}

fn aligned<const N: usize, T: Display>(rows: &[[T; N]], to_the_left: impl Fn(usize) -> bool) -> String {
    let cells: Vec<[String; N]> =
        rows.iter().map(|row| std::array::from_fn(|at| row[at].to_string())).collect();
    let width = |at: usize| cells.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &cells {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(widths).enumerate() {
            let gap = if at == 0 { "" } else { "  " };
            let cell = if to_the_left(at) { format!("{cell:width$}") } else { format!("{cell:>width$}") };
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
    fn columns_line_up() {
        assert_eq!(figures(&[["a", "1"], ["bcd", "22"]]), "a     1\nbcd  22\n");
        assert_eq!(left(&[["a", "1"], ["bcd", "22"]]), "a    1\nbcd  22\n");
    }
}
