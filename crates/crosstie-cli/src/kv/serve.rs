//! `crosstie kv serve`: runs a node of the store until a signal stops it.
//!
//! Membership is static: every node gets the same list of control addresses, and its own position in the list.

use std::io::{Write, stdout};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crosstie::bootstrap::Secret;
use crosstie::device::DeviceSpec;
use crosstie_kv::Backend;
use crosstie_kv::node::{Membership, Node, NodeConfig, PeerState, StartError};

use super::cores::Cores;
use super::memory::{self, Available};
use super::{DEFAULT_NAME, parse_name};
use crate::error::Error;
use crate::signals;
use crosstie_bench::units::bytes;
use crosstie_bench::wait::Wait;

/// Time between two checks for signals and for peers that come or go.
const MONITOR_INTERVAL: Duration = Duration::from_millis(20);

/// Run a node until SIGINT or SIGTERM.
///
/// By default it runs as a one-node cluster. For a cluster of several nodes, give each node the same list of addresses, and its
/// own position in the list:
///
///   crosstie kv serve --rank 0 --nodes 10.0.0.1:7000,10.0.0.2:7000
///
/// Nodes may start in any order, stop, and come back; a node that comes back is empty. The nodes authenticate each other with a
/// shared secret. It is in the file that CROSSTIE_SECRET_FILE names, or in CROSSTIE_SECRET, and must be the same on all nodes.
/// Nodes on the same machine need different names.
///
/// Prints a line when clients can attach, and one whenever another node comes or goes.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Arguments {
    /// The name that clients on this machine attach to.
    #[arg(long, value_name = "NAME", default_value = DEFAULT_NAME, value_parser = parse_name)]
    name: String,
    /// The position of this node in the list of --nodes, from 0.
    #[arg(long, value_name = "R", requires = "nodes")]
    rank: Option<u32>,
    /// The control address (TCP) of each node, in order of rank: HOST:PORT,HOST:PORT,…
    #[arg(long, value_name = "ADDR,ADDR", value_delimiter = ',')]
    nodes: Vec<String>,
    /// Number of daemons, threads that own a shard of the keys each; the same on all nodes.
    #[arg(long, value_name = "N", default_value_t = 1)]
    daemons: u32,
    /// How requests for other nodes travel; the same on all nodes.
    #[arg(long, value_enum, default_value_t = Backend::Delegation)]
    backend: Backend,
    /// The device for connections with other nodes: software (nodes on one machine), verbs:NAME[/PORT[/GID]], fault:SEED[/KIND=N]...:DEVICE.
    #[arg(long, value_name = "SPEC", default_value = "software")]
    device: DeviceSpec,
    /// Memory limit for keys and values of this node: bytes, or with KiB, MiB, GiB, TiB; not more than this machine or container has [default: 1GiB, or half the memory of the machine or container if that is less].
    #[arg(long, value_name = "BYTES", value_parser = memory::parse)]
    memory: Option<u64>,
    /// The most clients at a time.
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_clients: usize,
    /// The most requests that a client may have in flight at one daemon.
    #[arg(long, value_name = "N", default_value_t = 32)]
    queue_depth: usize,
    /// How daemons wait when there is nothing to do; use spin with --cores.
    #[arg(long, value_enum, default_value_t = Wait::Adaptive)]
    wait: Wait,
    /// Pin daemons to cores, one each, in this order: a list like 0-3,8, or nic for cores near the adapter of --device verbs:NAME.
    #[arg(long, value_name = "LIST")]
    cores: Option<Cores>,
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    let signals = signals::install().map_err(|source| Error::Os { what: "signal handlers", source })?;
    let node = start(arguments)?;
    print_line(&ready_line(arguments, node.config()));
    let mut monitor = PeerMonitor::new(node.peers());
    while node.is_running() && !signals.load(Relaxed) {
        std::thread::sleep(MONITOR_INTERVAL);
        monitor.report_changes(&node);
    }
    node.stop()?;
    print_line("stopped");
    Ok(())
}

