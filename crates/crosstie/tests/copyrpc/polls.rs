//! What a single call, and a single poll, does. One thread polls both sides.

use std::thread::sleep;
use std::time::Duration;

use crosstie::copyrpc::{Config, Connection, ConnectionConfig, Context};
use crosstie::device::{Device, software};

use super::connect_pair;

const CALLS: u32 = 32;

fn context() -> Context<u32> {
    let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
    Context::new(device, &Config::default()).unwrap()
}

fn connect(client: &Context<u32>, server: &Context<u32>) -> (Connection<u32>, Connection<u32>) {
    let config = ConnectionConfig { ring: 1 << 14, credit: 1 << 12, ..ConnectionConfig::default() };
    connect_pair(client, server, &config)
}

fn call(connection: &Connection<u32>, number: u32) {
    assert!(connection.call(&number.to_le_bytes(), 8, number).is_ok());
}

/// Makes [`CALLS`] calls, and lets the server reply to all of them.
fn call_and_reply(client: &Context<u32>, server: &Context<u32>, connection: &Connection<u32>) {
    (0..CALLS).for_each(|number| call(connection, number));
    client.flush();
    let mut replied = 0;
    while replied < CALLS {
        server.poll(|_, _| ());
        while let Some(request) = server.recv() {
            assert!(request.reply(&replied.to_le_bytes()).is_ok());
            replied += 1;
        }
    }
    server.flush();
}

/// Polls once. Returns the calls that ended; all of them have a response.
fn poll(client: &Context<u32>) -> Vec<u32> {
    let mut ended = Vec::new();
    let count = client.poll(|number, response| {
        let mut bytes = [0; 4];
        assert_eq!(response.expect("a response").copy_to(&mut bytes), 4);
        assert_eq!(u32::from_le_bytes(bytes), number);
        ended.push(number);
    });
    assert_eq!(count, ended.len());
    ended
}

#[test]
fn single_short_call_goes_out_at_once_and_others_wait() {
    let (client, server) = (context(), context());
    let (here, _there) = connect(&client, &server);
    call(&here, 0);
    assert_eq!(client.counters().batches, 1);
    call(&here, 1);
    call(&here, 2);
    assert_eq!(client.counters().batches, 1);
    client.flush();
    assert_eq!(client.counters().batches, 2);
    // So does the first call of another connection: only one goes out at once between two polls.
    let (other, _there) = connect(&client, &server);
    call(&other, 0);
    assert_eq!(client.counters().batches, 2);
    client.poll(|_, _| ());
    assert_eq!(client.counters().batches, 3);
    let (other, _there) = connect(&client, &server);
    call(&other, 0);
    assert_eq!(client.counters().batches, 4);
    // A call that is too long to go out at once waits, too.
    client.poll(|_, _| ());
    let (other, _there) = connect(&client, &server);
    assert!(other.call(&[7; 33], 8, 0).is_ok());
    assert_eq!(client.counters().batches, 4);
    client.flush();
    assert_eq!(client.counters().batches, 5);
}

/// A burst over many connections needs no more receives than one for each.
#[test]
fn burst_over_many_connections_is_one_write_for_each() {
    const CONNECTIONS: u64 = 64;
    let (client, server) = (context(), context());
    let pairs: Vec<_> = (0..CONNECTIONS).map(|_| connect(&client, &server)).collect();
    for number in 0..3 {
        pairs.iter().for_each(|(here, _)| call(here, number));
    }
    client.flush();
    // One more for the very first call.
    assert_eq!(client.counters().batches, CONNECTIONS + 1);
}

#[test]
fn poll_ends_half_of_many_pending_calls_and_the_next_one_the_rest() {
    let (client, server) = (context(), context());
    let (here, _there) = connect(&client, &server);
    call_and_reply(&client, &server, &here);
    assert_eq!(poll(&client), (0..CALLS / 2).collect::<Vec<_>>());
    assert_eq!(here.pending_calls() as u32, CALLS / 2);
    assert!(client.wait(Duration::ZERO), "there is something to poll for");
    assert_eq!(poll(&client), (CALLS / 2..CALLS).collect::<Vec<_>>());
    assert_eq!(poll(&client), []);
    assert!(!client.wait(Duration::ZERO));
}

#[test]
fn responses_that_have_arrived_are_reported_though_the_peer_is_gone() {
    let (client, server) = (context(), context());
    let (here, there) = connect(&client, &server);
    call_and_reply(&client, &server, &here);
    drop((there, server));
    // Long enough for the next poll to look at the peers.
    sleep(Duration::from_millis(50));
    assert_eq!([poll(&client), poll(&client)].concat(), (0..CALLS).collect::<Vec<_>>());
}

