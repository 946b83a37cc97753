//! Posts that are refused, and that a refused post changed nothing.

use crosstie::device::{
    Access, ConnectConfig, CqConfig, CqError, Data, Event, PostError, Posted, QpAddress, QpConfig, QpState,
    RecvWr, RemoteAddr, RemoteMemory, SendOp, SendWr, Sge, SrqConfig,
};

use super::cases;
use crate::participant::{
    Participant, TIMEOUT, TestConfig, TestQp, assert_no_completion, expect_success, post_srq_recv,
    read_bytes, read_word, wait_until, whole_region,
};

cases!("posting":
    send_before_ready_to_send, receive_before_init, inline_too_long, too_many_pieces, fetching_into_inline,
    atomic_result_of_wrong_size, receive_on_a_queue_pair_with_a_shared_queue, full_send_queue,
    unsignaled_requests_keep_their_places, done_has_no_completion, inline_with_a_head_too_long, full_receive_queue,
    full_shared_receive_queue, completion_queue_overrun,
);

/// RESET, INIT and RTR refuse send requests; the error contains the state.
fn send_before_ready_to_send(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let peer: QpAddress = side.exchange(&end.qp.address());
    let wr = SendWr::new(1, SendOp::Send, Data::Inline(&[1])).signaled();
    assert_eq!(end.qp.post(&wr), Err(PostError::WrongState(QpState::Reset)));
    end.qp.init(Access::ALL).unwrap();
    assert_eq!(end.qp.post(&wr), Err(PostError::WrongState(QpState::Init)));
    end.qp.ready_to_receive(&peer, &ConnectConfig::default()).unwrap();
    assert_eq!(end.qp.post(&wr), Err(PostError::WrongState(QpState::ReadyToReceive)));
    end.qp.ready_to_send(&ConnectConfig::default()).unwrap();
    side.wait_for_other();
    assert_no_completion(&mut end.cq);
    assert_qp_works(side, &mut end);
}

/// RESET refuses receives.
fn receive_before_init(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let wr = RecvWr { wr_id: 1, sges: &[] };
    assert_eq!(end.qp.post_recv(&wr), Err(PostError::WrongState(QpState::Reset)));
    side.connect(&mut end.qp, &ConnectConfig::default());
    assert_qp_works(side, &mut end);
}

/// Inline data beyond the queue pair's limit is refused.
fn inline_too_long(side: &mut Participant) {
    let qp = QpConfig { max_inline: 32, ..QpConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { qp, ..TestConfig::default() });
    let bytes = vec![1; 1 << 16];
    let post = |end: &mut TestQp, len: usize| {
        end.qp.post(&SendWr::new(1, SendOp::Send, Data::Inline(&bytes[..len])).signaled())
    };
    assert!(
        matches!(post(&mut end, 1 << 16), Err(PostError::InlineTooLong { len: 0x1_0000, max }) if max >= 32)
    );
    if let Err(PostError::InlineTooLong { max, .. }) = post(&mut end, 1 << 16) {
        assert!(matches!(post(&mut end, max + 1), Err(PostError::InlineTooLong { .. })));
    }
    assert_no_completion(&mut end.cq);
    assert_qp_works(side, &mut end);
}

/// The limit holds for head and bytes together.
fn inline_with_a_head_too_long(side: &mut Participant) {
    let qp = QpConfig { max_inline: 32, ..QpConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { qp, ..TestConfig::default() });
    let bytes = vec![1; 1 << 16];
    let post = |end: &mut TestQp, len: usize| {
        let data = Data::InlineHead { head: [1, 2], bytes: &bytes[..len] };
        end.qp.post(&SendWr::new(1, SendOp::Send, data).signaled())
    };
    let Err(PostError::InlineTooLong { len: 0x1_0010, max }) = post(&mut end, 1 << 16) else {
        panic!("64 KiB inline")
    };
    assert!(matches!(post(&mut end, max - 15), Err(PostError::InlineTooLong { .. })));
    let read = SendOp::Read(RemoteAddr { addr: 0, rkey: 0 });
    let fetched = end.qp.post(&SendWr::new(1, read, Data::InlineHead { head: [0; 2], bytes: &[] }));
    assert!(matches!(fetched, Err(PostError::Invalid(_))), "{fetched:?}");
    assert_no_completion(&mut end.cq);
    assert_qp_works(side, &mut end);
}

