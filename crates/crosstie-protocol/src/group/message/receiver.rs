//! The receiving half of a channel: a part of the receive buffer for each sender, and the number that each sender's next packet has.
//!
//! ```text
//!   places of one sender    | taken | released | taken | held |  free  |  free  |
//!                            ^released                  ^expected                ^limit = released + share
//! ```
//!
//! Each sender has a *share* of places, so that no sender takes the room of another one. It may send packets below its *limit*, which
//! ACK and RESUME tell it (credit). A sender that keeps to it is never refused. The limit rises when the application has released half of the share, or
//! earlier when nothing else happens ([`Receiver::return_credit`]): a sender that gets room for one packet at a time costs one RESUME for each.
//!
//! A packet with the expected number is stored, or refused with a NACK if it has no place. While a refused packet is awaited,
//! later packets of its sender are discarded without an answer (RHiNET §5.1).
//!
//! A gap in the numbers is a lost packet. Packets behind it are held in their places, and a NACK names the missing numbers.
//! Each is named again when it is still missing and
//! - a later packet comes that was sent after the sender had reacted (its `attempt` is newer): the repeated packet was lost, too; or
//! - `ack_every` more packets were held: the NACK was lost. A sender that did react recognises this by `attempt`.
//!
//! Packets that have no place are not held: the gap is then refused as a full buffer is, once for each attempt, and the sender goes back
//! (RHiNET §5.4, "unreliable networks").

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use super::super::member::MemberId;
use super::super::packet::{Header, PacketKind, flags};
use super::options::{OnGap, OnRefusal, Options};
use super::parts::{JoinError, Joiner};
use super::rank;

/// The place of a packet in the receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Names the packet: its sender and its number.
    pub number: u64,
    /// Where the place starts in the buffer. It has room for an MTU.
    pub offset: u32,
}

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
    /// Ack and Resume: the limit, below which there is room for packets. Nack with [`NACK_MISSING`]: bit `i` is set if number
    /// `seq + 1 + i` is missing, too.
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
    /// RESUMEs: a sender that had no room has some again.
    pub resumes: u64,
}

/// What is in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Free,
    /// A packet that came before a missing one.
    Held {
        flags: u8,
        aux: u32,
        len: u32,
    },
    /// A packet that the application has.
    Taken,
    /// The application has released it, but not the packets before it.
    Released,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Source {
    expected: u32,
    /// All packets below this number were released. Its place is `first`.
    released: u32,
    first: u32,
    /// The limit that the sender was told. At first: what it assumes if it has the same options.
    told: u32,
    is_told: bool,
    /// Accepted since the last acknowledgement.
    unacked: u32,
    /// In `due`, in `lazy` and in `starved`.
    is_due: bool,
    is_lazy: bool,
    is_starved: bool,
    /// A NACK is to be sent / was sent for `expected`, for this attempt.
    nack_due: bool,
    nack_gap: bool,
    nacked: Option<u8>,
    /// Packets that came before a missing one; and what of the missing numbers the sender was told.
    held: u32,
    gaps: Gaps,
    resume_due: bool,
    /// The limit does not rise: the application has not taken what its packets made up.
    is_full: bool,
    is_gone: bool,
    joiner: Joiner,
}

impl Source {
    /// The limit that it could be told.
    fn limit(&self, share: u32) -> u32 {
        if self.is_full { self.told } else { self.released.wrapping_add(share) }
    }

    /// How many packets more than it was told it could send.
    fn gain(&self, share: u32) -> u32 {
        self.limit(share).wrapping_sub(self.told)
    }

    /// Whether it has used up what it was told.
    fn is_out_of_credit(&self) -> bool {
        is_at_least(self.expected, self.told)
    }
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

/// Receive buffer and expected numbers of one channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    me: MemberId,
    mtu: u32,
    max_message: u32,
    ack_every: u32,
    on_refusal: OnRefusal,
    on_gap: OnGap,
    /// Places of each sender.
    share: u32,
    places: Box<[Place]>,
    in_use: u32,
    sources: Box<[Source]>,
    /// Sources that get an answer now; and those that get one when the driver has nothing better to do.
    due: VecDeque<MemberId>,
    lazy: VecDeque<MemberId>,
    /// Sources without credit that have room for a few packets again.
    starved: VecDeque<MemberId>,
    counters: ReceiveCounters,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::super::tests::BrokenRule>,
}

