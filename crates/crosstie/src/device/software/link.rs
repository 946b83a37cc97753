//! The link to a peer device: its segment, mapped into this process, and a socket to its service thread.
//!
//! **A link that failed is not used again.** A call fails if the peer does not reply in time, because its process is stopped, or if the reply
//! is not the one to this request. Its reply may still come. So the link is dead from then on: no further call is made on it, the service
//! thread forgets it and moves its queue pairs to ERR, and the next connection to the peer makes a new link. The dead one stays open as long as
//! a thread uses it, which may be inside an operation on the peer's segment: when the link is closed, the peer takes the segment for unmapped.
//!
//! **Calls.** One at a time: the others wait for the same peer, and fail with the call in progress. No other thread waits for a call.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::Pid;
use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, MAX_PAYLOAD, REPLY_TIMEOUT, Reply, Request, hex};
use super::in_place;
use super::layout::{
    Header, MAGIC, MAX_DATAGRAM_SENDERS, PEER_LINES_LEN, PeerLine, QPS_AT, QpBlock, QpNum, REGIONS_AT,
    RegionEntry, RegionKey,
};
use super::lock::locked;
use super::peer_lines::OpenLine;
use super::region_keys::pointer;
use super::regions::local_regions;
use super::wakeup::Wakeup;
use crate::device::clock::ticks;
use crate::device::{DeviceError, SendOp, Status};
use crate::local::socket::{self, Peer, Socket};
use crate::memory::segment::{Segment, SharedRef, SharedSlice};

/// The link to a peer device. Lasts until the peer is gone, a call failed, or this device is closed.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Link {
    // What each request needs comes first: one cache line.
    /// The peer's regions: the table in its segment, or its private table if it is a device of this process.
    pub(super) regions: SharedSlice<RegionEntry>,
    /// The peer's process; `None` if it is this process.
    pub(super) pid: Option<Pid>,
    /// Becomes readable when the peer's process ends, see [`Peer::process`].
    pub(super) process: Option<OwnedFd>,
    /// When the peer's process was last seen alive, in [`ticks`].
    seen_alive: AtomicU64,
    dead: AtomicBool,
    /// Whether the kernel refused `process_vm_readv` and `process_vm_writev`, so that the peer's service thread has to copy
    /// for us.
    use_proxy: AtomicBool,
    pub(super) segment: Arc<Segment>,
    pub(super) gid: [u8; 16],
    /// The lines at the peer that are ours to write, see `peer_lines.rs`.
    pub(super) lines: Arc<Segment>,
    pub(super) qps: SharedSlice<QpBlock>,
    /// The number of the last request; locked during a call.
    last_request: Mutex<u32>,
    /// Wakes the service thread that watches this link.
    watcher: OnceLock<Arc<Wakeup>>,
    // Last: its end tells the peer that we have unmapped its segment.
    socket: Socket,
}

/// How long a process is taken to be alive after it was seen alive, in [`ticks`]: 0.4 to 2 ms. The kernel gives an id to another process
/// only after it has gone through all other ids, of which there are at least 32,768: that takes far longer. A system call for each copy
/// would take as long as copying some KiB, and programs that send a message every 100 µs wait for every one of them.
const LIVENESS_VALID: u64 = 2_000_000;

/// First and longest pause before connecting again to a device that closed the connection.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Why connecting failed.
enum ConnectFailure {
    /// The peer closed the connection before it replied.
    Closed(io::Error),
    Final(DeviceError),
}

impl From<DeviceError> for ConnectFailure {
    fn from(e: DeviceError) -> ConnectFailure {
        ConnectFailure::Final(e)
    }
}

fn unreachable(to: &[u8; 16]) -> impl Fn(io::Error) -> DeviceError {
    let name = hex(to);
    move |e| DeviceError::Unreachable(format!("software device {name}: {e}"))
}

fn refused(why: String) -> ConnectFailure {
    ConnectFailure::Final(DeviceError::Refused(why))
}