/// A request that was executed while it was posted has no completion; one that was queued has one, as its signal says. More requests are
/// posted than the send queue holds: what is done takes no place.
fn done_has_no_completion(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for round in 0..300u64 {
            let bytes = (round + 1).to_ne_bytes();
            let source = end.region(8);
            source.write(0, &bytes).unwrap();
            let sges = [whole_region(&source)];
            let (op, data) = match round % 4 {
                0 => (SendOp::Write(remote.at(0)), Data::Inline(&bytes[..])),
                1 => (SendOp::Write(remote.at(0)), Data::Regions(&sges)),
                2 => (SendOp::Read(remote.at(8)), Data::Regions(&sges)),
                _ => (SendOp::FetchAdd { remote: remote.at(16), add: 1 }, Data::Regions(&sges)),
            };
            match end.qp.post(&SendWr::new(round, op, data).signaled_if_queued()).unwrap() {
                Posted::Done => {}
                Posted::Queued => drop(end.expect_success(round)),
            }
            match round % 4 {
                2 => assert_eq!(read_word(&source, 0), 0, "what was read is there"),
                3 => assert_eq!(read_word(&source, 0), round / 4, "the former value is there"),
                _ => {}
            }
        }
        assert_no_completion(&mut end.cq);
        side.wait_for_other();
    } else {
        side.wait_for_other();
        assert_eq!((read_word(&region, 0), read_word(&region, 16)), (298, 75));
    }
    side.wait_for_other();
}

/// More scatter/gather entries than the queue pair's limit are refused, for sends and receives.
fn too_many_pieces(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let sges: Vec<Sge<'_>> = (0..200).map(|_| region.sge(0..1).unwrap()).collect();
    let sent = end.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled());
    assert!(matches!(sent, Err(PostError::TooManySges { count: 200, max }) if max >= 4), "{sent:?}");
    let received = end.qp.post_recv(&RecvWr { wr_id: 1, sges: &sges });
    assert!(matches!(received, Err(PostError::TooManySges { count: 200, max }) if max >= 4), "{received:?}");
    assert_no_completion(&mut end.cq);
    assert_qp_works(side, &mut end);
}

/// READ and atomics return bytes, so they need a region and not inline data.
fn fetching_into_inline(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for op in [
        SendOp::Read(remote.at(0)),
        SendOp::FetchAdd { remote: remote.at(0), add: 1 },
        SendOp::CompareSwap { remote: remote.at(0), compare: 0, swap: 1 },
    ] {
        let posted = end.qp.post(&SendWr::new(1, op, Data::Inline(&[0; 8])).signaled());
        assert!(matches!(posted, Err(PostError::Invalid(_))), "{op:?}: {posted:?}");
    }
    assert_no_completion(&mut end.cq);
    side.wait_for_other();
    assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
    assert_qp_works(side, &mut end);
}

/// The result of an atomic is eight bytes.
fn atomic_result_of_wrong_size(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for range in [0..0, 0..4, 0..16] {
        let sges = [region.sge(range).unwrap()];
        let op = SendOp::FetchAdd { remote: remote.at(0), add: 1 };
        let posted = end.qp.post(&SendWr::new(1, op, Data::Regions(&sges)).signaled());
        assert!(matches!(posted, Err(PostError::Invalid(_))), "{posted:?}");
    }
    side.wait_for_other();
    assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
    assert_qp_works(side, &mut end);
}

/// A queue pair on a shared receive queue has no receive queue of its own.
fn receive_on_a_queue_pair_with_a_shared_queue(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    let srq = end.pd.create_srq(&SrqConfig::default()).unwrap();
    let mut qp = end.pd.create_rc(&QpConfig::default(), &end.cq, &end.cq, Some(&srq)).unwrap();
    qp.init(Access::ALL).unwrap();
    let posted = qp.post_recv(&RecvWr { wr_id: 1, sges: &[] });
    assert!(matches!(posted, Err(PostError::Invalid(_))), "{posted:?}");
}

