//! Buffers: registered memory that is lent to operations.

use core::any::Any;
use core::ops::{Bound, Range, RangeBounds};
use core::time::Duration;
use std::sync::Arc;

use crate::device::{Mr, OutOfRegion, RemoteMemory};
use crate::region::{CachedRegion, OwnedRegion};

/// A buffer: a range of a registered region, which one owner has at a time. An operation takes it and gives it back with its result.
///
/// While an operation has it, it cannot be read, written or freed, because it has been moved. There is no safe way to borrow its
/// bytes, as for [`Mr`]: a peer that knows its key may write to it at any time. [`Buffer::read`] and [`Buffer::write`] copy.
///
/// It is one pointer, because every operation moves it: to the operation, into its future, and back.
#[derive(Debug)]
pub struct Buffer(Box<RegionRange>);

/// A range of a registered region.
#[derive(Debug)]
struct RegionRange {
    region: Region,
    start: usize,
    len: usize,
}

impl Buffer {
    fn of(region: Region, start: usize, len: usize) -> Buffer {
        Buffer(Box::new(RegionRange { region, start, len }))
    }

    /// A whole region.
    pub fn new(region: Mr) -> Buffer {
        Buffer::of_shared_region(Arc::new(region))
    }

    /// A whole region that others use as well, for example a cache of registrations. A program that makes two buffers of the same
    /// memory must keep their uses apart.
    pub fn of_shared_region(region: Arc<Mr>) -> Buffer {
        let len = region.len();
        Buffer::of(Region::Allocated(region), 0, len)
    }

    /// Memory of the program, registered in place. See [`Endpoint::register`](super::Endpoint::register).
    pub(super) fn in_place(region: OwnedRegion<Box<dyn Any + Send>>) -> Buffer {
        let len = region.mr().len();
        Buffer::of(Region::InPlace(Arc::new(region)), 0, len)
    }

    /// Gives the memory back that [`Endpoint::register`](super::Endpoint::register) has registered. From then on the peer's requests to
    /// it fail.
    ///
    /// The error hands the buffer back: see [`NotGivenBack`].
    pub fn into_memory<M: 'static>(self, timeout: Duration) -> Result<M, NotGivenBack> {
        let RegionRange { region, start, len } = *self.0;
        let kept = |region, cause| NotGivenBack { buffer: Buffer::of(region, start, len), cause };
        let region = match region {
            Region::InPlace(region) => region,
            other => return Err(kept(other, KeptBecause::OtherMemory)),
        };
        if !region.memory_is::<M>() {
            return Err(kept(Region::InPlace(region), KeptBecause::OtherMemory));
        }
        let region = match Arc::try_unwrap(region) {
            Ok(region) => region,
            Err(region) => return Err(kept(Region::InPlace(region), KeptBecause::Divided)),
        };
        match region.into_memory(timeout) {
            Ok(memory) => match memory.downcast() {
                Ok(memory) => Ok(*memory),
                Err(_) => unreachable!("the type was compared above"),
            },
            Err(in_use) => {
                let cause = KeptBecause::PeerInside { process: in_use.process };
                Err(kept(Region::InPlace(Arc::new(*in_use.region)), cause))
            }
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The region that it is a range of.
    #[inline]
    pub fn region(&self) -> &Mr {
        self.0.region.mr()
    }

    /// Where it begins in its region.
    #[inline]
    pub fn start(&self) -> usize {
        self.0.start
    }

    /// Copies bytes in.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        self.region().write(self.place(offset, bytes.len())?.start, bytes)
    }

