//! The fault device on the software device: each fault has the right status and the right consequences, and every accepted
//! request completes exactly once, whatever fails.

mod workloads;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crosstie::device::fault::{Control, Plan};
use crosstie::device::{
    Access, Completion, ConnectConfig, Cq, CqConfig, Data, Device, DeviceError, DeviceSpec, Event, Mr,
    Opcode, Pd, PostError, QpConfig, QpState, RcQp, RecvWr, SendOp, SendWr, Status, UdQp,
};
use crosstie_testkit::wait::{TIMEOUT, until};

use super::ends::{End, connect, next_completion, small_device};

/// A wrapped device with one connection to a plain one.
struct Pair {
    device: Device,
    control: Control,
    pd: Pd,
    cq: Cq,
    qp: RcQp,
    peer: Peer,
}

/// The end without faults.
struct Peer {
    device: Device,
    cq: Cq,
    qp: RcQp,
    memory: Mr,
}

impl Pair {
    fn new(plan: Plan) -> Pair {
        let End { mut qp, cq, pd, device } = End::on(small_device().with_faults(plan), &QpConfig::default());
        let control = device.faults().unwrap();
        let peer = Peer::of(&mut qp);
        Pair { device, control, pd, cq, qp, peer }
    }

    /// WRITE of `value` to word `value` of the peer.
    fn write(&mut self, value: u64, signaled: bool) -> Result<(), PostError> {
        self.qp.post(&write(&self.peer.memory, value, &value.to_ne_bytes(), signaled)).map(drop)
    }

    fn statuses(&mut self, count: usize) -> Vec<(u64, Status)> {
        take_completions(&mut self.cq, count).iter().map(|c| (c.wr_id, c.status)).collect()
    }
}

impl Peer {
    fn of(qp: &mut RcQp) -> Peer {
        let End { qp: mut own, cq, pd, device } = End::new(&QpConfig::default());
        connect(&mut own, qp);
        let memory = pd.allocate(4096, Access::ALL).unwrap();
        Peer { device, cq, qp: own, memory }
    }

    /// The words that were written, each its own number.
    fn written(&self) -> Vec<u64> {
        (1..512).filter(|n| word(&self.memory, *n as usize * 8) == *n).collect()
    }
}

fn write<'a>(memory: &Mr, value: u64, bytes: &'a [u8], signaled: bool) -> SendWr<'a> {
    let wr = SendWr::new(value, SendOp::Write(memory.remote().at(8 * value)), Data::Inline(bytes));
    if signaled { wr.signaled() } else { wr }
}

