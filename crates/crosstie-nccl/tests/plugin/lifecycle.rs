//! Closing, aborting, and beginning again.

use crate::arguments::VERSIONS;
use crate::cases;
use crate::net::{NULL, Net, Ptr, REMOTE_ERROR, SYSTEM_ERROR, log, wait_for};
use crate::pair::{Buffer, Pair, check, fill, finish, listen, receive, send};

cases!(
    library_stays_loaded_when_nccl_closes_it,
    destroyed_communicators_can_be_created_again,
    versions_can_be_used_together,
    deregister_before_close_when_all_is_done,
    deregister_succeeds_after_receives_of_another_comm,
    deregister_aborts_outstanding_receives,
    deregister_aborts_sends_of_an_incomplete_group,
    close_with_requests_outstanding_ends_those_of_the_peer,
    messages_that_arrived_before_the_close_are_received,
    counters_are_logged_at_close,
    finalize_ends_the_connects_of_its_communicator,
);

fn library_stays_loaded_when_nccl_closes_it() {
    let net = Net::load(11);
    let (table, name) = (net.word(1), net.name().as_ptr() as usize);
    drop(net);
    let again = Net::load(11);
    assert_eq!((again.word(1), again.name().as_ptr() as usize), (table, name), "it was loaded anew");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("crosstie_nccl"));
    drop(again);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("crosstie_nccl"), "link the library with -z nodelete");
}

fn transfer(net: &Net, pair: &Pair<'_>, number: usize, len: usize) {
    let (mut from, mut to) = (Buffer::new(net, pair.send, len), Buffer::new(net, pair.recv, len));
    fill(&mut from.bytes, number);
    pair.exchange(&mut from, len, &mut to, len);
    check(&to.bytes, number);
}

fn destroyed_communicators_can_be_created_again() {
    for version in VERSIONS {
        for round in 0..4 {
            let net = Net::open(version);
            let (first, second) = (Pair::new(&net), Pair::new(&net));
            transfer(&net, &first, round, 100_000);
            drop(first);
            transfer(&net, &second, round, 1000);
        }
    }
}

fn versions_can_be_used_together() {
    let nets = VERSIONS.map(Net::open);
    let pairs: Vec<_> = nets.iter().map(Pair::new).collect();
    for (number, pair) in pairs.iter().enumerate() {
        transfer(pair.net, pair, number, 50_000);
    }
}

fn deregister_before_close_when_all_is_done() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    transfer(&net, &pair, 1, 30_000);
    // The memory is gone; the connection is not.
    transfer(&net, &pair, 2, 30_000);
}

/// The other comm has used so many memories since that it does not know this one any more; its connection still holds it.
fn deregister_succeeds_after_receives_of_another_comm() {
    let net = Net::open(11);
    let (pair, other) = (Pair::new(&net), Pair::new(&net));
    let mut from = Buffer::new(&net, pair.send, 64);
    let mut first = Buffer::new(&net, other.recv, 64);
    let mut later: Vec<_> = (0..32).map(|_| Buffer::new(&net, pair.recv, 64)).collect();
    let mut receives = vec![receive(&net, pair.recv, &mut first, &[(0, 64, 0)])];
    receives.extend(later.iter_mut().take(16).map(|to| receive(&net, pair.recv, to, &[(0, 64, 0)])));
    for receive in receives {
        let sent = send(&net, pair.send, &mut from, 0, 64, 0);
        assert_eq!(finish(&net, receive, 1), [64]);
        finish(&net, sent, 1);
    }
    drop((first, later));
}

fn deregister_aborts_outstanding_receives() {
    for posted_len in [64, 100_000] {
        let net = Net::open(11);
        let pair = Pair::new(&net);
        let mut from = Buffer::new(&net, pair.send, posted_len);
        let mut to = Buffer::new(&net, pair.recv, posted_len);
        let received = receive(&net, pair.recv, &mut to, &[(0, posted_len, 0)]);
        let mut memory = to.free();
        memory.fill(0x11);
        // The sender learns it: with an error, sooner or later. It must not write there.
        fill(&mut from.bytes, 5);
        let rc = wait_for("the sender's error", || {
            let mut request = NULL;
            let rc = net.isend(pair.send, from.at(0), posted_len, 0, from.key, &raw mut request);
            if rc != 0 {
                return Some(rc);
            }
            let mut done = 0;
            if request.is_null() {
                None
            } else {
                Some(net.test(request, &raw mut done, core::ptr::null_mut()))
            }
            .filter(|rc| *rc != 0)
        });
        assert!(rc == REMOTE_ERROR || rc == SYSTEM_ERROR, "{rc}");
        assert!(memory.iter().all(|byte| *byte == 0x11), "memory was written after deregMr");
        let mut done = 0;
        assert_eq!(net.test(received, &raw mut done, core::ptr::null_mut()), SYSTEM_ERROR);
        assert_eq!(done, 0);
    }
}

