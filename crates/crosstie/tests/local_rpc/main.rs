//! `ipc` and `delegation` through their public interface: in one process, between processes, and with processes of another user.

#![allow(clippy::duplicate_mod, reason = "`both` is compiled once for each of the two")]

mod deadlines;
mod delegation;
mod ipc;
#[path = "../local_service/mod.rs"]
mod local_service;
mod other_user;
mod processes;
