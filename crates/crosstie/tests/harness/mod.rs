//! Cases that two sides play: on two threads, in two processes, or on two hosts.
//!
//! ```text
//! SUITE [--device SPEC[,SPEC]] [--across] [--mode threads|processes] [--wrapped] [--filter TEXT] [--list]
//! SUITE --mode hosts [--role 0|1] [--rendezvous HOST:PORT] [--device ...]
//! ```
//!
//! Both sides are on the first device, or with `--across` the right one on the second. With `--wrapped` each device is
//! inside a fault device that injects nothing. Of two hosts role 0 listens; role and rendezvous come from `HOST` (0 or 1)
//! and `PEER` (the other's address) if not given. Without `--device` and `--mode` the cases are played on the software
//! device, between threads and between processes, and as the suite wishes besides. The last line is `N passed, N failed`;
//! the exit status says the same. A case that hangs is a failed case.
//!
//! A suite is a plain program, so that it can be carried to a machine where the device is.

pub(crate) mod channel;
mod options;
mod tally;

use std::cell::RefCell;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crosstie::device::{Device, DeviceSpec, fault};

use channel::Channel;
use options::Options;
use tally::Tally;

/// How much longer than a case may take hosts wait for each other: one may be busy with a case that hangs.
const GRACE: Duration = Duration::from_secs(30);

/// Cases and what they need.
pub(crate) struct Suite<S: Side> {
    pub(crate) name: &'static str,
    pub(crate) cases: Vec<Case<S>>,
    /// A case that takes longer than this hangs.
    pub(crate) hang: Duration,
    /// Where role 0 listens unless told.
    pub(crate) port: u16,
    /// Where chance begins, for cases that use it.
    pub(crate) seed: Option<u64>,
    /// Why a case cannot be played there.
    pub(crate) excuse: fn(&str, &Stage) -> Option<&'static str>,
    /// What else is played if nothing was asked for.
    pub(crate) besides: fn(&Stage) -> Vec<Run>,
}

/// A named function that both sides run, each with its own `S`.
pub(crate) struct Case<S> {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&mut S),
}

impl<S> Clone for Case<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Case<S> {}

/// One side of a case.
pub(crate) trait Side: Sized + 'static {
    /// 0 is the left one, 1 the right one.
    fn new(index: usize, stage: Stage, channel: Channel) -> Self;
    /// Waits for the other side.
    fn meet(&mut self);
}

/// What cases are played on.
#[derive(Clone, Debug)]
pub(crate) struct Stage {
    pub(crate) specs: Vec<DeviceSpec>,
    /// Whether the right side's device is the second rather than the first.
    pub(crate) across: bool,
    /// Whether each is wrapped in a fault device that injects nothing.
    pub(crate) wrapped: bool,
    /// Zero if the suite has none.
    #[allow(dead_code, reason = "not every suite has one")]
    pub(crate) seed: u64,
}

impl Stage {
    /// Opens the device number `which`, the last one if there are fewer.
    pub(crate) fn open(&self, which: usize) -> Device {
        let spec = &self.specs[which.min(self.specs.len() - 1)];
        let device = Device::open(spec).unwrap_or_else(|e| panic!("opening {spec}: {e}"));
        if self.wrapped { device.with_faults(fault::Plan::none()) } else { device }
    }

    /// Opens the device of a side.
    pub(crate) fn open_for(&self, index: usize) -> Device {
        self.open(if self.across { index } else { 0 })
    }

    fn devices(&self) -> String {
        self.specs.iter().map(DeviceSpec::to_string).collect::<Vec<_>>().join(",")
    }

    fn title(&self, mode: &str) -> String {
        let wrapped = if self.wrapped { "fault with nothing injected on " } else { "" };
        format!("{wrapped}{}, {mode}", self.devices())
    }
}

/// The suite once, on this host.
pub(crate) struct Run {
    pub(crate) stage: Stage,
    pub(crate) processes: bool,
    pub(crate) handicap: Option<Handicap>,
}

/// What is made hard for this program, for good.
#[derive(Clone, Copy)]
pub(crate) struct Handicap {
    pub(crate) what: &'static str,
    pub(crate) impose: fn(),
    /// What the names of the cases contain that it concerns.
    pub(crate) cases: &'static str,
}

