//! Calls that end without a response: refused, too long, timed out, closed. Also calls from inside a poll.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use crosstie::copyrpc::{
    CallFailed, Config, ConnectError, Connection, ConnectionAddress, ConnectionConfig, Context, NotCalled,
    NotReplied, ReplyError,
};
use crosstie::device::ConnectConfig;
use crosstie_protocol::copyrpc::Refusal;
use zerocopy::FromBytes;

use crate::cases::ring;
use crate::load::{Caller, Load, ReplyMode, TIMEOUT, User, drive};
use crate::test_peer::TestPeer;

/// Polls until `done` returns true, or fails after a timeout.
pub(crate) fn poll_until<U>(
    context: &Context<U>,
    mut done: impl FnMut() -> bool,
    mut on: impl FnMut(U, Result<Vec<u8>, CallFailed>),
) {
    let begin = Instant::now();
    while !done() {
        context.poll(|user, answer| on(user, answer.map(|bytes| bytes.to_vec())));
        assert!(begin.elapsed() < TIMEOUT, "nothing comes: {:?}", context.counters());
        std::thread::yield_now();
    }
}

/// Answers each request with its own payload, until the other side sends `stop`.
pub(crate) fn serve_until_stop(side: &mut TestPeer, context: &Context<User>, connection: &Connection<User>) {
    let mut last = Instant::now();
    loop {
        context.poll(|user, answer| panic!("nothing was asked: {user:?} {answer:?}"));
        while let Some(request) = context.recv() {
            last = Instant::now();
            let bytes = request.data().to_vec();
            let stop = bytes == b"stop";
            // A response that is longer than the caller allows is dropped. So is the response to a request of another connection, which
            // the caller may have broken.
            let is_other = request.connection() != connection.id();
            if let Err(ReplyError { cause, .. }) = request.reply(&bytes) {
                assert!(
                    matches!(cause, NotReplied::TooLong { .. }) || is_other || connection.failure().is_some(),
                    "{cause}"
                );
            }
            if stop {
                context.flush();
                side.meet();
                return;
            }
        }
        assert!(last.elapsed() < TIMEOUT);
        std::thread::yield_now();
    }
}

pub(crate) fn send_stop(side: &mut TestPeer, context: &Context<User>, connection: &Connection<User>) {
    let mut stopped = false;
    let begin = Instant::now();
    while connection.call(b"stop", 4, (9, 9)).is_err() {
        context.poll(|_, _| ());
        assert!(begin.elapsed() < TIMEOUT, "refused for ever: {:?}", context.counters());
    }
    while !stopped {
        context.poll(|user, answer| stopped |= user == (9, 9) && answer.is_ok());
        assert!(begin.elapsed() < TIMEOUT, "no answer: {:?}", context.counters());
    }
    side.meet();
}

pub(crate) fn callbacks_may_call_and_nested_polls_do_nothing(side: &mut TestPeer) {
    let context = side.context::<User>();
    let connection = side.connect(&context, &ring(1024));
    let rounds = side.scaled(2000);
    let (answered, served) = (Cell::new(0), Cell::new(0));
    let refused = RefCell::new(Vec::new());
    let serve = || {
        while let Some(request) = context.recv() {
            let bytes = request.data().to_vec();
            assert!(request.reply(&bytes).is_ok());
            served.set(served.get() + 1);
        }
    };
    let call = |number: u64| {
        if let Err(error) = connection.call(&number.to_le_bytes(), 8, (0, number)) {
            assert!(error.cause.is_back_pressure());
            refused.borrow_mut().push(error.user.1);
        }
    };
    for number in 0..4 {
        call(number);
    }
    let mut next = 4;
    let begin = Instant::now();
    while answered.get() < rounds || served.get() < rounds {
        let again: Vec<u64> = refused.take();
        again.into_iter().for_each(&call);
        context.poll(|(_, number), answer| {
            let mut bytes = [0; 8];
            assert_eq!(answer.expect("an answer").copy_to(&mut bytes), 8);
            assert_eq!(u64::from_le_bytes(bytes), number);
            answered.set(answered.get() + 1);
            if next < rounds {
                call(next);
                next += 1;
            }
            serve();
            assert_eq!(context.poll(|_, _| panic!("a poll within a poll")), 0);
            context.flush();
            context.wait(Duration::ZERO);
            // The bytes of the response do not change during the callback.
            assert_eq!(answer.expect("an answer").to_vec(), number.to_le_bytes());
        });
        serve();
        std::thread::yield_now();
        assert!(begin.elapsed() < TIMEOUT, "{} answered, {} served", answered.get(), served.get());
    }
    context.flush();
    side.meet();
}

