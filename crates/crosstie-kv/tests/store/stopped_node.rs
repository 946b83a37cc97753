//! A node that is stopped (SIGSTOP) under load: at random instants, and at instructions of its daemons (single-stepped with ptrace)
//! while requests for it are on their way. Requests for the keys of other nodes go on. Requests for its keys end
//! with `NodeGone` when its heartbeats stay out, and are served again when it continues: with the values that it had.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use crosstie::bootstrap::Secret;
use crosstie_kv::Backend;
use crosstie_kv::client::Client;
use crosstie_kv::node::{Membership, Node, NodeConfig};
use crosstie_kv::sharding::ShardMap;
use crosstie_kv::wire::{Op, Status, WordRequest, WordResponse};
use crosstie_testkit::child::Child;
use crosstie_testkit::trace;
use crosstie_testkit::wait::eventually;
use rustix::process::Signal;

use super::cluster::process::{SECRET, signal, start_node};
use super::cluster::{BACKENDS, Random, TIMEOUT, fresh_name, seed};

/// Requests for the keys of the other nodes while one is stopped.
const REQUESTS: u64 = 5000;
const STOPPED: u32 = 2;
/// Stops at an instruction of a daemon, and the instructions from one to the next: together more than a request takes.
const STEPPED_STOPS: u64 = 24;
const STEPS_PER_STOP: u64 = 250;

/// Two nodes in this process, and one in a child process, which is stopped.
struct Cluster {
    nodes: Vec<Node>,
    child: Child,
}

impl Cluster {
    fn start(backend: Backend) -> Cluster {
        let name = fresh_name("stopped-node");
        let listeners: Vec<TcpListener> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<SocketAddr> =
            listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        let mut listeners = listeners.into_iter();
        let nodes: Vec<Node> = (0..2)
            .map(|rank| {
                let own = format!("{name}-{rank}");
                let config = NodeConfig { daemons: 2, backend, ..NodeConfig::member(&own, rank, 3) };
                let secret = Secret::new(SECRET).unwrap();
                let listener = listeners.next().unwrap();
                let membership = Membership { listener, addresses: addresses.clone(), secret };
                Node::join(&config, membership).unwrap()
            })
            .collect();
        // The child binds the address itself.
        drop(listeners);
        let mut child = start_node(&name, STOPPED, backend, &addresses);
        child.expect("serving");
        nodes.iter().for_each(|node| node.wait_for_peers(TIMEOUT).unwrap());
        Cluster { nodes, child }
    }

    fn stop(mut self) {
        self.child.kill();
        self.nodes.into_iter().for_each(|node| node.stop().unwrap());
    }

    /// The thread of a daemon of the child process.
    fn daemon(&self, number: u32) -> i32 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let is_daemon = |path: &std::path::PathBuf| {
            std::fs::read_to_string(path.join("comm"))
                .is_ok_and(|name| name.trim_end() == format!("kv-daemon-{number}"))
        };
        let task = tasks.map(|task| task.unwrap().path()).find(is_daemon).expect("the daemons have names");
        task.file_name().unwrap().to_str().unwrap().parse().unwrap()
    }
}

#[test]
fn other_nodes_go_on_while_a_node_is_stopped() {
    let mut random = Random(seed());
    for backend in BACKENDS {
        let cluster = Cluster::start(backend);
        let (nodes, child) = (&cluster.nodes, &cluster.child);
        let mut client = Client::<u64>::attach_pipelined(nodes[0].name()).unwrap();
        let map = client.shard_map();
        let (theirs, others) = keys(&map);
        for round in 0..2u64 {
            for key in &theirs {
                assert_eq!(call(&mut client, put(*key, round)).status, Status::Done);
            }
            // Under load, so that it is stopped inside an operation.
            let instant = 200 + random.below(2000);
            let load = |client: &mut Client<u64>, count: u64| {
                pipelined(client, count, |i| put(theirs[i as usize % theirs.len()], round));
            };
            load(&mut client, instant);
            for (i, key) in theirs.iter().take(20).enumerate() {
                // These may still be on their way when it stops.
                if client.begin(put(*key, round), i as u64).is_err() {
                    break;
                }
            }
            signal(child, Signal::STOP);
            let mut ended = 0;
            pipelined(&mut client, REQUESTS, |i| put(others[i as usize % others.len()], i));
            eventually("requests for the stopped node end", || {
                client.wait(Some(Duration::from_millis(50)));
                client.poll(|_, response| {
                    assert!(matches!(response.status, Status::Done | Status::NodeGone), "{response:?}");
                    ended += 1;
                });
                client.in_flight() == 0
            });
            let refused = call(&mut client, WordRequest::new(Op::Get, STOPPED, theirs[0]));
            assert_eq!(refused.status, Status::NodeGone, "after {ended} ended requests");
            pipelined(&mut client, REQUESTS, |i| put(others[i as usize % others.len()], i));

            signal(child, Signal::CONT);
            // Each of its daemons has a connection of its own.
            for key in &theirs {
                let mut value = refused;
                eventually("the continued node serves", || {
                    value = call(&mut client, WordRequest::new(Op::Get, STOPPED, *key));
                    value.status != Status::NodeGone
                });
                assert_eq!((value.status, value.value), (Status::Done, round), "it has kept its values");
            }
            load(&mut client, 1000);
        }
        drop(client);
        cluster.stop();
    }
}

