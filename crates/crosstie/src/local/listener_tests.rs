use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crosstie_testkit::child::{self, Child};
use crosstie_testkit::footprint::processor_time;
use crosstie_testkit::wait::{TIMEOUT, eventually};

use super::super::connection::{Connection, HandshakeError};
use super::super::socket::blocking_files::BlockingFile;
use super::*;
use crate::memory::segment::{Segment, SharedRef};
use crate::wait::{self, Parker, WaitStrategy};

const KIND: &str = "test";

/// A name that no other test uses, nor another run.
fn name(what: &str) -> Name {
    Name::new(&format!("{what}-{}", std::process::id())).unwrap()
}

type Admit = dyn Fn(&Recorder, ClientId, &[u8]) -> Admission + Send + Sync;

/// A handler that records the calls it gets.
struct Recorder {
    admit: Box<Admit>,
    admitted: Mutex<Vec<ClientId>>,
    removed: Mutex<Vec<ClientId>>,
    /// How many calls to postpone: `remove` returns false that many times.
    postponements: AtomicU32,
    listener: Mutex<Option<Listener>>,
    drop_listener_in_remove: bool,
}

impl Recorder {
    fn new(admit: impl Fn(&Recorder, ClientId, &[u8]) -> Admission + Send + Sync + 'static) -> Recorder {
        Recorder {
            admit: Box::new(admit),
            admitted: Mutex::default(),
            removed: Mutex::default(),
            postponements: AtomicU32::new(0),
            listener: Mutex::default(),
            drop_listener_in_remove: false,
        }
    }

    /// Accepts every client, with its hello as the reply.
    fn accepting_all() -> Arc<Recorder> {
        Arc::new(Recorder::new(|_, _, hello| accept(hello)))
    }

    fn removals(&self) -> usize {
        lock(&self.removed).len()
    }
}

fn accept(reply: &[u8]) -> Admission {
    Admission::Accept { reply: reply.to_vec(), files: Vec::new() }
}

impl ClientHandler for Recorder {
    fn admit(&self, client: ClientId, hello: &[u8]) -> Admission {
        let admission = (self.admit)(self, client, hello);
        if matches!(admission, Admission::Accept { .. }) {
            lock(&self.admitted).push(client);
        }
        admission
    }

    fn remove(&self, client: ClientId) -> bool {
        if self.postponements.load(Relaxed) > 0 {
            self.postponements.fetch_sub(1, Relaxed);
            return false;
        }
        if self.drop_listener_in_remove {
            drop(lock(&self.listener).take());
        }
        lock(&self.removed).push(client);
        true
    }
}

#[test]
fn clients_connect_get_a_segment_and_disconnect() {
    let name = name("segment");
    let segment = Segment::create(4096).unwrap();
    let file = segment.fd().try_clone_to_owned().unwrap();
    let recorder = Arc::new(Recorder::new(move |_, _, hello| Admission::Accept {
        reply: hello.iter().rev().copied().collect(),
        files: vec![file.try_clone().unwrap()],
    }));
    let listener = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let (connection, reply, files) = Connection::connect(KIND, &name, b"olleh", TIMEOUT).unwrap();
    assert_eq!((reply.as_slice(), files.len()), (&b"hello"[..], 1));
    assert!(Segment::open(files.into_iter().next().unwrap(), 4096).is_ok());
    let (other, reply, _) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
    assert!(reply.is_empty() && !connection.is_closed() && !other.is_closed());

    drop(connection);
    eventually("the client is removed", || recorder.removals() == 1);
    assert_eq!(lock(&recorder.admitted)[0], lock(&recorder.removed)[0]);
    assert!(!other.is_closed());
    drop(listener);
    eventually("the client sees the end of the listener", || other.is_closed());
    assert_eq!(recorder.removals(), 1, "no removal after the listener is dropped");
    eventually("the watcher drops the handler", || Arc::strong_count(&recorder) == 1);
}

