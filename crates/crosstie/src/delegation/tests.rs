//! Tests that need access to the internals: random interleavings against an oracle, abandoned positions, and clients that
//! break the protocol.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::collections::HashMap;
use std::time::{Duration, Instant};

use crosstie_testkit::fresh_name;
use crosstie_testkit::wait::{TIMEOUT, eventually};
use proptest::prelude::*;

use super::layout::ClientKey;
use super::*;
use crate::local_rpc::transport::Transport as _;
use crate::memory::copy::copy;
use crate::ring::reservation;
use crate::rng::{Random, seed};

type TestServer = Server<u64, u64>;
type TestClient = Client<u64, u64, u64>;

fn small() -> Config {
    Config { max_clients: 3, queue_depth: 3, ring_depth: 8, ..Config::default() }
}

/// Replies to all requests that are there. Returns their number.
fn serve(server: &mut TestServer) -> usize {
    let mut served = 0;
    while let Some(request) = server.recv() {
        let response = !*request.message();
        match request.reply(&response) {
            Ok(()) | Err(ReplyError { cause: NotReplied::ClientGone, .. }) => served += 1,
            Err(error) => panic!("{error}"),
        }
    }
    served
}

fn disconnect(server: &TestServer, client: TestClient) {
    let before = server.counters().disconnects;
    drop(client);
    eventually("what the other side does", || server.counters().disconnects > before);
}

fn exchange(server: &mut TestServer, client: &mut TestClient, value: u64) {
    client.call(&value, value).unwrap();
    let mut responses = Vec::new();
    eventually("what the other side does", || {
        serve(server);
        client.poll(|token, response| responses.push((token, *response))).unwrap();
        !responses.is_empty()
    });
    assert_eq!(responses, [(value, !value)]);
}

