//! Threads that verify every response, while the server replies in any order. Runs for about a second, or for
//! `CROSSTIE_STRESS_SECONDS`.

use std::sync::atomic::AtomicBool;

use crosstie::WaitStrategy;

use super::*;

fn duration() -> Duration {
    let seconds = std::env::var("CROSSTIE_STRESS_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(0.7))
}

/// Keeps calls in flight until told to stop. Returns the number of responses; each call must get its own one, once.
fn call_until(name: &str, salt: u64, strategy: WaitStrategy, stop: &AtomicBool) -> u64 {
    let mut client = Client::<[u64; 4], [u64; 4], u64>::connect(name).unwrap().with_wait_strategy(strategy);
    let (mut next, mut count, mut pending) = (salt << 40, 0u64, std::collections::HashSet::new());
    let request_for = |token: u64| [token, !token, token ^ salt, salt];
    while !stop.load(Relaxed) || client.in_flight() > 0 {
        while !stop.load(Relaxed) && client.call(&request_for(next), next).is_ok() {
            pending.insert(next);
            next += 1;
        }
        if client.in_flight() > 0 {
            assert!(client.wait(Some(TIMEOUT)).unwrap(), "no response within {TIMEOUT:?}");
        }
        client
            .poll(|token, response| {
                assert!(pending.remove(&token), "{token:#x} received two responses, or was never called");
                assert_eq!(
                    *response,
                    request_for(token).map(expected_response),
                    "the response to {token:#x}"
                );
                count += 1;
            })
            .unwrap();
        // Reconnect now and then.
        if count % 10_007 == 10_006 && client.in_flight() == 0 {
            client.reconnect().unwrap();
        }
    }
    assert!(pending.is_empty());
    count
}

#[test]
fn threads_get_their_own_responses() {
    check_responses_of_threads(&Config::default());
}

/// With several queue depths and wait strategies in place of those of the configuration.
pub(crate) fn check_responses_of_threads(config: &Config) {
    for (strategy, depth) in [
        (WaitStrategy::Spin, 1),
        (WaitStrategy::Adaptive, 8),
        (WaitStrategy::Park, 3),
        (WaitStrategy::Adaptive, 1),
    ] {
        let name = fresh_name("local-test");
        let config = Config { queue_depth: depth, wait_strategy: strategy, ..config.clone() };
        let mut server = Server::<[u64; 4], [u64; 4]>::create(&name, &config).unwrap();
        let stop = AtomicBool::new(false);
        let end = Instant::now() + duration() / 2;
        let clients = if strategy == WaitStrategy::Spin { 1 } else { 3 };
        std::thread::scope(|scope| {
            let (name, stop) = (&name, &stop);
            let clients: Vec<_> = (1..=clients)
                .map(|salt| scope.spawn(move || call_until(name, salt, strategy, stop)))
                .collect();
            let mut deferred = Vec::new();
            let mut turn = 0u64;
            while clients.iter().any(|client| !client.is_finished()) {
                if Instant::now() > end {
                    stop.store(true, Relaxed);
                }
                server.wait(Some(Duration::from_millis(5)));
                server.serve(|request| {
                    turn = turn.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let response = request.message().map(expected_response);
                    match turn >> 62 {
                        0 => deferred.push((request.defer(), response)),
                        _ => request.reply(&response).unwrap(),
                    }
                });
                while let Some((ticket, response)) = deferred.pop() {
                    server.reply(ticket, &response).unwrap();
                }
            }
            let counts: Vec<u64> = clients.into_iter().map(|client| client.join().unwrap()).collect();
            println!("{strategy:?}, depth {depth}: {counts:?} calls");
            assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        });
        assert_eq!(server.counters().violations, 0);
    }
}
