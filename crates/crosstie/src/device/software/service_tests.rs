//! The service thread and its peers: it waits for none of them, and nothing of theirs is without limit.

use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crosstie_testkit::child::{self, Child};
use crosstie_testkit::wait::{TIMEOUT, eventually};
use rustix::event::{PollFd, PollFlags};
use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, MAX_PAYLOAD, Request};
use super::ends::{End, connect, small_device as open};
use super::invalid_input_tests::{shared, shared_arc};
use super::layout::MAGIC;
use super::link::Link;
use super::pauses::{Pause, once_at};
use super::service::most_peers;
use crate::device::*;
use crate::local::socket;
use crate::local::socket::blocking_files::BlockingFile;
use crate::seccomp;

fn rc(device: &Device) -> RcQp {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig { depth: 16 }).unwrap();
    pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap()
}

#[test]
fn closing_a_second_connection_leaves_queue_pairs_connected() {
    let (device, other_device) = (open(), open());
    let (mut qp, mut other) = (rc(&device), rc(&other_device));
    connect(&mut qp, &mut other);
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
    connect(&mut qp, &mut other);
    // A device that is stopped: the kernel accepts connections for it, and nobody reads them.
    let name = [[7; 12].as_slice(), &std::process::id().to_ne_bytes()].concat().try_into().unwrap();
    let stopped = QpAddress { device: DeviceAddress { gid: name, ..device.address() }, ..other.address() };
    let listening = control::listen(&name).unwrap();
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
        eventually("the other thread does not connect", || {
            accepted = accepted.take().or_else(|| rustix::net::accept(&listening).ok());
            accepted.is_some()
        });
        let mut hello = Request::new_zeroed();
        socket::receive(accepted.as_ref().unwrap(), hello.as_mut_bytes(), &mut []).unwrap();
        drop((other, ending));
        eventually("the end was not noticed", || qp.state() == QpState::Error);
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
    let peers = || shared(&device).peers.is_connected(&[9; 16]);
    eventually("the peer did not connect", peers);
    // It counts as possibly inside an operation until it closes its end; the connection is closed at once.
    eventually("the peer is still connected", || {
        let mut polled = [PollFd::new(&watched, PollFlags::RDHUP)];
        rustix::event::poll(&mut polled, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        polled[0].revents().contains(PollFlags::RDHUP)
    });
    let other = open();
    rc(&other).connect(&rc(&device).address(), &ConnectConfig::default()).unwrap();
    drop(region);
}

#[test]
fn handle_of_a_queue_pair_does_not_keep_a_closed_device() {
    let (device, other_device) = (open(), open());
    let (qp, mut other) = (rc(&device), rc(&other_device));
    other.connect(&qp.address(), &ConnectConfig::default()).unwrap();
    let mut qp = qp;
    qp.connect(&other.address(), &ConnectConfig::default()).unwrap();
    let kept = shared_arc(&device).qps.get(qp.qp_num()).unwrap();
    let (gid, memory) = (device.address().gid, std::sync::Arc::downgrade(shared_arc(&device)));
    drop((qp, device));
    // The peer learns of it although somebody still holds the queue pair.
    eventually("the closed device is still connected", || !shared(&other_device).peers.is_connected(&gid));
    assert_eq!(other.state(), QpState::Error);
    // A thread that moves it to ERR as late as this, see `FailHandle::fail`.
    kept.request_flush();
    drop(kept);
    assert!(memory.upgrade().is_none(), "the device refers to itself");
}

/// A progress thread looks at requests that wait while their queue pair is being reset.
#[test]
fn requests_that_wait_have_no_completion_after_a_reset() {
    let (far, End { mut qp, mut cq, device: near, .. }) = (open(), End::new(&QpConfig::default()));
    let mut peer = rc(&far);
    for _ in 0..3 {
        connect(&mut qp, &mut peer);
        // The peer has no receive.
        for wr_id in 0..4 {
            qp.post(&SendWr::new(wr_id, SendOp::Send, Data::Inline(b"x")).signaled()).unwrap();
        }
        let device = shared_arc(&near).clone();
        once_at(Pause::Resetting, move || {
            device.workers.wake();
            std::thread::sleep(Duration::from_millis(20));
        });
        qp.reset().unwrap();
        assert_eq!(cq.poll(16, |completion| panic!("{completion:?}")).unwrap(), 0);
        peer.reset().unwrap();
    }
}

/// A message that is posted while no thread can be started ends with an error.
#[test]
fn deferred_request_fails_if_the_progress_thread_cannot_be_started() {
    let (sender, ended) = std::sync::mpsc::channel();
    // The filter stays on its thread, so the test gets one of its own.
    std::thread::spawn(move || {
        let [End { mut qp, mut cq, device: _near, .. }, _far] = End::pair(&QpConfig::default());
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
    let BlockingFile { file, reader } = blocking;
    // Of a file that was refused, this is the last close.
    let _reader = sent.is_ok().then_some(reader);
    drop(file);
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

/// Opens a device and waits, when the next tests start it in a child process; does nothing in an ordinary run.
#[test]
fn idle_device_process() {
    if child::is_child() {
        let device = open();
        child::write(&device.address().gid);
        child::wait_for_end_of_input();
    }
}

#[test]
fn process_that_has_the_id_of_a_dead_peer_is_not_accessed() {
    let mut child = Child::start(idle_device_process, "idle");
    let gid = child.read().try_into().unwrap();
    // A device must listen under the name that connects.
    let own = u128::from(std::process::id()).to_le_bytes();
    let _listener = control::listen(&own).unwrap();
    let mut link = Link::connect(own, gid).unwrap_or_else(|e| panic!("{e}"));
    child.kill();
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
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
    let mut child = Child::spawn(&mut child::command_under(unshare, idle_device_process, "idle"));
    let gid = child.try_read().expect("this test needs root: run it with sudo").try_into().unwrap();
    let own = (u128::from(std::process::id()) << 64).to_le_bytes();
    let _listener = control::listen(&own).unwrap();
    let refused = Link::connect(own, gid).unwrap_err();
    assert!(refused.to_string().contains("not visible"), "{refused}");
    child.wait();
}

/// Runs `child` in a forked child, which then ends. Returns its process id.
fn fork(child: impl FnOnce()) -> i32 {
    // SAFETY: no other thread of this process holds a lock that the child takes.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: plain system calls.
            unsafe { libc::alarm(15) };
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            // SAFETY: as above.
            unsafe { libc::_exit(done.is_err().into()) };
        }
        pid => pid,
    }
}

fn wait_for(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

/// One end of a connection, with its memory.
struct EndWithMemory {
    region: Mr,
    in_place: Mr,
    cq: Cq,
    qp: RcQp,
    others: (UdQp, Srq, Pd, Device),
}

fn end(memory: &mut [u8]) -> EndWithMemory {
    let End { qp, cq, pd, device } = End::new(&QpConfig::default());
    let region = pd.allocate(8192, Access::ALL).unwrap();
    region.write(0, b"of the parent").unwrap();
    // SAFETY: the memory outlives the region, and is not used meanwhile.
    let in_place = unsafe { pd.register(memory.as_mut_ptr(), memory.len(), Access::ALL) }.unwrap();
    let srq = pd.create_srq(&SrqConfig { max_wr: 16, max_sge: 1 }).unwrap();
    let ud = pd.create_ud(&QpConfig::default(), &cq, &cq, None).unwrap();
    EndWithMemory { region, in_place, cq, qp, others: (ud, srq, pd, device) }
}

/// A message in each direction, which also deferred requests precede: those have a thread.
fn exchange(from: &mut EndWithMemory, to: &mut EndWithMemory) {
    from.qp.post(&SendWr::new(1, SendOp::Send, Data::Inline(b"ping")).signaled()).unwrap();
    to.qp.post_recv(&RecvWr { wr_id: 2, sges: &[to.region.sge(4096..4200).unwrap()] }).unwrap();
    let mut ended = Vec::new();
    eventually("the message does not arrive", || {
        for cq in [&mut from.cq, &mut to.cq] {
            cq.poll(16, |completion| ended.push((completion.wr_id, completion.status))).unwrap();
        }
        ended.len() == 2
    });
    ended.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(ended, [(1, Status::Success), (2, Status::Success)]);
    let mut bytes = [0; 4];
    to.region.read(4096, &mut bytes).unwrap();
    assert_eq!(&bytes, b"ping");
}

/// In a process of its own, which has no other tests: it may fork.
#[test]
fn drops_in_a_forked_child_leave_the_objects_of_its_parent_alone() {
    if child::run_alone(drops_in_a_forked_child_leave_the_objects_of_its_parent_alone) {
        return;
    }
    let mut memory = [vec![1u8; 4096], vec![2u8; 4096]];
    let [here, there] = &mut memory;
    let (mut here, mut there) = (end(here), end(there));
    connect(&mut here.qp, &mut there.qp);
    exchange(&mut here, &mut there);
    exchange(&mut there, &mut here);
    let config = crate::delegation::Config::default();
    let name = format!("forking-{}", std::process::id());
    let mut server = crate::delegation::Server::<u64, u64>::create(&name, &config).unwrap();
    let mut client = crate::delegation::Client::<u64, u64>::connect(&name).unwrap();
    let mut lanes = crate::ipc::Server::<u64, u64>::create(&name, &crate::ipc::Config::default()).unwrap();
    let mut caller = crate::ipc::Client::<u64, u64>::connect(&name).unwrap();
    // The drops in the child get everything by value; the parent keeps its own.
    let child = fork(|| {
        // Other memory of the child comes to be where the parent has its device.
        let at = here.region.as_ptr().map_addr(|address| address & !4095);
        // SAFETY: the child has nothing mapped there.
        let mine = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            libc::mmap(at.cast(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_eq!(mine, at.cast(), "the child has memory of its parent's device");
        // SAFETY: just mapped.
        unsafe { at.write_bytes(7, 4096) };
        for end in [&mut here, &mut there] {
            // SAFETY: the child uses none of them afterwards, and ends without dropping them again.
            drop(unsafe { std::ptr::read(end) });
        }
        // SAFETY: as above.
        drop(unsafe {
            let servers = (std::ptr::read(&server), std::ptr::read(&lanes));
            (servers, std::ptr::read(&client), std::ptr::read(&caller))
        });
        // SAFETY: mapped above, and by nobody else unmapped.
        assert_eq!(unsafe { at.add(4095).read() }, 7);
        // It may have a device of its own.
        drop(rc(&open()));
    });
    assert_eq!(wait_for(child), 0, "the child failed");
    let mut bytes = [0; 13];
    here.region.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"of the parent");
    exchange(&mut here, &mut there);
    exchange(&mut there, &mut here);
    client.call(&1, ()).unwrap();
    caller.call(&2, ()).unwrap();
    let mut served = 0;
    eventually("a call is not served", || {
        server.poll();
        lanes.poll();
        if let Some(request) = server.recv() {
            request.reply(&1).unwrap();
            served += 1;
        }
        if let Some(request) = lanes.recv() {
            request.reply(&1).unwrap();
            served += 1;
        }
        served == 2
    });
    drop((here.in_place, there.in_place));
    drop((here.others, there.others));
}

#[test]
fn peers_notice_that_a_device_is_closed_while_a_forked_child_holds_its_descriptors() {
    if child::run_alone(peers_notice_that_a_device_is_closed_while_a_forked_child_holds_its_descriptors) {
        return;
    }
    let (device, ending) = (open(), open());
    let (mut to, mut other, mut from) = (rc(&device), rc(&ending), rc(&ending));
    // One link in each direction, and nothing else to notice the end by.
    connect(&mut to, &mut other);
    from.connect(&rc(&device).address(), &ConnectConfig::default()).unwrap();
    let gid = ending.address().gid;
    // SAFETY: a plain system call.
    let holder = fork(|| unsafe {
        libc::pause();
    });
    drop((other, from, ending));
    eventually("the end was not noticed", || {
        let is_connected = super::invalid_input_tests::shared(&device).peers.is_connected(&gid);
        to.state() == QpState::Error && !is_connected
    });
    // SAFETY: a child of ours, which was not waited for.
    unsafe { libc::kill(holder, libc::SIGKILL) };
    wait_for(holder);
}
