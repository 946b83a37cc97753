//! The progress threads: retry requests whose peer had no receive or was not ready.
//!
//! A NIC retries by itself; here a thread does, started when it is first needed. A queue pair whose request is deferred hands
//! its sending half to a thread, and takes it back when no request is deferred any more. Until then its posts are
//! appended to the deferred ones.
//!
//! **A stopped peer delays only requests to itself.** Most requests do not wait for a peer, and one thread executes all of them. A request that goes
//! through the peer's service thread ([`Link::may_wait`]) waits for the reply, at most [`REPLY_TIMEOUT`](super::control::REPLY_TIMEOUT) if the
//! peer is stopped. It is executed by a thread that does so for this peer alone, and that ends when nothing is left for it. While it waits it
//! has no lock, and uses a copy of the memory that the request names: reset and drop of the queue pair, and deregistration of its memory, do
//! not wait for it.

use std::io;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::attempts::AttemptWord;
use super::datapath::{execute, fail_request};
use super::deferred::{DeferredData, DeferredSends, DeferredWr, NOT_READY_RETRY, retry_deadline};
use super::error::ExecuteError;
use super::link::Link;
use super::lock::locked;
use super::peer_qp::PeerQp;
use super::qp::QpShared;
use super::request::opcode;
use super::state::DeviceShared;
use crate::device::{Access, Data, Opcode, QpState, Sge, Status, rnr_delay};
use crate::process::OwnThread;

/// Has a thread retry the deferred requests of a queue pair.
pub(super) fn add(qp: &Arc<QpShared>) {
    let device = &qp.device;
    let link = locked(&qp.deferred).link_to_wait_for();
    if device.workers.add(qp.num, link.as_ref(), || start_thread(device, link.clone())).is_err() {
        // Without the thread the request would hang.
        fail_all(qp);
    }
}

fn start_thread(device: &Arc<DeviceShared>, link: Option<Arc<Link>>) -> io::Result<OwnThread> {
    let device = device.clone();
    let name = "crosstie-progress".into();
    Ok(std::thread::Builder::new().name(name).spawn(move || run(&device, link.as_ref()))?.into())
}

/// Fails the deferred requests of a queue pair, and moves it to ERR. For when there is no progress thread.
#[cold]
fn fail_all(qp: &Arc<QpShared>) {
    {
        let mut deferred = locked(&qp.deferred);
        let DeferredSends { peer, queue, .. } = &mut *deferred;
        if let Some(peer) = peer
            && let Some(request) = queue.pop_front()
        {
            fail_request(qp, peer, request.wr_id, request.position, Status::LocalQpOperation, false);
        }
    }
    // The queue pair is in ERR, so this flushes the other requests.
    retry(qp, None, &mut qp.device.attempts.add());
}

/// Runs a progress thread: for requests that may have to wait for the peer of `link`, or for those that do not wait.
fn run(device: &Arc<DeviceShared>, link: Option<&Arc<Link>>) {
    let workers = &device.workers;
    let mut attempts = device.attempts.add();
    while let Some(qps) = workers.begin_round(link) {
        let mut next: Option<Instant> = None;
        for num in qps {
            // A queue pair that is gone has no requests any more.
            let qp = device.qps.get(num);
            match qp.as_ref().and_then(|qp| retry(qp, link, &mut attempts)) {
                Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                None => {
                    workers.remove(link, num);
                    // A request that was deferred since found the queue pair still in the list; or the next one is for another thread.
                    if let Some(qp) = qp
                        && qp.has_deferred_sends()
                    {
                        add(&qp);
                    }
                }
            }
        }
        workers.wait(link, next);
    }
}

