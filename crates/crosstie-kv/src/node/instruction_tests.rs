//! How many instructions a request for an 8-byte key takes, of the client and of all daemons on its way, with an optimized build:
//! `cargo test --release -p crosstie-kv --lib instruction`. As in `crates/crosstie/tests/budget`, one thread does all the work, and limits
//! are a quarter above what was reached.

use crosstie::delegation;
use crosstie::device::{Device, software};
use crosstie_testkit::{callgrind, child};

use super::commands::{ConnectionCommand, ConnectionEvent};
use super::config::NodeConfig;
use super::connections::Connections;
use super::pass_tests::{RingClient, WordClient, shard_server};
use super::ring::RingServer;
use super::shard_server::ShardServer;
use super::transport::{NoTransport, Transport};
use crate::Backend;
use crate::service_names;
use crate::sharding::ShardId;
use crate::wire::{Op, Status, WordRequest};

const REQUESTS: u32 = 3200;
const DEPTH: usize = 16;
/// The keys that requests use: each is put, and then read.
const KEYS: usize = 512;

#[test]
fn requests_stay_within_their_instruction_limits() {
    let Some(task) = child::task() else {
        return callgrind::assert_limits(
            requests_stay_within_their_instruction_limits,
            &[
                ("one node", REQUESTS, 430),
                ("two nodes, Meta", REQUESTS, 2056),
                ("two nodes, Delegation", REQUESTS, 2096),
            ],
        );
    };
    let mut work: Box<dyn FnMut()> = match task.as_str() {
        "one node" => one_node(),
        "two nodes, Meta" => two_nodes(Backend::Meta),
        _ => two_nodes(Backend::Delegation),
    };
    work();
    callgrind::measure(&mut work);
}

fn config(rank: u32, nodes: u32, backend: Backend) -> NodeConfig {
    let name = format!("kv-instructions-{rank}-{}", std::process::id());
    NodeConfig { backend, queue_depth: DEPTH, ..NodeConfig::member(&name, rank, nodes) }
}

/// Keys that the rank owns.
fn keys(server: &ShardServer, rank: u32) -> Vec<u64> {
    (0..).filter(|key| server.shard_map.shard_of_word(*key).rank == rank).take(KEYS).collect()
}

fn request(rank: u32, keys: &[u64], number: u64) -> WordRequest {
    let key = keys[number as usize / 2 % KEYS];
    match number % 2 {
        0 => WordRequest { value: number, ..WordRequest::new(Op::Put, rank, key) },
        _ => WordRequest::new(Op::Get, rank, key),
    }
}

/// Makes [`REQUESTS`] requests with `client`, [`DEPTH`] at a time; `serve` is what the daemons do meanwhile.
macro_rules! make_requests {
    ($client:expr, $rank:expr, $keys:expr, $serve:expr) => {{
        let mut begun = 0;
        while begun < u64::from(REQUESTS) || $client.in_flight() > 0 {
            while begun < u64::from(REQUESTS) && $client.in_flight() < DEPTH {
                $client.call(&request($rank, $keys, begun), begun).unwrap();
                begun += 1;
            }
            $serve;
            // A poll ends a quarter of the requests. After two of them, batches between nodes have about half of the requests, as those of
            // several clients have.
            for _ in 0..2 {
                let polled = $client.poll(|_, response| {
                    assert!(response.status == Status::Done, "{response:?}");
                });
                polled.unwrap();
            }
        }
    }};
}

fn one_node() -> Box<dyn FnMut()> {
    let config = config(0, 1, Backend::Delegation);
    let mut server = shard_server(&config);
    let mut client = WordClient::connect(&config.name).unwrap();
    let keys = keys(&server, 0);
    Box::new(move || {
        make_requests!(client, 0, &keys, server.serve_clients(&mut NoTransport));
    })
}

/// A daemon with its connections, as in a cluster of two nodes with one daemon each.
struct Member {
    server: ShardServer,
    connections: Connections<RingServer>,
}

impl Member {
    fn new(config: &NodeConfig, rank: u32) -> Member {
        let mut server = shard_server(config);
        server.id = ShardId { rank, daemon: 0 };
        let ring = delegation::Server::create(&service_names::ring(&config.name, 0), &config.ring()).unwrap();
        let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        let connections = Connections::new(device, config.nodes, config.queues.connection, ring).unwrap();
        Member { server, connections }
    }

    fn execute(&mut self, command: ConnectionCommand) -> ConnectionEvent {
        match self.connections.execute_command(command, &mut self.server) {
            Some(ConnectionEvent::Failed { why, .. }) => panic!("{why}"),
            event => event.expect("the command has an outcome"),
        }
    }

    /// One pass of the daemon's loop.
    fn pass(&mut self) {
        self.connections.poll(&mut self.server);
        self.server.serve_clients(&mut self.connections);
    }
}

fn two_nodes(backend: Backend) -> Box<dyn FnMut()> {
    let configs = [config(0, 2, backend), config(1, 2, backend)];
    let [mut here, mut there] = [Member::new(&configs[0], 0), Member::new(&configs[1], 1)];
    let open = |member: &mut Member, rank| match member.execute(ConnectionCommand::Open { rank, epoch: 1 }) {
        ConnectionEvent::Opened { address, .. } => address,
        other => panic!("{other:?}"),
    };
    let [ours, theirs] = [open(&mut here, 1), open(&mut there, 0)];
    here.execute(ConnectionCommand::Connect { rank: 1, epoch: 1, address: theirs });
    there.execute(ConnectionCommand::Connect { rank: 0, epoch: 1, address: ours });
    here.execute(ConnectionCommand::Enable { rank: 1, epoch: 1 });
    there.execute(ConnectionCommand::Enable { rank: 0, epoch: 1 });
    let keys = keys(&here.server, 1);
    // A request is taken in the first pass of a daemon, and answered in the next one.
    let mut serve = move || {
        here.pass();
        there.pass();
        there.pass();
        here.pass();
    };
    match backend {
        Backend::Delegation => {
            let mut client = RingClient::connect(&service_names::ring(&configs[0].name, 0)).unwrap();
            Box::new(move || make_requests!(client, 1, &keys, serve()))
        }
        Backend::Meta => {
            let mut client = WordClient::connect(&configs[0].name).unwrap();
            Box::new(move || make_requests!(client, 1, &keys, serve()))
        }
    }
}
