use std::time::Duration;

use crosstie::group::{
    Group, GroupConfig, GroupError, MemberId, MessageInfo, Tagged, TaggedOptions, Transport,
};

use super::run;

const SEED: u64 = 20_261_116;
const EAGER_MAX: u32 = 256;
const MAX_LEN: usize = 20_000;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }
}

fn open(group: &Group, change: impl FnOnce(&mut TaggedOptions)) -> Tagged {
    let mut options = TaggedOptions { eager_max: EAGER_MAX, ..group.tagged_options() };
    change(&mut options);
    let tagged = group.open_tagged(9, &options).unwrap();
    group.barrier(0).wait().unwrap();
    tagged
}

/// What one member sends to another one, and which receives the other one starts for it: the oracle.
struct Script {
    /// Tag and length of each message.
    sends: Vec<(u64, usize)>,
    /// Tag, or any, of each receive; and the message that it must get.
    recvs: Vec<(Option<u64>, usize)>,
}

/// Receives and messages both are taken in their order: each receive gets the first message that it matches and that no receive
/// before it got, whenever either of them comes.
fn script(from: usize, to: usize, count: usize) -> Script {
    let mut random = Random(SEED ^ ((from * 8 + to + 1) as u64) << 32);
    let sends: Vec<(u64, usize)> = (0..count)
        .map(|_| {
            let max = if random.below(3) == 0 { MAX_LEN as u64 } else { 400 };
            (random.below(4), random.below(max) as usize)
        })
        .collect();
    let mut left: Vec<usize> = (0..count).collect();
    let mut recvs = Vec::new();
    while !left.is_empty() {
        let wanted = (random.below(3) > 0).then(|| random.below(4));
        if let Some(at) = left.iter().position(|number| wanted.is_none_or(|tag| tag == sends[*number].0)) {
            recvs.push((wanted, left.remove(at)));
        }
    }
    Script { sends, recvs }
}

fn message(from: usize, number: usize, len: usize) -> Vec<u8> {
    let mut bytes = format!("{from} {number} ").into_bytes();
    bytes.extend((0..len).map(|at| (at * 7 + number * 13 + from) as u8));
    bytes
}

fn exchange_by_tags(config: &GroupConfig, members: usize, count: usize) -> Vec<crosstie::group::Counters> {
    run(members as u32, config, |group| {
        let tagged = open(group, |_| {});
        let me = group.member().index();
        let peers: Vec<usize> = (0..members).filter(|peer| *peer != me).collect();
        let allocate = |len: usize| group.allocate(len).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut running = Vec::new();
                for number in 0..count {
                    for &to in &peers {
                        let (tag, len) = script(me, to, count).sends[number];
                        let bytes = message(me, number, len);
                        // Not at the start of the buffer, and not to its end.
                        let buffer = allocate(bytes.len() + 20);
                        buffer.write(10, &bytes).unwrap();
                        let send =
                            tagged.isend(MemberId::new(to), tag, buffer, 10..10 + bytes.len()).unwrap();
                        if number % 5 == 0 {
                            drop(send);
                        } else {
                            running.push(send);
                        }
                    }
                }
                for send in running {
                    send.wait().unwrap();
                }
            });
            for from in &peers {
                let script = script(*from, me, count);
                let mut random = Random(SEED ^ me as u64);
                let mut running = Vec::new();
                for (wanted, number) in script.recvs {
                    let buffer = allocate(MAX_LEN + 40);
                    let recv = tagged.irecv(Some(MemberId::new(*from)), wanted, buffer).unwrap();
                    running.push((recv, number));
                    // Now and then all that were started are waited for, so that some messages come before and some after.
                    if random.below(8) == 0 {
                        for (recv, number) in running.drain(..) {
                            check(*from, number, script.sends[number], recv.wait().unwrap());
                        }
                    }
                }
                for (recv, number) in running {
                    let received = futures::executor::block_on(recv).unwrap();
                    check(*from, number, script.sends[number], received);
                }
            }
        });
        assert_eq!(tagged.unexpected(), 0);
        group.barrier(0).wait().unwrap();
        group.counters()
    })
}

fn check(
    from: usize,
    number: usize,
    (tag, len): (u64, usize),
    (info, buffer): (MessageInfo, crosstie::endpoint::Buffer),
) {
    let expected = message(from, number, len);
    assert_eq!(
        info,
        MessageInfo { from: MemberId::new(from), tag, len: expected.len() as u64 },
        "message {number} of {from} (seed {SEED})"
    );
    assert!(buffer.to_vec()[..expected.len()] == expected, "bytes of message {number} of {from}");
}

