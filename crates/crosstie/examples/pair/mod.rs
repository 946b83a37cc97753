//! A job of two processes that exchange the addresses of their connections.
#![allow(dead_code, reason = "each example uses a part")]

use std::error::Error;

use crosstie::bootstrap::{self, Bootstrap};
use crosstie::copyrpc::ConnectionAddress;
use zerocopy::{FromBytes, IntoBytes};

/// Joins a job of two processes, as the environment says. Without such an environment it starts the second process itself.
pub(crate) fn join() -> Result<Box<dyn Bootstrap>, Box<dyn Error>> {
    let job = bootstrap::from_env_or_local(2)?;
    if job.size() != 2 {
        return Err("this example needs exactly two processes: start two ranks, or none".into());
    }
    Ok(job)
}

/// Sends bytes to the other process, and returns the bytes that it sends.
pub(crate) fn exchange(job: &mut Box<dyn Bootstrap>, mine: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let other = 1 - job.rank() as usize;
    Ok(job.all_gather(mine)?.swap_remove(other))
}

/// Sends our address to the other process, and returns its address.
pub(crate) fn exchange_addresses(
    job: &mut Box<dyn Bootstrap>,
    mine: &ConnectionAddress,
) -> Result<ConnectionAddress, Box<dyn Error>> {
    let addresses = job.all_gather(mine.as_bytes())?;
    let other = &addresses[1 - job.rank() as usize];
    Ok(ConnectionAddress::read_from_bytes(other).map_err(|_| "the peer's address is of another kind")?)
}
