//! Fuzz target: packets of group members.

use crosstie_protocol::group::message::{
    COMBINED_PREFIX, Channel, check_combined, encode_prefix, first_combined,
};
use crosstie_protocol::group::{
    CONTROL_CHANNEL, Control, Gate, GroupId, HEADER_SIZE, Header, MAX_CONTROL_SIZE, MemberId, MemberSet,
    PacketKind, Token, flags,
};

use crate::fuzzing::fuzz;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const ID: GroupId = GroupId { group: 0x1122_3344, epoch: 7 };
const MEMBERS: usize = 4;
const CHANNEL: u16 = 5;

#[test]
fn fuzz_group_packets() {
    let (one, two) = (MemberId::new(1), MemberId::new(2));
    let examples = [
        Control::LockRequest { lock: 3, trying: true },
        Control::LockForward { lock: 3, requester: two, ticket: 8, trying: false },
        Control::LockReply { lock: 3, fence: Token { view: 2, count: 9 }, ticket: 8 },
        Control::LockBusy { lock: 3 },
        Control::BarrierArrive { barrier: 5, round: 6 },
        Control::BarrierRelease { barrier: 5, round: 6, active: None },
        Control::BarrierJoin { barrier: 5, member: two },
        Control::BarrierLeave { barrier: 5, member: two },
        Control::BarrierQuery { barrier: 5 },
        Control::ViewPropose { gone: MemberSet::EMPTY },
        Control::Leave,
        Control::Expelled,
    ]
    .map(|control| {
        let mut bytes = [0; MAX_CONTROL_SIZE];
        let len = control.encode(ID, one, 1, &mut bytes);
        bytes[..len].to_vec()
    });
    let examples = examples.into_iter().chain([combined_packet()]);
    fuzz(CRATE, "group_packets", examples, |input| {
        let mut gate = Gate::new(ID.group, ID.epoch, MemberId::new(0), MEMBERS);
        let checked =
            gate.check(input, &MemberSet::EMPTY, |channel| channel == CONTROL_CHANNEL || channel == CHANNEL);
        let dropped = gate.dropped();
        let Ok(header) = checked else {
            assert_eq!(dropped.total(), 1, "what is dropped is counted");
            return;
        };
        if header.flags & flags::COMBINED != 0 {
            check_messages(&input[HEADER_SIZE..]);
        }
        if let Ok(control) = Control::decode(&header, &input[HEADER_SIZE..], MEMBERS) {
            let mut bytes = [0; MAX_CONTROL_SIZE];
            let len = control.encode(ID, header.sender, Control::view_of(&header), &mut bytes);
            let again = gate.check(&bytes[..len], &MemberSet::EMPTY, |_| true).unwrap();
            assert_eq!(Control::decode(&again, &bytes[HEADER_SIZE..len], MEMBERS), Ok(control));
        }
    });
}

/// A packet of three messages.
fn combined_packet() -> Vec<u8> {
    let messages = [(0, &b"first"[..]), (flags::TAGGED, &[7; 12]), (0, &[])];
    let mut body = Vec::new();
    for (message_flags, bytes) in messages {
        body.extend(encode_prefix(bytes.len(), message_flags));
        body.extend(bytes);
    }
    let header = Header {
        group: ID.group,
        epoch: ID.epoch,
        sender: MemberId::new(1),
        channel: CHANNEL,
        kind: PacketKind::Data,
        flags: Channel::WHOLE | flags::COMBINED,
        attempt: 0,
        seq: 0,
        ack: 0,
        aux: body.len() as u32,
    };
    header.encode().into_iter().chain(body).collect()
}

/// What `ChannelState` does with the body of a combined packet: all of it is messages, or none.
fn check_messages(body: &[u8]) {
    let Ok(count) = check_combined(body, 64) else { return };
    let (mut rest, mut found) = (body, 0);
    while !rest.is_empty() {
        let (message_flags, bytes) = first_combined(rest).expect("the body was checked");
        assert!(bytes.len() <= 64);
        assert_eq!(rest[..COMBINED_PREFIX], encode_prefix(bytes.len(), message_flags));
        rest = &rest[COMBINED_PREFIX + bytes.len()..];
        found += 1;
    }
    assert!(found == count && found > 0);
}
