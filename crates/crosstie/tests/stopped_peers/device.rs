//! A peer of the software device, stopped inside an operation on our memory.

use std::io::{BufRead, BufReader, Read, Write};
use std::time::Duration;

use crosstie::device::*;
use crosstie::region::{KeptMemory, OwnedRegion, kept_memory};
use crosstie_testkit::actor::{Actor, End, Fallible, TIMEOUT, check, is_stopped, wait_for};
use crosstie_testkit::rng::Random;
use crosstie_testkit::trace;
use zerocopy::{FromBytes, IntoBytes};

/// A WRITE of this size takes long enough to be stopped in the middle.
const LARGE: usize = 256 << 20;
/// The entries of a large WRITE: memory in place is written with one system call for each.
const ENTRIES: usize = 16;
/// What peers write, and what we write into memory that is ours again.
const FROM_PEER: u8 = 0xAA;
const OURS: u8 = 0x55;
const PAGE: usize = 4096;
/// The key of datagrams.
const QKEY: u32 = 7;
/// The two messages of a peer that is single-stepped during the second one.
const STEPS: [&[u8]; 2] = [b"before the steps", b"a message that was posted in single steps, 48 by"];

pub(crate) const TESTS: &[(&str, crate::Test)] = &[
    ("memory_of_a_dropped_region_is_not_reused_while_a_stopped_peer_may_write", allocated_memory),
    ("deregister_of_memory_in_place_hands_the_region_back_while_a_peer_is_inside", memory_in_place),
    ("memory_of_an_owned_region_is_not_given_back_or_freed_while_a_peer_is_inside", owned_region),
    ("late_post_of_an_old_peer_does_not_free_what_the_new_peer_writes", late_old_peer),
    ("peer_killed_inside_delays_no_later_removal", killed_inside),
    ("stopped_peer_holds_up_only_what_it_can_reach", unrelated_removals),
    ("reset_fails_while_the_peer_is_inside_and_works_afterwards", reset_of_a_stopped_peer),
    ("stopped_peer_delays_only_requests_to_itself_and_its_late_reply_is_not_used", unanswered),
    ("create_rc_succeeds_while_a_producer_is_stopped_anywhere_in_a_post", stopped_producer),
    ("completions_of_others_arrive_while_a_producer_is_stopped_anywhere_in_a_post", stopped_beside_others),
    ("datagrams_of_others_arrive_while_a_sender_is_stopped_anywhere_in_a_post", stopped_datagram_sender),
];

/// Tests in which a process accesses memory of another one.
pub(crate) const WITH_MEMORY_IN_PLACE: &[&str] = &[
    "deregister_of_memory_in_place_hands_the_region_back_while_a_peer_is_inside",
    "memory_of_an_owned_region_is_not_given_back_or_freed_while_a_peer_is_inside",
];

// ------------------------------------------------------------------------------------------------------- the tests

fn allocated_memory(_: &mut Random) -> Fallible {
    for end in [End::Continue, End::Kill] {
        // Room for one large region and not for two: the memory must come back.
        let node = Node::new(LARGE as u64 + (96 << 20))?;
        let region = node.pd.allocate(LARGE, Access::ALL)?;
        let mut peer = Peer::start()?;
        let qp = node.connect(&mut peer, &region)?;
        peer.stop_inside_write(&region)?;
        drop(qp);
        drop(region);
        let counters = node.device.counters();
        check(counters.deferred_regions == 1 && counters.deferred_queue_pairs == 1, counters)?;
        check(counters.deferred_bytes >= LARGE as u64, counters)?;
        let refused = node.pd.allocate(LARGE, Access::ALL);
        check(matches!(refused, Err(DeviceError::Exhausted { .. })), &refused)?;
        let other = node.pd.allocate(64 << 20, Access::ALL)?;
        fill(&other);
        peer.end(end)?;
        node.wait_until_nothing_is_deferred()?;
        check_filled(&other)?;
        let again = node.pd.allocate(LARGE, Access::ALL)?;
        check(is_zero(&again), "memory is handed out with old contents")?;
        node.check_works()?;
    }
    // With room for both, memory that is allocated meanwhile is not what the peer writes.
    let node = Node::new(16 << 30)?;
    let region = node.pd.allocate(LARGE, Access::ALL)?;
    let mut peer = Peer::start()?;
    let qp = node.connect(&mut peer, &region)?;
    peer.stop_inside_write(&region)?;
    drop(qp);
    drop(region);
    let other = node.pd.allocate(LARGE, Access::ALL)?;
    fill(&other);
    peer.end(End::Continue)?;
    check_filled(&other)?;
    node.wait_until_nothing_is_deferred()
}

fn memory_in_place(_: &mut Random) -> Fallible {
    // A peer may map shared memory, after some messages, and then copies by itself; the kernel copies into private memory.
    for sharing in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        stop_inside_memory_in_place(sharing)?;
    }
    Ok(())
}

