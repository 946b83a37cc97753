//! Completion queues, as their owner polls them.
//!
//! The poller turns entries into [`Completion`]s. They come from several sources, which it looks at in turn:
//!
//! - the lanes of connections (`lane.rs`), in which receives complete: the *hot* ones, at most [`MAX_HOT`], in every poll, all
//!   others when their writers say so (`ring/ready_set.rs`);
//! - the ring (`cq_ring.rs`), for everything else: send requests and datagrams;
//! - notices of the service thread ([`Notice`]), for receives that have no entry of their own: those of a queue pair in ERR, and those
//!   that a datagram sender had taken when it died. Notices are in private memory and take no room in the ring.
//!
//! The completions of one queue pair's sends are in order, and those of its receives. There is no order between queue pairs.
//!
//! Entries come from peers, so every field is checked against the queue pairs that use this queue.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;

use super::abandoned::is_abandoned;
use super::cq_lanes::{HotLane, MAX_HOT, Member};
use super::cq_ring::CqRing;
use super::cq_shared::{CqShared, Notice, ReturnedRecvs};
use super::error::check_limit;
use super::layout::{
    CQES_AT, CqHeader, Cqe, CqeKind, QpNum, RequestWord, ResultWord, SubjectWord, short_epoch, taker_of_qp,
};
use super::lock::locked;
use super::qp::{QpShared, RecvSource};
use super::setup::{Device, DeviceHandle};
use super::shared_recv::{SharedRecvQueue, TakenSlot};
use crate::device::InlineData;
use crate::device::{Completion, CqConfig, CqError, DeviceError, Opcode, QpState, Status};
use crate::memory::segment::SharedRef;
use crate::ring::stalled::{MAX_STALLED, StalledPositions};
use crate::wait::{self, WaitStrategy};

/// Empty polls between two looks whether a producer is stopped before its entry while later entries are there.
const POLLS_PER_HOLE_CHECK: u32 = 64;
/// Empty polls between two looks whether entries are reserved at all: this takes the cache line of `head` from the producers.
const POLLS_PER_HEAD_CHECK: u32 = 1024;
/// Polls, empty or not, between two looks at everything that has no place in lanes and ring: lanes that are never empty do not keep
/// notices, queue pairs that were added, and entries behind a stopped producer waiting.
const POLLS_PER_FULL_CHECK: u32 = 256;
/// Completions that one source gives in a row while others have some: a program that sends for every message that it receives must see
/// its sends complete as fast as its receives, or its send queue fills.
const TURNS: u8 = 16;
/// Pause instructions after the poll that reached the end of a stream of entries.
const CATCH_UP_PAUSES: u32 = 4;
/// The longest wait without such a look.
const HOLE_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The same, while an entry is reserved and not published.
const HOLE_CHECK_INTERVAL_IF_ANY: Duration = Duration::from_millis(5);