#[test]
fn name_has_one_listener_at_a_time() {
    let name = name("twice");
    let first = Listener::open(KIND, &name, Recorder::accepting_all()).unwrap();
    let taken = Listener::open(KIND, &name, Recorder::accepting_all());
    assert!(matches!(taken, Err(ListenError::NameTaken { .. })), "{taken:?}");
    drop(Listener::open("test2", &name, Recorder::accepting_all()).unwrap());
    let (connection, ..) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
    drop(first);
    let _second = Listener::open(KIND, &name, Recorder::accepting_all()).unwrap();
    eventually("the client sees the end of the first listener", || connection.is_closed());
    drop(Connection::connect(KIND, &name, b"", TIMEOUT).unwrap());
}

#[test]
fn connect_without_listener_fails_at_once() {
    let connected = Connection::connect(KIND, &name("nobody"), b"", TIMEOUT).map(|_| ());
    assert!(matches!(connected, Err(HandshakeError::NoServer { .. })), "{connected:?}");
    let connected = Connection::connect(KIND, &name("nobody"), &[0; MAX_HELLO + 1], TIMEOUT).map(|_| ());
    assert!(matches!(connected, Err(HandshakeError::HelloTooLong(4097))), "{connected:?}");
}

#[test]
fn client_of_another_version_is_told_the_version_and_others_go_on() {
    let name = name("older");
    let _listener = Listener::open(KIND, &name, Recorder::accepting_all()).unwrap();
    let (connection, ..) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
    let address = Address::of_service(KIND, &name).unwrap();
    let header = |version: u32, kind| Header { version, kind }.as_bytes().to_vec();
    for first in [
        header(Header::VERSION - (1 << 24), Header::HELLO),
        header(Header::VERSION + (1 << 24), Header::HELLO),
        header(Header::VERSION, Header::HELLO + 100),
        b"short".to_vec(),
        vec![7; 8 + MAX_HELLO + 1],
    ] {
        let socket = socket::connect(&address, TIMEOUT).unwrap();
        socket::send(&socket, &first, &[], &[]).unwrap();
        let (mut header, mut reply) = (Header::new_zeroed(), [0; 16]);
        let len = socket::receive(&socket, header.as_mut_bytes(), &mut reply).unwrap();
        assert_eq!((header, len), (Header::new(Header::REFUSED), 0));
        let end = socket::receive(&socket, header.as_mut_bytes(), &mut reply);
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
    assert!(!connection.is_closed());
    assert_eq!(Connection::connect(KIND, &name, b"hello", TIMEOUT).unwrap().1, b"hello");
}

#[test]
fn connect_to_a_listener_of_another_version_says_so() {
    let name = name("newer");
    let listener = socket::listen(&Address::of_service(KIND, &name).unwrap()).unwrap();
    let header = |version: u32, kind| Header { version, kind }.as_bytes().to_vec();
    for reply in [
        header(Header::VERSION - (1 << 24), Header::ACCEPTED),
        header(Header::VERSION + (1 << 24), Header::REFUSED),
        header(Header::VERSION, 100),
        b"short".to_vec(),
    ] {
        let connected = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut ready = [rustix::event::PollFd::new(&listener, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut ready, None).unwrap();
                let client = rustix::net::accept(&listener).unwrap();
                socket::send(&client, &reply, &[], &[]).unwrap();
                // Until the client has closed it.
                let (mut header, mut hello) = (Header::new_zeroed(), [0; MAX_HELLO]);
                while socket::receive(&client, header.as_mut_bytes(), &mut hello).is_ok() {}
            });
            Connection::connect(KIND, &name, b"", TIMEOUT).map(|_| ())
        });
        assert!(matches!(connected, Err(HandshakeError::OtherVersion { .. })), "{connected:?}");
    }
}

#[test]
fn parked_client_is_woken_when_listener_is_dropped() {
    let name = name("parked");
    let listener = Listener::open(KIND, &name, Recorder::accepting_all()).unwrap();
    let (connection, ..) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
    let segment = Arc::new(Segment::create(4096).unwrap());
    let parker: SharedRef<Parker> = SharedRef::new(&segment, 0).unwrap();
    connection.notify_when_closed(parker.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            drop(listener);
        });
        assert!(wait::wait_until(&parker, WaitStrategy::Park, Some(Instant::now() + TIMEOUT), || connection
            .is_closed()));
    });
    // The connection is closed already, so this wakes the parker at once.
    connection.notify_when_closed(parker);
    drop(connection);
    eventually("the watcher drops the parker", || Arc::strong_count(&segment) == 1);
}

