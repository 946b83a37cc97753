//! What goes wrong ends one connection, and no other: faults of the device, hostile peers, killed processes.
//!
//! Most of it runs in one thread, which polls all sides in turn: so the same seed gives the same run. The seed is
//! printed; `CROSSTIE_SEED` sets it.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crosstie::copyrpc::{
    CallFailed, Config, Context, Endpoint, EndpointAddress, EndpointConfig, Failure, NotCalled,
};
use crosstie::device::fault::Plan;
use crosstie::device::{
    Access, ConnectConfig, CqConfig, Data, Device, DeviceSpec, PostError, QpAddress, QpConfig, QpState, RcQp,
    SendOp, SendWr, Status,
};
use crosstie_protocol::copyrpc::Violation;
use crosstie_protocol::copyrpc::wire::{ConnectInfo, FlowMetadata, Header, encode_imm};
use zerocopy::{FromBytes, IntoBytes};

const PATIENCE: Duration = Duration::from_secs(20);

type User = (u32, u64);

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let given = std::env::var("CROSSTIE_SEED").ok().and_then(|s| s.parse().ok());
    let seed = given.unwrap_or(now.map_or(1, |d| d.as_nanos() as u64));
    println!("seed {seed} (set CROSSTIE_SEED to repeat)");
    seed
}

fn ring(bytes: usize) -> EndpointConfig {
    EndpointConfig { ring: bytes, credit: bytes / 4, pending_calls: 64, bulk: 0 }
}

fn pair(
    left: &Context<User>,
    right: &Context<User>,
    config: &EndpointConfig,
) -> (Endpoint<User>, Endpoint<User>) {
    let (here, there) = (left.create_endpoint(config).unwrap(), right.create_endpoint(config).unwrap());
    // A peer that is gone is given up after milliseconds.
    let hasty = ConnectConfig { timeout: 8, retry_count: 1, ..ConnectConfig::default() };
    here.connect(&there.address(), &hasty).unwrap();
    there.connect(&here.address(), &hasty).unwrap();
    (here, there)
}

/// One side: a context, and what it asked.
struct Side {
    context: Context<User>,
    endpoints: Vec<Endpoint<User>>,
    next: u64,
    open: BTreeSet<User>,
    failed: Vec<(User, CallFailed)>,
    answered: u64,
}

impl Side {
    fn new(device: Device, config: &Config) -> Side {
        let context = Context::new(device, config).unwrap();
        Side { context, endpoints: vec![], next: 0, open: BTreeSet::new(), failed: vec![], answered: 0 }
    }

    fn software() -> Side {
        Side::new(Device::open(&DeviceSpec::Software).unwrap(), &Config::default())
    }

    /// Calls each endpoint up to `depth` times; those that are over refuse.
    fn call(&mut self, depth: usize) {
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            while endpoint.pending() < depth {
                let user = (index as u32, self.next);
                match endpoint.call(&self.next.to_le_bytes(), 8, user) {
                    Ok(()) => assert!(self.open.insert(user)),
                    Err(error) => {
                        assert_eq!(error.user, user);
                        let over = matches!(error.cause, NotCalled::Failed(_));
                        assert!(error.cause.is_back_pressure() || over, "{}", error.cause);
                        assert_eq!(over, endpoint.failure().is_some());
                        break;
                    }
                }
                self.next += 1;
            }
        }
    }

    /// Polls once, and answers what came with what came.
    fn turn(&mut self) {
        let Side { context, open, failed, answered, .. } = self;
        context.poll(|user, answer| {
            assert!(open.remove(&user), "{user:?} ends once");
            match answer {
                Ok(bytes) => {
                    assert_eq!(bytes.to_vec(), user.1.to_le_bytes());
                    *answered += 1;
                }
                Err(cause) => failed.push((user, cause)),
            }
        });
        while let Some(request) = context.recv() {
            let bytes = request.data().to_vec();
            // A connection that is over does not matter to anybody.
            request.reply(&bytes).ok();
        }
    }
}

