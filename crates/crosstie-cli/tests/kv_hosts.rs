//! `crosstie bench kv` on two hosts that connect through a rendezvous.
//!
//! In a virtual machine of `cargo xtask vm --hosts 2`, this process starts one rank, on Soft-RoCE; the same test in the other virtual
//! machine starts the other rank. Elsewhere it starts both ranks, on the software device.

use std::path::Path;
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use crosstie_bench::figures::{self, Figures};
use crosstie_kv::Backend;
use crosstie_testkit::hosts::{Hosts, wait_for_exit};

/// The first port of the rendezvous of these tests.
const PORT: u16 = 7700;

fn start(hosts: &Hosts, arguments: &[&str]) -> Vec<(u32, Child)> {
    let common = ["bench", "kv", "--json", "--device", hosts.device];
    let arguments = [&common, arguments].concat();
    hosts.start(Path::new(env!("CARGO_BIN_EXE_crosstie")), |_| &arguments)
}

/// The results of rank 0, if this process started it. Checks that all ranks succeeded.
fn measured(test: u16, arguments: &[&str]) -> Vec<Figures> {
    let hosts = Hosts::find(PORT + test);
    let mut found = Vec::new();
    for (rank, Output { status, stdout, stderr }) in wait_for_exit(start(&hosts, arguments)) {
        let stderr = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "rank {rank}, {arguments:?}: {status}: {stderr}");
        match rank {
            0 => found = figures::parse(&stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}")),
            _ => assert!(stdout.is_empty(), "only rank 0 prints results"),
        }
    }
    for figures in &found {
        assert_eq!((figures.nodes, figures.launcher.as_str()), (2, "tcp"));
        assert_eq!((figures.device.as_str(), figures.per_rank.len()), (hosts.device, 2));
        assert_eq!((figures.errors, figures.node_gone, figures.interrupted), (0, 0, false));
        assert!(figures.per_rank.iter().all(|rank| rank.ops_per_s > 0.0), "{figures:?}");
        assert!(figures.counters["calls"] > 0, "no request went to the other host");
        let (seconds, p50) = (figures.seconds, Duration::from_nanos(figures.p50_ns));
        println!("{}: {} operations in {seconds:.2} s, p50 {p50:?}", figures.backend.name(), figures.ops);
    }
    if hosts.ranks.contains(&0) {
        let backends: Vec<Backend> = found.iter().map(|figures| figures.backend).collect();
        assert_eq!(backends, [Backend::Meta, Backend::Delegation]);
    }
    found
}

/// One test for all cases, because there are few cores.
#[test]
fn store_on_two_hosts_is_measured_and_checked() {
    let begun = Instant::now();
    for figures in measure_with_check(1) {
        assert!(figures.counters["checked_operations"] >= figures.ops, "not all operations were checked");
        println!("clocks within {} ns", figures.counters["clocks_within_ns"]);
    }
    // This included both backends and the runs, so one backend is ready after this time.
    let setup_time = begun.elapsed();
    // Each value begins with its key, is longer than any ring, and is on the other host.
    let both = ["--backend", "meta,delegation", "--value-size", "1048576", "--queue-depth", "1"];
    measured(
        2,
        &[&both[..], &["--keys", "8", "--local-share", "0", "--duration", "0.4", "--runs", "1"]].concat(),
    );
    rank_exits_when_the_other_is_killed(3, setup_time);
}

fn measure_with_check(test: u16) -> Vec<Figures> {
    let both = ["--backend", "meta,delegation", "--check", "--daemons", "2", "--keys", "1000"];
    measured(test, &[&both[..], &["--duration", "0.6", "--runs", "2"]].concat())
}

/// After `setup_time` the benchmark is measuring; it would do so for much longer.
fn rank_exits_when_the_other_is_killed(test: u16, setup_time: Duration) {
    let hosts = Hosts::find(PORT + test);
    let mut children = start(&hosts, &["--keys", "1000", "--duration", "1000", "--runs", "1"]);
    if let Some((_, last)) = children.iter_mut().find(|(rank, _)| *rank == 1) {
        std::thread::sleep(setup_time);
        last.kill().expect("the process exists");
    }
    for (rank, Output { status, stdout, stderr }) in wait_for_exit(children) {
        let stderr = String::from_utf8_lossy(&stderr);
        if rank == 1 {
            assert_eq!(status.code(), None, "rank 1 was not killed: {stderr}");
            continue;
        }
        assert_eq!(status.code(), Some(1), "{stderr}");
        let found = figures::parse(&stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
        let [figures] = found.as_slice() else { panic!("{found:?}") };
        assert!(figures.interrupted && figures.node_gone > 0 && figures.ops > figures.node_gone, "{stderr}");
        println!(
            "{} of {} operations failed because the node was gone: {stderr}",
            figures.node_gone, figures.ops
        );
    }
}
