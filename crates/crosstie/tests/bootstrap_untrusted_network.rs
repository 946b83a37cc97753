//! The TCP rendezvous against those who do not belong, and against a network that meddles.

mod bootstrap_suite;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bootstrap_suite::exercise;
use crosstie::bootstrap::limits::HANDSHAKE_TIMEOUT;
use crosstie::bootstrap::{Bootstrap, Error, Limits, Member, Secret, Operation, Violation, tcp};

const SECRET: &str = "the secret of this job";

fn secret() -> Secret {
    Secret::new(SECRET).expect("long enough")
}

/// A job in the making: rank 0 waits in its thread for the others.
struct Meeting {
    address: SocketAddr,
    size: u32,
    limits: Limits,
    first: JoinHandle<Result<Member, Error>>,
}

impl Meeting {
    fn new(size: u32, limits: Limits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        let address = listener.local_addr().expect("address");
        let first = thread::spawn(move || tcp::join_as_rank_zero(listener, size, &secret(), limits));
        Meeting { address, size, limits, first }
    }

    fn config(&self, rank: u32) -> tcp::Config {
        let (size, limits) = (self.size, self.limits);
        tcp::Config {
            rank,
            size,
            rendezvous: self.address.to_string(),
            listen: None,
            secret: secret(),
            limits,
        }
    }

    /// A rank that joins in its own thread.
    fn join(&self, rank: u32) -> JoinHandle<Result<Member, Error>> {
        let config = self.config(rank);
        thread::spawn(move || tcp::join(&config))
    }

    fn first(self) -> Result<Member, Error> {
        self.first.join().expect("no panic")
    }
}

fn exercise_together(members: impl IntoIterator<Item = Member>) {
    thread::scope(|scope| {
        for mut member in members {
            scope.spawn(move || exercise(&mut member));
        }
    });
}

fn quick_join() -> Limits {
    Limits { join_timeout: Duration::from_secs(1), ..Limits::default() }
}

#[test]
fn a_wrong_secret_is_refused_and_honest_ranks_go_on() {
    let meeting = Meeting::new(2, Limits::default());
    let wrong =
        tcp::Config { secret: Secret::new("some other secret").expect("long enough"), ..meeting.config(1) };
    let error = tcp::join(&wrong).expect_err("refused");
    assert!(matches!(error, Error::WrongSecret { .. }), "{error}");
    assert!(!error.to_string().contains("some other"), "{error}");

    let second = meeting.join(1).join().expect("no panic").expect("the honest rank 1 joins");
    let first = meeting.first().expect("rank 0 joins");
    exercise_together([first, second]);
}

