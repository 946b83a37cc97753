//! Lock and barrier packets: what follows the header.

use super::GroupId;
use super::barrier::Rounds;
use super::fence::Token;
use super::lock::{LockState, QueuePlace, QueueReport};
use super::member::{MemberId, MemberSet};
use super::packet::{CONTROL_CHANNEL, HEADER_SIZE, Header, InvalidPacket, PacketKind};

/// Bytes of the longest lock or barrier packet, with its header.
pub const MAX_CONTROL_SIZE: usize = HEADER_SIZE + 24 + 2 * MemberSet::ENCODED;

/// Bytes that are enough for the packets that hand a lock over, with their headers.
pub const SHORT_CONTROL_SIZE: usize = HEADER_SIZE + Token::ENCODED;

const FLAG: u8 = 1;
const NO_MEMBER: u16 = u16::MAX;

/// A lock or a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// The lock with this number.
    Lock(u32),
    /// The barrier with this number.
    Barrier(u32),
}

/// What a member does with a lock or barrier, for diagnostics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// A lock.
    Lock {
        /// The member's place in the queue.
        state: LockState,
        /// Its newest fencing token.
        fence: Token,
        /// How often it has acquired the lock.
        acquired: u64,
    },
    /// A barrier.
    Barrier {
        /// The last round that the member has entered.
        entered: u64,
        /// The last round that has ended for it.
        ended: u64,
        /// A child in the tree whose arrival it waits for.
        waits_for: Option<MemberId>,
    },
}

/// A lock or barrier packet. RHiNET's names: `lock_req`, `lock_forw`, `lock_reply`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the fields are described in docs/wire-format.md and where they are used")]
pub enum Control {
    /// A member asks the lock's manager for the lock.
    LockRequest { lock: u32, trying: bool },
    /// The manager tells the last requester who comes after it.
    LockForward { lock: u32, requester: MemberId, ticket: u32, trying: bool },
    /// The lock is handed over.
    LockReply { lock: u32, fence: Token, ticket: u32 },
    /// The answer to a `try_lock` that failed.
    LockBusy { lock: u32 },
    /// After a death: the manager asks every member for its part of the queue.
    LockQuery { lock: u32 },
    /// The answer to it.
    LockReport { lock: u32, report: QueueReport },
    /// The rebuilt queue: the receiver's place in it, and perhaps a new token.
    LockHeal { lock: u32, place: Option<QueuePlace>, fence: Option<Token> },
    /// All members of a subtree have entered the round.
    BarrierArrive { barrier: u32, round: u64 },
    /// All members have entered the round. `active`: who takes part from now on, if that changed.
    BarrierRelease { barrier: u32, round: u64, active: Option<MemberSet> },
    /// A member wants to take part from the next round on.
    BarrierJoin { barrier: u32, member: MemberId },
    /// A member wants to take part no longer.
    BarrierLeave { barrier: u32, member: MemberId },
    /// The answer to a join.
    BarrierWelcome { barrier: u32, round: u64, active: MemberSet },
    /// After a death: asks every member for its rounds.
    BarrierQuery { barrier: u32 },
    /// The answer to it.
    BarrierReport { barrier: u32, rounds: Rounds },
    /// The outcome of the rounds that the death interrupted.
    BarrierHeal { barrier: u32, rounds: Rounds },
    /// Asks a member what it does with a lock or barrier.
    StatusRequest { object: Object },
    /// The answer to it.
    StatusReply { object: Object, status: Status },
    /// The group has declared the receiver dead.
    Expelled,
    /// A member tells the coordinator who is gone, for the next view. The answer to a proposal, too.
    ViewReport { gone: MemberSet },
    /// The coordinator proposes the next view: all members but these.
    ViewPropose { gone: MemberSet },
    /// All members of the next view have accepted it.
    ViewInstall { gone: MemberSet },
    /// The sender is no longer a member.
    Leave,
}

