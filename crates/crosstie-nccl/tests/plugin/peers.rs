//! Two processes: traffic in both directions as in a ring of NCCL, a peer that is killed, a peer that is stopped.

use std::io::Write;

use crosstie_testkit::actor::Actor;
use crosstie_testkit::child;

use crate::cases;
use crate::net::{INVALID_ARGUMENT, Net, REMOTE_ERROR, SYSTEM_ERROR, wait_for};
use crate::pair::{Buffer, Pair, listen};
use crate::rng::choose_seed;
use crate::traffic::{self, Channel};

cases!(
    two_processes_exchange_messages,
    requests_to_a_killed_process_end_with_an_error,
    calls_return_while_the_peer_is_stopped,
    memory_is_given_back_while_the_peer_is_stopped,
    memory_is_not_written_after_it_was_deregistered,
);

/// A process sends whether or not it receives, so that it learns of the end of either direction.
const AHEAD: usize = usize::MAX;

/// Starts the other process and connects with it.
fn ring_with_peer(net: &Net, seed: u64, count: usize) -> (Actor, Channel<'_>) {
    println!("  seed {seed}");
    let mut peer = traffic::start(seed, 1, count, 1, AHEAD, &[]);
    let (listen, handle) = listen(net, 0);
    writeln!(peer.input, "{}", child::to_hex(&handle)).unwrap();
    let theirs = traffic::read_handle(&mut peer.output);
    (peer, Channel::connect(net, 0, traffic::seeds(seed, 0), count, AHEAD, listen, theirs))
}

fn two_processes_exchange_messages() {
    let net = Net::open(11);
    let (mut peer, mut ring) = ring_with_peer(&net, choose_seed(), 400);
    assert_eq!(ring.run(|_| true), 0);
    peer.expect("rc 0").unwrap();
    assert_eq!(ring.close(), [0, 0]);
    assert!(peer.child.wait().unwrap().success());
}

fn requests_to_a_killed_process_end_with_an_error() {
    let net = Net::open(11);
    let bystander = Pair::new(&net);
    for round in 0..6 {
        let (peer, mut ring) = ring_with_peer(&net, choose_seed() ^ round << 8, usize::MAX);
        let until = 3 + 17 * round as usize;
        assert_eq!(ring.run(|ring| ring.received < until), 0);
        peer.signal(libc::SIGKILL).unwrap();
        let rc = ring.run(|_| true);
        assert_eq!(rc, REMOTE_ERROR);
        // Every request has ended.
        for request in ring.outstanding() {
            let mut done = 0;
            let rc = wait_for("the end of a request", || {
                let rc = net.test(request, &raw mut done, core::ptr::null_mut());
                (rc != 0 || done == 1).then_some(rc)
            });
            assert!(done == 1 || rc == REMOTE_ERROR);
        }
        assert_eq!(ring.close(), [0, 0]);
    }
    let mut from = Buffer::new(&net, bystander.send, 9000);
    let mut to = Buffer::new(&net, bystander.recv, 9000);
    bystander.exchange(&mut from, 9000, &mut to, 9000);
}

fn calls_return_while_the_peer_is_stopped() {
    let net = Net::open(11);
    let (mut peer, mut ring) = ring_with_peer(&net, choose_seed(), 400);
    assert_eq!(ring.run(|ring| ring.received < 100), 0);
    peer.signal(libc::SIGSTOP).unwrap();
    for _ in 0..20_000 {
        assert!(ring.step().is_ok(), "a stopped peer is no error");
    }
    assert!(ring.received < 400);
    peer.signal(libc::SIGCONT).unwrap();
    assert_eq!(ring.run(|_| true), 0);
    peer.expect("rc 0").unwrap();
    assert_eq!(ring.close(), [0, 0]);
}

fn memory_is_given_back_while_the_peer_is_stopped() {
    let net = Net::open(11);
    for round in 0..4 {
        let (mut peer, mut ring) = ring_with_peer(&net, choose_seed() ^ round << 8, usize::MAX);
        assert_eq!(ring.run(|ring| ring.received < 20 + 7 * round as usize), 0);
        peer.signal(libc::SIGSTOP).unwrap();
        // A peer that was stopped inside a write may write when it continues: then the memory is not given back.
        let given_back = ring.close();
        println!("  deregMr: {given_back:?}");
        assert!(given_back.iter().all(|rc| *rc == 0 || *rc == SYSTEM_ERROR));
        if given_back == [0, 0] {
            ring.to.bytes.fill(0x33);
        }
        peer.signal(libc::SIGCONT).unwrap();
        peer.expect(&format!("rc {REMOTE_ERROR}")).unwrap();
        if given_back == [0, 0] {
            assert!(ring.to.bytes.iter().all(|byte| *byte == 0x33), "memory was written after deregMr");
        }
    }
}

fn memory_is_not_written_after_it_was_deregistered() {
    let net = Net::open(11);
    for round in 0..12 {
        let (mut peer, mut ring) = ring_with_peer(&net, choose_seed() ^ round << 8, usize::MAX);
        // A receive is outstanding: otherwise nothing would end when its memory is taken away.
        assert_eq!(ring.run(|ring| ring.received < 5 * round as usize || ring.receives.is_empty()), 0);
        // The other process goes on sending meanwhile.
        assert_eq!(net.dereg_mr(ring.recv, ring.to.key), 0);
        ring.to.bytes.fill(0x44);
        peer.expect(&format!("rc {REMOTE_ERROR}")).unwrap();
        assert!(ring.to.bytes.iter().all(|byte| *byte == 0x44), "memory was written after deregMr");
        // `deregMr` refuses what was deregistered.
        assert_eq!(ring.close(), [INVALID_ARGUMENT, 0]);
    }
}
