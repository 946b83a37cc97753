//! Datagram queue pairs whose senders come and go, do not move, or follow no rule.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use crosstie_testkit::wait::{TIMEOUT, eventually};
use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, Reply, Request};
use super::ends::small_device;
use super::invalid_input_tests::shared_arc;
use super::layout::{
    MAGIC, MAX_DATAGRAM_SENDERS, MAX_DATAGRAM_SENDERS_PER_PROCESS, SrqHeader, SrqWord,
    taker_of_datagram_sender,
};
use super::lock::locked;
use super::peer_lines::{AssignedLine, LineUse};
use super::qp::RecvSource;
use crate::device::*;
use crate::local::socket;
use crate::memory::segment::{SharedRef, SharedSlice};
use crate::ring::presence;

const KEY: u32 = 7;
const DEPTH: u32 = 11;

/// A device with a datagram queue pair.
struct End {
    qp: UdQp,
    send_cq: Cq,
    /// For receives.
    cq: Cq,
    memory: Mr,
    pd: Pd,
    device: Device,
}

impl End {
    fn new() -> End {
        let device = small_device();
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(&CqConfig { depth: 64 }).unwrap();
        let cq = device.create_cq(&CqConfig { depth: DEPTH }).unwrap();
        let config = QpConfig { max_recv_wr: DEPTH, ..QpConfig::default() };
        let mut qp = pd.create_ud(&config, &send_cq, &cq, None).unwrap();
        qp.activate(KEY).unwrap();
        let memory = pd.allocate(4096, Access::ALL).unwrap();
        End { qp, send_cq, cq, memory, pd, device }
    }

    fn post_recv(&mut self, wr_id: u64) {
        let at = wr_id as usize % 16 * 256;
        self.qp.post_recv(&RecvWr { wr_id, sges: &[self.memory.sge(at..at + 256).unwrap()] }).unwrap();
    }

    fn send(&mut self, to: &End, text: &[u8]) {
        self.send_to(to.device.address(), to.qp.qp_num(), text);
    }

    fn send_to(&mut self, to: DeviceAddress, qp_num: u32, text: &[u8]) {
        let ah = self.pd.create_ah(&to).unwrap();
        let wr = SendWr::new(1, SendOp::Send, Data::Inline(text)).signaled();
        self.qp.post(&ah, qp_num, KEY, &wr).unwrap();
        assert_eq!(poll(&mut self.send_cq, 1), succeeded(1..2));
    }

    /// Polls until so many receives have completed, and then some times more.
    fn receive(&mut self, count: usize) -> Vec<(u64, Status)> {
        poll(&mut self.cq, count)
    }

    fn text(&self, wr_id: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(wr_id as usize % 16 * 256 + UdQp::GRH, &mut bytes).unwrap();
        bytes
    }
}

/// The lines that datagram senders have at this device.
fn senders(device: &Device) -> Vec<AssignedLine> {
    let is_sender = |line: &AssignedLine| matches!(line.usage, LineUse::Datagrams { .. });
    locked(&shared_arc(device).peers.lines).all().filter(is_sender).collect()
}

fn wait_until_senders_are_reclaimed(device: &Device) {
    eventually("senders that are gone have lines", || senders(device).is_empty());
}

/// Takes the first receive of a queue pair that nobody has taken, as this sender.
fn take_as(device: &Device, qp_num: u32, sender: &AssignedLine) {
    let LineUse::Datagrams { sender } = sender.usage else { unreachable!("a sender") };
    let qp = shared_arc(device).qps.get(qp_num).unwrap();
    let (RecvSource::Datagram(queue) | RecvSource::Shared(queue)) = &qp.recv else {
        unreachable!("a datagram queue pair")
    };
    let segment = &qp.device.memory.segment;
    let at = queue.memory.at() + size_of::<SrqHeader>() as u64;
    let words: SharedSlice<AtomicU64> = SharedSlice::new(segment, at, 2 * queue.depth() as usize).unwrap();
    let header: SharedRef<SrqHeader> = SharedRef::new(segment, queue.memory.at()).unwrap();
    let is_free = |position: &u64| {
        let word = SrqWord(words.ring(*position).load(Relaxed));
        word.is_at(*position) && !word.is_taken()
    };
    let free = (0..header.posted.word.load(Relaxed)).find(is_free).expect("a receive");
    let taken = SrqWord(words.ring(free).load(Relaxed)).taken_by(taker_of_datagram_sender(sender));
    words.ring(free).store(taken.0, Relaxed);
}

fn poll(cq: &mut Cq, count: usize) -> Vec<(u64, Status)> {
    let (begun, mut seen, mut more) = (Instant::now(), Vec::new(), 0);
    while more < 100 {
        cq.poll(16, |completion| seen.push((completion.wr_id, completion.status))).unwrap();
        more += u32::from(seen.len() >= count);
        assert!(begun.elapsed() < TIMEOUT, "{seen:?}");
    }
    seen
}

