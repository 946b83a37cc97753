//! Tests of `delegation` through its public API: threads and processes, errors, and the end of processes; and those in
//! common with `ipc`.

use crosstie::delegation as service;

#[path = "both/mod.rs"]
mod both;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crosstie::WaitStrategy;
use crosstie::delegation::*;
use crosstie_testkit::child::{self, Child};

/// A test that waits longer than this has failed.
const TIMEOUT: Duration = Duration::from_secs(20);

fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("delegation-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "timed out");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn expected_response(request: u64) -> u64 {
    request.rotate_left(17) ^ 0x5555
}

/// Keeps `depth` calls in flight until `end`. Returns the number of responses, all of which must be correct.
fn call_until(name: &str, depth: usize, strategy: WaitStrategy, end: Instant) -> u64 {
    let mut client = Client::<u64, u64, u64>::connect(name).unwrap().with_wait_strategy(strategy);
    let mut count = 0u64;
    let mut next = u64::from(std::process::id()) << 40;
    while Instant::now() < end || client.in_flight() > 0 {
        while client.in_flight() < depth && Instant::now() < end {
            match client.call(&next, next) {
                Ok(()) => next += 1,
                Err(CallError { cause: NotCalled::RingFull, .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(client.wait(Some(TIMEOUT)).unwrap() || client.in_flight() == 0, "no response");
        count +=
            client.poll(|token, response| assert_eq!(*response, expected_response(token))).unwrap() as u64;
    }
    count
}

/// Serves until told to stop. Replies to every other request later, in reverse order.
fn serve_until(server: &mut Server<u64, u64>, stop: &AtomicBool) {
    let mut deferred = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        server.wait(Some(Duration::from_millis(5)));
        while let Some(request) = server.recv() {
            let response = expected_response(*request.message());
            if response.is_multiple_of(2) {
                request.reply(&response).unwrap();
            } else {
                deferred.push((request.defer(), response));
            }
        }
        while let Some((ticket, response)) = deferred.pop() {
            server.reply(ticket, &response).unwrap();
        }
    }
}

#[test]
fn threads_get_their_own_responses() {
    for strategy in [WaitStrategy::Adaptive, WaitStrategy::Park] {
        // A small ring, which is full at times.
        let config = Config {
            max_clients: 4,
            queue_depth: 8,
            ring_depth: 16,
            wait_strategy: strategy,
            ..Config::default()
        };
        let name = fresh_name();
        let mut server = Server::<u64, u64>::create(&name, &config).unwrap();
        let end = Instant::now() + Duration::from_secs(2);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let name = &name;
            let clients: Vec<_> =
                [1, 3, 8, 8].map(|depth| scope.spawn(move || call_until(name, depth, strategy, end))).into();
            let serving = scope.spawn(|| serve_until(&mut server, &stop));
            let counts: Vec<u64> = clients.into_iter().map(|client| client.join().unwrap()).collect();
            stop.store(true, Ordering::Relaxed);
            serving.join().unwrap();
            println!("{strategy:?}: {counts:?} responses");
            assert!(counts.iter().all(|count| *count > 0));
        });
        let counters = server.counters();
        assert_eq!((counters.stale, counters.invalid, counters.violations), (0, 0, 0));
        // On a busy machine a thread may stand still for so long that its position is passed; others leave that slot out meanwhile.
        assert!(counters.skipped == 0 || counters.passed > 0, "{counters:?}");
    }
}

/// What the child processes do. Without a role it does nothing.
#[test]
fn child_process_role() {
    let Some(role) = child::task() else { return };
    let (role, name) = role.split_once(' ').unwrap();
    match role {
        "call" => {
            let end = Instant::now() + Duration::from_secs(2);
            let count = call_until(name, 8, WaitStrategy::Adaptive, end);
            child::write(&count.to_le_bytes());
        }
        "serve" => {
            let mut server = Server::<u64, u64>::create(name, &Config::default()).unwrap();
            child::write(b"ready");
            serve_until(&mut server, &AtomicBool::new(false));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn processes_get_their_own_responses() {
    let name = fresh_name();
    let mut server = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    let task = format!("call {name}");
    let clients = [(); 2].map(|()| Child::start(child_process_role, &task));
    let stop = AtomicBool::new(false);
    let counts: Vec<u64> = std::thread::scope(|scope| {
        scope.spawn(|| serve_until(&mut server, &stop));
        let count = |mut client: Child| {
            let count = u64::from_le_bytes(client.read().try_into().unwrap());
            client.join();
            count
        };
        let counts = clients.map(count).into();
        stop.store(true, Ordering::Relaxed);
        counts
    });
    println!("{counts:?} responses");
    assert!(counts.iter().all(|count| *count > 0));
    until(|| server.clients() == 0);
    let counters = server.counters();
    assert_eq!((counters.connects, counters.requests), (2, counts.iter().sum()));
}

fn start_server(name: &str) -> Child {
    let mut child = Child::start(child_process_role, &format!("serve {name}"));
    child.read();
    child
}

#[test]
fn dead_server_ends_all_calls_and_a_new_one_takes_its_name() {
    for strategy in [WaitStrategy::Spin, WaitStrategy::Adaptive, WaitStrategy::Park] {
        let name = fresh_name();
        let mut child = start_server(&name);
        let mut client = Client::<u64, u64, u64>::connect(&name).unwrap().with_wait_strategy(strategy);
        assert_eq!(client.exchange(&7, |response| *response).unwrap(), expected_response(7));
        let taken = Server::<u64, u64>::create(&name, &Config::default());
        assert!(matches!(taken, Err(CreateError::NameTaken { .. })), "{taken:?}");

        // A stopped server is alive: calls are accepted, and wait.
        let (pid, mut status) = (child.id() as i32, 0);
        // SAFETY: a signal to our own child, and a wait until it has stopped.
        unsafe {
            libc::kill(pid, libc::SIGSTOP);
            assert_eq!(libc::waitpid(pid, &raw mut status, libc::WUNTRACED), pid);
        }
        for token in 0..3 {
            client.call(&token, token).unwrap();
        }
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let start = Instant::now();
                let end = client.wait(None);
                (end, start.elapsed())
            });
            std::thread::sleep(Duration::from_millis(150));
            child.kill();
            let (end, after) = waiter.join().unwrap();
            println!("{strategy:?}: the wait ended after {after:?}");
            assert_eq!(end, Err(Disconnected::ServerGone));
        });
        assert_eq!(client.poll(|_, _| panic!("no response")), Err(Disconnected::ServerGone));
        let refused = client.call(&1, 99);
        assert!(matches!(
            refused,
            Err(CallError { cause: NotCalled::Disconnected(Disconnected::ServerGone), token: 99 })
        ));
        assert!(matches!(client.reconnect(), Err(ConnectError::NoServer { .. })));

        let mut child = start_server(&name);
        let mut lost = Vec::new();
        client.disconnect(|token| lost.push(token));
        lost.sort();
        assert_eq!(lost, [0, 1, 2]);
        client.reconnect().unwrap();
        assert_eq!(client.exchange(&8, |response| *response).unwrap(), expected_response(8));
        child.kill();
    }
}

