//! What every plan of a measurement has: how long it takes, and on which devices.

use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

use crosstie::device::DeviceSpec;

use crate::error::Error;

/// The longest run.
const MAX_SECONDS: f64 = 3600.0;
/// Our slice; the limits are measured between two of them.
const SLICE: Duration = Duration::from_millis(25);

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasureTime(Duration);

impl MeasureTime {
    /// As `--duration` has it.
    pub(crate) fn new(seconds: f64) -> Result<MeasureTime, Error> {
        if seconds > 0.0 && seconds <= MAX_SECONDS {
            return Ok(MeasureTime(Duration::from_secs_f64(seconds)));
        }
        Err(Error::Usage(format!("--duration {seconds}: give seconds above 0, up to {MAX_SECONDS}")))
    }

    /// How many slices, of which length.
    pub(crate) fn slices(&self) -> (u32, Duration) {
        let count = (self.0.as_secs_f64() / SLICE.as_secs_f64()).round().max(1.0) as u32;
        (count, self.0 / count)
    }

    /// The words of a command line that say this.
    pub(crate) fn to_args(&self) -> [OsString; 2] {
        ["--duration".into(), self.0.as_secs_f64().to_string().into()]
    }
}

/// The device of each of two sides. Shown once where they are alike.
#[derive(Clone, Debug)]
pub(crate) struct Devices([DeviceSpec; 2]);

impl Devices {
    /// As `--device` has them: one, or one for each side.
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

    /// That of the leading side, and that of the other.
    pub(crate) fn both(&self) -> &[DeviceSpec; 2] {
        &self.0
    }

    /// The words of a command line that say this.
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
