//! Peers in other processes: killed, stopped, or something else than a peer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crosstie::rails::*;
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::rng;
use crosstie_testkit::seccomp::exit_at_once;
use crosstie_testkit::wait::eventually;

use super::pair::*;

const LEN: usize = 600_000;

fn rails() -> Rails {
    Rails::new(vec![software(), software()], Config::default()).unwrap()
}

/// In a child process: receives messages into memory of the program until it is killed. In an ordinary run it does nothing.
#[test]
fn peer_process() {
    let Some(task) = child::task() else { return };
    let rails = rails();
    let mut listener = rails.listen().unwrap();
    child::write(&listener.handle().to_bytes());
    let mut receiver = until(|| listener.accept().unwrap());
    let memory = rails.allocate(LEN).unwrap();
    let mut outstanding = std::collections::VecDeque::new();
    loop {
        while outstanding.len() < 4 {
            let buffer = RecvBuffer { memory: &memory, range: 0..LEN, tag: 0 };
            match receiver.irecv(&[buffer]) {
                Ok(Some(receive)) => outstanding.push_back(receive),
                Ok(None) => break,
                Err(_) => return,
            }
        }
        match receiver.test(outstanding[0]) {
            Ok(Some(_)) if task == CLOSES => {
                drop(receiver);
                exit_at_once();
            }
            Ok(Some(_)) => drop(outstanding.pop_front()),
            Ok(None) => std::thread::yield_now(),
            Err(_) => return,
        }
    }
}

/// In a child process: sends one message, closes the connection and exits at once. In an ordinary run it does nothing.
#[test]
fn closing_sender_process() {
    if !child::is_child() {
        return;
    }
    let handle = Handle::from_bytes(&child::read().try_into().unwrap()).unwrap();
    let rails = rails();
    let memory = rails.allocate(LEN).unwrap();
    let mut sender = connect_to(&rails, &handle);
    let mut random = rng::Random(1);
    send_until(&mut sender, &memory, &mut random, |done| done >= 1).unwrap();
    drop(sender);
    exit_at_once();
}

/// Values of the task of a [`peer_process`]: receive until the connection ends; close it and exit after the first message.
const RECEIVES: &str = "receives";
const CLOSES: &str = "closes";

fn start(task: &str) -> (Child, Handle) {
    let mut child = Child::start(peer_process, task);
    let handle = child.read();
    (child, Handle::from_bytes(&handle.try_into().unwrap()).unwrap())
}

fn connect_to(rails: &Rails, handle: &Handle) -> SendConnection {
    let mut connecting = rails.connect(handle).unwrap();
    until(|| connecting.poll().unwrap())
}

/// Sends until `stop`, or until the connection ends; returns why.
fn send_until(
    sender: &mut SendConnection,
    memory: &Memory,
    sizes: &mut rng::Random,
    mut stop: impl FnMut(u64) -> bool,
) -> Result<u64, RequestError> {
    let (mut done, started) = (0, Instant::now());
    let mut outstanding = std::collections::VecDeque::new();
    while !stop(done) {
        check_hang(started);
        if outstanding.len() < 4 {
            let len = [100, 4096, 50_000, LEN][sizes.index(4)];
            outstanding.extend(sender.isend(memory, 0..len, 0)?);
        }
        if let Some(request) = outstanding.front()
            && sender.test(*request)?.is_some()
        {
            outstanding.pop_front();
            done += 1;
        }
        if outstanding.is_empty() {
            std::thread::yield_now();
        }
    }
    Ok(done)
}

#[test]
fn all_requests_end_with_a_cause_when_the_peer_is_killed_at_any_time() {
    let mut random = rng::Random(rng::seed());
    let rails = rails();
    let memory = rails.allocate(LEN).unwrap();
    for _ in 0..8 {
        let (mut child, handle) = start(RECEIVES);
        let mut sender = connect_to(&rails, &handle);
        send_until(&mut sender, &memory, &mut random, |done| done >= 20).unwrap();
        let delay = Duration::from_micros(random.below(3000));
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            child.kill();
        });
        let error = send_until(&mut sender, &memory, &mut random, |_| false).unwrap_err();
        assert_eq!(error, RequestError::Ended(Cause::PeerGone));
        killer.join().unwrap();
        assert_eq!(sender.cause(), Some(Cause::PeerGone));
    }
    // Nothing holds the memory.
    memory.deregister(HANG).unwrap();
}

