//! What goes wrong with bulk payloads and with READ and WRITE: faults of the device, hostile peers, killed processes, a device
//! without memory. It ends one connection, and no other; everything that was lent comes back.
//!
//! Sides take turns in one thread. The seed is printed; `CROSSTIE_SEED` sets it.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crosstie::copyrpc::{
    CallFailed, Config, Context, Endpoint, EndpointAddress, EndpointConfig, Failure, NotCalled, NotPosted,
    RecvHandle,
};
use crosstie::device::fault::Plan;
use crosstie::device::{
    Access, ConnectConfig, CqConfig, Data, Device, DeviceSpec, Mr, PostError, QpAddress, QpConfig, RcQp,
    RecvWr, RemoteAddr, RemoteMemory, SendOp, SendWr, Status, software,
};
use crosstie_protocol::copyrpc::wire::{
    BULK_FLAG, ConnectInfo, FlowMetadata, Header, RESPONSE_FLAG, encode_imm,
};
use crosstie_protocol::copyrpc::{BulkMemory, BulkRequest, MAX_BULK, Refusal, Violation};
use zerocopy::{FromBytes, IntoBytes};

const PATIENCE: Duration = Duration::from_secs(20);
/// Two pieces.
const LONG: usize = 300_000;

/// Index of the endpoint, number of the call.
type User = (u32, u64);

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let given = std::env::var("CROSSTIE_SEED").ok().and_then(|s| s.parse().ok());
    let seed = given.unwrap_or(now.map_or(1, |d| d.as_nanos() as u64));
    println!("seed {seed} (set CROSSTIE_SEED to repeat)");
    seed
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn config(bulk: usize) -> EndpointConfig {
    EndpointConfig { ring: 4096, credit: 1024, pending_calls: 16, bulk }
}

fn pair(left: &Context<User>, right: &Context<User>) -> (Endpoint<User>, Endpoint<User>) {
    let config = config(1 << 20);
    let (here, there) = (left.create_endpoint(&config).unwrap(), right.create_endpoint(&config).unwrap());
    // A peer that is gone is given up after milliseconds.
    let hasty = ConnectConfig { timeout: 8, retry_count: 1, ..ConnectConfig::default() };
    here.connect(&there.address(), &hasty).unwrap();
    there.connect(&here.address(), &hasty).unwrap();
    (here, there)
}

/// What a call with this number asks, and how long its answer is: every second request is long, and every third answer.
fn request(number: u64) -> (Vec<u8>, usize) {
    let mut bytes = vec![number as u8; if number.is_multiple_of(2) { LONG } else { 40 }];
    let response = if number.is_multiple_of(3) { LONG } else { 24 };
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].copy_from_slice(&(response as u64).to_le_bytes());
    (bytes, response)
}

fn response(request: &[u8]) -> Vec<u8> {
    let word = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().unwrap());
    assert!(request == self::request(word(0)).0, "request {}: other bytes", word(0));
    vec![!(word(0) as u8); word(8) as usize]
}

/// One side: a context, and what it asked.
struct Side {
    context: Context<User>,
    endpoints: Vec<Endpoint<User>>,
    next: u64,
    open: BTreeSet<User>,
    failed: Vec<(User, CallFailed)>,
    answered: u64,
    unsent: Vec<(RecvHandle<User>, Vec<u8>)>,
    /// READs under way; regions for more; what they read.
    reading: BTreeSet<u64>,
    regions: Vec<Mr>,
    read: u64,
    unread: u64,
}

impl Side {
    fn new(device: Device, config: &Config) -> Side {
        Side {
            context: Context::new(device, config).unwrap(),
            endpoints: vec![],
            next: 0,
            open: BTreeSet::new(),
            failed: vec![],
            answered: 0,
            unsent: vec![],
            reading: BTreeSet::new(),
            regions: vec![],
            read: 0,
            unread: 0,
        }
    }

    fn software() -> Side {
        Side::new(Device::open(&DeviceSpec::Software).unwrap(), &Config::default())
    }

