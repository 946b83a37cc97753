//! Sender and receiver against a model of the rails: arbitrary order of arrivals, rails that fail and return.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    /// The receiver posts a request.
    Post,
    /// The sender sends the next message if the receiver is ready, with these weights.
    Send { len: u32, weights: [u32; MAX_RAILS], group: usize },
    /// The sender sends the next message if the receiver is ready, and the device executes it at once on the first usable rail.
    SendAtOnce { len: u32 },
    /// The oldest part of a queue pair arrives at the receiver.
    Deliver { rail: usize, qp: usize },
    /// The sender polls the oldest acknowledgement of a queue pair.
    Acknowledge { rail: usize, qp: usize },
    /// The rail breaks: everything under way on it is lost.
    Break { rail: usize },
    /// The receiver handles the oldest fence.
    Fence,
    /// The sender handles the oldest answer.
    Answer,
    /// The sender sends lost parts again.
    Replay { weights: [u32; MAX_RAILS] },
    /// A rail that was fenced works again.
    Return { rail: usize },
    /// An immediate that arrived before arrives again.
    Repeat { nth: usize },
}

const RAILS: usize = 3;
const QPS: usize = 2;
const SLOTS: usize = 4;

#[derive(Clone, Copy, Debug)]
struct InFlight {
    message: u64,
    rail: usize,
    imm: Immediate,
    bytes: u32,
}

/// The rails between the two ends, and what must come out.
struct World {
    sender: Sender,
    receiver: Receiver,
    /// Per rail and queue pair: parts on their way, then acknowledgements on their way.
    wire: [[VecDeque<InFlight>; QPS]; RAILS],
    acks: [[VecDeque<InFlight>; QPS]; RAILS],
    usable: [bool; RAILS],
    next_qp: usize,
    fences: VecDeque<(usize, Vec<FenceEntry>)>,
    answers: VecDeque<(usize, Vec<FenceEntry>)>,
    fencing: [bool; RAILS],
    sizes: BTreeMap<u64, u64>,
    groups: BTreeMap<u64, usize>,
    delivered: BTreeMap<u64, u64>,
    sent: BTreeMap<u64, u32>,
    seen: Vec<(usize, Immediate)>,
}

impl World {
    fn new() -> World {
        World {
            sender: Sender::new(SLOTS),
            receiver: Receiver::new(SLOTS, RAILS),
            wire: Default::default(),
            acks: Default::default(),
            usable: [true; RAILS],
            next_qp: 0,
            fences: VecDeque::new(),
            answers: VecDeque::new(),
            fencing: [false; RAILS],
            sizes: BTreeMap::new(),
            groups: BTreeMap::new(),
            delivered: BTreeMap::new(),
            sent: BTreeMap::new(),
            seen: Vec::new(),
        }
    }

    fn weights(&self, weights: [u32; MAX_RAILS]) -> Option<[u32; MAX_RAILS]> {
        let mut weights = weights;
        for (rail, weight) in weights.iter_mut().enumerate() {
            if rail >= RAILS || !self.usable[rail] {
                *weight = 0;
            }
        }
        if weights == [0; MAX_RAILS] {
            let rail = self.usable.iter().position(|usable| *usable)?;
            weights[rail] = 1;
        }
        Some(weights)
    }

