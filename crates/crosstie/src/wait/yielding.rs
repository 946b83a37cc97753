//! Whether a waiting thread yields its core or sleeps.
//!
//! A thread that yields to threads that wait as well gets the core back within microseconds. A thread that yields to one that computes waits
//! for a whole time slice, some milliseconds. If it sleeps instead, it gets the core when somebody wakes it.
//!
//! A long yield alone does not tell that another thread computes: a virtual machine that did not run looks the same, and so does a process that was
//! stopped. The kernel knows: it counts how long a thread waited in a run queue (`/proc/thread-self/schedstat`). So a long yield starts
//! an observation of the next yields, and the core counts as taken if one of them is long, too, and this thread spent that time in a run queue.
//! Then the thread does not yield for a while, and after that observes its yields again.

use core::cell::Cell;
use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

/// A yield that takes longer than this ran a thread that does not yield, or no thread at all.
const LONG_YIELD: Duration = Duration::from_micros(500);
/// Yields in an observation.
const OBSERVED_YIELDS: u32 = 64;
/// How long a thread does not yield when it has found its core taken.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest such pause. Each is twice as long as the one before, while observations find the core taken.
const LONGEST_PAUSE: Duration = Duration::from_millis(160);

thread_local! {
    static HISTORY: Cell<YieldHistory> = const { Cell::new(YieldHistory::new()) };
}

/// Lets other threads run on this core (`sched_yield`). Returns how long they ran. Returns `None`, and does not yield, if another thread was found
/// to compute on this core: the caller should sleep until it is woken, because after a yield it would wait for a whole time slice.
///
/// For event loops that decide themselves how to wait; [`wait_any`](crate::wait_any) does the same by itself.
///
/// ```
/// use std::time::Duration;
///
/// # let mut polls = 0;
/// # let mut poll = || { polls += 1; polls == 3 };
/// while !poll() {
///     if crosstie::yield_core().is_none() {
///         // Or `crosstie::park_any`, which ends as soon as there is something to poll.
///         std::thread::sleep(Duration::from_micros(50));
///     }
/// }
/// ```
pub fn yield_core() -> Option<Duration> {
    let mut history = HISTORY.get();
    let start = Instant::now();
    if !history.may_yield(start) {
        return None;
    }
    if history.is_observation_due() {
        history.start_observation(run_queue_wait());
    }
    std::thread::yield_now();
    let end = Instant::now();
    let took = end - start;
    history.record(took, end, run_queue_wait);
    HISTORY.set(history);
    Some(took)
}

/// What a thread knows from its yields.
#[derive(Clone, Copy, Debug)]
struct YieldHistory {
    /// No yields before this time.
    pause_end: Option<Instant>,
    /// The length of the next pause.
    pause: Duration,
    /// Remaining yields of the observation. None: no observation.
    observed: u32,
    /// Whether the time in run queues must be read before the next yield.
    is_observation_due: bool,
    /// Time in run queues when the observation started, if the kernel tells.
    wait_at_start: Option<Duration>,
    /// How long the short yields of the observation took together.
    short_yields: Duration,
}

impl YieldHistory {
    const fn new() -> YieldHistory {
        YieldHistory {
            pause_end: None,
            pause: FIRST_PAUSE,
            observed: 0,
            is_observation_due: false,
            wait_at_start: None,
            short_yields: Duration::ZERO,
        }
    }

    /// Whether the thread may yield now. After a pause an observation is due.
    #[inline]
    fn may_yield(&mut self, now: Instant) -> bool {
        match self.pause_end {
            None => true,
            Some(end) if now < end => false,
            Some(_) => {
                self.pause_end = None;
                self.is_observation_due = true;
                true
            }
        }
    }

    #[inline]
    fn is_observation_due(&self) -> bool {
        self.is_observation_due
    }

    /// Starts an observation, with the time that the thread has spent in run queues.
    #[cold]
    fn start_observation(&mut self, run_queue_wait: Option<Duration>) {
        self.is_observation_due = false;
        self.observed = OBSERVED_YIELDS;
        self.wait_at_start = run_queue_wait;
        self.short_yields = Duration::ZERO;
    }

    /// Records a yield.
    #[inline]
    fn record(&mut self, took: Duration, now: Instant, run_queue_wait: impl FnOnce() -> Option<Duration>) {
        if took > LONG_YIELD {
            self.record_long(took, now, run_queue_wait());
        } else if self.observed > 0 {
            self.short_yields += took;
            self.observed -= 1;
            if self.observed == 0 {
                self.pause = FIRST_PAUSE;
            }
        }
    }

    /// Records a long yield. In an observation, starts a pause if the thread waited in a run queue meanwhile, or if the kernel does not tell.
    #[cold]
    fn record_long(&mut self, took: Duration, now: Instant, run_queue_wait: Option<Duration>) {
        let waited = self.wait_at_start.zip(run_queue_wait).map(|(before, after)| {
            // The short yields were spent in run queues, too.
            after.saturating_sub(before).saturating_sub(self.short_yields)
        });
        if self.observed > 0 && waited.is_none_or(|waited| waited > took / 2) {
            self.observed = 0;
            self.pause_end = now.checked_add(self.pause);
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        } else {
            self.start_observation(run_queue_wait);
        }
    }
}

