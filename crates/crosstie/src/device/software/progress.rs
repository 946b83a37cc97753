//! The progress threads: retry requests whose peer had no receive or was not ready.
//!
//! A NIC retries by itself; here a thread does, started when it is first needed. A queue pair whose request is deferred hands
//! its sending half to a thread, and takes it back when no request is deferred any more. Until then its posts are
//! appended to the deferred ones.
//!
//! **A stopped peer delays only requests to itself.** Most requests wait for nobody, and one thread executes all of them. A request that goes
//! through the peer's service thread ([`Link::may_wait`]) waits for the reply, at most [`REPLY_TIMEOUT`](super::control::REPLY_TIMEOUT) if the
//! peer is stopped. It is executed by a thread that does so for this peer alone, and that ends when nothing is left for it. While it waits it
//! has no lock, and uses a copy of the memory that the request names: reset and drop of the queue pair, and deregistration of its memory, do
//! not wait for it.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::datapath::{execute, fail_request, opcode};
use super::deferred::{DeferredData, DeferredSends, DeferredWr, NOT_READY_RETRY, retry_deadline};
use super::error::ExecuteError;
use super::link::Link;
use super::peer_qp::PeerQp;
use super::qp::QpShared;
use super::state::{DeviceShared, locked};
use crate::device::{Access, Data, Opcode, QpState, Sge, Status, rnr_delay};
use crate::process::OwnThread;
use crate::ring::presence;

/// How the rest of the device controls the progress threads.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<ProgressState>,
    changed: Condvar,
    attempts: Attempts,
}

#[derive(Debug, Default)]
struct ProgressState {
    workers: Vec<Worker>,
    /// Threads that have nothing to do any more and end.
    ending: Vec<OwnThread>,
    stop: bool,
}

/// A progress thread.
#[derive(Debug)]
struct Worker {
    /// The link whose requests it executes; `None`: requests that wait for nobody.
    link: Option<Arc<Link>>,
    /// Queue pairs with deferred requests. A queue pair is in one of these lists at most.
    qps: Vec<Arc<QpShared>>,
    /// Someone wants all queue pairs to be tried again now.
    woken: bool,
    thread: OwnThread,
}

impl Worker {
    fn is_for(&self, link: Option<&Arc<Link>>) -> bool {
        self.link.as_ref().map(Arc::as_ptr) == link.map(Arc::as_ptr)
    }
}

/// The words of all threads that execute requests which name regions by their keys: those of this device that do it outside of a program's
/// call, and those of [`RcQp::post_detached`](super::RcQp::post_detached).
#[derive(Clone, Debug, Default)]
struct Attempts(Arc<Mutex<Vec<Arc<AtomicU64>>>>);

/// The word of one thread, or of one queue pair. Odd during an attempt, as a peer line's `busy`: see [`crate::ring::presence`].
#[derive(Debug)]
pub(super) struct AttemptWord {
    word: Arc<AtomicU64>,
    all: Attempts,
}

impl AttemptWord {
    /// Begins an attempt. It lasts until the guard is dropped; the memory of a region that is deregistered meanwhile is kept until then. The
    /// owner of the word has one attempt at a time.
    pub(super) fn begin(&mut self) -> Attempt {
        presence::enter(&*self.word);
        Attempt(self.word.clone())
    }
}

impl Drop for AttemptWord {
    fn drop(&mut self) {
        locked(&self.all.0).retain(|word| !Arc::ptr_eq(word, &self.word));
    }
}

/// An attempt to execute a request, see [`AttemptWord::begin`].
pub(super) struct Attempt(Arc<AtomicU64>);

impl Drop for Attempt {
    fn drop(&mut self) {
        presence::leave(&*self.0);
    }
}

/// An attempt that was under way.
#[derive(Debug)]
pub(super) struct ObservedAttempt {
    word: Arc<AtomicU64>,
    seen: u64,
}

impl ObservedAttempt {
    pub(super) fn has_ended(&self) -> bool {
        presence::has_left(&*self.word, self.seen)
    }
}

impl Progress {
    /// Has a thread retry the deferred requests of a queue pair.
    pub(super) fn add(device: &Arc<DeviceShared>, qp: &Arc<QpShared>) {
        let link = locked(&qp.deferred).link_to_wait_for();
        let mut state = locked(&device.progress.state);
        if state.stop {
            return;
        }
        let knows = |worker: &Worker| worker.qps.iter().any(|known| Arc::ptr_eq(known, qp));
        let index = state.workers.iter().position(knows);
        let index = index.or_else(|| state.workers.iter().position(|worker| worker.is_for(link.as_ref())));
        let index = match index {
            Some(index) => index,
            None => match start_worker(device, link) {
                Ok(worker) => {
                    state.workers.push(worker);
                    state.workers.len() - 1
                }
                Err(_) => {
                    // Without the thread the request would hang. Failing it needs the lock.
                    drop(state);
                    return fail_all(device, qp);
                }
            },
        };
        let worker = &mut state.workers[index];
        if !knows(worker) {
            worker.qps.push(qp.clone());
        }
        worker.woken = true;
        device.progress.changed.notify_all();
    }

