//! The client: words and byte strings in one pipeline, checked against an oracle; nodes that are stopped or killed, or that send
//! invalid responses.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crosstie::ipc;
use crosstie_kv::client::{AttachError, BeginBytesError, BeginError, Client, Error};
use crosstie_kv::node::{Node, NodeConfig};
use crosstie_kv::wire::{self, BytesOp, MAX_KEY, MAX_VALUE, Op, Status, WordRequest, WordResponse};
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use zerocopy::IntoBytes;

use super::cluster::process::{signal, start_child, start_node};
use super::cluster::{BACKENDS, Plan, Random, TIMEOUT, fresh_name, seed, start};
use super::versions::INFO;

/// Long enough to be sure that no response comes.
const SHORT: Duration = Duration::from_millis(100);

/// A node that is a cluster of its own, until standard input ends.
pub(super) fn serve_alone(name: &str) {
    let node = Node::start(&NodeConfig { daemons: 3, ..NodeConfig::single(name) }).unwrap();
    child::write(b"serving");
    child::wait_for_end_of_input();
    node.stop().unwrap();
}

fn start_single_node() -> (String, Child) {
    let name = fresh_name("alone");
    let mut node = start_child(&format!("alone {name}"));
    node.expect("serving");
    (name, node)
}

/// More clients connect at the same time than the node's listen backlog holds.
#[test]
fn many_clients_attach_at_once() {
    let name = fresh_name("crowd");
    let node = Node::start(&NodeConfig { max_clients: 256, ..NodeConfig::single(&name) }).unwrap();
    let begin = std::sync::Barrier::new(256);
    std::thread::scope(|scope| {
        for number in 0..256 {
            let (begin, name) = (&begin, &name);
            scope.spawn(move || {
                begin.wait();
                let mut client = Client::attach(name).unwrap();
                client.put(number, number).unwrap();
                assert_eq!(client.get(number).unwrap(), Some(number));
            });
        }
    });
    node.stop().unwrap();
}

/// Stops a process with SIGSTOP. Returns when none of its threads runs any more.
fn stop(node: &Child) {
    signal(node, Signal::STOP);
    let is_stopped = |thread: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
    };
    let threads = format!("/proc/{}/task", node.id());
    eventually("it does not stop", || std::fs::read_dir(&threads).unwrap().all(is_stopped));
}

fn resume(node: &Child) {
    signal(node, Signal::CONT);
}

/// The response that an operation must get.
#[derive(Debug, PartialEq, Eq)]
enum Expected {
    Word(WordResponse),
    Bytes(Status, Vec<u8>),
}

/// A client, and a model of the keys that it uses.
struct Oracle {
    client: Client<u64>,
    numbers: Random,
    words: HashMap<u64, u64>,
    strings: HashMap<Vec<u8>, Vec<u8>>,
    /// By token.
    pending: HashMap<u64, Expected>,
    next: u64,
}

impl Oracle {
    fn new(node: &str, seed: u64) -> Oracle {
        Oracle {
            client: Client::attach_pipelined(node).unwrap(),
            numbers: Random(seed),
            words: HashMap::new(),
            strings: HashMap::new(),
            pending: HashMap::new(),
            next: 0,
        }
    }

    fn step(&mut self) {
        match self.numbers.below(16) {
            0..=4 => self.begin_word(),
            5..=8 => self.begin_bytes(),
            9..=10 => self.poll(),
            11..=12 => self.poll_bytes(),
            13 => {
                self.client.wait(Some(Duration::from_micros(self.numbers.below(300))));
            }
            14 => self.one_at_a_time(),
            _ => assert_eq!(self.client.in_flight(), self.pending.len()),
        }
    }

    /// Begins an operation on a word; several on one key may be in flight.
    fn begin_word(&mut self) {
        let (key, value) = (self.numbers.below(12), self.numbers.next());
        let now = self.words.get(&key).copied();
        let request = |op| WordRequest { value, ..WordRequest::new(op, 0, key) };
        let status = |status, value| WordResponse::new(status, value);
        let found = |none| now.map_or(status(none, 0), |_| status(Status::Done, 0));
        let (request, expected, after) = match self.numbers.below(4) {
            0 => {
                let expected = now.map_or(status(Status::NotFound, 0), |now| status(Status::Done, now));
                (WordRequest::new(Op::Get, 0, key), expected, now)
            }
            1 => (request(Op::Put), status(Status::Done, 0), Some(value)),
            2 => (WordRequest::new(Op::Delete, 0, key), found(Status::NotFound), None),
            _ => {
                let expected = now.map_or(status(Status::Done, 0), |now| status(Status::Mismatch, now));
                (request(Op::Insert), expected, now.or(Some(value)))
            }
        };
        match self.client.begin(request, self.next) {
            Ok(()) => {
                match after {
                    Some(after) => self.words.insert(key, after),
                    None => self.words.remove(&key),
                };
                self.pending.insert(self.next, Expected::Word(expected));
                self.next += 1;
            }
            Err(BeginError::Full(token)) => assert_eq!(token, self.next),
            Err(error) => panic!("{error}"),
        }
    }

