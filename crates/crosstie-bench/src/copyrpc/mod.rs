//! `crosstie bench copyrpc`: RPC between two nodes, compared with what the machine allows.
//!
//! There are two sides: two threads or two processes, each pinned to its own core, or two hosts. The leading side is the client and
//! uses the measured loop of `bench ipc`. The other side is the server; a last request tells it that the slice is over. Slices of
//! copyrpc alternate with slices of the limits, if both sides share memory. With `--beside-sends`, the same exchange with one SEND per
//! message over the same device is measured, too. All slices run under the same load of the machine, so the medians over the slices
//! can be compared.

mod peer;
mod plan;
mod role;
mod send_baseline;

use std::collections::BTreeMap;
use std::time::Duration;

use crosstie::telemetry::Histogram;
use zerocopy::IntoBytes;

pub use plan::{Arguments, Plan};

use self::peer::{COUNTERS, CopyrpcPeer, CounterSums, Message};
use self::role::Role;
use self::send_baseline::SendBaseline;
use super::collective::Collective;
use super::limits::{self, CacheLinePingPong, Memcpy, PlainExchange, TakeResponses, Throughput};
use super::node::plan::RegionLayout;
use super::pair::{Pair, PairMember};
use super::progress::Progress;
use super::shared_region::SharedRegion;
use super::spin_wait::SpinWait;
use super::summary::{self, LARGE, Measurements, Setup, Summary};
use crate::error::Error;
use crate::median::median;

/// Runs the benchmark. Returns the summary in the process that leads.
pub fn run(plan: &Plan) -> Result<Option<Summary>, Error> {
    // Common payload sizes use fixed-size types, as an application would; other sizes use byte slices.
    let run_member = match plan.payload {
        payload if payload != plan.response => run_member::<[u8]>,
        8 => run_member::<[u8; 8]>,
        32 => run_member::<[u8; 32]>,
        64 => run_member::<[u8; 64]>,
        _ => run_member::<[u8]>,
    };
    let pair = Pair {
        bench: "copyrpc",
        devices: &plan.devices,
        processes: plan.processes,
        command_line: plan.command_line(),
        region: RegionLayout::new(plan.payload, plan.depth).len,
    };
    pair.run(|member| run_member(plan, member))
}

/// What the leading side measured.
#[derive(Default)]
struct Measured {
    copyrpc: Vec<Throughput>,
    sends: Vec<Throughput>,
    /// Times that [`CacheLinePingPong::lead`] recorded.
    cache_line_times: Histogram,
    two_rings: Vec<Throughput>,
    large_rings: Vec<Throughput>,
    memcpy: Vec<Throughput>,
}

/// Runs one side, from opening its device to the summary.
fn run_member<M: Message + ?Sized>(
    plan: &Plan,
    mut member: PairMember<'_>,
) -> Result<Option<Summary>, Error> {
    let PairMember { rank, region, processes, cores, spin, .. } = member;
    let opened = member.device().and_then(|device| {
        let sends = plan.beside_sends.then(|| SendBaseline::open(plan, &device, rank == 0)).transpose()?;
        Ok((CopyrpcPeer::<M>::open(plan, device, rank == 0)?, sends))
    });
    let collective = &mut member.collective;
    let (peer, sends) = collective.agree(opened)?;
    let addresses = collective.exchange(Ok(peer.address_bytes()))?;
    collective.barrier(peer.connect(&addresses))?;
    let mut copyrpc = Role::new(peer, rank, plan.payload, plan.depth, spin);
    let mut sends = match sends {
        None => None,
        Some(mut sends) => {
            let address = collective.exchange(Ok(sends.address_bytes()))?;
            collective.barrier(sends.connect(&address))?;
            Some(Role::new(sends, rank, plan.payload, plan.depth, spin))
        }
    };
    member.pin()?;

    let mut collective = member.collective;
    let mut plain = region.map(|region| PlainLimits::new(plan, region, spin, collective.is_leader()));
    let (count, slice) = plan.time.slices();
    let mut progress = Progress::new(&describe(plan), u64::from(count), collective.is_leader());
    let mut measured = Measured::default();
    for at in 0..=count {
        if at == 1 {
            // The first slice was the warm-up.
            measured = Measured::default();
            copyrpc.rpc().counter_sums = CounterSums::default();
            copyrpc.reset_counters();
            sends.iter_mut().for_each(Role::reset_counters);
        }
        let outcome = copyrpc.run_slice(slice, spin).map(|throughput| measured.copyrpc.extend(throughput));
        collective.barrier(outcome)?;
        if let Some(sends) = &mut sends {
            let outcome = sends.run_slice(slice, spin).map(|throughput| measured.sends.extend(throughput));
            collective.barrier(outcome)?;
        }
        if let Some(plain) = &mut plain {
            plain.run_slices(slice, &mut collective, &mut measured)?;
        }
        progress.show(u64::from(at));
    }
    drop(progress);

    let counter_sums = copyrpc.rpc().counter_sums;
    let send_responses = sends.as_ref().map_or(0, Role::responses);
    let words: Vec<u64> = counter_sums.into_iter().chain([copyrpc.responses(), send_responses]).collect();
    let peer_bytes = collective.exchange(Ok(words.as_bytes().to_vec()))?;
    let Role::Client(client) = copyrpc else { return Ok(None) };
    let (peer_words, []) = peer_bytes.as_chunks::<8>() else { return Err(Error::Protocol) };
    let peer_words: Vec<u64> = peer_words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let [peer_sums @ .., responses, send_responses] = peer_words.as_slice() else {
        return Err(Error::Protocol);
    };
    if peer_sums.len() != counter_sums.len() {
        return Err(Error::Protocol);
    }
    let total: Vec<u64> = counter_sums.iter().zip(peer_sums).map(|(own, peer)| own + peer).collect();
    let mut errors = client.tally.errors_given_responses(*responses);
    if let Some(Role::Client(sends)) = &sends {
        errors += sends.tally.errors_given_responses(*send_responses);
    }
    Ok(Some(summarize(plan, processes, cores, &measured, &client.tally.latency, &total, errors)))
}

