//! The client pool of one node: client threads in the rank's process, or one process per client.
//!
//! Both kinds take the same commands and send the same replies. A client process reads commands as lines from its standard
//! input; the first line is its task. It writes replies as frames to its standard output:
//!
//! ```text
//! length (4 bytes, little endian) | ClientReply as JSON | length | bytes of the history, usually empty
//! ```
//!
//! A client process ends when its input is closed, so none outlives its node.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::client_loop;
use super::totals::Tally;
use super::worker::{RESPONSE_TIMEOUT, Recording, RunRecorder, Task, Worker};
use crate::error::Error;

/// Longest part of a frame in bytes: a history of a million operations fits.
const MAX_FRAME: usize = 128 << 20;
/// Time for all clients to attach and to generate their request patterns.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for clients to send their results after they have already timed out once.
const LATE_TIMEOUT: Duration = Duration::from_secs(1);

/// What the pool tells its clients to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientCommand {
    /// Run operations until stopped. `measured` is false for the warm-up.
    Run { measured: bool },
    /// Send the results, then end.
    Finish,
}

const WARM_UP: &str = "warm-up";
const MEASURE: &str = "measure";
const FINISH: &str = "finish";
const STOP: &str = "stop";

/// What a client sends to the pool.
#[derive(Debug, Serialize, Deserialize)]
enum ClientReply {
    /// The client is attached to its node.
    Ready,
    /// A run has ended.
    RunDone(Tally),
    /// The results of all measured runs. The frame's second part is the history.
    Results { latency: Vec<(u64, u64)>, max: u64 },
    /// The client cannot continue, for this reason.
    Failed(String),
}

/// The results of one client over all measured runs.
pub(super) struct ClientResults {
    pub(super) latency: Vec<(u64, u64)>,
    pub(super) max: u64,
    /// The recorded history as bytes; empty if nothing was recorded.
    pub(super) history: Vec<u8>,
}

/// The number of the client, its reply, and the bytes of its history.
type ClientMessage = (usize, ClientReply, Vec<u8>);

/// All clients of one node.
pub(super) struct ClientPool {
    hosts: Vec<ClientHost>,
    replies: Receiver<ClientMessage>,
    /// By client: what it did in the current run, once it has reported it.
    tallies: Vec<Option<Tally>>,
    /// The pool has waited for a reply until its timeout.
    has_timed_out: bool,
}

/// A thread that runs several clients, or a process that runs one.
struct ClientHost {
    /// Number of the first of its clients.
    first_client: usize,
    control: Control,
    thread: Option<JoinHandle<()>>,
}

enum Control {
    Thread {
        commands: Sender<ClientCommand>,
        stop: Arc<AtomicBool>,
    },
    /// The process ends when its input is closed.
    Process {
        input: Option<ChildStdin>,
        child: Child,
    },
}

impl ClientPool {
    /// Starts one client per task and waits until all are attached. Each inner list holds the tasks of one thread. With
    /// `command`, the arguments of a command line that calls [`run_client_process`], each client is a process instead.
    pub(super) fn start(tasks: Vec<Vec<Task>>, command: Option<&[OsString]>) -> Result<ClientPool, Error> {
        let (sender, replies) = channel();
        let tallies = vec![None; tasks.iter().map(Vec::len).sum()];
        let mut hosts = Vec::new();
        let mut first = 0;
        for tasks in tasks {
            let Some(command) = command else {
                let count = tasks.len();
                hosts.push(ClientHost::thread(first, tasks, sender.clone())?);
                first += count;
                continue;
            };
            for task in tasks {
                hosts.push(ClientHost::process(first, &task, command, sender.clone())?);
                first += 1;
            }
        }
        drop(sender);
        let mut pool = ClientPool { hosts, replies, tallies, has_timed_out: false };
        for _ in 0..pool.tallies.len() {
            match pool.receive(START_TIMEOUT)? {
                (_, ClientReply::Ready, _) => {}
                (client, reply, _) => return Err(unexpected(client, &reply)),
            }
        }
        Ok(pool)
    }

    /// Starts a run on all clients.
    pub(super) fn start_run(&mut self, measured: bool) -> Result<(), Error> {
        self.tallies.fill(None);
        self.send(ClientCommand::Run { measured })
    }

