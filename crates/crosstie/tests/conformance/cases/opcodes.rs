//! Each operation once, with every field of its completions.

use crosstie::device::{Data, Opcode, Posted, RemoteMemory, SendOp, SendWr};

use super::cases;
use crate::participant::{
    Participant, assert_no_completion, assert_opcode, pattern, read_bytes, read_word, write_bytes,
};

cases!("opcodes":
    send, send_imm, write, write_imm, write_imm_leaves_the_receive_alone, read, compare_swap_that_matches,
    compare_swap_that_does_not_match, fetch_add, fetch_add_wraps, zero_bytes, wr_ids_come_back, immediates_come_back,
    unsignaled_successes_are_silent, inline_with_a_head, batch, batch_that_stops_in_the_middle, ping_pong,
);

/// SEND: bytes, length, both queue pairs' numbers, and no immediate.
fn send(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(128);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(128, 1));
        side.wait_for_other();
        end.post(11, SendOp::Send, &region);
        let sent = end.expect_success(11);
        assert_opcode(&sent, Opcode::Send);
        assert_eq!((sent.qp_num, sent.imm), (end.qp.qp_num(), None));
    } else {
        end.recv_into(22, &region);
        side.wait_for_other();
        let received = end.expect_success(22);
        assert_opcode(&received, Opcode::Recv);
        assert_eq!((received.byte_len, received.imm, received.qp_num), (128, None, end.qp.qp_num()));
        assert_eq!(read_bytes(&region, 0, 128), pattern(128, 1));
    }
    side.wait_for_other();
    assert_no_completion(&mut end.cq);
}

/// SEND+IMM: as SEND, with the immediate.
fn send_imm(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(100);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(100, 2));
        side.wait_for_other();
        end.post(1, SendOp::SendImm(0xfeed_beef), &region);
        assert_opcode(&end.expect_success(1), Opcode::Send);
    } else {
        end.recv_into(2, &region);
        side.wait_for_other();
        let received = end.expect_success(2);
        assert_opcode(&received, Opcode::Recv);
        assert_eq!((received.byte_len, received.imm), (100, Some(0xfeed_beef)));
        assert_eq!(read_bytes(&region, 0, 100), pattern(100, 2));
    }
    side.wait_for_other();
}

/// WRITE: the bytes arrive, the bytes next to them do not change, and the target gets no completion.
fn write(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(300);
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        let source = end.region(100);
        write_bytes(&source, 0, &pattern(100, 3));
        end.post(5, SendOp::Write(remote.at(100)), &source);
        assert_opcode(&end.expect_success(5), Opcode::Write);
        side.wait_for_other();
    } else {
        write_bytes(&region, 0, &[0xaa; 300]);
        end.recv(9);
        side.send(&region.remote());
        side.wait_for_other();
        assert_eq!(read_bytes(&region, 0, 100), [0xaa; 100]);
        assert_eq!(read_bytes(&region, 100, 100), pattern(100, 3));
        assert_eq!(read_bytes(&region, 200, 100), [0xaa; 100]);
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
}

/// WRITE+IMM: the target's next receive completes with immediate and exact length.
fn write_imm(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(4096);
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        write_bytes(&region, 0, &pattern(4096, 4));
        let sge = region.sge(0..777).unwrap();
        let op = SendOp::WriteImm(remote.at(1000), 7);
        end.qp.post(&SendWr::new(6, op, Data::Regions(&[sge])).signaled()).unwrap();
        assert_opcode(&end.expect_success(6), Opcode::Write);
    } else {
        end.recv(3);
        side.send(&region.remote());
        let received = end.expect_success(3);
        assert_opcode(&received, Opcode::RecvWriteImm);
        assert_eq!((received.byte_len, received.imm), (777, Some(7)));
        assert_eq!(received.qp_num, end.qp.qp_num());
        assert_eq!(read_bytes(&region, 1000, 777), pattern(4096, 4)[..777]);
        assert_eq!(read_bytes(&region, 1777, 10), [0; 10]);
    }
    side.wait_for_other();
}

