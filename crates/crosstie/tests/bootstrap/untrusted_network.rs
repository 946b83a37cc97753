//! The TCP rendezvous with peers that do not know the secret, and over a network that changes frames.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crosstie::bootstrap::channel::{Channel, ChannelError};
use crosstie::bootstrap::limits::HANDSHAKE_TIMEOUT;
use crosstie::bootstrap::{Bootstrap, Error, Limits, Member, Operation, Secret, Violation, tcp};

use super::suite::run_all_operations;

const SECRET: &str = "the secret of this job";

fn secret() -> Secret {
    Secret::new(SECRET).expect("long enough")
}

/// What a rank of a job needs to join.
fn config(rank: u32, size: u32, rendezvous: SocketAddr, limits: Limits) -> tcp::Config {
    tcp::Config { rank, size, rendezvous: rendezvous.to_string(), listen: None, secret: secret(), limits }
}

fn bind() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = listener.local_addr().expect("address");
    (listener, address)
}

/// A job that is not complete yet: rank 0 waits in its thread for the others.
struct PendingJob {
    address: SocketAddr,
    size: u32,
    limits: Limits,
    rank_zero: JoinHandle<Result<Member, Error>>,
}

impl PendingJob {
    fn new(size: u32, limits: Limits) -> Self {
        let (listener, address) = bind();
        let rank_zero = thread::spawn(move || tcp::join_as_rank_zero(listener, size, &secret(), limits));
        PendingJob { address, size, limits, rank_zero }
    }

    fn config(&self, rank: u32) -> tcp::Config {
        config(rank, self.size, self.address, self.limits)
    }

    /// Joins as `rank` in a new thread.
    fn join(&self, rank: u32) -> JoinHandle<Result<Member, Error>> {
        let config = self.config(rank);
        thread::spawn(move || tcp::join(&config))
    }

    /// Waits for rank 0.
    fn rank_zero(self) -> Result<Member, Error> {
        self.rank_zero.join().expect("no panic")
    }
}

/// Runs all operations on the members, each in its own thread.
fn run_together(members: impl IntoIterator<Item = Member>) {
    thread::scope(|scope| {
        for mut member in members {
            scope.spawn(move || run_all_operations(&mut member));
        }
    });
}

fn short_join_timeout() -> Limits {
    Limits { join_timeout: Duration::from_secs(1), ..Limits::default() }
}

#[test]
fn wrong_secret_is_rejected_and_other_ranks_join() {
    let job = PendingJob::new(2, Limits::default());
    let wrong =
        tcp::Config { secret: Secret::new("some other secret").expect("long enough"), ..job.config(1) };
    let error = tcp::join(&wrong).expect_err("rejected");
    assert!(matches!(error, Error::WrongSecret { .. }), "{error}");
    assert!(!error.to_string().contains("some other"), "{error}");

    let second = job.join(1).join().expect("no panic").expect("the real rank 1 joins");
    let first = job.rank_zero().expect("rank 0 joins");
    run_together([first, second]);
}