    fn random_value(&mut self) -> Vec<u8> {
        let longest = match self.numbers.below(40) {
            0 => MAX_VALUE as u64 + 1,
            1..10 => 60_000,
            10..20 => 5_000,
            _ => 20,
        };
        let len = self.numbers.below(longest) as usize;
        let first = self.numbers.next() as u8;
        (0..len).map(|i| first.wrapping_add(i as u8)).collect()
    }

    /// The same with byte strings.
    fn begin_bytes(&mut self) {
        let key = vec![b'k'; self.numbers.below(8) as usize + 1];
        let (value, kind) = (self.random_value(), self.numbers.below(5));
        let now = self.strings.get(&key).cloned();
        let wrong = b"never a value of this test".to_vec();
        let guess = if self.numbers.below(3) == 0 { wrong } else { now.clone().unwrap_or_default() };
        let done = Expected::Bytes(Status::Done, Vec::new());
        let absent = || Expected::Bytes(Status::NotFound, Vec::new());
        let mismatch = |now: &Vec<u8>| Expected::Bytes(Status::Mismatch, now.clone());
        let (op, expected, after) = match (kind, &now) {
            (0, None) => (BytesOp::Get { key: &key }, absent(), None),
            (0, Some(value)) => {
                (BytesOp::Get { key: &key }, Expected::Bytes(Status::Done, value.clone()), now.clone())
            }
            (1, _) => (BytesOp::Put { key: &key, value: &value }, done, Some(value.clone())),
            (2, None) => (BytesOp::Delete { key: &key }, absent(), None),
            (2, Some(_)) => (BytesOp::Delete { key: &key }, done, None),
            (3, None) => (BytesOp::Insert { key: &key, value: &value }, done, Some(value.clone())),
            (3, Some(other)) => (BytesOp::Insert { key: &key, value: &value }, mismatch(other), now.clone()),
            (_, now) => {
                let op = BytesOp::CompareAndSwap { key: &key, expected: &guess, value: &value };
                match now {
                    None => (op, absent(), None),
                    Some(now) if *now == guess => (op, done, Some(value.clone())),
                    Some(now) => (op, mismatch(now), Some(now.clone())),
                }
            }
        };
        match self.client.begin_bytes(op, self.next) {
            Ok(()) => {
                match after {
                    Some(after) => self.strings.insert(key, after),
                    None => self.strings.remove(&key),
                };
                self.pending.insert(self.next, expected);
                self.next += 1;
            }
            Err(BeginBytesError::Full(token)) => assert_eq!(token, self.next),
            // Two values of nearly a megabyte and a key are too long together.
            Err(BeginBytesError::Refused { token, cause: Error::TooLong(_) }) => assert_eq!(token, self.next),
            Err(error) => panic!("{error}"),
        }
    }

    /// A call that waits sees the effect of operations that were begun before it, and does not take their responses.
    fn one_at_a_time(&mut self) {
        let key = self.numbers.below(12);
        let string = vec![b'k'; self.numbers.below(8) as usize + 1];
        match self.client.get(key) {
            Err(Error::Full) => {}
            value => assert_eq!(value, Ok(self.words.get(&key).copied())),
        }
        match self.client.get_bytes(&string) {
            Err(Error::Full) => {}
            value => assert!(value.unwrap().as_ref() == self.strings.get(&string), "{} bytes", string.len()),
        }
    }

    fn poll(&mut self) {
        let pending = &mut self.pending;
        let mut seen = 0;
        let count = self.client.poll(|token, response| {
            assert_eq!(pending.remove(&token), Some(Expected::Word(response)));
            seen += 1;
        });
        assert_eq!(count, seen);
    }

    fn poll_bytes(&mut self) {
        let pending = &mut self.pending;
        let mut seen = 0;
        let count = self.client.poll_bytes(|token, response| {
            let Some(Expected::Bytes(status, value)) = pending.remove(&token) else { panic!("{response:?}") };
            assert_eq!((response.status, response.value.len()), (status, value.len()));
            assert!(response.value == value);
            seen += 1;
        });
        assert_eq!(count, seen);
    }

