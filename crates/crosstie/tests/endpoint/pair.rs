//! Two connected endpoints.

use std::sync::Arc;
use std::time::Duration;

use crosstie::device::fault::Plan;
use crosstie::device::{Device, software};
use crosstie::endpoint::{Buffer, Endpoint, EndpointConfig, OperationFuture, Progress};

/// A generous limit: only a hang reaches it.
pub(crate) const HANG: Duration = Duration::from_secs(60);

pub(crate) struct Pair {
    pub(crate) here: Endpoint,
    pub(crate) there: Endpoint,
}

pub(crate) fn config(qps: u8, progress: Progress) -> EndpointConfig {
    EndpointConfig { qps, progress, min_part: 4096, deadline: None, ..EndpointConfig::default() }
}

/// All shapes of endpoints that the tests run with. Those with several queue pairs are on devices that queue requests, as NICs do, see
/// [`Pair::new`].
pub(crate) fn configs() -> impl Iterator<Item = EndpointConfig> {
    [(1, Progress::Caller), (3, Progress::Caller), (1, Progress::Thread), (4, Progress::Thread)]
        .into_iter()
        .map(|(qps, progress)| config(qps, progress))
}

pub(crate) fn device() -> Device {
    Device::open_software(&software::Config { space: 512 << 20 }).unwrap()
}

pub(crate) fn endpoint(device: &Device, config: &EndpointConfig) -> Endpoint {
    Endpoint::new(device, &Arc::new(device.alloc_pd().unwrap()), config).unwrap()
}

impl Pair {
    /// On devices that execute requests while they are posted, or, if there are several queue pairs, on such that queue them.
    pub(crate) fn new(config: &EndpointConfig) -> Pair {
        let open = || if config.qps > 1 { device().with_faults(Plan::none()) } else { device() };
        Pair::on(&open(), &open(), config)
    }

    pub(crate) fn on(here: &Device, there: &Device, config: &EndpointConfig) -> Pair {
        let pair = Pair { here: endpoint(here, config), there: endpoint(there, config) };
        pair.connect();
        pair
    }

    pub(crate) fn connect(&self) {
        self.here.connect(&self.there.address()).unwrap();
        self.there.connect(&self.here.address()).unwrap();
    }

    /// Runs both sides until `done`.
    pub(crate) fn run_until(&self, mut done: impl FnMut() -> bool) {
        let begin = std::time::Instant::now();
        while !done() {
            assert!(begin.elapsed() < HANG, "hangs");
            if self.here.progress() + self.there.progress() == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Waits until the peer knows of the buffer of a `recv` here, or until the `recv` has ended. Nothing else has a slot. With a progress
    /// thread this can be some time after the call. Returns whether the peer knows of it.
    pub(crate) fn is_announced(&self, recv: &OperationFuture<Buffer>) -> bool {
        let has_slot = || self.here.counters().leased_slots > 0;
        self.run_until(|| has_slot() || recv.is_ended());
        has_slot()
    }

    /// All slots are free and no operation is held.
    pub(crate) fn assert_empty(&self) {
        self.run_until(|| {
            [&self.here, &self.there].into_iter().all(|endpoint| {
                let counters = endpoint.counters();
                counters.leased_slots == 0 && counters.held_operations == 0
            })
        });
    }
}

/// Bytes that depend on `seed`.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(seed)).collect()
}

pub(crate) fn filled(endpoint: &Endpoint, len: usize, seed: u8) -> Buffer {
    let buffer = endpoint.allocate(len).unwrap();
    buffer.write(0, &pattern(len, seed)).unwrap();
    buffer
}
