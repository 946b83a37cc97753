//! `crosstie bench NAME`: one measurement each.

mod arena;
pub(crate) mod cores;
pub(crate) mod device;
mod limits;
mod meeting;
mod patience;
mod progress;
pub(crate) mod report;