/// Tries the deferred requests of a queue pair. Returns when to try again, or `None` if none is left for the thread of `link`.
fn retry(qp: &Arc<QpShared>, link: Option<&Arc<Link>>, attempts: &mut AttemptWord) -> Option<Instant> {
    let mut deferred = locked(&qp.deferred);
    loop {
        let must_wait_for = deferred.link_to_wait_for();
        let DeferredSends { peer, queue, .. } = &mut *deferred;
        let half = peer.as_deref_mut()?;
        let request = queue.front_mut()?;
        if qp.state() != QpState::ReadyToSend {
            // If the peer died, the oldest request was tried and got no acknowledgement; the others were never tried.
            let mut status = if half.link.is_dead() { Status::RetryExceeded } else { Status::Flushed };
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
        let outcome = match &must_wait_for {
            None => {
                // The memory of a region that is deregistered meanwhile is kept until the attempt has ended.
                let _attempt = attempts.begin();
                match request.is_registered(&qp.device.regions) {
                    true => execute(half, qp, &request.op, &request.data(), request.len, request.streaming),
                    false => Err(ExecuteError::local(Status::LocalProtection)),
                }
            }
            Some(_) if must_wait_for.as_ref().map(Arc::as_ptr) != link.map(Arc::as_ptr) => return None,
            Some(_) => {
                let outcome;
                (deferred, outcome) = execute_waiting(qp, deferred, attempts)?;
                outcome
            }
        };
        let DeferredSends { peer, queue, .. } = &mut *deferred;
        let (half, request) = (peer.as_deref_mut()?, queue.front_mut()?);
        let now = Instant::now();
        let failed = match outcome {
            Ok(()) => {
                if request.signaled {
                    let opcode = opcode(&request.op);
                    qp.complete_send(request.wr_id, opcode, Status::Success, request.len, request.position);
                }
                queue.pop_front();
                // The next request only waited for this one: its time begins now.
                if let Some(next) = queue.front_mut() {
                    next.deadline = retry_deadline(&half.connect);
                }
                continue;
            }
            Err(ExecuteError::ReceiverNotReady(timer)) => {
                if half.connect.rnr_retry == 7 || request.rnr_retries_left > 0 {
                    request.rnr_retries_left = request.rnr_retries_left.saturating_sub(1);
                    request.due = now + rnr_delay(timer);
                    return Some(request.due);
                }
                (Status::RnrRetryExceeded, false)
            }
            Err(ExecuteError::LaneFull) => {
                // The peer has receives and polls late: this is no failure, however long it takes.
                request.due = now + NOT_READY_RETRY;
                request.deadline = retry_deadline(&half.connect);
                return Some(request.due);
            }
            Err(ExecuteError::PeerNotReady) => {
                let late = request.deadline.is_some_and(|deadline| now >= deadline);
                if !late && !half.link.is_dead() {
                    request.due = now + NOT_READY_RETRY;
                    return Some(request.due);
                }
                (Status::RetryExceeded, false)
            }
            Err(ExecuteError::Failed { status, notify_peer }) => (status, notify_peer),
        };
        let (status, notify_peer) = failed;
        let (wr_id, position) = (request.wr_id, request.position);
        queue.pop_front();
        fail_request(qp, half, wr_id, position, status, notify_peer);
    }
}

/// Executes the oldest request of a queue pair, which may wait for the peer, without the lock: with memory of its own.
/// Returns `None` if the queue pair was reset or dropped meanwhile; then nothing of the program's may be touched any more.
fn execute_waiting<'a>(
    qp: &'a Arc<QpShared>,
    mut deferred: MutexGuard<'a, DeferredSends>,
    attempts: &mut AttemptWord,
) -> Option<(MutexGuard<'a, DeferredSends>, Result<(), ExecuteError>)> {
    let (mut half, mut request): (Box<PeerQp>, DeferredWr) =
        (deferred.peer.take()?, deferred.queue.pop_front()?);
    deferred.is_executing = true;
    let connection = deferred.connection;
    let detached = {
        let _attempt = attempts.begin();
        request.detach_memory(qp.pd, &qp.device.regions)
    };
    drop(deferred);
    let outcome = detached.and_then(|mut result| {
        let at = result.as_mut_ptr().expose_provenance() as u64;
        let sge = [Sge::detached(at, result.len() as u32, 0, qp.pd, Access::LOCAL_WRITE)];
        let data = match &request.data {
            DeferredData::Inline(bytes) => Data::Inline(bytes),
            DeferredData::Regions(_) => Data::Regions(&sge),
        };
        execute(&mut half, qp, &request.op, &data, request.len, request.streaming)?;
        Ok(result)
    });
    let mut deferred = locked(&qp.deferred);
    if deferred.connection != connection {
        return None;
    }
    let outcome = outcome.and_then(|result| {
        let _attempt = attempts.begin();
        request.store_result(&qp.device.regions, &result)
    });
    deferred.is_executing = false;
    deferred.peer = Some(half);
    deferred.queue.push_front(request);
    Some((deferred, outcome))
}
