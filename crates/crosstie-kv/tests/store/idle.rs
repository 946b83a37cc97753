//! A sleeping daemon is woken by whatever arrives for it: requests of clients, of other daemons and of other nodes.
//!
//! The tests measure no time. A daemon counts how often it slept, and how many of these sleeps a notification ended. A request that
//! nobody announces is served, too, but only after the sleep has run into its timeout; then no sleep counts as woken.

use std::time::{Duration, Instant};

use crosstie_kv::Backend;
use crosstie_kv::client::Client;
use crosstie_kv::node::{DaemonActivity, Node};
use crosstie_kv::sharding::ShardId;

use super::cluster::{BACKENDS, TIMEOUT, start};

/// Requests of each kind. A daemon may just check its connections, and so not sleep, when a request comes: more than half of the
/// requests must wake it.
const REQUESTS: u32 = 10;

fn activity(node: &Node, daemon: u32) -> DaemonActivity {
    node.counters()[daemon as usize].activity
}

fn activities(daemons: &[(&Node, u32)]) -> Vec<DaemonActivity> {
    daemons.iter().map(|&(node, daemon)| activity(node, daemon)).collect()
}

/// Waits until all daemons are asleep, and have published what they did before.
///
/// A daemon counts a sleep when it begins, and publishes its counters before a sleep at the latest 50 ms after the last time. So what
/// is published with the third sleep from now on includes all that happened before this call.
fn wait_until_asleep(daemons: &[(&Node, u32)]) {
    let (start, before) = (Instant::now(), activities(daemons));
    while activities(daemons).iter().zip(&before).any(|(now, before)| now.sleeps < before.sleeps + 3) {
        assert!(start.elapsed() < TIMEOUT, "a daemon does not sleep: {:?}", activities(daemons));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Makes requests one at a time, each after the daemons have gone to sleep. Asserts that most of them wake each of the daemons.
fn assert_wakes(what: &str, daemons: &[(&Node, u32)], mut request: impl FnMut()) {
    // The first request may have to connect a lane.
    request();
    let mut woken = vec![0; daemons.len()];
    wait_until_asleep(daemons);
    for _ in 0..REQUESTS {
        let before = activities(daemons);
        request();
        wait_until_asleep(daemons);
        for ((count, before), after) in woken.iter_mut().zip(before).zip(activities(daemons)) {
            *count += u32::from(after.wakeups > before.wakeups);
        }
    }
    println!("{what}: {woken:?} of {REQUESTS} requests woke the daemons, {:?}", activities(daemons));
    for count in woken {
        assert!(count > REQUESTS / 2, "{what}: only {count} of {REQUESTS} requests woke a daemon");
    }
}

fn word_of(client: &Client, shard: ShardId) -> u64 {
    (1..).find(|key| client.shard_map().shard_of_word(*key) == shard).unwrap()
}

fn string_of(client: &Client, shard: ShardId) -> [u8; 8] {
    let is_there = |key: &u64| client.shard_map().shard_of_bytes(&key.to_le_bytes()) == shard;
    (1u64..).find(is_there).unwrap().to_le_bytes()
}

#[test]
fn local_requests_wake_a_sleeping_daemon() {
    let cluster = start(1, |config| config.daemons = 2);
    let mut client = Client::attach(cluster[0].name()).unwrap();
    for daemon in 0..2 {
        let shard = ShardId { rank: 0, daemon };
        let (word, string) = (word_of(&client, shard), string_of(&client, shard));
        let node = &cluster[0];
        assert_wakes("8-byte key", &[(node, daemon)], || client.put(word, 1).unwrap());
        assert_wakes("byte string", &[(node, daemon)], || client.put_bytes(&string, b"1").unwrap());
    }
}

/// In each backend: through the ring or the lanes into daemons of this node, from there to the daemon of the other node.
#[test]
fn remote_requests_wake_sleeping_daemons_of_both_nodes() {
    for backend in BACKENDS {
        let cluster = start(2, |config| (config.daemons, config.backend) = (2, backend));
        let mut client = Client::attach(cluster[0].name()).unwrap();
        for daemon in 0..2 {
            let shard = ShardId { rank: 1, daemon };
            let (word, string) = (word_of(&client, shard), string_of(&client, shard));
            let woken = [(&cluster[0], daemon), (&cluster[1], daemon)];
            let name = |kind| format!("{backend:?}, {kind} of another node's daemon {daemon}");
            assert_wakes(&name("8-byte key"), &woken, || client.put(word, 1).unwrap());
            assert_wakes(&name("byte string"), &woken, || client.put_bytes(&string, b"1").unwrap());
        }
    }
}

/// A client reaches the daemons that are not its home through the lanes between the daemons.
#[test]
fn requests_that_daemons_forward_wake_the_daemon_with_the_connection() {
    let cluster = start(3, |config| (config.daemons, config.backend) = (2, Backend::Meta));
    // Clients get the daemons as their homes in turn.
    let mut clients = [(); 2].map(|()| Client::attach(cluster[0].name()).unwrap());
    for rank in 1..3 {
        let daemon = rank % 2;
        for client in &mut clients {
            let word = word_of(client, ShardId { rank, daemon });
            let forwarded =
                |node: &Node| node.counters().iter().map(|daemon| daemon.activity.forwarded).sum::<u64>();
            let before = forwarded(&cluster[0]);
            assert_wakes(&format!("rank {rank}"), &[(&cluster[0], daemon)], || client.put(word, 1).unwrap());
            println!("forwarded: {}", forwarded(&cluster[0]) - before);
        }
    }
    let forwarded: u64 = cluster[0].counters().iter().map(|daemon| daemon.activity.forwarded).sum();
    assert!(forwarded > u64::from(REQUESTS), "one of the clients goes through the other daemon");
}
