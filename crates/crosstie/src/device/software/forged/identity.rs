//! Processes that say HELLO in the name of a device that is not theirs, or for very many devices.

use crosstie_testkit::wait::eventually;
use zerocopy::{FromZeros, IntoBytes};

use super::super::control::{self, Reply, Request};
use super::super::layout::MAGIC;
use super::{Attacker, Victim, encode};
use crate::device::*;
use crate::local::socket::{self, ListeningSocket, Socket};

/// A connection that has said HELLO, and the name under which it listens.
#[expect(dead_code, reason = "the sockets stay open")]
pub(super) struct OpenHello {
    socket: Socket,
    listener: ListeningSocket,
    pub(super) status: u32,
}

fn hello(to: &[u8; 16], name: &[u8; 16]) -> (Socket, u32) {
    let socket = control::connect(to).unwrap();
    let hello = Request { gid: *name, a: MAGIC, ..Request::new(Request::HELLO) };
    socket::send(&socket, hello.as_bytes(), &[], &[]).unwrap();
    let mut reply = Reply::new_zeroed();
    socket::receive_with_files(&socket, reply.as_mut_bytes(), &mut []).unwrap();
    (socket, reply.status)
}

/// Says HELLO to device `to` in the name of device `name`, and returns the status of the reply.
pub(super) fn say_hello(to: &[u8; 16], name: &[u8; 16]) -> u32 {
    hello(to, name).1
}

/// Says HELLO to device `to` for `count` devices of this process.
pub(super) fn say_hellos(to: &[u8; 16], count: u64, open: &mut Vec<OpenHello>) {
    for number in 0..count {
        let name = (u128::from(std::process::id()) << 64 | u128::from(number)).to_be_bytes();
        let listener = control::listen(&name).unwrap();
        let (socket, status) = hello(to, &name);
        open.push(OpenHello { socket, listener, status });
    }
}

#[test]
fn process_cannot_connect_in_the_name_of_a_device_that_is_not_its_own() {
    let mut victim = Victim::new();
    let mut attacker = Attacker::start();
    let to = encode(&victim.device.address().gid);
    // A device that is connected, one that is not, and a name that nobody has.
    let other = Device::open(&DeviceSpec::Software).unwrap();
    for name in [victim.honest.device.address().gid, other.address().gid, [3; 16]] {
        let status = attacker.ask(&format!("hello {to} {}", encode(&name)));
        assert_eq!(status, Reply::NOT_YOURS.to_string());
    }
    victim.check("after a false name");
    // The device itself can still connect.
    let (_ends, _) = victim.connect(&mut attacker);
    let pd = other.alloc_pd().unwrap();
    let cq = other.create_cq(&CqConfig::default()).unwrap();
    let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    qp.connect(&victim.honest.victim_own.address(), &ConnectConfig::default()).unwrap();
}

#[test]
fn one_process_cannot_take_all_places_for_peers() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut victim = Victim::new();
    let mut attacker = Attacker::start();
    let before = descriptors();
    let statuses = attacker.ask(&format!("hellos {} 400", encode(&victim.device.address().gid)));
    let statuses: Vec<u32> = statuses.split(' ').map(|status| status.parse().unwrap()).collect();
    let accepted = statuses.iter().filter(|status| **status == Reply::OK).count();
    assert!((1..=128).contains(&accepted), "{accepted} devices of one process are connected");
    assert!(statuses[accepted..].iter().all(|status| *status == Reply::EXHAUSTED), "{statuses:?}");
    // A socket and a pidfd each; other tests of this program open descriptors at the same time.
    let after = descriptors();
    assert!(after < before + 2 * 128 + 200, "{before} descriptors became {after}");
    // Devices of other processes get in.
    let mut other = Attacker::start();
    let (_ends, _) = victim.connect(&mut other);
    victim.check("beside 128 devices of one process");
    drop(attacker);
    eventually("the connections of a dead process are closed", || descriptors() <= before + 200);
}