impl Control {
    /// The kind of the packet.
    pub const fn kind(&self) -> PacketKind {
        match self {
            Control::LockRequest { .. } => PacketKind::LockRequest,
            Control::LockForward { .. } => PacketKind::LockForward,
            Control::LockReply { .. } => PacketKind::LockReply,
            Control::LockBusy { .. } => PacketKind::LockBusy,
            Control::LockQuery { .. } => PacketKind::LockQuery,
            Control::LockReport { .. } => PacketKind::LockReport,
            Control::LockHeal { .. } => PacketKind::LockHeal,
            Control::BarrierArrive { .. } => PacketKind::BarrierArrive,
            Control::BarrierRelease { .. } => PacketKind::BarrierRelease,
            Control::BarrierJoin { .. } => PacketKind::BarrierJoin,
            Control::BarrierLeave { .. } => PacketKind::BarrierLeave,
            Control::BarrierWelcome { .. } => PacketKind::BarrierWelcome,
            Control::BarrierQuery { .. } => PacketKind::BarrierQuery,
            Control::BarrierReport { .. } => PacketKind::BarrierReport,
            Control::BarrierHeal { .. } => PacketKind::BarrierHeal,
            Control::StatusRequest { .. } => PacketKind::StatusRequest,
            Control::StatusReply { .. } => PacketKind::StatusReply,
            Control::Expelled => PacketKind::Expelled,
            Control::ViewReport { .. } => PacketKind::ViewReport,
            Control::ViewPropose { .. } => PacketKind::ViewPropose,
            Control::ViewInstall { .. } => PacketKind::ViewInstall,
            Control::Leave => PacketKind::Leave,
        }
    }

    /// Whether the packet has at most [`SHORT_CONTROL_SIZE`] bytes.
    #[inline]
    pub const fn is_short(&self) -> bool {
        use Control::{LockBusy, LockForward, LockReply, LockRequest};
        matches!(self, LockRequest { .. } | LockForward { .. } | LockReply { .. } | LockBusy { .. })
    }

    /// Writes the whole packet, with its header, and returns its length. [`MAX_CONTROL_SIZE`] bytes are enough for every packet,
    /// [`SHORT_CONTROL_SIZE`] for a [short](Control::is_short) one. `view`: how many members the view of the sender lacks.
    pub fn encode(&self, group: GroupId, sender: MemberId, view: u16, packet: &mut [u8]) -> usize {
        let mut header = Header {
            group: group.group,
            epoch: group.epoch,
            sender,
            channel: CONTROL_CHANNEL,
            kind: self.kind(),
            flags: 0,
            attempt: 0,
            seq: 0,
            ack: 0,
            aux: 0,
        };
        let mut body = Writer { bytes: packet, at: HEADER_SIZE };
        match *self {
            Control::LockRequest { lock, trying } => {
                (header.seq, header.flags) = (lock, u8::from(trying) * FLAG);
            }
            Control::LockForward { lock, requester, ticket, trying } => {
                (header.seq, header.flags) = (lock, u8::from(trying) * FLAG);
                (header.ack, header.aux) = (ticket, u32::from(requester.bits()));
            }
            Control::LockReply { lock, fence, ticket } => {
                (header.seq, header.ack) = (lock, ticket);
                body.put_token(fence);
            }
            Control::LockBusy { lock } => header.seq = lock,
            Control::LockQuery { lock } => header.seq = lock,
            Control::LockReport { lock, report } => {
                header.seq = lock;
                header.flags = report.encode_flags();
                header.ack = report.ticket.unwrap_or(0);
                header.aux = u32::from(report.gave_to.map_or(NO_MEMBER, MemberId::bits));
                body.put_token(report.fence);
            }
            Control::LockHeal { lock, place, fence } => {
                header.seq = lock;
                header.flags = u8::from(place.is_some()) * FLAG;
                header.ack = place.map_or(0, |place| place.ticket);
                let next = place.and_then(|place| place.next);
                header.aux = u32::from(next.map_or(NO_MEMBER, MemberId::bits));
                body.put_token(fence.unwrap_or_default());
            }
            Control::BarrierArrive { barrier, round } => {
                header.seq = barrier;
                body.put(round);
            }
            Control::BarrierRelease { barrier, round, active } => {
                (header.seq, header.flags) = (barrier, u8::from(active.is_some()) * FLAG);
                body.put(round);
                if let Some(active) = &active {
                    body.put_set(active);
                }
            }
            Control::BarrierJoin { barrier, member } | Control::BarrierLeave { barrier, member } => {
                (header.seq, header.aux) = (barrier, u32::from(member.bits()));
            }
            Control::BarrierWelcome { barrier, round, active } => {
                header.seq = barrier;
                body.put(round);
                body.put_set(&active);
            }
            Control::BarrierQuery { barrier } => header.seq = barrier,
            Control::BarrierReport { barrier, rounds } | Control::BarrierHeal { barrier, rounds } => {
                header.seq = barrier;
                body.put(rounds.ended);
                body.put(rounds.failed_from);
                body.put_set(&rounds.blame);
                body.put_set(&rounds.active);
            }
            Control::StatusRequest { object } => {
                (header.seq, header.flags) = encode_object(object);
            }
            Control::StatusReply { object, status } => {
                (header.seq, header.flags) = encode_object(object);
                match status {
                    Status::Lock { state, fence, acquired } => {
                        header.aux = state as u32;
                        body.put_token(fence);
                        body.put(acquired);
                    }
                    Status::Barrier { entered, ended, waits_for } => {
                        header.aux = u32::from(waits_for.map_or(NO_MEMBER, MemberId::bits));
                        body.put(entered);
                        body.put(ended);
                    }
                }
            }
            Control::ViewReport { gone } | Control::ViewPropose { gone } | Control::ViewInstall { gone } => {
                body.put_set(&gone);
            }
            Control::Expelled | Control::Leave => {}
        }
        header.aux |= u32::from(view) << 16;
        let len = body.at;
        packet[..HEADER_SIZE].copy_from_slice(&header.encode());
        len
    }

