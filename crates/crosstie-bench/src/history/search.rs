//! Keys with any operations: a search through the possible orders, along with time.
//!
//! At each instant there is a set of *configurations*: a value that the register can have, with those of the operations under
//! way that must have happened for it. An operation has to have happened when it returns: each configuration
//! in which it has not is replaced by those in which it, and whatever else must come before, has. If none is left, there is no order
//! (just-in-time linearization: Lowe, Testing for linearizability, 2017).
//!
//! What keeps the set small: an operation that changes nothing happens as soon as it can. Of two configurations that differ in
//! operations of unknown outcome only, the one in which fewer have happened can do all that the other can.

use std::collections::{HashMap, HashSet};

use super::{Event, Outcome};
use crosstie_kv::wire::Op;

/// Operations of a key that may be under way at a time: bits of a configuration.
const MAX_PENDING: usize = 128;
/// Configurations beyond which it is not worth looking for those that others cover.
const MAX_COMPARED: usize = 2048;
/// Operations of a violation beyond which it is shown as it is.
const MAX_SHRUNK: usize = 200;

/// Number of a value. There are two special ones.
type Value = u32;
const ABSENT: Value = 0;
/// Some value that no operation names.
const OTHER: Value = 1;

#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    AnyValue,
    Exactly(Value),
    /// Its answer contradicts itself.
    NoState,
}

#[derive(Clone, Copy)]
struct Step {
    needs: Needs,
    leaves: Option<Value>,
    optional: bool,
}