    fn call(&mut self, depth: usize) {
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            while endpoint.pending() < depth {
                let user = (index as u32, self.next);
                let (bytes, response) = request(self.next);
                match endpoint.call(&bytes, response, user) {
                    Ok(()) => assert!(self.open.insert(user)),
                    Err(error) => {
                        assert_eq!(error.user, user);
                        let over = matches!(error.cause, NotCalled::Failed(_));
                        assert!(error.cause.is_back_pressure() || over, "{}", error.cause);
                        break;
                    }
                }
                self.next += 1;
            }
        }
    }

    /// READs from there with all the regions that there are.
    fn read(&mut self, index: usize, from: RemoteMemory) {
        while let Some(region) = self.regions.pop() {
            let token = self.next;
            self.next += 1;
            match self.endpoints[index].read(region, 0..4096, from.at(0), token) {
                Ok(()) => assert!(self.reading.insert(token)),
                Err(error) => {
                    assert_eq!(error.token, token);
                    self.regions.push(error.region);
                    assert!(
                        !matches!(error.cause, NotPosted::NotConnected | NotPosted::Range(_)),
                        "{}",
                        error.cause
                    );
                    self.unread += 1;
                    break;
                }
            }
        }
    }

    fn turn(&mut self) {
        let Side { context, open, failed, answered, unsent, .. } = self;
        context.poll(|user, answer| {
            assert!(open.remove(&user), "{user:?} ends once");
            match answer {
                Ok(bytes) => {
                    assert!(bytes.to_vec() == response(&request(user.1).0), "{user:?}: another answer");
                    *answered += 1;
                }
                Err(cause) => failed.push((user, cause)),
            }
        });
        for (request, bytes) in std::mem::take(unsent) {
            reply(request, bytes, unsent);
        }
        while let Some(request) = context.recv() {
            let bytes = response(&request.data().to_vec());
            reply(request, bytes, unsent);
        }
        while let Some(finished) = context.take_finished() {
            assert!(self.reading.remove(&finished.token), "{finished:?} ends once");
            match finished.result {
                Ok(()) => {
                    let mut bytes = [0; 4096];
                    finished.region.read(0, &mut bytes).unwrap();
                    assert_eq!(bytes, [0x77; 4096]);
                    finished.region.write(0, &[0; 4096]).unwrap();
                    self.read += 1;
                }
                Err(_) => self.unread += 1,
            }
            self.regions.push(finished.region);
        }
    }
}

fn reply(request: RecvHandle<User>, bytes: Vec<u8>, unsent: &mut Vec<(RecvHandle<User>, Vec<u8>)>) {
    match request.reply(&bytes) {
        Ok(()) => {}
        Err((cause, Some(request))) if cause.is_back_pressure() => unsent.push((request, bytes)),
        // A connection that is over does not matter to anybody.
        Err((cause, _)) => assert!(matches!(cause, crosstie::copyrpc::NotReplied::Failed(_)), "{cause}"),
    }
}

fn settle(left: &mut Side, right: &mut Side, what: &str) {
    let begin = Instant::now();
    while !left.open.is_empty() || !right.open.is_empty() || !left.reading.is_empty() {
        left.turn();
        right.turn();
        assert!(
            begin.elapsed() < PATIENCE,
            "{what}: open for ever: {:?} {:?} {:?}\n{:?}\n{:?}",
            left.open,
            right.open,
            left.reading,
            left.context.counters(),
            right.context.counters()
        );
    }
}

/// Calls both ways, more than any pool holds: nothing has leaked.
fn exercise(left: &mut Side, right: &mut Side, calls: u64, what: &str) {
    let goal = (left.answered + calls, right.answered + calls);
    let begin = Instant::now();
    while left.answered < goal.0 || right.answered < goal.1 {
        left.call(6);
        right.call(6);
        left.turn();
        right.turn();
        assert!(begin.elapsed() < PATIENCE, "{what}: no progress: {:?}", left.context.counters());
    }
    settle(left, right, what);
}

