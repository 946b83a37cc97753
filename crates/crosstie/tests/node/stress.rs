//! Threads that verify every answer, while the server answers in any order. A second, or what `CROSSTIE_STRESS_SECONDS` says.

use std::sync::atomic::AtomicBool;

use crosstie::WaitStrategy;

use super::*;

fn duration() -> Duration {
    let seconds = std::env::var("CROSSTIE_STRESS_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(0.7))
}

/// Keeps calls under way until told to stop; returns how many were answered, each once and with its own answer.
fn call_until(name: &str, salt: u64, waiting: WaitStrategy, stop: &AtomicBool) -> u64 {
    let mut client = Client::<[u64; 4], [u64; 4], u64>::connect(name).unwrap().with_wait_strategy(waiting);
    let (mut next, mut count, mut pending) = (salt << 40, 0u64, std::collections::HashSet::new());
    let asked = |token: u64| [token, !token, token ^ salt, salt];
    while !stop.load(Relaxed) || client.in_flight() > 0 {
        while !stop.load(Relaxed) && client.call(&asked(next), next).is_ok() {
            pending.insert(next);
            next += 1;
        }
        if client.in_flight() > 0 {
            assert!(client.wait(Some(PATIENCE)).unwrap(), "no answer within {PATIENCE:?}");
        }
        client
            .poll(|token, response| {
                assert!(pending.remove(&token), "{token:#x} was answered twice, or never asked");
                assert_eq!(*response, asked(token).map(answer), "the answer to {token:#x}");
                count += 1;
            })
            .unwrap();
        // Now and then one leaves and comes back.
        if count % 10_007 == 10_006 && client.in_flight() == 0 {
            client.reconnect().unwrap();
        }
    }
    assert!(pending.is_empty());
    count
}

#[test]
fn threads_get_their_own_answers() {
    for (waiting, depth) in [
        (WaitStrategy::Spin, 1),
        (WaitStrategy::Adaptive, 8),
        (WaitStrategy::Park, 3),
        (WaitStrategy::Adaptive, 1),
    ] {
        let name = fresh_name();
        let config = Config { queue_depth: depth, wait_strategy: waiting, ..Config::default() };
        let mut server = Server::<[u64; 4], [u64; 4]>::create(&name, &config).unwrap();
        let stop = AtomicBool::new(false);
        let end = Instant::now() + duration() / 2;
        let clients = if waiting == WaitStrategy::Spin { 1 } else { 3 };
        std::thread::scope(|scope| {
            let (name, stop) = (&name, &stop);
            let clients: Vec<_> = (1..=clients)
                .map(|salt| scope.spawn(move || call_until(name, salt, waiting, stop)))
                .collect();
            let mut later = Vec::new();
            let mut turn = 0u64;
            while clients.iter().any(|client| !client.is_finished()) {
                if Instant::now() > end {
                    stop.store(true, Relaxed);
                }
                server.wait(Some(Duration::from_millis(5)));
                server.poll();
                while let Some(request) = server.recv() {
                    turn = turn.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let response = request.message().map(answer);
                    match turn >> 62 {
                        0 => later.push((request.defer(), response)),
                        _ => request.reply(&response).unwrap(),
                    }
                }
                while let Some((ticket, response)) = later.pop() {
                    server.reply(ticket, &response).unwrap();
                }
            }
            let counts: Vec<u64> = clients.into_iter().map(|client| client.join().unwrap()).collect();
            println!("{waiting:?}, depth {depth}: {counts:?} calls");
            assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        });
        assert_eq!(server.counters().violations, 0);
    }
}
