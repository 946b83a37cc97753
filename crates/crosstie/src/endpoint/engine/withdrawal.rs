//! Messages and buffers of `recv`s that have ended: no message is lost, and buffers come back early.
//!
//! ```text
//!   receiver                                            sender
//!   the recv of a buffer has ended: WITHDRAW ---------> has a send taken the buffer?
//!   the buffer is back                    <- WITHDRAWN  no: it leaves the queue
//!   the message arrives, is copied        <----- TAKEN  yes: its message comes
//!   the oldest recv that waits gets it
//! ```
//!
//! **Promise.** The k-th message goes to the k-th `recv` that does not end before. A message that finds its `recv` ended, or whose future is
//! dropped with it, waits for the next one, in the order of the messages.
//!
//! Nobody but the peer may write into a buffer that the peer knows. So a `recv` that is to get such a message withdraws its own buffer first,
//! as one that has ended does; then its operation is *recalled*. `recv`s that are called meanwhile are not announced, so they need no
//! withdrawal.

use crosstie_protocol::endpoint::message::{Control, MAX_WITHDRAWALS, Violation, WireSlot};

use super::super::cause::{Cause, SUCCESS};
use super::super::operation::{Kind, Op};
use super::super::returned::{Item, Message};
use super::link::Link;
use super::shared::Shared;
use super::unclaimed::is_before;
use crate::device::PostError;

fn sequence(shared: &Shared<'_>, op: &mut Op) -> u32 {
    op.with_value(shared.table, |operation| match operation.kind {
        Kind::Recv(sequence) => sequence,
        _ => 0,
    })
}

impl Link {
    /// The oldest `recv` whose buffer the peer does not know.
    pub(super) fn next_waiting_recv(&mut self) -> Option<Op> {
        self.unclaimed.recalled.pop_front().or_else(|| self.waiting_recvs.pop_front())
    }

    /// The message in the buffer of this `recv` is not its own, or the `recv` has ended.
    #[cold]
    pub(super) fn keep_message(&mut self, shared: &mut Shared<'_>, mut op: Op) {
        let bytes = op.with_value(shared.table, |operation| operation.message(operation.bytes));
        let sequence = sequence(shared, &mut op);
        self.insert_message(Message { sequence, bytes });
        self.recall(shared, op);
        self.hand_out(shared);
    }

    /// A message that was given to a call whose future was dropped before anybody looked, or an immediate.
    pub(super) fn put_back(&mut self, shared: &mut Shared<'_>, item: Item) {
        match item {
            Item::Event(event) => self.put_back_event(shared, event),
            // One of a former connection has ended with it.
            Item::Message(message) if is_before(message.sequence, self.next_sequence) => {
                self.insert_message(message);
                self.hand_out(shared);
            }
            Item::Message(_) => {}
        }
    }

    fn insert_message(&mut self, message: Message) {
        let messages = &mut self.unclaimed.messages;
        let at = messages.partition_point(|other| is_before(other.sequence, message.sequence));
        messages.insert(at, message);
    }

    /// The peer does not know the buffer of this `recv` any more.
    fn recall(&mut self, shared: &mut Shared<'_>, mut op: Op) {
        if op.is_ended(shared.table) {
            shared.give_back(op, Cause::Cancelled.encode());
            return;
        }
        let number = sequence(shared, &mut op);
        let recalled = &mut self.unclaimed.recalled;
        let at = recalled.iter_mut().position(|other| is_before(number, sequence(shared, other)));
        recalled.insert(at.unwrap_or(recalled.len()), op);
    }

    /// Gives messages to the oldest `recv`s, as long as there are both.
    pub(super) fn hand_out(&mut self, shared: &mut Shared<'_>) {
        while self.is_connected()
            && let Some(message) = self.unclaimed.messages.front()
        {
            let number = message.sequence;
            // Messages take buffers in order. So an older one is on its way into an older buffer, unless its withdrawal will be answered.
            if self.announced.iter().any(|other| other.op.is_some() && is_before(other.sequence, number)) {
                return;
            }
            if let Some(op) = self.unclaimed.recalled.pop_front() {
                self.hand_to(shared, op);
                continue;
            }
            let known = self.announced.iter().enumerate();
            let live =
                known.filter(|(_, other)| other.op.as_ref().is_some_and(|op| !op.is_ended(shared.table)));
            let age = |sequence: u32| self.next_sequence.wrapping_sub(sequence);
            if let Some((index, _)) = live.max_by_key(|(_, other)| age(other.sequence)) {
                self.withdraw(shared, index as u16);
                return;
            }
            let Some(op) = self.waiting_recvs.pop_front() else { return };
            self.hand_to(shared, op);
        }
        // There was a message for each, but another `recv` has taken it.
        while let Some(op) = self.unclaimed.recalled.pop_back() {
            self.waiting_recvs.push_front(op);
        }
    }

