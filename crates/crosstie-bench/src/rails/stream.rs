//! A stream of messages over the rails of the command line.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crosstie::rails::{Config, Counters, Memory, RecvBuffer, RecvConnection, SendConnection};
use crosstie::telemetry::Histogram;

use super::Arguments;
use super::link::{Link, failed};
use crate::error::Error;

/// Messages outstanding.
const WINDOW: usize = 16;
/// The most memory for the buffers of one end.
const MAX_BUFFERS: usize = 512 << 20;

/// What was measured.
pub(super) struct Streamed {
    pub(super) sent: Sent,
    /// Messages with a wrong byte.
    pub(super) wrong: u64,
    pub(super) sender: Counters,
    pub(super) receiver: Counters,
}

/// The bytes of the message in a slot, apart from its number, which is at both ends.
fn pattern(size: usize, slot: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 31 + (at >> 9) + slot * 7) as u8).collect()
}

/// Where the number of a message is.
fn stamps(size: usize) -> [Option<usize>; 2] {
    [(size >= 8).then_some(0), (size >= 16).then(|| size - 8)]
}

pub(super) fn measure(plan: &Arguments) -> Result<Streamed, Error> {
    let config = Config { split: plan.split.split, ..Config::default() };
    let mut link = Link::open(&plan.device, plan.kill_rail.is_some(), &config)?;
    let window = WINDOW.min((MAX_BUFFERS / plan.payload.max(1)).max(1));
    let room = plan.payload.max(1);
    let setup = failed("allocating memory of rails");
    let from = link.here.allocate(window * room).map_err(|error| setup(&error))?;
    let to = link.there.allocate(window * room).map_err(|error| setup(&error))?;
    for slot in 0..window {
        from.write(slot * room, &pattern(plan.payload, slot)).map_err(|error| setup(&error))?;
        to.write(slot * room, &vec![0; plan.payload]).map_err(|error| setup(&error))?;
    }
    // How many messages the sender sends, once it knows.
    let total = AtomicU64::new(plan.count.unwrap_or(u64::MAX));
    let faults = link.faults.clone();
    let Link { sender, receiver, .. } = &mut link;
    let (sent, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let received = receive(receiver, &to, plan, window, &total);
            if received.is_err() {
                receiver.abort();
            }
            received
        });
        let mut failure = plan.failure();
        let end = Instant::now() + plan.common.duration.0;
        let fill = |number: u64, at| {
            let mut stamps = stamps(plan.payload).into_iter().flatten();
            stamps.try_for_each(|stamp| from.write(at + stamp, &number.to_le_bytes())).map_err(Error::from)
        };
        let sent = send(sender, &from, plan.payload, window, fill, |_, sent, done| {
            if let Some((rail, _)) = failure.take_if(|(_, after)| done >= *after) {
                faults[rail].port_down();
            }
            plan.count.map_or_else(|| Instant::now() < end, |count| sent < count)
        });
        match &sent {
            // Release, partner: the Acquire loads in `receive`.
            Ok(sent) => total.store(sent.messages, Release),
            // Neither end waits for one that has failed.
            Err(_) => sender.abort(),
        }
        (sent, receiving.join().unwrap_or(Err(Error::Protocol)))
    });
    Ok(Streamed {
        sent: sent?,
        wrong: received?,
        sender: link.sender.counters(),
        receiver: link.receiver.counters(),
    })
}

