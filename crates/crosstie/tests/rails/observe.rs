//! What a connection learns about its rails, and what others can learn about a connection.

use std::io::{Read, Write};
use std::net::TcpStream;

use crosstie::rails::*;
use crosstie_testkit::allocations;

use super::pair::*;

#[test]
fn a_message_allocates_nothing() {
    for (rails, len) in [(1, 64), (2, 4096), (2, 200_000)] {
        let mut pair = Pair::plain(rails, Config::default());
        let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
        let exchange = |pair: &mut Pair| {
            let receive = pair.receive(&to, 0..1 << 20);
            let send = until(|| pair.sender.isend(&from, 0..len, 0).unwrap());
            until(|| pair.receiver.test(receive).unwrap());
            until(|| pair.sender.test(send).unwrap());
        };
        (0..300).for_each(|_| exchange(&mut pair));
        let what = format_args!("{rails} rails, {len} bytes");
        allocations::assert_none(what, || (0..1000).for_each(|_| exchange(&mut pair)));
    }
}

#[test]
fn a_faster_link_gets_more_bytes() {
    let mut pair = Pair::faulty(2, Config { min_part: 4096, ..Config::default() });
    for (faults, rate) in pair.faults[0].iter().zip([90_000_000, 30_000_000]) {
        faults.set_rate(Some(rate));
    }
    let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
    (0..10).for_each(|n| pair.transfer(&from, &to, 1 << 20, n));
    let learned = [0, 1].map(|rail| pair.sender.counters().rails[rail].bytes);
    (0..10).for_each(|n| pair.transfer(&from, &to, 1 << 20, n));
    let total = [0, 1].map(|rail| pair.sender.counters().rails[rail].bytes);
    let bytes = [total[0] - learned[0], total[1] - learned[1]];
    assert_eq!(bytes[0] + bytes[1], 10 << 20);
    // Three times as much, if nothing else delays either link.
    assert!(bytes[0] > bytes[1] * 3 / 2, "{bytes:?}");
}

/// A monitor, a second communicator or another library of the process: whoever else sends over a NIC makes it busy.
#[test]
fn connections_over_one_port_see_each_others_bytes_under_way() {
    const LEN: usize = 8 << 20;
    let [ours, theirs] = [(); 2].map(|()| vec![software(), software()]);
    let context = |devices: &Vec<_>, split| {
        Rails::new(devices.clone(), Config { split, min_part: 1, ..Config::default() }).unwrap()
    };
    let one_rail = Split::Fixed([1, 0, 0, 0]);
    let (here, also_here) = (context(&ours, one_rail), context(&ours, Split::Adaptive));
    let there = context(&theirs, Split::Adaptive);
    let ((mut busy, mut busy_receiver), (mut sender, mut receiver)) =
        (connect(&here, &there), connect(&also_here, &there));
    let [from, to] = [&also_here, &there].map(|rails| rails.allocate(LEN).unwrap());
    let busy_from = here.allocate(LEN).unwrap();
    // Until the program polls its completion, the message is under way.
    start(&mut busy, &mut busy_receiver, &busy_from, &to, LEN);
    let mut bytes_of_a_message = |len| {
        let before = sender.counters().rails;
        let receive = start(&mut sender, &mut receiver, &from, &to, len);
        until(|| {
            sender.progress();
            receiver.test(receive).unwrap()
        });
        [0, 1].map(|rail| sender.counters().rails[rail].bytes - before[rail].bytes)
    };
    assert_eq!(bytes_of_a_message(LEN / 2), [0, LEN as u64 / 2], "rail 0 is busy with the other connection");
    drop(busy);
    assert!(bytes_of_a_message(LEN)[0] > 0, "rail 0 is idle");
}

/// Posts a buffer, and starts to send into it.
fn start(
    sender: &mut SendConnection,
    receiver: &mut RecvConnection,
    from: &Memory,
    to: &Memory,
    len: usize,
) -> RecvRequest {
    let buffer = RecvBuffer { memory: to, range: 0..len, tag: 0 };
    let receive = receiver.irecv(&[buffer]).unwrap().unwrap();
    until(|| sender.isend(from, 0..len, 0).unwrap());
    receive
}

#[test]
fn a_hint_takes_effect_with_the_next_message() {
    let publisher = HintPublisher::create().unwrap();
    let config = Config { hint: Some(publisher.path()), min_part: 4096, ..Config::default() };
    let mut pair = Pair::plain(2, config);
    let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
    let mut before = [0, 0];
    for idle in [1, 0, 1] {
        let mut percent = [100; 4];
        percent[idle] = 0;
        publisher.set(Hint { percent }, None);
        pair.transfer(&from, &to, 1 << 20, 3);
        let now = [0, 1].map(|rail| pair.sender.counters().rails[rail].bytes);
        assert_eq!(now[idle], before[idle], "rail {idle} is excluded");
        assert_eq!(now[1 - idle] - before[1 - idle], 1 << 20);
        before = now;
    }
    // Excluding all rails excludes none.
    publisher.set(Hint { percent: [0; 4] }, None);
    pair.transfer(&from, &to, 1 << 20, 4);
}

fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_metrics_endpoint_reports_the_counters() {
    let mut pair = Pair::plain(2, Config { split: Split::Fixed([1, 1, 0, 0]), ..Config::default() });
    let (from, to) = (pair.here.allocate(1 << 20).unwrap(), pair.there.allocate(1 << 20).unwrap());
    (0..3).for_each(|n| pair.transfer(&from, &to, 1 << 20, n));
    let server = pair.here.serve_metrics("127.0.0.1:0").unwrap();
    // A client that says nothing does not keep others out for ever.
    let silent = TcpStream::connect(server.address()).unwrap();
    let text = get(server.address(), "/metrics");
    drop(silent);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    for line in [
        "crosstie_rail_bytes_total{connection=\"0\",role=\"send\",rail=\"1\"} 1572864",
        "crosstie_rail_work_requests_total{connection=\"0\",role=\"send\",rail=\"0\"} 3",
        "crosstie_rails_messages_total{connection=\"0\",role=\"send\",mask=\"0x3\"} 3",
        "crosstie_rails_violations_total{connection=\"0\",role=\"send\",kind=\"late\"} 0",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    assert!(get(server.address(), "/other").starts_with("HTTP/1.1 404 "));
    drop(server);
    assert!(pair.there.metrics().contains("role=\"recv\",rail=\"0\"} 3"));
}
