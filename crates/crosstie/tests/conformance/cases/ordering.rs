//! Data is visible before its completion, and the requests of one connection keep their order.

use crosstie::device::{Data, Opcode, QpConfig, RemoteMemory, SendOp, SendWr, Status};

use super::cases;
use crate::participant::{
    Participant, TestConfig, TestQp, next_completion, pattern, read_bytes, read_word, take_completions,
    wait_until, whole_region, write_bytes,
};

cases!("ordering":
    write_imm_data_before_completion, send_data_before_completion, write_before_send, write_before_write_imm,
    read_sees_the_write_before_it, write_does_not_pass_an_atomic, fence, completions_come_in_order,
    both_directions_at_once, atomics_take_effect_in_order, two_connections_do_not_wait_for_each_other,
);

/// Thousands of WRITE+IMM through a ring of slots: when the completion is visible, so is every byte of the message.
fn write_imm_data_before_completion(side: &mut Participant) {
    const SLOTS: u64 = 64;
    const LEN: usize = 200;
    let count = side.repetitions(20_000) as u64;
    let mut end = side.connected_qp();
    let region = end.region(SLOTS as usize * LEN);
    let credit = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    let credits: RemoteMemory = side.exchange(&credit.remote());
    if side.is_left() {
        side.wait_for_other();
        for i in 0..count {
            wait_until("credit", || read_word(&credit, 0) + SLOTS > i);
            let bytes = pattern(LEN, i);
            let op = SendOp::WriteImm(remote.at(i % SLOTS * LEN as u64), i as u32);
            let wr = SendWr::new(i, op, Data::Inline(&bytes));
            let signaled = i % 32 == 31;
            end.qp.post(&if signaled { wr.signaled() } else { wr }).unwrap();
            if signaled {
                end.expect_success(i);
            }
        }
    } else {
        (0..SLOTS).for_each(|i| end.recv(i));
        side.wait_for_other();
        let mut i = 0;
        while i < count {
            let completion = next_completion(&mut end.cq);
            if completion.opcode == Opcode::Write {
                continue;
            }
            assert_eq!((completion.imm, completion.byte_len), (Some(i as u32), LEN as u32), "{completion:?}");
            let at = (i % SLOTS) as usize * LEN;
            assert!(
                read_bytes(&region, at, LEN) == pattern(LEN, i),
                "the bytes of message {i} came after its completion"
            );
            end.recv(i + SLOTS);
            i += 1;
            if i % 16 == 0 {
                end.inline(0, SendOp::Write(credits.at(0)), &i.to_ne_bytes());
            }
        }
    }
    side.wait_for_other();
}

/// The same with SEND from a region into receives with two scatter/gather entries.
fn send_data_before_completion(side: &mut Participant) {
    const DEPTH: usize = 32;
    let count = side.repetitions(6000) as u64;
    let mut end = side.connected_qp();
    let len = 1500;
    let region = end.region(DEPTH * len);
    let slot = |i: u64| (i as usize % DEPTH) * len;
    if side.is_left() {
        side.wait_for_other();
        for i in 0..count {
            if i >= DEPTH as u64 {
                end.expect_success(i - DEPTH as u64);
            }
            write_bytes(&region, slot(i), &pattern(len, i));
            let sges = [region.sge(slot(i)..slot(i) + len).unwrap()];
            let wr = SendWr::new(i, SendOp::SendImm(i as u32), Data::Regions(&sges)).signaled();
            end.qp.post(&wr).unwrap();
        }
        end.expect_all_success(count.saturating_sub(DEPTH as u64)..count);
    } else {
        let post = |end: &mut TestQp, i: u64| {
            let at = slot(i);
            let sges = [region.sge(at..at + 100).unwrap(), region.sge(at + 100..at + len).unwrap()];
            end.qp.post_recv(&crosstie::device::RecvWr { wr_id: i, sges: &sges }).unwrap();
        };
        (0..DEPTH as u64).for_each(|i| post(&mut end, i));
        side.wait_for_other();
        for i in 0..count {
            let received = end.expect_success(i);
            assert_eq!((received.imm, received.byte_len), (Some(i as u32), len as u32));
            assert!(read_bytes(&region, slot(i), len) == pattern(len, i), "message {i}");
            post(&mut end, i + DEPTH as u64);
        }
    }
    side.wait_for_other();
}

