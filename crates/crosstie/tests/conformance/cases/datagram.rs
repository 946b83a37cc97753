//! Datagrams: sent to any queue pair, delivered whole or not at all.

use crosstie::device::{
    Access, Ah, Cq, Data, DeviceAddress, Mr, Opcode, Pd, PostError, QpConfig, QpState, RecvWr, RemoteAddr,
    SendOp, SendWr, SrqConfig, Status, UdQp,
};

use super::cases;
use crate::participant::{
    Participant, QUIET_PERIOD, assert_no_completion, assert_opcode, expect_success, next_completion, pattern,
    read_bytes, take_completions, wait_until, whole_region, write_bytes,
};

cases!("datagram":
    send, send_imm, reply_to_the_sender, longest_datagram, datagram_too_long, wrong_qkey_is_dropped,
    datagram_without_a_receive_is_dropped, datagram_to_an_unknown_queue_pair_is_dropped, one_sided_operations_are_refused,
    address_handle_of_another_device_is_refused, many_senders, from_a_shared_queue, states,
    failed_queue_pair_flushes, gathered_and_scattered,
);

const QKEY: u32 = 0x1357;

/// A datagram queue pair in RTS, and the address of the other participant's.
struct Datagrams {
    qp: UdQp,
    cq: Cq,
    pd: Pd,
    ah: Ah,
    peer: u32,
}

impl Datagrams {
    fn new(side: &mut Participant) -> Datagrams {
        let pd = side.device.alloc_pd().unwrap();
        let cq = side.device.create_cq(&Default::default()).unwrap();
        let mut qp = pd.create_ud(&QpConfig::default(), &cq, &cq, None).unwrap();
        qp.activate(QKEY).unwrap();
        let device: DeviceAddress = side.exchange(&side.device.address());
        let peer = side.exchange(&qp.qp_num());
        let ah = pd.create_ah(&device).unwrap();
        assert_eq!(ah.address(), device);
        Datagrams { qp, cq, pd, ah, peer }
    }

    fn post(&mut self, wr_id: u64, qkey: u32, op: SendOp, bytes: &[u8]) {
        let wr = SendWr::new(wr_id, op, Data::Inline(bytes)).signaled();
        self.qp.post(&self.ah, self.peer, qkey, &wr).unwrap();
    }

    fn send(&mut self, wr_id: u64, op: SendOp, bytes: &[u8]) {
        self.post(wr_id, QKEY, op, bytes);
        assert_opcode(&expect_success(&mut self.cq, wr_id), Opcode::Send);
    }

    fn recv_into(&mut self, wr_id: u64, mr: &Mr) {
        self.qp.post_recv(&RecvWr { wr_id, sges: &[whole_region(mr)] }).unwrap();
    }

    fn region(&self, len: usize) -> Mr {
        self.pd.allocate(len, Access::ALL).unwrap()
    }
}

/// SEND: 40 bytes, then the message; `byte_len` counts both, `src_qp` names the sender.
fn send(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    if side.is_left() {
        side.wait_for_other();
        ud.send(1, SendOp::Send, &pattern(100, 1));
    } else {
        let region = ud.region(200);
        ud.recv_into(2, &region);
        side.wait_for_other();
        let received = expect_success(&mut ud.cq, 2);
        assert_opcode(&received, Opcode::Recv);
        assert_eq!((received.byte_len, received.imm), (140, None));
        assert_eq!((received.qp_num, received.src_qp), (ud.qp.qp_num(), ud.peer));
        assert_eq!(read_bytes(&region, UdQp::GRH, 100), pattern(100, 1));
        assert_eq!(read_bytes(&region, 140, 60), [0; 60]);
    }
    side.wait_for_other();
}

fn send_imm(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    if side.is_left() {
        side.wait_for_other();
        ud.send(1, SendOp::SendImm(0xabcd_ef01), &[]);
    } else {
        let region = ud.region(64);
        ud.recv_into(2, &region);
        side.wait_for_other();
        let received = expect_success(&mut ud.cq, 2);
        assert_eq!((received.byte_len, received.imm, received.src_qp), (40, Some(0xabcd_ef01), ud.peer));
    }
    side.wait_for_other();
}

/// The completion contains enough about the sender to reply to it.
fn reply_to_the_sender(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let region = ud.region(64);
    ud.recv_into(9, &region);
    side.wait_for_other();
    if side.is_left() {
        ud.send(1, SendOp::SendImm(5), &[]);
        let answer = expect_success(&mut ud.cq, 9);
        assert_eq!((answer.imm, answer.src_qp), (Some(6), ud.peer));
    } else {
        let asked = expect_success(&mut ud.cq, 9);
        ud.peer = asked.src_qp;
        ud.send(1, SendOp::SendImm(asked.imm.unwrap() + 1), &[]);
    }
    side.wait_for_other();
}

