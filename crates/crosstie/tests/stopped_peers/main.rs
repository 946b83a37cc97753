//! Peers that are alive but do not move: a real process is stopped (SIGSTOP, or single-stepped with ptrace) inside an
//! operation. Others go on, memory that the stopped process may still write is not used again, and everything is freed when
//! the process continues or is killed.
//!
//! This program does not use libtest: it starts itself as the peers. One module per role. Arguments name the tests to run;
//! without arguments all run.

mod device;
#[path = "../killing/mod.rs"]
mod killing;

use std::time::Duration;

pub(crate) type Fallible<T = ()> = Result<T, Box<dyn std::error::Error>>;

pub(crate) type Test = fn() -> Fallible;

/// Limit on anything that should happen, and no measure of how fast it is.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Limit on the whole program: a test that hangs fails.
const HANG_LIMIT: Duration = Duration::from_secs(600);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().map(String::as_str) == Some("peer") {
        device::run_peer(&args[1..]).expect("peer");
        return;
    }
    std::thread::spawn(|| {
        std::thread::sleep(HANG_LIMIT);
        println!("FAILED: hangs");
        std::process::exit(1);
    });
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in device::TESTS {
        if !names.is_empty() && !names.iter().any(|wanted| name.contains(wanted.as_str())) {
            continue;
        }
        match test() {
            Ok(()) => {
                passed += 1;
                println!("test {name} ... ok");
            }
            Err(e) => {
                failed += 1;
                println!("test {name} ... FAILED: {e}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    std::process::exit(i32::from(failed > 0));
}