impl Receiver {
    pub(super) fn new(options: &Options, me: MemberId, members: usize) -> Self {
        let share = options.receive_share(members);
        let source = Source {
            expected: 0,
            released: 0,
            first: 0,
            told: share,
            is_told: false,
            unacked: 0,
            is_due: false,
            is_lazy: false,
            is_starved: false,
            nack_due: false,
            nack_gap: false,
            nacked: None,
            held: 0,
            gaps: Gaps::NONE,
            resume_due: false,
            is_full: false,
            is_gone: false,
            joiner: Joiner::default(),
        };
        Receiver {
            me,
            mtu: options.mtu,
            max_message: options.max_message,
            ack_every: options.ack_every.min(share.div_ceil(2)),
            on_refusal: options.on_refusal,
            on_gap: options.on_gap,
            share,
            places: (0..Options::peers(members) * share).map(|_| Place::Free).collect(),
            in_use: 0,
            sources: (0..members).map(|_| source).collect(),
            due: VecDeque::with_capacity(members),
            lazy: VecDeque::with_capacity(members),
            starved: VecDeque::with_capacity(members),
            counters: ReceiveCounters::default(),
            #[cfg(test)]
            broken_rule: None,
        }
    }

    /// Decides about a data packet with a body of `len` bytes.
    #[inline]
    pub fn accept(&mut self, header: &Header, len: u32) -> Result<Verdict, JoinError> {
        let skips_gaps = rule_broken!(self, AcceptsBehindAGap);
        let source = &mut self.sources[header.sender.index()];
        if skips_gaps && header.seq.wrapping_sub(source.expected) < 8 {
            source.expected = header.seq;
        }
        if header.seq != source.expected {
            return Ok(self.accept_unexpected(header, len));
        }
        let (offset, total) = source.joiner.check(header.flags, header.aux, len, self.max_message)?;
        if !has_place(source, self.share, header.seq) {
            self.refuse(header);
            return Ok(Verdict::Refused);
        }
        source.joiner.apply(offset, total, len);
        source.expected = source.expected.wrapping_add(1);
        source.nacked = None;
        source.nack_due = false;
        source.unacked += 1;
        let is_out_of_credit = source.expected == source.told;
        if source.unacked >= self.ack_every || header.flags & flags::ACK_NOW != 0 {
            self.answer(header.sender);
        } else if !source.is_lazy {
            source.is_lazy = true;
            self.lazy.push_back(header.sender);
        }
        self.counters.packets += 1;
        let entry = self.put(header.sender, header.seq, Place::Taken);
        if is_out_of_credit {
            self.offer_credit(header.sender);
        }
        Ok(Verdict::Accepted { entry, offset, total })
    }

    /// The next packet of this sender that was held, if its turn has come. Call it after [`Verdict::Accepted`] until it returns `None`.
    #[inline]
    pub fn next_held(&mut self, from: MemberId) -> Result<Option<Next>, JoinError> {
        if self.sources[from.index()].held == 0 {
            return Ok(None);
        }
        self.take_held(from)
    }

    /// Frees the place of a packet. Packets are freed in any order. Returns `false` if the place is not in use.
    #[inline]
    pub fn release(&mut self, entry: u64) -> bool {
        let (from, seq) = ((entry >> 32) as usize, entry as u32);
        let Some(source) = self.sources.get_mut(from) else { return false };
        let from = MemberId::new(from);
        if seq.wrapping_sub(source.released) >= self.share {
            return false;
        }
        let base = rank(self.me, from) * self.share;
        let place = &mut self.places[(base + position(source, self.share, seq)) as usize];
        if *place != Place::Taken {
            return false;
        }
        *place = Place::Released;
        self.in_use -= 1;
        while self.places[(base + source.first) as usize] == Place::Released {
            self.places[(base + source.first) as usize] = Place::Free;
            source.released = source.released.wrapping_add(1);
            source.first = if source.first + 1 == self.share { 0 } else { source.first + 1 };
        }
        self.offer_credit(from);
        true
    }