/// As long as the device says.
fn longest_datagram(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let len = side.device.attr().max_datagram as usize;
    assert!(len >= 1024, "{len}");
    let region = ud.region(len + UdQp::GRH);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(len, 3));
        side.wait_for_other();
        let sges = [region.sge(0..len).unwrap()];
        let wr = SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled();
        ud.qp.post(&ud.ah, ud.peer, QKEY, &wr).unwrap();
        expect_success(&mut ud.cq, 1);
    } else {
        ud.recv_into(2, &region);
        side.wait_for_other();
        assert_eq!(expect_success(&mut ud.cq, 2).byte_len as usize, len + UdQp::GRH);
        assert!(read_bytes(&region, UdQp::GRH, len) == pattern(len, 3));
    }
    side.wait_for_other();
}

/// One byte more is refused.
fn datagram_too_long(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let len = side.device.attr().max_datagram as usize + 1;
    let region = ud.region(len);
    let sges = [region.sge(0..len).unwrap()];
    let wr = SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled();
    assert_eq!(ud.qp.post(&ud.ah, ud.peer, QKEY, &wr), Err(PostError::TooLong(len as u64)));
    assert_no_completion(&mut ud.cq);
    assert_eq!(ud.qp.state(), QpState::ReadyToSend);
    side.wait_for_other();
}

/// A datagram with another qkey is lost, and its sender is not told. The next one arrives in the same receive.
fn wrong_qkey_is_dropped(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    if side.is_left() {
        side.wait_for_other();
        ud.post(1, QKEY + 1, SendOp::SendImm(1), &[]);
        assert_opcode(&expect_success(&mut ud.cq, 1), Opcode::Send);
        ud.send(2, SendOp::SendImm(2), &[]);
    } else {
        let region = ud.region(64);
        ud.recv_into(2, &region);
        side.wait_for_other();
        assert_eq!(expect_success(&mut ud.cq, 2).imm, Some(2));
    }
    side.wait_for_other();
    assert_no_completion(&mut ud.cq);
}

/// A datagram without a matching receive is lost, and neither end gets an error.
fn datagram_without_a_receive_is_dropped(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let region = ud.region(64);
    if side.is_left() {
        ud.send(1, SendOp::SendImm(1), &[]);
        std::thread::sleep(QUIET_PERIOD);
        side.wait_for_other();
        side.wait_for_other();
        ud.send(2, SendOp::SendImm(2), &[]);
    } else {
        side.wait_for_other();
        ud.recv_into(2, &region);
        assert_no_completion(&mut ud.cq);
        side.wait_for_other();
        assert_eq!(expect_success(&mut ud.cq, 2).imm, Some(2));
    }
    side.wait_for_other();
    assert_eq!(ud.qp.state(), QpState::ReadyToSend);
}

/// A datagram to a queue pair that does not exist is lost, and neither end gets an error.
fn datagram_to_an_unknown_queue_pair_is_dropped(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    ud.peer = 0x00ff_fff0;
    ud.send(1, SendOp::Send, &[1]);
    assert_eq!(ud.qp.state(), QpState::ReadyToSend);
    side.wait_for_other();
}

/// There are no one-sided datagrams.
fn one_sided_operations_are_refused(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let region = ud.region(8);
    let remote = RemoteAddr { addr: 0, rkey: 0 };
    let ops = [
        SendOp::Write(remote),
        SendOp::WriteImm(remote, 1),
        SendOp::Read(remote),
        SendOp::FetchAdd { remote, add: 1 },
        SendOp::CompareSwap { remote, compare: 0, swap: 1 },
    ];
    for op in ops {
        let sges = [whole_region(&region)];
        let posted = ud.qp.post(&ud.ah, ud.peer, QKEY, &SendWr::new(1, op, Data::Regions(&sges)));
        assert!(matches!(posted, Err(PostError::Invalid(_))), "{op:?}: {posted:?}");
    }
    assert_no_completion(&mut ud.cq);
    side.wait_for_other();
}

/// Drivers take a handle for one of their own.
fn address_handle_of_another_device_is_refused(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let other = side.open_again().alloc_pd().unwrap().create_ah(&ud.ah.address()).unwrap();
    let wr = SendWr::new(1, SendOp::Send, Data::Inline(b"x")).signaled();
    let posted = ud.qp.post(&other, ud.peer, QKEY, &wr);
    assert!(matches!(posted, Err(PostError::Invalid(_))), "{posted:?}");
    assert_no_completion(&mut ud.cq);
    side.wait_for_other();
}

