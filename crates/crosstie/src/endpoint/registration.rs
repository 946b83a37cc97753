//! Memory of the program as buffers, and regions that are described to the peer.

use std::any::Any;

use super::buffer::Buffer;
use super::cause::NotStarted;
use super::endpoint::Endpoint;
use crate::device::{Access, RemoteMemory};
use crate::region::{OwnedRegion, RegisterError, RemoteRegion, Rights, StableMemory};

impl Endpoint {
    /// Registers memory of the program in place, as a buffer that the peer may read and write. [`Buffer::into_memory`] gives it back.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// use std::time::Duration;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let endpoint = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let buffer = endpoint.register(vec![1.0f32; 1000])?;
    /// assert_eq!(buffer.len(), 4000);
    /// let numbers: Vec<f32> = buffer.into_memory(Duration::from_secs(1))?;
    /// assert_eq!(numbers.len(), 1000);
    /// # Ok(()) }
    /// ```
    pub fn register<M: StableMemory>(&self, memory: M) -> Result<Buffer, RegisterError<M>> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        match OwnedRegion::register(self.pd(), Box::new(memory), access) {
            Ok(region) => Ok(Buffer::in_place(region.map_owner(|memory| memory as Box<dyn Any + Send>))),
            Err(RegisterError { memory, error }) => Err(RegisterError { memory: *memory, error }),
        }
    }

    /// Describes a buffer to a peer. Send the [bytes](RemoteRegion::encode) of the description; the peer gives it to
    /// [`import`](Endpoint::import).
    pub fn describe(&self, buffer: &Buffer) -> RemoteRegion {
        // That of the address to which the peer connects: it compares them. The device would ask the driver each time.
        let device = self.shared.with_engine(|engine, _| engine.address().device());
        let region = buffer.region().describe(&device);
        match region.slice(buffer.start() as u64, buffer.len() as u64) {
            Ok(region) => region,
            Err(error) => unreachable!("a buffer is inside its region: {error}"),
        }
    }

    /// The memory that a peer has described, for operations that need these rights.
    ///
    /// It is refused if it does not belong to the device that this endpoint is connected to. On the software device this includes
    /// descriptions of the peer from before it was restarted. On verbs, a restarted peer has the same device; there the NIC decides about
    /// old keys.
    pub fn import(&self, region: &RemoteRegion, needs: Rights) -> Result<RemoteMemory, NotStarted> {
        let path = self.path().ok_or(NotStarted::NotConnected)?;
        if *region.gid() != path.peer.gid {
            return Err(NotStarted::ForeignRegion);
        }
        if !region.rights().contain(needs) {
            return Err(NotStarted::MissingRights(region.rights()));
        }
        Ok(region.into())
    }
}
