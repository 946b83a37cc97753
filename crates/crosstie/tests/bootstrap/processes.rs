//! Jobs of real processes: ranks that are spawned, that are killed, that quit, or that were never spawned by the job.
//!
//! The ranks run this same test program: the test `run_as_rank` runs the code of the role that is its task. Without a task it is the only rank
//! of a job.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crosstie::bootstrap::{self, Bootstrap, Error, Limits, Secret, local, tcp};
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::wait::eventually;

use super::suite::run_all_operations;

const SECRET: &str = "the secret of this test";
const ARGUMENTS: [&str; 5] =
    ["processes::run_as_rank", "--exact", "--quiet", "--nocapture", "--test-threads=1"];
/// Longer than any step of a test takes: a step that takes this long counts as hung.
const HANG: Duration = Duration::from_secs(60);

#[test]
fn run_as_rank() {
    let role = child::task().unwrap_or_default();
    run_role(&role);
    if !role.is_empty() {
        // Exit here: the harness would print another result line after those of the test that started this process.
        std::process::exit(0);
    }
}

fn run_role(role: &str) {
    match role {
        "" | "all operations" => {
            let mut job = bootstrap::from_env().expect("join");
            run_all_operations(&mut *job);
            report(format!("all operations done as {} of {}", job.rank(), job.size()));
            job.finish().expect("finish");
        }
        "join" => match bootstrap::from_env() {
            Ok(job) => report(format!("joined as {}", job.rank())),
            Err(error) => report(format!("error {error:?}")),
        },
        "wait" => {
            let mut job = bootstrap::from_env().expect("join");
            report("joined");
            report(format!("barrier {:?}", job.barrier()));
        }
        "sleep" => {
            let job = bootstrap::from_env().expect("join");
            report("joined");
            std::thread::sleep(2 * HANG);
            drop(job);
        }
        // A program that a rank starts must not inherit the rank's connection and keep it open.
        "sleep with child" => {
            let job = bootstrap::from_env().expect("join");
            let mut child = Command::new("sleep")
                .arg("20")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("sleep");
            let listing = Command::new("ls").args(["-l", "/proc/self/fd"]).output().expect("ls");
            assert!(!String::from_utf8_lossy(&listing.stdout).contains("socket:"), "{listing:?}");
            report("joined");
            child.wait().expect("wait");
            drop(job);
        }
        "spawner" => {
            let mut job = job_builder(3, "report and sleep").start().expect("start");
            let processes = job.all_gather(&std::process::id().to_le_bytes()).expect("all_gather");
            let processes =
                processes.iter().map(|id| u32::from_le_bytes(id[..].try_into().expect("4 bytes")));
            report(format!("processes {:?}", processes.collect::<Vec<_>>()));
            std::thread::sleep(2 * HANG);
            drop(job);
        }
        "report and sleep" => {
            let mut job = bootstrap::from_env().expect("join");
            job.all_gather(&std::process::id().to_le_bytes()).expect("all_gather");
            std::thread::sleep(2 * HANG);
        }
        "rank zero" => {
            let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
            report(format!("address {}", listener.local_addr().expect("address")));
            let job =
                tcp::join_as_rank_zero(listener, 3, &Secret::new(SECRET).expect("secret"), Limits::default());
            report("joined");
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
        unknown => panic!("unknown role {unknown}"),
    }
}

/// Tells the test that started this process.
fn report(text: impl std::fmt::Display) {
    child::write(text.to_string().as_bytes());
}

fn job_builder(size: u32, role: &str) -> local::JobBuilder {
    local::JobBuilder::new(size).arguments(ARGUMENTS).variable(child::TASK, role)
}

/// Starts a process of this program in one role.
fn start_rank(role: &str, variables: &[(&str, &str)]) -> Child {
    Child::spawn(child::command(run_as_rank, role).envs(variables.iter().copied()))
}

fn start_over_tcp(role: &str, rank: u32, size: u32, rendezvous: &str) -> Child {
    let (rank, size) = (rank.to_string(), size.to_string());
    start_rank(
        role,
        &[
            ("CROSSTIE_RANK", &rank),
            ("CROSSTIE_SIZE", &size),
            ("CROSSTIE_RENDEZVOUS", rendezvous),
            ("CROSSTIE_SECRET", SECRET),
        ],
    )
}

#[test]
fn all_operations_between_spawned_processes() {
    for size in [1, 2, 3, 8] {
        let mut job = job_builder(size, "all operations").start().expect("start");
        run_all_operations(&mut job);
        job.finish().expect("all ranks exit with success");
    }
}

#[test]
fn spawned_processes_get_the_secret_neither_in_arguments_nor_in_environment() {
    let mut job = job_builder(3, "local environment").start().expect("start");
    job.finish().expect("all ranks exit with success");
}

#[test]
fn processes_join_over_tcp_by_environment_variables() {
    for size in [2, 3] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        let address = listener.local_addr().expect("address").to_string();
        let ranks: Vec<_> =
            (1..size).map(|rank| start_over_tcp("all operations", rank, size, &address)).collect();
        let secret = Secret::new(SECRET).expect("secret");
        let mut job =
            tcp::join_as_rank_zero(listener, size, &secret, Limits::default()).expect("rank 0 joins");
        run_all_operations(&mut job);
        job.finish().expect("finish");
        ranks.into_iter().for_each(Child::join);
    }
}