#[test]
fn tagged_messages_match_as_two_ordered_lists_do() {
    for transport in [Transport::Rc, Transport::Ud] {
        let config = GroupConfig::new(1).one_sided(true).transport(transport);
        let counters = exchange_by_tags(&config, 3, 120);
        let pulls: u64 = counters.iter().map(|counters| counters.pulls).sum();
        let long =
            (0..3).flat_map(|from| (0..3).filter(move |to| *to != from).map(move |to| script(from, to, 120)));
        let long = long.flat_map(|script| script.sends.into_iter().enumerate());
        let long =
            long.filter(|(number, (_, len))| message(0, *number, *len).len() > EAGER_MAX as usize).count();
        assert_eq!(pulls, long as u64, "exactly the long messages are pulled");
        assert!(counters.iter().all(|counters| counters.dropped.invalid == 0));
    }
}

#[test]
fn long_message_is_pulled_while_the_receiver_computes() {
    let counters = run(2, &GroupConfig::new(1).one_sided(true), |group| {
        let tagged = open(group, |_| {});
        let (left, right) = (MemberId::new(0), MemberId::new(1));
        if group.member() == left {
            let buffer = group.allocate(100_000).unwrap();
            buffer.write(0, &[3; 100_000]).unwrap();
            // It ends although the receiver calls nothing of the group meanwhile.
            let buffer = tagged.isend(right, 5, buffer, ..).unwrap().wait().unwrap();
            assert_eq!(buffer.len(), 100_000);
            group.barrier(0).wait().unwrap();
        } else {
            let mut recv = tagged.irecv(None, Some(5), group.allocate(100_000).unwrap()).unwrap();
            let begin = std::time::Instant::now();
            while group.counters().pulls == 0 {
                // Reading the counters does not make progress.
                assert!(begin.elapsed() < Duration::from_secs(30));
                std::thread::sleep(Duration::from_millis(5));
            }
            let (info, buffer) = recv.try_take().unwrap().unwrap();
            assert_eq!((info.len, info.from), (100_000, left));
            assert!(buffer.to_vec().iter().all(|byte| *byte == 3));
            group.barrier(0).wait().unwrap();
        }
        group.counters()
    });
    assert_eq!((counters[0].pulls, counters[1].pulls), (0, 1));
}

#[test]
fn long_messages_travel_with_their_bytes_without_one_sided_access() {
    run(2, &GroupConfig::new(1), |group| {
        let tagged = open(group, |_| {});
        let right = MemberId::new(1);
        assert_eq!(group.allocate(64).unwrap_err(), GroupError::NotOneSided);
        // Buffers of any device will do, because they are copied.
        let device = crosstie::device::Device::open(&"software".parse().unwrap()).unwrap();
        let access = crosstie::device::Access::LOCAL_WRITE;
        let pd = device.alloc_pd().unwrap();
        let buffer = crosstie::endpoint::Buffer::new(pd.allocate(50_000, access).unwrap());
        if group.member() == right {
            let (info, buffer) = tagged.irecv(None, None, buffer).unwrap().wait().unwrap();
            assert_eq!((info.tag, info.len), (8, 50_000));
            assert_eq!(buffer.to_vec(), message(1, 2, 50_000)[..50_000]);
        } else {
            buffer.write(0, &message(1, 2, 50_000)[..50_000]).unwrap();
            tagged.isend(right, 8, buffer, ..).unwrap().wait().unwrap();
        }
        group.barrier(0).wait().unwrap();
        assert_eq!(group.counters().pulls, 0);
    });
}

#[test]
fn message_longer_than_its_buffer_is_truncated_with_an_error() {
    run(2, &GroupConfig::new(1).one_sided(true), |group| {
        let tagged = open(group, |_| {});
        let (left, right) = (MemberId::new(0), MemberId::new(1));
        for len in [200, 5000] {
            if group.member() == left {
                // The sender is not concerned.
                tagged.isend(right, 1, group.allocate(len).unwrap(), ..).unwrap().wait().unwrap();
                tagged.send(right, 2, b"next").unwrap();
            } else {
                let failed = tagged.irecv(Some(left), Some(1), group.allocate(100).unwrap()).unwrap().wait();
                let failed = failed.unwrap_err();
                let room = 100;
                assert_eq!(failed.error, GroupError::Truncated { from: left, tag: 1, len: len as u64, room });
                let buffer = failed.buffer.unwrap();
                let (info, buffer) = tagged.irecv(Some(left), None, buffer).unwrap().wait().unwrap();
                assert_eq!((info.tag, &buffer.to_vec()[..4]), (2, &b"next"[..]));
            }
        }
        group.barrier(0).wait().unwrap();
    });
}

