//! copyrpc through its public interface. Its cases between two participants are in the program `copyrpc_peers`.

mod failure;
mod many_connections;
mod polls;
mod service;

use crosstie::copyrpc::{Connection, ConnectionConfig, Context};
use crosstie::device::ConnectConfig;

/// Connects a new connection of each context with the other one. The death of a peer is detected within milliseconds.
fn connect_pair<A, B>(
    left: &Context<A>,
    right: &Context<B>,
    config: &ConnectionConfig,
) -> (Connection<A>, Connection<B>) {
    let (here, there) = (left.create_connection(config).unwrap(), right.create_connection(config).unwrap());
    let hasty = ConnectConfig { timeout: 8, retry_count: 1, ..ConnectConfig::default() };
    here.connect(&there.address(), &hasty).unwrap();
    there.connect(&here.address(), &hasty).unwrap();
    (here, there)
}