fn stop_inside_memory_in_place(sharing: i32) -> Fallible {
    let node = Node::new(256 << 20)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), LARGE, access, sharing | libc::MAP_ANONYMOUS, -1, 0) };
    check(base != libc::MAP_FAILED, "no memory")?;
    // SAFETY: the memory outlives the region, and is used through raw pointers and the region only until it is deregistered.
    let region = unsafe { node.pd.register(base.cast(), LARGE, Access::ALL)? };
    let mut peer = Peer::start()?;
    let qp = node.connect(&mut peer, &region)?;
    for _ in 0..100 {
        peer.order("small")?;
        peer.expect("Success")?;
    }
    peer.stop_inside_write(&region)?;
    drop(qp);
    let pid = peer.actor.child.id();
    // A region that is dropped waits for the peer, so a check that fails continues it.
    let check = |holds, what: &dyn std::fmt::Debug| {
        check(holds, what).inspect_err(|_| {
            // SAFETY: a system call without memory arguments; the child is ours and not reaped.
            unsafe { libc::kill(pid as libc::pid_t, libc::SIGCONT) };
        })
    };
    let used = processor_time();
    let Err(first) = region.deregister(Duration::from_millis(200)) else {
        return Err("deregistered while a peer is inside".into());
    };
    check(processor_time() - used < Duration::from_millis(100), &"the wait for a stopped peer takes a core")?;
    check(first.process == Some(pid), &first)?;
    check(first.to_string().contains(&pid.to_string()), &first)?;
    let Err(second) = first.region.deregister(Duration::ZERO) else {
        return Err("deregistered while a peer is inside".into());
    };
    // Another region of the same domain that nobody uses waits for the same peer; one of another domain does not.
    let unrelated = node.device.alloc_pd()?;
    let mut other = vec![0u8; PAGE];
    // SAFETY: as above.
    let elsewhere = unsafe { unrelated.register(other.as_mut_ptr(), PAGE, Access::ALL)? };
    check(elsewhere.deregister(Duration::ZERO).is_ok(), &"a region of another domain waits")?;
    peer.actor.signal(libc::SIGCONT)?;
    second.region.deregister(TIMEOUT)?;
    // SAFETY: the memory is ours again.
    let memory = unsafe { std::slice::from_raw_parts_mut(base.cast::<u8>(), LARGE) };
    memory.fill(OURS);
    peer.wait_for_write()?;
    check(memory.iter().all(|byte| *byte == OURS), &"the caller's own memory was overwritten")?;
    // SAFETY: the mapping is ours, and nothing refers to it.
    unsafe { libc::munmap(base, LARGE) };
    node.check_works()
}

/// As above, through `OwnedRegion`: giving back fails and can be tried again; a drop keeps the memory and does not wait.
fn owned_region(_: &mut Random) -> Fallible {
    for end in [End::Continue, End::Kill] {
        let node = Node::new(256 << 20)?;
        let region = OwnedRegion::register(&node.pd, vec![0u8; LARGE], Access::ALL)?;
        let mut peer = Peer::start()?;
        let qp = node.connect(&mut peer, region.mr())?;
        peer.stop_inside_write(region.mr())?;
        drop(qp);
        let Err(refused) = region.into_memory(Duration::from_millis(20)) else {
            return Err("given back while a peer is inside".into());
        };
        check(refused.process == Some(peer.actor.child.id()), &refused)?;
        let Err(refused) = refused.region.into_memory(Duration::ZERO) else {
            return Err("given back while a peer is inside".into());
        };
        // Memory that is dropped now waits for the same peer, but nobody waits for it.
        drop(OwnedRegion::register(&node.pd, vec![0u8; PAGE], Access::ALL)?);
        check(kept_memory() == KeptMemory { regions: 1, bytes: PAGE as u64 }, kept_memory())?;
        drop(refused.region);
        let kept = KeptMemory { regions: 2, bytes: (PAGE + LARGE) as u64 };
        check(kept_memory() == kept, kept_memory())?;
        let other = vec![OURS; LARGE];
        peer.end(end)?;
        wait_for("kept memory to be freed", || kept_memory() == KeptMemory::default())?;
        check(other.iter().all(|byte| *byte == OURS), "memory was freed and used again too early")?;
        let memory =
            OwnedRegion::register(&node.pd, vec![7u8; PAGE], Access::ALL)?.into_memory(Duration::ZERO)?;
        check(memory == [7; PAGE], "other memory was given back")?;
        node.check_works()?;
    }
    Ok(())
}

fn late_old_peer(_: &mut Random) -> Fallible {
    let node = Node::new(16 << 30)?;
    let small = node.pd.allocate(PAGE, Access::ALL)?;
    let region = node.pd.allocate(LARGE, Access::ALL)?;
    let (mut old, mut new) = (Peer::start()?, Peer::start()?);
    let mut qp = node.connect(&mut old, &small)?;
    old.order("small")?;
    old.expect("Success")?;
    qp.reset()?;
    new.connect(&mut qp, &region)?;
    new.stop_inside_write(&region)?;
    // The old peer does not know that its connection is gone.
    old.order("small")?;
    old.expect("RetryExceeded")?;
    drop(region);
    check(node.device.counters().deferred_regions == 1, node.device.counters())?;
    let other = node.pd.allocate(LARGE, Access::ALL)?;
    fill(&other);
    new.end(End::Continue)?;
    check_filled(&other)?;
    node.wait_until_nothing_is_deferred()
}

fn killed_inside(_: &mut Random) -> Fallible {
    let node = Node::new(LARGE as u64 + (64 << 20))?;
    let region = node.pd.allocate(LARGE, Access::ALL)?;
    let (mut dead, mut alive) = (Peer::start()?, Peer::start()?);
    let mut qp = node.connect(&mut dead, &region)?;
    dead.stop_inside_write(&region)?;
    dead.end(End::Kill)?;
    wait_for("ERR", || qp.state() == QpState::Error)?;
    qp.reset()?;
    alive.connect(&mut qp, &region)?;
    alive.order("small")?;
    alive.expect("Success")?;
    // Together they are many times the memory of the device: nothing leaks, and nothing is deferred.
    for _ in 0..200 {
        drop(node.pd.allocate(8 << 20, Access::ALL)?);
        check(node.device.counters() == DeviceCounters::default(), node.device.counters())?;
    }
    let mut place = vec![0u8; PAGE];
    for _ in 0..200 {
        // SAFETY: the vector outlives the region and is not used before it is deregistered.
        let in_place = unsafe { node.pd.register(place.as_mut_ptr(), PAGE, Access::ALL)? };
        in_place.deregister(Duration::ZERO)?;
    }
    Ok(())
}