fn deregister_aborts_sends_of_an_incomplete_group() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 64), Buffer::new(&net, pair.recv, 128));
    let received = receive(&net, pair.recv, &mut to, &[(0, 64, 1), (64, 64, 2)]);
    let sent = send(&net, pair.send, &mut from, 0, 64, 1);
    drop(from);
    let mut done = 0;
    assert_eq!(net.test(sent, &raw mut done, core::ptr::null_mut()), SYSTEM_ERROR);
    let rc = error_of(&net, received);
    assert_eq!(rc, REMOTE_ERROR);
}

/// Tests a request until it fails.
fn error_of(net: &Net, request: Ptr) -> i32 {
    wait_for("the error of a request", || {
        let mut done = 0;
        let rc = net.test(request, &raw mut done, core::ptr::null_mut());
        assert_eq!(done, 0);
        (rc != 0).then_some(rc)
    })
}

fn close_with_requests_outstanding_ends_those_of_the_peer() {
    let net = Net::open(11);
    // The sender closes.
    let mut pair = Pair::new(&net);
    let mut to = Buffer::new(&net, pair.recv, 4096);
    let receives: Vec<_> = (0..8).map(|_| receive(&net, pair.recv, &mut to, &[(0, 64, 0)])).collect();
    pair.close_send();
    for request in receives {
        assert_eq!(error_of(&net, request), REMOTE_ERROR);
    }
    drop(to);

    // The receiver closes.
    let mut pair = Pair::new(&net);
    let mut from = Buffer::new(&net, pair.send, 64);
    let mut to = Buffer::new(&net, pair.recv, 128);
    receive(&net, pair.recv, &mut to, &[(0, 64, 1), (64, 64, 2)]);
    let sent = send(&net, pair.send, &mut from, 0, 64, 1);
    drop(to);
    pair.close_recv();
    let rc = error_of(&net, sent);
    assert_eq!(rc, REMOTE_ERROR);
}

fn messages_that_arrived_before_the_close_are_received() {
    let net = Net::open(11);
    for len in [100, 100_000] {
        let mut pair = Pair::new(&net);
        let (mut from, mut to) = (Buffer::new(&net, pair.send, len), Buffer::new(&net, pair.recv, 4 * len));
        let receives: Vec<_> =
            (0..4).map(|at| receive(&net, pair.recv, &mut to, &[(at * len, len, 0)])).collect();
        for number in 0..4 {
            fill(&mut from.bytes, number);
            let sent = send(&net, pair.send, &mut from, 0, len, 0);
            assert_eq!(finish(&net, sent, 1), [len]);
        }
        drop(from);
        pair.close_send();
        for (number, request) in receives.into_iter().enumerate() {
            assert_eq!(finish(&net, request, 1), [len]);
            check(&to.bytes[number * len..][..len], number);
        }
    }
}

fn counters_are_logged_at_close() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    transfer(&net, &pair, 0, 123_456);
    let before = log().len();
    drop(pair);
    let lines = log().split_off(before);
    let find = |text: &str| lines.iter().find(|line| line.contains(text)).cloned().unwrap_or_default();
    assert!(
        find("sent ").contains("sent 1 messages (0 staged) over software; rail masks {0x1: 1}"),
        "{lines:?}"
    );
    assert!(find("received ").contains("received 1 messages"), "{lines:?}");
    let rails: Vec<_> = lines.iter().filter(|line| line.contains("rail 0 software: 123456 bytes")).collect();
    assert_eq!(rails.len(), 2, "{lines:?}");
    assert!(rails[0].contains("1 work requests, 1 completions, 0 retries, 0 replays"), "{lines:?}");
}

/// NCCL aborts while a peer does not accept: it never asks for the connection again. Another communicator goes on.
fn finalize_ends_the_connects_of_its_communicator() {
    const ATTEMPTS: usize = 8;
    let connecting = || {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        threads
            .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok())
            .filter(|name| name.trim() == "crosstie-rails")
            .count()
    };
    let (staying, ending) = (Net::open(11), Net::open(12));
    wait_for("the end of the threads of earlier connections", || (connecting() == 0).then_some(()));
    let listeners: Vec<_> = (0..ATTEMPTS).map(|_| listen(&staying, 0)).collect();
    for (_, mut handle) in listeners.iter().copied() {
        let mut send = NULL;
        assert_eq!(ending.connect(0, handle.as_mut_ptr(), &raw mut send), 0);
        assert!(send.is_null(), "nobody has accepted");
    }
    wait_for("the attempts", || (connecting() == ATTEMPTS).then_some(()));
    let pair = Pair::new(&staying);
    drop(ending);
    wait_for("the end of the attempts", || (connecting() == 2).then_some(()));
    transfer(&staying, &pair, 0, 1000);
    for (listener, _) in listeners {
        assert_eq!(staying.close_listen(listener), 0);
    }
}
