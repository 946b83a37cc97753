//! One thread and its clients, which take turns.
//!
//! A round is a turn of each client, so none is left out for longer than the others' turns take. When nobody was answered in a round,
//! the thread spins, lets others run or sleeps, as the least patient of its clients has it. When one client gives up, the run ends
//! for all of the thread.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use super::Error;
use super::worker::{LONG_NAP, PATIENCE, Recording, Turn, Worker};
use crate::history::now;

/// How long a thread sleeps at a time that has waited for answers for a while, and does not know for how long.
const SHORT_NAP: Duration = Duration::from_micros(50);
/// A yield that takes so many nanoseconds went to somebody who does not yield.
const TAKEN: u64 = 500_000;
/// Rounds without an answer in which a thread lets others run, before it sleeps.
const YIELDS: u32 = 256;
/// Rounds between two looks whether a client hears nothing any more.
const LOOK: u32 = 1 << 14;

/// A run: works until `stop`, or until a client has a reason to end it, and waits for what is under way. Then each
/// client's tally says what it did.
pub(super) fn run<R: Recording>(
    workers: &mut [Worker<R>],
    measured: bool,
    spins: u32,
    stop: &AtomicBool,
) -> Result<(), Error> {
    workers.iter_mut().try_for_each(|worker| worker.start(measured))?;
    if let [worker] = workers
        && worker.is_blocking()
    {
        worker.strings(stop);
        return Ok(());
    }
    let mut rest = Rest { spins, idle: 0 };
    let mut rounds = 0;
    while !stop.load(Relaxed) {
        let (mut least, mut over) = (Turn::Free(u64::MAX), false);
        for worker in &mut *workers {
            least = least.min(worker.turn());
            over |= worker.has_given_up();
        }
        if over {
            break;
        }
        rounds += 1;
        if rest.after(least) || rounds == LOOK {
            rounds = 0;
            let time = now();
            workers.iter_mut().for_each(|worker| worker.look(time));
        }
    }
    workers.iter_mut().for_each(Worker::stop);
    rest.idle = 0;
    let end = now() + PATIENCE.as_nanos() as u64;
    while let Some(least) = workers.iter_mut().filter_map(Worker::settle).min()
        && now() < end
    {
        rest.after(least);
    }
    Ok(())
}

/// What a thread does between rounds.
struct Rest {
    spins: u32,
    /// Rounds without an answer, and more where a yield took long.
    idle: u32,
}

impl Rest {
    /// After a round that came to `least`. Says whether it has slept for lack of answers.
    #[inline]
    fn after(&mut self, least: Turn) -> bool {
        match least {
            Turn::Answered => self.idle = 0,
            Turn::Waits if self.idle < self.spins => {
                self.idle += 1;
                spin_loop();
            }
            Turn::Waits => return self.give_way(),
            Turn::Starts if self.spins == 0 => std::thread::yield_now(),
            Turn::Starts => spin_loop(),
            Turn::Free(early) => std::thread::sleep(Duration::from_nanos(early).min(LONG_NAP)),
        }
        false
    }

    #[cold]
    fn give_way(&mut self) -> bool {
        let yields = self.idle - self.spins;
        if yields >= YIELDS {
            std::thread::sleep(SHORT_NAP);
            return true;
        }
        let before = now();
        std::thread::yield_now();
        // Who got the core for so long does not give it back: one that sleeps and wakes gets it sooner.
        let taken = now() - before > TAKEN;
        self.idle += if taken { YIELDS - yields } else { 1 };
        false
    }
}
