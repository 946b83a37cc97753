//! `crosstie kv serve`: a node of the store, until it is told to end.
//!
//! Membership is static: every node is given the same list of control addresses, and which of them is its own.

use std::io::{Write, stdout};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crosstie::bootstrap::Secret;
use crosstie::device::DeviceSpec;
use crosstie_kv::Backend;
use crosstie_kv::node::{Membership, Node, NodeConfig, PeerState, StartError};

use super::NAME;
use crate::error::Error;
use crate::signals;
use crosstie_bench::units::bytes;

/// How often to look for signals, and for peers that come and go.
const WATCH_INTERVAL: Duration = Duration::from_millis(20);

/// Run a node until SIGINT or SIGTERM.
///
/// Without more, it is the only node of its cluster. A node of several is told the addresses of all, the same list at each, and its
/// place in it:
///
///   crosstie kv serve --rank 0 --nodes 10.0.0.1:7000,10.0.0.2:7000
///
/// Nodes may start in any order, end, and come back; one that comes back is empty. They prove to each other that they know a
/// secret, which is in the file that CROSSTIE_SECRET_FILE names (or in CROSSTIE_SECRET): the same at each.
/// Nodes of one machine need different names.
///
/// Prints a line when clients can attach, and one whenever another node comes or goes.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Arguments {
    /// What clients on this machine attach to.
    #[arg(long, value_name = "NAME", default_value = NAME)]
    name: String,
    /// Which of the nodes this is, from 0.
    #[arg(long, value_name = "R", requires = "nodes")]
    rank: Option<u32>,
    /// Where each node listens for the others (TCP), by rank: HOST:PORT,HOST:PORT,…
    #[arg(long, value_name = "ADDR,ADDR", value_delimiter = ',')]
    nodes: Vec<String>,
    /// Threads that own a share of the keys each; the same at all nodes.
    #[arg(long, value_name = "N", default_value_t = 1)]
    daemons: u32,
    /// How requests leave for other nodes; the same at all nodes.
    #[arg(long, value_enum, default_value_t = Backend::Delegation)]
    backend: Backend,
    /// What other nodes are reached through: software (nodes of one machine), verbs:NAME[/PORT[/GID]], fault:SEED:SPEC.
    #[arg(long, value_name = "SPEC", default_value = "software")]
    device: DeviceSpec,
    /// Memory that keys and values of this node may take: bytes, or with KiB, MiB, GiB.
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = memory)]
    memory: u64,
    /// Clients at a time.
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_clients: usize,
    /// Unanswered requests that a client may have at one daemon.
    #[arg(long, value_name = "N", default_value_t = 32)]
    queue_depth: usize,
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    let signals = signals::install().map_err(|source| Error::Os { what: "signal handlers", source })?;
    let node = start(arguments)?;
    say(&ready(arguments, node.config()));
    let mut watch = Watch::new(node.peers());
    while node.is_running() && !signals.load(Relaxed) {
        std::thread::sleep(WATCH_INTERVAL);
        watch.look(&node);
    }
    node.stop()?;
    say("stopped");
    Ok(())
}

fn start(arguments: &Arguments) -> Result<Node, Error> {
    let addresses = arguments.nodes.iter().map(|node| resolve(node)).collect::<Result<Vec<_>, _>>()?;
    let count = addresses.len().max(1);
    let rank = match arguments.rank {
        None if count > 1 => {
            let range = format!("0 to {}", count - 1);
            return Err(Error::Usage(format!("--nodes without --rank: say which of them this is, {range}")));
        }
        rank => rank.unwrap_or(0),
    };
    let nodes = u32::try_from(count).unwrap_or(u32::MAX);
    let config = NodeConfig {
        daemons: arguments.daemons,
        backend: arguments.backend,
        device: arguments.device.clone(),
        memory_limit: arguments.memory,
        max_clients: arguments.max_clients,
        queue_depth: arguments.queue_depth,
        ..NodeConfig::member(&arguments.name, rank, nodes)
    };
    let started = match addresses.get(rank as usize) {
        // Nobody to listen to, or no such rank, which the node says.
        _ if count == 1 => Node::start(&config),
        None => return Err(Error::Usage(StartError::Rank { rank, nodes }.to_string())),
        Some(&address) => {
            let secret = Secret::from_env()?;
            let listener = TcpListener::bind(address).map_err(|source| Error::Listen { address, source })?;
            Node::join(&config, Membership { listener, addresses, secret })
        }
    };
    started.map_err(|error| match error {
        StartError::Limit { .. } | StartError::Rank { .. } => Error::Usage(error.to_string()),
        error => error.into(),
    })
}

