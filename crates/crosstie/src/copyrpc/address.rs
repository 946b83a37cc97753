//! Names of connections: inside their context, and for a peer that connects to them.

use crosstie_protocol::copyrpc::Violation;
use crosstie_protocol::copyrpc::wire::{CONNECT_INFO_SIZE, ConnectInfo};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::device::QpAddress;

/// Identifies a connection inside its context. An id is used again only after about 2^20 connections with the same index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub(super) u32);

/// The address of one side of a connection, as plain bytes that can be sent to the peer.
///
/// ```
/// use crosstie::copyrpc::ConnectionAddress;
/// use zerocopy::{FromBytes, IntoBytes};
/// let bytes = [0u8; size_of::<ConnectionAddress>()];
/// assert_eq!(ConnectionAddress::read_from_bytes(&bytes).unwrap().as_bytes(), bytes);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConnectionAddress {
    qp: QpAddress,
    info: [u8; CONNECT_INFO_SIZE],
}

impl ConnectionAddress {
    pub(super) fn new(qp: QpAddress, info: &ConnectInfo) -> ConnectionAddress {
        ConnectionAddress { qp, info: info.encode() }
    }

    pub(super) fn qp(&self) -> QpAddress {
        self.qp
    }

    pub(super) fn info(&self) -> Result<ConnectInfo, Violation> {
        ConnectInfo::decode(&self.info)
    }
}
