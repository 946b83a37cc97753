//! Two hosts that run the two ranks of a job.
//!
//! In a virtual machine of `cargo xtask vm --hosts 2`, this process starts one rank, on Soft-RoCE; the same test in the other virtual
//! machine starts the other rank. Elsewhere it starts both ranks, on the software device.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// After this long without an exit the test fails: the program hangs. Virtual machines are slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The ranks that this process starts, the address of their rendezvous, and their device.
pub struct Hosts {
    /// Those of this host.
    pub ranks: Vec<u32>,
    /// The device that all ranks use.
    pub device: &'static str,
    /// An address and a port of the first of the two hosts.
    pub rendezvous: String,
}

impl Hosts {
    /// `port`: that of the rendezvous. Each test of a program has its own.
    pub fn find(port: u16) -> Hosts {
        let variable = |name| std::env::var(name).ok();
        let (ranks, device, address) = match (variable("HOST").as_deref(), variable("PEER")) {
            (Some(host @ ("0" | "1")), Some(_)) => {
                (vec![u32::from(host == "1")], "verbs:r0", Ipv4Addr::new(10, 77, 0, 1))
            }
            _ => (vec![0, 1], "software", own_address()),
        };
        Hosts { ranks, device, rendezvous: format!("{address}:{port}") }
    }

    /// Starts a program as each of its ranks, with arguments that depend on the rank.
    pub fn start<'a>(&self, program: &Path, arguments: impl Fn(u32) -> &'a [&'a str]) -> Vec<(u32, Child)> {
        let start = |rank: &u32| {
            let child = Command::new(program)
                .args(arguments(*rank))
                .env("CROSSTIE_RANK", rank.to_string())
                .env("CROSSTIE_SIZE", "2")
                .env("CROSSTIE_RENDEZVOUS", &self.rendezvous)
                .env("CROSSTIE_SECRET", "a secret of these two hosts")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            (*rank, child.unwrap_or_else(|error| panic!("{}: {error}", program.display())))
        };
        self.ranks.iter().map(start).collect()
    }
}

/// An address of the loopback network that only this process uses, so that all its ports are free.
fn own_address() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | high, middle, low)
}

/// The path of an example's program, which `cargo test` has built, or `cargo build --examples`.
pub fn example_path(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    let profile = test.parent().and_then(|deps| deps.parent()).expect("test programs are in PROFILE/deps");
    profile.join("examples").join(name)
}

/// Waits until all exit, at most for the timeout.
pub fn wait_for_exit(children: Vec<(u32, Child)>) -> Vec<(u32, Output)> {
    let (done, is_done) = channel();
    let count = children.len();
    for (rank, child) in children {
        let done = done.clone();
        std::thread::spawn(move || done.send((rank, child.wait_with_output())));
    }
    let outputs = (0..count).map(|_| {
        let (rank, output) = is_done.recv_timeout(TIMEOUT).expect("the program exits");
        (rank, output.expect("the output can be read"))
    });
    outputs.collect()
}
