//! Tests of `ipc` through its public API: those in common with `delegation`, and those of `ipc` only.

use crosstie::ipc as service;

#[path = "both/mod.rs"]
mod both;

use std::time::Duration;

use service::*;

/// An idle client is checked every 32 rounds, a busy one in every round.
#[test]
fn poll_with_skip_finds_a_request_within_32_rounds() {
    let name = format!("ipc-skip-{}", std::process::id());
    let mut server = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    let mut idle = Client::<u64, u64, u64>::connect(&name).unwrap();
    let mut busy = Client::<u64, u64, u64>::connect(&name).unwrap();
    for wait in [0, 1, 5, 31, 32, 100, 1000] {
        // The busy client is found in every round but the first, however long the other has been idle.
        let mut missed = 0;
        for round in 0..=wait {
            busy.call(&round, round).unwrap();
            while server.poll_with_skip() == 0 {
                missed += u64::from(round > 0);
            }
            while let Some(request) = server.recv() {
                request.reply(&0).unwrap();
            }
            busy.poll(|_, _| ()).unwrap();
        }
        assert_eq!(missed, 0, "{wait} rounds");
        idle.call(&7, 7).unwrap();
        let rounds = (1..).find(|_| server.poll_with_skip() > 0).unwrap();
        assert!(rounds <= 32, "found after {rounds} rounds");
        let request = server.recv().unwrap();
        assert_eq!(*request.message(), 7);
        request.reply(&8).unwrap();
        assert_eq!(idle.poll(|token, response| assert_eq!((token, *response), (7, 8))), Ok(1));
        assert!(!server.wait(Some(Duration::ZERO)));
    }
}

/// Requests that `poll_with_prefetch` takes are passed to `needs` once and handed out in order. No client waits for ever
/// behind a busier one, and a client that disconnects in between does not affect the requests of others.
#[test]
fn poll_with_prefetch_hands_out_all_requests() {
    let name = format!("ipc-prefetch-{}", std::process::id());
    let config = Config { queue_depth: 32, ..Config::default() };
    let mut server = Server::<u64, u64>::create(&name, &config).unwrap();
    let mut clients: Vec<_> = (0..3).map(|_| Client::<u64, u64, u64>::connect(&name).unwrap()).collect();
    let memory = 5u64;
    let mut next = [0; 3];
    for round in 0..200 {
        // The first client makes more calls than are taken at a time.
        for (at, client) in clients.iter_mut().enumerate() {
            let calls = if at == 0 { 20 } else { round % 3 };
            for call in 0..calls {
                client.call(&((at as u64) << 32 | call), call).unwrap();
            }
        }
        let mut rounds_of_last = 0;
        let (mut shown, mut handed) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            let before = shown.len();
            let found = server.poll_with_prefetch(|request| {
                shown.push(*request);
                Some(&memory)
            });
            assert_eq!(found, shown.len() - before);
            // Nothing else is taken until these are handed out.
            assert_eq!(server.poll_with_prefetch(|_| -> Option<&u64> { unreachable!() }), found);
            assert_eq!(server.poll(), found);
            while let Some(request) = server.recv() {
                handed.push(*request.message());
                let message = *request.message();
                request.reply(&(message + 1)).unwrap();
            }
            rounds_of_last += usize::from(!handed.iter().any(|request| request >> 32 == 2));
        }
        assert_eq!(shown, handed);
        assert!(round % 3 == 0 || rounds_of_last <= 3, "{rounds_of_last}");
        for (at, client) in clients.iter_mut().enumerate() {
            next[at] = 0;
            while client.in_flight() > 0 {
                let check = |token, response: &u64| {
                    assert_eq!((token, *response), (next[at], ((at as u64) << 32 | next[at]) + 1));
                    next[at] += 1;
                };
                assert!(client.poll(check).unwrap() > 0);
            }
        }
    }
    let mut leaving = clients.remove(1);
    leaving.call(&1, 1).unwrap();
    clients[1].call(&2, 2).unwrap();
    while server.poll_with_prefetch(|_| Some(&memory)) < 2 {}
    drop(leaving);
    while server.clients() > 2 {
        server.poll();
    }
    let request = server.recv().unwrap();
    assert_eq!(*request.message(), 2);
    request.reply(&3).unwrap();
    assert!(server.recv().is_none());
    assert_eq!(clients[1].poll(|token, response| assert_eq!((token, *response), (2, 3))), Ok(1));
}

/// A message that is given in several parts arrives as one, whatever the lengths of the parts. A message that is too long is
/// refused as a whole.
#[test]
fn parts_arrive_as_one_message() {
    let name = format!("ipc-parts-{}", std::process::id());
    let config = Config { queue_depth: 4, request_limit: 5000, response_limit: 5000, ..Config::default() };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let mut client = Client::<[u8], [u8], usize>::connect(&name).unwrap();
    let bytes: Vec<u8> = (0..5001u32).map(|at| (at * 7 % 251) as u8).collect();
    for len in [0, 1, 7, 8, 9, 31, 63, 64, 65, 1023, 1024, 1025, 4999, 5000] {
        for (first, second) in [(0, 0), (0, len), (len, len), (len / 3, len / 2), (len.min(1), len.min(9))] {
            let parts = [&bytes[..first], &bytes[first..second], &[], &bytes[second..len]];
            client.call_parts(&parts, len).unwrap();
            while server.poll() == 0 {}
            let request = server.recv().unwrap();
            assert_eq!(request.message(), &bytes[..len]);
            request.reply_parts(&parts).unwrap();
            let check = |token, response: &[u8]| assert_eq!((token, response), (len, &bytes[..len]));
            assert_eq!(client.poll(check), Ok(1), "{first}, {second} of {len}");
        }
    }
    let long = [&bytes[..5000], &bytes[5000..]];
    let refused = client.call_parts(&long, 0).unwrap_err();
    assert!(
        matches!(refused, CallError { cause: NotCalled::TooLong { len: 5001, limit: 5000 }, token: 0 }),
        "{refused:?}"
    );
    client.call_parts(&long[1..], 1).unwrap();
    while server.poll() == 0 {}
    let refused = server.recv().unwrap().reply_parts(&long).unwrap_err();
    let ReplyError { cause: NotReplied::TooLong { len: 5001, .. }, ticket: Some(ticket) } = refused else {
        panic!("{refused:?}")
    };
    server.reply(ticket, b"short").unwrap();
    assert_eq!(client.poll(|token, response| assert_eq!((token, response), (1, &b"short"[..]))), Ok(1));
}