    fn drain(&mut self) {
        let mut last = Instant::now();
        while !self.pending.is_empty() {
            let before = self.pending.len();
            self.client.wait(Some(Duration::from_millis(20)));
            self.poll();
            self.poll_bytes();
            if self.pending.len() < before {
                last = Instant::now();
            }
            assert!(last.elapsed() < TIMEOUT, "{} operations never end", self.pending.len());
        }
        assert_eq!(self.client.in_flight(), 0);
    }
}

/// Words and byte strings in one pipeline, several operations on one key at a time, and calls that wait in between.
#[test]
fn pipelined_operations_match_the_oracle() {
    let seed = seed();
    for backend in BACKENDS {
        // With the usual queues between nodes, or with queues so small that long requests wait for each other; short ones need not.
        for (nodes, depth, is_scarce) in [(1, 32, false), (2, 4, false), (2, 32, false), (2, 32, true)] {
            let cluster = start(nodes, |config| {
                (config.daemons, config.backend, config.queue_depth) = (2, backend, depth);
                if is_scarce {
                    let connection = &mut config.queues.connection;
                    (connection.ring, connection.credit, connection.bulk) = (16 << 10, 4 << 10, 2 << 20);
                }
                config.memory_limit = 1 << 30;
            });
            let mut oracle = Oracle::new(cluster[0].name(), seed ^ u64::from(nodes));
            for _ in 0..4000 {
                oracle.step();
            }
            oracle.drain();
            println!("{backend:?}, {nodes} nodes, depth {depth}: {} operations", oracle.next);
            assert!(oracle.next > 500);
        }
    }
}

/// Back-pressure is an error that returns the token, and changes nothing.
#[test]
fn begin_bytes_beyond_the_queue_depth_returns_the_token() {
    let (name, node) = start_single_node();
    let mut client = Client::<u64>::attach_pipelined(&name).unwrap();
    client.put_bytes(b"key", b"value").unwrap();
    stop(&node);
    let mut begun = 0;
    while client.begin_bytes(BytesOp::Get { key: b"key" }, begun).is_ok() {
        begun += 1;
    }
    assert!(begun >= 8, "{begun} are not many");
    assert!(matches!(client.begin_bytes(BytesOp::Get { key: b"key" }, 99), Err(BeginBytesError::Full(99))));
    assert_eq!(client.get_bytes(b"key"), Err(Error::Full));
    // Byte strings in flight do not prevent operations on words.
    client.begin(WordRequest::new(Op::Get, 0, 1), 100).unwrap();
    let (long_key, long_value) = (vec![0; MAX_KEY + 1], vec![0; MAX_VALUE + 1]);
    for op in [BytesOp::Get { key: &long_key }, BytesOp::Put { key: b"key", value: &long_value }] {
        let refused = client.begin_bytes(op, 5);
        assert!(matches!(refused, Err(BeginBytesError::Refused { token: 5, cause: Error::TooLong(_) })));
    }
    assert_eq!(client.in_flight() as u64, begun + 1);
    resume(&node);
    let mut ended = 0;
    while client.in_flight() > 0 {
        assert!(client.wait(Some(TIMEOUT)));
        client.poll(|token, _| assert_eq!(token, 100));
        client.poll_bytes(|token, response| {
            assert_eq!((token, response.value), (ended, &b"value"[..]), "those of one key end in order");
            ended += 1;
        });
    }
    assert_eq!(ended, begun);
    node.join();
}

