//! Waiting until another thread or process has published something: spin, yield the core, then park in the kernel.
//!
//! [`parker`] is the futex at which one owner parks and that others notify. [`strategy`] decides when to spin, yield and
//! park. [`any`] waits for responses on several connections at once.

pub(crate) mod any;
mod parker;
mod strategy;

pub use any::{Waitable, wait_any};
pub(crate) use parker::Parker;
pub use strategy::WaitStrategy;
pub(crate) use strategy::{wait_for, wait_for_any, wait_until};
