//! Two software rails with links of limited speed.

use core::hint::black_box;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crosstie::device::DeviceSpec;
use crosstie::rails::{
    Config, MAX_RAILS, Memory, RecvBuffer, RecvConnection, RecvRequest, SendConnection, Split,
};
use crosstie_protocol::rails::{RailLoad, split};
use serde::Serialize;

use super::link::{Link, failed};
use super::stream::{WINDOW, send};
use crate::error::Error;
use crate::units;

/// The results.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Links {
    throttled: Throttled,
    failover: Failover,
    /// Nanoseconds for the decision how to split a message, without the clock.
    split_decision_ns: f64,
}

/// Two rails with links of different speed.
#[derive(Clone, Debug, Serialize)]
struct Throttled {
    link_bytes_per_second: [u64; 2],
    adaptive_bytes_per_second: f64,
    equal_bytes_per_second: f64,
    /// Shares of the sum of the links.
    adaptive_share: f64,
    equal_share: f64,
    /// The part of the bytes that went over the faster rail with the adaptive split.
    adaptive_fast_rail: f64,
}

/// A rail that fails and returns under load.
#[derive(Clone, Debug, Serialize)]
struct Failover {
    link_bytes_per_second: [u64; 2],
    bytes_per_second_before: f64,
    bytes_per_second_one_rail: f64,
    bytes_per_second_after: f64,
    /// Share of the bandwidth before the failure.
    after_share: f64,
    /// The longest time without a message done, around the failure.
    longest_stall_ms: f64,
    /// From the port being up again to the rail being used.
    return_ms: f64,
    replayed_parts: u64,
    replayed_bytes: u64,
    /// Messages with a wrong byte.
    wrong_messages: u64,
    messages: u64,
}

impl Links {
    /// Measures for about `duration` each.
    pub(super) fn measure(duration: Duration) -> Result<Links, Error> {
        Ok(Links {
            throttled: measure_throttled(duration)?,
            failover: measure_failover(duration)?,
            split_decision_ns: measure_split(),
        })
    }

    pub(super) fn text(&self) -> String {
        let Links { throttled, failover, split_decision_ns } = self;
        format!(
            "links of {} and {} bytes/s: adaptive split {} of the sum, equal split {}\n\
             a rail fails: longest stall {:.1} ms, {} parts sent again, {} of {} messages wrong; {} of the bandwidth {:.0} ms after its link is up\n\
             split decision: {split_decision_ns:.0} ns\n",
            units::scaled(throttled.link_bytes_per_second[0] as f64),
            units::scaled(throttled.link_bytes_per_second[1] as f64),
            units::percent((throttled.adaptive_share * 1000.0).round() / 1000.0),
            units::percent((throttled.equal_share * 1000.0).round() / 1000.0),
            failover.longest_stall_ms,
            failover.replayed_parts,
            failover.wrong_messages,
            failover.messages,
            units::percent((failover.after_share * 1000.0).round() / 1000.0),
            failover.return_ms,
        )
    }

    pub(super) fn errors(&self) -> u64 {
        self.failover.wrong_messages
    }
}

/// Receives a stream until messages without bytes arrive, one for each buffer that is posted. Calls `each` with the slot of each message.
fn receive_stream(
    receiver: &mut RecvConnection,
    memory: &Memory,
    mut each: impl FnMut(usize),
) -> Result<u64, Error> {
    let wrong = failed("receiving over rails");
    let mut outstanding: VecDeque<(RecvRequest, usize)> = VecDeque::new();
    let (mut next, mut messages, mut is_over) = (0, 0, false);
    while !is_over || !outstanding.is_empty() {
        while !is_over && outstanding.len() < WINDOW {
            let slot = next % WINDOW;
            let buffer = RecvBuffer { memory, range: slot * MESSAGE..(slot + 1) * MESSAGE, tag: 0 };
            match receiver.irecv(&[buffer]).map_err(|error| wrong(&error))? {
                Some(request) => outstanding.push_back((request, slot)),
                None => break,
            }
            next += 1;
        }
        let Some((request, slot)) = outstanding.front().copied() else { break };
        match receiver.test(request).map_err(|error| wrong(&error))? {
            Some(received) => {
                outstanding.pop_front();
                if received.sizes() == [0] {
                    is_over = true;
                } else {
                    messages += 1;
                    each(slot);
                }
            }
            None => std::thread::yield_now(),
        }
    }
    Ok(messages)
}

