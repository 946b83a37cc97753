//! Elements of SVG plots: scales, ticks, and a frame with axes. [`super::charts`] decides what the plots show.

use super::html::escape;

/// The size of a panel, in pixels at its natural width.
pub(crate) const WIDTH: f64 = 380.0;
pub(crate) const HEIGHT: f64 = 250.0;
const LEFT: f64 = 54.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 44.0;
/// Most ticks of a logarithmic axis.
const TICKS: usize = 7;

/// Maps values to positions on an axis, 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scale {
    Linear(f64, f64),
    /// Both ends are above zero.
    Log(f64, f64),
}

impl Scale {
    /// A linear scale from zero to a round number that is not below `highest`.
    pub(crate) fn from_zero(highest: f64) -> Scale {
        let highest = if (1e-9..1e30).contains(&highest) { highest } else { 1.0 };
        let step = round_step(highest / 4.0);
        Scale::Linear(0.0, (highest / step).ceil() * step)
    }

    /// A logarithmic scale from a round number below `lowest` to one above `highest`. Values below 1 count as 1.
    pub(crate) fn around(lowest: f64, highest: f64) -> Scale {
        let bounded = |value: f64| if value.is_nan() { 1.0 } else { value.clamp(1.0, 1e20) };
        let (lowest, highest) = (bounded(lowest), bounded(highest));
        let mut low = 10f64.powf(lowest.log10().floor());
        for part in [5.0, 2.0] {
            if low * part <= lowest {
                low *= part;
                break;
            }
        }
        let decade = 10f64.powf(highest.log10().floor());
        let high = [1.0, 2.0, 5.0, 10.0].map(|part| decade * part).into_iter().find(|high| *high >= highest);
        Scale::Log(low, high.unwrap_or(highest).max(low * 2.0))
    }

    /// The position of a value; a value outside of the scale is at the nearer end.
    pub(crate) fn position(self, value: f64) -> f64 {
        let position = match self {
            Scale::Linear(low, high) => (value - low) / (high - low),
            Scale::Log(low, high) => (value.max(low) / low).ln() / (high / low).ln(),
        };
        if position.is_nan() { 0.0 } else { position.clamp(0.0, 1.0) }
    }

    /// Round values on the scale.
    pub(crate) fn ticks(self) -> Vec<f64> {
        match self {
            Scale::Linear(low, high) => {
                let step = round_step((high - low) / 4.0);
                let count = ((high - low) / step).round().clamp(1.0, 20.0) as usize;
                (0..=count).map(|at| low + step * at as f64).collect()
            }
            Scale::Log(low, high) => {
                let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
                let within = |value: &f64| (low * 0.999..=high * 1.001).contains(value);
                let parts = |parts: &[f64]| -> Vec<f64> {
                    let all = decades
                        .clone()
                        .flat_map(|decade| parts.iter().map(move |part| part * 10f64.powi(decade)));
                    all.filter(within).collect()
                };
                let fine = parts(&[1.0, 2.0, 5.0]);
                if fine.len() <= TICKS {
                    return fine;
                }
                let coarse = parts(&[1.0]);
                let every = coarse.len().div_ceil(TICKS).max(1);
                coarse.into_iter().step_by(every).collect()
            }
        }
    }
}

/// 1, 2, 2.5 or 5 times a power of ten, not below `step`.
fn round_step(step: f64) -> f64 {
    let decade = 10f64.powf(step.log10().floor());
    let parts = [1.0, 2.0, 2.5, 5.0, 10.0].map(|part| decade * part);
    parts.into_iter().find(|rounded| *rounded >= step * 0.999).unwrap_or(step)
}

/// The x coordinate of a position on the horizontal axis.
pub(crate) fn x(position: f64) -> f64 {
    LEFT + position * (WIDTH - LEFT - RIGHT)
}

/// The y coordinate of a position on the vertical axis, which starts at the bottom.
pub(crate) fn y(position: f64) -> f64 {
    HEIGHT - BOTTOM - position * (HEIGHT - BOTTOM - TOP)
}

/// The texts of a panel.
pub(crate) struct PlotLabels<'a> {
    /// Above the plot; may be empty.
    pub(crate) title: &'a str,
    /// What the plot shows, for screen readers.
    pub(crate) description: &'a str,
    pub(crate) x_axis: &'a str,
    pub(crate) y_axis: &'a str,
}

