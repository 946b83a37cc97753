//! Messages and operations on bare queue pairs.
//!
//! The traffic runs between two threads, each with its own device, as two processes would have; `messages` counts the instructions of
//! both ends in one thread.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use crosstie::device::*;
use crosstie_testkit::{allocations, callgrind, child, seccomp};

/// Operations before counting starts, so that lazy initialisation is done.
const WARM_UP: u64 = 2_000;
/// Operations that are counted.
const MEASURED: u64 = 100_000;
/// Messages in flight in streams.
const DEPTH: u64 = 64;

/// The traffic between the two threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    WriteImmPingPong,
    SendPingPong,
    SharedReceivePingPong,
    WriteImmStream,
    SendStream,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
}

use Traffic::*;

const ALL: [Traffic; 9] = [
    WriteImmPingPong,
    SendPingPong,
    SharedReceivePingPong,
    WriteImmStream,
    SendStream,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
];

/// One end of the connection: a queue pair and its queues and memory.
struct End {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
    memory: Mr,
    peer: RemoteMemory,
    traffic: Traffic,
    unsignaled: u32,
    /// Receives, operations and acknowledgements so far.
    sent: u64,
    received: u64,
}

/// Layout of an end's memory: a word in which the peer counts what it consumed, a word for atomics, then slots.
const CONSUMED: usize = 0;
const WORD: usize = 64;
const SLOTS: usize = 128;
const SLOT: usize = 64;
const LEN: usize = 32;
const SIGNAL_EVERY: u32 = 32;

fn slot(seq: u64) -> usize {
    SLOTS + (seq % DEPTH) as usize * SLOT
}

impl End {
    fn new(traffic: Traffic) -> (End, QpAddress) {
        let device = Device::open(&DeviceSpec::Software).unwrap();
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(&CqConfig::default()).unwrap();
        let recv_cq = device.create_cq(&CqConfig::default()).unwrap();
        let srq = (traffic == SharedReceivePingPong).then(|| pd.create_srq(&SrqConfig::default()).unwrap());
        let mut qp = pd.create_rc(&QpConfig::default(), &send_cq, &recv_cq, srq.as_ref()).unwrap();
        qp.init(Access::ALL).unwrap();
        let memory = pd.allocate(slot(DEPTH - 1) + SLOT, Access::ALL).unwrap();
        let (address, peer) = (qp.address(), memory.remote());
        let mut end =
            End { qp, send_cq, recv_cq, srq, memory, peer, traffic, unsignaled: 0, sent: 0, received: 0 };
        for seq in 0..DEPTH {
            end.post_receive(seq);
        }
        (end, address)
    }

    fn post_receive(&mut self, seq: u64) {
        let at = slot(seq);
        let sges = [self.memory.sge(at..at + LEN).unwrap()];
        let wr = RecvWr { wr_id: seq, sges: if self.carries_bytes() { &sges } else { &[] } };
        match &mut self.srq {
            Some(srq) => srq.post_recv(&wr).unwrap(),
            None => self.qp.post_recv(&wr).unwrap(),
        }
    }

    fn carries_bytes(&self) -> bool {
        matches!(self.traffic, SendPingPong | SendStream | SharedReceivePingPong)
    }

    /// Posts a request; every 32nd is signaled and awaited.
    fn post(&mut self, op: SendOp, data: Data<'_>, idle: &mut Idle) {
        self.unsignaled += 1;
        let signaled = self.unsignaled == SIGNAL_EVERY;
        self.qp.post(&SendWr { signaled, ..SendWr::new(self.sent, op, data) }).unwrap();
        if signaled {
            self.unsignaled = 0;
            self.await_sent(idle);
        }
    }

    fn await_sent(&mut self, idle: &mut Idle) {
        while self.send_cq.poll(1, |c| assert_eq!(c.status, Status::Success)).unwrap() == 0 {
            idle.turn();
        }
    }

    fn say(&mut self, idle: &mut Idle) {
        let to = self.peer.at(slot(self.sent) as u64);
        let op = if self.carries_bytes() { SendOp::Send } else { SendOp::WriteImm(to, self.sent as u32) };
        self.post(op, Data::Inline(&[7; LEN]), idle);
        self.sent += 1;
    }

    fn hear(&mut self, max: usize, idle: &mut Idle) {
        let mut count = 0;
        while count == 0 {
            count = self.recv_cq.poll(max, |c| assert_eq!(c.status, Status::Success)).unwrap();
            idle.turn();
        }
        for _ in 0..count {
            self.post_receive(self.received);
            self.received += 1;
        }
    }

    fn consumed(&self) -> u64 {
        let mut word = [0; 8];
        self.memory.read(CONSUMED, &mut word).unwrap();
        u64::from_ne_bytes(word)
    }

    fn lead(&mut self, count: u64, idle: &mut Idle) {
        let end = self.sent + count;
        while self.sent < end {
            match self.traffic {
                WriteImmPingPong | SendPingPong | SharedReceivePingPong => {
                    self.say(idle);
                    self.hear(1, idle);
                }
                WriteImmStream | SendStream => {
                    while self.sent - self.consumed() >= DEPTH {
                        idle.turn();
                    }
                    self.say(idle);
                }
                one_sided => self.operate(one_sided, idle),
            }
        }
        while matches!(self.traffic, WriteImmStream | SendStream) && self.consumed() < end {
            idle.turn();
        }
    }

