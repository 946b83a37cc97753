//! A client or the server of an `ipc` or `delegation` service, stopped at any instruction of its operations.
//!
//! While a client is stopped, another client makes [`CALLS`] calls, which is many times the ring, and a new client connects. While a
//! server is stopped, waits of its clients end at their timeouts, a client can disconnect, and another server is not affected.

use crosstie_testkit::actor::{
    Actor, End, Fallible, STOPS_PER_SWEEP, TIMEOUT, check, operation, report_ready, sweep, wait_for,
};
use crosstie_testkit::rng::Random;
use std::time::Duration;

use crate::local_service::{self, Service, expected_response, request};

pub(crate) const TESTS: &[(&str, crate::Test)] = &[
    ("clients_go_on_while_another_client_is_stopped_anywhere_in_an_operation", stopped_clients),
    ("clients_are_not_held_up_by_a_server_that_is_stopped_anywhere_in_an_operation", stopped_servers),
];

const DEPTH: usize = 8;
/// Calls that others make beside a stopped client: several times the 256 positions of the shared ring.
const CALLS: u64 = 1000;
const SALT: u64 = 99;

fn stopped_clients(random: &mut Random) -> Fallible {
    local_service::each!(S, {
        for task in ["call", "poll"] {
            sweep(&format!("{} client, {task}", S::NAME), STOPS_PER_SWEEP, random, |steps, end| {
                stop_client::<S>(task, steps, end)
            })?;
        }
    });
    Ok(())
}

fn stop_client<S: Service>(task: &str, steps: u64, end: End) -> Fallible<u64> {
    let name = format!("stopped-{}-{}", S::NAME, std::process::id());
    let mut server = S::create(&name, 3, DEPTH)?;
    let mut steady = S::connect(&name)?;
    let measure = if steps == u64::MAX { "measure" } else { "run" };
    let mut actor = Actor::start(&["client", S::NAME, &name, task, measure])?;
    // It is served until it is ready.
    let mut served = 0;
    wait_for("the client to be ready", || {
        served += serve::<S>(&mut server);
        served >= 20
    })?;
    actor.expect("ready")?;
    actor.go()?;
    if task == "poll" {
        wait_for("the client's call", || serve::<S>(&mut server) > 0)?;
    }
    let executed = actor.stop_after(steps)?;
    call::<S>(&mut server, &mut steady, CALLS)?;
    // The stopped client counts as a client: there is room for one more.
    let mut fresh = S::connect(&name)?;
    call::<S>(&mut server, &mut fresh, 10)?;
    drop(fresh);
    wait_for("the new client to be removed", || S::clients(&mut server) == 2)?;
    if end == End::Continue {
        actor.signal(libc::SIGCONT)?;
        // Its call gets its response.
        let mut line = String::new();
        std::thread::scope(|scope| -> Fallible {
            let reader = scope.spawn(|| std::io::BufRead::read_line(&mut actor.output, &mut line));
            wait_for("the client to be done", || {
                serve::<S>(&mut server);
                reader.is_finished()
            })
        })?;
        check(line.trim() == "done", &line)?;
    } else {
        actor.end(end)?;
        wait_for("the dead client to be removed", || S::clients(&mut server) == 1)?;
        // Its slot is free again.
        drop((S::connect(&name)?, S::connect(&name)?));
    }
    call::<S>(&mut server, &mut steady, CALLS)?;
    check(S::violations(&server) == 0, "a stopped client violates nothing")?;
    Ok(executed)
}

/// Replies to all requests that are there.
fn serve<S: Service>(server: &mut S::Server) -> u64 {
    let mut served = 0;
    S::server_poll(server);
    while let Some((words, ticket)) = S::receive(server) {
        // A client that is gone needs no response.
        S::reply(server, ticket, &expected_response(&words));
        served += 1;
    }
    served
}

/// Makes calls, serves them, and checks each response.
fn call<S: Service>(server: &mut S::Server, client: &mut S::Client, calls: u64) -> Fallible {
    let (mut made, mut ended) = (0, 0);
    wait_for("the calls of another client", || {
        while made < calls && S::call(client, &request(made, SALT), made).is_ok_and(|made| made) {
            made += 1;
        }
        // The server sleeps until there is something to do.
        S::wait_for_request(server, Duration::from_millis(1));
        serve::<S>(server);
        let polled = S::poll(client, &mut |token, response| {
            assert_eq!(*response, expected_response(&request(token, SALT)));
            ended += 1;
        });
        assert!(polled.is_ok());
        ended == calls
    })
}

/// A client that is stopped.
pub(crate) fn run_client(service: &str, name: &str, task: &str, measure: bool) -> Fallible {
    local_service::each!(
        S,
        if service == S::NAME {
            client::<S>(name, task, measure)?;
        }
    );
    Ok(())
}

