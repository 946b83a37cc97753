//! The clients of one node: spread over threads of its process, or each a process of its own.
//!
//! Either way they are told the same and answer the same. To a process orders go as lines through its standard input, of which
//! the first is its task; its answers come as frames through its standard output:
//!
//! ```text
//! length (4 bytes, little endian) | Reply as JSON | length | a history's bytes, mostly none
//! ```
//!
//! A process ends when its input does, so none outlives its node.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Error;
use super::turns;
use super::worker::{PATIENCE, Ration, Recording, Tally, Task, Worker};

/// Bytes of a frame's part at most: a history of a million operations fits.
const MAX_FRAME: usize = 128 << 20;
/// How long clients may take to attach and to make their patterns.
const START_TIME: Duration = Duration::from_secs(60);
/// How long those may take to say what they found who were waited for in vain before.
const REST_TIME: Duration = Duration::from_secs(1);

/// What a client is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Work until told to stop; say whether it is measured.
    Run { measured: bool },
    /// Say what was found, and end.
    Finish,
}

const WARM_UP: &str = "warm-up";
const MEASURE: &str = "measure";
const FINISH: &str = "finish";
const STOP: &str = "stop";

/// What a client says.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// It is attached.
    Ready,
    /// A run is over.
    Ran(Tally),
    /// All is over. A history comes after it.
    Found { latency: Vec<(u64, u64)>, max: u64 },
    /// It cannot go on.
    Failed(String),
}

/// What a client found in all measured runs.
pub(super) struct Found {
    pub(super) latency: Vec<(u64, u64)>,
    pub(super) max: u64,
    /// As bytes, empty if it was not recorded.
    pub(super) history: Vec<u8>,
}

type Said = (usize, Reply, Vec<u8>);

/// The clients of one node.
pub(super) struct Crew {
    members: Vec<Member>,
    said: Receiver<Said>,
    /// By client: what it has said of this run.
    heard: Vec<Option<Tally>>,
    /// Somebody was waited for in vain.
    is_silent: bool,
}

/// A thread with its clients, or a process with its own.
struct Member {
    /// The first of its clients.
    first: usize,
    ear: Ear,
    thread: Option<JoinHandle<()>>,
}

enum Ear {
    Thread {
        orders: Sender<Order>,
        stop: Arc<AtomicBool>,
    },
    /// It ends when its input does.
    Process {
        input: Option<ChildStdin>,
        child: Child,
    },
}

impl Crew {
    /// Starts a client for each task, and waits until all are attached. The tasks are those of one thread after the other. With
    /// `command`, the arguments of a command line that calls [`serve_client`], each client is a process.
    pub(super) fn start(tasks: Vec<Vec<Task>>, command: Option<&[OsString]>) -> Result<Crew, Error> {
        let (says, said) = channel();
        let heard = vec![None; tasks.iter().map(Vec::len).sum()];
        let mut members = Vec::new();
        let mut first = 0;
        for tasks in tasks {
            let Some(command) = command else {
                let count = tasks.len();
                members.push(Member::thread(first, tasks, says.clone())?);
                first += count;
                continue;
            };
            for task in tasks {
                members.push(Member::process(first, &task, command, says.clone())?);
                first += 1;
            }
        }
        drop(says);
        let mut crew = Crew { members, said, heard, is_silent: false };
        for _ in 0..crew.heard.len() {
            match crew.hear(START_TIME)? {
                (_, Reply::Ready, _) => {}
                (client, reply, _) => {
                    return Err(Error::Client { client, what: format!("it said {reply:?}, out of turn") });
                }
            }
        }
        Ok(crew)
    }

    /// Sets all to work.
    pub(super) fn go(&mut self, measured: bool) -> Result<(), Error> {
        self.heard.fill(None);
        self.tell(Order::Run { measured })
    }

    /// Whether somebody has stopped of its own accord. Never waits.
    pub(super) fn is_over(&mut self) -> Result<bool, Error> {
        while let Ok((client, reply, _)) = self.said.try_recv() {
            self.note(client, reply)?;
        }
        Ok(self.heard.iter().flatten().any(|tally| tally.gave_up))
    }

    /// Stops all, and says what each did.
    pub(super) fn stop(&mut self) -> Result<Vec<Tally>, Error> {
        for member in &mut self.members {
            // One that is gone is heard of below.
            member.stop().ok();
        }
        while self.heard.iter().any(Option::is_none) {
            let (client, reply, _) = self.hear(PATIENCE + PATIENCE)?;
            self.note(client, reply)?;
        }
        Ok(self.heard.iter().flatten().copied().collect())
    }

