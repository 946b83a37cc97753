//! Shared receive queues.

use crosstie::device::{
    Cq, CqConfig, Data, Opcode, PostError, QpConfig, RcQp, RecvWr, RemoteMemory, SendOp, SendWr, Srq,
    SrqConfig, Status,
};

use super::cases;
use crate::participant::{
    Participant, TestConfig, TestQp, assert_no_completion, assert_opcode, expect_success, next_completion,
    pattern, post_srq_recv, read_bytes, take_completions, whole_region, write_bytes,
};

cases!("srq":
    shared_by_many, sends_land_in_order, different_completion_queues, a_broken_queue_pair_leaves_the_receives,
    a_destroyed_queue_pair_leaves_the_receives, refilled_while_it_runs, all_starved_connections_make_progress,
    receives_may_have_pieces, receives_posted_as_a_list, one_connection_may_use_all_receives, all_connections_are_polled,
);

/// `count` connections: the right participant's queue pairs share one receive queue, the left's have their own. Each
/// participant has one completion queue.
fn fan_in(side: &mut Participant, count: usize, config: &SrqConfig) -> (TestQp, Srq, Vec<RcQp>) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    let srq = end.pd.create_srq(config).unwrap();
    let small = QpConfig { max_send_wr: 64, max_recv_wr: 64, ..QpConfig::default() };
    let qps = (0..count)
        .map(|_| {
            let shared = (!side.is_left()).then_some(&srq);
            let mut qp = end.pd.create_rc(&small, &end.cq, &end.cq, shared).unwrap();
            side.connect(&mut qp, &Default::default());
            qp
        })
        .collect();
    (end, srq, qps)
}

fn send(qp: &mut RcQp, cq: &mut Cq, op: SendOp, bytes: &[u8]) {
    qp.post(&SendWr::new(7, op, Data::Inline(bytes)).signaled()).unwrap();
    expect_success(cq, 7);
}

/// 32 connections take from one queue; `qp_num` identifies the connection of each received message.
fn shared_by_many(side: &mut Participant) {
    let (mut end, mut srq, mut qps) = fan_in(side, 32, &SrqConfig::default());
    let region = end.region(8 * 32);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        for round in 0..8u32 {
            for (i, qp) in qps.iter_mut().enumerate() {
                let (imm, bytes) = (i as u32 * 100 + round, u64::from(round).to_ne_bytes());
                send(qp, &mut end.cq, SendOp::WriteImm(remote.at(8 * i as u64), imm), &bytes);
            }
        }
    } else {
        (0..256).for_each(|i| post_srq_recv(&mut srq, i));
        side.wait_for_other();
        let mut rounds = [0; 32];
        let mut ids = vec![];
        for completion in take_completions(&mut end.cq, 256) {
            assert_opcode(&completion, Opcode::RecvWriteImm);
            let from = qps.iter().position(|qp| qp.qp_num() == completion.qp_num).expect("one of ours");
            assert_eq!(completion.imm, Some(from as u32 * 100 + rounds[from]), "{completion:?}");
            rounds[from] += 1;
            ids.push(completion.wr_id);
        }
        assert_eq!(rounds, [8; 32]);
        ids.sort_unstable();
        assert_eq!(ids, (0..256).collect::<Vec<_>>(), "each receive is taken once");
    }
    side.wait_for_other();
}

/// Receives are taken in the order they were posted.
fn sends_land_in_order(side: &mut Participant) {
    let (mut end, mut srq, mut qps) = fan_in(side, 2, &SrqConfig::default());
    if side.is_left() {
        side.wait_for_other();
        for i in 0..20u32 {
            send(&mut qps[i as usize % 2], &mut end.cq, SendOp::SendImm(i), &pattern(30, u64::from(i)));
        }
    } else {
        let buffers: Vec<_> = (0..20).map(|_| end.region(32)).collect();
        for (i, buffer) in buffers.iter().enumerate() {
            srq.post_recv(&RecvWr { wr_id: i as u64, sges: &[whole_region(buffer)] }).unwrap();
        }
        side.wait_for_other();
        // The completions of two queue pairs have no common order; those of each are in order.
        let received = take_completions(&mut end.cq, 20);
        for (parity, qp) in qps.iter().enumerate() {
            let ids: Vec<u64> =
                received.iter().filter(|c| c.qp_num == qp.qp_num()).map(|c| c.wr_id).collect();
            assert_eq!(ids, (0..20).filter(|i| i % 2 == parity as u64).collect::<Vec<_>>());
        }
        for received in &received {
            let i = received.wr_id;
            assert_opcode(received, Opcode::Recv);
            assert_eq!(
                (received.imm, received.byte_len),
                (Some(i as u32), 30),
                "receives are taken in order"
            );
            assert_eq!(read_bytes(&buffers[i as usize], 0, 30), pattern(30, i));
        }
    }
    side.wait_for_other();
}

