//! Posting to queue pairs. (Polling is in `cq.rs`, next to the state that it shares with set-up.)

use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::Arc;

use rdma_mummy_sys as ffi;
use zerocopy::IntoBytes;

use super::connect::{FailHandle, QpInner, Transport};
use super::cq::Cq;
use super::random_u64;
use super::send_ring::SendRing;
use super::setup::{AhInner, MAX_SGE, PdInner, Srq};
use crate::device::pd::AhProvider;
use crate::device::{
    Access, ConnectConfig, Data, DeviceError, PostError, Posted, QpAddress, QpConfig, QpState, RecvWr,
    SendOp, SendWr, Sge, Signal,
};

/// The calls that post send requests.
#[derive(Clone, Copy, Debug)]
pub(super) enum PostApi {
    /// `ibv_wr_*`: requests are written in place, one doorbell for a batch. The flag is true for Soft-RoCE, whose driver
    /// must be told that data is inline and does not handle lists of several entries.
    Extended(*mut ffi::ibv_qp_ex, bool),
    /// `ibv_post_send`, for drivers without `ibv_wr_*`: one doorbell per request.
    Legacy,
}

/// The posting half of a queue pair.
#[derive(Debug)]
struct Sender {
    post_api: PostApi,
    qp: *mut ffi::ibv_qp,
    /// Requests posted so far.
    posted: u64,
    /// Requests completed, when the shared count was last read.
    ended: u64,
    tag_base: u64,
    /// `posted` at the start of the open batch.
    batch: Option<u64>,
    max_inline: usize,
    max_send_sge: usize,
    max_recv_sge: usize,
    max_message: u64,
    /// Whether the device has atomics.
    atomics: bool,
    ring: Arc<SendRing>,
    inner: Arc<QpInner>,
}

// SAFETY: a queue pair may be used from any thread, one at a time; all methods take `&mut self`. The pointers make it
// `!Sync`.
unsafe impl Send for Sender {}

impl Drop for Sender {
    fn drop(&mut self) {
        self.abort_batch();
    }
}

/// Refuses an atomic if the device has none, or if its data are not 8 bytes.
#[inline]
fn check_atomic(wr: &SendWr<'_>, len: u64, atomics: bool) -> Result<(), PostError> {
    if matches!(wr.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) {
        if !atomics {
            return Err(PostError::Unsupported("atomics"));
        }
        if len != 8 || !matches!(wr.data, Data::Regions([_])) {
            return Err(PostError::Invalid("an atomic returns 8 bytes: give one entry of 8 bytes"));
        }
    }
    Ok(())
}

impl Sender {
    fn new(inner: Arc<QpInner>, max_message: u64) -> Sender {
        Sender {
            post_api: inner.post_api,
            qp: inner.qp,
            posted: 0,
            ended: 0,
            tag_base: inner.ring.tag_base.load(Relaxed),
            batch: None,
            max_inline: inner.max_inline,
            max_send_sge: inner.max_send_sge,
            max_recv_sge: inner.max_recv_sge,
            max_message,
            atomics: inner.pd.device.attr.atomics,
            ring: inner.ring.clone(),
            inner,
        }
    }

