//! Every primitive of a group, briefly, on the software device; in a virtual machine of `cargo xtask vm` on kernel Soft-RoCE.
//!
//! The members are threads, each with a device of its own.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use crosstie::bootstrap::{Bootstrap, Limits, local};
use crosstie::device::Device;
use crosstie::group::{Group, GroupConfig, MemberId, TaggedOptions, Token, Transport};

const MEMBERS: u32 = 3;
const LIMIT: Duration = Duration::from_secs(60);

fn run(config: &GroupConfig, body: impl Fn(&Group, &mut dyn Bootstrap) + Sync) {
    // The virtual machines of `cargo xtask vm` set HOST.
    let name = if std::env::var_os("HOST").is_some() { "verbs:r0" } else { "software" };
    println!("device {name}");
    std::thread::scope(|scope| {
        for mut job in local::in_process(MEMBERS, Limits::default()).unwrap() {
            let body = &body;
            scope.spawn(move || {
                let device = Device::open(&name.parse().unwrap()).unwrap();
                let group = Group::join(&mut job, &device, config).unwrap();
                body(&group, &mut job);
                // Nobody leaves before all have finished.
                job.barrier().unwrap();
            });
        }
    });
}

#[test]
fn locks_and_barriers_work() {
    let (inside, last) = (AtomicBool::new(false), Mutex::new(Token::default()));
    run(&GroupConfig::new(1), |group, _| {
        for _ in 0..20 {
            let guard = group.lock(1).acquire_timeout(LIMIT).unwrap();
            assert!(!inside.swap(true, SeqCst), "two holders");
            let former = std::mem::replace(&mut *last.lock().unwrap(), guard.fence());
            assert!(former < guard.fence(), "tokens rise");
            inside.store(false, SeqCst);
            guard.release().unwrap();
        }
        for round in 1..=20 {
            assert_eq!(group.barrier(0).wait_timeout(LIMIT).unwrap(), round);
        }
        assert!(group.dead().is_empty());
    });
}

#[test]
fn messages_arrive_in_order_over_rc_and_ud() {
    for (transport, loss) in [(Transport::Rc, 0.0), (Transport::Ud, 0.0), (Transport::Ud, 0.05)] {
        run(&GroupConfig::new(1).transport(transport).receive_loss(loss, 7), |group, _| {
            let channel = group.open_channel(4, &group.channel_options()).unwrap();
            group.barrier(0).wait_timeout(LIMIT).unwrap();
            let me = group.member().index();
            let message = |from: usize, number: usize| vec![(from * 50 + number) as u8; number * 97 % 5000];
            for number in 0..40 {
                for to in (0..MEMBERS as usize).filter(|to| *to != me) {
                    channel.send(MemberId::new(to), &message(me, number)).unwrap();
                }
            }
            let (mut next, mut bytes) = ([0; MEMBERS as usize], Vec::new());
            for _ in 0..40 * (MEMBERS - 1) {
                let from = channel.recv_timeout(LIMIT, &mut bytes).unwrap().index();
                assert!(
                    bytes == message(from, next[from]),
                    "message {} of {from}, {transport:?}",
                    next[from]
                );
                next[from] += 1;
            }
            channel.flush().unwrap();
            group.barrier(0).wait_timeout(LIMIT).unwrap();
        });
    }
}

#[test]
fn memory_of_members_is_reached_and_tagged_messages_are_pulled() {
    run(&GroupConfig::new(1).one_sided(true), |group, job| {
        let (me, members) = (group.member().index(), group.members());
        let (next, previous) = ((me + 1) % members, (me + members - 1) % members);
        let window = group.allocate(8192).unwrap();
        let all = job.all_gather(&group.describe(&window).unwrap().encode()).unwrap();
        let memory = group.import(&all[next]).unwrap();
        let block = group.allocate(4096).unwrap();
        block.write(0, &[me as u8 + 1; 4096]).unwrap();
        let block = group.push(block, .., &memory, 0).unwrap().wait().unwrap().buffer;
        group.put(&[me as u8 + 101; 100], &memory, 4096).unwrap().wait().unwrap();
        group.barrier(0).wait_timeout(LIMIT).unwrap();
        let found = window.to_vec();
        assert!(
            found[..4096] == [previous as u8 + 1; 4096] && found[4096..4196] == [previous as u8 + 101; 100]
        );
        let block = group.pull(block, .., &memory, 0).unwrap().wait().unwrap().buffer;
        assert!(block.to_vec() == [me as u8 + 1; 4096]);

        let options = TaggedOptions { eager_max: 1000, ..group.tagged_options() };
        let tagged = group.open_tagged(4, &options).unwrap();
        group.barrier(0).wait_timeout(LIMIT).unwrap();
        let mut buffer = group.allocate(100_000).unwrap();
        for len in [10, 100_000, 500, 3000] {
            let recv = tagged.irecv(None, Some(len as u64), group.allocate(100_000).unwrap()).unwrap();
            buffer.write(0, &vec![me as u8 + len as u8; len]).unwrap();
            buffer = tagged.isend(MemberId::new(next), len as u64, buffer, ..len).unwrap().wait().unwrap();
            let (info, received) = recv.wait_timeout(LIMIT).unwrap();
            assert_eq!((info.from.index(), info.len), (previous, len as u64));
            assert!(received.to_vec()[..len] == vec![previous as u8 + len as u8; len]);
        }
        assert_eq!(group.counters().pulls, 2);
        group.barrier(0).wait_timeout(LIMIT).unwrap();
    });
}
