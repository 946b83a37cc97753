//! A port of a device: its address and its speed.

use super::discovery::{self, Gid, GidKind};
use crate::device::DeviceAddress;

/// How peers reach a port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) address: DeviceAddress,
    pub(super) gid_index: u8,
}

impl Identity {
    /// What a port that is active says about itself. `mtu` is its code.
    pub(super) fn set_port(&mut self, lid: u16, mtu: u32) {
        self.address.lid = lid;
        self.address.mtu = u8::try_from(mtu).unwrap_or(1).clamp(1, 5);
    }

    pub(super) fn set_gid(&mut self, gid: &Gid) {
        self.gid_index = gid.index;
        self.address.gid = gid.address.octets();
    }
}

/// Bytes per microsecond of a port, from the codes for its lanes' speed and number. Encoding overhead is left out for the old speeds
/// only (8b/10b), whose overhead matters.
pub(super) fn link_rate(speed: u8, width: u8) -> u32 {
    // Mbit/s of one lane: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR.
    let lane = match speed {
        1 => 2_000,
        2 => 4_000,
        4 => 8_000,
        8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 2_000,
    };
    let lanes = match width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    lane * lanes / 8
}

/// The GID to use: the one that was asked for, or the best one.
pub(super) fn find_gid(gids: &[Gid], chosen: Option<u8>, is_infiniband: bool) -> Option<&Gid> {
    match chosen {
        Some(index) => gids.iter().find(|gid| gid.index == index),
        // On InfiniBand, the first GID is the port's own.
        None if is_infiniband => gids.iter().min_by_key(|gid| (gid.kind != GidKind::InfiniBand, gid.index)),
        None => discovery::choose_gid(gids),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_follows_the_lid_and_the_mtu_of_the_port() {
        let address = DeviceAddress {
            provider: DeviceAddress::VERBS,
            link_layer: 1,
            mtu: 5,
            reserved: 0,
            lid: 4,
            reserved2: 0,
            gid: [1; 16],
        };
        let mut identity = Identity { address, gid_index: 0 };
        for (lid, mtu, expected) in [(9, 4, 4), (9, 0, 1), (9, 77, 5), (9, u32::MAX, 1)] {
            identity.set_port(lid, mtu);
            assert_eq!((identity.address.lid, identity.address.mtu), (lid, expected));
        }
    }
}