impl Device {
    pub(crate) fn create_cq(&self, config: &CqConfig) -> Result<Cq, DeviceError> {
        let device = &self.handle.device;
        check_limit("completions", config.depth, device.attr.max_cqe)?;
        // With room for `config.depth` completions beside entries of producers that do not move.
        let depth = (config.depth.max(2) + MAX_STALLED as u32).next_power_of_two();
        let memory = device.allocate(CQES_AT + u64::from(depth) * size_of::<Cqe>() as u64)?;
        let no_memory = || DeviceError::Exhausted { what: "device memory" };
        let header: SharedRef<CqHeader> =
            SharedRef::new(memory.segment(), memory.at()).ok_or_else(no_memory)?;
        header.depth.store(depth, Relaxed);
        let ring = CqRing::with_depth(memory.segment(), memory.at(), depth).ok_or_else(no_memory)?;
        let shared = CqShared::new(ring, memory);
        Ok(Cq {
            stalled: StalledPositions::new(shared.ring.depth()),
            polls: 0,
            empty_polls: 0,
            shared: Arc::new(shared),
            cursor: 0,
            qps: Vec::new(),
            hot: Vec::with_capacity(MAX_HOT),
            listed: VecDeque::new(),
            source: Source::Hot,
            turns: TURNS,
            next_hot: 0,
            notices: Vec::new(),
            seen_notices: 0,
            flushes: VecDeque::new(),
            looks_before_pause: 0,
            handle: self.handle.clone(),
        })
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub(super) shared: Arc<CqShared>,
    /// The next position to read.
    pub(super) cursor: u64,
    /// Entries of producers that do not move; they are read when they are published.
    pub(super) stalled: StalledPositions,
    pub(super) polls: u32,
    empty_polls: u32,
    /// Queue pairs by index.
    pub(super) qps: Vec<Option<Member>>,
    /// The lanes that are looked at in every poll. At most [`MAX_HOT`].
    pub(super) hot: Vec<HotLane>,
    /// Other lanes that have to be looked at, see [`LaneReader::is_listed`](super::lane_reader::LaneReader::is_listed).
    pub(super) listed: VecDeque<usize>,
    /// The source that is looked at first.
    source: Source,
    /// Completions that `source` gives before the next one is looked at first.
    turns: u8,
    /// The hot lane that is looked at first.
    next_hot: usize,
    /// Notices that are not due yet, with their positions: entries before them have not been read.
    pub(super) notices: Vec<(u64, Notice)>,
    /// How many notices were taken so far.
    pub(super) seen_notices: u32,
    /// Receives to be completed that have no entry of their own.
    pub(super) flushes: VecDeque<PendingFlush>,
    /// After so many looks that find nothing the poller pauses, see [`Cq::pause_behind_stream`]. Zero: it does not pause.
    looks_before_pause: u8,
    /// Keeps the device open.
    pub(super) handle: Arc<DeviceHandle>,
}

/// Receives that the poller completes because their sender will not.
#[derive(Debug)]
pub(super) enum PendingFlush {
    /// What is left in the lane of the connection of this epoch, and then all outstanding receives of its queue pair.
    Connection { qp: Arc<QpShared>, epoch: u64 },
    /// One receive of a shared receive queue.
    Shared { queue: Arc<SharedRecvQueue>, taken: TakenSlot, qp_num: u32, status: Status },
}

/// Where completions come from, in the order of their turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    Ring,
    Listed,
    Hot,
}

impl Source {
    fn following(self) -> Self {
        match self {
            Self::Ring => Self::Listed,
            Self::Listed => Self::Hot,
            Self::Hot => Self::Ring,
        }
    }
}

impl Cq {
    /// Takes the next completion: that of a hot lane, if it is their turn and one is there.
    #[inline(always)]
    pub(crate) fn next(&mut self, to: &mut Completion) -> Result<bool, CqError> {
        self.polls = self.polls.wrapping_add(1);
        if self.source == Source::Hot
            && (self.turns > 0 || self.have_others_nothing())
            && !self.polls.is_multiple_of(POLLS_PER_FULL_CHECK)
        {
            if self.next_of_hot(to) {
                self.turns -= 1;
                return Ok(true);
            }
            if self.is_quiet() {
                self.pause_behind_stream();
                return Ok(false);
            }
        }
        self.next_of_all(to)
    }

    /// Whether it is the hot lanes' turn again, because the other sources have nothing.
    #[inline]
    fn have_others_nothing(&mut self) -> bool {
        let nothing = self.flushes.is_empty()
            && self.stalled.is_empty()
            && !self.shared.ring.is_published(self.cursor)
            && !self.has_listed_lanes();
        if nothing {
            self.turns = TURNS;
        }
        nothing
    }

    /// Takes the next completion of a hot lane: of each in turn.
    #[inline(always)]
    fn next_of_hot(&mut self, to: &mut Completion) -> bool {
        for _ in 0..self.hot.len() {
            let at = if self.next_hot < self.hot.len() { self.next_hot } else { 0 };
            self.next_hot = at + 1;
            let HotLane { qp, lane, last_used, is_stream } = &mut self.hot[at];
            if lane.read(qp, *is_stream, to) {
                (*is_stream, *last_used) = (true, self.polls);
                // One look says that this poll has reached the end, and the next one that nothing has come meanwhile.
                self.looks_before_pause = 2;
                return true;
            }
            *is_stream = false;
        }
        false
    }