    /// Has the threads try all queue pairs now, for example because one went to ERR.
    pub(super) fn wake(&self) {
        locked(&self.state).workers.iter_mut().for_each(|worker| worker.woken = true);
        self.changed.notify_all();
    }

    /// Adds the word of a thread or a queue pair that executes requests which name regions by their keys.
    pub(super) fn add_attempts(&self) -> AttemptWord {
        let word = Arc::new(AtomicU64::new(0));
        locked(&self.attempts.0).push(word.clone());
        AttemptWord { word, all: self.attempts.clone() }
    }

    /// Takes a queue pair that drops its deferred requests from the lists. A thread that waits for its peer finds that out later.
    pub(super) fn forget(&self, qp: &QpShared) {
        for worker in &mut locked(&self.state).workers {
            worker.qps.retain(|known| !std::ptr::eq(&**known, qp));
        }
    }

    /// The attempts that are under way now. The caller took an object away and then passed a heavy fence.
    pub(super) fn current_attempts(&self) -> Vec<ObservedAttempt> {
        let words = locked(&self.attempts.0);
        let observe = |word: &Arc<AtomicU64>| {
            presence::observe(&**word).map(|seen| ObservedAttempt { word: word.clone(), seen })
        };
        words.iter().filter_map(observe).collect()
    }

    /// Ends the threads.
    pub(super) fn stop(&self) {
        let threads = {
            let mut state = locked(&self.state);
            state.stop = true;
            let workers = std::mem::take(&mut state.workers);
            workers.iter().filter_map(|worker| worker.link.as_ref()).for_each(|link| link.interrupt());
            let ending = std::mem::take(&mut state.ending);
            ending.into_iter().chain(workers.into_iter().map(|worker| worker.thread)).collect::<Vec<_>>()
        };
        self.changed.notify_all();
        for thread in threads {
            thread.join();
        }
    }
}

fn start_worker(device: &Arc<DeviceShared>, link: Option<Arc<Link>>) -> std::io::Result<Worker> {
    let thread = {
        let (device, link) = (device.clone(), link.clone());
        let name = "crosstie-progress".into();
        std::thread::Builder::new().name(name).spawn(move || run(&device, link.as_ref()))?
    };
    Ok(Worker { link, qps: Vec::new(), woken: false, thread: thread.into() })
}

/// Fails the deferred requests of a queue pair, and moves it to ERR. For when there is no progress thread.
#[cold]
fn fail_all(device: &DeviceShared, qp: &Arc<QpShared>) {
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
    retry(qp, None, &mut device.progress.add_attempts());
}

/// Runs a progress thread: for requests that may have to wait for the peer of `link`, or for those that wait for nobody.
fn run(device: &Arc<DeviceShared>, link: Option<&Arc<Link>>) {
    let progress = &device.progress;
    let mut attempts = progress.add_attempts();
    loop {
        let qps = {
            let mut state = locked(&progress.state);
            let Some(index) = state.workers.iter().position(|worker| worker.is_for(link)) else { return };
            let worker = &mut state.workers[index];
            if worker.qps.is_empty() && link.is_some() {
                let worker = state.workers.swap_remove(index);
                // Those before this one have ended, or are about to.
                let ended = std::mem::replace(&mut state.ending, vec![worker.thread]);
                drop(state);
                for thread in ended {
                    thread.join();
                }
                return;
            }
            worker.woken = false;
            worker.qps.clone()
        };
        let mut next: Option<Instant> = None;
        for qp in qps {
            match retry(&qp, link, &mut attempts) {
                Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                None => {
                    let mut state = locked(&progress.state);
                    if let Some(worker) = state.workers.iter_mut().find(|worker| worker.is_for(link)) {
                        worker.qps.retain(|known| !Arc::ptr_eq(known, &qp));
                    }
                    drop(state);
                    // A request that was deferred since found the queue pair still in the list; or the next one is for another thread.
                    if qp.has_deferred_sends() {
                        Progress::add(device, &qp);
                    }
                }
            }
        }
        let state = locked(&progress.state);
        let Some(worker) = state.workers.iter().find(|worker| worker.is_for(link)) else { return };
        if worker.woken || (next.is_none() && (!worker.qps.is_empty() || link.is_some())) {
            continue;
        }
        let left = next.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        drop(progress.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner));
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
        request.detach_memory(qp)
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
        request.store_result(qp, &result)
    });
    deferred.is_executing = false;
    deferred.peer = Some(half);
    deferred.queue.push_front(request);
    Some((deferred, outcome))
}
