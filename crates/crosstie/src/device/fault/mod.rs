//! Faults on purpose: wraps another device and makes it fail as hardware does.
//!
//! A [`Plan`] says what fails and when; [`Control`] breaks things at run time. Every failure is one that real hardware
//! produces, and each method of [`Plan`] says how hardware comes to it.
//!
//! # Promises
//!
//! - The device contract holds, faults included: every accepted request ends exactly once, a failed request takes its
//!   queue pair to ERR, nothing of a queue pair succeeds after one of its completions failed, the completions of one
//!   queue pair keep their order.
//! - With [`Plan::none`] the device behaves as the one it wraps.
//! - The same plan and the same sequence of calls and results of the wrapped device give the same faults.
//!
//! # How
//!
//! Each request goes to the wrapped device under a number of our own, and signaled, so that each one's end is seen here;
//! successes that the caller did not ask to see are swallowed. Requests that the wrapped device must not see (yet) wait in
//! the queue of their queue pair:
//!
//! ```text
//!  sends of one queue pair, oldest first
//!  +------+------+---------+------+---------+
//!  | gone | gone | stalled | lost | stalled |      gone: in the wrapped device, which will complete it
//!  +------+------+---------+------+---------+      stalled: leaves when the port is up
//!                                                  lost: fails the queue pair when it is the oldest
//! ```
//!
//! Everything is behind one lock per device: this provider is for tests and simulation, not for speed.

mod datapath;
mod endpoint;
mod plan;
mod setup;
mod state;

pub use plan::Plan;
pub use setup::{Ah, Cq, Device, Pd, RcQp, Srq, UdQp};

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::DeviceAddress;
use state::State;

/// Breaks a wrapped device while it runs, and tells what it has done. From
/// [`Device::faults`](super::Device::faults); clones control the same device, from any thread.
#[derive(Clone, Debug)]
pub struct Control {
    state: Shared,
}

impl Control {
    /// Takes the port down until [`Control::port_up`]. See [`Plan::port_down`] for what that means.
    pub fn port_down(&self) {
        self.state.lock().port_down(None);
    }

    /// Takes the port up: what stalled leaves.
    pub fn port_up(&self) {
        self.state.lock().port_up();
    }

    /// Makes a peer vanish for good: every queue pair connected to it goes to ERR. The oldest request of each ends with
    /// [`Status::RetryExceeded`](super::Status::RetryExceeded), the others are flushed; a queue pair without requests
    /// tells by [`Event::QpFatal`](super::Event::QpFatal). Datagrams to it are lost, connecting to it is
    /// [`DeviceError::Unreachable`](super::DeviceError::Unreachable).
    ///
    /// Hardware: the peer's machine lost power, or its process died.
    pub fn kill_peer(&self, peer: &DeviceAddress) {
        self.state.lock().kill(*peer);
    }

    /// Posts so far, refused ones included: sends, receives, datagrams.
    pub fn posts(&self) -> u64 {
        self.state.lock().posts()
    }

    /// Completions so far that the caller has seen or could have seen.
    pub fn completions(&self) -> u64 {
        self.state.lock().completions()
    }
}

/// The state that all objects of a wrapped device share.
#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn new(state: State) -> Shared {
        Shared(Arc::new(Mutex::new(state)))
    }

    /// A caller that panicked inside (in the wrapped device) leaves nothing half-done that another could trip over.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
