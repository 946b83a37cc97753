//! Each rule of the protocol is turned off once. The tests must detect it, and must pass with all rules in place.

use std::string::String;
use std::vec::Vec;

use super::BrokenRule;
use super::model::Model;
use super::pair::Pair;
use super::random_schedules::{Step, run, seeded_steps};

/// The first failure in a few hundred random schedules.
fn first_failure(rings: [u64; 2], broken_rule: Option<BrokenRule>) -> Option<String> {
    (0..300).find_map(|seed| {
        let mut next_step = seeded_steps(seed);
        let steps: Vec<Step> = (0..400).map(|_| next_step()).collect();
        run(&mut Pair::new(rings, [1 << 20; 2], 8, broken_rule), &steps).err()
    })
}

#[track_caller]
fn assert_detected(rings: [u64; 2], broken_rule: BrokenRule, texts: &[&str]) {
    assert_eq!(first_failure(rings, None), None, "with all traps closed");
    let failure = first_failure(rings, Some(broken_rule)).expect("the broken rule was not detected");
    assert!(texts.iter().any(|text| failure.contains(text)), "{broken_rule:?} was detected as: {failure}");
}

/// The model must find a side that waits for ever, or a failure that contains `else_text`.
#[track_caller]
fn assert_model_detects(broken_rule: BrokenRule, else_text: &str) {
    let model = Model {
        rings: [256, 256],
        pending: 1,
        calls: &[(0, 0)],
        compact: false,
        broken_rule: Some(broken_rule),
    };
    let failure = model.explore(1_000_000).expect_err("the broken rule was not detected");
    assert!(
        failure.contains("waits for ever") || failure.contains(else_text),
        "{broken_rule:?} was detected as: {failure}"
    );
}

#[test]
fn delta_consumer_position_is_counted_twice_after_a_read() {
    assert_detected([512, 512], BrokenRule::DeltaPosition, &["released more than it has"]);
}

#[test]
fn skip_computed_from_the_offset_frees_a_whole_ring() {
    assert_detected(
        [256, 256],
        BrokenRule::SkipFromOffset,
        &["only", "released more than it has", "announced"],
    );
}

#[test]
fn room_check_without_the_wrap_breaks_the_invariant() {
    assert_detected([512, 512], BrokenRule::RoomWithoutWrap, &["in_flight + 2R <= C"]);
}

#[test]
fn space_released_on_parse_is_overwritten() {
    let run = |broken_rule| {
        let mut pair = Pair::new([512, 512], [1 << 20; 2], 8, broken_rule);
        for _ in 0..50 {
            pair.call(0, 20, 20)?;
            while pair.post(0) {}
            for _ in 0..3 {
                pair.deliver_write(1)?;
                pair.poll(1)?;
            }
            // PairPeer 1 never releases its first request.
            while pair.sides[1].retained.len() > 1 {
                pair.release(1, 1)?;
            }
            while !pair.sides[1].unanswered.is_empty() {
                pair.reply(1, 0, 256)?;
            }
            while pair.post(1) {}
            for _ in 0..3 {
                pair.deliver_write(0)?;
                pair.poll(0)?;
                pair.read(0)?;
            }
            while !pair.sides[0].retained.is_empty() {
                pair.release(0, 0)?;
            }
        }
        pair.finish()
    };
    assert_eq!(run(None), Ok(()), "calls wait until the request is released");
    let failure = run(Some(BrokenRule::ReleaseOnParse)).expect_err("the broken rule was not detected");
    assert!(failure.contains("overwrote a message that is retained"), "{failure}");
}

#[test]
fn reply_longer_than_its_credit_breaks_flow_control() {
    assert_detected([512, 512], BrokenRule::LongReplies, &["in_flight + 2R <= C", "were allowed"]);
}

#[test]
fn credit_from_the_wrong_ring_is_detected_with_unequal_rings() {
    assert_detected([256, 4096], BrokenRule::CreditOfPeerRing, &["credit"]);
}

#[test]
fn side_without_credit_batches_starves_its_peer() {
    assert_model_detects(BrokenRule::SilentWhenIdle, "waits for ever");
}

#[test]
fn starved_side_that_does_not_announce_releases_stays_starved() {
    assert_model_detects(BrokenRule::NeverTellsReleases, "waits for ever");
}

#[test]
fn full_ring_stays_full_without_position_reads() {
    assert_model_detects(BrokenRule::NeverReads, "waits for ever");
}

/// They also break the invariant: a batch that the end of the ring seals grants credit before the call behind it is placed.
#[test]
fn calls_that_use_the_room_for_credit_starve_the_peer() {
    assert_model_detects(BrokenRule::CallsUseCreditRoom, "in_flight + 2R <= C");
}

/// The case that the skip rule is about: a wrap marker in the last 32 bytes of the ring.
#[test]
fn wrap_marker_in_the_last_block_skips_only_that_block() {
    for (broken_rule, fine) in [(None, true), (Some(BrokenRule::SkipFromOffset), false)] {
        let mut pair = Pair::new([256, 256], [1 << 20; 2], 1, broken_rule);
        let mut outcome = Ok(());
        // A round trip of this call advances side 1's ring by 64 bytes, and each batch of credit alone by 32. After some of
        // both there was a marker at every offset.
        for turn in 0..64 {
            outcome = outcome.and_then(|()| pair.call(turn % 2, 20, 20).map(|_| ()));
            outcome = outcome.and_then(|()| pair.round().map(|_| ())).and_then(|()| pair.check());
        }
        outcome = outcome.and_then(|()| pair.finish());
        assert_eq!(outcome.is_ok(), fine, "{broken_rule:?}: {outcome:?}");
        assert!(pair.sides.iter().any(|side| side.writes[1] > 0), "no marker was sent");
    }
}
