//! Jobs under mpirun. They need OpenMPI's mpirun: `apt-get install openmpi-bin libopenmpi-dev libclang-dev`.
//!
//! As in `bootstrap_processes.rs`, the ranks run this same test program: the test `run_as_rank` runs the code of the role
//! that `CROSSTIE_TEST_ROLE` names.

mod bootstrap_suite;

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use bootstrap_suite::run_all_operations;
use crosstie::bootstrap::{self, Bootstrap, Error, Limits, Operation, mpi::Mpi};

const ROLE: &str = "CROSSTIE_TEST_ROLE";
const ARGUMENTS: [&str; 5] = ["run_as_rank", "--exact", "--quiet", "--nocapture", "--test-threads=1"];

#[test]
fn run_as_rank() {
    let role = std::env::var(ROLE).unwrap_or_default();
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
            println!("all operations done as {} of {}", job.rank(), job.size());
            job.finish().expect("finish");
        }
        "killed" => {
            let mut job = bootstrap::from_env().expect("join");
            job.barrier().expect("barrier");
            if job.rank() == 1 {
                std::process::abort();
            }
            job.barrier().expect_err("rank 1 has died");
            println!("survived");
        }
        "late" => {
            let limits = Limits { operation_timeout: Duration::from_millis(500), ..Limits::default() };
            let mut job = Mpi::join(limits).expect("join");
            if job.rank() == 1 {
                std::thread::sleep(Duration::from_secs(5));
            } else {
                let error = job.barrier().expect_err("rank 1 is late");
                assert_eq!(
                    error,
                    Error::Timeout { during: Operation::Barrier, waited: limits.operation_timeout }
                );
                assert_eq!(job.barrier(), Err(error));
                println!("timed out");
            }
        }
        "mismatch" => {
            let mut job = bootstrap::from_env().expect("join");
            let result = if job.rank() == 1 { job.sum(&[1]).map(drop) } else { job.barrier() };
            let (rank, called, other_rank, other_called) = (1, Operation::Sum, 0, Operation::Barrier);
            assert_eq!(result, Err(Error::OperationMismatch { rank, called, other_rank, other_called }));
            println!("mismatch");
        }
        "overflow" => {
            let mut job = bootstrap::from_env().expect("join");
            assert_eq!(job.sum(&[1, u64::MAX]), Err(Error::Overflow { index: 1 }));
            println!("overflowed");
        }
        "too large" => {
            let limits = Limits { max_message: 1000, ..Limits::default() };
            let mut job = Mpi::join(limits).expect("join");
            // Each rank sends little, but rank 1 would receive too much.
            let result = job.exchange(&[Vec::new(), vec![0; 600]]);
            assert!(matches!(result, Err(Error::TooLarge { bytes: 1200, limit: 1000, .. })), "{result:?}");
            println!("too large");
        }
        unknown => panic!("unknown role {unknown}"),
    }
}

/// Runs `ranks` copies of a program under mpirun and returns their output. mpirun kills them after 60 s.
fn mpirun(ranks: u32, variables: &[(&str, &str)], program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--timeout", "60", "-n", &ranks.to_string()]);
    command.arg(program).args(arguments).envs(variables.iter().copied());
    match command.output() {
        Ok(output) => output,
        Err(error) => panic!("cannot start mpirun ({error}): run apt-get install openmpi-bin"),
    }
}

fn run_role_under_mpirun(ranks: u32, role: &str) -> Output {
    let program = std::env::current_exe().expect("own path");
    mpirun(ranks, &[(ROLE, role)], &program, &ARGUMENTS)
}

/// Fails unless the job succeeded and every one of `ranks` ranks printed `line`.
fn assert_all_print(output: &Output, ranks: usize, line: &str) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text.lines().filter(|printed| printed.contains(line)).count(), ranks, "{output:?}");
}

/// Builds the example with MPI, into this test's target folder and profile, and returns its path.
fn build_hello() -> PathBuf {
    let own = std::env::current_exe().expect("own path");
    let profile_folder = own.parent().and_then(Path::parent).expect("target/PROFILE/deps");
    let profile = profile_folder.file_name().and_then(|name| name.to_str()).expect("a profile");
    let profile = if profile == "debug" { "dev" } else { profile };
    let status = Command::new(env!("CARGO"))
        .args([
            "build",
            "--quiet",
            "--package",
            "crosstie",
            "--features",
            "mpi",
            "--example",
            "bootstrap_hello",
        ])
        .args(["--profile", profile, "--target-dir"])
        .arg(profile_folder.parent().expect("target"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo starts");
    assert!(status.success(), "cargo build: {status}");
    profile_folder.join("examples/bootstrap_hello")
}

#[test]
fn hello_example_runs_under_mpirun() {
    let program = build_hello();
    let output = mpirun(2, &[], &program, &[]);
    assert_all_print(&output, 2, "of 2: the ranks add up to 1, 2 processes");
    assert_all_print(&output, 1, "rank 1 of 2");

    // The same program with mpirun's variables, but connected over TCP.
    let file = std::env::temp_dir().join(format!("crosstie-test-mpi-secret-{}", std::process::id()));
    std::fs::write(&file, "the secret of this test").expect("secret file");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("mode");
    let free = TcpListener::bind("127.0.0.3:0").expect("listener").local_addr().expect("address");
    let variables = [
        ("CROSSTIE_RENDEZVOUS", free.to_string()),
        ("CROSSTIE_SECRET_FILE", file.to_str().expect("UTF-8").to_owned()),
    ];
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let output = mpirun(3, &variables, &program, &[]);
    std::fs::remove_file(&file).expect("remove");
    assert_all_print(&output, 3, "of 3: the ranks add up to 3, 3 processes");
}

#[test]
fn all_operations_succeed_under_mpirun() {
    for ranks in [1, 2, 3] {
        assert_all_print(
            &run_role_under_mpirun(ranks, "all operations"),
            ranks as usize,
            "all operations done as",
        );
    }
}

#[test]
fn failures_are_reported_on_every_rank() {
    for (role, line) in [("mismatch", "mismatch"), ("overflow", "overflowed"), ("too large", "too large")] {
        assert_all_print(&run_role_under_mpirun(2, role), 2, line);
    }
}

#[test]
fn rank_that_dies_ends_the_job() {
    let output = run_role_under_mpirun(3, "killed");
    assert!(!output.status.success(), "{output:?}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("survived"), "{output:?}");
}

#[test]
fn rank_that_is_late_causes_a_timeout() {
    let output = run_role_under_mpirun(2, "late");
    assert!(String::from_utf8_lossy(&output.stdout).contains("timed out"), "{output:?}");
    assert!(!output.status.success(), "mpirun ends the job: {output:?}");
}
