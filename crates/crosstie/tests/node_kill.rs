//! SIGKILL at any instant: a client or the server of a service dies, and nobody else suffers.
//!
//! Clients that die: a server and a steady client live in this process, victims are processes that call, verify every
//! answer and are killed: at random instants, and one instruction at a time (`PTRACE_SINGLESTEP`) through a whole `call` and
//! `poll`. The server allows two clients, so after each kill a fresh one gets in only if the victim's place is free again.
//!
//! Servers that die: two steady clients live in this process, servers are processes that are killed at random instants and
//! at each instruction of `recv` and `reply`. After each kill both clients must hear of it, find the next server under the
//! same name and go on.
//!
//! All the while every survivor verifies every request and every answer. At the end nothing may be left: no descriptor,
//! mapping, thread or file. Not a libtest harness: victims are this very program. With `CROSSTIE_STRESS_SECONDS` set, at
//! whatever value, no instruction is left out.

mod killing;
mod node_service;
mod rng;

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use killing::{Footprint, trace};
use node_service::{Service, Words, answer, is_request, request};
use rng::Random;

/// Calls that a client may have under way.
const DEPTH: usize = 8;
const RANDOM_KILLS: u64 = 120;
/// Kills over the instructions of a step.
const KILLS_PER_SWEEP: u64 = 70;
/// After this long something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

