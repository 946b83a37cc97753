//! What is under way on the ports of this process, and how fast they are. All connections over a port share it: a connection that knew
//! only its own bytes would take a port for idle that another one has filled, and its share of the port for the port's rate.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crosstie_protocol::rails::Rates;

use crate::device::{Device, DeviceAddress};

/// The load of a port. Its words order nothing else, and an update of the rate that is lost to another one at the same time does no harm.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct PortLoad {
    /// Bytes under way.
    queued: AtomicU64,
    /// When a part was done last, in nanoseconds.
    done_at: AtomicU64,
    /// [`Rates::to_bits`].
    rates: AtomicU64,
}

/// The ports that are in use, by any context of this process.
static PORTS: Mutex<Vec<(DeviceAddress, Weak<PortLoad>)>> = Mutex::new(Vec::new());

impl PortLoad {
    /// The load of the port of this device. Devices with the same address are the same port.
    pub(super) fn of(device: &Device) -> Arc<PortLoad> {
        let mut ports = PORTS.lock().unwrap_or_else(PoisonError::into_inner);
        ports.retain(|(_, load)| load.strong_count() > 0);
        let address = device.address();
        let known = ports.iter().find(|(known, _)| *known == address).and_then(|(_, load)| load.upgrade());
        known.unwrap_or_else(|| {
            let load = Arc::<PortLoad>::default();
            ports.push((address, Arc::downgrade(&load)));
            load
        })
    }
}

/// What a rail of a connection has to do with the load of its port.
#[derive(Debug, Default)]
pub(super) struct RailLoad {
    port: Arc<PortLoad>,
    /// Bytes of this connection under way.
    queued: u64,
}

impl RailLoad {
    pub(super) fn on(port: Arc<PortLoad>) -> RailLoad {
        RailLoad { port, queued: 0 }
    }

    /// So many bytes are posted.
    #[inline]
    pub(super) fn add(&mut self, bytes: u64) {
        self.queued += bytes;
        self.port.queued.fetch_add(bytes, Relaxed);
    }

    /// So many bytes are done.
    #[inline]
    pub(super) fn remove(&mut self, bytes: u64) {
        let bytes = bytes.min(self.queued);
        self.queued -= bytes;
        self.port.queued.fetch_sub(bytes, Relaxed);
    }

    /// Nothing of this connection is under way any more.
    pub(super) fn clear(&mut self) {
        self.remove(self.queued);
    }

    /// Bytes under way, of all connections.
    #[inline]
    pub(super) fn queued(&self) -> u64 {
        self.port.queued.load(Relaxed)
    }

    /// A part that was posted at `begin` is done at `now`. The port has carried it since then, or since it was done with the part before.
    #[inline]
    pub(super) fn record(&self, bytes: u64, begin: u64, now: u64) {
        let since = begin.max(self.port.done_at.load(Relaxed));
        self.port.done_at.store(now, Relaxed);
        let mut rates = self.rates();
        rates.record(bytes, now.saturating_sub(since));
        self.port.rates.store(rates.to_bits(), Relaxed);
    }

    /// Bytes per microsecond; `None` before the first measurement.
    #[inline]
    pub(super) fn rate(&self) -> Option<u64> {
        self.rates().rate()
    }

    /// Forgets all measurements: the port has failed, and may have another speed than before.
    pub(super) fn forget_rate(&self) {
        self.port.rates.store(Rates::default().to_bits(), Relaxed);
    }

    fn rates(&self) -> Rates {
        Rates::from_bits(self.port.rates.load(Relaxed))
    }
}

impl Drop for RailLoad {
    fn drop(&mut self) {
        self.clear();
    }
}