    /// How many members the view of the packet's sender lacks.
    #[inline]
    pub fn view_of(header: &Header) -> u16 {
        (header.aux >> 16) as u16
    }

    /// Decodes what a peer of a group of `members` sent. Whether the group has the lock or barrier is checked later.
    pub fn decode(header: &Header, body: &[u8], members: usize) -> Result<Self, InvalidPacket> {
        let mut body = Reader { bytes: body, at: 0 };
        // The upper half is the view.
        let aux = header.aux as u16;
        let member = |bits: u16| MemberId::from_wire(bits, members).ok_or(InvalidPacket::Member(bits));
        let optional = |bits: u16| if bits == NO_MEMBER { Ok(None) } else { member(bits).map(Some) };
        let flag = header.flags & FLAG != 0;
        let id = header.seq;
        let control = match header.kind {
            PacketKind::LockRequest => Control::LockRequest { lock: id, trying: flag },
            PacketKind::LockForward => {
                Control::LockForward { lock: id, requester: member(aux)?, ticket: header.ack, trying: flag }
            }
            PacketKind::LockReply => {
                Control::LockReply { lock: id, fence: body.take_token()?, ticket: header.ack }
            }
            PacketKind::LockBusy => Control::LockBusy { lock: id },
            PacketKind::LockQuery => Control::LockQuery { lock: id },
            PacketKind::LockReport => {
                let fence = body.take_token()?;
                let gave_to = optional(aux)?;
                let report = QueueReport::decode(header.flags, fence, gave_to, header.ack)
                    .ok_or(InvalidPacket::Value(u64::from(header.flags)))?;
                Control::LockReport { lock: id, report }
            }
            PacketKind::LockHeal => {
                let fence = body.take_token()?;
                let next = optional(aux)?;
                Control::LockHeal {
                    lock: id,
                    place: flag.then_some(QueuePlace { ticket: header.ack, next }),
                    // No acquisition has the count 0.
                    fence: (fence != Token::default()).then_some(fence),
                }
            }
            PacketKind::BarrierArrive => Control::BarrierArrive { barrier: id, round: body.take()? },
            PacketKind::BarrierRelease => {
                let round = body.take()?;
                let active = if flag { Some(body.take_set(members)?) } else { None };
                Control::BarrierRelease { barrier: id, round, active }
            }
            PacketKind::BarrierJoin => Control::BarrierJoin { barrier: id, member: member(aux)? },
            PacketKind::BarrierLeave => Control::BarrierLeave { barrier: id, member: member(aux)? },
            PacketKind::BarrierWelcome => {
                Control::BarrierWelcome { barrier: id, round: body.take()?, active: body.take_set(members)? }
            }
            PacketKind::BarrierQuery => Control::BarrierQuery { barrier: id },
            PacketKind::BarrierReport | PacketKind::BarrierHeal => {
                let (ended, failed_from) = (body.take()?, body.take()?);
                let rounds = Rounds {
                    ended,
                    failed_from,
                    blame: body.take_set(members)?,
                    active: body.take_set(members)?,
                };
                if header.kind == PacketKind::BarrierReport {
                    Control::BarrierReport { barrier: id, rounds }
                } else {
                    Control::BarrierHeal { barrier: id, rounds }
                }
            }
            PacketKind::StatusRequest => Control::StatusRequest { object: decode_object(header) },
            PacketKind::StatusReply => {
                let object = decode_object(header);
                let status = match object {
                    Object::Lock(_) => Status::Lock {
                        state: LockState::from_wire(u32::from(aux))
                            .ok_or(InvalidPacket::Value(u64::from(aux)))?,
                        fence: body.take_token()?,
                        acquired: body.take()?,
                    },
                    Object::Barrier(_) => Status::Barrier {
                        entered: body.take()?,
                        ended: body.take()?,
                        waits_for: optional(aux)?,
                    },
                };
                Control::StatusReply { object, status }
            }
            PacketKind::Expelled => Control::Expelled,
            PacketKind::ViewReport => Control::ViewReport { gone: body.take_set(members)? },
            PacketKind::ViewPropose => Control::ViewPropose { gone: body.take_set(members)? },
            PacketKind::ViewInstall => Control::ViewInstall { gone: body.take_set(members)? },
            PacketKind::Leave => Control::Leave,
            PacketKind::Data | PacketKind::Ack | PacketKind::Nack | PacketKind::Resume => {
                return Err(InvalidPacket::Kind(header.kind as u8));
            }
        };
        Ok(control)
    }
}

