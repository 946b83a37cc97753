//! Devices, protection domains, shared receive queues and address handles.

use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::time::Duration;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rdma_mummy_sys as ffi;
use rustix::event::{PollFd, PollFlags};

use super::cq::Cq;
use super::datapath::{RcQp, UdQp};
use super::discovery;
use super::os_error;
use super::path::{PacketMarks, address_vector, unreachable_error};
use super::port::{Identity, find_gid, link_rate};
use crate::device::{
    Access, CqConfig, DeviceAddress, DeviceAttr, DeviceError, Event, PostError, QpConfig, RecvWr, SrqConfig,
};
use crate::process::Creator;

/// Limit on scatter/gather entries per request, whatever the device supports: the list is on the stack.
pub(super) const MAX_SGE: usize = 32;

const SOFT_ROCE_VENDOR: u32 = 0xff_ffff;

/// An open device and one port of it.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(super) inner: Arc<DeviceInner>,
}

#[derive(Debug)]
pub(super) struct DeviceInner {
    pub(super) context: *mut ffi::ibv_context,
    pub(super) attr: DeviceAttr,
    name: String,
    pub(super) port: u8,
    /// The GID index that the caller asked for.
    chosen_gid: Option<u8>,
    /// As last read from the port; the addresses of its interface may change.
    identity: Mutex<Identity>,
    /// READs and atomics outstanding per queue pair: as responder, as initiator.
    pub(super) max_rd_atomic: (u8, u8),
    max_srq_sge: u32,
    /// Use only the older calls, which every driver has.
    pub(super) plain: bool,
    /// Soft-RoCE: its driver has bugs in parts of the newer calls, see docs/decisions/verbs-bindings.md.
    pub(super) soft_roce: bool,
    creator: Creator,
}

// SAFETY: the calls of libibverbs may be made from any thread; the other fields do not change after `open`, or have a lock.
unsafe impl Send for DeviceInner {}
// SAFETY: as above.
unsafe impl Sync for DeviceInner {}

impl DeviceInner {
    /// False in a forked child of the process that opened the device.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.creator.is_this_process()
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if !self.is_of_this_process() {
            return;
        }
        // SAFETY: opened in `open`, closed once; every object created from it held this Arc.
        let rc = unsafe { ffi::ibv_close_device(self.context) };
        debug_assert_eq!(rc, 0, "close device");
    }
}