pub(crate) fn refused_calls_return_what_was_attached(side: &mut TestPeer) {
    let context = side.context::<User>();
    let lone = context.create_connection(&ConnectionConfig::default()).expect("a connection");
    let refused = lone.call(b"early", 0, (7, 7)).expect_err("not connected");
    assert_eq!((refused.cause, refused.user), (NotCalled::NotConnected, (7, 7)));
    assert_eq!((lone.max_lengths(), lone.pending_calls(), lone.failure()), (None, 0, None));
    let nonsense =
        ConnectionAddress::read_from_bytes(&[0x5a; size_of::<ConnectionAddress>()]).expect("bytes");
    let error = lone.connect(&nonsense, &ConnectConfig::default()).expect_err("no address");
    assert!(matches!(error, ConnectError::Address(_)), "{error}");

    let config = ConnectionConfig { pending_calls: 16, ..ring(1 << 14) };
    let connection = side.connect(&context, &config);
    let again = connection.connect(&connection.address(), &ConnectConfig::default());
    assert!(matches!(again, Err(ConnectError::Connected)));
    if side.index == 1 {
        return serve_until_stop(side, &context, &connection);
    }
    let (longest, response) = connection.max_lengths().expect("connected");
    let bytes = vec![3; longest + 1];
    let refused = connection.call(&bytes, 0, (1, 2)).expect_err("too long");
    assert_eq!(refused.user, (1, 2));
    assert!(matches!(refused.cause, NotCalled::Refused(Refusal::TooLong { .. })), "{}", refused.cause);
    assert!(!refused.cause.is_back_pressure());
    let refused = connection.call(&[], response + 1, (1, 3)).expect_err("too long");
    assert!(
        matches!(refused.cause, NotCalled::Refused(Refusal::ResponseTooLong { .. })),
        "{}",
        refused.cause
    );
    let refused = connection.call(&[], usize::MAX, (1, 4)).expect_err("too long");
    let is_too_long =
        matches!(refused.cause, NotCalled::Refused(Refusal::ResponseTooLong { len: usize::MAX, .. }));
    assert!(is_too_long && !refused.cause.is_back_pressure(), "{}", refused.cause);
    // The longest request and the longest response are accepted.
    for (request, response) in [(&bytes[..longest], 0), (&[][..], response)] {
        let answered = Cell::new(false);
        connection.call(request, response, (2, 0)).expect("the longest");
        poll_until(&context, || answered.get(), |_, answer| answered.set(answer == Ok(vec![])));
    }
    let mut answered = Vec::new();
    let (mut causes, mut made) = (Vec::new(), 0);
    while causes.len() < 3 {
        match connection.call(&[1; 8], 8, (2, made)) {
            Ok(()) => made += 1,
            Err(error) => {
                assert_eq!(error.user, (2, made));
                assert!(error.cause.is_back_pressure(), "{}", error.cause);
                causes.push(error.cause);
            }
        }
    }
    assert_eq!(connection.pending_calls() as u64, made);
    let begin = Instant::now();
    while (answered.len() as u64) < made {
        context.poll(|user, answer| answered.push((user, answer.expect("an answer").len())));
        assert!(begin.elapsed() < TIMEOUT, "{answered:?}");
    }
    assert_eq!(connection.pending_calls(), 0);
    send_stop(side, &context, &connection);
}

pub(crate) fn too_long_reply_returns_the_request(side: &mut TestPeer) {
    let context = side.context::<User>();
    let connection = side.connect(&context, &ring(4096));
    if side.index == 0 {
        connection.call(b"ask", 10, (0, 1)).expect("called");
        let answer = RefCell::new(None);
        poll_until(&context, || answer.borrow().is_some(), |_, bytes| *answer.borrow_mut() = Some(bytes));
        assert_eq!(answer.take(), Some(Ok(b"short".to_vec())));
        side.meet();
        return;
    }
    let request = RefCell::new(None);
    poll_until(
        &context,
        || {
            *request.borrow_mut() = context.recv();
            request.borrow().is_some()
        },
        |_, _| (),
    );
    let request = request.take().expect("a request");
    let limit = request.response_limit() as usize;
    assert!(limit >= 10);
    let ReplyError { cause, request } = request.reply(&vec![0; limit + 1]).expect_err("too long");
    assert!(matches!(cause, NotReplied::TooLong { .. }), "{cause}");
    let request = request.expect("handed back");
    assert_eq!(request.data().to_vec(), b"ask");
    assert!(request.reply(b"short").is_ok());
    context.flush();
    side.meet();
}

