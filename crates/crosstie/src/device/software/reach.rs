//! A peer's memory during one operation: finding it, and copying to and from it.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::datapath::{Trouble, both};
use super::layout::{IN_PLACE, PeerLine, RegionKey};
use super::link::Link;
use super::recv::{Piece, RECV_ACCESS};
use crate::device::{Access, Data, Status};
use crate::memory::copy::copy;
use crate::ring::fence;

/// Marks us as being inside an operation on a peer's segment, so that nothing there goes away under us.
pub(super) struct Inside<'a> {
    busy: &'a AtomicU64,
}

impl<'a> Inside<'a> {
    #[inline]
    pub(super) fn enter(line: &'a PeerLine) -> Inside<'a> {
        let busy = &line.busy;
        busy.store(busy.load(Relaxed).wrapping_add(1) | 1, Relaxed);
        // Store of `busy` before the loads that follow: whoever takes something away stores that, then passes a heavy
        // barrier, then looks at `busy` (`Inner::quiesce`).
        fence::light();
        Inside { busy }
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release, partner: the Acquire loads in `Inner::quiesce`. All our accesses are over.
        self.busy.store(self.busy.load(Relaxed).wrapping_add(1), Release);
    }
}

/// Memory of a peer, checked.
#[derive(Clone, Copy)]
pub(super) enum Place {
    /// Mapped here.
    Direct(*mut u8),
    /// Registered in place by another process.
    InPlace { addr: u64, key: u32 },
}

impl Place {
    /// The place `offset` bytes further on, inside what was checked.
    pub(super) fn at(self, offset: usize) -> Place {
        match self {
            Place::Direct(at) => Place::Direct(at.wrapping_add(offset)),
            Place::InPlace { addr, key } => Place::InPlace { addr: addr.wrapping_add(offset as u64), key },
        }
    }
}

/// The memory side of a peer, for one operation.
pub(super) struct Target<'a> {
    pub(super) link: &'a Link,
    pub(super) pd: u32,
}

