//! Every post and every completion of a mixed workload fails in turn. Each operation ends once with a cause, every buffer and every slot
//! comes back, no bytes reach the wrong buffer, and a new connection works.

use std::sync::Arc;
use std::time::Instant;

use crosstie::device::fault::Plan;
use crosstie::device::{Access, ConnectConfig, Mr, PostError, Status};
use crosstie::endpoint::{
    Batch, Buffer, Cause, Endpoint, EndpointConfig, Failed, Lend, OperationFuture, OperationResult, Progress,
    Strided,
};

use super::pair::{HANG, Pair, device, endpoint, filled, pattern};

fn config(qps: u8) -> EndpointConfig {
    EndpointConfig {
        qps,
        progress: Progress::Caller,
        min_part: 1024,
        deadline: None,
        imm_window: 2,
        messages: 2,
        slots: 3,
        // A lost peer is noticed after some milliseconds.
        connect: ConnectConfig { timeout: 8, ..ConnectConfig::default() },
        ..EndpointConfig::default()
    }
}

/// What the workload of one run left.
struct Results {
    succeeded: usize,
    failed: usize,
}

impl Results {
    fn count<B: Lend>(&mut self, result: &Result<B, Cause>) {
        match result {
            Ok(_) => self.succeeded += 1,
            Err(_) => self.failed += 1,
        }
    }
}

fn take<B: Lend + std::fmt::Debug>(
    pair: &Pair,
    mut future: OperationFuture<B>,
) -> Result<(B, u64, Option<u32>), Cause> {
    let mut result: Option<OperationResult<B>> = None;
    pair.run_until(|| {
        result = future.try_take();
        result.is_some()
    });
    match result.unwrap() {
        Ok(done) => Ok((done.buffer, done.bytes, done.imm)),
        Err(Failed { cause, mut buffer, .. }) => {
            // All buffers come back: the connection is in ERR, and drained.
            pair.run_until(|| buffer.try_take().is_some());
            Err(cause)
        }
    }
}

fn refused_posts(pair: &Pair) -> u64 {
    [&pair.here, &pair.there].iter().map(|endpoint| endpoint.counters().refused_posts).sum()
}

