//! Operations of endpoints, both sides without progress threads. Of a batch, no block allocates.

use std::sync::Arc;

use crosstie::WaitStrategy;
use crosstie::device::{Device, software};
use crosstie::endpoint::{Batch, Buffer, Endpoint, EndpointConfig, Lend, OperationFuture, Progress, Strided};
use crosstie_testkit::{allocations, child, seccomp};

struct Pair {
    here: Endpoint,
    there: Endpoint,
    target: Buffer,
}

impl Pair {
    fn new(qps: u8) -> Pair {
        // No thread that waits ever sleeps: that is a system call. Valgrind limits the address space.
        let config = EndpointConfig {
            qps,
            progress: Progress::Caller,
            wait: WaitStrategy::Spin,
            min_part: 4096,
            ..EndpointConfig::default()
        };
        let endpoint = || {
            let device = Device::open_software(&software::Config { space: 512 << 20 }).unwrap();
            Endpoint::new(&device, &Arc::new(device.alloc_pd().unwrap()), &config).unwrap()
        };
        let (here, there) = (endpoint(), endpoint());
        here.connect(&there.address()).unwrap();
        there.connect(&here.address()).unwrap();
        let target = there.allocate(16 << 20).unwrap();
        Pair { here, there, target }
    }

    fn finish<B: Lend>(&self, mut future: OperationFuture<B>) -> B {
        loop {
            match future.try_take() {
                Some(Ok(done)) => return done.buffer,
                Some(Err(failed)) => panic!("{}", failed.cause),
                None => _ = self.here.progress() + self.there.progress(),
            }
        }
    }
}

/// What a program keeps between two rounds.
struct Buffers {
    small: Option<Buffer>,
    large: Option<Buffer>,
    message: Option<Buffer>,
    batch: Option<Batch>,
}

impl Buffers {
    fn new(pair: &Pair) -> Buffers {
        let allocate = |endpoint: &Endpoint, len| Some(endpoint.allocate(len).unwrap());
        let mut batch = Batch::with_capacity(256);
        let (local, remote) =
            (batch.local(pair.here.allocate(1 << 20).unwrap()), batch.remote(pair.target.remote()));
        batch
            .strided(local, remote, Strided { count: 1000, block: 64, local: (0, 128), remote: (0, 192) })
            .unwrap();
        for block in 0..200usize {
            batch.block(local, (block * 37 % 200) * 512, remote, (1 << 20) + 100 * block as u64, 64).unwrap();
        }
        Buffers {
            small: allocate(&pair.here, 64),
            large: allocate(&pair.here, 64 << 10),
            message: allocate(&pair.there, 64 << 10),
            batch: Some(batch),
        }
    }

    fn write(&mut self, pair: &Pair, rounds: u32) {
        for _ in 0..rounds {
            let buffer = self.small.take().unwrap();
            let write = pair.here.write(buffer, .., &pair.target.remote(), 0).unwrap();
            self.small = Some(pair.finish(write));
        }
    }

    fn message(&mut self, pair: &Pair, rounds: u32) {
        for _ in 0..rounds {
            let recv = pair.there.recv(self.message.take().unwrap(), ..).unwrap();
            let send = pair.here.send(self.small.take().unwrap(), ..).unwrap();
            self.message = Some(pair.finish(recv));
            self.small = Some(pair.finish(send));
        }
    }

    fn immediate(&mut self, pair: &Pair, rounds: u32) {
        for round in 0..rounds {
            let write =
                pair.here.write_imm(self.small.take().unwrap(), .., &pair.target.remote(), 0, round).unwrap();
            pair.finish(pair.there.imm_recv().unwrap());
            self.small = Some(pair.finish(write));
        }
    }

    fn mixed(&mut self, pair: &Pair, rounds: u32) {
        let remote = pair.target.remote();
        for _ in 0..rounds {
            self.write(pair, 1);
            self.message(pair, 1);
            let read = pair.here.read(self.large.take().unwrap(), .., &remote, 4096).unwrap();
            self.large = Some(pair.finish(read));
            self.immediate(pair, 1);
            let batch = pair.here.write_batch(self.batch.take().unwrap()).unwrap();
            self.batch = Some(pair.finish(batch));
        }
    }
}

#[test]
fn operations_do_not_allocate() {
    for qps in [1, 3] {
        let pair = Pair::new(qps);
        let mut buffers = Buffers::new(&pair);
        buffers.mixed(&pair, 300);
        allocations::assert_none(format_args!("{qps} queue pairs"), || buffers.mixed(&pair, 300));
    }
}

