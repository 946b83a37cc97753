//! Random numbers with a Zipf distribution, without a table.
//!
//! The method is rejection-inversion (Hörmann and Derflinger, 1996). Each number `k`, from 1, is a bar of width one and height
//! `k^-theta` around `k`. A point under the curve `x^-theta` is drawn by inverting the integral of the curve. It is accepted if it lies
//! under the nearest bar, and drawn again otherwise. Nearly all points are accepted, for any count and exponent.

use super::random::Random;

pub(super) struct Zipf {
    count: f64,
    theta: f64,
    /// The integral at the left end of the first bar, reduced so that the first bar has the right area.
    from: f64,
    /// The integral at the right end of the last bar.
    to: f64,
    /// A point at most this far to the left of a number is always under its bar.
    always_under: f64,
}

impl Zipf {
    /// Numbers `0..count`; the probability of `n` is proportional to `(n + 1)^-theta`.
    pub(super) fn new(count: u64, theta: f64) -> Zipf {
        let mut zipf = Zipf { count: count as f64, theta, from: 0.0, to: 0.0, always_under: 0.0 };
        zipf.from = zipf.integral(1.5) - 1.0;
        zipf.to = zipf.integral(zipf.count + 0.5);
        zipf.always_under = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.height(2.0));
        zipf
    }

    pub(super) fn draw(&self, random: &mut Random) -> u64 {
        loop {
            let area = self.to + random.unit() * (self.from - self.to);
            let x = self.inverse(area);
            let k = x.round().clamp(1.0, self.count);
            if k - x <= self.always_under || area >= self.integral(k + 0.5) - self.height(k) {
                return k as u64 - 1;
            }
        }
    }

    fn height(&self, x: f64) -> f64 {
        x.powf(-self.theta)
    }

    /// The integral of the height from 1 to `x`: `(x^(1 - theta) - 1) / (1 - theta)`, also for theta near 1.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let power = (1.0 - self.theta) * log;
        if power.abs() < 1e-9 { log } else { log * power.exp_m1() / power }
    }

    fn inverse(&self, area: f64) -> f64 {
        // Rounding errors may lead out of the range of the inverse.
        let power = ((1.0 - self.theta) * area).max(-1.0);
        if power.abs() < 1e-9 { area.exp() } else { (area * power.ln_1p() / power).exp() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::Stream;
    use super::*;

    fn random() -> Random {
        Random::new(5, 0, 0, Stream::Keys)
    }

    /// A chi-squared test for each count and exponent.
    #[test]
    fn frequencies_follow_zipfs_law() {
        let draws = 200_000;
        for theta in [0.2, 0.5, 0.99, 1.0, 1.0 + 1e-12, 1.2, 2.0, 3.5] {
            for count in [2usize, 3, 10, 60] {
                let mut counts = vec![0u32; count];
                let (zipf, mut random) = (Zipf::new(count as u64, theta), random());
                (0..draws).for_each(|_| counts[zipf.draw(&mut random) as usize] += 1);
                let weights: Vec<f64> = (1..=count).map(|k| (k as f64).powf(-theta)).collect();
                let sum: f64 = weights.iter().sum();
                let (mut deviation, mut classes) = (0.0, 0.0);
                for (count, weight) in counts.iter().zip(&weights) {
                    let expected = weight / sum * f64::from(draws);
                    if expected > 20.0 {
                        deviation += (f64::from(*count) - expected).powi(2) / expected;
                        classes += 1.0;
                    }
                }
                // The mean of chi-squared is the number of classes, its standard deviation the root of twice that number.
                assert!(deviation < classes + 5.0 * f64::sqrt(2.0 * classes), "{theta} {count}: {deviation}");
            }
        }
    }

    #[test]
    fn extreme_parameters_stay_in_range() {
        for count in [1, 2, 1 << 32] {
            for theta in [1e-6, 0.99, 1.0, 8.0] {
                let (zipf, mut random) = (Zipf::new(count, theta), random());
                assert!((0..2000).all(|_| zipf.draw(&mut random) < count), "{count} {theta}");
            }
        }
        // With an exponent near 0 the distribution is nearly uniform: half of the draws are in the upper half.
        let (zipf, mut random) = (Zipf::new(1 << 32, 1e-6), random());
        let upper = (0..2000).filter(|_| zipf.draw(&mut random) >= 1 << 31).count();
        assert!((850..1150).contains(&upper), "{upper}");
    }
}