fn client<S: Service>(name: &str, task: &str, measure: bool) -> Fallible {
    let mut client = S::connect(name)?;
    for i in 0..20 {
        let words = request(i, 5);
        check(S::exchange(&mut client, &words)? == expected_response(&words), "another response")?;
    }
    report_ready()?;
    let words = request(100, 5);
    let mut ended = false;
    let poll = |client: &mut S::Client, ended: &mut bool| {
        S::poll(client, &mut |token, response| {
            assert_eq!((token, *response), (100, expected_response(&words)));
            *ended = true;
        })
    };
    if task == "call" {
        let made = operation(measure, || S::call(&mut client, &words, 100));
        let mut made = made.map_err(|e| format!("{e:?}"))?;
        // The ring may have wrapped since, and look full to a client that read its tail before.
        wait_for("room", || {
            made = made || S::call(&mut client, &words, 100).is_ok_and(|made| made);
            made
        })?;
    } else {
        let made = S::call(&mut client, &words, 100).map_err(|e| format!("{e:?}"))?;
        check(made, "room for a call")?;
        let arrived = S::wait_for_response(&mut client, TIMEOUT).map_err(|e| format!("{e:?}"))?;
        check(arrived, "a response")?;
        operation(measure, || poll(&mut client, &mut ended)).map_err(|e| format!("{e:?}"))?;
    }
    wait_for("the response", || {
        S::wait_for_response(&mut client, Duration::from_millis(10)).ok();
        poll(&mut client, &mut ended).expect("connected");
        ended
    })?;
    println!("done");
    std::thread::sleep(TIMEOUT);
    Ok(())
}

fn stopped_servers(random: &mut Random) -> Fallible {
    local_service::each!(S, {
        for task in ["recv", "reply"] {
            sweep(&format!("{} server, {task}", S::NAME), STOPS_PER_SWEEP, random, |steps, end| {
                stop_server::<S>(task, steps, end)
            })?;
        }
    });
    Ok(())
}

fn stop_server<S: Service>(task: &str, steps: u64, end: End) -> Fallible<u64> {
    let name = format!("stopped-{}-{}", S::NAME, std::process::id());
    let measure = if steps == u64::MAX { "measure" } else { "run" };
    let mut actor = Actor::start(&["server", S::NAME, &name, task, measure])?;
    actor.expect("ready")?;
    let (mut client, leaving) = (S::connect(&name)?, S::connect(&name)?);
    let mut other_server = S::create(&format!("{name}-other"), 1, DEPTH)?;
    let mut other_client = S::connect(&format!("{name}-other"))?;
    check(S::call(&mut client, &request(7, SALT), 7).is_ok_and(|made| made), "room for a call")?;
    actor.go()?;
    let executed = actor.stop_after(steps)?;
    // Waits end, whether or not the response is there; a client leaves; the queue fills up and says so.
    S::wait_for_response(&mut client, Duration::from_millis(1)).map_err(|e| format!("{e:?}"))?;
    drop(leaving);
    let mut made = 1;
    while S::call(&mut client, &request(7 + made, SALT), 7 + made).map_err(|e| format!("{e:?}"))? {
        made += 1;
        check(made <= DEPTH as u64 + 1, "more calls than the queue holds")?;
    }
    call::<S>(&mut other_server, &mut other_client, 100)?;
    if end == End::Continue {
        actor.signal(libc::SIGCONT)?;
        let mut ended = 0;
        wait_for("the responses of the continued server", || {
            S::wait_for_response(&mut client, Duration::from_millis(10)).ok();
            let polled = S::poll(&mut client, &mut |token, response| {
                assert_eq!(*response, expected_response(&request(token, SALT)));
                ended += 1;
            });
            assert!(polled.is_ok());
            ended == made
        })?;
        actor.expect("done")?;
    } else {
        actor.end(end)?;
        let mut ended = 0;
        wait_for("the end of a killed server", || {
            S::wait_for_response(&mut client, Duration::from_millis(10)).is_err()
                || S::poll(&mut client, &mut |_, _| ended += 1).is_err()
        })?;
        check(ended + S::disconnect(&mut client).len() as u64 == made, "each call ends once")?;
        let replaced = S::create(&name, 2, DEPTH);
        check(replaced.is_ok(), "the name of a dead server is free")?;
    }
    Ok(executed)
}

/// A server that is stopped.
pub(crate) fn run_server(service: &str, name: &str, task: &str, measure: bool) -> Fallible {
    local_service::each!(
        S,
        if service == S::NAME {
            server::<S>(name, task, measure)?;
        }
    );
    Ok(())
}

fn server<S: Service>(name: &str, task: &str, measure: bool) -> Fallible {
    let mut server = S::create(name, 4, DEPTH)?;
    report_ready()?;
    wait_for("a request", || S::server_poll(&mut server) > 0 || S::wait_for_request(&mut server, TIMEOUT))?;
    let (words, ticket) =
        if task == "recv" { operation(measure, || S::receive(&mut server)) } else { S::receive(&mut server) }
            .ok_or("no request")?;
    let response = expected_response(&words);
    if task == "recv" {
        S::reply(&mut server, ticket, &response);
    } else {
        operation(measure, || S::reply(&mut server, ticket, &response));
    }
    wait_for("the other calls", || serve::<S>(&mut server) > 0)?;
    println!("done");
    loop {
        S::wait_for_request(&mut server, TIMEOUT);
        serve::<S>(&mut server);
    }
}
