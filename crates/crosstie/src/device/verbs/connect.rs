//! Queue pairs: creating them, and their state transitions.

use core::ptr;
use std::sync::{Arc, Weak};

use rdma_mummy_sys as ffi;

use super::cq::{Cq, CqInner, LockedCqs};
use super::datapath::PostApi;
use super::path::unreachable_error;
use super::send_ring::SendRing;
use super::setup::{DeviceInner, PdInner, Srq, SrqInner, check_limit, creation_error};
use crate::device::{Access, ConnectConfig, DeviceError, QpAddress, QpConfig, QpState};
use crate::process::Creator;

/// The transport of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Transport {
    Rc,
    Ud,
}

/// A queue pair of the device, with references to everything that must outlive it.
#[derive(Debug)]
pub(super) struct QpInner {
    pub(super) qp: *mut ffi::ibv_qp,
    pub(super) post_api: PostApi,
    pub(super) max_inline: usize,
    pub(super) max_send_sge: usize,
    pub(super) max_recv_sge: usize,
    transport: Transport,
    pub(super) ring: Arc<SendRing>,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    pub(super) srq: Option<Arc<SrqInner>>,
    /// Dropped before the protection domain that it is based on.
    _domain: ThreadDomain,
    pub(super) pd: Arc<PdInner>,
}

// SAFETY: this is used to change and query the state, which libibverbs allows from any thread; only the one `Sender` posts.
unsafe impl Send for QpInner {}
// SAFETY: as above.
unsafe impl Sync for QpInner {}

