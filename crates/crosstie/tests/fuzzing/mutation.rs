//! Makes new inputs from known ones.

use super::super::rng::Random;
use super::coverage::Comparison;

pub(super) struct Mutator {
    random: Random,
    max_len: usize,
}

impl Mutator {
    pub(super) fn new(random: Random, max_len: usize) -> Mutator {
        Mutator { random, max_len }
    }

    /// A mutation of one of `inputs`. `comparisons` are operands that the program compared during the last inputs.
    pub(super) fn mutate(&mut self, inputs: &[Vec<u8>], comparisons: &[Comparison]) -> Vec<u8> {
        let mut bytes = inputs[self.random.index(inputs.len())].clone();
        for _ in 0..1 << self.random.below(4) {
            self.mutate_once(&mut bytes, inputs, comparisons);
        }
        bytes.truncate(self.max_len);
        bytes
    }

    fn mutate_once(&mut self, bytes: &mut Vec<u8>, inputs: &[Vec<u8>], comparisons: &[Comparison]) {
        let (len, at) = (bytes.len(), self.random.index(bytes.len()));
        match self.random.below(12) {
            // Change a bit, a byte or a number.
            0 if len > 0 => bytes[at] ^= 1 << self.random.below(8),
            1 if len > 0 => bytes[at] = self.random.next() as u8,
            2 if len > 0 => {
                let width = 1 << self.random.below(4);
                let change = self.random.below(35) as i64 - 17;
                self.change_number(bytes, at, width, |old| old.wrapping_add(change as u64));
            }
            3 if len > 0 => {
                let width = 1 << self.random.below(4);
                let new = self.boundary_number();
                self.change_number(bytes, at, width, |_| new);
            }
            // Insert, remove, repeat, or copy within the input.
            4 => {
                let more = self.short_length();
                let fill = self.random.next() as u8;
                bytes.splice(at..at, std::iter::repeat_n(fill, more));
            }
            5 if len > 0 => {
                let end = (at + 1 + self.short_length()).min(len);
                bytes.drain(at..end);
            }
            6 => bytes.truncate(at),
            7 if len > 0 => {
                let end = (at + 1 + self.random.index(64)).min(len);
                let part = bytes[at..end].to_vec();
                let to = self.random.index(len);
                bytes.splice(to..to, part);
            }
            8 if len > 0 => {
                let end = (at + 1 + self.random.index(64)).min(len);
                let part = bytes[at..end].to_vec();
                let to = self.random.index(len + 1 - part.len());
                bytes[to..to + part.len()].copy_from_slice(&part);
            }
            // Continue with a part of another input.
            9 => {
                let other = &inputs[self.random.index(inputs.len())];
                let from = self.random.index(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            // Give the program the operand that it compared with.
            _ if !comparisons.is_empty() => self.use_comparison(bytes, comparisons),
            _ => {
                let more = self.random.index(40);
                bytes.extend((0..more).map(|_| self.random.next() as u8));
            }
        }
    }

    fn use_comparison(&mut self, bytes: &mut [u8], comparisons: &[Comparison]) {
        let Comparison { width, mut from, mut to } = comparisons[self.random.index(comparisons.len())];
        if self.random.below(2) == 0 {
            (from, to) = (to, from);
        }
        // Also numbers next to the operand: most limits are inclusive or exclusive by mistake.
        to = to.wrapping_add(self.random.below(3)).wrapping_sub(1);
        let (from, to) = (from.to_le_bytes(), to.to_le_bytes());
        // The program may have widened a shorter number of the input before it compared.
        for width in [width, width / 2, width / 4].into_iter().filter(|width| *width > 0) {
            let found = (0..bytes.len().saturating_sub(width - 1))
                .filter(|at| bytes[*at..at + width] == from[..width])
                .collect::<Vec<_>>();
            if !found.is_empty() {
                let at = found[self.random.index(found.len())];
                bytes[at..at + width].copy_from_slice(&to[..width]);
                return;
            }
        }
        if bytes.len() >= width {
            let at = self.random.index(bytes.len() - width + 1);
            bytes[at..at + width].copy_from_slice(&to[..width]);
        }
    }

    fn change_number(&mut self, bytes: &mut [u8], at: usize, width: usize, change: impl FnOnce(u64) -> u64) {
        let at = at.min(bytes.len().saturating_sub(width));
        let width = width.min(bytes.len() - at);
        let mut old = [0; 8];
        old[..width].copy_from_slice(&bytes[at..at + width]);
        let new = change(u64::from_le_bytes(old)).to_le_bytes();
        bytes[at..at + width].copy_from_slice(&new[..width]);
    }

    /// Below 64; small numbers are more frequent.
    fn short_length(&mut self) -> usize {
        let limit = 1 << self.random.below(7);
        self.random.index(limit)
    }

    fn boundary_number(&mut self) -> u64 {
        let power = 1u64 << self.random.below(64);
        match self.random.below(6) {
            0 => 0,
            1 => u64::MAX,
            2 => power,
            3 => power - 1,
            4 => power + 1,
            _ => self.random.below(100),
        }
    }
}
