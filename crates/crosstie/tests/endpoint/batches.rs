//! Batches: exact bytes, joined blocks, announcements, and failures by block number.

use crosstie::device::Status;
use crosstie::endpoint::{Batch, BatchError, Cause, EndpointConfig, NotStarted, Progress, Strided};
use crosstie_testkit::rng::{Random, seed};

use super::pair::{HANG, Pair, config, configs, filled, pattern};

/// Random blocks over several buffers and regions, written and read back, compared with a model.
#[test]
fn random_blocks_move_exactly() {
    let mut random = Random(seed());
    for config in configs() {
        let pair = Pair::new(&config);
        for round in 0..10u8 {
            let (len, pieces) = (1 << 16, 300);
            let targets = [filled(&pair.there, len, 1), filled(&pair.there, len, 2)];
            let mut model = [1, 2].map(|seed| pattern(len, seed));
            let source = [7, 8].map(|seed| pattern(len, seed ^ round));
            let mut batch = Batch::new();
            let locals = [7, 8].map(|seed| batch.local(filled(&pair.here, len, seed ^ round)));
            let remotes = targets.each_ref().map(|target| batch.remote(target.remote()));
            // Remote ranges do not overlap, because blocks of several queue pairs have no order.
            let mut next = [0; 2];
            while batch.blocks() < pieces {
                let (from, to) = (random.index(2), random.index(2));
                let block = 1 + random.index(if round % 2 == 0 { 60 } else { 200 });
                let count = [1, 1, 5][random.index(3)];
                let (gap, local_gap) = ([0, 0, 24][random.index(3)], [0, 0, 40][random.index(3)]);
                let at = next[to] + [0, 0, 16][random.index(3)];
                let end = at + count * (block + gap);
                if end > len {
                    break;
                }
                let local = random.index(len - count * (block + local_gap));
                next[to] = end;
                let strided = Strided {
                    count: count as u32,
                    block,
                    local: (local, block + local_gap),
                    remote: (at as u64, (block + gap) as u64),
                };
                batch.strided(locals[from], remotes[to], strided).unwrap();
                for piece in 0..count {
                    let (l, r) = (local + piece * (block + local_gap), at + piece * (block + gap));
                    model[to][r..r + block].copy_from_slice(&source[from][l..l + block]);
                }
            }
            let blocks = batch.blocks();
            let done = pair.here.write_batch(batch).unwrap().wait().unwrap();
            assert!(done.buffer.failures().is_empty() && done.buffer.blocks() == blocks);
            assert!(done.buffer.work_requests() <= done.buffer.pieces().max(1) + done.bytes / 4096 + 1);
            for (target, expected) in targets.iter().zip(&model) {
                assert!(target.to_vec() == *expected, "round {round}, {} queue pairs", config.qps);
            }
            // Read everything back into one buffer.
            let mut batch = Batch::new();
            let local = batch.local(pair.here.allocate(2 * len).unwrap());
            for (number, target) in targets.iter().enumerate() {
                let remote = batch.remote(target.remote());
                for block in 0..len / 64 {
                    let place = number * len + (len / 64 - 1 - block) * 64;
                    batch.block(local, place, remote, (block * 64) as u64, 64).unwrap();
                }
            }
            let done = pair.here.read_batch(batch).unwrap().wait().unwrap();
            let bytes = done.buffer.into_buffers().remove(0).to_vec();
            for (number, expected) in model.iter().enumerate() {
                for block in 0..len / 64 {
                    let place = number * len + (len / 64 - 1 - block) * 64;
                    assert_eq!(bytes[place..place + 64], expected[block * 64..block * 64 + 64]);
                }
            }
        }
        pair.assert_empty();
    }
}