fn unrelated_removals(_: &mut Random) -> Fallible {
    for end in [End::Continue, End::Kill] {
        let node = Node::new(2 << 30)?;
        let region = node.pd.allocate(LARGE, Access::ALL)?;
        let mut peer = Peer::start()?;
        let qp = node.connect(&mut peer, &region)?;
        peer.stop_inside_write(&region)?;
        // Another peer, another protection domain: nothing is deferred, so nothing waits for the stopped peer.
        let other = Node { pd: node.device.alloc_pd()?, device: node.device.clone() };
        let mut friend = Peer::start()?;
        for _ in 0..20 {
            let target = other.pd.allocate(PAGE, Access::ALL)?;
            let their_qp = other.connect(&mut friend, &target)?;
            friend.order("small")?;
            friend.expect("Success")?;
            drop(their_qp);
            drop(target);
            check(node.device.counters() == DeviceCounters::default(), node.device.counters())?;
            friend.order("again")?;
        }
        // A queue pair of the same domain with another peer does not wait either.
        let target = node.pd.allocate(PAGE, Access::ALL)?;
        drop(node.connect(&mut friend, &target)?);
        check(node.device.counters().deferred_queue_pairs == 0, node.device.counters())?;
        drop(qp);
        drop(region);
        let counters = node.device.counters();
        check(counters.deferred_regions == 1 && counters.deferred_queue_pairs == 1, counters)?;
        other.check_works()?;
        peer.end(end)?;
        node.wait_until_nothing_is_deferred()?;
    }
    Ok(())
}

fn reset_of_a_stopped_peer(_: &mut Random) -> Fallible {
    let node = Node::new(2 << 30)?;
    let region = node.pd.allocate(LARGE, Access::ALL)?;
    let mut peer = Peer::start()?;
    let mut qp = node.connect(&mut peer, &region)?;
    peer.stop_inside_write(&region)?;
    let refused = qp.reset();
    let pid = peer.actor.child.id();
    check(matches!(refused, Err(DeviceError::PeerBusy { process: Some(p) }) if p == pid), &refused)?;
    check(qp.state() == QpState::Error, qp.state())?;
    peer.end(End::Continue)?;
    qp.reset()?;
    let mut next = Peer::start()?;
    next.connect(&mut qp, &region)?;
    next.order("small")?;
    next.expect("Success")
}

/// A peer is stopped. An atomic on its memory in place needs its service thread, and fails when that does not reply. Meanwhile requests to other
/// peers, datagrams and resets go on, and the reply that comes later is not taken for another one.
fn unanswered(_: &mut Random) -> Fallible {
    let node = Node::new(256 << 20)?;
    let (mut peer, mut healthy) = (Target::start()?, Target::start()?);
    let ah = node.pd.create_ah(&peer.info.device)?;
    let mut ud_cq = node.device.create_cq(&CqConfig::default())?;
    let mut ud = node.pd.create_ud(&QpConfig::default(), &ud_cq, &ud_cq, None)?;
    ud.activate(QKEY)?;
    let send = SendWr::new(1, SendOp::Send, Data::Inline(b"message")).signaled();
    let mut idle = Requester::connect(&node, &mut peer)?;
    check(idle.fetch_add(&peer, 8)? == (Status::Success, 5000), "the former value")?;

    // A message that has to wait for a receive, and behind it a request to the peer's service thread: the progress thread executes both
    // when the peer has stopped.
    let mut waiting = loop {
        let mut waiting = Requester::connect(&node, &mut peer)?;
        waiting.qp.post(&send)?;
        waiting.post_fetch_add(2, &peer, 0)?;
        peer.order("receive")?;
        peer.actor.expect("done")?;
        peer.actor.signal(libc::SIGSTOP)?;
        wait_for("the peer to stop", || is_stopped(peer.actor.child.id()))?;
        check(waiting.next_completion()? == (1, Status::Success), "the message was not sent")?;
        if waiting.cq.poll(1, |_| {})? == 0 {
            break waiting;
        }
        // Too late: it had the reply before.
        peer.actor.signal(libc::SIGCONT)?;
    };
    std::thread::scope(|scope| -> Fallible {
        // The first datagram needs a line at the peer.
        let datagram = scope.spawn(|| ud.post(&ah, peer.info.datagrams, QKEY, &send));
        // Another peer, in the same way.
        let mut other = Requester::connect(&node, &mut healthy)?;
        other.qp.post(&send)?;
        other.post_fetch_add(2, &healthy, 8)?;
        healthy.order("receive")?;
        healthy.actor.expect("done")?;
        check(other.next_completion()? == (1, Status::Success), "the message to another peer")?;
        check(other.next_completion()? == (2, Status::Success), "the request to another peer")?;
        check(other.former()? == 5000, "the former value at another peer")?;
        check(waiting.cq.poll(1, |_| {})? == 0, "the stopped peer replied")?;
        // Nor does the end of the connection, or of the memory that the result goes to, wait for the reply.
        waiting.qp.try_reset()?;
        waiting.memory.deregister(Duration::ZERO)?;
        check(idle.qp.state() == QpState::ReadyToSend, "these requests waited for the stopped peer")?;
        wait_for("the end of what used the link", || idle.qp.state() == QpState::Error)?;
        let posted = datagram.join().map_err(|_| "the datagram panicked")?;
        check(posted == Err(PostError::Device(libc::EHOSTUNREACH)), posted)
    })?;
    check(waiting.cq.poll(1, |_| {})? == 0, "a completion after the reset")?;

    // The late reply is there, and nobody takes it for another one or is kept busy by it.
    peer.actor.signal(libc::SIGCONT)?;
    let mut again = Requester::connect(&node, &mut peer)?;
    let used = processor_time_of("crosstie-service")?;
    std::thread::sleep(Duration::from_millis(200));
    let used = processor_time_of("crosstie-service")? - used;
    check(used <= 10, format!("the service threads took {used} ticks of 10 ms"))?;
    check(again.fetch_add(&peer, 8)? == (Status::Success, 5001), "the former value, after the late reply")?;
    // The old address handle reaches the peer again.
    ud.post(&ah, peer.info.datagrams, QKEY, &send)?;
    wait_for("the completion of a datagram", || ud_cq.poll(1, |_| {}).is_ok_and(|count| count == 1))?;
    wait_for("a datagram", || {
        peer.order("datagrams").is_ok() && {
            let mut count = String::new();
            peer.actor.output.read_line(&mut count).is_ok() && count.trim() == "1"
        }
    })
}

