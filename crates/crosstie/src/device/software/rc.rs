//! Reliable connected queue pairs: states and receives. Send requests are in `datapath.rs`.

use std::sync::Arc;
use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};
use std::time::Duration;

use super::attempts::AttemptWord;
use super::lane::LANE_DATA;
use super::layout::{ConnectionWord, KIND_RC, gid_words};
use super::link::Link;
use super::peer_lines::LineUse;
use super::peer_qp::PeerQp;
use super::qp::{QpShared, RecvSource};
use super::qp_setup;
use super::quiescence::{PeerDeparture, QUIESCE_TIMEOUT};
use super::setup::{DeviceHandle, Pd};
use super::{Cq, Srq};
use crate::device::{Access, ConnectConfig, DeviceError, PostError, QpAddress, QpConfig, QpState, RecvWr};

impl Pd {
    pub(crate) fn create_rc(
        &self,
        pd: u32,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<RcQp, DeviceError> {
        let shared = qp_setup::create(self, pd, config, send_cq, recv_cq, srq, KIND_RC)?;
        Ok(RcQp {
            shared,
            _handle: self.handle.clone(),
            config: *config,
            peer: None,
            link: None,
            connect: ConnectConfig::default(),
            max_message: self.handle.device.attr.max_message,
            sq_posted: 0,
            sq_limit: 0,
            max_short: (LANE_DATA as u32).min(config.max_inline),
            sq_base: 0,
            leaving: None,
            attempts: None,
        })
    }
}

/// A reliable connected queue pair.
#[derive(Debug)]
#[repr(C)]
pub struct RcQp {
    // What a post needs comes first: one cache line.
    pub(super) shared: Arc<QpShared>,
    /// The sending half. `None` before the first request, and while the progress thread has it in `QpShared::deferred`.
    pub(super) peer: Option<Box<PeerQp>>,
    /// Send requests accepted so far.
    pub(super) sq_posted: u64,
    /// There is room for requests before this position.
    pub(super) sq_limit: u64,
    /// The longest inline message that travels in a lane entry.
    pub(super) max_short: u32,
    /// Send requests before this position were dropped by a reset.
    pub(super) sq_base: u64,
    /// That of the device.
    pub(super) max_message: u64,
    pub(super) config: QpConfig,
    pub(super) link: Option<(Arc<Link>, QpAddress)>,
    pub(super) connect: ConnectConfig,
    /// The departure of the peer, if a reset did not wait for it to the end.
    leaving: Option<PeerDeparture>,
    /// For [`RcQp::post_detached`]; `None` before its first call.
    pub(super) attempts: Option<AttemptWord>,
    _handle: Arc<DeviceHandle>,
}

impl RcQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.shared.num
    }

    #[inline]
    pub(crate) fn state(&self) -> QpState {
        self.shared.state()
    }

    pub(crate) fn address(&self) -> QpAddress {
        QpAddress { device: self.shared.device.address(), qp_num: self.shared.num, psn: 0 }
    }

    pub(crate) fn init(&mut self, access: Access) -> Result<(), DeviceError> {
        if self.state() != QpState::Reset {
            return Err(self.shared.wrong_state("going to INIT", "RESET"));
        }
        self.shared.block.access.store(access.bits(), Relaxed);
        self.shared.set_state(QpState::Init);
        Ok(())
    }

    pub(crate) fn ready_to_receive(
        &mut self,
        peer: &QpAddress,
        config: &ConnectConfig,
    ) -> Result<(), DeviceError> {
        if self.state() != QpState::Init {
            return Err(self.shared.wrong_state("going to RTR", "INIT"));
        }
        config.check()?;
        let link = self.shared.device.link(&peer.device)?;
        let shared = &self.shared;
        let tenure = ConnectionWord::ready(shared.epoch()).tenure();
        let taken = shared.lane.as_ref().map_or(0, |lane| lane.first());
        let usage = LineUse::Connection { pd: shared.pd };
        let line = shared.device.peers.assign_line(peer.device.gid, tenure, usage, taken)?;
        shared.block.line.store(line.index, Relaxed);
        let [low, high] = gid_words(&peer.device.gid);
        shared.block.access.store(config.access.bits(), Relaxed);
        shared.block.rnr_timer.store(config.min_rnr_timer.into(), Relaxed);
        shared.block.peer_qp.store(peer.qp_num, Relaxed);
        shared.block.peer_gid[0].store(low, Relaxed);
        shared.block.peer_gid[1].store(high, Relaxed);
        shared.set_peer(line, &link);
        self.link = Some((link, *peer));
        shared.open(QpState::ReadyToReceive);
        // If the link ended after it was made but before `set_peer`, the service thread did not find this queue pair.
        if self.link.as_ref().is_some_and(|(link, _)| link.is_dead()) {
            shared.move_to_error();
        }
        Ok(())
    }

    pub(crate) fn ready_to_send(&mut self, config: &ConnectConfig) -> Result<(), DeviceError> {
        if self.state() != QpState::ReadyToReceive {
            return Err(self.shared.wrong_state("going to RTS", "RTR"));
        }
        config.check()?;
        self.connect = *config;
        self.shared.set_state(QpState::ReadyToSend);
        Ok(())
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.shared.move_to_error();
        Ok(())
    }

    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        self.reset_within(QUIESCE_TIMEOUT)
    }

    pub(crate) fn try_reset(&mut self) -> Result<(), DeviceError> {
        self.reset_within(Duration::ZERO)
    }

    /// Moves to RESET, if the peer leaves within this time.
    fn reset_within(&mut self, limit: Duration) -> Result<(), DeviceError> {
        let shared = &self.shared;
        let is_first = self.leaving.is_none();
        if is_first {
            self.peer = None;
            self.link = None;
            // First of all: what a progress thread completes until then has the number of the epoch that ends.
            shared.close();
            #[cfg(test)]
            super::pauses::at(super::pauses::Pause::Resetting);
            shared.begin_epoch();
        }
        // What was seen of the peer by the first attempt still counts.
        let departure = self.leaving.get_or_insert_default();
        if let Err(busy) = shared.wait_for_departure(departure, limit) {
            shared.move_to_error();
            return Err(busy);
        }
        self.leaving = None;
        if !is_first {
            // The first attempt left the queue pair in ERR.
            shared.begin_epoch();
        }
        let taken = shared.peer_line().map(|peer| peer.line.taken.load(Relaxed));
        shared.retire_peer_line();
        match (&shared.recv, &shared.lane) {
            (RecvSource::Own(queue), Some(lane)) => {
                queue.reset();
                lane.skip_to(shared.epoch(), queue.base());
            }
            (_, Some(lane)) => {
                let received = shared.received.load(Relaxed);
                lane.end_connection(shared.epoch(), received, taken.unwrap_or(lane.first()));
            }
            _ => {}
        }
        self.sq_base = self.sq_posted;
        Ok(())
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let shared = &*self.shared;
        let (state, RecvSource::Own(queue)) = (shared.state(), &shared.recv) else {
            return Err(PostError::Invalid("the queue pair uses a shared receive queue: post there"));
        };
        if matches!(state, QpState::Reset | QpState::Error) {
            return self.post_recv_unconnected(wr, state);
        }
        queue.post(&shared.block.owner_line, wr)
    }

    /// Posts a receive in RESET or ERR.
    #[cold]
    #[inline(never)]
    fn post_recv_unconnected(&mut self, wr: &RecvWr<'_>, state: QpState) -> Result<(), PostError> {
        match &self.shared.recv {
            RecvSource::Own(queue) if state == QpState::Error => {
                queue.post(&self.shared.block.owner_line, wr)?;
                self.shared.request_flush();
                Ok(())
            }
            _ => Err(PostError::WrongState(state)),
        }
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn pretend_operation(&self, is_inside: bool) {
        use crate::ring::presence;
        let attached = self.peer.as_ref().and_then(|peer| peer.attached.as_ref()).expect("a posted request");
        let busy = &attached.line.busy;
        if is_inside { presence::enter(busy) } else { presence::leave(busy) }
    }

    pub(crate) fn fail_handle(&self) -> FailHandle {
        FailHandle { shared: self.shared.clone() }
    }
}

impl Drop for RcQp {
    fn drop(&mut self) {
        qp_setup::destroy(&self.shared);
    }
}

/// Moves a queue pair to ERR from any thread.
#[derive(Clone, Debug)]
pub struct FailHandle {
    shared: Arc<QpShared>,
}

impl FailHandle {
    pub(crate) fn fail(&self) {
        if !self.shared.destroyed.load(Acquire) {
            self.shared.move_to_error();
        }
    }
}
