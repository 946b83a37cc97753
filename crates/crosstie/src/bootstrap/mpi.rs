//! The ranks of an MPI job (cargo feature `mpi`): [`Bootstrap`] over `MPI_COMM_WORLD`.
//!
//! It builds with OpenMPI and MPICH through the crate `mpi`; on Debian: `apt-get install libopenmpi-dev libclang-dev`.
//!
//! It differs from the other implementations where the launcher decides:
//!
//! - **Authentication.** mpirun starts and connects the ranks and authenticates them with its own credentials. The job's
//!   secret is not used.
//! - **A rank that dies.** The calls of the other ranks do not fail: mpirun detects the death, ends all ranks and exits
//!   with a failure. MPI errors also end the job (`MPI_ERRORS_ARE_FATAL`).
//! - **A rank that is missing.** A rank that never starts MPI blocks the others inside `MPI_Init`; no library can
//!   limit that time (use mpirun's `--timeout`). Afterwards, an operation that not all ranks call within
//!   [`Limits::operation_timeout`] fails with [`Error::Timeout`]; MPI cannot say which rank is missing. The process then
//!   does not finalize MPI, so that its exit makes mpirun end the job.
//! - **The end.** When [`Mpi`] started MPI, dropping it finalizes MPI, which waits for the other ranks. A program that
//!   started MPI itself finalizes it itself, and must have initialized it with a thread level that allows MPI calls from
//!   the thread that uses [`Mpi`].

use std::time::{Duration, Instant};

use mpi::Count;
use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::{Threading, Universe};
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;

use super::error::{Error, Operation, Result};
use super::job::Bootstrap;
use super::limits::{Limits, check_blob_count, check_rank};
use super::payload::add_words;

/// A rank of an MPI job. It stays in the thread that created it.
pub struct Mpi {
    rank: u32,
    size: u32,
    limits: Limits,
    /// `None` only while dropping.
    handles: Option<Handles>,
    /// The error that ended the job.
    failure: Option<Error>,
}

/// What is freed at the end, in the order of the fields.
struct Handles {
    /// A duplicate of `MPI_COMM_WORLD`, so that these operations do not mix with the program's own.
    communicator: SimpleCommunicator,
    /// `None` when the program started MPI itself.
    _universe: Option<Universe>,
}

impl Mpi {
    /// Starts MPI, unless the program has started it, and waits for all ranks.
    pub fn join(limits: Limits) -> Result<Self> {
        limits.check()?;
        if mpi::environment::is_finalized() {
            return Err(Error::Configuration(
                "MPI was finalized in this process and cannot be started again: join the job before MPI_Finalize".into(),
            ));
        }
        let universe = mpi::initialize_with_threading(Threading::Funneled).map(|(universe, _)| universe);
        let world = SimpleCommunicator::world();
        let number = |count: Count| {
            u32::try_from(count)
                .map_err(|_| Error::Configuration(format!("MPI reports the invalid rank or size {count}")))
        };
        let (rank, size) = (number(world.rank())?, number(world.size())?);
        check_rank(rank, size)?;
        if let Err(error) = barrier_with_timeout(&world, Operation::Join, limits.join_timeout) {
            std::mem::forget(universe);
            return Err(error);
        }
        let handles = Some(Handles { communicator: world.duplicate(), _universe: universe });
        Ok(Mpi { rank, size, limits, handles, failure: None })
    }

    fn communicator(&self) -> &SimpleCommunicator {
        &self.handles.as_ref().expect("present until dropped").communicator
    }

    /// Waits until all ranks have called `operation`, checks that they agree, and returns how many bytes each is about
    /// to send.
    fn agree_on(&mut self, operation: Operation, bytes: usize) -> Result<Vec<usize>> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        barrier_with_timeout(self.communicator(), operation, self.limits.operation_timeout)
            .map_err(|error| self.fail(error))?;
        let mine = [operation as u64, bytes as u64];
        let mut all = vec![0_u64; 2 * self.size as usize];
        self.communicator().all_gather_into(&mine[..], &mut all[..]);
        let mut sizes = Vec::with_capacity(self.size as usize);
        for (rank, [called, bytes]) in (0_u32..).zip(all.as_chunks::<2>().0) {
            let called = u8::try_from(*called).ok().and_then(Operation::from_wire).unwrap_or(Operation::Join);
            let first = u8::try_from(all[0]).ok().and_then(Operation::from_wire).unwrap_or(Operation::Join);
            let same_sum = first != Operation::Sum || *bytes == all[1];
            if called != first || !same_sum {
                let (other_rank, other_called) = (0, first);
                return Err(self.fail(Error::OperationMismatch { rank, called, other_rank, other_called }));
            }
            sizes.push(usize::try_from(*bytes).unwrap_or(usize::MAX));
        }
        Ok(sizes)
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failure = Some(error.clone());
        error
    }

    fn gather_bytes(&mut self, operation: Operation, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let sizes = self.agree_on(operation, mine.len())?;
        let total = sizes.iter().fold(0_usize, |total, size| total.saturating_add(*size));
        self.limits.check_message(total).map_err(|error| self.fail(error))?;
        let (counts, starts) = layout(&sizes);
        let (mine, mut all) = (with_valid_address(mine), with_valid_address(&vec![0; total]));
        let (mine, all) = (&mine[..sizes[self.rank as usize]], &mut all[..total]);
        self.communicator()
            .all_gather_varcount_into(mine, &mut PartitionMut::new(all, &counts[..], &starts[..]));
        Ok(split(all, &sizes))
    }
}

