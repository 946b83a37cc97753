//! Failures of a sender's rails and their repair, and the end of its connection.

use core::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use crosstie_protocol::rails::{FenceEntry, MAX_GROUP, PartState, SendError, rails_of};

use super::super::error::Cause;
use super::super::frames::Frame;
use super::super::mailbox::{Mail, Mailbox, Order};
use super::SendCore;

impl SendCore {
    #[cold]
    pub(super) fn read_mail(&mut self) {
        for mail in self.mailbox.take_mail() {
            if self.ended.is_some() {
                // It was sent before the control thread knew.
                continue;
            }
            match mail {
                Mail::RailError { rail, epoch } => {
                    if rail < self.agreed.rails && self.rails[rail].epoch == epoch {
                        self.fail_rail(rail);
                    }
                }
                Mail::Answer { rail, epoch, entries } => {
                    if rail >= self.agreed.rails
                        || self.rails[rail].epoch != epoch
                        || self.up & (1 << rail) != 0
                    {
                        continue;
                    }
                    for entry in entries {
                        self.count_replays(rail, &entry);
                        let mut done = None;
                        self.protocol.fence_answer(rail, entry, |number| done = Some(number));
                        done.into_iter().for_each(|number| self.finish_message(number));
                    }
                    let epoch = epoch.wrapping_add(1);
                    self.mailbox.put_order(Order::Rebuild { rail, epoch });
                    if self.up != 0 {
                        self.replay_lost();
                    }
                }
                Mail::Returned { rail, endpoint } => {
                    let state = &mut self.rails[rail];
                    state.epoch = endpoint.epoch;
                    state.endpoint = Some(endpoint);
                    state.load.forget_rate();
                    (state.outstanding, state.probed_at) = (0, None);
                    self.up |= 1 << rail;
                    self.all_down_since = None;
                    self.counters.rails[rail].returns.add(1);
                    self.counters.rails[rail].is_up.store(1, Relaxed);
                    self.replay_lost();
                }
                Mail::Fence { .. } => {}
                Mail::PeerClosed { next, open } => {
                    (0..self.agreed.rails).for_each(|rail| self.poll_rail(rail));
                    // The receiver has these messages; their acknowledgements may be late or lost.
                    let done: Vec<u64> = self.protocol.open_messages().collect();
                    for number in done.into_iter().filter(|n| *n < next && !open.contains(n)) {
                        if self.protocol.message_done(number) {
                            self.finish_message(number);
                        }
                    }
                    self.end(Cause::PeerClosed);
                }
                Mail::Ended(cause) => {
                    (0..self.agreed.rails).for_each(|rail| self.poll_rail(rail));
                    self.end(cause);
                }
            }
        }
    }

    /// Counts the parts of a message that are lost.
    fn count_replays(&self, rail: usize, answer: &FenceEntry) {
        let Some(message) = self.messages.get(usize::from(answer.slot)) else { return };
        for attempt in 0..16 {
            let lost = self
                .protocol
                .part(message.number, attempt, rail)
                .filter(|part| part.state == PartState::Fenced && answer.attempts & (1 << attempt) == 0);
            if let Some(part) = lost {
                self.counters.rails[rail].replays.add(1);
                self.counters.rails[rail].replayed_bytes.add(part.bytes());
            }
        }
    }

    /// Takes a rail out, and asks the receiver what has arrived on it.
    #[cold]
    pub(super) fn fail_rail(&mut self, rail: usize) {
        let Some(mut endpoint) = self.rails[rail].endpoint.take() else { return };
        endpoint.fail();
        // What had completed before counts.
        loop {
            let now = self.now();
            let polled = endpoint.poll(|completion| {
                self.handle_completion(rail, completion, now);
            });
            if !matches!(polled, Ok(1..)) {
                break;
            }
        }
        drop(endpoint);
        let state = &mut self.rails[rail];
        state.load.clear();
        (state.outstanding, state.probed_at) = (0, None);
        self.up &= !(1 << rail);
        if self.up == 0 {
            self.all_down_since = Some(self.now());
        }
        self.counters.rails[rail].failures.add(1);
        self.counters.rails[rail].is_up.store(0, Relaxed);
        let mut entries = Vec::new();
        self.protocol.fail_rail(rail, |entry| entries.push(entry));
        let (epoch, next) = (self.rails[rail].epoch, self.protocol.next_message());
        self.mailbox.put_order(Order::Send(Frame::Fence { rail, epoch, next, entries }));
    }

