//! `crosstie bench device`: operations of one connected queue pair, compared with what the machine allows.
//!
//! There are two sides, threads or processes, each pinned to its own core. The run consists of short slices that repeat in this order:
//! the operations of the device, round trips of one cache line, minimal code for the same exchange, and memcpy. All of them run under
//! the same load of the machine, so the medians over the slices can be compared.

mod baseline;
mod connection;
mod plan;
mod sender;
mod traffic;

use std::time::Duration;

use crosstie::telemetry::{Counters, Histogram};
use zerocopy::IntoBytes;

pub(crate) use baseline::DeviceBaseline;
use connection::Connection;
pub use plan::{Arguments, Op, Plan};
use traffic::Traffic;

use super::collective::Collective;
use super::limits::{CacheLinePingPong, Memcpy, PlainDevice, Throughput};
use super::pair::{Pair, PairMember};
use super::progress::Progress;
use super::summary::{self, LARGE, Measurements, Setup, Summary};
use crate::error::Error;
use crate::median::median;

/// Runs the benchmark. Returns the summary in the process that leads.
pub fn run(plan: &Plan) -> Result<Option<Summary>, Error> {
    let pair = Pair {
        bench: "device",
        devices: &plan.devices,
        processes: plan.processes,
        command_line: plan.command_line(),
        region: PlainDevice::region_len(plan.payload, plan.depth),
    };
    pair.run(|member| run_member(plan, member))
}

/// What the leading side measured.
#[derive(Default)]
struct Measured {
    latency: Histogram,
    device: Vec<Throughput>,
    /// Times that [`CacheLinePingPong::lead`] recorded.
    cache_line_times: Histogram,
    plain: Vec<Throughput>,
    memcpy: Vec<Throughput>,
}

/// Runs one side, from opening its device to the summary.
fn run_member(plan: &Plan, mut member: PairMember<'_>) -> Result<Option<Summary>, Error> {
    let PairMember { region, processes, cores, spin, .. } = member;
    let opened = member.device().and_then(|device| Connection::new(plan, &device, spin));
    let mut connection = member.collective.agree(opened)?;
    let peer_info = member.collective.exchange(Ok(connection.peer_info().as_bytes().to_vec()))?;
    let connected = connection.connect(&peer_info);
    member.collective.barrier(connected)?;
    let mut traffic = Traffic::new(connection);
    member.pin()?;
    let mut collective = member.collective;

    let mut plain = region.map(|region| {
        (CacheLinePingPong::new(region, spin), PlainDevice::new(region, plan.payload, plan.depth, spin))
    });
    let mut memcpy =
        (collective.is_leader() && plan.payload >= LARGE).then(|| Memcpy::new(plan.payload, plan.depth));
    let (count, slice) = plan.time.slices();
    let mut progress = Progress::new(&describe(plan), u64::from(count), collective.is_leader());
    let mut measured = Measured::default();
    for at in 0..=count {
        if at == 1 {
            // The first slice was the warm-up.
            measured = Measured::default();
            traffic.connection.sender.counters = Counters::default();
        }
        run_slices(
            plan,
            slice,
            &mut collective,
            &mut traffic,
            plain.as_mut(),
            memcpy.as_mut(),
            &mut measured,
        )?;
        progress.show(u64::from(at));
    }
    drop(progress);

    let counters = traffic.connection.sender.counters;
    let words: Vec<u64> = counters.to_words().into_iter().chain([traffic.connection.errors]).collect();
    let peer_bytes = collective.exchange(Ok(words.as_bytes().to_vec()))?;
    if !collective.is_leader() {
        return Ok(None);
    }
    let mut total = counters;
    let peer_words: Vec<u64> = peer_bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default()))
        .collect();
    let [peer_counters @ .., peer_errors] = peer_words.as_slice() else { return Err(Error::Protocol) };
    total += Counters::from_words(peer_counters.try_into().map_err(|_| Error::Protocol)?);
    Ok(Some(summarize(plan, processes, cores, &measured, total, traffic.connection.errors + peer_errors)))
}

