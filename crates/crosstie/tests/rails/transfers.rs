//! Transfers without failures.

use std::time::Duration;

use crosstie::rails::*;

use super::pair::*;

const NEVER: Duration = Duration::from_secs(3600);
/// Devices that execute requests while they are posted, and devices that queue them, as NICs do.
const DEVICES: [fn(usize, Config) -> Pair; 2] = [Pair::plain, Pair::faulty];

const SIZES: [usize; 14] =
    [0, 1, 7, 127, 128, 129, 4096, 4097, 8193, 65_535, 65_536, 1 << 20, (1 << 20) + 77, 3 << 20];

#[test]
fn every_size_arrives_with_every_number_of_rails() {
    for connect in DEVICES {
        for rails in 1..=4 {
            let mut pair = connect(rails, Config { min_part: 4096, ..Config::default() });
            let (from, to) = (pair.here.allocate(4 << 20).unwrap(), pair.there.allocate(4 << 20).unwrap());
            for (round, len) in SIZES.iter().cycle().take(SIZES.len() * 2).enumerate() {
                pair.transfer(&from, &to, *len, round as u64);
            }
            let (sent, received) = (pair.sender.counters(), pair.receiver.counters());
            assert_eq!(sent.messages, 2 * SIZES.len() as u64);
            assert_eq!(received.messages, sent.messages);
            assert_eq!(sent.masks, received.masks);
        }
    }
}

#[test]
fn more_messages_than_slots_arrive_in_order() {
    for connect in DEVICES {
        let mut pair = connect(2, Config { slots: 4, ..Config::default() });
        let (from, to) = (pair.here.allocate(1 << 16).unwrap(), pair.there.allocate(1 << 16).unwrap());
        for round in 0..1000 {
            pair.transfer(&from, &to, (round * 37) % 20_000, round as u64);
        }
    }
}

#[test]
fn a_single_message_over_two_rails_takes_two_work_requests_and_two_receives() {
    let mut pair = Pair::plain(2, Config { split: Split::Fixed([1, 1, 0, 0]), ..Config::default() });
    let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
    for n in 1..=10u64 {
        pair.transfer(&from, &to, 1 << 20, n);
        let (sent, received) = (pair.sender.counters(), pair.receiver.counters());
        for rail in 0..2 {
            assert_eq!(sent.rails[rail].work_requests, n, "rail {rail}");
            assert_eq!(sent.rails[rail].payload_requests, n);
            assert_eq!(sent.rails[rail].completions, n);
            assert_eq!(sent.rails[rail].bytes, n << 19);
            assert_eq!(received.rails[rail].receives, n);
            assert_eq!(received.rails[rail].bytes, n << 19);
        }
        assert_eq!((sent.masks[3], received.masks[3]), (n, n));
    }
}

#[test]
fn a_rail_without_bytes_carries_nothing_at_all() {
    for idle in 0..2 {
        let mut weights = [1, 1, 0, 0];
        weights[idle] = 0;
        let mut pair = Pair::plain(2, Config { split: Split::Fixed(weights), ..Config::default() });
        let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
        for (n, len) in SIZES.iter().filter(|len| **len <= 1 << 20).enumerate() {
            pair.transfer(&from, &to, *len, n as u64);
        }
        for counters in [pair.sender.counters(), pair.receiver.counters()] {
            let rail = &counters.rails[idle];
            assert_eq!((rail.work_requests, rail.completions, rail.receives, rail.bytes), (0, 0, 0, 0));
            assert_eq!(counters.masks[1 << (1 - idle)], counters.messages);
        }
    }
}

#[test]
fn a_changed_split_takes_effect_with_the_next_message() {
    let mut pair = Pair::plain(2, Config::default());
    let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
    let mut before = [0, 0];
    for (weights, bytes) in
        [([3, 1, 0, 0], [3 << 18, 1 << 18]), ([0, 1, 0, 0], [0, 1 << 20]), ([1, 7, 0, 0], [1 << 17, 7 << 17])]
    {
        pair.sender.set_split(Split::Fixed(weights));
        pair.transfer(&from, &to, 1 << 20, 5);
        let now = [0, 1].map(|rail| pair.sender.counters().rails[rail].bytes);
        assert_eq!([now[0] - before[0], now[1] - before[1]], bytes);
        before = now;
    }
}

