//! Each operation moves the right bytes, ends once, and gives its buffer back.

use std::time::Duration;

use crosstie::endpoint::{Batch, Cause, EndpointConfig, NotStarted, PathPolicy, Progress};
use crosstie_testkit::rng::{Random, seed};

use super::pair::{HANG, Pair, config, configs, filled, pattern};

const SIZES: [usize; 7] = [1, 64, 4095, 4096, 10_000, 65_536, 1 << 20];

#[test]
fn read_and_write_move_exactly_their_range() {
    for config in configs() {
        let pair = Pair::new(&config);
        for (round, len) in SIZES.into_iter().enumerate() {
            let remote = filled(&pair.there, len + 64, 1);
            let buffer = filled(&pair.here, len + 8, round as u8);
            let done = pair.here.write(buffer, 8.., &remote.remote(), 32).unwrap().wait().unwrap();
            assert_eq!((done.bytes, done.buffer.len(), done.imm), (len as u64, len + 8, None));
            let mut expected = pattern(len + 64, 1);
            expected[32..32 + len].copy_from_slice(&pattern(len + 8, round as u8)[8..]);
            assert!(remote.to_vec() == expected, "{len} bytes, {} queue pairs", config.qps);

            let back = pair.here.allocate(len + 64).unwrap();
            let done = pair.here.read(back, .., &remote.remote(), 0).unwrap().wait().unwrap();
            assert!(done.buffer.to_vec() == expected, "{len} bytes, {} queue pairs", config.qps);
        }
        pair.assert_empty();
    }
}

#[test]
fn messages_arrive_in_order_whichever_side_comes_first() {
    for config in configs() {
        let pair = Pair::new(&config);
        for send_first in [true, false] {
            let mut sends = Vec::new();
            let mut recvs = Vec::new();
            let mut post_sends = || {
                for (number, len) in SIZES.into_iter().enumerate() {
                    let buffer = filled(&pair.here, len, number as u8);
                    sends.push(pair.here.send(buffer, ..).unwrap());
                }
            };
            if send_first {
                post_sends();
            }
            for len in SIZES {
                recvs.push(pair.there.recv(pair.there.allocate(len + 100).unwrap(), 50..).unwrap());
            }
            if !send_first {
                post_sends();
            }
            for (number, (recv, len)) in recvs.into_iter().zip(SIZES).enumerate() {
                pair.run_until(|| recv.is_ended());
                let done = recv.wait().unwrap();
                assert_eq!(done.bytes, len as u64);
                assert!(done.buffer.to_vec()[50..50 + len] == pattern(len, number as u8));
                assert!(done.buffer.to_vec()[..50].iter().all(|byte| *byte == 0));
            }
            for (send, len) in sends.into_iter().zip(SIZES) {
                assert_eq!(send.wait().unwrap().bytes, len as u64);
            }
        }
        pair.assert_empty();
    }
}

/// More messages than slots, in both directions at once: the rest waits, nothing is lost, and no receive queue runs empty (I5).
#[test]
fn more_messages_than_slots_wait_their_turn() {
    for mut config in configs() {
        (config.messages, config.slots) = (3, 2);
        let pair = Pair::new(&config);
        let both = [(&pair.here, &pair.there), (&pair.there, &pair.here)];
        let mut all = Vec::new();
        for number in 0..100u8 {
            for (from, to) in both {
                let send = from.send(filled(from, 256, number), ..).unwrap();
                let recv = to.recv(to.allocate(256).unwrap(), ..).unwrap();
                all.push((number, send, recv));
            }
        }
        pair.run_until(|| all.iter().all(|(_, send, recv)| send.is_ended() && recv.is_ended()));
        for (number, send, recv) in all {
            send.wait().unwrap();
            assert_eq!(recv.wait().unwrap().buffer.to_vec(), pattern(256, number));
        }
        pair.assert_empty();
        for endpoint in [&pair.here, &pair.there] {
            assert_eq!(endpoint.counters().empty_receive_queues, 0);
        }
    }
}

