//! The states of a queue pair: RESET, INIT, RTR, RTS, ERR.

use crosstie::device::{
    Access, ConnectConfig, DeviceError, QpAddress, QpConfig, QpState, RemoteMemory, SendOp, Status,
};

use super::cases;
use crate::participant::{
    Participant, TestConfig, TestQp, assert_no_completion, assert_opcode, pattern, read_bytes, write_bytes,
};

cases!("states":
    step_by_step, transitions_from_the_wrong_state_are_refused, receives_posted_before_connecting, reset_and_reconnect,
    fail_flushes, fail_is_idempotent, requests_to_a_failed_peer_end, requests_to_a_destroyed_peer_end, connection_to_itself,
    numbers_differ, foreign_queues_are_refused, sizes_beyond_the_limits_are_refused,
    connection_parameters_beyond_their_range_are_refused,
);

/// Each transition leads to its state, and the connection works.
fn step_by_step(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let config = ConnectConfig::default();
    let peer: QpAddress = side.exchange(&end.qp.address());
    assert_eq!(end.qp.address().qp_num, end.qp.qp_num());
    assert_eq!(end.qp.state(), QpState::Reset);
    end.qp.init(Access::ALL).unwrap();
    assert_eq!(end.qp.state(), QpState::Init);
    end.recv(1);
    end.qp.ready_to_receive(&peer, &config).unwrap();
    assert_eq!(end.qp.state(), QpState::ReadyToReceive);
    end.qp.ready_to_send(&config).unwrap();
    assert_eq!(end.qp.state(), QpState::ReadyToSend);
    side.wait_for_other();
    if side.is_left() {
        end.inline(2, SendOp::Send, &[]);
        end.expect_success(2);
    } else {
        end.expect_success(1);
    }
    side.wait_for_other();
}

/// A transition from the wrong state is an error and changes nothing.
fn transitions_from_the_wrong_state_are_refused(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let config = ConnectConfig::default();
    let peer: QpAddress = side.exchange(&end.qp.address());
    assert!(matches!(end.qp.ready_to_receive(&peer, &config), Err(DeviceError::WrongState { .. })));
    assert!(matches!(end.qp.ready_to_send(&config), Err(DeviceError::WrongState { .. })));
    assert_eq!(end.qp.state(), QpState::Reset);
    end.qp.init(Access::ALL).unwrap();
    assert!(matches!(end.qp.ready_to_send(&config), Err(DeviceError::WrongState { .. })));
    assert_eq!(end.qp.state(), QpState::Init);
    end.qp.connect(&peer, &config).unwrap();
    assert!(matches!(end.qp.init(Access::ALL), Err(DeviceError::WrongState { .. })));
    assert!(matches!(end.qp.connect(&peer, &config), Err(DeviceError::WrongState { .. })));
    assert_eq!(end.qp.state(), QpState::ReadyToSend);
    side.wait_for_other();
    if side.is_left() {
        end.inline(2, SendOp::Send, &[]);
        end.expect_success(2);
    } else {
        end.recv(1);
        end.expect_success(1);
    }
    side.wait_for_other();
    end.qp.fail().unwrap();
    assert!(matches!(end.qp.ready_to_send(&config), Err(DeviceError::WrongState { .. })));
    assert_eq!(end.qp.state(), QpState::Error);
    side.wait_for_other();
}

/// Receives posted in INIT take messages once connected.
fn receives_posted_before_connecting(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let region = end.region(64);
    end.qp.init(Access::ALL).unwrap();
    end.recv_into(1, &region);
    end.recv(2);
    side.connect(&mut end.qp, &ConnectConfig::default());
    if side.is_left() {
        end.inline(3, SendOp::Send, &[4; 64]);
        end.inline(4, SendOp::SendImm(5), &[]);
        end.expect_success(3);
        end.expect_success(4);
    } else {
        end.expect_success(1);
        assert_eq!(read_bytes(&region, 0, 64), [4; 64]);
        assert_eq!(end.expect_success(2).imm, Some(5));
    }
    side.wait_for_other();
}

