//! What the control plane and the daemons tell each other about connections.
//!
//! A daemon is connected with the daemon of the same number of each other node. The control plane thread sends commands to the
//! daemons; a daemon replies with events. The *epoch*
//! tells one connection with a rank from the next one: messages of an earlier epoch are ignored.

use crosstie::copyrpc::ConnectionAddress;

/// The most commands in the channel to a daemon: a few for each rank.
pub(super) const MAX_COMMANDS: usize = 4096;

/// A command of the control plane to a daemon, about its connection with `rank`.
#[derive(Clone, Copy, Debug)]
pub(super) enum ConnectionCommand {
    /// Create a connection. Closes the previous one.
    Open { rank: u32, epoch: u64 },
    /// Connect it with that of the other node's daemon.
    Connect { rank: u32, epoch: u64, address: ConnectionAddress },
    /// The other daemon has connected its side, too: requests may be sent.
    Enable { rank: u32, epoch: u64 },
    /// Close the connection.
    Close { rank: u32, epoch: u64 },
}

/// What a daemon tells the control plane.
#[derive(Debug)]
pub(super) enum ConnectionEvent {
    /// The connection has been created.
    Opened { rank: u32, epoch: u64, daemon: u32, address: ConnectionAddress },
    /// It is connected.
    Connected { rank: u32, epoch: u64, daemon: u32 },
    /// Requests are being sent.
    Up { rank: u32, epoch: u64, daemon: u32 },
    /// The connection failed and is closed.
    Failed { rank: u32, epoch: u64, why: String },
}
