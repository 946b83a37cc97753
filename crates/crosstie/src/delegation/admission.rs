//! Letting clients in and out: what the watcher's thread does.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use zerocopy::IntoBytes;

use super::layout::{ClientKey, Map, Welcome};
use super::lease;
use crate::local::listener::{Admission, ClientHandler, ClientId};
use crate::local_rpc::hello::{Hello, Refusal};
use crate::ring::{fence, reservation};

/// What the watcher's thread and the server share. None of it is in the segment: clients cannot write it.
#[derive(Debug)]
pub(super) struct ClientRegistry {
    map: Map,
    greeting: Hello,
    places: Box<[Place]>,
    /// Key of the client whom an answer is being written to, see [`lease`].
    pub(super) answering: Apart<AtomicU64>,
    pub(super) arrived: AtomicU64,
    /// Clients that are gone; everything that they wrote is visible to whoever sees them counted.
    pub(super) left: AtomicU64,
    register: Mutex<Register>,
}

/// On cache lines of its own, two of them, which processors fetch together: nobody else's work shares them by chance.
#[derive(Clone, Copy, Debug)]
#[repr(align(128))]
pub(super) struct Apart<T>(pub(super) T);

#[derive(Debug)]
pub(super) struct Place {
    /// Key of the client that has it, see [`lease`].
    pub(super) holder: AtomicU64,
    client: AtomicU64,
}

#[derive(Debug)]
struct Register {
    /// Keys to give out; the one whose index was used longest ago first.
    free: VecDeque<ClientKey>,
    present: HashMap<ClientId, ClientKey>,
    /// What the ring's mode is. The copy in the segment is for clients.
    mode: u64,
    /// The claim of the only client, when the mode became SHARED; until it has moved on.
    awaited: Option<(ClientKey, u64)>,
}

impl ClientRegistry {
    pub(super) fn new(map: Map, greeting: Hello) -> ClientRegistry {
        let indices = 0..map.shape.max_clients;
        let place = |_| Place { holder: AtomicU64::new(lease::NOBODY), client: AtomicU64::new(0) };
        let register = Register {
            free: indices.clone().map(ClientKey::first).collect(),
            present: HashMap::new(),
            mode: reservation::SHARED,
            awaited: None,
        };
        ClientRegistry {
            places: indices.map(place).collect(),
            map,
            greeting,
            answering: Apart(AtomicU64::new(lease::NOBODY)),
            arrived: AtomicU64::new(0),
            left: AtomicU64::new(0),
            register: Mutex::new(register),
        }
    }

    #[inline]
    pub(super) fn place(&self, index: usize) -> Option<&Place> {
        self.places.get(index)
    }

