//! Two nodes and clients that poll without ever waiting, or that wait: operations per second, on as many cores as there are.
//!
//! A client that polls in a loop takes a core from the daemons when there are more threads than cores. This example shows what that
//! costs, for each way in which a daemon can wait.
//!
//!     cargo run --release -p crosstie-kv --example spinning_clients
use std::error::Error;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crosstie::WaitStrategy;
use crosstie::bootstrap::Secret;
use crosstie_kv::Backend;
use crosstie_kv::client::Client;
use crosstie_kv::node::{Membership, Node, NodeConfig};
use crosstie_kv::wire::{Op, WordRequest};

const CLIENTS: u64 = 3;
const DEPTH: usize = 64;
const TIME: Duration = Duration::from_secs(2);

fn main() -> Result<(), Box<dyn Error>> {
    println!(
        "two nodes, {CLIENTS} clients, {DEPTH} operations in flight each, {} cores",
        std::thread::available_parallelism()?
    );
    println!("{:<12}{:<10}{:>16}{:>16}", "backend", "daemons", "clients poll", "clients wait");
    for backend in [Backend::Meta, Backend::Delegation] {
        for (strategy, name) in
            [(WaitStrategy::Adaptive, "adaptive"), (WaitStrategy::Park, "park"), (WaitStrategy::Spin, "spin")]
        {
            let nodes = start(backend, strategy, name)?;
            let rates = [measure(&nodes, false), measure(&nodes, true)];
            println!("{:<12}{name:<10}{:>12.0} k/s{:>12.0} k/s", format!("{backend:?}"), rates[0], rates[1]);
        }
    }
    Ok(())
}

fn start(backend: Backend, strategy: WaitStrategy, name: &str) -> Result<Vec<Node>, Box<dyn Error>> {
    let listeners = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
    let addresses = [listeners[0].local_addr()?, listeners[1].local_addr()?];
    let secret = Secret::random()?;
    let nodes = listeners.into_iter().zip(0..).map(|(listener, rank)| {
        let name = format!("spinning-{}-{backend:?}-{name}-{rank}", std::process::id());
        let mut config = NodeConfig::member(&name, rank, 2);
        config.backend = backend;
        config.wait_strategy = strategy;
        config.memory_limit = 64 << 20;
        Node::join(&config, Membership { listener, addresses: addresses.to_vec(), secret: secret.clone() })
    });
    let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
    nodes.iter().try_for_each(|node| node.wait_for_peers(Duration::from_secs(10)).map(drop))?;
    Ok(nodes)
}

/// Thousands of operations per second.
fn measure(nodes: &[Node], wait: bool) -> f64 {
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (stop, count) = (&stop, &count);
            let node = &nodes[number as usize % nodes.len()];
            scope.spawn(move || {
                let mut client = Client::<u64>::attach_pipelined(node.name()).expect("the node is there");
                let mut key = number << 32;
                while !stop.load(Relaxed) {
                    while client.in_flight() < DEPTH {
                        key += 1;
                        let request = WordRequest { value: key, ..WordRequest::new(Op::Put, 0, key % 4096) };
                        if client.begin(request, key).is_err() {
                            break;
                        }
                    }
                    if wait {
                        client.wait(None);
                    }
                    let ended = client.poll(|_, _| ());
                    count.fetch_add(ended as u64, Relaxed);
                }
            });
        }
        std::thread::sleep(TIME);
        stop.store(true, Relaxed);
    });
    count.load(Relaxed) as f64 / begin.elapsed().as_secs_f64() / 1e3
}
