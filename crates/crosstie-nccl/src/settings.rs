//! Environment variables.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `CROSSTIE_NCCL_DEVICES` | devices for NCCL, separated by commas; the rails of one device are joined with `+` | every RDMA device with an active port (feature `verbs`), otherwise `software` |
//! | `CROSSTIE_NCCL_SPLIT` | `adaptive`, or a weight for each rail: `3:1` | `adaptive` |
//! | `CROSSTIE_NCCL_ADDRESS` | IP address at which connections are set up | the address of the default route; loopback if there is none, or if all rails are software devices |
//! | `CROSSTIE_NCCL_TRAFFIC_CLASS` | traffic class of RDMA connections, if NCCL gives none | 0 |
//! | `CROSSTIE_NCCL_GPU` | `0` switches GPU memory (DMA-BUF) off | `1` |
//! | `CROSSTIE_NCCL_LOG` | `off`, `warn`, `info` or `trace`; `NCCL_DEBUG` must allow it, too | `info` |

use std::net::IpAddr;
use std::str::FromStr;

use crosstie::device::DeviceSpec;
use crosstie::rails::{MAX_RAILS, Split};

use crate::log::Level;

/// What the environment says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The rails of each device that NCCL sees; `None` means: look for them.
    pub(crate) devices: Option<Vec<Vec<DeviceSpec>>>,
    pub(crate) split: Split,
    pub(crate) address: Option<IpAddr>,
    pub(crate) traffic_class: u8,
    pub(crate) gpu: bool,
    pub(crate) log: Level,
}

/// A variable has a value that is not allowed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value}: {expected}")]
pub(crate) struct SettingError {
    name: &'static str,
    value: String,
    expected: &'static str,
}

/// The most devices that NCCL is shown.
pub(crate) const MAX_DEVICES: usize = 32;

impl Settings {
    /// Reads the environment.
    pub(crate) fn from_env() -> Result<Settings, SettingError> {
        Settings::parse(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn parse(get: impl Fn(&str) -> Option<String>) -> Result<Settings, SettingError> {
        Ok(Settings {
            devices: read(&get, "CROSSTIE_NCCL_DEVICES", DEVICES, parse_devices)?,
            split: read(&get, "CROSSTIE_NCCL_SPLIT", SPLIT, parse_split)?.unwrap_or(Split::Adaptive),
            address: read(&get, "CROSSTIE_NCCL_ADDRESS", "give an IP address of this machine", from_str)?,
            traffic_class: read(
                &get,
                "CROSSTIE_NCCL_TRAFFIC_CLASS",
                "give a number from 0 to 255",
                from_str,
            )?
            .unwrap_or(0),
            gpu: read(&get, "CROSSTIE_NCCL_GPU", "give 0 or 1", parse_switch)?.unwrap_or(true),
            log: read(&get, "CROSSTIE_NCCL_LOG", "give off, warn, info or trace", parse_level)?
                .unwrap_or(Level::Info),
        })
    }
}

const DEVICES: &str = "give devices separated by commas, of one to four rails joined with +, \
                       for example verbs:mlx5_0+verbs:mlx5_1,verbs:mlx5_2+verbs:mlx5_3 or software";
const SPLIT: &str = "give adaptive, or weights such as 3:1, one for each rail and not all 0";

fn read<T>(
    get: &impl Fn(&str) -> Option<String>,
    name: &'static str,
    expected: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, SettingError> {
    get(name).map(|value| parse(value.trim()).ok_or(SettingError { name, value, expected })).transpose()
}

fn from_str<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn parse_devices(text: &str) -> Option<Vec<Vec<DeviceSpec>>> {
    let devices: Vec<Vec<DeviceSpec>> = text
        .split(',')
        .map(|device| device.split('+').map(|rail| rail.trim().parse().ok()).collect())
        .collect::<Option<_>>()?;
    let fits = devices.len() <= MAX_DEVICES && devices.iter().all(|rails| rails.len() <= MAX_RAILS);
    fits.then_some(devices)
}

fn parse_split(text: &str) -> Option<Split> {
    if text == "adaptive" {
        return Some(Split::Adaptive);
    }
    let mut weights = [0; MAX_RAILS];
    let given: Vec<u32> = text.split(':').map(|weight| weight.trim().parse().ok()).collect::<Option<_>>()?;
    weights.get_mut(..given.len())?.copy_from_slice(&given);
    (weights != [0; MAX_RAILS]).then_some(Split::Fixed(weights))
}

fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

fn parse_level(text: &str) -> Option<Level> {
    Some(match text {
        "off" => Level::Off,
        "warn" => Level::Warn,
        "info" => Level::Info,
        "trace" => Level::Trace,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(variables: &[(&str, &str)]) -> Result<Settings, SettingError> {
        Settings::parse(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn defaults_hold_when_nothing_is_set() {
        let settings = parse(&[]).unwrap();
        assert_eq!((settings.devices, settings.split), (None, Split::Adaptive));
        assert_eq!((settings.address, settings.traffic_class), (None, 0));
        assert!(settings.gpu && settings.log == Level::Info);
    }

    #[test]
    fn devices_and_their_rails_are_parsed() {
        let text = "verbs:mlx5_0+verbs:mlx5_1/1/3 , software";
        let devices = parse(&[("CROSSTIE_NCCL_DEVICES", text)]).unwrap().devices.unwrap();
        assert_eq!(devices.len(), 2);
        assert_eq!(devices[0][1].to_string(), "verbs:mlx5_1/1/3");
        assert_eq!(devices[1], [DeviceSpec::Software]);
    }

    #[test]
    fn weights_are_parsed() {
        let split = |text| parse(&[("CROSSTIE_NCCL_SPLIT", text)]).map(|settings| settings.split);
        assert_eq!(split("3:1").unwrap(), Split::Fixed([3, 1, 0, 0]));
        assert_eq!(split("adaptive").unwrap(), Split::Adaptive);
        assert_eq!(split("0:0:0:5").unwrap(), Split::Fixed([0, 0, 0, 5]));
    }

    #[test]
    fn invalid_values_are_refused_with_the_name_of_the_variable() {
        for (name, value) in [
            ("CROSSTIE_NCCL_DEVICES", "eth0"),
            ("CROSSTIE_NCCL_DEVICES", "software,"),
            ("CROSSTIE_NCCL_DEVICES", "software+software+software+software+software"),
            ("CROSSTIE_NCCL_SPLIT", "0:0"),
            ("CROSSTIE_NCCL_SPLIT", "1:1:1:1:1"),
            ("CROSSTIE_NCCL_SPLIT", "half"),
            ("CROSSTIE_NCCL_ADDRESS", "localhost"),
            ("CROSSTIE_NCCL_TRAFFIC_CLASS", "256"),
            ("CROSSTIE_NCCL_GPU", "yes"),
            ("CROSSTIE_NCCL_LOG", "loud"),
        ] {
            let error = parse(&[(name, value)]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}={value}: give ")), "{error}");
        }
    }
}
