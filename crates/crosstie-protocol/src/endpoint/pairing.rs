//! Which `send` gets which announced buffer: the k-th to the k-th.
//!
//! Both wait in a queue, in order, whichever comes first. A buffer that is announced before the local `send` is called stays in its
//! queue until then, unless its `recv` ends and withdraws it. A `send` that ends before it has a buffer, and a buffer that is withdrawn before
//! a `send` has it, leave their queues as if they had never been there.

use alloc::collections::VecDeque;

use super::message::{AnnouncedBuffer, Violation, WireSlot};

/// Sends that wait for a buffer, and buffers that wait for a send. At most one of the queues is not empty.
#[derive(Debug)]
pub struct Pairing<S> {
    sends: VecDeque<S>,
    buffers: VecDeque<AnnouncedBuffer>,
    limit: u32,
    next_sequence: u32,
}

impl<S> Pairing<S> {
    /// `limit`: the most buffers that the peer may have announced; `sends`: the most sends that wait. No more memory is allocated.
    pub fn new(limit: u32, sends: usize) -> Pairing<S> {
        Pairing {
            sends: VecDeque::with_capacity(sends),
            buffers: VecDeque::with_capacity(limit as usize),
            limit,
            next_sequence: 0,
        }
    }

    /// Takes a buffer that the peer has announced. The [next pair](Pairing::next_pair) may be ready then.
    pub fn announce(&mut self, buffer: AnnouncedBuffer) -> Result<(), Violation> {
        if buffer.sequence != self.next_sequence {
            return Err(Violation::Sequence { expected: self.next_sequence, found: buffer.sequence });
        }
        if self.buffers.len() >= self.limit as usize {
            return Err(Violation::TooManyBuffers { limit: self.limit });
        }
        self.next_sequence = self.next_sequence.wrapping_add(1);
        self.buffers.push_back(buffer);
        Ok(())
    }

    /// Removes a buffer that no send has taken. Returns false if there is no such buffer.
    pub fn withdraw(&mut self, slot: WireSlot) -> bool {
        let found = self.buffers.iter().position(|buffer| buffer.slot == slot);
        found.is_some_and(|at| self.buffers.remove(at).is_some())
    }

    /// Adds a send behind the others.
    pub fn send(&mut self, send: S) {
        self.sends.push_back(send);
    }

    /// Removes sends that have ended without a buffer: those for which `has_ended` returns true.
    pub fn remove_ended(&mut self, has_ended: impl FnMut(&mut S) -> bool) {
        let mut has_ended = has_ended;
        self.sends.retain_mut(|send| !has_ended(send));
    }

    /// The oldest send, and the oldest buffer, if there are both. They are still in their queues.
    pub fn next_pair(&mut self) -> Option<(&mut S, AnnouncedBuffer)> {
        let buffer = *self.buffers.front()?;
        Some((self.sends.front_mut()?, buffer))
    }

    /// Takes the oldest send, and the oldest buffer, if there are both.
    pub fn take_pair(&mut self) -> Option<(S, AnnouncedBuffer)> {
        self.sends.front()?;
        let buffer = self.buffers.pop_front()?;
        Some((self.sends.pop_front()?, buffer))
    }

    /// Takes the oldest buffer for a message of `len` bytes, if no send waits and it is long enough.
    #[inline]
    pub fn take_buffer(&mut self, len: u64) -> Option<AnnouncedBuffer> {
        if !self.sends.is_empty() || self.buffers.front()?.len < len {
            return None;
        }
        self.buffers.pop_front()
    }

    /// Takes the oldest send without a buffer.
    pub fn take_send(&mut self) -> Option<S> {
        self.sends.pop_front()
    }

    /// Sends that wait.
    #[inline]
    pub fn waiting_sends(&self) -> usize {
        self.sends.len()
    }

    /// Buffers that wait.
    #[inline]
    pub fn waiting_buffers(&self) -> usize {
        self.buffers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn buffer(sequence: u32) -> AnnouncedBuffer {
        AnnouncedBuffer { slot: WireSlot::from_bits(sequence), addr: 0, len: 0, rkey: 0, sequence }
    }

    proptest! {
        /// Whatever the order of sends, announcements, sends that end early and buffers that are withdrawn: the k-th send that stays gets the
        /// k-th buffer that stays.
        #[test]
        fn kth_send_gets_the_kth_buffer(steps in proptest::collection::vec((0u8..4, any::<u8>()), 0..100)) {
            let mut pairing = Pairing::new(1000, 1000);
            let (mut sent, mut announced) = (0u32, 0);
            let (mut pairs, mut kept): (Vec<u32>, Vec<u32>) = Default::default();
            let mut buffers: Vec<u32> = Vec::new();
            for (step, which) in steps {
                match step {
                    0 => {
                        pairing.send(sent);
                        kept.push(sent);
                        sent += 1;
                    }
                    1 => {
                        prop_assert_eq!(pairing.announce(buffer(announced)), Ok(()));
                        buffers.push(announced);
                        announced += 1;
                    }
                    2 => {
                        let number = u32::from(which) % (announced + 1);
                        let waits = buffers[pairs.len()..].iter().position(|buffer| *buffer == number);
                        prop_assert_eq!(pairing.withdraw(WireSlot::from_bits(number)), waits.is_some());
                        waits.into_iter().for_each(|at| _ = buffers.remove(pairs.len() + at));
                    }
                    _ => {
                        let ended = pairs.len() + which as usize % 4;
                        if let Some(&send) = kept.get(ended) {
                            pairing.remove_ended(|other| *other == send);
                            kept.remove(ended);
                        }
                    }
                }
                while let Some((send, buffer)) = pairing.take_pair() {
                    prop_assert_eq!(buffer.sequence, buffers[pairs.len()]);
                    prop_assert_eq!(send, kept[pairs.len()]);
                    pairs.push(send);
                }
                prop_assert!(pairing.waiting_sends() == 0 || pairing.waiting_buffers() == 0);
            }
        }
    }

    #[test]
    fn announcements_are_in_order_and_limited() {
        let mut pairing = Pairing::<()>::new(2, 2);
        assert_eq!(pairing.announce(buffer(1)), Err(Violation::Sequence { expected: 0, found: 1 }));
        assert_eq!(pairing.announce(buffer(0)), Ok(()));
        assert_eq!(pairing.announce(buffer(1)), Ok(()));
        assert_eq!(pairing.announce(buffer(2)), Err(Violation::TooManyBuffers { limit: 2 }));
    }
}
