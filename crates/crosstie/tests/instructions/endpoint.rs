//! Operations of endpoints, from the call to the result, both sides and the software device included; and, to compare, a request on a
//! bare queue pair, from its post to its completion.

use std::sync::Arc;
use std::time::Instant;

use crosstie::WaitStrategy;
use crosstie::device::{
    Access, ConnectConfig, Cq, CqConfig, Data, Device, Mr, QpConfig, RcQp, SendOp, SendWr, software,
};
use crosstie::endpoint::{Buffer, Endpoint, EndpointConfig, Lend, OperationFuture, Progress};

use super::{assert_limit, callgrind};

const ROUNDS: u32 = 2000;
const PAYLOAD: usize = 64;

/// A `write`.
const WRITE_LIMIT: u64 = 707;
/// A `write_imm` and its `imm_recv`.
const IMMEDIATE_LIMIT: u64 = 2163;
/// A `send` and its `recv`.
const MESSAGE_LIMIT: u64 = 3596;

/// Two endpoints that one thread drives.
struct Pair {
    here: Endpoint,
    there: Endpoint,
    target: Buffer,
}

fn open() -> Device {
    Device::open_software(&software::Config { space: 512 << 20 }).unwrap()
}

impl Pair {
    fn new() -> Pair {
        let config = EndpointConfig {
            progress: Progress::Caller,
            wait: WaitStrategy::Spin,
            ..EndpointConfig::default()
        };
        let endpoint = || {
            let device = open();
            Endpoint::new(&device, &Arc::new(device.alloc_pd().unwrap()), &config).unwrap()
        };
        let (here, there) = (endpoint(), endpoint());
        here.connect(&there.address()).unwrap();
        there.connect(&here.address()).unwrap();
        let target = there.allocate(1 << 16).unwrap();
        Pair { here, there, target }
    }

    fn finish<B: Lend>(&self, mut future: OperationFuture<B>) -> B {
        loop {
            match future.try_take() {
                Some(Ok(done)) => return done.buffer,
                Some(Err(failed)) => panic!("{}", failed.cause),
                None => _ = self.here.progress() + self.there.progress(),
            }
        }
    }

    fn write(&self, mut buffer: Buffer, rounds: u32) -> Buffer {
        for _ in 0..rounds {
            let write = self.here.write(buffer, .., &self.target.remote(), 0);
            buffer = self.finish(write.unwrap());
        }
        buffer
    }

    fn immediate(&self, mut buffer: Buffer, rounds: u32) -> Buffer {
        for round in 0..rounds {
            let write = self.here.write_imm(buffer, .., &self.target.remote(), 0, round);
            let event = self.there.imm_recv().unwrap();
            self.finish(event);
            buffer = self.finish(write.unwrap());
        }
        buffer
    }

    fn message(&self, mut from: Buffer, mut to: Buffer, rounds: u32) -> (Buffer, Buffer) {
        for _ in 0..rounds {
            let recv = self.there.recv(to, ..).unwrap();
            let send = self.here.send(from, ..).unwrap();
            to = self.finish(recv);
            from = self.finish(send);
        }
        (from, to)
    }
}

/// A bare queue pair, with the same sizes as those of an endpoint.
struct Raw {
    cq: Cq,
    qp: RcQp,
    source: Mr,
    target: Mr,
    // Keeps the connection open.
    _peer: (Cq, RcQp),
}

impl Raw {
    fn new() -> Raw {
        let side = || {
            let device = open();
            let pd = device.alloc_pd().unwrap();
            let cq = device.create_cq(&CqConfig::default()).unwrap();
            let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
            qp.init(Access::ALL).unwrap();
            let memory = pd.allocate(1 << 16, Access::ALL).unwrap();
            (cq, qp, memory)
        };
        let ((cq, mut qp, source), (peer_cq, mut peer, target)) = (side(), side());
        qp.connect(&peer.address(), &ConnectConfig::default()).unwrap();
        peer.connect(&qp.address(), &ConnectConfig::default()).unwrap();
        Raw { cq, qp, source, target, _peer: (peer_cq, peer) }
    }

    fn write(&mut self, rounds: u32) {
        let remote = self.target.remote().at(0);
        for round in 0..rounds {
            let sges = [self.source.sge(0..PAYLOAD).unwrap()];
            let wr = SendWr::new(round.into(), SendOp::Write(remote), Data::Regions(&sges)).signaled();
            self.qp.post(&wr).unwrap();
            let mut done = false;
            while !done {
                self.cq.poll(1, |completion| done = completion.status.is_success()).unwrap();
            }
        }
    }
}

#[test]
fn small_operations_stay_within_their_instruction_budget() {
    const NAME: &str = "endpoint::small_operations_stay_within_their_instruction_budget";
    match callgrind::task().as_deref() {
        Some("raw write") => {
            let mut raw = Raw::new();
            raw.write(10);
            callgrind::measure(&mut || raw.write(ROUNDS));
        }
        Some(task) => {
            let pair = Pair::new();
            let allocate = |endpoint: &Endpoint| endpoint.allocate(PAYLOAD).unwrap();
            let mut from = Some(pair.write(allocate(&pair.here), 10));
            let mut to = Some(allocate(&pair.there));
            let mut work = |rounds| match task {
                "write" => from = from.take().map(|buffer| pair.write(buffer, rounds)),
                "write_imm and imm_recv" => {
                    from = from.take().map(|buffer| pair.immediate(buffer, rounds));
                }
                _ => {
                    let (sent, received) = pair.message(from.take().unwrap(), to.take().unwrap(), rounds);
                    (from, to) = (Some(sent), Some(received));
                }
            };
            work(10);
            callgrind::measure(&mut || work(ROUNDS));
        }
        None => {
            println!("raw write: {} instructions", callgrind::count(NAME, "raw write") / u64::from(ROUNDS));
            assert_limit(NAME, "write", ROUNDS, WRITE_LIMIT);
            assert_limit(NAME, "write_imm and imm_recv", ROUNDS, IMMEDIATE_LIMIT);
            assert_limit(NAME, "send and recv", ROUNDS, MESSAGE_LIMIT);
        }
    }
}

/// Prints times, and asserts nothing about them: slices of both alternate, and the fastest ones are compared.
#[test]
fn print_times_of_small_writes() {
    let (mut raw, pair) = (Raw::new(), Pair::new());
    let mut buffer = Some(pair.here.allocate(PAYLOAD).unwrap());
    let mut best = [f64::INFINITY; 2];
    for _ in 0..200 {
        let begin = Instant::now();
        raw.write(ROUNDS);
        let middle = Instant::now();
        buffer = buffer.map(|buffer| pair.write(buffer, ROUNDS));
        let each = [middle - begin, middle.elapsed()].map(|time| time.as_nanos() as f64 / f64::from(ROUNDS));
        best = [best[0].min(each[0]), best[1].min(each[1])];
    }
    let [raw, endpoint] = best;
    println!(
        "write of {PAYLOAD} bytes: bare queue pair {raw:.0} ns, endpoint {endpoint:.0} ns, {:.2} x",
        endpoint / raw
    );
}
