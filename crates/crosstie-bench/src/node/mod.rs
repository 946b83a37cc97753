//! `crosstie bench ipc`, `delegation` and `flux`: requests and responses inside one node, beside what the machine allows.
//!
//! One server and some clients, threads or processes. The first client leads: it has the clock, and between its slices it
//! measures the limits together with the server, while further clients sleep. So all see the same weather, and the
//! medians over the slices can be compared.
//!
//! ```text
//! rank 0  the leading client      core of its own, if there are two
//! rank 1  the server              core of its own, if there are two
//! rank 2… further clients         cores of their own, or shared with other clients
//! ```

mod delegation;
pub(super) mod exchange;
mod flux;
mod gate;
mod ipc;
pub(super) mod payload;
pub(super) mod plan;
mod shared_memory;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::bootstrap::{self, Bootstrap, Limits, local};
use crosstie::telemetry::Histogram;
use serde::{Deserialize, Serialize};

pub use plan::{Arguments, Kind, Plan};

use self::exchange::{Answering, Asking, Client, Idle, Server, Tally};
use self::gate::Gate;
use self::plan::Waiting;
use super::arena::{self, Arena};
use super::cores;
use super::limits::{self, Exchange, Line, Memcpy, Pace, Take};
use super::meeting::Meeting;
use super::patience::Patience;
use super::progress::Progress;
use super::summary::{self, Figures, LARGE, Report, Subject, median};
use crate::error::Error;

/// The rank that answers.
const SERVER: usize = 1;

/// What carries the messages.
trait Transport: Sync {
    type Client: Asking;
    type Server: Answering;
    /// Opens the server, of a name that nobody else has.
    fn serve(&self, plan: &Plan, name: &str) -> Result<Self::Server, Error>;
    /// Connects a client to the server of that name.
    fn connect(&self, plan: &Plan, name: &str, rank: usize) -> Result<Self::Client, Error>;
}

/// Measures, and reports where this process leads.
pub fn run(plan: &Plan) -> Result<Option<Report>, Error> {
    match plan.kind {
        Kind::Ipc => ipc::run(plan),
        Kind::Flux => flux::run(plan),
        Kind::Delegation => delegation::run(plan),
    }
}

fn measure<T: Transport>(plan: &Plan, transport: &T) -> Result<Option<Report>, Error> {
    let mut job = bootstrap::from_env()?;
    let arena_len = plan.arena().len;
    if job.size() == 1 {
        let arena = Arena::create(arena_len)?;
        if !plan.processes {
            return in_threads(plan, transport, &arena);
        }
        let mut job = local::JobBuilder::new(plan.sides() as u32)
            .arguments(plan.command_line())
            .variable(arena::VARIABLE, arena.descriptor())
            .start()?;
        let report = cores::on_own_thread(|| take_part(plan, transport, &mut job, &arena))?;
        job.finish()?;
        return Ok(report);
    }
    let Some(arena) = Arena::inherited(arena_len)? else {
        let name = plan.kind.name();
        return Err(Error::Usage(format!(
            "bench {name} is inside one node and starts its own sides: start it once, without a launcher"
        )));
    };
    let report = take_part(plan, transport, job.as_mut(), &arena)?;
    job.finish()?;
    Ok(report)
}

/// All sides in this process.
fn in_threads<T: Transport>(plan: &Plan, transport: &T, arena: &Arena) -> Result<Option<Report>, Error> {
    let mut members = local::in_process(plan.sides() as u32, Limits::default())?.into_iter();
    let Some(mut leader) = members.next() else { return Err(Error::Protocol) };
    std::thread::scope(|scope| {
        let others: Vec<_> = members
            .map(|mut member| scope.spawn(move || take_part(plan, transport, &mut member, arena)))
            .collect();
        let report = cores::on_own_thread(|| take_part(plan, transport, &mut leader, arena));
        let others = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        let others: Result<Vec<_>, Error> = others.collect();
        // What the others have to complain of, the leader has heard.
        report.and_then(|report| others.map(|_| report))
    })
}

