//! `crosstie bench ipc`, `delegation` and `flux`: requests and responses inside one node, compared with what the machine allows.
//!
//! There are one server and one or more clients, threads or processes. The first client leads. Slices of the RPC alternate with slices
//! of the limits, which the leading client and the server measure while the other clients sleep. All slices run under the same load of
//! the machine, so the medians over the slices can be compared.
//!
//! ```text
//! rank 0  the leading client      its own core, if there are two
//! rank 1  the server              its own core, if there are two
//! rank 2… further clients         their own cores, or shared with other clients
//! ```

mod delegation;
mod flux;
mod ipc;
pub(super) mod payload;
pub(super) mod plan;
pub(super) mod rpc_loop;
mod shared_memory_rpc;
mod slice_barrier;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::bootstrap::{self, Bootstrap, Limits, local};
use crosstie::telemetry::Histogram;
use serde::{Deserialize, Serialize};

pub use plan::{Arguments, Kind, Plan};

use self::rpc_loop::{ClientLoop, Idle, ServerLoop, Tally};
use self::slice_barrier::SliceBarrier;
use super::collective::Collective;
use super::cores;
use super::limits::{self, CacheLinePingPong, Memcpy, PlainExchange, TakeResponses, Throughput};
use super::progress::Progress;
use super::shared_region::{self, SharedRegion};
use super::spin_wait::SpinWait;
use super::summary::{self, LARGE, Measurements, Setup, Summary};
use crate::error::Error;
use crate::median::median;
use crate::wait::Wait;

/// The rank of the server.
const SERVER: usize = 1;

/// The RPC to measure: creates its server and its clients.
trait Transport: Sync {
    /// Creates the server under a unique name.
    fn serve(&self, plan: &Plan, name: &str, idle: Idle) -> Result<Box<dyn ServerLoop>, Error>;
    /// Connects the client of this rank to the server of that name.
    fn connect(&self, plan: &Plan, name: &str, rank: usize, idle: Idle)
    -> Result<Box<dyn ClientLoop>, Error>;
}

/// Runs the benchmark. Returns the summary in the process that leads.
pub fn run(plan: &Plan) -> Result<Option<Summary>, Error> {
    match plan.kind {
        Kind::Ipc => ipc::run(plan),
        Kind::Flux => flux::run(plan),
        Kind::Delegation => delegation::run(plan),
    }
}

fn measure(plan: &Plan, transport: &dyn Transport) -> Result<Option<Summary>, Error> {
    let mut job = bootstrap::from_env()?;
    let region_len = plan.region_layout().len;
    if job.size() == 1 {
        let region = SharedRegion::create(region_len)?;
        if !plan.processes {
            return in_threads(plan, transport, &region);
        }
        let mut job = local::JobBuilder::new(plan.ranks() as u32)
            .arguments(plan.command_line())
            .variable(shared_region::VARIABLE, region.descriptor())
            .start()?;
        let summary = cores::on_own_thread(|| run_rank(plan, transport, &mut job, &region))?;
        job.finish()?;
        return Ok(summary);
    }
    let Some(region) = SharedRegion::inherited(region_len)? else {
        let name = plan.kind.name();
        return Err(Error::Usage(format!(
            "bench {name} runs inside one node and starts its own processes: start it once, without a launcher"
        )));
    };
    let summary = run_rank(plan, transport, job.as_mut(), &region)?;
    job.finish()?;
    Ok(summary)
}

/// Runs all ranks as threads of this process.
fn in_threads(
    plan: &Plan,
    transport: &dyn Transport,
    region: &SharedRegion,
) -> Result<Option<Summary>, Error> {
    let mut members = local::in_process(plan.ranks() as u32, Limits::default())?.into_iter();
    let Some(mut leader) = members.next() else { return Err(Error::Protocol) };
    std::thread::scope(|scope| {
        let spawn = |mut member| cores::spawn(scope, move || run_rank(plan, transport, &mut member, region));
        // If a thread cannot start, the members that are left are dropped, and the other ranks see that they are gone.
        let others: Vec<_> = members.map(spawn).collect::<Result<_, _>>()?;
        let summary = cores::on_own_thread(move || run_rank(plan, transport, &mut leader, region));
        let others = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        let others: Result<Vec<_>, Error> = others.collect();
        // The leader has already received the errors of the other ranks.
        summary.and_then(|summary| others.map(|_| summary))
    })
}

