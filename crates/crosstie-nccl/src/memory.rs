//! Registered memory.

use core::ffi::c_int;
use core::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crosstie::device::{Access, MultiRegion};
use crosstie::rails::{DeregisterError, Memory, Rails};

use crate::abi::{Fault, PTR_CUDA, PTR_HOST};
use crate::comm::{RECVS, SENDS};
use crate::key::{Key, Kind};
use crate::log::{trace, warning};
use crate::network::NetDevice;
use crate::table::{Table, table};

/// Registrations at a time.
const MAX_MEMORY: usize = 1 << 20;
/// How long `deregMr` waits for a peer that is inside an operation on the memory. A peer that is stopped there holds it up.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(10);
const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

/// Memory that NCCL has registered. What each request needs is on one cache line.
#[repr(C, align(64))]
pub(crate) struct Registered {
    memory: Memory,
    start: usize,
    pub(crate) is_gpu: bool,
}

const _: () = assert!(core::mem::offset_of!(Registered, is_gpu) <= 64);

/// `None` only while the memory is being deregistered.
static MEMORY: Table<Option<Arc<Registered>>> = table!(Option<Arc<Registered>>, MAX_MEMORY, Kind::Memory);

impl Registered {
    /// The memory with this key.
    pub(crate) fn find(key: Key) -> Result<Arc<Registered>, Fault> {
        MEMORY.lock(key)?.clone().ok_or(Fault::InvalidKey(Kind::Memory))
    }

    /// The memory and the range of it that a buffer names.
    #[inline]
    pub(crate) fn range(&self, data: usize, size: usize) -> Result<(&Memory, Range<usize>), Fault> {
        if size == 0 {
            return Ok((&self.memory, 0..0));
        }
        let (at, len) = (data.wrapping_sub(self.start), self.memory.len());
        if data < self.start || at > len || size > len - at {
            return Err(Fault::Argument("the buffer is not inside the memory of its handle"));
        }
        Ok((&self.memory, at..at + size))
    }
}

/// The memory that a comm used last, so that its next request needs no lock and no reference count for it. NCCL has a handle for
/// each protocol of a connection. Deregistering memory makes all comms forget it.
#[derive(Default)]
pub(crate) struct RecentMemory {
    entries: [Option<(Key, Arc<Registered>)>; RECENT],
}

/// A power of two.
const RECENT: usize = 8;

impl RecentMemory {
    /// The memory with this key.
    #[inline(always)]
    pub(crate) fn get(&mut self, key: Key) -> Result<&Registered, Fault> {
        let entry = &mut self.entries[key.index() as usize % RECENT];
        if !matches!(entry, Some((known, _)) if *known == key) {
            RecentMemory::find(entry, key)?;
        }
        match entry {
            Some((_, registered)) => Ok(registered),
            None => Err(Fault::InvalidKey(Kind::Memory)),
        }
    }

    #[cold]
    fn find(entry: &mut Option<(Key, Arc<Registered>)>, key: Key) -> Result<(), Fault> {
        // The old one may be this memory before it was registered again.
        *entry = None;
        *entry = Some((key, Registered::find(key)?));
        Ok(())
    }

    pub(crate) fn forget(&mut self, key: Key) {
        self.entries[key.index() as usize % RECENT].take_if(|(known, _)| *known == key);
    }
}

/// The context and the device of a comm of either direction. Another thread may be using the comm.
fn of_comm(comm: Key) -> Result<(Rails, &'static NetDevice), Fault> {
    if comm.is(Kind::Send) {
        let comm = SENDS.lock(comm)?;
        return Ok((comm.rails.clone(), comm.device));
    }
    let comm = RECVS.lock(comm)?;
    Ok((comm.rails.clone(), comm.device))
}

