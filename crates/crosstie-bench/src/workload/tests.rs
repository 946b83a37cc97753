use std::collections::HashMap;

use super::*;

fn cluster() -> ShardMap {
    ShardMap::new(4, 2).unwrap()
}

fn share(pattern: &Pattern, of: impl Fn(&Entry) -> bool) -> f64 {
    pattern.entries().iter().filter(|entry| of(entry)).count() as f64 / pattern.entries().len() as f64
}

#[test]
fn pattern_depends_only_on_plan_rank_and_client() {
    let plan = Plan { zipf: Some(0.99), local_share: Some(0.5), entries: 1 << 12, ..Plan::default() };
    let other_seed = Plan { seed: 2, ..plan };
    let pattern = |plan: &Plan, rank, client| plan.pattern(&cluster(), rank, client).unwrap();
    assert_eq!(pattern(&plan, 1, 2), pattern(&plan, 1, 2));
    let all = [pattern(&plan, 1, 2), pattern(&plan, 1, 3), pattern(&plan, 2, 2), pattern(&other_seed, 1, 2)];
    let writes = |pattern: &Pattern| pattern.entries().iter().map(|e| e.is_read).collect::<Vec<_>>();
    for (n, one) in all.iter().enumerate() {
        assert!(all[..n].iter().all(|other| one != other && writes(one) != writes(other)));
    }
    // The distribution of keys has no effect on the choice of operations.
    let reads = Plan { keys: 10_000, zipf: None, ..plan };
    assert_eq!(writes(&pattern(&plan, 1, 2)), writes(&pattern(&reads, 1, 2)));
    // A client's numbers are not those of the next client, shifted.
    let keys: Vec<u32> = all[0].entries().iter().map(|entry| entry.key).collect();
    let next: Vec<u32> = all[1].entries().iter().map(|entry| entry.key).collect();
    assert!((0..64).all(|by| keys[by..by + 64] != next[..64]));
}

/// A seed must yield the same pattern in all versions; otherwise results could not be compared.
#[test]
fn pattern_of_a_seed_is_the_same_in_all_versions() {
    let plan =
        Plan { keys: 1000, zipf: Some(0.9), local_share: Some(0.3), entries: 8, seed: 42, ..Plan::default() };
    let pattern = plan.pattern(&cluster(), 1, 2).unwrap();
    let drawn: Vec<_> = pattern.entries().iter().map(|e| (e.key, e.rank, e.daemon, e.is_read)).collect();
    assert_eq!(drawn, DRAWN);
}

const DRAWN: [(u32, u16, u8, bool); 8] = [
    (17, 0, 1, false),
    (157, 1, 0, false),
    (400, 3, 0, true),
    (2, 0, 0, true),
    (113, 2, 0, false),
    (0, 0, 0, false),
    (885, 1, 0, false),
    (543, 2, 1, true),
];

#[test]
fn pattern_has_the_read_and_local_shares_of_the_plan() {
    for (read_ratio, local_share) in [(0.5, None), (0.95, Some(0.8)), (0.0, Some(0.0)), (1.0, Some(1.0))] {
        for zipf in [None, Some(0.99)] {
            let plan = Plan { keys: 10_000, read_ratio, zipf, local_share, ..Plan::default() };
            let pattern = plan.pattern(&cluster(), 2, 0).unwrap();
            assert!((share(&pattern, |e| e.is_read) - read_ratio).abs() < 0.01);
            let local = share(&pattern, |e| e.rank == 2);
            match local_share {
                Some(share) => assert!((local - share).abs() < 0.01, "{local}"),
                None => assert!((0.1..0.5).contains(&local), "{local}"),
            }
        }
    }
    let one_node = ShardMap::new(1, 1).unwrap();
    let plan = Plan { keys: 1, local_share: Some(0.2), ..Plan::default() };
    assert_eq!(share(&plan.pattern(&one_node, 0, 0).unwrap(), |e| e.rank == 0 && e.key == 0), 1.0);
}

#[test]
fn entries_have_the_shard_that_owns_the_key() {
    for value_size in [8, 100] {
        let plan = Plan { keys: 5000, value_size, entries: 1 << 12, ..Plan::default() };
        let pattern = plan.pattern(&cluster(), 0, 0).unwrap();
        for entry in pattern.entries() {
            let shard = match value_size {
                8 => cluster().shard_of_word(entry.key.into()),
                _ => cluster().shard_of_bytes(&key_bytes(entry.key.into())),
            };
            assert_eq!((u32::from(entry.rank), u32::from(entry.daemon)), (shard.rank, shard.daemon));
            assert!(entry.key < 5000);
        }
        // Each key belongs to exactly one node.
        let keys: usize = (0..4).map(|rank| plan.keys_of(&cluster(), rank).count()).sum();
        assert_eq!(keys, 5000);
    }
}

