//! Jobs on this machine: the ranks are processes that the program starts itself, or threads of one process.
//!
//! [`spawn`] starts the program again, with the same arguments, once for each further rank. The caller becomes rank 0:
//!
//! ```text
//! rank 0 (first process)                       rank r (same executable, same arguments)
//!   coordinator thread ── socket pair ───────── its standard input until it calls spawn(), then /dev/null
//!                         1. a random secret     environment: CROSSTIE_LOCAL_RANK, _SIZE, _PARENT
//!                         2. the same handshake and frames as over TCP
//! ```
//!
//! Only the child can reach the socket pair: no other child of the parent inherits it, and it has no name in a file system.
//! The secret is neither in the arguments nor in the environment. The children end with rank 0, however rank 0 ends:
//! rank 0 kills and reaps them when it is dropped, and the kernel kills them when rank 0 dies (`PR_SET_PDEATHSIG`, set by
//! the child).
//!
//! Call [`spawn`] early: before reading standard input, before starting threads that have side effects, and from a
//! thread that lives as long as the program, because `PR_SET_PDEATHSIG` refers to the thread that started the child.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use super::children::Children;
use super::coordinator::{Coordinator, CoordinatorThread};
use super::error::{Error, Result};
use super::limits::{GRACE_PERIOD, Limits, check_rank};
use super::member::{CoordinatorConnection, Member};
use super::secret::Secret;
use super::stream::Stream;
use super::variables::Variables;

pub(super) const RANK: &str = "CROSSTIE_LOCAL_RANK";
const SIZE: &str = "CROSSTIE_LOCAL_SIZE";
const PARENT: &str = "CROSSTIE_LOCAL_PARENT";

/// The length of the secret that a local job creates for itself.
const SECRET_BYTES: usize = 32;

/// Turns this program into a job of `size` processes. Returns in each of them, with that process's rank.
///
/// In the first process it starts `size - 1` more processes; in those, it joins. Call it at most once per process.
///
/// ```no_run
/// use crosstie::bootstrap::{Bootstrap, Limits, local};
///
/// let mut job = local::spawn(4, Limits::default())?;
/// println!("rank {} of {}", job.rank(), job.size());
/// job.finish()?;
/// # Ok::<(), crosstie::bootstrap::Error>(())
/// ```
pub fn spawn(size: u32, limits: Limits) -> Result<Member> {
    if let Some(member) = join_spawned(limits)? {
        return Ok(member);
    }
    static SPAWNED: AtomicBool = AtomicBool::new(false);
    // Relaxed: nothing is published through the flag.
    if SPAWNED.swap(true, Ordering::Relaxed) {
        return Err(Error::Configuration(
            "local::spawn was called twice in this process, but the ranks that it starts run the program from its beginning: \
             call it once, or use local::JobBuilder to start ranks with other arguments"
                .into(),
        ));
    }
    JobBuilder::new(size).limits(limits).start()
}

/// Creates a job of `size` ranks inside this process, for threads. Returns one member per rank, in rank order, all joined.
///
/// ```
/// use crosstie::bootstrap::{Bootstrap, Limits, local};
///
/// let members = local::in_process(3, Limits::default())?;
/// std::thread::scope(|scope| {
///     for mut member in members {
///         scope.spawn(move || {
///             let total = member.sum(&[u64::from(member.rank())]).expect("all ranks take part");
///             assert_eq!(total, [3]);
///         });
///     }
/// });
/// # Ok::<(), crosstie::bootstrap::Error>(())
/// ```
pub fn in_process(size: u32, limits: Limits) -> Result<Vec<Member>> {
    check_rank(0, size)?;
    limits.check()?;
    let secret = Secret::random()?;
    let mut coordinator = new_coordinator(size, &secret, limits)?;
    let mut streams = Vec::with_capacity(size as usize);
    for rank in 0..size {
        let (mine, theirs) = socket_pair()?;
        coordinator.add_connection(rank, Stream::Unix(theirs))?;
        streams.push(mine);
    }
    let thread = CoordinatorThread::start(move || coordinator.run())?;
    let mut members = Vec::with_capacity(streams.len());
    for (rank, stream) in (0..size).zip(streams) {
        let stream = Stream::Unix(stream);
        let connection = CoordinatorConnection::open_local(stream, rank, size, &secret, &limits)?;
        members.push(Member::new(rank, size, limits, connection));
    }
    let first = members.remove(0).with_coordinator(thread, Children::default());
    members.insert(0, first);
    members.into_iter().map(Member::wait_for_all).collect()
}

/// Joins the job when [`spawn`] or [`JobBuilder`] started this process; returns `None` when they did not.
///
/// It takes the connection to rank 0 from standard input, so it can succeed only once per process.
pub fn join_spawned(limits: Limits) -> Result<Option<Member>> {
    let variables = Variables::of_process();
    if variables.get(RANK).is_none() {
        return Ok(None);
    }
    let rank = variables.number(RANK)?;
    let size = variables.number(SIZE)?;
    check_rank(rank, size)?;
    limits.check()?;
    let parent = variables.number(PARENT)?;
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|errno| Error::io("setting the signal that ends this process with rank 0", &errno.into()))?;
    // After the request, not before it: a parent that died before the request is detected here.
    let actual = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if actual != Some(parent) {
        return Err(Error::Configuration(format!(
            "{RANK} says that process {parent} started this process as a rank, but its parent is another process: process \
             {parent} has ended, or this process inherited the variables; unset {RANK}"
        )));
    }
    let mut stream = take_stdin_socket()?;
    let deadline = Instant::now() + limits.join_timeout + GRACE_PERIOD;
    let mut secret = [0; SECRET_BYTES];
    stream
        .read_full(&mut secret, deadline)
        .map_err(|error| Error::io("receiving the job's secret from rank 0", &error))?;
    let connection = CoordinatorConnection::open_local(stream, rank, size, &Secret::new(secret)?, &limits)?;
    Member::new(rank, size, limits, connection).wait_for_all().map(Some)
}

