//! The memory of nodes under load, compared with their bound.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crosstie_kv::client::{Client, Error};
use crosstie_kv::node::{Node, NodeConfig};
use crosstie_kv::wire::MAX_VALUE;
use crosstie_testkit::child;

use super::cluster::{BACKENDS, Random, seed, start};

const NODES: u32 = 2;
/// Clients of each node; it allows no more.
const CLIENTS: usize = 4;
/// Bytes by which a swap of two of the longest values exceeds the limit of a request.
const KEY_AND_HEAD: usize = 64;
/// Rounds of each client.
const ROUNDS: u64 = 150;
/// The most memory that a client itself takes: two values to swap, and a response.
const CLIENT_SIDE: u64 = 4 << 20;

/// With full stores and the longest values between all nodes, the nodes take less than their bound, and more than half of it, so the
/// bound is meaningful.
#[test]
fn nodes_under_load_stay_below_their_bound() {
    if child::run_alone(nodes_under_load_stay_below_their_bound) {
        return;
    }
    let seed = seed();
    for backend in BACKENDS {
        let before = resident();
        let configure = |config: &mut NodeConfig| {
            (config.backend, config.daemons) = (backend, 2);
            (config.max_clients, config.memory_limit) = (CLIENTS, 128 << 20);
            // These clients ask for one thing at a time: rooms for more would stay empty.
            config.queue_depth = 2;
        };
        let cluster = start(NODES, configure);
        let bound: u64 = cluster.iter().map(|node| node.config().memory_bound().total()).sum();
        let over = AtomicBool::new(false);
        let highest = std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut highest = 0;
                while !over.load(Relaxed) {
                    highest = resident().max(highest);
                    std::thread::sleep(Duration::from_millis(20));
                }
                highest
            });
            let clients: Vec<_> = (0..NODES as usize * CLIENTS)
                .map(|number| {
                    let node = &cluster[number % NODES as usize];
                    scope.spawn(move || load(node, seed.wrapping_add(number as u64)))
                })
                .collect();
            let ended: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
            over.store(true, Relaxed);
            let refused: u64 = ended.into_iter().map(Result::unwrap).sum();
            assert!(refused > 0, "the stores are not full");
            watch.join().unwrap()
        });
        let used = highest.saturating_sub(before);
        let parts = cluster[0].config().memory_bound();
        println!("{backend:?}: {} MiB of {} MiB, {parts:?} each", used >> 20, bound >> 20);
        let clients = u64::from(NODES) * CLIENTS as u64 * CLIENT_SIDE;
        assert!(used <= bound + clients, "{used} bytes, {bound} at most and {clients} for the clients");
        assert!(used > bound / 2, "{used} bytes, and at most {bound}: that says little");
        cluster.into_iter().for_each(|node| node.stop().unwrap());
    }
}

/// Puts, swaps and gets long values, with words in between. Returns how often there was no memory.
fn load(node: &Node, seed: u64) -> u64 {
    let mut client = Client::attach(node.name()).unwrap();
    let mut numbers = Random(seed);
    let value = vec![7; MAX_VALUE];
    let mut refused = 0;
    for round in 0..ROUNDS {
        let key = numbers.below(400).to_le_bytes();
        let word = numbers.next();
        let done = match numbers.below(6) {
            0..3 => client.put_bytes(&key, &value),
            3 => client.compare_and_swap_bytes(&key, &value, &value[KEY_AND_HEAD..]).map(drop),
            _ => client.get_bytes(&key).map(drop),
        };
        match done.and_then(|()| client.put(word, round)) {
            Ok(()) => {}
            Err(Error::OutOfMemory { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    refused
}

/// Resident bytes of this process. A page that is mapped several times counts once.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux says what a process uses");
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("there is a line for it");
    1024 * line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("it is a number")
}