impl Target<'_> {
    /// The place that a key and an address name, if they do and it allows `access`. `None` otherwise.
    #[inline(always)]
    fn region(&self, key: u32, addr: u64, len: u32, access: Access) -> Option<Place> {
        let entry = &self.link.regions[RegionKey::from_bits(key).index() as usize];
        // Acquire, partner: the Release store in `Pd::enter`.
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
            IN_PLACE if self.link.pid.is_none() => {
                Some(Place::Direct(core::ptr::with_exposed_provenance_mut(addr as usize)))
            }
            IN_PLACE => Some(Place::InPlace { addr, key }),
            start => {
                let at = self.link.segment.bytes(start.checked_add(offset)?, len.into())?;
                Some(Place::Direct(at.as_ptr()))
            }
        }
    }

    /// The place of a WRITE or READ.
    #[inline(always)]
    pub(super) fn remote(&self, key: u32, addr: u64, len: u32, access: Access) -> Result<Place, Trouble> {
        if len == 0 {
            // As on a NIC, nothing is looked at.
            return Ok(Place::Direct(core::ptr::dangling_mut()));
        }
        self.region(key, addr, len, access).ok_or(both(Status::RemoteAccess))
    }

    /// The place of an atomic.
    pub(super) fn atomic(&self, key: u32, addr: u64) -> Result<Place, Trouble> {
        if !addr.is_multiple_of(8) {
            return Err(both(Status::RemoteInvalidRequest));
        }
        match self.region(key, addr, 8, Access::REMOTE_ATOMIC) {
            Some(Place::Direct(at)) if !at.cast::<u64>().is_aligned() => {
                Err(both(Status::RemoteInvalidRequest))
            }
            Some(place) => Ok(place),
            None => Err(both(Status::RemoteAccess)),
        }
    }

    /// Copies `len` bytes from local memory.
    ///
    /// # Safety
    ///
    /// `from..from + len` is valid for reads and `to` was checked for `len` bytes.
    #[inline(always)]
    unsafe fn copy_to(&self, to: Place, from: *const u8, len: usize) -> Result<(), Status> {
        match to {
            // SAFETY: the caller's promise. Overlap (a loop to the same memory) yields some mixture, as on a NIC.
            Place::Direct(to) => unsafe { copy(from, to, len) },
            // SAFETY: the caller's promise; the memory is only read.
            Place::InPlace { addr, key } => unsafe {
                self.link.copy_in_place(true, key, addr, from.cast_mut(), len)?;
            },
        }
        Ok(())
    }

    /// Writes a request's data.
    #[inline(always)]
    pub(super) fn put(&self, to: Place, data: &Data<'_>) -> Result<(), Trouble> {
        match data {
            // SAFETY: the slice is readable; the place was checked for the whole message.
            Data::Inline(bytes) => unsafe { self.copy_to(to, bytes.as_ptr(), bytes.len()) }.map_err(both),
            Data::Regions(sges) => {
                let mut offset = 0;
                for sge in *sges {
                    let from = core::ptr::with_exposed_provenance(sge.addr as usize);
                    // SAFETY: the piece is inside a live region; the place was checked for the whole message.
                    unsafe { self.copy_to(to.at(offset), from, sge.len as usize) }.map_err(both)?;
                    offset += sge.len as usize;
                }
                Ok(())
            }
        }
    }

    /// Reads into a request's data.
    pub(super) fn get(&self, from: Place, data: &Data<'_>) -> Result<(), Trouble> {
        let Data::Regions(sges) = data else { return Ok(()) };
        let mut offset = 0;
        for sge in *sges {
            let to = core::ptr::with_exposed_provenance_mut::<u8>(sge.addr as usize);
            match from.at(offset) {
                // SAFETY: the piece is inside a live region with local write access; the place was checked.
                Place::Direct(from) => unsafe { copy(from, to, sge.len as usize) },
                // SAFETY: as above.
                Place::InPlace { addr, key } => unsafe {
                    self.link.copy_in_place(false, key, addr, to, sge.len as usize).map_err(both)?;
                },
            }
            offset += sge.len as usize;
        }
        Ok(())
    }

    /// Spreads `head` and then a request's data over the pieces of a receive. The status is the receiver's.
    pub(super) fn scatter(
        &self,
        mut pieces: impl Iterator<Item = Piece>,
        head: &[u8],
        data: &Data<'_>,
    ) -> Result<(), Status> {
        let mut room: Option<(Place, usize)> = None;
        let mut put = |mut from: *const u8, mut len: usize| -> Result<(), Status> {
            while len > 0 {
                let (place, left) = match room.take() {
                    Some((place, left)) if left > 0 => (place, left),
                    _ => {
                        let piece = pieces.next().ok_or(Status::LocalLength)?;
                        let place = self
                            .region(piece.lkey, piece.addr, piece.len, RECV_ACCESS)
                            .ok_or(Status::LocalProtection)?;
                        (place, piece.len as usize)
                    }
                };
                let now = len.min(left);
                // SAFETY: `from` is inside the source; the place was checked for `left` bytes.
                unsafe { self.copy_to(place, from, now)? };
                room = Some((place.at(now), left - now));
                from = from.wrapping_add(now);
                len -= now;
            }
            Ok(())
        };
        put(head.as_ptr(), head.len())?;
        match data {
            Data::Inline(bytes) => put(bytes.as_ptr(), bytes.len()),
            Data::Regions(sges) => sges.iter().try_for_each(|sge| {
                put(core::ptr::with_exposed_provenance(sge.addr as usize), sge.len as usize)
            }),
        }
    }
}

/// Puts the former value where an atomic's data goes.
pub(super) fn bring(data: &Data<'_>, former: u64) {
    if let Data::Regions([sge, ..]) = data {
        let to = core::ptr::with_exposed_provenance_mut(sge.addr as usize);
        // SAFETY: the piece is 8 bytes (checked when posted) of a live region with local write access.
        unsafe { copy(former.to_ne_bytes().as_ptr(), to, 8) };
    }
}
