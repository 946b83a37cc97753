//! Messages that are longer than one packet: splitting and joining (RHiNET §5.2). The bytes stay with the caller.

use thiserror::Error;

use super::super::packet::flags;

/// One packet's piece of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Where the piece starts in the message.
    pub offset: u32,
    /// Bytes of the piece.
    pub len: u32,
    /// [`flags::FIRST`] and [`flags::LAST`].
    pub flags: u8,
    /// What the header's `aux` field carries: the length of the message in the first part, the offset in others.
    pub aux: u32,
}

/// The part of a message of `total` bytes that starts at `offset`, for packets of at most `mtu` bytes. An empty message has one
/// empty part.
#[inline]
pub fn part_at(total: u32, offset: u32, mtu: u32) -> Part {
    let len = (total - offset).min(mtu);
    let mut flags = 0;
    if offset == 0 {
        flags |= flags::FIRST;
    }
    if offset + len == total {
        flags |= flags::LAST;
    }
    Part { offset, len, flags, aux: if offset == 0 { total } else { offset } }
}

/// All parts of a message, in order.
///
/// ```
/// use crosstie_protocol::group::message::split;
/// let lengths: Vec<u32> = split(5000, 2048).map(|part| part.len).collect();
/// assert_eq!(lengths, [2048, 2048, 904]);
/// ```
pub fn split(total: u32, mtu: u32) -> impl Iterator<Item = Part> {
    let mut next = Some(0);
    core::iter::from_fn(move || {
        let part = part_at(total, next?, mtu);
        next = (part.flags & flags::LAST == 0).then_some(part.offset + part.len);
        Some(part)
    })
}

/// Number of packets of a message.
#[inline]
pub const fn part_count(total: u32, mtu: u32) -> u32 {
    if total == 0 { 1 } else { total.div_ceil(mtu) }
}

/// Why parts do not make up a message. It is the sender's fault, so the connection to this sender is to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// A part comes without a start, or not behind the one before it.
    #[error("a part of a message came out of place")]
    Misplaced,
    /// The message is longer than this member accepts.
    #[error("the message has {len} bytes, more than the limit of {max}")]
    TooLong {
        /// Bytes that the sender announced.
        len: u32,
        /// The limit.
        max: u32,
    },
    /// The parts do not add up to the length that the first part announced.
    #[error("the parts of a message do not add up to its length")]
    WrongLength,
}

/// Checks that the parts of one sender make up whole messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Joiner {
    /// Zero: between messages.
    total: u32,
    received: u32,
}

impl Joiner {
    /// Checks the next part and returns where it belongs: offset and message length.
    #[inline]
    pub(super) fn check(
        &self,
        part_flags: u8,
        aux: u32,
        len: u32,
        max: u32,
    ) -> Result<(u32, u32), JoinError> {
        const WHOLE: u8 = flags::FIRST | flags::LAST;
        let between = self.received == 0;
        let (offset, total) = match (part_flags & flags::FIRST != 0, between) {
            // Within another message: its sender has given that up.
            (true, _) => (0, aux),
            (false, false) if aux == self.received => (aux, self.total),
            _ => return Err(JoinError::Misplaced),
        };
        // The length of a combined packet is not that of a message.
        if total > max && part_flags & flags::COMBINED == 0 {
            return Err(JoinError::TooLong { len: total, max });
        }
        let is_last = part_flags & flags::LAST != 0;
        let end = offset.checked_add(len).ok_or(JoinError::WrongLength)?;
        // A part that is not the last has at least one byte, so that `received` tells whether a message is incomplete.
        if end > total || is_last != (end == total) || (len == 0 && part_flags & WHOLE != WHOLE) {
            return Err(JoinError::WrongLength);
        }
        Ok((offset, total))
    }

    /// Applies a part that was checked.
    #[inline]
    pub(super) fn apply(&mut self, offset: u32, total: u32, len: u32) {
        let end = offset + len;
        (self.received, self.total) = if end == total { (0, 0) } else { (end, total) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn split_parts_join_to_the_whole_message(total in 0u32..20_000, mtu in 1u32..2049) {
            let mut joiner = Joiner::default();
            let (mut bytes, mut parts) = (0, 0);
            for part in split(total, mtu) {
                prop_assert!(part.len <= mtu);
                let (offset, whole) = joiner.check(part.flags, part.aux, part.len, 20_000).unwrap();
                prop_assert_eq!((offset, whole), (bytes, total));
                joiner.apply(offset, whole, part.len);
                bytes += part.len;
                parts += 1;
            }
            prop_assert_eq!(bytes, total);
            prop_assert_eq!(parts, part_count(total, mtu));
            prop_assert_eq!(joiner, Joiner::default());
        }

        #[test]
        fn arbitrary_parts_never_exceed_the_announced_length(
            parts in prop::collection::vec((0u8..4, 0u32..64, 0u32..64), 1..40),
        ) {
            let mut joiner = Joiner::default();
            for (flags, aux, len) in parts {
                if let Ok((offset, total)) = joiner.check(flags, aux, len, 50) {
                    prop_assert!(offset + len <= total && total <= 50);
                    joiner.apply(offset, total, len);
                }
            }
        }
    }
}
