//! A job of two processes, whose endpoints learn of each other.

use std::error::Error;

use crosstie::bootstrap::{self, Bootstrap};
use crosstie::copyrpc::EndpointAddress;
use zerocopy::{FromBytes, IntoBytes};

/// This process's part in a job of two: as the environment says, or else it starts the other one itself.
pub(crate) fn join() -> Result<Box<dyn Bootstrap>, Box<dyn Error>> {
    let job = bootstrap::from_env_or_local(2)?;
    if job.size() != 2 {
        return Err("it takes two".into());
    }
    Ok(job)
}

/// The other's address, for this one's.
pub(crate) fn swap(
    job: &mut Box<dyn Bootstrap>,
    mine: &EndpointAddress,
) -> Result<EndpointAddress, Box<dyn Error>> {
    let addresses = job.all_gather(mine.as_bytes())?;
    let other = &addresses[1 - job.rank() as usize];
    Ok(EndpointAddress::read_from_bytes(other).map_err(|_| "the peer's address is of another kind")?)
}