    fn post_parts(&mut self, message: u64, attempt: u8, mask: Mask) {
        let imm = self.sender.immediate(message, mask, attempt, false);
        self.next_qp = (self.next_qp + 1) % QPS;
        for rail in rails_of(mask) {
            assert!(self.usable[rail]);
            let bytes = self.sender.part(message, attempt, rail).unwrap().bytes() as u32;
            self.wire[rail][self.next_qp].push_back(InFlight { message, rail, imm, bytes });
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Post => {
                let room = 10_000;
                let full = self.receiver.outstanding() == SLOTS
                    || self.receiver.is_open(self.receiver.next_message().wrapping_sub(SLOTS as u64));
                assert_eq!(self.receiver.post(room).is_none(), full);
            }
            Step::Send { len, weights, group } => {
                let next = self.sender.next_message();
                let Some(weights) = self.weights(weights) else { return };
                if next >= self.receiver.next_message() || self.sender.is_full() {
                    return;
                }
                let lens: Vec<_> = (0..group).map(|_| fixed_split(len, &weights)).collect();
                let empty = self.usable.iter().position(|usable| *usable).unwrap();
                let (message, mask) = self.sender.begin(&lens, empty).unwrap();
                assert_eq!(message, next);
                self.sizes.insert(message, u64::from(len) * group as u64);
                self.groups.insert(message, group);
                self.post_parts(message, 0, mask);
            }
            Step::SendAtOnce { len } => {
                let next = self.sender.next_message();
                let Some(rail) = self.usable.iter().position(|usable| *usable) else { return };
                if next >= self.receiver.next_message() {
                    return;
                }
                let mut lens = [0; MAX_RAILS];
                lens[rail] = len;
                if self.sender.is_full() {
                    assert_eq!(self.sender.begin(&[lens], rail), Err(SendError::SlotInUse(next)));
                    return;
                }
                let before = self.sender.outstanding();
                let (message, mask) = self.sender.begin(&[lens], rail).unwrap();
                let imm = self.sender.immediate(next, mask, 0, false);
                self.sizes.insert(next, len.into());
                self.arrive(InFlight { message, rail, imm, bytes: len });
                assert!(self.sender.part_done(message, 0, rail));
                assert_eq!((self.sender.next_message(), self.sender.outstanding()), (next + 1, before));
                *self.sent.entry(next).or_default() += 1;
            }
            Step::Deliver { rail, qp } => {
                if let Some(part) = self.wire[rail][qp].pop_front() {
                    self.arrive(part);
                    self.acks[rail][qp].push_back(part);
                }
            }
            Step::Acknowledge { rail, qp } => {
                if let Some(part) = self.acks[rail][qp].pop_front()
                    && self.sender.part_done(part.message, part.imm.attempt, part.rail)
                {
                    *self.sent.entry(part.message).or_default() += 1;
                }
            }
            Step::Break { rail } => {
                if !self.usable[rail] {
                    return;
                }
                self.usable[rail] = false;
                self.fencing[rail] = true;
                let mut entries = Vec::new();
                self.sender.fail_rail(rail, |entry| entries.push(entry));
                self.fences.push_back((rail, entries));
                // What is on the wire may still arrive until the receiver has closed its end; acknowledgements are lost.
                self.acks[rail] = Default::default();
            }
            Step::Fence => {
                if let Some((rail, entries)) = self.fences.pop_front() {
                    self.wire[rail] = Default::default();
                    self.acks[rail] = Default::default();
                    let answers = entries.iter().map(|entry| self.receiver.fence(rail, *entry).unwrap());
                    let answers = answers.collect();
                    self.answers.push_back((rail, answers));
                }
            }
            Step::Answer => {
                if let Some((rail, entries)) = self.answers.pop_front() {
                    let mut done = Vec::new();
                    entries.iter().for_each(|entry| self.sender.fence_answer(rail, *entry, |m| done.push(m)));
                    done.iter().for_each(|message| *self.sent.entry(*message).or_default() += 1);
                    self.fencing[rail] = false;
                }
            }
            Step::Replay { weights } => {
                let Some(weights) = self.weights(weights) else { return };
                if let Some((message, count, chunks)) = self.sender.next_lost() {
                    let lens: Vec<_> = chunks[..usize::from(count)]
                        .iter()
                        .map(|chunk| fixed_split(chunk.len, &weights))
                        .collect();
                    let empty = self.usable.iter().position(|usable| *usable).unwrap();
                    match self.sender.replay(message, &lens, empty) {
                        Ok((attempt, mask)) => self.post_parts(message, attempt, mask),
                        Err(error) => assert_eq!(error, SendError::TooManyAttempts(message)),
                    }
                }
            }
            Step::Return { rail } => {
                if !self.fencing[rail] {
                    self.usable[rail] = true;
                }
            }
            Step::Repeat { nth } => {
                if self.seen.is_empty() {
                    return;
                }
                let (rail, imm) = self.seen[nth % self.seen.len()];
                let before = self.receiver.outstanding();
                assert!(self.receiver.arrive(rail, imm, 1).is_err(), "{imm:?} was accepted twice");
                assert_eq!(self.receiver.outstanding(), before);
            }
        }
    }

