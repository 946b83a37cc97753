//! The operations of a queue pair, measured in the run of another benchmark.

use std::time::Duration;

use crosstie::device::Device;
use crosstie::telemetry::Histogram;
use zerocopy::IntoBytes;

use super::connection::Connection;
use super::plan::Plan;
use super::run_device_slice;
use super::traffic::Traffic;
use crate::error::Error;
use crate::limits::Throughput;
use crate::spin_wait::SpinWait;

/// One side of the connection.
pub(crate) struct DeviceBaseline {
    plan: Plan,
    traffic: Traffic,
}

impl DeviceBaseline {
    pub(crate) fn open(plan: &Plan, device: &Device, spin: SpinWait) -> Result<DeviceBaseline, Error> {
        let traffic = Traffic::new(Connection::new(plan, device, spin)?);
        Ok(DeviceBaseline { plan: plan.clone(), traffic })
    }

    /// What the other side needs to connect.
    pub(crate) fn address_bytes(&self) -> Vec<u8> {
        self.traffic.connection.peer_info().as_bytes().to_vec()
    }

    pub(crate) fn connect(&mut self, address: &[u8]) -> Result<(), Error> {
        self.traffic.connection.connect(address)
    }

    /// Runs one slice. The leading side returns its throughput.
    pub(crate) fn run_slice(
        &mut self,
        slice: Duration,
        leads: bool,
        latency: &mut Histogram,
    ) -> Result<Option<Throughput>, Error> {
        run_device_slice(&self.plan, slice, leads, &mut self.traffic, latency)
    }

    /// Messages that carried wrong data.
    pub(crate) fn errors(&self) -> u64 {
        self.traffic.connection.errors
    }
}
