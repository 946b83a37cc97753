use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::super::bell::{self, Bell, Waiting};
use super::super::member::{JoinError, Member};
use super::*;
use crate::memory::segment::{Segment, SharedRef};

const KIND: &str = "test";
/// After this long something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// A name that no other test uses, nor another run.
fn name(what: &str) -> Name {
    Name::new(&format!("{what}-{}", std::process::id())).unwrap()
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

type Admit = dyn Fn(&Log, GuestId, &[u8]) -> Admission + Send + Sync;

/// Guests that are written down.
struct Log {
    admit: Box<Admit>,
    admitted: Mutex<Vec<GuestId>>,
    farewells: Mutex<Vec<GuestId>>,
    /// How often to say false before.
    reluctance: AtomicU32,
    host: Mutex<Option<Host>>,
    drop_host_in_farewell: bool,
}

impl Log {
    fn new(admit: impl Fn(&Log, GuestId, &[u8]) -> Admission + Send + Sync + 'static) -> Log {
        Log {
            admit: Box::new(admit),
            admitted: Mutex::default(),
            farewells: Mutex::default(),
            reluctance: AtomicU32::new(0),
            host: Mutex::default(),
            drop_host_in_farewell: false,
        }
    }

    /// Welcomes everybody, with the hello as the answer.
    fn hospitable() -> Arc<Log> {
        Arc::new(Log::new(|_, _, hello| welcome(hello)))
    }

    fn left(&self) -> usize {
        locked(&self.farewells).len()
    }
}

fn welcome(reply: &[u8]) -> Admission {
    Admission::Welcome { reply: reply.to_vec(), files: Vec::new() }
}

impl Guests for Log {
    fn admit(&self, guest: GuestId, hello: &[u8]) -> Admission {
        let admission = (self.admit)(self, guest, hello);
        if matches!(admission, Admission::Welcome { .. }) {
            locked(&self.admitted).push(guest);
        }
        admission
    }

    fn farewell(&self, guest: GuestId) -> bool {
        if self.reluctance.load(Relaxed) > 0 {
            self.reluctance.fetch_sub(1, Relaxed);
            return false;
        }
        if self.drop_host_in_farewell {
            drop(locked(&self.host).take());
        }
        locked(&self.farewells).push(guest);
        true
    }
}

#[test]
fn guests_come_get_a_segment_and_leave() {
    let name = name("segment");
    let segment = Segment::create(4096).unwrap();
    let file = segment.fd().try_clone_to_owned().unwrap();
    let log = Arc::new(Log::new(move |_, _, hello| Admission::Welcome {
        reply: hello.iter().rev().copied().collect(),
        files: vec![file.try_clone().unwrap()],
    }));
    let host = Host::open(KIND, &name, log.clone()).unwrap();
    let (member, reply, files) = Member::join(KIND, &name, b"olleh", PATIENCE).unwrap();
    assert_eq!((reply.as_slice(), files.len()), (&b"hello"[..], 1));
    assert!(Segment::open(files.into_iter().next().unwrap(), 4096).is_ok());
    let (other, reply, _) = Member::join(KIND, &name, b"", PATIENCE).unwrap();
    assert!(reply.is_empty() && !member.gone() && !other.gone());

    drop(member);
    eventually("one leaves", || log.left() == 1);
    assert_eq!(locked(&log.admitted)[0], locked(&log.farewells)[0]);
    assert!(!other.gone());
    drop(host);
    eventually("the host is gone", || other.gone());
    assert_eq!(log.left(), 1, "no farewell after the host is dropped");
    eventually("the watcher lets go", || Arc::strong_count(&log) == 1);
}

#[test]
fn a_name_is_served_once_at_a_time() {
    let name = name("twice");
    let first = Host::open(KIND, &name, Log::hospitable()).unwrap();
    let taken = Host::open(KIND, &name, Log::hospitable());
    assert!(matches!(taken, Err(OpenError::NameTaken { .. })), "{taken:?}");
    drop(Host::open("test2", &name, Log::hospitable()).unwrap());
    let (member, ..) = Member::join(KIND, &name, b"", PATIENCE).unwrap();
    drop(first);
    let _second = Host::open(KIND, &name, Log::hospitable()).unwrap();
    eventually("the first is gone", || member.gone());
    drop(Member::join(KIND, &name, b"", PATIENCE).unwrap());
}

#[test]
fn nobody_there_is_said_at_once() {
    let joined = Member::join(KIND, &name("nobody"), b"", PATIENCE).map(|_| ());
    assert!(matches!(joined, Err(JoinError::NoServer { .. })), "{joined:?}");
    let joined = Member::join(KIND, &name("nobody"), &[0; MAX_HELLO + 1], PATIENCE).map(|_| ());
    assert!(matches!(joined, Err(JoinError::HelloTooLong(4097))), "{joined:?}");
}

#[test]
fn a_sleeper_is_woken_when_the_host_goes() {
    let name = name("sleeper");
    let host = Host::open(KIND, &name, Log::hospitable()).unwrap();
    let (member, ..) = Member::join(KIND, &name, b"", PATIENCE).unwrap();
    let segment = Arc::new(Segment::create(4096).unwrap());
    let bell: SharedRef<Bell> = SharedRef::new(&segment, 0).unwrap();
    member.ring_when_gone(bell.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            drop(host);
        });
        assert!(bell::wait(&bell, Waiting::Park, Some(Instant::now() + PATIENCE), || member.gone()));
    });
    // Too late to be noted, so it is rung here and now.
    member.ring_when_gone(bell);
    drop(member);
    eventually("the watcher lets go of the bell", || Arc::strong_count(&segment) == 1);
}

