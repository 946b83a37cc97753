//! RDMA devices through rdma-core: InfiniBand, RoCE and the kernel's Soft-RoCE.
//!
//! libibverbs is loaded at run time: a program with this provider starts anywhere, and [`Device::open`](super::Device::open) or
//! [`devices`] say
//! what to install where it is missing. The promises are those of [`crate::device`]; the device keeps most of them. What
//! this module adds:
//!
//! - **A full send queue is refused before the device sees the request.** `ibv_wr_complete` reports an overflow late and
//!   throws the whole batch away, so places are counted here. A place is free again when a completion of that request, or
//!   of a later one, has been polled: an unsignaled request holds its place until then.
//! - **`wr_id` belongs to the caller.** The device carries a number of ours for send requests, which says which place in
//!   which queue ended, also in error completions, whose other fields hardware leaves undefined.
//! - **A failed queue pair is flushed to the end.** Devices differ in how they treat what is posted after the failure, and
//!   leave datagram queue pairs half alive; polling its error completions makes ERR complete.
//! - **Completions of a queue pair that was reset or dropped never appear**, as on hardware that cleans its queues.
//! - **Old drivers work.** Extended completion queues, `ibv_wr_*`, single-threaded queues and thread domains are used where
//!   the driver has them; where not, the older calls are. `CROSSTIE_VERBS=plain` in the environment asks for the older
//!   calls everywhere (for drivers that misbehave).
//!
//! Not seen here without [`Device::wait_event`](super::Device::wait_event): a completion queue that overran. Hardware tells it
//! by an event only; once that has been taken, [`Cq::poll`](super::Cq::poll) reports it too.
//!
//! ```text
//! Device ◄── Pd ◄── Mr, Srq, Ah          an arrow is an Arc: what it points to outlives its origin
//!    ▲        ▲
//!    └── Cq ◄─┴── RcQp, UdQp ◄╌╌ FailHandle (weak)
//! ```

mod connect;
mod cq;
mod datapath;
mod discovery;
mod gate;
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
fn os(what: &'static str, code: Option<i32>) -> DeviceError {
    let source = match code {
        Some(code) => std::io::Error::from_raw_os_error(code.abs()),
        None => std::io::Error::last_os_error(),
    };
    DeviceError::Os { what, source }
}

/// A number nobody can guess.
fn random() -> Result<u64, DeviceError> {
    let mut bytes = [0; 8];
    let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| DeviceError::Os { what: "getrandom", source: e.into() })?;
    debug_assert_eq!(n, bytes.len(), "getrandom gives up to 256 bytes at once");
    Ok(u64::from_ne_bytes(bytes))
}
