//! NCCL's header, as far as all versions of the interface share it: constants, result codes and structures.

use core::ffi::{c_int, c_void};

/// A comm, a request or another object that the plugin makes: a key, see [the plugin's promises](crate#promises).
pub type Handle = *mut c_void;

/// Length of NCCL's buffer for a listener's handle.
pub const HANDLE_LEN: usize = 128;

/// Memory of the host.
pub const PTR_HOST: c_int = 1;
/// Memory of a GPU.
pub const PTR_CUDA: c_int = 2;
/// Memory of a GPU that is registered by a DMA-BUF file descriptor.
pub const PTR_DMABUF: c_int = 4;

/// `trafficClass` if the user chose none.
pub const TRAFFIC_CLASS_UNDEFINED: c_int = -1;

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[allow(missing_docs)]
pub enum NcclResult {
    Success = 0,
    CudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
}

/// Options of a communicator.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CommConfig {
    /// Traffic class, or -1.
    pub traffic_class: c_int,
}

/// What NCCL says about the traffic of a communicator, from version 11 on. The plugin does not use it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Attributes {
    /// Peers and flows of sends and of receives.
    pub peers: [i32; 8],
    /// Operation, algorithm and protocol.
    pub operation: [u32; 3],
}

const _: () = assert!(size_of::<Attributes>() == 44);
