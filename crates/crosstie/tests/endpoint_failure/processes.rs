//! Peers that are processes: killed, stopped, and started again.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crosstie::device::RemoteMemory;
use crosstie::endpoint::{
    Buffer, Cause, Endpoint, EndpointAddress, EndpointConfig, OperationFuture, Progress,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::pair::{HANG, device, endpoint, filled, pattern};
use crate::rng::{Random, seed};

/// Environment variable that makes a process of this test the peer.
const CHILD: &str = "CROSSTIE_ENDPOINT_PEER";
const BYTES: usize = 64 << 10;

fn config() -> EndpointConfig {
    EndpointConfig {
        qps: 2,
        min_part: 8192,
        progress: Progress::Thread,
        deadline: None,
        imm_window: 8,
        messages: 8,
        ..EndpointConfig::default()
    }
}

struct PeerProcess {
    child: Child,
    memory: RemoteMemory,
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl PeerProcess {
    /// Starts `test` of this program again as the peer, and connects.
    fn start(endpoint: &Endpoint, test: &str) -> PeerProcess {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let address = endpoint.address().to_bytes();
        let mut input = child.stdin.take().unwrap();
        input.write_all(&(address.len() as u32).to_le_bytes()).unwrap();
        input.write_all(&address).unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let line = output
            .lines()
            .map(Result::unwrap)
            .find_map(|line| Some(line.strip_prefix("address ")?.to_owned()));
        let hex = line.expect("an address");
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let (memory, address) = bytes.split_at(size_of::<RemoteMemory>());
        endpoint.connect(&EndpointAddress::from_bytes(address).unwrap()).unwrap();
        // The peer is connected when its standard input ends.
        drop(input);
        PeerProcess { child, memory: RemoteMemory::read_from_bytes(memory).unwrap() }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

/// The peer: sends messages, receives messages, and takes immediates, until it is killed.
fn run_peer() -> ! {
    let mut input = std::io::stdin();
    let mut len = [0; 4];
    input.read_exact(&mut len).unwrap();
    let mut address = vec![0; u32::from_le_bytes(len) as usize];
    input.read_exact(&mut address).unwrap();
    let endpoint = endpoint(&device(), &config());
    let memory = endpoint.allocate(1 << 20).unwrap();
    endpoint.connect(&EndpointAddress::from_bytes(&address).unwrap()).unwrap();
    let mut bytes = memory.remote().as_bytes().to_vec();
    bytes.extend(endpoint.address().to_bytes());
    println!("\naddress {}", bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    std::io::stdout().flush().unwrap();
    let mut rest = Vec::new();
    input.read_to_end(&mut rest).unwrap();
    let mut number = 0u8;
    // A parent that has ended ends its children, too.
    while endpoint.ended().is_none() {
        let Ok(send) = endpoint.send(filled(&endpoint, BYTES, number), ..) else { break };
        let Ok(recv) = endpoint.recv(endpoint.allocate(BYTES).unwrap(), ..) else { break };
        let Ok(imm) = endpoint.imm_recv() else { break };
        if send.wait().is_err() || recv.wait().is_err() || imm.wait().is_err() {
            break;
        }
        number = number.wrapping_add(1);
    }
    std::process::exit(0)
}

/// One exchange with the peer.
struct Exchange {
    transfers: Vec<OperationFuture<Buffer>>,
}

fn exchange(endpoint: &Endpoint, memory: &RemoteMemory) -> Option<Exchange> {
    let submit = endpoint.within(HANG);
    let transfers = vec![
        submit.recv(endpoint.allocate(BYTES).ok()?, ..).ok()?,
        submit.send(filled(endpoint, BYTES, 1), ..).ok()?,
        submit.write(filled(endpoint, BYTES, 2), .., memory, 0).ok()?,
        submit.write_imm(filled(endpoint, 100, 3), .., memory, 1 << 18, 7).ok()?,
        submit.read(endpoint.allocate(BYTES).ok()?, .., memory, 1 << 19).ok()?,
    ];
    Some(Exchange { transfers })
}

/// Kills the peer at a random instant, and starts it again. Every operation ends with a cause, every buffer comes back, and the new
/// peer is reached without restarting this side.
#[test]
fn killed_peer_ends_every_operation_and_is_reached_again_after_a_restart() {
    const NAME: &str = "processes::killed_peer_ends_every_operation_and_is_reached_again_after_a_restart";
    if std::env::var(CHILD).is_ok() {
        run_peer();
    }
    let restarts = std::env::var("CROSSTIE_STRESS_SECONDS").map_or(25, |_| 100);
    let mut random = Random(seed());
    let endpoint = endpoint(&device(), &config());
    let (mut slowest_end, mut slowest_start, mut completed, mut failed_count) =
        (Duration::ZERO, Duration::ZERO, 0, 0);
    for restart in 0..restarts {
        let begin = Instant::now();
        let mut peer = PeerProcess::start(&endpoint, NAME);
        let first = exchange(&endpoint, &peer.memory).expect("connected");
        for transfer in first.transfers {
            transfer.wait().unwrap_or_else(|failed| panic!("restart {restart}: {failed}"));
        }
        slowest_start = slowest_start.max(begin.elapsed());
        let delay = Duration::from_micros(random.below(5000));
        let begin = Instant::now();
        let mut pending = Vec::new();
        while begin.elapsed() < delay {
            let Some(exchange) = exchange(&endpoint, &peer.memory) else { break };
            pending.extend(exchange.transfers);
            if pending.len() > 40 {
                pending.remove(0).wait().ok();
            }
        }
        // The last messages wait for a peer that will not answer.
        peer.signal(libc::SIGSTOP);
        let last = exchange(&endpoint, &peer.memory);
        pending.extend(last.into_iter().flat_map(|exchange| exchange.transfers));
        peer.child.kill().unwrap();
        peer.child.wait().unwrap();
        let begin = Instant::now();
        for future in pending {
            match future.wait() {
                Ok(_) => completed += 1,
                Err(failed) => {
                    assert!(matches!(failed.cause, Cause::RemoteGone(_) | Cause::Flushed), "{failed}");
                    assert!(failed.cause.is_retryable() && failed.peer.is_some());
                    failed_count += 1;
                    failed.buffer.wait_for(HANG).expect("the buffer of a dead peer comes back");
                }
            }
        }
        slowest_end = slowest_end.max(begin.elapsed());
        let has_ended = endpoint.ended().is_some();
        let send = endpoint.send(filled(&endpoint, 8, 0), ..).map(drop);
        assert!(send.is_err() || !has_ended, "nothing is started after the end");
        endpoint.reopen().unwrap();
        let begin = Instant::now();
        while endpoint.counters().leased_slots > 0 || endpoint.counters().held_operations > 0 {
            assert!(begin.elapsed() < HANG, "{:?}", endpoint.counters());
            std::thread::yield_now();
        }
    }
    assert!(failed_count > 0);
    println!(
        "{restarts} restarts: {completed} operations completed, {failed_count} failed; slowest from SIGKILL to the end of all: \
         {slowest_end:?}; slowest from start of a process to the end of an exchange: {slowest_start:?}"
    );
}

/// While the peer is stopped, operations end at their deadline; one-sided ones need no peer. When it goes on, so does everything.
#[test]
fn stopped_peer_keeps_no_operation_beyond_its_deadline() {
    const NAME: &str = "processes::stopped_peer_keeps_no_operation_beyond_its_deadline";
    if std::env::var(CHILD).is_ok() {
        run_peer();
    }
    let endpoint = endpoint(&device(), &config());
    let peer = PeerProcess::start(&endpoint, NAME);
    for future in exchange(&endpoint, &peer.memory).unwrap().transfers {
        future.wait().unwrap();
    }
    peer.signal(libc::SIGSTOP);
    // Let the stop take effect: a stopped process shows as state T.
    let stat = format!("/proc/{}/stat", peer.child.id());
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        std::thread::yield_now();
    }
    let deadline = Duration::from_millis(300);
    let begin = Instant::now();
    let soon = endpoint.within(deadline);
    // The peer had one buffer announced, and one message under way, so the second of each waits.
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push(soon.recv(endpoint.allocate(BYTES).unwrap(), ..).unwrap());
        waiting.push(soon.send(filled(&endpoint, BYTES, 1), ..).unwrap());
        waiting.push(soon.write_imm(filled(&endpoint, 100, 3), .., &peer.memory, 1 << 18, 7).unwrap());
    }
    let one_sided = endpoint.within(HANG).write(filled(&endpoint, BYTES, 9), .., &peer.memory, 0).unwrap();
    assert!(one_sided.wait().is_ok(), "a WRITE needs no CPU of the peer");
    let (mut timed_out, mut kept) = (0, Vec::new());
    for future in waiting {
        if let Err(failed) = future.wait() {
            assert_eq!(failed.cause, Cause::TimedOut);
            timed_out += 1;
            kept.push(failed.buffer);
        }
    }
    let took = begin.elapsed();
    println!("{timed_out} operations timed out; the last one after {took:?}, deadline {deadline:?}");
    assert!(timed_out >= 40, "{timed_out}");
    assert!(took >= deadline && took < HANG);
    assert!(endpoint.ended().is_none(), "a stopped peer is not gone");
    peer.signal(libc::SIGCONT);
    // Buffers that the peer knew of come back with its next messages, or with the end of the connection; the others are back.
    endpoint.close();
    for buffer in kept {
        buffer.wait_for(HANG).unwrap();
    }
    assert_eq!(endpoint.counters().held_operations, 0);
    drop(pattern(1, 1));
}
