//! Whether the store tells the truth while its clients and one of its nodes are killed.
//!
//! Three nodes and several clients, all of them processes. Clients are killed at random instants and replaced; one node
//! is killed and comes back. What every client asked and heard must be what registers could have said (see
//! [`crosstie_bench::history`]).
//!
//! A client may be killed at any instruction, so it writes every operation to its parent before it sends it, and again when it
//! has the answer: a pipe keeps what a dead process wrote. What it had under way has an unknown outcome.
//!
//! A node that is killed loses its keys, and says so to nobody. Its keys are therefore checked for each of its lives by
//! itself, and each life begins empty: a value that outlived its node is a violation, too. What was under way while the node
//! was killed belongs to either life, so it counts as unknown in both. That is lenient for these operations and exact
//! for all others: a request that was answered, if only with the news that the node is gone, is not kept for the node's next life.
//! Keys of nodes that lived on are checked without any of this.
//!
//! The last test plants bugs between the clients and the store, and wants them found.

#[path = "../../crosstie-kv/tests/cluster/mod.rs"]
mod cluster;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use cluster::process::{ChildProcess, ROLE, serve};
use cluster::{BACKENDS, Plan, Random, fresh_name, seed};
use crosstie_bench::history::{
    BUDGET, Event, Failure, History, Outcome, Pending, Recorder, Summary, check_from, now,
};
use crosstie_kv::Backend;
use crosstie_kv::client::{BeginError, Client, Error, SwapOutcome};
use crosstie_kv::sharding::ShardMap;
use crosstie_kv::wire::{Op, Status, WordRequest, WordResponse};
use zerocopy::{IntoBytes, TryFromBytes};

const NODES: u32 = 3;
/// Of each node; as [`serve`] starts them.
const DAEMONS: u32 = 2;
const CLIENTS: u32 = 6;
/// Operations of a client that are under way at a time.
const DEPTH: usize = 3;
/// Operations of one client at most.
const CAPACITY: usize = 1 << 16;
/// Answers after which a client naps: the checker need not see more than a few ten thousand operations on a key.
const SPELL: usize = 64;
const NAP: Duration = Duration::from_millis(1);
/// Steps that the checker may take. Far from what it takes: being undecided would be no finding.
const STEPS: u64 = 10 * BUDGET;
/// 8-byte keys of each node, and byte strings of each node.
const KEYS: [usize; 2] = [4, 2];
/// In histories, the key of a byte string: these are keys of their own.
const STRING: u64 = 1 << 63;
/// What a record begins with, above its number.
const TAG: u64 = 0x6b76_6869 << 32;

/// Plays the role that a test below gave it; an ordinary run has none.
#[test]
fn child_process_entry() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match &role.split(' ').collect::<Vec<_>>()[..] {
        ["node", name, rank, backend, addresses] => serve(name, rank.parse().unwrap(), backend, addresses),
        ["client", name, number, seed, bug] => {
            let number: u32 = number.parse().unwrap();
            let mut asker = Asker::new(name, number, seed.parse().unwrap(), Bug::of(bug));
            // Two kinds of keys, two kinds of clients.
            if number.is_multiple_of(3) { asker.ask_for_strings() } else { asker.ask_for_words() }
        }
        _ => panic!("{role}"),
    }
}

/// What is wrong between a client and the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    Nothing,
    /// Gets are now and then answered with what the client saw last.
    StaleGet,
    /// Puts are now and then done by saying so.
    DroppedPut,
    /// An insert replaces what is there.
    InsertOverwrites,
}

impl Bug {
    fn of(text: &str) -> Bug {
        [Bug::Nothing, Bug::StaleGet, Bug::DroppedPut, Bug::InsertOverwrites]
            .into_iter()
            .find(|bug| format!("{bug:?}") == text)
            .unwrap()
    }

