//! RPC between processes on one machine: what [`ipc`](crate::ipc) and [`delegation`](crate::delegation) have in common.
//!
//! ```text
//!   ipc::Client, delegation::Client = Caller<T: Transport>      ipc::Server, delegation::Server
//!     call, poll, wait, exchange        (caller)                  receive and reply: each kind of service on its own
//!     where requests and responses are  (transport)
//!     do both sides mean the same messages? (hello)  <------->    (hello)
//!     what can go wrong                 (error)                   (error)
//! ```
//!
//! Connections, names and liveness are in [`local`](crate::local); memory layouts are in the two services.

pub(crate) mod caller;
pub(crate) mod error;
pub(crate) mod hello;
pub(crate) mod transport;