/// A client of a stopped node times out, and drops the late responses.
#[test]
fn client_of_a_stopped_node_times_out_and_works_again_later() {
    let (name, node) = start_single_node();
    let mut client = Client::<u64>::attach_pipelined(&name).unwrap();
    let text = |key: u64| (10_000 + key).to_string().into_bytes();
    for key in 0..100 {
        client.put(key, 1000 + key).unwrap();
        client.put_bytes(&key.to_le_bytes(), &text(key)).unwrap();
    }
    stop(&node);
    client.begin(WordRequest::new(Op::Get, 0, 7), 7).unwrap();
    client.begin_bytes(BytesOp::Get { key: &8u64.to_le_bytes() }, 8).unwrap();
    client.set_timeout(SHORT);
    let late = Error::TimedOut { rank: 0, after: SHORT };
    let begun = Instant::now();
    assert_eq!(client.put(1, 11), Err(late));
    assert!(begun.elapsed() >= SHORT);
    assert_eq!(client.put_bytes(&1u64.to_le_bytes(), b"late"), Err(late));
    assert_eq!(client.stats(0, 2), Err(late));
    let attached = Client::<()>::attach_within(&name, SHORT).map(|_| ());
    assert!(matches!(attached, Err(AttachError::TimedOut { after: SHORT, .. })), "{attached:?}");
    // More than fit in the queue.
    client.set_timeout(Duration::from_millis(1));
    for key in 2..100 {
        assert!(matches!(client.get(key), Err(Error::TimedOut { .. })), "{key}");
        assert!(matches!(client.get_bytes(&key.to_le_bytes()), Err(Error::TimedOut { .. })), "{key}");
    }
    assert_eq!(client.in_flight(), 2);
    assert!(!client.wait(Some(SHORT)), "nobody responses");

    resume(&node);
    client.set_timeout(TIMEOUT);
    for key in (2..100).rev() {
        assert_eq!(client.get(key), Ok(Some(1000 + key)));
        assert_eq!(client.get_bytes(&key.to_le_bytes()), Ok(Some(text(key))));
    }
    // The puts that timed out were done all the same.
    assert_eq!(client.get(1), Ok(Some(11)));
    assert_eq!(client.get_bytes(&1u64.to_le_bytes()).unwrap().unwrap(), b"late");
    let mut ended = Vec::new();
    while client.in_flight() > 0 {
        assert!(client.wait(Some(TIMEOUT)));
        client.poll(|token, response| ended.push((token, response.value)));
        client.poll_bytes(|token, response| {
            assert_eq!((token, response.value), (8, &text(8)[..]));
            ended.push((token, 0));
        });
    }
    ended.sort_unstable();
    assert_eq!(ended, [(7, 1007), (8, 0)]);
    assert!(!client.wait(None), "nothing is in flight");
    node.join();
}

/// The node that owns the key is stopped, not the one that the client is attached to.
#[test]
fn operations_on_a_stopped_peer_time_out_and_others_succeed() {
    for backend in BACKENDS {
        let (Plan { listeners, addresses, .. }, name) = (Plan::new(2), fresh_name("stopped"));
        drop(listeners);
        let mut nodes: Vec<Child> = (0..2).map(|rank| start_node(&name, rank, backend, &addresses)).collect();
        nodes.iter_mut().for_each(|node| node.expect("serving"));
        let mut client = Client::<u64>::attach_pipelined(&format!("{name}-0")).unwrap();
        let place = client.shard_map();
        let key_of = |rank| (0..).find(|key| place.shard_of_word(*key).rank == rank).unwrap();
        let bytes_of =
            |rank| (0u64..).map(u64::to_le_bytes).find(|key| place.shard_of_bytes(key).rank == rank).unwrap();
        for rank in 0..2 {
            client.put(key_of(rank), 5).unwrap();
            client.put_bytes(&bytes_of(rank), b"five").unwrap();
        }
        stop(&nodes[1]);
        client.set_timeout(SHORT);
        let late = Error::TimedOut { rank: 1, after: SHORT };
        assert_eq!(client.get(key_of(1)), Err(late));
        assert_eq!(client.get_bytes(&bytes_of(1)), Err(late));
        client.set_timeout(TIMEOUT);
        assert_eq!(client.get(key_of(0)), Ok(Some(5)));
        assert_eq!(client.get_bytes(&bytes_of(0)).unwrap().unwrap(), b"five");
        resume(&nodes[1]);
        // If it was stopped for so long that it counts as failed, it joins again, with its keys.
        eventually("it does not come back", || client.get(key_of(1)) == Ok(Some(5)));
        eventually("it does not come back", || client.get_bytes(&bytes_of(1)).is_ok());
        // The first ends when both do.
        nodes.iter_mut().for_each(|node| node.close_input());
        nodes.into_iter().for_each(Child::join);
    }
}

