//! Datagram queue pairs. A datagram goes to any queue pair of any device; it is lost if the receiver has no receive for it.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::control::{self, REPLY_TIMEOUT, Request};
use super::cq_ring::{CqRing, NewCqe, Overrun};
use super::error::ExecuteError;
use super::layout::{
    ConnectionWord, CqeKind, KIND_UD, QpNum, RequestWord, short_epoch, taker_of_datagram_sender,
};
use super::link::Link;
use super::lock::locked;
use super::peer_lines::OpenLine;
use super::peer_memory::PeerMemory;
use super::qp::{QpShared, RecvSource};
use super::qp_setup;
use super::quiescence::OperationGuard;
use super::recv::PeerRecvQueue;
use super::request::{check_data, check_local, is_send_queue_full};
use super::setup::{DeviceHandle, Pd};
use super::shared_recv::PostCursor;
use super::state::DeviceShared;
use super::{Cq, Srq};
use crate::device::pd::AhProvider;
use crate::device::{
    Data, DeviceAddress, DeviceError, Opcode, PostError, Posted, QpConfig, QpState, RecvWr, SendOp, SendWr,
    Signal, Status, UdQp as UdContract,
};

impl Pd {
    pub(crate) fn create_ud(
        &self,
        pd: u32,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<UdQp, DeviceError> {
        let shared = qp_setup::create(self, pd, config, send_cq, recv_cq, srq, KIND_UD)?;
        Ok(UdQp {
            shared,
            handle: self.handle.clone(),
            config: *config,
            cursor: PostCursor::default(),
            peers: Vec::new(),
            sq_posted: 0,
        })
    }

    pub(crate) fn create_ah(&self, to: &DeviceAddress) -> Result<Ah, DeviceError> {
        let device = &self.handle.device;
        let route = Mutex::new(Route::Link(device.link(to)?));
        Ok(Ah { address: *to, device: device.gid, route })
    }
}

/// A resolved device address.
#[derive(Debug)]
pub struct Ah {
    address: DeviceAddress,
    /// The name of the device that made it.
    device: [u8; 16],
    /// Needed when a queue pair sends to the device for the first time, and after a link has ended. A thread that waits for the lock waits for
    /// this device.
    route: Mutex<Route>,
}

/// How a device is reached.
#[derive(Debug)]
enum Route {
    /// Over this link, which may have ended since.
    Link(Arc<Link>),
    /// It did not reply, because its process is stopped. Until this time posts fail and do not wait for it again.
    Silent(Instant),
    /// It is closed, or its process has ended.
    Gone,
}

impl Ah {
    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }

    /// A line at the device for a new datagram sender, over a new link if that of the handle has ended. `None` if the device is gone.
    #[cold]
    fn open_peer(&self, device: &DeviceShared) -> Result<Option<DatagramPeer>, DeviceError> {
        let mut route = locked(&self.route);
        let own = match &*route {
            Route::Link(link) if !link.is_dead() => Some(link.clone()),
            // Somebody else may have connected to it again.
            _ => device.peers.known_link(&self.address.gid),
        };
        let link = match (own, &*route) {
            (Some(link), _) => Ok(link),
            (None, Route::Silent(until)) if Instant::now() < *until => {
                return Err(DeviceError::Unreachable("it did not reply a moment ago".into()));
            }
            (None, Route::Gone) => return Ok(None),
            (None, _) if control::is_gone(&self.address.gid) => {
                *route = Route::Gone;
                return Ok(None);
            }
            (None, _) => device.link(&self.address),
        };
        let opened = link.and_then(|link| {
            *route = Route::Link(link.clone());
            DatagramPeer::new(&link)
        });
        if let Err(DeviceError::Unreachable(_)) = opened {
            *route = Route::Silent(Instant::now() + REPLY_TIMEOUT);
        }
        opened.map(Some)
    }
}