/// Several queue pairs send to one; `src_qp` tells them apart, and each one's datagrams stay in order. Nothing is lost
/// where there is room.
fn many_senders(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    if side.is_left() {
        let mut senders: Vec<UdQp> = (0..8)
            .map(|_| {
                let mut qp = ud.pd.create_ud(&QpConfig::default(), &ud.cq, &ud.cq, None).unwrap();
                qp.activate(1).unwrap();
                side.send(&qp.qp_num());
                qp
            })
            .collect();
        side.wait_for_other();
        for round in 0..10u32 {
            for qp in &mut senders {
                let wr = SendWr::new(1, SendOp::SendImm(round), Data::Inline(&[])).signaled();
                qp.post(&ud.ah, ud.peer, QKEY, &wr).unwrap();
                expect_success(&mut ud.cq, 1);
            }
        }
    } else {
        let region = ud.region(80 * 64);
        for i in 0..80 {
            let sges = [region.sge(64 * i..64 * i + 64).unwrap()];
            ud.qp.post_recv(&RecvWr { wr_id: i as u64, sges: &sges }).unwrap();
        }
        let senders: Vec<u32> = (0..8).map(|_| side.receive()).collect();
        side.wait_for_other();
        let mut rounds = [0; 8];
        for received in take_completions(&mut ud.cq, 80) {
            let from = senders.iter().position(|n| *n == received.src_qp).expect("a sender");
            assert_eq!(received.imm, Some(rounds[from]));
            rounds[from] += 1;
        }
    }
    side.wait_for_other();
}

/// Datagrams take from a shared queue as connections do.
fn from_a_shared_queue(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let mut srq = ud.pd.create_srq(&SrqConfig::default()).unwrap();
    let mut qps: Vec<UdQp> = (0..2)
        .map(|_| {
            let mut qp = ud.pd.create_ud(&QpConfig::default(), &ud.cq, &ud.cq, Some(&srq)).unwrap();
            qp.activate(QKEY).unwrap();
            qp
        })
        .collect();
    let numbers: [u32; 2] = side.exchange(&[qps[0].qp_num(), qps[1].qp_num()]);
    if side.is_left() {
        side.wait_for_other();
        for i in 0..10u32 {
            let wr = SendWr::new(1, SendOp::SendImm(i), Data::Inline(&[])).signaled();
            qps[0].post(&ud.ah, numbers[i as usize % 2], QKEY, &wr).unwrap();
            expect_success(&mut ud.cq, 1);
        }
    } else {
        let region = ud.region(640);
        for i in 0..10 {
            let sges = [region.sge(64 * i..64 * i + 64).unwrap()];
            srq.post_recv(&RecvWr { wr_id: i as u64, sges: &sges }).unwrap();
        }
        side.wait_for_other();
        for received in take_completions(&mut ud.cq, 10) {
            let to = qps[received.imm.unwrap() as usize % 2].qp_num();
            assert_eq!((received.qp_num, received.status), (to, Status::Success));
        }
    }
    side.wait_for_other();
}

/// RESET takes nothing; RTS after activate, ERR after fail.
fn states(side: &mut Participant) {
    let pd = side.device.alloc_pd().unwrap();
    let cq = side.device.create_cq(&Default::default()).unwrap();
    let mut qp = pd.create_ud(&QpConfig::default(), &cq, &cq, None).unwrap();
    assert_eq!(qp.state(), QpState::Reset);
    let ah = pd.create_ah(&side.device.address()).unwrap();
    let wr = SendWr::new(1, SendOp::Send, Data::Inline(&[])).signaled();
    assert_eq!(qp.post(&ah, 5, QKEY, &wr), Err(PostError::WrongState(QpState::Reset)));
    assert_eq!(qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }), Err(PostError::WrongState(QpState::Reset)));
    qp.activate(QKEY).unwrap();
    assert_eq!(qp.state(), QpState::ReadyToSend);
    assert!(qp.activate(QKEY).is_err());
    qp.fail().unwrap();
    assert_eq!(qp.state(), QpState::Error);
}

/// fail() flushes receives; what is posted after it is flushed, too.
fn failed_queue_pair_flushes(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let region = ud.region(64);
    (0..5).for_each(|i| ud.recv_into(i, &region));
    ud.qp.fail().unwrap();
    for i in 0..5 {
        let flushed = next_completion(&mut ud.cq);
        assert_eq!((flushed.wr_id, flushed.status), (i, Status::Flushed));
    }
    ud.post(5, QKEY, SendOp::Send, &[]);
    let flushed = next_completion(&mut ud.cq);
    assert_eq!((flushed.wr_id, flushed.status), (5, Status::Flushed));
    side.wait_for_other();
}

/// Datagrams can use several scatter/gather entries at both ends; the 40-byte header is scattered too.
fn gathered_and_scattered(side: &mut Participant) {
    let mut ud = Datagrams::new(side);
    let region = ud.region(1000);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(500, 1));
        side.wait_for_other();
        let sges = [region.sge(0..10).unwrap(), region.sge(100..300).unwrap()];
        let wr = SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled();
        ud.qp.post(&ud.ah, ud.peer, QKEY, &wr).unwrap();
        expect_success(&mut ud.cq, 1);
    } else {
        let sges = [region.sge(0..40).unwrap(), region.sge(500..1000).unwrap()];
        ud.qp.post_recv(&RecvWr { wr_id: 2, sges: &sges }).unwrap();
        side.wait_for_other();
        wait_until("the datagram", || ud.cq.poll(1, |c| assert_eq!(c.byte_len, 250, "{c:?}")).unwrap() == 1);
        let bytes = pattern(500, 1);
        assert_eq!(read_bytes(&region, 500, 210), [&bytes[0..10], &bytes[100..300]].concat());
    }
    side.wait_for_other();
}