/// Starts the ranks of a job with other arguments than this process has; [`spawn`] is the short form.
///
/// The ranks run this executable and must call [`join_spawned`], [`spawn`] or
/// [`from_env`](super::from_env) to join.
#[derive(Debug)]
pub struct JobBuilder {
    size: u32,
    limits: Limits,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
}

impl JobBuilder {
    /// Describes a job of `size` ranks with this process's own arguments and [`Limits::default`].
    pub fn new(size: u32) -> Self {
        let arguments = std::env::args_os().skip(1).collect();
        JobBuilder { size, limits: Limits::default(), arguments, variables: Vec::new() }
    }

    /// Sets the limits of rank 0 and of the coordinator.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Replaces the arguments of the ranks.
    pub fn arguments<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments = arguments.into_iter().map(Into::into).collect();
        self
    }

    /// Adds an environment variable for the ranks.
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Starts ranks 1 to `size - 1`, waits until all have joined, and returns rank 0.
    pub fn start(self) -> Result<Member> {
        check_rank(0, self.size)?;
        self.limits.check()?;
        let (size, limits) = (self.size, self.limits);
        let secret = Secret::random()?;
        let (mine, theirs) = socket_pair()?;
        let (report, started) = mpsc::channel();
        let shared = secret.clone();
        // The kernel kills a child when the thread that started it ends. So the coordinator's thread starts them: the
        // caller's thread may end before the job does.
        let thread = CoordinatorThread::start(move || match self.start_ranks(theirs, &shared) {
            Ok((coordinator, children)) => {
                if report.send(Ok(children)).is_ok() {
                    coordinator.run();
                }
            }
            Err(error) => {
                // Sending fails only when the receiver was dropped: then the caller no longer waits for the result.
                drop(report.send(Err(error)));
            }
        })?;
        let children = started.recv().map_err(|_| Error::RankDisconnected { rank: 0 })??;
        let connection = CoordinatorConnection::open_local(Stream::Unix(mine), 0, size, &secret, &limits)?;
        Member::new(0, size, limits, connection).with_coordinator(thread, children).wait_for_all()
    }

    /// Starts the processes and creates the coordinator with a connection to each; `own` is the one to rank 0.
    fn start_ranks(&self, own: UnixStream, secret: &Secret) -> Result<(Coordinator, Children)> {
        let mut coordinator = new_coordinator(self.size, secret, self.limits)?;
        coordinator.add_connection(0, Stream::Unix(own))?;
        let mut children = Children::default();
        for rank in 1..self.size {
            let (mine, theirs) = socket_pair()?;
            let child = self.command(rank, theirs).spawn();
            let child = child.map_err(|error| Error::io(format!("starting rank {rank}"), &error))?;
            children.add(rank, child);
            let mut stream = Stream::Unix(mine);
            stream
                .write_full(secret.as_bytes(), Instant::now() + GRACE_PERIOD)
                .map_err(|_| Error::RankDisconnected { rank })?;
            coordinator.add_connection(rank, stream)?;
        }
        Ok((coordinator, children))
    }

    fn command(&self, rank: u32, stream: UnixStream) -> Command {
        // This path is the running executable, even when its file has been replaced or removed.
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        command
            .args(&self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env(RANK, rank.to_string())
            .env(SIZE, self.size.to_string())
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::from(OwnedFd::from(stream)));
        command
    }
}

fn new_coordinator(size: u32, secret: &Secret, limits: Limits) -> Result<Coordinator> {
    Coordinator::new(size, secret.clone(), limits, None)
        .map_err(|error| Error::io("creating the coordinator", &error))
}

fn socket_pair() -> Result<(UnixStream, UnixStream)> {
    UnixStream::pair().map_err(|error| Error::io("creating a socket pair", &error))
}

/// Moves the socket from standard input to another file descriptor, which child processes do not inherit, and makes
/// standard input `/dev/null`.
fn take_stdin_socket() -> Result<Stream> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let stdin = std::io::stdin();
    let is_unix_socket = rustix::net::sockopt::socket_domain(&stdin) == Ok(rustix::net::AddressFamily::UNIX);
    // Relaxed: nothing is published through the flag.
    if !is_unix_socket || TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Error::Configuration(format!(
            "{RANK} is set, but standard input is not the connection to rank 0: join only once per process, and do not use \
             standard input before"
        )));
    }
    let failed =
        |error: std::io::Error| Error::io("moving the connection to rank 0 away from standard input", &error);
    let socket = stdin.as_fd().try_clone_to_owned().map_err(failed)?;
    let null = std::fs::File::open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(&null).map_err(|errno| failed(errno.into()))?;
    Ok(Stream::Unix(UnixStream::from(socket)))
}
