//! Hands a KV cache over from one process to another, on one machine or two: from a prefill server to a decode server.
//!
//! Started without further settings, it starts its second process itself:
//!
//! ```text
//! cargo run --release --example endpoint_kv_cache
//! ```
//!
//! In two terminals, or on two hosts with an RDMA device each (`--features verbs`, device for example `verbs:r0`):
//!
//! ```text
//! (umask 077; head -c 32 /dev/urandom | base64 > secret); export CROSSTIE_SECRET_FILE=secret  # the same for both
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=0 endpoint_kv_cache [DEVICE [ROUNDS [LAYERS [BLOCKS]]]]
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=1 endpoint_kv_cache [DEVICE [ROUNDS [LAYERS [BLOCKS]]]]
//! ```
//!
//! Both sides keep the cache in a pool of pages. The blocks of a sequence are on any pages, different ones on both sides:
//!
//! ```text
//!   prefill: pool of pages                                decode: pool of pages
//!   layer 0: pages 7, 102, 3, ...   -- one batch -->      layer 0: pages 40, 1, 77, ...     then the number 0
//!   layer 1: pages 15, 9, 61, ...                         layer 1: pages 6, 90, 12, ...     then the number 1
//! ```
//!
//! The decode server tells the prefill server its pages, in one message. The prefill server moves all layers in one call; the number
//! of a layer arrives when all its blocks are in place, so that decoding can begin with the first layer while the others are moved.
//! Each round is followed by a memcpy of the same blocks inside one process, between the same pages, while the other process sleeps.

mod pair;

use std::error::Error;
use std::time::{Duration, Instant};

use crosstie::device::DeviceSpec;
use crosstie::endpoint::{Batch, Endpoint, EndpointAddress, EndpointConfig};
use crosstie::region::{DESCRIPTOR_SIZE, RemoteRegion, Rights};

/// Bytes of a block, which fills a page of the pool.
const BLOCK: usize = 16 << 10;

struct Shape {
    layers: usize,
    blocks: usize,
}

impl Shape {
    /// Blocks of all layers.
    fn total(&self) -> usize {
        self.layers * self.blocks
    }

    /// The pages of the blocks, in the order of layers: half of the pages of a pool, at random.
    fn pages(&self, seed: u64) -> Vec<u32> {
        let mut pages: Vec<u32> = (0..2 * self.total() as u32).collect();
        let mut state = seed;
        for at in (1..pages.len()).rev() {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            pages.swap(at, (state >> 33) as usize % (at + 1));
        }
        pages.truncate(self.total());
        pages
    }

    fn pool_len(&self) -> usize {
        2 * self.total() * BLOCK
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let device: DeviceSpec = arguments.next().unwrap_or("software".into()).parse()?;
    let rounds: usize = arguments.next().unwrap_or("10".into()).parse()?;
    let layers: usize = arguments.next().unwrap_or("32".into()).parse()?;
    let blocks: usize = arguments.next().unwrap_or("256".into()).parse()?;
    let shape = Shape { layers, blocks };

    let mut job = pair::join()?;
    // A number for each layer can be under way.
    let config = EndpointConfig { imm_window: layers.clamp(64, 32768) as u32, ..EndpointConfig::default() };
    let endpoint = Endpoint::open(&device, &config)?;
    let address = pair::exchange(&mut job, &endpoint.address().to_bytes())?;
    endpoint.connect(&EndpointAddress::from_bytes(&address)?)?;
    job.barrier()?;
    match job.rank() {
        0 => prefill(&endpoint, &shape, rounds)?,
        _ => decode(&endpoint, &shape, rounds)?,
    }
    job.barrier()?;
    job.finish()?;
    Ok(())
}

/// Moves the cache to the decode server, `rounds` times.
fn prefill(endpoint: &Endpoint, shape: &Shape, rounds: usize) -> Result<(), Box<dyn Error>> {
    let pages = shape.pages(1);
    let pool = endpoint.allocate(shape.pool_len())?;
    for (number, page) in pages.iter().enumerate() {
        pool.write(*page as usize * BLOCK, &block(number))?;
    }
    // The decode server's pages.
    let message = endpoint.recv(endpoint.allocate(DESCRIPTOR_SIZE + 4 * shape.total())?, ..);
    let message = message?.wait()?;
    let bytes = message.buffer.to_vec();
    let (descriptor, table) = bytes.split_first_chunk().ok_or("the peer's message is too short")?;
    let remote =
        endpoint.import(&RemoteRegion::decode(descriptor)?, Rights { write: true, ..Rights::default() })?;
    let table = table.as_chunks().0.iter().map(|page: &[u8; 4]| u32::from_le_bytes(*page));
    let remote_pages: Vec<u32> = table.collect();

    let mut memcpy = Memcpy::new(shape, &pages, &remote_pages);
    let mut batch = Batch::with_capacity(shape.total());
    let (local, target) = (batch.local(pool), batch.remote(remote));
    let (mut moved, mut copied) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let begin = Instant::now();
        batch.clear_blocks();
        for layer in 0..shape.layers {
            for at in layer * shape.blocks..(layer + 1) * shape.blocks {
                let (from, to) = (pages[at] as usize * BLOCK, u64::from(remote_pages[at]) * BLOCK as u64);
                batch.block(local, from, target, to, BLOCK)?;
            }
            batch.announce(layer as u32)?;
        }
        let started = endpoint.write_batch(batch)?;
        let issued = begin.elapsed();
        batch = started.wait()?.buffer;
        let took = begin.elapsed();
        // The first round also touches all pages for the first time.
        if round > 0 {
            moved.push(took);
        } else {
            println!(
                "{} blocks of {BLOCK} bytes in {} layers, {} pieces, one call that returned after {issued:.2?}",
                batch.blocks(),
                shape.layers,
                batch.pieces(),
            );
        }
        wait_for_decode(endpoint)?;
        // Now the other process sleeps, as it does while it waits for the first layer.
        if round > 0 {
            copied.push(memcpy.run());
        }
    }
    let (moved, copied) = (median(&mut moved), median(&mut copied));
    let speed = |time: Duration| (shape.total() * BLOCK) as f64 / time.as_secs_f64() / 1e9;
    println!(
        "hand-over {:.2} GB/s ({moved:.2?}), memcpy of the same blocks {:.2} GB/s: {:.2} of memcpy (medians of {rounds})",
        speed(moved),
        speed(copied),
        copied.as_secs_f64() / moved.as_secs_f64(),
    );
    Ok(())
}

