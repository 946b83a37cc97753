//! copyrpc's flow control: one server with a connection to each of many clients. Both ends of each connection call each other, with
//! rings that are much too small, and reply in any order.

use std::collections::{BTreeMap, HashMap};

use crosstie_protocol::copyrpc::{
    CallRefused, Content, Flow, FlowParams, Message, Refusal, ReplyToken, RetainedSpace,
};

use crate::network::{Happening, Network};
use crate::outcome::Outcome;
use crate::plan::Plan;

/// Timers: a reply that is due, or a message that the application releases.
const REPLY: u64 = 0;
const RELEASE: u64 = 1;
const MAX_REQUEST: u64 = 90;
const NUMBER: usize = 8;

/// What travels on a connection. All of it arrives in order.
#[derive(Clone, Debug)]
enum Packet {
    Write { offset: usize, bytes: Vec<u8>, imm: u32 },
    ReadPosition,
    Position(u64),
}

/// One end of a connection. Ends 2n and 2n + 1 belong together.
struct End {
    flow: Flow<u64>,
    staging: Vec<u8>,
    ring: Vec<u8>,
    left: u64,
    replies: Vec<(ReplyToken, u64)>,
    retained: Vec<RetainedSpace>,
}

struct Run {
    plan: Plan,
    network: Network<Packet>,
    ends: Vec<End>,
    /// Calls that have not ended: when they were made.
    calls: HashMap<u64, u64>,
    next_call: u64,
    times: Vec<u64>,
    packets: BTreeMap<&'static str, u64>,
    failures: Vec<String>,
}

pub(crate) fn run(plan: &Plan) -> Outcome {
    let sizes = [512u64, 1024, 512, 4096];
    let end = |index: usize| {
        let ring = |index: usize| sizes[index % sizes.len()];
        let params = FlowParams {
            ring: ring(index),
            peer_ring: ring(index ^ 1),
            credit_limit: 1 << 20,
            peer_credit_limit: 1 << 20,
            pending_calls: 8,
            compact: true,
        };
        End {
            flow: Flow::new(&params).expect("valid rings"),
            staging: vec![0; params.peer_ring as usize],
            ring: vec![0; params.ring as usize],
            left: plan.operations,
            replies: Vec::new(),
            retained: Vec::new(),
        }
    };
    let mut run = Run {
        plan: *plan,
        network: Network::new(plan),
        ends: (0..plan.members * 2).map(end).collect(),
        calls: HashMap::new(),
        next_call: 1,
        times: Vec::new(),
        packets: BTreeMap::new(),
        failures: Vec::new(),
    };
    (0..plan.members * 2).for_each(|end| run.poll(end));
    while let Some(happening) = run.network.next() {
        match happening {
            Happening::Packet { to, packet, .. } => run.receive(to, packet),
            Happening::Timer { member, what: REPLY } => run.reply(member),
            Happening::Timer { member, .. } => run.release(member),
            _ => {}
        }
    }
    run.finish()
}

impl Run {
    fn receive(&mut self, to: usize, packet: Packet) {
        match packet {
            Packet::Write { offset, bytes, imm } => {
                self.ends[to].ring[offset..offset + bytes.len()].copy_from_slice(&bytes);
                if let Err(violation) = self.take_batch(to, imm) {
                    self.failures.push(format!("{} ns: end {to}: {violation}", self.network.now));
                    return;
                }
            }
            Packet::ReadPosition => {
                let position = self.ends[to].flow.consumer_position();
                self.send(to, "read_response", Packet::Position(position));
                return;
            }
            Packet::Position(position) => {
                if let Err(violation) = self.ends[to].flow.position_read_done(position) {
                    self.failures.push(format!("{} ns: end {to}: {violation}", self.network.now));
                }
            }
        }
        self.poll(to);
    }

    fn take_batch(&mut self, to: usize, imm: u32) -> Result<(), crosstie_protocol::copyrpc::Violation> {
        let End { flow, ring, replies, retained, .. } = &mut self.ends[to];
        flow.accept(imm, ring.as_slice())?;
        let (mut requests, mut ended) = (0, Vec::new());
        while let Some(message) = flow.next_message(ring.as_slice())? {
            match message {
                Message::Request { reply_token, offset, .. } => {
                    replies.push((reply_token, number(&ring[offset..])));
                    retained.extend(flow.retain());
                    requests += 1;
                }
                Message::Response { user, offset, .. } => {
                    ended.push((user, number(&ring[offset..])));
                }
            }
        }
        for (call, answered) in ended {
            let now = self.network.now;
            match call.and_then(|call| self.calls.remove(&call)) {
                Some(since) if call == Some(answered) => self.times.push(now - since),
                _ => self.failures.push(format!("{now} ns: call {call:?} was answered as {answered}")),
            }
        }
        for _ in 0..requests {
            for what in [REPLY, RELEASE] {
                let time = self.network.now + self.network.random.exponential(self.plan.latency_ns * 2);
                self.network.at(time, Happening::Timer { member: to, what });
            }
        }
        Ok(())
    }

