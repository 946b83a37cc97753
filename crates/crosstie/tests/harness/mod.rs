//! Runs test cases that need two participants: on two threads, in two processes, or on two hosts.
//!
//! ```text
//! SUITE [--device SPEC[,SPEC]] [--across] [--mode threads|processes] [--wrapped] [--filter TEXT] [--list]
//! SUITE --mode hosts [--role 0|1] [--rendezvous HOST:PORT] [--device ...]
//! ```
//!
//! Both participants use the first device; with `--across` the right participant uses the second. `--wrapped` puts each
//! device inside a fault device that injects nothing. Between two hosts, role 0 listens; role and rendezvous address
//! default to the environment variables `HOST` (0 or 1) and `PEER` (the other host's address). Without `--device` and
//! `--mode` the cases run on the software device, between threads and between processes, followed by the suite's
//! `extra_runs`. The last line is `N passed, N failed`, and the exit status says the same. A case that exceeds the suite's
//! timeout counts as failed.
//!
//! A suite is a plain program without libtest, so that it can be copied to a machine that has the device.

pub(crate) mod channel;
mod options;
mod report;

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
use report::Report;

/// How much longer than the case timeout two hosts wait for each other: the other host may be in a case that hangs.
const HOST_GRACE: Duration = Duration::from_secs(30);

/// A list of cases and how to run them.
pub(crate) struct Suite<S: Participant> {
    pub(crate) name: &'static str,
    pub(crate) cases: Vec<Case<S>>,
    /// A case that takes longer than this has failed.
    pub(crate) timeout: Duration,
    /// The TCP port on which role 0 listens by default.
    pub(crate) port: u16,
    /// Seed of the random number generator, for suites that use one.
    pub(crate) seed: Option<u64>,
    /// Why a case cannot run on this setup; `None` if it can.
    pub(crate) skip_reason: fn(&str, &TestSetup) -> Option<&'static str>,
    /// Whether only these run.
    pub(crate) only_extra_runs: bool,
    /// What else runs when the command line chose neither device nor mode.
    pub(crate) extra_runs: fn(&TestSetup) -> Vec<Run>,
}

/// A named function that both participants run, each with its own `S`.
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

/// One of the two participants of a case.
pub(crate) trait Participant: Sized + 'static {
    /// Index 0 is the left participant, 1 the right one.
    fn new(index: usize, setup: TestSetup, channel: Channel) -> Self;
    /// Returns when the other participant has called this too.
    fn wait_for_other(&mut self);
}

/// The devices that cases run on.
#[derive(Clone, Debug)]
pub(crate) struct TestSetup {
    pub(crate) specs: Vec<DeviceSpec>,
    /// Whether the right participant uses the second device rather than the first.
    pub(crate) across: bool,
    /// Whether each device is wrapped in a fault device that injects nothing.
    pub(crate) wrapped: bool,
    /// Zero if the suite uses no random numbers.
    #[allow(dead_code, reason = "not every suite uses it")]
    pub(crate) seed: u64,
}

impl TestSetup {
    /// Opens device number `which`, or the last one if there are fewer.
    pub(crate) fn open(&self, which: usize) -> Device {
        let spec = &self.specs[which.min(self.specs.len() - 1)];
        let device = Device::open(spec).unwrap_or_else(|e| panic!("opening {spec}: {e}"));
        if self.wrapped { device.with_faults(fault::Plan::none()) } else { device }
    }

