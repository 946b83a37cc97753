//! Messages: sizes, order, groups, limits.

use std::time::Instant;

use crate::arguments::VERSIONS;
use crate::cases;
use crate::net::{HANDLE_LEN, HOST, NULL, Net, wait_for};
use crate::pair::{
    Buffer, Pair, Part, check, connect_and_accept, fill, finish, listen, receive, send, try_receive,
    try_send, try_test,
};

cases!(
    connect_and_accept_return_null_until_the_peer_comes,
    handle_fits_into_nccls_buffer,
    one_listener_accepts_several_senders,
    isend_returns_null_until_a_receive_is_posted,
    messages_of_all_sizes_arrive,
    receive_may_be_longer_than_the_send,
    send_is_cut_to_the_length_of_the_receive,
    messages_match_in_order,
    tags_choose_the_buffer_inside_the_head_group_only,
    groups_of_eight_arrive_in_any_order_of_sends,
    receives_are_tested_in_any_order,
    too_many_receives_return_null,
    both_directions_run_at_once,
    memory_is_registered_beside_sends,
);

fn connect_and_accept_return_null_until_the_peer_comes() {
    for version in VERSIONS {
        let net = Net::open(version);
        let (listen_comm, mut handle) = listen(&net, 0);
        let mut comm = NULL;
        for _ in 0..1000 {
            assert_eq!(net.accept(listen_comm, &raw mut comm), 0);
            assert!(comm.is_null(), "accepted nobody");
        }
        // Nobody accepts: connect returns each time, with nothing.
        for _ in 0..1000 {
            assert_eq!(net.connect(0, handle.as_mut_ptr(), &raw mut comm), 0);
            assert!(comm.is_null(), "connected to nobody");
        }
        let (send, recv) = connect_and_accept(&net, 0, handle, listen_comm);
        drop(Pair { net: &net, listen: listen_comm, send, recv });
    }
}

fn handle_fits_into_nccls_buffer() {
    let net = Net::open(11);
    let mut bytes = [0x55u8; HANDLE_LEN + 64];
    let mut comm = NULL;
    assert_eq!(net.listen(0, bytes.as_mut_ptr(), &raw mut comm), 0);
    assert!(bytes[HANDLE_LEN..].iter().all(|byte| *byte == 0x55));
    let mut send = NULL;
    assert_eq!(net.connect(0, bytes.as_mut_ptr(), &raw mut send), 0);
    assert!(bytes[HANDLE_LEN..].iter().all(|byte| *byte == 0x55));
    assert_eq!(net.close_listen(comm), 0);
}

fn one_listener_accepts_several_senders() {
    let net = Net::open(10);
    let (listen_comm, handle) = listen(&net, 0);
    // Each sender has a copy of the handle; the last one has bytes behind it that the plugin did not write.
    let mut handles = [handle; 4];
    handles[3][64..].fill(0x77);
    let mut comms = [NULL; 4];
    let mut accepted = Vec::new();
    wait_for("four connections", || {
        for (comm, handle) in comms.iter_mut().zip(&mut handles).filter(|(comm, _)| comm.is_null()) {
            assert_eq!(net.connect(0, handle.as_mut_ptr(), &raw mut *comm), 0);
        }
        let mut comm = NULL;
        assert_eq!(net.accept(listen_comm, &raw mut comm), 0);
        accepted.extend((!comm.is_null()).then_some(comm));
        (accepted.len() == 4 && comms.iter().all(|comm| !comm.is_null())).then_some(())
    });
    comms.iter().for_each(|comm| assert_eq!(net.close_send(*comm), 0));
    accepted.iter().for_each(|comm| assert_eq!(net.close_recv(*comm), 0));
    assert_eq!(net.close_listen(listen_comm), 0);
}

fn isend_returns_null_until_a_receive_is_posted() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 64), Buffer::new(&net, pair.recv, 64));
    let (began, calls) = (Instant::now(), 20_000);
    for _ in 0..calls {
        assert!(try_send(&net, pair.send, &mut from, 0, 64, 0).is_none());
    }
    println!("  isend without a receive: {} ns", began.elapsed().as_nanos() / calls);
    let received = receive(&net, pair.recv, &mut to, &[(0, 64, 0)]);
    let sent = send(&net, pair.send, &mut from, 0, 64, 0);
    assert!(try_send(&net, pair.send, &mut from, 0, 64, 0).is_none(), "one receive, one send");
    assert_eq!((finish(&net, sent, 1), finish(&net, received, 1)), (vec![64], vec![64]));
}

pub(crate) const SIZES: [usize; 22] = [
    0,
    1,
    2,
    63,
    64,
    127,
    128,
    129,
    255,
    256,
    4095,
    4096,
    8191,
    8192,
    8193,
    65_535,
    65_536,
    100_001,
    1 << 20,
    (1 << 20) + 3,
    5 << 20,
    (16 << 20) - 1,
];