pub(crate) fn close_ends_pending_calls(side: &mut TestPeer) {
    let context = side.context::<User>();
    let (closing, other) = (side.connect(&context, &ring(4096)), side.connect(&context, &ring(4096)));
    if side.index == 0 {
        for number in 0..10 {
            closing.call(b"never answered", 8, (0, number)).expect("called");
            other.call(b"answered", 8, (1, number)).expect("called");
        }
        let mut others = 0;
        let begin = Instant::now();
        while others < 10 {
            others +=
                context.poll(|user, answer| assert!(user.0 == 1 && answer.is_ok(), "{user:?} {answer:?}"));
            assert!(begin.elapsed() < TIMEOUT);
        }
        assert_eq!(closing.pending_calls(), 10);
        let mut ended = closing.close();
        ended.sort();
        assert_eq!(ended, (0..10).map(|n| (0, n)).collect::<Vec<_>>());
        send_stop(side, &context, &other);
        return;
    }
    // Requests of the connection that will be closed are held: their replies are too late, and have no effect.
    // On a network this side notices the end by a probe, which may take long; there the call has a deadline.
    if peer_notices_close(side) {
        closing.call(b"from the other side", 8, (3, 0)).expect("called");
    } else {
        let time = Duration::from_secs(10);
        closing.call_within(b"from the other side", 8, (3, 0), time).expect("called");
    }
    let (mut kept, mut failed, mut stopped) = (Vec::new(), None, false);
    let begin = Instant::now();
    while !stopped || failed.is_none() {
        context.poll(|user, answer| {
            assert_eq!(user, (3, 0));
            failed = Some(answer.map(|bytes| bytes.to_vec()));
        });
        while let Some(request) = context.recv() {
            let bytes = request.data().to_vec();
            match bytes.as_slice() {
                b"never answered" => kept.push(request),
                _ => assert!(request.reply(&bytes).is_ok()),
            }
            stopped |= bytes == b"stop";
        }
        assert!(begin.elapsed() < TIMEOUT, "stopped {stopped}, {failed:?}");
    }
    context.flush();
    assert!(matches!(failed, Some(Err(_))), "{failed:?}");
    if peer_notices_close(side) {
        assert!(closing.failure().is_some());
        assert_eq!(closing.pending_calls(), 0, "all have ended");
        let refused = closing.call(b"late", 0, (4, 4)).expect_err("over");
        assert!(matches!(refused.cause, NotCalled::Failed(_)), "{}", refused.cause);
        assert!(kept.into_iter().all(|request| request.reply(b"late").is_err()));
    }
    side.meet();
}

/// Whether a side notices that its peer closed a connection. On a network it is not told.
pub(crate) fn peer_notices_close(side: &TestPeer) -> bool {
    !side.is_slow()
}

pub(crate) fn call_without_response_times_out(side: &mut TestPeer) {
    let context = side.context::<User>();
    let connection = side.connect(&context, &ring(1024));
    if side.index == 0 {
        for round in 0..3 {
            let begin = Instant::now();
            let time = Duration::from_millis(20);
            let mut made = 0;
            while connection.call_within(b"late", 8, (round, made), time).is_ok() {
                made += 1;
            }
            assert!(made > 0);
            let mut ended = Vec::new();
            while (ended.len() as u64) < made {
                context.poll(|user, answer| {
                    assert_eq!(answer.err(), Some(CallFailed::TimedOut));
                    ended.push(user);
                });
                assert!(begin.elapsed() < TIMEOUT);
            }
            assert!(begin.elapsed() >= time);
            ended.sort();
            assert_eq!(ended, (0..made).map(|n| (round, n)).collect::<Vec<_>>());
            // Now the responses arrive. They are not reported, but their credit is returned.
            side.meet();
            let begin = Instant::now();
            while connection.pending_calls() > 0 {
                assert_eq!(context.poll(|user, _| panic!("{user:?} ended twice")), 0);
                assert!(begin.elapsed() < TIMEOUT);
            }
        }
        // A wait ends at the deadline, and the poll after it ends the call. The peer may return credit in the meantime.
        connection.call_within(b"late", 8, (9, 0), Duration::from_millis(30)).expect("called");
        let (mut waits, mut ended) = (0, 0);
        while ended == 0 {
            context.wait(Duration::MAX);
            waits += 1;
            ended = context.poll(|_, _| ());
        }
        assert!(waits <= 4, "{waits} waits until the deadline");
        side.meet();
        send_stop(side, &context, &connection);
        return;
    }
    let mut kept = Vec::new();
    for _ in 0..4 {
        // Receives requests until all calls of the other side have timed out.
        let (begin, mut last) = (Instant::now(), Instant::now());
        while kept.is_empty() || last.elapsed() < Duration::from_millis(200) {
            context.poll(|_, _| ());
            while let Some(request) = context.recv() {
                kept.push(request);
                last = Instant::now();
            }
            assert!(begin.elapsed() < TIMEOUT);
        }
        side.meet();
        kept.drain(..).for_each(|request| assert!(request.reply(b"at last").is_ok()));
        context.flush();
    }
    serve_until_stop(side, &context, &connection);
}