/// Both sides take turns until nothing is open.
fn settle(left: &mut Side, right: &mut Side, what: &str) {
    let begin = Instant::now();
    while !left.open.is_empty() || !right.open.is_empty() {
        left.turn();
        right.turn();
        assert!(
            begin.elapsed() < PATIENCE,
            "{what}: open for ever: {:?} {:?}\n{:?}\n{:?}",
            left.open,
            right.open,
            left.context.counters(),
            right.context.counters()
        );
    }
}

/// Calls both ways over every connection that is left, more than any ring or table holds: nothing leaks.
fn exercise(left: &mut Side, right: &mut Side, calls: u64, what: &str) {
    let goal = (left.answered + calls, right.answered + calls);
    let begin = Instant::now();
    while left.answered < goal.0 || right.answered < goal.1 {
        left.call(16);
        right.call(16);
        left.turn();
        right.turn();
        assert!(begin.elapsed() < PATIENCE, "{what}: no progress: {:?}", left.context.counters());
    }
    settle(left, right, what);
}

/// Two sides with two connections, the left one on a device with faults; calls both ways; then whatever is over is
/// replaced. Says how many posts and completions there were.
fn with_faults(plan: Plan, what: &str) -> (u64, u64) {
    let device = Device::open(&DeviceSpec::Software).unwrap().with_faults(plan);
    let control = device.faults().unwrap();
    let mut left = Side::new(device, &Config { receives: 16, ..Config::default() });
    let mut right = Side::software();
    for _ in 0..2 {
        let (here, there) = pair(&left.context, &right.context, &ring(512));
        left.endpoints.push(here);
        right.endpoints.push(there);
    }
    for _ in 0..30 {
        left.call(4);
        right.call(4);
        left.turn();
        right.turn();
    }
    settle(&mut left, &mut right, what);
    let counts = (control.posts(), control.completions());
    for index in 0..2 {
        if left.endpoints[index].failure().is_some() || right.endpoints[index].failure().is_some() {
            let (here, there) = pair(&left.context, &right.context, &ring(512));
            drop(std::mem::replace(&mut left.endpoints[index], here));
            drop(std::mem::replace(&mut right.endpoints[index], there));
        }
    }
    left.failed.clear();
    right.failed.clear();
    exercise(&mut left, &mut right, 100, what);
    assert!(
        left.failed.is_empty() && right.failed.is_empty(),
        "{what}: {:?} {:?}",
        left.failed,
        right.failed
    );
    counts
}

#[test]
fn every_post_and_every_completion_fails_in_turn() {
    let (posts, completions) = with_faults(Plan::none(), "no fault");
    println!("{posts} posts, {completions} completions");
    assert!(posts > 50 && completions > 20, "faults need something to hit");
    let mut plans = Vec::new();
    for k in 0..posts {
        plans.push((Plan::none().fail_post(k, PostError::Full), format!("post {k} full")));
        // What the set-up posts is posted before there is a connection that could fail.
        if k >= 16 {
            let refused = Plan::none().fail_post(k, PostError::Device(libc::EIO));
            plans.push((refused, format!("post {k} refused")));
        }
        plans.push((Plan::none().lose_post(k, Status::RetryExceeded), format!("post {k} lost")));
        plans.push((Plan::none().port_down(k, 500), format!("port down at post {k}")));
    }
    for k in 0..completions {
        for status in [Status::RetryExceeded, Status::Fatal] {
            plans.push((Plan::none().fail_completion(k, status), format!("completion {k}: {status}")));
        }
        plans.push((Plan::none().delay_completion(k, 50), format!("completion {k} late")));
        plans.push((Plan::none().overtake_completion(k), format!("completion {k} overtaken")));
    }
    println!("{} runs", plans.len());
    // Most of the time goes by until a silent peer is asked: side by side it is short.
    let plans = std::sync::Mutex::new(plans);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let Some((plan, what)) = plans.lock().unwrap().pop() else { break };
                    with_faults(plan, &what);
                }
            });
        }
    });
}

#[test]
fn a_tiny_ring_goes_round_half_a_million_times() {
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) = pair(&left.context, &right.context, &ring(256));
    left.endpoints.push(here);
    let rounds = 500_000;
    let begin = Instant::now();
    while right.context.counters().bytes / 256 < rounds {
        left.call(64);
        left.turn();
        right.turn();
        assert!(begin.elapsed() < 15 * PATIENCE);
    }
    settle(&mut left, &mut right, "a tiny ring");
    assert!(left.failed.is_empty() && there.failure().is_none());
    println!("{} calls, {:?}", left.answered, begin.elapsed());
}

