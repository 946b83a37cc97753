//! `crosstie bench lock|barrier|message`: the primitives of a process group, with a process for each member.
//!
//! Rank 0 leads: it decides how many operations the next slice has and reports. All members run the same slices, separated by the job's
//! own barrier, so that a slice of one primitive never overlaps with anything else.

mod plan;
mod slices;
mod summary;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::bootstrap::{self, Bootstrap, local};
use crosstie::device::Device;
use crosstie::group::{Counters, Group, PacketKind};
use crosstie::telemetry::Histogram;

pub use plan::{Arguments, Kind, Plan};
pub use summary::GroupSummary;

use self::slices::Slices;
use super::collective::Collective;
use super::cores;
use super::limits::{CacheLinePingPong, PlainDevice};
use super::progress::Progress;
use super::shared_region::{self, SharedRegion};
use super::spin_wait::SpinWait;
use crate::error::Error;
use crate::median::median;

/// Packets in flight of the plain code: as many as a channel's window.
const WINDOW: usize = 64;

/// Runs the benchmark. Returns the summary in the process that leads.
pub fn run(plan: &Plan) -> Result<Option<GroupSummary>, Error> {
    let members = plan.arguments.members;
    let len = PlainDevice::region_len(plan.arguments.payload as usize, WINDOW);
    let mut job = bootstrap::from_env()?;
    match job.size() {
        1 => {
            let region = SharedRegion::create(len)?;
            let mut job = local::JobBuilder::new(members)
                .arguments(plan.command_line())
                .variable(shared_region::VARIABLE, region.descriptor())
                .start()?;
            let summary = cores::on_own_thread(|| run_member(plan, &mut job, Some(&region)))?;
            job.finish()?;
            Ok(summary)
        }
        size if size == members => {
            let region = SharedRegion::inherited(len)?;
            let summary = run_member(plan, job.as_mut(), region.as_ref())?;
            job.finish()?;
            Ok(summary)
        }
        size => Err(Error::Usage(format!("--members {members}, but this job has {size} ranks"))),
    }
}

/// What the leading member has measured.
#[derive(Default)]
struct Measured {
    /// Operations per second, for each slice.
    rates: Vec<f64>,
    ops: u64,
    seconds: f64,
    latency: Histogram,
    limit_rates: Vec<f64>,
    cache_line: Histogram,
}

fn run_member(
    plan: &Plan,
    job: &mut dyn Bootstrap,
    region: Option<&SharedRegion>,
) -> Result<Option<GroupSummary>, Error> {
    let rank = job.rank() as usize;
    // Before pinning, so that the threads of the device and of the group are not pinned.
    let device = Device::open(&plan.arguments.device)?;
    let group = Group::join(job, &device, &plan.config(rank)).map_err(Error::rpc("joining the group"))?;
    let placed = if region.is_some() { cores::assign(plan.arguments.members as usize)? } else { None };
    if let Some(core) = placed.as_ref().and_then(|placed| placed.get(rank)) {
        cores::pin_thread(*core)?;
    }
    let mut collective = Collective::new(job);
    let spin = SpinWait::new(placed.is_some() || region.is_none());
    let mut plain = region
        .filter(|_| rank < 2 && plan.kind == Kind::Message)
        .map(|region| PlainDevice::new(region, plan.arguments.payload as usize, WINDOW, spin));
    let mut line = region
        .filter(|_| rank < 2 && plan.arguments.members > 1)
        .map(|region| CacheLinePingPong::new(region, spin));
    let mut slices = Slices::new(plan, &group)?;
    collective.barrier(Ok(()))?;
    let (count, slice) = plan.time.slices();
    let mut progress = Progress::new(plan.kind.name(), u64::from(count), collective.is_leader());
    let mut measured = Measured::default();
    let mut before = group.counters();
    let mut next = 1000u64;
    for at in 0..=count {
        if at == 1 {
            // The first slice was the warm-up.
            measured = Measured::default();
            slices.reset();
            before = group.counters();
            collective.barrier(Ok(()))?;
        }
        let proposals = collective.gather(Ok(next.to_le_bytes().to_vec()))?;
        let ops =
            proposals.first().and_then(|bytes| bytes.first_chunk()).map(|bytes| u64::from_le_bytes(*bytes));
        let ops = ops.ok_or(Error::Protocol)?;
        let ran = slices.run(ops, &mut measured.latency);
        let elapsed = collective.agree(ran)?;
        measured.ops += ops * slices.per_op();
        measured.seconds += elapsed;
        measured.rates.push((ops * slices.per_op()) as f64 / elapsed);
        next = next_count(ops, elapsed, slice);
        if plan.kind == Kind::Message {
            let ran = slices.run_round_trips((ops / 8).clamp(8, 2000), &mut measured.latency);
            collective.barrier(ran)?;
            if let Some(plain) = &mut plain {
                // Member 1 sends, as in the measured stream.
                let ran = if rank == 1 {
                    plain.lead_stream(slice).map(|t| Some(t.per_second()))
                } else {
                    plain.follow_stream().map(|()| None)
                };
                let rate = ran?;
                let rates = collective.gather(Ok(rate.unwrap_or(0.0).to_le_bytes().to_vec()))?;
                let rate = rates
                    .get(1)
                    .and_then(|bytes| bytes.first_chunk())
                    .map(|bytes| f64::from_le_bytes(*bytes));
                measured.limit_rates.extend(rate);
            } else {
                collective.gather(Ok(0f64.to_le_bytes().to_vec()))?;
            }
        }
        if let Some(line) = &mut line {
            let part = Duration::from_millis(2);
            let ran = if rank == 0 { line.lead(part, &mut measured.cache_line) } else { line.follow() };
            ran?;
        }
        collective.barrier(Ok(()))?;
        progress.show(u64::from(at));
    }
    let words = counter_words(&before, &group.counters(), slices.errors());
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let all = collective.gather(Ok(bytes))?;
    let mut sums = vec![0u64; words.len()];
    for member in &all {
        for (sum, word) in sums.iter_mut().zip(member.as_chunks::<8>().0) {
            *sum += u64::from_le_bytes(*word);
        }
    }
    collective.barrier(Ok(()))?;
    if rank != 0 {
        return Ok(None);
    }
    let (errors, counters) = named_counters(plan.kind, &sums, slices.rounds());
    Ok(Some(GroupSummary::new(
        plan,
        measured.ops,
        measured.seconds,
        median(measured.rates).unwrap_or(0.0),
        &measured.latency,
        errors,
        counters,
        region.and(CacheLinePingPong::median(&measured.cache_line)),
        median(measured.limit_rates),
    )))
}

