//! A network plugin for NCCL over [`crosstie::rails`].
//!
//! NCCL loads the shared library and finds the symbols `ncclNetPlugin_v10`, `_v11` and `_v12`: tables of C functions. The
//! versions differ little: each has one file in `abi` with what it has of its own.
//!
//! ```text
//!   NCCL ── table of C functions ── abi/       pointers in, result codes out
//!                                    │
//!    setup.rs          listen, connect, accept, close
//!    registration.rs   regMr, deregMr
//!    request.rs        isend, irecv, test, flush
//!                                    │
//!    comm.rs           connections, with their requests that are not done
//!    memory.rs         registered memory
//!    network.rs        devices as NCCL sees them: one to four rails each
//!                                    │
//!    table.rs          objects that NCCL has keys of             key.rs
//!    fault.rs          why a call failed                         header.rs   log.rs   settings.rs
//!                                    │
//!                             crosstie::rails
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
mod fault;
mod header;
mod key;
mod log;
mod memory;
mod network;
mod registration;
mod request;
mod settings;
mod setup;
mod table;
