//! Why a call failed.

use core::ffi::c_int;

use crosstie::device::DeviceError;
use crosstie::rails::{Cause, RequestError, SetupError};

use crate::header::NcclResult;
use crate::key::Kind;
use crate::settings::SettingError;

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
    TooMany { what: Kind, limit: u32 },
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
    Device(#[from] DeviceError),
    #[error("{0}")]
    Request(#[from] RequestError),
    #[error("deregistering memory: {0}")]
    Deregister(String),
    #[error("a panic; please report it: {0}")]
    Panic(String),
}

impl Fault {
    pub(crate) fn code(&self) -> NcclResult {
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
