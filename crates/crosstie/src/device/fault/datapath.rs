//! Posting and polling with fault injection.

use core::time::Duration;
use std::time::Instant;

use super::super::{self as device, Completion, CqError, PostError, Posted, RecvWr, SendWr, pd};
use super::setup::{Cq, POLL_INTERVAL, RcQp, Srq, TICKS_PER_INTERVAL, UdQp};
use super::state::RequestQueue;

impl Cq {
    pub(crate) fn next(&mut self, to: &mut Completion) -> Result<bool, CqError> {
        self.drain(1)?;
        self.state.lock().take_ready(self.id, to)
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<bool, CqError> {
        // None: without an end.
        let deadline = Instant::now().checked_add(timeout);
        self.drain(1)?;
        loop {
            let (ready, needs_ticks) = {
                let state = self.state.lock();
                (state.has_ready(self.id), state.needs_ticks())
            };
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if ready || left.is_zero() {
                return Ok(ready);
            }
            self.inner.wait(left.min(POLL_INTERVAL))?;
            self.drain(TICKS_PER_INTERVAL)?;
            if needs_ticks {
                // A held completion counts polls: let the caller poll.
                return Ok(true);
            }
        }
    }

    /// Moves the completions of the wrapped queue into the shared state.
    fn drain(&mut self, ticks: u64) -> Result<(), CqError> {
        let mut state = self.state.lock();
        state.tick(ticks);
        let drained = &mut self.drained;
        let polled = self.inner.poll(usize::MAX, |c| drained.push(*c));
        for completion in drained.drain(..) {
            state.accept_completion(self.id, completion);
        }
        polled.map(drop)
    }
}

impl Srq {
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let mut state = self.state.lock();
        let owner = RequestQueue::Srq(self.id);
        state.begin_post(owner)?;
        let id = state.next_request_id();
        self.inner.post_recv(&RecvWr { wr_id: id, sges: wr.sges })?;
        state.track_recv(id, wr.wr_id, owner);
        Ok(())
    }

    /// Posts each receive on its own, so that each can be refused.
    pub(crate) fn post_recvs(&mut self, wr: &RecvWr<'_>, count: u32) -> Result<u32, PostError> {
        for posted in 0..count {
            match self.post_recv(wr) {
                Err(error) if posted == 0 => return Err(error),
                Err(_) => return Ok(posted),
                Ok(()) => {}
            }
        }
        Ok(count)
    }
}

impl RcQp {
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        self.state.lock().post_rc(self.qp_num, wr, device::RcQp::post)
    }

    pub(crate) fn post_detached(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        self.state.lock().post_rc(self.qp_num, wr, device::RcQp::post_detached)
    }

    pub(crate) fn batch_begin(&mut self) {}

    /// Posts each request on its own: on hardware, too, a batch may be split anywhere.
    pub(crate) fn batch_post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        self.post(wr)
    }

    pub(crate) fn batch_submit(&mut self) -> Result<(), PostError> {
        Ok(())
    }

    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.state.lock().post_recv(self.qp_num, wr)
    }
}

impl UdQp {
    pub(crate) fn post(
        &mut self,
        to: &device::Ah,
        qp_num: u32,
        qkey: u32,
        wr: &SendWr<'_>,
    ) -> Result<Posted, PostError> {
        let pd::AhProvider::Fault(to) = &to.provider else {
            return Err(PostError::Invalid("the address handle belongs to another device"));
        };
        self.state
            .lock()
            .post_ud(self.qp_num, &to.address(), wr, |qp, wr| qp.post(&to.inner, qp_num, qkey, wr))
    }

    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.state.lock().post_recv(self.qp_num, wr)
    }
}
