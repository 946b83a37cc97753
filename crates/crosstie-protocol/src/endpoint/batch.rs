//! Blocks of a batch, and the work requests that they become.
//!
//! A program adds blocks one by one, or as strided runs. Blocks of one length that continue the one before, on both sides, are joined with
//! it; blocks at a constant distance become one run. So a batch of 100 000 regular blocks takes one entry. Adjacent blocks become one
//! work request, also if their lengths differ. However blocks are joined, each keeps its number.
//!
//! ```text
//!   blocks       0   1   2   3          4       5       6            7
//!   local      [aaa|bbb|ccc|ddd]      [eee]   [fff]   [ggg]        [hhh]
//!   remote     [aaa|bbb|ccc|ddd]      [eee]   [fff]   [ggg]     [hhh]
//!   runs        one block of 4          a run of 3 blocks          one block
//! ```

use alloc::vec::Vec;

/// The most pieces of local memory in one work request.
pub const MAX_PIECES: usize = 8;

/// `count` pieces of memory of `len` bytes each, at constant distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// Number of the local buffer in its batch.
    pub local: u16,
    /// Number of the remote region in its batch.
    pub remote: u16,
    /// Pieces.
    pub count: u32,
    /// Bytes of each piece.
    pub len: u64,
    /// Where the first piece begins in the local buffer.
    pub local_offset: u64,
    /// Where the first piece begins in the remote region.
    pub remote_offset: u64,
    /// From the start of one piece to the start of the next, in the local buffer.
    pub local_stride: u64,
    /// From the start of one piece to the start of the next, in the remote region.
    pub remote_stride: u64,
}

impl Run {
    /// One block.
    pub const fn block(local: u16, local_offset: u64, remote: u16, remote_offset: u64, len: u64) -> Run {
        Run { local, remote, count: 1, len, local_offset, remote_offset, local_stride: 0, remote_stride: 0 }
    }

    /// The last byte that it touches in the local buffer and in the remote region, plus one. `None`: no such number.
    pub fn ends(&self) -> Option<(u64, u64)> {
        let last = u64::from(self.count.max(1) - 1);
        let end =
            |offset: u64, stride: u64| stride.checked_mul(last)?.checked_add(offset)?.checked_add(self.len);
        Some((end(self.local_offset, self.local_stride)?, end(self.remote_offset, self.remote_stride)?))
    }

    /// The first piece that is not inside a local buffer and a remote region of these lengths, and whether it is the local buffer that is
    /// too short. `None`: all pieces are inside.
    pub fn first_outside(&self, local: u64, remote: u64) -> Option<(u32, bool)> {
        let first = |offset: u64, stride: u64, limit: u64| -> Option<u32> {
            let room = offset.checked_add(self.len).and_then(|end| limit.checked_sub(end));
            let piece = match room {
                None => 0,
                Some(room) => room.checked_div(stride)? + 1,
            };
            u32::try_from(piece).ok().filter(|piece| *piece < self.count)
        };
        let here = first(self.local_offset, self.local_stride, local).map(|piece| (piece, true));
        let there = first(self.remote_offset, self.remote_stride, remote).map(|piece| (piece, false));
        [here, there].into_iter().flatten().min_by_key(|(piece, _)| *piece)
    }

    const fn local_at(&self, piece: u32) -> u64 {
        self.local_offset + self.local_stride * piece as u64
    }

    const fn remote_at(&self, piece: u32) -> u64 {
        self.remote_offset + self.remote_stride * piece as u64
    }
}

/// A block of a batch was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// It has no bytes.
    #[error("a block has no bytes")]
    Empty,
    /// Its end is no number.
    #[error("a block ends behind the address space")]
    Range,
    /// There are too many blocks.
    #[error("a batch has at most {} blocks", u32::MAX)]
    TooMany,
    /// It is in a buffer or a region that has no number: behind the first 65536.
    #[error("a block can be in the first 65536 buffers and regions of a batch only")]
    TooManyRegions,
    /// An announcement without a block before it.
    #[error("an announcement needs a block before it")]
    NothingToAnnounce,
}

/// A run, and the blocks of the program that it is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    run: Run,
    first_block: u32,
    blocks: u32,
    /// Length of each block that was joined.
    block_len: u64,
    /// The immediate that announces the blocks up to this entry.
    announce: Option<u32>,
}

