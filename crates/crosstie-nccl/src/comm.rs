//! Connections that NCCL has, with their requests that are not done.

use std::sync::LazyLock;

use crosstie::rails::{Flush, Flusher, Rails, RecvConnection, RecvRequest, SendConnection, SendRequest};

use crate::fault::Fault;
use crate::key::{EntryKey, Key, KeySlab, Kind};
use crate::memory::RecentMemory;
use crate::network::{MAX_COMMS, NetDevice};
use crate::table::Table;

/// A connection for sending. What each request needs comes first.
#[repr(C)]
pub(crate) struct SendComm {
    pub(crate) connection: SendConnection,
    pub(crate) requests: Requests<SendEntry>,
    pub(crate) recent: RecentMemory,
    pub(crate) rails: Rails,
    pub(crate) device: &'static NetDevice,
}

/// A connection for receiving. What each request needs comes first.
#[repr(C)]
pub(crate) struct RecvComm {
    pub(crate) connection: RecvConnection,
    pub(crate) requests: Requests<RecvEntry>,
    pub(crate) recent: RecentMemory,
    pub(crate) rails: Rails,
    pub(crate) device: &'static NetDevice,
    /// Boxed: otherwise the table looks there whether its slot is in use.
    pub(crate) flusher: Option<Box<Flusher>>,
}

pub(crate) static SENDS: LazyLock<Table<SendComm>> = LazyLock::new(|| Table::new(Kind::Send, MAX_COMMS));
pub(crate) static RECVS: LazyLock<Table<RecvComm>> = LazyLock::new(|| Table::new(Kind::Recv, MAX_COMMS));

/// A send that NCCL has not seen done.
pub(crate) struct SendEntry {
    pub(crate) request: SendRequest,
    pub(crate) memory: Key,
}

/// A receive or a flush that NCCL has not seen done.
pub(crate) struct RecvEntry {
    pub(crate) outstanding: Outstanding,
    pub(crate) memory: Key,
    /// That of a group's other buffers.
    pub(crate) others: Box<[Key]>,
}

/// See [`RecvEntry`].
#[derive(Clone, Copy)]
pub(crate) enum Outstanding {
    Receive(RecvRequest),
    Flush(Flush),
}

impl RecvEntry {
    pub(crate) fn uses(&self, memory: Key) -> bool {
        self.memory == memory || self.others.contains(&memory)
    }
}

/// The requests of a comm. In the key of a request, the index is that of the comm and, in the lower bits, that of the request.
pub(crate) struct Requests<T> {
    comm: u32,
    entries: KeySlab<T>,
}

const INDEX_BITS: u32 = 10;
/// Requests of a comm. NCCL has half as many in flight at most: 32, times the buffers of a receive on the sender.
const LIMIT: u32 = 2 * 32 * 8;
const _: () = assert!(LIMIT <= 1 << INDEX_BITS && MAX_COMMS <= 1 << (u32::BITS - INDEX_BITS));

/// The index of the comm of a request.
#[inline]
pub(crate) fn comm_of(request: Key) -> u32 {
    request.entry().index >> INDEX_BITS
}

impl<T> Requests<T> {
    /// For the comm with this key.
    pub(crate) fn new(comm: Key) -> Requests<T> {
        let EntryKey { index, generation } = comm.entry();
        // Keys of an earlier comm with the same index are most likely not valid for this one.
        let generation = generation.wrapping_mul(0x9e37_79b1);
        Requests { comm: index, entries: KeySlab::allocated(LIMIT, generation) }
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.entries.is_full()
    }

    /// Inlined for the same reason as [`KeySlab`]'s.
    #[inline]
    pub(crate) fn insert(&mut self, kind: Kind, entry: T) -> Result<Key, Fault> {
        match self.entries.insert(entry) {
            Ok(EntryKey { index, generation }) => {
                Ok(Key::new(kind, EntryKey { index: self.comm << INDEX_BITS | index, generation }))
            }
            Err(_) => Err(Fault::TooMany { what: kind, limit: LIMIT }),
        }
    }

    #[inline]
    pub(crate) fn get(&self, kind: Kind, request: Key) -> Result<&T, Fault> {
        // `ok_or` would make the error, and drop it, in every call.
        let Some(entry) = self.entries.get(entry_of(request)) else { return Err(Fault::InvalidKey(kind)) };
        Ok(entry)
    }

    #[inline]
    pub(crate) fn remove(&mut self, request: Key) {
        self.entries.remove(entry_of(request));
    }

    /// Those that are not done.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter()
    }
}

#[inline]
fn entry_of(request: Key) -> EntryKey {
    let EntryKey { index, generation } = request.entry();
    EntryKey { index: index & ((1 << INDEX_BITS) - 1), generation }
}
