//! copyrpc on a device: every call ends once, with the right bytes, whatever the sizes and the order. See [`harness`] for
//! how to call it. The seed is printed; `CROSSTIE_SEED` sets it.

mod bulk;
mod cases;
#[path = "../chance/mod.rs"]
mod chance;
mod failed_calls;
#[path = "../harness/mod.rs"]
mod harness;
mod load;
mod side;

use std::process::ExitCode;
use std::time::Duration;

use harness::Suite;

fn main() -> ExitCode {
    let suite = Suite {
        name: "copyrpc",
        cases: cases::CASES.to_vec(),
        hang: Duration::from_secs(120),
        port: 7078,
        seed: Some(chance::draw()),
        excuse: |_, _| None,
        besides: |_| Vec::new(),
    };
    suite.main()
}
