//! What a connection begins with.

use std::sync::Arc;

use crosstie_protocol::rails::Mask;

use super::agreement::Agreement;
use super::context::Context;
use super::endpoint::Endpoint;
use super::mailbox::Mailbox;

/// What a handshake produces.
pub(super) struct Parts {
    pub(super) context: Arc<Context>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) agreed: Agreement,
    pub(super) endpoints: Vec<Endpoint>,
    /// Receiver: the rails that the sender will use at first.
    pub(super) first_mask: Mask,
}
