//! Batches: thousands of blocks in one operation.

use core::ops::Range;

use crosstie_protocol::endpoint::batch::{Blocks, Run};
use crosstie_protocol::endpoint::layout::{self, LayoutError};

use super::buffer::{AnyBuffer, Buffer, PoolBuffer};
use super::cause::{BatchError, Cause, NotStarted, Peer};
use crate::device::RemoteMemory;

/// A local buffer of a batch, see [`Batch::local`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Local(u32);

/// A remote region of a batch, see [`Batch::remote`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Remote(u32);

/// Blocks to read or write in one operation, with the buffers and regions that they are in.
///
/// Blocks that are adjacent on both sides are joined, and blocks at a constant distance take one entry, so adding 100 000 regular
/// blocks allocates nothing per block. Blocks are numbered in the order in which they were added; [`failures`](Batch::failures)
/// uses these numbers. A batch that has come back can be [cleared](Batch::clear_blocks) and used again without an allocation.
///
/// ```
/// use crosstie::device::Access;
/// use crosstie::endpoint::{Batch, Endpoint, EndpointConfig, Strided};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
/// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
/// here.connect(&there.address())?;
/// there.connect(&here.address())?;
/// let (source, target) = (here.allocate(1 << 16)?, there.allocate(1 << 16)?);
///
/// let mut batch = Batch::new();
/// let (local, remote) = (batch.local(source), batch.remote(target.remote()));
/// // 16 blocks of 64 bytes: one of every four blocks here, packed there. Then one more block.
/// batch.strided(local, remote, Strided { count: 16, block: 64, local: (0, 256), remote: (0, 64) })?;
/// batch.block(local, 8192, remote, 4096, 1024)?;
/// batch.announce(7)?;
///
/// let written = here.write_batch(batch)?;
/// let event = there.imm_recv()?.wait()?;
/// assert_eq!(event.imm, Some(7));
/// let batch = written.wait()?.buffer;
/// assert_eq!((batch.blocks(), batch.bytes()), (17, 2048));
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct Batch(pub(super) Box<BatchInner>);

#[derive(Debug, Default)]
pub(super) struct BatchInner {
    pub(super) locals: Vec<AnyBuffer>,
    pub(super) remotes: Vec<RemoteMemory>,
    pub(super) blocks: Blocks,
    pub(super) failures: Vec<FailedBlocks>,
    pub(super) work_requests: u64,
}

/// Blocks at constant distances, see [`Batch::strided`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    /// How many.
    pub count: u32,
    /// Bytes of each.
    pub block: usize,
    /// Where the first one begins in the local buffer, and the distance from one to the next.
    pub local: (usize, usize),
    /// Where the first one begins in the remote region, and the distance from one to the next.
    pub remote: (u64, u64),
}

/// Blocks of a batch that failed, all for the same cause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedBlocks {
    /// Their numbers.
    pub blocks: Range<u32>,
    /// The peer whose memory they were to be read from or written to.
    pub peer: Option<Peer>,
    /// Why. They may or may not have taken effect, unless the cause says that they cannot.
    pub cause: Cause,
}

impl FailedBlocks {
    /// Whether it makes sense to try these blocks again.
    pub fn is_retryable(&self) -> bool {
        self.cause.is_retryable()
    }
}

impl Batch {
    /// A batch without blocks.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// A batch without blocks, with room for so many irregular blocks.
    pub fn with_capacity(blocks: usize) -> Batch {
        Batch(Box::new(BatchInner { blocks: Blocks::with_capacity(blocks), ..BatchInner::default() }))
    }

    /// Adds a local buffer. [Blocks](Batch::block) can be in the first 65536 of them.
    pub fn local(&mut self, buffer: Buffer) -> Local {
        self.add_local(AnyBuffer::Owned(buffer))
    }

    /// Adds a local buffer that other operations may use at the same time.
    pub fn local_pool(&mut self, buffer: PoolBuffer) -> Local {
        self.add_local(AnyBuffer::Pool(buffer))
    }

    fn add_local(&mut self, buffer: AnyBuffer) -> Local {
        let number = number(self.0.locals.len());
        self.0.locals.push(buffer);
        Local(number)
    }

    /// Adds a remote region. [Blocks](Batch::block) can be in the first 65536 of them.
    pub fn remote(&mut self, region: RemoteMemory) -> Remote {
        let number = number(self.0.remotes.len());
        self.0.remotes.push(region);
        Remote(number)
    }

    /// Adds a block. Refuses one of a buffer or a region behind the first 65536, with
    /// [`BatchError::TooManyRegions`](super::BatchError::TooManyRegions).
    #[inline]
    pub fn block(
        &mut self,
        local: Local,
        local_offset: usize,
        remote: Remote,
        remote_offset: u64,
        len: usize,
    ) -> Result<(), BatchError> {
        let (local, remote) = wire_numbers(local, remote)?;
        self.0.blocks.add(Run::block(local, local_offset as u64, remote, remote_offset, len as u64))
    }