    fn arrive(&mut self, part: InFlight) {
        self.seen.push((part.rail, part.imm));
        match self.receiver.arrive(part.rail, part.imm, part.bytes).unwrap() {
            Arrival::Partial => {}
            Arrival::Complete { message, bytes, staged } => {
                assert!(!staged);
                assert_eq!(message, part.message, "the wrong request completed");
                assert_eq!(Some(&bytes), self.sizes.get(&message), "the wrong size");
                assert!(self.delivered.insert(message, bytes).is_none(), "delivered twice");
            }
        }
    }

    /// Lets everything arrive: all messages that were sent are delivered, and the sender knows it.
    fn finish(&mut self) {
        for _ in 0..10_000 {
            self.step(&Step::Fence);
            self.step(&Step::Answer);
            for rail in 0..RAILS {
                self.step(&Step::Return { rail });
                for qp in 0..QPS {
                    self.step(&Step::Deliver { rail, qp });
                    self.step(&Step::Acknowledge { rail, qp });
                }
            }
            self.step(&Step::Replay { weights: [1; MAX_RAILS] });
            if self.sender.outstanding() == 0 {
                break;
            }
        }
        assert_eq!(self.sender.outstanding(), 0, "messages are not done");
        assert_eq!(self.delivered.keys().collect::<Vec<_>>(), self.sizes.keys().collect::<Vec<_>>());
        assert!(self.sent.values().all(|times| *times == 1));
        assert_eq!(self.sent.len(), self.sizes.len());
    }
}

fn weights() -> impl Strategy<Value = [u32; MAX_RAILS]> {
    prop::array::uniform4(prop_oneof![Just(0u32), 1..5u32])
}

fn step() -> impl Strategy<Value = Step> {
    let rail = 0..RAILS;
    prop_oneof![
        4 => Just(Step::Post),
        4 => (prop_oneof![Just(0u32), 1..1200u32], weights(), prop_oneof![Just(1usize), 1..=MAX_GROUP])
            .prop_map(|(len, weights, group)| Step::Send { len, weights, group }),
        2 => (0..1200u32).prop_map(|len| Step::SendAtOnce { len }),
        8 => (rail.clone(), 0..QPS).prop_map(|(rail, qp)| Step::Deliver { rail, qp }),
        4 => (rail.clone(), 0..QPS).prop_map(|(rail, qp)| Step::Acknowledge { rail, qp }),
        1 => rail.clone().prop_map(|rail| Step::Break { rail }),
        2 => Just(Step::Fence),
        2 => Just(Step::Answer),
        3 => weights().prop_map(|weights| Step::Replay { weights }),
        2 => rail.prop_map(|rail| Step::Return { rail }),
        1 => any::<usize>().prop_map(|nth| Step::Repeat { nth }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8 * ProptestConfig::default().cases))]

    #[test]
    fn each_message_is_delivered_once_with_its_size_to_its_request(steps in prop::collection::vec(step(), 1..200)) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.step(step));
        world.finish();
    }

    #[test]
    fn arbitrary_immediates_never_complete_more_than_was_posted(
        arrivals in prop::collection::vec((0..RAILS, any::<u32>(), 0..2000u32), 1..300),
    ) {
        let mut receiver = Receiver::new(SLOTS, RAILS);
        let mut completed = 0;
        for (rail, bits, bytes) in arrivals {
            receiver.post(10_000);
            // Half of them name existing slots and the first generations.
            let imm = Immediate::from_bits(if bits & 1 == 0 { bits & 0x000f_ff03 } else { bits });
            let outstanding = receiver.outstanding();
            match receiver.arrive(rail, imm, bytes) {
                Ok(Arrival::Complete { bytes, .. }) => {
                    completed += 1;
                    prop_assert!(bytes <= 10_000);
                    prop_assert_eq!(receiver.outstanding(), outstanding - 1);
                }
                _ => prop_assert_eq!(receiver.outstanding(), outstanding),
            }
        }
        prop_assert!(completed <= receiver.next_message());
    }

    #[test]
    fn arbitrary_fences_are_answered_or_refused(
        entries in prop::collection::vec((0..MAX_RAILS, any::<[u8; FenceEntry::LEN]>()), 1..100),
    ) {
        let mut receiver = Receiver::new(SLOTS, RAILS);
        for (rail, bytes) in entries {
            receiver.post(10_000);
            let entry = FenceEntry::decode(&bytes);
            if let Ok(answer) = receiver.fence(rail, entry) {
                prop_assert_eq!(answer.attempts & !entry.attempts, 0);
            }
        }
    }
}

