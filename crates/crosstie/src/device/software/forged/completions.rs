//! Completions that a peer forges in a completion queue of the victim: of unknown queue pairs, with wrong lengths, kinds and
//! opcodes, of receives that were not posted, and more than were posted.

use std::collections::HashSet;

use crosstie_testkit::wait::eventually;

use super::super::cq_ring::NewCqe;
use super::super::lane::NewEntry;
use super::super::layout::{CqeKind, QpNum, RequestWord, short_epoch};
use super::{Attacker, Ends, ForgedCompletion, RECEIVE, Victim, encode};
use crate::device::software::invalid_input_tests::shared_arc;
use crate::device::*;

/// What the victim may see of forged completions.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expect {
    /// No completion at all.
    Nothing,
    /// At most this many completions, which look like successful receives.
    Receives(usize),
    /// Not more than that.
    AtMost(usize),
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

/// A correct completion of a receive of this queue pair: of the first one of the SRQ, if it uses the SRQ.
fn template(qp: &RcQp) -> ForgedCompletion {
    let new = NewEntry { opcode: Opcode::Recv, status: Status::Success, byte_len: 16, imm: None };
    ForgedCompletion::in_lane(new, qp.qp_num(), 0)
}

/// A correct completion of a send of this queue pair.
fn send_template(victim: &Victim, qp: &RcQp) -> ForgedCompletion {
    let shared = shared_arc(&victim.device).qps.get(qp.qp_num()).unwrap();
    let new = NewCqe {
        kind: CqeKind::Send,
        opcode: Opcode::Send,
        status: Status::Success,
        request: RequestWord::of_send(99),
        qp_num: qp.qp_num(),
        byte_len: 16,
        detail: 0,
        has_imm: false,
        epoch: short_epoch(shared.epoch()),
    };
    ForgedCompletion::like(new, 99)
}

/// A correct completion of the first receive for datagrams.
fn datagram_template(victim: &Victim, qp: &UdQp) -> ForgedCompletion {
    let shared = shared_arc(&victim.device).qps.get(qp.qp_num()).unwrap();
    let new = NewCqe {
        kind: CqeKind::Recv,
        opcode: Opcode::Recv,
        status: Status::Success,
        request: RequestWord::of_recv(0, 1),
        qp_num: qp.qp_num(),
        byte_len: 56,
        detail: 0,
        has_imm: false,
        epoch: short_epoch(shared.epoch()),
    };
    ForgedCompletion::like(new, 0)
}

