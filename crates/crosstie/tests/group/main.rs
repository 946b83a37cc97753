//! Groups on the software device, every second member through the fault device, with members as threads. Members as processes, killed and stopped: `group_processes.rs`.

mod barriers;
mod idle;
mod locks;
mod membership;
mod messages;
mod one_sided;
mod pulls;
mod tagged;

use std::sync::Mutex;

use crosstie::bootstrap::{Limits, local};
use crosstie::device::Device;
use crosstie::device::fault::Plan;
use crosstie::group::{Group, GroupConfig, PacketKind};

/// Runs `body` in `members` threads, each of them a member of one group. Returns what they returned, in the order of members.
fn run<T: Send>(members: u32, config: &GroupConfig, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let jobs = local::in_process(members, Limits::default()).expect("a job of threads");
    let results: Mutex<Vec<(usize, T)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (number, mut job) in jobs.into_iter().enumerate() {
            let (results, body) = (&results, &body);
            scope.spawn(move || {
                // Every second device executes requests while they are posted; the others queue them, as a NIC does.
                let device = Device::open(&"software".parse().unwrap()).unwrap();
                let device = if number % 2 == 0 { device } else { device.with_faults(Plan::none()) };
                let group = Group::join(&mut job, &device, config).unwrap();
                let result = body(&group);
                results.lock().unwrap().push((group.member().index(), result));
                // Nobody leaves before all have finished.
                crosstie::bootstrap::Bootstrap::barrier(&mut job).unwrap();
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(member, _)| *member);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Packets of a kind that all members together have sent.
fn total(counters: &[crosstie::group::Counters], kind: PacketKind) -> u64 {
    counters.iter().map(|counters| counters.sent(kind)).sum()
}
