//! `crosstie bench copyrpc`: calls between two nodes, beside what the machine allows.
//!
//! Two sides, threads or processes, each kept on a core of its own, or on two hosts. The leading one asks, with the loop
//! of `bench ipc`; the other answers until it is told, by a last request, that the slice is over. Between our slices the
//! limits are measured where both sides share memory, and, where it is wanted, the same exchange with one SEND per
//! message over the same device. So all of them see the same weather, and the medians over the slices can be compared.

mod plan;
mod role;
mod sends;
mod side;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::telemetry::Histogram;
use zerocopy::IntoBytes;

pub use plan::{Arguments, Plan};

use self::role::Role;
use self::sends::Sends;
use self::side::{Body, COUNTERS, Counted, Side};
use super::arena::Arena;
use super::limits::{self, Exchange, Line, Memcpy, Pace, Take};
use super::meeting::Meeting;
use super::node::plan::ArenaPlan;
use super::patience::Patience;
use super::progress::Progress;
use super::sides::{Place, TwoSides};
use super::summary::{self, Figures, LARGE, Report, Subject, median};
use crate::error::Error;

/// Measures, and reports where this process leads.
pub fn run(plan: &Plan) -> Result<Option<Report>, Error> {
    // Usual sizes as types, as a user would; others as raw bytes.
    let take_part = match plan.payload {
        payload if payload != plan.response => take_part::<[u8]>,
        8 => take_part::<[u8; 8]>,
        16 => take_part::<[u8; 16]>,
        32 => take_part::<[u8; 32]>,
        48 => take_part::<[u8; 48]>,
        64 => take_part::<[u8; 64]>,
        _ => take_part::<[u8]>,
    };
    let sides = TwoSides {
        bench: "copyrpc",
        devices: &plan.devices,
        processes: plan.processes,
        command_line: plan.command_line(),
        arena: ArenaPlan::new(plan.payload, plan.depth).len,
    };
    sides.run(|place| take_part(plan, place))
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

/// One side, from its device to the report.
fn take_part<M: Body + ?Sized>(plan: &Plan, mut place: Place<'_>) -> Result<Option<Report>, Error> {
    let Place { rank, arena, processes, cores, patience, .. } = place;
    let opened = place.device().and_then(|device| {
        let sends = plan.beside_sends.then(|| Sends::open(plan, &device, rank == 0)).transpose()?;
        Ok((Side::<M>::open(plan, device, rank == 0)?, sends))
    });
    let meeting = &mut place.meeting;
    let (side, sends) = meeting.agree(opened)?;
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
    place.pin()?;

    let mut meeting = place.meeting;
    let mut plain = arena.map(|arena| Plain::new(plan, arena, patience, meeting.leads()));
    let (count, slice) = plan.span.slices();
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
    Ok(Some(report(plan, processes, cores, &measured, &client.tally.latency, &both, errors)))
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
    processes: bool,
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
        device: plan.devices.to_string(),
        op: None,
        payload: plan.payload,
        queue_depth: plan.depth,
        clients: None,
        response: Some(plan.response).filter(|response| *response != plan.payload),
        endpoints: Some(plan.endpoints),
        processes,
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
        limits: summary::Limits {
            line_ns: Line::median(lines),
            ops_per_s: limit,
            two_rings_ops_per_s: limit,
            copies_per_s: per_second(memcpy),
            ..summary::Limits::default()
        },
    };
    Report::new(subject, &figures)
}

fn describe(plan: &Plan) -> String {
    format!("copyrpc {} B depth {}", plan.payload, plan.depth)
}
