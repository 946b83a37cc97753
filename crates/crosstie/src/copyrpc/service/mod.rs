//! Typed services, and calls as futures: a thin layer over [`Context::poll`](super::Context::poll).
//!
//! A [`Method`] has a number, a request type and a response type. A [`Service`] has a handler for each of its methods. A
//! [`Client`] calls methods; each call is a future. A [`Driver`] polls the context, so that the futures make progress.
//!
//! ```
//! use crosstie::copyrpc::service::{Driver, Error, Method, Refused, Service};
//! use crosstie::copyrpc::{Config, ConnectionConfig, Context};
//! use crosstie::device::ConnectConfig;
//!
//! struct Add;
//! impl Method for Add {
//!     const ID: u32 = 1;
//!     type Request = u64;
//!     type Response = u64;
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = Driver::new(Context::open(&"software".parse()?, &Config::default())?);
//! let (here, there) = (driver.create_client(&ConnectionConfig::default())?,
//!                      driver.create_client(&ConnectionConfig::default())?);
//! // Between processes the addresses are sent as bytes, see `crosstie::bootstrap`.
//! here.connect(&there.address(), &ConnectConfig::default())?;
//! there.connect(&here.address(), &ConnectConfig::default())?;
//!
//! let mut service = Service::new(0u64).try_on::<Add>(|counter, more| {
//!     *counter = counter.checked_add(more).ok_or(Refused(1))?;
//!     Ok(*counter)
//! });
//! // Here both sides run in one thread.
//! let sums = driver.run_serving(
//!     async {
//!         let (first, second) = (here.call::<Add>(2), here.call::<Add>(3));
//!         (first.await, second.await, here.call::<Add>(u64::MAX).await)
//!     },
//!     &mut service,
//! );
//! assert_eq!(sums, (Ok(2), Ok(5), Err(Error::Refused(Refused(1)))));
//! # Ok(()) }
//! ```
//!
//! # Promises
//!
//! - Every call ends exactly once, with its response or with an [`Error`] that says why. A malformed response is counted and ends
//!   only its own call; a malformed request is counted and answered with an error.
//! - Calls over one connection reach the peer in the order in which they were made, also if they had to wait for room. A call is
//!   sent even if its future is not polled.
//! - In the steady state a call allocates nothing: the slots of open calls and their buffers are reused.
//! - Futures may be dropped at any time, and moved between tasks. Requests may be answered at any time, in any order.
//!
//! Calls, futures and executors stay in the thread of their context.

mod call_table;
mod client;
mod driver;
mod error;
mod method;
mod server;
mod slots;

pub use call_table::DriverCounters;
pub use client::{Call, Client};
pub use driver::Driver;
pub use error::{Error, Refused};
pub use method::Method;
pub use server::{Deferred, Handlers, NoMethods, Service, ServiceCounters};
pub use slots::CallToken;