impl QpInner {
    pub(super) fn new(
        transport: Transport,
        pd: &Arc<PdInner>,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<Arc<QpInner>, DeviceError> {
        let device = &pd.device;
        let limit = &device.attr;
        check_limit("send requests in a queue pair", config.max_send_wr, limit.max_qp_wr)?;
        check_limit("scatter/gather entries per send request", config.max_send_sge, limit.max_sge)?;
        check_limit("inline bytes per send request", config.max_inline, limit.max_inline)?;
        if srq.is_none() {
            check_limit("receives in a queue pair", config.max_recv_wr, limit.max_qp_wr)?;
            check_limit("scatter/gather entries per receive", config.max_recv_sge, limit.max_sge)?;
        }
        for cq in [send_cq, recv_cq] {
            if !Arc::ptr_eq(&cq.inner.device, device) {
                return Err(DeviceError::WrongDevice("the completion queue"));
            }
        }
        if srq.is_some_and(|srq| !Arc::ptr_eq(&srq.inner.pd.device, device)) {
            return Err(DeviceError::WrongDevice("the shared receive queue"));
        }

        let domain = ThreadDomain::new(pd);
        let asked = ffi::ibv_qp_cap {
            max_send_wr: config.max_send_wr.max(1),
            max_recv_wr: if srq.is_some() { 0 } else { config.max_recv_wr.max(1) },
            max_send_sge: config.max_send_sge.max(1),
            max_recv_sge: if srq.is_some() { 0 } else { config.max_recv_sge.max(1) },
            max_inline_data: config.max_inline,
        };
        let parts = QpParts {
            transport,
            send_cq: send_cq.inner.raw(),
            recv_cq: recv_cq.inner.raw(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.inner.srq),
            pd: domain.pd(pd),
            asked,
        };
        let (qp, post_api, granted) = parts.create(device)?;
        // SAFETY: the queue pair was just created.
        let qp_num = unsafe { (*qp).qp_num };
        let ring = SendRing::new(qp, qp_num, asked.max_send_wr).inspect_err(|_| {
            // SAFETY: created above; nothing else has the pointer.
            let rc = unsafe { ffi::ibv_destroy_qp(qp) };
            debug_assert_eq!(rc, 0, "destroy queue pair");
        })?;
        let inner = QpInner {
            qp,
            post_api,
            // Drivers round the requested sizes up; the queue pair keeps to the requested ones.
            max_inline: config.max_inline.min(granted.max_inline_data) as usize,
            max_send_sge: config.max_send_sge as usize,
            max_recv_sge: config.max_recv_sge as usize,
            transport,
            ring: Arc::new(ring),
            send_cq: send_cq.inner.clone(),
            recv_cq: recv_cq.inner.clone(),
            srq: srq.map(|srq| srq.inner.clone()),
            _domain: domain,
            pd: pd.clone(),
        };
        LockedCqs::new(&inner.send_cq, &inner.recv_cq).add_qp(&inner.ring);
        Ok(Arc::new(inner))
    }

    /// The state. It asks the device, because the queue pair may have failed without a completion.
    pub(super) fn state(&self) -> QpState {
        let known = self.ring.state();
        if matches!(known, QpState::Reset | QpState::Error) {
            return known;
        }
        // SAFETY: the queue pair is live.
        if unsafe { has_failed(self.qp) } {
            self.ring.record_failure();
        }
        self.ring.state()
    }

    /// Moves from RESET to INIT.
    pub(super) fn init(&self, access: Access, qkey: u32) -> Result<(), DeviceError> {
        use ffi::ibv_qp_attr_mask as m;
        self.expect_state(QpState::Reset, "init", "RESET")?;
        let mut attr = to_state(ffi::ibv_qp_state::IBV_QPS_INIT);
        attr.port_num = self.pd.device.port;
        attr.pkey_index = 0;
        attr.qp_access_flags = self.pd.device.access_flags(access);
        attr.qkey = qkey;
        let last = if self.transport == Transport::Rc { m::IBV_QP_ACCESS_FLAGS } else { m::IBV_QP_QKEY };
        self.modify(&mut attr, m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | last)
            .map_err(|e| DeviceError::Os { what: "move a queue pair to INIT", source: e })?;
        self.finish_transition(QpState::Reset, QpState::Init, "init", "RESET")
    }

    /// Moves an RC queue pair from INIT to RTR.
    pub(super) fn ready_to_receive(
        &self,
        peer: &QpAddress,
        config: &ConnectConfig,
    ) -> Result<(), DeviceError> {
        use ffi::ibv_qp_attr_mask as m;
        self.expect_state(QpState::Init, "ready_to_receive", "INIT")?;
        config.check()?;
        if peer.qp_num > 0xff_ffff || peer.psn > 0xff_ffff {
            return Err(DeviceError::BadAddress("queue pair and packet sequence numbers have 24 bits"));
        }
        let device = &self.pd.device;
        let mut attr = to_state(ffi::ibv_qp_state::IBV_QPS_RTR);
        attr.ah_attr = device.address_vector(&peer.device, config.into())?;
        attr.path_mtu = device.identity().address.mtu.min(peer.device.mtu).into();
        attr.dest_qp_num = peer.qp_num;
        attr.rq_psn = peer.psn;
        attr.max_dest_rd_atomic = config.max_rd_atomic.min(device.max_rd_atomic.0);
        attr.min_rnr_timer = config.min_rnr_timer;
        attr.qp_access_flags = device.access_flags(config.access);
        let mask = m::IBV_QP_STATE
            | m::IBV_QP_AV
            | m::IBV_QP_PATH_MTU
            | m::IBV_QP_DEST_QPN
            | m::IBV_QP_RQ_PSN
            | m::IBV_QP_MAX_DEST_RD_ATOMIC
            | m::IBV_QP_MIN_RNR_TIMER
            | m::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, mask).map_err(|e| {
            unreachable_error(&peer.device, &e)
                .unwrap_or(DeviceError::Os { what: "move a queue pair to RTR", source: e })
        })?;
        self.finish_transition(QpState::Init, QpState::ReadyToReceive, "ready_to_receive", "INIT")
    }

