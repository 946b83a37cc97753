//! Bulk payloads, which do not fit into a ring, and READ and WRITE of the application.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use crosstie::copyrpc::{
    CallFailed, Connection, ConnectionConfig, Context, Failure, NotCalled, NotPosted, NotReplied, RAW_DEPTH,
    RecvHandle, ReplyError,
};
use crosstie::device::{Access, Mr, RemoteAddr, RemoteMemory};
use crosstie_protocol::copyrpc::Refusal;
use zerocopy::{FromBytes, IntoBytes};

use crate::cases::ring;
use crate::failed_calls::{peer_notices_close, poll_until, send_stop, serve_until_stop};
use crate::load::{Caller, Load, ReplyMode, TIMEOUT, User, drive};
use crate::test_peer::TestPeer;

fn with_bulk(ring_bytes: usize, bulk: usize) -> ConnectionConfig {
    ConnectionConfig { bulk, ..ring(ring_bytes) }
}

/// Bytes in which any two pieces differ.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let words = (0..len.div_ceil(8) as u64)
        .flat_map(|i| (seed ^ i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes());
    words.take(len).collect()
}

/// Makes one call and waits for its response.
fn ask(context: &Context<User>, connection: &Connection<User>, request: &[u8], response: usize) -> Vec<u8> {
    let answer = RefCell::new(None);
    connection.call(request, response, (0, 0)).expect("called");
    poll_until(context, || answer.borrow().is_some(), |_, got| *answer.borrow_mut() = Some(got));
    answer.take().flatten_ok()
}

trait FlattenOk {
    fn flatten_ok(self) -> Vec<u8>;
}

impl FlattenOk for Option<Result<Vec<u8>, CallFailed>> {
    fn flatten_ok(self) -> Vec<u8> {
        self.expect("ended").expect("an answer")
    }
}

/// Waits for the next request.
fn next(context: &Context<User>) -> RecvHandle<User> {
    let request = Cell::new(None);
    poll_until(
        context,
        || {
            request.set(context.recv());
            let came = request.take();
            let is_there = came.is_some();
            request.set(came);
            is_there
        },
        |user, answer| panic!("nothing was asked: {user:?} {answer:?}"),
    );
    request.take().expect("a request")
}

/// Replies, and tries again while there is back-pressure.
fn reply(context: &Context<User>, request: RecvHandle<User>, bytes: &[u8]) {
    let mut request = Some(request);
    let begin = Instant::now();
    while let Some(unanswered) = request.take() {
        if let Err(ReplyError { cause, request: back }) = unanswered.reply(bytes) {
            assert!(cause.is_back_pressure(), "{cause}");
            request = back;
            context.poll(|_, _| ());
        }
        assert!(begin.elapsed() < TIMEOUT);
    }
}

pub(crate) fn bulk_payloads_around_every_limit_arrive(side: &mut TestPeer) {
    let most = if side.is_slow() { 1 << 19 } else { 4 << 20 };
    let context = side.context::<User>();
    let connection = side.connect(&context, &with_bulk(1 << 14, most));
    let (request, response) = connection.max_ring_lengths().expect("connected");
    assert_eq!(connection.max_lengths(), Some((most, most)));
    let around = |n: usize| [n - 1, n, n + 1];
    let mut requests = [around(request), around(request - 32), around(1 << 18)].concat();
    let mut responses = [around(response), [0, 20, 21], around(1 << 18)].concat();
    requests.extend([64, 1 << 16, most - 1, most]);
    responses.extend([1 << 16, most - 1, most]);
    let mut pairs: Vec<_> = requests.iter().map(|n| (*n, 16)).collect();
    pairs.extend(responses.iter().map(|n| (64, *n)));
    pairs.extend(requests.iter().zip(responses.iter().rev()).map(|(a, b)| (*a, *b)));
    if side.index == 1 {
        for (request_len, response_len) in pairs {
            let mut request = next(&context);
            assert_eq!(request.connection(), connection.id());
            assert!(request.data().to_vec() == bytes(request_len as u64, request_len), "{request_len}");
            assert!(request.response_limit() >= response_len as u64);
            if request_len % 2 == 0 {
                request.detach();
                assert!(request.data().is_empty());
            }
            reply(&context, request, &bytes(!0, response_len));
        }
        return serve_until_stop(side, &context, &connection);
    }
    for (request, response) in &pairs {
        let answer = ask(&context, &connection, &bytes(*request as u64, *request), *response);
        assert!(answer == bytes(!0, *response), "{request} and {response}");
    }
    assert_eq!(connection.pending_calls(), 0);
    let counters = context.counters();
    assert!(counters.bulk_calls > 0 && counters.bulk_calls < pairs.len() as u64, "{counters:?}");
    send_stop(side, &context, &connection);
}

