//! Rails that fail and return: many connections with three rails each send messages of random sizes. A rail breaks at random instants,
//! for some latencies or, with `restless`, for hours, in which the other rails go on.
//!
//! ```text
//!   sender ── part, rail epoch ──> rail ──> receiver          lost from the break on, or still arriving until the fence
//!          <── acknowledgement ───                            lost from the break on
//!          ── fence ──> control ──> receiver closes the rail, answers what had arrived
//! ```

use std::collections::{BTreeMap, VecDeque};

use crosstie_protocol::rails::{
    Arrival, FenceEntry, Immediate, MAX_RAILS, Mask, Receiver, Sender, fixed_split, rails_of,
};

use crate::network::{Happening, Network};
use crate::outcome::Outcome;
use crate::plan::Plan;

const RAILS: usize = 3;
const SLOTS: usize = 8;
const ROOM: u64 = 1 << 20;
/// Breaks of the rails of one connection.
const BREAKS: u64 = 6;
const HOUR: u64 = 3_600_000_000_000;
/// What a timer is for: the next message, or a rail that breaks or returns.
const NEXT_MESSAGE: u64 = 0;
const BREAK: u64 = 1;
const RETURN: u64 = 2;

#[derive(Clone, Debug)]
enum Packet {
    /// WRITE with immediate on a rail.
    Part { rail: usize, epoch: u64, message: u64, imm: Immediate, bytes: u32 },
    /// Its acknowledgement.
    Acked { rail: usize, epoch: u64, message: u64, attempt: u8 },
    /// Control: the receiver has posted this many requests.
    Posted(u64),
    /// Control: the sender has stopped using a rail.
    Fence { rail: usize, epoch: u64, entries: Vec<FenceEntry> },
    /// Control: what had arrived on it.
    Answer { rail: usize, entries: Vec<FenceEntry> },
}

/// A rail as both ends see it.
#[derive(Clone, Copy, Default)]
struct Rail {
    /// Queue pairs of earlier epochs are closed at this end.
    sender_epoch: u64,
    receiver_epoch: u64,
    /// Parts of epochs up to this one are lost on the way.
    lost_epoch: Option<u64>,
    is_broken: bool,
    is_fencing: bool,
}

impl Rail {
    fn is_usable(&self) -> bool {
        !self.is_broken && !self.is_fencing
    }
}

/// One connection: its sender is end 0, its receiver end 1.
struct Connection {
    sender: Sender,
    receiver: Receiver,
    rails: [Rail; RAILS],
    posted: u64,
    left: u64,
    /// The application sends the next message.
    wants: bool,
    /// What must come out: the size of each message, and when it was sent.
    sizes: VecDeque<(u64, u64)>,
    delivered: BTreeMap<u64, u64>,
    done: BTreeMap<u64, u64>,
}

struct Run {
    plan: Plan,
    network: Network<Packet>,
    connections: Vec<Connection>,
    times: Vec<u64>,
    packets: BTreeMap<&'static str, u64>,
    failures: Vec<String>,
}

pub(crate) fn run(plan: &Plan) -> Outcome {
    let connection = |_| Connection {
        sender: Sender::new(SLOTS),
        receiver: Receiver::new(SLOTS, RAILS),
        rails: [Rail::default(); RAILS],
        posted: 0,
        left: plan.operations,
        wants: true,
        sizes: VecDeque::new(),
        delivered: BTreeMap::new(),
        done: BTreeMap::new(),
    };
    let mut run = Run {
        plan: *plan,
        network: Network::new(plan),
        connections: (0..plan.members).map(connection).collect(),
        times: Vec::new(),
        packets: BTreeMap::new(),
        failures: Vec::new(),
    };
    let busy = plan.operations * plan.latency_ns;
    for index in 0..plan.members {
        run.post(index);
        for _ in 0..BREAKS {
            let time = run.network.random.below(busy);
            let rail = run.network.random.below(RAILS as u64);
            run.network.at(time, Happening::Timer { member: index, what: BREAK | rail << 8 });
        }
    }
    while let Some(happening) = run.network.next() {
        match happening {
            Happening::Packet { to, packet, .. } => run.receive(to / LINKS, packet),
            Happening::Timer { member, what } => run.on_timer(member, what & 0xff, (what >> 8) as usize),
            _ => {}
        }
    }
    run.finish()
}

