//! A `recv` that ends before its message came swallows no message, and gets its buffer back.

use std::collections::VecDeque;
use std::time::Duration;

use crosstie::endpoint::{Buffer, BufferReturn, Cause, Completed, EndpointConfig, OperationFuture, Progress};
use crosstie_testkit::rng::{Random, seed};

use super::pair::{HANG, Pair, config, configs, filled, pattern};

/// How a `recv` ends before its message came.
fn end_early(how: usize, recv: OperationFuture<Buffer>) -> Option<BufferReturn<Buffer>> {
    match how {
        0 => recv.cancel(),
        1 => return None,
        // It was started with a deadline.
        _ => {}
    }
    let failed = recv.wait().unwrap_err();
    assert_eq!(failed.cause, if how == 0 { Cause::Cancelled } else { Cause::TimedOut });
    Some(failed.buffer)
}

/// The peer sends into the buffer of a `recv` that has ended, because it does not know that yet: the next `recv` gets the message, also if its
/// own buffer was announced before.
#[test]
fn message_for_a_recv_that_has_ended_goes_to_the_next_one() {
    for config in configs() {
        for (how, announced_before) in (0..3).flat_map(|how| [(how, false), (how, true)]) {
            let pair = Pair::new(&config);
            let timeout = if how == 2 { Duration::from_millis(20) } else { HANG };
            let recv = |timeout| pair.here.within(timeout).recv(pair.here.allocate(64).unwrap(), ..).unwrap();
            let first = recv(timeout);
            let early = announced_before.then(|| recv(HANG));
            // The peer hears of the buffers.
            (0..10).for_each(|_| _ = pair.there.progress());
            let buffer = end_early(how, first);
            let second = early.unwrap_or_else(|| recv(HANG));
            let sends = [1, 2].map(|seed| pair.there.send(filled(&pair.there, 64, seed), ..).unwrap());
            for (recv, seed) in [(second, 1), (recv(HANG), 2)] {
                pair.run_until(|| recv.is_ended());
                assert_eq!(
                    recv.wait().unwrap().buffer.to_vec(),
                    pattern(64, seed),
                    "{how} {announced_before}"
                );
            }
            for send in sends {
                pair.run_until(|| send.is_ended());
                assert_eq!(send.wait().unwrap().bytes, 64);
            }
            if let Some(mut buffer) = buffer {
                pair.run_until(|| buffer.try_take().is_some());
            }
            pair.assert_empty();
        }
    }
}

/// Nothing is sent: the peer withdraws the buffer, which comes back, and the next message goes into the next buffer.
#[test]
fn buffer_of_a_recv_that_has_ended_comes_back_without_a_message() {
    for config in configs() {
        let pair = Pair::new(&config);
        for round in 0..20 {
            let recvs: Vec<_> =
                (0..20).map(|_| pair.here.recv(pair.here.allocate(64).unwrap(), ..).unwrap()).collect();
            assert_eq!(pair.here.cancel_all(), 20);
            for recv in recvs {
                let mut buffer = recv.wait().unwrap_err().buffer;
                pair.run_until(|| buffer.try_take().is_some());
            }
            pair.assert_empty();
            let recv = pair.here.recv(pair.here.allocate(64).unwrap(), ..).unwrap();
            let send = pair.there.send(filled(&pair.there, 64, round), ..).unwrap();
            pair.run_until(|| recv.is_ended() && send.is_ended());
            assert_eq!(recv.wait().unwrap().buffer.to_vec(), pattern(64, round));
            send.wait().unwrap();
        }
    }
}

/// A message waits for a `recv` with a buffer that is long enough. Shorter ones hear of it.
#[test]
fn message_that_waits_stays_until_a_buffer_is_long_enough() {
    let pair = Pair::new(&config(1, Progress::Caller));
    let first = pair.here.recv(pair.here.allocate(64).unwrap(), ..).unwrap();
    pair.there.progress();
    first.cancel();
    pair.there.send(filled(&pair.there, 40, 5), ..).unwrap().wait().unwrap();
    let short = pair.here.recv(pair.here.allocate(39).unwrap(), ..).unwrap();
    pair.run_until(|| short.is_ended());
    let failed = short.wait().unwrap_err();
    assert_eq!((failed.cause, failed.buffer.wait_for(HANG).unwrap().len()), (Cause::TooLong, 39));
    let done = pair.here.recv(pair.here.allocate(50).unwrap(), 10..).unwrap().wait().unwrap();
    assert_eq!((done.bytes, &done.buffer.to_vec()[10..]), (40, &pattern(40, 5)[..]));
    pair.assert_empty();
}

