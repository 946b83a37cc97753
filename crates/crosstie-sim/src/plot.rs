//! The plot of barrier and lock cost against the number of members, as one SVG.

use std::fmt::Write;

/// The cost of barriers and locks in a group of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingPoint {
    /// Members of the group.
    pub members: usize,
    /// Median time of a round of a binary tree, from the last entry to the last exit, in latencies.
    pub barrier_binary: f64,
    /// The same with a tree of fan-out 8.
    pub barrier_wide: f64,
    /// Messages for each acquisition of a lock that all members compete for.
    pub lock_messages: f64,
    /// Messages of a barrier round, divided by members.
    pub barrier_messages: f64,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 250.0;

/// Draws two panels: time of a barrier round, and messages for each operation and member.
pub fn scaling_plot(points: &[ScalingPoint]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"system-ui, sans-serif\" \
         font-size=\"11\">\n<style>text{{fill:#374151}}.g{{stroke:#9ca3af;stroke-width:.5}}@media (prefers-color-scheme: dark)\
         {{text{{fill:#d1d5db}}.bg{{fill:#111827}}.g{{stroke:#4b5563}}}}</style>\n\
         <rect class=\"bg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    let time = points.iter().map(|point| point.barrier_binary.max(point.barrier_wide)).fold(1.0, f64::max);
    panel(
        &mut svg,
        54.0,
        "one barrier round, in latencies",
        (time / 10.0).ceil() * 10.0,
        points,
        &[
            ("binary tree", "#2563eb", &|point: &ScalingPoint| point.barrier_binary),
            ("fan-out 8", "#dc2626", &|point: &ScalingPoint| point.barrier_wide),
        ],
    );
    panel(
        &mut svg,
        414.0,
        "messages",
        4.0,
        points,
        &[
            ("lock, per acquisition", "#2563eb", &|point: &ScalingPoint| point.lock_messages),
            ("barrier, per member and round", "#dc2626", &|point: &ScalingPoint| point.barrier_messages),
        ],
    );
    svg + "</svg>\n"
}

type Series<'a> = (&'a str, &'a str, &'a dyn Fn(&ScalingPoint) -> f64);

fn panel(svg: &mut String, left: f64, title: &str, top: f64, points: &[ScalingPoint], series: &[Series<'_>]) {
    let right = left + 260.0;
    let steps = points.len().max(2) - 1;
    let x = |index: usize| left + 6.0 + (right - left - 12.0) * index as f64 / steps as f64;
    let y = |value: f64| BOTTOM - (BOTTOM - TOP) * (value / top).clamp(0.0, 1.0);
    put(
        svg,
        format!(
            "<text x=\"{:.0}\" y=\"24\" text-anchor=\"middle\" font-size=\"13\">{title}</text>",
            (left + right) / 2.0
        ),
    );
    for tick in 0..=4 {
        let value = top * f64::from(tick) / 4.0;
        let at = y(value);
        put(svg, format!("<line class=\"g\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.0}\" y2=\"{at:.0}\"/>"));
        put(
            svg,
            format!("<text x=\"{}\" y=\"{:.0}\" text-anchor=\"end\">{value}</text>", left - 6.0, at + 4.0),
        );
    }
    for (index, point) in points.iter().enumerate() {
        put(
            svg,
            format!("<text x=\"{:.0}\" y=\"268\" text-anchor=\"middle\">{}</text>", x(index), point.members),
        );
    }
    put(
        svg,
        format!("<text x=\"{:.0}\" y=\"286\" text-anchor=\"middle\">members</text>", (left + right) / 2.0),
    );
    for (number, (name, color, value)) in series.iter().enumerate() {
        let mut line = String::new();
        for (index, point) in points.iter().enumerate() {
            line += &format!("{:.1},{:.1} ", x(index), y(value(point)));
        }
        put(
            svg,
            format!(
                "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"/>",
                line.trim_end()
            ),
        );
        let at = 42.0 + 14.0 * number as f64;
        put(svg, format!("<text x=\"{}\" y=\"{at}\" style=\"fill:{color}\">{name}</text>", left + 8.0));
    }
}

fn put(svg: &mut String, element: String) {
    // Writing to a string cannot fail.
    writeln!(svg, "{element}").expect("writing to a string");
}