/// The completion goes to the receive queue of the queue pair that took the receive.
fn different_completion_queues(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let mut srq = end.pd.create_srq(&SrqConfig::default()).unwrap();
    let mut cqs: Vec<Cq> = (0..4).map(|_| side.device.create_cq(&CqConfig { depth: 64 }).unwrap()).collect();
    let mut qps: Vec<RcQp> = cqs
        .iter()
        .map(|cq| {
            let mut qp = end.pd.create_rc(&QpConfig::default(), &end.cq, cq, Some(&srq)).unwrap();
            side.connect(&mut qp, &Default::default());
            qp
        })
        .collect();
    if side.is_left() {
        side.wait_for_other();
        for i in 0..40u32 {
            send(&mut qps[i as usize % 4], &mut end.cq, SendOp::SendImm(i), &[]);
        }
    } else {
        (0..40).for_each(|i| post_srq_recv(&mut srq, i));
        side.wait_for_other();
        for i in 0..40u32 {
            let received = next_completion(&mut cqs[i as usize % 4]);
            assert_eq!((received.imm, received.qp_num), (Some(i), qps[i as usize % 4].qp_num()));
        }
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
}

/// A queue pair in ERR does not flush the shared queue: its receives remain for the other queue pairs.
fn a_broken_queue_pair_leaves_the_receives(side: &mut Participant) {
    let (mut end, mut srq, mut qps) = fan_in(side, 2, &SrqConfig::default());
    if side.is_left() {
        side.wait_for_other();
        side.wait_for_other();
        for i in 0..10 {
            send(&mut qps[1], &mut end.cq, SendOp::SendImm(i), &[]);
        }
    } else {
        (0..10).for_each(|i| post_srq_recv(&mut srq, i));
        side.wait_for_other();
        qps[0].fail().unwrap();
        assert_no_completion(&mut end.cq);
        side.wait_for_other();
        for i in 0..10 {
            assert_eq!(expect_success(&mut end.cq, i).imm, Some(i as u32));
        }
    }
    side.wait_for_other();
}

/// The same for a queue pair that is destroyed.
fn a_destroyed_queue_pair_leaves_the_receives(side: &mut Participant) {
    let (mut end, mut srq, mut qps) = fan_in(side, 2, &SrqConfig::default());
    if side.is_left() {
        side.wait_for_other();
        side.wait_for_other();
        for i in 0..10 {
            send(&mut qps[1], &mut end.cq, SendOp::SendImm(i), &[]);
        }
    } else {
        (0..10).for_each(|i| post_srq_recv(&mut srq, i));
        side.wait_for_other();
        drop(qps.remove(0));
        side.wait_for_other();
        for i in 0..10 {
            assert_eq!(expect_success(&mut end.cq, i).imm, Some(i as u32));
        }
    }
    side.wait_for_other();
}

/// A small queue that is refilled as it empties serves many messages of several connections; each arrives once and complete.
fn refilled_while_it_runs(side: &mut Participant) {
    const QPS: usize = 4;
    let each = side.repetitions(1000) as u32;
    let (mut end, mut srq, mut qps) = fan_in(side, QPS, &SrqConfig { max_wr: 16, max_sge: 1 });
    let total = each as usize * QPS;
    if side.is_left() {
        side.wait_for_other();
        let mut posted = [0; QPS];
        let mut done = 0;
        crate::participant::wait_until("all sends", || {
            for (i, qp) in qps.iter_mut().enumerate() {
                if posted[i] < each {
                    let bytes = pattern(48, u64::from(posted[i]));
                    let wr = SendWr::new(1, SendOp::SendImm(posted[i]), Data::Inline(&bytes)).signaled();
                    // A full queue is tried again in the next iteration.
                    posted[i] += u32::from(qp.post(&wr).is_ok());
                }
            }
            done += end.cq.poll(16, |c| assert_eq!(c.status, Status::Success, "{c:?}")).unwrap();
            done == total
        });
    } else {
        let buffers = end.region(16 * 64);
        let mut post = |i: u64| {
            let at = i as usize * 64;
            srq.post_recv(&RecvWr { wr_id: i, sges: &[buffers.sge(at..at + 64).unwrap()] }).unwrap();
        };
        (0..16).for_each(&mut post);
        side.wait_for_other();
        let mut expected = [0; QPS];
        for _ in 0..total {
            let received = next_completion(&mut end.cq);
            assert_opcode(&received, Opcode::Recv);
            let from = qps.iter().position(|qp| qp.qp_num() == received.qp_num).expect("one of ours");
            assert_eq!((received.imm, received.byte_len), (Some(expected[from]), 48));
            let bytes = read_bytes(&buffers, received.wr_id as usize * 64, 48);
            assert_eq!(bytes, pattern(48, u64::from(expected[from])));
            expected[from] += 1;
            post(received.wr_id);
        }
        assert_eq!(expected, [each; QPS]);
    }
    side.wait_for_other();
}

/// Many connections wait on an empty queue; receives that are posted one by one serve all of them.
fn all_starved_connections_make_progress(side: &mut Participant) {
    let (mut end, mut srq, mut qps) = fan_in(side, 16, &SrqConfig::default());
    if side.is_left() {
        for (i, qp) in qps.iter_mut().enumerate() {
            qp.post(&SendWr::new(1, SendOp::SendImm(i as u32), Data::Inline(&[])).signaled()).unwrap();
        }
        side.wait_for_other();
        assert!(take_completions(&mut end.cq, 16).iter().all(|c| c.status.is_success()));
    } else {
        side.wait_for_other();
        let mut seen = vec![];
        for i in 0..16 {
            post_srq_recv(&mut srq, i);
            let received = expect_success(&mut end.cq, i);
            assert_eq!(qps[received.imm.unwrap() as usize].qp_num(), received.qp_num);
            seen.push(received.imm.unwrap());
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..16).collect::<Vec<_>>());
    }
    side.wait_for_other();
}

