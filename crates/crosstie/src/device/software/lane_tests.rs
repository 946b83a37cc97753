//! Completion lanes: connections that end with entries in their lane, lanes that are seldom used, and peers that write anything into
//! lanes and into the set of ready lanes. And the ring beside them, with producers that do not move.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::cq_lanes::{MAX_HOT, MIN_QUIET_POLLS};
use super::ends::{End, connect, next_completion, small_device};
use super::invalid_input_tests::{shared, shared_arc};
use super::layout::{CqHeader, QpBlock, QpNum, SrqHeader, qp_block_at};
use super::pauses::{Pause, once_at};
use crate::device::cq::Provider;
use crate::device::*;
use crate::memory::segment::{SharedRef, SharedSlice};
use crate::ring::stalled::MAX_STALLED;
use crate::rng::{Random, seed};

const TIMEOUT: Duration = Duration::from_secs(20);
const RECEIVES: u32 = 16;

/// Connections between two devices of this process. The receiving ends use one completion queue.
struct Fan {
    senders: Vec<RcQp>,
    receivers: Vec<RcQp>,
    cq: Cq,
    srq: Option<Srq>,
    target: Mr,
    near: Device,
    far: Device,
    far_pd: Pd,
}

impl Fan {
    fn new(count: usize, is_shared: bool) -> Fan {
        let (near, far) = (small_device(), small_device());
        let (near_pd, far_pd) = (near.alloc_pd().unwrap(), far.alloc_pd().unwrap());
        let near_cq = near.create_cq(&CqConfig { depth: 64 }).unwrap();
        let cq = far.create_cq(&CqConfig { depth: 64 }).unwrap();
        let srq = is_shared.then(|| far_pd.create_srq(&SrqConfig { max_wr: RECEIVES, max_sge: 1 }).unwrap());
        let config = QpConfig { max_recv_wr: RECEIVES, ..QpConfig::default() };
        let senders = (0..count).map(|_| near_pd.create_rc(&config, &near_cq, &near_cq, None).unwrap());
        let receivers = (0..count).map(|_| far_pd.create_rc(&config, &cq, &cq, srq.as_ref()).unwrap());
        let target = far_pd.allocate(4096, Access::ALL).unwrap();
        let (senders, receivers) = (senders.collect(), receivers.collect());
        let mut fan = Fan { senders, receivers, cq, srq, target, near, far, far_pd };
        (0..count).for_each(|i| fan.connect(i));
        fan
    }

    fn connect(&mut self, i: usize) {
        connect(&mut self.senders[i], &mut self.receivers[i]);
    }

    fn post_recv(&mut self, i: usize, wr_id: u64) -> Result<(), PostError> {
        let wr = RecvWr { wr_id, sges: &[] };
        match &mut self.srq {
            Some(srq) => srq.post_recv(&wr),
            None => self.receivers[i].post_recv(&wr),
        }
    }

    fn send(&mut self, i: usize, message: u32) {
        let op = SendOp::WriteImm(self.target.remote().at(0), message);
        self.senders[i].post(&SendWr::new(1, op, Data::Inline(&message.to_ne_bytes()))).unwrap();
    }

    fn look(&mut self) -> Option<Completion> {
        let mut got = Completion::default();
        self.cq.next(&mut got).unwrap().then_some(got)
    }

    fn next(&mut self) -> Completion {
        next_completion(&mut self.cq)
    }

    fn assert_empty(&mut self) {
        for _ in 0..10 {
            assert_eq!(self.look(), None);
        }
    }

    fn hot(&self) -> usize {
        match &self.cq.provider {
            Provider::Software(cq) => cq.hot.len(),
            _ => unreachable!("a software device was opened"),
        }
    }

    /// The block of a receiving queue pair, as a peer can write it.
    fn block(&self, i: usize) -> SharedRef<QpBlock> {
        let index = QpNum::from_bits(self.receivers[i].qp_num()).index();
        SharedRef::new(&shared(&self.far).memory.segment, qp_block_at(index)).unwrap()
    }
}

