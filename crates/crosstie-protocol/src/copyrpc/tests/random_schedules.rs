//! Random schedules of two sides, for all valid sizes.

use proptest::prelude::*;
use std::vec::Vec;

use super::super::MIN_RING;
use super::BrokenRule;
use super::pair::{Outcome, Pair};

/// One step of a schedule: an action, the side that does it, and two numbers that choose sizes or messages.
pub(super) type Step = (u8, bool, u16, u16);

pub(super) fn step() -> impl Strategy<Value = Step> {
    (0u8..32, any::<bool>(), any::<u16>(), any::<u16>())
}

/// A payload length from zero to the longest; small ones are as frequent as large ones.
fn length(longest: usize, draw: u16) -> usize {
    let share = usize::from(draw >> 2);
    match draw % 4 {
        0 => longest.min(share % 64),
        1 => longest,
        2 => longest.min(share) / 4,
        _ => longest * share / (1 << 14),
    }
}

pub(super) fn run(pair: &mut Pair, steps: &[Step]) -> Outcome {
    for &(what, side, x, y) in steps {
        let me = usize::from(side);
        let pick = |len: usize| usize::from(x) % len;
        match what {
            0..=7 => {
                let flow = &pair.sides[me].flow;
                let (len, response) = (length(flow.max_request_len(), x), length(flow.max_response_len(), y));
                pair.call(me, len, response)?;
            }
            8..=13 if !pair.sides[me].unanswered.is_empty() => {
                let index = pick(pair.sides[me].unanswered.len());
                pair.reply(me, index, u64::from(y % 300))?;
            }
            14..=18 if !pair.sides[me].retained.is_empty() => {
                let index = pick(pair.sides[me].retained.len());
                pair.release(me, index)?;
            }
            19..=22 => {
                pair.post(me);
            }
            23..=25 => pair.deliver_write(me)?,
            26..=28 => pair.poll(me)?,
            29 | 30 => pair.read(me)?,
            31 if y % 4 == 0 => pair.fail_post(me)?,
            _ => {}
        }
        pair.check()?;
    }
    pair.finish()
}

fn rings() -> impl Strategy<Value = [u64; 2]> {
    let size = || (0u32..=8).prop_map(|power| MIN_RING << power);
    prop_oneof![size().prop_map(|size| [size, size]), (size(), size()).prop_map(|(a, b)| [a, b])]
}

fn case(
    rings: [u64; 2],
    shares: [u8; 2],
    pending: usize,
    steps: &[Step],
    broken_rule: Option<BrokenRule>,
) -> Outcome {
    // From the smallest valid limit to more than the peer's ring allows.
    let limits = [0, 1].map(|i| 64 + rings[1 - i] * u64::from(shares[i]) / 512);
    run(&mut Pair::new(rings, limits, pending, broken_rule), steps)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6 * ProptestConfig::default().cases))]

    /// Every call is answered once with its own bytes, no byte changes before its release, the invariant holds on both
    /// sides after every step, and both sides become idle. Posts that fail are tried again.
    #[test]
    fn every_call_is_answered_once_under_any_schedule(
        rings in rings(),
        shares in any::<[u8; 2]>(),
        pending in 1usize..40,
        steps in proptest::collection::vec(step(), 0..400),
    ) {
        let outcome = case(rings, shares, pending, &steps, None);
        prop_assert!(outcome.is_ok(), "{:?}", outcome);
    }
}

/// The same with long schedules on small rings. The seed is printed.
#[test]
fn every_call_is_answered_once_under_long_schedules() {
    let seed = std::env::var("CROSSTIE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0xc0_91_7c_01);
    std::println!("seed {seed} (set CROSSTIE_SEED to repeat)");
    for (index, rings) in
        [[256, 256], [256, 1024], [512, 256], [512, 512], [4096, 512]].into_iter().enumerate()
    {
        let mut next_step = seeded_steps(seed + index as u64);
        let steps: Vec<Step> = (0..100_000).map(|_| next_step()).collect();
        for limit in [64, 1 << 20] {
            let mut pair = Pair::new(rings, [limit; 2], 8, None);
            run(&mut pair, &steps).unwrap_or_else(|error| panic!("{rings:?}, limit {limit}: {error}"));
            let [answered, writes, reads] = [
                pair.sides.each_ref().map(|side| side.answered),
                pair.sides.each_ref().map(|side| side.writes.iter().sum()),
                pair.sides.each_ref().map(|side| side.reads),
            ];
            std::println!("{rings:?}, limit {limit}: {answered:?} calls, {writes:?} WRITEs, {reads:?} READs");
            assert!(answered.iter().all(|calls| *calls > 300), "hardly any calls were answered");
        }
    }
}

/// Steps from a seed (splitmix64).
pub(super) fn seeded_steps(seed: u64) -> impl FnMut() -> Step {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((z & 31) as u8, z & 32 != 0, (z >> 16) as u16, (z >> 32) as u16)
    }
}
