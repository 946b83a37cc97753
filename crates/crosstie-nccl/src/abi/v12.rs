//! Version 12 of NCCL's network interface. New against version 11: up to eight devices per virtual device, rail and plane in the
//! properties.

use core::ffi::c_int;
use core::mem::offset_of;

use super::v11::V11;
use super::{Net, Properties, Version, VirtualDevice};

/// Version 12.
#[derive(Debug)]
pub enum V12 {}

/// The properties that version 10 does not have.
#[derive(Debug)]
#[repr(C)]
pub struct MoreProperties {
    /// Requests in one multi-request.
    pub max_multi_request_size: c_int,
    /// Rail of the device, or -1.
    pub rail_id: i16,
    /// Plane of the device, or -1.
    pub plane_id: i16,
}

impl Version for V12 {
    type Devices = [c_int; 8];
    type MoreProperties = MoreProperties;
    const MORE_PROPERTIES: MoreProperties =
        MoreProperties { max_multi_request_size: 1, rail_id: -1, plane_id: -1 };
    type Init = <V11 as Version>::Init;
    const INIT: Self::Init = V11::INIT;
    type Listen = <V11 as Version>::Listen;
    const LISTEN: Self::Listen = V11::LISTEN;
    type Connect = <V11 as Version>::Connect;
    const CONNECT: Self::Connect = V11::CONNECT;
    type MoreFunctions = <V11 as Version>::MoreFunctions;
    const MORE_FUNCTIONS: Self::MoreFunctions = V11::MORE_FUNCTIONS;
}

/// The symbol that NCCL looks for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v12: Net<V12> = Net::new();

const _: () = {
    assert!(size_of::<VirtualDevice<[c_int; 8]>>() == 36);
    assert!(offset_of!(Properties<V12>, max_p2p_bytes) == 104);
    assert!(offset_of!(Properties<V12>, more.max_multi_request_size) == 120);
    assert!(offset_of!(Properties<V12>, more.rail_id) == 124);
    assert!(size_of::<Properties<V12>>() == 128);
    assert!(offset_of!(Net<V12>, more.finalize) == 20 * 8);
    assert!(size_of::<Net<V12>>() == 22 * 8);
};