fn start(arguments: &Arguments) -> Result<Node, Error> {
    let addresses = arguments.nodes.iter().map(|node| resolve(node)).collect::<Result<Vec<_>, _>>()?;
    if let Some(at) = (1..addresses.len()).find(|&at| addresses[..at].contains(&addresses[at])) {
        let node = &arguments.nodes[at];
        return Err(Error::Usage(format!(
            "--nodes names {node} twice: give each node an address of its own"
        )));
    }
    let count = addresses.len().max(1);
    let rank = match arguments.rank {
        None if count > 1 => {
            let range = format!("0 to {}", count - 1);
            return Err(Error::Usage(format!("--nodes without --rank: give the rank of this node, {range}")));
        }
        rank => rank.unwrap_or(0),
    };
    let nodes = u32::try_from(count).unwrap_or(u32::MAX);
    let cores = arguments.cores.as_ref().map(|cores| cores.choose(&arguments.device, arguments.daemons));
    let cores = cores.transpose()?;
    let memory_limit = memory::choose(arguments.memory, Available::read()).map_err(Error::Usage)?;
    let config = NodeConfig {
        daemons: arguments.daemons,
        backend: arguments.backend,
        device: arguments.device.clone(),
        memory_limit,
        max_clients: arguments.max_clients,
        queue_depth: arguments.queue_depth,
        wait_strategy: arguments.wait.into(),
        cores,
        ..NodeConfig::member(&arguments.name, rank, nodes)
    };
    let started = match addresses.get(rank as usize) {
        // A one-node cluster needs no address. The node itself refuses a rank that does not exist.
        _ if count == 1 => Node::start(&config),
        None => return Err(Error::Usage(StartError::Rank { rank, nodes }.to_string())),
        Some(&address) => {
            let secret = Secret::from_env()?;
            let listener = TcpListener::bind(address).map_err(|source| Error::Listen { address, source })?;
            Node::join(&config, Membership { listener, addresses, secret })
        }
    };
    started.map_err(|error| match error {
        StartError::Limit { what: "nodes", value, limit } => {
            Error::Usage(format!("--nodes has {value} addresses: give at most {limit}"))
        }
        StartError::Limit { what, value, limit } => {
            Error::Usage(format!("--{} {value}: give 1 to {limit}", what.replace('_', "-")))
        }
        StartError::Rank { .. } => Error::Usage(error.to_string()),
        error => error.into(),
    })
}

/// Resolves `HOST:PORT` to its first address; the control plane connects to that one.
fn resolve(text: &str) -> Result<SocketAddr, Error> {
    let wrong = |why: String| Error::Usage(format!("--nodes {text:?}: {why}: give HOST:PORT for each node"));
    let mut found = text.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("no address".to_owned()))
}

fn ready_line(arguments: &Arguments, config: &NodeConfig) -> String {
    let NodeConfig { name, rank, nodes, daemons, device, memory_limit, .. } = config;
    let backend = arguments.backend.as_str();
    let cluster = match arguments.nodes.get(*rank as usize).filter(|_| *nodes > 1) {
        None => "one-node cluster".to_owned(),
        Some(address) => format!("rank {rank} of {nodes} at {address}, {backend}, {device}"),
    };
    let threads = if *daemons == 1 { "1 daemon".to_owned() } else { format!("{daemons} daemons") };
    let [store, whole] = [*memory_limit, config.memory_bound().total()].map(bytes);
    format!(
        "ready: {name:?}, {cluster}, {threads}, memory {store} for keys and values, {whole} at most in total"
    )
}

/// Prints what changes about the other nodes.
struct PeerMonitor {
    /// As of the last report.
    peers: Vec<PeerState>,
    /// Refused connections as of the last line about them.
    refused: u64,
}

impl PeerMonitor {
    /// Nothing was reported yet, whatever has happened since the node was started.
    fn new(mut peers: Vec<PeerState>) -> PeerMonitor {
        for peer in &mut peers {
            (peer.is_up, peer.incarnation, peer.times_up, peer.problem) = (false, None, 0, None);
        }
        PeerMonitor { peers, refused: 0 }
    }

    /// Prints a line for each change since the last call.
    fn report_changes(&mut self, node: &Node) {
        let peers = node.peers();
        for (old, new) in self.peers.iter().zip(&peers).filter(|(old, new)| old != new) {
            let rank = new.rank;
            match &new.problem {
                // It may have gone and come back since the last call.
                _ if new.is_up && (!old.is_up || old.times_up != new.times_up) => {
                    print_line(&format!("rank {rank} is up"));
                }
                Some(why) if old.is_up => print_line(&format!("rank {rank} is gone: {why}")),
                Some(why) if old.problem != new.problem => {
                    let how = if new.times_up == 0 { "not connected yet" } else { "still gone" };
                    print_line(&format!("rank {rank} is {how}: {why}"));
                }
                _ => {}
            }
        }
        self.peers = peers;
        // A refused node retries for ever: a line is printed only when the number has doubled.
        let refused = node.refused_connections();
        if refused > 0 && refused >= 2 * self.refused {
            self.refused = refused;
            print_line(&format!(
                "refused a connection ({refused} so far): of a node with another secret or another list of nodes, or of another program"
            ));
        }
    }
}

/// Prints a line to standard output. The node continues if standard output is closed.
fn print_line(line: &str) {
    let mut out = stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).ok();
}
