//! Who gets the response to a request that a daemon has sent on.

use crosstie::{delegation, flux, ipc};

/// Who gets the response to a call to another node.
pub(super) enum CallOrigin {
    /// A client that wrote the request into the delegation ring.
    Ring(delegation::Ticket),
    /// A client of this daemon.
    Client(ipc::Ticket),
    /// Another daemon of this node, which forwarded the request.
    Daemon(flux::Ticket),
    /// A client of this daemon; the request is for a byte string.
    BytesClient(ipc::Ticket),
}