/// As many operations as fit into a slice.
fn next_count(ops: u64, elapsed: f64, slice: Duration) -> u64 {
    let wanted = ops as f64 * slice.as_secs_f64() / elapsed.max(1e-6);
    (wanted as u64).clamp(ops / 4, ops * 4).clamp(8, 1 << 22)
}

/// Packets by kind, then the others, in a fixed order.
fn counter_words(before: &Counters, after: &Counters, errors: u64) -> Vec<u64> {
    let mut words: Vec<u64> =
        PacketKind::ALL.iter().map(|kind| after.sent(*kind) - before.sent(*kind)).collect();
    words.extend([
        after.locks.acquired - before.locks.acquired,
        after.locks.reacquired - before.locks.reacquired,
        after.locks.handed_over - before.locks.handed_over,
        after.delivered - before.delivered,
        after.resent - before.resent,
        after.injected_losses - before.injected_losses,
        after.refused - before.refused,
        after.discarded - before.discarded,
        after.unsent - before.unsent,
        after.held - before.held,
        after.combined - before.combined,
        errors,
    ]);
    words
}

fn named_counters(kind: Kind, sums: &[u64], rounds: u64) -> (u64, BTreeMap<String, u64>) {
    let kinds = PacketKind::ALL.len();
    let mut counters: BTreeMap<String, u64> = BTreeMap::new();
    for (packet, count) in PacketKind::ALL.iter().zip(sums) {
        if *count > 0 {
            counters.insert(packet.name().into(), *count);
        }
    }
    let of = |packet: PacketKind| sums[packet.position()];
    counters.insert("messages".into(), sums[..kinds].iter().sum());
    let rest = &sums[kinds..];
    match kind {
        Kind::Lock => {
            counters.insert("acquisitions".into(), rest[0] + rest[1]);
            counters.insert("reacquired".into(), rest[1]);
            counters.insert("handed_over".into(), rest[2]);
        }
        Kind::Barrier => {
            counters.insert("rounds".into(), rounds);
        }
        Kind::Message => {
            counters.insert("sent".into(), of(PacketKind::Data) - rest[4] + rest[10]);
            counters.insert("delivered".into(), rest[3]);
            counters.insert("acks".into(), of(PacketKind::Ack));
            counters.insert("nacks".into(), of(PacketKind::Nack));
            counters.insert("resent".into(), rest[4]);
            counters.insert("dropped".into(), rest[5]);
            counters.insert("refused".into(), rest[6]);
            counters.insert("discarded".into(), rest[7]);
            counters.insert("unsent".into(), rest[8]);
            counters.insert("held".into(), rest[9]);
            counters.insert("combined".into(), rest[10]);
        }
    }
    (rest[11], counters)
}
