//! `ipc` and `delegation` between processes: stress, the cost of waiting, a server's death, one server per name.
//!
//! The other processes are this program, which plays a role when the environment names one. `CROSSTIE_STRESS_SECONDS` says
//! how long the stress lasts.

mod node_service;

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crosstie::ipc::{CallError, CreateError};
use node_service::{Disconnected, Service, answer, is_request, request};

const ROLE: &str = "CROSSTIE_NODE_ROLE";
/// After this long something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("node-processes-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

/// Plays the role that a test below gave it; an ordinary run has none.
#[test]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [role, service, name, seconds] = &role.split(' ').collect::<Vec<_>>()[..] else { panic!("{role}") };
    let duration = Duration::from_secs_f64(seconds.parse().unwrap());
    node_service::each!(
        S,
        if *service == S::NAME {
            match *role {
                "client" => call_for::<S>(name, duration),
                "server" => serve_until::<S>(S::create(name, 4, 8).unwrap(), || false),
                "idle" => wait_for::<S>(name, duration),
                _ => refused::<S>(name),
            }
        }
    );
}

struct Other {
    child: Child,
    output: BufReader<ChildStderr>,
}

impl Other {
    fn start<S: Service>(role: &str, name: &str, duration: Duration) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--nocapture"])
            .env(ROLE, format!("{role} {} {name} {}", S::NAME, duration.as_secs_f64()))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stderr.take().unwrap());
        Other { child, output }
    }

    /// What it says next.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Until it is done; the rest of what it says.
    fn join(mut self) -> String {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "the other process failed:\n{rest}");
        rest.trim().to_owned()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Calls and verifies; says how often.
fn call_for<S: Service>(name: &str, duration: Duration) {
    let salt = u64::from(std::process::id());
    let mut client = S::connect(name).unwrap();
    let (end, mut next, mut count, mut pending) = (Instant::now() + duration, 0, 0u64, HashSet::new());
    let mut last = Instant::now();
    loop {
        while Instant::now() < end && S::call(&mut client, &request(next, salt), next).unwrap() {
            pending.insert(next);
            next += 1;
        }
        if pending.is_empty() && Instant::now() >= end {
            break;
        }
        S::wait_for_answer(&mut client, Duration::from_millis(100)).unwrap();
        S::poll(&mut client, &mut |token, response| {
            assert!(pending.remove(&token), "{token} was answered twice, or never asked");
            assert_eq!(*response, answer(&request(token, salt)));
            count += 1;
            last = Instant::now();
        })
        .unwrap();
        assert!(last.elapsed() < PATIENCE, "no answer");
    }
    eprintln!("{count}");
}

/// Serves until it is over and everybody has left.
fn serve_until<S: Service>(mut server: S::Server, mut over: impl FnMut() -> bool) {
    eprintln!("serving");
    let mut later = Vec::new();
    while !over() || S::clients(&mut server) > 0 {
        S::wait_for_request(&mut server, Duration::from_millis(5));
        S::look(&mut server);
        while let Some((asked, ticket)) = S::receive(&mut server) {
            assert!(is_request(&asked), "{asked:x?}");
            match asked[0] % 4 {
                0 => later.push((ticket, answer(&asked))),
                _ => assert!(S::reply(&mut server, ticket, &answer(&asked))),
            }
        }
        while let Some((ticket, answer)) = later.pop() {
            assert!(S::reply(&mut server, ticket, &answer));
        }
    }
    assert_eq!(S::cut_off(&server), 0);
}

#[test]
fn processes_get_their_own_answers() {
    let seconds = std::env::var("CROSSTIE_STRESS_SECONDS").ok().and_then(|s| s.parse().ok());
    let duration = Duration::from_secs_f64(seconds.unwrap_or(1.0));
    node_service::each!(S, {
        let name = fresh_name();
        let server = S::create(&name, 4, 8).unwrap();
        let mut clients: Vec<Other> = (0..3).map(|_| Other::start::<S>("client", &name, duration)).collect();
        serve_until::<S>(server, || {
            clients.iter_mut().all(|other| other.child.try_wait().unwrap().is_some())
        });
        let counts: Vec<u64> = clients.into_iter().map(|client| client.join().parse().unwrap()).collect();
        println!("{}: {counts:?} calls from three processes in {duration:?}", S::NAME);
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    });
}