/// Runs one slice of the device and one of each limit.
fn run_slices(
    plan: &Plan,
    slice: Duration,
    collective: &mut Collective<'_>,
    traffic: &mut Traffic,
    plain: Option<&mut (CacheLinePingPong<'_>, PlainDevice<'_>)>,
    memcpy: Option<&mut Memcpy>,
    measured: &mut Measured,
) -> Result<(), Error> {
    let Measured { latency, device, cache_line_times, plain: plain_throughputs, memcpy: memcpy_throughputs } =
        measured;
    let leads = collective.is_leader();
    let outcome =
        run_device_slice(plan, slice, leads, traffic, latency).map(|throughput| device.extend(throughput));
    collective.barrier(outcome)?;
    let Some((cache_line, plain)) = plain else { return Ok(()) };
    let outcome = if leads { cache_line.lead(slice / 3, cache_line_times) } else { cache_line.follow() };
    collective.barrier(outcome)?;
    let slice = slice / 2;
    let outcome = match (leads, plan.op, plan.is_ping_pong()) {
        (true, _, true) => plain.lead_ping_pong(slice).map(|throughput| plain_throughputs.push(throughput)),
        (true, Op::WriteImm | Op::Send, _) => {
            plain.lead_stream(slice).map(|throughput| plain_throughputs.push(throughput))
        }
        (true, Op::Write, _) => plain.write(slice).map(|throughput| plain_throughputs.push(throughput)),
        (true, Op::Read, _) => plain.read(slice).map(|throughput| plain_throughputs.push(throughput)),
        (true, Op::Cas, _) => plain.compare_swap(slice).map(|throughput| plain_throughputs.push(throughput)),
        (true, Op::Faa, _) => plain.fetch_add(slice).map(|throughput| plain_throughputs.push(throughput)),
        (false, _, true) => plain.follow_ping_pong(),
        (false, Op::WriteImm | Op::Send, _) => plain.follow_stream(),
        (false, ..) => Ok(()),
    };
    collective.barrier(outcome)?;
    if let Some(memcpy) = memcpy {
        memcpy_throughputs.push(memcpy.run(slice));
    }
    collective.barrier(Ok(()))
}

/// Runs one slice of the device. The leading side returns its throughput.
fn run_device_slice(
    plan: &Plan,
    slice: Duration,
    leads: bool,
    traffic: &mut Traffic,
    latency: &mut Histogram,
) -> Result<Option<Throughput>, Error> {
    match (leads, plan.op.is_received(), plan.is_ping_pong()) {
        (true, _, true) => traffic.lead_ping_pong(slice, latency).map(Some),
        (true, true, false) => traffic.lead_stream(slice, latency).map(Some),
        (true, false, _) => traffic.lead_one_sided(slice, latency).map(Some),
        (false, _, true) => traffic.follow_ping_pong().map(|()| None),
        (false, true, false) => traffic.follow_stream().map(|()| None),
        (false, false, _) => Ok(None),
    }
}

fn summarize(
    plan: &Plan,
    processes: bool,
    cores: Option<[usize; 2]>,
    measured: &Measured,
    counters: Counters,
    errors: u64,
) -> Summary {
    let Measured { latency, device, cache_line_times, plain, memcpy } = measured;
    let per_second = |throughputs: &[Throughput]| median(throughputs.iter().map(Throughput::per_second));
    let setup = Setup {
        bench: "device",
        device: plan.devices.to_string(),
        op: Some(plan.op.name()),
        payload: plan.payload,
        batch: None,
        qps: None,
        queue_depth: plan.depth,
        clients: None,
        response: None,
        endpoints: None,
        processes,
        waiting: None,
        registered_in_place: Some(plan.in_place),
        cores: cores.map(Vec::from),
    };
    let measurements = Measurements {
        ops: device.iter().map(|throughput| throughput.operations).sum(),
        seconds: device.iter().map(|throughput| throughput.time).sum::<Duration>().as_secs_f64(),
        ops_per_s: per_second(device).unwrap_or(0.0),
        latency,
        errors,
        counters: Counters::NAMES.map(str::to_owned).into_iter().zip(counters.to_words()).collect(),
        sends_ops_per_s: None,
        beside_device: None,
        issue_p50_ns: None,
        limits: summary::Limits {
            cache_line_ns: CacheLinePingPong::median(cache_line_times),
            ops_per_s: per_second(plain),
            copies_per_s: per_second(memcpy),
            ..summary::Limits::default()
        },
    };
    Summary::new(setup, &measurements)
}

/// Text of the progress bar.
pub(crate) fn describe(plan: &Plan) -> String {
    format!("{} {} B depth {}", plan.op.name(), plan.payload, plan.depth)
}
