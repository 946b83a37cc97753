//! Packets that came before one that is missing. They wait in the receive buffer until their turn comes.
//!
//! ```text
//!   expected 4      held:  5 -> 6 -> 9        missing: 4, 7, 8
//! ```
//!
//! One table for all senders, as long as the receive table; a chain of records for each sender, in the order of their numbers.

use alloc::boxed::Box;

use super::buffer_ring::{BufferRing, Entry};

const NONE: u32 = u32::MAX;

/// A packet in the receive buffer that waits for an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct HeldPacket {
    pub(super) seq: u32,
    pub(super) flags: u8,
    pub(super) aux: u32,
    pub(super) len: u32,
    pub(super) entry: Entry,
}

/// The held packets of one sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Chain {
    first: u32,
    last: u32,
}

impl Chain {
    pub(super) const EMPTY: Chain = Chain { first: NONE, last: NONE };

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Record {
    packet: HeldPacket,
    next: u32,
}

/// The held packets of all senders.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct HeldTable {
    records: Box<[Record]>,
}

/// In place of a record that is not used, so that equal states of a model are equal.
const UNUSED: Record = Record {
    packet: HeldPacket { seq: 0, flags: 0, aux: 0, len: 0, entry: Entry { number: 0, offset: 0 } },
    next: NONE,
};

impl HeldTable {
    /// A table for a receive buffer with this many entries.
    pub(super) fn new(entries: usize) -> Self {
        HeldTable { records: (0..entries).map(|_| UNUSED).collect() }
    }

    /// Adds a packet to its place in the chain. `expected`: the number that its sender's next packet must have. Returns `false` if
    /// the chain has a packet with this number.
    pub(super) fn insert(
        &mut self,
        ring: &BufferRing,
        chain: &mut Chain,
        expected: u32,
        packet: HeldPacket,
    ) -> bool {
        let ahead = |seq: u32| seq.wrapping_sub(expected);
        let index = ring.index(packet.entry.number) as u32;
        let mut before = NONE;
        // Nearly always behind the last one.
        if chain.last != NONE && ahead(self.records[chain.last as usize].packet.seq) < ahead(packet.seq) {
            before = chain.last;
        } else {
            let mut at = chain.first;
            while at != NONE && ahead(self.records[at as usize].packet.seq) < ahead(packet.seq) {
                before = at;
                at = self.records[at as usize].next;
            }
            if at != NONE && self.records[at as usize].packet.seq == packet.seq {
                return false;
            }
        }
        let next = match before {
            NONE => core::mem::replace(&mut chain.first, index),
            before => core::mem::replace(&mut self.records[before as usize].next, index),
        };
        if next == NONE {
            chain.last = index;
        }
        self.records[index as usize] = Record { packet, next };
        true
    }

    /// Whether the chain has a packet with this number.
    pub(super) fn contains(&self, chain: &Chain, seq: u32) -> bool {
        self.iter(chain).any(|packet| packet.seq == seq)
    }

    /// The first packet of the chain.
    pub(super) fn first(&self, chain: &Chain) -> Option<&HeldPacket> {
        self.records.get(chain.first as usize).map(|record| &record.packet)
    }

    /// Takes the first packet out of the chain.
    pub(super) fn pop(&mut self, chain: &mut Chain) -> Option<HeldPacket> {
        let record = self.records.get_mut(chain.first as usize)?;
        let Record { packet, next } = core::mem::replace(record, UNUSED);
        chain.first = next;
        if next == NONE {
            chain.last = NONE;
        }
        Some(packet)
    }

    /// The packets of the chain, in the order of their numbers.
    pub(super) fn iter(&self, chain: &Chain) -> impl Iterator<Item = &HeldPacket> {
        let mut at = chain.first;
        core::iter::from_fn(move || {
            let record = self.records.get(at as usize)?;
            at = record.next;
            Some(&record.packet)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The oracle: a sorted set of distances from the expected number.
        #[test]
        fn chains_are_sorted_and_have_each_number_once(
            expected in prop_oneof![Just(0u32), Just(u32::MAX - 5), any::<u32>()],
            steps in prop::collection::vec((any::<bool>(), 1u32..20), 0..60),
        ) {
            let mut ring = BufferRing::new(1 << 20, 64);
            let mut table = HeldTable::new(ring.entries());
            let mut chain = Chain::EMPTY;
            let mut oracle = BTreeSet::new();
            for (inserts, ahead) in steps {
                if inserts {
                    let entry = ring.take(8).unwrap();
                    let seq = expected.wrapping_add(ahead);
                    prop_assert_eq!(table.contains(&chain, seq), oracle.contains(&ahead));
                    let packet = HeldPacket { seq, flags: 0, aux: ahead, len: 8, entry };
                    let inserted = table.insert(&ring, &mut chain, expected, packet);
                    prop_assert_eq!(inserted, oracle.insert(ahead));
                    if !inserted {
                        ring.free(entry.number);
                    }
                } else {
                    let popped = table.pop(&mut chain);
                    prop_assert_eq!(popped.map(|packet| packet.aux), oracle.pop_first());
                    if let Some(packet) = popped {
                        ring.free(packet.entry.number);
                    }
                }
                let held: Vec<u32> = table.iter(&chain).map(|packet| packet.aux).collect();
                prop_assert_eq!(&held, &oracle.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(chain.is_empty(), oracle.is_empty());
                prop_assert_eq!(table.first(&chain).map(|packet| packet.aux), held.first().copied());
            }
        }
    }
}
