//! All members send messages of all sizes to each other, over packets that get lost, duplicated and reordered. Receivers are slow
//! and have little room.
//!
//! With nothing lost, duplicated or reordered the links are those of RC queue pairs: nothing is sent by time, and a sender is never refused. With
//! `restless` members stop for a while, several at once, and send queues are short.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crosstie_protocol::group::message::{
    COMBINED_MAX, COMBINED_PREFIX, Channel, OnGap, OnRefusal, Options, Outgoing, Received, SendCounters,
    SendRefusal, Verdict, part_at,
};
use crosstie_protocol::group::{GroupId, HEADER_SIZE, Header, MemberId, flags};

use crate::check::message::MessageChecker;
use crate::network::{Happening, Network};
use crate::outcome::Outcome;
use crate::plan::{Jitter, Plan};

const MTU: u32 = 2048;
const POLL: u64 = 0;
const RECEIVE: u64 = 1;
const FLUSH: u64 = 2;
const STOP: u64 = 3;
const CONTINUE: u64 = 4;
/// How often each member stops, and for how many latencies at most.
const STOPS: u64 = 3;
const LONGEST_STOP: u64 = 4000;
/// Latencies that a message between two members that run may take although others are stopped.
const LONGEST_WAIT: u64 = 400;
/// Packets on their way from one member to another, with `restless`.
const SEND_QUEUE: u32 = 6;

/// A message or a part of one, for the checker.
#[derive(Clone, Copy, Debug)]
struct Content {
    number: usize,
    offset: u32,
    len: u32,
}

/// What the bytes of a packet are: several messages in a combined packet, nothing in an answer.
type Contents = Vec<Content>;
type Packet = (Header, Contents);

/// A message that is being sent.
#[derive(Clone, Copy, Debug)]
struct Sending {
    to: usize,
    number: usize,
    len: u32,
    offset: u32,
}

struct Member {
    channel: Channel,
    /// The send buffer.
    sent: HashMap<u64, Contents>,
    /// For each other member.
    current: Vec<Option<Sending>>,
    left: u64,
    /// Accepted packets that the application has not taken.
    inbox: VecDeque<(usize, u64, Contents)>,
    /// Packets behind a missing one, by their entry of the receive buffer.
    held: HashMap<u64, Contents>,
    receives: bool,
    flushes: bool,
    alive: bool,
    gone: Vec<bool>,
    /// What happens when it continues, if it is stopped.
    missed: Option<VecDeque<Happening<Packet>>>,
    /// Packets to each other member that it has not received.
    posted: Vec<u32>,
    /// When its next poll is due by time.
    timer: u64,
}

struct Run {
    plan: Plan,
    network: Network<Packet>,
    members: Vec<Member>,
    checker: MessageChecker,
    packets: BTreeMap<&'static str, u64>,
    failures: Vec<String>,
    cut: Vec<bool>,
    is_lossless: bool,
}

