//! Groups: locks, barriers and messages between the members of a process group.
//!
//! The rules of the RHiNET software layer, and what it leaves open: deaths, time-outs, membership that changes, lost packets.
//!
//! | part | what it decides | section |
//! | --- | --- | --- |
//! | [`Gate`], [`Header`] | which packets belong to this group, epoch and channel | §2.1, §5.3.3 |
//! | [`Group`] | locks (`lock`), barriers (`barrier`) | §3, §4 |
//! | [`View`] | who is a member: numbered views, on which all members agree (`view`) | |
//! | [`message`] | SEND/RECEIVE with Modified ACK/NACK, parts, matching of tags | §5, §6 |
//! | [`FenceTable`] | refusing the writes of a holder that has lost its lock | |
//!
//! Nothing here does I/O or reads a clock. A driver gives each packet and the time to these state machines, sends what they ask
//! for, and owns all bytes:
//!
//! ```text
//!    application ── lock, enter, send ──>  +---------------+  ── Output::send ──>  device
//!    application <── Output::event ──────  |     Group     |
//!                                          |    Channel    |  <── on_packet ─────  device
//!                    time ── expire ────>  +---------------+  <── member_died ───  liveness
//! ```
//!
//! Locks and barriers need a link that delivers each packet once and in order, or a death: an RC queue pair. (In the simulator they also run
//! over the messages of channel [`CONTROL_STREAM`].) Messages need no such link.

/// Whether a test has turned this rule off, to show which failure the rule prevents. Always false outside of tests.
macro_rules! rule_broken {
    ($state:expr, $rule:ident) => {{
        #[cfg(test)]
        let broken = $state.broken_rule == Some(crate::group::tests::BrokenRule::$rule);
        #[cfg(not(test))]
        let broken = false;
        broken
    }};
}

pub mod message;

mod barrier;
mod control;
mod fence;
mod immediate;
mod lock;
mod member;
mod packet;
mod region;
mod state;
#[cfg(test)]
mod tests;
mod view;

use thiserror::Error;

pub use barrier::{BarrierError, BarrierOutcome, Rounds, Tree, TreeOptions};
pub use control::{Control, MAX_CONTROL_SIZE, Object, SHORT_CONTROL_SIZE, Status};
pub use fence::{FenceTable, StaleToken, Token};
pub use immediate::PACKET_IMMEDIATE;
pub use lock::{LockCounters, LockError, LockOutcome, LockState, QueuePlace, QueueReport};
pub use member::{MAX_MEMBERS, MemberId, MemberSet};
pub use packet::{
    CONTROL_CHANNEL, CONTROL_STREAM, DropCounters, Dropped, Gate, HEADER_SIZE, Header, InvalidPacket,
    MAX_MTU, PacketKind, flags,
};
pub use region::MemberRegion;
use state::Scope;
pub use state::{Config, ConfigError, Group};
pub use view::View;

/// Limits of a group. Members: [`MAX_MEMBERS`].
#[derive(Debug)]
pub struct Limits;

impl Limits {
    /// Most locks of a group.
    pub const MAX_LOCKS: usize = 1 << 16;
    /// Most barriers of a group.
    pub const MAX_BARRIERS: usize = 64;
    /// Most children of a member in a barrier's tree.
    pub const MAX_FANOUT: usize = 64;
    /// Most entries of a send, receive or matching table.
    pub const MAX_TABLE: usize = 1 << 20;
    /// Most bytes of a send or receive buffer.
    pub const MAX_BUFFER: usize = 1 << 30;
    /// Most bytes of a message.
    pub const MAX_MESSAGE: usize = 1 << 30;
}

/// Which group, and which creation of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId {
    /// The group's id (PGID in RHiNET).
    pub group: u64,
    /// Differs each time that the group is created.
    pub epoch: u32,
}

/// Where a [`Group`] puts what is to be done.
pub trait Output {
    /// A packet for another member. `view`: how many members the view of this member lacks; the packet carries it.
    fn send(&mut self, to: MemberId, view: u16, packet: &Control);
    /// Something that the application or the driver has to know.
    fn event(&mut self, event: Event);
}

/// What a [`Group`] tells the application or the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Event {
    /// The lock belongs to this member now.
    LockAcquired {
        /// The lock.
        lock: u32,
        /// The fencing token, higher than all before.
        fence: Token,
    },
    /// `try_lock` has failed: another member has the lock, or is before this one.
    LockBusy {
        /// The lock.
        lock: u32,
    },
    /// The deadline of a lock request has passed.
    LockTimedOut {
        /// The lock.
        lock: u32,
    },
    /// A lock that this member had or waited for is lost.
    LockFailed {
        /// The lock.
        lock: u32,
        /// Why.
        error: LockError,
    },
    /// All members have entered the round.
    BarrierCompleted {
        /// The barrier.
        barrier: u32,
        /// The round.
        round: u64,
    },
    /// Members died, so the round fails for all survivors.
    BarrierFailed {
        /// The barrier.
        barrier: u32,
        /// The round.
        round: u64,
        /// Who died.
        dead: MemberSet,
    },
    /// The deadline of a barrier has passed. The member has still arrived.
    BarrierTimedOut {
        /// The barrier.
        barrier: u32,
        /// The round.
        round: u64,
    },
    /// Waiting in a barrier ended, because this member is no longer part of the group.
    BarrierRefused {
        /// The barrier.
        barrier: u32,
        /// Why.
        error: BarrierError,
    },
    /// This member takes part in the barrier from the round after this one on.
    BarrierJoined {
        /// The barrier.
        barrier: u32,
        /// The last round without this member.
        round: u64,
    },
    /// This member no longer takes part in the barrier.
    BarrierLeft {
        /// The barrier.
        barrier: u32,
    },
    /// A member was declared dead, here or by another member. The driver drops its connection and [`message::Channel::drop_peer`]s it,
    /// once what was sent to it before has gone out: the last packet tells it.
    MemberDied(MemberId),
    /// A new view: all its members have accepted it. Its number.
    ViewInstalled(u64),
    /// The group has declared this member dead. Everything that waits has ended.
    Expelled,
    /// Too few members are alive to decide anything. Everything that waits has ended.
    QuorumLost,
    /// The answer to [`Group::ask_status`].
    Status {
        /// The member that answered.
        from: MemberId,
        /// The lock or barrier.
        object: Object,
        /// What the member does with it.
        status: Status,
    },
}

/// A peer broke the rules of locks or barriers. The packet had no effect. The driver counts it, and may end the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ControlViolation {
    /// A packet about this lock does not fit its state, or the group has no such lock.
    #[error("a packet about lock {lock} does not fit its state")]
    Lock {
        /// The lock.
        lock: u32,
    },
    /// A packet about this barrier does not fit its state, or the group has no such barrier.
    #[error("a packet about barrier {barrier} does not fit its state")]
    Barrier {
        /// The barrier.
        barrier: u32,
    },
    /// A packet of a kind that does not belong here.
    #[error("a {} packet does not belong here", .0.name())]
    Kind(PacketKind),
    /// The packet belongs to a view that this member was not asked about.
    #[error("a packet belongs to view {0}, which this member has not accepted")]
    View(u16),
}
