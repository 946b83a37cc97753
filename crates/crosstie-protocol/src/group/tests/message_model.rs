//! An exhaustive model of one sender and one receiver without room: packets arrive in any order, one is lost, one arrives twice.

use std::vec;
use std::vec::Vec;

use stateright::{Checker, Model, Property};

use super::super::message::{COMBINED_PREFIX, Channel, OnGap, OnRefusal, Options, Received, Verdict};
use super::super::*;
use super::BrokenRule;

const A: MemberId = MemberId::new(0);
const B: MemberId = MemberId::new(1);

/// The messages of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Messages {
    first: u32,
    count: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    a: Channel,
    b: Channel,
    /// Packets on their way. A data packet comes with its length and its messages.
    to_b: Vec<([u8; HEADER_SIZE], u32, Messages)>,
    to_a: Vec<[u8; HEADER_SIZE]>,
    sent: u32,
    accepted: u32,
    /// The send buffer of A, and what of the receive buffer of B waits for a missing packet: by entry.
    in_send_buffer: Vec<(u64, Messages)>,
    waiting: Vec<(u64, Messages)>,
    /// Places that the application of B has not released.
    held: Vec<u64>,
    losses: u8,
    duplicates: u8,
    timeouts: u8,
    is_lossless: bool,
    failure: Option<&'static str>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    Send,
    /// A pass of A's driver.
    Pass,
    DeliverToB(usize),
    DeliverToA(usize),
    LoseToB(usize),
    LoseToA(usize),
    DuplicateToB(usize),
    Release,
    Acknowledge,
    Timeout,
}

pub(super) struct MessageModel {
    pub(super) messages: u32,
    pub(super) on_refusal: OnRefusal,
    pub(super) on_gap: OnGap,
    /// See [`Options::combine_from`].
    pub(super) combine_from: u32,
    pub(super) room: u32,
    pub(super) losses: u8,
    pub(super) duplicates: u8,
    pub(super) timeouts: u8,
    /// Packets arrive in any order, not only in the order in which they were sent.
    pub(super) reorders: bool,
    pub(super) broken_rule: Option<BrokenRule>,
}

impl State {
    fn put(&mut self, packet: &message::Outgoing) {
        if self.is_lossless && !packet.is_first {
            self.failure = Some("a packet was sent again that was not lost");
        }
        let header = self.a.data_header(packet);
        let messages = self.in_send_buffer.iter().find(|(entry, _)| *entry == packet.entry).unwrap().1;
        let combined = header.flags & flags::COMBINED != 0;
        let total = (messages.first..messages.first + messages.count)
            .map(|number| number + 1 + if combined { COMBINED_PREFIX as u32 } else { 0 });
        assert_eq!(packet.len, total.sum::<u32>());
        self.to_b.push((header.encode(), packet.len, messages));
    }

    fn send(&mut self) -> bool {
        // Message k has k + 1 bytes.
        let len = self.sent + 1;
        let Ok(place) = self.a.sender.combine(B, 0, len) else { return false };
        if let Some(place) = place {
            self.sent += 1;
            match self.in_send_buffer.iter_mut().find(|(entry, _)| *entry == place.entry) {
                Some((_, messages)) => messages.count += 1,
                None => {
                    self.in_send_buffer.push((place.entry, Messages { first: self.sent - 1, count: 1 }));
                }
            }
            if place.close {
                self.close();
            }
            return true;
        }
        self.close();
        let Ok((packet, transmit)) = self.a.sender.send(B, len, Channel::WHOLE, len, 0) else { return false };
        self.sent += 1;
        self.in_send_buffer.push((packet.entry, Messages { first: self.sent - 1, count: 1 }));
        if transmit {
            self.put(&packet);
        }
        true
    }

    fn close(&mut self) {
        if let Some(packet) = self.a.sender.close_packet(B, 0) {
            self.put(&packet);
        }
    }

