//! An open device and its port.

use core::time::Duration;

#[cfg(feature = "verbs")]
use super::verbs;
use super::{
    Cq, CqConfig, DeviceAddress, DeviceAttr, DeviceCounters, DeviceError, DeviceSpec, Event, Pd, dispatch,
};
use super::{cq, fault, pd, software};

/// An open device. It is cheap to clone; all clones are the same device. It closes when the last object created from it is
/// dropped.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) provider: Provider,
}

#[derive(Clone, Debug)]
pub(crate) enum Provider {
    Software(software::Device),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Device),
    Fault(fault::Device),
}

impl Device {
    /// Opens the device that `spec` names.
    pub fn open(spec: &DeviceSpec) -> Result<Device, DeviceError> {
        let provider = match spec {
            DeviceSpec::Software => Provider::Software(software::Device::open(&software::Config::default())?),
            #[cfg(feature = "verbs")]
            DeviceSpec::Verbs { name, port, gid_index } => {
                Provider::Verbs(verbs::Device::open(name, *port, *gid_index)?)
            }
            #[cfg(not(feature = "verbs"))]
            DeviceSpec::Verbs { .. } => return Err(DeviceError::VerbsNotBuilt),
            DeviceSpec::Fault { seed, odds, inner } => {
                let plan = fault::Plan::from_odds(*seed, *odds);
                Provider::Fault(fault::Device::new(Device::open(inner)?, plan))
            }
        };
        Ok(Device { provider })
    }

    /// Opens a software device with explicit sizes.
    pub fn open_software(config: &software::Config) -> Result<Device, DeviceError> {
        Ok(Device { provider: Provider::Software(software::Device::open(config)?) })
    }

    /// Wraps a device so that it injects the faults of `plan`.
    pub fn with_faults(self, plan: fault::Plan) -> Device {
        Device { provider: Provider::Fault(fault::Device::new(self, plan)) }
    }

    /// Controls the faults of a wrapped device, see [`Device::with_faults`]. `None` if this device is not wrapped.
    pub fn faults(&self) -> Option<fault::Control> {
        match &self.provider {
            Provider::Fault(x) => Some(x.control()),
            _ => None,
        }
    }

    /// Its limits.
    pub fn attr(&self) -> &DeviceAttr {
        dispatch!(Provider, &self.provider, x => x.attr())
    }

    /// Its address, which a peer needs to reach it.
    pub fn address(&self) -> DeviceAddress {
        dispatch!(Provider, &self.provider, x => x.address())
    }

    /// Whether memory can be registered by a DMA-BUF file descriptor, see [`Pd::register_dma_buf`]: device, driver and kernel
    /// must support it. The software device does not.
    pub fn has_dma_buf(&self) -> bool {
        match &self.provider {
            Provider::Software(_) => false,
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => x.has_dma_buf(),
            Provider::Fault(x) => x.has_dma_buf(),
        }
    }

    /// Creates a protection domain.
    pub fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        Ok(Pd::new(match &self.provider {
            Provider::Software(x) => pd::Provider::Software(x.alloc_pd()?),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => pd::Provider::Verbs(x.alloc_pd()?),
            Provider::Fault(x) => pd::Provider::Fault(x.alloc_pd()?),
        }))
    }

    /// Creates a completion queue.
    pub fn create_cq(&self, config: &CqConfig) -> Result<Cq, DeviceError> {
        Ok(Cq::from(match &self.provider {
            Provider::Software(x) => cq::Provider::Software(x.create_cq(config)?),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => cq::Provider::Verbs(x.create_cq(config)?),
            Provider::Fault(x) => cq::Provider::Fault(x.create_cq(config)?),
        }))
    }

    /// Waits at most `timeout` for the next event. Each event is returned to one caller only.
    pub fn wait_event(&self, timeout: Duration) -> Result<Option<Event>, DeviceError> {
        dispatch!(Provider, &self.provider, x => x.wait_event(timeout))
    }

    /// What the device keeps for peers at this moment. All zero on devices whose hardware does the work.
    pub fn counters(&self) -> DeviceCounters {
        match &self.provider {
            Provider::Software(x) => x.counters(),
            #[cfg(feature = "verbs")]
            Provider::Verbs(_) => DeviceCounters::default(),
            Provider::Fault(x) => x.counters(),
        }
    }
}
