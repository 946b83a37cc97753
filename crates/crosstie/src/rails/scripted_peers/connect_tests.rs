//! Setting up a connection: time that passes while the listener's program is busy, and peers on the network that try to get in.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;
use crate::rails::connect::Handshake;
use crate::rails::mailbox::Mailbox;
use crate::rails::{HANDSHAKE_TIMEOUT, Listener, SetupError};

const HOUR: Duration = Duration::from_secs(3600);

fn start(handle: &Handle, now: Instant) -> Handshake {
    Handshake::start(handle, Arc::new(Mailbox::new().unwrap()), now).unwrap()
}

/// A handshake that was begun long ago, and whose listener has just called `accept`; and the time that it is.
fn accepted_late(listener: &mut Listener) -> (Handshake, Instant) {
    let begin = Instant::now();
    let mut handshake = start(&listener.handle(), begin);
    // The machine has to answer in time; its program has not.
    assert_eq!(handshake.deadline(), Some(begin + HANDSHAKE_TIMEOUT));
    until(|| {
        assert_eq!(handshake.poll(begin).unwrap(), None);
        handshake.deadline().is_none().then_some(())
    });
    for hours in 1..100 {
        assert_eq!(handshake.poll(begin + hours * HOUR).unwrap(), None);
    }
    let now = begin + 100 * HOUR;
    let opened = until(|| {
        assert!(listener.accept().unwrap().is_none());
        handshake.poll(now).unwrap()
    });
    assert_eq!(opened, ChannelEvent::Open);
    (handshake, now)
}

#[test]
fn connect_waits_for_accept_as_long_as_the_listener_lives() {
    let there = rails();
    let mut listener = there.listen().unwrap();
    let (mut handshake, now) = accepted_late(&mut listener);
    // From then on it takes no longer than usual.
    let almost = now + HANDSHAKE_TIMEOUT - Duration::from_millis(1);
    assert_eq!(handshake.poll(almost).unwrap(), None);
    let error = handshake.poll(now + HANDSHAKE_TIMEOUT).unwrap_err();
    assert!(
        matches!(&error, SetupError::Handshake(error) if error.kind() == std::io::ErrorKind::TimedOut),
        "{error}"
    );
}

#[test]
fn connect_ends_when_the_listener_is_closed_before_it_accepts() {
    let (here, there) = (rails(), rails());
    let listener = there.listen().unwrap();
    let handle = listener.handle();
    let mut before = here.connect(&handle).unwrap();
    assert!(before.poll().unwrap().is_none());
    drop(listener);
    let mut after = here.connect(&handle).unwrap();
    for connecting in [&mut before, &mut after] {
        let error = until(|| connecting.poll().err());
        assert!(matches!(error, SetupError::Handshake(_)), "{error}");
    }
}