    /// Whether there is nothing outside of the hot lanes, and nothing else to do for a poll. Counts as an empty poll then.
    #[inline]
    fn is_quiet(&mut self) -> bool {
        let CqShared { ring, notices, .. } = &*self.shared;
        let polls = self.empty_polls.wrapping_add(1);
        let is_quiet = self.flushes.is_empty()
            && self.stalled.is_empty()
            && !ring.is_published(self.cursor)
            && self.notices.is_empty()
            && !self.has_listed_lanes()
            && ring.header.overrun.load(Relaxed) == 0
            && !notices.has_new(self.seen_notices)
            && !polls.is_multiple_of(POLLS_PER_HOLE_CHECK);
        if is_quiet {
            self.empty_polls = polls;
            self.turns = TURNS;
        }
        is_quiet
    }

    /// Takes the next completion of any source: of the one whose turn it is, or else of those that follow.
    #[inline(never)]
    fn next_of_all(&mut self, to: &mut Completion) -> Result<bool, CqError> {
        if self.polls.is_multiple_of(POLLS_PER_FULL_CHECK) {
            self.check_beside_traffic();
        }
        if self.turns == 0 {
            self.pass_turn();
        }
        for _ in 0..3 {
            let found = match self.source {
                Source::Ring => self.next_of_ring(to),
                Source::Listed => self.has_listed_lanes() && self.next_of_listed(to),
                Source::Hot => self.next_of_hot(to),
            };
            if found {
                self.turns -= 1;
                return Ok(true);
            }
            self.pass_turn();
        }
        self.source = Source::Hot;
        self.check_after_empty_poll()?;
        self.pause_behind_stream();
        Ok(false)
    }

    fn pass_turn(&mut self) {
        self.source = self.source.following();
        self.turns = TURNS;
    }

    /// Called after a look that has found nothing. If the poller has just caught up with a stream, another look at once would take the
    /// cache line from the producer while it writes its next entry. A response to something sent just now takes longer than the pause
    /// anyway.
    #[inline]
    fn pause_behind_stream(&mut self) {
        if self.looks_before_pause > 0 {
            self.looks_before_pause -= 1;
            if self.looks_before_pause == 0 {
                for _ in 0..CATCH_UP_PAUSES {
                    core::hint::spin_loop();
                }
            }
        }
    }

    #[inline]
    pub(super) fn has_listed_lanes(&self) -> bool {
        !self.listed.is_empty() || !self.shared.ring.header.ready.is_empty()
    }

    /// Takes the next completion that is not in a lane: from the ring, or one that a notice has announced.
    #[inline]
    fn next_of_ring(&mut self, to: &mut Completion) -> bool {
        let begin = self.cursor;
        let mut found = false;
        // Entries that are no completions. A peer that forges them faster than they are read must not keep the poller here.
        for _ in 0..=self.shared.ring.depth() {
            let entry = if !self.flushes.is_empty() {
                found = self.complete_one_flush(to);
                None
            } else if !self.stalled.is_empty()
                && let Some(late) = self.take_late_entry()
            {
                Some(late)
            } else {
                let cqe = self.shared.ring.cqes.ring(self.cursor);
                if !cqe.is_published(self.cursor) {
                    break;
                }
                self.cursor = self.cursor.wrapping_add(1);
                Some(cqe.load())
            };
            if let Some((request, subject, result)) = entry
                && let Some(completion) = self.decode(request, subject, result)
            {
                *to = completion;
                found = true;
            }
            if found {
                break;
            }
        }
        if self.cursor != begin {
            // Release, partner: the Acquire load in `CqRing::reserve`. The entries have been read.
            self.shared.ring.header.consumed.word.store(self.cursor, Release);
        }
        found
    }

    /// Checks for an overrun and for notices.
    #[inline]
    fn check_after_empty_poll(&mut self) -> Result<(), CqError> {
        if self.shared.ring.header.overrun.load(Relaxed) != 0 {
            return Err(CqError::Overrun);
        }
        self.apply_notices_if_any();
        self.empty_polls = self.empty_polls.wrapping_add(1);
        if self.empty_polls.is_multiple_of(POLLS_PER_HOLE_CHECK) {
            let is_hole = self.shared.ring.is_published(self.cursor.wrapping_add(1));
            if is_hole || !self.stalled.is_empty() || self.empty_polls.is_multiple_of(POLLS_PER_HEAD_CHECK) {
                self.pass_stalled_producers();
            }
        }
        Ok(())
    }

