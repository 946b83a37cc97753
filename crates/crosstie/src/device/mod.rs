//! RDMA devices: one contract, several providers.
//!
//! The contract is that of verbs. A [`Device`] creates protection domains ([`Pd`]) and completion queues ([`Cq`]); a `Pd`
//! creates memory regions ([`Mr`]), shared receive queues ([`Srq`]) and queue pairs ([`RcQp`], [`UdQp`]). Requests are
//! posted to queue pairs; their completions are polled from completion queues.
//!
//! # What every provider promises
//!
//! - The bytes of a WRITE+IMM or SEND are visible before its completion is. Requests of one RC queue pair take effect
//!   in the order in which they were posted.
//! - Some devices execute requests while they are posted. The post says so ([`Posted::Done`]): then there is no completion to come, and
//!   nothing to keep a record of. A NIC says [`Posted::Queued`].
//! - Every request that was queued completes, with success or with a [`Status`] that names the cause. A request that fails takes
//!   its queue pair to [`QpState::Error`]; all requests that are outstanding or posted later are flushed, receives too.
//! - A post that returns [`PostError`] has changed nothing.
//! - Queues are finite. An unsignaled request that was queued keeps its place in the send queue until the completion of a later one of the
//!   same queue pair is there, at the latest until it is polled ([`QpConfig::max_send_wr`]).
//! - An object keeps alive what it was created from. Queues are `Send`, not `Sync`: one thread at a time uses a queue.
//! - The data path takes no lock, allocates nothing and makes no system call. The software device makes one in two cases:
//!   it accesses memory that another process registered in place, or it wakes a waiting thread.
//! - When a peer dies, the queue pairs that are connected to it go to [`QpState::Error`] (ERR): within 100 ms on the
//!   software device; on a network, after the retries of a request to it ([`ConnectConfig::timeout`]).
//!
//! # Providers
//!
//! A [`DeviceSpec`] names the provider. It is chosen once; after that it costs one predictable branch per call.
//!
//! | provider | runs on | use |
//! | --- | --- | --- |
//! | [`software`] | shared memory of this machine | machines without a NIC; tests |
//! | `verbs` (feature) | rdma-core: InfiniBand, RoCE, Soft-RoCE | clusters |
//! | [`fault`] | another device, which it wraps | fault injection |
//!
//! # Fork and exec
//!
//! A forked child may drop the objects of its parent, which does nothing to those of the parent, and may open devices of its own. It must not
//! use its parent's. Memory of [`Pd::allocate`] is not mapped in the child. A device that the parent closes is closed for its peers at once,
//! even if a child still has its descriptors.
//!
//! A process that registered memory in place ([`Pd::register`]) drops the region before it replaces its program (`exec`). Peers of the
//! software device write to the process by its id, which the new program has, too; a peer learns of the end some milliseconds later.
//!
//! # Adding a provider
//!
//! A provider is a module with the types `Device`, `Pd`, `Mr`, `Cq`, `Srq`, `RcQp`, `UdQp` and `Ah`, whose methods have
//! the signatures that the enums in `device.rs`, `pd.rs`, `mr.rs`, `cq.rs`, `srq.rs` and `qp.rs` of this module call. Put
//! set-up code into `setup.rs` and code that runs per message into `datapath.rs`. Then add a variant to each enum and a
//! name to [`DeviceSpec`], and run the conformance suite (`tests/conformance`) on it: it is the contract in executable
//! form.
//!
//! # Example
//!
//! Two connected queue pairs in one process. Between two processes the code is the same; they exchange their
//! [`QpAddress`]es and [`RemoteMemory`] over any channel.
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
//! Each of these examples has one error. The corresponding correct code is compiled above or next to it.
//!
//! A region cannot be dropped while a request names its memory:
//!
//! ```compile_fail,E0505
//! # use crosstie::device::*;
//! fn f(qp: &mut RcQp, mr: Mr) -> Result<(), Box<dyn std::error::Error>> {
//!     let sges = [mr.sge(0..8)?];
//!     drop(mr);
//!     qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&sges)))?;
//!     Ok(())
//! }
//! ```
//!
//! A queue pair can move to another thread, but two threads cannot use it at the same time:
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
//! The closure borrows the completion; it cannot keep the reference (it can keep a copy):
//!
//! ```compile_fail,E0521
//! # use crosstie::device::*;
//! fn f<'a>(cq: &mut Cq, kept: &mut Vec<&'a Completion>) -> Result<usize, CqError> {
//!     cq.poll(1, |c| kept.push(c))
//! }
//! ```
//!
//! Registering memory in place is `unsafe`: the caller must keep it valid and must not use references to it:
//!
//! ```compile_fail,E0133
//! # use crosstie::device::*;
//! fn f(pd: &Pd, bytes: &mut [u8]) -> Result<Mr, DeviceError> {
//!     pd.register(bytes.as_mut_ptr(), bytes.len(), Access::LOCAL_WRITE)
//! }
//! ```
//!
//! A batch cannot outlive the call that it belongs to:
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
pub(crate) mod clock;
mod completion;
mod config;
mod cq;
#[allow(clippy::module_inception)]
mod device;
mod error;
pub mod fault;
mod mr;
mod multi_region;
mod pd;
mod qp;
mod ring_region;
pub mod software;
mod spec;
mod srq;
#[cfg(feature = "verbs")]
pub mod verbs;
mod work;

pub use address::{DeviceAddress, QpAddress};
pub(crate) use completion::InlineData;
pub use completion::{Completion, Event, Opcode, Status};
pub use config::{
    ConnectConfig, CqConfig, DeviceAttr, DeviceCounters, QpConfig, QpState, SrqConfig, rnr_delay,
};
pub use cq::Cq;
pub use device::Device;
pub use error::{CqError, DeregisterError, DeviceError, OutOfRegion, PostError};
pub use mr::Mr;
pub use multi_region::MultiRegion;
pub use pd::{Ah, Pd};
pub(crate) use qp::FailHandle;
pub use qp::{Batch, RcQp, UdQp};
pub(crate) use ring_region::RingRegion;
pub(crate) use software::CqParker;
pub use spec::DeviceSpec;
pub use srq::Srq;
pub use work::{Access, Data, Posted, RecvWr, RemoteAddr, RemoteMemory, SendOp, SendWr, Sge, Signal};

/// Runs `$body` on the provider's object inside a handle.
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
