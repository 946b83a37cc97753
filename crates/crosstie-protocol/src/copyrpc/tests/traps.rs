//! Each trap, reopened: the tests that guard it must notice. And the same tests, with all traps closed, are content.

use std::string::String;
use std::vec::Vec;

use super::Trap;
use super::model::World;
use super::pair::Pair;
use super::random::{Step, draws, run};

/// What goes wrong first in a few hundred random schedules.
fn first_failure(rings: [u64; 2], trap: Option<Trap>) -> Option<String> {
    (0..300).find_map(|seed| {
        let mut draw = draws(seed);
        let steps: Vec<Step> = (0..400).map(|_| draw()).collect();
        run(&mut Pair::new(rings, [1 << 20; 2], 8, trap), &steps).err()
    })
}

#[track_caller]
fn caught(rings: [u64; 2], trap: Trap, texts: &[&str]) {
    assert_eq!(first_failure(rings, None), None, "with all traps closed");
    let failure = first_failure(rings, Some(trap)).expect("nobody noticed the trap");
    assert!(texts.iter().any(|text| failure.contains(text)), "{trap:?} was noticed by: {failure}");
}

/// The model finds a side that waits for ever, or what `else_text` says.
#[track_caller]
fn stuck(trap: Trap, else_text: &str) {
    let world = World { rings: [256, 256], pending: 1, calls: &[(0, 0)], trap: Some(trap) };
    let failure = world.explore(1_000_000).expect_err("nobody noticed the trap");
    assert!(
        failure.contains("waits for ever") || failure.contains(else_text),
        "{trap:?} was noticed by: {failure}"
    );
}

#[test]
fn a_consumer_position_as_a_delta_counts_twice_with_a_read() {
    caught([512, 512], Trap::DeltaPosition, &["released more than it has"]);
}

#[test]
fn a_skip_from_the_offset_frees_a_whole_ring() {
    caught([256, 256], Trap::SkipFromOffset, &["only", "released more than it has", "announced"]);
}

#[test]
fn room_without_the_wrap_breaks_the_invariant() {
    caught([512, 512], Trap::RoomWithoutWrap, &["in_flight + 2R <= C"]);
}

#[test]
fn space_credited_on_parse_is_overwritten() {
    let run = |trap| {
        let mut pair = Pair::new([512, 512], [1 << 20; 2], 8, trap);
        for _ in 0..50 {
            pair.call(0, 20, 20)?;
            while pair.emit(0) {}
            for _ in 0..3 {
                pair.land(1)?;
                pair.poll(1)?;
            }
            // Side 1 keeps its first request for good.
            while pair.sides[1].held.len() > 1 {
                pair.release(1, 1)?;
            }
            while !pair.sides[1].owed.is_empty() {
                pair.reply(1, 0, 256)?;
            }
            while pair.emit(1) {}
            for _ in 0..3 {
                pair.land(0)?;
                pair.poll(0)?;
                pair.read(0)?;
            }
            while !pair.sides[0].held.is_empty() {
                pair.release(0, 0)?;
            }
        }
        pair.finish()
    };
    assert_eq!(run(None), Ok(()), "calls wait until the request is released");
    let failure = run(Some(Trap::CreditOnParse)).expect_err("nobody noticed the trap");
    assert!(failure.contains("landed on a message that is held"), "{failure}");
}

#[test]
fn a_reply_beyond_its_allowance_breaks_the_books() {
    caught([512, 512], Trap::LongReplies, &["in_flight + 2R <= C", "were allowed"]);
}

#[test]
fn unequal_rings_need_credit_by_the_smaller() {
    caught([256, 4096], Trap::CreditOfOwnRing, &["credit"]);
}

#[test]
fn a_failed_post_that_keeps_credit_leaks_it() {
    caught([512, 512], Trap::RollbackKeepsCredit, &["credit leaked", "can never make", "waits for ever"]);
}

#[test]
fn a_side_that_is_silent_when_idle_starves_its_peer() {
    stuck(Trap::SilentWhenIdle, "waits for ever");
}

#[test]
fn a_starved_side_that_does_not_say_what_it_released_stays_starved() {
    stuck(Trap::NeverTells, "waits for ever");
}

#[test]
fn without_reads_a_full_ring_stays_full() {
    stuck(Trap::NeverRead, "waits for ever");
}

/// They also break the invariant: what the ring's end seals grants credit before the call behind it is placed.
#[test]
fn calls_that_eat_the_room_of_credit_starve_the_peer() {
    stuck(Trap::CallsEatCredit, "in_flight + 2R <= C");
}

/// The case the skip rule is about, by hand: a marker in the last 32 bytes of the ring.
#[test]
fn a_marker_in_the_last_block_skips_that_block() {
    for (trap, fine) in [(None, true), (Some(Trap::SkipFromOffset), false)] {
        let mut pair = Pair::new([256, 256], [1 << 20; 2], 1, trap);
        let mut outcome = Ok(());
        // A round trip of this call moves side 1's ring by 64 bytes and by 32 with each batch of credit alone; a few
        // of both, and some marker sits at every offset.
        for turn in 0..64 {
            outcome = outcome.and_then(|()| pair.call(turn % 2, 20, 20).map(|_| ()));
            outcome = outcome.and_then(|()| pair.round().map(|_| ())).and_then(|()| pair.check());
        }
        outcome = outcome.and_then(|()| pair.finish());
        assert_eq!(outcome.is_ok(), fine, "{trap:?}: {outcome:?}");
        assert!(pair.sides.iter().any(|side| side.emitted[1] > 0), "no marker was sent");
    }
}
