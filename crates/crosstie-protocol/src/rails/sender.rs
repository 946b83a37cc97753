//! The sender's table of messages: which parts are under way on which rail, and which must be sent again.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::{FenceEntry, Immediate, MAX_ATTEMPTS, MAX_GROUP, MAX_RAILS, MAX_SLOTS, Mask, rails_of};

/// A range of one buffer of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// First byte.
    pub offset: u32,
    /// Number of bytes.
    pub len: u32,
}

/// The bytes of one attempt on one rail.
#[derive(Clone, Copy, Debug, Default)]
pub struct Part {
    /// The attempt.
    pub attempt: u8,
    /// The rail.
    pub rail: u8,
    /// Where it is.
    pub state: PartState,
    /// For each buffer of the message the bytes on this rail.
    pub chunks: [Chunk; MAX_GROUP],
}

/// The state of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PartState {
    /// Posted.
    #[default]
    Posted,
    /// Its rail failed; the receiver has been asked whether it arrived.
    Fenced,
    /// It arrived.
    Done,
    /// It is lost, and must be sent again.
    Lost,
    /// It was lost, and a later attempt carries its bytes.
    Replaced,
}

impl Part {
    /// Bytes of all chunks.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| u64::from(chunk.len)).sum()
    }
}

/// A message cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The slot is in use.
    #[error("the slot of message {0} is in use")]
    SlotInUse(u64),
    /// Parts of the message were lost too often.
    #[error("parts of message {0} were lost more often than it can be sent again")]
    TooManyAttempts(u64),
}

/// A message over one rail needs the beginning only.
#[derive(Debug, Default)]
#[repr(C)]
struct Slot {
    message: u64,
    is_open: bool,
    count: u8,
    /// The number of the next attempt.
    attempts: u8,
    /// The rails of attempt 0.
    mask: Mask,
    /// Parts that are not done.
    pending: u16,
    /// Parts of attempt 0; those of the rails in `mask` are valid.
    first: [Part; MAX_RAILS],
    /// Parts of later attempts. Allocates only when a rail has failed.
    again: Vec<Part>,
}

impl Slot {
    fn parts(&mut self) -> impl Iterator<Item = &mut Part> {
        let mask = self.mask;
        let first = self.first.iter_mut().enumerate().filter(move |(rail, _)| mask & (1 << rail) != 0);
        first.map(|(_, part)| part).chain(self.again.iter_mut())
    }
}

/// The sender's end of a connection.
#[derive(Debug)]
pub struct Sender {
    slots: Box<[Slot]>,
    next: u64,
    open: usize,
    /// Parts that are lost and not sent again yet.
    lost: usize,
}

impl Sender {
    /// A sender without messages. `slots` is that of the receiver.
    pub fn new(slots: usize) -> Sender {
        assert!(slots.is_power_of_two() && slots <= MAX_SLOTS);
        Sender { slots: (0..slots).map(|_| Slot::default()).collect(), next: 0, open: 0, lost: 0 }
    }

    /// The number of the next message.
    #[inline]
    pub fn next_message(&self) -> u64 {
        self.next
    }

    /// Messages that are not done.
    #[inline]
    pub fn outstanding(&self) -> usize {
        self.open
    }

