//! A process of another user gets nothing from a software device, and gives nothing to one.
//!
//! Needs root, which can become somebody else; fails loudly otherwise.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use crosstie::device::*;
use zerocopy::{FromBytes, IntoBytes};

const NOBODY: u32 = 65534;
const ROLE: &str = "CROSSTIE_OTHER_USER";

/// Plays the other user when started by the tests below; an ordinary run has nothing to play.
#[test]
fn the_other_user() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    // SAFETY: plain system calls. After them this process has no way back to root.
    let dropped = unsafe { libc::setgid(NOBODY) == 0 && libc::setuid(NOBODY) == 0 };
    assert!(dropped, "could not become user {NOBODY}");
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
fn is_refused_in_both_directions() {
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
        .env(ROLE, "1")
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
    // Our own user goes on being served.
    qp.connect(&qp.address(), &ConnectConfig::default()).unwrap();
}
