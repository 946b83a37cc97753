//! Child processes of a test: the same program, in a role that an environment variable names.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use crosstie::bootstrap::Secret;
use crosstie_kv::Backend;
use crosstie_kv::node::{Membership, Node, NodeConfig};

use super::TIMEOUT;

/// The variable with the role. The test `child_process_entry` of each program plays it.
pub(crate) const ROLE: &str = "CROSSTIE_KV_ROLE";

/// The secret of clusters with nodes in child processes.
pub(crate) const SECRET: &str = "a secret of this test alone";

/// Runs a node until its standard input ends.
pub(crate) fn serve(name: &str, rank: u32, backend: &str, addresses: &str) {
    let addresses: Vec<SocketAddr> = addresses.split(',').map(|address| address.parse().unwrap()).collect();
    let backend = if backend == "Meta" { Backend::Meta } else { Backend::Delegation };
    let config = NodeConfig { daemons: 2, backend, ..NodeConfig::member(name, rank, addresses.len() as u32) };
    // A socket of the node's predecessor may linger.
    let begun = Instant::now();
    let listener = loop {
        match TcpListener::bind(addresses[rank as usize]) {
            Ok(listener) => break listener,
            Err(error) => assert!(begun.elapsed() < TIMEOUT, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut secret = String::new();
    std::io::stdin().read_line(&mut secret).unwrap();
    let secret = Secret::new(secret.trim()).unwrap();
    let node = Node::join(&config, Membership { listener, addresses, secret }).unwrap();
    node.wait_for_peers(TIMEOUT).unwrap();
    eprintln!("serving");
    std::io::stdin().read_to_string(&mut String::new()).unwrap();
    node.stop().unwrap();
}

/// A child process. It is killed when it is dropped.
pub(crate) struct ChildProcess {
    pub(crate) child: Child,
    /// `None` once a test has taken it to read it itself.
    pub(crate) output: Option<BufReader<ChildStderr>>,
    pub(crate) input: Option<ChildStdin>,
}

impl ChildProcess {
    pub(crate) fn start(role: &str) -> ChildProcess {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process_entry", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.stderr.take().map(BufReader::new);
        let input = child.stdin.take();
        ChildProcess { child, output, input }
    }

    /// Starts a node of a cluster whose nodes all have [`SECRET`]. It serves when all of them are connected, see [`serve`].
    pub(crate) fn node(name: &str, rank: u32, backend: Backend, addresses: &[SocketAddr]) -> ChildProcess {
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let mut node =
            ChildProcess::start(&format!("node {name}-{rank} {rank} {backend:?} {}", addresses.join(",")));
        writeln!(node.input.as_mut().unwrap(), "{SECRET}").unwrap();
        node
    }

    /// The next line that it prints.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.as_mut().unwrap().read_line(&mut line).unwrap();
        line
    }

    pub(crate) fn expect(&mut self, expected: &str) {
        let mut line = self.line();
        if line.trim() != expected {
            self.output.as_mut().unwrap().read_to_string(&mut line).unwrap();
            panic!("not {expected:?} but: {line}");
        }
    }

    pub(crate) fn join(mut self) {
        self.input = None;
        let mut rest = String::new();
        self.output.as_mut().unwrap().read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "the child process failed:\n{rest}");
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // A test may end, or fail, while its children run.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Waits until `done` returns true. Fails with `what` after [`TIMEOUT`].
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
