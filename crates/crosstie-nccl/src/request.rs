//! Sending, receiving, flushing, and asking whether a request is done.

use core::ffi::c_int;

use crosstie::rails::{Flush, RecvBuffer, RecvRequest, RequestError, Started, Tested};

use crate::abi::Fault;
use crate::comm::{RECVS, SENDS};
use crate::key::{Key, Kind};
use crate::log::warning;
use crate::memory::Registered;
use crate::network::MAX_REQUESTS;

/// One buffer of a request, as NCCL names it.
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) data: usize,
    pub(crate) size: usize,
    pub(crate) tag: c_int,
    pub(crate) memory: Key,
}

/// A send that NCCL has not seen done.
pub(crate) struct SendEntry {
    started: Started,
    pub(crate) memory: Key,
}

/// What NCCL has not seen done on a receiving comm.
#[derive(Clone, Copy)]
enum Outstanding {
    Receive(RecvRequest),
    Flush(Flush),
}

/// A receive or a flush.
pub(crate) struct RecvEntry {
    outstanding: Outstanding,
    memory: Key,
    /// That of a group's other buffers.
    others: Option<Box<[Key]>>,
}

impl RecvEntry {
    pub(crate) fn uses(&self, memory: Key) -> bool {
        self.memory == memory || self.others.as_ref().is_some_and(|others| others.contains(&memory))
    }
}

/// The requests of a comm. A key of a request is the index of the comm and of the slot, and the slot's generation.
pub(crate) struct Requests<T> {
    comm: u32,
    /// The first free slot, which names the next one. `NO_SLOT`: none is free.
    free: u16,
    slots: Box<[RequestSlot<T>]>,
}

/// A place for a request: one cache line.
#[repr(align(64))]
struct RequestSlot<T> {
    generation: u32,
    next_free: u16,
    entry: Option<T>,
}

const SLOT_BITS: u32 = 10;
/// Twice what NCCL uses.
const SLOT_COUNT: usize = 2 * MAX_REQUESTS;
const _: () = assert!(SLOT_COUNT <= 1 << SLOT_BITS);
const NO_SLOT: u16 = u16::MAX;

impl<T> Requests<T> {
    /// For the comm with this key.
    pub(crate) fn new(comm: Key) -> Requests<T> {
        // Keys of an earlier comm with the same index are most likely not valid for this one.
        let generation = comm.generation().wrapping_mul(0x9e37_79b1);
        let next = |index| if index + 1 < SLOT_COUNT { index as u16 + 1 } else { NO_SLOT };
        let slot = |index| RequestSlot { generation, next_free: next(index), entry: None };
        Requests { comm: comm.index(), free: 0, slots: (0..SLOT_COUNT).map(slot).collect() }
    }

    #[inline(always)]
    fn is_full(&self) -> bool {
        self.free == NO_SLOT
    }

    #[inline(always)]
    fn insert(&mut self, kind: Kind, entry: T) -> Result<Key, Fault> {
        let index = self.free;
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return Err(Fault::TooMany { what: kind, limit: SLOT_COUNT });
        };
        self.free = slot.next_free;
        slot.generation = slot.generation.wrapping_add(1) % Key::GENERATIONS;
        slot.entry = Some(entry);
        Ok(Key::new(kind, slot.generation, self.comm << SLOT_BITS | u32::from(index)))
    }

    #[inline(always)]
    fn get(&mut self, kind: Kind, key: Key) -> Result<&mut Option<T>, Fault> {
        let index = key.index() as usize & ((1 << SLOT_BITS) - 1);
        match self.slots.get_mut(index) {
            Some(RequestSlot { generation, entry, .. })
                if *generation == key.generation() && entry.is_some() =>
            {
                Ok(entry)
            }
            _ => Err(Fault::InvalidKey(kind)),
        }
    }

    #[inline(always)]
    fn remove(&mut self, key: Key) {
        let index = key.index() & ((1 << SLOT_BITS) - 1);
        let slot = &mut self.slots[index as usize];
        slot.entry = None;
        slot.next_free = self.free;
        self.free = index as u16;
    }

    /// Those that are not done.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.entry.as_ref())
    }
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
    let started = match comm.connection.start_send(memory, range.clone(), buffer.tag as u32) {
        // NCCL sends at most what the receiver takes.
        Err(RequestError::TooLong { room, .. }) => {
            comm.connection.start_send(memory, range.start..range.start + room, buffer.tag as u32)?
        }
        started => started?,
    };
    let Some(started) = started else { return Ok(None) };
    comm.requests.insert(Kind::SendRequest, SendEntry { started, memory: buffer.memory }).map(Some)
}