    /// What an empty poll looks for, for a program whose polls are never empty.
    #[cold]
    #[inline(never)]
    fn check_beside_traffic(&mut self) {
        self.apply_notices_if_any();
        self.pass_stalled_producers();
    }

    #[inline]
    pub(super) fn has_new_notices(&self) -> bool {
        self.shared.notices.has_new(self.seen_notices)
    }

    /// Takes an entry that was published after the poller had passed it.
    #[cold]
    fn take_late_entry(&mut self) -> Option<(RequestWord, SubjectWord, ResultWord)> {
        let ring = &self.shared.ring;
        let position = self.stalled.iter().find(|position| ring.is_published(*position))?;
        let entry = ring.cqes.ring(position).load();
        self.stalled.remove(position, &ring.header.stalled);
        Some(entry)
    }

    /// Passes entries that were reserved and are not published: those of producers that do not move, and those that producers left
    /// out. See [`stalled`](crate::ring::stalled). Returns whether there is something to poll.
    #[cold]
    fn pass_stalled_producers(&mut self) -> bool {
        let (shared, handle, begin) = (self.shared.clone(), self.handle.clone(), self.cursor);
        let (ring, device) = (&shared.ring, &handle.device);
        // Usually the next entry is only being written.
        let is_waiting = ring.header.head.word.load(Relaxed) != begin && !ring.is_published(begin);
        if self.stalled.is_empty() && !(is_waiting && self.stalled.has_lasted(begin)) {
            return false;
        }
        // Nobody else repairs this ring meanwhile.
        let _one_at_a_time = locked(&device.cleanup);
        let is_abandoned = |position: u64| is_abandoned(device, ring, position);
        let gone: Vec<u64> = self.stalled.iter().filter(|position| is_abandoned(*position)).collect();
        for position in gone {
            self.stalled.remove(position, &ring.header.stalled);
        }
        // Acquire, partner: the Release reservation in `reservation::reserve`.
        let reserved = ring.header.head.word.load(Acquire).wrapping_sub(self.cursor);
        // More than the ring has: a peer has overwritten `head`.
        let reserved = if reserved <= ring.depth() { reserved } else { 0 };
        for _ in 0..reserved {
            let may_pass = !ring.is_published(self.cursor)
                && (is_abandoned(self.cursor) || self.stalled.try_pass(self.cursor, &ring.header.stalled));
            if !may_pass {
                break;
            }
            self.cursor = self.cursor.wrapping_add(1);
        }
        if self.cursor != begin {
            // Release, partner: the Acquire load in `CqRing::reserve`. The stalled entries are listed.
            ring.header.consumed.word.store(self.cursor, Release);
        }
        self.is_ready()
    }

    /// Whether an entry is reserved that is not published, or was not when it was passed.
    fn has_unpublished(&self) -> bool {
        !self.stalled.is_empty() || self.shared.ring.header.head.word.load(Relaxed) != self.cursor
    }

    /// Turns an entry into a completion. `None` for void entries and entries of earlier connections.
    #[inline(always)]
    fn decode(
        &mut self,
        request: RequestWord,
        subject: SubjectWord,
        result: ResultWord,
    ) -> Option<Completion> {
        let tag = result.tag();
        let qp_num = subject.qp_num();
        let index = QpNum::from_bits(qp_num).index() as usize;
        let qp = match self.qps.get(index) {
            Some(Some(Member { qp, .. })) if qp.num == qp_num => qp,
            _ if tag.is(CqeKind::Void) => return None,
            _ => return self.decode_of_unknown_qp(request, subject, result),
        };
        // Acquire, partner: the Release store in `QpShared::mark_destroyed`.
        let stale = tag.epoch != short_epoch(qp.epoch()) || qp.destroyed.load(Acquire);
        let byte_len = subject.byte_len();
        let opcode = Opcode::from_code(tag.opcode);
        let (wr_id, imm, src_qp, is_valid) = if tag.is(CqeKind::Send) {
            if stale {
                return None;
            }
            let done = qp.sq_done.load(Relaxed);
            let ahead = result.send_position().wrapping_add(1).wrapping_sub(done as u32);
            // Release, partner: the Acquire load in `RcQp::check`.
            qp.sq_done.store(done.wrapping_add(ahead.into()), Release);
            (request.wr_id(), None, 0, !is_of_recv(opcode))
        } else if tag.is(CqeKind::Recv) {
            let (RecvSource::Shared(queue) | RecvSource::Datagram(queue)) = &qp.recv else { return None };
            // The receives of connections complete in lanes. A datagram queue pair has one epoch.
            if !qp.is_datagram() || tag.epoch != short_epoch(qp.epoch()) {
                return None;
            }
            let recv = queue.complete(request.recv_slot())?;
            if stale {
                return None;
            }
            (recv.wr_id, result.imm(), request.src_qp(), recv.fits(opcode, byte_len))
        } else {
            return None;
        };
        let status = if tag.status == 0 { Status::Success } else { Status::from_code(tag.status) };
        if !is_valid && status == Status::Success {
            return Some(qp.reject_completion(wr_id));
        }
        Some(Completion { wr_id, status, opcode, byte_len, imm, qp_num, src_qp, data: InlineData::None })
    }

