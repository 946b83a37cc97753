//! The header in front of every packet of a group, and the check that drops foreign packets.
//!
//! ```text
//!  0        8      12      14       16    17     18       19   20    24    28    32
//!  +--------+------+-------+--------+-----+------+--------+----+-----+-----+-----+----------
//!  | group  |epoch |sender |channel |kind |flags |attempt | 0  | seq | ack | aux | body
//!  +--------+------+-------+--------+-----+------+--------+----+-----+-----+-----+----------
//! ```
//!
//! All integers are little-endian. What `seq`, `ack` and `aux` mean depends on the kind; `docs/wire-format.md` says it. The
//! length of the body is the length of the packet minus [`HEADER_SIZE`].

use thiserror::Error;

use super::GroupId;
use super::member::{MemberId, MemberSet};

/// Bytes of a header.
pub const HEADER_SIZE: usize = 32;
/// Longest body of a message packet: the MTU of RHiNET §5.2.
pub const MAX_MTU: usize = 2048;
/// The channel of lock and barrier packets. Messages use the channels below it.
pub const CONTROL_CHANNEL: u16 = u16::MAX;
/// Reserved for messages that carry whole lock and barrier packets over transports that lose packets. The simulator does that.
pub const CONTROL_STREAM: u16 = u16::MAX - 1;

/// What a packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum PacketKind {
    /// A message, or a part of one.
    Data = 1,
    /// Messages up to a number have arrived.
    Ack = 2,
    /// A message was refused; it and all later ones are to be sent again.
    Nack = 3,
    /// There is room again for a sender that had none.
    Resume = 4,
    /// A member asks the lock's manager for the lock.
    LockRequest = 16,
    /// The manager tells the last requester who comes after it.
    LockForward = 17,
    /// The lock is handed over.
    LockReply = 18,
    /// The answer to a `try_lock` that failed.
    LockBusy = 19,
    /// After a death: the manager asks every member for its part of the queue.
    LockQuery = 20,
    /// The answer to it.
    LockReport = 21,
    /// The rebuilt queue.
    LockHeal = 22,
    /// All members of a subtree have entered the barrier.
    BarrierArrive = 32,
    /// All members have entered the barrier.
    BarrierRelease = 33,
    /// A member wants to take part from the next round on.
    BarrierJoin = 34,
    /// A member wants to take part no longer.
    BarrierLeave = 35,
    /// The answer to a join.
    BarrierWelcome = 36,
    /// After a death: asks every member for its round.
    BarrierQuery = 37,
    /// The answer to it.
    BarrierReport = 38,
    /// The outcome of the rounds that the death interrupted.
    BarrierHeal = 39,
    /// Asks a member what it does with a lock or barrier, for diagnostics.
    StatusRequest = 48,
    /// The answer to it.
    StatusReply = 49,
    /// The group has declared the receiver of this packet dead.
    Expelled = 50,
    /// A member tells the coordinator who is gone, for the next view. The answer to a proposal, too.
    ViewReport = 51,
    /// The coordinator proposes the next view.
    ViewPropose = 52,
    /// All members of the next view have accepted it.
    ViewInstall = 53,
    /// The sender is no longer a member.
    Leave = 54,
}