fn stopped_producer(_: &mut Random) -> Fallible {
    let node = Node::new(1 << 30)?;
    let region = node.pd.allocate(PAGE, Access::ALL)?;
    let mut peer = Peer::start()?;
    let send_cq = node.device.create_cq(&CqConfig::default())?;
    let (mut stops, mut step) = (0, 1);
    loop {
        let recv_cq = node.device.create_cq(&CqConfig { depth: 16 })?;
        let mut qp = node.pd.create_rc(&QpConfig::default(), &send_cq, &recv_cq, None)?;
        qp.init(Access::ALL)?;
        for wr_id in 0..2 {
            qp.post_recv(&RecvWr { wr_id, sges: &[] })?;
        }
        peer.connect(&mut qp, &region)?;
        peer.order("step")?;
        let pid = peer.actor.child.id();
        let executed = trace::step(pid, step)?;
        let mut recv_cq = recv_cq;
        let second = node.pd.create_rc(&QpConfig::default(), &send_cq, &recv_cq, None);
        let second = second.map_err(|e| format!("step {step}: {e}"))?;
        stops += u32::from(executed == step);
        if executed == step {
            // It runs on to the stop behind the post.
            trace::resume(pid)?;
            trace::step(pid, 0)?;
        }
        trace::resume(pid)?;
        peer.expect("Success")?;
        let third = node.pd.create_rc(&QpConfig::default(), &send_cq, &recv_cq, None)?;
        let mut arrived = 0;
        wait_for("both messages", || {
            arrived += recv_cq.poll(16, |c| assert_eq!(c.status, Status::Success)).unwrap_or(0);
            arrived == 2
        })?;
        drop((second, third, qp));
        peer.order("again")?;
        if executed < step {
            break;
        }
        step += 1;
    }
    println!("create_rc at each of {step} instructions of a post: {stops} stops inside");
    check(stops > 50, "the peer was hardly ever stopped inside a post: the test shows nothing")
}

/// Two producers of one completion queue: a peer that is stopped at each instruction of a post, and a queue pair of this process,
/// which sends several rounds of the ring meanwhile.
fn stopped_beside_others(random: &mut Random) -> Fallible {
    let node = Node::new(1 << 30)?;
    let region = node.pd.allocate(PAGE, Access::ALL)?;
    let (mut peer, mut step, mut stops, mut received_late) = (Peer::start()?, 1, 0, 0);
    loop {
        let mut recv_cq = node.device.create_cq(&CqConfig { depth: 16 })?;
        let send_cq = node.device.create_cq(&CqConfig::default())?;
        let mut qp = node.pd.create_rc(&QpConfig::default(), &send_cq, &recv_cq, None)?;
        let mut other = node.pd.create_rc(&QpConfig::default(), &send_cq, &recv_cq, None)?;
        let mut sender = node.pd.create_rc(&QpConfig::default(), &send_cq, &send_cq, None)?;
        other.connect(&sender.address(), &ConnectConfig::default())?;
        sender.connect(&other.address(), &ConnectConfig::default())?;
        qp.init(Access::ALL)?;
        for wr_id in 0..2 {
            qp.post_recv(&RecvWr { wr_id, sges: &[] })?;
        }
        peer.connect(&mut qp, &region)?;
        peer.order("step")?;
        let pid = peer.actor.child.id();
        let executed = trace::step(pid, step)?;
        let (mut from_peer, mut from_other) = (0, 0);
        let poll = |cq: &mut Cq, from_peer: &mut u32, from_other: &mut u32| {
            let polled = cq.poll(16, |c| {
                assert_eq!(c.status, Status::Success);
                if c.qp_num != qp.qp_num() {
                    *from_other += 1;
                    return;
                }
                // A completion that is there is there with its message, in the completion and in memory.
                let message = STEPS[*from_peer as usize];
                let mut written = vec![0; message.len()];
                region.read(1024 * *from_peer as usize, &mut written).unwrap();
                assert_eq!((c.imm, c.byte_len as usize), (Some(*from_peer), message.len()), "step {step}");
                assert!(c.inline_data() == Some(message) && written == message, "step {step}");
                *from_peer += 1;
            });
            assert!(polled.is_ok(), "{polled:?}");
        };
        // Four rounds of the ring.
        for round in 1..=64 {
            other.post_recv(&RecvWr { wr_id: 9, sges: &[] })?;
            let op = SendOp::WriteImm(region.remote().at(64), round);
            sender.post(&SendWr::new(1, op, Data::Inline(b"other")))?;
            wait_for("a completion of the other queue pair", || {
                // Every second time by waiting, which must not sleep for ever either.
                if round % 2 == 0 {
                    recv_cq.wait(Duration::from_millis(100)).ok();
                }
                poll(&mut recv_cq, &mut from_peer, &mut from_other);
                from_other == round
            })?;
        }
        received_late += u32::from(from_peer < 2);
        if executed == step {
            trace::resume(pid)?;
            trace::step(pid, 0)?;
        }
        trace::resume(pid)?;
        peer.expect("Success")?;
        wait_for("both messages of the peer", || {
            poll(&mut recv_cq, &mut from_peer, &mut from_other);
            from_peer == 2
        })?;
        drop((qp, other, sender));
        peer.order("again")?;
        stops += 1;
        if executed < step {
            break;
        }
        step += if std::env::var_os("CROSSTIE_STRESS_SECONDS").is_some() { 1 } else { 1 + random.below(8) };
    }
    println!(
        "completions beside a post of {step} instructions: {stops} stops, {received_late} of them before the entry"
    );
    check(received_late > 2, "the peer was never stopped before its entry: the test shows nothing")
}