fn succeeded(wr_ids: impl Iterator<Item = u64>) -> Vec<(u64, Status)> {
    wr_ids.map(|wr_id| (wr_id, Status::Success)).collect()
}

/// A sender ends with receives that it has completed, and with one that it has only taken. The next sender gets its number before the
/// receiver has polled.
#[test]
fn datagrams_of_a_sender_with_the_number_of_one_that_ended_arrive() {
    let mut receiver = End::new();
    (0..6).for_each(|wr_id| receiver.post_recv(wr_id));
    let mut first = End::new();
    first.send(&receiver, b"first");
    take_as(&receiver.device, receiver.qp.qp_num(), &senders(&receiver.device)[0]);
    let number = senders(&receiver.device)[0].usage;
    drop(first);
    wait_until_senders_are_reclaimed(&receiver.device);
    // All other numbers are in use.
    let mut numbers = 1;
    let others: Vec<[u8; 16]> = (100..120u8).map(|gid| [gid; 16]).collect();
    while numbers < MAX_DATAGRAM_SENDERS {
        let mut lines = locked(&shared_arc(&receiver.device).peers.lines);
        let gid = others[(numbers / MAX_DATAGRAM_SENDERS_PER_PROCESS) as usize];
        lines.assign_datagram_sender(gid, 2 * u64::from(numbers), &[gid]).unwrap();
        numbers += 1;
    }
    let mut second = End::new();
    second.send(&receiver, b"second");
    let is_second = |line: &AssignedLine| line.gid == second.device.address().gid;
    assert_eq!(
        senders(&receiver.device).into_iter().find(is_second).unwrap().usage,
        number,
        "another number"
    );
    second.send(&receiver, b"third");
    let mut seen = receiver.receive(4);
    seen.sort_unstable_by_key(|(wr_id, _)| *wr_id);
    let mut expected = succeeded(0..4);
    expected[1].1 = Status::RemoteAborted;
    assert_eq!(seen, expected);
    assert_eq!((receiver.text(0, 5), receiver.text(2, 6), receiver.text(3, 5)), {
        (b"first".to_vec(), b"second".to_vec(), b"third".to_vec())
    });
    receiver.post_recv(1);
    second.send(&receiver, b"fourth");
    assert_eq!(receiver.receive(1), succeeded(4..5));
}

/// The program keeps to the depth of its completion queue. Senders that come and go take nothing of it.
#[test]
fn senders_that_ended_take_no_room_in_a_completion_queue() {
    let mut receiver = End::new();
    (0..u64::from(DEPTH)).for_each(|wr_id| receiver.post_recv(wr_id));
    for round in 0..2 {
        let mut ends: Vec<End> = (0..8).map(|_| End::new()).collect();
        ends.iter_mut().for_each(|sender| sender.send(&receiver, b"x"));
        for (wr_id, status) in receiver.receive(ends.len()) {
            assert_eq!(status, Status::Success, "round {round}");
            receiver.post_recv(wr_id);
        }
        // They have taken receives, which nobody completes.
        for line in senders(&receiver.device) {
            take_as(&receiver.device, receiver.qp.qp_num(), &line);
        }
        ends.clear();
        wait_until_senders_are_reclaimed(&receiver.device);
        let mut last = End::new();
        (8..DEPTH).for_each(|_| last.send(&receiver, b"y"));
        let seen = receiver.receive(DEPTH as usize);
        let count = |wanted| seen.iter().filter(|(_, status)| *status == wanted).count();
        assert_eq!(
            (count(Status::Success), count(Status::RemoteAborted)),
            (DEPTH as usize - 8, 8),
            "{seen:?}"
        );
        seen.into_iter().for_each(|(wr_id, _)| receiver.post_recv(wr_id));
        assert_eq!(receiver.qp.state(), QpState::ReadyToSend);
    }
}

