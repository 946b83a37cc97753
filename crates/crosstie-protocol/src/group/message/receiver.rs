//! The receiving half of a channel: receive buffer, and the expected number of each sender.
//!
//! A packet with the expected number is stored, or refused with a NACK if there is no room. While a refused packet is awaited,
//! later packets of its sender are discarded without an answer (RHiNET §5.1).
//!
//! A gap in the numbers is a lost packet. Packets behind it are held in the receive buffer, and a NACK names the missing numbers.
//! Each is named again when it is still missing and
//! - a later packet comes that was sent after the sender had reacted (its `attempt` is newer): the repeated packet was lost, too; or
//! - `ack_every` more packets were held: the NACK was lost. A sender that did react recognises this by `attempt`.
//!
//! Packets are held only while half of the receive buffer is free, so that they never take the room of packets that can be
//! delivered. Otherwise a gap is refused as a full buffer is, once for each attempt: the sender goes back (RHiNET §5.4, "unreliable
//! networks").

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use super::super::member::MemberId;
use super::super::packet::{Header, PacketKind, flags};
use super::buffer_ring::{BufferRing, Entry};
use super::held::{Chain, HeldPacket, HeldTable};
use super::options::{OnGap, OnRefusal, Options};
use super::parts::{JoinError, Joiner};

/// What became of a data packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The packet is the next one of its sender: store it and hand it to the application. Then call [`Receiver::next_held`].
    Accepted {
        /// The place in the receive buffer. [`Receiver::release`] frees it.
        entry: Entry,
        /// Where the packet belongs in its message.
        offset: u32,
        /// Bytes of the message.
        total: u32,
    },
    /// A packet before this one is missing: store it. [`Receiver::next_held`] returns it when its turn has come.
    Held {
        /// The place in the receive buffer.
        entry: Entry,
    },
    /// There is no room; the sender will send it again.
    Refused,
    /// The packet arrived before.
    Duplicate,
    /// A packet before this one is missing; the sender will send both again.
    Discarded,
}

/// A packet that was held and is the next one of its sender now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Next {
    /// The place in the receive buffer. [`Receiver::release`] frees it.
    pub entry: Entry,
    /// Bytes of its body.
    pub len: u32,
    /// The flags of its header.
    pub flags: u8,
    /// Where the packet belongs in its message.
    pub offset: u32,
    /// Bytes of the message.
    pub total: u32,
}

/// An answer to send: the fields of its header that differ from packet to packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Answer {
    /// The receiver of the answer.
    pub to: MemberId,
    /// Ack, Nack or Resume.
    pub kind: PacketKind,
    /// Nack: 0 if there is no room, [`NACK_GAP`] or [`NACK_MISSING`].
    pub flags: u8,
    /// Nack: the attempt that is refused.
    pub attempt: u8,
    /// The refused number, or the first missing one. Else the same as `ack`.
    pub seq: u32,
    /// The expected number: all below have arrived.
    pub ack: u32,
    /// Nack with [`NACK_MISSING`]: bit `i` is set if number `seq + 1 + i` is missing, too.
    pub aux: u32,
}

/// The flag of a NACK for a missed packet: everything from its number on is to be sent again.
pub const NACK_GAP: u8 = 1;
/// The flag of a NACK that names missing packets: only these are to be sent again.
pub const NACK_MISSING: u8 = 2;
/// Numbers behind the first that a NACK can name.
const NAMED: u32 = u32::BITS;

/// What the receiver has done. Exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ReceiveCounters {
    /// Packets accepted.
    pub packets: u64,
    /// Packets refused for lack of room.
    pub refused: u64,
    /// Packets that came a second time.
    pub duplicates: u64,
    /// Packets behind a missing one that were discarded.
    pub discarded: u64,
    /// Packets behind a missing one that were kept, at least for a while.
    pub held: u64,
    /// ACKs sent as packets of their own.
    pub acks: u64,
    /// NACKs sent.
    pub nacks: u64,
    /// Requests to send a refused message again.
    pub resumes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Source {
    expected: u32,
    /// Accepted since the last acknowledgement.
    unacked: u32,
    /// In `due` and in `lazy`.
    is_due: bool,
    is_lazy: bool,
    /// A NACK is to be sent / was sent for `expected`, for this attempt.
    nack_due: bool,
    nack_gap: bool,
    nacked: Option<u8>,
    /// Packets that came before a missing one; and what of the missing numbers the sender was told.
    held: Chain,
    gaps: Gaps,
    resume_due: bool,
    /// Waits for room of this many bytes.
    wanted: Option<u32>,
    /// Its packets are refused: the application has not taken what they made up.
    is_full: bool,
    /// In `starved`.
    is_starved: bool,
    joiner: Joiner,
}

