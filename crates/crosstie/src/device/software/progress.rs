//! The progress thread: retries requests whose peer had no receive or was not ready.
//!
//! A NIC retries by itself; here a thread does, started when it is first needed. A queue pair whose request is deferred hands
//! its sending half to this thread, and takes it back when no request is deferred any more. Until then its posts are
//! appended to the deferred ones.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::datapath::{execute, fail_request, opcode};
use super::deferred::{DeferredData, DeferredSends, NOT_READY_RETRY, retry_deadline};
use super::error::ExecuteError;
use super::qp::QpShared;
use super::state::{DeviceShared, locked};
use crate::device::{Data, Opcode, QpState, Status, rnr_delay};
use crate::process::OwnThread;
use crate::ring::presence;

/// How the rest of the device controls the progress thread.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<ProgressState>,
    changed: Condvar,
    /// Odd during an attempt, as a peer line's `busy`: see [`crate::ring::presence`]. The thread that holds `one_attempt` writes it.
    attempt: AtomicU64,
    one_attempt: Mutex<()>,
}

#[derive(Debug, Default)]
struct ProgressState {
    /// Queue pairs with deferred requests.
    qps: Vec<Arc<QpShared>>,
    thread: Option<OwnThread>,
    stop: bool,
    /// Someone wants all queue pairs to be tried again now.
    woken: bool,
}

/// An attempt to execute requests that name regions by their keys, see [`Progress::begin_attempt`].
pub(super) struct Attempt<'a> {
    attempt: &'a AtomicU64,
    _one_at_a_time: MutexGuard<'a, ()>,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        presence::leave(self.attempt);
    }
}

impl Progress {
    /// Has the thread retry the deferred requests of a queue pair.
    pub(super) fn add(device: &Arc<DeviceShared>, qp: &Arc<QpShared>) {
        let mut state = locked(&device.progress.state);
        if state.stop {
            return;
        }
        if !state.qps.iter().any(|known| Arc::ptr_eq(known, qp)) {
            state.qps.push(qp.clone());
        }
        if state.thread.is_none() {
            let device = device.clone();
            let spawned =
                std::thread::Builder::new().name("crosstie-progress".into()).spawn(move || run(&device));
            match spawned {
                Ok(thread) => state.thread = Some(thread.into()),
                Err(_) => {
                    // Without the thread the request would hang.
                    state.qps.retain(|known| !Arc::ptr_eq(known, qp));
                    // Failing the request needs the lock.
                    drop(state);
                    return fail_all(qp);
                }
            }
        }
        state.woken = true;
        device.progress.changed.notify_one();
    }

    /// Has the thread try all queue pairs now, for example because one went to ERR.
    pub(super) fn wake(&self) {
        locked(&self.state).woken = true;
        self.changed.notify_one();
    }

    /// The attempt that is running now. The caller took an object away and then passed a heavy fence.
    pub(super) fn current_attempt(&self) -> Option<u64> {
        presence::observe(&self.attempt)
    }

    /// Whether the attempt that [`current_attempt`](Progress::current_attempt) returned has ended.
    pub(super) fn has_ended(&self, attempt: u64) -> bool {
        presence::has_left(&self.attempt, attempt)
    }

    /// Begins an attempt. It lasts until the guard is dropped; the memory of a region that is deregistered meanwhile is kept
    /// until then.
    pub(super) fn begin_attempt(&self) -> Attempt<'_> {
        let one_at_a_time = locked(&self.one_attempt);
        presence::enter(&self.attempt);
        Attempt { attempt: &self.attempt, _one_at_a_time: one_at_a_time }
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        let thread = {
            let mut state = locked(&self.state);
            state.stop = true;
            state.qps.clear();
            state.thread.take()
        };
        self.changed.notify_one();
        if let Some(thread) = thread {
            thread.join();
        }
    }
}

/// Fails the deferred requests of a queue pair, and moves it to ERR. For when there is no progress thread.
#[cold]
fn fail_all(qp: &Arc<QpShared>) {
    {
        let mut deferred = locked(&qp.deferred);
        let DeferredSends { peer, queue } = &mut *deferred;
        if let Some(peer) = peer
            && let Some(request) = queue.pop_front()
        {
            fail_request(qp, peer, request.wr_id, request.position, Status::LocalQpOperation, false);
        }
    }
    // The queue pair is in ERR, so this flushes the other requests.
    retry(qp);
}

fn run(device: &Arc<DeviceShared>) {
    loop {
        let qps = {
            let mut state = locked(&device.progress.state);
            if state.stop {
                return;
            }
            state.woken = false;
            state.qps.clone()
        };
        let mut next: Option<Instant> = None;
        for qp in &qps {
            let due = {
                let _attempt = device.progress.begin_attempt();
                retry(qp)
            };
            match due {
                Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                None => {
                    // A request may have been deferred since: its `add` found the queue pair still in the list.
                    locked(&device.progress.state)
                        .qps
                        .retain(|known| !Arc::ptr_eq(known, qp) || qp.has_deferred_sends());
                }
            }
        }
        drop(qps);
        let state = locked(&device.progress.state);
        if state.stop {
            return;
        }
        if state.woken || (next.is_none() && !state.qps.is_empty()) {
            continue;
        }
        let left = next.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        drop(device.progress.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Tries the deferred requests of a queue pair. Returns when to try again, or `None` if none is left.
///
/// The caller is inside an attempt, unless the queue pair is in ERR: the memory of a region that is deregistered meanwhile is
/// kept until the attempt has ended.
fn retry(qp: &Arc<QpShared>) -> Option<Instant> {
    let mut deferred = locked(&qp.deferred);
    let DeferredSends { peer, queue } = &mut *deferred;
    loop {
        let peer = peer.as_deref_mut()?;
        let request = queue.front_mut()?;
        if qp.state() != QpState::ReadyToSend {
            // If the peer died, the oldest request was tried and got no acknowledgement; the others were never tried.
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
        let outcome = if request.is_registered(&qp.device.regions) {
            let data = match &request.data {
                DeferredData::Inline(bytes) => Data::Inline(bytes),
                DeferredData::Regions(sges) => Data::Regions(sges),
            };
            execute(peer, qp, &request.op, &data, request.len, request.streaming)
        } else {
            Err(ExecuteError::local(Status::LocalProtection))
        };
        let failed = match outcome {
            Ok(()) => {
                if request.signaled {
                    let opcode = opcode(&request.op);
                    qp.complete_send(request.wr_id, opcode, Status::Success, request.len, request.position);
                }
                queue.pop_front();
                // The next request only waited for this one: its time begins now.
                if let Some(next) = queue.front_mut() {
                    next.deadline = retry_deadline(&peer.connect);
                }
                continue;
            }
            Err(ExecuteError::ReceiverNotReady(timer)) => {
                if peer.connect.rnr_retry == 7 || request.rnr_retries_left > 0 {
                    request.rnr_retries_left = request.rnr_retries_left.saturating_sub(1);
                    request.due = now + rnr_delay(timer);
                    return Some(request.due);
                }
                (Status::RnrRetryExceeded, false)
            }
            Err(ExecuteError::LaneFull) => {
                // The peer has receives and polls late: this is no failure, however long it takes.
                request.due = now + NOT_READY_RETRY;
                request.deadline = retry_deadline(&peer.connect);
                return Some(request.due);
            }
            Err(ExecuteError::PeerNotReady) => {
                let late = request.deadline.is_some_and(|deadline| now >= deadline);
                if !late && !peer.link.is_dead() {
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
        fail_request(qp, peer, wr_id, position, status, notify_peer);
    }
}