/// RESET drops all outstanding requests without completions; the queue pairs connect again and work, several times.
fn reset_and_reconnect(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    for round in 0..5u64 {
        if side.is_left() {
            (0..10).for_each(|i| end.recv(i));
            // Stuck: the other side has no receive.
            (10..15).for_each(|i| end.inline(i, SendOp::Send, &[1]));
        }
        side.wait_for_other();
        end.qp.reset().unwrap();
        assert_eq!(end.qp.state(), QpState::Reset);
        assert_no_completion(&mut end.cq);
        side.wait_for_other();
        side.connect(&mut end.qp, &ConnectConfig::default());
        let remote: RemoteMemory = side.exchange(&region.remote());
        if side.is_left() {
            end.inline(1, SendOp::WriteImm(remote.at(0), round as u32), &pattern(64, round));
            end.expect_success(1);
        } else {
            end.recv(7);
            let received = end.expect_success(7);
            assert_eq!((received.imm, received.byte_len), (Some(round as u32), 64));
            assert_eq!(read_bytes(&region, 0, 64), pattern(64, round));
        }
        side.wait_for_other();
    }
}

/// fail() moves the queue pair to ERR and flushes its receives and waiting sends.
fn fail_flushes(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        (0..5).for_each(|i| end.inline(i, SendOp::Send, &[]));
        (5..10).for_each(|i| end.recv(i));
        end.qp.fail().unwrap();
        assert_eq!(end.qp.state(), QpState::Error);
        let mut ids: Vec<u64> = crate::participant::take_completions(&mut end.cq, 10)
            .iter()
            .map(|c| {
                assert_eq!((c.status, c.qp_num), (Status::Flushed, end.qp.qp_num()), "{c:?}");
                c.wr_id
            })
            .collect();
        // Sends among themselves and receives among themselves are in order.
        ids.sort_by_key(|id| id / 5);
        assert_eq!(ids, (0..10).collect::<Vec<_>>());
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
}

/// A second fail() changes nothing; reset() leaves ERR.
fn fail_is_idempotent(side: &mut Participant) {
    let mut end = side.connected_qp();
    end.qp.fail().unwrap();
    end.qp.fail().unwrap();
    assert_eq!(end.qp.state(), QpState::Error);
    side.wait_for_other();
    end.qp.reset().unwrap();
    assert_eq!(end.qp.state(), QpState::Reset);
    side.wait_for_other();
    side.connect(&mut end.qp, &ConnectConfig::default());
    if side.is_left() {
        end.inline(2, SendOp::Send, &[]);
        end.expect_success(2);
    } else {
        end.recv(1);
        end.expect_success(1);
    }
    side.wait_for_other();
}

/// Requests to a queue pair in ERR fail, because they are never acknowledged.
fn requests_to_a_failed_peer_end(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        end.inline(1, SendOp::Write(remote.at(0)), &[1; 64]);
        end.expect_status(1, &[Status::RetryExceeded]);
        end.inline(2, SendOp::Send, &[]);
        end.expect_status(2, &[Status::Flushed]);
        assert_eq!(end.qp.state(), QpState::Error);
    } else {
        end.qp.fail().unwrap();
        side.wait_for_other();
    }
    side.wait_for_other();
    assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
    side.wait_for_other();
}

/// Requests to a destroyed queue pair fail.
fn requests_to_a_destroyed_peer_end(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        side.wait_for_other();
        end.inline(1, SendOp::Send, &[1; 64]);
        end.inline(2, SendOp::Send, &[1; 64]);
        end.expect_status(1, &[Status::RetryExceeded]);
        end.expect_status(2, &[Status::Flushed]);
    } else {
        end.recv(1);
        drop(end.qp);
        side.wait_for_other();
    }
    side.wait_for_other();
}

/// Two queue pairs of one device, one domain and one completion queue talk to each other.
fn connection_to_itself(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let mut other = end.pd.create_rc(&QpConfig::default(), &end.cq, &end.cq, None).unwrap();
    end.qp.connect(&other.address(), &ConnectConfig::default()).unwrap();
    other.connect(&end.qp.address(), &ConnectConfig::default()).unwrap();
    let (source, target) = (end.region(1000), end.region(1000));
    write_bytes(&source, 0, &pattern(1000, 1));
    other.post_recv(&crosstie::device::RecvWr { wr_id: 1, sges: &[] }).unwrap();
    end.post(2, SendOp::WriteImm(target.remote().at(0), 3), &source);
    let completions = crate::participant::take_completions(&mut end.cq, 2);
    for completion in completions {
        match completion.wr_id {
            1 => {
                assert_opcode(&completion, crosstie::device::Opcode::RecvWriteImm);
                assert_eq!(completion.qp_num, other.qp_num());
            }
            2 => assert_eq!(completion.qp_num, end.qp.qp_num()),
            _ => panic!("{completion:?}"),
        }
    }
    assert!(read_bytes(&target, 0, 1000) == pattern(1000, 1));
}

