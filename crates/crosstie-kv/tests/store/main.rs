//! The store through its public interface: clients and nodes, in one process and in several.
//!
//! What counts descriptors, memory or the allocations of all threads runs in a process of its own.

mod budget;
mod clients;
#[path = "../cluster/mod.rs"]
mod cluster;
mod flood;
mod footprint;
mod idle;
mod memory;
mod nodes;
mod processes;
mod readme;
mod stopped_node;
mod versions;

use cluster::process::serve;
use crosstie_testkit::allocations::Counting;
use crosstie_testkit::child;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Plays the role that a test gave to its child process. Does nothing in an ordinary run.
#[test]
fn child_process_entry() {
    let Some(role) = child::task() else { return };
    match &role.split(' ').collect::<Vec<_>>()[..] {
        ["node", name, rank, backend, addresses] => serve(name, rank.parse().unwrap(), backend, addresses),
        ["alone", name] => clients::serve_alone(name),
        ["exercise", name, owner, count] => {
            processes::make_requests(name, owner.parse().unwrap(), count.parse().unwrap());
        }
        ["load", name] => processes::load(name),
        ["idle"] => processes::idle(),
        _ => panic!("{role}"),
    }
}
