//! Which cores a benchmark uses, and pinning threads to them.

use std::fs;
use std::thread::{Scope, ScopedJoinHandle};

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// The cores that this thread may run on.
pub fn allowed() -> Result<Vec<usize>, Error> {
    let set = sched_getaffinity(None).map_err(Error::os("sched_getaffinity"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Two different cores; two hyperthreads of one core if there is only one core. `None` if there is only one hyperthread.
pub fn pair() -> Result<Option<[usize; 2]>, Error> {
    let allowed = allowed()?;
    let [first, rest @ ..] = allowed.as_slice() else { return Ok(None) };
    let siblings = siblings(*first);
    let second =
        rest.iter().find(|cpu| siblings.is_none() || siblings != self::siblings(**cpu)).or(rest.first());
    Ok(second.map(|second| [*first, *second]))
}

/// A core for each of `ranks`. Rank 1, the server, gets a core of its own; the others share the remaining cores if there are
/// not enough. `None` if there is only one core.
pub(crate) fn assign(ranks: usize) -> Result<Option<Vec<usize>>, Error> {
    let Some([first, second]) = pair()? else { return Ok(None) };
    let mut rest: Vec<usize> = vec![first];
    let mut second_hyperthreads = Vec::new();
    let mut taken = vec![siblings(first), siblings(second)];
    for cpu in allowed()?.into_iter().filter(|cpu| ![first, second].contains(cpu)) {
        let core = siblings(cpu);
        if core.is_some() && taken.contains(&core) {
            second_hyperthreads.push(cpu);
        } else {
            taken.push(core);
            rest.push(cpu);
        }
    }
    rest.extend(second_hyperthreads);
    let clients = (0..ranks.saturating_sub(1)).map(|at| rest[at % rest.len()]);
    let mut cores: Vec<usize> = clients.collect();
    cores.insert(cores.len().min(1), second);
    Ok(Some(cores))
}

/// The hyperthreads of the same core, as the kernel lists them.
pub(crate) fn siblings(cpu: usize) -> Option<String> {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
}

/// Pins the calling thread to one core.
pub(crate) fn pin_thread(cpu: usize) -> Result<(), Error> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(Error::os("pinning a thread to its core")(Errno::INVAL));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(Error::os("pinning a thread to its core"))
}

/// Runs `work` on a new thread, so that its pinning ends with it. Drops `work` if there can be no such thread.
pub(crate) fn on_own_thread<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = spawn(scope, work)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Starts a thread of a scope. A limit on threads or memory is an error, not a panic.
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, Error> {
    std::thread::Builder::new()
        .spawn_scoped(scope, work)
        .map_err(|source| Error::Os { what: "starting a thread (raise `ulimit -u` or `ulimit -v`)", source })
}
