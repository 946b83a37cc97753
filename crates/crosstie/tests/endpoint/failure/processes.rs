//! A peer process that is stopped. One that is killed and started again is in `restarts`.

use std::time::{Duration, Instant};

use crosstie::device::RemoteMemory;
use crosstie::endpoint::{Cause, Endpoint, EndpointAddress, EndpointConfig, Progress};
use crosstie_testkit::child::{self, Child};
use zerocopy::{FromBytes, IntoBytes};

use super::pair::{HANG, device, endpoint, filled};

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
fn exchange(endpoint: &Endpoint, memory: &RemoteMemory) {
    let submit = endpoint.within(HANG);
    let transfers = [
        submit.recv(endpoint.allocate(BYTES).unwrap(), ..).unwrap(),
        submit.send(filled(endpoint, BYTES, 1), ..).unwrap(),
        submit.write(filled(endpoint, BYTES, 2), .., memory, 0).unwrap(),
        submit.write_imm(filled(endpoint, 100, 3), .., memory, 1 << 18, 7).unwrap(),
        submit.read(endpoint.allocate(BYTES).unwrap(), .., memory, 1 << 19).unwrap(),
    ];
    transfers.into_iter().for_each(|transfer| _ = transfer.wait().unwrap());
}

/// While the peer is stopped, operations end at their deadline; one-sided ones need no peer. When it goes on, so does everything.
#[test]
fn stopped_peer_keeps_no_operation_beyond_its_deadline() {
    let endpoint = endpoint(&device(), &config());
    let peer = PeerProcess::start(&endpoint);
    exchange(&endpoint, &peer.memory);
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
}
