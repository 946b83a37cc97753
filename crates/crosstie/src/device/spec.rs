//! Device names as text: `software`, `verbs:NAME[/PORT[/GID]]`, `fault:SEED[/KIND=N]...:DEVICE`.

use core::fmt;
use core::str::FromStr;

use super::DeviceError;
use super::fault::Odds;

/// Which device to open. It is parsed from, and printed as, the text that the command line accepts.
///
/// ```
/// use crosstie::device::DeviceSpec;
/// let spec: DeviceSpec = "fault:7:verbs:mlx5_0/1/3".parse().unwrap();
/// assert_eq!(spec.to_string(), "fault:7:verbs:mlx5_0/1/3");
/// assert!("verbs:".parse::<DeviceSpec>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum DeviceSpec {
    /// The software device of this machine.
    #[default]
    Software,
    /// An RDMA device of rdma-core.
    Verbs {
        /// Its name, as `ibv_devices` prints it.
        name: String,
        /// Port, from 1.
        port: u8,
        /// GID index; the provider chooses one if absent.
        gid_index: Option<u8>,
    },
    /// Another device, with faults drawn from a seed.
    Fault {
        /// Seed of the plan.
        seed: u64,
        /// How often each kind of fault happens.
        odds: Odds,
        /// The wrapped device.
        inner: Box<DeviceSpec>,
    },
}

impl FromStr for DeviceSpec {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let invalid = || DeviceError::InvalidSpec(text.to_owned());
        if text == "software" {
            return Ok(DeviceSpec::Software);
        }
        if let Some(rest) = text.strip_prefix("verbs:") {
            let mut parts = rest.split('/');
            let name = parts.next().filter(|n| !n.is_empty()).ok_or_else(invalid)?.to_owned();
            let port = parts.next().map_or(Ok(1), str::parse).map_err(|_| invalid())?;
            let gid_index = parts.next().map(str::parse).transpose().map_err(|_| invalid())?;
            if parts.next().is_some() || port == 0 {
                return Err(invalid());
            }
            return Ok(DeviceSpec::Verbs { name, port, gid_index });
        }
        if let Some((seed, inner)) = text.strip_prefix("fault:").and_then(|rest| rest.split_once(':')) {
            let (seed, odds) = match seed.split_once('/') {
                Some((seed, odds)) => {
                    let odds = odds.parse();
                    (seed, odds.map_err(|cause| DeviceError::InvalidOdds { spec: text.to_owned(), cause })?)
                }
                None => (seed, Odds::default()),
            };
            let seed = seed.parse().map_err(|_| invalid())?;
            let inner: DeviceSpec = inner.parse()?;
            if matches!(inner, DeviceSpec::Fault { .. }) {
                return Err(invalid());
            }
            return Ok(DeviceSpec::Fault { seed, odds, inner: Box::new(inner) });
        }
        Err(invalid())
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Software => f.write_str("software"),
            DeviceSpec::Verbs { name, port, gid_index } => {
                write!(f, "verbs:{name}")?;
                match (port, gid_index) {
                    (1, None) => Ok(()),
                    (port, None) => write!(f, "/{port}"),
                    (port, Some(gid)) => write!(f, "/{port}/{gid}"),
                }
            }
            DeviceSpec::Fault { seed, odds, inner } if *odds == Odds::default() => {
                write!(f, "fault:{seed}:{inner}")
            }
            DeviceSpec::Fault { seed, odds, inner } => write!(f, "fault:{seed}/{odds}:{inner}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_specs_round_trip_and_invalid_specs_are_rejected() {
        for text in [
            "software",
            "verbs:rxe0",
            "verbs:rxe0/2",
            "verbs:rxe0/1/0",
            "fault:18446744073709551615:software",
            "fault:3/lose=7/stall=9:software",
            "fault:3/:software",
        ] {
            assert_eq!(text.parse::<DeviceSpec>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "soft",
            "verbs",
            "verbs:/1",
            "verbs:a/0",
            "verbs:a/1/2/3",
            "verbs:a/x",
            "fault:software",
            "fault:1:fault:2:software",
            "fault:1/lose:software",
            "fault:/lose=1:software",
        ] {
            assert!(text.parse::<DeviceSpec>().is_err(), "{text}");
        }
        let unknown = "fault:1/explode=2:software".parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(unknown.contains("explode") && unknown.contains("lose, drop, fail"), "{unknown}");
    }
}