/// When a SEND is received, the WRITEs before it are visible.
fn write_before_send(side: &mut Participant) {
    announced(side, |_| SendOp::Send);
}

/// When the immediate of a WRITE+IMM is received, the WRITEs before it to other addresses are visible.
fn write_before_write_imm(side: &mut Participant) {
    announced(side, |remote| SendOp::WriteImm(remote.at(0), 1));
}

/// Unsignaled writes of odd sizes, then a message that announces them.
fn announced(side: &mut Participant, announcement: impl Fn(RemoteMemory) -> SendOp) {
    let len = 20_000;
    let mut end = side.connected_qp();
    let region = end.region(len + 8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    let rounds = side.repetitions(200) as u64;
    for round in 0..rounds {
        let bytes = pattern(len, round);
        if side.is_left() {
            write_bytes(&region, 8, &bytes);
            side.wait_for_other();
            for (from, to) in [(8, 1001), (1001, 9999), (9999, 10_000), (10_000, len + 8)] {
                let sges = [region.sge(from..to).unwrap()];
                let op = SendOp::Write(remote.at(from as u64));
                end.qp.post(&SendWr::new(1, op, Data::Regions(&sges))).unwrap();
            }
            end.inline(2, announcement(remote), &[]);
            end.expect_success(2);
        } else {
            end.recv(round);
            side.wait_for_other();
            end.expect_success(round);
            assert!(read_bytes(&region, 8, len) == bytes, "round {round}");
        }
        side.wait_for_other();
    }
}

/// A READ behind a WRITE on the same connection returns what was written.
fn read_sees_the_write_before_it(side: &mut Participant) {
    let rounds = side.repetitions(500) as u64;
    let mut end = side.connected_qp();
    let (region, back) = (end.region(3000), end.region(3000));
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for round in 0..rounds {
            write_bytes(&region, 0, &pattern(3000, round));
            let op = SendOp::Write(remote.at(0));
            end.qp.post(&SendWr::new(0, op, Data::Regions(&[whole_region(&region)]))).unwrap();
            end.post(1, SendOp::Read(remote.at(0)), &back);
            end.expect_success(1);
            assert!(read_bytes(&back, 0, 3000) == pattern(3000, round), "round {round}");
        }
    }
    side.wait_for_other();
}

/// WRITE, FAA, WRITE on the same word: each sees what came before it.
fn write_does_not_pass_an_atomic(side: &mut Participant) {
    let rounds = side.repetitions(500) as u64;
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for round in 0..rounds {
            let write = |value: u64| value.to_ne_bytes();
            let op = SendOp::Write(remote.at(0));
            end.qp.post(&SendWr::new(0, op, Data::Inline(&write(round * 10)))).unwrap();
            for (i, add) in [1, 2].into_iter().enumerate() {
                let op = SendOp::FetchAdd { remote: remote.at(0), add };
                let sges = [region.sge(8 * i..8 * i + 8).unwrap()];
                end.qp.post(&SendWr::new(1, op, Data::Regions(&sges))).unwrap();
            }
            let op = SendOp::Write(remote.at(0));
            end.qp.post(&SendWr::new(2, op, Data::Inline(&write(7)))).unwrap();
            let sges = [region.sge(16..24).unwrap()];
            end.qp
                .post(&SendWr::new(3, SendOp::Read(remote.at(0)), Data::Regions(&sges)).signaled())
                .unwrap();
            end.expect_success(3);
            let seen = [read_word(&region, 0), read_word(&region, 8), read_word(&region, 16)];
            assert_eq!(seen, [round * 10, round * 10 + 1, 7]);
        }
    }
    side.wait_for_other();
}

/// A fenced WRITE sends the bytes that an earlier READ returned: it starts only after the READ has completed.
fn fence(side: &mut Participant) {
    let rounds = side.repetitions(300) as u64;
    let mut end = side.connected_qp();
    let region = end.region(4096);
    let scratch = end.region(2048);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for round in 0..rounds {
        if side.is_left() {
            side.wait_for_other();
            let sges = [whole_region(&scratch)];
            end.qp.post(&SendWr::new(1, SendOp::Read(remote.at(0)), Data::Regions(&sges))).unwrap();
            let copy = SendWr::new(2, SendOp::Write(remote.at(2048)), Data::Regions(&sges));
            end.qp.post(&copy.fenced().signaled()).unwrap();
            end.expect_success(2);
        } else {
            write_bytes(&region, 0, &pattern(2048, round));
            side.wait_for_other();
        }
        side.wait_for_other();
        if !side.is_left() {
            assert!(read_bytes(&region, 2048, 2048) == pattern(2048, round), "round {round}");
        }
    }
}