/// Receives messages until `total` have arrived. Returns how many were wrong.
fn receive(
    receiver: &mut RecvConnection,
    memory: &Memory,
    plan: &Arguments,
    window: usize,
    total: &AtomicU64,
) -> Result<u64, Error> {
    let (size, room) = (plan.payload, plan.payload.max(1));
    let error = failed("receiving over rails");
    let patterns: Vec<Vec<u8>> = match plan.kill_rail {
        // Every byte is compared if a rail fails; that takes longer than the transfer.
        Some(_) => (0..window).map(|slot| pattern(size, slot)).collect(),
        None => Vec::new(),
    };
    let mut bytes = vec![0; if patterns.is_empty() { 0 } else { size }];
    let mut outstanding = VecDeque::new();
    let (mut posted, mut arrived, mut wrong) = (0u64, 0u64, 0);
    // Acquire, partner: the Release store in `measure`.
    while arrived < total.load(Acquire) {
        while outstanding.len() < window && posted < total.load(Acquire) {
            let at = (posted as usize % window) * room;
            let buffer = RecvBuffer { memory, range: at..at + size, tag: 0 };
            let Some(request) = receiver.irecv(&[buffer]).map_err(|e| error(&e))? else { break };
            outstanding.push_back(request);
            posted += 1;
        }
        let done = match outstanding.front() {
            Some(request) => receiver.test(*request).map_err(|e| error(&e))?,
            None => None,
        };
        let Some(done) = done else {
            std::thread::yield_now();
            continue;
        };
        outstanding.pop_front();
        let slot = arrived as usize % window;
        let mut is_right = done.sizes() == [size];
        if let Some(pattern) = patterns.get(slot) {
            memory.read(slot * room, &mut bytes).map_err(|e| error(&e))?;
            let inner = if size >= 16 { 8..size - 8 } else { 8.min(size)..size };
            is_right &= bytes[inner.clone()] == pattern[inner];
            // The next message must write every byte again.
            memory.write(slot * room, &vec![0; size.min(4096)]).map_err(|e| error(&e))?;
        }
        for at in stamps(size).into_iter().flatten() {
            let mut stamp = [0; 8];
            if patterns.is_empty() {
                memory.read(slot * room + at, &mut stamp).map_err(|e| error(&e))?;
            } else {
                stamp.copy_from_slice(&bytes[at..at + 8]);
            }
            is_right &= u64::from_le_bytes(stamp) == arrived;
        }
        wrong += u64::from(!is_right);
        arrived += 1;
    }
    Ok(wrong)
}

/// What a sender has measured.
pub(super) struct Sent {
    pub(super) messages: u64,
    pub(super) time: Duration,
    pub(super) latency: Histogram,
    pub(super) longest_pause: Duration,
}

/// Sends messages of `size` bytes out of as many slots as may be outstanding. Before each round `go_on` learns how many are sent and
/// done, and says whether to send more; `fill` writes a message with this number into memory at this position.
pub(super) fn send(
    sender: &mut SendConnection,
    memory: &Memory,
    size: usize,
    window: usize,
    mut fill: impl FnMut(u64, usize) -> Result<(), Error>,
    mut go_on: impl FnMut(&mut SendConnection, u64, u64) -> bool,
) -> Result<Sent, Error> {
    let error = failed("sending over rails");
    let mut outstanding = VecDeque::new();
    let (mut sent, mut done, mut is_over) = (0u64, 0u64, false);
    let (mut latency, mut longest_pause) = (Histogram::new(), Duration::ZERO);
    let started = Instant::now();
    let mut last_done = started;
    loop {
        is_over |= !go_on(sender, sent, done);
        if is_over && outstanding.is_empty() {
            return Ok(Sent { messages: done, time: started.elapsed(), latency, longest_pause });
        }
        if !is_over && outstanding.len() < window {
            let at = (sent as usize % window) * size.max(1);
            fill(sent, at)?;
            let now = Instant::now();
            if let Some(request) = sender.isend(memory, at..at + size, 0).map_err(|e| error(&e))? {
                outstanding.push_back((request, now));
                sent += 1;
            }
        }
        while let Some((request, since)) = outstanding.front() {
            if sender.test(*request).map_err(|e| error(&e))?.is_none() {
                std::thread::yield_now();
                break;
            }
            let now = Instant::now();
            latency.record((now - *since).as_nanos() as u64);
            longest_pause = longest_pause.max(now - last_done);
            last_done = now;
            outstanding.pop_front();
            done += 1;
        }
    }
}
