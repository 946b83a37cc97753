//! A rank of a job, stopped at any instruction of an operation. The other ranks get the result if the stopped rank had contributed,
//! and else an error that names it, at the timeout of the operation. Nobody waits longer.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use crosstie::bootstrap::{Bootstrap, Error, Limits, Secret, tcp};
use crosstie_testkit::actor::{Actor, End, Fallible, TIMEOUT, check, operation, report_ready, sweep};
use crosstie_testkit::rng::Random;

pub(crate) const TESTS: &[(&str, crate::Test)] =
    &[("ranks_name_a_rank_that_is_stopped_anywhere_in_an_operation", stopped_ranks)];

/// The operation has 23,000 instructions, and each takes long under a debugger. It contributes after about a sixth of them, so some stops
/// are before that.
const STOPS: u64 = 12;
const SECRET: &str = "the secret of the stopped rank";
/// The least time that the other ranks wait for the stopped one. They wait longer where single steps take long.
const MIN_WAIT: Duration = Duration::from_millis(300);

fn limits(operation_timeout: Duration) -> Limits {
    Limits { join_timeout: TIMEOUT, operation_timeout, max_blob: 1 << 10, max_message: 1 << 16 }
}

fn stopped_ranks(random: &mut Random) -> Fallible {
    let (mut complete, mut named, mut timeout) = (0, 0, TIMEOUT);
    sweep("bootstrap rank, all_gather", STOPS, random, |steps, end| {
        let (executed, is_complete, took) = stop_rank(steps, end, timeout)?;
        if steps == u64::MAX {
            // Several times what it takes until the rank has contributed.
            timeout = MIN_WAIT.max(took);
        }
        *(if is_complete { &mut complete } else { &mut named }) += 1;
        Ok(executed)
    })?;
    println!("the others got the result {complete} times, and the name of the stopped rank {named} times");
    check(complete > 0 && named > 0, "the rank was always stopped on the same side of its contribution")
}

/// Returns the instructions that the rank executed, whether the other ranks got the result, and how long the instructions took.
fn stop_rank(steps: u64, end: End, timeout: Duration) -> Fallible<(u64, bool, Duration)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let secret = Secret::new(SECRET)?;
    let measure = if steps == u64::MAX { "measure" } else { "run" };
    let mut actor = Actor::start(&["rank", &address, measure, &timeout.as_millis().to_string()])?;
    let (stopped, others) = std::sync::mpsc::channel();
    std::thread::scope(|scope| -> Fallible<(u64, bool, Duration)> {
        let config = |rank| tcp::Config {
            rank,
            size: 3,
            rendezvous: address.clone(),
            listen: None,
            secret: secret.clone(),
            limits: limits(timeout),
        };
        let (go, gates): (Vec<_>, Vec<_>) = (0..2).map(|_| std::sync::mpsc::channel::<()>()).unzip();
        let mut gates = gates.into_iter();
        for rank in 0..2u32 {
            let (stopped, config) = (stopped.clone(), config(rank));
            let listener = if rank == 0 { Some(listener.try_clone()?) } else { None };
            let gate = gates.next().ok_or("a gate for each rank")?;
            scope.spawn(move || {
                let joined = match listener {
                    Some(listener) => {
                        tcp::join_as_rank_zero(listener, config.size, &config.secret, config.limits)
                    }
                    None => tcp::join(&config),
                };
                let mut job = joined.expect("all ranks join");
                let is_open = gate.recv().is_ok();
                assert!(is_open, "the test goes on");
                stopped.send(job.all_gather(&[rank as u8])).expect("the test waits");
                // Rank 0 ends the job when it is dropped: not before the stopped rank had time to end its operation.
                gate.recv().ok();
            });
        }
        actor.expect("ready")?;
        actor.go()?;
        // With the number of instructions unknown, the operation must be able to end.
        go.iter().try_for_each(|gate| gate.send(()))?;
        let begun = Instant::now();
        let executed = actor.stop_after(steps)?;
        let took = begun.elapsed();
        let mut complete = 0;
        for _ in 0..2 {
            match others.recv_timeout(TIMEOUT + timeout)? {
                Ok(blobs) => {
                    check(blobs == [[0], [1], [2]], &blobs)?;
                    complete += 1;
                }
                Err(Error::RankMissing { ranks, .. }) => check(ranks == [2], &ranks)?,
                Err(error) => return Err(format!("{error:?}").into()),
            }
        }
        check(complete != 1, "one rank got the result and the other did not")?;
        // The stopped rank gets the same result, or an error.
        actor.end(end)?;
        drop(go);
        Ok((executed, complete == 2, took))
    })
}

/// The rank that is stopped.
pub(crate) fn run(address: &str, measure: bool, timeout: Duration) -> Fallible {
    let config = tcp::Config {
        rank: 2,
        size: 3,
        rendezvous: address.to_owned(),
        listen: None,
        secret: Secret::new(SECRET)?,
        limits: limits(timeout),
    };
    let mut job = tcp::join(&config)?;
    report_ready()?;
    let gathered = operation(measure, || job.all_gather(&[2]));
    match gathered {
        Ok(blobs) => check(blobs == [[0], [1], [2]], &blobs)?,
        Err(Error::RankMissing { ranks, .. }) => check(ranks == [2], &ranks)?,
        Err(Error::Timeout { .. } | Error::RankDisconnected { rank: 0 }) => {}
        Err(error) => return Err(format!("{error:?}").into()),
    }
    println!("done");
    std::thread::sleep(TIMEOUT);
    Ok(())
}
