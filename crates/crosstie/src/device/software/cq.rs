//! Completion queues, their owner's side.

use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::cqring::CqRing;
use super::layout::{CQES_AT, CqHeader, Cqe, CqeKind, Outcome, QpNum, short_epoch, taker_of_line};
use super::qp::{QpLocal, Recv, taker};
use super::recv::SharedQueue;
use super::setup::{Allocation, Device, Handle, Inner, limit, locked};
use crate::device::{Completion, CqConfig, CqError, DeviceError, Opcode, QpState, Status};
use crate::memory::prefetch;
use crate::memory::segment::SharedRef;
use crate::ring::reservation;
use crate::wait::{self, WaitStrategy};

/// Pauses of the processor after the last entry of a stream.
const CATCH_UP_PAUSES: u32 = 4;

/// What of a completion queue its queue pairs share with it.
#[derive(Debug)]
pub(super) struct CqShared {
    pub(super) inner: Arc<Inner>,
    pub(super) ring: CqRing,
    memory: Allocation,
    /// None once the poller is gone: queue pairs and queue must not keep each other.
    changes: Mutex<Option<Vec<Change>>>,
    /// Counts `changes`, ever.
    version: AtomicU32,
    producers: Mutex<Vec<Producer>>,
}

/// Somebody who pushes.
#[derive(Debug)]
struct Producer {
    qp: Arc<QpLocal>,
    side: Side,
}

/// For which of its completions a queue pair uses a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Its own requests: the poster pushes.
    Send,
    /// Its receives: the connected peer pushes, or, for datagrams, anybody.
    Recv,
}

impl Producer {
    /// Whether it is outside of a reservation that it began without reckoning with others.
    fn moved_on(&self) -> bool {
        // Acquire, partner: the Release store in `reservation::clear_claim`.
        match self.side {
            Side::Send => self.qp.send_claim.load(Acquire) == reservation::IDLE,
            Side::Recv => match self.qp.requester() {
                Some((line, gid)) => {
                    line.claim.load(Acquire) == reservation::IDLE || !self.qp.inner.peer_connected(&gid)
                }
                None => true,
            },
        }
    }
}

/// News for the poller about queue pairs.
#[derive(Debug)]
enum Change {
    New(Arc<QpLocal>),
    /// Gone; nothing of it stands at or behind this position.
    Gone(Arc<QpLocal>, u64),
}

impl CqShared {
    pub(super) fn at(&self) -> u64 {
        self.memory.at
    }

    /// Lets a queue pair's completions in.
    pub(super) fn enroll(&self, qp: &Arc<QpLocal>, side: Side) {
        self.change(Change::New(qp.clone()));
        let mut producers = locked(&self.producers);
        let mode = &self.ring.header.mode;
        if producers.is_empty() && !(side == Side::Recv && qp.is_datagram()) {
            mode.store(reservation::EXCLUSIVE, Relaxed);
        } else {
            reservation::switch_to_shared(mode, || producers.iter().all(Producer::moved_on));
        }
        producers.push(Producer { qp: qp.clone(), side });
    }

    /// Takes a queue pair out. Unless `quiet`, its peer may be stuck in the middle of a push.
    pub(super) fn dismiss(&self, qp: &Arc<QpLocal>, quiet: bool) {
        if quiet {
            locked(&self.producers).retain(|producer| !Arc::ptr_eq(&producer.qp, qp));
        }
        let head = self.ring.header.head.word.load(Acquire);
        self.change(Change::Gone(qp.clone(), head));
    }

    fn change(&self, change: Change) {
        if let Some(changes) = &mut *locked(&self.changes) {
            changes.push(change);
        }
        // Release, partner: the Acquire load in `Cq::learn`.
        self.version.fetch_add(1, Release);
    }
}

impl Drop for CqShared {
    fn drop(&mut self) {
        self.inner.free(&self.memory);
    }
}

