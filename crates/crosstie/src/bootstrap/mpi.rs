//! Ranks of an MPI job (cargo feature `mpi`): [`Bootstrap`] over `MPI_COMM_WORLD`.
//!
//! Builds on OpenMPI and MPICH through the crate `mpi`; on Debian: `apt-get install libopenmpi-dev libclang-dev`.
//!
//! What differs from the other ways, because the launcher decides it:
//!
//! - **The secret.** mpirun started the ranks and connects them; it vouches for them with its own credentials. There
//!   is no secret of ours here.
//! - **A rank that dies.** Calls do not fail at the survivors: mpirun notices, ends all ranks and exits with a failure.
//!   MPI errors likewise end the job (`MPI_ERRORS_ARE_FATAL`).
//! - **A rank that does not come.** One that never starts MPI keeps the others inside `MPI_Init`; no library can
//!   bound that (use mpirun's `--timeout`). After that, an operation that not all ranks come to within
//!   [`Limits::operation_timeout`] is [`Error::Timeout`]; MPI cannot say who is missing. This process then no longer finalizes
//!   MPI, so that its exit makes mpirun end the job.
//! - **The end.** Dropping [`Mpi`] finalizes MPI, which waits for the other ranks, if this started it. A program that
//!   started MPI itself keeps that duty, and must have asked for MPI calls from the thread that it calls this in.

use std::time::{Duration, Instant};

use mpi::Count;
use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::{Threading, Universe};
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;

use super::error::{Error, Result, Operation};
use super::limits::{Limits, check_rank};
use super::round::add;
use super::{Bootstrap, check_count};

/// A rank of an MPI job. Stays in the thread that made it.
pub struct Mpi {
    rank: u32,
    size: u32,
    limits: Limits,
    /// `None` only while dropping.
    handles: Option<Handles>,
    failed: Option<Error>,
}

/// What is freed at the end, in this order.
struct Handles {
    /// A duplicate of the world: our operations do not mix with the program's own.
    ranks: SimpleCommunicator,
    /// `None` when the program started MPI itself.
    _universe: Option<Universe>,
}

impl Mpi {
    /// Starts MPI, unless the program has done so, and waits for all ranks.
    pub fn join(limits: Limits) -> Result<Self> {
        limits.check()?;
        if mpi::environment::is_finalized() {
            return Err(Error::Configuration(
                "MPI was finalized in this process and cannot be started again".into(),
            ));
        }
        let universe = mpi::initialize_with_threading(Threading::Funneled).map(|(universe, _)| universe);
        let world = SimpleCommunicator::world();
        let number = |count: Count| {
            u32::try_from(count).map_err(|_| Error::Configuration(format!("MPI reports rank or size {count}")))
        };
        let (rank, size) = (number(world.rank())?, number(world.size())?);
        check_rank(rank, size)?;
        if let Err(error) = everybody_within(&world, Operation::Join, limits.join_timeout) {
            std::mem::forget(universe);
            return Err(error);
        }
        let handles = Some(Handles { ranks: world.duplicate(), _universe: universe });
        Ok(Mpi { rank, size, limits, handles, failed: None })
    }

    fn ranks(&self) -> &SimpleCommunicator {
        &self.handles.as_ref().expect("there until dropped").ranks
    }