/// WRITE+IMM consumes a receive, but does not write to the receive's memory.
fn write_imm_leaves_the_receive_alone(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        end.inline(1, SendOp::WriteImm(remote.at(0), 1), &[1; 64]);
        end.inline(2, SendOp::Send, &[2; 64]);
        end.expect_success(1);
        end.expect_success(2);
    } else {
        let (first, second) = (end.region(64), end.region(64));
        end.recv_into(1, &first);
        end.recv_into(2, &second);
        side.send(&region.remote());
        assert_opcode(&end.expect_success(1), Opcode::RecvWriteImm);
        assert_opcode(&end.expect_success(2), Opcode::Recv);
        assert_eq!(read_bytes(&region, 0, 64), [1; 64]);
        assert_eq!(read_bytes(&first, 0, 64), [0; 64]);
        assert_eq!(read_bytes(&second, 0, 64), [2; 64]);
    }
    side.wait_for_other();
}

/// READ: the target's bytes arrive, `byte_len` is exact, and the target gets no completion.
fn read(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(512);
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        let sges = [region.sge(10..210).unwrap()];
        let wr = SendWr::new(8, SendOp::Read(remote.at(55)), Data::Regions(&sges)).signaled();
        end.qp.post(&wr).unwrap();
        let done = end.expect_success(8);
        assert_opcode(&done, Opcode::Read);
        assert_eq!(done.byte_len, 200);
        assert_eq!(read_bytes(&region, 0, 10), [0; 10]);
        assert_eq!(read_bytes(&region, 10, 200), pattern(512, 5)[55..255]);
        assert_eq!(read_bytes(&region, 210, 10), [0; 10]);
        side.wait_for_other();
    } else {
        write_bytes(&region, 0, &pattern(512, 5));
        end.recv(1);
        side.send(&region.remote());
        side.wait_for_other();
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
}

/// Compare-and-swap with the expected value: swaps and returns the former value.
fn compare_swap_that_matches(side: &mut Participant) {
    atomic(side, 41, |remote| SendOp::CompareSwap { remote: remote.at(8), compare: 41, swap: 42 }, 42);
}

/// Compare-and-swap with another value: changes nothing and returns the current value.
fn compare_swap_that_does_not_match(side: &mut Participant) {
    atomic(side, 40, |remote| SendOp::CompareSwap { remote: remote.at(8), compare: 41, swap: 42 }, 40);
}

/// Fetch-and-add: stores the sum and returns the former value.
fn fetch_add(side: &mut Participant) {
    atomic(side, 1 << 40, |remote| SendOp::FetchAdd { remote: remote.at(8), add: 5 }, (1 << 40) + 5);
}

/// Fetch-and-add wraps at 64 bits.
fn fetch_add_wraps(side: &mut Participant) {
    atomic(side, u64::MAX - 1, |remote| SendOp::FetchAdd { remote: remote.at(8), add: 3 }, 1);
}

/// One atomic on the second of three words, which is `before` and must become `after`; the others must not change.
fn atomic(side: &mut Participant, before: u64, op: impl Fn(RemoteMemory) -> SendOp, after: u64) {
    let mut end = side.connected_qp();
    let region = end.region(24);
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        let op = op(remote);
        let sge = region.sge(8..16).unwrap();
        end.qp.post(&SendWr::new(77, op, Data::Regions(&[sge])).signaled()).unwrap();
        let done = end.expect_success(77);
        let compares = matches!(op, SendOp::CompareSwap { .. });
        assert_opcode(&done, if compares { Opcode::CompareSwap } else { Opcode::FetchAdd });
        assert_eq!([read_word(&region, 0), read_word(&region, 8), read_word(&region, 16)], [0, before, 0]);
        side.wait_for_other();
    } else {
        for at in [0, 8, 16] {
            write_bytes(&region, at, &before.to_ne_bytes());
        }
        side.send(&region.remote());
        side.wait_for_other();
        assert_eq!(
            [read_word(&region, 0), read_word(&region, 8), read_word(&region, 16)],
            [before, after, before]
        );
    }
    side.wait_for_other();
}

