//! Errors of groups.

use core::fmt;

use crosstie_protocol::group::message::OptionsError;
use crosstie_protocol::group::{
    BarrierError, ConfigError, Dropped, LockError, LockState, MemberId, MemberSet, Status,
};

use crate::bootstrap;
use crate::device::{CqError, DeviceError};
use crate::endpoint::{Cause, ConnectError, NotStarted};

/// Why a group could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The device returned an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The job failed while members exchanged their addresses.
    #[error(transparent)]
    Bootstrap(#[from] bootstrap::Error),
    /// A value of the configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// This rank is not in the member list.
    #[error("rank {0} is not in the group's member list: it calls Group::skip instead")]
    NotMember(u32),
    /// The member list names a rank twice, or one that the job does not have.
    #[error("the group's member list names rank {0} twice, or the job has no such rank")]
    InvalidRank(u32),
    /// A rank sent something else than the address of a member.
    #[error("rank {0} did not send a valid address of a member: does it run another version?")]
    InvalidAddress(u32),
    /// A rank joins another group at the same time.
    #[error(
        "rank {rank} joins group {theirs:#x}, this rank {ours:#x}: all ranks join groups in the same order"
    )]
    OtherGroup {
        /// The rank.
        rank: u32,
        /// The group it joins.
        theirs: u64,
        /// The group this rank joins.
        ours: u64,
    },
    /// A rank uses another configuration.
    #[error(
        "rank {0} uses another configuration of the group: members, locks, barriers, tree and transport must be equal"
    )]
    OtherConfig(u32),
    /// A rank does not know the group's secret.
    #[error("rank {0} does not know the secret of the group")]
    WrongSecret(u32),
    /// The endpoint to a rank could not be connected.
    #[error("the endpoint to rank {rank} could not be connected: {error}")]
    Endpoint {
        /// The rank.
        rank: u32,
        /// Why.
        error: ConnectError,
    },
    /// The progress thread could not be started.
    #[error("the progress thread could not be started: {0}")]
    Thread(std::io::Error),
}

/// What another member did last, in the error of a time-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberReport {
    /// The member.
    pub member: MemberId,
    /// What it answered; `None` if it did not answer in time.
    pub status: Option<Status>,
}

impl fmt::Display for MemberReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let member = self.member;
        match self.status {
            None => write!(f, "{member} does not answer"),
            Some(Status::Barrier { entered, waits_for, .. }) => {
                write!(f, "{member} has last entered round {entered}")?;
                match waits_for {
                    Some(child) => write!(f, " and waits for {child}"),
                    None => Ok(()),
                }
            }
            Some(Status::Lock { state: LockState::Lock | LockState::Queued, fence, .. }) => {
                write!(f, "{member} has the lock, with token {fence}")
            }
            Some(Status::Lock { state: LockState::Wait, .. }) => write!(f, "{member} waits for it"),
            Some(Status::Lock { state, .. }) => write!(f, "{member} is in state {state:?}"),
        }
    }
}

fn list(reports: &[MemberReport]) -> String {
    reports.iter().map(MemberReport::to_string).collect::<Vec<_>>().join("; ")
}

/// Why waiting for a lock or barrier, or another call of a group, has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// A lock operation is refused.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A barrier operation is refused.
    #[error(transparent)]
    Barrier(#[from] BarrierError),
    /// The lock was not acquired in time.
    #[error("lock {lock} was not acquired in time: {}", list(.members))]
    LockTimedOut {
        /// The lock.
        lock: u32,
        /// The members that have the lock, wait for it, or do not answer.
        members: Vec<MemberReport>,
    },
    /// Members have not entered the barrier in time. This member has still arrived: the next wait continues the same round.
    #[error("barrier {barrier}, round {round}: not all members have entered in time: {}", list(.missing))]
    BarrierTimedOut {
        /// The barrier.
        barrier: u32,
        /// The round.
        round: u64,
        /// The members that have not entered it, or do not answer.
        missing: Vec<MemberReport>,
    },
    /// Members died, so the round failed for all others. The next round is without them.
    #[error("barrier {barrier}, round {round}: {dead} died")]
    MembersDied {
        /// The barrier.
        barrier: u32,
        /// The round.
        round: u64,
        /// The dead members.
        dead: Box<MemberSet>,
    },
    /// The member that a message or an operation goes to is dead, or left the group.
    #[error("{0} is dead")]
    PeerDead(MemberId),
    /// The group has no such member, or it is this member itself.
    #[error("the group has no other {0}")]
    NoSuchPeer(MemberId),
    /// The channel number is reserved or too high.
    #[error("channel {0} is not valid: use a number below 256")]
    InvalidChannel(u16),
    /// The channel is open already.
    #[error("channel {0} is open already")]
    ChannelOpen(u16),
    /// An option of the channel is invalid.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The message is longer than the channel allows.
    #[error(
        "a message of {len} bytes is longer than the channel's limit of {max}: raise max_message at all members"
    )]
    MessageTooLong {
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The group was made without access to the memory of other members.
    #[error("the group was made without access to the memory of other members: use GroupConfig::one_sided")]
    NotOneSided,
    /// The description of memory is not one of a live member of this group.
    #[error("the description of memory is refused: {0}")]
    ForeignMemory(Dropped),
    /// A PUSH, PULL or PUT was not started.
    #[error(transparent)]
    NotStarted(NotStarted),
    /// A PUSH, PULL or PUT has failed.
    #[error("access to the memory of {member} failed: {cause}")]
    Operation {
        /// The member.
        member: MemberId,
        /// Why.
        cause: Cause,
    },
    /// A PUT has too many bytes.
    #[error("a PUT of {len} bytes is longer than {max}: use PUSH")]
    PutTooLong {
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// A tagged message is longer than the buffer of the receive that it matched. The message is gone.
    #[error("a message of {len} bytes from {from} with tag {tag} does not fit into a buffer of {room}")]
    Truncated {
        /// Its sender.
        from: MemberId,
        /// Its tag.
        tag: u64,
        /// Its length.
        len: u64,
        /// Bytes of the buffer.
        room: u64,
    },
    /// The receiver could not read the message out of this member's buffer.
    #[error("{0} could not read the message out of the buffer: was it allocated by this group?")]
    NotPulled(MemberId),
    /// Too many tagged sends or receives have not ended: wait for one of them.
    #[error(
        "too many sends or receives have not ended ({0}): wait for one of them, or raise the limit of the channel"
    )]
    TooManyRequests(u32),
    /// All other members are dead: no message can come.
    #[error("all other members are dead")]
    NobodyLeft,
    /// The group has declared this member dead, for example because it was stopped for long. Leave, and join a new group.
    #[error("the group has declared this member dead: leave it, and join a new one")]
    Expelled,
    /// Too few members are alive: this may be the smaller part of a divided group.
    #[error("too few members are alive: this may be the smaller part of a divided group")]
    NoQuorum,
    /// This member has left the group: its [`Group`](super::Group) was dropped.
    #[error("this member has left the group")]
    Left,
    /// Nothing came in time.
    #[error("timed out")]
    TimedOut,
    /// The device failed.
    #[error("the group's device failed: {0}")]
    Device(String),
    /// A completion queue failed.
    #[error("a completion queue of the group failed: {0}")]
    Queue(CqError),
    /// The application waits in this barrier, or for this tag, in another thread already.
    #[error("another thread of this member waits already")]
    Busy,
}
