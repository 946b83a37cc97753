//! What is known of a request without its peer: its opcode, and whether it may be posted.

use super::error::ExecuteError;
use crate::device::{Access, Data, Opcode, PostError, QpConfig, SendOp, Status};

/// Checks the lengths and counts of a request's data; returns the total length.
#[inline]
pub(super) fn check_data(data: &Data<'_>, config: &QpConfig, max: u64) -> Result<u32, PostError> {
    let len = data.len();
    match data {
        Data::Regions(sges) if sges.len() > config.max_send_sge as usize => {
            Err(PostError::TooManySges { count: sges.len(), max: config.max_send_sge as usize })
        }
        Data::Regions(_) if len > max => Err(PostError::TooLong(len)),
        Data::Regions(_) => Ok(len as u32),
        _ if len > config.max_inline.into() => {
            Err(PostError::InlineTooLong { len: len as usize, max: config.max_inline as usize })
        }
        _ => Ok(len as u32),
    }
}

/// Whether a send queue has no room. `done` comes from completions, which a peer may have forged: it can be more than was
/// posted, and then there is room.
#[inline]
pub(super) fn is_send_queue_full(posted: u64, done: u64, max: u32) -> bool {
    posted >= done.wrapping_add(max.into())
}

#[inline]
pub(super) fn opcode(op: &SendOp) -> Opcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) => Opcode::Send,
        SendOp::Write(_) | SendOp::WriteImm(..) => Opcode::Write,
        SendOp::Read(_) => Opcode::Read,
        SendOp::CompareSwap { .. } => Opcode::CompareSwap,
        SendOp::FetchAdd { .. } => Opcode::FetchAdd,
    }
}

/// Checks protection domain and access of the local memory that a request names.
#[inline]
pub(super) fn check_local(pd: u32, op: &SendOp, data: &Data<'_>) -> Result<(), ExecuteError> {
    if let Data::Regions(sges) = data {
        let writes = matches!(op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        for sge in *sges {
            if sge.pd != pd || (writes && !sge.access.contains(Access::LOCAL_WRITE)) {
                return Err(ExecuteError::local(Status::LocalProtection));
            }
        }
    }
    Ok(())
}
