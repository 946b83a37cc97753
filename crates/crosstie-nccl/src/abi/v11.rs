//! Version 11 of NCCL's network interface. New against version 10: `init` makes a context for each communicator, which `listen` and
//! `connect` get; `finalize` and `setNetAttr`; one more property.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;

use super::{Attributes, CommConfig, Handle, Net, Properties, Version, VirtualDevice, functions};
use crate::log::Logger;

/// Version 11.
#[derive(Debug)]
pub enum V11 {}

/// The properties that version 10 does not have.
#[derive(Debug)]
#[repr(C)]
pub struct MoreProperties {
    /// Requests in one multi-request.
    pub max_multi_request_size: c_int,
}

/// The functions that version 10 does not have.
#[allow(missing_docs)]
#[derive(Debug)]
#[repr(C)]
pub struct MoreFunctions {
    pub finalize: unsafe extern "C" fn(Handle) -> c_int,
    pub set_net_attr: unsafe extern "C" fn(Handle, *const Attributes) -> c_int,
}

impl Version for V11 {
    type Devices = [c_int; 4];
    type MoreProperties = MoreProperties;
    const MORE_PROPERTIES: MoreProperties = MoreProperties { max_multi_request_size: 1 };
    type Init =
        unsafe extern "C" fn(*mut Handle, u64, *const CommConfig, Option<Logger>, *mut c_void) -> c_int;
    const INIT: Self::Init = functions::init_context;
    type Listen = unsafe extern "C" fn(Handle, c_int, *mut c_void, *mut Handle) -> c_int;
    const LISTEN: Self::Listen = functions::listen_in_context;
    type Connect = unsafe extern "C" fn(Handle, c_int, *mut c_void, *mut Handle, *mut *mut c_void) -> c_int;
    const CONNECT: Self::Connect = functions::connect_in_context;
    type MoreFunctions = MoreFunctions;
    const MORE_FUNCTIONS: MoreFunctions =
        MoreFunctions { finalize: functions::finalize, set_net_attr: functions::set_net_attr };
}

/// The symbol that NCCL looks for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v11: Net<V11> = Net::new();

const _: () = {
    assert!(size_of::<VirtualDevice<[c_int; 4]>>() == 20);
    assert!(offset_of!(Properties<V11>, max_p2p_bytes) == 88);
    assert!(offset_of!(Properties<V11>, more.max_multi_request_size) == 104);
    assert!(size_of::<Properties<V11>>() == 112);
    assert!(offset_of!(Net<V11>, more.finalize) == 20 * 8);
    assert!(size_of::<Net<V11>>() == 22 * 8);
};