/// The blocks of a batch. See the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    entries: Vec<Entry>,
    blocks: u32,
    bytes: u64,
    announcements: u32,
}

impl Blocks {
    /// No blocks, and room for `runs` runs.
    pub fn with_capacity(runs: usize) -> Blocks {
        Blocks { entries: Vec::with_capacity(runs), ..Blocks::default() }
    }

    /// Blocks that were added.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Announcements.
    pub fn announcements(&self) -> u32 {
        self.announcements
    }

    /// Pieces of memory that are left after adjacent blocks were joined.
    pub fn pieces(&self) -> u64 {
        let all: u64 = self.entries.iter().map(|entry| u64::from(entry.run.count)).sum();
        let joined = self.entries.windows(2).filter(|pair| pair[0].is_continued_by(&pair[1]));
        all - joined.count() as u64
    }

    /// The blocks as runs in which each piece is one block. [`add`](Blocks::add)ing them gives the same blocks, with the same numbers.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = Run> {
        self.entries.iter().map(Entry::blocks_as_run)
    }

    /// The [runs](Blocks::runs), and the number of the first block of each.
    pub fn numbered_runs(&self) -> impl Iterator<Item = (u32, Run)> {
        self.entries.iter().map(|entry| (entry.first_block, entry.blocks_as_run()))
    }

    /// Removes all blocks and keeps the memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        (self.blocks, self.bytes, self.announcements) = (0, 0, 0);
    }

    /// Adds a run. Its pieces are numbered as blocks, in order.
    #[inline]
    pub fn add(&mut self, run: Run) -> Result<(), BlockError> {
        if run.len == 0 || run.count == 0 {
            return Err(BlockError::Empty);
        }
        if run.ends().is_none() {
            return Err(BlockError::Range);
        }
        let Some(blocks) = self.blocks.checked_add(run.count) else { return Err(BlockError::TooMany) };
        let Some(bytes) = run.len.checked_mul(run.count.into()).and_then(|more| self.bytes.checked_add(more))
        else {
            return Err(BlockError::Range);
        };
        let first_block = self.blocks;
        (self.blocks, self.bytes) = (blocks, bytes);
        let (mut run, block_len, count) = (run, run.len, run.count);
        if count > 1 && run.local_stride == run.len && run.remote_stride == run.len {
            (run.len, run.count, run.local_stride, run.remote_stride) = (run.len * u64::from(count), 1, 0, 0);
        }
        if let Some(last) = self.entries.last_mut()
            && last.announce.is_none()
            && (last.run.local, last.run.remote) == (run.local, run.remote)
            && join(last, &run, block_len, count)
        {
            return Ok(());
        }
        self.entries.push(Entry { run, first_block, blocks: count, block_len, announce: None });
        Ok(())
    }

    /// Announces the blocks since the last announcement: when they are written, the peer gets this immediate.
    pub fn announce(&mut self, imm: u32) -> Result<(), BlockError> {
        match self.entries.last_mut() {
            Some(last) if last.announce.is_none() => last.announce = Some(imm),
            _ => return Err(BlockError::NothingToAnnounce),
        }
        self.announcements += 1;
        Ok(())
    }

    /// The next work request, and where to continue. `None`: there are no more. A work request has at most `max_pieces` pieces and
    /// `max_len` bytes; it is contiguous on the remote side.
    #[inline]
    pub fn next_work(&self, cursor: &mut Cursor, max_pieces: usize, max_len: u64) -> Option<Work> {
        let entry = self.entries.get(cursor.entry)?;
        let (max_pieces, max_len) = (max_pieces.clamp(1, MAX_PIECES), max_len.max(1));
        let run = &entry.run;
        let mut work = Work {
            remote: run.remote,
            remote_offset: run.remote_at(cursor.piece) + cursor.offset,
            len: 0,
            pieces: [Piece::default(); MAX_PIECES],
            count: 0,
            first_block: entry.block_at(cursor.piece, cursor.offset),
            blocks: 0,
            announce: None,
            is_last: false,
        };
        let mut end_block = work.first_block;
        let mut at = *cursor;
        while let Some(entry) = self.entries.get(at.entry) {
            let run = &entry.run;
            let offset = run.local_at(at.piece) + at.offset;
            let continues = run.remote == work.remote
                && run.remote_at(at.piece) + at.offset == work.remote_offset + work.len;
            let count = usize::from(work.count);
            let last = work.pieces[..count].last_mut();
            let last = last.filter(|last| last.local == run.local && last.offset + last.len == offset);
            if work.len >= max_len || !continues || (last.is_none() && count == max_pieces) {
                break;
            }
            let len = (run.len - at.offset).min(max_len - work.len);
            match last {
                Some(last) => last.len += len,
                None => {
                    work.pieces[count] = Piece { local: run.local, offset, len };
                    work.count += 1;
                }
            }
            work.len += len;
            end_block = entry.end_block_at(at.piece, at.offset + len);
            at.offset += len;
            if at.offset == run.len {
                (at.offset, at.piece) = (0, at.piece + 1);
            }
            if at.piece == run.count {
                (at.entry, at.piece) = (at.entry + 1, 0);
                if entry.announce.is_some() {
                    work.announce = entry.announce;
                    break;
                }
            }
        }
        work.blocks = end_block - work.first_block;
        work.is_last = at.entry == self.entries.len();
        *cursor = at;
        Some(work)
    }
}

