//! Version 10 of NCCL's network interface.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;

use super::{CommConfig, Handle, Net, Properties, Version, VirtualDevice, functions};
use crate::log::Logger;

/// Version 10.
#[derive(Debug)]
pub enum V10 {}

impl Version for V10 {
    type Devices = [c_int; 4];
    type MoreProperties = ();
    const MORE_PROPERTIES: () = ();
    type Init = unsafe extern "C" fn(Option<Logger>, *mut c_void) -> c_int;
    const INIT: Self::Init = functions::init;
    type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut Handle) -> c_int;
    const LISTEN: Self::Listen = functions::listen;
    type Connect =
        unsafe extern "C" fn(c_int, *const CommConfig, *mut c_void, *mut Handle, *mut *mut c_void) -> c_int;
    const CONNECT: Self::Connect = functions::connect;
    type MoreFunctions = ();
    const MORE_FUNCTIONS: () = ();
}

/// The symbol that NCCL looks for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v10: Net<V10> = Net::new();

const _: () = {
    assert!(size_of::<VirtualDevice<[c_int; 4]>>() == 20);
    assert!(offset_of!(Properties<V10>, max_p2p_bytes) == 88);
    assert!(size_of::<Properties<V10>>() == 104);
    assert!(size_of::<Net<V10>>() == 20 * 8);
};