/// Which missing numbers a sender was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Gaps {
    /// A NACK is to be sent that names what is missing from `from` on and below `to`.
    due: bool,
    from: u32,
    to: u32,
    /// Missing numbers below this one were named, or are to be named now.
    named_to: u32,
    /// The newest attempt of a packet that came behind a gap.
    attempt: u8,
    /// Packets held since numbers were named.
    held: u32,
}

impl Gaps {
    const NONE: Gaps = Gaps { due: false, from: 0, to: 0, named_to: 0, attempt: 0, held: 0 };

    /// Packet `seq` came and number `expected`, below it, is missing. Returns whether there is something to name.
    fn reveal(&mut self, expected: u32, seq: u32, attempt: u8, is_first: bool, repeat_after: u32) -> bool {
        let ahead = |number: u32| {
            let ahead = number.wrapping_sub(expected);
            if ahead > u32::MAX / 2 { 0 } else { ahead }
        };
        let again = is_first || is_newer(attempt, Some(self.attempt)) || self.held >= repeat_after;
        let from = if again { 0 } else { ahead(self.named_to) };
        if is_first || is_newer(attempt, Some(self.attempt)) {
            self.attempt = attempt;
        }
        let to = ahead(seq);
        let named_to = if is_first { 0 } else { ahead(self.named_to) };
        // This packet itself is not missing.
        self.named_to = expected.wrapping_add(named_to.max(to + 1));
        if from >= to {
            return false;
        }
        self.held = 0;
        let (from, to) =
            if self.due { (from.min(ahead(self.from)), to.max(ahead(self.to))) } else { (from, to) };
        (self.from, self.to) = (expected.wrapping_add(from), expected.wrapping_add(to));
        self.due = true;
        true
    }
}

/// Receive buffer and expected numbers of one channel..
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    max_message: u32,
    ack_every: u32,
    on_refusal: OnRefusal,
    on_gap: OnGap,
    /// Packets that are held are fewer than this ahead of the expected one.
    window: u32,
    ring: BufferRing,
    held: HeldTable,
    sources: Box<[Source]>,
    /// Sources that get an answer now; and those that get one when the driver has nothing better to do.
    due: VecDeque<MemberId>,
    lazy: VecDeque<MemberId>,
    /// Sources that wait for room, in the order in which they were refused.
    starved: VecDeque<MemberId>,
    counters: ReceiveCounters,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::super::tests::BrokenRule>,
}

impl Receiver {
    pub(super) fn new(options: &Options, members: usize) -> Self {
        let source = Source {
            expected: 0,
            unacked: 0,
            is_due: false,
            is_lazy: false,
            nack_due: false,
            nack_gap: false,
            nacked: None,
            held: Chain::EMPTY,
            gaps: Gaps::NONE,
            resume_due: false,
            wanted: None,
            is_full: false,
            is_starved: false,
            joiner: Joiner::default(),
        };
        let ring = BufferRing::new(options.receive_buffer as usize, options.receive_table as usize);
        Receiver {
            max_message: options.max_message,
            ack_every: options.ack_every,
            on_refusal: options.on_refusal,
            on_gap: options.on_gap,
            window: options.window,
            held: HeldTable::new(ring.entries()),
            ring,
            sources: (0..members).map(|_| source).collect(),
            due: VecDeque::with_capacity(members),
            lazy: VecDeque::with_capacity(members),
            starved: VecDeque::with_capacity(members),
            counters: ReceiveCounters::default(),
            #[cfg(test)]
            broken_rule: None,
        }
    }

