//! Unix sockets in the abstract namespace: names, credentials of the peer, and messages that carry files.
//!
//! Sockets are of type SEQPACKET: one send is one message. An abstract name is free again when its last descriptor is
//! closed, so a dead process leaves nothing behind. Any user may take any name. So both sides check with [`Peer::of`]
//! which user the peer belongs to, before they trust it or send anything.

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

/// Most files in one message.
pub(crate) const MAX_FILES: usize = 4;
/// Length of the accept queue. Further clients block in `connect` until there is room.
const BACKLOG: i32 = 128;

/// The name of a service. Unique per kind of service and user.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name(String);

/// Why a string is not a valid [`Name`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    #[error("the name has {0} bytes; 1 to {max} are allowed", max = Name::MAX)]
    Length(usize),
    #[error("the name contains {0:?}; letters, digits and any of ._-/ are allowed")]
    Character(char),
}

impl Name {
    /// Longest name, in bytes.
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

/// The address of a listening socket.
#[derive(Clone, Debug)]
pub(crate) struct Address(SocketAddrUnix);

impl Address {
    /// The address of a service of our own user. It contains the user id, so users do not collide.
    pub(crate) fn of_service(kind: &str, name: &Name) -> io::Result<Address> {
        let user = rustix::process::geteuid().as_raw();
        Address::new(format!("crosstie/{kind}/{user}/{name}").as_bytes())
    }

    pub(crate) fn new(bytes: &[u8]) -> io::Result<Address> {
        Ok(Address(SocketAddrUnix::new_abstract_name(bytes)?))
    }
}

/// Opens a non-blocking socket that listens at an address. The error is `AddrInUse` while any process holds the address.
pub(crate) fn listen(at: &Address) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &at.0)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to a listening socket. The socket is blocking, but connecting and every later call on it take at most
/// `timeout`. The error is `ConnectionRefused` if nobody listens.
pub(crate) fn connect(to: &Address, timeout: Duration) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(timeout))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    loop {
        match rustix::net::connect(&socket, &to.0) {
            Ok(()) => return Ok(socket),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Connects to a listening socket without waiting. The error is `WouldBlock` while too many connections wait to be accepted.
pub(crate) fn connect_nonblocking(to: &Address) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &to.0)?;
    Ok(socket)
}

/// The process at the other end of a socket: the one that connected, or the one that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) uid: u32,
    /// None if the process is not visible from here, for example because it runs in another container.
    pub(crate) pid: Option<Pid>,
}

impl Peer {
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Peer> {
        let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: both pointers are to locals; `len` is the size of the first one. We do not use rustix here, because its
        // type for the process id cannot be zero, and the kernel reports zero for a process that is not visible.
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

    /// Opens a pidfd, which becomes readable when the process ends, even if a forked child keeps its sockets open. The error
    /// is `NotFound` if the process has ended. None for this process, and where the kernel offers no pidfd (before Linux
    /// 5.3, or for a process in another container): then only the closed socket shows the end.
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

/// Sends one message: a header of fixed size, a payload, and files, if any.
pub(crate) fn send(
    socket: impl AsFd,
    header: &[u8],
    payload: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = files.len() <= MAX_FILES;
    if !fits || !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many files for one message"));
    }
    let parts = [IoSlice::new(header), IoSlice::new(payload)];
    let sent = loop {
        match rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => break sent?,
        }
    };
    if sent == header.len() + payload.len() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WriteZero)) }
}

/// Receives one message into `header` and `payload`. Returns the number of payload bytes, and the files. The error is
/// `UnexpectedEof` when the peer has closed the socket, `InvalidData` for a message that is shorter than the header or
/// longer than both buffers, and `EMFILE` if this process may not have as many files.
pub(crate) fn receive(
    socket: impl AsFd,
    header: &mut [u8],
    payload: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let header_len = header.len();
    let mut parts = [IoSliceMut::new(header), IoSliceMut::new(payload)];
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
    // Alignment leaves room for one file more than `MAX_FILES`.
    files.truncate(MAX_FILES);
    match got.bytes {
        0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        // There was room for more files, but this process may not have more.
        _ if got.flags.contains(ReturnFlags::CTRUNC) && files.len() < MAX_FILES => {
            Err(rustix::io::Errno::MFILE.into())
        }
        bytes if bytes < header_len || got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) => {
            Err(io::Error::from(io::ErrorKind::InvalidData))
        }
        bytes => Ok((bytes - header_len, files)),
    }
}

/// Shuts a connection down for every process that holds a descriptor of it, including forked children.
pub(crate) fn shut_down(socket: impl AsFd) {
    // This fails only if the peer has shut the connection down already.
    rustix::net::shutdown(socket, rustix::net::Shutdown::Both).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_names_are_rejected() {
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
    fn longest_name_fits_into_an_address() {
        let name = Name::new(&"x".repeat(Name::MAX)).unwrap();
        assert!(Address::of_service("delegation", &name).is_ok());
    }

    #[test]
    fn messages_keep_their_boundaries_and_carry_files() {
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
        let (mut header, mut payload) = ([0; 4], [0; 8]);
        send(&a, b"head", b"payload", &files).unwrap();
        let (len, received) = receive(&b, &mut header, &mut payload).unwrap();
        assert_eq!((&header, &payload[..len], received.len()), (b"head", &b"payload"[..], MAX_FILES));
        assert!(send(&a, b"head", b"", &[a.as_fd(); MAX_FILES + 1]).is_err(), "one file too many");

        send(&a, b"head", b"too long by 1", &[]).unwrap();
        send(&a, b"sho", b"", &[]).unwrap();
        for _ in 0..2 {
            let kind = receive(&b, &mut header, &mut payload).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::InvalidData);
        }
        shut_down(&a);
        let kind = receive(&b, &mut header, &mut payload).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::UnexpectedEof);
    }
}