/// Sends messages until `go_on` says no; then messages without bytes, one for each buffer of the receiver. Returns bytes per second.
fn send_stream(
    sender: &mut SendConnection,
    memory: &Memory,
    mut go_on: impl FnMut(&mut SendConnection, u64) -> bool,
) -> Result<f64, Error> {
    let wrong = failed("sending over rails");
    let fill = |_, _| Ok(());
    let sent = send(sender, memory, MESSAGE, WINDOW, fill, |sender, _, done| go_on(sender, done))?;
    for _ in 0..WINDOW {
        let last = loop {
            if let Some(last) = sender.isend(memory, 0..0, 0).map_err(|error| wrong(&error))? {
                break last;
            }
            std::thread::yield_now();
        };
        while sender.test(last).map_err(|error| wrong(&error))?.is_none() {
            std::thread::yield_now();
        }
    }
    Ok((sent.messages * MESSAGE as u64) as f64 / sent.time.as_secs_f64())
}

/// Bytes per second of a stream.
fn stream(link: &mut Link, duration: Duration) -> Result<f64, Error> {
    let setup = failed("allocating memory of rails");
    let from = link.here.allocate(WINDOW * MESSAGE).map_err(|error| setup(&error))?;
    let to = link.there.allocate(WINDOW * MESSAGE).map_err(|error| setup(&error))?;
    let Link { sender, receiver, .. } = link;
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_stream(receiver, &to, |_| {}));
        let deadline = Instant::now() + duration;
        let rate = send_stream(sender, &from, |_, _| Instant::now() < deadline);
        let received = receiving.join().unwrap_or(Err(Error::Protocol));
        let rate = rate?;
        received.map(|_| rate)
    })
}

/// The links of the measurements with links of limited speed.
const SLOW_LINKS: [u64; 2] = [300_000_000, 100_000_000];
const EQUAL_LINKS: [u64; 2] = [200_000_000, 200_000_000];
const MESSAGE: usize = 1 << 20;

fn measure_throttled(duration: Duration) -> Result<Throttled, Error> {
    let devices = [DeviceSpec::Software, DeviceSpec::Software];
    let mut adaptive = Link::open(&devices, true, Some(&SLOW_LINKS), &Config::default())?;
    // The sender learns the speed of its links.
    stream(&mut adaptive, duration / 4)?;
    let before: Vec<u64> = adaptive.sender.counters().rails.iter().map(|rail| rail.bytes).collect();
    let adaptive_rate = stream(&mut adaptive, duration)?;
    let after: Vec<u64> = adaptive.sender.counters().rails.iter().map(|rail| rail.bytes).collect();
    let config = Config { split: Split::Fixed([1, 1, 0, 0]), ..Config::default() };
    let mut equal = Link::open(&devices, true, Some(&SLOW_LINKS), &config)?;
    let equal_rate = stream(&mut equal, duration)?;
    let sum = SLOW_LINKS.iter().sum::<u64>() as f64;
    let moved = [after[0] - before[0], after[1] - before[1]].map(|bytes| bytes as f64);
    Ok(Throttled {
        link_bytes_per_second: SLOW_LINKS,
        adaptive_bytes_per_second: adaptive_rate,
        equal_bytes_per_second: equal_rate,
        adaptive_share: adaptive_rate / sum,
        equal_share: equal_rate / sum,
        adaptive_fast_rail: moved[0] / (moved[0] + moved[1]),
    })
}

/// Where a run with a failure is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Before,
    Down,
    Returning,
    After,
}

