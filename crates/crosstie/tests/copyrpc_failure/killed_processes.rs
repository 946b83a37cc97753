//! Processes that are killed in the middle of calls.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crosstie::copyrpc::EndpointAddress;
use crosstie::device::ConnectConfig;
use zerocopy::{FromBytes, IntoBytes};

use crate::rng::{Random, seed};
use crate::test_peer::{TIMEOUT, TestPeer, Workload, exercise, finish_open_calls, sides};

/// Environment variable that makes a process of this test the one that is killed.
const CHILD: &str = "CROSSTIE_COPYRPC_VICTIM";

#[test]
fn killed_process_does_not_affect_other_connections() {
    let name = "killed_processes::killed_process_does_not_affect_other_connections";
    killed(Workload::Small, name, 60, Duration::from_millis(20), 50);
}

#[test]
fn killed_process_with_bulk_calls_leaks_nothing() {
    let name = "killed_processes::killed_process_with_bulk_calls_leaks_nothing";
    killed(Workload::Bulk, name, 20, Duration::from_millis(30), 20);
}

/// Starts and kills a process `kills` times, each after up to `delay`. Three of four answer at least `answers` calls first.
fn killed(workload: Workload, test: &str, kills: u32, delay: Duration, answers: u64) {
    if std::env::var(CHILD).is_ok() {
        victim(workload);
    }
    let mut random = Random(seed());
    // The survivor: a context with one permanent connection, and one to the process that is killed next.
    let (mut left, mut right) = sides(workload);
    let mut slowest = Duration::ZERO;
    for kill in 0..kills {
        let mut child = start_victim(&mut left, test, CHILD);
        let begin = Instant::now();
        let delay = Duration::from_micros(random.below(delay.as_micros() as u64));
        // Some are killed before their first response, some under load.
        let wanted = left.answered + if kill % 4 == 0 { 0 } else { answers };
        while begin.elapsed() < delay || left.answered < wanted {
            left.call(workload.depth());
            left.turn();
            right.turn();
            assert!(begin.elapsed() < TIMEOUT, "kill {kill}: the victim never answered");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let begin = Instant::now();
        while left.endpoints[1].failure().is_none() {
            left.call(workload.depth());
            left.turn();
            right.turn();
            assert!(begin.elapsed() < TIMEOUT, "kill {kill}: the dead peer was not detected");
        }
        slowest = slowest.max(begin.elapsed());
        finish_open_calls(&mut left, &mut right, "after a kill");
        assert!(left.failed.iter().all(|((index, _), _)| *index == 1), "{:?}", left.failed);
        left.failed.clear();
        drop(left.endpoints.pop());
        exercise(&mut left, &mut right, 6 * workload.depth() as u64, "the steady connection");
    }
    println!(
        "{kills} kills; slowest from SIGKILL to the end of all calls: {slowest:?}; {:?}",
        left.context.counters()
    );
    assert_eq!(left.context.counters().failures, u64::from(kills));
}

/// A process that calls and answers until it is killed.
fn victim(workload: Workload) -> ! {
    let mut side = TestPeer::software(workload);
    let endpoint = side.context.create_endpoint(&side.workload.config()).unwrap();
    endpoint.connect(&exchange_addresses(endpoint.address()), &ConnectConfig::default()).unwrap();
    side.endpoints.push(endpoint);
    loop {
        side.call(workload.depth());
        side.turn();
    }
}

/// Reads the address of the parent's endpoint, and writes the address of this process's endpoint.
pub(crate) fn exchange_addresses(own: EndpointAddress) -> EndpointAddress {
    let mut theirs = [0; size_of::<EndpointAddress>()];
    std::io::stdin().read_exact(&mut theirs).unwrap();
    let hex: String = own.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    // The test harness writes to the same output.
    println!("\naddress {hex}");
    std::io::stdout().flush().unwrap();
    EndpointAddress::read_from_bytes(&theirs).unwrap()
}

/// Starts `test` of this program again with the environment variable `role`, and connects a new endpoint of `side` to it.
pub(crate) fn start_victim(side: &mut TestPeer, test: &str, role: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(role, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let endpoint = side.context.create_endpoint(&side.workload.config()).unwrap();
    child.stdin.take().unwrap().write_all(endpoint.address().as_bytes()).unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let line =
        output.lines().map(Result::unwrap).find_map(|line| Some(line.strip_prefix("address ")?.to_owned()));
    let hex = line.expect("an address");
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
    endpoint.connect(&EndpointAddress::read_from_bytes(&bytes).unwrap(), &ConnectConfig::default()).unwrap();
    side.endpoints.push(endpoint);
    child
}
