//! NCCL's side: one table of C functions per version of the interface. `net.rs` has what the versions share, and each version's file
//! what it has of its own; `functions.rs` has the functions.

mod functions;
mod net;
pub mod v10;
pub mod v11;
pub mod v12;

use core::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use crate::header::*;
pub use net::{Name, Net, Properties, Version, VirtualDevice};

use crate::fault::Fault;
use crate::log::warning;

/// Runs the body of a C function: its fault becomes a line in the log and a result code, and so does a panic.
#[inline]
fn run(what: &'static str, body: impl FnOnce() -> Result<(), Fault>) -> c_int {
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
fn output<T>(ptr: *mut T, name: &'static str) -> Result<Output<T>, Fault> {
    if ptr.is_null() || !ptr.is_aligned() {
        return Err(Fault::Null(name));
    }
    Ok(Output(ptr))
}

/// See [`output`].
struct Output<T>(*mut T);

impl<T> Output<T> {
    #[inline]
    fn set(&self, value: T) {
        // SAFETY: NCCL passes a location of this type that it owns until the call returns; NULL was refused.
        unsafe { self.0.write(value) };
    }
}

/// A copy of an array argument's element.
#[inline]
fn element<T: Copy>(array: *const T, index: usize, name: &'static str) -> Result<T, Fault> {
    if array.is_null() {
        return Err(Fault::Null(name));
    }
    // SAFETY: NCCL passes an array with as many elements as it says; `index` is below that.
    Ok(unsafe { array.add(index).read() })
}

/// `void**` arguments for results of the device-offload interface, which the plugin does not offer.
fn clear_device_handle(ptr: *mut *mut c_void) {
    if !ptr.is_null() {
        // SAFETY: as in `Output::set`.
        unsafe { ptr.write(core::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use crosstie::rails::{Cause, RequestError};

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
