//! What both ends of a connection know of each other.

use crate::device::{QpAddress, RemoteMemory};

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Sender,
    Receiver,
}

/// What both ends agreed on in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) rails: usize,
    pub(super) slots: usize,
    pub(super) max_group: usize,
    pub(super) data_qps: usize,
    pub(super) staging: u32,
}

/// What the peer needs to know about an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EndpointAddress {
    /// Sender: the clear-to-sends. Receiver: the records.
    pub(super) memory: RemoteMemory,
    /// Receiver: the staging memory.
    pub(super) staging: RemoteMemory,
    pub(super) qps: Vec<QpAddress>,
}
