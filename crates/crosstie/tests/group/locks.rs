use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use crosstie::group::{GroupConfig, GroupError, MemberId, PacketKind, Token};

use super::{run, total};

/// Takes turns at a counter without any atomic operation that would hide a second holder.
#[test]
fn lock_excludes_and_costs_at_most_three_packets() {
    for members in [2u32, 4] {
        const TURNS: u64 = 150;
        let (inside, last_fence) = (AtomicBool::new(false), Mutex::new(Token::default()));
        let counters = run(members, &GroupConfig::new(1), |group| {
            for _ in 0..TURNS {
                let guard = group.lock(3).acquire().unwrap();
                assert!(!inside.swap(true, SeqCst), "two holders");
                let fence = guard.fence();
                assert!(std::mem::replace(&mut *last_fence.lock().unwrap(), fence) < fence, "tokens rise");
                std::thread::yield_now();
                inside.store(false, SeqCst);
                guard.release().unwrap();
            }
            group.barrier(0).wait().unwrap();
            group.counters()
        });
        let acquired: u64 = counters.iter().map(|counters| counters.locks.acquired).sum();
        let reacquired: u64 = counters.iter().map(|counters| counters.locks.reacquired).sum();
        assert_eq!(acquired + reacquired, u64::from(members) * TURNS);
        let packets = [PacketKind::LockRequest, PacketKind::LockForward, PacketKind::LockReply];
        let packets: u64 = packets.into_iter().map(|kind| total(&counters, kind)).sum();
        assert!(packets <= 3 * acquired, "{packets} packets for {acquired} acquisitions");
    }
}

#[test]
fn last_holder_takes_the_lock_again_without_a_packet() {
    let counters = run(2, &GroupConfig::new(1), |group| {
        if group.member() == MemberId::new(1) {
            drop(group.lock(0).acquire().unwrap());
            let before = group.counters().messages();
            for _ in 0..1000 {
                drop(group.lock(0).acquire().unwrap());
            }
            assert_eq!(group.counters().messages(), before);
        }
        group.barrier(0).wait().unwrap();
        group.counters()
    });
    assert_eq!(counters[1].locks.reacquired, 1000);
    assert_eq!(counters[0].locks.acquired, 0);
}

#[test]
fn threads_of_one_member_exclude_each_other() {
    let inside = AtomicBool::new(false);
    run(2, &GroupConfig::new(1), |group| {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _guard = group.lock(9).acquire().unwrap();
                        assert!(!inside.swap(true, SeqCst));
                        std::thread::yield_now();
                        inside.store(false, SeqCst);
                    }
                });
            }
        });
        group.barrier(0).wait().unwrap();
    });
}

/// A device without a place to park (here the fault device, which every second member has) is waited for with the engine. The group's own
/// thread has the right to park when the threads begin to wait, so some of them sleep while another one begins to wait in the device.
#[test]
fn thread_that_waits_in_the_device_gives_the_engine_to_threads_that_slept() {
    run(2, &GroupConfig::new(1), |group| {
        for _ in 0..60 {
            std::thread::sleep(Duration::from_millis(5));
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| (0..3).for_each(|_| drop(group.lock(9).acquire().unwrap())));
                }
            });
        }
        group.barrier(0).wait().unwrap();
    });
}

#[test]
fn try_lock_and_timeout_say_that_the_lock_is_held() {
    run(3, &GroupConfig::new(1), |group| {
        let (lock, barrier) = (group.lock(0), group.barrier(0));
        let guard = (group.member() == MemberId::new(2)).then(|| lock.acquire().unwrap());
        barrier.wait().unwrap();
        if guard.is_none() {
            assert!(lock.try_acquire().unwrap().is_none());
            match lock.acquire_timeout(Duration::from_millis(30)) {
                Err(GroupError::LockTimedOut { members, .. }) => {
                    let text = members.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                    assert!(text.contains("member 2 has the lock"), "{text}");
                }
                other => panic!("{other:?}"),
            }
        }
        barrier.wait().unwrap();
        drop(guard);
        barrier.wait().unwrap();
        drop(lock.acquire().unwrap());
        barrier.wait().unwrap();
    });
}

#[test]
fn dropped_future_leaves_the_queue_to_the_others() {
    run(3, &GroupConfig::new(1), |group| {
        let (lock, barrier) = (group.lock(1), group.barrier(0));
        let guard = (group.member() == MemberId::new(0)).then(|| lock.acquire().unwrap());
        barrier.wait().unwrap();
        if group.member() == MemberId::new(1) {
            let mut future = lock.acquire_async();
            let waker = futures::task::noop_waker();
            let mut context = std::task::Context::from_waker(&waker);
            assert!(std::pin::Pin::new(&mut future).poll(&mut context).is_pending());
            drop(future);
        }
        barrier.wait().unwrap();
        drop(guard);
        let guard = futures::executor::block_on(lock.acquire_async()).unwrap();
        drop(guard);
        barrier.wait().unwrap();
    });
}

/// The holder does not hear that it was expelled until it uses its lock again; its late message is refused.
#[test]
fn message_of_an_expelled_holder_is_refused_by_its_token() {
    let config = GroupConfig::new(1);
    let [_, receiver, _] = <[_; 3]>::try_from(run(3, &config, |group| {
        let options = group.channel_options();
        let (lock, barrier, channel) =
            (group.lock(0), group.barrier(0), group.open_channel(1, &options).unwrap());
        let to = MemberId::new(1);
        let mut bytes = Vec::new();
        barrier.wait().unwrap();
        match group.member().index() {
            0 => {
                let old = lock.acquire().unwrap();
                channel.send_fenced(to, &old, b"old").unwrap();
                channel.flush().unwrap();
                barrier.wait().unwrap();
                // Member 2 takes the lock meanwhile, as it could if this member had been declared dead.
                let token = old.fence();
                drop(old);
                barrier.wait().unwrap();
                barrier.wait().unwrap();
                channel.send_with_token(to, 0, token, b"late").unwrap();
                channel.send_with_token(to, 0, token, &[b'l'; 9000]).unwrap();
                channel.send(to, b"end").unwrap();
            }
            1 => {
                barrier.wait().unwrap();
                barrier.wait().unwrap();
                barrier.wait().unwrap();
                let mut received = Vec::new();
                while bytes != b"end" {
                    channel.recv_into(&mut bytes).unwrap();
                    received.push(String::from_utf8(bytes.clone()).unwrap());
                }
                assert_eq!(received, ["old", "new", &"n".repeat(9000), "end"]);
            }
            _ => {
                barrier.wait().unwrap();
                barrier.wait().unwrap();
                let new = lock.acquire().unwrap();
                channel.send_fenced(to, &new, b"new").unwrap();
                channel.send_fenced(to, &new, &[b'n'; 9000]).unwrap();
                channel.flush().unwrap();
                barrier.wait().unwrap();
            }
        }
        barrier.wait().unwrap();
        group.counters()
    }))
    .unwrap();
    assert_eq!(receiver.stale_tokens, 2);
}
