//! Running other programs: to the end and for their output, or streamed, under a time limit, and never
//! outliving this process.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;

/// How long after its limit a program that ignores SIGTERM is killed.
const KILL_AFTER: Duration = Duration::from_secs(10);

/// How a streamed program ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By itself, with success or not.
    Itself { success: bool },
    /// It ran past its limit and was killed.
    PastLimit,
}

/// Runs a program to its end and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String, Error> {
    let done = command.stdin(Stdio::null()).output().map_err(|source| start_error(command, source))?;
    if !done.status.success() {
        return Err(Error::Program {
            command: describe(command),
            status: done.status.to_string(),
            stderr: String::from_utf8_lossy(&done.stderr).trim().to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Runs a program to its end with its output on ours; an unsuccessful end is an error.
pub(crate) fn passing_output(command: &mut Command) -> Result<(), Error> {
    let status = command.stdin(Stdio::null()).status().map_err(|source| start_error(command, source))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Program { command: describe(command), status: status.to_string(), stderr: "see above".into() })
}

/// A command that gets SIGKILL when the calling thread ends, however that comes about.
///
/// Linux ties the signal to the thread that forks, not to its process: start these from the main thread.
pub(crate) fn dies_with_us(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// A command whose whole process group is ended after `limit`, or when the calling thread ends.
///
/// `timeout` leads the group and passes the SIGTERM of our death on to all of it.
pub(crate) fn bounded(program: impl AsRef<OsStr>, limit: Duration) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "--", "timeout"]);
    command
        .arg(format!("--kill-after={}", KILL_AFTER.as_secs()))
        .arg(limit.as_secs().to_string())
        .arg(program);
    command
}

/// Runs a [`bounded`] command and shows each line of its standard output to `line`, which says whether to pass it
/// on.
pub(crate) fn stream(
    command: &mut Command,
    limit: Duration,
    mut line: impl FnMut(&str) -> bool,
) -> Result<Ended, Error> {
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
    let broken = |source| Error::File { path: "standard output".into(), source };
    let mut status = None;
    loop {
        match lines.recv_timeout(Duration::from_millis(200)) {
            Ok(bytes) => {
                if line(String::from_utf8_lossy(&bytes).trim_end()) {
                    io::stdout().write_all(&bytes).map_err(broken)?;
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
            // A process that left the group may hold the pipe open for ever; the program itself has ended.
            Err(RecvTimeoutError::Timeout) if status.is_some() => break,
            Err(RecvTimeoutError::Timeout) => {
                status = child.try_wait().map_err(|source| start_error(command, source))?;
            }
        }
    }
    io::stdout().flush().map_err(broken)?;
    let status = match status {
        Some(status) => status,
        None => child.wait().map_err(|source| start_error(command, source))?,
    };
    // `timeout` says 124 when SIGTERM was enough and dies of SIGKILL itself when it was not.
    let late = started.elapsed() >= limit && !matches!(status.code(), Some(0 | 101));
    Ok(if late { Ended::PastLimit } else { Ended::Itself { success: status.success() } })
}

/// The command as one would type it.
pub(crate) fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

fn start_error(command: &Command, source: io::Error) -> Error {
    Error::Start { program: command.get_program().to_string_lossy().into_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_shown_and_the_status_is_passed_on() {
        let limit = Duration::from_secs(60);
        let mut seen = Vec::new();
        let mut command = bounded("sh", limit);
        command.args(["-c", "echo one; printf two; exit 3"]);
        let ended = stream(&mut command, limit, |line| {
            seen.push(line.to_owned());
            false
        })
        .unwrap();
        assert_eq!(ended, Ended::Itself { success: false });
        assert_eq!(seen, ["one", "two"]);
    }

    #[test]
    fn a_hang_is_ended_with_its_children() {
        let limit = Duration::from_secs(1);
        let mut command = bounded("sh", limit);
        command.args(["-c", "sleep 600 & sleep 600"]);
        let started = Instant::now();
        assert_eq!(stream(&mut command, limit, |_| true).unwrap(), Ended::PastLimit);
        assert!(started.elapsed() < Duration::from_secs(300), "both sleeps were waited for");
    }
}