#[test]
fn client_of_another_version_gets_an_error_that_says_so_and_others_go_on() {
    use crate::local_rpc::hello::{self, Hello};

    let name = fresh_name("delegation-unit");
    let mut server = TestServer::create(&name, &small()).unwrap();
    let mut client = TestClient::connect(&name).unwrap();
    for version in [layout::VERSION - 1, layout::VERSION + 1, u32::MAX] {
        let hello = Hello::new::<u64, u64>(layout::MAGIC, version);
        let refused = hello::connect(KIND, &name, &hello, TIMEOUT).map(|_| ());
        assert!(matches!(refused, Err(ConnectError::OtherVersion { .. })), "{refused:?}");
        exchange(&mut server, &mut client, version.into());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Connect,
    Disconnect(prop::sample::Index),
    Call(prop::sample::Index),
    Poll(prop::sample::Index),
    Receive,
    Reply(prop::sample::Index),
    ServerPoll,
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<prop::sample::Index>;
    prop_oneof![
        2 => Just(Step::Connect),
        1 => which().prop_map(Step::Disconnect),
        12 => which().prop_map(Step::Call),
        8 => which().prop_map(Step::Poll),
        10 => Just(Step::Receive),
        8 => which().prop_map(Step::Reply),
        2 => Just(Step::ServerPoll),
    ]
}

/// A client, and its calls in flight, by token.
struct ModelClient {
    client: TestClient,
    calls: HashMap<u64, u64>,
    number: u64,
}

impl ModelClient {
    fn poll(&mut self) {
        let calls = &mut self.calls;
        self.client
            .poll(|token, response| {
                let request = calls.remove(&token).expect("a response to a call that is not in flight");
                assert_eq!(*response, !request, "the response to another call");
            })
            .unwrap();
        assert_eq!(self.client.in_flight(), self.calls.len());
    }
}

proptest! {
    /// Any interleaving of operations, with replies in any order, clients that disconnect with calls in flight, and reused
    /// client indices: no response is lost, delivered twice, or delivered to another client.
    #[test]
    fn every_response_reaches_the_client_that_called(
        queue_depth in 1usize..5,
        ring_depth in prop::sample::select(vec![1usize, 2, 4, 8]),
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let config = Config { max_clients: 3, queue_depth, ring_depth, ..Config::default() };
        let name = fresh_name("delegation-unit");
        let mut server = TestServer::create(&name, &config).unwrap();
        let mut callers: Vec<ModelClient> = Vec::new();
        // The numbers of the clients that have disconnected.
        let (mut tickets, mut gone, mut next) = (Vec::<(Ticket, u64)>::new(), Vec::new(), 0u64);
        let mut unread = 0;
        for step in steps {
            match step {
                Step::Connect => match TestClient::connect(&name) {
                    Ok(client) => {
                        prop_assert!(callers.len() < config.max_clients);
                        next += 1;
                        callers.push(ModelClient { client, calls: HashMap::new(), number: next << 32 });
                    }
                    Err(ConnectError::Full { limit: 3 }) => prop_assert_eq!(callers.len(), 3),
                    Err(error) => panic!("{error}"),
                },
                Step::Disconnect(which) if !callers.is_empty() => {
                    let caller = callers.swap_remove(which.index(callers.len()));
                    gone.push(caller.number);
                    disconnect(&server, caller.client);
                }
                Step::Call(which) if !callers.is_empty() => {
                    let index = which.index(callers.len());
                    let caller = &mut callers[index];
                    next += 1;
                    let request = caller.number | (next & 0xFFFF_FFFF);
                    match caller.client.call(&request, next) {
                        Ok(()) => {
                            caller.calls.insert(next, request);
                            unread += 1;
                        }
                        Err(CallError { cause: NotCalled::Full, token }) => {
                            prop_assert_eq!(token, next);
                            prop_assert_eq!(caller.calls.len(), queue_depth);
                        }
                        Err(CallError { cause: NotCalled::RingFull, token }) => {
                            prop_assert_eq!(token, next);
                            prop_assert!(caller.calls.len() < queue_depth);
                            // The server has published all free positions but those of one batch.
                            prop_assert!(unread + ring_depth.div_ceil(4) > ring_depth, "{unread} of {ring_depth}");
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                Step::Poll(which) if !callers.is_empty() => {
                    let index = which.index(callers.len());
                    callers[index].poll();
                }
                Step::Receive => match server.recv() {
                    Some(request) => {
                        let value = *request.message();
                        tickets.push((request.defer(), value));
                        unread = unread.saturating_sub(1);
                    }
                    // The remaining requests are those of clients that are gone.
                    None => unread = 0,
                },
                Step::Reply(which) if !tickets.is_empty() => {
                    let (ticket, request) = tickets.swap_remove(which.index(tickets.len()));
                    let is_gone = gone.contains(&(request & !0xFFFF_FFFF));
                    match server.reply(ticket, &!request) {
                        Ok(()) => prop_assert!(!is_gone),
                        Err(ReplyError { cause: NotReplied::ClientGone, .. }) => prop_assert!(is_gone),
                        Err(error) => panic!("{error}"),
                    }
                }
                Step::ServerPoll => {
                    server.poll();
                }
                _ => {}
            }
        }
        // No response is lost.
        for (ticket, request) in tickets {
            match server.reply(ticket, &!request) {
                Ok(()) => {}
                Err(ReplyError { cause: NotReplied::ClientGone, .. }) => prop_assert!(gone.contains(&(request & !0xFFFF_FFFF))),
                Err(error) => panic!("{error}"),
            }
        }
        eventually("what the other side does", || {
            serve(&mut server);
            callers.iter_mut().for_each(ModelClient::poll);
            callers.iter().all(|caller| caller.calls.is_empty())
        });
        let counters = server.counters();
        prop_assert_eq!((counters.invalid, counters.skipped, counters.violations), (0, 0, 0));
        prop_assert_eq!(server.clients(), callers.len());
    }
}

#[test]
fn hole_is_skipped_only_after_its_owner_is_gone() {
    let name = fresh_name("delegation-unit");
    let mut server = TestServer::create(&name, &small()).unwrap();
    let mut steady = TestClient::connect(&name).unwrap();
    let mut victim = TestClient::connect(&name).unwrap();
    for round in 0..20 {
        exchange(&mut server, &mut victim, round);
        let passed = server.counters().passed;
        victim.transport.reserve().unwrap();
        steady.call(&round, round).unwrap();
        let mut served = 0;
        for _ in 0..3000 {
            served += serve(&mut server);
        }
        // On a busy machine this takes longer than the server waits for the owner: then the position was passed, not skipped.
        assert_eq!(
            served as u64,
            server.counters().passed - passed,
            "served after a position that was not passed"
        );
        assert_eq!(server.counters().skipped, round, "its owner may still fill it");
        disconnect(&server, victim);
        if served == 0 {
            assert!(server.wait(Some(TIMEOUT)), "the death of a client wakes a parked server");
        }
        served += serve(&mut server);
        assert_eq!((served, server.counters().skipped), (1, round + 1));
        eventually("what the other side does", || {
            steady.poll(|_, response| assert_eq!(*response, !round)).unwrap() == 1
        });
        victim = TestClient::connect(&name).unwrap();
    }
}

/// A client reserves a position and does not move. Others go on for many rounds of the ring, without its slot. When it continues, its
/// request is handed out once.
#[test]
fn position_of_a_client_that_does_not_move_is_passed_and_its_late_request_is_handed_out_once() {
    use crosstie_protocol::lane::CallNumber;
    let name = fresh_name("delegation-unit");
    let mut server = TestServer::create(&name, &small()).unwrap();
    let mut steady = TestClient::connect(&name).unwrap();
    let mut late = TestClient::connect(&name).unwrap();
    for round in 0..3 {
        let position = late.transport.reserve().unwrap();
        for value in 0..100 {
            exchange(&mut server, &mut steady, value);
        }
        assert_eq!(server.counters().passed, round + 1, "passed once, and left out afterwards");
        let requests = server.counters().requests;
        let call = CallNumber::FIRST.after(round as u32);
        let started = crate::ring::call_table::StartedCall { slot: 0, next: 0, call, previous: call.next() };
        late.transport.publish(position, started, &77u64.to_le_bytes());
        let mut received = Vec::new();
        eventually("what the other side does", || {
            if let Some(request) = server.recv() {
                received.push(*request.message());
                drop(request.defer());
            }
            !received.is_empty()
        });
        assert_eq!(received, [77]);
        // Its slot is used again, and the request does not come a second time.
        for value in 0..100 {
            exchange(&mut server, &mut steady, value);
        }
        assert_eq!(server.counters().requests, requests + 101);
    }
    assert_eq!(server.counters().violations, 0);
}

#[test]
fn requests_of_a_dead_client_are_dropped_after_its_index_is_reused() {
    let name = fresh_name("delegation-unit");
    let mut server = TestServer::create(&name, &Config { max_clients: 1, ..small() }).unwrap();
    for round in 0..50 {
        let mut first = TestClient::connect(&name).unwrap();
        exchange(&mut server, &mut first, round);
        first.call(&1, 0).unwrap();
        let ticket = server.recv().unwrap().defer();
        first.call(&2, 0).unwrap();
        disconnect(&server, first);
        let mut second = TestClient::connect(&name).unwrap();
        assert!(matches!(server.reply(ticket, &7), Err(ReplyError { cause: NotReplied::ClientGone, .. })));
        second.call(&3, 3).unwrap();
        // The second request of the first client may still be handed out, but the reply fails.
        serve(&mut server);
        eventually("what the other side does", || {
            second.poll(|token, response| assert_eq!((token, *response), (3, !3))).unwrap() == 1
        });
        disconnect(&server, second);
    }
    assert_eq!(server.counters().invalid, 0);
}

#[test]
fn ring_with_one_client_is_in_exclusive_mode() {
    let name = fresh_name("delegation-unit");
    let mut server = TestServer::create(&name, &small()).unwrap();
    let mut first = TestClient::connect(&name).unwrap();
    let mode = |client: &TestClient| client.transport.ring.header.mode.load(Relaxed);
    assert_eq!(mode(&first), reservation::EXCLUSIVE);
    let second = TestClient::connect(&name).unwrap();
    assert_eq!(mode(&first), reservation::SHARED);
    disconnect(&server, second);
    assert_eq!(mode(&first), reservation::EXCLUSIVE);
    exchange(&mut server, &mut first, 1);
    // The only client is stopped in the middle of a reservation: the admission of others is postponed.
    let header = &first.transport.ring.header;
    first.transport.claim().store(header.head.load(Relaxed), Relaxed);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| TestClient::connect(&name));
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(server.clients(), 1);
        first.transport.claim().store(reservation::IDLE, Relaxed);
        let mut second = second.join().unwrap().unwrap();
        exchange(&mut server, &mut second, 2);
    });
}

/// Clients connect and disconnect as fast as they can while another client calls: the ring changes its mode all the time.
#[test]
fn calls_continue_while_other_clients_connect_and_disconnect() {
    let name = fresh_name("delegation-unit");
    let mut server = TestServer::create(&name, &small()).unwrap();
    let end = Instant::now() + Duration::from_secs(2);
    std::thread::scope(|scope| {
        let steady = scope.spawn(|| {
            let mut client = TestClient::connect(&name).unwrap();
            let mut count = 0;
            while Instant::now() < end {
                assert_eq!(client.exchange(&count, |response| *response).unwrap(), !count);
                count += 1;
            }
            count
        });
        let others = scope.spawn(|| {
            let mut count = 0;
            while Instant::now() < end {
                let mut client = TestClient::connect(&name).unwrap();
                for value in 0..3 {
                    assert_eq!(client.exchange(&value, |response| *response).unwrap(), !value);
                }
                count += 1;
            }
            count
        });
        while !steady.is_finished() || !others.is_finished() {
            if server.wait(Some(Duration::from_millis(10))) {
                serve(&mut server);
            }
        }
        let (calls, connects): (u64, u64) = (steady.join().unwrap(), others.join().unwrap());
        println!("{calls} calls while {connects} clients connected and disconnected");
        assert!(calls > 0 && connects > 0);
    });
    let counters = server.counters();
    assert_eq!((counters.invalid, counters.violations), (0, 0));
    // On a busy machine a thread may stand still for so long that its position is passed; others leave that slot out meanwhile.
    assert!(counters.skipped == 0 || counters.passed > 0, "{counters:?}");
}

/// The response key keeps the lower 21 bits of the call number.
#[test]
fn a_slot_that_gets_the_same_key_again_does_not_show_its_old_response() {
    use crosstie_protocol::lane::CallNumber;
    // The first call number, and one whose key is zero in slot 0, like the word of an unused slot.
    for first in [CallNumber::FIRST, CallNumber::FIRST.after((1 << 21) - 1)] {
        for rounds in 1..4 {
            let name = fresh_name("delegation-unit");
            let config = Config { queue_depth: 1, ..small() };
            let mut server = TestServer::create(&name, &config).unwrap();
            let mut client = TestClient::connect(&name).unwrap();
            client.calls.set_next_call(first);
            client.call(&1, 1).unwrap();
            assert_eq!(client.poll(|_, _| {}).unwrap(), 0, "no response was written yet");
            eventually("what the other side does", || serve(&mut server) == 1);
            assert_eq!(client.poll(|token, response| assert_eq!((token, *response), (1, !1))).unwrap(), 1);

            client.calls.set_next_call(first.after(rounds << 21));
            client.call(&2, 2).unwrap();
            let polled =
                client.poll(|token, response| panic!("token {token} got the old response {response}"));
            assert_eq!(polled.unwrap(), 0);
            eventually("what the other side does", || serve(&mut server) == 1);
            assert_eq!(client.poll(|token, response| assert_eq!((token, *response), (2, !2))).unwrap(), 1);
        }
    }
}

#[test]
fn invalid_requests_end_the_connection_of_their_client() {
    for violation in 0..4 {
        let name = fresh_name("delegation-unit");
        let mut server = Server::<bool, u64>::create(&name, &small()).unwrap();
        let mut steady = Client::<bool, u64, ()>::connect(&name).unwrap();
        let mut client = Client::<bool, u64, ()>::connect(&name).unwrap();
        let publish = |client: &mut Client<bool, u64, ()>, slot, bytes: &[u8]| {
            let call = crosstie_protocol::lane::CallNumber::FIRST;
            let position = client.transport.reserve().unwrap();
            client.transport.publish(
                position,
                crate::ring::call_table::StartedCall { slot, next: 0, call, previous: call.next() },
                bytes,
            );
        };
        match violation {
            // One call more than `queue_depth`.
            0 => (0..4).for_each(|slot| publish(&mut client, slot, &[1])),
            // A response slot that does not exist.
            1 => publish(&mut client, 4, &[1]),
            // Not a valid `bool`.
            2 => publish(&mut client, 0, &[2]),
            // A request that is too long.
            _ => publish(&mut client, 0, &[1, 1]),
        }
        let mut received = 0;
        for _ in 0..10 {
            if let Some(request) = server.recv() {
                received += 1;
                drop(request.defer());
            }
        }
        assert_eq!(received, if violation == 0 { 3 } else { 0 });
        eventually("what the other side does", || {
            client.wait(Some(Duration::ZERO)) == Err(Disconnected::ServerGone)
        });
        eventually("what the other side does", || server.clients() == 1);
        let counters = server.counters();
        assert_eq!((counters.invalid, counters.violations), (1, 1));
        // Other clients are not affected.
        steady.call(&true, ()).unwrap();
        server.recv().unwrap().reply(&5).unwrap();
        assert_eq!(steady.poll(|(), response| assert_eq!(*response, 5)), Ok(1));
    }
}

/// A client that gives itself another generation does not get room for more unanswered requests.
#[test]
fn requests_with_a_generation_that_no_client_has_are_dropped() {
    let name = fresh_name("delegation-unit");
    let mut server = TestServer::create(&name, &small()).unwrap();
    let mut client = TestClient::connect(&name).unwrap();
    let key = client.transport.key;
    let other_generation = ClientKey::from_bits(key.bits() ^ 1 << 12);
    assert_eq!(other_generation.index(), key.index());
    let mut call = crosstie_protocol::lane::CallNumber::FIRST;
    let mut publish = |client: &mut TestClient, key, slot| {
        client.transport.key = key;
        let position = client.transport.reserve().unwrap();
        let started = crate::ring::call_table::StartedCall { slot, next: 0, call, previous: call.next() };
        client.transport.publish(position, started, &[0; 8]);
        call = call.next();
    };
    // As many as are allowed.
    (0..3).for_each(|slot| publish(&mut client, key, slot));
    publish(&mut client, other_generation, 3);
    publish(&mut client, key, 0);
    let mut received = 0;
    eventually("what the other side does", || {
        while let Some(request) = server.recv() {
            received += 1;
            drop(request.defer());
        }
        server.counters().violations == 1
    });
    assert_eq!((received, server.counters().stale), (3, 1));
}

/// A client writes random words to random positions of the segment, of all of it or of one region, while another client
/// calls. The ring may stop, but the server must not.
#[test]
fn server_survives_random_writes_to_the_segment() {
    let mut random = Random(seed());
    let mut served = 0;
    for round in 0..60 {
        let name = fresh_name("delegation-unit");
        let config = Config { max_clients: 4, ring_depth: 16, request_limit: 100, ..small() };
        let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
        let mut hostile = Client::<[u8], [u8], ()>::connect(&name).unwrap();
        let mut correct = Client::<[u8], [u8], ()>::connect(&name).unwrap();
        let segment = hostile.transport.ring.segment.clone();
        let (from, to) = match round % 6 {
            0 => (0, segment.len()),
            1 => (64, 128),
            2 => (128, 136),
            3 => (192, 200),
            4 => (256, 256 + 16 * 128),
            _ => (segment.len() - 4 * 128, segment.len()),
        };
        for step in 0..3000u64 {
            let small = random.next() % 40;
            let word = if random.next().is_multiple_of(2) { small | small << 32 } else { random.next() };
            let at = (from + random.next() % (to - from)) & !7;
            let target = segment.bytes(at, 8).unwrap();
            // SAFETY: eight bytes inside the segment, which is accessed through atomics and copies that tolerate races only.
            unsafe { copy((&raw const word).cast(), target.as_ptr(), 8) };
            for client in [&mut hostile, &mut correct] {
                // The only possible errors are invalid responses and missing room.
                client.call(&step.to_le_bytes(), ()).ok();
                client.poll(|(), _| ()).ok();
            }
            server.poll();
            while let Some(request) = server.recv() {
                served += 1;
                let bytes = request.message().to_vec();
                match request.reply(&bytes) {
                    Ok(()) | Err(ReplyError { cause: NotReplied::ClientGone, .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
        server.wait(Some(Duration::from_millis(1)));
        // Clients can disconnect whatever the segment contains.
        drop((hostile, correct));
        eventually("what the other side does", || server.clients() == 0);
    }
    println!("{served} requests served in between");
}

/// Each word of the segment that is not payload, forged with aimed values, while requests are in flight. The ring may stop, since all
/// clients share it, but the server goes on, and clients disconnect and connect again.
#[test]
fn every_forged_word_of_the_segment_leaves_the_server_running() {
    let config = Config { max_clients: 2, queue_depth: 3, ring_depth: 4, ..Config::default() };
    let (mut forgeries, mut at, mut value) = (0, 0u64, 0);
    loop {
        let name = fresh_name("delegation-unit");
        let mut server = TestServer::create(&name, &config).unwrap();
        let mut hostile = TestClient::connect(&name).unwrap();
        let mut correct = TestClient::connect(&name).unwrap();
        let segment = hostile.transport.ring.segment.clone();
        // Messages of 8 bytes: every slot is one cache line, and only its first two words are no payload.
        if at >= segment.len() {
            break;
        }
        let target = segment.bytes(at, 8).unwrap();
        // SAFETY: an aligned word inside the segment, which is accessed through atomics and copies that tolerate races only.
        let word = unsafe { core::sync::atomic::AtomicU64::from_ptr(target.as_ptr().cast()) };
        for number in 0..2 {
            hostile.call(&number, number).unwrap();
            correct.call(&number, number).unwrap();
        }
        let old = word.load(Relaxed);
        let near =
            [old.wrapping_add(1), old.wrapping_sub(1), old.wrapping_add(4), old ^ 1 << 32, old ^ 1 << 11];
        let extreme = [0, 1, u64::MAX, u64::MAX - 1, 1 << 63, 1 << 32, u64::from(u32::MAX)];
        let values: Vec<u64> = near.into_iter().chain(extreme).filter(|value| *value != old).collect();
        let Some(forged) = values.get(value).copied() else {
            value = 0;
            at += if at >= 256 && at % 64 == 8 { 56 } else { 8 };
            continue;
        };
        value += 1;
        forgeries += 1;
        word.store(forged, Relaxed);
        for round in 0..4 {
            server.poll();
            assert!(serve(&mut server) <= 64, "more requests than the ring holds");
            for client in [&mut hostile, &mut correct] {
                // Wrong responses, errors and missing room are possible; panics and endless loops are not.
                client.poll(|_, _| ()).ok();
                client.call(&round, round).ok();
            }
        }
        server.wait(Some(Duration::ZERO));
        drop((hostile, correct));
        eventually("what the other side does", || {
            server.poll();
            serve(&mut server);
            server.clients() == 0
        });
    }
    println!("{forgeries} forgeries");
    assert!(forgeries > 500, "only {forgeries}");
}

/// Another client lists all slots as stalled, and says that there is room for ever.
#[test]
fn forged_list_of_stalled_slots_does_not_hold_up_a_call() {
    let name = fresh_name("delegation-unit");
    let _server = TestServer::create(&name, &Config { ring_depth: 4, ..small() }).unwrap();
    let mut client = TestClient::connect(&name).unwrap();
    let hostile = TestClient::connect(&name).unwrap();
    // The count and the entries of the list, and `tail`.
    for (offset, value) in [(80, 4), (88, 1), (96, 2), (104, 3), (112, 4), (192, 1 << 62)] {
        let word = hostile.transport.ring.segment.bytes(offset, 8).unwrap();
        // SAFETY: an aligned word inside the segment, which all sides access atomically.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }.store(value, Relaxed);
    }
    let called = client.call(&1, 1);
    assert!(matches!(called, Err(CallError { cause: NotCalled::RingFull, token: 1 })), "{called:?}");
}
