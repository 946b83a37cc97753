//! What a node tells a client that attaches.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crate::Backend;

/// The description of a node: the value of the response to [`BytesOp::Info`](super::BytesOp::Info).
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct NodeInfo {
    /// [`NodeInfo::VERSION`]. A client of another version must not continue.
    pub version: u32,
    /// The node's rank.
    pub rank: u32,
    /// Nodes of the cluster.
    pub nodes: u32,
    /// Daemons of each node.
    pub daemons: u32,
    /// The most requests that a client may have in flight at one daemon.
    pub queue_depth: u32,
    /// The most clients that may be attached at a time.
    pub max_clients: u32,
    /// [`MAX_KEY`](super::MAX_KEY) of that node.
    pub max_key: u32,
    /// [`MAX_VALUE`](super::MAX_VALUE) of that node.
    pub max_value: u32,
    /// Identifies this start of the node: it differs from one start to the next.
    pub incarnation: u64,
    /// Bytes that each shard of the node may allocate.
    pub memory_limit: u64,
    /// How requests for other nodes travel.
    pub backend: Backend,
    /// Zero.
    pub reserved: [u8; 3],
    /// How many clients have requested this before. A client uses it to choose its home daemon, so that clients are spread over the
    /// daemons in turn.
    pub attach_count: u32,
}

impl NodeInfo {
    /// Changes whenever a client of the version before could no longer talk to a node of this one.
    pub const VERSION: u32 = 3;

    /// Decodes the value of a response. `None` if it is invalid or of another version.
    pub fn decode(value: &[u8]) -> Option<NodeInfo> {
        NodeInfo::try_read_from_bytes(value).ok().filter(|info| info.version == NodeInfo::VERSION)
    }
}

const _: () = assert!(size_of::<NodeInfo>() == 56);
