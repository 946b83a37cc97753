//! Two cores for two sides.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// The cores that this thread may run on.
pub(crate) fn allowed() -> Result<Vec<usize>, Error> {
    let set = sched_getaffinity(None).map_err(Error::os("sched_getaffinity"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Two different cores, two hyperthreads of one core if there is nothing else; `None` where there is one.
pub(crate) fn pair() -> Result<Option<[usize; 2]>, Error> {
    let allowed = allowed()?;
    let [first, rest @ ..] = allowed.as_slice() else { return Ok(None) };
    let siblings = siblings(*first);
    let second =
        rest.iter().find(|cpu| siblings.is_none() || siblings != self::siblings(**cpu)).or(rest.first());
    Ok(second.map(|second| [*first, *second]))
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
