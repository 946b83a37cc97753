//! Unix sockets in the abstract namespace: names, credentials of the peer, and messages that carry files.
//!
//! Sockets are of type SEQPACKET: one send is one message. An abstract name is free again when its last descriptor is
//! closed, so a dead process leaves nothing behind. Any user may take any name. So both sides check with [`Peer::of`]
//! which user the peer belongs to, before they trust it or send anything.
//!
//! **Files that a peer sends.** Any process of our user can attach any file to any message. Here they become [`ReceivedFile`]s:
//! nothing is called on them that could block, and the last `close`, which can, is left to another thread. [`receive`] treats
//! a message with files as invalid. A listener refuses files before they are sent, where the kernel can (Linux 6.16). Before that, a
//! message with more files than this process may open makes the kernel close the others in our `recvmsg`.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::Pid;

use super::closing;
use crate::process::Creator;

/// Most files in one message of ours.
pub(crate) const MAX_FILES: usize = 4;
/// Most files that the kernel lets a process attach to one message (`SCM_MAX_FD`). There is room for all of them: the kernel closes those
/// for which there is none, and that may block.
const MAX_RECEIVED: usize = 253;
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

/// A connected socket. When it is dropped the peer sees the end, also while a forked child has a descriptor of it. The drop does not
/// block: if messages are left that may carry files, another thread closes it.
#[derive(Debug)]
pub(crate) struct Socket {
    /// None once it is dropped.
    fd: Option<OwnedFd>,
    creator: Creator,
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Socket {
        Socket { fd: Some(fd), creator: Creator::this_process() }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let Some(fd) = &self.fd else { unreachable!("only the drop takes it") };
        fd.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        // In a forked child the connection is still its parent's.
        if !self.creator.is_this_process() {
            return;
        }
        shut_down(&fd);
        // Nothing arrives after the shutdown. What is left may carry files, which the kernel closes with the socket.
        if has_message(&fd) {
            closing::close_later(fd);
        }
    }
}

/// Whether a message waits in a socket that was shut down. What cannot be told counts as one.
fn has_message(socket: &OwnedFd) -> bool {
    // With this option each message carries control data, for which there is no room here: that tells an empty one from the end.
    let set = sockopt::set_socket_passcred(socket, true);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let look = || rustix::net::recvmsg(socket, &mut [], &mut RecvAncillaryBuffer::new(&mut []), flags);
    // If the peer closed its end before it had read everything, the first look reports that, and nothing else.
    let got = match look() {
        Err(rustix::io::Errno::CONNRESET) => look(),
        got => got,
    };
    match got {
        Ok(got) => set.is_err() || got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC),
        // It was never connected.
        Err(rustix::io::Errno::NOTCONN | rustix::io::Errno::AGAIN) => false,
        Err(_) => true,
    }
}

/// A listening socket. When it is dropped nobody can connect any more, also while a forked child has a descriptor of it.
#[derive(Debug)]
pub(crate) struct ListeningSocket {
    fd: OwnedFd,
    /// Whether the kernel refuses files for its connections.
    refuses_files: AtomicBool,
    creator: Creator,
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl ListeningSocket {
    /// Accepts a connection. The socket is not blocking. `AGAIN` if none is waiting.
    pub(crate) fn accept(&self) -> Result<Socket, rustix::io::Errno> {
        if !self.refuses_files.load(Relaxed) && closing::is_behind() {
            return Err(rustix::io::Errno::MFILE);
        }
        self.accept_any()
    }

    /// Has the kernel pass files on, as kernels before Linux 6.16 do.
    #[cfg(all(test, not(loom)))]
    pub(super) fn allow_files(&self) {
        refuse_files(&self.fd, false);
        self.refuses_files.store(false, Relaxed);
    }

    fn accept_any(&self) -> Result<Socket, rustix::io::Errno> {
        rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).map(Socket::from)
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        if self.creator.is_this_process() {
            shut_down(&self.fd);
            // Connections that were not accepted may contain messages with files.
            while !matches!(self.accept_any(), Err(e) if e != rustix::io::Errno::INTR) {}
        }
    }
}

/// Opens a non-blocking socket that listens at an address. The error is `AddrInUse` while any process uses the address.
pub(crate) fn listen(at: &Address) -> io::Result<ListeningSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let refuses_files = refuse_files(&fd, true).into();
    rustix::net::bind(&fd, &at.0)?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok(ListeningSocket { fd, refuses_files, creator: Creator::this_process() })
}

/// Has the kernel refuse files for connections of a listening socket, if it can: then `sendmsg` fails at the peer. Returns whether it can.
fn refuse_files(socket: &OwnedFd, refuse: bool) -> bool {
    // Of most architectures; a few have other numbers for socket options, and go without.
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")) {
        return false;
    }
    const SO_PASSRIGHTS: libc::c_int = 83;
    let pass = libc::c_int::from(!refuse);
    // SAFETY: the pointer is to a local of the given size.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const pass).cast(),
            size_of_val(&pass) as libc::socklen_t,
        )
    };
    debug_assert!(set == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ENOPROTOOPT));
    set == 0
}

