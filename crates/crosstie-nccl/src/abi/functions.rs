//! The C functions, and the table of them. A comment says which version a function is for, if there are others for other versions.

use core::ffi::{c_int, c_void};

use super::{Attributes, CommConfig, HANDLE_LEN, Handle, Name, Net, Properties, Version, VirtualDevice};
use super::{clear_device_handle, element, output, run};
use crate::fault::Fault;
use crate::key::Key;
use crate::log::Logger;
use crate::{network, registration, request, setup};

impl<V: Version> Net<V> {
    /// The table of a version.
    pub(super) const fn new() -> Net<V> {
        let () = Self::LAYOUT;
        Net {
            name: Name::PLUGIN,
            init: V::INIT,
            devices,
            get_properties: get_properties::<V>,
            listen: V::LISTEN,
            connect: V::CONNECT,
            accept,
            reg_mr,
            reg_mr_dma_buf,
            dereg_mr,
            isend,
            irecv,
            iflush,
            test,
            close_send,
            close_recv,
            close_listen,
            get_device_mr,
            irecv_consumed,
            make_virtual_device: make_virtual_device::<V>,
            more: V::MORE_FUNCTIONS,
        }
    }
}

/// The most buffers in one receive.
const MAX_RECVS: usize = 8;

unsafe extern "C" fn devices(count: *mut c_int) -> c_int {
    run("devices", || {
        output(count, "ndev")?.set(network::device_count() as c_int);
        Ok(())
    })
}

/// `init` of version 10.
pub(super) unsafe extern "C" fn init(logger: Option<Logger>, _profiler: *mut c_void) -> c_int {
    run("init", || network::init(logger))
}

/// `init` of version 11 on: for each communicator.
pub(super) unsafe extern "C" fn init_context(
    context: *mut Handle,
    communicator: u64,
    config: *const CommConfig,
    logger: Option<Logger>,
    _profiler: *mut c_void,
) -> c_int {
    run("init", || {
        let context = output(context, "ctx")?;
        // SAFETY: NCCL passes NULL or a valid configuration.
        let config = unsafe { config.as_ref() }.copied();
        context.set(network::init_context(logger, communicator, config)?.to_ptr());
        Ok(())
    })
}

pub(super) unsafe extern "C" fn finalize(context: Handle) -> c_int {
    run("finalize", || {
        let context = Key::from_ptr(context);
        network::finalize(context)?;
        setup::forget_connects_of(context);
        Ok(())
    })
}

pub(super) unsafe extern "C" fn set_net_attr(_context: Handle, _attributes: *const Attributes) -> c_int {
    run("setNetAttr", || Ok(()))
}

unsafe extern "C" fn get_properties<V: Version>(device: c_int, to: *mut Properties<V>) -> c_int {
    run("getProperties", || {
        let to = output(to, "props")?;
        let device = network::device(device)?;
        let (mut devices, members) = (V::Devices::default(), device.members());
        for (to, from) in devices.as_mut().iter_mut().zip(members) {
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
            max_recvs: MAX_RECVS as c_int,
            net_device_type: 0,
            net_device_version: 0,
            virtual_device: VirtualDevice { count: members.len() as c_int, devices },
            max_p2p_bytes: device.max_bytes(),
            max_coll_bytes: device.max_bytes(),
            more: V::MORE_PROPERTIES,
        });
        Ok(())
    })
}

unsafe extern "C" fn make_virtual_device<V: Version>(
    device: *mut c_int,
    members: *const VirtualDevice<V::Devices>,
) -> c_int {
    run("makeVDevice", || {
        let device = output(device, "d")?;
        let VirtualDevice { count, devices } = element(members, 0, "props")?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let members = devices.as_ref().get(..count).ok_or(Fault::Argument("too many devices"))?;
        device.set(network::make_virtual_device(members)?);
        Ok(())
    })
}

/// `listen` of version 10.
pub(super) unsafe extern "C" fn listen(device: c_int, handle: *mut c_void, comm: *mut Handle) -> c_int {
    run_listen(None, device, handle, comm)
}

