//! The limit of the machine for one node: minimal code that serves the same requests on the same cores.
//!
//! ```text
//! for each client and server   a ring of `depth` slots; a slot holds request k, then its response   number 2k+1, then 2k+2
//! for each server              a table of [key, value], linear probing, half of it vacant
//! ```
//!
//! The clients send the same patterns as the measured ones. The code has no errors, no handling of dead peers, no check of responses, no
//! memory limit, no growth and no statistics: it is the fastest that a reader could write by hand. Both sides take messages from a ring
//! one at a time or all at once; both variants are measured, and the faster one counts.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::{Duration, Instant};

use super::Plan;
use super::topology::Topology;
use crate::cores;
use crate::error::Error;
use crate::median::median;
use crate::workload::Pattern;
use crosstie_kv::sharding::ShardMap;

/// Measured time per run.
const SLICE: Duration = Duration::from_millis(200);
/// Marks a table entry without a key: no workload uses this key.
const VACANT: u64 = u64::MAX;
const GET: u64 = 1;
const PUT: u64 = 2;

/// The minimal code with its tables; it is measured after each run.
pub(super) struct PlainLimit {
    servers: Vec<usize>,
    clients: Vec<usize>,
    patterns: Vec<Pattern>,
    /// By server.
    tables: Vec<Table>,
    depth: usize,
    slice: Duration,
    measured: Vec<f64>,
}

impl PlainLimit {
    /// `None` unless the plan is for one node, 8-byte values, and client threads in a closed loop, each with its own core.
    pub(super) fn new(plan: &Plan, topology: &Topology, nodes: u32) -> Result<Option<PlainLimit>, Error> {
        let (Some(servers), Some(clients)) = (&topology.daemons, &topology.clients) else { return Ok(None) };
        let comparable =
            clients.len() == plan.clients as usize && plan.rate.is_none() && plan.processes.is_none();
        if nodes != 1 || !comparable || plan.check || !plan.workload.has_words() {
            return Ok(None);
        }
        let cluster = ShardMap::new(1, plan.daemons).ok_or(Error::Protocol)?;
        let patterns = (0..plan.clients).map(|client| plan.workload.pattern(&cluster, 0, client));
        let mut keys = vec![Vec::new(); servers.len()];
        plan.workload
            .keys_of(&cluster, 0)
            .for_each(|key| keys[cluster.shard_of_word(key).daemon as usize].push(key));
        Ok(Some(PlainLimit {
            servers: servers.clone(),
            clients: clients.clone(),
            patterns: patterns.collect::<Result<_, _>>()?,
            tables: keys.iter().map(|keys| Table::new(keys)).collect(),
            depth: plan.queue_depth as usize,
            slice: plan.run_length().min(SLICE) / 2,
            measured: Vec::new(),
        }))
    }

    /// Measures one slice of each variant; the faster one counts.
    pub(super) fn measure(&mut self) -> Result<(), Error> {
        let rates = [false, true].map(|all| self.run(all));
        let [one, all] = rates;
        self.measured.push(one?.max(all?));
        Ok(())
    }

    /// Operations per second: the median of the slices.
    pub(super) fn per_second(&self) -> Option<f64> {
        median(self.measured.iter().copied())
    }

