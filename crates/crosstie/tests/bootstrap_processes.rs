//! Jobs of real processes: ranks that are spawned, killed, or never what they should be.
//!
//! The ranks run this same test program: the test `as_a_rank` plays the role that `CROSSTIE_TEST_ROLE` names. Without
//! a role it is the rank of a job of one.

mod bootstrap_suite;

use std::io::{BufRead, BufReader, Lines};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use bootstrap_suite::exercise;
use crosstie::bootstrap::{self, Bootstrap, Error, Limits, Secret, local, tcp};

const ROLE: &str = "CROSSTIE_TEST_ROLE";
const SECRET: &str = "the secret of this test";
const ARGUMENTS: [&str; 5] = ["as_a_rank", "--exact", "--quiet", "--nocapture", "--test-threads=1"];
/// Longer than anything here takes, shorter than anybody's patience.
const HANG: Duration = Duration::from_secs(60);

#[test]
fn as_a_rank() {
    let role = std::env::var(ROLE).unwrap_or_default();
    play(&role);
    if !role.is_empty() {
        // Before the harness adds a result of its own to those of the test that started this process.
        std::process::exit(0);
    }
}

fn play(role: &str) {
    match role {
        "" | "exercise" => {
            let mut job = bootstrap::from_env().expect("join");
            exercise(&mut *job);
            say(format!("exercised as {} of {}", job.rank(), job.size()));
            job.finish().expect("finish");
        }
        "join" => match bootstrap::from_env() {
            Ok(job) => say(format!("joined as {}", job.rank())),
            Err(error) => say(format!("error {error:?}")),
        },
        "wait" => {
            let mut job = bootstrap::from_env().expect("join");
            say("joined");
            say(format!("barrier {:?}", job.barrier()));
        }
        "sleep" => {
            let job = bootstrap::from_env().expect("join");
            say("joined");
            std::thread::sleep(2 * HANG);
            drop(job);
        }
        // A program started from a rank must not keep the rank's connection alive.
        "sleep with company" => {
            let job = bootstrap::from_env().expect("join");
            let mut company = Command::new("sleep")
                .arg("20")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("sleep");
            let listing = Command::new("ls").args(["-l", "/proc/self/fd"]).output().expect("ls");
            assert!(!String::from_utf8_lossy(&listing.stdout).contains("socket:"), "{listing:?}");
            say("joined");
            company.wait().expect("wait");
            drop(job);
        }
        "launcher" => {
            let mut job = launch(3, "report and sleep").start().expect("launch");
            let processes = job.all_gather(&std::process::id().to_le_bytes()).expect("all_gather");
            let processes =
                processes.iter().map(|id| u32::from_le_bytes(id[..].try_into().expect("4 bytes")));
            say(format!("processes {:?}", processes.collect::<Vec<_>>()));
            std::thread::sleep(2 * HANG);
            drop(job);
        }
        "report and sleep" => {
            let mut job = bootstrap::from_env().expect("join");
            job.all_gather(&std::process::id().to_le_bytes()).expect("all_gather");
            std::thread::sleep(2 * HANG);
        }
        "lead" => {
            let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
            say(format!("address {}", listener.local_addr().expect("address")));
            let job = tcp::join_as_rank_zero(listener, 3, &Secret::new(SECRET).expect("secret"), Limits::default());
            say("joined");
            std::thread::sleep(2 * HANG);
            drop(job);
        }
        "local environment" => {
            let mut job = bootstrap::from_env().expect("join");
            let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
            let mut ours: Vec<_> = names.filter(|name| name.starts_with("CROSSTIE_LOCAL")).collect();
            ours.sort();
            assert_eq!(ours, ["CROSSTIE_LOCAL_PARENT", "CROSSTIE_LOCAL_RANK", "CROSSTIE_LOCAL_SIZE"]);
            assert!(std::env::args().skip(1).eq(ARGUMENTS.map(str::to_owned)));
            assert_eq!(std::io::stdin().lines().count(), 0, "standard input is empty");
            assert!(matches!(bootstrap::from_env(), Err(Error::Configuration(_))), "joined twice");
            job.finish().expect("finish");
        }
        "quit" => std::process::exit(0),
        "fail at the end" => {
            bootstrap::from_env().expect("join").finish().expect("finish");
            std::process::exit(3);
        }
        unknown => panic!("no role {unknown}"),
    }
}

