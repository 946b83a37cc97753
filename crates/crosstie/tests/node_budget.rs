//! The budget of a call of `ipc` and `delegation`: no allocation, no system call, and a limit on instructions.
//!
//! One thread drives both sides, so that the counts are exact. A seccomp filter in a child process kills it at the first
//! system call. Callgrind (Debian package `valgrind`) counts the instructions, also in a child process; the figures of the
//! optimised build are in `docs/notes/counts.md`.

#[path = "allocations/mod.rs"]
mod allocations;
#[path = "seccomp/mod.rs"]
mod seccomp;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use allocations::ALLOCATIONS;
use zerocopy::{FromBytes, IntoBytes};

const WARM_UP: u64 = 2_000;
const MEASURED: u64 = 100_000;
/// Calls whose instructions are counted.
const COUNTED: u64 = 1_000;
/// Tells a child process of this test its task.
const CHILD: &str = "CROSSTIE_NODE_BUDGET_CHILD";

/// A message of 32 bytes: a type, or a byte string.
trait Message: crosstie::Message {
    fn of(words: &[u64; 4]) -> &Self;
    fn words(&self) -> [u64; 4];
}

impl Message for [u64; 4] {
    fn of(words: &[u64; 4]) -> &Self {
        words
    }
    fn words(&self) -> [u64; 4] {
        *self
    }
}

impl Message for [u8] {
    fn of(words: &[u64; 4]) -> &Self {
        words.as_bytes()
    }
    fn words(&self) -> [u64; 4] {
        FromBytes::read_from_bytes(self).unwrap()
    }
}

/// How calls and replies are made.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    depth: usize,
    /// Receive all requests, then reply in reverse order.
    reversed: bool,
}

const PATTERNS: [Pattern; 4] = [
    Pattern { depth: 1, reversed: false },
    Pattern { depth: 8, reversed: false },
    Pattern { depth: 32, reversed: false },
    Pattern { depth: 32, reversed: true },
];

/// Server and client in one thread. The closure makes a number of calls in a pattern, until all have their responses.
macro_rules! pair {
    ($service:ident, $message:ty) => {{
        use crosstie::$service::*;
        let name = format!("node-budget-{}", std::process::id());
        let mut server = Server::<$message, $message>::create(&name, &Config::default()).unwrap();
        let mut client = Client::<$message, $message, u64>::connect(&name).unwrap();
        let (mut deferred, mut made) = (Vec::with_capacity(64), 0u64);
        Box::new(move |calls: u64, pattern: Pattern| {
            let end = made + calls;
            while made < end || client.in_flight() > 0 {
                while made < end && client.in_flight() < pattern.depth {
                    client.call(<$message>::of(&[made; 4]), made).unwrap();
                    made += 1;
                }
                server.poll();
                while let Some(request) = server.recv() {
                    let words = request.message().words();
                    if pattern.reversed {
                        deferred.push((request.defer(), words));
                    } else {
                        request.reply(<$message>::of(&words)).unwrap();
                    }
                }
                while let Some((ticket, words)) = deferred.pop() {
                    server.reply(ticket, <$message>::of(&words)).unwrap();
                }
                client.poll(|token, response| assert_eq!(response.words(), [token; 4])).unwrap();
            }
        })
    }};
}

type Pair = Box<dyn FnMut(u64, Pattern)>;

const KINDS: [&str; 4] = ["ipc, typed", "ipc, bytes", "delegation, typed", "delegation, bytes"];

fn pair(kind: &str) -> Pair {
    match kind {
        "ipc, typed" => pair!(ipc, [u64; 4]),
        "ipc, bytes" => pair!(ipc, [u8]),
        "delegation, typed" => pair!(delegation, [u64; 4]),
        _ => pair!(delegation, [u8]),
    }
}

#[test]
fn calls_do_not_allocate() {
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    for kind in KINDS {
        let mut pair = pair(kind);
        for pattern in PATTERNS {
            pair(WARM_UP, pattern);
            let before = ALLOCATIONS.get();
            pair(MEASURED, pattern);
            let count = ALLOCATIONS.get() - before;
            assert_eq!(count, 0, "{kind}, {pattern:?}: calls to the allocator in {MEASURED} calls");
        }
    }
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get() - before, 2, "the allocator counts");
}

