//! Connections to the control port that do not prove the secret.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use crosstie_kv::node::{Node, NodeConfig};
use crosstie_testkit::child::{self, Child};
use rustix::net::{AddressFamily, SocketType};

use super::cluster::{Plan, TIMEOUT, fresh_name};

/// More than a node keeps.
const FLOOD: usize = 200;
/// Connections that a node keeps before they have proved the secret.
const MAX_UNAUTHENTICATED: usize = 64;
/// Descriptors that the other node opens.
const SLACK: usize = 60;
const NOBODY: u32 = 65534;

/// Connects from an address of this machine, and waits until the node has greeted or closed the connection.
fn connect_from(source: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::from(source), 0))).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Reads the first byte of the node's greeting. False if the node has closed the connection.
fn is_greeted(stream: &mut TcpStream) -> bool {
    stream.read(&mut [0]).is_ok_and(|count| count == 1)
}

fn is_open(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    loop {
        match stream.read(&mut [0; 64]) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
}

/// A flood from an address that is not in the list of nodes does not push out the handshake of a node, however long that takes.
#[test]
fn flood_of_connections_does_not_push_out_a_handshake_in_progress() {
    let plan = Plan::new(2);
    let config = NodeConfig::member(&fresh_name("flood"), 0, 2);
    let node = Node::join(&config, plan.membership(0)).unwrap();
    let mut handshake = connect_from([127, 0, 0, 1], plan.addresses[0]);
    assert!(is_greeted(&mut handshake));
    let mut flood = Vec::new();
    for _ in 0..FLOOD {
        let mut stream = connect_from([127, 0, 0, 2], plan.addresses[0]);
        is_greeted(&mut stream);
        flood.push(stream);
    }
    assert!(is_open(&mut handshake), "the flood pushed out the handshake");
    let open = flood.iter_mut().filter_map(|stream| is_open(stream).then_some(())).count();
    assert!(open <= 64, "{open} connections that have proved nothing are kept");
    // A node gets in while the flood is there.
    drop(handshake);
    let other = NodeConfig::member(&fresh_name("flood"), 1, 2);
    let other = Node::join(&other, plan.membership(1)).unwrap();
    other.wait_for_peers(TIMEOUT).unwrap();
    node.wait_for_peers(TIMEOUT).unwrap();
    drop(flood);
}

/// Floods a node from a process of its own when the test below starts it; does nothing in an ordinary run.
#[test]
fn flooding_process() {
    let Some(task) = child::task() else { return };
    let (user, address) = task.split_once(' ').unwrap();
    if user == "nobody" {
        // SAFETY: plain system calls. After them this process has no way back to root.
        let dropped = unsafe { libc::setgid(NOBODY) == 0 && libc::setuid(NOBODY) == 0 };
        assert!(dropped, "could not become user {NOBODY}: run this test as root");
    }
    let connections: Vec<TcpStream> =
        (0..FLOOD).map(|_| connect_from([127, 0, 0, 2], address.parse().unwrap())).collect();
    child::write(b"connected");
    // Until the parent has counted.
    child::wait_for_end_of_input();
    drop(connections);
}

/// Another user, or our own, holds as many connections as it can. They take a limited number of descriptors, for a limited time, and a
/// node gets in beside them.
#[test]
fn floods_of_other_processes_take_few_descriptors_and_keep_no_node_out() {
    if child::run_alone(floods_of_other_processes_take_few_descriptors_and_keep_no_node_out) {
        return;
    }
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    for user in ["nobody", "self"] {
        let plan = Plan::new(2);
        let node = Node::join(&NodeConfig::member(&fresh_name("flood"), 0, 2), plan.membership(0)).unwrap();
        let before = descriptors();
        let mut child = Child::start(flooding_process, &format!("{user} {}", plan.addresses[0]));
        child.read();
        let during = descriptors();
        assert!(
            during <= before + MAX_UNAUTHENTICATED + SLACK,
            "{user}: {before} descriptors became {during}"
        );
        let other = NodeConfig::member(&fresh_name("flood"), 1, 2);
        let other = Node::join(&other, plan.membership(1)).unwrap();
        other.wait_for_peers(TIMEOUT).unwrap();
        node.wait_for_peers(TIMEOUT).unwrap();
        child.join();
    }
}
