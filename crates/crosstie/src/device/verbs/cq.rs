//! Completion queues: creating, polling and waiting, and the queue pairs that use them.

use core::hash::{BuildHasherDefault, Hasher};
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use rdma_mummy_sys as ffi;

use super::send_ring::SendRing;
use super::setup::{DeviceInner, check_limit, creation_error, nonblocking, readable};
use crate::device::{Completion, CqConfig, CqError, DeviceError};
use crate::ring::biased_lock::{BiasedLock, OtherGuard};

/// Completions that are taken from the device at a time. The lock is not held while the caller's code runs, because that code may
/// destroy a queue pair of this completion queue.
const CHUNK: usize = 16;

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(super) inner: Arc<CqInner>,
    /// `Send`, not `Sync`: the thread that has it is the owner of the biased lock.
    _not_sync: PhantomData<core::cell::Cell<()>>,
}

impl Cq {
    pub(super) fn new(device: &Arc<DeviceInner>, config: &CqConfig) -> Result<Cq, DeviceError> {
        check_limit("entries in a completion queue", config.depth, device.attr.max_cqe)?;
        // SAFETY: the context is open.
        let channel = unsafe { ffi::ibv_create_comp_channel(device.context) };
        if channel.is_null() {
            return Err(creation_error("completion channels", "create a completion channel"));
        }
        let mut inner = CqInner {
            queue: RawCq::Plain(ptr::null_mut()),
            channel,
            overrun: Box::new(AtomicBool::new(false)),
            lock: BiasedLock::new(CqState::default()),
            device: device.clone(),
        };
        // SAFETY: the channel was just made.
        nonblocking(unsafe { (*channel).fd })?;
        inner.queue = RawCq::new(&inner, config.depth.max(1))?;
        Ok(Cq { inner: Arc::new(inner), _not_sync: PhantomData })
    }

    #[inline]
    pub(crate) fn next(&mut self, to: &mut Completion) -> Result<bool, CqError> {
        // SAFETY: there is one `Cq` per `CqInner`, it is not `Sync`, and the guard is dropped in this function.
        let mut state = unsafe { self.inner.lock.lock_as_owner() };
        if state.backlog.is_empty() {
            self.inner.fill_backlog(&mut state)?;
        }
        match state.backlog.pop_front() {
            Some(completion) => {
                *to = completion;
                Ok(true)
            }
            None => Ok(false),
        }
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<bool, CqError> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if self.is_ready()? {
                return Ok(true);
            }
            {
                // SAFETY: as in `next`. Drivers read the queue's position when they arm it, hence the lock.
                let _state = unsafe { self.inner.lock.lock_as_owner() };
                // SAFETY: the queue is live.
                match unsafe { ffi::ibv_req_notify_cq(self.inner.queue.cq(), 0) } {
                    0 => {}
                    code => return Err(CqError::Device(code.abs())),
                }
            }
            // A completion that arrived between the first check and the arming raises no event.
            if self.is_ready()? {
                return Ok(true);
            }
            // SAFETY: the channel, and with it the descriptor, lives in `inner`.
            let fd = unsafe { BorrowedFd::borrow_raw((*self.inner.channel).fd) };
            match readable(fd, deadline) {
                Ok(true) => self.acknowledge_events()?,
                Ok(false) => return self.is_ready(),
                Err(error) => return Err(CqError::Device(error.raw_os_error().unwrap_or(libc::EIO))),
            }
        }
    }

    /// Whether there is something to poll: no system call, as in a poll. It moves completions into the backlog, because the device offers no
    /// other way to check.
    pub(crate) fn is_ready(&mut self) -> Result<bool, CqError> {
        // SAFETY: as in `next`.
        let mut state = unsafe { self.inner.lock.lock_as_owner() };
        if state.backlog.is_empty() {
            self.inner.fill_backlog(&mut state)?;
        }
        Ok(!state.backlog.is_empty())
    }

    fn acknowledge_events(&mut self) -> Result<(), CqError> {
        loop {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is live and does not block; the output pointers are valid.
            if unsafe { ffi::ibv_get_cq_event(self.inner.channel, &mut cq, &mut context) } != 0 {
                return match std::io::Error::last_os_error().raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => Ok(()),
                    code => Err(CqError::Device(code.unwrap_or(libc::EIO))),
                };
            }
            // SAFETY: the event was taken above and is acknowledged once; only this queue uses the channel.
            unsafe { ffi::ibv_ack_cq_events(cq, 1) };
        }
    }
}