#[test]
fn rank_zero_reports_wrong_secret_when_no_other_rank_joins() {
    let job = PendingJob::new(2, short_join_timeout());
    let wrong =
        tcp::Config { secret: Secret::new("some other secret").expect("long enough"), ..job.config(1) };
    assert!(matches!(tcp::join(&wrong), Err(Error::WrongSecret { .. })));
    match job.rank_zero() {
        Err(Error::RankMissing { ranks, during: Operation::Join, note, .. }) => {
            assert_eq!(ranks, [1]);
            assert_eq!(note, "1 rejected for a wrong secret");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn rank_that_never_joins_is_named_to_every_rank() {
    let job = PendingJob::new(5, short_join_timeout());
    let joining: Vec<_> = [1, 3].map(|rank| job.join(rank)).into();
    let mut results = vec![job.rank_zero()];
    results.extend(joining.into_iter().map(|thread| thread.join().expect("no panic")));
    assert_eq!(results.len(), 3);
    for result in results {
        match result {
            Err(Error::RankMissing { ranks, during: Operation::Join, .. }) => assert_eq!(ranks, [2, 4]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn rank_zero_that_never_starts_is_named() {
    // No program listens on this port.
    let unused = "127.0.0.1:1";
    match tcp::join(&config(1, 2, unused.parse().expect("an address"), short_join_timeout())) {
        Err(Error::RankMissing { ranks, note, .. }) => {
            assert_eq!(ranks, [0]);
            assert!(note.contains(unused), "{note}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_may_start_before_rank_zero() {
    // 127.0.0.2 is used by this test only, so no other test can take the port in between.
    let listener = TcpListener::bind("127.0.0.2:0").expect("listener");
    let address = listener.local_addr().expect("address");
    drop(listener);
    let late = config(1, 2, address, Limits::default());
    let second = thread::spawn(move || tcp::join(&late));
    thread::sleep(Duration::from_millis(100));
    let first = tcp::join(&config(0, 2, address, Limits::default()))
        .expect("rank 0 listens at the rendezvous address");
    run_together([first, second.join().expect("no panic").expect("rank 1 connects")]);
}

#[test]
fn second_process_with_the_same_rank_is_rejected_and_the_first_continues() {
    let job = PendingJob::new(3, Limits::default());
    let early = job.join(1);
    // Before the job is complete: one of the two is rejected, the other waits.
    let second_process = job.join(1);
    while !early.is_finished() && !second_process.is_finished() {
        thread::sleep(Duration::from_millis(5));
    }
    let (rejected, accepted) =
        if early.is_finished() { (early, second_process) } else { (second_process, early) };
    assert_eq!(rejected.join().expect("no panic").err(), Some(Error::DuplicateRank { rank: 1 }));

    let third = job.join(2).join().expect("no panic").expect("rank 2 joins");
    let second = accepted.join().expect("no panic").expect("the accepted rank 1 joins");
    let config = job.config(1);
    let first = job.rank_zero().expect("rank 0 joins");
    // And after the job is complete.
    assert_eq!(tcp::join(&config).err(), Some(Error::DuplicateRank { rank: 1 }));
    run_together([first, second, third]);
}

#[test]
fn different_size_is_rejected() {
    let job = PendingJob::new(2, Limits::default());
    let config = tcp::Config { size: 3, ..job.config(1) };
    assert_eq!(tcp::join(&config).err(), Some(Error::SizeMismatch { ours: 3, theirs: 2 }));
    let second = job.join(1).join().expect("no panic").expect("join");
    run_together([job.rank_zero().expect("rank 0 joins"), second]);
}

#[test]
fn invalid_bytes_from_unknown_peers_do_not_disturb_the_job() {
    let job = PendingJob::new(2, Limits::default());
    let mut open_connections = Vec::new();
    for bytes in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 31], &[0xff; 72], &[7; 100_000]] {
        let mut peer = TcpStream::connect(job.address).expect("connect");
        // The coordinator may disconnect before it has read everything.
        if let Err(error) = peer.write_all(bytes) {
            assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
        }
        open_connections.push(peer);
    }
    let second = job.join(1).join().expect("no panic").expect("join");
    run_together([job.rank_zero().expect("rank 0 joins"), second]);
}

#[test]
fn peer_without_proof_receives_nothing_computed_from_the_secret() {
    let job = PendingJob::new(2, Limits::default());
    let mut peer = TcpStream::connect(job.address).expect("connect");
    peer.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    peer.write_all(&[1; 72]).expect("nonce and join request");
    let mut response = Vec::new();
    peer.read_to_end(&mut response).expect("the coordinator disconnects");
    assert_eq!(response.len(), 32 + 37, "a nonce and a join response, then the end");
    assert!(response[32..].iter().all(|byte| *byte == 0));
    let second = job.join(1).join().expect("no panic").expect("join");
    run_together([job.rank_zero().expect("rank 0 joins"), second]);
}

#[test]
fn slow_and_silent_peers_delay_no_rank() {
    // The ranks must join in less time than an unauthenticated connection may last.
    let limits = Limits { join_timeout: HANDSHAKE_TIMEOUT - Duration::from_secs(1), ..Limits::default() };
    let job = PendingJob::new(3, limits);
    let mut peers = Vec::new();
    for nth in 0..300 {
        let mut peer = TcpStream::connect(job.address).expect("connect");
        if nth % 2 == 0 {
            peer.write_all(&[0]).expect("one byte");
        }
        peers.push(peer);
    }
    let joining = [1, 2].map(|rank| job.join(rank));
    let mut members = vec![job.rank_zero().expect("rank 0 joins")];
    members.extend(joining.map(|thread| thread.join().expect("no panic").expect("join")));
    run_together(members);
    drop(peers);
}

#[test]
fn silent_server_in_place_of_rank_zero_is_a_missing_rank() {
    let (_listener, address) = bind();
    let joined = tcp::join(&config(1, 2, address, short_join_timeout()));
    assert!(matches!(joined, Err(Error::RankMissing { ranks, .. }) if ranks == [0]));
}

#[test]
fn server_without_the_secret_in_place_of_rank_zero_is_rejected() {
    let (listener, address) = bind();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        stream.write_all(&[9; 32 + 37]).expect("nonce and join response");
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    });
    let joined = tcp::join(&config(1, 2, address, Limits::default()));
    assert!(matches!(joined, Err(Error::WrongSecret { .. })));
    server.join().expect("no panic");
}

/// Joins as rank 1 at a server that passes each connection to `serve`, then closes it. Returns the error.
fn join_at_server(serve: fn(&mut TcpStream)) -> Error {
    let (listener, address) = bind();
    // The thread ends with the test program.
    thread::spawn(move || listener.incoming().flatten().for_each(|mut stream| serve(&mut stream)));
    tcp::join(&config(1, 2, address, short_join_timeout())).map(drop).expect_err("it is no rendezvous")
}

#[test]
fn server_that_closes_before_the_handshake_is_not_said_to_have_another_secret() {
    // Without reading, the end arrives as a reset connection; after reading, as the end of the stream.
    let close_at_once = |_: &mut TcpStream| {};
    let close_after_reading = |stream: &mut TcpStream| drop(stream.read(&mut [0; 64]));
    for serve in [close_at_once, close_after_reading] {
        let error = join_at_server(serve);
        assert!(matches!(&error, Error::RankMissing { ranks, .. } if *ranks == [0]), "{error}");
        let text = error.to_string();
        assert!(text.contains("closed the connection before the handshake"), "{text}");
        assert!(text.contains("crosstie") && !text.contains("does not know"), "{text}");
    }
}

#[test]
fn server_that_closes_during_the_handshake_is_said_to_do_so() {
    let error = join_at_server(|stream| {
        drop(stream.write_all(&[9; 40]));
        drop(stream.read(&mut [0; 128]));
    });
    let text = error.to_string();
    assert!(text.contains("closed the connection during the handshake"), "{text}");
}

#[test]
fn server_that_answers_anything_else_has_no_proof() {
    let error =
        join_at_server(|stream| {
            drop(stream.write_all(
                b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n",
            ));
            drop(stream.read_to_end(&mut Vec::new()));
        });
    assert!(matches!(error, Error::WrongSecret { .. }), "{error}");
    assert!(error.to_string().contains("no other program listens"), "{error}");
}

/// Polls the channel until it fails.
fn failure_of(mut channel: Channel) -> ChannelError {
    loop {
        match channel.poll_event() {
            Ok(_) => thread::sleep(Duration::from_millis(1)),
            Err(error) => return error,
        }
    }
}

#[test]
fn channel_tells_a_close_before_the_handshake_from_a_failed_proof() {
    let (listener, address) = bind();
    let connect = || Channel::connect(address, 1, 2, &secret(), 1 << 10).expect("channel");
    let accept = || listener.accept().expect("accept").0;
    let from_accepted = || Channel::from_accepted(accept(), &secret(), 1 << 10).expect("channel");

    // The peer closes at once, or after it has read this end's nonce; at the end that connects, and at the one that accepts.
    for (connects, reads) in [(true, false), (true, true), (false, false), (false, true)] {
        let (mut channel, mut stream) = if connects {
            (connect(), accept())
        } else {
            let stream = TcpStream::connect(address).expect("connect");
            (from_accepted(), stream)
        };
        if reads {
            assert_eq!(channel.poll_event().expect("no failure yet"), None);
            stream.read_exact(&mut [0; 32]).expect("nonce");
        }
        drop(stream);
        let error = failure_of(channel);
        assert!(matches!(error, ChannelError::ClosedBeforeHandshake), "{connects}, {reads}: {error}");
    }
    // A peer that closes later has at least begun the handshake.
    let mut stream = TcpStream::connect(address).expect("connect");
    let channel = from_accepted();
    stream.write_all(&[1; 40]).expect("a part of the handshake");
    stream.shutdown(Shutdown::Write).expect("shutdown");
    assert!(matches!(failure_of(channel), ChannelError::Closed));
    // A wrong proof, at either end.
    let mut stream = TcpStream::connect(address).expect("connect");
    let channel = from_accepted();
    stream.write_all(&[1; TO_RANK_ZERO]).expect("nonce and join request");
    assert!(matches!(failure_of(channel), ChannelError::Rejected(Error::WrongSecret { .. })));
    let channel = connect();
    let mut stream = accept();
    stream.write_all(&[1; FROM_RANK_ZERO]).expect("nonce and join response");
    let error = failure_of(channel);
    assert!(matches!(error, ChannelError::Rejected(Error::WrongSecret { .. })), "{error}");
}

#[test]
fn frame_longer_than_the_limit_ends_the_job_and_names_the_rank() {
    let small = Limits { max_message: 1000, ..Limits::default() };
    let job = PendingJob::new(2, small);
    let mut larger = job.config(1);
    larger.limits = Limits::default();
    let second =
        thread::spawn(move || tcp::join(&larger).and_then(|mut member| member.all_gather(&[0; 5000])));
    let mut first = job.rank_zero().expect("rank 0 joins");
    let expected = Error::Protocol { rank: 1, violation: Violation::Length };
    assert_eq!(first.barrier(), Err(expected.clone()));
    let error = second.join().expect("no panic").expect_err("rejected");
    // The coordinator closes the connection while rank 1 may still be sending, so rank 1 reads the cause or only the end.
    assert!(error == expected || error == (Error::RankDisconnected { rank: 0 }), "{error}");
}

/// Bytes of the handshake in each direction, and of a frame without payload.
const TO_RANK_ZERO: usize = 32 + 40;
const FROM_RANK_ZERO: usize = 32 + 37;
const EMPTY_FRAME: usize = 5 + 32;

/// Starts a proxy between rank 1 and rank 0. It forwards `unchanged` bytes, replaces the next frame (`EMPTY_FRAME` bytes)
/// by what `modify` returns, and forwards all that follows.
fn start_proxy(
    rank_zero: SocketAddr,
    upstream: bool,
    unchanged: usize,
    modify: fn(Vec<u8>) -> Vec<u8>,
) -> (SocketAddr, JoinHandle<()>) {
    let (listener, address) = bind();
    let thread = thread::spawn(move || {
        let (near, _) = listener.accept().expect("rank 1");
        let far = TcpStream::connect(rank_zero).expect("rank 0");
        let (near_clone, far_clone) = (near.try_clone().expect("clone"), far.try_clone().expect("clone"));
        let (mut source, mut target, from, to) =
            if upstream { (near, far, far_clone, near_clone) } else { (far, near, near_clone, far_clone) };
        let other_direction = thread::spawn(move || forward(from, to));
        // Forward at once what arrives: each end waits for bytes of the other.
        let mut left = unchanged;
        while left > 0 {
            let mut bytes = vec![0; left];
            let count = source.read(&mut bytes).expect("unchanged part");
            assert_ne!(count, 0, "disconnected during the unchanged part");
            target.write_all(&bytes[..count]).expect("unchanged part");
            left -= count;
        }
        let mut frame = vec![0; EMPTY_FRAME];
        source.read_exact(&mut frame).expect("frame");
        target.write_all(&modify(frame)).expect("frame");
        forward(source, target);
        other_direction.join().expect("no panic");
    });
    (address, thread)
}

fn forward(mut from: TcpStream, mut to: TcpStream) {
    // Either end may disconnect; the tests check the errors of the ranks.
    if std::io::copy(&mut from, &mut to).is_ok() {
        to.shutdown(Shutdown::Write).ok();
    }
}

/// Runs barriers through a proxy until one fails, and returns the errors of ranks 0 and 1.
fn fail_barriers_through_proxy(
    upstream: bool,
    unchanged: usize,
    modify: fn(Vec<u8>) -> Vec<u8>,
) -> (Error, Error) {
    fn until_failure(member: Result<Member, Error>) -> Error {
        member
            .and_then(|mut member| {
                for _ in 0..5 {
                    member.barrier()?;
                }
                Ok(())
            })
            .expect_err("the change is detected")
    }
    let job = PendingJob::new(2, Limits { operation_timeout: Duration::from_secs(1), ..Limits::default() });
    let (address, thread) = start_proxy(job.address, upstream, unchanged, modify);
    let config = tcp::Config { rendezvous: address.to_string(), ..job.config(1) };
    let second = thread::spawn(move || until_failure(tcp::join(&config)));
    let first = until_failure(job.rank_zero());
    let second = second.join().expect("no panic");
    thread.join().expect("no panic");
    (first, second)
}

#[test]
fn proxy_that_changes_nothing_does_not_disturb_the_job() {
    let job = PendingJob::new(2, Limits::default());
    let (address, thread) = start_proxy(job.address, true, TO_RANK_ZERO, |frame| frame);
    let config = tcp::Config { rendezvous: address.to_string(), ..job.config(1) };
    let second = thread::spawn(move || tcp::join(&config));
    let mut members =
        [job.rank_zero().expect("rank 0 joins"), second.join().expect("no panic").expect("join")];
    thread::scope(|scope| {
        for member in &mut members {
            scope.spawn(move || (0..5).try_for_each(|_| member.barrier()).expect("undisturbed"));
        }
    });
    drop(members);
    thread.join().expect("no panic");
}

#[test]
fn changed_frame_ends_the_job() {
    let (first, second) = fail_barriers_through_proxy(true, TO_RANK_ZERO, |mut frame| {
        frame[20] ^= 1;
        frame
    });
    assert_eq!(first, Error::Protocol { rank: 1, violation: Violation::Tag });
    assert!(second == first || second == (Error::RankDisconnected { rank: 0 }), "{second}");
}

#[test]
fn replayed_frame_ends_the_job() {
    let (first, second) = fail_barriers_through_proxy(true, TO_RANK_ZERO, |frame| frame.repeat(2));
    assert_eq!(first, Error::Protocol { rank: 1, violation: Violation::Tag });
    assert!(second == first || second == (Error::RankDisconnected { rank: 0 }), "{second}");
}

#[test]
fn dropped_frame_ends_the_job() {
    let (first, second) = fail_barriers_through_proxy(true, TO_RANK_ZERO, |_| Vec::new());
    assert!(matches!(&first, Error::RankMissing { ranks, .. } if *ranks == [1]), "{first}");
    assert_eq!(second, first);
}

#[test]
fn changed_result_frame_ends_the_job() {
    let (first, second) = fail_barriers_through_proxy(false, FROM_RANK_ZERO, |mut frame| {
        frame[0] ^= 1;
        frame
    });
    assert_eq!(second, Error::Protocol { rank: 1, violation: Violation::Tag });
    assert_eq!(first, Error::RankDisconnected { rank: 1 });
}
