//! Sending, receiving, flushing, and asking whether a request is done.

use core::ffi::c_int;
use core::iter;

use crosstie::rails::{RecvBuffer, RequestError};

use crate::comm::{Outstanding, RECVS, RecvEntry, SENDS, SendEntry, comm_of};
use crate::fault::Fault;
use crate::key::{Key, Kind};
use crate::log::warning;
use crate::memory::Registered;

/// One buffer of a request, as NCCL names it.
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) data: usize,
    pub(crate) size: usize,
    pub(crate) tag: c_int,
    pub(crate) memory: Key,
}

/// `isend`. `None` if the receiver has not posted a buffer for it.
#[inline]
pub(crate) fn isend(comm: Key, buffer: &Buffer) -> Result<Option<Key>, Fault> {
    let mut comm = SENDS.lock(comm)?;
    let comm = &mut *comm;
    if comm.requests.is_full() {
        comm.connection.progress();
        return Ok(None);
    }
    let (memory, range) = comm.recent.get(buffer.memory)?.range(buffer.data, buffer.size)?;
    let sent = match comm.connection.isend(memory, range.clone(), buffer.tag as u32) {
        // NCCL sends at most what the receiver takes.
        Err(RequestError::TooLong { room, .. }) => {
            comm.connection.isend(memory, range.start..range.start + room, buffer.tag as u32)?
        }
        sent => sent?,
    };
    let Some(request) = sent else { return Ok(None) };
    comm.requests.insert(Kind::SendRequest, SendEntry { request, memory: buffer.memory }).map(Some)
}

fn recv_buffer<'a>(registered: &'a Registered, buffer: &Buffer) -> Result<RecvBuffer<'a>, Fault> {
    let (memory, range) = registered.range(buffer.data, buffer.size)?;
    Ok(RecvBuffer { memory, range, tag: buffer.tag as u32 })
}

/// `irecv` for one buffer or more; for one it allocates nothing. `None` if too many receives are outstanding.
#[inline]
pub(crate) fn irecv(comm: Key, first: &Buffer, others: &[Buffer]) -> Result<Option<Key>, Fault> {
    let mut comm = RECVS.lock(comm)?;
    let comm = &mut *comm;
    if comm.requests.is_full() {
        comm.connection.progress();
        return Ok(None);
    }
    let part = recv_buffer(comm.recent.get(first.memory)?, first)?;
    let received = if others.is_empty() {
        comm.connection.irecv(&[part])?
    } else {
        let found = others.iter().map(|buffer| Registered::find(buffer.memory));
        let found = found.collect::<Result<Vec<_>, _>>()?;
        let rest = found.iter().zip(others).map(|(registered, buffer)| recv_buffer(registered, buffer));
        let parts = iter::once(Ok(part)).chain(rest).collect::<Result<Vec<_>, _>>()?;
        comm.connection.irecv(&parts)?
    };
    let Some(request) = received else { return Ok(None) };
    let others = others.iter().map(|buffer| buffer.memory).collect();
    let entry = RecvEntry { outstanding: Outstanding::Receive(request), memory: first.memory, others };
    comm.requests.insert(Kind::RecvRequest, entry).map(Some)
}

/// `test`: true ends the request. `take_sizes` gets the bytes of each buffer.
#[inline]
pub(crate) fn test(key: Key, take_sizes: impl Fn(&[usize])) -> Result<bool, Fault> {
    let index = comm_of(key);
    if key.is(Kind::SendRequest) {
        let mut comm = SENDS.lock_index(index)?;
        let comm = &mut *comm;
        let request = comm.requests.get(Kind::SendRequest, key)?.request;
        let Some(len) = comm.connection.test(request)? else { return Ok(false) };
        comm.requests.remove(key);
        take_sizes(&[len]);
        return Ok(true);
    }
    if !key.is(Kind::RecvRequest) {
        return Err(Fault::InvalidKey(Kind::RecvRequest));
    }
    let mut comm = RECVS.lock_index(index)?;
    let comm = &mut *comm;
    match comm.requests.get(Kind::RecvRequest, key)?.outstanding {
        Outstanding::Receive(request) => match comm.connection.test(request)? {
            Some(received) => take_sizes(received.sizes()),
            None => return Ok(false),
        },
        Outstanding::Flush(flush) => {
            if let Some(flusher) = &mut comm.flusher {
                let before = flusher.rails();
                let is_done = flusher.test(flush);
                if flusher.rails() != before {
                    warning!(
                        "a rail does not flush GPU memory any more: rails {:#x} are left",
                        flusher.rails()
                    );
                }
                if !is_done {
                    return Ok(false);
                }
            }
        }
    }
    comm.requests.remove(key);
    Ok(true)
}

/// `iflush`: makes received bytes visible to the GPU. `None` if there is nothing to do: for memory of the host.
pub(crate) fn iflush(comm: Key, last: Option<&Buffer>) -> Result<Option<Key>, Fault> {
    let mut comm = RECVS.lock(comm)?;
    let comm = &mut *comm;
    let (Some(flusher), Some(buffer)) = (&mut comm.flusher, last) else { return Ok(None) };
    let registered = comm.recent.get(buffer.memory)?;
    if !registered.is_gpu {
        return Ok(None);
    }
    let (memory, range) = registered.range(buffer.data, buffer.size)?;
    let flush = flusher.start(memory, range.start, comm.connection.rails_up())?;
    let entry =
        RecvEntry { outstanding: Outstanding::Flush(flush), memory: buffer.memory, others: Box::default() };
    comm.requests.insert(Kind::RecvRequest, entry).map(Some)
}