    /// Decides about a data packet with a body of `len` bytes, which takes `space` bytes of the receive buffer. (A driver whose
    /// packets already lie in buffers of equal size gives the same `space` for all of them.)
    #[inline]
    pub fn accept(&mut self, header: &Header, len: u32, space: u32) -> Result<Verdict, JoinError> {
        let skips_gaps = rule_broken!(self, AcceptsBehindAGap);
        let source = &mut self.sources[header.sender.index()];
        if skips_gaps && header.seq.wrapping_sub(source.expected) < 8 {
            source.expected = header.seq;
        }
        if header.seq != source.expected {
            return Ok(self.accept_unexpected(header, len, space));
        }
        let (offset, total) = source.joiner.check(header.flags, header.aux, len, self.max_message)?;
        let entry = if source.is_full { None } else { self.ring.take(space as usize) };
        let Some(entry) = entry else {
            self.refuse(header, space);
            return Ok(Verdict::Refused);
        };
        source.joiner.apply(offset, total, len);
        source.expected = source.expected.wrapping_add(1);
        source.nacked = None;
        source.nack_due = false;
        source.wanted = None;
        source.unacked += 1;
        if source.unacked >= self.ack_every || header.flags & flags::ACK_NOW != 0 {
            self.answer(header.sender);
        } else if !source.is_lazy {
            source.is_lazy = true;
            self.lazy.push_back(header.sender);
        }
        self.counters.packets += 1;
        Ok(Verdict::Accepted { entry, offset, total })
    }

    /// The next packet of this sender that was held, if its turn has come. Call it after [`Verdict::Accepted`] until it returns `None`.
    #[inline]
    pub fn next_held(&mut self, from: MemberId) -> Result<Option<Next>, JoinError> {
        if self.sources[from.index()].held.is_empty() {
            return Ok(None);
        }
        self.take_held(from)
    }

    /// Frees the place of a packet. Sources that wait for room are asked to send again. Returns `false` if the entry is not in
    /// use.
    #[inline]
    pub fn release(&mut self, entry: u64) -> bool {
        let freed = self.ring.free(entry);
        if !self.starved.is_empty() {
            self.resume_starved();
        }
        freed
    }

    /// Whether packets of this sender are refused although there is room: the driver has joined packets of it to more bytes of messages than
    /// it keeps for an application that does not take them. When there is room again, the sender is asked to send again.
    pub fn set_full(&mut self, from: MemberId, is_full: bool) {
        self.sources[from.index()].is_full = is_full;
        if !is_full {
            self.resume_starved();
        }
    }

    /// The next answer that is due, if any. With `idle`, also acknowledgements that could wait for more packets, or for a data
    /// packet that carries them.
    #[inline]
    pub fn next_answer(&mut self, idle: bool) -> Option<Answer> {
        if self.due.is_empty() && (!idle || self.lazy.is_empty()) {
            return None;
        }
        self.take_answer(idle)
    }

    /// The driver could not send this answer: it is due again.
    #[cold]
    pub fn put_back(&mut self, answer: &Answer) {
        let source = &mut self.sources[answer.to.index()];
        match answer.kind {
            PacketKind::Nack if answer.flags & NACK_MISSING != 0 => {
                source.gaps.to = if source.gaps.due { source.gaps.to } else { source.gaps.named_to };
                source.gaps.from = answer.seq;
                source.gaps.due = true;
                self.counters.nacks -= 1;
            }
            PacketKind::Nack => {
                source.nack_due = true;
                self.counters.nacks -= 1;
            }
            PacketKind::Resume => {
                source.resume_due = true;
                self.counters.resumes -= 1;
            }
            _ => {
                source.unacked = source.unacked.max(1);
                self.counters.acks -= 1;
            }
        }
        self.answer(answer.to);
    }

    /// The `ack` field of a data packet to `to`. The packet then counts as acknowledgement.
    #[inline]
    pub fn piggyback(&mut self, to: MemberId) -> u32 {
        let source = &mut self.sources[to.index()];
        source.unacked = 0;
        source.expected
    }

    /// The expected number of a sender.
    pub fn expected(&self, from: MemberId) -> u32 {
        self.sources[from.index()].expected
    }

    /// The sender is dead: nothing is sent to it any more. Packets that were accepted stay; those that were held are gone.
    pub fn drop_source(&mut self, from: MemberId) {
        self.drop_held(from);
        let source = &mut self.sources[from.index()];
        source.unacked = 0;
        (source.nack_due, source.resume_due) = (false, false);
        source.wanted = None;
        self.starved.retain(|waiting| *waiting != from);
        self.due.retain(|waiting| *waiting != from);
        self.lazy.retain(|waiting| *waiting != from);
        let source = &mut self.sources[from.index()];
        (source.is_due, source.is_lazy, source.is_starved) = (false, false, false);
    }

    /// Receive buffer and its table.
    pub fn buffer(&self) -> &BufferRing {
        &self.ring
    }