/// `listen` of version 11 on.
pub(super) unsafe extern "C" fn listen_in_context(
    context: Handle,
    device: c_int,
    handle: *mut c_void,
    comm: *mut Handle,
) -> c_int {
    run_listen(Some(Key::from_ptr(context)), device, handle, comm)
}

fn run_listen(context: Option<Key>, device: c_int, handle: *mut c_void, comm: *mut Handle) -> c_int {
    run("listen", || {
        let (to, comm) = (output(handle.cast::<[u8; HANDLE_LEN]>(), "handle")?, output(comm, "listenComm")?);
        let (key, bytes) = setup::listen(device, network::traffic_class(context, None)?)?;
        to.set(bytes);
        comm.set(key.to_ptr());
        Ok(())
    })
}

/// `connect` of version 10.
pub(super) unsafe extern "C" fn connect(
    device: c_int,
    config: *const CommConfig,
    handle: *mut c_void,
    comm: *mut Handle,
    device_comm: *mut *mut c_void,
) -> c_int {
    // SAFETY: NCCL passes NULL or a valid configuration.
    let config = unsafe { config.as_ref() }.copied();
    run_connect(None, device, config, handle, comm, device_comm)
}

/// `connect` of version 11 on.
pub(super) unsafe extern "C" fn connect_in_context(
    context: Handle,
    device: c_int,
    handle: *mut c_void,
    comm: *mut Handle,
    device_comm: *mut *mut c_void,
) -> c_int {
    run_connect(Some(Key::from_ptr(context)), device, None, handle, comm, device_comm)
}

/// Sets the comm to NULL when `connect` is to be called again.
fn run_connect(
    context: Option<Key>,
    device: c_int,
    config: Option<CommConfig>,
    handle: *mut c_void,
    comm: *mut Handle,
    device_comm: *mut *mut c_void,
) -> c_int {
    run("connect", || {
        let (buffer, comm) =
            (output(handle.cast::<[u8; HANDLE_LEN]>(), "handle")?, output(comm, "sendComm")?);
        comm.set(core::ptr::null_mut());
        clear_device_handle(device_comm);
        let class = network::traffic_class(context, config)?;
        let mut bytes = element(handle.cast::<[u8; HANDLE_LEN]>(), 0, "handle")?;
        let connected = setup::connect(context, device, class, &mut bytes);
        // The state of the attempt is kept there: NCCL passes the same buffer again.
        buffer.set(bytes);
        if let Some(key) = connected? {
            comm.set(key.to_ptr());
        }
        Ok(())
    })
}

unsafe extern "C" fn accept(listen_comm: Handle, comm: *mut Handle, device_comm: *mut *mut c_void) -> c_int {
    run("accept", || {
        let comm = output(comm, "recvComm")?;
        comm.set(core::ptr::null_mut());
        clear_device_handle(device_comm);
        if let Some(key) = setup::accept(Key::from_ptr(listen_comm))? {
            comm.set(key.to_ptr());
        }
        Ok(())
    })
}

unsafe extern "C" fn reg_mr(
    comm: Handle,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    handle: *mut Handle,
) -> c_int {
    run("regMr", || {
        let handle = output(handle, "mhandle")?;
        handle.set(core::ptr::null_mut());
        handle.set(registration::register(Key::from_ptr(comm), data.cast(), size, kind)?.to_ptr());
        Ok(())
    })
}

unsafe extern "C" fn reg_mr_dma_buf(
    comm: Handle,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    handle: *mut Handle,
) -> c_int {
    run("regMrDmaBuf", || {
        let handle = output(handle, "mhandle")?;
        handle.set(core::ptr::null_mut());
        let key =
            registration::register_dma_buf(Key::from_ptr(comm), data.addr() as u64, size, kind, offset, fd)?;
        handle.set(key.to_ptr());
        Ok(())
    })
}

unsafe extern "C" fn dereg_mr(comm: Handle, handle: Handle) -> c_int {
    run("deregMr", || registration::deregister(Key::from_ptr(comm), Key::from_ptr(handle)))
}