    /// Opens the device of a participant.
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

/// One run of the suite on this host.
pub(crate) struct Run {
    pub(crate) setup: TestSetup,
    pub(crate) processes: bool,
    pub(crate) restriction: Option<Restriction>,
}

impl Run {
    /// In threads, with each device wrapped in a fault device that injects nothing: requests are queued, as on a NIC.
    pub(crate) fn wrapped(setup: &TestSetup) -> Run {
        Run { setup: TestSetup { wrapped: true, ..setup.clone() }, processes: false, restriction: None }
    }
}

/// Something that is forbidden to this process from now on; there is no way to lift it.
#[derive(Clone, Copy)]
pub(crate) struct Restriction {
    pub(crate) what: &'static str,
    pub(crate) apply: fn(),
    /// The cases to run under the restriction: those whose names contain this text.
    pub(crate) cases: &'static str,
}

thread_local! {
    /// The panic message of a participant that failed; `None` on threads that run no participant.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

impl<S: Participant> Suite<S> {
    /// Runs what the program's arguments ask for.
    pub(crate) fn main(&self) -> ExitCode {
        let options = match Options::parse(std::env::args().skip(1), self.port) {
            Ok(options) => options,
            Err(error) => return self.usage_error(&error),
        };
        panic::set_hook(Box::new(|info| {
            let text = format!("{info}");
            if LAST_PANIC.with_borrow_mut(|last| last.as_mut().map(|l| l.clone_from(&text))).is_none() {
                eprintln!("{text}");
            }
        }));
        let setup = options.setup(self.seed.unwrap_or(0));
        let chosen =
            self.cases.iter().filter(|c| options.filters.iter().all(|f| c.name.contains(f.as_str())));
        let cases: Vec<Case<S>> = chosen.copied().collect();
        if options.list {
            cases.iter().for_each(|c| println!("{}", c.name));
            return ExitCode::SUCCESS;
        }
        if let Some(name) = &options.child {
            return self.run_child(name, setup);
        }
        if let Some(seed) = self.seed {
            println!("seed {seed} (set CROSSTIE_SEED to repeat)");
        }
        let mut report = Report::new(options.quiet);
        match &options.rendezvous {
            None => self.runs(&options, setup).iter().for_each(|run| self.run(run, &cases, &mut report)),
            Some(address) => {
                if let Err(error) = self.run_between_hosts(&cases, &setup, options.role, address, &mut report)
                {
                    eprintln!("{}: {error}", self.name);
                    report.fail(&format!("rendezvous: {error}"));
                }
            }
        }
        report.finish()
    }

    pub(crate) fn usage_error(&self, error: &str) -> ExitCode {
        eprintln!("{}: {error}", self.name);
        ExitCode::from(2)
    }

    fn runs(&self, options: &Options, setup: TestSetup) -> Vec<Run> {
        let run = |processes| Run { setup: setup.clone(), processes, restriction: None };
        if let Some(mode) = options.mode.as_deref() {
            return vec![run(mode == "processes")];
        }
        let mut runs = if self.only_extra_runs { Vec::new() } else { vec![run(false), run(true)] };
        if options.specs.is_empty() && !setup.wrapped {
            runs.extend((self.extra_runs)(&setup));
        }
        runs
    }

    fn run(&self, run: &Run, cases: &[Case<S>], report: &mut Report) {
        let mut title = run.setup.title(if run.processes { "processes" } else { "threads" });
        if let Some(restriction) = run.restriction {
            (restriction.apply)();
            title = format!("{title}, {}", restriction.what);
        }
        report.begin(&title);
        for case in cases.iter().filter(|case| run.restriction.is_none_or(|h| case.name.contains(h.cases))) {
            match (self.skip_reason)(case.name, &run.setup) {
                Some(reason) => report.skip(case.name, reason),
                None => {
                    let started = Instant::now();
                    let outcome = self.run_case(case, run);
                    report.note(case.name, started, outcome);
                }
            }
        }
    }

    fn run_case(&self, case: &Case<S>, run: &Run) -> Result<(), String> {
        let deadline = Instant::now() + self.timeout;
        let (near, far) = Channel::pair(self.timeout).map_err(|e| format!("socketpair: {e}"))?;
        if run.processes {
            let child = self.spawn(case, &run.setup, far);
            let mut child = child.map_err(|e| format!("starting the right participant: {e}"))?;
            let left = spawn_participant(case, &run.setup, 0, near);
            let left = self.wait_for_outcome(&left, 0, deadline);
            return left.and(self.reap(&mut child, deadline));
        }
        let far = Channel::over_unix(far, self.timeout).map_err(|e| format!("socketpair: {e}"))?;
        let (left, right) =
            (spawn_participant(case, &run.setup, 0, near), spawn_participant(case, &run.setup, 1, far));
        match (self.wait_for_outcome(&left, 0, deadline), self.wait_for_outcome(&right, 1, deadline)) {
            (Err(left), Err(right)) => Err(format!("{left}\n{right}")),
            (left, right) => left.and(right),
        }
    }

    /// Starts the right participant in its own process; the channel is its standard input.
    fn spawn(&self, case: &Case<S>, setup: &TestSetup, far: UnixStream) -> std::io::Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--child", case.name, "--device", &setup.devices()]);
        command.args(setup.wrapped.then_some("--wrapped"));
        command.args(setup.across.then_some("--across"));
        command.envs(self.seed.map(|seed| ("CROSSTIE_SEED", seed.to_string())));
        command.stdin(Stdio::from(OwnedFd::from(far))).spawn()
    }

    /// Runs the right participant of one case in the process that [`Suite::spawn`] started.
    fn run_child(&self, name: &str, setup: TestSetup) -> ExitCode {
        let Some(case) = self.cases.iter().find(|c| c.name == name) else {
            return self.usage_error(&format!("no case {name}"));
        };
        let descriptor = std::io::stdin().as_fd().try_clone_to_owned();
        let channel = descriptor.and_then(|d| Channel::over_descriptor(d, self.timeout));
        let channel = channel.map_err(|error| format!("opening the channel on standard input: {error}"));
        match channel.and_then(|channel| run_participant(case, setup, 1, channel)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("participant 1: {error}");
                ExitCode::FAILURE
            }
        }
    }

