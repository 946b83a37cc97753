//! A small fuzzer for decoders of peer bytes. It runs on stable Rust and needs no other crate.
//!
//! A *target* is a unit test that calls [`fuzz`] with a function. The function gets bytes as a peer could send them and must not
//! panic; it also asserts what the decoder promises. The fuzzer runs the function on
//!
//! 1. the corpus: inputs that are kept in the tree, one per line as hexadecimal digits, in `tests/corpus/<target>.hex`;
//! 2. the target's own examples: valid messages, made by the encoder;
//! 3. mutations of both, until the time is over.
//!
//! `cargo test` gives each target [`SHORT_RUN`], always with the same seed, so that an unchanged tree gives the same result.
//! `cargo xtask fuzz --seconds N` builds with LLVM's coverage counters and traces of comparisons ([`coverage`]), gives each target N
//! seconds and another seed each time, and keeps inputs that reach new code. With `--save` it writes these inputs to the corpus. Both
//! print the seed; `CROSSTIE_SEED` sets it.
//!
//! An input on which the function panics is written to `target/fuzz-failures/`, made shorter if possible, and printed.
#![allow(dead_code, reason = "each crate uses a part")]

mod coverage;
mod mutation;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::rng::{Random, choose_seed, given_seed};
use coverage::Coverage;
use mutation::Mutator;

/// How long `cargo test` fuzzes one target.
const SHORT_RUN: Duration = Duration::from_millis(400);
/// The seed of these runs.
const SHORT_RUN_SEED: u64 = 1;
/// The longest input.
const MAX_INPUT: usize = 4096;
/// The longest input that is written to the corpus: longer ones would only make the files large.
const MAX_SAVED: usize = 1024;
/// The most attempts to make a failing input shorter.
const MINIMIZE_ATTEMPTS: usize = 5000;

/// Runs `check` on the corpus of `target`, on `examples`, and on mutations of both. `directory` is the crate's
/// `CARGO_MANIFEST_DIR`.
pub(crate) fn fuzz(
    directory: &str,
    target: &str,
    examples: impl IntoIterator<Item = Vec<u8>>,
    mut check: impl FnMut(&[u8]),
) {
    let seconds = std::env::var("CROSSTIE_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let time = seconds.map_or(SHORT_RUN, Duration::from_secs);
    let seed = match (seconds, given_seed()) {
        (_, Some(seed)) => seed,
        (Some(_), None) => choose_seed(),
        (None, None) => SHORT_RUN_SEED,
    };
    println!("fuzz {target}: seed {seed} (set CROSSTIE_SEED to repeat)");

    let path = Path::new(directory).join("tests/corpus").join(format!("{target}.hex"));
    let saved = read_corpus(&path);
    let mut coverage = Coverage::new();
    let mut inputs = Vec::new();
    let mut executions = 0u64;
    let mut run = |input: &[u8], coverage: &mut Coverage| {
        coverage.clear();
        match catch_unwind(AssertUnwindSafe(|| check(input))) {
            Ok(()) => coverage.collect(),
            Err(panic) => {
                let shorter = minimize(input, &mut check);
                let kept = keep_failure(target, &shorter);
                eprintln!("fuzz {target}: failed on this input (seed {seed}), {kept}\n{}", to_hex(&shorter));
                resume_unwind(panic);
            }
        }
    };
    for input in saved.iter().cloned().chain(examples) {
        run(&input, &mut coverage);
        executions += 1;
        inputs.push(input);
    }
    assert!(!inputs.is_empty(), "the target needs an example");
    let (start, known) = (Instant::now(), inputs.len());
    let mut mutator = Mutator::new(Random(seed), MAX_INPUT);
    while start.elapsed() < time {
        // The clock is read once for many inputs.
        for _ in 0..64 {
            let input = mutator.mutate(&inputs, coverage.comparisons());
            let reached_new_code = run(&input, &mut coverage);
            executions += 1;
            if reached_new_code {
                inputs.push(input);
            }
        }
    }
    let new = inputs.len() - known;
    println!(
        "fuzz {target}: {executions} inputs in {:.1} s, {} features reached, {new} new inputs kept",
        start.elapsed().as_secs_f32(),
        coverage.features()
    );
    if std::env::var_os("CROSSTIE_FUZZ_SAVE").is_some() {
        // The shortest inputs first; later ones stay only if they reach something that no shorter one reaches.
        inputs.retain(|input| input.len() <= MAX_SAVED);
        inputs.sort_by_key(|input| (input.len(), input.clone()));
        let mut coverage = Coverage::new();
        inputs.retain(|input| run(input, &mut coverage));
        write_corpus(&path, &inputs);
        println!("fuzz {target}: {} inputs in {}", inputs.len(), path.display());
    }
}

/// A shorter input on which `check` panics, too.
fn minimize(input: &[u8], check: &mut impl FnMut(&[u8])) -> Vec<u8> {
    // Thousands of panics follow. Other tests may run in this process: only the long run may silence them.
    if std::env::var_os("CROSSTIE_FUZZ_SECONDS").is_none() {
        return input.to_vec();
    }
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut best = input.to_vec();
    let (mut chunk, mut attempts) = (best.len() / 2, 0);
    while chunk > 0 && attempts < MINIMIZE_ATTEMPTS {
        let mut at = 0;
        while at < best.len() && attempts < MINIMIZE_ATTEMPTS {
            let mut shorter = best.clone();
            shorter.drain(at..(at + chunk).min(best.len()));
            attempts += 1;
            match catch_unwind(AssertUnwindSafe(|| check(&shorter))) {
                Ok(()) => at += chunk,
                Err(_) => best = shorter,
            }
        }
        chunk /= 2;
    }
    std::panic::set_hook(hook);
    best
}

fn keep_failure(target: &str, input: &[u8]) -> String {
    let directory = PathBuf::from(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()));
    let path = directory.join("fuzz-failures").join(format!("{target}.hex"));
    let written = std::fs::create_dir_all(path.parent().unwrap_or(&directory))
        .and_then(|()| std::fs::write(&path, to_hex(input) + "\n"));
    match written {
        Ok(()) => format!("written to {}", path.display()),
        Err(error) => format!("not written to {}: {error}", path.display()),
    }
}

