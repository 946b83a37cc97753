//! A network plugin for NCCL over [`crosstie::rails`].
//!
//! NCCL loads the shared library and finds the symbols `ncclNetPlugin_v10`, `_v11` and `_v12`: tables of C functions. The
//! functions of the three versions differ little; each version has one file in `abi`, which converts arguments and calls the
//! same Rust functions.
//!
//! ```text
//!   NCCL ── table of C functions ── abi/v10.rs  abi/v11.rs  abi/v12.rs     pointers in, result codes out
//!                                        │
//!              network.rs   devices as NCCL sees them: one to four rails each
//!              comm.rs      listen, connect, accept, close
//!              memory.rs    registered memory
//!              request.rs   isend, irecv, test, flush
//!                                        │
//!                                 crosstie::rails
//! ```
//!
//! # Promises
//!
//! - No pointer that NCCL gets from the plugin is an address. Comms, memory and requests are keys: index and
//!   generation. An old, forged or NULL key is `ncclInvalidArgument`, never an access to freed memory.
//! - Every pointer that NCCL passes is checked for NULL.
//! - A panic does not cross into NCCL: it is `ncclInternalError`, with a line in the log.
//! - `connect`, `accept`, `isend`, `irecv` and `test` never block.
//! - When `deregMr` has returned success, nothing accesses the memory any more.
//!
//! The guide page `docs/guide/nccl.md` of the repository explains how to install the plugin, choose rails and read the counters.

#![warn(missing_docs)]

pub mod abi;
mod comm;
mod key;
mod lock;
mod log;
mod memory;
mod network;
mod request;
mod settings;
mod table;
