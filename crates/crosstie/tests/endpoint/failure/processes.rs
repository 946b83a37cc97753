//! Peers that are processes: killed, stopped, and started again.

use std::time::{Duration, Instant};

use crosstie::device::RemoteMemory;
use crosstie::endpoint::{
    Buffer, Cause, Endpoint, EndpointAddress, EndpointConfig, OperationFuture, Progress,
};
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::rng::{Random, seed};
use zerocopy::{FromBytes, IntoBytes};

use super::pair::{HANG, device, endpoint, filled, pattern};

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

impl PeerProcess {
    /// Starts the peer, and connects.
    fn start(endpoint: &Endpoint) -> PeerProcess {
        let mut child = Child::start(peer_process, "answers");
        child.write(&endpoint.address().to_bytes());
        let (memory, address) = (child.read(), child.read());
        endpoint.connect(&EndpointAddress::from_bytes(&address).unwrap()).unwrap();
        child.write(b"connected");
        PeerProcess { child, memory: RemoteMemory::read_from_bytes(&memory).unwrap() }
    }
}

/// The peer: sends messages, receives messages, and takes immediates, until it is killed. Does nothing unless a test starts it.
#[test]
fn peer_process() {
    if !child::is_child() {
        return;
    }
    let address = child::read();
    let endpoint = endpoint(&device(), &config());
    let memory = endpoint.allocate(1 << 20).unwrap();
    endpoint.connect(&EndpointAddress::from_bytes(&address).unwrap()).unwrap();
    child::write(memory.remote().as_bytes());
    child::write(&endpoint.address().to_bytes());
    child::read();
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
    let restarts = std::env::var("CROSSTIE_STRESS_SECONDS").map_or(25, |_| 100);
    let mut random = Random(seed());
    let endpoint = endpoint(&device(), &config());
    let (mut slowest_end, mut slowest_start, mut completed, mut failed_count) =
        (Duration::ZERO, Duration::ZERO, 0, 0);
    for restart in 0..restarts {
        let begin = Instant::now();
        let mut peer = PeerProcess::start(&endpoint);
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
        peer.child.signal(libc::SIGSTOP);
        let last = exchange(&endpoint, &peer.memory);
        pending.extend(last.into_iter().flat_map(|exchange| exchange.transfers));
        peer.child.kill();
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
    let endpoint = endpoint(&device(), &config());
    let peer = PeerProcess::start(&endpoint);
    for future in exchange(&endpoint, &peer.memory).unwrap().transfers {
        future.wait().unwrap();
    }
    peer.child.signal(libc::SIGSTOP);
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
    peer.child.signal(libc::SIGCONT);
    // Buffers that the peer knew of come back with its next messages, or with the end of the connection; the others are back.
    endpoint.close();
    for buffer in kept {
        buffer.wait_for(HANG).unwrap();
    }
    assert_eq!(endpoint.counters().held_operations, 0);
    drop(pattern(1, 1));
}