/// What a rank does in a slice of the RPC.
enum Role {
    Client(Box<dyn ClientLoop>),
    Server(Box<dyn ServerLoop>),
}

/// The results of all slices.
#[derive(Default)]
struct Measured {
    rpc: Vec<Throughput>,
    /// Times that [`CacheLinePingPong::lead`] recorded.
    cache_line_times: Histogram,
    /// For [`TakeResponses::One`] and [`TakeResponses::All`].
    in_place: [Vec<Throughput>; 2],
    two_rings: Vec<Throughput>,
    large_rings: Vec<Throughput>,
    memcpy: Vec<Throughput>,
}

/// What a rank sends to the leader at the end.
#[derive(Default, Serialize, Deserialize)]
struct RankReport {
    requests: u64,
    refused: u64,
    responses: u64,
    batches: u64,
    errors: u64,
    latency: Vec<(u64, u64)>,
    /// The counters of the library.
    library_counters: Vec<(String, u64)>,
}

/// Runs one rank, from creating its server or client to the summary.
fn run_rank(
    plan: &Plan,
    transport: &dyn Transport,
    job: &mut dyn Bootstrap,
    region: &SharedRegion,
) -> Result<Option<Summary>, Error> {
    let mut collective = Collective::new(job);
    let rank = collective.rank();
    let cores = cores::assign(plan.ranks())?;
    // A rank that shares its core must yield it soon.
    let alone = |cores: &Vec<usize>| cores.iter().filter(|core| **core == cores[rank]).count() == 1;
    let spin = SpinWait::new(cores.as_ref().is_some_and(alone));

    // Before pinning, so that the library's own threads are not pinned.
    let mut role = open(plan, transport, &mut collective, spin)?;
    let pinned = cores.as_ref().map_or(Ok(()), |cores| cores::pin_thread(cores[rank]));
    collective.barrier(pinned)?;

    let mut slices = SliceRunner::new(plan, region, spin, &collective);
    let (count, slice) = plan.time.slices();
    let mut progress = Progress::new(&describe(plan), u64::from(count), collective.is_leader());
    let mut measured = Measured::default();
    for at in 0..=count {
        if at == 1 {
            // The first slice was the warm-up.
            measured = Measured::default();
            match &mut role {
                Role::Client(client) => *client.tally() = Tally::default(),
                Role::Server(server) => server.reset_counters(),
            }
        }
        slices.run_rpc(&mut role, slice, spin, &mut collective, &mut measured)?;
        slices.run_limits(slice, &mut collective, &mut measured)?;
        progress.show(u64::from(at));
    }
    drop(progress);

    let report = serde_json::to_vec(&rank_report(role));
    let report = report.map_err(|source| Error::Os { what: "JSON", source: source.into() });
    let reports = collective.gather(report)?;
    let reports: Result<Vec<RankReport>, Error> =
        reports.iter().map(|report| serde_json::from_slice(report).map_err(|_| Error::Protocol)).collect();
    Ok(if collective.is_leader() { Some(summarize(plan, cores, &measured, &reports?)) } else { None })
}

