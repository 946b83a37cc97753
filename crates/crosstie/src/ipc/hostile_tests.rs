//! Lanes full of nonsense: a client that scribbles hurts itself only, and a server that does gets no further than an error.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::*;
use crate::local::connection::{Connection, HandshakeError};
use crate::local::socket::Name;
use crate::local_rpc::hello::Hello;
use crate::rng::{Random, seed};

/// After this long something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// A word that is wrong in an interesting way: often one that might be a request or an answer, but for its length, the
/// slot that it names, or its turn.
fn nonsense(random: &mut Random) -> u64 {
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

/// Writes nonsense into some words of a segment, or all.
fn scribble(segment: &crate::memory::segment::Segment, random: &mut Random) {
    let words = segment.len() / 8;
    let all = random.next().is_multiple_of(8);
    let count = if all { words } else { random.next() % 20 };
    for i in 0..count {
        let at = if all { i } else { random.next() % words };
        let word = segment.bytes(at * 8, 8).unwrap();
        // SAFETY: an aligned word inside the segment, which everybody reaches by atomics.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }.store(nonsense(random), Relaxed);
    }
}

fn answer(request: &[u8]) -> Vec<u8> {
    request.iter().rev().map(|byte| byte ^ 0x5A).collect()
}

const CONFIG: Config = Config {
    max_clients: 3,
    queue_depth: 8,
    request_limit: 100,
    response_limit: 100,
    wait_strategy: crate::WaitStrategy::Park,
};

/// A server, a client of it that keeps to the rules, and what the server owes.
struct Honest {
    name: String,
    server: Server<[u8], [u8]>,
    client: Client<[u8], [u8], Vec<u8>>,
    key: u32,
    later: Vec<(Ticket, Vec<u8>)>,
    answered: u64,
}

impl Honest {
    fn new(name: &str) -> Honest {
        let name = format!("{name}-{}", std::process::id());
        let mut server = Server::<[u8], [u8]>::create(&name, &CONFIG).unwrap();
        let mut client = Client::<[u8], [u8], _>::connect(&name).unwrap();
        client.call(b"who", b"who".to_vec()).unwrap();
        server.poll();
        let request = server.recv().unwrap();
        let key = request.client();
        request.reply(&answer(b"who")).unwrap();
        Honest { name, server, client, key, later: Vec::new(), answered: 0 }
    }

    /// The honest client calls, the server serves, and every answer is the right one.
    fn turn(&mut self, random: &mut Random) {
        let len = random.next() as usize % 101;
        let request: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        match self.client.call(&request, request.clone()) {
            Ok(()) | Err(CallError::Full(_)) => {}
            Err(error) => panic!("{error}"),
        }
        match random.next() % 4 {
            0 => self.server.poll_with_skip(),
            1 => self.server.poll_ahead(|_| None::<&u8>),
            _ => self.server.poll(),
        };
        let mut received = 0;
        while let Some(request) = self.server.recv() {
            received += 1;
            assert!(received <= 3 * 8, "one look hands out every client's queue at most");
            assert!(request.message().len() <= 100);
            let response = answer(request.message());
            let honest = request.client() == self.key;
            match random.next() % 3 {
                0 => self.later.push((request.defer(), response)),
                1 if !honest => drop(request.defer()),
                _ => request.reply(&response).unwrap(),
            }
        }
        for (ticket, response) in self.later.drain(..).rev() {
            let honest = ticket.client() == self.key;
            let replied = self.server.reply(ticket, &response);
            let gone = !honest && matches!(replied, Err(ReplyError::ClientGone));
            assert!(replied.is_ok() || gone, "{replied:?}");
        }
        let answered = &mut self.answered;
        let polled = self.client.poll(|request, response| {
            assert_eq!(response, answer(&request));
            *answered += 1;
        });
        polled.unwrap();
    }

    /// All of the honest client's calls were answered, and there is room for others.
    fn finish(mut self, random: &mut Random) -> Counters {
        let begun = Instant::now();
        let mut calls = 0;
        while calls < 100 || self.server.clients() > 1 {
            assert!(begun.elapsed() < PATIENCE, "{:?}", self.server);
            self.turn(random);
            calls += 1;
        }
        while self.client.in_flight() > 0 {
            assert!(begun.elapsed() < PATIENCE, "{:?} is not answered", self.client);
            self.server.poll();
            while let Some(request) = self.server.recv() {
                let response = answer(request.message());
                request.reply(&response).unwrap();
            }
            self.client.poll(|request, response| assert_eq!(response, answer(&request))).unwrap();
        }
        let fresh: Vec<_> = (0..2).map(|_| Client::<[u8], [u8]>::connect(&self.name).unwrap()).collect();
        drop(fresh);
        self.server.counters()
    }
}

#[test]
fn a_client_that_scribbles_hurts_itself_only() {
    let mut random = Random(seed());
    let mut honest = Honest::new("ipc-scribbler");
    for _ in 0..400 {
        let mut hostile = Client::<[u8], [u8], ()>::connect(&honest.name).unwrap();
        for _ in 0..random.next() % 60 {
            if random.next().is_multiple_of(2) {
                // Full, or cut off by now: all the same to it.
                hostile.call(&vec![7; random.next() as usize % 101], ()).ok();
            }
            for segment in hostile.transport.segments() {
                scribble(segment, &mut random);
            }
            honest.turn(&mut random);
            // Its own view may be anything but a panic or an endless loop.
            hostile.poll(|(), response| assert!(response.len() <= 100)).ok();
            hostile.wait(Some(Duration::ZERO)).ok();
        }
    }
    let answered = honest.answered;
    let counters = honest.finish(&mut random);
    println!("{counters:?}, {answered} honest answers");
    assert!(counters.violations > 20 && answered > 1000, "{counters:?}");
}

/// As above, with the scribbler at work while the server reads.
#[test]
fn a_client_that_scribbles_all_the_time_hurts_itself_only() {
    let seed = seed();
    let mut honest = Honest::new("ipc-racing-scribbler");
    let (name, begun) = (honest.name.clone(), Instant::now());
    let over = std::sync::atomic::AtomicBool::new(false);
    let mut random = Random(seed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (name, mut random) = (name, Random(!seed));
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let mut hostile = match Client::<[u8], [u8], ()>::connect(&name) {
                    Ok(hostile) => hostile,
                    // The one before is not forgotten yet.
                    Err(ConnectError::Full { .. }) => continue,
                    Err(error) => panic!("{error}"),
                };
                for _ in 0..2000 {
                    hostile.call(b"x", ()).ok();
                    for segment in hostile.transport.segments() {
                        scribble(segment, &mut random);
                    }
                    hostile.poll(|(), _| ()).ok();
                }
            }
        });
        // For a while, and, on a busy machine, until both have had their say.
        let enough = |honest: &Honest| {
            begun.elapsed() > Duration::from_millis(500)
                && honest.answered > 100
                && honest.server.counters().violations > 0
        };
        while !enough(&honest) && begun.elapsed() < PATIENCE {
            honest.turn(&mut random);
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let answered = honest.answered;
    let counters = honest.finish(&mut random);
    println!("{counters:?}, {answered} honest answers");
    assert!(counters.violations > 0 && answered > 100, "{counters:?}");
}

