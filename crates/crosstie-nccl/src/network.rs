//! The network as NCCL sees it: devices of one to four rails, and a context per communicator.

use core::ffi::{CStr, c_float, c_int};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::collections::HashMap;
use std::ffi::CString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use crosstie::device::{Device, DeviceSpec};
use crosstie::rails::{Config, MAX_RAILS, Rails};

use crate::fault::Fault;
use crate::header::{CommConfig, PTR_DMABUF, PTR_HOST, TRAFFIC_CLASS_UNDEFINED};
use crate::key::{Key, Kind};
use crate::log::{self, Logger, info, warning};
use crate::settings::{MAX_DEVICES, Settings};
use crate::table::Table;

/// Comms of each direction.
pub(crate) const MAX_COMMS: u32 = 1 << 16;
/// Bytes in one message, if the devices allow it.
const MAX_BYTES: usize = 1 << 30;
/// Communicators at a time.
const MAX_CONTEXTS: u32 = 1 << 12;
/// Receives that can be outstanding on a connection: what NCCL uses. Each slot has cache lines of its own at both ends, so few slots are
/// faster than many.
const SLOTS: usize = 32;
/// See [`Config::low_water`] and [`Config::high_water`].
const LOW_WATER: u32 = 64;
const HIGH_WATER: u32 = 128;
/// What is said about the speed of a NIC whose speed is not known, in Mbit/s.
const DEFAULT_SPEED: c_int = 200_000;
/// The speed of a software device, in Mbit/s: about what the one progress thread of NCCL copies there. NCCL chooses its protocol by it.
/// With 200,000 it sends messages of 256 KiB with twice as many bytes (protocol LL), which takes a third longer.
const SOFTWARE_SPEED: c_int = 50_000;
/// On software devices, messages of at most so many bytes are staged, see [`Config::staging`]. The rails' own choice is right for a
/// program that waits for a message; but the kernels of NCCL see a message (protocol LL) as soon as it is in place.
const STAGING: u32 = 1 << 10;

/// A device that NCCL sees. It exists until the process ends; its rails are opened when they are needed.
#[derive(Debug)]
pub(crate) struct NetDevice {
    specs: Vec<DeviceSpec>,
    name: CString,
    pci_path: Option<CString>,
    guid: u64,
    speed: c_int,
    port: c_int,
    has_gpu_memory: bool,
    /// Bytes in one message on any of its rails.
    max_bytes: usize,
    /// The numbers of the devices that it consists of; its own if it is no virtual device.
    members: Vec<c_int>,
    /// By traffic class.
    contexts: Mutex<HashMap<u8, Rails>>,
    opened: Mutex<Vec<Device>>,
}

struct Network {
    settings: Settings,
    devices: Mutex<Vec<&'static NetDevice>>,
}

static NETWORK: OnceLock<Network> = OnceLock::new();
static ONE_INIT: Mutex<()> = Mutex::new(());

/// A communicator of version 11 and later.
struct Context {
    traffic_class: Option<u8>,
}

static CONTEXTS: LazyLock<Table<Context>> = LazyLock::new(|| Table::new(Kind::Context, MAX_CONTEXTS));
static CONTEXT_COUNT: AtomicUsize = AtomicUsize::new(0);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `init`: reads the environment and opens the devices.
pub(crate) fn init(logger: Option<Logger>) -> Result<(), Fault> {
    log::set_logger(logger);
    let _one = locked(&ONE_INIT);
    if NETWORK.get().is_some() {
        return Ok(());
    }
    let settings = Settings::from_env()?;
    log::set_level(settings.log);
    let specs = match &settings.devices {
        Some(devices) => devices.clone(),
        None => find_devices(),
    };
    let mut devices: Vec<&'static NetDevice> = Vec::new();
    for rails in specs {
        let members = vec![devices.len() as c_int];
        let device = NetDevice::open(rails, members, &settings)?;
        info!("device {} is {}{}", devices.len(), device.describe(), device.describe_memory());
        devices.push(Box::leak(Box::new(device)));
    }
    let network = Network { settings, devices: Mutex::new(devices) };
    // Nobody else initialises meanwhile.
    NETWORK.get_or_init(|| network);
    Ok(())
}

