//! Devices that reach another process's memory: one contract, several providers.
//!
//! The contract is that of verbs. A [`Device`] gives protection domains ([`Pd`]) and completion queues ([`Cq`]); a
//! `Pd` gives regions ([`Mr`]), shared receive queues ([`Srq`]) and queue pairs ([`RcQp`], [`UdQp`]). Requests are
//! posted to queue pairs and end in completion queues.
//!
//! # What every provider promises
//!
//! - The bytes of a WRITE+IMM or SEND are visible before its completion is. Requests of one RC queue pair take effect
//!   in the order they were posted.
//! - Every accepted request ends: as asked, or with a [`Status`] that says why not. A request that fails takes its
//!   queue pair to [`QpState::Error`]; what is outstanding or posted after that is flushed, receives too.
//! - A refused post ([`PostError`]) changed nothing.
//! - An object keeps what it was made from alive. Queues are `Send`, not `Sync`: one thread at a time owns each.
//! - The data path takes no lock, allocates nothing and makes no system call (the software device makes one where it
//!   reaches memory that was registered in place in another process, or wakes a sleeper).
//! - A peer that dies takes its connections down: within 100 ms on the software device, after
//!   [`ConnectConfig::timeout`] and its retries on a network.
//!
//! # Providers
//!
//! [`DeviceSpec`] names them; the choice is made once and costs one predictable branch per call afterwards.
//!
//! | provider | where | for |
//! | --- | --- | --- |
//! | [`software`] | shared memory of this machine | everybody without a NIC; tests |
//! | `verbs` (feature) | rdma-core: InfiniBand, RoCE, Soft-RoCE | clusters |
//! | [`fault`] | wraps another | seeing what happens when things break |
//!
//! # Adding a provider
//!
//! A provider is a module with the types `Device`, `Pd`, `Mr`, `Cq`, `Srq`, `RcQp`, `UdQp` and `Ah`, whose methods have
//! the signatures that the enums in `device.rs`, `pd.rs`, `mr.rs`, `cq.rs`, `srq.rs` and `qp.rs` of this module call. Set-up goes into
//! `setup.rs`, what runs per message into `datapath.rs`. Then add a variant to each enum and a word to [`DeviceSpec`],
//! and run the conformance suite (`tests/conformance`) on it: it is the contract in executable form.
//!
//! # Example
//!
//! Two queue pairs of one process; between processes only the way the addresses travel differs.
//!
//! ```
//! use crosstie::device::*;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open(&"software".parse()?)?;
//! let pd = device.alloc_pd()?;
//! let mut cq = device.create_cq(&CqConfig::default())?;
//! let mut a = pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
//! let mut b = pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
//! a.connect(&b.address(), &ConnectConfig::default())?;
//! b.connect(&a.address(), &ConnectConfig::default())?;
//!
//! let target = pd.allocate(4096, Access::ALL)?;
//! b.post_recv(&RecvWr { wr_id: 1, sges: &[] })?;
//! a.post(&SendWr::new(2, SendOp::WriteImm(target.remote().at(0), 99), Data::Inline(b"over there")))?;
//!
//! let mut seen = None;
//! while seen.is_none() {
//!     cq.poll(16, |c| seen = Some(*c))?;
//! }
//! let completion = seen.unwrap();
//! assert_eq!((completion.wr_id, completion.imm, completion.byte_len), (1, Some(99), 10));
//! let mut bytes = [0; 10];
//! target.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"over there");
//! # Ok(()) }
//! ```
//!
//! # What does not compile
//!
//! Each of these differs from correct code in the one thing that it names; the correct code is compiled above or beside it.
//!
//! A region cannot go while its memory is named in a request:
//!
//! ```compile_fail,E0505
//! # use crosstie::device::*;
//! fn f(qp: &mut RcQp, mr: Mr) -> Result<(), Box<dyn std::error::Error>> {
//!     let piece = [mr.sge(0..8)?];
//!     drop(mr);
//!     qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&piece)))?;
//!     Ok(())
//! }
//! ```
//!
//! A queue pair cannot be used by two threads at once, though it can move to another:
//!
//! ```
//! fn send<T: Send>() {}
//! send::<crosstie::device::RcQp>();
//! send::<crosstie::device::UdQp>();
//! send::<crosstie::device::Cq>();
//! send::<crosstie::device::Srq>();
//! ```
//! ```compile_fail,E0277
//! fn sync<T: Sync>() {}
//! sync::<crosstie::device::RcQp>();
//! ```
//! ```compile_fail,E0277
//! fn sync<T: Sync>() {}
//! sync::<crosstie::device::UdQp>();
//! ```
//! ```compile_fail,E0277
//! fn sync<T: Sync>() {}
//! sync::<crosstie::device::Cq>();
//! ```
//! ```compile_fail,E0277
//! fn sync<T: Sync>() {}
//! sync::<crosstie::device::Srq>();
//! ```
//!
//! A completion is lent; it cannot be kept (a copy can):
//!
//! ```compile_fail,E0521
//! # use crosstie::device::*;
//! fn f<'a>(cq: &mut Cq, kept: &mut Vec<&'a Completion>) -> Result<usize, CqError> {
//!     cq.poll(1, |c| kept.push(c))
//! }
//! ```
//!
//! Registering memory in place is `unsafe`: the caller keeps it valid, and keeps off it:
//!
//! ```compile_fail,E0133
//! # use crosstie::device::*;
//! fn f(pd: &Pd, bytes: &mut [u8]) -> Result<Mr, DeviceError> {
//!     pd.register(bytes.as_mut_ptr(), bytes.len(), Access::LOCAL_WRITE)
//! }
//! ```
//!
//! A batch cannot leave its queue pair:
//!
//! ```compile_fail,E0521
//! # use crosstie::device::*;
//! fn f<'a>(qp: &'a mut RcQp, out: &mut Option<&'a mut Batch<'a>>) -> Result<(), PostError> {
//!     qp.post_batch(|batch| {
//!         *out = Some(batch);
//!         Ok(())
//!     })
//! }
//! ```

mod address;
mod completion;
mod config;
mod cq;
#[allow(clippy::module_inception)]
mod device;
mod error;
pub mod fault;
mod mr;
mod pd;
mod qp;
pub mod software;
mod spec;
mod srq;
#[cfg(feature = "verbs")]
pub mod verbs;
mod work;

pub use address::{DeviceAddress, QpAddress};
pub use completion::{Completion, Event, Opcode, Status};
pub use config::{ConnectConfig, CqConfig, DeviceAttr, QpConfig, QpState, SrqConfig, rnr_delay};
pub use cq::Cq;
pub use device::Device;
pub use error::{CqError, DeviceError, OutOfRegion, PostError};
pub use mr::Mr;
pub use pd::{Ah, Pd};
pub(crate) use qp::FailHandle;
pub use qp::{Batch, RcQp, UdQp};
pub use spec::DeviceSpec;
pub use srq::Srq;
pub use work::{Access, Data, RecvWr, RemoteAddr, RemoteMemory, SendOp, SendWr, Sge};

/// Runs `$body` on whichever provider the handle is of.
macro_rules! dispatch {
    ($enum:ident, $self:expr, $x:ident => $body:expr) => {
        match $self {
            $enum::Software($x) => $body,
            #[cfg(feature = "verbs")]
            $enum::Verbs($x) => $body,
            $enum::Fault($x) => $body,
        }
    };
}
use dispatch;