/// Waits until the decode server has checked the round.
fn wait_for_decode(endpoint: &Endpoint) -> Result<(), Box<dyn Error>> {
    let done = endpoint.recv(endpoint.allocate(8)?, ..)?;
    done.wait()?;
    Ok(())
}

/// Receives the cache, `rounds` times, and checks it.
fn decode(endpoint: &Endpoint, shape: &Shape, rounds: usize) -> Result<(), Box<dyn Error>> {
    let pages = shape.pages(2);
    let pool = endpoint.allocate(shape.pool_len())?;
    let message = endpoint.allocate(DESCRIPTOR_SIZE + 4 * shape.total())?;
    message.write(0, &endpoint.describe(&pool).encode())?;
    let table: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    message.write(DESCRIPTOR_SIZE, &table)?;
    endpoint.send(message, ..)?.wait()?;

    let mut bytes = vec![0; BLOCK];
    for _ in 0..=rounds {
        let mut seen = vec![false; shape.layers];
        for _ in 0..shape.layers {
            let arrived = endpoint.imm_recv()?;
            let arrived = arrived.wait()?;
            let layer = arrived.imm.ok_or("no number")? as usize;
            if layer >= shape.layers || seen[layer] {
                return Err(format!("layer {layer} was announced twice, or does not exist").into());
            }
            seen[layer] = true;
            // Decoding could begin here. We check one block of the layer now, and all blocks at the end.
            check(&pool, &pages, layer * shape.blocks, &mut bytes)?;
        }
        for number in 0..shape.total() {
            check(&pool, &pages, number, &mut bytes)?;
        }
        // The next round must write everything again.
        for page in &pages {
            pool.write(*page as usize * BLOCK, &[0; 8])?;
        }
        let done = endpoint.send(endpoint.allocate(8)?, ..)?;
        done.wait()?;
    }
    println!("decode: {rounds} rounds, all blocks of all layers are right");
    Ok(())
}

/// Checks block `number` of the cache.
fn check(
    pool: &crosstie::endpoint::Buffer,
    pages: &[u32],
    number: usize,
    bytes: &mut [u8],
) -> Result<(), Box<dyn Error>> {
    pool.read(pages[number] as usize * BLOCK, bytes)?;
    if bytes != block(number) {
        return Err(format!("block {number} is wrong").into());
    }
    Ok(())
}

/// The bytes of a block.
fn block(number: usize) -> [u8; BLOCK] {
    let mut bytes = [number as u8; BLOCK];
    bytes[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
    bytes[BLOCK - 8..].copy_from_slice(&(number as u64 + 1).to_le_bytes());
    bytes
}

/// Copies of the same blocks between the same pages, inside this process.
struct Memcpy<'a> {
    from: Vec<u8>,
    to: Vec<u8>,
    pages: &'a [u32],
    remote_pages: &'a [u32],
}

impl Memcpy<'_> {
    fn new<'a>(shape: &Shape, pages: &'a [u32], remote_pages: &'a [u32]) -> Memcpy<'a> {
        let (mut from, mut to) = (huge_pages(shape.pool_len()), huge_pages(shape.pool_len()));
        from.fill(1);
        to.fill(2);
        Memcpy { from, to, pages, remote_pages }
    }

    fn run(&mut self) -> Duration {
        let begin = Instant::now();
        for (from, to) in self.pages.iter().zip(self.remote_pages) {
            let (from, to) = (*from as usize * BLOCK, *to as usize * BLOCK);
            self.to[to..to + BLOCK].copy_from_slice(&self.from[from..from + BLOCK]);
        }
        std::hint::black_box(&mut self.to);
        begin.elapsed()
    }
}

/// Memory on huge pages, as the device's memory is. With small pages memcpy is slower.
fn huge_pages(len: usize) -> Vec<u8> {
    // Zeros that nobody has touched have no pages yet.
    let memory = vec![0; len];
    let start = memory.as_ptr().addr().next_multiple_of(4096);
    let end = (memory.as_ptr().addr() + len) & !4095;
    if start < end {
        // SAFETY: the range is inside the vector. The advice does not change its contents; a kernel that refuses it does nothing.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
    memory
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
