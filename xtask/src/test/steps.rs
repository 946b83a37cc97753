//! The list of all steps. To add a check, add a step here.

use super::Work::{self, Cargo, Dependencies, Guest, GuestCheck, Soak};
use crate::vm;

/// One check, made of one or more pieces of work.
pub(super) struct Step {
    /// The name that `--only` takes.
    pub(super) name: &'static str,
    /// What is known when the step has passed.
    pub(super) shows: &'static str,
    /// The Debian packages that it needs in addition to Rust and a C linker.
    pub(super) packages: &'static [&'static str],
    /// Seconds after which each piece of its work is killed and counts as failed.
    pub(super) timeout: u64,
    pub(super) work: &'static [Work],
}

/// What the optional features of the packages need.
const OPTIONAL: &[&str] = &["cmake", "libclang-dev", "openmpi-bin", "libopenmpi-dev"];
/// All optional features. The steps that need any of them share one build.
macro_rules! features {
    () => {
        "crosstie/verbs,crosstie/mpi,crosstie-cli/verbs,crosstie-cli/mpi,crosstie-nccl/verbs"
    };
}
pub(super) const FEATURES: &str = features!();
/// Without these variables mpirun refuses to run as root, and refuses more ranks than cores.
const MPIRUN: &[(&str, &str)] = &[
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
];

/// A cargo command that runs tests: its words.
const fn tests(arguments: &'static str) -> Work {
    Cargo { arguments, variables: &[], target: None, tests: true }
}

/// A cargo command that counts as one test: its words.
const fn check(arguments: &'static str) -> Work {
    Cargo { arguments, variables: &[], target: None, tests: false }
}

const FORMAT: Step = Step {
    name: "format",
    shows: "the sources are formatted by rustfmt",
    packages: &[],
    timeout: 60,
    work: &[check("fmt --all --check")],
};

const LINT: Step = Step {
    name: "lint",
    shows: "clippy finds nothing in the default build",
    packages: &[],
    timeout: 1200,
    work: &[check("clippy --workspace --all-targets -- -D warnings")],
};

/// Compiles the library with one of its features alone.
macro_rules! check_feature {
    ($name:literal) => {
        check(concat!("clippy -p crosstie --no-default-features --features ", $name, " -- -D warnings"))
    };
}

/// The steps of `--quick`: a few minutes on two cores when everything is built. They build what the step `test` builds.
pub(super) const QUICK: &[Step] = &[
    FORMAT,
    LINT,
    Step {
        name: "unit",
        shows: "the unit tests of all crates pass",
        packages: &[],
        timeout: 600,
        work: &[tests("test --workspace --lib --bins")],
    },
    Step {
        name: "conformance",
        shows: "the device contract holds on the software device and on the fault device, in threads",
        packages: &[],
        timeout: 600,
        work: &[
            tests("test --workspace --test conformance -- --mode threads"),
            tests("test --workspace --test conformance -- --mode threads --wrapped"),
        ],
    },
    Step {
        name: "suites",
        shows: "the suites of copyrpc and endpoints pass once in threads, and those of the layers without their long cases",
        packages: &[],
        timeout: 600,
        work: &[
            tests("test --workspace --test copyrpc_peers -- --mode threads --wrapped"),
            tests("test --workspace --test endpoint_peers -- --mode threads --wrapped"),
            // Left out: processes that are killed and stopped many times, idle ones, and what needs root or valgrind.
            tests(
                "test --workspace --test=bootstrap --test=copyrpc --test=device --test=endpoint --test=group --test=local_rpc --test=rails -- --skip=kill --skip=stopped --skip=idle --skip=other_user --skip=mapped_peer_memory --skip=costs_the_same",
            ),
        ],
    },
];

