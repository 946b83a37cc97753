//! Drives the plugin as NCCL does: through the tables of functions of the shared library, in one process and between two.
//!
//! Without arguments all cases run; an argument selects those whose name contains it. `--list` lists them. `--devices=SPEC` runs
//! those that can run on any device on these devices, for example `verbs:r0+verbs:r1`. The library is the one that cargo
//! built; `CROSSTIE_NCCL_LIBRARY` names another.

mod arguments;
mod failing_rails;
mod lifecycle;
mod net;
mod pair;
mod peers;
mod rails;
mod traffic;
mod transfers;

use std::panic::catch_unwind;
use std::process::ExitCode;

use crosstie_testkit::rng;

type Case = (&'static str, fn());

/// The cases of a module: functions of these names.
macro_rules! cases {
    ($($name:ident,)*) => {
        pub(crate) const CASES: &[$crate::Case] = &[$((stringify!($name), $name)),*];
    };
}
use cases;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, role, rest @ ..] = arguments.as_slice()
        && flag == "--child"
    {
        match role.as_str() {
            "traffic" => traffic::run_child(rest),
            _ => rails::run_child(role, rest),
        }
        return ExitCode::SUCCESS;
    }
    let devices = arguments.iter().find_map(|argument| argument.strip_prefix("--devices="));
    let cases: Vec<Case> = if let Some(devices) = devices {
        // SAFETY: this is the only thread.
        unsafe { std::env::set_var("CROSSTIE_NCCL_DEVICES", devices) };
        [transfers::CASES, lifecycle::CASES, peers::CASES].concat()
    } else {
        let devices = [rails::CASES, failing_rails::CASES].concat();
        [arguments::CASES, transfers::CASES, lifecycle::CASES, peers::CASES, &devices].concat()
    };
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let (mut passed, mut failed) = (0, 0);
    for (name, case) in cases {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
            continue;
        }
        if arguments.iter().any(|argument| argument == "--list") {
            println!("{name}: test");
            continue;
        }
        println!("test {name} ...");
        match catch_unwind(case) {
            Ok(()) => passed += 1,
            Err(_) => {
                println!("test {name} FAILED; the last lines of the plugin's log:");
                let log = net::log();
                log.iter().rev().take(12).rev().for_each(|line| println!("  {line}"));
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}