#[test]
fn refusal_carries_its_reason() {
    let name = name("refused");
    let recorder = Arc::new(Recorder::new(|_, _, _| Admission::Refuse { reply: b"no".to_vec() }));
    let _host = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let connected = Connection::connect(KIND, &name, b"", TIMEOUT).map(|_| ());
    assert!(matches!(&connected, Err(HandshakeError::Refused(why)) if why == b"no"), "{connected:?}");
    assert_eq!(recorder.removals(), 0);
}

#[test]
fn postponed_admission_and_removal_are_retried() {
    let name = name("later");
    let recorder = Arc::new(Recorder::new(|recorder, _, hello| {
        let attempts = recorder.postponements.fetch_add(1, Relaxed);
        if attempts < 20 { Admission::RetryLater } else { accept(hello) }
    }));
    let _host = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let (connection, reply, _) = Connection::connect(KIND, &name, b"patient", TIMEOUT).unwrap();
    assert_eq!(reply, b"patient");
    // The recorder now postpones the removal as many times.
    assert_eq!(recorder.postponements.load(Relaxed), 21);
    drop(connection);
    eventually("the postponed removal is retried", || recorder.removals() == 1);
    assert_eq!(recorder.postponements.load(Relaxed), 0);
}

#[test]
fn client_that_closes_before_admission_is_not_removed() {
    let name = name("impatient");
    let recorder = Arc::new(Recorder::new(|_, _, _| Admission::RetryLater));
    let listener = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let socket = connect_silently(&name);
    socket::send(&socket, Header::new(Header::HELLO).as_bytes(), b"", &[]).unwrap();
    eventually("the admission is postponed", || !lock(&listener.inner.state).postponed.is_empty());
    drop(socket);
    eventually("the connection is dropped", || lock(&listener.inner.state).connections.is_empty());
    eventually("no work is left", || lock(&listener.inner.state).postponed.is_empty());
    assert_eq!(recorder.removals(), 0);
}

#[test]
fn disconnected_and_talking_clients_are_removed() {
    let name = name("disconnected");
    let recorder = Recorder::accepting_all();
    let listener = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let (connection, ..) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
    listener.disconnect(lock(&recorder.admitted)[0]);
    eventually("the client sees that it is disconnected", || connection.is_closed());
    eventually("the client is removed", || recorder.removals() == 1);
    listener.disconnect(lock(&recorder.admitted)[0]);

    let talker = connect_silently(&name);
    socket::send(&talker, Header::new(Header::HELLO).as_bytes(), b"", &[]).unwrap();
    eventually("the second client is admitted", || lock(&recorder.admitted).len() == 2);
    socket::send(&talker, b"and another thing", b"", &[]).unwrap();
    eventually("the client is removed", || recorder.removals() == 2);
}

#[test]
fn listener_may_be_dropped_by_its_own_handler() {
    for in_remove in [false, true] {
        let name = name("drops-itself");
        let mut recorder = Recorder::new(move |recorder, _, hello| {
            if !in_remove {
                drop(lock(&recorder.listener).take());
            }
            accept(hello)
        });
        recorder.drop_listener_in_remove = in_remove;
        let recorder = Arc::new(recorder);
        *lock(&recorder.listener) = Some(Listener::open(KIND, &name, recorder.clone()).unwrap());
        let connected = Connection::connect(KIND, &name, b"", TIMEOUT);
        if in_remove {
            let (other, ..) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
            drop(connected.unwrap());
            eventually("the other client sees it", || other.is_closed());
            assert_eq!(recorder.removals(), 1);
        } else {
            // The listener closed the connection, and a retry finds no listener.
            assert!(matches!(connected, Err(HandshakeError::NoServer { .. })));
        }
        drop(Listener::open(KIND, &name, Recorder::accepting_all()).unwrap());
        eventually("the watcher drops the handler", || Arc::strong_count(&recorder) == 1);
    }
}

