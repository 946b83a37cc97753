//! A distributed key-value store in memory.
//!
//! A *node* is one process of a cluster, one per rank. Its *daemons* are threads that own one *shard* each; a key belongs to
//! one shard of one node, see [`placement`]. *Clients*, threads of the node or processes beside it, send the requests for
//! their own node's shards to the daemon that owns the shard, and all others to a daemon that passes them on.
//!
//! Start with [`node`] and [`client`].

#![forbid(unsafe_code)]

pub mod client;
pub mod long;
pub mod message;
pub mod node;
pub mod placement;
pub mod store;
