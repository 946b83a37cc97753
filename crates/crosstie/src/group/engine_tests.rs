//! Packets of a member that breaks the rules.

use super::super::{Group, GroupConfig};
use super::*;
use crate::bootstrap::{Bootstrap, Limits, local};
use crate::device::Device;
use crosstie_protocol::group::Token;

/// Two members, whose engines only the test runs.
fn pair() -> [Group; 2] {
    let jobs = local::in_process(2, Limits::default()).unwrap();
    let joined = std::thread::scope(|scope| {
        let join = |job: &mut dyn Bootstrap| {
            let device = Device::open(&"software".parse().unwrap()).unwrap();
            let config = GroupConfig::new(1).progress(super::super::ProgressMode::Manual);
            let group = Group::join(job, &device, &config).unwrap();
            job.barrier().unwrap();
            group
        };
        let threads: Vec<_> = jobs.into_iter().map(|mut job| scope.spawn(move || join(&mut job))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    joined.try_into().ok().unwrap()
}

fn progress(group: &Group) {
    for _ in 0..64 {
        group.shared.lock().progress();
    }
}

/// Packets in completions are checked as all others are: what is not from this member of this group is dropped and counted.
#[test]
fn forged_packets_in_completions_are_dropped() {
    let [liar, group] = pair();
    let id = liar.shared.lock().wires.id;
    let encode = |packet: Control, id: GroupId, sender: usize| {
        let mut bytes = [0; 48];
        let len = packet.encode(id, MemberId::new(sender), 0, &mut bytes);
        bytes[..len].to_vec()
    };
    let request = Control::LockRequest { lock: 1, trying: false };
    let forged = [
        vec![],
        vec![0xff; 48],
        encode(request, GroupId { group: id.group + 1, ..id }, 0),
        encode(request, GroupId { epoch: id.epoch ^ 1, ..id }, 0),
        // In the name of the receiver, and cut.
        encode(request, id, 1),
        encode(Control::LockReply { lock: 1, fence: Token { view: 1, count: 9 }, ticket: 1 }, id, 0)[..36]
            .to_vec(),
    ];
    for packet in &forged {
        let mut engine = liar.shared.lock();
        engine.wires.links[1].as_mut().unwrap().post_in_completion(packet).unwrap();
    }
    // A lock that does not exist.
    let unknown = encode(Control::LockBusy { lock: 999 }, id, 0);
    liar.shared.lock().wires.links[1].as_mut().unwrap().post_in_completion(&unknown).unwrap();
    progress(&group);
    let counters = group.counters();
    let dropped = counters.dropped;
    assert_eq!((dropped.total(), counters.violations), (forged.len() as u64, 1), "{dropped:?}");
    assert!(group.dead().is_empty());
}

/// A packet that says that it came with its completion, but is too long for that: nobody could know what it was.
#[test]
fn member_that_sends_no_packet_where_it_promises_one_is_lost() {
    let [liar, group] = pair();
    liar.shared.lock().wires.links[1].as_mut().unwrap().post_in_completion(&[0; 60]).unwrap();
    progress(&group);
    assert!(group.dead().contains(MemberId::new(0)));
}