    /// Whether a client has ended the run by itself. Never waits.
    pub(super) fn has_client_given_up(&mut self) -> Result<bool, Error> {
        while let Ok((client, reply, _)) = self.replies.try_recv() {
            self.record_reply(client, reply)?;
        }
        Ok(self.tallies.iter().flatten().any(|tally| tally.gave_up))
    }

    /// Stops the run on all clients and returns what each did.
    pub(super) fn stop_run(&mut self) -> Result<Vec<Tally>, Error> {
        for host in &mut self.hosts {
            // If the client is gone, `receive` below reports it.
            host.stop().ok();
        }
        while self.tallies.iter().any(Option::is_none) {
            let (client, reply, _) = self.receive(RESPONSE_TIMEOUT + RESPONSE_TIMEOUT)?;
            self.record_reply(client, reply)?;
        }
        Ok(self.tallies.iter().flatten().copied().collect())
    }

    /// Ends all clients. Returns the results of those that still reply, and the first error of the others.
    pub(super) fn finish(mut self) -> (Vec<ClientResults>, Option<Error>) {
        let (mut found, mut error) = (Vec::new(), None);
        let mut waiting_for = vec![true; self.tallies.len()];
        let ends: Vec<usize> =
            self.hosts.iter().skip(1).map(|next| next.first_client).chain([waiting_for.len()]).collect();
        for (host, end) in self.hosts.iter_mut().zip(ends) {
            if let Err(what) = host.send(ClientCommand::Finish) {
                error = error.or(Some(Error::Client { client: host.first_client, what }));
                waiting_for[host.first_client..end].fill(false);
            }
        }
        let timeout = if self.has_timed_out { LATE_TIMEOUT } else { START_TIMEOUT };
        while waiting_for.contains(&true) {
            match self.replies.recv_timeout(timeout) {
                Ok((client, ClientReply::Results { latency, max }, history)) => {
                    waiting_for[client] = false;
                    found.push(ClientResults { latency, max, history });
                }
                Ok((client, ClientReply::Failed(what), _)) => {
                    waiting_for[client] = false;
                    error = error.or(Some(Error::Client { client, what }));
                }
                // A late reply about a run that has already timed out.
                Ok(_) => {}
                Err(cause) => {
                    error = error.or_else(|| Some(self.receive_error(cause, timeout)));
                    break;
                }
            }
        }
        (found, error)
    }

    fn send(&mut self, command: ClientCommand) -> Result<(), Error> {
        for host in &mut self.hosts {
            let client = host.first_client;
            host.send(command).map_err(|what| Error::Client { client, what })?;
        }
        Ok(())
    }

    fn record_reply(&mut self, client: usize, reply: ClientReply) -> Result<(), Error> {
        match reply {
            ClientReply::RunDone(tally) => self.tallies[client] = Some(tally),
            ClientReply::Failed(what) => return Err(Error::Client { client, what }),
            reply => return Err(unexpected(client, &reply)),
        }
        Ok(())
    }

    fn receive(&mut self, timeout: Duration) -> Result<ClientMessage, Error> {
        match self.replies.recv_timeout(timeout) {
            Ok((client, ClientReply::Failed(what), _)) => Err(Error::Client { client, what }),
            Ok(message) => Ok(message),
            Err(error) => Err(self.receive_error(error, timeout)),
        }
    }

    /// The error for a reply that did not come.
    fn receive_error(&mut self, error: RecvTimeoutError, timeout: Duration) -> Error {
        self.has_timed_out = true;
        match error {
            RecvTimeoutError::Timeout => Error::ClientsSilent(timeout.as_secs()),
            RecvTimeoutError::Disconnected => {
                Error::Client { client: 0, what: "it has ended, and so have all other clients".into() }
            }
        }
    }
}

fn unexpected(client: usize, reply: &ClientReply) -> Error {
    Error::Client { client, what: format!("it sent {reply:?}, which was not expected now") }
}

