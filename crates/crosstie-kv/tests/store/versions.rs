//! Clients and nodes of another release: an error says so, and the node goes on serving others.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crosstie::bootstrap::Secret;
use crosstie::bootstrap::channel::{Channel, ChannelEvent};
use crosstie::ipc;
use crosstie_kv::Backend;
use crosstie_kv::client::{AttachError, Client};
use crosstie_kv::node::{Membership, Node, NodeConfig, NodeEnded};
use crosstie_kv::wire::{self, BytesOp, NodeInfo, Status, WordRequest, WordResponse};
use crosstie_testkit::wait::eventually;
use zerocopy::IntoBytes;

use super::cluster::{Plan, TIMEOUT, exercise, fresh_name, seed};

/// What a node says of itself.
pub(super) const INFO: NodeInfo = NodeInfo {
    version: NodeInfo::VERSION,
    rank: 0,
    nodes: 1,
    daemons: 1,
    queue_depth: 4,
    max_clients: 64,
    max_key: wire::MAX_KEY as u32,
    max_value: wire::MAX_VALUE as u32,
    incarnation: 1,
    memory_limit: 1 << 20,
    backend: Backend::Meta,
    reserved: [0; 3],
    attach_count: 0,
};

/// Attaches a client to a node that describes itself with these bytes.
fn attach_to(name: &str, info: &[u8]) -> Result<(), AttachError> {
    let config = ipc::Config { queue_depth: 4, ..ipc::Config::default() };
    let mut long = ipc::Server::<[u8], [u8]>::create(&format!("{name}.l0"), &config).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                long.wait(Some(Duration::from_millis(1)));
                long.serve(|request| {
                    let asked = wire::BytesRequest::decode(request.message()).unwrap();
                    assert_eq!(asked.op, BytesOp::Info);
                    let mut encoded = Vec::new();
                    let response = wire::BytesResponse { status: Status::Done, value: info };
                    response.encode(&mut encoded).unwrap();
                    request.reply(&encoded).unwrap();
                });
            }
        });
        let attached = Client::<()>::attach_within(name, TIMEOUT).map(|_| ());
        is_over.store(true, Relaxed);
        attached
    })
}

#[test]
fn client_says_that_its_node_is_of_another_release() {
    let name = fresh_name("release");
    let config = ipc::Config { queue_depth: 4, ..ipc::Config::default() };
    {
        let _words =
            ipc::Server::<WordRequest, WordResponse>::create(&format!("{name}.d0"), &config).unwrap();
        let longer = [INFO.as_bytes(), &[0; 8]].concat();
        let older = NodeInfo { version: NodeInfo::VERSION - 1, ..INFO };
        let newer = NodeInfo { version: NodeInfo::VERSION + 1, ..INFO };
        for info in [older.as_bytes(), newer.as_bytes(), &INFO.as_bytes()[..48], &longer, &[]] {
            let refused = attach_to(&name, info).unwrap_err();
            assert!(
                matches!(&refused, AttachError::OtherVersion { name: named } if *named == name),
                "{refused}"
            );
        }
        attach_to(&name, INFO.as_bytes()).unwrap();
    }
    // Words of another length.
    let words = ipc::Server::<u64, WordResponse>::create(&format!("{name}.d0"), &config).unwrap();
    let refused = attach_to(&name, INFO.as_bytes()).unwrap_err();
    assert!(matches!(refused, AttachError::OtherVersion { .. }), "{refused}");
    drop(words);
    let _long = ipc::Server::<u64, u64>::create(&format!("{name}.l0"), &config).unwrap();
    let refused = Client::<()>::attach_within(&name, TIMEOUT).map(|_| ()).unwrap_err();
    assert!(matches!(refused, AttachError::OtherVersion { .. }), "{refused}");
}

const HELLO: u8 = 1;
const REJECT: u8 = 5;
const REPLACED: u8 = 6;

const VERSION: u32 = 3;

