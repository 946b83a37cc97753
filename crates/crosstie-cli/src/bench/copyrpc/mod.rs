//! `crosstie bench copyrpc`: calls between two nodes, beside what the machine allows.
//!
//! Two sides, threads or processes, each kept on a core of its own, or on two hosts. The leading one asks, with the loop
//! of `bench ipc`; the other answers until it is told, by a last request, that the slice is over. Between our slices the
//! limits are measured where both sides share memory, and, if that is wanted, the same exchange with one SEND per message
//! over the same device. So all of them see the same weather, and the medians over the
//! slices can be compared.

mod plan;
mod role;
mod sends;
mod side;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::bootstrap::{self, Bootstrap, local};
use crosstie::device::Device;
use crosstie::telemetry::Histogram;
use zerocopy::IntoBytes;

pub(crate) use plan::{Arguments, Plan};

use self::role::Role;
use self::sends::Sends;
use self::side::{Body, COUNTERS, Counted, Side};
use super::arena::{self, Arena};
use super::cores;
use super::limits::{self, Exchange, Line, Memcpy, Pace, Take};
use super::meeting::Meeting;
use super::node::plan::ArenaPlan;
use super::patience::Patience;
use super::progress::Progress;
use super::report::{self, Figures, LARGE, Report, Subject, median};
use crate::error::Error;

/// Measures, and reports where this process leads.
pub(crate) fn run(plan: &Plan) -> Result<Option<Report>, Error> {
    // Usual sizes as types, as a user would; others as raw bytes.
    match plan.payload {
        payload if payload != plan.response => measure::<[u8]>(plan),
        8 => measure::<[u8; 8]>(plan),
        16 => measure::<[u8; 16]>(plan),
        32 => measure::<[u8; 32]>(plan),
        48 => measure::<[u8; 48]>(plan),
        64 => measure::<[u8; 64]>(plan),
        _ => measure::<[u8]>(plan),
    }
}

fn measure<M: Body + ?Sized>(plan: &Plan) -> Result<Option<Report>, Error> {
    let mut job = bootstrap::from_env()?;
    let arena_len = ArenaPlan::new(plan.payload, plan.depth).len;
    match job.size() {
        1 if plan.processes => {
            let arena = Arena::create(arena_len)?;
            let mut job = local::Launch::new(2)
                .arguments(plan.command_line())
                .variable(arena::VARIABLE, arena.descriptor())
                .start()?;
            let report = cores::on_own_thread(|| take_part::<M>(plan, &mut job, Some(&arena), None))?;
            job.finish()?;
            Ok(report)
        }
        1 => in_threads::<M>(plan, &Arena::create(arena_len)?),
        2 => {
            let arena = Arena::inherited(arena_len)?;
            let plan = Plan { processes: true, ..plan.clone() };
            let report = take_part::<M>(&plan, job.as_mut(), arena.as_ref(), None)?;
            job.finish()?;
            Ok(report)
        }
        size => {
            Err(Error::Usage(format!("bench copyrpc has two sides, but this job has {size} ranks: start 2")))
        }
    }
}

/// Both sides in this process, on one device if they name the same.
fn in_threads<M: Body + ?Sized>(plan: &Plan, arena: &Arena) -> Result<Option<Report>, Error> {
    let [left, right] = &plan.specs;
    let first = Device::open(left)?;
    let second = if left == right { first.clone() } else { Device::open(right)? };
    let mut members = local::threads(2, bootstrap::Limits::default())?.into_iter();
    let (Some(mut leader), Some(mut follower)) = (members.next(), members.next()) else {
        return Err(Error::Protocol);
    };
    std::thread::scope(|scope| {
        let follower = scope.spawn(move || take_part::<M>(plan, &mut follower, Some(arena), Some(second)));
        let report = cores::on_own_thread(|| take_part::<M>(plan, &mut leader, Some(arena), Some(first)));
        let followed = follower.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // What the follower has to complain of, the leader has heard.
        report.and_then(|report| followed.map(|_| report))
    })
}