/// Receives of a shared queue can have several scatter/gather entries.
fn receives_may_have_pieces(side: &mut Participant) {
    let (mut end, mut srq, mut qps) = fan_in(side, 1, &SrqConfig { max_wr: 16, max_sge: 3 });
    let region = end.region(1000);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(200, 1));
        side.wait_for_other();
        let sges = [region.sge(0..200).unwrap()];
        qps[0].post(&SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled()).unwrap();
        expect_success(&mut end.cq, 1);
    } else {
        let sges = [500..501, 0..100, 600..1000].map(|r| region.sge(r).unwrap());
        srq.post_recv(&RecvWr { wr_id: 1, sges: &sges }).unwrap();
        side.wait_for_other();
        assert_eq!(expect_success(&mut end.cq, 1).byte_len, 200);
        let bytes = pattern(200, 1);
        assert_eq!(read_bytes(&region, 500, 1), bytes[..1]);
        assert_eq!(read_bytes(&region, 0, 100), bytes[1..101]);
        assert_eq!(read_bytes(&region, 600, 100), [&bytes[101..], &[0]].concat());
    }
    side.wait_for_other();
}

/// A list of receives: as many are posted as there is room for, and each of them takes a message. Devices may round the size up.
fn receives_posted_as_a_list(side: &mut Participant) {
    let (mut end, mut srq, mut qps) = fan_in(side, 1, &SrqConfig { max_wr: 300, max_sge: 1 });
    let mut posted = 0u64;
    if !side.is_left() {
        let wr = RecvWr { wr_id: 5, sges: &[] };
        assert_eq!(srq.post_recvs(&wr, 0), Ok(0));
        assert_eq!(srq.post_recvs(&wr, 130), Ok(130));
        posted = 130;
        let mut lists = 0;
        while let Ok(more) = srq.post_recvs(&wr, 100) {
            posted += u64::from(more);
            lists += 1;
            assert!((1..=100).contains(&more) && lists < 100, "{more}");
        }
        assert!(posted >= 300, "{posted}");
        assert_eq!(srq.post_recvs(&wr, 100), Err(PostError::Full));
    }
    let posted = side.exchange(&posted).max(posted);
    if side.is_left() {
        for i in 0..posted {
            send(&mut qps[0], &mut end.cq, SendOp::SendImm(i as u32), &[]);
        }
    } else {
        for i in 0..posted {
            assert_eq!(expect_success(&mut end.cq, 5).imm, Some(i as u32));
        }
    }
    side.wait_for_other();
    assert_no_completion(&mut end.cq);
}

