//! Options that several benchmarks have: how long to measure, and the devices of the two sides.

use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

use crosstie::device::DeviceSpec;

use crate::error::Error;

/// The longest measurement.
const MAX_SECONDS: f64 = 3600.0;
/// Length of a slice. Slices of the benchmark alternate with slices of the limits.
const SLICE: Duration = Duration::from_millis(25);

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasureTime(Duration);

impl MeasureTime {
    /// From the seconds of `--duration`.
    pub(crate) fn new(seconds: f64) -> Result<MeasureTime, Error> {
        if seconds > 0.0 && seconds <= MAX_SECONDS {
            return Ok(MeasureTime(Duration::from_secs_f64(seconds)));
        }
        Err(Error::Usage(format!("--duration {seconds}: give seconds above 0, up to {MAX_SECONDS}")))
    }

    /// Number and length of the slices.
    pub(crate) fn slices(&self) -> (u32, Duration) {
        let count = (self.0.as_secs_f64() / SLICE.as_secs_f64()).round().max(1.0) as u32;
        (count, self.0 / count)
    }

    /// The option as arguments of a command line.
    pub(crate) fn to_args(self) -> [OsString; 2] {
        ["--duration".into(), self.0.as_secs_f64().to_string().into()]
    }
}

/// The devices of the two sides. If they are equal, the text shows one.
#[derive(Clone, Debug)]
pub(crate) struct Devices([DeviceSpec; 2]);

impl Devices {
    /// From `--device`: one for both sides, or one for each side.
    pub(crate) fn new(specs: &[DeviceSpec]) -> Result<Devices, Error> {
        match specs {
            [one] => Ok(Devices([one.clone(), one.clone()])),
            [left, right] => Ok(Devices([left.clone(), right.clone()])),
            more => {
                let count = more.len();
                Err(Error::Usage(format!("--device names {count} devices: give one, or one for each side")))
            }
        }
    }

    /// The device of the leading side, and that of the other side.
    pub(crate) fn both(&self) -> &[DeviceSpec; 2] {
        &self.0
    }

    /// The option as arguments of a command line.
    pub(crate) fn to_args(&self) -> [OsString; 2] {
        ["--device".into(), self.to_string().into()]
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [left, right] = &self.0;
        if left == right { left.fmt(f) } else { write!(f, "{left},{right}") }
    }
}
