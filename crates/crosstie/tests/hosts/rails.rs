//! Rails between two hosts that are joined by two links, of which one goes down, and comes back with another address.
//!
//! In a virtual machine of `cargo xtask vm --hosts 2`, the test on host 0 sends and the same test on host 1 receives, on Soft-RoCE; host
//! 0 switches its second link off and on. Elsewhere two threads do the same on software devices, whose ports a fault device switches.
//! And the example `rails_two_hosts`, as its guide says to start it.

#[path = "../rails/pair.rs"]
#[allow(dead_code, reason = "only the patterns are used")]
mod pair;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crosstie::device::Device;
use crosstie::device::fault::{Control, Plan};
use crosstie::rails::*;
use crosstie_testkit::hosts;

/// How long anything may take before the test fails instead of hanging. Virtual machines are slow.
const HANG: Duration = Duration::from_secs(100);
const LEN: usize = 256 << 10;
/// Messages before the link goes down, while it is down, and after it is back.
const BEFORE: u64 = 20;
const DURING: u64 = 20;
const AFTER: u64 = 20;

/// The port of the example.
const EXAMPLE_PORT: u16 = 7795;

/// What an end does to its second link.
type SetLink = Arc<dyn Fn(bool) + Send + Sync>;

/// One end of the test.
struct End {
    rails: Rails,
    /// Where host 0 listens for the messages of the test itself.
    meeting: SocketAddr,
    set_link: SetLink,
}

fn config(address: Ipv4Addr) -> Config {
    Config {
        split: Split::Fixed([1, 1, 0, 0]),
        listen_address: IpAddr::V4(address),
        // A virtual machine may stop for a while; that is not to look like a rail that has failed.
        stall_timeout: Duration::from_secs(1),
        probe_timeout: Duration::from_secs(2),
        ..Config::default()
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().expect("`ip` can be started");
    assert!(status.success(), "ip {arguments}");
}

/// An end in a virtual machine.
fn guest(host: u8) -> End {
    let devices = ["verbs:r0", "verbs:r1"].map(|spec| Device::open(&spec.parse().unwrap()).unwrap()).into();
    let rails = Rails::new(devices, config(Ipv4Addr::new(10, 77, 0, 1 + host))).unwrap();
    let switching = Mutex::new(None);
    let set_link = Arc::new(move |up: bool| {
        let mut switching = switching.lock().unwrap();
        if up {
            let down: Option<Child> = switching.take();
            assert!(down.expect("it was switched off").wait().unwrap().success());
            // The address is another one than before, and so is the GID.
            ip("addr del 10.78.0.1/24 dev eth1");
            ip("addr add 10.78.0.77/24 dev eth1");
            ip("link set eth1 up");
        } else {
            // Meanwhile messages are sent: the link goes down in the middle of one.
            *switching = Some(Command::new("ip").args(["link", "set", "eth1", "down"]).spawn().unwrap());
        }
    });
    End { rails, meeting: (Ipv4Addr::new(10, 77, 0, 1), 7790).into(), set_link }
}

/// An end in a thread.
fn thread(meeting: SocketAddr) -> End {
    let devices: Vec<Device> = (0..2).map(|_| pair::software().with_faults(Plan::none())).collect();
    let control: Control = devices[1].faults().unwrap();
    let rails = Rails::new(devices, config(Ipv4Addr::LOCALHOST)).unwrap();
    let set_link = Arc::new(move |up: bool| if up { control.port_up() } else { control.port_down() });
    End { rails, meeting, set_link }
}

fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < HANG, "it hangs: {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn receive(end: &End) {
    let mut meeting = until("the sender does not listen", || TcpStream::connect(end.meeting).ok());
    let mut listener = end.rails.listen().unwrap();
    meeting.write_all(&listener.handle().to_bytes()).unwrap();
    let mut receiver = until("no sender connects", || listener.accept().unwrap());
    let memory = end.rails.allocate(LEN).unwrap();
    for number in 0..BEFORE + DURING + AFTER {
        let buffer = RecvBuffer { memory: &memory, range: 0..LEN, tag: 0 };
        let request = receiver.irecv(&[buffer]).unwrap().unwrap();
        let received = until("a message does not arrive", || receiver.test(request).unwrap());
        assert_eq!(received.sizes(), [LEN]);
        pair::check(&memory, 0, &pair::pattern(LEN, number));
        if number + 1 == BEFORE + DURING {
            // The rail comes back before more is sent.
            until("the rail does not come back", || {
                receiver.progress();
                (receiver.rails_up() == 3).then_some(())
            });
        }
    }
    // The sender says that it is done; until then its last requests may need an acknowledgement.
    meeting.set_nonblocking(true).unwrap();
    until("the sender does not end", || {
        receiver.progress();
        matches!(meeting.read(&mut [0]), Ok(0 | 1)).then_some(())
    });
    let counters = receiver.counters();
    assert_eq!((counters.messages, counters.violations), (BEFORE + DURING + AFTER, [0; Violation::KINDS]));
    println!("receiver: {:?}", counters.rails);
}

