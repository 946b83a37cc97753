//! The budget of copyrpc's data path, exactly: no allocation and no system call per call, and a call that costs the same
//! however many endpoints its context has.
//!
//! Both sides run in one thread, which polls them in turn, so counts are the same in every run. Allocations are counted by
//! the allocator of this test; system calls are forbidden by a seccomp filter in a child process, which the first one
//! kills; instructions are counted by callgrind (Debian package `valgrind`), also in a child.

#[path = "allocations/mod.rs"]
mod allocations;
#[path = "seccomp/mod.rs"]
mod seccomp;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use allocations::ALLOCATIONS;
use crosstie::copyrpc::{Config, Context, Endpoint, EndpointConfig};
use crosstie::device::{Access, ConnectConfig, Device, Mr, RemoteMemory, software};

/// Says to a child of this test what it is for.
const CHILD: &str = "CROSSTIE_COPYRPC_BUDGET_CHILD";

/// Two contexts and what connects them.
struct Pair {
    client: Context<u32>,
    server: Context<u32>,
    here: Vec<Endpoint<u32>>,
    #[expect(dead_code, reason = "keeps the connections open")]
    there: Vec<Endpoint<u32>>,
}

impl Pair {
    fn new(endpoints: usize, ring: usize) -> Pair {
        Pair::with_bulk(endpoints, ring, 0)
    }

    fn with_bulk(endpoints: usize, ring: usize, bulk: usize) -> Pair {
        // Valgrind has little address space to give.
        let device = || Device::open_software(&software::Config { space: 512 << 20 }).unwrap();
        let client = Context::new(device(), &Config::default()).unwrap();
        let server = Context::new(device(), &Config::default()).unwrap();
        let config = EndpointConfig { ring, credit: ring / 4, pending_calls: DEPTH, bulk };
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for _ in 0..endpoints {
            let (near, far) =
                (client.create_endpoint(&config).unwrap(), server.create_endpoint(&config).unwrap());
            near.connect(&far.address(), &ConnectConfig::default()).unwrap();
            far.connect(&near.address(), &ConnectConfig::default()).unwrap();
            here.push(near);
            there.push(far);
        }
        Pair { client, server, here, there }
    }

    /// `rounds` times: `depth` calls spread over the endpoints, and their answers.
    fn exchange(&self, rounds: u32, depth: usize) {
        let mut buffer = [0; 64];
        for round in 0..rounds {
            for call in 0..depth {
                let endpoint = &self.here[call % self.here.len()];
                assert!(endpoint.call(&[7; 32], 32, round).is_ok());
            }
            let mut answered = 0;
            while answered < depth {
                answered += self.client.poll(|attached, answer| {
                    assert!(attached == round && answer.is_ok_and(|bytes| bytes.len() == 32));
                });
                self.server.poll(|_, _| ());
                while let Some(request) = self.server.recv() {
                    let len = request.data().copy_to(&mut buffer);
                    assert!(request.reply(&buffer[..len]).is_ok());
                }
            }
        }
    }
}

#[test]
fn no_call_allocates() {
    for (endpoints, depth) in [(1, 1), (1, 64), (1, 300), (16, 256)] {
        let pair = Pair::new(endpoints, 1 << 18);
        pair.exchange(2_000, depth);
        let before = ALLOCATIONS.get();
        pair.exchange(2_000, depth);
        let count = ALLOCATIONS.get() - before;
        assert_eq!(count, 0, "calls to the allocator, {endpoints} endpoints, depth {depth}");
    }
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get() - before, 2, "the allocator counts");
}

/// Long requests with long answers, two at a time, and READs in between, with regions that are used again.
fn exchange_bulk(pair: &Pair, rounds: u32, buffer: &mut [u8], regions: &mut Vec<Mr>, board: RemoteMemory) {
    let endpoint = &pair.here[0];
    for round in 0..rounds {
        for _ in 0..2 {
            assert!(endpoint.call(&LONG_REQUEST, LONG_REQUEST.len(), round).is_ok());
        }
        while let Some(region) = regions.pop() {
            assert!(endpoint.read(region, 0..4096, board.at(0), 0).is_ok());
        }
        let mut answered = 0;
        while answered < 2 || regions.len() < 4 {
            answered += pair.client.poll(|attached, answer| {
                assert!(attached == round && answer.is_ok_and(|bytes| bytes.len() == LONG_REQUEST.len()));
            });
            while let Some(finished) = pair.client.take_finished() {
                regions.push(finished.region);
            }
            pair.server.poll(|_, _| ());
            while let Some(request) = pair.server.recv() {
                let len = request.data().copy_to(buffer);
                assert!(request.reply(&buffer[..len]).is_ok());
            }
        }
    }
}

