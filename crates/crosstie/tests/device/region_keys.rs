//! The keys of regions: access with the address and key of a region that was given back is refused, however often its
//! memory and its entry in the device's table of regions were used again; and giving back costs the same every time.

use std::collections::HashSet;
use std::time::Duration;

use crosstie::device::fault::Plan;
use crosstie::device::*;
use crosstie::region::OwnedRegion;
use crosstie_testkit::{callgrind, child, rng};

use super::ends::{connect, next_completion};

/// Regions that a software device has at most.
const MAX_REGIONS: u32 = 1 << 18;
/// Keys that one entry of the table of regions has before its key repeats.
const GENERATIONS: usize = (1 << 14) - 1;

/// The owner of the regions, and a second device that accesses them.
struct Pair {
    owner: Device,
    pd: Pd,
    accessor: Device,
    accessor_pd: Pd,
    buffer: Mr,
}

impl Pair {
    fn new(open: impl Fn() -> Device) -> Pair {
        let (owner, accessor) = (open(), open());
        let (pd, accessor_pd) = (owner.alloc_pd().unwrap(), accessor.alloc_pd().unwrap());
        let buffer = accessor_pd.allocate(4096, Access::ALL).unwrap();
        Pair { owner, pd, accessor, accessor_pd, buffer }
    }

    /// Performs one operation on a new connection, because one that is refused takes the connection down.
    fn access(&self, op: SendOp) -> Status {
        let end = |device: &Device, pd: &Pd| {
            let cq = device.create_cq(&CqConfig::default()).unwrap();
            let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
            qp.init(Access::ALL).unwrap();
            (cq, qp)
        };
        let (_owner_cq, mut owner) = end(&self.owner, &self.pd);
        let (mut cq, mut accessor) = end(&self.accessor, &self.accessor_pd);
        connect(&mut owner, &mut accessor);
        let sges = [self.buffer.sge(0..8).unwrap()];
        accessor.post(&SendWr::new(1, op, Data::Regions(&sges)).signaled()).unwrap();
        next_completion(&mut cq).status
    }

    fn read(&self, memory: &RemoteMemory) -> Status {
        self.access(SendOp::Read(memory.at(0)))
    }

    /// Every kind of access to a region that was given back is refused.
    fn assert_refused(&self, memory: &RemoteMemory, when: &str) {
        let to = memory.at(0);
        for op in [
            SendOp::Read(to),
            SendOp::Write(to),
            SendOp::WriteImm(to, 1),
            SendOp::FetchAdd { remote: to, add: 1 },
            SendOp::CompareSwap { remote: to, compare: 0, swap: 1 },
        ] {
            assert_eq!(self.access(op), Status::RemoteAccess, "{op:?} {when}");
        }
    }
}

fn software() -> Device {
    Device::open_software(&software::Config { space: 256 << 20 }).unwrap()
}

/// Memory to register in place, with a fixed address.
struct InPlace(Box<[u64; 64]>);

impl InPlace {
    fn register(&mut self, pd: &Pd) -> Mr {
        // SAFETY: the memory outlives the regions, and no reference to it is used while they exist.
        unsafe { pd.register(self.0.as_mut_ptr().cast(), size_of_val(&*self.0), Access::ALL) }.unwrap()
    }
}

/// The worst case: all entries of the table but one are in use, so that every region gets this entry, and each region is the
/// same memory, so that the address does not tell them apart either.
#[test]
fn a_key_is_refused_after_its_table_entry_was_used_more_often_than_it_has_generations() {
    let pair = Pair::new(software);
    let mut memory = InPlace(Box::new([0; 64]));
    let held: Vec<Mr> = (0..MAX_REGIONS - 1).map(|_| memory.register(&pair.pd)).collect();
    let first = memory.register(&pair.pd);
    let stale = first.remote();
    assert_eq!(pair.read(&stale), Status::Success);
    assert!(matches!(pair.pd.allocate(1, Access::empty()), Err(DeviceError::Exhausted { what: "regions" })));
    drop(first);
    let (mut same_key, mut seen) = (0, HashSet::from([(stale.addr, stale.rkey)]));
    for cycle in 0..2 * GENERATIONS + 2 {
        let region = memory.register(&pair.pd);
        let remote = region.remote();
        assert!(seen.insert((remote.addr, remote.rkey)), "cycle {cycle}: {remote:x?} was handed out before");
        assert_eq!(region.as_ptr(), memory.0.as_mut_ptr().cast());
        if remote.rkey == stale.rkey {
            same_key += 1;
            assert_eq!(pair.read(&remote), Status::Success);
            pair.assert_refused(&stale, "while another region has its key");
        }
    }
    assert_eq!(same_key, 2, "the key comes again after {GENERATIONS} regions");
    pair.assert_refused(&stale, "while no region has its key");
    // Giving them back one by one would take seconds. The devices are closed without it.
    std::mem::forget(held);
}

#[test]
fn a_key_of_memory_that_was_given_back_is_refused_when_the_memory_is_allocated_again() {
    let wrapped = || software().with_faults(Plan::none());
    for (name, open) in [("software", &software as &dyn Fn() -> Device), ("fault", &wrapped)] {
        let pair = Pair::new(open);
        let mut stale: Vec<RemoteMemory> = Vec::new();
        let mut random = rng::Random(rng::seed());
        for cycle in 0..200 {
            let region = pair.pd.allocate(4096, Access::ALL).unwrap();
            let remote = region.remote();
            let at_same_address = stale.iter().filter(|old| old.addr == remote.addr).count();
            assert_eq!(at_same_address, stale.len(), "the device reuses the memory that was freed last");
            assert_eq!(pair.read(&remote), Status::Success);
            if !stale.is_empty() && cycle % 20 == 19 {
                let old = stale[random.index(stale.len())];
                pair.assert_refused(&old, name);
            }
            stale.push(remote);
        }
    }
}

/// Callgrind counts the instructions of one cycle of registering and giving back: the first after some that warm up, and the last of
/// 1,000. A peer is connected, and other regions are registered, as in a program.
#[test]
fn registering_and_giving_back_costs_the_same_in_the_last_cycle_as_in_the_first() {
    const CYCLES: usize = 1000;
    if let Some(counted) = child::task() {
        let pair = Pair::new(software);
        assert_eq!(pair.read(&pair.pd.allocate(64, Access::ALL).unwrap().remote()), Status::Success);
        let _others: Vec<Mr> = (0..100).map(|_| pair.pd.allocate(64, Access::ALL).unwrap()).collect();
        let mut memory = Some(vec![0u8; 1 << 16]);
        let mut register = || {
            let region = OwnedRegion::register(&pair.pd, memory.take().unwrap(), Access::ALL).unwrap();
            memory = Some(region.into_memory(Duration::from_secs(60)).unwrap());
        };
        (0..counted.parse().unwrap()).for_each(|_| register());
        return callgrind::measure(&mut register);
    }
    // The very first ones also fill the allocator's caches.
    let counts = [10, CYCLES / 2, CYCLES - 1].map(|cycle| {
        callgrind::count(
            registering_and_giving_back_costs_the_same_in_the_last_cycle_as_in_the_first,
            &cycle.to_string(),
        )
    });
    println!("instructions of a cycle: {counts:?}");
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(*least > 100 && *most as f64 <= 1.1 * *least as f64, "instructions of a cycle: {counts:?}");
}