/// `init` of a communicator.
pub(crate) fn init_context(
    logger: Option<Logger>,
    _communicator: u64,
    config: Option<CommConfig>,
) -> Result<Key, Fault> {
    init(logger)?;
    let traffic_class = config.map(|config| check_class(config.traffic_class)).transpose()?.flatten();
    let key = CONTEXTS.insert(Context { traffic_class })?;
    CONTEXT_COUNT.fetch_add(1, Relaxed);
    Ok(key)
}

/// `finalize` of a communicator. After the last one the devices are closed; the next one opens them again.
pub(crate) fn finalize(context: Key) -> Result<(), Fault> {
    CONTEXTS.remove(context)?;
    if CONTEXT_COUNT.fetch_sub(1, Relaxed) == 1
        && let Some(network) = NETWORK.get()
    {
        for device in locked(&network.devices).iter() {
            // Connections that are still open keep what they need.
            locked(&device.contexts).clear();
            locked(&device.opened).clear();
        }
    }
    Ok(())
}

fn check_class(class: c_int) -> Result<Option<u8>, Fault> {
    if class == TRAFFIC_CLASS_UNDEFINED {
        return Ok(None);
    }
    u8::try_from(class).map(Some).map_err(|_| Fault::Argument("the traffic class must be 0 to 255"))
}

/// The traffic class of a connection: that of the call, or of the communicator, or of the environment.
pub(crate) fn traffic_class(context: Option<Key>, config: Option<CommConfig>) -> Result<u8, Fault> {
    let of_call = config.map(|config| check_class(config.traffic_class)).transpose()?.flatten();
    let of_context = match context {
        Some(key) => CONTEXTS.lock(key)?.traffic_class,
        None => None,
    };
    Ok(of_call.or(of_context).unwrap_or(network()?.settings.traffic_class))
}

fn network() -> Result<&'static Network, Fault> {
    NETWORK.get().ok_or(Fault::Argument("init was not called, or it failed"))
}

/// How many devices there are.
pub(crate) fn device_count() -> usize {
    NETWORK.get().map_or(0, |network| locked(&network.devices).len())
}

/// The device with this number.
pub(crate) fn device(number: c_int) -> Result<&'static NetDevice, Fault> {
    let devices = locked(&network()?.devices);
    let index = usize::try_from(number).map_err(|_| Fault::NoSuchDevice(number))?;
    devices.get(index).copied().ok_or(Fault::NoSuchDevice(number))
}

/// `makeVDevice`: a device with the rails of several.
pub(crate) fn make_virtual_device(members: &[c_int]) -> Result<c_int, Fault> {
    let network = network()?;
    let mut rails = Vec::new();
    for (at, member) in members.iter().enumerate() {
        if members[..at].contains(member) {
            return Err(Fault::Argument("a device is named twice"));
        }
        let device = device(*member)?;
        if device.members != [*member] {
            return Err(Fault::Argument("a virtual device consists of devices that are not virtual"));
        }
        rails.extend(device.specs.iter().cloned());
    }
    if !(1..=MAX_RAILS).contains(&rails.len()) {
        return Err(Fault::Argument("a virtual device has one to four rails"));
    }
    let made = NetDevice::open(rails, members.to_vec(), &network.settings)?;
    let mut devices = locked(&network.devices);
    if let Some(known) = devices.iter().position(|device| device.members == members) {
        return Ok(known as c_int);
    }
    if devices.len() >= 2 * MAX_DEVICES {
        return Err(Fault::Argument("there are too many virtual devices"));
    }
    info!("device {} is {}{}", devices.len(), made.describe(), made.describe_memory());
    devices.push(Box::leak(Box::new(made)));
    Ok(devices.len() as c_int - 1)
}

