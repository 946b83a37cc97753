//! Counts passed, failed and skipped cases and prints the result.

use std::process::ExitCode;
use std::time::Instant;

#[derive(Default)]
pub(super) struct Report {
    quiet: bool,
    run: String,
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<String>,
}

impl Report {
    pub(super) fn new(quiet: bool) -> Report {
        Report { quiet, ..Report::default() }
    }

    pub(super) fn begin(&mut self, run: &str) {
        self.run = run.to_owned();
        println!("{run}:");
    }

    pub(super) fn skip(&mut self, case: &str, reason: &str) {
        self.skipped.push(format!("{case} ({}): {reason}", self.run));
    }

    pub(super) fn fail(&mut self, what: &str) {
        self.failed.push(format!("{what} ({})", self.run));
    }

    pub(super) fn note(&mut self, case: &str, started: Instant, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => {
                self.passed += 1;
                if !self.quiet {
                    println!("  ok      {case:<52} {:>6} ms", started.elapsed().as_millis());
                }
            }
            Err(error) => {
                println!("  FAILED  {case}\n    {}", error.replace('\n', "\n    "));
                self.fail(case);
            }
        }
    }

    /// Prints the summary; the exit code is a failure if any case failed.
    pub(super) fn finish(&self) -> ExitCode {
        if !self.skipped.is_empty() {
            println!("\nskipped, not possible on this device:");
            self.skipped.iter().for_each(|s| println!("  {s}"));
        }
        if !self.failed.is_empty() {
            println!("\nfailed:");
            self.failed.iter().for_each(|f| println!("  {f}"));
        }
        println!("\n{} passed, {} failed", self.passed, self.failed.len());
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
