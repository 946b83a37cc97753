//! The limit of `bench device`: a payload, a completion entry, and a count of consumed messages.
//!
//! ```text
//! region   256 consumed | 384 word | 4096 to the follower: entries, payloads | to the leader: entries, payloads
//! ```
//!
//! An entry is a cache line with the number of its message. The sender publishes it after the payload, as a device does with a
//! completion.

use core::hint::black_box;
use core::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::time::{Duration, Instant};

use super::{END, LARGE, RINGS, Throughput, wait_for_number};
use crate::device::{Op, Shape};
use crate::error::Error;
use crate::runner::{Exchange, Part};
use crate::shared_region::SharedRegion;
use crate::slots::stride;
use crate::spin_wait::SpinWait;

const CONSUMED: usize = 256;
const WORD: usize = 384;
const ENTRY: usize = 64;

/// Bytes of a payload that a receiver reads: the first cache line.
pub(crate) const BYTES_READ: usize = 64;

/// Direction of a message.
#[derive(Clone, Copy)]
enum Direction {
    ToFollower,
    ToLeader,
}

/// One side of the plain code.
pub(crate) struct PlainDevice<'a> {
    region: &'a SharedRegion,
    part: Part,
    op: Op,
    payload: usize,
    depth: usize,
    spin: SpinWait,
    /// Operations between two reads of the clock.
    per_clock_read: u64,
    /// Messages so far, and the slot of the next one.
    seq: u64,
    slot: usize,
    message: Vec<u8>,
}

impl<'a> PlainDevice<'a> {
    /// Bytes of the region that it takes.
    pub(crate) fn region_len(payload: usize, depth: usize) -> usize {
        RINGS + 2 * depth * (ENTRY + stride(payload))
    }

    pub(crate) fn new(region: &'a SharedRegion, part: Part, shape: Shape, spin: SpinWait) -> PlainDevice<'a> {
        let Shape { op, payload, depth } = shape;
        let per_clock_read = if payload < LARGE { 64 } else { 1 };
        let message = vec![1; payload];
        PlainDevice { region, part, op, payload, depth, spin, per_clock_read, seq: 0, slot: 0, message }
    }

    /// Round trips: one message to the follower, one back.
    fn lead_ping_pong(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.repeat(self.per_clock_read, slice, |plain, end| {
            plain.seq += 1;
            plain.send(Direction::ToFollower, end);
            plain.receive(Direction::ToLeader)?;
            Ok(())
        })
    }

    /// The other side of [`PlainDevice::lead_ping_pong`].
    fn follow_ping_pong(&mut self) -> Result<(), Error> {
        loop {
            self.seq += 1;
            let end = self.receive(Direction::ToFollower)?;
            self.send(Direction::ToLeader, 0);
            if end {
                return Ok(());
            }
        }
    }

    /// Messages in one direction, at most `depth` ahead of the receiver.
    fn lead_stream(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let mut consumed = self.seq;
        let depth = self.depth as u64;
        let throughput = self.repeat(self.per_clock_read, slice, |plain, end| {
            while plain.seq - consumed >= depth {
                // Acquire, partner: the Release in `follow_stream`. The slots are free.
                consumed = plain.region.word(CONSUMED).load(Acquire);
                plain.spin.idle()?;
            }
            plain.spin.reset();
            plain.seq += 1;
            plain.send(Direction::ToFollower, end);
            plain.advance();
            Ok(())
        })?;
        wait_for_number(self.region.word(CONSUMED), self.seq, &mut self.spin)?;
        Ok(throughput)
    }

    /// The other side of [`PlainDevice::lead_stream`]: publishes the number of consumed messages every quarter of the depth.
    fn follow_stream(&mut self) -> Result<(), Error> {
        let quarter = (self.depth as u64 / 4).max(1);
        let mut published = self.seq;
        loop {
            self.seq += 1;
            let end = self.receive(Direction::ToFollower)?;
            self.advance();
            if end || self.seq - published >= quarter {
                published = self.seq;
                // Release, partner: the Acquire in `lead_stream`.
                self.region.word(CONSUMED).store(published, Release);
            }
            if end {
                return Ok(());
            }
        }
    }

    /// Copies bytes into memory that the other side maps.
    fn write(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.repeat(self.per_clock_read, slice, |plain, _| {
            plain.seq += 1;
            plain.region.put(plain.payload_at(Direction::ToFollower), plain.numbered());
            plain.advance();
            Ok(())
        })
    }

    /// Copies bytes out of memory that the other side maps.
    fn read(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.repeat(self.per_clock_read, slice, |plain, _| {
            plain.region.get(plain.payload_at(Direction::ToFollower), &mut plain.message);
            black_box(&mut plain.message);
            plain.advance();
            Ok(())
        })
    }

    /// Compare-and-swap on a word that the other side maps.
    fn compare_swap(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let mut value = self.region.word(WORD).load(Acquire);
        self.repeat(self.per_clock_read, slice, |plain, _| {
            if plain.region.word(WORD).compare_exchange(value, value + 1, SeqCst, SeqCst).is_ok() {
                value += 1;
            }
            Ok(())
        })
    }

    /// Fetch-and-add on a word that the other side maps.
    fn fetch_add(&mut self, slice: Duration) -> Result<Throughput, Error> {
        self.repeat(self.per_clock_read, slice, |plain, _| {
            black_box(plain.region.word(WORD).fetch_add(1, SeqCst));
            Ok(())
        })
    }

    /// Repeats `operation` until the time is over; the last one gets the flag [`END`].
    #[inline(always)]
    fn repeat(
        &mut self,
        per_clock_read: u64,
        slice: Duration,
        mut operation: impl FnMut(&mut Self, u64) -> Result<(), Error>,
    ) -> Result<Throughput, Error> {
        let begin = Instant::now();
        let mut operations = 0;
        loop {
            for _ in 0..per_clock_read {
                operation(self, 0)?;
            }
            operations += per_clock_read;
            let time = begin.elapsed();
            if time >= slice {
                operation(self, END)?;
                return Ok(Throughput { operations, time });
            }
        }
    }

    #[inline]
    fn send(&mut self, direction: Direction, end: u64) {
        self.region.put(self.payload_at(direction), self.numbered());
        // Release, partner: the Acquire in `wait_for_number`. The payload is complete.
        self.region.word(self.entry_at(direction)).store(self.seq | end, Release);
    }

    /// Receives a message. Returns whether it was the last one.
    #[inline]
    fn receive(&mut self, direction: Direction) -> Result<bool, Error> {
        let end = wait_for_number(self.region.word(self.entry_at(direction)), self.seq, &mut self.spin)?;
        let mut seen = [0; BYTES_READ];
        let seen = &mut seen[..self.payload.min(BYTES_READ)];
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

impl Exchange for PlainDevice<'_> {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        let is_ping_pong = Shape { op: self.op, payload: self.payload, depth: self.depth }.is_ping_pong();
        match (self.part, self.op) {
            (Part::Lead, _) if is_ping_pong => self.lead_ping_pong(slice),
            (Part::Lead, Op::WriteImm | Op::Send) => self.lead_stream(slice),
            (Part::Lead, Op::Write) => self.write(slice),
            (Part::Lead, Op::Read) => self.read(slice),
            (Part::Lead, Op::Cas) => self.compare_swap(slice),
            (Part::Lead, Op::Faa) => self.fetch_add(slice),
            (Part::Follow, _) if is_ping_pong => return self.follow_ping_pong().map(|()| None),
            (Part::Follow, op) if op.is_received() => return self.follow_stream().map(|()| None),
            _ => return Ok(None),
        }
        .map(Some)
    }
}
