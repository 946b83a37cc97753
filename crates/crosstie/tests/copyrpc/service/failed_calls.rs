//! Calls that time out, and calls whose peer or connection ends.

use crosstie_testkit::child::{self, Child};

use super::*;

#[test]
fn calls_time_out_whether_made_or_queued() {
    let pair = Pair::new(&ring(1024, 4));
    let soon = Duration::from_millis(30);
    let patient: Vec<_> = (0..2).map(|number| pair.client.call::<Double>(number)).collect();
    let hasty: Vec<_> = (2..10).map(|number| pair.client.call_within::<Double>(number, soon)).collect();
    let behind: Vec<_> = (10..12).map(|number| pair.client.call::<Double>(number)).collect();
    assert!(pair.driver.counters().waited >= 6);
    // The server does nothing.
    let ended = pair.driver.run_until(join_all(hasty));
    assert!(ended.iter().all(|end| *end == Err(Error::Failed(CallFailed::TimedOut))), "{ended:?}");
    // Also behind calls that are never answered.
    let _front: Vec<_> = (0..8).map(|number| pair.client.call::<Double>(number)).collect();
    let late = pair.driver.run_until(pair.client.call_within::<Double>(9, soon));
    assert_eq!(late, Err(Error::Failed(CallFailed::TimedOut)));
    // Now the server answers. Responses to timed-out calls are dropped, and queued calls continue.
    let answers = pair.finish(&mut service(), join_all(patient.into_iter().chain(behind)));
    assert_eq!(answers, [Ok(0), Ok(2), Ok(20), Ok(22)]);
}

#[test]
fn closed_peer_ends_its_calls_and_no_others() {
    let mut pair = Pair::new(&ring(1024, 64));
    let mut service = service();
    let (other, _connection) = connect(&pair.driver, &pair.server, &ring(1024, 64));
    let calls: Vec<_> = (0..100).map(|number| pair.client.call::<Later>(number)).collect();
    let survivor = other.call::<Later>(1);
    while service.state().deferred.is_empty() {
        pair.turn(&mut service);
    }
    drop(pair.connection.take());
    let ended = pair.finish(&mut service, join_all(calls));
    let failure = pair.client.failure().expect("it is over");
    assert!(ended.iter().all(|end| *end == Err(Error::Failed(failure.into()))), "{ended:?}");
    assert_eq!(peek(&mut pair.client.call::<Double>(1)), Poll::Ready(Err(Error::Failed(failure.into()))));

    let mut delivered = 0;
    while delivered == 0 {
        pair.turn(&mut service);
        for (number, reply) in service.state_mut().deferred.drain(..) {
            // Replies on the connection that has ended fail.
            delivered += usize::from(reply.send(number).is_ok());
        }
    }
    assert_eq!(pair.finish(&mut service, survivor), Ok(1));
}

#[test]
fn close_ends_calls_made_and_queued() {
    let closed = Err(Error::Failed(Failure::Closed.into()));
    let pair = Pair::new(&ring(1024, 4));
    let calls: Vec<_> = (0..10).map(|number| pair.client.call::<Double>(number)).collect();
    let clone = pair.client.clone();
    clone.close();
    assert_eq!(pair.driver.run_until(join_all(calls)), vec![closed; 10]);
    assert_eq!(pair.client.failure(), Some(Failure::Closed));

    // Dropping the driver ends all calls.
    let Pair { driver, client, server: _server, connection: _connection, .. } = Pair::new(&ring(1024, 4));
    let calls: Vec<_> = (0..10).map(|number| client.call::<Double>(number)).collect();
    drop(driver);
    for mut call in calls {
        assert_eq!(peek(&mut call), Poll::Ready(closed));
    }
    assert_eq!(peek(&mut client.call::<Double>(1)), Poll::Ready(closed));
}

/// A process that receives requests and answers only some, until it is killed. It does nothing unless a test starts it.
#[test]
fn victim() {
    if !child::is_child() {
        return;
    }
    let context = open::<()>();
    let connection = context.create_connection(&ring(4096, 64)).unwrap();
    child::write(connection.address().as_bytes());
    let theirs = ConnectionAddress::read_from_bytes(&child::read()).unwrap();
    connection.connect(&theirs, &ConnectConfig::default()).unwrap();
    let mut service = service();
    loop {
        service.poll(&context, |(), _| ());
    }
}

#[test]
fn calls_to_a_killed_process_end_while_the_driver_sleeps() {
    let driver = Driver::new(open());
    let client = driver.create_client(&ring(4096, 64)).unwrap();
    let mut child = Child::start(victim, "answers");
    child.write(client.address().as_bytes());
    let theirs = ConnectionAddress::read_from_bytes(&child.read()).unwrap();
    client.connect(&theirs, &ConnectConfig::default()).unwrap();
    assert_eq!(driver.run_until(client.call::<Double>(4)), Ok(8));
    // More calls than fit into the ring, and none of them is ever answered.
    let calls = join_all((0..200).map(|number| client.call::<Later>(number)));
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        child.kill();
    });
    let ended = driver.run_until(calls);
    killer.join().unwrap();
    let failure = client.failure().expect("it is over");
    assert!(matches!(failure, Failure::Broken(_)), "{failure}");
    assert_eq!(ended, vec![Err(Error::Failed(failure.into())); 200]);
}

