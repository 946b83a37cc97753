//! The two ways in which a client's request reaches another node.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// How requests for keys of other nodes travel. All nodes of a cluster use the same backend.
///
/// The cargo feature `serde` serializes it as `"meta"` and `"delegation"`; the feature `clap` makes it an argument with these
/// values.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    TryFromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[repr(u8)]
pub enum Backend {
    /// The client's daemon forwards the request to the daemon that owns the connection with that node.
    Meta = 1,
    /// The client writes the request into the ring of daemon 0, which owns the connections with all nodes.
    #[default]
    Delegation = 2,
}

impl Backend {
    /// Its name in text for people: `Meta` or `Delegation`.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Meta => "Meta",
            Backend::Delegation => "Delegation",
        }
    }

    /// Its name on the command line and in JSON: `meta` or `delegation`.
    pub fn as_str(self) -> &'static str {
        match self {
            Backend::Meta => "meta",
            Backend::Delegation => "delegation",
        }
    }

    /// The daemon, of `daemons`, that owns the connection with the node `rank`.
    #[inline]
    pub fn connection_owner(self, rank: u32, daemons: u32) -> u32 {
        match self {
            Backend::Meta => rank % daemons,
            Backend::Delegation => 0,
        }
    }

    /// Whether clients write requests for other nodes into the ring of daemon 0. A cluster of one node has no ring.
    pub(crate) fn uses_ring(self, nodes: u32) -> bool {
        self == Backend::Delegation && nodes > 1
    }
}
