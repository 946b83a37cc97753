//! Admitting and removing clients: what the watcher thread does.
//!
//! A client gets an index, which selects its response slots and its area in the segment, and a key: the index with a
//! generation. Indices are reused, keys are not, so requests and replies of an earlier client are recognised.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use zerocopy::IntoBytes;

use super::layout::{AcceptReply, ClientKey, SharedRing};
use super::lease;
use crate::local::listener::{Admission, ClientHandler, ClientId};
use crate::local_rpc::hello::{Hello, Refusal};
use crate::ring::reservation;

/// What the watcher thread and the server's thread share. None of it is in the segment: clients cannot write it.
#[derive(Debug)]
pub(super) struct ClientRegistry {
    ring: SharedRing,
    hello: Hello,
    slots: Box<[Arc<ClientSlot>]>,
    /// Key of the client that the server is writing a response to, see [`lease`].
    pub(super) replying_to: CachePadded<AtomicU64>,
    pub(super) connects: AtomicU64,
    /// Clients that were removed. A thread that sees a removal counted sees everything that the client wrote.
    pub(super) disconnects: AtomicU64,
    membership: Mutex<Membership>,
}

/// Aligned to two cache lines, which processors prefetch as a pair, so that nothing else shares them.
#[derive(Clone, Copy, Debug)]
#[repr(align(128))]
pub(super) struct CachePadded<T>(pub(super) T);

/// What is known about a client index. Aligned to a cache line: the server reads it for every reply.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct ClientSlot {
    /// Key of the client that has the index, see [`lease`].
    pub(super) holder: AtomicU64,
    /// Its [`ClientId`].
    id: AtomicU64,
}

/// Which clients are connected. Only the watcher thread uses it.
#[derive(Debug)]
struct Membership {
    /// Keys to give out; the one whose index was used longest ago comes first.
    free: VecDeque<ClientKey>,
    connected: HashMap<ClientId, ClientKey>,
    /// The mode of the ring. The copy in the segment is for the clients.
    mode: u64,
    /// The claim that the only client had when the mode became SHARED, until that client has left `reserve`.
    pending_claim: Option<(ClientKey, u64)>,
}

impl ClientRegistry {
    pub(super) fn new(ring: SharedRing, hello: Hello) -> ClientRegistry {
        let indices = 0..ring.layout.max_clients;
        let slot =
            |_| Arc::new(ClientSlot { holder: AtomicU64::new(lease::NO_CLIENT), id: AtomicU64::new(0) });
        let membership = Membership {
            free: indices.clone().map(ClientKey::first).collect(),
            connected: HashMap::new(),
            mode: reservation::SHARED,
            pending_claim: None,
        };
        ClientRegistry {
            slots: indices.map(slot).collect(),
            ring,
            hello,
            replying_to: CachePadded(AtomicU64::new(lease::NO_CLIENT)),
            connects: AtomicU64::new(0),
            disconnects: AtomicU64::new(0),
            membership: Mutex::new(membership),
        }
    }

    #[inline]
    pub(super) fn slot(&self, index: usize) -> Option<&Arc<ClientSlot>> {
        self.slots.get(index)
    }

