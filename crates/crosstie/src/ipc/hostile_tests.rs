//! Lanes with invalid contents: a client that overwrites its lane harms only itself, and a server that overwrites a lane
//! causes no more than an error at its client.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::*;
use crate::local::connection::{Connection, HandshakeError};
use crate::local::socket::Name;
use crate::local_rpc::hello::{self, Hello};
use crate::rng::{Random, seed};

/// A test that waits longer than this has failed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A word that is invalid in an interesting way: often it looks like a request or a response, but has a wrong length, next
/// slot or owner.
fn invalid_word(random: &mut Random) -> u64 {
    let call = random.next() % 12;
    match random.next() % 8 {
        0 => 0,
        1 => u64::MAX,
        2 => random.next(),
        3 => call << 33 | 1 << 32 | (random.next() % 300),
        4 => call << 33 | (random.next() & 0xFFFF_FFFF),
        5 => call << 33 | (random.next() % 40) << 21 | 0x1F_FFFF,
        _ => call << 33 | (random.next() % 12) << 21 | (random.next() % 130),
    }
}

/// Overwrites some words of a segment, or all of them, with invalid values.
fn overwrite_words(segment: &crate::memory::segment::Segment, random: &mut Random) {
    let words = segment.len() / 8;
    let all = random.next().is_multiple_of(8);
    let count = if all { words } else { random.next() % 20 };
    for i in 0..count {
        let at = if all { i } else { random.next() % words };
        let word = segment.bytes(at * 8, 8).unwrap();
        // SAFETY: an aligned word inside the segment, which all sides access atomically.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }.store(invalid_word(random), Relaxed);
    }
}

fn expected_response(request: &[u8]) -> Vec<u8> {
    request.iter().rev().map(|byte| byte ^ 0x5A).collect()
}

const CONFIG: Config = Config {
    max_clients: 3,
    queue_depth: 8,
    request_limit: 100,
    response_limit: 100,
    wait_strategy: crate::WaitStrategy::Park,
};

/// A server, a client that follows the protocol, and the replies that the server has deferred.
struct Fixture {
    name: String,
    server: Server<[u8], [u8]>,
    client: Client<[u8], [u8], Vec<u8>>,
    key: u32,
    deferred: Vec<(Ticket, Vec<u8>)>,
    responses: u64,
}

impl Fixture {
    fn new(name: &str) -> Fixture {
        let name = format!("{name}-{}", std::process::id());
        let mut server = Server::<[u8], [u8]>::create(&name, &CONFIG).unwrap();
        let mut client = Client::<[u8], [u8], _>::connect(&name).unwrap();
        client.call(b"who", b"who".to_vec()).unwrap();
        server.poll();
        let request = server.recv().unwrap();
        let key = request.client();
        request.reply(&expected_response(b"who")).unwrap();
        Fixture { name, server, client, key, deferred: Vec::new(), responses: 0 }
    }

    /// The correct client makes a call, the server serves all clients, and every response must be the right one.
    fn run_round(&mut self, random: &mut Random) {
        let len = random.next() as usize % 101;
        let request: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        match self.client.call(&request, request.clone()) {
            Ok(()) | Err(CallError { cause: NotCalled::Full, .. }) => {}
            Err(error) => panic!("{error}"),
        }
        match random.next() % 4 {
            0 => self.server.poll_with_skip(),
            1 => self.server.poll_with_prefetch(|_| None::<&u8>),
            _ => self.server.poll(),
        };
        let mut received = 0;
        while let Some(request) = self.server.recv() {
            received += 1;
            assert!(received <= 3 * 8, "one poll hands out at most every client's queue");
            assert!(request.message().len() <= 100);
            let response = expected_response(request.message());
            let from_correct_client = request.client() == self.key;
            match random.next() % 3 {
                0 => self.deferred.push((request.defer(), response)),
                1 if !from_correct_client => drop(request.defer()),
                _ => request.reply(&response).unwrap(),
            }
        }
        for (ticket, response) in self.deferred.drain(..).rev() {
            let from_correct_client = ticket.client() == self.key;
            let replied = self.server.reply(ticket, &response);
            let gone = !from_correct_client
                && matches!(replied, Err(ReplyError { cause: NotReplied::ClientGone, .. }));
            assert!(replied.is_ok() || gone, "{replied:?}");
        }
        let responses = &mut self.responses;
        let polled = self.client.poll(|request, response| {
            assert_eq!(response, expected_response(&request));
            *responses += 1;
        });
        polled.unwrap();
    }