/// A send queue accepts at least the requested number of requests, then it is full; polling makes room. Devices may round
/// the size up.
fn full_send_queue(side: &mut Participant) {
    let qp = QpConfig { max_send_wr: 16, ..QpConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { qp, ..TestConfig::default() });
    if side.is_left() {
        // The peer posts no receive, so they stay outstanding.
        let mut accepted = 0;
        let refused = loop {
            let posted = end.qp.post(&SendWr::new(accepted, SendOp::Send, Data::Inline(&[])).signaled());
            match posted {
                Ok(posted) => {
                    assert_eq!(posted, Posted::Queued, "it is signaled");
                    accepted += 1;
                }
                Err(error) => break error,
            }
            assert!(accepted < 1000, "16 were asked for");
        };
        assert_eq!(refused, PostError::Full);
        assert!(accepted >= 16, "{accepted}");
        assert_no_completion(&mut end.cq);
        side.send(&accepted);
        end.expect_all_success(0..accepted);
        for i in 0..16 {
            end.inline(i, SendOp::Send, &[]);
        }
        end.expect_all_success(0..16);
    } else {
        let accepted: u64 = side.receive();
        let mut received = 0;
        wait_until("all messages", || {
            while end.qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }).is_ok() {}
            received += end.cq.poll(64, |c| assert!(c.status.is_success())).unwrap() as u64;
            received == accepted + 16
        });
    }
    side.wait_for_other();
}

/// An unsignaled request that was queued keeps its place until the completion of a later request of the same queue pair is there, at the
/// latest until it is polled (a wait may take completions from a NIC already). So a queue that is full of unsignaled requests stays full, and
/// the completions of other queue pairs make no room in it. Requests that are executed while they are posted take no place.
fn unsignaled_requests_keep_their_places(side: &mut Participant) {
    let qp = QpConfig { max_send_wr: 16, ..QpConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { qp, ..TestConfig::default() });
    let mut other = end.pd.create_rc(&qp, &end.cq, &end.cq, None).unwrap();
    side.connect(&mut other, &ConnectConfig::default());
    let region = end.region(16);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        let mut last = 0u64;
        // Posts until the queue is full; request number `signaled`, counted from 0, is signaled. Returns how many were queued.
        let mut fill = |end: &mut TestQp, signaled: Option<u64>| {
            let mut queued = 0;
            for accepted in 0..1000 {
                let bytes = (last + 1).to_ne_bytes();
                let mut wr = SendWr::new(accepted, SendOp::Write(remote.at(0)), Data::Inline(&bytes));
                wr.signal = (signaled == Some(accepted)).into();
                match end.qp.post(&wr) {
                    Ok(Posted::Queued) => queued += 1,
                    Ok(Posted::Done) => assert!(signaled != Some(accepted), "it is signaled"),
                    Err(error) => {
                        assert_eq!(error, PostError::Full);
                        break;
                    }
                }
                last += 1;
            }
            assert!(queued < 1000, "16 were asked for");
            queued
        };
        let queued = fill(&mut end, Some(8));
        if queued == 1 {
            // The device executes requests while they are posted.
            end.expect_success(8);
            assert_no_completion(&mut end.cq);
            side.send(&last);
            side.wait_for_other();
            return side.wait_for_other();
        }
        assert!(queued >= 16, "{queued}");
        end.cq.wait(TIMEOUT).unwrap();
        let early = fill(&mut end, None);
        assert!(early == 0 || early == 9, "{early}");
        end.expect_success(8);
        // The request itself and the eight before it have left the queue; those behind it have not, nor will they.
        assert_eq!(early + fill(&mut end, None), 9);
        side.send(&last);
        side.wait_for_other();
        let elsewhere = SendWr::new(90, SendOp::Write(remote.at(8)), Data::Inline(&[0; 8]));
        other.post(&elsewhere.signaled()).unwrap();
        expect_success(&mut end.cq, 90);
        assert_no_completion(&mut end.cq);
        let wr = SendWr::new(91, SendOp::Write(remote.at(8)), Data::Inline(&[0; 8]));
        assert_eq!(end.qp.post(&wr), Err(PostError::Full), "all were executed");
    } else {
        let last: u64 = side.receive();
        wait_until("the last WRITE", || read_word(&region, 0) == last);
        side.wait_for_other();
    }
    side.wait_for_other();
}

