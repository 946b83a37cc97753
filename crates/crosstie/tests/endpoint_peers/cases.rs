//! The test cases: what each of the two sides does.

use std::collections::VecDeque;

use crosstie::endpoint::{Batch, EndpointConfig, NotStarted, Progress, Strided};

use crate::harness::Case;
use crate::quiescence::*;
use crate::rng::Random;
use crate::test_peer::{READ_WRITE, TestPeer, finish, pattern, started, wait};

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        pub(crate) const CASES: &[Case<TestPeer>] = &[$(Case { name: stringify!($name), run: $name }),*];
    };
}

cases![
    transfers_of_all_sizes_arrive,
    messages_of_all_sizes_arrive_in_order,
    immediates_arrive_in_order_before_or_after_the_call,
    batches_gather_and_scatter,
    announced_batches_are_complete_when_their_number_arrives,
    caller_without_a_progress_thread_makes_progress,
    descriptor_of_another_peer_is_refused,
    connection_is_made_again_after_close,
    memory_of_the_program_is_used_in_place,
    cancelled_operations_write_nothing_after_their_buffers_are_back,
];

const SIZES: [usize; 10] = [1, 8, 63, 64, 65, 4096, 65_535, 65_536, 1 << 20, (3 << 20) + 17];

/// Both sides write, read and write with a number at the same time, to and from their halves of the other side's memory.
fn transfers_of_all_sizes_arrive(side: &mut TestPeer) {
    for qps in [1, 4] {
        let endpoint = side.connected(&EndpointConfig { qps, min_part: 4096, ..side.config() });
        let largest = SIZES[SIZES.len() - 1];
        let shared = endpoint.allocate(2 * largest).unwrap();
        let remote = side.exchange_regions(&endpoint, &shared);
        let remote = endpoint.import(&remote, READ_WRITE).unwrap();
        let mut buffer = endpoint.allocate(largest).unwrap();
        for (number, len) in SIZES.into_iter().enumerate() {
            let (bytes, at) =
                (pattern(number as u64 + 100 * side.index as u64, len), (side.index * largest) as u64);
            buffer.write(0, &bytes).unwrap();
            let written = finish(endpoint.write(buffer, ..len, &remote, at));
            assert_eq!(written.bytes, len as u64);
            buffer = written.buffer;
            buffer.write(0, &vec![0; len]).unwrap();
            let read = finish(endpoint.read(buffer, ..len, &remote, at));
            assert_eq!(read.bytes, len as u64);
            buffer = read.buffer;
            assert!(buffer.to_vec()[..len] == bytes, "read {len} bytes over {qps} queue pairs");
            let bytes = pattern(number as u64 + 1000 + 100 * side.index as u64, len);
            buffer.write(0, &bytes).unwrap();
            let announced = started(endpoint.write_imm(buffer, ..len, &remote, at, number as u32));
            let arrived = finish(endpoint.imm_recv());
            assert_eq!((arrived.imm, arrived.bytes), (Some(number as u32), len as u64));
            // The other side's half of our memory.
            let expected = pattern(number as u64 + 1000 + 100 * (1 - side.index) as u64, len);
            let mut found = vec![0; len];
            shared.read((1 - side.index) * largest, &mut found).unwrap();
            assert!(found == expected, "{len} bytes with a number over {qps} queue pairs");
            buffer = wait(announced).buffer;
            side.meet();
        }
        assert_eq!(endpoint.counters().empty_receive_queues, 0);
    }
}

