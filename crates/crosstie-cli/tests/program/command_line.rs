//! Exit statuses, JSON output and one-line errors of the benchmarks and of doctor.

use std::fmt::Display;
use std::process::{Command, Output};

use serde_json::Value;

use super::lock_cores;

fn crosstie(arguments: &[&str]) -> Output {
    let _lock = lock_cores();
    Command::new(env!("CARGO_BIN_EXE_crosstie")).args(arguments).output().expect("the program starts")
}

/// The JSON object of a command that succeeds.
fn json(arguments: &[&str]) -> Value {
    let output = crosstie(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}: {errors}", output.status);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
}

/// Checks that the result has these figures, and that all of them are positive.
fn assert_positive(found: &Value, names: &str, context: impl Display) {
    for name in names.split(' ') {
        assert!(found[name].as_f64().is_some_and(|figure| figure > 0.0), "{name} of {context}");
    }
}

#[test]
fn bench_device_measures_all_operations_in_threads_and_processes() {
    for op in ["write", "write-imm", "read", "send", "cas", "faa"] {
        for depth in ["1", "3", "64"] {
            for options in [&[][..], &["--processes"]] {
                let line =
                    ["bench", "device", "--json", "--duration", "0.02", "--op", op, "--queue-depth", depth];
                let found = json(&[&line, options].concat());
                let context = format!("{op} depth {depth} {options:?}: {found}");
                assert_eq!(found["bench"], "device", "{context}");
                assert_eq!(found["device"], "software", "{context}");
                assert_eq!(found["errors"], 0, "{context}");
                let ops = found["ops"].as_u64().expect(&context);
                let messages = found["counters"]["messages"].as_u64().expect(&context);
                let ping_pong = depth == "1" && ["write-imm", "send"].contains(&op);
                assert_eq!(messages, if ping_pong { 2 * ops } else { ops }, "{context}");
                assert_positive(
                    &found,
                    "ops seconds ops_per_s p50_ns p99_ns p999_ns limit_ns limit_ops_per_s ratio_to_limit",
                    &context,
                );
                for name in ["work_requests", "receives", "completions", "bytes", "batches"] {
                    assert!(found["counters"][name].is_u64(), "{name} of {context}");
                }
            }
        }
    }
}

#[test]
fn bench_device_reports_bytes_per_second_for_large_payloads() {
    for options in
        [&[][..], &["--processes"], &["--registered-in-place"], &["--processes", "--registered-in-place"]]
    {
        for op in ["write", "read", "send", "write-imm"] {
            let line = ["bench", "device", "--json", "--duration", "0.02", "--payload", "65536", "--op", op];
            let found = json(&[&line, options].concat());
            assert_positive(
                &found,
                "bytes_per_s limit_bytes_per_s",
                format_args!("{op} {options:?}: {found}"),
            );
        }
    }
    let small = json(&["bench", "device", "--json", "--duration", "0.02", "--payload", "0"]);
    assert_eq!(small["bytes_per_s"], Value::Null);
}

#[test]
fn bench_rails_counts_exactly() {
    let line = ["bench", "rails", "--json", "--size", "1048576", "--count", "50"];
    let counts = |found: &Value, rail: usize| {
        ["bytes", "work_requests", "completions", "receives"].map(|name| found["rails"][rail][name].as_u64())
    };
    let bytes = 50 << 20;
    for (split, expected) in [("1:1", [(bytes / 2, 50); 2]), ("100:0", [(bytes, 50), (0, 0)])] {
        let found = json(&[&line[..], &["--split", split]].concat());
        for (rail, (bytes, count)) in expected.into_iter().enumerate() {
            assert_eq!(counts(&found, rail), [Some(bytes), Some(count), Some(count), Some(count)], "{found}");
        }
        assert_eq!((&found["ops"], &found["counters"]["messages"]), (&50.into(), &50.into()), "{found}");
        assert_eq!((&found["errors"], &found["device"]), (&0.into(), &"software,software".into()), "{found}");
        assert_positive(&found, "seconds ops_per_s bytes_per_s p50_ns p99_ns p999_ns", &found);
    }
    // Without a count it runs for the duration; `auto` splits as it finds best.
    let found = json(&["bench", "rails", "--json", "--duration", "0.1", "--size", "0"]);
    assert_eq!((&found["errors"], &found["counters"]["bytes"]), (&0.into(), &0.into()), "{found}");
    assert_eq!(found["ops"], found["counters"]["messages"], "{found}");
}