#[test]
fn frequencies_of_keys_follow_the_plan() {
    let count = |zipf| {
        let plan = Plan { keys: 100, zipf, ..Plan::default() };
        let mut counts = HashMap::new();
        for entry in plan.pattern(&cluster(), 0, 0).unwrap().entries() {
            *counts.entry(entry.key).or_insert(0u32) += 1;
        }
        counts
    };
    let uniform = count(None);
    assert!(uniform.len() == 100 && uniform.values().all(|count| (500..820).contains(count)), "{uniform:?}");
    let skewed = count(Some(1.0));
    // The hundredth harmonic number is 5.187.
    assert!((12_100..13_200).contains(&skewed[&0]), "{skewed:?}");
    assert!((skewed[&0] as f64 / skewed[&1] as f64 - 2.0).abs() < 0.1);
}

#[test]
fn pattern_repeats_after_its_last_entry() {
    let pattern = Plan { entries: 16, ..Plan::default() }.pattern(&cluster(), 0, 0).unwrap();
    assert_eq!((pattern.at(3), pattern.at(16 + 3), pattern.at(u64::MAX)), {
        let entries = pattern.entries();
        (entries[3], entries[3], entries[15])
    });
    let entry = Entry { key: 7, rank: 2, daemon: 1, is_read: false };
    assert_eq!(entry.request(9), WordRequest { value: 9, ..WordRequest::new(Op::Put, 2, 7) });
    assert_eq!(Entry { is_read: true, ..entry }.request(9), WordRequest::new(Op::Get, 2, 7));
}

#[test]
fn invalid_plans_are_refused() {
    let plan = Plan::default();
    let refused = |plan: Plan| plan.pattern(&cluster(), 0, 0).unwrap_err();
    assert_eq!(refused(Plan { keys: 0, ..plan }), PlanError::Keys(0));
    assert_eq!(refused(Plan { keys: MAX_KEYS + 1, ..plan }), PlanError::Keys(MAX_KEYS + 1));
    assert!(matches!(refused(Plan { read_ratio: 1.1, ..plan }), PlanError::Share { .. }));
    assert!(matches!(refused(Plan { read_ratio: f64::NAN, ..plan }), PlanError::Share { .. }));
    assert!(matches!(refused(Plan { local_share: Some(-0.1), ..plan }), PlanError::Share { .. }));
    assert_eq!(refused(Plan { zipf: Some(0.0), ..plan }), PlanError::Zipf(0.0));
    assert!(matches!(refused(Plan { zipf: Some(f64::NAN), ..plan }), PlanError::Zipf(_)));
    assert_eq!(refused(Plan { value_size: MAX_VALUE + 1, ..plan }), PlanError::ValueSize(MAX_VALUE + 1));
    assert_eq!(refused(Plan { entries: 3, ..plan }), PlanError::Entries(3));
    assert_eq!(refused(Plan { entries: 0, ..plan }), PlanError::Entries(0));
    assert_eq!(plan.pattern(&cluster(), 4, 0), Err(PlanError::Rank { rank: 4, nodes: 4 }));
    // With one key, one node has no remote keys.
    let rank = cluster().shard_of_word(0).rank;
    let one = Plan { keys: 1, local_share: Some(0.5), ..plan };
    assert_eq!(one.pattern(&cluster(), rank, 0), Err(PlanError::OneSided { rank, kind: "remote", keys: 1 }));
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-320] {
        assert!(matches!(Schedule::new(1, 0, 0, rate), Err(PlanError::Rate(_))), "{rate}");
    }
}

#[test]
fn starts_are_random_at_the_given_rate() {
    let starts = |client| Schedule::new(9, 0, client, 1e6).unwrap().take(100_000).collect::<Vec<u64>>();
    assert_eq!(starts(1), starts(1));
    assert_ne!(starts(1), starts(2));
    let starts = starts(1);
    let gaps: Vec<f64> = starts.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
    // In an exponential distribution the mean equals the standard deviation.
    assert!((990.0..1010.0).contains(&mean) && (980.0..1020.0).contains(&deviation), "{mean} {deviation}");
    // No start is lost at rates with less than a nanosecond between starts.
    let last = Schedule::new(9, 0, 0, 4e9).unwrap().nth(100_000).unwrap();
    assert!((24_500..25_500).contains(&last), "{last}");
}

#[test]
fn clients_request_nearly_all_keys() {
    let cluster = ShardMap::new(1, 1).unwrap();
    for (keys, clients) in [(100_000u64, 8u64), (1 << 20, 4), (1 << 20, 16)] {
        let plan = Plan { keys, ..Plan::default() }.with_entries_for(clients);
        let mut seen = vec![false; keys as usize];
        for client in 0..clients {
            let pattern = plan.pattern(&cluster, 0, client as u32).unwrap();
            pattern.entries().iter().for_each(|entry| seen[entry.key as usize] = true);
        }
        let seen = seen.iter().filter(|seen| **seen).count() as u64;
        assert!(seen * 100 >= keys * 97, "{seen} of {keys}");
        let expected = plan.expected_keys(clients);
        assert!(seen.abs_diff(expected) * 100 <= keys, "{seen} of {keys}, not {expected}");
    }
    // More keys than patterns have entries: the expected number says so.
    let plan = Plan { keys: 1 << 30, ..Plan::default() }.with_entries_for(4);
    assert_eq!(plan.entries, MAX_ENTRIES);
    assert!(plan.expected_keys(4) < 5 << 20);
}
