//! `crosstie bench kv`: exit statuses, JSON and error texts.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crosstie_bench::figures::{self, Figures, LoopKind};
use crosstie_testkit::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};

use super::lock_cores;

/// After this long without an exit a test fails: the program hangs.
const TIMEOUT: Duration = Duration::from_secs(90);
/// Short enough for a test, long enough for every client to do something.
const QUICK: [&str; 4] = ["--duration", "0.2", "--runs", "2"];

fn start(arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_crosstie"))
        .args(["bench", "kv", "--json"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// Waits until the program exits, at most for the timeout.
fn wait_for_exit(child: Child) -> Output {
    let pid = Pid::from_child(&child);
    let (done, is_done) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || done.send(child.wait_with_output()).ok());
    let output = is_done.recv_timeout(TIMEOUT).unwrap_or_else(|_| {
        kill_process(pid, Signal::KILL).expect("the process exists");
        panic!("the program hangs");
    });
    waiter.join().expect("the waiting thread does not panic");
    output.expect("the output can be read")
}

fn run(arguments: &[&str]) -> Output {
    let _lock = lock_cores();
    wait_for_exit(start(arguments))
}

/// Starts a benchmark of minutes and calls `disturb` while it measures. It prints figures only if it has measured something, so the call
/// comes later and later until there are some.
fn disturb(arguments: &[&str], disturb: impl Fn(Pid)) -> (Output, Duration) {
    let longer = [arguments, &["--keys", "2000", "--duration", "60", "--runs", "60"]].concat();
    for seconds in [1, 2, 4, 8] {
        let child = start(&longer);
        std::thread::sleep(Duration::from_secs(seconds));
        let begun = Instant::now();
        disturb(Pid::from_child(&child));
        let output = wait_for_exit(child);
        if figures::parse(&output.stdout).is_ok_and(|figures| figures[0].ops > 0) {
            return (output, begun.elapsed());
        }
    }
    panic!("{arguments:?}: nothing was measured in eight seconds");
}

/// The figures of a command that succeeds.
fn measured(arguments: &[&str]) -> Vec<Figures> {
    let output = run(&[arguments, &QUICK].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}: {errors}", output.status);
    let results = figures::parse(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
    for figures in &results {
        assert_eq!((figures.errors, figures.node_gone, figures.interrupted), (0, 0, false), "{arguments:?}");
        assert!(
            figures.ops > 0 && figures.ops_per_s > 0.0 && figures.p50_ns > 0,
            "{arguments:?}: {figures:?}"
        );
        assert_eq!(figures.runs.len(), 2, "{arguments:?}");
        assert_eq!(figures.ops, figures.runs.iter().map(|run| run.ops).sum::<u64>(), "{arguments:?}");
        assert_eq!(figures.per_rank.len(), figures.nodes as usize, "{arguments:?}");
        for rank in &figures.per_rank {
            let memory = 1..rank.memory_bound_bytes.expect("the limit is known");
            assert!(rank.ops_per_s > 0.0 && memory.contains(&rank.memory_bytes), "{arguments:?}: {rank:?}");
        }
    }
    results
}

/// The figures of a command with one result.
fn one(arguments: &[&str]) -> Figures {
    let mut results = measured(arguments);
    assert_eq!(results.len(), 1, "{arguments:?}");
    results.remove(0)
}

#[test]
fn both_backends_run_on_one_node_and_on_two() {
    for nodes in ["1", "2"] {
        for backend in ["meta", "delegation"] {
            let options = ["--backend", backend, "--nodes", nodes, "--daemons", "2", "--clients", "2"];
            let found =
                one(&[&options[..], &["--queue-depth", "3", "--zipf", "0.9", "--keys", "5000"]].concat());
            let context = format!("{options:?}: {found:?}");
            assert_eq!(found.backend.name().to_lowercase(), backend, "{context}");
            assert_eq!(
                (found.nodes.to_string(), found.daemons, found.clients),
                (nodes.into(), 2, 2),
                "{context}"
            );
            assert_eq!((found.queue_depth, found.keys, found.zipf), (3, 5000, 0.9), "{context}");
            assert_eq!(
                (found.loop_kind, found.rate, found.launcher.as_str()),
                (LoopKind::Closed, None, "local")
            );
            // All keys exist, except for the stop key, which ranks read to see whether another rank was interrupted.
            let stop_checks = found.counters["gets"] - found.counters["hits"];
            assert!(stop_checks < 50, "{context}");
            assert_eq!(found.counters["gets"] + found.counters["puts"] - stop_checks, found.ops, "{context}");
            let remote = found.counters["calls"];
            assert_eq!(remote > 0, nodes == "2", "{context}");
            assert_eq!(found.batches.is_empty(), nodes == "1", "{context}");
            let batches: u64 = found.batches.iter().map(|[_, count]| count).sum();
            assert_eq!(batches, found.counters["batches"], "{context}");
            let by_ring = backend == "delegation" && nodes == "2";
            assert_eq!(found.counters["ring_requests"] > 0, by_ring, "{context}");
        }
    }
}

#[test]
fn result_of_two_backends_is_an_array() {
    let found = measured(&["--backend", "meta,delegation", "--nodes", "2"]);
    let names: Vec<&str> = found.iter().map(|figures| figures.backend.name()).collect();
    assert_eq!(names, ["Meta", "Delegation"]);
}

#[test]
fn clients_may_be_processes() {
    let found = one(&["--nodes", "2", "--clients", "2", "--processes"]);
    assert!(found.processes);
}

#[test]
fn open_loop_keeps_its_rate() {
    for clients in [&[][..], &["--processes"]] {
        let found = one(&[&["--nodes", "2", "--clients", "2", "--open", "4000"][..], clients].concat());
        assert_eq!((found.loop_kind, found.rate), (LoopKind::Open, Some(4000.0)));
        // Starts are random: the standard deviation of 800 starts is 28. On a busy machine some operations do not start.
        let due = (found.ops + found.counters["not_started"]) as f64;
        assert!((0.7..1.3).contains(&(due / (4000.0 * found.seconds))), "{found:?}");
        assert_eq!(found.counters["timed"], found.ops, "{found:?}");
    }
}

#[test]
fn open_loop_reports_operations_that_did_not_start() {
    let strings = ["--value-size", "100", "--queue-depth", "1"];
    for values in [&["--queue-depth", "1"][..], &strings] {
        let found = one(&[&["--open", "1e8"][..], values].concat());
        let due = (found.ops + found.counters["not_started"]) as f64;
        assert!((0.7..1.3).contains(&(due / (1e8 * found.seconds))), "{found:?}");
    }
}

#[test]
fn long_values_and_local_keys_are_measured() {
    for (size, more) in [
        ("100", &["--queue-depth", "1"][..]),
        ("5000", &["--queue-depth", "16"]),
        ("100", &["--open", "2000", "--clients", "2"]),
        ("100", &["--processes", "--clients", "2"]),
    ] {
        let found = one(&[&["--nodes", "2", "--value-size", size], more].concat());
        assert_eq!((found.value_bytes.to_string(), found.counters["calls"] > 0), (size.to_owned(), true));
        let all = more.contains(&"1") || more.contains(&"--open");
        assert_eq!(found.counters["timed"] == found.ops, all, "{found:?}");
    }
    let found = one(&["--nodes", "2", "--local-share", "1"]);
    assert_eq!(found.counters["calls"], 0, "{found:?}");
}

#[test]
fn check_covers_all_operations() {
    for (backend, clients) in [("meta", &[][..]), ("delegation", &["--processes"])] {
        let options = ["--backend", backend, "--nodes", "2", "--clients", "3", "--check", "--keys", "20"];
        let found = one(&[clients, &options].concat()[..]);
        let checked = found.counters["checked_operations"];
        assert!(checked >= found.ops, "{checked} of {}", found.ops);
    }
}

#[test]
fn clients_share_threads_if_there_are_too_few_cores() {
    let list = fs::read_to_string("/proc/self/status").expect("the status is readable");
    let list = list.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("cores").trim();
    let mut cores = list.split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<u32>().expect("a core")..=last.parse().expect("a core")
    });
    let first = cores.next().expect("a core");
    let pair = format!("{first},{}", cores.next().unwrap_or(first));
    let options = ["--clients", "4", "--cores", &pair, "--queue-depth", "1"];
    for more in [&[][..], &["--check", "--keys", "50"], &["--open", "4000"], &["--value-size", "100"]] {
        let found = one(&[&options, more].concat());
        assert_eq!((found.clients, found.client_threads), (4, Some(1)), "{found:?}");
        assert!(found.cores.ends_with("(one thread for 4)"), "{found:?}");
        if more.contains(&"--check") {
            assert!(found.counters["checked_operations"] >= found.ops, "{found:?}");
        } else {
            assert_eq!(found.counters["timed"], found.ops, "{found:?}");
        }
    }
    let found = one(&["--clients", "2", "--processes"]);
    assert_eq!(found.client_threads, Some(2), "{found:?}");
}

#[test]
fn interrupt_prints_what_was_measured() {
    for clients in [&[][..], &["--processes"]] {
        let _lock = lock_cores();
        // Rank 0 tells the other rank. The signal comes twice, as if it were sent to the process and to its group.
        let (output, took) = disturb(&[&["--nodes", "2"], clients].concat(), |process| {
            for _ in 0..2 {
                kill_process(process, Signal::INT).expect("the process exists");
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {errors}", output.status);
        assert!(took < Duration::from_secs(30));
        let found = figures::parse(&output.stdout).expect("figures").remove(0);
        assert!(found.interrupted && found.ops > 0 && found.per_rank.len() == 2, "{found:?}");
        assert_eq!(found.errors, 0);
    }
}

#[test]
fn interrupt_ends_the_filling_of_the_store() {
    for values in [&[][..], &["--value-size", "100", "--queue-depth", "1"]] {
        let _lock = lock_cores();
        // Filling the store would take hours.
        let child = start(&[&["--nodes", "2", "--keys", "4000000000"], values].concat());
        std::thread::sleep(Duration::from_secs(2));
        for pid in children(Pid::from_child(&child)).into_iter().chain([Pid::from_child(&child)]) {
            kill_process(pid, Signal::INT).expect("the process exists");
        }
        let output = wait_for_exit(child);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert_eq!(errors, "crosstie: interrupted before anything was measured\n");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn other_ranks_exit_when_a_rank_is_killed() {
    for backend in ["meta", "delegation"] {
        let _lock = lock_cores();
        let (output, _) = disturb(&["--nodes", "2", "--backend", backend], |process| {
            eventually("the other rank is there", || children(process).len() == 1);
            kill_process(children(process)[0], Signal::KILL).expect("the process exists");
        });
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        let found = figures::parse(&output.stdout).expect("figures").remove(0);
        assert!(found.interrupted && found.ops > 0 && found.node_gone > 0, "{found:?}");
        assert_eq!(found.per_rank.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0]);
    }
}

#[test]
fn benchmark_exits_when_a_client_is_killed_or_stopped() {
    let _lock = lock_cores();
    for (signal, error_text) in
        [(Signal::KILL, "its process has ended"), (Signal::STOP, "the clients of this rank sent nothing")]
    {
        let (output, _) = disturb(&["--processes", "--clients", "2"], |process| {
            eventually("both clients are there", || children(process).len() == 2);
            kill_process(children(process)[1], signal).expect("the process exists");
            if signal == Signal::STOP {
                kill_process(process, Signal::INT).expect("the process exists");
            }
        });
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(error_text), "{errors}");
        let found = figures::parse(&output.stdout).expect("figures").remove(0);
        // The latencies are those of the other client.
        assert!(found.interrupted && found.p50_ns > 0, "{found:?}");
    }
}

#[test]
fn plan_measures_all_combinations() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (plan, name) = (folder.join("sweep.toml"), folder.join("swept"));
    fs::write(&plan, "backend = [\"meta\", \"delegation\"]\nnodes = [1, 2]\nqueue-depth = [1, 2]\n")
        .expect("the plan is written");
    let path = |path: &PathBuf| path.to_str().expect("the path is UTF-8").to_owned();
    let found = measured(&["--plan", &path(&plan), "--output", &path(&name)]);
    let shape = |figures: &Figures| (figures.nodes, figures.queue_depth, figures.backend.name());
    let shapes: Vec<_> = found.iter().map(shape).collect();
    let each = |nodes, depth| [(nodes, depth, "Meta"), (nodes, depth, "Delegation")];
    assert_eq!(shapes, [each(1, 1), each(1, 2), each(2, 1), each(2, 2)].concat());
    assert_eq!(figures::read(&name.with_extension("json")).expect("the results were saved"), found);
    assert!(fs::read_to_string(name.with_extension("html")).expect("a report").contains("<svg"));
    // A name may have a dot in it.
    fs::write(&plan, "").expect("the plan is written");
    let dotted = folder.join("swept.2026");
    measured(&["--plan", &path(&plan), "--output", &path(&dotted)]);
    assert!(folder.join("swept.2026.html").exists());
    let written = figures::read(&folder.join("swept.2026.json")).expect("the results were saved");
    assert_eq!(written.len(), 1);
    assert_eq!(figures::read(&name.with_extension("json")).expect("the results are still there"), found);
    assert!(fs::read(&dotted).is_err());
    for (text, error_text) in [
        ("nods = 1", "nods"),
        ("nodes = []", "0 combinations"),
        ("nodes = \"two\"", "nodes"),
        ("zipf = -1.0", "Zipf"),
        ("nodes = ", "nodes"),
        ("nodes = -1", "neither a value of this option"),
        ("backend = [\"meta\", \"both\"]", "neither a value of this option"),
    ] {
        fs::write(&plan, text).expect("the plan is written");
        assert_refused(&["--plan", &path(&plan)], error_text);
    }
    assert_refused(&["--plan", "/dev/zero"], "not a plan");
}

#[test]
fn unwritable_output_fails_before_measuring() {
    let begun = Instant::now();
    let output = run(&["--duration", "60", "--output", "/nowhere/at/all"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("/nowhere/at/all.json") && begun.elapsed() < Duration::from_secs(30), "{errors}");
    assert!(output.stdout.is_empty());
}

#[test]
fn missing_device_is_an_error_even_with_one_node() {
    let output = run(&["--device", "verbs:nowhere", "--nodes", "1"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("verbs:nowhere") && errors.lines().count() == 1, "{errors}");
}

#[test]
fn ranks_with_different_options_fail() {
    let _lock = lock_cores();
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let address = free.expect("a port").to_string();
    let rank = |rank: &str, keys: &str| {
        Command::new(env!("CARGO_BIN_EXE_crosstie"))
            .args(["bench", "kv", "--json", "--keys", keys])
            .args(QUICK)
            .envs([("CROSSTIE_SIZE", "2"), ("CROSSTIE_RANK", rank), ("CROSSTIE_RENDEZVOUS", &address)])
            .env("CROSSTIE_SECRET", "a secret of this test alone")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    };
    for child in [rank("0", "1000"), rank("1", "2000")] {
        let output = wait_for_exit(child);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains("give all ranks the same options"), "{errors}");
    }
}

#[test]
fn invalid_options_are_refused_in_one_line() {
    for (arguments, error_text) in [
        (&["--nodes", "0"][..], "nodes"),
        (&["--nodes", "1000"], "nodes"),
        (&["--daemons", "65"], "daemons"),
        (&["--clients", "0"], "clients"),
        (&["--queue-depth", "0"], "queue depth"),
        (&["--read-ratio", "1.5"], "read ratio"),
        (&["--keys", "0"], "keys"),
        (&["--zipf", "x"], "zipf"),
        (&["--zipf=-1"], "Zipf"),
        (&["--zipf", "-1"], "Zipf"),
        (&["--check", "--clients", "1000", "--nodes", "2", "--runs", "1000"], "recorded"),
        (&["--runs", "0"], "runs"),
        (&["--duration", "0"], "duration"),
        (&["--duration=-1"], "--duration"),
        (&["--open", "0"], "rate"),
        (&["--value-size", "100", "--queue-depth", "17"], "16 operations"),
        (&["--value-size", "100", "--queue-depth", "1", "--check"], "not checked"),
        (&["--backend", "both"], "both"),
        (&["--device", "hardware"], "hardware"),
        (&["--cores", "0"], "cores"),
        (&["--cores", "x"], "auto"),
    ] {
        assert_refused(arguments, error_text);
    }
}

fn assert_refused(arguments: &[&str], error_text: &str) {
    let output = run(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
    assert_eq!(errors.lines().count(), 1, "{arguments:?}: {errors}");
    assert!(errors.contains(error_text), "{arguments:?}: {errors}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

/// The processes that `parent` has started.
fn children(parent: Pid) -> Vec<Pid> {
    let is_child = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let ppid = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        ppid == Some(parent.as_raw_nonzero().get())
    };
    let entries = fs::read_dir("/proc").expect("/proc is there").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_child).filter_map(Pid::from_raw).collect()
}
