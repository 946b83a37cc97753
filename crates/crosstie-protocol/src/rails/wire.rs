//! What the ends write into each other's memory, and the entries of a fence.
//!
//! All integers are little-endian.

use super::{MAX_GROUP, MAX_MESSAGE, MAX_RAILS, Violation};

/// Length of a [`ClearToSend`] in bytes: one cache line.
pub const CTS_LEN: usize = 64;
/// Length of a [`Record`] in bytes.
pub const RECORD_LEN: usize = 8 + 8 * MAX_GROUP;

/// Tells the sender one buffer of a request. A request with `count` buffers has `count` of them, one after the other.
///
/// ```text
///  0      8        24      32    36     37     38    40         48       56
/// +------+--------+-------+-----+------+------+-----+----------+--------+-------+
/// | addr | rkeys  | size  | tag |index | count| zero| high     | seq    | check |
/// | u64  | 4 u32  | u64   | u32 |u8    | u8   |     | 4 u16    | u64    | u64   |
/// +------+--------+-------+-----+------+------+-----+----------+--------+-------+
/// ```
///
/// `addr` is the lower 48 bits of the address, which all rails share; `high` is the upper 16 bits on each rail. A device may use
/// them to tell registrations of the same memory apart.
///
/// `seq` is the number of the message plus one. The sender polls this memory without a completion, so it may see a part of the
/// line only: `check` is a sum over all other words, and a line whose sum is wrong has not arrived yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClearToSend {
    /// Address of the buffer, per rail. The lower 48 bits are the same on all rails.
    pub addrs: [u64; MAX_RAILS],
    /// Key of the buffer's region, per rail.
    pub rkeys: [u32; MAX_RAILS],
    /// Length of the buffer.
    pub size: u64,
    /// The tag that a send must have to go there.
    pub tag: u32,
    /// Which buffer of the request this is.
    pub index: u8,
    /// How many buffers the request has.
    pub count: u8,
}

/// Bits of an address that all rails share.
const ADDRESS_BITS: u32 = 48;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;

