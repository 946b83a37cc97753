//! Each way of waiting ends for a request, an answer, a client's coming and a server's end; and the blocking round trip.

use std::sync::mpsc;

use crosstie::WaitStrategy;

use super::*;

const ALL: [WaitStrategy; 3] = [WaitStrategy::Spin, WaitStrategy::Adaptive, WaitStrategy::Park];
/// Long enough to be parked.
const A_WHILE: Duration = Duration::from_millis(20);

#[test]
fn a_request_wakes_the_server_and_an_answer_the_client() {
    for waiting in ALL {
        let config = Config { wait_strategy: waiting, ..Config::default() };
        let (mut server, client) = pair(&config);
        let mut client = client.with_wait_strategy(waiting);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for token in 0..10 {
                    std::thread::sleep(A_WHILE / 4);
                    client.call(&token, token).unwrap();
                    assert_eq!(client.wait(None), Ok(true), "{waiting:?}");
                    assert_eq!(collect(&mut client, 1), [(token, answer(token))]);
                }
            });
            let mut served = 0;
            while served < 10 {
                assert!(server.wait(Some(PATIENCE)), "{waiting:?}");
                server.poll();
                while let Some(request) = server.recv() {
                    std::thread::sleep(A_WHILE / 4);
                    let response = answer(*request.message());
                    request.reply(&response).unwrap();
                    served += 1;
                }
            }
        });
    }
}

#[test]
fn waiting_ends_when_its_time_is_over() {
    for waiting in ALL {
        let config = Config { wait_strategy: waiting, ..Config::default() };
        let (mut server, client) = pair(&config);
        let mut client = client.with_wait_strategy(waiting);
        server.poll();
        assert!(!server.wait(Some(Duration::ZERO)));
        let begun = Instant::now();
        assert!(!server.wait(Some(A_WHILE)));
        assert!(begun.elapsed() >= A_WHILE);
        assert_eq!(client.wait(None), Ok(false), "nothing is under way");
        client.call(&1, 1).unwrap();
        let begun = Instant::now();
        assert_eq!(client.wait(Some(A_WHILE)), Ok(false));
        assert!(begun.elapsed() >= A_WHILE);
        assert!(server.wait(Some(Duration::ZERO)));
        serve(&mut server);
        assert_eq!(client.wait(Some(Duration::ZERO)), Ok(true));
    }
}

#[test]
fn the_end_of_the_server_wakes_everybody() {
    for waiting in ALL {
        let (server, waiter) = pair(&Config { wait_strategy: waiting, ..Config::default() });
        let name = fresh_name();
        let other = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
        let exchanger = Client::<u64, u64, u64>::connect(&name).unwrap();
        let (mut waiter, mut exchanger) =
            (waiter.with_wait_strategy(waiting), exchanger.with_wait_strategy(waiting));
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            let done = tell.clone();
            scope.spawn(move || {
                waiter.call(&1, 1).unwrap();
                done.send(format!("{:?}", waiter.wait(None))).unwrap();
            });
            let done = tell;
            scope.spawn(move || {
                let error = exchanger.exchange(&1, |_| panic!("no answer")).unwrap_err();
                let gone = matches!(error, CallError::Disconnected { cause: Disconnected::ServerGone, .. });
                assert!(gone, "{error}");
                assert_eq!(exchanger.in_flight(), 0);
                done.send("Err(ServerGone)".to_owned()).unwrap();
            });
            std::thread::sleep(A_WHILE);
            drop((server, other));
            for _ in 0..2 {
                assert_eq!(told.recv_timeout(PATIENCE).unwrap(), "Err(ServerGone)", "{waiting:?}");
            }
        });
    }
}

#[test]
fn exchanges_leave_other_calls_alone() {
    let config = Config { queue_depth: 3, ..Config::default() };
    let (mut server, mut client) = pair(&config);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            client.call(&1_000_000, 5).unwrap();
            for i in 0..500 {
                assert_eq!(client.exchange(&i, |response| *response).unwrap(), answer(i));
                assert_eq!(client.in_flight(), 1);
            }
            client.call(&1_000_001, 6).unwrap();
            client.call(&1_000_002, 7).unwrap();
            assert!(matches!(client.exchange(&3, |_| ()), Err(CallError::Full(()))));
            let mut got = collect(&mut client, 3);
            got.sort();
            assert_eq!(got, [5, 6, 7].map(|token| (token, answer(1_000_000 + token - 5))));
        });
        let (mut served, mut later) = (0, Vec::new());
        while served < 503 {
            assert!(server.wait(Some(PATIENCE)));
            server.poll();
            while let Some(request) = server.recv() {
                served += 1;
                if *request.message() >= 1_000_000 {
                    later.push((*request.message(), request.defer()));
                } else {
                    let response = answer(*request.message());
                    request.reply(&response).unwrap();
                }
            }
        }
        for (request, ticket) in later {
            server.reply(ticket, &answer(request)).unwrap();
        }
        // Until the client has it all.
        until("the client leaves", || {
            server.poll();
            server.counters().disconnects == 1
        });
    });
}