#[test]
fn responses_sent_before_the_end_still_arrive() {
    let name = fresh_name();
    let mut server = Server::<u64, u64>::create(&name, &Config::default()).unwrap();
    let mut client = Client::<u64, u64, u64>::connect(&name).unwrap();
    for token in 0..3 {
        client.call(&token, token).unwrap();
    }
    // Reply to the last request only.
    drop(server.recv().unwrap().defer());
    drop(server.recv().unwrap().defer());
    server.recv().unwrap().reply(&5).unwrap();
    drop(server);
    let mut responses = Vec::new();
    until(|| client.poll(|token, response| responses.push((token, *response))).is_err());
    assert_eq!(responses, [(2, 5)]);
    assert_eq!(client.in_flight(), 2);
}

#[test]
fn errors_name_their_cause_and_hand_back_tokens() {
    let name = fresh_name();
    assert!(matches!(Client::<u64, u64>::connect(&name), Err(ConnectError::NoServer { .. })));
    assert!(matches!(Client::<u64, u64>::connect("a b"), Err(ConnectError::BadName { .. })));
    for config in [
        Config { max_clients: 0, ..Config::default() },
        Config { queue_depth: MAX_QUEUE_DEPTH + 1, ..Config::default() },
        Config { ring_depth: 0, ..Config::default() },
        Config { request_limit: MAX_MESSAGE + 1, ..Config::default() },
    ] {
        let created = Server::<[u8], [u8]>::create(&name, &config);
        assert!(matches!(created, Err(CreateError::Limit { .. })), "{created:?}");
    }

    let config = Config {
        max_clients: 2,
        queue_depth: 3,
        ring_depth: 4,
        request_limit: 10,
        response_limit: 20,
        ..Config::default()
    };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let typed = Client::<u64, [u8]>::connect(&name);
    assert!(matches!(typed, Err(ConnectError::Mismatch { .. })), "{typed:?}");
    let mut first = Client::<[u8], [u8], u32>::connect(&name).unwrap();
    let mut second = Client::<[u8], [u8], u32>::connect(&name).unwrap();
    let third = Client::<[u8], [u8], u32>::connect(&name);
    assert!(matches!(third, Err(ConnectError::Full { limit: 2 })), "{third:?}");

    let long = first.call(&[0; 11], 1);
    assert!(
        matches!(long, Err(CallError { cause: NotCalled::TooLong { len: 11, limit: 10 }, token: 1 })),
        "{long:?}"
    );
    for token in 0..3 {
        first.call(b"hello", token).unwrap();
    }
    assert!(matches!(first.call(b"", 4), Err(CallError { cause: NotCalled::Full, token: 4 })));
    second.call(b"", 5).unwrap();
    assert!(matches!(second.call(b"", 6), Err(CallError { cause: NotCalled::RingFull, token: 6 })));

    let ticket = server.recv().unwrap().defer();
    let Err(ReplyError { cause: NotReplied::TooLong { len: 21, limit: 20 }, ticket: Some(ticket) }) =
        server.reply(ticket, &[0; 21])
    else {
        panic!("too long")
    };
    let mut other = Server::<[u8], [u8]>::create(&fresh_name(), &config).unwrap();
    let Err(ReplyError { cause: NotReplied::WrongServer, ticket: Some(ticket) }) = other.reply(ticket, b"")
    else {
        panic!("the ticket of another server was accepted")
    };
    server.reply(ticket, b"world").unwrap();
    assert_eq!(first.poll(|token, response| assert_eq!((token, response), (0, &b"world"[..]))), Ok(1));
    // A request was received, so there is room.
    second.call(b"", 6).unwrap();
}

#[test]
fn long_messages_arrive_unchanged() {
    let name = fresh_name();
    let config = Config { request_limit: 70_000, response_limit: 70_000, ring_depth: 4, ..Config::default() };
    let mut server = Server::<[u8], [u8]>::create(&name, &config).unwrap();
    let mut client = Client::<[u8], [u8]>::connect(&name).unwrap();
    for len in [0, 1, 47, 48, 49, 1000, 1024, 4097, 70_000] {
        let request: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
        client.call(&request, ()).unwrap();
        let received = server.recv().unwrap();
        assert_eq!(received.message(), request);
        let response: Vec<u8> = received.message().iter().map(|byte| !byte).collect();
        received.reply(&response).unwrap();
        assert_eq!(client.poll(|(), received| assert_eq!(received, response)), Ok(1));
    }
}
