//! Options that several benchmarks have, and parsers of their values.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::RangedU64ValueParser;
use crosstie::device::DeviceSpec;

use crate::error::Error;

/// The longest measurement.
const MAX_SECONDS: f64 = 3600.0;
/// Length of a slice. Slices of the benchmark alternate with slices of the limits.
const SLICE: Duration = Duration::from_millis(25);

/// Options of every benchmark.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Common {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Seconds to measure; measuring the limits of the machine in between takes about as long again.
    #[arg(long, value_name = "S", default_value = "2")]
    pub(crate) duration: MeasureTime,
}

/// Options of a benchmark between two sides.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Sides {
    /// Device of both sides, or of each: software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE.
    #[arg(long, value_name = "SPEC[,SPEC]", value_delimiter = ',', default_value = "software")]
    pub(crate) device: Vec<DeviceSpec>,
    /// Run the two sides as two processes, not as two threads.
    #[arg(long)]
    pub(crate) processes: bool,
}

impl Sides {
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.device.len() {
            1 | 2 => Ok(()),
            count => usage(format!("--device names {count} devices: give one, or one for each side")),
        }
    }

    /// The device of both sides, or the two that differ.
    pub(crate) fn name(&self) -> String {
        let mut names: Vec<String> = self.device.iter().map(DeviceSpec::to_string).collect();
        names.dedup();
        names.join(",")
    }
}

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasureTime(pub(crate) Duration);

impl FromStr for MeasureTime {
    type Err = String;

    fn from_str(text: &str) -> Result<MeasureTime, String> {
        match text.parse() {
            Ok(seconds) if seconds > 0.0 && seconds <= MAX_SECONDS => {
                Ok(MeasureTime(Duration::from_secs_f64(seconds)))
            }
            _ => Err(format!("give seconds above 0, up to {MAX_SECONDS}")),
        }
    }
}

impl MeasureTime {
    /// Number and length of the slices.
    pub(crate) fn slices(self) -> (u32, Duration) {
        let count = (self.0.as_secs_f64() / SLICE.as_secs_f64()).round().max(1.0) as u32;
        (count, self.0 / count)
    }
}

/// The error of a wrong command line.
pub(crate) fn usage<T>(text: String) -> Result<T, Error> {
    Err(Error::Usage(text))
}

/// Refuses options that need more than `limit` bytes of memory. `options` names them with their values.
pub(crate) fn check_memory(options: &str, bytes: usize, limit: usize) -> Result<(), Error> {
    if bytes <= limit {
        Ok(())
    } else {
        usage(format!("{options}: needs {bytes} bytes, keep it under {limit}"))
    }
}

/// Parses a whole number in a range.
pub(crate) fn within(range: RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

/// Parses a share from 0 to `most`.
pub(crate) fn share_up_to(most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync {
    move |text| match text.parse() {
        Ok(share) if (0.0..=most).contains(&share) => Ok(share),
        _ => Err(format!("give a share from 0 to {most}")),
    }
}

/// The name of a value on the command line and in JSON.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