/// Two sides with two connections, the left one on a device with faults; then whatever is over is replaced. Says how many posts
/// and completions there were.
fn with_faults(plan: Plan, what: &str) -> (u64, u64) {
    let device = Device::open(&DeviceSpec::Software).unwrap().with_faults(plan);
    let control = device.faults().unwrap();
    let mut left = Side::new(device, &Config { receives: 16, ..Config::default() });
    let mut right = Side::software();
    for _ in 0..2 {
        let (here, there) = pair(&left.context, &right.context);
        left.endpoints.push(here);
        right.endpoints.push(there);
    }
    let board = right.context.allocate(4096, Access::ALL).unwrap();
    board.write(0, &[0x77; 4096]).unwrap();
    left.regions = (0..4).map(|_| left.context.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
    for round in 0..8 {
        left.call(2);
        right.call(2);
        left.read(round % 2, board.remote());
        left.turn();
        right.turn();
    }
    settle(&mut left, &mut right, what);
    let counts = (control.posts(), control.completions());
    for index in 0..2 {
        if left.endpoints[index].failure().is_some() || right.endpoints[index].failure().is_some() {
            let (here, there) = pair(&left.context, &right.context);
            drop(std::mem::replace(&mut left.endpoints[index], here));
            drop(std::mem::replace(&mut right.endpoints[index], there));
        }
    }
    assert_eq!(left.regions.len(), 4, "{what}: every region is back");
    left.failed.clear();
    right.failed.clear();
    let read = left.read;
    left.read(0, board.remote());
    exercise(&mut left, &mut right, 16, what);
    assert_eq!(left.read, read + 4, "{what}");
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
    assert!(posts > 60 && completions > 40, "faults need something to hit");
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
        plans.push((Plan::none().fail_completion(k, Status::RetryExceeded), format!("completion {k} fails")));
        plans.push((Plan::none().delay_completion(k, 50), format!("completion {k} late")));
        plans.push((Plan::none().overtake_completion(k), format!("completion {k} overtaken")));
    }
    println!("{} runs", plans.len());
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
fn a_device_without_memory() {
    // The left one has little memory, the right one has enough. Neither waits for what never comes.
    let little = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
    let (left, right) = (Context::<User>::new(little, &Config::default()).unwrap(), Side::software().context);
    let config = config(256 << 20);
    let connect = || {
        let (here, there) = (left.create_endpoint(&config).unwrap(), right.create_endpoint(&config).unwrap());
        here.connect(&there.address(), &ConnectConfig::default()).unwrap();
        there.connect(&here.address(), &ConnectConfig::default()).unwrap();
        (here, there)
    };
    let (here, there) = connect();
    let long = vec![1; 200 << 20];
    let refused = here.call(&long, 8, (0, 0)).unwrap_err();
    assert_eq!(refused.cause, NotCalled::NoMemory);
    assert!(!refused.cause.is_back_pressure());
    there.call(&long, 8, (0, 1)).unwrap();
    let begin = Instant::now();
    let mut ended = None;
    while ended.is_none() {
        left.poll(|_, _| ());
        right.poll(|_, answer| ended = Some(answer.map(|_| ())));
        assert!(begin.elapsed() < PATIENCE);
    }
    assert!(matches!(ended, Some(Err(CallFailed::Connection(Failure::Broken(_))))), "{ended:?}");
    assert_eq!(here.failure(), Some(Failure::NoMemory));
}

// -------------------------------------------------------------------------------------------------- a hostile peer

/// Where the parts of an address are: the device's part first, then copyrpc's.
const INFO_AT: usize = size_of::<QpAddress>();

/// A queue pair that pretends to be a copyrpc endpoint, and writes one batch.
struct Hostile {
    qp: RcQp,
    victim: ConnectInfo,
    /// Where the victim writes its calls.
    #[expect(dead_code, reason = "keeps it registered")]
    ring: Mr,
}

impl Hostile {
    fn connect(device: &Device, context: &Context<User>, bulk: usize) -> (Hostile, Endpoint<User>) {
        let endpoint = context.create_endpoint(&config(bulk)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(&CqConfig::default()).unwrap();
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        qp.init(Access::ALL).unwrap();
        (0..8).for_each(|_| qp.post_recv(&RecvWr { wr_id: 0, sges: &[] }).unwrap());
        let ring = pd.allocate(8192, Access::ALL).unwrap();
        let address = endpoint.address();
        let victim = ConnectInfo::decode(address.as_bytes()[INFO_AT..].try_into().unwrap()).unwrap();
        let (at, rkey) = (ring.remote().addr, ring.remote().rkey);
        let info = ConnectInfo {
            ring_addr: at,
            ring_rkey: rkey,
            consumer_addr: at + 4096,
            consumer_rkey: rkey,
            ..victim
        };
        let own = [qp.address().as_bytes(), &info.encode()].concat();
        let own = EndpointAddress::read_from_bytes(&own).unwrap();
        let theirs = QpAddress::read_from_bytes(&address.as_bytes()[..INFO_AT]).unwrap();
        qp.connect(&theirs, &ConnectConfig { access: Access::ALL, ..ConnectConfig::default() }).unwrap();
        endpoint.connect(&own, &ConnectConfig::default()).unwrap();
        (Hostile { qp, victim, ring }, endpoint)
    }

    fn send(&mut self, header: Header, payload: &[u8]) {
        let metadata = FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 1 };
        let mut bytes = [&metadata.encode()[..], &header.encode(), payload].concat();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        let to = RemoteAddr { addr: self.victim.ring_addr, rkey: self.victim.ring_rkey };
        let op = SendOp::WriteImm(to, encode_imm(bytes.len() as u64));
        self.qp.post(&SendWr::new(0, op, Data::Inline(&bytes))).unwrap();
    }
}

#[test]
fn hostile_descriptors_end_their_own_connection() {
    let mut state = seed();
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) = pair(&left.context, &right.context);
    left.endpoints.push(here);
    right.endpoints.push(there);
    let device = Device::open(&DeviceSpec::Software).unwrap();
    // What is sent, and how the victim must end: `None`: by the device. The victim has called twice before, once with a
    // landing of `LONG` bytes.
    let good = BulkMemory { addr: 1 << 40, len: 70_000, rkey: 0x1234 };
    let ask = |request: Option<BulkMemory>, landing| BulkRequest { request, landing }.encode().to_vec();
    let header =
        |call_id, piggyback, len: usize| Header { call_id, piggyback, payload_len: len as u32 | BULK_FLAG };
    let request = |payload: Vec<u8>| (header(1 << 16, 2, payload.len()), payload);
    let answer = |call: u32, payload: &[u8]| {
        // What each has reserved: the second one, room for a short answer.
        let blocks = if call == 1 { 3 } else { 2 };
        (header((1 << 16 | call) | RESPONSE_FLAG, blocks, payload.len()), payload.to_vec())
    };
    let long = |len| BulkMemory { len, ..good };
    let too_long = |len, limit| Some(Violation::BulkTooLong { len, limit });
    let malformed = Some(Violation::BulkMalformed);
    let mut cases = vec![
        ("a request of 4 GiB", request(ask(Some(long(u32::MAX)), None)), too_long(u32::MAX, 1 << 20)),
        (
            "one beyond what was announced",
            request(ask(Some(long(1 << 20 | 1)), None)),
            too_long(1 << 20 | 1, 1 << 20),
        ),
        ("a landing beyond it", request(ask(None, Some(long(MAX_BULK)))), too_long(MAX_BULK, 1 << 20)),
        ("an address that is none", request(ask(Some(good), None)), None),
        ("no key", request(ask(Some(BulkMemory { rkey: 0, ..good }), None)), None),
        ("a landing that is none", request(ask(None, Some(good))), None),
        ("the end of memory", request(ask(Some(BulkMemory { addr: u64::MAX - 5, ..good }), None)), malformed),
        ("nothing", request(vec![0; 32]), malformed),
        ("too short", request(vec![1; 20]), malformed),
        ("empty", request(vec![]), malformed),
        ("more behind it", request([ask(Some(good), None), vec![1; 8]].concat()), malformed),
        ("an answer in bulk that nobody asked for", answer(0, &[1, 0, 0, 0]), Some(Violation::BulkUnasked)),
        (
            "an answer to a call that there is not",
            answer(9, &[1, 0, 0, 0]),
            Some(Violation::UnknownCall { call_id: 1 << 16 | 9 }),
        ),
        (
            "one that is too long",
            answer(1, &(LONG as u32 + 1).to_le_bytes()),
            too_long(LONG as u32 + 1, LONG as u32),
        ),
        ("one of nothing", answer(1, &[0; 4]), malformed),
        ("one without a length", answer(1, &[]), malformed),
        ("one with too much", answer(1, &[1, 0, 0, 0, 0]), malformed),
    ];
    for _ in 0..200 {
        let payload: Vec<u8> = (0..4).flat_map(|_| random(&mut state).to_le_bytes()).collect();
        cases.push(("at random", request(payload), None));
    }
    for (what, (header, payload), expected) in cases {
        let (mut hostile, endpoint) = Hostile::connect(&device, &left.context, 1 << 20);
        let before = left.context.counters();
        endpoint.call(b"without", 20, (7, 0)).unwrap();
        endpoint.call(b"with", LONG, (7, 1)).unwrap();
        left.open.extend([(7, 0), (7, 1)]);
        left.context.flush();
        hostile.send(header, &payload);
        let begin = Instant::now();
        while endpoint.failure().is_none() {
            left.context.poll(|user, answer| {
                assert!(left.open.remove(&user), "{user:?} ends once");
                assert!(answer.is_err(), "{what}: {user:?}");
            });
            while let Some(request) = left.context.recv() {
                // Only what says where a long answer goes; it goes there.
                assert!(request.data().is_empty());
                let len = request.response_limit() as usize;
                assert!(request.reply(&vec![1; len]).is_ok(), "{what}");
            }
            assert!(begin.elapsed() < PATIENCE, "{what}: nothing ends");
        }
        let failure = endpoint.failure().unwrap();
        match expected {
            Some(violation) => assert_eq!(failure, Failure::Violation(violation), "{what}"),
            None if what == "at random" => {}
            None => assert_eq!(failure, Failure::Broken(Status::RemoteAccess), "{what}"),
        }
        assert!(
            !left.open.iter().any(|(index, _)| *index == 7),
            "{what}: calls of a connection that is over"
        );
        assert_eq!(left.context.counters().failures, before.failures + 1);
    }
    // Who announces no bulk memory takes none.
    let (mut hostile, endpoint) = Hostile::connect(&device, &left.context, 0);
    hostile.send(header(1 << 16, 2, 32), &ask(Some(good), None));
    let begin = Instant::now();
    while endpoint.failure().is_none() {
        left.turn();
        assert!(begin.elapsed() < PATIENCE);
    }
    assert_eq!(
        endpoint.failure(),
        Some(Failure::Violation(Violation::BulkTooLong { len: 70_000, limit: 0 }))
    );
    exercise(&mut left, &mut right, 30, "the honest connection");
    assert!(left.endpoints[0].failure().is_none() && left.failed.is_empty());
}

