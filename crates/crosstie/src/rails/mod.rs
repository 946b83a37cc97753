//! Messages over one to four devices (*rails*): more bandwidth, and a rail that fails loses no message.
//!
//! A [`Rails`] context holds the devices. A receiver [listens](Rails::listen); a sender [connects](Rails::connect) with the
//! listener's [`Handle`]. The receiver posts buffers with [`RecvConnection::irecv`]; the sender sends into them with
//! [`SendConnection::isend`]. No call blocks: [`Connecting::poll`], `accept`, `isend` and `irecv` return `None` if the program must
//! call them again, and `test` returns the result of a request when it is done. NCCL's network plugins have the same interface.
//!
//! # Promises
//!
//! - Every message arrives once, with its exact size, in the buffer that was posted for it; or every request of the connection
//!   ends with a [`Cause`].
//! - A rail that carries no bytes of a message sends nothing for it. A message over `n` rails is `n` work requests and `n`
//!   completions at the receiver.
//! - How a message is split is decided when it is sent, see [`Split`].
//! - A rail that fails is taken out; what was under way on it is sent again over the others. It is built again in the
//!   background, also with another address, and used again. Before a lost part is sent again the receiver closes the failed
//!   rail, so no late WRITE can change a buffer that the program has got back.
//! - Sending and receiving takes no lock, allocates nothing and makes no system call, apart from those of the device.
//!
//! # Threads
//!
//! A connection belongs to one thread at a time. A [`Rails`] context can be shared: any thread may register memory while others
//! send. Each connection has a control thread, which sleeps while nothing happens. Rails are repaired by both: the control
//! threads build, the calls of the program take out and replay. So call `test` while requests are outstanding.
//!
//! # Example
//!
//! ```
//! use crosstie::device::Device;
//! use crosstie::rails::{Config, Rails, RecvBuffer};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let open = || -> Result<_, Box<dyn std::error::Error>> {
//!     let devices = vec![Device::open(&"software".parse()?)?, Device::open(&"software".parse()?)?];
//!     Ok(Rails::new(devices, Config::default())?)
//! };
//! let (here, there) = (open()?, open()?);
//! let mut listener = there.listen()?;
//! let mut connecting = here.connect(&listener.handle())?;
//! let (mut sender, mut receiver) = (None, None);
//! while sender.is_none() || receiver.is_none() {
//!     if sender.is_none() {
//!         sender = connecting.poll()?;
//!     }
//!     if receiver.is_none() {
//!         receiver = listener.accept()?;
//!     }
//! }
//! let (mut sender, mut receiver) = (sender.unwrap(), receiver.unwrap());
//!
//! let (from, to) = (here.allocate(1 << 20)?, there.allocate(1 << 20)?);
//! from.write(0, b"over several rails")?;
//! let receive = receiver.irecv(&[RecvBuffer { memory: &to, range: 0..1 << 20, tag: 7 }])?.unwrap();
//! let send = loop {
//!     if let Some(send) = sender.isend(&from, 0..18, 7)? {
//!         break send;
//!     }
//! };
//! let received = loop {
//!     sender.progress();
//!     if let Some(received) = receiver.test(receive)? {
//!         break received;
//!     }
//! };
//! assert_eq!(received.sizes(), [18]);
//! while sender.test(send)?.is_none() {}
//! let mut bytes = [0; 18];
//! to.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"over several rails");
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

mod agreement;
mod config;
mod connect;
mod connections;
mod context;
mod control;
mod counters;
mod endpoint;
mod error;
mod events;
mod flush;
mod frames;
#[cfg(all(test, not(loom)))]
mod fuzz_tests;
mod hint;
mod load;
mod mailbox;
mod memory;
mod metrics;
mod parts;
mod receiver;
#[cfg(all(test, not(loom)))]
mod scripted_peers;
mod sender;

pub use config::{
    Config, HANDSHAKE_TIMEOUT, MAX_ATTEMPTS, MAX_DATA_QPS, MAX_HANDSHAKES, MAX_UNAUTHENTICATED, Split,
    UNAUTHENTICATED_TIMEOUT,
};
pub use connect::{Connecting, Handle, Listener};
pub use connections::{RecvConnection, SendConnection};
pub use context::Rails;
pub use counters::{Counters, RailCounters};
pub use crosstie_protocol::rails::{MAX_GROUP, MAX_RAILS, Mask, Violation};
pub use error::{Cause, RequestError, SetupError};
pub use flush::{Flush, Flusher};
pub use hint::{Hint, HintPublisher};
pub use memory::{DeregisterError, Memory};
pub use metrics::MetricsServer;
pub use receiver::{Received, RecvBuffer, RecvRequest};
pub use sender::SendRequest;