fn send(end: &End, listener: &TcpListener) {
    let (mut meeting, _) = listener.accept().unwrap();
    let mut handle = [0; Handle::LEN];
    meeting.read_exact(&mut handle).unwrap();
    let mut connecting = end.rails.connect(&Handle::from_bytes(&handle).unwrap()).unwrap();
    let mut sender = until("the connection is not made", || connecting.poll().unwrap());
    let memory = end.rails.allocate(LEN).unwrap();
    let mut before = Vec::new();
    for number in 0..BEFORE + DURING + AFTER {
        memory.write(0, &pair::pattern(LEN, number)).unwrap();
        let request = until("the receiver takes no message", || sender.isend(&memory, 0..LEN, 0).unwrap());
        if number == BEFORE {
            (end.set_link)(false);
        }
        let sent = until("a message is not sent", || sender.test(request).unwrap());
        assert_eq!(sent, LEN);
        if number + 1 == BEFORE + DURING {
            let counters = sender.counters();
            assert!(counters.rails[1].failures >= 1, "the rail did not fail: {:?}", counters.rails);
            (end.set_link)(true);
            until("the rail does not come back", || {
                sender.progress();
                (sender.rails_up() == 3).then_some(())
            });
            before = sender.counters().rails;
        }
    }
    let counters = sender.counters();
    println!("sender: {:?}", counters.rails);
    assert_eq!(counters.rails[0].failures, 0, "the other rail failed, too");
    assert!(counters.rails[1].returns >= 1);
    let gained: Vec<u64> =
        counters.rails.iter().zip(&before).map(|(after, before)| after.bytes - before.bytes).collect();
    let half = AFTER * LEN as u64 / 2;
    assert_eq!(gained, [half, half], "the rail that came back does not carry its half");
    meeting.write_all(&[1]).unwrap();
}

#[test]
fn messages_survive_a_link_that_goes_down_and_comes_back_with_another_address() {
    let host = match (std::env::var("HOST").as_deref(), std::env::var("PEER")) {
        (Ok("0"), Ok(_)) => Some(0),
        (Ok("1"), Ok(_)) => Some(1),
        _ => None,
    };
    match host {
        Some(0) => {
            let end = guest(0);
            send(&end, &TcpListener::bind(end.meeting).unwrap());
        }
        Some(host) => receive(&guest(host)),
        None => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let meeting = listener.local_addr().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| receive(&thread(meeting)));
                send(&thread(meeting), &listener);
            });
        }
    }
}

#[test]
fn example_sends_over_both_rails_from_one_host_to_the_other() {
    let hosts = hosts::Hosts::find(EXAMPLE_PORT);
    let devices = if hosts.device == "software" { "software,software" } else { "verbs:r0,verbs:r1" };
    let arguments = ["receive", "send"].map(|role| [role, &hosts.rendezvous, devices]);
    let started = hosts.start(&hosts::example_path("rails_two_hosts"), |rank| &arguments[rank as usize]);
    for (rank, output) in hosts::wait_for_exit(started) {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
        print!("{text}");
        let verb = ["received", "sent"][rank as usize];
        assert!(text.contains(&format!("{verb} 32 messages of 1048576 bytes")), "{text}");
        assert!(!text.contains("rail 1: 0 bytes"), "{text}");
    }
}
