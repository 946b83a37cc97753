//! Invalid words in a segment and invalid messages on the socket cause errors at most: never a panic, a hang, or an access
//! outside the segment.

use std::io::Write;
use std::os::fd::AsFd;
use std::time::Duration;

use zerocopy::IntoBytes;

use super::control::{self, Request};
use super::ends::{End, connect, next_completion, small_device};
use super::layout::{HEAP_AT, QPS_AT, REGIONS_AT};
use super::lock::locked;
use crate::device::*;
use crate::rng::{Random, seed};

pub(super) fn shared(device: &Device) -> &super::state::DeviceShared {
    shared_arc(device)
}

pub(super) fn shared_arc(device: &Device) -> &std::sync::Arc<super::state::DeviceShared> {
    match &device.provider {
        crate::device::device::Provider::Software(device) => &device.handle.device,
        _ => unreachable!("a software device was opened"),
    }
}

/// Words that are likely to be invalid: extreme, small, or random.
fn invalid_word(random: &mut Random) -> u64 {
    match random.next() % 8 {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << (random.next() % 64),
        3 => random.next() % 4096,
        4 => u64::MAX - random.next() % 64,
        5 => random.next() & 0xFFFF_FFFF,
        _ => random.next(),
    }
}

#[test]
fn invalid_words_in_a_segment_cause_errors_at_most() {
    let mut random = Random(seed());
    // An invalid `busy` word makes the removal of objects wait for the peer, so each round takes a while.
    for _ in 0..20 {
        let (near, far) = (small_device(), small_device());
        let (near_pd, far_pd) = (near.alloc_pd().unwrap(), far.alloc_pd().unwrap());
        let mut near_cq = near.create_cq(&CqConfig { depth: 64 }).unwrap();
        let mut far_cq = far.create_cq(&CqConfig { depth: 64 }).unwrap();
        let mut srq = far_pd.create_srq(&SrqConfig { max_wr: 16, max_sge: 2 }).unwrap();
        let config = QpConfig::default();
        let quick = ConnectConfig { rnr_retry: 0, timeout: 1, retry_count: 0, ..ConnectConfig::default() };
        let memory = near_pd.allocate(4096, Access::ALL).unwrap();
        let target = far_pd.allocate(4096, Access::ALL).unwrap();
        let mut pairs = Vec::new();
        for shared in [false, true] {
            let mut a = near_pd.create_rc(&config, &near_cq, &near_cq, None).unwrap();
            let mut b = far_pd.create_rc(&config, &far_cq, &far_cq, shared.then_some(&srq)).unwrap();
            a.connect(&b.address(), &quick).unwrap();
            b.connect(&a.address(), &quick).unwrap();
            pairs.push((a, b, shared));
        }
        // The near device is correct. A malicious peer writes to the far device's segment while both work.
        let segment = &shared(&far).memory.segment;
        let lines = &locked(&shared(&far).peers.lines).segment(&near.address().gid).unwrap();
        let areas = [
            (segment, REGIONS_AT, 256),
            (segment, QPS_AT, 4 * 128),
            (lines, 0, 256),
            (segment, HEAP_AT, 4 * 4096),
            (segment, HEAP_AT + 3 * 4096, 8 * 4096),
        ];
        for round in 0..40 {
            for (a, b, shared) in &mut pairs {
                let sges = [target.sge(0..64).unwrap(), target.sge(64..128).unwrap()];
                let wr = RecvWr { wr_id: round, sges: &sges };
                let posted = if *shared { srq.post_recv(&wr) } else { b.post_recv(&wr) };
                assert!(
                    matches!(posted, Ok(_) | Err(PostError::Full | PostError::WrongState(_))),
                    "{posted:?}"
                );
                let remote = target.remote().at(random.next() % 5000);
                let local = [memory.sge(0..8).unwrap()];
                let op = match random.next() % 5 {
                    0 => SendOp::Send,
                    1 => SendOp::Write(remote),
                    2 => SendOp::Read(remote),
                    3 => SendOp::FetchAdd { remote, add: 1 },
                    _ => SendOp::WriteImm(remote, 5),
                };
                // A short WRITE+IMM with inline data goes its own way.
                let data = match op {
                    SendOp::WriteImm(..) if round % 4 != 0 => Data::Inline(b"inline"),
                    _ => Data::Regions(&local),
                };
                let posted = a.post(&SendWr::new(round, op, data).signaled());
                assert!(
                    matches!(posted, Ok(_) | Err(PostError::Full | PostError::WrongState(_))),
                    "{posted:?}"
                );
            }
            for _ in 0..random.next() % 20 {
                let (segment, at, len) = areas[(random.next() % areas.len() as u64) as usize];
                let word = segment.bytes(at + random.next() % len / 8 * 8, 8).unwrap();
                // SAFETY: an aligned word inside the segment, which is accessed with atomics only.
                unsafe { core::sync::atomic::AtomicU64::from_ptr(word.as_ptr().cast()) }
                    .store(invalid_word(&mut random), core::sync::atomic::Ordering::Relaxed);
            }
            // An overrun error and an empty poll are both allowed; panics and endless loops are not.
            for cq in [&mut near_cq, &mut far_cq] {
                let polled = cq.poll(16, |_| {});
                assert!(polled.is_err() || polled.is_ok_and(|count| count <= 16), "{polled:?}");
            }
        }
    }
}

