//! The receiving half of a channel: receive buffer, and the expected number of each sender.
//!
//! A packet with the expected number is stored, or refused with a NACK if there is no room. While a refused packet is awaited,
//! later packets of its sender are discarded without an answer (RHiNET §5.1). A gap in the numbers is a lost packet: it is
//! refused in the same way, once for each attempt of the sender (RHiNET §5.4, "unreliable networks").

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use super::super::member::MemberId;
use super::super::packet::{Header, PacketKind, flags};
use super::buffer_ring::{BufferRing, Entry};
use super::options::{OnRefusal, Options};
use super::parts::{JoinError, Joiner};

/// What became of a data packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The packet is the next one of its sender: store it and hand it to the application.
    Accepted {
        /// The place in the receive buffer. [`Receiver::release`] frees it.
        entry: Entry,
        /// Where the packet belongs in its message.
        offset: u32,
        /// Bytes of the message.
        total: u32,
    },
    /// There is no room; the sender will send it again.
    Refused,
    /// The packet arrived before.
    Duplicate,
    /// A packet before this one is missing; the sender will send both again.
    Discarded,
}

/// An answer to send: the fields of its header that differ from packet to packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Answer {
    /// The receiver of the answer.
    pub to: MemberId,
    /// Ack, Nack or Resume.
    pub kind: PacketKind,
    /// Nack: [`NACK_GAP`] if a packet was missed, 0 if there is no room.
    pub flags: u8,
    /// Nack: the attempt that is refused.
    pub attempt: u8,
    /// The expected number, in `seq` and `ack` of the header.
    pub ack: u32,
}

/// The flag of a NACK for a missed packet.
pub const NACK_GAP: u8 = 1;

/// What the receiver has done. Exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ReceiveCounters {
    /// Packets accepted.
    pub packets: u64,
    /// Packets refused for lack of room.
    pub refused: u64,
    /// Packets that came a second time.
    pub duplicates: u64,
    /// Packets behind a missing one.
    pub discarded: u64,
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
    resume_due: bool,
    /// Waits for room of this many bytes, plus one. Zero: does not wait.
    wanted: u32,
    /// In `starved`.
    is_starved: bool,
    joiner: Joiner,
}

/// Receive buffer and expected numbers of one channel..
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    max_message: u32,
    ack_every: u32,
    on_refusal: OnRefusal,
    ring: BufferRing,
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
            resume_due: false,
            wanted: 0,
            is_starved: false,
            joiner: Joiner::default(),
        };
        Receiver {
            max_message: options.max_message,
            ack_every: options.ack_every,
            on_refusal: options.on_refusal,
            ring: BufferRing::new(options.receive_buffer as usize, options.receive_table as usize),
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
            return Ok(self.accept_unexpected(header));
        }
        let (offset, total) = source.joiner.check(header.flags, header.aux, len, self.max_message)?;
        let Some(entry) = self.ring.take(space as usize) else {
            self.refuse(header, space);
            return Ok(Verdict::Refused);
        };
        source.joiner.apply(offset, total, len);
        source.expected = source.expected.wrapping_add(1);
        source.nacked = None;
        source.nack_due = false;
        source.wanted = 0;
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

    /// The sender is dead: nothing is sent to it any more. Packets that were accepted stay.
    pub fn drop_source(&mut self, from: MemberId) {
        let source = &mut self.sources[from.index()];
        source.unacked = 0;
        (source.nack_due, source.resume_due) = (false, false);
        source.wanted = 0;
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
    fn accept_unexpected(&mut self, header: &Header) -> Verdict {
        let source = &mut self.sources[header.sender.index()];
        let ahead = header.seq.wrapping_sub(source.expected);
        if ahead > u32::MAX / 2 {
            self.counters.duplicates += 1;
            // The acknowledgement may have been lost.
            source.unacked = source.unacked.max(1);
            self.answer(header.sender);
            return Verdict::Duplicate;
        }
        self.counters.discarded += 1;
        if is_newer(header.attempt, source.nacked) {
            source.nacked = Some(header.attempt);
            (source.nack_due, source.nack_gap) = (true, true);
            self.answer(header.sender);
        }
        Verdict::Discarded
    }

    #[cold]
    fn refuse(&mut self, header: &Header, space: u32) {
        self.counters.refused += 1;
        let source = &mut self.sources[header.sender.index()];
        if is_newer(header.attempt, source.nacked) {
            source.nacked = Some(header.attempt);
            (source.nack_due, source.nack_gap) = (true, false);
            self.answer(header.sender);
        }
        let source = &mut self.sources[header.sender.index()];
        if self.on_refusal == OnRefusal::WaitForRequest {
            source.wanted = space + 1;
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
        while let Some(&front) = self.starved.front() {
            let source = &mut self.sources[front.index()];
            if source.wanted != 0 {
                if !enough || !self.ring.has_room(source.wanted as usize - 1) {
                    return;
                }
                source.wanted = 0;
                source.is_starved = false;
                source.resume_due = true;
                self.starved.pop_front();
                self.answer(front);
                // One at a time: the room of one entry is not promised twice.
                return;
            }
            source.is_starved = false;
            self.starved.pop_front();
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
            let (kind, flags, attempt) = if source.nack_due {
                source.nack_due = false;
                self.counters.nacks += 1;
                (PacketKind::Nack, u8::from(source.nack_gap) * NACK_GAP, source.nacked.unwrap_or(0))
            } else if source.resume_due {
                source.resume_due = false;
                self.counters.resumes += 1;
                (PacketKind::Resume, 0, 0)
            } else if source.unacked > 0 {
                self.counters.acks += 1;
                (PacketKind::Ack, 0, 0)
            } else {
                source.is_due = false;
                continue;
            };
            source.unacked = 0;
            if source.resume_due {
                self.due.push_front(to);
            } else {
                source.is_due = false;
            }
            return Some(Answer { to, kind, flags, attempt, ack });
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
                    ack: source.expected,
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

/// Whether `attempt` is later than the one that was refused last.
fn is_newer(attempt: u8, refused: Option<u8>) -> bool {
    refused.is_none_or(|refused| (attempt.wrapping_sub(refused) as i8) > 0)
}