/// Empty messages complete and consume receives, and write nothing.
fn zero_bytes(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        let none = [region.sge(5..5).unwrap()];
        let ops = [
            SendOp::Send,
            SendOp::SendImm(1),
            SendOp::Write(remote.at(0)),
            SendOp::WriteImm(remote.at(0), 2),
            SendOp::Read(remote.at(0)),
        ];
        for (id, op) in ops.into_iter().enumerate() {
            end.qp.post(&SendWr::new(id as u64, op, Data::Regions(&none)).signaled()).unwrap();
            end.expect_success(id as u64);
        }
        end.qp.post(&SendWr::new(5, SendOp::Send, Data::Regions(&[])).signaled()).unwrap();
        end.expect_success(5);
        end.inline(6, SendOp::Send, &[]);
        end.expect_success(6);
        assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
        side.wait_for_other();
    } else {
        write_bytes(&region, 0, &[7; 64]);
        for id in 0..5 {
            end.recv_into(id, &region);
        }
        side.send(&region.remote());
        let immediates = [None, Some(1), Some(2), None, None];
        for (id, imm) in immediates.into_iter().enumerate() {
            let received = end.expect_success(id as u64);
            assert_eq!((received.byte_len, received.imm), (0, imm), "{received:?}");
        }
        side.wait_for_other();
        assert_eq!(read_bytes(&region, 0, 64), [7; 64]);
    }
    side.wait_for_other();
}

/// Every bit of `wr_id` is returned, for sends and receives.
fn wr_ids_come_back(side: &mut Participant) {
    let ids = [0, 1, u64::MAX, 1 << 63, 0x0123_4567_89ab_cdef, u64::from(u32::MAX), 1 << 32];
    let mut end = side.connected_qp();
    if side.is_left() {
        side.wait_for_other();
        for id in ids {
            end.inline(id, SendOp::Send, &[]);
            end.expect_success(id);
        }
    } else {
        ids.iter().for_each(|id| end.recv(*id));
        side.wait_for_other();
        end.expect_all_success(ids);
    }
    side.wait_for_other();
}

/// Every bit of an immediate arrives in its position.
fn immediates_come_back(side: &mut Participant) {
    let immediates = [0, 1, u32::MAX, 1 << 31, 0x0102_0304];
    let mut end = side.connected_qp();
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        for imm in immediates {
            end.inline(0, SendOp::SendImm(imm), &[]);
            end.expect_success(0);
            end.inline(1, SendOp::WriteImm(remote.at(0), imm), &[0; 8]);
            end.expect_success(1);
        }
    } else {
        (0..10).for_each(|id| end.recv(id));
        side.wait_for_other();
        for id in 0..10 {
            assert_eq!(end.expect_success(id).imm, Some(immediates[id as usize / 2]));
        }
    }
    side.wait_for_other();
}

/// Successful unsignaled requests produce no completion; a later signaled one means that they are done. The case posts more
/// of them than the send queue holds, so their entries must become free.
fn unsignaled_successes_are_silent(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for round in 0..40u64 {
            for i in 0..31 {
                let bytes = (round * 32 + i).to_ne_bytes();
                let op = SendOp::Write(remote.at(0));
                end.qp.post(&SendWr::new(i, op, Data::Inline(&bytes))).expect("places come back");
            }
            end.inline(1000 + round, SendOp::Write(remote.at(0)), &(round * 32 + 31).to_ne_bytes());
            end.expect_success(1000 + round);
        }
        assert_no_completion(&mut end.cq);
        side.wait_for_other();
    } else {
        side.wait_for_other();
        assert_eq!(read_word(&region, 0), 40 * 32 - 1);
    }
    side.wait_for_other();
}