#[test]
fn groups_match_by_tag_and_report_every_size() {
    for connect in DEVICES {
        for rails in [1, 2, 3] {
            let mut pair = connect(rails, Config { min_part: 1024, ..Config::default() });
            let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
            for count in 1..=8usize {
                for base in [0usize, 100, 5000, 100_000] {
                    let room = 120_000;
                    let bytes = pattern(1 << 20, (count * base) as u64);
                    from.write(0, &bytes).unwrap();
                    let buffers: Vec<_> = (0..count)
                        .map(|i| RecvBuffer {
                            memory: &to,
                            range: i * room..(i + 1) * room,
                            tag: 100 + i as u32,
                        })
                        .collect();
                    let receive = pair.receiver.irecv(&buffers).unwrap().unwrap();
                    // In reverse order; one tag that is not in the group is not accepted.
                    let mut sends = Vec::new();
                    for i in (0..count).rev() {
                        let len = base / (i + 1);
                        assert_eq!(pair.sender.isend(&from, 0..1, 99).unwrap(), None);
                        sends.push((pair.send(&from, i * room..i * room + len, 100 + i as u32), len));
                    }
                    let sizes: Vec<_> = (0..count).map(|i| base / (i + 1)).collect();
                    assert_eq!(pair.finish_receive(receive), sizes);
                    for (i, len) in sizes.iter().enumerate() {
                        check(&to, i * room, &bytes[i * room..i * room + len]);
                    }
                    for (send, len) in sends {
                        assert_eq!(pair.finish_send(send), len);
                        assert_eq!(pair.sender.test(send), Err(RequestError::NoSuchRequest));
                    }
                }
            }
        }
    }
}

#[test]
fn a_message_longer_than_the_buffer_is_refused_and_a_shorter_one_sent() {
    let mut pair = Pair::plain(2, Config::default());
    let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
    let receive = pair.receive(&to, 0..1000);
    let refused = until(|| pair.sender.isend(&from, 0..1001, 0).transpose());
    assert_eq!(refused, Err(RequestError::TooLong { len: 1001, room: 1000 }));
    let send = pair.sender.isend(&from, 0..1000, 0).unwrap().unwrap();
    pair.finish_receive(receive);
    pair.finish_send(send);
}

#[test]
fn both_ends_learn_why_a_connection_ended() {
    let mut pair = Pair::plain(2, Config::default());
    let to = pair.there.allocate(4096).unwrap();
    let buffer = RecvBuffer { memory: &to, range: 0..4096, tag: 0 };
    let receive = pair.receiver.irecv(std::slice::from_ref(&buffer)).unwrap().unwrap();
    let Pair { here, sender, mut receiver, .. } = pair;
    drop(sender);
    let error = until(|| receiver.test(receive).transpose()).unwrap_err();
    assert_eq!(error, RequestError::Ended(Cause::PeerClosed));
    assert_eq!(receiver.irecv(&[buffer]), Err(RequestError::Ended(Cause::PeerClosed)));
    to.deregister(HANG).unwrap();
    drop(here);
}

/// The receiver posts its receives in advance: as many as it has requests, whatever the water marks are.
#[test]
fn messages_arrive_without_the_receiver_when_it_has_posted_its_requests() {
    const COUNT: usize = 64;
    let config = Config { low_water: 1, high_water: 1, ..Config::default() };
    let mut pair = Pair::plain(1, config);
    let (from, to) = (pair.here.allocate(64 * COUNT).unwrap(), pair.there.allocate(64 * COUNT).unwrap());
    // More messages than receives were posted at first.
    for _ in 0..8 {
        let receives: Vec<_> = (0..COUNT).map(|n| pair.receive(&to, 64 * n..64 * (n + 1))).collect();
        for n in 0..COUNT {
            // The receiver is not called meanwhile.
            let send = until(|| pair.sender.isend(&from, 64 * n..64 * (n + 1), 0).unwrap());
            until(|| pair.sender.test(send).unwrap());
        }
        for receive in receives {
            until(|| pair.receiver.test(receive).unwrap());
        }
    }
}

/// A slot is used again only when the program has taken the result of its last message.
#[test]
fn results_that_were_not_taken_are_kept() {
    for connect in DEVICES {
        const SLOTS: usize = 4;
        let mut pair = connect(1, Config { slots: SLOTS, ..Config::default() });
        let (from, to) = (pair.here.allocate(4096).unwrap(), pair.there.allocate(4096).unwrap());
        let mut sends = Vec::new();
        for n in 0..=SLOTS {
            let receive = pair.receive(&to, 0..100);
            if n == SLOTS {
                for _ in 0..1000 {
                    assert_eq!(pair.sender.isend(&from, 0..1, 0).unwrap(), None, "its slot is in use");
                }
                break;
            }
            sends.push(until(|| pair.sender.isend(&from, 0..n, 0).unwrap()));
            until(|| pair.receiver.test(receive).unwrap());
        }
        for (n, send) in sends.into_iter().enumerate() {
            assert_eq!(until(|| pair.sender.test(send).unwrap()), n);
        }
    }
}