    /// Decodes an entry of a queue pair that is not, or no longer, in `qps`.
    #[cold]
    fn decode_of_unknown_qp(
        &mut self,
        request: RequestWord,
        subject: SubjectWord,
        result: ResultWord,
    ) -> Option<Completion> {
        let qp_num = subject.qp_num();
        if self.has_new_notices() {
            self.apply_notices();
            let index = QpNum::from_bits(qp_num).index() as usize;
            if matches!(self.qps.get(index), Some(Some(member)) if member.qp.num == qp_num) {
                return self.decode_again(request, subject, result);
            }
        }
        // The queue pair is gone: a receive of a shared queue becomes free again, without a completion.
        let mut removed = self.notices.iter().filter_map(|(_, notice)| match notice {
            Notice::Removed(removed) => Some(&removed.qp),
            _ => None,
        });
        if let Some(qp) = removed.find(|qp| qp.num == qp_num)
            && result.tag().is(CqeKind::Recv)
            && let RecvSource::Shared(queue) | RecvSource::Datagram(queue) = &qp.recv
        {
            queue.complete(request.recv_slot());
        }
        None
    }

    #[cold]
    #[inline(never)]
    fn decode_again(
        &mut self,
        request: RequestWord,
        subject: SubjectWord,
        result: ResultWord,
    ) -> Option<Completion> {
        self.decode(request, subject, result)
    }

    #[inline]
    fn apply_notices_if_any(&mut self) {
        if self.has_new_notices() || !self.notices.is_empty() {
            self.apply_notices();
        }
    }

    /// Takes new notices, and does what those say that are due.
    #[cold]
    pub(super) fn apply_notices(&mut self) {
        for (position, notice) in self.shared.notices.take(&mut self.seen_notices) {
            match notice {
                Notice::Added(qp) => self.add_member(qp),
                // The receives of a connection are in its lane, not between the entries of the ring.
                Notice::Flush { qp, epoch } => self.flushes.push_back(PendingFlush::Connection { qp, epoch }),
                Notice::Removed(removed) => {
                    self.remove_member(&removed);
                    self.notices.push((position, Notice::Removed(removed)));
                }
                notice @ Notice::Return { .. } => self.notices.push((position, notice)),
            }
        }
        // An entry that was passed and is published by now comes before the notices.
        let ring = &self.shared.ring;
        if self.stalled.iter().any(|position| ring.is_published(position)) {
            return;
        }
        let due = self.notices.iter().take_while(|(position, _)| self.cursor >= *position).count();
        for (_, notice) in self.notices.drain(..due) {
            // A removed queue pair has no entry left, and is forgotten.
            let Notice::Return { returned, qp_num } = notice else { continue };
            // Other queues have a notice of these receives as well: entries for them may be there.
            let Some(ReturnedRecvs { queue, taken, status }) = Arc::into_inner(returned) else {
                continue;
            };
            self.flushes.extend(taken.into_iter().map(|taken| PendingFlush::Shared {
                queue: queue.clone(),
                taken,
                qp_num,
                status,
            }));
        }
    }

