//! What all nodes of a network know about one node: how to wake it, and whether it has left.

use std::sync::atomic::Ordering::Acquire;

use super::sync::AtomicU32;
use crate::wait::Parker;

/// The shared state of one node. All nodes read it, and rarely write it.
#[repr(align(64))]
#[derive(Default)]
pub(super) struct NodeState {
    pub(super) parker: Parker,
    /// 1 once the node has left: it receives and replies no more.
    pub(super) gone: AtomicU32,
    /// How many nodes of the network have left. Each node that leaves increments it.
    pub(super) departures: AtomicU32,
}

impl NodeState {
    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        // Acquire, partner: the Release store in `IncomingLanes::leave`.
        self.gone.load(Acquire) != 0
    }
}
