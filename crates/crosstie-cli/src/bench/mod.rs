//! `crosstie bench NAME`: one measurement each.

mod arena;
pub(crate) mod copyrpc;
pub(crate) mod cores;
pub(crate) mod device;
pub(crate) mod kv;
mod limits;
mod meeting;
pub(crate) mod node;
mod patience;
pub(crate) mod plan;
mod progress;
pub(crate) mod report;
mod sides;

/// Whether this process is the other side of a benchmark that its parent runs.
pub(crate) fn is_child() -> bool {
    std::env::var_os(arena::VARIABLE).is_some() || std::env::var_os(kv::CHILD).is_some()
}