pub(crate) fn bulk_payload_of_64_mib_arrives(side: &mut TestPeer) {
    // Soft-RoCE in an emulated machine would take minutes.
    let bytes = if side.is_slow() { 2 << 20 } else { 64 << 20 };
    echo(side, bytes, 3);
}

pub(crate) fn bulk_payload_of_256_mib_arrives(side: &mut TestPeer) {
    echo(side, if side.is_slow() { 4 << 20 } else { 256 << 20 }, 1);
}

fn echo(side: &mut TestPeer, len: usize, rounds: u64) {
    let context = side.context::<User>();
    let connection = side.connect(&context, &ConnectionConfig { bulk: len, ..ConnectionConfig::default() });
    if side.index == 1 {
        for _ in 0..rounds + 1 {
            let request = next(&context);
            let bytes = request.data().to_vec();
            reply(&context, request, &bytes);
        }
        // The first response was short, and travelled in the ring.
        let counters = context.counters();
        assert_eq!(counters.bulk_replies, rounds);
        return serve_until_stop(side, &context, &connection);
    }
    let short = bytes(7, 5000);
    assert!(ask(&context, &connection, &short, len) == short, "a short one");
    for round in 0..rounds {
        let request = bytes(round, len - round as usize);
        assert!(ask(&context, &connection, &request, len) == request, "round {round}");
    }
    let refused = connection.call(&vec![0; len + 1], 0, (1, 1)).expect_err("too long");
    assert!(!refused.cause.is_back_pressure() && refused.user == (1, 1), "{}", refused.cause);
    send_stop(side, &context, &connection);
}

pub(crate) fn bulk_calls_mix_with_small_calls(side: &mut TestPeer) {
    let calls = if side.is_slow() { 60 } else { 600 };
    let longest = if side.is_slow() { 1 << 17 } else { 400_000 };
    for (ring_bytes, bulk, reply_mode) in [
        (1 << 13, 1 << 21, ReplyMode::default()),
        (1 << 16, 1 << 22, ReplyMode { keep: 5, shuffled: true, ..ReplyMode::default() }),
        (512, 1 << 20, ReplyMode { detached: true, ..ReplyMode::default() }),
    ] {
        let context = side.context();
        let connection = side.connect(&context, &with_bulk(ring_bytes, bulk));
        let load = Load { calls, depth: 24, request: 100, response: 60, long: Some((6, longest)), drops: 9 };
        let mut callers = [Caller::new(connection, load, side.seed + side.index as u64)];
        drive(&context, &mut callers, reply_mode, side.seed);
        let counters = context.counters();
        assert!(
            counters.bulk_calls > 0 && counters.bulk_replies > 0 && counters.bulk_bytes > 0,
            "{counters:?}"
        );
        side.meet();
    }
}

pub(crate) fn bulk_calls_of_several_connections_work(side: &mut TestPeer) {
    let context = side.context();
    let mut callers = Vec::new();
    // Emulated guests that are given more at once take longer than an acknowledgement may, and Soft-RoCE answers a WRITE that
    // is sent again in the middle of others as an invalid request.
    let (connections, calls, depth, longest) =
        if side.is_slow() { (2, 20, 4, 100_000) } else { (6, 300, 8, 300_000) };
    for i in 0..connections {
        let connection = side.connect(&context, &with_bulk(4096, 1 << 20));
        let load = Load { calls, depth, request: 60, response: 60, long: Some((4, longest)), drops: 0 };
        callers.push(Caller::new(connection, load, side.seed + i));
    }
    drive(&context, &mut callers, ReplyMode { keep: 7, shuffled: true, ..ReplyMode::default() }, side.seed);
    side.meet();
}

