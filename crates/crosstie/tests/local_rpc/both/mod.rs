//! Tests that `ipc` and `delegation` have in common. The test program of each includes this module, and `service` is the
//! one under test.

mod lifetime;
mod limits;
mod oracle;
pub(crate) mod stress;
mod wait_strategies;

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crosstie_testkit::fresh_name;
use crosstie_testkit::wait::{TIMEOUT, until};

use super::service::{self, *};

/// A server and its client, with `u64` as message type.
fn pair(config: &Config) -> (Server<u64, u64>, Client<u64, u64, u64>) {
    let name = fresh_name("local-test");
    let server = Server::create(&name, config).unwrap();
    (server, Client::connect(&name).unwrap())
}

fn expected_response(request: u64) -> u64 {
    request.rotate_left(17) ^ 0x5555
}

/// Replies to all requests that are there. Returns their number.
fn serve(server: &mut Server<u64, u64>) -> usize {
    server.serve(|request| {
        let response = expected_response(*request.message());
        request.reply(&response).unwrap();
    })
}

/// Receives `count` requests, in order, without a reply.
fn defer(server: &mut Server<u64, u64>, count: usize) -> Vec<(u64, Ticket)> {
    let mut deferred = Vec::new();
    until("requests arrive", || {
        server.poll();
        while deferred.len() < count
            && let Some(request) = server.recv()
        {
            deferred.push((*request.message(), request.defer()));
        }
        deferred.len() == count
    });
    deferred
}

/// Polls until `count` responses have arrived. Returns tokens and responses.
fn collect(client: &mut Client<u64, u64, u64>, count: usize) -> Vec<(u64, u64)> {
    let mut received = Vec::new();
    until("responses arrive", || {
        client.poll(|token, response| received.push((token, *response))).unwrap();
        received.len() >= count
    });
    assert_eq!(received.len(), count);
    received
}
