use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::wire::BytesOp;

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => Just(Op::Get),
        4 => Just(Op::Put),
        1 => Just(Op::Delete),
        2 => Just(Op::Insert),
        2 => Just(Op::CompareAndSwap)
    ]
}

/// The status that a store with unlimited memory would return, and the value that the key would have then.
fn expected<V: Clone + PartialEq>(
    op: Op,
    current: Option<&V>,
    expected: &V,
    value: &V,
) -> (Status, Option<V>) {
    match (op, current) {
        (Op::Get, Some(current)) => (Status::Done, Some(current.clone())),
        (Op::Put, _) | (Op::Insert, None) => (Status::Done, Some(value.clone())),
        (Op::Delete, Some(_)) => (Status::Done, None),
        (Op::Insert, Some(current)) => (Status::Mismatch, Some(current.clone())),
        (Op::CompareAndSwap, Some(current)) if current == expected => (Status::Done, Some(value.clone())),
        (Op::CompareAndSwap, Some(current)) => (Status::Mismatch, Some(current.clone())),
        (Op::Get | Op::Delete | Op::CompareAndSwap, None) => (Status::NotFound, None),
    }
}

fn set<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    };
}

proptest! {
    #[test]
    fn words_behave_as_a_map(steps in prop::collection::vec((op(), 0u64..24, 0u64..4, 0u64..4), 0..300)) {
        let mut shard = Shard::new(1 << 20);
        let mut oracle = BTreeMap::new();
        for (op, key, value, wanted) in steps {
            let response = shard.apply(&WordRequest { value, expected: wanted, ..WordRequest::new(op, 0, key) });
            let (status, new) = expected(op, oracle.get(&key), &wanted, &value);
            let has_value = matches!(status, Status::Mismatch) || op == Op::Get;
            prop_assert_eq!(response, WordResponse::new(status, new.filter(|_| has_value).unwrap_or(0)));
            set(&mut oracle, key, new);
            prop_assert_eq!(shard.stats().words, oracle.len() as u64);
        }
    }

    /// When the limit is reached, a byte string is stored completely or the shard does not change.
    #[test]
    fn byte_strings_behave_as_a_map_within_the_limit(
        steps in prop::collection::vec((op(), 0usize..300, prop_oneof![0usize..40, 0usize..4000], any::<bool>()), 0..400),
    ) {
        let limit = 150_000;
        let mut shard = Shard::new(limit);
        let mut oracle: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for (n, (op, key, len, right)) in steps.into_iter().enumerate() {
            let key = vec![key as u8; key];
            let value = vec![n as u8; len];
            let wanted = if right { oracle.get(&key).cloned().unwrap_or_default() } else { vec![9; 2] };
            let bytes_op = match op {
                Op::Get => BytesOp::Get { key: &key },
                Op::Put => BytesOp::Put { key: &key, value: &value },
                Op::Delete => BytesOp::Delete { key: &key },
                Op::Insert => BytesOp::Insert { key: &key, value: &value },
                Op::CompareAndSwap => BytesOp::CompareAndSwap { key: &key, expected: &wanted, value: &value },
            };
            let (status, new) = expected(op, oracle.get(&key), &wanted, &value);
            let before = shard.stats().bytes as usize;
            let response = shard.apply_bytes(&bytes_op);
            if response.status == Status::OutOfMemory {
                prop_assert!(status == Status::Done && response.value.is_empty());
                // There was indeed no memory for the byte string, or for one more segment with it.
                prop_assert!(before + key.len() + value.len() + 40_000 > limit, "refused at {} bytes", before);
            } else {
                prop_assert_eq!(response.status, status);
                let has_value = matches!(status, Status::Mismatch) || op == Op::Get;
                prop_assert_eq!(response.value, new.as_deref().filter(|_| has_value).unwrap_or_default());
                set(&mut oracle, key, new);
            }
            let stats = shard.stats();
            prop_assert!(stats.bytes <= limit as u64);
            prop_assert_eq!(stats.strings, oracle.len() as u64);
        }
        for (key, value) in &oracle {
            prop_assert_eq!(shard.apply_bytes(&BytesOp::Get { key }).value, &value[..]);
        }
    }
}

