//! Every state that two sides with tiny rings can reach, and from each of them: can both still call?
//!
//! A state is both endpoints, what is on the links, and what the applications hold and owe, with positions counted from
//! the last whole ring so that states repeat. A depth-first search visits all of them; the set of those seen
//! keeps 128 bits for each.

use std::collections::{HashSet, VecDeque};
use std::format;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

use super::super::wire::{FLOW_METADATA_SIZE, FlowMetadata, Header};
use super::super::*;
use super::Trap;

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    sides: [Side; 2],
}

#[derive(PartialEq, Eq, Hash)]
struct Side {
    endpoint: Endpoint<()>,
    ring: u64,
    /// Headers of the batch under construction or not posted, by offset in the peer's ring.
    staged: Vec<(usize, Header)>,
    /// Batches on the way to this side.
    link: VecDeque<Batch>,
    held: Vec<Held>,
    owed: Vec<(Owed, u32)>,
}

impl Clone for Side {
    fn clone(&self) -> Self {
        Side {
            endpoint: self.endpoint.clone(),
            ring: self.ring,
            staged: self.staged.clone(),
            link: self.link.clone(),
            held: self.held.iter().map(Held::duplicate).collect(),
            owed: self.owed.iter().map(|(owed, n)| (owed.duplicate(), *n)).collect(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Batch {
    offset: usize,
    imm: u32,
    metadata: FlowMetadata,
    headers: Vec<(usize, Header)>,
}

impl RingBytes for Batch {
    fn load<const N: usize>(&self, offset: usize) -> [u8; N] {
        let mut bytes = [0; N];
        if N == FLOW_METADATA_SIZE {
            assert_eq!(offset, self.offset);
            bytes.copy_from_slice(&self.metadata.encode());
        } else {
            let (_, header) = self.headers.iter().find(|(at, _)| *at == offset).expect("a header is there");
            bytes.copy_from_slice(&header.encode());
        }
        bytes
    }
}

/// What the model lets the applications do.
#[derive(Clone, Copy)]
pub(super) struct World {
    pub(super) rings: [u64; 2],
    pub(super) pending: usize,
    /// Request and response lengths of the calls.
    pub(super) calls: &'static [(u32, u32)],
    pub(super) trap: Option<Trap>,
}

impl World {
    fn start(&self) -> State {
        let side = |me: usize| {
            let terms = Terms {
                ring: self.rings[me],
                peer_ring: self.rings[1 - me],
                credit_limit: 1 << 20,
                peer_credit_limit: 1 << 20,
                pending_calls: self.pending,
            };
            let mut endpoint = Endpoint::new(&terms).unwrap();
            endpoint.reopen(self.trap, &terms);
            endpoint.one_generation();
            Side {
                endpoint,
                ring: self.rings[me],
                staged: vec![],
                link: VecDeque::new(),
                held: vec![],
                owed: vec![],
            }
        };
        State { sides: [side(0), side(1)] }
    }

    /// All states one step away.
    fn steps(&self, state: &State, mut each: impl FnMut(State)) -> Result<(), String> {
        for me in [0, 1] {
            let side = &state.sides[me];
            for &(len, response) in self.calls {
                let mut next = state.clone();
                next.call(me, len, response);
                each(next);
            }
            let mut next = state.clone();
            if next.emit(me) {
                while next.emit(me) {}
                each(next);
            }
            if !side.link.is_empty() {
                let mut next = state.clone();
                next.take(me)?;
                each(next);
            }
            for index in 0..side.held.len() {
                let mut next = state.clone();
                next.release(me, index);
                each(next);
            }
            for index in 0..side.owed.len() {
                let mut next = state.clone();
                next.reply(me, index)?;
                each(next);
            }
            let mut next = state.clone();
            if next.read(me)? {
                each(next);
            }
        }
        Ok(())
    }

    /// Visits every state, or as many as `limit`; gives their number, or what is wrong with one.
    pub(super) fn explore(&self, limit: usize) -> Result<usize, String> {
        let mut seen = HashSet::new();
        let mut idle_seen = HashSet::new();
        let mut stack = vec![self.start()];
        seen.insert(stack[0].digest());
        while let Some(state) = stack.pop() {
            state.check()?;
            let mut idle = state.clone();
            idle.fall_silent()?;
            idle.rebase();
            if idle_seen.insert(idle.digest()) {
                self.nobody_is_stuck(&idle)?;
            }
            self.steps(&state, |mut next| {
                next.rebase();
                if seen.insert(next.digest()) {
                    stack.push(next);
                }
            })?;
            if seen.len() > limit {
                break;
            }
        }
        Ok(seen.len())
    }

    /// From an idle state on both applications poll and release, and one side wants to call. It can, soon: while the peer
    /// only answers, and while the peer calls as much as it can.
    fn nobody_is_stuck(&self, state: &State) -> Result<(), String> {
        for me in [0, 1] {
            for busy in [false, true] {
                for &(len, response) in self.calls {
                    let mut state = state.clone();
                    let mut rounds = 0;
                    while !state.call(me, len, response) {
                        while busy && state.call(1 - me, self.calls[0].0, self.calls[0].1) {}
                        state.round(1 - me)?;
                        // The peer takes whatever comes free before this side asks again.
                        while busy && state.call(1 - me, self.calls[0].0, self.calls[0].1) {}
                        state.round(me)?;
                        rounds += 1;
                        if rounds > 40 {
                            return Err(format!("side {me} waits for ever (peer busy: {busy})"));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl State {
    fn call(&mut self, me: usize, len: u32, response: u32) -> bool {
        let side = &mut self.sides[me];
        let Ok((_, placed)) = side.endpoint.call(len, response, ()) else { return false };
        side.staged.push((placed.offset, placed.header));
        true
    }

    fn reply(&mut self, me: usize, index: usize) -> Result<(), String> {
        let side = &mut self.sides[me];
        let (owed, len) = side.owed.remove(index);
        let placed = side.endpoint.reply(owed, len).map_err(|(error, _)| error.to_string())?;
        side.staged.push((placed.offset, placed.header));
        Ok(())
    }

    fn release(&mut self, me: usize, index: usize) {
        let side = &mut self.sides[me];
        let held = side.held.remove(index);
        side.endpoint.release(held);
    }

    fn emit(&mut self, me: usize) -> bool {
        let side = &mut self.sides[me];
        let Some(emit) = side.endpoint.emit() else { return false };
        side.endpoint.posted();
        let count = if emit.kind == EmitKind::Batch { emit.metadata.message_count as usize } else { 0 };
        let headers = side.staged.drain(..count).collect();
        let batch = Batch { offset: emit.offset, imm: emit.imm, metadata: emit.metadata, headers };
        self.sides[1 - me].link.push_back(batch);
        true
    }

    fn take(&mut self, me: usize) -> Result<bool, String> {
        let Side { endpoint, link, held, owed, .. } = &mut self.sides[me];
        let Some(batch) = link.pop_front() else { return Ok(false) };
        let text = |violation: Violation| violation.to_string();
        endpoint.arrive(batch.imm, &batch).map_err(text)?;
        while let Some(arrival) = endpoint.next(&batch).map_err(text)? {
            match arrival {
                Arrival::Request(request) => {
                    held.push(request.held);
                    let longest = request.owed.max_len() as u32;
                    owed.push((request.owed, longest));
                }
                // Nothing waits for the end of a response here but the ring, and requests make it wait already.
                Arrival::Response(response) => {
                    endpoint.release(response.held);
                }
            }
        }
        Ok(true)
    }

    /// A READ, at once: one that takes longer brings older news, which come as batches too.
    fn read(&mut self, me: usize) -> Result<bool, String> {
        let word = self.sides[1 - me].endpoint.consumer();
        let endpoint = &mut self.sides[me].endpoint;
        let wanted = endpoint.wants_read();
        if wanted {
            endpoint.read_posted();
            endpoint.read_done(word).map_err(|violation| violation.to_string())?;
        }
        Ok(wanted)
    }

    /// What an application does that polls, replies and releases.
    fn round(&mut self, me: usize) -> Result<bool, String> {
        let mut moved = false;
        while self.take(me)? {
            moved = true;
        }
        while !self.sides[me].held.is_empty() {
            self.release(me, 0);
            moved = true;
        }
        while !self.sides[me].owed.is_empty() {
            self.reply(me, 0)?;
            moved = true;
        }
        moved |= self.read(me)?;
        while self.emit(me) {
            moved = true;
        }
        Ok(moved)
    }

    /// Both applications poll, release and reply, and call no more: it comes to an end.
    fn fall_silent(&mut self) -> Result<(), String> {
        for _ in 0..40 {
            let moved = self.round(0)? | self.round(1)?;
            if !moved {
                return Ok(());
            }
        }
        Err("two idle sides never fall silent".into())
    }

    fn check(&self) -> Result<(), String> {
        for me in [0, 1] {
            let ledger = self.sides[me].endpoint.ledger();
            if !ledger.holds() || ledger.lent != 0 {
                return Err(format!("in_flight + 2R <= C is broken: {ledger:?}"));
            }
            let mut peer = self.sides[1 - me].endpoint.clone();
            if self.sides[me].endpoint.remote_consumer() > peer.consumer() {
                return Err("a side believes that its peer has released more than it has".into());
            }
            if ledger.reserved > self.sides[me].endpoint.credit_limit() {
                return Err("more credit granted than the limit".into());
            }
        }
        Ok(())
    }

    /// Counts positions from the last whole ring that nobody needs any more. News of consumer positions that are old
    /// have no effect; they become zero.
    fn rebase(&mut self) {
        let mut back = [0, 1].map(|me| {
            // What side `me` sends lies in its peer's ring.
            let peer = &self.sides[1 - me];
            let oldest = self.sides[me].endpoint.remote_consumer().min(peer.endpoint.oldest_announced());
            oldest & !(peer.ring - 1)
        });
        for me in [0, 1] {
            let side = &mut self.sides[me];
            let [sent, received] = back;
            let known = side.endpoint.remote_consumer();
            let news = |position: u64| if position <= known { 0 } else { position - sent };
            side.endpoint.consumer();
            side.endpoint.rebase(sent, received);
            side.held.iter_mut().for_each(|held| held.rebase(received));
            for batch in &mut side.link {
                batch.metadata.consumer_pos = news(batch.metadata.consumer_pos);
            }
            back.reverse();
        }
    }

    /// States that differ in nothing but the names of the sides are one.
    fn digest(&self) -> (u64, u64) {
        let [a, b] = [0, 1].map(|me| {
            let mut hasher = DefaultHasher::new();
            self.sides[me].hash(&mut hasher);
            hasher.finish()
        });
        (a.min(b), a.max(b))
    }
}

/// The smallest legal rings, whole: one call each way at a time, at every offset.
#[test]
fn no_state_of_the_smallest_rings_is_stuck() {
    let world = World { rings: [256, 256], pending: 1, calls: &[(0, 0)], trap: None };
    let limit = 5_000_000;
    let states = world.explore(limit).unwrap();
    std::println!("{states} states");
    assert!(
        (1_000_000..limit).contains(&states),
        "{states} states: the search was cut short, or saw nothing"
    );
}

/// Larger and unequal rings, calls of several sizes: more states than can be visited, so as many as time admits.
#[test]
fn no_state_of_larger_rings_is_stuck_as_far_as_visited() {
    for (rings, calls) in [
        ([256, 512], &[(0, 0), (20, 20)][..]),
        ([512, 512], &[(0, 0), (84, 84)][..]),
        ([256, 1024], &[(20, 0), (10, 20)][..]),
    ] {
        let states = World { rings, pending: 2, calls, trap: None }.explore(60_000).unwrap();
        std::println!("{states} states of {rings:?}");
    }
}