/// Operations that are larger than a cache are copied in another way: batches, and transfers in one and in several parts.
#[test]
fn transfers_larger_than_a_cache_move_exactly() {
    let (len, block) = ((32 << 20) + 4096, 16 << 10);
    for config in configs() {
        let pair = Pair::new(&config);
        let (target, expected) = (filled(&pair.there, len, 1), pattern(len, 9));
        let mut batch = Batch::new();
        let (local, remote) = (batch.local(filled(&pair.here, len, 9)), batch.remote(target.remote()));
        let whole = len / block;
        for at in (0..whole).rev() {
            // An odd distance, so that no two blocks can be joined.
            let at = (at * 7 % whole) * block;
            batch.block(local, at, remote, at as u64, block).unwrap();
        }
        let rest = len - whole * block;
        batch.block(local, len - rest, remote, (len - rest) as u64, rest).unwrap();
        let done = pair.here.write_batch(batch).unwrap().wait().unwrap();
        assert!(target.to_vec() == expected, "batch, {} queue pairs", config.qps);
        let buffer = done.buffer.into_buffers().remove(0);
        buffer.write(0, &vec![0; len]).unwrap();
        let read = pair.here.read(buffer, .., &target.remote(), 0).unwrap().wait().unwrap();
        assert!(read.buffer.to_vec() == expected, "read, {} queue pairs", config.qps);
        target.write(0, &vec![0; len]).unwrap();
        pair.here.write(read.buffer, .., &target.remote(), 0).unwrap().wait().unwrap();
        assert!(target.to_vec() == expected, "write, {} queue pairs", config.qps);
        drop(target);
        pair.assert_empty();
    }
}

/// Each layer is announced when it is in the peer's memory, also with more layers than the peer has room for announcements.
#[test]
fn announced_blocks_are_there_before_their_announcement() {
    for config in configs() {
        let (layers, blocks, block) = (32, 40, 512);
        let pair = Pair::new(&EndpointConfig { imm_window: 4, ..config });
        let target = pair.there.allocate(layers * blocks * block).unwrap();
        let mut batch = Batch::new();
        let local = batch.local(filled(&pair.here, layers * blocks * block, 9));
        let remote = batch.remote(target.remote());
        let expected = pattern(layers * blocks * block, 9);
        for layer in 0..layers {
            for page in 0..blocks {
                let (from, to) =
                    ((layer * blocks + page) * block, (layer * blocks + (page * 7) % blocks) * block);
                batch.block(local, from, remote, to as u64, block).unwrap();
            }
            batch.announce(layer as u32).unwrap();
        }
        let write = pair.here.write_batch(batch).unwrap();
        let mut seen = vec![false; layers];
        for _ in 0..layers {
            let recv = pair.there.imm_recv().unwrap();
            pair.run_until(|| recv.is_ended());
            let layer = recv.wait().unwrap().imm.unwrap() as usize;
            assert!(!std::mem::replace(&mut seen[layer], true));
            let mut bytes = vec![0; blocks * block];
            target.read(layer * blocks * block, &mut bytes).unwrap();
            for page in 0..blocks {
                let from = (layer * blocks + page) * block;
                let to = (page * 7) % blocks * block;
                assert!(bytes[to..to + block] == expected[from..from + block], "layer {layer}, page {page}");
            }
        }
        pair.run_until(|| write.is_ended());
        write.wait().unwrap();
        assert_eq!(pair.there.counters().empty_receive_queues, 0);
        pair.assert_empty();
    }
}

#[test]
fn failed_blocks_are_named_with_their_cause() {
    for config in configs() {
        let pair = Pair::new(&config);
        let good = pair.there.allocate(4096).unwrap();
        let mut forged = good.remote();
        forged.rkey ^= 0x77;
        let mut batch = Batch::new();
        let local = batch.local(filled(&pair.here, 4096, 3));
        let (fine, bad) = (batch.remote(good.remote()), batch.remote(forged));
        for block in 0..40 {
            // Not adjacent, so every block is a request of its own.
            batch
                .block(local, block * 64, if block == 25 { bad } else { fine }, 4000 - 100 * block as u64, 50)
                .unwrap();
        }
        let write = pair.here.write_batch(batch).unwrap();
        pair.run_until(|| write.is_ended());
        let mut failed = write.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::RemoteAccess(Status::RemoteAccess), "{failed}");
        assert!(failed.peer.is_some());
        pair.run_until(|| failed.buffer.try_take().map(|batch| check_failures(&batch, config.qps)).is_some());
        pair.assert_empty();
    }
}

fn check_failures(batch: &Batch, qps: u8) {
    let failures = batch.failures();
    let of = |block: u32| failures.iter().find(|failed| failed.blocks.contains(&block));
    let bad = of(25).expect("block 25 failed");
    assert_eq!(
        (bad.cause, bad.is_retryable(), bad.blocks.len()),
        (Cause::RemoteAccess(Status::RemoteAccess), false, 1)
    );
    for block in (0..25).filter(|_| qps == 1) {
        assert!(of(block).is_none(), "block {block} was before it");
    }
    for failed in failures.iter().filter(|failed| failed.blocks != (25..26)) {
        assert!(failed.is_retryable(), "{failed:?}");
    }
    assert!(of(39).is_some() || qps > 1, "behind it");
}

