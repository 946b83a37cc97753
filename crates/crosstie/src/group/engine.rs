//! The progress engine of one member: queue pairs, protocol state machines, and the pass that serves packets.
//!
//! RHiNET runs this on the processor of the NIC. Here a thread runs it: the application's while it waits, else the group's own
//! (`driver.rs`). One thread at a time has the engine.
//!
//! ```text
//!   recv CQ ── packet ──> Gate ──> Group (locks, barriers) ──> Wires: links, results
//!                              └─> ChannelState (messages)
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::group::{
    CONTROL_CHANNEL, Config, Control, Dropped, FenceTable, Gate, Group as Machine, GroupId, HEADER_SIZE,
    Header, MAX_CONTROL_SIZE, MemberId, MemberRegion, PACKET_IMMEDIATE, PacketKind,
};

use super::channel::ChannelState;
use super::config::limits::{CHECK_INTERVAL, MAX_CHANNELS, PROBE_INTERVAL, PULL_INTERVAL};
use super::counters::{Counters, GroupCounters};
use super::datagram::{DATAGRAM_SLOT, DatagramPort};
use super::error::{GroupError, JoinError};
use super::link::{Link, SLOT, SendKey};
use super::one_sided::OneSided;
use super::wires::{Results, Staging, Wires};
use crate::device::CqParker;
use crate::device::{Completion, Cq, CqError, Mr, Opcode, Pd, Status, UdQp};

/// Completions of one pass.
const BATCH: usize = 32;
/// Passes between two readings of the clock.
const PASSES_PER_CLOCK_READING: u32 = 32;
/// Passes without any packet after which delayed acknowledgements are sent.
const IDLE_PASSES: u32 = 16;
/// Passes without any packet after which senders are told about every place that is free.
const CREDIT_PASSES: u32 = 256;

/// One member's engine.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) machine: Machine,
    pub(super) wires: Wires,
    pub(super) gate: Gate,
    pub(super) channels: Box<[Option<Box<ChannelState>>]>,
    /// Numbers of the open channels.
    pub(super) open: Vec<u16>,
    /// Members whose packets were dropped because this member has not opened their channel yet.
    pub(super) early: BTreeSet<(u16, MemberId)>,
    pub(super) datagrams: Option<DatagramPort>,
    recv_cq: Cq,
    send_cq: Cq,
    pub(super) pd: Arc<Pd>,
    pub(super) one_sided: Option<Arc<OneSided>>,
    #[expect(dead_code, reason = "peers write zero bytes to it")]
    target: Mr,
    pub(super) mtu: usize,
    /// All members are processes of one machine: who is silent is not dead.
    pub(super) same_machine: bool,
    /// Message packets may get lost.
    pub(super) is_lossy: bool,
    /// Small messages may wait for others: the group's thread posts them if no call of the application does.
    pub(super) combines: bool,
    pub(super) members: usize,
    /// A member that is silent for long counts as dead. Not where it is known who lives.
    pub(super) silence_is_death: bool,
    start: Instant,
    now: u64,
    passes: u32,
    idle_passes: u32,
    next_check: u64,
    next_probe: u64,
    loss: Option<Loss>,
    pub(super) counters: GroupCounters,
    /// Completions of the pass; empty between passes.
    batch: Vec<Completion>,
    /// What other members say about who is gone, until everything that has arrived before is handled.
    news: Vec<(MemberId, u16, Control)>,
    /// A queue or the device failed: nothing works any more.
    pub(super) failed: Option<GroupError>,
    next_waiter: u64,
    /// Tokens that messages brought.
    pub(super) fences: FenceTable,
}

/// Drops received packets, for tests and measurements.
#[derive(Debug)]
struct Loss {
    /// Of 2^32.
    share: u64,
    state: u64,
}

impl Loss {
    fn hits(&mut self) -> bool {
        // xorshift64*
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) < self.share
    }
}