#[test]
fn responses_of_a_closed_connection_do_not_reach_another() {
    let (client, server) = (context(), context());
    let (here, there) = connect(&client, &server);
    call_and_reply(&client, &server, &here);
    assert_eq!(poll(&client).len() as u32, CALLS / 2);
    assert_eq!(here.close(), (CALLS / 2..CALLS).collect::<Vec<_>>());
    drop(there);
    let (here, _there) = connect(&client, &server);
    call(&here, 0);
    assert_eq!(poll(&client), []);
    server.poll(|_, _| ());
    assert!(server.recv().unwrap().reply(&0_u32.to_le_bytes()).is_ok());
    assert_eq!(poll(&client), [0]);
    assert!(here.failure().is_none());
}

/// The requests that the handler of one poll gets.
fn serve(server: &Context<u32>) -> Vec<u32> {
    let mut seen = Vec::new();
    let count = server.serve(
        &mut seen,
        |seen, request| {
            let number = request.data().read::<u32>().unwrap();
            assert!(request.reply(&number.to_le_bytes()).is_ok());
            seen.push(number);
        },
        |_, _, _| (),
    );
    assert_eq!(count, seen.len());
    seen
}

#[test]
fn handler_gets_about_256_requests_in_a_poll_and_all_in_order() {
    const CALLS: u32 = 1000;
    let (client, server) = (context(), context());
    let config = ConnectionConfig {
        ring: 1 << 18,
        credit: 1 << 16,
        pending_calls: 2000,
        ..ConnectionConfig::default()
    };
    let (here, _there) = connect_pair(&client, &server, &config);
    // The first batch is short, so that a poll ends inside of a batch.
    for number in 0..CALLS {
        call(&here, number);
        if number == 9 {
            client.flush();
        }
    }
    client.flush();
    let mut seen = Vec::new();
    while (seen.len() as u32) < CALLS {
        let more = serve(&server);
        assert!(!more.is_empty() && more.len() <= 256, "{} requests in one poll", more.len());
        seen.extend(more);
        assert_eq!(server.wait(Duration::ZERO), (seen.len() as u32) < CALLS, "whether there is more");
    }
    assert_eq!(seen, (0..CALLS).collect::<Vec<_>>());
    let mut ended = Vec::new();
    while (ended.len() as u32) < CALLS {
        ended.extend(poll(&client));
        server.poll(|_, _| ());
    }
    assert_eq!(ended, seen);
}

#[test]
fn handler_gets_requests_that_wait_in_the_queue_first() {
    let (client, server) = (context(), context());
    let (here, _there) = connect(&client, &server);
    for first in [0, 10] {
        (first..first + 5).for_each(|number| call(&here, number));
        client.flush();
        if first == 0 {
            server.poll(|_, _| ());
        }
    }
    let mut seen = Vec::new();
    while seen.len() < 10 {
        seen.extend(serve(&server));
    }
    assert_eq!(seen, [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]);
}

/// While a handler has the first requests of a batch, no reply goes out alone: others will join it.
#[test]
fn replies_to_the_requests_of_a_batch_go_out_together() {
    let (client, server) = (context(), context());
    let (here, _there) = connect(&client, &server);
    call(&here, 0);
    (1..17).for_each(|number| call(&here, number));
    client.flush();
    let mut seen = serve(&server);
    while seen.len() < 17 {
        seen.extend(serve(&server));
    }
    server.flush();
    let counters = server.counters();
    assert_eq!((counters.batched, counters.batches), (17, 2), "the first request came alone");
}

#[test]
fn request_is_answered_when_its_handler_drops_it_and_when_it_is_deferred() {
    let (client, server) = (context(), context());
    let (here, _there) = connect(&client, &server);
    let mut deferred = Vec::new();
    for round in 0..100 {
        // Alone, with its completion; and in a batch, in the ring.
        for number in 0..1 + round % 2 * 7 {
            call(&here, number);
        }
        client.flush();
        let (mut ended, mut answers) = (0, Vec::new());
        while ended < 1 + round % 2 * 7 {
            server.serve(
                &mut deferred,
                |deferred, request| match request.data().read::<u32>() {
                    Some(number) if number % 2 == 1 => deferred.push(request.defer()),
                    _ => drop(request),
                },
                |_, _, _| (),
            );
            for request in deferred.drain(..).rev() {
                let number = request.data().read::<u32>().unwrap();
                assert!(request.reply(&number.to_le_bytes()).is_ok());
            }
            ended +=
                client.poll(|number, answer| answers.push((number, answer.unwrap().read::<u32>()))) as u32;
        }
        assert!(answers.iter().all(|(number, answer)| *answer == (number % 2 == 1).then_some(*number)));
    }
    assert!(here.failure().is_none());
}
