//! The device contract in executable form: one suite for every provider. See [`harness`] for how to call it.
//!
//! Cases with two devices use both, also without `--across`. If nothing is asked for, the suite runs besides on wrapped
//! devices, and once more what concerns memory registered in place, with `process_vm_readv` and `process_vm_writev`
//! refused.

mod cases;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../seccomp/mod.rs"]
mod seccomp;
mod side;

use std::process::ExitCode;
use std::time::Duration;

use cases::UNSUPPORTED;
use harness::{Handicap, Run, Stage, Suite};
use side::{Side, provider};

fn main() -> ExitCode {
    let suite = Suite::<Side> {
        name: "conformance",
        cases: cases::all().collect(),
        hang: Duration::from_secs(60),
        port: 7077,
        seed: None,
        excuse: |case, stage| {
            let unsupported = UNSUPPORTED.iter().find(|u| u.case == case && u.provider == provider(stage));
            unsupported.map(|u| u.reason)
        },
        besides: |stage| {
            let wrapped = Stage { wrapped: true, ..stage.clone() };
            let wrapped = Run { stage: wrapped, processes: false, handicap: None };
            // The last: what it forbids stays forbidden.
            vec![wrapped, Run { stage: stage.clone(), processes: true, handicap: Some(BY_PROXY) }]
        },
    };
    match UNSUPPORTED.iter().find(|u| suite.cases.iter().all(|c| c.name != u.case)) {
        Some(unknown) => {
            suite.misused(&format!("{} is listed as unsupported, but there is no such case", unknown.case))
        }
        None => suite.main(),
    }
}

/// The kernel refuses to let one process at another's memory, so that the owner has to copy.
const BY_PROXY: Handicap = Handicap {
    what: "process_vm_readv and process_vm_writev refused",
    impose: || {
        let calls = [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev];
        seccomp::filter(&calls, seccomp::Verdict::RefuseThese);
    },
    cases: "in_place",
};
