//! What this process uses: processor time, and what a process that was killed may have left behind in it.

use std::collections::HashSet;
use std::time::Duration;

/// The resources of this process that a leak would increase.
#[derive(Debug, PartialEq)]
pub struct Footprint {
    descriptors: usize,
    mappings: usize,
    threads: usize,
    files: HashSet<std::ffi::OsString>,
}

impl Footprint {
    /// The footprint after threads that are still closing dropped objects have had time to finish.
    pub fn at_rest() -> Footprint {
        std::thread::sleep(Duration::from_millis(50));
        Footprint::take()
    }

    /// Waits up to a second until the footprint equals `before` (the kernel frees a dead process's resources late), and
    /// returns the last one seen.
    pub fn wait_until_equal(before: &Footprint) -> Footprint {
        for _ in 0..100 {
            if Footprint::take() == *before {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Footprint::take()
    }

    /// The footprint now.
    pub fn take() -> Footprint {
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

/// The processor time that this process has used.
pub fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the result.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
