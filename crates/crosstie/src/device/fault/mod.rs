//! Fault injection: wraps another device and makes it fail as hardware does.
//!
//! A [`Plan`] says what fails and when; [`Control`] injects faults at run time. Every failure is one that real hardware
//! produces, and each method of [`Plan`] says what causes it there.
//!
//! # Promises
//!
//! - The device contract holds, also with faults: every accepted request completes exactly once, a failed request takes its
//!   queue pair to ERR, no send request of a queue pair succeeds after one has failed and no receive after one has failed, and
//!   the completions of one queue pair keep their order. A message that had arrived before a send request failed is received.
//! - With [`Plan::none`] the device behaves like the device that it wraps. Its send queues are as finite: an unsignaled request keeps
//!   its place until the completion of a later one is polled, see [`QpConfig::max_send_wr`](super::QpConfig::max_send_wr).
//! - The same plan, with the same sequence of calls and of results of the wrapped device, gives the same faults.
//!
//! # How it works
//!
//! Each request is posted to the wrapped device as signaled and with an internal `wr_id`, so that every completion is seen
//! here. Successes of requests that the caller posted unsignaled are dropped. Requests that the wrapped device must not get,
//! or not yet, stay in the queue of their queue pair:
//!
//! ```text
//!  sends of one queue pair, oldest first
//!  +--------+--------+---------+------+---------+
//!  | posted | posted | stalled | lost | stalled |      posted: in the wrapped device, which will complete it
//!  +--------+--------+---------+------+---------+      stalled: will be posted when the port is up
//!                                                      lost: fails the queue pair when it is the oldest
//! ```
//!
//! Beside it is the list of the requests that take a place in the send queue. A request leaves it when its completion is handed to
//! the caller, and takes those before it along.
//!
//! One lock per device protects everything: this provider is for tests and simulation, not for speed.

mod datapath;
mod odds;
mod plan;
mod qp;
mod setup;
mod state;

pub use odds::{InvalidOdds, Odds};
pub use plan::Plan;
pub use setup::{Ah, Cq, Device, Pd, RcQp, Srq, UdQp};

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::DeviceAddress;
use state::State;

/// Injects faults into a wrapped device at run time, and counts its posts and completions. Returned by
/// [`Device::faults`](super::Device::faults); clones control the same device, from any thread.
#[derive(Clone, Debug)]
pub struct Control {
    state: SharedState,
}

impl Control {
    /// Takes the port down until [`Control::port_up`]. [`Plan::port_down`] describes the effect.
    pub fn port_down(&self) {
        self.state.lock().port_down(None);
    }

    /// Takes the port up: stalled requests are sent.
    pub fn port_up(&self) {
        self.state.lock().port_up();
    }

    /// Makes a peer unreachable for ever: every queue pair connected to it goes to ERR. The oldest request of each ends with
    /// [`Status::RetryExceeded`](super::Status::RetryExceeded), the others are flushed; a queue pair without requests
    /// raises [`Event::QpFatal`](super::Event::QpFatal). Datagrams to the peer are lost, and connecting to it fails with
    /// [`DeviceError::Unreachable`](super::DeviceError::Unreachable).
    ///
    /// Hardware: the peer's machine lost power, or its process died.
    pub fn kill_peer(&self, peer: &DeviceAddress) {
        self.state.lock().kill_peer_device(*peer);
    }

    /// Limits the rate of the link to so many bytes per second; `None` removes the limit. Send requests of connected queue pairs
    /// leave one after the other: each is posted to the wrapped device when its bytes have passed the link, at the next post or
    /// poll of the device. So its data and its completions arrive no sooner than over such a link.
    ///
    /// Hardware: a slow or a shared link.
    pub fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.state.lock().set_rate(bytes_per_second);
    }

    /// Posts so far, including refused ones: sends, receives and datagrams.
    pub fn posts(&self) -> u64 {
        self.state.lock().posts()
    }

    /// Completions so far that were, or can be, handed to the caller.
    pub fn completions(&self) -> u64 {
        self.state.lock().completions()
    }
}

/// The state that all objects of a wrapped device share.
#[derive(Clone, Debug)]
struct SharedState(Arc<Mutex<State>>);

impl SharedState {
    fn new(state: State) -> SharedState {
        SharedState(Arc::new(Mutex::new(state)))
    }

    /// Ignores poisoning: a panic under the lock comes from the wrapped device, and leaves this state consistent.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
