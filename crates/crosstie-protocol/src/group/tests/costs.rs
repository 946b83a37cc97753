//! How many messages each operation takes. Exact.

use std::vec::Vec;

use super::super::*;
use super::net::Net;

/// Delivers everything, links in turn, and returns the events of all members.
fn run(net: &mut Net) -> Vec<(usize, Event)> {
    let mut events = Vec::new();
    let mut moved = true;
    while moved {
        moved = false;
        for from in 0..net.members() {
            for to in 0..net.members() {
                if net.can_deliver(from, to) {
                    moved = true;
                    events.extend(net.deliver(from, to).into_iter().map(|event| (to, event)));
                }
            }
        }
    }
    events
}

/// The token of an acquisition in the first view.
fn token(count: u64) -> Token {
    Token { view: 0, count }
}

fn lock(net: &mut Net, member: usize) -> LockOutcome {
    let mut outcome = None;
    net.act(member, |group, out| outcome = Some(group.lock(0, None, out).unwrap()));
    outcome.unwrap()
}

fn unlock(net: &mut Net, member: usize) {
    net.act(member, |group, out| group.unlock(0, out).unwrap());
}

#[test]
fn acquisition_takes_at_most_three_messages_and_a_reacquisition_none() {
    let mut net = Net::new(4, |_| ());
    assert_eq!(lock(&mut net, 2), LockOutcome::Waiting);
    assert_eq!(run(&mut net), [(2, Event::LockAcquired { lock: 0, fence: token(1) })]);
    assert_eq!(net.sent, 2, "the manager was the last holder: request and reply");

    for n in 0..10 {
        unlock(&mut net, 2);
        assert_eq!(lock(&mut net, 2), LockOutcome::Acquired(token(2 + n)));
    }
    assert_eq!(net.sent, 2, "reacquired without a message");

    lock(&mut net, 3);
    assert_eq!(run(&mut net), []);
    assert_eq!(net.sent, 4, "request and forward");
    unlock(&mut net, 2);
    assert_eq!(net.sent, 5, "one message from unlock to lock");
    assert_eq!(run(&mut net), [(3, Event::LockAcquired { lock: 0, fence: token(12) })]);
}

#[test]
fn contended_lock_is_handed_over_in_the_order_of_requests() {
    let mut net = Net::new(5, |_| ());
    for member in [4, 1, 3, 2] {
        lock(&mut net, member);
        run(&mut net);
    }
    let mut order = Vec::from([4]);
    for _ in 0..3 {
        let holder = order[order.len() - 1];
        unlock(&mut net, holder);
        for (member, event) in run(&mut net) {
            assert!(matches!(event, Event::LockAcquired { .. }));
            order.push(member);
        }
    }
    assert_eq!(order, [4, 1, 3, 2]);
    assert!(net.sent <= 3 * 4);
}

#[test]
fn failed_try_lock_is_answered_and_its_place_serves_the_next_try() {
    let mut net = Net::new(3, |_| ());
    lock(&mut net, 1);
    run(&mut net);
    let sent = net.sent;
    net.act(2, |group, out| assert_eq!(group.try_lock(0, out), Ok(LockOutcome::Waiting)));
    assert_eq!(run(&mut net), [(2, Event::LockBusy { lock: 0 })]);
    assert_eq!(net.sent - sent, 3, "request, forward, busy");
    for _ in 0..5 {
        net.act(2, |group, out| assert_eq!(group.try_lock(0, out), Ok(LockOutcome::Busy)));
    }
    assert_eq!(net.sent - sent, 3, "repeated tries send nothing");
    unlock(&mut net, 1);
    run(&mut net);
    net.act(2, |group, out| assert!(matches!(group.try_lock(0, out), Ok(LockOutcome::Acquired(_)))));
    assert_eq!(net.sent - sent, 4);
}

#[test]
fn request_that_timed_out_passes_the_lock_on() {
    let mut net = Net::new(4, |_| ());
    lock(&mut net, 1);
    run(&mut net);
    net.act(2, |group, out| assert_eq!(group.lock(0, Some(100), out), Ok(LockOutcome::Waiting)));
    run(&mut net);
    lock(&mut net, 3);
    run(&mut net);
    assert_eq!(net.groups[2].next_deadline(), Some(100));
    assert_eq!(net.act(2, |group, out| group.expire(99, out)), []);
    assert_eq!(net.act(2, |group, out| group.expire(100, out)), [Event::LockTimedOut { lock: 0 }]);
    assert_eq!(net.groups[2].lock_state(0), Some(LockState::Abandoned));
    unlock(&mut net, 1);
    assert_eq!(run(&mut net), [(3, Event::LockAcquired { lock: 0, fence: token(3) })]);
    assert_eq!(net.groups[2].lock_state(0), Some(LockState::Idle));
}

#[test]
fn barrier_takes_two_messages_for_each_member_but_one() {
    for (members, fanout) in [(1, 2), (2, 2), (3, 2), (4, 3), (17, 2), (64, 8), (1024, 2)] {
        let mut net = Net::new(members, |config| config.tree.fanout = fanout);
        for round in 1..=3 {
            let mut done = 0;
            for member in (0..members).rev() {
                done += net
                    .act(member, |group, out| {
                        assert_eq!(group.enter(0, None, out), Ok(BarrierOutcome::Waiting(round)));
                    })
                    .len();
            }
            let events = run(&mut net);
            assert!(events.iter().all(|(_, event)| *event == Event::BarrierCompleted { barrier: 0, round }));
            assert_eq!(events.len() + done, members);
            assert_eq!(net.sent, round * 2 * (members as u64 - 1), "{members} members");
        }
    }
}

