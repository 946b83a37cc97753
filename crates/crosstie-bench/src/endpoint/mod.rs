//! `crosstie bench endpoint`: operations of an endpoint, compared with what the machine allows.
//!
//! There are two sides: two threads or two processes, each pinned to its own core, or two hosts. Slices of the endpoint alternate with
//! slices of the limits (and, with `--beside-device`, of the same operation on a bare queue pair), so that all run under the same load
//! of the machine and the medians over the slices can be compared.

mod peer;
mod plan;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::endpoint::EndpointCounters;
use crosstie::telemetry::Histogram;
use zerocopy::IntoBytes;

use peer::{EndpointPeer, Tally};
pub use plan::{Arguments, Op, Plan};

use super::collective::Collective;
use super::device::DeviceBaseline;
use super::limits::{CacheLinePingPong, Memcpy, PlainDevice, Throughput};
use super::pair::{Pair, PairMember};
use super::progress::Progress;
use super::summary::{self, Beside, LARGE, Measurements, Setup, Summary};
use crate::error::Error;
use crate::median::median;

/// Runs the benchmark. Returns the summary in the process that leads.
pub fn run(plan: &Plan) -> Result<Option<Summary>, Error> {
    let pair = Pair {
        bench: "endpoint",
        devices: &plan.devices,
        processes: plan.processes,
        command_line: plan.command_line(),
        region: PlainDevice::region_len(plan.bytes(), plan.depth),
    };
    pair.run(|member| run_member(plan, member))
}

/// What the leading side measured.
#[derive(Default)]
struct Measured {
    latency: Histogram,
    /// How long it took to start a batch.
    issue: Histogram,
    endpoint: Vec<Throughput>,
    device: Vec<Throughput>,
    device_latency: Histogram,
    /// Times that [`CacheLinePingPong::lead`] recorded.
    cache_line_times: Histogram,
    plain: Vec<Throughput>,
    memcpy: Vec<Throughput>,
}

/// Runs one side, from opening its device to the summary.
fn run_member(plan: &Plan, mut member: PairMember<'_>) -> Result<Option<Summary>, Error> {
    let PairMember { region, processes, cores, spin, .. } = member;
    let opened = member.device().and_then(|device| {
        let baseline =
            plan.beside_device.as_ref().map(|plan| DeviceBaseline::open(plan, &device, spin)).transpose()?;
        Ok((EndpointPeer::open(plan, &device, spin)?, baseline))
    });
    let collective = &mut member.collective;
    let (mut peer, mut baseline) = collective.agree(opened)?;
    let address = collective.exchange(Ok(peer.address_bytes()))?;
    collective.barrier(peer.connect(&address))?;
    if let Some(baseline) = &mut baseline {
        let address = collective.exchange(Ok(baseline.address_bytes()))?;
        collective.barrier(baseline.connect(&address))?;
    }
    member.pin()?;
    let mut collective = member.collective;
    let leads = collective.is_leader();

    let mut plain = region.map(|region| {
        (CacheLinePingPong::new(region, spin), PlainDevice::new(region, plan.bytes(), plan.depth, spin))
    });
    let mut memcpy = (leads && plan.payload >= LARGE)
        .then(|| Memcpy::new(plan.payload, plan.depth.saturating_mul(plan.batch)));
    let (count, slice) = plan.time.slices();
    let mut progress = Progress::new(&describe(plan), u64::from(count), leads);
    let mut measured = Measured::default();
    let mut before = EndpointCounters::default();
    for at in 0..=count {
        if at == 1 {
            // The first slice was the warm-up.
            measured = Measured::default();
            peer.tally = Tally { errors: peer.tally.errors, ..Tally::default() };
            before = peer.counters();
        }
        let outcome = peer
            .run_slice(slice, leads, &mut measured.latency, &mut measured.issue)
            .map(|throughput| measured.endpoint.extend(throughput));
        collective.barrier(outcome)?;
        if let Some(baseline) = &mut baseline {
            let outcome = baseline
                .run_slice(slice / 2, leads, &mut measured.device_latency)
                .map(|throughput| measured.device.extend(throughput));
            collective.barrier(outcome)?;
        }
        if let Some((cache_line, plain)) = &mut plain {
            run_limits(plan, slice, &mut collective, cache_line, plain, memcpy.as_mut(), &mut measured)?;
        }
        progress.show(u64::from(at));
    }
    drop(progress);

    let words = words(plan, &peer, &before, baseline.as_ref().map_or(0, DeviceBaseline::errors));
    let peer_bytes = collective.exchange(Ok(words.as_bytes().to_vec()))?;
    if !leads {
        return Ok(None);
    }
    let (peer_words, []) = peer_bytes.as_chunks::<8>() else { return Err(Error::Protocol) };
    if peer_words.len() != words.len() {
        return Err(Error::Protocol);
    }
    let total: Vec<u64> =
        words.iter().zip(peer_words).map(|(own, peer)| own + u64::from_ne_bytes(*peer)).collect();
    let [sums @ .., errors] = total.as_slice() else { return Err(Error::Protocol) };
    let counters = COUNTERS.map(str::to_owned).into_iter().zip(sums.iter().copied()).collect();
    Ok(Some(summarize(plan, processes, cores, &measured, counters, *errors)))
}

