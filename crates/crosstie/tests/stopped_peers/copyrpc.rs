//! A copyrpc peer, stopped at any instruction of a call, of a poll, or of a reply.
//!
//! This side has one context with two connections: to the process that is stopped, and to a healthy peer. Both share a completion queue.
//! While the process is stopped, calls to the healthy peer complete; a call to the stopped one ends at its deadline, or waits without
//! a deadline until the process continues or ends.

use std::io::{Read, Write};
use std::time::Duration;

use crosstie::copyrpc::{CallFailed, Config, Connection, ConnectionAddress, ConnectionConfig, Context};
use crosstie::device::{ConnectConfig, Device, DeviceSpec};
use crosstie_testkit::actor::{
    Actor, End, Fallible, STOPS_PER_SWEEP, TIMEOUT, check, operation, sweep, wait_for,
};
use crosstie_testkit::rng::Random;
use zerocopy::{FromBytes, IntoBytes};

pub(crate) const TESTS: &[(&str, crate::Test)] = &[(
    "connections_of_a_context_go_on_while_a_copyrpc_peer_is_stopped_anywhere_in_an_operation",
    stopped_peers,
)];

/// Calls to the healthy peer while the other is stopped: many times the ring, and more than the receives that are posted.
const CALLS: u64 = 300;
const CONFIG: ConnectionConfig =
    ConnectionConfig { ring: 4096, credit: 1024, pending_calls: 64, bulk: 0, max_peer_ring: 1 << 20 };
const TO_STOPPED: u64 = u64::MAX;
const WITH_DEADLINE: u64 = u64::MAX - 1;

fn context() -> Fallible<Context<u64>> {
    Ok(Context::new(Device::open(&DeviceSpec::Software)?, &Config { max_connections: 4, receives: 64 })?)
}

fn stopped_peers(random: &mut Random) -> Fallible {
    for task in ["call", "poll", "reply"] {
        sweep(&format!("copyrpc peer, {task}"), STOPS_PER_SWEEP, random, |steps, end| {
            stop_peer(task, steps, end)
        })?;
    }
    Ok(())
}

/// This side, and the healthy peer in the same process.
struct Sides {
    ours: Context<u64>,
    healthy: Context<u64>,
    to_healthy: Connection<u64>,
    next: u64,
    answered: u64,
    /// How the calls to the stopped process ended.
    stopped: Vec<(u64, Result<(), CallFailed>)>,
}

impl Sides {
    fn turn(&mut self) {
        let Sides { ours, healthy, answered, stopped, .. } = self;
        ours.poll(|user, response| match user {
            TO_STOPPED | WITH_DEADLINE => stopped.push((user, response.map(drop))),
            _ => {
                let bytes = response.expect("the healthy peer answers").to_vec();
                assert_eq!(bytes, user.to_le_bytes());
                *answered += 1;
            }
        });
        // Requests of the process that is stopped, and of the healthy peer.
        healthy.poll(|_, _| {});
        for context in [ours, healthy] {
            while let Some(request) = context.recv() {
                let bytes = request.data().to_vec();
                // The reply is lost if the peer was killed.
                request.reply(&bytes).ok();
            }
        }
    }

    /// Serves both peers until the process has printed `line`.
    fn serve_until(&mut self, actor: &mut Actor, line: &str) -> Fallible {
        let mut printed = String::new();
        std::thread::scope(|scope| -> Fallible {
            let reader = scope.spawn(|| std::io::BufRead::read_line(&mut actor.output, &mut printed));
            wait_for(line, || {
                self.turn();
                reader.is_finished()
            })
        })?;
        check(printed.trim() == line, &printed)
    }

    /// Makes calls to the healthy peer until `calls` more have been answered.
    fn exercise(&mut self, calls: u64) -> Fallible {
        let goal = self.answered + calls;
        wait_for("responses of the healthy peer", || {
            while self.to_healthy.pending_calls() < 8
                && self.to_healthy.call(&self.next.to_le_bytes(), 8, self.next).is_ok()
            {
                self.next += 1;
            }
            self.turn();
            self.answered >= goal
        })
    }
}