impl Device {
    pub(crate) fn open(name: &str, port: u8, gid_index: Option<u8>) -> Result<Device, DeviceError> {
        crate::ring::fence::register()
            .map_err(|source| DeviceError::Os { what: "membarrier (Linux 4.16 or later)", source })?;
        let context = discovery::open(name)?;
        // From here on, dropping `inner` closes the device if a step fails.
        let mut inner = DeviceInner {
            context,
            attr: DeviceAttr {
                max_qp_wr: 0,
                max_sge: 0,
                max_cqe: 0,
                max_srq_wr: 0,
                max_inline: 0,
                max_message: 0,
                max_datagram: 0,
                max_qp: 0,
                max_mr: 0,
                one_sided: true,
                atomics: false,
                link_rate: 0,
                same_machine: false,
                in_place_is_slower: false,
                port_events: true,
                completion_data: 0,
            },
            name: name.to_owned(),
            port,
            chosen_gid: gid_index,
            identity: Mutex::new(Identity {
                address: DeviceAddress {
                    provider: DeviceAddress::VERBS,
                    link_layer: 0,
                    mtu: 0,
                    reserved: 0,
                    lid: 0,
                    reserved2: 0,
                    gid: [0; 16],
                },
                gid_index: 0,
            }),
            max_rd_atomic: (0, 0),
            max_srq_sge: 0,
            plain: std::env::var_os("CROSSTIE_VERBS").is_some_and(|v| v == "plain"),
            soft_roce: false,
            creator: Creator::this_process(),
        };
        let missing = |reason: String| DeviceError::NoSuchDevice { name: name.to_owned(), reason };

        // SAFETY: the structure consists of integers, for which zero is valid.
        let mut device: ffi::ibv_device_attr = unsafe { core::mem::zeroed() };
        // SAFETY: `context` is open and `device` is a valid output pointer.
        match unsafe { ffi::ibv_query_device(context, &mut device) } {
            0 => {}
            code => return Err(os_error("query device", Some(code))),
        }
        if port == 0 || port > device.phys_port_cnt {
            return Err(missing(format!(
                "it has no port {port}; its ports are 1 to {}",
                device.phys_port_cnt
            )));
        }
        // SAFETY: an open context points to its device.
        if unsafe { (*(*context).device).transport_type } != ffi::ibv_transport_type::IBV_TRANSPORT_IB {
            return Err(missing("it is neither InfiniBand nor RoCE (iWARP is not supported)".into()));
        }
        // SAFETY: the structure consists of integers, for which zero is valid.
        let mut link: ffi::ibv_port_attr = unsafe { core::mem::zeroed() };
        // SAFETY: `context` is open and `link` is a valid output pointer.
        match unsafe { ffi::ibv_query_port(context, port, &mut link) } {
            0 => {}
            code => return Err(os_error("query port", Some(code))),
        }
        if link.state != ffi::ibv_port_state::IBV_PORT_ACTIVE {
            return Err(missing(format!(
                "port {port} is not active: see `rdma link`, `ip link` or `ibstat`"
            )));
        }

        let identity = inner.identity.get_mut().unwrap_or_else(PoisonError::into_inner);
        identity.address.link_layer = if link.link_layer == ffi::IBV_LINK_LAYER_ETHERNET { 2 } else { 1 };
        identity.set_port(link.lid, link.active_mtu);
        let mtu = identity.address.mtu;
        let is_infiniband = identity.address.link_layer == 1;
        let gids = discovery::gids(name, port);
        let gid = find_gid(&gids, gid_index, is_infiniband).ok_or_else(|| match gid_index {
            Some(index) => {
                let known: Vec<String> =
                    gids.iter().map(|g| format!("{} ({} {})", g.index, g.kind, g.address)).collect();
                missing(format!("port {port} has no GID {index}; its GIDs are: {}", known.join(", ")))
            }
            None if is_infiniband => missing(format!("port {port} has no GID: is a subnet manager running?")),
            None => missing(format!("port {port} has no GID: give its interface an IP address")),
        })?;
        identity.set_gid(gid);

        let small = |n: i32| u8::try_from(n.clamp(0, 255)).unwrap_or(0);
        inner.max_rd_atomic = (small(device.max_qp_rd_atom), small(device.max_qp_init_rd_atom));
        inner.soft_roce = device.vendor_id == SOFT_ROCE_VENDOR;
        inner.max_srq_sge = count(device.max_srq_sge).min(MAX_SGE as u32);
        inner.attr = DeviceAttr {
            max_qp_wr: count(device.max_qp_wr),
            max_sge: count(device.max_sge).min(MAX_SGE as u32),
            max_cqe: count(device.max_cqe),
            max_srq_wr: count(device.max_srq_wr),
            max_inline: 0,
            max_message: u64::from(link.max_msg_sz),
            max_datagram: 128 << mtu,
            max_qp: count(device.max_qp),
            max_mr: count(device.max_mr),
            one_sided: true,
            atomics: device.atomic_cap != ffi::ibv_atomic_cap::IBV_ATOMIC_NONE,
            link_rate: link_rate(link.active_speed, link.active_width),
            same_machine: false,
            in_place_is_slower: false,
            port_events: true,
            completion_data: 0,
        };
        // SAFETY: the context is open.
        nonblocking(unsafe { (*context).async_fd })?;
        inner.attr.max_inline = max_inline(context);
        Ok(Device { inner: Arc::new(inner) })
    }

