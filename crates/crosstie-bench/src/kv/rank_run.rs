//! The run of one rank with one backend: its node and its clients.

use std::net::TcpListener;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crosstie::bootstrap::{Bootstrap, Secret, random_bytes};

use super::Plan;
use super::client_pool::ClientPool;
use super::clocks::{ClockOffset, Clocks};
use super::topology::{self, Topology};
use super::totals::{self, NodeCounters, RankResults, Tally};
use super::worker::{FILLER, Task, write_key_prefix};
use crate::error::Error;
use crate::figures::Figures;
use crate::history::{self, History};
use crate::runner::Collective;
use crate::workload::{MAX_KEYS, key_bytes};
use crosstie_kv::Backend;
use crosstie_kv::client::{self, BeginBytesError, Client};
use crosstie_kv::node::{Membership, Node, NodeConfig};
use crosstie_kv::sharding::ShardMap;
use crosstie_kv::wire::{BytesOp, Op, Status, WordRequest};

/// Clients of a node besides the measured ones: one that fills the store, one that watches for the stop key, and some reserve.
pub(super) const OTHER_CLIENTS: usize = 4;
/// Time for the nodes to connect to each other.
const PEER_TIMEOUT: Duration = Duration::from_secs(30);
/// Operations in flight while the store is filled.
const FILL_DEPTH: usize = 32;
/// Interval of the checks whether a run should end early.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Checks between two reads of the stop key, by which other ranks end the run.
const POLLS_PER_STOP_CHECK: u32 = 5;
/// The longest warm-up.
const WARM_UP: Duration = Duration::from_millis(300);
/// Lower bound of a node's memory limit.
const MIN_MEMORY: u64 = 1 << 30;

/// Random bytes that rank 0 generates for all ranks. The cluster's secret and the names of its nodes are derived from them.
///
/// They are sent unencrypted, as all data of a job, and are worthless after the benchmark.
pub(super) struct ClusterToken([u8; 32]);

impl ClusterToken {
    pub(super) fn agree(job: &mut dyn Bootstrap) -> Result<ClusterToken, Error> {
        let own = match job.rank() {
            0 => random_bytes::<32>().map(|bytes| bytes.to_vec()).map_err(Error::from),
            _ => Ok(Vec::new()),
        };
        let tokens = Collective { job }.gather(own)?;
        let first = tokens.first().and_then(|token| token.as_slice().try_into().ok());
        first.map(ClusterToken).ok_or(Error::Protocol)
    }

    fn secret(&self, backend: Backend) -> Result<Secret, Error> {
        Ok(Secret::new(self.0)?.derive(&format!("bench {backend:?}")))
    }

    fn name(&self, backend: Backend, rank: u32) -> String {
        // A name is public: hash it, so that it does not reveal the secret.
        let [a, b, c, d, ..] = self.0.map(|byte| byte ^ 0x5a);
        let number = crosstie_kv::sharding::hash_word(u64::from(u32::from_le_bytes([a, b, c, d]))) as u32;
        let letter = if backend == Backend::Meta { 'm' } else { 'd' };
        format!("kv-bench-{number:08x}-{letter}{rank}")
    }
}

/// One rank's node of one backend, and its clients.
pub(super) struct RankRun {
    backend: Backend,
    node: Node,
    pool: ClientPool,
    control_client: Client<()>,
    /// One key of each rank that no workload uses. Putting it ends the run at that rank.
    stop_keys: Vec<u64>,
    one_machine: bool,
    counters_before: NodeCounters,
    memory: u64,
    /// What all ranks did in each run, and this rank in all runs.
    runs: Vec<Tally>,
    local: Tally,
    /// Measured time of this rank's own runs.
    seconds: f64,
    over: bool,
}

