//! Send requests that could not be executed when they were posted: the peer had no receive, or was not ready.
//!
//! They wait here, in order, with copies of everything that they need; `progress.rs` retries them.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};
use core::time::Duration;
use std::collections::VecDeque;
use std::time::Instant;

use super::layout::{RegionEntry, RegionKey};
use super::peer_qp::PeerQp;
use crate::device::{ConnectConfig, Data, SendOp, SendWr, Sge};
use crate::memory::segment::SharedSlice;

/// Delay between two attempts while the peer is not ready.
pub(super) const NOT_READY_RETRY: Duration = Duration::from_micros(200);

/// The deferred sends of a queue pair, and the peer they go to.
#[derive(Debug, Default)]
pub(super) struct DeferredSends {
    /// The sending half of the queue pair; `None` while the poster has it.
    pub(super) peer: Option<Box<PeerQp>>,
    pub(super) queue: VecDeque<DeferredWr>,
}

/// A deferred request with its own copy of everything.
#[derive(Debug)]
pub(super) struct DeferredWr {
    pub(super) wr_id: u64,
    pub(super) op: SendOp,
    pub(super) data: DeferredData,
    pub(super) len: u32,
    pub(super) signaled: bool,
    pub(super) streaming: bool,
    pub(super) position: u64,
    /// When to try again.
    pub(super) due: Instant,
    /// When the request fails if the peer is still not ready; `None` means never.
    pub(super) deadline: Option<Instant>,
    pub(super) rnr_retries_left: u8,
}

#[derive(Debug)]
pub(super) enum DeferredData {
    Inline(Box<[u8]>),
    Regions(Box<[Sge<'static>]>),
}

impl DeferredWr {
    pub(super) fn new(
        wr: &SendWr<'_>,
        len: u32,
        position: u64,
        due: Instant,
        connect: &ConnectConfig,
    ) -> DeferredWr {
        let data = match wr.data {
            Data::Inline(bytes) => DeferredData::Inline(bytes.into()),
            // The borrow of the region ends here. `is_registered` looks the keys up again before the entries are used, as
            // a NIC does.
            Data::Regions(sges) => DeferredData::Regions(
                sges.iter().map(|sge| Sge { region: core::marker::PhantomData, ..*sge }).collect(),
            ),
        };
        DeferredWr {
            wr_id: wr.wr_id,
            op: wr.op,
            data,
            len,
            signaled: wr.signaled,
            streaming: wr.streaming,
            position,
            due,
            deadline: retry_deadline(connect),
            rnr_retries_left: connect.rnr_retry,
        }
    }

    /// Whether every region that the request names is still registered, see [`are_registered`].
    pub(super) fn is_registered(&self, regions: &SharedSlice<RegionEntry>) -> bool {
        match &self.data {
            DeferredData::Inline(_) => true,
            DeferredData::Regions(sges) => are_registered(sges, regions),
        }
    }
}

/// Whether the regions of all entries are registered, by the device's private table of regions.
pub(super) fn are_registered(sges: &[Sge<'_>], regions: &SharedSlice<RegionEntry>) -> bool {
    sges.iter().all(|sge| {
        let entry = &regions[RegionKey::from_bits(sge.lkey).index() as usize];
        // Acquire, partner: the Release store in `DeviceShared::add_region`.
        entry.key.load(Acquire) == sge.lkey && {
            // Another region has the same key, but not the same tag.
            let offset = sge.addr.wrapping_sub(entry.addr.load(Relaxed));
            let len = entry.len.load(Relaxed);
            offset <= len && u64::from(sge.len) <= len - offset
        }
    })
}

/// When a request that starts now has used up all its retries without an acknowledgement.
pub(super) fn retry_deadline(connect: &ConnectConfig) -> Option<Instant> {
    let attempts = u32::from(connect.retry_count) + 1;
    let timeout = Duration::from_nanos(4096u64 << connect.timeout.min(31)) * attempts;
    (connect.timeout != 0).then(|| Instant::now() + timeout)
}
