//! Single-stepping another process.

use std::io;

/// Lets the parent trace us, and stops until it goes on.
pub(crate) fn stop_here() {
    // SAFETY: plain system calls without memory arguments.
    unsafe {
        libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
        libc::raise(libc::SIGTRAP);
    }
}

/// Waits for the child's first stop and executes up to `steps` of its instructions, or as many as it has until its
/// second stop. Says how many were executed. The child stays stopped.
pub(crate) fn step(child: u32, steps: u64) -> io::Result<u64> {
    let child = child as libc::pid_t;
    wait(child)?;
    for done in 0..steps {
        // SAFETY: the child is stopped and ours to trace; no memory arguments.
        if unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        wait(child)?;
        // SAFETY: all zeros is a valid siginfo.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the child is stopped; `info` is a valid place for the answer.
        unsafe { libc::ptrace(libc::PTRACE_GETSIGINFO, child, 0, &mut info) };
        // A trap of the processor is positive; a signal that somebody sent, as `raise` does, is not.
        if info.si_code <= 0 {
            return Ok(done);
        }
    }
    Ok(steps)
}

/// Lets a child that is stopped run free.
#[allow(dead_code, reason = "not every test program lets somebody go")]
pub(crate) fn let_go(child: u32) -> io::Result<()> {
    // SAFETY: the child is stopped and ours to trace; no memory arguments.
    match unsafe { libc::ptrace(libc::PTRACE_DETACH, child as libc::pid_t, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn wait(child: libc::pid_t) -> io::Result<()> {
    let mut status = 0;
    // SAFETY: `status` is a valid place for the answer.
    if unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    if libc::WIFSTOPPED(status) {
        Ok(())
    } else {
        Err(io::Error::other(format!("the victim ended: {status:#x}")))
    }
}
