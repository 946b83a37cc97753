//! What tagged messages carry in front of their bytes, or instead of them (RHiNET §6).
//!
//! ```text
//!  flags                   body
//!  TAGGED                  | tag u64 | bytes ...                                  eager: the message itself
//!  TAGGED | RENDEZVOUS     | tag u64 | key u64 | member region, 64 bytes |        where the receiver PULLs it from
//!  PULLED                  | key u64 | result u64 |                               the receiver has read it, or cannot
//! ```
//!
//! The key names the send at its sender. The receiver only repeats it.

use super::super::packet::{Dropped, InvalidPacket};
use super::super::region::MemberRegion;

/// Bytes of a tag in front of an eager message.
pub const TAG_SIZE: usize = 8;

/// The tag in front of a tagged message. `None` if the message is too short to have one.
#[inline]
pub fn decode_tag(bytes: &[u8]) -> Option<u64> {
    bytes.first_chunk().map(|tag| u64::from_le_bytes(*tag))
}

/// A message that the receiver PULLs out of the sender's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rendezvous {
    /// The tag.
    pub tag: u64,
    /// Names the send at its sender.
    pub key: u64,
    /// Where the bytes are, and how many.
    pub region: MemberRegion,
}

impl Rendezvous {
    /// Bytes of the encoding.
    pub const SIZE: usize = 16 + MemberRegion::SIZE;

    /// Encodes it.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&self.tag.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.key.to_le_bytes());
        bytes[16..].copy_from_slice(&self.region.encode());
        bytes
    }

    /// Decodes bytes that a peer sent.
    pub fn decode(bytes: &[u8]) -> Result<Rendezvous, Dropped> {
        let short = Dropped::Invalid(InvalidPacket::Short { len: bytes.len(), needed: Self::SIZE });
        let bytes: &[u8; Self::SIZE] = bytes.try_into().map_err(|_| short)?;
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        Ok(Rendezvous { tag: word(0), key: word(8), region: MemberRegion::decode(&bytes[16..])? })
    }
}

/// The answer to a [`Rendezvous`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pulled {
    /// The key of the [`Rendezvous`].
    pub key: u64,
    /// Whether the bytes were read. Otherwise the receiver could not read them.
    pub succeeded: bool,
}

impl Pulled {
    /// Bytes of the encoding.
    pub const SIZE: usize = 16;

    /// Encodes it.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8] = u8::from(!self.succeeded);
        bytes
    }

    /// Decodes bytes that a peer sent.
    pub fn decode(bytes: &[u8]) -> Result<Pulled, InvalidPacket> {
        let short = InvalidPacket::Short { len: bytes.len(), needed: Self::SIZE };
        let bytes: &[u8; Self::SIZE] = bytes.try_into().map_err(|_| short)?;
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        match word(8) {
            result @ 0..=1 => Ok(Pulled { key: word(0), succeeded: result == 0 }),
            other => Err(InvalidPacket::Value(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_rendezvous_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(rendezvous) = Rendezvous::decode(&bytes) {
                prop_assert_eq!(&rendezvous.encode()[..], &bytes[..]);
            }
            if let Ok(pulled) = Pulled::decode(&bytes) {
                prop_assert_eq!(&pulled.encode()[..], &bytes[..]);
            }
        }

        #[test]
        fn answer_survives_encoding(key: u64, succeeded: bool) {
            let pulled = Pulled { key, succeeded };
            prop_assert_eq!(Pulled::decode(&pulled.encode()), Ok(pulled));
        }
    }
}
