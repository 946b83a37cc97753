//! The device contract in executable form: one suite for every provider.
//!
//! ```text
//! conformance [--device SPEC[,SPEC]] [--across] [--mode threads|processes] [--wrapped] [--filter TEXT] [--list]
//! conformance --mode hosts [--role 0|1] [--rendezvous HOST:PORT] [--device ...]
//! ```
//!
//! A case is a function that both sides run, see [`side::Side`]: on two threads, in two processes, or on two hosts, of
//! which role 0 listens; role and rendezvous come from `HOST` (0 or 1) and `PEER` (the other's address) if not given. Both
//! sides are on the first device, or with `--across` the right one on the second; cases with two devices use both. With
//! `--wrapped` each device is inside a fault device that injects nothing. Without `--device` and `--mode` the suite runs
//! on what needs nothing installed: software between threads, between processes, and wrapped; and once more what concerns
//! memory registered in place, with `process_vm_readv` and `process_vm_writev` refused. The last line is
//! `N passed, N failed`; the exit status says the same. A case that hangs is a failed case.
//!
//! It is a plain program, so that it can be carried to a machine where the device is.

mod cases;
mod channel;
#[path = "../seccomp/mod.rs"]
mod seccomp;
mod side;

use std::cell::RefCell;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crosstie::device::DeviceSpec;

use cases::{Case, UNSUPPORTED};
use channel::Channel;
use side::{Devices, Side};

/// A case that takes longer than this hangs.
const HANG: Duration = Duration::from_secs(60);

/// Where role 0 listens unless told.
const PORT: u16 = 7077;

/// How long the hosts wait for each other between cases: one may be busy with a case that hangs.
const RENDEZVOUS: Duration = Duration::from_secs(90);

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("conformance: {error}");
            return ExitCode::from(2);
        }
    };
    panic::set_hook(Box::new(|info| {
        let text = format!("{info}");
        if LAST_PANIC.with_borrow_mut(|last| last.as_mut().map(|l| l.clone_from(&text))).is_none() {
            eprintln!("{text}");
        }
    }));
    if let Some(unknown) = UNSUPPORTED.iter().find(|u| cases::all().all(|c| c.name != u.case)) {
        eprintln!("conformance: {} is listed as unsupported, but there is no such case", unknown.case);
        return ExitCode::from(2);
    }
    let cases = cases::all().filter(|c| options.filters.iter().all(|f| c.name.contains(f.as_str())));
    let cases: Vec<Case> = cases.collect();
    if options.list {
        cases.iter().for_each(|c| println!("{}", c.name));
        return ExitCode::SUCCESS;
    }
    if let Some(name) = &options.child {
        return child(name, &options);
    }
    let mut tally = Tally { quiet: options.quiet, ..Tally::default() };
    let outcome = match &options.rendezvous {
        Some(address) => hosts(&cases, &options.devices(), options.role, address, &mut tally),
        None => {
            options.runs().iter().for_each(|run| run.play(&cases, &mut tally));
            Ok(())
        }
    };
    if let Err(error) = outcome {
        eprintln!("conformance: {error}");
        tally.failed.push(format!("rendezvous: {error}"));
    }
    tally.report()
}

thread_local! {
    /// Where the panic hook leaves the words of a role that fails; none on threads that play no role.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// What was asked for.
#[derive(Debug, Default)]
struct Options {
    specs: Vec<DeviceSpec>,
    across: bool,
    wrapped: bool,
    mode: Option<String>,
    role: usize,
    rendezvous: Option<String>,
    child: Option<String>,
    filters: Vec<String>,
    list: bool,
    quiet: bool,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options::default();
        let mut role = None;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--device" => {
                    for spec in value()?.split(',') {
                        options.specs.push(spec.parse().map_err(|e| format!("{e}"))?);
                    }
                }
                "--mode" => options.mode = Some(value()?),
                "--role" => role = Some(value()?),
                "--rendezvous" => options.rendezvous = Some(value()?),
                "--child" => options.child = Some(value()?),
                "--filter" => options.filters.push(value()?),
                "--across" => options.across = true,
                "--wrapped" => options.wrapped = true,
                "--list" => options.list = true,
                "-q" | "--quiet" => options.quiet = true,
                // What `cargo test` passes to every harness.
                "--nocapture" | "--no-capture" | "--show-output" | "--exact" | "--include-ignored" => {}
                "--test-threads" | "--color" | "--format" => drop(value()?),
                flag if flag.starts_with("--test-threads=") || flag.starts_with("--color=") => {}
                flag if flag.starts_with('-') => return Err(format!("unknown option {flag}")),
                filter => options.filters.push(filter.to_owned()),
            }
        }
        match options.mode.as_deref() {
            None | Some("threads" | "processes") => {}
            Some("hosts") => options.find_other_host(role)?,
            Some(mode) => return Err(format!("no mode {mode}: threads, processes or hosts")),
        }
        Ok(options)
    }

    fn find_other_host(&mut self, role: Option<String>) -> Result<(), String> {
        let role = role.or_else(|| std::env::var("HOST").ok()).ok_or("--mode hosts needs --role 0 or 1")?;
        self.role = role.parse().ok().filter(|r| *r < 2).ok_or(format!("--role is 0 or 1, not {role}"))?;
        if self.rendezvous.is_none() {
            let host = match self.role {
                0 => "0.0.0.0".to_owned(),
                _ => std::env::var("PEER").map_err(|_| "--mode hosts needs --rendezvous HOST:PORT")?,
            };
            self.rendezvous = Some(format!("{host}:{PORT}"));
        }
        Ok(())
    }

    fn devices(&self) -> Devices {
        let specs = if self.specs.is_empty() { vec![DeviceSpec::Software] } else { self.specs.clone() };
        Devices { specs, across: self.across, wrapped: self.wrapped }
    }

    fn runs(&self) -> Vec<Run> {
        let devices = self.devices();
        let processes = match self.mode.as_deref() {
            Some(mode) => vec![mode == "processes"],
            None => vec![false, true],
        };
        let mut runs: Vec<Run> = processes
            .into_iter()
            .map(|processes| Run { devices: devices.clone(), processes, proxy: false })
            .collect();
        if self.specs.is_empty() && self.mode.is_none() && !self.wrapped {
            let wrapped = Devices { wrapped: true, ..devices.clone() };
            runs.push(Run { devices: wrapped, processes: false, proxy: false });
            // The last: what it forbids stays forbidden.
            runs.push(Run { devices, processes: true, proxy: true });
        }
        runs
    }
}

