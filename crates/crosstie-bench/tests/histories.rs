//! The store must be linearizable while its clients and one of its nodes are killed.
//!
//! There are three nodes and several clients, all of them processes. Clients are killed at random times and replaced; one node is killed
//! and restarted. The requests and responses of all clients must be linearizable (see [`crosstie_bench::history`]).
//!
//! A client may be killed at any instruction. So it writes every operation to its parent before it sends the request, and again when it
//! has the response: a pipe keeps what a dead process has written. Operations that were pending when a client was killed have an unknown
//! outcome.
//!
//! A killed node loses its keys, and clients are not told. So its keys are checked separately for each *life* of the node, the time from
//! a start to a kill. Each life starts empty: a value from an earlier life is a violation. An operation that was pending while the node
//! was killed belongs to one of two lives, and counts as unknown in both. This is lenient for these operations and exact for all others:
//! a request that got a response, even [`Status::NodeGone`], is never executed in the node's next life. Keys of the nodes that were not
//! killed are checked without lives.
//!
//! The last test adds bugs between the clients and the store, and checks that they are found.

#[path = "../../crosstie-kv/tests/cluster/mod.rs"]
mod cluster;

use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use cluster::process::{serve, start_node};
use cluster::{BACKENDS, Plan, Random, fresh_name, seed};
use crosstie_bench::history::{
    BUDGET, Event, Failure, History, Outcome, Pending, Recorder, Summary, check_from, now,
};
use crosstie_kv::Backend;
use crosstie_kv::client::{BeginError, Client, Error, SwapOutcome};
use crosstie_kv::sharding::ShardMap;
use crosstie_kv::wire::{Op, Status, WordRequest, WordResponse};
use crosstie_testkit::child::{self, Child};
use zerocopy::{IntoBytes, TryFromBytes};

const NODES: u32 = 3;
/// Daemons of each node, as [`serve`] starts them.
const DAEMONS: u32 = 2;
const CLIENTS: u32 = 6;
/// Operations that a client has in flight.
const DEPTH: usize = 3;
/// Most operations of one client.
const CAPACITY: usize = 1 << 16;
/// Responses after which a client sleeps: a few ten thousand operations on a key are enough for the checker.
const OPERATIONS_PER_SLEEP: usize = 64;
const SLEEP: Duration = Duration::from_millis(1);
/// Limit of the checker's steps. It is far more than the checker needs, because an undecided check proves nothing.
const STEPS: u64 = 10 * BUDGET;
/// Number of keys of each node: words, and byte strings.
const KEYS: [usize; 2] = [4, 2];
/// Flag of byte-string keys in histories: they live in a separate keyspace.
const STRING: u64 = 1 << 63;
/// The upper half of a record's first word; the lower half is its number.
const TAG: u64 = 0x6b76_6869 << 32;

/// Runs the role of a child process that a test below has started; does nothing otherwise.
#[test]
fn child_process_entry() {
    let Some(role) = child::task() else { return };
    match &role.split(' ').collect::<Vec<_>>()[..] {
        ["node", name, rank, backend, addresses] => serve(name, rank.parse().unwrap(), backend, addresses),
        ["client", name, number, seed, bug] => {
            let number: u32 = number.parse().unwrap();
            let mut client = RecordingClient::new(name, number, seed.parse().unwrap(), Bug::parse(bug));
            // Every third client uses byte strings.
            if number.is_multiple_of(3) { client.run_with_bytes() } else { client.run_with_words() }
        }
        _ => panic!("{role}"),
    }
}

/// A bug between a client and the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// Some gets return the value that the client saw last.
    StaleGet,
    /// Some puts are reported as done without being sent.
    DroppedPut,
    /// An insert replaces an existing value.
    InsertOverwrites,
}

impl Bug {
    fn parse(text: &str) -> Bug {
        [Bug::None, Bug::StaleGet, Bug::DroppedPut, Bug::InsertOverwrites]
            .into_iter()
            .find(|bug| format!("{bug:?}") == text)
            .unwrap()
    }