impl Device {
    pub(crate) fn create_cq(&self, config: &CqConfig) -> Result<Cq, DeviceError> {
        let inner = &self.handle.inner;
        limit("completions", config.depth, inner.attr().max_cqe)?;
        let depth = config.depth.max(2).next_power_of_two();
        let memory = inner.allocate(CQES_AT + u64::from(depth) * size_of::<Cqe>() as u64)?;
        let none = || DeviceError::Exhausted { what: "device memory" };
        let header: SharedRef<CqHeader> = SharedRef::new(&inner.segment, memory.at).ok_or_else(none)?;
        header.depth.store(depth, Relaxed);
        let ring = CqRing::new(&inner.segment, memory.at).ok_or_else(none)?;
        let shared = CqShared {
            inner: inner.clone(),
            ring,
            memory,
            changes: Mutex::new(Some(Vec::new())),
            version: AtomicU32::new(0),
            producers: Mutex::default(),
        };
        Ok(Cq {
            shared: Arc::new(shared),
            cursor: 0,
            qps: Vec::new(),
            leaving: VecDeque::new(),
            seen_version: 0,
            flushing: VecDeque::new(),
            had_some: false,
            handle: self.handle.clone(),
        })
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub(super) shared: Arc<CqShared>,
    /// The next position to read.
    cursor: u64,
    /// Queue pairs by index.
    qps: Vec<Option<Arc<QpLocal>>>,
    /// Queue pairs that are gone but may have entries before a position.
    leaving: VecDeque<(Arc<QpLocal>, u64)>,
    seen_version: u32,
    /// Receives to be handed out without an entry of their own.
    flushing: VecDeque<Flush>,
    /// Whether the last poll found anything.
    had_some: bool,
    #[expect(dead_code, reason = "keeps the device open")]
    handle: Arc<Handle>,
}

/// Receives that end without their sender.
#[derive(Debug)]
enum Flush {
    /// All that are outstanding in a queue pair's own queue.
    Own(Arc<QpLocal>),
    /// One of a shared queue.
    Shared { queue: Arc<SharedQueue>, slot: u32, qp_num: u32, status: Status },
}

impl Cq {
    #[inline]
    pub(crate) fn poll(&mut self, max: usize, mut each: impl FnMut(&Completion)) -> Result<usize, CqError> {
        let mut count = 0;
        let begin = self.cursor;
        while count < max {
            if !self.flushing.is_empty() {
                count += self.flush_one(&mut each);
                continue;
            }
            let cqe = self.shared.ring.cqes.ring(self.cursor);
            // Acquire, partner: the Release store in `CqRing::publish`.
            if cqe.seq.load(Acquire) != self.cursor.wrapping_add(1) {
                break;
            }
            let (wr, what, how) = (cqe.wr.load(Relaxed), cqe.what.load(Relaxed), cqe.how.load(Relaxed));
            self.cursor = self.cursor.wrapping_add(1);
            if count > 0 {
                // A stream: have the line after the next one brought. After a single entry that would only take it
                // from a producer who has just fetched it for the next.
                prefetch::for_read(self.shared.ring.cqes.ring(self.cursor.wrapping_add(4)));
            }
            if let Some(completion) = self.interpret(wr, what, how) {
                each(&completion);
                count += 1;
            }
        }
        if self.cursor != begin {
            // Release, partner: the Acquire load in `CqRing::reserve`. The entries have been read.
            self.shared.ring.header.consumed.word.store(self.cursor, Release);
        }
        if count == 0 {
            self.idle()?;
            if self.had_some {
                // Just caught up with a stream. Looking again at once would take the line from the producer in the middle
                // of its next entry; an answer to something sent just now takes longer than this anyway.
                for _ in 0..CATCH_UP_PAUSES {
                    core::hint::spin_loop();
                }
            }
        }
        self.had_some = count != 0;
        Ok(count)
    }

    /// What an empty poll looks at beside the ring.
    #[inline]
    fn idle(&mut self) -> Result<(), CqError> {
        if self.shared.ring.header.overrun.load(Relaxed) != 0 {
            return Err(CqError::Overrun);
        }
        // Acquire, partner: the Release add in `CqShared::change`.
        if self.shared.version.load(Acquire) != self.seen_version || !self.leaving.is_empty() {
            self.learn();
        }
        Ok(())
    }