impl PacketKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [PacketKind; 26] = [
        PacketKind::Data,
        PacketKind::Ack,
        PacketKind::Nack,
        PacketKind::Resume,
        PacketKind::LockRequest,
        PacketKind::LockForward,
        PacketKind::LockReply,
        PacketKind::LockBusy,
        PacketKind::LockQuery,
        PacketKind::LockReport,
        PacketKind::LockHeal,
        PacketKind::BarrierArrive,
        PacketKind::BarrierRelease,
        PacketKind::BarrierJoin,
        PacketKind::BarrierLeave,
        PacketKind::BarrierWelcome,
        PacketKind::BarrierQuery,
        PacketKind::BarrierReport,
        PacketKind::BarrierHeal,
        PacketKind::StatusRequest,
        PacketKind::StatusReply,
        PacketKind::Expelled,
        PacketKind::ViewReport,
        PacketKind::ViewPropose,
        PacketKind::ViewInstall,
        PacketKind::Leave,
    ];

    /// The kind with this number.
    #[inline]
    pub fn from_wire(number: u8) -> Option<Self> {
        // The most frequent kinds first.
        match number {
            1 => Some(PacketKind::Data),
            2 => Some(PacketKind::Ack),
            _ => Self::ALL.into_iter().find(|kind| *kind as u8 == number),
        }
    }

    /// Where the kind is in [`PacketKind::ALL`]: an index for tables of counters.
    pub fn position(self) -> usize {
        Self::ALL.iter().position(|kind| *kind == self).unwrap_or(0)
    }

    /// The name in tables of counters.
    pub const fn name(self) -> &'static str {
        match self {
            PacketKind::Data => "data",
            PacketKind::Ack => "ack",
            PacketKind::Nack => "nack",
            PacketKind::Resume => "resume",
            PacketKind::LockRequest => "lock_req",
            PacketKind::LockForward => "lock_forw",
            PacketKind::LockReply => "lock_reply",
            PacketKind::LockBusy => "lock_busy",
            PacketKind::LockQuery => "lock_query",
            PacketKind::LockReport => "lock_report",
            PacketKind::LockHeal => "lock_heal",
            PacketKind::BarrierArrive => "barrier_arrive",
            PacketKind::BarrierRelease => "barrier_release",
            PacketKind::BarrierJoin => "barrier_join",
            PacketKind::BarrierLeave => "barrier_leave",
            PacketKind::BarrierWelcome => "barrier_welcome",
            PacketKind::BarrierQuery => "barrier_query",
            PacketKind::BarrierReport => "barrier_report",
            PacketKind::BarrierHeal => "barrier_heal",
            PacketKind::StatusRequest => "status_request",
            PacketKind::StatusReply => "status_reply",
            PacketKind::Expelled => "expelled",
            PacketKind::ViewReport => "view_report",
            PacketKind::ViewPropose => "view_propose",
            PacketKind::ViewInstall => "view_install",
            PacketKind::Leave => "leave",
        }
    }

    /// Whether the packet belongs to a channel of messages, not to locks and barriers.
    #[inline]
    pub const fn is_message(self) -> bool {
        (self as u8) < PacketKind::LockRequest as u8
    }
}

/// Flags of a [`PacketKind::Data`] packet.
pub mod flags {
    /// The packet is the first part of a message.
    pub const FIRST: u8 = 1;
    /// The packet is the last part of a message.
    pub const LAST: u8 = 2;
    /// The sender wants an acknowledgement now.
    pub const ACK_NOW: u8 = 4;
    /// The message starts with a tag of 8 bytes.
    pub const TAGGED: u8 = 8;
    /// The message describes memory from which the receiver PULLs the data.
    pub const RENDEZVOUS: u8 = 16;
    /// The message starts with a lock number and its fencing token (after the tag, if any).
    pub const FENCED: u8 = 32;
    /// The message tells a sender that its rendezvous memory has been read.
    pub const PULLED: u8 = 64;
    /// The packet has several messages, each with its own length and flags.
    pub const COMBINED: u8 = 128;
}

/// The 32 bytes in front of every packet.
///
/// ```
/// use crosstie_protocol::group::{Header, MemberId, PacketKind};
/// let header = Header {
///     group: 7, epoch: 1, sender: MemberId::new(2), channel: 5, kind: PacketKind::Ack,
///     flags: 0, attempt: 0, seq: 0, ack: 17, aux: 0,
/// };
/// assert_eq!(Header::decode(&header.encode()), Ok(header));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// The group's id (PGID in RHiNET).
    pub group: u64,
    /// Which creation of the group this is: a group that is created again has another epoch.
    pub epoch: u32,
    /// The member that sent the packet.
    pub sender: MemberId,
    /// The logical channel.
    pub channel: u16,
    /// What the packet is for.
    pub kind: PacketKind,
    /// See [`flags`].
    pub flags: u8,
    /// How often messages were sent again. A NACK repeats it.
    pub attempt: u8,
    /// Message number, or lock or barrier number.
    pub seq: u32,
    /// The next message number that the sender expects from the receiver.
    pub ack: u32,
    /// First part of a message: bytes of the whole message. Other parts: where in the message the part belongs.
    pub aux: u32,
}

