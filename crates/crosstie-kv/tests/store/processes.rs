//! Clients and nodes in separate processes, and what happens when they are killed.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crosstie::bootstrap::Secret;
use crosstie_kv::client::{BeginError, Client, Error};
use crosstie_kv::node::{Membership, Node, NodeConfig};
use crosstie_kv::wire::{Op, Status, WordRequest};
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::wait::eventually;

use super::cluster::process::{SECRET, start_child, start_node};
use super::cluster::{BACKENDS, Plan, Random, TIMEOUT, exercise, fresh_name, seed, start};

/// Makes requests and checks their responses.
pub(super) fn make_requests(name: &str, owner: u64, count: u64) {
    let mut client = Client::attach_pipelined(name).unwrap();
    child::write(b"attached");
    exercise(&mut client, owner, 7, count, 40);
    child::write(b"done");
}

/// Begins operations for ever, as many as the node allows.
pub(super) fn load(name: &str) {
    let mut client = Client::<()>::attach_pipelined(name).unwrap();
    child::write(b"attached");
    let mut numbers = Random(u64::from(std::process::id()));
    loop {
        let request =
            WordRequest { value: 1, ..WordRequest::new(Op::Put, 0, (99 << 40) | numbers.below(1000)) };
        if let Err(BeginError::ServerGone(())) = client.begin(request, ()) {
            return;
        }
        client.poll(|(), _| ());
    }
}

#[test]
fn processes_and_threads_attach_to_one_node() {
    for backend in BACKENDS {
        let cluster = start(2, |config| (config.daemons, config.backend) = (2, backend));
        let mut others: Vec<Child> = (0..4)
            .map(|other| {
                let name = cluster[other % 2].name();
                start_child(&format!("exercise {name} {} 10000", other + 1))
            })
            .collect();
        let mut client = Client::attach_pipelined(cluster[0].name()).unwrap();
        exercise(&mut client, 9, 7, 10_000, 40);
        others.iter_mut().for_each(|other| other.expect("attached"));
        others.iter_mut().for_each(|other| other.expect("done"));
        others.into_iter().for_each(Child::join);
    }
}

/// Clients that are killed in the middle of their work free their slots, and do not affect other clients.
#[test]
fn killed_clients_free_their_slots() {
    let mut numbers = Random(seed());
    for backend in BACKENDS {
        // Three clients are allowed: one that stays, and two that come and go.
        let cluster = start(2, |config| {
            (config.daemons, config.backend, config.max_clients) = (2, backend, 3);
        });
        let mut client = Client::attach_pipelined(cluster[0].name()).unwrap();
        for round in 0..8 {
            let mut victims: Vec<Child> =
                (0..2).map(|_| start_child(&format!("load {}", cluster[0].name()))).collect();
            victims.iter_mut().for_each(|victim| victim.expect("attached"));
            // With keys that no round before has used.
            exercise(&mut client, 2 * round + 1, round, 500, 40);
            std::thread::sleep(Duration::from_micros(numbers.below(20_000)));
            victims.iter_mut().for_each(Child::kill);
            exercise(&mut client, 2 * round + 2, round, 500, 40);
            eventually("the dead still have their places", || {
                cluster[0]
                    .counters()
                    .iter()
                    .all(|daemon| daemon.words.connects - daemon.words.disconnects == 1)
            });
        }
    }
}

/// A word key that `rank` owns.
fn key_of(client: &Client<u64>, rank: u32, after: u64) -> u64 {
    (after..).find(|key| client.shard_map().shard_of_word(*key).rank == rank).unwrap()
}

/// When a node is killed, only its keys are unavailable, until it is back.
#[test]
fn killed_node_rejoins_after_restart() {
    let mut numbers = Random(seed());
    for backend in BACKENDS {
        let nodes = 3;
        let plan = Plan::new(nodes);
        let name = fresh_name("rejoin");
        let membership =
            |rank: usize| Membership { secret: Secret::new(SECRET).unwrap(), ..plan.membership(rank) };
        let survivors: Vec<Node> = (0..2)
            .map(|rank| {
                let config = NodeConfig::member(&format!("{name}-{rank}"), rank, nodes);
                Node::join(&NodeConfig { daemons: 2, backend, ..config }, membership(rank as usize)).unwrap()
            })
            .collect();
        let Plan { mut listeners, addresses, .. } = plan;
        // The child process listens itself.
        drop(listeners.pop());
        let start_other = || {
            let mut other = start_node(&name, 2, backend, &addresses);
            other.expect("serving");
            other
        };
        let mut other = start_other();
        survivors.iter().for_each(|node| node.wait_for_peers(TIMEOUT).unwrap());
        let mut client = Client::<u64>::attach_pipelined(survivors[0].name()).unwrap();
        let (here, beside, there) = (key_of(&client, 0, 0), key_of(&client, 1, 0), key_of(&client, 2, 0));
        let mut bytes_there = 0u64;
        while client.shard_map().shard_of_bytes(&bytes_there.to_le_bytes()).rank != 2 {
            bytes_there += 1;
        }
        let bytes_there = bytes_there.to_le_bytes();
        for round in 1..=3u64 {
            client.put(there, round).unwrap();
            client.put_bytes(&bytes_there, b"value").unwrap();
            // Killed in the middle of requests; each of them ends.
            let mut begun = 0;
            while client.begin(WordRequest::new(Op::Get, 0, there), begun).is_ok() {
                begun += 1;
            }
            std::thread::sleep(Duration::from_micros(numbers.below(3) * 100));
            other.kill();
            let (mut ended, mut gone) = (0, 0);
            eventually("an operation never ended", || {
                client.poll(|_, response| {
                    ended += 1;
                    match response.status {
                        Status::Done => assert_eq!(response.value, round),
                        status => {
                            assert_eq!(status, Status::NodeGone);
                            gone += 1;
                        }
                    }
                });
                ended == begun
            });
            println!("{backend:?}: {gone} of {begun} operations were too late");
            eventually("its death goes unnoticed", || client.get(there) == Err(Error::NodeGone { rank: 2 }));
            assert_eq!(client.get_bytes(&bytes_there), Err(Error::NodeGone { rank: 2 }));
            // All else goes on.
            client.put(here, round).unwrap();
            client.put(beside, round).unwrap();
            assert_eq!((client.get(here), client.get(beside)), (Ok(Some(round)), Ok(Some(round))));
            eventually("the survivors do not know", || survivors.iter().all(|node| !node.peers()[2].is_up));
            other = start_other();
            survivors.iter().for_each(|node| node.wait_for_peers(TIMEOUT).unwrap());
            assert_eq!(client.get(there), Ok(None), "it came back empty");
            assert_eq!(client.get_bytes(&bytes_there), Ok(None));
        }
        assert_eq!(survivors[0].peers()[2].times_up, 4);
        other.join();
    }
}