pub(crate) fn bulk_calls_wait_for_memory_in_order(side: &mut TestPeer) {
    // The caller has room for four requests, the other side for one.
    let len = 200_000;
    let context = side.context::<User>();
    let config = with_bulk(4096, if side.index == 0 { 1 << 20 } else { 1 << 18 });
    let connection = side.connect(&context, &config);
    assert_eq!(connection.max_lengths().map(|(request, _)| request), Some(1 << 18), "the lesser of both");
    if side.index == 0 {
        for number in 0..4 {
            connection.call(&bytes(number, len), 8, (0, number)).expect("called");
            // Small calls wait behind the large ones.
            connection.call(&number.to_le_bytes(), 8, (1, number)).expect("called");
        }
        let refused = connection.call(&bytes(9, len), 8, (0, 9)).expect_err("the memory is in use");
        assert_eq!((refused.cause, refused.user), (Refusal::NoBulkMemory.into(), (0, 9)));
        assert!(refused.cause.is_back_pressure());
        let ended = RefCell::new(Vec::new());
        poll_until(
            &context,
            || ended.borrow().len() == 8,
            |user, answer| {
                assert_eq!(answer.expect("an answer"), user.1.to_le_bytes());
                ended.borrow_mut().push(user);
            },
        );
        assert_eq!(*ended.borrow(), (0..8).map(|n| ((n % 2) as u32, n / 2)).collect::<Vec<_>>(), "in order");
        connection.call(&bytes(9, len), 8, (0, 9)).expect("the memory is back");
        poll_until(&context, || ended.borrow().len() == 9, |user, _| ended.borrow_mut().push(user));

        // The other direction: responses that wait for memory.
        for number in 0..3 {
            connection.call(&[7], len, (2, number)).expect("called");
        }
        poll_until(
            &context,
            || ended.borrow().len() == 12,
            |user, answer| {
                assert!(answer.expect("an answer") == bytes(user.1, len));
                ended.borrow_mut().push(user);
            },
        );
        return send_stop(side, &context, &connection);
    }
    for number in 0..4 {
        let large = next(&context);
        assert!(large.data().to_vec() == bytes(number, len));
        // While it is held, no request behind the next large one arrives.
        let small = next(&context);
        assert_eq!(small.data().to_vec(), number.to_le_bytes());
        for _ in 0..300 {
            context.poll(|_, _| ());
            assert!(context.recv().is_none(), "there is no room for the next");
        }
        assert!(large.reply(&number.to_le_bytes()).is_ok());
        assert!(small.reply(&number.to_le_bytes()).is_ok());
    }
    reply(&context, next(&context), b"");
    let requests: Vec<_> = (0..3).map(|_| next(&context)).collect();
    let mut requests = requests.into_iter();
    let first = requests.next().expect("the first");
    assert!(first.response_limit() >= len as u64);
    let refused = first.reply(&vec![0; len + 1]).expect_err("too long");
    assert_eq!(refused.cause, NotReplied::TooLong { len: len + 1, max: len as u64 });
    assert!(refused.request.expect("handed back").reply(&bytes(0, len)).is_ok());
    let refused = requests.next().expect("the second").reply(&bytes(1, len)).expect_err("in use");
    assert!(refused.cause == NotReplied::NoBulkMemory && refused.cause.is_back_pressure());
    let second = refused.request.expect("handed back");
    assert_eq!(second.data().to_vec(), [7], "as it was");
    reply(&context, second, &bytes(1, len));
    reply(&context, requests.next().expect("the third"), &bytes(2, len));
    serve_until_stop(side, &context, &connection);
}

pub(crate) fn timed_out_bulk_calls_keep_their_memory(side: &mut TestPeer) {
    let len = 1 << 17;
    let context = side.context::<User>();
    let connection = side.connect(&context, &with_bulk(4096, len));
    if side.index == 1 {
        for round in 0..3u64 {
            let request = next(&context);
            assert!(request.data().to_vec() == bytes(round, len));
            // The call has timed out on the other side now.
            side.meet();
            reply(&context, request, &bytes(!round, len));
            context.poll(|_, _| ());
        }
        return serve_until_stop(side, &context, &connection);
    }
    for round in 0..3 {
        let time = Duration::from_millis(if side.is_slow() { 400 } else { 30 });
        connection.call_within(&bytes(round, len), len, (0, round), time).expect("called");
        let ended = Cell::new(None);
        poll_until(&context, || ended.get().is_some(), |_, answer| ended.set(answer.err()));
        assert_eq!(ended.get(), Some(CallFailed::TimedOut));
        // The peer may still write to the response buffer.
        let refused = connection.call(&bytes(9, len), 8, (0, 9)).expect_err("the memory is in use");
        assert_eq!(refused.cause, NotCalled::Refused(Refusal::NoBulkMemory));
        let refused = connection.call(b"short", len, (0, 9)).expect_err("the memory is in use");
        assert_eq!(refused.cause, NotCalled::Refused(Refusal::NoBulkMemory));
        side.meet();
        poll_until(&context, || connection.pending_calls() == 0, |user, _| panic!("{user:?} ended twice"));
    }
    send_stop(side, &context, &connection);
}