    /// Waits for everybody to come to `step`, and gathers what each is about to send, in bytes.
    fn begin(&mut self, step: Operation, bytes: usize) -> Result<Vec<usize>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        everybody_within(self.ranks(), step, self.limits.operation_timeout).map_err(|error| self.fail(error))?;
        let mine = [step as u64, bytes as u64];
        let mut all = vec![0_u64; 2 * self.size as usize];
        self.ranks().all_gather_into(&mine[..], &mut all[..]);
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
        self.failed = Some(error.clone());
        error
    }

    fn gather_bytes(&mut self, step: Operation, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let sizes = self.begin(step, mine.len())?;
        let total = sizes.iter().fold(0_usize, |total, size| total.saturating_add(*size));
        self.limits.check_message(total).map_err(|error| self.fail(error))?;
        let (counts, starts) = layout(&sizes);
        let (mine, mut all) = (backed(mine), backed(&vec![0; total]));
        let (mine, all) = (&mine[..sizes[self.rank as usize]], &mut all[..total]);
        self.ranks().all_gather_varcount_into(mine, &mut PartitionMut::new(all, &counts[..], &starts[..]));
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
        check_count(blobs, self.size)?;
        blobs.iter().try_for_each(|blob| self.limits.check_blob(blob.len()))?;
        let bytes = blobs.iter().map(Vec::len).sum();
        self.limits.check_message(bytes)?;
        let outgoing = backed(&blobs.concat());
        let out_sizes: Vec<usize> = blobs.iter().map(Vec::len).collect();
        self.begin(Operation::Exchange, bytes)?;

        let (out_counts, out_starts) = layout(&out_sizes);
        let mut in_counts = vec![0; self.size as usize];
        self.ranks().all_to_all_into(&out_counts[..], &mut in_counts[..]);
        let in_sizes: Vec<usize> =
            in_counts.iter().map(|count: &Count| usize::try_from(*count).unwrap_or(usize::MAX)).collect();
        let total = in_sizes.iter().fold(0_usize, |total, size| total.saturating_add(*size));
        // Somebody's share may be too large although mine is not: all must give up together.
        let mut totals = vec![0_u64; self.size as usize];
        self.ranks().all_gather_into(&(total as u64), &mut totals[..]);
        for total in totals {
            let total = usize::try_from(total).unwrap_or(usize::MAX);
            self.limits.check_message(total).map_err(|error| self.fail(error))?;
        }
        let (in_counts, in_starts) = layout(&in_sizes);
        let mut incoming = backed(&vec![0; total]);
        self.ranks().all_to_all_varcount_into(
            &Partition::new(&outgoing[..bytes], &out_counts[..], &out_starts[..]),
            &mut PartitionMut::new(&mut incoming[..total], &in_counts[..], &in_starts[..]),
        );
        Ok(split(&incoming[..total], &in_sizes))
    }

    fn barrier(&mut self) -> Result<()> {
        self.begin(Operation::Barrier, 0).map(drop)
    }

    fn sum(&mut self, words: &[u64]) -> Result<Vec<u64>> {
        self.limits.check_message(size_of_val(words))?;
        self.begin(Operation::Sum, size_of_val(words))?;
        // Not MPI_SUM, which wraps around in silence.
        let mut total = vec![0; words.len()];
        let mut all = vec![0_u64; words.len()];
        let mut result = Ok(());
        for root in 0..self.size {
            use mpi::traits::Root;
            if root == self.rank {
                all.copy_from_slice(words);
            }
            self.ranks()
                .process_at_rank(Count::try_from(root).expect("came from a Count"))
                .broadcast_into(&mut all[..]);
            // Even after an overflow all broadcasts take place, on all ranks alike.
            result = result.and_then(|()| add(&mut total, &all));
        }
        result.map_err(|error| self.fail(error))?;
        Ok(total)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if matches!(self.failed, Some(Error::Timeout { .. })) {
            // Freeing and finalizing would wait for ranks that are not coming.
            std::mem::forget(self.handles.take());
        }
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// A barrier that gives up.
fn everybody_within(ranks: &SimpleCommunicator, step: Operation, limit: Duration) -> Result<()> {
    let deadline = Instant::now() + limit;
    let mut request = ranks.immediate_barrier();
    let mut pause = Duration::ZERO;
    loop {
        request = match request.test() {
            Ok(_) => return Ok(()),
            Err(request) => request,
        };
        if Instant::now() >= deadline {
            // A barrier that has begun cannot be called off. It has no buffers, so leaving it behind is sound; the
            // request itself would panic if it were dropped.
            std::mem::forget(request);
            return Err(Error::Timeout { during: step, waited: limit });
        }
        if pause.is_zero() {
            std::thread::yield_now();
        } else {
            std::thread::sleep(pause);
        }
        pause = (pause + Duration::from_micros(10)).min(Duration::from_millis(1));
    }
}

/// The bytes and one more, so that the address is a real one even where there are none: an empty slice may lie at
/// address 1, which OpenMPI takes for `MPI_IN_PLACE`.
fn backed(bytes: &[u8]) -> Vec<u8> {
    [bytes, &[0]].concat()
}

/// Counts and displacements, as MPI wants them. The limits keep both within its integers.
fn layout(sizes: &[usize]) -> (Vec<Count>, Vec<Count>) {
    let count = |bytes: usize| Count::try_from(bytes).expect("MAX_MESSAGE is below 2 GiB");
    let mut start = 0;
    let place = |size: &usize| {
        start += size;
        (count(*size), count(start - size))
    };
    sizes.iter().map(place).unzip()
}

fn split(mut bytes: &[u8], sizes: &[usize]) -> Vec<Vec<u8>> {
    sizes.iter().map(|size| bytes.split_off(..*size).unwrap_or_default().to_vec()).collect()
}