    /// Sends lost parts again over the rails that are up.
    pub(super) fn replay_lost(&mut self) {
        while self.up != 0
            && let Some((number, count, chunks)) = self.protocol.next_lost()
        {
            let sizes = chunks.map(|chunk| chunk.len);
            let count = usize::from(count);
            let (lens, empty_rail) = self.split_buffers(&sizes[..count], self.context.config.min_part);
            match self.protocol.replay(number, &lens[..count], empty_rail) {
                Ok((attempt, mask)) => self.post_attempt(number, attempt, mask, false),
                Err(SendError::TooManyAttempts(_) | SendError::SlotInUse(_)) => {
                    return self.end(Cause::TooManyReplays);
                }
            }
        }
    }

    /// Takes out rails that make no progress, and notices events of the ports.
    pub(super) fn check_time(&mut self) {
        let now = self.now();
        let config = &self.context.config;
        let (stall, probe) = (config.stall_timeout.as_nanos() as u64, config.probe_timeout.as_nanos() as u64);
        let give_up = config.give_up.as_nanos() as u64;
        if self.all_down_since.is_some_and(|since| now.saturating_sub(since) > give_up) {
            return self.end(Cause::AllRailsDown);
        }
        let failed = self.context.failed_rails(&mut self.events_seen, |rail, qp_num| {
            self.rails[rail].endpoint.as_ref().is_some_and(|e| e.qps.iter().any(|qp| qp.qp_num() == qp_num))
        });
        rails_of(failed & self.up).for_each(|rail| self.fail_rail(rail));
        for rail in 0..self.agreed.rails {
            let state = &mut self.rails[rail];
            if state.outstanding == 0 {
                continue;
            }
            match state.probed_at {
                Some(since) if now.saturating_sub(since) > probe => self.fail_rail(rail),
                None if now.saturating_sub(state.progress_at) > stall => {
                    state.probed_at = Some(now);
                    let Some(endpoint) = state.endpoint.as_deref_mut() else { continue };
                    let qp = endpoint.take_qp();
                    if endpoint.post_probe(qp).is_err() {
                        self.fail_rail(rail);
                        continue;
                    }
                    self.counters.rails[rail].probes.add(1);
                    self.counters.rails[rail].work_requests.add(1);
                }
                _ => {}
            }
        }
    }

    /// Ends the connection: all requests end with `cause`.
    pub(super) fn end(&mut self, cause: Cause) {
        if self.ended.is_some() {
            return;
        }
        if let Cause::Violation(violation) = &cause {
            self.counters.violations[violation.kind()].add(1);
        }
        let last = match &cause {
            Cause::Closed | Cause::PeerClosed | Cause::PeerGone | Cause::PeerError(_) => {
                let open = self.protocol.open_messages().collect();
                Frame::Close { next: self.protocol.next_message(), open }
            }
            cause => Frame::Error(cause.to_string()),
        };
        self.mailbox.put_order(Order::Close(last));
        // Nothing may touch the program's memory any more.
        for rail in &mut self.rails {
            rail.load.clear();
            if let Some(mut endpoint) = rail.endpoint.take() {
                endpoint.fail();
            }
        }
        for transfer in &mut self.transfers {
            transfer.release(MAX_GROUP);
        }
        self.up = 0;
        self.ended = Some(cause);
    }

    /// The program has dropped the connection. Returns the mailbox, to wait for the end of the control thread without the lock.
    pub(in super::super) fn close(&mut self) -> Arc<Mailbox> {
        self.end(Cause::Closed);
        self.mailbox.clone()
    }

    /// Ends the connection at once.
    pub(in super::super) fn abort(&mut self) {
        self.end(Cause::Aborted);
    }
}
