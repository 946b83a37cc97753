//! Creating and dropping objects, many of them and in any order.

use crosstie::device::{
    Access, ConnectConfig, CqConfig, Data, Device, Opcode, QpConfig, RecvWr, RemoteMemory, SendOp, SendWr,
    Status,
};

use super::cases;
use crate::participant::{
    Participant, TestConfig, TestQp, assert_no_completion, assert_opcode, expect_success, next_completion,
    pattern, read_bytes, wait_until, whole_region, write_bytes,
};

cases!("lifetime":
    destroy_with_work_outstanding, destroy_with_completions_unpolled, parents_dropped_first, moved_to_another_thread,
    region_dropped_while_the_peer_writes, sixty_four_queue_pairs_one_queue, two_devices, many_regions,
    many_regions_in_place, many_queue_pairs, many_completion_queues, connections_come_and_go, devices_come_and_go,
);

const SMALL: QpConfig =
    QpConfig { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline: 32 };

/// A queue pair destroyed with requests and receives outstanding: what it leaves in the completion queue, if anything, is
/// flushed; the other queue pair of the same completion queue works on.
fn destroy_with_work_outstanding(side: &mut Participant) {
    let end = side.connected_qp();
    let mut other = end.pd.create_rc(&QpConfig::default(), &end.cq, &end.cq, None).unwrap();
    side.connect(&mut other, &ConnectConfig::default());
    let TestQp { mut qp, mut cq, pd } = end;
    let buffer = pd.allocate(64, Access::ALL).unwrap();
    if side.is_left() {
        for i in 0..20 {
            // Stuck: the other side has no receive.
            qp.post(&SendWr::new(1000 + i, SendOp::Send, Data::Inline(&[1])).signaled()).unwrap();
            qp.post_recv(&RecvWr { wr_id: 2000 + i, sges: &[whole_region(&buffer)] }).unwrap();
        }
        drop(qp);
        side.wait_for_other();
        let mut sent = 0;
        for i in 0..50u64 {
            other.post(&SendWr::new(i, SendOp::SendImm(i as u32), Data::Inline(&[])).signaled()).unwrap();
            while sent <= i {
                let completion = next_completion(&mut cq);
                if completion.wr_id >= 1000 {
                    assert_eq!(completion.status, Status::Flushed, "{completion:?}");
                } else {
                    assert_eq!((completion.wr_id, completion.status), (sent, Status::Success));
                    sent += 1;
                }
            }
        }
    } else {
        (0..50).for_each(|i| other.post_recv(&RecvWr { wr_id: i, sges: &[] }).unwrap());
        side.wait_for_other();
        (0..50).for_each(|i| assert_eq!(expect_success(&mut cq, i).imm, Some(i as u32)));
    }
    side.wait_for_other();
}

/// Completions of a destroyed queue pair may or may not be returned, but they are valid, and the queue keeps working.
fn destroy_with_completions_unpolled(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        (0..10).for_each(|i| end.inline(i, SendOp::Write(remote.at(0)), &[1; 8]));
        // Its completion would say that those before it are done.
        std::thread::sleep(crate::participant::QUIET_PERIOD);
    }
    let number = end.qp.qp_num();
    side.wait_for_other();
    end.qp = end.pd.create_rc(&QpConfig::default(), &end.cq, &end.cq, None).unwrap();
    side.connect(&mut end.qp, &ConnectConfig::default());
    if side.is_left() {
        end.inline(100, SendOp::Write(remote.at(0)), &[2; 8]);
        let mut expected = 0;
        loop {
            let completion = next_completion(&mut end.cq);
            if completion.wr_id == 100 {
                assert_opcode(&completion, Opcode::Write);
                assert_eq!(completion.qp_num, end.qp.qp_num());
                break;
            }
            assert_eq!((completion.qp_num, completion.wr_id), (number, expected), "{completion:?}");
            expected += 1;
        }
    }
    side.wait_for_other();
}

/// Objects keep alive what they were created from, whatever the caller drops first.
fn parents_dropped_first(side: &mut Participant) {
    let device = side.open_again();
    let TestQp { mut qp, cq, pd } = TestQp::unconnected(&device, &TestConfig::default());
    let region = pd.allocate(4096, Access::ALL).unwrap();
    let mut recv_cq = device.create_cq(&CqConfig::default()).unwrap();
    let srq = pd.create_srq(&Default::default()).unwrap();
    let on_srq = pd.create_rc(&QpConfig::default(), &cq, &recv_cq, Some(&srq)).unwrap();
    let mut other = pd.create_rc(&QpConfig::default(), &recv_cq, &recv_cq, None).unwrap();
    drop((device, pd, srq));
    side.connect(&mut qp, &ConnectConfig::default());
    side.connect(&mut other, &ConnectConfig::default());
    drop(on_srq);
    // Nobody polls this one any more; its queue pair still works.
    drop(cq);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        qp.post(&SendWr::new(1, SendOp::Write(remote.at(0)), Data::Inline(&[5; 8])).signaled()).unwrap();
        other
            .post(&SendWr::new(2, SendOp::WriteImm(remote.at(8), 2), Data::Inline(&[6; 8])).signaled())
            .unwrap();
        expect_success(&mut recv_cq, 2);
        wait_until("the WRITE without a completion to take effect", || {
            let sges = [region.sge(0..8).unwrap()];
            other.post(&SendWr::new(3, SendOp::Read(remote.at(0)), Data::Regions(&sges)).signaled()).unwrap();
            expect_success(&mut recv_cq, 3);
            read_bytes(&region, 0, 8) == [5; 8]
        });
    } else {
        other.post_recv(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
        expect_success(&mut recv_cq, 1);
        assert_eq!(read_bytes(&region, 8, 8), [6; 8]);
    }
    side.wait_for_other();
}

