//! SIGKILL at any instant: a client or the server of a service dies, and the other processes are not affected.
//!
//! Dying clients: this process runs a server and a steady client. The victims are processes that make calls, verify every
//! response and are killed: at random instants, and after each single instruction (`PTRACE_SINGLESTEP`) of a whole `call` and
//! `poll`. The server allows two clients, so after each kill a new client can connect only if the victim was removed.
//!
//! Dying servers: this process runs two steady clients. The servers are processes that are killed at random instants, and
//! after each instruction of `recv` and `reply`. After each kill both clients must notice it, connect to the next server
//! with the same name, and continue.
//!
//! All the time every survivor verifies every request and every response. At the end nothing may be left: no descriptor,
//! mapping, thread or file. This is not a libtest harness: the victims are this same program. If `CROSSTIE_STRESS_SECONDS` is
//! set, to any value, no instruction is skipped.

mod local_service;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crosstie_testkit::rng;

use crosstie_testkit::actor::{Actor, Fallible, report_ready};
use crosstie_testkit::footprint::Footprint;
use crosstie_testkit::fresh_name;
use crosstie_testkit::trace;
use local_service::{Service, Words, expected_response, is_request, request};
use rng::Random;

/// Calls that a client may have in flight.
const DEPTH: usize = 8;
const RANDOM_KILLS: u64 = 120;
/// Kills in one sweep over the instructions of an operation.
const KILLS_PER_SWEEP: u64 = 70;
/// A test that waits longer than this has failed.
const TIMEOUT: Duration = Duration::from_secs(20);

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, role, service, name, task] = &args[..] {
        local_service::each!(
            S,
            if service == S::NAME {
                match &role[..] {
                    "client" => client::<S>(name, task),
                    _ => server::<S>(name, task),
                }
                .expect("victim");
            }
        );
        return;
    }
    let seed = rng::seed();
    let mut random = Random(seed);
    let (mut passed, mut failed, mut kills) = (0, 0, 0);
    local_service::each!(S, {
        // What a process keeps after its first server, such as the watcher thread, is not a leak.
        let name = fresh_name("local-kill");
        drop((S::create(&name, 1, DEPTH), S::connect(&name)));
        for (what, scenario) in [
            ("clients die", kill_clients::<S> as fn(&mut Random) -> Fallible<u64>),
            ("clients die beside slow ones", kill_clients_beside_slow_ones::<S>),
            ("only clients die", kill_only_clients::<S>),
            ("servers die", kill_servers::<S>),
        ] {
            let (before, start) = (Footprint::at_rest(), Instant::now());
            let outcome = scenario(&mut random);
            let after = Footprint::wait_until_equal(&before);
            match outcome {
                Ok(count) if after == before => {
                    println!(
                        "{}, {what}: {count} kills in {:?}, nothing left: {after:?}",
                        S::NAME,
                        start.elapsed()
                    );
                    (passed, kills) = (passed + 1, kills + count);
                }
                outcome => {
                    let why = outcome
                        .err()
                        .map_or(format!("left behind: {before:?} became {after:?}"), |e| e.to_string());
                    println!("FAILED: {}, {what}: {why}", S::NAME);
                    failed += 1;
                }
            }
        }
    });
    println!("{kills} kills\n{passed} passed, {failed} failed");
    std::process::exit(i32::from(failed > 0));
}

/// Kills a victim of this task at its end, which gives the number of its instructions, and then victims at instructions all
/// over it.
fn kill_throughout<S: Service>(
    task: &str,
    random: &mut Random,
    mut step: impl FnMut(u64, &str) -> Fallible<u64>,
) -> Fallible<()> {
    let total = step(u64::MAX, task)?;
    let stride = stride(total);
    let mut at = 1 + random.below(stride);
    let mut count = 1;
    while at <= total {
        step(at, &format!("{task}, step {at} of {total}"))?;
        (at, count) = (at + stride, count + 1);
    }
    println!("{}, {task}: {count} kills over its {total} instructions", S::NAME);
    Ok(())
}