fn messages_of_all_sizes_arrive() {
    for version in VERSIONS {
        let net = Net::open(version);
        let pair = Pair::new(&net);
        let longest = 16 << 20;
        let (mut from, mut to) =
            (Buffer::new(&net, pair.send, longest), Buffer::new(&net, pair.recv, longest));
        let limit = net.max_bytes();
        for (number, len) in SIZES.into_iter().filter(|len| *len <= limit).enumerate() {
            fill(&mut from.bytes[..len], number);
            to.bytes[..len].fill(0);
            pair.exchange(&mut from, len, &mut to, len);
            check(&to.bytes[..len], number);
        }
    }
}

fn receive_may_be_longer_than_the_send() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 1 << 20), Buffer::new(&net, pair.recv, 1 << 20));
    for (number, len) in [0, 1, 100, 8192, 9000, 300_000].into_iter().enumerate() {
        fill(&mut from.bytes[..len], number);
        to.bytes.fill(0xee);
        pair.exchange(&mut from, len, &mut to, 1 << 20);
        check(&to.bytes[..len], number);
        assert!(to.bytes[len..].iter().all(|byte| *byte == 0xee), "written behind the message");
    }
}

fn send_is_cut_to_the_length_of_the_receive() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 40_000), Buffer::new(&net, pair.recv, 40_000));
    for (number, (sent_len, room)) in [(100, 10), (40_000, 20_000), (5, 0)].into_iter().enumerate() {
        fill(&mut from.bytes, number);
        to.bytes.fill(0xee);
        pair.exchange(&mut from, sent_len, &mut to, room);
        check(&to.bytes[..room], number);
        assert!(to.bytes[room..].iter().all(|byte| *byte == 0xee));
    }
}

fn messages_match_in_order() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (size, depth, count) = (3000, 32, 20_000);
    let mut from = Buffer::new(&net, pair.send, depth * size);
    let mut to = Buffer::new(&net, pair.recv, depth * size);
    let (mut receives, mut sends) = (Vec::new(), Vec::new());
    let (mut posted, mut sent, mut received) = (0, 0, 0);
    let len = |number: usize| number * 97 % size;
    wait_for("all messages", || {
        while posted < count && posted < received + depth {
            let at = posted % depth * size;
            let Some(request) = try_receive(&net, pair.recv, &mut to, &[(at, size, 0)]) else { break };
            receives.push(request);
            posted += 1;
        }
        while sent < count && sends.len() < depth {
            let at = sent % depth * size;
            fill(&mut from.bytes[at..at + len(sent)], sent);
            let Some(request) = try_send(&net, pair.send, &mut from, at, len(sent), 0) else { break };
            sends.push(request);
            sent += 1;
        }
        sends.retain(|request| try_test(&net, *request, 1).is_none());
        while received < receives.len()
            && let Some(sizes) = try_test(&net, receives[received], 1)
        {
            assert_eq!(sizes, [len(received)]);
            let at = received % depth * size;
            check(&to.bytes[at..at + len(received)], received);
            received += 1;
        }
        (received == count && sends.is_empty()).then_some(())
    });
}

fn tags_choose_the_buffer_inside_the_head_group_only() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 4096), Buffer::new(&net, pair.recv, 4096));
    let first = receive(&net, pair.recv, &mut to, &[(0, 64, 1), (64, 64, 2)]);
    let second = receive(&net, pair.recv, &mut to, &[(128, 64, 3), (192, 64, 2)]);
    let tag_two = wait_for("isend", || try_send(&net, pair.send, &mut from, 0, 20, 2));
    for _ in 0..1000 {
        assert!(try_send(&net, pair.send, &mut from, 0, 30, 3).is_none(), "tag 3 is not in the head group");
        assert!(try_send(&net, pair.send, &mut from, 0, 30, 2).is_none(), "tag 2 was used");
        assert!(try_test(&net, first, 2).is_none(), "a group is done when all its buffers are");
    }
    let tag_one = send(&net, pair.send, &mut from, 0, 10, 1);
    assert_eq!(finish(&net, first, 2), [10, 20]);
    let again = send(&net, pair.send, &mut from, 0, 40, 2);
    let tag_three = send(&net, pair.send, &mut from, 0, 30, 3);
    assert_eq!(finish(&net, second, 2), [30, 40]);
    for (request, len) in [(tag_two, 20), (tag_one, 10), (again, 40), (tag_three, 30)] {
        assert_eq!(finish(&net, request, 1), [len]);
    }
}