/// Both sides send and receive at the same time, and each gives buffers and messages in its own rhythm.
fn messages_of_all_sizes_arrive_in_order(side: &mut TestPeer) {
    side.agree_on_seed();
    for qps in [1, 3] {
        let endpoint = side.connected(&EndpointConfig { qps, min_part: 4096, ..side.config() });
        let count = side.scaled(1000);
        // Both sides know all lengths.
        let lengths = |index: usize| {
            let mut random = Random(side.seed + index as u64);
            (0..count).map(
                move |_| if random.below(8) == 0 { random.index(200_000) } else { random.index(300) } + 1,
            )
        };
        let mut incoming: VecDeque<usize> = lengths(1 - side.index).collect();
        let mut outgoing: VecDeque<usize> = lengths(side.index).collect();
        let mut random = Random(side.seed ^ (99 + side.index as u64));
        let (mut receives, mut sends) = (VecDeque::new(), VecDeque::new());
        let (mut awaited, mut sent) = (incoming.clone(), 0);
        let mut received = 0;
        while !(incoming.is_empty() && outgoing.is_empty() && receives.is_empty() && sends.is_empty()) {
            match random.below(4) {
                0 if receives.len() < 40 => {
                    if let Some(len) = awaited.pop_front() {
                        let buffer = endpoint.allocate(len + random.index(64)).unwrap();
                        receives.push_back(started(endpoint.recv(buffer, ..)));
                    }
                }
                1 if sends.len() < 40 => {
                    if let Some(len) = outgoing.pop_front() {
                        let buffer = endpoint.allocate(len).unwrap();
                        buffer.write(0, &pattern(sent + side.index as u64 * 7_000_000, len)).unwrap();
                        sends.push_back(started(endpoint.send(buffer, ..)));
                        sent += 1;
                    }
                }
                // Waits only for what the other side has certainly given.
                2 if awaited.is_empty() && !sends.is_empty() => {
                    sends.pop_front().map(wait);
                }
                3 if outgoing.is_empty() && !receives.is_empty() => {
                    let message = receives.pop_front().map(wait).unwrap();
                    let len = incoming.pop_front().unwrap();
                    assert_eq!(message.bytes, len as u64);
                    let expected = pattern(received + (1 - side.index as u64) * 7_000_000, len);
                    assert!(message.buffer.to_vec()[..len] == expected, "message {received} of {len} bytes");
                    received += 1;
                }
                _ => {
                    let done = receives.front().is_some_and(|next| next.is_ended());
                    if done {
                        let message = receives.pop_front().map(wait).unwrap();
                        let len = incoming.pop_front().unwrap();
                        assert_eq!(message.bytes, len as u64);
                        let expected = pattern(received + (1 - side.index as u64) * 7_000_000, len);
                        assert!(
                            message.buffer.to_vec()[..len] == expected,
                            "message {received} of {len} bytes"
                        );
                        received += 1;
                    }
                    if sends.front().is_some_and(|next| next.is_ended()) {
                        sends.pop_front().map(wait);
                    }
                }
            }
        }
        assert_eq!(endpoint.counters().empty_receive_queues, 0);
        side.meet();
    }
}

fn immediates_arrive_in_order_before_or_after_the_call(side: &mut TestPeer) {
    let endpoint = side.connected(&EndpointConfig { imm_window: 8, ..side.config() });
    let shared = endpoint.allocate(4096).unwrap();
    let remote = side.exchange_regions(&endpoint, &shared);
    let remote = endpoint.import(&remote, READ_WRITE).unwrap();
    let count = side.scaled(2000) as u32;
    if side.index == 0 {
        let mut under_way = VecDeque::new();
        for number in 0..count {
            let buffer = endpoint.allocate(8).unwrap();
            under_way.push_back(started(endpoint.write_imm(buffer, .., &remote, 0, number)));
            // More than the window: the others wait for the peer's program.
            if under_way.len() == 20 {
                under_way.pop_front().map(wait);
            }
        }
        under_way.into_iter().for_each(|write| drop(wait(write)));
    } else {
        let (mut random, mut next) = (Random(side.seed), 0);
        while next < count {
            let calls = 1 + random.index(10).min((count - next) as usize - 1);
            let futures: Vec<_> = (0..calls).map(|_| started(endpoint.imm_recv())).collect();
            for future in futures {
                assert_eq!(wait(future).imm, Some(next));
                next += 1;
            }
        }
    }
    side.meet();
    assert_eq!(endpoint.counters().empty_receive_queues, 0);
}