/// Creates the server, then connects the clients to it.
fn open(
    plan: &Plan,
    transport: &dyn Transport,
    collective: &mut Collective<'_>,
    spin: SpinWait,
) -> Result<Role, Error> {
    let idle = Idle::new(plan.wait == Wait::Spin, spin);
    if collective.rank() == SERVER {
        let name = format!("crosstie-bench.{}", std::process::id());
        let (server, outcome) = split_result(transport.serve(plan, &name, idle), name.into_bytes());
        collective.gather(outcome)?;
        collective.barrier(Ok(()))?;
        return Ok(Role::Server(server.ok_or(Error::Protocol)?));
    }
    let names = collective.gather(Ok(Vec::new()))?;
    let name = names.get(SERVER).map(|name| String::from_utf8_lossy(name)).ok_or(Error::Protocol)?;
    let (client, outcome) = split_result(transport.connect(plan, &name, collective.rank(), idle), Vec::new());
    collective.gather(outcome)?;
    Ok(Role::Client(client.ok_or(Error::Protocol)?))
}

/// Splits a result into its value, and what to send to the other ranks: the blob or the error.
fn split_result<T>(opened: Result<T, Error>, blob: Vec<u8>) -> (Option<T>, Result<Vec<u8>, Error>) {
    match opened {
        Ok(opened) => (Some(opened), Ok(blob)),
        Err(error) => (None, Err(error)),
    }
}

/// Runs the slices of one rank: of the RPC, and of the limits.
struct SliceRunner<'a> {
    depth: usize,
    barrier: SliceBarrier<'a>,
    cache_line: CacheLinePingPong<'a>,
    in_place: Box<dyn PlainExchange + 'a>,
    two_rings: Box<dyn PlainExchange + 'a>,
    large_rings: Option<Box<dyn PlainExchange + 'a>>,
    memcpy: Option<Memcpy>,
}

impl<'a> SliceRunner<'a> {
    fn new(
        plan: &Plan,
        region: &'a SharedRegion,
        spin: SpinWait,
        collective: &Collective<'_>,
    ) -> SliceRunner<'a> {
        let Plan { payload, depth, .. } = *plan;
        let layout = plan.region_layout();
        let rings = |(offset, slots)| limits::two_rings(region, offset, payload, depth, slots, spin);
        SliceRunner {
            depth,
            barrier: SliceBarrier::new(region, plan.clients),
            cache_line: CacheLinePingPong::new(region, spin),
            in_place: limits::in_place(region, layout.in_place, payload, depth, spin),
            two_rings: rings((layout.two_rings, depth)),
            large_rings: layout.large_rings.map(rings),
            memcpy: (collective.is_leader() && payload >= LARGE).then(|| Memcpy::new(payload, depth)),
        }
    }

    /// Runs one slice of the RPC. The result sums up the operations of all clients; its time is that of the slowest client.
    fn run_rpc(
        &mut self,
        role: &mut Role,
        slice: Duration,
        spin: SpinWait,
        collective: &mut Collective<'_>,
        measured: &mut Measured,
    ) -> Result<(), Error> {
        self.barrier.begin_slice();
        let outcome = match role {
            Role::Client(client) => {
                let throughput = self.barrier.wait_for_start(spin).and_then(|()| client.run_slice(slice));
                self.barrier.finish();
                throughput
            }
            Role::Server(server) => server
                .serve_until(&|| self.barrier.all_finished())
                .map(|()| Throughput { operations: 0, time: Duration::ZERO }),
        };
        let words = outcome.map(|throughput| [throughput.operations, throughput.time.as_nanos() as u64]);
        let reports = collective.gather(words.map(|words| words.map(u64::to_ne_bytes).concat()))?;
        let mut total = Throughput { operations: 0, time: Duration::ZERO };
        for report in reports {
            let (words, []) = report.as_chunks::<8>() else { return Err(Error::Protocol) };
            let [operations, ns] = *words else { return Err(Error::Protocol) };
            total.operations += u64::from_ne_bytes(operations);
            total.time = total.time.max(Duration::from_nanos(u64::from_ne_bytes(ns)));
        }
        measured.rpc.push(total);
        Ok(())
    }

    /// Runs one slice of every limit, between the leading client and the server.
    fn run_limits(
        &mut self,
        slice: Duration,
        collective: &mut Collective<'_>,
        measured: &mut Measured,
    ) -> Result<(), Error> {
        let rank = collective.rank();
        collective.barrier(match rank {
            0 => self.cache_line.lead(slice / 4, &mut measured.cache_line_times),
            SERVER => self.cache_line.follow(),
            _ => Ok(()),
        })?;
        let SliceRunner { depth, in_place, two_rings, large_rings, .. } = self;
        let Measured { in_place: [one, all], two_rings: rings, large_rings: large, .. } = measured;
        let mut run_slice =
            |exchange: &mut Box<dyn PlainExchange + '_>, take, throughputs: &mut Vec<Throughput>| {
                collective.barrier(match rank {
                    0 => exchange.lead(slice / 4, take).map(|throughput| throughputs.push(throughput)),
                    SERVER => exchange.follow(),
                    _ => Ok(()),
                })
            };
        run_slice(in_place, TakeResponses::One, one)?;
        if *depth > 1 {
            run_slice(in_place, TakeResponses::All, all)?;
        }
        run_slice(two_rings, TakeResponses::One, rings)?;
        large_rings.as_mut().map_or(Ok(()), |exchange| run_slice(exchange, TakeResponses::One, large))?;
        if let Some(memcpy) = &mut self.memcpy {
            measured.memcpy.push(memcpy.run(slice / 4));
        }
        collective.barrier(Ok(()))
    }
}