    fn deliver_to_b(&mut self, index: usize, keep: bool) {
        let (bytes, len, messages) = if keep { self.to_b[index] } else { self.to_b.remove(index) };
        let header = Header::decode(&bytes).unwrap();
        let received = self.b.on_packet(&header, len, 0).unwrap();
        match received {
            Received::Data(Verdict::Accepted { entry, offset, total }) => {
                self.accept(entry.number, (offset, total, len), messages);
                while let Some(next) = self.b.receiver.next_held(A).unwrap() {
                    let at = self.waiting.iter().position(|(entry, _)| *entry == next.entry.number).unwrap();
                    let messages = self.waiting.remove(at).1;
                    self.accept(next.entry.number, (next.offset, next.total, next.len), messages);
                }
            }
            Received::Data(Verdict::Held { entry }) => {
                self.waiting.retain(|(held, _)| *held != entry.number);
                self.waiting.push((entry.number, messages));
            }
            Received::Data(Verdict::Refused) if self.is_lossless => {
                self.failure = Some("a sender that keeps to its credit was refused");
            }
            _ => {}
        }
        self.answer(false);
    }

    fn accept(&mut self, entry: u64, (offset, total, len): (u32, u32, u32), messages: Messages) {
        if messages.first != self.accepted || (offset, total) != (0, len) {
            self.failure = Some("a message came twice, or out of order");
        }
        self.accepted += messages.count;
        self.held.push(entry);
    }

    fn deliver_to_a(&mut self, index: usize) {
        let header = Header::decode(&self.to_a.remove(index)).unwrap();
        self.a.on_packet(&header, 0, 0).unwrap();
        self.resend();
        let sender = &self.a.sender;
        self.in_send_buffer.retain(|(entry, _)| sender.is_in_use(*entry));
    }

    fn resend(&mut self) {
        while let Some(packet) = self.a.sender.next_outgoing() {
            self.put(&packet);
        }
    }

    fn answer(&mut self, idle: bool) -> bool {
        let mut answered = false;
        if idle {
            self.b.receiver.return_credit();
        }
        while let Some(answer) = self.b.receiver.next_answer(idle) {
            self.to_a.push(self.b.answer_header(&answer).encode());
            answered = true;
        }
        answered
    }

    fn timeout(&mut self) -> bool {
        let Some(deadline) = self.a.sender.next_deadline() else { return false };
        self.a.sender.expire(deadline);
        self.resend();
        self.a.rebase(deadline);
        true
    }

    /// Everything is delivered, read and acknowledged from now on. All messages must arrive.
    fn can_finish(&self, messages: u32) -> bool {
        let mut state = self.clone();
        for _ in 0..200 {
            while state.sent < messages && state.send() {}
            state.resend();
            while !state.to_b.is_empty() {
                state.deliver_to_b(0, false);
            }
            while let Some(entry) = state.held.pop() {
                state.b.receiver.release(entry);
            }
            state.answer(true);
            while !state.to_a.is_empty() {
                state.deliver_to_a(0);
            }
            if state.failure.is_some() {
                return false;
            }
            if state.accepted == messages && state.a.sender.is_idle() {
                return true;
            }
            if state.to_b.is_empty() && state.to_a.is_empty() {
                state.timeout();
            }
        }
        false
    }
}

