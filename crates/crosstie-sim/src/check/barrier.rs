//! Checks barriers: no round is overtaken, and all survivors see the same outcome.

use std::collections::HashMap;

/// What happened in one round.
#[derive(Clone, Debug, Default)]
struct Round {
    /// When each member entered it.
    entered: HashMap<usize, u64>,
    /// Each member's outcome.
    outcomes: HashMap<usize, bool>,
    last_exit: u64,
}

/// Checks one barrier.
#[derive(Debug)]
pub(crate) struct BarrierChecker {
    rounds: HashMap<u64, Round>,
    /// From which round on each member takes part, and up to which.
    takes_part: Vec<(u64, u64)>,
    dead: Vec<bool>,
    pub(crate) failures: Vec<String>,
}

impl BarrierChecker {
    pub(crate) fn new(takes_part: &[bool]) -> Self {
        BarrierChecker {
            rounds: HashMap::new(),
            takes_part: takes_part
                .iter()
                .map(|part| if *part { (1, u64::MAX) } else { (u64::MAX, 0) })
                .collect(),
            dead: vec![false; takes_part.len()],
            failures: Vec::new(),
        }
    }

    pub(crate) fn entered(&mut self, time: u64, member: usize, round: u64) {
        self.rounds.entry(round).or_default().entered.insert(member, time);
    }

    pub(crate) fn joined(&mut self, member: usize, last_without: u64) {
        self.takes_part[member] = (last_without + 1, u64::MAX);
    }

    /// The member wants to leave: from now on it arrives by itself.
    pub(crate) fn leaves(&mut self, member: usize, last_entered: u64) {
        self.takes_part[member].1 = last_entered;
    }

    pub(crate) fn died(&mut self, member: usize) {
        self.dead[member] = true;
    }

    /// A round ended for a member. `excused`: whether a member was cut off.
    pub(crate) fn ended(
        &mut self,
        time: u64,
        member: usize,
        round: u64,
        success: bool,
        excused: impl Fn(usize) -> bool,
    ) {
        let state = self.rounds.entry(round).or_default();
        if success {
            for (other, (from, to)) in self.takes_part.iter().enumerate() {
                let expected = (*from..=*to).contains(&round) && !self.dead[other] && !excused(other);
                if expected && !state.entered.contains_key(&other) {
                    self.failures.push(format!(
                        "{time} ns: member {member} left round {round}, which member {other} has not entered"
                    ));
                }
            }
        }
        state.outcomes.insert(member, success);
        state.last_exit = state.last_exit.max(time);
    }

    /// At the end: a round has one outcome for all survivors.
    pub(crate) fn finish(&mut self, survives: impl Fn(usize) -> bool) {
        let mut rounds: Vec<_> = self.rounds.iter().collect();
        rounds.sort_by_key(|(number, _)| **number);
        for (number, round) in rounds {
            let mut members: Vec<_> =
                round.outcomes.iter().filter(|(member, _)| survives(**member)).collect();
            members.sort();
            if members.iter().any(|(_, success)| *success != members[0].1) {
                self.failures.push(format!("round {number} has two outcomes: {members:?}"));
            }
        }
    }

    /// For each round that succeeded: the time from the last entry to the last exit.
    pub(crate) fn times(&self) -> Vec<u64> {
        let succeeded = self.rounds.values().filter(|round| !round.outcomes.values().any(|success| !success));
        let times = succeeded
            .map(|round| round.last_exit.saturating_sub(round.entered.values().copied().max().unwrap_or(0)));
        times.collect()
    }

    pub(crate) fn failed_rounds(&self) -> u64 {
        self.rounds.values().filter(|round| round.outcomes.values().any(|success| !success)).count() as u64
    }
}
