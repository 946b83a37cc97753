//! The way to a peer: its segment, mapped here, and the socket to its service.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::Pid;
use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, MAX_PAYLOAD, Reply, Request};
use super::layout::{Header, MAGIC, MAX_LINES, QPS_AT, QpBlock, QpNum, REGIONS_AT, RegionEntry, RegionKey};
use crate::device::{DeviceError, Status};
use crate::local::socket::{self, Peer};
use crate::memory::segment::{Segment, SharedRef, SharedSlice};

/// A peer device. Lasts until the peer is gone or this device is closed.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) gid: [u8; 16],
    pub(super) segment: Arc<Segment>,
    pub(super) regions: SharedSlice<RegionEntry>,
    pub(super) qps: SharedSlice<QpBlock>,
    /// The peer's process; none where it is this one.
    pub(super) pid: Option<Pid>,
    /// Tells when the peer's process ends, see [`Peer::process`].
    pub(super) process: Option<OwnedFd>,
    dead: AtomicBool,
    /// Whether the kernel refused to let us at the peer's memory, so that its service has to copy for us.
    by_proxy: AtomicBool,
    socket: Mutex<Socket>,
    /// The same socket, for watching it.
    watch: OwnedFd,
}

#[derive(Debug)]
struct Socket(OwnedFd);

impl Link {
    /// Connects device `from` to device `to`.
    pub(super) fn connect(from: [u8; 16], to: [u8; 16]) -> Result<Link, DeviceError> {
        let unreachable =
            |e: io::Error| DeviceError::Unreachable(format!("software device {}: {e}", hex(&to)));
        let socket = control::connect(&to).map_err(unreachable)?;
        let peer = Peer::of(&socket).map_err(unreachable)?;
        if !peer.is_our_user() {
            return Err(DeviceError::Refused(format!("it runs as user {}, not ours", peer.uid)));
        }
        let Some(pid) = peer.pid else {
            return Err(DeviceError::Refused("it runs in a container whose processes we cannot see".into()));
        };
        let process = peer.process().map_err(unreachable)?;
        let hello = Request { gid: from, a: MAGIC, ..Request::new(Request::HELLO) };
        socket::send(&socket, hello.as_bytes(), &[], &[]).map_err(unreachable)?;
        let mut reply = Reply::new_zeroed();
        let (_, mut files) = socket::receive(&socket, reply.as_mut_bytes(), &mut []).map_err(unreachable)?;
        match (reply.status, files.pop()) {
            (Reply::OK, Some(file)) => {
                let segment = Arc::new(Segment::open(file, reply.value).map_err(unreachable)?);
                let bad = || DeviceError::Refused("its segment makes no sense".into());
                let header: SharedRef<Header> = SharedRef::new(&segment, 0).ok_or_else(bad)?;
                if header.magic.load(Relaxed) != MAGIC || header.len.load(Relaxed) != reply.value {
                    return Err(bad());
                }
                let watch = socket.try_clone().map_err(unreachable)?;
                Ok(Link {
                    gid: to,
                    regions: SharedSlice::new(&segment, REGIONS_AT, RegionKey::INDICES as usize)
                        .ok_or_else(bad)?,
                    qps: SharedSlice::new(&segment, QPS_AT, QpNum::INDICES as usize).ok_or_else(bad)?,
                    segment,
                    pid: (!peer.is_this_process()).then_some(pid),
                    process,
                    dead: AtomicBool::new(false),
                    by_proxy: AtomicBool::new(false),
                    socket: Mutex::new(Socket(socket)),
                    watch,
                })
            }
            (Reply::OTHER_USER, _) => Err(DeviceError::Refused("it serves another user".into())),
            (Reply::OTHER_VERSION, _) => Err(DeviceError::Refused(format!(
                "it speaks version {}, we {}",
                reply.version,
                control::VERSION
            ))),
            _ => Err(DeviceError::Refused(format!("status {}", reply.status))),
        }
    }

    pub(super) fn watch(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.watch)
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    pub(super) fn mark_dead(&self) {
        self.dead.store(true, Relaxed);
    }

    /// A line of the peer's segment that is ours to write.
    pub(super) fn request_line(&self) -> Result<u32, DeviceError> {
        let reply = self.ask(&Request::new(Request::LINE), &[], &mut []);
        match reply {
            Ok(Reply { status: Reply::OK, value, .. }) if value < u64::from(MAX_LINES) => Ok(value as u32),
            Ok(_) => Err(DeviceError::Exhausted { what: "lines for datagram senders at the peer" }),
            Err(e) => Err(DeviceError::Unreachable(e.to_string())),
        }
    }

    /// Tells the peer something that needs no answer. A peer that cannot be told is dying, and its death tells all.
    pub(super) fn tell(&self, request: &Request) {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        if socket::send(&socket.0, request.as_bytes(), &[], &[]).is_err() {
            self.mark_dead();
        }
    }