/// What a side does in a slice of ours.
enum Role<C, S> {
    Client(Client<C>),
    Server(Server<S>),
}

/// What all sides together measured.
#[derive(Default)]
struct Measured {
    ours: Vec<Pace>,
    /// As [`Line::lead`] records them.
    lines: Histogram,
    /// Taking responses one at a time, and all that are there.
    in_place: [Vec<Pace>; 2],
    two_rings: Vec<Pace>,
    roomy_rings: Vec<Pace>,
    memcpy: Vec<Pace>,
}

/// What a side tells at the end.
#[derive(Default, Serialize, Deserialize)]
struct Told {
    requests: u64,
    refused: u64,
    responses: u64,
    batches: u64,
    errors: u64,
    latency: Vec<(u64, u64)>,
    /// What the library counted.
    counted: Vec<(String, u64)>,
}

/// One side, from opening to the report.
fn take_part<T: Transport>(
    plan: &Plan,
    transport: &T,
    job: &mut dyn Bootstrap,
    arena: &Arena,
) -> Result<Option<Report>, Error> {
    let mut meeting = Meeting::new(job);
    let rank = meeting.rank();
    let cores = cores::places(plan.sides())?;
    // Sides that share a core must give way soon.
    let alone = |cores: &Vec<usize>| cores.iter().filter(|core| **core == cores[rank]).count() == 1;
    let patience = Patience::new(cores.as_ref().is_some_and(alone));

    // Before pinning: threads of the library may run anywhere.
    let mut role = open(plan, transport, &mut meeting, patience)?;
    let pinned = cores.as_ref().map_or(Ok(()), |cores| cores::pin(cores[rank]));
    meeting.keep_step(pinned)?;

    let mut sides = Sides::new(plan, arena, patience, &meeting);
    let (count, slice) = plan.span.slices();
    let mut progress = Progress::new(&describe(plan), u64::from(count), meeting.leads());
    let mut measured = Measured::default();
    for at in 0..=count {
        if at == 1 {
            // What came before was to warm up.
            measured = Measured::default();
            match &mut role {
                Role::Client(client) => client.tally = Tally::default(),
                Role::Server(server) => (server.responses, server.batches) = (0, 0),
            }
        }
        sides.ours(&mut role, slice, patience, &mut meeting, &mut measured)?;
        sides.limits(slice, &mut meeting, &mut measured)?;
        progress.show(u64::from(at));
    }
    drop(progress);

    let told = serde_json::to_vec(&tell(role));
    let told = told.map_err(|source| Error::Os { what: "JSON", source: source.into() });
    let told = meeting.gather(told)?;
    let told: Result<Vec<Told>, Error> =
        told.iter().map(|told| serde_json::from_slice(told).map_err(|_| Error::Protocol)).collect();
    Ok(if meeting.leads() { Some(report(plan, cores, &measured, &told?)) } else { None })
}

/// The server first, then the clients.
fn open<T: Transport>(
    plan: &Plan,
    transport: &T,
    meeting: &mut Meeting<'_>,
    patience: Patience,
) -> Result<Role<T::Client, T::Server>, Error> {
    let idle = Idle::new(plan.waiting == Waiting::Spin, patience);
    if meeting.rank() == SERVER {
        let name = format!("crosstie-bench.{}", std::process::id());
        let (server, told) = apart(transport.serve(plan, &name), name.into_bytes());
        meeting.gather(told)?;
        meeting.keep_step(Ok(()))?;
        return Ok(Role::Server(Server::new(server.ok_or(Error::Protocol)?, idle)));
    }
    let names = meeting.gather(Ok(Vec::new()))?;
    let name = names.get(SERVER).map(|name| String::from_utf8_lossy(name)).ok_or(Error::Protocol)?;
    let (client, told) = apart(transport.connect(plan, &name, meeting.rank()), Vec::new());
    meeting.gather(told)?;
    let client = client.ok_or(Error::Protocol)?;
    Ok(Role::Client(Client::new(client, meeting.rank(), plan.payload, plan.depth, idle)))
}