/// What the leading side measured.
#[derive(Default)]
struct Measured {
    ours: Vec<Pace>,
    sends: Vec<Pace>,
    /// As [`Line::lead`] records them.
    lines: Histogram,
    two_rings: Vec<Pace>,
    roomy_rings: Vec<Pace>,
    memcpy: Vec<Pace>,
}

/// One side, from opening the device to the report.
fn take_part<M: Body + ?Sized>(
    plan: &Plan,
    job: &mut dyn Bootstrap,
    arena: Option<&Arena>,
    device: Option<Device>,
) -> Result<Option<Report>, Error> {
    let mut meeting = Meeting::new(job);
    let rank = meeting.rank();
    // Sides that share no memory were started by others, who know where they should run.
    let cores = if arena.is_some() { cores::pair()? } else { None };
    let patience = Patience::new(cores.is_some() || arena.is_none());

    // Before pinning: threads of the device may run anywhere.
    let open = || {
        let device = device.map_or_else(|| Device::open(&plan.specs[rank]), Ok)?;
        let sends = plan.beside_sends.then(|| Sends::open(plan, &device, rank == 0)).transpose()?;
        Ok::<_, Error>((Side::<M>::open(plan, device, rank == 0)?, sends))
    };
    let (side, sends) = meeting.agree(open())?;
    let theirs = meeting.exchange(Ok(side.card()))?;
    meeting.keep_step(side.connect(&theirs))?;
    let mut ours = Role::new(side, rank, plan.payload, plan.depth, patience);
    let mut sends = match sends {
        None => None,
        Some(mut sends) => {
            let theirs = meeting.exchange(Ok(sends.card()))?;
            meeting.keep_step(sends.connect(&theirs))?;
            Some(Role::new(sends, rank, plan.payload, plan.depth, patience))
        }
    };
    let pinned = cores.map_or(Ok(()), |cores| cores::pin(cores[rank]));
    meeting.keep_step(pinned)?;

    let mut plain = arena.map(|arena| Plain::new(plan, arena, patience, meeting.leads()));
    let (count, slice) = plan.slices();
    let mut progress = Progress::new(&describe(plan), u64::from(count), meeting.leads());
    let mut measured = Measured::default();
    for at in 0..=count {
        if at == 1 {
            // What came before was to warm up.
            measured = Measured::default();
            ours.carrier().counted = Counted::default();
            ours.forget();
            sends.iter_mut().for_each(Role::forget);
        }
        let mine = ours.slice(slice, patience).map(|pace| measured.ours.extend(pace));
        meeting.keep_step(mine)?;
        if let Some(sends) = &mut sends {
            let mine = sends.slice(slice, patience).map(|pace| measured.sends.extend(pace));
            meeting.keep_step(mine)?;
        }
        if let Some(plain) = &mut plain {
            plain.round(slice, &mut meeting, &mut measured)?;
        }
        progress.show(u64::from(at));
    }
    drop(progress);

    let counted = ours.carrier().counted;
    let sent = sends.as_ref().map_or(0, Role::responses);
    let words: Vec<u64> = counted.into_iter().chain([ours.responses(), sent]).collect();
    let theirs = meeting.exchange(Ok(words.as_bytes().to_vec()))?;
    let Role::Client(client) = ours else { return Ok(None) };
    let (theirs, []) = theirs.as_chunks::<8>() else { return Err(Error::Protocol) };
    let theirs: Vec<u64> = theirs.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let [theirs @ .., responses, sent] = theirs.as_slice() else { return Err(Error::Protocol) };
    if theirs.len() != counted.len() {
        return Err(Error::Protocol);
    }
    let both: Vec<u64> = counted.iter().zip(theirs).map(|(ours, theirs)| ours + theirs).collect();
    let mut errors = client.tally.errors_if_answered(*responses);
    if let Some(Role::Client(sends)) = &sends {
        errors += sends.tally.errors_if_answered(*sent);
    }
    Ok(Some(report(plan, cores, &measured, &client.tally.latency, &both, errors)))
}