pub(crate) fn bulk_calls_are_refused_where_bulk_is_off(side: &mut TestPeer) {
    let context = side.context::<User>();
    for (left, right, ring_bytes) in [(0, 1 << 20, 4096), (1 << 20, 0, 4096), (1 << 20, 1 << 20, 256)] {
        let config = with_bulk(ring_bytes, if side.index == 0 { left } else { right });
        let connection = side.connect(&context, &config);
        assert_eq!(connection.max_lengths(), connection.max_ring_lengths());
        let (request, response) = connection.max_lengths().expect("connected");
        let refused = connection.call(&vec![0; request + 1], 0, (0, 0)).expect_err("too long");
        assert!(matches!(refused.cause, NotCalled::Refused(Refusal::TooLong { .. })), "{}", refused.cause);
        let refused = connection.call(b"", response + 1, (0, 0)).expect_err("too long");
        assert!(matches!(refused.cause, NotCalled::Refused(Refusal::ResponseTooLong { .. })));
        side.meet();
    }
}

pub(crate) fn close_works_with_bulk_payloads_under_way(side: &mut TestPeer) {
    let context = side.context::<User>();
    let other = side.connect(&context, &ring(4096));
    let len = if side.is_slow() { 1 << 19 } else { 4 << 20 };
    for round in 0..6u32 {
        let closing = side.connect(&context, &with_bulk(4096, 2 * len));
        if side.index == 0 {
            closing.call(&bytes(1, len), len, (round, 1)).expect("called");
            closing.call(&bytes(2, len), len, (round, 2)).expect("called");
            (0..round).for_each(|_| {
                context.poll(|_, _| ());
            });
            let mut ended = closing.close();
            ended.sort();
            assert!(ended.len() <= 2 && ended.iter().all(|user| user.0 == round));
        } else {
            // Closes in the middle of a READ, or of a response.
            for _ in 0..4 + round {
                context.poll(|_, _| ());
                if let Some(request) = context.recv() {
                    let bytes = request.data().to_vec();
                    request.reply(&bytes).ok();
                }
            }
            drop(closing);
        }
        side.meet();
    }
    let load = Load { calls: side.scaled(1000), depth: 16, ..Load::default() };
    let mut callers = [Caller::new(other, load, side.seed)];
    drive(&context, &mut callers, ReplyMode::default(), side.seed);
    side.meet();
}

/// Allocates a region and exchanges addresses with the other side.
fn share(side: &mut TestPeer, context: &Context<User>, len: usize) -> (Mr, RemoteMemory) {
    let region = context.allocate(len, Access::ALL).expect("a region");
    let theirs = side.exchange(region.remote().as_bytes());
    (region, RemoteMemory::read_from_bytes(&theirs).expect("an address"))
}

