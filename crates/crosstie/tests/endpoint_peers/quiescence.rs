//! Quiescence: a buffer that has come back is not written any more.
//!
//! Each round starts transfers into buffers (reads, batches of reads, receives whose messages the other side keeps sending), and ends
//! them at a random point: by cancelling each, all at once, by dropping the futures, or by closing the connection. Buffers that have
//! come back are filled with a poison value and watched over the following rounds.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crosstie::endpoint::{
    Batch, Buffer, Cause, Endpoint, EndpointConfig, OperationFuture, OperationResult, Progress,
};

use crate::rng::Random;
use crate::test_peer::{HANG, READ_WRITE, TestPeer, started};

const LARGE: usize = 128 << 10;
const PAGE: usize = 4096;
const POISON: u8 = 0xEE;
/// What the other side's memory and messages consist of.
const DATA: u8 = 0x11;
/// Buffers that are watched at a time.
const WATCHED: usize = 40;

pub(crate) fn cancelled_operations_write_nothing_after_their_buffers_are_back(side: &mut TestPeer) {
    side.agree_on_seed();
    for progress in [Progress::Thread, Progress::Caller] {
        run_rounds(side, progress, if side.is_slow() { 20 } else { 500 });
    }
}

fn run_rounds(side: &mut TestPeer, progress: Progress, rounds: usize) {
    let config =
        EndpointConfig { qps: 2, slots: 4, messages: 8, min_part: 32 << 10, progress, ..side.config() };
    let endpoint = side.open(&config);
    let source = endpoint.allocate(LARGE).unwrap();
    source.write(0, &vec![DATA; LARGE]).unwrap();
    let mut random = Random(side.seed ^ progress as u64);
    let mut idle: Vec<Buffer> = Vec::new();
    let mut watched: VecDeque<Buffer> = VecDeque::new();
    let mut tally = Tally::default();
    for round in 0..rounds {
        if round > 0 {
            endpoint.reopen().expect("the endpoint opens again");
        }
        side.connect(&endpoint);
        let remote = side.exchange_regions(&endpoint, &source);
        // Both draw the same numbers.
        let (receives, how, delay) = (random.index(6), random.index(4), random.below(300));
        if side.index == 0 {
            let remote = endpoint.import(&remote, READ_WRITE).unwrap();
            let transfers = Transfers::start(&endpoint, &remote, receives, &mut random, &mut idle);
            spin(Duration::from_micros(delay));
            transfers.end(&endpoint, how, &mut watched, &mut tally);
            if watched.len() > WATCHED {
                check(&watched, round);
                // The older half is used again.
                idle.extend(watched.drain(..WATCHED / 2));
            }
        } else {
            // The numbers that the other side draws for its transfers.
            Transfers::draw(&mut random);
            let sends: Vec<_> = (0..receives)
                .map(|_| {
                    let message = idle.pop().unwrap_or_else(|| {
                        let message = endpoint.allocate(LARGE).unwrap();
                        message.write(0, &vec![DATA; LARGE]).unwrap();
                        message
                    });
                    endpoint.send(message, ..)
                })
                .collect();
            for send in sends.into_iter().flatten() {
                // It succeeds, or ends because the other side has closed the connection.
                match send.wait_for(HANG) {
                    Ok(Ok(sent)) => idle.push(sent.buffer),
                    Ok(Err(_)) => {}
                    Err(_) => panic!("a send has not ended"),
                }
            }
        }
        side.meet();
    }
    if side.index == 0 {
        println!("{rounds} rounds, {progress:?}: {tally:?}");
        check(&watched, rounds);
        assert!(tally.cancelled > 0 && tally.completed > 0, "{tally:?}");
        assert_eq!(tally.buffers, tally.started, "every buffer has come back");
        // All buffers are back; the device may still have to complete an announcement whose message came first.
        let begin = Instant::now();
        loop {
            let counters = endpoint.counters();
            if (counters.leased_slots, counters.held_operations) == (0, 0) {
                break;
            }
            assert!(begin.elapsed() < HANG, "{counters:?}");
            endpoint.progress();
            std::thread::yield_now();
        }
    }
}

#[derive(Debug, Default)]
struct Tally {
    started: usize,
    completed: usize,
    cancelled: usize,
    closed: usize,
    buffers: usize,
}

impl Tally {
    fn count<B>(&mut self, result: &Result<B, Cause>) {
        match result {
            Ok(_) => self.completed += 1,
            Err(Cause::Cancelled) => self.cancelled += 1,
            Err(Cause::Closed | Cause::PeerClosed | Cause::Flushed | Cause::RemoteGone(_)) => {
                self.closed += 1
            }
            Err(cause) => panic!("{cause}"),
        }
    }
}