impl NetDevice {
    fn open(specs: Vec<DeviceSpec>, members: Vec<c_int>, settings: &Settings) -> Result<NetDevice, Fault> {
        let opened = open_all(&specs)?;
        let has_gpu_memory = settings.gpu && opened.iter().all(Device::has_dma_buf);
        let limits = opened.iter().map(|device| device.attr().max_message);
        let max_bytes = limits.fold(MAX_BYTES as u64, u64::min) as usize;
        let facts: Vec<_> = specs.iter().map(Facts::of).collect();
        let names: Vec<String> = specs.iter().map(DeviceSpec::to_string).collect();
        Ok(NetDevice {
            name: CString::new(names.join("+")).unwrap_or_default(),
            pci_path: facts[0].pci_path.clone(),
            guid: facts[0].guid.unwrap_or(members[0] as u64 + 1),
            speed: facts.iter().map(|facts| facts.speed).fold(0, c_int::saturating_add),
            port: facts[0].port,
            specs,
            has_gpu_memory,
            max_bytes,
            members,
            contexts: Mutex::default(),
            opened: Mutex::new(opened),
        })
    }

    /// The context of connections with this traffic class.
    pub(crate) fn rails(&self, traffic_class: u8) -> Result<Rails, Fault> {
        let mut contexts = locked(&self.contexts);
        if let Some(rails) = contexts.get(&traffic_class) {
            return Ok(rails.clone());
        }
        let mut opened = locked(&self.opened);
        if opened.is_empty() {
            *opened = open_all(&self.specs)?;
        }
        let settings = &network()?.settings;
        let is_local = opened.iter().all(|device| device.attr().same_machine);
        let config = Config {
            slots: SLOTS,
            low_water: LOW_WATER,
            high_water: HIGH_WATER,
            split: settings.split,
            traffic_class,
            listen_address: match settings.address {
                Some(address) => address,
                None if is_local => IpAddr::V4(Ipv4Addr::LOCALHOST),
                None => first_address(),
            },
            // More queue pairs are more places in which a process of the same machine looks for messages.
            staging: is_local.then_some(STAGING),
            data_qps: if is_local { 1 } else { Config::default().data_qps },
            ..Config::default()
        };
        let rails = Rails::new(opened.clone(), config)?;
        contexts.insert(traffic_class, rails.clone());
        Ok(rails)
    }

    fn describe(&self) -> String {
        let rails = self.specs.len();
        let s = if rails == 1 { "" } else { "s" };
        format!("{}: {rails} rail{s}, {} Mbit/s", self.name.to_string_lossy(), self.speed)
    }

    fn describe_memory(&self) -> &'static str {
        if self.has_gpu_memory { ", GPU memory by DMA-BUF" } else { ", host memory" }
    }

    pub(crate) fn name(&self) -> &CStr {
        &self.name
    }

    pub(crate) fn pci_path(&self) -> Option<&CStr> {
        self.pci_path.as_deref()
    }

    pub(crate) fn guid(&self) -> u64 {
        self.guid
    }

    pub(crate) fn ptr_support(&self) -> c_int {
        if self.has_gpu_memory { PTR_HOST | PTR_DMABUF } else { PTR_HOST }
    }

    pub(crate) fn has_gpu_memory(&self) -> bool {
        self.has_gpu_memory
    }

    /// Bytes in one message.
    pub(crate) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    pub(crate) fn speed(&self) -> c_int {
        self.speed
    }

    pub(crate) fn port(&self) -> c_int {
        self.port
    }

    pub(crate) fn latency(&self) -> c_float {
        0.0
    }

    pub(crate) fn members(&self) -> &[c_int] {
        &self.members
    }

    pub(crate) fn specs(&self) -> &[DeviceSpec] {
        &self.specs
    }
}

