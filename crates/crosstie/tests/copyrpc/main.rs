//! copyrpc on a device: every call ends once, with the right bytes, whatever the sizes and the order.
//!
//! ```text
//! copyrpc [--device SPEC[,SPEC]] [--mode threads|processes] [--filter TEXT] [--list]
//! copyrpc --mode hosts [--role 0|1] [--rendezvous HOST:PORT] [--device ...]
//! ```
//!
//! A case is a function that both sides run: on two threads, in two processes, or on two hosts, of which role 0 listens;
//! role and rendezvous come from `HOST` (0 or 1) and `PEER` (the other's address) if not given. On one host the right
//! side is on the second device, if there are two. Without `--device` and `--mode` the cases run on the software device,
//! between threads and between processes. The seed is printed; `CROSSTIE_SEED` sets it. The last line is
//! `N passed, N failed`; a case that hangs is a failed case.
//!
//! It is a plain program, so that it can be carried to a machine where the device is.

mod bulk;
mod cases;
#[path = "../conformance/channel.rs"]
mod channel;
mod load;

use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{self, AssertUnwindSafe};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crosstie::copyrpc::{Config, Context, Endpoint, EndpointAddress, EndpointConfig};
use crosstie::device::{ConnectConfig, DeviceSpec};
use zerocopy::{FromBytes, IntoBytes};

use cases::{CASES, Case};
use channel::Channel;

/// A case that takes longer than this hangs.
const HANG: Duration = Duration::from_secs(120);
/// How long hosts wait for each other.
const RENDEZVOUS: Duration = Duration::from_secs(150);
/// Where role 0 listens unless told.
const PORT: u16 = 7078;

/// One side of a case.
pub(crate) struct Side {
    /// 0 or 1.
    pub(crate) index: usize,
    pub(crate) spec: DeviceSpec,
    pub(crate) seed: u64,
    channel: Channel,
}

impl Side {
    /// Whether the device is an emulated one in an emulated machine, where everything takes a thousand times longer.
    pub(crate) fn is_slow(&self) -> bool {
        matches!(self.spec, DeviceSpec::Verbs { .. })
    }

    /// So many, or fewer where that would take too long.
    pub(crate) fn scaled(&self, calls: u64) -> u64 {
        if self.is_slow() { (calls / 50).clamp(20, 1000) } else { calls }
    }

    pub(crate) fn context<U>(&self) -> Context<U> {
        self.context_with(&Config::default())
    }

    pub(crate) fn context_with<U>(&self, config: &Config) -> Context<U> {
        Context::open(&self.spec, config).unwrap_or_else(|e| panic!("opening {}: {e}", self.spec))
    }

    /// An endpoint that is connected to one that the other side makes at the same time.
    pub(crate) fn connect<U>(&mut self, context: &Context<U>, config: &EndpointConfig) -> Endpoint<U> {
        let endpoint = context.create_endpoint(config).expect("an endpoint");
        let theirs = self.exchange(endpoint.address().as_bytes());
        let theirs = EndpointAddress::read_from_bytes(&theirs).expect("an address");
        endpoint.connect(&theirs, &ConnectConfig::default()).expect("connected");
        // Neither calls before both are there.
        self.meet();
        endpoint
    }

    pub(crate) fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.channel.send(bytes).expect("the other side is there");
        self.channel.recv().expect("the other side is there")
    }

    /// Waits for the other side.
    pub(crate) fn meet(&mut self) {
        self.exchange(&[]);
    }
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("copyrpc: {error}");
            return ExitCode::from(2);
        }
    };
    let cases: Vec<&Case> =
        CASES.iter().filter(|c| options.filters.iter().all(|f| c.name.contains(f.as_str()))).collect();
    if options.list {
        cases.iter().for_each(|c| println!("{}", c.name));
        return ExitCode::SUCCESS;
    }
    if let Some(name) = &options.child {
        return child(name, &options);
    }
    println!("seed {} (set CROSSTIE_SEED to repeat)", options.seed);
    let mut tally = Tally::default();
    if let Some(address) = &options.rendezvous {
        if let Err(error) = hosts(&cases, &options, address, &mut tally) {
            println!("  FAILED  rendezvous: {error}");
            tally.failed += 1;
        }
    } else {
        let modes: &[&str] = match options.mode.as_deref() {
            Some("threads") => &["threads"],
            Some(_) => &["processes"],
            None => &["threads", "processes"],
        };
        for mode in modes {
            println!("{}, {mode}:", options.devices());
            for case in &cases {
                let started = Instant::now();
                let outcome = play(case, &options, *mode == "processes");
                tally.note(case, started, outcome);
            }
        }
    }
    println!("\n{} passed, {} failed", tally.passed, tally.failed);
    if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What was asked for.
#[derive(Debug, Default)]
struct Options {
    specs: Vec<DeviceSpec>,
    mode: Option<String>,
    role: usize,
    rendezvous: Option<String>,
    child: Option<String>,
    filters: Vec<String>,
    list: bool,
    seed: u64,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
        let seed = std::env::var("CROSSTIE_SEED").ok().and_then(|s| s.parse().ok());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = seed.unwrap_or(now.map_or(1, |d| d.as_nanos() as u64));
        let mut options = Options { seed, ..Options::default() };
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
                "--list" => options.list = true,
                // What `cargo test` passes to every harness.
                "--nocapture" | "--no-capture" | "--show-output" | "--exact" | "--include-ignored" | "-q"
                | "--quiet" => {}
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