/// One connection completes every receive of a large queue before anything is polled. All of them arrive, in order; then all receives
/// can be used again.
fn one_connection_may_use_all_receives(side: &mut Participant) {
    const RECEIVES: u64 = 700;
    let qp = QpConfig { max_send_wr: RECEIVES as u32, ..QpConfig::default() };
    let shape = TestConfig { qp, cq: CqConfig { depth: 2 * RECEIVES as u32 }, ..TestConfig::default() };
    let mut end = TestQp::unconnected(&side.device, &shape);
    let mut srq = end.pd.create_srq(&SrqConfig { max_wr: RECEIVES as u32, max_sge: 1 }).unwrap();
    let mut qp = end.pd.create_rc(&qp, &end.cq, &end.cq, Some(&srq)).unwrap();
    // A receive is there, so the request must not fail, however late it is polled.
    let connect = crosstie::device::ConnectConfig { rnr_retry: 0, ..Default::default() };
    side.connect(&mut qp, &connect);
    for round in 0..2 {
        if side.is_left() {
            side.wait_for_other();
            for i in 0..RECEIVES {
                let bytes = i.to_ne_bytes();
                let wr = SendWr::new(i, SendOp::SendImm(i as u32), Data::Inline(&bytes));
                qp.post(&if i + 1 == RECEIVES { wr.signaled() } else { wr }).unwrap();
            }
            side.wait_for_other();
            expect_success(&mut end.cq, RECEIVES - 1);
        } else {
            let buffers = end.region(8 * RECEIVES as usize);
            for i in 0..RECEIVES as usize {
                let sges = [buffers.sge(8 * i..8 * i + 8).unwrap()];
                srq.post_recv(&RecvWr { wr_id: i as u64, sges: &sges }).unwrap();
            }
            side.wait_for_other();
            side.wait_for_other();
            // Longer than all retries of the other side.
            std::thread::sleep(core::time::Duration::from_millis(600));
            for i in 0..RECEIVES {
                let received = expect_success(&mut end.cq, i);
                assert_eq!(received.imm, Some(i as u32), "round {round}");
                assert_eq!(crate::participant::read_word(&buffers, 8 * i as usize), i);
            }
        }
    }
    side.wait_for_other();
}

/// Many connections of one completion queue are busy in turn: each message arrives, those of a connection in order, however long the
/// connection was idle before.
fn all_connections_are_polled(side: &mut Participant) {
    const QPS: usize = 24;
    let (mut end, mut srq, mut qps) = fan_in(side, QPS, &SrqConfig::default());
    let rounds = side.repetitions(40) as u32;
    for round in 0..rounds {
        // Every third connection, then the others: each is busy for a while and idle for a while.
        let busy: Vec<usize> = (0..QPS).filter(|i| (*i as u32 + round).is_multiple_of(3)).collect();
        if side.is_left() {
            side.wait_for_other();
            for message in 0..3 {
                for i in &busy {
                    let imm = (round * 3 + message) << 8 | *i as u32;
                    send(&mut qps[*i], &mut end.cq, SendOp::SendImm(imm), &[]);
                }
            }
            side.wait_for_other();
        } else {
            (0..3 * busy.len() as u64).for_each(|i| post_srq_recv(&mut srq, i));
            side.wait_for_other();
            let mut seen = [0; QPS];
            for _ in 0..3 * busy.len() {
                let received = next_completion(&mut end.cq);
                let imm = received.imm.unwrap();
                let from = (imm & 0xFF) as usize;
                assert_eq!(qps[from].qp_num(), received.qp_num);
                assert_eq!(imm >> 8, round * 3 + seen[from], "connection {from}");
                seen[from] += 1;
            }
            assert!(busy.iter().all(|i| seen[*i] == 3), "{seen:?}");
            assert_no_completion_now(&mut end.cq);
            side.wait_for_other();
        }
    }
}

fn assert_no_completion_now(cq: &mut Cq) {
    assert_eq!(cq.poll(1, |c| panic!("nothing should complete, yet {c:?}")), Ok(0));
}