    pub(crate) fn attr(&self) -> &DeviceAttr {
        &self.inner.attr
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.inner.identity().address
    }

    /// Whether the kernel knows how to register DMA-BUF memory on this device: it is asked to register an invalid descriptor.
    pub(crate) fn has_dma_buf(&self) -> bool {
        let Ok(pd) = self.alloc_pd() else { return false };
        // SAFETY: the domain is live; without a valid descriptor nothing is registered.
        let mr = unsafe { ffi::ibv_reg_dmabuf_mr(pd.inner.pd, 0, 0, 0, -1, 0) };
        let error = std::io::Error::last_os_error().raw_os_error();
        mr.is_null() && !matches!(error, Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT))
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        // SAFETY: the context is open.
        let pd = unsafe { ffi::ibv_alloc_pd(self.inner.context) };
        if pd.is_null() {
            return Err(creation_error("protection domains", "allocate a protection domain"));
        }
        Ok(Pd { inner: Arc::new(PdInner { pd, device: self.inner.clone() }) })
    }

    pub(crate) fn create_cq(&self, config: &CqConfig) -> Result<Cq, DeviceError> {
        Cq::new(&self.inner, config)
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Result<Option<Event>, DeviceError> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.take_event()? {
                return Ok(Some(event));
            }
            // SAFETY: the context stays open, and with it the descriptor, while `self` is borrowed.
            let fd = unsafe { BorrowedFd::borrow_raw((*self.inner.context).async_fd) };
            if !readable(fd, deadline)
                .map_err(|e| DeviceError::Os { what: "wait for a device event", source: e })?
            {
                return Ok(None);
            }
        }
    }

    /// The next event that has an [`Event`]; all others are discarded.
    fn take_event(&self) -> Result<Option<Event>, DeviceError> {
        use ffi::ibv_event_type::*;
        loop {
            let mut raw = MaybeUninit::<ffi::ibv_async_event>::zeroed();
            // SAFETY: the context is open and `raw` is a valid output pointer.
            if unsafe { ffi::ibv_get_async_event(self.inner.context, raw.as_mut_ptr()) } != 0 {
                let error = std::io::Error::last_os_error();
                return match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::EINTR) => Ok(None),
                    _ => Err(DeviceError::Os { what: "take a device event", source: error }),
                };
            }
            // A newer kernel may send values that the Rust enum does not have, so the field is read as an integer.
            // SAFETY: the field is a C enum that the call above has filled in.
            let kind = unsafe { ptr::addr_of!((*raw.as_ptr()).event_type).cast::<u32>().read() };
            // SAFETY: only called for kinds whose element is a queue pair, which lives until the event is acknowledged.
            let qp_num = || unsafe { (*(*raw.as_ptr()).element.qp).qp_num };
            // SAFETY: only called for kinds whose element is a port number.
            let ours = || unsafe { (*raw.as_ptr()).element.port_num } == i32::from(self.inner.port);
            let event = match kind {
                k if k == IBV_EVENT_PORT_ERR as u32 && ours() => Some(Event::PortDown),
                k if k == IBV_EVENT_PORT_ACTIVE as u32 && ours() => Some(Event::PortUp),
                k if k == IBV_EVENT_QP_FATAL as u32 => Some(Event::QpFatal(qp_num())),
                k if k == IBV_EVENT_QP_REQ_ERR as u32 || k == IBV_EVENT_QP_ACCESS_ERR as u32 => {
                    Some(Event::QpAccess(qp_num()))
                }
                k if k == IBV_EVENT_QP_LAST_WQE_REACHED as u32 => Some(Event::LastWqeReached(qp_num())),
                k if k == IBV_EVENT_CQ_ERR as u32 => {
                    // SAFETY: the element is a completion queue of this context, which lives until the event is
                    // acknowledged; its context is the flag that `Cq::new` set, which outlives the queue.
                    let flag =
                        unsafe { (*(*raw.as_ptr()).element.cq).cq_context.cast::<AtomicBool>().as_ref() };
                    if let Some(flag) = flag {
                        flag.store(true, Relaxed);
                    }
                    Some(Event::CqOverrun)
                }
                k if k == IBV_EVENT_DEVICE_FATAL as u32 => Some(Event::DeviceFatal),
                _ => None,
            };
            // SAFETY: the event was taken above and is acknowledged once.
            unsafe { ffi::ibv_ack_async_event(raw.as_mut_ptr()) };
            if event.is_some() {
                return Ok(event);
            }
        }
    }
}

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Pd {
    pub(super) inner: Arc<PdInner>,
}