#[test]
fn refusals_carry_their_reason() {
    let name = name("refused");
    let log = Arc::new(Log::new(|_, _, _| Admission::Refused { reply: b"no".to_vec() }));
    let _host = Host::open(KIND, &name, log.clone()).unwrap();
    let joined = Member::join(KIND, &name, b"", PATIENCE).map(|_| ());
    assert!(matches!(&joined, Err(JoinError::Refused(why)) if why == b"no"), "{joined:?}");
    assert_eq!(log.left(), 0);
}

#[test]
fn who_is_put_off_is_asked_about_again() {
    let name = name("later");
    let log = Arc::new(Log::new(|log, _, hello| {
        let asked = log.reluctance.fetch_add(1, Relaxed);
        if asked < 20 { Admission::Later } else { welcome(hello) }
    }));
    let _host = Host::open(KIND, &name, log.clone()).unwrap();
    let (member, reply, _) = Member::join(KIND, &name, b"patient", PATIENCE).unwrap();
    assert_eq!(reply, b"patient");
    // Nor is it forgotten when its farewell takes several tries.
    assert_eq!(log.reluctance.load(Relaxed), 21);
    drop(member);
    eventually("an unfinished farewell is tried again", || log.left() == 1);
    assert_eq!(log.reluctance.load(Relaxed), 0);
}

#[test]
fn who_leaves_before_being_admitted_gets_no_farewell() {
    let name = name("impatient");
    let log = Arc::new(Log::new(|_, _, _| Admission::Later));
    let host = Host::open(KIND, &name, log.clone()).unwrap();
    let socket = raw(&name);
    socket::send(&socket, Head::new(Head::HELLO).as_bytes(), b"", &[]).unwrap();
    eventually("it asks", || !locked(&host.inner.state).unfinished.is_empty());
    drop(socket);
    eventually("it is forgotten", || locked(&host.inner.state).guests.is_empty());
    eventually("nothing is left to do", || locked(&host.inner.state).unfinished.is_empty());
    assert_eq!(log.left(), 0);
}

#[test]
fn dismissed_guests_and_those_that_talk_are_cut_off() {
    let name = name("dismissed");
    let log = Log::hospitable();
    let host = Host::open(KIND, &name, log.clone()).unwrap();
    let (member, ..) = Member::join(KIND, &name, b"", PATIENCE).unwrap();
    host.dismiss(locked(&log.admitted)[0]);
    eventually("the guest sees it", || member.gone());
    eventually("the host says farewell", || log.left() == 1);
    host.dismiss(locked(&log.admitted)[0]);

    let talker = raw(&name);
    socket::send(&talker, Head::new(Head::HELLO).as_bytes(), b"", &[]).unwrap();
    eventually("it is admitted", || locked(&log.admitted).len() == 2);
    socket::send(&talker, b"and another thing", b"", &[]).unwrap();
    eventually("the host says farewell", || log.left() == 2);
}

