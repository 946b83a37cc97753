//! Fencing tokens after two tokens in a row were lost with their holders.

use std::vec::Vec;

use super::super::*;
use super::net::Net;

/// Delivers everything, and returns the events of all members.
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

/// The token with which `member` has just got the lock.
fn token(events: &[(usize, Event)], member: usize) -> Token {
    let mut tokens = events.iter().filter_map(|event| match event {
        (to, Event::LockAcquired { lock: 0, fence }) if *to == member => Some(*fence),
        _ => None,
    });
    tokens.next().unwrap_or_else(|| panic!("member {member} has not got the lock: {events:?}"))
}

/// A member dies, and only the last one notices.
fn die(net: &mut Net, dead: usize) -> Vec<(usize, Event)> {
    net.kill(dead);
    let mut events: Vec<(usize, Event)> = net.notice(3, dead).into_iter().map(|event| (3, event)).collect();
    events.extend(run(net));
    assert!(net.has_one_view());
    events
}

/// Members 1, 2 and 3 of 4 queue for lock 0 (manager 0). 1 dies, 2 gets a minted token and takes the lock `again` times more, 2 dies.
fn tokens(again: u64) -> (Token, Token) {
    let mut net = Net::new(4, |_| ());
    net.act(1, |group, out| assert_eq!(group.lock(0, None, out), Ok(LockOutcome::Waiting)));
    assert_eq!(token(&run(&mut net), 1).count, 1);
    let wait = |net: &mut Net, member: usize| {
        net.act(member, |group, out| assert_eq!(group.lock(0, None, out), Ok(LockOutcome::Waiting)));
        assert_eq!(run(net), []);
    };
    wait(&mut net, 2);
    if again == 0 {
        wait(&mut net, 3);
    }
    let events = die(&mut net, 1);
    let mut of_2 = token(&events, 2);
    for _ in 0..again {
        net.act(2, |group, out| {
            group.unlock(0, out).unwrap();
            match group.lock(0, None, out) {
                Ok(LockOutcome::Acquired(fence)) => of_2 = fence,
                other => panic!("{other:?}"),
            }
        });
    }
    if again > 0 {
        wait(&mut net, 3);
    }
    let events = die(&mut net, 2);
    (of_2, token(&events, 3))
}

#[test]
fn tokens_rise_after_two_lost_tokens() {
    let (of_2, of_3) = tokens(0);
    assert!(of_3 > of_2, "token {of_3} of the new holder is not above {of_2} of the dead one");
}

#[test]
fn tokens_rise_after_two_lost_tokens_and_reacquisitions() {
    let (of_2, of_3) = tokens(5);
    assert!(of_3 > of_2, "token {of_3} of the new holder is not above {of_2} of the dead one");
}
