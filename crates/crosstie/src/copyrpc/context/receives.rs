//! The shared receive queue (SRQ) of a context.
//!
//! Every batch uses one receive. A poll that finds nothing posts some again; when a third of the receives is used, all are posted again.
//!
//! The receive CQ cannot overflow. A refill posts at most as many receives as completions were polled since the last one, so receives in the
//! SRQ and completions in the CQ together do not become more. Only [`Receives::forget_all`] lets a refill add to them: at most
//! [`Config::receives`](crate::copyrpc::Config::receives), and only if the CQ was seen empty, so that all others are in the SRQ.

use std::cell::{Cell, Ref, RefCell};

use crate::copyrpc::receive_policy::{IDLE_REFILL, MAX_COMPLETIONS, refill_at};
use crate::device::{DeviceError, Pd, PostError, RecvWr, Srq, SrqConfig};

/// Completions that the receive CQ is asked for, if so many receives are kept posted.
pub(super) fn recv_cq_depth(receives: u32) -> u32 {
    // A device may round the number of receives up, to less than twice as many. They can all become completions while as many as
    // configured are posted.
    3 * receives + MAX_COMPLETIONS as u32
}

pub(super) struct Receives {
    srq: RefCell<Srq>,
    count: ReceiveCount,
}

impl Receives {
    /// A queue in which `receives` are to be kept. None is posted yet.
    pub(super) fn new(pd: &Pd, receives: u32) -> Result<Receives, DeviceError> {
        let srq = pd.create_srq(&SrqConfig { max_wr: receives, max_sge: 1 })?;
        Ok(Receives { srq: RefCell::new(srq), count: ReceiveCount::new(receives) })
    }

    /// The queue, for a queue pair that uses it.
    pub(super) fn srq(&self) -> Ref<'_, Srq> {
        self.srq.borrow()
    }

    /// Notes that receives have completed.
    #[inline]
    pub(super) fn note_used(&self, count: usize) {
        self.count.note_used(count as u32);
    }

    /// Whether all should be posted again.
    #[inline]
    pub(super) fn are_few(&self) -> bool {
        self.count.are_few()
    }

    /// Whether a poll that finds nothing should post [`IDLE_REFILL`] again.
    #[inline]
    pub(super) fn lack_some(&self) -> bool {
        self.count.lack_some()
    }

    /// Posts up to `most` receives again. An error says why none is left.
    pub(super) fn refill(&self, most: u32) -> Result<(), PostError> {
        let mut srq = self.srq.borrow_mut();
        self.count.refill(most, |count| srq.post_recvs(&RecvWr { wr_id: 0, sges: &[] }, count))
    }

    /// Lets the next refill post as many as the queue takes.
    pub(super) fn forget_all(&self) {
        self.count.posted.set(0);
    }
}

struct ReceiveCount {
    /// Receives that are to be kept posted.
    kept: u32,
    /// Receives that are posted and not used, as far as is known, and the number at which all are posted again.
    posted: Cell<u32>,
    refill_at: u32,
}

impl ReceiveCount {
    fn new(kept: u32) -> ReceiveCount {
        ReceiveCount { kept, posted: Cell::new(0), refill_at: refill_at(kept) }
    }

    #[inline]
    fn note_used(&self, count: u32) {
        self.posted.set(self.posted.get().saturating_sub(count));
    }

    #[inline]
    fn are_few(&self) -> bool {
        self.posted.get() <= self.refill_at
    }

    #[inline]
    fn lack_some(&self) -> bool {
        self.posted.get() + IDLE_REFILL <= self.kept
    }

