//! `ipc` and `delegation` between processes: stress, the cost of waiting, the death of a server, one server per name.
//!
//! `CROSSTIE_STRESS_SECONDS` sets the duration of the stress test.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::local_service::{self, Disconnected, Service, expected_response, is_request, request};
use crosstie::WaitStrategy;
use crosstie::ipc::{CreateError, ExchangeError};
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::footprint::processor_time;
use crosstie_testkit::fresh_name;
use crosstie_testkit::wait::TIMEOUT;

/// Runs the role that a test below gave to this process. Without a role it does nothing.
#[test]
fn child_process_role() {
    let Some(role) = child::task() else { return };
    let [role, service, name, seconds] = &role.split(' ').collect::<Vec<_>>()[..] else { panic!("{role}") };
    let duration = Duration::from_secs_f64(seconds.parse().unwrap());
    local_service::each!(
        S,
        if *service == S::NAME {
            match *role {
                "client" => call_for::<S>(name, duration),
                "server" => {
                    let server = S::create(name, 4, 8).unwrap();
                    child::write(b"serving");
                    serve_until::<S>(server, || false);
                }
                "idle" => wait_for::<S>(name, duration),
                _ => refused::<S>(name),
            }
        }
    );
}

fn start<S: Service>(role: &str, name: &str, duration: Duration) -> Child {
    Child::start(child_process_role, &format!("{role} {} {name} {}", S::NAME, duration.as_secs_f64()))
}

/// What a child process says before it ends.
fn outcome(mut child: Child) -> String {
    let outcome = child.read_text();
    child.join();
    outcome
}

fn start_server<S: Service>(name: &str) -> Child {
    let mut server = start::<S>("server", name, TIMEOUT);
    assert_eq!(server.read_text(), "serving");
    server
}

/// Makes calls and verifies the responses. Prints their number.
fn call_for<S: Service>(name: &str, duration: Duration) {
    let salt = u64::from(std::process::id());
    let mut client = S::connect(name).unwrap();
    let (end, mut next, mut count, mut pending) = (Instant::now() + duration, 0, 0u64, HashSet::new());
    let mut last = Instant::now();
    loop {
        while Instant::now() < end && S::call(&mut client, &request(next, salt), next).unwrap() {
            pending.insert(next);
            next += 1;
        }
        if pending.is_empty() && Instant::now() >= end {
            break;
        }
        S::wait_for_response(&mut client, Duration::from_millis(100)).unwrap();
        S::poll(&mut client, &mut |token, response| {
            assert!(pending.remove(&token), "{token} received two responses, or was never called");
            assert_eq!(*response, expected_response(&request(token, salt)));
            count += 1;
            last = Instant::now();
        })
        .unwrap();
        assert!(last.elapsed() < TIMEOUT, "no response");
    }
    child::write(count.to_string().as_bytes());
}

/// Serves until `over` returns true and all clients have disconnected.
fn serve_until<S: Service>(mut server: S::Server, mut over: impl FnMut() -> bool) {
    let mut deferred = Vec::new();
    while !over() || S::clients(&mut server) > 0 {
        S::wait_for_request(&mut server, Duration::from_millis(5));
        S::server_poll(&mut server);
        while let Some((request_words, ticket)) = S::receive(&mut server) {
            assert!(is_request(&request_words), "{request_words:x?}");
            match request_words[0] % 4 {
                0 => deferred.push((ticket, expected_response(&request_words))),
                _ => assert!(S::reply(&mut server, ticket, &expected_response(&request_words))),
            }
        }
        while let Some((ticket, response)) = deferred.pop() {
            assert!(S::reply(&mut server, ticket, &response));
        }
    }
    assert_eq!(S::violations(&server), 0);
}

#[test]
fn processes_get_their_own_responses() {
    let seconds = std::env::var("CROSSTIE_STRESS_SECONDS").ok().and_then(|s| s.parse().ok());
    let duration = Duration::from_secs_f64(seconds.unwrap_or(1.0));
    local_service::each!(S, {
        let name = fresh_name("local-processes");
        let server = S::create(&name, 4, 8).unwrap();
        let mut clients: Vec<Child> = (0..3).map(|_| start::<S>("client", &name, duration)).collect();
        serve_until::<S>(server, || clients.iter_mut().all(|other| other.try_wait().is_some()));
        let counts: Vec<u64> = clients.into_iter().map(|client| outcome(client).parse().unwrap()).collect();
        println!("{}: {counts:?} calls from three processes in {duration:?}", S::NAME);
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    });
}

