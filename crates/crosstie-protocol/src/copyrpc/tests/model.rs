//! An exhaustive model: visits every state that two sides with tiny rings can reach, and checks in each that both sides can
//! still make a call.
//!
//! A state is both flows, the batches on the links, and the messages that the applications retain or have not answered.
//! Positions are counted from the last whole ring, so that states repeat. A depth-first search visits all states; it
//! remembers each by a 128-bit digest.

use std::collections::{HashSet, VecDeque};
use std::format;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

use super::super::wire::{COMPACT_FLAG, CompactHead, FlowMetadata, HEADER_SIZE, Header};
use super::super::*;
use super::BrokenRule;

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    sides: [ModelPeer; 2],
}

#[derive(PartialEq, Eq, Hash)]
struct ModelPeer {
    flow: Flow<()>,
    ring: u64,
    /// Headers of messages that were placed and not posted, by offset in the peer's ring.
    staged: Vec<(usize, Header)>,
    /// Batches on their way to this side.
    link: VecDeque<Batch>,
    retained: Vec<RetainedSpace>,
    unanswered: Vec<(ReplyToken, usize)>,
}

impl Clone for ModelPeer {
    fn clone(&self) -> Self {
        ModelPeer {
            flow: self.flow.clone(),
            ring: self.ring,
            staged: self.staged.clone(),
            link: self.link.clone(),
            retained: self.retained.iter().map(RetainedSpace::duplicate).collect(),
            unanswered: self.unanswered.iter().map(|(token, n)| (token.duplicate(), *n)).collect(),
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
    fn load_words(&self, offset: usize) -> [u64; 2] {
        let metadata = self.metadata.encode();
        let mut bytes = [0; 16];
        if self.imm & COMPACT_FLAG != 0 {
            assert_eq!(offset, self.offset);
            let [(_, header)] = self.headers.as_slice() else { panic!("not a compact batch") };
            bytes = CompactHead::new(&self.metadata, header).encode();
        } else if let Some(half @ (0 | 16)) = offset.checked_sub(self.offset) {
            bytes.copy_from_slice(&metadata[half..half + 16]);
        } else {
            let (_, header) =
                self.headers.iter().find(|(at, _)| *at == offset).expect("the flow only loads headers");
            bytes[..HEADER_SIZE].copy_from_slice(&header.encode());
        }
        bytes.as_slice().load_words(0)
    }
}

/// What the applications of a model may do.
#[derive(Clone, Copy)]
pub(super) struct Model {
    pub(super) rings: [u64; 2],
    pub(super) pending: usize,
    /// Request and response lengths of the calls.
    pub(super) calls: &'static [(usize, usize)],
    pub(super) compact: bool,
    pub(super) broken_rule: Option<BrokenRule>,
}

impl Model {
    fn initial_state(&self) -> State {
        let side = |me: usize| {
            let params = FlowParams {
                ring: self.rings[me],
                peer_ring: self.rings[1 - me],
                credit_limit: 1 << 20,
                peer_credit_limit: 1 << 20,
                pending_calls: self.pending,
                compact: self.compact,
            };
            let mut flow = Flow::new(&params).unwrap();
            flow.break_rule(self.broken_rule, &params);
            flow.use_one_generation();
            ModelPeer {
                flow,
                ring: self.rings[me],
                staged: vec![],
                link: VecDeque::new(),
                retained: vec![],
                unanswered: vec![],
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
            if next.post(me) {
                while next.post(me) {}
                each(next);
            }
            if !side.link.is_empty() {
                let mut next = state.clone();
                next.receive_batch(me, false)?;
                each(next);
                let mut next = state.clone();
                next.receive_batch(me, true)?;
                each(next);
            }
            for index in 0..side.retained.len() {
                let mut next = state.clone();
                next.release(me, index);
                each(next);
            }
            for index in 0..side.unanswered.len() {
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

    /// Visits every state, or as many as `limit`. Returns their number, or the first failure.
    pub(super) fn explore(&self, limit: usize) -> Result<usize, String> {
        let mut seen = HashSet::new();
        let mut idle_seen = HashSet::new();
        let mut stack = vec![self.initial_state()];
        seen.insert(stack[0].digest());
        while let Some(state) = stack.pop() {
            state.check()?;
            let mut idle = state.clone();
            idle.run_until_idle()?;
            idle.rebase();
            if idle_seen.insert(idle.digest()) {
                self.check_both_can_call(&idle)?;
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

    /// From an idle state on, both applications poll and release, and one side wants to call. It must be able to within a few
    /// rounds: both while the peer only replies, and while the peer calls as much as it can.
    fn check_both_can_call(&self, state: &State) -> Result<(), String> {
        for me in [0, 1] {
            for busy in [false, true] {
                for &(len, response) in self.calls {
                    let mut state = state.clone();
                    let mut rounds = 0;
                    while !state.call(me, len, response) {
                        while busy && state.call(1 - me, self.calls[0].0, self.calls[0].1) {}
                        state.round(1 - me)?;
                        // The peer uses whatever becomes free before this side tries again.
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
    fn call(&mut self, me: usize, len: usize, response: usize) -> bool {
        let side = &mut self.sides[me];
        let Ok((_, placement)) = side.flow.call(Content::Bytes, len, response, ()) else { return false };
        side.staged.push((placement.offset, placement.header));
        true
    }

    fn reply(&mut self, me: usize, index: usize) -> Result<(), String> {
        let side = &mut self.sides[me];
        let (token, len) = side.unanswered.remove(index);
        let placement = side.flow.reply(Content::Bytes, token, len).map_err(|refused| refused.to_string())?;
        side.staged.push((placement.offset, placement.header));
        Ok(())
    }

    fn release(&mut self, me: usize, index: usize) {
        let side = &mut self.sides[me];
        let space = side.retained.remove(index);
        side.flow.release(space);
    }

    fn post(&mut self, me: usize) -> bool {
        let side = &mut self.sides[me];
        let Some(write) = side.flow.next_write() else { return false };
        side.flow.write_posted(&write);
        let count = if write.kind() == WriteKind::Batch { write.metadata.message_count as usize } else { 0 };
        let headers = side.staged.drain(..count).collect();
        let batch = Batch { offset: write.offset, imm: write.imm, metadata: write.metadata, headers };
        self.sides[1 - me].link.push_back(batch);
        true
    }

    /// Receives a batch. Its requests are answered while they are current, if `at_once`; else they are retained.
    fn receive_batch(&mut self, me: usize, at_once: bool) -> Result<bool, String> {
        let ModelPeer { flow, link, staged, retained, unanswered, .. } = &mut self.sides[me];
        let Some(batch) = link.pop_front() else { return Ok(false) };
        let text = |violation: Violation| violation.to_string();
        flow.accept(batch.imm, &batch).map_err(text)?;
        while let Some(message) = flow.next_message(&batch).map_err(text)? {
            match message {
                Message::Request { reply_token, .. } => {
                    let longest = reply_token.max_len() as usize;
                    if at_once {
                        let reply = flow.reply(Content::Bytes, reply_token, longest);
                        let reply = reply.map_err(|refused| refused.to_string())?;
                        staged.push((reply.offset, reply.header));
                    } else {
                        retained.extend(flow.retain());
                        unanswered.push((reply_token, longest));
                    }
                }
                // Retaining responses would add nothing: retained requests already delay the consumer position.
                Message::Response { .. } => {}
            }
        }
        Ok(true)
    }

    /// A READ completes at once. A slower READ would return an older position, and batches already deliver those.
    fn read(&mut self, me: usize) -> Result<bool, String> {
        let word = self.sides[1 - me].flow.consumer_position();
        let flow = &mut self.sides[me].flow;
        let wanted = flow.needs_position_read();
        if wanted {
            flow.position_read_posted();
            flow.position_read_done(word).map_err(|violation| violation.to_string())?;
        }
        Ok(wanted)
    }

    /// One round of an application that polls, replies and releases.
    fn round(&mut self, me: usize) -> Result<bool, String> {
        let mut moved = false;
        while self.receive_batch(me, false)? {
            moved = true;
        }
        while !self.sides[me].retained.is_empty() {
            self.release(me, 0);
            moved = true;
        }
        while !self.sides[me].unanswered.is_empty() {
            self.reply(me, 0)?;
            moved = true;
        }
        moved |= self.read(me)?;
        while self.post(me) {
            moved = true;
        }
        Ok(moved)
    }

    /// Both applications poll, release and reply, and make no more calls. This must end.
    fn run_until_idle(&mut self) -> Result<(), String> {
        for _ in 0..40 {
            let moved = self.round(0)? | self.round(1)?;
            if !moved {
                return Ok(());
            }
        }
        Err("two idle sides exchange batches for ever".into())
    }

    fn check(&self) -> Result<(), String> {
        for me in [0, 1] {
            let flow = self.sides[me].flow.state();
            if !flow.invariant_holds() {
                return Err(format!("in_flight + 2R <= C is broken: {flow:?}"));
            }
            let mut peer = self.sides[1 - me].flow.clone();
            if self.sides[me].flow.remote_consumer() > peer.consumer_position() {
                return Err("a side believes that its peer has released more than it has".into());
            }
            if flow.credit_granted > self.sides[me].flow.credit_limit() {
                return Err("more credit granted than the limit".into());
            }
        }
        Ok(())
    }

    /// Counts positions from the last whole ring that neither side refers to any more. Consumer positions that are older than
    /// what is known have no effect; they become zero.
    fn rebase(&mut self) {
        let mut back = [0, 1].map(|me| {
            // What side `me` sends lies in its peer's ring.
            let peer = &self.sides[1 - me];
            let oldest = self.sides[me].flow.remote_consumer().min(peer.flow.oldest_announced());
            oldest & !(peer.ring - 1)
        });
        for me in [0, 1] {
            let side = &mut self.sides[me];
            let [sent, received] = back;
            let known = side.flow.remote_consumer();
            let news = |position: u64| if position <= known { 0 } else { position - sent };
            side.flow.consumer_position();
            side.flow.rebase(sent, received);
            side.retained.iter_mut().for_each(|space| space.rebase(received));
            for batch in &mut side.link {
                batch.metadata.consumer_pos = news(batch.metadata.consumer_pos);
            }
            back.reverse();
        }
    }

    /// States that differ only by an exchange of the two sides have the same digest.
    fn digest(&self) -> (u64, u64) {
        let [a, b] = [0, 1].map(|me| {
            let mut hasher = DefaultHasher::new();
            self.sides[me].hash(&mut hasher);
            hasher.finish()
        });
        (a.min(b), a.max(b))
    }
}

/// The smallest valid rings, all states: one call each way at a time, at every offset.
#[test]
fn both_sides_can_call_from_every_state_of_the_smallest_rings() {
    let model = Model { rings: [256, 256], pending: 1, calls: &[(0, 0)], compact: false, broken_rule: None };
    let limit = 5_000_000;
    let states = model.explore(limit).unwrap();
    std::println!("{states} states");
    assert!(
        (1_000_000..limit).contains(&states),
        "{states} states: the search was cut short, or visited hardly anything"
    );
}

/// Larger and unequal rings, calls of several sizes: there are too many states to visit all, so a limited number.
#[test]
fn both_sides_can_call_from_every_visited_state_of_larger_rings() {
    for (rings, calls) in [
        ([256, 512], &[(0, 0), (20, 20)][..]),
        ([512, 512], &[(0, 0), (84, 84)][..]),
        ([256, 1024], &[(20, 0), (10, 20)][..]),
    ] {
        for compact in [false, true] {
            let model = Model { rings, pending: 2, calls, compact, broken_rule: None };
            let states = model.explore(60_000).unwrap();
            std::println!("{states} states of {rings:?}, compact: {compact}");
        }
    }
}
