//! Runs other programs: to their end for their output, or line by line with a timeout. No program outlives this process.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;

/// How long after its timeout a program that ignores SIGTERM gets SIGKILL.
const KILL_AFTER: Duration = Duration::from_secs(10);

/// How a program ended that [`run_streaming`] ran.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It exited, with status 0 or not.
    Exited { success: bool },
    /// It ran longer than its timeout and was killed.
    TimedOut,
}

impl Outcome {
    /// What went wrong, if anything.
    pub(crate) fn problem(&self, timeout: Duration) -> Option<String> {
        match self {
            Outcome::Exited { success: true } => None,
            Outcome::Exited { success: false } => Some("it failed; its output is above".into()),
            Outcome::TimedOut => {
                Some(format!("it did not end within {} s and was killed", timeout.as_secs()))
            }
        }
    }
}

/// Runs a program to its end and returns its standard output.
pub(crate) fn run_for_output(command: &mut Command) -> Result<String, Error> {
    let done = command.stdin(Stdio::null()).output().map_err(|source| start_error(command, source))?;
    if !done.status.success() {
        return Err(Error::Program {
            command: command_line(command),
            status: done.status.to_string(),
            stderr: String::from_utf8_lossy(&done.stderr).trim().to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Runs a program to its end; its output goes to the output of this process. A failure status is an error.
pub(crate) fn run_inheriting_output(command: &mut Command) -> Result<(), Error> {
    let status = command.stdin(Stdio::null()).status().map_err(|source| start_error(command, source))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Program {
        command: command_line(command),
        status: status.to_string(),
        stderr: "its output is above".into(),
    })
}

/// Creates a command whose process gets SIGKILL when the calling thread ends, for whatever reason.
///
/// Linux sends the signal when the thread that forked ends, not its process: start these commands from the main thread.
pub(crate) fn killed_with_parent(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Creates a command whose whole process group is ended after `timeout`, or when the calling thread ends.
///
/// The program `timeout` leads the group. When the calling thread ends, `timeout` gets SIGTERM and forwards it to the
/// group.
pub(crate) fn with_timeout(program: impl AsRef<OsStr>, timeout: Duration) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--", "timeout"]);
    command
        .arg(format!("--kill-after={}", KILL_AFTER.as_secs()))
        .arg(timeout.as_secs().to_string())
        .arg(program);
    command
}

/// Runs a command made by [`with_timeout`] and passes each line of its standard output to `line`. When `line` returns
/// true, the line is printed, too.
pub(crate) fn run_streaming(
    command: &mut Command,
    timeout: Duration,
    mut line: impl FnMut(&str) -> bool,
) -> Result<Outcome, Error> {
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|source| start_error(command, source))?;
    let (sender, lines) = sync_channel(1024);
    let stdout = child.stdout.take();
    thread::spawn(move || {
        let mut reader = BufReader::new(stdout?);
        loop {
            let mut bytes = Vec::new();
            let end = reader.read_until(b'\n', &mut bytes).ok()?;
            if end == 0 || sender.send(bytes).is_err() {
                return Some(());
            }
        }
    });
    let stdout_error = |source| Error::File { path: "standard output".into(), source };
    let mut status = None;
    loop {
        match lines.recv_timeout(Duration::from_millis(200)) {
            Ok(bytes) => {
                if line(String::from_utf8_lossy(&bytes).trim_end()) {
                    io::stdout().write_all(&bytes).map_err(stdout_error)?;
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
            // The program has ended, but a process that left its group may keep the pipe open for ever.
            Err(RecvTimeoutError::Timeout) if status.is_some() => break,
            Err(RecvTimeoutError::Timeout) => {
                status = child.try_wait().map_err(|source| start_error(command, source))?;
            }
        }
    }
    io::stdout().flush().map_err(stdout_error)?;
    let status = match status {
        Some(status) => status,
        None => child.wait().map_err(|source| start_error(command, source))?,
    };
    // `timeout` exits with 124 when SIGTERM was enough, and is itself killed by SIGKILL when it was not.
    let timed_out = started.elapsed() >= timeout && !matches!(status.code(), Some(0 | 101));
    Ok(if timed_out { Outcome::TimedOut } else { Outcome::Exited { success: status.success() } })
}

/// The command as text, as a user would type it.
pub(crate) fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

pub(crate) fn start_error(command: &Command, source: io::Error) -> Error {
    Error::Start { program: command.get_program().to_string_lossy().into_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_exit_status_are_reported() {
        let timeout = Duration::from_secs(60);
        let mut seen = Vec::new();
        let mut command = with_timeout("sh", timeout);
        command.args(["-c", "echo one; printf two; exit 3"]);
        let outcome = run_streaming(&mut command, timeout, |line| {
            seen.push(line.to_owned());
            false
        })
        .unwrap();
        assert_eq!(outcome, Outcome::Exited { success: false });
        assert_eq!(seen, ["one", "two"]);
    }

    #[test]
    fn hanging_program_is_ended_with_its_children() {
        let timeout = Duration::from_secs(1);
        let mut command = with_timeout("sh", timeout);
        command.args(["-c", "sleep 600 & sleep 600"]);
        let started = Instant::now();
        assert_eq!(run_streaming(&mut command, timeout, |_| true).unwrap(), Outcome::TimedOut);
        assert!(started.elapsed() < Duration::from_secs(300), "it waited for the sleeps");
    }
}
