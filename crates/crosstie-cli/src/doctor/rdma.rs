//! RDMA: whether this build has verbs, libibverbs, the devices, and Soft-RoCE.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Finding, libraries};

const PURPOSE: &str = "traffic between machines";

pub(super) fn findings() -> Vec<Finding> {
    vec![build(), libibverbs(), devices(), soft_roce()]
}

fn build() -> Finding {
    const NAME: &str = "verbs in this build";
    if cfg!(feature = "verbs") {
        return Finding::ok(NAME, "yes");
    }
    Finding::missing(NAME, "no")
        .needed_for(PURPOSE)
        .fix("sudo apt-get install cmake libclang-dev, then cargo build --release --features verbs")
}

fn libibverbs() -> Finding {
    const NAME: &str = "libibverbs";
    match libraries::find("libibverbs.so.1") {
        Some(path) => Finding::ok(NAME, path.display().to_string()),
        None => Finding::missing(NAME, "not found")
            .needed_for(PURPOSE)
            .fix("sudo apt-get install libibverbs1 ibverbs-providers"),
    }
}

#[cfg(feature = "verbs")]
fn devices() -> Finding {
    const NAME: &str = "RDMA devices";
    match crosstie::device::verbs::devices() {
        Ok(devices) if devices.is_empty() => no_device(NAME),
        Ok(devices) => Finding::ok(NAME, devices.iter().map(describe).collect::<Vec<_>>().join("; ")),
        Err(error) => Finding::missing(NAME, error.to_string()).needed_for(PURPOSE),
    }
}

/// For example `rxe0/1 Ethernet ACTIVE, GID 1 RoCE v2 10.0.0.1`.
#[cfg(feature = "verbs")]
fn describe(device: &crosstie::device::verbs::DeviceInfo) -> String {
    let ports = device.ports.iter().map(|port| {
        let gid = port.default_gid().map(|gid| {
            let address = gid.address.to_ipv4_mapped().map_or(gid.address.to_string(), |v4| v4.to_string());
            format!(", GID {} {} {address}", gid.index, gid.kind)
        });
        let gid = gid.unwrap_or_else(|| ", no GID".into());
        format!("verbs:{}/{} {:?} {}{gid}", device.name, port.port, port.link_layer, port.state)
    });
    let ports = ports.collect::<Vec<_>>().join("; ");
    if device.has_driver {
        ports
    } else {
        format!("{ports} (no user-space driver: install ibverbs-providers)")
    }
}

/// A build without verbs lists the names that the kernel shows in sysfs.
#[cfg(not(feature = "verbs"))]
fn devices() -> Finding {
    const NAME: &str = "RDMA devices";
    let names = names_in("/sys/class/infiniband");
    if names.is_empty() { no_device(NAME) } else { Finding::ok(NAME, names.join(", ")) }
}

fn no_device(name: &'static str) -> Finding {
    Finding::missing(name, "none").needed_for(PURPOSE).fix(format!(
        "install an RDMA NIC, or create a Soft-RoCE device on an Ethernet interface: sudo modprobe rdma_rxe && sudo rdma link add rxe0 type rxe netdev {}",
        network_interface()
    ))
}

fn soft_roce() -> Finding {
    const NAME: &str = "Soft-RoCE (rdma_rxe)";
    if Path::new("/sys/module/rdma_rxe").exists() {
        return Finding::ok(NAME, "the kernel module is loaded");
    }
    let known = ["modinfo", "/sbin/modinfo"].into_iter().any(|modinfo| {
        let output = Command::new(modinfo).arg("rdma_rxe").output();
        output.is_ok_and(|output| output.status.success())
    });
    let load =
        format!("sudo modprobe rdma_rxe && sudo rdma link add rxe0 type rxe netdev {}", network_interface());
    if known {
        return Finding::limited(NAME, "the kernel module is available but not loaded")
            .needed_for("RDMA over plain Ethernet")
            .fix(load);
    }
    Finding::missing(NAME, "the running kernel has no such module")
        .needed_for("RDMA over plain Ethernet")
        .fix("boot a distribution's kernel (Debian: linux-image-amd64), or try it in a guest: cargo xtask vm -- rdma link")
}

/// The first network interface other than loopback.
fn network_interface() -> String {
    let names = names_in("/sys/class/net");
    names.into_iter().find(|name| name != "lo").unwrap_or_else(|| "eth0".into())
}

fn names_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
