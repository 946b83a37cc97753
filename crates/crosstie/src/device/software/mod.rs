//! The software device: RDMA semantics in shared memory, for peers on one machine.
//!
//! **The poster's thread does the work.** A WRITE is a look at the target's table of regions and a copy into its mapped
//! segment; a completion is a store into its completion queue. The target's processor takes no part. The exceptions:
//! memory registered in place is reached through `process_vm_writev` and, for atomics or where the kernel forbids that, by
//! the target's service thread; and a request that has to wait (no receive, peer not ready) is retried by a thread here.
//!
//! **Who may connect.** Every device answers on a Unix socket with a random name in the abstract namespace and hands its
//! segment, a sealed memfd, to processes of the same user only. Keys and access rights then guard against mistakes, not
//! against malice: whoever has mapped the segment can write anywhere in it. What it scribbles there can garble messages and
//! break connections, but every number read from a segment is checked before it is used as an index or an offset here.
//!
//! **What happens when a process dies** (also by SIGKILL, at any instruction). The kernel closes its sockets and signals
//! its pidfd. The survivors' service threads then move its connections to ERR, fill the place it may have reserved in a
//! completion queue without publishing it (`ring/reservation.rs`), and put a marker behind everything
//! it did complete; when the poller comes to the marker, it flushes the receives that are left, those of shared queues
//! that the dead had signed for included. Nothing is left in a file system.
//!
//! A peer that is *stopped* (SIGSTOP) between reserving and publishing holds up the completion queue it was writing to
//! until it goes on: it is alive, and may yet write.
//!
//! | file | what |
//! | --- | --- |
//! | `layout.rs` | what lies in a segment |
//! | `setup.rs`, `qp.rs` | opening, domains, regions, queue pairs |
//! | `datapath.rs`, `datagram.rs`, `reach.rs` | requests; the peer's memory |
//! | `recv.rs`, `cqring.rs`, `cq.rs` | receive queues, completion rings, completion queues |
//! | `progress.rs`, `waiting.rs` | requests that wait |
//! | `link.rs`, `control.rs`, `service.rs` | peers: connecting, dying |

mod control;
mod cq;
mod cqring;
mod datagram;
mod datapath;
#[cfg(test)]
mod hostile_tests;
mod layout;
mod link;
mod progress;
mod qp;
mod reach;
mod recv;
mod service;
mod setup;
mod waiting;

use std::sync::Arc;

pub use cq::Cq;
pub use qp::{Ah, Breaker, RcQp, UdQp};
pub use setup::{Config, Device, Mr, Pd};

use super::{PostError, RecvWr};

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    shared: Arc<recv::SharedQueue>,
    cursor: recv::PostCursor,
    #[expect(dead_code, reason = "keeps the device open")]
    handle: Arc<setup::Handle>,
}

impl Srq {
    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.shared.post(&mut self.cursor, wr)
    }
}