#[test]
fn immediates_arrive_before_or_after_the_call() {
    for config in configs() {
        let pair = Pair::new(&config);
        let target = pair.there.allocate(4096).unwrap();
        for call_first in [true, false] {
            let early = call_first.then(|| pair.there.imm_recv().unwrap());
            let buffer = filled(&pair.here, 100, 3);
            let write = pair.here.write_imm(buffer, ..60, &target.remote(), 8, u32::MAX - 5).unwrap();
            let event = early.unwrap_or_else(|| pair.there.imm_recv().unwrap()).wait().unwrap();
            assert_eq!((event.imm, event.bytes), (Some(u32::MAX - 5), 60));
            assert_eq!(target.to_vec()[8..68], pattern(100, 3)[..60]);
            assert_eq!(write.wait().unwrap().buffer.len(), 100);
        }
        pair.assert_empty();
    }
}

/// A program that takes no immediates holds up the peer's `write_imm`s, and with one queue pair also the `write`s behind them; when it takes
/// the immediates, all arrive in order.
#[test]
fn immediates_wait_for_credit_and_keep_their_order() {
    for mut config in configs() {
        config.imm_window = 4;
        let pair = Pair::new(&config);
        let target = pair.there.allocate(64).unwrap();
        let writes: Vec<_> = (0..50)
            .map(|imm| pair.here.write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, imm).unwrap())
            .collect();
        pair.run_until(|| writes[..4].iter().all(|write| write.is_ended()));
        let write = pair.here.write(filled(&pair.here, 8, 0), .., &target.remote(), 0).unwrap();
        if pair.here.path().unwrap().queue_pairs > 1 {
            pair.run_until(|| write.is_ended());
        }
        assert_eq!(writes.iter().filter(|write| write.is_ended()).count(), 4);
        let mut imms: Vec<u32> = Vec::new();
        for _ in 0..50 {
            let are_ended = || writes.iter().all(|write| write.is_ended());
            assert!(config.qps > 1 || !write.is_ended() || are_ended(), "it has overtaken a write_imm");
            let recv = pair.there.imm_recv().unwrap();
            pair.run_until(|| recv.is_ended());
            imms.push(recv.wait().unwrap().imm.unwrap());
        }
        // With one queue pair the order of operations is the order of immediates.
        if config.qps > 1 {
            imms.sort();
        }
        assert!(imms.into_iter().eq(0..50));
        pair.run_until(|| write.is_ended());
        assert!(write.wait().is_ok());
        pair.run_until(|| writes.iter().all(|write| write.is_ended()));
        assert!(writes.into_iter().all(|write| write.wait().is_ok()));
        assert_eq!(pair.there.counters().empty_receive_queues, 0);
        pair.assert_empty();
    }
}

/// With one queue pair, transfers of all kinds take effect in the order of the calls: the byte that was written last is there in the end. Some
/// wait for credit, for a slot, or for room in the send queue.
#[test]
fn transfers_of_one_queue_pair_keep_their_order() {
    let mut random = Random(seed());
    for progress in [Progress::Caller, Progress::Thread] {
        let config = EndpointConfig { imm_window: 2, slots: 3, ..config(1, progress) };
        let pair = Pair::new(&config);
        let target = pair.there.allocate(64).unwrap();
        for round in 0..50 {
            let (mut futures, mut batches, mut imms) = (Vec::new(), Vec::new(), 0);
            let mut last = [0; 4];
            for number in 1..=10u8 {
                let (place, buffer) = (random.index(4), pair.here.allocate(1).unwrap());
                buffer.write(0, &[number]).unwrap();
                last[place] = number;
                match random.below(3) {
                    0 => futures.push(pair.here.write(buffer, .., &target.remote(), place as u64).unwrap()),
                    1 => {
                        imms += 1;
                        let at = place as u64;
                        futures.push(pair.here.write_imm(buffer, .., &target.remote(), at, 0).unwrap());
                    }
                    _ => {
                        let mut batch = Batch::new();
                        let (local, remote) = (batch.local(buffer), batch.remote(target.remote()));
                        batch.block(local, 0, remote, place as u64, 1).unwrap();
                        if random.below(2) == 0 {
                            imms += 1;
                            batch.announce(0).unwrap();
                        }
                        batches.push(pair.here.write_batch(batch).unwrap());
                    }
                }
            }
            let recvs: Vec<_> = (0..imms).map(|_| pair.there.imm_recv().unwrap()).collect();
            pair.run_until(|| {
                recvs.iter().all(|recv| recv.is_ended())
                    && futures.iter().all(|future| future.is_ended())
                    && batches.iter().all(|future| future.is_ended())
            });
            // An immediate whose future is dropped would go to the next call.
            assert!(recvs.into_iter().all(|recv| recv.wait().is_ok()));
            let found = target.to_vec();
            for (place, number) in last.into_iter().enumerate().filter(|(_, number)| *number > 0) {
                assert_eq!(found[place], number, "round {round}, place {place}");
            }
        }
        pair.assert_empty();
    }
}

