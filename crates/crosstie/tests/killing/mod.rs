//! What tests that kill processes share: single-stepping, and looking for what is left behind.

pub(crate) mod trace;

use std::collections::HashSet;
use std::time::Duration;

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
