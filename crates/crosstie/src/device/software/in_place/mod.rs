//! Copies between this process and memory that a peer in another process registered in place.
//!
//! The kernel makes them: `process_vm.rs` has the system calls. With the cargo feature `fast-in-place-copies`, `fast/` makes writes faster: memory
//! that is written often is mapped into this process, and helper threads share long copies. Without the feature, `plain.rs` stands in its place and
//! does neither; no code of `fast/` is compiled.

#[cfg(feature = "fast-in-place-copies")]
mod fast;
#[cfg(not(feature = "fast-in-place-copies"))]
mod plain;
mod process_vm;

#[cfg(feature = "fast-in-place-copies")]
pub(super) use fast::{MappedPtr, PeerMappings, copy};
#[cfg(not(feature = "fast-in-place-copies"))]
pub(super) use plain::{MappedPtr, PeerMappings, copy};
pub(super) use process_vm::{is_access_refused, is_refusal};
