//! `crosstie bench ipc`, `delegation` and `flux`: requests and responses on one machine, compared with what the machine allows.
//!
//! There are one server and one or more clients, threads or processes. The first client leads; it and the server also measure the
//! limits, while the other clients sleep.
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
pub(super) mod rpc_loop;
mod shared_memory_rpc;
mod slice_barrier;

use std::time::Duration;

use self::rpc_loop::{Client, Idle, RpcClient, RpcServer, Server, check_all_answered};
use self::slice_barrier::SliceBarrier;
use crate::cores;
use crate::error::Error;
use crate::limits::{self, PlainRpc, Throughput};
use crate::options::{Common, check_memory, name_of, usage, within};
use crate::runner::{self, Benchmark, Contender, Counts, Exchange, Job, Measured, Rank, Role};
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;
use crate::summary::{Report, Summary, fields};
use crate::wait::Wait;

/// The rank of the server.
const SERVER: usize = 1;
/// The smallest payload: the 8-byte number by which a response is verified.
const MIN_PAYLOAD: u64 = 8;
/// The largest payload of ipc and delegation.
const MAX_PAYLOAD: u64 = 1 << 20;
/// Limit of the memory for all messages in flight.
const MAX_MEMORY: usize = 256 << 20;

/// RPC on one machine: one server and one or more clients, each a thread or a process.
///
/// The result is compared with minimal code that makes the same exchange between the same two cores at the same depth. Short
/// slices of the benchmark and of that code alternate. Two variants are measured: "in place" (request and response use the same
/// cache line) and "two rings" (one ring per direction, with as many slots as the depth or four times that, whichever is faster).
/// The limit of ipc is "in place" at depth 1, and the faster variant at larger depths. The limit of delegation and flux is "two
/// rings". The limits are always measured with one client; with more clients they are shown without a ratio. Latencies are round
/// trips: of every 32nd request, or of every request from 4 KiB on.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Bytes of a request and of its response.
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = within(MIN_PAYLOAD..=MAX_PAYLOAD))]
    payload: usize,
    /// Requests that each client has in flight.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=1024))]
    queue_depth: usize,
    /// Number of clients; the result is the sum of their operations.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=128))]
    clients: usize,
    /// Run the server and the clients as processes, not as threads.
    #[arg(long)]
    processes: bool,
    /// How a thread waits for messages [default: spin if each has its own core, otherwise adaptive].
    // Scripts may use the former name.
    #[arg(long, value_enum, alias = "waiting")]
    wait: Option<Wait>,
}

/// The RPC to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`crosstie::ipc`]: each client has its own lane.
    Ipc,
    /// [`crosstie::delegation`]: all clients share one ring.
    Delegation,
    /// [`crosstie::flux`]: between threads of one process.
    Flux,
}

/// Creates the server and the clients of an RPC.
trait Transport: Sync {
    /// Creates the server under a unique name.
    fn serve<'a>(&self, member: Member<'a>, name: &str) -> Result<Box<dyn Exchange + 'a>, Error>;
    /// Connects a client to the server of that name.
    fn connect<'a>(&self, member: Member<'a>, name: &str) -> Result<Box<dyn Exchange + 'a>, Error>;
}

/// The server or a client.
struct Member<'a> {
    plan: &'a Arguments,
    wait: Wait,
    /// Its rank.
    number: usize,
    spin: SpinWait,
    barrier: SliceBarrier<'a>,
}

