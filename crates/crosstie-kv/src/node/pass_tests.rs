//! A pass of a daemon's loop ends, however much others send.

use crosstie::device::DeviceSpec;
use crosstie::{delegation, ipc};

use super::bytes_server::BytesServer;
use super::config::NodeConfig;
use super::connections::Connections;
use super::counters::DaemonActivity;
use super::ring::RingServer;
use super::shard_server::{MAX_PER_PASS, ShardServer};
use super::start;
use super::transport::{NoTransport, Transport};
use super::{QueueSizes, forward};
use crate::Backend;
use crate::sharding::{ShardId, ShardMap};
use crate::store::Shard;
use crate::wire::{Op, Status, WordRequest, WordResponse};

const CLIENTS: usize = 40;
const DEPTH: usize = 32;
const REQUESTS: usize = CLIENTS * DEPTH;

pub(super) type WordClient = ipc::Client<WordRequest, WordResponse, u64>;
pub(super) type RingClient = delegation::Client<WordRequest, WordResponse, u64>;

fn config(what: &str, nodes: u32) -> NodeConfig {
    let name = format!("kv-pass-{what}-{}", std::process::id());
    let queues = QueueSizes { ring: 2 * REQUESTS, ..QueueSizes::default() };
    NodeConfig {
        backend: Backend::Delegation,
        queue_depth: DEPTH,
        queues,
        ..NodeConfig::member(&name, 0, nodes)
    }
}

pub(super) fn shard_server(config: &NodeConfig) -> ShardServer {
    let words = ipc::Server::create(&config.name, &config.words_lanes()).unwrap();
    let bytes = ipc::Server::create(&format!("{}-bytes", config.name), &config.bytes_lanes()).unwrap();
    let info = start::node_info(config, 1);
    ShardServer {
        id: ShardId { rank: 0, daemon: 0 },
        shard_map: ShardMap::new(config.nodes, 1).unwrap(),
        words,
        has_more_clients: false,
        shard: Shard::new(1 << 20),
        forwarder: forward::create(1, 4).unwrap().remove(0),
        bytes: BytesServer::new(bytes, info),
        activity: DaemonActivity::default(),
    }
}

#[test]
fn pass_takes_a_bounded_number_of_requests_from_clients_and_goes_on_with_the_next_client() {
    const { assert!(REQUESTS > MAX_PER_PASS) };
    let config = config("clients", 1);
    let mut server = shard_server(&config);
    let mut clients: Vec<WordClient> =
        (0..CLIENTS).map(|_| WordClient::connect(&config.name).unwrap()).collect();
    while server.words.clients() < CLIENTS {
        assert_eq!(server.serve_clients(&mut NoTransport), 0);
    }
    for client in &mut clients {
        (0..DEPTH as u64).for_each(|key| client.call(&WordRequest::new(Op::Get, 0, key), key).unwrap());
    }
    // Clients that were idle are not checked in every pass.
    let mut taken = 0;
    while taken == 0 {
        taken = server.serve_clients(&mut NoTransport);
    }
    assert!(taken <= MAX_PER_PASS, "{taken} requests in one pass");
    // Clients that have responses send the next requests at once, and are served after those that still wait.
    let mut waiting = 0;
    for client in &mut clients {
        if client.poll(|_, _| ()).unwrap() == 0 {
            waiting += 1;
        } else {
            (0..)
                .take_while(|key| client.call(&WordRequest::new(Op::Get, 0, *key), *key).is_ok())
                .for_each(drop);
        }
    }
    assert!(waiting > 0);
    for _ in 0..100 {
        server.serve_clients(&mut NoTransport);
    }
    for client in &mut clients {
        assert!(client.poll(|_, response| assert_eq!(response.status, Status::NotFound)).unwrap() > 0);
    }
}

/// Requests for a rank that is down are answered in the loop that takes them.
#[test]
fn pass_takes_a_bounded_number_of_requests_from_the_ring() {
    let config = config("ring", 2);
    let mut server = shard_server(&config);
    let name = format!("{}-ring", config.name);
    let ring: RingServer = delegation::Server::create(&name, &config.ring()).unwrap();
    let mut connections =
        Connections::open(&DeviceSpec::Software, config.nodes, config.queues.connection, ring).unwrap();
    let mut clients: Vec<RingClient> = (0..CLIENTS).map(|_| RingClient::connect(&name).unwrap()).collect();
    let remote = (0..).find(|key| server.shard_map.shard_of_word(*key).rank == 1).unwrap();
    for client in &mut clients {
        (0..DEPTH as u64).for_each(|n| client.call(&WordRequest::new(Op::Get, 1, remote), n).unwrap());
    }
    let taken = connections.poll(&mut server);
    assert!(taken <= MAX_PER_PASS, "{taken} requests in one pass");
    let mut ended = 0;
    while ended < REQUESTS {
        connections.poll(&mut server);
        for client in &mut clients {
            ended += client.poll(|_, response| assert_eq!(response.status, Status::NodeGone)).unwrap();
        }
    }
}
