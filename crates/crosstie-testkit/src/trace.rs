//! Single-stepping another process with ptrace.

use std::io;

/// Lets the parent trace this process, and stops until the parent continues it.
pub fn stop_here() {
    // SAFETY: plain system calls without memory arguments.
    unsafe {
        libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
        libc::raise(libc::SIGTRAP);
    }
}

/// Waits for the child's first stop, then executes up to `steps` of its instructions, but not beyond its second stop.
/// Returns how many were executed. The child stays stopped.
pub fn step(child: u32, steps: u64) -> io::Result<u64> {
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
        // SAFETY: the child is stopped; the kernel writes its result to `info`, which is valid.
        unsafe { libc::ptrace(libc::PTRACE_GETSIGINFO, child, 0, &mut info) };
        // `si_code` is positive for a trap of the processor, and not positive for a signal sent by a process (`raise`).
        if info.si_code <= 0 {
            return Ok(done);
        }
    }
    Ok(steps)
}

/// Lets a stopped child run on; it stays traced, and its next [`stop_here`] stops it again.
pub fn resume(child: u32) -> io::Result<()> {
    // SAFETY: the child is stopped and ours to trace; no memory arguments.
    match unsafe { libc::ptrace(libc::PTRACE_CONT, child as libc::pid_t, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Stops tracing a stopped child; it runs on.
pub fn detach(child: u32) -> io::Result<()> {
    // SAFETY: the child is stopped and ours to trace; no memory arguments.
    match unsafe { libc::ptrace(libc::PTRACE_DETACH, child as libc::pid_t, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Stops tracing a stopped child, and leaves it stopped where it is, with all its threads, until SIGCONT.
pub fn detach_stopped(child: u32) -> io::Result<()> {
    // SAFETY: the child is stopped and ours to trace; no memory arguments.
    match unsafe { libc::ptrace(libc::PTRACE_DETACH, child as libc::pid_t, 0, libc::SIGSTOP) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Stops a thread of a child process; its other threads run on.
pub fn attach(thread: i32) -> io::Result<()> {
    // SAFETY: a system call without memory arguments.
    if unsafe { libc::ptrace(libc::PTRACE_ATTACH, thread, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    wait(thread)
}

/// Executes instructions of a thread that was [attached](attach). The thread stays stopped. An instruction that waits in the kernel
/// takes as long as the wait.
pub fn step_attached(thread: i32, steps: u64) -> io::Result<()> {
    for _ in 0..steps {
        // SAFETY: the thread is stopped and ours to trace; no memory arguments.
        if unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, thread, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        wait(thread)?;
    }
    Ok(())
}

fn wait(child: libc::pid_t) -> io::Result<()> {
    let mut status = 0;
    // SAFETY: the kernel writes its result to `status`, which is valid. `__WALL`: also for threads.
    if unsafe { libc::waitpid(child, &mut status, libc::__WALL) } < 0 {
        return Err(io::Error::last_os_error());
    }
    if libc::WIFSTOPPED(status) {
        Ok(())
    } else {
        Err(io::Error::other(format!("the traced process ended: wait status {status:#x}")))
    }
}