pub(crate) fn wait_ends_when_the_ring_has_room(side: &mut TestPeer) {
    // The ring is full. The peer releases all of it and sends nothing, so only a READ finds the room. A wait must not miss
    // its completion.
    let context = side.context::<User>();
    let connection = side.connect(&context, &ring(1024));
    if side.index == 1 {
        let made = side.exchange(&[])[0];
        let mut requests = Vec::new();
        let begin = Instant::now();
        while requests.len() < usize::from(made) {
            context.poll(|_, _| ());
            requests.extend(std::iter::from_fn(|| context.recv()));
            assert!(begin.elapsed() < TIMEOUT);
        }
        requests.iter_mut().for_each(|request| request.detach());
        context.poll(|_, _| ());
        side.meet();
        // From here on this side sends nothing until the other side has found the room.
        side.meet();
        requests.into_iter().for_each(|request| assert!(request.reply(&[]).is_ok()));
        return serve_until_stop(side, &context, &connection);
    }
    let mut made = 0;
    let refused = loop {
        match connection.call(&[1; 200], 0, (0, made)) {
            Ok(()) => made += 1,
            Err(error) => break error.cause,
        }
    };
    assert_eq!(refused, NotCalled::Refused(Refusal::RingFull));
    context.flush();
    side.exchange(&[made as u8]);
    side.meet();
    let begin = Instant::now();
    while connection.call(&[1; 200], 0, (0, made)).is_err() {
        context.wait(Duration::from_secs(10));
        context.poll(|_, _| panic!("nothing was answered"));
    }
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "the wait missed the completion: {:?}",
        begin.elapsed()
    );
    side.meet();
    send_stop(side, &context, &connection);
}

pub(crate) fn close_loses_no_receives(side: &mut TestPeer) {
    // Batches arrive for connections that are closed before a poll. Their receives must be posted again.
    let config = Config { receives: 64, ..Config::default() };
    let context = side.context_with::<User>(&config);
    let other = side.connect(&context, &ring(4096));
    for round in 0..if side.is_slow() { 3 } else { 20 } {
        let closing = side.connect(&context, &ring(4096));
        if side.index == 0 {
            for number in 0..10 {
                closing.call(b"nobody listens", 0, (round, number)).expect("called");
                context.flush();
            }
        }
        // The WRITEs have arrived before the other side continues.
        std::thread::sleep(Duration::from_millis(5));
        side.meet();
        drop(closing);
    }
    let load = Load { calls: side.scaled(2000), depth: 16, ..Load::default() };
    let mut callers = [Caller::new(other, load, side.seed)];
    drive(&context, &mut callers, ReplyMode::default(), side.seed);
    side.meet();
}

pub(crate) fn peer_notices_a_dropped_context(side: &mut TestPeer) {
    let context = side.context::<User>();
    let connection = side.connect(&context, &ring(4096));
    if side.index == 1 {
        // Requests that were polled and never received do not keep the context alive.
        let begin = Instant::now();
        while context.counters().completions == 0 {
            context.poll(|_, _| ());
            assert!(begin.elapsed() < TIMEOUT);
        }
        drop(connection);
        drop(context);
        side.meet();
        return;
    }
    if peer_notices_close(side) {
        connection.call(b"hello", 8, (0, 0)).expect("called");
    } else {
        connection.call_within(b"hello", 8, (0, 0), Duration::from_secs(10)).expect("called");
    }
    context.flush();
    side.meet();
    let ended = RefCell::new(None);
    poll_until(&context, || ended.borrow().is_some(), |_, answer| *ended.borrow_mut() = Some(answer));
    let cause = ended.take().expect("ended").expect_err("nobody answers");
    // Where the peer's end is noticed, it must be the cause.
    assert!(
        matches!(cause, CallFailed::Connection(_))
            || cause == CallFailed::TimedOut && !peer_notices_close(side),
        "{cause}"
    );
}