/// A line for the test that started this process.
fn say(what: impl std::fmt::Display) {
    // On a line of its own: the harness leaves "test as_a_rank ... " open.
    println!("\nsays: {what}");
}

fn launch(size: u32, role: &str) -> local::JobBuilder {
    local::JobBuilder::new(size).arguments(ARGUMENTS).variable(ROLE, role)
}

/// A process of this program in some role, killed and reaped at the end.
struct Rank {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(role: &str, variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("own path"));
        command.args(ARGUMENTS).env(ROLE, role).envs(variables.iter().copied());
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("start");
        let lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        Rank { process, lines }
    }

    fn over_tcp(role: &str, rank: u32, size: u32, rendezvous: &str) -> Self {
        let (rank, size) = (rank.to_string(), size.to_string());
        Rank::start(
            role,
            &[
                ("CROSSTIE_RANK", &rank),
                ("CROSSTIE_SIZE", &size),
                ("CROSSTIE_RENDEZVOUS", rendezvous),
                ("CROSSTIE_SECRET", SECRET),
            ],
        )
    }

    /// The next thing the process says.
    fn hear(&mut self) -> String {
        for line in self.lines.by_ref() {
            if let Some(said) = line.expect("readable").strip_prefix("says: ") {
                return said.to_owned();
            }
        }
        panic!("the process ended without a word: {:?}", self.process.wait());
    }

    fn kill(&mut self) {
        self.process.kill().expect("kill");
        self.process.wait().expect("wait");
    }

    fn succeeds(mut self) {
        let status = self.process.wait().expect("wait");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

#[test]
fn local_processes() {
    for size in [1, 2, 3, 8] {
        let mut job = launch(size, "exercise").start().expect("launch");
        exercise(&mut job);
        job.finish().expect("all ranks end well");
    }
}

#[test]
fn local_processes_get_no_secret_in_sight() {
    let mut job = launch(3, "local environment").start().expect("launch");
    job.finish().expect("all ranks end well");
}

#[test]
fn tcp_processes_from_the_environment() {
    for size in [2, 3] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        let address = listener.local_addr().expect("address").to_string();
        let ranks: Vec<_> = (1..size).map(|rank| Rank::over_tcp("exercise", rank, size, &address)).collect();
        let secret = Secret::new(SECRET).expect("secret");
        let mut job = tcp::join_as_rank_zero(listener, size, &secret, Limits::default()).expect("lead");
        exercise(&mut job);
        job.finish().expect("finish");
        ranks.into_iter().for_each(Rank::succeeds);
    }
}

#[test]
fn tcp_processes_with_the_variables_of_launchers_and_a_secret_file() {
    let file = std::env::temp_dir().join(format!("crosstie-test-secret-{}", std::process::id()));
    std::fs::write(&file, format!("{SECRET}\n")).expect("secret file");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("mode");
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = listener.local_addr().expect("address").to_string();
    let path = file.to_str().expect("UTF-8").to_owned();
    let met = [("CROSSTIE_RENDEZVOUS", address.as_str()), ("CROSSTIE_SECRET_FILE", path.as_str())];
    let launchers = [
        [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")],
        [("PMI_RANK", "2"), ("PMI_SIZE", "4")],
        [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4")],
    ];
    let ranks = launchers.map(|launcher| Rank::start("exercise", &[&met[..], &launcher].concat()));
    let secret = Secret::new(SECRET).expect("secret");
    let mut job = tcp::join_as_rank_zero(listener, 4, &secret, Limits::default()).expect("lead");
    exercise(&mut job);
    job.finish().expect("finish");
    ranks.into_iter().for_each(Rank::succeeds);
    std::fs::remove_file(&file).expect("remove");
}

#[test]
fn a_rank_killed_while_others_wait_is_named_to_every_survivor() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = listener.local_addr().expect("address").to_string();
    let mut waiting: Vec<_> = [1, 2].map(|rank| Rank::over_tcp("wait", rank, 4, &address)).into();
    let mut victim = Rank::over_tcp("sleep with company", 3, 4, &address);
    // Far longer than the test: a survivor that only noticed by the clock would fail it.
    let limits = Limits { operation_timeout: 10 * HANG, ..Limits::default() };
    let mut job = tcp::join_as_rank_zero(listener, 4, &Secret::new(SECRET).expect("secret"), limits).expect("lead");
    waiting.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
    assert_eq!(victim.hear(), "joined");
    let begun = Instant::now();
    let own = std::thread::spawn(move || (job.barrier(), job.barrier()));
    victim.kill();
    let gone = Err(Error::RankDisconnected { rank: 3 });
    assert_eq!(own.join().expect("no panic"), (gone.clone(), gone));
    waiting.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "barrier Err(RankDisconnected { rank: 3 })"));
    assert!(begun.elapsed() < HANG);
}