/// Joins a run with the entry before it, if it continues it: as more bytes, or as more pieces at the same distance.
#[inline]
fn join(last: &mut Entry, run: &Run, block_len: u64, count: u32) -> bool {
    let before = &mut last.run;
    if before.count == 1 && run.count == 1 {
        if run.local_offset == before.local_offset + before.len
            && run.remote_offset == before.remote_offset + before.len
        {
            // The numbers of joined blocks follow from their length, so they have one.
            if last.block_len != block_len {
                return false;
            }
            before.len += run.len;
            last.blocks += count;
            return true;
        }
        // Two single blocks of the same length give a distance for those that follow.
        if last.blocks == 1
            && count == 1
            && run.len == before.len
            && run.local_offset > before.local_offset
            && run.remote_offset > before.remote_offset
        {
            before.local_stride = run.local_offset - before.local_offset;
            before.remote_stride = run.remote_offset - before.remote_offset;
            before.count = 2;
            last.blocks = 2;
            return true;
        }
        return false;
    }
    let same_distance = run.count == 1
        || (run.local_stride, run.remote_stride) == (before.local_stride, before.remote_stride);
    if before.count > 1
        && run.len == before.len
        && count == run.count
        && same_distance
        && run.local_offset == before.local_at(before.count)
        && run.remote_offset == before.remote_at(before.count)
    {
        before.count += run.count;
        last.blocks += count;
        return true;
    }
    false
}

impl Entry {
    /// A run of its blocks, as they were before they were joined.
    fn blocks_as_run(&self) -> Run {
        if self.run.count > 1 || self.blocks == 1 {
            return self.run;
        }
        let len = self.block_len;
        Run { count: self.blocks, len, local_stride: len, remote_stride: len, ..self.run }
    }

    /// Whether the last piece of this entry and the first one of the next are one piece of memory on both sides.
    fn is_continued_by(&self, next: &Entry) -> bool {
        let (run, next) = (&self.run, &next.run);
        self.announce.is_none()
            && (run.local, run.remote) == (next.local, next.remote)
            && run.ends() == Some((next.local_offset, next.remote_offset))
    }

    /// The block that has the byte at this offset of a piece.
    fn block_at(&self, piece: u32, offset: u64) -> u32 {
        let inside = if self.run.count == 1 { (offset / self.block_len) as u32 } else { piece };
        self.first_block + inside
    }

    /// One more than the block of the last byte before this offset of a piece.
    fn end_block_at(&self, piece: u32, offset: u64) -> u32 {
        let inside = if self.run.count == 1 { offset.div_ceil(self.block_len) as u32 } else { piece + 1 };
        self.first_block + inside
    }
}

/// Where in its blocks a batch continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    entry: usize,
    piece: u32,
    offset: u64,
}