/// Waits without any event, as a server and as a client. Prints the processor time of both.
fn wait_for<S: Service>(name: &str, duration: Duration) {
    let mut server = S::create(name, 4, 8).unwrap();
    let mut client = S::connect(name).unwrap();
    assert!(S::call(&mut client, &request(1, 1), 1).unwrap());
    let mut received = None;
    while received.is_none() {
        S::server_poll(&mut server);
        received = S::receive(&mut server);
    }
    let before = processor_time();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(!S::wait_for_request(&mut server, duration)));
        assert!(!S::wait_for_response(&mut client, duration).unwrap());
    });
    child::write((processor_time() - before).as_micros().to_string().as_bytes());
}

#[test]
fn waiting_uses_under_two_percent_of_a_core() {
    local_service::each!(S, {
        let used: u64 = outcome(start::<S>("idle", &fresh_name("local-processes"), Duration::from_secs(1)))
            .parse()
            .unwrap();
        println!("{}: an idle server and an idle client use {used} us of a second", S::NAME);
        // Two percent each.
        assert!(used < 2 * 20_000, "{}: {used} us", S::NAME);
    });
}

#[test]
fn killed_server_ends_all_calls() {
    local_service::each!(S, {
        let name = fresh_name("local-processes");
        for round in 0..5 {
            let mut server = start_server::<S>(&name);
            let mut idle = S::connect(&name).unwrap();
            let strategy = [WaitStrategy::Spin, WaitStrategy::Adaptive, WaitStrategy::Park][round % 3];
            let mut blocked = S::with_wait_strategy(S::connect(&name).unwrap(), strategy);
            assert_eq!(S::exchange(&mut idle, &request(1, 1)).unwrap(), expected_response(&request(1, 1)));
            let delay = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let error = loop {
                        if let Err(error) = S::exchange(&mut blocked, &request(4, 4)) {
                            break error;
                        }
                    };
                    (error, Instant::now())
                });
                std::thread::sleep(Duration::from_millis(5));
                let killed = Instant::now();
                server.kill();
                let (error, when) = thread.join().unwrap();
                let gone = matches!(error, ExchangeError::Disconnected(Disconnected::ServerGone));
                assert!(gone, "{error}");
                when.saturating_duration_since(killed)
            });
            println!("{}, round {round}: a blocked call ended {delay:?} after the kill", S::NAME);
            assert!(delay < Duration::from_secs(2), "{delay:?}");
            assert!(S::wait_for_response(&mut blocked, Duration::ZERO).unwrap_err().is_server_gone());
            let start = Instant::now();
            while S::call(&mut idle, &request(2, 2), 2).is_ok() {
                assert!(start.elapsed() < Duration::from_secs(2), "a later call is still accepted");
            }
            let error = S::reconnect(&mut idle).unwrap_err();
            assert!(matches!(error, crosstie::ipc::ConnectError::NoServer { .. }), "{error}");
        }
    });
}

/// Tries to create a server, and prints the result.
fn refused<S: Service>(name: &str) {
    let result = match S::create(name, 4, 8) {
        Err(CreateError::NameTaken { .. }) => "taken".to_owned(),
        Err(error) => error.to_string(),
        Ok(_) => "created".to_owned(),
    };
    child::write(result.as_bytes());
}

#[test]
fn name_has_one_live_server_among_all_processes() {
    local_service::each!(S, {
        let name = fresh_name("local-processes");
        let server = S::create(&name, 4, 8).unwrap();
        assert_eq!(outcome(start::<S>("refused", &name, TIMEOUT)), "taken");
        drop(server);
        assert_eq!(outcome(start::<S>("refused", &name, TIMEOUT)), "created");
        for _ in 0..5 {
            let mut server = start_server::<S>(&name);
            let taken = S::create(&name, 4, 8).map(drop);
            assert!(matches!(taken, Err(CreateError::NameTaken { .. })), "{taken:?}");
            server.kill();
            // The name is free when the process has ended.
            drop(S::create(&name, 4, 8).unwrap());
        }
    });
}
