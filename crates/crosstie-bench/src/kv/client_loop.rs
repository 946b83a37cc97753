//! The client loop: one thread runs several clients.
//!
//! One round makes one step of each client, so no client waits longer than the steps of the others take. After a round without a
//! response the thread spins, yields or sleeps until a response comes, as the client with the most urgent step requires. If one client
//! gives up, the run ends for all clients of the thread.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crosstie::{park_any, yield_core};

use super::worker::{MAX_SLEEP, RESPONSE_TIMEOUT, Recording, Step, Worker};
use crate::error::Error;
use crate::history::now;

/// Longest sleep for responses of a thread with an open loop, whose next start nobody announces.
const SHORT_SLEEP: Duration = Duration::from_micros(50);
/// Rounds without a response in which a thread yields, before it sleeps.
const YIELDS: u32 = 256;
/// Rounds between two checks whether a client has timed out.
const ROUNDS_PER_TIMEOUT_CHECK: u32 = 1 << 14;

/// Runs the clients until `stop` is set or a client gives up, then waits for the operations in flight. Afterwards the tally of each
/// client has what it did.
pub(super) fn run<R: Recording>(
    workers: &mut [Worker<R>],
    measured: bool,
    spins: u32,
    stop: &AtomicBool,
) -> Result<(), Error> {
    workers.iter_mut().try_for_each(|worker| worker.start(measured))?;
    let mut backoff = Backoff { spins, idle: 0, is_core_taken: false };
    let mut rounds = 0;
    while !stop.load(Relaxed) {
        let (mut least, mut over) = (Step::IdleFor(u64::MAX), false);
        for worker in &mut *workers {
            least = least.min(worker.step());
            over |= worker.has_given_up();
        }
        if over {
            break;
        }
        rounds += 1;
        let must_sleep = backoff.after_round(least);
        if must_sleep {
            sleep_until_response(workers);
        }
        if must_sleep || rounds == ROUNDS_PER_TIMEOUT_CHECK {
            rounds = 0;
            let time = now();
            workers.iter_mut().for_each(|worker| worker.check_timeout(time));
        }
    }
    workers.iter_mut().for_each(Worker::stop);
    backoff.idle = 0;
    let end = now() + RESPONSE_TIMEOUT.as_nanos() as u64;
    while let Some(least) = workers.iter_mut().filter_map(Worker::drain).min()
        && now() < end
    {
        if backoff.after_round(least) {
            sleep_until_response(workers);
        }
    }
    Ok(())
}

/// Sleeps until a client has a response, or for a short time.
#[cold]
fn sleep_until_response<R: Recording>(workers: &mut [Worker<R>]) {
    let is_open_loop = workers.iter().any(Worker::is_open_loop);
    let longest = if is_open_loop { SHORT_SLEEP } else { MAX_SLEEP };
    park_any(workers.iter().flat_map(Worker::sources), longest);
    workers.iter_mut().for_each(Worker::find_responses);
}

/// What a thread does between rounds: spin, yield or sleep.
struct Backoff {
    spins: u32,
    /// Rounds without a response.
    idle: u32,
    /// Another thread computes on this core: the thread neither spins nor yields, but sleeps.
    is_core_taken: bool,
}

impl Backoff {
    /// Waits after a round whose most urgent step was `least`. Returns whether the thread must sleep until a response comes.
    #[inline]
    fn after_round(&mut self, least: Step) -> bool {
        match least {
            Step::Completed => self.idle = 0,
            Step::Waiting if self.idle < self.spins && !self.is_core_taken => {
                self.idle += 1;
                spin_loop();
            }
            Step::Waiting => return self.yield_core(),
            Step::StartDue if self.spins == 0 => return yield_core().is_none(),
            Step::StartDue => spin_loop(),
            Step::IdleFor(early) => std::thread::sleep(Duration::from_nanos(early).min(MAX_SLEEP)),
        }
        false
    }

    /// Yields, unless the thread has waited for a while. Returns whether it must sleep.
    #[cold]
    fn yield_core(&mut self) -> bool {
        if self.idle < self.spins + YIELDS {
            self.record_yield(yield_core().is_some());
        }
        self.is_core_taken || self.idle >= self.spins + YIELDS
    }

