//! Two connected endpoints without progress threads, for unit tests.

use std::sync::Arc;

use super::config::{EndpointConfig, Progress};
use super::endpoint::Endpoint;
use crate::device::{Device, software};

pub(super) fn config() -> EndpointConfig {
    EndpointConfig { progress: Progress::Caller, deadline: None, ..EndpointConfig::default() }
}

pub(super) fn connected(config: &EndpointConfig) -> (Endpoint, Endpoint) {
    connect(config, config)
}

pub(super) fn connect(here: &EndpointConfig, there: &EndpointConfig) -> (Endpoint, Endpoint) {
    let endpoint = |config| {
        let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        Endpoint::new(&device, &Arc::new(device.alloc_pd().unwrap()), config).unwrap()
    };
    let (here, there) = (endpoint(here), endpoint(there));
    here.connect(&there.address()).unwrap();
    there.connect(&here.address()).unwrap();
    (here, there)
}
