//! Datagrams: one message to any queue pair, which may have no room for it.

use std::sync::Arc;

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::control::Request;
use super::cqring::{CqRing, Entry, Overrun};
use super::datapath::{Trouble, check_data, check_local};
use super::layout::{Connection, CqeKind, KIND_UD, LINES_AT, PeerLine, QpNum, short_epoch, taker_of_line};
use super::link::Link;
use super::qp::{QpLocal, UdQp};
use super::reach::Inside;
use super::recv::RecvTarget;
use crate::device::pd::AhProvider;
use crate::device::{
    Data, DeviceError, Opcode, PostError, QpState, SendOp, SendWr, Status, UdQp as Contract,
};
use crate::memory::segment::SharedRef;

/// A device that this queue pair has sent to.
#[derive(Debug)]
pub(super) struct Target {
    link: Arc<Link>,
    line: SharedRef<PeerLine>,
    taker: u16,
    /// The queue pair sent to last.
    last: Option<Destination>,
}

#[derive(Debug)]
struct Destination {
    num: u32,
    connection: Connection,
    ring: CqRing,
    recv: RecvTarget,
    pd: u32,
    qkey: u32,
}

impl UdQp {
    pub(crate) fn post(
        &mut self,
        to: &crate::device::Ah,
        qp_num: u32,
        qkey: u32,
        wr: &SendWr<'_>,
    ) -> Result<(), PostError> {
        let AhProvider::Software(to) = &to.provider else {
            return Err(PostError::Invalid("the address handle belongs to another device"));
        };
        let state = self.local.state();
        if state != QpState::ReadyToSend && state != QpState::Error {
            return Err(PostError::WrongState(state));
        }
        let imm = match wr.op {
            SendOp::Send => None,
            SendOp::SendImm(imm) => Some(imm),
            _ => return Err(PostError::Invalid("datagrams are SEND or SEND+IMM only")),
        };
        let len = check_data(&wr.data, &self.config, self.local.inner.attr().max_datagram.into())?;
        // Acquire, partner: the Release store in `Cq::poll`.
        if self.sq_posted - self.local.sq_done.load(Acquire) >= self.config.max_send_wr.into() {
            return Err(PostError::Full);
        }
        let target = if to.link.is_dead() { None } else { Some(self.target(&to.link)?) };
        let position = self.sq_posted;
        self.sq_posted += 1;
        let local = self.local.clone();
        let status = if state == QpState::Error {
            Status::Flushed
        } else if let Err(Trouble::Failed { status, .. }) = check_local(local.pd, &wr.op, &wr.data) {
            status
        } else {
            // Lost datagrams are nobody's failure.
            if let Some(target) = target {
                self.targets[target].deliver(&local, qp_num, qkey, &wr.data, len, imm);
            }
            Status::Success
        };
        if status != Status::Success {
            local.complete_send(wr.wr_id, Opcode::Unspecified, status, 0, position);
            local.break_off();
        } else if wr.signaled {
            local.complete_send(wr.wr_id, Opcode::Send, status, len, position);
        }
        Ok(())
    }

    fn target(&mut self, link: &Arc<Link>) -> Result<usize, PostError> {
        if let Some(index) = self.targets.iter().position(|target| Arc::ptr_eq(&target.link, link)) {
            return Ok(index);
        }
        self.targets.retain(|target| !target.link.is_dead());
        self.targets.push(Target::new(link).map_err(|_| PostError::Device(libc::ENOBUFS))?);
        Ok(self.targets.len() - 1)
    }
}

impl Target {
    fn new(link: &Arc<Link>) -> Result<Target, DeviceError> {
        let index = link.request_line()?;
        let line = SharedRef::new(&link.segment, LINES_AT + u64::from(index) * size_of::<PeerLine>() as u64)
            .ok_or(DeviceError::Exhausted { what: "lines for datagram senders at the peer" })?;
        Ok(Target { link: link.clone(), line, taker: taker_of_line(index), last: None })
    }

    /// Delivers a datagram, or loses it.
    fn deliver(&mut self, from: &QpLocal, num: u32, qkey: u32, data: &Data<'_>, len: u32, imm: Option<u32>) {
        let Target { link, line, taker, last } = self;
        let inside = Inside::enter(line);
        let block = &link.qps[QpNum::from_bits(num).index() as usize];
        // Acquire, partner: the Release store in `UdQp::activate`.
        let connection = Connection(block.connection.load(Acquire));
        if last.as_ref().is_none_or(|last| last.num != num || last.connection != connection) {
            *last = None;
            if !connection.is_ready()
                || block.qp_num.load(Relaxed) != num
                || block.kind.load(Relaxed) != KIND_UD
            {
                return;
            }
            let ring = CqRing::new(&link.segment, block.recv_cq.load(Relaxed));
            let recv = RecvTarget::new(&link.segment, block, *taker);
            let (Some(ring), Some(recv)) = (ring, recv) else { return };
            let (pd, qkey) = (block.pd.load(Relaxed), block.access.load(Relaxed));
            *last = Some(Destination { num, connection, ring, recv, pd, qkey });
        }
        let Some(to) = last else { return };
        if to.qkey != qkey {
            return;
        }
        let Some(slot) = to.recv.take(block) else { return };
        let mut grh = [0; Contract::GRH];
        grh[0] = 0x60;
        grh[4..6].copy_from_slice(&(len as u16).to_be_bytes());
        grh[8..24].copy_from_slice(&from.inner.gid);
        grh[24..40].copy_from_slice(&link.gid);
        let target = super::reach::Target { link, pd: to.pd };
        let status = target.scatter(to.recv.pieces(slot), &grh, data).err().unwrap_or(Status::Success);
        let entry = Entry {
            kind: CqeKind::SharedRecv,
            opcode: if status == Status::Success { Opcode::Recv } else { Opcode::Unspecified },
            status,
            wr: u64::from(from.num) << 32 | u64::from(slot.slot),
            qp_num: num,
            byte_len: len + Contract::GRH as u32,
            extra: imm.unwrap_or(0),
            has_imm: imm.is_some(),
            epoch: short_epoch(connection.epoch()),
        };
        line.ring.store(block.recv_cq.load(Relaxed), Relaxed);
        if to.ring.push(&line.claim, &entry) == Err(Overrun) {
            link.tell(&Request { qp_num: num, a: connection.epoch(), ..Request::new(Request::CQ_OVERRUN) });
        } else if status != Status::Success {
            link.tell(&Request { qp_num: num, a: connection.epoch(), ..Request::new(Request::QP_ERROR) });
        }
        drop(inside);
    }
}
