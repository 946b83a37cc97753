//! Memory that several owners share, and that a device may access at the same time.

use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;

use zerocopy::{Immutable, IntoBytes};

use crate::device::OutOfRegion;
use crate::memory::copy::copy;

/// Memory that several threads share through an `Arc`, and that a device may access at the same time.
///
/// `Vec<T>` and `Box<[T]>` of types without padding can be shared for reading. [`SharedBuffer`] can be written, too.
///
/// # Safety
///
/// - The bytes stay at the same address, valid for reads and initialised, until the value is dropped.
/// - If `WRITABLE`, they are valid for writes, and no Rust reference to them exists: they are accessed only by copies that
///   allow others to access them at the same time.
/// - If not `WRITABLE`, nobody writes them.
pub unsafe trait SharedMemory: Send + Sync + 'static {
    /// Whether devices and peers may write the memory.
    const WRITABLE: bool;

    /// The bytes.
    fn bytes(&self) -> *mut [u8];
}

// SAFETY: the elements are on the heap and do not move; `Immutable`: while the vector is shared, nobody writes them;
// `IntoBytes`: all bytes are initialised.
unsafe impl<T: IntoBytes + Immutable + Send + Sync + 'static> SharedMemory for Vec<T> {
    const WRITABLE: bool = false;

    fn bytes(&self) -> *mut [u8] {
        let bytes: &[u8] = self.as_slice().as_bytes();
        core::ptr::from_ref(bytes).cast_mut()
    }
}

// SAFETY: as for `Vec`.
unsafe impl<T: IntoBytes + Immutable + Send + Sync + 'static> SharedMemory for Box<[T]> {
    const WRITABLE: bool = false;

    fn bytes(&self) -> *mut [u8] {
        core::ptr::from_ref((**self).as_bytes()).cast_mut()
    }
}

/// Page-aligned memory for bytes that threads, devices and peers write at the same time. The program copies bytes in and out.
///
/// ```
/// let pages = crosstie::region::SharedBuffer::zeroed(1 << 20);
/// pages.write(4096, b"a page").unwrap();
/// let mut bytes = [0; 6];
/// pages.read(4096, &mut bytes).unwrap();
/// assert_eq!(&bytes, b"a page");
/// ```
pub struct SharedBuffer {
    start: NonNull<u8>,
    layout: Layout,
    len: usize,
}

/// Alignment of a [`SharedBuffer`].
const PAGE: usize = 4096;

// SAFETY: the memory is not bound to a thread; it is accessed by copies that allow others to access it at the same time.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    /// Allocates `len` zeros.
    ///
    /// # Panics
    ///
    /// If `len` is more than half of the address space. If there is no memory, the program ends, as for a `Vec`.
    pub fn zeroed(len: usize) -> SharedBuffer {
        let Ok(layout) = Layout::from_size_align(len.max(1), PAGE) else {
            panic!("a buffer of {len} bytes is too long")
        };
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        SharedBuffer { start, layout, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes into the buffer. Others that access the same bytes at the same time may see any mixture of old and new.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        let to = self.checked(offset, bytes.len())?;
        // SAFETY: inside the buffer, to which there are no references.
        unsafe { copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the buffer. If others write the same bytes at the same time, the result may be any mixture.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        let from = self.checked(offset, bytes.len())?;
        // SAFETY: as in `write`, in the other direction.
        unsafe { copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn checked(&self, offset: usize, len: usize) -> Result<*mut u8, OutOfRegion> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.start.as_ptr().wrapping_add(offset)),
            _ => Err(OutOfRegion { offset, len, region: self.len }),
        }
    }
}

// SAFETY: allocated memory that does not move, initialised with zeros; `write` and `read` are the only access.
unsafe impl SharedMemory for SharedBuffer {
    const WRITABLE: bool = true;

    fn bytes(&self) -> *mut [u8] {
        core::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.len)
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}