#[test]
fn rank_zero_tells_of_the_wrong_secret_when_nobody_else_comes() {
    let meeting = Meeting::new(2, quick_join());
    let wrong =
        tcp::Config { secret: Secret::new("some other secret").expect("long enough"), ..meeting.config(1) };
    assert!(matches!(tcp::join(&wrong), Err(Error::WrongSecret { .. })));
    match meeting.first() {
        Err(Error::RankMissing { ranks, during: Operation::Join, note, .. }) => {
            assert_eq!(ranks, [1]);
            assert_eq!(note, "1 refused for a wrong secret");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_never_comes_is_named_to_everybody() {
    let meeting = Meeting::new(5, quick_join());
    let joining: Vec<_> = [1, 3].map(|rank| meeting.join(rank)).into();
    let mut results = vec![meeting.first()];
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
fn rank_zero_that_never_comes_is_named() {
    // A port that nobody listens on.
    let free = "127.0.0.1:1";
    let config = tcp::Config {
        rank: 1,
        size: 2,
        rendezvous: free.to_string(),
        listen: None,
        secret: secret(),
        limits: quick_join(),
    };
    match tcp::join(&config) {
        Err(Error::RankMissing { ranks, note, .. }) => {
            assert_eq!(ranks, [0]);
            assert!(note.contains(free), "{note}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_may_come_before_rank_zero() {
    // An address of its own: no other test can take the port in between.
    let listener = TcpListener::bind("127.0.0.2:0").expect("listener");
    let address = listener.local_addr().expect("address");
    drop(listener);
    let config = |rank| tcp::Config {
        rank,
        size: 2,
        rendezvous: address.to_string(),
        listen: None,
        secret: secret(),
        limits: Limits::default(),
    };
    let late = config(1);
    let second = thread::spawn(move || tcp::join(&late));
    thread::sleep(Duration::from_millis(100));
    let first = tcp::join(&config(0)).expect("rank 0 listens where the others look");
    exercise_together([first, second.join().expect("no panic").expect("rank 1 found it")]);
}

#[test]
fn a_second_rank_is_refused_and_the_first_goes_on() {
    let meeting = Meeting::new(3, Limits::default());
    let early = meeting.join(1);
    // Before the job is complete: one of the two is refused, the other waits.
    let rival = meeting.join(1);
    while !early.is_finished() && !rival.is_finished() {
        thread::sleep(Duration::from_millis(5));
    }
    let (refused, seated) = if early.is_finished() { (early, rival) } else { (rival, early) };
    assert_eq!(refused.join().expect("no panic").err(), Some(Error::DuplicateRank { rank: 1 }));

    let third = meeting.join(2).join().expect("no panic").expect("rank 2 joins");
    let second = seated.join().expect("no panic").expect("the seated rank 1 joins");
    let config = meeting.config(1);
    let first = meeting.first().expect("rank 0 joins");
    // And after it is complete.
    assert_eq!(tcp::join(&config).err(), Some(Error::DuplicateRank { rank: 1 }));
    exercise_together([first, second, third]);
}

#[test]
fn another_size_is_refused() {
    let meeting = Meeting::new(2, Limits::default());
    let config = tcp::Config { size: 3, ..meeting.config(1) };
    assert_eq!(tcp::join(&config).err(), Some(Error::SizeMismatch { ours: 3, theirs: 2 }));
    let second = meeting.join(1).join().expect("no panic").expect("join");
    exercise_together([meeting.first().expect("lead"), second]);
}

#[test]
fn rubbish_from_strangers_changes_nothing() {
    let meeting = Meeting::new(2, Limits::default());
    let mut held = Vec::new();
    for rubbish in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 31], &[0xff; 72], &[7; 100_000]] {
        let mut stranger = TcpStream::connect(meeting.address).expect("connect");
        // The far end may hang up before it has taken everything.
        if let Err(error) = stranger.write_all(rubbish) {
            assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
        }
        held.push(stranger);
    }
    let second = meeting.join(1).join().expect("no panic").expect("join");
    exercise_together([meeting.first().expect("lead"), second]);
}

#[test]
fn whoever_proves_nothing_gets_nothing_made_from_the_secret() {
    let meeting = Meeting::new(2, Limits::default());
    let mut stranger = TcpStream::connect(meeting.address).expect("connect");
    stranger.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    stranger.write_all(&[1; 72]).expect("nonce and claim");
    let mut answer = Vec::new();
    stranger.read_to_end(&mut answer).expect("hung up on");
    assert_eq!(answer.len(), 32 + 37, "a nonce and a verdict, then the end");
    assert!(answer[32..].iter().all(|byte| *byte == 0));
    let second = meeting.join(1).join().expect("no panic").expect("join");
    exercise_together([meeting.first().expect("lead"), second]);
}

#[test]
fn slow_and_silent_strangers_hold_up_nobody() {
    // Not even for the time that they are suffered: the ranks have to join within less.
    let limits = Limits { join_timeout: HANDSHAKE_TIMEOUT - Duration::from_secs(1), ..Limits::default() };
    let meeting = Meeting::new(3, limits);
    let mut strangers = Vec::new();
    for nth in 0..300 {
        let mut stranger = TcpStream::connect(meeting.address).expect("connect");
        if nth % 2 == 0 {
            stranger.write_all(&[0]).expect("one byte");
        }
        strangers.push(stranger);
    }
    let joining = [1, 2].map(|rank| meeting.join(rank));
    let mut members = vec![meeting.first().expect("lead")];
    members.extend(joining.map(|thread| thread.join().expect("no panic").expect("join")));
    exercise_together(members);
    drop(strangers);
}

#[test]
fn a_silent_server_in_place_of_rank_zero_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let config = tcp::Config {
        rank: 1,
        size: 2,
        rendezvous: listener.local_addr().expect("address").to_string(),
        listen: None,
        secret: secret(),
        limits: quick_join(),
    };
    assert!(matches!(tcp::join(&config), Err(Error::RankMissing { ranks, .. }) if ranks == [0]));
}

#[test]
fn an_impostor_in_place_of_rank_zero_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = listener.local_addr().expect("address");
    let impostor = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        stream.write_all(&[9; 32 + 37]).expect("nonce and verdict");
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    });
    let config = tcp::Config {
        rank: 1,
        size: 2,
        rendezvous: address.to_string(),
        listen: None,
        secret: secret(),
        limits: Limits::default(),
    };
    assert!(matches!(tcp::join(&config), Err(Error::WrongSecret { .. })));
    impostor.join().expect("no panic");
}

#[test]
fn a_frame_longer_than_the_limit_ends_the_job_by_name() {
    let small = Limits { max_message: 1000, ..Limits::default() };
    let meeting = Meeting::new(2, small);
    let mut generous = meeting.config(1);
    generous.limits = Limits::default();
    let second =
        thread::spawn(move || tcp::join(&generous).and_then(|mut member| member.all_gather(&[0; 5000])));
    let mut first = meeting.first().expect("lead");
    let expected = Error::Protocol { rank: 1, violation: Violation::Length };
    assert_eq!(first.barrier(), Err(expected.clone()));
    let error = second.join().expect("no panic").expect_err("refused");
    // Its connection is cut while it may still be sending: it learns the cause, or at least the end.
    assert!(error == expected || error == (Error::RankDisconnected { rank: 0 }), "{error}");
}

/// Bytes of the handshake in each direction, and of a frame without payload.
const TO_RANK_ZERO: usize = 32 + 40;
const FROM_RANK_ZERO: usize = 32 + 37;
const EMPTY_FRAME: usize = 5 + 32;

/// Sits between rank 1 and rank 0. Passes `clean` bytes on, hands the next `EMPTY_FRAME` bytes to `meddle`, and passes
/// on what comes out and all that follows.
fn meddler(
    rank_zero: SocketAddr,
    upstream: bool,
    clean: usize,
    meddle: fn(Vec<u8>) -> Vec<u8>,
) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = listener.local_addr().expect("address");
    let thread = thread::spawn(move || {
        let (near, _) = listener.accept().expect("rank 1");
        let far = TcpStream::connect(rank_zero).expect("rank 0");
        let (near_too, far_too) = (near.try_clone().expect("clone"), far.try_clone().expect("clone"));
        let (mut victim, mut target, from, to) =
            if upstream { (near, far, far_too, near_too) } else { (far, near, near_too, far_too) };
        let other_way = thread::spawn(move || pass(from, to));
        // As they come: each side waits for the other's.
        let mut left = clean;
        while left > 0 {
            let mut bytes = vec![0; left];
            let count = victim.read(&mut bytes).expect("clean part");
            assert_ne!(count, 0, "hung up during the clean part");
            target.write_all(&bytes[..count]).expect("clean part");
            left -= count;
        }
        let mut frame = vec![0; EMPTY_FRAME];
        victim.read_exact(&mut frame).expect("frame");
        target.write_all(&meddle(frame)).expect("frame");
        pass(victim, target);
        other_way.join().expect("no panic");
    });
    (address, thread)
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    // Either side may hang up; the ranks' errors are what the tests look at.
    if std::io::copy(&mut from, &mut to).is_ok() {
        to.shutdown(Shutdown::Write).ok();
    }
}

