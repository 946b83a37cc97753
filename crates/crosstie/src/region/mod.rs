//! Registered memory with an owner: in place, cached, and described to peers.
//!
//! A device accesses *registered* memory only. [`Pd::allocate`](crate::device::Pd::allocate) allocates such memory; this
//! module registers memory that the program has already, without copying it and without `unsafe` for the caller:
//!
//! | type | memory | given back |
//! | --- | --- | --- |
//! | [`OwnedRegion`] | one owner, such as a `Vec`, that is moved in | [`OwnedRegion::into_memory`] |
//! | [`RegionCache`] | shared owners (`Arc`), registered when they are first used and kept registered under a limit | when it is evicted or forgotten, and nobody uses it |
//!
//! A [`RemoteRegion`] describes a region, or a slice of one, to a peer: address, length, key, rights, and the device. It is 48
//! bytes long; the receiver checks them.
//!
//! # What is promised
//!
//! - **Memory is not given back while a peer may access it.** Giving back closes the region's key first, then waits until no
//!   peer is inside an operation that found the key before. A peer can be stopped there. Then `into_memory` fails after a
//!   time limit and can be tried again; a drop keeps the memory (see [`kept_memory`]) and frees it later.
//! - **The program has no reference to registered memory.** The owner is inside; [`Mr::read`] and [`Mr::write`] copy.
//! - **A key of memory that was given back is refused.** On the software and the fault device always: no two regions of a
//!   device have the same address and key (`device/software/region_keys.rs` states the bound, 2^48 regions). On verbs the NIC
//!   makes the keys; many use a key again after 256 registrations.
//!
//! ```
//! use crosstie::device::{Access, Device, DeviceSpec};
//! use crosstie::region::OwnedRegion;
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open(&DeviceSpec::Software)?;
//! let pd = device.alloc_pd()?;
//! let weights: Vec<f32> = vec![0.5; 1000];
//! let region = OwnedRegion::register(&pd, weights, Access::REMOTE_READ)?;
//! let for_the_peer = region.mr().describe(&device.address()).encode();
//! assert_eq!(for_the_peer.len(), 48);
//! let weights = region.into_memory(Duration::from_secs(1))?;
//! assert_eq!(weights[999], 0.5);
//! # Ok(()) }
//! ```
//!
//! While memory is registered, the program cannot read, write or free it:
//!
//! ```compile_fail,E0382
//! # use crosstie::{device::{Access, Pd}, region::OwnedRegion};
//! fn f(pd: &Pd, memory: Vec<u8>) {
//!     let region = OwnedRegion::register(pd, memory, Access::REMOTE_READ);
//!     println!("{}", memory[0]);
//! }
//! ```
//! ```compile_fail,E0382
//! # use crosstie::{device::{Access, Pd}, region::OwnedRegion};
//! fn f(pd: &Pd, memory: Vec<u8>) {
//!     let region = OwnedRegion::register(pd, memory, Access::REMOTE_READ);
//!     drop(memory);
//! }
//! ```
//!
//! Memory with bytes that have no value, or for which some bytes are not valid, cannot be registered:
//!
//! ```compile_fail,E0277
//! # use crosstie::{device::{Access, Pd}, region::OwnedRegion};
//! fn f(pd: &Pd, memory: Vec<bool>) {
//!     OwnedRegion::register(pd, memory, Access::ALL).ok();
//! }
//! ```
//!
//! [`Mr::read`]: crate::device::Mr::read
//! [`Mr::write`]: crate::device::Mr::write

mod cache;
mod interval_map;
mod kept;
mod owned;
mod shared_buffer;

pub use cache::{CachedRegion, RegionCache, RegionCacheConfig, RegionCacheCounters, RegionCacheError};
pub use crosstie_protocol::region::{DESCRIPTOR_SIZE, DescriptorError, RemoteRegion, Rights};
pub use kept::{KeptMemory, kept_memory};
pub use owned::{OwnedRegion, RegisterError, StableMemory, StillInUse};
pub use shared_buffer::{SharedBuffer, SharedMemory};

use crate::device::{Access, DeviceAddress, Mr, RemoteAddr, RemoteMemory};

impl Mr {
    /// Describes the region to a peer. `owner` is the address of the device that it belongs to.
    pub fn describe(&self, owner: &DeviceAddress) -> RemoteRegion {
        let remote = self.remote();
        let rights = Rights {
            read: self.access().contains(Access::REMOTE_READ),
            write: self.access().contains(Access::REMOTE_WRITE),
            atomic: self.access().contains(Access::REMOTE_ATOMIC),
        };
        match RemoteRegion::new(remote.addr, remote.len, remote.rkey, rights, owner.gid) {
            Ok(region) => region,
            // Memory of this process does not reach beyond the last address.
            Err(error) => unreachable!("{error}"),
        }
    }
}

impl From<&RemoteRegion> for RemoteMemory {
    /// Without rights and owner.
    #[inline]
    fn from(region: &RemoteRegion) -> RemoteMemory {
        RemoteMemory { addr: region.addr(), len: region.len(), rkey: region.rkey(), reserved: 0 }
    }
}

impl From<&RemoteRegion> for RemoteAddr {
    /// The first address, for a work request.
    #[inline]
    fn from(region: &RemoteRegion) -> RemoteAddr {
        RemoteAddr { addr: region.addr(), rkey: region.rkey() }
    }
}
