//! Waiting until another thread or process has published something: spin, yield the core, then park in the kernel.
//!
//! [`parker`] is the futex at which one owner parks and that others notify. [`strategy`] decides when to spin, yield and
//! park. [`yielding`] tells when a yield would take too long. [`any`] waits for several connections and services at once. [`flag`]
//! ends such a wait from another thread. [`poll_clock`] decides when a loop of polls reads the clock. [`deadlines`] keeps
//! the deadlines of what it polls for. [`wakers`] calls the wakers of tasks when their thread has no lock.

pub(crate) mod any;
mod deadlines;
mod flag;
mod parker;
pub(crate) mod poll_clock;
mod strategy;
pub(crate) mod wakers;
mod yielding;

pub use any::{Waitable, park_any, wait_any};
pub(crate) use deadlines::Deadlines;
pub use flag::WakeFlag;
#[cfg(all(test, loom))]
pub(crate) use parker::ModelParker;
pub(crate) use parker::Parker;
pub use parker::Wakeup;
pub(crate) use poll_clock::PollClock;
pub use strategy::WaitStrategy;
pub(crate) use strategy::{park_once, wait_for, wait_for_any, wait_until};
pub use yielding::yield_core;
