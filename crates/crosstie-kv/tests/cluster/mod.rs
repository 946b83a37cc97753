//! Clusters for tests, and clients that check every response against a model.
#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod process;

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use crosstie::bootstrap::Secret;
use crosstie_kv::Backend;
use crosstie_kv::client::{BeginError, Client};
use crosstie_kv::node::{Membership, Node, NodeConfig};
use crosstie_kv::wire::{Op, Status, WordRequest, WordResponse};

pub(crate) use crosstie_testkit::fresh_name;
pub(crate) use crosstie_testkit::rng::{Random, seed};
pub(crate) use crosstie_testkit::wait::TIMEOUT;

pub(crate) const BACKENDS: [Backend; 2] = [Backend::Meta, Backend::Delegation];

/// The listeners of a cluster's nodes, before any node runs.
pub(crate) struct Plan {
    pub(crate) secret: Secret,
    pub(crate) listeners: Vec<TcpListener>,
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Plan {
    pub(crate) fn new(nodes: u32) -> Plan {
        let listeners: Vec<_> = (0..nodes).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        Plan { secret: Secret::random().unwrap(), listeners, addresses }
    }

    pub(crate) fn membership(&self, rank: usize) -> Membership {
        Membership {
            listener: self.listeners[rank].try_clone().unwrap(),
            addresses: self.addresses.clone(),
            secret: self.secret.clone(),
        }
    }
}

/// Starts all nodes of a cluster in this process, and waits until they are connected.
pub(crate) fn start(nodes: u32, adjust: impl Fn(&mut NodeConfig)) -> Vec<Node> {
    let name = fresh_name("cluster");
    let plan = Plan::new(nodes);
    let start = |rank: u32| {
        let mut config = NodeConfig::member(&format!("{name}-{rank}"), rank, nodes);
        config.memory_limit = 64 << 20;
        adjust(&mut config);
        match nodes {
            1 => Node::start(&config).unwrap(),
            _ => Node::join(&config, plan.membership(rank as usize)).unwrap(),
        }
    };
    let cluster: Vec<Node> = (0..nodes).map(start).collect();
    cluster.iter().for_each(|node| node.wait_for_peers(TIMEOUT).unwrap());
    cluster
}

/// Makes `count` operations on keys that only this client uses, several at a time, and checks every response.
pub(crate) fn exercise(client: &mut Client<u64>, owner: u64, seed: u64, count: u64, keys: u64) {
    let mut numbers = Random(seed ^ owner);
    let mut model: HashMap<u64, u64> = HashMap::new();
    // Operations in flight, by key, with the expected response.
    let mut pending: HashMap<u64, (WordRequest, Status, u64)> = HashMap::new();
    let (mut begun, mut ended, mut last) = (0, 0, Instant::now());
    while ended < count {
        while begun < count && (pending.len() as u64) < keys {
            let key = (owner << 40) | numbers.below(keys);
            if pending.contains_key(&key) {
                break;
            }
            let (request, expectation) = next_operation(&mut numbers, &model, key);
            match client.begin(request, key) {
                Ok(()) => {
                    begun += 1;
                    pending.insert(key, (request, expectation.0, expectation.1));
                }
                Err(BeginError::Full(back)) => {
                    assert_eq!(back, key);
                    break;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let before = ended;
        client.poll(|key, response| {
            let (request, status, value) =
                pending.remove(&key).expect("a response without an operation, or a second response");
            assert_eq!(response, WordResponse::new(status, value), "{request:?}");
            if status == Status::Done {
                match request.op {
                    Op::Put | Op::Insert | Op::CompareAndSwap => drop(model.insert(key, request.value)),
                    Op::Delete => drop(model.remove(&key)),
                    Op::Get => {}
                }
            }
            ended += 1;
        });
        if ended == before {
            assert!(last.elapsed() < TIMEOUT, "no response for {:?}", pending.values().next());
            client.wait(Some(Duration::from_millis(1)));
        } else {
            last = Instant::now();
        }
    }
    assert_eq!(client.in_flight(), 0);
}

fn next_operation(numbers: &mut Random, model: &HashMap<u64, u64>, key: u64) -> (WordRequest, (Status, u64)) {
    let value = numbers.next();
    let current = model.get(&key).copied();
    let new = |op| WordRequest { value, ..WordRequest::new(op, 0, key) };
    match numbers.below(8) {
        0..=2 => (
            WordRequest::new(Op::Get, 0, key),
            current.map_or((Status::NotFound, 0), |value| (Status::Done, value)),
        ),
        3..=4 => (new(Op::Put), (Status::Done, 0)),
        5 => {
            let status = if current.is_some() { Status::Done } else { Status::NotFound };
            (WordRequest::new(Op::Delete, 0, key), (status, 0))
        }
        6 => (new(Op::Insert), current.map_or((Status::Done, 0), |value| (Status::Mismatch, value))),
        _ => {
            let guess = if numbers.below(2) == 0 { current.unwrap_or(0) } else { numbers.next() };
            let request = WordRequest { expected: guess, ..new(Op::CompareAndSwap) };
            let expectation = match current {
                None => (Status::NotFound, 0),
                Some(current) if current == guess => (Status::Done, 0),
                Some(current) => (Status::Mismatch, current),
            };
            (request, expectation)
        }
    }
}

/// Runs [`exercise`] with `clients` client threads on each node at the same time.
pub(crate) fn exercise_all(cluster: &[Node], clients: u64, count: u64, keys: u64) {
    let seed = seed();
    std::thread::scope(|scope| {
        for (rank, node) in (0..).zip(cluster) {
            for client in 0..clients {
                let name = node.name().to_owned();
                scope.spawn(move || {
                    let owner = rank * clients + client + 1;
                    let mut client = Client::attach_pipelined(&name).unwrap();
                    exercise(&mut client, owner, seed, count, keys);
                });
            }
        }
    });
}