fn recv_buffer<'a>(registered: &'a Registered, buffer: &Buffer) -> Result<RecvBuffer<'a>, Fault> {
    let (memory, range) = registered.range(buffer.data, buffer.size)?;
    Ok(RecvBuffer { memory, range, tag: buffer.tag as u32 })
}

/// `irecv` for one buffer. `None` if too many receives are outstanding.
#[inline(always)]
pub(crate) fn irecv_single(comm: Key, buffer: &Buffer) -> Result<Option<Key>, Fault> {
    let mut comm = RECVS.lock(comm)?;
    let comm = &mut *comm;
    if comm.requests.is_full() {
        comm.connection.progress();
        return Ok(None);
    }
    let (memory, range) = comm.recent.get(buffer.memory)?.range(buffer.data, buffer.size)?;
    let Some(request) = comm.connection.irecv_single(memory, range, buffer.tag as u32)? else {
        return Ok(None);
    };
    let outstanding = Outstanding::Receive(request);
    comm.requests
        .insert(Kind::RecvRequest, RecvEntry { outstanding, memory: buffer.memory, others: None })
        .map(Some)
}

/// `irecv` for several buffers.
pub(crate) fn irecv(comm: Key, buffers: &[Buffer]) -> Result<Option<Key>, Fault> {
    let mut comm = RECVS.lock(comm)?;
    let comm = &mut *comm;
    if comm.requests.is_full() {
        comm.connection.progress();
        return Ok(None);
    }
    let memory = buffers.iter().map(|buffer| Registered::find(buffer.memory));
    let memory = memory.collect::<Result<Vec<_>, _>>()?;
    let parts = memory.iter().zip(buffers).map(|(registered, buffer)| recv_buffer(registered, buffer));
    let received = comm.connection.irecv(&parts.collect::<Result<Vec<_>, _>>()?)?;
    let Some(request) = received else { return Ok(None) };
    let Some((first, others)) = buffers.split_first() else { return Ok(None) };
    let others = Some(others.iter().map(|buffer| buffer.memory).collect());
    let entry = RecvEntry { outstanding: Outstanding::Receive(request), memory: first.memory, others };
    comm.requests.insert(Kind::RecvRequest, entry).map(Some)
}

/// `test`: true ends the request. `take_sizes` gets the bytes of each buffer.
#[inline(always)]
pub(crate) fn test(key: Key, take_sizes: impl Fn(&[usize])) -> Result<bool, Fault> {
    let index = key.index() >> SLOT_BITS;
    if key.is(Kind::SendRequest) {
        let mut comm = SENDS.lock_index(index)?;
        let comm = &mut *comm;
        let Some(entry) = comm.requests.get(Kind::SendRequest, key)? else { return Ok(false) };
        let len = match entry.started {
            Started::Done(len) => len,
            Started::Request(request) => match comm.connection.test(request)? {
                Some(len) => len,
                None => return Ok(false),
            },
        };
        comm.requests.remove(key);
        take_sizes(&[len]);
        return Ok(true);
    }
    if !key.is(Kind::RecvRequest) {
        return Err(Fault::InvalidKey(Kind::RecvRequest));
    }
    let mut comm = RECVS.lock_index(index)?;
    let comm = &mut *comm;
    let Some(entry) = comm.requests.get(Kind::RecvRequest, key)? else { return Ok(false) };
    match entry.outstanding {
        Outstanding::Receive(request) => match comm.connection.test_single(request) {
            Tested::Done(len) => take_sizes(&[len]),
            Tested::Pending => return Ok(false),
            Tested::Other => match comm.connection.test(request)? {
                Some(received) => take_sizes(received.sizes()),
                None => return Ok(false),
            },
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
    let entry = RecvEntry { outstanding: Outstanding::Flush(flush), memory: buffer.memory, others: None };
    comm.requests.insert(Kind::RecvRequest, entry).map(Some)
}