impl Engine {
    #[expect(clippy::too_many_arguments, reason = "called once, by `setup`")]
    pub(super) fn new(
        id: GroupId,
        config: &Config,
        pd: Arc<Pd>,
        one_sided: Option<Arc<OneSided>>,
        links: Vec<Option<Link>>,
        datagrams: Option<DatagramPort>,
        recv_cq: Cq,
        send_cq: Cq,
        staging: Mr,
        target: Mr,
        mtu: usize,
        loss: Option<(f64, u64)>,
    ) -> Result<Engine, JoinError> {
        let machine = Machine::new(config)?;
        Ok(Engine {
            machine,
            gate: Gate::new(id.group, id.epoch, config.me, config.members),
            wires: Wires {
                id,
                me: config.me,
                links: links.into_boxed_slice(),
                closing: Vec::new(),
                staging: Staging::new(staging),
                results: Results::new(config.locks, config.barriers),
                has_waiting: false,
            },
            channels: (0..MAX_CHANNELS).map(|_| None).collect(),
            open: Vec::new(),
            early: BTreeSet::new(),
            same_machine: !config.needs_quorum,
            is_lossy: datagrams.is_some() || loss.is_some(),
            datagrams,
            recv_cq,
            send_cq,
            pd,
            one_sided,
            target,
            mtu,
            combines: false,
            members: config.members,
            silence_is_death: config.needs_quorum,
            start: Instant::now(),
            now: 0,
            passes: 0,
            idle_passes: 0,
            next_check: 0,
            next_probe: PROBE_INTERVAL,
            loss: loss.map(|(share, seed)| Loss {
                share: (share.clamp(0.0, 1.0) * (1u64 << 32) as f64) as u64,
                state: seed | 1,
            }),
            counters: GroupCounters::default(),
            batch: Vec::with_capacity(BATCH),
            news: Vec::new(),
            failed: None,
            next_waiter: 0,
            fences: FenceTable::new(config.locks),
        })
    }

    pub(super) fn me(&self) -> MemberId {
        self.wires.me
    }

    /// Where a thread parks until a packet comes. Empty if the device has no such place.
    pub(super) fn parkers(&self) -> Vec<CqParker> {
        let queues = self.datagrams.iter().map(|port| &port.recv_cq).chain([&self.recv_cq]);
        queues.map(Cq::parker).collect::<Option<Vec<_>>>().unwrap_or_default()
    }

    /// A number that no other waiter has.
    pub(super) fn next_waiter(&mut self) -> u64 {
        self.next_waiter += 1;
        self.next_waiter
    }

