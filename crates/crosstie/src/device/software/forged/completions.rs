//! Completions that a peer forges in a completion queue of the victim: of unknown queue pairs, with wrong lengths, kinds and
//! opcodes, of receives that were not posted, and more than were posted.

use std::collections::HashSet;

use super::super::cq_ring::NewCqe;
use super::super::layout::{CqeKind, QpNum, RequestWord, short_epoch};
use super::{Attacker, Ends, ForgedCompletion, RECEIVE, ROLE, TIMEOUT, Victim, encode};
use crate::device::software::invalid_input_tests::shared_arc;
use crate::device::*;

/// What the victim may see of forged completions.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expect {
    /// No completion at all.
    Nothing,
    /// At most this many completions, which look like successful receives.
    Receives(usize),
    /// One failed receive, and the connection in ERR.
    Failure,
    /// Anything that `Victim::poll` allows.
    Anything,
}

struct Case {
    what: String,
    forged: ForgedCompletion,
    count: usize,
    expect: Expect,
}

/// A correct completion of a receive of `own`, or of the SRQ.
fn template(victim: &Victim, ends: &Ends, kind: CqeKind) -> ForgedCompletion {
    let qp = if kind == CqeKind::SharedRecv { &ends.shared } else { &ends.own };
    let shared = shared_arc(&victim.device).qp(qp.qp_num()).unwrap();
    let new = NewCqe {
        kind,
        opcode: Opcode::Recv,
        status: Status::Success,
        request: RequestWord::of_recv(0, 1),
        qp_num: qp.qp_num(),
        byte_len: 16,
        detail: 0,
        has_imm: false,
        epoch: short_epoch(shared.epoch()),
    };
    ForgedCompletion::like(new, 1 << 32)
}

fn cases(victim: &Victim, ends: &Ends, posted: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |what: &str, forged: ForgedCompletion, count: usize, expect: Expect| {
        cases.push(Case { what: what.to_string(), forged, count, expect });
    };
    let own = template(victim, ends, CqeKind::Recv);
    let shared = template(victim, ends, CqeKind::SharedRecv);
    add("a correct one", own, 1, Expect::Receives(1));
    add("a correct one of the SRQ", shared, 1, Expect::Receives(1));

    // Other queue pairs.
    let never = QpNum::first(QpNum::INDICES - 1).bits();
    let honest = victim.honest.victim_own.qp_num();
    for (name, qp_num) in
        [("that does not exist", never), ("zero", 0), ("MAX", u32::MAX), ("of a peer", honest)]
    {
        for kind in 0..=6 {
            let forged = ForgedCompletion { qp_num, kind, ..own };
            add(&format!("queue pair {name}, kind {kind}"), forged, 1, Expect::Nothing);
        }
    }
    // Lengths.
    for byte_len in [RECEIVE as u32 + 1, 4096, 1 << 31, u32::MAX] {
        add(&format!("length {byte_len}"), ForgedCompletion { byte_len, ..own }, 1, Expect::Failure);
        add(&format!("SRQ, length {byte_len}"), ForgedCompletion { byte_len, ..shared }, 1, Expect::Failure);
    }
    add("the longest", ForgedCompletion { byte_len: RECEIVE as u32, ..own }, 1, Expect::Receives(1));
    // More than were posted, and the same receive again.
    add("more than were posted", own, posted + 3, Expect::Receives(posted));
    add("the same receive of the SRQ again", shared, 5, Expect::Receives(1));
    // Receives that do not exist.
    for slot in [8, 9, 1 << 15, 1 << 16, u32::MAX] {
        let request = 1 << 32 | u64::from(slot);
        add(&format!("SRQ, slot {slot}"), ForgedCompletion { request, ..shared }, 1, Expect::Nothing);
    }
    // The wrong kind of receive.
    add(
        "own receive as one of the SRQ",
        ForgedCompletion { kind: CqeKind::SharedRecv as u8, ..own },
        1,
        Expect::Nothing,
    );
    add(
        "receive of the SRQ as own one",
        ForgedCompletion { kind: CqeKind::Recv as u8, ..shared },
        1,
        Expect::Nothing,
    );
    // An earlier or later connection.
    for epoch_and_imm in [own.epoch_and_imm.wrapping_add(2), own.epoch_and_imm.wrapping_sub(2)] {
        add("another epoch", ForgedCompletion { epoch_and_imm, ..own }, 1, Expect::Nothing);
    }
    // A receive that says it is something else.
    for opcode in (0..=255).filter(|opcode| ![5, 6].contains(opcode)) {
        add(&format!("opcode {opcode}"), ForgedCompletion { opcode, ..own }, 1, Expect::Failure);
        if opcode < 8 {
            add(&format!("SRQ, opcode {opcode}"), ForgedCompletion { opcode, ..shared }, 1, Expect::Failure);
        }
    }
    for status in 1..=255 {
        add(&format!("status {status}"), ForgedCompletion { status, ..own }, 1, Expect::Anything);
    }
    // Markers, which only the service thread of the victim pushes, and kinds that do not exist.
    for kind in (4..=255).step_by(3).chain([CqeKind::Flush as u8, CqeKind::Reclaim as u8]) {
        for request in [0, 1, u64::from(u32::MAX), u64::MAX, 1 << 14, (1 << 32) - (1 << 14)] {
            for base in [own, shared] {
                let forged = ForgedCompletion { kind, request, ..base };
                add(&format!("kind {kind}, request {request:#x}"), forged, 1, Expect::Anything);
            }
        }
    }
    // Sends that were not posted.
    for (request, detail) in [(0, 0), (u64::MAX, u32::MAX), (5, 1 << 31)] {
        let kind = CqeKind::Send as u8;
        let forged = ForgedCompletion { kind, opcode: 0, request, detail, ..own };
        add(&format!("send {request:#x} at {detail}"), forged, 4, Expect::Anything);
    }
    cases
}

