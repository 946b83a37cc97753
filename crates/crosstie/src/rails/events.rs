//! Events of the devices: ports that go down and up, queue pairs that fail. One thread per device waits for them.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use crosstie_protocol::rails::Mask;

use super::error::SetupError;
use crate::device::{Device, Event};

#[cfg(not(all(test, loom)))]
use {
    core::sync::atomic::{AtomicU32, AtomicU64},
    std::sync::Mutex,
};
#[cfg(all(test, loom))]
use {
    loom::sync::Mutex,
    loom::sync::atomic::{AtomicU32, AtomicU64},
};

/// How long a wait for an event lasts. A context that is dropped keeps its devices open for so long at most.
const WAIT: Duration = Duration::from_millis(100);
/// Events that are kept for connections that have not looked yet.
const KEPT: usize = 256;

/// The events of all devices of a context.
#[derive(Debug, Default)]
pub(super) struct PortEvents {
    /// Events so far. Changes only while `last` is locked.
    count: AtomicU64,
    /// Rails whose port is down.
    down: AtomicU32,
    /// The last events: their rail, and the queue pair if only one is affected.
    last: Mutex<VecDeque<(usize, Option<u32>)>>,
}

impl PortEvents {
    pub(super) fn is_down(&self, rail: usize) -> bool {
        self.down.load(Relaxed) & (1 << rail) != 0
    }

    fn add(&self, rail: usize, event: Event) {
        let failed = match event {
            Event::PortDown | Event::DeviceFatal => {
                self.down.fetch_or(1 << rail, Relaxed);
                None
            }
            Event::PortUp => {
                self.down.fetch_and(!(1 << rail), Relaxed);
                return;
            }
            Event::QpFatal(qp) | Event::QpAccess(qp) => Some(qp),
            _ => return,
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == KEPT {
            last.pop_front();
        }
        last.push_back((rail, failed));
        // Release, partner: the Acquire load in `failed_since`.
        self.count.fetch_add(1, Release);
    }

    /// The rails with an event since `seen` that fails them. `owns` says whether a queue pair belongs to the caller.
    #[inline]
    pub(super) fn failed_since(&self, seen: &mut u64, owns: impl Fn(usize, u32) -> bool) -> Mask {
        // Acquire, partner: the Release addition in `add`.
        if self.count.load(Acquire) == *seen {
            return 0;
        }
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Now that it does not change: there may have been events since.
        let count = self.count.load(Relaxed);
        let new = (count - *seen).min(last.len() as u64) as usize;
        *seen = count;
        let failed = last.iter().rev().take(new).filter(|(rail, qp)| match qp {
            // A port that is up again has not failed for a connection that has just been made.
            None => self.is_down(*rail),
            Some(qp) => owns(*rail, *qp),
        });
        failed.fold(0, |mask, (rail, _)| mask | 1 << rail)
    }
}

/// Starts to wait for events of the devices whose ports have any, until `events` is gone. That a peer is gone is noticed by the control
/// connection.
pub(super) fn watch(devices: &[Device], events: &Arc<PortEvents>) -> Result<(), SetupError> {
    for (rail, device) in devices.iter().enumerate().filter(|(_, device)| device.attr().port_events) {
        let (device, events) = (device.clone(), Arc::downgrade(events));
        std::thread::Builder::new()
            .name("crosstie-events".into())
            .stack_size(128 << 10)
            .spawn(move || {
                while events.strong_count() > 0 {
                    match device.wait_event(WAIT) {
                        Ok(Some(event)) => {
                            if let Some(events) = events.upgrade() {
                                events.add(rail, event);
                            }
                        }
                        Ok(None) => {}
                        // A device that reports no events is watched by its completions.
                        Err(_) => return,
                    }
                }
            })
            .map_err(|source| SetupError::Os { what: "starting the thread for device events", source })?;
    }
    Ok(())
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::thread;

    use super::*;

    type Look = fn(&PortEvents, &mut u64) -> Mask;

    /// Queue pairs of two rails fail while a connection looks: it sees both failures.
    fn check(look: Look) {
        loom::model(move || {
            let events = loom::sync::Arc::new(PortEvents::default());
            let device = thread::spawn({
                let events = events.clone();
                move || (0..2).for_each(|rail| events.add(rail, Event::QpFatal(7)))
            });
            let mut seen = 0;
            let failed = look(&events, &mut seen) | look(&events, &mut seen);
            device.join().unwrap();
            assert_eq!(failed | look(&events, &mut seen), 0b11, "an event was missed");
        });
    }

    #[test]
    fn loom_no_event_is_missed() {
        check(|events, seen| events.failed_since(seen, |_, _| true));
    }

    /// A twin that must fail: between its look at the counter and the lock there can be an event, which it takes for an earlier one.
    #[test]
    #[should_panic(expected = "an event was missed")]
    fn loom_twin_count_from_before_the_lock_is_caught() {
        check(|events, seen| {
            let count = events.count.load(Acquire);
            let last = events.last.lock().unwrap();
            let new = (count - *seen) as usize;
            *seen = count;
            last.iter().rev().take(new).fold(0, |mask, (rail, _)| mask | 1 << rail)
        });
    }
}
