//! The store from the command line: nodes and clients as a user starts and stops them.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crosstie_kv::sharding::ShardMap;
use crosstie_testkit::fresh_name;
use crosstie_testkit::wait::{TIMEOUT, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const SECRET: &str = "a secret of these tests alone";
/// The longest value, in bytes.
const MAX_VALUE: usize = 1 << 20;

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crosstie"));
    command.env_remove("CROSSTIE_SECRET").env_remove("CROSSTIE_SECRET_FILE");
    command
}

/// Runs `crosstie kv` with these arguments, to its end.
fn kv(words: &[&str]) -> Output {
    program().arg("kv").args(words).output().unwrap()
}

/// The same, with standard input.
fn kv_with_input(words: &[&str], input: &[u8]) -> Output {
    let mut command = program();
    command.arg("kv").args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The program may end before it has read everything.
    child.stdin.take().unwrap().write_all(input).ok();
    child.wait_with_output().unwrap()
}

/// Checks that the command succeeded. Returns its standard output.
#[track_caller]
fn succeeded(output: &Output) -> &[u8] {
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    &output.stdout
}

/// Checks that the command failed with this exit status and one line on standard error. Returns that line.
#[track_caller]
fn failed(output: &Output, status: i32) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(output.stdout.is_empty());
    assert!(text.starts_with("crosstie: ") && text.lines().count() == 1, "not one line: {text}");
    text
}

/// A running node.
struct Node {
    child: Child,
    lines: Receiver<String>,
}

impl Node {
    fn start(name: &str, words: &[&str], secret: Option<&str>) -> Node {
        let mut command = program();
        command.args(["kv", "serve", "--name", name]).args(words).stdout(Stdio::piped());
        if let Some(secret) = secret {
            command.env("CROSSTIE_SECRET", secret);
        }
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok());
        });
        Node { child, lines }
    }

    /// Waits for a line that contains `words`.
    #[track_caller]
    fn expect(&self, words: &str) -> String {
        let deadline = Instant::now() + TIMEOUT;
        let mut before = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => before.push(line),
                Err(_) => panic!("not {words:?} but {before:?}"),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        eventually("the node ends", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A test may end, or fail, while its nodes run.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Addresses with free ports. The ports are below the ephemeral range: other nodes connect to a node that is down again and
/// again, and their outgoing connections must not take its port.
fn addresses(count: usize) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = 20_000 + std::process::id() % 600 * 20;
    let free = |port: &u32| TcpListener::bind(("127.0.0.1", *port as u16)).is_ok();
    let ports = std::iter::repeat_with(|| first + NEXT.fetch_add(1, Relaxed)).filter(free);
    ports.take(count).map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",")
}

