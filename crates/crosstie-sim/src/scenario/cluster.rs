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
/// How long a member pauses: longer than every time limit.
const PAUSE_LATENCIES: u64 = 3 * GIVE_UP_LATENCIES;
/// Timers below this number belong to the scenario.
const STREAM_TIMER: u64 = 1 << 62;
const GROUP_TIMER: u64 = STREAM_TIMER + 1;
/// Timers from here on are what the plan does to a member.
const PAUSE_TIMER: u64 = STREAM_TIMER + 2;
const RESUME_TIMER: u64 = STREAM_TIMER + 3;
const EXPEL_TIMER: u64 = STREAM_TIMER + 4;
/// Some member dies: which one, is decided when it happens.
const SOME_DEATH_TIMER: u64 = STREAM_TIMER + 5;

/// A packet on the virtual network.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    /// Over a link that keeps the order, with the view of its sender.
    InOrder(u16, Control),
    /// A packet of the channel; data packets carry a control packet.
    Stream(Header, Option<(u16, Control)>),
    /// Tells a member that it was declared dead.
    Expelled,
}

/// What happened, as the scenario sees it.
#[derive(Debug)]
pub(crate) enum Seen {
    /// A member's group has an event for its application.
    Event(usize, Event),
    /// A control packet reached a member. For checkers.
    Arrived { to: usize, from: usize, packet: Control },
    /// A timer of the scenario.
    Timer { member: usize, what: u64 },
    /// A member died.
    Died(usize),
    /// The others may count a member as dead from now on, although it lives.
    Excused(usize),
}

struct Member {
    group: Group,
    stream: Option<Stream>,
    alive: bool,
    /// What happens to the member while it pauses.
    paused: Option<VecDeque<Happening<Packet>>>,
    /// The deaths that this member alone was told.
    told: Vec<usize>,
    timer: u64,
}

/// Control packets in a channel of messages.
struct Stream {
    channel: Channel,
    /// The send buffer: the driver owns the bytes.
    sent: HashMap<u64, (u16, Control)>,
    /// Packets behind a missing one, by their entry of the receive buffer.
    held: HashMap<u64, (u16, Control)>,
    backlog: Vec<VecDeque<(u16, Control)>>,
    timer: u64,
}

/// What one call of a group produced.
#[derive(Default)]
pub(crate) struct Collected {
    packets: Vec<(MemberId, u16, Control)>,
    events: Vec<Event>,
}