/// The queue itself. Shared with its queue pairs, which may outlive the handle.
#[derive(Debug)]
pub(super) struct CqInner {
    queue: RawCq,
    channel: *mut ffi::ibv_comp_channel,
    /// Set when the device reports an overrun event. The device has its address, hence the box.
    overrun: Box<AtomicBool>,
    lock: BiasedLock<CqState>,
    pub(super) device: Arc<DeviceInner>,
}

// SAFETY: the queue is polled under `lock` only; only the one `Cq` uses the channel.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl CqInner {
    pub(super) fn raw(&self) -> *mut ffi::ibv_cq {
        self.queue.cq()
    }

    /// Takes completions from the device into the backlog, which is empty. An error is reported if there is none.
    #[inline]
    fn fill_backlog(&self, state: &mut CqState) -> Result<(), CqError> {
        let mut found = core::mem::take(&mut state.backlog);
        let drained = self.queue.drain(state, &mut |completion| {
            found.push_back(completion);
            found.len() < CHUNK
        });
        state.backlog = found;
        if !state.backlog.is_empty() {
            // An error is reported again by the next poll.
            return Ok(());
        }
        drained?;
        if self.overrun.load(Relaxed) { Err(CqError::Overrun) } else { Ok(()) }
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        // A forked child would destroy the queue of its parent.
        if !self.device.is_of_this_process() {
            return;
        }
        // SAFETY: created in `Cq::new`, destroyed once, the queue before its channel; its queue pairs held this Arc, so
        // they are gone. All events were acknowledged when they were taken.
        unsafe {
            if !self.queue.cq().is_null() {
                let rc = ffi::ibv_destroy_cq(self.queue.cq());
                debug_assert_eq!(rc, 0, "destroy completion queue");
            }
            let rc = ffi::ibv_destroy_comp_channel(self.channel);
            debug_assert_eq!(rc, 0, "destroy completion channel");
        }
    }
}

/// What the lock protects, in addition to the device's queue.
#[derive(Debug, Default)]
pub(super) struct CqState {
    /// The queue pairs that use this completion queue, by number.
    members: HashMap<u32, CqMember, BuildHasherDefault<QpNumHasher>>,
    /// Completions that were taken from the device before the caller polled.
    backlog: VecDeque<Completion>,
}

/// A queue pair that uses a completion queue.
#[derive(Debug)]
struct CqMember {
    ring: Arc<SendRing>,
    /// Whether its send completions arrive here too, or those of its receives only.
    sends: bool,
}

impl CqState {
    /// Translates a completion of the device. `None` for queue pairs that were destroyed.
    #[inline]
    fn translate(&self, raw: &RawCompletion) -> Option<Completion> {
        use crate::device::{Opcode, Status};
        let receive = raw.opcode & ffi::ibv_wc_opcode::IBV_WC_RECV != 0;
        let mut completion = Completion {
            wr_id: raw.wr_id,
            byte_len: raw.byte_len,
            qp_num: raw.qp_num,
            src_qp: raw.src_qp,
            ..Completion::default()
        };
        if raw.status != ffi::ibv_wc_status::IBV_WC_SUCCESS {
            // Only `wr_id`, `qp_num` and the status are defined. The tag shows whether it was a send request.
            let member = self.members.get(&raw.qp_num)?;
            completion.status = u8::try_from(raw.status).map_or(Status::General, Status::from_code);
            completion.byte_len = 0;
            completion.src_qp = 0;
            if member.sends {
                completion.wr_id = member.ring.retire(raw.wr_id).unwrap_or(raw.wr_id);
            }
            member.ring.record_failure();
            return Some(completion);
        }
        if !receive {
            completion.wr_id = self.members.get(&raw.qp_num)?.ring.retire(raw.wr_id)?;
        } else if raw.flags & ffi::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0 {
            completion.imm = Some(u32::from_be(raw.imm));
        }
        completion.opcode = match raw.opcode {
            ffi::ibv_wc_opcode::IBV_WC_SEND => Opcode::Send,
            ffi::ibv_wc_opcode::IBV_WC_RDMA_WRITE => Opcode::Write,
            ffi::ibv_wc_opcode::IBV_WC_RDMA_READ => Opcode::Read,
            ffi::ibv_wc_opcode::IBV_WC_COMP_SWAP => Opcode::CompareSwap,
            ffi::ibv_wc_opcode::IBV_WC_FETCH_ADD => Opcode::FetchAdd,
            ffi::ibv_wc_opcode::IBV_WC_RECV => Opcode::Recv,
            ffi::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => Opcode::RecvWriteImm,
            _ => Opcode::Unspecified,
        };
        Some(completion)
    }
}

