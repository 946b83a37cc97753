//! Connections to the control port that do not prove the secret.

mod cluster;

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use cluster::{Plan, TIMEOUT, fresh_name};
use crosstie_kv::node::{Node, NodeConfig};
use rustix::net::{AddressFamily, SocketType};

/// More than a node keeps.
const FLOOD: usize = 200;

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
