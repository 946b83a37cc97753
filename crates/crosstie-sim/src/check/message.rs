//! Checks messages: each exactly once, whole, and in order for each sender.

use std::collections::HashMap;

/// Checks all messages of a run.
#[derive(Debug, Default)]
pub(crate) struct MessageChecker {
    /// For each pair: lengths of the messages that were sent, in order, with the time.
    sent: HashMap<(usize, usize), Vec<(u32, u64)>>,
    /// For each pair: messages that arrived whole, and bytes of the next one.
    arrived: HashMap<(usize, usize), (usize, u32)>,
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
            (*next, *bytes) = (*next + 1, 0);
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
