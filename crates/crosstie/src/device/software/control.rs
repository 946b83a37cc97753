//! The messages that two software devices exchange while connecting, and for operations that a peer cannot perform itself:
//! fixed-size structures over a Unix socket in the abstract namespace.
//!
//! The socket's name is the device's random name, so nothing is created in a file system. Both ends check the user of the
//! other process before they trust it or hand anything over: a device serves its own user only.

use std::io;
use std::time::Duration;

use rustix::process::Pid;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::local::socket::{self, Address, ListeningSocket, Peer, Socket};

/// Version of everything that two devices must agree on: these messages and the layout of the segment.
pub(super) const VERSION: u32 = 5;

/// Longest payload of one message; longer proxied copies are split.
pub(super) const MAX_PAYLOAD: usize = 32 * 1024;

/// How long to wait for a reply. The peer's service thread never blocks on a peer, so a missing reply means that it is
/// stopped or gone.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A message from the connecting device. A device has one request at a time on a connection. Its number is in the reply, so that a reply
/// that comes late, or that nobody asked for, is not taken for another one.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Request {
    pub(super) kind: u32,
    /// HELLO: [`VERSION`]. A request that has a reply: its number on this connection.
    pub(super) version_or_number: u32,
    pub(super) gid: [u8; 16],
    pub(super) qp_num: u32,
    pub(super) key: u32,
    pub(super) addr: u64,
    pub(super) a: u64,
    pub(super) b: u64,
}

impl Request {
    /// First message: `gid` names the sender, `a` is the magic number. The reply carries the segment.
    pub(super) const HELLO: u32 = 1;
    /// Asks for a peer line, for a datagram sender. The reply's `value` is its index and, in bits 32 and up, the sender's
    /// number.
    pub(super) const PEER_LINE: u32 = 2;
    /// Queue pair `qp_num` must go to ERR if it is in epoch `a`. No reply.
    pub(super) const QP_ERROR: u32 = 3;
    /// As `QP_ERROR`, because its completion queue overran. No reply.
    pub(super) const CQ_OVERRUN: u32 = 4;
    /// Write the payload of `a` bytes to memory registered in place.
    pub(super) const WRITE: u32 = 5;
    /// Read `a` bytes of memory registered in place.
    pub(super) const READ: u32 = 6;
    /// Compare with `a` and swap to `b`. The reply's `value` is the former value.
    pub(super) const COMPARE_SWAP: u32 = 7;
    /// Add `a`. The reply's `value` is the former value.
    pub(super) const FETCH_ADD: u32 = 8;
    /// Asks for the segment with the sender's peer lines. The reply carries it.
    pub(super) const PEER_LINES: u32 = 9;

    pub(super) fn new(kind: u32) -> Request {
        Request { kind, version_or_number: VERSION, gid: [0; 16], qp_num: 0, key: 0, addr: 0, a: 0, b: 0 }
    }
}

/// The reply of the serving device.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Reply {
    pub(super) status: u32,
    /// As in the request: [`VERSION`] in the reply to HELLO, otherwise the number of the request.
    pub(super) version_or_number: u32,
    pub(super) value: u64,
}

impl Reply {
    pub(super) const OK: u32 = 0;
    pub(super) const OTHER_VERSION: u32 = 2;
    pub(super) const EXHAUSTED: u32 = 3;
    pub(super) const NO_SUCH_REGION: u32 = 4;
    pub(super) const MALFORMED: u32 = 5;
    /// The process that sent HELLO does not listen under the name of its device.
    pub(super) const NOT_YOURS: u32 = 6;
    /// The process that sent HELLO is in a PID namespace that the device's process does not see.
    pub(super) const NOT_VISIBLE: u32 = 7;

    pub(super) fn new(status: u32, value: u64) -> Reply {
        Reply { status, version_or_number: VERSION, value }
    }
}

fn address(gid: &[u8; 16]) -> io::Result<Address> {
    Address::new(format!("crosstie-{}", hex(gid)).as_bytes())
}

/// Opens the socket on which the device with this name serves its peers. Non-blocking.
pub(super) fn listen(gid: &[u8; 16]) -> io::Result<ListeningSocket> {
    socket::listen(&address(gid)?)
}

/// Connects to the device with this name.
pub(super) fn connect(gid: &[u8; 16]) -> io::Result<Socket> {
    socket::connect(&address(gid)?, REPLY_TIMEOUT)
}

/// Whether this process listens under the device's name. Never blocks. An error if that cannot be found out now.
pub(super) fn is_device_of(gid: &[u8; 16], process: Pid) -> io::Result<bool> {
    match socket::connect_nonblocking(&address(gid)?) {
        Ok(socket) => Ok(Peer::of(&socket)?.pid == Some(process)),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether no device has this name any more. Never blocks. Names are random, so no device will have it again.
pub(super) fn is_gone(gid: &[u8; 16]) -> bool {
    let connected = address(gid).and_then(|address| socket::connect_nonblocking(&address));
    connected.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}

/// A device's name as text.
pub(super) fn hex(gid: &[u8; 16]) -> String {
    gid.iter().map(|byte| format!("{byte:02x}")).collect()
}