#[test]
fn a_stopped_peer_holds_up_nobody_else_and_continues_later() {
    let mut random = rng::Random(rng::seed());
    let rails = rails();
    let memory = rails.allocate(LEN).unwrap();
    let (mut stopped, stopped_handle) = start(RECEIVES);
    let (mut running, running_handle) = start(RECEIVES);
    let mut to_stopped = connect_to(&rails, &stopped_handle);
    let mut to_running = connect_to(&rails, &running_handle);
    send_until(&mut to_stopped, &memory, &mut random, |done| done >= 10).unwrap();
    stopped.signal(libc::SIGSTOP);
    // The stopped peer posts no buffers: sends to it wait, and return.
    let mut waiting = 0;
    send_until(&mut to_stopped, &memory, &mut random, |_| {
        waiting += 1;
        waiting > 2_000
    })
    .unwrap();
    send_until(&mut to_running, &memory, &mut random, |done| done >= 100).unwrap();
    stopped.signal(libc::SIGCONT);
    send_until(&mut to_stopped, &memory, &mut random, |done| done >= 50).unwrap();
    drop((to_stopped, to_running));
    // Both peers learn that the connection is closed, and end.
    for child in [&mut stopped, &mut running] {
        assert!(child.wait().success());
    }
}

/// A connection that is dropped has told its peer what was done, also if the process ends the instant after.
#[test]
fn a_peer_that_exits_right_after_closing_has_said_so() {
    let rails = rails();
    let memory = rails.allocate(LEN).unwrap();
    for _ in 0..4 {
        let (mut child, handle) = start(CLOSES);
        let mut sender = connect_to(&rails, &handle);
        let send = until(|| sender.isend(&memory, 0..LEN, 0).unwrap());
        until(|| sender.test(send).unwrap());
        // Without making progress.
        assert_eq!(until(|| sender.cause()), Cause::PeerClosed);
        child.wait();

        let mut listener = rails.listen().unwrap();
        let mut child = Child::start(closing_sender_process, "sends");
        child.write(&listener.handle().to_bytes());
        let mut receiver = until(|| listener.accept().unwrap());
        let buffer = RecvBuffer { memory: &memory, range: 0..LEN, tag: 0 };
        receiver.irecv(&[buffer]).unwrap().unwrap();
        assert_eq!(until(|| receiver.cause()), Cause::PeerClosed);
        child.wait();
    }
}

#[test]
fn a_peer_without_the_secret_is_dropped_and_disturbs_nobody() {
    let (here, there) = (rails(), rails());
    let mut listener = there.listen().unwrap();
    let handle = listener.handle();
    let port = u16::from_le_bytes([handle.to_bytes()[4], handle.to_bytes()[5]]);
    let address = ("127.0.0.1", port);
    let mut strangers: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (n, stranger) in strangers.iter_mut().enumerate() {
        // Nothing, too little, or a wrong proof of the secret: a nonce, rank and size, and the proof.
        stranger.write_all(&vec![n as u8; [0, 5, 32 + 40, 5000][n % 4]]).ok();
    }
    let mut wrong = handle.to_bytes();
    wrong[30] ^= 1;
    let mut refused = here.connect(&Handle::from_bytes(&wrong).unwrap()).unwrap();
    let mut right = here.connect(&handle).unwrap();
    let (mut sender, mut receiver, mut is_refused) = (None, None, false);
    eventually("both ends are connected, and the stranger is refused", || {
        if sender.is_none() {
            sender = right.poll().unwrap();
        }
        // Peers that have shown nothing, or another secret, are dropped by calls of `accept`.
        if let Some(accepted) = listener.accept().unwrap() {
            assert!(receiver.replace(accepted).is_none(), "only one peer knows the secret");
        }
        if !is_refused {
            is_refused = refused.poll().is_err();
        }
        sender.is_some() && receiver.is_some() && is_refused
    });
    let mut answer = Vec::new();
    strangers[2].set_read_timeout(Some(HANG)).unwrap();
    strangers[2].read_to_end(&mut answer).unwrap();
    // A fresh nonce, and zeros instead of an answer.
    assert_eq!((answer.len(), &answer[32..]), (32 + 37, &[0; 37][..]), "the stranger got an answer");
    assert!(Handle::from_bytes(&[0; Handle::LEN]).is_err());
}
