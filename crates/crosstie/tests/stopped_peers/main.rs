//! Peers that are alive but do not move: a real process is stopped (SIGSTOP, or single-stepped with ptrace) inside an
//! operation. Others go on, memory that the stopped process may still write is not used again, and everything is freed when
//! the process continues or is killed.
//!
//! This program does not use libtest: it starts itself as the peers. One module per role. Arguments name the tests to run;
//! without arguments all run. With `CROSSTIE_REFUSE_PROCESS_VM` only those run that access the memory of another process, and the kernel
//! refuses that.

mod bootstrap;
mod copyrpc;
mod device;
mod local_rpc;
#[path = "../local_service/mod.rs"]
mod local_service;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crosstie_testkit::actor::{self, Fallible};
use crosstie_testkit::rng;
use crosstie_testkit::seccomp;

use rng::Random;

pub(crate) type Test = fn(&mut Random) -> Fallible;

/// Limit on one test: one that hangs fails.
const HANG_LIMIT: Duration = Duration::from_secs(600);

/// Ends the program if a test hangs, and says which one, and where the processes are.
struct Watchdog(Arc<Mutex<(&'static str, Instant)>>);

impl Watchdog {
    fn start() -> Watchdog {
        let running = Arc::new(Mutex::new(("", Instant::now())));
        let watched = Arc::clone(&running);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let (name, begun) = *watched.lock().unwrap_or_else(PoisonError::into_inner);
                if begun.elapsed() > HANG_LIMIT {
                    println!("test {name} ... FAILED: hangs. {}", actor::describe_processes());
                    std::process::exit(1);
                }
            }
        });
        Watchdog(running)
    }

    fn begin(&self, name: &'static str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (name, Instant::now());
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["peer", ..] => return device::run_peer(&args[1..]).expect("peer"),
        ["target"] => return device::run_target().expect("target"),
        ["client", service, name, task, mode] => {
            return local_rpc::run_client(service, name, task, mode == "measure").expect("client");
        }
        ["server", service, name, task, mode] => {
            return local_rpc::run_server(service, name, task, mode == "measure").expect("server");
        }
        ["rank", address, mode, millis] => {
            let timeout = Duration::from_millis(millis.parse().expect("milliseconds"));
            return bootstrap::run(address, mode == "measure", timeout).expect("rank");
        }
        ["copyrpc", task, mode] => return copyrpc::run(task, mode == "measure").expect("copyrpc peer"),
        _ => {}
    }
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let is_refused = seccomp::is_process_vm_refused();
    if is_refused {
        // Before any thread is started.
        seccomp::refuse_process_vm();
    }
    let watchdog = Watchdog::start();
    let (mut passed, mut failed) = (0, 0);
    let mut random = Random(rng::seed());
    for (name, test) in
        device::TESTS.iter().chain(local_rpc::TESTS).chain(copyrpc::TESTS).chain(bootstrap::TESTS)
    {
        if !names.is_empty() && !names.iter().any(|wanted| name.contains(wanted.as_str())) {
            continue;
        }
        if is_refused && !device::WITH_MEMORY_IN_PLACE.contains(name) {
            continue;
        }
        watchdog.begin(name);
        let begun = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| test(&mut random)));
        match outcome.unwrap_or_else(|_| Err("it panicked; the message is above".into())) {
            Ok(()) => {
                passed += 1;
                println!("test {name} ... ok ({:.1} s)", begun.elapsed().as_secs_f32());
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