#[test]
fn a_panicking_callback_ends_the_connections_and_not_the_context() {
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) = pair(&left.context, &right.context, &ring(4096));
    here.call(b"panic", 8, (0, 0)).unwrap();
    here.call(b"lost with it", 8, (0, 1)).unwrap();
    let begun = Instant::now();
    loop {
        right.turn();
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            left.context.poll(|_, _| panic!("as asked"));
        }));
        if polled.is_err() {
            break;
        }
        assert!(begun.elapsed() < PATIENCE);
    }
    let mut ended = Vec::new();
    while here.failure().is_none() || ended.is_empty() {
        left.context.poll(|user, answer| ended.push((user, answer.err())));
        assert!(begun.elapsed() < PATIENCE);
    }
    assert_eq!(ended, [((0, 1), Some(CallFailed::Connection(Failure::Closed)))]);
    drop((here, there));
    // A new connection of the same contexts works.
    let (here, there) = pair(&left.context, &right.context, &ring(4096));
    left.endpoints.push(here);
    right.endpoints.push(there);
    exercise(&mut left, &mut right, 100, "after a panic");
}

#[test]
fn a_dead_peer_is_noticed_while_others_are_busy() {
    let (mut left, mut right) = (Side::software(), Side::software());
    for _ in 0..2 {
        let (here, there) = pair(&left.context, &right.context, &ring(4096));
        left.endpoints.push(here);
        right.endpoints.push(there);
    }
    left.call(4);
    left.context.flush();
    // Takes the requests and is gone; the requests are known to have arrived, so nothing fails by itself.
    let gone = right.endpoints.pop().unwrap();
    right.context.poll(|_, _| ());
    drop(gone);
    right.turn();
    // Nothing more is sent there.
    let doomed = left.endpoints.pop().unwrap();
    let begin = Instant::now();
    while doomed.failure().is_none() {
        left.call(16);
        left.turn();
        right.turn();
        assert!(begin.elapsed() < PATIENCE, "nobody noticed");
    }
    assert_eq!(left.failed.len(), 4);
    assert!(
        left.failed
            .iter()
            .all(|((index, _), cause)| *index == 1 && matches!(cause, CallFailed::Connection(_)))
    );
    settle(&mut left, &mut right, "the other one");
    assert_eq!(left.context.counters().failures, 1);
}

#[test]
fn a_deadline_is_for_its_own_call() {
    // With one call at a time the ids of calls come round soon.
    const GENERATIONS: u64 = (1 << 15) - 1;
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) =
        pair(&left.context, &right.context, &EndpointConfig { pending_calls: 1, ..ring(4096) });
    // Answered at once, its deadline is far away; the calls after it have none, and one of them has its id.
    let begin = Instant::now();
    let mut time = Duration::from_secs(2);
    for number in 0..GENERATIONS {
        let bytes = number.to_le_bytes();
        let called = match number {
            0 => here.call_within(&bytes, 8, (0, number), time),
            _ => here.call(&bytes, 8, (0, number)),
        };
        assert!(called.is_ok() && left.open.insert((0, number)));
        settle(&mut left, &mut right, "one at a time");
    }
    if begin.elapsed() > time {
        println!("too slow to show much: {:?}", begin.elapsed());
        time = Duration::ZERO;
    }
    assert!(here.call(&GENERATIONS.to_le_bytes(), 8, (0, GENERATIONS)).is_ok());
    left.open.insert((0, GENERATIONS));
    while begin.elapsed() < time + Duration::from_millis(200) {
        left.turn();
    }
    assert!(left.failed.is_empty(), "ended by the deadline of another: {:?}", left.failed);
    settle(&mut left, &mut right, "the last one");
    assert!(left.failed.is_empty() && there.failure().is_none());
}