    /// As [`Receives::refill`]. `post` posts up to a number of receives and returns how many it has posted.
    fn refill(
        &self,
        most: u32,
        mut post: impl FnMut(u32) -> Result<u32, PostError>,
    ) -> Result<(), PostError> {
        let posted = &self.posted;
        let receives = self.kept.min(posted.get().saturating_add(most));
        while posted.get() < receives {
            match post(receives - posted.get()) {
                Ok(count) => posted.set(posted.get() + count),
                // The queue is full.
                Err(PostError::Full) => posted.set(receives),
                // The receives that are left are enough for now. The next check of the peers tries again.
                Err(_) if posted.get() > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Random, seed};

    /// The queues of a NIC: a receive leaves the SRQ when a message arrives, and its completion waits in the CQ. The SRQ may have more
    /// room than it was asked for.
    struct Nic {
        room: u32,
        in_srq: u32,
        in_cq: u32,
        receives: ReceiveCount,
        is_drained: bool,
    }

    impl Nic {
        /// Messages arrive; `lost` of them for queue pairs that are gone, whose receives are used without a completion.
        fn receive(&mut self, messages: u32, lost: u32) {
            let messages = messages.min(self.in_srq);
            self.in_srq -= messages;
            self.in_cq += messages - lost.min(messages);
        }

        fn refill(&mut self, most: u32) {
            let (room, in_srq) = (self.room, &mut self.in_srq);
            let refilled = self.receives.refill(most, |count| {
                let count = count.min(room - *in_srq);
                *in_srq += count;
                if count > 0 { Ok(count) } else { Err(PostError::Full) }
            });
            assert!(refilled.is_ok());
        }

        fn refill_all(&mut self) {
            self.receives.posted.set(0);
            self.refill(u32::MAX);
        }

        /// As `poll_recv_cq`.
        fn poll(&mut self) {
            let taken = self.in_cq.min(MAX_COMPLETIONS as u32);
            self.in_cq -= taken;
            self.is_drained = taken < MAX_COMPLETIONS as u32;
            self.receives.note_used(taken);
            if taken > 0 && self.receives.are_few() {
                self.refill(u32::MAX);
            } else if taken == 0 && self.receives.lack_some() {
                self.refill(IDLE_REFILL);
            }
        }
    }

    /// The most receives and completions at a time of a random run, as a part of what the CQ was asked for. `only_if_drained`:
    /// all receives are posted again only if the CQ was seen empty.
    fn fullest(random: &mut Random, only_if_drained: bool) -> f64 {
        let receives = 1 + random.below(200) as u32;
        let room = receives + random.below(receives.into()) as u32;
        let receives = ReceiveCount::new(receives);
        let mut nic = Nic { room, in_srq: 0, in_cq: 0, receives, is_drained: true };
        nic.refill(u32::MAX);
        let mut highest = 0;
        for _ in 0..2000 {
            match random.below(4) {
                0 => nic.receive(random.below(2 * u64::from(room)) as u32, 0),
                1 => nic.receive(random.below(8) as u32, random.below(8) as u32),
                2 => nic.poll(),
                // The check of the peers. Messages arrive between the look at the CQ and the posts.
                _ if nic.is_drained || !only_if_drained => {
                    nic.receive(random.below(2 * u64::from(room)) as u32, 0);
                    nic.refill_all();
                    // It is done again only after another poll.
                    nic.is_drained = false;
                }
                _ => {}
            }
            highest = highest.max(nic.in_srq + nic.in_cq);
        }
        // Receives that were lost come back.
        while !nic.is_drained {
            nic.poll();
        }
        nic.refill_all();
        let kept = nic.receives.kept;
        assert!(nic.in_srq >= kept, "{} of {kept} receives", nic.in_srq);
        f64::from(highest) / f64::from(recv_cq_depth(kept))
    }

    #[test]
    fn receives_and_completions_never_exceed_the_completion_queue() {
        let mut random = Random(seed());
        let highest = (0..300).map(|_| fullest(&mut random, true)).fold(0.0, f64::max);
        println!("at most {highest:.2} of the completion queue was used");
        assert!(highest <= 1.0, "{highest} times the completion queue");
        // The same run finds an overflow if the rule is broken.
        let highest = (0..300).map(|_| fullest(&mut random, false)).fold(0.0, f64::max);
        assert!(highest > 1.0, "the test does not notice a broken rule: {highest}");
    }
}