#[derive(Debug)]
pub(super) struct PdInner {
    pub(super) pd: *mut ffi::ibv_pd,
    pub(super) device: Arc<DeviceInner>,
}

// SAFETY: libibverbs accepts a protection domain from any thread; the fields do not change.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl Drop for PdInner {
    fn drop(&mut self) {
        // A forked child would free the domain of its parent.
        if !self.device.is_of_this_process() {
            return;
        }
        // SAFETY: allocated in `alloc_pd`, freed once; every object created from it held this Arc.
        let rc = unsafe { ffi::ibv_dealloc_pd(self.pd) };
        debug_assert_eq!(rc, 0, "free protection domain");
    }
}

impl Pd {
    pub(crate) fn create_srq(&self, config: &SrqConfig) -> Result<Srq, DeviceError> {
        let device = &self.inner.device;
        check_limit("receives in a shared receive queue", config.max_wr, device.attr.max_srq_wr)?;
        check_limit("scatter/gather entries per receive", config.max_sge, device.max_srq_sge)?;
        let mut init = ffi::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ffi::ibv_srq_attr {
                max_wr: config.max_wr.max(1),
                max_sge: config.max_sge.max(1),
                srq_limit: 0,
            },
        };
        // SAFETY: the domain is live and `init` valid.
        let srq = unsafe { ffi::ibv_create_srq(self.inner.pd, &mut init) };
        if srq.is_null() {
            return Err(creation_error("shared receive queues", "create a shared receive queue"));
        }
        let inner = SrqInner { srq, pd: self.inner.clone() };
        Ok(Srq { srq, max_sge: config.max_sge as usize, inner: Arc::new(inner) })
    }

    pub(crate) fn create_rc(
        &self,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<RcQp, DeviceError> {
        RcQp::new(&self.inner, config, send_cq, recv_cq, srq)
    }

    pub(crate) fn create_ud(
        &self,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<UdQp, DeviceError> {
        UdQp::new(&self.inner, config, send_cq, recv_cq, srq)
    }

    pub(crate) fn create_ah(&self, to: &DeviceAddress) -> Result<Ah, DeviceError> {
        let mut attr = self.inner.device.address_vector(to, PacketMarks::default())?;
        // SAFETY: the domain is live and `attr` valid.
        let ah = unsafe { ffi::ibv_create_ah(self.inner.pd, &mut attr) };
        if ah.is_null() {
            let error = std::io::Error::last_os_error();
            return Err(unreachable_error(to, &error)
                .unwrap_or(DeviceError::Os { what: "resolve an address", source: error }));
        }
        Ok(Ah { inner: Arc::new(AhInner { ah, address: *to, pd: self.inner.clone() }) })
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    srq: *mut ffi::ibv_srq,
    max_sge: usize,
    pub(super) inner: Arc<SrqInner>,
}

// SAFETY: the queue may be used from any thread, one at a time: `post_recv` takes `&mut self`. The pointer makes it `!Sync`.
unsafe impl Send for Srq {}

impl Srq {
    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.post_recvs(wr, 1).map(|_| ())
    }

    pub(crate) fn post_recvs(&mut self, wr: &RecvWr<'_>, count: u32) -> Result<u32, PostError> {
        super::datapath::post_receives(wr, count, self.max_sge, |list, bad| {
            // SAFETY: the queue lives in `inner`; the list lives through the call.
            unsafe { ffi::ibv_post_srq_recv(self.srq, list, bad) }
        })
    }
}

#[derive(Debug)]
pub(super) struct SrqInner {
    pub(super) srq: *mut ffi::ibv_srq,
    pub(super) pd: Arc<PdInner>,
}

// SAFETY: shared only to keep the queue alive and to pass it on when a queue pair is created.
unsafe impl Send for SrqInner {}
// SAFETY: as above.
unsafe impl Sync for SrqInner {}

impl Drop for SrqInner {
    fn drop(&mut self) {
        // A forked child would destroy the queue of its parent.
        if !self.pd.device.is_of_this_process() {
            return;
        }
        // SAFETY: created in `create_srq`, destroyed once; queue pairs on it held this Arc.
        let rc = unsafe { ffi::ibv_destroy_srq(self.srq) };
        debug_assert_eq!(rc, 0, "destroy shared receive queue");
    }
}

/// An address handle.
#[derive(Debug)]
pub(crate) struct Ah {
    pub(super) inner: Arc<AhInner>,
}

#[derive(Debug)]
pub(super) struct AhInner {
    pub(super) ah: *mut ffi::ibv_ah,
    address: DeviceAddress,
    pub(super) pd: Arc<PdInner>,
}

// SAFETY: an address handle does not change after its creation; libibverbs accepts it from any thread.
unsafe impl Send for AhInner {}
// SAFETY: as above.
unsafe impl Sync for AhInner {}

impl Ah {
    pub(crate) fn address(&self) -> DeviceAddress {
        self.inner.address
    }
}

impl Drop for AhInner {
    fn drop(&mut self) {
        // A forked child would destroy the handle of its parent.
        if !self.pd.device.is_of_this_process() {
            return;
        }
        // SAFETY: created in `create_ah`, destroyed once; requests that use it hold this Arc.
        let rc = unsafe { ffi::ibv_destroy_ah(self.ah) };
        debug_assert_eq!(rc, 0, "destroy address handle");
    }
}

impl DeviceInner {
    /// How peers reach the port now. A subnet manager may give an InfiniBand port another LID at any time, and the MTU of an interface may
    /// change. An interface that was down may come back with other addresses, so the GIDs are read anew when the GID in use is no longer in
    /// the port's table. While the port is down, or has no GID at all, the last ones are returned.
    pub(super) fn identity(&self) -> Identity {
        let mut identity = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the structure consists of integers, for which zero is valid.
        let mut link: ffi::ibv_port_attr = unsafe { core::mem::zeroed() };
        // SAFETY: the context is open and `link` is a valid output pointer.
        if unsafe { ffi::ibv_query_port(self.context, self.port, &mut link) } == 0
            && link.state == ffi::ibv_port_state::IBV_PORT_ACTIVE
        {
            identity.set_port(link.lid, link.active_mtu);
        }
        let mut current = ffi::ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open and `current` is a valid output pointer.
        let rc =
            unsafe { ffi::ibv_query_gid(self.context, self.port, identity.gid_index.into(), &mut current) };
        // SAFETY: every field of the union is 16 bytes of integers.
        if rc != 0 || unsafe { current.raw } != identity.address.gid {
            let gids = discovery::gids(&self.name, self.port);
            if let Some(gid) = find_gid(&gids, self.chosen_gid, identity.address.link_layer == 1) {
                identity.set_gid(gid);
            }
        }
        *identity
    }

    pub(super) fn access_flags(&self, access: Access) -> u32 {
        access_flags(access, self.attr.atomics)
    }

    pub(super) fn address_vector(
        &self,
        to: &DeviceAddress,
        marks: PacketMarks,
    ) -> Result<ffi::ibv_ah_attr, DeviceError> {
        let Identity { address, gid_index } = self.identity();
        address_vector(&address, (self.port, gid_index), to, marks)
    }
}

/// The flags for access rights. A device without atomics is not asked to allow them.
fn access_flags(access: Access, atomics: bool) -> u32 {
    use ffi::ibv_access_flags as f;
    let access = if atomics { access } else { access.difference(Access::REMOTE_ATOMIC) };
    [
        (Access::LOCAL_WRITE, f::IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, f::IBV_ACCESS_REMOTE_WRITE),
        (Access::REMOTE_READ, f::IBV_ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, f::IBV_ACCESS_REMOTE_ATOMIC),
    ]
    .into_iter()
    .filter(|(ours, _)| access.contains(*ours))
    .fold(0, |flags, (_, theirs)| flags | theirs.0)
}

pub(super) fn check_limit(what: &'static str, asked: u32, limit: u32) -> Result<(), DeviceError> {
    if asked > limit {
        return Err(DeviceError::Limit { what, asked: asked.into(), limit: limit.into() });
    }
    Ok(())
}

/// The error of a creation that failed: a resource is used up, or the error of the system.
pub(super) fn creation_error(what: &'static str, doing: &'static str) -> DeviceError {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ENOMEM | libc::ENOSPC) => DeviceError::Exhausted { what },
        code => os_error(doing, code),
    }
}