#[test]
fn dropping_an_attempt_to_connect_ends_it_before_anybody_accepts() {
    let here = rails();
    let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let connecting = here.connect(&Handle::new(socket.local_addr().unwrap(), [7; 32])).unwrap();
    let mut accepted = socket.accept().unwrap().0;
    drop(connecting);
    accepted.set_read_timeout(Some(HANG)).unwrap();
    let mut sent = Vec::new();
    match accepted.read_to_end(&mut sent) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

/// Everything that both ends send, as somebody on the network sees it, and `change` of what the sender sends.
fn spy(
    here: &Rails,
    listener: &mut Listener,
    change: fn(&mut Vec<u8>),
) -> (Vec<u8>, Result<SendConnection, SetupError>) {
    let handle = listener.handle();
    let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut bytes = handle.to_bytes();
    bytes[4..6].copy_from_slice(&socket.local_addr().unwrap().port().to_le_bytes());
    let mut connecting = here.connect(&Handle::from_bytes(&bytes).unwrap()).unwrap();
    let mut ends = [socket.accept().unwrap().0, TcpStream::connect(handle.address()).unwrap()];
    ends.iter().for_each(|end| end.set_nonblocking(true).unwrap());
    let mut seen = Vec::new();
    let (mut sender, mut receiver) = (None, None);
    let outcome = until(|| {
        for from in 0..2 {
            let mut bytes = vec![0; 4096];
            match ends[from].read(&mut bytes) {
                Ok(count @ 1..) => bytes.truncate(count),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                _ => {
                    ends[1 - from].shutdown(std::net::Shutdown::Both).ok();
                    continue;
                }
            }
            if from == 0 {
                change(&mut bytes);
            }
            seen.extend(&bytes);
            ends[1 - from].write_all(&bytes).ok();
        }
        receiver = receiver.take().or_else(|| listener.accept().unwrap());
        if sender.is_none() {
            match connecting.poll() {
                Ok(connected) => sender = connected,
                Err(error) => return Some(Err(error)),
            }
        }
        if receiver.is_some() { sender.take().map(Ok) } else { None }
    });
    (seen, outcome)
}

#[test]
fn somebody_on_the_network_never_sees_the_secret_and_cannot_use_what_they_see() {
    let (here, there) = (rails(), rails());
    let mut listener = there.listen().unwrap();
    let secret = listener.handle().to_bytes()[24..56].to_vec();
    let (seen, connected) = spy(&here, &mut listener, |_| {});
    connected.unwrap();
    assert!(!seen.windows(8).any(|bytes| secret.windows(8).any(|part| part == bytes)), "the secret was sent");
    // The listener answers what the sender has sent with other numbers, so it does not fit once more.
    let mut again = TcpStream::connect(listener.handle().address()).unwrap();
    again.write_all(&seen).ok();
    again.set_nonblocking(true).unwrap();
    until(|| {
        assert!(listener.accept().unwrap().is_none());
        let read = again.read(&mut [0; 256]);
        (matches!(read, Ok(0)) || read.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock))
            .then_some(())
    });
}

#[test]
fn a_frame_that_was_changed_on_the_network_ends_the_handshake() {
    let (here, there) = (rails(), rails());
    let mut listener = there.listen().unwrap();
    // The frame with the endpoints is the longest. Rails, keys and addresses could be changed otherwise.
    let (_, connected) = spy(&here, &mut listener, |bytes| {
        if bytes.len() > 100 {
            bytes[60] ^= 1;
        }
    });
    let error = connected.map(drop).unwrap_err();
    assert!(matches!(error, SetupError::Handshake(_)), "{error}");
}

#[test]
fn a_frame_that_was_changed_on_the_network_ends_the_connection() {
    let here = rails();
    let (mut sender, mut peer) = Peer::receiver(&here);
    // As long as a frame, and not made with the key of this connection.
    let stream = std::os::fd::AsFd::as_fd(&peer.channel).try_clone_to_owned().unwrap();
    TcpStream::from(stream).write_all(&[&[5, 5, 0, 0, 0, 0][..], &[0; 36]].concat()).unwrap();
    let cause = until(|| {
        sender.progress();
        sender.cause()
    });
    assert!(matches!(cause, crate::rails::Cause::PeerError(_)), "{cause:?}");
    assert_eq!(peer.read(), None);
}

/// More senders at once than a listener looks at, and strangers before them: nobody is sent away for good.
#[test]
fn many_senders_that_waited_for_accept_are_all_accepted() {
    const SENDERS: usize = crate::rails::MAX_UNAUTHENTICATED + 32;
    let small = || Config { slots: 1, data_qps: 1, low_water: 1, high_water: 1, ..config() };
    let [here, there] = [(); 2].map(|()| Rails::new(vec![software()], small()).unwrap());
    let mut listener = there.listen().unwrap();
    let address = listener.handle().address();
    let strangers: Vec<TcpStream> = (0..16).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut waiting: Vec<_> = (0..SENDERS).map(|_| here.connect(&listener.handle()).unwrap()).collect();
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    until(|| {
        receivers.extend(listener.accept().unwrap());
        waiting.retain_mut(|connecting| {
            let sender = connecting.poll().unwrap();
            let is_waiting = sender.is_none();
            senders.extend(sender);
            is_waiting
        });
        (senders.len() == SENDERS && receivers.len() == SENDERS).then_some(())
    });
    drop(strangers);
}
