//! Two endpoints with real byte rings, joined by lossless in-order links whose delays the test chooses.
//!
//! Every failure is an error text: a violation, a lost or repeated call, wrong bytes, a broken invariant.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::format;
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

use super::super::wire::CompactHead;
use super::super::*;
use super::BrokenRule;

pub(super) type Outcome = Result<(), String>;

pub(super) struct Pair {
    pub(super) sides: [PairPeer; 2],
    next_call: u64,
    pub(super) broken_rule: Option<BrokenRule>,
}

pub(super) struct PairPeer {
    pub(super) endpoint: Endpoint<u64>,
    ring: Vec<u8>,
    staging: Vec<u8>,
    /// WRITEs that the peer has posted and that have not arrived. A payload that was posted directly has no immediate.
    link: VecDeque<(usize, Vec<u8>, Option<u32>)>,
    /// WRITEs that have arrived and whose completion was not polled.
    completions: VecDeque<u32>,
    /// Calls of the peer in the order in which they must arrive.
    expected: VecDeque<(u64, u32)>,
    /// Calls of this side without a response, with the longest response that they allow. The bytes of a response
    /// identify its call.
    waiting: Vec<(u64, u32)>,
    pub(super) held: Vec<(HeldSpace, usize, Vec<u8>)>,
    pub(super) unanswered: Vec<(ReplyToken, u64)>,
    /// The word that the peer can READ.
    word: u64,
    reading: Option<Option<u64>>,
    pub(super) answered: u64,
    /// Posted WRITEs by `RingWriteKind`.
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
            let mut endpoint = Endpoint::new(&params).unwrap();
            endpoint.break_rule(broken_rule, &params);
            PairPeer {
                endpoint,
                ring: vec![0xee; rings[me] as usize],
                staging: vec![0xdd; rings[1 - me] as usize],
                link: VecDeque::new(),
                completions: VecDeque::new(),
                expected: VecDeque::new(),
                waiting: Vec::new(),
                held: Vec::new(),
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
    pub(super) fn call(&mut self, me: usize, len: u32, response_len: u32) -> Result<bool, String> {
        let number = self.next_call;
        let side = &mut self.sides[me];
        let before = side.endpoint.flow_state();
        if self.broken_rule.is_none() {
            check_call_alone(&side.endpoint, len, response_len, number);
        }
        let direct = number.is_multiple_of(3) && side.endpoint.can_send_payload_directly();
        match side.endpoint.call(len, response_len, number) {
            Ok((_, placement)) => {
                self.next_call += 1;
                side.waiting.push((number, response_len));
                self.write(me, &placement, &pattern(number, 1, len as usize), direct);
                self.sides[1 - me].expected.push_back((number, len));
                Ok(true)
            }
            Err((refusal, user)) => {
                if user != number || side.endpoint.flow_state() != before {
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
        let mut len = (token.max_len() * share.min(256) / 256) as u32;
        let too_long = (token.max_len() + 1) as u32;
        let token = if self.broken_rule == Some(BrokenRule::LongReplies) {
            len = too_long;
            token
        } else {
            let before = side.endpoint.flow_state();
            match side.endpoint.reply(token, too_long) {
                Err((ReplyError::TooLong { .. }, token)) if side.endpoint.flow_state() == before => token,
                other => return Err(format!("a reply longer than allowed: {other:?}")),
            }
        };
        if self.broken_rule.is_none() {
            check_reply_alone(&side.endpoint, &token, len);
        }
        let direct = number.is_multiple_of(5) && side.endpoint.can_send_payload_directly();
        let placement = side.endpoint.reply(token, len).map_err(|(error, _)| error.to_string())?;
        self.write(me, &placement, &pattern(number, 2, len as usize), direct);
        Ok(())
    }

    /// Writes a message to the staging ring. If `direct`, only its header goes there and its payload goes to the link.
    fn write(&mut self, me: usize, placement: &Placement, payload: &[u8], direct: bool) {
        let side = &mut self.sides[me];
        write(&mut side.staging, placement.offset, &placement.header.encode());
        if direct {
            side.endpoint.payload_sent_directly(placement);
            self.sides[1 - me].link.push_back((placement.payload_offset(), payload.to_vec(), None));
        } else {
            write(&mut side.staging, placement.payload_offset(), payload);
        }
    }

    pub(super) fn release(&mut self, me: usize, index: usize) -> Outcome {
        let side = &mut self.sides[me];
        let (space, offset, bytes) = side.held.swap_remove(index);
        if side.ring[offset..][..bytes.len()] != bytes {
            return Err("a message changed before it was released".into());
        }
        let again = space.duplicate();
        if !side.endpoint.release(space) && self.broken_rule != Some(BrokenRule::ReleaseOnParse) {
            return Err("a held message was not held".into());
        }
        if side.endpoint.release(again) {
            return Err("a message was released twice".into());
        }
        Ok(())
    }

    /// Posts the next WRITE. Returns false if there is nothing to post.
    pub(super) fn post(&mut self, me: usize) -> bool {
        let side = &mut self.sides[me];
        let mut shortcut = side.endpoint.clone();
        let compact = shortcut.open_compact();
        assert_same_flow(&shortcut, &side.endpoint);
        let Some(next) = side.endpoint.next_write() else { return false };
        assert_eq!(side.endpoint.next_write(), Some(next), "the same until it is posted");
        let bytes = next.bytes(&mut side.staging);
        side.endpoint.write_posted();
        if let Some(compact) = compact.filter(|_| self.broken_rule.is_none()) {
            assert_same_write(&compact, &next);
            shortcut.compact_posted(&compact);
            assert_eq!(shortcut.next_write(), None, "nothing else is left to post");
            assert_same_flow(&shortcut, &side.endpoint);
        }
        side.writes[next.kind as usize] += 1;
        self.sides[1 - me].link.push_back((next.offset, bytes, Some(next.imm)));
        true
    }

    /// The device refuses the next WRITE for now: it stays the next one to post.
    pub(super) fn fail_post(&mut self, me: usize) -> Outcome {
        let endpoint = &mut self.sides[me].endpoint;
        let refused = endpoint.next_write();
        if endpoint.next_write() != refused {
            return Err("a WRITE that was not posted changed".into());
        }
        Ok(())
    }

    /// The oldest WRITE to this side arrives.
    pub(super) fn deliver_write(&mut self, me: usize) -> Outcome {
        let side = &mut self.sides[me];
        let Some((offset, bytes, imm)) = side.link.pop_front() else { return Ok(()) };
        for (_, held, copy) in &side.held {
            let header = held - wire::HEADER_SIZE;
            if offset < held + copy.len() && header < offset + bytes.len() {
                return Err("a WRITE overwrote a message that is held".into());
            }
        }
        write(&mut side.ring, offset, &bytes);
        side.completions.extend(imm);
        Ok(())
    }

    /// Takes the oldest completion, and publishes the consumer position.
    pub(super) fn poll(&mut self, me: usize) -> Outcome {
        let side = &mut self.sides[me];
        let PairPeer { endpoint, ring, staging, completions, expected, waiting, held, unanswered, .. } = side;
        if let Some(imm) = completions.pop_front() {
            let text = |violation: Violation| violation.to_string();
            check_accept_compact(endpoint, imm, ring);
            endpoint.accept_batch(imm, ring.as_slice()).map_err(text)?;
            while let Some(message) = next_message(endpoint, ring.as_slice()).map_err(text)? {
                match message {
                    ReceivedMessage::Request(request) => {
                        let (number, len) = expected.pop_front().ok_or("a request that nobody made")?;
                        let bytes = ring[request.offset..][..request.len].to_vec();
                        if bytes != pattern(number, 1, len as usize) {
                            return Err(format!("request {number} has wrong bytes"));
                        }
                        // Some requests are answered while they are lent.
                        if number.is_multiple_of(4) && self.broken_rule.is_none() {
                            let len = (request.reply_token.max_len() / 2) as u32;
                            let reply = endpoint.reply(request.reply_token, len);
                            let reply = reply.map_err(|(error, _)| error.to_string())?;
                            write(staging, reply.offset, &reply.header.encode());
                            write(staging, reply.payload_offset(), &pattern(number, 2, len as usize));
                            continue;
                        }
                        held.push((endpoint.hold().ok_or("not lent")?, request.offset, bytes));
                        unanswered.push((request.reply_token, number));
                    }
                    ReceivedMessage::Response(response) => {
                        let number = response.user.ok_or("a response without a caller")?;
                        let at = waiting.iter().position(|(n, _)| *n == number);
                        waiting.swap_remove(at.ok_or_else(|| format!("call {number} answered twice"))?);
                        let bytes = ring[response.offset..][..response.len].to_vec();
                        if bytes != pattern(number, 2, response.len) {
                            return Err(format!("the response to {number} has wrong bytes"));
                        }
                        if !number.is_multiple_of(3) || self.broken_rule.is_some() {
                            held.push((endpoint.hold().ok_or("not lent")?, response.offset, bytes));
                        }
                        side.answered += 1;
                    }
                }
            }
        }
        side.word = side.endpoint.consumer_position();
        Ok(())
    }

    /// One stage of a READ: it is posted, it samples the peer's word, it completes.
    pub(super) fn read(&mut self, me: usize) -> Outcome {
        let word = self.sides[1 - me].word;
        let side = &mut self.sides[me];
        match side.reading {
            None if side.endpoint.needs_position_read() => {
                side.endpoint.position_read_posted();
                side.reading = Some(None);
                side.reads += 1;
            }
            None => {}
            Some(None) => side.reading = Some(Some(word)),
            Some(Some(word)) => {
                side.reading = None;
                side.endpoint.position_read_done(word).map_err(|violation| violation.to_string())?;
            }
        }
        Ok(())
    }

    /// What holds after every step.
    pub(super) fn check(&mut self) -> Outcome {
        for me in [0, 1] {
            let flow = self.sides[me].endpoint.flow_state();
            if !flow.invariant_holds() {
                return Err(format!("in_flight + 2R <= C is broken at side {me}: {flow:?}"));
            }
            if self.sides[me].endpoint.remote_consumer() > self.sides[1 - me].endpoint.consumer_position() {
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
                moved |= self.sides[me].reading.is_some() || self.sides[me].endpoint.needs_position_read();
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
            moved |= !self.sides[me].held.is_empty() || !self.sides[me].unanswered.is_empty();
            while !self.sides[me].held.is_empty() {
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
                let endpoint = &self.sides[me].endpoint;
                (endpoint.max_request_len(), endpoint.max_response_len())
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
            let (a, b) = (self.sides[me].endpoint.flow_state(), self.sides[1 - me].endpoint.flow_state());
            if a.pending != 0 || a.reserved != b.balance {
                return Err(format!("credit leaked between side {me} {a:?} and its peer {b:?}"));
            }
        }
        Ok(())
    }
}

/// A call that can go out alone has the same effect whether or not it is placed first, and is refused for the same reasons.
fn check_call_alone(endpoint: &Endpoint<u64>, len: u32, response_len: u32, user: u64) {
    let (mut alone, mut placed) = (endpoint.clone(), endpoint.clone());
    let is_idle = endpoint.has_no_calls()
        && endpoint.open_batch_messages() == 0
        && endpoint.can_send_payload_directly();
    let write = alone.call_alone(len as usize, response_len as usize);
    assert_same_flow(&alone, endpoint);
    let mut appended = endpoint.clone();
    let joined = appended.append_call(len as usize, response_len as usize, u32::MAX, user);
    let (call, placement) = match placed.call(len, response_len, user) {
        Ok(called) => called,
        Err((refusal, user)) => {
            let is_same = joined == Err((Some(refusal), user));
            assert!(is_same || joined == Err((None, user)), "{joined:?}, but {refusal:?}");
            assert_same_flow(&appended, if is_same { &placed } else { endpoint });
            return assert_eq!(write, None);
        }
    };
    if joined.is_ok() {
        assert_eq!(joined, Ok((call, placement)));
        assert_same_flow(&appended, &placed);
    } else {
        assert_eq!(joined, Err((None, user)));
        assert_same_flow(&appended, endpoint);
        let is_sealed = !placed.can_send_payload_directly();
        assert!(endpoint.open_batch_messages() == 0 || is_sealed, "it fits into the open batch");
    }
    let next = placed.next_write().unwrap();
    let Some(write) = write else { return assert!(!is_idle || next.compact.is_none()) };
    assert!(is_idle);
    assert_eq!(alone.call_posted(&write, user), call);
    assert_eq!(placement.payload_offset(), write.payload_offset());
    assert_same_write(&write, &next);
    placed.write_posted();
    assert_same_flow(&alone, &placed);
}

/// A reply that can go out alone has the same effect whether or not it is placed first.
fn check_reply_alone(endpoint: &Endpoint<u64>, token: &ReplyToken, len: u32) {
    let (mut alone, mut placed) = (endpoint.clone(), endpoint.clone());
    let (mut appended, mut replied) = (endpoint.clone(), endpoint.clone());
    let joined = appended.append_reply(token.duplicate(), len as usize, u32::MAX);
    let placement = replied.reply(token.duplicate(), len).unwrap();
    if joined.is_ok() {
        assert_eq!(joined, Ok(placement));
        assert_same_flow(&appended, &replied);
    } else {
        assert_same_flow(&appended, endpoint);
        let is_sealed = !replied.can_send_payload_directly();
        assert!(endpoint.open_batch_messages() == 0 || is_sealed, "it fits into the open batch");
    }
    let too_long = alone.append_reply(token.duplicate(), token.max_len() as usize + 1, u32::MAX);
    if endpoint.open_batch_messages() == 0 {
        assert_eq!(too_long, Err((None, token.duplicate())));
    }
    assert_eq!(too_long.map_err(|(_, token)| token), Err(token.duplicate()));
    if !alone.is_last_reply(token) {
        return;
    }
    let Some(write) = alone.reply_alone(token, len as usize, &mut None) else { return };
    alone.reply_posted(token.duplicate(), &write);
    let placement = placed.reply(token.duplicate(), len).unwrap();
    assert_eq!(placement.payload_offset(), write.payload_offset());
    let next = placed.next_write().unwrap();
    assert_same_write(&write, &next);
    placed.write_posted();
    assert_same_flow(&alone, &placed);
}

/// A compact batch has the same effect whether it is accepted in one step or in three, and is refused for the same reason.
pub(super) fn check_accept_compact<U: Clone + Debug + PartialEq>(
    endpoint: &Endpoint<U>,
    imm: u32,
    ring: &[u8],
) {
    if imm & wire::COMPACT_FLAG == 0 {
        return;
    }
    let (mut at_once, mut in_steps) = (endpoint.clone(), endpoint.clone());
    let accepted = in_steps.accept_batch(imm, ring).and_then(|()| in_steps.next_message(ring));
    let head = CompactHead::from_numbers(ring.load_words(endpoint.next_offset()));
    let payload_len = imm & !wire::COMPACT_FLAG;
    let message = at_once.accept_compact(payload_len, &head);
    check_try_accept(endpoint, payload_len, &head, &message, &at_once);
    let expected = match accepted {
        Ok(Some(ReceivedMessage::Request(ReceivedRequest { reply_token, .. }))) => {
            CompactMessage::Request { reply_token }
        }
        Ok(Some(ReceivedMessage::Response(ReceivedResponse { user, .. }))) => {
            CompactMessage::Response { user }
        }
        Ok(None) => unreachable!("a compact batch has a message"),
        Err(violation) => return assert_eq!(message, Err(violation)),
    };
    assert_eq!(message, Ok(expected));
    in_steps.pass();
    assert_same_flow(&at_once, &in_steps);
}

/// The short ways to accept a compact batch do the same as the long one, or nothing.
fn check_try_accept<U: Clone + Debug + PartialEq>(
    before: &Endpoint<U>,
    payload_len: u32,
    head: &CompactHead,
    expected: &Result<CompactMessage<U>, Violation>,
    after: &Endpoint<U>,
) {
    let mut tried = before.clone();
    let request = tried.try_accept_request(payload_len, head);
    let message = match request {
        Some(reply_token) => Some(CompactMessage::Request { reply_token }),
        None => {
            assert_eq!(&tried, before);
            let user = tried.try_accept_response(payload_len, head);
            user.map(|user| CompactMessage::Response { user })
        }
    };
    match message {
        Some(message) => {
            assert_eq!(Ok(message), *expected);
            assert_same_flow(&tried, after);
        }
        None => {
            assert_eq!(&tried, before);
            let is_free = before.clone().consumer_position() == before.received_position();
            assert!(expected.is_err() || !is_free || !before.is_consumer_known(), "{expected:?}");
        }
    }
}

/// Asks for the next message. The short way does the same as the long one, or nothing.
pub(super) fn next_message<U: Clone + Debug + PartialEq, B: RingBytes + ?Sized>(
    endpoint: &mut Endpoint<U>,
    ring: &B,
) -> Result<Option<ReceivedMessage<U>>, Violation> {
    let (before, mut tried) = (endpoint.clone(), endpoint.clone());
    let usual = tried.next_usual_message(ring);
    let message = endpoint.next_message(ring);
    match (usual, &message) {
        (
            Some(UsualMessage::Request { offset, len, reply_token }),
            Ok(Some(ReceivedMessage::Request(request))),
        ) => {
            assert_eq!(request, &ReceivedRequest { offset, len, bulk: false, reply_token });
            assert_eq!(&tried, endpoint);
        }
        (
            Some(UsualMessage::Response { user, offset, len }),
            Ok(Some(ReceivedMessage::Response(response))),
        ) => {
            let call = response.call;
            assert_eq!(response, &ReceivedResponse { call, user, offset, len, bulk: false });
            assert_eq!(&tried, endpoint);
        }
        (None, _) => {
            assert_eq!(tried, before);
            let (offset, bulk) = match &message {
                Ok(Some(ReceivedMessage::Request(request))) => (request.offset, request.bulk),
                Ok(Some(ReceivedMessage::Response(response))) => (response.offset, response.bulk),
                Ok(None) | Err(_) => return message,
            };
            let is_compact = offset % wire::ALIGNMENT as usize == wire::COMPACT_HEAD_SIZE;
            // Bytes behind the last message.
            let fails_next = endpoint.clone().next_message(ring).is_err();
            assert!(bulk || is_compact || fails_next, "{message:?} is a usual message");
        }
        (usual, _) => panic!("{usual:?} is not {message:?}"),
    }
    message
}

fn assert_same_write(compact: &CompactWrite, write: &RingWrite) {
    assert_eq!((Some(compact.head), compact.imm), (write.compact, write.imm));
    assert_eq!((compact.offset, compact.payload_offset()), (write.offset, write.payload_offset()));
    assert_eq!(compact.payload_len + wire::COMPACT_HEAD_SIZE, write.len);
}

/// Compares all but what is left of writes that were posted.
fn assert_same_flow<U: Clone + Debug + PartialEq>(one: &Endpoint<U>, other: &Endpoint<U>) {
    let [one, other] = [one, other].map(|endpoint| {
        let mut endpoint = endpoint.clone();
        endpoint.consumer_position();
        endpoint.rebase(0, 0);
        endpoint
    });
    assert_eq!(one, other);
}