#[test]
fn bench_rails_loses_nothing_when_a_rail_is_killed() {
    for rail in ["0", "1"] {
        let line = ["bench", "rails", "--json", "--size", "262144", "--count", "200", "--kill-rail", rail];
        let found = json(&[&line[..], &["--split", "1:1", "--at", "0.25"]].concat());
        let killed = rail.parse::<usize>().unwrap();
        assert_eq!((&found["errors"], &found["counters"]["messages"]), (&0.into(), &200.into()), "{found}");
        assert_eq!(found["rails"][killed]["failures"], 1, "{found}");
        assert_eq!(found["rails"][1 - killed]["failures"], 0, "{found}");
    }
}

/// The in-node benchmarks, and the options to run each with.
const NODE_BENCHES: [(&str, &[&str]); 5] = [
    ("ipc", &[]),
    ("ipc", &["--processes"]),
    ("delegation", &[]),
    ("delegation", &["--processes"]),
    ("flux", &[]),
];

fn bench_node(name: &str, options: &[&str], rest: &[&str]) -> Value {
    let line = ["bench", name, "--json", "--duration", "0.1"];
    let found = json(&[&line, options, rest].concat());
    let context = format!("{name} {options:?} {rest:?}: {found}");
    assert_eq!(found["bench"], name, "{context}");
    assert_eq!(found["device"], if name == "flux" { "threads" } else { "shared-memory" }, "{context}");
    assert_eq!(found["processes"], options.contains(&"--processes"), "{context}");
    assert_eq!(found["errors"], 0, "{context}");
    assert_positive(
        &found,
        "ops seconds ops_per_s p50_ns p99_ns p999_ns limit_ns limit_ops_per_s limit_in_place_ops_per_s limit_two_rings_ops_per_s",
        &context,
    );
    let ops = found["ops"].as_u64().expect(&context);
    let payload = found["payload"].as_u64().expect(&context);
    assert_eq!(found["counters"]["messages"], 2 * ops, "{context}");
    assert_eq!(found["counters"]["bytes"], 2 * ops * payload, "{context}");
    found
}

#[test]
fn bench_ipc_delegation_and_flux_measure_several_depths() {
    for (name, options) in NODE_BENCHES {
        for depth in ["1", "3", "64"] {
            let found = bench_node(name, options, &["--queue-depth", depth]);
            assert_eq!(found["queue_depth"].to_string(), depth, "{found}");
            assert_eq!((&found["payload"], &found["clients"]), (&32.into(), &1.into()), "{found}");
            assert!(found["ratio_to_limit"].as_f64().is_some_and(|ratio| ratio > 0.0), "{found}");
            assert_eq!(found["bytes_per_s"], Value::Null, "{found}");
        }
    }
}

#[test]
fn bench_ipc_delegation_and_flux_measure_several_payloads() {
    for (name, options) in NODE_BENCHES {
        let sizes = if name == "flux" { ["8", "64", "4096"] } else { ["8", "100", "65536"] };
        for size in sizes {
            let found = bench_node(name, options, &["--payload", size]);
            assert_eq!(found["payload"].to_string(), size, "{found}");
            for name in ["bytes_per_s", "limit_bytes_per_s"] {
                assert_eq!(
                    found[name].as_f64().is_some_and(|figure| figure > 0.0),
                    size.len() > 3,
                    "{found}"
                );
            }
        }
    }
}

