//! Failures of a receiver's rails and their repair, and the end of its connection.

use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use std::sync::Arc;

use crosstie_protocol::rails::{FenceEntry, Immediate, rails_of};

use super::super::error::Cause;
use super::super::frames::Frame;
use super::super::mailbox::{Mail, Mailbox, Order};
use super::RecvCore;

/// How long the completion of a message that was acknowledged may take.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(1);

/// A fence that is not answered yet.
#[derive(Debug)]
pub(super) struct Fence {
    rail: usize,
    epoch: u32,
    next: u64,
    entries: Vec<FenceEntry>,
    /// When completions that are missing have failed.
    deadline: u64,
}

impl Fence {
    /// Whether the message is not done for the sender.
    fn is_listed(&self, number: u64, slots: usize) -> bool {
        let (slot, generation) = (number as usize & (slots - 1), Immediate::generation_of(number, slots));
        self.entries.iter().any(|entry| usize::from(entry.slot) == slot && entry.generation == generation)
    }
}

/// The sender has closed the connection. It is done with the messages before `next` that are not in `open`.
#[derive(Debug)]
pub(super) struct PeerClosed {
    next: u64,
    open: Vec<u64>,
    deadline: u64,
}

impl RecvCore {
    #[cold]
    pub(super) fn read_mail(&mut self) {
        for mail in self.mailbox.take_mail() {
            if self.ended.is_some() {
                // It was sent before the control thread knew.
                continue;
            }
            match mail {
                Mail::Fence { rail, epoch, next, entries } => {
                    if rail < self.agreed.rails && self.rails[rail].epoch == epoch {
                        let deadline = self.now() + COMPLETION_TIMEOUT.as_nanos() as u64;
                        self.fences.push(Fence { rail, epoch, next, entries, deadline });
                    }
                }
                Mail::Returned { rail, endpoint } => {
                    let state = &mut self.rails[rail];
                    state.epoch = endpoint.epoch;
                    state.endpoint = Some(endpoint);
                    state.confirm_clears();
                    self.up |= 1 << rail;
                    self.all_down_since = None;
                    self.counters.rails[rail].returns.add(1);
                    self.counters.rails[rail].is_up.store(1, Relaxed);
                    if self.has_unsent {
                        self.resend_clears();
                    }
                }
                Mail::RailError { .. } | Mail::Answer { .. } => {}
                Mail::PeerClosed { next, open } => {
                    let deadline = self.now() + COMPLETION_TIMEOUT.as_nanos() as u64;
                    self.peer_closed = Some(PeerClosed { next, open, deadline });
                    self.finish_peer_closed();
                }
                Mail::Ended(cause) => {
                    // What arrived before the end counts.
                    for rail in 0..self.agreed.rails {
                        self.poll_rail(rail, None);
                    }
                    self.end(cause);
                }
            }
        }
        self.handle_fences();
    }

    /// The rail does not work at this end: the sender will stop using it, and fence it.
    #[cold]
    pub(super) fn report_rail(&mut self, rail: usize) {
        if self.up & (1 << rail) == 0 {
            return;
        }
        self.take_out(rail);
        let epoch = self.rails[rail].epoch;
        self.mailbox.put_order(Order::Send(Frame::RailError { rail, epoch }));
    }

    fn take_out(&mut self, rail: usize) {
        if self.up & (1 << rail) == 0 {
            return;
        }
        self.up &= !(1 << rail);
        if self.up == 0 {
            self.all_down_since = Some(self.now());
        }
        self.has_unsent = true;
        self.counters.rails[rail].failures.add(1);
        self.counters.rails[rail].is_up.store(0, Relaxed);
    }

    /// Closes the rails that the sender has stopped using, and answers what has arrived on them.
    pub(super) fn handle_fences(&mut self) {
        let mut at = 0;
        while at < self.fences.len() && self.ended.is_none() {
            let rail = self.fences[at].rail;
            self.take_out(rail);
            if let Some(endpoint) = &mut self.rails[rail].endpoint {
                endpoint.fail();
            }
            // What has arrived counts. If the sender takes a message for done, its completions are under way, and a reset
            // would remove them.
            self.drain(rail);
            let fence = &self.fences[at];
            if self.is_completion_missing(fence.next, |number| fence.is_listed(number, self.agreed.slots)) {
                if self.now() > fence.deadline {
                    return self.end(Cause::LostCompletion);
                }
                at += 1;
                continue;
            }
            // A queue pair that is reset cannot receive any more. While the peer is inside an operation, the next call tries again.
            let is_closed = match &mut self.rails[rail].endpoint {
                Some(endpoint) => endpoint.qps.iter_mut().all(|qp| qp.try_reset().is_ok()),
                None => true,
            };
            self.drain(rail);
            if !is_closed {
                at += 1;
                continue;
            }
            self.rails[rail].endpoint = None;
            let Fence { rail, epoch, entries, .. } = self.fences.swap_remove(at);
            let answers = entries.iter().map(|entry| self.protocol.fence(rail, *entry)).collect();
            match answers {
                Ok(entries) => self.mailbox.put_order(Order::Send(Frame::Answer { rail, epoch, entries })),
                Err(violation) => self.end(Cause::Violation(violation)),
            }
            if self.up != 0 {
                self.resend_clears();
            }
        }
    }

    /// Whether a message before `next` is done for the sender, where it is not `open`, and not for us. Its completions are under
    /// way on any rail, or a device has failed after it acknowledged and before it completed.
    fn is_completion_missing(&self, next: u64, open: impl Fn(u64) -> bool) -> bool {
        self.protocol.open_messages().take_while(|number| *number < next).any(|number| !open(number))
    }

    /// Ends the connection when everything has arrived that the sender, which has closed it, is done with.
    #[cold]
    pub(super) fn finish_peer_closed(&mut self) {
        (0..self.agreed.rails).for_each(|rail| self.drain(rail));
        let Some(PeerClosed { next, open, deadline }) = &self.peer_closed else { return };
        if !self.is_completion_missing(*next, |number| open.contains(&number)) {
            self.end(Cause::PeerClosed);
        } else if self.now() > *deadline {
            self.end(Cause::LostCompletion);
        }
    }

    fn drain(&mut self, rail: usize) {
        loop {
            let before = self.counters.rails[rail].completions.get();
            self.poll_rail(rail, None);
            if self.counters.rails[rail].completions.get() == before || self.ended.is_some() {
                return;
            }
        }
    }

    /// Probes rails on which clear-to-sends may be stuck, and notices events of the ports.
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
        rails_of(failed & self.up).for_each(|rail| self.report_rail(rail));
        for rail in rails_of(self.up) {
            let state = &mut self.rails[rail];
            if state.is_unconfirmed {
                state.unconfirmed_since.get_or_insert(now);
            }
            match (state.probed_at, state.unconfirmed_since) {
                (Some(since), _) if now.saturating_sub(since) > probe => self.report_rail(rail),
                (None, Some(since)) if now.saturating_sub(since) > stall => {
                    state.probed_at = Some(now);
                    let Some(endpoint) = state.endpoint.as_deref_mut() else { continue };
                    if endpoint.post_probe(0).is_err() {
                        self.report_rail(rail);
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
        for rail in &mut self.rails {
            if let Some(mut endpoint) = rail.endpoint.take() {
                endpoint.fail();
            }
        }
        for request in &mut self.requests {
            request.buffers.iter_mut().for_each(|buffer| buffer.memory = None);
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
