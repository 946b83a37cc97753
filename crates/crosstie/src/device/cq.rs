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

/// The result of [`Cq::take_receive`].
pub(crate) enum NextReceive {
    /// One was taken. `is_stream`: its connection had one at the look before, too.
    Taken { is_stream: bool },
    /// There is nothing to poll.
    Nothing,
    /// Only a poll can say.
    Unknown,
}

impl Cq {
    /// Calls `each` with up to `max` completions, and returns how many there were. Never blocks.
    ///
    /// The sends of a queue pair complete in the order in which they were posted, and so do the receives of its peer's messages. There
    /// is no order between queue pairs, nor between the sends and the receives of one.
    #[inline]
    pub fn poll(&mut self, max: usize, mut each: impl FnMut(&Completion)) -> Result<usize, CqError> {
        if let Provider::Software(x) = &mut self.provider {
            return x.poll(max, each);
        }
        self.poll_other(max, &mut each).map(|count| count as usize)
    }

    /// As [`poll`](Cq::poll), for the other providers. A function of its own, so that the result of `poll` stays in registers.
    #[inline(never)]
    fn poll_other(&mut self, max: usize, each: &mut impl FnMut(&Completion)) -> Result<u32, CqError> {
        let count = match &mut self.provider {
            // `poll` has done that.
            Provider::Software(_) => Ok(0),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => x.poll(max, each),
            Provider::Fault(x) => x.poll(max, each),
        };
        count.map(|count| count as u32)
    }

    /// Takes one completion of a receive into `to`, or says that there is nothing to poll, where the device knows that for less than a poll costs.
    #[inline(always)]
    pub(crate) fn take_receive(&mut self, to: &mut Completion) -> NextReceive {
        match &mut self.provider {
            Provider::Software(x) => x.take_receive(to),
            _ => NextReceive::Unknown,
        }
    }

    /// False if [`poll`](Cq::poll) would find no receive of a connection. Where that cannot be told for less than a poll costs, it is
    /// true.
    #[inline]
    pub(crate) fn may_have_receives(&self) -> bool {
        match &self.provider {
            Provider::Software(x) => x.has_lane_entries(),
            _ => true,
        }
    }

    /// As [`poll`](Cq::poll) for one completion, but looks only at the receives of the only connection that uses this queue. `None` if the
    /// device cannot do that for less than a poll costs. Poll from time to time as well.
    #[inline(always)]
    pub(crate) fn poll_only_receives(&mut self, each: impl FnMut(&Completion)) -> Option<usize> {
        match &mut self.provider {
            Provider::Software(x) => x.poll_only_lane(each),
            _ => None,
        }
    }

    /// Whether there is something to poll: a completion or an error.
    pub(crate) fn is_ready(&mut self) -> bool {
        match &mut self.provider {
            Provider::Software(x) => x.is_ready(),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => x.wait(Duration::ZERO).unwrap_or(true),
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