/// The names of the counters of a side; the errors follow them.
const COUNTERS: [&str; 8] = [
    "work_requests",
    "completions",
    "bytes",
    "messages",
    "batches",
    "blocks",
    "stale_completions",
    "empty_receive_queues",
];

fn words(
    plan: &Plan,
    peer: &EndpointPeer,
    before: &EndpointCounters,
    errors: u64,
) -> [u64; COUNTERS.len() + 1] {
    let (now, Tally { messages, batches, blocks, errors: wrong }) = (peer.counters(), peer.tally);
    [
        now.work_requests - before.work_requests,
        now.operations - before.operations,
        messages * plan.bytes() as u64,
        messages,
        batches,
        blocks,
        now.stale_completions,
        now.empty_receive_queues,
        errors + wrong,
    ]
}

/// Runs one slice of each limit.
fn run_limits(
    plan: &Plan,
    slice: Duration,
    collective: &mut Collective<'_>,
    cache_line: &mut CacheLinePingPong<'_>,
    plain: &mut PlainDevice<'_>,
    memcpy: Option<&mut Memcpy>,
    measured: &mut Measured,
) -> Result<(), Error> {
    let leads = collective.is_leader();
    let times = &mut measured.cache_line_times;
    let outcome = if leads { cache_line.lead(slice / 3, times) } else { cache_line.follow() };
    collective.barrier(outcome)?;
    let slice = slice / 2;
    let outcome = match (leads, plan.op, plan.is_ping_pong()) {
        (true, _, true) => plain.lead_ping_pong(slice).map(Some),
        (true, Op::WriteImm | Op::Send, _) => plain.lead_stream(slice).map(Some),
        (true, Op::Write, _) => plain.write(slice).map(Some),
        (true, Op::Read, _) => plain.read(slice).map(Some),
        (false, _, true) => plain.follow_ping_pong().map(|()| None),
        (false, Op::WriteImm | Op::Send, _) => plain.follow_stream().map(|()| None),
        (false, ..) => Ok(None),
    };
    collective.barrier(outcome.map(|throughput| {
        // One operation of the plain code is as long as all blocks of a batch.
        measured.plain.extend(
            throughput.map(|one| Throughput { operations: one.operations * plan.batch as u64, ..one }),
        );
    }))?;
    if let Some(memcpy) = memcpy {
        measured.memcpy.push(memcpy.run(slice));
    }
    collective.barrier(Ok(()))
}

fn summarize(
    plan: &Plan,
    processes: bool,
    cores: Option<[usize; 2]>,
    measured: &Measured,
    counters: BTreeMap<String, u64>,
    errors: u64,
) -> Summary {
    let Measured { latency, issue, endpoint, device, device_latency, cache_line_times, plain, memcpy } =
        measured;
    let per_second = |throughputs: &[Throughput]| median(throughputs.iter().map(Throughput::per_second));
    let setup = Setup {
        bench: "endpoint",
        device: plan.devices.to_string(),
        op: Some(plan.op.name()),
        payload: plan.payload,
        batch: Some(plan.batch),
        queue_depth: plan.depth,
        qps: Some(plan.qps.into()),
        clients: None,
        response: None,
        endpoints: None,
        processes,
        waiting: Some(if plan.progress_thread { "progress thread" } else { "polling" }),
        registered_in_place: None,
        cores: cores.map(Vec::from),
    };
    let measurements = Measurements {
        ops: endpoint.iter().map(|throughput| throughput.operations).sum(),
        seconds: endpoint.iter().map(|throughput| throughput.time).sum::<Duration>().as_secs_f64(),
        ops_per_s: per_second(endpoint).unwrap_or(0.0),
        latency,
        errors,
        counters,
        sends_ops_per_s: None,
        beside_device: per_second(device)
            .map(|ops_per_s| Beside { ops_per_s, p50_ns: device_latency.quantile(0.5).unwrap_or(0) }),
        issue_p50_ns: issue.quantile(0.5),
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
fn describe(plan: &Plan) -> String {
    format!("endpoint {} {} B x {} depth {}", plan.op.name(), plan.payload, plan.batch, plan.depth)
}