/// Measures the limits on one side.
struct PlainLimits<'a> {
    cache_line: CacheLinePingPong<'a>,
    two_rings: Option<Box<dyn PlainExchange + 'a>>,
    large_rings: Option<Box<dyn PlainExchange + 'a>>,
    memcpy: Option<Memcpy>,
}

impl<'a> PlainLimits<'a> {
    fn new(plan: &Plan, region: &'a SharedRegion, spin: SpinWait, leads: bool) -> PlainLimits<'a> {
        let Plan { payload, depth, .. } = *plan;
        let layout = RegionLayout::new(payload, depth);
        // In the plain code a response is as long as its request.
        let comparable = payload == plan.response;
        let rings = |(offset, slots)| limits::two_rings(region, offset, payload, depth, slots, spin);
        PlainLimits {
            cache_line: CacheLinePingPong::new(region, spin),
            two_rings: comparable.then(|| rings((layout.two_rings, depth))),
            large_rings: layout.large_rings.filter(|_| comparable).map(rings),
            memcpy: (leads && payload >= LARGE).then(|| Memcpy::new(payload, depth)),
        }
    }

    /// Runs one slice of every limit.
    fn run_slices(
        &mut self,
        slice: Duration,
        collective: &mut Collective<'_>,
        measured: &mut Measured,
    ) -> Result<(), Error> {
        let leads = collective.is_leader();
        let slice = slice / 3;
        let cache_line_times = &mut measured.cache_line_times;
        collective.barrier(if leads {
            self.cache_line.lead(slice, cache_line_times)
        } else {
            self.cache_line.follow()
        })?;
        let mut run_slice = |exchange: &mut Box<dyn PlainExchange + '_>,
                             throughputs: &mut Vec<Throughput>| {
            let outcome = if leads {
                exchange.lead(slice, TakeResponses::One).map(|throughput| throughputs.push(throughput))
            } else {
                exchange.follow()
            };
            collective.barrier(outcome)
        };
        if let Some(rings) = &mut self.two_rings {
            run_slice(rings, &mut measured.two_rings)?;
        }
        if let Some(rings) = &mut self.large_rings {
            run_slice(rings, &mut measured.large_rings)?;
        }
        if let Some(memcpy) = &mut self.memcpy {
            measured.memcpy.push(memcpy.run(slice));
        }
        collective.barrier(Ok(()))
    }
}

fn summarize(
    plan: &Plan,
    processes: bool,
    cores: Option<[usize; 2]>,
    measured: &Measured,
    latency: &Histogram,
    counter_sums: &[u64],
    errors: u64,
) -> Summary {
    let Measured { copyrpc, sends, cache_line_times, two_rings, large_rings, memcpy } = measured;
    let per_second = |throughputs: &[Throughput]| median(throughputs.iter().map(Throughput::per_second));
    let limit = [two_rings, large_rings].into_iter().filter_map(|throughputs| per_second(throughputs));
    let limit = limit.reduce(f64::max);
    let names = COUNTERS.map(|(name, _)| name.to_owned());
    let mut counters: BTreeMap<String, u64> = names.into_iter().zip(counter_sums.iter().copied()).collect();
    counters.insert("messages".into(), counters["calls"] + counters["replies"]);
    let setup = Setup {
        bench: "copyrpc",
        device: plan.devices.to_string(),
        op: None,
        payload: plan.payload,
        batch: None,
        qps: None,
        queue_depth: plan.depth,
        clients: None,
        response: Some(plan.response).filter(|response| *response != plan.payload),
        endpoints: Some(plan.endpoints),
        processes,
        waiting: None,
        registered_in_place: None,
        cores: cores.map(Vec::from),
    };
    let measurements = Measurements {
        ops: copyrpc.iter().map(|throughput| throughput.operations).sum(),
        seconds: copyrpc.iter().map(|throughput| throughput.time).sum::<Duration>().as_secs_f64(),
        ops_per_s: per_second(copyrpc).unwrap_or(0.0),
        latency,
        errors,
        counters,
        sends_ops_per_s: per_second(sends),
        beside_device: None,
        issue_p50_ns: None,
        limits: summary::Limits {
            cache_line_ns: CacheLinePingPong::median(cache_line_times),
            ops_per_s: limit,
            two_rings_ops_per_s: limit,
            copies_per_s: per_second(memcpy),
            ..summary::Limits::default()
        },
    };
    Summary::new(setup, &measurements)
}

fn describe(plan: &Plan) -> String {
    format!("copyrpc {} B depth {}", plan.payload, plan.depth)
}