thread_local! {
    /// Where the panic hook leaves the words of a role that fails; none on threads that play no role.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

impl<S: Side> Suite<S> {
    /// As the program's arguments say.
    pub(crate) fn main(&self) -> ExitCode {
        let options = match Options::parse(std::env::args().skip(1), self.port) {
            Ok(options) => options,
            Err(error) => return self.misused(&error),
        };
        panic::set_hook(Box::new(|info| {
            let text = format!("{info}");
            if LAST_PANIC.with_borrow_mut(|last| last.as_mut().map(|l| l.clone_from(&text))).is_none() {
                eprintln!("{text}");
            }
        }));
        let stage = options.stage(self.seed.unwrap_or(0));
        let chosen =
            self.cases.iter().filter(|c| options.filters.iter().all(|f| c.name.contains(f.as_str())));
        let cases: Vec<Case<S>> = chosen.copied().collect();
        if options.list {
            cases.iter().for_each(|c| println!("{}", c.name));
            return ExitCode::SUCCESS;
        }
        if let Some(name) = &options.child {
            return self.child(name, stage);
        }
        if let Some(seed) = self.seed {
            println!("seed {seed} (set CROSSTIE_SEED to repeat)");
        }
        let mut tally = Tally::new(options.quiet);
        match &options.rendezvous {
            None => self.runs(&options, stage).iter().for_each(|run| self.play(run, &cases, &mut tally)),
            Some(address) => {
                if let Err(error) = self.hosts(&cases, &stage, options.role, address, &mut tally) {
                    eprintln!("{}: {error}", self.name);
                    tally.fail(&format!("rendezvous: {error}"));
                }
            }
        }
        tally.report()
    }

    pub(crate) fn misused(&self, error: &str) -> ExitCode {
        eprintln!("{}: {error}", self.name);
        ExitCode::from(2)
    }

    fn runs(&self, options: &Options, stage: Stage) -> Vec<Run> {
        let run = |processes| Run { stage: stage.clone(), processes, handicap: None };
        if let Some(mode) = options.mode.as_deref() {
            return vec![run(mode == "processes")];
        }
        let mut runs = vec![run(false), run(true)];
        if options.specs.is_empty() && !stage.wrapped {
            runs.extend((self.besides)(&stage));
        }
        runs
    }

    fn play(&self, run: &Run, cases: &[Case<S>], tally: &mut Tally) {
        let mut title = run.stage.title(if run.processes { "processes" } else { "threads" });
        if let Some(handicap) = run.handicap {
            (handicap.impose)();
            title = format!("{title}, {}", handicap.what);
        }
        tally.begin(&title);
        for case in cases.iter().filter(|case| run.handicap.is_none_or(|h| case.name.contains(h.cases))) {
            match (self.excuse)(case.name, &run.stage) {
                Some(reason) => tally.skip(case.name, reason),
                None => {
                    let started = Instant::now();
                    let outcome = self.play_case(case, run);
                    tally.note(case.name, started, outcome);
                }
            }
        }
    }

    fn play_case(&self, case: &Case<S>, run: &Run) -> Result<(), String> {
        let deadline = Instant::now() + self.hang;
        let (near, far) = Channel::pair(self.hang).map_err(|e| format!("socketpair: {e}"))?;
        if run.processes {
            let child = self.spawn(case, &run.stage, far);
            let mut child = child.map_err(|e| format!("starting the other side: {e}"))?;
            let left = on_thread(case, &run.stage, 0, near);
            let left = self.outcome_of(&left, 0, deadline);
            return left.and(self.reap(&mut child, deadline));
        }
        let far = Channel::over_unix(far, self.hang).map_err(|e| format!("socketpair: {e}"))?;
        let (left, right) = (on_thread(case, &run.stage, 0, near), on_thread(case, &run.stage, 1, far));
        match (self.outcome_of(&left, 0, deadline), self.outcome_of(&right, 1, deadline)) {
            (Err(left), Err(right)) => Err(format!("{left}\n{right}")),
            (left, right) => left.and(right),
        }
    }

    /// The right side in a process of its own, with the channel as its standard input.
    fn spawn(&self, case: &Case<S>, stage: &Stage, far: UnixStream) -> std::io::Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--child", case.name, "--device", &stage.devices()]);
        command.args(stage.wrapped.then_some("--wrapped"));
        command.args(stage.across.then_some("--across"));
        command.envs(self.seed.map(|seed| ("CROSSTIE_SEED", seed.to_string())));
        command.stdin(Stdio::from(OwnedFd::from(far))).spawn()
    }

    /// The right side of one case, as [`Suite::spawn`] started it.
    fn child(&self, name: &str, stage: Stage) -> ExitCode {
        let Some(case) = self.cases.iter().find(|c| c.name == name) else {
            return self.misused(&format!("no case {name}"));
        };
        let descriptor = std::io::stdin().as_fd().try_clone_to_owned();
        let channel = descriptor.and_then(|d| Channel::over_descriptor(d, self.hang));
        let channel = channel.map_err(|error| format!("the channel: {error}"));
        match channel.and_then(|channel| play_role(case, stage, 1, channel)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("side 1: {error}");
                ExitCode::FAILURE
            }
        }
    }

    /// The cases between two hosts. Role 0 listens and names the case for each connection; an empty name is the end.
    fn hosts(
        &self,
        cases: &[Case<S>],
        stage: &Stage,
        role: usize,
        address: &str,
        tally: &mut Tally,
    ) -> std::io::Result<()> {
        let patience = self.hang + GRACE;
        tally.begin(&stage.title(&format!("host {role}")));
        let play = |tally: &mut Tally, case: &Case<S>, channel: Channel| {
            let started = Instant::now();
            let outcome = on_thread(case, stage, role, channel);
            tally.note(case.name, started, self.outcome_of(&outcome, role, started + self.hang));
        };
        if role == 0 {
            let listener = TcpListener::bind(address)?;
            let greet = |name: &str| -> std::io::Result<Channel> {
                let mut channel = Channel::over_tcp(channel::accept(&listener, patience)?, self.hang)?;
                channel.send(name.as_bytes())?;
                Ok(channel)
            };
            for case in cases {
                match (self.excuse)(case.name, stage) {
                    Some(reason) => tally.skip(case.name, reason),
                    None => play(tally, case, greet(case.name)?),
                }
            }
            return greet("").map(drop);
        }
        loop {
            let mut channel = Channel::over_tcp(channel::connect(address, patience)?, patience)?;
            let name = channel.recv()?;
            if name.is_empty() {
                return Ok(());
            }
            match self.cases.iter().find(|c| c.name.as_bytes() == name) {
                Some(case) => play(tally, case, channel),
                None => return Err(std::io::Error::other("the other host plays another suite")),
            }
        }
    }

    fn outcome_of(
        &self,
        role: &mpsc::Receiver<Result<(), String>>,
        index: usize,
        deadline: Instant,
    ) -> Result<(), String> {
        match role.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(outcome) => outcome.map_err(|e| format!("side {index}: {e}")),
            Err(_) => Err(format!("side {index} hangs: not done after {:?}", self.hang)),
        }
    }

    fn reap(&self, child: &mut Child, deadline: Instant) -> Result<(), String> {
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("side 1: {status}, its own words are above")),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                Ok(None) => {
                    let killed = child.kill().and_then(|()| child.wait());
                    return Err(format!("side 1 hangs: not done after {:?}; killed: {killed:?}", self.hang));
                }
                Err(error) => return Err(format!("side 1: {error}")),
            }
        }
    }
}

/// Plays a role on a thread that may hang without hanging the suite.
fn on_thread<S: Side>(
    case: &Case<S>,
    stage: &Stage,
    index: usize,
    channel: Channel,
) -> mpsc::Receiver<Result<(), String>> {
    let (tell, told) = mpsc::channel();
    let (case, stage) = (*case, stage.clone());
    let name = format!("{}/{index}", case.name);
    let spawned = std::thread::Builder::new().name(name).spawn(move || {
        // Nobody listens any more once the guard has given the case up.
        if tell.send(play_role(&case, stage, index, channel)).is_err() {}
    });
    spawned.expect("a thread");
    told
}

fn play_role<S: Side>(case: &Case<S>, stage: Stage, index: usize, channel: Channel) -> Result<(), String> {
    LAST_PANIC.set(Some(String::new()));
    let played = panic::catch_unwind(AssertUnwindSafe(|| {
        let mut side = S::new(index, stage, channel);
        (case.run)(&mut side);
        // A failure of either side is a failure of both.
        side.meet();
    }));
    played.map_err(|_| LAST_PANIC.take().unwrap_or_default())
}