    /// Whether the limit of this sender stays where it is although places are free: the driver has joined packets of it to more bytes of
    /// messages than it keeps for an application that does not take them.
    pub fn set_full(&mut self, from: MemberId, is_full: bool) {
        self.sources[from.index()].is_full = is_full;
        self.offer_credit(from);
    }

    /// Tells senders without credit about every place that is free, also where it is only a few. The driver calls it before it sleeps.
    #[inline]
    pub fn return_credit(&mut self) {
        while let Some(from) = self.starved.pop_front() {
            let source = &mut self.sources[from.index()];
            source.is_starved = false;
            if source.is_out_of_credit() && source.gain(self.share) > 0 {
                source.resume_due = true;
                self.answer(from);
            }
        }
    }

    /// Asks a sender to send everything again that was not acknowledged: the driver has dropped packets of it, because it had not opened the
    /// channel.
    pub fn ask_again(&mut self, from: MemberId) {
        let source = &mut self.sources[from.index()];
        (source.nack_due, source.nack_gap) = (true, true);
        self.answer(from);
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

    /// The `ack` field of a data packet to `to`. The packet then counts as acknowledgement, unless there is a limit to tell.
    #[inline]
    pub fn piggyback(&mut self, to: MemberId) -> u32 {
        let share = self.share;
        let source = &mut self.sources[to.index()];
        if source.is_told && source.gain(share) < share.div_ceil(2) && !source.is_out_of_credit() {
            source.unacked = 0;
        }
        source.expected
    }

    /// The expected number of a sender.
    pub fn expected(&self, from: MemberId) -> u32 {
        self.sources[from.index()].expected
    }

    /// The sender is dead: nothing is sent to it any more. Packets that were accepted stay; those that were held are gone.
    pub fn drop_source(&mut self, from: MemberId) {
        self.drop_held(from);
        self.starved.retain(|waiting| *waiting != from);
        self.due.retain(|waiting| *waiting != from);
        self.lazy.retain(|waiting| *waiting != from);
        let source = &mut self.sources[from.index()];
        source.unacked = 0;
        (source.nack_due, source.resume_due) = (false, false);
        (source.is_due, source.is_lazy, source.is_starved) = (false, false, false);
        source.is_gone = true;
    }

    /// Packets in the receive buffer.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Packets of each sender that the receive buffer has room for.
    pub fn share(&self) -> u32 {
        self.share
    }

    /// What the receiver has done.
    pub fn counters(&self) -> &ReceiveCounters {
        &self.counters
    }

    /// Puts a packet into its place.
    #[inline]
    fn put(&mut self, from: MemberId, seq: u32, content: Place) -> Entry {
        let source = &self.sources[from.index()];
        let index = rank(self.me, from) * self.share + position(source, self.share, seq);
        self.places[index as usize] = content;
        self.in_use += 1;
        Entry { number: u64::from(from.bits()) << 32 | u64::from(seq), offset: index * self.mtu }
    }

    /// What was held of number `seq`, which is at least the expected one.
    #[inline]
    fn held(&self, from: MemberId, seq: u32) -> Option<(u8, u32, u32)> {
        let source = &self.sources[from.index()];
        if seq.wrapping_sub(source.released) >= self.share {
            return None;
        }
        let index = rank(self.me, from) * self.share + position(source, self.share, seq);
        match self.places[index as usize] {
            Place::Held { flags, aux, len } => Some((flags, aux, len)),
            _ => None,
        }
    }

    #[cold]
    fn accept_unexpected(&mut self, header: &Header, len: u32) -> Verdict {
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
        if self.on_gap == OnGap::Selective && has_place(source, self.share, header.seq) {
            if self.held(header.sender, header.seq).is_some() {
                self.counters.duplicates += 1;
                self.reveal_gaps(header, false);
                return Verdict::Duplicate;
            }
            return self.hold(header, len);
        }
        self.counters.discarded += 1;
        let source = &mut self.sources[header.sender.index()];
        source.nacked = Some(header.attempt);
        (source.nack_due, source.nack_gap) = (true, true);
        self.answer(header.sender);
        Verdict::Discarded
    }

    fn hold(&mut self, header: &Header, len: u32) -> Verdict {
        let place = Place::Held { flags: header.flags, aux: header.aux, len };
        let entry = self.put(header.sender, header.seq, place);
        let source = &mut self.sources[header.sender.index()];
        let is_first = source.held == 0;
        source.held += 1;
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
        let expected = self.sources[from.index()].expected;
        let ahead = if too_early { 0..8 } else { 0..1 };
        let Some((seq, (flags, aux, len))) = ahead
            .map(|ahead| expected.wrapping_add(ahead))
            .find_map(|seq| self.held(from, seq).map(|packet| (seq, packet)))
        else {
            return Ok(None);
        };
        self.in_use -= 1;
        let source = &mut self.sources[from.index()];
        source.held -= 1;
        let index = rank(self.me, from) * self.share + position(source, self.share, seq);
        self.places[index as usize] = Place::Free;
        let (offset, total) = source.joiner.check(flags, aux, len, self.max_message)?;
        source.joiner.apply(offset, total, len);
        source.expected = source.expected.wrapping_add(1);
        source.unacked += 1;
        let is_out_of_credit = source.expected == source.told;
        self.counters.packets += 1;
        if source.unacked >= self.ack_every {
            self.answer(from);
        }
        let entry = self.put(from, seq, Place::Taken);
        if is_out_of_credit {
            self.offer_credit(from);
        }
        Ok(Some(Next { entry, len, flags, offset, total }))
    }

    /// Frees the places of the packets that are held: their sender is dead.
    fn drop_held(&mut self, from: MemberId) {
        let base = (rank(self.me, from) * self.share) as usize;
        for place in self.places.get_mut(base..base + self.share as usize).into_iter().flatten() {
            if matches!(place, Place::Held { .. }) {
                *place = Place::Free;
                self.in_use -= 1;
                self.counters.discarded += 1;
            }
        }
        let source = &mut self.sources[from.index()];
        source.held = 0;
        source.gaps = Gaps::NONE;
    }

    #[cold]
    fn refuse(&mut self, header: &Header) {
        self.counters.refused += 1;
        let source = &mut self.sources[header.sender.index()];
        // The refusal tells the sender that it has no room.
        (source.told, source.is_told) = (source.expected, true);
        if is_newer(header.attempt, source.nacked) {
            source.nacked = Some(header.attempt);
            (source.nack_due, source.nack_gap) = (true, false);
            self.answer(header.sender);
        }
        self.offer_credit(header.sender);
    }

    /// A sender may have more room than it was told: tells it, if that is worth a packet now.
    #[inline]
    fn offer_credit(&mut self, from: MemberId) {
        let share = self.share;
        let source = &mut self.sources[from.index()];
        let gain = source.gain(share);
        if gain == 0 || self.on_refusal == OnRefusal::Retry || source.is_gone {
            return;
        }
        let is_much = gain >= share.div_ceil(2);
        if source.is_out_of_credit() {
            self.resume(from, is_much);
        } else if is_much && source.told.wrapping_sub(source.expected) <= share / 2 {
            source.unacked = source.unacked.max(1);
            self.answer(from);
        }
    }

    #[cold]
    fn resume(&mut self, from: MemberId, now: bool) {
        let forgets = rule_broken!(self, ForgetsToResume);
        let source = &mut self.sources[from.index()];
        if now && !forgets {
            source.resume_due = true;
            self.answer(from);
        } else if !source.is_starved && !forgets {
            source.is_starved = true;
            self.starved.push_back(from);
        }
    }

    fn answer(&mut self, to: MemberId) {
        let source = &mut self.sources[to.index()];
        if !source.is_due && !source.is_gone {
            source.is_due = true;
            self.due.push_back(to);
        }
    }

    fn take_answer(&mut self, idle: bool) -> Option<Answer> {
        while let Some(to) = self.due.pop_front() {
            let ack = self.sources[to.index()].expected;
            let mut answer =
                Answer { to, kind: PacketKind::Nack, flags: 0, attempt: 0, seq: ack, ack, aux: 0 };
            let source = &mut self.sources[to.index()];
            if source.nack_due {
                source.nack_due = false;
                answer.flags = u8::from(source.nack_gap) * NACK_GAP;
                answer.attempt = source.nacked.unwrap_or(0);
                self.counters.nacks += 1;
            } else if source.gaps.due
                && let Some((seq, aux)) = self.name_missing(to)
            {
                let attempt = self.sources[to.index()].gaps.attempt;
                answer = Answer { flags: NACK_MISSING, attempt, seq, aux, ..answer };
                self.counters.nacks += 1;
            } else {
                let source = &mut self.sources[to.index()];
                if source.resume_due {
                    source.resume_due = false;
                    answer.kind = PacketKind::Resume;
                    // All there is, also if it is little.
                    (source.told, source.is_told) = (source.limit(self.share), true);
                    answer.aux = source.told;
                    self.counters.resumes += 1;
                } else if source.unacked > 0 {
                    answer.kind = PacketKind::Ack;
                    answer.aux = tell_limit(source, self.share);
                    self.counters.acks += 1;
                } else {
                    source.is_due = false;
                    continue;
                }
            }
            let source = &mut self.sources[to.index()];
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
                let ack = source.expected;
                let aux = tell_limit(source, self.share);
                return Some(Answer { to, kind: PacketKind::Ack, flags: 0, attempt: 0, seq: ack, ack, aux });
            }
        }
        None
    }

