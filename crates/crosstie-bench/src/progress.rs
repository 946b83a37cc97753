//! A progress bar on standard error, if that is a terminal.

use std::io::{IsTerminal, Write, stderr};

const WIDTH: u64 = 30;

/// A progress bar. Dropping it erases it.
pub(crate) struct Progress {
    what: String,
    total: u64,
    shown: bool,
}

impl Progress {
    pub(crate) fn new(what: &str, total: u64, wanted: bool) -> Progress {
        Progress { what: what.to_owned(), total, shown: wanted && stderr().is_terminal() }
    }

    pub(crate) fn show(&mut self, done: u64) {
        if self.shown {
            let filled = (done * WIDTH / self.total.max(1)).min(WIDTH) as usize;
            let empty = WIDTH as usize - filled;
            self.write(&format!("\r{} [{}{}]", self.what, "#".repeat(filled), "-".repeat(empty)));
        }
    }

    /// Writes to the terminal. If that fails the bar is no longer shown; the benchmark goes on.
    fn write(&mut self, text: &str) {
        let written = stderr().write_all(text.as_bytes()).and_then(|()| stderr().flush());
        self.shown = written.is_ok();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            self.write("\r\x1b[K");
        }
    }
}