    /// What the receiver has done.
    pub fn counters(&self) -> &ReceiveCounters {
        &self.counters
    }

    #[cold]
    fn accept_unexpected(&mut self, header: &Header, len: u32, space: u32) -> Verdict {
        let source = &mut self.sources[header.sender.index()];
        let ahead = header.seq.wrapping_sub(source.expected);
        if ahead > u32::MAX / 2 {
            self.counters.duplicates += 1;
            // The acknowledgement may have been lost.
            source.unacked = source.unacked.max(1);
            self.answer(header.sender);
            return Verdict::Duplicate;
        }
        // While a refused packet is awaited, later ones are discarded without an answer.
        if !is_newer(header.attempt, source.nacked) {
            self.counters.discarded += 1;
            return Verdict::Discarded;
        }
        if self.on_gap == OnGap::Selective && ahead < self.window {
            if self.held.contains(&source.held, header.seq) {
                self.counters.duplicates += 1;
                self.reveal_gaps(header, false);
                return Verdict::Duplicate;
            }
            if self.ring.is_half_free()
                && let Some(entry) = self.ring.take(space as usize)
            {
                return self.hold(header, len, entry);
            }
        }
        self.counters.discarded += 1;
        source.nacked = Some(header.attempt);
        (source.nack_due, source.nack_gap) = (true, true);
        self.answer(header.sender);
        Verdict::Discarded
    }

    fn hold(&mut self, header: &Header, len: u32, entry: Entry) -> Verdict {
        let source = &mut self.sources[header.sender.index()];
        let is_first = source.held.is_empty();
        let packet = HeldPacket { seq: header.seq, flags: header.flags, aux: header.aux, len, entry };
        self.held.insert(&self.ring, &mut source.held, source.expected, packet);
        source.gaps.held += 1;
        self.counters.held += 1;
        self.reveal_gaps(header, is_first);
        Verdict::Held { entry }
    }

    /// `is_first`: nothing behind a gap is known yet.
    fn reveal_gaps(&mut self, header: &Header, is_first: bool) {
        let source = &mut self.sources[header.sender.index()];
        let expected = source.expected;
        if source.gaps.reveal(expected, header.seq, header.attempt, is_first, self.ack_every) {
            self.answer(header.sender);
        }
    }

    #[cold]
    fn take_held(&mut self, from: MemberId) -> Result<Option<Next>, JoinError> {
        let too_early = rule_broken!(self, DeliversHeldPacketsTooEarly);
        let source = &mut self.sources[from.index()];
        if self.held.first(&source.held).is_none_or(|packet| packet.seq != source.expected && !too_early) {
            return Ok(None);
        }
        let Some(HeldPacket { flags, aux, len, entry, .. }) = self.held.pop(&mut source.held) else {
            return Ok(None);
        };
        let checked = source.joiner.check(flags, aux, len, self.max_message);
        let (offset, total) = checked.inspect_err(|_| _ = self.ring.free(entry.number))?;
        source.joiner.apply(offset, total, len);
        source.expected = source.expected.wrapping_add(1);
        source.unacked += 1;
        self.counters.packets += 1;
        if source.unacked >= self.ack_every {
            self.answer(from);
        }
        Ok(Some(Next { entry, len, flags, offset, total }))
    }

    /// Frees the places of the packets that are held: the sender will send them again, or is dead.
    fn drop_held(&mut self, from: MemberId) {
        let source = &mut self.sources[from.index()];
        while let Some(packet) = self.held.pop(&mut source.held) {
            self.ring.free(packet.entry.number);
            self.counters.discarded += 1;
        }
        source.gaps = Gaps::NONE;
    }

    #[cold]
    fn refuse(&mut self, header: &Header, space: u32) {
        self.counters.refused += 1;
        // Their room may be what is missing; the sender goes back anyway.
        if !rule_broken!(self, HeldPacketsKeepTheirRoom) {
            self.drop_held(header.sender);
        }
        let source = &mut self.sources[header.sender.index()];
        if is_newer(header.attempt, source.nacked) {
            source.nacked = Some(header.attempt);
            (source.nack_due, source.nack_gap) = (true, false);
            self.answer(header.sender);
        }
        let source = &mut self.sources[header.sender.index()];
        if self.on_refusal == OnRefusal::WaitForRequest {
            source.wanted = Some(space);
            if !source.is_starved {
                source.is_starved = true;
                self.starved.push_back(header.sender);
            }
        }
    }

