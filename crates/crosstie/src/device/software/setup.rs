//! Opening and closing a device; protection domains and regions.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use rustix::process::{Resource, getrlimit};

use super::device_memory::Allocation;
use super::error::os;
use super::layout::{IN_PLACE, RegionKey};
use super::lock::locked;
use super::quiescence::{Pause, Quiescence};
use super::region_keys;
use super::regions::Region;
use super::service;
use super::state::DeviceShared;
use crate::device::{Access, DeviceAddress, DeviceAttr, DeviceCounters, DeviceError, Event};
use crate::memory::segment::{self, Segment};
use crate::process::OwnThread;
use crate::ring::fence;

/// Sizes of a software device.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address space for the device's memory: the queues, and the regions that
    /// [`Pd::allocate`](crate::device::Pd::allocate) returns. Every peer maps the same amount. Physical memory is used only
    /// for pages that are touched. At most 1 TiB. If the process has a limit on address space (`ulimit -v`), at most a sixteenth of it is used.
    pub space: u64,
}

impl Default for Config {
    /// 64 GiB of address space.
    fn default() -> Self {
        Config { space: 64 << 30 }
    }
}

/// Smallest address space with which a device is opened.
const MIN_SPACE: u64 = 64 << 20;
/// The share of the process's address space, if that is limited (`ulimit -v`), that one device takes. The devices of peers take as much, and
/// threads need some.
const SHARE_OF_LIMIT: u64 = 16;

/// An open device.
#[derive(Clone, Debug)]
pub struct Device {
    pub(super) handle: Arc<DeviceHandle>,
}

/// Keeps the device open; every object made from the device holds one. The last one ends the device's threads.
#[derive(Debug)]
pub(super) struct DeviceHandle {
    pub(super) device: Arc<DeviceShared>,
    service: Option<OwnThread>,
}

impl Device {
    pub(crate) fn open(config: &Config) -> Result<Device, DeviceError> {
        fence::register().map_err(os("membarrier (the software device needs Linux 4.16 or later)"))?;
        let mut gid = [0; 16];
        rustix::rand::getrandom(&mut gid, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| os("drawing the device's random name")(e.into()))?;

        if config.space > segment::MAX_LEN {
            return Err(DeviceError::Limit {
                what: "bytes of address space",
                asked: config.space,
                limit: segment::MAX_LEN,
            });
        }
        let limit = getrlimit(Resource::As).current.map_or(u64::MAX, |bytes| bytes / SHARE_OF_LIMIT);
        let mut space = config.space.min(limit).max(MIN_SPACE).next_multiple_of(4096);
        let segment = loop {
            match Segment::create(space) {
                Ok(segment) => break Arc::new(segment),
                Err(_) if space / 2 >= MIN_SPACE => space = (space / 2).next_multiple_of(4096),
                Err(e) => return Err(os("creating the device's memory")(e)),
            }
        };
        let (watch, listener) = service::open(&gid).map_err(os("opening the device's socket"))?;
        let device = Arc::new(DeviceShared::new(gid, segment, watch)?);
        let thread = std::thread::Builder::new()
            .name("crosstie-service".into())
            .spawn({
                let device = device.clone();
                move || service::run(&device, listener)
            })
            .map_err(os("starting the device's service thread"))?;
        Ok(Device { handle: Arc::new(DeviceHandle { device, service: Some(thread.into()) }) })
    }

    pub(crate) fn attr(&self) -> &DeviceAttr {
        &self.handle.device.attr
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.handle.device.address()
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        Ok(Pd { handle: self.handle.clone() })
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Result<Option<Event>, DeviceError> {
        Ok(self.handle.device.events.wait(timeout))
    }

    pub(crate) fn counters(&self) -> DeviceCounters {
        self.handle.device.counters()
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        if !self.device.is_of_this_process() {
            return;
        }
        self.device.close();
        self.device.watch.wake();
        self.device.workers.stop();
        if let Some(service) = self.service.take() {
            service.join();
        }
        self.device.abandon_removals();
        self.device.drop_links();
    }
}

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    pub(super) handle: Arc<DeviceHandle>,
}

