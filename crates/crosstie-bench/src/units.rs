//! Formats figures for people: rounded, with a unit.

/// Shown in place of a figure that is missing.
pub const NONE: &str = "–";

/// A figure with three digits and a suffix k, M or G.
pub fn scaled(figure: f64) -> String {
    if !figure.is_finite() {
        return NONE.into();
    }
    let (figure, unit) = match figure {
        x if x >= 999.5e6 => (x / 1e9, " G"),
        x if x >= 999.5e3 => (x / 1e6, " M"),
        x if x >= 999.5 => (x / 1e3, " k"),
        x => (x, ""),
    };
    format!("{}{unit}", digits(figure))
}

/// A time with three digits, in ns, µs, ms or s.
pub fn time(ns: u64) -> String {
    let figure = ns as f64;
    let (figure, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..999_500 => (figure / 1e3, "µs"),
        999_500..999_500_000 => (figure / 1e6, "ms"),
        _ => (figure / 1e9, "s"),
    };
    format!("{} {unit}", digits(figure))
}

/// A measured time in seconds.
pub fn seconds(seconds: f64) -> String {
    if seconds.is_finite() { format!("{seconds:.2}") } else { NONE.into() }
}

/// Bytes, in powers of 1024.
pub fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut figure, mut unit) = (bytes as f64, 0);
    while figure >= 1024.0 && unit + 1 < units.len() {
        figure /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{} {}", digits(figure), units[unit]) }
}

/// A share from 0 to 1, in percent.
pub fn percent(share: f64) -> String {
    let share = (share * 1e6).round() / 1e4;
    format!("{share} %")
}

/// A ratio, such as `1.50 ×`.
pub fn times(ratio: f64) -> String {
    format!("{ratio:.2} ×")
}

/// A whole number with its digits in groups of three.
pub fn whole(number: u64) -> String {
    let plain = number.to_string();
    let mut text = String::new();
    for (at, digit) in plain.chars().enumerate() {
        if at > 0 && (plain.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

fn digits(figure: f64) -> String {
    match figure {
        x if x >= 99.95 => format!("{x:.0}"),
        x if x >= 9.995 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatted_figures_have_three_digits_and_a_unit() {
        let texts = [0.0, 1.5, 999.4, 999.6, 5_123_456.0, 25.2e6, 999.6e6].map(scaled);
        assert_eq!(texts, ["0.00", "1.50", "999", "1.00 k", "5.12 M", "25.2 M", "1.00 G"]);
        assert_eq!(scaled(f64::NAN), NONE);
        let texts = [0, 999, 1_000, 12_345, 999_499, 999_500, 3_000_000_000].map(time);
        assert_eq!(texts, ["0 ns", "999 ns", "1.00 µs", "12.3 µs", "999 µs", "1.00 ms", "3.00 s"]);
        assert_eq!([1023, 1024, 5 << 20].map(bytes), ["1023 B", "1.00 KiB", "5.00 MiB"]);
        assert_eq!([0.0, 0.5, 0.999, 1.0].map(percent), ["0 %", "50 %", "99.9 %", "100 %"]);
        assert_eq!(whole(1_234_567), "1\u{202f}234\u{202f}567");
    }
}
