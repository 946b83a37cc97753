//! Processes of different users cannot connect their software devices, and one cannot find the other's services.
//!
//! Needs root, to become another user; fails with a message otherwise.

mod node_service;

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use crosstie::device::*;
use node_service::Service;
use zerocopy::{FromBytes, IntoBytes};

const NOBODY: u32 = 65534;
const ROLE: &str = "CROSSTIE_OTHER_USER";
const FLOOD_ROLE: &str = "CROSSTIE_SAME_USER_FLOOD";
/// Connections of a flood.
const FLOOD: usize = 500;
/// Descriptors that the tests of this program open besides.
const SLACK: usize = 60;

/// Runs as the other user when the tests below start it in a child process; does nothing in an ordinary run.
#[test]
fn the_other_user() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: plain system calls. After them this process has no way back to root.
    let dropped = unsafe { libc::setgid(NOBODY) == 0 && libc::setuid(NOBODY) == 0 };
    assert!(dropped, "could not become user {NOBODY}");
    if let Some(name) = role.strip_prefix("service ") {
        return look_for_services(name);
    }
    if let Some(address) = role.strip_prefix("flood ") {
        return flood(address);
    }
    let mut address = [0; size_of::<QpAddress>()];
    std::io::stdin().read_exact(&mut address).unwrap();
    let outcome = connect(&QpAddress::read_from_bytes(&address).unwrap());

    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    let mut out = std::io::stderr();
    out.write_all(&[b'>', refused(&outcome).into()]).unwrap();
    out.write_all(qp.address().as_bytes()).unwrap();
    // Until the parent has tried.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

fn connect(to: &QpAddress) -> Result<(), DeviceError> {
    let device = Device::open(&DeviceSpec::Software)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(&CqConfig::default())?;
    pd.create_rc(&QpConfig::default(), &cq, &cq, None)?.connect(to, &ConnectConfig::default())
}

fn refused(outcome: &Result<(), DeviceError>) -> bool {
    matches!(outcome, Err(DeviceError::Refused(_)))
}

#[test]
fn device_of_another_user_is_refused_in_both_directions() {
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    assert_eq!(user, 0, "this test needs root, to become another user: run it with sudo");
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_other_user", "--nocapture"])
        .env(ROLE, "device")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.as_mut().unwrap().write_all(qp.address().as_bytes()).unwrap();
    let mut answer = [0; 2 + size_of::<QpAddress>()];
    child.stderr.as_mut().unwrap().read_exact(&mut answer).unwrap();
    assert_eq!(answer[0], b'>', "the other user failed");
    assert_eq!(answer[1], 1, "another user was let in");
    let theirs = QpAddress::read_from_bytes(&answer[2..]).unwrap();
    let outcome = connect(&theirs);
    assert!(refused(&outcome), "we trusted another user's device: {outcome:?}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    // Our own user is still served.
    qp.connect(&qp.address(), &ConnectConfig::default()).unwrap();
}

/// Connects to a device again and again, says nothing, and holds the connections.
fn flood(address: &str) {
    let address = rustix::net::SocketAddrUnix::new_abstract_name(address.as_bytes()).unwrap();
    let mut connections = Vec::new();
    for _ in 0..FLOOD {
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
        let socket = rustix::net::socket(family, kind, None).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        connections.push(socket);
    }
    std::io::stderr().write_all(b">").unwrap();
    // Until the parent has counted.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Runs as our own user when the test below starts it in a child process; does nothing in an ordinary run.
#[test]
fn the_same_user() {
    if let Ok(address) = std::env::var(FLOOD_ROLE) {
        flood(&address);
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Connections of other users take no descriptors of a device. Connections of our own user that send no hello take a limited
/// number of them, for a limited time.
#[test]
fn connections_that_say_nothing_do_not_exhaust_descriptors() {
    if std::env::var_os(ROLE).is_some() || std::env::var_os(FLOOD_ROLE).is_some() {
        return;
    }
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    assert_eq!(user, 0, "this test needs root, to become another user: run it with sudo");
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let gid: String = device.address().gid.iter().map(|byte| format!("{byte:02x}")).collect();
    let address = format!("crosstie-{gid}");
    let floods =
        [("the_other_user", ROLE, format!("flood {address}"), 0), ("the_same_user", FLOOD_ROLE, address, 64)];
    for (test, variable, role, most) in floods {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(variable, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let before = descriptors();
        let mut ready = [0];
        child.stderr.as_mut().unwrap().read_exact(&mut ready).unwrap();
        assert_eq!(&ready, b">", "the other process failed");
        // A socket and a pidfd each. Other tests of this program open a few descriptors at the same time.
        let after = descriptors();
        assert!(after <= before + 2 * most + SLACK, "{test}: {before} descriptors became {after}");
        // A peer that follows the protocol is served while the others hold their connections.
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        connect(&qp.address()).unwrap();
        qp.connect(&qp.address(), &ConnectConfig::default()).unwrap();
        // Connections without a hello are closed after a while.
        let begun = std::time::Instant::now();
        while descriptors() > before + SLACK {
            assert!(begun.elapsed().as_secs() < 60, "{test}: connections without a hello stay open");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}

/// Runs as the other user: it finds no such service, and it can create one with the same name.
fn look_for_services(name: &str) {
    let (mut fine, mut servers) = (true, Vec::<Box<dyn std::any::Any>>::new());
    node_service::each!(S, {
        fine &= matches!(S::connect(name), Err(crosstie::ipc::ConnectError::NoServer { .. }));
        let server = S::create(name, 1, 1);
        fine &= server.is_ok();
        servers.push(Box::new(server));
    });
    std::io::stderr().write_all(&[b'>', fine.into()]).unwrap();
    // Until the parent has tried.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn another_user_does_not_find_our_service_and_can_use_its_name() {
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    assert_eq!(user, 0, "this test needs root, to become another user: run it with sudo");
    let name = format!("other-user-{}", std::process::id());
    node_service::each!(S, {
        let mut server = S::create(&name, 2, 1).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_user", "--nocapture"])
            .env(ROLE, format!("service {name}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut answer = [0; 2];
        child.stderr.as_mut().unwrap().read_exact(&mut answer).unwrap();
        assert_eq!(answer, [b'>', 1], "another user found the service, or could not have one of that name");
        assert_eq!(S::clients(&mut server), 0);
        // Both users have a service of that name now, and each user finds its own.
        let client = S::connect(&name).unwrap();
        assert_eq!(S::clients(&mut server), 1);
        drop(server);
        // Our service is gone, and we do not find the other user's.
        assert!(matches!(S::connect(&name), Err(crosstie::ipc::ConnectError::NoServer { .. })));
        drop((client, child.stdin.take()));
        assert!(child.wait().unwrap().success());
    });
}
