//! Descriptors of registered regions, for sending them to a peer.
//!
//! A [`RemoteRegion`] says where memory is, how long it is, what a peer may do with it, and which device it belongs to.
//! The receiver can cut slices out of it; a slice never reaches beyond the descriptor it was cut from.
//!
//! ```text
//!  offset  bytes  content
//!  0       4      "CTR1": a descriptor, version 1
//!  4       4      rights: bit 0 READ, bit 1 WRITE, bit 2 atomics; all others zero
//!  8       8      address of the first byte
//!  16      8      length in bytes
//!  24      4      rkey
//!  28      4      zero
//!  32      16     GID of the device that the memory is registered with
//! ```
//!
//! Integers are little-endian.
//!
//! Promises:
//! - Decoding is total: any bytes decode to a descriptor that a correct peer could have sent, or to a [`DescriptorError`].
//! - The last byte's address does not overflow, in a descriptor that was decoded and in every slice of it.
//! - A slice has the rights of its descriptor, or fewer.
//!
//! The descriptor is a promise of the owner, not a protection: the owner's device checks key, bounds and rights of every
//! access. The GID is the incarnation of the owner on devices that draw a new one each time they are opened (the software
//! device): a descriptor that a peer sent before it restarted is then recognised without asking it.

/// Bytes of an encoded descriptor.
pub const DESCRIPTOR_SIZE: usize = 48;
const MAGIC: [u8; 4] = *b"CTR1";

/// What a peer may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Rights {
    /// READ.
    pub read: bool,
    /// WRITE and WRITE+IMM.
    pub write: bool,
    /// Compare-and-swap and fetch-and-add.
    pub atomic: bool,
}

impl Rights {
    /// All rights.
    pub const ALL: Rights = Rights { read: true, write: true, atomic: true };

    /// Whether these rights include `other`.
    pub const fn contain(self, other: Rights) -> bool {
        (self.read || !other.read) && (self.write || !other.write) && (self.atomic || !other.atomic)
    }

    /// The rights that are in both.
    pub const fn and(self, other: Rights) -> Rights {
        Rights {
            read: self.read && other.read,
            write: self.write && other.write,
            atomic: self.atomic && other.atomic,
        }
    }

    const fn bits(self) -> u32 {
        self.read as u32 | (self.write as u32) << 1 | (self.atomic as u32) << 2
    }

    const fn from_bits(bits: u32) -> Option<Rights> {
        if bits > 7 {
            return None;
        }
        Some(Rights { read: bits & 1 != 0, write: bits & 2 != 0, atomic: bits & 4 != 0 })
    }
}

/// A region, or a slice of one, as its owner describes it to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteRegion {
    addr: u64,
    len: u64,
    rkey: u32,
    rights: Rights,
    gid: [u8; 16],
}