    /// Applies the bug: returns the request to send, or the response if no request is sent.
    fn apply(
        self,
        request: &WordRequest,
        numbers: &mut Random,
        seen: &HashMap<u64, u64>,
    ) -> Result<WordRequest, WordResponse> {
        match (self, request.op) {
            (Bug::StaleGet, Op::Get) if numbers.below(4) == 0 => match seen.get(&request.key) {
                Some(value) => Err(WordResponse::new(Status::Done, *value)),
                None => Ok(*request),
            },
            (Bug::DroppedPut, Op::Put) if numbers.below(4) == 0 => Err(WordResponse::new(Status::Done, 0)),
            (Bug::InsertOverwrites, Op::Insert) => Ok(WordRequest { op: Op::Put, ..*request }),
            _ => Ok(*request),
        }
    }
}

/// The keys that all clients use, with the rank that owns each.
fn keys(strings: bool) -> Vec<(u64, u32)> {
    let shard_map = ShardMap::new(NODES, DAEMONS).unwrap();
    let rank_of = |key: u64| match strings {
        true => shard_map.shard_of_bytes(&key.to_le_bytes()).rank,
        false => shard_map.shard_of_word(key).rank,
    };
    (0..NODES)
        .flat_map(|rank| (0..).filter(move |key| rank_of(*key) == rank).take(KEYS[usize::from(strings)]))
        .map(|key| (key, rank_of(key)))
        .collect()
}

/// An operation as a client reported it to its parent.
#[derive(Clone, Copy)]
struct Observed {
    event: Event,
    /// When the client had a response, also if the response leaves the outcome unknown.
    ended: u64,
}

/// A client that reports every operation to its parent before it sends the request.
struct RecordingClient {
    number: u64,
    client: Client<usize>,
    recorder: Recorder,
    /// By the number of the operation.
    pending: Vec<Option<Pending>>,
    numbers: Random,
    bug: Bug,
    /// The value of each key in the last response about it.
    seen: HashMap<u64, u64>,
    /// By rank: whether its last response was [`Status::NodeGone`]. Then the client sends only gets to it. A get of unknown outcome
    /// constrains nothing, but each write of unknown outcome makes more orders possible.
    gone: [bool; NODES as usize],
    stop: Arc<AtomicBool>,
}

