//! The blocks of a batch as bytes, to tell a peer which blocks to move.
//!
//! ```text
//!   0        4        8
//!  +--------+--------+-- - - - - - --+
//!  | "CTB1" | runs   |  runs         |
//!  +--------+--------+-- - - - - - --+
//!
//!  a run, 48 bytes, little-endian
//!   0       2        4       8       16              24               32              40              48
//!  +-------+--------+-------+-------+---------------+----------------+---------------+---------------+
//!  | local | remote | count | len   | local offset  | remote offset  | local stride  | remote stride |
//!  +-------+--------+-------+-------+---------------+----------------+---------------+---------------+
//! ```
//!
//! Each piece of a run is one block, so both sides number the blocks in the same way: blocks that were joined are a run without gaps. A
//! strided batch is one run, however many blocks it has. Promise: decoding is total, and takes no more memory than the bytes it is
//! given. Whether the blocks are inside their buffers and regions is checked when the batch is started. Announcements are not encoded.

use alloc::vec::Vec;

use super::batch::{BlockError, Blocks, Run};

const MAGIC: [u8; 4] = *b"CTB1";
const HEADER: usize = 8;
/// Bytes of an encoded run.
pub const RUN_SIZE: usize = 48;

/// Bytes that are no layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// They do not begin as a layout of this version does, or have another length than they say.
    #[error("not a layout of blocks of version 1")]
    NotALayout,
    /// A run is no valid run.
    #[error("invalid run of blocks: {0}")]
    Run(BlockError),
}

/// Encodes the runs of a batch.
pub fn encode(blocks: &Blocks) -> Vec<u8> {
    let runs = blocks.runs();
    let mut bytes = Vec::with_capacity(HEADER + RUN_SIZE * runs.len());
    bytes.extend(MAGIC);
    bytes.extend((runs.len() as u32).to_le_bytes());
    for run in runs {
        bytes.extend(run.local.to_le_bytes());
        bytes.extend(run.remote.to_le_bytes());
        bytes.extend(run.count.to_le_bytes());
        for word in [run.len, run.local_offset, run.remote_offset, run.local_stride, run.remote_stride] {
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes
}

/// Decodes runs, and calls `each` for them.
pub fn decode(bytes: &[u8], mut each: impl FnMut(Run) -> Result<(), BlockError>) -> Result<(), LayoutError> {
    let (header, runs) = bytes.split_at_checked(HEADER).ok_or(LayoutError::NotALayout)?;
    let count = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
    if header[..4] != MAGIC || runs.len() != count.checked_mul(RUN_SIZE).ok_or(LayoutError::NotALayout)? {
        return Err(LayoutError::NotALayout);
    }
    for run in runs.chunks_exact(RUN_SIZE) {
        let half = |at: usize| u16::from_le_bytes([run[at], run[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        each(Run {
            local: half(0),
            remote: half(2),
            count: word(4),
            len: long(8),
            local_offset: long(16),
            remote_offset: long(24),
            local_stride: long(32),
            remote_stride: long(40),
        })
        .map_err(LayoutError::Run)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn strided_batch_of_100_000_blocks_takes_56_bytes() {
        let mut blocks = Blocks::default();
        for block in 0..100_000 {
            blocks.add(Run::block(0, 128 * block, 0, 64 * block, 64)).unwrap();
        }
        let bytes = encode(&blocks);
        assert_eq!(bytes.len(), 56);
        let mut again = Blocks::default();
        decode(&bytes, |run| again.add(run)).unwrap();
        assert_eq!(again, blocks);
    }

    /// The receiver numbers the blocks as the sender does, also those that were joined: so it can name the ones that fail.
    #[test]
    fn joined_blocks_keep_their_numbers() {
        let mut blocks = Blocks::default();
        let mut at = 0;
        for len in [64, 64, 64, 100, 20, 20, 8].into_iter().chain([512; 50]) {
            blocks.add(Run::block(0, at, 0, at, len)).unwrap();
            at += len;
        }
        let mut again = Blocks::default();
        decode(&encode(&blocks), |run| again.add(run)).unwrap();
        assert_eq!(again, blocks);
        assert_eq!((again.blocks(), again.pieces()), (57, 1));
    }

    proptest! {
        #[test]
        fn layouts_survive_encode_and_decode(runs in proptest::collection::vec((0u16..3, 1u32..5, 1u64..100, any::<u32>(), any::<u32>(), 100u64..200), 0..20)) {
            let mut blocks = Blocks::default();
            for (region, count, len, local, remote, stride) in runs {
                let run = Run { count, local_stride: stride, remote_stride: stride + 1, ..Run::block(region, local.into(), region, remote.into(), len) };
                blocks.add(run).unwrap();
            }
            let mut again = Blocks::default();
            decode(&encode(&blocks), |run| again.add(run)).unwrap();
            prop_assert_eq!((again.blocks(), again.bytes()), (blocks.blocks(), blocks.bytes()));
            prop_assert_eq!(encode(&again), encode(&blocks));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), valid in any::<bool>()) {
            if valid && bytes.len() >= HEADER {
                bytes[..4].copy_from_slice(&MAGIC);
                let count = (bytes.len() - HEADER) / RUN_SIZE;
                bytes[4..8].copy_from_slice(&(count as u32).to_le_bytes());
                bytes.truncate(HEADER + count * RUN_SIZE);
            }
            let mut blocks = Blocks::default();
            decode(&bytes, |run| blocks.add(run)).ok();
        }
    }
}
