//! Checks keys with any operations: searches the possible orders in the order of time.
//!
//! At each instant there is a set of *configurations*. A configuration is a value that the register may have, together with the pending
//! operations that have taken effect to produce it. An operation must have taken effect before it returns. So when an operation
//! returns, each configuration without its effect is replaced by all configurations that apply it, and the pending operations that
//! must come before it. If no configuration is left, the history is not linearizable (just-in-time linearization: Lowe, Testing for
//! linearizability, 2017).
//!
//! Two rules keep the set small. An operation that changes nothing takes effect as soon as it can. If two configurations differ only in
//! operations of unknown outcome, the one in which fewer of them have taken effect allows all orders that the other allows, so the other
//! is dropped.

use std::collections::{HashMap, HashSet};

use super::{Event, Outcome};
use crosstie_kv::wire::Op;

/// Most operations of a key that may be pending at a time: bits of a configuration.
const MAX_PENDING: usize = 128;
/// With more configurations than this, looking for those that can be dropped costs more than it saves.
const MAX_COMPARED: usize = 2048;
/// A violation with more operations than this is not shortened.
const MAX_SHRUNK: usize = 200;

/// The number of a value. [`ABSENT`] and [`OTHER`] are special.
type Value = u32;
const ABSENT: Value = 0;
/// A value that occurs in no operation.
const OTHER: Value = 1;

/// The value that the register must have when an operation takes effect.
#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    AnyValue,
    Exactly(Value),
    /// The response is impossible in any state.
    NoState,
}

/// What an operation requires and does.
#[derive(Clone, Copy)]
struct Step {
    needs: Needs,
    /// The value afterwards, if the operation changes it.
    leaves: Option<Value>,
    /// Whether its outcome is unknown, so that it need not have taken effect.
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
    /// By bit: the pending operations that have taken effect.
    happened: u128,
}

enum Verdict {
    Linearizable,
    /// The number of the first operation whose return no order explains.
    Stuck(usize),
    Undecided,
}

/// Checks that the operations are linearizable. Otherwise returns operations that contradict each other, or `None` if the budget did not suffice.
///
/// `events` are the operations on one key, sorted by their calls, without refused operations and gets of unknown outcome.
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
            // Operations called after this return cannot have caused the contradiction.
            let end = events[at].returned;
            let events: Vec<Event> = events.iter().copied().filter(|event| event.called <= end).collect();
            Err(Some(match window(&events, budget) {
                Some(window) => shrink(window, None),
                None => shrink(events, Some(initial)),
            }))
        }
    }
}

/// `initial` is the value at the start; `None` if every value is possible.
fn run(events: &[Event], initial: Option<Option<u64>>, budget: u64, steps: &mut u64) -> Verdict {
    let (plan, values) = plan(events);
    let mut configurations: Vec<Configuration> = match initial {
        Some(initial) => vec![initial.map_or(ABSENT, |value| values.get(&value).copied().unwrap_or(OTHER))],
        None => (0..values.len() as u32 + 2).collect(),
    }
    .into_iter()
    .map(|value| Configuration { value, happened: 0 })
    .collect();

    // At the same time, calls come before returns: such operations overlap.
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

/// The step of each operation, and the number of each value. The step is `None` for an operation of unknown outcome whose effect no operation observed.
fn plan(events: &[Event]) -> (Vec<Option<Step>>, HashMap<u64, Value>) {
    let mut values = HashMap::new();
    let mut number = |value: u64| -> Value {
        let next = values.len() as u32 + 2;
        *values.entry(value).or_insert(next)
    };
    let mut plan: Vec<Option<Step>> = Vec::with_capacity(events.len());
    for event in events {
        let optional = event.outcome == Outcome::Unknown;
        let (value, expected, response) = (event.value, event.expected, event.returned_value);
        let (needs, leaves) = match (event.op, event.outcome) {
            (Op::Get, Outcome::Done) | (Op::Insert, Outcome::Mismatch) => {
                (Needs::Exactly(number(response)), None)
            }
            (Op::CompareAndSwap, Outcome::Mismatch) if response != expected => {
                (Needs::Exactly(number(response)), None)
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
    // No operation observed a value that no operation needs.
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
        let observed = |left: Value| needed[left as usize] || (any_needed && left != ABSENT);
        if step.is_some_and(|step| step.optional && step.leaves.is_some_and(|left| !observed(left))) {
            *step = None;
        }
    }
    (plan, values)
}

/// The pending operations, each with its bit.
struct PendingSteps {
    steps: [Option<Step>; MAX_PENDING],
    /// No bit from this one on is in use.
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

    /// The configurations after one more operation that changes the value, and then all operations that change nothing and can take effect.
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

    /// Drops each configuration for which there is another one that differs only in having fewer optional operations.
    fn drop_covered(&self, configurations: &mut Vec<Configuration>) {
        if self.optional == 0 || !(2..=MAX_COMPARED).contains(&configurations.len()) {
            return;
        }
        configurations
            .sort_unstable_by_key(|c| (c.value, c.happened & !self.optional, c.happened.count_ones()));
        let mut kept: Vec<Configuration> = Vec::with_capacity(configurations.len());
        for &one in &*configurations {
            let comparable = |other: &&Configuration| {
                other.value == one.value && (other.happened ^ one.happened) & !self.optional == 0
            };
            if !kept.iter().rev().take_while(comparable).any(|other| other.happened & !one.happened == 0) {
                kept.push(one);
            }
        }
        *configurations = kept;
    }
}

/// A short suffix of `events` that fails whatever the value was before. It starts where no operation with a known outcome was pending.
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
        // Earlier operations of unknown outcome may still take effect.
        let unknown = before.iter().filter(|event| !known(event));
        let candidate: Vec<Event> = unknown.chain(after).copied().collect();
        if fails(&candidate, None, budget) {
            return Some(candidate);
        }
        back *= 2;
    }
    None
}

/// Removes operations one by one, as long as the remaining ones still fail.
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
        // An operation whose value others need is kept: without it they would fail for another reason.
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