pub(crate) fn run(plan: &Plan) -> Outcome {
    let is_lossless =
        plan.loss == 0.0 && plan.duplicates == 0.0 && plan.jitter == Jitter::None && !plan.partition;
    // Room for eight packets of each other member.
    let packets = 8 * (plan.members as u32 - 1);
    let options = Options {
        send_buffer: packets * (MTU + HEADER_SIZE as u32),
        send_table: packets,
        window: packets.min(16),
        receive_buffer: packets * MTU,
        receive_table: packets,
        ack_every: plan.ack_every.min(packets),
        combine_from: plan.combine_from,
        on_refusal: if plan.blind_retry { OnRefusal::Retry } else { OnRefusal::WaitForRequest },
        on_gap: if plan.go_back { OnGap::GoBack } else { OnGap::Selective },
        backoff: plan.latency_ns * 2,
        max_backoff: plan.latency_ns * 32,
        resend_after: if is_lossless { u64::MAX } else { plan.latency_ns * 8 },
        min_resend_after: if is_lossless { u64::MAX } else { plan.latency_ns * 4 },
        give_up_after: if is_lossless { u64::MAX } else { plan.latency_ns * 20_000 },
        ..Options::default()
    };
    let id = GroupId { group: 1, epoch: 1 };
    let member = |index: usize| Member {
        channel: Channel::new(id, 1, MemberId::new(index), plan.members, &options).expect("valid options"),
        sent: HashMap::new(),
        current: vec![None; plan.members],
        left: plan.operations,
        inbox: VecDeque::new(),
        held: HashMap::new(),
        receives: false,
        flushes: false,
        alive: true,
        gone: vec![false; plan.members],
        missed: None,
        posted: vec![0; plan.members],
        timer: u64::MAX,
    };
    let mut run = Run {
        plan: *plan,
        network: Network::new(plan),
        members: (0..plan.members).map(member).collect(),
        checker: MessageChecker::default(),
        packets: BTreeMap::new(),
        failures: Vec::new(),
        cut: vec![false; plan.members],
        is_lossless,
    };
    run.schedule_faults();
    for member in 0..plan.members {
        run.network.at(0, Happening::Timer { member, what: POLL });
    }
    while let Some(happening) = run.network.next() {
        run.handle_unless_stopped(happening);
    }
    run.finish()
}

impl Run {
    fn schedule_faults(&mut self) {
        let span = self.plan.latency_ns * 5 * self.plan.operations.min(200);
        for victim in 0..self.plan.deaths {
            let time = self.network.random.below(span);
            self.network.at(time, Happening::Death(victim));
        }
        if self.plan.restless {
            for member in (0..self.plan.members).flat_map(|member| (0..STOPS).map(move |_| member)) {
                let time = self.network.random.below(4 * span);
                self.network.at(time, Happening::Timer { member, what: STOP });
            }
        }
        if self.plan.partition {
            // Shorter than giving up takes: everything must arrive.
            (0..self.plan.members / 2).for_each(|member| self.cut[member] = true);
            let time = self.network.random.below(span);
            self.network.at(time, Happening::Cut);
            self.network.at(time + self.plan.latency_ns * 500, Happening::Healed);
        }
    }

    /// A member that is stopped does nothing until it continues.
    fn handle_unless_stopped(&mut self, happening: Happening<Packet>) {
        let now = self.network.now;
        match happening {
            Happening::Timer { member, what: STOP } => {
                let span = self.network.random.below(LONGEST_STOP * self.plan.latency_ns);
                if self.members[member].missed.is_none() {
                    self.members[member].missed = Some(VecDeque::new());
                    self.checker.stopped(member, now, now + span);
                    self.network.at(now + span, Happening::Timer { member, what: CONTINUE });
                }
            }
            Happening::Timer { member, what: CONTINUE } => {
                for happening in self.members[member].missed.take().into_iter().flatten() {
                    self.network.at(now, happening);
                }
            }
            Happening::Packet { to: member, .. }
            | Happening::Timer { member, .. }
            | Happening::Notice { member, .. } => match &mut self.members[member].missed {
                Some(missed) => missed.push_back(happening),
                None => self.handle(happening),
            },
            Happening::Death(_) | Happening::Cut | Happening::Healed => self.handle(happening),
        }
    }

    fn handle(&mut self, happening: Happening<Packet>) {
        match happening {
            Happening::Packet { from, to, packet } if self.members[to].alive => {
                self.receive(from, to, packet);
                self.complete_send(from, to);
            }
            Happening::Timer { member, what: POLL } if self.members[member].alive => self.poll(member),
            Happening::Timer { member, what: FLUSH } if self.members[member].alive => {
                self.members[member].flushes = false;
                self.answer(member, true);
            }
            Happening::Timer { member, .. } if self.members[member].alive => self.take_message(member),
            Happening::Death(member) => {
                self.members[member].alive = false;
                for peer in (0..self.members.len()).filter(|peer| *peer != member) {
                    let time = self.network.now + self.network.random.below(self.plan.latency_ns * 50);
                    self.network.at(time, Happening::Notice { member: peer, dead: member });
                }
            }
            Happening::Notice { member, dead } if self.members[member].alive => {
                let state = &mut self.members[member];
                state.channel.drop_peer(MemberId::new(dead));
                state.gone[dead] = true;
                state.current[dead] = None;
                state.posted[dead] = 0;
                self.poll(member);
            }
            Happening::Cut => self.network.cut = Some(self.cut.clone()),
            Happening::Healed => self.network.cut = None,
            Happening::Packet { .. } | Happening::Timer { .. } | Happening::Notice { .. } => {}
        }
    }

