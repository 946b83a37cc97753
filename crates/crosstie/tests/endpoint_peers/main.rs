//! Endpoints on a device: every operation ends once, with the right bytes, and a buffer that has come back is not written any more.
//! [`harness`] explains the command line. The seed is printed; `CROSSTIE_SEED` sets it.

mod cases;
#[path = "../harness/mod.rs"]
mod harness;
mod quiescence;
mod test_peer;

use std::process::ExitCode;
use std::time::Duration;

use crosstie_testkit::rng;

use harness::{Run, Suite};

fn main() -> ExitCode {
    let suite = Suite {
        name: "endpoint_peers",
        cases: cases::CASES.to_vec(),
        timeout: Duration::from_secs(120),
        port: 7080,
        seed: Some(rng::choose_seed()),
        skip_reason: |_, _| None,
        only_extra_runs: false,
        extra_runs: |setup| vec![Run::wrapped(setup)],
    };
    suite.main()
}