/// Connects to a listening socket. The socket is blocking, but connecting and every later call on it take at most
/// `timeout`. The error is `ConnectionRefused` if nobody listens.
pub(crate) fn connect(to: &Address, timeout: Duration) -> io::Result<Socket> {
    let socket: Socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?
            .into();
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
pub(crate) fn connect_nonblocking(to: &Address) -> io::Result<Socket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: Socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?.into();
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

    /// Whether the process belongs to our user, as far as that can be known, see [`Users`].
    pub(crate) fn is_our_user(&self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
            && (self.is_this_process() || Users::of_namespace().are_distinct(self.uid))
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

/// The users of this process's user namespace.
///
/// The kernel shows every user that is not mapped into the namespace under one and the same id, the overflow id. In a namespace that does
/// not map all users, this id names nobody: a process that has it as its own cannot tell processes of its user from those of others.
struct Users {
    overflow: u32,
    all_are_mapped: bool,
}

impl Users {
    fn of_namespace() -> Users {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
        Users::new(&map, &overflow)
    }

    /// From the text of the two files. Without them (no `/proc`) nothing is known.
    fn new(map: &str, overflow: &str) -> Users {
        let length = |line: &str| line.split_whitespace().nth(2)?.parse::<u64>().ok();
        // Each line maps a range; ranges do not overlap. The last number is no user.
        let mapped: u64 = map.lines().filter_map(length).sum();
        Users {
            overflow: overflow.trim().parse().unwrap_or(OVERFLOW_UID),
            all_are_mapped: mapped == u64::from(u32::MAX),
        }
    }

    /// Whether no other user is shown under this id.
    fn are_distinct(&self, uid: u32) -> bool {
        self.all_are_mapped || uid != self.overflow
    }
}

/// The overflow id, unless the administrator has chosen another.
const OVERFLOW_UID: u32 = 65534;

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
    let sent = repeat_interrupted(&socket, sockopt::Timeout::Send, || {
        rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL)
    })?;
    if sent == header.len() + payload.len() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WriteZero)) }
}

/// Sends one message without files, unless that would have to wait.
pub(crate) fn send_now(socket: impl AsFd, message: &[u8]) -> io::Result<()> {
    loop {
        match rustix::net::send(&socket, message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return sent.map(drop).map_err(io::Error::from),
        }
    }
}

/// Repeats a call on a socket as long as signals interrupt it, until the socket's timeout has passed since the first signal. The kernel counts the
/// timeout anew for each call: without this limit, the signals of a timer would make the wait endless.
fn repeat_interrupted<T>(
    socket: impl AsFd,
    timeout: sockopt::Timeout,
    mut call: impl FnMut() -> rustix::io::Result<T>,
) -> io::Result<T> {
    let mut first = None;
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {
                let first = *first.get_or_insert_with(Instant::now);
                if sockopt::socket_timeout(&socket, timeout)?.is_some_and(|limit| first.elapsed() >= limit) {
                    return Err(io::Error::from(io::ErrorKind::TimedOut));
                }
            }
            done => return Ok(done?),
        }
    }
}

/// A file that another process sent. Nothing is known about it, and no call on it is harmless before it is known what it is:
/// [`Segment::open`](crate::memory::segment::Segment::open) finds out. If this is dropped, another thread closes the file.
#[derive(Debug)]
pub struct ReceivedFile(Option<OwnedFd>);

impl ReceivedFile {
    /// The file, of which `is_known` has found out that a `close` does not block. `is_known` calls nothing that blocks for any file.
    pub(crate) fn take_if(mut self, is_known: impl FnOnce(BorrowedFd<'_>) -> bool) -> Option<OwnedFd> {
        let is_known = is_known(self.0.as_ref()?.as_fd());
        if is_known { self.0.take() } else { None }
    }
}

impl From<OwnedFd> for ReceivedFile {
    fn from(file: OwnedFd) -> ReceivedFile {
        ReceivedFile(Some(file))
    }
}

impl Drop for ReceivedFile {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            closing::close_later(file);
        }
    }
}

/// Receives one message into `header` and `payload`. Returns the number of payload bytes. The error is `UnexpectedEof` when the
/// peer has closed the socket, and `InvalidData` for a message that is shorter than the header or longer than both buffers, or that
/// carries files.
pub(crate) fn receive(socket: impl AsFd, header: &mut [u8], payload: &mut [u8]) -> io::Result<usize> {
    match receive_with_files(socket, header, payload)? {
        (len, files) if files.is_empty() => Ok(len),
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
    }
}

