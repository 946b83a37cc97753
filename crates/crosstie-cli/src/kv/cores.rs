//! The argument of `--cores`: which cores daemons are pinned to.

use std::path::Path;
use std::str::FromStr;

use crosstie::device::DeviceSpec;

use crate::error::Error;

/// Where the kernel describes RDMA devices.
const INFINIBAND: &str = "/sys/class/infiniband";
/// The largest number of a core. The kernel has fewer.
const MAX_CORE: usize = 1 << 16;

/// The argument of `--cores`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cores {
    /// These, in this order.
    List(Vec<usize>),
    /// Cores near the network adapter of `--device`.
    Nic,
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Cores, String> {
        if text == "nic" {
            return Ok(Cores::Nic);
        }
        let list = parse_list(text)?;
        if let Some(core) =
            list.iter().enumerate().find(|(at, core)| list[..*at].contains(core)).map(|(_, core)| core)
        {
            return Err(format!("core {core} is named twice"));
        }
        Ok(Cores::List(list))
    }
}

impl Cores {
    /// A core for each of `daemons`.
    pub(super) fn choose(&self, device: &DeviceSpec, daemons: u32) -> Result<Vec<usize>, Error> {
        let mut cores = match self {
            Cores::List(list) => list.clone(),
            Cores::Nic => nic_cores(Path::new(INFINIBAND), device)?,
        };
        if cores.len() < daemons as usize {
            return Err(Error::Usage(format!(
                "--cores: {} cores for {daemons} daemons: name a core for each daemon",
                cores.len()
            )));
        }
        cores.truncate(daemons as usize);
        Ok(cores)
    }
}

/// The cores near the network adapter of a device, as the kernel lists them.
fn nic_cores(infiniband: &Path, device: &DeviceSpec) -> Result<Vec<usize>, Error> {
    let name = match device {
        DeviceSpec::Verbs { name, .. } => name,
        DeviceSpec::Fault { inner, .. } => return nic_cores(infiniband, inner),
        _ => {
            return Err(Error::Usage(format!(
                "--cores nic: the device {device} has no network adapter: use --device verbs:NAME, or name cores"
            )));
        }
    };
    let file = infiniband.join(name).join("device/local_cpulist");
    let unknown =
        |why: String| Error::Usage(format!("--cores nic: {}: {why}: name cores instead", file.display()));
    let list = std::fs::read_to_string(&file).map_err(|error| unknown(error.to_string()))?;
    parse_list(list.trim()).map_err(unknown)
}

/// Parses a list of cores as the kernel writes it: `0-3,8`.
fn parse_list(text: &str) -> Result<Vec<usize>, String> {
    let wrong = || format!("{text:?} is not a list of cores: write 0-3,8 or nic");
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let [first, last] =
            [first, last].map(|number| number.parse().ok().filter(|core: &usize| *core < MAX_CORE));
        match (first, last) {
            (Some(first), Some(last)) if first <= last => cores.extend(first..=last),
            _ => return Err(wrong()),
        }
        if cores.len() > MAX_CORE {
            return Err(wrong());
        }
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_lists_as_the_kernel_writes_them() {
        assert_eq!("0-3,8".parse(), Ok(Cores::List(vec![0, 1, 2, 3, 8])));
        assert_eq!("5".parse(), Ok(Cores::List(vec![5])));
        assert_eq!("nic".parse(), Ok(Cores::Nic));
        for wrong in ["", ",", "3-1", "1-", "-1", "a", "0-99999999", "1,1", "0-3,2", "1 2"] {
            assert!(wrong.parse::<Cores>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn chooses_as_many_cores_as_there_are_daemons() {
        let cores = Cores::List(vec![4, 2, 7]);
        assert_eq!(cores.choose(&DeviceSpec::Software, 2).unwrap(), [4, 2]);
        assert!(cores.choose(&DeviceSpec::Software, 4).is_err());
    }

    #[test]
    fn nic_cores_are_those_that_the_kernel_lists_for_the_device() {
        let root = std::env::temp_dir().join(format!("crosstie-nic-cores-{}", std::process::id()));
        let device = root.join("mlx5_1/device");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("local_cpulist"), "16-17,48\n").unwrap();
        let spec = |text: &str| text.parse::<DeviceSpec>().unwrap();
        let found = nic_cores(&root, &spec("verbs:mlx5_1/1/3"));
        let missing = nic_cores(&root, &spec("verbs:mlx5_0"));
        let software = nic_cores(&root, &DeviceSpec::Software);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found.unwrap(), [16, 17, 48]);
        assert!(missing.unwrap_err().to_string().contains("mlx5_0"));
        assert!(software.unwrap_err().to_string().contains("no network adapter"));
    }
}
