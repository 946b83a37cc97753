//! Lists the devices of this machine with their ports and GIDs, and chooses the default GID.

use core::fmt;
use core::net::Ipv6Addr;
use std::ffi::CStr;
use std::path::{Path, PathBuf};

use rdma_mummy_sys as ffi;

use super::os_error;
use crate::device::DeviceError;

/// A device of this machine, see [`devices`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name, for `verbs:NAME`.
    pub name: String,
    /// Whether a user-space driver for it is installed; it cannot be opened without one.
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
    /// Its link layer.
    pub link_layer: LinkLayer,
    /// Whether it carries traffic.
    pub active: bool,
    /// Its state as the kernel reports it, for example `ACTIVE` or `DOWN`.
    pub state: String,
    /// Its addresses.
    pub gids: Vec<Gid>,
}

impl PortInfo {
    /// The GID that is used if the device name contains none: RoCE v2 before v1, IPv4 before global IPv6 before
    /// link-local, lower index first.
    pub fn default_gid(&self) -> Option<&Gid> {
        choose_gid(&self.gids)
    }
}

/// The link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE, Soft-RoCE.
    Ethernet,
    /// Any other.
    Unknown,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gid {
    /// Its index, for `verbs:NAME/PORT/INDEX`.
    pub index: u8,
    /// Its protocol.
    pub kind: GidKind,
    /// The address; an IPv4 address is IPv4-mapped.
    pub address: Ipv6Addr,
    /// The network interface it belongs to.
    pub interface: Option<String>,
}

/// The protocol of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum GidKind {
    /// Native InfiniBand.
    InfiniBand,
    /// RoCE directly in Ethernet frames: not routable.
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

/// The RDMA devices of this machine. An empty list means that libibverbs is installed but there is no device.
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
    let opened = DeviceList::get("any")?;
    let mut names: Vec<String> = opened.names().collect();
    let driven = names.len();
    names.extend(kernel_devices().into_iter().filter(|n| !opened.names().any(|o| o == *n)));
    Ok(names
        .into_iter()
        .enumerate()
        .map(|(i, name)| DeviceInfo { ports: ports(&name), has_driver: i < driven, name })
        .collect())
}

/// Opens the named device. The error says what is missing and what to do.
pub(super) fn open(name: &str) -> Result<*mut ffi::ibv_context, DeviceError> {
    let list = DeviceList::get(name)?;
    let missing = |reason: String| DeviceError::NoSuchDevice { name: name.to_owned(), reason };
    let Some(device) = list.devices().find(|d| name_of(*d) == name) else {
        if kernel_devices().iter().any(|n| n == name) {
            return Err(missing(
                "the kernel has this device, but it has no user-space driver: install ibverbs-providers"
                    .into(),
            ));
        }
        let names: Vec<String> = list.names().collect();
        return Err(missing(if names.is_empty() {
            "this machine has no RDMA device; create one on any Ethernet interface with Soft-RoCE: \
             `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`"
                .into()
        } else {
            format!("no such device; the devices of this machine are: {}", names.join(", "))
        }));
    };
    // SAFETY: `device` is from the list, which lives until the end of this function.
    let context = unsafe { ffi::ibv_open_device(device) };
    if context.is_null() {
        let error = std::io::Error::last_os_error();
        return Err(missing(format!(
            "cannot be opened ({error}): check for read and write access to /dev/infiniband/uverbs*, and that the \
             kernel module ib_uverbs is loaded"
        )));
    }
    Ok(context)
}

/// The device list of libibverbs, freed when dropped. Opened devices may outlive it.
struct DeviceList {
    start: *mut *mut ffi::ibv_device,
    len: usize,
}

