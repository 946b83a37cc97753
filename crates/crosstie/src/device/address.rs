//! Addresses of devices and queue pairs, in a form that can be sent to a peer.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The address of a device's port. Opaque above the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceAddress {
    /// The provider: [`DeviceAddress::SOFTWARE`] or [`DeviceAddress::VERBS`].
    pub provider: u8,
    /// Link layer for verbs: 1 InfiniBand, 2 Ethernet.
    pub link_layer: u8,
    /// Path MTU as a verbs code (1 = 256 bytes ... 5 = 4096 bytes).
    pub mtu: u8,
    /// Zero.
    pub reserved: u8,
    /// LID, for InfiniBand.
    pub lid: u16,
    /// Zero.
    pub reserved2: u16,
    /// GID; for the software device, the 16 random bytes that are its name.
    pub gid: [u8; 16],
}

impl DeviceAddress {
    /// `provider` of the software device.
    pub const SOFTWARE: u8 = 1;
    /// `provider` of verbs devices.
    pub const VERBS: u8 = 2;
}

/// The address of a queue pair. Send it to the peer that will connect to the queue pair.
///
/// ```
/// use crosstie::device::QpAddress;
/// use zerocopy::{FromBytes, IntoBytes};
/// let bytes = [0u8; size_of::<QpAddress>()];
/// let address = QpAddress::read_from_bytes(&bytes).unwrap();
/// assert_eq!(address.as_bytes(), bytes);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct QpAddress {
    /// Its device and port.
    pub device: DeviceAddress,
    /// Its number.
    pub qp_num: u32,
    /// The first packet sequence number that it will send.
    pub psn: u32,
}
