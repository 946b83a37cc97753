//! The C functions that are the same in all versions of the interface.

use core::ffi::{c_int, c_void};

use super::{Fault, HANDLE_LEN, clear_device_handle, element, output, run};
use crate::key::Key;
use crate::{comm, memory, network, request};

pub(crate) type Handle = *mut c_void;

/// The most buffers in one receive.
pub(crate) const MAX_RECVS: usize = 8;

pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> c_int {
    run("devices", || {
        output(count, "ndev")?.set(network::device_count() as c_int);
        Ok(())
    })
}

/// `listen`, without a context.
pub(crate) fn listen(context: Option<Key>, device: c_int, handle: *mut c_void, comm: *mut Handle) -> c_int {
    run("listen", || {
        let (to, comm) = (output(handle.cast::<[u8; HANDLE_LEN]>(), "handle")?, output(comm, "listenComm")?);
        let (key, bytes) = comm::listen(device, network::traffic_class(context, None)?)?;
        to.set(bytes);
        comm.set(key.to_ptr());
        Ok(())
    })
}

/// `connect`: sets the comm to NULL when it is to be called again.
pub(crate) fn connect(
    context: Option<Key>,
    device: c_int,
    config: Option<super::CommConfig>,
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
        let connected = comm::connect(context, device, class, &mut bytes);
        // The state of the attempt is kept there: NCCL passes the same buffer again.
        buffer.set(bytes);
        if let Some(key) = connected? {
            comm.set(key.to_ptr());
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn accept(
    listen_comm: Handle,
    comm: *mut Handle,
    device_comm: *mut *mut c_void,
) -> c_int {
    run("accept", || {
        let comm = output(comm, "recvComm")?;
        comm.set(core::ptr::null_mut());
        clear_device_handle(device_comm);
        if let Some(key) = comm::accept(Key::from_ptr(listen_comm))? {
            comm.set(key.to_ptr());
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn reg_mr(
    comm: Handle,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    handle: *mut Handle,
) -> c_int {
    run("regMr", || {
        let handle = output(handle, "mhandle")?;
        handle.set(core::ptr::null_mut());
        handle.set(memory::register(Key::from_ptr(comm), data.cast(), size, kind)?.to_ptr());
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn reg_mr_dma_buf(
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
        let key = memory::register_dma_buf(Key::from_ptr(comm), data.addr() as u64, size, kind, offset, fd)?;
        handle.set(key.to_ptr());
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn dereg_mr(comm: Handle, handle: Handle) -> c_int {
    run("deregMr", || memory::deregister(Key::from_ptr(comm), Key::from_ptr(handle)))
}

pub(crate) unsafe extern "C" fn isend(
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
pub(crate) unsafe extern "C" fn irecv(
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
        let comm = Key::from_ptr(comm);
        let received = if count == 1 {
            request::irecv_single(comm, &buffer(0)?)?
        } else {
            request::irecv(comm, &(0..count).map(buffer).collect::<Result<Vec<_>, _>>()?)?
        };
        if let Some(key) = received {
            request.set(key.to_ptr());
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn iflush(
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

pub(crate) unsafe extern "C" fn test(request: Handle, done: *mut c_int, sizes: *mut c_int) -> c_int {
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

pub(crate) unsafe extern "C" fn close_send(comm: Handle) -> c_int {
    run("closeSend", || comm::close_send(Key::from_ptr(comm)))
}

pub(crate) unsafe extern "C" fn close_recv(comm: Handle) -> c_int {
    run("closeRecv", || comm::close_recv(Key::from_ptr(comm)))
}

pub(crate) unsafe extern "C" fn close_listen(comm: Handle) -> c_int {
    run("closeListen", || comm::close_listen(Key::from_ptr(comm)))
}

pub(crate) unsafe extern "C" fn get_device_mr(
    _comm: Handle,
    _memory: Handle,
    _to: *mut *mut c_void,
) -> c_int {
    run("getDeviceMr", || Err(Fault::Unsupported("network functions on the GPU are not offered")))
}

/// NCCL calls this after each receive if the function is there. It matters to device offload only.
pub(crate) unsafe extern "C" fn irecv_consumed(_comm: Handle, _count: c_int, _request: Handle) -> c_int {
    run("irecvConsumed", || Ok(()))
}