    /// The first number that is missing and to be named, and which of the numbers behind it are missing, too. Numbers that do not fit
    /// stay to be named.
    fn name_missing(&mut self, from: MemberId) -> Option<(u32, u32)> {
        let source = &mut self.sources[from.index()];
        let expected = source.expected;
        let ahead = |number: u32| {
            let ahead = number.wrapping_sub(expected);
            if ahead > u32::MAX / 2 { 0 } else { ahead }
        };
        source.gaps.due = false;
        let (start, to) = (ahead(source.gaps.from), ahead(source.gaps.to));
        let (mut first, mut bits) = (None, 0u32);
        for at in start..to {
            if self.held(from, expected.wrapping_add(at)).is_some() {
                continue;
            }
            match first {
                None => first = Some(at),
                Some(first) if at - first <= NAMED => bits |= 1 << (at - first - 1),
                Some(_) => {
                    let gaps = &mut self.sources[from.index()].gaps;
                    (gaps.from, gaps.due) = (expected.wrapping_add(at), true);
                    break;
                }
            }
        }
        first.map(|first| (expected.wrapping_add(first), bits))
    }
}

#[cfg(test)]
impl Receiver {
    pub(super) fn forget_counters(&mut self) {
        self.counters = ReceiveCounters::default();
    }
}

/// Whether packet `seq`, which is at least the expected one, has a place.
#[inline]
fn has_place(source: &Source, share: u32, seq: u32) -> bool {
    seq.wrapping_sub(source.released) < share && (!source.is_full || !is_at_least(seq, source.told))
}

/// The place of packet `seq` among those of its sender. It is at most `share` ahead of the first that was not released.
#[inline]
fn position(source: &Source, share: u32, seq: u32) -> u32 {
    let at = source.first + seq.wrapping_sub(source.released);
    if at >= share { at - share } else { at }
}

/// The limit for an acknowledgement. It rises in steps of half of the share: a sender that waits for room then gets some worth a packet.
#[inline]
fn tell_limit(source: &mut Source, share: u32) -> u32 {
    if source.gain(share) >= share.div_ceil(2) {
        source.told = source.limit(share);
    }
    source.is_told = true;
    source.told
}

/// Whether number `a` is `b` or comes after it.
#[inline]
fn is_at_least(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) <= u32::MAX / 2
}

/// Whether `attempt` is later than the one that was refused last.
fn is_newer(attempt: u8, refused: Option<u8>) -> bool {
    refused.is_none_or(|refused| (attempt.wrapping_sub(refused) as i8) > 0)
}