/// A datagram sender is stopped at each instruction of a post. Meanwhile another sender goes on, over several rounds of the ring, and the
/// queue pair fails: each receive is flushed once, but not the one that the stopped sender has taken, before this sender has left.
fn stopped_datagram_sender(random: &mut Random) -> Fallible {
    const RECEIVES: u64 = 4;
    let node = Node::new(1 << 30)?;
    let region = node.pd.allocate(PAGE, Access::ALL)?;
    let rc = node.pd.create_rc(&QpConfig::default(), &node.cq()?, &node.cq()?, None)?;
    let (mut peer, mut step, mut stops, mut inside) = (Peer::start()?, 1, 0, 0);
    loop {
        let mut cq = node.device.create_cq(&CqConfig { depth: RECEIVES as u32 })?;
        let mut send_cq = node.cq()?;
        let config = QpConfig { max_recv_wr: RECEIVES as u32, ..QpConfig::default() };
        let mut qp = node.pd.create_ud(&config, &send_cq, &cq, None)?;
        qp.activate(QKEY)?;
        let mut other = node.pd.create_ud(&config, &send_cq, &send_cq, None)?;
        other.activate(QKEY)?;
        let at = |wr_id: u64| wr_id as usize * 512..wr_id as usize * 512 + 512;
        for wr_id in 0..RECEIVES {
            qp.post_recv(&RecvWr { wr_id, sges: &[region.sge(at(wr_id))?] })?;
        }
        let info =
            ConnectInfo { qp: QpAddress { qp_num: qp.qp_num(), ..rc.address() }, memory: region.remote() };
        peer.introduce(&info, "datagram")?;
        peer.order("step")?;
        let pid = peer.actor.child.id();
        let executed = trace::step(pid, step)?;
        let is_stopped_inside = executed == step;
        // What has arrived: which receive, its status, and the message.
        let mut seen: Vec<(u64, Status, Vec<u8>)> = Vec::new();
        let poll = |cq: &mut Cq, seen: &mut Vec<(u64, Status, Vec<u8>)>| {
            let polled = cq.poll(16, |c| {
                let mut bytes = vec![0; (c.byte_len as usize).saturating_sub(UdQp::GRH)];
                region.read(at(c.wr_id).start + UdQp::GRH, &mut bytes).unwrap();
                seen.push((c.wr_id, c.status, bytes));
            });
            assert!(polled.is_ok(), "step {step}: {polled:?}");
        };
        let ah = node.pd.create_ah(&node.device.address())?;
        let mut arrived = 0;
        for round in 0..40 {
            let wr = SendWr::new(1, SendOp::Send, Data::Inline(b"other")).signaled();
            other.post(&ah, qp.qp_num(), QKEY, &wr)?;
            wait_for("the other sender's completion", || {
                send_cq.poll(1, |_| {}).is_ok_and(|count| count > 0)
            })?;
            wait_for("a datagram of the other sender", || {
                if round % 2 == 0 {
                    cq.wait(Duration::from_millis(100)).ok();
                }
                poll(&mut cq, &mut seen);
                seen.iter().any(|(_, _, bytes)| bytes == b"other")
            })?;
            for (wr_id, status, bytes) in seen.drain(..) {
                check(status == Status::Success, (step, wr_id, status))?;
                check(bytes == b"other" || STEPS.contains(&&bytes[..]), (step, &bytes))?;
                arrived += u32::from(bytes != b"other");
                qp.post_recv(&RecvWr { wr_id, sges: &[region.sge(at(wr_id))?] })?;
            }
        }
        qp.fail()?;
        // At most one receive is left to the stopped sender, and at most one message of it has not arrived.
        wait_for("the flush", || {
            poll(&mut cq, &mut seen);
            seen.len() as u64 >= RECEIVES - 1
        })?;
        if is_stopped_inside {
            trace::resume(pid)?;
            trace::step(pid, 0)?;
        }
        trace::resume(pid)?;
        peer.expect("Success")?;
        wait_for("the last receive", || {
            poll(&mut cq, &mut seen);
            seen.len() as u64 >= RECEIVES
        })?;
        // Nothing completes twice.
        (0..100).for_each(|_| poll(&mut cq, &mut seen));
        let mut ids: Vec<u64> = seen.iter().map(|(wr_id, ..)| *wr_id).collect();
        ids.sort_unstable();
        check(ids == [0, 1, 2, 3], (step, &seen))?;
        for (_, status, bytes) in &seen {
            let is_late = *status == Status::Success && STEPS.contains(&&bytes[..]);
            check(is_late || *status == Status::Flushed, (step, &seen))?;
            inside += u32::from(is_late);
            arrived += u32::from(is_late);
        }
        check((1..=2).contains(&arrived), (step, arrived))?;
        drop((qp, other));
        peer.order("again")?;
        stops += 1;
        if !is_stopped_inside {
            break;
        }
        step += if std::env::var_os("CROSSTIE_STRESS_SECONDS").is_some() { 1 } else { 5 + random.below(30) };
    }
    println!(
        "a datagram post of {step} instructions: {stops} stops, {inside} messages were completed after the failure"
    );
    check(
        inside > 1,
        "the sender was never stopped between taking a receive and completing it: the test shows nothing",
    )
}