#[test]
fn stopped_receive_gives_its_buffer_back_and_takes_no_message() {
    run(2, &GroupConfig::new(1).one_sided(true), |group| {
        let tagged = open(group, |_| {});
        let (left, right) = (MemberId::new(0), MemberId::new(1));
        if group.member() == right {
            let recv = tagged.irecv(Some(left), Some(1), group.allocate(64).unwrap()).unwrap();
            assert_eq!(recv.cancel().unwrap().len(), 64);
            drop(tagged.irecv(None, None, group.allocate(64).unwrap()).unwrap());
            let late = tagged.irecv(Some(left), Some(1), group.allocate(32).unwrap()).unwrap();
            let late = late.wait_timeout(Duration::from_millis(5)).unwrap_err();
            assert_eq!((late.error, late.buffer.unwrap().len()), (GroupError::TimedOut, 32));
        }
        group.barrier(0).wait().unwrap();
        if group.member() == left {
            tagged.send(right, 1, b"first").unwrap();
            tagged.send(right, 1, b"second").unwrap();
        } else {
            let begin = std::time::Instant::now();
            while tagged.unexpected() < 2 {
                assert!(begin.elapsed() < Duration::from_secs(30));
                group.progress();
            }
            let info = tagged.probe(None, Some(1)).unwrap().unwrap();
            assert_eq!(info, MessageInfo { from: left, tag: 1, len: 5 });
            assert_eq!(tagged.probe(None, Some(2)).unwrap(), None);
            for expected in [&b"first"[..], b"second"] {
                let (info, buffer) =
                    tagged.irecv(None, None, group.allocate(64).unwrap()).unwrap().wait().unwrap();
                assert_eq!(&buffer.to_vec()[..info.len as usize], expected);
            }
        }
        group.barrier(0).wait().unwrap();
    });
}

#[test]
fn too_many_unexpected_messages_stop_their_sender_and_none_is_lost() {
    run(2, &GroupConfig::new(1).one_sided(true), |group| {
        let tagged = open(group, |options| {
            options.unexpected = 4;
            (options.channel.receive_buffer, options.channel.receive_table) = (4096, 4);
            options.channel.window = 16;
            options.sends = 8;
        });
        let (left, right) = (MemberId::new(0), MemberId::new(1));
        if group.member() == left {
            for number in 0..300u64 {
                tagged.send(right, number % 3, &number.to_le_bytes()).unwrap();
            }
        } else {
            std::thread::sleep(Duration::from_millis(50));
            assert!(tagged.unexpected() <= 4);
            for number in 0..300u64 {
                let buffer = group.allocate(8).unwrap();
                let (info, buffer) = tagged.irecv(Some(left), None, buffer).unwrap().wait().unwrap();
                assert_eq!((info.tag, buffer.to_vec()), (number % 3, number.to_le_bytes().to_vec()));
            }
        }
        group.barrier(0).wait().unwrap();
        if group.member() == left {
            // Long messages wait for their receiver, so their number is limited.
            let mut sends = Vec::new();
            let refused = loop {
                match tagged.isend(right, 7, group.allocate(1000).unwrap(), ..) {
                    Ok(send) => sends.push(send),
                    Err(refused) => break refused,
                }
            };
            assert_eq!((sends.len(), refused.buffer.unwrap().len()), (8, 1000));
            assert!(matches!(refused.error, GroupError::TooManyRequests(_)));
            group.barrier(0).wait().unwrap();
            for send in sends {
                futures::executor::block_on(send).unwrap();
            }
        } else {
            group.barrier(0).wait().unwrap();
            for _ in 0..8 {
                tagged.irecv(Some(left), Some(7), group.allocate(1000).unwrap()).unwrap().wait().unwrap();
            }
        }
        group.barrier(0).wait().unwrap();
    });
}