/// Inline data in two pieces arrives as one message, of all lengths, for each operation that sends.
fn inline_with_a_head(side: &mut Participant) {
    let mut end = side.connected_qp();
    let (region, head) = (end.region(256), [0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09]);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for len in 0..=64u64 {
        let bytes = pattern(len as usize, len);
        let message = [&head.map(u64::to_ne_bytes).concat()[..], &bytes].concat();
        let op = match len % 3 {
            0 => SendOp::SendImm(len as u32),
            // At all places in a cache line.
            _ => SendOp::WriteImm(remote.at(len), len as u32),
        };
        let at = if len % 3 == 0 { 0 } else { len as usize };
        if side.is_left() {
            side.wait_for_other();
            let wr = SendWr::new(len, op, Data::InlineHead { head, bytes: &bytes });
            if end.qp.post(&wr.signaled_if_queued()).unwrap() == Posted::Queued {
                end.expect_success(len);
            }
            side.wait_for_other();
        } else {
            write_bytes(&region, 0, &[0xaa; 256]);
            end.recv_into(len, &region);
            side.wait_for_other();
            let received = end.expect_success(len);
            assert_eq!((received.imm, received.byte_len), (Some(len as u32), message.len() as u32));
            assert!(received.inline_data().is_none_or(|data| data == message), "{received:?}");
            assert_eq!(read_bytes(&region, at, message.len()), message, "length {len}");
            let outside: Vec<u8> =
                [read_bytes(&region, 0, at), read_bytes(&region, at + message.len(), 100)].concat();
            assert_eq!(outside, vec![0xaa; at + 100]);
            side.wait_for_other();
        }
    }
    assert_no_completion(&mut end.cq);
}

/// A batch executes its requests in order.
fn batch(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64 * 8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        let posted = end.qp.post_batch(|batch| {
            for i in 0..64u64 {
                let op = SendOp::WriteImm(remote.at(i * 8), i as u32);
                let bytes = (i + 1).to_ne_bytes();
                let wr = SendWr::new(i, op, Data::Inline(&bytes));
                batch.post(&if i % 8 == 7 { wr.signaled() } else { wr })?;
            }
            Ok::<_, crosstie::device::PostError>(())
        });
        posted.unwrap();
        end.expect_all_success((0..8).map(|i| i * 8 + 7));
    } else {
        (0..64).for_each(|i| end.recv(i));
        side.wait_for_other();
        for i in 0..64 {
            let received = end.expect_success(i);
            assert_eq!((received.imm, received.byte_len), (Some(i as u32), 8));
            assert_eq!(read_word(&region, i as usize * 8), i + 1);
        }
    }
    side.wait_for_other();
    assert_no_completion(&mut end.cq);
}

/// A batch whose closure returns an error still posts the requests that it accepted, and the queue pair keeps working.
fn batch_that_stops_in_the_middle(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        side.wait_for_other();
        let stopped = end.qp.post_batch(|batch| -> Result<(), Box<dyn std::error::Error>> {
            for i in 0..3 {
                batch.post(&SendWr::new(i, SendOp::SendImm(i as u32), Data::Inline(&[])).signaled())?;
            }
            Err("enough".into())
        });
        assert_eq!(stopped.unwrap_err().to_string(), "enough");
        end.expect_all_success(0..3);
        end.inline(3, SendOp::SendImm(3), &[]);
        end.expect_success(3);
    } else {
        (0..4).for_each(|i| end.recv(i));
        side.wait_for_other();
        (0..4).for_each(|i| assert_eq!(end.expect_success(i).imm, Some(i as u32)));
    }
    side.wait_for_other();
}

/// WRITE+IMM back and forth.
fn ping_pong(side: &mut Participant) {
    let rounds = side.repetitions(2000) as u64;
    let mut end = side.connected_qp();
    let region = end.region(32);
    let remote: RemoteMemory = side.exchange(&region.remote());
    end.recv(0);
    side.wait_for_other();
    for round in 0..rounds {
        if side.is_left() {
            end.qp.post(&ping(remote, round, &pattern(32, round))).unwrap();
        }
        let received = loop {
            let completion = crate::participant::next_completion(&mut end.cq);
            if completion.opcode == Opcode::RecvWriteImm {
                break completion;
            }
            assert_opcode(&completion, Opcode::Write);
        };
        assert_eq!((received.imm, received.byte_len), (Some(round as u32), 32));
        assert_eq!(read_bytes(&region, 0, 32), pattern(32, round));
        end.recv(round + 1);
        if !side.is_left() {
            end.qp.post(&ping(remote, round, &pattern(32, round))).unwrap();
        }
    }
    side.wait_for_other();
}

fn ping(remote: RemoteMemory, round: u64, bytes: &[u8]) -> SendWr<'_> {
    let wr = SendWr::new(round, SendOp::WriteImm(remote.at(0), round as u32), Data::Inline(bytes));
    if round.is_multiple_of(16) { wr.signaled() } else { wr }
}