#[test]
fn pools_give_back_what_calls_took() {
    // A refusal by the ring after memory was found gives the memory back; one by memory takes nothing from the ring.
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) = pair(&left.context, &right.context);
    let long = vec![1; LONG];
    for _ in 0..200 {
        let refused = loop {
            match here.call(&[1; 40], 24, (3, 0)) {
                Ok(()) => {}
                Err(error) => break error.cause,
            }
        };
        assert!(refused.is_back_pressure());
        let refused = here.call(&long, 24, (3, 1)).unwrap_err().cause;
        assert!(
            refused.is_back_pressure() && refused != NotCalled::Refused(Refusal::NoBulkMemory),
            "{refused}"
        );
        let begin = Instant::now();
        while here.pending() > 0 {
            left.context.poll(|_, answer| assert!(answer.is_ok()));
            right.context.poll(|_, _| ());
            while right.context.recv().is_some() {}
            assert!(begin.elapsed() < PATIENCE);
        }
    }
    drop((here, there));
    let (here, there) = pair(&left.context, &right.context);
    left.endpoints.push(here);
    right.endpoints.push(there);
    exercise(&mut left, &mut right, 30, "afterwards");
}

// ------------------------------------------------------------------------------------------------ killed processes

const CHILD: &str = "CROSSTIE_COPYRPC_BULK_VICTIM";
const KILLS: u32 = 20;