fn batches_gather_and_scatter(side: &mut TestPeer) {
    const BLOCK: usize = 512;
    for qps in [1, 4] {
        let endpoint = side.connected(&EndpointConfig { qps, ..side.config() });
        let blocks = side.scaled(2000).max(64);
        let shared = endpoint.allocate(4 * blocks * BLOCK).unwrap();
        let remote = side.exchange_regions(&endpoint, &shared);
        if side.index == 0 {
            let remote = endpoint.import(&remote, READ_WRITE).unwrap();
            let mut random = Random(side.seed);
            let mut places: Vec<usize> = (0..2 * blocks).collect();
            (1..places.len()).rev().for_each(|at| places.swap(at, random.index(at + 1)));
            let pool = endpoint.allocate(2 * blocks * BLOCK).unwrap();
            for block in 0..blocks {
                pool.write(block * BLOCK, &pattern(block as u64, BLOCK)).unwrap();
            }
            let mut batch = Batch::new();
            let (local, target) = (batch.local(pool), batch.remote(remote));
            for (block, place) in places[..blocks].iter().enumerate() {
                batch.block(local, block * BLOCK, target, (place * BLOCK) as u64, BLOCK).unwrap();
            }
            // Behind them: every second block, packed.
            let behind = (2 * blocks * BLOCK) as u64;
            let strided = Strided {
                count: (blocks / 2) as u32,
                block: BLOCK,
                local: (0, 2 * BLOCK),
                remote: (behind, BLOCK as u64),
            };
            batch.strided(local, target, strided).unwrap();
            assert_eq!(batch.blocks() as usize, blocks + blocks / 2);
            let written = finish(endpoint.write_batch(batch));
            assert_eq!(written.bytes, written.buffer.bytes());
            let mut batch = written.buffer;
            assert!(batch.failures().is_empty());
            // Read back: the same blocks to the second half of the pool, in another order.
            batch.clear_blocks();
            for block in (0..blocks).rev() {
                batch
                    .block(local, (blocks + block) * BLOCK, target, (places[block] * BLOCK) as u64, BLOCK)
                    .unwrap();
            }
            let batch = finish(endpoint.read_batch(batch)).buffer;
            let bytes = batch.buffer(local).unwrap().to_vec();
            for block in 0..blocks {
                let at = (blocks + block) * BLOCK;
                assert!(bytes[at..at + BLOCK] == pattern(block as u64, BLOCK), "block {block}");
            }
            // The strided ones.
            let back = endpoint.allocate(blocks / 2 * BLOCK).unwrap();
            let back = finish(endpoint.read(back, .., &remote, behind)).buffer.to_vec();
            for block in 0..blocks / 2 {
                assert!(
                    back[block * BLOCK..][..BLOCK] == pattern(2 * block as u64, BLOCK),
                    "strided block {block}"
                );
            }
        }
        side.meet();
    }
}

fn announced_batches_are_complete_when_their_number_arrives(side: &mut TestPeer) {
    const PAGE: usize = 4096;
    const LAYERS: usize = 8;
    let endpoint = side.connected(&EndpointConfig { qps: 2, ..side.config() });
    let pages = side.scaled(1000).max(32);
    let shared = endpoint.allocate(LAYERS * pages * PAGE).unwrap();
    let remote = side.exchange_regions(&endpoint, &shared);
    for round in 0..3u8 {
        if side.index == 0 {
            let mut batch = Batch::new();
            let pool = endpoint.allocate(LAYERS * pages * PAGE).unwrap();
            pool.write(0, &vec![round + 1; LAYERS * pages * PAGE]).unwrap();
            let (local, target) =
                (batch.local(pool), batch.remote(endpoint.import(&remote, READ_WRITE).unwrap()));
            for layer in 0..LAYERS {
                for page in 0..pages {
                    // From the end here, from the beginning there: nothing can be joined.
                    let (from, to) =
                        ((LAYERS * pages - 1 - layer * pages - page) * PAGE, (layer * pages + page) * PAGE);
                    batch.block(local, from, target, to as u64, PAGE).unwrap();
                }
                batch.announce(layer as u32).unwrap();
            }
            finish(endpoint.write_batch(batch));
        } else {
            let mut seen = [false; LAYERS];
            for _ in 0..LAYERS {
                let layer = finish(endpoint.imm_recv()).imm.unwrap() as usize;
                assert!(!std::mem::replace(&mut seen[layer], true), "layer {layer} was announced twice");
                let mut bytes = vec![0; pages * PAGE];
                shared.read(layer * pages * PAGE, &mut bytes).unwrap();
                assert!(bytes.iter().all(|byte| *byte == round + 1), "layer {layer} is not complete");
            }
        }
        side.meet();
    }
}

