//! Whether one process may read another's memory (`process_vm_readv`): a child tries to read its parent's.
//!
//! The child reads the parent and not the other way round, because the usual restriction (Yama) allows a parent to read its
//! children, but nothing else.

use core::hint::black_box;
use std::fs;
use std::io;
use std::process::{Command, Stdio};

use super::Finding;

const NAME: &str = "process_vm access";
const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";
/// The value that the child must find at the address that it is given.
const TOKEN: u64 = 0x6372_6f73_7374_6965;

pub(super) fn access() -> Finding {
    let token = Box::new(TOKEN);
    let address = &raw const **black_box(&token);
    let child = Command::new("/proc/self/exe")
        .args(["doctor", "--read-parent", &format!("{}", address.addr())])
        .stdin(Stdio::null())
        .output();
    black_box(&*token);
    let limited = |found: String| {
        Finding::limited(
            NAME,
            format!("{found}; memory registered in place goes through its owner's service thread"),
        )
        .needed_for("speed with memory registered in place")
    };
    let output = match child {
        Ok(output) => output,
        Err(error) => return limited(format!("could not be checked: {error}")),
    };
    match String::from_utf8_lossy(&output.stdout).trim().parse::<i32>() {
        Ok(0) => Finding::ok(NAME, "works: a child read its parent's memory"),
        Ok(errno) => {
            let refusal = io::Error::from_raw_os_error(errno);
            let scope = fs::read_to_string(YAMA).ok();
            match scope.as_deref().map(str::trim) {
                Some(scope @ ("1" | "2")) => limited(format!("{refusal}: {YAMA} is {scope}"))
                    .fix("sudo sysctl kernel.yama.ptrace_scope=0"),
                Some("3") => limited(format!("{refusal}: {YAMA} is 3")).fix(
                    "remove kernel.yama.ptrace_scope=3 from /etc/sysctl.conf and /etc/sysctl.d, then reboot",
                ),
                _ if errno == rustix::io::Errno::NOSYS.raw_os_error() => limited(format!("{refusal}"))
                    .fix("use a kernel with CONFIG_CROSS_MEMORY_ATTACH"),
                _ => limited(format!("{refusal}"))
                    .fix("in a container: start it with --cap-add=SYS_PTRACE, or a seccomp profile that lets process_vm_readv through"),
            }
        }
        Err(_) => limited(format!("could not be checked: the child ended with {}", output.status)),
    }
}

/// The child's part: reads the token from its parent's memory. Returns 0, or the errno, as text.
pub(crate) fn read_parent(address: usize) -> String {
    let mut token = 0u64;
    let Some(parent) = rustix::process::getppid() else { return "3\n".into() };
    let here = libc::iovec { iov_base: (&raw mut token).cast(), iov_len: size_of::<u64>() };
    let there =
        libc::iovec { iov_base: core::ptr::without_provenance_mut(address), iov_len: size_of::<u64>() };
    // SAFETY: `here` describes a local variable with its exact length. The kernel checks `there`, an address in another process.
    let moved = unsafe { libc::process_vm_readv(parent.as_raw_nonzero().get(), &here, 1, &there, 1, 0) };
    let errno = match moved {
        8 if token == TOKEN => 0,
        -1 => io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        _ => libc::EFAULT,
    };
    format!("{errno}\n")
}