impl Pd {
    pub(crate) fn allocate(&self, pd: u32, len: usize, access: Access) -> Result<Mr, DeviceError> {
        let device = &self.handle.device;
        let memory = device.allocate(len as u64)?;
        let segment = memory.segment();
        let start = segment
            .bytes(memory.at(), memory.len())
            .ok_or(DeviceError::Exhausted { what: "device memory" })?;
        if memory.len() >= 2 << 20 {
            segment.advise_huge(memory.at(), memory.len());
        }
        let pointer = start.as_ptr().expose_provenance() as u64;
        self.register_region(pd, pointer, len, access, Some(memory))
    }

    /// # Safety
    ///
    /// As for [`crate::device::Pd::register`].
    pub(crate) unsafe fn register(
        &self,
        pd: u32,
        start: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Mr, DeviceError> {
        let pointer = start.expose_provenance();
        if start.is_null() || !region_keys::is_taggable(pointer, len) {
            return Err(DeviceError::BadAddress(
                "the memory to register is null or beyond 48 bits of address",
            ));
        }
        self.register_region(pd, pointer as u64, len, access, None)
    }

    fn register_region(
        &self,
        pd: u32,
        pointer: u64,
        len: usize,
        access: Access,
        memory: Option<Allocation>,
    ) -> Result<Mr, DeviceError> {
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !access.contains(Access::LOCAL_WRITE)
        {
            return Err(DeviceError::BadAddress("remote writes and atomics need local write access"));
        }
        let device = &self.handle.device;
        let tagged = device.take_region_key()?;
        let (key, addr) = (tagged.key, tagged.address(pointer));
        let offset = memory.as_ref().map_or(IN_PLACE, |memory| memory.at());
        device.regions.add(key, &Region { pd, access, addr, len: len as u64, offset });
        Ok(Mr { handle: self.handle.clone(), key, pd, addr, memory, operations: None, is_removed: false })
    }
}

/// A registered region.
#[derive(Debug)]
pub struct Mr {
    handle: Arc<DeviceHandle>,
    key: RegionKey,
    /// With its tag.
    addr: u64,
    pd: u32,
    /// `None` for memory registered in place.
    memory: Option<Allocation>,
    /// Memory in place: the operations that were under way when [`Mr::deregister`] closed the region.
    operations: Option<Box<Quiescence>>,
    is_removed: bool,
}

impl Mr {
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        region_keys::pointer(self.addr)
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.key.bits()
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.key.bits()
    }
}

impl Mr {
    /// Deregisters the memory. `Err` hands the region back, with the process of a peer that is still inside an operation
    /// after `timeout`.
    pub(crate) fn deregister(mut self, timeout: Duration) -> Result<(), (Mr, Option<u32>)> {
        let deadline = Instant::now().checked_add(timeout);
        if self.try_remove(deadline) {
            return Ok(());
        }
        let gid = self.operations.as_ref().and_then(|operations| operations.blocking_peer());
        let process = gid.and_then(|gid| self.handle.device.peers.process(gid));
        Err((self, process))
    }

    /// Closes the region to new operations and removes it. Memory in place is removed when the operations that were under
    /// way have ended; returns false if they have not by the deadline.
    fn try_remove(&mut self, deadline: Option<Instant>) -> bool {
        let device = &self.handle.device;
        if !device.is_of_this_process() {
            // A forked child has its own copy of memory in place, and none of the other.
            self.is_removed = true;
            return true;
        }
        let mut operations = self.operations.take().unwrap_or_else(|| {
            device.regions.remove(self.key);
            // The service thread checks the key under this lock: what it copies for a peer from now on is not ours, and what it looks up in
            // the table is not of this region when another one has its entry.
            drop(locked(&device.proxied_access));
            Box::new(Quiescence::observe_domain(&device.peers, &device.attempts, self.pd))
        });
        if let Some(memory) = self.memory.take() {
            device.free_region_later(self.key, memory, *operations);
            self.is_removed = true;
            return true;
        }
        let mut pause = Pause::default();
        while !operations.is_reached(&device.peers) {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.operations = Some(operations);
                return false;
            }
            pause.wait();
        }
        device.regions.give_back_key(self.key);
        self.is_removed = true;
        true
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if !self.is_removed {
            // Without a deadline: memory registered in place goes back to the caller.
            self.try_remove(None);
        }
    }
}