/// A call that waits for room and has a deadline ends a wait of its driver.
#[test]
fn wait_ends_at_the_deadline_of_a_queued_call() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let pair = Pair::new(&ring(1024, 1));
        let _front = pair.client.call::<Double>(0);
        let mut queued = pair.client.call_within::<Double>(1, Duration::from_millis(50));
        assert_eq!(pair.driver.counters().waited, 1);
        let mut waits = 0;
        let result = loop {
            pair.driver.step();
            if let Poll::Ready(result) = peek(&mut queued) {
                break result;
            }
            pair.driver.wait(Duration::MAX);
            waits += 1;
        };
        done.send((result, waits)).unwrap();
    });
    let (result, waits) = ended.recv_timeout(Duration::from_secs(40)).expect("the wait sleeps for ever");
    assert_eq!(result, Err(Error::Failed(CallFailed::TimedOut)));
    assert!(waits <= 4, "{waits} waits until the deadline");
}

/// A response for which there is no bulk memory is not counted as answered.
#[test]
fn response_without_memory_is_counted_as_undelivered() {
    struct Long;
    impl Method for Long {
        const ID: u32 = 77;
        type Request = u64;
        type Response = [u8; 70_000];
    }
    let config = ConnectionConfig { bulk: 70_008, ..ring(4096, 16) };
    let (driver, server) = (Driver::new(open()), open());
    // The client has bulk memory for two responses, the server for one at a time.
    let client = driver.create_client(&ConnectionConfig { bulk: 1 << 20, ..config }).unwrap();
    let connection = server.create_connection(&config).unwrap();
    connect_both(&client, &connection);
    let mut service = Service::<(), ()>::new(()).on::<Long>(|(), number| [number as u8; 70_000]);
    let calls: Vec<_> = (0..2).map(|number| client.call::<Long>(number)).collect();
    driver.step();
    while service.poll(&server, |(), _| ()) < 2 {
        assert_eq!(service.counters().answered, 0, "both requests are in one batch");
    }
    let counters = service.counters();
    assert_eq!((counters.answered, counters.undelivered), (1, 1), "{counters:?}");
    let mut all = std::pin::pin!(join_all(calls));
    let answers = loop {
        driver.step();
        server.poll(|(), _| ());
        if let Poll::Ready(answers) = peek(&mut all) {
            break answers;
        }
    };
    assert!(answers[0].is_ok());
    assert_eq!(answers[1].as_ref().err(), Some(&Error::Unanswered));
}

/// The server has bulk memory for one payload: the request gives it back before the response needs it.
#[test]
fn long_request_and_its_long_response_use_the_same_bulk_memory() {
    struct Echo;
    impl Method for Echo {
        const ID: u32 = 78;
        type Request = [u8; 70_000];
        type Response = [u8; 70_000];
    }
    let config = ConnectionConfig { bulk: 70_008, ..ring(4096, 16) };
    let (driver, server) = (Driver::new(open()), open());
    let (client, _connection) = connect(&driver, &server, &config);
    let mut service = Service::<(), ()>::new(()).on::<Echo>(|(), bytes| bytes);
    for number in 0..3 {
        let mut call = client.call::<Echo>([number; 70_000]);
        let answer = loop {
            driver.step();
            service.poll(&server, |(), _| ());
            if let Poll::Ready(answer) = peek(&mut call) {
                break answer;
            }
        };
        assert!(answer == Ok([number; 70_000]), "{:?}", answer.err());
    }
    assert_eq!(service.counters().answered, 3);
}

/// The requests behind it are handled by the next poll, in order.
#[test]
fn panicking_handler_in_a_batch_takes_nothing_else_with_it() {
    let pair = Pair::new(&ConnectionConfig::default());
    let mut service = service();
    for panics in [0, 10, 19] {
        let mut calls = Vec::new();
        let mut panicking = None;
        for number in 0..20 {
            calls.push(pair.client.call::<Double>(number));
            if number == panics {
                panicking = Some(pair.client.call::<Choose>(Choice::Panic));
            }
        }
        pair.driver.step();
        let mut panicked = false;
        while !panicked {
            panicked = catch_unwind(AssertUnwindSafe(|| service.poll(&pair.server, |(), _| ()))).is_err();
        }
        assert_eq!(service.state().order, (0..=panics).collect::<Vec<_>>());
        let answers = pair.finish(&mut service, join_all(calls));
        assert!(answers.into_iter().eq((0..20).map(|number| Ok(2 * number))));
        assert_eq!(pair.finish(&mut service, panicking.unwrap()), Err(Error::Unanswered));
        assert_eq!(std::mem::take(&mut service.state_mut().order), (0..20).collect::<Vec<_>>());
    }
}
