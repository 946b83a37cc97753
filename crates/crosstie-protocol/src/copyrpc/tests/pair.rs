//! Two flows with real byte rings, joined by lossless in-order links whose delays the test chooses.
//!
//! Every failure is an error text: a violation, a lost or repeated call, wrong bytes, a broken invariant.

use std::collections::VecDeque;
use std::format;
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

use super::super::wire::{COMPACT_FLAG, COMPACT_HEAD_SIZE};
use super::super::*;
use super::BrokenRule;

pub(super) type Outcome = Result<(), String>;

pub(super) struct Pair {
    pub(super) sides: [PairPeer; 2],
    next_call: u64,
    pub(super) broken_rule: Option<BrokenRule>,
}

pub(super) struct PairPeer {
    pub(super) flow: Flow<u64>,
    ring: Vec<u8>,
    staging: Vec<u8>,
    /// WRITEs that the peer has posted and that have not arrived. A payload that was posted directly has no immediate.
    link: VecDeque<(usize, Vec<u8>, Option<u32>)>,
    /// WRITEs that have arrived and whose completion was not polled.
    completions: VecDeque<u32>,
    /// Calls of the peer in the order in which they must arrive.
    expected: VecDeque<(u64, usize)>,
    /// Calls of this side without a response, with the longest response that they allow. The bytes of a response
    /// identify its call.
    waiting: Vec<(u64, usize)>,
    pub(super) retained: Vec<(RetainedSpace, usize, Vec<u8>)>,
    pub(super) unanswered: Vec<(ReplyToken, u64)>,
    /// The word that the peer can READ.
    word: u64,
    reading: Option<Option<u64>>,
    pub(super) answered: u64,
    /// Posted WRITEs by `WriteKind`.
    pub(super) writes: [u64; 3],
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
    pub(super) fn new(
        rings: [u64; 2],
        limits: [u64; 2],
        pending_calls: usize,
        broken_rule: Option<BrokenRule>,
    ) -> Self {
        let side = |me: usize| {
            let params = FlowParams {
                ring: rings[me],
                peer_ring: rings[1 - me],
                credit_limit: limits[me],
                peer_credit_limit: limits[1 - me],
                pending_calls,
                // One side sends compact batches, the other does not.
                compact: me == 0,
            };
            let mut flow = Flow::new(&params).unwrap();
            flow.break_rule(broken_rule, &params);
            PairPeer {
                flow,
                ring: vec![0xee; rings[me] as usize],
                staging: vec![0xdd; rings[1 - me] as usize],
                link: VecDeque::new(),
                completions: VecDeque::new(),
                expected: VecDeque::new(),
                waiting: Vec::new(),
                retained: Vec::new(),
                unanswered: Vec::new(),
                word: 0,
                reading: None,
                answered: 0,
                writes: [0; 3],
                reads: 0,
            }
        };
        Pair { sides: [side(0), side(1)], next_call: 1, broken_rule }
    }

