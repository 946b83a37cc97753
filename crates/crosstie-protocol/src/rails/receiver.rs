//! The receiver's table of requests: which parts have arrived, and which request is complete.

use alloc::boxed::Box;

use super::{FenceEntry, Immediate, MAX_ATTEMPTS, MAX_RAILS, MAX_SLOTS, Mask, Violation};

/// One slot. The masks of the 16 attempts are packed into words, four bits each.
///
/// One cache line: a message over one rail needs this slot and nothing else here.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Slot {
    is_open: bool,
    message: u64,
    /// Bytes of the request's buffer, or of its buffers together.
    room: u64,
    /// The mask of each attempt; zero until its first part arrives.
    expected: u64,
    /// The rails whose part has arrived, per attempt.
    seen: u64,
    /// The rails whose part was lost, per attempt.
    void: u64,
    /// Lost parts: attempts 1 to `lost` carry them.
    lost: u8,
    bytes: u64,
    staged: bool,
}

/// What an arrival means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// More parts are to come.
    Partial,
    /// The request of this message is complete.
    Complete {
        /// The message.
        message: u64,
        /// The bytes of all parts together. For a group the sizes are in its [`Record`](super::Record).
        bytes: u64,
        /// Whether the bytes are in the staging memory.
        staged: bool,
    },
}

/// The receiver's end of a connection.
///
/// ```
/// use crosstie_protocol::rails::{Arrival, Immediate, Receiver};
/// let mut receiver = Receiver::new(256, 2);
/// let message = receiver.post(1000).unwrap();
/// let imm = Immediate { slot: 0, mask: 0b11, attempt: 0, staged: false, generation: 0 };
/// assert_eq!(receiver.arrive(1, imm, 400).unwrap(), Arrival::Partial);
/// assert_eq!(receiver.arrive(0, imm, 500).unwrap(), Arrival::Complete { message, bytes: 900, staged: false });
/// ```
#[derive(Debug)]
pub struct Receiver {
    slots: Box<[Slot]>,
    rails: usize,
    /// Requests posted so far; the number of the next message.
    posted: u64,
    open: usize,
    /// The rails of the message that arrived last, see [`Receiver::recent_mask`].
    recent: Mask,
}

#[inline]
fn nibble(word: u64, attempt: u8) -> Mask {
    (word >> (4 * u32::from(attempt & 15))) as Mask & 15
}

impl Receiver {
    /// A receiver without requests. `slots` is a power of two of at most [`MAX_SLOTS`], `rails` at most [`MAX_RAILS`].
    pub fn new(slots: usize, rails: usize) -> Receiver {
        assert!(slots.is_power_of_two() && slots <= MAX_SLOTS && (1..=MAX_RAILS).contains(&rails));
        let slots = alloc::vec![Slot::default(); slots].into_boxed_slice();
        Receiver { slots, rails, posted: 0, open: 0, recent: (1 << rails) - 1 }
    }

    /// Requests posted and not complete.
    #[inline]
    pub fn outstanding(&self) -> usize {
        self.open
    }

    /// The number of the next message.
    pub fn next_message(&self) -> u64 {
        self.posted
    }

    /// The rails of the message that arrived last; all rails before the first.
    pub fn recent_mask(&self) -> Mask {
        self.recent
    }

    /// Sets what [`Receiver::recent_mask`] returns before the first arrival.
    pub fn set_recent_mask(&mut self, mask: Mask) {
        self.recent = mask;
    }

    /// Opens a request with room for so many bytes; returns the number of its message. `None` if the slot of the next message
    /// is still in use.
    #[inline]
    pub fn post(&mut self, room: u64) -> Option<u64> {
        let message = self.posted;
        let index = self.slot_of(message);
        let slot = &mut self.slots[index];
        if slot.is_open {
            return None;
        }
        *slot = Slot { is_open: true, message, room, ..Slot::default() };
        self.posted += 1;
        self.open += 1;
        Some(message)
    }

    #[inline]
    fn slot_of(&self, message: u64) -> usize {
        message as usize & (self.slots.len() - 1)
    }

    /// Whether the request of this message is outstanding.
    pub fn is_open(&self, message: u64) -> bool {
        let slot = &self.slots[self.slot_of(message)];
        slot.is_open && slot.message == message
    }

    /// Whether no part of this message has arrived yet.
    pub fn is_untouched(&self, message: u64) -> bool {
        self.is_open(message) && self.slots[self.slot_of(message)].expected == 0
    }

    /// Outstanding messages, oldest first.
    pub fn open_messages(&self) -> impl Iterator<Item = u64> {
        let first = self.posted.saturating_sub(self.slots.len() as u64);
        (first..self.posted).filter(|message| self.is_open(*message))
    }

