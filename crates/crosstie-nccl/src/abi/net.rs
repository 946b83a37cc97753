//! What all versions of NCCL's network interface share: the order of the functions and of the properties.

use core::ffi::{c_char, c_float, c_int, c_void};
use core::mem::offset_of;

use crate::header::Handle;

/// What a version of the interface has of its own.
#[allow(missing_docs)]
pub trait Version: Sized + 'static {
    /// The numbers of the devices that a virtual device consists of: an array.
    type Devices: Copy + Default + AsRef<[c_int]> + AsMut<[c_int]>;
    /// Behind the properties that version 10 has. The values are the same for each device.
    type MoreProperties;
    const MORE_PROPERTIES: Self::MoreProperties;
    type Init;
    const INIT: Self::Init;
    type Listen;
    const LISTEN: Self::Listen;
    type Connect;
    const CONNECT: Self::Connect;
    /// Behind the functions that version 10 has.
    type MoreFunctions;
    const MORE_FUNCTIONS: Self::MoreFunctions;
}

/// The devices that a virtual device consists of.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct VirtualDevice<D> {
    /// How many.
    pub count: c_int,
    /// Their numbers.
    pub devices: D,
}

/// What NCCL wants to know about a device.
#[derive(Debug)]
#[repr(C)]
pub struct Properties<V: Version> {
    /// Name, for the log.
    pub name: *const c_char,
    /// Path of the PCI device in `/sys`, or NULL.
    pub pci_path: *const c_char,
    /// Identifies the chip.
    pub guid: u64,
    /// Kinds of memory.
    pub ptr_support: c_int,
    /// Whether registrations are valid for all comms.
    pub reg_is_global: c_int,
    /// Whether each receive into GPU memory must be flushed.
    pub force_flush: c_int,
    /// In Mbit/s.
    pub speed: c_int,
    /// Port.
    pub port: c_int,
    /// In microseconds.
    pub latency: c_float,
    /// Limit on comms.
    pub max_comms: c_int,
    /// Limit on buffers in one receive.
    pub max_recvs: c_int,
    /// Kind of device offload: none.
    pub net_device_type: c_int,
    /// Version of device offload.
    pub net_device_version: c_int,
    /// The devices that this one consists of.
    pub virtual_device: VirtualDevice<V::Devices>,
    /// Limit on bytes of a message of point-to-point operations.
    pub max_p2p_bytes: usize,
    /// Limit on bytes of a message of collective operations.
    pub max_coll_bytes: usize,
    /// What the version adds.
    pub more: V::MoreProperties,
}

/// The table of functions. The documentation of NCCL's header describes them.
#[allow(missing_docs, clippy::type_complexity)]
#[derive(Debug)]
#[repr(C)]
pub struct Net<V: Version> {
    pub name: Name,
    pub init: V::Init,
    pub devices: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub get_properties: unsafe extern "C" fn(c_int, *mut Properties<V>) -> c_int,
    pub listen: V::Listen,
    pub connect: V::Connect,
    pub accept: unsafe extern "C" fn(Handle, *mut Handle, *mut *mut c_void) -> c_int,
    pub reg_mr: unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, *mut Handle) -> c_int,
    pub reg_mr_dma_buf:
        unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, u64, c_int, *mut Handle) -> c_int,
    pub dereg_mr: unsafe extern "C" fn(Handle, Handle) -> c_int,
    pub isend:
        unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, Handle, *mut c_void, *mut Handle) -> c_int,
    pub irecv: unsafe extern "C" fn(
        Handle,
        c_int,
        *mut *mut c_void,
        *mut usize,
        *mut c_int,
        *mut Handle,
        *mut *mut c_void,
        *mut Handle,
    ) -> c_int,
    pub iflush:
        unsafe extern "C" fn(Handle, c_int, *mut *mut c_void, *mut c_int, *mut Handle, *mut Handle) -> c_int,
    pub test: unsafe extern "C" fn(Handle, *mut c_int, *mut c_int) -> c_int,
    pub close_send: unsafe extern "C" fn(Handle) -> c_int,
    pub close_recv: unsafe extern "C" fn(Handle) -> c_int,
    pub close_listen: unsafe extern "C" fn(Handle) -> c_int,
    pub get_device_mr: unsafe extern "C" fn(Handle, Handle, *mut *mut c_void) -> c_int,
    pub irecv_consumed: unsafe extern "C" fn(Handle, c_int, Handle) -> c_int,
    pub make_virtual_device: unsafe extern "C" fn(*mut c_int, *const VirtualDevice<V::Devices>) -> c_int,
    pub more: V::MoreFunctions,
}

/// The plugin's name: a C string.
#[derive(Debug)]
#[repr(transparent)]
pub struct Name(*const c_char);

// SAFETY: the only value points to a constant.
unsafe impl Sync for Name {}

impl Name {
    /// The name that `NCCL_NET` must have.
    pub(super) const PLUGIN: Name = Name(c"Crosstie".as_ptr());
}

impl<V: Version> Net<V> {
    /// What the layouts of all versions have in common. Each version asserts the rest.
    pub(super) const LAYOUT: () = {
        assert!(offset_of!(Properties<V>, ptr_support) == 24);
        assert!(offset_of!(Properties<V>, latency) == 44);
        assert!(offset_of!(Properties<V>, max_recvs) == 52);
        assert!(offset_of!(Properties<V>, virtual_device) == 64);
        assert!(size_of::<V::Init>() == 8 && size_of::<V::Listen>() == 8 && size_of::<V::Connect>() == 8);
        assert!(offset_of!(Net<V>, isend) == 10 * 8);
        assert!(offset_of!(Net<V>, make_virtual_device) == 19 * 8);
    };
}
