//! The software device: RDMA semantics in shared memory, for peers on one machine.
//!
//! **The poster's thread executes the operation.** A WRITE is a lookup in the peer's table of regions and a copy into its
//! mapped segment; a completion is a store of one cache line into the peer's completion lane. The peer's CPU takes no part. There are two
//! exceptions. Memory registered in place is reached with `process_vm_writev`, or through a mapping (`in_place/`); atomics on it, and all
//! access where the kernel forbids that call, go through the peer's service thread. And a request that cannot be executed yet (no receive,
//! peer not ready) is retried by a progress thread here.
//!
//! ```text
//!  process A                                         process B
//!  RcQp::post --- copy ----------------------------> memory of a region      segment of B,
//!       |-------- take a receive ------------------> receive queue           mapped by both
//!       '-------- store a completion --------------> completion lane   <---- Cq::poll
//!  service thread <--- Unix socket: segments, ------> service thread
//!                      errors, proxied copies
//! ```
//!
//! **Who may connect.** Every device listens on a Unix socket with a random name in the abstract namespace. It hands its
//! segment, a sealed memfd, only to processes of the same user. From then on keys and access rights protect against
//! mistakes, not against malice: a process that has mapped the segment can write anywhere in it. It can corrupt messages
//! and break connections that way. It cannot cause an access outside the segment and the registered regions: every number
//! read from a segment is checked before it is used as an index or an offset, and what the owner's process does with its own
//! memory (proxied operations, deferred requests, operations between its own devices) it decides from a private table of
//! regions. The table in the segment is a copy for peers in other processes.
//!
//! **What happens when a process dies** (also by SIGKILL, at any instruction). The kernel closes its sockets and signals its
//! pidfd. The service threads of the surviving devices then move its connections to ERR, void the position that it may have
//! reserved in a completion queue as a datagram sender without publishing it (`ring/reservation.rs`), and post a notice (`ring/notices.rs`).
//! When the poller reaches the place of the notice, it takes what the dead process did complete, and flushes the remaining receives,
//! including those of shared receive queues that the dead process had taken. Nothing is left in a file system.
//!
//! **A stopped peer** (SIGSTOP, a frozen container, a debugger). Nothing waits for it without a limit, except the drop of memory registered in place, see
//! `quiescence.rs`. Who needs its service thread waits five seconds for the reply, alone: no lock that others need is held. Then the link to it is
//! broken off, and what used the link fails, see `link.rs`.
//!
//! | file | content |
//! | --- | --- |
//! | `layout.rs` | layout of a segment |
//! | `state.rs`, `setup.rs` | the device's tables; opening it, protection domains, regions |
//! | `qp.rs`, `rc.rs`, `datagram.rs`, `srq.rs` | queue pairs and shared receive queues |
//! | `datapath.rs`, `at_hand.rs`, `peer_qp.rs`, `peer_memory.rs`, `error.rs` | executing requests on the peer's queue pair and memory |
//! | `recv.rs`, `shared_recv.rs` | receive queues: of one queue pair, and shared ones |
//! | `lane.rs`, `cq_ring.rs` | completion lanes and completion rings |
//! | `cq.rs`, `cq_lanes.rs` | completion queues: polling them, and their lanes |
//! | `in_place/` | copies between processes; with the cargo feature `fast-in-place-copies` also mapped memory, and threads that help with long copies |
//! | `deferred.rs`, `progress.rs` | requests that have to wait, and the threads that retry them |
//! | `control.rs`, `link.rs`, `service.rs` | messages between devices, links to peers, the service thread |
//! | `quiescence.rs`, `peer_lines.rs`, `removal.rs` | who may still touch an object that goes away, and what is freed later |

mod at_hand;
mod control;
mod cq;
mod cq_lanes;
mod cq_ring;
mod datagram;
#[cfg(all(test, not(loom)))]
mod datagram_tests;
mod datapath;
mod deferred;
mod error;
#[cfg(all(test, not(loom)))]
mod forged;
#[cfg(test)]
mod forged_data_tests;
#[cfg(all(test, not(loom)))]
mod fuzz_tests;
mod in_place;
#[cfg(test)]
mod invalid_input_tests;
mod lane;
#[cfg(test)]
mod lane_tests;
mod layout;
mod link;
#[cfg(test)]
mod pauses;
mod peer_lines;
mod peer_memory;
mod peer_qp;
mod progress;
mod qp;
mod quiescence;
mod rc;
mod recv;
mod region_keys;
mod removal;
mod service;
#[cfg(all(test, not(loom)))]
mod service_tests;
mod setup;
mod shared_recv;
mod srq;
mod state;

pub use cq::Cq;
pub(crate) use cq::CqParker;
pub use datagram::{Ah, UdQp};
pub use rc::{FailHandle, RcQp};
pub use setup::{Config, Device, Mr, Pd};
pub use srq::Srq;