    /// Replies to any of the requests.
    fn reply(&mut self, end: usize) {
        let index = self.network.random.below(self.ends[end].replies.len() as u64) as usize;
        let (token, call) = self.ends[end].replies.swap_remove(index);
        let len = token.max_len().min(NUMBER as u64 + self.network.random.below(60)) as usize;
        let End { flow, staging, .. } = &mut self.ends[end];
        match flow.reply(Content::Bytes, token, len) {
            Ok(placement) => {
                staging[placement.offset..][..12].copy_from_slice(&placement.header.encode());
                staging[placement.payload_offset()..][..NUMBER].copy_from_slice(&call.to_le_bytes());
            }
            Err(error) => {
                self.failures.push(format!("{} ns: a reply found no room: {error}", self.network.now));
            }
        }
        self.poll(end);
    }

    fn release(&mut self, end: usize) {
        let index = self.network.random.below(self.ends[end].retained.len() as u64) as usize;
        let space = self.ends[end].retained.swap_remove(index);
        if !self.ends[end].flow.release(space) {
            self.failures.push(format!("{} ns: end {end}: a release was refused", self.network.now));
        }
        self.poll(end);
    }

    /// Calls as much as possible, and posts what there is.
    fn poll(&mut self, index: usize) {
        loop {
            self.call(index);
            let end = &mut self.ends[index];
            let Some(write) = end.flow.next_write() else { break };
            let bytes = write.bytes(&mut end.staging);
            end.flow.write_posted(&write);
            self.send(index, "write", Packet::Write { offset: write.offset, bytes, imm: write.imm });
        }
        let end = &mut self.ends[index];
        if end.flow.needs_position_read() {
            end.flow.position_read_posted();
            self.send(index, "read", Packet::ReadPosition);
        }
        let flow = self.ends[index].flow.state();
        if !flow.invariant_holds() {
            self.failures.push(format!("{} ns: end {index}: in_flight + 2R > C: {flow:?}", self.network.now));
        }
    }

    fn call(&mut self, index: usize) {
        while self.ends[index].left > 0 {
            let End { flow, staging, left, .. } = &mut self.ends[index];
            let len = NUMBER + self.network.random.below(MAX_REQUEST) as usize;
            let response = NUMBER + self.network.random.below(60) as usize;
            let (len, response) = (len.min(flow.max_request_len()), response.min(flow.max_response_len()));
            let placement = match flow.call(Content::Bytes, len, response, self.next_call) {
                Ok((_, placement)) => placement,
                Err(CallRefused {
                    cause: Refusal::TooLong { .. } | Refusal::ResponseTooLong { .. }, ..
                }) => {
                    self.failures.push(format!(
                        "{} ns: end {index}: a call of {len} bytes is too long",
                        self.network.now
                    ));
                    return;
                }
                // It ends: by a response, a batch of the peer, or a READ of its position.
                Err(_) => return,
            };
            staging[placement.offset..][..12].copy_from_slice(&placement.header.encode());
            staging[placement.payload_offset()..][..NUMBER].copy_from_slice(&self.next_call.to_le_bytes());
            *left -= 1;
            self.calls.insert(self.next_call, self.network.now);
            self.next_call += 1;
        }
    }

    fn send(&mut self, from: usize, kind: &'static str, packet: Packet) {
        *self.packets.entry(kind).or_default() += 1;
        self.network.send_in_order(from, from ^ 1, packet);
    }

    fn finish(mut self) -> Outcome {
        if !self.calls.is_empty() {
            self.failures.push(format!("{} calls never end", self.calls.len()));
        }
        for (index, end) in self.ends.iter().enumerate() {
            if end.left > 0 {
                self.failures.push(format!("end {index} waits for ever to make {} calls", end.left));
            }
        }
        let now = self.network.now;
        Outcome::new(&self.plan, now, self.times, 0, self.packets, self.failures)
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