/// Waits until `fd` is readable (returns true) or the deadline has passed (returns false). Without a deadline there is no
/// limit.
pub(super) fn readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> std::io::Result<bool> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let left = left.map(|d| rustix::event::Timespec {
            tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: d.subsec_nanos().into(),
        });
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

pub(super) fn nonblocking(fd: i32) -> Result<(), DeviceError> {
    // SAFETY: the caller's object owns the descriptor and is borrowed during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::fs::fcntl_getfl(fd)
        .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK))
        .map_err(|e| DeviceError::Os { what: "make a descriptor non-blocking", source: e.into() })
}

fn count(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

/// Finds the limit on inline data. Devices do not report it, so this tries to create queue pairs.
fn max_inline(context: *mut ffi::ibv_context) -> u32 {
    // SAFETY: the context is open; each object is created, used and destroyed here, in the right order.
    unsafe {
        let pd = ffi::ibv_alloc_pd(context);
        let cq = ffi::ibv_create_cq(context, 1, ptr::null_mut(), ptr::null_mut(), 0);
        let mut found = 0;
        if !pd.is_null() && !cq.is_null() {
            for max_inline_data in [1024, 512, 256, 220, 128, 64, 32] {
                let mut init = ffi::ibv_qp_init_attr {
                    qp_context: ptr::null_mut(),
                    send_cq: cq,
                    recv_cq: cq,
                    srq: ptr::null_mut(),
                    cap: ffi::ibv_qp_cap {
                        max_send_wr: 1,
                        max_recv_wr: 1,
                        max_send_sge: 1,
                        max_recv_sge: 1,
                        max_inline_data,
                    },
                    qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
                    sq_sig_all: 0,
                };
                let qp = ffi::ibv_create_qp(pd, &mut init);
                if !qp.is_null() {
                    let rc = ffi::ibv_destroy_qp(qp);
                    debug_assert_eq!(rc, 0, "destroy the trial queue pair");
                    found = max_inline_data.min(init.cap.max_inline_data);
                    break;
                }
            }
        }
        if !cq.is_null() {
            let rc = ffi::ibv_destroy_cq(cq);
            debug_assert_eq!(rc, 0, "destroy the trial completion queue");
        }
        if !pd.is_null() {
            let rc = ffi::ibv_dealloc_pd(pd);
            debug_assert_eq!(rc, 0, "free the trial protection domain");
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_without_atomics_is_not_asked_to_allow_them() {
        let with = access_flags(Access::ALL, true);
        let without = access_flags(Access::ALL, false);
        assert_eq!(with ^ without, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0);
        assert_eq!(without, access_flags(Access::ALL.difference(Access::REMOTE_ATOMIC), true));
    }
}
