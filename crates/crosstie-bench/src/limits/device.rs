//! What `bench device` is measured against: payload, a completion entry, a count of what was consumed.
//!
//! ```text
//! region   256 consumed | 384 word | 4096 there: entries, payloads | back: entries, payloads
//! ```
//!
//! An entry is a line with the number of its message, published after the payload, as a completion is.

use core::hint::black_box;
use core::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::time::{Duration, Instant};

use super::{END, RINGS, Throughput, await_number};
use crate::error::Error;
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;

const CONSUMED: usize = 256;
const WORD: usize = 384;
const ENTRY: usize = 64;

/// What a receiver reads of a payload: its first line.
pub(crate) const LOOKED_AT: usize = 64;

/// Which direction a message goes.
#[derive(Clone, Copy)]
enum Direction {
    ToFollower,
    ToLeader,
}

/// One side of the plain code.
pub(crate) struct PlainDevice<'a> {
    region: &'a SharedRegion,
    payload: usize,
    depth: usize,
    spin: SpinWait,
    /// Turns between looks at the clock.
    per_look: u64,
    /// Messages so far, and the place of the next one.
    seq: u64,
    slot: usize,
    message: Vec<u8>,
}

impl<'a> PlainDevice<'a> {
    /// How much memory it takes.
    pub(crate) fn region_len(payload: usize, depth: usize) -> usize {
        RINGS + 2 * depth * (ENTRY + stride(payload))
    }

    pub(crate) fn new(
        region: &'a SharedRegion,
        payload: usize,
        depth: usize,
        spin: SpinWait,
    ) -> PlainDevice<'a> {
        let per_look = if payload < 4096 { 64 } else { 1 };
        PlainDevice { region, payload, depth, spin, per_look, seq: 0, slot: 0, message: vec![1; payload] }
    }

    /// A message there, a message back.
    pub(crate) fn lead_ping_pong(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.turns(self.per_look, slice, |plain, end| {
            plain.seq += 1;
            plain.send(Direction::ToFollower, end);
            plain.receive(Direction::ToLeader)?;
            Ok(())
        })
    }

    /// The other side of [`PlainDevice::lead_ping_pong`].
    pub(crate) fn follow_ping_pong(&mut self) -> Result<(), Error> {
        loop {
            self.seq += 1;
            let end = self.receive(Direction::ToFollower)?;
            self.send(Direction::ToLeader, 0);
            if end {
                return Ok(());
            }
        }
    }

    /// Messages one direction, no more than the depth ahead of the receiver.
    pub(crate) fn lead_stream(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let mut consumed = self.seq;
        let depth = self.depth as u64;
        let throughput = self.turns(self.per_look, slice, |plain, end| {
            while plain.seq - consumed >= depth {
                // Acquire, partner: the Release in `follow_stream`. The places are free.
                consumed = plain.region.word(CONSUMED).load(Acquire);
                plain.spin.idle()?;
            }
            plain.spin.reset();
            plain.seq += 1;
            plain.send(Direction::ToFollower, end);
            plain.advance();
            Ok(())
        })?;
        await_number(self.region.word(CONSUMED), self.seq, &mut self.spin)?;
        Ok(throughput)
    }

    /// The other side of [`PlainDevice::lead_stream`]: tells every quarter of the depth what it has consumed.
    pub(crate) fn follow_stream(&mut self) -> Result<(), Error> {
        let quarter = (self.depth as u64 / 4).max(1);
        let mut told = self.seq;
        loop {
            self.seq += 1;
            let end = self.receive(Direction::ToFollower)?;
            self.advance();
            if end || self.seq - told >= quarter {
                told = self.seq;
                // Release, partner: the Acquire in `lead_stream`.
                self.region.word(CONSUMED).store(told, Release);
            }
            if end {
                return Ok(());
            }
        }
    }

    /// Bytes into memory that the other side maps.
    pub(crate) fn write(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.turns(self.per_look, slice, |plain, _| {
            plain.seq += 1;
            plain.region.put(plain.payload_at(Direction::ToFollower), plain.numbered());
            plain.advance();
            Ok(())
        })
    }

    /// Bytes out of memory that the other side maps.
    pub(crate) fn read(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.turns(self.per_look, slice, |plain, _| {
            plain.region.get(plain.payload_at(Direction::ToFollower), &mut plain.message);
            black_box(&mut plain.message);
            plain.advance();
            Ok(())
        })
    }

    /// Compare-and-swap on a word that the other side maps.
    pub(crate) fn compare_swap(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let mut value = self.region.word(WORD).load(Acquire);
        self.turns(self.per_look, slice, |plain, _| {
            if plain.region.word(WORD).compare_exchange(value, value + 1, SeqCst, SeqCst).is_ok() {
                value += 1;
            }
            Ok(())
        })
    }

    /// Fetch-and-add on a word that the other side maps.
    pub(crate) fn fetch_add(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.turns(self.per_look, slice, |plain, _| {
            black_box(plain.region.word(WORD).fetch_add(1, SeqCst));
            Ok(())
        })
    }

    /// Makes turns until the time is over; the last one is marked.
    #[inline(always)]
    fn turns(
        &mut self,
        per_look: u64,
        slice: Duration,
        mut turn: impl FnMut(&mut Self, u64) -> Result<(), Error>,
    ) -> Result<Throughput, Error> {
        let begin = Instant::now();
        let mut turns = 0;
        loop {
            for _ in 0..per_look {
                turn(self, 0)?;
            }
            turns += per_look;
            let time = begin.elapsed();
            if time >= slice {
                turn(self, END)?;
                return Ok(Throughput { operations: turns, time });
            }
        }
    }

    #[inline]
    fn send(&mut self, direction: Direction, end: u64) {
        self.region.put(self.payload_at(direction), self.numbered());
        // Release, partner: the Acquire in `await_number`. The payload is there.
        self.region.word(self.entry_at(direction)).store(self.seq | end, Release);
    }

    /// Whether it was the last message.
    #[inline]
    fn receive(&mut self, direction: Direction) -> Result<bool, Error> {
        let end = await_number(self.region.word(self.entry_at(direction)), self.seq, &mut self.spin)?;
        let mut seen = [0; LOOKED_AT];
        let seen = &mut seen[..self.payload.min(LOOKED_AT)];
        self.region.get(self.payload_at(direction), seen);
        black_box(seen);
        Ok(end)
    }

    #[inline]
    fn numbered(&mut self) -> &[u8] {
        if let Some(number) = self.message.first_chunk_mut() {
            *number = self.seq.to_le_bytes();
        }
        &self.message
    }

    #[inline]
    fn advance(&mut self) {
        self.slot += 1;
        if self.slot == self.depth {
            self.slot = 0;
        }
    }

    #[inline]
    fn entry_at(&self, direction: Direction) -> usize {
        self.ring_at(direction) + self.slot * ENTRY
    }

    #[inline]
    fn payload_at(&self, direction: Direction) -> usize {
        self.ring_at(direction) + self.depth * ENTRY + self.slot * stride(self.payload)
    }

    #[inline]
    fn ring_at(&self, direction: Direction) -> usize {
        match direction {
            Direction::ToFollower => RINGS,
            Direction::ToLeader => RINGS + self.depth * (ENTRY + stride(self.payload)),
        }
    }
}

fn stride(payload: usize) -> usize {
    payload.max(1).next_multiple_of(64)
}
