//! `crosstie bench device`: operations of one connected queue pair, beside what the machine allows.
//!
//! Two sides, threads or processes, each kept on a core of its own. The run is cut into slices: ours, one cache line there and
//! back, the plainest code that makes the same exchange, memcpy; then again. So all of them see the same weather, and
//! the medians over the slices can be compared.

mod outgoing;
mod plan;
mod side;
mod traffic;

use std::time::Duration;

use crosstie::telemetry::{Counters, Histogram};
use zerocopy::IntoBytes;

pub use plan::{Arguments, Op, Plan};
use side::Side;
use traffic::Traffic;

use super::limits::{Line, Memcpy, Pace, Plain};
use super::meeting::Meeting;
use super::progress::Progress;
use super::sides::{Place, TwoSides};
use super::summary::{self, Figures, LARGE, Report, Subject, median};
use crate::error::Error;

/// Measures, and reports where this process leads.
pub fn run(plan: &Plan) -> Result<Option<Report>, Error> {
    let sides = TwoSides {
        bench: "device",
        devices: &plan.devices,
        processes: plan.processes,
        command_line: plan.command_line(),
        arena: Plain::arena_len(plan.payload, plan.depth),
    };
    sides.run(|place| take_part(plan, place))
}

/// What the leading side measured.
#[derive(Default)]
struct Measured {
    latency: Histogram,
    ours: Vec<Pace>,
    /// As [`Line::lead`] records them.
    lines: Histogram,
    plain: Vec<Pace>,
    memcpy: Vec<Pace>,
}

/// One side, from its device to the report.
fn take_part(plan: &Plan, mut place: Place<'_>) -> Result<Option<Report>, Error> {
    let Place { arena, processes, cores, patience, .. } = place;
    let opened = place.device().and_then(|device| Side::new(plan, &device, patience));
    let mut side = place.meeting.agree(opened)?;
    let theirs = place.meeting.exchange(Ok(side.card().as_bytes().to_vec()))?;
    let connected = side.connect(&theirs);
    place.meeting.keep_step(connected)?;
    let mut side = Traffic::new(side);
    place.pin()?;
    let mut meeting = place.meeting;

    let mut plain = arena
        .map(|arena| (Line::new(arena, patience), Plain::new(arena, plan.payload, plan.depth, patience)));
    let mut memcpy =
        (meeting.leads() && plan.payload >= LARGE).then(|| Memcpy::new(plan.payload, plan.depth));
    let (count, slice) = plan.span.slices();
    let mut progress = Progress::new(&describe(plan), u64::from(count), meeting.leads());
    let mut measured = Measured::default();
    for at in 0..=count {
        if at == 1 {
            // What came before was to warm up.
            measured = Measured::default();
            side.side.out.counters = Counters::default();
        }
        round(plan, slice, &mut meeting, &mut side, plain.as_mut(), memcpy.as_mut(), &mut measured)?;
        progress.show(u64::from(at));
    }
    drop(progress);

    let counters = side.side.out.counters;
    let words: Vec<u64> = counters.to_words().into_iter().chain([side.side.errors]).collect();
    let theirs = meeting.exchange(Ok(words.as_bytes().to_vec()))?;
    if !meeting.leads() {
        return Ok(None);
    }
    let mut both = counters;
    let theirs: Vec<u64> =
        theirs.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect();
    let [words @ .., errors] = theirs.as_slice() else { return Err(Error::Protocol) };
    both += Counters::from_words(words.try_into().map_err(|_| Error::Protocol)?);
    Ok(Some(report(plan, processes, cores, &measured, both, side.side.errors + errors)))
}

/// One slice of everything.
fn round(
    plan: &Plan,
    slice: Duration,
    meeting: &mut Meeting<'_>,
    side: &mut Traffic,
    plain: Option<&mut (Line<'_>, Plain<'_>)>,
    memcpy: Option<&mut Memcpy>,
    measured: &mut Measured,
) -> Result<(), Error> {
    let Measured { latency, ours, lines, plain: exchanged, memcpy: copied } = measured;
    let leads = meeting.leads();
    let mine = match (leads, plan.op.is_received(), plan.is_ping_pong()) {
        (true, _, true) => side.lead_ping_pong(slice, latency).map(|pace| ours.push(pace)),
        (true, true, false) => side.lead_stream(slice, latency).map(|pace| ours.push(pace)),
        (true, false, _) => side.lead_one_sided(slice, latency).map(|pace| ours.push(pace)),
        (false, _, true) => side.follow_ping_pong(),
        (false, true, false) => side.follow_stream(),
        (false, false, _) => Ok(()),
    };
    meeting.keep_step(mine)?;
    let Some((line, plain)) = plain else { return Ok(()) };
    let mine = if leads { line.lead(slice / 3, lines) } else { line.follow() };
    meeting.keep_step(mine)?;
    let slice = slice / 2;
    let mine = match (leads, plan.op, plan.is_ping_pong()) {
        (true, _, true) => plain.lead_ping_pong(slice).map(|pace| exchanged.push(pace)),
        (true, Op::WriteImm | Op::Send, _) => plain.lead_stream(slice).map(|pace| exchanged.push(pace)),
        (true, Op::Write, _) => plain.write(slice).map(|pace| exchanged.push(pace)),
        (true, Op::Read, _) => plain.read(slice).map(|pace| exchanged.push(pace)),
        (true, Op::Cas, _) => plain.compare_swap(slice).map(|pace| exchanged.push(pace)),
        (true, Op::Faa, _) => plain.fetch_add(slice).map(|pace| exchanged.push(pace)),
        (false, _, true) => plain.follow_ping_pong(),
        (false, Op::WriteImm | Op::Send, _) => plain.follow_stream(),
        (false, ..) => Ok(()),
    };
    meeting.keep_step(mine)?;
    if let Some(memcpy) = memcpy {
        copied.push(memcpy.run(slice));
    }
    meeting.keep_step(Ok(()))
}

fn report(
    plan: &Plan,
    processes: bool,
    cores: Option<[usize; 2]>,
    measured: &Measured,
    counters: Counters,
    errors: u64,
) -> Report {
    let Measured { latency, ours, lines, plain, memcpy } = measured;
    let per_second = |paces: &[Pace]| median(paces.iter().map(Pace::per_second));
    let subject = Subject {
        bench: "device",
        device: plan.devices.to_string(),
        op: Some(plan.op.name()),
        payload: plan.payload,
        queue_depth: plan.depth,
        clients: None,
        response: None,
        endpoints: None,
        processes,
        waiting: None,
        registered_in_place: Some(plan.in_place),
        cores: cores.map(Vec::from),
    };
    let figures = Figures {
        ops: ours.iter().map(|pace| pace.turns).sum(),
        seconds: ours.iter().map(|pace| pace.time).sum::<Duration>().as_secs_f64(),
        ops_per_s: per_second(ours).unwrap_or(0.0),
        latency,
        errors,
        counters: Counters::NAMES.map(str::to_owned).into_iter().zip(counters.to_words()).collect(),
        sends_ops_per_s: None,
        limits: summary::Limits {
            line_ns: Line::median(lines),
            ops_per_s: per_second(plain),
            copies_per_s: per_second(memcpy),
            ..summary::Limits::default()
        },
    };
    Report::new(subject, &figures)
}

/// What is measured, in words.
pub(crate) fn describe(plan: &Plan) -> String {
    format!("{} {} B depth {}", plan.op.name(), plan.payload, plan.depth)
}
