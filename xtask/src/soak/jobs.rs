//! The sequence of jobs: the kinds take turns, and each kind chooses at random.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use super::programs::{Program, Programs, property_tests};
use super::rng::Random;
use crate::error::Error;
use crate::workspace;

/// A kind of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Simulations of locks, barriers, messages, credits and rails with random parameters
    Simulator,
    /// Property tests with many times their usual cases
    Properties,
    /// Tests that kill or stop real processes
    Kills,
    /// Workloads over the fault device
    Faults,
    /// Decoders of peer bytes, with their corpus
    Fuzz,
}

/// One command, of seconds.
pub(crate) struct Job {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) variables: Vec<(&'static str, String)>,
    /// Where it runs.
    pub(crate) directory: PathBuf,
    /// After this time it has failed.
    pub(crate) timeout: Duration,
    /// The same as a user types it, at the root of the repository.
    pub(crate) repeat: String,
}

/// What a job runs of a test program.
#[derive(Clone, Copy)]
enum Part {
    /// One of its tests.
    Test,
    /// All of it, for a minute or more: it takes no names of tests. Short runs leave it out.
    Whole,
}
use Part::{Test, Whole};

/// The package and the name of a test program, and how the names of its tests begin.
type Source = (&'static str, &'static str, &'static str, Part);

const KILLS: &[Source] = &[
    ("crosstie", "local_rpc", "processes::", Test),
    ("crosstie", "stopped_peers", "", Test),
    ("crosstie", "endpoint", "failure::", Test),
    ("crosstie", "endpoint", "restarts::", Test),
    ("crosstie", "copyrpc", "failure::", Test),
    ("crosstie-kv", "store", "processes::", Test),
    ("crosstie-kv", "store", "nodes::", Test),
    ("crosstie-kv", "store", "stopped_node::", Test),
    ("crosstie-cli", "program", "kv_serve::", Test),
    ("crosstie", "kill", "", Whole),
    ("crosstie", "local_kill", "", Whole),
    ("crosstie", "group_processes", "", Whole),
];
const FAULTS: &[Source] = &[
    ("crosstie", "device", "fault::", Test),
    ("crosstie", "rails", "", Test),
    ("crosstie", "endpoint", "", Test),
    ("crosstie", "conformance", "", Test),
    ("crosstie-nccl", "plugin", "", Test),
];
/// Seconds of each stress test and each fuzz target.
const STRESS_SECONDS: u64 = 5;
/// The cases of a property test that does not say how many.
const USUAL_CASES: u32 = 256;
/// How many times the usual cases of property tests a soak runs, and a short one.
const TIMES_CASES: u32 = 100;
const TIMES_CASES_SHORT: u32 = 8;
/// Operations of all members of a simulation job.
const SIMULATED: u64 = 150_000;
const SIMULATED_SHORT: u64 = 30_000;
/// After this time a job has failed: long enough for every test on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(900);

/// The sequence.
pub(crate) struct Jobs {
    random: Random,
    turn: usize,
    kinds: Vec<Kind>,
    programs: Programs,
    properties: Vec<(Program, String)>,
    fuzz: Vec<(Program, String)>,
    kills: Vec<(Program, String)>,
    faults: Vec<(Program, String)>,
    is_short: bool,
}

impl Jobs {
    /// Builds the programs. `only`: these kinds; all if empty. `is_short`: no job of minutes.
    pub(crate) fn build(seed: u64, only: &[Kind], is_short: bool) -> Result<Jobs, Error> {
        let programs = Programs::build()?;
        let names = property_tests()?;
        let is_property = |test: &str| names.iter().any(|name| test.rsplit("::").next() == Some(name));
        let properties = programs.unit_tests(is_property)?;
        let fuzz = programs.unit_tests(|test| test.contains("fuzz_"))?;
        let of = |sources: &[Source]| -> Result<Vec<(Program, String)>, Error> {
            let mut found = Vec::new();
            for &(package, name, prefix, part) in sources {
                let program = programs.find(package, name)?;
                match part {
                    Test => {
                        let tests = program.tests()?.into_iter().filter(|test| test.starts_with(prefix));
                        found.extend(tests.map(|test| (program.clone(), test)));
                    }
                    Whole if is_short => {}
                    Whole => found.push((program.clone(), String::new())),
                }
            }
            Ok(found)
        };
        let (kills, faults) = (of(KILLS)?, of(FAULTS)?);
        let kinds = match only {
            [] => Kind::value_variants().to_vec(),
            only => only.to_vec(),
        };
        Ok(Jobs { random: Random(seed), turn: 0, kinds, programs, properties, fuzz, kills, faults, is_short })
    }

    /// The next job.
    pub(crate) fn next(&mut self) -> Job {
        let kind = self.kinds[self.turn % self.kinds.len()];
        self.turn += 1;
        let seed = self.random.next() >> 1;
        let of = |from: &[(Program, String)], random: &mut Random| from[random.index(from.len())].clone();
        let ((program, test), variables) = match kind {
            Kind::Simulator => return self.simulation(seed),
            Kind::Properties => {
                let times = if self.is_short { TIMES_CASES_SHORT } else { TIMES_CASES };
                let cases = (USUAL_CASES * times).to_string();
                let variables = vec![("PROPTEST_CASES", cases), ("PROPTEST_RNG_SEED", seed.to_string())];
                (of(&self.properties, &mut self.random), variables)
            }
            Kind::Kills => {
                let variables = vec![("CROSSTIE_STRESS_SECONDS", STRESS_SECONDS.to_string())];
                (of(&self.kills, &mut self.random), variables)
            }
            Kind::Faults => {
                let variables = vec![("CROSSTIE_STRESS_SECONDS", STRESS_SECONDS.to_string())];
                (of(&self.faults, &mut self.random), variables)
            }
            Kind::Fuzz => {
                let variables = vec![("CROSSTIE_FUZZ_SECONDS", STRESS_SECONDS.to_string())];
                (of(&self.fuzz, &mut self.random), variables)
            }
        };
        test_job(&program, &test, seed, variables)
    }

    /// A simulation with random parameters.
    fn simulation(&mut self, seed: u64) -> Job {
        let random = &mut self.random;
        let scenario = ["lock", "barrier", "message", "credits", "rails"][random.index(5)];
        let share = |random: &mut Random, largest: u64| match random.below(3) {
            0 => 0.0,
            _ => random.below(largest) as f64 / 1000.0,
        };
        // Small groups reach more orders of few events, large ones reach deep trees and long queues.
        let members = match random.below(4) {
            0 => 2 + random.below(4),
            3 => 2 + random.below(62),
            _ => 2 + random.below(14),
        };
        let operations = 5 + random.below(60);
        let mut words = vec![
            scenario.to_owned(),
            format!("--members={members}"),
            format!("--operations={operations}"),
            format!("--latency-ns={}", 200 + random.below(20_000)),
            format!("--jitter={}", ["none", "uniform", "exponential"][random.index(3)]),
        ];
        let has_deaths = matches!(scenario, "lock" | "barrier" | "message");
        if has_deaths {
            words.push(format!("--loss={}", share(random, 200)));
            words.push(format!("--duplicates={}", share(random, 100)));
            // Room for those that pause.
            let most = if scenario == "message" { members - 1 } else { members / 2 };
            match random.below(4) {
                0 => {}
                1 if members >= 3 => words.push("--partition".into()),
                _ => words.push(format!("--deaths={}", random.below(most + 1))),
            }
        }
        if matches!(scenario, "lock" | "barrier") {
            words.extend((random.below(2) == 0).then(|| "--unkind".to_owned()));
            // With the deaths fewer than all members; a partition needs three members more.
            let most = (members / 2).saturating_sub(2) / 2;
            words.push(format!("--pauses={}", random.below(most + 1)));
            words.push(format!("--expulsions={}", random.below(most + 1)));
        }
        match scenario {
            "lock" => words.push(format!("--locks={}", 1 + random.below(6))),
            "barrier" => words.push(format!("--fanout={}", 1 + random.below(8))),
            "message" => {
                words.push(format!("--ack-every={}", 1 + random.below(16)));
                words.push(format!("--combine-from={}", 1 + random.below(16)));
                words.extend((random.below(3) == 0).then(|| "--blind-retry".to_owned()));
                words.extend((random.below(3) == 0).then(|| "--go-back".to_owned()));
            }
            _ => {}
        }
        words.extend((random.below(2) == 0).then(|| "--restless".to_owned()));
        // A message goes to every other member.
        let each = members * operations * if scenario == "message" { members } else { 1 };
        let budget = if self.is_short { SIMULATED_SHORT } else { SIMULATED };
        words.push(format!("--seeds={}", (budget / each).max(1)));
        words.push(format!("--seed={seed}"));
        let repeat = format!("cargo run --release -- sim {}", words.join(" "));
        Job {
            program: self.programs.crosstie.clone(),
            arguments: ["sim".to_owned()].into_iter().chain(words).map(OsString::from).collect(),
            variables: Vec::new(),
            directory: workspace::root().to_owned(),
            timeout: TIMEOUT,
            repeat,
        }
    }
}

/// Runs one test of a program, or the whole program if `test` is empty.
fn test_job(program: &Program, test: &str, seed: u64, mut variables: Vec<(&'static str, String)>) -> Job {
    variables.push(("CROSSTIE_SEED", seed.to_string()));
    let arguments = program.arguments_for(test);
    let target = if program.is_unit { "--lib".to_owned() } else { format!("--test {}", program.name) };
    let set: String = variables.iter().map(|(name, value)| format!("{name}={value} ")).collect();
    let behind = if arguments.is_empty() { String::new() } else { format!(" -- {}", arguments.join(" ")) };
    Job {
        program: program.path.clone(),
        arguments: arguments.into_iter().map(OsString::from).collect(),
        variables,
        directory: program.directory.clone(),
        timeout: TIMEOUT,
        repeat: format!("{set}cargo test -p {} {target}{behind}", program.package),
    }
}