unsafe extern "C" fn isend(
    comm: Handle,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    memory: Handle,
    _profiler: *mut c_void,
    request: *mut Handle,
) -> c_int {
    run("isend", || {
        let request = output(request, "request")?;
        request.set(core::ptr::null_mut());
        let buffer = request::Buffer { data: data.addr(), size, tag, memory: Key::from_ptr(memory) };
        if let Some(key) = request::isend(Key::from_ptr(comm), &buffer)? {
            request.set(key.to_ptr());
        }
        Ok(())
    })
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn irecv(
    comm: Handle,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    memory: *mut Handle,
    _profiler: *mut *mut c_void,
    request: *mut Handle,
) -> c_int {
    run("irecv", || {
        let request = output(request, "request")?;
        // NCCL may have left a value of its own there (0x1: the completion is optional).
        request.set(core::ptr::null_mut());
        let count = usize::try_from(count).unwrap_or(0);
        if !(1..=MAX_RECVS).contains(&count) {
            return Err(Fault::Argument("a receive has 1 to 8 buffers"));
        }
        let buffer = |index| -> Result<request::Buffer, Fault> {
            Ok(request::Buffer {
                data: element(data, index, "data")?.addr(),
                size: element(sizes, index, "sizes")?,
                tag: element(tags, index, "tags")?,
                memory: Key::from_ptr(element(memory, index, "mhandles")?),
            })
        };
        let others = (1..count).map(buffer).collect::<Result<Vec<_>, _>>()?;
        if let Some(key) = request::irecv(Key::from_ptr(comm), &buffer(0)?, &others)? {
            request.set(key.to_ptr());
        }
        Ok(())
    })
}

unsafe extern "C" fn iflush(
    comm: Handle,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    memory: *mut Handle,
    request: *mut Handle,
) -> c_int {
    run("iflush", || {
        let request = output(request, "request")?;
        request.set(core::ptr::null_mut());
        let count = usize::try_from(count).unwrap_or(0);
        if !(1..=MAX_RECVS).contains(&count) {
            return Err(Fault::Argument("a receive has 1 to 8 buffers"));
        }
        let mut last = None;
        for index in 0..count {
            let size = usize::try_from(element(sizes, index, "sizes")?).unwrap_or(0);
            if size > 0 {
                last = Some(request::Buffer {
                    data: element(data, index, "data")?.addr(),
                    size,
                    tag: 0,
                    memory: Key::from_ptr(element(memory, index, "mhandles")?),
                });
            }
        }
        if let Some(key) = request::iflush(Key::from_ptr(comm), last.as_ref())? {
            request.set(key.to_ptr());
        }
        Ok(())
    })
}

unsafe extern "C" fn test(request: Handle, done: *mut c_int, sizes: *mut c_int) -> c_int {
    run("test", || {
        let done = output(done, "done")?;
        done.set(0);
        let is_done = request::test(Key::from_ptr(request), |received| {
            for (index, size) in received.iter().enumerate() {
                if !sizes.is_null() {
                    // SAFETY: if NCCL wants sizes, it passes an array with one element for each buffer of the request.
                    unsafe { sizes.add(index).write(c_int::try_from(*size).unwrap_or(c_int::MAX)) };
                }
            }
        })?;
        if is_done {
            done.set(1);
        }
        Ok(())
    })
}

unsafe extern "C" fn close_send(comm: Handle) -> c_int {
    run("closeSend", || setup::close_send(Key::from_ptr(comm)))
}

unsafe extern "C" fn close_recv(comm: Handle) -> c_int {
    run("closeRecv", || setup::close_recv(Key::from_ptr(comm)))
}

unsafe extern "C" fn close_listen(comm: Handle) -> c_int {
    run("closeListen", || setup::close_listen(Key::from_ptr(comm)))
}

unsafe extern "C" fn get_device_mr(_comm: Handle, _memory: Handle, _to: *mut *mut c_void) -> c_int {
    run("getDeviceMr", || Err(Fault::Unsupported("network functions on the GPU are not offered")))
}

/// NCCL calls this after each receive if the function is there. It matters to device offload only.
unsafe extern "C" fn irecv_consumed(_comm: Handle, _count: c_int, _request: Handle) -> c_int {
    run("irecvConsumed", || Ok(()))
}