/// Whether a block is among the failed ones.
fn has_failed(batch: &Batch, block: u32) -> bool {
    batch.failures().iter().any(|failed| failed.blocks.contains(&block))
}

/// Adjacent blocks of different lengths are joined, and cut into one request for each queue pair. The last requests fail, because the region
/// is shorter than the peer has said. Exactly their blocks are named.
#[test]
fn failed_blocks_that_were_joined_are_named_exactly() {
    for progress in [Progress::Caller, Progress::Thread] {
        let pair = Pair::new(&config(4, progress));
        let (bytes, there) = (128 << 10, 64 << 10);
        let target = pair.there.allocate(there).unwrap();
        let mut longer = target.remote();
        longer.len = bytes as u64;
        let mut batch = Batch::new();
        let (local, remote) = (batch.local(filled(&pair.here, bytes, 3)), batch.remote(longer));
        let mut ends = Vec::new();
        let mut at = 0;
        for len in [1000, 3000, 96].into_iter().cycle().take(96) {
            batch.block(local, at, remote, at as u64, len).unwrap();
            at += len;
            ends.push(at);
        }
        assert_eq!((at, batch.pieces()), (bytes, 1));
        let write = pair.here.write_batch(batch).unwrap();
        pair.run_until(|| write.is_ended());
        let failed = write.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::RemoteAccess(Status::RemoteAccess), "{failed}");
        let batch = failed.buffer.wait_for(HANG).unwrap();
        for (block, end) in ends.into_iter().enumerate() {
            assert_eq!(
                has_failed(&batch, block as u32),
                end > there,
                "block {block}: {:?}",
                batch.failures()
            );
        }
        let first = &batch.failures()[0];
        assert_eq!((first.cause, first.is_retryable()), (failed.cause, false));
        assert!(batch.failures().iter().all(|blocks| blocks.peer == failed.peer && blocks.peer.is_some()));
        assert!(target.to_vec() == pattern(bytes, 3)[..there], "the others were written");
    }
}

/// The requests behind the one that failed can be tried again, also those that were never posted.
#[test]
fn blocks_behind_the_one_that_failed_are_retryable() {
    let pair = Pair::new(&config(1, Progress::Caller));
    let target = pair.there.allocate(4096).unwrap();
    let mut forged = target.remote();
    forged.rkey ^= 0x77;
    let mut batch = Batch::new();
    let local = batch.local(filled(&pair.here, 4096, 3));
    let (fine, bad) = (batch.remote(target.remote()), batch.remote(forged));
    // More than the send queue has room for.
    for block in 0..2000u64 {
        let remote = if block == 1000 { bad } else { fine };
        batch.block(local, (block as usize * 7) % 4000, remote, (block * 13) % 4000, 64).unwrap();
    }
    let write = pair.here.write_batch(batch).unwrap();
    pair.run_until(|| write.is_ended());
    let batch = write.wait().unwrap_err().buffer.wait_for(HANG).unwrap();
    for block in 0..2000 {
        let failure = batch.failures().iter().find(|failed| failed.blocks.contains(&block));
        let expected = match block {
            0..1000 => None,
            1000 => Some((Cause::RemoteAccess(Status::RemoteAccess), false)),
            _ => Some((Cause::Flushed, true)),
        };
        assert_eq!(failure.map(|failed| (failed.cause, failed.is_retryable())), expected, "block {block}");
    }
}