type Fallible<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, role, service, name, task] = &args[..] {
        node_service::each!(
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
    node_service::each!(S, {
        // What a process keeps from its first server on, as the thread that watches, is no leak.
        let name = fresh_name();
        drop((S::create(&name, 1, DEPTH), S::connect(&name)));
        for (what, scene) in [
            ("clients die", clients_die::<S> as fn(&mut Random) -> Fallible<u64>),
            ("clients die beside slow ones", clients_die_beside_slow_ones::<S>),
            ("servers die", servers_die::<S>),
        ] {
            let (before, begun) = (Footprint::at_rest(), Instant::now());
            let outcome = scene(&mut random);
            let after = Footprint::wait_until_equal(&before);
            match outcome {
                Ok(count) if after == before => {
                    println!(
                        "{}, {what}: {count} kills in {:?}, nothing left: {after:?}",
                        S::NAME,
                        begun.elapsed()
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

fn fresh_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("node-kill-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

/// Has a victim of this task killed at its end, which tells how many instructions it has, and throughout them.
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

/// So many instructions from one kill to the next.
fn stride(total: u64) -> u64 {
    if std::env::var_os("CROSSTIE_STRESS_SECONDS").is_some() {
        1
    } else {
        total.div_ceil(KILLS_PER_SWEEP).max(1)
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) -> Fallible {
    let begun = Instant::now();
    while !done() {
        if begun.elapsed() > PATIENCE {
            return Err(format!("not within {PATIENCE:?}: {what}").into());
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// What a survivor's thread says about itself.
#[derive(Default)]
struct Pulse {
    stop: AtomicBool,
    /// Makes a client rest: who is stepped through a call would never get a place among others that are so much faster.
    pause: AtomicBool,
    paused: AtomicBool,
    /// Calls answered or served.
    count: AtomicU64,
    /// A server's looks at what there is.
    turns: AtomicU64,
    /// A server's clients.
    clients: AtomicUsize,
    /// How often a client saw its server go, and found another one.
    ends: AtomicU64,
    returns: AtomicU64,
}

struct Survivor {
    pulse: Arc<Pulse>,
    thread: JoinHandle<()>,
}

impl Survivor {
    fn start(work: impl FnOnce(&Pulse) + Send + 'static) -> Survivor {
        let pulse = Arc::new(Pulse::default());
        let own = pulse.clone();
        Survivor { pulse, thread: std::thread::spawn(move || work(&own)) }
    }

    /// It lives, and does something.
    fn check(&self, name: &str) -> Fallible {
        let before = self.pulse.count.load(Relaxed);
        until(&format!("{name}: a survivor goes on"), || {
            self.thread.is_finished() || self.pulse.count.load(Relaxed) > before
        })?;
        if self.thread.is_finished() { Err(format!("{name}: a survivor failed").into()) } else { Ok(()) }
    }

    fn rest<R>(&self, meanwhile: impl FnOnce() -> Fallible<R>) -> Fallible<R> {
        self.pulse.pause.store(true, Relaxed);
        until("a survivor rests", || self.pulse.paused.load(Relaxed))?;
        let outcome = meanwhile();
        self.pulse.pause.store(false, Relaxed);
        until("a survivor goes on", || !self.pulse.paused.load(Relaxed))?;
        outcome
    }

    fn stop(self) -> Fallible {
        self.pulse.stop.store(true, Relaxed);
        self.thread.join().map_err(|_| "a survivor failed".into())
    }
}

/// A process that will be killed.
struct Victim {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Victim {
    fn start<S: Service>(role: &str, name: &str, task: &str) -> Fallible<Victim> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([role, S::NAME, name, task])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().ok_or("no stdin")?;
        let output = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        Ok(Victim { child, input, output })
    }

    /// Until it says that it is ready.
    fn ready(&mut self) -> Fallible {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line == "ready\n" { Ok(()) } else { Err(format!("the victim said {line:?}").into()) }
    }

    fn go(&mut self) -> Fallible {
        Ok(self.input.write_all(b"go\n")?)
    }

    /// Kills it; until then nothing may have gone wrong with it.
    fn kill(mut self, name: &str) -> Fallible {
        self.child.kill()?;
        let status = self.child.wait()?;
        if status.signal() == Some(libc::SIGKILL) {
            return Ok(());
        }
        Err(format!("{name}: the victim ended by itself: {status}").into())
    }
}

// --------------------------------------------------------------------------------------------------- clients die

fn clients_die<S: Service>(random: &mut Random) -> Fallible<u64> {
    let name = fresh_name();
    let server = Survivor::start({
        let server = S::create(&name, 2, DEPTH)?;
        move |pulse| serve::<S>(server, pulse)
    });
    let steady = Survivor::start({
        let client = S::connect(&name)?;
        move |pulse| call_steadily::<S>(client, 0, pulse)
    });
    let mut kills = 0;
    let mut bury = |victim: Victim, what: &str| -> Fallible {
        victim.kill(what)?;
        until(&format!("{what}: the victim's place is free"), || server.pulse.clients.load(Relaxed) == 1)?;
        steady.check(what)?;
        server.check(what)?;
        let mut fresh = S::connect(&name).map_err(|e| format!("{what}: a fresh client: {e}"))?;
        let asked = request(kills, 7);
        if S::exchange(&mut fresh, &asked)? != answer(&asked) {
            return Err(format!("{what}: a fresh client's answer").into());
        }
        drop(fresh);
        kills += 1;
        until(&format!("{what}: the fresh client's place is free"), || {
            server.pulse.clients.load(Relaxed) == 1
        })
    };
    for task in ["call", "poll"] {
        let step = |steps: u64, what: &str| -> Fallible<u64> {
            let mut victim = Victim::start::<S>("client", &name, task)?;
            victim.ready()?;
            let executed = steady.rest(|| {
                victim.go()?;
                trace::step(victim.child.id(), steps).map_err(|e| format!("{what}: ptrace: {e}").into())
            })?;
            bury(victim, what)?;
            Ok(executed)
        };
        kill_throughout::<S>(task, random, step)?;
    }
    for i in 0..RANDOM_KILLS {
        // Some while they are starting and connecting, most while they call as fast as they can.
        let early = i % 4 == 0;
        let delay = Duration::from_micros(random.below(if early { 6000 } else { 3000 }));
        let what = format!("random kill {i}, after {delay:?}{}", if early { " of its life" } else { "" });
        let mut victim = Victim::start::<S>("client", &name, "run")?;
        if !early {
            victim.ready()?;
        }
        victim.go()?;
        std::thread::sleep(delay);
        bury(victim, &what)?;
    }
    steady.stop()?;
    server.stop()?;
    Ok(kills)
}

/// A client is held in the middle of a call, at any instruction, while another one dies: what is done about the dead one is
/// not done to the one that lives. It goes on, and its call is answered.
fn clients_die_beside_slow_ones<S: Service>(random: &mut Random) -> Fallible<u64> {
    let name = fresh_name();
    let server = Survivor::start({
        let server = S::create(&name, 3, DEPTH)?;
        move |pulse| serve::<S>(server, pulse)
    });
    let steady = Survivor::start({
        let client = S::connect(&name)?;
        move |pulse| call_steadily::<S>(client, 0, pulse)
    });
    let are = |count: usize, what: &str| {
        until(&format!("{what}: {count} clients"), || server.pulse.clients.load(Relaxed) == count)
    };
    let mut measured = Victim::start::<S>("client", &name, "call")?;
    measured.ready()?;
    let total = steady.rest(|| {
        measured.go()?;
        Ok(trace::step(measured.child.id(), u64::MAX)?)
    })?;
    measured.kill("measuring")?;
    let stride = stride(total);
    let (mut at, mut kills) = (1 + random.below(stride), 1);
    while at <= total {
        are(1, "before")?;
        let what = format!("held at step {at}");
        let mut slow = Victim::start::<S>("client", &name, "slow")?;
        slow.ready()?;
        let mut dying = Victim::start::<S>("client", &name, "run")?;
        dying.ready()?;
        steady.rest(|| {
            slow.go()?;
            trace::step(slow.child.id(), at)?;
            are(3, &what)?;
            dying.kill(&what)?;
            // Behind the place that the slow one may have reserved nothing moves until it goes on; but the server lives.
            let served = server.pulse.turns.load(Relaxed);
            until(&what, || server.pulse.turns.load(Relaxed) > served + 3)
        })?;
        trace::detach(slow.child.id())?;
        slow.ready().map_err(|e| format!("{what}: the slow one: {e}"))?;
        steady.check(&what)?;
        slow.kill(&what)?;
        (at, kills) = (at + stride, kills + 2);
    }
    println!("{}, held in a call: {kills} kills over its {total} instructions", S::NAME);
    are(1, "after")?;
    steady.stop()?;
    server.stop()?;
    Ok(kills)
}

/// Serves until told to stop: some requests at once, the others later and the latest first.
fn serve<S: Service>(mut server: S::Server, pulse: &Pulse) {
    let mut later = Vec::new();
    while !pulse.stop.load(Relaxed) {
        S::wait_for_request(&mut server, Duration::from_millis(5));
        pulse.clients.store(S::clients(&mut server), Relaxed);
        pulse.turns.fetch_add(1, Relaxed);
        while let Some((asked, ticket)) = S::receive(&mut server) {
            assert!(is_request(&asked), "a request that nobody made: {asked:x?}");
            match asked[0] % 4 {
                0 => later.push((ticket, answer(&asked))),
                // One that is gone needs no answer.
                _ => drop(S::reply(&mut server, ticket, &answer(&asked))),
            }
            pulse.count.fetch_add(1, Relaxed);
        }
        while let Some((ticket, answer)) = later.pop() {
            S::reply(&mut server, ticket, &answer);
        }
        // The steady client, when it is done, is gone: without it we count as alive all the same.
        pulse.count.fetch_add(u64::from(S::clients(&mut server) == 0), Relaxed);
    }
    assert_eq!(S::cut_off(&server), 0, "to be killed is no breach of the rules");
}

/// Calls and verifies. A server that is gone is waited for; every call ends exactly once.
fn call_steadily<S: Service>(mut client: S::Client, salt: u64, pulse: &Pulse) {
    let (mut next, mut pending) = (0, HashSet::new());
    while !pulse.stop.load(Relaxed) {
        while pulse.pause.load(Relaxed) {
            pulse.paused.store(true, Relaxed);
            std::thread::sleep(Duration::from_micros(20));
        }
        pulse.paused.store(false, Relaxed);
        if let Err(ended) = call_some::<S>(&mut client, salt, &mut next, &mut pending, pulse) {
            assert!(ended.is_server_gone(), "{ended:?}");
            pulse.ends.fetch_add(1, Relaxed);
            let lost: HashSet<u64> = S::abandon(&mut client).into_iter().collect();
            assert_eq!(lost, pending, "calls that came back");
            pending.clear();
            let begun = Instant::now();
            while let Err(e) = S::reconnect(&mut client) {
                assert!(begun.elapsed() < PATIENCE && !pulse.stop.load(Relaxed), "no server comes back: {e}");
                std::thread::sleep(Duration::from_micros(100));
            }
            pulse.returns.fetch_add(1, Relaxed);
        }
    }
    // Not one of them is lost.
    let begun = Instant::now();
    while !pending.is_empty() {
        assert!(begun.elapsed() < PATIENCE, "calls {pending:?} were never answered");
        take_some::<S>(&mut client, salt, &mut pending, pulse).expect("the last server lives");
    }
}

fn call_some<S: Service>(
    client: &mut S::Client,
    salt: u64,
    next: &mut u64,
    pending: &mut HashSet<u64>,
    pulse: &Pulse,
) -> Result<(), node_service::Ended> {
    while S::call(client, &request(*next, salt), *next)? {
        pending.insert(*next);
        *next += 1;
    }
    take_some::<S>(client, salt, pending, pulse)
}

fn take_some<S: Service>(
    client: &mut S::Client,
    salt: u64,
    pending: &mut HashSet<u64>,
    pulse: &Pulse,
) -> Result<(), node_service::Ended> {
    S::wait_for_answer(client, Duration::from_millis(5))?;
    S::poll(client, &mut |token, response| {
        assert!(pending.remove(&token), "{token} was answered twice, or never asked");
        assert_eq!(*response, answer(&request(token, salt)), "the answer to {token}");
        pulse.count.fetch_add(1, Relaxed);
    })
}

fn say_ready_and_await_go() -> Fallible {
    println!("ready");
    std::io::stdin().lock().read_line(&mut String::new())?;
    Ok(())
}

/// A client that will be killed.
fn client<S: Service>(name: &str, task: &str) -> Fallible {
    let salt = u64::from(std::process::id());
    let mut client = S::connect(name)?;
    for i in 0..20 {
        assert_eq!(S::exchange(&mut client, &request(i, salt))?, answer(&request(i, salt)));
    }
    say_ready_and_await_go()?;
    let asked = request(100, salt);
    let taken = |client: &mut S::Client| {
        S::poll(client, &mut |token, response| {
            assert_eq!((token, *response), (100, answer(&asked)));
        })
    };
    match task {
        "call" => {
            trace::stop_here();
            let called = S::call(&mut client, &asked, 100);
            trace::stop_here();
            assert!(called.is_ok_and(|called| called));
        }
        "slow" => {
            trace::stop_here();
            let called = S::call(&mut client, &asked, 100);
            let begun = Instant::now();
            // A ring that went round meanwhile may look full to somebody who looked before.
            let mut called = called.map_err(|e| format!("{e:?}"))?;
            while !called {
                assert!(begun.elapsed() < PATIENCE, "no room");
                called = S::call(&mut client, &asked, 100).map_err(|e| format!("{e:?}"))?;
            }
            let begun = Instant::now();
            let mut answered = false;
            while !answered {
                assert!(begun.elapsed() < PATIENCE, "no answer");
                S::wait_for_answer(&mut client, Duration::from_millis(100)).map_err(|e| format!("{e:?}"))?;
                S::poll(&mut client, &mut |token, response| {
                    assert_eq!((token, *response), (100, answer(&asked)));
                    answered = true;
                })
                .map_err(|e| format!("{e:?}"))?;
            }
            println!("ready");
        }
        "poll" => {
            assert!(S::call(&mut client, &asked, 100).is_ok_and(|called| called));
            let begun = Instant::now();
            while !S::wait_for_answer(&mut client, PATIENCE).map_err(|e| format!("{e:?}"))? {
                assert!(begun.elapsed() < PATIENCE);
            }
            trace::stop_here();
            let polled = taken(&mut client);
            trace::stop_here();
            assert!(polled.is_ok());
        }
        _ => call_steadily::<S>(client, salt, &Pulse::default()),
    }
    std::thread::sleep(PATIENCE);
    Ok(())
}

// --------------------------------------------------------------------------------------------------- servers die

fn servers_die<S: Service>(random: &mut Random) -> Fallible<u64> {
    let name = fresh_name();
    let mut first = Victim::start::<S>("server", &name, "run")?;
    first.ready()?;
    let steady: Vec<Survivor> = (0..2)
        .map(|salt| {
            let client = S::connect(&name)?;
            Ok(Survivor::start(move |pulse| call_steadily::<S>(client, salt, pulse)))
        })
        .collect::<Fallible<_>>()?;
    first.go()?;
    let (mut kills, mut slowest) = (0, Duration::ZERO);
    let mut bury = |victim: Victim, what: &str| -> Fallible {
        // A server has a thread that lets clients in, whatever the other one does.
        for survivor in &steady {
            until(&format!("{what}: clients come back"), || survivor.pulse.returns.load(Relaxed) >= kills)?;
        }
        victim.kill(what)?;
        let killed = Instant::now();
        kills += 1;
        for survivor in &steady {
            until(&format!("{what}: clients hear of it"), || survivor.pulse.ends.load(Relaxed) >= kills)?;
        }
        slowest = slowest.max(killed.elapsed());
        Ok(())
    };
    bury(first, "the first server")?;
    let replace = |task: &str, what: &str| -> Fallible<Victim> {
        let mut victim = Victim::start::<S>("server", &name, task)?;
        victim.ready().map_err(|e| format!("{what}: a new server: {e}"))?;
        victim.go()?;
        Ok(victim)
    };
    for task in ["recv", "reply"] {
        let step = |steps: u64, what: &str| -> Fallible<u64> {
            let victim = replace(task, what)?;
            let executed =
                trace::step(victim.child.id(), steps).map_err(|e| format!("{what}: ptrace: {e}"))?;
            bury(victim, what)?;
            Ok(executed)
        };
        kill_throughout::<S>(task, random, step)?;
    }
    for i in 0..RANDOM_KILLS / 2 {
        let delay = Duration::from_micros(random.below(4000));
        let what = format!("random kill {i} of the server, after {delay:?}");
        let victim = replace("run", &what)?;
        // Now and then before they have begun.
        for survivor in steady.iter().filter(|_| i % 4 > 0) {
            survivor.check(&what)?;
        }
        std::thread::sleep(delay);
        bury(victim, &what)?;
    }
    // The last one lives, and everybody goes on.
    let last = replace("run", "the last server")?;
    for survivor in &steady {
        survivor.check("the last server")?;
    }
    for survivor in steady {
        survivor.stop()?;
    }
    last.kill("the last server")?;
    println!("{}: slowest from SIGKILL to the clients: {slowest:?}", S::NAME);
    Ok(kills + 1)
}

/// A server that will be killed.
fn server<S: Service>(name: &str, task: &str) -> Fallible {
    let mut server = S::create(name, 4, DEPTH)?;
    say_ready_and_await_go()?;
    let next = |server: &mut S::Server| {
        let begun = Instant::now();
        while S::look(server) == 0 {
            assert!(begun.elapsed() < PATIENCE, "no request");
            S::wait_for_request(server, PATIENCE);
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
            if let Some((asked, ticket)) = S::receive(&mut server) {
                let answer = answer(&asked);
                trace::stop_here();
                let replied = S::reply(&mut server, ticket, &answer);
                trace::stop_here();
                assert!(replied);
                break;
            }
        },
        _ => serve::<S>(server, &Pulse::default()),
    }
    std::thread::sleep(PATIENCE);
    Ok(())
}

const _: () = assert!(size_of::<Words>() == 32);
