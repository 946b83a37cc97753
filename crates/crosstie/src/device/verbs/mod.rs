//! RDMA devices through rdma-core.
