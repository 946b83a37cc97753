//! Bytes of packets: what is encoded is decoded, and no bytes of a peer do harm.

use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::message::{Channel, Options};
use super::super::*;
use super::net::Collected;

const MEMBERS: usize = 4;
const ID: GroupId = GroupId { group: 7, epoch: 3 };

fn set() -> impl Strategy<Value = MemberSet> {
    prop::collection::vec(0..MEMBERS, 0..MEMBERS)
        .prop_map(|members| members.into_iter().map(MemberId::new).collect())
}

fn token() -> impl Strategy<Value = Token> {
    (prop_oneof![0u64..3, 1024u64..1028], 0u64..9).prop_map(|(view, count)| Token { view, count })
}

fn member() -> impl Strategy<Value = MemberId> {
    (0..MEMBERS).prop_map(MemberId::new)
}

fn rounds() -> impl Strategy<Value = Rounds> {
    (0u64..9, prop_oneof![0u64..9, Just(u64::MAX)], set(), set())
        .prop_map(|(ended, failed_from, blame, active)| Rounds { ended, failed_from, blame, active })
}

/// Packets with numbers that are likely to fit a state, and some that fit none.
fn control() -> impl Strategy<Value = Control> {
    let lock = 0u32..3;
    let barrier = 0u32..2;
    let report = (any::<(bool, bool)>(), token(), prop::option::of(member()), prop::option::of(0u32..9))
        .prop_map(|((has_token, in_queue), fence, gave_to, ticket)| QueueReport {
            has_token,
            in_queue,
            fence,
            gave_to,
            ticket,
        });
    let place = prop::option::of((0u32..9, prop::option::of(member())))
        .prop_map(|place| place.map(|(ticket, next)| QueuePlace { ticket, next }));
    let object = prop_oneof![lock.clone().prop_map(Object::Lock), barrier.clone().prop_map(Object::Barrier)];
    prop_oneof![
        (lock.clone(), any::<bool>()).prop_map(|(lock, trying)| Control::LockRequest { lock, trying }),
        (lock.clone(), member(), 0u32..9, any::<bool>()).prop_map(|(lock, requester, ticket, trying)| {
            Control::LockForward { lock, requester, ticket, trying }
        }),
        (lock.clone(), token(), 0u32..9).prop_map(|(lock, fence, ticket)| Control::LockReply {
            lock,
            fence,
            ticket
        }),
        lock.clone().prop_map(|lock| Control::LockBusy { lock }),
        lock.clone().prop_map(|lock| Control::LockQuery { lock }),
        (lock.clone(), report).prop_map(|(lock, report)| Control::LockReport { lock, report }),
        (lock, place, prop::option::of(token())).prop_map(|(lock, place, fence)| Control::LockHeal {
            lock,
            place,
            fence: fence.filter(|fence| *fence != Token::default())
        }),
        (barrier.clone(), 0u64..9).prop_map(|(barrier, round)| Control::BarrierArrive { barrier, round }),
        (barrier.clone(), 0u64..9, prop::option::of(set()))
            .prop_map(|(barrier, round, active)| Control::BarrierRelease { barrier, round, active }),
        (barrier.clone(), member()).prop_map(|(barrier, member)| Control::BarrierJoin { barrier, member }),
        (barrier.clone(), member()).prop_map(|(barrier, member)| Control::BarrierLeave { barrier, member }),
        (barrier.clone(), 0u64..9, set()).prop_map(|(barrier, round, active)| Control::BarrierWelcome {
            barrier,
            round,
            active
        }),
        barrier.clone().prop_map(|barrier| Control::BarrierQuery { barrier }),
        (barrier.clone(), rounds()).prop_map(|(barrier, rounds)| Control::BarrierReport { barrier, rounds }),
        (barrier, rounds()).prop_map(|(barrier, rounds)| Control::BarrierHeal { barrier, rounds }),
        object.prop_map(|object| Control::StatusRequest { object }),
        set().prop_map(|gone| Control::ViewReport { gone }),
        set().prop_map(|gone| Control::ViewPropose { gone }),
        set().prop_map(|gone| Control::ViewInstall { gone }),
        Just(Control::Leave),
        Just(Control::Expelled),
    ]
}