    /// A part arrived on `rail` with `imm` and `bytes` bytes.
    #[inline]
    pub fn arrive(&mut self, rail: usize, imm: Immediate, bytes: u32) -> Result<Arrival, Violation> {
        let Immediate { slot, mask, attempt, staged, generation } = imm;
        let slots = self.slots.len();
        let here: Mask = 1 << rail;
        let Some(state) = self.slots.get_mut(usize::from(slot)) else {
            return Err(Violation::UnknownSlot { rail, slot });
        };
        let expected = Immediate::generation_of(state.message, slots);
        if !state.is_open {
            return Err(Violation::UnknownSlot { rail, slot });
        }
        if generation != expected {
            return Err(Violation::Late { rail, slot, got: generation, expected });
        }
        if mask & here == 0 || u32::from(mask) >= 1 << self.rails {
            return Err(Violation::BadMask { rail, slot, mask });
        }
        if attempt > state.lost {
            return Err(Violation::BadAttempt { rail, slot, attempt, lost: state.lost });
        }
        let known = nibble(state.expected, attempt);
        if known != 0 && known != mask {
            return Err(Violation::BadMask { rail, slot, mask });
        }
        if (nibble(state.seen, attempt) | nibble(state.void, attempt)) & here != 0 {
            return Err(Violation::Duplicate { rail, slot, attempt });
        }
        state.bytes += u64::from(bytes);
        if state.bytes > state.room {
            return Err(Violation::TooLong { slot, got: state.bytes, room: state.room });
        }
        let at = 4 * u32::from(attempt);
        state.expected |= u64::from(mask) << at;
        state.seen |= u64::from(here) << at;
        state.staged |= staged;
        self.recent = mask;
        Ok(self.check_complete(usize::from(slot)))
    }

    /// Closes the slot if all parts of all attempts have arrived.
    #[inline]
    fn check_complete(&mut self, index: usize) -> Arrival {
        let slot = &mut self.slots[index];
        let arrived = slot.seen | slot.void;
        let is_complete = if slot.lost == 0 {
            slot.expected != 0 && slot.expected & arrived == slot.expected
        } else {
            (0..=slot.lost).all(|attempt| {
                let expected = nibble(slot.expected, attempt);
                expected != 0 && expected & nibble(arrived, attempt) == expected
            })
        };
        if !is_complete {
            return Arrival::Partial;
        }
        slot.is_open = false;
        self.open -= 1;
        Arrival::Complete { message: slot.message, bytes: slot.bytes, staged: slot.staged }
    }

    /// The rail has failed and is closed at this end, so that nothing arrives on it any more. `entry` names parts of a message
    /// that the sender had under way there; returns which of them have arrived. The others are lost: the sender will send them
    /// again as new attempts.
    pub fn fence(&mut self, rail: usize, entry: FenceEntry) -> Result<FenceEntry, Violation> {
        let FenceEntry { slot, generation, attempts, masks } = entry;
        let bad = Violation::BadFence { rail, slot, generation };
        if attempts == 0 {
            // Nothing of it was on this rail; it may have been completed long ago.
            return Ok(entry);
        }
        let here: Mask = 1 << rail;
        let slots = self.slots.len();
        let posted = self.posted;
        let Some(state) = self.slots.get_mut(usize::from(slot)).filter(|_| rail < self.rails) else {
            return Err(bad);
        };
        let used = u64::from(slot) < posted;
        let expected = Immediate::generation_of(state.message, slots);
        let is_current = used && generation == expected;
        if !is_current || !state.is_open {
            // The request is complete, and perhaps its slot is in use again: everything has arrived. The sender can be behind
            // by one use of the slot only, because it needs our clear-to-send for the next one.
            let previous = posted > slots as u64 + u64::from(slot)
                && generation
                    == ((u64::from(expected) + Immediate::GENERATIONS - 1) % Immediate::GENERATIONS) as u16;
            return if is_current || (used && previous) { Ok(entry) } else { Err(bad) };
        }
        let mut arrived = 0;
        for attempt in (0..MAX_ATTEMPTS as u8).filter(|attempt| attempts & (1 << attempt) != 0) {
            if attempt > state.lost {
                return Err(bad);
            }
            let at = 4 * u32::from(attempt);
            let (mask, known) = (nibble(masks, attempt), nibble(state.expected, attempt));
            if mask & here == 0 || u32::from(mask) >= 1 << self.rails || (known != 0 && known != mask) {
                return Err(bad);
            }
            if nibble(state.seen, attempt) & here != 0 {
                arrived |= 1 << attempt;
            } else if nibble(state.void, attempt) & here != 0 || usize::from(state.lost) + 1 >= MAX_ATTEMPTS {
                return Err(bad);
            } else {
                state.expected |= u64::from(mask) << at;
                state.void |= u64::from(here) << at;
                state.lost += 1;
            }
        }
        Ok(FenceEntry { attempts: arrived, ..entry })
    }
}