fn rank_report(role: Role) -> RankReport {
    match role {
        Role::Client(mut client) => {
            let Tally { requests, refused, errors, latency } = std::mem::take(client.tally());
            RankReport {
                requests,
                refused,
                errors,
                latency: latency.counts().collect(),
                ..RankReport::default()
            }
        }
        Role::Server(server) => {
            let library_counters =
                server.counters().into_iter().map(|(name, count)| (name.to_owned(), count));
            let (responses, batches) = server.responses_and_batches();
            RankReport {
                responses,
                batches,
                library_counters: library_counters.collect(),
                ..RankReport::default()
            }
        }
    }
}

fn summarize(plan: &Plan, cores: Option<Vec<usize>>, measured: &Measured, reports: &[RankReport]) -> Summary {
    let Measured { rpc, cache_line_times, in_place, two_rings, large_rings, memcpy } = measured;
    let per_second = |throughputs: &[Throughput]| median(throughputs.iter().map(Throughput::per_second));
    let sum = |count: fn(&RankReport) -> u64| reports.iter().map(count).sum::<u64>();
    let mut latency = Histogram::new();
    for (value, times) in reports.iter().flat_map(|report| &report.latency) {
        latency.record_n(*value, *times);
    }
    let (requests, responses) = (sum(|report| report.requests), sum(|report| report.responses));
    let mut counters = BTreeMap::from(
        [
            ("messages", requests + responses),
            ("bytes", (requests + responses) * plan.payload as u64),
            ("requests", requests),
            ("responses", responses),
            ("refused", sum(|report| report.refused)),
            ("batches", sum(|report| report.batches)),
        ]
        .map(|(name, count)| (name.to_owned(), count)),
    );
    counters.extend(reports.iter().flat_map(|report| report.library_counters.iter().cloned()));
    let best =
        |throughputs: [&[Throughput]; 2]| throughputs.into_iter().filter_map(per_second).reduce(f64::max);
    let in_place = best([&in_place[0], &in_place[1]]);
    let two_rings = best([two_rings, large_rings]);
    let limit = match plan.kind {
        Kind::Ipc if plan.depth == 1 => in_place,
        Kind::Ipc => [in_place, two_rings].into_iter().flatten().reduce(f64::max),
        Kind::Delegation | Kind::Flux => two_rings,
    };
    let measurements = Measurements {
        ops: rpc.iter().map(|throughput| throughput.operations).sum(),
        seconds: rpc.iter().map(|throughput| throughput.time).sum::<Duration>().as_secs_f64(),
        ops_per_s: per_second(rpc).unwrap_or(0.0),
        latency: &latency,
        errors: sum(|report| report.errors) + requests.abs_diff(responses),
        counters,
        sends_ops_per_s: None,
        beside_device: None,
        issue_p50_ns: None,
        limits: summary::Limits {
            cache_line_ns: CacheLinePingPong::median(cache_line_times),
            ops_per_s: limit,
            in_place_ops_per_s: in_place,
            two_rings_ops_per_s: two_rings,
            copies_per_s: per_second(memcpy),
        },
    };
    let setup = Setup {
        bench: plan.kind.name(),
        device: plan.kind.device().into(),
        op: None,
        payload: plan.payload,
        batch: None,
        qps: None,
        queue_depth: plan.depth,
        clients: Some(plan.clients),
        response: None,
        endpoints: None,
        processes: plan.processes,
        waiting: Some(plan.wait.name()),
        registered_in_place: None,
        cores,
    };
    Summary::new(setup, &measurements)
}