struct Transfers {
    buffers: Vec<OperationFuture<Buffer>>,
    batches: Vec<OperationFuture<Batch>>,
}

impl Transfers {
    /// What `start` draws.
    fn draw(random: &mut Random) -> (usize, usize) {
        (1 + random.index(4), random.index(3))
    }

    fn start(
        endpoint: &Endpoint,
        remote: &crosstie::device::RemoteMemory,
        receives: usize,
        random: &mut Random,
        idle: &mut Vec<Buffer>,
    ) -> Transfers {
        let (reads, batches) = Transfers::draw(random);
        let mut allocate = || idle.pop().unwrap_or_else(|| endpoint.allocate(LARGE).unwrap());
        let mut buffers: Vec<_> = (0..receives).map(|_| started(endpoint.recv(allocate(), ..))).collect();
        buffers.extend((0..reads).map(|_| started(endpoint.read(allocate(), .., remote, 0))));
        let batches = (0..batches).map(|_| {
            let mut batch = Batch::new();
            let (local, remote) = (batch.local(allocate()), batch.remote(*remote));
            for page in 0..LARGE / PAGE {
                let to = LARGE - (page + 1) * PAGE;
                batch.block(local, to, remote, (page * PAGE) as u64, PAGE).unwrap();
            }
            started(endpoint.read_batch(batch))
        });
        Transfers { batches: batches.collect(), buffers }
    }

    /// Ends everything, waits until all buffers are back, and poisons them.
    fn end(self, endpoint: &Endpoint, how: usize, watched: &mut VecDeque<Buffer>, tally: &mut Tally) {
        let Transfers { buffers, batches } = self;
        tally.started += buffers.len() + batches.len();
        match how {
            0 => drop(endpoint.cancel_all()),
            1 => endpoint.close(),
            // One by one, while the others go on.
            2 => buffers.iter().for_each(|future| future.cancel()),
            // Some of them stay until the connection ends.
            _ => buffers.iter().step_by(2).for_each(|future| future.cancel()),
        }
        let mut back = Vec::new();
        let mut returns = Vec::new();
        for future in batches {
            match ended(future, how == 3) {
                Ok(completed) => back.push((Ok(()), completed.buffer.into_buffers())),
                Err(failed) => returns.push((failed.cause, None, Some(failed.buffer))),
            }
        }
        for future in buffers {
            match ended(future, how == 3) {
                Ok(completed) => back.push((Ok(()), vec![completed.buffer])),
                Err(failed) => returns.push((failed.cause, Some(failed.buffer), None)),
            }
        }
        // Buffers of completed operations are ours at once, those of others after the device is done with them: receives that the
        // peer was told of come back when the connection has ended.
        endpoint.close();
        for (cause, buffer, batch) in returns {
            let buffers = match (buffer, batch) {
                (Some(buffer), _) => {
                    vec![buffer.wait_for(HANG).unwrap_or_else(|_| panic!("{cause}: a buffer is not back"))]
                }
                (_, Some(batch)) => batch
                    .wait_for(HANG)
                    .unwrap_or_else(|_| panic!("{cause}: a batch is not back"))
                    .into_buffers(),
                _ => Vec::new(),
            };
            back.push((Err(cause), buffers));
        }
        for (result, buffers) in back {
            tally.count(&result);
            for buffer in buffers {
                if result.is_ok() {
                    assert!(
                        buffer.to_vec().iter().all(|byte| *byte == DATA),
                        "a completed transfer has wrong bytes"
                    );
                }
                buffer.write(0, &vec![POISON; LARGE]).unwrap();
                tally.buffers += 1;
                watched.push_back(buffer);
            }
        }
    }
}

/// The result of an operation that ends soon; with `by_close`, one that may need the end of the connection.
fn ended<B: crosstie::endpoint::Lend>(future: OperationFuture<B>, by_close: bool) -> OperationResult<B> {
    let limit = if by_close { Duration::from_millis(2) } else { HANG };
    match future.wait_for(limit) {
        Ok(result) => result,
        Err(future) if by_close => {
            future.cancel();
            future.wait_for(HANG).unwrap_or_else(|_| panic!("a cancelled operation has not ended"))
        }
        Err(_) => panic!("an operation has not ended"),
    }
}

fn check(watched: &VecDeque<Buffer>, round: usize) {
    let mut bytes = vec![0; LARGE];
    for (at, buffer) in watched.iter().enumerate() {
        buffer.read(0, &mut bytes).unwrap();
        assert!(
            bytes.iter().all(|byte| *byte == POISON),
            "round {round}: buffer {at} was written after it was back"
        );
    }
}

fn spin(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}
