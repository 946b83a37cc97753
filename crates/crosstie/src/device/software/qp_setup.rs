//! Creating and destroying the shared part of a queue pair.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::error::check_limit;
use super::lane::Lane;
use super::layout::{ConnectionWord, KIND_UD, QpBlock, qp_block_at};
use super::qp::{QpParts, QpShared, RecvSource};
use super::quiescence::{DROP_TIMEOUT, Pause};
use super::recv::RecvQueue;
use super::removal::QpRemoval;
use super::setup::Pd;
use super::shared_recv::SharedRecvQueue;
use super::{Cq, Srq};
use crate::device::{DeviceError, QpConfig};
use crate::memory::segment::SharedRef;

/// Creates a queue pair of either kind and adds it to the device's table and to its completion queues.
pub(super) fn create(
    pd: &Pd,
    pd_id: u32,
    config: &QpConfig,
    send_cq: &Cq,
    recv_cq: &Cq,
    srq: Option<&Srq>,
    kind: u32,
) -> Result<Arc<QpShared>, DeviceError> {
    let device = &pd.handle.device;
    let attr = &device.attr;
    check_limit("send requests", config.max_send_wr, attr.max_qp_wr)?;
    check_limit("receives", config.max_recv_wr, attr.max_qp_wr)?;
    check_limit("scatter/gather entries per send request", config.max_send_sge, attr.max_sge)?;
    check_limit("scatter/gather entries per receive", config.max_recv_sge, attr.max_sge)?;
    check_limit("inline bytes", config.max_inline, attr.max_inline)?;
    for cq in [send_cq, recv_cq] {
        if !Arc::ptr_eq(&cq.handle.device, device) {
            return Err(DeviceError::WrongDevice("the completion queue"));
        }
    }
    if srq.is_some_and(|srq| !Arc::ptr_eq(&srq.handle.device, device)) {
        return Err(DeviceError::WrongDevice("the shared receive queue"));
    }
    device.add_qp(|key| {
        let epoch = device.next_epoch(0);
        let allocate = |len| device.allocate(len);
        let lane = match kind {
            KIND_UD => None,
            _ => {
                let receives = srq.map_or(config.max_recv_wr, |srq| srq.shared.capacity());
                Some(Lane::new(allocate, receives, srq.is_some(), epoch)?)
            }
        };
        let recv = match srq {
            Some(srq) => RecvSource::Shared(srq.shared.clone()),
            None if kind == KIND_UD => {
                let queue = SharedRecvQueue::new(allocate, pd_id, config.max_recv_wr, config.max_recv_sge)?;
                RecvSource::Datagram(Arc::new(queue))
            }
            None => RecvSource::Own(RecvQueue::new(allocate, config.max_recv_wr, config.max_recv_sge)?),
        };
        let block: SharedRef<QpBlock> = SharedRef::new(&device.memory.segment, qp_block_at(key.index()))
            .ok_or(DeviceError::Exhausted { what: "queue pairs" })?;
        block.connection.store(ConnectionWord::NOT_READY.0, Relaxed);
        block.qp_num.store(key.bits(), Relaxed);
        block.kind.store(kind, Relaxed);
        block.pd.store(pd_id, Relaxed);
        block.recv_cq.store(recv_cq.shared.at(), Relaxed);
        let line = &block.owner_line;
        line.posted.store(0, Relaxed);
        let (at, depth, sges, shared) = match &recv {
            RecvSource::Own(queue) => (queue.memory.at(), queue.depth(), queue.max_sge(), 0),
            RecvSource::Shared(queue) | RecvSource::Datagram(queue) => {
                (queue.memory.at(), queue.depth(), queue.max_sge(), 1)
            }
        };
        line.recv_at.store(at, Relaxed);
        line.recv_depth.store(depth, Relaxed);
        line.recv_sges.store(sges, Relaxed);
        line.shared.store(shared, Relaxed);
        if let Some(lane) = &lane {
            lane.describe(&block);
        }
        let parts = QpParts {
            device: device.clone(),
            num: key.bits(),
            pd: pd_id,
            block,
            send_cq: send_cq.shared.clone(),
            recv_cq: recv_cq.shared.clone(),
            recv,
            lane,
        };
        let qp = Arc::new(QpShared::new(parts, kind, epoch));
        qp.send_cq.add_qp(&qp);
        if !Arc::ptr_eq(&qp.send_cq, &qp.recv_cq) {
            qp.recv_cq.add_qp(&qp);
        }
        Ok(qp)
    })
}

/// Closes a queue pair and removes it. Waits up to [`DROP_TIMEOUT`] for its own peer to leave an operation; a peer that is
/// still inside then does not hold up the caller: the device removes the queue pair when the peer has left.
pub(super) fn destroy(qp: &Arc<QpShared>) {
    if !qp.device.is_of_this_process() {
        return;
    }
    qp.mark_destroyed();
    qp.close();
    let mut removal = QpRemoval::new(qp);
    let (deadline, mut pause) = (Instant::now() + DROP_TIMEOUT, Pause::default());
    while !removal.try_finish() {
        if Instant::now() >= deadline {
            return qp.device.defer_qp_removal(removal);
        }
        pause.wait();
    }
}
