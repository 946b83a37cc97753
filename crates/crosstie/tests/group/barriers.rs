use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use crosstie::group::{GroupConfig, GroupError, MemberId, MemberSet, PacketKind, TreeOptions};

use super::{run, total};

/// No member leaves round `n` before all have entered it, and a round costs exactly 2(N-1) packets.
#[test]
fn barrier_separates_rounds_with_two_packets_for_each_other_member() {
    for (members, fanout) in [(1, 2), (2, 2), (3, 2), (5, 2), (6, 5)] {
        const ROUNDS: u64 = 200;
        let entered = AtomicU64::new(0);
        let config = GroupConfig::new(1).tree(TreeOptions { fanout, ..TreeOptions::default() });
        let counters = run(members, &config, |group| {
            for round in 1..=ROUNDS {
                entered.fetch_add(1, SeqCst);
                assert_eq!(group.barrier(0).wait().unwrap(), round);
                assert!(entered.load(SeqCst) >= round * u64::from(members), "round {round} was overtaken");
            }
            group.counters()
        });
        // The root tells its first child that its side has arrived, and so need not release it.
        let (arrivals, releases) = if members == 1 { (0, 0) } else { (members, members - 2) };
        assert_eq!(total(&counters, PacketKind::BarrierArrive), ROUNDS * u64::from(arrivals));
        assert_eq!(total(&counters, PacketKind::BarrierRelease), ROUNDS * u64::from(releases));
        let messages: u64 = counters.iter().map(|counters| counters.messages()).sum();
        assert_eq!(messages, 2 * ROUNDS * u64::from(members - 1));
    }
}

#[test]
fn barrier_as_a_future_and_entered_early_completes() {
    run(3, &GroupConfig::new(1), |group| {
        let barrier = group.barrier(0);
        for round in 1..=50 {
            assert_eq!(futures::executor::block_on(barrier.enter().unwrap()).unwrap(), round);
        }
        assert_eq!(barrier.enter().unwrap().wait().unwrap(), 51);
        // Nobody waits for this round here, but this member has arrived.
        drop(barrier.enter().unwrap());
        assert_eq!(barrier.wait().unwrap(), 52, "the same round, which was entered before");
    });
}

#[test]
fn barrier_timeout_names_the_members_that_are_missing() {
    run(4, &GroupConfig::new(1), |group| {
        let barrier = group.barrier(0);
        barrier.wait().unwrap();
        if group.member() == MemberId::new(3) {
            // Late: the group's thread answers the questions meanwhile.
            std::thread::sleep(Duration::from_millis(400));
            barrier.wait().unwrap();
            return;
        }
        let Err(GroupError::BarrierTimedOut { round, missing, .. }) =
            barrier.wait_timeout(Duration::from_millis(50))
        else {
            panic!("member 3 has not entered")
        };
        assert_eq!(round, 2);
        let members: Vec<usize> = missing.iter().map(|report| report.member.index()).collect();
        assert_eq!(members, [3], "{missing:?}");
        assert!(missing[0].to_string().contains("has last entered round 1"), "{}", missing[0]);
        assert_eq!(barrier.wait().unwrap(), 2, "the wait continues the same round");
    });
}

#[test]
fn member_joins_and_leaves_between_rounds() {
    let first: MemberSet = [0, 1].map(MemberId::new).into_iter().collect();
    run(3, &GroupConfig::new(1).barrier_members(first), |group| {
        let barrier = group.barrier(0);
        if group.member() == MemberId::new(2) {
            assert!(matches!(barrier.wait(), Err(GroupError::Barrier(_))), "not a part of it yet");
            barrier.join().unwrap();
            barrier.wait().unwrap();
            assert_eq!(barrier.members().len(), 3);
            barrier.leave().unwrap();
        } else {
            // Every round ends with the same member list for all, so all do the same number of rounds.
            for members in [2, 3] {
                while barrier.members().len() == members {
                    barrier.wait().unwrap();
                }
            }
            barrier.wait().unwrap();
        }
    });
}

#[test]
fn death_of_a_member_ends_the_round_for_all_others_and_names_it() {
    let died = MemberId::new(1);
    run(4, &GroupConfig::new(1), |group| {
        let barrier = group.barrier(0);
        // The one that is expelled may hear of it before its barrier ends.
        assert!(barrier.wait().is_ok() || group.member() == died);
        if group.member() == died {
            return;
        }
        // Member 1 is only dead when its group is dropped, so another member declares it dead.
        if group.member().index() == 0 {
            group.expel(died).unwrap();
        }
        match barrier.wait() {
            Err(GroupError::MembersDied { dead, .. }) => assert_eq!(dead.to_string(), "member 1"),
            other => panic!("{other:?}"),
        }
        barrier.wait().unwrap();
        assert!(group.dead().contains(died));
    });
}
