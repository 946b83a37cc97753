//! Names of the shared-memory services that a node offers. Both the node and its clients build them from the node's name.

/// The ipc service of a daemon for 8-byte keys.
pub(crate) fn words(node: &str, daemon: u32) -> String {
    format!("{node}.d{daemon}")
}

/// The ipc service of a daemon for byte strings.
pub(crate) fn bytes(node: &str, daemon: u32) -> String {
    format!("{node}.l{daemon}")
}

/// The delegation ring of a daemon.
pub(crate) fn ring(node: &str, daemon: u32) -> String {
    format!("{node}.r{daemon}")
}
