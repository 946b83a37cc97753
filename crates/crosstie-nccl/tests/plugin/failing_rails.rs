//! The traffic of NCCL's all_reduce between two processes, over two rails that fail and return at random.
//!
//! The devices of both processes are `fault:SEED/KIND=N...:software`, so that requests, acknowledgements and ports fail, links stall, at
//! one end or at both.
//!
//! `CROSSTIE_SEED` repeats a run; `CROSSTIE_STRESS_SECONDS` runs more of them.

use std::io::{BufRead, Read, Write};
use std::time::{Duration, Instant};

use crate::cases;
use crate::rng::{Random, choose_seed};
use crate::traffic;

cases!(
    all_reduce_traffic_survives_rails_that_fail_and_return,
    all_reduce_traffic_ends_when_acknowledged_receives_fail,
);

const CHANNELS: usize = 3;
/// In a ring, a rank passes on what it has received.
const AHEAD: usize = 12;

/// The two rails of a process.
fn devices(random: &mut Random, receives_fail: bool) -> String {
    let rail = |random: &mut Random| {
        if random.below(4) == 0 {
            return "software".to_owned();
        }
        let mut kinds = Vec::new();
        for (kind, least, most) in [
            ("lose", 40, 400),
            ("fail", 40, 400),
            ("down", 100, 800),
            ("stall", 200, 1500),
            ("refuse", 16, 256),
            ("hold", 4, 32),
        ] {
            if random.below(3) == 0 {
                kinds.push(format!("{kind}={}", least + random.below(most - least)));
            }
        }
        if receives_fail && random.below(2) == 0 {
            kinds.push(format!("fail-receive={}", 100 + random.below(300)));
        }
        format!("fault:{}/{}:software", random.next() >> 32, kinds.join("/"))
    };
    format!("{}+{}", rail(random), rail(random))
}

/// What a process printed: its result, and the rest.
struct Outcome {
    rc: String,
    lines: Vec<String>,
}

impl Outcome {
    fn has(&self, text: &str) -> bool {
        self.lines.iter().any(|line| line.contains(text))
    }

    fn failures(&self) -> u64 {
        let words = self
            .lines
            .iter()
            .flat_map(|line| line.split(", "))
            .filter_map(|part| part.strip_suffix(" failures"));
        words.filter_map(|number| number.parse::<u64>().ok()).sum()
    }
}

/// Runs two processes until both have ended.
fn run(seed: u64, count: usize, receives_fail: bool) -> [Outcome; 2] {
    let mut random = Random(seed);
    let rails = [devices(&mut random, receives_fail), devices(&mut random, receives_fail)];
    println!("  seed {seed}: {} and {}", rails[0], rails[1]);
    let start = |rank: usize| {
        let variables = [("CROSSTIE_NCCL_DEVICES", rails[rank].as_str())];
        traffic::start(seed, rank, count, CHANNELS, AHEAD, &variables)
    };
    let mut peers = [start(0), start(1)];
    let handles = peers.each_mut().map(|peer| {
        let mut handles = String::new();
        (0..CHANNELS).for_each(|_| _ = peer.output.read_line(&mut handles).unwrap());
        handles
    });
    for (rank, peer) in peers.iter_mut().enumerate() {
        peer.input.write_all(handles[1 - rank].as_bytes()).unwrap();
    }
    std::thread::scope(|scope| {
        let readers = peers.each_mut().map(|peer| {
            scope.spawn(move || {
                let mut lines: Vec<String> = peer.output.by_ref().lines().map(Result::unwrap).collect();
                let status = peer.child.wait().unwrap();
                let rc = if lines.is_empty() { String::new() } else { lines.remove(0) };
                lines.push(format!("{status}"));
                Outcome { rc: if status.success() { rc } else { format!("{rc}; {status}") }, lines }
            })
        });
        readers.map(|reader| reader.join().unwrap())
    })
}

fn fail(seed: u64, ends: &[Outcome; 2]) -> ! {
    for (rank, end) in ends.iter().enumerate() {
        println!("  process {rank}: {}", end.rc);
        end.lines.iter().for_each(|line| println!("    {line}"));
    }
    panic!("CROSSTIE_SEED={seed}");
}

/// Calls `run` for some seeds, or for as long as `CROSSTIE_STRESS_SECONDS` says.
fn for_seeds(mut run: impl FnMut(u64)) {
    let seconds = std::env::var("CROSSTIE_STRESS_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let (began, first) = (Instant::now(), choose_seed());
    for round in 0u64.. {
        let is_over = match seconds {
            Some(seconds) => began.elapsed() > Duration::from_secs(seconds),
            None => round == 4,
        };
        if is_over {
            break;
        }
        run(first.wrapping_add(round << 20));
    }
}

fn all_reduce_traffic_survives_rails_that_fail_and_return() {
    let mut failures = 0;
    for_seeds(|seed| {
        let ends = run(seed, 100, false);
        if ends.iter().any(|end| end.rc != "rc 0" || !end.has("violations 0")) {
            fail(seed, &ends);
        }
        failures += ends.iter().map(Outcome::failures).sum::<u64>();
    });
    println!("  {failures} failures of rails");
}

/// A device that fails after it has acknowledged a message and before it has reported it: either the sender still has the
/// message, or both ends learn the cause. Neither end waits.
fn all_reduce_traffic_ends_when_acknowledged_receives_fail() {
    let mut lost = 0;
    for_seeds(|seed| {
        let ends = run(seed, 100, true);
        let is_whole = ends.iter().all(|end| end.rc == "rc 0");
        let is_explained = ends.iter().any(|end| end.has("a device failed between the acknowledgement"))
            && ends.iter().all(|end| matches!(end.rc.as_str(), "rc 0" | "rc 2" | "rc 6"));
        if !is_whole && !is_explained {
            fail(seed, &ends);
        }
        lost += u64::from(!is_whole);
    });
    println!("  {lost} runs ended with a lost message");
}
