//! The fast copies: into memory that is mapped here (`peer_mapping.rs`), and shared by helper threads (`copy_helpers.rs`, `copy_job.rs`).

mod copy_helpers;
mod copy_job;
mod peer_mapping;

use rustix::process::Pid;

use super::process_vm;
use copy_helpers::{CopyHelpers, MIN_SHARED};
use copy_job::{HERE, Transfer};
pub(crate) use peer_mapping::{MappedPtr, PeerMappings};

/// As `process_vm::copy`. Helpers share a long copy.
///
/// # Safety
///
/// As for `process_vm::copy`.
pub(crate) unsafe fn copy(pid: Pid, write: bool, addr: u64, local: *mut u8, len: usize) -> Result<(), i32> {
    let Some(helpers) = helpers_for(len) else {
        // SAFETY: the caller's promise.
        return unsafe { process_vm::copy(pid, write, addr, local, len) };
    };
    let (pid, local) = (pid.as_raw_nonzero().get(), local.expose_provenance() as u64);
    // SAFETY: the caller's promise; the kernel checks the remote address.
    match unsafe { helpers.copy(&Transfer { pid, write, remote: addr, local, len }) } {
        0 => Ok(()),
        error => Err(error),
    }
}

impl MappedPtr {
    /// Copies into the memory of the other process.
    ///
    /// # Safety
    ///
    /// As for [`copy`](crate::memory::copy::copy).
    #[inline(never)]
    pub(crate) unsafe fn write(self, from: *const u8, len: usize) {
        if let Some(helpers) = helpers_for(len) {
            let (remote, local) = (self.as_ptr().expose_provenance() as u64, from.expose_provenance() as u64);
            // SAFETY: the caller's promise.
            let error = unsafe { helpers.copy(&Transfer { pid: HERE, write: true, remote, local, len }) };
            debug_assert_eq!(error, 0);
        } else {
            // SAFETY: the caller's promise.
            unsafe { crate::memory::copy::copy(from, self.as_ptr(), len) };
        }
    }
}

/// The helpers of this process, if it has any and a copy of this length is worth sharing.
fn helpers_for(len: usize) -> Option<&'static CopyHelpers> {
    if len >= MIN_SHARED { CopyHelpers::of_process(copy_part) } else { None }
}

/// A [`CopyFunction`](copy_helpers::CopyFunction).
///
/// # Safety
///
/// `local..local + len` is valid for reads, and for writes if `write` is false. If `pid` is [`HERE`], the same holds for `remote`, with reads and
/// writes exchanged.
unsafe fn copy_part(transfer: &Transfer) -> i32 {
    let Transfer { pid, write, remote, local, len } = *transfer;
    let local = core::ptr::with_exposed_provenance_mut(local as usize);
    let Some(pid) = Pid::from_raw(pid) else {
        let remote = core::ptr::with_exposed_provenance_mut(remote as usize);
        let (from, to) = if write { (local, remote) } else { (remote, local) };
        // SAFETY: the caller's promise: `pid` is `HERE`.
        unsafe { crate::memory::copy::copy(from, to, len) };
        return 0;
    };
    // SAFETY: the caller's promise.
    unsafe { process_vm::copy(pid, write, remote, local, len) }.err().unwrap_or(0)
}