/// One clear-to-send of 64 that are posted has a completion.
#[test]
fn clear_to_sends_are_signaled_by_count() {
    assert_eq!(completions_of_clear_to_sends(Pair::faulty), 256 / 64);
}

/// A device that executes requests at once posts only the first clear-to-send, before it knows the peer's queue pair.
#[test]
fn clear_to_sends_that_are_executed_at_once_are_not_signaled() {
    assert_eq!(completions_of_clear_to_sends(Pair::plain), 0);
}

/// Of 256.
fn completions_of_clear_to_sends(connect: fn(usize, Config) -> Pair) -> u64 {
    // Without probes, which are signaled, too.
    let mut pair = connect(1, Config { slots: 8, stall_timeout: NEVER, ..Config::default() });
    let (from, to) = (pair.here.allocate(4096).unwrap(), pair.there.allocate(4096).unwrap());
    for n in 0..256 {
        pair.transfer(&from, &to, 1000, n);
    }
    // Some of the polls look for what is not a receive.
    (0..200).for_each(|_| pair.receiver.progress());
    let rail = &pair.receiver.counters().rails[0];
    assert_eq!((rail.receives, rail.work_requests), (256, 256));
    rail.completions - rail.receives
}

/// Which rail carries a clear-to-send depends on where the last message arrived, and so on the traffic. None of them must fill its send
/// queue with clear-to-sends whose completion nobody asked for: then a rail that works would be taken out.
#[test]
fn no_traffic_fills_a_send_queue_with_clear_to_sends() {
    // The places in the send queue of a receiver.
    const DEPTH: usize = 1024;
    // All messages on rail 1, and no slot with its number. Or one of eight, which is too short to be split, on rail 1 alone: then the
    // clear-to-send of slot 0 goes there, and rail 0 carries those of three other slots.
    let traffic = [
        (1, Split::Fixed([0, 1, 0, 0]), 1, DEPTH + 10),
        (8, Split::Fixed([1, 1, 0, 0]), 0, 8 * DEPTH / 3 + 10),
    ];
    for (slots, split, rail, messages) in traffic {
        for connect in DEVICES {
            let config = Config { slots, split, staging: Some(0), stall_timeout: NEVER, ..Config::default() };
            let mut pair = connect(2, config);
            let (from, to) = (pair.here.allocate(4096).unwrap(), pair.there.allocate(4096).unwrap());
            for n in 0..messages {
                pair.transfer(&from, &to, if n % 8 == 7 { 100 } else { 1000 }, n as u64);
            }
            let rails = &pair.receiver.counters().rails[..2];
            assert!(rails[rail].work_requests > DEPTH as u64, "{rails:?}");
            assert!(rails.iter().all(|rail| rail.failures == 0 && rail.retries == 0), "{rails:?}");
        }
    }
}

/// A device that executes requests while they are posted, and one that queues them: the same messages, and the same counters.
#[test]
fn messages_of_any_length_arrive_whether_the_device_executes_or_queues_them() {
    const LEN: usize = 300_000;
    type Connect = fn(usize, Config) -> Pair;
    let plain = [(1, None), (1, Some(0)), (1, Some(1024)), (2, None)];
    let plain = plain.map(|(rails, staging)| (rails, staging, Pair::plain as Connect));
    let faulty = [0, 1024].map(|staging| (1, Some(staging), Pair::faulty as Connect));
    for (rails, staging, connect) in plain.into_iter().chain(faulty) {
        let mut pair = connect(rails, Config { staging, ..Config::default() });
        let from = pair.here.allocate(LEN).unwrap();
        // Receives into two memories in turns.
        let to = [pair.there.allocate(LEN).unwrap(), pair.there.allocate(LEN).unwrap()];
        for round in 0..400usize {
            let len = [0, 1, 48, 49, 256, 257, 1024, 1025, 4096, 5000, 70_000, LEN][round % 12];
            let to = &to[round / 7 % 2];
            let bytes = pattern(len, round as u64);
            from.write(0, &bytes).unwrap();
            to.write(0, &vec![0xee; LEN]).unwrap();
            let buffer = |range| RecvBuffer { memory: to, range, tag: 5 };
            let receive = pair.receiver.irecv(&[buffer(0..LEN)]).unwrap().unwrap();
            assert!(pair.receiver.irecv(&[buffer(0..LEN + 1)]).is_err());
            assert_eq!(pair.sender.isend(&from, 0..len, 6), Ok(None), "no receive has this tag");
            let send = pair.send(&from, 0..len, 5);
            assert_eq!(pair.finish_send(send), len);
            assert_eq!(pair.sender.test(send), Err(RequestError::NoSuchRequest));
            assert_eq!(pair.finish_receive(receive), [len]);
            check(to, 0, &bytes);
            assert_eq!(pair.receiver.test(receive), Err(RequestError::NoSuchRequest));
        }
        let (sent, received) = (pair.sender.counters(), pair.receiver.counters());
        assert_eq!((sent.messages, received.messages), (400, 400));
        assert_eq!((sent.masks, sent.staged), (received.masks, received.staged));
        assert_eq!(sent.rails[0].bytes, received.rails[0].bytes);
        assert_eq!(received.rails[0].receives, sent.rails[0].payload_requests);
        assert_eq!(sent.rails[0].completions, sent.rails[0].payload_requests);
    }
}