fn describe(plan: &Plan) -> String {
    format!("{} {} B depth {}", plan.kind.name(), plan.payload, plan.depth)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
    use std::sync::{Mutex, PoisonError};

    use super::rpc_loop::{Client, RpcClient, RpcServer, Server};
    use super::*;

    /// Channels of the standard library as a transport: tests the loops without the library's RPC.
    struct Channels {
        clients: Mutex<Vec<(Sender<u64>, Receiver<u64>)>>,
        server: Mutex<Vec<(Sender<u64>, Receiver<u64>)>>,
        /// The responses to multiples of this number are wrong.
        wrong: Option<u64>,
    }

    impl Channels {
        fn new(clients: usize, wrong: Option<u64>) -> Channels {
            let pairs = (0..clients).map(|_| {
                let ((send_request, requests), (send_response, responses)) = (channel(), channel());
                ((send_request, responses), (send_response, requests))
            });
            let (clients, server): (Vec<_>, Vec<_>) = pairs.unzip();
            Channels { clients: Mutex::new(clients), server: Mutex::new(server), wrong }
        }
    }

    struct ChannelPeer {
        channels: Vec<(Sender<u64>, Receiver<u64>)>,
        issued: std::collections::VecDeque<u64>,
        wrong: Option<u64>,
    }

    impl RpcClient for ChannelPeer {
        fn call(&mut self, number: u64) -> Result<bool, Error> {
            self.issued.push_back(number);
            self.channels[0].0.send(number).map_err(|_| Error::Protocol).map(|()| true)
        }
        fn poll(&mut self, mut seen: impl FnMut(u64, u64)) -> Result<usize, Error> {
            match self.channels[0].1.try_recv() {
                Ok(number) => seen(self.issued.pop_front().ok_or(Error::Protocol)?, number),
                Err(TryRecvError::Empty) => return Ok(0),
                Err(TryRecvError::Disconnected) => return Err(Error::Protocol),
            }
            Ok(1)
        }
        fn wait(&mut self, _timeout: Duration) -> Result<(), Error> {
            std::thread::yield_now();
            Ok(())
        }
    }

    impl RpcServer for ChannelPeer {
        fn serve(&mut self) -> Result<usize, Error> {
            let mut count = 0;
            for (responses, requests) in &self.channels {
                while let Ok(number) = requests.try_recv() {
                    let right = rpc_loop::response_number(number);
                    let is_wrong = self.wrong.is_some_and(|wrong| number.is_multiple_of(wrong));
                    let sent = responses.send(if is_wrong { !right } else { right });
                    sent.map_err(|_| Error::Protocol)?;
                    count += 1;
                }
            }
            Ok(count)
        }
        fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
            RpcClient::wait(self, timeout)
        }
    }

    impl Transport for Channels {
        fn serve(&self, _: &Plan, _: &str, idle: Idle) -> Result<Box<dyn ServerLoop>, Error> {
            let channels = std::mem::take(&mut *self.server.lock().expect("no thread has panicked"));
            let channels = ChannelPeer { channels, issued: Default::default(), wrong: self.wrong };
            Ok(Box::new(Server::new(channels, idle)))
        }
        fn connect(
            &self,
            plan: &Plan,
            _: &str,
            rank: usize,
            idle: Idle,
        ) -> Result<Box<dyn ClientLoop>, Error> {
            let channels = self.clients.lock().expect("no thread has panicked").pop().into_iter().collect();
            let channels = ChannelPeer { channels, issued: Default::default(), wrong: None };
            Ok(Box::new(Client::new(channels, rank, plan.payload, plan.depth, idle)))
        }
    }

    /// The benchmarks are pinned to the same two cores, so the tests run one at a time.
    static MEASURING: Mutex<()> = Mutex::new(());

    fn measured(kind: Kind, depth: u32, clients: u32, wrong: Option<u64>) -> serde_json::Value {
        measured_for(0.05, kind, depth, clients, wrong)
    }

    fn measured_for(
        duration: f64,
        kind: Kind,
        depth: u32,
        clients: u32,
        wrong: Option<u64>,
    ) -> serde_json::Value {
        let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
        let arguments = Arguments {
            json: true,
            duration,
            payload: 4096,
            queue_depth: depth,
            clients,
            processes: false,
            wait: Some(Wait::Adaptive),
        };
        let plan = Plan::new(kind, &arguments).expect("the options are valid");
        let summary = measure(&plan, &Channels::new(clients as usize, wrong));
        let summary = summary.expect("the benchmark succeeds").expect("this process leads");
        serde_json::to_value(&summary).expect("JSON")
    }

    #[test]
    fn every_message_is_counted_and_the_limit_matches_the_kind() {
        for (kind, depth, limit) in [
            (Kind::Ipc, 1, "limit_in_place_ops_per_s"),
            (Kind::Delegation, 5, "limit_two_rings_ops_per_s"),
            (Kind::Flux, 1, "limit_two_rings_ops_per_s"),
        ] {
            let found = measured(kind, depth, 1, None);
            assert_eq!(found["errors"], 0, "{found}");
            let ops = found["ops"].as_u64().expect("a number");
            assert!(ops > 0, "{found}");
            assert_eq!(found["counters"]["messages"], 2 * ops, "{found}");
            assert_eq!(found["counters"]["bytes"], 2 * 4096 * ops, "{found}");
            assert_eq!(found["limit_ops_per_s"], found[limit], "{found}");
            for name in ["ratio_to_limit", "limit_ns", "limit_bytes_per_s", "bytes_per_s", "p50_ns"] {
                assert!(found[name].as_f64().is_some_and(|figure| figure > 0.0), "{name} of {found}");
            }
        }
    }

    #[test]
    fn result_of_several_clients_is_their_sum_without_a_ratio() {
        let found = measured(Kind::Ipc, 3, 3, None);
        assert_eq!((&found["errors"], &found["clients"]), (&0.into(), &3.into()), "{found}");
        assert_eq!(found["counters"]["messages"], 2 * found["ops"].as_u64().expect("a number"));
        assert!(found["limit_ops_per_s"].is_f64(), "{found}");
        assert_eq!(found["ratio_to_limit"], serde_json::Value::Null);
    }

    #[test]
    fn wrong_response_counts_as_an_error() {
        // On a busy machine a short run has fewer operations than there are from one wrong response to the next.
        for duration in [0.05, 0.5, 5.0, 50.0] {
            let found = measured_for(duration, Kind::Ipc, 1, 1, Some(10));
            let ops = found["ops"].as_u64().expect("a number");
            if ops >= 20 {
                let errors = found["errors"].as_u64().expect("a number");
                assert!(errors > 0 && errors < ops, "{found}");
                return;
            }
        }
        panic!("fewer than 20 operations in 50 seconds");
    }
}