fn groups_of_eight_arrive_in_any_order_of_sends() {
    for version in VERSIONS {
        let net = Net::open(version);
        let pair = Pair::new(&net);
        let room = 70_000;
        let (mut from, mut to) =
            (Buffer::new(&net, pair.send, 8 * room), Buffer::new(&net, pair.recv, 8 * room));
        for round in 0..40 {
            let count = round % 8 + 1;
            let parts: Vec<Part> = (0..count).map(|at| (at * room, room, 100 + at as i32)).collect();
            let lens: Vec<usize> = (0..count).map(|at| [0, 1, 500, 8192, 70_000][(round + at) % 5]).collect();
            let received = receive(&net, pair.recv, &mut to, &parts);
            let mut sends = Vec::new();
            for nth in 0..count {
                let at = (nth * 5 + round) % count;
                // 5 and `count` may have a common divisor; then the remaining ones follow.
                let at = if sends.iter().any(|(known, _)| *known == at) {
                    (0..count).find(|at| !sends.iter().any(|(known, _)| known == at)).unwrap()
                } else {
                    at
                };
                fill(&mut from.bytes[at * room..][..lens[at]], round * 8 + at);
                let request = send(&net, pair.send, &mut from, at * room, lens[at], 100 + at as i32);
                sends.push((at, request));
            }
            assert_eq!(finish(&net, received, count), lens);
            for (at, request) in sends {
                assert_eq!(finish(&net, request, 1), [lens[at]]);
                check(&to.bytes[at * room..][..lens[at]], round * 8 + at);
            }
        }
    }
}

fn receives_are_tested_in_any_order() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 32 << 10), Buffer::new(&net, pair.recv, 32 << 10));
    for round in 0..20 {
        let receives: Vec<_> =
            (0..32).map(|at| receive(&net, pair.recv, &mut to, &[(at << 10, 1 << 10, 0)])).collect();
        let sends: Vec<_> = (0..32)
            .map(|at| {
                fill(&mut from.bytes[at << 10..][..1000 - at], round * 32 + at);
                send(&net, pair.send, &mut from, at << 10, 1000 - at, 0)
            })
            .collect();
        for nth in 0..32 {
            let at = (31 - nth) ^ (round & 31);
            assert_eq!(finish(&net, receives[at], 1), [1000 - at]);
            check(&to.bytes[at << 10..][..1000 - at], round * 32 + at);
            assert_eq!(finish(&net, sends[(at + round) % 32], 1), [1000 - (at + round) % 32]);
        }
    }
}

fn too_many_receives_return_null() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 8), Buffer::new(&net, pair.recv, 1 << 16));
    let mut receives = Vec::new();
    while let Some(request) = try_receive(&net, pair.recv, &mut to, &[(receives.len() * 8, 8, 0)]) {
        receives.push(request);
        assert!(receives.len() < 4096, "there is a limit");
    }
    assert!(receives.len() >= 32, "NCCL has up to 32 in flight");
    for request in &receives {
        let sent = send(&net, pair.send, &mut from, 0, 8, 0);
        assert_eq!((finish(&net, *request, 1), finish(&net, sent, 1)), (vec![8], vec![8]));
    }
    assert!(try_receive(&net, pair.recv, &mut to, &[(0, 8, 0)]).is_some());
}

fn both_directions_run_at_once() {
    let net = Net::open(11);
    let (forth, back) = (Pair::new(&net), Pair::new(&net));
    std::thread::scope(|scope| {
        for pair in [&forth, &back] {
            let (net, send_comm, recv_comm) = (&net, pair.send as usize, pair.recv as usize);
            let pointer = |word: usize| core::ptr::without_provenance_mut(word);
            scope.spawn(move || {
                let mut to = Buffer::new(net, pointer(recv_comm), 300_000);
                for number in 0..100 {
                    let received = receive(net, pointer(recv_comm), &mut to, &[(0, 300_000, 0)]);
                    let len = number * 2999;
                    assert_eq!(finish(net, received, 1), [len]);
                    check(&to.bytes[..len], number);
                }
            });
            scope.spawn(move || {
                let mut from = Buffer::new(net, pointer(send_comm), 300_000);
                for number in 0..100 {
                    let len = number * 2999;
                    fill(&mut from.bytes[..len], number);
                    let sent = send(net, pointer(send_comm), &mut from, 0, len, 0);
                    finish(net, sent, 1);
                }
            });
        }
    });
}

fn memory_is_registered_beside_sends() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (send_comm, recv_comm) = (pair.send as usize, pair.recv as usize);
    let is_over = core::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for comm in [send_comm, recv_comm] {
            let (net, is_over) = (&net, &is_over);
            scope.spawn(move || {
                let comm = core::ptr::without_provenance_mut(comm);
                let mut bytes = vec![0u8; 1 << 16];
                let mut rounds = 0;
                while !is_over.load(core::sync::atomic::Ordering::Relaxed) || rounds < 100 {
                    let mut key = NULL;
                    assert_eq!(net.reg_mr(comm, bytes.as_mut_ptr(), bytes.len(), HOST, &raw mut key), 0);
                    assert_eq!(net.dereg_mr(comm, key), 0);
                    rounds += 1;
                }
            });
        }
        let (mut from, mut to) = (Buffer::new(&net, pair.send, 20_000), Buffer::new(&net, pair.recv, 20_000));
        for number in 0..2000 {
            let len = number * 7 % 20_000;
            fill(&mut from.bytes[..len], number);
            pair.exchange(&mut from, len, &mut to, 20_000);
            check(&to.bytes[..len], number);
        }
        is_over.store(true, core::sync::atomic::Ordering::Relaxed);
    });
}