impl Output for Collected {
    fn send(&mut self, to: MemberId, view: u16, packet: &Control) {
        self.packets.push((to, view, *packet));
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
    minority: Vec<bool>,
    /// Members that the others may have declared dead although they live: cut off, expelled, or silent for long over a lossy network.
    pub(crate) excused: Vec<bool>,
    /// What waited for members that have resumed.
    late: VecDeque<Happening<Packet>>,
    /// The member that a packet has reached last.
    last_reached: usize,
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
                // Where silence can mean a death, only a majority may go on.
                needs_quorum: plan.partition || (plan.is_lossy() && plan.pauses > 0),
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
                paused: None,
                told: Vec::new(),
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
            minority: vec![false; plan.members],
            excused: vec![false; plan.members],
            late: VecDeque::new(),
            last_reached: 0,
        };
        cluster.schedule_faults();
        cluster
    }

    /// Deaths, pauses and the partition happen somewhere in the first part of the run.
    fn schedule_faults(&mut self) {
        let plan = self.plan;
        let span = plan.latency_ns * 20 * plan.operations.min(200);
        let mut victims: Vec<usize> = (0..plan.members).collect();
        let mut last = 0;
        for _ in 0..plan.deaths {
            let index = self.network.random.below(victims.len() as u64) as usize;
            let victim = victims.swap_remove(index);
            let time = self.network.random.below(span);
            if plan.unkind {
                let follows = last > 0 && self.network.random.chance(0.5);
                last = if follows { last + self.network.random.below(plan.latency_ns * 10) } else { time };
                self.network.at(last, Happening::Timer { member: victim, what: SOME_DEATH_TIMER });
            } else {
                self.network.at(time, Happening::Death(victim));
            }
        }
        for number in 0..plan.pauses + plan.expulsions {
            let index = self.network.random.below(victims.len() as u64) as usize;
            let member = victims.swap_remove(index);
            let time = self.network.random.below(span);
            self.network.at(time, Happening::Timer { member, what: PAUSE_TIMER });
            let end = time + plan.latency_ns * PAUSE_LATENCIES;
            self.network.at(end, Happening::Timer { member, what: RESUME_TIMER });
            if number < plan.expulsions {
                let after = self.network.random.below(plan.latency_ns * PAUSE_LATENCIES / 2);
                self.network.at(time + after, Happening::Timer { member, what: EXPEL_TIMER });
            }
        }
        if plan.partition {
            let minority = 1 + self.network.random.below((victims.len() as u64 - 1) / 2) as usize;
            for _ in 0..minority {
                let index = self.network.random.below(victims.len() as u64) as usize;
                self.minority[victims.swap_remove(index)] = true;
            }
            let time = self.network.random.below(span);
            self.network.at(time, Happening::Cut);
            let end = time + plan.latency_ns * GIVE_UP_LATENCIES * 3;
            self.network.at(end, Happening::Healed);
        }
    }

    /// At the end all members that live, and that nobody has a reason to expel, agree on who is a member.
    pub(crate) fn check_views(&mut self) {
        let is_member = |index: &usize| {
            let member = &self.members[*index];
            member.alive && !self.excused[*index] && member.group.is_member()
        };
        let views: Vec<_> = (0..self.members.len())
            .filter(is_member)
            .map(|index| (index, self.members[index].group.view()))
            .collect();
        for (index, view) in &views {
            if *view != views[0].1 {
                self.failures
                    .push(format!("members {} and {index} have different views: {views:?}", views[0].0));
            }
            let is_expelled =
                |member: &MemberId| self.members[member.index()].alive && !self.excused[member.index()];
            if let Some(member) = view.gone.iter().find(is_expelled)
                && self.members[member.index()].group.is_member()
            {
                self.failures.push(format!("member {index} has lost {member}, which lives: {view:?}"));
            }
            if (0..self.members.len())
                .any(|dead| !self.members[dead].alive && !view.gone.contains(MemberId::new(dead)))
            {
                self.failures.push(format!("member {index} has not heard of a death: {view:?}"));
            }
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
            let happening = match self.late.pop_front() {
                Some(happening) => happening,
                None => self.network.next()?,
            };
            if let Happening::Packet { to: member, .. }
            | Happening::Timer { member, what: 0..PAUSE_TIMER }
            | Happening::Notice { member, .. } = happening
                && let Some(paused) = &mut self.members[member].paused
            {
                paused.push_back(happening);
                continue;
            }
            match happening {
                Happening::Packet { from, to, packet } if self.members[to].alive => {
                    self.last_reached = to;
                    self.receive(from, to, packet);
                }
                Happening::Timer { member, what: SOME_DEATH_TIMER } => {
                    let hit = self.last_reached;
                    let is_spared = self.minority[hit] || self.members[hit].paused.is_some();
                    let is_hit = self.network.random.chance(0.5) && self.members[hit].alive && !is_spared;
                    let victim = if is_hit { hit } else { member };
                    if self.members[victim].alive {
                        return Some(self.die(victim));
                    }
                }
                Happening::Timer { member, what } if self.members[member].alive => match what {
                    STREAM_TIMER => self.poll_stream(member),
                    GROUP_TIMER => {
                        let now = self.network.now;
                        self.members[member].timer = u64::MAX;
                        self.act(member, |group, out| group.expire(now, out));
                    }
                    PAUSE_TIMER => {
                        self.members[member].paused = Some(VecDeque::new());
                        // Over a lossy network nobody can know that it lives.
                        if self.plan.is_lossy() {
                            self.excuse(member);
                        }
                    }
                    RESUME_TIMER => {
                        self.late.extend(self.members[member].paused.take().unwrap_or_default());
                        self.answer_heartbeats(member);
                    }
                    EXPEL_TIMER => {
                        let by = self.someone_else(member);
                        self.excuse(member);
                        self.note_death(by, member);
                    }
                    what => return Some(Seen::Timer { member, what }),
                },
                Happening::Death(member) if self.members[member].alive => return Some(self.die(member)),
                Happening::Notice { member, dead } if self.members[member].alive => {
                    self.note_death(member, dead)
                }
                Happening::Cut => self.cut_off(),
                Happening::Healed => self.network.cut = None,
                Happening::Packet { .. }
                | Happening::Timer { .. }
                | Happening::Death(_)
                | Happening::Notice { .. } => {}
            }
        }
    }

    fn die(&mut self, member: usize) -> Seen {
        self.members[member].alive = false;
        self.members[member].paused = None;
        if self.plan.unkind {
            self.tell_one(member);
            self.tell_others(member);
        } else {
            for peer in (0..self.members.len()).filter(|peer| *peer != member) {
                self.notice_later(peer, member);
            }
        }
        Seen::Died(member)
    }

    fn notice_later(&mut self, member: usize, dead: usize) {
        let after = self.network.random.below(self.plan.latency_ns * NOTICE_LATENCIES);
        let time = self.network.now + after;
        self.network.at(time, Happening::Notice { member, dead });
    }

    /// One survivor is told that a member is dead.
    fn tell_one(&mut self, dead: usize) {
        let told = self.someone_else(dead);
        self.members[told].told.push(dead);
        self.notice_later(told, dead);
    }

    /// What only this member knew, somebody else finds out.
    fn tell_others(&mut self, member: usize) {
        for dead in core::mem::take(&mut self.members[member].told) {
            self.tell_one(dead);
        }
    }

    /// A member that others may declare dead from now on, although it lives.
    fn excuse(&mut self, member: usize) {
        self.excused[member] = true;
        self.seen.push_back(Seen::Excused(member));
        self.tell_others(member);
    }

    /// A member that has paused looks for the others: those that count it as gone say so. On links that keep the order they have said so.
    fn answer_heartbeats(&mut self, member: usize) {
        for peer in 0..self.members.len() {
            let other = &self.members[peer];
            if self.plan.is_lossy() && other.alive && other.group.dead().contains(MemberId::new(member)) {
                let time = self.network.now + self.plan.latency_ns;
                self.network.at(time, Happening::Packet { from: peer, to: member, packet: Packet::Expelled });
            }
        }
    }

    /// A member that lives and is well, if there is one.
    fn someone_else(&mut self, member: usize) -> usize {
        let others: Vec<usize> = (0..self.members.len()).filter(|other| *other != member).collect();
        let is_alive = |other: &&usize| self.members[**other].alive;
        let is_well = |other: &&usize| {
            is_alive(other) && !self.excused[**other] && self.members[**other].paused.is_none()
        };
        let well: Vec<usize> = others.iter().filter(is_well).copied().collect();
        let alive: Vec<usize> = others.iter().filter(is_alive).copied().collect();
        let from = [well, alive, others].into_iter().find(|from| !from.is_empty()).unwrap_or_default();
        from[self.network.random.below(from.len() as u64) as usize]
    }

    /// The minority is cut off. Both sides notice that the other is silent, as heartbeats would show it, even if they have nothing to
    /// send.
    fn cut_off(&mut self) {
        for member in 0..self.members.len() {
            if self.minority[member] {
                self.excuse(member);
            }
        }
        self.network.cut = Some(self.minority.clone());
        for member in 0..self.members.len() {
            for dead in 0..self.members.len() {
                if self.minority[member] != self.minority[dead] {
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
        for (to, view, packet) in out.packets {
            *self.packets.entry(packet.kind().name()).or_default() += 1;
            match &mut self.members[member].stream {
                None => self.network.send_in_order(member, to.index(), Packet::InOrder(view, packet)),
                Some(stream) => stream.backlog[to.index()].push_back((view, packet)),
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
            Packet::InOrder(view, control) => self.deliver(from, to, (view, control)),
            Packet::Expelled => self.deliver(from, to, (0, Control::Expelled)),
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

    fn deliver(&mut self, from: usize, to: usize, (view, control): (u16, Control)) {
        self.seen.push_back(Seen::Arrived { to, from, packet: control });
        let mut violation = None;
        self.act(to, |group, out| {
            violation = group.on_packet(MemberId::new(from), view, &control, out).err();
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