/// The one or two completion queues of a queue pair, locked against their pollers.
pub(super) struct LockedCqs<'a> {
    send: (&'a CqInner, OtherGuard<'a, CqState>),
    recv: Option<(&'a CqInner, OtherGuard<'a, CqState>)>,
}

impl<'a> LockedCqs<'a> {
    pub(super) fn new(send: &'a CqInner, recv: &'a CqInner) -> LockedCqs<'a> {
        // Locked in the order of their addresses, so that two threads cannot deadlock.
        if ptr::eq(send, recv) {
            LockedCqs { send: (send, send.lock.lock()), recv: None }
        } else if ptr::from_ref(send) < ptr::from_ref(recv) {
            let first = send.lock.lock();
            LockedCqs { send: (send, first), recv: Some((recv, recv.lock.lock())) }
        } else {
            let first = recv.lock.lock();
            LockedCqs { send: (send, send.lock.lock()), recv: Some((recv, first)) }
        }
    }

    /// Adds a queue pair, so that its completions are translated.
    pub(super) fn add_qp(&mut self, ring: &Arc<SendRing>) {
        self.send.1.members.insert(ring.qp_num(), CqMember { ring: ring.clone(), sends: true });
        if let Some((_, recv)) = &mut self.recv {
            recv.members.insert(ring.qp_num(), CqMember { ring: ring.clone(), sends: false });
        }
    }

    /// Discards every completion of a queue pair.
    pub(super) fn discard_completions(&mut self, qp_num: u32) {
        for (cq, state) in core::iter::once(&mut self.send).chain(&mut self.recv) {
            let mut kept = core::mem::take(&mut state.backlog);
            // An error of the queue itself is reported again when the owner polls.
            cq.queue
                .drain(state, &mut |completion| {
                    kept.push_back(completion);
                    true
                })
                .unwrap_or(());
            kept.retain(|completion| completion.qp_num != qp_num);
            state.backlog = kept;
        }
    }

    /// Removes a queue pair.
    pub(super) fn remove_qp(&mut self, qp_num: u32) {
        for (_, state) in core::iter::once(&mut self.send).chain(&mut self.recv) {
            state.members.remove(&qp_num);
        }
    }
}

/// A completion as the device reports it.
struct RawCompletion {
    wr_id: u64,
    status: u32,
    opcode: u32,
    byte_len: u32,
    imm: u32,
    flags: u32,
    qp_num: u32,
    src_qp: u32,
}

/// The device's queue, used with the newer or the older calls.
#[derive(Clone, Copy, Debug)]
enum RawCq {
    /// The flag says whether `ibv_next_poll` can be used: with Soft-RoCE, a completion is lost if `ibv_end_poll` follows it.
    Extended(*mut ffi::ibv_cq_ex, bool),
    Plain(*mut ffi::ibv_cq),
}

impl RawCq {
    fn new(inner: &CqInner, depth: u32) -> Result<RawCq, DeviceError> {
        use ffi::ibv_create_cq_wc_flags as with;
        let context = inner.device.context;
        let cq_context = ptr::from_ref(&*inner.overrun).cast_mut().cast();
        let fields = with::IBV_WC_EX_WITH_BYTE_LEN
            | with::IBV_WC_EX_WITH_IMM
            | with::IBV_WC_EX_WITH_QP_NUM
            | with::IBV_WC_EX_WITH_SRC_QP;
        let single = ffi::ibv_create_cq_attr_flags::IBV_CREATE_CQ_ATTR_SINGLE_THREADED.0;
        for flags in [single, 0] {
            if inner.device.plain {
                break;
            }
            let mut init = ffi::ibv_cq_init_attr_ex {
                cqe: depth,
                cq_context,
                channel: inner.channel,
                comp_vector: 0,
                wc_flags: fields.0.into(),
                comp_mask: if flags == 0 {
                    0
                } else {
                    ffi::ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_FLAGS.0
                },
                flags,
                parent_domain: ptr::null_mut(),
            };
            // SAFETY: context and channel are live and `init` valid.
            let cq = unsafe { ffi::ibv_create_cq_ex(context, &mut init) };
            if !cq.is_null() {
                return Ok(RawCq::Extended(cq, !inner.device.soft_roce));
            }
        }
        // SAFETY: context and channel are live.
        let cq = unsafe { ffi::ibv_create_cq(context, depth as i32, cq_context, inner.channel, 0) };
        if cq.is_null() {
            return Err(creation_error("completion queues", "create a completion queue"));
        }
        Ok(RawCq::Plain(cq))
    }

