//! The values of the option `--wait`, of benchmarks and of `kv serve`.

use clap::ValueEnum;
use crosstie::WaitStrategy;

/// How a thread waits when there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Wait {
    /// Poll in a loop: the lowest latency, and a whole core for each thread, also when idle.
    Spin,
    /// Poll for a short time (about 50 us; daemons of the store: 100 us), then sleep until a message wakes the thread.
    Adaptive,
    /// Sleep almost at once.
    Park,
}

impl From<Wait> for WaitStrategy {
    fn from(wait: Wait) -> WaitStrategy {
        match wait {
            Wait::Spin => WaitStrategy::Spin,
            Wait::Adaptive => WaitStrategy::Adaptive,
            Wait::Park => WaitStrategy::Park,
        }
    }
}
