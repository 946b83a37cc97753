//! Starting the daemons of a node: first their services, then their threads.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use crosstie::{delegation, ipc};

use super::bytes_server::BytesServer;
use super::commands::{ConnectionCommand, MAX_COMMANDS};
use super::config::NodeConfig;
use super::connections::Connections;
use super::counters::DaemonActivity;
use super::daemon::Daemon;
use super::error::StartError;
use super::forward::{self, Forwarder};
use super::idle::IdleBackoff;
use super::ring::{DelegationRing, NoRing, RingServer};
use super::shard_server::ShardServer;
use super::shared::{Shared, StopOnPanic};
use super::transport::{NoTransport, Transport};
use crate::service_names;
use crate::sharding::{ShardId, ShardMap};
use crate::store::Shard;
use crate::wire::{MAX_KEY, MAX_VALUE, NodeInfo, WordRequest, WordResponse};

/// Creates the services of all daemons, starts their threads, and waits until all are ready. Returns the channels to the
/// daemons. Threads that were started are in `threads` also when it fails.
pub(super) fn start_daemons(
    config: &NodeConfig,
    shard_map: ShardMap,
    shared: &Arc<Shared>,
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<Vec<SyncSender<ConnectionCommand>>, StartError> {
    let mut commands = Vec::new();
    let mut starting = Vec::new();
    for (daemon, services) in (0..).zip(create_services(config, shared)?) {
        let (sender, receiver) = sync_channel(MAX_COMMANDS);
        let (ready, is_ready) = sync_channel(1);
        commands.push(sender);
        let (config, shared) = (config.clone(), shared.clone());
        let guard = StopOnPanic(shared.clone());
        let run = move || {
            let _guard = guard;
            let thread =
                DaemonThread { config, shard_map, daemon, services, commands: receiver, shared, ready };
            thread.run();
        };
        threads.push(std::thread::Builder::new().name(format!("kv-daemon-{daemon}")).spawn(run)?);
        starting.push(is_ready);
    }
    for (daemon, is_ready) in (0..).zip(starting) {
        is_ready.recv().unwrap_or(Err(StartError::Daemon { daemon }))?;
    }
    Ok(commands)
}

/// What a daemon serves, created before its thread starts.
struct DaemonServices {
    words: ipc::Server<WordRequest, WordResponse>,
    bytes: BytesServer,
    ring: Option<RingServer>,
    forwarder: Forwarder,
}

/// Creates the services of all daemons.
fn create_services(config: &NodeConfig, shared: &Shared) -> Result<Vec<DaemonServices>, StartError> {
    let name = &config.name;
    let info = node_info(config, shared.incarnation);
    // Lanes that are not used take next to no memory.
    let forwards = config.backend.forwards(config.nodes, config.daemons);
    let forwarders = forward::create(config.daemons, if forwards { config.queues.forward } else { 1 })?;
    let mut services = Vec::new();
    for (daemon, forwarder) in (0..).zip(forwarders) {
        let words = create_service(name, service_names::words(name, daemon), |service| {
            ipc::Server::create(service, &config.words_lanes())
        })?;
        let bytes = create_service(name, service_names::bytes(name, daemon), |service| {
            ipc::Server::create(service, &config.bytes_lanes())
        })?;
        let ring = if config.backend.uses_rings(config.nodes) {
            Some(create_service(name, service_names::ring(name, daemon), |service| {
                delegation::Server::create(service, &config.ring())
            })?)
        } else {
            None
        };
        let bytes = BytesServer::new(bytes, info);
        services.push(DaemonServices { words, bytes, ring, forwarder });
    }
    Ok(services)
}

fn create_service<S>(
    node: &str,
    service: String,
    create: impl FnOnce(&str) -> Result<S, ipc::CreateError>,
) -> Result<S, StartError> {
    create(&service).map_err(|cause| match cause {
        ipc::CreateError::NameTaken { .. } => StartError::NameTaken { name: node.to_owned() },
        cause => StartError::Service { name: service, cause },
    })
}

pub(super) fn node_info(config: &NodeConfig, incarnation: u64) -> NodeInfo {
    NodeInfo {
        version: NodeInfo::VERSION,
        rank: config.rank,
        nodes: config.nodes,
        daemons: config.daemons,
        queue_depth: config.queue_depth as u32,
        max_clients: config.max_clients as u32,
        max_key: MAX_KEY as u32,
        max_value: MAX_VALUE as u32,
        incarnation,
        memory_limit: shard_limit(config) as u64,
        backend: config.backend,
        reserved: [0; 3],
        attach_count: 0,
    }
}

/// Bytes that each shard of the node may allocate.
fn shard_limit(config: &NodeConfig) -> usize {
    usize::try_from(config.memory_limit / u64::from(config.daemons)).unwrap_or(usize::MAX)
}

/// A daemon on its own thread, before its loop starts. Connections belong to the thread that creates them, so the thread itself
/// opens the device.
struct DaemonThread {
    config: NodeConfig,
    shard_map: ShardMap,
    daemon: u32,
    services: DaemonServices,
    commands: Receiver<ConnectionCommand>,
    shared: Arc<Shared>,
    ready: SyncSender<Result<(), StartError>>,
}

impl DaemonThread {
    fn run(mut self) {
        if let Err(error) = self.pin() {
            return self.report(Err(error));
        }
        match self.services.ring.take() {
            Some(ring) => match self.open_connections(ring) {
                Ok(connections) => self.serve(connections),
                Err(error) => self.report(Err(error)),
            },
            None if self.config.nodes > 1 => match self.open_connections(NoRing) {
                Ok(connections) => self.serve(connections),
                Err(error) => self.report(Err(error)),
            },
            None => self.serve(NoTransport),
        }
    }

    fn open_connections<R: DelegationRing>(&self, ring: R) -> Result<Connections<R>, StartError> {
        let config = &self.config;
        Connections::open(&config.device, config.nodes, config.queues.connection, ring).map_err(|cause| {
            StartError::Device { daemon: self.daemon, device: config.device.to_string(), cause }
        })
    }

    fn serve(self, transport: impl Transport) {
        self.report(Ok(()));
        let config = self.config;
        let server = ShardServer {
            id: ShardId { rank: config.rank, daemon: self.daemon },
            shard_map: self.shard_map,
            words: self.services.words,
            has_more_clients: false,
            shard: Shard::new(shard_limit(&config)),
            forwarder: self.services.forwarder,
            bytes: self.services.bytes,
            activity: DaemonActivity::default(),
        };
        let idle = IdleBackoff::new(config.wait_strategy);
        if config.backend.forwards(config.nodes, config.daemons) {
            Daemon::<_, true>::new(server, transport, idle, self.commands, self.shared).run();
        } else {
            Daemon::<_, false>::new(server, transport, idle, self.commands, self.shared).run();
        }
    }

    fn pin(&self) -> Result<(), StartError> {
        let Some(core) = self.config.cores.as_ref().map(|cores| cores[self.daemon as usize]) else {
            return Ok(());
        };
        let failed = |cause| StartError::Core { daemon: self.daemon, core, cause };
        if core >= rustix::thread::CpuSet::MAX_CPU {
            return Err(failed(std::io::ErrorKind::InvalidInput.into()));
        }
        let mut set = rustix::thread::CpuSet::new();
        set.set(core);
        rustix::thread::sched_setaffinity(None, &set).map_err(|errno| failed(errno.into()))
    }

    fn report(&self, result: Result<(), StartError>) {
        // If nobody receives it, the node has already failed to start.
        self.ready.send(result).ok();
    }
}