    /// Copies bytes out.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        self.region().read(self.place(offset, bytes.len())?.start, bytes)
    }

    /// Its bytes as a vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        // The range is inside the region.
        self.read(0, &mut bytes).map_or(Vec::new(), |()| bytes)
    }

    /// Divides the buffer. Both parts can be lent to different operations.
    ///
    /// # Panics
    ///
    /// If `middle` is behind the end.
    pub fn split_at(mut self, middle: usize) -> (Buffer, Buffer) {
        let RegionRange { region, start, len } = &mut *self.0;
        assert!(middle <= *len, "split at {middle} of {len} bytes");
        let second = Buffer::of(region.clone(), *start + middle, *len - middle);
        *len = middle;
        (self, second)
    }

    /// What a peer needs to READ or WRITE its bytes.
    #[inline]
    pub fn remote(&self) -> RemoteMemory {
        let region = self.region().remote();
        RemoteMemory { addr: region.addr + self.start() as u64, len: self.len() as u64, ..region }
    }

    /// Makes it a buffer that several operations may use at the same time, see [`PoolBuffer`].
    pub fn into_pool(self) -> PoolBuffer {
        PoolBuffer(Arc::new(self))
    }

    /// The range of the region for `len` bytes at `offset`.
    #[inline]
    fn place(&self, offset: usize, len: usize) -> Result<Range<usize>, OutOfRegion> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(self.start() + offset..self.start() + end),
            _ => Err(OutOfRegion { offset, len, region: self.len() }),
        }
    }
}

impl From<CachedRegion> for Buffer {
    /// The range of memory that the cached region names. Several buffers of the same memory may exist: the program keeps their uses
    /// apart.
    fn from(region: CachedRegion) -> Buffer {
        let (start, len) = (region.offset(), region.len());
        Buffer::of(Region::Cached(region), start, len)
    }
}

/// What keeps a buffer's memory registered.
#[derive(Clone, Debug)]
enum Region {
    Allocated(Arc<Mr>),
    InPlace(Arc<OwnedRegion<Box<dyn Any + Send>>>),
    Cached(CachedRegion),
}

impl Region {
    #[inline]
    fn mr(&self) -> &Mr {
        match self {
            Region::Allocated(region) => region,
            Region::InPlace(region) => region.mr(),
            Region::Cached(region) => region.mr(),
        }
    }
}

/// The memory of a buffer was not given back, see [`Buffer::into_memory`].
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct NotGivenBack {
    /// The buffer.
    pub buffer: Buffer,
    /// Why.
    pub cause: KeptBecause,
}

/// Why memory was not given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeptBecause {
    /// The buffer is not memory of this type that `register` has registered.
    #[error("the buffer is not memory of this type that was registered in place")]
    OtherMemory,
    /// Another part of the divided buffer exists.
    #[error("another part of the buffer is in use: drop it first")]
    Divided,
    /// A peer is inside an operation on it. It can be tried again.
    #[error(
        "a peer{} is inside an operation and may still access the memory; it may be stopped: let it continue, or end it",
        process.map_or(String::new(), |process| format!(" in process {process}"))
    )]
    PeerInside {
        /// The peer's process, if it is known.
        process: Option<u32>,
    },
}

/// A buffer that several operations may use at the same time: a pool of pages whose owner keeps track of its pages. Clones are the
/// same buffer. The memory is registered as long as a clone exists; operations have clones.
#[derive(Clone, Debug)]
pub struct PoolBuffer(Arc<Buffer>);

impl core::ops::Deref for PoolBuffer {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.0
    }
}

impl AsRef<Buffer> for Buffer {
    fn as_ref(&self) -> &Buffer {
        self
    }
}

impl AsRef<Buffer> for PoolBuffer {
    fn as_ref(&self) -> &Buffer {
        self
    }
}

/// A buffer of either kind.
#[derive(Debug)]
pub enum AnyBuffer {
    /// The operation has it alone.
    Owned(Buffer),
    /// Others use it as well.
    Pool(PoolBuffer),
}

impl AnyBuffer {
    #[inline]
    pub(super) fn buffer(&self) -> &Buffer {
        match self {
            AnyBuffer::Owned(buffer) => buffer,
            AnyBuffer::Pool(buffer) => buffer,
        }
    }
}

/// The range of a buffer's region that `range` of the buffer names.
#[inline]
pub(super) fn resolve(buffer: &Buffer, range: impl RangeBounds<usize>) -> Result<Range<usize>, OutOfRegion> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => buffer.len(),
    };
    match end.checked_sub(start) {
        Some(len) => buffer.place(start, len),
        None => Err(OutOfRegion { offset: start, len: 0, region: buffer.len() }),
    }
}