    /// The claims of all clients that may still run.
    pub(super) fn live_claims(&self) -> impl Iterator<Item = &AtomicU64> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            // Acquire, partner: the Release store in `lease::end`: who is no holder any more has written all it will.
            let live = place.holder.load(Acquire) != lease::NOBODY;
            live.then(|| &self.map.clients[index].claim)
        })
    }

    /// The client behind a key, if it is there.
    pub(super) fn client(&self, key: ClientKey) -> Option<ClientId> {
        let place = self.place(key.index() as usize)?;
        let holds = || place.holder.load(Acquire) == u64::from(key.bits());
        // Acquire, partner: the Release store of `client` in `admit`. The second look makes sure that it is this holder's.
        let client = holds().then(|| place.client.load(Acquire))?;
        holds().then_some(ClientId(client))
    }

    /// Makes the ring ready for one more client than there are now. False: not yet.
    ///
    /// A client that is stopped within the few instructions of a reservation, and alone, keeps others out until it goes
    /// on: what it will store into `head` then would undo their reservations. They hear that nobody answers.
    fn make_way(&self, register: &mut Register) -> bool {
        let top = &self.map.top;
        if register.present.is_empty() {
            register.awaited = None;
            self.set_sole(register);
            return true;
        }
        if register.mode == reservation::EXCLUSIVE {
            // As `reservation::switch_to_shared`, which waits: the only client may be about to reserve without compare-and-swap.
            top.mode.store(reservation::SHARED, Relaxed);
            fence::heavy();
            register.mode = reservation::SHARED;
            register.awaited = register.present.values().next().map(|key| (*key, self.claim(*key)));
        }
        let Some((key, claim)) = register.awaited else { return true };
        // A reservation is over when the claim changed, or the head passed it. What comes after it sees the new mode.
        // Acquire, partner: the Release stores in `reservation`.
        let moved_on =
            claim == reservation::IDLE || self.claim(key) != claim || top.head.load(Acquire) > claim;
        if moved_on {
            register.awaited = None;
        }
        moved_on
    }

    fn claim(&self, key: ClientKey) -> u64 {
        // Acquire, partner: the Release store in `reservation::clear_claim`.
        self.map.clients[key.index() as usize].claim.load(Acquire)
    }

    /// Lets the only client do without compare-and-swap. Nobody else may be reserving.
    ///
    /// The last of the others is gone, so its reservations happened before. The one that is left may have read `head`
    /// before them; when it finds this mode it reads `head` again, and the Release makes it see theirs.
    fn set_sole(&self, register: &mut Register) {
        register.mode = reservation::EXCLUSIVE;
        // Release, partner: the Acquire load of the mode in `reservation::reserve`.
        self.map.top.mode.store(reservation::EXCLUSIVE, Release);
    }

    fn register(&self) -> std::sync::MutexGuard<'_, Register> {
        // Used by the watcher's thread only, and no statement leaves it half done.
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientHandler for ClientRegistry {
    fn admit(&self, client: ClientId, hello: &[u8]) -> Admission {
        if let Some(refusal) = self.greeting.refusal_for(hello) {
            return refusal.into();
        }
        let mut register = self.register();
        let Some(&key) = register.free.front() else {
            return Refusal::full(self.places.len()).into();
        };
        let file = match self.map.segment.fd().try_clone_to_owned() {
            Ok(file) => file,
            Err(error) => return Refusal::system(&error).into(),
        };
        if !self.make_way(&mut register) {
            return Admission::RetryLater;
        }
        register.free.pop_front();
        register.present.insert(client, key);
        let index = key.index() as usize;
        for slot in 0..self.map.resp_depth {
            // Nobody answers into them: the last holder's lease has ended. Its successor finds no old answers.
            self.map.response(index, slot).word().store(0, Relaxed);
        }
        self.map.clients[index].claim.store(reservation::IDLE, Relaxed);
        // Release, partner: the Acquire load in `client`.
        self.places[index].client.store(client.0, Release);
        // Release, partner: the Acquire load in `lease::answer`. Whoever sees this client's requests sees it, too: they
        // come after the welcome.
        self.places[index].holder.store(key.bits().into(), Release);
        let arrived = self.arrived.fetch_add(1, Relaxed) + 1;
        self.map.top.next_client_id.store(arrived as u32, Relaxed);
        let welcome = Welcome { shape: self.map.shape, key: key.bits() };
        Admission::Accept { reply: welcome.as_bytes().to_vec(), files: vec![file] }
    }

    fn remove(&self, client: ClientId) -> bool {
        let mut register = self.register();
        let Some(&key) = register.present.get(&client) else { return true };
        let index = key.index() as usize;
        if !lease::end(&self.answering.0, &self.places[index].holder, key.bits().into()) {
            return false;
        }
        // What it still has in the ring is known by its generation to be of somebody who is gone; a place that it
        // reserved and did not fill is found by the server to be nobody's.
        register.present.remove(&client);
        register.free.push_back(key.next());
        if register.awaited.is_some_and(|(awaited, _)| awaited == key) {
            register.awaited = None;
        }
        if register.present.len() == 1 {
            self.set_sole(&mut register);
        }
        // Release, partner: the Acquire load in `Core::found_by_search`.
        self.left.fetch_add(1, Release);
        self.map.top.parker.wake();
        true
    }
}
