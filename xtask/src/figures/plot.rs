//! The plot of Crosstie beside other systems, from what `cargo xtask bench-peers --record` stored.

use super::measured::Measured;
use crate::peers;

/// Relative to the root of the repository.
pub(super) const PATH: &str = "docs/figures/peers.svg";
const LABELS: f64 = 440.0;
const WIDTH: f64 = 860.0;
const ROW: f64 = 18.0;
const TOP: f64 = 46.0;

/// One bar for each comparison: how many times as fast as the other system Crosstie is, on a logarithmic axis.
pub(super) fn draw(measured: &Measured) -> String {
    let factors = peers::factors(measured.peers());
    let height = TOP + ROW * factors.len().max(1) as f64 + 16.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"8\" y=\"18\" font-size=\"14\">Crosstie beside other systems: times as fast (log scale; left of the line: slower)</text>\n"
    );
    if factors.is_empty() {
        svg += &format!(
            "<text x=\"8\" y=\"{}\">not measured yet: cargo xtask bench-peers --record</text>\n",
            TOP + 8.0
        );
    }
    let largest = factors.iter().map(|(_, factor)| factor.log2().abs()).fold(1.0, f64::max);
    let smallest = factors.iter().map(|(_, factor)| factor.log2().min(0.0)).fold(0.0, f64::min);
    let scale = (WIDTH - LABELS - 60.0) / (largest - smallest);
    let zero = LABELS - smallest * scale;
    for (row, (what, factor)) in factors.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let length = factor.log2() * scale;
        let (x, color) = if length < 0.0 { (zero + length, "#b3563b") } else { (zero, "#3b6fb3") };
        svg += &format!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{color}\"/>\n\
             <text x=\"{:.1}\" y=\"{}\">{factor:.2}</text>\n",
            LABELS - 8.0,
            y + 11.0,
            what.replace('&', "&amp;").replace('<', "&lt;"),
            length.abs().max(1.0),
            ROW - 5.0,
            x + length.abs() + 4.0,
            y + 11.0,
        );
    }
    svg += &format!(
        "<line x1=\"{zero:.1}\" y1=\"{}\" x2=\"{zero:.1}\" y2=\"{}\" stroke=\"black\"/>\n</svg>\n",
        TOP - 8.0,
        height - 10.0
    );
    svg
}