#[test]
fn rank_zero_killed_while_others_wait_is_named_to_every_survivor() {
    let mut first = Rank::start("lead", &[]);
    let said = first.hear();
    let address = said.strip_prefix("address ").expect("an address");
    let mut waiting: Vec<_> = [1, 2].map(|rank| Rank::over_tcp("wait", rank, 3, address)).into();
    assert_eq!(first.hear(), "joined");
    waiting.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "joined"));
    first.kill();
    waiting.iter_mut().for_each(|rank| assert_eq!(rank.hear(), "barrier Err(RankDisconnected { rank: 0 })"));
}

#[test]
fn a_spawned_rank_that_quits_is_named_at_once() {
    let limits = Limits { join_timeout: 10 * HANG, ..Limits::default() };
    let begun = Instant::now();
    let error = launch(2, "quit").limits(limits).start().expect_err("no job");
    assert_eq!(error, Error::RankDisconnected { rank: 1 });
    assert!(begun.elapsed() < HANG);
}

#[test]
fn a_spawned_rank_that_fails_is_reported_by_finish() {
    let mut job = launch(2, "fail at the end").start().expect("launch");
    assert_eq!(job.finish(), Err(Error::ChildFailed { rank: 1, status: "exit status: 3".into() }));
}

#[test]
fn spawned_ranks_end_with_rank_zero() {
    let mut first = Rank::start("launcher", &[]);
    let said = first.hear();
    let list = said.strip_prefix("processes [").and_then(|list| list.strip_suffix(']')).expect("a list");
    let processes: Vec<u32> = list.split(", ").map(|id| id.parse().expect("an id")).collect();
    assert_eq!(processes.len(), 3);
    assert!(processes.iter().all(|id| runs(*id)), "all run before the kill");
    first.kill();
    let begun = Instant::now();
    while processes.iter().any(|id| runs(*id)) {
        assert!(begun.elapsed() < HANG, "{processes:?} outlive rank 0");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process exists and is not merely waiting to be reaped.
fn runs(id: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{id}/stat")) else { return false };
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    !matches!(state, Some('Z' | 'X'))
}

#[test]
fn dropping_rank_zero_ends_spawned_ranks() {
    let mut job = launch(3, "report and sleep").start().expect("launch");
    let processes = job.all_gather(&std::process::id().to_le_bytes()).expect("all_gather");
    let processes = processes.iter().map(|id| u32::from_le_bytes(id[..].try_into().expect("4 bytes")));
    let spawned: Vec<_> = processes.skip(1).collect();
    drop(job);
    assert!(spawned.iter().all(|id| !runs(*id)));
}

#[test]
fn marks_of_another_process_are_refused() {
    let marks = [("CROSSTIE_LOCAL_RANK", "1"), ("CROSSTIE_LOCAL_SIZE", "2"), ("CROSSTIE_LOCAL_PARENT", "1")];
    let said = Rank::start("join", &marks).hear();
    assert!(said.starts_with("error Configuration") && said.contains("unset CROSSTIE_LOCAL_RANK"), "{said}");
    // The right parent, but no connection to it.
    let parent = std::process::id().to_string();
    let marks = [marks[0], marks[1], ("CROSSTIE_LOCAL_PARENT", parent.as_str())];
    let said = Rank::start("join", &marks).hear();
    assert!(said.starts_with("error Configuration") && said.contains("standard input"), "{said}");
}

#[test]
fn a_process_without_a_job_is_alone() {
    assert_eq!(Rank::start("join", &[]).hear(), "joined as 0");
}

#[test]
fn the_secret_shows_up_in_no_error() {
    let variables = [
        ("CROSSTIE_RANK", "1"),
        ("CROSSTIE_SIZE", "2"),
        ("CROSSTIE_RENDEZVOUS", "127.0.0.1:1"),
        ("CROSSTIE_SECRET", SECRET),
        ("CROSSTIE_JOIN_SECONDS", "1"),
    ];
    let said = Rank::start("join", &variables).hear();
    assert!(said.starts_with("error RankMissing { ranks: [0]"), "{said}");
    assert!(!said.contains(SECRET));
}
