//! Two endpoints with real byte rings, joined by lossless in-order links whose delays the test chooses.
//!
//! Whatever goes wrong is an error text: a violation, a lost or doubled call, foreign bytes, a broken invariant.

use std::collections::VecDeque;
use std::format;
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

use super::super::*;
use super::Trap;

pub(super) type Outcome = Result<(), String>;

pub(super) struct Pair {
    pub(super) sides: [Side; 2],
    next_call: u64,
    pub(super) trap: Option<Trap>,
}

pub(super) struct Side {
    pub(super) endpoint: Endpoint<u64>,
    ring: Vec<u8>,
    staging: Vec<u8>,
    /// Posted by the peer, not landed. Payloads that travel by themselves have no immediate.
    link: VecDeque<(usize, Vec<u8>, Option<u32>)>,
    /// Landed, completion not polled.
    completions: VecDeque<u32>,
    /// Calls of the peer in the order in which they must arrive.
    expected: VecDeque<(u64, u32)>,
    /// Calls of this side without an answer, with the longest response they allow. Responses say their call's number
    /// by their pattern.
    waiting: Vec<(u64, u32)>,
    pub(super) held: Vec<(Held, usize, Vec<u8>)>,
    pub(super) owed: Vec<(Owed, u64)>,
    /// What the peer can READ.
    word: u64,
    reading: Option<Option<u64>>,
    pub(super) answered: u64,
    pub(super) emitted: [u64; 3],
    pub(super) reads: u64,
}

fn pattern(call: u64, salt: u64, len: usize) -> Vec<u8> {
    let mut state = call.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt;
    let mut byte = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    (0..len).map(|_| byte()).collect()
}

fn write(memory: &mut [u8], offset: usize, bytes: &[u8]) {
    memory[offset..][..bytes.len()].copy_from_slice(bytes);
}

impl Pair {
    pub(super) fn new(rings: [u64; 2], limits: [u64; 2], pending_calls: usize, trap: Option<Trap>) -> Self {
        let side = |me: usize| {
            let terms = Terms {
                ring: rings[me],
                peer_ring: rings[1 - me],
                credit_limit: limits[me],
                peer_credit_limit: limits[1 - me],
                pending_calls,
            };
            let mut endpoint = Endpoint::new(&terms).unwrap();
            endpoint.reopen(trap, &terms);
            Side {
                endpoint,
                ring: vec![0xee; rings[me] as usize],
                staging: vec![0xdd; rings[1 - me] as usize],
                link: VecDeque::new(),
                completions: VecDeque::new(),
                expected: VecDeque::new(),
                waiting: Vec::new(),
                held: Vec::new(),
                owed: Vec::new(),
                word: 0,
                reading: None,
                answered: 0,
                emitted: [0; 3],
                reads: 0,
            }
        };
        Pair { sides: [side(0), side(1)], next_call: 1, trap }
    }

    /// `Ok(false)`: refused for now.
    pub(super) fn call(&mut self, me: usize, len: u32, response_len: u32) -> Result<bool, String> {
        let number = self.next_call;
        let side = &mut self.sides[me];
        let before = side.endpoint.ledger();
        let detached = number.is_multiple_of(3) && side.endpoint.can_detach();
        match side.endpoint.call(len, response_len, number) {
            Ok((_, placed)) => {
                self.next_call += 1;
                side.waiting.push((number, response_len));
                self.write(me, &placed, &pattern(number, 1, len as usize), detached);
                self.sides[1 - me].expected.push_back((number, len));
                Ok(true)
            }
            Err((refusal, user)) => {
                if user != number || side.endpoint.ledger() != before {
                    return Err(format!("refusal {refusal} changed something"));
                }
                match refusal {
                    Refusal::RingFull | Refusal::NoCredit | Refusal::TooManyCalls => Ok(false),
                    other => Err(other.to_string()),
                }
            }
        }
    }

    /// Replies to the `index`th request with `share`/256 of what it allows.
    pub(super) fn reply(&mut self, me: usize, index: usize, share: u64) -> Outcome {
        let side = &mut self.sides[me];
        let (owed, number) = side.owed.remove(index);
        let mut len = (owed.max_len() * share.min(256) / 256) as u32;
        let too_long = (owed.max_len() + 1) as u32;
        let owed = if self.trap == Some(Trap::LongReplies) {
            len = too_long;
            owed
        } else {
            let before = side.endpoint.ledger();
            match side.endpoint.reply(owed, too_long) {
                Err((ReplyError::TooLong { .. }, owed)) if side.endpoint.ledger() == before => owed,
                other => return Err(format!("a reply longer than allowed: {other:?}")),
            }
        };
        let detached = number.is_multiple_of(5) && side.endpoint.can_detach();
        let placed = side.endpoint.reply(owed, len).map_err(|(error, _)| error.to_string())?;
        self.write(me, &placed, &pattern(number, 2, len as usize), detached);
        Ok(())
    }