    /// Checks that all calls of the correct client get their responses, and that new clients can connect.
    fn finish(mut self, random: &mut Random) -> Counters {
        let start = Instant::now();
        let mut calls = 0;
        while calls < 100 || self.server.clients() > 1 {
            assert!(start.elapsed() < TIMEOUT, "{:?}", self.server);
            self.run_round(random);
            calls += 1;
        }
        while self.client.in_flight() > 0 {
            assert!(start.elapsed() < TIMEOUT, "no response: {:?}", self.client);
            self.server.serve(|request| {
                let response = expected_response(request.message());
                request.reply(&response).unwrap();
            });
            self.client.poll(|request, response| assert_eq!(response, expected_response(&request))).unwrap();
        }
        let fresh: Vec<_> = (0..2).map(|_| Client::<[u8], [u8]>::connect(&self.name).unwrap()).collect();
        drop(fresh);
        self.server.counters()
    }
}

#[test]
fn client_that_overwrites_its_lane_harms_only_itself() {
    let mut random = Random(seed());
    let mut fixture = Fixture::new("ipc-overwrite");
    for _ in 0..400 {
        let mut hostile = Client::<[u8], [u8], ()>::connect(&fixture.name).unwrap();
        for _ in 0..random.next() % 60 {
            if random.next().is_multiple_of(2) {
                // It may be full, or disconnected by now; both are fine.
                hostile.call(&vec![7; random.next() as usize % 101], ()).ok();
            }
            for segment in hostile.transport.segments() {
                overwrite_words(segment, &mut random);
            }
            fixture.run_round(&mut random);
            // The hostile client itself may get any result, but must not panic or loop for ever.
            hostile.poll(|(), response| assert!(response.len() <= 100)).ok();
            hostile.wait(Some(Duration::ZERO)).ok();
        }
    }
    let responses = fixture.responses;
    let counters = fixture.finish(&mut random);
    println!("{counters:?}, {responses} responses to the correct client");
    assert!(counters.violations > 20 && responses > 1000, "{counters:?}");
}

/// As above, with a client that overwrites its lane while the server reads it.
#[test]
fn client_that_overwrites_its_lane_concurrently_harms_only_itself() {
    let seed = seed();
    let mut fixture = Fixture::new("ipc-concurrent-overwrite");
    let (name, start) = (fixture.name.clone(), Instant::now());
    let finished = std::sync::atomic::AtomicBool::new(false);
    let mut random = Random(seed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (name, mut random) = (name, Random(!seed));
            while !finished.load(std::sync::atomic::Ordering::Relaxed) {
                let mut hostile = match Client::<[u8], [u8], ()>::connect(&name) {
                    Ok(hostile) => hostile,
                    // The server has not removed the previous client yet.
                    Err(ConnectError::Full { .. }) => continue,
                    Err(error) => panic!("{error}"),
                };
                for _ in 0..2000 {
                    hostile.call(b"x", ()).ok();
                    for segment in hostile.transport.segments() {
                        overwrite_words(segment, &mut random);
                    }
                    hostile.poll(|(), _| ()).ok();
                }
            }
        });
        // Run for a while and, on a busy machine, until both clients have made progress.
        let enough = |fixture: &Fixture| {
            start.elapsed() > Duration::from_millis(500)
                && fixture.responses > 100
                && fixture.server.counters().violations > 0
        };
        while !enough(&fixture) && start.elapsed() < TIMEOUT {
            fixture.run_round(&mut random);
        }
        finished.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let responses = fixture.responses;
    let counters = fixture.finish(&mut random);
    println!("{counters:?}, {responses} responses to the correct client");
    assert!(counters.violations > 0 && responses > 100, "{counters:?}");
}