#[test]
fn no_handler_call_runs_after_drop() {
    struct Slow(Arc<AtomicU32>);
    impl ClientHandler for Slow {
        fn admit(&self, _: ClientId, _: &[u8]) -> Admission {
            self.0.store(1, Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            self.0.store(2, Relaxed);
            Admission::RetryLater
        }
        fn remove(&self, _: ClientId) -> bool {
            true
        }
    }
    let (name, running) = (name("slow"), Arc::new(AtomicU32::new(0)));
    let listener = Listener::open(KIND, &name, Arc::new(Slow(running.clone()))).unwrap();
    let socket = connect_silently(&name);
    socket::send(&socket, Header::new(Header::HELLO).as_bytes(), b"", &[]).unwrap();
    eventually("a call runs", || running.load(Relaxed) == 1);
    drop(listener);
    assert_eq!(running.load(Relaxed), 2);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(running.load(Relaxed), 2, "no further call");
}

// ------------------------------------------------------------------------------- connections without valid hello

/// A connection that has not sent a hello.
fn connect_silently(name: &Name) -> Socket {
    socket::connect(&Address::of_service(KIND, name).unwrap(), TIMEOUT).unwrap()
}

fn is_closed(socket: &Socket) -> bool {
    // End of file, or a reset if the peer left something unread.
    !matches!(
        rustix::net::recv(socket, &mut [0u8; 1], rustix::net::RecvFlags::DONTWAIT),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
    )
}

#[test]
fn connections_without_hello_are_closed_and_block_nobody() {
    let name = name("silent");
    let listener = Listener::open(KIND, &name, Recorder::accepting_all()).unwrap();
    let silent: Vec<_> = (0..MAX_AWAITING_HELLO + 10).map(|_| connect_silently(&name)).collect();
    eventually("the oldest connections are closed", || silent[..10].iter().all(is_closed));
    // This client is behind them in the accept queue, and is served.
    drop(Connection::connect(KIND, &name, b"", TIMEOUT).unwrap());
    assert!(lock(&listener.inner.state).awaiting_hello.len() <= MAX_AWAITING_HELLO);
    eventually("all are closed", || silent.iter().all(is_closed));
    assert!(lock(&listener.inner.state).connections.is_empty());
}

#[test]
fn connect_retries_when_closed_because_of_a_burst() {
    let name = name("burst");
    let recorder = Recorder::accepting_all();
    let _host = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let connect_often =
        || (0..8).map(|_| drop(Connection::connect(KIND, &name, b"", TIMEOUT).unwrap())).count();
    let connected: usize = std::thread::scope(|scope| {
        let crowd: Vec<_> = (0..4 * MAX_AWAITING_HELLO).map(|_| scope.spawn(connect_often)).collect();
        crowd.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(connected, 32 * MAX_AWAITING_HELLO);
    eventually("the client is removed", || recorder.removals() == 32 * MAX_AWAITING_HELLO);
}

#[test]
fn connections_with_invalid_hello_are_closed() {
    let name = name("invalid-hello");
    let recorder = Recorder::accepting_all();
    let _host = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let (hello, accepted) = (Header::new(Header::HELLO), Header::new(Header::ACCEPTED));
    let oversized = vec![0; MAX_HELLO + 1];
    let messages: [(&[u8], &[u8]); 5] = [
        (hello.as_bytes(), &oversized),
        (b"GET / HTTP/1.1", b""),
        (b"x", b""),
        (b"", b""),
        (accepted.as_bytes(), b""),
    ];
    for (head, payload) in messages {
        let socket = connect_silently(&name);
        socket::send(&socket, head, payload, &[]).unwrap();
        eventually("it is closed", || is_closed(&socket));
    }
    assert!(lock(&recorder.admitted).is_empty());
    drop(Connection::connect(KIND, &name, &[7; MAX_HELLO], TIMEOUT).unwrap());
}

/// A hello with a file whose `close` takes minutes.
#[test]
fn hello_with_a_file_that_blocks_holds_up_nobody() {
    let name = name("blocking-file");
    let recorder = Recorder::accepting_all();
    let listener = Listener::open(KIND, &name, recorder.clone()).unwrap();
    let blocking = socket::blocking_files::new;
    let hello = Header::new(Header::HELLO);
    // Linux 6.16 refuses the file.
    let refused = connect_silently(&name);
    let BlockingFile { file, reader } = blocking();
    if let Err(e) = socket::send(&refused, hello.as_bytes(), b"", &[file.as_fd()]) {
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
    }
    // In this order: of a file that was refused, this is the last close.
    drop(reader);
    drop(file);
    // As older kernels. The watcher gets the messages when nobody else has the files open any more.
    let state = lock(&listener.inner.state);
    state.socket.as_ref().unwrap().allow_files();
    let hostile: Vec<_> = [hello.as_bytes(), b""]
        .map(|first| {
            let socket = connect_silently(&name);
            let readers = [(); 2].map(|()| {
                let blocking = blocking();
                socket::send(&socket, first, b"", &[blocking.file.as_fd()]).unwrap();
                blocking.reader
            });
            (socket, readers)
        })
        .into();
    let begun = Instant::now();
    drop(state);
    drop(Connection::connect(KIND, &name, b"", TIMEOUT).unwrap());
    eventually("they are closed", || hostile.iter().all(|(socket, _)| is_closed(socket)));
    drop(listener);
    assert!(begun.elapsed() < socket::blocking_files::MAX_ELAPSED, "it took {:?}", begun.elapsed());
    assert_eq!(lock(&recorder.admitted).len(), 1);
}

/// A server that hands over files whose `close` takes minutes.
#[test]
fn reply_with_files_that_block_holds_up_nobody() {
    let name = name("blocking-reply");
    let listening = socket::listen(&Address::of_service(KIND, &name).unwrap()).unwrap();
    let blocking = [(); 2].map(|()| socket::blocking_files::new());
    let handed_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| {
            let (connection, _, files) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
            eventually("the connection ends", || connection.is_closed());
            // Of the files, the closes of the client are the last ones.
            eventually("the server has closed its descriptors", || handed_over.load(Acquire));
            let begun = Instant::now();
            drop((files, connection));
            begun.elapsed()
        });
        eventually("the client connects", || {
            let Ok(client) = listening.accept() else { return false };
            // An end that is closed with a message in it resets the connection, and the client would connect again.
            let mut hello = Header::new_zeroed();
            eventually("the hello arrives", || {
                socket::receive(&client, hello.as_mut_bytes(), &mut []).is_ok()
            });
            let [first, second] = &blocking;
            let accepted = Header::new(Header::ACCEPTED);
            socket::send(&client, accepted.as_bytes(), b"", &[first.file.as_fd()]).unwrap();
            socket::send(&client, b"more", b"", &[second.file.as_fd()]).unwrap();
            true
        });
        let _readers = blocking.map(|blocking| blocking.reader);
        handed_over.store(true, Release);
        let passed = connecting.join().unwrap();
        assert!(passed < socket::blocking_files::MAX_ELAPSED, "it took {passed:?}");
    });
}