/// The number of instructions from one kill to the next.
fn stride(total: u64) -> u64 {
    if std::env::var_os("CROSSTIE_STRESS_SECONDS").is_some() {
        1
    } else {
        total.div_ceil(KILLS_PER_SWEEP).max(1)
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) -> Fallible {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > TIMEOUT {
            return Err(format!("not within {TIMEOUT:?}: {what}").into());
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// The shared state of a survivor's thread: its progress, and how it is controlled.
#[derive(Default)]
struct Progress {
    stop: AtomicBool,
    /// Pauses a client: a victim that is single-stepped would never get room in the ring beside clients that are so much faster.
    pause: AtomicBool,
    paused: AtomicBool,
    /// Responses received, or requests served.
    count: AtomicU64,
    /// Polls of a server.
    turns: AtomicU64,
    /// Clients of a server.
    clients: AtomicUsize,
    /// How often a client noticed the end of its server, and how often it reconnected.
    ends: AtomicU64,
    reconnects: AtomicU64,
}

struct Survivor {
    progress: Arc<Progress>,
    thread: JoinHandle<()>,
}

impl Survivor {
    fn start(work: impl FnOnce(&Progress) + Send + 'static) -> Survivor {
        let progress = Arc::new(Progress::default());
        let own = progress.clone();
        Survivor { progress, thread: std::thread::spawn(move || work(&own)) }
    }

    /// Checks that it is alive and makes progress.
    fn check(&self, name: &str) -> Fallible {
        let before = self.progress.count.load(Relaxed);
        until(&format!("{name}: a survivor makes progress"), || {
            self.thread.is_finished() || self.progress.count.load(Relaxed) > before
        })?;
        if self.thread.is_finished() { Err(format!("{name}: a survivor failed").into()) } else { Ok(()) }
    }

    fn while_paused<R>(&self, action: impl FnOnce() -> Fallible<R>) -> Fallible<R> {
        self.progress.pause.store(true, Relaxed);
        until("a survivor pauses", || self.progress.paused.load(Relaxed))?;
        let outcome = action();
        self.progress.pause.store(false, Relaxed);
        until("a survivor makes progress", || !self.progress.paused.load(Relaxed))?;
        outcome
    }

    fn stop(self) -> Fallible {
        self.progress.stop.store(true, Relaxed);
        self.thread.join().map_err(|_| "a survivor failed".into())
    }
}

/// Starts a process that will be killed.
fn start<S: Service>(role: &str, name: &str, task: &str) -> Fallible<Actor> {
    Actor::start(&[role, S::NAME, name, task])
}

// --------------------------------------------------------------------------------------------------- clients die

fn kill_clients<S: Service>(random: &mut Random) -> Fallible<u64> {
    let name = fresh_name("local-kill");
    let server = Survivor::start({
        let server = S::create(&name, 2, DEPTH)?;
        move |progress| serve::<S>(server, progress)
    });
    let steady = Survivor::start({
        let client = S::connect(&name)?;
        move |progress| call_steadily::<S>(client, 0, progress)
    });
    let mut kills = 0;
    let mut kill_and_check = |mut victim: Actor, what: &str| -> Fallible {
        victim.kill().map_err(|e| format!("{what}: {e}"))?;
        until(&format!("{what}: the victim is removed"), || server.progress.clients.load(Relaxed) == 1)?;
        steady.check(what)?;
        server.check(what)?;
        let mut fresh = S::connect(&name).map_err(|e| format!("{what}: a new client: {e}"))?;
        let request_words = request(kills, 7);
        if S::exchange(&mut fresh, &request_words)? != expected_response(&request_words) {
            return Err(format!("{what}: the response to a new client").into());
        }
        drop(fresh);
        kills += 1;
        until(&format!("{what}: the new client is removed"), || server.progress.clients.load(Relaxed) == 1)
    };
    for task in ["call", "poll"] {
        let step = |steps: u64, what: &str| -> Fallible<u64> {
            let mut victim = start::<S>("client", &name, task)?;
            victim.expect("ready")?;
            let executed = steady.while_paused(|| {
                victim.go()?;
                trace::step(victim.child.id(), steps).map_err(|e| format!("{what}: ptrace: {e}").into())
            })?;
            kill_and_check(victim, what)?;
            Ok(executed)
        };
        kill_throughout::<S>(task, random, step)?;
    }
    for i in 0..RANDOM_KILLS {
        // Some are killed while they start and connect, most while they make calls as fast as they can.
        let early = i % 4 == 0;
        let delay = Duration::from_micros(random.below(if early { 6000 } else { 3000 }));
        let what = format!("random kill {i}, after {delay:?}{}", if early { " of its life" } else { "" });
        let mut victim = start::<S>("client", &name, "run")?;
        if !early {
            victim.expect("ready")?;
        }
        victim.go()?;
        std::thread::sleep(delay);
        kill_and_check(victim, &what)?;
    }
    steady.stop()?;
    server.stop()?;
    Ok(kills)
}

/// The victim is the only client, so the shared ring of `delegation` is in its mode for one producer. After its death a new client
/// is the only one: it continues where the dead one was.
fn kill_only_clients<S: Service>(random: &mut Random) -> Fallible<u64> {
    let name = fresh_name("local-kill");
    let server = Survivor::start({
        let server = S::create(&name, 2, DEPTH)?;
        move |progress| serve::<S>(server, progress)
    });
    let mut kills = 0;
    let step = |steps: u64, what: &str| -> Fallible<u64> {
        until(&format!("{what}: no client"), || server.progress.clients.load(Relaxed) == 0)?;
        let mut victim = start::<S>("client", &name, "call")?;
        victim.expect("ready")?;
        victim.go()?;
        let executed = trace::step(victim.child.id(), steps).map_err(|e| format!("{what}: ptrace: {e}"))?;
        victim.kill().map_err(|e| format!("{what}: {e}"))?;
        kills += 1;
        let mut fresh = S::connect(&name)?;
        // More calls than the ring has slots: it goes once around, past the position that the victim may have reserved.
        for number in 0..2 * DEPTH as u64 + 2 {
            let words = request(number, 5);
            if S::exchange(&mut fresh, &words)? != expected_response(&words) {
                return Err(format!("{what}: the response to a new client").into());
            }
        }
        drop(fresh);
        Ok(executed)
    };
    kill_throughout::<S>("call", random, step)?;
    server.stop()?;
    Ok(kills)
}

/// A client is stopped in the middle of a call, at any instruction, while another one dies. The recovery for the dead client
/// must not affect the stopped one: it continues, and gets its response.
fn kill_clients_beside_slow_ones<S: Service>(random: &mut Random) -> Fallible<u64> {
    let name = fresh_name("local-kill");
    let server = Survivor::start({
        let server = S::create(&name, 3, DEPTH)?;
        move |progress| serve::<S>(server, progress)
    });
    let steady = Survivor::start({
        let client = S::connect(&name)?;
        move |progress| call_steadily::<S>(client, 0, progress)
    });
    let wait_for_clients = |count: usize, what: &str| {
        until(&format!("{what}: {count} clients"), || server.progress.clients.load(Relaxed) == count)
    };
    let mut measured = start::<S>("client", &name, "call")?;
    measured.expect("ready")?;
    let total = steady.while_paused(|| {
        measured.go()?;
        Ok(trace::step(measured.child.id(), u64::MAX)?)
    })?;
    measured.kill()?;
    let stride = stride(total);
    let (mut at, mut kills) = (1 + random.below(stride), 1);
    while at <= total {
        wait_for_clients(1, "before")?;
        let what = format!("stopped at step {at}");
        let mut slow = start::<S>("client", &name, "slow")?;
        slow.expect("ready")?;
        let mut dying = start::<S>("client", &name, "run")?;
        dying.expect("ready")?;
        steady.while_paused(|| {
            slow.go()?;
            trace::step(slow.child.id(), at)?;
            wait_for_clients(3, &what)?;
            dying.kill().map_err(|e| format!("{what}: {e}"))?;
            // Requests after the position that the slow client may have reserved wait until it continues; but the server runs.
            let served = server.progress.turns.load(Relaxed);
            until(&what, || server.progress.turns.load(Relaxed) > served + 3)
        })?;
        trace::detach(slow.child.id())?;
        slow.expect("ready").map_err(|e| format!("{what}: the slow client: {e}"))?;
        steady.check(&what)?;
        slow.kill().map_err(|e| format!("{what}: {e}"))?;
        (at, kills) = (at + stride, kills + 2);
    }
    println!("{}, stopped in a call: {kills} kills over its {total} instructions", S::NAME);
    wait_for_clients(1, "after")?;
    steady.stop()?;
    server.stop()?;
    Ok(kills)
}

/// Serves until told to stop. Replies to some requests at once, and to the others later in reverse order.
fn serve<S: Service>(mut server: S::Server, progress: &Progress) {
    let mut deferred = Vec::new();
    while !progress.stop.load(Relaxed) {
        S::wait_for_request(&mut server, Duration::from_millis(5));
        progress.clients.store(S::clients(&mut server), Relaxed);
        progress.turns.fetch_add(1, Relaxed);
        while let Some((request_words, ticket)) = S::receive(&mut server) {
            assert!(is_request(&request_words), "a request that no client sent: {request_words:x?}");
            match request_words[0] % 4 {
                0 => deferred.push((ticket, expected_response(&request_words))),
                // A client that is gone needs no response.
                _ => drop(S::reply(&mut server, ticket, &expected_response(&request_words))),
            }
            progress.count.fetch_add(1, Relaxed);
        }
        while let Some((ticket, response)) = deferred.pop() {
            S::reply(&mut server, ticket, &response);
        }
        // After the steady client has disconnected, each poll counts as progress.
        progress.count.fetch_add(u64::from(S::clients(&mut server) == 0), Relaxed);
    }
    assert_eq!(S::violations(&server), 0, "a killed client does not violate the protocol");
}

/// Makes calls and verifies the responses. Reconnects when the server is gone. Every call must end exactly once.
fn call_steadily<S: Service>(mut client: S::Client, salt: u64, progress: &Progress) {
    let (mut next, mut pending) = (0, HashSet::new());
    while !progress.stop.load(Relaxed) {
        while progress.pause.load(Relaxed) {
            progress.paused.store(true, Relaxed);
            std::thread::sleep(Duration::from_micros(20));
        }
        progress.paused.store(false, Relaxed);
        if let Err(ended) = call_some::<S>(&mut client, salt, &mut next, &mut pending, progress) {
            assert!(ended.is_server_gone(), "{ended:?}");
            progress.ends.fetch_add(1, Relaxed);
            let lost: HashSet<u64> = S::disconnect(&mut client).into_iter().collect();
            assert_eq!(lost, pending, "calls that were handed back");
            pending.clear();
            let start = Instant::now();
            while let Err(e) = S::reconnect(&mut client) {
                assert!(start.elapsed() < TIMEOUT && !progress.stop.load(Relaxed), "no new server: {e}");
                std::thread::sleep(Duration::from_micros(100));
            }
            progress.reconnects.fetch_add(1, Relaxed);
        }
    }
    // Every remaining call must get its response.
    let start = Instant::now();
    while !pending.is_empty() {
        assert!(start.elapsed() < TIMEOUT, "calls {pending:?} never received a response");
        poll_some::<S>(&mut client, salt, &mut pending, progress).expect("the last server is alive");
    }
}

fn call_some<S: Service>(
    client: &mut S::Client,
    salt: u64,
    next: &mut u64,
    pending: &mut HashSet<u64>,
    progress: &Progress,
) -> Result<(), local_service::Ended> {
    while S::call(client, &request(*next, salt), *next)? {
        pending.insert(*next);
        *next += 1;
    }
    poll_some::<S>(client, salt, pending, progress)
}

fn poll_some<S: Service>(
    client: &mut S::Client,
    salt: u64,
    pending: &mut HashSet<u64>,
    progress: &Progress,
) -> Result<(), local_service::Ended> {
    S::wait_for_response(client, Duration::from_millis(5))?;
    S::poll(client, &mut |token, response| {
        assert!(pending.remove(&token), "{token} received two responses, or was never called");
        assert_eq!(*response, expected_response(&request(token, salt)), "the response to {token}");
        progress.count.fetch_add(1, Relaxed);
    })
}

/// A client that will be killed.
fn client<S: Service>(name: &str, task: &str) -> Fallible {
    let salt = u64::from(std::process::id());
    let mut client = S::connect(name)?;
    for i in 0..20 {
        assert_eq!(S::exchange(&mut client, &request(i, salt))?, expected_response(&request(i, salt)));
    }
    report_ready()?;
    let request_words = request(100, salt);
    let poll_response = |client: &mut S::Client| {
        S::poll(client, &mut |token, response| {
            assert_eq!((token, *response), (100, expected_response(&request_words)));
        })
    };
    match task {
        "call" => {
            trace::stop_here();
            let called = S::call(&mut client, &request_words, 100);
            trace::stop_here();
            assert!(called.is_ok_and(|called| called));
        }
        "slow" => {
            trace::stop_here();
            let called = S::call(&mut client, &request_words, 100);
            let start = Instant::now();
            // The ring may have wrapped since, and look full to a client that read `tail` before.
            let mut called = called.map_err(|e| format!("{e:?}"))?;
            while !called {
                assert!(start.elapsed() < TIMEOUT, "no room");
                called = S::call(&mut client, &request_words, 100).map_err(|e| format!("{e:?}"))?;
            }
            let start = Instant::now();
            let mut received = false;
            while !received {
                assert!(start.elapsed() < TIMEOUT, "no response");
                S::wait_for_response(&mut client, Duration::from_millis(100))
                    .map_err(|e| format!("{e:?}"))?;
                S::poll(&mut client, &mut |token, response| {
                    assert_eq!((token, *response), (100, expected_response(&request_words)));
                    received = true;
                })
                .map_err(|e| format!("{e:?}"))?;
            }
            println!("ready");
        }
        "poll" => {
            assert!(S::call(&mut client, &request_words, 100).is_ok_and(|called| called));
            let start = Instant::now();
            while !S::wait_for_response(&mut client, TIMEOUT).map_err(|e| format!("{e:?}"))? {
                assert!(start.elapsed() < TIMEOUT);
            }
            trace::stop_here();
            let polled = poll_response(&mut client);
            trace::stop_here();
            assert!(polled.is_ok());
        }
        _ => call_steadily::<S>(client, salt, &Progress::default()),
    }
    std::thread::sleep(TIMEOUT);
    Ok(())
}

// --------------------------------------------------------------------------------------------------- servers die

fn kill_servers<S: Service>(random: &mut Random) -> Fallible<u64> {
    let name = fresh_name("local-kill");
    let mut first = start::<S>("server", &name, "run")?;
    first.expect("ready")?;
    let steady: Vec<Survivor> = (0..2)
        .map(|salt| {
            let client = S::connect(&name)?;
            Ok(Survivor::start(move |progress| call_steadily::<S>(client, salt, progress)))
        })
        .collect::<Fallible<_>>()?;
    first.go()?;
    let (mut kills, mut slowest) = (0, Duration::ZERO);
    let mut kill_and_check = |mut victim: Actor, what: &str| -> Fallible {
        // The watcher thread of a server admits clients, whatever its main thread does.
        for survivor in &steady {
            until(&format!("{what}: clients reconnect"), || {
                survivor.progress.reconnects.load(Relaxed) >= kills
            })?;
        }
        victim.kill().map_err(|e| format!("{what}: {e}"))?;
        let killed = Instant::now();
        kills += 1;
        for survivor in &steady {
            until(&format!("{what}: clients notice the end"), || {
                survivor.progress.ends.load(Relaxed) >= kills
            })?;
        }
        slowest = slowest.max(killed.elapsed());
        Ok(())
    };
    kill_and_check(first, "the first server")?;
    let replace = |task: &str, what: &str| -> Fallible<Actor> {
        let mut victim = start::<S>("server", &name, task)?;
        victim.expect("ready").map_err(|e| format!("{what}: a new server: {e}"))?;
        victim.go()?;
        Ok(victim)
    };
    for task in ["recv", "reply"] {
        let step = |steps: u64, what: &str| -> Fallible<u64> {
            let victim = replace(task, what)?;
            let executed =
                trace::step(victim.child.id(), steps).map_err(|e| format!("{what}: ptrace: {e}"))?;
            kill_and_check(victim, what)?;
            Ok(executed)
        };
        kill_throughout::<S>(task, random, step)?;
    }
    for i in 0..RANDOM_KILLS / 2 {
        let delay = Duration::from_micros(random.below(4000));
        let what = format!("random kill {i} of the server, after {delay:?}");
        let victim = replace("run", &what)?;
        // Some are killed before the clients have made calls.
        for survivor in steady.iter().filter(|_| i % 4 > 0) {
            survivor.check(&what)?;
        }
        std::thread::sleep(delay);
        kill_and_check(victim, &what)?;
    }
    // The last server stays alive, and all clients continue.
    let mut last = replace("run", "the last server")?;
    for survivor in &steady {
        survivor.check("the last server")?;
    }
    for survivor in steady {
        survivor.stop()?;
    }
    last.kill()?;
    println!("{}: slowest from SIGKILL to the clients: {slowest:?}", S::NAME);
    Ok(kills + 1)
}

/// A server that will be killed.
fn server<S: Service>(name: &str, task: &str) -> Fallible {
    let mut server = S::create(name, 4, DEPTH)?;
    report_ready()?;
    let next = |server: &mut S::Server| {
        let start = Instant::now();
        while S::server_poll(server) == 0 {
            assert!(start.elapsed() < TIMEOUT, "no request");
            S::wait_for_request(server, TIMEOUT);
        }
    };
    match task {
        "recv" => {
            next(&mut server);
            trace::stop_here();
            let received = S::receive(&mut server);
            trace::stop_here();
            drop(received);
        }
        "reply" => loop {
            next(&mut server);
            if let Some((request_words, ticket)) = S::receive(&mut server) {
                let response = expected_response(&request_words);
                trace::stop_here();
                let replied = S::reply(&mut server, ticket, &response);
                trace::stop_here();
                assert!(replied);
                break;
            }
        },
        _ => serve::<S>(server, &Progress::default()),
    }
    std::thread::sleep(TIMEOUT);
    Ok(())
}

const _: () = assert!(size_of::<Words>() == 32);