    /// Refuses what cannot be posted, before anything is written to the queue.
    #[inline]
    fn check(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let state = self.ring.state();
        if !matches!(state, QpState::ReadyToSend | QpState::Error) {
            return Err(PostError::WrongState(state));
        }
        let fetches = matches!(wr.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        let len = wr.data.len();
        match wr.data {
            Data::Regions(sges) if sges.len() > self.max_send_sge => {
                return Err(PostError::TooManySges { count: sges.len(), max: self.max_send_sge });
            }
            Data::Regions(_) => {}
            _ if fetches => {
                return Err(PostError::Invalid(
                    "READ and atomics return data: give a region, not inline data",
                ));
            }
            _ if len > self.max_inline as u64 => {
                return Err(PostError::InlineTooLong { len: len as usize, max: self.max_inline });
            }
            _ => {}
        }
        if len > self.max_message {
            return Err(PostError::TooLong(len));
        }
        check_atomic(wr, len, self.atomics)?;
        if self.posted - self.ended >= self.ring.capacity {
            // Acquire, partner: the Release store in `SendRing::retire`.
            self.ended = self.ring.ended.load(Acquire);
            if self.posted - self.ended >= self.ring.capacity {
                return Err(PostError::Full);
            }
        }
        Ok(())
    }

    #[inline]
    fn post(&mut self, wr: &SendWr<'_>, to: Option<(&AhInner, u32, u32)>) -> Result<Posted, PostError> {
        self.abort_batch();
        self.append(wr, to)?;
        self.submit()?;
        Ok(Posted::Queued)
    }

    /// Appends a request to the open batch; opens a batch if necessary.
    #[inline]
    fn append(&mut self, wr: &SendWr<'_>, to: Option<(&AhInner, u32, u32)>) -> Result<(), PostError> {
        self.check(wr)?;
        let entry = self.posted as usize & (self.ring.wr_ids.len() - 1);
        self.ring.wr_ids[entry].store(wr.wr_id, Relaxed);
        let tag = self.tag_base.wrapping_add(self.posted);
        match self.post_api {
            PostApi::Extended(_, true) if matches!(wr.data, Data::Regions([_, _, ..])) => {
                self.submit()?;
                // SAFETY: the queue pair is live and no batch is open; `check` has checked the request.
                unsafe { post_plain(self.qp, tag, wr, to)? };
            }
            PostApi::Extended(qp, soft_roce) => {
                if self.batch.is_none() {
                    // SAFETY: the queue pair is live and no batch is open on it.
                    unsafe { ffi::ibv_wr_start(qp) };
                    self.batch = Some(self.posted);
                }
                // SAFETY: a batch is open; `check` has checked the request against the queue pair's limits.
                unsafe { write(qp, tag, wr, to, soft_roce) };
            }
            // SAFETY: the queue pair is live; `check` has checked the request.
            PostApi::Legacy => unsafe { post_plain(self.qp, tag, wr, to)? },
        }
        self.posted += 1;
        Ok(())
    }

    /// Submits the open batch to the device.
    #[inline]
    fn submit(&mut self) -> Result<(), PostError> {
        let (Some(before), PostApi::Extended(qp, _)) = (self.batch.take(), self.post_api) else {
            return Ok(());
        };
        // SAFETY: a batch is open.
        match unsafe { ffi::ibv_wr_complete(qp) } {
            0 => Ok(()),
            code => {
                // The device has discarded the whole batch.
                self.posted = before;
                Err(refusal(code))
            }
        }
    }

    /// Aborts a batch that was opened and never submitted, because its caller panicked.
    #[inline]
    fn abort_batch(&mut self) {
        if let (Some(before), PostApi::Extended(qp, _)) = (self.batch.take(), self.post_api) {
            // SAFETY: a batch is open.
            unsafe { ffi::ibv_wr_abort(qp) };
            self.posted = before;
        }
    }

    #[inline]
    fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if self.inner.srq.is_some() {
            return Err(PostError::Invalid("the queue pair uses a shared receive queue: post there"));
        }
        if self.ring.state() == QpState::Reset {
            return Err(PostError::WrongState(QpState::Reset));
        }
        post_receives(wr, 1, self.max_recv_sge, |list, bad| {
            // SAFETY: the queue pair is live; the list lives through the call.
            unsafe { ffi::ibv_post_recv(self.qp, list, bad) }
        })?;
        if self.ring.state() == QpState::Error {
            self.ring.flush();
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.abort_batch();
        self.tag_base = random_u64()?;
        self.inner.reset(self.tag_base)?;
        (self.posted, self.ended) = (0, 0);
        Ok(())
    }
}

/// An RC queue pair.
#[derive(Debug)]
pub(crate) struct RcQp {
    sender: Sender,
    psn: u32,
}

impl RcQp {
    pub(super) fn new(
        pd: &Arc<PdInner>,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<RcQp, DeviceError> {
        let inner = QpInner::new(Transport::Rc, pd, config, send_cq, recv_cq, srq)?;
        Ok(RcQp { sender: Sender::new(inner, pd.device.attr.max_message), psn: first_psn()? })
    }

    pub(crate) fn qp_num(&self) -> u32 {
        self.sender.ring.qp_num()
    }

    pub(crate) fn state(&self) -> QpState {
        self.sender.inner.state()
    }

    pub(crate) fn address(&self) -> QpAddress {
        let device = self.sender.inner.pd.device.identity().address;
        QpAddress { device, qp_num: self.qp_num(), psn: self.psn }
    }

    pub(crate) fn init(&mut self, access: Access) -> Result<(), DeviceError> {
        self.sender.inner.init(access, 0)
    }

    pub(crate) fn ready_to_receive(
        &mut self,
        peer: &QpAddress,
        config: &ConnectConfig,
    ) -> Result<(), DeviceError> {
        self.sender.inner.ready_to_receive(peer, config)
    }

    pub(crate) fn ready_to_send(&mut self, config: &ConnectConfig) -> Result<(), DeviceError> {
        self.sender.inner.ready_to_send(self.psn, config)
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.sender.inner.fail()
    }

    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        // Packets of the former connection that are still in flight must not be accepted by the next one.
        self.psn = first_psn()?;
        self.sender.reset()
    }