// -------------------------------------------------------------------------------------------------------- our side

struct Node {
    device: Device,
    pd: Pd,
}

impl Node {
    fn new(space: u64) -> Fallible<Node> {
        let device = Device::open_software(&software::Config { space })?;
        let pd = device.alloc_pd()?;
        Ok(Node { device, pd })
    }

    fn cq(&self) -> Fallible<Cq> {
        Ok(self.device.create_cq(&CqConfig::default())?)
    }

    fn connect(&self, peer: &mut Peer, region: &Mr) -> Fallible<RcQp> {
        let cq = self.cq()?;
        let mut qp = self.pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
        peer.connect(&mut qp, region)?;
        Ok(qp)
    }

    fn wait_until_nothing_is_deferred(&self) -> Fallible {
        wait_for("deferred removals", || self.device.counters() == DeviceCounters::default())
    }

    /// A new connection works, with a peer in this process.
    fn check_works(&self) -> Fallible {
        let mut cq = self.device.create_cq(&CqConfig::default())?;
        let mut near = self.pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
        let mut far = self.pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
        near.connect(&far.address(), &ConnectConfig::default())?;
        far.connect(&near.address(), &ConnectConfig::default())?;
        let target = self.pd.allocate(PAGE, Access::ALL)?;
        far.post_recv(&RecvWr { wr_id: 7, sges: &[] })?;
        let op = SendOp::WriteImm(target.remote().at(0), 5);
        near.post(&SendWr::new(1, op, Data::Inline(b"works")))?;
        wait_for("a message", || cq.poll(1, |_| {}).is_ok_and(|count| count == 1))
    }
}

/// What a peer needs to connect to us.
#[derive(FromBytes, IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
#[repr(C)]
struct ConnectInfo {
    qp: QpAddress,
    memory: RemoteMemory,
}

/// A peer process.
struct Peer {
    actor: Actor,
}

impl Peer {
    fn start() -> Fallible<Peer> {
        Ok(Peer { actor: Actor::start(&["peer"])? })
    }

    /// Connects `qp` to a new queue pair of the peer, which will write to `region`.
    fn connect(&mut self, qp: &mut RcQp, region: &Mr) -> Fallible {
        let theirs =
            self.introduce(&ConnectInfo { qp: qp.address(), memory: region.remote() }, "connected")?;
        qp.connect(&theirs, &ConnectConfig::default())?;
        Ok(())
    }

    /// Tells the peer what it will send to: a connected queue pair, or a datagram queue pair. Returns the address of its queue pair.
    fn introduce(&mut self, info: &ConnectInfo, kind: &str) -> Fallible<QpAddress> {
        self.actor.input.write_all(info.as_bytes())?;
        let mut theirs = [0; size_of::<QpAddress>()];
        self.actor.output.read_exact(&mut theirs)?;
        self.order(kind)?;
        Ok(QpAddress::read_from_bytes(&theirs).map_err(|e| e.to_string())?)
    }

    fn order(&mut self, order: &str) -> Fallible {
        writeln!(self.actor.input, "{order}")?;
        Ok(())
    }

    /// Waits for the status of the last order.
    fn expect(&mut self, status: &str) -> Fallible {
        let mut line = String::new();
        self.actor.output.read_line(&mut line)?;
        check(line.trim() == status, format!("the peer's request ended with {line:?}, not {status}"))
    }

    /// Stops the peer in the middle of a large WRITE to `region`.
    fn stop_inside_write(&mut self, region: &Mr) -> Fallible {
        for _ in 0..50 {
            for at in (0..LARGE).step_by(PAGE) {
                region.write(at, &[0])?;
            }
            region.write(LARGE - 1, &[0])?;
            self.order("large")?;
            let byte = |at: usize| {
                let mut byte = [0];
                region.read(at, &mut byte).map(|()| byte[0])
            };
            wait_for("the WRITE to begin", || byte(0) == Ok(FROM_PEER))?;
            self.actor.signal(libc::SIGSTOP)?;
            wait_for("the peer to stop", || is_stopped(self.actor.child.id()))?;
            if byte(LARGE - 1) == Ok(0) {
                return Ok(());
            }
            // Too late: it was over.
            self.actor.signal(libc::SIGCONT)?;
            self.wait_for_write()?;
        }
        Err("the peer was never stopped inside a WRITE".into())
    }

