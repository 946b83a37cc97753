//! Clusters in one process: both backends respond correctly, with large queues and with tiny ones.

use std::time::Instant;

use crosstie::copyrpc::ConnectionConfig;
use crosstie_kv::Backend;
use crosstie_kv::client::{AttachError, Client, Error, SwapOutcome};
use crosstie_kv::node::{Node, NodeConfig, QueueSizes, StartError};
use crosstie_kv::wire::{MAX_KEY, MAX_REQUEST, MAX_VALUE};

use super::cluster::{BACKENDS, Plan, TIMEOUT, exercise_all, fresh_name, start};

#[test]
fn one_node_responds_correctly() {
    for daemons in 1..=3 {
        let cluster = start(1, |config| config.daemons = daemons);
        exercise_all(&cluster, 3, 20_000, 50);
    }
}

#[test]
fn several_nodes_respond_correctly() {
    for backend in BACKENDS {
        for (nodes, daemons) in [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)] {
            let begun = Instant::now();
            let cluster = start(nodes, |config| (config.daemons, config.backend) = (daemons, backend));
            exercise_all(&cluster, 2, 5_000, 50);
            println!("{backend:?}, {nodes} nodes, {daemons} daemons: {:?}", begun.elapsed());
        }
    }
}

/// With tiny queues, requests wait in all backlogs, and none is lost.
#[test]
fn no_request_is_lost_with_tiny_queues() {
    let connection = ConnectionConfig {
        ring: 512,
        credit: 256,
        pending_calls: 2,
        bulk: MAX_REQUEST,
        ..ConnectionConfig::default()
    };
    let queues = QueueSizes { forward: 1, ring: 2, connection };
    for backend in BACKENDS {
        for (nodes, daemons) in [(2, 2), (3, 2), (3, 3)] {
            let begun = Instant::now();
            let cluster = start(nodes, |config| {
                (config.daemons, config.backend, config.queues, config.queue_depth) =
                    (daemons, backend, queues, 16);
            });
            exercise_all(&cluster, 3, 20_000, 64);
            println!("{backend:?}, {nodes} nodes, {daemons} daemons: {:?}", begun.elapsed());
            let waited: u64 =
                cluster.iter().flat_map(Node::counters).map(|counters| counters.activity.backlogged).sum();
            assert!(waited > 0, "no request had to wait");
        }
    }
}

/// Many clients increment the same words with compare-and-swap: every increment counts once.
#[test]
fn concurrent_increments_of_all_nodes_add_up() {
    const EACH: u64 = 300;
    for backend in BACKENDS {
        let cluster = start(3, |config| (config.daemons, config.backend) = (2, backend));
        std::thread::scope(|scope| {
            for node in &cluster {
                scope.spawn(|| {
                    let mut client = Client::attach(node.name()).unwrap();
                    for key in 0..4 {
                        client.insert(key, 0).unwrap();
                    }
                    for turn in 0..EACH {
                        let (key, mut seen) = (turn % 4, 0);
                        while let SwapOutcome::Mismatch(current) =
                            client.compare_and_swap(key, seen, seen + 1).unwrap()
                        {
                            seen = current;
                        }
                    }
                });
            }
        });
        let mut client = Client::attach(cluster[1].name()).unwrap();
        let total: u64 = (0..4).map(|key| client.get(key).unwrap().unwrap()).sum();
        assert_eq!(total, 3 * EACH);
    }
}

#[test]
fn byte_strings_are_readable_through_every_node() {
    for backend in BACKENDS {
        for nodes in 1..=3 {
            let begun = Instant::now();
            let cluster = start(nodes, |config| (config.daemons, config.backend) = (3, backend));
            let mut writer = Client::attach(cluster[0].name()).unwrap();
            let mut reader = Client::attach(cluster[nodes as usize - 1].name()).unwrap();
            for number in 0..60usize {
                let key = vec![number as u8; number % 7 * 40 + 1];
                let value: Vec<u8> = (0..number * 700).map(|byte| (byte % 251) as u8).collect();
                assert_eq!(reader.get_bytes(&key).unwrap(), None);
                writer.put_bytes(&key, &value).unwrap();
                assert_eq!(reader.get_bytes(&key).unwrap().as_ref(), Some(&value));
                assert_eq!(reader.insert_bytes(&key, b"other").unwrap().as_ref(), Some(&value));
                assert_eq!(
                    writer.compare_and_swap_bytes(&key, b"none", b"").unwrap(),
                    SwapOutcome::Mismatch(value.clone())
                );
                assert_eq!(writer.compare_and_swap_bytes(&key, &value, b"new").unwrap(), SwapOutcome::Done);
                assert!(reader.delete_bytes(&key).unwrap());
                assert!(!writer.delete_bytes(&key).unwrap());
            }
            // As long as they may be, whichever node has them.
            let value: Vec<u8> = (0..MAX_VALUE).map(|byte| (byte % 253) as u8).collect();
            for key in (0..6u8).map(|number| vec![number; MAX_KEY]) {
                writer.put_bytes(&key, &value).unwrap();
                assert!(reader.get_bytes(&key).unwrap().as_ref() == Some(&value));
            }
            let served: u64 = (0..nodes)
                .flat_map(|rank| (0..3).map(move |daemon| (rank, daemon)))
                .map(|(rank, daemon)| reader.stats(rank, daemon).unwrap())
                .map(|stats| stats.deletes)
                .sum();
            assert_eq!(served, 120);
            println!("{backend:?}, {nodes} nodes: {:?}", begun.elapsed());
        }
    }
}