impl<'a> Member<'a> {
    fn client(self, rpc: impl RpcClient + 'a) -> Box<dyn Exchange + 'a> {
        let idle = Idle::new(self.wait == Wait::Spin, self.spin);
        let client = Client::new(rpc, self.number, self.plan.payload, self.plan.queue_depth, idle);
        Box::new(NodeClient { client, barrier: self.barrier, spin: self.spin })
    }

    fn server(self, rpc: impl RpcServer + 'a) -> Box<dyn Exchange + 'a> {
        let idle = Idle::new(self.wait == Wait::Spin, self.spin);
        Box::new(NodeServer { server: Server::new(rpc, idle), barrier: self.barrier })
    }
}

struct NodeClient<'a, R> {
    client: Client<R>,
    barrier: SliceBarrier<'a>,
    spin: SpinWait,
}

impl<R: RpcClient> Exchange for NodeClient<'_, R> {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        self.barrier.begin_slice();
        let done = self.barrier.wait_for_start(self.spin).and_then(|()| self.client.run_slice(slice));
        self.barrier.finish();
        done.map(Some)
    }

    fn reset(&mut self) {
        self.client.reset();
    }

    fn counts(&self) -> Counts {
        self.client.counts()
    }
}

struct NodeServer<'a, R> {
    server: Server<R>,
    barrier: SliceBarrier<'a>,
}

impl<R: RpcServer> Exchange for NodeServer<'_, R> {
    fn run_slice(&mut self, _: Duration) -> Result<Option<Throughput>, Error> {
        self.barrier.begin_slice();
        self.server.serve_until(|_| self.barrier.all_finished()).map(|()| None)
    }

    fn reset(&mut self) {
        self.server.reset();
    }

    fn counts(&self) -> Counts {
        let Server { rpc, responses, batches, .. } = &self.server;
        let own = [("responses", *responses), ("batches", *batches)];
        Counts::new(own.into_iter().chain(rpc.counters()), 0)
    }
}

impl Arguments {
    /// Runs the benchmark. Returns the result in the process that leads.
    pub fn run(&self, kind: Kind) -> Result<Option<Summary>, Error> {
        let wait = self.check(kind)?;
        let transport = match kind {
            Kind::Ipc => ipc::transport(self),
            Kind::Delegation => delegation::transport(self),
            Kind::Flux => flux::transport(self, wait)?,
        };
        runner::run(&Node { kind, plan: self, wait, transport })
    }

    /// Returns how threads wait.
    fn check(&self, kind: Kind) -> Result<Wait, Error> {
        let Arguments { payload, queue_depth, clients, .. } = *self;
        if kind == Kind::Flux && self.processes {
            return usage(
                "--processes: flux works between threads of one process; leave the option out, or measure ipc"
                    .into(),
            );
        }
        if kind == Kind::Flux && !flux::PAYLOADS.contains(&payload) {
            let sizes = flux::PAYLOADS.map(|size| size.to_string()).join(", ");
            return usage(format!(
                "--payload {payload}: for flux give one of {sizes} bytes (its messages are values of types that were compiled in)"
            ));
        }
        let options =
            format!("--payload {payload} times --queue-depth {queue_depth} times --clients {clients}");
        check_memory(&options, payload.max(64) * queue_depth * clients, MAX_MEMORY)?;
        Ok(match self.wait {
            Some(wait) => wait,
            None if cores::allowed()?.len() > clients => Wait::Spin,
            None => Wait::Adaptive,
        })
    }
}

/// The benchmark of one RPC.
struct Node<'p> {
    kind: Kind,
    plan: &'p Arguments,
    wait: Wait,
    transport: Box<dyn Transport>,
}

