//! Memory in place whose owner was dropped while a peer was inside an operation that may still touch it.
//!
//! The drop does not wait for the peer; the memory stays registered (closed to new operations) and is kept here. The
//! next thread that registers or gives back memory looks whether the peer has left.

use core::time::Duration;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::device::Mr;

/// How long a drop waits for a running peer to leave its operation.
const DROP_TIMEOUT: Duration = Duration::from_millis(100);

/// How much memory is kept for peers that may still touch it, see [`kept_memory`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptMemory {
    /// Regions.
    pub regions: u64,
    /// Their bytes.
    pub bytes: u64,
}

struct Kept {
    mr: Mr,
    memory: Box<dyn Send>,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
/// Length of `KEPT`, so that nobody takes the lock while there is nothing to do.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// How much memory of this process was dropped while it was registered, and is kept because a peer is inside an operation that
/// may still touch it. It is freed when the peer has left or ended.
pub fn kept_memory() -> KeptMemory {
    free_kept();
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    KeptMemory { regions: kept.len() as u64, bytes: kept.iter().map(|kept| kept.mr.len() as u64).sum() }
}

/// Deregisters memory and frees it, now or when no peer may touch it any more.
pub(super) fn free_memory<M: Send + 'static>(mr: Mr, memory: M) {
    free_kept();
    match mr.deregister(DROP_TIMEOUT) {
        Ok(()) => drop(memory),
        Err(error) => {
            let kept = Kept { mr: error.region, memory: Box::new(memory) };
            let mut all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(kept);
            COUNT.store(all.len(), Relaxed);
        }
    }
}

/// Frees what no peer may touch any more.
pub(super) fn free_kept() {
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    let mut all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut freed = Vec::new();
    for Kept { mr, memory } in core::mem::take(&mut *all) {
        match mr.deregister(Duration::ZERO) {
            Ok(()) => freed.push(memory),
            Err(error) => all.push(Kept { mr: error.region, memory }),
        }
    }
    COUNT.store(all.len(), Relaxed);
    // The owners' own drops run without the lock: they may come here again.
    drop(all);
    drop(freed);
}