    /// Waits until a large WRITE that was stopped is over. Its queue pair may have been dropped meanwhile.
    fn wait_for_write(&mut self) -> Fallible {
        self.actor.output.read_line(&mut String::new())?;
        Ok(())
    }

    fn end(&mut self, end: End) -> Fallible {
        match end {
            End::Continue => {
                self.actor.signal(libc::SIGCONT)?;
                self.wait_for_write()
            }
            End::Kill => {
                self.actor.child.kill()?;
                self.actor.child.wait()?;
                Ok(())
            }
        }
    }
}

/// A peer process with two words of memory in place, 1000 and 5000.
struct Target {
    actor: Actor,
    info: TargetInfo,
}

/// What [`run_target`] says first.
#[derive(FromBytes, IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
#[repr(C)]
struct TargetInfo {
    words: RemoteMemory,
    device: DeviceAddress,
    /// The number of its datagram queue pair.
    datagrams: u32,
    reserved: u32,
}

impl Target {
    fn start() -> Fallible<Target> {
        let mut actor = Actor::start(&["target"])?;
        let mut info = [0; size_of::<TargetInfo>()];
        actor.output.read_exact(&mut info)?;
        Ok(Target { actor, info: TargetInfo::read_from_bytes(&info).map_err(|e| e.to_string())? })
    }

    fn order(&mut self, order: &str) -> Fallible {
        Ok(writeln!(self.actor.input, "{order}")?)
    }
}

/// Our end of a connection to a [`Target`].
struct Requester {
    qp: RcQp,
    cq: Cq,
    memory: Mr,
}

impl Requester {
    fn connect(node: &Node, target: &mut Target) -> Fallible<Requester> {
        let cq = node.device.create_cq(&CqConfig::default())?;
        let mut qp = node.pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
        target.order("connect")?;
        target.actor.input.write_all(qp.address().as_bytes())?;
        let mut theirs = [0; size_of::<QpAddress>()];
        target.actor.output.read_exact(&mut theirs)?;
        let theirs = QpAddress::read_from_bytes(&theirs).map_err(|e| e.to_string())?;
        qp.connect(&theirs, &ConnectConfig { rnr_retry: 7, ..ConnectConfig::default() })?;
        let words = Box::leak(Box::new([0u64; 8]));
        // SAFETY: the memory is never freed, and is used through the region only.
        let memory = unsafe { node.pd.register(words.as_mut_ptr().cast(), 64, Access::ALL)? };
        Ok(Requester { qp, cq, memory })
    }

    fn post_fetch_add(&mut self, wr_id: u64, target: &Target, at: u64) -> Fallible {
        let op = SendOp::FetchAdd { remote: target.info.words.at(at), add: 1 };
        Ok(self.qp.post(&SendWr::new(wr_id, op, Data::Regions(&[self.memory.sge(0..8)?])).signaled())?)
    }

    fn next_completion(&mut self) -> Fallible<(u64, Status)> {
        let mut next = None;
        wait_for("a completion", || {
            self.cq.poll(1, |c| next = Some((c.wr_id, c.status))).is_err() || next.is_some()
        })?;
        Ok(next.ok_or("the completion queue failed")?)
    }

    fn fetch_add(&mut self, target: &Target, at: u64) -> Fallible<(Status, u64)> {
        self.post_fetch_add(3, target, at)?;
        let (_, status) = self.next_completion()?;
        Ok((status, self.former()?))
    }

    /// What the last atomic returned.
    fn former(&self) -> Fallible<u64> {
        let mut former = [0; 8];
        self.memory.read(0, &mut former)?;
        Ok(u64::from_ne_bytes(former))
    }
}

/// The processor time of this thread.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes its result to `time`, which is valid.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The processor time of the threads of this process with a name, in ticks of 10 ms.
fn processor_time_of(name: &str) -> Fallible<u64> {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task")?.flatten() {
        // A thread may end meanwhile.
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        if let Some(rest) = stat.split_once(&format!("({name}) ")) {
            ticks += rest.1.split(' ').skip(11).take(2).map(|time| time.parse().unwrap_or(0)).sum::<u64>();
        }
    }
    Ok(ticks)
}

fn fill(region: &Mr) {
    let page = [OURS; PAGE];
    for at in (0..region.len()).step_by(PAGE) {
        region.write(at, &page).expect("inside");
    }
}

fn pages(region: &Mr) -> impl Iterator<Item = [u8; PAGE]> {
    (0..region.len()).step_by(PAGE).map(|at| {
        let mut page = [0; PAGE];
        region.read(at, &mut page).expect("inside");
        page
    })
}

fn check_filled(region: &Mr) -> Fallible {
    let overwritten: usize =
        pages(region).map(|page| page.iter().filter(|byte| **byte != OURS).count()).sum();
    check(overwritten == 0, format!("{overwritten} bytes of new memory were overwritten by the old WRITE"))
}

fn is_zero(region: &Mr) -> bool {
    pages(region).all(|page| page == [0; PAGE])
}

// -------------------------------------------------------------------------------------------------------- the peer