/// All steps, in the order in which they run: the short ones first.
pub(super) const STEPS: &[Step] = &[
    FORMAT,
    Step {
        name: "dependencies",
        shows: "deny.toml allows all licences and sources; the default build needs Rust alone",
        packages: &[],
        timeout: 300,
        work: &[Dependencies],
    },
    LINT,
    Step {
        name: "features",
        shows: "each feature of the library compiles alone, without a warning: ipc without the devices",
        packages: &[],
        timeout: 600,
        work: &[
            check_feature!("ipc"),
            check_feature!("rpc"),
            check_feature!("endpoint"),
            check_feature!("rails"),
            check_feature!("group"),
        ],
    },
    Step {
        name: "test",
        shows: "unit, integration and documentation tests pass in the default build",
        packages: &["valgrind"],
        timeout: 3600,
        work: &[tests("test --workspace --no-fail-fast")],
    },
    Step {
        name: "containers",
        shows: "where the kernel refuses access to other processes' memory, as in most containers: device conformance, stopped and killed peers",
        packages: &[],
        timeout: 600,
        work: &[Cargo {
            // The programs of the step before, which need no other build.
            arguments: "test --workspace --no-fail-fast --test conformance --test stopped_peers --test kill",
            variables: &[("CROSSTIE_REFUSE_PROCESS_VM", "1")],
            target: None,
            tests: true,
        }],
    },
    Step {
        name: "soak",
        shows: "random simulations, property tests, kills, faults and fuzz targets pass for a minute, with a seed of the commit",
        packages: &[],
        timeout: 1200,
        work: &[Soak { minutes: 1.0 }],
    },
    Step {
        name: "instructions",
        shows: "operations stay within their limits on instructions, in an optimized build",
        packages: &["valgrind"],
        timeout: 1200,
        work: &[
            tests("test --release -p crosstie --test budget instruction"),
            tests("test --release -p crosstie-kv --lib instruction"),
        ],
    },
    Step {
        name: "docs",
        shows: "the documentation builds without a warning",
        packages: &[],
        timeout: 600,
        work: &[Cargo {
            // Without the program crosstie: its pages would overwrite those of the library, which has the same name.
            arguments: "doc --workspace --exclude=crosstie-cli --no-deps --document-private-items",
            variables: &[("RUSTDOCFLAGS", "-D warnings")],
            target: None,
            tests: false,
        }],
    },
    Step {
        name: "guest",
        shows: "cargo xtask vm works: devices, links, exit statuses, crashes, hangs",
        packages: vm::PACKAGES,
        timeout: 600,
        work: &[GuestCheck],
    },
    Step {
        name: "lint-features",
        shows: "clippy finds nothing with all features",
        packages: OPTIONAL,
        timeout: 1200,
        work: &[check(concat!(
            "clippy --workspace --all-targets --features ",
            features!(),
            " -- -D warnings"
        ))],
    },
    Step {
        name: "loom",
        shows: "the lock-free code is correct under every interleaving that loom explores",
        packages: &[],
        timeout: 1800,
        work: &[Cargo {
            arguments: "test --release -p crosstie -p crosstie-nccl --lib loom_",
            variables: &[("RUSTFLAGS", "--cfg loom")],
            target: Some("loom"),
            tests: true,
        }],
    },
    Step {
        name: "mpi",
        shows: "bootstrap and the store work under mpirun",
        packages: OPTIONAL,
        timeout: 1500,
        work: &[Cargo {
            // With --workspace, as in `test`: the dependencies then have the same features and are not built again.
            arguments: concat!(
                "test --workspace --features ",
                features!(),
                " --test bootstrap_mpi --test kv_mpi"
            ),
            variables: MPIRUN,
            target: None,
            tests: true,
        }],
    },
    Step {
        name: "softroce",
        shows: "device conformance, copyrpc and endpoints pass on kernel Soft-RoCE in one guest and between two, groups in one, and the examples of endpoints, rails and the store between two",
        packages: OPTIONAL,
        timeout: 1800,
        work: &[
            // What needs no device. Without --workspace, with which the unit tests of the other packages were built too.
            tests("test -p crosstie --features verbs,mpi --lib -- verbs::"),
            Guest {
                test: "conformance",
                examples: &[],
                hosts: 1,
                arguments: "--device verbs:r0,verbs:r1 --mode threads",
            },
            Guest {
                test: "conformance",
                examples: &[],
                hosts: 2,
                arguments: "--device verbs:r0,verbs:r1 --mode hosts",
            },
            Guest {
                test: "copyrpc_peers",
                examples: &[],
                hosts: 1,
                arguments: "--device verbs:r0,verbs:r1 --across --mode threads",
            },
            Guest {
                test: "copyrpc_peers",
                examples: &[],
                hosts: 2,
                arguments: "--device verbs:r0 --mode hosts",
            },
            Guest {
                test: "endpoint_peers",
                examples: &[],
                hosts: 1,
                arguments: "--device verbs:r0,verbs:r1 --across --mode threads",
            },
            Guest {
                test: "endpoint_peers",
                examples: &[],
                hosts: 2,
                arguments: "--device verbs:r0 --mode hosts",
            },
            Guest {
                test: "hosts",
                examples: &["endpoint_fetch", "endpoint_file_copy", "endpoint_kv_cache", "rails_two_hosts"],
                hosts: 2,
                arguments: "--test-threads=1 --nocapture endpoint_examples:: rails::",
            },
            Guest {
                test: "hosts",
                examples: &[],
                hosts: 1,
                arguments: "--test-threads=1 --nocapture group::",
            },
            Guest {
                test: "plugin",
                examples: &[],
                hosts: 1,
                arguments: "--devices=verbs:r0+verbs:r1 messages_of_all_sizes groups_of_eight both_directions deregister_aborts destroyed_communicators",
            },
            Guest { test: "kv_hosts", examples: &[], hosts: 2, arguments: "--nocapture" },
        ],
    },
];