/// A mixed workload. Every future ends, and those that succeed have the right bytes.
fn workload(pair: &Pair, target: &Buffer, source: &Buffer) -> Results {
    let mut results = Results { succeeded: 0, failed: 0 };
    let refused_before = refused_posts(pair);
    let mut writes = Vec::new();
    let mut reads = Vec::new();
    let mut sends = Vec::new();
    let mut recvs = Vec::new();
    let mut imms = Vec::new();
    let mut batches = Vec::new();
    for round in 0..3u8 {
        // A refused start means that the connection has ended: nothing else is refused here.
        macro_rules! start {
            ($list:expr, $future:expr) => {
                match $future {
                    Ok(future) => $list.push((round, future)),
                    Err(refused) => assert!(
                        matches!(refused.cause, crosstie::endpoint::NotStarted::Ended(_)),
                        "{}",
                        refused.cause
                    ),
                }
            };
        }
        let (here, there) = (&pair.here, &pair.there);
        start!(recvs, there.recv(there.allocate(3000).unwrap(), ..));
        start!(imms, there.imm_recv());
        start!(writes, here.write(filled(here, 3000, round), .., &target.remote(), 4096 * u64::from(round)));
        start!(sends, here.send(filled(here, 2500, round + 10), ..));
        start!(writes, here.write_imm(filled(here, 100, round), .., &target.remote(), 16384, round.into()));
        start!(reads, here.read(here.allocate(3000).unwrap(), .., &source.remote(), 0));
        let mut batch = Batch::new();
        let (local, remote) = (batch.local(filled(here, 4096, round)), batch.remote(target.remote()));
        batch
            .strided(local, remote, Strided { count: 20, block: 50, local: (0, 64), remote: (20480, 100) })
            .unwrap();
        start!(batches, here.write_batch(batch));
    }
    // An operation can fail alone, if the device refuses its post. Its counterpart would wait for ever without a deadline.
    let ended = |list: &[(u8, OperationFuture<Buffer>)]| list.iter().all(|(_, future)| future.is_ended());
    let mut idle = 0;
    pair.run_until(|| {
        let refused = refused_posts(pair) > refused_before;
        idle += u32::from(refused);
        let all = [&writes, &reads, &sends, &recvs].iter().all(|list| ended(list))
            && imms.iter().all(|(_, future)| future.is_ended())
            && batches.iter().all(|(_, future)| future.is_ended());
        all || idle > 1000
    });
    if idle > 1000 {
        pair.here.close();
    }
    for (_, write) in writes {
        results.count(&take(pair, write).map(|(buffer, _, _)| buffer));
    }
    for (_, read) in reads {
        let result = take(pair, read);
        if let Ok((buffer, _, _)) = &result {
            assert!(buffer.to_vec() == pattern(8192, 99)[..3000]);
        }
        results.count(&result.map(|(buffer, _, _)| buffer));
    }
    for (_, batch) in batches {
        results.count(&take(pair, batch).map(|(batch, _, _)| batch));
    }
    for (_, send) in sends {
        results.count(&take(pair, send).map(|(buffer, _, _)| buffer));
    }
    // The k-th message goes to the k-th `recv`. One that failed alone counts as never called.
    let mut next = 10;
    for (_, recv) in recvs {
        let result = take(pair, recv);
        if let Ok((buffer, bytes, _)) = &result {
            assert_eq!(*bytes, 2500);
            let message = buffer.to_vec();
            assert!(message[..2500] == pattern(2500, message[0]), "cross-delivery");
            assert!(message[0] >= next && (message[0] == next || results.failed > 0), "in order");
            next = message[0] + 1;
        }
        results.count(&result.map(|(buffer, _, _)| buffer));
    }
    let mut next = 0;
    for (_, imm) in imms {
        let result = take(pair, imm);
        if let Ok((_, _, Some(imm))) = &result {
            assert!(*imm >= next, "in order");
            assert!(*imm == next || results.failed > 0, "none skipped");
            next = imm + 1;
        }
        results.count(&result.map(|((), ..)| ()));
    }
    results
}

struct Memory {
    target: Buffer,
    source: Buffer,
}

fn memory(there: &Endpoint) -> Memory {
    let region = |len| -> Mr { there.pd().allocate(len, Access::ALL).unwrap() };
    let (target, source) = (Buffer::new(region(1 << 16)), Buffer::new(region(8192)));
    source.write(0, &pattern(8192, 99)).unwrap();
    Memory { target, source }
}

/// Runs the workload with a plan of faults on one side. Returns the number of posts and completions.
fn run(plan: Plan, faulty_here: bool, qps: u8, what: &str) -> (u64, u64) {
    let begin = Instant::now();
    let faulty = device().with_faults(plan);
    let (a, b) = if faulty_here { (faulty.clone(), device()) } else { (device(), faulty.clone()) };
    let pair = Pair { here: endpoint(&a, &config(qps)), there: endpoint(&b, &config(qps)) };
    let memory = memory(&pair.there);
    let (here, there) = (pair.here.address(), pair.there.address());
    let connected = pair.here.connect(&there).and_then(|()| pair.there.connect(&here));
    let control = faulty.faults().unwrap();
    if connected.is_ok() {
        workload(&pair, &memory.target, &memory.source);
        // A side that was idle learns that the connection has ended when it waits for the peer.
        for (ended, other) in [(&pair.here, &pair.there), (&pair.there, &pair.here)] {
            if ended.ended().is_some()
                && let Ok(imm) = other.imm_recv()
            {
                assert!(take(&pair, imm).is_err(), "{what}");
            }
        }
    }
    let counts = (control.posts(), control.completions());
    pair.here.reopen().unwrap();
    pair.there.reopen().unwrap();
    pair.assert_empty();
    pair.connect();
    let results = workload(&pair, &memory.target, &memory.source);
    assert_eq!(results.failed, 0, "{what}: the new connection");
    assert_eq!(results.succeeded, 21);
    pair.assert_empty();
    for endpoint in [&pair.here, &pair.there] {
        let counters = endpoint.counters();
        assert_eq!(
            (counters.stale_completions, counters.empty_receive_queues),
            (0, 0),
            "{what}: {counters:?}"
        );
    }
    assert!(begin.elapsed() < HANG, "{what}");
    counts
}