impl ClientHost {
    fn thread(
        first_client: usize,
        tasks: Vec<Task>,
        sender: Sender<ClientMessage>,
    ) -> Result<ClientHost, Error> {
        let (commands, command_queue) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let run = move || {
            run_clients(tasks, &command_queue, &stopped, |nth, reply, history| {
                // The receiver is gone once the benchmark is over.
                sender.send((first_client + nth, reply, history)).is_ok()
            });
        };
        let thread = std::thread::Builder::new().name(format!("kv-client-{first_client}")).spawn(run);
        let thread = thread.map_err(|source| Error::Os { what: "starting a client's thread", source })?;
        Ok(ClientHost { first_client, control: Control::Thread { commands, stop }, thread: Some(thread) })
    }

    fn process(
        number: usize,
        task: &Task,
        command: &[OsString],
        sender: Sender<ClientMessage>,
    ) -> Result<ClientHost, Error> {
        let failed = |source| Error::Os { what: "starting a client's process", source };
        let mut child = Command::new("/proc/self/exe")
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed(io::ErrorKind::BrokenPipe.into()));
        };
        let task = serde_json::to_string(task).map_err(|error| failed(error.into()))?;
        writeln!(input, "{task}").map_err(failed)?;
        let run = move || {
            let mut output = BufReader::new(output);
            loop {
                let (reply, history) = read_reply(&mut output).unwrap_or_else(|error| {
                    let why = match error.kind() {
                        io::ErrorKind::UnexpectedEof => "its process has ended".to_owned(),
                        _ => format!("its process is gone ({error})"),
                    };
                    (ClientReply::Failed(why), Vec::new())
                });
                let last = matches!(reply, ClientReply::Failed(_) | ClientReply::Results { .. });
                if sender.send((number, reply, history)).is_err() || last {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("kv-control-{number}")).spawn(run);
        let control = Control::Process { input: Some(input), child };
        Ok(ClientHost { first_client: number, control, thread: Some(thread.map_err(failed)?) })
    }

    fn send(&mut self, command: ClientCommand) -> Result<(), String> {
        match &mut self.control {
            Control::Thread { commands, stop } => {
                // Relaxed: the channel orders this store before the run. With `Finish`, a run may still be going on: stop it.
                stop.store(command == ClientCommand::Finish, Relaxed);
                commands.send(command).map_err(|_| "its thread has ended".to_owned())
            }
            Control::Process { input, .. } => {
                let word = match command {
                    ClientCommand::Run { measured: false } => WARM_UP,
                    ClientCommand::Run { measured: true } => MEASURE,
                    ClientCommand::Finish => FINISH,
                };
                write_line(input, word).map_err(|error| format!("its process is gone ({error})"))
            }
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        match &mut self.control {
            Control::Thread { stop, .. } => stop.store(true, Relaxed),
            Control::Process { input, .. } => write_line(input, STOP)?,
        }
        Ok(())
    }
}

/// Writes one command line to a client process.
fn write_line(input: &mut Option<ChildStdin>, word: &str) -> io::Result<()> {
    let input = input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
    writeln!(input, "{word}")
}

impl Drop for ClientHost {
    fn drop(&mut self) {
        self.stop().ok();
        match &mut self.control {
            // Replaces the sender, so the thread sees its channel closed.
            Control::Thread { commands, .. } => *commands = channel().0,
            Control::Process { input, child } => {
                // The process ends when its input is closed. It gets a second for that, then it is killed.
                drop(input.take());
                let end = Instant::now() + Duration::from_secs(1);
                while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(2));
                }
                child.kill().ok();
                child.wait().ok();
            }
        }
        if let Some(thread) = self.thread.take() {
            // The panic hook has already reported a panic.
            drop(thread.join());
        }
    }
}

/// Runs the clients of one thread until the command channel closes or the pool no longer receives replies. `reply_to_pool` gets the
/// number of the client within the thread, the reply and the history; it returns false when the pool no longer receives.
fn run_clients(
    tasks: Vec<Task>,
    commands: &Receiver<ClientCommand>,
    stop: &AtomicBool,
    mut reply_to_pool: impl FnMut(usize, ClientReply, Vec<u8>) -> bool,
) {
    // Either all clients of a thread record a history, or none does.
    let done = if tasks.iter().all(|task| task.recorded.is_none()) {
        execute_commands(tasks, |_| (), commands, stop, &mut reply_to_pool, |()| Vec::new())
    } else {
        let record = |task: &Task| {
            let (each, runs) = task.recorded.unwrap_or_default();
            RunRecorder::new(task.number, each, runs)
        };
        execute_commands(tasks, record, commands, stop, &mut reply_to_pool, |recorder: RunRecorder| {
            let mut bytes = Vec::new();
            recorder.recorder.finish().write_to(&mut bytes);
            bytes
        })
    };
    if let Err((nth, error)) = done {
        reply_to_pool(nth, ClientReply::Failed(error.to_string()), Vec::new());
    }
}