#[test]
fn deadlines_take_bounded_memory() {
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, _there) =
        pair(&left.context, &right.context, &EndpointConfig { pending_calls: 8, ..ring(4096) });
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap();
        status.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let (calls, mut before) = (400_000u64, 0);
    for number in 0..calls {
        if number == calls / 10 {
            before = resident();
        }
        assert!(here.call_within(&number.to_le_bytes(), 8, (0, number), Duration::from_secs(600)).is_ok());
        left.open.insert((0, number));
        if number % 8 == 7 {
            settle(&mut left, &mut right, "deadlines");
        }
    }
    // Other tests of this program may run at the same time; each deadline that is kept would take 24 bytes.
    let grown = resident().saturating_sub(before);
    println!("{calls} calls, {grown} bytes more");
    assert!(grown < 6 << 20, "{calls} calls left {grown} bytes behind");
    assert!(left.failed.is_empty());
}

// -------------------------------------------------------------------------------------------------- a hostile peer

/// A queue pair that pretends to be a copyrpc endpoint.
struct Hostile {
    qp: RcQp,
    victim: ConnectInfo,
}

/// Where the parts of an address are: the device's part first, then copyrpc's.
const INFO_AT: usize = size_of::<QpAddress>();

impl Hostile {
    /// Connects to a new endpoint of `context`.
    fn connect(device: &Device, context: &Context<User>) -> (Hostile, Endpoint<User>) {
        let endpoint = context.create_endpoint(&ring(1024)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(&CqConfig::default()).unwrap();
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        let address = endpoint.address();
        let victim = ConnectInfo::decode(address.as_bytes()[INFO_AT..].try_into().unwrap()).unwrap();
        let mut own = address.as_bytes().to_vec();
        own[..INFO_AT].copy_from_slice(qp.address().as_bytes());
        let own = EndpointAddress::read_from_bytes(&own).unwrap();
        let theirs = QpAddress::read_from_bytes(&address.as_bytes()[..INFO_AT]).unwrap();
        qp.connect(&theirs, &ConnectConfig { access: Access::ALL, ..ConnectConfig::default() }).unwrap();
        endpoint.connect(&own, &ConnectConfig::default()).unwrap();
        (Hostile { qp, victim }, endpoint)
    }

    /// Writes bytes into the ring and announces them.
    fn write(&mut self, offset: u64, bytes: &[u8], imm: u32) {
        let to = crosstie::device::RemoteAddr {
            addr: self.victim.ring_addr + offset,
            rkey: self.victim.ring_rkey,
        };
        for (i, part) in bytes.chunks(128).enumerate() {
            let to = crosstie::device::RemoteAddr { addr: to.addr + 128 * i as u64, ..to };
            self.qp.post(&SendWr::new(0, SendOp::Write(to), Data::Inline(part))).ok();
        }
        self.qp.post(&SendWr::new(0, SendOp::WriteImm(to, imm), Data::Inline(&[]))).ok();
    }
}

#[test]
fn a_hostile_peer_ends_its_own_connection() {
    let mut random = Random(seed());
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) = pair(&left.context, &right.context, &ring(4096));
    left.endpoints.push(here);
    right.endpoints.push(there);
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let (mut violations, mut accepted) = (BTreeSet::new(), 0);
    for round in 0..1500 {
        let (mut hostile, endpoint) = Hostile::connect(&device, &left.context);
        let mut own = Vec::new();
        if round % 3 == 0 {
            // Calls of the victim, which the peer may try to answer.
            for number in 0..3 {
                assert!(endpoint.call(b"ask", 8, (7, number)).is_ok());
                own.push(number);
            }
            left.open.extend(own.iter().map(|number| (7, *number)));
        }
        let mut at = 0;
        for _ in 0..8 {
            let (bytes, imm) = nonsense(&mut random, 1024 - at);
            hostile.write(at, &bytes, imm);
            at = (at + u64::from(imm) * 32).min(1024) % 1024;
            left.context.poll(|user, answer| {
                assert!(left.open.remove(&user), "{user:?} ends once");
                if answer.is_ok() {
                    accepted += 1;
                }
            });
            while let Some(request) = left.context.recv() {
                let bytes = request.data().to_vec();
                if random.below(2) == 0 {
                    request.reply(&bytes[..bytes.len().min(8)]).ok();
                }
            }
        }
        let begin = Instant::now();
        while hostile.qp.state() != QpState::Error
            && endpoint.failure().is_none()
            && begin.elapsed().as_millis() < 2
        {
            left.turn();
        }
        if let Some(failure) = endpoint.failure() {
            assert!(matches!(failure, Failure::Violation(_) | Failure::Broken(_)), "{failure}");
            if let Failure::Violation(violation) = failure {
                violations.insert(format!("{violation:?}").split([' ', '{']).next().unwrap().to_owned());
            }
            assert_eq!(endpoint.pending(), 0);
            assert!(!left.open.iter().any(|(index, _)| *index == 7), "calls of a connection that is over");
        }
        for user in endpoint.close() {
            assert!(left.open.remove(&user));
        }
        left.open.retain(|(index, _)| *index != 7);
        if round % 50 == 0 {
            left.failed.clear();
            exercise(&mut left, &mut right, 20, "the honest connection");
            assert!(left.failed.is_empty());
        }
    }
    println!(
        "violations seen: {violations:?}; {accepted} answers were believable; {:?}",
        left.context.counters()
    );
    assert!(violations.len() >= 6, "{violations:?}");
    assert!(left.endpoints[0].failure().is_none());
}

