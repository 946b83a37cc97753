use std::time::{Duration, Instant};

use crosstie::bootstrap::{Bootstrap, Limits, local};
use crosstie::device::Device;
use crosstie::endpoint::{Cause, NotStarted};
use crosstie::group::{Dropped, Group, GroupConfig, GroupError, MemberId, MemberRegion, Put};

use super::run;

/// Sends a description to everybody, and returns those of the others.
fn exchange(group: &Group, region: &MemberRegion) -> Vec<Vec<u8>> {
    let channel = group.open_channel(3, &group.channel_options()).unwrap();
    group.barrier(0).wait().unwrap();
    let mut all = vec![region.encode().to_vec(); group.members()];
    let peers = (0..group.members()).map(MemberId::new).filter(|peer| *peer != group.member());
    for peer in peers.clone() {
        channel.send(peer, &region.encode()).unwrap();
    }
    for _ in peers {
        let message = channel.recv().unwrap();
        all[message.from.index()] = message.bytes;
    }
    all
}

#[test]
fn push_pull_and_put_reach_the_memory_of_every_member() {
    run(3, &GroupConfig::new(1).one_sided(true), |group| {
        let me = group.member().index();
        let window = group.allocate(3 * 64).unwrap();
        let all = exchange(group, &group.describe(&window).unwrap());
        let peers: Vec<usize> = (0..3).filter(|peer| *peer != me).collect();
        assert!(matches!(
            group.import(&all[me]),
            Err(GroupError::ForeignMemory(Dropped::NotAPeer(member))) if member == group.member()
        ));
        for peer in &peers {
            let memory = group.import(&all[*peer]).unwrap();
            assert_eq!((memory.member(), memory.len()), (MemberId::new(*peer), 192));
            let source = group.register(vec![me as u8 + 1; 100]).unwrap();
            let push = group.push(source, 50..82, &memory, 64 * me as u64).unwrap();
            let source = futures::executor::block_on(push).unwrap().buffer;
            assert_eq!(source.into_memory::<Vec<u8>>(Duration::from_secs(5)).unwrap().len(), 100);
            // Too many in flight, of which some may be those to the last peer, is back-pressure.
            let put = |offset| loop {
                match group.put(&[me as u8 + 101], &memory, 64 * me as u64 + 32 + offset) {
                    Ok(put) => return put,
                    Err(GroupError::NotStarted(NotStarted::TooManyOperations(_))) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            };
            let puts: Vec<Put> = (0..32).map(put).collect();
            for (at, put) in puts.into_iter().enumerate() {
                match at % 3 {
                    0 => put.wait().unwrap(),
                    1 => futures::executor::block_on(put).unwrap(),
                    _ => drop(put),
                }
            }
            // More than there are slots, without waiting for any.
            (0..1000).for_each(|_| drop(put(0)));
            while group.put(&[], &memory, 0).is_err() {
                std::thread::yield_now();
            }
            let outside = group.put(&[1; 9], &memory, 184).unwrap_err();
            assert!(matches!(outside, GroupError::NotStarted(NotStarted::Remote { .. })), "{outside}");
            assert_eq!(
                group.put(&[1; 257], &memory, 0).unwrap_err(),
                GroupError::PutTooLong { len: 257, max: 256 }
            );
        }
        group.barrier(0).wait().unwrap();
        let mut expected = vec![0; 192];
        for peer in &peers {
            expected[64 * peer..64 * peer + 32].fill(*peer as u8 + 1);
            expected[64 * peer + 32..64 * peer + 64].fill(*peer as u8 + 101);
        }
        assert_eq!(window.to_vec(), expected);
        for peer in &peers {
            let memory = group.import(&all[*peer]).unwrap();
            let buffer = group.allocate(64).unwrap();
            let buffer = group.pull(buffer, .., &memory, 64 * me as u64).unwrap().wait().unwrap().buffer;
            assert_eq!(buffer.to_vec(), [[me as u8 + 1; 32], [me as u8 + 101; 32]].concat());
        }
        group.barrier(0).wait().unwrap();
        assert_eq!(group.counters().foreign_memory, 0);
    });
}

/// A description of another group is refused by name. A member that forges one does not get at the memory either, because the other
/// group's memory is in another protection domain.
#[test]
fn memory_of_another_group_is_refused_and_counted() {
    let jobs = local::in_process(2, Limits::default()).unwrap();
    std::thread::scope(|scope| {
        for mut job in jobs {
            scope.spawn(move || {
                let device = Device::open(&"software".parse().unwrap()).unwrap();
                let [first, second] = [1, 2]
                    .map(|id| Group::join(&mut job, &device, &GroupConfig::new(id).one_sided(true)).unwrap());
                let window = first.allocate(64).unwrap();
                let region = first.describe(&window).unwrap();
                let all = job.all_gather(&region.encode()).unwrap();
                let own = second.describe(&second.allocate(64).unwrap()).unwrap();
                if first.member() == MemberId::new(0) {
                    let foreign = second.import(&all[1]).unwrap_err();
                    assert_eq!(foreign, GroupError::ForeignMemory(Dropped::ForeignGroup(1)));
                    assert_eq!(second.counters().dropped.foreign_group, 1);

                    let memory = first.import(&all[1]).unwrap();
                    let buffer = second.allocate(64).unwrap();
                    let refused = second.push(buffer, .., &memory, 0).unwrap_err();
                    assert_eq!(refused.cause, NotStarted::ForeignRegion);
                    let refused = second.pull(refused.buffer, .., &memory, 0).unwrap_err();
                    assert_eq!(refused.cause, NotStarted::ForeignRegion);
                    assert_eq!(second.counters().foreign_memory, 2);

                    // The key of the first group's memory in a description of the second group.
                    let forged = [&own.encode()[..12], &all[1][12..]].concat();
                    let memory = second.import(&forged).unwrap();
                    let bytes = second.allocate(64).unwrap();
                    bytes.write(0, &[9; 64]).unwrap();
                    let failed = second.push(bytes, .., &memory, 0).unwrap().wait().unwrap_err();
                    assert!(matches!(failed.cause, Cause::RemoteAccess(_)), "{:?}", failed.cause);
                }
                job.barrier().unwrap();
                assert_eq!(window.to_vec(), [0; 64]);
                drop(first);
            });
        }
    });
}

#[test]
fn late_push_of_an_expelled_member_has_no_effect() {
    run(3, &GroupConfig::new(1).one_sided(true), |group| {
        let window = group.allocate(64).unwrap();
        let all = exchange(group, &group.describe(&window).unwrap());
        let gone = MemberId::new(2);
        let memories: Vec<_> = (0..2).map(|peer| group.import(&all[peer])).collect();
        // The one that is expelled may hear of it before its barrier ends.
        assert!(group.barrier(0).wait().is_ok() || group.member() == gone);
        if group.member() == MemberId::new(0) {
            group.expel(gone).unwrap();
        }
        let begin = Instant::now();
        if group.member() != gone {
            while !group.dead().contains(gone) {
                assert!(begin.elapsed() < Duration::from_secs(30));
                std::thread::sleep(Duration::from_millis(1));
            }
            // A write that its device was executing may still end. Whatever the other one begins until the job's barrier, this does not
            // change any more.
            std::thread::sleep(Duration::from_millis(200));
            let seen = window.to_vec();
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(window.to_vec(), seen);
            assert!(matches!(group.import(&all[2]), Err(GroupError::ForeignMemory(Dropped::DeadSender(_)))));
        } else {
            for memory in memories {
                let memory = memory.unwrap();
                let failed = loop {
                    let put = group.put(&[begin.elapsed().as_nanos() as u8 | 1], &memory, 0);
                    if let Err(error) = put.and_then(Put::wait) {
                        break error;
                    }
                    assert!(begin.elapsed() < Duration::from_secs(30));
                };
                assert!(
                    matches!(failed, GroupError::Operation { .. } | GroupError::NotStarted(_)),
                    "{failed}"
                );
            }
        }
    });
}
