//! Splits histories by key, checks each key, and reports the result.
//!
//! Each key is an independent register, so each is checked alone. If a key has only gets and puts, and no value was put twice,
//! [`unique_puts`] checks it, with any number of overlapping operations. All other keys go to [`search`].

use std::fmt;

use super::{Event, History, Outcome, search, unique_puts};
use crosstie_kv::wire::Op;

/// Limit of the steps of [`check`]: some seconds.
pub const BUDGET: u64 = 20_000_000;

/// The result of a check that passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Operations.
    pub operations: u64,
    /// Keys.
    pub keys: u64,
    /// Operations with an unknown outcome.
    pub unknown: u64,
    /// Operations that were refused.
    pub refused: u64,
    /// Steps that the search took.
    pub steps: u64,
}

/// Why a check did not pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The operations on a key are not linearizable.
    #[error("the operations on key {key:#x} are not linearizable:\n{}", Table(operations))]
    Violation {
        /// The key.
        key: u64,
        /// Those of its operations that contradict each other, whatever the key's value was before them.
        operations: Vec<Event>,
    },
    /// There are too many possible orders. Record fewer operations that overlap on a key, or check with a larger budget.
    #[error(
        "undecided: {steps} steps did not suffice for the {operations} operations on key {key:#x}; \
         record fewer that overlap, or check with a larger budget"
    )]
    Undecided {
        /// The key that was being checked.
        key: u64,
        /// Its operations.
        operations: usize,
        /// Steps taken for all keys.
        steps: u64,
    },
}

/// Checks the histories of all clients of a store that was empty at the start.
pub fn check(histories: &[History]) -> Result<Summary, Failure> {
    check_from(histories, |_| None, BUDGET)
}

/// The same, with the initial value of each key and the limit of steps.
pub fn check_from(
    histories: &[History],
    initial: impl Fn(u64) -> Option<u64>,
    budget: u64,
) -> Result<Summary, Failure> {
    let mut events: Vec<&Event> = histories.iter().flat_map(|history| &history.events).collect();
    events.sort_unstable_by_key(|event| (event.key, event.called, event.returned, event.client));
    let count = |outcome| events.iter().filter(|event| event.outcome == outcome).count() as u64;
    let mut summary = Summary {
        operations: events.len() as u64,
        unknown: count(Outcome::Unknown),
        refused: count(Outcome::Refused),
        ..Summary::default()
    };
    for of_key in events.chunk_by(|a, b| a.key == b.key) {
        let key = of_key[0].key;
        // A refused operation changed nothing, and a get without a response constrains nothing.
        let of_key: Vec<Event> = of_key.iter().map(|event| **event).filter(constrains_order).collect();
        summary.keys += 1;
        let initial = initial(key);
        let found = match unique_puts::check(&of_key, initial) {
            Some(found) => found.map_err(Some),
            None => search::check(&of_key, initial, budget, &mut summary.steps),
        };
        found.map_err(|operations| match operations {
            Some(operations) => Failure::Violation { key, operations },
            None => Failure::Undecided { key, operations: of_key.len(), steps: summary.steps },
        })?;
    }
    Ok(summary)
}

fn constrains_order(event: &Event) -> bool {
    match event.outcome {
        Outcome::Refused => false,
        Outcome::Unknown => event.op != Op::Get,
        _ => true,
    }
}

/// Operations in the order of their calls, with times from the first one on.
struct Table<'a>(&'a [Event]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.0.iter().map(|event| event.called).min().unwrap_or(0);
        writeln!(f, "{:>12} {:>12}  client  operation (ns from {start})", "called", "returned")?;
        for event in self.0 {
            let returned = match event.returned {
                Event::NEVER => "never".to_owned(),
                returned => (returned - start).to_string(),
            };
            write!(f, "{:>12} {returned:>12}  {:>6}  ", event.called - start, event.client)?;
            let Event { value, expected, returned_value, .. } = event;
            match event.op {
                Op::Get => write!(f, "get")?,
                Op::Put => write!(f, "put {value:#x}")?,
                Op::Delete => write!(f, "delete")?,
                Op::Insert => write!(f, "insert {value:#x}")?,
                Op::CompareAndSwap => write!(f, "compare-and-swap {expected:#x} to {value:#x}")?,
            }
            match (event.outcome, event.op) {
                (Outcome::Done, Op::Get) => writeln!(f, " -> {returned_value:#x}")?,
                (Outcome::Done, _) => writeln!(f, " -> done")?,
                (Outcome::NotFound, _) => writeln!(f, " -> not found")?,
                (Outcome::Mismatch, _) => writeln!(f, " -> has {returned_value:#x}")?,
                (Outcome::Refused, _) => writeln!(f, " -> refused")?,
                (Outcome::Unknown, _) => writeln!(f, " -> unknown")?,
            }
        }
        Ok(())
    }
}