    /// Whether the slot of the next message is still in use.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.slots[self.slot_of(self.next)].is_open
    }

    #[inline]
    fn slot_of(&self, message: u64) -> usize {
        message as usize & (self.slots.len() - 1)
    }

    /// The immediate of an attempt.
    #[inline]
    pub fn immediate(&self, message: u64, mask: Mask, attempt: u8, staged: bool) -> Immediate {
        Immediate {
            slot: self.slot_of(message) as u8,
            mask,
            attempt,
            staged,
            generation: Immediate::generation_of(message, self.slots.len()),
        }
    }

    /// Begins the next message, a group of `lens.len()` buffers. `lens[i][r]` bytes of buffer `i` go over rail `r`, in the
    /// order of the rails. A message without bytes goes over `empty_rail`. Returns its number and its mask.
    #[inline]
    pub fn begin(&mut self, lens: &[[u32; MAX_RAILS]], empty_rail: usize) -> Result<(u64, Mask), SendError> {
        let message = self.next;
        let index = self.slot_of(message);
        let slot = &mut self.slots[index];
        if slot.is_open {
            return Err(SendError::SlotInUse(message));
        }
        let mask = mask_of(lens, empty_rail);
        for rail in rails_of(mask) {
            slot.first[rail] = part_on(rail, 0, lens, &[Chunk::default(); MAX_GROUP]);
        }
        slot.is_open = true;
        slot.message = message;
        slot.count = lens.len() as u8;
        slot.attempts = 1;
        slot.mask = mask;
        slot.pending = mask.count_ones() as u16;
        slot.again.clear();
        self.next += 1;
        self.open += 1;
        Ok((message, mask))
    }

    /// The part of a message in an attempt on a rail.
    #[inline]
    pub fn part(&self, message: u64, attempt: u8, rail: usize) -> Option<&Part> {
        let slot = &self.slots[self.slot_of(message)];
        if !slot.is_open || slot.message != message {
            return None;
        }
        if attempt == 0 {
            return slot.first.get(rail).filter(|_| slot.mask & (1 << rail) != 0);
        }
        slot.again.iter().find(|part| part.attempt == attempt && usize::from(part.rail) == rail)
    }

    /// A posted part completed. Returns whether the message is done. A completion that does not belong to a posted part changes
    /// nothing.
    #[inline]
    pub fn part_done(&mut self, message: u64, attempt: u8, rail: usize) -> bool {
        let index = self.slot_of(message);
        let slot = &mut self.slots[index];
        if !slot.is_open || slot.message != message {
            return false;
        }
        let part = if attempt == 0 {
            slot.first.get_mut(rail).filter(|_| slot.mask & (1 << rail) != 0)
        } else {
            slot.again.iter_mut().find(|part| part.attempt == attempt && usize::from(part.rail) == rail)
        };
        let Some(part) = part.filter(|part| part.state == PartState::Posted) else { return false };
        part.state = PartState::Done;
        slot.pending -= 1;
        self.close_if_done(index)
    }

    #[inline]
    fn close_if_done(&mut self, index: usize) -> bool {
        let slot = &mut self.slots[index];
        if slot.pending == 0 {
            slot.is_open = false;
            self.open -= 1;
        }
        !slot.is_open
    }

    /// The receiver says that it has the whole message, whatever is known here about its parts. Returns false if the message is
    /// not under way.
    pub fn message_done(&mut self, message: u64) -> bool {
        let index = self.slot_of(message);
        let slot = &mut self.slots[index];
        if !slot.is_open || slot.message != message {
            return false;
        }
        let lost = slot.parts().filter(|part| part.state == PartState::Lost).count();
        slot.parts().for_each(|part| part.state = PartState::Done);
        slot.pending = 0;
        self.lost -= lost;
        self.close_if_done(index)
    }

    /// The rail failed and is not used any more. Calls `each` with what to ask the receiver: an entry for each message that is
    /// not done, with its parts on this rail. Parts that were acknowledged are asked for, too: a device can fail after the
    /// acknowledgement and before the receiver's completion.
    pub fn fail_rail(&mut self, rail: usize, mut each: impl FnMut(FenceEntry)) {
        let slots = self.slots.len();
        for (index, slot) in self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.is_open) {
            let (mut attempts, mut masks, mut reopened) = (0u16, 0u64, 0);
            for part in slot.parts() {
                masks |= 1 << (4 * part.attempt + part.rail);
                let is_asked = matches!(part.state, PartState::Posted | PartState::Done);
                if usize::from(part.rail) == rail && is_asked {
                    reopened += u16::from(part.state == PartState::Done);
                    part.state = PartState::Fenced;
                    attempts |= 1 << part.attempt;
                }
            }
            slot.pending += reopened;
            let generation = Immediate::generation_of(slot.message, slots);
            each(FenceEntry { slot: index as u8, generation, attempts, masks });
        }
    }

    /// The receiver's answer for one message: the named parts have arrived, the other fenced parts of the rail are lost. Calls
    /// `done` with the message if it is done.
    pub fn fence_answer(&mut self, rail: usize, entry: FenceEntry, mut done: impl FnMut(u64)) {
        let slots = self.slots.len();
        let Some(slot) = self.slots.get_mut(usize::from(entry.slot)) else { return };
        if !slot.is_open || Immediate::generation_of(slot.message, slots) != entry.generation {
            return;
        }
        let (mut arrived, mut lost) = (0, 0);
        for part in slot.parts() {
            if usize::from(part.rail) == rail && part.state == PartState::Fenced {
                if entry.attempts & (1 << part.attempt) != 0 {
                    part.state = PartState::Done;
                    arrived += 1;
                } else {
                    part.state = PartState::Lost;
                    lost += 1;
                }
            }
        }
        slot.pending -= arrived;
        self.lost += lost;
        let message = slot.message;
        if arrived > 0 && self.close_if_done(usize::from(entry.slot)) {
            done(message);
        }
    }

    /// Whether lost parts wait to be sent again.
    #[inline]
    pub fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// A lost part that must be sent again: its message and its bytes.
    pub fn next_lost(&mut self) -> Option<(u64, u8, [Chunk; MAX_GROUP])> {
        if self.lost == 0 {
            return None;
        }
        for slot in self.slots.iter_mut().filter(|slot| slot.is_open) {
            let (message, count) = (slot.message, slot.count);
            if let Some(part) = slot.parts().find(|part| part.state == PartState::Lost) {
                return Some((message, count, part.chunks));
            }
        }
        None
    }

    /// Sends the part that [`Sender::next_lost`] returned again, as a new attempt: `lens` as in [`Sender::begin`], for the bytes of
    /// the lost part. Returns the attempt and its mask.
    pub fn replay(
        &mut self,
        message: u64,
        lens: &[[u32; MAX_RAILS]],
        empty_rail: usize,
    ) -> Result<(u8, Mask), SendError> {
        let index = self.slot_of(message);
        let slot = &mut self.slots[index];
        if usize::from(slot.attempts) >= MAX_ATTEMPTS {
            return Err(SendError::TooManyAttempts(message));
        }
        let attempt = slot.attempts;
        let Some(part) = slot.parts().find(|part| part.state == PartState::Lost) else {
            return Err(SendError::SlotInUse(message));
        };
        part.state = PartState::Replaced;
        let from = part.chunks;
        let mask = mask_of(lens, empty_rail);
        slot.attempts += 1;
        slot.pending += mask.count_ones() as u16 - 1;
        slot.again.extend(rails_of(mask).map(|rail| part_on(rail, attempt, lens, &from)));
        self.lost -= 1;
        Ok((attempt, mask))
    }

    /// Messages that are not done, to end them.
    pub fn open_messages(&self) -> impl Iterator<Item = u64> {
        let first = self.next.saturating_sub(self.slots.len() as u64);
        (first..self.next).filter(|message| {
            let slot = &self.slots[self.slot_of(*message)];
            slot.is_open && slot.message == *message
        })
    }
}

/// The rails with bytes; `empty_rail` if there are none.
#[inline]
fn mask_of(lens: &[[u32; MAX_RAILS]], empty_rail: usize) -> Mask {
    let has_bytes = |rail: usize| lens.iter().any(|lens| lens[rail] > 0);
    let mask = (0..MAX_RAILS).fold(0, |mask, rail| mask | u8::from(has_bytes(rail)) << rail);
    if mask == 0 { 1 << empty_rail } else { mask }
}

/// The part on `rail` of the chunks `from`, split by `lens`.
#[inline]
fn part_on(rail: usize, attempt: u8, lens: &[[u32; MAX_RAILS]], from: &[Chunk; MAX_GROUP]) -> Part {
    let mut chunks = [Chunk::default(); MAX_GROUP];
    for ((chunk, lens), from) in chunks.iter_mut().zip(lens).zip(from) {
        let before: u32 = lens[..rail].iter().sum();
        *chunk = Chunk { offset: from.offset + before, len: lens[rail] };
    }
    Part { attempt, rail: rail as u8, state: PartState::Posted, chunks }
}