fn measure_failover(duration: Duration) -> Result<Failover, Error> {
    let devices = [DeviceSpec::Software, DeviceSpec::Software];
    let mut link = Link::open(&devices, true, Some(&EQUAL_LINKS), &Config::default())?;
    stream(&mut link, duration / 4)?;
    let setup = failed("allocating memory of rails");
    let from = link.here.allocate(WINDOW * MESSAGE).map_err(|error| setup(&error))?;
    let to = link.there.allocate(WINDOW * MESSAGE).map_err(|error| setup(&error))?;
    let pattern: Vec<u8> = (0..WINDOW * MESSAGE).map(|at| (at * 31 + (at >> 9)) as u8).collect();
    from.write(0, &pattern).map_err(|error| setup(&error))?;
    let faults = link.faults[1].clone();
    let (mut stage, mut since, mut done_at_start) = (Stage::Before, Instant::now(), 0);
    let (mut last_done, mut last_progress) = (0, Instant::now());
    let mut longest = Duration::ZERO;
    let mut rates = [0.0; 3];
    let mut return_ms = 0.0;
    let slice = duration / 2;
    let mut wrong_messages = 0;
    let Link { sender, receiver, .. } = &mut link;
    let messages = std::thread::scope(|scope| {
        let (to, pattern) = (&to, &pattern);
        let wrong = &mut wrong_messages;
        let receiving = scope.spawn(move || {
            let mut bytes = vec![0; MESSAGE];
            receive_stream(receiver, to, |slot| {
                let at = slot * MESSAGE;
                let read = to.read(at, &mut bytes);
                let is_right = read.is_ok() && bytes == pattern[at..at + MESSAGE];
                *wrong += u64::from(!is_right);
                // The next message must write every byte again.
                to.write(at, &[0; 4096]).ok();
            })
        });
        let sent = send_stream(sender, &from, |sender, done| {
            let now = Instant::now();
            if done != last_done {
                if stage != Stage::Before {
                    longest = longest.max(now - last_progress);
                }
                (last_done, last_progress) = (done, now);
            }
            let moved = (done - done_at_start) as f64 * MESSAGE as f64;
            let rate = moved / (now - since).as_secs_f64();
            let next = match stage {
                Stage::Before if now - since > slice => {
                    rates[0] = rate;
                    faults.port_down();
                    Stage::Down
                }
                Stage::Down if now - since > slice => {
                    rates[1] = rate;
                    faults.port_up();
                    Stage::Returning
                }
                Stage::Returning if sender.rails_up() == 3 => {
                    return_ms = (now - since).as_secs_f64() * 1000.0;
                    Stage::After
                }
                Stage::After if now - since > slice => {
                    rates[2] = rate;
                    return false;
                }
                same => same,
            };
            if next != stage {
                (stage, since, done_at_start) = (next, now, done);
            }
            true
        });
        let received = receiving.join().unwrap_or(Err(Error::Protocol));
        sent?;
        received
    })?;
    let counters = link.sender.counters();
    Ok(Failover {
        link_bytes_per_second: EQUAL_LINKS,
        bytes_per_second_before: rates[0],
        bytes_per_second_one_rail: rates[1],
        bytes_per_second_after: rates[2],
        after_share: rates[2] / rates[0],
        longest_stall_ms: longest.as_secs_f64() * 1000.0,
        return_ms,
        replayed_parts: counters.rails.iter().map(|rail| rail.replays).sum(),
        replayed_bytes: counters.rails.iter().map(|rail| rail.replayed_bytes).sum(),
        wrong_messages,
        messages,
    })
}

/// Nanoseconds for one split over four rails with different loads.
fn measure_split() -> f64 {
    const ROUNDS: u32 = 1_000_000;
    let mut loads: [RailLoad; MAX_RAILS] = core::array::from_fn(|rail| RailLoad {
        rate: 1000 * (rail as u64 + 1),
        queued: 100_000 * rail as u64,
    });
    let started = Instant::now();
    for round in 0..ROUNDS {
        loads[round as usize % MAX_RAILS].queued = u64::from(round % 4096) * 256;
        black_box(split(black_box((1 << 20) + round % 4096), black_box(&loads), 32 << 10));
    }
    started.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
}
