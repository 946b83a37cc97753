//! RDMA devices through rdma-core: InfiniBand, RoCE and the kernel's Soft-RoCE.
//!
//! libibverbs is loaded at run time: a program with this provider starts on any machine. Where the library is missing,
//! [`Device::open`](super::Device::open) and [`devices`] return an error that says what to install. The promises are those
//! of [`crate::device`]; the hardware keeps most of them. What this module adds:
//!
//! - **A full send queue is detected before the device gets the request.** `ibv_wr_complete` reports an overflow late and
//!   discards the whole batch, so free entries are counted here. An entry is free again when the completion of its request,
//!   or of a later one, has been polled; an unsignaled request occupies its entry until then.
//! - **The caller's `wr_id` is returned in every completion.** The device carries an internal tag for send requests instead.
//!   The tag identifies the request also in error completions, whose other fields hardware leaves undefined.
//! - **A queue pair in ERR is flushed completely.** Devices differ in how they treat requests that are posted after the
//!   failure, and some leave datagram queue pairs partly active. When the poller sees an error completion, it moves the
//!   queue pair to ERR explicitly.
//! - **Completions of a queue pair that was reset or dropped are never returned**, as on hardware that cleans its queues.
//! - **Old drivers work.** Extended completion queues, `ibv_wr_*`, single-threaded queues and thread domains are used if
//!   the driver supports them, and the older calls otherwise. `CROSSTIE_VERBS=plain` in the environment forces the older
//!   calls (for drivers with bugs in the newer ones).
//!
//! **Fork.** This module does not call `ibv_fork_init`. Memory of [`Pd::allocate`](super::Pd::allocate) is excluded from forks.
//! Memory of [`Pd::register`](super::Pd::register) is the caller's. On Linux before 5.12, a fork followed by a write to a page
//! of it gives the parent a new page, while the device keeps accessing the old one. Programs that fork on such kernels set
//! `RDMAV_FORK_SAFE=1` in the environment, which has the effect of `ibv_fork_init`; it makes registering slower. Newer
//! kernels copy registered pages for the child, and need nothing. A forked child must use none of its parent's devices; it may drop
//! them, which does nothing.
//!
//! Hardware reports the overrun of a completion queue by an event only: the program has to call
//! [`Device::wait_event`](super::Device::wait_event). After that, [`Cq::poll`](super::Cq::poll) reports it too.
//!
//! ```text
//! Device ◄── Pd ◄── Mr, Srq, Ah          an arrow is an Arc: its target outlives its origin
//!    ▲        ▲
//!    └── Cq ◄─┴── RcQp, UdQp ◄╌╌ FailHandle (a Weak)
//! ```

mod connect;
mod cq;
mod datapath;
mod discovery;
mod path;
mod port;
mod region;
mod send_ring;
mod setup;

pub(crate) use connect::FailHandle;
pub(crate) use cq::Cq;
pub(crate) use datapath::{RcQp, UdQp};
pub use discovery::{DeviceInfo, Gid, GidKind, LinkLayer, PortInfo, devices};
pub(crate) use region::Mr;
pub(crate) use setup::{Ah, Device, Pd, Srq};

use super::DeviceError;

/// The error that a call of libibverbs left in `errno`, or returned as `code`.
fn os_error(what: &'static str, code: Option<i32>) -> DeviceError {
    let source = match code {
        Some(code) => std::io::Error::from_raw_os_error(code.abs()),
        None => std::io::Error::last_os_error(),
    };
    DeviceError::Os { what, source }
}

/// A random number from the kernel.
fn random_u64() -> Result<u64, DeviceError> {
    let mut bytes = [0; 8];
    let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| DeviceError::Os { what: "getrandom", source: e.into() })?;
    debug_assert_eq!(n, bytes.len(), "getrandom returns up to 256 bytes at once");
    Ok(u64::from_ne_bytes(bytes))
}