    #[inline(always)]
    fn interpret(&mut self, wr: u64, what: u64, how: u64) -> Option<Completion> {
        let outcome = Outcome::from_bits(how as u32);
        let qp_num = what as u32;
        let index = QpNum::from_bits(qp_num).index() as usize;
        let qp = match self.qps.get(index) {
            Some(Some(qp)) if qp.num == qp_num => qp,
            _ if outcome.kind == CqeKind::Void as u8 => return None,
            _ => return self.interpret_stranger(wr, what, how),
        };
        // Acquire, partner: the Release store in `qp::destroy`.
        let stale = outcome.epoch != short_epoch(qp.epoch()) || qp.destroyed.load(Acquire);
        let (wr_id, imm, src_qp) = if outcome.kind == CqeKind::Send as u8 {
            if stale {
                return None;
            }
            let position = (how >> 32) as u32;
            let done = qp.sq_done.load(Relaxed);
            let ahead = position.wrapping_add(1).wrapping_sub(done as u32);
            // Release, partner: the Acquire load in `RcQp::check`.
            qp.sq_done.store(done.wrapping_add(ahead.into()), Release);
            (wr, None, 0)
        } else if outcome.kind == CqeKind::Recv as u8 {
            let Recv::Own(queue) = &qp.recv else { return None };
            if stale {
                return None;
            }
            (queue.finish()?, outcome.has_imm.then_some((how >> 32) as u32), (wr >> 32) as u32)
        } else if outcome.kind == CqeKind::SharedRecv as u8 {
            let (Recv::Shared(queue) | Recv::Datagram(queue)) = &qp.recv else { return None };
            let wr_id = queue.finish(wr as u32)?;
            if stale {
                return None;
            }
            (wr_id, outcome.has_imm.then_some((how >> 32) as u32), (wr >> 32) as u32)
        } else {
            if outcome.kind == CqeKind::Flush as u8 && !stale {
                let qp = qp.clone();
                self.flush(&qp);
            } else if outcome.kind == CqeKind::Reclaim as u8 {
                let qp = qp.clone();
                self.reclaim(&qp, wr as u32);
            }
            return None;
        };
        let status = if outcome.status == 0 { Status::Success } else { Status::from_code(outcome.status) };
        Some(Completion {
            wr_id,
            status,
            opcode: opcode(outcome.opcode),
            byte_len: (what >> 32) as u32,
            imm,
            qp_num,
            src_qp,
        })
    }

    /// An entry of a queue pair that is not, or no longer, at its index.
    #[cold]
    fn interpret_stranger(&mut self, wr: u64, what: u64, how: u64) -> Option<Completion> {
        let qp_num = what as u32;
        // Acquire, partner: the Release add in `CqShared::change`.
        if self.shared.version.load(Acquire) != self.seen_version {
            self.learn();
            let index = QpNum::from_bits(qp_num).index() as usize;
            if self.qps.get(index).is_some_and(|qp| qp.as_ref().is_some_and(|qp| qp.num == qp_num)) {
                return self.interpret_again(wr, what, how);
            }
        }
        // Of a queue pair that is gone: a shared receive goes back, without a completion.
        if let Some((qp, _)) = self.leaving.iter().find(|(qp, _)| qp.num == qp_num)
            && Outcome::from_bits(how as u32).kind == CqeKind::SharedRecv as u8
            && let Recv::Shared(queue) | Recv::Datagram(queue) = &qp.recv
        {
            queue.finish(wr as u32);
        }
        None
    }

    #[cold]
    #[inline(never)]
    fn interpret_again(&mut self, wr: u64, what: u64, how: u64) -> Option<Completion> {
        self.interpret(wr, what, how)
    }

