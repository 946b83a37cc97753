//! Memory of one owner, registered in place.

use core::any::Any;
use core::fmt;
use core::mem::MaybeUninit;
use core::time::Duration;

use zerocopy::{FromBytes, IntoBytes};

use super::kept;
use crate::device::{Access, DeviceError, Mr, Pd};

/// An owner of memory that a device can access while the owner is kept, unused, somewhere else.
///
/// It is implemented for `Vec<T>` and `Box<[T]>` of types that consist of plain bytes: integers, floating-point numbers, arrays
/// of them, and types that derive `zerocopy`'s `FromBytes` and `IntoBytes`. Implement it for your own owners, for example a
/// mapped file.
///
/// # Safety
///
/// - The bytes stay at the same address and valid for reads and writes until the owner is dropped or its methods are called,
///   also when the owner is moved, and nobody else accesses them.
/// - All bytes are initialised. Any value of the bytes is a valid value of the owner.
pub unsafe trait StableMemory: Send + 'static {
    /// The bytes.
    fn bytes(&mut self) -> *mut [u8];
}

// SAFETY: a vector's elements are on the heap, are not moved with it, and belong to it alone. `IntoBytes`: no padding, so all
// bytes are initialised; `FromBytes`: any bytes are valid.
unsafe impl<T: FromBytes + IntoBytes + Send + 'static> StableMemory for Vec<T> {
    fn bytes(&mut self) -> *mut [u8] {
        core::ptr::slice_from_raw_parts_mut(self.as_mut_ptr().cast(), size_of_val(self.as_slice()))
    }
}

// SAFETY: as for `Vec`.
unsafe impl<T: FromBytes + IntoBytes + Send + 'static> StableMemory for Box<[T]> {
    fn bytes(&mut self) -> *mut [u8] {
        core::ptr::slice_from_raw_parts_mut(self.as_mut_ptr().cast(), size_of_val::<[T]>(self))
    }
}

// SAFETY: the bytes of the owner inside, which a move of the box does not even move.
unsafe impl<M: StableMemory> StableMemory for Box<M> {
    fn bytes(&mut self) -> *mut [u8] {
        (**self).bytes()
    }
}

/// Memory that is registered in place, and its owner.
///
/// While it exists, requests and peers may access the memory as `access` allows; the program copies bytes in and out with
/// [`Mr::write`] and [`Mr::read`] of [`OwnedRegion::mr`]. [`OwnedRegion::into_memory`] gives the owner back.
///
/// Dropping it deregisters and frees the memory. If a peer is inside an operation on it, the drop waits up to 100 ms; then the
/// memory is kept until the peer has left, see [`kept_memory`](super::kept_memory).
pub struct OwnedRegion<M: Send + 'static> {
    /// `None` only while it is given back or dropped.
    mr: Option<Mr>,
    /// `MaybeUninit`, because moving an owner such as `Box` says that no other pointer to its memory is used. It is initialised
    /// as long as `mr` is there.
    memory: MaybeUninit<M>,
}

impl<M: StableMemory> OwnedRegion<M> {
    /// Registers the memory of `memory` in place. The error hands it back.
    pub fn register(pd: &Pd, memory: M, access: Access) -> Result<OwnedRegion<M>, RegisterError<M>> {
        kept::free_kept();
        let mut memory = MaybeUninit::new(memory);
        // SAFETY: initialised in the line above.
        let bytes = unsafe { memory.assume_init_mut() }.bytes();
        // SAFETY: the owner promises that the bytes are valid and that nobody else accesses them (`StableMemory`). The owner
        // is used again only in `into_memory` and in the drop, after the region was deregistered.
        match unsafe { pd.register(bytes.cast(), bytes.len(), access) } {
            Ok(mr) => Ok(OwnedRegion { mr: Some(mr), memory }),
            // SAFETY: initialised above, and the memory was not registered.
            Err(error) => Err(RegisterError { memory: unsafe { memory.assume_init() }, error }),
        }
    }
}

