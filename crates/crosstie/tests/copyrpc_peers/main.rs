//! copyrpc on a device: every call ends exactly once, with the right bytes, for all sizes and orders. [`harness`] explains the
//! command line. The seed is printed; `CROSSTIE_SEED` sets it.

mod bulk;
mod cases;
mod failed_calls;
#[path = "../harness/mod.rs"]
mod harness;
mod load;
mod test_peer;

use std::process::ExitCode;
use std::time::Duration;

use crosstie_testkit::rng;

use harness::{Run, Suite};

fn main() -> ExitCode {
    let suite = Suite {
        name: "copyrpc",
        cases: cases::CASES.to_vec(),
        timeout: Duration::from_secs(120),
        port: 7078,
        seed: Some(rng::choose_seed()),
        skip_reason: |_, _| None,
        only_extra_runs: false,
        extra_runs: |setup| vec![Run::wrapped(setup)],
    };
    suite.main()
}
