//! `crosstie bench kv` on two hosts, which meet at a rendezvous.
//!
//! In a guest of `cargo xtask vm --hosts 2` this process starts one of the ranks, on Soft-RoCE, and the same program in the
//! other guest the other one. Anywhere else it starts both, on the software device.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crosstie_bench::figures::{self, Figures};
use crosstie_kv::Backend;

/// After this long something hangs. Guests are slow.
const PATIENCE: Duration = Duration::from_secs(120);
const PROGRAM: &str = env!("CARGO_BIN_EXE_crosstie");

/// The ranks that are started here, and what they meet at and talk through.
struct Hosts {
    ranks: Vec<u32>,
    rendezvous: String,
    device: &'static str,
}

impl Hosts {
    /// `turn`: no two commands meet at the same place.
    fn find(turn: u16) -> Hosts {
        let variable = |name| std::env::var(name).ok();
        match (variable("HOST").as_deref(), variable("PEER")) {
            (Some(host @ ("0" | "1")), Some(_)) => Hosts {
                ranks: vec![u32::from(host == "1")],
                rendezvous: format!("10.77.0.1:{}", 7700 + turn),
                device: "verbs:r0",
            },
            _ => {
                let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
                let rendezvous = free.expect("there is a free port").to_string();
                Hosts { ranks: vec![0, 1], rendezvous, device: "software" }
            }
        }
    }

    fn start(&self, arguments: &[&str]) -> Vec<(u32, Child)> {
        let start = |rank: &u32| {
            let child = Command::new(PROGRAM)
                .args(["bench", "kv", "--json", "--device", self.device])
                .args(arguments)
                .env("CROSSTIE_RANK", rank.to_string())
                .env("CROSSTIE_SIZE", "2")
                .env("CROSSTIE_RENDEZVOUS", &self.rendezvous)
                .env("CROSSTIE_SECRET", "a secret of these two hosts")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            (*rank, child.expect("the program starts"))
        };
        self.ranks.iter().map(start).collect()
    }
}

/// Waits for them, but not for ever.
fn end(children: Vec<(u32, Child)>) -> Vec<(u32, Output)> {
    let (done, is_done) = channel();
    let count = children.len();
    for (rank, child) in children {
        let done = done.clone();
        std::thread::spawn(move || done.send((rank, child.wait_with_output())));
    }
    let outputs = (0..count).map(|_| {
        let (rank, output) = is_done.recv_timeout(PATIENCE).expect("it hangs");
        (rank, output.expect("its output is read"))
    });
    outputs.collect()
}

/// What rank 0 found, if it is here. All have succeeded.
fn measured(turn: u16, arguments: &[&str]) -> Vec<Figures> {
    let hosts = Hosts::find(turn);
    let mut found = Vec::new();
    for (rank, Output { status, stdout, stderr }) in end(hosts.start(arguments)) {
        let stderr = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "rank {rank}, {arguments:?}: {status}: {stderr}");
        match rank {
            0 => found = figures::parse(&stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}")),
            _ => assert!(stdout.is_empty(), "rank 0 alone has results"),
        }
    }
    for figures in &found {
        assert_eq!((figures.nodes, figures.launcher.as_str()), (2, "tcp"));
        assert_eq!((figures.device.as_str(), figures.per_rank.len()), (hosts.device, 2));
        assert_eq!((figures.errors, figures.node_gone, figures.interrupted), (0, 0, false));
        assert!(figures.per_rank.iter().all(|rank| rank.ops_per_s > 0.0), "{figures:?}");
        assert!(figures.counters["calls"] > 0, "requests went to the other host");
        let (seconds, p50) = (figures.seconds, Duration::from_nanos(figures.p50_ns));
        println!("{}: {} operations in {seconds:.2} s, p50 {p50:?}", figures.backend.name(), figures.ops);
    }
    if hosts.ranks.contains(&0) {
        let backends: Vec<Backend> = found.iter().map(|figures| figures.backend).collect();
        assert_eq!(backends, [Backend::Meta, Backend::Delegation]);
    }
    found
}

/// One after the other: there are few cores.
#[test]
fn a_store_of_two_hosts() {
    let begun = Instant::now();
    for figures in both_backends_are_checked(1) {
        assert!(figures.counters["checked_operations"] >= figures.ops, "all, and those of the warm-up");
        println!("clocks within {} ns", figures.counters["clocks_within_ns"]);
    }
    // With both backends, and measuring: one of them is ready after that.
    let setting_up = begun.elapsed();
    // Each value begins with its key, is longer than any ring, and comes from the other host.
    let both = ["--backend", "meta,delegation", "--value-size", "1048576", "--queue-depth", "1"];
    measured(
        2,
        &[&both[..], &["--keys", "8", "--local-share", "0", "--duration", "0.4", "--runs", "1"]].concat(),
    );
    a_killed_rank_is_gone_for_the_other(3, setting_up);
}

fn both_backends_are_checked(turn: u16) -> Vec<Figures> {
    let both = ["--backend", "meta,delegation", "--check", "--daemons", "2", "--keys", "1000"];
    measured(turn, &[&both[..], &["--duration", "0.6", "--runs", "2"]].concat())
}

/// `setting_up`: it measures after that, and for much longer.
fn a_killed_rank_is_gone_for_the_other(turn: u16, setting_up: Duration) {
    let hosts = Hosts::find(turn);
    let mut children = hosts.start(&["--keys", "1000", "--duration", "1000", "--runs", "1"]);
    if let Some((_, last)) = children.iter_mut().find(|(rank, _)| *rank == 1) {
        std::thread::sleep(setting_up);
        last.kill().expect("it is there");
    }
    for (rank, Output { status, stdout, stderr }) in end(children) {
        let stderr = String::from_utf8_lossy(&stderr);
        if rank == 1 {
            assert_eq!(status.code(), None, "it was killed: {stderr}");
            continue;
        }
        assert_eq!(status.code(), Some(1), "{stderr}");
        let found = figures::parse(&stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
        let [figures] = found.as_slice() else { panic!("{found:?}") };
        assert!(figures.interrupted && figures.node_gone > 0 && figures.ops > figures.node_gone, "{stderr}");
        println!("{} of {} operations found no node: {stderr}", figures.node_gone, figures.ops);
    }
}
