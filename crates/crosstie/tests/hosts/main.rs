//! What also runs on kernel Soft-RoCE, in the virtual machines of `cargo xtask vm`: groups in one, the examples of endpoints and rails
//! between two. Elsewhere it runs on the software device.

mod endpoint_examples;
mod group;
mod rails;
