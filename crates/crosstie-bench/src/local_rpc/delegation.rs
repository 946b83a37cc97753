//! `bench delegation`: [`crosstie::delegation`] as a [`Transport`].

use crosstie::delegation::{Config, Counters, MAX_RING_DEPTH};

use super::Arguments;
use crate::limits::LARGE;
use crate::wait::Wait;

super::shared_memory_rpc::shared_memory_rpc!(delegation);

fn config(plan: &Arguments, wait: Wait) -> Config {
    // The ring has room for all calls in flight. For small payloads it has at least its default size.
    let in_flight = (plan.queue_depth * plan.clients).min(MAX_RING_DEPTH);
    let min_depth = if plan.payload < LARGE { Config::default().ring_depth } else { 1 };
    Config {
        max_clients: plan.clients,
        queue_depth: plan.queue_depth,
        ring_depth: in_flight.max(min_depth),
        request_limit: plan.payload,
        response_limit: plan.payload,
        wait_strategy: wait.into(),
    }
}

fn counters(counters: Counters) -> Vec<(&'static str, u64)> {
    vec![
        ("clients_arrived", counters.connects),
        ("clients_left", counters.disconnects),
        ("clients_cut_off", counters.violations),
        ("voids", counters.skipped),
        ("stale", counters.stale),
        ("nonsense", counters.invalid),
    ]
}
