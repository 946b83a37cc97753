//! A peer's memory during one operation: looking up the region, checking access, and copying to and from it.
//!
//! The caller holds an [`OperationGuard`](super::quiescence::OperationGuard) of that peer, so a region that was found here
//! cannot be freed before the operation ends.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};

use super::error::ExecuteError;
use super::in_place::{MappedPtr, PeerMappings};
use super::layout::{IN_PLACE, RegionEntry, RegionKey};
use super::link::Link;
use super::recv_slots::{RECV_ACCESS, RecvSge};
use super::region_keys::pointer;
use crate::device::{Access, Data, RemoteAddr, Status};
use crate::memory::copy::{copy, copy_streaming};

/// A location in a peer's memory that was checked for key, bounds and access.
#[derive(Clone, Copy)]
pub(super) enum RemotePtr {
    /// Mapped into this process.
    Mapped(*mut u8),
    /// Registered in place by another process; reached with `process_vm_*` or through the peer's service thread.
    /// `mapped`: where it is mapped into this process, if it is, see `in_place/`.
    InPlace { addr: u64, key: u32, mapped: Option<MappedPtr> },
}

impl RemotePtr {
    /// The location `offset` bytes further on. It must be inside what was checked.
    pub(super) fn at(self, offset: usize) -> RemotePtr {
        match self {
            RemotePtr::Mapped(at) => RemotePtr::Mapped(at.wrapping_add(offset)),
            RemotePtr::InPlace { addr, key, mapped } => RemotePtr::InPlace {
                addr: addr.wrapping_add(offset as u64),
                key,
                mapped: mapped.map(|mapped| mapped.at(offset)),
            },
        }
    }

    /// The same location, which was checked for `len` bytes. If it is in memory in place that is mapped here, with the place where it is mapped:
    /// that is valid until the next call.
    #[inline]
    pub(super) fn find_mapping(self, mappings: &mut PeerMappings, link: &Link, len: u32) -> RemotePtr {
        let RemotePtr::InPlace { addr, key, .. } = self else { return self };
        let mapped = mappings.find(&link.regions, link.process.as_ref(), key, addr, len);
        RemotePtr::InPlace { addr, key, mapped }
    }
}

/// The memory of a peer in one protection domain.
pub(super) struct PeerMemory<'a> {
    pub(super) link: &'a Link,
    pub(super) pd: u32,
    /// Whether copies go past the caches, see [`SendWr::streaming`](crate::device::SendWr::streaming).
    pub(super) streaming: bool,
}