fn open_all(specs: &[DeviceSpec]) -> Result<Vec<Device>, Fault> {
    specs.iter().map(|spec| Device::open(spec).map_err(Fault::Device)).collect()
}

/// The devices if the environment names none.
fn find_devices() -> Vec<Vec<DeviceSpec>> {
    #[cfg(feature = "verbs")]
    match crosstie::device::verbs::devices() {
        Ok(devices) => {
            let usable = devices.iter().filter(|device| device.has_driver).flat_map(|device| {
                let active = device.ports.iter().filter(|port| port.active && port.default_gid().is_some());
                active.map(|port| {
                    vec![DeviceSpec::Verbs { name: device.name.clone(), port: port.port, gid_index: None }]
                })
            });
            let usable: Vec<_> = usable.take(MAX_DEVICES).collect();
            if !usable.is_empty() {
                return usable;
            }
        }
        Err(error) => warning!("{error}"),
    }
    info!("no RDMA device: using the software device, which reaches processes of this machine only");
    vec![vec![DeviceSpec::Software]]
}

/// The address of the default route, or loopback if there is none.
fn first_address() -> IpAddr {
    // A datagram socket that is connected to a far address has the address of the interface that leads there. Nothing is sent.
    let route = || {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
        socket.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_unspecified())
    };
    route().unwrap_or_else(|| {
        warning!("no route to other machines: listening on the loopback address; set CROSSTIE_NCCL_ADDRESS");
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    })
}

/// What the kernel says about a rail.
struct Facts {
    pci_path: Option<CString>,
    guid: Option<u64>,
    speed: c_int,
    port: c_int,
}

impl Facts {
    fn of(spec: &DeviceSpec) -> Facts {
        let unknown = Facts { pci_path: None, guid: None, speed: DEFAULT_SPEED, port: 1 };
        match spec {
            DeviceSpec::Software => Facts { speed: SOFTWARE_SPEED, ..unknown },
            DeviceSpec::Fault { inner, .. } => Facts::of(inner),
            DeviceSpec::Verbs { name, port, .. } => {
                let at = PathBuf::from("/sys/class/infiniband").join(name);
                let read = |file: &str| std::fs::read_to_string(at.join(file)).ok();
                let path = std::fs::canonicalize(at.join("device")).ok();
                let path = path.filter(|path| {
                    path.components().any(|part| {
                        // A PCI device; Soft-RoCE has none.
                        part.as_os_str().to_string_lossy().starts_with("pci")
                    })
                });
                Facts {
                    pci_path: path.and_then(|path| CString::new(path.to_string_lossy().as_bytes()).ok()),
                    guid: read("node_guid").as_deref().and_then(parse_guid),
                    speed: read(&format!("ports/{port}/rate"))
                        .as_deref()
                        .and_then(parse_rate)
                        .unwrap_or(DEFAULT_SPEED),
                    port: (*port).into(),
                }
            }
        }
    }
}

/// `0002:c903:0045:f1a2` as a number.
fn parse_guid(text: &str) -> Option<u64> {
    u64::from_str_radix(&text.trim().replace(':', ""), 16).ok().filter(|guid| *guid != 0)
}

/// `100 Gb/sec (4X EDR)` in Mbit/s.
fn parse_rate(text: &str) -> Option<c_int> {
    let (number, _) = text.trim().split_once(" Gb/sec")?;
    let rate: f64 = number.trim().parse().ok()?;
    (rate > 0.0).then_some((rate * 1000.0) as c_int)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_guids_of_the_kernel_are_parsed() {
        assert_eq!(parse_rate("100 Gb/sec (4X EDR)\n"), Some(100_000));
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)"), Some(2500));
        assert_eq!(parse_rate(""), None);
        assert_eq!(parse_guid("0002:c903:0045:f1a2\n"), Some(0x0002_c903_0045_f1a2));
        assert_eq!(parse_guid("0000:0000:0000:0000"), None);
    }
}