    fn record_yield(&mut self, has_yielded: bool) {
        self.idle += 1;
        self.is_core_taken = !has_yielded;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::worker::{FILLER, RunRecorder, Task, write_key_prefix};
    use super::*;
    use crate::history;
    use crate::workload;
    use crosstie_kv::client::Client;
    use crosstie_kv::node::{Node, NodeConfig};

    const CLIENTS: u32 = 4;
    const KEYS: u64 = 64;

    /// Length of byte-string values.
    const SIZE: usize = 3000;

    /// A node that has all keys, as words and as byte strings.
    fn node(name: &str) -> Node {
        let name = format!("client-loop-{name}-{}", std::process::id());
        let config = NodeConfig { queue_depth: 8, daemons: 2, ..NodeConfig::single(&name) };
        let node = Node::start(&config).unwrap();
        let mut client = Client::attach(&name).unwrap();
        let mut value = [FILLER; SIZE];
        for key in 0..KEYS {
            client.put(key, key).unwrap();
            write_key_prefix(&mut value, &workload::key_bytes(key));
            client.put_bytes(&workload::key_bytes(key), &value).unwrap();
        }
        node
    }

    fn task(node: &Node, client: u32, depth: usize, rate: Option<f64>, value_size: usize) -> Task {
        Task {
            node: node.name().to_owned(),
            rank: 0,
            client,
            number: client,
            workload: workload::Plan { keys: KEYS, value_size, ..workload::Plan::default() },
            depth,
            rate,
            recorded: None,
            core: None,
            spins: 0,
        }
    }

    fn workers(node: &Node, depth: usize, rate: Option<f64>, value_size: usize) -> Vec<Worker<()>> {
        let worker = |client| Worker::new(task(node, client, depth, rate, value_size), ()).unwrap();
        (0..CLIENTS).map(worker).collect()
    }

    /// Makes one run of this length.
    fn run_for<R: Recording>(workers: &mut [Worker<R>], length: Duration) {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(length);
                stop.store(true, Relaxed);
            });
            run(workers, true, 0, &stop).unwrap();
        });
    }

    #[test]
    fn every_client_of_a_thread_makes_progress_and_is_timed() {
        let node = node("progress");
        let loops = [(1, None), (8, None), (1, Some(2000.0)), (8, Some(2000.0))];
        for (size, (depth, rate)) in
            [8, SIZE].into_iter().flat_map(|size| loops.map(|depth_and_rate| (size, depth_and_rate)))
        {
            let mut workers = workers(&node, depth, rate, size);
            run_for(&mut workers, Duration::from_millis(200));
            let tallies: Vec<_> = workers.iter_mut().map(Worker::tally).collect();
            let context = format!("{size} bytes, depth {depth}, rate {rate:?}: {tallies:?}");
            let most = tallies.iter().map(|tally| tally.ops).max().unwrap();
            for (worker, tally) in workers.iter().zip(&tallies) {
                assert!(tally.ops > 0 && tally.ops >= most / 4, "a client is starved: {context}");
                assert_eq!((tally.errors, tally.node_gone, tally.gave_up), (0, 0, false), "{context}");
                assert!(tally.ended > tally.begun, "{context}");
                if depth == 1 || rate.is_some() {
                    assert_eq!(worker.latency.count(), tally.ops, "not every operation was timed: {context}");
                }
            }
            if rate.is_none() && depth == 1 {
                // A client's operations follow each other without a gap, so their latencies add up to the time of the run.
                for (worker, tally) in workers.iter().zip(&tallies) {
                    let sum: u64 = worker.latency.counts().map(|(value, count)| value * count).sum();
                    let share = sum as f64 / (tally.ended - tally.begun) as f64;
                    assert!((0.8..1.2).contains(&share), "latencies add up to {share} of the run: {context}");
                }
            }
        }
    }

    #[test]
    fn errors_are_counted_for_the_client_that_had_them() {
        let node = node("errors");
        for size in [8, SIZE] {
            let mut workers: Vec<Worker<()>> = (0..CLIENTS)
                .map(|client| {
                    let mut task = task(&node, client, 4, None, size);
                    task.workload.read_ratio = 1.0;
                    // Half of this client's keys are not in the store.
                    task.workload.keys *= if client == 2 { 2 } else { 1 };
                    Worker::new(task, ()).unwrap()
                })
                .collect();
            run_for(&mut workers, Duration::from_millis(50));
            for (client, worker) in workers.iter_mut().enumerate() {
                let tally = worker.tally();
                assert!(tally.ops > 0 && tally.errors < tally.ops, "{size}, {client}: {tally:?}");
                assert_eq!(tally.errors > 0, client == 2, "{size}, {client}: {tally:?}");
            }
        }
    }

    #[test]
    fn get_of_a_wrong_value_is_an_error() {
        let node = node("wrong");
        let mut client = Client::attach(node.name()).unwrap();
        let key = |key: u64| workload::key_bytes(key);
        for (wrong, value) in [(1, vec![FILLER; SIZE]), (2, [&key(2)[..], &[FILLER; SIZE]].concat())] {
            client.put_bytes(&key(wrong), &value).unwrap();
            let mut task = task(&node, 0, 4, None, SIZE);
            (task.workload.read_ratio, task.workload.keys) = (1.0, 4);
            let mut workers = [Worker::new(task, ()).unwrap()];
            let (mut ops, mut errors) = (0, 0);
            while ops < 400 {
                run_for(&mut workers, Duration::from_millis(50));
                let tally = workers[0].tally();
                (ops, errors) = (ops + tally.ops, errors + tally.errors);
            }
            // One of four equally frequent keys has a wrong value.
            let share = errors as f64 / ops as f64;
            assert!((0.15..0.35).contains(&share), "{errors} of {ops}, {wrong}");
            client.put_bytes(&key(wrong), &[&key(wrong)[..], &[FILLER; SIZE - 8]].concat()).unwrap();
        }
    }

    #[test]
    fn run_ends_for_all_clients_of_a_thread_when_the_node_stops() {
        let loops = [(1, None), (8, None), (8, Some(2000.0))];
        for (size, (depth, rate)) in
            [8, SIZE].into_iter().flat_map(|size| loops.map(|depth_and_rate| (size, depth_and_rate)))
        {
            let node = node(&format!("gone-{size}-{depth}-{}", rate.is_some()));
            let mut workers = workers(&node, depth, rate, size);
            let begun = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50));
                    drop(node);
                });
                // The run is never told to stop.
                run(&mut workers, true, 0, &AtomicBool::new(false)).unwrap();
            });
            let tallies: Vec<_> = workers.iter_mut().map(Worker::tally).collect();
            assert!(tallies.iter().any(|tally| tally.gave_up), "{tallies:?}");
            assert!(tallies.iter().all(|tally| tally.ops > 0 && tally.errors == 0), "{tallies:?}");
            assert!(begun.elapsed() < RESPONSE_TIMEOUT, "the run ended only by a timeout");
            if rate.is_none() {
                run(&mut workers, true, 0, &AtomicBool::new(false)).unwrap();
                assert!(workers.iter().all(Worker::has_given_up));
            }
        }
    }

    #[test]
    fn histories_of_clients_on_one_thread_are_linearizable() {
        let node = node("checked");
        let record = |client| RunRecorder::new(client, 5000, 2);
        let mut workers: Vec<Worker<RunRecorder>> = (0..CLIENTS)
            .map(|client| Worker::new(task(&node, client, 4, None, 8), record(client)).unwrap())
            .collect();
        for _ in 0..2 {
            // The run ends when a recorder is full.
            run(&mut workers, true, 0, &AtomicBool::new(false)).unwrap();
            assert!(workers.iter().any(Worker::has_given_up));
        }
        let ops: u64 = workers.iter_mut().map(|worker| worker.tally().ops).sum();
        assert!(ops > 5000);
        let histories: Vec<_> = workers.into_iter().map(|worker| worker.record.recorder.finish()).collect();
        let summary =
            history::check_from(&histories, Some, history::BUDGET).expect("the history is linearizable");
        assert!(summary.operations > 10_000, "{summary:?}");
    }

    #[test]
    fn only_the_client_without_responses_gives_up() {
        let node = node("silent");
        let mut workers = workers(&node, 2, None, 8);
        let [silent, served, ..] = workers.as_mut_slice() else { panic!("two clients") };
        for worker in [&mut *silent, &mut *served] {
            worker.start(true).unwrap();
            worker.step();
            worker.check_timeout(now());
        }
        let late = now() + 2 * RESPONSE_TIMEOUT.as_nanos() as u64;
        let timeout = Instant::now() + RESPONSE_TIMEOUT;
        while served.step() != Step::Completed {
            assert!(Instant::now() < timeout, "no response");
            std::thread::yield_now();
        }
        // The responses of this client have arrived, but it has not polled for them.
        silent.check_timeout(late);
        served.check_timeout(late);
        assert_eq!([silent, served].map(|worker| worker.has_given_up()), [true, false]);
    }

    #[test]
    fn most_urgent_step_decides_how_the_thread_waits() {
        let order = [Step::Completed, Step::StartDue, Step::Waiting, Step::IdleFor(5), Step::IdleFor(9)];
        assert!(order.is_sorted());
        let mut backoff = Backoff { spins: 2, idle: 0, is_core_taken: false };
        assert!(!backoff.after_round(Step::Waiting) && !backoff.after_round(Step::Waiting));
        assert_eq!(backoff.idle, 2);
        assert!((0..YIELDS).any(|_| backoff.after_round(Step::Waiting)), "the thread never slept");
        assert!(backoff.after_round(Step::Waiting), "without a response it sleeps again");
        backoff.after_round(Step::Completed);
        assert_eq!(backoff.idle, 0);
        // It does not spin while another thread computes on its core, and does so again afterwards.
        backoff.record_yield(false);
        backoff.after_round(Step::Completed);
        assert!(backoff.is_core_taken);
        backoff.record_yield(true);
        assert!(!backoff.is_core_taken && !backoff.after_round(Step::Waiting));
    }
}