fn caller_without_a_progress_thread_makes_progress(side: &mut TestPeer) {
    let endpoint = side.connected(&EndpointConfig { progress: Progress::Caller, ..side.config() });
    for number in 0..side.scaled(300) as u64 {
        let (mine, theirs) = (endpoint.allocate(100).unwrap(), endpoint.allocate(100).unwrap());
        mine.write(0, &pattern(number + side.index as u64, 100)).unwrap();
        let received = started(endpoint.recv(theirs, ..));
        let sent = started(endpoint.send(mine, ..));
        assert_eq!(wait(received).buffer.to_vec(), pattern(number + 1 - side.index as u64, 100));
        wait(sent);
    }
    side.meet();
    assert_eq!(endpoint.counters().empty_receive_queues, 0);
}

fn descriptor_of_another_peer_is_refused(side: &mut TestPeer) {
    let endpoint = side.connected(&side.config());
    let buffer = endpoint.allocate(64).unwrap();
    let theirs = side.exchange_regions(&endpoint, &buffer);
    endpoint.import(&theirs, READ_WRITE).unwrap();
    let mut bytes = theirs.encode();
    bytes[40] ^= 1;
    let other = crosstie::region::RemoteRegion::decode(&bytes).unwrap();
    assert!(matches!(endpoint.import(&other, READ_WRITE), Err(NotStarted::ForeignRegion)));
    side.meet();
}

fn connection_is_made_again_after_close(side: &mut TestPeer) {
    let endpoint = side.connected(&side.config());
    for round in 0..side.scaled(500).min(20) as u64 {
        let (mine, theirs) = (endpoint.allocate(100).unwrap(), endpoint.allocate(100).unwrap());
        mine.write(0, &pattern(round, 100)).unwrap();
        let (received, sent) = (started(endpoint.recv(theirs, ..)), started(endpoint.send(mine, ..)));
        assert_eq!(wait(received).buffer.to_vec(), pattern(round, 100));
        wait(sent);
        side.meet();
        endpoint.reopen().unwrap();
        side.connect(&endpoint);
    }
}

/// Buffers that are the program's own memory, registered in place, and given back as what they were.
fn memory_of_the_program_is_used_in_place(side: &mut TestPeer) {
    let endpoint = side.connected(&side.config());
    let words: Vec<u32> = (0..10_000).map(|word| word * 3 + side.index as u32).collect();
    let address = words.as_ptr();
    let source = endpoint.register(words).unwrap();
    let target = endpoint.register(vec![0u32; 10_000]).unwrap();
    let (received, sent) = (started(endpoint.recv(target, ..)), started(endpoint.send(source, ..)));
    let target: Vec<u32> = wait(received).buffer.into_memory(crate::test_peer::HANG).unwrap();
    assert!(target.iter().enumerate().all(|(at, word)| *word == at as u32 * 3 + 1 - side.index as u32));
    let source: Vec<u32> = wait(sent).buffer.into_memory(crate::test_peer::HANG).unwrap();
    assert_eq!((source.as_ptr(), source[9_999]), (address, 29_997 + side.index as u32));
    side.meet();
}
