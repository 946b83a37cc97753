//! Endpoints between the threads of one process: every operation, in both progress modes and with one and several queue pairs.

use crosstie_testkit::rng;

mod batches;
mod cancel;
mod ended_recvs;
mod futures_and_threads;
mod operations;
mod pair;