impl DeviceList {
    fn get(name: &str) -> Result<DeviceList, DeviceError> {
        require_library(name)?;
        let mut len = 0;
        // SAFETY: `len` is a valid output pointer for the count.
        let start = unsafe { ffi::ibv_get_device_list(&mut len) };
        if start.is_null() {
            // ENOSYS: the kernel has no RDMA support. For the caller that is the same as having no device.
            return match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOSYS) => Ok(DeviceList { start, len: 0 }),
                code => Err(os_error("list RDMA devices", code)),
            };
        }
        Ok(DeviceList { start, len: usize::try_from(len).unwrap_or(0) })
    }

    fn devices(&self) -> impl Iterator<Item = *mut ffi::ibv_device> + '_ {
        // SAFETY: libibverbs returned an array of `len` pointers, which is freed in `drop` only.
        (0..self.len).map(|i| unsafe { *self.start.add(i) })
    }

    fn names(&self) -> impl Iterator<Item = String> + '_ {
        self.devices().map(name_of)
    }
}

impl Drop for DeviceList {
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

/// Checks that libibverbs can be loaded. The bindings load it before `main`; if that fails, all their calls return
/// EOPNOTSUPP. The dynamic loader knows the reason.
fn require_library(name: &str) -> Result<(), DeviceError> {
    // SAFETY: the start-up code of the bindings has loaded the same library already if that is possible. Otherwise, loading
    // it runs the initialisers of a system library. The handle is kept until the process ends.
    let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: dlerror returns null, or a C string that is valid until the next loader call of this thread.
    let why = unsafe {
        let text = libc::dlerror();
        if text.is_null() { "not found".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Err(DeviceError::NoSuchDevice {
        name: name.to_owned(),
        reason: format!(
            "libibverbs cannot be loaded ({why}): install libibverbs1 and ibverbs-providers (Debian, Ubuntu), or \
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

/// The GID table, from sysfs: that works with every version of libibverbs and needs no open device.
pub(super) fn gids(device: &str, port: u8) -> Vec<Gid> {
    let dir = Path::new(SYSFS).join(device).join("ports").join(port.to_string());
    let mut gids: Vec<Gid> = numbered(&dir.join("gids"))
        .filter_map(|(index, file)| {
            let address: Ipv6Addr = read(file)?.parse().ok().filter(|a: &Ipv6Addr| !is_empty(a))?;
            // For an empty entry, this read fails.
            let kind = match read(dir.join("gid_attrs/types").join(index.to_string()))?.as_str() {
                "RoCE v2" => GidKind::RoceV2,
                // Older kernels use this name for both protocols; the link layer distinguishes them.
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

/// Whether the entry is unused: all zero, or a default prefix with a zero interface id.
fn is_empty(address: &Ipv6Addr) -> bool {
    address.segments()[4..] == [0; 4]
}

/// See [`PortInfo::default_gid`].
pub(super) fn choose_gid(gids: &[Gid]) -> Option<&Gid> {
    let rank = |g: &Gid| {
        let family = match g.address {
            a if a.to_ipv4_mapped().is_some() => 2,
            a if !a.is_unicast_link_local() => 1,
            _ => 0,
        };
        (g.kind, family)
    };
    // Not `max_by_key`, which would return the last of equal entries.
    gids.iter().min_by_key(|g| (core::cmp::Reverse(rank(g)), g.index))
}

/// The entries of a directory whose names are numbers.
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
    fn default_gid_is_routable_roce_v2() {
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
        assert_eq!(choose_gid(&table).unwrap().index, 4);
        assert_eq!(choose_gid(&table[..4]).unwrap().index, 3);
        assert_eq!(choose_gid(&table[..3]).unwrap().index, 1);
        assert_eq!(choose_gid(&table[..1]).unwrap().index, 0);
        assert_eq!(choose_gid(&[]), None);
        assert!(is_empty(&"fe80::".parse().unwrap()) && !is_empty(&"fe80::1".parse().unwrap()));
    }

    #[test]
    fn error_for_a_missing_device_says_what_to_do() {
        let error = open("no-such-device").unwrap_err().to_string();
        assert!(error.contains("no-such-device"), "{error}");
        assert!(
            ["install", "rdma link add", "the devices of this machine are"]
                .iter()
                .any(|hint| error.contains(hint)),
            "{error}"
        );
    }
}
