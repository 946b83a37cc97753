//! Completion queues: the results of requests.

use core::cell::Cell;
use core::marker::PhantomData;
use core::time::Duration;

#[cfg(feature = "verbs")]
use super::verbs;
use super::{Completion, CqError, CqParker, DeviceError, fault, software};

/// A completion queue. Any number of queue pairs can use it for their completions; one thread polls it.
#[derive(Debug)]
pub struct Cq {
    pub(crate) provider: Provider,
    /// One thread at a time: `Send`, not `Sync`.
    not_sync: PhantomData<Cell<()>>,
}

impl From<Provider> for Cq {
    fn from(provider: Provider) -> Self {
        Cq { provider, not_sync: PhantomData }
    }
}

#[derive(Debug)]
pub(crate) enum Provider {
    Software(software::Cq),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Cq),
    Fault(fault::Cq),
}

impl Cq {
    /// Takes one completion into `to`. False if there is none. Never blocks.
    ///
    /// The sends of a queue pair complete in the order in which they were posted, and so do the receives of its peer's messages. There
    /// is no order between queue pairs, nor between the sends and the receives of one.
    ///
    /// ```
    /// # use crosstie::device::*;
    /// # fn f(cq: &mut Cq) -> Result<(), CqError> {
    /// let mut completion = Completion::default();
    /// while cq.next(&mut completion)? {
    ///     println!("request {}: {}", completion.wr_id, completion.status);
    /// }
    /// # Ok(()) }
    /// ```
    #[inline(always)]
    pub fn next(&mut self, to: &mut Completion) -> Result<bool, CqError> {
        match &mut self.provider {
            Provider::Software(x) => x.next(to),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => x.next(to),
            Provider::Fault(x) => x.next(to),
        }
    }

    /// Calls `each` with up to `max` completions, and returns how many there were. Never blocks. An error is reported if there is no
    /// completion.
    #[inline]
    pub fn poll(&mut self, max: usize, mut each: impl FnMut(&Completion)) -> Result<usize, CqError> {
        let (mut completion, mut count) = (Completion::default(), 0);
        while count < max {
            match self.next(&mut completion) {
                Ok(true) => each(&completion),
                Err(error) if count == 0 => return Err(error),
                Ok(false) | Err(_) => break,
            }
            count += 1;
        }
        Ok(count)
    }

    /// Whether there is something to poll: a completion or an error.
    pub(crate) fn is_ready(&mut self) -> bool {
        match &mut self.provider {
            Provider::Software(x) => x.is_ready(),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => x.is_ready().unwrap_or(true),
            Provider::Fault(x) => x.wait(Duration::ZERO).unwrap_or(true),
        }
    }

    /// The parker that is notified of each completion, where the device has one.
    pub(crate) fn parker(&self) -> Option<CqParker> {
        match &self.provider {
            Provider::Software(x) => Some(x.parker()),
            _ => None,
        }
    }

    /// Blocks until there is something to poll (returns true) or `timeout` has passed (returns false). It may return true
    /// too early; poll to find out.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, CqError> {
        match &mut self.provider {
            Provider::Software(x) => x.wait(timeout),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => x.wait(timeout),
            Provider::Fault(x) => x.wait(timeout),
        }
    }
}

pub(super) fn software(cq: &Cq) -> Result<&software::Cq, DeviceError> {
    match &cq.provider {
        Provider::Software(x) => Ok(x),
        _ => Err(DeviceError::WrongDevice("the completion queue")),
    }
}

#[cfg(feature = "verbs")]
pub(super) fn verbs(cq: &Cq) -> Result<&verbs::Cq, DeviceError> {
    match &cq.provider {
        Provider::Verbs(x) => Ok(x),
        _ => Err(DeviceError::WrongDevice("the completion queue")),
    }
}
