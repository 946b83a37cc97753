//! Fuzz targets: messages on the socket of a device, and addresses of queue pairs.

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::control::{self, MAX_PAYLOAD, Reply, Request};
use super::layout::MAGIC;
use crate::device::*;
use crate::fuzzing::{Steps, fuzz};
use crate::local::socket;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const REGION: usize = 256;
const GUARD: usize = 1024;

/// Messages of a peer to the service thread. They may change the memory that is registered with remote access, and nothing
/// beside it; the connection of another queue pair stays as it is.
///
/// Input: for each message `flags, kind, length of the payload`, then a `Request`. Flag 1: the key of the region. Flag 2: an address
/// near the region. Flag 4: a queue pair that is connected to another peer, and its epoch. Flag 8: nothing of the message after
/// `length` bytes.
#[test]
fn fuzz_device_control() {
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let mut a = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    let mut b = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    a.connect(&b.address(), &ConnectConfig::default()).unwrap();
    b.connect(&a.address(), &ConnectConfig::default()).unwrap();
    let mut memory = vec![0x55u8; GUARD + REGION + GUARD];
    // SAFETY: inside the vector.
    let start = unsafe { memory.as_mut_ptr().add(GUARD) };
    // SAFETY: the vector outlives the region, and its bytes are only read while no peer is connected.
    let region = unsafe { pd.register(start, REGION, Access::ALL) }.unwrap();
    // A region that peers may not write.
    let mut private = vec![0x55u8; REGION];
    // SAFETY: as above.
    let private_region = unsafe { pd.register(private.as_mut_ptr(), REGION, Access::REMOTE_READ) }.unwrap();

    let example = |flags: u8, kind: u32, a: u64, payload: u8| {
        let request = Request { a, addr: 8, ..Request::new(kind) };
        [&[flags, kind as u8, payload][..], request.as_bytes()].concat()
    };
    let mut examples: Vec<_> = (1..=9).map(|kind| example(3, kind, 8, 8)).collect();
    examples.push([example(3, 5, 8, 8), example(3, 6, 8, 0), example(7, 3, 1, 0)].concat());
    examples.push(example(11, 5, 8, 8));
    fuzz(CRATE, "device_control", examples, |input| {
        let peer = control::connect(&device.address().gid).unwrap();
        let hello = Request { gid: [9; 16], a: MAGIC, ..Request::new(Request::HELLO) };
        let mut steps = Steps(input);
        if input.len() % 8 != 0 {
            socket::send(&peer, hello.as_bytes(), &[], &[]).unwrap();
        }
        while !steps.is_empty() {
            let (flags, kind, payload) = (steps.byte(), steps.byte(), usize::from(steps.byte()));
            let mut request = Request::new_zeroed();
            let given = steps.take(size_of::<Request>());
            request.as_mut_bytes()[..given.len()].copy_from_slice(given);
            request.kind = u32::from(kind % 12);
            let target = [&region, &private_region][usize::from(flags >> 4 & 1)].remote();
            if flags & 1 != 0 {
                request.key = target.rkey;
            }
            if flags & 2 != 0 {
                request.addr = target.addr.wrapping_add(request.addr % (2 * REGION as u64));
            }
            if flags & 4 != 0 {
                request.qp_num = a.qp_num();
                request.a %= 16;
            }
            let bytes = if flags & 8 != 0 { &request.as_bytes()[..payload % 56] } else { request.as_bytes() };
            // Fails once the device has disconnected this peer.
            if socket::send(&peer, bytes, &vec![0xAA; payload * 200 % (MAX_PAYLOAD + 100)], &[]).is_err() {
                break;
            }
        }
        // A message that the device refuses, so that it disconnects: then it has handled all of them.
        socket::send(&peer, Request::new(1000).as_bytes(), &[], &[]).ok();
        let mut reply = Reply::new_zeroed();
        let mut data = vec![0; MAX_PAYLOAD];
        while socket::receive(&peer, reply.as_mut_bytes(), &mut data).is_ok() {}
        assert_eq!((a.state(), b.state()), (QpState::ReadyToSend, QpState::ReadyToSend));
    });
    drop((region, private_region));
    assert!(memory[..GUARD].iter().chain(&memory[GUARD + REGION..]).all(|byte| *byte == 0x55));
    assert!(private.iter().all(|byte| *byte == 0x55));
}

/// The address of a queue pair, as a peer sends it: connecting to it is an error, or connects to the queue pair that it names.
#[test]
fn fuzz_device_address() {
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let target = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    fuzz(CRATE, "device_address", [target.address().as_bytes().to_vec()], |input| {
        let Ok(address) = QpAddress::read_from_bytes(input) else { return };
        // Another device's name would be looked up on this machine; nobody has it.
        let address =
            QpAddress { device: DeviceAddress { gid: device.address().gid, ..address.device }, ..address };
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        let connected = qp.connect(&address, &ConnectConfig::default());
        if connected.is_err() {
            assert_ne!(qp.state(), QpState::ReadyToSend);
        } else {
            assert_eq!(address.device.provider, DeviceAddress::SOFTWARE);
        }
    });
}