#[test]
fn death_of_a_member_ends_its_sends_and_receives() {
    run(3, &GroupConfig::new(1).one_sided(true), |group| {
        let options = TaggedOptions { eager_max: EAGER_MAX, ..group.tagged_options() };
        let tagged = group.open_tagged(9, &options).unwrap();
        let gone = MemberId::new(2);
        // The one that is expelled may hear of it before its barrier ends.
        assert!(group.barrier(0).wait().is_ok() || group.member() == gone);
        if group.member() == MemberId::new(0) {
            let send = tagged.isend(gone, 1, group.allocate(5000).unwrap(), ..).unwrap();
            let recv = tagged.irecv(Some(gone), None, group.allocate(64).unwrap()).unwrap();
            let any = tagged.irecv(None, None, group.allocate(64).unwrap()).unwrap();
            group.expel(gone).unwrap();
            let failed = send.wait().unwrap_err();
            assert_eq!((failed.error, failed.buffer.unwrap().len()), (GroupError::PeerDead(gone), 5000));
            let failed = recv.wait().unwrap_err();
            assert_eq!((failed.error, failed.buffer.unwrap().len()), (GroupError::PeerDead(gone), 64));
            let refused = tagged.irecv(Some(gone), None, group.allocate(64).unwrap()).unwrap_err();
            assert_eq!(refused.error, GroupError::PeerDead(gone));
            let refused = tagged.isend(gone, 1, group.allocate(64).unwrap(), ..).unwrap_err();
            assert_eq!(refused.error, GroupError::PeerDead(gone));
            tagged.send(MemberId::new(1), 1, b"go").unwrap();
            assert_eq!(any.wait().unwrap().0.from, MemberId::new(1));
            // The last one that could send anything.
            let any = tagged.irecv(None, None, group.allocate(64).unwrap()).unwrap();
            group.expel(MemberId::new(1)).unwrap();
            assert_eq!(any.wait().unwrap_err().error, GroupError::NobodyLeft);
        } else if group.member() == MemberId::new(1) {
            tagged.irecv(None, None, group.allocate(64).unwrap()).unwrap().wait().unwrap();
            tagged.send(MemberId::new(0), 1, b"went").unwrap();
        }
    });
}

/// Too many messages of member 1 wait for a receive. Member 2 sends behind them, and receives a long message.
#[test]
fn unmatched_messages_of_one_member_delay_no_other_member() {
    const LONG: usize = 1 << 20;
    run(3, &GroupConfig::new(1).one_sided(true), |group| {
        // Two for each sender.
        let tagged = open(group, |options| options.unexpected = 4);
        let (a, c) = (MemberId::new(0), MemberId::new(2));
        let end = std::time::Instant::now() + Duration::from_secs(60);
        let allocate = |len| group.allocate(len).unwrap();
        match group.member().index() {
            1 => {
                for number in 0..6u64 {
                    tagged.send(a, 9, &number.to_le_bytes()).unwrap();
                }
                group.barrier(0).wait().unwrap();
                // The end of this send comes with messages that nobody receives yet.
                let buffer = allocate(LONG);
                buffer.write(0, &[1; LONG]).unwrap();
                tagged.isend(c, 2, buffer, ..).unwrap().wait().unwrap();
            }
            0 => {
                group.barrier(0).wait().unwrap();
                let mut long = tagged.isend(c, 1, allocate(LONG), ..).unwrap();
                let short = tagged.irecv(Some(c), Some(5), allocate(64)).unwrap();
                short.wait_timeout(Duration::from_secs(60)).unwrap();
                while long.try_take().map(Result::unwrap).is_none() {
                    assert!(std::time::Instant::now() < end, "the long message does not end");
                    group.progress();
                }
                assert_eq!(tagged.unexpected(), 2);
                for number in 0..6u64 {
                    let receive = tagged.irecv(Some(MemberId::new(1)), Some(9), allocate(64)).unwrap();
                    let (info, buffer) = receive.wait_timeout(Duration::from_secs(60)).unwrap();
                    assert_eq!((info.len, &buffer.to_vec()[..8]), (8, &number.to_le_bytes()[..]));
                }
            }
            _ => {
                group.barrier(0).wait().unwrap();
                tagged.send(a, 5, b"behind them").unwrap();
                for tag in [1, 2] {
                    let receive = tagged.irecv(None, Some(tag), allocate(LONG)).unwrap();
                    receive.wait_timeout(Duration::from_secs(60)).unwrap();
                }
            }
        }
        group.barrier(0).wait().unwrap();
    });
}