    fn run(&mut self, all: bool) -> Result<f64, Error> {
        let (stop, left) = (AtomicBool::new(false), AtomicUsize::new(self.clients.len()));
        let (stop, left, depth) = (&stop, &left, self.depth);
        let rings: Vec<Vec<Ring>> =
            self.clients.iter().map(|_| self.servers.iter().map(|_| Ring::new(depth)).collect()).collect();
        std::thread::scope(|scope| {
            let servers =
                self.servers.iter().zip(&mut self.tables).enumerate().map(|(server, (core, table))| {
                    let rings: Vec<&Ring> = rings.iter().map(|rings| &rings[server]).collect();
                    scope.spawn(move || {
                        cores::pin_thread(*core)?;
                        run_server(&rings, table, left, all);
                        Ok::<_, Error>(())
                    })
                });
            let servers: Vec<_> = servers.collect();
            let clients =
                self.clients.iter().zip(&self.patterns).zip(&rings).map(|((core, pattern), rings)| {
                    scope.spawn(move || {
                        let pinned = cores::pin_thread(*core);
                        let begun = Instant::now();
                        let count = run_client(rings, pattern, depth, stop, all);
                        let rate = count as f64 / begun.elapsed().as_secs_f64();
                        left.fetch_sub(1, Relaxed);
                        pinned.map(|()| rate)
                    })
                });
            let clients: Vec<_> = clients.collect();
            std::thread::sleep(self.slice);
            stop.store(true, Relaxed);
            let mut sum = 0.0;
            for client in clients {
                sum += client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            for server in servers {
                server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            Ok(sum)
        })
    }
}

#[derive(Default)]
#[repr(align(64))]
struct Slot {
    number: AtomicU64,
    op: AtomicU64,
    key: AtomicU64,
    value: AtomicU64,
}

struct Ring(Box<[Slot]>);

impl Ring {
    fn new(depth: usize) -> Ring {
        Ring((0..depth.next_power_of_two()).map(|_| Slot::default()).collect())
    }

    #[inline]
    fn at(&self, k: u64) -> &Slot {
        &self.0[k as usize & (self.0.len() - 1)]
    }
}

/// Runs a client. Returns the number of responses that it has taken.
fn run_client(rings: &[Ring], pattern: &Pattern, depth: usize, stop: &AtomicBool, all: bool) -> u64 {
    let (mut sent, mut received) = (vec![0; rings.len()], vec![0; rings.len()]);
    let (mut position, mut count) = (0, 0);
    while !stop.load(Relaxed) || count < position {
        while position - count < depth as u64 && !stop.load(Relaxed) {
            let entry = pattern.at(position);
            let k = &mut sent[entry.daemon as usize];
            let slot = rings[entry.daemon as usize].at(*k);
            slot.op.store(if entry.is_read { GET } else { PUT }, Relaxed);
            slot.key.store(u64::from(entry.key), Relaxed);
            slot.value.store(position, Relaxed);
            // Release, partner: the Acquire in `run_server`. The request is complete.
            slot.number.store(2 * *k + 1, Release);
            *k += 1;
            position += 1;
        }
        for (ring, k) in rings.iter().zip(&mut received) {
            // Acquire, partner: the Release in `run_server`. The response is complete.
            while ring.at(*k).number.load(Acquire) == 2 * *k + 2 {
                black_box(ring.at(*k).value.load(Relaxed));
                *k += 1;
                count += 1;
                if !all {
                    break;
                }
            }
        }
    }
    count
}

/// Runs a server until no client is left.
fn run_server(rings: &[&Ring], table: &mut Table, left: &AtomicUsize, all: bool) {
    let mut next = vec![0; rings.len()];
    while left.load(Relaxed) > 0 {
        let mut idle = true;
        for (ring, k) in rings.iter().zip(&mut next) {
            // Acquire, partner: the Release in `run_client`. The request is complete.
            while ring.at(*k).number.load(Acquire) == 2 * *k + 1 {
                let slot = ring.at(*k);
                let value = table.value(slot.key.load(Relaxed));
                match slot.op.load(Relaxed) {
                    GET => slot.value.store(*value, Relaxed),
                    _ => *value = slot.value.load(Relaxed),
                }
                // Release, partner: the Acquire in `run_client`. The response is complete.
                slot.number.store(2 * *k + 2, Release);
                *k += 1;
                idle = false;
                if !all {
                    break;
                }
            }
        }
        if idle {
            spin_loop();
        }
    }
}

/// A hash table whose keys are all inserted at the start.
struct Table {
    slots: Box<[[u64; 2]]>,
    shift: u32,
}

impl Table {
    fn new(keys: &[u64]) -> Table {
        let size = (2 * keys.len()).next_power_of_two().max(2);
        let mut table = Table { slots: vec![[VACANT, 0]; size].into(), shift: 64 - size.ilog2() };
        for key in keys {
            let at = table.find(*key, VACANT);
            table.slots[at] = [*key, *key];
        }
        table
    }

    #[inline]
    fn value(&mut self, key: u64) -> &mut u64 {
        let at = self.find(key, key);
        &mut self.slots[at][1]
    }

    /// The index of the first entry with the key `wanted`, probing from the hash of `key`.
    #[inline]
    fn find(&self, key: u64, wanted: u64) -> usize {
        let mut at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        while self.slots[at][0] != wanted {
            at = (at + 1) & (self.slots.len() - 1);
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload;

    #[test]
    fn plain_server_stores_the_last_value_of_each_key() {
        let plan = workload::Plan { keys: 100, entries: 256, ..workload::Plan::default() };
        let cluster = ShardMap::new(1, 2).unwrap();
        let pattern = plan.pattern(&cluster, 0, 0).unwrap();
        for all in [false, true] {
            let rings = [Ring::new(3), Ring::new(3)];
            let mut tables = [0, 1].map(|daemon| {
                let keys: Vec<u64> =
                    (0..100).filter(|key| cluster.shard_of_word(*key).daemon == daemon).collect();
                Table::new(&keys)
            });
            let (stop, left) = (AtomicBool::new(false), AtomicUsize::new(1));
            let count = std::thread::scope(|scope| {
                for (ring, table) in rings.iter().zip(&mut tables) {
                    let left = &left;
                    scope.spawn(move || run_server(&[ring], table, left, all));
                }
                let client = scope.spawn(|| {
                    let count = run_client(&rings, &pattern, 3, &stop, all);
                    left.store(0, Relaxed);
                    count
                });
                std::thread::sleep(Duration::from_millis(50));
                stop.store(true, Relaxed);
                client.join().unwrap()
            });
            assert!(count > 0);
            // The value of each key is the position of its last put in the pattern.
            for key in 0..100u64 {
                let is_put = |n: &u64| u64::from(pattern.at(*n).key) == key && !pattern.at(*n).is_read;
                let last = (0..count).rev().take(256).find(is_put).unwrap_or(key);
                let daemon = cluster.shard_of_word(key).daemon as usize;
                assert_eq!(*tables[daemon].value(key), last, "{key}");
            }
        }
    }
}
