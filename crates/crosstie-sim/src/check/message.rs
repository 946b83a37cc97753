//! Checks messages: each exactly once, whole, and in order for each sender.

use std::collections::HashMap;

/// Checks all messages of a run.
#[derive(Debug, Default)]
pub(crate) struct MessageChecker {
    /// For each pair: lengths of the messages that were sent, in order, with the time.
    sent: HashMap<(usize, usize), Vec<(u32, u64)>>,
    /// For each pair: messages that arrived whole, and bytes of the next one.
    arrived: HashMap<(usize, usize), (usize, u32)>,
    /// When members were stopped: member, from, to.
    stops: Vec<(usize, u64, u64)>,
    /// Messages that arrived: from, to, when sent, when arrived.
    spans: Vec<(usize, usize, u64, u64)>,
    pub(crate) times: Vec<u64>,
    pub(crate) failures: Vec<String>,
}

impl MessageChecker {
    /// The number of the message from `from` to `to`.
    pub(crate) fn sent(&mut self, time: u64, from: usize, to: usize, len: u32) -> usize {
        let sent = self.sent.entry((from, to)).or_default();
        sent.push((len, time));
        sent.len() - 1
    }

    /// A part of message `number` arrived: `len` bytes that belong at `offset`.
    pub(crate) fn arrived(
        &mut self,
        time: u64,
        from: usize,
        to: usize,
        number: usize,
        offset: u32,
        len: u32,
    ) {
        let (next, bytes) = self.arrived.entry((from, to)).or_default();
        let Some((total, start)) = self.sent.get(&(from, to)).and_then(|sent| sent.get(*next)) else {
            self.failures.push(format!("{time} ns: {from} to {to}: a message that was not sent"));
            return;
        };
        if (number, offset) != (*next, *bytes) {
            self.failures.push(format!(
                "{time} ns: {from} to {to}: byte {offset} of message {number} came instead of byte {bytes} of message {next}"
            ));
        }
        *bytes += len;
        if *bytes >= *total {
            self.times.push(time - start);
            self.spans.push((from, to, *start, time));
            (*next, *bytes) = (*next + 1, 0);
        }
    }

    /// A member does nothing in this time.
    pub(crate) fn stopped(&mut self, member: usize, from: u64, to: u64) {
        self.stops.push((member, from, to));
    }

    /// A message between two members that were not stopped in its time, nor shortly before, must not have waited for others.
    pub(crate) fn check_waits(&mut self, longest: u64) {
        for (from, to, sent, arrived) in &self.spans {
            let is_excused = |(member, start, end): &(usize, u64, u64)| {
                (member == from || member == to) && *start <= *arrived && *sent <= end + longest
            };
            if arrived - sent > longest && !self.stops.iter().any(is_excused) {
                let took = arrived - sent;
                self.failures.push(format!("{from} to {to}: a message sent at {sent} ns took {took} ns"));
            }
        }
    }

    /// At the end: whatever was sent from a live member to a live member must have arrived.
    pub(crate) fn finish(&mut self, is_excused: impl Fn(usize) -> bool) {
        for ((from, to), sent) in &self.sent {
            let arrived = self.arrived.get(&(*from, *to)).map_or(0, |(next, _)| *next);
            if arrived != sent.len() && !is_excused(*from) && !is_excused(*to) {
                self.failures.push(format!("{from} to {to}: {arrived} of {} messages arrived", sent.len()));
            }
        }
        self.failures.sort();
    }
}