/// The steps of a round that all members enter at the same time: a step delivers all packets that are on their way.
#[test]
fn barrier_takes_one_step_between_two_members_and_at_most_two_for_each_level() {
    for (members, fanout, expected) in
        [(1, 2, 0), (2, 2, 1), (3, 2, 2), (4, 2, 3), (6, 2, 4), (8, 2, 5), (1024, 2, 19), (64, 8, 4)]
    {
        let mut net = Net::new(members, |config| config.tree.fanout = fanout);
        for member in 0..members {
            net.act(member, |group, out| _ = group.enter(0, None, out).unwrap());
        }
        let mut steps = 0;
        loop {
            let pairs = (0..members).flat_map(|from| (0..members).map(move |to| (from, to)));
            let moving: Vec<_> = pairs.filter(|(from, to)| net.can_deliver(*from, *to)).collect();
            if moving.is_empty() {
                break;
            }
            steps += 1;
            for (from, to) in moving {
                net.deliver(from, to);
            }
        }
        assert!(net.groups.iter().all(|group| group.barrier_rounds(0) == Some(1)));
        assert_eq!(steps, expected, "{members} members, fan-out {fanout}");
    }
}

/// The root has told its partner that its side has arrived, and so released that side. A member that asks to join after that takes part
/// from the round after the next on, for all; one that asks before, from the next on.
#[test]
fn change_of_members_reaches_all_in_the_same_round() {
    for asks_before in [true, false] {
        let mut net = Net::new(4, |config| config.barrier_members = (0..3).map(MemberId::new).collect());
        let enter = |net: &mut Net, member: usize| {
            net.act(member, |group, out| _ = group.enter(0, None, out).unwrap())
        };
        let join = |net: &mut Net| {
            net.act(3, |group, out| group.join_barrier(0, out).unwrap());
            assert_eq!(net.deliver(3, 0), []);
        };
        if asks_before {
            join(&mut net);
        }
        enter(&mut net, 2);
        net.deliver(2, 0);
        enter(&mut net, 0);
        assert_eq!(net.can_deliver(0, 1), !asks_before, "told at once, if nothing changes");
        if !asks_before {
            join(&mut net);
        }
        enter(&mut net, 1);
        run(&mut net);
        let members = |net: &Net| -> Vec<usize> {
            net.groups[..3].iter().map(|group| group.barrier_members(0).unwrap().iter().count()).collect()
        };
        assert_eq!(members(&net), [if asks_before { 4 } else { 3 }; 3]);
        (0..3).for_each(|member| _ = enter(&mut net, member));
        if asks_before {
            enter(&mut net, 3);
        }
        run(&mut net);
        assert_eq!(members(&net), [4; 3]);
        assert!(net.groups.iter().all(|group| group.barrier_rounds(0) == Some(2)));
    }
}

/// A program that has dropped a round, and did not see that it had ended, enters the same round again.
#[test]
fn outcome_that_nobody_looked_at_is_given_again() {
    let mut net = Net::new(2, |_| ());
    let enter = |net: &mut Net, member: usize| {
        let mut outcome = None;
        net.act(member, |group, out| outcome = Some(group.enter(0, None, out).unwrap()));
        outcome.unwrap()
    };
    for round in 1..=3 {
        enter(&mut net, 1);
        run(&mut net);
        enter(&mut net, 0);
        run(&mut net);
        for member in 0..2 {
            net.groups[member].return_barrier_outcome(0);
            net.groups[member].return_barrier_outcome(0);
            assert_eq!(enter(&mut net, member), BarrierOutcome::Completed(round));
        }
    }
    enter(&mut net, 0);
    net.groups[0].return_barrier_outcome(0);
    assert!(net.groups[0].cancel_barrier(0), "a round that has not ended is still waited for");
}

/// When all leave, one stays and holds no rounds. It leaves when another one joins.
#[test]
fn last_member_of_a_barrier_stays_until_another_one_joins() {
    for members in [1, 2, 3] {
        let mut net = Net::new(4, |config| {
            config.barrier_members = (0..members).map(MemberId::new).collect();
        });
        for member in 0..members {
            net.act(member, |group, out| group.leave_barrier(0, out).unwrap());
        }
        let left = run(&mut net);
        assert_eq!(left.len(), members - 1);
        assert!(
            left.iter().all(|(member, event)| *member != 0 && *event == Event::BarrierLeft { barrier: 0 })
        );
        let rounds = net.groups[0].barrier_rounds(0).unwrap();
        assert!(rounds <= 2, "{rounds} rounds that nobody asked for");
        net.act(3, |group, out| group.join_barrier(0, out).unwrap());
        let events = run(&mut net);
        assert!(events.contains(&(0, Event::BarrierLeft { barrier: 0 })), "{events:?}");
        assert!(events.contains(&(3, Event::BarrierJoined { barrier: 0, round: rounds + 1 })), "{events:?}");
        let alone = net.act(3, |group, out| _ = group.enter(0, None, out).unwrap());
        assert_eq!(alone, [Event::BarrierCompleted { barrier: 0, round: rounds + 2 }]);
    }
}

#[test]
fn release_of_a_round_that_is_not_the_next_one_is_a_violation() {
    let mut net = Net::new(2, |_| ());
    net.act(1, |group, out| _ = group.enter(0, None, out).unwrap());
    for (round, is_valid) in [(3, false), (2, false), (1, true), (1, true)] {
        let packet = Control::BarrierRelease { barrier: 0, round, active: None };
        let mut handled = None;
        net.act(1, |group, out| handled = Some(group.on_packet(MemberId::new(0), 0, &packet, out)));
        assert_eq!(handled.map(|handled| handled.is_ok()), Some(is_valid), "round {round}");
    }
    assert_eq!(net.groups[1].barrier_rounds(0), Some(1));
}