/// All operations of a client end when its node is killed, and the client can reconnect.
#[test]
fn client_can_reconnect_after_its_node_was_killed() {
    for backend in BACKENDS {
        let (Plan { listeners, addresses, .. }, name) = (Plan::new(2), fresh_name("survivor"));
        drop(listeners);
        let mut nodes: Vec<Child> = (0..2).map(|rank| start_node(&name, rank, backend, &addresses)).collect();
        nodes.iter_mut().for_each(|node| node.expect("serving"));
        let mut client = Client::<u64>::attach_pipelined(&format!("{name}-0")).unwrap();
        let mut begun = 0;
        for key in 0..40 {
            begun += u64::from(client.begin(WordRequest::new(Op::Get, 0, key), key).is_ok());
        }
        nodes[0].kill();
        let mut ended = 0;
        eventually("an operation never ended", || {
            client.poll(|_, response| {
                assert!(matches!(response.status, Status::NotFound | Status::NodeGone));
                ended += 1;
            });
            ended == begun
        });
        eventually("the client does not notice", || client.get(1) == Err(Error::ServerGone));
        assert_eq!(client.get_bytes(b"x"), Err(Error::ServerGone));
        assert!(matches!(client.begin(WordRequest::new(Op::Get, 0, 1), 5), Err(BeginError::ServerGone(5))));
        let mut again = start_node(&name, 0, backend, &addresses);
        again.expect("serving");
        client.reconnect().unwrap();
        for key in 0..10 {
            assert_eq!(client.get(key), Ok(None));
        }
        again.join();
    }
}

/// A connection that does not know the secret, or sends invalid bytes, is refused and does not affect the cluster.
#[test]
fn unauthenticated_connections_to_the_control_port_are_refused() {
    let seed = seed();
    let (plan, name) = (Plan::new(3), fresh_name("intruder"));
    let config = |rank| NodeConfig::member(&format!("{name}-{rank}"), rank, 3);
    let nodes: Vec<Node> =
        (0..2).map(|rank| Node::join(&config(rank), plan.membership(rank as usize)).unwrap()).collect();
    // A node with another secret, as rank 2.
    let wrong = Membership { secret: Secret::random().unwrap(), ..plan.membership(2) };
    let intruder = Node::join(&config(2), wrong).unwrap();
    eventually("the node with another secret was not refused", || {
        let problems = intruder.peers();
        problems[0].problem.as_deref().is_some_and(|problem| problem.contains("secret"))
    });
    assert!(nodes[0].refused_connections() > 0);
    // Invalid bytes, and connections that send nothing.
    let mut numbers = Random(seed);
    let mut silent = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(plan.addresses[0]).unwrap();
        let garbage: Vec<u8> = (0..numbers.below(300)).map(|_| numbers.next() as u8).collect();
        // The node may close the connection in the middle.
        stream.write_all(&garbage).ok();
        if garbage.len() < 20 {
            silent.push(stream);
        }
    }
    drop(intruder);
    let third = Node::join(&config(2), plan.membership(2)).unwrap();
    third.wait_for_peers(TIMEOUT).unwrap();
    nodes.iter().for_each(|node| node.wait_for_peers(TIMEOUT).unwrap());
    let mut client = Client::attach_pipelined(third.name()).unwrap();
    exercise(&mut client, 3, seed, 2000, 40);
    drop(silent);
}

/// Prints how much of a core an idle cluster uses, in a separate process. Machines differ.
#[test]
fn idle_node_uses_little_processor_time() {
    let mut other = start_child("idle");
    println!("{}", other.read_text());
    other.join();
}

pub(super) fn idle() {
    let cluster = start(2, |config| config.daemons = 2);
    let mut client = Client::attach(cluster[0].name()).unwrap();
    for key in 0..1000 {
        client.put(key, key).unwrap();
    }
    std::thread::sleep(Duration::from_millis(300));
    let (used, begun) = (processor_time(), Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    let share = (processor_time() - used).as_secs_f64() / begun.elapsed().as_secs_f64();
    let report = format!("idle: {:.2} % of a core for two nodes with two daemons each", share * 100.0);
    child::write(report.as_bytes());
    let sleeps: u64 = cluster[0].counters().iter().map(|daemon| daemon.activity.sleeps).sum();
    assert!(sleeps > 20, "it does not sleep");
    assert_eq!(client.get(7), Ok(Some(7)));
}

/// Processor time of this process so far.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap();
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let on_core = |text: &str| text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0u64);
    let sum: u64 = threads
        .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok())
        .map(|text| on_core(&text))
        .sum();
    Duration::from_nanos(sum.max(on_core(&stat)))
}
