//! Which progress thread retries which queue pairs. `progress.rs` has what the threads do.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::link::Link;
use super::lock::locked;
use crate::process::OwnThread;

/// The progress threads of a device.
#[derive(Debug, Default)]
pub(super) struct Workers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    workers: Vec<Worker>,
    /// Threads that have nothing to do any more and end.
    ending: Vec<OwnThread>,
    stop: bool,
}

/// A progress thread.
#[derive(Debug)]
struct Worker {
    /// The link whose requests it executes; `None`: requests that do not wait for a peer.
    link: Option<Arc<Link>>,
    /// The numbers of queue pairs with deferred requests. A queue pair is in one of these lists at most.
    qps: Vec<u32>,
    /// Someone wants all queue pairs to be tried again now.
    woken: bool,
    thread: OwnThread,
}

impl Worker {
    fn is_for(&self, link: Option<&Arc<Link>>) -> bool {
        self.link.as_ref().map(Arc::as_ptr) == link.map(Arc::as_ptr)
    }
}

impl Workers {
    /// Has the thread for this link retry a queue pair; starts it with `start` if there is none. A queue pair that is in the list of another
    /// thread stays there.
    pub(super) fn add(
        &self,
        qp: u32,
        link: Option<&Arc<Link>>,
        start: impl FnOnce() -> io::Result<OwnThread>,
    ) -> io::Result<()> {
        let mut state = locked(&self.state);
        if state.stop {
            return Ok(());
        }
        let workers = &mut state.workers;
        let index = workers.iter().position(|worker| worker.qps.contains(&qp));
        let index = index.or_else(|| workers.iter().position(|worker| worker.is_for(link)));
        let index = match index {
            Some(index) => index,
            None => {
                workers.push(Worker { link: link.cloned(), qps: Vec::new(), woken: false, thread: start()? });
                workers.len() - 1
            }
        };
        let worker = &mut workers[index];
        if !worker.qps.contains(&qp) {
            worker.qps.push(qp);
        }
        worker.woken = true;
        self.changed.notify_all();
        Ok(())
    }

    /// Has the threads try all queue pairs now, for example because one went to ERR.
    pub(super) fn wake(&self) {
        locked(&self.state).workers.iter_mut().for_each(|worker| worker.woken = true);
        self.changed.notify_all();
    }

    /// Takes a queue pair that drops its deferred requests from the lists. A thread that waits for its peer finds that out later.
    pub(super) fn forget(&self, qp: u32) {
        for worker in &mut locked(&self.state).workers {
            worker.qps.retain(|known| *known != qp);
        }
    }

    /// For the thread of `link`: the queue pairs to try now. `None` if the thread is to end.
    pub(super) fn begin_round(&self, link: Option<&Arc<Link>>) -> Option<Vec<u32>> {
        let mut state = locked(&self.state);
        let index = state.workers.iter().position(|worker| worker.is_for(link))?;
        let worker = &mut state.workers[index];
        if worker.qps.is_empty() && link.is_some() {
            let worker = state.workers.swap_remove(index);
            // Those before this one have ended, or are about to.
            let ended = std::mem::replace(&mut state.ending, vec![worker.thread]);
            drop(state);
            for thread in ended {
                thread.join();
            }
            return None;
        }
        worker.woken = false;
        Some(worker.qps.clone())
    }

    /// For the thread of `link`: it has nothing to do for this queue pair any more.
    pub(super) fn remove(&self, link: Option<&Arc<Link>>, qp: u32) {
        if let Some(worker) = locked(&self.state).workers.iter_mut().find(|worker| worker.is_for(link)) {
            worker.qps.retain(|known| *known != qp);
        }
    }

    /// For the thread of `link`: waits for the next round, which begins at `next` at the latest.
    pub(super) fn wait(&self, link: Option<&Arc<Link>>, next: Option<Instant>) {
        let state = locked(&self.state);
        let Some(worker) = state.workers.iter().find(|worker| worker.is_for(link)) else { return };
        if worker.woken || (next.is_none() && (!worker.qps.is_empty() || link.is_some())) {
            return;
        }
        let left = next.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        drop(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner));
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