/// This side of everything that is not ours.
struct Plain<'a> {
    line: Line<'a>,
    two_rings: Option<Box<dyn Exchange + 'a>>,
    roomy_rings: Option<Box<dyn Exchange + 'a>>,
    memcpy: Option<Memcpy>,
}

impl<'a> Plain<'a> {
    fn new(plan: &Plan, arena: &'a Arena, patience: Patience, leads: bool) -> Plain<'a> {
        let Plan { payload, depth, .. } = *plan;
        let at = ArenaPlan::new(payload, depth);
        // The plain code answers with what it was asked.
        let alike = payload == plan.response;
        let rings = |(offset, places)| limits::two_rings(arena, offset, payload, depth, places, patience);
        Plain {
            line: Line::new(arena, patience),
            two_rings: alike.then(|| rings((at.two_rings, depth))),
            roomy_rings: at.roomy_rings.filter(|_| alike).map(rings),
            memcpy: (leads && payload >= LARGE).then(|| Memcpy::new(payload, depth)),
        }
    }

    /// One slice of every limit.
    fn round(
        &mut self,
        slice: Duration,
        meeting: &mut Meeting<'_>,
        measured: &mut Measured,
    ) -> Result<(), Error> {
        let leads = meeting.leads();
        let slice = slice / 3;
        let lines = &mut measured.lines;
        meeting.keep_step(if leads { self.line.lead(slice, lines) } else { self.line.follow() })?;
        let mut make = |exchange: &mut Box<dyn Exchange + '_>, paces: &mut Vec<Pace>| {
            let made = if leads {
                exchange.lead(slice, Take::One).map(|pace| paces.push(pace))
            } else {
                exchange.follow()
            };
            meeting.keep_step(made)
        };
        if let Some(rings) = &mut self.two_rings {
            make(rings, &mut measured.two_rings)?;
        }
        if let Some(rings) = &mut self.roomy_rings {
            make(rings, &mut measured.roomy_rings)?;
        }
        if let Some(memcpy) = &mut self.memcpy {
            measured.memcpy.push(memcpy.run(slice));
        }
        meeting.keep_step(Ok(()))
    }
}

fn report(
    plan: &Plan,
    cores: Option<[usize; 2]>,
    measured: &Measured,
    latency: &Histogram,
    counted: &[u64],
    errors: u64,
) -> Report {
    let Measured { ours, sends, lines, two_rings, roomy_rings, memcpy } = measured;
    let per_second = |paces: &[Pace]| median(paces.iter().map(Pace::per_second));
    let limit = [two_rings, roomy_rings].into_iter().filter_map(|paces| per_second(paces));
    let limit = limit.reduce(f64::max);
    let names = COUNTERS.map(|(name, _)| name.to_owned());
    let mut counters: BTreeMap<String, u64> = names.into_iter().zip(counted.iter().copied()).collect();
    counters.insert("messages".into(), counters["calls"] + counters["replies"]);
    let subject = Subject {
        bench: "copyrpc",
        device: plan.device_text(),
        op: None,
        payload: plan.payload,
        queue_depth: plan.depth,
        clients: None,
        response: Some(plan.response).filter(|response| *response != plan.payload),
        endpoints: Some(plan.endpoints),
        processes: plan.processes,
        waiting: None,
        registered_in_place: None,
        cores: cores.map(Vec::from),
    };
    let figures = Figures {
        ops: ours.iter().map(|pace| pace.turns).sum(),
        seconds: ours.iter().map(|pace| pace.time).sum::<Duration>().as_secs_f64(),
        ops_per_s: per_second(ours).unwrap_or(0.0),
        latency,
        errors,
        counters,
        sends_ops_per_s: per_second(sends),
        limits: report::Limits {
            line_ns: Line::median(lines),
            ops_per_s: limit,
            two_rings_ops_per_s: limit,
            copies_per_s: per_second(memcpy),
            ..report::Limits::default()
        },
    };
    Report::new(subject, &figures)
}

fn describe(plan: &Plan) -> String {
    format!("copyrpc {} B depth {}", plan.payload, plan.depth)
}
