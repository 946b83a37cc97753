//! A process that is this program again: a test starts itself, or another test of its program, with a task.
//!
//! ```ignore
//! #[test]
//! fn killed_peer_is_noticed() {
//!     let mut peer = Child::start(peer_process, "answers");
//!     connect(&peer.read());
//!     peer.kill();
//! }
//!
//! /// Does nothing unless a test starts it.
//! #[test]
//! fn peer_process() {
//!     if let Some(task) = child::task() {
//!         child::write(own_address());
//!         answer(&task)
//!     }
//! }
//! ```
//!
//! The two exchange messages over standard input and output. The test harness writes to the same output, so each message is a line with
//! a mark.

use std::any::type_name;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

/// Environment variable that tells a child its task.
pub const TASK: &str = "CROSSTIE_TEST_TASK";
/// Introduces a message of a child.
const MARK: &str = "crosstie message: ";

/// The task of this process, if a test has started it.
pub fn task() -> Option<String> {
    std::env::var(TASK).ok()
}

/// Whether a test has started this process.
pub fn is_child() -> bool {
    std::env::var_os(TASK).is_some()
}

/// The task of a child that runs a whole test.
const ALONE: &str = "alone";

/// Runs one test in a process of its own, because it measures or changes what belongs to the whole process. Returns false in that process,
/// where the test goes on.
pub fn run_alone(test: impl Fn()) -> bool {
    if task().is_some_and(|task| task == ALONE) {
        return false;
    }
    let ended = command(test, ALONE).output().unwrap();
    let [text, errors] = [&ended.stdout, &ended.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    for line in text.lines().chain(errors.lines()) {
        println!("| {line}");
    }
    assert!(ended.status.success(), "the process of this test failed: {}", ended.status);
    assert!(text.contains("1 passed"), "the process ran no test");
    true
}

/// The arguments with which this program runs this test alone.
fn arguments_for<T: Fn()>(_test: &T) -> [&'static str; 3] {
    let (_program, name) = type_name::<T>().split_once("::").expect("the test is a function");
    [name, "--exact", "--nocapture"]
}

/// A command that runs one test of this program with a task.
pub fn command(test: impl Fn(), task: &str) -> Command {
    command_under(Command::new(std::env::current_exe().unwrap()), test, task)
}

/// The same, for a program that starts this one: its own arguments, and the path of this program, come first.
pub fn command_under(mut program: Command, test: impl Fn(), task: &str) -> Command {
    program.args(arguments_for(&test)).env(TASK, task).stdin(Stdio::null());
    program
}

/// A process that a test has started. It is killed when this is dropped.
pub struct Child {
    process: std::process::Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Child {
    /// Runs one test of this program with a task.
    pub fn start(test: impl Fn(), task: &str) -> Child {
        Child::spawn(&mut command(test, task))
    }

    /// Runs a [command], which may have been changed.
    pub fn spawn(command: &mut Command) -> Child {
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = started.unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let (input, output) = (process.stdin.take(), process.stdout.take().unwrap());
        Child { process, input, output: BufReader::new(output) }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends it a message.
    pub fn write(&mut self, message: &[u8]) {
        writeln!(self.input.as_mut().expect("its input is open"), "{}", to_hex(message)).unwrap();
    }

    /// Waits for its next message; `None` if it ends without one.
    pub fn try_read(&mut self) -> Option<Vec<u8>> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some((_, message)) = line.split_once(MARK) {
                return Some(from_hex(message));
            }
        }
    }

    /// Waits for its next message.
    pub fn read(&mut self) -> Vec<u8> {
        self.try_read().expect("the child process sends a message")
    }

    /// Waits for its next message, which is text.
    pub fn read_text(&mut self) -> String {
        String::from_utf8(self.read()).unwrap()
    }

    /// Waits for its next message, which must be this text.
    #[track_caller]
    pub fn expect(&mut self, text: &str) {
        assert_eq!(self.read_text(), text);
    }

    /// Ends its standard input.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::kill(self.id() as libc::pid_t, signal) }, 0);
    }

    /// Kills it, and waits until it is gone.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// How it has ended, if it has.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().unwrap()
    }

    /// Ends its standard input, and waits until it ends by itself.
    pub fn wait(&mut self) -> ExitStatus {
        self.close_input();
        std::io::copy(&mut self.output, &mut std::io::sink()).unwrap();
        self.process.wait().unwrap()
    }

    /// Ends its standard input, and waits until it succeeds.
    pub fn join(mut self) {
        let status = self.wait();
        assert!(status.success(), "the child process failed: {status}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may have ended already, and a test that failed must not leave it behind.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// In a child: sends a message to the test that has started it.
pub fn write(message: &[u8]) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "\n{MARK}{}", to_hex(message)).unwrap();
    output.flush().unwrap();
}

/// In a child: waits for the next message of the test that has started it.
pub fn read() -> Vec<u8> {
    let mut line = String::new();
    assert!(
        std::io::stdin().read_line(&mut line).unwrap() > 0,
        "the test that has started this process ended"
    );
    from_hex(&line)
}

/// In a child: waits until the test that has started it ends its input, or ends.
pub fn wait_for_end_of_input() {
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Bytes as hexadecimal digits.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes that [`to_hex`] has written.
pub fn from_hex(digits: &str) -> Vec<u8> {
    let digits = digits.trim();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}
