//! Endpoints when something fails: injected faults, peers that are killed or stopped, peers that violate the protocol.

mod faults;
mod malicious_peer;
mod processes;

use super::pair;