/// A batch that is cancelled, or whose connection ends, names the blocks that were not moved, whether it was posted in part or not at all.
#[test]
fn cancelled_batch_names_the_blocks_that_were_not_moved() {
    for config in configs() {
        for close in [false, true] {
            let pair = Pair::new(&EndpointConfig { slots: 1, imm_window: 1, ..config.clone() });
            let (layers, blocks, block) = (4, 20, 64);
            let target = pair.there.allocate(layers * blocks * 2 * block).unwrap();
            let batch = || {
                let mut batch = Batch::new();
                let local = batch.local(filled(&pair.here, layers * blocks * block, 5));
                let remote = batch.remote(target.remote());
                for layer in 0..layers {
                    for at in layer * blocks..(layer + 1) * blocks {
                        // With gaps: each is a request of its own.
                        batch.block(local, at * block, remote, (2 * at * block) as u64, block).unwrap();
                    }
                    batch.announce(layer as u32).unwrap();
                }
                batch
            };
            // The first one waits for credit to announce its second layer, with unsignaled requests before that. The second one waits for
            // the slot.
            let writes = [batch(), batch()].map(|batch| pair.here.write_batch(batch).unwrap());
            let posted = 2 * blocks as u32 - 1;
            // Or more: the engine may have asked whether the peer is there.
            pair.run_until(|| pair.here.counters().work_requests >= posted.into());
            if close {
                pair.here.close();
            } else {
                assert_eq!(pair.here.cancel_all(), 2);
            }
            let cause = if close { Cause::Closed } else { Cause::Cancelled };
            let all = (layers * blocks) as u32;
            for (number, write) in writes.into_iter().enumerate() {
                let failed = write.wait().unwrap_err();
                assert_eq!(failed.cause, cause);
                let mut buffer = failed.buffer;
                let mut batch = None;
                pair.run_until(|| {
                    batch = buffer.try_take();
                    batch.is_some()
                });
                let batch = batch.unwrap();
                let failures = batch.failures();
                assert!(failures.iter().all(|blocks| blocks.peer.is_some() && blocks.peer == failed.peer));
                let last = failures.last().expect("not all was moved");
                assert_eq!((last.cause, last.blocks.end), (cause, all));
                // Where requests are queued, one more completes the unsignaled ones. It announces nothing, so it does not wait for credit.
                let is_queueing = config.qps > 1;
                let moved = if number > 0 { 0 } else { posted + u32::from(!close && is_queueing) };
                assert_eq!(last.blocks.start, moved, "batch {number}: {failures:?}");
                let (there, here) = (target.to_vec(), pattern(layers * blocks * block, 5));
                for at in (0..layers * blocks).filter(|at| !has_failed(&batch, *at as u32)) {
                    assert!(there[2 * at * block..][..block] == here[at * block..][..block], "block {at}");
                }
            }
            pair.assert_empty();
        }
    }
}

/// Blocks have 16 bits for the number of a buffer or region. A block with a larger number is refused, not moved to another place.
#[test]
fn blocks_in_buffers_or_regions_that_have_no_number_are_refused() {
    let pair = Pair::new(&EndpointConfig::default());
    let (first, last) = (pair.there.allocate(8).unwrap(), pair.there.allocate(8).unwrap());
    let mut batch = Batch::new();
    let pool = filled(&pair.here, 8, 1).into_pool();
    let locals: Vec<_> = (0..=65_536).map(|_| batch.local_pool(pool.clone())).collect();
    let remotes: Vec<_> =
        (0..=65_536).map(|at| batch.remote(if at == 65_535 { &last } else { &first }.remote())).collect();
    let [refused_local, refused_remote] = [(65_536, 0), (0, 65_536)].map(|(local, remote)| {
        let strided = Strided { count: 2, block: 1, local: (0, 2), remote: (0, 2) };
        let refused = batch.strided(locals[local], remotes[remote], strided);
        assert_eq!(batch.block(locals[local], 0, remotes[remote], 0, 8), refused);
        refused
    });
    assert_eq!([refused_local, refused_remote], [Err(BatchError::TooManyRegions); 2]);
    batch.block(locals[65_535], 0, remotes[65_535], 0, 8).unwrap();
    pair.here.write_batch(batch).unwrap().wait().unwrap();
    assert_eq!((first.to_vec(), last.to_vec()), (vec![0; 8], pattern(8, 1)));
}

/// A peer says which blocks it wants. The numbers of blocks that fail are its numbers, also for blocks that were joined.
#[test]
fn decoded_blocks_have_the_numbers_of_the_side_that_encoded_them() {
    let pair = Pair::new(&config(1, Progress::Caller));
    let target = pair.here.allocate(4096).unwrap();
    let mut forged = target.remote();
    forged.rkey ^= 0x77;
    let mut wanted = Batch::new();
    let local = wanted.local(pair.here.allocate(1).unwrap());
    let (fine, bad) = (wanted.remote(target.remote()), wanted.remote(forged));
    // Ten blocks that are one piece, three of another length behind them, and the one that fails.
    (0..10).for_each(|block| wanted.block(local, block * 64, fine, block as u64 * 64, 64).unwrap());
    (0..3)
        .for_each(|block| wanted.block(local, 640 + block * 10, fine, 640 + block as u64 * 10, 10).unwrap());
    wanted.block(local, 0, bad, 0, 64).unwrap();
    let mut batch = Batch::new();
    batch.local(filled(&pair.there, 4096, 3));
    batch.remote(target.remote());
    batch.remote(forged);
    batch.decode_blocks(&wanted.encode_blocks()).unwrap();
    assert_eq!((batch.blocks(), batch.pieces()), (wanted.blocks(), wanted.pieces()));
    let write = pair.there.write_batch(batch).unwrap();
    pair.run_until(|| write.is_ended());
    let batch = write.wait().unwrap_err().buffer.wait_for(HANG).unwrap();
    let [failed] = batch.failures() else { panic!("{:?}", batch.failures()) };
    assert_eq!((failed.blocks.clone(), failed.is_retryable()), (13..14, false));
    assert!(failed.peer.is_some());
}