    /// The claims of all clients that may still run.
    pub(super) fn live_claims(&self) -> impl Iterator<Item = &AtomicU64> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            // Acquire, partner: the Release store in `lease::end`. A client that is not a holder any more has made its last
            // write.
            let live = slot.holder.load(Acquire) != lease::NO_CLIENT;
            live.then(|| &self.ring.clients[index].claim)
        })
    }

    /// The id of the client with this key, if it is connected.
    pub(super) fn client_id(&self, key: ClientKey) -> Option<ClientId> {
        let slot = self.slot(key.index() as usize)?;
        let is_holder = || slot.holder.load(Acquire) == u64::from(key.bits());
        // Acquire, partner: the Release store of `id` in `admit`. The second check makes sure that it is this holder's id.
        let id = is_holder().then(|| slot.id.load(Acquire))?;
        is_holder().then_some(ClientId(id))
    }

    /// Prepares the ring for one more client. False: not possible yet.
    ///
    /// While the only client is stopped within the few instructions of a reservation, no other client can be admitted: when
    /// it continues, it stores into `head`, which would undo the reservations of others. Clients that try to connect in the
    /// meantime time out.
    fn prepare_for_another_client(&self, membership: &mut Membership) -> bool {
        let header = &self.ring.header;
        if membership.connected.is_empty() {
            membership.pending_claim = None;
            self.set_exclusive(membership);
            return true;
        }
        if membership.mode == reservation::EXCLUSIVE {
            // The only client may be about to reserve without compare-and-swap.
            reservation::switch_to_shared(&header.mode);
            membership.mode = reservation::SHARED;
            membership.pending_claim =
                membership.connected.values().next().map(|key| (*key, self.claim_of(*key)));
        }
        let Some((key, claim)) = membership.pending_claim else { return true };
        // A reservation has ended if the claim has changed or `head` has passed it. Later reservations see the new mode.
        // Acquire, partner: the Release stores in `reservation`.
        let has_left_reserve =
            claim == reservation::IDLE || self.claim_of(key) != claim || header.head.load(Acquire) > claim;
        if has_left_reserve {
            membership.pending_claim = None;
        }
        has_left_reserve
    }

    fn claim_of(&self, key: ClientKey) -> u64 {
        // Acquire, partner: the Release store in `reservation::clear_claim`.
        self.ring.clients[key.index() as usize].claim.load(Acquire)
    }

    /// Lets the only client reserve without compare-and-swap. Nobody else may be reserving.
    ///
    /// The last of the other clients is gone, so its reservations happened before. The remaining client may have read
    /// `head` before them. When it finds this mode it reads `head` again, and the Release makes the reservations visible.
    fn set_exclusive(&self, membership: &mut Membership) {
        membership.mode = reservation::EXCLUSIVE;
        // Release, partner: the Acquire load of the mode in `reservation::reserve`.
        self.ring.header.mode.store(reservation::EXCLUSIVE, Release);
    }

    fn membership(&self) -> std::sync::MutexGuard<'_, Membership> {
        // No update leaves it inconsistent if it panics.
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientHandler for ClientRegistry {
    fn admit(&self, client: ClientId, hello: &[u8]) -> Admission {
        if let Some(refusal) = self.hello.refusal_for(hello) {
            return refusal.into();
        }
        let mut membership = self.membership();
        let Some(&key) = membership.free.front() else {
            return Refusal::full(self.slots.len()).into();
        };
        let file = match self.ring.segment.fd().try_clone_to_owned() {
            Ok(file) => file,
            Err(error) => return Refusal::system(&error).into(),
        };
        if !self.prepare_for_another_client(&mut membership) {
            return Admission::RetryLater;
        }
        membership.free.pop_front();
        membership.connected.insert(client, key);
        let index = key.index() as usize;
        for slot in 0..self.ring.resp_depth {
            // Nobody writes responses there, because the lease of the last holder has ended. So the new client finds no
            // old responses.
            self.ring.response(index, slot).word().store(0, Relaxed);
        }
        self.ring.clients[index].claim.store(reservation::IDLE, Relaxed);
        // Release, partner: the Acquire load in `client_id`.
        self.slots[index].id.store(client.0, Release);
        // Release, partner: the Acquire load in `lease::begin_reply`. A thread that sees requests of this client sees this
        // store, too: the client writes them after it was accepted.
        self.slots[index].holder.store(key.bits().into(), Release);
        let connects = self.connects.fetch_add(1, Relaxed) + 1;
        self.ring.header.next_client_id.store(connects as u32, Relaxed);
        let reply = AcceptReply { layout: self.ring.layout, key: key.bits() };
        Admission::Accept { reply: reply.as_bytes().to_vec(), files: vec![file] }
    }

    fn remove(&self, client: ClientId) -> bool {
        let mut membership = self.membership();
        let Some(&key) = membership.connected.get(&client) else { return true };
        let index = key.index() as usize;
        if !lease::end(&self.replying_to.0, &self.slots[index].holder, key.bits().into()) {
            return false;
        }
        // The server recognises requests that the client has left in the ring by the generation of the key. It finds and
        // skips a position that the client reserved and did not fill.
        membership.connected.remove(&client);
        membership.free.push_back(key.next());
        if membership.pending_claim.is_some_and(|(pending, _)| pending == key) {
            membership.pending_claim = None;
        }
        if membership.connected.len() == 1 {
            self.set_exclusive(&mut membership);
        }
        // Release, partner: the Acquire load in `Core::skip_holes_if_due`.
        self.disconnects.fetch_add(1, Release);
        self.ring.header.parker.wake();
        true
    }
}