proptest! {
    /// The oracle: a value and the newest token of each key.
    #[test]
    fn older_tokens_change_nothing(
        steps in prop::collection::vec((0u8..4, 0u8..3, (0u64..3, 0u64..3), any::<u8>()), 0..100),
    ) {
        let mut shard = Shard::new(1 << 20);
        let mut values: BTreeMap<u8, u8> = BTreeMap::new();
        let mut newest: BTreeMap<u8, Token> = BTreeMap::new();
        for (kind, key, (view, count), value) in steps {
            let token = Token { view, count };
            let (name, bytes) = ([key], token.to_bytes());
            let token_bytes = wire::Token::new(&bytes);
            let op = match kind {
                0 => BytesOp::FencedPut { key: &name, token: token_bytes, value: &[value] },
                1 => BytesOp::FencedDelete { key: &name, token: token_bytes },
                2 => BytesOp::Fence { key: &name, token: token_bytes },
                _ => BytesOp::Put { key: &name, value: &[value] },
            };
            let response = shard.apply_bytes(&op);
            let (status, returned) = (response.status, response.value.to_vec());
            if kind == 3 {
                prop_assert_eq!(status, Status::Done, "requests without a token are not concerned");
                values.insert(key, value);
            } else if newest.get(&key).is_some_and(|newest| *newest > token) {
                prop_assert_eq!((status, returned), (Status::Fenced, newest[&key].to_bytes().to_vec()));
            } else {
                newest.insert(key, token);
                let existed = values.contains_key(&key);
                match kind {
                    0 => _ = values.insert(key, value),
                    1 => _ = values.remove(&key),
                    _ => {}
                }
                prop_assert_eq!(status, if kind == 1 && !existed { Status::NotFound } else { Status::Done });
            }
            for key in 0..3u8 {
                let found = shard.apply_bytes(&BytesOp::Get { key: &[key] }).value.first().copied();
                prop_assert_eq!(found, values.get(&key).copied());
            }
        }
    }
}

#[test]
fn all_words_are_found_after_growing_and_deleting() {
    let mut shard = Shard::new(64 << 20);
    let keys = 100_000;
    let get = |shard: &mut Shard, key| shard.apply(&WordRequest::new(Op::Get, 0, key));
    for key in 0..keys {
        let put = WordRequest { value: !key, ..WordRequest::new(Op::Put, 0, key) };
        assert_eq!(shard.apply(&put), WordResponse::new(Status::Done, 0));
    }
    assert!((0..keys).all(|key| get(&mut shard, key) == WordResponse::new(Status::Done, !key)));
    for key in (0..keys).filter(|key| key % 3 == 0) {
        assert_eq!(shard.apply(&WordRequest::new(Op::Delete, 0, key)).status, Status::Done);
    }
    assert!((0..keys).all(|key| (get(&mut shard, key).status == Status::Done) == (key % 3 != 0)));
    let stats = shard.stats();
    assert_eq!(stats.words, keys - keys.div_ceil(3));
    assert_eq!((stats.gets, stats.puts, stats.deletes), (2 * keys, keys, keys.div_ceil(3)));
    assert_eq!(stats.hits, keys + stats.words);
}

#[test]
fn full_shard_refuses_only_new_words() {
    let mut shard = Shard::new(1 << 20);
    let put = |key, value| WordRequest { value, ..WordRequest::new(Op::Put, 0, key) };
    let full = (0..).find(|&key| shard.apply(&put(key, 1)).status == Status::OutOfMemory).unwrap();
    // 16 bytes per key, in segments that are between 40 % and 80 % full.
    assert!((26_000..53_000).contains(&full), "{full}");
    assert!((0..full).all(|key| shard.apply(&put(key, 2)).status == Status::Done));
    assert_eq!(shard.apply(&WordRequest::new(Op::Get, 0, full)).status, Status::NotFound);
    assert!((0..full).all(|key| shard.apply(&WordRequest::new(Op::Get, 0, key)).value == 2));
    assert_eq!(shard.apply(&WordRequest::new(Op::Insert, 0, full)).status, Status::OutOfMemory);
    assert_eq!(shard.stats().out_of_memory, 2);
    assert!(shard.stats().bytes <= 1 << 20);
    // New keys use the slots of deleted keys.
    let deleted =
        (0..full).all(|key| shard.apply(&WordRequest::new(Op::Delete, 0, key)).status == Status::Done);
    assert!(deleted && shard.apply(&put(full, 3)).status == Status::Done);
}