// ------------------------------------------------------------------------------------------- other processes

/// Starts [`child_process_role`] in a process of its own.
fn start_child(role: &str, name: &Name) -> Child {
    Child::start(child_process_role, &format!("{role} {name}"))
}

fn report(what: &str) {
    child::write(what.as_bytes());
}

/// Forks a child that keeps all descriptors open for a while and then ends.
fn fork_descriptor_holder() -> i32 {
    // SAFETY: the child calls nothing but functions that are safe after a fork, and never returns.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::sleep(30);
            libc::_exit(0);
        }
        pid
    }
}

fn kill_process(pid: i32) -> bool {
    // SAFETY: a plain system call.
    unsafe { libc::kill(pid, libc::SIGKILL) == 0 }
}

#[test]
fn child_process_role() {
    let Some(role) = child::task() else { return };
    let (role, name) = role.split_once(' ').unwrap();
    let name = Name::new(name).unwrap();
    let holder = || if role.ends_with("holder") { fork_descriptor_holder() } else { 0 };
    match role {
        "client" | "client-with-holder" => {
            let _connection = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
            report(&holder().to_string());
            child::wait_for_end_of_input();
        }
        "listener" | "listener-with-holder" => {
            let _host = Listener::open(KIND, &name, Recorder::accepting_all()).unwrap();
            report(&holder().to_string());
            child::wait_for_end_of_input();
        }
        "listener-out-of-descriptors" => run_out_of_descriptors(&name),
        "other-user" => act_as_other_user(),
        "listener-of-unmapped-user" => listen_as_unmapped_user(&name),
        _ => panic!("no such role: {role}"),
    }
}