impl RankRun {
    /// Starts the node, fills the store, and runs the warm-up.
    pub(super) fn start(
        job: &mut dyn Bootstrap,
        plan: &Plan,
        topology: &Topology,
        token: &ClusterToken,
        backend: Backend,
        interrupt: &AtomicBool,
    ) -> Result<RankRun, Error> {
        let before = topology::resident_memory();
        let node = start_node(job, plan, topology, token, backend)?;
        let name = node.name().to_owned();
        let (rank, nodes) = (job.rank(), job.size());
        let cluster = ShardMap::new(nodes, plan.daemons).ok_or(Error::Protocol)?;
        let filled = node.wait_for_peers(PEER_TIMEOUT).map_err(Error::from);
        let filled = filled.and_then(|()| fill_store(&name, plan, &cluster, rank, interrupt));
        Collective { job }.agree(filled)?;
        let recorded = plan.check.then(|| (plan.recorded_each(nodes), plan.runs as usize + 1));
        let task = |thread: usize, client: u32| Task {
            node: name.clone(),
            rank,
            client,
            number: rank * plan.clients + client,
            workload: plan.workload,
            depth: plan.queue_depth as usize,
            rate: plan.rate.map(|rate| rate / f64::from(nodes * plan.clients)),
            recorded,
            core: topology.clients.as_ref().map(|cores| cores[thread]),
            spins: topology.spins,
        };
        let tasks = split_clients(plan.clients, topology.threads).enumerate();
        let tasks = tasks.map(|(thread, clients)| clients.map(|client| task(thread, client)).collect());
        let pool = ClientPool::start(tasks.collect(), plan.processes.as_deref());
        let pool = pool.and_then(|pool| Ok((pool, Client::attach(&name)?)));
        let (pool, control_client) = Collective { job }.agree(pool)?;
        let stop_key =
            |rank| (MAX_KEYS..).find(|key| cluster.shard_of_word(*key).rank == rank).unwrap_or(MAX_KEYS);
        let mut rank_run = RankRun {
            backend,
            node,
            pool,
            control_client,
            stop_keys: (0..nodes).map(stop_key).collect(),
            one_machine: topology.one_machine,
            counters_before: NodeCounters::default(),
            memory: 0,
            runs: Vec::new(),
            local: Tally::default(),
            seconds: 0.0,
            over: false,
        };
        rank_run.run(job, plan, false, plan.run_length().min(WARM_UP), interrupt)?;
        rank_run.counters_before = NodeCounters::of(&rank_run.node);
        rank_run.memory = topology::resident_memory().saturating_sub(before);
        Ok(rank_run)
    }

    /// Whether no more runs should follow.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// Makes one measured run.
    pub(super) fn measure(
        &mut self,
        job: &mut dyn Bootstrap,
        plan: &Plan,
        interrupt: &AtomicBool,
    ) -> Result<(), Error> {
        self.run(job, plan, true, plan.run_length(), interrupt)
    }

    fn run(
        &mut self,
        job: &mut dyn Bootstrap,
        plan: &Plan,
        measured: bool,
        length: Duration,
        interrupt: &AtomicBool,
    ) -> Result<(), Error> {
        job.barrier()?;
        let own = self.run_clients(measured, length, interrupt);
        // Before the others answer: what this rank did counts even if one of them dies.
        if let Ok(own) = &own {
            // Errors of the warm-up count; nothing else of it does.
            let Tally { errors, node_gone, .. } = *own;
            let counted = if measured { *own } else { Tally { errors, node_gone, ..Tally::default() } };
            self.local.add(&counted);
            self.seconds += counted.seconds();
        }
        let total = Tally::total(&Collective { job }.gather_values(own)?, self.one_machine);
        self.over = total.ends(plan.check);
        self.runs.extend(measured.then_some(total));
        Ok(())
    }

