//! The state of an open device that its objects and its threads share. Each field is one idea, in a file of its own that knows nothing of the
//! device.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex};

use super::attempts::Attempts;
use super::device_memory::{Allocation, DeviceMemory};
use super::events::Events;
use super::lane::LANE_DATA;
use super::layout::{QpNum, RegionKey};
use super::link::Link;
use super::lock::locked;
use super::peers::Peers;
use super::qp::QpShared;
use super::qp_table::QpTable;
use super::region_keys::TaggedKey;
use super::regions::Regions;
use super::removal::Removals;
use super::watch::Watch;
use super::workers::Workers;
use crate::device::{DeviceAddress, DeviceAttr, DeviceError};
use crate::memory::segment::Segment;

/// An open device, as its objects and its threads see it.
#[derive(Debug)]
pub(super) struct DeviceShared {
    /// The name of the device.
    pub(super) gid: [u8; 16],
    pub(super) attr: DeviceAttr,
    pub(super) memory: Arc<DeviceMemory>,
    pub(super) regions: Regions,
    pub(super) qps: QpTable<QpShared>,
    pub(super) peers: Peers,
    pub(super) watch: Watch,
    pub(super) attempts: Attempts,
    pub(super) workers: Workers,
    pub(super) removals: Removals,
    pub(super) events: Events,
    /// For the service thread: queue pairs in ERR whose receives are to be flushed.
    pub(super) flush_requests: Mutex<Vec<FlushRequest>>,
    /// Number of epochs so far.
    epochs: AtomicU64,
    /// Serialises everything that acts in the place of a peer: voiding reservations, announcing that receives are flushed or returned,
    /// breaking a connection that a peer means, and the reset of a queue pair.
    pub(super) cleanup: Mutex<()>,
    /// Locked while the service thread accesses memory registered in place for a peer, from the check of the key to the last
    /// byte. Deregistration takes it after it has cleared the key: then no such access is under way, whether or not the
    /// peer still waits for the reply.
    pub(super) proxied_access: Mutex<()>,
    closing: AtomicBool,
}

/// A queue pair in ERR whose receives are to be flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlushRequest {
    pub(super) qp_num: u32,
    /// The epoch that has ended. A queue pair in another epoch was reset since.
    pub(super) epoch: u64,
}

impl DeviceShared {
    /// A new device with this name and segment, whose service thread is going to use `watch`.
    pub(super) fn new(
        gid: [u8; 16],
        segment: Arc<Segment>,
        watch: Watch,
    ) -> Result<DeviceShared, DeviceError> {
        let regions = Regions::new(gid, &segment)?;
        let memory = DeviceMemory::new(segment).ok_or(DeviceError::Exhausted { what: "device memory" })?;
        Ok(DeviceShared {
            gid,
            attr: attributes(),
            memory: Arc::new(memory),
            regions,
            qps: QpTable::new(),
            peers: Peers::new(gid),
            watch,
            attempts: Attempts::default(),
            workers: Workers::default(),
            removals: Removals::default(),
            events: Events::default(),
            flush_requests: Mutex::default(),
            epochs: AtomicU64::new(0),
            cleanup: Mutex::new(()),
            proxied_access: Mutex::new(()),
            closing: AtomicBool::new(false),
        })
    }

    pub(super) fn address(&self) -> DeviceAddress {
        DeviceAddress {
            provider: DeviceAddress::SOFTWARE,
            link_layer: 0,
            mtu: 5,
            reserved: 0,
            lid: 0,
            reserved2: 0,
            gid: self.gid,
        }
    }

    /// Asks the device's threads to end.
    pub(super) fn close(&self) {
        // Release, partner: the Acquire load in `is_closing`.
        self.closing.store(true, Release);
    }

    pub(super) fn is_closing(&self) -> bool {
        // Acquire, partner: the Release store in `close`.
        self.closing.load(Acquire)
    }

    /// Drops what refers to peers; the device is closed and its threads have ended. Handles of queue pairs may keep the device's memory for
    /// longer, but peers learn now that we have left.
    pub(super) fn drop_links(&self) {
        self.watch.clear();
        self.peers.clear_links();
    }

    /// False in a forked child of the process that opened the device.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.memory.segment.is_of_this_process()
    }

    /// Allocates zeroed memory of the segment.
    pub(super) fn allocate(&self, len: u64) -> Result<Allocation, DeviceError> {
        self.retry_after_removals(|| self.memory.allocate(len))
            .ok_or(DeviceError::Exhausted { what: "device memory" })
    }

    pub(super) fn take_region_key(&self) -> Result<TaggedKey, DeviceError> {
        self.retry_after_removals(|| self.regions.take_key())
            .ok_or(DeviceError::Exhausted { what: "regions" })
    }

    /// The link to a peer device; connects to the peer if it is not connected yet.
    pub(super) fn link(&self, to: &DeviceAddress) -> Result<Arc<Link>, DeviceError> {
        self.peers.link(to, &self.watch)
    }

    /// Adds the queue pair that `make` makes to the table.
    pub(super) fn add_qp(
        &self,
        make: impl FnOnce(QpNum) -> Result<Arc<QpShared>, DeviceError>,
    ) -> Result<Arc<QpShared>, DeviceError> {
        let number = self
            .retry_after_removals(|| self.qps.take_number())
            .ok_or(DeviceError::Exhausted { what: "queue pairs" })?;
        let qp = make(number).inspect_err(|_| self.qps.give_back_number(number))?;
        self.qps.insert(number, qp.clone());
        Ok(qp)
    }

    /// A new epoch for a queue pair whose last one was `previous`. No other queue pair ever has the same epoch; the low bits
    /// ([`short_epoch`](super::layout::short_epoch)) count the epochs of this queue pair.
    pub(super) fn next_epoch(&self, previous: u64) -> u64 {
        let number = self.epochs.fetch_add(1, Relaxed) + 1;
        number << 7 | (previous + 1) & 0x7F
    }

    /// Asks the service thread to flush the receives of a queue pair in ERR.
    pub(super) fn request_flush(&self, request: FlushRequest) {
        locked(&self.flush_requests).push(request);
        self.watch.wake();
    }
}

fn attributes() -> DeviceAttr {
    DeviceAttr {
        max_qp_wr: 1 << 14,
        max_sge: 16,
        max_cqe: 1 << 20,
        max_srq_wr: 1 << 15,
        // The poster copies the bytes either way, so inline data has no other limit than this one.
        max_inline: 1 << 20,
        max_message: 1 << 30,
        max_datagram: 4096,
        max_qp: QpNum::INDICES,
        max_mr: RegionKey::INDICES,
        one_sided: true,
        atomics: true,
        link_rate: 10_000,
        same_machine: true,
        in_place_is_slower: true,
        port_events: false,
        completion_data: LANE_DATA as u32,
    }
}