/// A rail stays away while millions of messages pass, and its last immediate would arrive at any time: the generation keeps it
/// from completing another request. It could do so only after 32768 uses of its slot, and then only if it survived the fence.
#[test]
fn a_late_immediate_completes_nothing_for_a_whole_cycle_of_generations() {
    let mut receiver = Receiver::new(SLOTS, 2);
    let mut sender = Sender::new(SLOTS);
    let late = Immediate { slot: 1, mask: 0b11, attempt: 0, staged: false, generation: 0 };
    let mut rejected = 0;
    for n in 0..Immediate::GENERATIONS * SLOTS as u64 {
        assert_eq!(receiver.post(100), Some(n));
        let (message, mask) = sender.begin(&[[100, 0, 0, 0]], 0).unwrap();
        if n >= SLOTS as u64 && n % 7 == 1 {
            let error = receiver.arrive(1, late, 50).unwrap_err();
            assert!(matches!(error, Violation::Late { .. } | Violation::UnknownSlot { .. }), "{error:?}");
            rejected += 1;
        }
        let imm = sender.immediate(message, mask, 0, false);
        assert_eq!(
            receiver.arrive(0, imm, 100).unwrap(),
            Arrival::Complete { message: n, bytes: 100, staged: false }
        );
        assert!(sender.part_done(message, 0, 0));
    }
    assert!(rejected > 10_000);
}

#[test]
fn violations_are_told_apart() {
    let mut receiver = Receiver::new(SLOTS, 2);
    let imm = Immediate { slot: 0, mask: 0b11, attempt: 0, staged: false, generation: 0 };
    assert_eq!(receiver.arrive(0, imm, 1), Err(Violation::UnknownSlot { rail: 0, slot: 0 }));
    assert_eq!(receiver.post(100), Some(0));
    let slot = 0;
    let wrong = |change: fn(&mut Immediate)| {
        let mut imm = imm;
        change(&mut imm);
        imm
    };
    assert_eq!(
        receiver.arrive(0, wrong(|imm| imm.slot = 200), 1),
        Err(Violation::UnknownSlot { rail: 0, slot: 200 })
    );
    assert_eq!(
        receiver.arrive(0, wrong(|imm| imm.generation = 5), 1),
        Err(Violation::Late { rail: 0, slot, got: 5, expected: 0 })
    );
    for mask in [0, 0b10, 0b101, 0b1111] {
        let imm = Immediate { mask, ..imm };
        assert_eq!(receiver.arrive(0, imm, 1), Err(Violation::BadMask { rail: 0, slot, mask }));
    }
    assert_eq!(
        receiver.arrive(0, wrong(|imm| imm.attempt = 1), 1),
        Err(Violation::BadAttempt { rail: 0, slot, attempt: 1, lost: 0 })
    );
    assert_eq!(receiver.arrive(0, imm, 60), Ok(Arrival::Partial));
    assert_eq!(receiver.arrive(0, imm, 1), Err(Violation::Duplicate { rail: 0, slot, attempt: 0 }));
    let alone = wrong(|imm| imm.mask = 0b10);
    assert_eq!(receiver.arrive(1, alone, 1), Err(Violation::BadMask { rail: 1, slot, mask: 0b10 }));
    assert_eq!(receiver.arrive(1, imm, 41), Err(Violation::TooLong { slot, got: 101, room: 100 }));
    // A slot in use is not given out again.
    assert_eq!([1, 2, 3].map(|_| receiver.post(1)), [Some(1), Some(2), Some(3)]);
    assert_eq!(receiver.post(1), None);
}