#[test]
fn request_that_is_executed_at_once_has_no_completion_and_no_place_in_the_send_queue() {
    let [mut sender, mut receiver] = End::pair(&QpConfig { max_send_wr: 2, ..QpConfig::default() });
    let target = receiver.pd.allocate(64, Access::ALL).unwrap();
    let recv = RecvWr { wr_id: 7, sges: &[] };
    for round in 0..50u32 {
        // In each tenth round the receive is late: the request waits for it, and completes like any other.
        let is_late = round % 10 == 9;
        if !is_late {
            receiver.qp.post_recv(&recv).unwrap();
        }
        let op = SendOp::WriteImm(target.remote().at(0), round);
        let bytes = round.to_ne_bytes();
        let wr = SendWr::new(round.into(), op, Data::Inline(&bytes)).signaled_if_queued();
        let is_done = sender.qp.post(&wr).unwrap() == Posted::Done;
        assert!(!(is_late && is_done));
        // The first request finds out where the peer is. After one that waited, the next ones may wait, too.
        assert!(is_done || round == 0 || round >= 9, "round {round}");
        if is_late {
            receiver.qp.post_recv(&recv).unwrap();
        }
        if is_done {
            assert_eq!(sender.cq.poll(4, |c| panic!("unexpected: {c:?}")), Ok(0));
        } else {
            let sent = sender.next();
            assert_eq!((sent.wr_id, sent.imm), (round.into(), None));
        }
        let received = receiver.next();
        assert_eq!((received.wr_id, received.imm), (7, Some(round)));
    }
}

#[test]
fn reset_drops_completions_that_were_not_polled_and_frees_their_receives() {
    for is_shared in [false, true] {
        let mut fan = Fan::new(1, is_shared);
        for round in 0..5 {
            (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(0, wr_id).unwrap());
            (0..RECEIVES).for_each(|i| fan.send(0, 1000 * round + i));
            // Some are polled, some are not.
            for i in 0..2 * round {
                assert_eq!(fan.next().imm, Some(1000 * round + i));
            }
            fan.receivers[0].reset().unwrap();
            fan.senders[0].reset().unwrap();
            if round % 2 == 0 {
                fan.assert_empty();
            }
            fan.connect(0);
            fan.assert_empty();
            // All receives are free again, and messages of the new connection arrive.
            (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(0, 100 + wr_id).unwrap());
            for i in 0..RECEIVES {
                fan.send(0, 7000 + i);
            }
            for i in 0..RECEIVES {
                let received = fan.next();
                assert_eq!((received.wr_id, received.imm), (100 + u64::from(i), Some(7000 + i)));
                assert_eq!(received.inline_data(), Some((7000 + i).to_ne_bytes().as_slice()));
            }
            fan.assert_empty();
        }
    }
}

#[test]
fn dropped_queue_pair_frees_the_shared_receives_of_completions_that_were_not_polled() {
    let mut fan = Fan::new(2, true);
    for _ in 0..3 {
        (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(0, wr_id).unwrap());
        (0..RECEIVES).for_each(|i| fan.send(0, i));
        assert_eq!(fan.next().imm, Some(0));
        let config = QpConfig { max_recv_wr: RECEIVES, ..QpConfig::default() };
        fan.receivers[0] = fan.far_pd.create_rc(&config, &fan.cq, &fan.cq, fan.srq.as_ref()).unwrap();
        fan.senders[0].reset().unwrap();
        fan.connect(0);
        fan.assert_empty();
        (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(0, wr_id).unwrap());
        for i in 0..RECEIVES {
            fan.send(i as usize % 2, i);
            assert_eq!(fan.next().imm, Some(i));
        }
    }
}