#[test]
fn forged_completions_harm_only_the_connection_of_the_attacker() {
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    let mut victim = Victim::new();
    let mut attacker = Attacker::start();
    let (mut number, mut total) = (0, usize::MAX);
    while number < total {
        let (mut ends, remote) = victim.connect(&mut attacker);
        let mut outstanding = HashSet::new();
        ends.post_receives(&victim.buffers, &mut outstanding);
        // The queue pair's own queue and the SRQ have the same number of receives.
        let list = cases(&victim, &ends, outstanding.len() / 2);
        total = list.len();
        let Case { what, forged, count, expect } = &list[number];
        number += 1;
        let cq_at = {
            let qp = shared_arc(&victim.device).qp(ends.own.qp_num()).unwrap();
            qp.block.recv_cq.load(core::sync::atomic::Ordering::Relaxed)
        };
        let written = attacker.ask(&format!("complete {cq_at} {count} {}", encode(forged)));
        assert_eq!(written, count.to_string(), "{what}");
        let mut seen = Vec::new();
        let mut polled = 0;
        while polled < 4 {
            polled += 1;
            ends.cq.poll(16, |completion| seen.push(*completion)).unwrap();
        }
        for completion in &seen {
            let of_this_queue = [ends.own.qp_num(), ends.shared.qp_num()].contains(&completion.qp_num);
            assert!(of_this_queue, "{what}: {completion:?}");
        }
        let is_receive = |c: &Completion| {
            c.status == Status::Success
                && matches!(c.opcode, Opcode::Recv | Opcode::RecvWriteImm)
                && c.byte_len as usize <= RECEIVE
        };
        match expect {
            Expect::Nothing => assert!(seen.is_empty(), "{what}: {seen:?}"),
            Expect::Receives(most) => {
                assert!(seen.iter().all(is_receive) && seen.len() == *most, "{what}: {seen:?}");
            }
            Expect::Failure => {
                assert!(seen.iter().all(|c| !c.status.is_success() && c.byte_len == 0), "{what}: {seen:?}");
                assert!(!seen.is_empty(), "{what}: the receive was lost");
                let qp = if forged.qp_num == ends.own.qp_num() { &ends.own } else { &ends.shared };
                let begun = std::time::Instant::now();
                while qp.state() != QpState::Error {
                    assert!(begun.elapsed() < TIMEOUT, "{what}: the connection goes on");
                }
            }
            Expect::Anything => {}
        }
        for completion in &seen {
            outstanding.remove(&completion.wr_id);
        }
        victim.exchange(&mut ends, &mut outstanding, &mut attacker, remote, what);
    }
    println!("{total} forgeries");
}