#[test]
fn killed_client_is_removed() {
    let name = name("killed-client");
    let recorder = Recorder::accepting_all();
    let _host = Listener::open(KIND, &name, recorder.clone()).unwrap();
    for (i, role) in ["client", "client-with-holder"].into_iter().enumerate() {
        let mut client = start_child(role, &name);
        let holder: i32 = client.read_text().parse().unwrap();
        assert_eq!(recorder.removals(), i);
        client.kill();
        eventually("the end of the process is noticed", || recorder.removals() == i + 1);
        assert!(
            holder == 0 || kill_process(holder),
            "the child that keeps the descriptors was still running"
        );
    }
}

#[test]
fn killed_server_is_noticed_and_its_name_is_free() {
    let name = name("killed-listener");
    for role in ["listener", "listener-with-holder"] {
        let mut listener = start_child(role, &name);
        let holder: i32 = listener.read_text().parse().unwrap();
        let (connection, ..) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
        assert!(!connection.is_closed());
        let taken = Listener::open(KIND, &name, Recorder::accepting_all());
        assert!(matches!(taken, Err(ListenError::NameTaken { .. })), "{taken:?}");
        listener.kill();
        eventually("the end of the process is noticed", || connection.is_closed());
        // This also holds while a child keeps the listening socket open without serving it.
        let connected = Connection::connect(KIND, &name, b"", TIMEOUT).map(|_| ());
        assert!(matches!(connected, Err(HandshakeError::NoServer { .. })), "{connected:?}");
        if holder == 0 {
            drop(Listener::open(KIND, &name, Recorder::accepting_all()).unwrap());
        } else {
            let kept = Listener::open(KIND, &name, Recorder::accepting_all());
            assert!(matches!(kept, Err(ListenError::NameUsedByChild { .. })), "{kept:?}");
            assert!(kill_process(holder), "the child that keeps the descriptors was still running");
            eventually("the name is free", || Listener::open(KIND, &name, Recorder::accepting_all()).is_ok());
        }
    }
}