/// Values of a word that holds `old`: another call number, owner, next slot or length, and extreme ones.
fn aimed_values(old: u64) -> Vec<u64> {
    let call = |value: u64| value << 33;
    let mut values: Vec<u64> = vec![
        old.wrapping_add(call(1)),
        old.wrapping_sub(call(1)),
        old ^ 1 << 32,
        old ^ 1 << 32 ^ call(1),
        old + 1,
        old.wrapping_sub(1),
        old & !0x1F_FFFF | 101,
        old & !0x1F_FFFF | 0x1F_FFFF,
        old & !(0x7FF << 21) | 9 << 21,
        old & !(0x7FF << 21) | 0x7FF << 21,
        0,
        u64::MAX,
        1 << 63,
        call(1),
        call(1) | 1 << 32 | 100,
    ];
    values.retain(|value| *value != old);
    values
}

/// The offsets of all words of a lane that are not payload: the header, the parker, and the words of the slots. New fields in front
/// of the slots are among them.
fn lane_words(client: &Client<[u8], [u8], ()>) -> Vec<(usize, u64)> {
    let [lane, page] = client.transport.segments();
    let stride = (lane.len() - 128) / 9;
    assert_eq!((lane.len() - 128) % 9, 0, "nine slots for eight calls");
    let in_front = (0..128).step_by(8);
    let slots = (0..9).map(|slot| 128 + slot * stride);
    let of_lane = in_front.chain(slots).map(|at| (0, at));
    of_lane.chain((0..page.len()).step_by(8).map(|at| (1, at))).collect()
}

/// Each word of a lane and of the server's page, forged with aimed values, while calls are in flight.
#[test]
fn every_forged_word_of_a_lane_harms_only_its_client() {
    let mut random = Random(seed());
    let mut fixture = Fixture::new("ipc-forged-words");
    let (mut at, mut value, mut forgeries) = (0, 0, 0);
    loop {
        let start = Instant::now();
        let mut hostile = loop {
            match Client::<[u8], [u8], ()>::connect(&fixture.name) {
                Ok(hostile) => break hostile,
                // The server has not removed the previous client yet.
                Err(ConnectError::Full { .. }) => fixture.run_round(&mut random),
                Err(error) => panic!("{error}"),
            }
            assert!(start.elapsed() < TIMEOUT);
        };
        for _ in 0..3 {
            hostile.call(b"in flight", ()).unwrap();
        }
        let words = lane_words(&hostile);
        let Some((segment, offset)) = words.get(at) else { break };
        let word = hostile.transport.segments()[*segment].bytes(*offset, 8).unwrap();
        // SAFETY: an aligned word inside the segment, which all sides access atomically.
        let word = unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) };
        let old = word.load(Relaxed);
        let Some(forged) = aimed_values(old).get(value).copied() else {
            (at, value) = (at + 1, 0);
            continue;
        };
        value += 1;
        forgeries += 1;
        word.store(forged, Relaxed);
        for _ in 0..3 {
            fixture.run_round(&mut random);
            hostile.poll(|(), response| assert!(response.len() <= 100)).ok();
        }
        if *segment == 1 {
            // The page belongs to all clients.
            word.store(old, Relaxed);
        }
    }
    let responses = fixture.responses;
    let counters = fixture.finish(&mut random);
    println!("{forgeries} forgeries, {counters:?}, {responses} responses to the correct client");
    assert!(forgeries > 400 && counters.violations > 5 && responses > 400, "{counters:?}");
}

/// Requests that break one rule each. The words of the lane are written without the client's own checks.
#[test]
fn requests_that_break_a_rule_end_the_connection() {
    use crosstie_protocol::lane::{CallNumber, RequestHeader, request_word};
    let depth = CONFIG.queue_depth;
    let cases = [
        ("one more than the queue depth", depth, RequestHeader { len: 1, next: 0 }),
        ("longer than the limit", 0, RequestHeader { len: 101, next: 1 }),
        ("followed by a slot that does not exist", 0, RequestHeader { len: 1, next: depth + 1 }),
    ];
    let mut random = Random(seed());
    for (rule, valid_before, invalid) in cases {
        let mut fixture = Fixture::new("ipc-broken-rule");
        let mut hostile = Client::<[u8], [u8], ()>::connect(&fixture.name).unwrap();
        let lane = hostile.transport.segments()[0];
        let stride = (lane.len() - 128) / (depth as u64 + 1);
        let mut call = CallNumber::FIRST;
        for slot in 0..=valid_before {
            let header =
                if slot == valid_before { invalid } else { RequestHeader { len: 1, next: slot + 1 } };
            let word = lane.bytes(128 + slot as u64 * stride, 8).unwrap();
            // SAFETY: an aligned word inside the segment, which all sides access atomically.
            let word = unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) };
            word.store(request_word(call, header), std::sync::atomic::Ordering::Release);
            call = call.next();
        }
        let (start, mut received) = (Instant::now(), 0);
        while fixture.server.counters().violations == 0 {
            assert!(start.elapsed() < TIMEOUT, "{rule}: {:?}", fixture.server);
            fixture.server.serve(|request| {
                received += 1;
                drop(request.defer());
            });
        }
        assert_eq!(received, valid_before, "{rule}");
        while hostile.wait(Some(Duration::ZERO)).is_ok() && hostile.call(b"more", ()).is_ok() {
            assert!(start.elapsed() < TIMEOUT, "{rule}: the client is still connected");
        }
        drop(hostile);
        assert_eq!(fixture.finish(&mut random).violations, 1, "{rule}");
    }
}