/// The deadline of the configuration is not one of calls that wait for the peer's program.
#[test]
fn recv_and_imm_recv_have_no_deadline_unless_asked() {
    for config in configs() {
        let pair = Pair::new(&EndpointConfig { deadline: Some(Duration::from_millis(10)), ..config });
        let recv = pair.here.recv(pair.here.allocate(8).unwrap(), ..).unwrap();
        let imm_recv = pair.here.imm_recv().unwrap();
        let asked = pair.here.within(Duration::from_millis(10)).imm_recv().unwrap();
        let send = pair.here.send(filled(&pair.here, 8, 0), ..).unwrap();
        pair.run_until(|| send.is_ended() && asked.is_ended());
        assert_eq!(send.wait().unwrap_err().cause, Cause::TimedOut);
        assert_eq!(asked.wait().unwrap_err().cause, Cause::TimedOut);
        assert!(!recv.is_ended() && !imm_recv.is_ended());
    }
}

#[test]
fn invalid_arguments_are_refused_and_the_buffer_is_returned() {
    let pair = Pair::new(&config(1, Progress::Caller));
    let remote = pair.there.allocate(100).unwrap();
    let buffer = pair.here.allocate(100).unwrap();
    let refused = pair.here.write(buffer, 50..101, &remote.remote(), 0).unwrap_err();
    assert!(matches!(refused.cause, NotStarted::Local(_)));
    let refused = pair.here.read(refused.buffer, .., &remote.remote(), 1).unwrap_err();
    assert!(matches!(refused.cause, NotStarted::Remote { offset: 1, len: 100, region: 100 }));
    #[expect(clippy::reversed_empty_ranges)]
    let refused = pair.here.send(refused.buffer, 60..50).unwrap_err();
    assert!(matches!(refused.cause, NotStarted::Local(_)));
    assert_eq!(refused.buffer.len(), 100);
}

#[test]
fn too_many_operations_are_back_pressure_with_the_buffer() {
    let config = EndpointConfig { operations: 4, ..config(1, Progress::Caller) };
    let pair = Pair::new(&config);
    let waiting: Vec<_> = (0..4).map(|_| pair.here.imm_recv().unwrap()).collect();
    let refused = pair.here.send(pair.here.allocate(10).unwrap(), ..).unwrap_err();
    assert_eq!((refused.cause, refused.buffer.len()), (NotStarted::TooManyOperations(4), 10));
    assert!(refused.cause.is_back_pressure());
    drop(waiting);
    assert!(pair.here.send(refused.buffer, ..).is_ok());
}

#[test]
fn message_longer_than_the_buffer_fails_and_the_buffer_stays_for_the_next() {
    for config in configs() {
        let pair = Pair::new(&config);
        let recv = pair.there.recv(pair.there.allocate(100).unwrap(), ..).unwrap();
        let long = pair.here.send(filled(&pair.here, 101, 0), ..).unwrap();
        pair.run_until(|| long.is_ended());
        let mut failed = long.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::TooLong);
        assert_eq!(failed.buffer.try_take().unwrap().len(), 101);
        let short = pair.here.send(filled(&pair.here, 100, 7), ..).unwrap();
        pair.run_until(|| recv.is_ended() && short.is_ended());
        assert_eq!(recv.wait().unwrap().buffer.to_vec(), pattern(100, 7));
        short.wait().unwrap();
    }
}

