//! The members of a group with their links, for scenarios with locks and barriers.
//!
//! Without loss, packets travel over links that keep the order, as RC queue pairs do. With loss, each member has a message channel
//! that carries them, as over UD.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crosstie_protocol::group::message::{Channel, Options, Received, Verdict};
use crosstie_protocol::group::{
    CONTROL_STREAM, Config, Control, Event, Group, GroupId, Header, LockState, MemberId, MemberSet, Output,
    TreeOptions,
};

use crate::network::{Happening, Network};
use crate::plan::Plan;

/// How long a member takes to hear of a death, in latencies.
const NOTICE_LATENCIES: u64 = 50;
/// When unacknowledged packets are sent again, and when the peer counts as dead, in latencies.
const RESEND_LATENCIES: u64 = 8;
const GIVE_UP_LATENCIES: u64 = 2_000;
/// Bytes of a control packet in the channel. Only the number of places matters here.
const SPACE: u32 = 1;
/// Timers below this number belong to the scenario.
const STREAM_TIMER: u64 = 1 << 62;
const GROUP_TIMER: u64 = STREAM_TIMER + 1;

/// A packet on the virtual network.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    /// Over a link that keeps the order.
    InOrder(Control),
    /// A packet of the channel; data packets carry a control packet.
    Stream(Header, Option<Control>),
    /// Tells a member that it was declared dead.
    Expelled,
}

/// What happened, as the scenario sees it.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time")]
pub(crate) enum Seen {
    /// A member's group has an event for its application.
    Event(usize, Event),
    /// A control packet reached a member. For checkers.
    Arrived { to: usize, from: usize, packet: Control },
    /// A timer of the scenario.
    Timer { member: usize, what: u64 },
    /// A member died.
    Died(usize),
}

struct Member {
    group: Group,
    stream: Option<Stream>,
    alive: bool,
    timer: u64,
}

/// Control packets in a channel of messages.
struct Stream {
    channel: Channel,
    /// The send buffer: the driver owns the bytes.
    sent: HashMap<u64, Control>,
    /// Packets behind a missing one, by their entry of the receive buffer.
    held: HashMap<u64, Control>,
    backlog: Vec<VecDeque<Control>>,
    timer: u64,
}

/// What one call of a group produced.
#[derive(Default)]
pub(crate) struct Collected {
    packets: Vec<(MemberId, Control)>,
    events: Vec<Event>,
}