impl PeerMemory<'_> {
    /// Looks up `addr..addr + len` under `key`. `None` if the region does not exist, is too short, belongs to another
    /// protection domain, or does not allow `access`.
    #[inline(always)]
    fn look_up(&self, key: u32, addr: u64, len: u32, access: Access) -> Option<RemotePtr> {
        let entry = &self.link.regions[RegionKey::from_bits(key).index() as usize];
        // Acquire, partner: the Release store in `Regions::add`.
        if entry.key.load(Acquire) != key || key == 0 {
            return None;
        }
        let offset = addr.wrapping_sub(entry.addr.load(Relaxed));
        let size = entry.len.load(Relaxed);
        if offset > size
            || u64::from(len) > size - offset
            || entry.pd.load(Relaxed) != self.pd
            || !Access::from_bits_truncate(entry.access.load(Relaxed)).contains(access)
        {
            return None;
        }
        match entry.offset.load(Relaxed) {
            IN_PLACE if self.link.pid.is_none() => Some(RemotePtr::Mapped(pointer(addr))),
            IN_PLACE => Some(RemotePtr::InPlace { addr, key, mapped: None }),
            start => {
                let at = self.link.segment.bytes(start.checked_add(offset)?, len.into())?;
                Some(RemotePtr::Mapped(at.as_ptr()))
            }
        }
    }

    /// The target of a WRITE or the source of a READ.
    #[inline(always)]
    pub(super) fn check(
        &self,
        key: u32,
        addr: u64,
        len: u32,
        access: Access,
    ) -> Result<RemotePtr, ExecuteError> {
        if len == 0 {
            // As on a NIC, key and address of an empty message are not checked.
            return Ok(RemotePtr::Mapped(core::ptr::dangling_mut()));
        }
        self.look_up(key, addr, len, access).ok_or(ExecuteError::both_ends(Status::RemoteAccess))
    }

    /// The target of an atomic.
    pub(super) fn check_atomic(&self, key: u32, addr: u64) -> Result<RemotePtr, ExecuteError> {
        if !addr.is_multiple_of(8) {
            return Err(ExecuteError::both_ends(Status::RemoteInvalidRequest));
        }
        match self.look_up(key, addr, 8, Access::REMOTE_ATOMIC) {
            Some(RemotePtr::Mapped(at)) if !at.cast::<u64>().is_aligned() => {
                Err(ExecuteError::both_ends(Status::RemoteInvalidRequest))
            }
            Some(ptr) => Ok(ptr),
            None => Err(ExecuteError::both_ends(Status::RemoteAccess)),
        }
    }

    /// Copies between two mapped ranges.
    ///
    /// # Safety
    ///
    /// As for [`copy`]. If the ranges overlap (a loopback connection), the result is some mixture of the bytes, as on a NIC.
    #[inline]
    unsafe fn copy_mapped(&self, from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.streaming {
                copy_streaming(from, to, len);
            } else {
                copy(from, to, len);
            }
        }
    }

    /// Copies `len` bytes from local memory.
    ///
    /// # Safety
    ///
    /// `from..from + len` is valid for reads and `to` was checked for `len` bytes.
    #[inline(always)]
    unsafe fn copy_to(&self, to: RemotePtr, from: *const u8, len: usize) -> Result<(), Status> {
        match to {
            // SAFETY: the caller's promise.
            RemotePtr::Mapped(to) => unsafe { self.copy_mapped(from, to, len) },
            // SAFETY: the caller's promise.
            RemotePtr::InPlace { mapped: Some(to), .. } => unsafe { to.write(from, len) },
            // SAFETY: the caller's promise; the local memory is only read.
            RemotePtr::InPlace { addr, key, mapped: None } => unsafe {
                self.link.copy_in_place(true, key, addr, from.cast_mut(), len)?;
            },
        }
        Ok(())
    }

    /// Writes a request's data to `to`.
    #[inline(always)]
    pub(super) fn write(&self, to: RemotePtr, data: &Data<'_>) -> Result<(), ExecuteError> {
        let mut offset = 0;
        for (from, len) in pieces(data) {
            // SAFETY: the piece is readable; `to` was checked for the whole message.
            unsafe { self.copy_to(to.at(offset), from, len) }.map_err(ExecuteError::both_ends)?;
            offset += len;
        }
        Ok(())
    }

    /// Reads from `from` into the memory that a request names.
    pub(super) fn read(&self, from: RemotePtr, data: &Data<'_>) -> Result<(), ExecuteError> {
        let Data::Regions(sges) = data else { return Ok(()) };
        let mut offset = 0;
        for sge in *sges {
            let to = pointer(sge.addr);
            match from.at(offset) {
                // SAFETY: the entry is inside a live region with local write access; `from` was checked.
                RemotePtr::Mapped(from) => unsafe { self.copy_mapped(from, to, sge.len as usize) },
                // SAFETY: as above.
                RemotePtr::InPlace { addr, key, .. } => unsafe {
                    self.link
                        .copy_in_place(false, key, addr, to, sge.len as usize)
                        .map_err(ExecuteError::both_ends)?;
                },
            }
            offset += sge.len as usize;
        }
        Ok(())
    }

    /// Writes `head` and then a request's data into the scatter/gather entries of a receive. The error is the status with
    /// which the receive completes.
    pub(super) fn scatter(
        &self,
        mut sges: impl Iterator<Item = RecvSge>,
        head: &[u8],
        data: &Data<'_>,
    ) -> Result<(), Status> {
        let mut room: Option<(RemotePtr, usize)> = None;
        let mut write = |mut from: *const u8, mut len: usize| -> Result<(), Status> {
            while len > 0 {
                let (to, left) = match room.take() {
                    Some((to, left)) if left > 0 => (to, left),
                    _ => {
                        let sge = sges.next().ok_or(Status::LocalLength)?;
                        let to = self
                            .look_up(sge.lkey, sge.addr, sge.len, RECV_ACCESS)
                            .ok_or(Status::LocalProtection)?;
                        (to, sge.len as usize)
                    }
                };
                let now = len.min(left);
                // SAFETY: `from` is inside the source; `to` was checked for `left` bytes.
                unsafe { self.copy_to(to, from, now)? };
                room = Some((to.at(now), left - now));
                from = from.wrapping_add(now);
                len -= now;
            }
            Ok(())
        };
        write(head.as_ptr(), head.len())?;
        pieces(data).try_for_each(|(from, len)| write(from, len))
    }
}