    /// A packet has left the send queue of `from`. It may have been full.
    fn complete_send(&mut self, from: usize, to: usize) {
        let posted = &mut self.members[from].posted[to];
        *posted = posted.saturating_sub(1);
        if *posted + 1 == SEND_QUEUE {
            let now = self.network.now;
            self.network.at(now, Happening::Timer { member: from, what: POLL });
        }
    }

    fn has_room(&self, from: usize, to: usize) -> bool {
        !self.has_short_queues() || self.members[from].posted[to] < SEND_QUEUE
    }

    /// A datagram leaves its send queue whether it arrives or not.
    fn has_short_queues(&self) -> bool {
        self.plan.restless && self.is_lossless
    }

    fn receive(&mut self, from: usize, to: usize, (header, contents): Packet) {
        let now = self.network.now;
        let member = &mut self.members[to];
        if member.gone[from] {
            return;
        }
        let len = body_len(&header, &contents);
        match member.channel.on_packet(&header, len, now) {
            Ok(Received::Data(Verdict::Accepted { entry, offset, .. })) => {
                self.accept(from, to, entry.number, offset, contents);
                self.accept_held(from, to);
                if !self.members[to].flushes {
                    self.members[to].flushes = true;
                    let time = now + self.plan.latency_ns;
                    self.network.at(time, Happening::Timer { member: to, what: FLUSH });
                }
                self.schedule_receive(to);
            }
            Ok(Received::Data(Verdict::Refused)) if self.is_lossless && !self.plan.blind_retry => {
                self.failures.push(format!("{now} ns: member {to} refuses {from}, which has credit"));
            }
            Ok(Received::Data(Verdict::Held { entry })) => {
                member.held.insert(entry.number, contents);
            }
            Ok(_) => {}
            Err(violation) => self.failures.push(format!("{now} ns: member {to} about {from}: {violation}")),
        }
        self.poll(to);
    }

    fn accept(&mut self, from: usize, to: usize, entry: u64, offset: u32, contents: Contents) {
        let expected = contents.first().map(|content| content.offset);
        if expected != Some(offset) {
            let now = self.network.now;
            self.failures.push(format!("{now} ns: offset {offset} instead of {expected:?}"));
        }
        self.members[to].inbox.push_back((from, entry, contents));
    }

    /// Packets that came early and whose turn has come now.
    fn accept_held(&mut self, from: usize, to: usize) {
        loop {
            let member = &mut self.members[to];
            match member.channel.receiver.next_held(MemberId::new(from)) {
                Ok(Some(next)) => {
                    let contents = member.held.remove(&next.entry.number).unwrap_or_default();
                    self.accept(from, to, next.entry.number, next.offset, contents);
                }
                Ok(None) => return,
                Err(error) => {
                    self.failures.push(format!("member {to} about {from}: {error}"));
                    return;
                }
            }
        }
    }

    /// The application takes one packet after some time.
    fn schedule_receive(&mut self, member: usize) {
        if !self.members[member].receives && !self.members[member].inbox.is_empty() {
            self.members[member].receives = true;
            let time = self.network.now + self.network.random.exponential(self.plan.latency_ns / 4);
            self.network.at(time, Happening::Timer { member, what: RECEIVE });
        }
    }