/// The poller learns late that a queue pair is gone, when the next one with the same index has taken receives of the shared queue.
#[test]
fn late_news_of_a_removed_queue_pair_cost_no_message_of_the_next_one() {
    let mut fan = Fan::new(1, true);
    let config = QpConfig { max_recv_wr: RECEIVES, ..QpConfig::default() };
    (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(0, wr_id).unwrap());
    fan.send(0, 1);
    assert_eq!(fan.next().imm, Some(1));
    fan.send(0, 2);
    let index = QpNum::from_bits(fan.receivers.pop().unwrap().qp_num()).index();
    shared(&fan.far).qps.use_up_indices();
    let next = fan.far_pd.create_rc(&config, &fan.cq, &fan.cq, fan.srq.as_ref()).unwrap();
    assert_eq!(QpNum::from_bits(next.qp_num()).index(), index, "the index is used again");
    fan.receivers.push(next);
    fan.senders[0].reset().unwrap();
    fan.connect(0);
    let messages = 3..RECEIVES - 2;
    let outstanding = RECEIVES - 2 - messages.len() as u32;
    messages.clone().for_each(|message| fan.send(0, message));
    for message in messages {
        assert_eq!(fan.next().imm, Some(message));
    }
    fan.assert_empty();
    // The receive of the message that was not polled is free again.
    (outstanding..RECEIVES).for_each(|wr_id| fan.post_recv(0, wr_id.into()).unwrap());
    assert_eq!(fan.post_recv(0, 0), Err(PostError::Full));
}

/// A reset cannot end while the peer is inside. What the peer had completed is not polled any more; a thread that waits for completions
/// sleeps, and when the peer has left, all receives are flushed.
#[test]
fn what_is_left_in_the_lane_of_an_ended_connection_wakes_nobody() {
    let mut fan = Fan::new(1, false);
    (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(0, wr_id).unwrap());
    fan.send(0, 1);
    assert_eq!(fan.next().imm, Some(1));
    assert_eq!(fan.hot(), 1);
    fan.send(0, 2);
    assert_eq!(fan.cq.wait(TIMEOUT), Ok(true));
    let line = shared_arc(&fan.far).qps.get(fan.receivers[0].qp_num()).unwrap().peer_line().unwrap().line;
    // As if the peer were stopped inside an operation.
    line.busy.fetch_add(1, Relaxed);
    assert!(matches!(fan.receivers[0].reset(), Err(DeviceError::PeerBusy { .. })));
    assert_eq!(fan.cq.wait(Duration::from_millis(20)), Ok(false));
    fan.assert_empty();
    line.busy.fetch_add(1, Relaxed);
    for wr_id in 1..u64::from(RECEIVES) {
        let flushed = fan.next();
        assert_eq!((flushed.wr_id, flushed.status), (wr_id, Status::Flushed));
    }
    fan.assert_empty();
}

/// The owner of a queue pair resets and connects it again while another thread polls: the poller has found an entry of the old connection,
/// and has not completed its receive. The entry completes no receive of the new connection.
#[test]
fn reset_while_an_entry_is_read_costs_the_new_connection_no_receive() {
    for fails_again in [false, true] {
        let mut fan = Fan::new(1, false);
        (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(0, wr_id).unwrap());
        fan.send(0, 1);
        assert_eq!(fan.next().imm, Some(1));
        fan.send(0, 2);
        let connections =
            Rc::new(RefCell::new((std::mem::take(&mut fan.senders), std::mem::take(&mut fan.receivers))));
        let pair = connections.clone();
        once_at(Pause::EntryBelongsToConnection, move || {
            let (senders, receivers) = &mut *pair.borrow_mut();
            let (sender, receiver) = (&mut senders[0], &mut receivers[0]);
            receiver.reset().unwrap();
            sender.reset().unwrap();
            connect(sender, receiver);
            for wr_id in 0..u64::from(RECEIVES) {
                receiver.post_recv(&RecvWr { wr_id: 100 + wr_id, sges: &[] }).unwrap();
            }
        });
        fan.assert_empty();
        (fan.senders, fan.receivers) = connections.take();
        if fails_again {
            fan.receivers[0].fail().unwrap();
            for wr_id in 100..100 + u64::from(RECEIVES) {
                let flushed = fan.next();
                assert_eq!((flushed.wr_id, flushed.status), (wr_id, Status::Flushed));
            }
        } else {
            for i in 0..RECEIVES {
                fan.send(0, 50 + i);
                let received = fan.next();
                assert_eq!((received.wr_id, received.imm), (100 + u64::from(i), Some(50 + i)));
            }
        }
        fan.assert_empty();
    }
}