/// A client that waits for several daemons sleeps, and wakes when one responds or when all are gone.
#[test]
fn client_that_waits_for_several_daemons_sleeps() {
    let (name, mut node) = start_single_node();
    let mut client = Client::<u64>::attach_pipelined(&name).unwrap();
    client.put_bytes(b"key", b"value").unwrap();
    stop(&node);
    let begin = |client: &mut Client<u64>| {
        for key in 0..20 {
            client.begin(WordRequest::new(Op::Get, 0, key), key).unwrap();
        }
        client.begin_bytes(BytesOp::Get { key: b"key" }, 20).unwrap();
    };
    begin(&mut client);
    let (begun, used) = (Instant::now(), thread_time());
    assert!(!client.wait(Some(Duration::from_secs(1))));
    let share = (thread_time() - used).as_secs_f64() / begun.elapsed().as_secs_f64();
    println!("waiting for three daemons and a lane of byte strings: {:.2} % of a core", share * 100.0);
    // A client that spins or only yields would use a whole core.
    assert!(share < 0.25, "{share}");

    let waker = std::thread::spawn({
        let pid = Pid::from_raw(node.id() as i32).unwrap();
        move || {
            std::thread::sleep(SHORT);
            kill_process(pid, Signal::CONT).unwrap();
            Instant::now()
        }
    });
    assert!(client.wait(Some(TIMEOUT)));
    println!("woken {:?} after the node went on", waker.join().unwrap().elapsed());
    while client.in_flight() > 0 {
        assert!(client.wait(Some(TIMEOUT)));
        client.poll(|_, response| assert_eq!(response.status, Status::NotFound));
        client.poll_bytes(|_, response| assert_eq!(response.value, b"value"));
    }
    stop(&node);
    begin(&mut client);
    node.kill();
    let mut ended = 0;
    while client.in_flight() > 0 {
        assert!(client.wait(Some(TIMEOUT)));
        client.poll(|_, response| ended += u64::from(response.status == Status::NodeGone));
        client.poll_bytes(|token, response| {
            assert_eq!((token, response.status), (20, Status::NodeGone));
            ended += 1;
        });
    }
    assert_eq!(ended, 21);
    assert!(matches!(
        client.begin_bytes(BytesOp::Get { key: b"key" }, 3),
        Err(BeginBytesError::ServerGone(3))
    ));
}

/// Processor time of this thread so far.
fn thread_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

/// The length of a response that is longer than any of a node.
const LONGEST: usize = ipc::MAX_MESSAGE;

/// Whatever bytes a node sends on the lane for byte strings, the client returns an error that says so.
#[test]
fn invalid_responses_of_a_node_are_errors() {
    let seed = seed();
    let name = fresh_name("invalid");
    let config =
        ipc::Config { queue_depth: 4, request_limit: 1 << 20, response_limit: LONGEST, ..Default::default() };
    let _words = ipc::Server::<WordRequest, WordResponse>::create(&format!("{name}.d0"), &config).unwrap();
    let mut long = ipc::Server::<[u8], [u8]>::create(&format!("{name}.l0"), &config).unwrap();
    let server = std::thread::spawn(move || {
        let mut numbers = Random(seed);
        let mut responses = vec![
            Vec::new(),
            vec![1],
            vec![1, 0, 0, 0, 9, 0, 0, 0],
            vec![99, 0, 0, 0, 0, 0, 0, 0],
            vec![1, 1, 0, 0, 0, 0, 0, 0],
            vec![1, 0, 0, 0, 255, 255, 255, 255],
            vec![0; LONGEST],
        ];
        responses
            .extend((0..200).map(|_| (0..numbers.below(40)).map(|_| numbers.next() as u8 | 0x80).collect()));
        let mut responses = responses.into_iter();
        loop {
            long.wait(Some(SHORT));
            long.poll();
            while let Some(request) = long.recv() {
                if matches!(
                    wire::BytesRequest::decode(request.message()),
                    Ok(wire::BytesRequest { op: BytesOp::Info, .. })
                ) {
                    let mut encoded = Vec::new();
                    let response = wire::BytesResponse { status: Status::Done, value: INFO.as_bytes() };
                    response.encode(&mut encoded).unwrap();
                    request.reply(&encoded).unwrap();
                    continue;
                }
                let Some(response) = responses.next() else { return };
                request.reply(&response).unwrap();
            }
        }
    });
    let mut client = Client::<u64>::attach_pipelined(&name).unwrap();
    client.set_timeout(TIMEOUT);
    let unexpected = Error::Unexpected { rank: 0, status: Status::Malformed };
    for round in 0..100u64 {
        assert_eq!(client.get_bytes(b"key"), Err(unexpected), "round {round}");
        client.begin_bytes(BytesOp::Get { key: b"key" }, round).unwrap();
        while client.in_flight() > 0 {
            assert!(client.wait(Some(TIMEOUT)));
            client.poll_bytes(|token, response| {
                assert_eq!((token, response), (round, wire::BytesResponse::new(Status::Malformed)));
            });
        }
    }
    // Then the node ends in the middle of a request.
    let last = (0..8).map(|_| client.get_bytes(b"key")).find(|result| *result != Err(unexpected));
    assert_eq!(last, Some(Err(Error::ServerGone)));
    server.join().unwrap();
}