/// Bytes that are not a descriptor, or a slice that is not inside its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The bytes do not begin as a descriptor of this version does.
    #[error("not a region descriptor of version 1")]
    NotADescriptor,
    /// Unknown rights, or a word that must be zero and is not.
    #[error("invalid region descriptor: {0} is {1:#x}")]
    Invalid(&'static str, u64),
    /// The region would reach beyond the last address.
    #[error("invalid region descriptor: {len} bytes at address {addr:#x} reach beyond the last address")]
    TooLong {
        /// Address of the first byte.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The slice is not inside the region.
    #[error("{len} bytes at offset {offset} are not inside the remote region of {region} bytes")]
    OutOfRegion {
        /// Offset of the slice.
        offset: u64,
        /// Length of the slice.
        len: u64,
        /// Length of the region.
        region: u64,
    },
}

impl RemoteRegion {
    /// Describes a region. Fails if it reaches beyond the last address.
    pub const fn new(
        addr: u64,
        len: u64,
        rkey: u32,
        rights: Rights,
        gid: [u8; 16],
    ) -> Result<RemoteRegion, DescriptorError> {
        if len > 0 && addr.checked_add(len - 1).is_none() {
            return Err(DescriptorError::TooLong { addr, len });
        }
        Ok(RemoteRegion { addr, len, rkey, rights, gid })
    }

    /// Encodes it.
    pub fn encode(&self) -> [u8; DESCRIPTOR_SIZE] {
        let mut bytes = [0; DESCRIPTOR_SIZE];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.rights.bits().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.rkey.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.gid);
        bytes
    }

    /// Decodes bytes that a peer sent.
    pub fn decode(bytes: &[u8; DESCRIPTOR_SIZE]) -> Result<RemoteRegion, DescriptorError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[0..4] != MAGIC {
            return Err(DescriptorError::NotADescriptor);
        }
        let rights = Rights::from_bits(word(4))
            .ok_or(DescriptorError::Invalid("the word of rights", word(4).into()))?;
        if word(28) != 0 {
            return Err(DescriptorError::Invalid("the reserved word", word(28).into()));
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[32..48]);
        RemoteRegion::new(long(8), long(16), word(24), rights, gid)
    }

    /// The slice of `len` bytes at `offset`.
    #[inline]
    pub const fn slice(&self, offset: u64, len: u64) -> Result<RemoteRegion, DescriptorError> {
        if offset > self.len || len > self.len - offset {
            return Err(DescriptorError::OutOfRegion { offset, len, region: self.len });
        }
        // An empty slice at the end of the last possible region wraps to address zero; it names no byte.
        Ok(RemoteRegion { addr: self.addr.wrapping_add(offset), len, ..*self })
    }

    /// The same memory with those of its rights that `rights` has, too.
    pub const fn restrict(&self, rights: Rights) -> RemoteRegion {
        RemoteRegion { rights: self.rights.and(rights), ..*self }
    }

    /// Address of the first byte, for the owner's device.
    #[inline]
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    #[inline]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is zero.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The remote key.
    #[inline]
    pub const fn rkey(&self) -> u32 {
        self.rkey
    }

    /// What a peer may do with it.
    #[inline]
    pub const fn rights(&self) -> Rights {
        self.rights
    }

    /// GID of the device that the memory is registered with.
    #[inline]
    pub const fn gid(&self) -> &[u8; 16] {
        &self.gid
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_descriptor() -> impl Strategy<Value = RemoteRegion> {
        (any::<u64>(), any::<u64>(), any::<u32>(), any::<[bool; 3]>(), any::<[u8; 16]>()).prop_map(
            |(addr, len, rkey, [read, write, atomic], gid)| {
                let len = if addr == 0 { len } else { len % (u64::MAX - addr + 1) };
                RemoteRegion::new(addr, len, rkey, Rights { read, write, atomic }, gid).unwrap()
            },
        )
    }

    proptest! {
        #[test]
        fn a_descriptor_survives_encoding(descriptor in any_descriptor()) {
            prop_assert_eq!(RemoteRegion::decode(&descriptor.encode()), Ok(descriptor));
        }

        /// Whatever decodes is what its encoding says, byte for byte, so there is no second meaning.
        #[test]
        fn any_bytes_decode_to_a_descriptor_with_these_bytes_or_to_an_error(
            descriptor in any_descriptor(),
            changes in proptest::collection::vec((0..DESCRIPTOR_SIZE, any::<u8>()), 0..6),
        ) {
            let mut bytes = descriptor.encode();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            if let Ok(decoded) = RemoteRegion::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
                prop_assert!(decoded.is_empty() || decoded.addr().checked_add(decoded.len() - 1).is_some());
            }
        }

        #[test]
        fn random_bytes_do_not_panic(bytes in any::<[u8; 32]>(), more in any::<[u8; 16]>()) {
            let mut all = [0; DESCRIPTOR_SIZE];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&more);
            prop_assert!(RemoteRegion::decode(&all).is_err() || all[..4] == MAGIC);
        }

        #[test]
        fn a_slice_of_slices_stays_inside_its_region(
            descriptor in any_descriptor(),
            cuts in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<bool>()), 1..6),
        ) {
            let mut slice = descriptor;
            for (offset, len, near) in cuts {
                // Offsets and lengths around the bound are as likely as any others.
                let (offset, len) = if near { (offset % 3, slice.len().wrapping_sub(len % 4)) } else { (offset, len) };
                match slice.slice(offset, len) {
                    Ok(inner) => {
                        prop_assert_eq!(inner.len(), len);
                        slice = inner;
                    }
                    Err(error) => {
                        prop_assert_eq!(error, DescriptorError::OutOfRegion { offset, len, region: slice.len() });
                        prop_assert!(u128::from(offset) + u128::from(len) > u128::from(slice.len()));
                    }
                }
                let begin = u128::from(slice.addr().wrapping_sub(descriptor.addr()));
                prop_assert!(begin + u128::from(slice.len()) <= u128::from(descriptor.len()));
                prop_assert_eq!((slice.rkey(), slice.rights(), slice.gid()),
                    (descriptor.rkey(), descriptor.rights(), descriptor.gid()));
            }
        }
    }

    #[test]
    fn invalid_words_are_refused() {
        let good = RemoteRegion::new(4096, 64, 7, Rights::ALL, [9; 16]).unwrap().encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            RemoteRegion::decode(&bytes)
        };
        assert_eq!(with(3, b'2'), Err(DescriptorError::NotADescriptor));
        assert_eq!(with(4, 8), Err(DescriptorError::Invalid("the word of rights", 8)));
        assert_eq!(with(7, 1), Err(DescriptorError::Invalid("the word of rights", 1 << 24 | 7)));
        assert_eq!(with(28, 1), Err(DescriptorError::Invalid("the reserved word", 1)));
        let (addr, len) = (4096, 0xFF << 56 | 64);
        assert!(with(23, 0xFF).is_ok(), "it ends before the last address");
        assert_eq!(
            RemoteRegion::new(u64::MAX - 10, 12, 0, Rights::ALL, [0; 16]),
            Err(DescriptorError::TooLong { addr: u64::MAX - 10, len: 12 })
        );
        assert_eq!(RemoteRegion::new(addr, len, 7, Rights::ALL, [9; 16]), with(23, 0xFF));
    }

    #[test]
    fn rights_can_only_be_given_away() {
        let read = Rights { read: true, ..Rights::default() };
        let descriptor = RemoteRegion::new(0, 8, 1, read, [0; 16]).unwrap();
        assert_eq!(descriptor.restrict(Rights::ALL).rights(), read);
        assert_eq!(descriptor.restrict(Rights::default()).rights(), Rights::default());
        assert!(Rights::ALL.contain(read) && !read.contain(Rights::ALL) && read.contain(read));
    }
}
