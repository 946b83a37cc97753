//! Processes of different users cannot connect their software devices, and one cannot find the other's services. Floods of
//! connections, of another user and of our own, take a limited number of descriptors and keep nobody out.
//!
//! Needs root, to become another user; fails with a message otherwise.

use std::io::Write;

use super::local_service::{self, Service};
use crosstie::device::*;
use crosstie_testkit::child::{self, Child};
use zerocopy::{FromBytes, IntoBytes};

const NOBODY: u32 = 65534;
/// Connections of a flood.
const FLOOD: usize = 500;
/// Descriptors that a test opens besides.
const SLACK: usize = 60;
/// Limit on anything that should happen.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Runs as the other user when the tests below start it in a child process; does nothing in an ordinary run.
#[test]
fn the_other_user() {
    let Some(role) = child::task() else { return };
    // SAFETY: plain system calls. After them this process has no way back to root.
    let dropped = unsafe { libc::setgid(NOBODY) == 0 && libc::setuid(NOBODY) == 0 };
    assert!(dropped, "could not become user {NOBODY}");
    if let Some(name) = role.strip_prefix("service ") {
        return look_for_services(name);
    }
    if let Some(address) = role.strip_prefix("flood ") {
        return flood(address);
    }
    let outcome = connect(&QpAddress::read_from_bytes(&child::read()).unwrap());

    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    child::write(&[refused(&outcome).into()]);
    child::write(qp.address().as_bytes());
    // Until the parent has tried.
    child::wait_for_end_of_input();
}

fn connect(to: &QpAddress) -> Result<(), DeviceError> {
    let device = Device::open(&DeviceSpec::Software)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(&CqConfig::default())?;
    pd.create_rc(&QpConfig::default(), &cq, &cq, None)?.connect(to, &ConnectConfig::default())
}

fn refused(outcome: &Result<(), DeviceError>) -> bool {
    matches!(outcome, Err(DeviceError::Refused(_)))
}

#[test]
fn device_of_another_user_is_refused_in_both_directions() {
    assert_root();
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    let mut child = Child::start(the_other_user, "device");
    child.write(qp.address().as_bytes());
    assert_eq!(child.read(), [1], "another user was let in");
    let theirs = QpAddress::read_from_bytes(&child.read()).unwrap();
    let outcome = connect(&theirs);
    assert!(refused(&outcome), "we trusted another user's device: {outcome:?}");
    child.join();
    // Our own user is still served.
    qp.connect(&qp.address(), &ConnectConfig::default()).unwrap();
}

/// Connects to a listener again and again, says nothing or nonsense, and holds the connections. `target` is `unix NAME` or
/// `tcp ADDRESS`.
fn flood(target: &str) {
    let mut connections: Vec<Box<dyn std::any::Any>> = Vec::new();
    for number in 0..FLOOD {
        if let Some(address) = target.strip_prefix("tcp ") {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            // The listener may have closed it already.
            stream.write_all(&vec![number as u8; [0, 1, 40, 3000][number % 4]]).ok();
            connections.push(Box::new(stream));
        } else {
            let name = target.strip_prefix("unix ").unwrap();
            let address = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
            let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
            let socket = rustix::net::socket(family, kind, None).unwrap();
            rustix::net::connect(&socket, &address).unwrap();
            connections.push(Box::new(socket));
        }
    }
    child::write(b"connected");
    // Until the parent has counted.
    child::wait_for_end_of_input();
}