proptest! {
    #[test]
    fn control_packets_survive_encoding(control in control(), view: u16, cut in 0usize..500) {
        let mut bytes = [0; MAX_CONTROL_SIZE];
        let len = control.encode(ID, MemberId::new(1), view, &mut bytes);
        if control.is_short() {
            let mut short = [0; SHORT_CONTROL_SIZE];
            prop_assert_eq!(control.encode(ID, MemberId::new(1), view, &mut short), len);
            prop_assert_eq!(&short[..len], &bytes[..len]);
        }
        let mut gate = Gate::new(ID.group, ID.epoch, MemberId::new(0), MEMBERS);
        let header = gate.check(&bytes[..len], &MemberSet::EMPTY, |channel| channel == CONTROL_CHANNEL).unwrap();
        prop_assert_eq!(Control::decode(&header, &bytes[HEADER_SIZE..len], MEMBERS), Ok(control));
        prop_assert_eq!(Control::view_of(&header), view);
        // A packet that was cut is an error, or has no body at all.
        let cut = HEADER_SIZE + cut % (len - HEADER_SIZE + 1);
        if cut < len {
            prop_assert!(Control::decode(&header, &bytes[HEADER_SIZE..cut], MEMBERS).is_err());
        }
    }

    #[test]
    fn arbitrary_bytes_are_dropped_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..500), own in any::<bool>()) {
        let mut bytes = bytes;
        let mut gate = Gate::new(ID.group, ID.epoch, MemberId::new(0), MEMBERS);
        if own && bytes.len() >= HEADER_SIZE {
            bytes[0..8].copy_from_slice(&ID.group.to_le_bytes());
            bytes[8..12].copy_from_slice(&ID.epoch.to_le_bytes());
            bytes[12..14].copy_from_slice(&1u16.to_le_bytes());
            bytes[16] = PacketKind::ALL[bytes[16] as usize % PacketKind::ALL.len()] as u8;
            bytes[19] = 0;
        }
        let mut channel = Channel::new(ID, 5, MemberId::new(0), MEMBERS, &Options::default()).unwrap();
        match gate.check(&bytes, &MemberSet::EMPTY, |_| true) {
            Err(_) => {
                prop_assert_eq!(gate.dropped().total(), 1);
            }
            Ok(header) if header.kind.is_message() => {
                let len = (bytes.len() - HEADER_SIZE) as u32;
                channel.on_packet(&header, len, 0).ok();
            }
            Ok(header) => {
                Control::decode(&header, &bytes[HEADER_SIZE..], MEMBERS).ok();
            }
        }
    }

    /// Whatever peers say, a group neither panics nor gives a lock that nobody asked for.
    #[test]
    fn arbitrary_packets_of_peers_do_no_harm(steps in prop::collection::vec((0u8..6, member(), 0u16..4, control()), 0..60)) {
        let config = Config { locks: 2, ..Config::new(MemberId::new(0), MEMBERS) };
        let mut group = Group::new(&config).unwrap();
        let (mut waits, mut out) = ([false; 2], Collected::default());
        for (action, from, view, packet) in steps {
            match action {
                0 => { waits[0] |= group.lock(0, None, &mut out).is_ok(); }
                1 => { waits[1] |= group.try_lock(1, &mut out).is_ok(); }
                2 => { group.unlock(0, &mut out).ok(); }
                3 => { group.enter(0, None, &mut out).ok(); }
                _ if from != MemberId::new(0) => { group.on_packet(from, view, &packet, &mut out).ok(); }
                _ => {}
            }
            for event in core::mem::take(&mut out.events) {
                if let Event::LockAcquired { lock, .. } = event {
                    prop_assert!(waits[lock as usize]);
                }
            }
            prop_assert!(core::mem::take(&mut out.packets).len() < 64);
        }
    }
}

#[test]
fn packets_of_other_groups_epochs_channels_and_dead_members_are_dropped_and_counted() {
    let mut gate = Gate::new(ID.group, ID.epoch, MemberId::new(0), MEMBERS);
    let own = Header {
        group: ID.group,
        epoch: ID.epoch,
        sender: MemberId::new(1),
        channel: 5,
        kind: PacketKind::Data,
        flags: 0,
        attempt: 0,
        seq: 0,
        ack: 0,
        aux: 0,
    };
    let dead: MemberSet = [MemberId::new(3)].into_iter().collect();
    let packets = [
        own,
        Header { group: 8, ..own },
        Header { epoch: 4, ..own },
        Header { channel: 6, ..own },
        Header { sender: MemberId::new(0), ..own },
        Header { sender: MemberId::new(9), ..own },
        Header { sender: MemberId::new(3), ..own },
        // A message on the channel of locks, and a lock packet on a channel of messages.
        Header { channel: CONTROL_CHANNEL, ..own },
        Header { kind: PacketKind::LockRequest, ..own },
    ];
    let accepted: Vec<bool> = packets
        .iter()
        .map(|header| gate.check(&header.encode(), &dead, |channel| channel == 5).is_ok())
        .collect();
    assert_eq!(accepted, [true, false, false, false, false, false, false, false, false]);
    assert!(gate.check(&own.encode()[..31], &dead, |_| true).is_err());
    let expected = DropCounters {
        foreign_group: 1,
        foreign_epoch: 1,
        foreign_channel: 3,
        not_a_peer: 2,
        dead_sender: 1,
        invalid: 1,
    };
    assert_eq!(*gate.dropped(), expected);
}