/// As [`receive`], for a message that may carry files. The error is `EMFILE` if this process may not have as many files.
pub(crate) fn receive_with_files(
    socket: impl AsFd,
    header: &mut [u8],
    payload: &mut [u8],
) -> io::Result<(usize, Vec<ReceivedFile>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let header_len = header.len();
    let mut parts = [IoSliceMut::new(header), IoSliceMut::new(payload)];
    let got = repeat_interrupted(&socket, sockopt::Timeout::Recv, || {
        rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            files.extend(sent.map(ReceivedFile::from));
        }
    }
    match got.bytes {
        0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        // There was room for all files, but this process may not have as many.
        _ if got.flags.contains(ReturnFlags::CTRUNC) => Err(rustix::io::Errno::MFILE.into()),
        bytes if bytes < header_len || got.flags.contains(ReturnFlags::TRUNC) || files.len() > MAX_FILES => {
            Err(io::Error::from(io::ErrorKind::InvalidData))
        }
        bytes => Ok((bytes - header_len, files)),
    }
}

/// Shuts a connection down for every process that has a descriptor of it, including forked children.
pub(crate) fn shut_down(socket: impl AsFd) {
    // This fails only if the peer has shut the connection down already.
    rustix::net::shutdown(socket, rustix::net::Shutdown::Both).ok();
}

/// Files whose last `close` blocks.
#[cfg(all(test, not(loom)))]
pub(crate) mod blocking_files {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// The last `close` of a blocking file takes at least this long, if its reader lives.
    const LINGER: Duration = Duration::from_secs(120);
    /// What takes longer than this has waited for such a `close`.
    pub(crate) const MAX_ELAPSED: Duration = Duration::from_secs(60);

    /// A TCP socket with bytes that nobody reads.
    pub(crate) struct BlockingFile {
        pub(crate) file: TcpStream,
        /// The other end. When it is dropped, `close` ends.
        pub(crate) reader: (TcpStream, TcpListener),
    }

    pub(crate) fn new() -> BlockingFile {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut file = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        file.set_nonblocking(true).unwrap();
        while file.write(&[0; 65536]).is_ok() {}
        file.set_nonblocking(false).unwrap();
        sockopt::set_socket_linger(&file, Some(LINGER)).unwrap();
        BlockingFile { file, reader: (peer, listener) }
    }
}

#[cfg(all(test, not(loom)))]
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
        let (len, received) = receive_with_files(&b, &mut header, &mut payload).unwrap();
        assert_eq!((&header, &payload[..len], received.len()), (b"head", &b"payload"[..], MAX_FILES));
        send(&a, b"head", b"payload", &files[..1]).unwrap();
        let kind = receive(&b, &mut header, &mut payload).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::InvalidData, "files that nobody asked for");
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

    fn pair() -> (Socket, Socket) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (a.into(), b.into())
    }

    /// Their `close` takes minutes, and all of it is done by another thread.
    #[test]
    fn files_of_a_peer_whose_close_blocks_hold_up_nobody() {
        let [asked, unasked, left, behind, reset] = [(); 5].map(|()| blocking_files::new());
        let (a, b) = pair();
        send(&a, b"head", b"", &[asked.file.as_fd()]).unwrap();
        // More than a message of ours has.
        let many: Vec<_> = (0..MAX_RECEIVED).map(|_| unasked.file.as_fd()).collect();
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        rustix::net::sendmsg(&a, &[IoSlice::new(b"head")], &mut control, SendFlags::NOSIGNAL).unwrap();
        send(&a, b"", b"", &[left.file.as_fd()]).unwrap();
        let (c, d) = pair();
        send(&c, b"", b"", &[]).unwrap();
        send(&c, b"head", b"", &[behind.file.as_fd()]).unwrap();
        // A peer that closes its end with a message in it: the socket reports that before anything else.
        let kind = SocketType::SEQPACKET;
        let (e, f) = rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        send(&f, b"never read", b"", &[]).unwrap();
        send(&e, b"head", b"", &[reset.file.as_fd()]).unwrap();
        drop(e);
        // From here on nobody else has them open.
        drop([asked.file, unasked.file, left.file, behind.file, reset.file]);
        let (begun, mut header) = (Instant::now(), [0; 4]);
        let (_, files) = receive_with_files(&b, &mut header, &mut []).unwrap();
        assert_eq!(files.len(), 1);
        drop(files);
        let refused = receive(&b, &mut header, &mut []).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        drop((b, d, Socket::from(f)));
        assert!(begun.elapsed() < blocking_files::MAX_ELAPSED, "it took {:?}", begun.elapsed());
        drop((a, c));
    }

    #[test]
    fn users_that_a_namespace_does_not_map_are_not_taken_for_ours() {
        let whole = "         0          0 4294967295\n";
        let container = "         0     100000      65536\n";
        let split = "         0       1000          1\n         1     100000      65534\n";
        for (map, overflow, uid, distinct) in [
            (whole, "65534\n", 65534, true),
            (whole, "65534\n", 0, true),
            (container, "65534\n", 65534, false),
            (container, "65534\n", 0, true),
            (container, "1000\n", 1000, false),
            (split, "65534\n", 65534, false),
            ("", "65534\n", 65534, false),
            ("", "", 65534, false),
            ("", "", 1000, true),
        ] {
            assert_eq!(Users::new(map, overflow).are_distinct(uid), distinct, "{map:?} {overflow:?} {uid}");
        }
    }
}