/// What a node says first.
fn hello(rank: u32, nodes: u32, version: u32) -> Vec<u8> {
    let words = [version, rank, 7, 0, nodes, 1, Backend::default() as u32, 0];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Plays a node that says `hello`, on a channel that is open or will be. Returns why the node at the other end rejects it.
fn rejected(channel: &mut Channel, hello: &[u8]) -> Option<String> {
    answered(channel, hello, REJECT).map(|payload| String::from_utf8(payload).unwrap())
}

/// The same, for an answer of this kind.
fn answered(channel: &mut Channel, hello: &[u8], answer: u8) -> Option<Vec<u8>> {
    let mut is_open = false;
    loop {
        match channel.poll_event() {
            Ok(Some(ChannelEvent::JoinRequest { .. })) => {
                channel.accept_join().unwrap();
                is_open = true;
            }
            Ok(Some(ChannelEvent::Open)) => is_open = true,
            Ok(Some(ChannelEvent::Frame { kind, payload })) if kind == answer => return Some(payload),
            Ok(Some(ChannelEvent::Frame { .. })) => {}
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return None,
        }
        if std::mem::take(&mut is_open) {
            channel.send(HELLO, hello).unwrap();
        }
    }
}

fn control_secret(plan: &Plan) -> Secret {
    plan.secret.derive("crosstie-kv control 1")
}

fn other_hellos(rank: u32, version: u32) -> [Vec<u8>; 4] {
    let ours = hello(rank, 3, version);
    // Of another version; longer, as one of a later version may be; and without a version, as the first nodes sent it.
    [hello(rank, 3, version + 1), hello(rank, 3, 0), [&hello(rank, 3, version + 1)[..], &[0; 64]].concat(), {
        let mut unversioned = ours[8..].to_vec();
        unversioned[..4].fill(0xA5);
        unversioned
    }]
}

/// Of two nodes with one rank, the one that was started first ends, and says why. One that was stopped meanwhile, and connects again, is told the
/// same. Neither disturbs the one that stays.
#[test]
fn of_two_nodes_with_one_rank_the_older_one_ends() {
    let (plan, name) = (Plan::new(2), fresh_name("twice"));
    let join = |what: &str, rank, membership| {
        let config = NodeConfig::member(&format!("{name}-{what}"), rank, 2);
        Node::join(&config, membership).unwrap()
    };
    let lower = join("lower", 0, plan.membership(0));
    let older = join("older", 1, plan.membership(1));
    older.wait_for_peers(TIMEOUT).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let newer = join("newer", 1, Membership { listener, ..plan.membership(1) });
    eventually("the older node still runs", || !older.is_running());
    let ended = older.stop().unwrap_err();
    assert_eq!(ended, NodeEnded::Replaced { rank: 1 }, "{ended}");
    newer.wait_for_peers(TIMEOUT).unwrap();
    lower.wait_for_peers(TIMEOUT).unwrap();
    let state = || lower.peers()[1].clone();
    let (before, refused) = (state(), lower.refused_connections());
    assert_eq!(before.times_up, 2);
    for _ in 0..3 {
        let mut channel = Channel::connect(plan.addresses[0], 1, 2, &control_secret(&plan), 1024).unwrap();
        // It was started at 7 nanoseconds.
        let newest = answered(&mut channel, &hello(1, 2, VERSION), REPLACED).expect("an answer");
        assert_eq!(Some(u64::from_le_bytes(newest.try_into().unwrap())), before.incarnation);
    }
    eventually("refused nodes are counted", || lower.refused_connections() == refused + 3);
    assert_eq!(state(), before);
    assert!(newer.is_running());
    let mut client = Client::attach_pipelined(lower.name()).unwrap();
    exercise(&mut client, 1, seed(), 1000, 40);
}

/// As a node that connects (rank 2), and as one that is connected to (rank 0).
#[test]
fn node_of_another_version_is_rejected_and_the_others_go_on() {
    let (plan, name) = (Plan::new(3), fresh_name("versions"));
    let config = |rank| NodeConfig::member(&format!("{name}-{rank}"), rank, 3);
    let node = Node::join(&config(1), plan.membership(1)).unwrap();
    let problem = |rank: usize| node.peers()[rank].problem.clone().unwrap_or_default();
    for hello in other_hellos(2, VERSION) {
        let secret = control_secret(&plan);
        let mut channel = Channel::connect(plan.addresses[1], 2, 3, &secret, 1024).unwrap();
        let why = rejected(&mut channel, &hello).expect("a reason");
        assert!(why.contains("rank 2 has version") && why.contains("release"), "{why}");
        eventually("rank 2 was not disconnected", || problem(2) == why);
    }
    let listener: &TcpListener = &plan.listeners[0];
    for hello in other_hellos(0, VERSION) {
        let (stream, _) = listener.accept().unwrap();
        let mut channel = Channel::from_accepted(stream, &control_secret(&plan), 1024).unwrap();
        let why = rejected(&mut channel, &hello).expect("a reason");
        assert!(why.contains("rank 0 has version"), "{why}");
        eventually("rank 0 was not disconnected", || problem(0) == why);
    }
    let others = [0, 2].map(|rank| Node::join(&config(rank), plan.membership(rank as usize)).unwrap());
    for node in [&node, &others[0], &others[1]] {
        node.wait_for_peers(TIMEOUT).unwrap();
    }
    let mut client = Client::attach_pipelined(node.name()).unwrap();
    exercise(&mut client, 1, seed(), 1000, 40);
}