    /// Ends all, and says what each found that still can, and why others cannot.
    pub(super) fn finish(mut self) -> (Vec<Found>, Option<Error>) {
        let (mut found, mut trouble) = (Vec::new(), None);
        let mut awaited = vec![true; self.heard.len()];
        let ends: Vec<usize> =
            self.members.iter().skip(1).map(|next| next.first).chain([awaited.len()]).collect();
        for (member, end) in self.members.iter_mut().zip(ends) {
            if let Err(what) = member.tell(Order::Finish) {
                trouble = trouble.or(Some(Error::Client { client: member.first, what }));
                awaited[member.first..end].fill(false);
            }
        }
        let patience = if self.is_silent { REST_TIME } else { START_TIME };
        while awaited.contains(&true) {
            match self.said.recv_timeout(patience) {
                Ok((client, Reply::Found { latency, max }, history)) => {
                    awaited[client] = false;
                    found.push(Found { latency, max, history });
                }
                Ok((client, Reply::Failed(what), _)) => {
                    awaited[client] = false;
                    trouble = trouble.or(Some(Error::Client { client, what }));
                }
                // Of a run that nobody waited for any longer.
                Ok(_) => {}
                Err(error) => {
                    trouble = trouble.or_else(|| Some(self.nothing(error, patience)));
                    break;
                }
            }
        }
        (found, trouble)
    }

    fn tell(&mut self, order: Order) -> Result<(), Error> {
        for member in &mut self.members {
            let client = member.first;
            member.tell(order).map_err(|what| Error::Client { client, what })?;
        }
        Ok(())
    }

    fn note(&mut self, client: usize, reply: Reply) -> Result<(), Error> {
        match reply {
            Reply::Ran(tally) => self.heard[client] = Some(tally),
            Reply::Failed(what) => return Err(Error::Client { client, what }),
            reply => return Err(Error::Client { client, what: format!("it said {reply:?}, out of turn") }),
        }
        Ok(())
    }

    fn hear(&mut self, patience: Duration) -> Result<Said, Error> {
        match self.said.recv_timeout(patience) {
            Ok((client, Reply::Failed(what), _)) => Err(Error::Client { client, what }),
            Ok(said) => Ok(said),
            Err(error) => Err(self.nothing(error, patience)),
        }
    }

    /// Nobody said anything.
    fn nothing(&mut self, error: RecvTimeoutError, patience: Duration) -> Error {
        self.is_silent = true;
        match error {
            RecvTimeoutError::Timeout => Error::Silent(patience.as_secs()),
            RecvTimeoutError::Disconnected => {
                Error::Client { client: 0, what: "it ended, and so did all others".into() }
            }
        }
    }
}

impl Member {
    fn thread(first: usize, tasks: Vec<Task>, says: Sender<Said>) -> Result<Member, Error> {
        let (orders, ordered) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let run = move || {
            serve(tasks, &ordered, &stopped, |nth, reply, history| {
                // Nobody listens any more if the benchmark is over.
                says.send((first + nth, reply, history)).is_ok()
            });
        };
        let thread = std::thread::Builder::new().name(format!("kv-client-{first}")).spawn(run);
        let thread = thread.map_err(|source| Error::Os { what: "starting a client's thread", source })?;
        Ok(Member { first, ear: Ear::Thread { orders, stop }, thread: Some(thread) })
    }

    fn process(
        number: usize,
        task: &Task,
        command: &[OsString],
        says: Sender<Said>,
    ) -> Result<Member, Error> {
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
                    (Reply::Failed(why), Vec::new())
                });
                let last = matches!(reply, Reply::Failed(_) | Reply::Found { .. });
                if says.send((number, reply, history)).is_err() || last {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("kv-ear-{number}")).spawn(run);
        let ear = Ear::Process { input: Some(input), child };
        Ok(Member { first: number, ear, thread: Some(thread.map_err(failed)?) })
    }

    fn tell(&mut self, order: Order) -> Result<(), String> {
        match &mut self.ear {
            Ear::Thread { orders, stop } => {
                // Relaxed: the channel orders it before the run. Who shall finish may still be in one.
                stop.store(order == Order::Finish, Relaxed);
                orders.send(order).map_err(|_| "its thread has ended".to_owned())
            }
            Ear::Process { input, .. } => {
                let word = match order {
                    Order::Run { measured: false } => WARM_UP,
                    Order::Run { measured: true } => MEASURE,
                    Order::Finish => FINISH,
                };
                say(input, word).map_err(|error| format!("its process is gone ({error})"))
            }
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        match &mut self.ear {
            Ear::Thread { stop, .. } => stop.store(true, Relaxed),
            Ear::Process { input, .. } => say(input, STOP)?,
        }
        Ok(())
    }
}