impl Model for MessageModel {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let options = Options {
            window: 4,
            send_table: 4,
            receive_table: self.room,
            // Messages of 1 to 4 bytes; three of them fill a packet.
            mtu: if self.combine_from < u32::MAX { 18 } else { MAX_MTU as u32 },
            combine_from: self.combine_from,
            ack_every: 2,
            on_refusal: self.on_refusal,
            on_gap: self.on_gap,
            backoff: 1,
            max_backoff: 2,
            resend_after: if self.is_lossless() { u64::MAX } else { 2 },
            min_resend_after: if self.is_lossless() { u64::MAX } else { 1 },
            give_up_after: u64::MAX,
            ..Options::default()
        };
        let channel = |me| {
            let mut channel = Channel::new(GroupId { group: 1, epoch: 1 }, 0, me, 2, &options).unwrap();
            channel.break_rule(self.broken_rule);
            channel
        };
        vec![State {
            a: channel(A),
            b: channel(B),
            to_b: vec![],
            to_a: vec![],
            sent: 0,
            accepted: 0,
            in_send_buffer: vec![],
            waiting: vec![],
            held: vec![],
            losses: self.losses,
            duplicates: self.duplicates,
            timeouts: self.timeouts,
            is_lossless: self.is_lossless(),
            failure: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.sent < self.messages {
            actions.push(Action::Send);
        }
        if state.a.sender.has_open_packet(B) {
            actions.push(Action::Pass);
        }
        let choices = |len: usize| if self.reorders { len } else { len.min(1) };
        for index in 0..choices(state.to_b.len()) {
            actions.push(Action::DeliverToB(index));
            if state.losses > 0 {
                actions.push(Action::LoseToB(index));
            }
            if state.duplicates > 0 {
                actions.push(Action::DuplicateToB(index));
            }
        }
        for index in 0..choices(state.to_a.len()) {
            actions.push(Action::DeliverToA(index));
            if state.losses > 0 {
                actions.push(Action::LoseToA(index));
            }
        }
        if !state.held.is_empty() {
            actions.push(Action::Release);
        }
        actions.push(Action::Acknowledge);
        if state.timeouts > 0 {
            actions.push(Action::Timeout);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Send => {
                if !state.send() {
                    return None;
                }
            }
            Action::Pass => state.resend(),
            Action::DeliverToB(index) => state.deliver_to_b(index, false),
            Action::DeliverToA(index) => state.deliver_to_a(index),
            Action::LoseToB(index) => {
                state.to_b.remove(index);
                state.losses -= 1;
            }
            Action::LoseToA(index) => {
                state.to_a.remove(index);
                state.losses -= 1;
            }
            Action::DuplicateToB(index) => {
                state.deliver_to_b(index, true);
                state.duplicates -= 1;
            }
            Action::Release => {
                let entry = state.held.remove(0);
                state.b.receiver.release(entry);
                state.answer(false);
            }
            Action::Acknowledge => {
                if !state.answer(true) {
                    return None;
                }
            }
            Action::Timeout => {
                state.timeouts -= 1;
                if !state.timeout() {
                    return None;
                }
            }
        }
        state.a.rebase(0);
        state.b.rebase(0);
        if self.reorders {
            state.to_b.sort_unstable();
            state.to_a.sort_unstable();
        }
        Some(state)
    }

    /// Reordering can make a sender go back without end.
    fn within_boundary(&self, state: &State) -> bool {
        let attempts = |bytes: &[u8; HEADER_SIZE]| Header::decode(bytes).unwrap().attempt <= 2;
        !self.reorders
            || (state.to_b.len() <= 4
                && state.to_a.len() <= 3
                && state.to_b.iter().all(|(bytes, ..)| attempts(bytes))
                && state.to_a.iter().all(attempts))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("each message once and in order", |_, state: &State| state.failure.is_none()),
            Property::always("all messages arrive from here on", |model, state: &State| {
                state.can_finish(model.messages)
            }),
            Property::sometimes("the receiver refuses, if it can lack room", |model, state: &State| {
                model.is_lossless()
                    || model.room >= model.messages
                    || state.to_a.iter().any(|bytes| {
                        let header = Header::decode(bytes).unwrap();
                        header.kind == PacketKind::Nack && header.flags == 0
                    })
            }),
            Property::sometimes("a packet is held, or none may be", |model, state: &State| {
                model.on_gap == OnGap::GoBack
                    || model.is_lossless()
                    || model.room == 1
                    || state.b.receiver.in_use() as usize > state.held.len()
            }),
            Property::sometimes("messages travel together, if they may", |model, state: &State| {
                model.combine_from == u32::MAX || state.to_b.iter().any(|(_, _, messages)| messages.count > 1)
            }),
            Property::sometimes("everything is done", |model, state: &State| {
                state.accepted == model.messages && state.a.sender.is_idle() && state.held.is_empty()
            }),
        ]
    }
}

impl MessageModel {
    /// An RC queue pair: no time-outs, and blind retries have no place.
    fn is_lossless(&self) -> bool {
        self.losses == 0
            && self.duplicates == 0
            && self.timeouts == 0
            && !self.reorders
            && self.on_refusal == OnRefusal::WaitForRequest
    }
}