/// The first address of `HOST:PORT`; the control plane dials one.
fn resolve(text: &str) -> Result<SocketAddr, Error> {
    let wrong = |why: String| Error::Usage(format!("--nodes {text:?}: {why}: give HOST:PORT for each node"));
    let mut found = text.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("no address".to_owned()))
}

/// Bytes, as `--memory` has them.
fn memory(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        "TiB" => Some(40),
        _ => None,
    };
    let number: Option<u64> = digits.parse().ok();
    let product = shift.and_then(|shift| number?.checked_mul(1 << shift));
    product.filter(|bytes| *bytes > 0).ok_or("give bytes, or a number with KiB, MiB, GiB".to_owned())
}

fn ready(arguments: &Arguments, config: &NodeConfig) -> String {
    let NodeConfig { name, rank, nodes, daemons, device, memory_limit, .. } = config;
    let backend = arguments.backend.as_str();
    let place = match arguments.nodes.get(*rank as usize).filter(|_| *nodes > 1) {
        None => "the only node".to_owned(),
        Some(address) => format!("rank {rank} of {nodes} at {address}, {backend}, {device}"),
    };
    let threads = if *daemons == 1 { "1 daemon".to_owned() } else { format!("{daemons} daemons") };
    let [store, whole] = [*memory_limit, config.memory_bound().total()].map(bytes);
    format!("ready: {name:?}, {place}, {threads}, memory {store} for keys and values, {whole} at most in all")
}

/// What was said about the other nodes.
struct Watch {
    peers: Vec<PeerState>,
    refusals: u64,
}

impl Watch {
    fn new(peers: Vec<PeerState>) -> Watch {
        Watch { peers, refusals: 0 }
    }

    /// Says what is new.
    fn look(&mut self, node: &Node) {
        let peers = node.peers();
        for (old, new) in self.peers.iter().zip(&peers).filter(|(old, new)| old != new) {
            let rank = new.rank;
            match &new.problem {
                // It may have gone and come in between.
                _ if new.is_up && (!old.is_up || old.times_up != new.times_up) => {
                    say(&format!("rank {rank} is up"));
                }
                Some(why) if old.is_up => say(&format!("rank {rank} is gone: {why}")),
                Some(why) if old.problem != new.problem => {
                    let how = if new.times_up == 0 { "not there yet" } else { "still gone" };
                    say(&format!("rank {rank} is {how}: {why}"));
                }
                _ => {}
            }
        }
        self.peers = peers;
        // A stranger tries again and again.
        let refusals = node.refused_connections();
        if refusals > 0 && refusals >= 2 * self.refusals {
            self.refusals = refusals;
            say(&format!(
                "refused a connection, number {refusals}: another secret, or another list of nodes"
            ));
        }
    }
}

/// A line to standard output. A node whose reader went away goes on.
fn say(line: &str) {
    let mut out = stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_units() {
        assert_eq!(memory("4096"), Ok(4096));
        assert_eq!(memory("1GiB"), Ok(1 << 30));
        assert_eq!(memory("16KiB"), Ok(16 << 10));
        for wrong in ["", "0", "GiB", "1GB", "-1", "1.5GiB", "99999999999TiB", "1 GiB", "1ÄB"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
    }
}
