//! Unix sockets in the abstract namespace: names, whom one talks to, and messages with files.
//!
//! Sockets are of type SEQPACKET: one send is one message. An abstract name is free again when its last descriptor is
//! closed, so nothing is left behind by a dead process. Any user may take any name; whoever connects checks with
//! [`Peer::of`] whom it has reached before it believes or gives anything, and so does whoever accepts.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::Pid;

/// Files with one message at most.
pub(crate) const MAX_FILES: usize = 4;
/// Connections that wait to be accepted at most; who comes then waits for a place.
const BACKLOG: i32 = 128;

/// What a service is called, within its kind and its user.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name(String);

/// A name that cannot be one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    #[error("a name has 1 to {max} bytes, this one {0}", max = Name::MAX)]
    Length(usize),
    #[error("a name is made of letters, digits and any of ._-/, not of {0:?}")]
    Character(char),
}

impl Name {
    /// Bytes at most.
    pub(crate) const MAX: usize = 64;

    pub(crate) fn new(name: &str) -> Result<Name, NameError> {
        if let Some(bad) = name.chars().find(|c| !(c.is_ascii_alphanumeric() || "._-/".contains(*c))) {
            return Err(NameError::Character(bad));
        }
        if name.is_empty() || name.len() > Name::MAX {
            return Err(NameError::Length(name.len()));
        }
        Ok(Name(name.into()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where a socket listens.
#[derive(Clone, Debug)]
pub(crate) struct Address(SocketAddrUnix);

impl Address {
    /// Of a service of ours: other users' services have other addresses.
    pub(crate) fn of_service(kind: &str, name: &Name) -> io::Result<Address> {
        let user = rustix::process::geteuid().as_raw();
        Address::new(format!("crosstie/{kind}/{user}/{name}").as_bytes())
    }

    pub(crate) fn new(bytes: &[u8]) -> io::Result<Address> {
        Ok(Address(SocketAddrUnix::new_abstract_name(bytes)?))
    }
}

/// A socket that listens there. Not blocking. The error is `AddrInUse` while somebody alive holds the address.
pub(crate) fn listen(at: &Address) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &at.0)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A connection to whoever listens there. Blocking, but neither connecting nor any later call takes longer than
/// `patience`. The error is `ConnectionRefused` if nobody listens.
pub(crate) fn connect(to: &Address, patience: Duration) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(patience))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
    loop {
        match rustix::net::connect(&socket, &to.0) {
            Ok(()) => return Ok(socket),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Who is at the other end: who connected, or who listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) uid: u32,
    /// None if it cannot be seen from here, as that of a process in another container.
    pub(crate) pid: Option<Pid>,
}

impl Peer {
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Peer> {
        let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: both pointers are to locals; `len` is the first one's size. Not rustix, which takes a process number
        // for never zero.
        let got = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut credentials).cast(),
                &raw mut len,
            )
        };
        if got != 0 || len as usize != size_of::<libc::ucred>() {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer { uid: credentials.uid, pid: Pid::from_raw(credentials.pid.max(0)) })
    }

    pub(crate) fn is_our_user(&self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
    }

    pub(crate) fn is_this_process(&self) -> bool {
        self.pid == Some(rustix::process::getpid())
    }

    /// A descriptor that tells when the process ends, also if a forked child keeps its sockets open. `NotFound` if it has
    /// ended. None if it is this process, or where the kernel has none to give (before 5.3, or in another container):
    /// then the socket tells.
    pub(crate) fn process(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = self.pid.filter(|_| !self.is_this_process()) else { return Ok(None) };
        match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            Ok(process) => Ok(Some(process)),
            Err(rustix::io::Errno::SRCH) => Err(io::Error::from(io::ErrorKind::NotFound)),
            Err(e @ (rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) => Err(e.into()),
            Err(_) => Ok(None),
        }
    }
}

/// Sends one message: a fixed head, a payload, perhaps files.
pub(crate) fn send(
    socket: impl AsFd,
    head: &[u8],
    payload: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = files.len() <= MAX_FILES;
    if !fits || !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many files for one message"));
    }
    let parts = [IoSlice::new(head), IoSlice::new(payload)];
    let sent = loop {
        match rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => break sent?,
        }
    };
    if sent == head.len() + payload.len() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WriteZero)) }
}

/// Receives one message into `head` and `payload`; says how many payload bytes came, and which files. The error is
/// `UnexpectedEof` at the end, and `InvalidData` for a message that is shorter than its head or longer than there is room.
pub(crate) fn receive(
    socket: impl AsFd,
    head: &mut [u8],
    payload: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let head_len = head.len();
    let mut parts = [IoSliceMut::new(head), IoSliceMut::new(payload)];
    let got = loop {
        match rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            got => break got?,
        }
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            files.extend(sent);
        }
    }
    // Alignment leaves room for one file more than was asked for.
    files.truncate(MAX_FILES);
    match got.bytes {
        0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        bytes if bytes < head_len || got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) => {
            Err(io::Error::from(io::ErrorKind::InvalidData))
        }
        bytes => Ok((bytes - head_len, files)),
    }
}

/// Ends a connection for everybody who holds a descriptor of it, forked children included.
pub(crate) fn hang_up(socket: impl AsFd) {
    // It fails only if the other side was faster.
    rustix::net::shutdown(socket, rustix::net::Shutdown::Both).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["a", "kv/shard-7.main", &"x".repeat(Name::MAX)] {
            assert_eq!(Name::new(good).unwrap().to_string(), good);
        }
        assert_eq!(Name::new(""), Err(NameError::Length(0)));
        assert_eq!(Name::new(&"x".repeat(65)), Err(NameError::Length(65)));
        assert_eq!(Name::new("a b"), Err(NameError::Character(' ')));
        assert_eq!(Name::new("é"), Err(NameError::Character('é')));
        assert_eq!(Name::new("a\0"), Err(NameError::Character('\0')));
    }

    #[test]
    fn the_longest_address_fits() {
        let name = Name::new(&"x".repeat(Name::MAX)).unwrap();
        assert!(Address::of_service("delegation", &name).is_ok());
    }

    #[test]
    fn messages_keep_their_bounds_and_carry_files() {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        let peer = Peer::of(&a).unwrap();
        assert!(peer.is_our_user() && peer.is_this_process() && peer.process().unwrap().is_none());
        let files: Vec<_> = (0..MAX_FILES).map(|_| a.as_fd()).collect();
        let (mut head, mut payload) = ([0; 4], [0; 8]);
        send(&a, b"head", b"payload", &files).unwrap();
        let (len, received) = receive(&b, &mut head, &mut payload).unwrap();
        assert_eq!((&head, &payload[..len], received.len()), (b"head", &b"payload"[..], MAX_FILES));
        assert!(send(&a, b"head", b"", &[a.as_fd(); MAX_FILES + 1]).is_err(), "one file too many");

        send(&a, b"head", b"too long by 1", &[]).unwrap();
        send(&a, b"sho", b"", &[]).unwrap();
        for _ in 0..2 {
            let kind = receive(&b, &mut head, &mut payload).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::InvalidData);
        }
        hang_up(&a);
        let kind = receive(&b, &mut head, &mut payload).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::UnexpectedEof);
    }
}