/// The queue pairs of a device have different 24-bit numbers, none of them 0 or 1 (reserved for management).
fn numbers_differ(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    let small = QpConfig { max_send_wr: 4, max_recv_wr: 4, ..QpConfig::default() };
    let qps: Vec<_> = (0..32).map(|_| end.pd.create_rc(&small, &end.cq, &end.cq, None).unwrap()).collect();
    let mut numbers: Vec<u32> = qps.iter().map(|qp| qp.qp_num()).collect();
    numbers.push(end.qp.qp_num());
    assert!(numbers.iter().all(|n| *n > 1 && *n < 1 << 24), "{numbers:?}");
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 33);
}

/// A queue of another device (another open handle) is refused.
fn foreign_queues_are_refused(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    let other = side.open_again();
    let cq = other.create_cq(&Default::default()).unwrap();
    let srq = other.alloc_pd().unwrap().create_srq(&Default::default()).unwrap();
    let config = QpConfig::default();
    assert!(matches!(end.pd.create_rc(&config, &cq, &end.cq, None), Err(DeviceError::WrongDevice(_))));
    assert!(matches!(end.pd.create_rc(&config, &end.cq, &cq, None), Err(DeviceError::WrongDevice(_))));
    assert!(matches!(
        end.pd.create_rc(&config, &end.cq, &end.cq, Some(&srq)),
        Err(DeviceError::WrongDevice(_))
    ));
}

/// Sizes beyond the device's limits are refused with the limit in the error, and nothing is created.
fn sizes_beyond_the_limits_are_refused(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    let attr = side.device.attr().clone();
    let default = QpConfig::default();
    for config in [
        QpConfig { max_send_wr: attr.max_qp_wr.saturating_add(1), ..default },
        QpConfig { max_recv_wr: attr.max_qp_wr.saturating_add(1), ..default },
        QpConfig { max_send_sge: attr.max_sge + 1, ..default },
        QpConfig { max_recv_sge: attr.max_sge + 1, ..default },
        QpConfig { max_inline: attr.max_inline + 1, ..default },
    ] {
        let made = end.pd.create_rc(&config, &end.cq, &end.cq, None);
        assert!(matches!(made, Err(DeviceError::Limit { .. })), "{config:?}: {made:?}");
    }
    let deep = crosstie::device::CqConfig { depth: attr.max_cqe + 1 };
    assert!(matches!(side.device.create_cq(&deep), Err(DeviceError::Limit { .. })));
    let wide = crosstie::device::SrqConfig { max_wr: attr.max_srq_wr + 1, max_sge: 1 };
    assert!(matches!(end.pd.create_srq(&wide), Err(DeviceError::Limit { .. })));
}

/// Connection parameters that no device has are refused with the limit in the error; service level and traffic class can be
/// set.
fn connection_parameters_beyond_their_range_are_refused(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let default = ConnectConfig::default();
    let own = end.qp.address();
    end.qp.init(Access::ALL).unwrap();
    for config in [
        ConnectConfig { min_rnr_timer: 32, ..default },
        ConnectConfig { rnr_retry: 8, ..default },
        ConnectConfig { timeout: 32, ..default },
        ConnectConfig { retry_count: 8, ..default },
        ConnectConfig { service_level: 16, ..default },
    ] {
        let refused = end.qp.ready_to_receive(&own, &config);
        assert!(matches!(refused, Err(DeviceError::Limit { .. })), "{config:?}: {refused:?}");
    }
    let marked = ConnectConfig { service_level: 3, traffic_class: 0x68, ..default };
    end.qp.ready_to_receive(&own, &marked).unwrap();
    end.qp.ready_to_send(&marked).unwrap();
}
