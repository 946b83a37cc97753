//! Exact counters of a group.

use crosstie_protocol::group::{DropCounters, LockCounters, PacketKind};

/// What the engine itself counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupCounters {
    pub(super) violations: u64,
    pub(super) injected_losses: u64,
    pub(super) lost_receives: u64,
    pub(super) links_closed: u64,
    pub(super) stale_tokens: u64,
    pub(super) unsent: u64,
}

/// What one member of a group has done so far. Exact.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Packets sent, by kind: the kind, and how many.
    pub packets: Vec<(PacketKind, u64)>,
    /// What this member did with locks.
    pub locks: LockCounters,
    /// Packets dropped because they are foreign or invalid.
    pub dropped: DropCounters,
    /// Messages handed to the application, or matched with a receive.
    pub delivered: u64,
    /// Messages that were sent in the packet of an earlier one.
    pub combined: u64,
    /// Message packets that were sent again.
    pub resent: u64,
    /// Message packets that came a second time, or behind a missing one and were not kept.
    pub discarded: u64,
    /// Message packets that came behind a missing one and were kept.
    pub held: u64,
    /// Packets that the device did not accept. They are posted again.
    pub unsent: u64,
    /// Message packets refused for lack of room.
    pub refused: u64,
    /// Messages dropped because their fencing token was older than one seen before.
    pub stale_tokens: u64,
    /// Packets that broke the rules of locks or barriers.
    pub violations: u64,
    /// Packets that [`GroupConfig::receive_loss`](super::GroupConfig::receive_loss) dropped.
    pub injected_losses: u64,
    /// Links to members that died.
    pub links_closed: u64,
    /// Tagged messages that this member has PULLed out of the memory of their senders.
    pub pulls: u64,
    /// Tagged messages that came before their receive.
    pub unexpected: u64,
    /// PUSH, PULL and PUT operations that were refused because their memory belongs to another group.
    pub foreign_memory: u64,
}

impl Counters {
    /// Packets of all kinds that this member has sent.
    pub fn messages(&self) -> u64 {
        self.packets.iter().map(|(_, count)| count).sum()
    }

    /// Packets of one kind that this member has sent.
    pub fn sent(&self, kind: PacketKind) -> u64 {
        self.packets.iter().find(|(sent, _)| *sent == kind).map_or(0, |(_, count)| *count)
    }
}
