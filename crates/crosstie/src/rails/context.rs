//! A context: the devices, and what is made from them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crosstie_protocol::rails::Mask;

use crosstie_protocol::rails::MAX_RAILS;

use super::config::Config;
use super::counters::ConnectionCounters;
use super::error::SetupError;
use super::events::{self, PortEvents};
use super::hint::{Hint, HintReader};
use super::load::PortLoad;
use super::memory::Memory;
use crate::device::{Access, Device, MultiRegion, Pd};

/// One to four devices over which messages are sent and received. All clones are the same context; any thread may use it.
#[derive(Clone, Debug)]
pub struct Rails {
    pub(super) context: Arc<Context>,
}

/// What connections and their control threads share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) devices: Vec<Device>,
    pub(super) domains: Vec<Pd>,
    pub(super) config: Config,
    /// Bytes per microsecond of each rail, before anything is measured.
    pub(super) link_rates: [u32; MAX_RAILS],
    /// The load of each rail's port.
    pub(super) loads: Vec<Arc<PortLoad>>,
    pub(super) id: u64,
    /// Bytes that are staged at most.
    pub(super) staging: u32,
    pub(super) max_message: u64,
    /// The counters of all connections, for the metrics.
    pub(super) connections: Mutex<Vec<Weak<ConnectionCounters>>>,
    next_connection: AtomicU64,
    events: Arc<PortEvents>,
    hint: HintReader,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Rails {
    /// A context over these devices: rail `r` is `devices[r]`. Both ends of a connection must have the same number of devices,
    /// and device `r` of one end must reach device `r` of the other.
    pub fn new(devices: Vec<Device>, config: Config) -> Result<Rails, SetupError> {
        config.check(devices.len())?;
        let domains = devices
            .iter()
            .enumerate()
            .map(|(rail, device)| device.alloc_pd().map_err(|source| SetupError::Device { rail, source }))
            .collect::<Result<Vec<_>, _>>()?;
        let staging_pays = devices.iter().all(|device| device.attr().in_place_is_slower);
        let staging = config.staging.unwrap_or(if staging_pays { 4 << 10 } else { 0 });
        let max_message = devices.iter().map(|device| device.attr().max_message).min().unwrap_or(0);
        let max_message = max_message.min(crosstie_protocol::rails::MAX_MESSAGE);
        let hint = config.hint.as_deref().map(HintReader::open).transpose()?;
        let link_rates = config.link_rates.unwrap_or_else(|| {
            core::array::from_fn(|rail| devices.get(rail).map_or(1, |device| device.attr().link_rate.max(1)))
        });
        let loads = devices.iter().map(PortLoad::of).collect();
        let events = Arc::default();
        events::watch(&devices, &events)?;
        let context = Context {
            devices,
            domains,
            config,
            link_rates,
            loads,
            id: NEXT_ID.fetch_add(1, Relaxed),
            staging,
            max_message,
            connections: Mutex::new(Vec::new()),
            next_connection: AtomicU64::new(0),
            events,
            hint: hint.unwrap_or_default(),
        };
        Ok(Rails { context: Arc::new(context) })
    }

    /// The number of rails.
    pub fn rails(&self) -> usize {
        self.context.devices.len()
    }

    /// The longest buffer of a request.
    pub fn max_message(&self) -> u64 {
        self.context.max_message
    }

    /// The options.
    pub fn config(&self) -> &Config {
        &self.context.config
    }

    /// Allocates memory that is registered on all devices.
    pub fn allocate(&self, len: usize) -> Result<Memory, SetupError> {
        let regions = MultiRegion::allocate(&self.context.domains, len, ACCESS)
            .map_err(|source| SetupError::Device { rail: 0, source })?;
        Ok(Memory::new(Arc::new(regions), self.context.id))
    }

    /// Takes memory that the caller has registered in all [domains](Rails::domains) of this context, in order, with local and
    /// remote write access. A GPU sees what was received into its memory only after a [flush](super::Flusher).
    pub fn adopt(&self, regions: MultiRegion) -> Result<Memory, SetupError> {
        let fits = regions.domains() == self.rails()
            && (0..self.rails()).all(|rail| regions.region(rail).access().contains(ACCESS));
        if !fits {
            return Err(SetupError::Config("the memory is not registered for writes on every rail"));
        }
        Ok(Memory::new(Arc::new(regions), self.context.id))
    }

    /// The devices: rail `r` is device `r`.
    pub fn devices(&self) -> &[Device] {
        &self.context.devices
    }

    /// The protection domains of the devices, to register memory in them: see [`Rails::adopt`].
    pub fn domains(&self) -> &[Pd] {
        &self.context.domains
    }
}

impl Context {
    pub(super) fn next_connection(&self) -> u64 {
        self.next_connection.fetch_add(1, Relaxed)
    }

    /// Whether the last event of the rail's port says that it is down.
    pub(super) fn is_port_down(&self, rail: usize) -> bool {
        self.events.is_down(rail)
    }

    /// The rails that failed since `seen`, by events of their ports and queue pairs. One load if nothing happened.
    #[inline]
    pub(super) fn failed_rails(&self, seen: &mut u64, owns: impl Fn(usize, u32) -> bool) -> Mask {
        self.events.failed_since(seen, owns)
    }

    /// What is known from outside about the rails.
    #[inline]
    pub(super) fn hint(&self) -> Hint {
        self.hint.read()
    }

    pub(super) fn add_counters(&self, counters: &Arc<ConnectionCounters>) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|weak| weak.strong_count() > 0);
        connections.push(Arc::downgrade(counters));
    }
}

/// What is done with the memory of messages.
const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