    /// Copies between local memory and memory that the peer registered in place.
    ///
    /// # Safety
    ///
    /// `local..local + len` is valid for reads, and for writes if `write` is false.
    pub(super) unsafe fn copy_in_place(
        &self,
        write: bool,
        key: u32,
        addr: u64,
        local: *mut u8,
        len: usize,
    ) -> Result<(), Status> {
        let Some(pid) = self.pid else {
            let remote = core::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
            // SAFETY: the region is of this very process and registered, so its owner keeps it valid; deregistering
            // waits for us, because we are marked busy.
            unsafe {
                if write {
                    crate::memory::copy::copy(local, remote, len);
                } else {
                    crate::memory::copy::copy(remote, local, len);
                }
            }
            return Ok(());
        };
        if !self.by_proxy.load(Relaxed) {
            // SAFETY: the caller's promise; the kernel checks the remote side.
            match unsafe { process_vm(pid, write, addr, local, len) } {
                Ok(()) => return Ok(()),
                Err(libc::EPERM | libc::ENOSYS | libc::EACCES) => self.by_proxy.store(true, Relaxed),
                Err(libc::ESRCH) => return Err(Status::RetryExceeded),
                Err(_) => return Err(Status::RemoteOperation),
            }
        }
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(MAX_PAYLOAD);
            let request = Request {
                key,
                addr: addr.wrapping_add(done as u64),
                a: piece as u64,
                ..Request::new(if write { Request::WRITE } else { Request::READ })
            };
            let mut bounce = vec![0u8; piece];
            // SAFETY: inside the caller's range; `bounce` is private and long enough.
            let reply = unsafe {
                if write {
                    crate::memory::copy::copy(local.add(done), bounce.as_mut_ptr(), piece);
                    self.ask(&request, &bounce, &mut [])
                } else {
                    let reply = self.ask(&request, &[], &mut bounce);
                    crate::memory::copy::copy(bounce.as_ptr(), local.add(done), piece);
                    reply
                }
            };
            proxied(reply)?;
            done += piece;
        }
        Ok(())
    }

    /// An atomic on memory that another process registered in place: its service does it.
    pub(super) fn atomic_in_place(
        &self,
        kind: u32,
        key: u32,
        addr: u64,
        a: u64,
        b: u64,
    ) -> Result<u64, Status> {
        proxied(self.ask(&Request { key, addr, a, b, ..Request::new(kind) }, &[], &mut []))
    }

    fn ask(&self, request: &Request, payload: &[u8], answer: &mut [u8]) -> io::Result<Reply> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let mut reply = Reply::new_zeroed();
        let asked = socket::send(&socket.0, request.as_bytes(), payload, &[])
            .and_then(|()| socket::receive(&socket.0, reply.as_mut_bytes(), answer));
        match asked {
            Ok((got, _)) if reply.status != Reply::OK || got == answer.len() => Ok(reply),
            Ok(_) => Err(io::Error::from(io::ErrorKind::InvalidData)),
            Err(e) => {
                // Whatever comes later could be taken for the answer to something else.
                self.mark_dead();
                Err(e)
            }
        }
    }
}

fn proxied(reply: io::Result<Reply>) -> Result<u64, Status> {
    match reply {
        Ok(Reply { status: Reply::OK, value, .. }) => Ok(value),
        Ok(Reply { status: Reply::NO_SUCH_REGION, .. }) => Err(Status::RemoteAccess),
        Ok(_) => Err(Status::RemoteOperation),
        Err(_) => Err(Status::RetryExceeded),
    }
}

/// # Safety
///
/// `local..local + len` is valid for reads, and for writes if `write` is false.
unsafe fn process_vm(pid: Pid, write: bool, addr: u64, local: *mut u8, len: usize) -> Result<(), i32> {
    let mut done = 0;
    while done < len {
        // SAFETY: `done < len`, so the address stays inside the caller's range.
        let here = libc::iovec { iov_base: unsafe { local.add(done) }.cast(), iov_len: len - done };
        let there = libc::iovec { iov_base: (addr as usize + done) as *mut _, iov_len: len - done };
        let pid = pid.as_raw_nonzero().get();
        // SAFETY: `here` describes memory that the caller vouches for; the kernel checks `there`.
        let moved = unsafe {
            if write {
                libc::process_vm_writev(pid, &here, 1, &there, 1, 0)
            } else {
                libc::process_vm_readv(pid, &here, 1, &there, 1, 0)
            }
        };
        match moved {
            1.. => done += moved as usize,
            0 => return Err(libc::EFAULT),
            _ => return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
        }
    }
    Ok(())
}

pub(super) fn hex(gid: &[u8; 16]) -> String {
    gid.iter().map(|byte| format!("{byte:02x}")).collect()
}