fn stop_peer(task: &str, steps: u64, end: End) -> Fallible<u64> {
    let (ours, healthy) = (context()?, context()?);
    let (to_healthy, back) = (ours.create_connection(&CONFIG)?, healthy.create_connection(&CONFIG)?);
    to_healthy.connect(&back.address(), &ConnectConfig::default())?;
    back.connect(&to_healthy.address(), &ConnectConfig::default())?;
    let to_stopped = ours.create_connection(&CONFIG)?;
    let mut sides = Sides { ours, healthy, to_healthy, next: 0, answered: 0, stopped: Vec::new() };

    let measure = if steps == u64::MAX { "measure" } else { "run" };
    let mut actor = Actor::start(&["copyrpc", task, measure])?;
    actor.input.write_all(to_stopped.address().as_bytes())?;
    let mut theirs = [0; size_of::<ConnectionAddress>()];
    actor.output.read_exact(&mut theirs)?;
    let theirs = ConnectionAddress::read_from_bytes(&theirs).map_err(|e| e.to_string())?;
    to_stopped.connect(&theirs, &ConnectConfig::default())?;
    actor.input.write_all(b"+")?;
    sides.serve_until(&mut actor, "ready")?;
    // Something to poll for, and to reply to.
    to_stopped.call(b"to the stopped peer", 64, TO_STOPPED).map_err(|e| e.cause.to_string())?;
    sides.ours.flush();
    let executed = actor.stop_after(steps)?;

    sides.exercise(CALLS)?;
    let with_deadline = to_stopped.call_within(b"late", 8, WITH_DEADLINE, Duration::from_millis(5));
    if with_deadline.is_ok() {
        wait_for("a deadline", || {
            sides.ours.wait(Duration::from_millis(20));
            sides.turn();
            sides.stopped.iter().any(|(user, _)| *user == WITH_DEADLINE)
        })?;
        let ended = sides.stopped.iter().find(|(user, _)| *user == WITH_DEADLINE);
        check(matches!(ended, Some((_, Err(CallFailed::TimedOut)))), &sides.stopped)?;
    }
    sides.exercise(CALLS)?;
    match end {
        End::Continue => {
            actor.signal(libc::SIGCONT)?;
            wait_for("the response of the continued peer", || {
                sides.turn();
                sides.stopped.iter().any(|(user, ended)| *user == TO_STOPPED && ended.is_ok())
            })?;
            sides.serve_until(&mut actor, "done")?;
            check(to_stopped.failure().is_none(), to_stopped.failure())?;
        }
        End::Kill => {
            actor.end(end)?;
            wait_for("the end of the call to a killed peer", || {
                sides.turn();
                sides.stopped.iter().any(|(user, _)| *user == TO_STOPPED) && to_stopped.failure().is_some()
            })?;
        }
    }
    sides.exercise(CALLS)?;
    Ok(executed)
}

/// The process that is stopped.
pub(crate) fn run(task: &str, measure: bool) -> Fallible {
    let context = context()?;
    let connection = context.create_connection(&CONFIG)?;
    let mut theirs = [0; size_of::<ConnectionAddress>()];
    std::io::stdin().read_exact(&mut theirs)?;
    std::io::stdout().write_all(connection.address().as_bytes())?;
    std::io::stdout().flush()?;
    let theirs = ConnectionAddress::read_from_bytes(&theirs).map_err(|e| e.to_string())?;
    connection.connect(&theirs, &ConnectConfig::default())?;
    std::io::stdin().read_exact(&mut [0])?;
    let mut answered = 0;
    let poll = |answered: &mut u64| {
        context.poll(|_, response| {
            assert!(response.is_ok(), "{:?}", response.err());
            *answered += 1;
        })
    };
    let call = || connection.call(b"from the stopped peer", 32, 1).map_err(|e| e.cause.to_string());
    // The connection is used, so that the operation does only what it does each time.
    call()?;
    wait_for("a first response", || {
        poll(&mut answered);
        answered == 1
    })?;
    println!("ready");
    let mut called = 1;
    let reply = |request: crosstie::copyrpc::RecvHandle<u64>| {
        request.reply(b"a response").map_err(|error| error.to_string())
    };
    match task {
        "call" => {
            operation(measure, || {
                call()?;
                context.flush();
                Ok::<(), String>(())
            })?;
            called += 1;
        }
        "poll" => {
            context.wait(TIMEOUT);
            operation(measure, || poll(&mut answered));
        }
        _ => {
            let mut request = None;
            wait_for("a request", || {
                poll(&mut answered);
                request = context.recv();
                request.is_some()
            })?;
            let request = request.ok_or("no request")?;
            operation(measure, || {
                reply(request)?;
                context.flush();
                Ok::<(), String>(())
            })?;
        }
    }
    call()?;
    called += 1;
    wait_for("all responses", || {
        poll(&mut answered);
        while let Some(request) = context.recv() {
            reply(request).expect("connected");
        }
        answered == called
    })?;
    println!("done");
    // The last reply may still be on its way out of this process.
    loop {
        context.wait(Duration::from_millis(100));
        poll(&mut answered);
        while let Some(request) = context.recv() {
            reply(request).ok();
        }
    }
}
