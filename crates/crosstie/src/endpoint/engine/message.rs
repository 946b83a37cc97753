//! `send` and `recv`: the bytes go straight from the sender's buffer into the receiver's.
//!
//! ```text
//!   receiver                                            sender
//!   recv(buffer): lease a slot
//!   announce: address, length, rkey  --- WRITE+IMM -->  queue of announced buffers
//!                                                       send(buffer): the k-th send takes the k-th buffer
//!   part i arrives on channel n+i    <-- WRITE+IMM ---  one part on each message channel that carries any
//!   last part: the message is complete                  last completion: the message is sent
//! ```
//!
//! A `send` that ends before it has a buffer counts as if it had never been called. So does a `recv`, but the peer knows its buffer: see
//! [`withdrawal`](super::withdrawal).

use crosstie_protocol::endpoint::message::{
    AnnouncedBuffer, ArrivedParts, Control, DataImm, Violation, WireSlot,
};

use super::super::cause::{Cause, SUCCESS};
use super::super::operation::{Kind, Op};
use super::link::{AnnouncedRecv, Link};
use super::shared::Shared;
use crate::device::PostError;

impl Link {
    /// The peer has announced a buffer.
    pub(super) fn accept_buffer(
        &mut self,
        shared: &mut Shared<'_>,
        buffer: AnnouncedBuffer,
    ) -> Result<(), Violation> {
        self.pairing.announce(buffer)?;
        if self.pairing.waiting_sends() > 0 {
            self.pair_sends(shared);
        }
        Ok(())
    }

    /// Gives buffers to sends, as long as there are both, and a slot.
    pub(super) fn pair_sends(&mut self, shared: &mut Shared<'_>) {
        while self.is_connected()
            && let Some((send, buffer)) = self.pairing.next_pair()
        {
            let len =
                send.as_mut().map(|op| op.with_value(shared.table, |operation| operation.range.len() as u64));
            let refused = match (&send, len) {
                (Some(op), _) if op.is_ended(shared.table) => Some(Cause::Cancelled),
                (_, Some(len)) if len > buffer.len => Some(Cause::TooLong),
                _ => None,
            };
            if let (None, _) | (_, Some(_)) = (len, refused) {
                // The buffer stays for the next send.
                if let (Some(Some(op)), Some(cause)) = (self.pairing.take_send(), refused) {
                    shared.give_back(op, cause.encode());
                }
                continue;
            }
            if self.slots.free() == 0 {
                return;
            }
            let Some((Some(mut op), to)) = self.pairing.take_pair() else { return };
            let begun = op.with_value(shared.table, |operation| {
                let plan = self.plan_message(operation, to);
                self.post_first(shared.counters, operation, plan)
            });
            self.track(shared, op, begun);
        }
    }

    #[inline]
    pub(super) fn start_recv(&mut self, shared: &mut Shared<'_>, op: Op) {
        let is_next = self.waiting_recvs.is_empty() && self.unclaimed.is_settled();
        let unannounced = if is_next { self.announce(shared, op) } else { Some(op) };
        if let Some(op) = unannounced {
            self.waiting_recvs.push_back(op);
            if self.unclaimed.has_messages() {
                self.hand_out(shared);
            }
        }
    }

    /// Announces the buffers of `recv`s that wait, as long as there are slots. None of them while it is not known what becomes of messages to
    /// `recv`s that have ended: what the peer does not know of can be filled here.
    #[inline(never)]
    pub(super) fn announce_recvs(&mut self, shared: &mut Shared<'_>) {
        while self.is_connected()
            && self.unclaimed.is_settled()
            && let Some(op) = self.waiting_recvs.pop_front()
        {
            if op.is_ended(shared.table) {
                shared.give_back(op, Cause::Cancelled.encode());
            } else if let Some(op) = self.announce(shared, op) {
                self.waiting_recvs.push_front(op);
                return;
            }
        }
    }

    /// Announces the buffer of a `recv` to the peer. Hands it back if there is no slot, or no room in the send queue.
    #[inline]
    fn announce(&mut self, shared: &mut Shared<'_>, mut op: Op) -> Option<Op> {
        if !self.has_control_room() {
            return Some(op);
        }
        let Some(key) = self.recv_slots.lease() else { return Some(op) };
        let sequence = self.next_sequence;
        let buffer = op.with_value(shared.table, |operation| {
            operation.kind = Kind::Recv(sequence);
            AnnouncedBuffer {
                slot: WireSlot::new(key),
                addr: operation.remote.addr,
                len: operation.range.len() as u64,
                rkey: operation.remote.rkey,
                sequence,
            }
        });
        match self.post_control(&Control::Buffer(buffer)) {
            Ok(()) => {
                shared.counters.work_requests += 1;
                self.next_sequence = sequence.wrapping_add(1);
                self.announced[usize::from(key.index)] = AnnouncedRecv {
                    op: Some(op),
                    parts: ArrivedParts::default(),
                    limit: buffer.len,
                    sequence,
                    is_withdrawn: false,
                };
                None
            }
            Err(error) => {
                shared.counters.refused_posts += 1;
                self.recv_slots.release(key);
                if error == PostError::Full {
                    return Some(op);
                }
                shared.give_back(op, Cause::NotAccepted(0).encode());
                None
            }
        }
    }

    /// The message of a `recv` is in its buffer.
    #[inline]
    fn finish_recv(&mut self, shared: &mut Shared<'_>, mut op: Op, len: u64) {
        op.with_value(shared.table, |operation| operation.bytes = len);
        if !self.unclaimed.is_settled() {
            self.keep_message(shared, op);
        } else if let Err(op) = shared.give_back_if_live(op, SUCCESS) {
            self.keep_message(shared, op);
        }
    }

    /// A part of a message has arrived on message channel `part`.
    pub(super) fn accept_part(
        &mut self,
        shared: &mut Shared<'_>,
        part: u8,
        imm: u32,
        bytes: u32,
    ) -> Result<(), Violation> {
        let data = DataImm::decode(imm);
        let unknown = Violation::UnknownBuffer { imm };
        let key =
            self.recv_slots.current(data.slot.index()).filter(|key| data.slot.is(*key)).ok_or(unknown)?;
        let announced = &mut self.announced[usize::from(key.index)];
        if announced.op.is_none() {
            return Err(unknown);
        }
        let Some(total) = announced.parts.arrive(data, part, bytes, announced.limit)? else { return Ok(()) };
        let op = announced.op.take();
        self.recv_slots.release(key);
        if let Some(op) = op {
            self.finish_recv(shared, op, total);
        }
        if !self.waiting_recvs.is_empty() {
            self.announce_recvs(shared);
        }
        Ok(())
    }
}