    /// Moves an RC queue pair from RTR to RTS.
    pub(super) fn ready_to_send(&self, psn: u32, config: &ConnectConfig) -> Result<(), DeviceError> {
        use ffi::ibv_qp_attr_mask as m;
        self.expect_state(QpState::ReadyToReceive, "ready_to_send", "RTR")?;
        config.check()?;
        let mut attr = to_state(ffi::ibv_qp_state::IBV_QPS_RTS);
        attr.timeout = config.timeout;
        // Soft-RoCE retries without limit if this is 7, and would never notice a dead peer.
        attr.retry_cnt = config.retry_count.min(if self.pd.device.soft_roce { 6 } else { 7 });
        attr.rnr_retry = config.rnr_retry;
        attr.sq_psn = psn;
        attr.max_rd_atomic = config.max_rd_atomic.min(self.pd.device.max_rd_atomic.1);
        let mask = m::IBV_QP_STATE
            | m::IBV_QP_TIMEOUT
            | m::IBV_QP_RETRY_CNT
            | m::IBV_QP_RNR_RETRY
            | m::IBV_QP_SQ_PSN
            | m::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask)
            .map_err(|e| DeviceError::Os { what: "move a queue pair to RTS", source: e })?;
        self.finish_transition(QpState::ReadyToReceive, QpState::ReadyToSend, "ready_to_send", "RTR")
    }

    /// Moves a UD queue pair from RESET to RTS.
    pub(super) fn activate(&self, qkey: u32) -> Result<(), DeviceError> {
        use ffi::ibv_qp_attr_mask as m;
        self.expect_state(QpState::Reset, "activate", "RESET")?;
        self.init(Access::empty(), qkey)?;
        let failed = |e| DeviceError::Os { what: "activate a datagram queue pair", source: e };
        self.modify(&mut to_state(ffi::ibv_qp_state::IBV_QPS_RTR), m::IBV_QP_STATE).map_err(failed)?;
        let mut attr = to_state(ffi::ibv_qp_state::IBV_QPS_RTS);
        attr.sq_psn = 0;
        self.modify(&mut attr, m::IBV_QP_STATE | m::IBV_QP_SQ_PSN).map_err(failed)?;
        self.finish_transition(QpState::Init, QpState::ReadyToSend, "activate", "RESET")
    }

    /// Moves to ERR, from any state and any thread.
    pub(super) fn fail(&self) -> Result<(), DeviceError> {
        if self.ring.state() == QpState::Reset {
            // RESET is the only state from which the kernel refuses ERR.
            self.init(Access::empty(), 0)?;
        }
        self.ring.set_state(QpState::Error);
        // SAFETY: the queue pair is live.
        unsafe { modify_to_error(self.qp) }
            .map_err(|e| DeviceError::Os { what: "move a queue pair to ERR", source: e })
    }

    /// Moves to RESET, from any state. The caller is the poster, and numbers its requests from 0 afterwards.
    pub(super) fn reset(&self, tag_base: u64) -> Result<(), DeviceError> {
        let mut closed = LockedCqs::new(&self.send_cq, &self.recv_cq);
        self.modify(&mut to_state(ffi::ibv_qp_state::IBV_QPS_RESET), ffi::ibv_qp_attr_mask::IBV_QP_STATE)
            .map_err(|e| DeviceError::Os { what: "move a queue pair to RESET", source: e })?;
        closed.discard_completions(self.ring.qp_num());
        self.ring.clear(tag_base);
        self.ring.set_state(QpState::Reset);
        Ok(())
    }

    fn expect_state(
        &self,
        needed: QpState,
        step: &'static str,
        needs: &'static str,
    ) -> Result<(), DeviceError> {
        match self.state() {
            state if state == needed => Ok(()),
            state => Err(DeviceError::WrongState { qp_num: self.ring.qp_num(), state, step, needs }),
        }
    }

    fn finish_transition(
        &self,
        from: QpState,
        to: QpState,
        step: &'static str,
        needs: &'static str,
    ) -> Result<(), DeviceError> {
        if self.ring.try_transition(from, to) { Ok(()) } else { self.expect_state(from, step, needs) }
    }

    fn modify(&self, attr: &mut ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask) -> std::io::Result<()> {
        // SAFETY: the queue pair is live and `attr` valid.
        match unsafe { ffi::ibv_modify_qp(self.qp, attr, mask.0 as i32) } {
            0 => Ok(()),
            code => Err(std::io::Error::from_raw_os_error(code.abs())),
        }
    }
}