impl Output for Collected {
    fn send(&mut self, to: MemberId, packet: &Control) {
        self.packets.push((to, *packet));
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// All members and the network between them.
pub(crate) struct Cluster {
    pub(crate) network: Network<Packet>,
    plan: Plan,
    members: Vec<Member>,
    seen: VecDeque<Seen>,
    pub(crate) packets: BTreeMap<&'static str, u64>,
    pub(crate) failures: Vec<String>,
    /// The members that the plan cuts off.
    pub(crate) cut: Vec<bool>,
}

impl Cluster {
    pub(crate) fn new(plan: &Plan, barrier_members: MemberSet) -> Self {
        let id = GroupId { group: 1, epoch: 1 };
        let options = Options {
            send_table: 64.max(plan.members as u32 * 2),
            window: 16,
            receive_table: 4096,
            ack_every: 4,
            resend_after: plan.latency_ns * RESEND_LATENCIES,
            give_up_after: plan.latency_ns * GIVE_UP_LATENCIES,
            backoff: plan.latency_ns,
            max_backoff: plan.latency_ns * 16,
            ..Options::default()
        };
        let member = |index: usize| {
            let me = MemberId::new(index);
            let config = Config {
                locks: plan.locks,
                barrier_members,
                tree: TreeOptions { fanout: plan.fanout, ..TreeOptions::default() },
                needs_quorum: plan.partition,
                ..Config::new(me, plan.members)
            };
            let stream = || Stream {
                channel: Channel::new(id, CONTROL_STREAM, me, plan.members, &options).expect("valid options"),
                sent: HashMap::new(),
                held: HashMap::new(),
                backlog: vec![VecDeque::new(); plan.members],
                timer: u64::MAX,
            };
            Member {
                group: Group::new(&config).expect("a plan that was checked"),
                stream: plan.is_lossy().then(stream),
                alive: true,
                timer: u64::MAX,
            }
        };
        let mut cluster = Cluster {
            network: Network::new(plan),
            plan: *plan,
            members: (0..plan.members).map(member).collect(),
            seen: VecDeque::new(),
            packets: BTreeMap::new(),
            failures: Vec::new(),
            cut: vec![false; plan.members],
        };
        cluster.schedule_faults();
        cluster
    }

    /// Deaths and the partition happen somewhere in the first part of the run.
    fn schedule_faults(&mut self) {
        let plan = self.plan;
        let span = plan.latency_ns * 20 * plan.operations.min(200);
        let mut victims: Vec<usize> = (0..plan.members).collect();
        for _ in 0..plan.deaths {
            let index = self.network.random.below(victims.len() as u64) as usize;
            let victim = victims.swap_remove(index);
            let time = self.network.random.below(span);
            self.network.at(time, Happening::Death(victim));
        }
        if plan.partition {
            let minority = 1 + self.network.random.below((plan.members as u64 - 1) / 2) as usize;
            for _ in 0..minority {
                let index = self.network.random.below(victims.len() as u64) as usize;
                self.cut[victims.swap_remove(index)] = true;
            }
            let time = self.network.random.below(span);
            self.network.at(time, Happening::Cut);
            let end = time + plan.latency_ns * GIVE_UP_LATENCIES * 3;
            self.network.at(end, Happening::Healed);
        }
    }

    pub(crate) fn is_alive(&self, member: usize) -> bool {
        self.members[member].alive
    }

    /// Whether the member has given up its place in the queue of a lock, but is still in the queue.
    pub(crate) fn has_abandoned_place(&self, member: usize, lock: u32) -> bool {
        self.members[member].group.lock_state(lock) == Some(LockState::Abandoned)
    }

    /// Lets a member's application do something with its group.
    pub(crate) fn act<T>(
        &mut self,
        member: usize,
        action: impl FnOnce(&mut Group, &mut Collected) -> T,
    ) -> T {
        let mut out = Collected::default();
        let result = action(&mut self.members[member].group, &mut out);
        self.apply(member, out);
        result
    }

    pub(crate) fn timer(&mut self, member: usize, after: u64, what: u64) {
        let time = self.network.now + after;
        self.network.at(time, Happening::Timer { member, what });
    }

    /// What happens next, or `None` at the end of the run.
    pub(crate) fn next(&mut self) -> Option<Seen> {
        loop {
            if let Some(seen) = self.seen.pop_front() {
                return Some(seen);
            }
            match self.network.next()? {
                Happening::Packet { from, to, packet } if self.members[to].alive => {
                    self.receive(from, to, packet);
                }
                Happening::Timer { member, what } if self.members[member].alive => match what {
                    STREAM_TIMER => self.poll_stream(member),
                    GROUP_TIMER => {
                        let now = self.network.now;
                        self.members[member].timer = u64::MAX;
                        self.act(member, |group, out| group.expire(now, out));
                    }
                    what => return Some(Seen::Timer { member, what }),
                },
                Happening::Death(member) => {
                    self.members[member].alive = false;
                    for peer in (0..self.members.len()).filter(|peer| *peer != member) {
                        let after = self.network.random.below(self.plan.latency_ns * NOTICE_LATENCIES);
                        let time = self.network.now + after;
                        self.network.at(time, Happening::Notice { member: peer, dead: member });
                    }
                    return Some(Seen::Died(member));
                }
                Happening::Notice { member, dead } if self.members[member].alive => {
                    self.note_death(member, dead)
                }
                Happening::Cut => self.cut_off(),
                Happening::Healed => self.network.cut = None,
                Happening::Packet { .. } | Happening::Timer { .. } | Happening::Notice { .. } => {}
            }
        }
    }

    /// The minority is cut off. Both sides notice that the other is silent, as heartbeats would show it, even if they have nothing to
    /// send.
    fn cut_off(&mut self) {
        self.network.cut = Some(self.cut.clone());
        for member in 0..self.members.len() {
            for dead in 0..self.members.len() {
                if self.cut[member] != self.cut[dead] {
                    let after = self.network.random.below(self.plan.latency_ns * NOTICE_LATENCIES);
                    let time = self.network.now + self.plan.latency_ns * GIVE_UP_LATENCIES + after;
                    self.network.at(time, Happening::Notice { member, dead });
                }
            }
        }
    }

    fn note_death(&mut self, member: usize, dead: usize) {
        self.act(member, |group, out| group.member_died(MemberId::new(dead), out));
    }

    /// Sends packets and keeps events of a group.
    fn apply(&mut self, member: usize, out: Collected) {
        for (to, packet) in out.packets {
            *self.packets.entry(packet.kind().name()).or_default() += 1;
            match &mut self.members[member].stream {
                None => self.network.send_in_order(member, to.index(), Packet::InOrder(packet)),
                Some(stream) => stream.backlog[to.index()].push_back(packet),
            }
        }
        for event in out.events {
            if let Event::MemberDied(dead) = event
                && let Some(stream) = &mut self.members[member].stream
            {
                stream.channel.drop_peer(dead);
                stream.backlog[dead.index()].clear();
            }
            self.seen.push_back(Seen::Event(member, event));
        }
        if self.members[member].stream.is_some() {
            self.poll_stream(member);
        }
        if let Some(deadline) = self.members[member].group.next_deadline()
            && deadline < self.members[member].timer
        {
            self.members[member].timer = deadline;
            self.network.at(deadline, Happening::Timer { member, what: GROUP_TIMER });
        }
    }

    fn receive(&mut self, from: usize, to: usize, packet: Packet) {
        let sender = MemberId::new(from);
        if self.members[to].group.dead().contains(sender) {
            if !matches!(packet, Packet::Expelled) {
                self.network.send(to, from, Packet::Expelled);
            }
            return;
        }
        match packet {
            Packet::InOrder(control) => self.deliver(from, to, control),
            Packet::Expelled => self.deliver(from, to, Control::Expelled),
            Packet::Stream(header, control) => {
                let now = self.network.now;
                let Some(stream) = &mut self.members[to].stream else { return };
                match stream.channel.on_packet(&header, SPACE, now) {
                    Ok(Received::Data(Verdict::Accepted { entry, .. })) => {
                        stream.channel.receiver.release(entry.number);
                        if let Some(control) = control {
                            self.deliver(from, to, control);
                        }
                        self.deliver_held(from, to);
                    }
                    Ok(Received::Data(Verdict::Held { entry })) => {
                        stream.held.extend(control.map(|control| (entry.number, control)));
                    }
                    Ok(_) => {}
                    Err(violation) => self.failures.push(format!("member {to}: {violation}")),
                }
                self.poll_stream(to);
            }
        }
    }

    /// Packets that came early and whose turn has come now.
    fn deliver_held(&mut self, from: usize, to: usize) {
        while let Some(stream) = &mut self.members[to].stream {
            match stream.channel.receiver.next_held(MemberId::new(from)) {
                Ok(Some(next)) => {
                    stream.channel.receiver.release(next.entry.number);
                    if let Some(control) = stream.held.remove(&next.entry.number) {
                        self.deliver(from, to, control);
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.failures.push(format!("member {to}: {error}"));
                    return;
                }
            }
        }
    }

    fn deliver(&mut self, from: usize, to: usize, control: Control) {
        self.seen.push_back(Seen::Arrived { to, from, packet: control });
        let mut violation = None;
        self.act(to, |group, out| {
            violation = group.on_packet(MemberId::new(from), &control, out).err();
        });
        if let Some(violation) = violation {
            self.failures.push(format!("member {to} refuses {control:?} of member {from}: {violation}"));
        }
    }

    /// One poll of a member's channel.
    fn poll_stream(&mut self, member: usize) {
        let now = self.network.now;
        let Some(stream) = &mut self.members[member].stream else { return };
        stream.timer = u64::MAX;
        stream.channel.sender.expire(now);
        let mut packets = Vec::new();
        while let Some(outgoing) = stream.channel.sender.next_outgoing() {
            let control = stream.sent.get(&outgoing.entry).copied();
            packets.push((outgoing.to, Packet::Stream(stream.channel.data_header(&outgoing), control)));
        }
        for to in 0..stream.backlog.len() {
            while let Some(control) = stream.backlog[to].front().copied() {
                let to = MemberId::new(to);
                let Ok((outgoing, transmit)) =
                    stream.channel.sender.send(to, SPACE, Channel::WHOLE, SPACE, now)
                else {
                    break;
                };
                stream.backlog[to.index()].pop_front();
                stream.sent.insert(outgoing.entry, control);
                if transmit {
                    packets.push((to, Packet::Stream(stream.channel.data_header(&outgoing), Some(control))));
                }
            }
        }
        stream.channel.receiver.return_credit();
        while let Some(answer) = stream.channel.receiver.next_answer(true) {
            packets.push((answer.to, Packet::Stream(stream.channel.answer_header(&answer), None)));
        }
        let mut unreachable = Vec::new();
        while let Some(peer) = stream.channel.sender.next_unreachable() {
            unreachable.push(peer.index());
        }
        let sender = &stream.channel.sender;
        stream.sent.retain(|entry, _| sender.is_in_use(*entry));
        if let Some(deadline) = stream.channel.sender.next_deadline() {
            stream.timer = deadline;
            self.network.at(deadline, Happening::Timer { member, what: STREAM_TIMER });
        }
        for (to, packet) in packets {
            self.network.send(member, to.index(), packet);
        }
        for dead in unreachable {
            self.note_death(member, dead);
        }
    }
}