/// A line for a process.
fn say(input: &mut Option<ChildStdin>, word: &str) -> io::Result<()> {
    let input = input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
    writeln!(input, "{word}")
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop().ok();
        match &mut self.ear {
            // Its channel is gone with the next line.
            Ear::Thread { orders, .. } => *orders = channel().0,
            Ear::Process { input, child } => {
                // It ends with its input; one that does not has nothing left to say.
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
            // A panic was reported by its hook.
            drop(thread.join());
        }
    }
}

/// A thread: its clients do what they are told, and each says so, until nobody tells them anything or listens. `say` hears
/// which of them speaks.
fn serve(
    tasks: Vec<Task>,
    orders: &Receiver<Order>,
    stop: &AtomicBool,
    mut say: impl FnMut(usize, Reply, Vec<u8>) -> bool,
) {
    // All record, or none.
    let done = if tasks.iter().all(|task| task.recorded.is_none()) {
        obey(tasks, |_| (), orders, stop, &mut say, |()| Vec::new())
    } else {
        let record = |task: &Task| {
            let (each, runs) = task.recorded.unwrap_or_default();
            Ration::new(task.number, each, runs)
        };
        obey(tasks, record, orders, stop, &mut say, |ration: Ration| {
            let mut bytes = Vec::new();
            ration.recorder.finish().write_to(&mut bytes);
            bytes
        })
    };
    if let Err((nth, error)) = done {
        say(nth, Reply::Failed(error.to_string()), Vec::new());
    }
}

/// Fails with the client that did.
fn obey<R: Recording>(
    tasks: Vec<Task>,
    record: impl Fn(&Task) -> R,
    orders: &Receiver<Order>,
    stop: &AtomicBool,
    say: &mut impl FnMut(usize, Reply, Vec<u8>) -> bool,
    history: impl Fn(R) -> Vec<u8>,
) -> Result<(), (usize, Error)> {
    let spins = tasks.first().map_or(0, |task| task.spins);
    let mut workers = Vec::new();
    for (nth, task) in tasks.into_iter().enumerate() {
        let record = record(&task);
        workers.push(Worker::new(task, record).map_err(|error| (nth, error))?);
    }
    let mut heard = (0..workers.len()).all(|nth| say(nth, Reply::Ready, Vec::new()));
    while heard && let Ok(order) = orders.recv() {
        match order {
            Order::Run { measured } => {
                turns::run(&mut workers, measured, spins, stop).map_err(|error| (0, error))?;
                let tallies = workers.iter_mut().map(Worker::tally).enumerate();
                heard = tallies
                    .fold(heard, |heard, (nth, tally)| heard && say(nth, Reply::Ran(tally), Vec::new()));
            }
            Order::Finish => {
                for (nth, worker) in workers.into_iter().enumerate() {
                    let latency = worker.latency.counts().collect();
                    let max = worker.latency.max().unwrap_or(0);
                    say(nth, Reply::Found { latency, max }, history(worker.record));
                }
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The life of a client that is a process: does what comes through `input`, says what it found through `output`.
pub fn serve_client(mut input: impl BufRead, output: impl Write + Send + 'static) -> io::Result<()> {
    let mut line = String::new();
    input.by_ref().take(MAX_FRAME as u64).read_line(&mut line)?;
    let task: Task = serde_json::from_str(&line)?;
    let (orders, ordered) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let mut output = output;
    let run = move || {
        let say = |_, reply, history: Vec<u8>| write_reply(&mut output, &reply, &history).is_ok();
        serve(vec![task], &ordered, &stopped, say);
    };
    let worker = std::thread::Builder::new().name("kv-client".to_owned()).spawn(run)?;
    for line in input.lines() {
        let order = match line?.as_str() {
            STOP => {
                stop.store(true, Relaxed);
                continue;
            }
            WARM_UP => Order::Run { measured: false },
            MEASURE => Order::Run { measured: true },
            FINISH => Order::Finish,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        // Relaxed: the channel orders it before the run. The end is also that of a run.
        stop.store(order == Order::Finish, Relaxed);
        if orders.send(order).is_err() {
            break;
        }
    }
    stop.store(true, Relaxed);
    drop(orders);
    // A panic was reported by its hook.
    drop(worker.join());
    Ok(())
}

fn write_reply(output: &mut impl Write, reply: &Reply, history: &[u8]) -> io::Result<()> {
    for part in [serde_json::to_string(reply)?.as_bytes(), history] {
        output.write_all(&(part.len() as u32).to_le_bytes())?;
        output.write_all(part)?;
    }
    output.flush()
}

fn read_reply(input: &mut impl Read) -> io::Result<(Reply, Vec<u8>)> {
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