#[test]
fn bench_ipc_delegation_and_flux_measure_several_clients_and_wait_strategies() {
    for (name, options) in NODE_BENCHES {
        for waiting in ["spin", "adaptive", "park"] {
            let rest = ["--clients", "3", "--queue-depth", "4", "--wait", waiting];
            let found = bench_node(name, options, &rest);
            assert_eq!((&found["clients"], &found["waiting"]), (&3.into(), &waiting.into()), "{found}");
            // The limits are measured with one client, so there is no ratio.
            assert_eq!(found["ratio_to_limit"], Value::Null, "{found}");
        }
    }
}

#[test]
fn bench_accepts_the_former_name_of_wait_and_does_not_show_it() {
    for (name, options) in NODE_BENCHES {
        let found = bench_node(name, options, &["--waiting", "park"]);
        assert_eq!(found["waiting"], "park", "{found}");
        let help = crosstie(&["bench", name, "--help"]);
        let help = String::from_utf8_lossy(&help.stdout);
        assert!(help.contains("--wait <") && !help.contains("--waiting"), "{help}");
    }
}

/// `bench copyrpc` on the software device.
fn copyrpc(options: &[&str], rest: &[&str]) -> Value {
    let line = ["bench", "copyrpc", "--json", "--duration", "0.1"];
    let found = json(&[&line, options, rest].concat());
    let context = format!("{options:?} {rest:?}: {found}");
    assert_eq!((&found["bench"], &found["device"]), (&"copyrpc".into(), &"software".into()), "{context}");
    assert_eq!(found["processes"], options.contains(&"--processes"), "{context}");
    assert_eq!(found["errors"], 0, "{context}");
    assert_positive(&found, "seconds ops_per_s p50_ns p99_ns p999_ns limit_ns messages_per_batch", &context);
    let counter =
        |name: &str| found["counters"][name].as_u64().unwrap_or_else(|| panic!("{name} of {context}"));
    let ops = found["ops"].as_u64().expect(&context);
    assert!(ops > 0, "{context}");
    assert_eq!((counter("calls"), counter("replies")), (ops, ops), "{context}");
    assert_eq!((counter("messages"), counter("batched")), (2 * ops, 2 * ops), "{context}");
    let posted = ["batches", "credit_batches", "wraps", "direct", "reads"].map(counter).iter().sum::<u64>();
    assert_eq!(counter("work_requests"), posted, "{context}");
    for name in ["completions", "bytes"] {
        assert!(counter(name) > 0, "{name} of {context}");
    }
    for name in ["unanswered", "violations", "failures"] {
        assert_eq!(counter(name), 0, "{name} of {context}");
    }
    // One WRITE in 64 is signaled, on each endpoint of both sides. What goes out between two slices, the request that ends one and its
    // response, is not counted: fewer than 16 WRITEs for each of the 4 slices.
    let endpoints = found["endpoints"].as_u64().expect(&context);
    let most = counter("reads") + (posted + 4 * 16) / 64 + 2 * endpoints;
    assert!(counter("signaled") <= most, "more than {most} signaled: {context}");
    found
}

#[test]
fn bench_copyrpc_measures_several_depths_and_endpoints() {
    for options in [&[][..], &["--processes"]] {
        for (depth, endpoints) in [("1", "1"), ("3", "1"), ("64", "1"), ("256", "1"), ("64", "8"), ("3", "5")]
        {
            let found = copyrpc(options, &["--queue-depth", depth, "--endpoints", endpoints]);
            assert_eq!(found["queue_depth"].to_string(), depth, "{found}");
            assert_eq!(found["endpoints"].to_string(), endpoints, "{found}");
            assert_positive(&found, "limit_ops_per_s ratio_to_limit", &found);
            assert_eq!(found["latency_to_limit"].is_f64(), depth == "1", "{found}");
            assert_eq!(found["bytes_per_s"], Value::Null, "{found}");
        }
    }
}

