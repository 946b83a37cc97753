//! Services of typed methods, and calls that are futures: thin over [`Context::poll`](super::Context::poll).
//!
//! A [`Method`] has a number, a request and a response. A [`Service`] has a handler for each of its methods. A [`Client`]
//! calls them; what it gets is a future, for which a [`Driver`] polls the context.
//!
//! ```
//! use crosstie::copyrpc::service::{Driver, Error, Method, Refused, Service};
//! use crosstie::copyrpc::{Config, Context, EndpointConfig};
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
//! let (here, there) = (driver.create_client(&EndpointConfig::default())?,
//!                      driver.create_client(&EndpointConfig::default())?);
//! // Between processes the addresses travel as bytes, see `crosstie::bootstrap`.
//! here.connect(&there.address(), &ConnectConfig::default())?;
//! there.connect(&here.address(), &ConnectConfig::default())?;
//!
//! let mut service = Service::new(0u64).try_on::<Add>(|counter, more| {
//!     *counter = counter.checked_add(more).ok_or(Refused(1))?;
//!     Ok(*counter)
//! });
//! // Both sides in one thread, for once.
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
//! - Every call ends once, with its answer or an [`Error`] that says why. What a peer sends that makes no sense is counted, and
//!   ends that call only; a request that makes no sense is counted, and answered with an error.
//! - Calls over one connection reach the peer in the order in which they were made, also when they had to wait for
//!   room. They do so without being polled.
//! - In the steady state a call allocates nothing: slots for open calls are used again, as are their buffers.
//! - Futures may be dropped at any time, and moved between tasks; requests may be answered at any time, in any order.
//!
//! Calls and futures stay in the thread of their context, and so do executors.

mod client;
mod desk;
mod driver;
mod error;
mod method;
mod server;

pub use client::{Call, Client};
pub use desk::{DriverCounters, Ticket};
pub use driver::Driver;
pub use error::{Error, Refused};
pub use method::Method;
pub use server::{Deferred, Handlers, NoMethods, Service, ServiceCounters};
