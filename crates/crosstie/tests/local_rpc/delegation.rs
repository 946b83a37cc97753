//! Tests of `delegation` through its public API: those in common with `ipc`, and those of its shared ring.

use crosstie::delegation as service;

#[path = "both/mod.rs"]
mod both;

use crosstie_testkit::fresh_name;
use service::*;

/// A ring that is full most of the time: it has less room than the clients have calls.
#[test]
fn threads_get_their_own_responses_through_a_small_ring() {
    for ring_depth in [4, 16] {
        both::stress::check_responses_of_threads(&Config { ring_depth, ..Config::default() });
    }
}

#[test]
fn full_ring_hands_the_token_back_and_has_room_when_a_request_was_received() {
    let name = fresh_name("delegation-test");
    let none = Server::<u64, u64>::create(&name, &Config { ring_depth: 0, ..Config::default() });
    assert!(matches!(none, Err(CreateError::Limit { .. })), "{none:?}");
    let config = Config { queue_depth: 3, ring_depth: 4, ..Config::default() };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let mut first = Client::<[u8], [u8], u32>::connect(&name).unwrap();
    let mut second = Client::<[u8], [u8], u32>::connect(&name).unwrap();
    for token in 0..3 {
        first.call(b"hello", token).unwrap();
    }
    second.call(b"", 5).unwrap();
    assert!(matches!(second.call(b"", 6), Err(CallError { cause: NotCalled::RingFull, token: 6 })));
    server.recv().unwrap().reply(b"world").unwrap();
    assert_eq!(first.poll(|token, response| assert_eq!((token, response), (0, &b"world"[..]))), Ok(1));
    second.call(b"", 6).unwrap();
}

/// More of them than the ring has slots.
#[test]
fn long_messages_arrive_unchanged_in_a_small_ring() {
    let name = fresh_name("delegation-test");
    let config = Config { request_limit: 70_000, response_limit: 70_000, ring_depth: 4, ..Config::default() };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let mut client = Client::<[u8], [u8]>::connect(&name).unwrap();
    for len in [0, 1, 47, 48, 49, 1000, 1024, 4097, 70_000] {
        let request: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
        client.call(&request, ()).unwrap();
        let received = server.recv().unwrap();
        assert_eq!(received.message(), request);
        let response: Vec<u8> = request.iter().map(|byte| !byte).collect();
        received.reply(&response).unwrap();
        assert_eq!(client.poll(|(), received| assert_eq!(received, response)), Ok(1));
    }
}