#[test]
fn bench_copyrpc_measures_several_payloads() {
    for options in [&[][..], &["--processes"]] {
        for size in ["8", "100", "4096", "65536", "1048576"] {
            let found = copyrpc(options, &["--payload", size, "--queue-depth", "4"]);
            assert_eq!(found["payload"].to_string(), size, "{found}");
            for name in ["bytes_per_s", "limit_bytes_per_s"] {
                assert_eq!(
                    found[name].as_f64().is_some_and(|figure| figure > 0.0),
                    size.len() > 3,
                    "{found}"
                );
            }
        }
        let found = copyrpc(options, &["--payload", "65536", "--response", "8"]);
        assert_eq!((&found["response"], &found["limit_ops_per_s"]), (&8.into(), &Value::Null), "{found}");
    }
}

#[test]
fn bench_copyrpc_compares_with_one_send_per_message() {
    for options in [&[][..], &["--processes"]] {
        for (payload, response, depth) in
            [("32", "32", "1"), ("32", "32", "64"), ("8", "300", "1000"), ("65536", "65536", "4")]
        {
            let rest = ["--payload", payload, "--response", response, "--queue-depth", depth];
            let found = copyrpc(options, &[&rest[..], &["--beside-sends"]].concat());
            let figure = |name: &str| found[name].as_f64().unwrap_or_else(|| panic!("{name} of {found}"));
            assert!(figure("sends_ops_per_s") > 0.0, "{found}");
            let gain = figure("ops_per_s") / figure("sends_ops_per_s");
            assert!((figure("batching_gain") - gain).abs() < 0.02, "{found}");
        }
    }
    let found = copyrpc(&[], &[]);
    assert_eq!((&found["sends_ops_per_s"], &found["batching_gain"]), (&Value::Null, &Value::Null), "{found}");
    let table = crosstie(&["bench", "copyrpc", "--duration", "0.05", "--beside-sends"]);
    let table = String::from_utf8_lossy(&table.stdout);
    assert!(table.contains("one SEND per message") && table.contains("batching gain"), "{table}");
}

/// Packet counts of groups are exact.
#[test]
fn bench_lock_and_barrier_report_exact_packet_counts() {
    for members in [2u64, 3] {
        let count = members.to_string();
        let found = json(&["bench", "barrier", "--json", "--duration", "0.1", "--members", &count]);
        let counters = &found["counters"];
        assert_eq!((&found["bench"], &found["errors"]), (&"barrier".into(), &0.into()), "{found}");
        let rounds = counters["rounds"].as_u64().unwrap();
        assert!(rounds > 0);
        assert_eq!(counters["messages"].as_u64().unwrap(), rounds * 2 * (members - 1), "{found}");

        for contention in ["0", "0.5", "1"] {
            let line = ["bench", "lock", "--json", "--duration", "0.1", "--members", &count];
            let found = json(&[&line[..], &["--contention", contention]].concat());
            let counter = |name: &str| found["counters"][name].as_u64().unwrap_or(0);
            assert_eq!((&found["bench"], &found["errors"]), (&"lock".into(), &0.into()), "{found}");
            assert_eq!(counter("acquisitions") % members, 0, "{found}");
            let packets = counter("lock_req") + counter("lock_forw") + counter("lock_reply");
            assert!(packets <= 3 * (counter("acquisitions") - counter("reacquired")), "{found}");
        }
    }
}