#[test]
fn too_long_byte_strings_are_errors() {
    let cluster = start(1, |_| {});
    let mut client = Client::attach(cluster[0].name()).unwrap();
    let (key, value) = (vec![1; MAX_KEY + 1], vec![2; MAX_VALUE + 1]);
    client.put_bytes(&key[1..], &value[1..]).unwrap();
    assert_eq!(client.get_bytes(&key[1..]).unwrap().as_deref(), Some(&value[1..]));
    assert!(matches!(client.put_bytes(&key, b""), Err(Error::TooLong(_))));
    assert!(matches!(client.put_bytes(b"", &value), Err(Error::TooLong(_))));
    client.put_bytes(b"", b"also a key").unwrap();
    assert_eq!(client.get_bytes(b"").unwrap().as_deref(), Some(&b"also a key"[..]));
}

#[test]
fn put_beyond_the_memory_limit_fails() {
    let cluster = start(2, |config| config.memory_limit = 1 << 20);
    let mut client = Client::attach(cluster[0].name()).unwrap();
    let refused = (0..200_000u64).find_map(|key| client.put(key, key).err()).unwrap();
    assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
    assert_eq!(client.get(0).unwrap(), Some(0), "what is there stays there");
}

#[test]
fn second_node_with_the_same_name_is_refused() {
    let config = NodeConfig::single(&fresh_name("taken"));
    let node = Node::start(&config).unwrap();
    match Node::start(&config) {
        Err(StartError::NameTaken { name }) => assert_eq!(name, config.name),
        other => panic!("{other:?}"),
    }
    // The first node is not affected.
    let mut client = Client::attach(&config.name).unwrap();
    client.put(1, 2).unwrap();
    node.stop().unwrap();
    assert_eq!(client.put(1, 2), Err(Error::ServerGone));
    assert!(matches!(Client::attach(&config.name), Err(AttachError::NoNode { .. })));
    let again = Node::start(&config).unwrap();
    client.reconnect().unwrap();
    assert_eq!(client.get(1).unwrap(), None);
    drop(again);
}

#[test]
fn invalid_configurations_are_refused() {
    let good = NodeConfig::single(&fresh_name("config"));
    for (bad, word) in [
        (NodeConfig { daemons: 0, ..good.clone() }, "daemons"),
        (NodeConfig { nodes: 0, ..good.clone() }, "nodes"),
        (NodeConfig { rank: 1, ..good.clone() }, "rank 1"),
        (NodeConfig { queue_depth: 5000, ..good.clone() }, "queue_depth"),
        (NodeConfig { name: "x".repeat(60), ..good.clone() }, "name"),
        (NodeConfig { name: "no spaces".to_owned(), ..good.clone() }, "no spaces"),
        (NodeConfig { cores: Some(vec![0, 1]), ..good.clone() }, "2 cores"),
        (NodeConfig { cores: Some(vec![1023]), ..good.clone() }, "core 1023"),
        (NodeConfig { nodes: 2, ..good.clone() }, "1 addresses"),
    ] {
        let error = Node::start(&bad).expect_err(word).to_string();
        assert!(error.contains(word), "{error}");
    }
    let plan = Plan::new(1);
    drop(Node::join(&good, plan.membership(0)).unwrap());
}

#[test]
fn node_of_another_cluster_is_told_the_reason() {
    let (plan, name) = (Plan::new(2), fresh_name("other"));
    let first = Node::join(&NodeConfig::member(&format!("{name}-0"), 0, 2), plan.membership(0)).unwrap();
    let config = NodeConfig { daemons: 2, ..NodeConfig::member(&format!("{name}-1"), 1, 2) };
    let second = Node::join(&config, plan.membership(1)).unwrap();
    let begun = Instant::now();
    for node in [&first, &second] {
        loop {
            let peers = node.peers();
            let problem = peers.iter().find_map(|peer| peer.problem.as_deref()).unwrap_or_default();
            if problem.contains("2 daemons") && problem.contains("start all nodes with the same options") {
                break;
            }
            assert!(begun.elapsed() < TIMEOUT, "{peers:?}");
            std::thread::yield_now();
        }
    }
    drop(second);
    let config = NodeConfig { backend: Backend::Meta, daemons: 1, ..config };
    let second = Node::join(&config, plan.membership(1)).unwrap();
    let error = second.wait_for_peers(std::time::Duration::from_millis(300)).unwrap_err();
    assert_eq!(error.0[0].rank, 0);
}