/// Links of a connection: each rail and the control connection, in both directions.
const LINKS: usize = 2 * (RAILS + 1);

impl Run {
    fn on_timer(&mut self, index: usize, what: u64, rail: usize) {
        match what {
            NEXT_MESSAGE => self.connections[index].wants = true,
            BREAK => self.break_rail(index, rail),
            RETURN => self.connections[index].rails[rail].is_broken = false,
            _ => {}
        }
        self.send_messages(index);
    }

    fn break_rail(&mut self, index: usize, rail: usize) {
        let now = self.network.now;
        let random = &mut self.network.random;
        let hours = self.plan.restless && random.below(3) == 0;
        let away = if hours { random.below(5 * HOUR) } else { random.exponential(self.plan.latency_ns * 20) };
        let still_arriving = random.chance(0.5);
        let connection = &mut self.connections[index];
        let state = &mut connection.rails[rail];
        if !state.is_usable() {
            return;
        }
        (state.is_broken, state.is_fencing) = (true, true);
        let epoch = state.sender_epoch;
        if !still_arriving {
            state.lost_epoch = Some(epoch);
        }
        // Acknowledgements of this epoch do not count any more.
        state.sender_epoch += 1;
        let mut entries = Vec::new();
        connection.sender.fail_rail(rail, |entry| entries.push(entry));
        self.network.at(now + away, Happening::Timer { member: index, what: RETURN | (rail as u64) << 8 });
        self.send_control(index, 0, "fence", Packet::Fence { rail, epoch, entries });
    }

    fn receive(&mut self, index: usize, packet: Packet) {
        let now = self.network.now;
        let connection = &mut self.connections[index];
        match packet {
            Packet::Part { rail, epoch, message, imm, bytes } => {
                let state = &connection.rails[rail];
                // The receiver has closed this queue pair, or the part was under way when the rail broke.
                if epoch < state.receiver_epoch || state.lost_epoch.is_some_and(|lost| epoch <= lost) {
                    return;
                }
                match connection.receiver.arrive(rail, imm, bytes) {
                    Ok(Arrival::Partial) => {}
                    Ok(Arrival::Complete { message: completed, bytes, .. }) => {
                        if completed != message {
                            self.failures.push(format!(
                                "{now} ns: connection {index}: message {message} completed request {completed}"
                            ));
                        }
                        if connection.delivered.insert(completed, bytes).is_some() {
                            self.failures
                                .push(format!("{now} ns: connection {index}: message {completed} twice"));
                        }
                        self.post(index);
                    }
                    Err(violation) => {
                        self.failures.push(format!("{now} ns: connection {index}: {violation}"));
                    }
                }
                let link = index * LINKS + rail * 2;
                let acked = Packet::Acked { rail, epoch, message, attempt: imm.attempt };
                self.network.send_in_order(link + 1, link, acked);
            }
            Packet::Acked { rail, epoch, message, attempt } => {
                if epoch == connection.rails[rail].sender_epoch
                    && connection.sender.part_done(message, attempt, rail)
                {
                    self.message_done(index, message);
                }
            }
            Packet::Posted(posted) => connection.posted = posted,
            Packet::Fence { rail, epoch, entries } => {
                connection.rails[rail].receiver_epoch = epoch + 1;
                let mut answers = Vec::new();
                for entry in entries {
                    match connection.receiver.fence(rail, entry) {
                        Ok(answer) => answers.push(answer),
                        Err(violation) => {
                            self.failures.push(format!("{now} ns: connection {index}: {violation}"))
                        }
                    }
                }
                self.send_control(index, 1, "fence_answer", Packet::Answer { rail, entries: answers });
            }
            Packet::Answer { rail, entries } => {
                let mut done = Vec::new();
                for entry in entries {
                    connection.sender.fence_answer(rail, entry, |message| done.push(message));
                }
                connection.rails[rail].is_fencing = false;
                done.into_iter().for_each(|message| self.message_done(index, message));
            }
        }
        self.send_messages(index);
    }

    fn message_done(&mut self, index: usize, message: u64) {
        let connection = &mut self.connections[index];
        let since = connection.sizes.get(message as usize).map_or(0, |(_, since)| *since);
        self.times.push(self.network.now - since);
        if connection.done.insert(message, self.network.now).is_some() {
            self.failures
                .push(format!("{} ns: connection {index}: message {message} ended twice", self.network.now));
        }
    }