impl RecordingClient {
    fn new(name: &str, number: u32, seed: u64, bug: Bug) -> RecordingClient {
        let stop = Arc::new(AtomicBool::new(false));
        let stop_flag = stop.clone();
        std::thread::spawn(move || {
            // Returns when the parent has closed the pipe or has exited.
            std::io::stdin().read_to_end(&mut Vec::new()).ok();
            stop_flag.store(true, Relaxed);
        });
        let client = loop {
            match Client::attach_pipelined(name) {
                Ok(client) => break client,
                Err(_) if stop.load(Relaxed) => std::process::exit(0),
                // The node is being killed or started.
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        RecordingClient {
            number: number.into(),
            client,
            recorder: Recorder::new(number, CAPACITY),
            pending: Vec::with_capacity(CAPACITY),
            numbers: Random(seed ^ u64::from(number) << 32),
            bug,
            seen: HashMap::new(),
            gone: [false; NODES as usize],
            stop,
        }
    }

    fn is_over(&self) -> bool {
        self.stop.load(Relaxed) || self.recorder.room() == 0
    }

    /// Operations on words, several in flight.
    fn run_with_words(&mut self) {
        let keys = keys(false);
        let ranks: HashMap<u64, u32> = keys.iter().copied().collect();
        loop {
            while !self.is_over() && self.client.in_flight() < DEPTH {
                let request = self.next_request(&keys);
                let number = self.begin(&request);
                let sent = match self.bug.apply(&request, &mut self.numbers, &self.seen) {
                    Ok(request) => self.client.begin(request, number),
                    Err(response) => {
                        self.end(number, &response);
                        continue;
                    }
                };
                match sent {
                    Ok(()) => {}
                    Err(BeginError::Full(number)) => {
                        self.record_unsent(number);
                        break;
                    }
                    Err(BeginError::ServerGone(number)) => {
                        self.record_unsent(number);
                        self.reconnect();
                    }
                }
            }
            let mut responses = Vec::new();
            self.client.poll(|number, response| responses.push((number, response)));
            for (number, response) in &responses {
                let key = self.recorder.events()[*number].key;
                self.record_response(*number, response, ranks[&key]);
            }
            if self.client.in_flight() == 0 && self.is_over() {
                return;
            }
            if responses.is_empty() {
                self.client.wait(Some(Duration::from_millis(1)));
            }
        }
    }

    /// Operations on byte strings, one at a time.
    fn run_with_bytes(&mut self) {
        let keys = keys(true);
        let ranks: HashMap<u64, u32> = keys.iter().copied().collect();
        while !self.is_over() {
            let mut request = self.next_request(&keys);
            let rank = ranks[&request.key];
            request.key |= STRING;
            let number = self.begin(&request);
            let response = match self.bug.apply(&request, &mut self.numbers, &self.seen) {
                Ok(request) => self.execute_bytes_op(&request),
                Err(response) => Ok(response),
            };
            let server_gone = response == Err(Error::ServerGone);
            // After an error the outcome is unknown.
            self.record_response(number, &response.unwrap_or(WordResponse::new(Status::NodeGone, 0)), rank);
            if server_gone {
                self.reconnect();
            }
        }
    }

    fn execute_bytes_op(&mut self, request: &WordRequest) -> Result<WordResponse, Error> {
        let key = (request.key & !STRING).to_le_bytes();
        let (value, expected) = (request.value.to_le_bytes(), request.expected.to_le_bytes());
        let word = |bytes: Vec<u8>| u64::from_le_bytes(bytes.try_into().expect("values of 8 bytes"));
        let found = |was_there| WordResponse::new(if was_there { Status::Done } else { Status::NotFound }, 0);
        let client = &mut self.client;
        Ok(match request.op {
            Op::Get => client
                .get_bytes(&key)?
                .map_or(found(false), |value| WordResponse::new(Status::Done, word(value))),
            Op::Put => client.put_bytes(&key, &value).map(|()| found(true))?,
            Op::Delete => found(client.delete_bytes(&key)?),
            Op::Insert => client
                .insert_bytes(&key, &value)?
                .map_or(found(true), |value| WordResponse::new(Status::Mismatch, word(value))),
            Op::CompareAndSwap => match client.compare_and_swap_bytes(&key, &expected, &value)? {
                SwapOutcome::Done => found(true),
                SwapOutcome::Mismatch(value) => WordResponse::new(Status::Mismatch, word(value)),
                SwapOutcome::NotFound => found(false),
            },
        })
    }

    fn next_request(&mut self, keys: &[(u64, u32)]) -> WordRequest {
        let (key, rank) = keys[self.numbers.below(keys.len() as u64) as usize];
        let op = match self.numbers.below(8) {
            _ if self.gone[rank as usize] => Op::Get,
            0..=2 => Op::Get,
            3..=4 => Op::Put,
            5 => Op::Delete,
            6 => Op::Insert,
            _ => Op::CompareAndSwap,
        };
        // The value is unique.
        let value = (self.number << 32) | self.recorder.events().len() as u64;
        let expected = self.seen.get(&key).or(self.seen.get(&(key | STRING))).copied().unwrap_or(0);
        WordRequest { value, expected, ..WordRequest::new(op, rank, key) }
    }

    fn begin(&mut self, request: &WordRequest) -> usize {
        self.pending.push(self.recorder.begin(request));
        let number = self.pending.len() - 1;
        self.report(number, Event::NEVER);
        number
    }

    fn end(&mut self, number: usize, response: &WordResponse) {
        let Event { op, key, value, .. } = self.recorder.events()[number];
        self.recorder.end(self.pending[number].take().expect("each operation has one response"), response);
        self.report(number, now());
        match (op, response.status) {
            (Op::Get, Status::Done) | (_, Status::Mismatch) => drop(self.seen.insert(key, response.value)),
            (Op::Put | Op::Insert | Op::CompareAndSwap, Status::Done) => drop(self.seen.insert(key, value)),
            _ => {}
        }
    }

    /// Records the response of an operation.
    fn record_response(&mut self, number: usize, response: &WordResponse, rank: u32) {
        self.end(number, response);
        self.gone[rank as usize] = response.status == Status::NodeGone;
        if self.gone[rank as usize] || number.is_multiple_of(OPERATIONS_PER_SLEEP) {
            std::thread::sleep(SLEEP);
        }
    }

    /// Records an operation whose request was not sent as refused.
    fn record_unsent(&mut self, number: usize) {
        self.end(number, &WordResponse::new(Status::OutOfMemory, 0));
    }

    /// Reports an operation to the parent. It is one system call, short enough that a pipe writes it atomically.
    fn report(&self, number: usize, ended: u64) {
        let mut record = (TAG | number as u64).to_le_bytes().to_vec();
        record.extend_from_slice(&ended.to_le_bytes());
        record.extend_from_slice(self.recorder.events()[number].as_bytes());
        std::io::stderr().write_all(&record).unwrap();
    }

    fn reconnect(&mut self) {
        let mut ended = Vec::new();
        while self.client.in_flight() > 0 {
            self.client.poll(|number, response| ended.push((number, response)));
        }
        for (number, response) in ended {
            self.end(number, &response);
        }
        while self.client.reconnect().is_err() && !self.stop.load(Relaxed) {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.gone = [false; NODES as usize];
    }
}

/// A client process and the thread that reads its reports. They are records, not messages: a client may be killed inside of one.
struct ClientProcess {
    process: std::process::Child,
    reader: JoinHandle<Vec<Observed>>,
}

impl ClientProcess {
    fn start(name: &str, number: u32, seed: u64, bug: Bug) -> ClientProcess {
        let mut command =
            child::command(child_process_entry, &format!("client {name} {number} {seed} {bug:?}"));
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut output = BufReader::new(process.stderr.take().unwrap());
        let reader = std::thread::spawn(move || {
            let (mut events, mut record) = (Vec::new(), [0; 16 + size_of::<Event>()]);
            while output.read_exact(&mut record).is_ok() {
                let (words, event) = record.split_at(16);
                let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().unwrap());
                let (tag, ended) = (word(0), word(8));
                let event = Event::try_read_from_bytes(event).ok().filter(|_| tag & TAG == TAG);
                let Some(event) = event else {
                    let mut rest = record.to_vec();
                    output.read_to_end(&mut rest).unwrap();
                    panic!("a client wrote an invalid record: {}", String::from_utf8_lossy(&rest));
                };
                let observed = Observed { event, ended };
                match (tag & !TAG) as usize {
                    number if number == events.len() => events.push(observed),
                    number => events[number] = observed,
                }
            }
            events
        });
        ClientProcess { process, reader }
    }

    fn kill(mut self) -> Vec<Observed> {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.reader.join().unwrap()
    }

    fn join(mut self) -> Vec<Observed> {
        drop(self.process.stdin.take());
        let observed = self.reader.join().unwrap();
        assert!(self.process.wait().unwrap().success(), "a client failed");
        observed
    }
}

/// The reports of all clients of a run, and when the node was killed.
struct RunRecord {
    observed: Vec<Observed>,
    victim: u32,
    /// For each kill of the victim: a time before it, and a time when the victim was dead.
    kills: Vec<[u64; 2]>,
}

/// Kills `client_kills` clients, and one node `node_kills` times. The seed decides about the order and the times.
fn run(backend: Backend, bug: Bug, seed: u64, client_kills: u64, node_kills: u64) -> RunRecord {
    let mut numbers = Random(seed);
    let victim = numbers.below(NODES.into()) as u32;
    let name = fresh_name("history");
    let Plan { listeners, addresses, .. } = Plan::new(NODES);
    drop(listeners);
    let start_node = |rank: u32| start_node(&name, rank, backend, &addresses);
    let mut nodes: Vec<Child> = (0..NODES).map(start_node).collect();
    nodes.iter_mut().for_each(|node| node.expect("serving"));
    let mut started = 0;
    let mut start_client = |index: usize| {
        started += 1;
        // All nodes have clients of both kinds.
        ClientProcess::start(&format!("{name}-{}", index as u32 % NODES), started, seed, bug)
    };
    let mut clients: Vec<ClientProcess> = (0..CLIENTS as usize).map(&mut start_client).collect();
    let (mut observed, mut kills) = (Vec::new(), Vec::new());
    let (mut clients_left, mut nodes_left) = (client_kills, node_kills);
    while clients_left + nodes_left > 0 {
        std::thread::sleep(Duration::from_millis(20 + numbers.below(130)));
        if numbers.below(clients_left + nodes_left) < nodes_left {
            nodes_left -= 1;
            let before = now();
            nodes[victim as usize].kill();
            kills.push([before, now()]);
            // The clients continue with the remaining nodes.
            std::thread::sleep(Duration::from_millis(numbers.below(50)));
            nodes[victim as usize] = start_node(victim);
            nodes[victim as usize].expect("serving");
        } else {
            clients_left -= 1;
            let index = numbers.below(CLIENTS.into()) as usize;
            let killed = std::mem::replace(&mut clients[index], start_client(index));
            observed.extend(killed.kill());
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    observed.extend(clients.into_iter().flat_map(ClientProcess::join));
    nodes.into_iter().for_each(Child::join);
    RunRecord { observed, victim, kills }
}

impl RunRecord {
    fn of_ranks(&self, wanted: impl Fn(u32) -> bool) -> Vec<Observed> {
        let words = keys(false).into_iter();
        let strings = keys(true).into_iter().map(|(key, rank)| (key | STRING, rank));
        let ranks: HashMap<u64, u32> = words.chain(strings).collect();
        self.observed.iter().filter(|observed| wanted(ranks[&observed.event.key])).copied().collect()
    }

    /// Checks the keys of the nodes that were not killed.
    fn check_survivors(&self) -> Result<Summary, Failure> {
        let observed = self.of_ranks(|rank| rank != self.victim);
        check_events(observed.iter().map(|observed| observed.event).collect())
    }

    /// Checks the keys of the killed node, for each of its lives.
    fn check_lives(&self) -> Result<Vec<Summary>, Failure> {
        let observed = self.of_ranks(|rank| rank == self.victim);
        let born = [[0, 0]].into_iter().chain(self.kills.iter().copied());
        let died = self.kills.iter().copied().chain([[u64::MAX; 2]]);
        let life = |(born, died): ([u64; 2], [u64; 2])| {
            let overlaps = |observed: &&Observed| observed.event.called < died[1] && observed.ended > born[0];
            let of_life = |&Observed { event, ended }: &Observed| {
                if event.called > born[1] && ended < died[0] {
                    return event;
                }
                Event { returned: Event::NEVER, outcome: Outcome::Unknown, returned_value: 0, ..event }
            };
            check_events(observed.iter().filter(overlaps).map(of_life).collect())
        };
        born.zip(died).map(life).collect()
    }
}

/// Checks operations on keys that are absent at the start.
fn check_events(events: Vec<Event>) -> Result<Summary, Failure> {
    check_from(&[History { events }], |_| None, STEPS)
}

#[test]
fn store_is_linearizable_while_clients_and_a_node_are_killed() {
    let seed = seed();
    for backend in BACKENDS {
        let record = run(backend, Bug::None, seed, 12, 3);
        let victim = record.victim;
        let survivors = record.check_survivors().unwrap_or_else(|failure| panic!("{backend:?}: {failure}"));
        let lives = record.check_lives().unwrap_or_else(|failure| panic!("{backend:?}: {failure}"));
        println!("{backend:?}, keys of survivors: {survivors:?}");
        lives.iter().for_each(|life| println!("a life of rank {victim}: {life:?}"));
        // Tens of thousands on idle cores; hundreds if each core is shared with several other programs.
        assert!(survivors.operations > 200, "the clients completed too few operations");
        assert!(survivors.unknown > 0, "no client was killed during an operation");
    }
}

#[test]
fn injected_bugs_are_found() {
    let seed = seed();
    for (bug, backend) in
        [Bug::StaleGet, Bug::DroppedPut, Bug::InsertOverwrites].into_iter().zip(BACKENDS.into_iter().cycle())
    {
        let record = run(backend, bug, seed, 4, 1);
        for (whose, found) in [
            ("survivors", record.check_survivors().map(drop)),
            ("the victim", record.check_lives().map(drop)),
        ] {
            match found {
                Err(Failure::Violation { operations, .. }) => {
                    println!("{bug:?}, keys of {whose}: found, {} operations contradict", operations.len());
                }
                other => panic!("{bug:?} in keys of {whose} was not found: {other:?}"),
            }
        }
    }
}