    /// Gives the oldest message to a `recv` whose buffer the peer does not know, unless the `recv` has ended or its buffer is too short.
    fn hand_to(&mut self, shared: &mut Shared<'_>, mut op: Op) {
        let Some(message) = self.unclaimed.messages.front() else { return };
        let fits = op.with_value(shared.table, |operation| {
            (operation.kind, operation.bytes) = (Kind::Recv(message.sequence), message.bytes.len() as u64);
            let buffer = operation.stored.buffer().filter(|_| message.bytes.len() <= operation.range.len());
            buffer.is_some_and(|buffer| buffer.region().write(operation.range.start, &message.bytes).is_ok())
        });
        if !fits {
            shared.give_back(op, Cause::TooLong.encode());
            return;
        }
        match shared.give_back_if_live(op, SUCCESS) {
            Ok(()) => drop(self.unclaimed.messages.pop_front()),
            Err(op) => _ = shared.give_back(op, Cause::Cancelled.encode()),
        }
    }

    /// Asks the peer to withdraw a buffer, unless it was asked, or too many withdrawals have no answer.
    fn withdraw(&mut self, shared: &mut Shared<'_>, index: u16) {
        let Some(key) = self.recv_slots.current(index) else { return };
        if self.announced[usize::from(index)].is_withdrawn || self.unclaimed.unanswered >= MAX_WITHDRAWALS {
            return;
        }
        if self.post_withdrawal(shared, &Control::Withdraw(WireSlot::new(key))) {
            self.announced[usize::from(index)].is_withdrawn = true;
            self.unclaimed.unanswered += 1;
        }
    }

    /// Posts a control message. Returns false if it is to be tried again.
    fn post_withdrawal(&mut self, shared: &mut Shared<'_>, control: &Control) -> bool {
        let posted = if self.has_control_room() { self.post_control(control) } else { Err(PostError::Full) };
        match posted {
            Ok(()) => shared.counters.work_requests += 1,
            Err(PostError::Full) => self.unclaimed.is_due = true,
            Err(_) => {
                shared.counters.refused_posts += 1;
                self.end(shared, Cause::NotAccepted(0));
            }
        }
        posted.is_ok()
    }

    /// Answers the peer, withdraws the buffers of `recv`s that have ended, and hands out messages.
    #[cold]
    pub(super) fn advance_withdrawals(&mut self, shared: &mut Shared<'_>) {
        self.unclaimed.is_due = false;
        while self.is_connected()
            && let Some(&answer) = self.unclaimed.answers.front()
            && self.post_withdrawal(shared, &answer)
        {
            self.unclaimed.answers.pop_front();
        }
        for index in 0..self.announced.len() {
            let op = &self.announced[index].op;
            if self.is_connected() && op.as_ref().is_some_and(|op| op.is_ended(shared.table)) {
                self.withdraw(shared, index as u16);
            }
        }
        self.hand_out(shared);
    }

    /// The peer withdraws a buffer that it has announced.
    pub(super) fn accept_withdraw(
        &mut self,
        shared: &mut Shared<'_>,
        slot: WireSlot,
    ) -> Result<(), Violation> {
        if self.unclaimed.answers.len() >= MAX_WITHDRAWALS.into() {
            return Err(Violation::Withdrawal);
        }
        let is_withdrawn = self.pairing.withdraw(slot);
        self.unclaimed.answers.push_back(match is_withdrawn {
            true => Control::Withdrawn(slot),
            false => Control::Taken(slot),
        });
        self.advance_withdrawals(shared);
        Ok(())
    }

    /// The peer does not know this buffer any more.
    pub(super) fn accept_withdrawn(
        &mut self,
        shared: &mut Shared<'_>,
        slot: WireSlot,
    ) -> Result<(), Violation> {
        let key = self.recv_slots.current(slot.index()).filter(|key| slot.is(*key));
        let key = key.ok_or(Violation::Withdrawal)?;
        let announced = &mut self.announced[usize::from(key.index)];
        let op = announced.op.take_if(|_| announced.is_withdrawn).ok_or(Violation::Withdrawal)?;
        self.recv_slots.release(key);
        self.recall(shared, op);
        self.accept_taken(shared)
    }

    /// The peer has answered a withdrawal.
    pub(super) fn accept_taken(&mut self, shared: &mut Shared<'_>) -> Result<(), Violation> {
        let unanswered = self.unclaimed.unanswered.checked_sub(1).ok_or(Violation::Withdrawal)?;
        self.unclaimed.unanswered = unanswered;
        self.advance_withdrawals(shared);
        Ok(())
    }
}