/// A plot with axes around `marks`. A tick is a position and its label. `id` must be unique on the page.
pub(crate) fn panel(
    id: &str,
    words: &PlotLabels<'_>,
    x_ticks: &[(f64, String)],
    y_ticks: &[(f64, String)],
    marks: &str,
) -> String {
    let mut grid = String::new();
    for (position, label) in y_ticks {
        let at = y(*position);
        grid += &format!(
            "<line class=\"grid\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"tick end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
            x(0.0),
            x(1.0),
            x(0.0) - 7.0,
            at + 4.0,
            escape(label)
        );
    }
    for (position, label) in x_ticks {
        let at = x(*position);
        grid += &format!(
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>\
             <text class=\"tick middle\" x=\"{at:.1}\" y=\"{:.1}\">{}</text>\n",
            y(0.0),
            y(0.0) + 4.0,
            y(0.0) + 17.0,
            escape(label)
        );
    }
    let heading = if words.title.is_empty() {
        String::new()
    } else {
        format!("<figcaption>{}</figcaption>\n", escape(words.title))
    };
    format!(
        "<figure class=\"panel\">\n{heading}<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{id}t {id}d\">\n\
         <title id=\"{id}t\">{}</title><desc id=\"{id}d\">{}</desc>\n\
         {grid}<line class=\"axis\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{base:.1}\" y2=\"{base:.1}\"/>\n\
         <text class=\"name\" x=\"4\" y=\"11\">{}</text>\n<text class=\"name end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\n\
         {marks}</svg>\n</figure>\n",
        escape(if words.title.is_empty() { words.description } else { words.title }),
        escape(words.description),
        x(0.0),
        x(1.0),
        escape(words.y_axis),
        x(1.0),
        HEIGHT - 8.0,
        escape(words.x_axis),
        base = y(0.0),
    )
}

/// A line through points, given as positions. Points that are too close to the previous one to be visible are left out.
pub(crate) fn line(class: &str, points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    let mut last: Option<(f64, f64)> = None;
    for (at, (across, up)) in points.iter().enumerate() {
        let (across, up) = (x(*across), y(*up));
        let near = last.is_some_and(|(x, y)| (across - x).abs() < 0.4 && (up - y).abs() < 0.4);
        if near && at + 1 < points.len() {
            continue;
        }
        path += &format!("{}{across:.1} {up:.1}", if path.is_empty() { "M" } else { "L" });
        last = Some((across, up));
    }
    if path.is_empty() { path } else { format!("<path class=\"line {class}\" d=\"{path}\"/>\n") }
}

/// A point, given as positions, with a tooltip.
pub(crate) fn point(class: &str, (across, up): (f64, f64), radius: f64, words: &str) -> String {
    format!(
        "<circle class=\"dot {class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\"><title>{}</title></circle>\n",
        x(across),
        y(up),
        escape(words)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_end_at_round_numbers_and_have_round_ticks() {
        assert!(matches!(Scale::from_zero(5.1e6), Scale::Linear(0.0, high) if high == 6e6));
        assert_eq!(Scale::from_zero(5.1e6).ticks(), [0.0, 2e6, 4e6, 6e6]);
        assert!(matches!(Scale::around(240.0, 81_000.0), Scale::Log(200.0, 100_000.0)));
        assert_eq!(Scale::around(240.0, 1500.0).ticks(), [200.0, 500.0, 1000.0, 2000.0]);
        assert!(Scale::around(1.0, 1e19).ticks().len() <= TICKS);
    }

    #[test]
    fn every_value_has_a_position_on_every_scale() {
        let extremes = [0.0, -1.0, 1.0, 1e300, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE];
        for low in extremes {
            for high in extremes {
                for scale in [Scale::from_zero(high), Scale::around(low, high)] {
                    assert!(scale.ticks().len() <= 21, "{scale:?}");
                    for value in extremes {
                        assert!((0.0..=1.0).contains(&scale.position(value)), "{value} on {scale:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn line_leaves_out_points_that_are_too_close() {
        let points: Vec<(f64, f64)> =
            (0..100_000).map(|at| (f64::from(at) / 1e5, f64::from(at) / 1e5)).collect();
        assert!(line("meta", &points).len() < 30_000);
        assert_eq!(line("meta", &[]), "");
    }
}
