//! Endpoints when something fails: injected faults, peers that are killed or stopped, peers that violate the protocol.

use crosstie_testkit::rng;

mod faults;
mod malicious_peer;
#[path = "../endpoint/pair.rs"]
#[allow(dead_code, reason = "this program uses a part")]
mod pair;
mod processes;