impl Header {
    /// The bytes of the header.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0..8].copy_from_slice(&self.group.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.sender.bits().to_le_bytes());
        bytes[14..16].copy_from_slice(&self.channel.to_le_bytes());
        bytes[16] = self.kind as u8;
        bytes[17] = self.flags;
        bytes[18] = self.attempt;
        bytes[20..24].copy_from_slice(&self.seq.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.ack.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.aux.to_le_bytes());
        bytes
    }

    /// Decodes bytes that a peer sent. It does not check group, epoch and channel: [`Gate::check`] does.
    #[inline]
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self, InvalidPacket> {
        let kind = PacketKind::from_wire(bytes[16]).ok_or(InvalidPacket::Kind(bytes[16]))?;
        let sender = u16::from_le_bytes([bytes[12], bytes[13]]);
        if bytes[19] != 0 {
            return Err(InvalidPacket::Reserved);
        }
        Ok(Header {
            group: u64::from_le_bytes(word(bytes, 0)),
            epoch: u32::from_le_bytes(word(bytes, 8)),
            sender: MemberId::from_wire(sender, super::MAX_MEMBERS).ok_or(InvalidPacket::Member(sender))?,
            channel: u16::from_le_bytes([bytes[14], bytes[15]]),
            kind,
            flags: bytes[17],
            attempt: bytes[18],
            seq: u32::from_le_bytes(word(bytes, 20)),
            ack: u32::from_le_bytes(word(bytes, 24)),
            aux: u32::from_le_bytes(word(bytes, 28)),
        })
    }
}

#[inline]
fn word<const N: usize>(bytes: &[u8; HEADER_SIZE], at: usize) -> [u8; N] {
    core::array::from_fn(|i| bytes[at + i])
}

/// Why the bytes of a packet are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidPacket {
    /// The packet is shorter than its kind requires.
    #[error("the packet has {len} bytes; its kind needs {needed}")]
    Short {
        /// Bytes of the packet.
        len: usize,
        /// Bytes that the kind requires.
        needed: usize,
    },
    /// The kind is not defined.
    #[error("packet kind {0} is not defined")]
    Kind(u8),
    /// A member number is not in the group.
    #[error("the packet names member {0}, which the group does not have")]
    Member(u16),
    /// A lock or barrier number is not in the group.
    #[error("the packet names lock or barrier {0}, which the group does not have")]
    Object(u32),
    /// Reserved bytes are not zero, or undefined flags are set.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// A field has a value that is not defined.
    #[error("a field has the undefined value {0}")]
    Value(u64),
}

/// Why a packet was dropped before anything else looked at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Dropped {
    /// The packet belongs to another group.
    #[error("packet of group {0:#x}")]
    ForeignGroup(u64),
    /// The packet belongs to an earlier or later creation of this group.
    #[error("packet of epoch {0}")]
    ForeignEpoch(u32),
    /// This member has not opened the channel.
    #[error("packet of channel {0}")]
    ForeignChannel(u16),
    /// The group has no such member, or the packet claims to come from this member itself.
    #[error("packet of {0}, which is not a peer")]
    NotAPeer(MemberId),
    /// The sender was declared dead. It should be told with [`PacketKind::Expelled`].
    #[error("packet of {0}, which was declared dead")]
    DeadSender(MemberId),
    /// The bytes are invalid.
    #[error("invalid packet: {0}")]
    Invalid(InvalidPacket),
}

/// How many packets were dropped, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DropCounters {
    /// Packets of other groups.
    pub foreign_group: u64,
    /// Packets of other epochs.
    pub foreign_epoch: u64,
    /// Packets of channels that are not open.
    pub foreign_channel: u64,
    /// Packets whose sender is not a peer.
    pub not_a_peer: u64,
    /// Packets of members that were declared dead.
    pub dead_sender: u64,
    /// Packets with invalid bytes.
    pub invalid: u64,
}

impl DropCounters {
    /// All dropped packets.
    pub const fn total(&self) -> u64 {
        let DropCounters { foreign_group, foreign_epoch, foreign_channel, not_a_peer, dead_sender, invalid } =
            *self;
        foreign_group + foreign_epoch + foreign_channel + not_a_peer + dead_sender + invalid
    }
}