/// Runs as our own user when the test below starts it in a child process; does nothing in an ordinary run.
#[test]
fn the_same_user() {
    if let Some(target) = child::task() {
        flood(&target);
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn assert_root() {
    // SAFETY: a plain system call.
    let user = unsafe { libc::geteuid() };
    assert_eq!(user, 0, "this test needs root, to become another user: run it with sudo");
}

/// Floods `target` twice: as another user and as our own. `most` are the connections of each that the listener may hold, with
/// `each` descriptors. `serve` is called while the flood arrives, and `check`, which is given a name for errors, beside it: a peer that
/// follows the protocol must be served.
fn check_floods(
    target: &str,
    most: [usize; 2],
    each: usize,
    mut serve: impl FnMut(),
    mut check: impl FnMut(),
) {
    assert_root();
    for (user, most) in ["another user", "our own user"].into_iter().zip(most) {
        let before = descriptors();
        let mut child = match user {
            "another user" => Child::start(the_other_user, &format!("flood {target}")),
            _ => Child::start(the_same_user, target),
        };
        let (begun, mut highest) = (std::time::Instant::now(), 0);
        std::thread::scope(|scope| {
            let ready = scope.spawn(|| child.read());
            while !ready.is_finished() {
                serve();
                highest = highest.max(descriptors());
                assert!(begun.elapsed() < TIMEOUT, "{user}: the flood of {target} does not end");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        highest = highest.max(descriptors());
        assert!(
            highest <= before + each * most + SLACK,
            "{user}: {before} descriptors became {highest} in a flood of {target}"
        );
        check();
        // Connections that say nothing are closed after a while.
        let begun = std::time::Instant::now();
        while descriptors() > before + SLACK {
            serve();
            assert!(begun.elapsed() < TIMEOUT, "{user}: connections to {target} stay open");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        child.join();
    }
}

/// Connections of other users take no descriptors of a device. Connections of our own user that send no hello take a limited
/// number of them, for a limited time: a socket and a pidfd each.
#[test]
fn floods_of_a_device_take_few_descriptors_and_keep_no_peer_out() {
    if child::run_alone(floods_of_a_device_take_few_descriptors_and_keep_no_peer_out) {
        return;
    }
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&CqConfig::default()).unwrap();
    let gid: String = device.address().gid.iter().map(|byte| format!("{byte:02x}")).collect();
    check_floods(
        &format!("unix crosstie-{gid}"),
        [0, 64],
        2,
        || (),
        || {
            let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
            connect(&qp.address()).unwrap();
            qp.connect(&qp.address(), &ConnectConfig::default()).unwrap();
        },
    );
}

#[test]
fn floods_of_a_service_take_few_descriptors_and_keep_no_client_out() {
    if child::run_alone(floods_of_a_service_take_few_descriptors_and_keep_no_client_out) {
        return;
    }
    local_service::each!(S, {
        let name = format!("flooded-{}", std::process::id());
        let server = std::cell::RefCell::new(S::create(&name, 4, 1).unwrap());
        let serve = || {
            let server = &mut *server.borrow_mut();
            S::server_poll(server);
        };
        check_floods(&format!("unix crosstie/{}/0/{name}", S::NAME), [0, 64], 2, serve, || {
            let mut client = S::connect(&name).unwrap();
            let request = local_service::request(7, 7);
            assert!(S::call(&mut client, &request, 7).unwrap());
            let (begun, mut answered) = (std::time::Instant::now(), false);
            while !answered {
                let server = &mut *server.borrow_mut();
                S::server_poll(server);
                while let Some((words, ticket)) = S::receive(server) {
                    assert!(S::reply(server, ticket, &local_service::expected_response(&words)));
                }
                S::poll(&mut client, &mut |_, response| {
                    assert_eq!(*response, local_service::expected_response(&request));
                    answered = true;
                })
                .unwrap();
                assert!(begun.elapsed() < TIMEOUT, "no response");
            }
        });
    });
}

#[test]
fn floods_of_a_rendezvous_take_few_descriptors_and_keep_no_rank_out() {
    use crosstie::bootstrap::{Bootstrap, Limits, Secret, limits::MAX_UNAUTHENTICATED, tcp};
    if child::run_alone(floods_of_a_rendezvous_take_few_descriptors_and_keep_no_rank_out) {
        return;
    }
    let secret = || Secret::new("the secret of this job").unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // One rank is missing until the end of the test, so that the coordinator keeps accepting. Each flood meets a new rank.
    let zero = std::thread::spawn(move || tcp::join_as_rank_zero(listener, 4, &secret(), Limits::default()));
    let join = move |rank: u32| {
        let (rendezvous, limits) = (address.to_string(), Limits::default());
        std::thread::spawn(move || {
            tcp::join(&tcp::Config { rank, size: 4, rendezvous, listen: None, secret: secret(), limits })
        })
    };
    let mut ranks = Vec::new();
    check_floods(
        &format!("tcp {address}"),
        [MAX_UNAUTHENTICATED; 2],
        1,
        || (),
        || {
            ranks.push(join(ranks.len() as u32 + 1));
        },
    );
    ranks.push(join(3));
    let members = ranks.into_iter().chain([zero]).map(|rank| rank.join().unwrap().unwrap());
    let barriers: Vec<_> =
        members.map(|mut member| std::thread::spawn(move || member.barrier().unwrap())).collect();
    barriers.into_iter().for_each(|barrier| barrier.join().unwrap());
}

#[test]
fn floods_of_a_rails_listener_take_few_descriptors_and_keep_no_sender_out() {
    use crosstie::rails::{Config, MAX_UNAUTHENTICATED, Rails};
    if child::run_alone(floods_of_a_rails_listener_take_few_descriptors_and_keep_no_sender_out) {
        return;
    }
    let rails = || {
        let device = Device::open_software(&software::Config { space: 256 << 20 }).unwrap();
        Rails::new(vec![device], Config::default()).unwrap()
    };
    let (here, there) = (rails(), rails());
    let listener = std::cell::RefCell::new(there.listen().unwrap());
    let handle = listener.borrow().handle();
    let port = u16::from_le_bytes([handle.to_bytes()[4], handle.to_bytes()[5]]);
    let serve = || assert!(listener.borrow_mut().accept().unwrap().is_none());
    check_floods(&format!("tcp 127.0.0.1:{port}"), [MAX_UNAUTHENTICATED; 2], 1, serve, || {
        let mut connecting = here.connect(&handle).unwrap();
        let (mut sender, mut receiver) = (None, None);
        let begun = std::time::Instant::now();
        while sender.is_none() || receiver.is_none() {
            if sender.is_none() {
                sender = connecting.poll().unwrap();
            }
            if receiver.is_none() {
                receiver = listener.borrow_mut().accept().unwrap();
            }
            assert!(begun.elapsed() < TIMEOUT, "the sender does not get in");
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    });
}

/// Runs as the other user: it finds no such service, and it can create one with the same name.
fn look_for_services(name: &str) {
    let (mut fine, mut servers) = (true, Vec::<Box<dyn std::any::Any>>::new());
    local_service::each!(S, {
        fine &= matches!(S::connect(name), Err(crosstie::ipc::ConnectError::NoServer { .. }));
        let server = S::create(name, 1, 1);
        fine &= server.is_ok();
        servers.push(Box::new(server));
    });
    child::write(&[fine.into()]);
    // Until the parent has tried.
    child::wait_for_end_of_input();
}

#[test]
fn another_user_does_not_find_our_service_and_can_use_its_name() {
    assert_root();
    let name = format!("other-user-{}", std::process::id());
    local_service::each!(S, {
        let mut server = S::create(&name, 2, 1).unwrap();
        let mut child = Child::start(the_other_user, &format!("service {name}"));
        assert_eq!(child.read(), [1], "another user found the service, or could not have one of that name");
        assert_eq!(S::clients(&mut server), 0);
        // Both users have a service of that name now, and each user finds its own.
        let client = S::connect(&name).unwrap();
        assert_eq!(S::clients(&mut server), 1);
        drop(server);
        // Our service is gone, and we do not find the other user's.
        assert!(matches!(S::connect(&name), Err(crosstie::ipc::ConnectError::NoServer { .. })));
        drop(client);
        child.join();
    });
}