/// Bytes and an immediate: at random, or nearly right.
fn nonsense(random: &mut Random, room: u64) -> (Vec<u8>, u32) {
    let blocks = 1 + random.below((room / 32).clamp(1, 8));
    let mut bytes: Vec<u8> = (0..blocks * 32).map(|_| random.next() as u8).collect();
    if random.below(4) > 0 {
        let message_count = match random.below(6) {
            0 => random.next() as u32,
            1 => u32::MAX,
            _ => random.below(3) as u32,
        };
        let small =
            |random: &mut Random| if random.below(3) == 0 { random.next() } else { 32 * random.below(4) };
        let consumer_pos = small(random);
        let credit_grant = small(random);
        let metadata = FlowMetadata { consumer_pos, credit_grant, message_count };
        bytes[..32].copy_from_slice(&metadata.encode());
        if bytes.len() >= 64 {
            let response = if random.below(2) == 0 { 0x8000_0000 } else { 0 };
            let call_id = (random.below(4) as u32 | 1 << 16 | response)
                ^ if random.below(4) == 0 { 1 << 20 } else { 0 };
            let payload_len =
                if random.below(4) == 0 { random.next() as u32 } else { random.below(40) as u32 };
            let header = Header { call_id, piggyback: random.below(4) as u32, payload_len };
            bytes[32..44].copy_from_slice(&header.encode());
        }
    }
    let imm = match random.below(5) {
        0 => random.next() as u32,
        1 => random.below(40) as u32,
        _ => encode_imm(bytes.len() as u64),
    };
    (bytes, imm)
}

#[test]
fn a_read_position_that_lies_is_a_violation() {
    // The peer's word is one of ours: the address says where it is.
    let (context, device) = (Side::software().context, Device::open(&DeviceSpec::Software).unwrap());
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let srq = pd.create_srq(&crosstie::device::SrqConfig::default()).unwrap();
    let mut srq = srq;
    for _ in 0..64 {
        srq.post_recv(&crosstie::device::RecvWr { wr_id: 0, sges: &[] }).unwrap();
    }
    let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, Some(&srq)).unwrap();
    let memory = pd.allocate(4096, Access::ALL).unwrap();
    memory.write(2048, &0x1234_5678_u64.to_le_bytes()).unwrap();
    let endpoint = context.create_endpoint(&ring(256)).unwrap();
    let info = ConnectInfo {
        ring_addr: memory.remote().addr,
        ring_size: 256,
        consumer_addr: memory.remote().addr + 2048,
        credit_limit: 64,
        ring_rkey: memory.remote().rkey,
        consumer_rkey: memory.remote().rkey,
        bulk_limit: 0,
    };
    let address = [qp.address().as_bytes(), &info.encode()].concat();
    let theirs = QpAddress::read_from_bytes(&endpoint.address().as_bytes()[..INFO_AT]).unwrap();
    qp.connect(&theirs, &ConnectConfig { access: Access::ALL, ..ConnectConfig::default() }).unwrap();
    endpoint
        .connect(&EndpointAddress::read_from_bytes(&address).unwrap(), &ConnectConfig::default())
        .unwrap();
    endpoint.call(b"ask", 8, (0, 0)).unwrap();
    let begin = Instant::now();
    let mut ended = None;
    while ended.is_none() {
        endpoint.call(b"ask", 8, (0, 1)).ok();
        context.poll(|_, answer| ended = Some(answer.err()));
        assert!(begin.elapsed() < PATIENCE, "{:?}", context.counters());
    }
    let Some(Some(CallFailed::Connection(Failure::Violation(violation)))) = ended else {
        panic!("{ended:?}")
    };
    assert!(matches!(violation, Violation::ConsumerMisaligned { .. } | Violation::ConsumerBeyondSent { .. }));
    assert_eq!(context.counters().violations, 1);
}

