//! Counts tests, by parsing the summary lines that test programs print.

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
