//! The endpoint: open, connect, close.

use core::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::address::EndpointAddress;
use super::buffer::Buffer;
use super::cause::{Cause, ConnectError, NotStarted, Refused};
use super::config::{EndpointConfig, Progress};
use super::counters::EndpointCounters;
use super::engine::Started;
use super::future::{Completed, OperationFuture};
use super::lend::Lend;
use super::operation::{Operation, What};
use super::path::Path;
use super::shared::Shared;
use crate::device::{Access, Device, DeviceError, DeviceSpec, Pd};

/// One side of a connection. See the [module](super).
///
/// Clones are the same endpoint; any thread can use them at the same time. When the last clone is dropped, the connection ends:
/// operations in flight end with [`Cause::Closed`].
pub struct Endpoint {
    pub(super) shared: Arc<Shared>,
    device: Device,
    pd: Arc<Pd>,
}

impl Endpoint {
    /// Opens a device and creates an endpoint on it.
    pub fn open(spec: &DeviceSpec, config: &EndpointConfig) -> Result<Endpoint, DeviceError> {
        let device = Device::open(spec)?;
        let pd = Arc::new(device.alloc_pd()?);
        Endpoint::new(&device, &pd, config)
    }

    /// Creates an endpoint on an open device. Endpoints with the same protection domain can use the same buffers.
    pub fn new(device: &Device, pd: &Arc<Pd>, config: &EndpointConfig) -> Result<Endpoint, DeviceError> {
        let shared = Shared::new(device, pd, config)?;
        if config.progress == Progress::Thread {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name("crosstie-endpoint".to_owned())
                .spawn(move || shared.run_thread())
                .map_err(|source| DeviceError::Os { what: "starting the progress thread", source })?;
        }
        Ok(Endpoint { shared, device: device.clone(), pd: pd.clone() })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Allocates a buffer that the peer may read and write: zeroed, aligned to a page.
    pub fn allocate(&self, len: usize) -> Result<Buffer, DeviceError> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        Ok(Buffer::new(self.pd.allocate(len, access)?))
    }

    /// Its address, for the peer. [`reopen`](Endpoint::reopen) changes it.
    pub fn address(&self) -> EndpointAddress {
        self.shared.with_engine(|engine, _| engine.address().clone())
    }

    /// Connects to a peer. The peer connects to this endpoint's address, before or after.
    pub fn connect(&self, peer: &EndpointAddress) -> Result<(), ConnectError> {
        self.shared.with_engine(|engine, _| engine.connect(peer))
    }

    /// Ends the connection, and prepares another one. Operations in flight end with [`Cause::Closed`]; buffers that the device may
    /// still touch come back later. Returns the new address.
    ///
    /// This is how a peer that was restarted is reached again: both sides exchange new addresses and connect.
    pub fn reopen(&self) -> Result<EndpointAddress, ConnectError> {
        self.shared.with_engine(|engine, table| engine.reopen(table))
    }

    /// Ends the connection. Operations in flight end with [`Cause::Closed`]; buffers that the device may still touch come back when it
    /// is drained.
    pub fn close(&self) {
        self.shared.with_engine(|engine, table| engine.close(table, Cause::Closed));
        self.shared.call_attention();
    }

    /// Why the connection has ended; `None` while it lives, and before there is one.
    pub fn ended(&self) -> Option<Cause> {
        match self.shared.check() {
            Err(NotStarted::Ended(cause)) => Some(cause),
            _ => None,
        }
    }

    /// Which device and path the connection uses. `None`: not connected.
    pub fn path(&self) -> Option<Path> {
        self.shared.with_engine(|engine, _| engine.path())
    }

    /// Polls the device and posts what waits. Returns how much happened. Not needed with a progress thread.
    pub fn progress(&self) -> usize {
        self.shared.progress()
    }

    /// Ends every operation in flight with [`Cause::Cancelled`], at once. Operations that have ended stay as they are. Buffers that the
    /// device may still touch come back later. Returns how many operations it ended.
    pub fn cancel_all(&self) -> usize {
        self.shared.cancel_all()
    }

    /// Counters, over all connections of this endpoint.
    pub fn counters(&self) -> EndpointCounters {
        self.shared.counters()
    }

    /// Starts operations with a deadline of their own: `endpoint.within(timeout).read(...)`.
    #[inline]
    pub fn within(&self, timeout: Duration) -> Submit<'_> {
        Submit { endpoint: self, timeout: Some(timeout) }
    }

    /// Starts operations with the deadline of the [configuration](EndpointConfig::deadline).
    #[inline]
    pub(super) fn submit(&self) -> Submit<'_> {
        Submit { endpoint: self, timeout: self.shared.config.deadline }
    }

    /// Starts operations that wait for the peer's program, as long as the connection lives.
    #[inline]
    pub(super) fn submit_to_wait(&self) -> Submit<'_> {
        Submit { endpoint: self, timeout: None }
    }
}

impl Clone for Endpoint {
    fn clone(&self) -> Self {
        self.shared.add_handle();
        Endpoint { shared: self.shared.clone(), device: self.device.clone(), pd: self.pd.clone() }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.shared.remove_handle();
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("ended", &self.ended()).finish_non_exhaustive()
    }
}

/// Starts operations of an endpoint with a deadline, see [`Endpoint::within`]. Its methods are those of [`Endpoint`].
#[derive(Clone, Copy, Debug)]
pub struct Submit<'e> {
    endpoint: &'e Endpoint,
    timeout: Option<Duration>,
}

impl Submit<'_> {
    #[inline]
    fn shared(&self) -> &Arc<Shared> {
        &self.endpoint.shared
    }

    #[inline]
    pub(super) fn max_message(&self) -> u64 {
        self.endpoint.device.attr().max_message.min(u32::MAX.into())
    }

    /// Starts an operation. `check` checks the arguments, and says what is to be done, or why not.
    #[inline]
    pub(super) fn start<B: Lend>(
        &self,
        buffer: B,
        check: impl FnOnce(&B) -> Result<What, NotStarted>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        let shared = self.shared();
        let mut operation = match shared.check().and_then(|()| check(&buffer)) {
            Ok(what) => Operation::new(what, buffer.store()),
            Err(cause) => return Err(Refused { cause, buffer }),
        };
        let started = shared.start(&mut operation, self.timeout);
        if let Started::InFlight(side) = started {
            return Ok(OperationFuture::in_flight(shared, side));
        }
        let Some(buffer) = B::restore(operation.stored) else { unreachable!("what was stored is restored") };
        match started {
            Started::Completed => {
                let Operation { bytes, imm, .. } = operation;
                Ok(OperationFuture::completed(Completed { buffer, bytes, imm }))
            }
            _ => {
                let cause = NotStarted::TooManyOperations(shared.table.len() as u32);
                Err(Refused { cause, buffer })
            }
        }
    }
}