/// What there is, and what to tell of it.
fn apart<T>(opened: Result<T, Error>, blob: Vec<u8>) -> (Option<T>, Result<Vec<u8>, Error>) {
    match opened {
        Ok(opened) => (Some(opened), Ok(blob)),
        Err(error) => (None, Err(error)),
    }
}

/// This side of everything that is not ours.
struct Sides<'a> {
    depth: usize,
    gate: Gate<'a>,
    line: Line<'a>,
    in_place: Box<dyn Exchange + 'a>,
    two_rings: Box<dyn Exchange + 'a>,
    roomy_rings: Option<Box<dyn Exchange + 'a>>,
    memcpy: Option<Memcpy>,
}

impl<'a> Sides<'a> {
    fn new(plan: &Plan, arena: &'a Arena, patience: Patience, meeting: &Meeting<'_>) -> Sides<'a> {
        let Plan { payload, depth, .. } = *plan;
        let at = plan.arena();
        let rings = |(offset, places)| limits::two_rings(arena, offset, payload, depth, places, patience);
        Sides {
            depth,
            gate: Gate::new(arena, plan.clients),
            line: Line::new(arena, patience),
            in_place: limits::in_place(arena, at.in_place, payload, depth, patience),
            two_rings: rings((at.two_rings, depth)),
            roomy_rings: at.roomy_rings.map(rings),
            memcpy: (meeting.leads() && payload >= LARGE).then(|| Memcpy::new(payload, depth)),
        }
    }

    /// One slice of ours, all clients together: the time is that of the slowest.
    fn ours<C: Asking, S: Answering>(
        &mut self,
        role: &mut Role<C, S>,
        slice: Duration,
        patience: Patience,
        meeting: &mut Meeting<'_>,
        measured: &mut Measured,
    ) -> Result<(), Error> {
        self.gate.next();
        let done = match role {
            Role::Client(client) => {
                let asked = self.gate.enter(patience).and_then(|()| client.ask(slice));
                self.gate.leave();
                asked
            }
            Role::Server(server) => {
                server.answer(|_| self.gate.all_are_out()).map(|()| Pace { turns: 0, time: Duration::ZERO })
            }
        };
        let words = done.map(|pace| [pace.turns, pace.time.as_nanos() as u64]);
        let told = meeting.gather(words.map(|words| words.map(u64::to_ne_bytes).concat()))?;
        let mut together = Pace { turns: 0, time: Duration::ZERO };
        for told in told {
            let (words, []) = told.as_chunks::<8>() else { return Err(Error::Protocol) };
            let [turns, ns] = *words else { return Err(Error::Protocol) };
            together.turns += u64::from_ne_bytes(turns);
            together.time = together.time.max(Duration::from_nanos(u64::from_ne_bytes(ns)));
        }
        measured.ours.push(together);
        Ok(())
    }

    /// One slice of every limit, between the leading client and the server.
    fn limits(
        &mut self,
        slice: Duration,
        meeting: &mut Meeting<'_>,
        measured: &mut Measured,
    ) -> Result<(), Error> {
        let rank = meeting.rank();
        meeting.keep_step(match rank {
            0 => self.line.lead(slice / 4, &mut measured.lines),
            SERVER => self.line.follow(),
            _ => Ok(()),
        })?;
        let Sides { depth, in_place, two_rings, roomy_rings, .. } = self;
        let Measured { in_place: [one, all], two_rings: rings, roomy_rings: roomy, .. } = measured;
        let mut make = |exchange: &mut Box<dyn Exchange + '_>, take, paces: &mut Vec<Pace>| {
            meeting.keep_step(match rank {
                0 => exchange.lead(slice / 4, take).map(|pace| paces.push(pace)),
                SERVER => exchange.follow(),
                _ => Ok(()),
            })
        };
        make(in_place, Take::One, one)?;
        if *depth > 1 {
            make(in_place, Take::All, all)?;
        }
        make(two_rings, Take::One, rings)?;
        roomy_rings.as_mut().map_or(Ok(()), |exchange| make(exchange, Take::One, roomy))?;
        if let Some(memcpy) = &mut self.memcpy {
            measured.memcpy.push(memcpy.run(slice / 4));
        }
        meeting.keep_step(Ok(()))
    }
}