/// Decides which packets a member accepts at all (RHiNET §5.3.3): those of its group, its epoch and an open channel, from
/// a live peer.
///
/// ```
/// use crosstie_protocol::group::{Dropped, Gate, Header, MemberId, MemberSet, PacketKind};
/// let mut gate = Gate::new(7, 1, MemberId::new(0), 4);
/// let header = Header {
///     group: 8, epoch: 1, sender: MemberId::new(2), channel: 5, kind: PacketKind::Data,
///     flags: 0, attempt: 0, seq: 0, ack: 0, aux: 0,
/// };
/// let dropped = gate.check(&header.encode(), &MemberSet::EMPTY, |channel| channel == 5);
/// assert_eq!(dropped, Err(Dropped::ForeignGroup(8)));
/// assert_eq!(gate.dropped().foreign_group, 1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gate {
    group: u64,
    epoch: u32,
    me: MemberId,
    members: usize,
    dropped: DropCounters,
}

impl Gate {
    /// The gate of member `me` in a group of `members`.
    pub fn new(group: u64, epoch: u32, me: MemberId, members: usize) -> Self {
        Gate { group, epoch, me, members, dropped: DropCounters::default() }
    }

    /// The header of a packet that is accepted. A dropped packet is counted.
    #[inline]
    pub fn check(
        &mut self,
        packet: &[u8],
        dead: &MemberSet,
        is_open: impl FnOnce(u16) -> bool,
    ) -> Result<Header, Dropped> {
        let checked = self.check_only(packet, dead, is_open);
        if let Err(cause) = &checked {
            self.count(cause);
        }
        checked
    }

    /// Counts a packet that was found invalid after [`Gate::check`].
    pub fn count_invalid(&mut self) {
        self.dropped.invalid += 1;
    }

    /// How many packets were dropped.
    pub fn dropped(&self) -> &DropCounters {
        &self.dropped
    }

    /// Whether something that claims to come from this member of this group may be used.
    pub(super) fn check_member(
        &self,
        group: GroupId,
        member: MemberId,
        dead: &MemberSet,
    ) -> Result<(), Dropped> {
        if group.group != self.group {
            return Err(Dropped::ForeignGroup(group.group));
        }
        if group.epoch != self.epoch {
            return Err(Dropped::ForeignEpoch(group.epoch));
        }
        if member.index() >= self.members || member == self.me {
            return Err(Dropped::NotAPeer(member));
        }
        if dead.contains(member) {
            return Err(Dropped::DeadSender(member));
        }
        Ok(())
    }

    #[inline]
    fn check_only(
        &self,
        packet: &[u8],
        dead: &MemberSet,
        is_open: impl FnOnce(u16) -> bool,
    ) -> Result<Header, Dropped> {
        let Some(bytes) = packet.first_chunk::<HEADER_SIZE>() else {
            return Err(Dropped::Invalid(InvalidPacket::Short { len: packet.len(), needed: HEADER_SIZE }));
        };
        // Before anything else of the packet is looked at: a foreign group may use another format.
        let group = u64::from_le_bytes(word(bytes, 0));
        if group != self.group {
            return Err(Dropped::ForeignGroup(group));
        }
        let header = Header::decode(bytes).map_err(Dropped::Invalid)?;
        if header.epoch != self.epoch {
            return Err(Dropped::ForeignEpoch(header.epoch));
        }
        if header.sender.index() >= self.members || header.sender == self.me {
            return Err(Dropped::NotAPeer(header.sender));
        }
        if header.kind.is_message() == (header.channel == CONTROL_CHANNEL) || !is_open(header.channel) {
            return Err(Dropped::ForeignChannel(header.channel));
        }
        if dead.contains(header.sender) {
            return Err(Dropped::DeadSender(header.sender));
        }
        Ok(header)
    }

    #[cold]
    pub(super) fn count(&mut self, cause: &Dropped) {
        let counter = match cause {
            Dropped::ForeignGroup(_) => &mut self.dropped.foreign_group,
            Dropped::ForeignEpoch(_) => &mut self.dropped.foreign_epoch,
            Dropped::ForeignChannel(_) => &mut self.dropped.foreign_channel,
            Dropped::NotAPeer(_) => &mut self.dropped.not_a_peer,
            Dropped::DeadSender(_) => &mut self.dropped.dead_sender,
            Dropped::Invalid(_) => &mut self.dropped.invalid,
        };
        *counter += 1;
    }
}