/// A future that has its message and is dropped with it: the next `recv` gets the message, before later ones.
#[test]
fn recv_that_is_dropped_with_its_message_loses_none() {
    for config in configs() {
        let pair = Pair::new(&config);
        let recv = || pair.here.recv(pair.here.allocate(64).unwrap(), ..).unwrap();
        let recvs = [recv(), recv()];
        for seed in 0..3 {
            pair.there.send(filled(&pair.there, 64, seed), ..).unwrap().detach();
        }
        pair.run_until(|| recvs.iter().all(|recv| recv.is_ended()));
        drop(recvs);
        // The first of these has its message at once, and is dropped with it, too.
        let again = recv();
        pair.run_until(|| again.is_ended());
        drop(again);
        for seed in 0..3 {
            let recv = recv();
            pair.run_until(|| recv.is_ended());
            assert_eq!(recv.wait().unwrap().buffer.to_vec(), pattern(64, seed));
        }
        pair.assert_empty();
    }
}

const BYTES: usize = 20_000;

fn message(pair: &Pair, number: u16, len: usize) -> Buffer {
    let buffer = pair.there.allocate(len).unwrap();
    buffer.write(0, &number.to_le_bytes()).unwrap();
    buffer.write(2, &pattern(len - 2, number as u8)).unwrap();
    buffer
}

/// The number of a message, whose bytes are checked.
fn number(done: Completed<Buffer>) -> u16 {
    let bytes = &done.buffer.to_vec()[..done.bytes as usize];
    let number = u16::from_le_bytes([bytes[0], bytes[1]]);
    assert!(bytes[2..] == pattern(bytes.len() - 2, number as u8), "message {number}");
    number
}

/// Random `recv`s, ends and messages: each message arrives once, whole, and with one thread and one queue pair in order.
#[test]
fn kth_message_goes_to_the_kth_recv_that_does_not_end() {
    let seed = seed();
    for (round, config) in configs().enumerate() {
        let mut random = Random(seed ^ round as u64);
        let in_order = config.qps == 1 && config.progress == Progress::Caller;
        let pair = Pair::new(&EndpointConfig { messages: 6, ..config });
        let recv = || pair.here.recv(pair.here.allocate(BYTES).unwrap(), ..).unwrap();
        let mut recvs: VecDeque<OperationFuture<Buffer>> = VecDeque::new();
        let mut returns: Vec<BufferReturn<Buffer>> = Vec::new();
        let mut sends: Vec<OperationFuture<Buffer>> = Vec::new();
        let (mut sent, mut received) = (0, Vec::new());
        for _ in 0..2000 {
            match random.below(9) {
                0 | 1 if recvs.len() < 12 => recvs.push_back(recv()),
                2 if sends.len() < 12 => {
                    let len = if random.below(4) == 0 { BYTES } else { 2 + random.index(60) };
                    sends.push(pair.there.send(message(&pair, sent, len), ..).unwrap());
                    sent += 1;
                }
                3 if !recvs.is_empty() => {
                    let at = random.index(recvs.len());
                    if !recvs[at].is_ended() {
                        recvs[at].cancel();
                        match recvs.remove(at).unwrap().wait() {
                            Ok(done) => received.push(number(done)),
                            Err(failed) => returns.push(failed.buffer),
                        }
                    }
                }
                // The newest one with a message: the next `recv` is the one behind all messages.
                4 => {
                    let ended = recvs.iter().rposition(|recv| recv.is_ended());
                    drop(recvs.remove(ended.unwrap_or(recvs.len() / 2)));
                }
                5 if recvs.front().is_some_and(|recv| recv.is_ended()) => {
                    received.push(number(recvs.pop_front().unwrap().wait().unwrap()));
                }
                6 => _ = pair.here.progress(),
                7 => _ = pair.there.progress(),
                _ => returns.retain_mut(|buffer| buffer.try_take().is_none()),
            }
            sends.retain(|send| !send.is_ended());
        }
        pair.run_until(|| {
            while recvs.front().is_some_and(|recv| recv.is_ended()) {
                received.push(number(recvs.pop_front().unwrap().wait().unwrap()));
            }
            if recvs.is_empty() {
                recvs.push_back(recv());
            }
            received.len() == usize::from(sent)
        });
        if !in_order {
            received.sort();
        }
        assert!(received.into_iter().eq(0..sent));
        drop(recvs);
        pair.run_until(|| {
            returns.retain_mut(|buffer| buffer.try_take().is_none());
            returns.is_empty()
        });
        pair.assert_empty();
    }
}