#[test]
fn when_any_post_fails_every_operation_ends_and_all_memory_comes_back() {
    for (qps, faulty_here) in [(1, true), (1, false), (2, true)] {
        let (posts, _) = run(Plan::none(), faulty_here, qps, "without faults");
        println!("{posts} posts, {qps} queue pairs");
        for k in 0..posts {
            let plans = [
                Plan::none().fail_post(k, PostError::Full),
                Plan::none().fail_post(k, PostError::Device(5)),
                Plan::none().lose_post(k, Status::RetryExceeded),
            ];
            // Each post fails in one of three ways, and in all of them if there is time.
            let is_long = std::env::var_os("CROSSTIE_STRESS_SECONDS").is_some();
            for (kind, plan) in plans.into_iter().enumerate() {
                if is_long || k % 3 == kind as u64 {
                    run(plan, faulty_here, qps, &format!("post {k}, failure {kind}"));
                }
            }
        }
    }
}

#[test]
fn when_any_completion_fails_every_operation_ends_and_all_memory_comes_back() {
    for (qps, faulty_here) in [(1, true), (1, false), (2, true)] {
        let (_, completions) = run(Plan::none(), faulty_here, qps, "without faults");
        println!("{completions} completions, {qps} queue pairs");
        for k in 0..completions {
            let plan = Plan::none().fail_completion(k, Status::RetryExceeded);
            run(plan, faulty_here, qps, &format!("completion {k}"));
        }
    }
}

#[test]
fn delayed_and_overtaken_completions_do_no_harm() {
    for k in 0..60 {
        run(Plan::none().delay_completion(k, 20), true, 2, &format!("completion {k} delayed"));
        run(Plan::none().overtake_completion(k), true, 2, &format!("completion {k} overtaken"));
    }
}

/// A batch reports which blocks failed when its connection breaks in the middle.
#[test]
fn broken_connection_names_the_blocks_of_a_batch_that_failed() {
    let device = device().with_faults(Plan::none());
    let control = device.faults().unwrap();
    let pair =
        Pair { here: endpoint(&device, &config(1)), there: endpoint(&super::pair::device(), &config(1)) };
    pair.connect();
    let target = pair.there.allocate(1 << 20).unwrap();
    let pool = Arc::new(pair.here.pd().allocate(1 << 20, Access::ALL).unwrap());
    let mut batch = Batch::new();
    let (local, remote) =
        (batch.local(Buffer::of_shared_region(pool.clone())), batch.remote(target.remote()));
    batch
        .strided(local, remote, Strided { count: 4000, block: 64, local: (0, 200), remote: (0, 128) })
        .unwrap();
    let write = pair.here.write_batch(batch).unwrap();
    control.kill_peer(&pair.there.device().address());
    let begin = Instant::now();
    while !write.is_ended() {
        pair.here.progress();
        assert!(begin.elapsed() < HANG);
    }
    let failed = write.wait().unwrap_err();
    assert!(matches!(failed.cause, Cause::RemoteGone(_)), "{failed}");
    assert!(failed.cause.is_retryable());
    let batch = failed.buffer.wait_for(HANG).unwrap();
    let failures = batch.failures();
    assert_eq!(failures.last().unwrap().blocks.end, 4000, "{failures:?}");
    let first = failures.iter().map(|failed| failed.blocks.start).min().unwrap();
    assert!(first > 0, "some blocks were written: {failures:?}");
    // Every block before the first failure is there, and the failures cover all the others.
    let mut covered = vec![false; 4000];
    failures.iter().for_each(|failed| failed.blocks.clone().for_each(|block| covered[block as usize] = true));
    assert!(covered.iter().skip(first as usize).all(|covered| *covered), "{failures:?}");
    drop(batch);
    assert_eq!(Arc::strong_count(&pool), 1);
}
