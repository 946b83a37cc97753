//! The service thread and its peers: it waits for none of them, and nothing of theirs is without limit.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, MAX_PAYLOAD, Request};
use super::layout::MAGIC;
use super::link::Link;
use super::service::most_peers;
use crate::device::*;
use crate::local::socket;

const TIMEOUT: Duration = Duration::from_secs(20);

fn open() -> Device {
    Device::open_software(&software::Config { space: 64 << 20 }).unwrap()
}

fn rc(device: &Device) -> RcQp {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig { depth: 16 }).unwrap();
    pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn closing_a_second_connection_leaves_queue_pairs_connected() {
    let (device, other_device) = (open(), open());
    let (mut qp, mut other) = (rc(&device), rc(&other_device));
    qp.connect(&other.address(), &ConnectConfig::default()).unwrap();
    other.connect(&qp.address(), &ConnectConfig::default()).unwrap();
    // Two threads of a device that connect at the same time open a connection each, and one of the two is closed again.
    let second = Link::connect(device.address().gid, other_device.address().gid).unwrap();
    drop(second);
    // The service thread handles events in their order: when it has accepted this peer, it has seen the end of the other.
    let late = open();
    rc(&late).connect(&other.address(), &ConnectConfig::default()).unwrap();
    assert_eq!(other.state(), QpState::ReadyToSend);
}

#[test]
fn end_of_a_peer_is_noticed_while_a_thread_connects_to_a_stopped_one() {
    let (device, ending) = (open(), open());
    let (mut qp, mut other) = (rc(&device), rc(&ending));
    qp.connect(&other.address(), &ConnectConfig::default()).unwrap();
    other.connect(&qp.address(), &ConnectConfig::default()).unwrap();
    // A device that is stopped: the kernel accepts connections for it, and nobody reads them.
    let stopped = QpAddress { device: DeviceAddress { gid: [7; 16], ..device.address() }, ..other.address() };
    let listening = control::listen(&[7; 16]).unwrap();
    let (connecting, connected) = (rc(&device), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut qp = connecting;
            let outcome = qp.connect(&stopped, &ConnectConfig::default());
            connected.store(true, SeqCst);
            outcome
        });
        // Accepted sockets of a listener are not blocking; the hello shows that the other thread waits for the reply.
        let mut accepted = None;
        until("the other thread does not connect", || {
            accepted = accepted.take().or_else(|| rustix::net::accept(&listening).ok());
            accepted.is_some()
        });
        let mut hello = Request::new_zeroed();
        socket::receive(accepted.as_ref().unwrap(), hello.as_mut_bytes(), &mut []).unwrap();
        drop((other, ending));
        until("the end was not noticed", || qp.state() == QpState::Error);
        // The service thread has nothing in its way: it accepts another peer.
        let late = open();
        rc(&late).connect(&qp.address(), &ConnectConfig::default()).unwrap();
        assert!(!connected.load(SeqCst), "the service thread waited for the thread that connects");
        drop(accepted);
        assert!(matches!(waiting.join().unwrap(), Err(DeviceError::Unreachable(_))));
    });
}

