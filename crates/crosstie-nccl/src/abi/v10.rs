//! Version 10 of NCCL's network interface.

use core::ffi::{c_char, c_float, c_int, c_void};

use super::functions::{self, Handle};
use super::{CommConfig, NAME, output, run};
use crate::log::Logger;
use crate::network;

/// The devices that a virtual device consists of.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct VirtualDevice {
    /// How many.
    pub count: c_int,
    /// Their numbers.
    pub devices: [c_int; 4],
}

/// What NCCL wants to know about a device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Properties {
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
    pub virtual_device: VirtualDevice,
    /// Limit on bytes of a message of point-to-point operations.
    pub max_p2p_bytes: usize,
    /// Limit on bytes of a message of collective operations.
    pub max_coll_bytes: usize,
}

/// The table of functions. The documentation of NCCL's header describes them.
#[allow(missing_docs)]
#[derive(Debug)]
#[repr(C)]
pub struct Table {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(Option<Logger>, *mut c_void) -> c_int,
    pub devices: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub get_properties: unsafe extern "C" fn(c_int, *mut Properties) -> c_int,
    pub listen: unsafe extern "C" fn(c_int, *mut c_void, *mut Handle) -> c_int,
    pub connect:
        unsafe extern "C" fn(c_int, *const CommConfig, *mut c_void, *mut Handle, *mut *mut c_void) -> c_int,
    pub accept: unsafe extern "C" fn(Handle, *mut Handle, *mut *mut c_void) -> c_int,
    pub reg_mr: unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, *mut Handle) -> c_int,
    pub reg_mr_dma_buf:
        unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, u64, c_int, *mut Handle) -> c_int,
    pub dereg_mr: unsafe extern "C" fn(Handle, Handle) -> c_int,
    pub isend:
        unsafe extern "C" fn(Handle, *mut c_void, usize, c_int, Handle, *mut c_void, *mut Handle) -> c_int,
    #[allow(clippy::type_complexity)]
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
    pub make_virtual_device: unsafe extern "C" fn(*mut c_int, *const VirtualDevice) -> c_int,
}

// SAFETY: the table is never changed.
unsafe impl Sync for Table {}

/// The symbol that NCCL looks for.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclNetPlugin_v10: Table = Table {
    name: NAME.as_ptr(),
    init,
    devices: functions::devices,
    get_properties,
    listen,
    connect,
    accept: functions::accept,
    reg_mr: functions::reg_mr,
    reg_mr_dma_buf: functions::reg_mr_dma_buf,
    dereg_mr: functions::dereg_mr,
    isend: functions::isend,
    irecv: functions::irecv,
    iflush: functions::iflush,
    test: functions::test,
    close_send: functions::close_send,
    close_recv: functions::close_recv,
    close_listen: functions::close_listen,
    get_device_mr: functions::get_device_mr,
    irecv_consumed: functions::irecv_consumed,
    make_virtual_device,
};

unsafe extern "C" fn init(logger: Option<Logger>, _profiler: *mut c_void) -> c_int {
    run("init", || network::init(logger))
}

unsafe extern "C" fn listen(device: c_int, handle: *mut c_void, comm: *mut Handle) -> c_int {
    functions::listen(None, device, handle, comm)
}

unsafe extern "C" fn connect(
    device: c_int,
    config: *const CommConfig,
    handle: *mut c_void,
    comm: *mut Handle,
    device_comm: *mut *mut c_void,
) -> c_int {
    // SAFETY: NCCL passes NULL or a valid configuration.
    let config = unsafe { config.as_ref() }.copied();
    functions::connect(None, device, config, handle, comm, device_comm)
}

unsafe extern "C" fn get_properties(device: c_int, to: *mut Properties) -> c_int {
    run("getProperties", || {
        let to = output(to, "props")?;
        let device = network::device(device)?;
        let mut devices = [0; 4];
        let members = device.members();
        for (to, from) in devices.iter_mut().zip(members) {
            *to = *from;
        }
        to.set(Properties {
            name: device.name().as_ptr(),
            pci_path: device.pci_path().map_or(core::ptr::null(), |path| path.as_ptr()),
            guid: device.guid(),
            ptr_support: device.ptr_support(),
            reg_is_global: 0,
            force_flush: 0,
            speed: device.speed(),
            port: device.port(),
            latency: device.latency(),
            max_comms: network::MAX_COMMS as c_int,
            max_recvs: functions::MAX_RECVS as c_int,
            net_device_type: 0,
            net_device_version: 0,
            virtual_device: VirtualDevice { count: members.len() as c_int, devices },
            max_p2p_bytes: device.max_bytes(),
            max_coll_bytes: device.max_bytes(),
        });
        Ok(())
    })
}

unsafe extern "C" fn make_virtual_device(device: *mut c_int, members: *const VirtualDevice) -> c_int {
    run("makeVDevice", || {
        let device = output(device, "d")?;
        let members = super::element(members, 0, "props")?;
        let count = usize::try_from(members.count).unwrap_or(usize::MAX);
        let members = members.devices.get(..count).ok_or(super::Fault::Argument("too many devices"))?;
        device.set(network::make_virtual_device(members)?);
        Ok(())
    })
}

const _: () = {
    assert!(size_of::<Table>() == 20 * 8);
    assert!(size_of::<Properties>() == 104);
    assert!(core::mem::offset_of!(Properties, ptr_support) == 24);
    assert!(core::mem::offset_of!(Properties, latency) == 44);
    assert!(core::mem::offset_of!(Properties, max_recvs) == 52);
    assert!(core::mem::offset_of!(Properties, virtual_device) == 64);
    assert!(size_of::<VirtualDevice>() == 20);
    assert!(core::mem::offset_of!(Properties, max_p2p_bytes) == 88);
    assert!(core::mem::offset_of!(Table, isend) == 10 * 8);
    assert!(core::mem::offset_of!(Table, make_virtual_device) == 19 * 8);
};
