//! MPI and NCCL, and the search for shared libraries.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Finding;

/// Where the dynamic linkers of common distributions look, and where NVIDIA installs its libraries.
const FOLDERS: [&str; 10] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
];

pub(super) fn findings() -> [Finding; 2] {
    [mpi(), nccl()]
}

fn mpi() -> Finding {
    const NAME: &str = "MPI";
    const PURPOSE: &str = "jobs started by mpirun";
    let version = Command::new("mpirun").arg("--version").output();
    let Ok(version) = version else {
        return Finding::missing(NAME, "no mpirun on PATH")
            .needed_for(PURPOSE)
            .fix("sudo apt-get install openmpi-bin libopenmpi-dev");
    };
    let text = String::from_utf8_lossy(&version.stdout).into_owned();
    let found = text.lines().next().unwrap_or("mpirun of unknown version").trim().to_owned();
    if cfg!(feature = "mpi") {
        return Finding::ok(NAME, found);
    }
    Finding::limited(
        NAME,
        format!("{found}; this build reads the rank from mpirun's variables and does not use MPI itself"),
    )
    .needed_for(PURPOSE)
    .fix("sudo apt-get install libopenmpi-dev libclang-dev, then cargo build --release --features mpi")
}

fn nccl() -> Finding {
    const NAME: &str = "NCCL";
    match find("libnccl.so.2").or_else(|| find("libnccl.so")) {
        Some(path) => Finding::ok(NAME, path.display().to_string()),
        None => Finding::missing(
            NAME,
            "libnccl.so.2 is not in the system's folders; PyTorch's wheels bring their own",
        )
        .needed_for("programs that load the plugin crosstie-nccl and have no NCCL of their own")
        .fix("sudo apt-get install libnccl2 (from NVIDIA's package repository)"),
    }
}

/// The path of a shared library, if it is installed.
pub(super) fn find(name: &str) -> Option<PathBuf> {
    let chosen = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let chosen = env::split_paths(&chosen).filter(|folder| folder.is_absolute());
    chosen
        .chain(FOLDERS.iter().map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|path| Path::exists(path))
}
