//! The device contract in executable form: one suite for every provider. See [`harness`] for how to call it.
//!
//! Cases with two devices use both, also without `--across`. By default the suite also runs on devices that are wrapped in a
//! fault device, and runs the cases for memory registered in place once more with `process_vm_readv` and
//! `process_vm_writev` forbidden.

mod cases;
#[path = "../harness/mod.rs"]
mod harness;
mod participant;
#[path = "../seccomp/mod.rs"]
mod seccomp;

use std::process::ExitCode;
use std::time::Duration;

use cases::UNSUPPORTED;
use harness::{Restriction, Run, Suite};
use participant::{Participant, provider};

fn main() -> ExitCode {
    let suite = Suite::<Participant> {
        name: "conformance",
        cases: cases::all().collect(),
        timeout: Duration::from_secs(60),
        port: 7077,
        seed: None,
        skip_reason: |case, setup| {
            let unsupported = UNSUPPORTED.iter().find(|u| u.case == case && u.provider == provider(setup));
            unsupported.map(|u| u.reason)
        },
        extra_runs: |setup| {
            // The second run is the last one, because its restriction cannot be lifted.
            vec![
                Run::wrapped(setup),
                Run { setup: setup.clone(), processes: true, restriction: Some(BY_PROXY) },
            ]
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
    apply: || {
        let calls = [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev];
        seccomp::install_filter(&calls, seccomp::FilterMode::Deny);
    },
    cases: "in_place",
};