static LONG_REQUEST: [u8; 700_000] = [7; 700_000];

#[test]
fn no_bulk_call_allocates() {
    let pair = Pair::with_bulk(1, 1 << 14, 4 << 20);
    let mut buffer = vec![0; LONG_REQUEST.len()];
    let board = pair.server.allocate(4096, Access::ALL).unwrap();
    let mut regions: Vec<Mr> =
        (0..4).map(|_| pair.client.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
    exchange_bulk(&pair, 20, &mut buffer, &mut regions, board.remote());
    let before = ALLOCATIONS.get();
    exchange_bulk(&pair, 100, &mut buffer, &mut regions, board.remote());
    assert_eq!(ALLOCATIONS.get() - before, 0, "calls to the allocator");
    assert_eq!(pair.client.counters().bulk_calls, 240);
}

#[test]
fn no_call_makes_a_system_call() {
    const NAME: &str = "no_call_makes_a_system_call";
    if let Ok(task) = std::env::var(CHILD) {
        let pair = Pair::with_bulk(4, 1 << 16, 4 << 20);
        pair.exchange(2_000, 64);
        let mut buffer = vec![0; LONG_REQUEST.len()];
        let board = pair.server.allocate(4096, Access::ALL).unwrap();
        let mut regions: Vec<Mr> =
            (0..4).map(|_| pair.client.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
        exchange_bulk(&pair, 20, &mut buffer, &mut regions, board.remote());
        seccomp::filter(&[libc::SYS_exit_group], seccomp::Verdict::OnlyThese);
        if task == "guilty" {
            std::hint::black_box(std::process::id());
        }
        for depth in [1, 8, 64, 200] {
            pair.exchange(5_000, depth);
        }
        exchange_bulk(&pair, 50, &mut buffer, &mut regions, board.remote());
        // SAFETY: no memory is involved.
        unsafe { libc::_exit(0) }
    }
    let innocent = child(&mut Command::new(std::env::current_exe().unwrap()), NAME, "calls");
    assert!(innocent.status.success(), "a call made a system call, or failed: {innocent:?}");
    let guilty = child(&mut Command::new(std::env::current_exe().unwrap()), NAME, "guilty");
    assert_eq!(guilty.status.signal(), Some(libc::SIGSYS), "the filter kills: {guilty:?}");
}

/// Calls in flight, over all endpoints together: 16 for each of 512, so that batches are batches with any number.
const DEPTH: usize = 8192;
const ROUNDS: u32 = 3;

#[test]
fn a_call_costs_the_same_with_any_number_of_endpoints() {
    const NAME: &str = "a_call_costs_the_same_with_any_number_of_endpoints";
    if let Ok(task) = std::env::var(CHILD) {
        let endpoints = task.parse().unwrap();
        let pair = Pair::new(endpoints, (DEPTH / endpoints * 1024).max(4096));
        pair.exchange(1, DEPTH);
        crosstie_budget_exchange(&pair);
        return;
    }
    let counts = [1, 8, 64, 512].map(|endpoints| {
        let mut callgrind = Command::new("valgrind");
        callgrind
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg("--toggle-collect=crosstie_budget_exchange")
            .arg(std::env::current_exe().unwrap());
        let output = child(&mut callgrind, NAME, &endpoints.to_string());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{endpoints} endpoints: {output:?}");
        let collected = text.lines().find_map(|line| line.split_once("Collected : "));
        let count: u64 = collected.and_then(|(_, count)| count.trim().parse().ok()).expect(&text);
        let each = count as f64 / f64::from(ROUNDS) / DEPTH as f64;
        println!("{endpoints} endpoints, depth {DEPTH} in all: {each:.0} instructions per call, both sides");
        each
    });
    let most = counts.iter().copied().fold(0.0, f64::max);
    assert!(most <= 1.3 * counts[0], "instructions per call: {counts:?}");
}

/// Under this name callgrind finds what to count.
#[unsafe(no_mangle)]
#[inline(never)]
fn crosstie_budget_exchange(pair: &Pair) {
    pair.exchange(ROUNDS, DEPTH);
}

/// Runs a command that starts one test of this program again, for a task.
fn child(command: &mut Command, test: &str, task: &str) -> Output {
    let program = command.get_program().to_owned();
    let started =
        command.args([test, "--exact", "--nocapture"]).env(CHILD, task).stdin(Stdio::null()).output();
    match started {
        Err(error) if program == "valgrind" => {
            panic!("valgrind cannot be started ({error}): install the Debian package `valgrind`")
        }
        started => started.unwrap(),
    }
}