    /// The request that is sent, or the answer that is given without.
    fn plant(
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

/// The keys that the clients fight for, the same for all, with the rank that has them.
fn keys(strings: bool) -> Vec<(u64, u32)> {
    let placement = ShardMap::new(NODES, DAEMONS).unwrap();
    let rank_of = |key: u64| match strings {
        true => placement.shard_of_bytes(&key.to_le_bytes()).rank,
        false => placement.shard_of_word(key).rank,
    };
    (0..NODES)
        .flat_map(|rank| (0..).filter(move |key| rank_of(*key) == rank).take(KEYS[usize::from(strings)]))
        .map(|key| (key, rank_of(key)))
        .collect()
}

/// An operation as a client wrote it down.
#[derive(Clone, Copy)]
struct Observed {
    event: Event,
    /// When the client had an answer, also one that leaves the outcome unknown.
    ended: u64,
}

/// A client that writes down what it does before it does it.
struct Asker {
    number: u64,
    client: Client<usize>,
    recorder: Recorder,
    /// By number.
    pending: Vec<Option<Pending>>,
    numbers: Random,
    bug: Bug,
    /// The value that each key had when it was heard of last.
    seen: HashMap<u64, u64>,
    /// By rank: it was gone when it was asked last. Then it is only asked for values, which says nothing if it is still gone: each
    /// change of unknown outcome makes more orders possible.
    gone: [bool; NODES as usize],
    stop: Arc<AtomicBool>,
}

impl Asker {
    fn new(name: &str, number: u32, seed: u64, bug: Bug) -> Asker {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        std::thread::spawn(move || {
            // Until the parent closes it, or is gone itself.
            std::io::stdin().read_to_end(&mut Vec::new()).ok();
            told.store(true, Relaxed);
        });
        let client = loop {
            match Client::attach_pipelined(name) {
                Ok(client) => break client,
                Err(_) if stop.load(Relaxed) => std::process::exit(0),
                // The node is being killed or started.
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        Asker {
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

    /// Several at a time.
    fn ask_for_words(&mut self) {
        let keys = keys(false);
        let ranks: HashMap<u64, u32> = keys.iter().copied().collect();
        loop {
            while !self.is_over() && self.client.in_flight() < DEPTH {
                let request = self.make(&keys);
                let number = self.begin(&request);
                let sent = match self.bug.plant(&request, &mut self.numbers, &self.seen) {
                    Ok(request) => self.client.begin(request, number),
                    Err(answer) => {
                        self.end(number, &answer);
                        continue;
                    }
                };
                match sent {
                    Ok(()) => {}
                    Err(BeginError::Full(number)) => {
                        self.not_sent(number);
                        break;
                    }
                    Err(BeginError::ServerGone(number)) => {
                        self.not_sent(number);
                        self.reconnect();
                    }
                }
            }
            let mut answers = Vec::new();
            self.client.poll(|number, response| answers.push((number, response)));
            for (number, response) in &answers {
                let key = self.recorder.events()[*number].key;
                self.answered(*number, response, ranks[&key]);
            }
            if self.client.in_flight() == 0 && self.is_over() {
                return;
            }
            if answers.is_empty() {
                self.client.wait(Some(Duration::from_millis(1)));
            }
        }
    }

    /// One at a time.
    fn ask_for_strings(&mut self) {
        let keys = keys(true);
        let ranks: HashMap<u64, u32> = keys.iter().copied().collect();
        while !self.is_over() {
            let mut request = self.make(&keys);
            let rank = ranks[&request.key];
            request.key |= STRING;
            let number = self.begin(&request);
            let answer = match self.bug.plant(&request, &mut self.numbers, &self.seen) {
                Ok(request) => self.exchange_string(&request),
                Err(answer) => Ok(answer),
            };
            let gone = answer == Err(Error::ServerGone);
            // What the answer is not known to be, it may be.
            self.answered(number, &answer.unwrap_or(WordResponse::new(Status::NodeGone, 0)), rank);
            if gone {
                self.reconnect();
            }
        }
    }

    fn exchange_string(&mut self, request: &WordRequest) -> Result<WordResponse, Error> {
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

    fn make(&mut self, keys: &[(u64, u32)]) -> WordRequest {
        let (key, rank) = keys[self.numbers.below(keys.len() as u64) as usize];
        let op = match self.numbers.below(8) {
            _ if self.gone[rank as usize] => Op::Get,
            0..=2 => Op::Get,
            3..=4 => Op::Put,
            5 => Op::Delete,
            6 => Op::Insert,
            _ => Op::CompareAndSwap,
        };
        // Nobody else has this value.
        let value = (self.number << 32) | self.recorder.events().len() as u64;
        let expected = self.seen.get(&key).or(self.seen.get(&(key | STRING))).copied().unwrap_or(0);
        WordRequest { value, expected, ..WordRequest::new(op, rank, key) }
    }

    fn begin(&mut self, request: &WordRequest) -> usize {
        self.pending.push(self.recorder.begin(request));
        let number = self.pending.len() - 1;
        self.write_down(number, Event::NEVER);
        number
    }

    fn end(&mut self, number: usize, response: &WordResponse) {
        let Event { op, key, value, .. } = self.recorder.events()[number];
        self.recorder.end(self.pending[number].take().expect("answered twice"), response);
        self.write_down(number, now());
        match (op, response.status) {
            (Op::Get, Status::Done) | (_, Status::Mismatch) => drop(self.seen.insert(key, response.value)),
            (Op::Put | Op::Insert | Op::CompareAndSwap, Status::Done) => drop(self.seen.insert(key, value)),
            _ => {}
        }
    }

    /// Ends one that was sent.
    fn answered(&mut self, number: usize, response: &WordResponse, rank: u32) {
        self.end(number, response);
        self.gone[rank as usize] = response.status == Status::NodeGone;
        if self.gone[rank as usize] || number.is_multiple_of(SPELL) {
            std::thread::sleep(NAP);
        }
    }

    /// Ends one that was not.
    fn not_sent(&mut self, number: usize) {
        self.end(number, &WordResponse::new(Status::OutOfMemory, 0));
    }

    /// To the parent: one system call, less than a pipe could tear.
    fn write_down(&self, number: usize, ended: u64) {
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

/// A client process and what it writes.
struct Witness {
    other: ChildProcess,
    reader: JoinHandle<Vec<Observed>>,
}

impl Witness {
    fn start(name: &str, number: u32, seed: u64, bug: Bug) -> Witness {
        let mut other = ChildProcess::start(&format!("client {name} {number} {seed} {bug:?}"));
        let mut output = other.output.take().unwrap();
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
                    panic!("a client says: {}", String::from_utf8_lossy(&rest));
                };
                let observed = Observed { event, ended };
                match (tag & !TAG) as usize {
                    number if number == events.len() => events.push(observed),
                    number => events[number] = observed,
                }
            }
            events
        });
        Witness { other, reader }
    }

    fn kill(mut self) -> Vec<Observed> {
        self.other.kill();
        self.reader.join().unwrap()
    }

    fn join(mut self) -> Vec<Observed> {
        self.other.input = None;
        let observed = self.reader.join().unwrap();
        assert!(self.other.child.wait().unwrap().success(), "a client failed");
        observed
    }
}

/// What is known after a run.
struct Evidence {
    observed: Vec<Observed>,
    victim: u32,
    /// Before each kill of the victim, and when it was dead.
    kills: Vec<[u64; 2]>,
}

/// Kills so many clients, and the victim so many times, in an order and at instants that the seed decides.
fn run(backend: Backend, bug: Bug, seed: u64, client_kills: u64, node_kills: u64) -> Evidence {
    let mut numbers = Random(seed);
    let victim = numbers.below(NODES.into()) as u32;
    let name = fresh_name("history");
    let Plan { listeners, addresses, .. } = Plan::new(NODES);
    drop(listeners);
    let start_node = |rank: u32| ChildProcess::node(&name, rank, backend, &addresses);
    let mut nodes: Vec<ChildProcess> = (0..NODES).map(start_node).collect();
    nodes.iter_mut().for_each(|node| node.expect("serving"));
    let mut started = 0;
    let mut start_client = |place: usize| {
        started += 1;
        // Clients of all kinds at all nodes, as they come.
        Witness::start(&format!("{name}-{}", place as u32 % NODES), started, seed, bug)
    };
    let mut clients: Vec<Witness> = (0..CLIENTS as usize).map(&mut start_client).collect();
    let (mut observed, mut kills) = (Vec::new(), Vec::new());
    let (mut clients_left, mut nodes_left) = (client_kills, node_kills);
    while clients_left + nodes_left > 0 {
        std::thread::sleep(Duration::from_millis(20 + numbers.below(130)));
        if numbers.below(clients_left + nodes_left) < nodes_left {
            nodes_left -= 1;
            let before = now();
            nodes[victim as usize].kill();
            kills.push([before, now()]);
            // With the clients at work on what is left.
            std::thread::sleep(Duration::from_millis(numbers.below(50)));
            nodes[victim as usize] = start_node(victim);
            nodes[victim as usize].expect("serving");
        } else {
            clients_left -= 1;
            let place = numbers.below(CLIENTS.into()) as usize;
            let killed = std::mem::replace(&mut clients[place], start_client(place));
            observed.extend(killed.kill());
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    observed.extend(clients.into_iter().flat_map(Witness::join));
    nodes.into_iter().for_each(ChildProcess::join);
    Evidence { observed, victim, kills }
}

impl Evidence {
    fn of_ranks(&self, wanted: impl Fn(u32) -> bool) -> Vec<Observed> {
        let words = keys(false).into_iter();
        let strings = keys(true).into_iter().map(|(key, rank)| (key | STRING, rank));
        let ranks: HashMap<u64, u32> = words.chain(strings).collect();
        self.observed.iter().filter(|observed| wanted(ranks[&observed.event.key])).copied().collect()
    }

    /// Keys of nodes that were not killed.
    fn survivors(&self) -> Result<Summary, Failure> {
        let observed = self.of_ranks(|rank| rank != self.victim);
        search(observed.iter().map(|observed| observed.event).collect())
    }

    /// Keys of the node that was, for each of its lives.
    fn lives(&self) -> Result<Vec<Summary>, Failure> {
        let observed = self.of_ranks(|rank| rank == self.victim);
        let born = [[0, 0]].into_iter().chain(self.kills.iter().copied());
        let died = self.kills.iter().copied().chain([[u64::MAX; 2]]);
        let life = |(born, died): ([u64; 2], [u64; 2])| {
            let touches = |seen: &&Observed| seen.event.called < died[1] && seen.ended > born[0];
            let of_life = |&Observed { event, ended }: &Observed| {
                if event.called > born[1] && ended < died[0] {
                    return event;
                }
                Event { returned: Event::NEVER, outcome: Outcome::Unknown, answer: 0, ..event }
            };
            search(observed.iter().filter(touches).map(of_life).collect())
        };
        born.zip(died).map(life).collect()
    }
}

/// Keys have no value at first.
fn search(events: Vec<Event>) -> Result<Summary, Failure> {
    check_from(&[History { events }], |_| None, STEPS)
}

#[test]
fn histories_hold_while_clients_and_a_node_are_killed() {
    let seed = seed();
    for backend in BACKENDS {
        let evidence = run(backend, Bug::Nothing, seed, 12, 3);
        let victim = evidence.victim;
        let survivors = evidence.survivors().unwrap_or_else(|failure| panic!("{backend:?}: {failure}"));
        let lives = evidence.lives().unwrap_or_else(|failure| panic!("{backend:?}: {failure}"));
        println!("{backend:?}, keys of survivors: {survivors:?}");
        lives.iter().for_each(|life| println!("a life of rank {victim}: {life:?}"));
        // Tens of thousands on idle cores; hundreds where several other programs want each of them.
        assert!(survivors.operations > 200, "the clients did next to nothing");
        assert!(survivors.unknown > 0, "nobody was killed at work");
    }
}

#[test]
fn planted_bugs_are_found() {
    let seed = seed();
    for (bug, backend) in
        [Bug::StaleGet, Bug::DroppedPut, Bug::InsertOverwrites].into_iter().zip(BACKENDS.into_iter().cycle())
    {
        let evidence = run(backend, bug, seed, 4, 1);
        for (whose, found) in
            [("survivors", evidence.survivors().map(drop)), ("the victim", evidence.lives().map(drop))]
        {
            match found {
                Err(Failure::Violation { operations, .. }) => {
                    println!("{bug:?}, keys of {whose}: found, {} operations contradict", operations.len());
                }
                other => panic!("{bug:?} in keys of {whose} was not found: {other:?}"),
            }
        }
    }
}