/// A receive queue accepts at least the requested number of receives, then it is full; completions make room.
fn full_receive_queue(side: &mut Participant) {
    let qp = QpConfig { max_recv_wr: 16, ..QpConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { qp, ..TestConfig::default() });
    if side.is_left() {
        side.wait_for_other();
        (0..8).for_each(|i| end.inline(i, SendOp::Send, &[]));
        end.expect_all_success(0..8);
    } else {
        let mut accepted = 0;
        let refused = loop {
            match end.qp.post_recv(&RecvWr { wr_id: accepted, sges: &[] }) {
                Ok(()) => accepted += 1,
                Err(error) => break error,
            }
            assert!(accepted < 1000, "16 were asked for");
        };
        assert_eq!(refused, PostError::Full);
        assert!(accepted >= 16, "{accepted}");
        side.wait_for_other();
        end.expect_all_success(0..8);
        (0..8).for_each(|i| end.recv(i));
        assert_eq!(end.qp.post_recv(&RecvWr { wr_id: 0, sges: &[] }), Err(PostError::Full));
    }
    side.wait_for_other();
}

/// The same for a shared receive queue.
fn full_shared_receive_queue(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let mut srq = end.pd.create_srq(&SrqConfig { max_wr: 16, max_sge: 1 }).unwrap();
    let mut qp = end.pd.create_rc(&QpConfig::default(), &end.cq, &end.cq, Some(&srq)).unwrap();
    let mut accepted = 0;
    let refused = loop {
        match srq.post_recv(&RecvWr { wr_id: accepted, sges: &[] }) {
            Ok(()) => accepted += 1,
            Err(error) => break error,
        }
        assert!(accepted < 1000, "16 were asked for");
    };
    assert_eq!(refused, PostError::Full);
    assert!(accepted >= 16, "{accepted}");
    side.connect(&mut qp, &ConnectConfig::default());
    if side.is_left() {
        for i in 0..8 {
            qp.post(&SendWr::new(i, SendOp::Send, Data::Inline(&[])).signaled()).unwrap();
            end.expect_success(i);
        }
    } else {
        end.expect_all_success(0..8);
        (0..8).for_each(|i| post_srq_recv(&mut srq, i));
    }
    side.wait_for_other();
}

/// More completions than a queue can hold: the poller gets [`CqError::Overrun`] or [`Event::CqOverrun`]. Devices may round
/// the depth up, or report it only one way.
fn completion_queue_overrun(side: &mut Participant) {
    let shape = TestConfig { cq: CqConfig { depth: 8 }, ..TestConfig::default() };
    let mut end = side.connected_qp_with(&shape);
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for i in 0..200 {
            end.inline(i, SendOp::Write(remote.at(0)), &[1; 8]);
        }
        let mut shown = 0;
        wait_until("the overrun to be told", || {
            match end.cq.poll(16, |_| shown += 1) {
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error, CqError::Overrun);
                    return true;
                }
            }
            assert!(shown < 200, "nothing was lost");
            side.device.wait_event(core::time::Duration::ZERO).unwrap() == Some(Event::CqOverrun)
        });
    }
    side.wait_for_other();
}

/// Asserts that the queue pair still works: a message goes from left to right.
fn assert_qp_works(side: &mut Participant, end: &mut TestQp) {
    if side.is_left() {
        side.wait_for_other();
        let region = end.region(8);
        let sges = [whole_region(&region)];
        end.qp.post(&SendWr::new(70, SendOp::SendImm(70), Data::Regions(&sges)).signaled()).unwrap();
        end.expect_success(70);
    } else {
        let region = end.region(8);
        end.recv_into(71, &region);
        side.wait_for_other();
        assert_eq!(end.expect_success(71).imm, Some(70));
    }
    side.wait_for_other();
}
