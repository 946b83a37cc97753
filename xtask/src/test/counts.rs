//! Counts tests, and names those that failed, by parsing what test programs print.

use std::fmt;
use std::ops::AddAssign;

/// Tests by their result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: u64,
    pub(super) failed: u64,
    /// Tests that exist but did not run: ignored or skipped.
    pub(super) ignored: u64,
}

impl Counts {
    /// Parses a summary line, of Rust's test harness or of this project's own test programs:
    /// `test result: ok. 3 passed; 0 failed; 0 ignored; …` or `3 passed, 0 failed[, 0 skipped]`.
    pub(super) fn parse_line(line: &str) -> Option<Counts> {
        let line = line.trim();
        let (summary, separator) = match line.strip_prefix("test result: ") {
            Some(rest) => (rest.split_once(". ")?.1, ';'),
            None => (line, ','),
        };
        let mut parts = summary.split(separator).map(str::trim);
        let passed = number(parts.next()?, "passed")?;
        let failed = number(parts.next()?, "failed")?;
        let ignored = match parts.next() {
            None => 0,
            Some(part) => number(part, "ignored").or_else(|| number(part, "skipped"))?,
        };
        Some(Counts { passed, failed, ignored })
    }

    /// The number of tests.
    pub(super) fn total(self) -> u64 {
        self.passed + self.failed + self.ignored
    }
}

/// The tests of one piece of work, read line by line.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) counts: Counts,
    /// The tests that failed.
    pub(super) failures: Vec<String>,
    /// Programs of Rust's test harness with several tests whose summary did not come, by their last test: killed, or they exited. Only
    /// suspects, because the output of two programs may be mixed. Programs with one test are left out: many tests start themselves
    /// again, with one test, as another process, which ends before its summary.
    pub(super) without_summary: Vec<String>,
    /// The last line about a test of the program that runs, until its summary.
    last_test: Option<String>,
}

impl Tally {
    /// Reads one line of output.
    pub(super) fn read_line(&mut self, line: &str) {
        if let Some(counts) = Counts::parse_line(line) {
            self.last_test = None;
            self.counts += counts;
        } else if line.starts_with("running ") && line.ends_with(" tests") {
            self.end();
            self.last_test = Some(line.to_owned());
        } else if let Some(name) = failed_test(line) {
            self.failures.push(name.to_owned());
        } else if self.last_test.is_some() && line.starts_with("test ") {
            self.last_test = Some(line.to_owned());
        }
    }

    /// Ends the output.
    pub(super) fn end(&mut self) {
        if let Some(line) = self.last_test.take() {
            self.without_summary.push(format!("a test program ended without a summary after \"{line}\""));
        }
    }
}

/// The name in `test NAME ... FAILED` or `FAILED NAME`, with what follows it.
fn failed_test(line: &str) -> Option<&str> {
    let line = line.trim();
    match line.strip_prefix("FAILED") {
        Some(rest) => Some(rest.trim_start_matches([':', ' '])),
        None => line.strip_prefix("test ").filter(|rest| rest.contains(" FAILED")),
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

fn number(part: &str, word: &str) -> Option<u64> {
    part.strip_suffix(word)?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_summary_lines_are_parsed() {
        let harness = "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 3 filtered out; finished in 0.01s";
        assert_eq!(Counts::parse_line(harness), Some(Counts { passed: 12, failed: 1, ignored: 2 }));
        assert_eq!(
            Counts::parse_line("63 passed, 0 failed"),
            Some(Counts { passed: 63, failed: 0, ignored: 0 })
        );
        assert_eq!(
            Counts::parse_line("6 passed, 1 failed, 2 skipped"),
            Some(Counts { passed: 6, failed: 1, ignored: 2 })
        );
    }

    #[test]
    fn failed_tests_and_programs_without_a_summary_are_named() {
        let mut tally = Tally::default();
        let output = "running 2 tests
test a ... ok
test b ... FAILED
test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
running 3 tests
test c ... ok
running 1 test
running 2 tests
test d ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
  ok      e    3 ms
  FAILED  f
    it hung
1 passed, 1 failed
FAILED: hangs";
        output.lines().for_each(|line| tally.read_line(line));
        tally.end();
        assert_eq!(tally.counts, Counts { passed: 3, failed: 2, ignored: 0 });
        assert_eq!(tally.failures, ["b ... FAILED", "f", "hangs"]);
        assert_eq!(tally.without_summary, ["a test program ended without a summary after \"test c ... ok\""]);
    }

    #[test]
    fn other_lines_are_not_summaries() {
        for line in [
            "",
            "test a ... ok",
            "3 passed",
            "guest: 3 passed, 0 failed",
            "-1 passed, 0 failed",
            "1 passed, 0 failed, 3 seconds",
        ] {
            assert_eq!(Counts::parse_line(line), None, "{line}");
        }
    }
}
