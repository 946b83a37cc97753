//! What is posted to a queue: work requests and the memory they name.

use core::marker::PhantomData;

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Mr;

bitflags! {
    /// What a region, or a queue pair, lets others do with memory.
    ///
    /// Reading local memory needs no right. Remote writes and atomics need [`Access::LOCAL_WRITE`] too, as in verbs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// The device may write here for its owner: receives, READ results, atomic results.
        const LOCAL_WRITE = 1;
        /// A peer may WRITE here.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ here.
        const REMOTE_READ = 1 << 2;
        /// A peer may compare-and-swap and fetch-and-add here.
        const REMOTE_ATOMIC = 1 << 3;
    }
}

impl Access {
    /// Every right there is.
    pub const ALL: Access = Access::all();
}

/// A piece of a local region, the unit of scatter and gather. Made by [`Mr::sge`], which checks the bounds.
///
/// It borrows the region, so a region cannot be dropped between naming its memory and posting the request.
#[derive(Clone, Copy, Debug)]
pub struct Sge<'mr> {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) lkey: u32,
    pub(crate) pd: u32,
    pub(crate) access: Access,
    pub(crate) region: PhantomData<&'mr Mr>,
}

impl Sge<'_> {
    /// Bytes in this piece.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the piece is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// An address in a peer's memory and the key that opens it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Address in the peer's address space, as its region reports it.
    pub addr: u64,
    /// Key of the peer's region.
    pub rkey: u32,
}

/// A whole region of a peer, in a form that can be sent to whoever shall use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RemoteMemory {
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Key that opens it.
    pub rkey: u32,
    /// Zero.
    pub reserved: u32,
}

impl RemoteMemory {
    /// The address `offset` bytes into the region. Bounds are the target's to check: a wrong offset ends as
    /// [`Status::RemoteAccess`](super::Status::RemoteAccess).
    #[inline]
    pub fn at(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.addr.wrapping_add(offset), rkey: self.rkey }
    }
}

/// Where the bytes of a send request come from, or where those of a READ go.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Copied while posting; the slice is the caller's again when the post returns. At most
    /// [`QpConfig::max_inline`](super::QpConfig::max_inline) bytes; not for READ and atomics.
    Inline(&'a [u8]),
    /// Pieces of local regions, in order. They belong to the device until the completion.
    Regions(&'a [Sge<'a>]),
}

/// The operation of a send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Into the peer's next receive.
    Send,
    /// Into the peer's next receive, with 32 bits for its completion.
    SendImm(u32),
    /// Into the peer's memory; the peer learns nothing of it.
    Write(RemoteAddr),
    /// Into the peer's memory; then the peer's next receive completes with the 32 bits and the byte count.
    WriteImm(RemoteAddr, u32),
    /// From the peer's memory.
    Read(RemoteAddr),
    /// If the 8 bytes at the address equal `compare`, make them `swap`; the former value comes back.
    CompareSwap {
        /// Where; a multiple of 8.
        remote: RemoteAddr,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Add `add` to the 8 bytes at the address; the former value comes back.
    FetchAdd {
        /// Where; a multiple of 8.
        remote: RemoteAddr,
        /// Addend, wrapping.
        add: u64,
    },
}

/// A request for the send queue.
///
/// ```no_run
/// # use crosstie::device::*;
/// # fn f(qp: &mut RcQp, mr: &Mr, remote: RemoteMemory) -> Result<(), Box<dyn std::error::Error>> {
/// qp.post(&SendWr::new(7, SendOp::WriteImm(remote.at(0), 42), Data::Inline(b"hello")))?;
/// qp.post(&SendWr::new(8, SendOp::Read(remote.at(64)), Data::Regions(&[mr.sge(0..64)?])).signaled())?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// With which bytes.
    pub data: Data<'a>,
    /// Whether success makes a completion. Failure always does.
    pub signaled: bool,
    /// Whether to wait for earlier READs and atomics of this queue pair before starting.
    pub fence: bool,
}

impl<'a> SendWr<'a> {
    /// An unsignaled request.
    #[inline]
    pub fn new(wr_id: u64, op: SendOp, data: Data<'a>) -> Self {
        SendWr { wr_id, op, data, signaled: false, fence: false }
    }

    /// The same with a completion on success.
    #[inline]
    pub fn signaled(mut self) -> Self {
        self.signaled = true;
        self
    }

    /// The same behind a fence.
    #[inline]
    pub fn fenced(mut self) -> Self {
        self.fence = true;
        self
    }
}

/// A request for a receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Where a SEND's bytes go, in order. Empty is right for receives that only WRITE+IMM consumes.
    pub sges: &'a [Sge<'a>],
}
