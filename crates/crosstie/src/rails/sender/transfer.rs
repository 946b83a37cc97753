//! Where the bytes of a message are, and where they go.

use core::ops::Range;
use std::sync::Arc;

use crosstie_protocol::rails::{CTS_LEN, Chunk, ClearToSend, MAX_GROUP, MAX_RAILS, Violation};

use super::super::memory::Memory;
use crate::device::{Access, Mr, MultiRegion, OutOfRegion, RemoteAddr, Sge};

/// Where the bytes of a send are, so that they can be sent again after the call that named them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Source {
    /// The address on each rail.
    addrs: [u64; MAX_RAILS],
    lkeys: [u32; MAX_RAILS],
    domains: [u32; MAX_RAILS],
    pub(super) len: u32,
}

impl Source {
    #[inline]
    pub(super) fn new(memory: &Memory, range: Range<usize>) -> Result<Source, OutOfRegion> {
        let (addrs, len) = memory.resolve(range)?;
        Ok(Source { addrs, lkeys: memory.keys.lkeys, domains: memory.keys.domains, len })
    }

    #[inline]
    fn sge(&self, rail: usize, chunk: Chunk) -> Sge<'static> {
        let addr = self.addrs[rail] + u64::from(chunk.offset);
        Sge::detached(addr, chunk.len, self.lkeys[rail], self.domains[rail], ACCESS)
    }
}

const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// A message from the arrival of its clear-to-sends until it is done. Nearly all messages have one buffer, and the arrays have room for
/// [`MAX_GROUP`]: so it is read and written in place.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Transfer {
    /// When its first attempt was posted; `None` if it is not measured.
    pub(super) posted_at: Option<u64>,
    /// Buffers that the receiver wants; 0 if its clear-to-sends have not arrived, and from the first post on. So many of `buffers` are
    /// valid.
    count: u8,
    /// Bit `i`: a send was matched with buffer `i`.
    matched: u8,
    buffers: [Buffer; MAX_GROUP],
}

/// A buffer of the receiver, and the send that was matched with it.
#[derive(Debug, Default)]
struct Buffer {
    wanted: ClearToSend,
    source: Source,
    /// The memory of a send that waits for the others of its group.
    waiting: Option<Arc<MultiRegion>>,
}

const _: () = assert!(MAX_GROUP <= 8, "`matched` has eight bits");

impl Transfer {
    /// Whether the clear-to-sends have not arrived.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Reads the clear-to-sends of message `number`, which are at `at` of `memory`. False if not all of them have arrived.
    #[inline]
    pub(super) fn read(
        &mut self,
        memory: &Mr,
        at: usize,
        number: u64,
        max_group: usize,
    ) -> Result<bool, Violation> {
        let (mut index, mut count) = (0, 1);
        while index < count {
            let Ok(bytes) = memory.load::<CTS_LEN>(at + index * CTS_LEN) else { return Ok(false) };
            let Some(wanted) = ClearToSend::decode(&bytes, number) else { return Ok(false) };
            wanted.check(number, index)?;
            if index == 0 {
                count = usize::from(wanted.count);
            }
            if usize::from(wanted.count) != count || count > max_group {
                let what = "the number of buffers is wrong";
                return Err(Violation::BadClearToSend { message: number, what });
            }
            self.buffers[index].wanted = wanted;
            index += 1;
        }
        (self.count, self.matched) = (count as u8, 0);
        Ok(true)
    }

    /// The first buffer with this tag that has no send yet: its index and its room.
    #[inline]
    pub(super) fn find_free(&self, tag: u32) -> Option<(usize, u64)> {
        let mut buffers = self.buffers[..self.count.into()].iter().map(|buffer| &buffer.wanted).enumerate();
        let (index, wanted) =
            buffers.find(|(index, wanted)| wanted.tag == tag && !self.has_source(*index))?;
        Some((index, wanted.size))
    }

    /// Matches a send with a buffer. Returns whether all buffers have a send; otherwise it keeps the memory.
    #[inline]
    pub(super) fn match_source(&mut self, index: usize, source: Source, memory: &Memory) -> bool {
        self.buffers[index].source = source;
        self.matched |= 1 << index;
        let is_complete = self.matched.count_ones() == self.count.into();
        if !is_complete {
            self.buffers[index].waiting = Some(memory.regions.clone());
        }
        is_complete
    }

    /// Whether a send of a group that is not complete was matched with this buffer.
    #[inline]
    pub(super) fn has_source(&self, index: usize) -> bool {
        index < self.count.into() && self.matched & (1 << index) != 0
    }

    /// The lengths of the sends that were matched. From now on no send is matched with this message.
    #[inline]
    pub(super) fn take_lens(&mut self) -> impl ExactSizeIterator<Item = u32> {
        let count = core::mem::take(&mut self.count);
        self.buffers[..count.into()].iter().map(|buffer| buffer.source.len)
    }

    /// Lets go of the memory of a group.
    #[inline]
    pub(super) fn release(&mut self, count: usize) {
        self.buffers[..count].iter_mut().for_each(|buffer| buffer.waiting = None);
    }

    /// A chunk of buffer `index` on a rail: where it is, and where it goes.
    #[inline]
    pub(super) fn chunk(&self, index: usize, rail: usize, chunk: Chunk) -> (Sge<'static>, RemoteAddr) {
        let Buffer { wanted: ClearToSend { addrs, rkeys, .. }, source, .. } = &self.buffers[index];
        let to = RemoteAddr { addr: addrs[rail].wrapping_add(chunk.offset.into()), rkey: rkeys[rail] };
        (source.sge(rail, chunk), to)
    }
}