    /// Does one step of the pending flushes. Returns whether that was a completion.
    #[cold]
    fn complete_one_flush(&mut self, to: &mut Completion) -> bool {
        let (recv, qp_num, status, last) = match self.flushes.front() {
            Some(PendingFlush::Connection { qp, epoch }) => {
                let (qp, epoch) = (qp.clone(), *epoch);
                if let Some(lane) = self.lane_of(&qp)
                    && lane.read(&qp, true, to)
                {
                    return true;
                }
                // Known before the epoch is checked: a reset that comes after the check drops the receive at this position.
                let next = match &qp.recv {
                    RecvSource::Own(queue) => queue.next_position(),
                    _ => 0,
                };
                // A queue pair that is gone has another epoch, too.
                let is_current = qp.state() == QpState::Error && qp.epoch() == epoch;
                if is_current && let Some(lane) = self.lane_of(&qp) {
                    // Of a connection that a reset could not end.
                    lane.drop_entries(&qp, epoch);
                }
                let recv = match &qp.recv {
                    RecvSource::Own(queue) if is_current => queue.complete(next),
                    RecvSource::Shared(queue) if is_current => {
                        let taken = queue.taken_by(taker_of_qp(qp.num));
                        self.flushes.extend(taken.into_iter().map(|taken| PendingFlush::Shared {
                            queue: queue.clone(),
                            taken,
                            qp_num: qp.num,
                            status: Status::Flushed,
                        }));
                        None
                    }
                    _ => None,
                };
                (recv, qp.num, Status::Flushed, recv.is_none())
            }
            Some(PendingFlush::Shared { queue, taken, qp_num, status }) => {
                let recv = queue.complete_taken(*taken);
                // A queue pair that is gone has no completions: the receive becomes free again.
                let member =
                    self.qps.get(QpNum::from_bits(*qp_num).index() as usize).and_then(Option::as_ref);
                let is_there =
                    member.is_some_and(|Member { qp, .. }| qp.num == *qp_num && !qp.destroyed.load(Acquire));
                (recv.filter(|_| is_there), *qp_num, *status, true)
            }
            None => return false,
        };
        if last {
            self.flushes.pop_front();
        }
        if let Some(recv) = recv {
            *to = Completion::failed(recv.wr_id, status, qp_num);
        }
        recv.is_some()
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<bool, CqError> {
        let header = self.shared.ring.header.clone();
        let mut left = timeout;
        loop {
            let interval =
                if self.has_unpublished() { HOLE_CHECK_INTERVAL_IF_ANY } else { HOLE_CHECK_INTERVAL };
            let slice = left.min(interval);
            let is_ready =
                wait::wait_for(&header.parker, WaitStrategy::Park, Some(slice), || self.is_ready());
            if is_ready || self.has_unpublished() && self.pass_stalled_producers() {
                return Ok(true);
            }
            left = left.saturating_sub(slice);
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// Whether there is something to poll: a completion or an error.
    #[inline]
    pub(crate) fn is_ready(&mut self) -> bool {
        self.apply_notices_if_any();
        let ring = &self.shared.ring;
        !self.flushes.is_empty()
            || ring.is_published(self.cursor)
            || self.has_lane_entries()
            || ring.header.overrun.load(Relaxed) != 0
            || self.stalled.iter().any(|position| ring.is_published(position))
    }

    /// Whether there is something in a lane.
    #[inline]
    fn has_lane_entries(&self) -> bool {
        self.hot.iter().any(|hot| hot.lane.is_ready(&hot.qp)) || self.has_listed_lanes()
    }

    /// The parker that is notified of each completion.
    pub(crate) fn parker(&self) -> CqParker {
        CqParker(self.shared.clone())
    }
}

/// The parker of a completion queue. It keeps the memory of the queue: a parked thread writes to it when it wakes, perhaps after the
/// queue was dropped.
#[derive(Debug)]
pub(crate) struct CqParker(Arc<CqShared>);

impl CqParker {
    pub(crate) fn parker(&self) -> &wait::Parker {
        &self.0.ring.header.parker
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // In a forked child another thread of the parent may hold the lock, for ever.
        if self.handle.device.is_of_this_process() {
            self.shared.notices.close();
        }
    }
}

#[inline]
fn is_of_recv(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Recv | Opcode::RecvWriteImm)
}
