//! Endpoints: every operation, in both progress modes and with one and several queue pairs; failures; peers that are processes.

mod batches;
mod cancel;
mod ended_recvs;
mod failure;
mod futures_and_threads;
mod idle;
mod operations;
mod pair;
mod restarts;
