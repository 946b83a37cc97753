//! Requests that wait for their peer, and trying them again.

use core::sync::atomic::Ordering::Acquire;
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use super::datapath::{Trouble, execute, give_up, local, opcode};
use super::layout::RegionKey;
use super::qp::{QpLocal, Waiting};
use super::setup::locked;
use crate::device::{ConnectConfig, Data, Opcode, QpState, SendOp, SendWr, Sge, Status, rnr_delay};

/// Pause between looks at a peer that is not ready.
pub(super) const NOT_READY_PAUSE: Duration = Duration::from_micros(200);

/// A request that waits, with its own copy of everything.
#[derive(Debug)]
pub(super) struct WaitingWr {
    wr_id: u64,
    op: SendOp,
    data: WaitingData,
    len: u32,
    signaled: bool,
    position: u64,
    /// When to try again.
    due: Instant,
    /// When to give up on a peer that is not ready.
    deadline: Option<Instant>,
    rnr_left: u8,
}

#[derive(Debug)]
enum WaitingData {
    Inline(Box<[u8]>),
    Regions(Box<[Sge<'static>]>),
}

impl WaitingWr {
    pub(super) fn new(
        wr: &SendWr<'_>,
        len: u32,
        position: u64,
        due: Instant,
        connect: &ConnectConfig,
    ) -> WaitingWr {
        let data = match wr.data {
            Data::Inline(bytes) => WaitingData::Inline(bytes.into()),
            // The borrow ends here; before these are used again their keys are looked up, as a NIC does.
            Data::Regions(sges) => WaitingData::Regions(
                sges.iter().map(|sge| Sge { region: core::marker::PhantomData, ..*sge }).collect(),
            ),
        };
        WaitingWr {
            wr_id: wr.wr_id,
            op: wr.op,
            data,
            len,
            signaled: wr.signaled,
            position,
            due,
            deadline: deadline(connect),
            rnr_left: connect.rnr_retry,
        }
    }
}

/// When a request that begins now has gone unanswered for all its tries.
fn deadline(connect: &ConnectConfig) -> Option<Instant> {
    let tries = u32::from(connect.retry_count) + 1;
    let timeout = Duration::from_nanos(4096u64 << connect.timeout.min(31)) * tries;
    (connect.timeout != 0).then(|| Instant::now() + timeout)
}

/// Tries what waits on a queue pair. Says when to try again, or that nothing waits any more.
///
/// Called by the progress thread alone, which holds off the deregistration of regions meanwhile.
pub(super) fn resume(qp: &Arc<QpLocal>) -> Option<Instant> {
    let mut waiting = locked(&qp.waiting);
    let Waiting { peer, queue } = &mut *waiting;
    loop {
        let peer = peer.as_deref_mut()?;
        let request = queue.front_mut()?;
        if qp.state() != QpState::ReadyToSend {
            // The request that was being tried when the peer died got no answer; the rest was never tried.
            let mut status = if peer.link.is_dead() { Status::RetryExceeded } else { Status::Flushed };
            for request in queue.drain(..) {
                qp.complete_send(request.wr_id, Opcode::Unspecified, status, 0, request.position);
                status = Status::Flushed;
            }
            return None;
        }
        let now = Instant::now();
        if request.due > now {
            return Some(request.due);
        }
        let outcome = if still_registered(qp, &request.data) {
            let data = match &request.data {
                WaitingData::Inline(bytes) => Data::Inline(bytes),
                WaitingData::Regions(sges) => Data::Regions(sges),
            };
            execute(peer, qp, &request.op, &data, request.len)
        } else {
            Err(local(Status::LocalProtection))
        };
        let failed = match outcome {
            Ok(()) => {
                if request.signaled {
                    let opcode = opcode(&request.op);
                    qp.complete_send(request.wr_id, opcode, Status::Success, request.len, request.position);
                }
                queue.pop_front();
                // The next one waited for this one only: its time begins now.
                if let Some(next) = queue.front_mut() {
                    next.deadline = deadline(&peer.connect);
                }
                continue;
            }
            Err(Trouble::NoReceive(timer)) => {
                if peer.connect.rnr_retry == 7 || request.rnr_left > 0 {
                    request.rnr_left = request.rnr_left.saturating_sub(1);
                    request.due = now + rnr_delay(timer);
                    return Some(request.due);
                }
                (Status::RnrRetryExceeded, false)
            }
            Err(Trouble::NotReady) => {
                let late = request.deadline.is_some_and(|deadline| now >= deadline);
                if !late && !peer.link.is_dead() {
                    request.due = now + NOT_READY_PAUSE;
                    return Some(request.due);
                }
                (Status::RetryExceeded, false)
            }
            Err(Trouble::Failed { status, tell_peer }) => (status, tell_peer),
        };
        let (status, tell_peer) = failed;
        let (wr_id, position) = (request.wr_id, request.position);
        queue.pop_front();
        give_up(qp, peer, wr_id, position, status, tell_peer);
    }
}

fn still_registered(qp: &QpLocal, data: &WaitingData) -> bool {
    let WaitingData::Regions(sges) = data else { return true };
    sges.iter().all(|sge| {
        let entry = &qp.inner.regions[RegionKey::from_bits(sge.lkey).index() as usize];
        // Acquire, partner: the Release store in `Pd::enter`.
        entry.key.load(Acquire) == sge.lkey
    })
}