pub(crate) fn raw_reads_and_writes_complete(side: &mut TestPeer) {
    let context = side.context::<User>();
    let connection = side.connect(&context, &ring(4096));
    let len = 1 << 16;
    let (shared, theirs) = share(side, &context, len);
    shared.write(0, &bytes(side.index as u64, len)).expect("inside");
    side.meet();
    if side.index == 1 {
        // A WRITE that was posted before a call has arrived when the call arrives.
        let request = next(&context);
        let mut got = vec![0; len];
        shared.read(0, &mut got).expect("inside");
        assert!(got == bytes(7, len));
        reply(&context, request, b"");
        return serve_until_stop(side, &context, &connection);
    }
    let region = || context.allocate(4096, Access::LOCAL_WRITE).expect("a region");
    let lone = context.create_connection(&ring(4096)).expect("a connection");
    let refused = lone.read(region(), 0..8, theirs.at(0), 3).expect_err("not connected");
    assert_eq!((refused.cause, refused.token), (NotPosted::NotConnected, 3));
    let refused = connection.read(refused.region, 4000..4097, theirs.at(0), 4).expect_err("outside");
    assert!(matches!(refused.cause, NotPosted::Range(_)) && refused.token == 4, "{refused}");

    // More operations than the limit; every token is returned once, with its bytes.
    let rounds = if side.is_slow() { 200 } else { 2000u64 };
    let mut regions: Vec<Mr> = (0..RAW_DEPTH + 8).map(|_| region()).collect();
    let (mut begun, mut ended, mut full) = (0, 0, 0);
    let begin = Instant::now();
    while ended < rounds {
        while begun < rounds
            && let Some(region) = regions.pop()
        {
            let offset = begun * 24 % (len as u64 - 4096);
            match connection.read(region, 8..4096, theirs.at(offset), begun) {
                Ok(()) => begun += 1,
                Err(error) => {
                    assert!(error.cause.is_back_pressure() && error.token == begun, "{error}");
                    regions.push(error.region);
                    full += 1;
                    break;
                }
            }
        }
        context.poll(|_, _| ());
        while let Some(completion) = context.take_raw_completion() {
            assert_eq!(
                (completion.token, completion.result, completion.connection),
                (ended, Ok(()), connection.id())
            );
            let offset = (ended * 24 % (len as u64 - 4096)) as usize;
            let mut got = vec![0; 4088];
            completion.region.read(8, &mut got).expect("inside");
            assert!(got == bytes(1, len)[offset..offset + 4088], "token {ended}");
            regions.push(completion.region);
            ended += 1;
        }
        assert!(begin.elapsed() < TIMEOUT, "{begun} begun, {ended} ended");
    }
    assert!(full > 0, "never more than there is room for");

    let whole = context.allocate(len, Access::LOCAL_WRITE).expect("a region");
    whole.write(0, &bytes(7, len)).expect("inside");
    connection.write(whole, 0..len, theirs.at(0), 99).expect("posted");
    assert_eq!(ask(&context, &connection, b"look", 0), b"");
    let begin = Instant::now();
    let completion = loop {
        context.poll(|_, _| ());
        if let Some(completion) = context.take_raw_completion() {
            break completion;
        }
        assert!(begin.elapsed() < TIMEOUT);
    };
    assert_eq!((completion.token, completion.result, completion.region.len()), (99, Ok(()), len));
    assert!(context.take_raw_completion().is_none());
    let counters = context.counters();
    assert_eq!((counters.raw_reads, counters.raw_writes), (rounds, 1));
    send_stop(side, &context, &connection);
}

pub(crate) fn failed_raw_operations_return_their_regions(side: &mut TestPeer) {
    let context = side.context::<User>();
    let (connection, other) = (side.connect(&context, &ring(4096)), side.connect(&context, &ring(4096)));
    let (shared, theirs) = share(side, &context, 4096);
    if side.index == 1 {
        serve_until_stop(side, &context, &other);
        drop((connection, shared));
        return;
    }
    let region = || context.allocate(4096, Access::LOCAL_WRITE).expect("a region");
    connection.call(b"answered or not", 8, (5, 5)).expect("called");
    let nowhere = RemoteAddr { addr: theirs.addr, rkey: theirs.rkey ^ 0x5555 };
    for token in 0..20 {
        let at = if token == 10 { nowhere } else { theirs.at(0) };
        if let Err(error) = connection.read(region(), 0..4096, at, token) {
            assert!(
                token > 10 && matches!(error.cause, NotPosted::Refused(_) | NotPosted::Failed(_)),
                "{error}"
            );
        }
    }
    let mut tokens = Vec::new();
    let begin = Instant::now();
    while connection.failure().is_none() || context.counters().raw_reads > tokens.len() as u64 {
        context.poll(|_, _| ());
        while let Some(completion) = context.take_raw_completion() {
            assert_eq!(completion.region.len(), 4096);
            assert!(completion.token < 10 || completion.result.is_err(), "{completion:?}");
            tokens.push(completion.token);
        }
        assert!(begin.elapsed() < TIMEOUT, "{tokens:?}");
    }
    assert!(matches!(connection.failure(), Some(Failure::Broken(_))), "{:?}", connection.failure());
    tokens.sort();
    let count = tokens.len() as u64;
    assert_eq!(tokens, (0..count).collect::<Vec<_>>());
    let refused = connection.write(region(), 0..8, theirs.at(0), 30).expect_err("over");
    assert!(matches!(refused.cause, NotPosted::Failed(_)) && refused.region.len() == 4096);

    // A connection that is closed returns all regions.
    let closed = count + 8;
    (0..8).for_each(|token| other.read(region(), 0..4096, theirs.at(0), 100 + token).expect("posted"));
    send_stop(side, &context, &other);
    drop((other, connection));
    let left: Vec<_> = std::iter::from_fn(|| context.take_raw_completion()).collect();
    assert_eq!(count + left.len() as u64, closed);
    if peer_notices_close(side) {
        assert!(left.iter().all(|completion| completion.result.is_ok()), "{left:?}");
    }
}
