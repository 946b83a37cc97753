//! Which device and path a connection uses.

use crate::device::DeviceAddress;

/// The device and the path of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Path {
    /// The kind of device: `software` or `verbs`.
    pub provider: &'static str,
    /// This side's device and port.
    pub local: DeviceAddress,
    /// The peer's device and port.
    pub peer: DeviceAddress,
    /// Queue pairs for transfers, and as many for messages.
    pub queue_pairs: usize,
}

/// The kind of device of an address.
pub(super) fn provider_name(provider: u8) -> &'static str {
    match provider {
        DeviceAddress::SOFTWARE => "software",
        DeviceAddress::VERBS => "verbs",
        _ => "unknown",
    }
}
