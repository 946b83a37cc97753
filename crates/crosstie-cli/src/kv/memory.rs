//! `--memory` of `kv serve`: how much memory the keys and values of a node may take.
//!
//! A node takes memory only as keys and values arrive. A limit that the machine cannot hold would therefore be noticed late: the
//! kernel would kill the node. So such a limit is refused at the start.

use std::fs;
use std::path::Path;

use crosstie_bench::units::bytes;

/// The default, where the machine has at least twice as much.
const DEFAULT: u64 = 1 << 30;

/// Memory that this process can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Available {
    bytes: u64,
    /// Who has it, for the error text.
    owner: &'static str,
}

impl Available {
    /// The memory of this machine, or of the container (control group) of this process if that is less. `None` if the system does
    /// not tell.
    pub(super) fn read() -> Option<Available> {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let machine =
            total(&read("/proc/meminfo")).map(|bytes| Available { bytes, owner: "this machine" }).into_iter();
        let group = group_limit(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"))
            .map(|bytes| Available { bytes, owner: "the container (control group) of this process" });
        machine.chain(group).min_by_key(|available| available.bytes)
    }
}

/// The limit for keys and values: what was asked for, or the default. The error says why it is too much.
pub(super) fn choose(asked: Option<u64>, available: Option<Available>) -> Result<u64, String> {
    match (asked, available) {
        (Some(asked), Some(Available { bytes: most, owner })) if asked > most => {
            Err(format!("--memory {}: {owner} has only {}: give less", bytes(asked), bytes(most)))
        }
        (Some(asked), _) => Ok(asked),
        (None, available) => Ok(available.map_or(DEFAULT, |available| DEFAULT.min(available.bytes / 2))),
    }
}

/// Parses the argument of `--memory`.
pub(super) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        "TiB" => Some(40),
        _ => None,
    };
    let number: Option<u64> = digits.parse().ok();
    let product = shift.and_then(|shift| number?.checked_mul(1 << shift));
    product
        .filter(|bytes| *bytes > 0)
        .ok_or("give a number above 0, of bytes or with KiB, MiB, GiB, TiB".to_owned())
}

/// `MemTotal` of `/proc/meminfo`, in bytes.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The smallest memory limit of the control groups that `/proc/self/cgroup` lists, and of the groups around them. `root` is where
/// the groups are mounted. A container sees its own group at the root, whatever path is listed.
fn group_limit(groups: &str, root: &Path) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // Version 2 has one hierarchy, which names no controllers; version 1 has one for memory.
        let (mount, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            // Without a limit the text is "max".
            let text = fs::read_to_string(mount.join(group).join(file)).unwrap_or_default();
            least = text.trim().parse().ok().into_iter().chain(least).min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_binary_units() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("1GiB"), Ok(1 << 30));
        assert_eq!(parse("16KiB"), Ok(16 << 10));
        for wrong in ["", "0", "GiB", "1GB", "-1", "1.5GiB", "99999999999TiB", "1 GiB", "1ÄB"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn more_than_there_is_is_refused_and_the_default_fits() {
        let small = Available { bytes: 512 << 20, owner: "this machine" };
        assert_eq!(choose(Some(512 << 20), Some(small)), Ok(512 << 20));
        let refused = choose(Some(1 << 30), Some(small)).unwrap_err();
        assert_eq!(refused, "--memory 1.00 GiB: this machine has only 512 MiB: give less");
        assert_eq!(choose(None, Some(small)), Ok(256 << 20));
        assert_eq!(choose(None, Some(Available { bytes: 8 << 30, ..small })), Ok(1 << 30));
        assert_eq!((choose(None, None), choose(Some(1 << 50), None)), (Ok(1 << 30), Ok(1 << 50)));
    }

    #[test]
    fn memory_of_this_machine_is_found() {
        assert_eq!(total("MemTotal:       24684096 kB\nMemFree:        1 kB\n"), Some(24_684_096 * 1024));
        assert_eq!(total("MemFree: 1 kB\n"), None);
        assert!(Available::read().is_some_and(|available| available.bytes > 16 << 20));
    }

    #[test]
    fn smallest_limit_of_the_groups_around_a_process_counts() {
        let root = std::env::temp_dir().join(format!("crosstie-groups-{}", std::process::id()));
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let limit = |groups: &str| group_limit(groups, &root);
        assert_eq!(limit("0::/service/node\n"), None, "there are no groups");
        write("service/memory.max", "1000\n");
        write("service/node/memory.max", "max\n");
        assert_eq!(limit("0::/service/node\n"), Some(1000));
        assert_eq!(limit("0::/other\n"), None);
        write("memory.max", "300\n");
        assert_eq!(limit("0::/no/such/group\n"), Some(300), "a container");
        write("memory/group/memory.limit_in_bytes", "200\n");
        assert_eq!(limit("5:cpu,cpuacct:/group\n4:memory:/group\n0::/\n"), Some(200));
        assert_eq!(limit("nothing known"), None);
        fs::remove_dir_all(&root).unwrap();
    }
}