/// Signaled requests of all kinds, many at a time, complete in the order they were posted.
fn completions_come_in_order(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(8192);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        let sges = [region.sge(0..8).unwrap()];
        let long = [region.sge(0..8192).unwrap()];
        for i in 0..100u64 {
            let (op, data) = match i % 5 {
                0 => (SendOp::Write(remote.at(0)), Data::Regions(&long)),
                1 => (SendOp::Read(remote.at(0)), Data::Regions(&long)),
                2 => (SendOp::SendImm(i as u32), Data::Inline(&[])),
                3 => (SendOp::FetchAdd { remote: remote.at(0), add: 1 }, Data::Regions(&sges)),
                _ => (SendOp::WriteImm(remote.at(8), i as u32), Data::Inline(&[1; 8])),
            };
            end.qp.post(&SendWr::new(i, op, data).signaled()).unwrap();
        }
        end.expect_all_success(0..100);
    } else {
        (0..40).for_each(|i| end.recv(i));
        side.wait_for_other();
        for i in 0..40u64 {
            assert_eq!(end.expect_success(i).imm, Some((i as u32 / 2) * 5 + if i % 2 == 0 { 2 } else { 4 }));
        }
    }
    side.wait_for_other();
}

/// Both sides stream to each other; each direction keeps its own order and loses nothing.
fn both_directions_at_once(side: &mut Participant) {
    const DEPTH: u64 = 64;
    let count = side.repetitions(10_000) as u64;
    let mut end = side.connected_qp();
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    (0..2 * DEPTH).for_each(|i| end.recv(i));
    side.wait_for_other();
    let (mut posted, mut sent, mut received) = (0, 0, 0);
    wait_until("both streams", || {
        while posted < count && posted < sent + DEPTH {
            let op = SendOp::WriteImm(remote.at(0), posted as u32);
            end.qp.post(&SendWr::new(posted, op, Data::Inline(&[0; 8])).signaled()).unwrap();
            posted += 1;
        }
        let mut arrived = 0;
        end.cq
            .poll(16, |c| {
                assert_eq!(c.status, Status::Success, "{c:?}");
                if c.opcode == Opcode::Write {
                    assert_eq!(c.wr_id, sent);
                    sent += 1;
                } else {
                    assert_eq!((c.wr_id, c.imm), (received, Some(received as u32)));
                    received += 1;
                    arrived += 1;
                }
            })
            .unwrap();
        (received - arrived..received).for_each(|i| end.recv(i + 2 * DEPTH));
        sent == count && received == count
    });
    side.wait_for_other();
}

/// A chain of atomics posted at once: each result is one more than the one before.
fn atomics_take_effect_in_order(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(8 * 128);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for i in 0..128 {
            let op = SendOp::FetchAdd { remote: remote.at(0), add: 1 };
            let sges = [region.sge(8 * i..8 * i + 8).unwrap()];
            let wr = SendWr::new(i as u64, op, Data::Regions(&sges));
            end.qp.post(&if i == 127 { wr.signaled() } else { wr }).unwrap();
        }
        end.expect_success(127);
        (0..128).for_each(|i| assert_eq!(read_word(&region, 8 * i), i as u64));
    }
    side.wait_for_other();
}

/// A connection that waits for a receive does not delay another connection between the same two devices.
fn two_connections_do_not_wait_for_each_other(side: &mut Participant) {
    let shape =
        TestConfig { qp: QpConfig { max_send_wr: 16, ..QpConfig::default() }, ..TestConfig::default() };
    let (mut stuck, mut free) = (side.connected_qp_with(&shape), side.connected_qp_with(&shape));
    if side.is_left() {
        stuck.inline(1, SendOp::Send, &[]);
        side.wait_for_other();
        for i in 0..100 {
            free.inline(i, SendOp::SendImm(i as u32), &[]);
            free.expect_success(i);
        }
        side.wait_for_other();
        stuck.expect_success(1);
    } else {
        (0..100).for_each(|i| free.recv(i));
        side.wait_for_other();
        assert_eq!(take_completions(&mut free.cq, 100).len(), 100);
        side.wait_for_other();
        stuck.recv(1);
        stuck.expect_success(1);
    }
    side.wait_for_other();
}