/// Queues are `Send`: another thread may use what one thread created.
fn moved_to_another_thread(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        side.wait_for_other();
        let end = std::thread::spawn(move || {
            (0..10).for_each(|i| end.inline(i, SendOp::SendImm(i as u32), &[]));
            end.expect_all_success(0..5);
            end
        });
        let mut end = end.join().expect("the sending thread");
        end.expect_all_success(5..10);
    } else {
        (0..10).for_each(|i| end.recv(i));
        side.wait_for_other();
        // The queue pair stays here, its completion queue goes.
        let TestQp { qp, mut cq, .. } = end;
        let polling = std::thread::spawn(move || {
            (0..10).for_each(|i| assert_eq!(expect_success(&mut cq, i).imm, Some(i as u32)))
        });
        polling.join().expect("the polling thread");
        drop(qp);
    }
    side.wait_for_other();
}

/// A region is dropped while the peer writes to it: the peer's writes fail from then on, and a region that is allocated
/// afterwards is not modified.
fn region_dropped_while_the_peer_writes(side: &mut Participant) {
    for round in 0..5 {
        let mut end = side.connected_qp();
        if side.is_left() {
            let remote: RemoteMemory = side.receive();
            let source = end.region(4096);
            write_bytes(&source, 0, &[0xdd; 4096]);
            let mut written = 0u64;
            wait_until("the writes to fail", || {
                end.post(written, SendOp::Write(remote.at(0)), &source);
                let completion = next_completion(&mut end.cq);
                written += 1;
                if !completion.status.is_success() {
                    assert_eq!(completion.status, Status::RemoteAccess, "{completion:?}");
                }
                !completion.status.is_success()
            });
        } else {
            let region = end.region(4096);
            side.send(&region.remote());
            wait_until("the first bytes", || read_bytes(&region, 4095, 1) == [0xdd]);
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            drop(region);
            let successor = end.region(4096);
            assert_no_completion(&mut end.cq);
            assert_eq!(read_bytes(&successor, 0, 4096), [0; 4096]);
        }
        side.wait_for_other();
    }
}

/// 64 connections end in one completion queue; each message shows once, and in the order of its connection.
fn sixty_four_queue_pairs_one_queue(side: &mut Participant) {
    const QPS: usize = 64;
    let rounds = side.repetitions(200) as u32;
    let mut end = TestQp::unconnected(
        &side.device,
        &TestConfig { cq: CqConfig { depth: 2048 }, ..TestConfig::default() },
    );
    let config = QpConfig { max_send_wr: 16, max_recv_wr: 16, ..QpConfig::default() };
    let mut qps: Vec<_> = (0..QPS)
        .map(|_| {
            let mut qp = end.pd.create_rc(&config, &end.cq, &end.cq, None).unwrap();
            (qp.init(Access::ALL)).unwrap();
            (0..8).for_each(|i| qp.post_recv(&RecvWr { wr_id: i, sges: &[] }).unwrap());
            side.connect(&mut qp, &ConnectConfig::default());
            qp
        })
        .collect();
    let mut posted = [0u32; QPS];
    let mut sent = [0u32; QPS];
    let mut received = [0u32; QPS];
    // Both sides send on all of them at once.
    wait_until("all messages", || {
        for (i, qp) in qps.iter_mut().enumerate() {
            if posted[i] < rounds && posted[i] < sent[i] + 4 {
                let wr = SendWr::new(u64::from(posted[i]), SendOp::SendImm(posted[i]), Data::Inline(&[]));
                qp.post(&wr.signaled()).unwrap();
                posted[i] += 1;
            }
        }
        let mut refill = vec![];
        end.cq
            .poll(64, |c| {
                let i = qps.iter().position(|qp| qp.qp_num() == c.qp_num).expect("one of ours");
                assert_eq!(c.status, Status::Success, "{c:?}");
                if c.opcode == Opcode::Send {
                    assert_eq!(c.wr_id, u64::from(sent[i]));
                    sent[i] += 1;
                } else {
                    assert_eq!(c.imm, Some(received[i]), "{c:?}");
                    received[i] += 1;
                    refill.push(i);
                }
            })
            .unwrap();
        refill.into_iter().for_each(|i| qps[i].post_recv(&RecvWr { wr_id: 9, sges: &[] }).unwrap());
        sent == [rounds; QPS] && received == [rounds; QPS]
    });
    side.wait_for_other();
    assert_no_completion(&mut end.cq);
}