/// The receiver closes a failed rail before it says that a part is lost, so a part that arrives after that comes from a peer that
/// breaks the rules.
#[test]
fn a_part_that_arrives_after_it_was_declared_lost_is_a_violation() {
    let mut receiver = Receiver::new(SLOTS, 2);
    receiver.post(100).unwrap();
    let entry = FenceEntry { slot: 0, generation: 0, attempts: 1, masks: 0b11 };
    assert_eq!(receiver.fence(1, entry), Ok(FenceEntry { attempts: 0, ..entry }));
    let imm = Immediate { slot: 0, mask: 0b11, attempt: 0, staged: false, generation: 0 };
    assert_eq!(receiver.arrive(1, imm, 50), Err(Violation::Duplicate { rail: 1, slot: 0, attempt: 0 }));
    assert_eq!(receiver.arrive(0, imm, 50), Ok(Arrival::Partial));
    let again = Immediate { mask: 0b01, attempt: 1, ..imm };
    assert_eq!(
        receiver.arrive(0, again, 50),
        Ok(Arrival::Complete { message: 0, bytes: 100, staged: false })
    );
}

#[test]
fn a_fence_may_be_late_by_one_use_of_a_slot_and_not_by_more() {
    let mut receiver = Receiver::new(SLOTS, 2);
    for n in 0..3 * SLOTS as u64 {
        receiver.post(100).unwrap();
        let (slot, generation) = ((n % SLOTS as u64) as u8, (n / SLOTS as u64) as u16);
        let imm = Immediate { slot, mask: 0b01, attempt: 0, staged: false, generation };
        receiver.arrive(0, imm, 100).unwrap();
    }
    receiver.post(100).unwrap();
    let fence = |receiver: &mut Receiver, generation| {
        let entry = FenceEntry { slot: 0, generation, attempts: 1, masks: 0b01 };
        receiver.fence(0, entry).map(|answer| answer.attempts)
    };
    let bad = |generation| Err(Violation::BadFence { rail: 0, slot: 0, generation });
    assert_eq!(fence(&mut receiver, 2), Ok(1), "the use before was complete");
    for generation in [0, 1, 4, 32767] {
        assert_eq!(fence(&mut receiver, generation), bad(generation));
    }
    assert_eq!(fence(&mut receiver, 3), Ok(0), "the current one is lost");
}

#[test]
fn a_request_is_untouched_until_something_is_known_about_its_message() {
    let mut receiver = Receiver::new(SLOTS, 2);
    receiver.post(100).unwrap();
    receiver.post(100).unwrap();
    assert!(receiver.is_untouched(0) && receiver.is_untouched(1) && !receiver.is_untouched(2));
    let imm = Immediate { slot: 0, mask: 0b11, attempt: 0, staged: false, generation: 0 };
    receiver.arrive(0, imm, 50).unwrap();
    let entry = FenceEntry { slot: 1, generation: 0, attempts: 1, masks: 0b10 };
    receiver.fence(1, entry).unwrap();
    assert!(!receiver.is_untouched(0) && !receiver.is_untouched(1));
}

/// The message has a part on each of two rails; that on rail 0 is acknowledged.
fn sender_with_one_part_acknowledged() -> Sender {
    let mut sender = Sender::new(SLOTS);
    sender.begin(&[[100, 100, 0, 0]], 0).unwrap();
    assert!(!sender.part_done(0, 0, 0));
    sender
}