    /// Posts as many requests as there is room for.
    fn post(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let mut posted = None;
        while connection.receiver.post(ROOM).is_some() {
            posted = Some(connection.receiver.next_message());
        }
        if let Some(posted) = posted {
            self.send_control(index, 1, "clear_to_send", Packet::Posted(posted));
        }
    }

    /// Sends lost parts again, then new messages.
    fn send_messages(&mut self, index: usize) {
        loop {
            let now = self.network.now;
            let connection = &mut self.connections[index];
            let mut weights = [0; MAX_RAILS];
            for (rail, state) in connection.rails.iter().enumerate() {
                if state.is_usable() {
                    weights[rail] = 1 + self.network.random.below(4) as u32;
                }
            }
            let Some(empty) = connection.rails.iter().position(Rail::is_usable) else { return };
            if let Some((message, count, chunks)) = connection.sender.next_lost() {
                let lens: Vec<_> = chunks[..usize::from(count)]
                    .iter()
                    .map(|chunk| fixed_split(chunk.len, &weights))
                    .collect();
                match connection.sender.replay(message, &lens, empty) {
                    Ok((attempt, mask)) => self.post_parts(index, message, attempt, mask),
                    Err(error) => {
                        self.failures.push(format!("{now} ns: connection {index}: {error}"));
                        return;
                    }
                }
                continue;
            }
            let is_ready =
                connection.sender.next_message() < connection.posted && !connection.sender.is_full();
            if !connection.wants || connection.left == 0 || !is_ready {
                return;
            }
            let random = &mut self.network.random;
            let len = if random.chance(0.1) { 0 } else { random.below(ROOM / 2) } as u32;
            let lens = [fixed_split(len, &weights)];
            let pause = match self.plan.restless && random.chance(0.02) {
                // The application does something else.
                true => Some(random.below(HOUR)),
                false => random.chance(0.5).then(|| random.exponential(self.plan.latency_ns)),
            };
            match connection.sender.begin(&lens, empty) {
                Ok((message, mask)) => {
                    connection.left -= 1;
                    connection.sizes.push_back((u64::from(len), now));
                    self.post_parts(index, message, 0, mask);
                }
                Err(error) => {
                    self.failures.push(format!("{now} ns: connection {index}: {error}"));
                    return;
                }
            }
            if let Some(pause) = pause {
                self.connections[index].wants = false;
                self.network.at(now + pause, Happening::Timer { member: index, what: NEXT_MESSAGE });
            }
        }
    }

    fn post_parts(&mut self, index: usize, message: u64, attempt: u8, mask: Mask) {
        let connection = &self.connections[index];
        let imm = connection.sender.immediate(message, mask, attempt, false);
        let mut parts = Vec::with_capacity(RAILS);
        for rail in rails_of(mask) {
            let epoch = connection.rails[rail].sender_epoch;
            let bytes = connection.sender.part(message, attempt, rail).map_or(0, |part| part.bytes() as u32);
            parts.push((rail, Packet::Part { rail, epoch, message, imm, bytes }));
        }
        for (rail, packet) in parts {
            *self.packets.entry(if attempt == 0 { "part" } else { "part_again" }).or_default() += 1;
            let link = index * LINKS + rail * 2;
            self.network.send_in_order(link, link + 1, packet);
        }
    }

    fn send_control(&mut self, index: usize, from: usize, kind: &'static str, packet: Packet) {
        *self.packets.entry(kind).or_default() += 1;
        let link = index * LINKS + RAILS * 2;
        self.network.send_in_order(link + from, link + 1 - from, packet);
    }

    /// Every message was delivered once, with its size, and the sender knows it.
    fn finish(mut self) -> Outcome {
        for (index, connection) in self.connections.iter().enumerate() {
            if connection.left > 0 || connection.sender.outstanding() > 0 {
                let (left, open) = (connection.left, connection.sender.outstanding());
                self.failures.push(format!("connection {index}: {left} messages not sent, {open} never end"));
            }
            for (message, (size, _)) in connection.sizes.iter().enumerate() {
                let delivered = connection.delivered.get(&(message as u64));
                if delivered != Some(size) {
                    self.failures.push(format!(
                        "connection {index}: message {message} of {size} bytes was delivered as {delivered:?}"
                    ));
                }
            }
        }
        let now = self.network.now;
        Outcome::new(&self.plan, now, self.times, 0, self.packets, self.failures)
    }
}
