//! A connection between two comms of this process, and memory to send.

use core::ffi::c_int;

use crate::net::{HANDLE_LEN, HOST, NULL, Net, Ptr, assert_ok, wait_for};

/// Both ends of a connection, driven by one thread: no call blocks.
pub(crate) struct Pair<'a> {
    pub(crate) net: &'a Net,
    pub(crate) listen: Ptr,
    pub(crate) send: Ptr,
    pub(crate) recv: Ptr,
}

pub(crate) fn listen(net: &Net, device: c_int) -> (Ptr, [u8; HANDLE_LEN]) {
    let (mut comm, mut handle) = (NULL, [0xaa; HANDLE_LEN]);
    assert_eq!(net.listen(device, handle.as_mut_ptr(), &raw mut comm), 0);
    assert!(!comm.is_null());
    (comm, handle)
}

/// Connects to a peer's handle and accepts that peer, or another one.
pub(crate) fn connect_and_accept(
    net: &Net,
    device: c_int,
    mut handle: [u8; HANDLE_LEN],
    listen: Ptr,
) -> (Ptr, Ptr) {
    let (mut send, mut recv) = (NULL, NULL);
    wait_for("connect and accept", || {
        if send.is_null() {
            assert_eq!(net.connect(device, handle.as_mut_ptr(), &raw mut send), 0);
        }
        if recv.is_null() {
            assert_eq!(net.accept(listen, &raw mut recv), 0);
        }
        (!send.is_null() && !recv.is_null()).then_some(())
    });
    (send, recv)
}

impl<'a> Pair<'a> {
    pub(crate) fn new(net: &'a Net) -> Pair<'a> {
        Pair::on_device(net, 0)
    }

    pub(crate) fn on_device(net: &'a Net, device: c_int) -> Pair<'a> {
        let (listen, handle) = listen(net, device);
        let (send, recv) = connect_and_accept(net, device, handle, listen);
        Pair { net, listen, send, recv }
    }

    /// Sends the first `len` bytes of `from` into the first `room` bytes of `to`. Both ends must report the lesser of the two.
    pub(crate) fn exchange(&self, from: &mut Buffer<'_>, len: usize, to: &mut Buffer<'_>, room: usize) {
        let received = receive(self.net, self.recv, to, &[(0, room, 3)]);
        let sent = send(self.net, self.send, from, 0, len, 3);
        let least = len.min(room);
        assert_eq!((finish(self.net, received, 1), finish(self.net, sent, 1)), (vec![least], vec![least]));
    }

    /// Closes the sending comm before the others.
    pub(crate) fn close_send(&mut self) {
        assert_eq!(self.net.close_send(core::mem::replace(&mut self.send, NULL)), 0);
    }

    /// Closes the receiving comm before the others.
    pub(crate) fn close_recv(&mut self) {
        assert_eq!(self.net.close_recv(core::mem::replace(&mut self.recv, NULL)), 0);
    }
}

/// Closes the comms that are open; each call must succeed.
impl Drop for Pair<'_> {
    fn drop(&mut self) {
        assert_ok(self.net.close_send(self.send), "closeSend");
        assert_ok(self.net.close_recv(self.recv), "closeRecv");
        assert_ok(self.net.close_listen(self.listen), "closeListen");
    }
}

/// Memory that is registered with a comm.
pub(crate) struct Buffer<'a> {
    net: &'a Net,
    comm: Ptr,
    pub(crate) bytes: Vec<u8>,
    pub(crate) key: Ptr,
}