    /// Makes a call. `Ok(false)`: refused for now.
    pub(super) fn call(&mut self, me: usize, len: usize, response_len: usize) -> Result<bool, String> {
        let number = self.next_call;
        let side = &mut self.sides[me];
        let before = side.flow.state();
        let direct = number.is_multiple_of(3) && side.flow.can_send_payload_directly();
        match side.flow.call(Content::Bytes, len, response_len, number) {
            Ok((_, placement)) => {
                self.next_call += 1;
                side.waiting.push((number, response_len));
                self.write(me, &placement, &pattern(number, 1, len), direct);
                self.sides[1 - me].expected.push_back((number, len));
                Ok(true)
            }
            Err(CallRefused { cause: refusal, user }) => {
                if user != number || side.flow.state() != before {
                    return Err(format!("refusal {refusal} changed the state"));
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
        let (token, number) = side.unanswered.remove(index);
        let mut len = (token.max_len() * share.min(256) / 256) as usize;
        let too_long = (token.max_len() + 1) as usize;
        let token = if self.broken_rule == Some(BrokenRule::LongReplies) {
            len = too_long;
            token
        } else {
            let before = side.flow.state();
            match side.flow.reply(Content::Bytes, token, too_long) {
                Err(ReplyRefused { cause: ReplyError::TooLong { .. }, token })
                    if side.flow.state() == before =>
                {
                    token
                }
                other => return Err(format!("a reply longer than allowed: {other:?}")),
            }
        };
        let direct = number.is_multiple_of(5) && side.flow.can_send_payload_directly();
        let placement = side.flow.reply(Content::Bytes, token, len).map_err(|refused| refused.to_string())?;
        self.write(me, &placement, &pattern(number, 2, len), direct);
        Ok(())
    }

    /// Writes a message to the staging ring. If `direct`, only its header goes there and its payload goes to the link.
    fn write(&mut self, me: usize, placement: &Placement, payload: &[u8], direct: bool) {
        let side = &mut self.sides[me];
        write(&mut side.staging, placement.offset, &placement.header.encode());
        if direct {
            side.flow.payload_sent_directly(placement);
            self.sides[1 - me].link.push_back((placement.payload_offset(), payload.to_vec(), None));
        } else {
            write(&mut side.staging, placement.payload_offset(), payload);
        }
    }

    pub(super) fn release(&mut self, me: usize, index: usize) -> Outcome {
        let side = &mut self.sides[me];
        let (space, offset, bytes) = side.retained.swap_remove(index);
        if side.ring[offset..][..bytes.len()] != bytes {
            return Err("a message changed before it was released".into());
        }
        let again = space.duplicate();
        if !side.flow.release(space) && self.broken_rule != Some(BrokenRule::ReleaseOnParse) {
            return Err("a retained message was not retained".into());
        }
        if side.flow.release(again) {
            return Err("a message was released twice".into());
        }
        Ok(())
    }

    /// Posts the next WRITE. Returns false if there is nothing to post.
    pub(super) fn post(&mut self, me: usize) -> bool {
        let side = &mut self.sides[me];
        let Some(next) = side.flow.next_write() else { return false };
        assert_eq!(side.flow.next_write(), Some(next), "the same until it is posted");
        let bytes = next.bytes(&mut side.staging);
        side.flow.write_posted(&next);
        side.writes[next.kind() as usize] += 1;
        self.sides[1 - me].link.push_back((next.offset, bytes, Some(next.imm)));
        true
    }

    /// The device refuses the next WRITE for now: it stays the next one to post.
    pub(super) fn fail_post(&mut self, me: usize) -> Outcome {
        let flow = &mut self.sides[me].flow;
        let refused = flow.next_write();
        if flow.next_write() != refused {
            return Err("a WRITE that was not posted changed".into());
        }
        Ok(())
    }

    /// The oldest WRITE to this side arrives.
    pub(super) fn deliver_write(&mut self, me: usize) -> Outcome {
        let side = &mut self.sides[me];
        let Some((offset, bytes, imm)) = side.link.pop_front() else { return Ok(()) };
        for (_, retained, copy) in &side.retained {
            let header = retained - wire::HEADER_SIZE;
            if offset < retained + copy.len() && header < offset + bytes.len() {
                return Err("a WRITE overwrote a message that is retained".into());
            }
        }
        write(&mut side.ring, offset, &bytes);
        side.completions.extend(imm);
        Ok(())
    }

    /// Takes the oldest completion, and publishes the consumer position.
    pub(super) fn poll(&mut self, me: usize) -> Outcome {
        let side = &mut self.sides[me];
        let PairPeer { flow, ring, staging, completions, expected, waiting, retained, unanswered, .. } = side;
        if let Some(imm) = completions.pop_front() {
            let text = |violation: Violation| violation.to_string();
            let offset = flow.announced_batch(0).start;
            // The bytes of some compact batches come with the completion. The ring has others by the time they are looked at.
            let inline = imm & COMPACT_FLAG != 0 && imm.is_multiple_of(2);
            let copy = ring[offset..].iter().copied().take(64).collect::<Vec<u8>>();
            let front = copy.as_slice().load_words(0);
            match inline {
                true => flow.accept(imm, &front).map_err(text)?,
                false => flow.accept(imm, ring.as_slice()).map_err(text)?,
            }
            while let Some(message) = flow.next_message(ring.as_slice()).map_err(text)? {
                let (Message::Request { offset: at, len, .. } | Message::Response { offset: at, len, .. }) =
                    message;
                let bytes = ring[at..][..len].to_vec();
                if inline {
                    if at != offset + COMPACT_HEAD_SIZE || bytes != copy[COMPACT_HEAD_SIZE..][..len] {
                        return Err(format!("the payload of a compact batch is at {at}"));
                    }
                    flow.finish_message();
                }
                match message {
                    Message::Request { reply_token, .. } => {
                        let (number, made) = expected.pop_front().ok_or("a request that nobody made")?;
                        if len != made || bytes != pattern(number, 1, len) {
                            return Err(format!("request {number} has wrong bytes"));
                        }
                        // Some requests are answered while they are current.
                        if number.is_multiple_of(4) && self.broken_rule.is_none() {
                            let len = (reply_token.max_len() / 2) as usize;
                            let reply = flow.reply(Content::Bytes, reply_token, len);
                            let reply = reply.map_err(|refused| refused.to_string())?;
                            write(staging, reply.offset, &reply.header.encode());
                            write(staging, reply.payload_offset(), &pattern(number, 2, len));
                            continue;
                        }
                        retained.extend(flow.retain().map(|space| (space, at, bytes)));
                        unanswered.push((reply_token, number));
                    }
                    Message::Response { user, .. } => {
                        let number = user.ok_or("a response without a caller")?;
                        let at_call = waiting.iter().position(|(n, _)| *n == number);
                        waiting.swap_remove(at_call.ok_or_else(|| format!("call {number} answered twice"))?);
                        if bytes != pattern(number, 2, len) {
                            return Err(format!("the response to {number} has wrong bytes"));
                        }
                        if !number.is_multiple_of(3) || self.broken_rule.is_some() {
                            retained.extend(flow.retain().map(|space| (space, at, bytes)));
                        }
                        side.answered += 1;
                    }
                }
            }
        }
        side.word = side.flow.consumer_position();
        Ok(())
    }

    /// One stage of a READ: it is posted, it samples the peer's word, it completes.
    pub(super) fn read(&mut self, me: usize) -> Outcome {
        let word = self.sides[1 - me].word;
        let side = &mut self.sides[me];
        match side.reading {
            None if side.flow.needs_position_read() => {
                side.flow.position_read_posted();
                side.reading = Some(None);
                side.reads += 1;
            }
            None => {}
            Some(None) => side.reading = Some(Some(word)),
            Some(Some(word)) => {
                side.reading = None;
                side.flow.position_read_done(word).map_err(|violation| violation.to_string())?;
            }
        }
        Ok(())
    }

    /// What holds after every step.
    pub(super) fn check(&mut self) -> Outcome {
        for me in [0, 1] {
            let flow = self.sides[me].flow.state();
            if !flow.invariant_holds() {
                return Err(format!("in_flight + 2R <= C is broken at side {me}: {flow:?}"));
            }
            if self.sides[me].flow.remote_consumer() > self.sides[1 - me].flow.consumer_position() {
                return Err(format!("side {me} believes that its peer has released more than it has"));
            }
        }
        Ok(())
    }

    /// Both sides poll, release and reply until nothing happens any more.
    pub(super) fn run_until_idle(&mut self) -> Outcome {
        for _ in 0..10_000 {
            if !self.round()? {
                return Ok(());
            }
        }
        Err("two idle sides exchange batches for ever".into())
    }

    /// One round of both sides. `false`: nothing happened.
    pub(super) fn round(&mut self) -> Result<bool, String> {
        let mut moved = false;
        for me in [0, 1] {
            while self.post(me) {
                moved = true;
                self.check()?;
            }
            for _ in 0..3 {
                moved |= self.sides[me].reading.is_some() || self.sides[me].flow.needs_position_read();
                self.read(me)?;
            }
            moved |= !self.sides[me].link.is_empty() || !self.sides[me].completions.is_empty();
            while !self.sides[me].link.is_empty() {
                self.deliver_write(me)?;
            }
            loop {
                let more = !self.sides[me].completions.is_empty();
                self.poll(me)?;
                self.check()?;
                if !more {
                    break;
                }
            }
            moved |= !self.sides[me].retained.is_empty() || !self.sides[me].unanswered.is_empty();
            while !self.sides[me].retained.is_empty() {
                self.release(me, 0)?;
            }
            while !self.sides[me].unanswered.is_empty() {
                self.reply(me, 0, 256)?;
                self.check()?;
            }
        }
        Ok(moved)
    }

    /// Both sides become idle, every call is answered, and then both sides can make the largest possible call.
    pub(super) fn finish(&mut self) -> Outcome {
        self.run_until_idle()?;
        for me in [0, 1] {
            let side = &self.sides[me];
            if !side.waiting.is_empty() || !side.expected.is_empty() {
                return Err(format!("{} calls of side {me} were never answered", side.waiting.len()));
            }
        }
        for me in [0, 1, 0, 1, 0, 1] {
            let (len, response) = {
                let flow = &self.sides[me].flow;
                (flow.max_request_len(), flow.max_response_len())
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
        self.run_until_idle()?;
        for me in [0, 1] {
            let (a, b) = (self.sides[me].flow.state(), self.sides[1 - me].flow.state());
            if a.pending != 0 || a.credit_granted != b.credit_available {
                return Err(format!("credit leaked between side {me} {a:?} and its peer {b:?}"));
            }
        }
        Ok(())
    }
}