    /// Adds blocks at constant distances.
    pub fn strided(&mut self, local: Local, remote: Remote, strided: Strided) -> Result<(), BatchError> {
        let Strided {
            count,
            block,
            local: (local_offset, local_stride),
            remote: (remote_offset, remote_stride),
        } = strided;
        let (local, remote) = wire_numbers(local, remote)?;
        let run = Run::block(local, local_offset as u64, remote, remote_offset, block as u64);
        self.0.blocks.add(Run { count, local_stride: local_stride as u64, remote_stride, ..run })
    }

    /// Announces the blocks since the last announcement: the peer gets this immediate, with `imm_recv`, when all of them are in its
    /// memory. Only for batches that write.
    ///
    /// The blocks of one announcement travel on one queue pair; different announcements use different ones.
    pub fn announce(&mut self, imm: u32) -> Result<(), BatchError> {
        self.0.blocks.announce(imm)
    }

    /// The blocks as bytes, to tell a peer which blocks to move: 8 bytes, and 48 for each irregular block or strided run. Buffers and
    /// regions are numbers, in the order in which they were added. Announcements are left out.
    pub fn encode_blocks(&self) -> Vec<u8> {
        layout::encode(&self.0.blocks)
    }

    /// Adds the blocks that a peer has [encoded](Batch::encode_blocks). They are checked against this side's buffers and regions when the
    /// batch is started. After an error the batch has the blocks before the invalid one.
    pub fn decode_blocks(&mut self, bytes: &[u8]) -> Result<(), LayoutError> {
        layout::decode(bytes, |run| self.0.blocks.add(run))
    }

    /// Blocks that were added.
    pub fn blocks(&self) -> u32 {
        self.0.blocks.blocks()
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.0.blocks.bytes()
    }

    /// Pieces of memory that are left after adjacent blocks were joined.
    pub fn pieces(&self) -> u64 {
        self.0.blocks.pieces()
    }

    /// Work requests that the batch became, after it has come back.
    pub fn work_requests(&self) -> u64 {
        self.0.work_requests
    }

    /// The blocks that failed, or were not moved because the batch was cancelled or its connection ended first. Known when the batch has
    /// come back; empty after success.
    pub fn failures(&self) -> &[FailedBlocks] {
        &self.0.failures
    }

    /// Removes the blocks, and keeps buffers, regions and memory.
    pub fn clear_blocks(&mut self) {
        self.0.blocks.clear();
        self.0.failures.clear();
        self.0.work_requests = 0;
    }

    /// The buffer that [`local`](Batch::local) returned this for, to read and write it. `None`: it is a pool.
    pub fn buffer(&self, local: Local) -> Option<&Buffer> {
        self.0.locals.get(local.0 as usize).map(AnyBuffer::buffer)
    }

    /// The buffers that are not shared, in the order in which they were added.
    pub fn into_buffers(self) -> Vec<Buffer> {
        let owned = self.0.locals.into_iter().filter_map(|local| match local {
            AnyBuffer::Owned(buffer) => Some(buffer),
            _ => None,
        });
        owned.collect()
    }

    /// Checks that every block is inside its buffer and region.
    pub(super) fn check(&self) -> Result<(), NotStarted> {
        let inner = &*self.0;
        if inner.blocks.blocks() == 0 {
            return Err(NotStarted::Empty);
        }
        for (first_block, run) in inner.blocks.numbered_runs() {
            let buffer = inner.locals.get(usize::from(run.local)).map(AnyBuffer::buffer);
            // A number without a buffer or region counts as one of zero bytes: every block is outside of it.
            let local = buffer.map_or(0, |buffer| buffer.len() as u64);
            let remote = inner.remotes.get(usize::from(run.remote)).map_or(0, |region| region.len);
            if let Some((block, is_local)) = run.first_outside(local, remote) {
                return Err(NotStarted::Block { index: first_block + block, is_local });
            }
        }
        Ok(())
    }
}

/// The number of a buffer or region behind so many others.
fn number(others: usize) -> u32 {
    // A larger number is refused as well.
    u32::try_from(others).unwrap_or(u32::MAX)
}

/// Blocks have 16 bits for each number.
#[inline]
fn wire_numbers(local: Local, remote: Remote) -> Result<(u16, u16), BatchError> {
    match (local.0.try_into(), remote.0.try_into()) {
        (Ok(local), Ok(remote)) => Ok((local, remote)),
        _ => Err(BatchError::TooManyRegions),
    }
}

impl BatchInner {
    /// Notes that blocks failed. Joins ranges of the same cause.
    pub(super) fn fail(&mut self, blocks: Range<u32>, peer: Option<Peer>, cause: Cause) {
        if blocks.is_empty() {
            return;
        }
        if let Some(last) = self.failures.last_mut()
            && (last.cause, last.peer) == (cause, peer)
            && last.blocks.start <= blocks.start
            && blocks.start <= last.blocks.end
        {
            last.blocks.end = last.blocks.end.max(blocks.end);
            return;
        }
        self.failures.push(FailedBlocks { blocks, peer, cause });
    }
}