/// A queue pair fails on another thread while it is being connected. It is never in ERR and open to its peer.
#[test]
fn queue_pair_that_fails_while_it_connects_is_closed() {
    let mut fan = Fan::new(1, false);
    fan.receivers[0].reset().unwrap();
    fan.receivers[0].init(Access::ALL).unwrap();
    let handle = fan.receivers[0].fail_handle();
    let (sender, failed) = std::sync::mpsc::channel();
    once_at(Pause::StateChanged, move || {
        let thread = std::thread::spawn(move || handle.fail());
        // It ends at once, or waits until the queue pair is connected.
        let begun = Instant::now();
        while !thread.is_finished() && begun.elapsed() < Duration::from_millis(200) {
            std::thread::yield_now();
        }
        sender.send(thread).unwrap();
    });
    fan.receivers[0].ready_to_receive(&fan.senders[0].address(), &ConnectConfig::default()).unwrap();
    failed.recv().unwrap().join().unwrap();
    assert_eq!(fan.receivers[0].state(), QpState::Error);
    assert_eq!(fan.block(0).connection.load(Relaxed), 0, "open to its peer");
}

/// A lane that is never empty keeps nothing else waiting: neither a completion behind a producer of the ring that does not move, nor the
/// flush of another connection.
#[test]
fn lane_that_is_never_empty_holds_up_neither_the_ring_nor_a_flush() {
    let mut fan = Fan::new(2, false);
    let config = QpConfig { max_recv_wr: RECEIVES, ..QpConfig::default() };
    let stopped = fan.far_pd.create_rc(&config, &fan.cq, &fan.cq, None).unwrap();
    let mut near = fan.far_pd.create_rc(&config, &fan.cq, &fan.cq, None).unwrap();
    let to_itself = near.address();
    near.connect(&to_itself, &ConnectConfig::default()).unwrap();
    {
        let stopped = shared_arc(&fan.far).qps.get(stopped.qp_num()).unwrap();
        stopped.send_cq.ring.reserve(&stopped.send_claim).unwrap();
    }
    let op = SendOp::Write(fan.target.remote().at(64));
    near.post(&SendWr::new(77, op, Data::Inline(b"behind")).signaled()).unwrap();
    fan.post_recv(1, 88).unwrap();
    fan.receivers[1].fail().unwrap();
    let (begun, mut seen) = (Instant::now(), Vec::new());
    while seen.len() < 2 {
        while fan.post_recv(0, 5).is_ok() {
            fan.send(0, 5);
        }
        let Some(completion) = fan.look() else { continue };
        if completion.qp_num != fan.receivers[0].qp_num() {
            seen.push((completion.wr_id, completion.status));
        }
        assert!(begun.elapsed() < TIMEOUT, "waiting behind a busy lane; seen: {seen:?}");
    }
    seen.sort_unstable_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(seen, [(77, Status::Success), (88, Status::Flushed)]);
}

/// Sends complete as fast as receives do, although the lane of the receives is never empty: a program that answers every message must not
/// find its send queue full because its completion queue prefers messages.
#[test]
fn sends_complete_at_the_pace_of_receives() {
    const SENDS: u32 = 48;
    let mut fan = Fan::new(1, false);
    let config = QpConfig { max_send_wr: SENDS, max_recv_wr: RECEIVES, ..QpConfig::default() };
    let mut near = fan.far_pd.create_rc(&config, &fan.cq, &fan.cq, None).unwrap();
    let to_itself = near.address();
    near.connect(&to_itself, &ConnectConfig::default()).unwrap();
    for wr_id in 0..u64::from(SENDS) {
        let op = SendOp::Write(fan.target.remote().at(64));
        near.post(&SendWr::new(wr_id, op, Data::Inline(b"answer")).signaled()).unwrap();
    }
    let (mut sends, mut receives) = (0, 0);
    while sends < SENDS {
        while fan.post_recv(0, 5).is_ok() {
            fan.send(0, 5);
        }
        let completion = fan.look().expect("a completion is there");
        if completion.qp_num == near.qp_num() {
            assert_eq!(completion.wr_id, u64::from(sends));
            sends += 1;
        } else {
            receives += 1;
        }
        assert!(receives <= 2 * SENDS, "{receives} receives completed beside {sends} sends");
    }
}

