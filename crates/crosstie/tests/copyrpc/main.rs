//! copyrpc through its public interface. Its cases between two participants are in the program `copyrpc_peers`.

mod failure;
mod many_endpoints;
mod polls;
mod service;

use crosstie::copyrpc::{Context, Endpoint, EndpointConfig};
use crosstie::device::ConnectConfig;

/// Connects a new endpoint of each context with the other one. The death of a peer is detected within milliseconds.
fn connect_endpoints<A, B>(
    left: &Context<A>,
    right: &Context<B>,
    config: &EndpointConfig,
) -> (Endpoint<A>, Endpoint<B>) {
    let (here, there) = (left.create_endpoint(config).unwrap(), right.create_endpoint(config).unwrap());
    let hasty = ConnectConfig { timeout: 8, retry_count: 1, ..ConnectConfig::default() };
    here.connect(&there.address(), &hasty).unwrap();
    there.connect(&here.address(), &hasty).unwrap();
    (here, there)
}