impl<'a> Buffer<'a> {
    pub(crate) fn new(net: &'a Net, comm: Ptr, len: usize) -> Buffer<'a> {
        let mut bytes = vec![0; len];
        let mut key = NULL;
        assert_eq!(net.reg_mr(comm, bytes.as_mut_ptr(), len, HOST, &raw mut key), 0);
        assert!(!key.is_null());
        Buffer { net, comm, bytes, key }
    }

    pub(crate) fn at(&mut self, offset: usize) -> *mut u8 {
        self.bytes.as_mut_ptr().wrapping_add(offset)
    }

    /// Deregisters the memory, which must succeed, and hands it out.
    pub(crate) fn free(mut self) -> Vec<u8> {
        core::mem::take(&mut self.bytes)
    }
}

/// Deregisters the memory, which must succeed. Memory that [`Buffer::free`] has taken out stays where it is until then.
impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        assert_ok(self.net.dereg_mr(self.comm, self.key), "deregMr");
    }
}

/// Sends, or says that the receiver is not ready.
pub(crate) fn try_send(
    net: &Net,
    comm: Ptr,
    buffer: &mut Buffer<'_>,
    offset: usize,
    len: usize,
    tag: c_int,
) -> Option<Ptr> {
    let mut request = NULL;
    let rc = net.isend(comm, buffer.at(offset), len, tag, buffer.key, &raw mut request);
    assert_eq!(rc, 0);
    (!request.is_null()).then_some(request)
}

pub(crate) fn send(
    net: &Net,
    comm: Ptr,
    buffer: &mut Buffer<'_>,
    offset: usize,
    len: usize,
    tag: c_int,
) -> Ptr {
    wait_for("isend", || try_send(net, comm, buffer, offset, len, tag))
}

/// One buffer of a receive: offset, length and tag.
pub(crate) type Part = (usize, usize, c_int);

pub(crate) fn try_receive(net: &Net, comm: Ptr, buffer: &mut Buffer<'_>, parts: &[Part]) -> Option<Ptr> {
    let mut data: Vec<*mut u8> = parts.iter().map(|part| buffer.at(part.0)).collect();
    let mut sizes: Vec<usize> = parts.iter().map(|part| part.1).collect();
    let mut tags: Vec<c_int> = parts.iter().map(|part| part.2).collect();
    let mut memory = vec![buffer.key; parts.len()];
    let mut request = crate::net::OPTIONAL;
    let rc = net.irecv(
        comm,
        parts.len() as c_int,
        data.as_mut_ptr(),
        sizes.as_mut_ptr(),
        tags.as_mut_ptr(),
        memory.as_mut_ptr(),
        &raw mut request,
    );
    assert_eq!(rc, 0);
    assert_ne!(request, crate::net::OPTIONAL, "irecv left the request word as it was");
    (!request.is_null()).then_some(request)
}

pub(crate) fn receive(net: &Net, comm: Ptr, buffer: &mut Buffer<'_>, parts: &[Part]) -> Ptr {
    wait_for("irecv", || try_receive(net, comm, buffer, parts))
}

/// The sizes of a request, if it is done.
pub(crate) fn try_test(net: &Net, request: Ptr, count: usize) -> Option<Vec<usize>> {
    let (mut done, mut sizes) = (-1, [-1; 9]);
    assert_eq!(net.test(request, &raw mut done, sizes.as_mut_ptr()), 0);
    assert!(done == 0 || done == 1);
    if done == 0 {
        return None;
    }
    assert_eq!(sizes[count], -1, "test wrote more sizes than the request has buffers");
    Some(sizes[..count].iter().map(|size| usize::try_from(*size).unwrap()).collect())
}

pub(crate) fn finish(net: &Net, request: Ptr, count: usize) -> Vec<usize> {
    wait_for("test", || try_test(net, request, count))
}

/// The byte at a position of message `number`.
pub(crate) fn pattern(number: usize, at: usize) -> u8 {
    (number.wrapping_mul(131) ^ at.wrapping_mul(7) ^ (at >> 8)) as u8
}

pub(crate) fn fill(bytes: &mut [u8], number: usize) {
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(number, at));
}

pub(crate) fn check(bytes: &[u8], number: usize) {
    let wrong = bytes.iter().enumerate().find(|(at, byte)| **byte != pattern(number, *at));
    assert_eq!(wrong, None, "message {number}");
}