/// The pieces of a request's data, in order. They are readable: slices, and ranges of live regions.
#[inline]
pub(super) fn pieces(data: &Data<'_>) -> impl Iterator<Item = (*const u8, usize)> {
    (0..).map_while(|index| piece(data, index))
}

#[inline]
fn piece(data: &Data<'_>, index: usize) -> Option<(*const u8, usize)> {
    match (data, index) {
        (Data::Inline(bytes), 0) | (Data::InlineHead { bytes, .. }, 1) => Some((bytes.as_ptr(), bytes.len())),
        (Data::InlineHead { head, .. }, 0) => Some((head.as_ptr().cast(), size_of_val(head))),
        (Data::Regions(sges), _) => {
            let sge = sges.get(index)?;
            Some((pointer(sge.addr), sge.len as usize))
        }
        _ => None,
    }
}

/// The memory that a sender wrote to last, as it was found in the peer's table: the next message often goes there as well.
#[derive(Debug)]
pub(super) struct LastTarget {
    key: u32,
    /// The region's entry in the peer's table.
    entry: *const RegionEntry,
    /// What the region's owner calls its first byte.
    addr: u64,
    len: u64,
    /// Where that byte is mapped.
    at: *mut u8,
}

// SAFETY: addresses, which are not bound to a thread. `find` says when they may be used.
unsafe impl Send for LastTarget {}

impl LastTarget {
    /// No memory yet: no region has this key and this address.
    pub(super) fn none(link: &Link) -> LastTarget {
        LastTarget { key: 0, entry: link.regions.ring(0), addr: u64::MAX, len: 0, at: core::ptr::null_mut() }
    }

    /// Where `to..to + len` is mapped, if it is inside of this region, where a WRITE is allowed. Valid while the caller is inside the operation.
    ///
    /// # Safety
    ///
    /// The link, of [`none`](LastTarget::none) and of every [`remember`](LastTarget::remember), still exists.
    #[inline(always)]
    pub(super) unsafe fn find(&self, to: RemoteAddr, len: u32) -> Option<*mut u8> {
        // SAFETY: an entry of the link's table, which the link keeps mapped.
        let entry = unsafe { &*self.entry };
        let offset = to.addr.wrapping_sub(self.addr);
        if self.key != to.rkey || offset.checked_add(len.into()).is_none_or(|end| end > self.len) {
            return None;
        }
        // No two regions have the same key and the same address (`region_keys.rs`), and a region has its key as long as it exists. The rest
        // of the entry was checked when it was found.
        // Acquire, partner: the Release store in `Regions::add`.
        if entry.key.load(Acquire) != to.rkey || entry.addr.load(Relaxed) != self.addr {
            return None;
        }
        Some(self.at.wrapping_add(offset as usize))
    }

    /// Remembers the region of `to`, where a request has just been allowed to write, if it is mapped and short enough to be checked whole.
    #[inline]
    pub(super) fn remember(&mut self, memory: &PeerMemory<'_>, to: RemoteAddr) {
        if self.key != to.rkey || to.addr.wrapping_sub(self.addr) >= self.len {
            self.look_up(memory, to);
        }
    }

    #[cold]
    fn look_up(&mut self, memory: &PeerMemory<'_>, to: RemoteAddr) {
        let entry = &memory.link.regions[RegionKey::from_bits(to.rkey).index() as usize];
        let (addr, len) = (entry.addr.load(Relaxed), entry.len.load(Relaxed));
        // All of it is checked now, so that it need not be checked for each message.
        if let Some(checked) = u32::try_from(len).ok().filter(|len| *len > 0)
            && let Some(RemotePtr::Mapped(at)) = memory.look_up(to.rkey, addr, checked, Access::REMOTE_WRITE)
        {
            *self = LastTarget { key: to.rkey, entry, addr, len, at };
        }
    }
}

/// Stores the former value of an atomic into the memory that its request names.
pub(super) fn store_atomic_result(data: &Data<'_>, former: u64) {
    if let Data::Regions([sge, ..]) = data {
        let to = pointer(sge.addr);
        // SAFETY: the entry is 8 bytes (checked when posted) of a live region with local write access.
        unsafe { copy(former.to_ne_bytes().as_ptr(), to, 8) };
    }
}