/// 100 000 blocks of 64 bytes: adjacent ones become one request, regular ones take one entry, and none allocates.
#[test]
fn blocks_of_a_batch_do_not_allocate() {
    let pair = Pair::new(1);
    // The first operation of a connection sets things up.
    Buffers::new(&pair).mixed(&pair, 3);
    let source = pair.here.allocate(16 << 20).unwrap();
    let mut batch = Batch::with_capacity(8);
    let (local, remote) = (batch.local(source), batch.remote(pair.target.remote()));
    for (gap, pieces) in [(64, 1), (128, 100_000)] {
        batch.clear_blocks();
        batch = allocations::assert_none(format_args!("distance {gap}"), || {
            for block in 0..100_000 {
                batch.block(local, block * gap, remote, (block * gap) as u64, 64).unwrap();
            }
            assert_eq!((batch.blocks(), batch.pieces()), (100_000, pieces));
            pair.finish(pair.here.write_batch(batch).unwrap())
        });
        assert_eq!(batch.work_requests(), pieces);
    }
}

/// What the example `endpoint_kv_cache` does: the blocks of 32 layers, on scattered pages of both sides, in one call, each layer
/// announced by a number that the other side awaits.
#[test]
fn hand_over_of_a_paged_cache_does_not_allocate() {
    const LAYERS: usize = 32;
    const BLOCKS: usize = 256;
    const BLOCK: usize = 64;
    let pair = Pair::new(1);
    Buffers::new(&pair).mixed(&pair, 3);
    let mut batch = Batch::with_capacity(LAYERS * BLOCKS);
    let pool = pair.here.allocate(2 * LAYERS * BLOCKS * BLOCK).unwrap();
    let (local, remote) = (batch.local(pool), batch.remote(pair.target.remote()));
    // Odd steps through a power of two reach each page once.
    let page = |number: usize, step: usize| number * step % (2 * LAYERS * BLOCKS) * BLOCK;
    let hand_over = |mut batch: Batch| {
        batch.clear_blocks();
        for layer in 0..LAYERS {
            for block in layer * BLOCKS..(layer + 1) * BLOCKS {
                batch.block(local, page(block, 7919), remote, page(block, 104_729) as u64, BLOCK).unwrap();
            }
            batch.announce(layer as u32).unwrap();
        }
        let moved = pair.here.write_batch(batch).unwrap();
        for layer in 0..LAYERS {
            let mut arrived = pair.there.imm_recv().unwrap();
            let event = loop {
                match arrived.try_take() {
                    Some(Ok(event)) => break event,
                    Some(Err(failed)) => panic!("{}", failed.cause),
                    None => _ = pair.here.progress() + pair.there.progress(),
                }
            };
            assert_eq!(event.imm, Some(layer as u32));
        }
        let batch = pair.finish(moved);
        assert_eq!((batch.blocks(), batch.pieces()), ((LAYERS * BLOCKS) as u32, (LAYERS * BLOCKS) as u64));
        batch
    };
    batch = hand_over(batch);
    for round in 1..3 {
        batch = allocations::assert_none(format_args!("round {round}"), || hand_over(batch));
    }
}

#[test]
fn operations_make_no_system_call() {
    if child::is_child() {
        let pair = Pair::new(2);
        let mut buffers = Buffers::new(&pair);
        buffers.mixed(&pair, 200);
        // The clock is read without a system call, except where the kernel has no vDSO for it.
        seccomp::without_system_calls(&[], || buffers.mixed(&pair, 1000));
    }
    seccomp::assert_no_system_calls(operations_make_no_system_call, &["operations"]);
}

#[cfg(not(debug_assertions))]
#[test]
fn small_operations_stay_within_their_instruction_limits() {
    use crosstie_testkit::callgrind;
    const ROUNDS: u32 = 2000;
    if let Some(task) = child::task() {
        let pair = Pair::new(1);
        let mut buffers = Buffers::new(&pair);
        let mut work = |rounds| match task.as_str() {
            "write" => buffers.write(&pair, rounds),
            "write_imm and imm_recv" => buffers.immediate(&pair, rounds),
            _ => buffers.message(&pair, rounds),
        };
        work(10);
        return callgrind::measure(&mut || work(ROUNDS));
    }
    callgrind::assert_limits(
        small_operations_stay_within_their_instruction_limits,
        &[("write", ROUNDS, 1090), ("write_imm and imm_recv", ROUNDS, 2523), ("send and recv", ROUNDS, 4282)],
    );
}
