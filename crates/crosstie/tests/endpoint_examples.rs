//! The examples of endpoints, in two processes: `endpoint_fetch`, `endpoint_file_copy` and `endpoint_kv_cache`.
//!
//! In a virtual machine of `cargo xtask vm --hosts 2`, this process starts one rank, on Soft-RoCE; the same test in the other virtual
//! machine starts the other rank. Elsewhere it starts both ranks, on the software device. `cargo test` builds the examples.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// After this long without an exit the test fails: the example hangs. Virtual machines are slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The ranks that this process starts, the address of their rendezvous, and their device.
struct Hosts {
    ranks: Vec<u32>,
    rendezvous: String,
    device: &'static str,
}

impl Hosts {
    /// `test`: the number of the test, so that each test has its own rendezvous.
    fn find(test: u16) -> Hosts {
        let variable = |name| std::env::var(name).ok();
        match (variable("HOST").as_deref(), variable("PEER")) {
            (Some(host @ ("0" | "1")), Some(_)) => Hosts {
                ranks: vec![u32::from(host == "1")],
                rendezvous: format!("10.77.0.1:{}", 7720 + test),
                device: "verbs:r0",
            },
            _ => {
                let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
                let rendezvous = free.expect("there is a free port").to_string();
                Hosts { ranks: vec![0, 1], rendezvous, device: "software" }
            }
        }
    }

    /// Runs an example. Returns what its ranks here have printed.
    fn run(&self, example: &str, arguments: &[&str]) -> String {
        let program = example_path(example);
        let start = |rank: &u32| -> (u32, Child) {
            let child = Command::new(&program)
                .args(arguments)
                .env("CROSSTIE_RANK", rank.to_string())
                .env("CROSSTIE_SIZE", "2")
                .env("CROSSTIE_RENDEZVOUS", &self.rendezvous)
                .env("CROSSTIE_SECRET", "a secret of these two hosts")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            (
                *rank,
                child.unwrap_or_else(|error| {
                    panic!("{}: {error}: build it with cargo build --examples", program.display())
                }),
            )
        };
        let (done, is_done) = channel();
        for (rank, child) in self.ranks.iter().map(start) {
            let done = done.clone();
            std::thread::spawn(move || done.send((rank, child.wait_with_output())));
        }
        let mut printed = String::new();
        for _ in &self.ranks {
            let (rank, output) = is_done.recv_timeout(TIMEOUT).expect("the example exits");
            let Output { status, stdout, stderr } = output.expect("the output can be read");
            assert!(
                status.success(),
                "{example}, rank {rank}: {status}: {}",
                String::from_utf8_lossy(&stderr)
            );
            printed += &String::from_utf8_lossy(&stdout);
        }
        print!("{printed}");
        printed
    }

    fn has(&self, rank: u32) -> bool {
        self.ranks.contains(&rank)
    }
}

/// The path of an example's program.
fn example_path(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    let profile = test.parent().and_then(|deps| deps.parent()).expect("test programs are in PROFILE/deps");
    profile.join("examples").join(name)
}

#[test]
fn fetch_reads_a_buffer_of_the_other_process() {
    let hosts = Hosts::find(0);
    // Not a multiple of anything.
    let printed = hosts.run("endpoint_fetch", &[hosts.device, "1234567"]);
    assert!(!hosts.has(1) || printed.contains("read 1234567 bytes"), "{printed}");
}

#[test]
fn file_copy_copies_all_bytes_of_a_file() {
    let hosts = Hosts::find(1);
    let folder = std::env::temp_dir().join(format!("crosstie-examples-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, target) = (folder.join("source"), folder.join("target"));
    // Three chunks, the last one short.
    let bytes: Vec<u8> = (0..(2 << 20) + 777u32).map(|at| (at % 253) as u8).collect();
    std::fs::write(&source, &bytes).unwrap();
    hosts.run("endpoint_file_copy", &[source.to_str().unwrap(), target.to_str().unwrap(), hosts.device]);
    if hosts.has(1) {
        assert!(std::fs::read(&target).unwrap() == bytes, "the copy differs");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn kv_cache_hands_all_layers_over() {
    let hosts = Hosts::find(2);
    let printed = hosts.run("endpoint_kv_cache", &[hosts.device, "2", "8", "16"]);
    assert!(!hosts.has(0) || printed.contains("128 blocks of 16384 bytes in 8 layers"), "{printed}");
    assert!(!hosts.has(1) || printed.contains("all blocks of all layers are right"), "{printed}");
}
