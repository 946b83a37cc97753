//! Which devices there are, their ports and GIDs, and which GID to use.

use core::fmt;
use core::net::Ipv6Addr;
use std::ffi::CStr;
use std::path::{Path, PathBuf};

use rdma_mummy_sys as ffi;

use super::os;
use crate::device::DeviceError;

/// A device of this machine, see [`devices`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name, for `verbs:NAME`.
    pub name: String,
    /// Whether a user-space driver for it is installed. Without one it cannot be opened.
    pub has_driver: bool,
    /// Its ports, from 1.
    pub ports: Vec<PortInfo>,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortInfo {
    /// From 1.
    pub port: u8,
    /// What it is plugged into.
    pub link_layer: LinkLayer,
    /// Whether it carries traffic.
    pub active: bool,
    /// Its state in the kernel's words, for example `ACTIVE` or `DOWN`.
    pub state: String,
    /// Its addresses.
    pub gids: Vec<Gid>,
}

impl PortInfo {
    /// The GID that is used when the device text names none: RoCE v2 before v1, IPv4 before global IPv6 before
    /// link-local, lower index first.
    pub fn default_gid(&self) -> Option<&Gid> {
        choose(&self.gids)
    }
}

/// What a port is plugged into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// An InfiniBand fabric.
    InfiniBand,
    /// Ethernet: RoCE, Soft-RoCE.
    Ethernet,
    /// Neither.
    Unknown,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gid {
    /// Its index, for `verbs:NAME/PORT/INDEX`.
    pub index: u8,
    /// Which protocol it stands for.
    pub kind: GidKind,
    /// The address; IPv4 appears as an IPv4-mapped one.
    pub address: Ipv6Addr,
    /// The network interface it belongs to.
    pub interface: Option<String>,
}

/// Which protocol a GID stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum GidKind {
    /// Native InfiniBand.
    InfiniBand,
    /// RoCE over Ethernet frames: does not leave the subnet.
    RoceV1,
    /// RoCE over UDP/IP.
    RoceV2,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidKind::InfiniBand => "IB",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
        })
    }
}

/// The RDMA devices of this machine. An empty list means that libibverbs is there and no device is.
///
/// ```no_run
/// for device in crosstie::device::verbs::devices()? {
///     for port in &device.ports {
///         println!("{}/{}: {:?} {} {:?}", device.name, port.port, port.link_layer, port.state, port.default_gid());
///     }
/// }
/// # Ok::<(), crosstie::device::DeviceError>(())
/// ```
pub fn devices() -> Result<Vec<DeviceInfo>, DeviceError> {
    let opened = List::get("any")?;
    let mut names: Vec<String> = opened.names().collect();
    let driven = names.len();
    names.extend(kernel_devices().into_iter().filter(|n| !opened.names().any(|o| o == *n)));
    Ok(names
        .into_iter()
        .enumerate()
        .map(|(i, name)| DeviceInfo { ports: ports(&name), has_driver: i < driven, name })
        .collect())
}

/// Opens the named device, or says why not and what to do.
pub(super) fn open(name: &str) -> Result<*mut ffi::ibv_context, DeviceError> {
    let list = List::get(name)?;
    let missing = |reason: String| DeviceError::NoSuchDevice { name: name.to_owned(), reason };
    let Some(device) = list.devices().find(|d| name_of(*d) == name) else {
        if kernel_devices().iter().any(|n| n == name) {
            return Err(missing(
                "the kernel has it, but no user-space driver does: install ibverbs-providers".into(),
            ));
        }
        let names: Vec<String> = list.names().collect();
        return Err(missing(if names.is_empty() {
            "this machine has no RDMA device; any Ethernet interface can be one: \
             `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`"
                .into()
        } else {
            format!("no such device; there are: {}", names.join(", "))
        }));
    };
    // SAFETY: `device` is from the list, which lives until the end of this function.
    let context = unsafe { ffi::ibv_open_device(device) };
    if context.is_null() {
        let error = std::io::Error::last_os_error();
        return Err(missing(format!(
            "{error}; needs read and write access to /dev/infiniband/uverbs* (and the module ib_uverbs)"
        )));
    }
    Ok(context)
}

/// The list of libibverbs, freed when dropped. Opened devices outlive it.
struct List {
    start: *mut *mut ffi::ibv_device,
    len: usize,
}

impl List {
    fn get(name: &str) -> Result<List, DeviceError> {
        require_library(name)?;
        let mut len = 0;
        // SAFETY: `len` is a valid place for the count.
        let start = unsafe { ffi::ibv_get_device_list(&mut len) };
        if start.is_null() {
            // ENOSYS: the kernel has no RDMA at all. The same as no device, for the caller.
            return match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOSYS) => Ok(List { start, len: 0 }),
                code => Err(os("list RDMA devices", code)),
            };
        }
        Ok(List { start, len: usize::try_from(len).unwrap_or(0) })
    }

    fn devices(&self) -> impl Iterator<Item = *mut ffi::ibv_device> + '_ {
        // SAFETY: libibverbs gave an array of `len` pointers, which is freed in `drop` only.
        (0..self.len).map(|i| unsafe { *self.start.add(i) })
    }

    fn names(&self) -> impl Iterator<Item = String> + '_ {
        self.devices().map(name_of)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.start.is_null() {
            // SAFETY: `start` is from ibv_get_device_list and freed once.
            unsafe { ffi::ibv_free_device_list(self.start) };
        }
    }
}

fn name_of(device: *mut ffi::ibv_device) -> String {
    // SAFETY: `device` is an entry of a live list; its name is a C string inside it.
    unsafe {
        let name = ffi::ibv_get_device_name(device);
        if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
    }
}