    /// Takes in what was said about queue pairs, and lets go of those that have nothing left here.
    #[cold]
    fn learn(&mut self) {
        let changes = {
            let mut changes = locked(&self.shared.changes);
            self.seen_version = self.shared.version.load(Acquire);
            changes.as_mut().map(std::mem::take).unwrap_or_default()
        };
        for change in changes {
            match change {
                Change::New(qp) => {
                    let index = qp.index() as usize;
                    if self.qps.len() <= index {
                        self.qps.resize(index + 1, None);
                    }
                    self.qps[index] = Some(qp);
                }
                Change::Gone(qp, position) => {
                    let index = qp.index() as usize;
                    if self.qps[index].as_ref().is_some_and(|known| known.num == qp.num) {
                        self.qps[index] = None;
                    }
                    self.flushing.retain(|flush| !matches!(flush, Flush::Own(own) if own.num == qp.num));
                    self.leaving.push_back((qp, position));
                }
            }
        }
        while self.leaving.front().is_some_and(|(_, position)| self.cursor >= *position) {
            let Some((qp, _)) = self.leaving.pop_front() else { break };
            if let Recv::Shared(queue) = &qp.recv
                && Arc::ptr_eq(&qp.recv_cq, &self.shared)
            {
                for slot in queue.taken_by(taker(qp.num)) {
                    queue.finish(slot);
                }
            }
        }
    }

    /// Everything that a queue pair's peer completed has been handed out: the rest is flushed.
    #[cold]
    fn flush(&mut self, qp: &Arc<QpLocal>) {
        match &qp.recv {
            Recv::Own(_) => self.flushing.push_back(Flush::Own(qp.clone())),
            Recv::Shared(queue) => {
                for slot in queue.taken_by(taker(qp.num)) {
                    let queue = queue.clone();
                    self.flushing.push_back(Flush::Shared {
                        queue,
                        slot,
                        qp_num: qp.num,
                        status: Status::Flushed,
                    });
                }
            }
            Recv::Datagram(queue) => {
                for slot in queue.all_outstanding() {
                    let queue = queue.clone();
                    self.flushing.push_back(Flush::Shared {
                        queue,
                        slot,
                        qp_num: qp.num,
                        status: Status::Flushed,
                    });
                }
            }
        }
    }

    /// Everything that a dead datagram sender completed has been handed out: what else it took comes back.
    #[cold]
    fn reclaim(&mut self, qp: &Arc<QpLocal>, line: u32) {
        if let Recv::Datagram(queue) | Recv::Shared(queue) = &qp.recv {
            for slot in queue.taken_by(taker_of_line(line)) {
                let (queue, status) = (queue.clone(), Status::RemoteAborted);
                self.flushing.push_back(Flush::Shared { queue, slot, qp_num: qp.num, status });
            }
        }
    }

    #[cold]
    fn flush_one(&mut self, each: &mut impl FnMut(&Completion)) -> usize {
        let (wr_id, qp_num, status, last) = match self.flushing.front() {
            Some(Flush::Own(qp)) => {
                let wr_id = match &qp.recv {
                    Recv::Own(queue) if qp.state() == QpState::Error && !qp.destroyed.load(Acquire) => {
                        queue.finish()
                    }
                    _ => None,
                };
                (wr_id, qp.num, Status::Flushed, wr_id.is_none())
            }
            Some(Flush::Shared { queue, slot, qp_num, status }) => {
                (queue.finish(*slot), *qp_num, *status, true)
            }
            None => return 0,
        };
        if last {
            self.flushing.pop_front();
        }
        let Some(wr_id) = wr_id else { return 0 };
        each(&Completion {
            wr_id,
            status,
            opcode: Opcode::Unspecified,
            byte_len: 0,
            imm: None,
            qp_num,
            src_qp: 0,
        });
        1
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<bool, CqError> {
        let deadline = Instant::now().checked_add(timeout);
        let ring = &self.shared.ring;
        Ok(wait::wait_until(&ring.header.bell, WaitStrategy::Park, deadline, || {
            !self.flushing.is_empty() || ring.published(self.cursor) || ring.header.overrun.load(Relaxed) != 0
        }))
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        *locked(&self.shared.changes) = None;
    }
}

#[inline]
fn opcode(code: u8) -> Opcode {
    match code {
        0 => Opcode::Send,
        1 => Opcode::Write,
        2 => Opcode::Read,
        3 => Opcode::CompareSwap,
        4 => Opcode::FetchAdd,
        5 => Opcode::Recv,
        6 => Opcode::RecvWriteImm,
        _ => Opcode::Unspecified,
    }
}