    /// Writes a message to the staging ring or, `detached`, its header there and its payload to the link.
    fn write(&mut self, me: usize, placed: &Placed, payload: &[u8], detached: bool) {
        let side = &mut self.sides[me];
        write(&mut side.staging, placed.offset, &placed.header.encode());
        if detached {
            side.endpoint.detach(placed);
            self.sides[1 - me].link.push_back((placed.payload_offset(), payload.to_vec(), None));
        } else {
            write(&mut side.staging, placed.payload_offset(), payload);
        }
    }

    pub(super) fn release(&mut self, me: usize, index: usize) -> Outcome {
        let side = &mut self.sides[me];
        let (held, offset, bytes) = side.held.swap_remove(index);
        if side.ring[offset..][..bytes.len()] != bytes {
            return Err("a message changed before it was released".into());
        }
        let again = held.duplicate();
        if !side.endpoint.release(held) && self.trap != Some(Trap::CreditOnParse) {
            return Err("a held message was not held".into());
        }
        if side.endpoint.release(again) {
            return Err("a message was released twice".into());
        }
        Ok(())
    }

    /// Posts what is next, if anything. `false`: nothing was.
    pub(super) fn emit(&mut self, me: usize) -> bool {
        let side = &mut self.sides[me];
        let Some(emit) = side.endpoint.emit() else { return false };
        assert_eq!(side.endpoint.emit(), Some(emit), "until it is posted it is the same");
        write(&mut side.staging, emit.offset, &emit.metadata.encode());
        let bytes = side.staging[emit.offset..][..emit.len].to_vec();
        side.endpoint.posted();
        side.emitted[emit.kind as usize] += 1;
        self.sides[1 - me].link.push_back((emit.offset, bytes, Some(emit.imm)));
        true
    }

    /// A post failed for good: everything unposted is undone. Calls end, replies are owed again.
    pub(super) fn rollback(&mut self, me: usize) -> Outcome {
        let [a, b] = &mut self.sides;
        let (side, peer) = if me == 0 { (a, b) } else { (b, a) };
        let Side { endpoint, staging, waiting, owed, .. } = side;
        let mut error = None;
        let mut again = Vec::new();
        let before = endpoint.ledger();
        endpoint.rollback(staging.as_slice(), |undone| match undone {
            Undone::Call(Some(number)) => {
                waiting.retain(|(n, _)| *n != number);
                let at = peer.expected.iter().position(|(n, _)| *n == number);
                if at.and_then(|at| peer.expected.remove(at)).is_none() {
                    error = Some(format!("call {number} was undone after it arrived"));
                }
            }
            Undone::Call(None) => error = Some("an undone call had lost its user".into()),
            Undone::Reply(reply) => again.push(reply),
        });
        for reply in again {
            let id = reply.call_id();
            let number = peer.endpoint.attached(id).ok_or("a reply to nothing was undone")?;
            owed.push((reply, number));
        }
        let after = endpoint.ledger();
        if after.in_flight > before.in_flight || after.balance < before.balance {
            return Err("a rollback took something".into());
        }
        error.map_or(Ok(()), Err)
    }

    /// The oldest WRITE to this side lands.
    pub(super) fn land(&mut self, me: usize) -> Outcome {
        let side = &mut self.sides[me];
        let Some((offset, bytes, imm)) = side.link.pop_front() else { return Ok(()) };
        for (_, held, copy) in &side.held {
            let header = held - wire::HEADER_SIZE;
            if offset < held + copy.len() && header < offset + bytes.len() {
                return Err("a WRITE landed on a message that is held".into());
            }
        }
        write(&mut side.ring, offset, &bytes);
        side.completions.extend(imm);
        Ok(())
    }

