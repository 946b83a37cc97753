//! Why a request could not be executed now, and errors of the device.

use std::io;

use crate::device::{DeviceError, Status};

/// The outcome of an attempt to execute a request that did not succeed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ExecuteError {
    /// The peer's queue pair is not ready for this connection. The request is retried until its deadline.
    PeerNotReady,
    /// The peer has no receive posted (RNR). The request is retried after the peer's timer, given as its verbs code.
    ReceiverNotReady(u8),
    /// The peer has not polled the completions of earlier requests. The request is retried without limit.
    LaneFull,
    /// The request failed. If `notify_peer`, the peer's queue pair has to go to ERR too, and the peer must be told.
    Failed { status: Status, notify_peer: bool },
}

impl ExecuteError {
    /// A failure that takes only the requester's queue pair to ERR.
    pub(super) fn local(status: Status) -> ExecuteError {
        ExecuteError::Failed { status, notify_peer: false }
    }

    /// A failure that takes both queue pairs to ERR, as it does on a NIC.
    pub(super) fn both_ends(status: Status) -> ExecuteError {
        ExecuteError::Failed { status, notify_peer: true }
    }
}

/// Turns an I/O error into a [`DeviceError`]; `what` says what was tried.
pub(super) fn os(what: &'static str) -> impl Fn(io::Error) -> DeviceError {
    move |source| DeviceError::Os { what, source }
}

/// Checks a requested size against a limit.
pub(super) fn check_limit(what: &'static str, asked: u32, limit: u32) -> Result<(), DeviceError> {
    if asked > limit {
        return Err(DeviceError::Limit { what, asked: asked.into(), limit: limit.into() });
    }
    Ok(())
}
