//! `bench ipc`: [`crosstie::ipc`] as a [`Transport`].

use crosstie::ipc::{Config, Counters};

use super::Arguments;
use crate::wait::Wait;

super::shared_memory_rpc::shared_memory_rpc!(ipc);

fn config(plan: &Arguments, wait: Wait) -> Config {
    Config {
        max_clients: plan.clients,
        queue_depth: plan.queue_depth,
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
    ]
}