impl Benchmark for Node<'_> {
    fn job(&self) -> Job<'_> {
        let (bench, device) = match self.kind {
            Kind::Ipc => ("ipc", "shared-memory"),
            Kind::Delegation => ("delegation", "shared-memory"),
            Kind::Flux => ("flux", "threads"),
        };
        let Arguments { payload, queue_depth, clients, .. } = *self.plan;
        let waiting = name_of(self.wait);
        Job {
            bench,
            what: format!(
                "{bench} of {payload} B, queue depth {queue_depth}, clients {clients}, waiting: {waiting}"
            ),
            options: fields([
                ("payload", payload.into()),
                ("queue_depth", queue_depth.into()),
                ("clients", clients.into()),
                ("waiting", waiting.into()),
            ]),
            device: device.into(),
            common: self.plan.common,
            devices: &[],
            ranks: clients + 1,
            processes: self.plan.processes,
            across_machines: false,
            region: PlainRpc::new(payload, queue_depth).region_len(),
        }
    }

    /// Creates the server, then connects the clients to it.
    fn open<'a>(&'a self, rank: &mut Rank<'a>) -> Result<Vec<Contender<'a>>, Error> {
        let Node { plan, wait, ref transport, .. } = *self;
        let barrier = SliceBarrier::new(rank.region.ok_or(Error::Protocol)?, plan.clients);
        let member = Member { plan, wait, number: rank.number, spin: rank.spin, barrier };
        let processes = rank.collective.gather_values(Ok(std::process::id()))?;
        let name = format!("crosstie-bench.{}", processes.get(SERVER).ok_or(Error::Protocol)?);
        let exchange = if rank.number == SERVER {
            let server = rank.collective.agree(transport.serve(member, &name))?;
            rank.collective.agree(Ok(server))?
        } else {
            rank.collective.agree(Ok(()))?;
            rank.collective.agree(transport.connect(member, &name))?
        };
        Ok(vec![Contender { role: Role::Main, exchange }])
    }

    fn limits<'a>(&'a self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>> {
        let Arguments { payload, queue_depth, .. } = *self.plan;
        let plain = PlainRpc::new(payload, queue_depth);
        let mut limits = vec![limits::cache_line(rank, region)];
        limits.extend(plain.with_one_ring(rank, region));
        limits.extend(plain.with_two_rings(rank, region));
        limits.extend(limits::memcpy(rank, payload, queue_depth));
        limits
    }

    fn report(&self, measured: &mut Measured) -> Report {
        let Arguments { payload, queue_depth, clients, .. } = *self.plan;
        let counts = measured.counts();
        check_all_answered(counts);
        let messages = counts.counter("requests") + counts.counter("responses");
        counts.counters.extend([("messages".into(), messages), ("bytes".into(), messages * payload as u64)]);
        let [in_place, two_rings] = [Role::InPlace, Role::TwoRings].map(|role| measured.rate(role));
        let limit = match self.kind {
            Kind::Ipc if queue_depth == 1 => in_place,
            Kind::Ipc => [in_place, two_rings].into_iter().flatten().reduce(f64::max),
            Kind::Delegation | Kind::Flux => two_rings,
        };
        // The limits are measured with one client.
        Report { is_comparable: clients == 1, ..Report::new(payload, Some(queue_depth), limit) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
    use std::sync::{Mutex, PoisonError};

    use super::*;
    use crate::options::MeasureTime;

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
        fn serve<'a>(&self, member: Member<'a>, _: &str) -> Result<Box<dyn Exchange + 'a>, Error> {
            let channels = std::mem::take(&mut *self.server.lock().expect("no thread has panicked"));
            Ok(member.server(ChannelPeer { channels, issued: Default::default(), wrong: self.wrong }))
        }
        fn connect<'a>(&self, member: Member<'a>, _: &str) -> Result<Box<dyn Exchange + 'a>, Error> {
            let channels = self.clients.lock().expect("no thread has panicked").pop().into_iter().collect();
            Ok(member.client(ChannelPeer { channels, issued: Default::default(), wrong: None }))
        }
    }

    /// The benchmarks are pinned to the same two cores, so the tests run one at a time.
    static MEASURING: Mutex<()> = Mutex::new(());

    fn measured(kind: Kind, depth: usize, clients: usize, wrong: Option<u64>) -> serde_json::Value {
        measured_for(0.05, kind, depth, clients, wrong)
    }

    fn measured_for(
        duration: f64,
        kind: Kind,
        queue_depth: usize,
        clients: usize,
        wrong: Option<u64>,
    ) -> serde_json::Value {
        let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
        let duration = MeasureTime(Duration::from_secs_f64(duration));
        let plan = Arguments {
            common: Common { json: true, duration },
            payload: 4096,
            queue_depth,
            clients,
            processes: false,
            wait: None,
        };
        let transport = Box::new(Channels::new(clients, wrong));
        let summary = runner::run(&Node { kind, plan: &plan, wait: Wait::Adaptive, transport });
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
