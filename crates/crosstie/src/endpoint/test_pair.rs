//! Two connected endpoints without progress threads, for unit tests.

use std::sync::Arc;

use super::config::{EndpointConfig, Progress};
use super::endpoint::Endpoint;
use crate::device::fault::Plan;
use crate::device::{Device, software};

pub(super) fn config() -> EndpointConfig {
    EndpointConfig { progress: Progress::Caller, deadline: None, ..EndpointConfig::default() }
}

pub(super) fn connected(config: &EndpointConfig) -> (Endpoint, Endpoint) {
    connect(config, config)
}

pub(super) fn connect(here: &EndpointConfig, there: &EndpointConfig) -> (Endpoint, Endpoint) {
    connect_with([here, there].map(|config| endpoint(&open(), config)))
}

/// On devices that queue each request, as a NIC does.
pub(super) fn connected_queueing(config: &EndpointConfig) -> (Endpoint, Endpoint) {
    connect_with([(); 2].map(|()| endpoint(&open().with_faults(Plan::none()), config)))
}

fn open() -> Device {
    Device::open_software(&software::Config { space: 64 << 20 }).unwrap()
}

fn endpoint(device: &Device, config: &EndpointConfig) -> Endpoint {
    Endpoint::new(device, &Arc::new(device.alloc_pd().unwrap()), config).unwrap()
}

fn connect_with([here, there]: [Endpoint; 2]) -> (Endpoint, Endpoint) {
    here.connect(&there.address()).unwrap();
    there.connect(&here.address()).unwrap();
    (here, there)
}