#[test]
fn bench_message_delivers_every_message_once() {
    for options in [
        &["--members", "2"][..],
        &["--members", "3", "--transport", "ud"],
        &["--members", "2", "--payload", "20000"],
        &["--members", "2", "--loss", "0.02"],
        &["--members", "2", "--loss", "0.02", "--transport", "ud"],
    ] {
        let found = json(&[&["bench", "message", "--json", "--duration", "0.1"], options].concat());
        let counter = |name: &str| found["counters"][name].as_u64().unwrap_or(0);
        assert_eq!((&found["bench"], &found["errors"]), (&"message".into(), &0.into()), "{found}");
        assert!(found["ops"].as_u64().unwrap() > 0 && counter("delivered") > 0, "{found}");
        if !options.contains(&"--payload") {
            assert_eq!(counter("sent"), counter("delivered"), "{found}");
        }
        if options.contains(&"--loss") {
            assert!(counter("dropped") > 0 && counter("resent") > 0, "{found}");
        }
    }
}

/// `bench endpoint` on the software device.
#[test]
fn bench_endpoint_measures_all_operations() {
    for op in ["write", "read", "write-imm", "send"] {
        for options in [
            &["--queue-depth", "1"][..],
            &["--queue-depth", "8", "--qps", "2"],
            &["--queue-depth", "1", "--processes"],
            &["--queue-depth", "8", "--processes", "--progress-thread"],
            &["--queue-depth", "2", "--payload", "65536", "--beside-device"],
            &["--queue-depth", "2", "--batch", "100"],
        ] {
            if op == "send" && options.contains(&"--batch") {
                continue;
            }
            let found =
                json(&[&["bench", "endpoint", "--json", "--duration", "0.02", "--op", op], options].concat());
            let context = format!("{op} {options:?}: {found}");
            assert_eq!((&found["bench"], &found["errors"]), (&"endpoint".into(), &0.into()), "{context}");
            let (ops, counters) = (found["ops"].as_u64().expect(&context), &found["counters"]);
            let batch = if options.contains(&"--batch") { 100 } else { 1 };
            let moved = counters["messages"].as_u64().expect(&context) * batch;
            // Round trips have two messages each.
            let ping_pong = options[1] == "1" && ["write-imm", "send"].contains(&op);
            assert_eq!(moved, if ping_pong { 2 * ops } else { ops }, "{context}");
            for name in ["work_requests", "completions", "bytes", "batches"] {
                assert!(counters[name].is_u64(), "{name} of {context}");
            }
            assert_eq!(
                (&counters["stale_completions"], &counters["empty_receive_queues"]),
                (&0.into(), &0.into()),
                "{context}"
            );
            assert_positive(
                &found,
                "ops_per_s p50_ns p99_ns p999_ns limit_ns limit_ops_per_s ratio_to_limit",
                &context,
            );
            if options.contains(&"--beside-device") {
                assert_positive(
                    &found,
                    "bytes_per_s limit_bytes_per_s device_p50_ns ratio_to_device latency_to_device",
                    &context,
                );
            }
        }
    }
}

