//! A store of two nodes, each on a host of its own.
//!
//! In a guest of `cargo xtask vm --hosts 2` this process is one of the nodes, on Soft-RoCE, and the same program in the other guest is the
//! other. Anywhere else both are threads here, on the software device.

mod cluster;

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use cluster::{BACKENDS, PATIENCE, Plan, fresh_name};
use crosstie::bootstrap::Secret;
use crosstie::device::DeviceSpec;
use crosstie_kv::client::{Client, Error};
use crosstie_kv::node::{Backend, Membership, Node, NodeConfig};

/// Keys of each kind that each node puts.
const COUNT: u64 = 25;
/// Plus a rank: all of its keys are there; it has seen all of the other's.
const PUT: u64 = 1 << 40;
const SEEN: u64 = 2 << 40;

#[test]
fn keys_of_both_hosts_are_seen_from_both() {
    let variable = |name| std::env::var(name).ok();
    if let (Some(host @ ("0" | "1")), Some(_)) = (variable("HOST").as_deref(), variable("PEER")) {
        let rank = u32::from(host == "1");
        for (port, backend) in (7000..).zip(BACKENDS) {
            let addresses: Vec<SocketAddr> =
                (1..=2).map(|last| SocketAddr::from(([10, 77, 0, last], port))).collect();
            let listener = TcpListener::bind(addresses[rank as usize]).unwrap();
            let secret = Secret::new("a secret of these two guests").unwrap();
            let membership = Membership { listener, addresses, secret };
            play(rank, backend, "verbs:r0".parse().unwrap(), membership);
        }
        return;
    }
    for backend in BACKENDS {
        let plan = Plan::new(2);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let membership = plan.membership(rank as usize);
                scope.spawn(move || play(rank, backend, DeviceSpec::Software, membership));
            }
        });
    }
}

/// One of the two.
fn play(rank: u32, backend: Backend, device: DeviceSpec, membership: Membership) {
    let name = fresh_name("host");
    let config = NodeConfig { daemons: 2, backend, device, ..NodeConfig::member(&name, rank, 2) };
    let node = Node::join(&config, membership).unwrap();
    node.wait_for_peers(PATIENCE).unwrap();
    let mut client = Client::attach(&name).unwrap();
    let (ours, theirs) = (u64::from(rank), u64::from(1 - rank));
    let begun = Instant::now();
    for at in 0..COUNT {
        client.put(number(ours, at), at).unwrap();
        client.put_bytes(&number(ours, at).to_le_bytes(), &value(ours, at)).unwrap();
    }
    client.put(PUT + ours, 1).unwrap();
    until(|| client.get(PUT + theirs).unwrap() == Some(1));
    let mut remote = 0;
    for at in 0..COUNT {
        assert_eq!(client.get(number(theirs, at)).unwrap(), Some(at));
        let bytes = client.get_bytes(&number(theirs, at).to_le_bytes()).unwrap();
        assert!(bytes == Some(value(theirs, at)), "{at}: other bytes came back");
        remote += u64::from(client.placement().of_word(number(theirs, at)).rank != rank);
    }
    assert!(remote > 0 && remote < COUNT, "keys are on both");
    println!("{backend:?}, rank {rank}: {} operations in {:?}", 4 * COUNT, begun.elapsed());
    client.put(SEEN + ours, 1).unwrap();
    // Who has seen that we have seen may go.
    until(|| matches!(client.get(SEEN + theirs), Ok(Some(1)) | Err(Error::NodeGone { .. })));
    drop(client);
    node.stop().unwrap();
}

fn number(rank: u64, at: u64) -> u64 {
    rank << 20 | at
}

/// From no byte to a mebibyte.
fn value(rank: u64, at: u64) -> Vec<u8> {
    let len = if at == COUNT - 1 { 1 << 20 } else { at * at };
    (0..len).map(|byte| (byte * 7 + at + rank) as u8).collect()
}

fn until(mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "the other host is silent");
        std::thread::sleep(Duration::from_millis(5));
    }
}