    fn cq(self) -> *mut ffi::ibv_cq {
        match self {
            RawCq::Extended(cq, _) => cq.cast(),
            RawCq::Plain(cq) => cq,
        }
    }

    /// Passes completions to `push` until it returns false or there are no more.
    #[inline]
    fn drain(self, state: &mut CqState, push: &mut impl FnMut(Completion) -> bool) -> Result<(), CqError> {
        match self {
            RawCq::Extended(cq, next) => {
                let mut more = true;
                while more {
                    let mut attr = ffi::ibv_poll_cq_attr { comp_mask: 0 };
                    // SAFETY: the queue is live, and `state` proves that the lock is held, so no other thread polls it.
                    let mut code = unsafe { ffi::ibv_start_poll(cq, &mut attr) };
                    if code != 0 {
                        return if code == libc::ENOENT { Ok(()) } else { Err(CqError::Device(code.abs())) };
                    }
                    loop {
                        // SAFETY: start_poll or next_poll has moved the queue to a completion; the queue was created
                        // with the fields that are read.
                        let raw = unsafe { read(cq) };
                        more = state.translate(&raw).is_none_or(&mut *push);
                        if !more || !next {
                            break;
                        }
                        // SAFETY: between start_poll and end_poll.
                        code = unsafe { ffi::ibv_next_poll(cq) };
                        if code != 0 {
                            more = false;
                            break;
                        }
                    }
                    // SAFETY: start_poll succeeded.
                    unsafe { ffi::ibv_end_poll(cq) };
                    if code != 0 && code != libc::ENOENT {
                        return Err(CqError::Device(code.abs()));
                    }
                }
                Ok(())
            }
            RawCq::Plain(cq) => loop {
                let mut wc = MaybeUninit::<ffi::ibv_wc>::zeroed();
                // SAFETY: the queue is live, the lock is held, and there is room for one completion.
                let wc = match unsafe { ffi::ibv_poll_cq(cq, 1, wc.as_mut_ptr()) } {
                    0 => return Ok(()),
                    // SAFETY: it consists of integers and was zeroed before the driver filled it in.
                    1 => unsafe { wc.assume_init() },
                    code => return Err(CqError::Device(code.abs())),
                };
                let raw = RawCompletion {
                    wr_id: wc.wr_id,
                    status: wc.status,
                    opcode: wc.opcode,
                    byte_len: wc.byte_len,
                    // SAFETY: both members of the union are 32-bit integers.
                    imm: unsafe { wc.imm_data_invalidated_rkey_union.imm_data },
                    flags: wc.wc_flags,
                    qp_num: wc.qp_num,
                    src_qp: wc.src_qp,
                };
                if let Some(completion) = state.translate(&raw)
                    && !push(completion)
                {
                    return Ok(());
                }
            },
        }
    }
}

/// Reads the current completion.
///
/// # Safety
///
/// The queue must be at a completion, and created with the fields that are read here.
#[inline]
unsafe fn read(cq: *mut ffi::ibv_cq_ex) -> RawCompletion {
    // SAFETY: the caller's promise.
    unsafe {
        let mut raw = RawCompletion {
            wr_id: (*cq).wr_id,
            status: (*cq).status,
            opcode: 0,
            byte_len: 0,
            imm: 0,
            flags: 0,
            qp_num: ffi::ibv_wc_read_qp_num(cq),
            src_qp: 0,
        };
        if raw.status == ffi::ibv_wc_status::IBV_WC_SUCCESS {
            raw.opcode = ffi::ibv_wc_read_opcode(cq);
            raw.byte_len = ffi::ibv_wc_read_byte_len(cq);
            if raw.opcode & ffi::ibv_wc_opcode::IBV_WC_RECV != 0 {
                raw.flags = ffi::ibv_wc_read_wc_flags(cq);
                raw.src_qp = ffi::ibv_wc_read_src_qp(cq);
                if raw.flags & ffi::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0 {
                    raw.imm = ffi::ibv_wc_read_imm_data(cq);
                }
            }
        }
        raw
    }
}

/// A hasher for queue pair numbers: they are small and dense, so one multiplication is enough.
#[derive(Default)]
struct QpNumHasher(u64);

impl Hasher for QpNumHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32(u32::from(byte));
        }
    }

    #[inline]
    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
