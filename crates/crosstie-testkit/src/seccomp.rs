//! Seccomp filters: forbids system calls to the calling thread and to every thread and process it starts later. A filter
//! cannot be removed.

use std::os::unix::process::ExitStatusExt;

use crate::child;

/// What a filter does with the system calls that it lists.
pub enum FilterMode {
    /// The listed calls are allowed; any other call kills the process.
    AllowOnly,
    /// The listed calls fail with EPERM; any other call is allowed.
    Deny,
}

/// With this variable, a test program runs only what accesses the memory of another process, and the kernel refuses that to it and to all
/// processes that it starts, as it does in most containers: `process_vm_readv` and `process_vm_writev` fail.
pub const REFUSE_VARIABLE: &str = "CROSSTIE_REFUSE_PROCESS_VM";

/// Whether [`REFUSE_VARIABLE`] is set.
pub fn is_process_vm_refused() -> bool {
    std::env::var_os(REFUSE_VARIABLE).is_some()
}

/// Refuses access to the memory of other processes to this thread and to what it starts.
pub fn refuse_process_vm() {
    install_filter(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev], FilterMode::Deny);
}

/// Installs a filter on this thread.
pub fn install_filter(calls: &[libc::c_long], mode: FilterMode) {
    // Classic BPF on `struct seccomp_data`, whose first word is the number of the call.
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let (listed, others) = match mode {
        FilterMode::AllowOnly => (libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_KILL_PROCESS),
        FilterMode::Deny => (libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, libc::SECCOMP_RET_ALLOW),
    };
    let mut steps = vec![step(LOAD, 0, 0)];
    for (i, call) in calls.iter().enumerate() {
        // On a match, jump over the remaining comparisons and over the return for unlisted calls.
        steps.push(step(JUMP_IF_EQUAL, (calls.len() - i) as u8, *call as u32));
    }
    steps.push(step(RETURN, 0, others));
    steps.push(step(RETURN, 0, listed));
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: `program` describes `steps`; the kernel copies both during the call.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
    };
    assert!(installed, "this test needs seccomp filters: {}", std::io::Error::last_os_error());
}

/// The task of a child that makes a system call on purpose.
const VIOLATION: &str = "makes a system call";

/// Starts children that do each of `tasks` without a system call, see [`without_system_calls`]; and one that makes one, which the filter
/// must kill.
pub fn assert_no_system_calls<T: Fn() + Copy>(test: T, tasks: &[&str]) {
    for task in tasks {
        let ended = child::command(test, task).output().unwrap();
        assert!(ended.status.success(), "{task}: it made a system call, or failed: {ended:?}");
    }
    let ended = child::command(test, VIOLATION).output().unwrap();
    assert_eq!(ended.status.signal(), Some(libc::SIGSYS), "the filter kills: {ended:?}");
}

/// In a child that [`assert_no_system_calls`] has started: does the work under a filter that kills the process at the first system call,
/// except for `allowed` ones, and exits.
pub fn without_system_calls(allowed: &[libc::c_long], work: impl FnOnce()) -> ! {
    install_filter(&[allowed, &[libc::SYS_exit_group]].concat(), FilterMode::AllowOnly);
    work();
    if child::task().is_some_and(|task| task == VIOLATION) {
        std::hint::black_box(std::process::id());
    }
    exit_at_once()
}

/// Ends the process with a single system call.
pub fn exit_at_once() -> ! {
    // SAFETY: no memory is involved.
    unsafe { libc::_exit(0) }
}
