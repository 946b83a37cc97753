//! Work requests and the memory that they name.

use core::marker::PhantomData;

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Mr;

bitflags! {
    /// The operations that a region or a queue pair allows.
    ///
    /// Reading local memory needs no right. Remote writes and atomics also need [`Access::LOCAL_WRITE`], as in verbs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// The device may write here for the owner: receives, READ results, atomic results.
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
    /// All rights.
    pub const ALL: Access = Access::all();
}

/// A scatter/gather entry: a range of a local region. Created by [`Mr::sge`], which checks the bounds.
///
/// It borrows the region, so that the region cannot be dropped before the request is posted.
#[derive(Clone, Copy, Debug)]
pub struct Sge<'mr> {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) lkey: u32,
    pub(crate) pd: u32,
    pub(crate) access: Access,
    pub(crate) region: PhantomData<&'mr Mr>,
}

impl Sge<'static> {
    /// An entry without its borrow, for [`RcQp::post_detached`](super::RcQp::post_detached), which checks the key again; or for
    /// a region that the caller knows to be alive.
    #[inline]
    pub(crate) fn detached(addr: u64, len: u32, lkey: u32, pd: u32, access: Access) -> Sge<'static> {
        Sge { addr, len, lkey, pd, access, region: PhantomData }
    }
}

impl Sge<'_> {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the length is zero.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// An address in a peer's memory and the key of its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Address in the peer's address space, as its region reports it.
    pub addr: u64,
    /// Key of the peer's region.
    pub rkey: u32,
}

/// A region of a peer, in a form that can be sent to the processes that will use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RemoteMemory {
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Its rkey.
    pub rkey: u32,
    /// Zero.
    pub reserved: u32,
}

impl RemoteMemory {
    /// The address `offset` bytes into the region. The target checks the bounds: a request with a wrong offset ends with
    /// [`Status::RemoteAccess`](super::Status::RemoteAccess).
    #[inline]
    pub fn at(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.addr.wrapping_add(offset), rkey: self.rkey }
    }
}

/// The source of a send request's bytes, or the destination of a READ's.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Copied while posting; the caller can reuse the slice when the post returns. At most
    /// [`QpConfig::max_inline`](super::QpConfig::max_inline) bytes; not for READ and atomics.
    Inline(&'a [u8]),
    /// The same in two pieces: a message with its header in front of it. Both together are at most `max_inline` bytes.
    InlineHead {
        /// The first 16 bytes, in memory order.
        head: [u64; 2],
        /// The bytes behind them.
        bytes: &'a [u8],
    },
    /// Ranges of local regions, in order. The program must not reuse them before the completion.
    Regions(&'a [Sge<'a>]),
}

impl Data<'_> {
    /// Length of the message in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        match self {
            Data::Inline(bytes) => bytes.len() as u64,
            Data::InlineHead { head, bytes } => (size_of_val(head) + bytes.len()) as u64,
            Data::Regions(sges) => sges.iter().map(|sge| u64::from(sge.len)).sum(),
        }
    }

    /// Whether the message is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The operation of a send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Sends into the peer's next receive.
    Send,
    /// Sends into the peer's next receive, with an immediate for its completion.
    SendImm(u32),
    /// Writes into the peer's memory. The peer gets no completion.
    Write(RemoteAddr),
    /// Writes into the peer's memory, then completes the peer's next receive with the immediate and the byte count.
    WriteImm(RemoteAddr, u32),
    /// Reads from the peer's memory.
    Read(RemoteAddr),
    /// If the 8 bytes at the address equal `compare`, replaces them by `swap`. Returns the former value.
    CompareSwap {
        /// The address; a multiple of 8.
        remote: RemoteAddr,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds `add` to the 8 bytes at the address. Returns the former value.
    FetchAdd {
        /// The address; a multiple of 8.
        remote: RemoteAddr,
        /// Addend, wrapping.
        add: u64,
    },
}

/// When the success of a send request produces a completion. Failure always does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Signal {
    /// Never.
    #[default]
    OnFailure,
    /// If the request was [queued](Posted::Queued): for programs that look at what the post returns.
    IfQueued,
    /// Always.
    Always,
}

impl From<bool> for Signal {
    /// [`Signal::Always`], if it is true.
    #[inline]
    fn from(is_signaled: bool) -> Signal {
        if is_signaled { Signal::Always } else { Signal::OnFailure }
    }
}

/// What has become of a request that was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The device has executed it, with success. It has no completion, and takes no place in the send queue. Its memory can be used again.
    Done,
    /// It is in the send queue. It completes as its [`Signal`] says.
    Queued,
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
    /// Returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// Its bytes.
    pub data: Data<'a>,
    /// Whether success produces a completion. A completion also gives back the places of the unsignaled
    /// requests before it, see [`QpConfig::max_send_wr`](super::QpConfig::max_send_wr).
    pub signal: Signal,
    /// Whether to wait for earlier READs and atomics of this queue pair before starting.
    pub fence: bool,
    /// Whether the bytes need not be in a cache afterwards. A hint: a device whose processor copies may write past the caches, others
    /// ignore it. It pays off for transfers that are larger than a cache.
    pub streaming: bool,
}

impl<'a> SendWr<'a> {
    /// An unsignaled request.
    #[inline]
    pub fn new(wr_id: u64, op: SendOp, data: Data<'a>) -> Self {
        SendWr { wr_id, op, data, signal: Signal::OnFailure, fence: false, streaming: false }
    }

    /// Makes the request signaled: success produces a completion.
    #[inline]
    pub fn signaled(mut self) -> Self {
        self.signal = Signal::Always;
        self
    }

    /// Makes success produce a completion if the device does not execute the request while it is posted, see [`Posted`].
    #[inline]
    pub fn signaled_if_queued(mut self) -> Self {
        self.signal = Signal::IfQueued;
        self
    }

    /// Makes the request wait for earlier READs and atomics of its queue pair.
    #[inline]
    pub fn fenced(mut self) -> Self {
        self.fence = true;
        self
    }

    /// Says that the bytes need not be in a cache afterwards, see [`SendWr::streaming`].
    #[inline]
    pub fn streaming(mut self) -> Self {
        self.streaming = true;
        self
    }
}

/// A request for a receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Where the bytes of a SEND go, in order. May be empty for receives that only WRITE+IMM consumes.
    pub sges: &'a [Sge<'a>],
}