/// An unreliable datagram queue pair.
#[derive(Debug)]
pub struct UdQp {
    shared: Arc<QpShared>,
    config: QpConfig,
    cursor: PostCursor,
    /// Devices that this queue pair has sent to.
    peers: Vec<DatagramPeer>,
    sq_posted: u64,
    #[expect(dead_code, reason = "keeps the device open")]
    handle: Arc<DeviceHandle>,
}

/// A device that this queue pair has sent to.
#[derive(Debug)]
struct DatagramPeer {
    link: Arc<Link>,
    /// The line at the peer that was assigned to this sender.
    line: OpenLine,
    taker: u16,
    /// The queue pair that the last datagram went to.
    last: Option<Destination>,
}

/// A private copy of what the receiver's block said. Valid as long as its connection word does not change.
#[derive(Debug)]
struct Destination {
    num: u32,
    connection: ConnectionWord,
    ring: CqRing,
    recv: PeerRecvQueue,
    pd: u32,
    qkey: u32,
    /// Whether the receiver was told that the queue pair has failed. It need not be told for every datagram that is still sent.
    is_notified: bool,
}

impl UdQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.shared.num
    }

    pub(crate) fn state(&self) -> QpState {
        self.shared.state()
    }

    pub(crate) fn activate(&mut self, qkey: u32) -> Result<(), DeviceError> {
        if self.state() != QpState::Reset {
            return Err(self.shared.wrong_state("activating", "RESET"));
        }
        self.shared.block.access.store(qkey, Relaxed);
        self.shared.open(QpState::ReadyToSend);
        Ok(())
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.shared.move_to_error();
        Ok(())
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let RecvSource::Datagram(queue) = &self.shared.recv else {
            return Err(PostError::Invalid("the queue pair uses a shared receive queue: post there"));
        };
        let state = self.shared.state();
        if state == QpState::Reset {
            return Err(PostError::WrongState(state));
        }
        queue.post(&mut self.cursor, wr, 1)?;
        if state == QpState::Error {
            self.shared.request_flush();
        }
        Ok(())
    }

    pub(crate) fn post(
        &mut self,
        to: &crate::device::Ah,
        qp_num: u32,
        qkey: u32,
        wr: &SendWr<'_>,
    ) -> Result<Posted, PostError> {
        let own = self.shared.device.gid;
        let to = match &to.provider {
            AhProvider::Software(to) if to.device == own => to,
            _ => return Err(PostError::Invalid("the address handle belongs to another device")),
        };
        let state = self.shared.state();
        if state != QpState::ReadyToSend && state != QpState::Error {
            return Err(PostError::WrongState(state));
        }
        let imm = match wr.op {
            SendOp::Send => None,
            SendOp::SendImm(imm) => Some(imm),
            _ => return Err(PostError::Invalid("a datagram can only be SEND or SEND+IMM")),
        };
        let len = check_data(&wr.data, &self.config, self.shared.device.attr.max_datagram.into())?;
        // Acquire, partner: the Release store in `Cq::decode`.
        if is_send_queue_full(self.sq_posted, self.shared.sq_done.load(Acquire), self.config.max_send_wr) {
            return Err(PostError::Full);
        }
        let peer = self.peer_index(to)?;
        let shared = self.shared.clone();
        let status = if state == QpState::Error {
            Status::Flushed
        } else if let Err(ExecuteError::Failed { status, .. }) = check_local(shared.pd, &wr.op, &wr.data) {
            status
        } else {
            // The sender of a datagram sees success whether or not it is delivered.
            if let Some(peer) = peer {
                self.peers[peer].deliver(&shared, qp_num, qkey, &wr.data, len, imm);
            }
            Status::Success
        };
        if status == Status::Success && wr.signal != Signal::Always {
            return Ok(Posted::Done);
        }
        let position = self.sq_posted;
        self.sq_posted += 1;
        if status == Status::Success {
            shared.complete_send(wr.wr_id, Opcode::Send, status, len, position);
        } else {
            shared.complete_send(wr.wr_id, Opcode::Unspecified, status, 0, position);
            shared.move_to_error();
        }
        Ok(Posted::Queued)
    }

    /// The device of an address handle. `None` if it is gone: then a datagram is lost, as on a network.
    fn peer_index(&mut self, to: &Ah) -> Result<Option<usize>, PostError> {
        let is_meant = |peer: &DatagramPeer| peer.link.gid == to.address.gid && !peer.link.is_dead();
        if let Some(index) = self.peers.iter().position(is_meant) {
            return Ok(Some(index));
        }
        self.peers.retain(|peer| !peer.link.is_dead());
        let opened = to.open_peer(&self.shared.device).map_err(|e| {
            PostError::Device(match e {
                DeviceError::Unreachable(_) => libc::EHOSTUNREACH,
                _ => libc::ENOBUFS,
            })
        })?;
        Ok(opened.map(|peer| {
            self.peers.push(peer);
            self.peers.len() - 1
        }))
    }
}