/// What the server writes is believed no more: a client gets wrong answers at worst, or an error.
#[test]
fn a_server_that_scribbles_gets_no_further_than_an_error() {
    let mut random = Random(seed());
    let name = format!("ipc-hostile-server-{}", std::process::id());
    let mut server = Server::<[u8], [u64; 3]>::create(&name, &CONFIG).unwrap();
    let (mut nonsense, mut good) = (0, 0);
    for _ in 0..400 {
        let mut client = Client::<[u8], [u64; 3], u64>::connect(&name).unwrap();
        for i in 0..random.next() % 60 {
            let called = client.call(&vec![1; random.next() as usize % 101], i);
            let fine = match &called {
                Ok(()) | Err(CallError::Full(_)) => true,
                Err(CallError::Disconnected { token, .. }) => *token == i,
                Err(_) => false,
            };
            assert!(fine, "{called:?}");
            scribble(client.transport.segments()[0], &mut random);
            match client.poll(|_, _| good += 1) {
                Ok(_) => {}
                Err(Disconnected::InvalidResponse | Disconnected::ServerGone) => nonsense += 1,
            }
            client.wait(Some(Duration::ZERO)).ok();
            assert!(client.in_flight() <= client.queue_depth());
            server.poll();
            while let Some(request) = server.recv() {
                request.reply(&[1; 3]).unwrap();
            }
        }
        let (in_flight, mut back) = (client.in_flight(), 0);
        client.disconnect(|_| back += 1);
        assert_eq!(back, in_flight, "every token comes back");
    }
    println!("{good} answers, {nonsense} errors");
    assert!(nonsense > 20 && good > 20);
}

#[test]
fn a_hello_that_is_none_is_refused() {
    let mut random = Random(seed());
    let honest = Honest::new("ipc-hello");
    let name = Name::new(&honest.name).unwrap();
    let good = Hello::new::<[u8], [u8]>(lane::MAGIC, lane::VERSION);
    assert!(Connection::connect(KIND, &name, good.as_bytes(), PATIENCE).is_ok());
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
        let joined = Connection::connect(KIND, &name, &hello, PATIENCE);
        assert!(matches!(joined, Err(HandshakeError::Refused(_))), "{hello:x?}");
    }
    let counters = honest.finish(&mut random);
    assert_eq!(counters.violations, 0);
}