/// A client does not trust its server either: it gets wrong responses at worst, or an error.
#[test]
fn server_that_overwrites_a_lane_causes_an_error_at_worst() {
    let mut random = Random(seed());
    let name = format!("ipc-hostile-server-{}", std::process::id());
    let mut server = Server::<[u8], [u64; 3]>::create(&name, &CONFIG).unwrap();
    let (mut errors, mut good) = (0, 0);
    for _ in 0..400 {
        let mut client = Client::<[u8], [u64; 3], u64>::connect(&name).unwrap();
        for i in 0..random.next() % 60 {
            let called = client.call(&vec![1; random.next() as usize % 101], i);
            let fine = match &called {
                Ok(()) | Err(CallError { cause: NotCalled::Full, .. }) => true,
                Err(CallError { cause: NotCalled::Disconnected(_), token }) => *token == i,
                Err(_) => false,
            };
            assert!(fine, "{called:?}");
            overwrite_words(client.transport.segments()[0], &mut random);
            match client.poll(|_, _| good += 1) {
                Ok(_) => {}
                Err(Disconnected::InvalidResponse | Disconnected::ServerGone) => errors += 1,
            }
            client.wait(Some(Duration::ZERO)).ok();
            assert!(client.in_flight() <= client.queue_depth());
            server.serve(|request| {
                request.reply(&[1; 3]).unwrap();
            });
        }
        let (in_flight, mut back) = (client.in_flight(), 0);
        client.disconnect(|_| back += 1);
        assert_eq!(back, in_flight, "every token is handed back");
    }
    println!("{good} responses, {errors} errors");
    assert!(errors > 20 && good > 20);
}

#[test]
fn invalid_hello_is_refused() {
    let mut random = Random(seed());
    let fixture = Fixture::new("ipc-hello");
    let name = Name::new(&fixture.name).unwrap();
    let good = Hello::new::<[u8], [u8]>(lane::MAGIC, lane::VERSION);
    assert!(Connection::connect(KIND, &name, good.as_bytes(), TIMEOUT).is_ok());
    for round in 0..500 {
        let mut hello = good.as_bytes().to_vec();
        match round % 3 {
            0 => {
                let at = random.next() as usize % hello.len();
                hello[at] ^= 1 << (random.next() % 8);
            }
            1 => hello.truncate(random.next() as usize % hello.len()),
            _ => {
                let len = random.next() as usize % 4097;
                hello = (0..len).map(|_| random.next() as u8).collect();
            }
        }
        let connected = Connection::connect(KIND, &name, &hello, TIMEOUT);
        assert!(matches!(connected, Err(HandshakeError::Refused(_))), "{hello:x?}");
    }
    let counters = fixture.finish(&mut random);
    assert_eq!(counters.violations, 0);
}

#[test]
fn client_of_another_version_gets_an_error_that_says_so_and_others_go_on() {
    let mut random = Random(seed());
    let mut fixture = Fixture::new("ipc-version");
    for version in [lane::VERSION - 1, lane::VERSION + 1, u32::MAX] {
        let hello = Hello::new::<[u8], [u8]>(lane::MAGIC, version);
        let refused = hello::connect(KIND, &fixture.name, &hello, TIMEOUT).map(|_| ());
        assert!(matches!(refused, Err(ConnectError::OtherVersion { .. })), "{refused:?}");
        fixture.run_round(&mut random);
    }
    let counters = fixture.finish(&mut random);
    assert_eq!(counters.violations, 0);
}