pub(crate) fn run_peer(_: &[String]) -> Fallible {
    let mut input = BufReader::new(std::io::stdin());
    let device = Device::open(&DeviceSpec::Software)?;
    let pd = device.alloc_pd()?;
    let source = pd.allocate(LARGE, Access::ALL)?;
    for at in (0..LARGE).step_by(PAGE) {
        source.write(at, &[FROM_PEER; PAGE])?;
    }
    let quick = ConnectConfig { timeout: 10, retry_count: 0, ..ConnectConfig::default() };
    let mut bytes = [0; size_of::<ConnectInfo>()];
    // One connection after another.
    while input.read_exact(&mut bytes).is_ok() {
        let to = ConnectInfo::read_from_bytes(&bytes).map_err(|e| e.to_string())?;
        let mut cq = device.create_cq(&CqConfig::default())?;
        let config = QpConfig { max_send_sge: ENTRIES as u32, ..QpConfig::default() };
        let mut qp = pd.create_rc(&config, &cq, &cq, None)?;
        let mut datagrams = pd.create_ud(&QpConfig::default(), &cq, &cq, None)?;
        datagrams.activate(QKEY)?;
        std::io::stdout().write_all(qp.address().as_bytes())?;
        std::io::stdout().flush()?;
        let mut order = String::new();
        input.read_line(&mut order)?;
        let ah = match order.trim() {
            "datagram" => Some(pd.create_ah(&to.qp.device)?),
            _ => None,
        };
        if ah.is_none() {
            qp.connect(&to.qp, &quick)?;
        }
        loop {
            order.clear();
            if input.read_line(&mut order)? == 0 {
                return Ok(());
            }
            let chunk = LARGE / ENTRIES;
            let large: Vec<Sge<'_>> =
                (0..ENTRIES).map(|i| source.sge(i * chunk..(i + 1) * chunk)).collect::<Result<_, _>>()?;
            match (order.trim(), &ah) {
                ("large", _) => {
                    let op = SendOp::Write(to.memory.at(0));
                    qp.post(&SendWr::new(1, op, Data::Regions(&large)).signaled())?;
                }
                ("small", _) => {
                    let op = SendOp::Write(to.memory.at(0));
                    qp.post(&SendWr::new(2, op, Data::Inline(b"small")).signaled())?;
                }
                ("step", Some(ah)) => {
                    let mut post = |message| {
                        let wr = SendWr::new(3, SendOp::Send, Data::Inline(message)).signaled();
                        datagrams.post(ah, to.qp.qp_num, QKEY, &wr)
                    };
                    post(STEPS[0])?;
                    wait_for("the first datagram", || cq.poll(1, |_| {}).is_ok_and(|count| count > 0))?;
                    trace::stop_here();
                    post(STEPS[1])?;
                    trace::stop_here();
                }
                ("step", None) => {
                    let wr = |i: usize| {
                        let op = SendOp::WriteImm(to.memory.at(1024 * i as u64), i as u32);
                        SendWr::new(3, op, Data::Inline(STEPS[i]))
                    };
                    // The first post attaches to the peer; the second one is single-stepped.
                    qp.post(&wr(0))?;
                    trace::stop_here();
                    qp.post(&wr(1).signaled())?;
                    trace::stop_here();
                }
                ("again", _) => break,
                (other, _) => return Err(format!("unknown order {other:?}").into()),
            }
            let mut status = None;
            wait_for("a completion", || {
                cq.poll(1, |c| status = Some(c.status)).is_err() || status.is_some()
            })?;
            println!("{}", status.map_or("none".into(), |status| format!("{status:?}")));
        }
    }
    Ok(())
}

/// A peer that only replies: to requests of its peer, and to orders.
pub(crate) fn run_target() -> Fallible {
    let mut input = BufReader::new(std::io::stdin());
    let device = Device::open(&DeviceSpec::Software)?;
    let pd = device.alloc_pd()?;
    let mut words = vec![1000u64, 5000];
    // SAFETY: the memory outlives the region, and is used through it only.
    let region = unsafe { pd.register(words.as_mut_ptr().cast(), 16, Access::ALL)? };
    let mut cq = device.create_cq(&CqConfig::default())?;
    let buffers = pd.allocate(PAGE, Access::ALL)?;
    let mut ud = pd.create_ud(&QpConfig::default(), &cq, &cq, None)?;
    ud.activate(QKEY)?;
    ud.post_recv(&RecvWr { wr_id: 1, sges: &[buffers.sge(0..256)?] })?;
    let info =
        TargetInfo { words: region.remote(), device: device.address(), datagrams: ud.qp_num(), reserved: 0 };
    std::io::stdout().write_all(info.as_bytes())?;
    std::io::stdout().flush()?;
    let (mut qps, mut datagrams, mut order) = (Vec::new(), 0, String::new());
    // A message without a receive is sent again after 655 ms.
    let config = ConnectConfig { min_rnr_timer: 0, ..ConnectConfig::default() };
    while input.read_line(&mut order)? > 0 {
        match order.trim() {
            "connect" => {
                let mut address = [0; size_of::<QpAddress>()];
                input.read_exact(&mut address)?;
                let address = QpAddress::read_from_bytes(&address).map_err(|e| e.to_string())?;
                let cq = device.create_cq(&CqConfig::default())?;
                let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None)?;
                qp.connect(&address, &config)?;
                std::io::stdout().write_all(qp.address().as_bytes())?;
                std::io::stdout().flush()?;
                qps.push((qp, cq));
            }
            "receive" => {
                let (qp, _) = qps.last_mut().ok_or("not connected")?;
                qp.post_recv(&RecvWr { wr_id: 2, sges: &[buffers.sge(256..512)?] })?;
                println!("done");
            }
            "datagrams" => {
                datagrams += cq.poll(16, |c| assert_eq!((c.wr_id, c.status), (1, Status::Success)))?;
                println!("{datagrams}");
            }
            other => return Err(format!("unknown order {other:?}").into()),
        }
        order.clear();
    }
    Ok(())
}
