//! Cores for the sides of a benchmark.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// The cores that this thread may run on.
pub fn allowed() -> Result<Vec<usize>, Error> {
    let set = sched_getaffinity(None).map_err(Error::os("sched_getaffinity"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Two different cores, two hyperthreads of one core if there is nothing else; `None` where there is one.
pub fn pair() -> Result<Option<[usize; 2]>, Error> {
    let allowed = allowed()?;
    let [first, rest @ ..] = allowed.as_slice() else { return Ok(None) };
    let siblings = siblings(*first);
    let second =
        rest.iter().find(|cpu| siblings.is_none() || siblings != self::siblings(**cpu)).or(rest.first());
    Ok(second.map(|second| [*first, *second]))
}

/// A core for each of `sides`, the second of which keeps its own: the others share the rest where there are not
/// enough. `None` where there is one core.
pub(crate) fn assign(sides: usize) -> Result<Option<Vec<usize>>, Error> {
    let Some([first, second]) = pair()? else { return Ok(None) };
    let mut rest: Vec<usize> = vec![first];
    let mut twins = Vec::new();
    let mut taken = vec![siblings(first), siblings(second)];
    for cpu in allowed()?.into_iter().filter(|cpu| ![first, second].contains(cpu)) {
        let mine = siblings(cpu);
        if mine.is_some() && taken.contains(&mine) {
            twins.push(cpu);
        } else {
            taken.push(mine);
            rest.push(cpu);
        }
    }
    rest.extend(twins);
    let clients = (0..sides.saturating_sub(1)).map(|at| rest[at % rest.len()]);
    let mut places: Vec<usize> = clients.collect();
    places.insert(places.len().min(1), second);
    Ok(Some(places))
}

/// The hyperthreads that share a core with this one, in the kernel's words.
fn siblings(cpu: usize) -> Option<String> {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
}

/// Keeps the calling thread on one core.
pub(crate) fn pin(cpu: usize) -> Result<(), Error> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(Error::os("sched_setaffinity"))
}

/// Runs `work` on a thread of its own, so that pinning ends with it.
pub(crate) fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let join = |thread: std::thread::ScopedJoinHandle<'_, T>| thread.join();
    std::thread::scope(|scope| join(scope.spawn(work)))
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
