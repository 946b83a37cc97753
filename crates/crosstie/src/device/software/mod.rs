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
//! `quiescence.rs`. A thread that needs the peer's service thread waits for the reply for five seconds, without a lock that other threads need.
//! Then it breaks the link off, and everything that used the link fails, see `link.rs`.
//!
//! # Layers
//!
//! A file knows files of its own line and of the lines above. Three groups of files know each other: `qp`, `cq_shared`, `state` and `removal`; `cq`
//! and `cq_lanes`; `datapath` and `progress`. The type of each field of `DeviceShared` (`state.rs`) is in a file that knows nothing of the device.
//!
//! | file | content |
//! | --- | --- |
//! | `layout`, `control` | layout of a segment; messages between devices |
//! | `error`, `lock`, `events`, `attempts`, `wakeup` | errors; locks; events; attempts of our own threads; waking the service thread |
//! | `device_memory`, `region_keys`, `regions`, `qp_table` | what a device owns: memory, regions, queue pairs by number |
//! | `recv_slots`, `shared_recv`, `recv`, `cq_ring` | receive queues and completion rings |
//! | `in_place`, `peer_lines`, `link` | copies between processes; who announces operations where; the link to a peer |
//! | `watch`, `peers`, `workers` | what the service thread waits for; the peers; which progress thread retries what |
//! | `quiescence` | who may still touch an object that goes away |
//! | `request`, `peer_memory`, `lane`, `peer_qp`, `deferred` | one request: its checks, the peer's memory, lane and queue pair; requests that have to wait |
//! | `qp`, `cq_shared`, `state`, `removal` | what queue pairs, completion queues and threads share; the device; what is freed later |
//! | `abandoned`, `lane_reader`, `service` | positions of dead producers; reading a lane; the service thread |
//! | `setup` | opening a device, protection domains, regions |
//! | `cq`, `cq_lanes`, `srq`, `qp_setup` | completion queues, as they are polled; shared receive queues; creating queue pairs |
//! | `rc`, `datapath`, `progress`, `at_hand`, `datagram` | queue pairs as the program uses them: states, executing requests, retrying them, the fast path; datagrams |

mod abandoned;
mod at_hand;
mod attempts;
mod control;
mod cq;
mod cq_lanes;
mod cq_ring;
mod cq_shared;
mod datagram;
#[cfg(all(test, not(loom)))]
mod datagram_tests;
mod datapath;
mod deferred;
mod device_memory;
#[cfg(test)]
#[path = "../../../tests/harness/ends.rs"]
mod ends;
mod error;
mod events;
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
mod lane_reader;
#[cfg(test)]
mod lane_tests;
mod layout;
mod link;
mod lock;
#[cfg(test)]
mod pauses;
mod peer_lines;
mod peer_memory;
mod peer_qp;
mod peers;
mod progress;
mod qp;
mod qp_setup;
mod qp_table;
mod quiescence;
mod rc;
mod recv;
mod recv_slots;
mod region_keys;
mod regions;
mod removal;
mod request;
mod service;
#[cfg(all(test, not(loom)))]
mod service_tests;
mod setup;
mod shared_recv;
mod srq;
mod state;
mod wakeup;
mod watch;
mod workers;

pub use cq::Cq;
pub(crate) use cq::CqParker;
pub use datagram::{Ah, UdQp};
pub use rc::{FailHandle, RcQp};
pub use setup::{Config, Device, Mr, Pd};
pub use srq::Srq;