impl Link {
    /// Connects device `from` to device `to`. When too many processes connect at once, a device closes connections that have
    /// not sent their HELLO yet; this function then pauses and tries again.
    pub(super) fn connect(from: [u8; 16], to: [u8; 16]) -> Result<Link, DeviceError> {
        let deadline = Instant::now() + REPLY_TIMEOUT;
        let mut pause = FIRST_PAUSE;
        loop {
            match Link::try_connect(from, to) {
                Ok(link) => return Ok(link),
                Err(ConnectFailure::Closed(_)) if Instant::now() + pause < deadline => {}
                Err(ConnectFailure::Closed(e)) => return Err(unreachable(&to)(e)),
                Err(ConnectFailure::Final(e)) => return Err(e),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn try_connect(from: [u8; 16], to: [u8; 16]) -> Result<Link, ConnectFailure> {
        let unreachable = unreachable(&to);
        let early = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                ConnectFailure::Closed(e)
            }
            _ => ConnectFailure::Final(unreachable(e)),
        };
        let socket = control::connect(&to).map_err(&unreachable)?;
        let peer = Peer::of(&socket).map_err(&unreachable)?;
        if !peer.is_our_user() {
            return Err(refused(format!("it runs as another user, with uid {}", peer.uid)));
        }
        let Some(pid) = peer.pid else {
            return Err(refused(
                "its process is not visible here; it runs in another PID namespace (container)".into(),
            ));
        };
        let process = peer.process().map_err(&unreachable)?;
        let hello = Request { gid: from, a: MAGIC, ..Request::new(Request::HELLO) };
        socket::send(&socket, hello.as_bytes(), &[], &[]).map_err(early)?;
        let mut reply = Reply::new_zeroed();
        let (_, mut files) =
            socket::receive_with_files(&socket, reply.as_mut_bytes(), &mut []).map_err(early)?;
        match (reply.status, files.pop()) {
            (Reply::OK, Some(file)) => {
                let segment = Arc::new(Segment::open(file, reply.value).map_err(&unreachable)?);
                let invalid = || refused("its segment has an invalid header".into());
                let header: SharedRef<Header> = SharedRef::new(&segment, 0).ok_or_else(invalid)?;
                if header.magic.load(Relaxed) != MAGIC || header.len.load(Relaxed) != reply.value {
                    return Err(invalid());
                }
                let lines = request_lines(&socket).map_err(&unreachable)?;
                // Peers can write the table in the segment. What it says about memory of this process is not used.
                let regions = if peer.is_this_process() {
                    local_regions(&to)
                } else {
                    SharedSlice::new(&segment, REGIONS_AT, RegionKey::INDICES as usize)
                };
                Ok(Link {
                    gid: to,
                    regions: regions.ok_or_else(invalid)?,
                    qps: SharedSlice::new(&segment, QPS_AT, QpNum::INDICES as usize).ok_or_else(invalid)?,
                    segment,
                    lines,
                    pid: (!peer.is_this_process()).then_some(pid),
                    process,
                    seen_alive: AtomicU64::new(ticks().wrapping_sub(LIVENESS_VALID)),
                    dead: AtomicBool::new(false),
                    use_proxy: AtomicBool::new(!peer.is_this_process() && in_place::is_access_refused(pid)),
                    socket,
                    last_request: Mutex::new(FIRST_REQUEST),
                    watcher: OnceLock::new(),
                })
            }
            (Reply::EXHAUSTED, _) => Err(refused("it has as many peers as it can have".into())),
            (Reply::OTHER_VERSION, _) => Err(refused(format!(
                "it uses version {} of the software device, this process uses version {}",
                reply.version_or_number,
                control::VERSION
            ))),
            (Reply::NOT_VISIBLE, _) => Err(refused(
                "our process is not visible to it; it runs in another PID namespace (container)".into(),
            )),
            (Reply::NOT_YOURS, _) => Err(refused(
                "it found another process, or none, under the name of our device; this process was forked after it opened the device, or the two run in different network namespaces (containers)".into(),
            )),
            _ => Err(refused(format!("it replied with status {}", reply.status))),
        }
    }

    /// For epoll, which shall report the end of the connection, and no messages: the thread that sent a request reads the reply.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Has a service thread watch this link.
    pub(super) fn set_watcher(&self, watcher: &Arc<Wakeup>) {
        // A link is watched once.
        self.watcher.get_or_init(|| watcher.clone());
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    pub(super) fn mark_dead(&self) {
        self.dead.store(true, Relaxed);
    }

    /// Ends the use of this link, and has the service thread forget it.
    #[cold]
    fn break_off(&self) {
        self.mark_dead();
        if let Some(watcher) = self.watcher.get() {
            watcher.report_broken_link();
        }
    }

    /// Ends a call that another thread waits for. For a device that is closing: the peer cannot reply any more.
    pub(super) fn interrupt(&self) {
        self.mark_dead();
        // It fails only if the peer has closed the connection.
        rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Read).ok();
    }

    /// Whether a request with this operation may have to wait for the peer's service thread. The others wait for nobody.
    pub(super) fn may_wait(&self, op: &SendOp) -> bool {
        let is_atomic = matches!(op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        self.pid.is_some() && (is_atomic || self.use_proxy.load(Relaxed))
    }

    /// Asks the peer to assign us a line, for a datagram sender; returns the line and the sender's number.
    pub(super) fn request_peer_line(&self) -> Result<(OpenLine, u32), DeviceError> {
        let exhausted = DeviceError::Exhausted { what: "datagram senders at the peer" };
        match self.call(&Request::new(Request::PEER_LINE), &[], &mut []) {
            Ok(Reply { status: Reply::OK, value, .. }) if value >> 32 < u64::from(MAX_DATAGRAM_SENDERS) => {
                let index = value as u32;
                let at = u64::from(index) * size_of::<PeerLine>() as u64;
                // The line is assigned to us; only its tenure is not in the reply.
                let tenure = SharedRef::<PeerLine>::new(&self.lines, at)
                    .map(|line| line.tenure.load(Relaxed))
                    .filter(|tenure| *tenure != 0 && *tenure & 1 == 0);
                tenure
                    .and_then(|tenure| OpenLine::open(&self.lines, index, tenure))
                    .map(|line| (line, (value >> 32) as u32))
                    .ok_or(exhausted)
            }
            Ok(_) => Err(exhausted),
            Err(e) => Err(DeviceError::Unreachable(e.to_string())),
        }
    }

    /// Sends a message that has no reply. Does not wait, neither for a call that is under way nor for the peer. If the message cannot be sent,
    /// the peer is going away, or has not read hundreds of them.
    pub(super) fn send_notice(&self, request: &Request) {
        if !self.is_dead() && socket::send_now(&self.socket, request.as_bytes()).is_err() {
            self.break_off();
        }
    }

    /// Copies between local memory and memory that the peer registered in place.
    ///
    /// # Safety
    ///
    /// `local..local + len` is valid for reads, and for writes if `write` is false.
    pub(super) unsafe fn copy_in_place(
        &self,
        write: bool,
        key: u32,
        addr: u64,
        local: *mut u8,
        len: usize,
    ) -> Result<(), Status> {
        let Some(pid) = self.pid else {
            let remote = pointer(addr);
            // SAFETY: the region belongs to this process and is registered, so its owner keeps it valid; deregistration
            // waits for us, because we are inside an operation (`OperationGuard`).
            unsafe {
                if write {
                    crate::memory::copy::copy(local, remote, len);
                } else {
                    crate::memory::copy::copy(remote, local, len);
                }
            }
            return Ok(());
        };
        if !self.use_proxy.load(Relaxed) {
            // The id of an ended process may be given to another one. So check before that the peer lives, to access no other
            // process, and check after, to take no bytes of another process for the peer's. A check counts for a short time.
            if self.has_ended() {
                return Err(Status::RetryExceeded);
            }
            let remote = pointer(addr).addr() as u64;
            // SAFETY: the caller's promise; the kernel checks the remote address.
            let copied = unsafe { in_place::copy(pid, write, remote, local, len) };
            match copied {
                Ok(()) if self.has_ended() => return Err(Status::RetryExceeded),
                Ok(()) => return Ok(()),
                Err(error) if in_place::is_refusal(error) => self.use_proxy.store(true, Relaxed),
                Err(libc::ESRCH) => return Err(Status::RetryExceeded),
                Err(_) => return Err(Status::RemoteOperation),
            }
        }
        let mut done = 0;
        while done < len {
            let chunk = (len - done).min(MAX_PAYLOAD);
            let request = Request {
                key,
                addr: addr.wrapping_add(done as u64),
                a: chunk as u64,
                ..Request::new(if write { Request::WRITE } else { Request::READ })
            };
            let mut bounce = vec![0u8; chunk];
            // SAFETY: inside the caller's range; `bounce` is private and long enough.
            let reply = unsafe {
                if write {
                    crate::memory::copy::copy(local.add(done), bounce.as_mut_ptr(), chunk);
                    self.call(&request, &bounce, &mut [])
                } else {
                    let reply = self.call(&request, &[], &mut bounce);
                    crate::memory::copy::copy(bounce.as_ptr(), local.add(done), chunk);
                    reply
                }
            };
            proxy_result(reply)?;
            done += chunk;
        }
        Ok(())
    }

    /// Whether the peer's process has ended, or had ended [`LIVENESS_VALID`] ago at the latest.
    #[inline(always)]
    fn has_ended(&self) -> bool {
        let Some(process) = &self.process else { return self.is_dead() };
        let now = ticks();
        // A clock that went backwards, as between two processors, is no reason to believe the last look.
        if now.wrapping_sub(self.seen_alive.load(Relaxed)) < LIVENESS_VALID {
            return false;
        }
        self.poll_process(process, now)
    }

    #[cold]
    fn poll_process(&self, process: &OwnedFd, now: u64) -> bool {
        let no_wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut pidfd = [PollFd::new(process, PollFlags::IN)];
        let has_ended = loop {
            match rustix::event::poll(&mut pidfd, Some(&no_wait)) {
                // A signal for this thread, which says nothing about the peer. A handler takes longer than a poll.
                Err(rustix::io::Errno::INTR) => {}
                // Otherwise the poll fails only for lack of memory. Then nothing is known, and nothing is accessed.
                polled => break polled != Ok(0),
            }
        };
        if !has_ended {
            self.seen_alive.store(now, Relaxed);
        }
        has_ended
    }

    /// Has the peer's service thread perform an atomic on memory that the peer registered in place.
    pub(super) fn atomic_in_place(
        &self,
        kind: u32,
        key: u32,
        addr: u64,
        a: u64,
        b: u64,
    ) -> Result<u64, Status> {
        proxy_result(self.call(&Request { key, addr, a, b, ..Request::new(kind) }, &[], &mut []))
    }

    /// Sends a request and waits for the reply; `response` receives the payload that comes with it. An error ends the use of the link.
    fn call(&self, request: &Request, payload: &[u8], response: &mut [u8]) -> io::Result<Reply> {
        let mut last_request = locked(&self.last_request);
        // Under the lock: the call before may have failed while this one waited for it.
        if self.is_dead() {
            return Err(io::Error::from(io::ErrorKind::NotConnected));
        }
        *last_request = last_request.wrapping_add(1);
        let number = *last_request;
        let request = Request { version_or_number: number, ..*request };
        let mut reply = Reply::new_zeroed();
        socket::send(&self.socket, request.as_bytes(), payload, &[])
            .and_then(|()| socket::receive(&self.socket, reply.as_mut_bytes(), response))
            .and_then(|len| match reply.version_or_number == number {
                true if reply.status != Reply::OK || len == response.len() => Ok(reply),
                _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
            })
            .inspect_err(|_| self.break_off())
    }
}

/// The number of the request for the peer lines; the calls that follow count on.
const FIRST_REQUEST: u32 = 1;

/// Asks the peer for the segment with our peer lines.
fn request_lines(socket: &Socket) -> io::Result<Arc<Segment>> {
    let mut reply = Reply::new_zeroed();
    let request = Request { version_or_number: FIRST_REQUEST, ..Request::new(Request::PEER_LINES) };
    socket::send(socket, request.as_bytes(), &[], &[])?;
    let (_, mut files) = socket::receive_with_files(socket, reply.as_mut_bytes(), &mut [])?;
    match (reply.status, reply.version_or_number, files.pop()) {
        (Reply::OK, FIRST_REQUEST, Some(file)) => Ok(Arc::new(Segment::open(file, PEER_LINES_LEN)?)),
        _ => Err(io::Error::other(
            "it did not hand over the table of peer lines: raise its limits on open files and memory (`ulimit -n`, `ulimit -v`)",
        )),
    }
}

/// The result of an operation that the peer's service thread performed.
fn proxy_result(reply: io::Result<Reply>) -> Result<u64, Status> {
    match reply {
        Ok(Reply { status: Reply::OK, value, .. }) => Ok(value),
        Ok(Reply { status: Reply::NO_SUCH_REGION, .. }) => Err(Status::RemoteAccess),
        Ok(_) => Err(Status::RemoteOperation),
        Err(_) => Err(Status::RetryExceeded),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

    use super::super::invalid_input_tests::shared;
    use super::*;
    use crate::device::{Device, software};

    /// A link whose service thread at the peer is the test: the other end of the socket. A call waits 50 ms.
    fn scripted() -> (Link, OwnedFd, [Device; 2]) {
        let devices = [(); 2].map(|()| Device::open_software(&software::Config { space: 64 << 20 }).unwrap());
        let [from, to] = [0, 1].map(|i| devices[i].address().gid);
        let mut link = Link::connect(from, to).unwrap_or_else(|e| panic!("{e}"));
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(Duration::from_millis(50))).unwrap();
        sockopt::set_socket_timeout(&theirs, sockopt::Timeout::Recv, Some(Duration::from_millis(50)))
            .unwrap();
        link.socket = ours.into();
        (link, theirs, devices)
    }

    fn fetch_add(link: &Link) -> Result<u64, Status> {
        link.atomic_in_place(Request::FETCH_ADD, 1, 0, 1, 0)
    }

    fn receive_request(peer: &OwnedFd) -> io::Result<Request> {
        let mut request = Request::new_zeroed();
        socket::receive(peer, request.as_mut_bytes(), &mut [])?;
        Ok(request)
    }

    fn reply(peer: &OwnedFd, version_or_number: u32, value: u64) {
        let reply = Reply { version_or_number, ..Reply::new(Reply::OK, value) };
        socket::send(peer, reply.as_bytes(), &[], &[]).unwrap();
    }

    #[test]
    fn late_reply_is_not_taken_for_the_reply_to_another_request() {
        let (link, peer, _devices) = scripted();
        assert_eq!(fetch_add(&link), Err(Status::RetryExceeded), "nobody replied");
        let request = receive_request(&peer).unwrap();
        reply(&peer, request.version_or_number, 1000);
        assert_eq!(fetch_add(&link), Err(Status::RetryExceeded));
        link.send_notice(&Request::new(Request::QP_ERROR));
        assert!(receive_request(&peer).is_err(), "the link was used again");
    }

    #[test]
    fn reply_that_nobody_asked_for_breaks_the_link() {
        for number in [0, FIRST_REQUEST, FIRST_REQUEST + 2] {
            let (link, peer, _devices) = scripted();
            reply(&peer, number, 1000);
            assert_eq!(fetch_add(&link), Err(Status::RetryExceeded));
            assert!(link.is_dead());
        }
        let (link, peer, _devices) = scripted();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..3 {
                    let request = receive_request(&peer).unwrap();
                    reply(&peer, request.version_or_number, request.a + 6);
                }
            });
            assert_eq!([(); 3].map(|()| fetch_add(&link)), [Ok(7); 3]);
        });
        assert!(!link.is_dead());
    }

    #[test]
    fn message_that_nobody_reads_does_not_wake_the_service_thread() {
        let (link, peer, devices) = scripted();
        let (link, device) = (Arc::new(link), shared(&devices[0]));
        device.watch.add_link(&link).unwrap();
        reply(&peer, 77, 0);
        let mut arrived = [PollFd::new(&link.socket, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut arrived, None), Ok(1));
        let no_wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [PollFd::new(&device.watch.epoll, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut events, Some(&no_wait)), Ok(0), "its thread would spin");
        // The end of the connection is noticed behind the message.
        drop(peer);
        let begun = Instant::now();
        while !link.is_dead() {
            assert!(begun.elapsed() < REPLY_TIMEOUT, "the end was not noticed");
            std::thread::yield_now();
        }
    }

    #[test]
    fn signals_are_no_sign_that_the_peer_has_ended() {
        static HANDLED: AtomicU64 = AtomicU64::new(0);
        extern "C" fn count(_: libc::c_int) {
            HANDLED.fetch_add(1, SeqCst);
        }
        let (mut link, _peer, _devices) = scripted();
        let own = rustix::process::getpid();
        link.process = Some(rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap());
        // SAFETY: the handler only counts. All zeros are valid for these structures, whose fields follow. The timer sends its signal to this
        // thread alone and is deleted before it ends.
        let timer = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = count as *const () as usize;
            assert_eq!(libc::sigaction(libc::SIGUSR2, &action, core::ptr::null_mut()), 0);
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = libc::SIGUSR2;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer: libc::timer_t = core::ptr::null_mut();
            assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer), 0);
            let often = libc::timespec { tv_sec: 0, tv_nsec: 20_000 };
            let times = libc::itimerspec { it_interval: often, it_value: often };
            assert_eq!(libc::timer_settime(timer, 0, &times, core::ptr::null_mut()), 0);
            timer
        };
        let (mut ended, begun) = (0, Instant::now());
        while HANDLED.load(SeqCst) < 20_000 && begun.elapsed() < 4 * REPLY_TIMEOUT {
            // Long after the last look.
            link.seen_alive.store(ticks().wrapping_sub(LIVENESS_VALID), Relaxed);
            ended += u64::from(link.has_ended());
        }
        // A wait for a reply ends although signals interrupt it all the time.
        let waited = fetch_add(&link);
        // SAFETY: the timer exists.
        unsafe { libc::timer_delete(timer) };
        assert_eq!((ended, waited), (0, Err(Status::RetryExceeded)), "{} signals", HANDLED.load(SeqCst));
        assert!(HANDLED.load(SeqCst) > 100, "hardly any signal arrived: the test shows nothing");
    }
}