#[test]
fn a_host_may_be_dropped_by_its_own_guests() {
    for in_farewell in [false, true] {
        let name = name("suicide");
        let mut log = Log::new(move |log, _, hello| {
            if !in_farewell {
                drop(locked(&log.host).take());
            }
            welcome(hello)
        });
        log.drop_host_in_farewell = in_farewell;
        let log = Arc::new(log);
        *locked(&log.host) = Some(Host::open(KIND, &name, log.clone()).unwrap());
        let joined = Member::join(KIND, &name, b"", PATIENCE);
        if in_farewell {
            let (other, ..) = Member::join(KIND, &name, b"", PATIENCE).unwrap();
            drop(joined.unwrap());
            eventually("the other sees it", || other.gone());
            assert_eq!(log.left(), 1);
        } else {
            // It hung up, and is not there any more.
            assert!(matches!(joined, Err(JoinError::NoServer { .. })));
        }
        drop(Host::open(KIND, &name, Log::hospitable()).unwrap());
        eventually("the watcher lets go", || Arc::strong_count(&log) == 1);
    }
}

#[test]
fn after_drop_no_call_is_running() {
    struct Slow(Arc<AtomicU32>);
    impl Guests for Slow {
        fn admit(&self, _: GuestId, _: &[u8]) -> Admission {
            self.0.store(1, Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            self.0.store(2, Relaxed);
            Admission::Later
        }
        fn farewell(&self, _: GuestId) -> bool {
            true
        }
    }
    let (name, running) = (name("slow"), Arc::new(AtomicU32::new(0)));
    let host = Host::open(KIND, &name, Arc::new(Slow(running.clone()))).unwrap();
    let socket = raw(&name);
    socket::send(&socket, Head::new(Head::HELLO).as_bytes(), b"", &[]).unwrap();
    eventually("a call runs", || running.load(Relaxed) == 1);
    drop(host);
    assert_eq!(running.load(Relaxed), 2);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(running.load(Relaxed), 2, "no further call");
}

// ------------------------------------------------------------------------------------------------- strangers

/// A connection that has said nothing yet.
fn raw(name: &Name) -> OwnedFd {
    socket::connect(&Address::of_service(KIND, name).unwrap(), PATIENCE).unwrap()
}

fn is_cut_off(socket: &OwnedFd) -> bool {
    // An end, or a reset if something was left unread.
    !matches!(
        rustix::net::recv(socket, &mut [0u8; 1], rustix::net::RecvFlags::DONTWAIT),
        Err(Errno::AGAIN | Errno::INTR)
    )
}

#[test]
fn silent_strangers_are_cut_off_and_stall_nobody() {
    let name = name("silent");
    let host = Host::open(KIND, &name, Log::hospitable()).unwrap();
    let silent: Vec<_> = (0..MAX_STRANGERS + 10).map(|_| raw(&name)).collect();
    eventually("the first give way to the last", || silent[..10].iter().all(is_cut_off));
    // In the door's queue behind them, and served.
    drop(Member::join(KIND, &name, b"", PATIENCE).unwrap());
    assert!(locked(&host.inner.state).strangers.len() <= MAX_STRANGERS);
    eventually("all are cut off", || silent.iter().all(is_cut_off));
    assert!(locked(&host.inner.state).guests.is_empty());
}

#[test]
fn who_was_cut_off_because_many_came_at_once_comes_again() {
    let name = name("crowd");
    let log = Log::hospitable();
    let _host = Host::open(KIND, &name, log.clone()).unwrap();
    let joins = || (0..8).map(|_| drop(Member::join(KIND, &name, b"", PATIENCE).unwrap())).count();
    let joined: usize = std::thread::scope(|scope| {
        let crowd: Vec<_> = (0..4 * MAX_STRANGERS).map(|_| scope.spawn(joins)).collect();
        crowd.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(joined, 32 * MAX_STRANGERS);
    eventually("the host says farewell", || log.left() == 32 * MAX_STRANGERS);
}

#[test]
fn strangers_that_talk_nonsense_are_cut_off() {
    let name = name("nonsense");
    let log = Log::hospitable();
    let _host = Host::open(KIND, &name, log.clone()).unwrap();
    let (hello, answer) = (Head::new(Head::HELLO), Head::new(Head::WELCOME));
    let oversized = vec![0; MAX_HELLO + 1];
    let messages: [(&[u8], &[u8]); 5] = [
        (hello.as_bytes(), &oversized),
        (b"GET / HTTP/1.1", b""),
        (b"x", b""),
        (b"", b""),
        (answer.as_bytes(), b""),
    ];
    for (head, payload) in messages {
        let socket = raw(&name);
        socket::send(&socket, head, payload, &[socket.as_fd()]).unwrap();
        eventually("it is cut off", || is_cut_off(&socket));
    }
    assert!(locked(&log.admitted).is_empty());
    drop(Member::join(KIND, &name, &[7; MAX_HELLO], PATIENCE).unwrap());
}

// ------------------------------------------------------------------------------------------- other processes

const ROLE: &str = "CROSSTIE_NEIGHBOR_ROLE";

/// This very program in another role, see `plays_a_role`.
struct Actor {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Actor {
    fn start(role: &str, name: &Name) -> Actor {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "neighbor::host::tests::plays_a_role", "--nocapture"])
            .env(ROLE, format!("{role} {name}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        Actor { child, says }
    }

    /// What follows the next `> `; the test harness says things too.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.says.read_line(&mut line).unwrap(), 0, "the other process failed");
            if let Some((_, said)) = line.split_once("> ") {
                return said.trim().into();
            }
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn say(what: &str) {
    println!("> {what}");
    std::io::stdout().flush().unwrap();
}

/// Until the parent closes its end.
fn until_told() {
    std::io::stdin().read_exact(&mut [0]).ok();
}

/// A child that keeps all descriptors for a while and then ends.
fn fork_a_keeper() -> i32 {
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

fn end(pid: i32) -> bool {
    // SAFETY: a plain system call.
    unsafe { libc::kill(pid, libc::SIGKILL) == 0 }
}

#[test]
fn plays_a_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (role, name) = role.split_once(' ').unwrap();
    let name = Name::new(name).unwrap();
    let keeper = || if role.ends_with("keeper") { fork_a_keeper() } else { 0 };
    match role {
        "guest" | "guest-with-keeper" => {
            let _member = Member::join(KIND, &name, b"", PATIENCE).unwrap();
            say(&keeper().to_string());
            until_told();
        }
        "host" | "host-with-keeper" => {
            let _host = Host::open(KIND, &name, Log::hospitable()).unwrap();
            say(&keeper().to_string());
            until_told();
        }
        "starving-host" => starve(&name),
        "other-user" => be_another_user(),
        _ => panic!("no such role: {role}"),
    }
}

#[test]
fn a_killed_guest_is_noticed() {
    let name = name("killed-guest");
    let log = Log::hospitable();
    let _host = Host::open(KIND, &name, log.clone()).unwrap();
    for (i, role) in ["guest", "guest-with-keeper"].into_iter().enumerate() {
        let mut guest = Actor::start(role, &name);
        let keeper: i32 = guest.hear().parse().unwrap();
        assert_eq!(log.left(), i);
        guest.kill();
        eventually("its death is noticed", || log.left() == i + 1);
        assert!(keeper == 0 || end(keeper), "the one who keeps the descriptors was still there");
    }
}

#[test]
fn a_killed_host_is_noticed_and_its_name_is_free() {
    let name = name("killed-host");
    for role in ["host", "host-with-keeper"] {
        let mut host = Actor::start(role, &name);
        let keeper: i32 = host.hear().parse().unwrap();
        let (member, ..) = Member::join(KIND, &name, b"", PATIENCE).unwrap();
        assert!(!member.gone());
        let taken = Host::open(KIND, &name, Log::hospitable());
        assert!(matches!(taken, Err(OpenError::NameTaken { .. })), "{taken:?}");
        host.kill();
        eventually("its death is noticed", || member.gone());
        // Also where somebody keeps the listener, to whom nobody listens.
        let joined = Member::join(KIND, &name, b"", PATIENCE).map(|_| ());
        assert!(matches!(joined, Err(JoinError::NoServer { .. })), "{joined:?}");
        if keeper == 0 {
            drop(Host::open(KIND, &name, Log::hospitable()).unwrap());
        } else {
            let kept = Host::open(KIND, &name, Log::hospitable());
            assert!(matches!(kept, Err(OpenError::NameKept { .. })), "{kept:?}");
            assert!(end(keeper), "the one who keeps the descriptors was still there");
            eventually("the name is free", || Host::open(KIND, &name, Log::hospitable()).is_ok());
        }
    }
}

/// A host that is out of descriptors while a guest waits at its door.
fn starve(name: &Name) {
    let host = Host::open(KIND, name, Log::hospitable()).unwrap();
    let mut hoard = Vec::new();
    // SAFETY: plain system calls on a local.
    unsafe {
        let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    while let Ok(another) = std::io::stdin().as_fd().try_clone_to_owned() {
        hoard.push(another);
    }
    say("starving");
    eventually("it is noticed", || locked(&host.inner.state).starved);
    let (begun, used) = (Instant::now(), processor_time());
    std::thread::sleep(Duration::from_millis(300));
    let (passed, used) = (begun.elapsed(), processor_time() - used);
    assert!(used < passed / 2, "busy for {used:?} of {passed:?}");
    drop(hoard);
    eventually("somebody is admitted", || !locked(&host.inner.state).guests.is_empty());
    assert!(!locked(&host.inner.state).starved);
    say("fed");
    until_told();
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn without_descriptors_a_host_waits_and_does_not_spin() {
    let name = name("starving");
    let mut host = Actor::start("starving-host", &name);
    assert_eq!(host.hear(), "starving");
    let (member, ..) = Member::join(KIND, &name, b"", PATIENCE).unwrap();
    assert_eq!(host.hear(), "fed");
    assert!(!member.gone());
    host.kill();
    eventually("its death is noticed", || member.gone());
}

const NOBODY: u32 = 65534;

/// Says hello where root serves, and squats a name of root's.
fn be_another_user() {
    let mut addresses = std::io::stdin().lines();
    // SAFETY: plain system calls. After them this process has no way back to root.
    let dropped = unsafe { libc::setgid(NOBODY) == 0 && libc::setuid(NOBODY) == 0 };
    assert!(dropped, "could not become user {NOBODY}");
    let theirs = Address::new(addresses.next().unwrap().unwrap().as_bytes()).unwrap();
    let socket = socket::connect(&theirs, PATIENCE).unwrap();
    // The host may have hung up already.
    socket::send(&socket, Head::new(Head::HELLO).as_bytes(), b"", &[]).ok();
    eventually("we are cut off", || is_cut_off(&socket));
    let squatted = socket::listen(&Address::new(addresses.next().unwrap().unwrap().as_bytes()).unwrap());
    say("done");
    addresses.next();
    drop(squatted);
}

#[test]
fn another_user_is_refused_on_both_sides() {
    let user = rustix::process::geteuid().as_raw();
    assert_eq!(user, 0, "this test needs root, to become another user: run it with sudo");
    let (ours, squatted) = (name("ours"), name("squatted"));
    let log = Log::hospitable();
    let _host = Host::open(KIND, &ours, log.clone()).unwrap();
    let mut other = Actor::start("other-user", &ours);
    let stdin = other.child.stdin.as_mut().unwrap();
    writeln!(stdin, "crosstie/{KIND}/{user}/{ours}\ncrosstie/{KIND}/{user}/{squatted}").unwrap();
    assert_eq!(other.hear(), "done");
    assert!(locked(&log.admitted).is_empty(), "another user was let in");
    let joined = Member::join(KIND, &squatted, b"", PATIENCE).map(|_| ());
    assert!(matches!(joined, Err(JoinError::OtherUser { uid: NOBODY, .. })), "{joined:?}");
    other.kill();
}
