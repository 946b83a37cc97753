//! The path to a peer: what the device needs to know to reach its address.

use rdma_mummy_sys as ffi;

use crate::device::{ConnectConfig, DeviceAddress, DeviceError};

/// How packets are marked for the network, see [`ConnectConfig`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PacketMarks {
    service_level: u8,
    traffic_class: u8,
}

impl From<&ConnectConfig> for PacketMarks {
    fn from(config: &ConnectConfig) -> PacketMarks {
        PacketMarks { service_level: config.service_level, traffic_class: config.traffic_class }
    }
}

/// The address vector of a peer. The address came from outside, so every field is checked.
pub(super) fn address_vector(
    from: &DeviceAddress,
    (port, gid_index): (u8, u8),
    to: &DeviceAddress,
    marks: PacketMarks,
) -> Result<ffi::ibv_ah_attr, DeviceError> {
    if to.provider != DeviceAddress::VERBS {
        return Err(DeviceError::BadAddress("it is not the address of a verbs device"));
    }
    if to.link_layer != from.link_layer {
        return Err(DeviceError::BadAddress(
            "one port is InfiniBand and the other Ethernet; they cannot connect",
        ));
    }
    if !(1..=5).contains(&to.mtu) {
        return Err(DeviceError::BadAddress("its MTU code is not 1 to 5"));
    }
    let ethernet = to.link_layer == 2;
    let routed = ethernet || to.lid == 0 || to.gid[..8] != from.gid[..8];
    if routed && to.gid == [0; 16] {
        return Err(DeviceError::BadAddress("it has neither GID nor LID"));
    }
    Ok(ffi::ibv_ah_attr {
        grh: ffi::ibv_global_route {
            dgid: ffi::ibv_gid { raw: to.gid },
            flow_label: 0,
            sgid_index: gid_index,
            hop_limit: 64,
            traffic_class: marks.traffic_class,
        },
        dlid: if ethernet { 0 } else { to.lid },
        sl: marks.service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: u8::from(routed),
        port_num: port,
    })
}

/// The error for a peer to which there is no route; `None` if `error` has another cause.
pub(super) fn unreachable_error(to: &DeviceAddress, error: &std::io::Error) -> Option<DeviceError> {
    let known = [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::EADDRNOTAVAIL];
    error.raw_os_error().filter(|code| known.contains(code)).map(|_| {
        let gid = core::net::Ipv6Addr::from(to.gid);
        DeviceError::Unreachable(format!(
            "no route to GID {gid} ({error}): check addresses, routes and the GID index"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_carry_the_service_level_and_the_traffic_class_of_the_connection() {
        let address = |last: u8| DeviceAddress {
            provider: DeviceAddress::VERBS,
            link_layer: 2,
            mtu: 5,
            reserved: 0,
            lid: 0,
            reserved2: 0,
            gid: [last; 16],
        };
        let vector = |config: &ConnectConfig| {
            let made = address_vector(&address(1), (1, 3), &address(2), config.into()).unwrap();
            (made.sl, made.grh.traffic_class, made.is_global)
        };
        assert_eq!(vector(&ConnectConfig::default()), (0, 0, 1));
        let marked = ConnectConfig { service_level: 3, traffic_class: 0x6a, ..ConnectConfig::default() };
        assert_eq!(vector(&marked), (3, 0x6a, 1));
    }

    /// The address that a peer sends: a path to it has an allowed MTU and somewhere to go, or there is an error.
    #[cfg(not(loom))]
    #[test]
    fn fuzz_verbs_address() {
        use zerocopy::{FromBytes, IntoBytes};
        let ours = DeviceAddress {
            provider: DeviceAddress::VERBS,
            link_layer: 2,
            mtu: 5,
            reserved: 0,
            lid: 0,
            reserved2: 0,
            gid: [1; 16],
        };
        let infiniband = DeviceAddress { link_layer: 1, lid: 7, ..ours };
        let examples = [ours, infiniband].map(|address| address.as_bytes().to_vec());
        crate::fuzzing::fuzz(env!("CARGO_MANIFEST_DIR"), "verbs_address", examples, |input| {
            let Ok(to) = DeviceAddress::read_from_bytes(input) else { return };
            for from in [&ours, &infiniband] {
                if let Ok(path) = address_vector(from, (1, 3), &to, (&ConnectConfig::default()).into()) {
                    assert_eq!((to.provider, to.link_layer), (DeviceAddress::VERBS, from.link_layer));
                    assert!((1..=5).contains(&to.mtu) && (path.is_global == 1 || path.dlid != 0));
                    assert!(path.is_global == 0 || to.gid != [0; 16]);
                }
            }
        });
    }
}