    fn operate(&mut self, traffic: Traffic, idle: &mut Idle) {
        let (at, seq) = (slot(self.sent), self.sent);
        let (to, word) = (self.peer.at(at as u64), self.peer.at(WORD as u64));
        let (op, len) = match traffic {
            Read => (SendOp::Read(to), LEN),
            CompareSwap => (SendOp::CompareSwap { remote: word, compare: seq, swap: seq + 1 }, 8),
            FetchAdd => (SendOp::FetchAdd { remote: word, add: 1 }, 8),
            _ => (SendOp::Write(to), LEN),
        };
        // The region is borrowed by the request, and the rest of the end by the post.
        let sges = [self.memory.sge(at..at + len).unwrap()];
        self.qp.post(&SendWr::new(seq, op, Data::Regions(&sges)).signaled()).unwrap();
        self.await_sent(idle);
        self.sent += 1;
    }

    fn follow(&mut self, count: u64, idle: &mut Idle) {
        let end = self.received + count;
        match self.traffic {
            WriteImmPingPong | SendPingPong | SharedReceivePingPong => {
                while self.received < end {
                    self.hear(1, idle);
                    self.say(idle);
                }
            }
            WriteImmStream | SendStream => {
                let mut told = self.received;
                while self.received < end {
                    self.hear(16, idle);
                    if self.received - told >= DEPTH / 4 || self.received == end {
                        told = self.received;
                        let to = self.peer.at(CONSUMED as u64);
                        self.post(SendOp::Write(to), Data::Inline(&told.to_ne_bytes()), idle);
                    }
                }
            }
            _ => {}
        }
    }
}

/// Spins, yields now and then in case the other thread needs the core, and panics if the other thread never responds.
struct Idle(u64);

impl Idle {
    fn turn(&mut self) {
        self.0 += 1;
        if self.0.is_multiple_of(4096) {
            assert!(self.0 < 1 << 34, "the other side does not answer");
            std::thread::yield_now();
        }
    }
}

/// Runs the traffic in two threads; `measure` wraps the measured part of each.
fn run(traffic: Traffic, measure: impl Fn(Role, &mut dyn FnMut()) + Sync) {
    let ((mut left, left_at), (mut right, right_at)) = (End::new(traffic), End::new(traffic));
    std::mem::swap(&mut left.peer, &mut right.peer);
    left.qp.connect(&right_at, &ConnectConfig::default()).unwrap();
    right.qp.connect(&left_at, &ConnectConfig::default()).unwrap();
    let warm = AtomicU32::new(0);
    let await_warm = || {
        warm.fetch_add(1, SeqCst);
        let mut idle = Idle(0);
        while warm.load(SeqCst) < 2 {
            idle.turn();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            right.follow(WARM_UP, &mut Idle(0));
            await_warm();
            measure(Role::Following, &mut || right.follow(MEASURED, &mut Idle(0)));
        });
        left.lead(WARM_UP, &mut Idle(0));
        await_warm();
        measure(Role::Leading, &mut || left.lead(MEASURED, &mut Idle(0)));
    });
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Leading,
    Following,
}

#[test]
fn no_operation_allocates() {
    for traffic in ALL {
        run(traffic, |role, work| {
            allocations::assert_none(format_args!("{traffic:?}, {role:?}"), work);
        });
    }
}

/// Except for `sched_yield`, which [`Idle`] makes when it has long waited for the other side.
#[test]
fn no_operation_makes_a_system_call() {
    static FINISHED: AtomicU32 = AtomicU32::new(0);
    if let Some(task) = child::task() {
        let traffic = ALL.into_iter().find(|traffic| format!("{traffic:?}") == task).unwrap_or(Write);
        run(traffic, |role, work| {
            seccomp::without_system_calls(&[libc::SYS_sched_yield], || {
                work();
                FINISHED.fetch_add(1, SeqCst);
                let mut idle = Idle(0);
                while role == Role::Following || FINISHED.load(SeqCst) < 2 {
                    idle.turn();
                }
            });
        });
    }
    let tasks = ALL.map(|traffic| format!("{traffic:?}"));
    seccomp::assert_no_system_calls(no_operation_makes_a_system_call, &tasks.each_ref().map(String::as_str));
}

#[test]
fn empty_poll_costs_the_same_with_any_number_of_queue_pairs() {
    const POLLS: u64 = 1000;
    if let Some(queue_pairs) = child::task() {
        return poll_empty_among(queue_pairs.parse().unwrap(), POLLS);
    }
    let count =
        |queue_pairs| callgrind::count(empty_poll_costs_the_same_with_any_number_of_queue_pairs, queue_pairs);
    let counts = ["1", "64", "1024"].map(count);
    println!("{counts:?} instructions in {POLLS} empty polls");
    assert!(counts[0] > POLLS && counts.iter().all(|count| *count == counts[0]), "{counts:?}");
}

fn poll_empty_among(queue_pairs: usize, polls: u64) {
    // Under valgrind there is little address space.
    let device = Device::open_software(&software::Config { space: 256 << 20 }).unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(&CqConfig::default()).unwrap();
    let config = QpConfig { max_send_wr: 4, max_recv_wr: 4, ..QpConfig::default() };
    let mut ends: Vec<RcQp> =
        (0..queue_pairs).map(|_| pd.create_rc(&config, &cq, &cq, None).unwrap()).collect();
    for end in &mut ends {
        // Each queue pair is connected to itself.
        let address = end.address();
        end.connect(&address, &ConnectConfig::default()).unwrap();
    }
    assert_eq!(cq.poll(16, |_| {}), Ok(0));
    callgrind::measure(&mut || (0..polls).for_each(|_| assert_eq!(cq.poll(16, |_| {}), Ok(0))));
}
