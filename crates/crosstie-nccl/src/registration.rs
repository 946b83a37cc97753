//! Registering memory, and deregistering it.

use core::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crosstie::device::{Access, MultiRegion};
use crosstie::rails::{DeregisterError, Rails};

use crate::comm::{RECVS, SENDS};
use crate::fault::Fault;
use crate::header::{PTR_CUDA, PTR_HOST};
use crate::key::{Key, Kind};
use crate::log::{trace, warning};
use crate::memory::{MEMORY, Registered};
use crate::network::NetDevice;

/// How long `deregMr` waits for a peer that is inside an operation on the memory. A peer that is stopped there holds it up.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(10);
const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

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
        RECVS.lock(comm)?.recent.forget(key);
    }
    let Registered { memory, start, is_gpu } = match Arc::try_unwrap(registered) {
        Ok(registered) => registered,
        Err(registered) => {
            // Other comms have used it.
            SENDS.for_each(|comm| comm.recent.forget(key));
            RECVS.for_each(|comm| comm.recent.forget(key));
            match Arc::try_unwrap(registered) {
                Ok(registered) => registered,
                Err(registered) => {
                    *MEMORY.lock(key)? = Some(registered);
                    return Err(Fault::Deregister("another thread is using the memory".into()));
                }
            }
        }
    };
    match memory.deregister(DEREGISTER_TIMEOUT) {
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