#[test]
fn invalid_messages_on_the_socket_do_not_affect_other_connections() {
    let mut random = Random(seed());
    let End { qp: mut a, mut cq, pd, device } = End::new(&QpConfig::default());
    let mut b = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    connect(&mut a, &mut b);
    let gid = device.address().gid;
    for _ in 0..200 {
        let socket = control::connect(&gid).unwrap();
        let hello = Request { gid: [9; 16], a: super::layout::MAGIC, ..Request::new(Request::HELLO) };
        if random.next().is_multiple_of(2) {
            crate::local::socket::send(&socket, hello.as_bytes(), &[], &[]).unwrap();
        }
        for _ in 0..random.next() % 4 {
            let mut request = Request {
                version_or_number: random.next() as u32,
                gid: [random.next() as u8; 16],
                qp_num: a.qp_num(),
                key: invalid_word(&mut random) as u32,
                addr: invalid_word(&mut random),
                a: invalid_word(&mut random),
                b: invalid_word(&mut random),
                kind: random.next() as u32 % 10,
            };
            if request.kind == Request::READ {
                request.a = invalid_word(&mut random);
            }
            let cut = random.next() as usize % (size_of::<Request>() + 1);
            let bytes = &request.as_bytes()[..if cut.is_multiple_of(3) { cut } else { size_of::<Request>() }];
            let mut file = std::fs::File::from(socket.as_fd().try_clone_to_owned().unwrap());
            if file.write_all(bytes).is_err() {
                break;
            }
        }
    }
    // The established connection still works: a peer cannot break a queue pair that is not connected to it.
    assert_eq!((a.state(), b.state()), (QpState::ReadyToSend, QpState::ReadyToSend));
    b.post_recv(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
    let target = pd.allocate(64, Access::ALL).unwrap();
    a.post(&SendWr::new(2, SendOp::WriteImm(target.remote().at(0), 3), Data::Inline(b"still here"))).unwrap();
    assert_eq!(next_completion(&mut cq).imm, Some(3));
}

/// A peer asks the service thread to write to memory in place, and does not wait for the reply: it announces no operation, as
/// one whose time is over. Once `deregister` has returned, not one byte of the memory changes.
#[test]
fn proxied_write_does_not_land_after_deregistration() {
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let socket = control::connect(&device.address().gid).unwrap();
    let hello = Request { gid: [7; 16], a: super::layout::MAGIC, ..Request::new(Request::HELLO) };
    let mut reply = control::Reply::new(0, 0);
    let mut exchange = |request: &Request, payload: &[u8], wait: &mut dyn FnMut()| {
        crate::local::socket::send(&socket, request.as_bytes(), payload, &[]).unwrap();
        wait();
        crate::local::socket::receive_with_files(&socket, reply.as_mut_bytes(), &mut []).unwrap();
        reply.status
    };
    assert_eq!(exchange(&hello, &[], &mut || ()), control::Reply::OK);
    let (mut landed, mut refused) = (0, 0);
    let mut random = Random(seed());
    for round in 0..40_000 {
        let mut memory = vec![0u8; control::MAX_PAYLOAD];
        let (start, len) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the vector outlives the region, and is used only after the region is deregistered.
        let mut region = Some(unsafe { pd.register(start, len, Access::ALL).unwrap() });
        let remote = region.as_ref().unwrap().remote();
        let write =
            Request { key: remote.rkey, addr: remote.addr, a: len as u64, ..Request::new(Request::WRITE) };
        let delay = random.next() % 3000;
        let status = exchange(&write, &vec![0xAA; len], &mut || {
            for _ in 0..delay {
                core::hint::spin_loop();
            }
            region.take().unwrap().deregister(Duration::from_secs(20)).unwrap();
            memory.fill(0x55);
        });
        match status {
            control::Reply::OK => landed += 1,
            _ => refused += 1,
        }
        assert!(memory.iter().all(|byte| *byte == 0x55), "round {round}: written after deregistration");
    }
    println!("{landed} writes before deregistration, {refused} after it");
    assert!(landed > 0 && refused > 0, "{landed} before, {refused} after: the race was never close");
}
