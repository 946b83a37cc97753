//! Ranks on this machine: processes that the program starts itself, or threads.
//!
//! [`spawn`] starts the program again, with the same arguments, once per further rank; the caller becomes rank 0:
//!
//! ```text
//! rank 0 (first process)                       rank r (same executable, same arguments)
//!   coordinator thread ── socket pair ───────── its standard input until it calls spawn(), then /dev/null
//!                         1. a random secret     environment: CROSSTIE_LOCAL_RANK, _SIZE, _PARENT
//!                         2. the same handshake and frames as over TCP
//! ```
//!
//! The socket pair reaches nobody but the child: it is never inheritable in the parent, it is no file, and the secret
//! is neither in arguments nor in the environment. Children end with rank 0, whatever ends it: rank 0 kills and reaps
//! them when it is dropped, and the kernel kills them when it dies (`PR_SET_PDEATHSIG`, set by the child).
//!
//! Call [`spawn`] early: before reading standard input, before starting threads that have side effects, and from a
//! thread that lives as long as the program (the kernel's watch belongs to the thread that asked for it).

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::coordinator::Coordinator;
use super::environment::{Variables, number};
use super::error::{Error, Result};
use super::limits::{GRACE_PERIOD, Limits, check_rank};
use super::member::{Host, Link, Member};
use super::secret::Secret;
use super::stream::Stream;

pub(super) const RANK: &str = "CROSSTIE_LOCAL_RANK";
const SIZE: &str = "CROSSTIE_LOCAL_SIZE";
const PARENT: &str = "CROSSTIE_LOCAL_PARENT";

/// The length of the secret that a local job makes for itself.
const SECRET: usize = 32;

/// Makes this program a job of `size` processes: returns in each of them, as its rank.
///
/// In the first process it starts `size - 1` more; in those, it joins. It can be called once per process.
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
            "local::spawn was called before in this process: the ranks it starts run the program from its beginning, \
             so there can be one such call; use local::JobBuilder for other programs"
                .into(),
        ));
    }
    JobBuilder::new(size).limits(limits).start()
}

/// A job of `size` ranks inside this process, for threads: one member per rank, in order, all joined.
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
    let mut ends = Vec::with_capacity(size as usize);
    for rank in 0..size {
        let (mine, theirs) = socket_pair()?;
        coordinator.expect(rank, Stream::Unix(theirs))?;
        ends.push(mine);
    }
    let host = Host::start(move || coordinator.run())?;
    let mut members = Vec::with_capacity(ends.len());
    for (rank, stream) in (0..size).zip(ends) {
        let link = Link::open_local(Stream::Unix(stream), rank, size, &secret, &limits)?;
        members.push(Member::new(rank, size, limits, link));
    }
    let first = members.remove(0).with_host(host, Children::default());
    members.insert(0, first);
    members.into_iter().map(Member::gather).collect()
}

/// Joins as a rank that [`spawn`] or [`JobBuilder`] started; `None` when this process is not one.
///
/// Takes over standard input, and can succeed once.
pub fn join_spawned(limits: Limits) -> Result<Option<Member>> {
    let variables = Variables::of_process();
    if variables.get(RANK).is_none() {
        return Ok(None);
    }
    let rank = number(&variables, RANK)?;
    let size = number(&variables, SIZE)?;
    check_rank(rank, size)?;
    limits.check()?;
    let parent = number(&variables, PARENT)?;
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|errno| Error::io("asking to end with rank 0", &errno.into()))?;
    // Asked first, looked second: a parent that died before the request is noticed here.
    let actual = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    if actual != Some(parent) {
        return Err(Error::Configuration(format!(
            "{RANK} says that process {parent} started this one as a rank, but its parent is another: that process has ended, \
             or the variables were passed on; unset {RANK}"
        )));
    }
    let mut stream = take_over_stdin()?;
    let deadline = Instant::now() + limits.join_timeout + GRACE_PERIOD;
    let mut secret = [0; SECRET];
    stream
        .read_full(&mut secret, deadline)
        .map_err(|error| Error::io("receiving the job's secret", &error))?;
    let link = Link::open_local(stream, rank, size, &Secret::new(secret)?, &limits)?;
    Member::new(rank, size, limits, link).gather().map(Some)
}

