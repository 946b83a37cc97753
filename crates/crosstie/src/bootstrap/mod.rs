//! Who is in the job, and what they tell each other before there are devices to talk over.
//!
//! A job is `size` processes (or threads), ranked from 0. They exchange opaque blobs (addresses, keys, handles), wait
//! for each other and add up figures through one small trait, [`Bootstrap`]. It serves set-up and results, not the
//! data path: every operation passes through rank 0.
//!
//! | way | for | how the ranks meet |
//! | --- | --- | --- |
//! | [`local::spawn`] | one machine, nothing to set up | the program starts its own ranks, over socket pairs |
//! | [`local::in_process`] | tests and benchmarks | the same inside one process |
//! | [`tcp`] | several machines | rank 0 listens, the others connect and prove the job's secret |
//! | `mpi` (cargo feature `mpi`) | under mpirun | `MPI_COMM_WORLD` |
//!
//! A service that lives on when a rank dies has a [`channel`] for each pair of ranks instead.
//!
//! [`from_env`] picks the way from the environment; [`from_env_or_local`] spawns ranks where it says nothing.
//!
//! Promises, the same for all ways except where `mpi` says otherwise:
//!
//! - Every call ends with a result or a cause, within [`Limits`]; see [`tcp`] for the exact times.
//! - When a rank dies, never comes, or breaks the protocol, every survivor's pending or next call fails, and the error
//!   names that rank.
//! - The ranks prove to each other that they know the job's secret before any other byte is parsed. A second process
//!   that claims a taken rank is refused with [`Error::DuplicateRank`]; the first goes on undisturbed.
//! - Blobs arrive unchanged, or the call fails. They are not encrypted.
//! - No panic, no hang and no unbounded memory, whatever bytes arrive.

#![forbid(unsafe_code)]

pub mod channel;
mod coordinator;
mod environment;
mod error;
mod frame;
mod handshake;
pub mod limits;
pub mod local;
mod member;
#[cfg(feature = "mpi")]
pub mod mpi;
mod random;
mod round;
mod secret;
mod single_rank;
mod stream;
pub mod tcp;

pub use error::{Error, Result, Operation, Violation};
pub use limits::Limits;
pub use member::Member;
pub use random::random_bytes;
pub use secret::{MAX_SECRET, MIN_SECRET, Secret};
pub use single_rank::SingleRank;

/// The collective operations of a job.
///
/// All ranks call the same operations in the same order; each call returns when all ranks have made it.
/// A blob above [`Limits::max_blob`] and a wrong count of blobs are refused before anything is sent, and the caller may
/// call again; after any other error the job is over and every later call returns that error.
pub trait Bootstrap {
    /// This process's place in the job, from 0.
    fn rank(&self) -> u32;

    /// How many ranks the job has.
    fn size(&self) -> u32;

    /// Gives every rank everybody's blob, in rank order. The blobs may differ in length and be empty.
    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Sends `blobs[r]` to rank `r` and returns what each rank sent here, in rank order. One blob per rank, also for
    /// oneself; they may differ in length and be empty.
    fn exchange(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>>;

    /// Waits for everybody.
    fn barrier(&mut self) -> Result<()>;

    /// Adds up, element by element, what all ranks give. All give equally many; a sum above 64 bits is
    /// [`Error::Overflow`] for everybody.
    fn sum(&mut self, words: &[u64]) -> Result<Vec<u64>>;

    /// Ends the job in order: waits for everybody and, in a process that spawned ranks, for their exit, whose failure
    /// it reports. The last call of a job.
    fn finish(&mut self) -> Result<()> {
        self.barrier()
    }
}

/// Joins the job that the environment describes; a job of one rank where it describes none.
///
/// In this order: a rank spawned by [`local`]; a rendezvous (`CROSSTIE_RENDEZVOUS`) with a rank from
/// `CROSSTIE_RANK`/`CROSSTIE_SIZE` or from mpirun, PMI, PMIx or Slurm; mpirun without a rendezvous (feature `mpi`).
/// Missing and contradictory variables are [`Error::Configuration`], which names them.
///
/// ```
/// use crosstie::bootstrap::{self, Bootstrap};
///
/// let mut job = bootstrap::from_env()?;
/// let everybody = job.all_gather(format!("hello from {}", job.rank()).as_bytes())?;
/// assert_eq!(everybody.len(), job.size() as usize);
/// job.finish()?;
/// # Ok::<(), bootstrap::Error>(())
/// ```
pub fn from_env() -> Result<Box<dyn Bootstrap>> {
    from_env_or_local(1)
}

/// As [`from_env`], but where the environment describes no job, makes one of `size` ranks with [`local::spawn`].
pub fn from_env_or_local(size: u32) -> Result<Box<dyn Bootstrap>> {
    let variables = environment::Variables::of_process();
    let limits = environment::limits(&variables)?;
    match environment::Job::of(&variables, limits)? {
        environment::Job::Tcp(config) => Ok(Box::new(tcp::join(&config)?)),
        #[cfg(feature = "mpi")]
        environment::Job::Mpi => Ok(Box::new(mpi::Mpi::join(limits)?)),
        environment::Job::SingleRank if size == 1 => Ok(Box::new(SingleRank::new(limits))),
        _ => Ok(Box::new(local::spawn(size, limits)?)),
    }
}

fn check_count(blobs: &[Vec<u8>], size: u32) -> Result<()> {
    if blobs.len() == size as usize { Ok(()) } else { Err(Error::BlobCount { given: blobs.len(), size }) }
}
