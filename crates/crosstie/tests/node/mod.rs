//! What `ipc` and `delegation` promise alike. The test program of each includes this and says which one `service` is.

mod life;
mod limits;
mod oracle;
mod stress;
mod wait_strategies;

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::service::*;

/// After this long something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("node-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A server and its client, of numbers.
fn pair(config: &Config) -> (Server<u64, u64>, Client<u64, u64, u64>) {
    let name = fresh_name();
    let server = Server::create(&name, config).unwrap();
    (server, Client::connect(&name).unwrap())
}

fn answer(request: u64) -> u64 {
    request.rotate_left(17) ^ 0x5555
}

/// Answers everything that is there; says how much that was.
fn serve(server: &mut Server<u64, u64>) -> usize {
    let mut count = 0;
    server.poll();
    while let Some(request) = server.recv() {
        let response = answer(*request.message());
        request.reply(&response).unwrap();
        count += 1;
    }
    count
}

/// Receives `count` requests, in order, and answers none.
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

/// Polls until so many answers are there; tokens and answers.
fn collect(client: &mut Client<u64, u64, u64>, count: usize) -> Vec<(u64, u64)> {
    let mut got = Vec::new();
    until("answers arrive", || {
        client.poll(|token, response| got.push((token, *response))).unwrap();
        got.len() >= count
    });
    assert_eq!(got.len(), count);
    got
}