impl<M: Send + 'static> OwnedRegion<M> {
    /// Joins a region that is registered in place with the owner of its memory.
    pub(super) fn from_parts(mr: Mr, memory: M) -> OwnedRegion<M> {
        OwnedRegion { mr: Some(mr), memory: MaybeUninit::new(memory) }
    }

    /// Turns the owner into another type, for example into a trait object.
    pub(crate) fn map_owner<N: Send + 'static>(mut self, wrap: impl FnOnce(M) -> N) -> OwnedRegion<N> {
        let Some(mr) = self.mr.take() else {
            unreachable!("the region is taken out only by those who consume it")
        };
        // SAFETY: initialised, because `mr` was there; `mr` is taken out, so nobody reads it again.
        let memory = wrap(unsafe { self.memory.assume_init_read() });
        OwnedRegion { mr: Some(mr), memory: MaybeUninit::new(memory) }
    }

    /// The region.
    #[inline]
    pub fn mr(&self) -> &Mr {
        match &self.mr {
            Some(mr) => mr,
            None => unreachable!("the region is taken out only by those who consume it"),
        }
    }

    /// Deregisters the memory and gives it back. From then on no request and no peer accesses it; requests that name it and
    /// have not been executed fail.
    ///
    /// If a peer is inside an operation on it and does not leave within `timeout`, the error hands the region back. It is closed
    /// to new operations by then. This can happen on the software device only.
    pub fn into_memory(mut self, timeout: Duration) -> Result<M, StillInUse<M>> {
        kept::free_kept();
        let Some(mr) = self.mr.take() else { unreachable!("the region is taken out only here") };
        match mr.deregister(timeout) {
            // SAFETY: initialised, because `mr` was there; `mr` is taken out, so nobody reads it again.
            Ok(()) => Ok(unsafe { self.memory.assume_init_read() }),
            Err(error) => {
                self.mr = Some(error.region);
                Err(StillInUse { region: Box::new(self), process: error.process })
            }
        }
    }
}

impl OwnedRegion<Box<dyn Any + Send>> {
    /// Whether the owner has this type.
    pub(crate) fn memory_is<M: 'static>(&self) -> bool {
        // SAFETY: initialised as long as `self` is not consumed. The type is read, not the memory.
        unsafe { self.memory.assume_init_ref() }.is::<M>()
    }
}

// SAFETY: through a shared reference only the region can be used, which is `Sync`, and the type of the owner can be asked for. The
// owner itself is reached by those who have the `OwnedRegion`.
unsafe impl<M: Send + 'static> Sync for OwnedRegion<M> {}

impl<M: Send + 'static> Drop for OwnedRegion<M> {
    fn drop(&mut self) {
        if let Some(mr) = self.mr.take() {
            // SAFETY: initialised, because `mr` was there; `mr` is taken out, so nobody reads it again.
            kept::free_memory(mr, unsafe { self.memory.assume_init_read() });
        }
    }
}

impl<M: Send + 'static> fmt::Debug for OwnedRegion<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedRegion").field("mr", &self.mr).finish_non_exhaustive()
    }
}

/// Memory could not be registered.
#[derive(thiserror::Error)]
#[error("memory cannot be registered: {error}")]
pub struct RegisterError<M> {
    /// The memory.
    pub memory: M,
    /// The cause.
    #[source]
    pub error: DeviceError,
}

impl<M> fmt::Debug for RegisterError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterError").field("error", &self.error).finish_non_exhaustive()
    }
}

/// Memory could not be given back in time, see [`OwnedRegion::into_memory`].
#[derive(thiserror::Error)]
#[error(
    "a peer{} is inside an operation and may still access the memory; it may be stopped: let it continue, or end it",
    process.map_or(String::new(), |process| format!(" in process {process}"))
)]
pub struct StillInUse<M: Send + 'static> {
    /// The region. No new operation of a peer reaches it.
    pub region: Box<OwnedRegion<M>>,
    /// The peer's process, if it is known.
    pub process: Option<u32>,
}

impl<M: Send + 'static> fmt::Debug for StillInUse<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StillInUse").field("process", &self.process).finish_non_exhaustive()
    }
}