/// The suite once, on one choice of devices, on this host.
struct Run {
    devices: Devices,
    processes: bool,
    /// Whether the kernel shall refuse to let one process at another's memory, so that the owner has to copy.
    proxy: bool,
}

impl Run {
    fn play(&self, cases: &[Case], tally: &mut Tally) {
        let mut title = title(&self.devices, if self.processes { "processes" } else { "threads" });
        if self.proxy {
            let calls = [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev];
            seccomp::filter(&calls, seccomp::Verdict::RefuseThese);
            title.push_str(", process_vm_readv and process_vm_writev refused");
        }
        tally.begin(&title);
        for case in cases.iter().filter(|case| !self.proxy || case.name.contains("in_place")) {
            if tally.skips(case, &self.devices) {
                continue;
            }
            let started = Instant::now();
            let outcome = self.play_case(case);
            tally.note(case, started, outcome);
        }
    }

    fn play_case(&self, case: &Case) -> Result<(), String> {
        let deadline = Instant::now() + HANG;
        let (near, far) = Channel::pair(HANG).map_err(|e| format!("socketpair: {e}"))?;
        if self.processes {
            let mut child = self.spawn(case, far).map_err(|e| format!("starting the other side: {e}"))?;
            let left = on_thread(case, &self.devices, 0, near);
            let left = outcome_of(&left, 0, deadline);
            let right = reap(&mut child, deadline);
            left.and(right)
        } else {
            let far = Channel::over_unix(far, HANG).map_err(|e| format!("socketpair: {e}"))?;
            let left = on_thread(case, &self.devices, 0, near);
            let right = on_thread(case, &self.devices, 1, far);
            let (left, right) = (outcome_of(&left, 0, deadline), outcome_of(&right, 1, deadline));
            match (left, right) {
                (Err(left), Err(right)) => Err(format!("{left}\n{right}")),
                (left, right) => left.and(right),
            }
        }
    }

    /// The right side in a process of its own, with the channel as its standard input.
    fn spawn(&self, case: &Case, far: UnixStream) -> std::io::Result<Child> {
        let specs: Vec<String> = self.devices.specs.iter().map(DeviceSpec::to_string).collect();
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--child", case.name, "--device", &specs.join(",")]);
        command.args(self.devices.wrapped.then_some("--wrapped"));
        command.args(self.devices.across.then_some("--across"));
        command.stdin(Stdio::from(std::os::fd::OwnedFd::from(far))).spawn()
    }
}

