//! What the threads of a node share: the stop flag, the states of the peers, and the counters.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crosstie::WakeFlag;

use super::commands::ConnectionEvent;
use super::config::NodeConfig;
use super::counters::PublishedCounters;
use super::error::NodeEnded;

/// What is known about another node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerState {
    /// Its rank.
    pub rank: u32,
    /// Whether requests are sent to it.
    pub is_up: bool,
    /// When that node was started, in nanoseconds of its clock: it identifies this start. Known while the node is up.
    pub incarnation: Option<u64>,
    /// How often the node has come up.
    pub times_up: u64,
    /// Why the node is not up.
    pub problem: Option<String>,
}

/// What the threads of a node share.
pub(super) struct Shared {
    pub(super) incarnation: u64,
    stop: AtomicBool,
    /// Why the node has ended by itself: the first cause.
    pub(super) ended: OnceLock<NodeEnded>,
    /// By daemon.
    pub(super) counters: PublishedCounters,
    /// Wake a daemon that sleeps: there is a command for it, or the node stops. By daemon.
    pub(super) wake_flags: Box<[WakeFlag]>,
    peers: Mutex<Vec<PeerState>>,
    pub(super) peers_changed: Condvar,
    refused_connections: AtomicU64,
    /// To the control plane. A few for each connection: daemons respond to commands.
    events: Sender<ConnectionEvent>,
    /// Wakes the control plane, where there is one.
    wake: Option<UnixStream>,
}

impl Shared {
    /// Creates the shared state of a node, and the receiver of its daemons' events. A byte written to `wake` wakes the control
    /// plane.
    pub(super) fn new(
        config: &NodeConfig,
        wake: Option<UnixStream>,
    ) -> std::io::Result<(Shared, Receiver<ConnectionEvent>)> {
        let (events, receiver) = channel();
        let peer = |rank| PeerState { rank, is_up: false, incarnation: None, times_up: 0, problem: None };
        let shared = Shared {
            incarnation: new_incarnation(),
            stop: AtomicBool::new(false),
            ended: OnceLock::new(),
            counters: (0..config.daemons).map(|_| Mutex::default()).collect(),
            wake_flags: (0..config.daemons).map(|_| WakeFlag::new()).collect::<Result<_, _>>()?,
            peers: Mutex::new((0..config.nodes).map(peer).collect()),
            peers_changed: Condvar::new(),
            refused_connections: AtomicU64::new(0),
            events,
            wake,
        };
        Ok((shared, receiver))
    }

    pub(super) fn is_stopping(&self) -> bool {
        // Relaxed: the flag publishes no other data.
        self.stop.load(Relaxed)
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.wake_flags.iter().for_each(WakeFlag::set);
        self.wake_control();
    }

    /// Sends an event to the control plane.
    pub(super) fn send_event(&self, event: ConnectionEvent) {
        // There is no receiver in a one-node cluster and while the node stops.
        if self.events.send(event).is_ok() {
            self.wake_control();
        }
    }

    fn wake_control(&self) {
        if let Some(mut wake) = self.wake.as_ref() {
            // A failed write to a full socket is fine: the control plane has bytes to read and wakes anyway.
            wake.write_all(&[1]).ok();
        }
    }

    pub(super) fn peers(&self) -> MutexGuard<'_, Vec<PeerState>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_peer_up(&self, rank: usize, incarnation: Option<u64>) {
        let mut peers = self.peers();
        let peer = &mut peers[rank];
        (peer.is_up, peer.incarnation, peer.problem) = (true, incarnation, None);
        peer.times_up += 1;
        self.peers_changed.notify_all();
    }

    pub(super) fn set_peer_down(&self, rank: usize, why: String) {
        let mut peers = self.peers();
        let peer = &mut peers[rank];
        (peer.is_up, peer.incarnation, peer.problem) = (false, None, Some(why));
        self.peers_changed.notify_all();
    }

    pub(super) fn count_refused_connection(&self) {
        self.refused_connections.fetch_add(1, Relaxed);
    }

    pub(super) fn refused_connections(&self) -> u64 {
        self.refused_connections.load(Relaxed)
    }
}

/// Stops the node when the thread that holds it panics.
pub(super) struct StopOnPanic(pub(super) Arc<Shared>);

impl Drop for StopOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The first panic is the cause; others may follow from it.
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            self.0.ended.get_or_init(|| NodeEnded::Panicked { thread });
            self.0.stop();
        }
    }
}

/// The time of this start, in nanoseconds. Of two nodes with the same rank the one with the larger number stays.
fn new_incarnation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64
}