// ------------------------------------------------------------------------------------------------ killed processes

const CHILD: &str = "CROSSTIE_COPYRPC_VICTIM";
const KILLS: u32 = 60;

/// A process that calls and answers until it is killed.
fn victim() -> ! {
    let mut side = Side::software();
    let endpoint = side.context.create_endpoint(&ring(4096)).unwrap();
    let mut theirs = [0; size_of::<EndpointAddress>()];
    std::io::stdin().read_exact(&mut theirs).unwrap();
    let theirs = EndpointAddress::read_from_bytes(&theirs).unwrap();
    let hex: String = endpoint.address().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    // The test harness writes to the same place.
    println!("\naddress {hex}");
    std::io::stdout().flush().unwrap();
    endpoint.connect(&theirs, &ConnectConfig::default()).unwrap();
    side.endpoints.push(endpoint);
    loop {
        side.call(16);
        side.turn();
    }
}

fn start_victim(side: &mut Side) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["killed_processes_harm_nobody_else", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let endpoint = side.context.create_endpoint(&ring(4096)).unwrap();
    child.stdin.take().unwrap().write_all(endpoint.address().as_bytes()).unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let line =
        output.lines().map(Result::unwrap).find_map(|line| Some(line.strip_prefix("address ")?.to_owned()));
    let hex = line.expect("an address");
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
    endpoint.connect(&EndpointAddress::read_from_bytes(&bytes).unwrap(), &ConnectConfig::default()).unwrap();
    side.endpoints.push(endpoint);
    child
}

#[test]
fn killed_processes_harm_nobody_else() {
    if std::env::var(CHILD).is_ok() {
        victim();
    }
    let mut random = Random(seed());
    // What survives: a context with a steady connection and one to a victim, which the next victim replaces.
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) = pair(&left.context, &right.context, &ring(4096));
    left.endpoints.push(here);
    right.endpoints.push(there);
    let mut slowest = Duration::ZERO;
    for kill in 0..KILLS {
        let mut child = start_victim(&mut left);
        let begin = Instant::now();
        let delay = Duration::from_micros(random.below(20_000));
        // Some are killed before they have said anything, some in full flow.
        let wanted = if kill % 4 == 0 { 0 } else { 50 };
        let mut done = 0;
        while begin.elapsed() < delay || done < wanted {
            left.call(16);
            let before = left.answered;
            left.turn();
            right.turn();
            done += left.answered - before;
            assert!(begin.elapsed() < PATIENCE, "kill {kill}: the victim never answered");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let begin = Instant::now();
        while left.endpoints[1].failure().is_none() {
            left.call(16);
            left.turn();
            right.turn();
            assert!(begin.elapsed() < PATIENCE, "kill {kill}: nobody noticed");
        }
        slowest = slowest.max(begin.elapsed());
        settle(&mut left, &mut right, "after a kill");
        assert!(left.failed.iter().all(|((index, _), _)| *index == 1), "{:?}", left.failed);
        left.failed.clear();
        drop(left.endpoints.pop());
        exercise(&mut left, &mut right, 100, "the steady connection");
    }
    println!(
        "{KILLS} kills; slowest from SIGKILL to the end of all calls: {slowest:?}; {:?}",
        left.context.counters()
    );
    assert_eq!(left.context.counters().failures, u64::from(KILLS));
}
