//! Each wait strategy ends for a request, a response, a new client and the end of the server; and blocking exchanges.

use std::sync::mpsc;

use crosstie::WaitStrategy;

use super::*;

const ALL: [WaitStrategy; 3] = [WaitStrategy::Spin, WaitStrategy::Adaptive, WaitStrategy::Park];
/// Long enough for the waiting side to park.
const PARK_TIME: Duration = Duration::from_millis(20);

#[test]
fn request_wakes_the_server_and_response_wakes_the_client() {
    for strategy in ALL {
        let config = Config { wait_strategy: strategy, ..Config::default() };
        let (mut server, client) = pair(&config);
        let mut client = client.with_wait_strategy(strategy);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for token in 0..10 {
                    std::thread::sleep(PARK_TIME / 4);
                    client.call(&token, token).unwrap();
                    assert_eq!(client.wait(None), Ok(true), "{strategy:?}");
                    assert_eq!(collect(&mut client, 1), [(token, expected_response(token))]);
                }
            });
            let mut served = 0;
            while served < 10 {
                assert!(server.wait(Some(TIMEOUT)), "{strategy:?}");
                server.serve(|request| {
                    std::thread::sleep(PARK_TIME / 4);
                    let response = expected_response(*request.message());
                    request.reply(&response).unwrap();
                    served += 1;
                });
            }
        });
    }
}

#[test]
fn wait_ends_at_its_timeout() {
    for strategy in ALL {
        let config = Config { wait_strategy: strategy, ..Config::default() };
        let (mut server, client) = pair(&config);
        let mut client = client.with_wait_strategy(strategy);
        server.poll();
        assert!(!server.wait(Some(Duration::ZERO)));
        let start = Instant::now();
        assert!(!server.wait(Some(PARK_TIME)));
        assert!(start.elapsed() >= PARK_TIME);
        assert_eq!(client.wait(None), Ok(false), "no call is in flight");
        client.call(&1, 1).unwrap();
        let start = Instant::now();
        assert_eq!(client.wait(Some(PARK_TIME)), Ok(false));
        assert!(start.elapsed() >= PARK_TIME);
        assert!(server.wait(Some(Duration::ZERO)));
        serve(&mut server);
        assert_eq!(client.wait(Some(Duration::ZERO)), Ok(true));
    }
}

#[test]
fn end_of_the_server_wakes_all_strategy_clients() {
    for strategy in ALL {
        let (server, waiter) = pair(&Config { wait_strategy: strategy, ..Config::default() });
        let name = fresh_name("local-test");
        let other = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
        let exchanger = Client::<u64, u64, u64>::connect(&name).unwrap();
        let (mut waiter, mut exchanger) =
            (waiter.with_wait_strategy(strategy), exchanger.with_wait_strategy(strategy));
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            let done = sender.clone();
            scope.spawn(move || {
                waiter.call(&1, 1).unwrap();
                done.send(format!("{:?}", waiter.wait(None))).unwrap();
            });
            let done = sender;
            scope.spawn(move || {
                let error = exchanger.exchange(&1, |_| panic!("no response")).unwrap_err();
                let gone = matches!(error, ExchangeError::Disconnected(Disconnected::ServerGone));
                assert!(gone, "{error}");
                assert_eq!(exchanger.in_flight(), 0);
                done.send("Err(ServerGone)".to_owned()).unwrap();
            });
            std::thread::sleep(PARK_TIME);
            drop((server, other));
            for _ in 0..2 {
                assert_eq!(receiver.recv_timeout(TIMEOUT).unwrap(), "Err(ServerGone)", "{strategy:?}");
            }
        });
    }
}

#[test]
fn exchange_does_not_take_other_responses() {
    let config = Config { queue_depth: 3, ..Config::default() };
    let (mut server, mut client) = pair(&config);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            client.call(&1_000_000, 5).unwrap();
            for i in 0..500 {
                assert_eq!(client.exchange(&i, |response| *response).unwrap(), expected_response(i));
                assert_eq!(client.in_flight(), 1);
            }
            client.call(&1_000_001, 6).unwrap();
            client.call(&1_000_002, 7).unwrap();
            assert!(matches!(client.exchange(&3, |_| ()), Err(ExchangeError::Full)));
            let mut received = collect(&mut client, 3);
            received.sort();
            assert_eq!(received, [5, 6, 7].map(|token| (token, expected_response(1_000_000 + token - 5))));
        });
        let (mut served, mut deferred) = (0, Vec::new());
        while served < 503 {
            assert!(server.wait(Some(TIMEOUT)));
            server.serve(|request| {
                served += 1;
                if *request.message() >= 1_000_000 {
                    deferred.push((*request.message(), request.defer()));
                } else {
                    let response = expected_response(*request.message());
                    request.reply(&response).unwrap();
                }
            });
        }
        for (request, ticket) in deferred {
            server.reply(ticket, &expected_response(request)).unwrap();
        }
        // Keep the server until the client has all responses.
        until("the client disconnects", || {
            server.poll();
            server.counters().disconnects == 1
        });
    });
}