    /// The time of the last reading of the clock.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn read_clock(&mut self) -> u64 {
        self.now = self.start.elapsed().as_nanos() as u64;
        self.now
    }

    /// Whether a pass would find packets.
    pub(super) fn is_ready(&mut self) -> bool {
        self.failed.is_some()
            || self.recv_cq.is_ready()
            || self.datagrams.as_mut().is_some_and(|port| port.recv_cq.is_ready())
    }

    /// Blocks in the device until there is a packet, where a thread cannot park outside the engine.
    pub(super) fn wait_in_device(&mut self, timeout: Duration) {
        let waited = match &mut self.datagrams {
            // Two queues: a short sleep at one of them.
            Some(port) => {
                if !self.recv_cq.is_ready() {
                    port.recv_cq.wait(timeout.min(Duration::from_micros(500)))
                } else {
                    Ok(true)
                }
            }
            None => self.recv_cq.wait(timeout),
        };
        if let Err(error) = waited {
            self.fail(GroupError::Queue(error));
        }
    }

    /// How long a thread may park at most before a pass has something to do by time.
    pub(super) fn time_to_next_deadline(&mut self) -> Duration {
        let now = self.read_clock();
        let sends = self.open.iter().filter_map(|id| {
            self.channels[usize::from(*id)]
                .as_ref()
                .and_then(|channel| channel.protocol.sender.next_deadline())
        });
        let next = sends.chain(self.machine.next_deadline()).chain([self.next_probe]).min();
        let is_pulling = |id: &u16| {
            let channel = self.channels[usize::from(*id)].as_ref();
            channel.and_then(|channel| channel.tagged.as_ref()).is_some_and(|tagged| tagged.is_busy())
        };
        // PULLs complete at another queue.
        let next = if self.open.iter().any(is_pulling) { Some(now + PULL_INTERVAL) } else { next };
        Duration::from_nanos(next.unwrap_or(u64::MAX).saturating_sub(now))
    }

    /// One pass: takes packets, and does what is due. Returns how many packets there were.
    #[inline]
    pub(super) fn progress(&mut self) -> usize {
        let count = self.poll_packets();
        self.serve(count);
        count
    }

    /// A pass that only looks whether there is a packet: after packets, a poll that finds none pauses.
    #[inline]
    pub(super) fn progress_if_ready(&mut self) {
        let count = if self.is_ready() { self.poll_packets() } else { 0 };
        self.serve(count);
    }

    #[inline(always)]
    pub(super) fn poll_packets(&mut self) -> usize {
        let count = self.poll_links();
        if self.datagrams.is_some() { count + self.poll_datagrams() } else { count }
    }

    /// The rest of a pass that has found `count` packets.
    #[inline(always)]
    pub(super) fn serve(&mut self, count: usize) {
        self.passes = self.passes.wrapping_add(1);
        if self.passes.is_multiple_of(PASSES_PER_CLOCK_READING) {
            self.check_time(count == 0);
        }
        self.idle_passes = if count == 0 { self.idle_passes.saturating_add(1) } else { 0 };
        if !self.open.is_empty() {
            if count == 0 && self.idle_passes.is_multiple_of(CREDIT_PASSES) {
                self.return_credit();
            }
            self.serve_channels(self.idle_passes >= IDLE_PASSES);
        }
        if self.wires.has_waiting {
            self.poll_sends();
            self.wires.post_waiting();
        }
        if !self.wires.results.deaths.is_empty() || self.wires.results.ended.is_some() {
            self.close_dead_links();
        }
    }

    /// The last pass before a thread parks: everything that could wait goes out now.
    pub(super) fn progress_before_park(&mut self) -> usize {
        let count = self.progress();
        self.check_time(count == 0);
        if count == 0 && !self.open.is_empty() {
            self.return_credit();
            self.serve_channels(true);
        }
        count
    }

    #[inline]
    fn poll_links(&mut self) -> usize {
        let batch = &mut self.batch;
        match self.recv_cq.poll(BATCH, |completion| batch.push(*completion)) {
            Ok(0) => {
                if !self.news.is_empty() {
                    self.handle_news();
                }
                return 0;
            }
            Ok(_) => {}
            Err(error) => self.fail(GroupError::Queue(error)),
        }
        let mut batch = core::mem::take(&mut self.batch);
        for completion in &batch {
            self.on_receive(completion);
        }
        let count = batch.len();
        batch.clear();
        self.batch = batch;
        if count < BATCH && !self.news.is_empty() {
            self.handle_news();
        }
        count
    }

    /// Others say that members are gone. What these had sent before, for example the release of a barrier, has been handled.
    #[cold]
    fn handle_news(&mut self) {
        for (from, view, packet) in core::mem::take(&mut self.news) {
            if self.machine.on_packet(from, view, &packet, &mut self.wires).is_err() {
                self.counters.violations += 1;
            }
        }
    }

    #[inline]
    fn on_receive(&mut self, completion: &Completion) {
        let from = (completion.wr_id >> 32) as usize;
        let slot = completion.wr_id as u32 as usize;
        let Some(Some(link)) = self.wires.links.get_mut(from) else { return };
        let from = link.peer;
        if !completion.status.is_success() {
            self.lose_member(from);
            return;
        }
        if completion.opcode == Opcode::RecvWriteImm {
            match completion.imm {
                Some(PACKET_IMMEDIATE) => self.on_packet_in_completion(from, completion),
                Some(immediate) => self.on_immediate(from, immediate),
                None => {}
            }
            self.post_receive(from, slot);
            return;
        }
        let len = completion.byte_len as usize;
        let mut bytes = [0; HEADER_SIZE];
        let read = len.min(HEADER_SIZE);
        if len > SLOT || link.receives.read(slot * SLOT, &mut bytes[..read]).is_err() {
            self.lose_member(from);
            return;
        }
        let header = self.gate.check(&bytes[..read], self.machine.dead(), |channel| {
            channel == CONTROL_CHANNEL || self.channels.get(usize::from(channel)).is_some_and(Option::is_some)
        });
        match header {
            // A connection belongs to one member.
            Ok(header) if header.sender != from => self.gate.count_invalid(),
            Ok(header) if header.channel == CONTROL_CHANNEL => self.on_control(&header, slot, len),
            Ok(header) => {
                let lost = self.loss.as_mut().is_some_and(Loss::hits);
                if lost {
                    self.counters.injected_losses += 1;
                } else if let Some(Some(link)) = self.wires.links.get(from.index()) {
                    let (memory, at) = (&link.receives, slot * SLOT + HEADER_SIZE);
                    let channel = self.channels[usize::from(header.channel)].as_mut();
                    let taken = channel
                        .map(|channel| channel.on_packet(&header, memory, at, len - HEADER_SIZE, self.now));
                    if let Some(Err(_)) = taken {
                        self.gate.count_invalid();
                        self.lose_member(from);
                        return;
                    }
                }
            }
            Err(Dropped::ForeignChannel(channel)) => _ = self.early.insert((channel, from)),
            Err(_) => {}
        }
        self.post_receive(from, slot);
    }

    /// Posts a receive again, behind what it brought: the answer is not to wait for it.
    #[inline]
    fn post_receive(&mut self, from: MemberId, slot: usize) {
        if let Some(Some(link)) = self.wires.links.get_mut(from.index())
            && link.post_receive(slot).is_err()
        {
            self.lose_member(from);
        }
    }

    /// A lock or barrier packet whose bytes came with the completion.
    #[inline]
    fn on_packet_in_completion(&mut self, from: MemberId, completion: &Completion) {
        // A member that sends such a packet knows that the device keeps its bytes; without them the lock would wait for ever.
        let Some(bytes) = completion.inline_data() else { return self.lose_member(from) };
        let checked = self.gate.check(bytes, self.machine.dead(), |channel| channel == CONTROL_CHANNEL);
        match checked {
            Ok(header) if header.sender == from => {
                // By reference: the packet with the most members is ten times as long as the usual one.
                match &Control::decode(&header, &bytes[HEADER_SIZE..], self.members) {
                    Ok(packet) => self.handle_control(from, Control::view_of(&header), packet),
                    Err(_) => self.gate.count_invalid(),
                }
            }
            Ok(_) => self.gate.count_invalid(),
            Err(_) => {}
        }
    }

    fn poll_datagrams(&mut self) -> usize {
        let Some(port) = &mut self.datagrams else { return 0 };
        let batch = &mut self.batch;
        match port.recv_cq.poll(BATCH, |completion| batch.push(*completion)) {
            Ok(0) => return 0,
            Ok(_) => {}
            Err(error) => self.fail(GroupError::Queue(error)),
        }
        let mut batch = core::mem::take(&mut self.batch);
        for completion in &batch {
            self.on_datagram(completion);
        }
        let count = batch.len();
        batch.clear();
        self.batch = batch;
        count
    }

    fn on_datagram(&mut self, completion: &Completion) {
        let Some(port) = &mut self.datagrams else { return };
        let slot = completion.wr_id as usize;
        // Without a receive the datagram would only be lost; a flush means that the port is closing.
        let prefix = UdQp::GRH + HEADER_SIZE;
        let len = completion.byte_len as usize;
        let mut bytes = [0; HEADER_SIZE];
        if completion.status.is_success()
            && (prefix..=DATAGRAM_SLOT).contains(&len)
            && port.receives.read(slot * DATAGRAM_SLOT + UdQp::GRH, &mut bytes).is_ok()
        {
            let header = self.gate.check(&bytes, self.machine.dead(), |channel| {
                self.channels.get(usize::from(channel)).is_some_and(Option::is_some)
            });
            match header {
                Ok(header) if !port.is_from(completion, header.sender) => self.gate.count_invalid(),
                Ok(_) if self.loss.as_mut().is_some_and(Loss::hits) => self.counters.injected_losses += 1,
                Ok(header) => {
                    let (memory, at) = (&port.receives, slot * DATAGRAM_SLOT + prefix);
                    if let Some(channel) = &mut self.channels[usize::from(header.channel)]
                        && channel.on_packet(&header, memory, at, len - prefix, self.now).is_err()
                    {
                        self.gate.count_invalid();
                        // The address of a datagram proves little: only the packet is dropped.
                    }
                }
                Err(_) => {}
            }
        }
        if completion.status != Status::Flushed
            && let Some(port) = &mut self.datagrams
            && port.post_receive(slot).is_err()
        {
            self.counters.lost_receives += 1;
        }
    }

    #[inline]
    fn on_immediate(&mut self, from: MemberId, immediate: u32) {
        let machine = &self.machine;
        let rounds = |barrier| machine.barrier_rounds(barrier);
        match Control::from_immediate(immediate, machine.accepted_view(), rounds) {
            Some((view, packet)) => self.handle_control(from, view, &packet),
            None => self.gate.count_invalid(),
        }
    }

    fn on_control(&mut self, header: &Header, slot: usize, len: usize) {
        let Some(Some(link)) = self.wires.links.get(header.sender.index()) else { return };
        let mut body = [0; MAX_CONTROL_SIZE];
        let body_len = len - HEADER_SIZE;
        if body_len > body.len()
            || link.receives.read(slot * SLOT + HEADER_SIZE, &mut body[..body_len]).is_err()
        {
            self.gate.count_invalid();
            return;
        }
        match &Control::decode(header, &body[..body_len], self.members) {
            Ok(packet) => self.handle_control(header.sender, Control::view_of(header), packet),
            Err(_) => self.gate.count_invalid(),
        }
    }

    #[inline]
    fn handle_control(&mut self, from: MemberId, view: u16, packet: &Control) {
        if let Control::ViewReport { .. } | Control::ViewPropose { .. } = packet {
            self.news.push((from, view, *packet));
        } else if self.machine.on_packet(from, view, packet, &mut self.wires).is_err() {
            self.counters.violations += 1;
        }
    }

    /// Takes completions of sends, which frees room in the send queues.
    pub(super) fn poll_sends(&mut self) {
        let Wires { links, closing, staging, .. } = &mut self.wires;
        let mut broken: Option<MemberId> = None;
        loop {
            let polled = self.send_cq.poll(BATCH, |completion| {
                let key = SendKey::decode(completion.wr_id);
                if key.slot != 0 {
                    staging.give_back(key.slot - 1);
                }
                if let Some(Some(link)) = links.get_mut(usize::from(key.member)) {
                    link.queue.complete(key.posted);
                    if !completion.status.is_success() {
                        broken = Some(link.peer);
                    }
                } else if let Some(link) = closing.iter_mut().find(|link| link.peer.bits() == key.member) {
                    link.queue.complete(key.posted);
                }
            });
            match polled {
                Ok(BATCH) => {}
                Ok(_) => break,
                Err(error) => {
                    self.fail(GroupError::Queue(error));
                    break;
                }
            }
        }
        if let Some(port) = &mut self.datagrams {
            let staging = &mut self.wires.staging;
            let polled: Result<(), CqError> = port.poll_sends(|slot| staging.give_back(slot));
            if let Err(error) = polled {
                self.fail(GroupError::Queue(error));
            }
        }
        if let Some(member) = broken {
            self.lose_member(member);
        }
    }

    /// Does what is due by time. `drained`: the last poll found nothing.
    #[cold]
    fn check_time(&mut self, drained: bool) {
        let now = self.read_clock();
        if self.machine.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.machine.expire(now, &mut self.wires);
        }
        for index in 0..self.open.len() {
            let id = self.open[index];
            let Some(channel) = &mut self.channels[usize::from(id)] else { continue };
            channel.protocol.sender.expire(now);
            if let Some(member) = channel.protocol.sender.next_unreachable()
                && self.silence_is_death
            {
                self.lose_member(member);
            }
        }
        // Only after all packets were handled: a packet may say that this member was expelled.
        if now < self.next_check || !drained {
            return;
        }
        self.next_check = now + CHECK_INTERVAL;
        self.poll_sends();
        if !self.wires.closing.is_empty() {
            self.wires.poll_closing();
        }
        let probe = now >= self.next_probe;
        if probe {
            self.next_probe = now + PROBE_INTERVAL;
        }
        for index in 0..self.wires.links.len() {
            let Some(link) = &mut self.wires.links[index] else { continue };
            if link.is_broken() || (probe && link.probe().is_err()) {
                let member = link.peer;
                self.lose_member(member);
            }
        }
        if !self.wires.results.deaths.is_empty() {
            self.close_dead_links();
        }
    }

    /// A member is dead, or counts as dead from now on, for all members of the group. The only way in.
    #[cold]
    pub(super) fn lose_member(&mut self, member: MemberId) {
        self.machine.member_died(member, &mut self.wires);
        // The group may have known it before: then the link is still to be closed.
        if self.wires.links[member.index()].is_some() {
            self.wires.results.deaths.push(member);
        }
    }

    #[cold]
    fn close_dead_links(&mut self) {
        if let Some(error) = self.wires.results.ended.take() {
            self.fail(error);
            // The others have been told; when the links close, those that have not will see it.
            self.wires.results.deaths.extend(self.wires.links.iter().flatten().map(|link| link.peer));
        }
        while let Some(member) = self.wires.results.deaths.pop() {
            // It may be alive and only have been stopped: it is told that it is no member any more before the link closes.
            self.counters.links_closed += u64::from(self.wires.close(member));
            let nobody_left = self.is_alone();
            for index in 0..self.open.len() {
                let id = self.open[index];
                if let Some(channel) = &mut self.channels[usize::from(id)] {
                    channel.drop_peer(member, nobody_left);
                }
                self.collect_wakers(id);
            }
            if let Some(endpoint) = self.one_sided.as_ref().and_then(|one_sided| one_sided.endpoint(member)) {
                endpoint.close();
            }
            self.wires.results.changed = true;
        }
    }

    #[cold]
    pub(super) fn fail(&mut self, error: GroupError) {
        self.wires.results.changed = true;
        self.failed.get_or_insert(error);
    }

    /// Checks the description of a member's memory.
    pub(super) fn check_region(&mut self, description: &[u8]) -> Result<MemberRegion, Dropped> {
        self.gate.check_region(description, self.machine.dead())
    }

    /// Whether no other member is alive.
    pub(super) fn is_alone(&self) -> bool {
        self.wires.links.iter().all(Option::is_none)
    }

    /// Declares a member dead.
    pub(super) fn expel(&mut self, member: MemberId) {
        self.lose_member(member);
        self.close_dead_links();
    }

    /// Leaves the group: whatever handles of it live, their calls fail from now on.
    pub(super) fn leave(&mut self) {
        self.machine.leave(&mut self.wires);
        self.wires.results.ended.get_or_insert(GroupError::Left);
        self.close_dead_links();
    }

    /// Whether all other members have been told that this one has left.
    pub(super) fn has_left(&mut self) -> bool {
        self.poll_sends();
        self.wires.poll_closing();
        self.wires.closing.is_empty()
    }

    /// What this member has done so far.
    pub(super) fn snapshot(&self) -> Counters {
        let channels = || self.open.iter().filter_map(|id| self.channels[usize::from(*id)].as_ref());
        let packets = |kind: PacketKind| {
            if kind.is_message() {
                channels().map(|channel| channel.packets_sent(kind)).sum()
            } else {
                self.machine.packets_sent(kind)
            }
        };
        let tagged = || channels().filter_map(|channel| channel.tagged.as_ref());
        let received = || channels().map(|channel| channel.protocol.receiver.counters());
        Counters {
            packets: PacketKind::ALL.iter().map(|kind| (*kind, packets(*kind))).collect(),
            locks: *self.machine.lock_counters(),
            dropped: *self.gate.dropped(),
            delivered: channels().map(|channel| channel.delivered).sum(),
            combined: channels().map(|channel| channel.protocol.sender.counters().combined).sum(),
            resent: channels().map(|channel| channel.protocol.sender.counters().resent).sum(),
            discarded: received().map(|counters| counters.discarded + counters.duplicates).sum(),
            held: received().map(|counters| counters.held).sum(),
            unsent: self.counters.unsent,
            refused: received().map(|counters| counters.refused).sum(),
            stale_tokens: self.counters.stale_tokens,
            violations: self.counters.violations,
            injected_losses: self.counters.injected_losses,
            links_closed: self.counters.links_closed,
            pulls: tagged().map(|tagged| tagged.counters.pulls).sum(),
            unexpected: tagged().map(|tagged| tagged.counters.unexpected).sum(),
            foreign_memory: self.one_sided.as_ref().map_or(0, |one_sided| one_sided.foreign()),
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "engine_tests.rs"]
mod tests;