impl Drop for QpInner {
    fn drop(&mut self) {
        // A forked child would destroy the queue pair of its parent.
        if !self.pd.device.is_of_this_process() {
            return;
        }
        // Drivers remove the completions of a queue pair while they destroy it: no thread may poll at that time.
        let mut closed = LockedCqs::new(&self.send_cq, &self.recv_cq);
        // SAFETY: created in `new`, destroyed once. No `Sender` is left. The pollers of the completion queues use the
        // pointer too, but the queues are locked, and the queue pair is removed from them before they are unlocked.
        let rc = unsafe { ffi::ibv_destroy_qp(self.qp) };
        debug_assert_eq!(rc, 0, "destroy queue pair");
        // Remove it first, so that discarding its completions does not use the pointer.
        closed.remove_qp(self.ring.qp_num());
        closed.discard_completions(self.ring.qp_num());
    }
}

/// Moves a queue pair to ERR from any thread. Does not keep it alive.
#[derive(Clone, Debug)]
pub(crate) struct FailHandle {
    qp: Weak<QpInner>,
}

impl FailHandle {
    pub(super) fn new(qp: &Arc<QpInner>) -> FailHandle {
        FailHandle { qp: Arc::downgrade(qp) }
    }

    pub(crate) fn fail(&self) {
        if let Some(qp) = self.qp.upgrade() {
            // If the call fails, the device is going away, and the queue pair breaks anyway.
            qp.fail().unwrap_or(());
        }
    }
}

/// Whether the device has moved the queue pair to ERR, or to a state that leads there.
///
/// # Safety
///
/// `qp` must be live.
pub(super) unsafe fn has_failed(qp: *mut ffi::ibv_qp) -> bool {
    let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
    // SAFETY: both structures consist of integers and pointers, for which zero is valid.
    let (mut attr, mut init): (ffi::ibv_qp_attr, ffi::ibv_qp_init_attr) = unsafe { core::mem::zeroed() };
    // SAFETY: the caller's promise; the output pointers are valid.
    let code = unsafe { ffi::ibv_query_qp(qp, &mut attr, mask, &mut init) };
    code == 0 && attr.qp_state > ffi::ibv_qp_state::IBV_QPS_RTS
}

/// # Safety
///
/// `qp` must be live.
pub(super) unsafe fn modify_to_error(qp: *mut ffi::ibv_qp) -> std::io::Result<()> {
    let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
    // SAFETY: the caller's promise.
    match unsafe { ffi::ibv_modify_qp(qp, &mut to_state(ffi::ibv_qp_state::IBV_QPS_ERR), mask) } {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code.abs())),
    }
}

fn to_state(state: ffi::ibv_qp_state::Type) -> ffi::ibv_qp_attr {
    // SAFETY: the structure consists of integers and a union of byte arrays and integers, for which zero is valid.
    let mut attr: ffi::ibv_qp_attr = unsafe { core::mem::zeroed() };
    attr.qp_state = state;
    attr
}

/// The arguments for creating a queue pair of the device.
struct QpParts {
    transport: Transport,
    send_cq: *mut ffi::ibv_cq,
    recv_cq: *mut ffi::ibv_cq,
    srq: *mut ffi::ibv_srq,
    pd: *mut ffi::ibv_pd,
    asked: ffi::ibv_qp_cap,
}