fn tell<C, S: Answering>(role: Role<C, S>) -> Told {
    match role {
        Role::Client(client) => {
            let Tally { requests, refused, errors, latency } = client.tally;
            Told { requests, refused, errors, latency: latency.counts().collect(), ..Told::default() }
        }
        Role::Server(server) => {
            let counted = server.counters().into_iter().map(|(name, count)| (name.to_owned(), count));
            Told {
                responses: server.responses,
                batches: server.batches,
                counted: counted.collect(),
                ..Told::default()
            }
        }
    }
}

fn report(plan: &Plan, cores: Option<Vec<usize>>, measured: &Measured, told: &[Told]) -> Report {
    let Measured { ours, lines, in_place, two_rings, roomy_rings, memcpy } = measured;
    let per_second = |paces: &[Pace]| median(paces.iter().map(Pace::per_second));
    let sum = |count: fn(&Told) -> u64| told.iter().map(count).sum::<u64>();
    let mut latency = Histogram::new();
    for (value, times) in told.iter().flat_map(|told| &told.latency) {
        latency.record_n(*value, *times);
    }
    let (requests, responses) = (sum(|told| told.requests), sum(|told| told.responses));
    let mut counters = BTreeMap::from(
        [
            ("messages", requests + responses),
            ("bytes", (requests + responses) * plan.payload as u64),
            ("requests", requests),
            ("responses", responses),
            ("refused", sum(|told| told.refused)),
            ("batches", sum(|told| told.batches)),
        ]
        .map(|(name, count)| (name.to_owned(), count)),
    );
    counters.extend(told.iter().flat_map(|told| told.counted.iter().cloned()));
    let best = |paces: [&[Pace]; 2]| paces.into_iter().filter_map(per_second).reduce(f64::max);
    let in_place = best([&in_place[0], &in_place[1]]);
    let two_rings = best([two_rings, roomy_rings]);
    let limit = match plan.kind {
        Kind::Ipc if plan.depth == 1 => in_place,
        Kind::Ipc => [in_place, two_rings].into_iter().flatten().reduce(f64::max),
        Kind::Delegation | Kind::Flux => two_rings,
    };
    let figures = Figures {
        ops: ours.iter().map(|pace| pace.turns).sum(),
        seconds: ours.iter().map(|pace| pace.time).sum::<Duration>().as_secs_f64(),
        ops_per_s: per_second(ours).unwrap_or(0.0),
        latency: &latency,
        errors: sum(|told| told.errors) + requests.abs_diff(responses),
        counters,
        sends_ops_per_s: None,
        limits: summary::Limits {
            line_ns: Line::median(lines),
            ops_per_s: limit,
            in_place_ops_per_s: in_place,
            two_rings_ops_per_s: two_rings,
            copies_per_s: per_second(memcpy),
        },
    };
    let subject = Subject {
        bench: plan.kind.name(),
        device: plan.kind.device().into(),
        op: None,
        payload: plan.payload,
        queue_depth: plan.depth,
        clients: Some(plan.clients),
        response: None,
        endpoints: None,
        processes: plan.processes,
        waiting: Some(plan.waiting.name()),
        registered_in_place: None,
        cores,
    };
    Report::new(subject, &figures)
}