/// On every device, also where nothing is copied by the receiver: a NIC would write into memory that the program has again.
#[test]
fn memory_cannot_be_deregistered_while_a_receive_into_it_is_outstanding() {
    for (rails, staging) in [(1, Some(0)), (1, None), (2, Some(0)), (2, None)] {
        let mut pair = Pair::plain(rails, Config { staging, ..Config::default() });
        let from = pair.here.allocate(1 << 16).unwrap();
        for tags in 1..=2 {
            let mut memories: Vec<Memory> =
                (0..tags).map(|_| pair.there.allocate(1 << 16).unwrap()).collect();
            let buffers: Vec<RecvBuffer<'_>> = memories
                .iter()
                .zip(0..)
                .map(|(memory, tag)| RecvBuffer { memory, range: 0..1 << 16, tag })
                .collect();
            let receive = pair.receiver.irecv(&buffers).unwrap().unwrap();
            memories = memories
                .into_iter()
                .map(|memory| match memory.deregister(HANG) {
                    Err(DeregisterError::InUse(memory)) => memory,
                    other => panic!("{rails} rails: {other:?}"),
                })
                .collect();
            for tag in 0..tags {
                pair.send(&from, 0..1 << 16, tag);
            }
            pair.finish_receive(receive);
            memories.into_iter().for_each(|memory| memory.deregister(HANG).unwrap());
        }
    }
}

/// The device would read the memory when the group is complete.
#[test]
fn memory_cannot_be_deregistered_while_a_send_from_it_waits_for_its_group() {
    let mut pair = Pair::plain(2, Config::default());
    let allocate = |rails: &Rails| rails.allocate(1 << 16).unwrap();
    let (to, [first, second]) = (allocate(&pair.there), [(); 2].map(|()| allocate(&pair.here)));
    let bytes = pattern(1 << 15, 3);
    [&first, &second].iter().for_each(|memory| memory.write(0, &bytes).unwrap());
    let buffers =
        [0, 1].map(|tag| RecvBuffer { memory: &to, range: tag << 15..(tag + 1) << 15, tag: tag as u32 });
    let receive = pair.receiver.irecv(&buffers).unwrap().unwrap();
    pair.send(&first, 0..1 << 15, 1);
    let Err(DeregisterError::InUse(first)) = first.deregister(HANG) else {
        panic!("the group is incomplete")
    };
    // Not even if the program drops it.
    drop(first);
    pair.send(&second, 0..1 << 15, 0);
    pair.finish_receive(receive);
    [0, 1 << 15].iter().for_each(|at| check(&to, *at, &bytes));
}

#[test]
fn memory_can_be_deregistered_when_its_connection_was_aborted() {
    let mut pair = Pair::plain(1, Config::default());
    let [from, to] = [&pair.here, &pair.there].map(|rails| rails.allocate(1 << 16).unwrap());
    let buffers = [0, 1].map(|tag| RecvBuffer { memory: &to, range: 0..100, tag });
    pair.receiver.irecv(&buffers).unwrap().unwrap();
    pair.receiver.irecv(&buffers[..1]).unwrap().unwrap();
    pair.send(&from, 0..100, 1);
    pair.sender.abort();
    pair.receiver.abort();
    [from, to].into_iter().for_each(|memory| memory.deregister(HANG).unwrap());
}
