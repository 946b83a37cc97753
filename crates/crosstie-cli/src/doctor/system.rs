//! Limits and settings of the system.

use std::fs;

use crosstie_bench::cores;
use rustix::process::{Resource, getrlimit};

use super::Finding;

const SHMEM_HUGE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const RESERVED_HUGE: &str = "/proc/sys/vm/nr_hugepages";
/// With less than this, registering the memory of a usual program fails.
const ENOUGH_MEMLOCK: u64 = 1 << 30;

pub(super) fn findings() -> [Finding; 3] {
    [memlock(), huge_pages(), cpus()]
}

fn memlock() -> Finding {
    const NAME: &str = "memlock limit";
    match getrlimit(Resource::Memlock).current {
        None => Finding::ok(NAME, "unlimited"),
        Some(bytes) if bytes >= ENOUGH_MEMLOCK => Finding::ok(NAME, format!("{} MiB", bytes >> 20)),
        Some(bytes) => Finding::limited(
            NAME,
            format!("{} KiB; the software device does not need it", bytes >> 10),
        )
        .needed_for("registering memory with an RDMA NIC")
        .fix(
            "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf, then log in again",
        ),
    }
}

fn huge_pages() -> Finding {
    const NAME: &str = "huge pages";
    let reserved = fs::read_to_string(RESERVED_HUGE).unwrap_or_default();
    let reserved = format!("{} reserved", if reserved.trim().is_empty() { "0" } else { reserved.trim() });
    let Ok(offered) = fs::read_to_string(SHMEM_HUGE) else {
        return Finding::limited(
            NAME,
            format!("this kernel has no transparent huge pages for shared memory; {reserved}"),
        );
    };
    let chosen = offered.split(['[', ']']).nth(1).unwrap_or("unknown");
    let found = format!("transparent huge pages for shared memory: {chosen}; {reserved}");
    if ["always", "within_size", "advise", "force"].contains(&chosen) {
        return Finding::ok(NAME, found);
    }
    Finding::limited(NAME, found)
        .needed_for("speed of large regions")
        .fix(format!("echo advise | sudo tee {SHMEM_HUGE}"))
}

fn cpus() -> Finding {
    const NAME: &str = "processors";
    match (cores::allowed(), cores::pair()) {
        (Ok(allowed), Ok(Some([left, right]))) => Finding::ok(
            NAME,
            format!("{} usable; benchmarks pin their threads to {left} and {right}", allowed.len()),
        ),
        (Ok(_), Ok(None)) => Finding::limited(NAME, "one usable: both sides of a benchmark share it")
            .needed_for("meaningful benchmark results")
            .fix("run on at least two, for example taskset -c 0,1 crosstie bench device"),
        (Err(error), _) | (_, Err(error)) => Finding::limited(NAME, error.to_string()),
    }
}
