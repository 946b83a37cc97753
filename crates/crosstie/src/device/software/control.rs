//! What devices say to each other while connecting: fixed messages over a Unix socket in the abstract namespace.
//!
//! The socket's name is the device's random name, so nothing lies in a file system. Both sides check the other's user before
//! they believe or give anything: a device serves its own user only.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::link::hex;
use crate::local::socket::{self, Address};

/// Version of everything that two devices must agree on: these messages and the segment's layout.
pub(super) const VERSION: u32 = 1;

/// Payload of one message at most; copies on behalf of a peer are cut into such pieces.
pub(super) const MAX_PAYLOAD: usize = 32 * 1024;

/// How long an answer may take. The other side's service never waits for anything, so this is long.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is asked.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Request {
    pub(super) kind: u32,
    pub(super) version: u32,
    pub(super) gid: [u8; 16],
    pub(super) qp_num: u32,
    pub(super) key: u32,
    pub(super) addr: u64,
    pub(super) a: u64,
    pub(super) b: u64,
}

impl Request {
    pub(super) const HELLO: u32 = 1;
    pub(super) const LINE: u32 = 2;
    /// No answer.
    pub(super) const QP_ERROR: u32 = 3;
    /// No answer.
    pub(super) const CQ_OVERRUN: u32 = 4;
    pub(super) const WRITE: u32 = 5;
    pub(super) const READ: u32 = 6;
    pub(super) const COMPARE_SWAP: u32 = 7;
    pub(super) const FETCH_ADD: u32 = 8;

    pub(super) fn new(kind: u32) -> Request {
        Request { kind, version: VERSION, gid: [0; 16], qp_num: 0, key: 0, addr: 0, a: 0, b: 0 }
    }
}

/// What is answered.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Reply {
    pub(super) status: u32,
    pub(super) version: u32,
    pub(super) value: u64,
}

impl Reply {
    pub(super) const OK: u32 = 0;
    pub(super) const OTHER_USER: u32 = 1;
    pub(super) const OTHER_VERSION: u32 = 2;
    pub(super) const EXHAUSTED: u32 = 3;
    pub(super) const NO_SUCH_REGION: u32 = 4;
    pub(super) const MALFORMED: u32 = 5;

    pub(super) fn new(status: u32, value: u64) -> Reply {
        Reply { status, version: VERSION, value }
    }
}

fn address(gid: &[u8; 16]) -> io::Result<Address> {
    Address::new(format!("crosstie-{}", hex(gid)).as_bytes())
}

/// The socket that a device with this name answers on. Not blocking.
pub(super) fn listen(gid: &[u8; 16]) -> io::Result<OwnedFd> {
    socket::listen(&address(gid)?)
}

/// A connection to the device with this name.
pub(super) fn connect(gid: &[u8; 16]) -> io::Result<OwnedFd> {
    socket::connect(&address(gid)?, PATIENCE)
}
