//! The address of an endpoint, as bytes for its peer.
//!
//! ```text
//!   0        8      10         12           16          20              28              28 + 32 n
//!  +--------+------+----------+------------+-----------+---------------+-- - - - - - --+
//!  | magic  |  n   | messages | imm window | rkey      |  address      |  queue pairs  |     transfers first, then messages
//!  +--------+------+----------+------------+-----------+---------------+-- - - - - - --+
//! ```
//!
//! Rkey and address name memory of which the peer may READ the first 8 bytes, to find out whether this side lives. Behind the first
//! 64 bytes it WRITEs its control messages, into 2 x messages + 22 pieces of 32 bytes.

use crosstie_protocol::endpoint::imm_window::MAX_WINDOW;
use crosstie_protocol::endpoint::message::{MAX_PARTS, Violation};
use zerocopy::{FromBytes, IntoBytes};

use super::config::MAX_MESSAGES;
use crate::device::{DeviceAddress, QpAddress, RemoteAddr};

/// The version of the protocol. In version 1 control messages were SENDs, and version 2 had no withdrawals.
const VERSION: u8 = 3;
/// `crosstie endpoint`, and the version.
const MAGIC: [u8; 8] = [b'c', b't', b'e', b'n', b'd', b'p', 0, VERSION];
const HEADER: usize = 28;
const QP_SIZE: usize = size_of::<QpAddress>();

/// The address of an endpoint. Send its [bytes](EndpointAddress::to_bytes) to the peer.
///
/// ```
/// use crosstie::endpoint::{Endpoint, EndpointAddress, EndpointConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let endpoint = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
/// let bytes = endpoint.address().to_bytes();
/// assert_eq!(EndpointAddress::from_bytes(&bytes)?, endpoint.address());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointAddress {
    pub(super) messages: u16,
    pub(super) imm_window: u32,
    /// Memory that the peer may READ, to find out whether this side lives, and into which it WRITEs its control messages.
    pub(super) control: RemoteAddr,
    /// Queue pairs for transfers, then as many for messages.
    pub(super) queue_pairs: Vec<QpAddress>,
}

impl EndpointAddress {
    /// The most bytes of an address.
    pub const MAX_BYTES: usize = HEADER + 2 * MAX_PARTS * QP_SIZE;

    /// Its device.
    pub fn device(&self) -> DeviceAddress {
        self.queue_pairs[0].device
    }

    /// The address as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::MAX_BYTES);
        bytes.extend(MAGIC);
        bytes.extend((self.queue_pairs.len() as u16).to_le_bytes());
        bytes.extend(self.messages.to_le_bytes());
        bytes.extend(self.imm_window.to_le_bytes());
        bytes.extend(self.control.rkey.to_le_bytes());
        bytes.extend(self.control.addr.to_le_bytes());
        self.queue_pairs.iter().for_each(|qp| bytes.extend(qp.as_bytes()));
        bytes
    }

    /// The address with these bytes, which may come from an untrusted peer.
    pub fn from_bytes(bytes: &[u8]) -> Result<EndpointAddress, Violation> {
        let (header, rest) = bytes.split_at_checked(HEADER).ok_or(Violation::Address)?;
        if header[..7] == MAGIC[..7] && header[7] != VERSION {
            return Err(Violation::Version { expected: VERSION, found: header[7] });
        }
        let count = usize::from(u16::from_le_bytes([header[8], header[9]]));
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let address = EndpointAddress {
            messages: u16::from_le_bytes([header[10], header[11]]),
            imm_window: word(12),
            control: RemoteAddr { rkey: word(16), addr: u64::from(word(20)) | u64::from(word(24)) << 32 },
            queue_pairs: rest
                .chunks_exact(QP_SIZE)
                .filter_map(|qp| QpAddress::read_from_bytes(qp).ok())
                .take(2 * MAX_PARTS)
                .collect(),
        };
        let valid = header[..8] == MAGIC
            && count == address.queue_pairs.len()
            && rest.len() == count * QP_SIZE
            && count >= 2
            && count.is_multiple_of(2)
            && (1..=MAX_MESSAGES).contains(&address.messages)
            && (1..=MAX_WINDOW).contains(&address.imm_window)
            && address.queue_pairs.iter().all(|qp| qp.device == address.queue_pairs[0].device);
        if valid { Ok(address) } else { Err(Violation::Address) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn address_of_another_version_is_refused_as_such() {
        let address = |version| {
            let mut bytes = [&MAGIC[..7], &[version, 2, 0, 4, 0, 4, 0, 0, 0]].concat();
            bytes.resize(HEADER + 2 * QP_SIZE, 7);
            EndpointAddress::from_bytes(&bytes)
        };
        assert!(address(VERSION).is_ok());
        for other in [0, 1, 2, 4, 255] {
            assert_eq!(address(other), Err(Violation::Version { expected: VERSION, found: other }));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_address_or_a_violation(mut bytes in proptest::collection::vec(any::<u8>(), 0..700), pairs in 0u16..10, valid in any::<bool>()) {
            if valid && bytes.len() >= HEADER {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[8..10].copy_from_slice(&(2 * pairs).to_le_bytes());
                bytes[10..16].copy_from_slice(&[4, 0, 4, 0, 0, 0]);
                bytes[HEADER..].fill(7);
                bytes.resize(HEADER + 2 * usize::from(pairs) * QP_SIZE, 7);
                prop_assert_eq!(EndpointAddress::from_bytes(&bytes).is_ok(), (1..=8).contains(&pairs));
            }
            if let Ok(address) = EndpointAddress::from_bytes(&bytes) {
                prop_assert_eq!(address.to_bytes(), bytes);
            }
        }
    }
}