#[test]
fn acknowledged_parts_of_a_message_under_way_are_asked_for_when_their_rail_fails() {
    let mut sender = sender_with_one_part_acknowledged();
    let mut asked = Vec::new();
    sender.fail_rail(0, |entry| asked.push(entry));
    assert_eq!(asked, [FenceEntry { slot: 0, generation: 0, attempts: 1, masks: 0b11 }]);
    // The device failed after the acknowledgement: the part is sent again.
    sender.fence_answer(0, FenceEntry { attempts: 0, ..asked[0] }, |_| panic!("not done"));
    assert!(sender.has_lost());
    assert_eq!(sender.replay(0, &[[0, 100, 0, 0]], 1), Ok((1, 0b10)));
    assert!(!sender.part_done(0, 1, 1));
    assert!(sender.part_done(0, 0, 1));
}

#[test]
fn an_answer_for_another_use_of_a_slot_changes_nothing() {
    let mut sender = sender_with_one_part_acknowledged();
    let mut asked = Vec::new();
    sender.fail_rail(0, |entry| asked.push(entry));
    let other = FenceEntry { generation: 1, attempts: 0, ..asked[0] };
    sender.fence_answer(0, other, |_| panic!("not done"));
    assert!(!sender.has_lost());
}

#[test]
fn a_message_is_sent_again_as_often_as_there_are_attempts() {
    let mut sender = Sender::new(SLOTS);
    sender.begin(&[[100, 0, 0, 0]], 0).unwrap();
    for attempt in 1..=MAX_ATTEMPTS {
        let mut asked = Vec::new();
        sender.fail_rail(0, |entry| asked.push(entry));
        sender.fence_answer(0, FenceEntry { attempts: 0, ..asked[0] }, |_| panic!("not done"));
        let again = sender.replay(0, &[[100, 0, 0, 0]], 0);
        if attempt < MAX_ATTEMPTS {
            assert_eq!(again, Ok((attempt as u8, 0b01)));
        } else {
            assert_eq!(again, Err(SendError::TooManyAttempts(0)));
        }
    }
}

#[test]
fn a_message_that_the_receiver_has_is_done_whatever_its_parts_are() {
    let mut sender = sender_with_one_part_acknowledged();
    let mut asked = Vec::new();
    sender.fail_rail(1, |entry| asked.push(entry));
    sender.fence_answer(1, FenceEntry { attempts: 0, ..asked[0] }, |_| panic!("not done"));
    assert!(sender.has_lost());
    assert!(sender.message_done(0) && !sender.message_done(0) && !sender.message_done(1));
    assert!(!sender.has_lost() && sender.next_lost().is_none());
    assert_eq!(sender.outstanding(), 0);
}

#[test]
fn the_leader_is_the_lowest_rail() {
    assert_eq!([0b0001, 0b0110, 0b1000, 0b1100, 0].map(leader), [Some(0), Some(1), Some(3), Some(2), None]);
}

#[test]
fn impossible_clear_to_sends_are_refused() {
    let good = ClearToSend { size: MAX_MESSAGE, count: 8, index: 2, ..ClearToSend::default() };
    assert_eq!(good.check(5, 2), Ok(()));
    for (wrong, index) in [
        (good, 1),
        (ClearToSend { count: 0, ..good }, 2),
        (ClearToSend { count: 9, ..good }, 2),
        (ClearToSend { size: MAX_MESSAGE + 1, ..good }, 2),
    ] {
        assert!(
            matches!(wrong.check(5, index), Err(Violation::BadClearToSend { message: 5, .. })),
            "{wrong:?}"
        );
    }
}

#[test]
fn message_has_no_parts_of_the_one_before_in_its_slot() {
    let mut sender = sender_with_one_part_acknowledged();
    assert!(sender.part_done(0, 0, 1));
    for message in 1..SLOTS as u64 {
        sender.begin(&[[1, 0, 0, 0]], 0).unwrap();
        assert!(sender.part_done(message, 0, 0));
    }
    let again = SLOTS as u64;
    assert_eq!(sender.begin(&[[0, 0, 0, 0]], 1), Ok((again, 0b10)));
    assert!(sender.part(again, 0, 0).is_none() && !sender.part_done(again, 0, 0));
    assert_eq!(sender.part(again, 0, 1).unwrap().chunks, [Chunk::default(); MAX_GROUP]);
    assert!(sender.part_done(again, 0, 1));
}