    fn take_message(&mut self, member: usize) {
        let now = self.network.now;
        self.members[member].receives = false;
        if let Some((from, entry, contents)) = self.members[member].inbox.pop_front() {
            for Content { number, offset, len } in contents {
                self.checker.arrived(now, from, member, number, offset, len);
            }
            self.members[member].channel.receiver.release(entry);
        }
        self.schedule_receive(member);
        self.poll(member);
    }

    /// One poll of a member: resends, new parts, answers.
    fn poll(&mut self, member: usize) {
        let now = self.network.now;
        self.members[member].channel.sender.expire(now);
        let is_short = self.has_short_queues();
        loop {
            let Member { channel, posted, .. } = &mut self.members[member];
            let has_room = |to: MemberId| !is_short || posted[to.index()] < SEND_QUEUE;
            let Some(outgoing) = channel.sender.next_outgoing_where(has_room) else { break };
            self.transmit_data(member, &outgoing);
        }
        self.send_new(member);
        self.answer(member, false);
        while let Some(peer) = self.members[member].channel.sender.next_unreachable() {
            self.failures.push(format!("{now} ns: member {member} gave up on {peer}"));
        }
        let state = &mut self.members[member];
        let sender = &state.channel.sender;
        state.sent.retain(|entry, _| sender.is_in_use(*entry));
        if let Some(deadline) = state.channel.sender.next_deadline()
            && (deadline < state.timer || state.timer <= now)
        {
            state.timer = deadline;
            self.network.at(deadline, Happening::Timer { member, what: POLL });
        }
    }

    /// Sends answers that are due; when `idle`, also acknowledgements that waited for more packets.
    fn answer(&mut self, member: usize, idle: bool) {
        if idle {
            self.members[member].channel.receiver.return_credit();
        }
        let mut waiting = Vec::new();
        while let Some(answer) = self.members[member].channel.receiver.next_answer(idle) {
            if !self.has_room(member, answer.to.index()) {
                waiting.push(answer);
                continue;
            }
            let header = self.members[member].channel.answer_header(&answer);
            self.transmit(member, answer.to.index(), (header, Vec::new()));
        }
        // The end of a packet on its way makes the member try again.
        for answer in waiting {
            self.members[member].channel.receiver.put_back(&answer);
        }
    }

    /// Sends what there is room for: to each other member one message at a time.
    fn send_new(&mut self, member: usize) {
        for to in 0..self.plan.members {
            self.go_on(member, to);
        }
        while let Some(to) = self.next_message(member) {
            self.go_on(member, to);
        }
    }

    fn go_on(&mut self, member: usize, to: usize) {
        while let Some(sending) = self.members[member].current[to] {
            match self.send_combined(member, &sending).or_else(|refusal| match refusal {
                None => self.send_part(member, &sending),
                Some(refusal) => Err(refusal),
            }) {
                Ok(()) => {}
                Err(SendRefusal::PeerGone) => self.members[member].current[to] = None,
                Err(_) => return,
            }
        }
    }

    /// Sends a small message with others. `Err(None)`: it travels alone.
    fn send_combined(&mut self, member: usize, sending: &Sending) -> Result<(), Option<SendRefusal>> {
        let (now, to) = (self.network.now, MemberId::new(sending.to));
        let state = &mut self.members[member];
        let is_small = sending.offset == 0 && sending.len <= COMBINED_MAX as u32;
        let place = match is_small {
            true => state.channel.sender.combine(to, 0, sending.len).map_err(Some)?,
            false => None,
        };
        if let Some(place) = &place {
            let content = Content { number: sending.number, offset: 0, len: sending.len };
            state.sent.entry(place.entry).or_default().push(content);
            state.current[sending.to] = None;
        }
        if place.is_none_or(|place| place.close)
            && let Some(outgoing) = state.channel.sender.close_packet(to, now)
        {
            self.transmit_data(member, &outgoing);
        }
        place.map(|_| ()).ok_or(None)
    }