impl Drop for UdQp {
    fn drop(&mut self) {
        qp_setup::destroy(&self.shared);
    }
}

impl DatagramPeer {
    fn new(link: &Arc<Link>) -> Result<DatagramPeer, DeviceError> {
        let (line, sender) = link.request_peer_line()?;
        Ok(DatagramPeer { link: link.clone(), line, taker: taker_of_datagram_sender(sender), last: None })
    }

    /// Delivers a datagram, or drops it.
    fn deliver(&mut self, from: &QpShared, num: u32, qkey: u32, data: &Data<'_>, len: u32, imm: Option<u32>) {
        let DatagramPeer { link, line, taker, last } = self;
        let operation = OperationGuard::begin(line);
        let block = &link.qps[QpNum::from_bits(num).index() as usize];
        // Acquire, partner: the Release store in `QpShared::open`.
        let connection = ConnectionWord(block.connection.load(Acquire));
        if last.as_ref().is_none_or(|last| last.num != num || last.connection != connection) {
            *last = None;
            if !connection.is_ready()
                || block.qp_num.load(Relaxed) != num
                || block.kind.load(Relaxed) != KIND_UD
            {
                return;
            }
            let ring = CqRing::new(&link.segment, block.recv_cq.load(Relaxed));
            let recv = PeerRecvQueue::new(&link.segment, block, *taker, 0);
            let (Some(ring), Some(recv)) = (ring, recv) else { return };
            let (pd, qkey) = (block.pd.load(Relaxed), block.access.load(Relaxed));
            *last = Some(Destination { num, connection, ring, recv, pd, qkey, is_notified: false });
        }
        let Some(to) = last else { return };
        if to.qkey != qkey {
            return;
        }
        let Some(taken) = to.recv.take(block, line) else { return };
        let mut grh = [0; UdContract::GRH];
        grh[0] = 0x60;
        grh[4..6].copy_from_slice(&(len as u16).to_be_bytes());
        grh[8..24].copy_from_slice(&from.device.gid);
        grh[24..40].copy_from_slice(&link.gid);
        let memory = PeerMemory { link, pd: to.pd, streaming: false };
        let status = memory.scatter(to.recv.sges(taken), &grh, data).err().unwrap_or(Status::Success);
        let completion = NewCqe {
            kind: CqeKind::Recv,
            opcode: if status == Status::Success { Opcode::Recv } else { Opcode::Unspecified },
            status,
            request: RequestWord::of_recv(taken.slot.into(), from.num),
            qp_num: num,
            byte_len: len + UdContract::GRH as u32,
            detail: imm.unwrap_or(0),
            has_imm: imm.is_some(),
            epoch: short_epoch(connection.epoch()),
        };
        line.cq_at.store(block.recv_cq.load(Relaxed), Relaxed);
        let notice = match to.ring.push(&line.claim, &completion) {
            Err(Overrun) => Some(Request::CQ_OVERRUN),
            Ok(_) => (status != Status::Success).then_some(Request::QP_ERROR),
        };
        if let Some(kind) = notice.filter(|_| !to.is_notified) {
            to.is_notified = true;
            link.send_notice(&Request { qp_num: num, a: connection.epoch(), ..Request::new(kind) });
        }
        drop(operation);
    }
}