/// Two queue pairs share receives and have a completion queue each. What a dead sender had taken may have completed in either: it is
/// returned when both have been polled so far.
#[test]
fn shared_receive_of_a_dead_sender_is_returned_once_when_all_its_queues_were_polled() {
    for polled_first in [0, 1] {
        let End { device, pd, memory, .. } = End::new();
        let mut srq = pd.create_srq(&SrqConfig { max_wr: 4, max_sge: 1 }).unwrap();
        let mut cqs = [(); 2].map(|()| device.create_cq(&CqConfig { depth: 8 }).unwrap());
        let qps = cqs.each_ref().map(|cq| {
            let mut qp = pd.create_ud(&QpConfig::default(), cq, cq, Some(&srq)).unwrap();
            qp.activate(KEY).unwrap();
            qp
        });
        for wr_id in 0..4 {
            srq.post_recv(&RecvWr { wr_id, sges: &[memory.sge(0..64).unwrap()] }).unwrap();
        }
        let mut sender = End::new();
        sender.send_to(device.address(), qps[0].qp_num(), b"x");
        sender.send_to(device.address(), qps[1].qp_num(), b"x");
        take_as(&device, qps[0].qp_num(), &senders(&device)[0]);
        drop(sender);
        wait_until_senders_are_reclaimed(&device);
        let of_first = succeeded([polled_first].into_iter());
        assert_eq!(poll(&mut cqs[polled_first as usize], 1), of_first);
        let of_second = vec![(1 - polled_first, Status::Success), (2, Status::RemoteAborted)];
        assert_eq!(poll(&mut cqs[1 - polled_first as usize], 2), of_second);
        assert!(poll(&mut cqs[polled_first as usize], 0).is_empty());
    }
}

#[test]
fn queue_pair_that_is_gone_completes_nothing_and_frees_its_shared_receives() {
    let End { device, pd, memory, mut cq, .. } = End::new();
    let mut srq = pd.create_srq(&SrqConfig { max_wr: 4, max_sge: 1 }).unwrap();
    let recv = |wr_id| (wr_id, [memory.sge(0..64).unwrap()]);
    for (wr_id, sges) in (0..4).map(recv) {
        srq.post_recv(&RecvWr { wr_id, sges: &sges }).unwrap();
    }
    let mut qp = pd.create_ud(&QpConfig::default(), &cq, &cq, Some(&srq)).unwrap();
    qp.activate(KEY).unwrap();
    let mut sender = End::new();
    sender.send_to(device.address(), qp.qp_num(), b"x");
    take_as(&device, qp.qp_num(), &senders(&device)[0]);
    drop(sender);
    wait_until_senders_are_reclaimed(&device);
    drop(qp);
    assert!(poll(&mut cq, 0).is_empty());
    for (wr_id, sges) in (0..3).map(recv) {
        let posted = srq.post_recv(&RecvWr { wr_id, sges: &sges });
        assert_eq!(posted, if wr_id < 2 { Ok(()) } else { Err(PostError::Full) });
    }
}

/// A sender is stopped inside an operation when the queue pair fails. The receive that it has taken is flushed when it has left or is dead;
/// all others are flushed at once.
#[test]
fn flush_waits_for_a_sender_that_is_inside_with_the_receive_that_it_has_taken_only() {
    for dies in [false, true] {
        let mut receiver = End::new();
        (0..4).for_each(|wr_id| receiver.post_recv(wr_id));
        let mut sender = End::new();
        sender.send(&receiver, b"x");
        let line = senders(&receiver.device).remove(0);
        take_as(&receiver.device, receiver.qp.qp_num(), &line);
        // Odd: inside.
        presence::enter(&line.line.busy);
        receiver.qp.fail().unwrap();
        let expected = vec![(0, Status::Success), (2, Status::Flushed), (3, Status::Flushed)];
        assert_eq!(receiver.receive(3), expected);
        // Receives that are posted in ERR are flushed, too.
        receiver.post_recv(9);
        assert_eq!(receiver.receive(1), [(9, Status::Flushed)]);
        if dies {
            drop(sender);
            let seen = receiver.receive(1);
            assert!(matches!(seen[..], [(1, Status::Flushed | Status::RemoteAborted)]), "{seen:?}");
        } else {
            presence::leave(&line.line.busy);
            assert_eq!(receiver.receive(1), [(1, Status::Flushed)]);
        }
    }
}

/// A peer asks for senders without end, and closes none of them.
#[test]
fn peer_that_asks_for_senders_without_end_gets_its_share_and_keeps_it_only_while_it_is_connected() {
    let mut receiver = End::new();
    (0..4).for_each(|wr_id| receiver.post_recv(wr_id));
    let rounds = MAX_DATAGRAM_SENDERS / MAX_DATAGRAM_SENDERS_PER_PROCESS + 1;
    for round in 0..rounds {
        let greedy = control::connect(&receiver.device.address().gid).unwrap();
        let ask = |request: &Request| {
            socket::send(&greedy, request.as_bytes(), &[], &[]).unwrap();
            let mut reply = Reply::new_zeroed();
            // With the reply to HELLO comes the segment.
            socket::receive_with_files(&greedy, reply.as_mut_bytes(), &mut []).unwrap();
            reply.status
        };
        let hello = Request { gid: [9; 16], a: MAGIC, ..Request::new(Request::HELLO) };
        assert_eq!(ask(&hello), Reply::OK);
        for _ in 0..MAX_DATAGRAM_SENDERS_PER_PROCESS {
            assert_eq!(ask(&Request::new(Request::PEER_LINE)), Reply::OK, "round {round}");
        }
        // It has opened them.
        for line in senders(&receiver.device).iter().filter(|line| line.gid == [9; 16]) {
            assert!(presence::open(&line.line.tenure, line.tenure));
        }
        assert_eq!(ask(&Request::new(Request::PEER_LINE)), Reply::EXHAUSTED);
        if round < 2 {
            End::new().send(&receiver, b"honest");
            assert_eq!(receiver.receive(1), succeeded([u64::from(round)].into_iter()));
        }
        drop(greedy);
        eventually("senders of a peer that is gone have lines", || {
            senders(&receiver.device).iter().all(|line| line.gid != [9; 16])
        });
    }
}