#[test]
fn invalid_batches_are_refused_and_returned() {
    let pair = Pair::new(&EndpointConfig { deadline: None, ..EndpointConfig::default() });
    let target = pair.there.allocate(1000).unwrap();
    let mut batch = Batch::new();
    let refused = pair.here.write_batch(batch).unwrap_err();
    assert_eq!(refused.cause, NotStarted::Empty);
    batch = refused.buffer;
    let (local, remote) = (batch.local(pair.here.allocate(500).unwrap()), batch.remote(target.remote()));
    assert_eq!(batch.block(local, 0, remote, 0, 0), Err(BatchError::Empty));
    batch.block(local, 0, remote, 0, 100).unwrap();
    batch.block(local, 450, remote, 0, 51).unwrap();
    let refused = pair.here.write_batch(batch).unwrap_err();
    assert_eq!(refused.cause, NotStarted::Block { index: 1, is_local: true });
    batch = refused.buffer;
    batch.clear_blocks();
    batch.strided(local, remote, Strided { count: 3, block: 50, local: (0, 60), remote: (0, 500) }).unwrap();
    let refused = pair.here.write_batch(batch).unwrap_err();
    assert_eq!(refused.cause, NotStarted::Block { index: 2, is_local: false });
    batch = refused.buffer;
    batch.clear_blocks();
    // Adjacent blocks are joined; the one that is outside is still known.
    (0..6).for_each(|block| batch.block(local, block * 100, remote, block as u64 * 100, 100).unwrap());
    let refused = pair.here.write_batch(batch).unwrap_err();
    assert_eq!(refused.cause, NotStarted::Block { index: 5, is_local: true });
    batch = refused.buffer;
    batch.clear_blocks();
    batch.block(local, 0, remote, 0, 100).unwrap();
    batch.announce(1).unwrap();
    let refused = pair.here.read_batch(batch).unwrap_err();
    assert_eq!(refused.cause, NotStarted::AnnouncedRead);
    // It is usable after all that.
    let done = pair.here.write_batch(refused.buffer).unwrap().wait().unwrap();
    assert_eq!(done.bytes, 100);
}

/// A peer says which blocks it wants: a strided batch takes less than 1 KiB, and blocks that are outside are refused.
#[test]
fn blocks_travel_as_bytes() {
    let pair = Pair::new(&EndpointConfig::default());
    let mut wanted = Batch::new();
    let (local, remote) = (
        wanted.local(pair.here.allocate(1).unwrap()),
        wanted.remote(pair.here.allocate(1).unwrap().remote()),
    );
    wanted
        .strided(local, remote, Strided { count: 100_000, block: 64, local: (0, 128), remote: (0, 64) })
        .unwrap();
    let bytes = wanted.encode_blocks();
    assert!(bytes.len() < 1024, "{}", bytes.len());
    let (source, target) = (filled(&pair.there, 100_000 * 128, 3), pair.here.allocate(100_000 * 64).unwrap());
    let mut batch = Batch::new();
    batch.local(source);
    batch.remote(target.remote());
    batch.decode_blocks(&bytes).unwrap();
    let done = pair.there.write_batch(batch).unwrap().wait().unwrap();
    assert_eq!((done.bytes, done.buffer.blocks()), (6_400_000, 100_000));
    let (expected, found) = (pattern(100_000 * 128, 3), target.to_vec());
    assert!(
        (0..100_000)
            .all(|block| found[64 * block..64 * block + 64] == expected[128 * block..128 * block + 64])
    );
    let mut batch = Batch::new();
    batch.local(pair.there.allocate(64).unwrap());
    batch.remote(target.remote());
    assert!(batch.decode_blocks(&bytes[1..]).is_err());
    batch.decode_blocks(&bytes).unwrap();
    let refused = pair.there.write_batch(batch).unwrap_err();
    assert!(matches!(refused.cause, NotStarted::Block { is_local: true, .. }));
}