/// A process that calls and answers until it is killed.
fn victim() -> ! {
    let mut side = Side::software();
    let endpoint = side.context.create_endpoint(&config(1 << 20)).unwrap();
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
        side.call(6);
        side.turn();
    }
}

fn start_victim(side: &mut Side) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["killed_processes_take_nothing_along", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let endpoint = side.context.create_endpoint(&config(1 << 20)).unwrap();
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
fn killed_processes_take_nothing_along() {
    if std::env::var(CHILD).is_ok() {
        victim();
    }
    let mut state = seed();
    let (mut left, mut right) = (Side::software(), Side::software());
    let (here, there) = pair(&left.context, &right.context);
    left.endpoints.push(here);
    right.endpoints.push(there);
    for kill in 0..KILLS {
        let mut child = start_victim(&mut left);
        let begin = Instant::now();
        let delay = Duration::from_micros(random(&mut state) % 30_000);
        let wanted = left.answered + if kill % 4 == 0 { 0 } else { 20 };
        while begin.elapsed() < delay || left.answered < wanted {
            left.call(6);
            left.turn();
            right.turn();
            assert!(begin.elapsed() < PATIENCE, "kill {kill}: the victim never answered");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let begin = Instant::now();
        while left.endpoints[1].failure().is_none() {
            left.call(6);
            left.turn();
            right.turn();
            assert!(begin.elapsed() < PATIENCE, "kill {kill}: nobody noticed");
        }
        settle(&mut left, &mut right, "after a kill");
        assert!(left.failed.iter().all(|((index, _), _)| *index == 1), "{:?}", left.failed);
        left.failed.clear();
        drop(left.endpoints.pop());
        exercise(&mut left, &mut right, 10, "the steady connection");
    }
    assert_eq!(left.context.counters().failures, u64::from(KILLS));
}
