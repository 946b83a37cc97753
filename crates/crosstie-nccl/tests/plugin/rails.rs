//! Several rails, chosen by environment variables. The plugin reads them once, so each case has its own process.

use std::io::Read;

use crosstie_testkit::actor::Actor;

use crate::cases;
use crate::net::{INVALID_ARGUMENT, INVALID_USAGE, Net, log, wait_for};
use crate::pair::{Buffer, Pair, check, fill, receive, try_send, try_test};

cases!(
    two_rails_share_the_bytes,
    a_rail_without_weight_sends_nothing,
    a_rail_that_fails_loses_no_message,
    virtual_devices_have_the_rails_of_their_members,
    invalid_environment_fails_init_and_is_logged,
    log_level_is_respected,
);

/// Runs the part of a child process.
pub(crate) fn run_child(role: &str, arguments: &[String]) {
    match role {
        "messages" => {
            let net = Net::open(11);
            messages(&Pair::new(&net), arguments[0].parse().unwrap(), arguments[1].parse().unwrap());
        }
        "virtual" => {
            let net = Net::open(11);
            assert_eq!(net.devices(), 2);
            let (rc, device) = net.make_virtual_device(&[0, 1]);
            assert_eq!((rc, device, net.devices()), (0, 2, 3));
            assert_eq!(net.make_virtual_device(&[0, 1]), (0, 2), "the same device");
            for members in [&[][..], &[0, 0], &[0, 7], &[-1], &[2, 0, 1]] {
                assert_eq!(net.make_virtual_device(members).0, INVALID_ARGUMENT, "{members:?}");
            }
            messages(&Pair::on_device(&net, 2), 20, 400_000);
        }
        "init" => {
            let mut net = Net::load(11);
            println!("rc {}", net.init(-1));
        }
        _ => panic!("unknown role {role}"),
    }
    log().iter().for_each(|line| println!("{line}"));
}

/// Sends messages of many sizes and checks them.
fn messages(pair: &Pair<'_>, count: usize, longest: usize) {
    let net = pair.net;
    let (mut from, mut to) = (Buffer::new(net, pair.send, longest), Buffer::new(net, pair.recv, longest));
    for number in 0..count {
        let len = longest - number * (longest / count / 2);
        fill(&mut from.bytes[..len], number);
        to.bytes.fill(0);
        let received = receive(net, pair.recv, &mut to, &[(0, longest, 0)]);
        // Both ends take part in the repair of a rail.
        let (mut sent, mut sent_sizes, mut received_sizes) = (None, None, None);
        wait_for("a message", || {
            match sent {
                None => sent = try_send(net, pair.send, &mut from, 0, len, 0),
                Some(request) if sent_sizes.is_none() => sent_sizes = try_test(net, request, 1),
                Some(_) => {}
            }
            if received_sizes.is_none() {
                received_sizes = try_test(net, received, 1);
            }
            (sent_sizes.is_some() && received_sizes.is_some()).then_some(())
        });
        assert_eq!((sent_sizes, received_sizes), (Some(vec![len]), Some(vec![len])));
        check(&to.bytes[..len], number);
    }
}

/// Runs a child and returns its lines.
fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
    let mut peer = Actor::start_with(&[&["--child"], arguments].concat(), variables).unwrap();
    let mut text = String::new();
    peer.output.read_to_string(&mut text).unwrap();
    let status = peer.child.wait().unwrap();
    assert!(status.success(), "{status}\n{text}");
    text.lines().map(str::to_owned).collect()
}

/// The first number before `unit` in the first line that contains `text`.
fn number(lines: &[String], text: &str, unit: &str) -> u64 {
    let line =
        lines.iter().find(|line| line.contains(text)).unwrap_or_else(|| panic!("no {text} in {lines:?}"));
    let before = line.split_once(unit).unwrap_or_else(|| panic!("no {unit} in {line}")).0;
    before.rsplit(' ').find(|word| !word.is_empty()).unwrap().parse().unwrap()
}

