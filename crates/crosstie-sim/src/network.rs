//! Virtual time and the packets and timers on their way.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::plan::{Jitter, Plan};
use crate::random::Random;

/// Something that happens at a virtual time.
#[derive(Clone, Debug)]
pub(crate) enum Happening<P> {
    /// A packet arrives.
    Packet {
        from: usize,
        to: usize,
        packet: P,
    },
    /// A timer of a member: the scenario knows what for.
    Timer {
        member: usize,
        what: u64,
    },
    /// A member dies.
    Death(usize),
    /// A member hears that another is dead.
    Notice {
        member: usize,
        dead: usize,
    },
    Cut,
    Healed,
}

/// The network: one clock, one queue of what happens next.
#[derive(Debug)]
pub(crate) struct Network<P> {
    pub(crate) now: u64,
    pub(crate) random: Random,
    plan: Plan,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    waiting: HashMap<usize, Happening<P>>,
    number: u64,
    /// When the last packet of a link arrives, for links that keep the order.
    in_order: HashMap<(usize, usize), u64>,
    /// The members that are cut off, while they are.
    pub(crate) cut: Option<Vec<bool>>,
    pub(crate) lost: u64,
}

impl<P: Clone> Network<P> {
    pub(crate) fn new(plan: &Plan) -> Self {
        Network {
            now: 0,
            random: Random::new(plan.seed),
            plan: *plan,
            queue: BinaryHeap::new(),
            waiting: HashMap::new(),
            number: 0,
            in_order: HashMap::new(),
            cut: None,
            lost: 0,
        }
    }

    /// Lets something happen at a time from now on.
    pub(crate) fn at(&mut self, time: u64, happening: Happening<P>) {
        self.number += 1;
        let slot = self.number as usize;
        self.waiting.insert(slot, happening);
        self.queue.push(Reverse((time.max(self.now), self.number, slot)));
    }

    /// What happens next. The clock advances.
    pub(crate) fn next(&mut self) -> Option<Happening<P>> {
        let Reverse((time, _, slot)) = self.queue.pop()?;
        self.now = time;
        self.waiting.remove(&slot)
    }

    /// Sends a packet over a link that loses nothing and keeps the order.
    pub(crate) fn send_in_order(&mut self, from: usize, to: usize, packet: P) {
        let arrival = self.now + self.latency();
        let last = self.in_order.entry((from, to)).or_insert(0);
        *last = arrival.max(*last + 1);
        let time = *last;
        self.at(time, Happening::Packet { from, to, packet });
    }

    /// Sends a packet over a link that may lose, duplicate and reorder.
    pub(crate) fn send(&mut self, from: usize, to: usize, packet: P) {
        let is_cut = self.cut.as_ref().is_some_and(|cut| cut[from] != cut[to]);
        if is_cut || self.random.chance(self.plan.loss) {
            self.lost += 1;
            return;
        }
        if self.random.chance(self.plan.duplicates) {
            let time = self.now + self.latency() * 3;
            self.at(time, Happening::Packet { from, to, packet: packet.clone() });
        }
        let time = self.now + self.latency();
        self.at(time, Happening::Packet { from, to, packet });
    }

    fn latency(&mut self) -> u64 {
        let mean = self.plan.latency_ns;
        match self.plan.jitter {
            Jitter::None => mean,
            Jitter::Uniform => mean / 2 + self.random.below(mean.max(1)),
            Jitter::Exponential => mean / 2 + self.random.exponential(mean / 2),
        }
    }
}