fn word(memory: &Mr, offset: usize) -> u64 {
    let mut bytes = [0; 8];
    memory.read(offset, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

fn take_completions(cq: &mut Cq, count: usize) -> Vec<Completion> {
    (0..count).map(|_| next_completion(cq)).collect()
}

/// Asserts that this many polls return no completion.
fn assert_no_completion(cq: &mut Cq, polls: usize) {
    for _ in 0..polls {
        cq.poll(16, |c| panic!("{c:?}")).unwrap();
    }
}

fn events(device: &Device) -> Vec<Event> {
    std::iter::from_fn(|| device.wait_event(Duration::ZERO).unwrap()).collect()
}

use Status::{Fatal, Flushed, LocalQpOperation, RemoteAccess, RetryExceeded, RnrRetryExceeded, Success};

#[test]
fn a_stalled_request_does_not_use_memory_that_was_deregistered() {
    let mut pair = Pair::new(Plan::none());
    pair.peer.memory.write(0, &[9; 4096]).unwrap();
    let target = pair.pd.allocate(4096, Access::ALL).unwrap();
    let from = target.as_ptr();
    pair.control.port_down();
    let read = SendOp::Read(pair.peer.memory.remote().at(0));
    pair.qp.post(&SendWr::new(1, read, Data::Regions(&[target.sge(0..4096).unwrap()])).signaled()).unwrap();
    drop(target);
    // Another object gets the memory.
    let reused = pair.pd.allocate(4096, Access::ALL).unwrap();
    assert_eq!(reused.as_ptr(), from, "the test needs the same memory again");
    pair.control.port_up();
    assert_eq!(pair.statuses(1), [(1, Status::LocalProtection)]);
    let mut bytes = [1; 4096];
    reused.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "the READ wrote to memory that was deregistered");
    assert_eq!(pair.qp.state(), QpState::Error);
}

#[test]
fn a_refused_post_changes_nothing() {
    let plan = Plan::none().fail_post(1, PostError::Full).fail_post(2, PostError::Device(libc::EIO));
    let mut pair = Pair::new(plan);
    assert_eq!(pair.write(1, true), Ok(()));
    assert_eq!(pair.write(2, true), Err(PostError::Full));
    assert_eq!(pair.write(3, true), Err(PostError::Device(libc::EIO)));
    assert_eq!(pair.write(4, true), Ok(()));
    assert_eq!(pair.statuses(2), [(1, Success), (4, Success)]);
    assert_eq!(pair.peer.written(), [1, 4]);
    assert_eq!(pair.qp.state(), QpState::ReadyToSend);
    assert_eq!((pair.control.posts(), pair.control.completions()), (4, 2));
    assert_no_completion(&mut pair.cq, 10);
}

#[test]
fn receives_can_be_refused_too() {
    let mut pair = Pair::new(Plan::none().fail_post(0, PostError::Full));
    let wr = RecvWr { wr_id: 1, sges: &[] };
    assert_eq!(pair.qp.post_recv(&wr), Err(PostError::Full));
    assert_eq!(pair.qp.post_recv(&wr), Ok(()));
    pair.peer.qp.post(&SendWr::new(1, SendOp::SendImm(7), Data::Inline(&[]))).unwrap();
    assert_eq!(take_completions(&mut pair.cq, 1)[0].imm, Some(7));
}

#[test]
fn a_failed_completion_breaks_its_queue_pair() {
    for status in [RetryExceeded, Fatal, LocalQpOperation, Status::ResponseTimeout, Status::General] {
        let mut pair = Pair::new(Plan::none().fail_completion(2, status));
        pair.qp.post_recv(&RecvWr { wr_id: 100, sges: &[] }).unwrap();
        (1..=6).for_each(|n| pair.write(n, n != 5).unwrap());
        let mut seen = pair.statuses(7);
        // The receive has no order among the sends.
        seen.retain(|s| *s != (100, Flushed));
        assert_eq!(seen, [(1, Success), (2, Success), (3, status), (4, Flushed), (5, Flushed), (6, Flushed)]);
        assert_eq!(pair.qp.state(), QpState::Error);
        pair.write(7, false).unwrap();
        pair.qp.post_recv(&RecvWr { wr_id: 101, sges: &[] }).unwrap();
        assert_eq!(pair.statuses(2), [(7, Flushed), (101, Flushed)]);
        assert_no_completion(&mut pair.cq, 10);
        // The request that failed had arrived; what was posted after the error was not sent.
        let written = pair.peer.written();
        assert!(written.contains(&3) && !written.contains(&7), "{written:?}");
    }
}

#[test]
fn a_failed_receive_breaks_its_queue_pair() {
    let mut pair = Pair::new(Plan::none().fail_completion(1, RetryExceeded));
    (0..4).for_each(|i| pair.qp.post_recv(&RecvWr { wr_id: i, sges: &[] }).unwrap());
    for i in 0..3 {
        pair.peer.qp.post(&SendWr::new(i, SendOp::SendImm(i as u32), Data::Inline(&[])).signaled()).unwrap();
    }
    let completions = take_completions(&mut pair.cq, 4);
    let statuses: Vec<_> = completions.iter().map(|c| (c.wr_id, c.status)).collect();
    // A receive waits for no acknowledgement, so it fails by the device instead.
    assert_eq!(statuses, [(0, Success), (1, LocalQpOperation), (2, Flushed), (3, Flushed)]);
    assert!(completions[1..].iter().all(|c| c.opcode == Opcode::Unspecified && c.imm.is_none()));
    assert_eq!(pair.qp.state(), QpState::Error);
}

#[test]
fn a_lost_request_never_arrives() {
    for status in [RetryExceeded, RnrRetryExceeded, RemoteAccess, Status::RemoteOperation, Fatal] {
        let mut pair = Pair::new(Plan::none().lose_post(2, status));
        (1..=5).for_each(|n| pair.write(n, n != 2).unwrap());
        assert_eq!(pair.statuses(4), [(1, Success), (3, status), (4, Flushed), (5, Flushed)]);
        assert_eq!(pair.peer.written(), [1, 2]);
        assert_eq!(pair.qp.state(), QpState::Error);
        assert_no_completion(&mut pair.cq, 10);
    }
}

#[test]
fn a_lost_request_waits_for_those_before_it() {
    let mut pair = Pair::new(Plan::none().lose_post(1, RetryExceeded));
    // The peer has no receive, so the first request waits; the lost one cannot fail before it.
    pair.qp.post(&SendWr::new(1, SendOp::Send, Data::Inline(&[])).signaled()).unwrap();
    pair.write(2, true).unwrap();
    pair.write(3, true).unwrap();
    assert_no_completion(&mut pair.cq, 100);
    assert_eq!(pair.qp.state(), QpState::ReadyToSend);
    pair.peer.qp.post_recv(&RecvWr { wr_id: 9, sges: &[] }).unwrap();
    assert_eq!(pair.statuses(3), [(1, Success), (2, RetryExceeded), (3, Flushed)]);
    assert_eq!(pair.peer.written(), []);
}

#[test]
fn a_delayed_completion_holds_up_its_own_queue_pair_only() {
    let mut pair = Pair::new(Plan::none().delay_completion(0, 10));
    let mut other = pair.pd.create_rc(&QpConfig::default(), &pair.cq, &pair.cq, None).unwrap();
    let peer = Peer::of(&mut other);
    pair.write(1, true).unwrap();
    pair.write(2, true).unwrap();
    other.post(&write(&peer.memory, 3, &[0; 8], true)).unwrap();
    let mut seen = vec![];
    for poll in 0..12 {
        pair.cq.poll(16, |c| seen.push((poll, c.wr_id))).unwrap();
    }
    assert_eq!(seen, [(0, 3), (10, 1), (10, 2)]);
}

#[test]
fn completions_of_different_queue_pairs_overtake() {
    let mut pair = Pair::new(Plan::none().overtake_completion(0));
    let mut other = pair.pd.create_rc(&QpConfig::default(), &pair.cq, &pair.cq, None).unwrap();
    let peer = Peer::of(&mut other);
    pair.write(1, true).unwrap();
    pair.write(2, true).unwrap();
    other.post(&write(&peer.memory, 3, &[0; 8], true)).unwrap();
    other.post(&write(&peer.memory, 4, &[0; 8], true)).unwrap();
    let order: Vec<u64> = take_completions(&mut pair.cq, 4).iter().map(|c| c.wr_id).collect();
    assert_eq!(order, [3, 4, 1, 2]);
}

#[test]
fn completion_that_is_not_overtaken_is_handed_out() {
    let mut pair = Pair::new(Plan::none().overtake_completion(0));
    pair.write(1, true).unwrap();
    assert_eq!(pair.statuses(1), [(1, Success)]);
}

#[test]
fn requests_posted_while_the_port_is_down_are_sent_when_it_is_up() {
    let mut pair = Pair::new(Plan::none());
    pair.write(1, true).unwrap();
    assert_eq!(pair.statuses(1), [(1, Success)]);
    pair.control.port_down();
    let region = pair.pd.allocate(8, Access::ALL).unwrap();
    let sges = [region.sge(0..8).unwrap()];
    pair.write(2, false).unwrap();
    pair.write(3, true).unwrap();
    let read = SendOp::Read(pair.peer.memory.remote().at(24));
    pair.qp.post(&SendWr::new(4, read, Data::Regions(&sges)).signaled()).unwrap();
    assert_no_completion(&mut pair.cq, 100);
    assert_eq!(pair.peer.written(), [1]);
    pair.control.port_up();
    assert_eq!(pair.statuses(2), [(3, Success), (4, Success)]);
    assert_eq!(pair.peer.written(), [1, 2, 3]);
    assert_eq!(word(&region, 0), 3);
    assert_eq!(events(&pair.device), [Event::PortDown, Event::PortUp]);
    assert_eq!(pair.qp.state(), QpState::ReadyToSend);
}

#[test]
fn posts_are_checked_while_the_port_is_down() {
    let mut pair = Pair::new(Plan::none());
    pair.control.port_down();
    let long = pair.qp.post(&SendWr::new(1, SendOp::Send, Data::Inline(&[0; 221])));
    assert!(matches!(long, Err(PostError::InlineTooLong { .. })), "{long:?}");
    let read = SendOp::Read(pair.peer.memory.remote().at(0));
    let inline = pair.qp.post(&SendWr::new(1, read, Data::Inline(&[0; 8])));
    assert!(matches!(inline, Err(PostError::Invalid(_))), "{inline:?}");
    let accepted = (1..).take_while(|_| pair.write(1, true).is_ok()).count();
    assert_eq!(accepted, QpConfig::default().max_send_wr as usize);
    assert_eq!(pair.write(1, true), Err(PostError::Full));
    pair.control.port_up();
    assert!(pair.statuses(accepted).iter().all(|s| *s == (1, Success)));
}

/// A completion that is held back makes no room, a request that failed does, and neither reset nor another queue pair with the same
/// completion queue leaves anything behind. What the contract says of healthy queues is in the conformance suite.
#[test]
fn places_in_the_send_queue_are_free_when_completions_are_polled() {
    let sizes = QpConfig { max_send_wr: 4, ..QpConfig::default() };
    let mut pair = Pair::new(Plan::none().delay_completion(0, 5).fail_completion(1, Fatal));
    let mut small = pair.pd.create_rc(&sizes, &pair.cq, &pair.cq, None).unwrap();
    let peer = Peer::of(&mut small);
    let fill = |qp: &mut RcQp, signaled: u64| {
        let post = |n: &u64| qp.post(&write(&peer.memory, 1 + *n, &[0; 8], *n == signaled)).is_ok();
        (0..100).take_while(post).count()
    };
    assert_eq!(fill(&mut small, 1), 4);
    for _ in 0..5 {
        assert_no_completion(&mut pair.cq, 1);
        assert_eq!(fill(&mut small, 0), 0, "it was not polled");
    }
    assert_eq!(pair.statuses(1), [(2, Success)]);
    // Those behind the signaled one are in the queue. Of two more the second fails, and after it all are flushed.
    assert_eq!(fill(&mut small, 1), 2);
    assert_eq!(pair.statuses(1), [(2, Fatal)]);
    for _ in 0..3 {
        assert_eq!(fill(&mut small, 9), 4, "all before the failed one have left the queue");
        assert!(pair.statuses(4).iter().all(|s| s.1 == Flushed));
    }
    assert_eq!(fill(&mut small, 9), 4);
    small.reset().unwrap();
    let mut again = Peer::of(&mut small);
    let wrs = (0..100).take_while(|_| small.post(&write(&again.memory, 1, &[0; 8], false)).is_ok());
    assert_eq!(wrs.count(), 4);
    again.cq.poll(1, |c| panic!("{c:?}")).unwrap();
    pair.write(1, true).unwrap();
    assert_eq!(pair.statuses(1), [(1, Success)]);
    assert_eq!(small.post(&write(&again.memory, 1, &[0; 8], true)), Err(PostError::Full), "of another one");
}

#[test]
fn lost_datagrams_keep_their_places_too() {
    let device = Device::open(&DeviceSpec::Software).unwrap().with_faults(Plan::none().drop_datagram(0));
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(&CqConfig::default()).unwrap();
    let sizes = QpConfig { max_send_wr: 4, ..QpConfig::default() };
    let mut qp = pd.create_ud(&sizes, &cq, &cq, None).unwrap();
    qp.activate(1).unwrap();
    let (ah, to) = (pd.create_ah(&device.address()).unwrap(), qp.qp_num());
    let mut fill = |signaled: u64| {
        let wr =
            |n| SendWr { signal: (n == signaled).into(), ..SendWr::new(n, SendOp::Send, Data::Inline(&[])) };
        (0..100).take_while(|n| qp.post(&ah, to, 1, &wr(*n)).is_ok()).count()
    };
    assert_eq!((fill(2), fill(0)), (4, 0));
    assert_eq!(take_completions(&mut cq, 1)[0].wr_id, 2);
    assert_eq!((fill(9), fill(0)), (3, 0));
    assert_no_completion(&mut cq, 10);
}

#[test]
fn port_that_stays_down_fails_stalled_requests() {
    let mut pair = Pair::new(Plan::none().give_up_after(50));
    pair.qp.post_recv(&RecvWr { wr_id: 100, sges: &[] }).unwrap();
    pair.control.port_down();
    pair.write(1, false).unwrap();
    pair.write(2, true).unwrap();
    assert_no_completion(&mut pair.cq, 40);
    let mut seen = pair.statuses(3);
    seen.retain(|s| *s != (100, Flushed));
    assert_eq!(seen, [(1, RetryExceeded), (2, Flushed)]);
    assert_eq!(pair.qp.state(), QpState::Error);
    pair.control.port_up();
    assert_eq!(pair.peer.written(), []);
    // A queue pair that sent nothing during the outage is not affected.
    let mut pair = Pair::new(Plan::none().give_up_after(50));
    pair.control.port_down();
    assert_no_completion(&mut pair.cq, 100);
    pair.control.port_up();
    pair.write(1, true).unwrap();
    assert_eq!(pair.statuses(1), [(1, Success)]);
}

#[test]
fn outages_can_be_planned() {
    let mut pair = Pair::new(Plan::none().port_down(1, 30));
    (1..=3).for_each(|n| pair.write(n, true).unwrap());
    assert_eq!(pair.peer.written(), [1]);
    assert_eq!(pair.statuses(3), [(1, Success), (2, Success), (3, Success)]);
    assert_eq!(events(&pair.device), [Event::PortDown, Event::PortUp]);
}

#[test]
fn an_outage_ends_while_nobody_uses_the_device() {
    let mut pair = Pair::new(Plan::none().port_down(0, 5_000));
    pair.write(1, true).unwrap();
    assert_eq!(pair.device.wait_event(TIMEOUT).unwrap(), Some(Event::PortDown));
    assert_eq!(pair.device.wait_event(TIMEOUT).unwrap(), Some(Event::PortUp));
    assert_eq!(pair.statuses(1), [(1, Success)]);
}

#[test]
fn wait_survives_an_outage() {
    let mut pair = Pair::new(Plan::none().port_down(0, 5_000));
    pair.write(1, true).unwrap();
    until("the request completes", || {
        pair.cq.wait(TIMEOUT).unwrap();
        pair.cq.poll(1, |c| assert_eq!(c.status, Success)).unwrap() > 0
    });
    // With nothing to wait for, a wait lasts as long as it says.
    while pair.cq.wait(Duration::from_millis(5)).unwrap() {}
}

#[test]
fn killed_peer_breaks_its_connections() {
    let mut pair = Pair::new(Plan::none());
    let mut other = pair.pd.create_rc(&QpConfig::default(), &pair.cq, &pair.cq, None).unwrap();
    let survivor = Peer::of(&mut other);
    // A second, idle connection to the peer that will be killed.
    let mut idle = pair.pd.create_rc(&QpConfig::default(), &pair.cq, &pair.cq, None).unwrap();
    let pd = pair.peer.device.alloc_pd().unwrap();
    let mut far = pd.create_rc(&QpConfig::default(), &pair.peer.cq, &pair.peer.cq, None).unwrap();
    connect(&mut far, &mut idle);
    // They wait, because the peer has posted no receive.
    for i in 1..=2 {
        pair.qp.post(&SendWr::new(i, SendOp::Send, Data::Inline(&[])).signaled()).unwrap();
    }
    let peer = pair.peer.device.address();
    pair.control.kill_peer(&peer);
    assert_eq!(pair.statuses(2), [(1, RetryExceeded), (2, Flushed)]);
    assert_eq!((pair.qp.state(), idle.state()), (QpState::Error, QpState::Error));
    assert_eq!(events(&pair.device), [Event::QpFatal(idle.qp_num())]);
    other.post(&write(&survivor.memory, 5, &5u64.to_ne_bytes(), true)).unwrap();
    assert_eq!(pair.statuses(1), [(5, Success)]);
    idle.reset().unwrap();
    let again = idle.connect(&far.address(), &ConnectConfig::default());
    assert!(matches!(again, Err(DeviceError::Unreachable(_))), "{again:?}");
}

#[test]
fn plan_can_kill_a_peer() {
    let mut pair = Pair::new(Plan::none().kill_peer(2));
    (1..=4).for_each(|n| pair.write(n, true).unwrap());
    let seen = pair.statuses(4);
    assert_eq!(seen.iter().map(|s| s.0).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(seen.iter().filter(|s| s.1 == RetryExceeded).count(), 1, "{seen:?}");
    assert_eq!(seen[3].1, Flushed);
    assert_eq!(pair.peer.written(), [1, 2]);
}

#[test]
fn datagrams_get_lost() {
    let plan = Plan::none().drop_datagram(1);
    let device = Device::open(&DeviceSpec::Software).unwrap().with_faults(plan);
    let control = device.faults().unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(&CqConfig::default()).unwrap();
    let mut from = pd.create_ud(&QpConfig::default(), &cq, &cq, None).unwrap();
    let plain = Device::open(&DeviceSpec::Software).unwrap();
    let plain_pd = plain.alloc_pd().unwrap();
    let mut plain_cq = plain.create_cq(&CqConfig::default()).unwrap();
    let mut to = plain_pd.create_ud(&QpConfig::default(), &plain_cq, &plain_cq, None).unwrap();
    from.activate(1).unwrap();
    to.activate(1).unwrap();
    let region = plain_pd.allocate(64, Access::ALL).unwrap();
    for i in 0..8 {
        to.post_recv(&RecvWr { wr_id: i, sges: &[region.sge(0..64).unwrap()] }).unwrap();
    }
    let ah = pd.create_ah(&plain.address()).unwrap();
    let mut send = |from: &mut UdQp, i: u32| {
        let wr = SendWr::new(i.into(), SendOp::SendImm(i), Data::Inline(&[])).signaled();
        from.post(&ah, to.qp_num(), 1, &wr).unwrap();
        assert_eq!(take_completions(&mut cq, 1)[0].status, Success);
    };
    (0..3).for_each(|i| send(&mut from, i));
    control.port_down();
    send(&mut from, 3);
    control.port_up();
    send(&mut from, 4);
    control.kill_peer(&plain.address());
    send(&mut from, 5);
    let arrived: Vec<_> = take_completions(&mut plain_cq, 3).iter().map(|c| c.imm.unwrap()).collect();
    assert_eq!(arrived, [0, 2, 4]);
    assert_no_completion(&mut plain_cq, 100);
}

#[test]
fn reset_drops_requests_and_allows_reconnecting() {
    let mut pair = Pair::new(Plan::none().fail_completion(0, Fatal));
    (1..=3).for_each(|n| pair.write(n, true).unwrap());
    assert_eq!(take_completions(&mut pair.cq, 1)[0].status, Fatal);
    pair.qp.reset().unwrap();
    assert_no_completion(&mut pair.cq, 100);
    let mut peer = Peer::of(&mut pair.qp);
    std::mem::swap(&mut peer, &mut pair.peer);
    pair.write(9, true).unwrap();
    assert_eq!(pair.statuses(1), [(9, Success)]);
    assert_eq!(pair.peer.written(), [9]);
}

#[test]
fn faults_is_some_only_for_wrapped_devices() {
    let device = Device::open(&DeviceSpec::Software).unwrap();
    assert!(device.faults().is_none());
    let device = Device::open(&"fault:7:software".parse().unwrap()).unwrap();
    assert_eq!(device.faults().unwrap().posts(), 0);
}