/// A fenced put whose value does not fit, or is too long: older tokens are still accepted, and no memory is taken.
#[test]
fn fenced_put_that_fails_changes_nothing() {
    let mut shard = Shard::new(1 << 20);
    let value = vec![1; wire::MAX_VALUE + 1];
    let tokens = [4, 5].map(|count| Token { view: 1, count }.to_bytes());
    let [older, newer] = tokens.each_ref().map(wire::Token::new);
    // The table of tokens has memory before the values take the rest.
    assert_eq!(shard.apply_bytes(&BytesOp::Fence { key: b"any", token: older }).status, Status::Done);
    let fill = |number: u32| number.to_le_bytes();
    let full = (0..).find(|&number| {
        let put = BytesOp::Put { key: &fill(number), value: &value[..10_000] };
        shard.apply_bytes(&put).status == Status::OutOfMemory
    });
    // Room for a token.
    assert_eq!(shard.apply_bytes(&BytesOp::Delete { key: &fill(full.unwrap() - 1) }).status, Status::Done);
    let fences = |shard: &Shard| shard.fences.len();
    for value in [&value[..60_000], &value] {
        for (key, fenced) in [(b"new", 0), (b"old", 1)] {
            if fenced == 1 {
                let fence = BytesOp::Fence { key, token: older };
                assert_eq!(shard.apply_bytes(&fence).status, Status::Done);
            }
            let before = (fences(&shard), shard.fences.allocated(), shard.stats().strings);
            let failed = shard.apply_bytes(&BytesOp::FencedPut { key, token: newer, value }).status;
            assert!(matches!(failed, Status::OutOfMemory | Status::Malformed), "{failed:?}");
            assert_eq!((fences(&shard), shard.fences.allocated(), shard.stats().strings), before);
            let fence = BytesOp::Fence { key, token: older };
            if fenced == 1 {
                assert_eq!(
                    shard.apply_bytes(&fence).status,
                    Status::Done,
                    "an older token is still the newest"
                );
            }
        }
    }
}

#[test]
fn shard_with_limit_zero_stores_nothing() {
    let mut shard = Shard::new(0);
    assert_eq!(shard.apply(&WordRequest::new(Op::Get, 0, 1)).status, Status::NotFound);
    assert_eq!(shard.apply(&WordRequest::new(Op::Delete, 0, 1)).status, Status::NotFound);
    assert_eq!(shard.apply(&WordRequest::new(Op::Put, 0, 1)).status, Status::OutOfMemory);
    let put = BytesOp::Put { key: b"", value: b"" };
    assert_eq!(shard.apply_bytes(&put).status, Status::OutOfMemory);
    assert_eq!(shard.apply_bytes(&BytesOp::Get { key: b"" }).status, Status::NotFound);
    assert_eq!(shard.stats().bytes, 0);
}

#[test]
fn apply_bytes_checks_lengths_and_rejects_info() {
    let mut shard = Shard::new(8 << 20);
    let value = vec![1; wire::MAX_VALUE + 1];
    let put = |value| BytesOp::Put { key: b"key", value };
    assert_eq!(shard.apply_bytes(&put(&value)).status, Status::Malformed);
    assert_eq!(shard.apply_bytes(&put(&value[1..])).status, Status::Done);
    assert_eq!(shard.apply_bytes(&BytesOp::Get { key: b"key" }).value, &value[1..]);
    assert_eq!(shard.apply_bytes(&BytesOp::Get { key: b"other" }).status, Status::NotFound);
    assert_eq!(shard.apply_bytes(&BytesOp::Info).status, Status::Misrouted);
    let stats = shard.stats();
    assert_eq!(ShardStats::read_from_bytes(shard.apply_bytes(&BytesOp::Stats).value).unwrap(), stats);
    assert_eq!((stats.strings, stats.puts, stats.gets, stats.hits), (1, 2, 2, 1));
}

/// The quick way of a get or put works for nearly all keys, also shortly before segments are split.
#[test]
fn nearly_all_keys_are_in_the_first_group_of_their_search() {
    let mut shard = Shard::new(64 << 20);
    for keys in (10_000..=100_000).step_by(10_000) {
        for key in 1..=keys {
            let put = WordRequest { value: key, ..WordRequest::new(Op::Put, 0, key) };
            assert_eq!(shard.apply(&put).status, Status::Done);
        }
        let is_at_home = |shard: &mut Shard, key: u64| {
            let hash = shard.seed.hash_word(key);
            shard.words.get_mut_at_home(hash, |slot| slot[0] == key).is_some()
        };
        let at_home = (1..=keys).filter(|key| is_at_home(&mut shard, *key)).count() as u64;
        assert!(at_home * 100 > keys * 85, "{at_home} of {keys}");
    }
}