/// The right side of one case, as [`Run::spawn`] started it.
fn child(name: &str, options: &Options) -> ExitCode {
    let Some(case) = cases::all().find(|c| c.name == name) else {
        eprintln!("conformance: no case {name}");
        return ExitCode::from(2);
    };
    let descriptor = std::io::stdin().as_fd().try_clone_to_owned();
    match descriptor.and_then(|d| Channel::over_descriptor(d, HANG)) {
        Ok(channel) => match play_role(&case, options.devices(), 1, channel) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("side 1: {error}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            eprintln!("conformance: the channel: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The suite between two hosts. Role 0 listens and names the case for each connection; an empty name is the end.
fn hosts(
    cases: &[Case],
    devices: &Devices,
    role: usize,
    address: &str,
    tally: &mut Tally,
) -> std::io::Result<()> {
    tally.begin(&title(devices, &format!("host {role}")));
    let mut play = |case: &Case, channel: Channel| {
        let started = Instant::now();
        let outcome = on_thread(case, devices, role, channel);
        tally.note(case, started, outcome_of(&outcome, role, started + HANG));
    };
    if role == 0 {
        let listener = TcpListener::bind(address)?;
        let greet = |name: &str| -> std::io::Result<Channel> {
            let stream = channel::accept(&listener, RENDEZVOUS)?;
            let mut channel = Channel::over_tcp(stream, HANG)?;
            channel.send(name.as_bytes())?;
            Ok(channel)
        };
        let (skipped, played): (Vec<_>, Vec<_>) =
            cases.iter().partition(|c| Tally::reason(c, devices).is_some());
        for case in played {
            play(case, greet(case.name)?);
        }
        greet("")?;
        for case in skipped {
            tally.skips(case, devices);
        }
        return Ok(());
    }
    loop {
        let stream = channel::connect(address, RENDEZVOUS)?;
        let mut channel = Channel::over_tcp(stream, RENDEZVOUS)?;
        let name = channel.recv()?;
        if name.is_empty() {
            return Ok(());
        }
        match cases::all().find(|c| c.name.as_bytes() == name) {
            Some(case) => play(&case, channel),
            None => return Err(std::io::Error::other("the other host plays another suite")),
        }
    }
}

fn title(devices: &Devices, mode: &str) -> String {
    let specs: Vec<String> = devices.specs.iter().map(DeviceSpec::to_string).collect();
    format!(
        "{}{}, {mode}",
        if devices.wrapped { "fault with nothing injected on " } else { "" },
        specs.join(",")
    )
}

/// Plays a role on a thread that may hang without hanging the suite.
fn on_thread(
    case: &Case,
    devices: &Devices,
    index: usize,
    channel: Channel,
) -> mpsc::Receiver<Result<(), String>> {
    let (tell, told) = mpsc::channel();
    let (case, devices) = (*case, devices.clone());
    let name = format!("{}/{index}", case.name);
    let spawned = std::thread::Builder::new().name(name).spawn(move || {
        // Nobody listens any more once the guard has given the case up.
        if tell.send(play_role(&case, devices, index, channel)).is_err() {}
    });
    spawned.expect("a thread");
    told
}

fn play_role(case: &Case, devices: Devices, index: usize, channel: Channel) -> Result<(), String> {
    LAST_PANIC.set(Some(String::new()));
    let played = panic::catch_unwind(AssertUnwindSafe(|| {
        let mut side = Side::new(index, devices, channel);
        (case.run)(&mut side);
        // A failure of either side is a failure of both.
        side.meet();
    }));
    played.map_err(|_| LAST_PANIC.take().unwrap_or_default())
}

fn outcome_of(
    role: &mpsc::Receiver<Result<(), String>>,
    index: usize,
    deadline: Instant,
) -> Result<(), String> {
    match role.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(outcome) => outcome.map_err(|e| format!("side {index}: {e}")),
        Err(_) => Err(format!("side {index} hangs: not done after {HANG:?}")),
    }
}

fn reap(child: &mut Child, deadline: Instant) -> Result<(), String> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("side 1: {status}, its own words are above")),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Ok(None) => {
                let killed = child.kill().and_then(|()| child.wait());
                return Err(format!("side 1 hangs: not done after {HANG:?}; killed: {killed:?}"));
            }
            Err(error) => return Err(format!("side 1: {error}")),
        }
    }
}

/// What came of it all.
#[derive(Default)]
struct Tally {
    quiet: bool,
    run: String,
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<String>,
}

impl Tally {
    fn begin(&mut self, run: &str) {
        self.run = run.to_owned();
        println!("{run}:");
    }

    fn reason(case: &Case, devices: &Devices) -> Option<&'static str> {
        let provider = devices.provider();
        UNSUPPORTED.iter().find(|u| u.case == case.name && u.provider == provider).map(|u| u.reason)
    }

    fn skips(&mut self, case: &Case, devices: &Devices) -> bool {
        let reason = Tally::reason(case, devices);
        self.skipped.extend(reason.map(|reason| format!("{} ({}): {reason}", case.name, self.run)));
        reason.is_some()
    }

    fn note(&mut self, case: &Case, started: Instant, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => {
                self.passed += 1;
                if !self.quiet {
                    println!("  ok      {:<44} {:>6} ms", case.name, started.elapsed().as_millis());
                }
            }
            Err(error) => {
                println!("  FAILED  {}\n    {}", case.name, error.replace('\n', "\n    "));
                self.failed.push(format!("{} ({})", case.name, self.run));
            }
        }
    }

    fn report(&self) -> ExitCode {
        if !self.skipped.is_empty() {
            println!("\nnot possible on this device:");
            self.skipped.iter().for_each(|s| println!("  {s}"));
        }
        if !self.failed.is_empty() {
            println!("\nfailed:");
            self.failed.iter().for_each(|f| println!("  {f}"));
        }
        println!("\n{} passed, {} failed", self.passed, self.failed.len());
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
