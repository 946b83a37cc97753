//! The list of all checks. To add one, add a row.

use super::Work::{self, Cargo, Dependencies, Guest, GuestCheck};
use crate::vm;

/// One check, made of one or more pieces of work.
pub(super) struct Step {
    /// What `--only` calls it.
    pub(super) name: &'static str,
    /// What a pass shows.
    pub(super) shows: &'static str,
    /// Debian packages that it needs beyond Rust and a C linker.
    pub(super) packages: &'static [&'static str],
    /// Seconds after which a piece of its work counts as hung.
    pub(super) limit: u64,
    pub(super) work: &'static [Work],
}

const VERBS: &[&str] = &["cmake", "libclang-dev"];
const MPI: &[&str] = &["openmpi-bin", "libopenmpi-dev", "libclang-dev"];
/// mpirun refuses root, and more ranks than cores, unless told.
const MPIRUN: &[(&str, &str)] = &[
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
];

/// In the order in which they run: the quick ones first.
pub(super) const STEPS: &[Step] = &[
    Step {
        name: "format",
        shows: "the sources are as rustfmt writes them",
        packages: &[],
        limit: 60,
        work: &[Cargo {
            arguments: &["fmt", "--all", "--check"],
            variables: &[],
            target: None,
            tests: false,
        }],
    },
    Step {
        name: "dependencies",
        shows: "licences and sources are those deny.toml allows; the default build needs Rust alone",
        packages: &[],
        limit: 300,
        work: &[Dependencies],
    },
    Step {
        name: "lint",
        shows: "clippy finds nothing in the default build",
        packages: &[],
        limit: 600,
        work: &[Cargo {
            arguments: &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
            variables: &[],
            target: None,
            tests: false,
        }],
    },
    Step {
        name: "test",
        shows: "unit, integration and documentation tests pass in the default build",
        packages: &["valgrind"],
        limit: 1200,
        work: &[Cargo {
            arguments: &["test", "--workspace", "--no-fail-fast"],
            variables: &[],
            target: None,
            tests: true,
        }],
    },
    Step {
        name: "docs",
        shows: "the documentation builds without a warning",
        packages: &[],
        limit: 300,
        work: &[Cargo {
            // The program is left out: it has the library's name, and its pages would overwrite the library's.
            arguments: &[
                "doc",
                "--workspace",
                "--exclude=crosstie-cli",
                "--no-deps",
                "--document-private-items",
            ],
            variables: &[("RUSTDOCFLAGS", "-D warnings")],
            target: None,
            tests: false,
        }],
    },
    Step {
        name: "guest",
        shows: "cargo xtask vm keeps its promises: devices, links, statuses, crashes, hangs",
        packages: vm::PACKAGES,
        limit: 600,
        work: &[GuestCheck],
    },
    Step {
        name: "lint-features",
        shows: "clippy finds nothing with every feature on",
        packages: &["cmake", "libclang-dev", "libopenmpi-dev"],
        limit: 600,
        work: &[Cargo {
            arguments: &[
                "clippy",
                "--workspace",
                "--all-targets",
                "--features",
                "crosstie/verbs,crosstie/mpi,crosstie-cli/verbs",
                "--",
                "-D",
                "warnings",
            ],
            variables: &[],
            target: None,
            tests: false,
        }],
    },
    Step {
        name: "loom",
        shows: "ring orderings hold under every interleaving that loom explores",
        packages: &[],
        limit: 600,
        work: &[Cargo {
            arguments: &["test", "--release", "-p", "crosstie", "--lib", "loom_"],
            variables: &[("RUSTFLAGS", "--cfg loom")],
            target: Some("loom"),
            tests: true,
        }],
    },
    Step {
        name: "mpi",
        shows: "bootstrap works under mpirun, and so does the store on its ranks",
        packages: MPI,
        limit: 600,
        work: &[Cargo {
            // The whole workspace, as in `test`: dependencies are built with the same features, so only once.
            arguments: &[
                "test",
                "--workspace",
                "--features",
                "crosstie/mpi,crosstie-cli/mpi",
                "--test",
                "bootstrap_mpi",
                "--test",
                "kv_mpi",
            ],
            variables: MPIRUN,
            target: None,
            tests: true,
        }],
    },
    Step {
        name: "softroce",
        shows: "the device contract and copyrpc hold on kernel Soft-RoCE, in one guest and between two, and so does the store between two",
        packages: VERBS,
        limit: 360,
        work: &[
            Guest {
                test: "conformance",
                hosts: 1,
                arguments: &["--device", "verbs:r0,verbs:r1", "--mode", "threads"],
            },
            Guest {
                test: "conformance",
                hosts: 2,
                arguments: &["--device", "verbs:r0,verbs:r1", "--mode", "hosts"],
            },
            Guest {
                test: "copyrpc",
                hosts: 1,
                arguments: &["--device", "verbs:r0,verbs:r1", "--across", "--mode", "threads"],
            },
            Guest { test: "copyrpc", hosts: 2, arguments: &["--device", "verbs:r0", "--mode", "hosts"] },
            Guest { test: "kv_hosts", hosts: 2, arguments: &["--nocapture"] },
        ],
    },
];