#[test]
fn invalid_command_line_is_one_line_and_status_2() {
    let wrong: &[&[&str]] = &[
        &["bench", "barrier", "--fanout", "0"],
        &["bench", "barrier", "--fanout", "65"],
        &["bench", "rails", "--split", "1"],
        &["bench", "rails", "--split", "1:1:1"],
        &["bench", "lock", "--contention", "2"],
        &["bench", "barrier", "--members", "257"],
        &["bench", "barrier", "--members", "0"],
        &["bench", "message", "--members", "1"],
        &["bench", "message", "--loss", "0.95"],
        &["bench", "message", "--payload", "7"],
        &["bench", "message", "--mode", "fly"],
        &["bench", "endpoint", "--op", "fly"],
        &["bench", "endpoint", "--payload", "7"],
        &["bench", "endpoint", "--batch", "0"],
        &["bench", "endpoint", "--qps", "9"],
        &["bench", "endpoint", "--op", "send", "--batch", "2"],
        &["bench", "endpoint", "--payload", "1000000", "--queue-depth", "4096"],
        &["bench"],
        &["kv"],
        &["bench", "nothing"],
        &["bench", "device", "--op", "fly"],
        &["bench", "device", "--queue-depth", "0"],
        &["bench", "device", "--queue-depth", "1000000"],
        &["bench", "device", "--payload", "2000000000"],
        &["bench", "device", "--payload", "-1"],
        &["bench", "device", "--op", "cas", "--payload", "16"],
        &["bench", "device", "--duration", "0"],
        &["bench", "device", "--device", "hardware"],
        &["bench", "device", "--device", "software,software,software"],
        &["bench", "ipc", "--payload", "7"],
        &["bench", "ipc", "--payload", "1048577"],
        &["bench", "ipc", "--queue-depth", "0"],
        &["bench", "ipc", "--queue-depth", "1000", "--payload", "1000000"],
        &["bench", "ipc", "--clients", "0"],
        &["bench", "delegation", "--wait", "patiently"],
        &["bench", "delegation", "--wait", "park", "--waiting", "park"],
        &["bench", "delegation", "--clients", "1000000"],
        &["bench", "delegation", "--duration", "-1"],
        &["bench", "flux", "--processes"],
        &["bench", "flux", "--payload", "33"],
        &["bench", "copyrpc", "--payload", "7"],
        &["bench", "copyrpc", "--response", "7"],
        &["bench", "copyrpc", "--queue-depth", "0"],
        &["bench", "copyrpc", "--endpoints", "0"],
        &["bench", "copyrpc", "--queue-depth", "4096", "--payload", "1000000"],
        &["bench", "copyrpc", "--device", "software,software,software"],
        &["bench", "copyrpc", "--duration", "0"],
        &["doctor", "--loudly"],
    ];
    for &arguments in wrong {
        let output = crosstie(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{arguments:?}: {errors}");
        // The line must not contain the whole help text.
        assert!(errors.len() < 250, "{arguments:?}: {errors}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

/// What a wrong command line prints to standard error.
fn usage_error(arguments: &[&str]) -> String {
    let output = crosstie(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn usage_errors_name_the_option_and_no_internal_command() {
    for option in ["--payload", "--queue-depth", "--clients", "--duration"] {
        let error = usage_error(&["bench", "ipc", option, "-1"]);
        assert!(error.contains(option), "{error}");
    }
    let error = usage_error(&["bench"]);
    assert!(error.contains("endpoint, kv, help]"), "{error}");
    let error = usage_error(&["bench", "ipx"]);
    assert!(
        error.contains("unrecognized subcommand 'ipx'; a similar subcommand exists: 'ipc' (try"),
        "{error}"
    );
}

/// Runs the program with limits of the shell's `ulimit`, such as `-n 8`. The exit code is 124 if it hangs.
fn crosstie_with_ulimit(limit: &str, arguments: &[&str]) -> Output {
    let _lock = lock_cores();
    let script = format!("ulimit {limit}; exec timeout 60 \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_crosstie")]).args(arguments);
    command.output().expect("sh runs")
}

#[test]
fn error_for_too_few_descriptors_says_how_to_get_more() {
    let output = crosstie_with_ulimit("-n 8", &["bench", "ipc", "--duration", "0.1"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains("ulimit -n"), "{errors}");
}

#[test]
fn failed_hand_over_of_descriptors_says_how_to_get_more() {
    for descriptors in 6..=24 {
        let output = crosstie_with_ulimit(
            &format!("-n {descriptors}"),
            &["bench", "device", "--processes", "--duration", "0.02"],
        );
        let errors = String::from_utf8_lossy(&output.stderr);
        // Or that the other side, which has the same limit, does not answer.
        assert!(!errors.contains("invalid data"), "{descriptors}: {errors}");
        assert!(!errors.contains("hand over") || errors.contains("ulimit -n"), "{descriptors}: {errors}");
    }
}

#[test]
fn devices_leave_address_space_to_their_peers() {
    for gibibytes in [3, 8, 100] {
        for options in [&[][..], &["--processes"]] {
            let arguments = [&["bench", "copyrpc", "--duration", "0.1"], options].concat();
            let output = crosstie_with_ulimit(&format!("-v {}", gibibytes << 20), &arguments);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{gibibytes} GiB {options:?}: {errors}");
        }
    }
}

#[test]
fn thread_that_cannot_start_is_an_error_and_not_a_hang() {
    // Somewhere between these limits the first thread starts and the second does not.
    for kibibytes in (60_000..=140_000).step_by(10_000) {
        let output =
            crosstie_with_ulimit(&format!("-v {kibibytes}"), &["bench", "copyrpc", "--duration", "0.1"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        // Not a panic. Without any memory left the program aborts, which has no exit code.
        assert!(![Some(101), Some(124)].contains(&output.status.code()), "{errors}");
        assert!(output.status.code() != Some(1) || errors.lines().count() == 1, "{errors}");
    }
}

#[test]
fn ranks_with_different_options_fail() {
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("address").port();
    let start = |rank: &str, depth: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_crosstie"));
        command.args(["bench", "copyrpc", "--duration", "0.1", "--queue-depth", depth]);
        command.env("CROSSTIE_RENDEZVOUS", format!("127.0.0.1:{port}")).env("CROSSTIE_RANK", rank);
        command.env("CROSSTIE_SIZE", "2").env("CROSSTIE_SECRET", "a secret of this test");
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command.spawn().expect("the program starts")
    };
    for rank in [start("0", "1"), start("1", "2")] {
        let output = rank.wait_with_output().expect("it ends");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains("give all ranks the same options"), "{errors}");
    }
}

#[test]
fn missing_device_is_one_line_and_status_1() {
    for name in ["device", "copyrpc", "endpoint"] {
        for options in [&[][..], &["--processes"]] {
            let output = crosstie(&[&["bench", name, "--device", "verbs:no_such_device"], options].concat());
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{errors}");
            assert_eq!(errors.lines().count(), 1, "{errors}");
        }
    }
}

#[test]
fn doctor_finds_the_software_device() {
    let found = json(&["doctor", "--json"]);
    assert_eq!(found["usable"], true);
    let findings = found["findings"].as_array().expect("a list");
    assert!(findings.iter().any(|finding| finding["name"] == "software device" && finding["state"] == "ok"));
    for finding in findings {
        assert!(finding["state"] != "missing" || finding["needed_for"].is_string(), "{finding}");
    }
    let table = crosstie(&["doctor"]);
    assert!(table.status.success() && table.stdout.starts_with(b"software device"));
}

#[test]
fn without_arguments_it_prints_help() {
    let output = crosstie(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    for command in ["demo", "doctor", "bench", "kv", "report", "sim"] {
        assert!(text.contains(&format!("\n  {command} ")), "{command}: {text}");
    }
}

#[test]
fn demo_shows_every_part_and_writes_its_report() {
    let name = std::env::temp_dir().join(format!("crosstie-demo-{}", std::process::id()));
    let output = crosstie(&["demo", "--duration", "0.6", "-o", name.to_str().expect("a path")]);
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{errors}");
    for words in [
        "ipc ",
        "copyrpc ",
        "endpoint ",
        "rails ",
        "group ",
        "backend meta",
        "backend delegation",
        " arrived once",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let [page, data] = ["html", "json"].map(|ending| {
        let file = name.with_extension(ending);
        let text = std::fs::read_to_string(&file).expect("the file was written");
        std::fs::remove_file(file).expect("it is removed");
        text
    });
    assert!(
        page.contains("<title>Crosstie: demo</title>") && page.contains("crosstie bench rails"),
        "{page}"
    );
    let figures: Value = serde_json::from_str(&data).expect("JSON");
    assert_eq!(figures.as_array().map(Vec::len), Some(9), "{data}");
}