#[test]
fn peer_that_never_reads_its_replies_is_disconnected() {
    let device = open();
    let pd = device.alloc_pd().unwrap();
    let mut memory = vec![0u8; MAX_PAYLOAD];
    // SAFETY: `memory` outlives the region, and is not used meanwhile.
    let region = unsafe { pd.register(memory.as_mut_ptr(), memory.len(), Access::ALL) }.unwrap();
    let remote = region.remote();
    let (key, addr) = (remote.rkey, remote.addr);
    let greedy = control::connect(&device.address().gid).unwrap();
    let hello = Request { gid: [9; 16], a: MAGIC, ..Request::new(Request::HELLO) };
    socket::send(&greedy, hello.as_bytes(), &[], &[]).unwrap();
    let read = Request { key, addr, a: MAX_PAYLOAD as u64, ..Request::new(Request::READ) };
    let watched = greedy.as_fd().try_clone_to_owned().unwrap();
    // Far more than the socket can hold.
    std::thread::spawn(move || {
        while socket::send(&greedy, read.as_bytes(), &[], &[]).is_ok() {}
        // Open until the process ends: closing it would free the service thread.
        std::mem::forget(greedy);
    });
    let peers = || super::invalid_input_tests::shared(&device).is_peer_connected(&[9; 16]);
    until("the peer did not connect", peers);
    // It counts as possibly inside an operation until it closes its end; the connection is closed at once.
    until("the peer is still connected", || {
        let mut polled = [PollFd::new(&watched, PollFlags::RDHUP)];
        rustix::event::poll(&mut polled, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        polled[0].revents().contains(PollFlags::RDHUP)
    });
    let other = open();
    rc(&other).connect(&rc(&device).address(), &ConnectConfig::default()).unwrap();
    drop(region);
}

/// A message that is posted while no thread can be started ends with an error.
#[test]
fn deferred_request_fails_if_the_progress_thread_cannot_be_started() {
    #[path = "../../../tests/seccomp/mod.rs"]
    mod seccomp;
    let (sender, ended) = std::sync::mpsc::channel();
    // The filter stays on its thread, so the test gets one of its own.
    std::thread::spawn(move || {
        let (near, far) = (open(), open());
        let pd = near.alloc_pd().unwrap();
        let mut cq = near.create_cq(&CqConfig { depth: 16 }).unwrap();
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        let mut peer = rc(&far);
        qp.connect(&peer.address(), &ConnectConfig::default()).unwrap();
        peer.connect(&qp.address(), &ConnectConfig::default()).unwrap();
        seccomp::install_filter(&[libc::SYS_clone, libc::SYS_clone3], seccomp::FilterMode::Deny);
        assert!(std::thread::Builder::new().spawn(|| {}).is_err(), "the filter has no effect");
        // The peer has no receive, so both requests are deferred.
        let mut statuses = Vec::new();
        for wr_id in 1..=2 {
            qp.post(&SendWr::new(wr_id, SendOp::Send, Data::Inline(b"x")).signaled()).unwrap();
            cq.poll(16, |completion| statuses.push((completion.wr_id, completion.status))).unwrap();
        }
        sender.send((statuses, qp.state())).unwrap();
    });
    let ended = ended.recv_timeout(TIMEOUT).expect("the post hangs");
    let expected = vec![(1, Status::LocalQpOperation), (2, Status::Flushed)];
    assert_eq!(ended, (expected, QpState::Error));
}

#[test]
fn peers_leave_descriptors_for_the_program() {
    assert_eq!(most_peers(1024), (256, 42));
    assert_eq!(most_peers(1 << 20), (4096, 128));
    assert_eq!(most_peers(u64::MAX), (4096, 128));
}

#[test]
fn peer_that_sends_files_is_cut_off_and_holds_up_nobody() {
    let device = open();
    let blocking = socket::blocking_files::new();
    let hostile = control::connect(&device.address().gid).unwrap();
    let hello = Request { gid: [8; 16], a: MAGIC, ..Request::new(Request::HELLO) };
    let sent = socket::send(&hostile, hello.as_bytes(), &[], &[blocking.file.as_fd()]);
    drop(blocking.file);
    let begun = Instant::now();
    let other = open();
    rc(&other).connect(&rc(&device).address(), &ConnectConfig::default()).unwrap();
    match sent {
        // Linux 6.16 refuses the file.
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::PermissionDenied),
        Ok(()) => {
            assert!(socket::receive(&hostile, &mut [0; 16], &mut []).is_err(), "the hello was answered")
        }
    }
    drop(device);
    assert!(begun.elapsed() < socket::blocking_files::MAX_ELAPSED, "it took {:?}", begun.elapsed());
}

const ROLE: &str = "CROSSTIE_IDLE_DEVICE";

/// Opens a device and waits, when the next test starts it in a child process; does nothing in an ordinary run.
#[test]
fn idle_device_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let device = open();
    std::io::stderr().write_all(&device.address().gid).unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn process_that_has_the_id_of_a_dead_peer_is_not_accessed() {
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "device::software::service_tests::idle_device_process", "--nocapture"])
        .env(ROLE, "1")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut gid = [0; 16];
    child.stderr.as_mut().unwrap().read_exact(&mut gid).unwrap();
    // A device must listen under the name that connects.
    let own = u128::from(std::process::id()).to_le_bytes();
    let _listener = control::listen(&own).unwrap();
    let mut link = Link::connect(own, gid).unwrap_or_else(|e| panic!("{e}"));
    child.kill().unwrap();
    child.wait().unwrap();
    // As if the kernel had given the id of the dead process to this one.
    link.pid = Some(rustix::process::getpid());
    let victim = AtomicU64::new(7);
    let mut bytes = *b"for peer";
    let addr = victim.as_ptr().expose_provenance() as u64;
    for write in [true, false] {
        // SAFETY: `bytes` is valid for reads and writes.
        let outcome = unsafe { link.copy_in_place(write, 1, addr, bytes.as_mut_ptr(), 8) };
        assert_eq!(outcome, Err(Status::RetryExceeded));
        assert_eq!((victim.load(SeqCst), &bytes), (7, b"for peer"), "another process was accessed");
    }
}

/// A device in a PID namespace of its own sees no process outside, and cannot tell whether one is the device that it says it is.
#[test]
fn peer_that_is_not_visible_is_refused() {
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    let mut child = std::process::Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "device::software::service_tests::idle_device_process", "--nocapture"])
        .env(ROLE, "1")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("this test needs `unshare` of util-linux");
    let mut gid = [0; 16];
    child.stderr.as_mut().unwrap().read_exact(&mut gid).expect("this test needs root: run it with sudo");
    let own = [6; 16];
    let _listener = control::listen(&own).unwrap();
    let refused = Link::connect(own, gid).unwrap_err();
    assert!(refused.to_string().contains("not visible"), "{refused}");
    drop(child.stdin.take());
    child.wait().unwrap();
}