/// What ranks 0 and 1 get from `barrier` after `barrier`, until one fails, across a meddler.
fn barriers_across(upstream: bool, clean: usize, meddle: fn(Vec<u8>) -> Vec<u8>) -> (Error, Error) {
    fn until_failure(member: Result<Member, Error>) -> Error {
        member
            .and_then(|mut member| {
                for _ in 0..5 {
                    member.barrier()?;
                }
                Ok(())
            })
            .expect_err("the meddling is noticed")
    }
    let meeting = Meeting::new(2, Limits { operation_timeout: Duration::from_secs(1), ..Limits::default() });
    let (address, thread) = meddler(meeting.address, upstream, clean, meddle);
    let config = tcp::Config { rendezvous: address.to_string(), ..meeting.config(1) };
    let second = thread::spawn(move || until_failure(tcp::join(&config)));
    let first = until_failure(meeting.first());
    let second = second.join().expect("no panic");
    thread.join().expect("no panic");
    (first, second)
}

#[test]
fn a_meddler_that_does_nothing_is_not_noticed() {
    let meeting = Meeting::new(2, Limits::default());
    let (address, thread) = meddler(meeting.address, true, TO_RANK_ZERO, |frame| frame);
    let config = tcp::Config { rendezvous: address.to_string(), ..meeting.config(1) };
    let second = thread::spawn(move || tcp::join(&config));
    let mut members = [meeting.first().expect("lead"), second.join().expect("no panic").expect("join")];
    thread::scope(|scope| {
        for member in &mut members {
            scope.spawn(move || (0..5).try_for_each(|_| member.barrier()).expect("undisturbed"));
        }
    });
    drop(members);
    thread.join().expect("no panic");
}

#[test]
fn a_changed_frame_ends_the_job() {
    let (first, second) = barriers_across(true, TO_RANK_ZERO, |mut frame| {
        frame[20] ^= 1;
        frame
    });
    assert_eq!(first, Error::Protocol { rank: 1, violation: Violation::Tag });
    assert!(second == first || second == (Error::RankDisconnected { rank: 0 }), "{second}");
}

#[test]
fn a_replayed_frame_ends_the_job() {
    let (first, second) = barriers_across(true, TO_RANK_ZERO, |frame| frame.repeat(2));
    assert_eq!(first, Error::Protocol { rank: 1, violation: Violation::Tag });
    assert!(second == first || second == (Error::RankDisconnected { rank: 0 }), "{second}");
}

#[test]
fn a_dropped_frame_ends_the_job() {
    let (first, second) = barriers_across(true, TO_RANK_ZERO, |_| Vec::new());
    assert!(matches!(&first, Error::RankMissing { ranks, .. } if *ranks == [1]), "{first}");
    assert_eq!(second, first);
}

#[test]
fn a_changed_answer_ends_the_job() {
    let (first, second) = barriers_across(false, FROM_RANK_ZERO, |mut frame| {
        frame[0] ^= 1;
        frame
    });
    assert_eq!(second, Error::Protocol { rank: 1, violation: Violation::Tag });
    assert_eq!(first, Error::RankDisconnected { rank: 1 });
}