fn child(command: &mut Command, test: &str, task: &str) -> Output {
    match command.args([test, "--exact", "--test-threads=1"]).env(CHILD, task).output() {
        Err(error) if command.get_program() == "valgrind" => {
            panic!("valgrind cannot be started ({error}): install the Debian package `valgrind`")
        }
        output => output.unwrap(),
    }
}

#[test]
fn calls_make_no_system_call() {
    const NAME: &str = "calls_make_no_system_call";
    if let Ok(task) = std::env::var(CHILD) {
        let mut pair = pair(&task);
        pair(WARM_UP, PATTERNS[0]);
        seccomp::install_filter(&[libc::SYS_exit_group], seccomp::FilterMode::AllowOnly);
        for pattern in PATTERNS {
            pair(MEASURED, pattern);
        }
        if task == "violating" {
            std::hint::black_box(std::process::id());
        }
        // SAFETY: no memory is involved.
        unsafe { libc::_exit(0) }
    }
    for kind in KINDS {
        let compliant = child(&mut Command::new(std::env::current_exe().unwrap()), NAME, kind);
        assert!(compliant.status.success(), "{kind}: a system call was made, or it failed: {compliant:?}");
    }
    let violating = child(&mut Command::new(std::env::current_exe().unwrap()), NAME, "violating");
    assert_eq!(violating.status.signal(), Some(libc::SIGSYS), "the filter kills: {violating:?}");
}

/// Most instructions of a call, from `call` until the token is handed back, at depth 1 and at depth 32: one and a half times
/// the measured value, without and with optimisation.
fn instruction_limits(kind: &str) -> [u64; 2] {
    match (kind, cfg!(debug_assertions)) {
        ("ipc, typed", true) => [1500, 1320],
        ("ipc, bytes", true) => [1570, 1430],
        ("delegation, typed", true) => [1730, 1550],
        (_, true) => [1760, 1600],
        ("ipc, typed", false) => [513, 294],
        ("ipc, bytes", false) => [662, 447],
        ("delegation, typed", false) => [606, 404],
        (_, false) => [764, 560],
    }
}

#[test]
fn call_stays_within_its_instruction_limit() {
    const NAME: &str = "call_stays_within_its_instruction_limit";
    if let Ok(task) = std::env::var(CHILD) {
        let (kind, depth) = task.split_once(": ").unwrap();
        let (mut pair, pattern) = (pair(kind), Pattern { depth: depth.parse().unwrap(), reversed: false });
        pair(WARM_UP, pattern);
        crosstie_budget_calls(&mut || pair(COUNTED, pattern));
        return;
    }
    let mut over = Vec::new();
    for kind in KINDS {
        for (depth, limit) in [1, 32].into_iter().zip(instruction_limits(kind)) {
            let mut callgrind = Command::new("valgrind");
            callgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
            callgrind.arg("--toggle-collect=crosstie_budget_calls").arg(std::env::current_exe().unwrap());
            let output = child(&mut callgrind, NAME, &format!("{kind}: {depth}"));
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{kind}, depth {depth}: {}\n{text}", output.status);
            let collected = text.lines().find_map(|line| line.split_once("Collected : "));
            let count: u64 = collected.and_then(|(_, count)| count.trim().parse().ok()).expect(&text);
            let per_call = count.div_ceil(COUNTED);
            println!("{kind}, depth {depth}: {per_call} instructions per call, at most {limit}");
            assert!(per_call > 20, "callgrind counted {count}");
            if per_call > limit {
                over.push(format!("{kind}, depth {depth}: {per_call} instead of {limit}"));
            }
        }
    }
    assert!(over.is_empty(), "instructions per call: {over:?}");
}

/// Callgrind counts the instructions inside of this function, which it finds by name.
#[unsafe(no_mangle)]
#[inline(never)]
fn crosstie_budget_calls(work: &mut dyn FnMut()) {
    work();
}