    /// Takes the oldest completion, and publishes the consumer position.
    pub(super) fn poll(&mut self, me: usize) -> Outcome {
        let side = &mut self.sides[me];
        let Side { endpoint, ring, completions, expected, waiting, held, owed, .. } = side;
        if let Some(imm) = completions.pop_front() {
            let text = |violation: Violation| violation.to_string();
            endpoint.arrive(imm, ring.as_slice()).map_err(text)?;
            while let Some(arrival) = endpoint.next(ring.as_slice()).map_err(text)? {
                match arrival {
                    Arrival::Request(request) => {
                        let (number, len) = expected.pop_front().ok_or("a request that nobody made")?;
                        let bytes = ring[request.offset..][..request.len].to_vec();
                        if bytes != pattern(number, 1, len as usize) {
                            return Err(format!("request {number} has other bytes"));
                        }
                        held.push((request.held, request.offset, bytes));
                        owed.push((request.owed, number));
                    }
                    Arrival::Response(response) => {
                        let number = response.user.ok_or("a response without a caller")?;
                        let at = waiting.iter().position(|(n, _)| *n == number);
                        waiting.swap_remove(at.ok_or_else(|| format!("call {number} answered twice"))?);
                        let bytes = ring[response.offset..][..response.len].to_vec();
                        if bytes != pattern(number, 2, response.len) {
                            return Err(format!("the response to {number} has other bytes"));
                        }
                        held.push((response.held, response.offset, bytes));
                        side.answered += 1;
                    }
                }
            }
        }
        side.word = side.endpoint.consumer();
        Ok(())
    }

    /// One stage of a READ: post, sample the peer's word, complete.
    pub(super) fn read(&mut self, me: usize) -> Outcome {
        let word = self.sides[1 - me].word;
        let side = &mut self.sides[me];
        match side.reading {
            None if side.endpoint.wants_read() => {
                side.endpoint.read_posted();
                side.reading = Some(None);
                side.reads += 1;
            }
            None => {}
            Some(None) => side.reading = Some(Some(word)),
            Some(Some(word)) => {
                side.reading = None;
                side.endpoint.read_done(word).map_err(|violation| violation.to_string())?;
            }
        }
        Ok(())
    }

    /// What holds after every step.
    pub(super) fn check(&mut self) -> Outcome {
        for me in [0, 1] {
            let ledger = self.sides[me].endpoint.ledger();
            if !ledger.holds() {
                return Err(format!("in_flight + 2R <= C is broken at side {me}: {ledger:?}"));
            }
            if self.sides[me].endpoint.remote_consumer() > self.sides[1 - me].endpoint.consumer() {
                return Err(format!("side {me} believes that its peer has released more than it has"));
            }
        }
        Ok(())
    }

    /// Both sides poll, release and reply until nothing moves any more.
    pub(super) fn settle(&mut self) -> Outcome {
        for _ in 0..10_000 {
            if !self.round()? {
                return Ok(());
            }
        }
        Err("two idle sides exchange batches for ever".into())
    }

    /// One fair round. `false`: nothing happened.
    pub(super) fn round(&mut self) -> Result<bool, String> {
        let mut moved = false;
        for me in [0, 1] {
            while self.emit(me) {
                moved = true;
                self.check()?;
            }
            for _ in 0..3 {
                moved |= self.sides[me].reading.is_some() || self.sides[me].endpoint.wants_read();
                self.read(me)?;
            }
            moved |= !self.sides[me].link.is_empty() || !self.sides[me].completions.is_empty();
            while !self.sides[me].link.is_empty() {
                self.land(me)?;
            }
            loop {
                let more = !self.sides[me].completions.is_empty();
                self.poll(me)?;
                self.check()?;
                if !more {
                    break;
                }
            }
            moved |= !self.sides[me].held.is_empty() || !self.sides[me].owed.is_empty();
            while !self.sides[me].held.is_empty() {
                self.release(me, 0)?;
            }
            while !self.sides[me].owed.is_empty() {
                self.reply(me, 0, 256)?;
                self.check()?;
            }
        }
        Ok(moved)
    }

    /// Everything ends, every call is answered, and then the largest call there is can be made on both sides.
    pub(super) fn finish(&mut self) -> Outcome {
        self.settle()?;
        for me in [0, 1] {
            let side = &self.sides[me];
            if !side.waiting.is_empty() || !side.expected.is_empty() {
                return Err(format!("{} calls of side {me} were never answered", side.waiting.len()));
            }
        }
        for me in [0, 1, 0, 1, 0, 1] {
            let (len, response) = {
                let endpoint = &self.sides[me].endpoint;
                (endpoint.longest_request(), endpoint.longest_response())
            };
            let mut tries = 0;
            while !self.call(me, len, response)? {
                self.round()?;
                tries += 1;
                if tries > 20 {
                    return Err(format!("side {me} can never make its longest call again"));
                }
            }
            self.check()?;
        }
        self.settle()?;
        for me in [0, 1] {
            let (a, b) = (self.sides[me].endpoint.ledger(), self.sides[1 - me].endpoint.ledger());
            if a.pending != 0 || a.reserved != b.balance {
                return Err(format!("credit leaked between side {me} {a:?} and its peer {b:?}"));
            }
        }
        Ok(())
    }
}