#[test]
fn processes_join_over_tcp_by_launcher_variables_and_a_secret_file() {
    let file = std::env::temp_dir().join(format!("crosstie-test-secret-{}", std::process::id()));
    std::fs::write(&file, format!("{SECRET}\n")).expect("secret file");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("mode");
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = listener.local_addr().expect("address").to_string();
    let path = file.to_str().expect("UTF-8").to_owned();
    let rendezvous = [("CROSSTIE_RENDEZVOUS", address.as_str()), ("CROSSTIE_SECRET_FILE", path.as_str())];
    let launchers = [
        [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")],
        [("PMI_RANK", "2"), ("PMI_SIZE", "4")],
        [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4")],
    ];
    let ranks =
        launchers.map(|launcher| start_rank("all operations", &[&rendezvous[..], &launcher].concat()));
    let secret = Secret::new(SECRET).expect("secret");
    let mut job = tcp::join_as_rank_zero(listener, 4, &secret, Limits::default()).expect("rank 0 joins");
    run_all_operations(&mut job);
    job.finish().expect("finish");
    ranks.into_iter().for_each(Child::join);
    std::fs::remove_file(&file).expect("remove");
}

#[test]
fn rank_killed_while_others_wait_is_named_to_every_other_rank() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let address = listener.local_addr().expect("address").to_string();
    let mut waiting: Vec<_> = [1, 2].map(|rank| start_over_tcp("wait", rank, 4, &address)).into();
    let mut victim = start_over_tcp("sleep with child", 3, 4, &address);
    // Far longer than the test: a rank that detects the death only by this timeout fails the test.
    let limits = Limits { operation_timeout: 10 * HANG, ..Limits::default() };
    let mut job = tcp::join_as_rank_zero(listener, 4, &Secret::new(SECRET).expect("secret"), limits)
        .expect("rank 0 joins");
    waiting.iter_mut().for_each(|rank| assert_eq!(rank.read_text(), "joined"));
    assert_eq!(victim.read_text(), "joined");
    let begun = Instant::now();
    let own = std::thread::spawn(move || (job.barrier(), job.barrier()));
    victim.kill();
    let disconnected = Err(Error::RankDisconnected { rank: 3 });
    assert_eq!(own.join().expect("no panic"), (disconnected.clone(), disconnected));
    waiting
        .iter_mut()
        .for_each(|rank| assert_eq!(rank.read_text(), "barrier Err(RankDisconnected { rank: 3 })"));
    assert!(begun.elapsed() < HANG);
}

#[test]
fn rank_zero_killed_while_others_wait_is_named_to_every_other_rank() {
    let mut first = start_rank("rank zero", &[]);
    let text = first.read_text();
    let address = text.strip_prefix("address ").expect("an address");
    let mut waiting: Vec<_> = [1, 2].map(|rank| start_over_tcp("wait", rank, 3, address)).into();
    assert_eq!(first.read_text(), "joined");
    waiting.iter_mut().for_each(|rank| assert_eq!(rank.read_text(), "joined"));
    first.kill();
    waiting
        .iter_mut()
        .for_each(|rank| assert_eq!(rank.read_text(), "barrier Err(RankDisconnected { rank: 0 })"));
}

#[test]
fn spawned_rank_that_quits_is_named_at_once() {
    let limits = Limits { join_timeout: 10 * HANG, ..Limits::default() };
    let begun = Instant::now();
    let error = job_builder(2, "quit").limits(limits).start().expect_err("no job");
    assert_eq!(error, Error::RankDisconnected { rank: 1 });
    assert!(begun.elapsed() < HANG);
}

#[test]
fn spawned_rank_that_fails_is_reported_by_finish() {
    let mut job = job_builder(2, "fail at the end").start().expect("start");
    assert_eq!(job.finish(), Err(Error::ChildFailed { rank: 1, status: "exit status: 3".into() }));
}

#[test]
fn killing_rank_zero_ends_spawned_ranks() {
    let mut first = start_rank("spawner", &[]);
    let text = first.read_text();
    let list = text.strip_prefix("processes [").and_then(|list| list.strip_suffix(']')).expect("a list");
    let processes: Vec<u32> = list.split(", ").map(|id| id.parse().expect("an id")).collect();
    assert_eq!(processes.len(), 3);
    assert!(processes.iter().all(|id| is_running(*id)), "all run before the kill");
    first.kill();
    eventually(format_args!("{processes:?} end after rank 0 died"), || {
        !processes.iter().any(|id| is_running(*id))
    });
}

/// Whether a process exists and is not a zombie.
fn is_running(id: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{id}/stat")) else { return false };
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    !matches!(state, Some('Z' | 'X'))
}

#[test]
fn dropping_rank_zero_ends_spawned_ranks() {
    let mut job = job_builder(3, "report and sleep").start().expect("start");
    let processes = job.all_gather(&std::process::id().to_le_bytes()).expect("all_gather");
    let processes = processes.iter().map(|id| u32::from_le_bytes(id[..].try_into().expect("4 bytes")));
    let spawned: Vec<_> = processes.skip(1).collect();
    drop(job);
    assert!(spawned.iter().all(|id| !is_running(*id)));
}

#[test]
fn local_variables_of_another_process_are_rejected() {
    let variables =
        [("CROSSTIE_LOCAL_RANK", "1"), ("CROSSTIE_LOCAL_SIZE", "2"), ("CROSSTIE_LOCAL_PARENT", "1")];
    let text = start_rank("join", &variables).read_text();
    assert!(text.starts_with("error Configuration") && text.contains("unset CROSSTIE_LOCAL_RANK"), "{text}");
    // The right parent, but standard input is not a connection to it.
    let parent = std::process::id().to_string();
    let variables = [variables[0], variables[1], ("CROSSTIE_LOCAL_PARENT", parent.as_str())];
    let text = start_rank("join", &variables).read_text();
    assert!(text.starts_with("error Configuration") && text.contains("standard input"), "{text}");
}

#[test]
fn process_without_a_job_is_a_single_rank() {
    assert_eq!(start_rank("join", &[]).read_text(), "joined as 0");
}

#[test]
fn error_does_not_contain_the_secret() {
    let variables = [
        ("CROSSTIE_RANK", "1"),
        ("CROSSTIE_SIZE", "2"),
        ("CROSSTIE_RENDEZVOUS", "127.0.0.1:1"),
        ("CROSSTIE_SECRET", SECRET),
        ("CROSSTIE_JOIN_SECONDS", "1"),
    ];
    let text = start_rank("join", &variables).read_text();
    assert!(text.starts_with("error RankMissing { ranks: [0]"), "{text}");
    assert!(!text.contains(SECRET));
}