fn encode_object(object: Object) -> (u32, u8) {
    match object {
        Object::Lock(lock) => (lock, 0),
        Object::Barrier(barrier) => (barrier, FLAG),
    }
}

fn decode_object(header: &Header) -> Object {
    if header.flags & FLAG == 0 { Object::Lock(header.seq) } else { Object::Barrier(header.seq) }
}

struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, word: u64) {
        self.bytes[self.at..self.at + 8].copy_from_slice(&word.to_le_bytes());
        self.at += 8;
    }

    fn put_token(&mut self, token: Token) {
        self.put(token.view);
        self.put(token.count);
    }

    fn put_set(&mut self, set: &MemberSet) {
        let mut bytes = [0; MemberSet::ENCODED];
        set.encode(&mut bytes);
        self.bytes[self.at..self.at + MemberSet::ENCODED].copy_from_slice(&bytes);
        self.at += MemberSet::ENCODED;
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn chunk<const N: usize>(&mut self) -> Result<&[u8; N], InvalidPacket> {
        let chunk = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk());
        let len = HEADER_SIZE + self.bytes.len();
        let chunk = chunk.ok_or(InvalidPacket::Short { len, needed: HEADER_SIZE + self.at + N })?;
        self.at += N;
        Ok(chunk)
    }

    fn take(&mut self) -> Result<u64, InvalidPacket> {
        self.chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }

    fn take_token(&mut self) -> Result<Token, InvalidPacket> {
        Ok(Token { view: self.take()?, count: self.take()? })
    }

    fn take_set(&mut self, members: usize) -> Result<MemberSet, InvalidPacket> {
        let bytes = self.chunk()?;
        MemberSet::decode(bytes, members).ok_or(InvalidPacket::Member(members as u16))
    }
}