fn describe(plan: &Plan) -> String {
    format!("{} {} B depth {}", plan.kind.name(), plan.payload, plan.depth)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Channels of the standard library, to try the loops without anything of ours.
    struct Channels {
        clients: Mutex<Vec<(Sender<u64>, Receiver<u64>)>>,
        server: Mutex<Vec<(Sender<u64>, Receiver<u64>)>>,
        /// The responses to multiples of this number are wrong.
        wrong: Option<u64>,
    }

    impl Channels {
        fn new(clients: usize, wrong: Option<u64>) -> Channels {
            let pairs = (0..clients).map(|_| {
                let ((ask, asked), (answer, answered)) = (channel(), channel());
                ((ask, answered), (answer, asked))
            });
            let (clients, server): (Vec<_>, Vec<_>) = pairs.unzip();
            Channels { clients: Mutex::new(clients), server: Mutex::new(server), wrong }
        }
    }

    struct Ends {
        ends: Vec<(Sender<u64>, Receiver<u64>)>,
        issued: std::collections::VecDeque<u64>,
        wrong: Option<u64>,
    }

    impl Asking for Ends {
        fn call(&mut self, number: u64) -> Result<bool, Error> {
            self.issued.push_back(number);
            self.ends[0].0.send(number).map_err(|_| Error::Protocol).map(|()| true)
        }
        fn poll(&mut self, mut seen: impl FnMut(u64, u64)) -> Result<usize, Error> {
            match self.ends[0].1.try_recv() {
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

    impl Answering for Ends {
        fn serve(&mut self) -> Result<usize, Error> {
            let mut count = 0;
            for (answers, requests) in &self.ends {
                while let Ok(number) = requests.try_recv() {
                    let right = exchange::answer(number);
                    let told =
                        answers.send(if self.wrong.is_some_and(|wrong| number.is_multiple_of(wrong)) {
                            !right
                        } else {
                            right
                        });
                    told.map_err(|_| Error::Protocol)?;
                    count += 1;
                }
            }
            Ok(count)
        }
        fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
            Asking::wait(self, timeout)
        }
    }

    impl Transport for Channels {
        type Client = Ends;
        type Server = Ends;
        fn serve(&self, _: &Plan, _: &str) -> Result<Ends, Error> {
            let ends = std::mem::take(&mut *self.server.lock().expect("nobody panicked"));
            Ok(Ends { ends, issued: Default::default(), wrong: self.wrong })
        }
        fn connect(&self, _: &Plan, _: &str, _: usize) -> Result<Ends, Error> {
            let ends = self.clients.lock().expect("nobody panicked").pop().into_iter().collect();
            Ok(Ends { ends, issued: Default::default(), wrong: None })
        }
    }

    /// Benchmarks keep to the same two cores: one at a time.
    static MEASURING: Mutex<()> = Mutex::new(());

    fn measured(kind: Kind, depth: u32, clients: u32, wrong: Option<u64>) -> serde_json::Value {
        let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
        let arguments = Arguments {
            json: true,
            duration: 0.05,
            payload: 4096,
            queue_depth: depth,
            clients,
            processes: false,
            waiting: Some(Waiting::Adaptive),
        };
        let plan = Plan::new(kind, &arguments).expect("a good plan");
        let report = measure(&plan, &Channels::new(clients as usize, wrong));
        let report = report.expect("a good run").expect("the leader's report");
        serde_json::to_value(&report).expect("JSON")
    }

    #[test]
    fn every_message_is_counted_and_compared_to_the_right_limit() {
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
    fn several_clients_are_added_up_and_have_no_ratio() {
        let found = measured(Kind::Ipc, 3, 3, None);
        assert_eq!((&found["errors"], &found["clients"]), (&0.into(), &3.into()), "{found}");
        assert_eq!(found["counters"]["messages"], 2 * found["ops"].as_u64().expect("a number"));
        assert!(found["limit_ops_per_s"].is_f64(), "{found}");
        assert_eq!(found["ratio_to_limit"], serde_json::Value::Null);
    }

    #[test]
    fn a_wrong_response_is_an_error() {
        let found = measured(Kind::Ipc, 1, 1, Some(10));
        let (errors, ops) = (found["errors"].as_u64(), found["ops"].as_u64());
        assert!(errors > Some(0) && errors < ops, "{found}");
    }
}
