//! The memory that a shard reports, compared with what it has allocated.

use crosstie_kv::store::Shard;
use crosstie_kv::wire::{BytesOp, Op, Status, WordRequest};
use crosstie_testkit::allocations::{self, LIVE_BYTES};

/// Runs `step` until the shard is full, and compares the two numbers after every step.
fn fill(limit: usize, least: f64, mut step: impl FnMut(&mut Shard, u64) -> Status) {
    let [before, _] = LIVE_BYTES.get();
    LIVE_BYTES.set([before, before]);
    let mut shard = Shard::new(limit);
    let mut refused = 0;
    for n in 0..1_000_000 {
        refused += u32::from(step(&mut shard, n) == Status::OutOfMemory);
        let held = LIVE_BYTES.get().map(|bytes| bytes - before);
        let said = shard.stats().bytes as i64;
        assert!(held[0] <= said, "says {said} bytes and holds {}", held[0]);
        assert!(held[1] <= limit as i64, "held {} of {limit} bytes while it grew", held[1]);
        assert!(said as f64 <= 1.3 * held[0] as f64, "says {said} bytes and holds {} only", held[0]);
        if refused > 100 {
            assert!(held[0] as f64 >= least * limit as f64, "full at {} of {limit} bytes", held[0]);
            drop(shard);
            assert_eq!(LIVE_BYTES.get()[0], before, "not all was given back");
            return;
        }
    }
    panic!("it was never full");
}

fn word(shard: &mut Shard, op: Op, key: u64) -> Status {
    shard.apply(&WordRequest { value: key, ..WordRequest::new(op, 0, key) }).status
}

#[test]
fn reported_memory_of_words_is_correct() {
    fill(4 << 20, 0.9, |shard, n| word(shard, Op::Put, n));
}

#[test]
fn reported_memory_of_byte_strings_is_correct() {
    fill(4 << 20, 0.7, |shard, n| {
        let key = n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes();
        let value = &[0; 512][..(n % 512) as usize];
        let put = |key, value| BytesOp::Put { key, value };
        let status = shard.apply_bytes(&put(&key, value)).status;
        // Change some, delete some.
        let earlier = (n / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes();
        match n % 8 {
            0 => shard.apply_bytes(&BytesOp::Delete { key: &earlier }).status,
            1 => shard.apply_bytes(&put(&earlier, value)).status,
            _ => Status::Done,
        };
        status
    });
}

#[test]
fn words_and_byte_strings_share_one_limit() {
    fill(4 << 20, 0.7, |shard, n| match n % 3 {
        0 => shard.apply_bytes(&BytesOp::Put { key: &n.to_ne_bytes(), value: &[1; 100] }).status,
        _ => word(shard, Op::Put, n),
    });
}

#[test]
fn requests_that_add_nothing_do_not_allocate() {
    let mut shard = Shard::new(16 << 20);
    for key in 0..20_000 {
        assert_eq!(word(&mut shard, Op::Put, key), Status::Done);
        assert_eq!(
            shard.apply_bytes(&BytesOp::Put { key: &key.to_ne_bytes(), value: &[1; 50] }).status,
            Status::Done
        );
    }
    allocations::assert_none(format_args!("requests"), || {
        for key in 0..20_000 {
            for op in [Op::Get, Op::Put, Op::Insert, Op::CompareAndSwap, Op::Delete] {
                word(&mut shard, op, key);
            }
            shard.apply_bytes(&BytesOp::Get { key: &key.to_ne_bytes() });
            shard.apply_bytes(&BytesOp::Put { key: &key.to_ne_bytes(), value: &[2; 50] });
            shard.apply_bytes(&BytesOp::Stats);
        }
    });
}