fn check(model: MessageModel) {
    let least = if model.is_lossless() { 40 } else { 1_000 };
    let checker = model.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    std::println!("{} states", checker.unique_state_count());
    assert!(checker.unique_state_count() > least, "the model hardly does anything");
}

#[test]
fn blind_retries_deliver_all_messages_to_a_full_receiver_after_a_loss() {
    for room in [1, 2] {
        check(MessageModel {
            messages: 3,
            on_refusal: OnRefusal::Retry,
            on_gap: OnGap::Selective,
            combine_from: u32::MAX,
            room,
            losses: 1,
            duplicates: 0,
            timeouts: 1,
            reorders: false,
            broken_rule: None,
        });
    }
}

#[test]
fn active_requests_deliver_all_messages_to_a_full_receiver_after_a_loss() {
    for room in [1, 2] {
        check(MessageModel {
            messages: 3,
            on_refusal: OnRefusal::WaitForRequest,
            on_gap: OnGap::Selective,
            combine_from: u32::MAX,
            room,
            losses: 1,
            duplicates: 0,
            timeouts: 1,
            reorders: false,
            broken_rule: None,
        });
    }
}

/// Nothing is lost: the sender is never refused, sends nothing twice, and is always told when there is room again.
#[test]
fn credit_delivers_all_messages_without_refusals_and_without_timeouts() {
    for (combine_from, room) in [(u32::MAX, 1), (u32::MAX, 2), (u32::MAX, 4), (1, 2)] {
        check(MessageModel {
            messages: 7,
            on_refusal: OnRefusal::WaitForRequest,
            on_gap: OnGap::Selective,
            combine_from,
            room,
            losses: 0,
            duplicates: 0,
            timeouts: 0,
            reorders: false,
            broken_rule: None,
        });
    }
}

#[test]
fn reordered_and_duplicated_packets_deliver_all_messages_once() {
    for (messages, room) in [(2, 2), (3, 1)] {
        check(MessageModel {
            messages,
            on_refusal: OnRefusal::WaitForRequest,
            on_gap: OnGap::Selective,
            combine_from: u32::MAX,
            room,
            losses: 1,
            duplicates: 1,
            timeouts: 0,
            reorders: true,
            broken_rule: None,
        });
    }
}

#[test]
fn missing_packets_are_sent_again_and_held_ones_are_delivered_in_order() {
    check(MessageModel {
        messages: 4,
        on_refusal: OnRefusal::WaitForRequest,
        on_gap: OnGap::Selective,
        combine_from: u32::MAX,
        room: 4,
        losses: 2,
        duplicates: 0,
        timeouts: 1,
        reorders: false,
        broken_rule: None,
    });
}

#[test]
fn going_back_delivers_all_messages_after_a_loss() {
    check(MessageModel {
        messages: 3,
        on_refusal: OnRefusal::WaitForRequest,
        on_gap: OnGap::GoBack,
        combine_from: u32::MAX,
        room: 2,
        losses: 1,
        duplicates: 0,
        timeouts: 1,
        reorders: false,
        broken_rule: None,
    });
}

#[test]
fn combined_messages_arrive_once_and_in_order_despite_loss_duplicates_and_a_full_receiver() {
    for (messages, room, losses, duplicates) in [(4, 2, 1, 0), (4, 4, 1, 1)] {
        check(MessageModel {
            messages,
            on_refusal: OnRefusal::WaitForRequest,
            on_gap: OnGap::Selective,
            combine_from: 1,
            room,
            losses,
            duplicates,
            timeouts: 1,
            reorders: false,
            broken_rule: None,
        });
    }
}

#[test]
fn combined_messages_arrive_once_and_in_order_despite_reordering() {
    check(MessageModel {
        messages: 4,
        on_refusal: OnRefusal::WaitForRequest,
        on_gap: OnGap::Selective,
        combine_from: 1,
        room: 4,
        losses: 0,
        duplicates: 1,
        timeouts: 0,
        reorders: true,
        broken_rule: None,
    });
}