/// Waits for nothing, as a server and as a client; says how long both were on a core.
fn wait_for<S: Service>(name: &str, duration: Duration) {
    let mut server = S::create(name, 4, 8).unwrap();
    let mut client = S::connect(name).unwrap();
    assert!(S::call(&mut client, &request(1, 1), 1).unwrap());
    let mut kept = None;
    while kept.is_none() {
        S::look(&mut server);
        kept = S::receive(&mut server);
    }
    let before = processor_time();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(!S::wait_for_request(&mut server, duration)));
        assert!(!S::wait_for_answer(&mut client, duration).unwrap());
    });
    eprintln!("{}", (processor_time() - before).as_micros());
}

fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn who_waits_leaves_its_core_to_others() {
    node_service::each!(S, {
        let used: u64 =
            Other::start::<S>("idle", &fresh_name(), Duration::from_secs(1)).join().parse().unwrap();
        println!("{}: an idle server and an idle client use {used} us of a second", S::NAME);
        // Two percent each.
        assert!(used < 2 * 20_000, "{}: {used} us", S::NAME);
    });
}

#[test]
fn a_server_that_is_killed_is_gone_for_everybody() {
    node_service::each!(S, {
        let name = fresh_name();
        for round in 0..5 {
            let mut server = Other::start::<S>("server", &name, PATIENCE);
            assert_eq!(server.line(), "serving");
            let mut idle = S::connect(&name).unwrap();
            let mut blocked = S::connect(&name).unwrap();
            assert_eq!(S::exchange(&mut idle, &request(1, 1)).unwrap(), answer(&request(1, 1)));
            let told = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let error = loop {
                        if let Err(error) = S::exchange(&mut blocked, &request(4, 4)) {
                            break error;
                        }
                    };
                    (error, Instant::now())
                });
                std::thread::sleep(Duration::from_millis(5));
                let killed = Instant::now();
                server.kill();
                let (error, when) = thread.join().unwrap();
                let gone = matches!(error, CallError::Disconnected { cause: Disconnected::ServerGone, .. });
                assert!(gone, "{error}");
                when.saturating_duration_since(killed)
            });
            println!("{}, round {round}: a blocked call ended {told:?} after the kill", S::NAME);
            assert!(told < Duration::from_secs(2), "{told:?}");
            assert!(S::wait_for_answer(&mut blocked, Duration::ZERO).unwrap_err().is_server_gone());
            let begun = Instant::now();
            while S::call(&mut idle, &request(2, 2), 2).is_ok() {
                assert!(begun.elapsed() < Duration::from_secs(2), "a later call is still taken");
            }
            let error = S::reconnect(&mut idle).unwrap_err();
            assert!(matches!(error, crosstie::ipc::ConnectError::NoServer { .. }), "{error}");
        }
    });
}

/// Finds the name taken, and says so.
fn refused<S: Service>(name: &str) {
    match S::create(name, 4, 8) {
        Err(CreateError::NameTaken { .. }) => eprintln!("taken"),
        Err(error) => eprintln!("{error}"),
        Ok(_) => eprintln!("created"),
    }
}

#[test]
fn a_name_has_one_live_server_among_all_processes() {
    node_service::each!(S, {
        let name = fresh_name();
        let server = S::create(&name, 4, 8).unwrap();
        assert_eq!(Other::start::<S>("refused", &name, PATIENCE).join(), "taken");
        drop(server);
        assert_eq!(Other::start::<S>("refused", &name, PATIENCE).join(), "created");
        for _ in 0..5 {
            let mut server = Other::start::<S>("server", &name, PATIENCE);
            assert_eq!(server.line(), "serving");
            let taken = S::create(&name, 4, 8).map(drop);
            assert!(matches!(taken, Err(CreateError::NameTaken { .. })), "{taken:?}");
            server.kill();
            // Free with its end.
            drop(S::create(&name, 4, 8).unwrap());
        }
    });
}
