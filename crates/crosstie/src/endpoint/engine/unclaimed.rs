//! What is known of messages and buffers whose `recv`s have ended, see [`withdrawal`](super::withdrawal).

use std::collections::VecDeque;

use crosstie_protocol::endpoint::message::Control;

use super::super::operation::Op;
use super::super::returned::Message;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Unclaimed {
    /// Messages without a `recv`, oldest first.
    pub(super) messages: VecDeque<Message>,
    /// Operations that have not ended, and whose buffers the peer does not know any more: oldest first, all older than those that were never
    /// announced.
    pub(super) recalled: VecDeque<Op>,
    /// Withdrawals of this side without an answer.
    pub(super) unanswered: u16,
    /// Answers to the peer that are not sent.
    pub(super) answers: VecDeque<Control>,
    /// There may be something to withdraw, or to answer.
    pub(super) is_due: bool,
}

impl Unclaimed {
    /// Whether a message that arrives is for the `recv` of its buffer: no other one is on its way, or waits.
    #[inline]
    pub(super) fn is_settled(&self) -> bool {
        !self.is_due && self.unanswered == 0 && self.messages.is_empty()
    }

    pub(super) fn has_messages(&self) -> bool {
        !self.messages.is_empty()
    }
}

/// Whether a message was announced before another one, on the same connection.
pub(super) fn is_before(one: u32, other: u32) -> bool {
    (one.wrapping_sub(other) as i32) < 0
}