impl QpParts {
    /// Creates the queue pair, with `ibv_wr_*` if the driver supports it.
    fn create(
        &self,
        device: &DeviceInner,
    ) -> Result<(*mut ffi::ibv_qp, PostApi, ffi::ibv_qp_cap), DeviceError> {
        use ffi::ibv_qp_create_send_ops_flags as with;
        let qp_type = match self.transport {
            Transport::Rc => ffi::ibv_qp_type::IBV_QPT_RC,
            Transport::Ud => ffi::ibv_qp_type::IBV_QPT_UD,
        };
        let sends = with::IBV_QP_EX_WITH_SEND | with::IBV_QP_EX_WITH_SEND_WITH_IMM;
        let all = sends
            | with::IBV_QP_EX_WITH_RDMA_WRITE
            | with::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
            | with::IBV_QP_EX_WITH_RDMA_READ
            | with::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
            | with::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
        if !device.plain {
            // SAFETY: the structure consists of integers and pointers, for which zero is valid.
            let mut init: ffi::ibv_qp_init_attr_ex = unsafe { core::mem::zeroed() };
            init.send_cq = self.send_cq;
            init.recv_cq = self.recv_cq;
            init.srq = self.srq;
            init.cap = self.asked;
            init.qp_type = qp_type;
            init.pd = self.pd;
            init.comp_mask = (ffi::ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD
                | ffi::ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
                .0;
            init.send_ops_flags = if self.transport == Transport::Rc { all.0 } else { sends.0 }.into();
            // SAFETY: everything that `init` names is live.
            let qp = unsafe { ffi::ibv_create_qp_ex(device.context, &mut init) };
            if !qp.is_null() {
                // SAFETY: created with send_ops_flags, so it has the extended form.
                let extended = unsafe { ffi::ibv_qp_to_qp_ex(qp) };
                return Ok((qp, PostApi::Extended(extended, device.soft_roce), init.cap));
            }
            let error = std::io::Error::last_os_error().raw_os_error();
            if !matches!(error, Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) {
                return Err(creation_error("queue pairs", "create a queue pair"));
            }
        }
        let mut init = ffi::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            srq: self.srq,
            cap: self.asked,
            qp_type,
            sq_sig_all: 0,
        };
        // SAFETY: everything that `init` names is live.
        let qp = unsafe { ffi::ibv_create_qp(self.pd, &mut init) };
        if qp.is_null() {
            return Err(creation_error("queue pairs", "create a queue pair"));
        }
        Ok((qp, PostApi::Legacy, init.cap))
    }
}

/// Tells the driver that one thread at a time uses a queue pair, if the driver supports that. Each queue pair has its own,
/// because different threads may use them.
#[derive(Debug)]
struct ThreadDomain {
    td: *mut ffi::ibv_td,
    /// The parent domain: the protection domain combined with the thread domain. Null if the driver does not support it.
    parent: *mut ffi::ibv_pd,
    creator: Creator,
}

impl ThreadDomain {
    fn new(pd: &PdInner) -> ThreadDomain {
        let mut domain =
            ThreadDomain { td: ptr::null_mut(), parent: ptr::null_mut(), creator: Creator::this_process() };
        if pd.device.plain {
            return domain;
        }
        let context = pd.device.context;
        // SAFETY: the context is open and the structure valid.
        domain.td = unsafe { ffi::ibv_alloc_td(context, &mut ffi::ibv_td_init_attr { comp_mask: 0 }) };
        if !domain.td.is_null() {
            let mut init = ffi::ibv_parent_domain_init_attr {
                pd: pd.pd,
                td: domain.td,
                comp_mask: 0,
                alloc: None,
                free: None,
                pd_context: ptr::null_mut(),
            };
            // SAFETY: context, protection domain and thread domain are live.
            domain.parent = unsafe { ffi::ibv_alloc_parent_domain(context, &mut init) };
        }
        domain
    }

    fn pd(&self, pd: &PdInner) -> *mut ffi::ibv_pd {
        if self.parent.is_null() { pd.pd } else { self.parent }
    }
}

impl Drop for ThreadDomain {
    fn drop(&mut self) {
        // A forked child would free the domain of its parent.
        if !self.creator.is_this_process() {
            return;
        }
        // SAFETY: created in `new`, freed once, after the queue pair that used them and before the protection domain.
        unsafe {
            if !self.parent.is_null() {
                let rc = ffi::ibv_dealloc_pd(self.parent);
                debug_assert_eq!(rc, 0, "free parent domain");
            }
            if !self.td.is_null() {
                let rc = ffi::ibv_dealloc_td(self.td);
                debug_assert_eq!(rc, 0, "free thread domain");
            }
        }
    }
}
