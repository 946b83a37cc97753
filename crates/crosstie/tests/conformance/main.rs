//! The device contract in executable form: one suite for every provider. See [`harness`] for how to call it.
//!
//! Cases with two devices use both, also without `--across`. By default the suite also runs on devices that are wrapped in a
//! fault device, and runs the cases for memory registered in place once more with `process_vm_readv` and
//! `process_vm_writev` forbidden. With `CROSSTIE_REFUSE_PROCESS_VM` all cases run in that way, once, and all their regions are memory in
//! place: every operation goes through the peer's service thread.

mod cases;
#[path = "../harness/mod.rs"]
mod harness;
mod participant;

use std::process::ExitCode;
use std::time::Duration;

use crosstie_testkit::seccomp;

use cases::UNSUPPORTED;
use harness::{Restriction, Run, Suite};
use participant::{Participant, provider};

fn main() -> ExitCode {
    let suite = Suite::<Participant> {
        name: "conformance",
        cases: cases::all().collect(),
        only_extra_runs: seccomp::is_process_vm_refused(),
        timeout: Duration::from_secs(60),
        port: 7077,
        seed: None,
        skip_reason: |case, setup| {
            let unsupported = UNSUPPORTED.iter().find(|u| u.case == case && u.provider == provider(setup));
            unsupported.map(|u| u.reason)
        },
        extra_runs: |setup| {
            let by_proxy = |cases| Run {
                setup: setup.clone(),
                processes: true,
                restriction: Some(Restriction { cases, ..BY_PROXY }),
            };
            if seccomp::is_process_vm_refused() {
                return vec![by_proxy("")];
            }
            // The second run is the last one, because its restriction cannot be lifted.
            vec![Run::wrapped(setup), by_proxy(BY_PROXY.cases)]
        },
    };
    match UNSUPPORTED.iter().find(|u| suite.cases.iter().all(|c| c.name != u.case)) {
        Some(unknown) => suite
            .usage_error(&format!("{} is listed as unsupported, but there is no such case", unknown.case)),
        None => suite.main(),
    }
}

/// The kernel forbids access to another process's memory, so that the owner's service thread has to copy.
const BY_PROXY: Restriction = Restriction {
    what: "process_vm_readv and process_vm_writev refused",
    apply: seccomp::refuse_process_vm,
    cases: "in_place",
};