/// Peers can write the header of a shared receive queue. What its owner needs for a new queue pair is not in it.
#[test]
fn forged_depth_of_a_shared_receive_queue_does_not_reach_a_new_queue_pair() {
    for depth in [0, 1, 3, 1 << 31, u32::MAX] {
        let mut fan = Fan::new(1, true);
        let header: SharedRef<SrqHeader> =
            SharedRef::new(&shared(&fan.far).memory.segment, fan.block(0).owner_line.recv_at.load(Relaxed))
                .unwrap();
        header.depth.store(depth, Relaxed);
        header.sges.store(depth, Relaxed);
        let config = QpConfig { max_recv_wr: RECEIVES, ..QpConfig::default() };
        fan.receivers[0] = fan.far_pd.create_rc(&config, &fan.cq, &fan.cq, fan.srq.as_ref()).unwrap();
        fan.senders[0].reset().unwrap();
        fan.connect(0);
        assert_eq!(fan.block(0).owner_line.lane_depth.load(Relaxed), RECEIVES);
        fan.post_recv(0, 1).unwrap();
        fan.send(0, 9);
        assert_eq!(fan.next().imm, Some(9));
    }
}

/// The ring has room for as many completions as were asked for, although some entries belong to producers that do not move.
#[test]
fn completion_queue_holds_its_depth_beside_stopped_producers() {
    const DEPTH: u32 = 16;
    let device = small_device();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(&CqConfig { depth: DEPTH }).unwrap();
    let target = pd.allocate(64, Access::ALL).unwrap();
    let config = QpConfig { max_send_wr: DEPTH, ..QpConfig::default() };
    let mut qps: Vec<RcQp> =
        (0..2 + MAX_STALLED).map(|_| pd.create_rc(&config, &cq, &cq, None).unwrap()).collect();
    let stopped: Vec<_> = qps.drain(2..).collect();
    let [near, far] = &mut qps[..] else { unreachable!("there are two") };
    connect(near, far);
    // Each has reserved an entry and does not publish it.
    for qp in &stopped {
        let qp = shared_arc(&device).qps.get(qp.qp_num()).unwrap();
        qp.send_cq.ring.reserve(&qp.send_claim).unwrap();
    }
    let op = SendOp::Write(target.remote().at(0));
    // Several rounds of the ring. In the first one the poller waits until it may pass the entries.
    for round in 0..10 {
        (0..DEPTH).for_each(|i| {
            near.post(&SendWr::new(i.into(), op, Data::Inline(b"signaled")).signaled()).unwrap();
        });
        let (mut done, begun) = (0, Instant::now());
        while done < u64::from(DEPTH) {
            cq.poll(3, |completion| {
                assert_eq!((completion.wr_id, completion.status), (done, Status::Success), "round {round}");
                done += 1;
            })
            .unwrap();
            assert!(begun.elapsed() < TIMEOUT, "round {round}: {done} completions");
        }
    }
    let ring = &shared_arc(&device).qps.get(near.qp_num()).unwrap().send_cq.ring;
    let listed = (0..ring.depth()).filter(|slot| ring.header.stalled.contains(*slot, ring.depth()));
    assert_eq!(listed.count(), MAX_STALLED);
}

/// More connections than hot lanes. A connection that was hot and then idle for long loses its place to another one; its next message
/// arrives all the same.
#[test]
fn messages_arrive_on_lanes_that_are_polled_always_seldom_or_no_longer() {
    let count = 2 * MAX_HOT;
    let mut fan = Fan::new(count, false);
    for i in 0..count {
        (0..u64::from(RECEIVES)).for_each(|wr_id| fan.post_recv(i, wr_id).unwrap());
    }
    assert_eq!(fan.hot(), 0);
    for round in 0..4 {
        for i in 0..count {
            fan.send(i, i as u32);
            let received = fan.next();
            assert_eq!((received.imm, received.wr_id), (Some(i as u32), 2 * round));
            assert_eq!(received.qp_num, fan.receivers[i].qp_num());
        }
        assert_eq!(fan.hot(), MAX_HOT);
        // One poll takes what is there on hot lanes and on others.
        (0..count).rev().for_each(|i| fan.send(i, i as u32));
        let mut seen = vec![0; count];
        let mut polls = 0;
        while seen.iter().sum::<u32>() < count as u32 {
            if round % 2 == 0 {
                fan.cq.poll(3, |c| seen[c.imm.unwrap() as usize] += 1).unwrap();
            } else if let Some(c) = fan.look() {
                seen[c.imm.unwrap() as usize] += 1;
            }
            polls += 1;
            assert!(polls < 100, "{seen:?}");
        }
        assert_eq!(seen, vec![1; count]);
        if round == 1 {
            (0..=MIN_QUIET_POLLS).for_each(|_| assert_eq!(fan.look(), None));
        }
    }
}