    /// Runs the cases between two hosts. Role 0 accepts one connection per case and sends the case's name over it; an empty
    /// name ends the run.
    fn run_between_hosts(
        &self,
        cases: &[Case<S>],
        setup: &TestSetup,
        role: usize,
        address: &str,
        report: &mut Report,
    ) -> std::io::Result<()> {
        let timeout = self.timeout + HOST_GRACE;
        report.begin(&setup.title(&format!("host {role}")));
        let run_case = |report: &mut Report, case: &Case<S>, channel: Channel| {
            let started = Instant::now();
            let outcome = spawn_participant(case, setup, role, channel);
            report.note(case.name, started, self.wait_for_outcome(&outcome, role, started + self.timeout));
        };
        if role == 0 {
            let listener = TcpListener::bind(address)?;
            let announce = |name: &str| -> std::io::Result<Channel> {
                let mut channel = Channel::over_tcp(channel::accept(&listener, timeout)?, self.timeout)?;
                channel.send(name.as_bytes())?;
                Ok(channel)
            };
            for case in cases {
                match (self.skip_reason)(case.name, setup) {
                    Some(reason) => report.skip(case.name, reason),
                    None => run_case(report, case, announce(case.name)?),
                }
            }
            return announce("").map(drop);
        }
        loop {
            let mut channel = Channel::over_tcp(channel::connect(address, timeout)?, timeout)?;
            let name = channel.recv()?;
            if name.is_empty() {
                return Ok(());
            }
            match self.cases.iter().find(|c| c.name.as_bytes() == name) {
                Some(case) => run_case(report, case, channel),
                None => return Err(std::io::Error::other("the other host runs a different suite")),
            }
        }
    }

    fn wait_for_outcome(
        &self,
        role: &mpsc::Receiver<Result<(), String>>,
        index: usize,
        deadline: Instant,
    ) -> Result<(), String> {
        match role.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(outcome) => outcome.map_err(|e| format!("participant {index}: {e}")),
            Err(_) => Err(format!("participant {index} hangs: not finished after {:?}", self.timeout)),
        }
    }

    fn reap(&self, child: &mut Child, deadline: Instant) -> Result<(), String> {
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("participant 1: {status}, see its own output above")),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                Ok(None) => {
                    let killed = child.kill().and_then(|()| child.wait());
                    return Err(format!(
                        "participant 1 hangs: not finished after {:?}; killed: {killed:?}",
                        self.timeout
                    ));
                }
                Err(error) => return Err(format!("participant 1: {error}")),
            }
        }
    }
}

/// Runs a participant on its own thread, so that a case that hangs does not hang the suite.
fn spawn_participant<S: Participant>(
    case: &Case<S>,
    setup: &TestSetup,
    index: usize,
    channel: Channel,
) -> mpsc::Receiver<Result<(), String>> {
    let (outcome_tx, outcome_rx) = mpsc::channel();
    let (case, setup) = (*case, setup.clone());
    let name = format!("{}/{index}", case.name);
    let spawned = std::thread::Builder::new().name(name).spawn(move || {
        // The receiver is gone if the case has timed out; then nobody needs the outcome.
        if outcome_tx.send(run_participant(&case, setup, index, channel)).is_err() {}
    });
    spawned.expect("the participant's thread starts");
    outcome_rx
}

fn run_participant<S: Participant>(
    case: &Case<S>,
    setup: TestSetup,
    index: usize,
    channel: Channel,
) -> Result<(), String> {
    LAST_PANIC.set(Some(String::new()));
    let finished = panic::catch_unwind(AssertUnwindSafe(|| {
        let mut participant = S::new(index, setup, channel);
        (case.run)(&mut participant);
        // If the other participant failed, this one must not pass either.
        participant.wait_for_other();
    }));
    finished.map_err(|_| LAST_PANIC.take().unwrap_or_default())
}
