//! Prints a line from every rank of a job. The same program works with every way to start a job:
//!
//! ```text
//! bootstrap_hello            the program starts 4 ranks itself
//! bootstrap_hello 8          ... or 8 of them
//! CROSSTIE_RANK=0 CROSSTIE_SIZE=2 CROSSTIE_RENDEZVOUS=host:4000 CROSSTIE_SECRET_FILE=secret bootstrap_hello
//! mpirun -n 2 -x CROSSTIE_RENDEZVOUS=host:4000 -x CROSSTIE_SECRET_FILE=secret bootstrap_hello
//! mpirun -n 2 bootstrap_hello     (built with --features mpi)
//! ```

use std::process::ExitCode;

use crosstie::bootstrap::{self, Error};

fn main() -> ExitCode {
    let ranks = match std::env::args().nth(1).map(|ranks| ranks.parse()) {
        None => 4,
        Some(Ok(ranks)) => ranks,
        Some(Err(_)) => {
            eprintln!("usage: bootstrap_hello [RANKS]");
            return ExitCode::from(2);
        }
    };
    match hello(ranks) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bootstrap_hello: {error}");
            ExitCode::FAILURE
        }
    }
}

fn hello(ranks: u32) -> Result<(), Error> {
    let mut job = bootstrap::from_env_or_local(ranks)?;
    let sum = job.sum(&[u64::from(job.rank())])?;
    let processes = job.all_gather(&std::process::id().to_le_bytes())?;
    println!(
        "rank {} of {}: the ranks add up to {}, {} processes",
        job.rank(),
        job.size(),
        sum[0],
        processes.len()
    );
    job.finish()
}