/// The share is that of a process: more devices do not get it more. Senders that are closed do not count.
#[test]
fn devices_of_one_process_share_the_numbers_of_its_senders() {
    let mut lines = super::peer_lines::PeerLines::default();
    let devices = [[1; 16], [2; 16], [3; 16]];
    let mut assigned = Vec::new();
    for number in 0..MAX_DATAGRAM_SENDERS_PER_PROCESS {
        let gid = devices[number as usize % 3];
        assigned.push(lines.assign_datagram_sender(gid, 2 + 2 * u64::from(number), &devices).unwrap());
    }
    for line in &assigned {
        assert!(presence::open(&line.line.tenure, line.tenure));
    }
    let mut assign = |gid, of_process: &[_]| {
        let line = lines.assign_datagram_sender(gid, 1 << 20, of_process)?;
        assert!(presence::open(&line.line.tenure, line.tenure));
        Ok::<_, DeviceError>(())
    };
    assert!(matches!(assign(devices[0], &devices), Err(DeviceError::Limit { .. })));
    assert!(assign([4; 16], &[[4; 16]]).is_ok(), "another process");
    presence::close(&assigned[7].line.tenure, assigned[7].tenure);
    assert!(assign(devices[0], &devices).is_ok());
    assert!(matches!(assign(devices[0], &devices), Err(DeviceError::Limit { .. })));
}

/// A peer floods a queue pair: with more datagrams than it has receives, and with invalid ones. What the queue pair has no receive for is
/// lost; another sender goes on as soon as there are receives.
#[test]
fn flood_of_datagrams_costs_datagrams_only() {
    let mut receiver = End::new();
    let (mut flooding, mut honest) = (End::new(), End::new());
    let to = (receiver.device.address(), receiver.qp.qp_num());
    for round in 0..50 {
        let first = round * u64::from(DEPTH);
        (first..first + u64::from(DEPTH)).for_each(|wr_id| receiver.post_recv(wr_id));
        for i in 0..100 {
            flooding.send(&receiver, &[round as u8; 100]);
            flooding.send_to(to.0, to.1.wrapping_add(i % 7 + 1), b"to nobody");
        }
        honest.send(&receiver, b"lost");
        assert_eq!(receiver.receive(DEPTH as usize), succeeded(first..first + u64::from(DEPTH)));
        receiver.post_recv(0);
        honest.send(&receiver, b"honest");
        assert_eq!(receiver.receive(1), succeeded(0..1));
        assert_eq!(receiver.text(0, 6), b"honest");
    }
    assert_eq!(receiver.qp.state(), QpState::ReadyToSend);
}

/// A program that receives nothing asks for no receives.
#[test]
fn queue_without_receives_is_always_full() {
    let End { device, pd, cq, .. } = End::new();
    let config = QpConfig { max_recv_wr: 0, ..QpConfig::default() };
    let mut ud = pd.create_ud(&config, &cq, &cq, None).unwrap();
    ud.activate(KEY).unwrap();
    let mut rc = pd.create_rc(&config, &cq, &cq, None).unwrap();
    rc.init(Access::ALL).unwrap();
    let mut srq = pd.create_srq(&SrqConfig { max_wr: 0, max_sge: 0 }).unwrap();
    let with_srq = pd.create_rc(&config, &cq, &cq, Some(&srq)).unwrap();
    for wr_id in 0..3 {
        let wr = RecvWr { wr_id, sges: &[] };
        assert_eq!(ud.post_recv(&wr), Err(PostError::Full));
        assert_eq!(rc.post_recv(&wr), Err(PostError::Full));
        assert_eq!(srq.post_recv(&wr), Err(PostError::Full));
    }
    // It sends, and what it is sent is lost.
    let mut receiver = End::new();
    receiver.post_recv(5);
    let ah = pd.create_ah(&receiver.device.address()).unwrap();
    let wr = SendWr::new(1, SendOp::Send, Data::Inline(b"x"));
    ud.post(&ah, receiver.qp.qp_num(), KEY, &wr).unwrap();
    assert_eq!(receiver.receive(1), succeeded(5..6));
    receiver.send_to(device.address(), ud.qp_num(), b"lost");
    drop(with_srq);
}
