//! What devices say to each other while connecting: fixed messages over a Unix socket in the abstract namespace.
//!
//! The socket's name is the device's random name, so nothing lies in a file system. Both sides check the other's user before
//! they believe or give anything: a device serves its own user only.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, UCred, sockopt,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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

fn name(gid: &[u8; 16]) -> io::Result<SocketAddrUnix> {
    let mut text = *b"crosstie-00000000000000000000000000000000";
    for (i, byte) in gid.iter().enumerate() {
        let digits = b"0123456789abcdef";
        text[9 + 2 * i] = digits[usize::from(byte >> 4)];
        text[10 + 2 * i] = digits[usize::from(byte & 15)];
    }
    Ok(SocketAddrUnix::new_abstract_name(&text)?)
}

/// The socket that a device with this name answers on. Not blocking.
pub(super) fn listen(gid: &[u8; 16]) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &name(gid)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// A connection to the device with this name.
pub(super) fn connect(gid: &[u8; 16]) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
    rustix::net::connect(&socket, &name(gid)?)?;
    Ok(socket)
}

/// Who is at the other end.
pub(super) fn peer(socket: impl AsFd) -> io::Result<UCred> {
    Ok(sockopt::socket_peercred(socket)?)
}

/// Sends one message: a fixed head, a payload, perhaps a file.
pub(super) fn send(
    socket: impl AsFd,
    head: &[u8],
    payload: &[u8],
    file: Option<rustix::fd::BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.into_iter().collect();
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::Error::from(io::ErrorKind::OutOfMemory));
    }
    let parts = [IoSlice::new(head), IoSlice::new(payload)];
    let sent = rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    if sent == head.len() + payload.len() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WriteZero)) }
}

/// Receives one message into `head` and `payload`; says how many payload bytes came, and the file if there was one.
pub(super) fn receive(
    socket: impl AsFd,
    head: &mut [u8],
    payload: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let head_len = head.len();
    let got = {
        let mut parts = [IoSliceMut::new(head), IoSliceMut::new(payload)];
        rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes
    };
    let mut file = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            file = files.last().or(file);
        }
    }
    match got {
        0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        _ if got < head_len => Err(io::Error::from(io::ErrorKind::InvalidData)),
        _ => Ok((got - head_len, file)),
    }
}