impl Step {
    fn can_happen(&self, value: Value) -> bool {
        match self.needs {
            Needs::Nothing => true,
            Needs::AnyValue => value != ABSENT,
            Needs::Exactly(needed) => needed == value,
            Needs::NoState => false,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Configuration {
    value: Value,
    happened: u128,
}

enum Verdict {
    Linearizable,
    /// The operation that cannot have returned, by number.
    Stuck(usize),
    Undecided,
}

/// Whether there is an order; if not, operations that contradict each other, or `None` if the budget did not suffice.
///
/// `events` are one key's, sorted by their calls, without refused operations and gets of unknown outcome.
pub(super) fn check(
    events: &[Event],
    initial: Option<u64>,
    budget: u64,
    steps: &mut u64,
) -> Result<(), Option<Vec<Event>>> {
    match run(events, Some(initial), budget, steps) {
        Verdict::Linearizable => Ok(()),
        Verdict::Undecided => Err(None),
        Verdict::Stuck(at) => {
            // What was called after that has nothing to do with it.
            let end = events[at].returned;
            let events: Vec<Event> = events.iter().copied().filter(|event| event.called <= end).collect();
            Err(Some(match window(&events, budget) {
                Some(window) => shrink(window, None),
                None => shrink(events, Some(initial)),
            }))
        }
    }
}

/// `initial` is the value at the start, or `None` if it may have been any.
fn run(events: &[Event], initial: Option<Option<u64>>, budget: u64, steps: &mut u64) -> Verdict {
    let (plan, values) = plan(events);
    let mut configurations: Vec<Configuration> = match initial {
        Some(initial) => vec![initial.map_or(ABSENT, |value| values.get(&value).copied().unwrap_or(OTHER))],
        None => (0..values.len() as u32 + 2).collect(),
    }
    .into_iter()
    .map(|value| Configuration { value, happened: 0 })
    .collect();

    // Calls before returns of the same time: then the two overlap.
    let mut times: Vec<(u64, bool, u32)> = Vec::with_capacity(2 * events.len());
    for (number, event) in events.iter().enumerate().filter(|(number, _)| plan[*number].is_some()) {
        times.push((event.called, false, number as u32));
        if event.outcome != Outcome::Unknown {
            times.push((event.returned, true, number as u32));
        }
    }
    times.sort_unstable();

    let mut pending = PendingSteps { steps: [None; MAX_PENDING], len: 0, optional: 0 };
    let mut bit_of = vec![0u8; events.len()];
    let mut seen = HashSet::new();
    for (_, returns, number) in times {
        if !returns {
            let Some(step) = plan[number as usize] else { continue };
            let Some(bit) = pending.add(step) else { return Verdict::Undecided };
            bit_of[number as usize] = bit as u8;
            if step.leaves.is_none() {
                for configuration in configurations.iter_mut().filter(|c| step.can_happen(c.value)) {
                    configuration.happened |= 1 << bit;
                }
            }
            continue;
        }
        let bit = usize::from(bit_of[number as usize]);
        *steps += configurations.len() as u64;
        let (done, mut to_do): (Vec<_>, Vec<_>) =
            configurations.into_iter().partition(|configuration| configuration.happened >> bit & 1 == 1);
        configurations = done;
        if !to_do.is_empty() {
            seen.clear();
            seen.extend(configurations.iter().chain(&to_do).copied());
            while let Some(from) = to_do.pop() {
                for next in pending.after(from) {
                    *steps += 1;
                    if seen.insert(next) {
                        let has = next.happened >> bit & 1 == 1;
                        if has { configurations.push(next) } else { to_do.push(next) }
                    }
                }
                if *steps > budget {
                    return Verdict::Undecided;
                }
            }
        }
        if configurations.is_empty() {
            return Verdict::Stuck(number as usize);
        }
        if *steps > budget {
            return Verdict::Undecided;
        }
        pending.remove(bit);
        for configuration in &mut configurations {
            configuration.happened &= !(1 << bit);
        }
        pending.drop_covered(&mut configurations);
    }
    Verdict::Linearizable
}

/// What each operation needs and leaves, and the numbers of values. `None` for operations of unknown outcome that nobody noticed.
fn plan(events: &[Event]) -> (Vec<Option<Step>>, HashMap<u64, Value>) {
    let mut values = HashMap::new();
    let mut number = |value: u64| -> Value {
        let next = values.len() as u32 + 2;
        *values.entry(value).or_insert(next)
    };
    let mut plan: Vec<Option<Step>> = Vec::with_capacity(events.len());
    for event in events {
        let optional = event.outcome == Outcome::Unknown;
        let (value, expected, answer) = (event.value, event.expected, event.answer);
        let (needs, leaves) = match (event.op, event.outcome) {
            (Op::Get, Outcome::Done) | (Op::Insert, Outcome::Mismatch) => {
                (Needs::Exactly(number(answer)), None)
            }
            (Op::CompareAndSwap, Outcome::Mismatch) if answer != expected => {
                (Needs::Exactly(number(answer)), None)
            }
            (Op::Get | Op::Delete | Op::CompareAndSwap, Outcome::NotFound) => (Needs::Exactly(ABSENT), None),
            (Op::Put, Outcome::Done | Outcome::Unknown) => (Needs::Nothing, Some(number(value))),
            (Op::Delete, Outcome::Done | Outcome::Unknown) => (Needs::AnyValue, Some(ABSENT)),
            (Op::Insert, Outcome::Done | Outcome::Unknown) => (Needs::Exactly(ABSENT), Some(number(value))),
            (Op::CompareAndSwap, Outcome::Done | Outcome::Unknown) => {
                (Needs::Exactly(number(expected)), Some(number(value)))
            }
            _ => (Needs::NoState, None),
        };
        plan.push(Some(Step { needs, leaves, optional }));
    }
    // Nobody noticed a value that nobody needs.
    let mut needed = vec![false; values.len() + 2];
    let mut any_needed = false;
    for step in plan.iter().flatten() {
        match step.needs {
            Needs::Exactly(value) => needed[value as usize] = true,
            Needs::AnyValue => any_needed = true,
            Needs::Nothing | Needs::NoState => {}
        }
    }
    for step in &mut plan {
        let noticed = |left: Value| needed[left as usize] || (any_needed && left != ABSENT);
        if step.is_some_and(|step| step.optional && step.leaves.is_some_and(|left| !noticed(left))) {
            *step = None;
        }
    }
    (plan, values)
}

/// Operations under way, each with its bit.
struct PendingSteps {
    steps: [Option<Step>; MAX_PENDING],
    /// No bit from here on is in use.
    len: usize,
    optional: u128,
}

impl PendingSteps {
    fn add(&mut self, step: Step) -> Option<usize> {
        let bit = self.steps.iter().position(Option::is_none)?;
        self.steps[bit] = Some(step);
        self.len = self.len.max(bit + 1);
        self.optional |= u128::from(step.optional) << bit;
        Some(bit)
    }

    fn remove(&mut self, bit: usize) {
        self.steps[bit] = None;
        self.optional &= !(1 << bit);
        while self.len > 0 && self.steps[self.len - 1].is_none() {
            self.len -= 1;
        }
    }

    fn steps(&self) -> impl Iterator<Item = (usize, &Step)> {
        self.steps[..self.len].iter().enumerate().filter_map(|(bit, step)| Some((bit, step.as_ref()?)))
    }

    /// The configurations after one more operation that changes something, and all then that change nothing.
    fn after(&self, from: Configuration) -> impl Iterator<Item = Configuration> {
        self.steps().filter_map(move |(bit, step)| {
            let value =
                step.leaves.filter(|_| from.happened >> bit & 1 == 0 && step.can_happen(from.value))?;
            let mut happened = from.happened | 1 << bit;
            for (bit, step) in self.steps() {
                if step.leaves.is_none() && step.can_happen(value) {
                    happened |= 1 << bit;
                }
            }
            Some(Configuration { value, happened })
        })
    }

    /// Drops configurations beside which there is one with fewer optional operations.
    fn drop_covered(&self, configurations: &mut Vec<Configuration>) {
        if self.optional == 0 || !(2..=MAX_COMPARED).contains(&configurations.len()) {
            return;
        }
        configurations
            .sort_unstable_by_key(|c| (c.value, c.happened & !self.optional, c.happened.count_ones()));
        let mut kept: Vec<Configuration> = Vec::with_capacity(configurations.len());
        for &one in &*configurations {
            let alike = |other: &&Configuration| {
                other.value == one.value && (other.happened ^ one.happened) & !self.optional == 0
            };
            if !kept.iter().rev().take_while(alike).any(|other| other.happened & !one.happened == 0) {
                kept.push(one);
            }
        }
        *configurations = kept;
    }
}

/// The shortest end of `events` that fails whatever the value was before, cut where nothing was under way.
fn window(events: &[Event], budget: u64) -> Option<Vec<Event>> {
    let known = |event: &&Event| event.outcome != Outcome::Unknown;
    let mut cuts = Vec::new();
    let mut busy_until = None;
    for (number, event) in events.iter().enumerate().filter(|(_, event)| known(event)) {
        if busy_until.is_none_or(|until| until < event.called) {
            cuts.push(number);
        }
        busy_until = busy_until.max(Some(event.returned));
    }
    let mut back = 1;
    while back <= cuts.len() {
        let (before, after) = events.split_at(cuts[cuts.len() - back]);
        // What may still be done comes along.
        let unknown = before.iter().filter(|event| !known(event));
        let candidate: Vec<Event> = unknown.chain(after).copied().collect();
        if fails(&candidate, None, budget) {
            return Some(candidate);
        }
        back *= 2;
    }
    None
}

/// Drops operations, one by one, without which the others still fail.
fn shrink(mut kept: Vec<Event>, initial: Option<Option<u64>>) -> Vec<Event> {
    let mut at = 0;
    while kept.len() <= MAX_SHRUNK && at < kept.len() {
        let (plan, _) = plan(&kept);
        let needed = |value: Value| {
            plan.iter().flatten().any(|step| match step.needs {
                Needs::Exactly(exactly) => exactly == value,
                Needs::AnyValue => true,
                Needs::Nothing | Needs::NoState => false,
            })
        };
        // A change that others need stays: without it they would fail for another reason.
        let droppable = plan[at].is_none_or(|step| step.leaves.is_none_or(|value| !needed(value)));
        let mut without = kept.clone();
        without.remove(at);
        if droppable && fails(&without, initial, 100_000) {
            kept = without;
        } else {
            at += 1;
        }
    }
    kept
}

fn fails(events: &[Event], initial: Option<Option<u64>>, budget: u64) -> bool {
    matches!(run(events, initial, budget, &mut 0), Verdict::Stuck(_))
}