#[test]
fn remote_access_ends_its_operation_with_the_status_and_the_others_as_flushed() {
    for config in configs() {
        let pair = Pair::new(&config);
        let target = pair.there.allocate(4096).unwrap();
        let mut forged = target.remote();
        forged.rkey ^= 0x55;
        let recv = pair.here.recv(pair.here.allocate(10).unwrap(), ..).unwrap();
        let imm = pair.here.imm_recv().unwrap();
        let bad = pair.here.write(filled(&pair.here, 64, 0), .., &forged, 0).unwrap();
        pair.run_until(|| bad.is_ended() && recv.is_ended() && imm.is_ended());
        let failed = bad.wait().unwrap_err();
        assert!(matches!(failed.cause, Cause::RemoteAccess(_)), "{failed}");
        assert!(!failed.cause.is_retryable() && failed.peer.is_some() && failed.cause.status().is_some());
        assert_eq!(failed.buffer.wait_for(HANG).unwrap().to_vec(), pattern(64, 0));
        for cause in [recv.wait().unwrap_err().cause, imm.wait().unwrap_err().cause] {
            assert_eq!(cause, Cause::Flushed);
        }
        assert!(matches!(pair.here.imm_recv().unwrap_err().cause, NotStarted::Ended(Cause::RemoteAccess(_))));
        pair.run_until(|| pair.there.ended().is_some());
        pair.assert_empty();
        // A new connection works.
        pair.here.reopen().unwrap();
        pair.there.reopen().unwrap();
        pair.connect();
        let write = pair.here.write(filled(&pair.here, 64, 5), .., &target.remote(), 0).unwrap();
        write.wait().unwrap();
        assert_eq!(target.to_vec()[..64], pattern(64, 5));
    }
}

#[test]
fn deadline_ends_operations_that_wait_for_the_peer() {
    for config in configs() {
        let pair = Pair::new(&EndpointConfig { imm_window: 1, ..config });
        let target = pair.there.allocate(64).unwrap();
        let soon = pair.here.within(Duration::from_millis(60));
        pair.here.write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, 0).unwrap().wait().unwrap();
        let send = soon.send(filled(&pair.here, 10, 0), ..).unwrap();
        let imm_recv = soon.imm_recv().unwrap();
        let imm = soon.write_imm(filled(&pair.here, 30, 0), .., &target.remote(), 0, 1).unwrap();
        let failed = imm_recv.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::TimedOut);
        // Nothing of these is at the device: the buffer is there at once.
        for (future, len) in [(send, 10), (imm, 30)] {
            let failed = future.wait().unwrap_err();
            assert_eq!(failed.cause, Cause::TimedOut);
            assert_eq!(failed.buffer.wait_for(HANG).unwrap().len(), len);
        }
        pair.assert_empty();
        // The peer knows of this one, and may write to it. On a busy machine the deadline can pass before that: then it is tried again.
        let mut timeout = Duration::from_millis(60);
        let recv = loop {
            let recv = pair.here.within(timeout).recv(pair.here.allocate(20).unwrap(), ..).unwrap();
            if pair.is_announced(&recv) {
                break recv;
            }
            timeout *= 2;
        };
        let mut failed = recv.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::TimedOut);
        pair.run_until(|| failed.buffer.try_take().is_some());
        pair.assert_empty();
    }
}

#[test]
fn path_is_reported_and_another_one_is_refused() {
    let pair = Pair::new(&config(2, Progress::Caller));
    let path = pair.here.path().unwrap();
    assert_eq!((path.provider, path.queue_pairs), ("software", 2));
    assert_eq!(path.local, pair.here.device().address());
    assert_eq!(path.peer, pair.there.device().address());
    let strict = EndpointConfig { path: PathPolicy::Verbs, ..config(1, Progress::Caller) };
    let strict = super::pair::endpoint(pair.here.device(), &strict);
    let error = strict.connect(&pair.there.address()).unwrap_err();
    assert!(error.to_string().contains("software"), "{error}");
    assert!(strict.path().is_none());
}

/// A receiver whose completion queue is never empty, because it is behind, has posted its receives again all the same.
#[test]
fn receiver_that_is_behind_does_not_find_its_receive_queue_empty() {
    let config = EndpointConfig { imm_window: 100, ..config(1, Progress::Caller) };
    let pair = Pair::new(&config);
    let target = pair.there.allocate(64).unwrap();
    let write = |imm| pair.here.write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, imm).unwrap();
    let (mut next, mut waiting) = (1, write(0));
    for received in 0..20 {
        // As many as there is credit for, and one more.
        pair.here.progress();
        while waiting.is_ended() {
            waiting = write(next);
            next += 1;
        }
        for number in 0..50 {
            assert_eq!(pair.there.imm_recv().unwrap().wait().unwrap().imm, Some(50 * received + number));
        }
    }
    assert_eq!(pair.there.counters().empty_receive_queues, 0);
}