/// How long this thread has waited in run queues so far. `None` if the kernel does not tell.
#[cold]
fn run_queue_wait() -> Option<Duration> {
    let mut text = [0; 64];
    let len = File::open("/proc/thread-self/schedstat").ok()?.read(&mut text).ok()?;
    parse_run_queue_wait(text.get(..len)?)
}

/// The second of three numbers: time on a core and time in run queues, in nanoseconds, and the number of time slices. All are zero if
/// the kernel does not count.
fn parse_run_queue_wait(schedstat: &[u8]) -> Option<Duration> {
    let mut numbers = core::str::from_utf8(schedstat).ok()?.split_ascii_whitespace();
    let (on_core, waited) = (numbers.next()?, numbers.next()?);
    if on_core == "0" { None } else { waited.parse().ok().map(Duration::from_nanos) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SHORT: Duration = Duration::from_micros(20);

    /// A history, a clock, and the time in run queues.
    struct Model {
        history: YieldHistory,
        now: Instant,
        waited: Option<Duration>,
    }

    impl Model {
        fn new(waited: Option<Duration>) -> Model {
            Model { history: YieldHistory::new(), now: Instant::now(), waited }
        }

        /// Whether the thread yields: `took`, of which it spent `queued` in a run queue.
        fn yields(&mut self, took: Duration, queued: Duration) -> bool {
            if !self.history.may_yield(self.now) {
                return false;
            }
            if self.history.is_observation_due() {
                self.history.start_observation(self.waited);
            }
            self.now += took;
            self.waited = self.waited.map(|waited| waited + queued);
            self.history.record(took, self.now, || self.waited);
            true
        }

        /// The length of a pause, in ms.
        fn pause(&mut self) -> u32 {
            let mut ms = 0;
            while !self.history.may_yield(self.now) {
                self.now += MS;
                ms += 1;
            }
            ms
        }
    }

    #[test]
    fn pauses_after_two_long_yields_in_a_run_queue_with_short_ones_between() {
        let mut model = Model::new(Some(7 * MS));
        assert!(model.yields(4 * MS, 4 * MS));
        for _ in 0..OBSERVED_YIELDS / 2 {
            assert!(model.yields(SHORT, SHORT));
        }
        assert!(model.yields(4 * MS, 4 * MS));
        assert!(!model.yields(SHORT, SHORT), "the core is taken");
        assert_eq!(model.pause(), FIRST_PAUSE.as_millis() as u32);
    }

    #[test]
    fn two_long_yields_far_apart_say_nothing() {
        let mut model = Model::new(Some(MS));
        for _ in 0..10 {
            assert!(model.yields(4 * MS, 4 * MS));
            for _ in 0..OBSERVED_YIELDS {
                assert!(model.yields(SHORT, SHORT));
            }
        }
    }

    #[test]
    fn time_in_which_the_machine_did_not_run_says_nothing() {
        let mut model = Model::new(Some(MS));
        for _ in 0..1000 {
            assert!(model.yields(4 * MS, SHORT));
            // As much time in the run queue as a long yield needs, but in short yields.
            for _ in 1..OBSERVED_YIELDS {
                assert!(model.yields(50 * SHORT / 10, 50 * SHORT / 10));
            }
        }
    }

    #[test]
    fn pauses_grow_while_the_core_is_taken_and_start_short_again_when_it_was_free() {
        let mut model = Model::new(Some(MS));
        assert!(model.yields(4 * MS, 4 * MS));
        for pause in [20, 40, 80, 160, 160, 160, 160] {
            assert!(model.yields(4 * MS, 4 * MS));
            assert_eq!(model.pause(), pause, "one long yield after a pause is enough");
            assert!(model.yields(SHORT, SHORT));
        }
        for _ in 0..OBSERVED_YIELDS {
            assert!(model.yields(SHORT, SHORT));
        }
        assert!(model.yields(4 * MS, 4 * MS) && model.yields(4 * MS, 4 * MS));
        assert_eq!(model.pause(), 20);
    }

    #[test]
    fn long_yields_alone_count_where_the_kernel_does_not_tell() {
        let mut model = Model::new(None);
        assert!(model.yields(4 * MS, MS) && model.yields(4 * MS, MS));
        assert!(!model.yields(SHORT, SHORT));
    }

    #[test]
    fn reads_the_time_in_run_queues() {
        assert_eq!(parse_run_queue_wait(b"1234 5678 9\n"), Some(Duration::from_nanos(5678)));
        assert_eq!(parse_run_queue_wait(b"1234 0 9\n"), Some(Duration::ZERO));
        for untold in [&b"0 0 0\n"[..], b"", b"12", b"12 x 3", b"\xff\xff"] {
            assert_eq!(parse_run_queue_wait(untold), None);
        }
        // Whatever this kernel has: the time does not run backwards.
        assert!(run_queue_wait().zip(run_queue_wait()).is_none_or(|(before, after)| before <= after));
        let yields = std::thread::spawn(|| yield_core().is_some());
        assert!(yields.join().unwrap(), "a thread that has not yielded yet may");
    }
}
