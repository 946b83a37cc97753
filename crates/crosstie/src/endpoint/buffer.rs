//! Buffers: registered memory that is lent to operations.

use core::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

use super::batch::Batch;
use crate::device::{Mr, OutOfRegion, RemoteMemory};

/// A buffer: a range of a registered region, which one owner has at a time. An operation takes it and gives it back with its result.
///
/// While an operation has it, it cannot be read, written or freed, because it has been moved. There is no safe way to borrow its
/// bytes, as for [`Mr`]: a peer that knows its key may write to it at any time. [`Buffer::read`] and [`Buffer::write`] copy.
#[derive(Debug)]
pub struct Buffer {
    region: Arc<Mr>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// A whole region.
    pub fn new(region: Mr) -> Buffer {
        Buffer::of_shared_region(Arc::new(region))
    }

    /// A whole region that others use as well, for example a cache of registrations. Whoever makes two buffers of the same memory
    /// must keep their uses apart.
    pub fn of_shared_region(region: Arc<Mr>) -> Buffer {
        let len = region.len();
        Buffer { region, start: 0, len }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region that it is a range of.
    pub fn region(&self) -> &Arc<Mr> {
        &self.region
    }

    /// Where it begins in its region.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Copies bytes in.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        self.region.write(self.place(offset, bytes.len())?.start, bytes)
    }

    /// Copies bytes out.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        self.region.read(self.place(offset, bytes.len())?.start, bytes)
    }

    /// Its bytes as a vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // The range is inside the region.
        self.read(0, &mut bytes).map_or(Vec::new(), |()| bytes)
    }

    /// Divides the buffer. Both parts can be lent to different operations.
    ///
    /// # Panics
    ///
    /// If `middle` is behind the end.
    pub fn split_at(self, middle: usize) -> (Buffer, Buffer) {
        assert!(middle <= self.len, "split at {middle} of {} bytes", self.len);
        let second =
            Buffer { region: self.region.clone(), start: self.start + middle, len: self.len - middle };
        (Buffer { region: self.region, start: self.start, len: middle }, second)
    }

    /// What a peer needs to READ or WRITE its bytes.
    pub fn remote(&self) -> RemoteMemory {
        let region = self.region.remote();
        RemoteMemory { addr: region.addr + self.start as u64, len: self.len as u64, ..region }
    }

    /// Makes it a buffer that several operations may use at the same time, see [`SharedBuffer`].
    pub fn share(self) -> SharedBuffer {
        SharedBuffer(Arc::new(self))
    }

    /// The range of the region for `len` bytes at `offset`.
    #[inline]
    fn place(&self, offset: usize, len: usize) -> Result<Range<usize>, OutOfRegion> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.start + offset..self.start + end),
            _ => Err(OutOfRegion { offset, len, region: self.len }),
        }
    }
}

/// A buffer that several operations may use at the same time: a pool of pages whose owner keeps track of its pages. Clones are the
/// same buffer. The memory is registered as long as a clone exists; operations have clones.
#[derive(Clone, Debug)]
pub struct SharedBuffer(Arc<Buffer>);

impl core::ops::Deref for SharedBuffer {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.0
    }
}

/// What an operation keeps until the device is done with it.
#[derive(Debug)]
pub enum Stored {
    /// Nothing.
    None,
    /// A buffer.
    Owned(Buffer),
    /// A shared buffer.
    Shared(SharedBuffer),
    /// A batch with its buffers.
    Batch(Batch),
}

impl Stored {
    #[inline]
    pub(super) fn buffer(&self) -> Option<&Buffer> {
        match self {
            Stored::Owned(buffer) => Some(buffer),
            Stored::Shared(buffer) => Some(buffer),
            _ => None,
        }
    }
}

/// What can be lent to an operation: a [`Buffer`], a [`SharedBuffer`], a [`Batch`], or nothing.
pub trait Lend: sealed::Lend {}

impl<B: sealed::Lend> Lend for B {}

pub(super) mod sealed {
    use super::Stored;

    pub trait Lend: Sized {
        fn store(self) -> Stored;
        /// What `store` made, which is always of the same kind.
        fn restore(stored: Stored) -> Option<Self>;
    }
}

macro_rules! lend {
    ($kind:ty, $variant:ident) => {
        impl sealed::Lend for $kind {
            #[inline]
            fn store(self) -> Stored {
                Stored::$variant(self)
            }

            #[inline]
            fn restore(stored: Stored) -> Option<Self> {
                match stored {
                    Stored::$variant(buffer) => Some(buffer),
                    _ => None,
                }
            }
        }
    };
}
lend!(Buffer, Owned);
lend!(SharedBuffer, Shared);
lend!(Batch, Batch);

impl sealed::Lend for () {
    fn store(self) -> Stored {
        Stored::None
    }

    fn restore(_: Stored) -> Option<Self> {
        Some(())
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
        Bound::Unbounded => buffer.len,
    };
    match end.checked_sub(start) {
        Some(len) => buffer.place(start, len),
        None => Err(OutOfRegion { offset: start, len: 0, region: buffer.len }),
    }
}