/// A daemon of the node executes so many instructions, one by one, while requests for it are on their way; then its whole process is
/// stopped there. Requests for other nodes go on, and those for the stopped one end when it continues.
#[test]
fn other_nodes_go_on_while_a_node_is_stopped_at_any_instruction_of_its_daemons() {
    let mut random = Random(seed());
    for backend in BACKENDS {
        let cluster = Cluster::start(backend);
        let mut client = Client::<u64>::attach_pipelined(cluster.nodes[0].name()).unwrap();
        let (theirs, others) = keys(&client.shard_map());
        let (mut inside, mut refused) = (0, 0);
        for stop in 0..STEPPED_STOPS {
            // Its keys: the other daemon runs and responds.
            let number = stop as u32 % 2;
            let daemon = cluster.daemon(number);
            let map = client.shard_map();
            let theirs: Vec<u64> =
                theirs.iter().copied().filter(|key| map.shard_of_word(*key).daemon == number).collect();
            let steps = stop * STEPS_PER_STOP + random.below(STEPS_PER_STOP);
            trace::attach(daemon).unwrap();
            let mut begun = 0;
            for (i, key) in theirs.iter().take(16).enumerate() {
                begun += u64::from(client.begin(client.shard_map().route(put(*key, stop)), i as u64).is_ok());
            }
            assert!(begun > 0);
            // So that the requests are sent.
            client.poll(|_, _| panic!("the daemon does not run"));
            trace::step_attached(daemon, steps).unwrap();
            trace::detach_stopped(daemon as u32).unwrap();
            eventually("the node stops", || is_stopped(&cluster.child));
            let mut ended = 0;
            let mut check = |client: &mut Client<u64>| {
                client.poll(|token, response| {
                    assert!(token < 16, "{token}");
                    assert!(matches!(response.status, Status::Done | Status::NodeGone), "{response:?}");
                    refused += u64::from(response.status == Status::NodeGone);
                    ended += 1;
                });
            };
            check(&mut client);
            // A client of its own: the requests for the stopped node may fill the pipeline.
            let mut other = Client::<u64>::attach_pipelined(cluster.nodes[1].name()).unwrap();
            pipelined(&mut other, 200, |i| put(others[i as usize % others.len()], i));
            drop(other);
            check(&mut client);
            inside += u64::from(client.in_flight() > 0);
            signal(&cluster.child, Signal::CONT);
            eventually("requests for the continued node end", || {
                client.wait(Some(Duration::from_millis(50)));
                check(&mut client);
                client.in_flight() == 0
            });
            assert_eq!(ended, begun, "every request ends once");
            let mut value = None;
            eventually("the continued node serves", || {
                let response = call(&mut client, WordRequest::new(Op::Get, STOPPED, theirs[0]));
                value = (response.status == Status::Done).then_some(response.value);
                response.status != Status::NodeGone
            });
            assert!(value == Some(stop) || refused > 0, "{value:?} after stop {stop}");
        }
        println!(
            "{backend:?}: stopped {inside} of {STEPPED_STOPS} times while requests were in flight, {refused} refused"
        );
        assert!(
            inside > STEPPED_STOPS / 4,
            "the node was rarely stopped inside an operation: the test shows little"
        );
        drop(client);
        cluster.stop();
    }
}

/// Whether every thread of the process is stopped.
fn is_stopped(child: &Child) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id()));
    tasks.into_iter().flatten().flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    })
}

/// Keys of the stopped node, and of the others.
fn keys(map: &ShardMap) -> (Vec<u64>, Vec<u64>) {
    (0..300).partition(|key| map.shard_of_word(*key).rank == STOPPED)
}

fn put(key: u64, value: u64) -> WordRequest {
    WordRequest { value, ..WordRequest::new(Op::Put, 0, key) }
}

fn call(client: &mut Client<u64>, request: WordRequest) -> WordResponse {
    let mut response = None;
    let request = client.shard_map().route(request);
    assert!(client.begin(request, 0).is_ok(), "nothing is in flight");
    eventually("a response", || {
        client.wait(Some(Duration::from_millis(50)));
        client.poll(|_, answer| response = Some(answer));
        response.is_some()
    });
    response.unwrap()
}

/// Makes `count` requests, several at a time; all must be done. Requests that were in flight before may end, too.
fn pipelined(client: &mut Client<u64>, count: u64, mut request: impl FnMut(u64) -> WordRequest) {
    const MARK: u64 = 1 << 32;
    let (mut begun, mut done) = (0, 0);
    eventually("requests go on", || {
        while begun < count && client.begin(client.shard_map().route(request(begun)), MARK).is_ok() {
            begun += 1;
        }
        client.poll(|token, response| {
            if token == MARK {
                assert_eq!(response.status, Status::Done);
                done += 1;
            }
        });
        done == count
    });
}
