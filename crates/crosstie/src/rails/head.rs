//! The next message of a sender: what the receiver wants, and the sends that were matched with it.

use crosstie_protocol::rails::{CTS_LEN, Chunk, ClearToSend, MAX_GROUP, MAX_RAILS, Violation};

use crate::device::{Access, Mr, Sge};

/// Where the bytes of a send are, so that they can be sent again after the call that named them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Source {
    /// The address on each rail.
    pub(super) addrs: [u64; MAX_RAILS],
    pub(super) len: u32,
    pub(super) lkeys: [u32; MAX_RAILS],
    pub(super) domains: [u32; MAX_RAILS],
}

impl Source {
    pub(super) fn sge(&self, rail: usize, chunk: Chunk) -> Sge<'static> {
        let addr = self.addrs[rail] + u64::from(chunk.offset);
        Sge::detached(addr, chunk.len, self.lkeys[rail], self.domains[rail], ACCESS)
    }
}

const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// Reads the clear-to-send of buffer `index` of message `number`; those of the message are at `at` of `memory`. `None` if it has not arrived.
#[inline(always)]
pub(super) fn read_one(
    memory: &Mr,
    at: usize,
    number: u64,
    index: usize,
) -> Result<Option<ClearToSend>, Violation> {
    let Ok(bytes) = memory.load::<CTS_LEN>(at + index * CTS_LEN) else { return Ok(None) };
    let Some(wanted) = ClearToSend::decode(&bytes, number) else { return Ok(None) };
    wanted.check(number, index)?;
    Ok(Some(wanted))
}

/// The next message. It is read and written in place: nearly all messages have one buffer, and the arrays have room for
/// [`MAX_GROUP`].
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Head {
    wanted: [ClearToSend; MAX_GROUP],
    sources: [Source; MAX_GROUP],
    // Last, beside what a sender needs for a message over one rail.
    /// Buffers that the receiver wants; 0 if its clear-to-sends have not arrived. The first `count` of `wanted` are valid.
    count: usize,
    /// Bit `i`: a send was matched with buffer `i`, and `sources[i]` is valid.
    matched: u8,
}

const _: () = assert!(MAX_GROUP <= 8, "`matched` has eight bits");

impl Head {
    /// Whether the clear-to-sends have not arrived.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Reads the clear-to-sends of message `number`, which are at `at` of `memory`. False if not all of them have arrived.
    pub(super) fn read(
        &mut self,
        memory: &Mr,
        at: usize,
        number: u64,
        max_group: usize,
    ) -> Result<bool, Violation> {
        let (mut index, mut count) = (0, 1);
        while index < count {
            let Some(wanted) = read_one(memory, at, number, index)? else { return Ok(false) };
            if index == 0 {
                count = usize::from(wanted.count);
            }
            if usize::from(wanted.count) != count || count > max_group {
                let what = "the number of buffers is wrong";
                return Err(Violation::BadClearToSend { message: number, what });
            }
            self.wanted[index] = wanted;
            index += 1;
        }
        (self.count, self.matched) = (count, 0);
        Ok(true)
    }

    /// The first buffer with this tag that has no send yet: its index and its room.
    #[inline]
    pub(super) fn find_free(&self, tag: u32) -> Option<(usize, u64)> {
        let mut wanted = self.wanted[..self.count].iter().enumerate();
        let (index, wanted) = wanted.find(|(index, wanted)| wanted.tag == tag && !self.has_source(*index))?;
        Some((index, wanted.size))
    }

    /// Matches a send with a buffer.
    #[inline]
    pub(super) fn match_source(&mut self, index: usize, source: Source) {
        self.sources[index] = source;
        self.matched |= 1 << index;
    }

    /// Whether a send was matched with this buffer.
    #[inline]
    pub(super) fn has_source(&self, index: usize) -> bool {
        index < self.count && self.matched & (1 << index) != 0
    }

    /// Whether all buffers have a send.
    #[inline]
    pub(super) fn is_matched(&self) -> bool {
        self.matched.count_ones() as usize == self.count
    }

    /// Empties it; returns what was matched.
    #[inline]
    pub(super) fn take(&mut self) -> impl Iterator<Item = (&Source, &ClearToSend)> {
        let count = core::mem::take(&mut self.count);
        self.sources[..count].iter().zip(&self.wanted[..count])
    }
}