/// Executes commands until `Finish`. An error comes with the number of the client that failed.
fn execute_commands<R: Recording>(
    tasks: Vec<Task>,
    record: impl Fn(&Task) -> R,
    commands: &Receiver<ClientCommand>,
    stop: &AtomicBool,
    reply_to_pool: &mut impl FnMut(usize, ClientReply, Vec<u8>) -> bool,
    history: impl Fn(R) -> Vec<u8>,
) -> Result<(), (usize, Error)> {
    let spins = tasks.first().map_or(0, |task| task.spins);
    let mut workers = Vec::new();
    for (nth, task) in tasks.into_iter().enumerate() {
        let record = record(&task);
        workers.push(Worker::new(task, record).map_err(|error| (nth, error))?);
    }
    let mut is_received = (0..workers.len()).all(|nth| reply_to_pool(nth, ClientReply::Ready, Vec::new()));
    while is_received && let Ok(command) = commands.recv() {
        match command {
            ClientCommand::Run { measured } => {
                client_loop::run(&mut workers, measured, spins, stop).map_err(|error| (0, error))?;
                let tallies = workers.iter_mut().map(Worker::tally).enumerate();
                is_received = tallies.fold(is_received, |is_received, (nth, tally)| {
                    is_received && reply_to_pool(nth, ClientReply::RunDone(tally), Vec::new())
                });
            }
            ClientCommand::Finish => {
                for (nth, worker) in workers.into_iter().enumerate() {
                    let latency = worker.latency.counts().collect();
                    let max = worker.latency.max().unwrap_or(0);
                    reply_to_pool(nth, ClientReply::Results { latency, max }, history(worker.record));
                }
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Runs one client as a process: reads its task and commands from `input`, writes its replies to `output`.
pub fn run_client_process(mut input: impl BufRead, output: impl Write + Send + 'static) -> io::Result<()> {
    let mut line = String::new();
    input.by_ref().take(MAX_FRAME as u64).read_line(&mut line)?;
    let task: Task = serde_json::from_str(&line)?;
    let (commands, command_queue) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let mut output = output;
    let run = move || {
        let reply_to_pool = |_, reply, history: Vec<u8>| write_reply(&mut output, &reply, &history).is_ok();
        run_clients(vec![task], &command_queue, &stopped, reply_to_pool);
    };
    let worker = std::thread::Builder::new().name("kv-client".to_owned()).spawn(run)?;
    for line in input.lines() {
        let command = match line?.as_str() {
            STOP => {
                stop.store(true, Relaxed);
                continue;
            }
            WARM_UP => ClientCommand::Run { measured: false },
            MEASURE => ClientCommand::Run { measured: true },
            FINISH => ClientCommand::Finish,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        // Relaxed: the channel orders this store before the run. `Finish` also stops a run that is going on.
        stop.store(command == ClientCommand::Finish, Relaxed);
        if commands.send(command).is_err() {
            break;
        }
    }
    stop.store(true, Relaxed);
    drop(commands);
    // The panic hook has already reported a panic.
    drop(worker.join());
    Ok(())
}

fn write_reply(output: &mut impl Write, reply: &ClientReply, history: &[u8]) -> io::Result<()> {
    for part in [serde_json::to_string(reply)?.as_bytes(), history] {
        output.write_all(&(part.len() as u32).to_le_bytes())?;
        output.write_all(part)?;
    }
    output.flush()
}

fn read_reply(input: &mut impl Read) -> io::Result<(ClientReply, Vec<u8>)> {
    let mut part = || {
        let mut len = [0; 4];
        input.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_FRAME {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        let mut part = vec![0; len];
        input.read_exact(&mut part)?;
        Ok(part)
    };
    Ok((serde_json::from_slice(&part()?)?, part()?))
}