fn read_corpus(path: &Path) -> Vec<Vec<u8>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let lines =
        text.lines().map(|line| from_hex(line).unwrap_or_else(|| panic!("{}: {line}", path.display())));
    lines.collect()
}

fn write_corpus(path: &Path, inputs: &[Vec<u8>]) {
    let lines: BTreeSet<_> = inputs.iter().map(|input| (input.len(), to_hex(input))).collect();
    let text: String = lines.into_iter().map(|(_, line)| line + "\n").collect();
    std::fs::create_dir_all(path.parent().expect("it has a directory"))
        .expect("the directory can be created");
    std::fs::write(path, text).expect("the corpus can be written");
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(line: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = line.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| (byte as char).to_digit(16);
    rest.is_empty().then_some(())?;
    pairs.iter().map(|[high, low]| Some((digit(*high)? << 4 | digit(*low)?) as u8)).collect()
}

/// Reads numbers from the front of an input, for targets that perform several steps. Zeros when the input has ended.
pub(crate) struct Steps<'a>(pub(crate) &'a [u8]);

impl<'a> Steps<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub(crate) fn word(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.take(8);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }

    /// The next `len` bytes, or all that are left.
    pub(crate) fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fuzzer itself: it finds a bug behind a length check and a magic number, given one valid message.
    #[test]
    fn fuzz_finds_a_planted_bug() {
        let decode = |input: &[u8]| {
            if let Some((b"magi", [kind, len, rest @ ..])) = input.split_first_chunk::<4>()
                && *kind < 4
                && usize::from(*len) > rest.len() + 2
            {
                panic!("planted");
            }
        };
        let found = catch_unwind(|| {
            let example = b"magi\x01\x03abc".to_vec();
            let mut mutator = Mutator::new(Random(7), 64);
            for _ in 0..200_000 {
                decode(&mutator.mutate(std::slice::from_ref(&example), &[]));
            }
        });
        assert!(found.is_err());
        assert_eq!(from_hex(&to_hex(&[0, 255, 16])), Some(vec![0, 255, 16]));
        assert_eq!((from_hex("0"), from_hex("0g")), (None, None));
    }
}