impl Bootstrap for Mpi {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.limits.check_blob(blob.len())?;
        self.gather_bytes(Operation::AllGather, blob)
    }

    fn exchange(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        check_blob_count(blobs, self.size)?;
        blobs.iter().try_for_each(|blob| self.limits.check_blob(blob.len()))?;
        let bytes = blobs.iter().map(Vec::len).sum();
        self.limits.check_message(bytes)?;
        let outgoing = with_valid_address(&blobs.concat());
        let out_sizes: Vec<usize> = blobs.iter().map(Vec::len).collect();
        self.agree_on(Operation::Exchange, bytes)?;

        let (out_counts, out_starts) = layout(&out_sizes);
        let mut in_counts = vec![0; self.size as usize];
        self.communicator().all_to_all_into(&out_counts[..], &mut in_counts[..]);
        let in_sizes: Vec<usize> =
            in_counts.iter().map(|count: &Count| usize::try_from(*count).unwrap_or(usize::MAX)).collect();
        let total = in_sizes.iter().fold(0_usize, |total, size| total.saturating_add(*size));
        // Another rank may receive too much although this one does not: all ranks must fail together.
        let mut totals = vec![0_u64; self.size as usize];
        self.communicator().all_gather_into(&(total as u64), &mut totals[..]);
        for total in totals {
            let total = usize::try_from(total).unwrap_or(usize::MAX);
            self.limits.check_message(total).map_err(|error| self.fail(error))?;
        }
        let (in_counts, in_starts) = layout(&in_sizes);
        let mut incoming = with_valid_address(&vec![0; total]);
        self.communicator().all_to_all_varcount_into(
            &Partition::new(&outgoing[..bytes], &out_counts[..], &out_starts[..]),
            &mut PartitionMut::new(&mut incoming[..total], &in_counts[..], &in_starts[..]),
        );
        Ok(split(&incoming[..total], &in_sizes))
    }

    fn barrier(&mut self) -> Result<()> {
        self.agree_on(Operation::Barrier, 0).map(drop)
    }

    fn sum(&mut self, words: &[u64]) -> Result<Vec<u64>> {
        self.limits.check_message(size_of_val(words))?;
        self.agree_on(Operation::Sum, size_of_val(words))?;
        // Not MPI_SUM, which wraps around without an error.
        let mut total = vec![0; words.len()];
        let mut all = vec![0_u64; words.len()];
        let mut result = Ok(());
        for root in 0..self.size {
            use mpi::traits::Root;
            if root == self.rank {
                all.copy_from_slice(words);
            }
            self.communicator()
                .process_at_rank(Count::try_from(root).expect("came from a Count"))
                .broadcast_into(&mut all[..]);
            // All ranks make all broadcasts, also after an overflow.
            result = result.and_then(|()| add_words(&mut total, &all));
        }
        result.map_err(|error| self.fail(error))?;
        Ok(total)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if matches!(self.failure, Some(Error::Timeout { .. })) {
            // Freeing the handles and finalizing MPI would wait for the missing ranks.
            std::mem::forget(self.handles.take());
        }
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

/// A barrier that fails after `timeout`.
fn barrier_with_timeout(
    communicator: &SimpleCommunicator,
    during: Operation,
    timeout: Duration,
) -> Result<()> {
    let deadline = Instant::now() + timeout;
    let mut request = communicator.immediate_barrier();
    let mut pause = Duration::ZERO;
    loop {
        request = match request.test() {
            Ok(_) => return Ok(()),
            Err(request) => request,
        };
        if Instant::now() >= deadline {
            // A barrier that has begun cannot be cancelled. It has no buffers, so abandoning it is sound. The request
            // would panic if it were dropped.
            std::mem::forget(request);
            return Err(Error::Timeout { during, waited: timeout });
        }
        if pause.is_zero() {
            std::thread::yield_now();
        } else {
            std::thread::sleep(pause);
        }
        pause = (pause + Duration::from_micros(10)).min(Duration::from_millis(1));
    }
}

/// Copies the bytes and appends one, so that the address is valid even for an empty slice. The address of an empty slice
/// may be 1, which OpenMPI interprets as `MPI_IN_PLACE`.
fn with_valid_address(bytes: &[u8]) -> Vec<u8> {
    [bytes, &[0]].concat()
}

/// Returns the counts and displacements that MPI takes. The limits keep both within the range of its integers.
fn layout(sizes: &[usize]) -> (Vec<Count>, Vec<Count>) {
    let count = |bytes: usize| Count::try_from(bytes).expect("MAX_MESSAGE is below 2 GiB");
    let mut start = 0;
    let count_and_start = |size: &usize| {
        start += size;
        (count(*size), count(start - size))
    };
    sizes.iter().map(count_and_start).unzip()
}

fn split(mut bytes: &[u8], sizes: &[usize]) -> Vec<Vec<u8>> {
    sizes.iter().map(|size| bytes.split_off(..*size).unwrap_or_default().to_vec()).collect()
}
