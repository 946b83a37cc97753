//! Immediates that arrived, and calls that wait for one: pure matching, in order, whichever comes first.

use alloc::collections::VecDeque;

/// An immediate that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImmEvent {
    /// The immediate.
    pub imm: u32,
    /// Bytes that the WRITE+IMM wrote.
    pub bytes: u32,
}

/// Immediates without a call, or calls without an immediate. At most one of the queues is not empty, apart from calls that have
/// ended.
#[derive(Debug)]
pub struct ImmMatching<W> {
    events: VecDeque<ImmEvent>,
    calls: VecDeque<W>,
}

impl<W> ImmMatching<W> {
    /// Room for so many immediates and calls. No more memory is allocated unless there are more.
    pub fn new(events: usize, calls: usize) -> ImmMatching<W> {
        ImmMatching { events: VecDeque::with_capacity(events), calls: VecDeque::with_capacity(calls) }
    }

    /// Immediates that wait for a call.
    pub fn waiting_events(&self) -> usize {
        self.events.len()
    }

    /// Calls that wait for an immediate.
    pub fn waiting_calls(&self) -> usize {
        self.calls.len()
    }

    /// An immediate arrives. It goes to the oldest call that takes it: `give` hands it over, or returns the call when that has ended,
    /// which is then dropped from the queue. Returns whether a call took it; else it waits.
    pub fn arrive(&mut self, event: ImmEvent, mut give: impl FnMut(W, ImmEvent) -> bool) -> bool {
        while let Some(call) = self.calls.pop_front() {
            if give(call, event) {
                return true;
            }
        }
        self.events.push_back(event);
        false
    }

    /// A call comes. It takes the oldest immediate, or waits. `give` as in [`arrive`](ImmMatching::arrive). Returns whether an
    /// immediate was taken.
    pub fn call(&mut self, call: W, give: impl FnOnce(W, ImmEvent) -> bool) -> bool {
        let Some(event) = self.events.front() else {
            self.calls.push_back(call);
            return false;
        };
        let taken = give(call, *event);
        if taken {
            self.events.pop_front();
        }
        taken
    }

    /// An immediate whose call never looked at it goes back to the front.
    pub fn put_back(&mut self, event: ImmEvent, give: impl FnMut(W, ImmEvent) -> bool) -> bool {
        if self.calls.is_empty() {
            self.events.push_front(event);
            return false;
        }
        self.arrive(event, give)
    }

    /// Removes calls for which `has_ended` returns true.
    pub fn remove_ended(&mut self, mut has_ended: impl FnMut(&mut W) -> bool) {
        self.calls.retain_mut(|call| !has_ended(call));
    }

    /// Takes the oldest call.
    pub fn take_call(&mut self) -> Option<W> {
        self.calls.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    proptest! {
        /// In every order of arrivals, calls and cancellations: each immediate goes to one call, in order, and none is lost.
        #[test]
        fn immediates_reach_calls_in_order(steps in proptest::collection::vec((0u8..3, any::<u8>()), 0..120)) {
            let mut matching = ImmMatching::new(8, 8);
            let (mut arrived, mut called) = (0u32, 0u32);
            let mut ended: Vec<u32> = Vec::new();
            let mut given: Vec<(u32, u32)> = Vec::new();
            for (step, which) in steps {
                let mut give = |call: u32, event: ImmEvent| {
                    let live = !ended.contains(&call);
                    if live {
                        given.push((call, event.imm));
                    }
                    live
                };
                match step {
                    0 => {
                        matching.arrive(ImmEvent { imm: arrived, bytes: 0 }, &mut give);
                        arrived += 1;
                    }
                    1 => {
                        matching.call(called, &mut give);
                        called += 1;
                    }
                    _ => {
                        let call = u32::from(which) % (called + 1);
                        if given.iter().all(|(other, _)| *other != call) && call < called && !ended.contains(&call) {
                            ended.push(call);
                            if which.is_multiple_of(2) {
                                matching.remove_ended(|other| *other == call);
                            }
                        }
                    }
                }
                prop_assert!(given.iter().map(|(_, imm)| *imm).eq(0..given.len() as u32), "in order, none twice");
                prop_assert!(given.is_sorted(), "calls in order");
                prop_assert_eq!(matching.waiting_events() + given.len(), arrived as usize, "none is lost");
                let waiting = (0..called).filter(|call| !ended.contains(call) && given.iter().all(|(other, _)| other != call));
                prop_assert!(matching.waiting_events() == 0 || waiting.count() == 0);
            }
        }
    }
}
