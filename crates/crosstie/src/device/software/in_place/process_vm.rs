//! The system calls that copy between two processes.

use std::io;

use rustix::process::Pid;

/// Copies between this process and another one. The error is an errno.
///
/// # Safety
///
/// `local..local + len` is valid for reads, and for writes if `write` is false.
pub(crate) unsafe fn copy(pid: Pid, write: bool, addr: u64, local: *mut u8, len: usize) -> Result<(), i32> {
    let mut done = 0;
    while done < len {
        // SAFETY: `done < len`, so the address stays inside the caller's range.
        let here = libc::iovec { iov_base: unsafe { local.add(done) }.cast(), iov_len: len - done };
        let there = libc::iovec { iov_base: (addr as usize + done) as *mut _, iov_len: len - done };
        let pid = pid.as_raw_nonzero().get();
        // SAFETY: `here` describes memory that the caller promised to be valid; the kernel checks `there`.
        let moved = unsafe {
            if write {
                libc::process_vm_writev(pid, &here, 1, &there, 1, 0)
            } else {
                libc::process_vm_readv(pid, &here, 1, &there, 1, 0)
            }
        };
        match moved {
            1.. => done += moved as usize,
            0 => return Err(libc::EFAULT),
            _ => return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
        }
    }
    Ok(())
}

/// Whether the kernel forbids this process to access the memory of another one (seccomp, Yama, another container).
pub(crate) fn is_access_refused(pid: Pid) -> bool {
    let mut byte = 0;
    // SAFETY: `byte` is valid. The kernel looks whether the access is allowed before it looks at the address, at which nothing is mapped.
    unsafe { copy(pid, false, 1, &raw mut byte, 1) }.is_err_and(is_refusal)
}

/// Whether this errno says that the kernel forbids the access.
pub(crate) fn is_refusal(error: i32) -> bool {
    matches!(error, libc::EPERM | libc::ENOSYS | libc::EACCES)
}
