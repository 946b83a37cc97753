//! Child processes of a test: the same program, whose test `child_process_entry` plays a role.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use crosstie::bootstrap::Secret;
use crosstie_kv::Backend;
use crosstie_kv::node::{Membership, Node, NodeConfig};
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::wait::find;
use rustix::process::{Pid, Signal, kill_process};

use super::TIMEOUT;

/// The secret of clusters with nodes in child processes.
pub(crate) const SECRET: &str = "a secret of this test alone";

/// Runs a node until its standard input ends.
pub(crate) fn serve(name: &str, rank: u32, backend: &str, addresses: &str) {
    let addresses: Vec<SocketAddr> = addresses.split(',').map(|address| address.parse().unwrap()).collect();
    let backend = if backend == "Meta" { Backend::Meta } else { Backend::Delegation };
    let config = NodeConfig { daemons: 2, backend, ..NodeConfig::member(name, rank, addresses.len() as u32) };
    // A socket of the node's predecessor may linger.
    let listener = find(format_args!("the port of {addresses:?}"), || {
        let bound = TcpListener::bind(addresses[rank as usize]);
        if bound.is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        bound.ok()
    });
    let secret = Secret::new(String::from_utf8(child::read()).unwrap()).unwrap();
    let node = Node::join(&config, Membership { listener, addresses, secret }).unwrap();
    node.wait_for_peers(TIMEOUT).unwrap();
    child::write(b"serving");
    child::wait_for_end_of_input();
    node.stop().unwrap();
}

/// Starts this program again, in a role.
pub(crate) fn start_child(role: &str) -> Child {
    Child::start(crate::child_process_entry, role)
}

/// Starts a node of a cluster whose nodes all have [`SECRET`]. It serves when all of them are connected, see [`serve`].
pub(crate) fn start_node(name: &str, rank: u32, backend: Backend, addresses: &[SocketAddr]) -> Child {
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let mut node = start_child(&format!("node {name}-{rank} {rank} {backend:?} {}", addresses.join(",")));
    node.write(SECRET.as_bytes());
    node
}

pub(crate) fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
}