/// A piece of local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Number of the local buffer in its batch.
    pub local: u16,
    /// Where it begins.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A work request of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Number of the remote region in its batch.
    pub remote: u16,
    /// Where it begins there.
    pub remote_offset: u64,
    /// Bytes.
    pub len: u64,
    pieces: [Piece; MAX_PIECES],
    count: u8,
    /// The first block that it carries, or a part of.
    pub first_block: u32,
    /// How many blocks it carries, or parts of.
    pub blocks: u32,
    /// The immediate that it ends with.
    pub announce: Option<u32>,
    /// Whether it is the last one.
    pub is_last: bool,
}

impl Work {
    /// The pieces of local memory, in order.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces[..usize::from(self.count)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn works(blocks: &Blocks, max_pieces: usize, max_len: u64) -> Vec<Work> {
        let mut cursor = Cursor::default();
        core::iter::from_fn(|| blocks.next_work(&mut cursor, max_pieces, max_len)).collect()
    }

    #[test]
    fn adjacent_blocks_are_one_request_and_regular_ones_one_run() {
        let mut blocks = Blocks::default();
        for block in 0..100_000u64 {
            blocks.add(Run::block(0, 64 * block, 0, 64 * block, 64)).unwrap();
        }
        assert_eq!((blocks.blocks(), blocks.pieces(), blocks.runs().len()), (100_000, 1, 1));
        assert_eq!(works(&blocks, 8, u64::MAX).len(), 1);
        let cut = works(&blocks, 8, 1000);
        assert_eq!(
            (cut[1].first_block, cut[1].blocks),
            (15, 17),
            "parts of blocks 15 and 31, and all between"
        );
        blocks.clear();
        for block in 0..100_000u64 {
            blocks.add(Run::block(0, 128 * block, 0, 256 * block, 64)).unwrap();
        }
        assert_eq!((blocks.blocks(), blocks.pieces(), blocks.runs().len()), (100_000, 100_000, 1));
        blocks.clear();
        let strided = Run { count: 9, local_stride: 64, remote_stride: 64, ..Run::block(0, 0, 0, 0, 64) };
        blocks.add(strided).unwrap();
        assert_eq!((blocks.blocks(), blocks.pieces(), blocks.bytes()), (9, 1, 576));
    }

    #[test]
    fn scattered_pieces_with_one_remote_range_share_a_request() {
        let mut blocks = Blocks::default();
        for (block, local) in [7u64, 3, 5, 1, 9].into_iter().enumerate() {
            blocks.add(Run::block(0, 1000 * local, 0, 64 * block as u64, 64)).unwrap();
        }
        let all = works(&blocks, 4, u64::MAX);
        assert_eq!(all.iter().map(|work| work.pieces().len()).collect::<Vec<_>>(), [4, 1]);
        assert_eq!((all[1].first_block, all[1].blocks, all[1].remote_offset), (4, 1, 256));
    }

    #[test]
    fn announcement_ends_its_group() {
        let mut blocks = Blocks::default();
        assert_eq!(blocks.announce(1), Err(BlockError::NothingToAnnounce));
        blocks.add(Run::block(0, 0, 0, 0, 64)).unwrap();
        blocks.announce(7).unwrap();
        assert_eq!(blocks.announce(1), Err(BlockError::NothingToAnnounce));
        blocks.add(Run::block(0, 64, 0, 64, 64)).unwrap();
        let all = works(&blocks, 8, u64::MAX);
        assert_eq!(
            all.iter().map(|work| (work.announce, work.len, work.is_last)).collect::<Vec<_>>(),
            [(Some(7), 64, false), (None, 64, true)]
        );
    }

    #[test]
    fn invalid_blocks_are_refused() {
        let mut blocks = Blocks::default();
        assert_eq!(blocks.add(Run::block(0, 0, 0, 0, 0)), Err(BlockError::Empty));
        assert_eq!(blocks.add(Run::block(0, u64::MAX, 0, 0, 1)), Err(BlockError::Range));
        let far = Run { count: 3, local_stride: u64::MAX / 2, ..Run::block(0, 8, 0, 0, 1) };
        assert_eq!(blocks.add(far), Err(BlockError::Range));
        assert_eq!(blocks, Blocks::default());
    }

    #[test]
    fn first_block_outside_is_found() {
        let run = Run { count: 5, local_stride: 100, remote_stride: 60, ..Run::block(0, 10, 0, 40, 50) };
        assert_eq!(run.ends(), Some((460, 330)));
        assert_eq!(run.first_outside(460, 330), None);
        assert_eq!(run.first_outside(459, 330), Some((4, true)));
        assert_eq!(run.first_outside(460, 329), Some((4, false)));
        assert_eq!(run.first_outside(360, 209), Some((2, false)), "the smaller of both");
        assert_eq!(run.first_outside(59, 0), Some((0, true)));
        let same = Run { count: 5, ..Run::block(0, 0, 0, 0, 50) };
        assert_eq!((same.first_outside(50, 50), same.first_outside(50, 49)), (None, Some((0, false))));
    }

    #[derive(Clone, Copy, Debug)]
    enum Next {
        Adjacent,
        Strided,
        Anywhere(u8, u8),
        Run(u8, u8, u8),
        Announce,
    }

    fn next() -> impl Strategy<Value = Next> {
        prop_oneof![
            Just(Next::Adjacent),
            Just(Next::Strided),
            (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Next::Anywhere(a, b)),
            (1u8..5, 0u8..40, 0u8..40).prop_map(|(n, a, b)| Next::Run(n, a, b)),
            Just(Next::Announce),
        ]
    }

    proptest! {
        /// However blocks are joined and cut: the requests move exactly the bytes of the blocks, each request names the blocks that it
        /// touches, and every announcement comes with, or behind, the last bytes of its group.
        #[test]
        fn requests_move_exactly_the_blocks(steps in proptest::collection::vec((next(), 1u64..40, 0u16..2), 0..60), max_pieces in 1usize..10, max_len in prop_oneof![1u64..200, Just(u64::MAX)]) {
            let mut blocks = Blocks::default();
            // The model: for each byte its remote place, its local place, its block and its group.
            let mut model = vec![];
            let (mut local, mut remote, mut last_len) = (0u64, 0u64, 8);
            let (mut block, mut group, mut imms) = (0u32, 0u32, vec![]);
            for (step, len, region) in steps {
                let mut run = match step {
                    Next::Adjacent => Run::block(0, local, region, remote, len),
                    Next::Strided => Run::block(0, local + 24, region, remote + 16, last_len),
                    Next::Anywhere(a, b) => Run::block(0, 40 * u64::from(a), region, 40 * u64::from(b), len),
                    Next::Run(count, a, b) => Run { count: count.into(), local_stride: len + u64::from(a), remote_stride: len + u64::from(b), ..Run::block(0, local, region, remote, len) },
                    Next::Announce => {
                        if blocks.announce(group).is_ok() {
                            imms.push(group);
                            group += 1;
                        }
                        continue;
                    }
                };
                if run.count == 1 {
                    (run.local_stride, run.remote_stride) = (0, 0);
                }
                blocks.add(run).unwrap();
                for piece in 0..run.count {
                    for byte in 0..run.len {
                        model.push((region, run.remote_at(piece) + byte, run.local_at(piece) + byte, block, group));
                    }
                    block += 1;
                }
                last_len = run.len;
                local = run.local_at(run.count - 1) + run.len;
                remote = run.remote_at(run.count - 1) + run.len;
            }
            prop_assert_eq!(blocks.blocks(), block);
            prop_assert_eq!(blocks.bytes(), model.len() as u64);
            let all = works(&blocks, max_pieces, max_len);
            let mut bytes = model.iter();
            let mut announced = vec![];
            for (index, work) in all.iter().enumerate() {
                prop_assert!(work.len <= max_len && work.pieces().len() <= max_pieces && work.len > 0);
                prop_assert_eq!(work.is_last, index + 1 == all.len());
                let mut at = work.remote_offset;
                let (mut first, mut end) = (u32::MAX, 0);
                for piece in work.pieces() {
                    for byte in 0..piece.len {
                        let (region, remote, local, block, group) = *bytes.next().unwrap();
                        prop_assert_eq!((region, remote, local), (work.remote, at, piece.offset + byte));
                        prop_assert_eq!(group as usize, announced.len(), "of the group that is not announced yet");
                        (first, end) = (first.min(block), end.max(block + 1));
                        at += 1;
                    }
                }
                announced.extend(work.announce);
                prop_assert_eq!((work.first_block, work.first_block + work.blocks), (first, end), "exactly the blocks that it touches");
            }
            prop_assert!(bytes.next().is_none());
            prop_assert_eq!(announced, imms);
        }
    }
}
