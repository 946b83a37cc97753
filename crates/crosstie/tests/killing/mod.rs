//! What tests that kill processes share: chance, single-stepping, and looking for what is left behind.

pub(crate) mod trace;

use std::collections::HashSet;
use std::time::Duration;

/// Where chance begins. Printed, so that a run can be repeated.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("CROSSTIE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64)
    });
    println!("seed {seed} (set CROSSTIE_SEED to repeat)");
    seed
}

/// What a process holds that a leak would grow.
#[derive(Debug, PartialEq)]
pub(crate) struct Footprint {
    descriptors: usize,
    mappings: usize,
    threads: usize,
    files: HashSet<std::ffi::OsString>,
}

impl Footprint {
    /// What is held once everything is closed that was dropped before.
    #[allow(dead_code, reason = "not every test program drops something before")]
    pub(crate) fn at_rest() -> Footprint {
        std::thread::sleep(Duration::from_millis(50));
        Footprint::take()
    }

    /// What is held when the kernel is done with reaping: `before`, if nothing was left behind.
    pub(crate) fn settled(before: &Footprint) -> Footprint {
        for _ in 0..100 {
            if Footprint::take() == *before {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Footprint::take()
    }

    pub(crate) fn take() -> Footprint {
        let count = |dir| std::fs::read_dir(dir).map_or(0, Iterator::count);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Footprint {
            descriptors: count("/proc/self/fd"),
            mappings: maps.lines().filter(|line| line.contains("memfd:crosstie")).count(),
            threads: count("/proc/self/task"),
            files: std::fs::read_dir("/dev/shm")
                .into_iter()
                .flatten()
                .flatten()
                .map(|e| e.file_name())
                .collect(),
        }
    }
}

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}