#[test]
fn one_node_executes_all_operations() {
    let name = fresh_name("cli-one");
    let mut node = Node::start(&name, &["--daemons", "2"], None);
    let ready = node.expect("ready");
    assert!(ready.contains(&name) && ready.contains("2 daemons"), "{ready}");
    let run = |words: &[&str]| kv(&[words, &["--name", &name]].concat());

    succeeded(&run(&["put", "greeting", "hello"]));
    assert_eq!(
        succeeded(&run(&["get", "greeting"])),
        b"hello",
        "without a line end: the output is not a terminal"
    );
    succeeded(&run(&["cas", "greeting", "hello", "good day"]));
    assert!(failed(&run(&["cas", "greeting", "hello", "good night"]), 1).contains("expected value"));
    assert_eq!(succeeded(&run(&["get", "greeting"])), b"good day");
    succeeded(&run(&["del", "greeting"]));
    for gone in [["get", "greeting"], ["del", "greeting"]] {
        assert!(failed(&run(&gone), 1).contains("no such key"));
    }
    assert!(failed(&run(&["cas", "greeting", "a", "b"]), 1).contains("no such key"));
    succeeded(&run(&["put", "empty", ""]));
    assert_eq!(succeeded(&run(&["get", "empty"])), b"");

    // Numeric keys live in a separate keyspace.
    succeeded(&run(&["put", "--word", "7", "0xff"]));
    assert_eq!(succeeded(&run(&["get", "--word", "7"])), b"255\n");
    failed(&run(&["get", "7"]), 1);
    succeeded(&run(&["cas", "--word", "7", "255", "256"]));
    assert!(failed(&run(&["cas", "--word", "7", "255", "257"]), 1).contains("expected value"));
    succeeded(&run(&["del", "--word", "0x7"]));
    failed(&run(&["get", "--word", "7"]), 1);

    // The longest value, with all byte values in it, and one that is longer.
    let long: Vec<u8> = (0..MAX_VALUE as u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 23) as u8).collect();
    let put = ["put", "long", "--value-file", "-", "--name", &name];
    succeeded(&kv_with_input(&put, &long));
    assert!(succeeded(&run(&["get", "long"])) == long, "other bytes came back");
    assert!(failed(&kv_with_input(&put, &[&long[..], b"x"].concat()), 1).contains("1048576"));
    let file = std::env::temp_dir().join(format!("{name}.value"));
    std::fs::write(&file, b"\0of a file\n").unwrap();
    succeeded(&run(&["put", "file", "--value-file", file.to_str().unwrap()]));
    std::fs::remove_file(&file).unwrap();
    assert_eq!(succeeded(&run(&["get", "file"])), b"\0of a file\n");
    assert!(failed(&run(&["put", "file", "--value-file", "/there/is/none"]), 1).contains("/there/is/none"));

    let figures: Value = serde_json::from_slice(succeeded(&run(&["stats", "--json"]))).unwrap();
    let daemons = figures["nodes"][0]["daemons"].as_array().unwrap();
    let sum = |what: &str| daemons.iter().map(|daemon| daemon[what].as_u64().unwrap()).sum::<u64>();
    assert_eq!((daemons.len(), sum("strings"), sum("words")), (2, 3, 0));
    assert!(sum("bytes") > 1 << 20 && sum("bytes") < sum("limit"));
    assert_eq!((sum("gets"), sum("hits"), sum("puts"), sum("swaps")), (9, 6, 5, 5));
    let table = String::from_utf8(succeeded(&run(&["stats"])).to_vec()).unwrap();
    assert_eq!(table.lines().count(), 3, "{table}");

    // The name is taken while it runs, and free when it has stopped.
    assert!(failed(&run(&["serve"]), 1).contains("has the name"));
    node.signal(Signal::TERM);
    assert!(node.wait().success());
    node.expect("stopped");
    assert!(failed(&run(&["get", "empty"]), 1).contains("crosstie kv serve"));
    let mut again = Node::start(&name, &[], None);
    again.expect("ready");
    failed(&run(&["get", "empty"]), 1);
    again.signal(Signal::INT);
    assert!(again.wait().success());
}

/// Commands on a stopped node fail after the timeout, and succeed when the node continues.
#[test]
fn commands_on_a_stopped_node_time_out() {
    let name = fresh_name("cli-stopped");
    let node = Node::start(&name, &[], None);
    node.expect("ready");
    succeeded(&kv(&["put", "key", "value", "--name", &name]));
    node.signal(Signal::STOP);
    let late = ["--name", &name, "--timeout", "0.3"];
    let commands: [&[&str]; 6] = [
        &["get", "key"],
        &["put", "key", "other"],
        &["del", "key"],
        &["cas", "key", "a", "b"],
        &["put", "--word", "1", "2"],
        &["stats"],
    ];
    for words in commands {
        let text = failed(&kv(&[words, &late].concat()), 1);
        assert!(text.contains("did not answer within 300ms") && text.contains("stopped"), "{text}");
    }
    node.signal(Signal::CONT);
    assert_eq!(
        succeeded(&kv(&["get", "key", "--name", &name])),
        b"value",
        "no command that timed out had connected"
    );
    let wrong = kv(&["get", "key", "--name", &name, "--timeout", "0"]);
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn daemons_wait_as_the_option_says() {
    for wait in ["spin", "adaptive", "park"] {
        let name = fresh_name(wait);
        let node = Node::start(&name, &["--wait", wait], None);
        node.expect("ready");
        succeeded(&kv(&["put", "key", "value", "--name", &name]));
        assert_eq!(succeeded(&kv(&["get", "key", "--name", &name])), b"value");
    }
    failed(&kv(&["serve", "--wait", "patiently"]), 2);
}

#[test]
fn put_beyond_the_memory_limit_fails() {
    let name = fresh_name("cli-memory");
    let node = Node::start(&name, &["--memory", "512KiB"], None);
    node.expect("ready");
    let value = vec![b'x'; 200 << 10];
    let put = |key: &str| kv_with_input(&["put", key, "--value-file", "-", "--name", &name], &value);
    succeeded(&put("first"));
    let text = (0..4).map(|number| put(&format!("more-{number}"))).find(|output| !output.status.success());
    assert!(failed(&text.expect("there is a limit"), 1).contains("memory"));
    assert_eq!(succeeded(&kv(&["get", "first", "--name", &name])), value, "earlier values stay");
}

#[test]
fn more_memory_than_the_machine_has_is_refused() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kibibytes: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    let serve = |memory: &str| {
        // A node that starts would run for ever.
        let mut command = Command::new("timeout");
        command.args([
            "20",
            env!("CARGO_BIN_EXE_crosstie"),
            "kv",
            "serve",
            "--name",
            &fresh_name("cli-huge"),
        ]);
        failed(&command.args(["--memory", memory]).output().unwrap(), 2)
    };
    for (asked, shown) in [("1024TiB".to_owned(), "1024 TiB"), ((kibibytes * 1024 + 1).to_string(), "GiB")] {
        let error = serve(&asked);
        assert!(error.contains("--memory") && error.contains(shown), "{error}");
        assert!(error.contains(" has only "), "{error}");
    }
}