/// A listener that is out of descriptors while a client is in its accept queue.
fn run_out_of_descriptors(name: &Name) {
    let listener = Listener::open(KIND, name, Recorder::accepting_all()).unwrap();
    let mut connected = Vec::new();
    // SAFETY: plain system calls on a local.
    unsafe {
        let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    while let Ok(another) = std::io::stdin().as_fd().try_clone_to_owned() {
        connected.push(another);
    }
    report("out of descriptors");
    eventually("the listener notices that it is out of descriptors", || {
        lock(&listener.inner.state).out_of_descriptors
    });
    let (begun, used) = (Instant::now(), processor_time());
    std::thread::sleep(Duration::from_millis(300));
    let (passed, used) = (begun.elapsed(), processor_time() - used);
    assert!(used < passed / 2, "busy for {used:?} of {passed:?}");
    drop(connected);
    eventually("the client is admitted", || !lock(&listener.inner.state).connections.is_empty());
    assert!(!lock(&listener.inner.state).out_of_descriptors);
    report("accepting again");
    child::wait_for_end_of_input();
}

#[test]
fn listener_without_descriptors_does_not_spin() {
    let name = name("descriptors");
    let mut listener = start_child("listener-out-of-descriptors", &name);
    assert_eq!(listener.read_text(), "out of descriptors");
    let (connection, ..) = Connection::connect(KIND, &name, b"", TIMEOUT).unwrap();
    assert_eq!(listener.read_text(), "accepting again");
    assert!(!connection.is_closed());
    listener.kill();
    eventually("the end of the process is noticed", || connection.is_closed());
}

const NOBODY_UID: u32 = 65534;

/// Drops root, sends a hello to a listener of root, and takes a name of root's.
fn act_as_other_user() {
    let next_address = || Address::new(&child::read()).unwrap();
    // SAFETY: plain system calls. After them this process has no way back to root.
    let dropped = unsafe { libc::setgid(NOBODY_UID) == 0 && libc::setuid(NOBODY_UID) == 0 };
    assert!(dropped, "could not become user {NOBODY_UID}");
    let socket = socket::connect(&next_address(), TIMEOUT).unwrap();
    // The listener may have closed the connection already.
    socket::send(&socket, Header::new(Header::HELLO).as_bytes(), b"", &[]).ok();
    eventually("the connection is closed", || is_closed(&socket));
    let taken = socket::listen(&next_address());
    report("done");
    child::wait_for_end_of_input();
    drop(taken);
}

#[test]
fn other_user_is_refused_on_both_sides() {
    let user = rustix::process::geteuid().as_raw();
    assert_eq!(user, 0, "this test needs root, to become another user: run it with sudo");
    let (ours, taken) = (name("ours"), name("taken"));
    let recorder = Recorder::accepting_all();
    let _host = Listener::open(KIND, &ours, recorder.clone()).unwrap();
    let mut other = start_child("other-user", &ours);
    [&ours, &taken].iter().for_each(|name| other.write(format!("crosstie/{KIND}/{user}/{name}").as_bytes()));
    assert_eq!(other.read_text(), "done");
    assert!(lock(&recorder.admitted).is_empty(), "a process of another user was admitted");
    let connected = Connection::connect(KIND, &taken, b"", TIMEOUT).map(|_| ());
    assert!(matches!(connected, Err(HandshakeError::OtherUser { uid: NOBODY_UID, .. })), "{connected:?}");
    other.kill();
}

/// A listener in a user namespace that maps no user: this process and every other one there and outside have the same user ID.
fn listen_as_unmapped_user(name: &Name) {
    let recorder = Recorder::accepting_all();
    let _listener = Listener::open(KIND, name, recorder.clone()).unwrap();
    drop(
        Connection::connect(KIND, name, b"", TIMEOUT).expect("a thread of the same process is no other user"),
    );
    report(Address::of_service(KIND, name).map(|_| "listening").unwrap());
    child::wait_for_end_of_input();
    report(&lock(&recorder.admitted).len().to_string());
}

#[test]
fn user_that_a_namespace_does_not_map_is_not_taken_for_ours() {
    use std::os::unix::process::CommandExt;
    let user = rustix::process::geteuid().as_raw();
    assert_eq!(user, 0, "this test needs root, to become another user: run it with sudo");
    let (theirs, free) = (name("unmapped"), name("unmapped-free"));
    // The path of this program may not be open to other users.
    let mut command = Command::new("/proc/self/exe");
    command.uid(2000).gid(2000);
    // SAFETY: the closure makes one system call.
    unsafe {
        command.pre_exec(|| match libc::unshare(libc::CLONE_NEWUSER) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    let task = format!("listener-of-unmapped-user {theirs}");
    let mut listener = Child::spawn(&mut child::command_under(command, child_process_role, &task));
    assert_eq!(listener.read_text(), "listening");
    let mut other = start_child("other-user", &theirs);
    let address = |name| format!("crosstie/{KIND}/{NOBODY_UID}/{name}");
    [&theirs, &free].iter().for_each(|name| other.write(address(name).as_bytes()));
    assert_eq!(other.read_text(), "done");
    other.kill();
    listener.close_input();
    assert_eq!(listener.read_text(), "1", "only the process itself is admitted");
    listener.wait();
}