    /// A reset never waits for the peer.
    pub(crate) fn try_reset(&mut self) -> Result<(), DeviceError> {
        self.reset()
    }

    #[inline]
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        self.sender.post(wr, None)
    }

    /// The device checks the keys of the regions anyway.
    pub(crate) fn post_detached(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        self.post(wr)
    }

    #[inline]
    pub(crate) fn batch_begin(&mut self) {
        self.sender.abort_batch();
    }

    #[inline]
    pub(crate) fn batch_post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        self.sender.append(wr, None)?;
        Ok(Posted::Queued)
    }

    #[inline]
    pub(crate) fn batch_submit(&mut self) -> Result<(), PostError> {
        self.sender.submit()
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.sender.post_recv(wr)
    }

    pub(crate) fn fail_handle(&self) -> FailHandle {
        FailHandle::new(&self.sender.inner)
    }
}

/// A UD queue pair.
#[derive(Debug)]
pub(crate) struct UdQp {
    sender: Sender,
    /// The address handle of each outstanding request: Soft-RoCE reads it when it sends, not when the request is posted.
    handles: Box<[Option<Arc<AhInner>>]>,
}

impl UdQp {
    pub(super) fn new(
        pd: &Arc<PdInner>,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<UdQp, DeviceError> {
        let inner = QpInner::new(Transport::Ud, pd, config, send_cq, recv_cq, srq)?;
        let handles = (0..inner.ring.wr_ids.len()).map(|_| None).collect();
        Ok(UdQp { sender: Sender::new(inner, pd.device.attr.max_datagram.into()), handles })
    }

    pub(crate) fn qp_num(&self) -> u32 {
        self.sender.ring.qp_num()
    }

    pub(crate) fn state(&self) -> QpState {
        self.sender.inner.state()
    }

    pub(crate) fn activate(&mut self, qkey: u32) -> Result<(), DeviceError> {
        self.sender.inner.activate(qkey)
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.sender.inner.fail()
    }

    #[inline]
    pub(crate) fn post(
        &mut self,
        to: &crate::device::Ah,
        qp_num: u32,
        qkey: u32,
        wr: &SendWr<'_>,
    ) -> Result<Posted, PostError> {
        let AhProvider::Verbs(ah) = &to.provider else {
            return Err(PostError::Invalid("the address handle belongs to another device"));
        };
        // Drivers take a handle for one of their own, without a check.
        if !Arc::ptr_eq(&ah.inner.pd.device, &self.sender.inner.pd.device) {
            return Err(PostError::Invalid("the address handle belongs to another device"));
        }
        if !matches!(wr.op, SendOp::Send | SendOp::SendImm(_)) {
            return Err(PostError::Invalid("a datagram can only be SEND or SEND+IMM"));
        }
        let entry = self.sender.posted as usize & (self.handles.len() - 1);
        self.sender.post(wr, Some((&ah.inner, qp_num, qkey)))?;
        let held = &mut self.handles[entry];
        if !held.as_ref().is_some_and(|h| Arc::ptr_eq(h, &ah.inner)) {
            *held = Some(ah.inner.clone());
        }
        Ok(Posted::Queued)
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.sender.post_recv(wr)
    }
}

fn first_psn() -> Result<u32, DeviceError> {
    Ok(random_u64()? as u32 & 0xff_ffff)
}

fn flags(wr: &SendWr<'_>) -> u32 {
    let mut flags = 0;
    if wr.signal != Signal::OnFailure {
        flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    if wr.fence {
        flags |= ffi::ibv_send_flags::IBV_SEND_FENCE.0;
    }
    flags
}

/// The error of a post that the device refused.
fn refusal(code: i32) -> PostError {
    match code.abs() {
        libc::ENOMEM | libc::ENOSPC => PostError::Full,
        code => PostError::Device(code),
    }
}

/// Scatter/gather entries in the form that the device expects.
struct SgeList {
    sges: [MaybeUninit<ffi::ibv_sge>; MAX_SGE],
    len: usize,
}

impl SgeList {
    /// At most `MAX_SGE` entries; the callers have checked.
    #[inline]
    fn new(sges: &[Sge<'_>]) -> SgeList {
        let mut list =
            SgeList { sges: [const { MaybeUninit::uninit() }; MAX_SGE], len: sges.len().min(MAX_SGE) };
        for (to, s) in list.sges.iter_mut().zip(sges) {
            to.write(ffi::ibv_sge { addr: s.addr, length: s.len, lkey: s.lkey });
        }
        list
    }

    /// Entries for bytes that are copied while they are posted.
    fn inline(pieces: &[&[u8]]) -> SgeList {
        let mut list = SgeList::new(&[]);
        for (to, bytes) in list.sges.iter_mut().zip(pieces) {
            let addr = bytes.as_ptr().expose_provenance() as u64;
            to.write(ffi::ibv_sge { addr, length: bytes.len() as u32, lkey: 0 });
        }
        list.len = pieces.len();
        list
    }

    fn as_mut_ptr(&mut self) -> *mut ffi::ibv_sge {
        self.sges.as_mut_ptr().cast()
    }
}

/// The most receives that are posted with one call.
const RECEIVE_LIST: usize = 64;

/// Posts `count` receives like this one, as lists, with `post`, which returns 0 or an error number and the first receive that was not
/// posted. Returns how many were posted; an error says why there is not even one.
#[inline]
pub(super) fn post_receives(
    wr: &RecvWr<'_>,
    count: u32,
    max_sge: usize,
    mut post: impl FnMut(*mut ffi::ibv_recv_wr, *mut *mut ffi::ibv_recv_wr) -> i32,
) -> Result<u32, PostError> {
    if wr.sges.len() > max_sge {
        return Err(PostError::TooManySges { count: wr.sges.len(), max: max_sge });
    }
    let mut sges = SgeList::new(wr.sges);
    let mut list = [const { MaybeUninit::<ffi::ibv_recv_wr>::uninit() }; RECEIVE_LIST];
    let first: *mut ffi::ibv_recv_wr = list.as_mut_ptr().cast();
    let mut posted = 0;
    while posted < count {
        let len = RECEIVE_LIST.min((count - posted) as usize);
        for (at, entry) in list[..len].iter_mut().enumerate() {
            let next = if at + 1 < len { first.wrapping_add(at + 1) } else { ptr::null_mut() };
            entry.write(ffi::ibv_recv_wr {
                wr_id: wr.wr_id,
                next,
                num_sge: sges.len as i32,
                sg_list: sges.as_mut_ptr(),
            });
        }
        let mut bad = ptr::null_mut();
        let code = post(first, &mut bad);
        if code == 0 {
            posted += len as u32;
            continue;
        }
        // Those in front of the one that was refused are posted.
        let in_front = (0..len).position(|at| first.wrapping_add(at) == bad).unwrap_or(0);
        posted += in_front as u32;
        return if posted > 0 { Ok(posted) } else { Err(refusal(code)) };
    }
    Ok(posted)
}

/// Writes a request into the open batch of `qp`.
///
/// # Safety
///
/// A batch must be open on `qp`, and the request within its limits and of a kind it was made for.
#[inline]
unsafe fn write(
    qp: *mut ffi::ibv_qp_ex,
    tag: u64,
    wr: &SendWr<'_>,
    to: Option<(&AhInner, u32, u32)>,
    soft_roce: bool,
) {
    // SAFETY: the caller's promise; pointers into `wr` and the list live through the calls, which copy.
    unsafe {
        (*qp).wr_id = tag;
        (*qp).wr_flags = flags(wr);
        if soft_roce && !matches!(wr.data, Data::Regions(_)) {
            (*qp).wr_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        match wr.op {
            SendOp::Send => ffi::ibv_wr_send(qp),
            SendOp::SendImm(imm) => ffi::ibv_wr_send_imm(qp, imm.to_be()),
            SendOp::Write(r) => ffi::ibv_wr_rdma_write(qp, r.rkey, r.addr),
            SendOp::WriteImm(r, imm) => ffi::ibv_wr_rdma_write_imm(qp, r.rkey, r.addr, imm.to_be()),
            SendOp::Read(r) => ffi::ibv_wr_rdma_read(qp, r.rkey, r.addr),
            SendOp::CompareSwap { remote: r, compare, swap } => {
                ffi::ibv_wr_atomic_cmp_swp(qp, r.rkey, r.addr, compare, swap);
            }
            SendOp::FetchAdd { remote: r, add } => ffi::ibv_wr_atomic_fetch_add(qp, r.rkey, r.addr, add),
        }
        if let Some((ah, qp_num, qkey)) = to {
            ffi::ibv_wr_set_ud_addr(qp, ah.ah, qp_num, qkey);
        }
        // Some drivers complete the request when its data is set, so it is set even if it is empty.
        match wr.data {
            Data::Inline(bytes) if !bytes.is_empty() => {
                ffi::ibv_wr_set_inline_data(qp, bytes.as_ptr().cast_mut().cast(), bytes.len());
            }
            Data::Inline(_) => ffi::ibv_wr_set_sge_list(qp, 0, ptr::null()),
            // In one piece: Soft-RoCE's driver writes all pieces of a list to the same place.
            Data::InlineHead { head, bytes } if soft_roce => {
                let message = [head.as_bytes(), bytes].concat();
                ffi::ibv_wr_set_inline_data(qp, message.as_ptr().cast_mut().cast(), message.len());
            }
            Data::InlineHead { head, bytes } => {
                let pieces = [head.as_bytes(), bytes].map(|piece| ffi::ibv_data_buf {
                    addr: piece.as_ptr().cast_mut().cast(),
                    length: piece.len(),
                });
                ffi::ibv_wr_set_inline_data_list(qp, pieces.len(), pieces.as_ptr());
            }
            Data::Regions([s]) => ffi::ibv_wr_set_sge(qp, s.lkey, s.addr, s.len),
            Data::Regions(sges) => {
                let mut list = SgeList::new(sges);
                ffi::ibv_wr_set_sge_list(qp, list.len, list.as_mut_ptr());
            }
        }
    }
}

/// Posts a request with `ibv_post_send`.
///
/// # Safety
///
/// `qp` must be live, and the request within its limits and of a kind it was made for.
unsafe fn post_plain(
    qp: *mut ffi::ibv_qp,
    tag: u64,
    wr: &SendWr<'_>,
    to: Option<(&AhInner, u32, u32)>,
) -> Result<(), PostError> {
    use ffi::ibv_wr_opcode as op;
    // SAFETY: the structure consists of integers, pointers and unions of these, for all of which zero is valid.
    let mut raw: ffi::ibv_send_wr = unsafe { core::mem::zeroed() };
    raw.wr_id = tag;
    raw.send_flags = flags(wr);
    let rdma = |r: crate::device::RemoteAddr| ffi::rdma_t { remote_addr: r.addr, rkey: r.rkey };
    let imm = |n: u32| ffi::imm_data_invalidated_rkey_union_t { imm_data: n.to_be() };
    match wr.op {
        SendOp::Send => raw.opcode = op::IBV_WR_SEND,
        SendOp::SendImm(n) => {
            (raw.opcode, raw.imm_data_invalidated_rkey_union) = (op::IBV_WR_SEND_WITH_IMM, imm(n))
        }
        SendOp::Write(r) => (raw.opcode, raw.wr.rdma) = (op::IBV_WR_RDMA_WRITE, rdma(r)),
        SendOp::WriteImm(r, n) => {
            (raw.opcode, raw.wr.rdma) = (op::IBV_WR_RDMA_WRITE_WITH_IMM, rdma(r));
            raw.imm_data_invalidated_rkey_union = imm(n);
        }
        SendOp::Read(r) => (raw.opcode, raw.wr.rdma) = (op::IBV_WR_RDMA_READ, rdma(r)),
        SendOp::CompareSwap { remote, compare, swap } => {
            raw.opcode = op::IBV_WR_ATOMIC_CMP_AND_SWP;
            raw.wr.atomic =
                ffi::atomic_t { remote_addr: remote.addr, compare_add: compare, swap, rkey: remote.rkey };
        }
        SendOp::FetchAdd { remote, add } => {
            raw.opcode = op::IBV_WR_ATOMIC_FETCH_AND_ADD;
            raw.wr.atomic =
                ffi::atomic_t { remote_addr: remote.addr, compare_add: add, swap: 0, rkey: remote.rkey };
        }
    }
    if let Some((ah, remote_qpn, remote_qkey)) = to {
        raw.wr.ud = ffi::ud_t { ah: ah.ah, remote_qpn, remote_qkey };
    }
    let mut list = match &wr.data {
        Data::Inline(bytes) => SgeList::inline(&[bytes]),
        Data::InlineHead { head, bytes } => SgeList::inline(&[head.as_bytes(), bytes]),
        Data::Regions(sges) => SgeList::new(sges),
    };
    if !matches!(wr.data, Data::Regions(_)) {
        raw.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
    }
    raw.num_sge = list.len as i32;
    raw.sg_list = list.as_mut_ptr();
    // SAFETY: the caller's promise; `raw`, the list and inline bytes live through the call.
    match unsafe { ffi::ibv_post_send(qp, &mut raw, &mut ptr::null_mut()) } {
        0 => Ok(()),
        code => Err(refusal(code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::RemoteAddr;

    #[test]
    fn device_without_atomics_refuses_atomics_only() {
        let remote = RemoteAddr { addr: 0, rkey: 0 };
        let add = SendWr::new(1, SendOp::FetchAdd { remote, add: 1 }, Data::Regions(&[]));
        let swap = SendWr::new(1, SendOp::CompareSwap { remote, compare: 1, swap: 2 }, Data::Regions(&[]));
        for atomic in [&add, &swap] {
            assert_eq!(check_atomic(atomic, 8, false), Err(PostError::Unsupported("atomics")));
            assert!(matches!(check_atomic(atomic, 8, true), Err(PostError::Invalid(_))), "no entry");
        }
        let read = SendWr::new(1, SendOp::Read(remote), Data::Regions(&[]));
        assert_eq!(check_atomic(&read, 0, false), Ok(()));
    }
}
