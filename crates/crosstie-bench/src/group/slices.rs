//! The measured loops.

use std::time::Instant;

use crosstie::group::{Channel, Group, GroupError, MemberId};
use crosstie::telemetry::Histogram;

use super::plan::{Kind, Plan};
use crate::error::Error;

/// The member to which all others send.
const RECEIVER: usize = 0;

/// One member's part of all slices.
pub(super) struct Slices<'g> {
    kind: Kind,
    group: &'g Group,
    channel: Option<Channel>,
    payload: Vec<u8>,
    received: Vec<u8>,
    /// Next message number of each sender.
    next: Vec<u64>,
    sent: u64,
    contention: f64,
    random: u64,
    errors: u64,
    rounds: u64,
}

fn failed(error: GroupError) -> Error {
    Error::rpc("the group")(error)
}

impl<'g> Slices<'g> {
    pub(super) fn new(plan: &Plan, group: &'g Group) -> Result<Slices<'g>, Error> {
        let channel = match plan.kind {
            Kind::Message => {
                let mut options = group.channel_options();
                if plan.arguments.loss > 0.0 {
                    // The device loses nothing, but this measurement does.
                    options.resend_after = 2_000_000;
                }
                Some(group.open_channel(1, &options).map_err(failed)?)
            }
            _ => None,
        };
        Ok(Slices {
            kind: plan.kind,
            group,
            channel,
            payload: vec![7; plan.arguments.payload as usize],
            received: Vec::with_capacity(plan.arguments.payload as usize),
            next: vec![0; group.members()],
            sent: 0,
            contention: plan.arguments.contention,
            random: 0x9e37_79b9_7f4a_7c15 ^ group.member().index() as u64,
            errors: 0,
            rounds: 0,
        })
    }

    pub(super) fn reset(&mut self) {
        self.errors = 0;
        self.rounds = 0;
    }

    pub(super) fn errors(&self) -> u64 {
        self.errors
    }

    /// Rounds of the barrier, with those that separate slices.
    pub(super) fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Operations that count for one of a slice: barriers are counted once, locks and messages for each member.
    pub(super) fn per_op(&self) -> u64 {
        match self.kind {
            Kind::Barrier => 1,
            Kind::Lock => self.group.members() as u64,
            Kind::Message => self.group.members() as u64 - 1,
        }
    }

    /// Runs `ops` operations. Returns the seconds that they took.
    pub(super) fn run(&mut self, ops: u64, latency: &mut Histogram) -> Result<f64, Error> {
        match self.kind {
            Kind::Barrier => self.run_barriers(ops, latency),
            Kind::Lock => self.run_locks(ops, latency),
            Kind::Message => self.run_stream(ops),
        }
    }

    fn run_barriers(&mut self, ops: u64, latency: &mut Histogram) -> Result<f64, Error> {
        let barrier = self.group.barrier(0);
        barrier.wait().map_err(failed)?;
        self.rounds += 1 + ops;
        let begin = Instant::now();
        let mut last = begin;
        for _ in 0..ops {
            barrier.wait().map_err(failed)?;
            let now = Instant::now();
            latency.record((now - last).as_nanos() as u64);
            last = now;
        }
        Ok((last - begin).as_secs_f64())
    }

    fn run_locks(&mut self, ops: u64, latency: &mut Histogram) -> Result<f64, Error> {
        let (shared, own) = (self.group.lock(0), self.group.lock(self.group.member().index() as u32 + 1));
        self.group.barrier(0).wait().map_err(failed)?;
        let begin = Instant::now();
        for _ in 0..ops {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let contended = (self.random >> 11) as f64 / (1u64 << 53) as f64 <= self.contention;
            let asked = Instant::now();
            let guard = if contended { shared.acquire() } else { own.acquire() }.map_err(failed)?;
            latency.record(asked.elapsed().as_nanos() as u64);
            drop(guard);
        }
        self.group.barrier(0).wait().map_err(failed)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// All members send `ops` messages each to member 0.
    fn run_stream(&mut self, ops: u64) -> Result<f64, Error> {
        let channel = self.channel.clone().ok_or(Error::Protocol)?;
        self.group.barrier(0).wait().map_err(failed)?;
        let begin = Instant::now();
        if self.group.member().index() == RECEIVER {
            for _ in 0..ops * self.per_op() {
                let from = channel.recv_into(&mut self.received).map_err(failed)?;
                self.check(from);
            }
        } else {
            for _ in 0..ops {
                self.stamp();
                channel.send(MemberId::new(RECEIVER), &self.payload).map_err(failed)?;
            }
        }
        let elapsed = begin.elapsed().as_secs_f64();
        channel.flush().map_err(failed)?;
        Ok(elapsed)
    }

    /// Round trips between members 0 and 1.
    pub(super) fn run_round_trips(&mut self, ops: u64, latency: &mut Histogram) -> Result<(), Error> {
        let channel = self.channel.clone().ok_or(Error::Protocol)?;
        self.group.barrier(0).wait().map_err(failed)?;
        let me = self.group.member().index();
        if me < 2 {
            for _ in 0..ops {
                let begin = Instant::now();
                for step in 0..2 {
                    if step == me {
                        self.stamp();
                        channel.send(MemberId::new(1 - me), &self.payload).map_err(failed)?;
                    } else {
                        let from = channel.recv_into(&mut self.received).map_err(failed)?;
                        self.check(from);
                    }
                }
                latency.record(begin.elapsed().as_nanos() as u64);
            }
        }
        channel.flush().map_err(failed)
    }

    /// Numbers the next message.
    fn stamp(&mut self) {
        self.payload[..8].copy_from_slice(&self.sent.to_le_bytes());
        self.sent += 1;
    }

    /// Counts a message that is not the next one of its sender, or has another length.
    fn check(&mut self, from: MemberId) {
        let next = &mut self.next[from.index()];
        let number = self.received.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if number != Some(*next) || self.received.len() != self.payload.len() {
            self.errors += 1;
        }
        *next = number.unwrap_or(*next) + 1;
    }
}
