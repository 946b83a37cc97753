//! Starts a job: its processes find and authenticate each other, and exchange set-up data before any device exists.
//!
//! A job is `size` processes (or threads), each with a rank from 0. Through one small trait, [`Bootstrap`], they exchange
//! opaque blobs (addresses, keys, handles), wait for each other, and add up numbers. This is for set-up and for
//! results, not for the data path: every operation goes through rank 0.
//!
//! | implementation | use it for | how the ranks connect |
//! | --- | --- | --- |
//! | [`local::spawn`] | one machine, no configuration | the program starts its own ranks and talks to them over socket pairs |
//! | [`local::in_process`] | tests and benchmarks | the same, with threads of one process |
//! | [`tcp`] | several machines | rank 0 listens; the others connect and prove that they know the job's secret |
//! | `mpi` (cargo feature `mpi`) | under mpirun | `MPI_COMM_WORLD` |
//!
//! [`from_env`] chooses the implementation from environment variables. [`from_env_or_local`] spawns ranks when no
//! variable describes a job.
//!
//! A service that must keep running when one rank dies uses a [`channel`] for each pair of ranks instead.
//!
//! ```
//! use crosstie::bootstrap::{Bootstrap, Limits, local};
//!
//! // Two ranks as threads. `from_env_or_local(2)` returns the same trait for two processes.
//! let ranks = local::in_process(2, Limits::default())?;
//! std::thread::scope(|scope| {
//!     for mut job in ranks {
//!         scope.spawn(move || {
//!             let address = format!("address of rank {}", job.rank());
//!             let all = job.all_gather(address.as_bytes()).expect("both ranks are there");
//!             assert_eq!(all[1 - job.rank() as usize], format!("address of rank {}", 1 - job.rank()).as_bytes());
//!             job.barrier().expect("both ranks are there");
//!         });
//!     }
//! });
//! # Ok::<(), crosstie::bootstrap::Error>(())
//! ```
//!
//! All implementations promise the following; the module `mpi` lists its exceptions:
//!
//! - Every call ends with a result or with the cause of its failure, within [`Limits`]. [`tcp`] states the exact times.
//! - When a rank dies, never joins, or violates the protocol, the pending or next call of every other rank fails, and the
//!   error names that rank.
//! - Two processes prove to each other that they know the job's secret before they parse any other byte. A second
//!   process that claims a rank already taken is rejected with [`Error::DuplicateRank`]; the first one is not disturbed.
//! - Blobs arrive unchanged, or the call fails. They are authenticated, not encrypted.
//! - No bytes from the network cause a panic, a hang or unbounded memory use.
//!
//! The files import each other in one direction only: from the top of this list to the bottom, and within a row from left
//! to right:
//!
//! ```text
//! mod                          from_env
//! environment                  which job the environment variables describe
//! local  tcp  mpi  single_rank the implementations          channel (between two processes)
//! member  children             a rank's side of a job, the processes that rank 0 spawned
//! coordinator/                 rank 0's thread: accepts ranks, runs the collective operations
//! job  abort                   the trait, the error that ends a job on the wire
//! handshake  frame  payload    bytes on a connection
//! stream  secret  variables    sockets with deadlines, authentication, environment variables
//! random  limits  error
//! ```

#![forbid(unsafe_code)]

mod abort;
pub mod channel;
mod children;
mod coordinator;
mod environment;
mod error;
mod frame;
#[cfg(all(test, not(loom)))]
mod fuzz_tests;
mod handshake;
mod job;
pub mod limits;
pub mod local;
mod member;
#[cfg(feature = "mpi")]
pub mod mpi;
mod payload;
mod random;
mod secret;
mod single_rank;
mod stream;
pub mod tcp;
mod variables;

pub use error::{Error, Operation, Result, Violation};
pub use job::Bootstrap;
pub use limits::Limits;
pub use member::Member;
pub use random::random_bytes;
pub(crate) use secret::HmacSha256;
pub use secret::{MAX_SECRET, MIN_SECRET, Secret};
pub use single_rank::SingleRank;
pub(crate) use stream::is_closed_by_peer;

/// Joins the job that the environment variables describe. When they describe none, the job has one rank, this process.
///
/// The first of these that applies is used: a rank spawned by [`local`]; a rendezvous address (`CROSSTIE_RENDEZVOUS`) with
/// a rank from `CROSSTIE_RANK`/`CROSSTIE_SIZE` or from mpirun, PMI, PMIx or Slurm; mpirun without a rendezvous address
/// (feature `mpi`). Missing and contradictory variables are an [`Error::Configuration`] that names them.
///
/// ```
/// use crosstie::bootstrap::{self, Bootstrap};
///
/// let mut job = bootstrap::from_env()?;
/// let greetings = job.all_gather(format!("hello from {}", job.rank()).as_bytes())?;
/// assert_eq!(greetings.len(), job.size() as usize);
/// job.finish()?;
/// # Ok::<(), bootstrap::Error>(())
/// ```
pub fn from_env() -> Result<Box<dyn Bootstrap>> {
    from_env_or_local(1)
}

/// Like [`from_env`], but when the environment describes no job, starts `size` ranks with [`local::spawn`].
pub fn from_env_or_local(size: u32) -> Result<Box<dyn Bootstrap>> {
    let variables = variables::Variables::of_process();
    let limits = environment::limits(&variables)?;
    match environment::Job::detect(&variables, limits)? {
        environment::Job::Tcp(config) => Ok(Box::new(tcp::join(&config)?)),
        #[cfg(feature = "mpi")]
        environment::Job::Mpi => Ok(Box::new(mpi::Mpi::join(limits)?)),
        environment::Job::Standalone if size == 1 => Ok(Box::new(SingleRank::new(limits))),
        _ => Ok(Box::new(local::spawn(size, limits)?)),
    }
}