    #[cold]
    fn resume_starved(&mut self) {
        // Not for every single place: the sender sends a whole window again.
        let enough = self.ring.free_entries() * 4 >= self.ring.entries();
        // A sender whose messages nobody takes holds up no other one.
        let mut at = 0;
        while let Some(&from) = self.starved.get(at) {
            let source = &mut self.sources[from.index()];
            if let Some(wanted) = source.wanted {
                if source.is_full {
                    at += 1;
                    continue;
                }
                if !enough || !self.ring.has_room(wanted as usize) {
                    return;
                }
                source.wanted = None;
                source.resume_due = true;
            }
            source.is_starved = false;
            self.starved.remove(at);
            if source.resume_due {
                self.answer(from);
                // One at a time: the room of one entry is not promised twice.
                return;
            }
        }
    }

    fn answer(&mut self, to: MemberId) {
        let source = &mut self.sources[to.index()];
        if !source.is_due {
            source.is_due = true;
            self.due.push_back(to);
        }
    }

    fn take_answer(&mut self, idle: bool) -> Option<Answer> {
        while let Some(to) = self.due.pop_front() {
            let source = &mut self.sources[to.index()];
            let ack = source.expected;
            let mut answer =
                Answer { to, kind: PacketKind::Nack, flags: 0, attempt: 0, seq: ack, ack, aux: 0 };
            if source.nack_due {
                source.nack_due = false;
                answer.flags = u8::from(source.nack_gap) * NACK_GAP;
                answer.attempt = source.nacked.unwrap_or(0);
                self.counters.nacks += 1;
            } else if source.gaps.due
                && let Some((seq, aux)) = name_missing(&self.held, &source.held, &mut source.gaps, ack)
            {
                answer = Answer { flags: NACK_MISSING, attempt: source.gaps.attempt, seq, aux, ..answer };
                self.counters.nacks += 1;
            } else if source.resume_due {
                source.resume_due = false;
                answer.kind = PacketKind::Resume;
                self.counters.resumes += 1;
            } else if source.unacked > 0 {
                answer.kind = PacketKind::Ack;
                self.counters.acks += 1;
            } else {
                source.is_due = false;
                continue;
            }
            source.unacked = 0;
            if source.resume_due || source.gaps.due {
                self.due.push_front(to);
            } else {
                source.is_due = false;
            }
            return Some(answer);
        }
        while idle && let Some(to) = self.lazy.pop_front() {
            let source = &mut self.sources[to.index()];
            source.is_lazy = false;
            if source.unacked > 0 {
                source.unacked = 0;
                self.counters.acks += 1;
                return Some(Answer {
                    to,
                    kind: PacketKind::Ack,
                    flags: 0,
                    attempt: 0,
                    seq: source.expected,
                    ack: source.expected,
                    aux: 0,
                });
            }
        }
        None
    }
}

#[cfg(test)]
impl Receiver {
    pub(super) fn forget_counters(&mut self) {
        self.counters = ReceiveCounters::default();
    }
}

/// The first number that is missing and to be named, and which of the numbers behind it are missing, too. Numbers that do not fit
/// stay to be named.
fn name_missing(table: &HeldTable, held: &Chain, gaps: &mut Gaps, expected: u32) -> Option<(u32, u32)> {
    let ahead = |number: u32| {
        let ahead = number.wrapping_sub(expected);
        if ahead > u32::MAX / 2 { 0 } else { ahead }
    };
    gaps.due = false;
    let to = ahead(gaps.to);
    let mut at = ahead(gaps.from);
    let (mut first, mut bits) = (None, 0u32);
    let mut packets = table.iter(held).map(|packet| ahead(packet.seq)).peekable();
    while at < to {
        while packets.next_if(|packet| *packet < at).is_some() {}
        if packets.next_if_eq(&at).is_none() {
            match first {
                None => first = Some(at),
                Some(first) if at - first <= NAMED => bits |= 1 << (at - first - 1),
                Some(_) => {
                    gaps.from = expected.wrapping_add(at);
                    gaps.due = true;
                    break;
                }
            }
        }
        at += 1;
    }
    first.map(|first| (expected.wrapping_add(first), bits))
}

/// Whether `attempt` is later than the one that was refused last.
fn is_newer(attempt: u8, refused: Option<u8>) -> bool {
    refused.is_none_or(|refused| (attempt.wrapping_sub(refused) as i8) > 0)
}