#[test]
fn every_connection_gets_its_turn_when_polls_take_one_completion() {
    const COUNT: usize = 3;
    let mut fan = Fan::new(COUNT, false);
    let mut polled = [0; COUNT];
    for _ in 0..100 {
        for (i, polled) in polled.iter().enumerate() {
            // Connection 0 is always ready.
            if i == 0 || *polled == 0 {
                while fan.post_recv(i, 0).is_ok() {
                    fan.send(i, i as u32);
                }
            }
        }
        let imm = fan.next().imm.unwrap();
        polled[imm as usize] += 1;
    }
    assert!(polled.iter().all(|count| *count > 0), "{polled:?}");
}

#[test]
fn forged_entries_complete_outstanding_receives_at_most() {
    let mut random = Random(seed());
    for is_shared in [false, true] {
        for _ in 0..30 {
            let mut fan = Fan::new(1, is_shared);
            let posted = random.next() % 5;
            (0..posted).for_each(|wr_id| fan.post_recv(0, wr_id).unwrap());
            let block = fan.block(0);
            let depth = block.owner_line.lane_depth.load(Relaxed) as usize;
            let at = block.owner_line.lane_at.load(Relaxed);
            let words: SharedSlice<AtomicU64> =
                SharedSlice::new(&shared(&fan.far).memory.segment, at, 16 + 8 * depth).unwrap();
            let header: SharedRef<CqHeader> =
                SharedRef::new(&shared(&fan.far).memory.segment, block.recv_cq.load(Relaxed)).unwrap();
            let mut completed = 0;
            for _ in 0..50 {
                for entry in 0..depth {
                    let position = entry + if random.next().is_multiple_of(4) { depth } else { 0 };
                    let head = random.next() << 32 | (position as u64 + 1);
                    (1..8).for_each(|word| words[16 + 8 * entry + word].store(random.next(), Relaxed));
                    // Lengths that fit into an entry, and some that do not.
                    words[16 + 8 * entry + 1].store((random.next() << 32) | (random.next() % 64), Relaxed);
                    words[16 + 8 * entry].store(head, Relaxed);
                }
                header.ready.add(random.next() as usize % 20_000);
                header.ready.add(QpNum::from_bits(fan.receivers[0].qp_num()).index() as usize);
                for _ in 0..64 {
                    let Some(completion) = fan.look() else { continue };
                    completed += 1;
                    let len = completion.inline_data().map(|data| data.len());
                    assert!(len.is_none_or(|len| len <= 48 && len == completion.byte_len as usize));
                    assert!(completion.status.is_success() || len.is_none(), "{completion:?}");
                }
            }
            assert!(completed <= posted, "{completed} completions of {posted} receives");
        }
    }
}

#[test]
fn forged_ready_bits_cost_no_message() {
    let mut fan = Fan::new(2, false);
    let at = fan.block(0).recv_cq.load(Relaxed);
    let header: SharedRef<CqHeader> = SharedRef::new(&shared(&fan.far).memory.segment, at).unwrap();
    for i in 0..200 {
        (0..QpNum::INDICES as usize).step_by(1 + i).for_each(|lane| header.ready.add(lane));
        fan.assert_empty();
        fan.post_recv(i % 2, 5).unwrap();
        fan.send(i % 2, i as u32);
        assert_eq!(fan.next().imm, Some(i as u32));
    }
    assert_eq!(fan.near.counters(), DeviceCounters::default());
}