/// Two devices of one side at work at once: the same keys and numbers on both mean different things.
fn two_devices(side: &mut Participant) {
    let devices: [Device; 2] = [side.open(0), side.open(1)];
    let mut ends = devices.map(|device| {
        let mut end = TestQp::unconnected(&device, &TestConfig::default());
        side.connect(&mut end.qp, &ConnectConfig::default());
        end
    });
    let regions = [ends[0].region(64), ends[1].region(64)];
    let remotes = [0, 1].map(|i| side.exchange::<RemoteMemory>(&regions[i].remote()));
    ends.iter_mut().for_each(|end| end.recv(1));
    side.wait_for_other();
    for i in [0, 1] {
        let bytes = pattern(64, i as u64 + 1);
        ends[i].inline(2, SendOp::WriteImm(remotes[i].at(0), i as u32), &bytes);
    }
    for i in [0, 1] {
        for _ in 0..2 {
            let completion = next_completion(&mut ends[i].cq);
            assert_eq!((completion.status, completion.qp_num), (Status::Success, ends[i].qp.qp_num()));
            if completion.opcode == Opcode::RecvWriteImm {
                assert_eq!(completion.imm, Some(i as u32));
                assert_eq!(read_bytes(&regions[i], 0, 64), pattern(64, i as u64 + 1));
            }
        }
    }
    side.wait_for_other();
}

/// Allocating and dropping regions leaks nothing.
fn many_regions(side: &mut Participant) {
    let mut end = side.connected_qp();
    for i in 0..side.repetitions(10_000) {
        let region = end.region(4096 + i % 5000);
        if i % 1000 == 0 {
            write_bytes(&region, 0, &[1; 4096]);
        }
    }
    let region = end.region(1 << 20);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::Write(remote.at(0)), &[1]);
        end.expect_success(1);
    }
    side.wait_for_other();
}

/// The same for memory registered in place.
fn many_regions_in_place(side: &mut Participant) {
    let mut end = side.connected_qp();
    let mut bytes = vec![0u8; 8192];
    for i in 0..side.repetitions(10_000) {
        let at = i % 100;
        // SAFETY: inside `bytes`, which outlives the region; nothing else touches it meanwhile.
        let region = unsafe { end.pd.register(bytes.as_mut_ptr().wrapping_add(at), 4096, Access::ALL) };
        drop(region.expect("register"));
    }
    // SAFETY: as above; `region` is declared after `bytes` and dropped before it.
    let region = unsafe { end.pd.register(bytes.as_mut_ptr(), 8192, Access::ALL) }.expect("register");
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::Write(remote.at(0)), &[1]);
        end.expect_success(1);
    }
    side.wait_for_other();
}

/// Creating and dropping queue pairs, some of them connected, leaks nothing.
fn many_queue_pairs(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    for i in 0..side.repetitions(2000) {
        let mut qp = end.pd.create_rc(&SMALL, &end.cq, &end.cq, None).unwrap();
        if i % 3 == 0 {
            let mut peer = end.pd.create_rc(&SMALL, &end.cq, &end.cq, None).unwrap();
            qp.connect(&peer.address(), &ConnectConfig::default()).unwrap();
            peer.connect(&qp.address(), &ConnectConfig::default()).unwrap();
        }
        if i % 5 == 0 {
            drop(end.pd.create_ud(&SMALL, &end.cq, &end.cq, None).unwrap());
        }
    }
}

/// The same for completion queues, shared receive queues and domains.
fn many_completion_queues(side: &mut Participant) {
    for _ in 0..side.repetitions(1000) {
        let pd = side.device.alloc_pd().unwrap();
        let cq = side.device.create_cq(&CqConfig { depth: 16 }).unwrap();
        let srq = pd.create_srq(&Default::default()).unwrap();
        drop(pd.create_rc(&SMALL, &cq, &cq, Some(&srq)).unwrap());
    }
}

/// Connections between the two sides made, used and destroyed in turn; the ends go in different order.
fn connections_come_and_go(side: &mut Participant) {
    for round in 0..side.repetitions(200) as u32 {
        let mut end = side.connected_qp();
        if side.is_left() == (round % 2 == 0) {
            end.inline(1, SendOp::SendImm(round), &[]);
            end.expect_success(1);
        } else {
            end.recv(2);
            assert_eq!(end.expect_success(2).imm, Some(round));
        }
        if round % 3 == 0 {
            side.wait_for_other();
        }
    }
    side.wait_for_other();
}

/// Opening and closing devices leaks nothing, and the last device works like the first.
fn devices_come_and_go(side: &mut Participant) {
    for round in 0..side.repetitions(40) as u32 {
        let device = side.open_again();
        let mut end = TestQp::unconnected(&device, &TestConfig::default());
        side.connect(&mut end.qp, &ConnectConfig::default());
        end.recv(1);
        side.wait_for_other();
        end.inline(2, SendOp::SendImm(round), &[]);
        for _ in 0..2 {
            assert_eq!(next_completion(&mut end.cq).status, Status::Success);
        }
        side.wait_for_other();
    }
}