    /// Runs this rank's clients for one run.
    fn run_clients(
        &mut self,
        measured: bool,
        length: Duration,
        interrupt: &AtomicBool,
    ) -> Result<Tally, Error> {
        let end = Instant::now() + length;
        self.pool.start_run(measured)?;
        let mut interrupted = false;
        for poll in 1.. {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.pool.has_client_given_up()? {
                break;
            }
            if interrupt.load(Relaxed) {
                interrupted = true;
                self.interrupt_other_ranks();
                break;
            }
            let own = self.node.config().rank as usize;
            if poll % POLLS_PER_STOP_CHECK == 0 && self.control_client.get(self.stop_keys[own]) != Ok(None) {
                interrupted = true;
                break;
            }
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
        let tally = Tally::total(&self.pool.stop_run()?, true);
        Ok(Tally { interrupted, ..tally })
    }

    /// Ends the run at all other ranks.
    fn interrupt_other_ranks(&mut self) {
        let own = self.node.config().rank as usize;
        for (_, key) in self.stop_keys.iter().enumerate().filter(|(rank, _)| *rank != own) {
            // A rank that is gone needs no signal.
            self.control_client.put(*key, 1).ok();
        }
    }

    /// Collects the figures of all ranks that are still there. Returns the node, which keeps running.
    pub(super) fn finish(
        self,
        job: &mut dyn Bootstrap,
        plan: &Plan,
        topology: &Topology,
        clocks: Option<&Clocks>,
        interrupted: bool,
    ) -> (Node, Figures, Option<Error>) {
        let counters = NodeCounters::of(&self.node).since(&self.counters_before);
        let (found, mut error) = self.pool.finish();
        let memory = [self.memory, self.node.config().memory_bound().total()];
        let local = RankResults::new(job.rank(), self.local, self.seconds, memory, counters, &found);
        let all = totals::exchange(job, &local).unwrap_or_else(|cause| {
            error = Some(cause);
            vec![local]
        });
        // If ranks are missing, the runs are those of this rank.
        let mut figures = totals::figures(plan, topology, self.backend, job.size(), &self.runs, &all);
        figures.interrupted = interrupted || error.is_some();
        if let Some(clocks) = clocks
            && error.is_none()
        {
            let bytes: Vec<u8> = found.iter().flat_map(|found| &found.history).copied().collect();
            error = check_history(job, plan, self.backend, clocks, &bytes, &mut figures).err();
        }
        (self.node, figures, error)
    }
}

/// Splits the clients evenly over the threads.
fn split_clients(clients: u32, threads: u32) -> impl Iterator<Item = Range<u32>> {
    let (each, more) = (clients / threads, clients % threads);
    let first = move |thread: u32| thread * each + thread.min(more);
    (0..threads).map(move |thread| first(thread)..first(thread + 1))
}

/// Starts this rank's node and joins it with the others.
fn start_node(
    job: &mut dyn Bootstrap,
    plan: &Plan,
    topology: &Topology,
    token: &ClusterToken,
    backend: Backend,
) -> Result<Node, Error> {
    let (rank, nodes) = (job.rank(), job.size());
    let bytes = (plan.workload.value_size as u64 + 128) * plan.workload.keys / u64::from(nodes) * 4;
    let config = NodeConfig {
        daemons: plan.daemons,
        backend,
        device: plan.device.clone(),
        memory_limit: bytes.max(MIN_MEMORY),
        max_clients: plan.clients as usize + OTHER_CLIENTS,
        queue_depth: (plan.queue_depth as usize).max(FILL_DEPTH),
        cores: topology.daemons.clone(),
        ..NodeConfig::member(&token.name(backend, rank), rank, nodes)
    };
    if nodes == 1 {
        return Ok(Node::start(&config)?);
    }
    let listener = TcpListener::bind((topology.address, 0))
        .and_then(|listener| Ok((listener.local_addr()?, listener)))
        .map_err(|source| Error::Os { what: "listening for other nodes", source });
    let (listener, address) = match listener {
        Ok((address, listener)) => (Some(listener), Ok(address)),
        Err(error) => (None, Err(error)),
    };
    let addresses = Collective { job }.gather_values(address)?;
    let Some(listener) = listener else { return Err(Error::Protocol) };
    let secret = token.secret(backend);
    let node = secret.and_then(|secret| Ok(Node::join(&config, Membership { listener, addresses, secret })?));
    Collective { job }.agree(node)
}

/// Puts this rank's keys; the value of each key is the key. `interrupt` ends it early.
fn fill_store(
    name: &str,
    plan: &Plan,
    cluster: &ShardMap,
    rank: u32,
    interrupt: &AtomicBool,
) -> Result<(), Error> {
    let mut value: Option<Vec<u8>> =
        (!plan.workload.has_words()).then(|| vec![FILLER; plan.workload.value_size]);
    let mut client = Client::<()>::attach_pipelined(name)?;
    let mut refused = None;
    for key in plan.workload.keys_of(cluster, rank) {
        if interrupt.load(Relaxed) {
            return Err(Error::Interrupted);
        }
        loop {
            let begun = match &mut value {
                None => {
                    let request = WordRequest { value: key, ..WordRequest::new(Op::Put, rank, key) };
                    client.begin(request, ()).map_err(BeginBytesError::from)
                }
                Some(value) => {
                    let key = key_bytes(key);
                    write_key_prefix(value, &key);
                    client.begin_bytes(BytesOp::Put { key: &key, value }, ())
                }
            };
            match begun {
                Ok(()) => break,
                Err(BeginBytesError::Full(())) => poll_or_wait(&mut client, &mut refused),
                Err(BeginBytesError::Refused { cause, .. }) => return Err(Error::Fill(cause)),
                // The server is gone, or an error that a later version of the client adds.
                Err(_) => return Err(Error::Fill(client::Error::ServerGone)),
            }
        }
    }
    while client.in_flight() > 0 {
        poll_or_wait(&mut client, &mut refused);
    }
    match refused {
        None => Ok(()),
        Some(Status::OutOfMemory) => Err(Error::Fill(client::Error::OutOfMemory { rank })),
        Some(status) => Err(Error::Fill(client::Error::Unexpected { rank, status })),
    }
}

fn poll_or_wait(client: &mut Client<()>, refused: &mut Option<Status>) {
    let mut end = |status| {
        if status != Status::Done {
            *refused = Some(status);
        }
    };
    let words = client.poll(|(), response| end(response.status));
    let strings = client.poll_bytes(|(), response| end(response.status));
    if words + strings == 0 {
        client.wait(None);
    }
}

/// Gathers the histories on rank 0, which checks that they are linearizable.
fn check_history(
    job: &mut dyn Bootstrap,
    plan: &Plan,
    backend: Backend,
    clocks: &Clocks,
    recorded: &[u8],
    figures: &mut Figures,
) -> Result<(), Error> {
    let clocks = clocks.offsets_until_now(job)?;
    let all = Collective { job }.gather_to_leader(recorded)?;
    if job.rank() != 0 {
        return Ok(());
    }
    let mut histories = Vec::new();
    for (bytes, offset) in all.iter().zip(&clocks) {
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (mut history, after) = History::read_from(rest).map_err(|_| Error::Protocol)?;
            history.events.iter_mut().for_each(|event| *event = offset.widen(event));
            histories.push(history);
            rest = after;
        }
    }
    let checked = history::check_from(&histories, Some, history::BUDGET);
    let summary =
        checked.map_err(|failure| Error::Violation { backend, seed: plan.workload.seed, failure })?;
    for (name, count) in [
        ("checked_operations", summary.operations),
        ("checked_keys", summary.keys),
        ("unknown", summary.unknown),
        ("clocks_within_ns", clocks.iter().map(ClockOffset::width).max().unwrap_or(0) as u64),
    ] {
        figures.counters.insert(name.to_owned(), count);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn clients_are_split_evenly_over_threads() {
        let split_clients = |clients, threads| {
            super::split_clients(clients, threads)
                .map(|clients| (clients.start, clients.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(split_clients(4, 1), [(0, 4)]);
        assert_eq!(split_clients(4, 4), [(0, 1), (1, 2), (2, 3), (3, 4)]);
        assert_eq!(split_clients(7, 3), [(0, 3), (3, 5), (5, 7)]);
    }
}