fn two_rails_share_the_bytes() {
    let variables = [("CROSSTIE_NCCL_DEVICES", "software+software"), ("CROSSTIE_NCCL_SPLIT", "3:1")];
    let lines = run(&["messages", "20", "400000"], &variables);
    let (first, second) =
        (number(&lines, "rail 0 software", " bytes"), number(&lines, "rail 1 software", " bytes"));
    // Parts are multiples of 128 bytes: each message may differ by that much from three to one.
    assert!(second > 0 && first.abs_diff(3 * second) <= 20 * 4 * 128, "{lines:?}");
    for rail in 0..2 {
        let rail = format!("rail {rail} software");
        assert_eq!(number(&lines, &rail, " work requests"), 20, "one for each message: {lines:?}");
    }
}

fn a_rail_without_weight_sends_nothing() {
    let variables = [("CROSSTIE_NCCL_DEVICES", "software+software"), ("CROSSTIE_NCCL_SPLIT", "1:0")];
    let lines = run(&["messages", "20", "400000"], &variables);
    for unit in [" bytes", " work requests", " completions"] {
        assert_eq!(number(&lines, "rail 1 software", unit), 0, "{lines:?}");
    }
    assert!(lines.iter().any(|line| line.contains("rail masks {0x1: 20}")), "{lines:?}");
}

fn a_rail_that_fails_loses_no_message() {
    let mut failures = 0;
    for seed in ["2", "3", "5"] {
        let devices = format!("fault:{seed}:software+software");
        // A fixed split: on a busy machine the rail may look slow, and then it would get too little to fail.
        let variables = [("CROSSTIE_NCCL_DEVICES", devices.as_str()), ("CROSSTIE_NCCL_SPLIT", "1:1")];
        let lines = run(&["messages", "300", "300000"], &variables);
        failures += number(&lines, &format!("rail 0 fault:{seed}:software"), " failures");
    }
    assert!(failures > 0, "no seed made a rail fail");
    println!("  {failures} failures of a rail");
}

fn virtual_devices_have_the_rails_of_their_members() {
    let variables = [("CROSSTIE_NCCL_DEVICES", "software,software"), ("CROSSTIE_NCCL_SPLIT", "1:1")];
    let lines = run(&["virtual"], &variables);
    assert!(lines.iter().any(|line| line.contains("device 2 is software+software: 2 rails")), "{lines:?}");
    assert!(number(&lines, "rail 1 software", " bytes") > 0, "{lines:?}");
}

fn invalid_environment_fails_init_and_is_logged() {
    for (name, value) in [
        ("CROSSTIE_NCCL_DEVICES", "ethernet"),
        ("CROSSTIE_NCCL_SPLIT", "0:0"),
        ("CROSSTIE_NCCL_LOG", "loud"),
        ("CROSSTIE_NCCL_ADDRESS", "here"),
    ] {
        let lines = run(&["init"], &[(name, value)]);
        assert_eq!(lines[0], format!("rc {INVALID_USAGE}"));
        assert!(lines[1].contains(&format!("{name}={value}: give ")), "{lines:?}");
    }
    // A device that cannot be opened.
    let lines = run(&["init"], &[("CROSSTIE_NCCL_DEVICES", "verbs:none0")]);
    assert_ne!(lines[0], "rc 0");
    assert!(lines[1].contains("none0") || lines[1].contains("verbs"), "{lines:?}");
}

fn log_level_is_respected() {
    let lines = run(&["messages", "2", "1000"], &[("CROSSTIE_NCCL_LOG", "warn")]);
    assert_eq!(lines, Vec::<String>::new());
    let lines = run(&["messages", "2", "1000"], &[("CROSSTIE_NCCL_LOG", "trace")]);
    assert!(lines.iter().any(|line| line.contains("registered 1000 bytes")), "{lines:?}");
}
