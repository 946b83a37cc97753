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
    /// The client's daemon forwards the request to the daemon with the number of the one that owns the key; the two are connected.
    Meta = 1,
    /// The client writes the request into the ring of that daemon itself.
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

    /// Whether clients write requests for other nodes into rings of the daemons. A cluster of one node has none.
    pub(crate) fn uses_rings(self, nodes: u32) -> bool {
        self == Backend::Delegation && nodes > 1
    }

    /// Whether daemons forward requests to each other.
    pub(crate) fn forwards(self, nodes: u32, daemons: u32) -> bool {
        self == Backend::Meta && nodes > 1 && daemons > 1
    }
}