#[inline]
fn check_of(words: &[u64; 8]) -> u64 {
    let mut sum = 0x9e37_79b9_7f4a_7c15_u64;
    for word in &words[..7] {
        sum = (sum ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    sum
}

#[inline]
fn to_words(bytes: &[u8; CTS_LEN]) -> [u64; 8] {
    let (chunks, _) = bytes.as_chunks::<8>();
    core::array::from_fn(|i| u64::from_le_bytes(chunks[i]))
}

impl ClearToSend {
    /// The bytes of this clear-to-send for message `message`.
    #[inline]
    pub fn encode(&self, message: u64) -> [u8; CTS_LEN] {
        let mut words = [0u64; 8];
        words[0] = self.addrs[0] & ADDRESS;
        words[1] = u64::from(self.rkeys[0]) | u64::from(self.rkeys[1]) << 32;
        words[2] = u64::from(self.rkeys[2]) | u64::from(self.rkeys[3]) << 32;
        words[3] = self.size;
        words[4] = u64::from(self.tag) | u64::from(self.index) << 32 | u64::from(self.count) << 40;
        for (rail, addr) in self.addrs.iter().enumerate() {
            words[5] |= (addr >> ADDRESS_BITS) << (16 * rail);
        }
        words[6] = message + 1;
        words[7] = check_of(&words);
        let mut bytes = [0; CTS_LEN];
        for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    /// The clear-to-send of message `message`, if it has arrived in `bytes`.
    #[inline]
    pub fn decode(bytes: &[u8; CTS_LEN], message: u64) -> Option<ClearToSend> {
        let words = to_words(bytes);
        if words[6] != message + 1 || words[7] != check_of(&words) {
            return None;
        }
        Some(ClearToSend {
            addrs: core::array::from_fn(|rail| {
                words[0] & ADDRESS | (words[5] >> (16 * rail) & 0xffff) << ADDRESS_BITS
            }),
            rkeys: [words[1] as u32, (words[1] >> 32) as u32, words[2] as u32, (words[2] >> 32) as u32],
            size: words[3],
            tag: words[4] as u32,
            index: (words[4] >> 32) as u8,
            count: (words[4] >> 40) as u8,
        })
    }

    /// Checks the values that a peer chose; `index` is the place at which it was found.
    pub fn check(&self, message: u64, index: usize) -> Result<(), Violation> {
        let bad = |what| Err(Violation::BadClearToSend { message, what });
        if self.count == 0 || usize::from(self.count) > MAX_GROUP {
            return bad("the number of buffers is not from 1 to 8");
        }
        if usize::from(self.index) != index {
            return bad("the buffers are not in order");
        }
        if self.size > MAX_MESSAGE {
            return bad("the buffer is longer than any message");
        }
        Ok(())
    }
}

/// The sizes of a group, written by the leader rail.
///
/// ```text
///  0     8                          72
/// +-----+--------+-----+-----------+
/// | seq | size 0 | ... | size n-1  |      seq: number of the message plus one
/// +-----+--------+-----+-----------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Bytes sent into each buffer of the request.
    pub sizes: [u64; MAX_GROUP],
}

impl Record {
    /// The length of the record of a group of `count`.
    pub fn len_of(count: usize) -> usize {
        8 + 8 * count
    }

    /// The bytes of the record of message `message`.
    pub fn encode(&self, message: u64) -> [u8; RECORD_LEN] {
        let mut bytes = [0; RECORD_LEN];
        let words = core::iter::once(message + 1).chain(self.sizes);
        for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    /// The record of message `message`; `None` if `bytes` are of another message.
    pub fn decode(bytes: &[u8; RECORD_LEN], message: u64) -> Option<Record> {
        let (chunks, _) = bytes.as_chunks::<8>();
        if u64::from_le_bytes(chunks[0]) != message + 1 {
            return None;
        }
        Some(Record { sizes: core::array::from_fn(|i| u64::from_le_bytes(chunks[i + 1])) })
    }
}

/// The parts of one message that were under way on a rail that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceEntry {
    /// The slot of the message.
    pub slot: u8,
    /// The generation of the message.
    pub generation: u16,
    /// Bit `a`: attempt `a` has a part on the rail. In the answer: that part has arrived.
    pub attempts: u16,
    /// Bits `4a` to `4a + 3`: the mask of attempt `a`. If no part of an attempt has arrived, the receiver knows its rails only
    /// from here.
    pub masks: u64,
}

impl FenceEntry {
    /// Length of an encoded entry.
    pub const LEN: usize = 13;

    /// The bytes of the entry.
    pub fn encode(&self) -> [u8; FenceEntry::LEN] {
        let mut bytes = [0; FenceEntry::LEN];
        bytes[0] = self.slot;
        bytes[1..3].copy_from_slice(&self.generation.to_le_bytes());
        bytes[3..5].copy_from_slice(&self.attempts.to_le_bytes());
        bytes[5..].copy_from_slice(&self.masks.to_le_bytes());
        bytes
    }

    /// The entry with these bytes.
    pub fn decode(bytes: &[u8; FenceEntry::LEN]) -> FenceEntry {
        FenceEntry {
            slot: bytes[0],
            generation: u16::from_le_bytes([bytes[1], bytes[2]]),
            attempts: u16::from_le_bytes([bytes[3], bytes[4]]),
            masks: u64::from_le_bytes(core::array::from_fn(|i| bytes[5 + i])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partly_written_clear_to_send_has_not_arrived() {
        let high = 0xbeef << ADDRESS_BITS;
        let old = ClearToSend { addrs: [1; 4], rkeys: [1, 2, 3, 4], size: 5, tag: 6, index: 0, count: 1 };
        let new = ClearToSend {
            addrs: [7, 7 | high, 7, 7 | u64::MAX << ADDRESS_BITS],
            rkeys: [8, 2, 9, 4],
            size: 77,
            tag: 6,
            index: 0,
            count: 2,
        };
        let (before, after) = (old.encode(3), new.encode(259));
        assert_eq!(ClearToSend::decode(&before, 3), Some(old));
        assert_eq!(ClearToSend::decode(&after, 259), Some(new));
        assert_eq!(ClearToSend::decode(&[0; CTS_LEN], 0), None);
        // Any subset of the words of the new line over the old one.
        for subset in 0..255u32 {
            let mut mixed = before;
            for word in (0..8).filter(|word| subset & (1 << word) != 0) {
                mixed[8 * word..8 * word + 8].copy_from_slice(&after[8 * word..8 * word + 8]);
            }
            if mixed != after {
                assert_eq!(ClearToSend::decode(&mixed, 259), None, "{subset:#b}");
            }
        }
    }

    #[test]
    fn records_and_fence_entries_survive_encoding() {
        let record = Record { sizes: [1, 2, 3, 4, 5, 6, 7, u64::MAX] };
        assert_eq!(Record::decode(&record.encode(9), 9), Some(record));
        assert_eq!(Record::decode(&record.encode(9), 10), None);
        let entry = FenceEntry { slot: 255, generation: 0x7ffe, attempts: 0x8001, masks: 0xf00d_1234 };
        assert_eq!(FenceEntry::decode(&entry.encode()), entry);
    }
}
