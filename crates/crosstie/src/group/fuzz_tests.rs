//! Fuzz target: packets of group members.

use crosstie_protocol::group::{
    CONTROL_CHANNEL, Control, Gate, GroupId, HEADER_SIZE, MAX_CONTROL_SIZE, MemberId, MemberSet,
};

use crate::fuzzing::fuzz;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const ID: GroupId = GroupId { group: 0x1122_3344, epoch: 7 };
const MEMBERS: usize = 4;

#[test]
fn fuzz_group_packets() {
    let (one, two) = (MemberId::new(1), MemberId::new(2));
    let examples = [
        Control::LockRequest { lock: 3, trying: true },
        Control::LockForward { lock: 3, requester: two, ticket: 8, trying: false },
        Control::LockReply { lock: 3, fence: 9, ticket: 8 },
        Control::LockBusy { lock: 3 },
        Control::BarrierArrive { barrier: 5, round: 6 },
        Control::BarrierRelease { barrier: 5, round: 6, active: None },
        Control::BarrierJoin { barrier: 5, member: two },
        Control::BarrierLeave { barrier: 5, member: two },
        Control::BarrierQuery { barrier: 5, dead: MemberSet::EMPTY },
        Control::Expelled,
    ]
    .map(|control| {
        let mut bytes = [0; MAX_CONTROL_SIZE];
        let len = control.encode(ID, one, &mut bytes);
        bytes[..len].to_vec()
    });
    fuzz(CRATE, "group_packets", examples, |input| {
        let mut gate = Gate::new(ID.group, ID.epoch, MemberId::new(0), MEMBERS);
        let checked = gate.check(input, &MemberSet::EMPTY, |channel| channel == CONTROL_CHANNEL);
        let dropped = gate.dropped();
        let Ok(header) = checked else {
            let count = dropped.foreign_group
                + dropped.foreign_epoch
                + dropped.foreign_channel
                + dropped.not_a_peer
                + dropped.dead_sender
                + dropped.invalid;
            assert_eq!(count, 1, "what is dropped is counted");
            return;
        };
        if let Ok(control) = Control::decode(&header, &input[HEADER_SIZE..], MEMBERS) {
            let mut bytes = [0; MAX_CONTROL_SIZE];
            let len = control.encode(ID, header.sender, &mut bytes);
            let again = gate.check(&bytes[..len], &MemberSet::EMPTY, |_| true).unwrap();
            assert_eq!(Control::decode(&again, &bytes[HEADER_SIZE..len], MEMBERS), Ok(control));
        }
    });
}
