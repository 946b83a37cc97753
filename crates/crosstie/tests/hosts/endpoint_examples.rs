//! The examples of endpoints, in two processes: `endpoint_fetch`, `endpoint_file_copy` and `endpoint_kv_cache`.
//!
//! In a virtual machine of `cargo xtask vm --hosts 2`, this process starts one rank, on Soft-RoCE; the same test in the other virtual
//! machine starts the other rank. Elsewhere it starts both ranks, on the software device.

use std::process::Output;

use crosstie_testkit::hosts::{Hosts, example_path, wait_for_exit};

/// The first port of the rendezvous of these tests.
const PORT: u16 = 7720;

/// Runs an example. Returns what its ranks here have printed.
fn run(hosts: &Hosts, example: &str, arguments: &[&str]) -> String {
    let mut printed = String::new();
    for (rank, output) in wait_for_exit(hosts.start(&example_path(example), |_| arguments)) {
        let Output { status, stdout, stderr } = output;
        assert!(status.success(), "{example}, rank {rank}: {status}: {}", String::from_utf8_lossy(&stderr));
        printed += &String::from_utf8_lossy(&stdout);
    }
    print!("{printed}");
    printed
}

#[test]
fn fetch_reads_a_buffer_of_the_other_process() {
    let hosts = Hosts::find(PORT);
    // Not a multiple of anything.
    let printed = run(&hosts, "endpoint_fetch", &[hosts.device, "1234567"]);
    assert!(!hosts.ranks.contains(&1) || printed.contains("read 1234567 bytes"), "{printed}");
}

#[test]
fn file_copy_copies_all_bytes_of_a_file() {
    let hosts = Hosts::find(PORT + 1);
    let folder = std::env::temp_dir().join(format!("crosstie-examples-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, target) = (folder.join("source"), folder.join("target"));
    // Three chunks, the last one short.
    let bytes: Vec<u8> = (0..(2 << 20) + 777u32).map(|at| (at % 253) as u8).collect();
    std::fs::write(&source, &bytes).unwrap();
    run(&hosts, "endpoint_file_copy", &[source.to_str().unwrap(), target.to_str().unwrap(), hosts.device]);
    if hosts.ranks.contains(&1) {
        assert!(std::fs::read(&target).unwrap() == bytes, "the copy differs");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn kv_cache_hands_all_layers_over() {
    let hosts = Hosts::find(PORT + 2);
    let printed = run(&hosts, "endpoint_kv_cache", &[hosts.device, "2", "8", "16"]);
    assert!(
        !hosts.ranks.contains(&0) || printed.contains("128 blocks of 16384 bytes in 8 layers"),
        "{printed}"
    );
    assert!(!hosts.ranks.contains(&1) || printed.contains("all blocks of all layers are right"), "{printed}");
}