/// The bindings look for libibverbs before `main` and answer EOPNOTSUPP for ever where they did not find it. The loader
/// knows the reason.
fn require_library(name: &str) -> Result<(), DeviceError> {
    // SAFETY: the bindings' start-up code has loaded the same library already if it can be; otherwise loading it runs its
    // initialisers, which are those of a system library. The handle is kept for the life of the process.
    let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: dlerror gives a C string that lives until the next call of the loader on this thread, or null.
    let why = unsafe {
        let text = libc::dlerror();
        if text.is_null() { "not found".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Err(DeviceError::NoSuchDevice {
        name: name.to_owned(),
        reason: format!(
            "libibverbs does not load ({why}): install libibverbs1 and ibverbs-providers (Debian, Ubuntu), or \
             libibverbs (Fedora, RHEL, SUSE)"
        ),
    })
}

const SYSFS: &str = "/sys/class/infiniband";

fn kernel_devices() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(SYSFS)
        .map(|dir| dir.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.sort();
    names
}

fn ports(device: &str) -> Vec<PortInfo> {
    let mut ports: Vec<PortInfo> = numbered(&Path::new(SYSFS).join(device).join("ports"))
        .filter_map(|(port, dir)| {
            // "4: ACTIVE"
            let state = read(dir.join("state"))?;
            Some(PortInfo {
                port,
                link_layer: match read(dir.join("link_layer"))?.as_str() {
                    "InfiniBand" => LinkLayer::InfiniBand,
                    "Ethernet" => LinkLayer::Ethernet,
                    _ => LinkLayer::Unknown,
                },
                active: state.starts_with("4:"),
                state: state.split_once(": ").map_or(state.clone(), |(_, word)| word.to_owned()),
                gids: gids(device, port),
            })
        })
        .collect();
    ports.sort_by_key(|p| p.port);
    ports
}

/// The GID table, from sysfs: it is there with every version of libibverbs and needs no open device.
pub(super) fn gids(device: &str, port: u8) -> Vec<Gid> {
    let dir = Path::new(SYSFS).join(device).join("ports").join(port.to_string());
    let mut gids: Vec<Gid> = numbered(&dir.join("gids"))
        .filter_map(|(index, file)| {
            let address: Ipv6Addr = read(file)?.parse().ok().filter(|a: &Ipv6Addr| !is_empty(a))?;
            // Reading the type of an empty entry fails.
            let kind = match read(dir.join("gid_attrs/types").join(index.to_string()))?.as_str() {
                "RoCE v2" => GidKind::RoceV2,
                // The kernel calls both of these by the first name on older versions; the link layer tells.
                "IB/RoCE v1" => match read(dir.join("link_layer"))?.as_str() {
                    "Ethernet" => GidKind::RoceV1,
                    _ => GidKind::InfiniBand,
                },
                "RoCE v1" => GidKind::RoceV1,
                _ => GidKind::InfiniBand,
            };
            let interface = read(dir.join("gid_attrs/ndevs").join(index.to_string()));
            Some(Gid { index, kind, address, interface })
        })
        .collect();
    gids.sort_by_key(|g| g.index);
    gids
}

/// No interface has such an address: all zero, or a default prefix without the rest.
fn is_empty(address: &Ipv6Addr) -> bool {
    address.segments()[4..] == [0; 4]
}

/// See [`PortInfo::default_gid`].
pub(super) fn choose(gids: &[Gid]) -> Option<&Gid> {
    let rank = |g: &Gid| {
        let family = match g.address {
            a if a.to_ipv4_mapped().is_some() => 2,
            a if !a.is_unicast_link_local() => 1,
            _ => 0,
        };
        (g.kind, family)
    };
    // `max_by_key` would take the last of equals.
    gids.iter().min_by_key(|g| (core::cmp::Reverse(rank(g)), g.index))
}

/// Entries of a directory that are called by a number.
fn numbered(dir: &Path) -> impl Iterator<Item = (u8, PathBuf)> + use<> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| Some((e.file_name().to_str()?.parse().ok()?, e.path())))
}

fn read(path: PathBuf) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, kind: GidKind, address: &str) -> Gid {
        Gid { index, kind, address: address.parse().unwrap(), interface: None }
    }

    #[test]
    fn default_is_routable_roce_v2() {
        use GidKind::*;
        let v4 = "::ffff:10.77.0.1";
        let table = [
            gid(0, RoceV1, "fe80::1"),
            gid(1, RoceV2, "fe80::1"),
            gid(2, RoceV1, v4),
            gid(3, RoceV2, "2001:db8::1"),
            gid(4, RoceV2, v4),
            gid(5, RoceV2, "::ffff:10.78.0.1"),
        ];
        assert_eq!(choose(&table).unwrap().index, 4);
        assert_eq!(choose(&table[..4]).unwrap().index, 3);
        assert_eq!(choose(&table[..3]).unwrap().index, 1);
        assert_eq!(choose(&table[..1]).unwrap().index, 0);
        assert_eq!(choose(&[]), None);
        assert!(is_empty(&"fe80::".parse().unwrap()) && !is_empty(&"fe80::1".parse().unwrap()));
    }

    #[test]
    fn a_machine_without_the_device_says_what_to_do() {
        let error = open("no-such-device").unwrap_err().to_string();
        assert!(error.contains("no-such-device"), "{error}");
        assert!(["install", "rdma link add", "there are"].iter().any(|hint| error.contains(hint)), "{error}");
    }
}
