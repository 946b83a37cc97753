//! NCCL's side: one table of C functions per version of the interface. `net.rs` has what the versions share, and each version's file
//! what it has of its own; `functions.rs` has the functions.

mod functions;
mod net;
pub mod v10;
pub mod v11;
pub mod v12;

use core::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crosstie::rails::{Cause, RequestError, SetupError};
pub use net::{Name, Net, Properties, Version, VirtualDevice};

use crate::key::Kind;
use crate::log::warning;
use crate::settings::SettingError;

/// A comm, a request or another object that the plugin makes: a key, see [the plugin's promises](crate#promises).
pub type Handle = *mut c_void;

/// Length of NCCL's buffer for a listener's handle.
pub const HANDLE_LEN: usize = 128;

/// Memory of the host.
pub const PTR_HOST: c_int = 1;
/// Memory of a GPU.
pub const PTR_CUDA: c_int = 2;
/// Memory of a GPU that is registered by a DMA-BUF file descriptor.
pub const PTR_DMABUF: c_int = 4;

/// `trafficClass` if the user chose none.
pub const TRAFFIC_CLASS_UNDEFINED: c_int = -1;

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[allow(missing_docs)]
pub enum NcclResult {
    Success = 0,
    CudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
}

/// Options of a communicator.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CommConfig {
    /// Traffic class, or -1.
    pub traffic_class: c_int,
}

/// What NCCL says about the traffic of a communicator, from version 11 on. The plugin does not use it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Attributes {
    /// Peers and flows of sends and of receives.
    pub peers: [i32; 8],
    /// Operation, algorithm and protocol.
    pub operation: [u32; 3],
}

const _: () = assert!(size_of::<Attributes>() == 44);

/// Why a call failed. The text goes to NCCL's log, the code to NCCL.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("the argument {0} is NULL")]
    Null(&'static str),
    #[error("{0:?}: no such object; it was closed, or never existed")]
    InvalidKey(Kind),
    #[error("{0:?}: the object is unusable since a panic")]
    Poisoned(Kind),
    #[error("{what:?}: there are {limit} already, which is the limit")]
    TooMany { what: Kind, limit: usize },
    #[error("device {0} does not exist")]
    NoSuchDevice(c_int),
    #[error("{0}")]
    Argument(&'static str),
    #[error("{0}")]
    Unsupported(&'static str),
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error(transparent)]
    Device(#[from] crosstie::device::DeviceError),
    #[error("{0}")]
    Request(#[from] RequestError),
    #[error("deregistering memory: {0}")]
    Deregister(String),
    #[error("a panic; please report it: {0}")]
    Panic(String),
}

impl Fault {
    fn code(&self) -> NcclResult {
        match self {
            Fault::Null(_) | Fault::InvalidKey(_) | Fault::NoSuchDevice(_) | Fault::Argument(_) => {
                NcclResult::InvalidArgument
            }
            Fault::Setting(_) | Fault::TooMany { .. } | Fault::Unsupported(_) => NcclResult::InvalidUsage,
            Fault::Poisoned(_) | Fault::Panic(_) => NcclResult::InternalError,
            Fault::Setup(SetupError::Refused(_) | SetupError::Handshake(_)) => NcclResult::RemoteError,
            Fault::Setup(SetupError::BadHandle) => NcclResult::InvalidArgument,
            Fault::Setup(_) | Fault::Device(_) | Fault::Deregister(_) => NcclResult::SystemError,
            Fault::Request(RequestError::Ended(cause)) => match cause {
                Cause::AllRailsDown | Cause::TooManyReplays | Cause::Aborted => NcclResult::SystemError,
                _ => NcclResult::RemoteError,
            },
            Fault::Request(_) => NcclResult::InvalidArgument,
        }
    }
}

/// Runs the body of a C function: its fault becomes a line in the log and a result code, and so does a panic.
#[inline]
pub(crate) fn run(what: &'static str, body: impl FnOnce() -> Result<(), Fault>) -> c_int {
    let fault = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return NcclResult::Success as c_int,
        Ok(Err(fault)) => fault,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            // Dropping the payload could panic again.
            core::mem::forget(panic);
            Fault::Panic(text.unwrap_or_default())
        }
    };
    report(what, &fault)
}

#[cold]
fn report(what: &'static str, fault: &Fault) -> c_int {
    // The logger is NCCL's; a panic while the line is made must not cross either.
    catch_unwind(AssertUnwindSafe(|| warning!("{what}: {fault}"))).ok();
    fault.code() as c_int
}

/// The location that a pointer argument names, for writing a result.
#[inline]
pub(crate) fn output<T>(ptr: *mut T, name: &'static str) -> Result<Output<T>, Fault> {
    if ptr.is_null() || !ptr.is_aligned() {
        return Err(Fault::Null(name));
    }
    Ok(Output(ptr))
}

/// See [`output`].
pub(crate) struct Output<T>(*mut T);

impl<T> Output<T> {
    #[inline]
    pub(crate) fn set(&self, value: T) {
        // SAFETY: NCCL passes a location of this type that it owns until the call returns; NULL was refused.
        unsafe { self.0.write(value) };
    }
}

/// A copy of an array argument's element.
#[inline]
pub(crate) fn element<T: Copy>(array: *const T, index: usize, name: &'static str) -> Result<T, Fault> {
    if array.is_null() {
        return Err(Fault::Null(name));
    }
    // SAFETY: NCCL passes an array with as many elements as it says; `index` is below that.
    Ok(unsafe { array.add(index).read() })
}

/// `void**` arguments for results of the device-offload interface, which the plugin does not offer.
pub(crate) fn clear_device_handle(ptr: *mut *mut c_void) {
    if !ptr.is_null() {
        // SAFETY: as in `Output::set`.
        unsafe { ptr.write(core::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_and_faults_become_result_codes() {
        assert_eq!(run("test", || Ok(())), 0);
        assert_eq!(run("test", || panic!("on purpose")), NcclResult::InternalError as c_int);
        assert_eq!(run("test", || Err(Fault::Null("x"))), NcclResult::InvalidArgument as c_int);
        let gone = Fault::Request(RequestError::Ended(Cause::PeerGone));
        assert_eq!(run("test", || Err(gone)), NcclResult::RemoteError as c_int);
    }
}
