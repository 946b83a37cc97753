//! Send requests that could not be executed when they were posted: the peer had no receive, or was not ready.
//!
//! They wait here, in order, with copies of everything that they need; `progress.rs` retries them.

use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use zerocopy::IntoBytes;

use super::error::ExecuteError;
use super::link::Link;
use super::peer_qp::PeerQp;
use super::region_keys::pointer;
use super::regions::Regions;
use super::request::check_local;
use crate::device::{ConnectConfig, Data, SendOp, SendWr, Sge, Signal, Status};
use crate::memory::copy::copy;

/// Delay between two attempts while the peer is not ready.
pub(super) const NOT_READY_RETRY: Duration = Duration::from_micros(200);

/// The deferred sends of a queue pair, and the peer they go to.
#[derive(Debug, Default)]
pub(super) struct DeferredSends {
    /// The sending half of the queue pair; `None` while the poster has it.
    pub(super) peer: Option<Box<PeerQp>>,
    pub(super) queue: VecDeque<DeferredWr>,
    /// A progress thread executes the oldest request, and has it and the sending half for as long.
    pub(super) is_executing: bool,
    /// Counts the connections of the queue pair: what a progress thread executed for an earlier one is dropped.
    pub(super) connection: u64,
}

impl DeferredSends {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && !self.is_executing
    }

    /// Drops all requests; returns whether there were any. One that is being executed is dropped when that is over.
    pub(super) fn clear(&mut self) -> bool {
        let was_deferring = !self.is_empty();
        *self = DeferredSends { connection: self.connection + 1, ..DeferredSends::default() };
        was_deferring
    }

    /// The link whose peer the oldest request may have to wait for.
    pub(super) fn link_to_wait_for(&self) -> Option<Arc<Link>> {
        let (peer, request) = (self.peer.as_ref()?, self.queue.front()?);
        peer.link.may_wait(&request.op).then(|| peer.link.clone())
    }
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
            Data::InlineHead { head, bytes } => {
                DeferredData::Inline([head.as_bytes(), bytes].concat().into())
            }
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
            signaled: wr.signal != Signal::OnFailure,
            streaming: wr.streaming,
            position,
            due,
            deadline: retry_deadline(connect),
            rnr_retries_left: connect.rnr_retry,
        }
    }

    pub(super) fn data(&self) -> Data<'_> {
        match &self.data {
            DeferredData::Inline(bytes) => Data::Inline(bytes),
            DeferredData::Regions(sges) => Data::Regions(sges),
        }
    }

    /// Makes the request independent of the program's memory: what it sends is inline from now on. Returns room for what it returns, if it
    /// returns something, which [`store_result`](DeferredWr::store_result) gives to the program. The caller is inside an attempt.
    pub(super) fn detach_memory(&mut self, pd: u32, regions: &Regions) -> Result<Box<[u8]>, ExecuteError> {
        if let DeferredData::Inline(_) = self.data {
            return Ok(Box::default());
        }
        check_local(pd, &self.op, &self.data())?;
        if !self.is_registered(regions) {
            return Err(ExecuteError::local(Status::LocalProtection));
        }
        let mut memory = vec![0; self.len as usize].into_boxed_slice();
        if matches!(self.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) {
            return Ok(memory);
        }
        let mut rest = &mut memory[..];
        self.for_each_range(|at, len| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(len);
            // SAFETY: an entry of a live region; `now` has as many bytes.
            unsafe { copy(at, now.as_mut_ptr(), len) };
            rest = later;
        });
        self.data = DeferredData::Inline(memory);
        Ok(Box::default())
    }

    /// Stores what the request returned into the memory that it names. The caller is inside an attempt.
    pub(super) fn store_result(&self, regions: &Regions, result: &[u8]) -> Result<(), ExecuteError> {
        if result.is_empty() {
            return Ok(());
        }
        if !self.is_registered(regions) {
            return Err(ExecuteError::local(Status::LocalProtection));
        }
        let mut rest = result;
        self.for_each_range(|at, len| {
            let (now, later) = rest.split_at(len);
            // SAFETY: an entry of a live region with local write access, as `detach_memory` checked; `now` has as many bytes.
            unsafe { copy(now.as_ptr(), at, len) };
            rest = later;
        });
        Ok(())
    }

    fn for_each_range(&self, mut visit: impl FnMut(*mut u8, usize)) {
        if let DeferredData::Regions(sges) = &self.data {
            sges.iter().for_each(|sge| visit(pointer(sge.addr), sge.len as usize));
        }
    }

    /// Whether every region that the request names is still registered.
    pub(super) fn is_registered(&self, regions: &Regions) -> bool {
        match &self.data {
            DeferredData::Inline(_) => true,
            DeferredData::Regions(sges) => regions.are_registered(sges),
        }
    }
}

/// When a request that starts now has used up all its retries without an acknowledgement.
pub(super) fn retry_deadline(connect: &ConnectConfig) -> Option<Instant> {
    let attempts = u32::from(connect.retry_count) + 1;
    let timeout = Duration::from_nanos(4096u64 << connect.timeout.min(31)) * attempts;
    (connect.timeout != 0).then(|| Instant::now() + timeout)
}