    fn send_part(&mut self, member: usize, sending: &Sending) -> Result<(), SendRefusal> {
        let (now, to) = (self.network.now, MemberId::new(sending.to));
        let part = part_at(sending.len, sending.offset, MTU);
        let state = &mut self.members[member];
        let (outgoing, transmit) = state.channel.sender.send(to, part.len, part.flags, part.aux, now)?;
        let content = Content { number: sending.number, offset: part.offset, len: part.len };
        state.sent.insert(outgoing.entry, vec![content]);
        let end = part.offset + part.len;
        state.current[sending.to] = (end < sending.len).then_some(Sending { offset: end, ..*sending });
        if transmit {
            self.transmit_data(member, &outgoing);
        }
        Ok(())
    }

    fn transmit_data(&mut self, member: usize, outgoing: &Outgoing) {
        if !self.has_room(member, outgoing.to.index()) {
            self.members[member].channel.sender.put_back(outgoing);
            return;
        }
        let state = &mut self.members[member];
        let contents = state.sent.get(&outgoing.entry).cloned().unwrap_or_default();
        let header = state.channel.data_header(outgoing);
        if outgoing.len != body_len(&header, &contents) {
            self.failures.push(format!("{} ns: a packet without its messages", self.network.now));
        }
        self.transmit(member, outgoing.to.index(), (header, contents));
    }

    /// Starts a message to a random member, if that is not waiting for room already. Returns the member.
    fn next_message(&mut self, member: usize) -> Option<usize> {
        if self.members[member].left == 0 {
            return None;
        }
        let other = self.network.random.below(self.plan.members as u64 - 1) as usize;
        let mut to = if other >= member { other + 1 } else { other };
        // It goes on with others while one does not take its messages.
        let state = &self.members[member];
        let is_busy = |to: usize| to == member || (state.current[to].is_some() && !state.gone[to]);
        to = (0..self.plan.members).map(|step| (to + step) % self.plan.members).find(|to| !is_busy(*to))?;
        let is_gone = state.gone[to];
        self.members[member].left -= 1;
        let len = match self.network.random.below(4) {
            0 => 1 + self.network.random.below(10_000) as u32,
            _ => 64,
        };
        if is_gone {
            return self.next_message(member);
        }
        let number = self.checker.sent(self.network.now, member, to, len);
        self.members[member].current[to] = Some(Sending { to, number, len, offset: 0 });
        Some(to)
    }

    fn transmit(&mut self, from: usize, to: usize, packet: Packet) {
        *self.packets.entry(packet.0.kind.name()).or_default() += 1;
        self.members[from].posted[to] += 1;
        self.network.send(from, to, packet);
    }

    fn finish(mut self) -> Outcome {
        let alive: Vec<bool> = self.members.iter().map(|member| member.alive).collect();
        if self.is_lossless && self.plan.restless {
            self.checker.check_waits(LONGEST_WAIT * self.plan.latency_ns);
        }
        self.checker.finish(|member| !alive[member]);
        self.failures.append(&mut self.checker.failures);
        for (index, member) in self.members.iter().enumerate().filter(|(_, member)| member.alive) {
            if !member.channel.sender.is_idle()
                || member.current.iter().any(Option::is_some)
                || member.left > 0
            {
                self.failures.push(format!("member {index} never ends"));
            }
        }
        let now = self.network.now;
        let sum = |of: fn(&SendCounters) -> u64| {
            self.members.iter().map(|member| of(member.channel.sender.counters())).sum()
        };
        let (resent, combined) = (sum(|counters| counters.resent), sum(|counters| counters.combined));
        let lost = self.network.lost;
        let outcome = Outcome::new(&self.plan, now, self.checker.times, 0, self.packets, self.failures);
        Outcome { lost, resent, combined, ..outcome }
    }
}

/// Bytes of a packet behind its header.
fn body_len(header: &Header, contents: &[Content]) -> u32 {
    let prefix = if header.flags & flags::COMBINED != 0 { COMBINED_PREFIX as u32 } else { 0 };
    contents.iter().map(|content| prefix + content.len).sum()
}