fn cases(victim: &Victim, ends: &Ends, posted: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |what: &str, forged: ForgedCompletion, count: usize, expect: Expect| {
        cases.push(Case { what: what.to_string(), forged, count, expect });
    };
    let (own, shared) = (template(&ends.own), template(&ends.shared));
    let [own_send, shared_send] = [&ends.own, &ends.shared].map(|qp| send_template(victim, qp));
    add("a correct one", own, 1, Expect::Receives(1));
    add("a correct one of the SRQ", shared, 1, Expect::Receives(1));

    // Other queue pairs.
    let never = QpNum::first(QpNum::INDICES - 1).bits();
    let honest = victim.honest.victim_own.qp_num();
    for (name, qp_num) in
        [("that does not exist", never), ("zero", 0), ("MAX", u32::MAX), ("of a peer", honest)]
    {
        for kind in 0..=6 {
            let forged = ForgedCompletion { qp_num, kind, ..own_send };
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
    add("all that were posted", own, posted, Expect::Receives(posted));
    add("more than were posted", own, posted + 3, Expect::AtMost(posted));
    add("more than were posted to the SRQ", shared, posted + 3, Expect::AtMost(1));
    add("the same receive of the SRQ again", shared, 5, Expect::Receives(1));
    // Receives that do not exist.
    for slot in [8, 9, 1 << 15, u16::MAX] {
        let request = slot.into();
        add(&format!("SRQ, slot {slot}"), ForgedCompletion { request, ..shared }, 1, Expect::Nothing);
    }
    // Receives of connections do not complete in the ring.
    for base in [own_send, shared_send] {
        for kind in [CqeKind::Recv as u8, 3] {
            let forged = ForgedCompletion { kind, opcode: Opcode::Recv as u8, request: 0, ..base };
            add(&format!("receive of kind {kind} in the ring"), forged, 1, Expect::Nothing);
        }
        for epoch_and_imm in [base.epoch_and_imm.wrapping_add(2), base.epoch_and_imm.wrapping_sub(2)] {
            add("send of another epoch", ForgedCompletion { epoch_and_imm, ..base }, 1, Expect::Nothing);
        }
    }
    // Entries that are not the next one.
    for base in [own, shared] {
        for skip in [1, 2, 7, 8, 9, 1 << 20, u32::MAX] {
            add(&format!("{skip} positions ahead"), ForgedCompletion { skip, ..base }, 1, Expect::Nothing);
        }
    }
    // A receive that says it is something else.
    for opcode in (0..8).filter(|opcode| ![5, 6].contains(opcode)) {
        add(&format!("opcode {opcode}"), ForgedCompletion { opcode, ..own }, 1, Expect::Failure);
        add(&format!("SRQ, opcode {opcode}"), ForgedCompletion { opcode, ..shared }, 1, Expect::Failure);
        let forged = ForgedCompletion { opcode: opcode ^ 7, ..own_send };
        add(&format!("send, opcode {}", opcode ^ 7), forged, 1, Expect::Anything);
    }
    for status in 1..=255 {
        add(&format!("status {status}"), ForgedCompletion { status, ..own }, 1, Expect::Anything);
    }
    // Datagrams.
    let datagram = datagram_template(victim, &ends.datagram);
    add("a correct datagram", datagram, 1, Expect::Receives(1));
    add("the same receive of datagrams again", datagram, 5, Expect::Receives(1));
    for slot in [8, 9, 1 << 15, u64::from(u32::MAX)] {
        add(
            &format!("datagram, slot {slot}"),
            ForgedCompletion { request: slot, ..datagram },
            1,
            Expect::Nothing,
        );
    }
    for byte_len in [RECEIVE as u32 + 1, 1 << 31, u32::MAX] {
        let forged = ForgedCompletion { byte_len, ..datagram };
        add(&format!("datagram, length {byte_len}"), forged, 1, Expect::Failure);
    }
    for opcode in (0..8).filter(|opcode| ![5, 6].contains(opcode)) {
        add(
            &format!("datagram, opcode {opcode}"),
            ForgedCompletion { opcode, ..datagram },
            1,
            Expect::Failure,
        );
    }
    for status in [1, 7, 255] {
        add(
            &format!("datagram, status {status}"),
            ForgedCompletion { status, ..datagram },
            1,
            Expect::Anything,
        );
    }
    for epoch_and_imm in [datagram.epoch_and_imm.wrapping_add(2), datagram.epoch_and_imm.wrapping_sub(2)] {
        let forged = ForgedCompletion { epoch_and_imm, ..datagram };
        add("datagram of another epoch", forged, 1, Expect::Nothing);
    }
    // Kinds that do not exist.
    for kind in (4..=255).step_by(3).chain([5]) {
        for request in [0, 1, u64::from(u32::MAX), u64::MAX, 1 << 14, (1 << 32) - (1 << 14)] {
            for base in [own_send, shared_send] {
                let forged = ForgedCompletion { kind, request, ..base };
                add(&format!("kind {kind}, request {request:#x}"), forged, 1, Expect::Anything);
            }
        }
    }
    // Sends that were not posted.
    for (request, detail) in [(0, 0), (u64::MAX, u32::MAX), (5, 1 << 31)] {
        let kind = CqeKind::Send as u8;
        let forged = ForgedCompletion { kind, opcode: 0, request, detail, ..own_send };
        add(&format!("send {request:#x} at {detail}"), forged, 4, Expect::Anything);
    }
    cases
}

#[test]
fn forged_completions_harm_only_the_connection_of_the_attacker() {
    let mut victim = Victim::new();
    let mut attacker = Attacker::start();
    let (mut number, mut total) = (0, usize::MAX);
    while number < total {
        let (mut ends, remote) = victim.connect(&mut attacker);
        let mut outstanding = HashSet::new();
        ends.post_receives(&victim.buffers, &mut outstanding);
        // All three queues have the same number of receives.
        let list = cases(&victim, &ends, outstanding.len() / 3);
        total = list.len();
        let Case { what, forged, count, expect } = &list[number];
        number += 1;
        let cq_at = {
            let is_datagram = forged.qp_num == ends.datagram.qp_num();
            let queue = if is_datagram { "datagram" } else { "own" };
            let qp = shared_arc(&victim.device).qps.get(ends.qp_num(queue)).unwrap();
            qp.block.recv_cq.load(core::sync::atomic::Ordering::Relaxed)
        };
        let written = attacker.ask(&format!("complete {cq_at} {count} {}", encode(forged)));
        assert_eq!(written, count.to_string(), "{what}");
        let mut seen = Vec::new();
        let mut polled = 0;
        while polled < 4 {
            polled += 1;
            ends.cq.poll(16, |completion| seen.push(*completion)).unwrap();
            ends.datagram_cq.poll(16, |completion| seen.push(*completion)).unwrap();
        }
        for completion in &seen {
            let qps = ["own", "shared", "datagram"].map(|queue| ends.qp_num(queue));
            let of_this_queue = qps.contains(&completion.qp_num);
            assert!(of_this_queue, "{what}: {completion:?}");
        }
        let is_receive = |c: &Completion| {
            c.status == Status::Success
                && matches!(c.opcode, Opcode::Recv | Opcode::RecvWriteImm)
                && c.byte_len as usize <= RECEIVE
                && c.inline_data().is_none_or(|data| data.len() == c.byte_len as usize)
        };
        match expect {
            Expect::Nothing => assert!(seen.is_empty(), "{what}: {seen:?}"),
            Expect::Receives(most) => {
                assert!(seen.iter().all(is_receive) && seen.len() == *most, "{what}: {seen:?}");
            }
            Expect::AtMost(most) => {
                assert!(seen.iter().all(is_receive) && seen.len() <= *most, "{what}: {seen:?}");
            }
            Expect::Failure => {
                assert!(seen.iter().all(|c| !c.status.is_success() && c.byte_len == 0), "{what}: {seen:?}");
                assert!(!seen.is_empty(), "{what}: the receive was lost");
                let qp = shared_arc(&victim.device).qps.get(forged.qp_num).unwrap();
                eventually(format_args!("{what}: the connection ends"), || qp.state() == QpState::Error);
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