/// `regMr`: memory of the host.
pub(crate) fn register(comm: Key, data: *mut u8, size: usize, kind: c_int) -> Result<Key, Fault> {
    let (rails, _) = of_comm(comm)?;
    if data.is_null() || size == 0 {
        return Err(Fault::Null("data"));
    }
    match kind {
        PTR_HOST => {}
        PTR_CUDA => return Err(Fault::Unsupported("GPU memory is registered with regMrDmaBuf")),
        _ => return Err(Fault::Argument("unknown kind of memory")),
    }
    // SAFETY: NCCL keeps the memory valid until `deregMr` has returned, and no Rust code has references to it.
    let regions = unsafe { MultiRegion::register(rails.domains(), data, size, ACCESS)? };
    let memory = rails.adopt(regions)?;
    trace!("registered {size} bytes at {data:p}");
    MEMORY.insert(Some(Arc::new(Registered { memory, start: data.addr(), is_gpu: false })))
}

/// `regMrDmaBuf`: memory of a GPU, or of the host, that a DMA-BUF file descriptor names.
pub(crate) fn register_dma_buf(
    comm: Key,
    address: u64,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
) -> Result<Key, Fault> {
    let (rails, device) = of_comm(comm)?;
    if !device.has_gpu_memory() {
        return Err(Fault::Unsupported("a rail of this device cannot register DMA-BUF memory"));
    }
    if !matches!(kind, PTR_HOST | PTR_CUDA) || size == 0 || fd < 0 {
        return Err(Fault::Argument("unknown kind of memory, no memory, or no file descriptor"));
    }
    // SAFETY: NCCL keeps the descriptor open until this call returns.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    // SAFETY: as in `register`.
    let regions =
        unsafe { MultiRegion::register_dma_buf(rails.domains(), fd, offset, size, address, ACCESS)? };
    let memory = rails.adopt(regions)?;
    trace!("registered {size} bytes of GPU memory at {address:#x}");
    let start = address as usize;
    MEMORY.insert(Some(Arc::new(Registered { memory, start, is_gpu: kind == PTR_CUDA })))
}

/// `deregMr`. If a request of the comm still uses the memory, NCCL is aborting: the connection is aborted, so that nothing
/// accesses the memory when this returns.
pub(crate) fn deregister(comm: Key, key: Key) -> Result<(), Fault> {
    drop(Registered::find(key)?);
    if comm.is(Kind::Send) {
        let mut comm = SENDS.lock(comm)?;
        if comm.requests.iter().any(|entry| entry.memory == key) {
            warning!("memory is deregistered while it is being sent: the connection is aborted");
            comm.connection.abort();
        }
    } else {
        let mut comm = RECVS.lock(comm)?;
        if comm.requests.iter().any(|entry| entry.uses(key)) {
            warning!("memory is deregistered while it is being received into: the connection is aborted");
            comm.connection.abort();
        }
    }
    // From here on nobody finds it.
    let registered = MEMORY.lock(key)?.take().ok_or(Fault::InvalidKey(Kind::Memory))?;
    if comm.is(Kind::Send) {
        SENDS.lock(comm)?.recent.forget(key);
    } else {
        RECVS.lock(comm)?.forget_memory(key);
    }
    let Registered { memory, start, is_gpu } = match Arc::try_unwrap(registered) {
        Ok(registered) => registered,
        Err(registered) => {
            // Other comms have used it.
            SENDS.for_each(|comm| comm.recent.forget(key));
            RECVS.for_each(|comm| comm.forget_memory(key));
            match Arc::try_unwrap(registered) {
                Ok(registered) => registered,
                Err(registered) => {
                    *MEMORY.lock(key)? = Some(registered);
                    return Err(Fault::Deregister("another thread is using the memory".into()));
                }
            }
        }
    };
    let deregistered = match memory.deregister(DEREGISTER_TIMEOUT) {
        Err(DeregisterError::InUse(memory)) => {
            // Another comm holds it for receives to come.
            RECVS.for_each(|comm| comm.connection.release_memory());
            memory.deregister(DEREGISTER_TIMEOUT)
        }
        deregistered => deregistered,
    };
    match deregistered {
        Ok(()) => MEMORY.remove(key).map(drop),
        Err(error) => {
            // It is not given back: a peer may still write there. NCCL may call again.
            let text = error.to_string();
            if let DeregisterError::InUse(memory) | DeregisterError::PeerBusy { memory, .. } = error {
                *MEMORY.lock(key)? = Some(Arc::new(Registered { memory, start, is_gpu }));
            }
            Err(Fault::Deregister(text))
        }
    }
}
