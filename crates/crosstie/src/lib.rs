//! Communication by remote memory access.
pub mod bootstrap;
pub mod device;
