//! The peer's queue pair as a connected sender sees it.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};
use std::sync::Arc;

use super::error::ExecuteError;
use super::in_place::PeerMappings;
use super::lane::PeerLane;
use super::layout::{ConnectionWord, KIND_RC, QpBlock, QpNum, gid_words, qp_block_at, taker_of_qp};
use super::link::Link;
use super::peer_lines::OpenLine;
use super::peer_memory::LastTarget;
use super::recv::PeerRecvQueue;
use crate::device::{Access, ConnectConfig, Status};
use crate::memory::segment::SharedRef;

/// What the sending half of an RC queue pair needs: the peer's queue pair, attached once it is ready.
///
/// It is owned by the poster, or by the progress thread while requests are deferred; never by both.
#[derive(Debug)]
pub(super) struct PeerQp {
    pub(super) link: Arc<Link>,
    pub(super) num: u32,
    pub(super) block: SharedRef<QpBlock>,
    pub(super) attached: Option<AttachedPeer>,
    pub(super) connect: ConnectConfig,
}

/// What a connected sender knows of a ready peer.
#[derive(Debug)]
pub(super) struct AttachedPeer {
    /// Our line at the peer, for this connection.
    pub(super) line: OpenLine,
    pub(super) qp: AttachedQp,
}

/// A private copy of what a ready peer's block said. Valid as long as the connection word does not change.
#[derive(Debug)]
pub(super) struct AttachedQp {
    pub(super) connection: ConnectionWord,
    pub(super) lane: PeerLane,
    pub(super) recv: PeerRecvQueue,
    pub(super) pd: u32,
    pub(super) access: Access,
    pub(super) rnr_timer: u8,
    /// Memory that the peer registered in place and that is mapped here.
    pub(super) mappings: PeerMappings,
    pub(super) last_target: LastTarget,
    /// Address that the last WRITE+IMM wrote to, for prefetching.
    pub(super) last_at: usize,
}

impl PeerQp {
    pub(super) fn new(link: &Arc<Link>, num: u32, connect: &ConnectConfig) -> Option<PeerQp> {
        let block = SharedRef::new(&link.segment, qp_block_at(QpNum::from_bits(num).index()))?;
        Some(PeerQp { link: link.clone(), num, block, attached: None, connect: *connect })
    }

    /// The epoch of the peer's connection; zero before the first attach.
    pub(super) fn epoch(&self) -> u64 {
        self.attached.as_ref().map_or(0, |attached| attached.qp.connection.epoch())
    }
}

/// Reads the block of peer queue pair `num`, which must be connected to our queue pair `own_num` of device `own_gid`, and
/// opens our line at the peer.
///
/// The block is never unmapped, so this needs no announcement. Everything that was read is valid if the connection word is
/// still the same during an operation: no other connection ever has this word.
#[cold]
pub(super) fn attach(
    link: &Link,
    block: &QpBlock,
    num: u32,
    own_gid: &[u8; 16],
    own_num: u32,
) -> Result<AttachedPeer, ExecuteError> {
    // Acquire, partner: the Release store in `RcQp::ready_to_receive`.
    let connection = ConnectionWord(block.connection.load(Acquire));
    let [low, high] = gid_words(own_gid);
    if !connection.is_ready()
        || block.qp_num.load(Relaxed) != num
        || block.kind.load(Relaxed) != KIND_RC
        || block.peer_qp.load(Relaxed) != own_num
        || block.peer_gid[0].load(Relaxed) != low
        || block.peer_gid[1].load(Relaxed) != high
    {
        return Err(ExecuteError::PeerNotReady);
    }
    let invalid = || ExecuteError::both_ends(Status::BadResponse);
    let index = block.line.load(Relaxed);
    let line = OpenLine::open(&link.lines, index, connection.tenure()).ok_or(ExecuteError::PeerNotReady)?;
    let taken = line.taken.load(Relaxed);
    let recv = PeerRecvQueue::new(&link.segment, block, taker_of_qp(num), taken).ok_or_else(invalid)?;
    let lane = PeerLane::new(&link.segment, block, num).ok_or_else(invalid)?;
    let qp = AttachedQp {
        connection,
        lane,
        recv,
        pd: block.pd.load(Relaxed),
        access: Access::from_bits_truncate(block.access.load(Relaxed)),
        rnr_timer: block.rnr_timer.load(Relaxed) as u8 & 31,
        mappings: PeerMappings::new(),
        last_target: LastTarget::none(link),
        last_at: 0,
    };
    Ok(AttachedPeer { line, qp })
}