    fn devices(&self) -> String {
        let specs: Vec<String> = self.specs.iter().map(DeviceSpec::to_string).collect();
        if specs.is_empty() { DeviceSpec::Software.to_string() } else { specs.join(",") }
    }

    /// Hosts have a device each, which bears the same name on both.
    fn device(&self, index: usize) -> DeviceSpec {
        let which = if self.rendezvous.is_some() { 0 } else { index.min(self.specs.len().max(1) - 1) };
        self.specs.get(which).cloned().unwrap_or(DeviceSpec::Software)
    }
}

fn play(case: &'static Case, options: &Options, processes: bool) -> Result<(), String> {
    let (near, far) = Channel::pair(HANG).map_err(|e| format!("socketpair: {e}"))?;
    let deadline = Instant::now() + HANG;
    if processes {
        let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
        command.args(["--child", case.name, "--device", &options.devices()]);
        command.env("CROSSTIE_SEED", options.seed.to_string());
        let mut child = command.stdin(Stdio::from(OwnedFd::from(far))).spawn().map_err(|e| e.to_string())?;
        let left = outcome_of(&on_thread(case, options, 0, near), 0, deadline);
        return left.and(reap(&mut child, deadline));
    }
    let far = Channel::over_unix(far, HANG).map_err(|e| format!("socketpair: {e}"))?;
    let (left, right) = (on_thread(case, options, 0, near), on_thread(case, options, 1, far));
    match (outcome_of(&left, 0, deadline), outcome_of(&right, 1, deadline)) {
        (Err(left), Err(right)) => Err(format!("{left}\n{right}")),
        (left, right) => left.and(right),
    }
}

/// The right side of a case, as [`play`] started it.
fn child(name: &str, options: &Options) -> ExitCode {
    let Some(case) = CASES.iter().find(|c| c.name == name) else {
        eprintln!("copyrpc: no case {name}");
        return ExitCode::from(2);
    };
    let descriptor = std::io::stdin().as_fd().try_clone_to_owned();
    let channel = descriptor.and_then(|d| Channel::over_descriptor(d, HANG));
    let played = channel.map_err(|e| e.to_string()).and_then(|c| play_role(case, options, 1, c));
    match played {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The cases between two hosts. Role 0 listens and names the case for each connection; an empty name is the end.
fn hosts(
    cases: &[&'static Case],
    options: &Options,
    address: &str,
    tally: &mut Tally,
) -> std::io::Result<()> {
    println!("{}, host {}:", options.devices(), options.role);
    let mut play = |case: &'static Case, channel: Channel| {
        let started = Instant::now();
        let outcome = on_thread(case, options, options.role, channel);
        tally.note(case, started, outcome_of(&outcome, options.role, started + HANG));
    };
    if options.role == 0 {
        let listener = TcpListener::bind(address)?;
        for name in cases.iter().map(|case| case.name).chain([""]) {
            let mut channel = Channel::over_tcp(channel::accept(&listener, RENDEZVOUS)?, HANG)?;
            channel.send(name.as_bytes())?;
            if let Some(case) = cases.iter().find(|case| case.name == name) {
                play(case, channel);
            }
        }
        return Ok(());
    }
    loop {
        let mut channel = Channel::over_tcp(channel::connect(address, RENDEZVOUS)?, RENDEZVOUS)?;
        let name = channel.recv()?;
        if name.is_empty() {
            return Ok(());
        }
        match CASES.iter().find(|c| c.name.as_bytes() == name) {
            Some(case) => play(case, channel),
            None => return Err(std::io::Error::other("the other host plays other cases")),
        }
    }
}

/// Plays a role on a thread that may hang without hanging the others.
fn on_thread(
    case: &'static Case,
    options: &Options,
    index: usize,
    channel: Channel,
) -> mpsc::Receiver<Result<(), String>> {
    let (tell, told) = mpsc::channel();
    let spec = options.device(index);
    let seed = options.seed;
    let name = format!("{}/{index}", case.name);
    let spawned = std::thread::Builder::new().name(name).spawn(move || {
        // Nobody listens any more once the guard has given the case up.
        if tell.send(play_side(case, Side { index, spec, seed, channel })).is_err() {}
    });
    spawned.expect("a thread");
    told
}

fn play_role(case: &Case, options: &Options, index: usize, channel: Channel) -> Result<(), String> {
    play_side(case, Side { index, spec: options.device(index), seed: options.seed, channel })
}

fn play_side(case: &Case, mut side: Side) -> Result<(), String> {
    let played = panic::catch_unwind(AssertUnwindSafe(|| {
        (case.run)(&mut side);
        // A failure of either side is a failure of both.
        side.meet();
    }));
    played.map_err(|_| "its own words are above".to_owned())
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

#[derive(Default)]
struct Tally {
    passed: usize,
    failed: usize,
}

impl Tally {
    fn note(&mut self, case: &Case, started: Instant, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => {
                self.passed += 1;
                println!("  ok      {:<52} {:>6} ms", case.name, started.elapsed().as_millis());
            }
            Err(error) => {
                self.failed += 1;
                println!("  FAILED  {}\n    {}", case.name, error.replace('\n', "\n    "));
            }
        }
    }
}