/// Starts the ranks of a job with chosen arguments; [`spawn`] is the short form.
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
    /// A job of `size` ranks with this process's own arguments and [`Limits::default`].
    pub fn new(size: u32) -> Self {
        let arguments = std::env::args_os().skip(1).collect();
        JobBuilder { size, limits: Limits::default(), arguments, variables: Vec::new() }
    }

    /// Chooses times and sizes for rank 0 and the coordinator.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Replaces the arguments.
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
        // The kernel ends a child when the thread that started it ends: that must be the coordinator's thread, not
        // the caller's.
        let host = Host::start(move || match self.assemble(theirs, &shared) {
            Ok((coordinator, children)) => {
                if report.send(Ok(children)).is_ok() {
                    coordinator.run();
                }
            }
            Err(error) => {
                // If nobody listens any more, nobody is left to tell.
                drop(report.send(Err(error)));
            }
        })?;
        let children = started.recv().map_err(|_| Error::RankDisconnected { rank: 0 })??;
        let link = Link::open_local(Stream::Unix(mine), 0, size, &secret, &limits)?;
        Member::new(0, size, limits, link).with_host(host, children).gather()
    }

    fn assemble(&self, own: UnixStream, secret: &Secret) -> Result<(Coordinator, Children)> {
        let mut coordinator = new_coordinator(self.size, secret, self.limits)?;
        coordinator.expect(0, Stream::Unix(own))?;
        let mut children = Children::default();
        for rank in 1..self.size {
            let (mine, theirs) = socket_pair()?;
            let child = self.command(rank, theirs).spawn();
            let child = child.map_err(|error| Error::io(format!("starting rank {rank}"), &error))?;
            children.0.push((rank, child));
            let mut stream = Stream::Unix(mine);
            stream
                .write_full(secret.as_bytes(), Instant::now() + GRACE_PERIOD)
                .map_err(|_| Error::RankDisconnected { rank })?;
            coordinator.expect(rank, stream)?;
        }
        Ok((coordinator, children))
    }

    fn command(&self, rank: u32, stream: UnixStream) -> Command {
        // The running executable, even if its file has been replaced or removed since.
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
    Coordinator::new(size, secret.clone(), limits, None).map_err(|error| Error::io("coordinator", &error))
}

fn socket_pair() -> Result<(UnixStream, UnixStream)> {
    UnixStream::pair().map_err(|error| Error::io("socket pair", &error))
}

/// Moves the socket that is standard input to a descriptor of its own, which programs started from here do not
/// inherit, and puts `/dev/null` in its place.
fn take_over_stdin() -> Result<Stream> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let stdin = std::io::stdin();
    let is_ours = rustix::net::sockopt::socket_domain(&stdin) == Ok(rustix::net::AddressFamily::UNIX);
    // Relaxed: nothing is published through the flag.
    if !is_ours || TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Error::Configuration(format!(
            "{RANK} is set, but standard input is not the connection to rank 0: join once per process, and leave \
             standard input alone before"
        )));
    }
    let failed = |error: std::io::Error| Error::io("taking over standard input", &error);
    let socket = stdin.as_fd().try_clone_to_owned().map_err(failed)?;
    let null = std::fs::File::open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(&null).map_err(|errno| failed(errno.into()))?;
    Ok(Stream::Unix(UnixStream::from(socket)))
}

/// Processes that this one started. None outlives it.
#[derive(Debug, Default)]
pub(super) struct Children(Vec<(u32, Child)>);

impl Children {
    /// Waits until all have ended, and reports the first failure.
    pub(super) fn wait(&mut self, deadline: Instant) -> Result<()> {
        let mut pause = Duration::from_micros(100);
        let mut failure = None;
        while let Some((rank, child)) = self.0.first_mut() {
            let rank = *rank;
            match child.try_wait() {
                Ok(Some(status)) => {
                    self.0.remove(0);
                    if !status.success() {
                        failure.get_or_insert(Error::ChildFailed { rank, status: status.to_string() });
                    }
                }
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(20));
                }
                Ok(None) => {
                    self.end();
                    let status = "no exit in time; it was killed".into();
                    failure.get_or_insert(Error::ChildFailed { rank, status });
                }
                Err(error) => return Err(Error::io(format!("waiting for rank {rank}"), &error)),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Kills and reaps all that are left.
    pub(super) fn end(&mut self) {
        for (_, child) in &mut self.0 {
            // An error means that it has ended already.
            drop(child.kill());
        }
        for (_, mut child) in self.0.drain(..) {
            drop(child.wait());
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.end();
    }
}