#[test]
fn three_nodes_serve_one_store_and_survive_each_other() {
    for backend in ["meta", "delegation"] {
        let (addresses, name) = (addresses(3), fresh_name(backend));
        let names: Vec<String> = (0..3).map(|rank| format!("{name}-{rank}")).collect();
        let start = |rank: usize| {
            let rank_word = rank.to_string();
            let words = ["--rank", &rank_word, "--nodes", &addresses, "--backend", backend, "--daemons", "2"];
            let node = Node::start(&names[rank], &words, Some(SECRET));
            node.expect("ready");
            node
        };
        let mut nodes: Vec<Node> = (0..3).map(start).collect();
        let shard_map = ShardMap::new(3, 2).unwrap();
        let key_of = |rank: u32| {
            let mut keys = (0..).map(|number| format!("key-{number}"));
            keys.find(|key| shard_map.shard_of_bytes(key.as_bytes()).rank == rank).unwrap()
        };
        let word_of = |rank: u32| {
            (0..)
                .find(|word| shard_map.shard_of_word(*word).rank == rank)
                .map(|word| word.to_string())
                .unwrap()
        };
        nodes[0].expect("rank 1 is up");
        nodes[1].expect("rank 2 is up");
        nodes[2].expect("rank 0 is up");

        // A value is put through one node and read through every node.
        let long = vec![b'v'; MAX_VALUE];
        for rank in 0..3u32 {
            let (key, word) = (key_of(rank), word_of(rank));
            let through = &names[(rank as usize + 1) % 3];
            succeeded(&kv_with_input(&["put", &key, "--value-file", "-", "--name", through], &long));
            succeeded(&kv(&["put", "--word", &word, "5", "--name", through]));
            for name in &names {
                assert_eq!(succeeded(&kv(&["get", &key, "--name", name])), long);
                assert_eq!(succeeded(&kv(&["get", "--word", &word, "--name", name])), b"5\n");
            }
        }

        // One node is killed: only its keys are unavailable.
        nodes.pop().unwrap().kill();
        nodes[0].expect("rank 2 is gone");
        nodes[1].expect("rank 2 is gone");
        let states = |through: &str| {
            let output = kv(&["stats", "--json", "--name", through]);
            let figures: Value = serde_json::from_slice(succeeded(&output)).unwrap();
            let nodes = figures["nodes"].as_array().unwrap();
            nodes.iter().map(|node| node["state"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        for name in &names[..2] {
            assert!(failed(&kv(&["get", &key_of(2), "--name", name]), 1).contains("rank 2"));
            assert!(failed(&kv(&["put", &key_of(2), "x", "--name", name]), 1).contains("gone"));
            assert!(failed(&kv(&["get", "--word", &word_of(2), "--name", name]), 1).contains("rank 2"));
            for rank in 0..2 {
                assert_eq!(succeeded(&kv(&["get", &key_of(rank), "--name", name])), long);
                assert_eq!(succeeded(&kv(&["get", "--word", &word_of(rank), "--name", name])), b"5\n");
            }
            assert_eq!(states(name), ["up", "up", "gone"]);
            let table = String::from_utf8(succeeded(&kv(&["stats", "--name", name])).to_vec()).unwrap();
            assert!(table.lines().nth(5).is_some_and(|line| line.contains("gone")), "{table}");
        }
        failed(&kv(&["get", &key_of(0), "--name", &names[2]]), 1);

        // It comes back empty.
        nodes.push(start(2));
        nodes[0].expect("rank 2 is up");
        nodes[1].expect("rank 2 is up");
        nodes[2].expect("rank 1 is up");
        for name in &names {
            assert!(failed(&kv(&["get", &key_of(2), "--name", name]), 1).contains("no such key"));
        }
        succeeded(&kv(&["put", &key_of(2), "again", "--name", &names[0]]));
        assert_eq!(succeeded(&kv(&["get", &key_of(2), "--name", &names[1]])), b"again");
        assert_eq!(states(&names[1]), ["up", "up", "up"]);

        // One node is stopped by a signal, and the others notice.
        nodes[0].signal(Signal::TERM);
        assert!(nodes[0].wait().success());
        nodes[1].expect("rank 0 is gone");
        nodes[2].expect("rank 0 is gone");
    }
}

#[test]
fn node_with_another_secret_is_refused() {
    let (addresses, name) = (addresses(2), fresh_name("cli-secret"));
    let names = [0, 1].map(|rank| format!("{name}-{rank}"));
    let words = |rank| ["--rank", rank, "--nodes", &addresses];
    let first = Node::start(&names[0], &words("0"), Some(SECRET));
    first.expect("ready");
    let intruder = Node::start(&names[1], &words("1"), Some("not the secret of these tests"));
    intruder.expect("secret");
    assert!(first.expect("refused").contains("another secret"));
    intruder.kill();
    // The secret from a file, which only its owner may read.
    let file = std::env::temp_dir().join(format!("{name}.secret"));
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let with_file = |mode: u32| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let mut command = program();
        command.args(["kv", "serve", "--name", &names[1]]).args(words("1"));
        command.env("CROSSTIE_SECRET_FILE", &file);
        command
    };
    failed(&with_file(0o644).output().unwrap(), 1);
    let mut second = with_file(0o600).stdout(Stdio::null()).spawn().unwrap();
    first.expect("rank 1 is up");
    second.kill().unwrap();
    second.wait().unwrap();
    std::fs::remove_file(&file).unwrap();
    // No secret at all.
    let none = kv(&[&["serve", "--name", &names[1]][..], &words("1")].concat());
    assert!(failed(&none, 1).contains("CROSSTIE_SECRET_FILE"));
}

#[test]
fn program_that_closes_connections_is_not_said_to_have_another_secret() {
    let (addresses, name) = (addresses(2), fresh_name("cli-closes"));
    let (first, second) = addresses.split_once(',').unwrap();
    // Another program at the address of rank 0.
    let listener = TcpListener::bind(first).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let node = Node::start(&name, &["--rank", "1", "--nodes", &addresses], Some(SECRET));
    let line = node.expect("rank 0 is not connected yet");
    assert!(line.contains("closed the connection before the handshake"), "{line}");
    // A program that only looks whether the port is open, then one that sends something else.
    let port_check = TcpStream::connect(second).unwrap();
    drop(port_check);
    std::thread::sleep(Duration::from_millis(300));
    let mut other_program = TcpStream::connect(second).unwrap();
    other_program.write_all(&[1; 200]).unwrap();
    assert!(node.expect("refused").contains("(1 so far)"), "the port check was counted");
}

#[test]
fn invalid_command_lines_exit_with_status_2() {
    for words in [
        &["put"][..],
        &["put", "key"],
        &["put", "key", "value", "--value-file", "-"],
        &["put", "--word", "key", "1"],
        &["put", "--word", "1", "-1"],
        &["get"],
        &["get", "--word", "one"],
        &["del", "a", "b"],
        &["cas", "key", "expected"],
        &["stats", "--yaml"],
        &["serve", "--memory", "1GB"],
        &["serve", "--memory", "0"],
        &["serve", "--daemons", "0"],
        &["serve", "--daemons", "65"],
        &["serve", "--max-clients", "0"],
        &["serve", "--queue-depth", "1000000"],
        &["serve", "--backend", "fastest"],
        &["serve", "--device", "abacus"],
        &["serve", "--name", ""],
        &["serve", "--name", "a b"],
        &["get", "--name", "ä", "key"],
        &["serve", "--cores", "1-0"],
        &["serve", "--rank", "0", "--nodes", "127.0.0.1:1,127.0.0.1:1"],
        &["serve", "--rank", "0"],
        &["serve", "--nodes", "127.0.0.1:1,127.0.0.1:2"],
        &["serve", "--rank", "2", "--nodes", "127.0.0.1:1,127.0.0.1:2"],
        &["serve", "--rank", "0", "--nodes", "127.0.0.1,127.0.0.1:2"],
        &["restart"],
    ] {
        let output = kv(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        failed(&output, 2);
    }
    for option in ["--daemons", "--max-clients", "--queue-depth", "--memory", "--name"] {
        let value = if option == "--name" { "a b" } else { "0" };
        let error = failed(&kv(&["serve", option, value]), 2);
        assert!(error.contains(option), "{error}");
    }
}

#[test]
fn error_names_an_address_that_is_in_use() {
    let addresses = addresses(2);
    let (first, _) = addresses.split_once(',').unwrap();
    let _taken = TcpListener::bind(first).unwrap();
    let mut command = program();
    command.args(["kv", "serve", "--name", &fresh_name("cli-taken"), "--rank", "0", "--nodes", &addresses]);
    let output = command.env("CROSSTIE_SECRET", SECRET).output().unwrap();
    let error = failed(&output, 1);
    assert!(error.contains(first) && error.contains("stop the program that uses this port"), "{error}");
}
