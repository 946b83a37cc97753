//! Requests that have to wait: the peer has no receive, or is not ready.
//!
//! A NIC retries by itself. Here a thread does, started when first needed. A queue pair whose request waits hands its
//! sending side over to that thread, and gets it back when nothing waits any more; meanwhile its posts queue up behind.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::qp::QpLocal;
use super::setup::{Inner, locked};
use super::waiting;

/// Queue pairs that wait.
#[derive(Debug, Default)]
pub(super) struct Stalled {
    list: Mutex<List>,
    changed: Condvar,
    /// Held while requests are tried; whoever holds it knows that none is.
    trying: Mutex<()>,
}

#[derive(Debug, Default)]
struct List {
    qps: Vec<Arc<QpLocal>>,
    running: Option<std::thread::JoinHandle<()>>,
    stop: bool,
    /// Somebody wants everything looked at again.
    kicked: bool,
}

impl Stalled {
    /// Puts a queue pair under this thread's care.
    pub(super) fn add(inner: &Arc<Inner>, qp: &Arc<QpLocal>) {
        let mut list = locked(&inner.progress.list);
        if list.stop {
            return;
        }
        if !list.qps.iter().any(|known| Arc::ptr_eq(known, qp)) {
            list.qps.push(qp.clone());
        }
        if list.running.is_none() {
            let inner = inner.clone();
            let spawned =
                std::thread::Builder::new().name("crosstie-progress".into()).spawn(move || run(&inner));
            match spawned {
                Ok(thread) => list.running = Some(thread),
                // Without the thread nothing would ever move: break the connection rather than hang.
                Err(_) => {
                    qp.break_off();
                }
            }
        }
        list.kicked = true;
        inner.progress.changed.notify_one();
    }

    /// Looks at everything at once, for example because a queue pair went to ERR.
    pub(super) fn kick(&self) {
        locked(&self.list).kicked = true;
        self.changed.notify_one();
    }

    /// Returns when no request is being tried that began before.
    pub(super) fn pause(&self) {
        drop(locked(&self.trying));
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        let running = {
            let mut list = locked(&self.list);
            list.stop = true;
            list.qps.clear();
            list.running.take()
        };
        self.changed.notify_one();
        if let Some(thread) = running {
            // A panicked thread has reported itself; closing goes on.
            thread.join().ok();
        }
    }
}

fn run(inner: &Arc<Inner>) {
    loop {
        let qps = {
            let mut list = locked(&inner.progress.list);
            if list.stop {
                return;
            }
            list.kicked = false;
            list.qps.clone()
        };
        let mut next: Option<Instant> = None;
        for qp in &qps {
            let due = {
                let trying = locked(&inner.progress.trying);
                let due = waiting::resume(qp);
                drop(trying);
                due
            };
            match due {
                Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                None => {
                    // Something may have stalled again since: its `add` found the queue pair still listed.
                    locked(&inner.progress.list)
                        .qps
                        .retain(|known| !Arc::ptr_eq(known, qp) || qp.is_stalled());
                }
            }
        }
        drop(qps);
        let list = locked(&inner.progress.list);
        if list.stop {
            return;
        }
        if list.kicked || (next.is_none() && !list.qps.is_empty()) {
            continue;
        }
        let left = next.map_or(std::time::Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        drop(inner.progress.changed.wait_timeout(list, left).unwrap_or_else(PoisonError::into_inner));
    }
}
